"""Stacks of frames: in acting and in samples of the replay, against those that Atari makes."""

from types import SimpleNamespace

import ale_py  # noqa: F401  (registers ALE/*)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_array_equal

import buffers
import dqn_jax
from cleanreplay import replays
from cleanreplay.environments import FrameStack

KEY = jax.random.PRNGKey(0)


def test_stacks_are_those_of_a_loop_over_each_sequence():
    count, length = 4, 6
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (64, length, 2, 3), np.uint8)
    goes_on = rng.random((64, length)) < 0.7
    expected = np.zeros((64, length - count + 1, count, 2, 3), np.uint8)
    for i in range(length - count + 1):
        newest = i + count - 1
        for t in range(i, newest + 1):
            is_same_episode = goes_on[:, t:newest].all(axis=1)
            expected[is_same_episode, i, t - i] = frames[is_same_episode, t]

    stacks = buffers.stack_frames(jnp.asarray(frames), count, jnp.asarray(goes_on))
    assert stacks.dtype == jnp.uint8
    assert_array_equal(stacks, expected)


def test_a_stack_of_one_is_the_frame():
    frames = jnp.ones((2, 3, 4))

    assert buffers.stack_frames(frames, 1, jnp.ones((2, 3), bool)) is frames


def atari(stack):
    """Makes two Atari environments, whose first episodes end after a few dozen steps."""
    return gym.make_vec(
        "ALE/Breakout-v5", 2, vectorization_mode="vector_entry_point", stack_num=stack
    )


@pytest.fixture(scope="module")
def breakout():
    """Collects rollouts of two environments whose frames we stack, and Atari's own stacks."""
    args = dqn_jax.Args(num_envs=2, frame_stack=4, buffer_size=200, learning_starts=128)
    single = FrameStack(atari(1), 4)
    spaces = (single.single_observation_space, gym.spaces.Discrete(4))
    agent = dqn_jax.Agent(args, *spaces, **replays.options(args, single, None))
    agent.act = lambda params, x, key, step: np.random.default_rng(step).integers(4, size=len(x))
    observation, _ = single.reset(seed=3)
    env_state = (observation, np.ones(2, bool))
    stacked = atari(4)
    observation, _ = stacked.reset(seed=3)
    native = [observation.copy()]
    rollouts = []
    for step in range(0, 600, agent.steps_per_iteration):
        rollout, env_state = dqn_jax.collect_rollout(agent, single, None, env_state, KEY, step)
        rollouts.append((rollout, env_state[0]))
        for action in rollout.action:
            observation, *_ = stacked.step(action)
            native.append(observation.copy())
    native = np.stack(native)[:, :, :, None]
    return SimpleNamespace(agent=agent, rollouts=rollouts, native=native)


def test_acting_sees_what_atari_stacks(breakout):
    observations = [rollout.observation for rollout, _ in breakout.rollouts]
    last = [next_observation for _, next_observation in breakout.rollouts]
    size = len(observations[0])

    assert_array_equal(np.concatenate(observations), breakout.native[:-1])
    assert_array_equal(np.stack(last), breakout.native[size::size])
    assert sum((~rollout.valid).sum() for rollout, _ in breakout.rollouts) >= 2


def test_learning_sees_what_atari_stacks(breakout):
    """Samples may cross resets and the write position."""
    replay = breakout.agent.replay
    add = jax.jit(replay.add_batch)
    state = replay.init(breakout.agent.example_step)
    for rollout, _ in breakout.rollouts:
        state = add(state, rollout)
    sample = replay.sample(state, KEY, 512)

    actions = np.concatenate([rollout.action for rollout, _ in breakout.rollouts])
    assert int(state.size) == 100  # rows, a third of the added ones
    stacks = sample.experience.observation
    assert stacks.shape == (512, 2, 4, 1, 84, 84)
    row, environment = np.divmod(np.asarray(sample.indices), 2)
    for i in (0, 1):
        at = (row + 3 + i, environment)
        assert_array_equal(stacks[:, i], breakout.native[at])
        assert_array_equal(sample.experience.action[:, i], actions[at])
    assert not sample.experience.valid.all()  # some sequences cross the end of an episode
