"""Agents and rollouts that can be computed by hand, shared by the tests of the algorithms."""

from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.special import expit

from dqn_jax import Step

TWO = gym.spaces.Discrete(2)


def box(*shape):
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)


def linear(module, args, features=1, num_actions=2):
    """Makes the agent of a script, with Q(s, .) = s @ params and gradient descent at rate 0.1.

    `params` [features * num_actions] begin as zeros.
    """
    agent = module.Agent(args, box(features), gym.spaces.Discrete(num_actions))
    agent.network = SimpleNamespace(
        init=lambda key, observation: jnp.zeros(features * num_actions),
        apply=lambda params, observation: observation @ params.reshape(features, num_actions),
    )
    agent.optimizer = optax.sgd(0.1)
    return agent


def state_of(agent, params, target_params):
    state = agent.init(jax.random.PRNGKey(0))
    params = jnp.asarray(params, jnp.float32)
    return state._replace(params=params, target_params=jnp.asarray(target_params, jnp.float32))


def dense(layer, x):
    return x @ layer["kernel"] + layer.get("bias", 0)


def lstm_step(layers, cell, hidden, x):
    """Takes a step of an LSTM of flax in NumPy. Returns the new cell and hidden state."""
    i, f, g, o = [
        dense(layers[f"i{gate}"], x) + dense(layers[f"h{gate}"], hidden) for gate in "ifgo"
    ]
    cell = expit(f) * cell + expit(i) * np.tanh(g)
    return cell, expit(o) * np.tanh(cell)


def random_rollout(rng, steps, resetting, features=1):
    """Makes steps [steps, N] in which episodes end at random. Also returns the next `resetting`.

    `resetting` [N] marks environments whose next step is an autoreset step, with the reward 0.
    """
    n = len(resetting)
    terminated = np.zeros((steps, n), bool)
    truncated = np.zeros((steps, n), bool)
    valid = np.zeros((steps, n), bool)
    for t in range(steps):
        valid[t] = ~resetting
        terminated[t] = valid[t] & (rng.random(n) < 0.15)
        truncated[t] = valid[t] & ~terminated[t] & (rng.random(n) < 0.15)
        resetting = terminated[t] | truncated[t]
    rollout = Step(
        observation=rng.normal(size=(steps, n, features)).astype(np.float32),
        action=rng.integers(2, size=(steps, n), dtype=np.int32),
        reward=np.where(valid, rng.normal(size=(steps, n)), 0.0).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
    )
    return rollout, resetting


def windows_by_hand():
    """Makes three sequences of two steps, in which every observation is 1; a fourth has garbage.

    Only the first step of a sequence counts, and the observation of the second one.
    """
    garbage = [1e6] * 4
    return Step(
        observation=jnp.ones((4, 2, 1)).at[3].set(1e6),
        action=jnp.array([[0, 1], [1, 0], [0, 1], [1, 1]]),
        reward=jnp.array([[1.0, 2.0, 3.0, 1e6], garbage]).T,
        terminated=jnp.array([[False, True, False, False], [True] * 4]).T,
        truncated=jnp.array([[False, False, True, True], [True] * 4]).T,
        valid=jnp.array([[True] * 3 + [False], [True] * 4]).T,
    )


def td_errors_by_hand(double_q):
    """Returns TD errors of the three sequences, with Q(1, .) = [1, 2], target [10, 4], gamma 0.5.

    Action 1 is best online, action 0 in the target network, which evaluates either of them.
    Terminated: the target is the reward. Truncated: it bootstraps as for any other step.
    """
    bootstrap = 4.0 if double_q else 10.0
    return np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
