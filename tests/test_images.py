"""Which observations go through convolutions, what these compute, and what a run says of it."""

from functools import partial
from pathlib import Path

import environments
import flax.linen as nn
import gymnasium as gym
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Counter, Probe
from helpers import SMALL_DQN, fast_at_ends, more, network_of, one_line, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import networks
from cleanreplay.environments import FrameStack, describe, wrap

SMALL = {  # shapes of observations, and what they are with the channels last
    (10, 10, 4): (10, 10, 4),
    (10, 10, 10): (10, 10, 10),
    (4, 10, 12): (10, 12, 4),
    (5, 5, 1): (5, 5, 1),
    (35, 84, 3): (35, 84, 3),
    (2, 3, 7, 8): (7, 8, 6),  # a stack of 2
    (7, 7, 20): (7, 7, 20),  # two equal axes are height and width
    (8, 8, 27): (8, 8, 27),
    (9, 9, 17): (9, 9, 17),
    (17, 8, 8): (8, 8, 17),
    (5, 6, 5): (5, 6, 5),  # no image has channels in the middle
    (2, 9, 9, 17): (9, 9, 34),
    (2, 17, 8, 8): (8, 8, 34),
}
LARGE = {
    (36, 36): (36, 36, 1),
    (84, 84): (84, 84, 1),
    (36, 40, 3): (36, 40, 3),
    (40, 36, 12): (40, 36, 12),
    (4, 36, 40): (36, 40, 4),
    (1, 84, 84): (84, 84, 1),
    (2, 3, 36, 40): (36, 40, 6),
    (4, 84, 84, 1): (84, 84, 4),
}
NO_IMAGES = [(128,), (8, 8), (35, 40), (4, 5, 3), (64, 2, 64), (40, 3, 50), (4, 36, 40, 3, 1)]


def kernels(shape, dtype):
    """Shapes of the kernels of a QNetwork of two actions."""
    x = jax.ShapeDtypeStruct((2, *shape), dtype)
    params = jax.eval_shape(network_of(dqn_jax, x).init, jax.random.PRNGKey(0), x)
    return {name: layer["kernel"].shape for name, layer in params["params"].items()}


@pytest.mark.parametrize("dtype", [np.uint8, bool])
@fast_at_ends("shape", SMALL, ids=str)
def test_small_images_go_through_one_convolution(shape, dtype):
    height, width, channels = SMALL[shape]
    assert kernels(shape, dtype) == {
        "conv_0": (3, 3, channels, 16),
        "conv_out": ((height - 2) * (width - 2) * 16, 128),
        "q": (128, 2),
    }


