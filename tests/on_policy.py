"""Rollouts, and both networks in NumPy, shared by the tests of PPO and recurrent PPO."""

from contextlib import closing
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from by_hand import dense, lstm_step
from gymnasium.vector import SyncVectorEnv
from numpy.testing import assert_array_equal

import ppo_jax
import recurrent_ppo_jax

BOTH = pytest.mark.parametrize("script", [ppo_jax, recurrent_ppo_jax], ids=["ppo", "recurrent"])
KEY = jax.random.PRNGKey(7)
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(3, start=5)
MULTI = gym.spaces.MultiDiscrete([2, 4], start=[1, -2])
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
SPACES = {"discrete": DISCRETE, "multi": MULTI, "box": BOX}

SMALL = dict(
    num_envs=4,
    num_steps=24,
    num_minibatches=2,
    update_epochs=2,
    gamma=0.9,
    gae_lambda=0.8,
    learning_rate=1e-2,
    anneal_lr=False,
    normalize_rewards=None,
)
# Flags of each script with which a network is small and a rollout has several sequences.
SIZES = {
    ppo_jax: dict(hidden_sizes=(5, 5)),
    recurrent_ppo_jax: dict(hidden_size=5, sequence_length=8),
}
FLAGS = {"multi": dict(clip_rewards=True, normalize_observations=True), "box": {}}


def make(script, space, **flags):
    args = script.Args(**SMALL | SIZES[script] | flags)
    return script.Agent(args, OBSERVATIONS, space)


def random_params(params, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(scale=0.5, size=x.shape).astype(x.dtype), params)


def random_state(agent):
    """Returns a State whose policy has preferences and uses its memory; everything else is 0."""
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(agent.init, KEY))
    return state._replace(params=random_params(state.params))


def assert_trees_equal(actual, expected):
    jax.tree.map(assert_array_equal, actual, expected)


class Random(gym.Env):
    """Has random observations and rewards; one step in three terminates or truncates the episode.

    The first observation of an episode has a 1 in the third place, the others a 0.
    """

    observation_space = OBSERVATIONS

    def __init__(self, action_space):
        self.action_space = action_space

    def _observe(self, is_first):
        return np.append(self.np_random.normal(size=2), is_first).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(True), {}

    def step(self, action):
        assert self.action_space.contains(action)
        terminated, truncated = self.np_random.random(2) < 0.18
        reward = self.np_random.normal()
        return self._observe(False), reward, terminated, truncated and not terminated, {}


class Collected(NamedTuple):
    agent: object
    state: object
    rollouts: list
    next_observation: np.ndarray  # after the last rollout
    next_valid: np.ndarray
    next_memory: tuple  # () for PPO


@cache
def collected(script, kind):
    """Returns three rollouts of four environments; `kind` is one of FLAGS."""
    agent = make(script, SPACES[kind], **FLAGS[kind])
    stats = script.RunningMeanStd(jnp.full(3, 0.2), jnp.full(3, 4.0), jnp.float32(9))
    state = random_state(agent)._replace(obs_rms=stats)
    rollouts = []
    with closing(SyncVectorEnv([partial(Random, SPACES[kind])] * 4)) as envs:
        env_state = script.reset(envs, KEY, 1)
        if hasattr(agent, "no_memory"):
            env_state = (*env_state, agent.no_memory(4))
        for step in (0, 96, 192):
            inputs = (agent.policy_params(state), env_state, KEY, step)
            rollout, env_state = script.collect_rollout(agent, envs, *inputs)
            rollouts.append(rollout)
    assert min(rollout.terminated.sum(), rollout.truncated.sum()) > 4
    observation, valid, *memory = env_state
    # In the last step and in the one after it some environments have an autoreset step.
    assert set(rollout.valid[-1]) == set(valid) == {True, False}
    return Collected(agent, state, rollouts, observation, valid, *memory or [()])


