"""Stacks of frames: as acting sees them, as the replay gives them back, as Atari makes them."""

from collections import defaultdict
from types import SimpleNamespace

import ale_py  # noqa: F401  (registers ALE/*)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

import buffers
import compiled
import dqn_jax
import images
import per_dqn_jax
import ppo_jax

KEY = jax.random.PRNGKey(0)


@pytest.mark.parametrize(("count", "length"), [(2, 2), (3, 5), (4, 5)])
def test_stack_frames_is_what_a_loop_over_each_window_gives(count, length):
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (64, length, 2, 3), np.uint8)
    goes_on = rng.random((64, length)) < 0.7
    got = jax.device_get(buffers.stack_frames(jnp.asarray(frames), count, jnp.asarray(goes_on)))
    assert got.shape == (64, length - count + 1, count, 2, 3)
    assert got.dtype == jnp.uint8
    for b in range(64):
        for i in range(length - count + 1):
            last = i + count - 1
            for j in range(count):
                is_same_episode = goes_on[b, i + j : last].all()
                np.testing.assert_array_equal(got[b, i, j], frames[b, i + j] * is_same_episode)


def test_a_stack_of_one_is_the_frame():
    frames = jnp.ones((2, 3, 4))
    assert buffers.stack_frames(frames, 1, jnp.ones((2, 3), bool)) is frames


def atari(stack):
    """Two of them, of which the first episode ends after a few dozen steps."""
    return gym.make_vec(
        "ALE/Breakout-v5", 2, vectorization_mode="vector_entry_point", stack_num=stack
    )


@pytest.mark.parametrize("script", [dqn_jax, slow(per_dqn_jax)])
def test_acting_and_learning_see_what_atari_stacks(script):
    """Step by step, across resets and the write position."""
    args = script.Args(num_envs=2, frame_stack=4, buffer_size=200, learning_starts=128)
    single = images.FrameStack(atari(1), 4)
    stacked = atari(4)
    assert single.single_observation_space.shape == (4, 1, 84, 84)
    assert single.observation_space.shape == (2, 4, 1, 84, 84)
    alg = script.Algorithm(args, single.single_observation_space, gym.spaces.Discrete(4))
    state = jax.jit(alg.init)(KEY)
    params = alg.acting_params(state)
    replay = state.replay
    add = jax.jit(lambda replay, rollout: alg.replay.add_batch(replay, rollout))
    observation, _ = single.reset(seed=3)
    env_state = script.EnvState(observation, np.ones(2, bool), np.zeros((2, 2)))
    log = SimpleNamespace(scalars=defaultdict(list))
    expected = [np.copy(stacked.reset(seed=3)[0])]
    episodes = 0
    rng = np.random.default_rng(0)
    for _ in range(300 // alg.rollout_shape[0]):
        noise = rng.integers(4, size=alg.rollout_shape)
        rollout, env_state = script.collect_rollout(alg, single, params, env_state, noise, log)
        expected += [np.copy(stacked.step(action)[0]) for action in rollout.action]
        observations = np.stack(expected[-1 - len(rollout.action) : -1])
        np.testing.assert_array_equal(rollout.observation[:, :, :, 0], observations)
        np.testing.assert_array_equal(rollout.next_observation[:, :, 0], expected[-1])
        frames = rollout._replace(observation=rollout.observation[:, :, -1], next_observation=None)
        replay = add(replay, frames)
        episodes += (~rollout.valid).sum()
    assert episodes >= 2
    assert int(replay.size) == 100  # rows, a third of those added
    sample = alg.replay.sample(replay, KEY, 512)
    window = sample.experience
    stacks = buffers.stack_frames(window.observation, 4, window.valid)
    assert stacks.shape == (512, 2, 4, 1, 84, 84)
    expected = np.stack(expected)
    rows = np.asarray(sample.indices) // 2
    envs = np.asarray(sample.indices) % 2
    for i in (0, 1):
        native = expected[rows + 3 + i, envs]
        np.testing.assert_array_equal(stacks[:, i, :, 0], native)
    assert not window.valid[:, 3:].all()  # some reach over the end of an episode


def test_the_network_sees_the_channels_that_atari_stacks():
    stacks = np.random.default_rng(0).integers(255, size=(3, 4, 84, 84)).astype(np.uint8)
    expected = images.channels_last(jnp.asarray(stacks))
    assert expected.shape == (3, 84, 84, 4)
    network = dqn_jax.QNetwork(2)
    params = jax.jit(network.init)(KEY, stacks)
    apply = jax.jit(network.apply)
    for other in (stacks[:, :, None], stacks[..., None]):
        np.testing.assert_array_equal(images.channels_last(jnp.asarray(other)), expected)
        np.testing.assert_array_equal(apply(params, other), apply(params, stacks))


@pytest.mark.parametrize("script", [dqn_jax, slow(per_dqn_jax), ppo_jax])
def test_functional_environments_stack_in_the_compiled_program(script):
    run = script.Run(env_id="phys2d/CartPole-v1")
    alg, is_functional = script.set_up(script.Args(num_envs=4, frame_stack=3), run)
    assert is_functional
    envs = compiled.Program(alg, run, script).envs
    params = alg.acting_params(jax.jit(alg.init)(KEY))
    noise = alg.draw_noise(KEY, 0, (60, 4))
    _, rollout = jax.jit(envs.collect)(envs.reset(KEY, 4), params, noise, KEY)
    frames = np.asarray(rollout.observation[:, :, -1])
    valid = np.asarray(rollout.valid)
    assert not valid.all()
    stack = np.zeros((4, 3, 4), np.float32)
    for t in range(60):
        older = stack[:, 1:] * valid[t - 1][:, None, None] if t > 0 else stack[:, 1:]
        stack = np.concatenate([older, frames[t][:, None]], axis=1)
        np.testing.assert_array_equal(rollout.observation[t], stack)


@pytest.mark.parametrize(("stack", "gigabytes"), [(1, 28.2), (4, 7.1)])
def test_a_million_steps_of_atari_take_so_many_gigabytes(stack, gigabytes):
    shape = (4, 84, 84) if stack == 1 else (4, 1, 84, 84)
    args = dqn_jax.Args(num_envs=8, frame_stack=stack, buffer_size=10**6, total_timesteps=10**7)
    observations = gym.spaces.Box(0, 255, shape, np.uint8)
    alg = dqn_jax.Algorithm(args, observations, gym.spaces.Discrete(4))
    replay = jax.eval_shape(alg.init, KEY).replay
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(replay))
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.05)