@fast_at_ends("shape", LARGE, ids=str)
def test_images_of_36x36_and_more_go_through_three_convolutions(shape):
    height, width, channels = LARGE[shape]
    rows = (height // 4 - 1) // 2 - 3
    columns = (width // 4 - 1) // 2 - 3
    assert kernels(shape, np.uint8) == {
        "conv_0": (8, 8, channels, 32),
        "conv_1": (4, 4, 32, 64),
        "conv_2": (3, 3, 64, 64),
        "conv_out": (rows * columns * 64, 512),
        "q": (512, 2),
    }


@pytest.mark.parametrize("dtype", [np.uint8, bool])
@fast_at_ends("shape", NO_IMAGES, ids=str)
def test_what_is_too_small_or_has_no_channels_is_flattened(shape, dtype):
    size = int(np.prod(shape))
    assert kernels(shape, dtype) == {"q_0": (size, 120), "q_1": (120, 84), "q": (84, 2)}


@fast_at_ends("shape", [*SMALL, *LARGE], ids=str)
def test_images_of_floats_are_flattened(shape):
    assert kernels(shape, np.float32)["q_0"] == (int(np.prod(shape)), 120)


class FlaxNetwork(nn.Module):
    """Those of Mnih et al. 2015, and of Young and Tian 2019, as anyone would write them."""

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


def random_params(network, x):
    """Weights of a network for x, of a size at which its values stay moderate."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.PRNGKey(0), x)
    return jax.tree.map(
        lambda leaf: np.float32(rng.normal(size=leaf.shape) / np.prod(leaf.shape[:-1]) ** 0.5),
        shapes,
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "scale"),
    [
        more((44, 40, 4), np.uint8, 255),
        ((43, 50, 3), np.uint8, 255),  # the stride does not divide it
        ((36, 40, 2), bool, 1),
        ((10, 10, 6), np.uint8, 1),
        ((10, 10, 6), bool, 1),
    ],
)
def test_values_are_those_of_flax(shape, dtype, scale):
    """Only large images of uint8 are divided by 255."""
    x = np.random.default_rng(0).integers(256, size=(2, *shape)).astype(dtype)
    network = network_of(dqn_jax, x, num_actions=3)
    params = random_params(network, x)
    out = jax.jit(network.apply)(params, x)
    flax_network = FlaxNetwork(is_large=min(shape[:2]) >= 36)
    wanted = jax.jit(flax_network.apply)(params, x.astype(np.float32) / scale)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)


def test_first_weights_of_convolutions_are_those_of_flax():
    x = np.zeros((1, 44, 40, 4), np.uint8)
    ours = network_of(dqn_jax, x, num_actions=3).init(jax.random.PRNGKey(0), x)
    wanted = FlaxNetwork(is_large=True).init(jax.random.PRNGKey(0), x.astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, ours, wanted)


def read_as(shape, dtype=np.uint8, frame_stack=1):
    """What is said of observations, in the vector environment that a script makes."""
    space = gym.spaces.Box(0, 1, shape, dtype)
    envs = gym.vector.SyncVectorEnv([lambda: Observer(space)])
    return describe(wrap(envs, frame_stack))


class Observer(gym.Env):
    """It has a space of observations, and shows none."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, space):
        self.observation_space = space


@fast_at_ends("shape", [*SMALL, *LARGE], ids=str)
def test_a_line_says_how_images_are_read(shape):
    height, width, channels = (SMALL | LARGE)[shape]
    wanted = f"observations are images of {height} x {width} with {channels} channels"
    assert read_as(shape) == wanted


def test_a_line_says_that_a_stack_of_images_is_read_as_channels():
    assert read_as((36, 40), frame_stack=4) == "observations are images of 36 x 40 with 4 channels"
    assert read_as((7, 7, 20), bool, 3) == "observations are images of 7 x 7 with 60 channels"


@pytest.mark.parametrize(
    ("shape", "dtype", "frame_stack", "line"),
    [
        ((3, 4), np.uint8, 1, "observations Box(0, 1, (3, 4), uint8) are flattened to 12 numbers"),
        (
            (40, 40, 3),
            np.float32,
            1,
            "observations Box(0.0, 1.0, (40, 40, 3), float32) are flattened to 4,800 numbers",
        ),
        (
            (3,),
            np.float32,
            4,
            "stacks of 4 observations Box(0.0, 1.0, (3,), float32) are flattened to 12 numbers",
        ),
        ((3,), np.float32, 1, ""),
        ((128,), np.uint8, 1, ""),
    ],
)
def test_a_line_says_that_other_observations_than_vectors_are_flattened(
    shape, dtype, frame_stack, line
):
    assert read_as(shape, dtype, frame_stack) == line


def test_a_space_with_many_bounds_is_named_in_one_short_line():
    space = gym.spaces.Box(np.float32(np.random.default_rng(0).random((40, 9))), 1.0, (40, 9))
    line = describe(gym.vector.SyncVectorEnv([lambda: Observer(space)]))
    assert line.startswith("observations Box([[")
    assert line.endswith(" ... are flattened to 360 numbers")
    assert len(line) < 300


def test_the_frames_of_a_stack_become_channels():
    x = np.random.default_rng(0).integers(256, size=(2, 4, 36, 40), dtype=np.uint8)
    last = np.moveaxis(x, 1, -1)
    np.testing.assert_array_equal(networks.channels_last(jnp.asarray(x)), last)
    network = network_of(dqn_jax, x)
    params = random_params(network, x)
    apply = jax.jit(network.apply)
    np.testing.assert_array_equal(apply(params, x), apply(params, last))


@pytest.mark.parametrize(
    "module", [dqn_jax, per_dqn_jax, ppo_jax, r2d2_jax, recurrent_ppo_jax, sac_jax]
)
@pytest.mark.parametrize(
    ("dtype", "stored"), [(bool, bool), (np.uint8, np.uint8), (np.float64, np.float32)]
)
def test_observations_are_kept_in_their_dtype_if_images_have_it(module, dtype, stored):
    actions = gym.spaces.Box(-1, 1, (1,)) if module is sac_jax else gym.spaces.Discrete(2)
    observations = gym.spaces.Box(0, 1, (10, 10, 4), dtype)
    agent = module.Agent(module.Args(), observations, actions)
    assert agent.example_step.observation.dtype == stored


class ProbeFlags(Probe):
    """A small image of bools: the reward is +1 if the action is 1 where they are True, else -1."""

    def __init__(self):
        super().__init__("both")
        self.observation_space = gym.spaces.Box(0, 1, (5, 6, 2), bool)

    def _observe(self):
        return np.full((5, 6, 2), self.value > 0)


gym.register("ProbeFlags-v0", ProbeFlags)


def test_a_small_image_of_bools_is_learned_from():
    args = dqn_jax.Args(
        total_timesteps=1_600,
        num_envs=8,
        learning_starts=64,
        batch_size=16,
        learning_rate=3e-3,
        train_frequency=8,
        gradient_steps=2,
    )
    run = dqn_jax.Run(env_id="ProbeFlags-v0", eval_episodes=0, checkpoint_interval=0)
    state, _, _ = dqn_jax.train(args, run)
    images_of_both = np.stack([np.zeros((5, 6, 2), bool), np.ones((5, 6, 2), bool)])
    q_values = network_of(dqn_jax, images_of_both).apply(state.params, images_of_both)
    assert state.replay.storage.observation.dtype == bool
    np.testing.assert_allclose(q_values, [[1, -1], [-1, 1]], atol=0.1)


class Undrawn(Counter):
    """It says that it can be drawn, and cannot: at all, or once an episode has begun."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (Gymnasium's)

    def __init__(self, render_mode=None, at_first=False):
        super().__init__()
        self.render_mode = render_mode
        self.at_first = at_first

    def render(self):
        if self.at_first and self.step_count == 0:
            return np.zeros((16, 16, 3), np.uint8)
        raise RuntimeError("no OpenGL context")


gym.register("Undrawn-v0", Undrawn, disable_env_checker=True)


class Drawn(Undrawn):
    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


gym.register("DrawnElsewhere-v0", Drawn, vector_entry_point=environments.preprocessed)


def test_a_video_of_other_observations_is_an_error_before_a_folder_is_made(run_main):
    """Like Atari, whose vector version preprocesses what the single one shows."""
    pytest.importorskip("moviepy")
    result = run_main(dqn_jax, "--env-id", "DrawnElsewhere-v0", "--capture-video")
    assert "capture_video: cannot record a video: it observes Box(" in one_line(result)
    assert not Path("runs").exists()


def test_a_video_that_cannot_be_drawn_is_an_error_before_a_folder_is_made(run_main):
    """Like MuJoCo without a screen."""
    pytest.importorskip("moviepy")
    result = run_main(dqn_jax, "--env-id", "Undrawn-v0", "--capture-video")
    line = one_line(result)
    assert "capture_video: cannot record a video: no OpenGL context" in line
    assert "MUJOCO_GL=egl" in line
    assert not Path("runs").exists()


@pytest.mark.filterwarnings("ignore:.*Ignored saving a video")
def test_a_video_that_fails_loses_nothing():
    """What was learned and logged is kept."""
    pytest.importorskip("moviepy")
    args = dqn_jax.Args(**SMALL_DQN)
    env = dict(env_id="Undrawn-v0", env_kwargs='{"at_first": true}')
    run = dqn_jax.Run(**env, log_interval=100, capture_video=True)
    with pytest.raises(RuntimeError, match="no OpenGL context"):
        dqn_jax.train(args, run)
    (folder,) = Path("runs").iterdir()
    assert [x.name for x in (folder / "checkpoints").iterdir()] == ["200"]
    scalars, _ = read_events(folder)
    assert scalars["losses/td_loss"][-1][0] == 200


def test_stacks_are_among_the_observations_of_their_space():
    envs = FrameStack(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), 3)
    observation, _ = envs.reset(seed=0)
    assert envs.single_observation_space.shape == (3, 4)
    assert envs.observation_space.shape == observation.shape == (2, 3, 4)
    assert envs.observation_space.contains(observation)


@pytest.mark.parametrize(("shape", "dtype"), [((4,), np.float32), ((4, 36, 36), np.uint8)])
def test_a_network_can_be_exported_for_batches_of_any_size(shape, dtype):
    example = np.zeros((1, *shape), dtype)
    network = network_of(dqn_jax, example)
    params = random_params(network, example)
    (batch,) = jax.export.symbolic_shape("batch")
    inputs = jax.ShapeDtypeStruct((batch, *shape), dtype)
    exported = jax.export.export(jax.jit(partial(network.apply, params)))(inputs)

    for size in (1, 3):
        x = np.random.default_rng(0).integers(9, size=(size, *shape)).astype(dtype)
        np.testing.assert_allclose(exported.call(x), network.apply(params, x), rtol=1e-4, atol=1e-4)
