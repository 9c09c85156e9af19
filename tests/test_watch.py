"""cleanreplay/watch.py: shows an agent in a file or a window, and prints its returns."""

import shutil
import sys
from pathlib import Path

import environments
import gymnasium as gym
import numpy as np
import PIL.Image
import pytest
from helpers import COUNTER, one_line, save_agent

import dqn_jax
from cleanreplay import UsageError, load_policy, watch
from cleanreplay.watch import Flags

pytest.importorskip("moviepy")
pygame = pytest.importorskip("pygame")


class Drawn(environments.Counter):
    """Draws each picture brighter than the last. The first episode after `reset` has 5 steps."""

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
    """Removes the screen, as on a cluster."""
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    yield
    pygame.display.quit()  # an error may leave the window open


def read_gif(file):
    """Reads the size of a GIF, its pictures [H, W] in grey, and the time of one in ms."""
    with PIL.Image.open(file) as gif:
        pictures = []
        for i in range(gif.n_frames):
            gif.seek(i)
            pictures.append(np.asarray(gif.convert("L"), int))
        return gif.size, pictures, gif.info["duration"]


def play_by_hand(env_id, seed):
    """Plays an episode with the agent of `load_policy`. Returns the return."""
    policy, env = load_policy("."), gym.make(env_id)
    observation, _ = env.reset(seed=seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy(observation[None])[0])
        total, over = total + reward, terminated or truncated
    return total


def test_a_gif_has_25_pictures_a_second_of_each_episode():
    """An episode of 5 steps has 6 pictures at 50 a second; every second one is kept."""
    save_agent(dqn_jax, "Drawn-v0")
    returns = watch.watch(Flags(".", episodes=2))

    assert returns == [15.0, 15.0]
    size, pictures, duration = read_gif("agent.gif")
    assert [x[-1, 0] for x in pictures] == pytest.approx([40, 120, 200] * 2, abs=1)
    assert size == (280, 14 + 210)  # small pictures are enlarged by a whole number
    assert duration == 40


def test_above_each_picture_is_its_step_and_the_return_so_far():
    save_agent(dqn_jax, "Drawn-v0")
    watch.watch(Flags("."))
    _, pictures, _ = read_gif("agent.gif")
    texts = ["step 0  return 0.00", "step 2  return 3.00", "step 4  return 10.00"]

    for picture, text in zip(pictures, texts, strict=True):
        wanted = watch.captioned(np.zeros((210, 280, 3), np.uint8), text)[:14, :, 0]
        assert np.abs(picture[:14] - wanted).max() < 20  # it has few colours
    assert watch.caption(27_000, -1234.5) == "step 27,000  return -1,234.50"


@pytest.mark.parametrize("shape", [(300, 20), (210, 160), (252, 252), (400, 600), (30, 1_200)])
def test_a_caption_fits_and_leaves_the_picture_as_it_is(shape):
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    result = watch.captioned(picture, watch.caption(27_000, -1234.5))
    strip = result[: len(result) - len(picture)]
    rows, columns = strip.any(axis=-1).nonzero()

    np.testing.assert_array_equal(result[len(strip) :, : shape[1]], picture)
    assert strip.max() > 200
    assert min(rows.min(), columns.min()) > 0
    assert rows.max() < len(strip) - 1
    assert columns.max() < strip.shape[1] - 1


@pytest.mark.filterwarnings("ignore:Setting the shape")  # MoviePy 2.2.1 does when it reads one
def test_a_video_has_all_of_its_seconds():
    from moviepy import VideoFileClip

    save_agent(dqn_jax, "Drawn-v0")
    watch.watch(Flags(".", output="agent.mp4", episodes=2))

    with VideoFileClip("agent.mp4") as clip:
        assert (clip.fps, clip.duration) == (25, pytest.approx(6 / 25))


