"""iql_jax.py: its losses and scales, against NumPy and SciPy, and runs of it."""

import tempfile
from contextlib import chdir
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import read_events
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import norm
from small_agents import KEY, make, random_steps, vector

import iql_jax
from iql_jax import Args, Networks, Run, Transition


def batch_of(agent, rows=6):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    action = rng.uniform(-1, 1, (rows, agent.num_actions)).astype(np.float32)
    valid = np.arange(rows) != 2
    return Transition(
        draw(rows, 3), action, draw(rows), 0.9 * (draw(rows) > 0), draw(rows, 3), valid
    )


def expected_losses(agent, networks, targets, batch):
    """Computes eqs. 5, 6 and 7 of the paper for each row, in NumPy."""
    args = agent.args
    value, following = (
        np.asarray(agent.value.apply(networks.value, x))[:, 0]
        for x in (batch.observation, batch.next_observation)
    )
    q = np.asarray(agent.q_values(networks.critics, batch.observation, batch.action))
    target_q = np.asarray(agent.q_values(targets, batch.observation, batch.action))
    advantage = target_q.min(axis=0) - value
    mean, log_std = agent.actor.apply(networks.actor, batch.observation)
    log_prob = norm.logpdf(batch.action, mean, np.exp(log_std)).sum(axis=1)
    return {
        "losses/value_loss": abs(args.expectile - (advantage < 0)) * advantage**2,
        "losses/qf_loss": ((q - (batch.reward + batch.discount * following)) ** 2).mean(axis=0),
        "losses/actor_loss": -np.minimum(np.exp(args.beta * advantage), args.max_weight) * log_prob,
    }


@pytest.mark.parametrize("flags", [{}, dict(beta=0.0), dict(expectile=0.9, max_weight=1.1)])
def test_losses_are_those_of_the_paper(flags):
    agent = make("iql", **flags)
    state = jax.jit(agent.init)(KEY)
    targets = jax.tree.map(lambda x: 1.5 * x, state.target_critics)
    batch = batch_of(agent)
    loss, metrics = agent.loss(state.networks, targets, batch, KEY)

    expected = expected_losses(agent, state.networks, targets, batch)
    means = {name: x[batch.valid].mean() for name, x in expected.items()}
    for name, mean in means.items():
        assert_allclose(metrics[name], mean, rtol=1e-4, err_msg=name)
    value, critics, actor = means.values()
    assert_allclose(loss, value + 2 * critics + actor, rtol=1e-4)


@cache
def gradient_of_loss():
    """The gradient of the loss, compiled once."""
    agent = make("iql")
    loss = lambda x, state, batch: agent.loss(x, state.target_critics, batch, KEY)[0]  # noqa: E731
    return jax.jit(jax.grad(loss))


@pytest.mark.parametrize("part", Networks._fields)
def test_each_loss_changes_one_network(part):
    """The other losses may be large: their gradients are stopped."""
    agent = make("iql")
    state = jax.jit(agent.init)(KEY)
    batch = batch_of(agent)

    def gradient(networks):
        return vector(getattr(gradient_of_loss()(networks, state, batch), part))

    others = {name for name in Networks._fields if name not in (part, "value")}
    far = {name: jax.tree.map(lambda x: 2 * x, getattr(state.networks, name)) for name in others}
    changed = state.networks._replace(**far)
    assert_allclose(gradient(changed), gradient(state.networks), rtol=1e-4, atol=1e-6)


def test_scales_are_those_of_the_data():
    """Rewards are scaled so that the returns of episodes have a range of 1,000."""
    agent = make("iql")
    steps = random_steps(agent)._replace(
        reward=np.float32([[1, 5], [2, 9], [4, 2], [8, 1]]),
        terminated=np.array([[0, 0], [1, 0], [0, 0], [0, 1]], bool),
        truncated=np.zeros((4, 2), bool),
        valid=np.array([[1, 1], [1, 1], [0, 1], [1, 1]], bool),
    )
    state = jax.jit(agent.init)(KEY)
    scales = agent.on_data(state, steps).scales

    rows = steps.observation[steps.valid]
    assert_allclose(scales.mean, rows.mean(axis=0), rtol=1e-5)
    assert_allclose(scales.std, rows.std(axis=0) + 1e-3, rtol=1e-5)
    assert_allclose(scales.reward, 1_000 / (17 - 3), rtol=1e-6)
    fixed = make("iql", normalize_observations=False, reward_scale=0.5)
    scales = fixed.on_data(jax.jit(fixed.init)(KEY), steps).scales
    assert [float(x.sum()) for x in scales] == [0, 3, 0.5]


