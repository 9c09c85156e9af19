"""per_dqn_jax.py: what it changes of dqn_jax.py, against hand computations and known values."""

import difflib
from functools import partial
from pathlib import Path

import environments  # noqa: F401  (registers)
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_dqn import ROOT, batch_of_three, learned_q, random_rollout, read_events, run_script

import buffers
import per_dqn_jax
from per_dqn_jax import Args, Transition


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_it_differs_from_dqn_by_prioritisation_only():
    """At most 60 lines, counted as diff shows them: once where removed, once where added."""
    plain, prioritised = (
        (ROOT / name).read_text().splitlines() for name in ("dqn_jax.py", "per_dqn_jax.py")
    )
    changed = [
        line
        for line in difflib.unified_diff(plain, prioritised, lineterm="", n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert 20 < len(changed) <= 60, len(changed)


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_by_hand(double_q):
    def q(params, observation):
        return jnp.broadcast_to(params, (len(observation), 2))

    params, target_params = jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0])
    weights = jnp.array([0.5, 1.0, 0.25])
    args = Args(double_q=double_q)
    loss = partial(
        per_dqn_jax.loss_fn, batch=batch_of_three(per_dqn_jax), weights=weights, q=q, args=args
    )
    (value, (mean_q, error)), grad = jax.value_and_grad(loss, has_aux=True)(params, target_params)
    bootstrap = 4.0 if double_q else 10.0  # action 1 is best online, action 0 in the target
    errors = np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
    np.testing.assert_allclose(error, errors)
    assert value == pytest.approx(np.mean([0.5, 1.0, 0.25] * errors**2))
    assert mean_q == pytest.approx((1 + 2 + 1) / 3)
    wanted = [-2 * (0.5 * errors[0] + 0.25 * errors[2]) / 3, -2 * errors[1] / 3]
    np.testing.assert_allclose(grad, wanted)


def test_train_step_against_a_plain_loop():
    """Drawn by priority, weighted, updated, priorities put back: one thing at a time."""
    args = Args(
        train_frequency=4,
        target_network_frequency=1000,
        batch_size=5,
        gamma=0.9,
        double_q=False,
        priority_epsilon=0.01,
    )
    replay = buffers.prioritised_replay(50, 0.6, sequence_length=1, donate=False)
    optimizer = optax.sgd(0.1)

    def q(params, observation):
        return observation @ params

    params = jnp.array([[0.5, -0.5]])
    item = Transition(np.zeros(1, np.float32), 0, 0.0, np.zeros(1, np.float32), False, False)
    agent = per_dqn_jax.Agent(
        params,
        params + 1.0,
        optimizer.init(params),
        replay.init((item, None)),
        jax.random.PRNGKey(3),
        jnp.int32(0),
    )
    rollout, mask = random_rollout(4, 6, np.random.default_rng(0))
    rollout = Transition(*rollout)
    step = partial(per_dqn_jax.train_step, args=args, replay=replay, q=q, optimizer=optimizer)
    new, metrics = jax.jit(step)(agent, rollout, mask, jnp.float32(0.7))

    size = int(mask.sum())
    kept = jax.tree.map(lambda x: x.reshape(24, *x.shape[2:])[mask.ravel()], rollout)
    state = replay.add_batch(agent.replay, (kept, None))
    weights_of = np.ones(size)  # priorities ** 0.6: those of new items are 1
    largest = 0.0
    params, target_params = np.asarray(agent.params), np.asarray(agent.target_params)
    _, subkey = jax.random.split(agent.key)
    losses, minima = [], []
    for k in jax.random.split(subkey, 6):
        (b, _), indices, probabilities = jax.tree.map(np.asarray, replay.sample(state, k, 5))
        b = jax.tree.map(lambda x: x[:, 0], b)
        np.testing.assert_allclose(probabilities, (weights_of / weights_of.sum())[indices], 1e-5)
        weights = (size * probabilities) ** -0.7
        weights /= weights.max()
        target = b.reward + 0.9 * (1 - b.terminated) * (b.next_observation @ target_params).max(-1)
        error = target - (b.observation @ params)[np.arange(5), b.action]
        losses.append(np.mean(weights * error**2))
        minima.append(weights.min())
        grad = np.zeros_like(params)
        np.add.at(grad[0], b.action, -2 / 5 * weights * error * b.observation[:, 0])
        params = params - 0.1 * grad
        priorities = np.abs(error) + 0.01
        weights_of[indices] = priorities**0.6
        largest = max(largest, priorities.max())
        state = replay.set_priorities(state, indices, priorities)
    np.testing.assert_allclose(new.params, params, rtol=1e-4)
    np.testing.assert_allclose(new.replay.tree[0][:size], weights_of, rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/td_loss"], np.mean(losses), rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/importance_weight_min"], np.mean(minima), rtol=1e-4)
    np.testing.assert_allclose(metrics["losses/priority_max"], largest, rtol=1e-4)


PROBE = dict(
    total_timesteps=10_000,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    target_network_frequency=40,
    learning_rate=2e-3,
    gamma=0.5,
    start_e=1.0,
    end_e=1.0,
    num_envs=2,
)


@pytest.mark.parametrize(
    ("kind", "observations", "values"),
    [
        ("discount", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("both", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("truncation", [[0.0]], [[2.0, 2.0]]),
    ],
)
def test_probe_values(kind, observations, values):
    result = per_dqn_jax.train(Args(**PROBE, env_id=f"Probe-{kind}-v0"))
    q = learned_q(result, np.array(observations, np.float32))
    np.testing.assert_allclose(q, values, atol=0.05)


SHORT = dict(total_timesteps=3_000, learning_starts=500, log_interval=500)


def test_same_seed_same_run():
    first, second = (per_dqn_jax.train(Args(num_envs=2, **SHORT)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first.agent, second.agent)
    assert first.returns == second.returns


def test_copy_pasted_script_runs_and_its_events_can_be_read(tmp_path):
    for name in ("buffers.py", "per_dqn_jax.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    flags = "--total-timesteps 3000 --learning-starts 500 --log-interval 500 --num-envs 2"
    done = run_script(*flags.split(), folder=tmp_path, script=tmp_path / "per_dqn_jax.py")
    assert done.returncode == 0, done.stderr
    (folder,) = Path(tmp_path / "runs").iterdir()
    assert folder.name.startswith("CartPole-v1__per_dqn_jax__1__")
    scalars, _ = read_events(folder)
    assert {"charts/beta", "losses/importance_weight_min", "losses/priority_max"} < set(scalars)
    for tag, points in scalars.items():
        assert np.isfinite([value for _, value in points]).all(), tag
    betas = [value for _, value in scalars["charts/beta"]]
    np.testing.assert_allclose(betas, 0.4 + 0.6 * np.arange(500, 3001, 500) / 3000, rtol=1e-6)
    assert betas[-1] == 1.0  # exactly
    assert all(0 < value <= 1 for _, value in scalars["losses/importance_weight_min"])
