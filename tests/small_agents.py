"""Small agents of all scripts, which tests share so that their programs are compiled once."""

from functools import cache

import environments
import gymnasium as gym
import jax
import numpy as np
from by_hand import box, random_rollout
from jax.flatten_util import ravel_pytree

import dqn_jax
import iql_jax
import per_dqn_jax
import ppo_jax
import pqn_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import protocol

KEY = jax.random.PRNGKey(0)


class Bounded(environments.Counter):
    """Counter with continuous actions."""

    action_space = gym.spaces.Box(np.float32([-1, 0]), np.float32([1, 3]))


gym.register("Bounded-v0", Bounded)

# Flags for runs of eight iterations of 8 steps, of which the last six learn.
SMALL = dict(total_timesteps=64, num_envs=2)
REPLAY = SMALL | dict(learning_starts=16, train_frequency=8, batch_size=8, buffer_size=80)
DQN = REPLAY | dict(target_network_frequency=20, tau=0.25, hidden_sizes=(5,))
WINDOW = dict(burn_in=1, train_length=2, n_step=2, period=2)
R2D2 = REPLAY | WINDOW | dict(target_network_frequency=20, hidden_size=5)
SAC = REPLAY | dict(target_network_frequency=3, tau=0.25, hidden_sizes=(5,))
ROLLOUT = SMALL | dict(num_steps=4, num_minibatches=2, update_epochs=1)
IQL = REPLAY | dict(offline_data="data.npz", offline_fraction=0.5, hidden_sizes=(5,))
SCRIPTS = {
    "dqn": (dqn_jax, DQN),
    "per_dqn": (per_dqn_jax, DQN),
    "r2d2": (r2d2_jax, R2D2),
    "sac": (sac_jax, SAC),
    "iql": (iql_jax, IQL),
    "ppo": (ppo_jax, ROLLOUT | dict(hidden_sizes=(5,))),
    "pqn": (pqn_jax, ROLLOUT | dict(hidden_sizes=(5,))),
    "recurrent_ppo": (recurrent_ppo_jax, ROLLOUT | dict(sequence_length=2, hidden_size=5)),
}
WITH_REPLAY = ["dqn", "per_dqn", "r2d2", "sac", "iql"]
WITH_EPSILON = ["dqn", "per_dqn", "r2d2", "pqn"]
PPO = ["ppo", "recurrent_ppo"]
ON_POLICY = [*PPO, "pqn"]
DISCRETE = gym.spaces.Discrete(4, start=5)
MULTI = gym.spaces.MultiDiscrete([3, 5], start=[1, -2])
BOX = Bounded.action_space
SPACES = dict.fromkeys(WITH_EPSILON, DISCRETE) | dict.fromkeys(["sac", "iql", *PPO], BOX)


def make(name, space=None, **flags):
    """Makes an agent with the small flags and these, for this space or that of SPACES."""
    module, small = SCRIPTS[name]
    return module.Agent(module.Args(**small | flags), box(3), space or SPACES[name])


@cache
def learner(name):
    """Makes an agent whose `init` and `train_step` are compiled once."""
    agent = make(name)
    agent.init = jax.jit(agent.init)
    agent.train_step = jax.jit(agent.train_step)
    return agent


def train_step(agent, state, rollout, key, step, next_observation):
    """Calls `train_step` of an agent. One without a replay also gets the next observation."""
    more = (next_observation,) if protocol.takes(agent.train_step, "next_observation") else ()
    return agent.train_step(state, rollout, key, step, *more)


def random_steps(agent, seed=0):
    """Makes a rollout of random steps, in which episodes end in both ways."""
    rng = np.random.default_rng(seed)
    num_steps, num_envs = agent.rollout_shape
    ends, _ = random_rollout(rng, num_steps, np.zeros(num_envs, bool))

    def draw(x):
        size = (num_steps, num_envs, *x.shape)
        is_count = np.issubdtype(x.dtype, np.integer)
        return (rng.integers(2, size=size) if is_count else rng.normal(size=size)).astype(x.dtype)

    steps = jax.tree.map(draw, agent.example_step)
    flags = dict(terminated=ends.terminated, truncated=ends.truncated, valid=ends.valid)
    return steps._replace(**flags)


@cache
def iterations(name):
    """Runs eight iterations. Returns {first step: (state, new state, policy, metrics)}."""
    agent = learner(name)
    state = agent.init(KEY)
    found = {}
    for step in range(0, 64, 8):
        rollout = random_steps(agent, step)
        new, *rest = train_step(agent, state, rollout, KEY, step, rollout.observation[0])
        found[step] = (state, new, *rest)
        state = new
    return found


def vector(tree):
    return np.asarray(ravel_pytree(tree)[0])


@cache
def actor(name, kind):
    """Makes an agent, and parameters with which observations and the recurrent state matter."""
    flags = dict(normalize_observations=False) if name in PPO else {}
    if name in WITH_EPSILON:
        flags = dict(start_e=1.0, end_e=0.0, exploration_fraction=0.5)
    agent = make(name, {"discrete": DISCRETE, "multi": MULTI, "box": BOX}[kind], **flags)
    params = agent.policy_params(jax.jit(agent.init)(KEY))
    return agent, jax.tree.map(lambda x: 5 * x, params)


def act(agent, params, observation, *key_and_step):
    """Returns the environment's actions that `act` chooses at the start of episodes."""
    memory = [agent.no_memory(len(observation))] if hasattr(agent, "no_memory") else []
    action = agent.act(params, observation, *memory, *key_and_step)
    return agent.to_env_action(np.asarray(action[0] if memory else action))


def observations(*shape):
    return 3 * np.random.default_rng(0).normal(size=(*shape, 3)).astype(np.float32)