def test_an_episode_ends_after_the_most_steps_of_an_evaluation():
    save_agent(dqn_jax, "Drawn-v0", eval_max_steps=3)

    assert watch.watch(Flags(".")) == [6.0]


def test_the_return_is_that_of_load_policy(capsys):
    save_agent(dqn_jax, "CartPole-v1")
    Path("elsewhere").mkdir()
    shutil.copy("best.safetensors", "elsewhere")
    returns = watch.watch(Flags("elsewhere/best.safetensors", episodes=2, seed=7))

    assert returns == [play_by_hand("CartPole-v1", seed) for seed in (7, 8)]
    printed = capsys.readouterr().out.splitlines()
    assert f"seed 7: return {returns[0]:.2f} in {returns[0]:.0f} steps" in printed
    assert printed[-1] == "best.gif"
    assert Path("best.gif").exists()


def test_images_that_are_not_rendered_are_what_the_agent_sees(capsys):
    save_agent(dqn_jax, "environments:ImageGrey-v0")
    watch.watch(Flags("."))

    assert "ImageGrey-v0 does not render" in capsys.readouterr().out
    assert read_gif("agent.gif")[0] == (280, 14 + 280)


GREY = np.arange(42, dtype=np.uint8).reshape(6, 7)
COLOURS = np.random.default_rng(0).integers(0, 256, (6, 7, 3), np.uint8)


@pytest.mark.parametrize(
    ("seen", "picture"),
    [
        (COLOURS, COLOURS),
        (GREY, np.repeat(GREY[..., None], 3, axis=-1)),
        (np.stack([0 * GREY, 0 * GREY, 0 * GREY, GREY]), np.repeat(GREY[..., None], 3, axis=-1)),
    ],
    ids=["colours", "grey", "stack"],
)
def test_a_picture_is_of_the_newest_frame(seen, picture):
    np.testing.assert_array_equal(watch.as_picture(seen[None]), picture)


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
    save_agent(dqn_jax, "CartPole-v1")
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    returns = watch.watch(Flags("."))

    assert returns == [play_by_hand("CartPole-v1", 0)]
    assert not list(Path().glob("*.gif"))


MISTAKES = [
    ("CartPole-v1", dict(output="agent.png"), "output must end in .gif or .mp4, not agent.png"),
    ("CartPole-v1", dict(output="nowhere/agent.gif"), "nowhere is no folder that can be"),
    ("CartPole-v1", dict(seed=-1), "seed must be from 0"),
    ("CartPole-v1", dict(episodes=0), "episodes must be at least 1, not 0"),
    (COUNTER["env_id"], {}, "Counter-v0 cannot be drawn: it needs the render mode rgb_array"),
]


@pytest.mark.parametrize(("env_id", "flags", "words"), MISTAKES)
def test_a_mistake_is_an_error_and_nothing_is_written(env_id, flags, words):
    save_agent(dqn_jax, env_id)
    before = sorted(Path().iterdir())
    with pytest.raises(UsageError, match=words) as caught:
        watch.watch(Flags(".", **flags))

    assert "\n" not in str(caught.value)
    assert sorted(Path().iterdir()) == before


def test_a_mistake_is_one_line_of_the_program(run_main):
    assert "nowhere is not the folder of a run" in one_line(run_main(watch, "nowhere"))


def test_without_moviepy_one_line_names_what_to_install(monkeypatch):
    save_agent(dqn_jax)
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(UsageError, match=r"^output: pip install moviepy$"):
        watch.watch(Flags("."))


def test_a_missing_screen_is_an_error(monkeypatch):
    """SDL then draws nothing, without an error."""
    save_agent(dqn_jax, "CartPole-v1")
    monkeypatch.setenv("DISPLAY", ":99")
    monkeypatch.delenv("SDL_VIDEODRIVER", raising=False)
    with pytest.raises(UsageError, match=r"no screen was found: --output agent.gif"):
        watch.watch(Flags("."))
