"""Observations that go through convolutions, their results, and videos of a run."""

from functools import partial
from pathlib import Path

import environments
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Counter
from gymnasium.spaces import Box, Discrete
from helpers import SMALL_DQN, network_of, read_events
from numpy.testing import assert_allclose, assert_array_equal

import dqn_jax
import pqn_jax
from cleanreplay.environments import with_hint
from cleanreplay.networks import are_images, channels_last

KEY = jax.random.PRNGKey(0)
# Shapes of observations of bytes, and their height, width and channels; (): not an image.
SHAPES = {
    (128,): (),
    (5, 5, 1): (5, 5, 1),
    (4, 5, 3): (),
    (10, 10, 10): (10, 10, 10),
    (4, 10, 12): (10, 12, 4),
    (7, 7, 20): (7, 7, 20),  # two equal axes are height and width
    (17, 8, 8): (8, 8, 17),
    (5, 6, 5): (5, 6, 5),  # channels are never in the middle
    (64, 2, 64): (),
    (36, 36): (36, 36, 1),
    (35, 40): (),
    (2, 3, 7, 8): (7, 8, 6),  # a stack of 2
    (4, 84, 84, 1): (84, 84, 4),
    (4, 36, 40, 3, 1): (),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_images_are_bytes_of_two_axes_and_channels(shape):
    for dtype in (np.uint8, bool):
        x = jax.ShapeDtypeStruct((2, *shape), dtype)
        assert are_images(x) == bool(SHAPES[shape])
        if SHAPES[shape]:
            assert jax.eval_shape(channels_last, x).shape == (2, *SHAPES[shape])

    assert not are_images(jax.ShapeDtypeStruct((2, *shape), np.float32))


@pytest.mark.parametrize(
    ("shape", "order"), [((2, 3, 7, 8), (0, 3, 4, 1, 2)), ((2, 7, 8, 3), (0, 2, 3, 1, 4))]
)
def test_channels_of_the_oldest_frame_come_first(shape, order):
    x = np.random.default_rng(0).integers(256, size=(2, *shape), dtype=np.uint8)

    last = x.transpose(order).reshape(2, 7, 8, 6)
    assert_array_equal(channels_last(jnp.asarray(x)), last)


class FlaxNetwork(nn.Module):
    """Plain networks of Mnih et al. 2015, and of Young and Tian 2019."""

    is_large: bool

    @nn.compact
    def __call__(self, x):
        layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1)) if self.is_large else ((16, 3, 1),)
        for i, (channels, size, stride) in enumerate(layers):
            conv = nn.Conv(channels, (size, size), (stride, stride), "VALID", name=f"conv_{i}")
            x = nn.relu(conv(x))
        width = 512 if self.is_large else 128
        x = nn.relu(nn.Dense(width, name="conv_out")(x.reshape(len(x), -1)))
        return nn.Dense(3, name="q")(x)


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        ((43, 50, 3), np.uint8, 255),  # the stride does not divide it
        ((36, 40, 2), bool, 1),
        ((35, 36, 2), np.uint8, 1),
    ],
)
def test_first_weights_and_values_are_those_of_flax(shape, dtype, scale):
    """Only large images of uint8 are divided by 255. Biases are 0 at first."""
    x = np.random.default_rng(0).integers(256, size=(2, *shape)).astype(dtype)
    numbers = x.astype(np.float32) / scale
    ours = network_of(dqn_jax, x, num_actions=3)
    wanted = FlaxNetwork(is_large=min(shape[:2]) >= 36)
    params = jax.jit(ours.init)(KEY, x)

    same = partial(assert_allclose, rtol=1e-6)
    jax.tree.map(same, params, jax.jit(wanted.init)(KEY, numbers))
    params = jax.tree.map(lambda x: x + 0.001, params)
    values = jax.jit(wanted.apply)(params, numbers)
    assert np.abs(values).max() > 0.1
    assert_allclose(jax.jit(ours.apply)(params, x), values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("script", [dqn_jax, pqn_jax])
@pytest.mark.parametrize("count", [37, 48])
def test_many_images_have_the_values_and_gradients_of_few(script, count):
    """Many are computed in parts of at most 16: here each alone, and 16 together."""
    x = np.random.default_rng(0).integers(256, size=(count, 36, 36, 1), dtype=np.uint8)
    network = network_of(script, x)
    params = jax.jit(network.init)(KEY, x)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(params, x):
        values = network.apply(params, x)
        return jnp.sum(values**2), values

    (_, values), gradient = loss(params, x)
    (_, first), gradient_of_first = loss(params, x[:30])
    (_, rest), gradient_of_rest = loss(params, x[30:])

    assert_allclose(values, np.concatenate([first, rest]), rtol=1e-4, atol=1e-5)
    summed = jax.tree.map(jnp.add, gradient_of_first, gradient_of_rest)
    jax.tree.map(partial(assert_allclose, rtol=1e-3, atol=1e-4), gradient, summed)


@pytest.mark.parametrize(
    ("dtype", "stored"), [("bool", "bool"), ("uint8", "uint8"), ("float64", "float32")]
)
def test_observations_are_kept_in_the_dtype_of_images(dtype, stored):
    agent = dqn_jax.Agent(dqn_jax.Args(), Box(0, 1, (10, 10, 4), dtype), Discrete(2))

    assert agent.example_step.observation.dtype == stored


class Drawn(Counter):
    """Can be rendered only before step `steps` of an episode."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (Gymnasium's)

    def __init__(self, render_mode=None, steps=99):
        super().__init__()
        self.render_mode = render_mode
        self.steps = steps

    def render(self):
        if self.step_count < self.steps:
            return np.zeros((16, 16, 3), np.uint8)
        raise RuntimeError("no OpenGL context")


gym.register("Undrawn-v0", Drawn, disable_env_checker=True, kwargs={"steps": 0})
gym.register("DrawnAtFirst-v0", Drawn, disable_env_checker=True, kwargs={"steps": 1})
# Like Atari, whose vector version preprocesses the observations of the single one.
gym.register("DrawnElsewhere-v0", Drawn, vector_entry_point=environments.preprocessed)


@pytest.mark.parametrize(
    ("env_id", "word"), [("DrawnElsewhere-v0", "observes"), ("Undrawn-v0", "MUJOCO_GL")]
)
def test_a_video_that_cannot_be_made_ends_a_run_before_it_begins(env_id, word):
    run = dqn_jax.Run(env_id=env_id, capture_video=True)
    with pytest.raises(dqn_jax.UsageError, match=f"capture_video: .*{word}"):
        dqn_jax.train(dqn_jax.Args(), run)

    assert not Path("runs").exists()


def test_only_an_error_of_mujoco_has_a_hint_at_its_variable():
    for word in ("OpenGL", "GLFW", "gladLoadGL"):
        assert "MUJOCO_GL" in with_hint(ValueError(f"no {word} here"))
    assert with_hint(ValueError("no brush")) == "no brush"


@pytest.mark.filterwarnings("ignore:.*Ignored saving a video")
def test_a_video_that_fails_loses_nothing():
    run = dqn_jax.Run(env_id="DrawnAtFirst-v0", eval_episodes=0, capture_video=True)
    with pytest.raises(RuntimeError, match="no OpenGL context"):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)

    (folder,) = Path("runs").iterdir()
    assert [x.name for x in (folder / "checkpoints").iterdir()] == ["200"]
    assert read_events(folder)[0]["losses/td_loss"][-1][0] == 200
