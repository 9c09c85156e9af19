"""per_dqn_jax.py: what it changes of dqn_jax.py, against hand computations."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import (
    filled,
    linear,
    random_rollout,
    state_of,
    td_errors_by_hand,
    windows_by_hand,
)

import per_dqn_jax
from per_dqn_jax import Args, Step

KEY = jax.random.PRNGKey(0)
WEIGHTS = np.array(
    [0.5, 1.0, 0.25]
)  # of the three windows by hand; the fourth is an autoreset step


def gradient_by_hand(errors):
    """The gradient of the weighted mean of squared errors, by the values of both actions."""
    return np.array([-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3])


@pytest.mark.parametrize("double_q", [False, True])
def test_a_gradient_step_is_that_by_hand(double_q, monkeypatch):
    """With its weights and priorities. An autoreset step has no weight, and gets priority 0."""
    args = Args(gamma=0.5, double_q=double_q, priority_epsilon=0.125, batch_size=4)
    agent = linear(per_dqn_jax, args)
    weighed = []
    priorities = []

    def importance_weights(probabilities, beta):
        weighed.append((probabilities, beta))
        return jnp.array([*WEIGHTS, 0.0])

    def sample(state, key, batch_size):
        assert batch_size == 4
        drawn = replay.sample(state, key, batch_size)
        probabilities = jnp.array([0.125, 0.25, 0.5, 0.75])
        return drawn._replace(experience=windows_by_hand(), probabilities=probabilities)

    def set_priorities(state, indices, values):
        priorities.append(values)
        return replay.set_priorities(state, indices, values)

    monkeypatch.setattr(per_dqn_jax.buffers, "importance_weights", importance_weights)
    replay = agent.replay
    state = filled(agent, state_of(agent, [1.0, 2.0], [10.0, 4.0]), steps=10)
    agent.replay = SimpleNamespace(sample=sample, set_priorities=set_priorities)

    new, metrics = agent.gradient_step(state, KEY, 249_990, 250_000)  # of 500,000

    ((probabilities, beta),) = weighed
    np.testing.assert_array_equal(probabilities, [0.125, 0.25, 0.5, 0])
    assert beta == pytest.approx(0.7)
    errors = td_errors_by_hand(double_q)
    np.testing.assert_array_equal(priorities[0], [*(np.abs(errors) + 0.125), 0])
    assert metrics["losses/importance_weight_min"] == 0.25
    assert metrics["losses/td_loss"] == pytest.approx(np.mean(WEIGHTS * errors**2))
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    assert metrics["losses/priority_max"] == np.abs(errors).max() + 0.125
    np.testing.assert_allclose(new.params, [1.0, 2.0] - 0.1 * gradient_by_hand(errors))


def test_beta_rises_in_a_straight_line_and_stays_at_1():
    agent = linear(per_dqn_jax, Args(total_timesteps=3_000, learning_starts=500))

    beta = [agent.beta_at(step) for step in (0, 1_500, 2_990, 3_000, 4_000)]
    np.testing.assert_allclose(beta, [0.4, 0.7, 0.998, 1, 1], rtol=1e-6)
    assert beta[3] == beta[4] == 1


def test_a_batch_of_autoreset_steps_changes_nothing():
    """Except their priorities, which are 0 from then on."""
    flags = dict(learning_starts=32, total_timesteps=100)
    args = Args(num_envs=2, train_frequency=8, batch_size=32, buffer_size=20, **flags)
    agent = linear(per_dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 4, np.zeros(2, bool))
    rollout = Step(*rollout)._replace(valid=np.zeros((4, 2), bool))
    state = state_of(agent, np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32))
    new, _, metrics = jax.jit(agent.train_step)(state, rollout, KEY, 32)
    np.testing.assert_array_equal(new.params, [1, 2])
    assert metrics["losses/td_loss"] == metrics["losses/q_values"] == 0
    np.testing.assert_array_equal(new.replay.tree[0], 0)
    assert new.replay.max_priority == 0
    assert metrics["charts/gradient_steps"] == 1
