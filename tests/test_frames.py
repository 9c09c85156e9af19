"""Stacks of frames: as acting sees them, as the replay gives them back, as Atari makes them."""

import ale_py  # noqa: F401  (registers ALE/*)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

import buffers
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
    zeros = np.zeros((4, 1, 84, 84), np.uint8)
    alg = script.Algorithm(args, zeros, gym.spaces.Discrete(4))
    state = jax.jit(alg.init)(KEY)
    add = jax.jit(lambda replay, rollout: alg.replay.add_batch(replay, rollout))
    single, stacked = images.FrameStack(atari(1), 4), atari(4)
    assert single.single_observation_space.contains(zeros)
    assert single.observation_space.shape == (2, 4, 1, 84, 84)
    observation, _ = single.reset(seed=3)
    is_step, policy = np.ones(2, bool), alg.policy(state)
    expected = [np.copy(stacked.reset(seed=3)[0])]
    replay, episodes, rng = state.replay, 0, np.random.default_rng(0)
    for _ in range(300 // alg.rollout_shape[0]):
        noise = rng.integers(4, size=alg.rollout_shape)
        rollout, is_step = script.collect_rollout(alg, single, observation, is_step, policy, noise)
        observation = rollout.next_observation
        expected += [np.copy(stacked.step(action)[0]) for action in rollout.action]
        observations = np.stack(expected[-1 - len(rollout.action) : -1])
        np.testing.assert_array_equal(rollout.observation[:, :, :, 0], observations)
        np.testing.assert_array_equal(rollout.next_observation[:, :, 0], expected[-1])
        frames = rollout._replace(observation=rollout.observation[:, :, -1], next_observation=None)
        replay, episodes = add(replay, frames), episodes + (~rollout.is_step).sum()
    assert episodes >= 2
    assert int(replay.size) == 100  # rows, a third of those added
    sample = alg.replay.sample(replay, KEY, 512)
    window = sample.experience
    stacks = buffers.stack_frames(window.observation, 4, window.is_step)
    assert stacks.shape == (512, 2, 4, 1, 84, 84)
    expected = np.stack(expected)
    rows, envs = np.asarray(sample.indices) // 2, np.asarray(sample.indices) % 2
    for i in (0, 1):
        native = expected[rows + 3 + i, envs]
        np.testing.assert_array_equal(stacks[:, i, :, 0], native)
    assert not window.is_step[:, 3:].all()  # some reach over the end of an episode


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


@pytest.mark.parametrize("script", [dqn_jax, per_dqn_jax, ppo_jax])
def test_functional_environments_stack_in_the_compiled_program(script):
    run = script.Run(env_id="phys2d/CartPole-v1", log_interval=128)
    args = script.Args(num_envs=4, frame_stack=3)
    alg, loop = script.set_up(args, run)
    first = jax.tree.map(lambda x: x[0], loop.start())
    schedule = {name: x[0] for name, x in alg.schedule(np.zeros(1)).items()}
    noise = alg.draw_noise(KEY, schedule)
    noise = jnp.concatenate([noise] * (60 // len(noise) + 1))[:60]
    collect = jax.jit(loop.envs.collect)
    _, rollout = collect(first.envs, alg.policy(first.agent), noise, KEY)
    frames, is_step = np.asarray(rollout.observation[:, :, -1]), np.asarray(rollout.is_step)
    assert not is_step.all()
    expected = np.zeros((4, 3, 4), np.float32)
    for t in range(60):
        kept = expected[:, 1:] * (is_step[t - 1] if t else is_step[0] & False)[:, None, None]
        expected = np.concatenate([kept, frames[t][:, None]], axis=1)
        np.testing.assert_array_equal(rollout.observation[t], expected)


@pytest.mark.parametrize(("stack", "gigabytes"), [(1, 28.2), (4, 7.1)])
def test_what_a_million_steps_of_atari_take(stack, gigabytes):
    shape = (4, 84, 84) if stack == 1 else (4, 1, 84, 84)
    args = dqn_jax.Args(num_envs=8, frame_stack=stack, buffer_size=10**6)
    alg = dqn_jax.Algorithm(args, np.zeros(shape, np.uint8), gym.spaces.Discrete(4))
    replay = jax.eval_shape(alg.init, KEY).replay
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(replay))
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.05)
