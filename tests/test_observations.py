"""How observations are read: as images for convolutions, or vectors of numbers."""

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, Counter, Given
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Sequence, Tuple
from gymnasium.vector import SyncVectorEnv
from helpers import SMALL_DQN, assert_trees_equal, find_jax_env, make_agent

import dqn_jax
from cleanreplay.environments import FrameStack, describe, wrap
from cleanreplay.errors import UsageError
from cleanreplay.jax_envs import JaxEnvs


def made(space, observation=None, frame_stack=1):
    """Makes two environments with these observations, as a network sees them."""
    return wrap(SyncVectorEnv([lambda: Given(space, shown=observation)] * 2), frame_stack)


# A space, an observation, and the network's input.
VALUES = [
    (Discrete(4, start=2), np.int64(3), [0, 1, 0, 0]),
    (MultiDiscrete([2, 3]), np.array([1, 2]), [0, 1, 0, 0, 1]),
    (MultiBinary(3), np.int8([1, 0, 1]), [1, 0, 1]),
    (
        Dict({"where": Box(-1, 1, (2,)), "door": Discrete(2), "grey": Box(0, 9, (1, 2), np.uint8)}),
        {"where": np.float32([0.5, -0.25]), "door": np.int64(1), "grey": np.uint8([[7, 8]])},
        [0, 1, 7, 8, 0.5, -0.25],
    ),
    (Tuple([Discrete(2), Box(-1, 1, (1,))]), (np.int64(0), np.float32([0.5])), [1, 0, 0.5]),
    (Box(0, 12, (1, 2)), np.float32([[3, 4]]), [[3, 4]]),
]


@pytest.mark.parametrize(("space", "observation", "seen"), VALUES)
def test_observations_are_an_array_of_numbers(space, observation, seen):
    envs = made(space, observation)
    at_first, _ = envs.reset(seed=0)
    later, *_ = envs.step(np.zeros(2, int))
    envs.close()

    assert envs.single_observation_space.shape == np.shape(seen)
    assert envs.observation_space.contains(at_first)
    np.testing.assert_array_equal(at_first, [seen, seen])
    np.testing.assert_array_equal(later, [seen, seen])


IMAGE = Box(0, 255, (9, 9, 1), np.uint8)
TUPLE = Tuple([Discrete(2), Box(-1, 1, (1,))])
# A space, a stack of frames, and the line that describes how they are read.
LINES = [
    (Box(0, 1, (3,)), 1, ""),
    (Box(0, 1, (128,), np.uint8), 1, ""),
    (Box(0, 1, (3,)), 4, "stacks of 4 observations {} are flattened to 12 numbers"),
    (Box(0, 1, (40, 40, 3)), 1, "observations {} are flattened to 4,800 numbers"),
    (TUPLE, 1, "observations {} are flattened to 3 numbers"),
    (Box(0, 1, (36, 40), np.uint8), 4, "observations are images of 36 x 40 with 4 channels"),
    (Box(0, 1, (7, 7, 20), bool), 1, "observations are images of 7 x 7 with 20 channels"),
    (
        Dict(image=IMAGE, numbers=Box(-1, 1, (2,)), cell=Discrete(3)),
        3,
        "observations are a Dict of images (image of 9 x 9 with 3 channels) and 15 numbers",
    ),
]


@pytest.mark.parametrize(("space", "frame_stack", "line"), LINES)
def test_a_line_describes_how_observations_are_read(space, frame_stack, line):
    assert describe(made(space, frame_stack=frame_stack)) == line.format(space)


class Words(gym.Space):
    """A kind of space that Gymnasium does not know, like that of MiniGrid's missions."""


# A space, and a word of the error.
MISTAKES = [
    (Sequence(Box(0, 1, (1,))), "cannot be flattened"),
    (Dict({"words": Words(), "image": IMAGE}), "cannot be flattened"),
    (Discrete(10_000_001), "10,000,001 numbers"),
]


@pytest.mark.parametrize(("space", "word"), MISTAKES)
def test_observations_without_a_moderate_flat_form_are_refused(space, word):
    with pytest.raises(UsageError, match=word) as caught:
        made(space)

    assert "\n" not in str(caught.value)


def test_stacks_are_among_the_observations_of_their_space():
    envs = FrameStack(SyncVectorEnv([lambda: Given(Box(1, 2, (4,)))] * 2), 3)
    observation, _ = envs.reset(seed=0)

    assert envs.single_observation_space.shape == (3, 4)
    assert envs.observation_space.shape == observation.shape == (2, 3, 4)
    assert envs.observation_space.contains(observation)  # also with frames of zeros


shown = {"observation_space": TUPLE, "shown": VALUES[4][1]}
gym.register("ObservesTuple-v0", Given, kwargs=shown, disable_env_checker=True)


def test_a_run_begins_with_how_observations_are_read(capsys):
    find_jax_env(dqn_jax, dqn_jax.Args(), dqn_jax.Run(env_id="ObservesTuple-v0"))

    assert "ObservesTuple-v0: observations" in capsys.readouterr().out


class Loose(gym.vector.VectorWrapper):
    """Has flags that are numbers, and gives a reward for an autoreset step."""

    is_over = False

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.env.step(actions)
        reward = np.where(self.is_over, 100.0, reward)
        self.is_over = terminated | truncated
        return observation, reward, terminated.astype(int), truncated.astype(int), info


def test_number_flags_and_rewards_of_resets_change_nothing():
    args = dqn_jax.Args(**SMALL_DQN, num_envs=4, train_frequency=80, frame_stack=2)
    agent = make_agent(dqn_jax, args, dqn_jax.Run(env_id="environments:Counter-v0"))
    params = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.PRNGKey(0))

    def collected(wrapper):
        envs = FrameStack(wrapper(SyncVectorEnv([Counter] * 4)), 2)
        start = envs.reset(seed=5)[0], np.ones(4, bool)
        return dqn_jax.collect_rollout(agent, envs, params, start, jax.random.PRNGKey(0), 0)

    assert_trees_equal(collected(Loose), collected(lambda envs: envs))


class WholeNumbers(Chain):
    observation_space = Box(0, 1, (5,), np.int32)

    def observation(self, state, rng, params=None):
        return super().observation(state, rng).astype(jnp.int32)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.int32(next_state == 4)


def test_whole_numbers_of_compiled_environments_are_floats():
    agent = dqn_jax.Agent(dqn_jax.Args(num_envs=4), WholeNumbers.observation_space, Discrete(2))
    envs = JaxEnvs(agent, WholeNumbers(), time_limit=9)

    def collect():
        key = jax.random.PRNGKey(0)
        params = agent.policy_params(agent.init(key))
        return envs.collect(envs.reset(key, 4), params, key, jnp.int32(0))

    state, (rollout, _) = jax.eval_shape(collect)

    assert state.observation.dtype == jnp.float32
    assert (rollout.observation.dtype, rollout.reward.dtype) == (jnp.float32, jnp.float32)