@cache
def learned(script, kind):
    """Runs `train_step` on the last rollout. Returns State, parameters, batch and metrics."""
    agent, state, rollouts, next_observation, *_ = collected(script, kind)
    optimize = agent.optimize
    agent.optimize = lambda state, batch, key, rate: (state, {"batch": batch, "rate": rate})
    try:
        train_step = jax.jit(agent.train_step)
        state, params, metrics = train_step(state, rollouts[-1], KEY, 192, next_observation)
    finally:
        agent.optimize = optimize
    return SimpleNamespace(state=state, params=params, batch=metrics.pop("batch"), metrics=metrics)


def in_time(agent, x):
    """Turns steps [B, ...] of a batch, or its sequences [B, L, ...], into steps [S, N, ...]."""
    x = np.asarray(x)
    num_steps, num_envs = agent.rollout_shape
    length = getattr(agent.args, "sequence_length", None)
    if length is None:
        return x.reshape(num_steps, num_envs, *x.shape[1:])
    steps = x.reshape(-1, num_envs, length, *x.shape[2:]).swapaxes(1, 2)
    return steps.reshape(num_steps, num_envs, *x.shape[2:])


def perceptron(params, name, x):
    """Applies the layers `name`_0, `name`_1 ... with tanh, and the last one."""
    i = 0
    while f"{name}_{i}" in params:
        x = np.tanh(dense(params[f"{name}_{i}"], x))
        i += 1
    return dense(params[name], x)


def network(params, observation, memory=()):
    """Computes the output and V(s) of one step, and the LSTM's carry of recurrent PPO."""
    params = jax.tree.map(np.float64, params["params"])
    x, carry = observation, ()
    if memory:
        cell, hidden, last_action = memory
        encoded = np.tanh(dense(params["encoder_0"], observation))
        inputs = np.concatenate([encoded, last_action], axis=-1)
        _, x = carry = lstm_step(params["lstm"], cell, hidden, inputs)
    output = perceptron(params, "actor", x)
    if "log_std" in params:
        log_std = np.broadcast_to(params["log_std"], output.shape)
        output = np.concatenate([output, log_std], axis=-1)
    return output, perceptron(params, "critic", x)[..., 0], carry


def plain_outputs(case):
    """Computes outputs and values of the S steps of the last rollout and the one after it."""
    rollout = case.rollouts[-1]
    observation = np.concatenate([rollout.observation, case.next_observation[None]])
    memory = [
        np.concatenate([x, y[None]])
        for x, y in zip(getattr(rollout, "memory", ()), case.next_memory, strict=True)
    ]
    return network(case.state.params, (observation - 0.2) / 2, memory)


def log_prob_and_entropy(space, output, action):
    if isinstance(space, gym.spaces.Box):
        mean, log_std = np.split(np.float64(output), 2, axis=-1)
        normal = scipy.stats.norm(mean, np.exp(log_std))
        return normal.logpdf(action).sum(axis=-1), normal.entropy().sum(axis=-1)
    sizes = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", None)))
    logits = np.float64(output).reshape(*output.shape[:-1], len(sizes), -1)
    action = np.reshape(action, logits.shape[:-1])
    log_probs = []
    entropies = []
    for i, size in enumerate(sizes):
        log_p = scipy.special.log_softmax(logits[..., i, :size], axis=-1)
        log_probs.append(np.take_along_axis(log_p, action[..., i, None], axis=-1)[..., 0])
        entropies.append(scipy.stats.entropy(np.exp(log_p), axis=-1))
    return sum(log_probs), sum(entropies)


def plain_gae(rollout, reward, value, gamma, gae_lambda):
    """Sums discounted temporal differences up to the end of the episode. V(s) is [S + 1, N]."""
    steps = len(reward)
    advantage = np.zeros((steps + 1, *value.shape[1:]))
    for t, i in reversed(list(np.ndindex(reward.shape))):
        if not rollout.valid[t, i]:
            continue
        bootstrap = 0 if rollout.terminated[t, i] else value[t + 1, i]
        over = rollout.terminated[t, i] or rollout.truncated[t, i]
        later = 0 if over else advantage[t + 1, i]
        delta = reward[t, i] + gamma * bootstrap - value[t, i]
        advantage[t, i] = delta + gamma * gae_lambda * later
    return advantage[:-1]
