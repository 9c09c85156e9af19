"""Observations that are no vectors of floats: flattened, one-hot or cast."""

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, Counter
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Sequence, Tuple
from helpers import (
    COUNTER,
    SMALL_DQN,
    SMALL_PPO,
    assert_trees_equal,
    find_jax_env,
    make_agent,
    make_trainer,
    more,
    one_line,
    read_events,
)

import dqn_jax
import per_dqn_jax
import ppo_jax


class Observes(gym.Env):
    """Shows one observation for ever."""

    action_space = Discrete(2)

    def __init__(self, space, observation):
        self.observation_space = space
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action):
        return self.observation, 1.0, False, False, {}


PIXELS = np.arange(12, dtype=np.float32).reshape(3, 4)
OBSERVATIONS = {
    "Discrete": (Discrete(4, start=2), np.int64(3), [0, 1, 0, 0]),
    "MultiBinary": (MultiBinary(3), np.int8([1, 0, 1]), [1, 0, 1]),
    "Dict": (
        Dict({"where": Box(-1, 1, (2,)), "door": Discrete(2)}),
        {"door": np.int64(1), "where": np.float32([0.5, -0.25])},
        [0, 1, 0.5, -0.25],
    ),
    "Tuple": (
        Tuple([Discrete(2), Box(-1, 1, (1,))]),
        (np.int64(0), np.float32([0.5])),
        [1, 0, 0.5],
    ),
    "Image": (Box(0, 12, (3, 4)), PIXELS, PIXELS),
    "Small": (Box(0, 255, (3, 4), np.uint8), np.uint8(PIXELS), np.uint8(PIXELS)),
}
for kind, (space, observation, _) in OBSERVATIONS.items():
    given = {"space": space, "observation": observation}
    how = {"max_episode_steps": 5, "disable_env_checker": True}  # it dislikes the same object
    gym.register(f"Observes{kind}-v0", Observes, kwargs=given, **how)
for n in (10**9, 10**7 + 1):
    of_many_states = {"space": Discrete(n), "observation": np.int64(3)}
    gym.register(f"ObservesState{n}-v0", Observes, kwargs=of_many_states)
of_any_length = {"space": Sequence(Box(0, 1, (1,))), "observation": ()}
gym.register("ObservesSequence-v0", Observes, kwargs=of_any_length)


class Words(gym.Space):
    """A kind of space that Gymnasium does not know, as MiniGrid's missions are of."""


with_words = {"space": Dict({"words": Words(), "cell": Discrete(2)}), "observation": {}}
gym.register("ObservesWords-v0", Observes, kwargs=with_words)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_that_are_no_vector_are_flattened(kind):
    _, _, flat = OBSERVATIONS[kind]
    args = dqn_jax.Args(**SMALL_DQN)
    run = dqn_jax.Run(env_id=f"Observes{kind}-v0")
    agent = make_agent(dqn_jax, args, run)
    envs = dqn_jax.make_envs(args, run, 2)
    at_first, _ = envs.reset(seed=0)
    later, *_ = envs.step(np.zeros(2, int))
    envs.close()
    for observation in (at_first, later):
        np.testing.assert_array_equal(observation, [flat, flat])
    assert agent.example_step.observation.shape == np.shape(flat)


@pytest.mark.parametrize("kind", ["Dict", more("Image"), more("Small")])
def test_observations_that_are_no_vector_are_learned_from(kind):
    _, _, flat = OBSERVATIONS[kind]
    run = dqn_jax.Run(env_id=f"Observes{kind}-v0", eval_episodes=0)
    state, _, _ = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    stored = np.asarray(state.replay.storage.observation[:100, 0])
    np.testing.assert_array_equal(stored, np.broadcast_to(flat, stored.shape))


@pytest.mark.parametrize("kind", ["Sequence", "Words"])
def test_observations_that_have_no_flat_form_are_a_mistake(kind, run_main):
    line = one_line(run_main(dqn_jax, "--env-id", f"Observes{kind}-v0"))
    assert "cannot be flattened to a Box: a wrapper must choose what the network sees" in line


@pytest.mark.parametrize(("size", "n"), [("1,000,000,000", 10**9), ("10,000,001", 10**7 + 1)])
def test_observations_whose_flat_form_is_huge_are_a_mistake(size, n, run_main):
    line = one_line(run_main(dqn_jax, "--env-id", f"ObservesState{n}-v0"))
    wanted = (
        f"observations Discrete({n}) would be flattened to {size} numbers, more than 10,000,000"
    )
    assert f"{wanted}: a wrapper must choose what the network sees" in line


TUPLE = "observations Tuple(Discrete(2), Box(-1.0, 1.0, (1,), float32)) are flattened to 3 numbers"


@pytest.mark.parametrize(
    ("env_id", "wanted"),
    [
        ("ObservesTuple-v0", TUPLE),
        ("FlagsInJax-v0", "observations are images of 7 x 7 with 20 channels"),
    ],
    ids=["ordinary", "compiled"],
)
def test_a_run_says_once_how_observations_are_read(env_id, wanted, run_main):
    """Not again in its evaluations."""
    flags = [f"--{name.replace('_', '-')}={x}" for name, x in SMALL_DQN.items()]
    flags += ["--log-interval=100", "--eval-interval=100", "--eval-max-steps=5"]
    code, out, _ = run_main(dqn_jax, "--env-id", env_id, "--checkpoint-interval=0", *flags)
    assert code == 0
    assert out.count("in an evaluation") == 2
    assert [x for x in out.splitlines() if "observations" in x] == [f"{env_id}: {wanted}"]


class FlagsInJax(Chain):
    """Each state is a plane of flags that are set."""

    observation_space = gym.spaces.Box(0, 1, (7, 7, 20), bool)

    def observation(self, state, rng, params=None):
        return jnp.broadcast_to(jnp.arange(20) == state, (7, 7, 20))


