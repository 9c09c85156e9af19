"""Shows how a trained agent acts, in a window or as a file.

python -m cleanreplay.watch runs/CartPole-v1__dqn_jax__1__1795189555123456
python -m cleanreplay.watch best.safetensors --output agent.mp4 --episodes 3
"""

import colorsys
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from tqdm import tqdm

from cleanreplay import environments, networks, policies, protocol
from cleanreplay.errors import UsageError
from cleanreplay.flags import check_flag

MOST_FRAMES = 25  # per second of a file
NO_SCREEN = ("dummy", "offscreen")  # drivers of SDL
PIXELS = 300  # smaller pictures are enlarged, up to this height or width
LEAST_WIDTH = 160  # of a picture with a caption


@dataclass(frozen=True)
class Flags:
    """The flags of this program."""

    agent: tyro.conf.Positional[str]  # folder of a run, or file of an agent
    output: str = ""  # file that ends in .gif or .mp4; without it a window, or a GIF
    episodes: int = 1  # number of episodes
    seed: int = 0  # of the first episode; later episodes have the next seeds
    script: str = ""  # file that trained the agent, if it was moved


def watch(flags: Flags) -> list[float]:
    """Shows episodes, prints their returns and returns them."""
    if flags.episodes < 1:
        raise UsageError(f"episodes must be at least 1, not {flags.episodes}")
    check_flag("seed", flags.seed, int)
    loaded = policies.load_agent(flags.agent, flags.script)
    agent, params, run = loaded.agent, loaded.params, loaded.run
    script: Any = loaded.script
    sys.path.append(str(Path(script.__file__).parent))  # for environments beside the script
    output = output_of(flags)
    mode = "rgb_array" if output else "human"
    envs, draw = make_drawn(loaded, mode)
    with closing(envs):
        fps = envs.metadata.get("render_fps", 15)
        every = max(1, round(fps / MOST_FRAMES))
        frames: list = []
        returns = []
        for seed in range(flags.seed, flags.seed + flags.episodes):
            pictures, so_far = play(agent, params, envs, seed, run.eval_max_steps, draw)
            steps = len(pictures) - 1
            tqdm.write(f"seed {seed}: return {so_far[-1]:.2f} in {steps:,} steps")
            if output:
                shown = range(0, len(pictures), every)
                frames += [captioned(pictures[i], caption(i, so_far[i])) for i in shown]
            returns.append(so_far[-1])
    if output:
        write(output, frames, fps / every)
        tqdm.write(str(output))
    return returns


def output_of(flags: Flags) -> Path | None:
    """Returns the file to write, None for a window. UsageError if it cannot be written."""
    agent = Path(flags.agent)
    if flags.output:
        output = Path(flags.output)
    elif any(os.environ.get(x) for x in ("DISPLAY", "WAYLAND_DISPLAY")) or sys.platform != "linux":
        return None
    else:
        output = Path("agent.gif" if agent.is_dir() else f"{agent.stem}.gif")
    if output.suffix not in (".gif", ".mp4"):
        raise UsageError(f"output must end in .gif or .mp4, not {output}")
    if not os.access(output.absolute().parent, os.W_OK):
        raise UsageError(f"output: {output.parent} is no folder that can be written")
    try:
        import moviepy  # noqa: F401  needed to write it
    except ModuleNotFoundError as error:
        raise UsageError(f"output: pip install {error.name}") from error
    return output


def make_drawn(loaded: policies.Loaded, mode: str) -> tuple[Any, Callable]:
    """Returns an environment, and a function that draws it after an observation [1, ...].

    If it does not render, the observation is drawn. UsageError if that is no image.
    """
    agent, script, args, run = loaded.agent, loaded.script, loaded.args, loaded.run
    kwargs = json.dumps(json.loads(run.env_kwargs) | {"render_mode": mode})
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame looks for loudspeakers otherwise
    if mode != "human":
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # and for a screen
    example = agent.example_step.observation
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown render modes
            envs = script.make_envs(args, replace(run, env_kwargs=kwargs, vectorization="sync"), 1)
        if envs.single_observation_space.shape != example.shape:
            raise ValueError(f"when it renders, it observes {envs.single_observation_space}")
        envs.reset()
        if mode == "human":  # each step draws
            check_window()
            return envs, lambda observation: None
        if envs.render()[0] is None:
            raise ValueError("it renders nothing")
        return envs, lambda observation: resized(envs.render()[0])
    except Exception as error:
        if not networks.are_images(jax.ShapeDtypeStruct((1, *example.shape), example.dtype)):
            why = f"{type(error).__name__}: {environments.with_hint(error)}".rstrip(": ")
            text = f"{run.env_id} cannot be drawn: it needs the render mode {mode} ({why})"
            raise UsageError(text) from error
    if mode == "human":
        raise UsageError(
            f"{run.env_id} has no window: --output agent.gif draws what the agent sees"
        )
    tqdm.write(f"{run.env_id} does not render: it is drawn as the agent sees it")
    return script.make_envs(args, run, 1), lambda observation: resized(as_picture(observation))


