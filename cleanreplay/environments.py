"""Makes environments, and changes their observations: stacks of frames, packed Dicts, vectors.

Also counts successes, and checks that a video can be recorded. At the start of a run it prints what
`describe` returns about the observations.
"""

import importlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from difflib import get_close_matches
from functools import partial
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.spaces import Box, Dict, MultiBinary, Tuple, flatdim, flatten, flatten_space
from gymnasium.vector.utils import batch_space
from tqdm import tqdm

from cleanreplay.errors import UsageError
from cleanreplay.networks import are_images, channels_last, example_of
from cleanreplay.packed import Packed, Part, pack, unpack

MAX_NUMBERS = 10_000_000  # of an observation that is flattened


def make_first(run: Any, make_envs: Callable) -> Any:
    """Makes one environment. UsageError if it is unknown, or does not take --env-kwargs."""
    what = f"--env-id {run.env_id}"
    module, _, name = run.env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)  # registers its environments
        spec = gym.spec(name)
    except gym.error.Error as error:
        near = get_close_matches(name, gym.registry, 1, cutoff=0.8)
        hint = "--env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module"
        hint = f"the nearest is {near[0]}" if near else hint
        raise UsageError(f"{what}: {error} ({hint})") from error
    except ModuleNotFoundError as error:
        hint = ": pip install ale-py" if module == "ale_py" else ""
        raise UsageError(f"{what}: {error}{hint}") from error
    except TypeError as error:  # a relative import
        raise UsageError(f"{what}: {module} is not the name of a module") from error
    is_atari = str(spec.entry_point).startswith("ale_py")
    if is_atari and (run.vectorization != "auto" or not spec.vector_entry_point):
        game = name.removeprefix("ALE/").partition("-")[0].removesuffix("NoFrameskip")
        better = f"ale_py:ALE/{game}-v5 with --vectorization auto"
        tqdm.write(f"{what} has raw frames of 210 x 160 x 3: {better} has DeepMind's preprocessing")
    if run.env_kwargs == "{}":
        try:
            return make_envs(1)
        except gym.error.Error as error:  # such as a missing Box2D
            raise UsageError(f"{what}: {error}") from error
    what += f" --env-kwargs '{run.env_kwargs}'"
    try:
        check_env_kwargs(json.loads(run.env_kwargs), is_atari)
        return make_envs(1)
    except (TypeError, ValueError, gym.error.Error) as error:
        raise UsageError(f"{what}: {error}") from error


def check_env_kwargs(kwargs: Any, is_atari: bool) -> None:
    """Raises ValueError for invalid arguments of an environment."""
    if not isinstance(kwargs, dict):
        raise ValueError('not a JSON object, such as {"continuous": true}')
    for key in ("episodic_life", "life_loss_info"):
        if is_atari and kwargs.get(key):
            raise ValueError(f"with {key} charts would count lives, not games: leave it out")


class FrameStack(gym.vector.VectorWrapper):
    """Stacks the last K observations of the episode [N, K, ...], with zeros before its start.

    Args:
      envs: vector environment with Box observations, in the autoreset mode NEXT_STEP.
      count: K.
    """

    def __init__(self, envs: gym.vector.VectorEnv, count: int) -> None:
        super().__init__(envs)
        space: Any = envs.single_observation_space
        self.count = count
        # The stacks also have zeros.
        low = np.minimum(space.low, 0)
        high = np.maximum(space.high, 0)
        stack: Any = gym.spaces.Box(
            low=np.stack([low] * count),
            high=np.stack([high] * count),
            dtype=space.dtype,
        )
        if isinstance(space, Packed):
            stack = Packed(space.layout, (count,))
        self.single_observation_space = stack
        self.observation_space = batch_space(stack, envs.num_envs)

    def reset(self, **kwargs: Any) -> tuple:
        """Starts an episode in each environment."""
        frame, info = self.env.reset(**kwargs)
        zeros = np.zeros_like(frame)
        self.older = np.stack([zeros] * (self.count - 1), axis=1)
        self.is_over = np.zeros(len(frame), bool)
        return self.push(frame), info

    def step(self, actions: Any) -> tuple:
        """Takes a step of each environment. After the end of an episode its stack is cleared."""
        frame, reward, terminated, truncated, info = self.env.step(actions)
        stack = self.push(frame)
        self.is_over = np.asarray(terminated | truncated, bool)
        return stack, reward, terminated, truncated, info

    def push(self, frame: np.ndarray) -> np.ndarray:
        """Returns the stacks [N, K, ...] after new frames [N, ...]."""
        older = self.older
        older[self.is_over] = 0
        newest = frame[:, None]
        stack = np.concatenate([older, newest], axis=1)
        self.older = stack[:, 1:].copy()
        return stack