def make_flags(**kwargs):
    return FunctionalJaxEnv(FlagsInJax(), metadata={"render_modes": []}, **kwargs)


gym.register("FlagsInJax-v0", make_flags, max_episode_steps=9, disable_env_checker=True)


class Loose(gym.vector.VectorEnv):
    """Four counters whose flags are numbers, and which give a reward for the step that resets."""

    metadata: dict = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.envs = gym.vector.SyncVectorEnv([Counter] * num_envs)  # a pool, not a list
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space
        self.observation_space = self.envs.observation_space
        self.action_space = self.envs.action_space

    def reset(self, **kwargs):
        self.is_over = np.zeros(self.num_envs, bool)
        return self.envs.reset(**kwargs)

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.envs.step(actions)
        reward = np.where(self.is_over, 100.0, reward)
        self.is_over = terminated | truncated
        return observation, reward, terminated.astype(int), truncated.astype(int), info


gym.register("Loose-v0", vector_entry_point=Loose)


@pytest.mark.more
def test_flags_that_are_numbers_and_rewards_for_resets_change_nothing():
    args = dqn_jax.Args(**SMALL_DQN, num_envs=4)
    settings = COUNTER | {"checkpoint_interval": 0}
    strict, strict_returns, _ = dqn_jax.train(args, dqn_jax.Run(**settings))
    loose, loose_returns, _ = dqn_jax.train(args, dqn_jax.Run(**settings | {"env_id": "Loose-v0"}))
    np.testing.assert_array_equal(loose_returns, strict_returns)
    assert_trees_equal(loose, strict)


class Pairs(gym.Env):
    """It observes three pairs of whole numbers in turns."""

    observation_space = gym.spaces.MultiDiscrete([2, 3])
    action_space = gym.spaces.Discrete(2)
    pairs = ((0, 0), (1, 2), (0, 1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array(self.pairs[0]), {}

    def step(self, action):
        self.count += 1
        return np.array(self.pairs[self.count % 3]), 1.0, False, self.count == 8, {}


gym.register("Pairs-v0", Pairs)


def first_rollout(args, run):
    """What is collected first in a run, and the observation after it."""
    agent = make_agent(dqn_jax, args, run)
    envs = dqn_jax.make_envs(args, run, args.num_envs)
    observation, _ = envs.reset(seed=5)
    env_state = (observation, np.ones(args.num_envs, bool))
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    key = jax.random.PRNGKey(0)
    rollout, (last, _) = dqn_jax.collect_rollout(agent, envs, params, env_state, key, 0)
    envs.close()
    return rollout, last


def test_whole_numbers_of_several_kinds_are_one_hot_side_by_side():
    args = dqn_jax.Args(num_envs=2, train_frequency=16, **SMALL_DQN)
    rollout, last = first_rollout(args, dqn_jax.Run(env_id="Pairs-v0"))
    flat = np.float32([[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]])
    assert rollout.observation.dtype == np.float32
    for env in range(2):
        np.testing.assert_array_equal(rollout.observation[:, env], flat[np.arange(8) % 3])
    np.testing.assert_array_equal(last, [flat[2]] * 2)


def test_the_states_of_frozen_lake_are_one_hot():
    """The observation is that of the environment, stepped with the same actions."""
    run = dqn_jax.Run(env_id="FrozenLake-v1")
    args = dqn_jax.Args(**SMALL_DQN, train_frequency=40)
    rollout, _ = first_rollout(args, run)
    env = gym.make("FrozenLake-v1")
    state, _ = env.reset(seed=5)
    states = []
    valid = True
    for action in rollout.action[:, 0]:
        states.append(state)
        if valid:
            state, _, terminated, truncated, _ = env.step(action)
            valid = not (terminated or truncated)
        else:
            state, _ = env.reset()
            valid = True
    assert len(set(states)) > 1
    np.testing.assert_array_equal(rollout.observation[:, 0], np.eye(16)[states])


SCRIPTS = {
    "dqn": (dqn_jax, SMALL_DQN),
    "per_dqn": (per_dqn_jax, SMALL_DQN),
    "ppo": (ppo_jax, SMALL_PPO),
}
NAMES = ["dqn", more("per_dqn"), more("ppo")]


class OtherNumbers(Chain):
    """Whole numbers for observations and rewards."""

    observation_space = gym.spaces.Box(0, 1, (5,), np.int32)

    def observation(self, state, rng, params=None):
        return super().observation(state, rng).astype(jnp.int32)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.int32(next_state == 4)


def make_other_numbers(**kwargs):
    return FunctionalJaxEnv(OtherNumbers(), metadata={"render_modes": []}, **kwargs)


gym.register("OtherNumbers-v0", make_other_numbers, max_episode_steps=9, disable_env_checker=True)


@pytest.mark.more
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("env_id", ["OtherNumbers-v0", more("tabular/Blackjack-v0")])
def test_functional_environments_of_whole_numbers(name, env_id):
    module, flags = SCRIPTS[name]
    args = module.Args(**flags | dict(num_envs=4))
    run = module.Run(env_id=env_id, log_interval=64, eval_episodes=2)
    assert find_jax_env(module, args, run) is not None
    state, returns, folder = module.train(args, run)
    assert np.isfinite(returns).all()
    assert np.isfinite(read_events(folder)[0]["eval/episodic_return"][-1][1])
    trainer = make_trainer(module, args, run)
    assert trainer.agent.example_step.observation.dtype == np.float32
    assert trainer.init().envs.observation.dtype == jnp.float32
    if module is not ppo_jax:
        assert state.replay.storage.observation.dtype == jnp.float32
        assert state.replay.storage.reward.dtype == jnp.float32
