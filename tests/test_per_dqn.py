"""per_dqn_jax.py: what it changes of dqn_jax.py, against hand computations and known values."""

from dataclasses import replace

import environments  # noqa: F401  (registers)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from events import read_events
from test_dqn import (
    PROBE,
    PlainReplay,
    learned_q,
    linear,
    random_rollout,
    state_of,
    windows_by_hand,
)

import per_dqn_jax
from per_dqn_jax import Args, Run, Step, train


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_by_hand(double_q):
    """Each row counts by its weight; one that only resets counts for nothing."""
    alg = linear(per_dqn_jax, Args(gamma=0.5, double_q=double_q))
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    batch = alg.to_transitions(windows_by_hand())
    weights = jnp.array([0.5, 1.0, 0.25, 1e6])
    np.testing.assert_array_equal(batch.valid, [True, True, True, False])
    grad_fn = jax.value_and_grad(alg.loss, has_aux=True)
    (loss, (metrics, td_error)), grad = grad_fn(params, target_params, batch, weights)
    bootstrap = 4.0 if double_q else 10.0  # action 1 is best online, action 0 in the target
    errors = np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
    np.testing.assert_array_equal(td_error[:3], errors)
    assert loss == pytest.approx(np.mean([0.5, 1.0, 0.25] * errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    wanted = [-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3]
    np.testing.assert_allclose(grad, wanted)


@pytest.mark.parametrize("double_q", [False, True])
def test_weights_and_priorities_of_a_gradient_step_by_hand(double_q, monkeypatch):
    """One that only resets has no weight, and gets priority 0."""
    args = Args(gamma=0.5, double_q=double_q, priority_epsilon=0.125, batch_size=4)
    alg = linear(per_dqn_jax, args)
    seen = []
    priorities = []

    def importance_weights(probabilities, size, beta):
        seen.append((probabilities, size, beta))
        return jnp.array([0.5, 1.0, 0.25, 0.0])

    def sample(state, key, batch_size):
        assert batch_size == 4
        drawn = alg_sample(state, key, batch_size)
        probabilities = jnp.array([0.125, 0.25, 0.5, 0.75])
        return drawn._replace(experience=windows_by_hand(), probabilities=probabilities)

    def set_priorities(state, indices, values):
        priorities.append(values)
        return alg_set_priorities(state, indices, values)

    monkeypatch.setattr(per_dqn_jax.buffers, "importance_weights", importance_weights)
    alg_sample = alg.replay.sample
    alg_set_priorities = alg.replay.set_priorities
    alg.replay = alg.replay._replace(sample=sample, set_priorities=set_priorities)
    state = state_of(alg, [1.0, 2.0], [10.0, 4.0])
    rollout, _ = random_rollout(np.random.default_rng(0), 10, np.zeros(1, bool))
    steps = Step(*rollout)._replace(next_observation=None)
    state = state._replace(replay=alg.replay.add_batch(state.replay, steps))
    new, metrics = alg.gradient_step(state, jax.random.PRNGKey(0), 250_000)  # half of training
    ((probabilities, size, beta),) = seen
    np.testing.assert_array_equal(probabilities, [0.125, 0.25, 0.5, 0])
    assert size == alg.replay.size(new.replay) == 10
    assert beta == pytest.approx(0.7)
    bootstrap = 4.0 if double_q else 10.0
    errors = np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
    np.testing.assert_array_equal(priorities[0], [*(np.abs(errors) + 0.125), 0])
    assert metrics["losses/importance_weight_min"] == 0.25
    assert metrics["losses/td_loss"] == pytest.approx(np.mean([0.5, 1.0, 0.25] * errors**2))
    assert metrics["losses/priority_max"] == np.abs(errors).max() + 0.125
    gradient = [-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3]
    np.testing.assert_allclose(new.params, np.array([1.0, 2.0]) - 0.1 * np.array(gradient))


def test_beta_ends_at_exactly_1():
    """Where the bias matters."""
    alg = linear(per_dqn_jax, Args(total_timesteps=3_000, learning_starts=500))
    beta = [alg.beta(step) for step in (0, 1_500, 2_990, 3_000, 4_000)]
    np.testing.assert_allclose(beta, [0.4, 0.7, 0.998, 1, 1], rtol=1e-6)
    assert beta[3] == beta[4] == 1


def test_train_step_against_a_plain_loop():
    """Drawn by priority, weighted, updated, priorities put back: one thing at a time.

    The buffer of 10 steps of 3 environments is overwritten; a step that only resets is garbage.
    """
    flags = dict(priority_exponent=0.6, priority_epsilon=0.01, double_q=False, n_step=2, gamma=0.9)
    sizes = dict(num_envs=3, train_frequency=4, batch_size=8, buffer_size=30, learning_starts=12)
    alg = linear(per_dqn_jax, Args(**flags, **sizes, total_timesteps=48))
    rng = np.random.default_rng(0)
    plain = PlainReplay()
    params = np.array([0.5, -0.5])
    target_params = np.array([1.5, 0.5])
    state = state_of(alg, params.astype(np.float32), target_params.astype(np.float32))
    train_step = jax.jit(alg.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    resets = 0
    shares = {}  # of each window, its priority ** 0.6; the index is row * 3 + environment
    largest = 0.0
    betas = {0: 0.4, 12: 0.55, 24: 0.7, 36: 0.85}
    for step, beta in betas.items():
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        rollout = Step(*rollout)
        stored = rollout._replace(next_observation=None)
        replay = alg.replay.add_batch(jax.tree.map(jnp.copy, state.replay), stored)
        state, _, metrics = train_step(state, rollout, key, step)
        plain.add(rollout)
        rows = len(plain.rows)
        held = range(3 * max(rows - 10, 0), 3 * (rows - 2))  # windows of 3 rows, complete
        shares = {index: shares.get(index, (largest or 1.0) ** 0.6) for index in held}
        keys = jax.random.split(jax.random.fold_in(key, step), 3)
        for own_key in keys if step > 0 else []:
            drawn = alg.replay.sample(replay, own_key, 8)
            indices = drawn.indices.tolist()
            total = sum(shares.values())
            p = np.array([shares[index] / total for index in indices])
            np.testing.assert_allclose(drawn.probabilities, p, rtol=1e-4)
            batch = plain.batch(indices, 3, 2, 0.9)
            observation, action, reward, discount, following, valid = batch
            assert valid.any()
            weights = (len(shares) * p[valid]) ** -beta
            weights /= weights.max()
            value = (observation * params)[np.arange(valid.sum()), action]
            error = reward + discount * (following * target_params).max(-1) - value
            grad = np.zeros(2)
            np.add.at(grad, action, -2 / len(error) * weights * error * observation[:, 0])
            params = params - 0.1 * grad
            priorities = np.zeros(8)
            priorities[valid] = np.abs(error) + 0.01
            shares |= dict(zip(indices, priorities**0.6, strict=True))
            largest = max(largest, priorities.max())
            resets += (~valid).sum()
            replay = alg.replay.set_priorities(replay, drawn.indices, priorities.astype(np.float32))
        np.testing.assert_allclose(state.params, params, rtol=1e-4)
        tree = np.asarray(state.replay.tree)[:30]
        wanted = np.zeros(30)
        wanted[[index % 30 for index in shares]] = list(shares.values())
        np.testing.assert_allclose(tree, wanted, rtol=1e-4)
        np.testing.assert_array_equal(tree == 0, wanted == 0)  # exactly
        assert metrics.pop("charts/beta") == pytest.approx(beta)
        assert metrics.pop("charts/gradient_steps") == (3 if step > 0 else 0)
        assert metrics.pop("charts/epsilon") == pytest.approx(max(1 - 0.95 * step / 24, 0.05))
        of_last_step = dict.fromkeys(metrics, np.nan)
        if step > 0:
            of_last_step = {
                "losses/td_loss": np.mean(weights * error**2),
                "losses/q_values": value.mean(),
                "losses/importance_weight_min": weights.min(),
                "losses/priority_max": largest,
            }
        assert metrics == pytest.approx(of_last_step, rel=1e-4, nan_ok=True)
    assert resets > 1
    np.testing.assert_array_equal(state.target_params, target_params.astype(np.float32))


def test_a_batch_of_steps_that_only_reset_changes_nothing():
    """But their priorities, which are 0 from then on."""
    flags = dict(learning_starts=32, total_timesteps=100)
    args = Args(num_envs=2, train_frequency=8, batch_size=32, buffer_size=20, **flags)
    alg = linear(per_dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 4, np.zeros(2, bool))
    rollout = Step(*rollout)._replace(valid=np.zeros((4, 2), bool))
    state = state_of(alg, np.array([1.0, 2.0], np.float32), np.array([3.0, 4.0], np.float32))
    new, _, metrics = jax.jit(alg.train_step)(state, rollout, jax.random.PRNGKey(0), 32)
    np.testing.assert_array_equal(new.params, [1, 2])
    assert metrics["losses/td_loss"] == metrics["losses/q_values"] == 0
    np.testing.assert_array_equal(new.replay.tree, 0)
    assert new.replay.max_priority == 0
    assert int(new.updates) == 1


@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        slow("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),
    ],
)
def test_probe_values(env_id, observations, values):
    _, q = learned_q(per_dqn_jax, env_id, np.array(observations, np.float32), PROBE)
    np.testing.assert_allclose(q, values, atol=0.03)


@pytest.mark.slow
def test_same_seed_same_run():
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
    # Of the iteration before the last one: it began 16 steps before.
    betas = 0.4 + 0.6 * (np.arange(1_000, 4_001, 1_000) - 16) / 4_000
    np.testing.assert_allclose([beta for _, beta in scalars["charts/beta"]], betas, rtol=1e-6)
