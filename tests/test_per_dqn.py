"""per_dqn_jax.py: its differences from dqn_jax.py, against hand computations."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import linear, state_of, td_errors_by_hand, windows_by_hand
from numpy.testing import assert_allclose, assert_array_equal

import per_dqn_jax
from per_dqn_jax import Args

KEY = jax.random.PRNGKey(0)
WEIGHTS = np.array([0.5, 1.0, 0.25])  # of the three sequences by hand; the fourth is not valid


def gradient_by_hand(errors):
    """Computes the gradient of the weighted mean squared error by the values of both actions."""
    return np.array([-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3])


@pytest.mark.parametrize("double_q", [False, True])
def test_a_gradient_step_is_that_by_hand(double_q, monkeypatch):
    """So are weights and priorities. An autoreset step has no weight, and gets priority 0."""
    args = Args(gamma=0.5, double_q=double_q, priority_epsilon=0.125, batch_size=4)
    agent = linear(per_dqn_jax, args)
    state = state_of(agent, [1.0, 2.0], [10.0, 4.0])
    drawn = SimpleNamespace(
        experience=windows_by_hand(),
        probabilities=jnp.array([0.125, 0.25, 0.5, 0.75]),
        indices=jnp.arange(4),
    )
    seen = {}

    def importance_weights(probabilities, beta):
        seen.update(probabilities=probabilities, beta=beta)
        return jnp.array([*WEIGHTS, 0.0])

    def set_priorities(replay, indices, priorities):
        seen.update(priorities=priorities)
        return SimpleNamespace(max_priority=7.0)

    monkeypatch.setattr(per_dqn_jax.buffers, "importance_weights", importance_weights)
    agent.replay = SimpleNamespace(sample=lambda *_: drawn, set_priorities=set_priorities)

    new, metrics = agent.gradient_step(state, KEY, 249_990, 250_000)  # of 500,000

    errors = td_errors_by_hand(double_q)
    assert_array_equal(seen["probabilities"], [0.125, 0.25, 0.5, 0])
    assert seen["beta"] == pytest.approx(0.7)
    assert_array_equal(seen["priorities"], [*(np.abs(errors) + 0.125), 0])
    assert metrics["losses/importance_weight_min"] == 0.25
    assert metrics["losses/td_loss"] == pytest.approx(np.mean(WEIGHTS * errors**2))
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    assert metrics["losses/priority_max"] == 7.0
    assert_allclose(new.params, [1.0, 2.0] - 0.1 * gradient_by_hand(errors))


def test_beta_rises_in_a_straight_line_and_stays_at_1():
    agent = linear(per_dqn_jax, Args(total_timesteps=3_000, learning_starts=500))

    beta = [agent.beta_at(step) for step in (0, 1_500, 2_990, 3_000, 4_000)]
    assert_allclose(beta, [0.4, 0.7, 0.998, 1, 1], rtol=1e-6)
    assert beta[3] == beta[4] == 1
