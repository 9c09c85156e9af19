"""per_dqn_jax.py: what it changes of dqn_jax.py, against hand computations and known values."""

from dataclasses import replace
from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import (
    PROBE,
    PlainReplay,
    filled,
    keys_of_gradient_step,
    learned_q,
    linear,
    metrics_around_the_start,
    moves_of_target,
    plain_gradient_step,
    random_rollout,
    state_of,
    td_errors_by_hand,
    train_without_gradients,
    windows_by_hand,
)
from helpers import fast_at_ends, read_events

import per_dqn_jax
from cleanreplay import protocol
from per_dqn_jax import Args, Run, Step, train

KEY = jax.random.PRNGKey(0)
WEIGHTS = np.array([0.5, 1.0, 0.25])  # of the three windows by hand; the fourth one only resets


def gradient_by_hand(errors):
    """The gradient of the weighted mean of squared errors, by the values of both actions."""
    return np.array([-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3])


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_is_that_computed_by_hand(double_q):
    """Each row counts by its weight; one that only resets counts for nothing."""
    agent = linear(per_dqn_jax, Args(gamma=0.5, double_q=double_q))
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    batch = agent.to_transitions(windows_by_hand(), KEY)
    np.testing.assert_array_equal(batch.valid, [True, True, True, False])
    weights = jnp.array([*WEIGHTS, 1e6])
    grad_fn = jax.value_and_grad(agent.loss, has_aux=True)

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
    assert metrics["losses/priority_max"] == np.abs(errors).max() + 0.125
    np.testing.assert_allclose(new.params, [1.0, 2.0] - 0.1 * gradient_by_hand(errors))


@fast_at_ends(
    ("flags", "wanted"),
    [
        (dict(num_envs=5, train_frequency=10), range(30, 100, 10)),
        (dict(num_envs=4, train_frequency=16), range(32, 112, 16)),  # the last ends after 100
        (dict(num_envs=4, train_frequency=200), [0]),
    ],
)
def test_gradient_steps_keep_their_ratio_to_environment_steps(flags, wanted):
    sizes = dict(total_timesteps=100, learning_starts=35, batch_size=8, buffer_size=50)
    steps, _ = train_without_gradients(per_dqn_jax, Args(**sizes, **flags))
    assert steps == list(wanted)


def test_beta_goes_in_a_straight_line_and_stays_at_1():
    agent = linear(per_dqn_jax, Args(total_timesteps=3_000, learning_starts=500))
    beta = [agent.beta_at(step) for step in (0, 1_500, 2_990, 3_000, 4_000)]
    np.testing.assert_allclose(beta, [0.4, 0.7, 0.998, 1, 1], rtol=1e-6)
    assert beta[3] == beta[4] == 1