def layout_of(space: gym.Space) -> tuple[Part, ...]:
    """Lists the entries of a Dict in packed order: images first. () if no entry is an image."""
    entries = space.spaces if isinstance(space, Dict) else {}
    layout = []
    numbers = {}
    for name, entry in entries.items():
        if isinstance(entry, Box) and are_images(example_of(entry)):
            layout.append(Part(name, entry.shape, np.dtype(entry.dtype).name))
        else:
            numbers[name] = entry
    if not layout:
        return ()
    check_flat(Dict(numbers))
    layout += [Part(name, (flatdim(entry),), "float32") for name, entry in numbers.items()]
    return tuple(layout)


def leaves_of(space: gym.Space, x: Any) -> list[tuple[gym.Space, Any]]:
    """Lists the entries of an observation that are no Dict or Tuple, in order, with their spaces.

    ValueError for a Dict or Tuple with other entries.
    """
    if isinstance(space, Dict):
        if not isinstance(x, Mapping) or set(x) != set(space.spaces):
            raise ValueError(f"observations must be a dict of {', '.join(space.spaces)}")
        pairs = [(entry, x[name]) for name, entry in space.spaces.items()]
    elif isinstance(space, Tuple):
        if not isinstance(x, tuple) or len(x) != len(space):
            raise ValueError(f"observations must be a tuple of {len(space)}")
        pairs = list(zip(space.spaces, x, strict=True))
    else:
        return [(space, x)]
    return [leaf for pair in pairs for leaf in leaves_of(*pair)]


def flat(space: gym.Space, x: Any) -> np.ndarray:
    """Flattens observations [N, ...] to [N, F], as `gymnasium.spaces.flatten` does one of them.

    Those of a Box stay as they are.
    """
    if isinstance(space, Box):
        return np.asarray(x)
    parts = []
    for entry, rows in leaves_of(space, x):
        if isinstance(entry, Box | MultiBinary):
            parts.append(np.reshape(rows, (len(rows), flatdim(entry))))
        else:
            vectors: list = [flatten(entry, row) for row in rows]
            parts.append(np.stack(vectors))
    return np.concatenate(parts, axis=1)


def as_array(space: gym.Space, x: Any, layout: tuple[Part, ...]) -> np.ndarray:
    """Makes an array [N, ...] of observations [N, ...]: bytes if there is a layout, or numbers."""
    if not layout:
        return flat(space, x)
    entries: Any = space
    return pack({part.name: flat(entries[part.name], x[part.name]) for part in layout}, layout)


class AsArray(gym.vector.VectorObservationWrapper):
    """Converts observations to vectors [N, F], or those of a Dict with an image to bytes [N, P]."""

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        space = envs.single_observation_space
        self.layout = layout_of(space)
        if not self.layout:
            check_flat(space)
        flat_space: Any = Packed(self.layout) if self.layout else flatten_space(space)
        self.single_observation_space = flat_space
        self.observation_space = batch_space(flat_space, envs.num_envs)

    def observations(self, observations: Any) -> np.ndarray:
        """Makes an array of the observations of N environments."""
        x = as_array(self.env.single_observation_space, observations, self.layout)
        return x.astype(self.single_observation_space.dtype, copy=False)


def wrap(envs: gym.vector.VectorEnv, frame_stack: int) -> gym.vector.VectorEnv:
    """Converts observations that are no Box to arrays, and stacks the last frame_stack.

    A Dict with an image is packed, see cleanreplay/packed.py. Others are flattened.
    """
    if not isinstance(envs.single_observation_space, Box):
        envs = AsArray(envs)
    return FrameStack(envs, frame_stack) if frame_stack > 1 else envs


def before_wrap(envs: gym.vector.VectorEnv) -> Any:
    """Returns the environments that `wrap` was given."""
    while isinstance(envs, FrameStack | AsArray):
        envs = envs.env
    return envs


def check_flat(space: gym.Space) -> None:
    """Raises UsageError unless observations can be flattened to a vector of moderate size."""
    hint = "choose what the network sees with a wrapper, see docs/environments.md"
    what = f"observations {in_one_line(space)}"
    try:
        size = flatdim(space)
    except (NotImplementedError, ValueError) as error:  # an unknown kind, or of any length
        raise UsageError(f"{what} cannot be flattened to a Box: {hint}") from error
    if size > MAX_NUMBERS:
        limit = f"more than {MAX_NUMBERS:,}"
        raise UsageError(f"{what} would be flattened to {size:,} numbers, {limit}: {hint}")