def check_window() -> None:
    """Raises ValueError if pygame has no screen, about which it is silent."""
    pygame = sys.modules.get("pygame")
    driver = pygame.display.get_driver() if pygame and pygame.display.get_init() else ""
    if driver in NO_SCREEN and driver != os.environ.get("SDL_VIDEODRIVER"):
        raise ValueError("no screen was found: --output agent.gif writes a file")


def play(
    agent: Any, params: Any, envs: Any, seed: int, max_steps: int, draw: Callable
) -> tuple[list, list[float]]:
    """Plays an episode of one environment. Returns pictures, one more than its steps, and the
    return up to each of them.
    """
    act = protocol.policy(agent, params)  # with a new recurrent state
    observation, _ = envs.reset(seed=seed)
    pictures = [draw(observation)]
    returns = [0.0]
    over = False
    while not over and len(pictures) <= max_steps:
        observation = np.asarray(observation, agent.example_step.observation.dtype)
        observation, reward, terminated, truncated, _ = envs.step(act(observation))
        pictures.append(draw(observation))
        returns.append(returns[-1] + float(reward[0]))
        over = bool(terminated[0] or truncated[0])
    return pictures, returns


def as_picture(observation: Any) -> np.ndarray:
    """Converts an observation [1, ...] to a picture [H, W, 3] of the newest frame.

    Grey and coloured images are unchanged. Planes of bool each get a colour, and the last plane
    that is True is on top. Of more channels of uint8, as in stacks, the last is shown in grey.
    """
    x = np.asarray(networks.channels_last(jax.numpy.asarray(observation)))[0]
    if x.dtype == bool:
        hues = np.arange(x.shape[-1]) / x.shape[-1]
        colours = np.array([colorsys.hsv_to_rgb(hue, 0.7, 1.0) for hue in hues])
        last = x.shape[-1] - 1 - x[..., ::-1].argmax(axis=-1)
        return (255 * colours[last] * x.any(axis=-1, keepdims=True)).astype(np.uint8)
    return x if x.shape[-1] == 3 else np.repeat(x[..., -1:], 3, axis=-1)


def resized(picture: Any) -> np.ndarray:
    """Makes the pixels of a small picture [H, W, 3] larger."""
    picture = np.asarray(picture, np.uint8)
    times = max(1, PIXELS // max(picture.shape[:2]))
    return picture.repeat(times, axis=0).repeat(times, axis=1)


def caption(step: int, episodic_return: float) -> str:
    """Returns what is written above the picture after a step."""
    return f"step {step:,}  return {episodic_return:,.2f}"


def captioned(picture: np.ndarray, text: str) -> np.ndarray:
    """Returns a picture [H, W, 3] below a black strip with a text. A narrow one becomes wider."""
    from PIL import Image, ImageDraw, ImageFont  # MoviePy needs it, too

    width = picture.shape[1]
    size = max(10, width // 30)  # 29 letters fit into LEAST_WIDTH
    strip = 3 * size // 4 * 2  # an even number, as videos need
    picture = np.pad(picture, [(strip, 0), (0, max(0, LEAST_WIDTH - width)), (0, 0)])
    image = Image.fromarray(picture)
    font = ImageFont.load_default(size)
    ImageDraw.Draw(image).text((size // 3, strip // 2), text, "white", font, anchor="lm")
    return np.asarray(image)


def write(file: Path, frames: list, fps: float) -> None:
    """Writes a GIF or a video."""
    from moviepy import ImageSequenceClip

    clip = ImageSequenceClip(frames, fps=fps)
    if file.suffix == ".gif":
        clip.write_gif(str(file), logger=None)
    else:
        clip.write_videofile(str(file), logger=None)


def main() -> None:
    """Runs the command line. The exit code is 2 for a usage error."""
    try:
        watch(tyro.cli(Flags, description=__doc__))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
