"""per_dqn_jax.py: what it changes of dqn_jax.py, against hand computations and known values."""

from dataclasses import replace
from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from events import read_events
from test_dqn import (
    LAST,
    PROBE,
    PlainReplay,
    learned_q,
    linear,
    plain_gradient_step,
    random_rollout,
    state_of,
    td_errors_by_hand,
    windows_by_hand,
)

import per_dqn_jax
from per_dqn_jax import Args, Run, Step, train

WEIGHTS = np.array([0.5, 1.0, 0.25])  # of the three windows by hand; the fourth one only resets


def gradient_by_hand(errors):
    """The gradient of the weighted mean of squared errors, by the values of both actions."""
    return np.array([-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3])


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_is_that_computed_by_hand(double_q):
    """Each row counts by its weight; one that only resets counts for nothing."""
    alg = linear(per_dqn_jax, Args(gamma=0.5, double_q=double_q))
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    batch = alg.to_transitions(windows_by_hand())
    np.testing.assert_array_equal(batch.valid, [True, True, True, False])
    weights = jnp.array([*WEIGHTS, 1e6])
    grad_fn = jax.value_and_grad(alg.loss, has_aux=True)

    (loss, (metrics, td_error)), grad = grad_fn(params, target_params, batch, weights)

    errors = td_errors_by_hand(double_q)
    np.testing.assert_array_equal(td_error[:3], errors)
    assert loss == pytest.approx(np.mean(WEIGHTS * errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    np.testing.assert_allclose(grad, gradient_by_hand(errors))


@pytest.mark.parametrize("double_q", [False, True])
def test_weights_and_priorities_of_a_gradient_step_are_those_by_hand(double_q, monkeypatch):
    """One that only resets has no weight, and gets priority 0."""
    args = Args(gamma=0.5, double_q=double_q, priority_epsilon=0.125, batch_size=4)
    alg = linear(per_dqn_jax, args)
    weighed = []
    priorities = []

    def importance_weights(probabilities, beta):
        weighed.append((probabilities, beta))
        return jnp.array([*WEIGHTS, 0.0])

    def sample(state, key, batch_size):
        assert batch_size == 4
        drawn = alg_sample(state, key, batch_size)
        probabilities = jnp.array([0.125, 0.25, 0.5, 0.75])
        return drawn._replace(experience=windows_by_hand(), probabilities=probabilities)

    def set_priorities(state, indices, values):
        priorities.append(values)
        return alg_set_priorities(state, indices, values)

    monkeypatch.setattr(per_dqn_jax.buffers, "importance_weights", importance_weights)
    replay = alg.replay
    alg_sample = replay.sample
    alg_set_priorities = replay.set_priorities
    by_hand = {"sample": sample, "set_priorities": set_priorities}
    alg.replay = SimpleNamespace(init=replay.init, **by_hand)
    state = state_of(alg, [1.0, 2.0], [10.0, 4.0])
    rollout, _ = random_rollout(np.random.default_rng(0), 10, np.zeros(1, bool))
    state = state._replace(replay=replay.add_batch(state.replay, Step(*rollout)))

    new, metrics = alg.gradient_step(state, jax.random.PRNGKey(0), 250_000)  # half of training

    ((probabilities, beta),) = weighed
    np.testing.assert_array_equal(probabilities, [0.125, 0.25, 0.5, 0])
    assert beta == pytest.approx(0.7)
    errors = td_errors_by_hand(double_q)
    np.testing.assert_array_equal(priorities[0], [*(np.abs(errors) + 0.125), 0])
    assert metrics["losses/importance_weight_min"] == 0.25
    assert metrics["losses/td_loss"] == pytest.approx(np.mean(WEIGHTS * errors**2))
    assert metrics["losses/priority_max"] == np.abs(errors).max() + 0.125
    np.testing.assert_allclose(new.params, [1.0, 2.0] - 0.1 * gradient_by_hand(errors))


def test_beta_ends_at_exactly_1():
    """Where the bias matters."""
    alg = linear(per_dqn_jax, Args(total_timesteps=3_000, learning_starts=500))
    beta = [alg.beta(step) for step in (0, 1_500, 2_990, 3_000, 4_000)]
    np.testing.assert_allclose(beta, [0.4, 0.7, 0.998, 1, 1], rtol=1e-6)
    assert beta[3] == beta[4] == 1


class PlainLearner:
    """Learns with Q(s, .) = s * params from batches of 8, drawn by priority and weighted.

    `shares` has, of each window that is held, its priority ** 0.6, at row * 3 + environment.
    """

    def __init__(self, alg, params, target_params):
        self.alg = alg
        self.params = params
        self.target_params = target_params
        self.steps = PlainReplay()
        self.shares = {}
        self.largest = 0.0
        self.resets = 0  # rows of batches that only reset

    def add(self, rollout):
        self.steps.add(rollout)
        rows = len(self.steps.rows)
        held = range(3 * max(rows - 10, 0), 3 * (rows - 2))  # windows of 3 rows, complete
        of_new = (self.largest or 1.0) ** 0.6
        self.shares = {index: self.shares.get(index, of_new) for index in held}

    def gradient_step(self, replay, key, beta):
        """The replay with the new priorities, and the metrics."""
        drawn = self.alg.replay.sample(replay, key, 8)
        indices = drawn.indices.tolist()
        probabilities = [self.shares[i] / sum(self.shares.values()) for i in indices]
        np.testing.assert_allclose(drawn.probabilities, probabilities, rtol=1e-4)
        *batch, valid = self.steps.batch(indices, 3, 2, 0.9)
        assert valid.any()
        weights = (len(self.shares) * np.array(probabilities)[valid]) ** -beta
        weights /= weights.max()
        self.params, error, value = plain_gradient_step(
            self.params, self.target_params, batch, weights=weights
        )
        priorities = np.zeros(8)
        priorities[valid] = np.abs(error) + 0.01
        self.shares |= dict(zip(indices, priorities**0.6, strict=True))
        self.largest = max(self.largest, priorities.max())
        self.resets += (~valid).sum()
        values = priorities.astype(np.float32)
        return self.alg.replay.set_priorities(replay, drawn.indices, values), {
            "losses/td_loss": np.mean(weights * error**2),
            "losses/q_values": value.mean(),
            "losses/importance_weight_min": weights.min(),
            "losses/priority_max": self.largest,
        }


def test_train_step_is_what_a_plain_loop_gives():
    """Drawn by priority, weighted, updated, priorities put back: one thing at a time.

    The buffer of 10 steps of 3 environments is overwritten; a step that only resets is garbage.
    """
    flags = dict(priority_exponent=0.6, priority_epsilon=0.01, double_q=False, n_step=2, gamma=0.9)
    sizes = dict(num_envs=3, train_frequency=4, batch_size=8, buffer_size=30, learning_starts=12)
    alg = linear(per_dqn_jax, Args(**flags, **sizes, total_timesteps=48))
    rng = np.random.default_rng(0)
    plain = PlainLearner(alg, params=np.array([0.5, -0.5]), target_params=np.array([1.5, 0.5]))
    target_params = plain.target_params.astype(np.float32)
    state = state_of(alg, plain.params.astype(np.float32), target_params)
    train_step = jax.jit(alg.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    betas = {0: 0.4, 12: 0.55, 24: 0.7, 36: 0.85}
    for step, beta in betas.items():
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        rollout = Step(*rollout)
        replay = alg.replay.add_batch(jax.tree.map(jnp.copy, state.replay), rollout)
        state, _, metrics = train_step(state, rollout, LAST, key, step)

        plain.add(rollout)
        gradient_steps = 3 if step > 0 else 0
        losses = {tag: 0 for tag in metrics if tag.startswith("losses/")}
        for own_key in jax.random.split(jax.random.fold_in(key, step), 3)[:gradient_steps]:
            replay, losses = plain.gradient_step(replay, own_key, beta)

        np.testing.assert_allclose(state.params, plain.params, rtol=1e-4)
        tree = np.asarray(state.replay.tree[0])[:30]
        shares = np.zeros(30)
        shares[[index % 30 for index in plain.shares]] = list(plain.shares.values())
        np.testing.assert_allclose(tree, shares, rtol=1e-4)
        np.testing.assert_array_equal(tree == 0, shares == 0)  # exactly
        assert metrics.pop("charts/beta") == pytest.approx(beta)
        assert metrics.pop("charts/gradient_steps") == gradient_steps
        assert metrics.pop("charts/replay_ratio") == gradient_steps / 12
        assert metrics.pop("charts/epsilon") == pytest.approx(max(1 - 0.95 * step / 24, 0.05))
        assert metrics == pytest.approx(losses, rel=1e-4)
    assert plain.resets > 1
    np.testing.assert_array_equal(state.target_params, target_params)


def test_a_batch_of_steps_that_only_reset_changes_nothing():
    """But their priorities, which are 0 from then on."""
    flags = dict(learning_starts=32, total_timesteps=100)
    args = Args(num_envs=2, train_frequency=8, batch_size=32, buffer_size=20, **flags)
    alg = linear(per_dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 4, np.zeros(2, bool))
    rollout = Step(*rollout)._replace(valid=np.zeros((4, 2), bool))
    state = state_of(alg, np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32))
    new, _, metrics = jax.jit(alg.train_step)(state, rollout, LAST, jax.random.PRNGKey(0), 32)
    np.testing.assert_array_equal(new.params, [1, 2])
    assert metrics["losses/td_loss"] == metrics["losses/q_values"] == 0
    np.testing.assert_array_equal(new.replay.tree[0], 0)
    assert new.replay.max_priority == 0
    assert int(new.num_updates) == 1


@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        slow("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),
    ],
)
def test_probe_values_are_learned(env_id, observations, values):
    _, q = learned_q(per_dqn_jax, env_id, np.array(observations, np.float32), PROBE)
    np.testing.assert_allclose(q, values, atol=0.03)


@pytest.mark.slow
def test_the_same_seed_makes_the_same_run():
    """The same parameters, the same replay, the same priorities."""
    args = Args(**vars(PROBE))
    run = Run(env_id="Probe-both-v0", eval_episodes=0)
    first, _, folder = train(args, run)
    second, _, _ = train(args, run)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other, _, _ = train(args, replace(run, seed=2))
    kernels = [state.params["params"]["Dense_0"]["kernel"] for state in (first, other)]
    assert (kernels[0] != kernels[1]).any()
    scalars, _ = read_events(folder)
    # Of the iteration that ends at the log entry: it began 8 steps before.
    betas = 0.4 + 0.6 * (np.arange(1_000, 4_001, 1_000) - 8) / 4_000
    np.testing.assert_allclose([beta for _, beta in scalars["charts/beta"]], betas, rtol=1e-6)
