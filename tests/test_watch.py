"""cleanreplay/watch.py: it shows an agent in a file or a window, and prints what it reaches."""

import sys
from pathlib import Path

import environments
import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO, more, one_line

import dqn_jax
import ppo_jax
import recurrent_ppo_jax
from cleanreplay import load_policy, watch
from cleanreplay.watch import Flags

pytest.importorskip("moviepy")


class Drawn(environments.Counter):
    """Each picture is brighter than the one before. The first episode after `reset` has 5 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        self.episode = 2
        return super().reset(seed=seed, options=options)

    def render(self):
        return np.full((30, 40, 3), 40 * (self.step_count + 1), np.uint8)


gym.register("Drawn-v0", Drawn)


@pytest.fixture(autouse=True)
def no_screen(monkeypatch):
    """As on a cluster."""
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


def trained(env_id, script=dqn_jax, **flags):
    """The folder of a short run, as a text."""
    small = SMALL_DQN if script is dqn_jax else SMALL_PPO
    run = script.Run(env_id=env_id, log_interval=64, eval_episodes=1, eval_max_steps=500)
    return str(script.train(script.Args(**small | flags), run)[2])


def brightness(file):
    """That of each picture of a GIF."""
    with PIL.Image.open(file) as gif:
        pictures = []
        for i in range(gif.n_frames):
            gif.seek(i)
            pictures.append(int(np.asarray(gif.convert("L")).mean().round()))
        return gif.size, pictures, gif.info["duration"]


def played_by_hand(place, env, seed, has_memory=False):
    """The return of the agent that `load_policy` gives, in an episode of an environment."""
    policy = load_policy(place)
    observation, _ = env.reset(seed=seed)
    total, over, is_first = 0.0, False, True
    while not over:
        more = (np.array([is_first]),) if has_memory else ()
        (action,) = policy(observation[None], *more)
        observation, reward, terminated, truncated, _ = env.step(action)
        total, over, is_first = total + reward, terminated or truncated, False
    return total


def test_a_gif_has_25_pictures_a_second_of_each_episode():
    """An episode of 5 steps has 6 pictures at 50 a second, of which every second one is kept."""
    folder = trained("Drawn-v0")
    returns = watch.watch(Flags(folder, episodes=2))
    assert returns == [15.0, 15.0]
    size, pictures, duration = brightness(Path(folder, "agent.gif"))
    assert pictures == pytest.approx([40, 120, 200] * 2, abs=1)
    assert size == (280, 210)  # small pictures are enlarged by a whole number
    assert duration == 40


@pytest.mark.filterwarnings("ignore:Setting the shape")  # MoviePy 2.2.1 does, where it reads one
def test_a_video_has_all_of_its_seconds():
    from moviepy import VideoFileClip

    folder = trained("Drawn-v0")
    watch.watch(Flags(folder, output="agent.mp4", episodes=2))
    with VideoFileClip("agent.mp4") as clip:
        assert (clip.fps, clip.duration) == (25, pytest.approx(6 / 25))


@pytest.mark.parametrize("frame_stack", [1, more(2)])
def test_the_return_is_that_of_load_policy_with_the_same_seed(frame_stack, capsys):
    folder = trained("CartPole-v1", frame_stack=frame_stack)
    returns = watch.watch(Flags(f"{folder}/best.safetensors", episodes=2, seed=7))
    env = gym.make("CartPole-v1")
    if frame_stack > 1:
        env = gym.wrappers.FrameStackObservation(env, frame_stack, padding_type="zero")
    assert returns == [played_by_hand(folder, env, seed) for seed in (7, 8)]
    said = capsys.readouterr().out.splitlines()
    assert f"seed 7: return {returns[0]:.2f} in {returns[0]:.0f} steps" in said
    assert said[-1] == f"{folder}/best.gif"
    assert Path(folder, "best.gif").exists()


@pytest.mark.more
def test_an_agent_with_a_memory_begins_each_episode_with_an_empty_one():
    env_id = "cleanreplay.memory_tasks:CartPoleNoVelocity-v0"
    folder = trained(env_id, recurrent_ppo_jax, sequence_length=4, learning_rate=0.05)
    returns = watch.watch(Flags(folder, episodes=2))
    env = gym.make(env_id)
    assert returns == [played_by_hand(folder, env, seed, has_memory=True) for seed in (0, 1)]


@pytest.mark.more
@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_an_environment_in_jax_is_drawn_by_gymnasium(script):
    pytest.importorskip("pygame")
    folder = trained("phys2d/CartPole-v1", script)
    (episodic_return,) = watch.watch(Flags(folder))
    size, pictures, _ = brightness(Path(folder, "agent.gif"))
    assert size == (600, 400)
    assert len(pictures) <= episodic_return // 2 + 1


def test_an_environment_that_cannot_be_drawn_says_so(run_main):
    folder = trained(COUNTER["env_id"])
    line = one_line(run_main(watch, folder))
    what = "environments:Counter-v0 cannot be drawn: it needs the render mode rgb_array (TypeError"
    assert what in line
    assert not Path(folder, "agent.gif").exists()


@pytest.mark.more
def test_an_environment_in_jax_that_cannot_be_drawn_says_so(run_main):
    line = one_line(run_main(watch, trained("environments:Chain-v0")))
    assert "environments:Chain-v0 cannot be drawn: it needs the render mode rgb_array" in line


@pytest.mark.more
def test_images_of_an_environment_that_does_not_render_are_drawn(capsys):
    folder = trained("environments:ImageGrey-v0")
    watch.watch(Flags(folder))
    text = "environments:ImageGrey-v0 does not render: it is drawn as the agent sees it"
    assert text in capsys.readouterr().out
    size, _, _ = brightness(Path(folder, "agent.gif"))
    assert size == (280, 280)


def test_what_an_agent_sees_is_a_picture_of_the_newest_frame():
    colours = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)
    np.testing.assert_array_equal(watch.as_picture(colours[None]), colours)
    grey = np.arange(42, dtype=np.uint8).reshape(6, 7)
    expected = np.repeat(grey[..., None], 3, axis=-1)
    np.testing.assert_array_equal(watch.as_picture(grey[None]), expected)
    stack = np.stack([0 * grey, 0 * grey, 0 * grey, grey])  # as in Atari
    np.testing.assert_array_equal(watch.as_picture(stack[None]), expected)


def test_flags_of_cells_have_a_colour_for_each_plane():
    cells = np.zeros((1, 6, 6, 4), bool)
    cells[0, 0, 0, 1] = cells[0, 0, 1, 2] = True
    cells[0, 0, 2, [1, 2]] = True
    picture = watch.as_picture(cells)
    assert picture.shape == (6, 6, 3)
    assert not picture[1:].any()
    assert len(np.unique(picture[0, :2], axis=0)) == 2
    np.testing.assert_array_equal(picture[0, 2], picture[0, 1])


def test_with_a_screen_it_is_a_window(monkeypatch):
    pytest.importorskip("pygame")
    folder = trained("CartPole-v1")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    returns = watch.watch(Flags(folder))
    assert returns == [played_by_hand(folder, gym.make("CartPole-v1"), 0)]
    assert not list(Path(folder).glob("*.gif"))


def test_mistakes_are_one_line(run_main, monkeypatch):
    assert "nowhere is not the folder of a run" in one_line(run_main(watch, "nowhere"))
    folder = trained("CartPole-v1")
    line = one_line(run_main(watch, folder, "--output", "agent.png"))
    assert line == "error: output must end in .gif or .mp4, not agent.png"
    line = one_line(run_main(watch, folder, "--output", "nowhere/agent.gif"))
    assert line == "error: output: there is no folder nowhere"
    line = one_line(run_main(watch, folder, "--episodes", "0"))
    assert line == "error: episodes must be at least 1, not 0"
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert one_line(run_main(watch, folder)) == "error: output: pip install moviepy"
