"""images.py: which observations go through convolutions, and what these compute."""

import flax.linen as nn
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Probe

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import sac_jax

SMALL = {  # shapes of observations, and what they are with the channels last
    (10, 10, 4): (10, 10, 4),
    (10, 10, 10): (10, 10, 10),
    (4, 10, 12): (10, 12, 4),
    (5, 5, 1): (5, 5, 1),
    (35, 84, 3): (35, 84, 3),
    (2, 3, 7, 8): (7, 8, 6),  # a stack of 2
}
TOO_SMALL = [(128,), (8, 8), (35, 40), (4, 5, 3), (64, 2, 64), (4, 36, 40, 3, 1)]


def kernels(params):
    """Shapes of the kernels of a QNetwork of images."""
    layers = params["params"]
    return {name: layer["kernel"].shape for name, layer in layers.items()}


def params_of(network, shape, dtype):
    x = jax.ShapeDtypeStruct((2, *shape), dtype)
    return jax.eval_shape(network.init, jax.random.PRNGKey(0), x)


@pytest.mark.parametrize("dtype", [np.uint8, bool])
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_images_go_through_one_convolution(shape, dtype):
    height, width, channels = SMALL[shape]
    assert kernels(params_of(dqn_jax.QNetwork(2), shape, dtype)) == {
        "Conv_0": (3, 3, channels, 16),
        "Dense_0": (128, 2),
        "Dense_1": ((height - 2) * (width - 2) * 16, 128),
    }


@pytest.mark.parametrize("dtype", [np.uint8, bool])
@pytest.mark.parametrize("shape", TOO_SMALL, ids=str)
def test_what_is_too_small_or_has_no_channels_is_flattened(shape, dtype):
    size = int(np.prod(shape))
    layers = kernels(params_of(dqn_jax.QNetwork(2), shape, dtype))
    assert list(layers.values()) == [(size, 120), (120, 84), (84, 2)]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_images_of_floats_are_flattened(shape):
    layers = kernels(params_of(dqn_jax.QNetwork(2), shape, np.float32))
    assert layers["Dense_0"] == (int(np.prod(shape)), 120)


class FlaxMinAtarNetwork(nn.Module):
    """The network of Young and Tian 2019 as anyone would write it."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (3, 3), padding="VALID")(x))
        x = nn.relu(nn.Dense(128, name="Dense_1")(x.reshape(len(x), -1)))
        return nn.Dense(3, name="Dense_0")(x)


@pytest.mark.parametrize("dtype", [np.uint8, bool])
def test_small_images_are_not_divided_by_255(dtype):
    x = np.random.default_rng(0).integers(2, size=(4, 10, 10, 6)).astype(dtype)
    network = dqn_jax.QNetwork(3)
    params = network.init(jax.random.PRNGKey(0), x)
    wanted = FlaxMinAtarNetwork().apply(params, x.astype(np.float32))
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(network.apply(params, x), wanted, rtol=0, atol=1e-5)


def test_large_images_of_flags_are_not_divided_by_255():
    x = np.random.default_rng(0).integers(2, size=(4, 36, 40, 2)).astype(bool)
    network = dqn_jax.QNetwork(3)
    params = network.init(jax.random.PRNGKey(0), x)
    wanted = network.apply(params, 255 * x.astype(np.uint8))
    np.testing.assert_allclose(network.apply(params, x), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", [dqn_jax, per_dqn_jax, ppo_jax, r2d2_jax, sac_jax])
@pytest.mark.parametrize(
    ("dtype", "stored"), [(bool, bool), (np.uint8, np.uint8), (np.float64, np.float32)]
)
def test_observations_are_kept_in_their_dtype_if_images_have_it(module, dtype, stored):
    actions = gym.spaces.Box(-1, 1, (1,)) if module is sac_jax else gym.spaces.Discrete(2)
    observations = gym.spaces.Box(0, 1, (10, 10, 4), dtype)
    algorithm = module.Algorithm(module.Args(), observations, actions)
    assert algorithm.example_step.observation.dtype == stored


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
    q_values = dqn_jax.QNetwork(2).apply(state.params, images_of_both)
    assert state.replay.storage.observation.dtype == bool
    np.testing.assert_allclose(q_values, [[1, -1], [-1, 1]], atol=0.1)