class PlainLearner:
    """Learns with Q(s, .) = s * params from batches of 8, drawn by priority and weighted.

    `shares` has, of each window that is held, its priority ** 0.6, at row * 3 + environment.
    """

    def __init__(self, agent, params, target_params):
        self.agent = agent
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
        drawn = self.agent.replay.sample(replay, key, 8)
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
        return self.agent.replay.set_priorities(replay, drawn.indices, values), {
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
    agent = linear(per_dqn_jax, Args(**flags, **sizes, total_timesteps=48))
    rng = np.random.default_rng(0)
    plain = PlainLearner(agent, params=np.array([0.5, -0.5]), target_params=np.array([1.5, 0.5]))
    target_params = plain.target_params.astype(np.float32)
    state = state_of(agent, plain.params.astype(np.float32), target_params)
    train_step = jax.jit(agent.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    for step in (0, 12, 24, 36):
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        rollout = Step(*rollout)
        replay = agent.replay.add_batch(jax.tree.map(jnp.copy, state.replay), rollout)
        state, _, metrics = train_step(state, rollout, key, step)

        plain.add(rollout)
        gradient_steps = 3 if step > 0 else 0
        losses = {tag: np.inf for tag in metrics if tag.startswith("losses/")}
        beta = np.inf
        for i, own_key in enumerate(jax.random.split(jax.random.fold_in(key, step), 3)):
            if gradient_steps > 0:
                beta = 0.4 + 0.6 * (step // 4 + i + 1) / 12  # of gradient steps from step 0 on
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


@pytest.mark.parametrize(
    ("flags", "period"),
    [
        (dict(target_network_frequency=12, gradient_steps=2), 6),
        (dict(target_network_frequency=12, tau=0.25), 3),
    ],
)
def test_the_target_moves_at_the_multiples_of_its_period(flags, period):
    agent = linear(per_dqn_jax, Args(**flags, train_frequency=4, batch_size=8, buffer_size=40))
    state = filled(agent, state_of(agent, [0.5, -0.5], [1.5, 0.5]))
    moves = moves_of_target(agent, state, last_update=2 * period)
    assert list(moves) == [period, 2 * period]
    for old_target, params, target in moves.values():
        wanted = agent.args.tau * params + (1 - agent.args.tau) * old_target
        np.testing.assert_allclose(target, wanted, rtol=1e-6)


def test_metrics_are_infinite_without_a_gradient_step_and_finite_with_one():
    """The charts leave out what is infinite."""
    args = Args(num_envs=2, train_frequency=8, batch_size=8, buffer_size=40, learning_starts=32)
    agent = linear(per_dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 4, np.zeros(2, bool))
    before, after = metrics_around_the_start(agent, Step(*rollout))
    infinite = {tag for tag, x in before.items() if not np.isfinite(x)}
    assert infinite == {
        "losses/td_loss",
        "losses/q_values",
        "losses/importance_weight_min",
        "losses/priority_max",
        "charts/beta",
    }
    assert np.isfinite(list(after.values())).all()
    assert (before["charts/gradient_steps"], after["charts/gradient_steps"]) == (0, 1)


def test_what_is_drawn_in_to_transitions_does_not_depend_on_the_batch():
    """Its key is another one than that of the draw from the replay."""
    agent = linear(per_dqn_jax, Args(batch_size=8, buffer_size=40))
    of_draw, of_batch = keys_of_gradient_step(agent, filled(agent, agent.init(KEY)), KEY)
    assert (of_draw != of_batch).any()


def test_the_policy_takes_the_environments_actions_and_explores_only_with_a_key():
    args = Args(end_e=0.5, total_timesteps=50_000)
    agent = linear(per_dqn_jax, args, num_actions=3, start=5)
    params = jnp.array([5.0, 7.0, 6.0])
    observation = np.ones((200, 1), np.float32)
    np.testing.assert_array_equal(protocol.policy(agent, params)(observation), 6)
    wanted = 5 + np.asarray(agent.act(params, observation, KEY, 40_000))
    assert set(wanted) == {5, 6, 7}
    np.testing.assert_array_equal(
        protocol.policy(agent, params, KEY)(observation, step=40_000), wanted
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        ("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),
    ],
)
def test_probe_values_are_learned(env_id, observations, values):
    _, q = learned_q(per_dqn_jax, env_id, np.array(observations, np.float32), PROBE)
    np.testing.assert_allclose(q, values, atol=0.03)


@pytest.mark.more
def test_the_same_seed_makes_the_same_run():
    """The same parameters, the same replay, the same priorities."""
    args = Args(**vars(PROBE))
    run = Run(env_id="Probe-both-v0", eval_episodes=0)
    first, _, folder = train(args, run)
    second, _, _ = train(args, run)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    other, _, _ = train(args, replace(run, seed=2))
    kernels = [state.params["params"]["q_0"]["kernel"] for state in (first, other)]
    assert (kernels[0] != kernels[1]).any()
    scalars, _ = read_events(folder)
    # That of the last gradient step before the log entry: there is one every 4 steps.
    betas = 0.4 + 0.6 * np.arange(1_000, 4_001, 1_000) / 4_000
    np.testing.assert_allclose([beta for _, beta in scalars["charts/beta"]], betas, rtol=1e-6)
