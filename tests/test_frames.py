"""Stacks of frames: as acting sees them, as the replay gives them back, as Atari makes them."""

from types import SimpleNamespace

import ale_py  # noqa: F401  (registers ALE/*)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_at_ends, make_trainer, more, network_of

import buffers
import dqn_jax
import per_dqn_jax
import ppo_jax
from cleanreplay import networks, replays
from cleanreplay.environments import FrameStack

KEY = jax.random.PRNGKey(0)


@fast_at_ends(("count", "length"), [(2, 2), (3, 5), (4, 5)])
def test_stack_frames_is_what_a_loop_over_each_window_gives(count, length):
    rng = np.random.default_rng(0)
    frames = rng.integers(1, 255, (64, length, 2, 3), np.uint8)
    goes_on = rng.random((64, length)) < 0.7
    stacks = length - count + 1
    got = jax.device_get(buffers.stack_frames(jnp.asarray(frames), count, jnp.asarray(goes_on)))
    assert got.shape == (64, stacks, count, 2, 3)
    assert got.dtype == jnp.uint8
    for b in range(64):
        for i in range(stacks):
            newest = i + count - 1
            for t in range(i, newest + 1):
                is_same_episode = goes_on[b, t:newest].all()
                np.testing.assert_array_equal(got[b, i, t - i], frames[b, t] * is_same_episode)


def test_stacks_of_flags_are_flags():
    frames = jnp.ones((1, 2, 3), bool)
    assert buffers.stack_frames(frames, 2, jnp.zeros((1, 2), bool)).dtype == bool


def test_a_stack_of_one_is_the_frame():
    frames = jnp.ones((2, 3, 4))
    assert buffers.stack_frames(frames, 1, jnp.ones((2, 3), bool)) is frames


def atari(stack):
    """Two of them, of which the first episode ends after a few dozen steps."""
    return gym.make_vec(
        "ALE/Breakout-v5", 2, vectorization_mode="vector_entry_point", stack_num=stack
    )


@pytest.fixture(scope="module", params=[dqn_jax, more(per_dqn_jax)])
def breakout(request):
    """Rollouts of two environments whose frames we stack, and what Atari stacks at each step."""
    script = request.param
    args = script.Args(num_envs=2, frame_stack=4, buffer_size=200, learning_starts=128)
    single = FrameStack(atari(1), 4)
    assert single.single_observation_space.shape == (4, 1, 84, 84)
    assert single.observation_space.shape == (2, 4, 1, 84, 84)
    spaces = (single.single_observation_space, gym.spaces.Discrete(4))
    agent = script.Agent(args, *spaces, **replays.options(args, single, None))
    state = jax.jit(agent.init)(KEY)
    params = agent.policy_params(state)
    observation, _ = single.reset(seed=3)
    env_state = (observation, np.ones(2, bool))
    stacked = atari(4)
    observation, _ = stacked.reset(seed=3)
    native = [observation.copy()]
    rollouts = []
    for step in range(0, 600, agent.steps_per_iteration):
        rollout, env_state = script.collect_rollout(agent, single, params, env_state, KEY, step)
        rollouts.append((rollout, env_state[0]))
        for action in rollout.action:
            observation, *_ = stacked.step(action)
            native.append(observation.copy())
    assert sum((~rollout.valid).sum() for rollout, _ in rollouts) >= 2  # episodes that ended
    return SimpleNamespace(
        agent=agent, replay=state.replay, rollouts=rollouts, native=np.stack(native)
    )


def test_acting_sees_what_atari_stacks(breakout):
    """Step by step, across resets."""
    begin = 0
    for rollout, next_observation in breakout.rollouts:
        end = begin + len(rollout.action)
        np.testing.assert_array_equal(rollout.observation[:, :, :, 0], breakout.native[begin:end])
        np.testing.assert_array_equal(next_observation[:, :, 0], breakout.native[end])
        begin = end


def test_learning_sees_what_atari_stacks(breakout):
    """Across resets and the write position."""
    add = jax.jit(breakout.agent.replay.add_batch)
    replay = breakout.replay
    for rollout, _ in breakout.rollouts:
        replay = add(replay, rollout)
    assert int(replay.size) == 100  # rows, a third of those added
    sample = breakout.agent.replay.sample(replay, KEY, 512)
    stacks = sample.experience.observation

    assert stacks.shape == (512, 2, 4, 1, 84, 84)
    row, environment = np.divmod(np.asarray(sample.indices), 2)
    for i in (0, 1):
        native = breakout.native[row + 3 + i, environment]
        np.testing.assert_array_equal(stacks[:, i, :, 0], native)
    assert not sample.experience.valid.all()  # some reach over the end of an episode


def test_the_network_sees_the_channels_that_atari_stacks():
    stacks = np.random.default_rng(0).integers(255, size=(3, 4, 84, 84)).astype(np.uint8)
    channels = networks.channels_last(jnp.asarray(stacks))
    assert channels.shape == (3, 84, 84, 4)
    network = network_of(dqn_jax, stacks)
    params = jax.jit(network.init)(KEY, stacks)
    apply = jax.jit(network.apply)
    q_values = apply(params, stacks)
    for other in (stacks[:, :, None], stacks[..., None]):  # with an axis of the one channel
        np.testing.assert_array_equal(networks.channels_last(jnp.asarray(other)), channels)
        np.testing.assert_array_equal(apply(params, other), q_values)


@pytest.mark.parametrize("script", [dqn_jax, more(per_dqn_jax), ppo_jax])
def test_functional_environments_stack_in_the_compiled_program(script):
    run = script.Run(env_id="phys2d/CartPole-v1")
    rollout = {"num_steps": 60} if script is ppo_jax else {"train_frequency": 240}
    trainer = make_trainer(script, script.Args(num_envs=4, frame_stack=3, **rollout), run)
    agent, envs = trainer.agent, trainer.envs
    params = agent.policy_params(jax.jit(agent.init)(KEY))
    _, (rollout, _) = jax.jit(envs.collect)(envs.reset(KEY, 4), params, KEY, 0)
    assert rollout.valid.shape == (60, 4)

    newest = np.asarray(rollout.observation[:, :, -1])
    valid = np.asarray(rollout.valid)
    assert not valid.all()
    stack = np.zeros((4, 3, 4), np.float32)
    for t in range(60):
        if t > 0:
            stack[~valid[t - 1]] = 0  # an episode begins, of which there are no older frames
        stack = np.concatenate([stack[:, 1:], newest[t][:, None]], axis=1)
        np.testing.assert_array_equal(rollout.observation[t], stack)


@pytest.mark.parametrize(("stack", "gigabytes"), [(1, 28.2), (4, 7.1)])
def test_a_million_steps_of_atari_take_so_many_gigabytes(stack, gigabytes):
    shape = (4, 84, 84) if stack == 1 else (4, 1, 84, 84)
    args = dqn_jax.Args(num_envs=8, frame_stack=stack, buffer_size=10**6, total_timesteps=10**7)
    observations = gym.spaces.Box(0, 255, shape, np.uint8)
    spaces = (observations, gym.spaces.Discrete(4))
    agent = dqn_jax.Agent(args, *spaces, **replays.options(args, None, None))
    replay = jax.eval_shape(agent.init, KEY).replay
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(replay))
    assert size / 1e9 == pytest.approx(gigabytes, abs=0.05)
