"""What the tests of the algorithms share: agents and rollouts that can be computed by hand."""

from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dqn_jax import Args, Step

TWO = gym.spaces.Discrete(2)


def box(*shape):
    """The space of observations of a shape."""
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)


def linear(module, args, features=1, num_actions=2):
    """The agent of a script, with Q(s, .) = s @ params and plain gradient descent at rate 0.1.

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
    """The state before training, with other parameters."""
    state = agent.init(jax.random.PRNGKey(0))
    params = jnp.asarray(params, jnp.float32)
    return state._replace(params=params, target_params=jnp.asarray(target_params, jnp.float32))


def filled(agent, state, steps=40):
    """The state, whose replay has so many steps of a single environment more."""
    rollout, _ = random_rollout(np.random.default_rng(0), steps, np.zeros(1, bool))
    rollout = type(agent.example_step)(*rollout)
    return state._replace(replay=agent.replay.add_batch(state.replay, rollout))


def random_rollout(rng, steps, resetting, features=1, garbage=0.0):
    """Steps [steps, N] of environments that end at random, and which of them reset at the next.

    `resetting` [N] says which of them reset at the first. The reward of an autoreset step is 0,
    or `garbage` that should not be looked at.
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
        reward=np.where(valid, rng.normal(size=(steps, n)), garbage).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
    )
    return rollout, resetting


class PlainReplay:
    """All steps ever stored, as a list [row][environment]."""

    def __init__(self, rows=()):
        self.rows = list(rows)

    def add(self, rollout):
        """Stores the steps [S, N] of a rollout."""
        for t in range(len(rollout.reward)):
            self.rows.append(jax.tree.map(lambda x, t=t: x[t], rollout))

    def transition(self, index, num_envs, n_step, gamma):
        """Observation, action, reward, discount, next observation; None of an autoreset step."""
        row, i = divmod(int(index), num_envs)
        stream = [jax.tree.map(lambda x: x[i], step) for step in self.rows[row : row + n_step + 1]]
        first = stream[0]
        if not first.valid:
            return None
        total = 0.0
        for m in range(n_step):
            total += gamma**m * float(stream[m].reward)
            after = stream[m + 1].observation
            if stream[m].terminated:
                return first.observation, first.action, total, 0.0, after
            if stream[m].truncated:
                break
        return first.observation, first.action, total, gamma ** (m + 1), after

    def batch(self, indices, num_envs, n_step, gamma):
        """The transitions of indices as arrays, and which of them count."""
        found = [self.transition(index, num_envs, n_step, gamma) for index in indices]
        valid = np.array([x is not None for x in found])
        columns = zip(*[x for x in found if x is not None], strict=True)
        return *map(np.array, columns), valid


def windows_by_hand(valid=True):
    """Three windows of two steps, in which every observation is 1; a fourth one full of garbage.

    Only the first step of a window counts, and the observation of the second one.
    """
    garbage = [1e6] * 4
    return Step(
        observation=jnp.ones((4, 2, 1)).at[3].set(1e6),
        action=jnp.array([[0, 1], [1, 0], [0, 1], [1, 1]]),
        reward=jnp.array([[1.0, 2.0, 3.0, 1e6], garbage]).T,
        terminated=jnp.array([[False, True, False, False], [True] * 4]).T,
        truncated=jnp.array([[False, False, True, True], [True] * 4]).T,
        valid=jnp.array([[valid] * 3 + [False], [True] * 4]).T,
    )


def td_errors_by_hand(double_q):
    """TD errors of the three windows if Q(1, .) is [1, 2], the target's [10, 4], and gamma 0.5.

    Action 1 is best online, action 0 in the target network, which judges either of them.
    Terminated: the reward alone. Truncated: bootstrapped as any other step.
    """
    bootstrap = 4.0 if double_q else 10.0
    return np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])


def plain_gradient_step(params, target_params, transitions, double_q=False, weights=1.0):
    """New parameters, TD errors, and values of the actions, of transitions that all count.

    Q(s, a) is s * params[a], and the rate of gradient descent is 0.1.
    """
    observation, action, reward, discount, next_observation = transitions
    rows = np.arange(len(action))
    value = (observation * params)[rows, action]
    next_q = next_observation * target_params
    best = (next_observation * (params if double_q else target_params)).argmax(-1)
    error = reward + discount * next_q[rows, best] - value
    gradient = np.zeros(2)
    np.add.at(gradient, action, -2 / len(rows) * weights * error * observation[:, 0])
    return params - 0.1 * gradient, error, value


# Flags with which the values of an environment Probe-* (environments.py) are learned in seconds.
PROBE = Args(
    total_timesteps=4_000,
    num_envs=8,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    target_network_frequency=40,
    learning_rate=1e-2,
    gamma=0.5,
    start_e=1.0,
    end_e=1.0,
)