def test_the_policy_sees_what_training_sees():
    agent = make("iql")
    state = jax.jit(agent.init)(KEY)
    scales = state.scales._replace(mean=jnp.array([1.0, 2, 3]), std=jnp.array([2.0, 4, 8]))
    params = agent.policy_params(state._replace(scales=scales))
    plain = agent.policy_params(state)

    action = agent.act(params, np.float32([[3, 10, 19]]))
    assert_allclose(action, agent.act(plain, np.float32([[1, 2, 2]])), rtol=1e-6)


def test_the_learning_rate_of_the_policy_ends_at_0():
    alone = make("iql", offline_fraction=1, total_timesteps=400)

    assert_allclose([alone.policy_rate(x) for x in (0, 200, 400)], [1, 0.5, 0], atol=1e-6)
    assert make("iql", total_timesteps=400).policy_rate(200) == 1
    assert make("iql", offline_fraction=1, anneal_lr=False).policy_rate(200) == 1


def pendulum(count=300):
    """Writes a file with Pendulum's shapes: observations of random size, all actions."""
    rng = np.random.default_rng(0)
    observations = rng.normal(2, 3, (count + 1, 3)).astype(np.float32)
    np.savez(
        "pendulum.npz",
        observations=observations[:-1],
        next_observations=observations[1:],
        actions=rng.uniform(-2, 2, (count, 1)).astype(np.float32),
        rewards=rng.normal(size=count),
        terminals=np.zeros(count),
        timeouts=np.arange(count) % 50 == 49,
    )
    return "pendulum.npz"


ALONE = dict(total_timesteps=200, batch_size=16, hidden_sizes=(8,))
RUN = Run(env_id="Pendulum-v1", eval_episodes=2, log_interval=100)


@cache
def trained():
    """Trains on data alone. Returns flags, State and folder of the run, which tests share."""
    with chdir(tempfile.mkdtemp(prefix="iql_", dir=".")):
        data = str(Path(pendulum()).absolute())
        args = Args(offline_data=data, random_return=-2_000, expert_return=0, **ALONE)
        state, _, folder = iql_jax.train(args, RUN)
        return args, state, folder


def test_without_the_package_the_same_is_learned(monkeypatch):
    args, state, _ = trained()
    monkeypatch.setattr(iql_jax, "cleanreplay", None)
    alone, _, _ = iql_jax.train(replace(args, buffer_size=306), RUN)

    assert_allclose(vector(alone.scales), vector(state.scales), rtol=1e-5)
    assert_allclose(vector(alone.networks), vector(state.networks), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, r"offline_data: .*nothing\.npz"),
        (dict(best_fraction=0.1), "best_fraction: this needs"),
        (dict(offline_fraction=0.5, learning_starts=99), "offline_fraction below 1: this needs"),
    ],
)
def test_what_is_refused_without_the_package(flags, words, monkeypatch):
    monkeypatch.setattr(iql_jax, "cleanreplay", None)
    with pytest.raises(iql_jax.UsageError, match=words):
        iql_jax.train(Args(offline_data="nothing.npz", **ALONE | flags), RUN)


def test_a_run_begins_online_with_what_data_have_taught():
    args, state, folder = trained()
    more = dict(offline_fraction=0.5, init_from=str(folder), learning_starts=100, reward_scale=3.0)
    after, _, fine = iql_jax.train(replace(args, **more, total_timesteps=120), RUN)

    scalars, _ = read_events(folder)
    ((_, normalized),) = scalars["eval/normalized"]
    ((_, mean),) = scalars["eval/episodic_return"]
    assert normalized == pytest.approx(100 * (1 + mean / 2_000), rel=1e-4)
    assert_array_equal(vector(after.scales), vector(state.scales))  # its networks depend on them
    assert int(after.replay.replay.size) == 120
    assert (vector(after.networks) != vector(state.networks)).any()


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (dict(offline_data=""), "give a file or folder"),
        (dict(offline_fraction=0.5, learning_starts=1), "learning_starts"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags, word):
    with pytest.raises(iql_jax.UsageError, match=word):
        make("iql", **flags)