def describe(envs: gym.vector.VectorEnv) -> str:
    """Describes how a network reads observations that are not vectors; "" for vectors."""
    space: Any = envs.single_observation_space
    x = example_of(space)
    if isinstance(space, Packed):
        parts = jax.eval_shape(partial(unpack, layout=space.layout), x)
        seen = [f"{name} of {size_of(x)}" for name, x in parts.items() if are_images(x)]
        numbers = sum(x.size for x in parts.values() if not are_images(x))
        return f"observations are a Dict of images ({', '.join(seen)}) and {numbers:,} numbers"
    if are_images(x):
        return f"observations are images of {size_of(x)}"
    given = before_wrap(envs)
    what = (
        f"stacks of {envs.count} observations" if isinstance(envs, FrameStack) else "observations"
    )
    if given is envs and len(space.shape) == 1:
        return ""
    single = in_one_line(given.single_observation_space)
    return f"{what} {single} are flattened to {np.prod(space.shape, dtype=int):,} numbers"


def size_of(x: Any) -> str:
    """Returns the size of images [B, ...], in words."""
    _, height, width, channels = jax.eval_shape(channels_last, x).shape
    return f"{height} x {width} with {channels} channels"


def in_one_line(space: gym.Space) -> str:
    """Writes a space as Gymnasium does, shortened for a message."""
    return shorten(str(space), 200, placeholder=" ...")


def check_video(make_envs: Callable, space: gym.Space) -> None:
    """Renders an environment once, so that a run whose video would fail does not begin.

    `make_envs(1, video_folder)` makes one to record. UsageError without a screen, without moviepy,
    if it cannot render, or if its observations are not those of `space` when it renders.
    """
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # pygame looks for loudspeakers otherwise
    try:
        import moviepy  # noqa: F401  needed when the video is written

        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may have no frame to save
            with closing(make_envs(1, f"{folder}/video")) as envs:
                if envs.single_observation_space != space:
                    raise ValueError(f"it observes {envs.single_observation_space}, not {space}")
                envs.reset()
                envs.render()
    except ModuleNotFoundError as error:
        raise UsageError(f"capture_video: pip install {error.name}") from error
    except Exception as error:
        text = f"capture_video: cannot record a video: {with_hint(error)}"
        raise UsageError(text) from error


def with_hint(error: Exception) -> str:
    """Returns the text of a rendering error, with a hint for MuJoCo."""
    is_mujoco = any(word in str(error) for word in ("OpenGL", "GLFW", "gladLoadGL"))
    hint = " (MuJoCo without a screen: set MUJOCO_GL=egl or MUJOCO_GL=osmesa)"
    return f"{error}{hint if is_mujoco else ''}"


class Successes(gym.vector.VectorWrapper):
    """Records the success of each episode, if the last `info` of an episode has `is_success`.

    `ended` lists the successes of finished episodes, from the first report on. `first` [N] are
    those of the first episode of each environment. An unreported success is NaN.
    """

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        self.ended: list = []
        self.first = np.full(envs.num_envs, np.nan)
        self.is_first = np.ones(envs.num_envs, bool)  # whether an episode is the first
        self.is_reported = False  # whether any `info` has had `is_success`

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the environments, such as `call` and `set_attr`."""
        if name == "env":  # before it is set
            raise AttributeError(name)
        return getattr(self.env, name)

    def step(self, actions: Any) -> tuple:
        """Takes a step of each environment."""
        result = self.env.step(actions)
        info = result[4]
        over = np.asarray(result[2] | result[3], bool)
        if self.is_reported or "is_success" in info:
            self.is_reported = True
            self.note(over, info)
        self.is_first &= ~over
        return result

    def note(self, over: np.ndarray, info: dict) -> None:
        """Records the successes of the episodes that are over [N]."""
        if not over.any():
            return
        given = info.get("is_success", np.full(len(over), np.nan))
        successes = np.array([as_number(x) for x in given])
        successes[~np.broadcast_to(info.get("_is_success", True), len(over))] = np.nan
        self.ended.extend(successes[over])
        is_first = over & self.is_first
        self.first[is_first] = successes[is_first]


def as_number(x: Any) -> float:
    """Converts a number, or an array with one number, to float; NaN for anything else."""
    try:
        return float(np.asarray(x, float).item())
    except (TypeError, ValueError):
        return np.nan


def rate(successes: Any) -> float:
    """Returns the fraction of successful episodes, NaN if none was reported."""
    said = np.asarray(successes, float)
    said = said[~np.isnan(said)]
    return float(said.mean()) if said.size > 0 else np.nan
