"""pqn_jax.py: its targets, loss and gradient steps, against NumPy."""

import numpy as np
import pytest
from numpy.testing import assert_allclose
from small_agents import KEY, make, random_steps, vector

import pqn_jax
from pqn_jax import Batch


@pytest.mark.parametrize("q_lambda", [0.0, 0.7, 1.0])
def test_targets_are_lambda_returns(q_lambda):
    """They are G(t) = r + gamma ((1 - lambda) max Q(s') + lambda G(t + 1)), at an end a value."""
    agent = make("pqn", num_steps=6)
    rollout = random_steps(agent)
    rng = np.random.default_rng(1)
    value, following = rng.normal(size=(2, 6, 2)).astype(np.float32)
    targets = pqn_jax.lambda_returns(rollout, value, following, 0.9, q_lambda)

    done = rollout.terminated | rollout.truncated
    for env in range(2):
        after = None
        for t in reversed(range(6)):
            if not rollout.valid[t, env]:
                after = None
                continue
            bootstrap = 0 if rollout.terminated[t, env] else following[t, env]
            goes_on = after is not None and not done[t, env]
            # With the rollout's own values, it is the recursion of the differences.
            rest = q_lambda * (after[0] - after[1]) if goes_on else 0
            wanted = rollout.reward[t, env] + 0.9 * (bootstrap + rest)
            assert_allclose(targets[t, env], wanted, rtol=1e-4, atol=1e-5)
            after = (targets[t, env], value[t, env])


def test_the_loss_is_half_of_the_mean_squared_error():
    agent = make("pqn")
    params = agent.init(KEY).params
    rng = np.random.default_rng(0)
    observation = rng.normal(size=(6, 3)).astype(np.float32)
    action, valid = np.array([0, 1, 2, 3, 0, 1]), np.arange(6) != 1
    target = rng.normal(size=6).astype(np.float32)
    loss, metrics = agent.loss(params, Batch(observation, action, valid, target))

    values = np.asarray(agent.network.apply(params, observation))[np.arange(6), action]
    assert_allclose(loss, 0.5 * ((target - values) ** 2)[valid].mean(), rtol=1e-5)
    assert_allclose(metrics["losses/q_values"], values[valid].mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [({}, [2, -3]), (dict(clip_rewards=True), [1, -1]), (dict(reward_scale=0.1), [0.2, -0.3])],
)
def test_rewards_are_scaled(flags, wanted):
    agent = make("pqn", **dict(reward_scale=1.0) | flags)
    seen = []
    agent.optimize = lambda state, batch, key, rate: (seen.append(batch.target), (state, {}))[1]
    rollout = random_steps(agent)
    every = np.ones((4, 2), bool)
    rollout = rollout._replace(reward=np.float32([[2, -3]] * 4), terminated=every, valid=every)
    agent.train_step(agent.init(KEY), rollout, KEY, 0, rollout.observation[0])

    assert_allclose(seen[0].reshape(4, 2), [wanted] * 4, rtol=1e-6)


def test_gradient_steps_follow_the_minibatches():
    """Adam's variant with a rectified variance begins like momentum: Liu et al. 2020."""
    agent = make("pqn", max_grad_norm=0.5, learning_rate=0.1)
    rollout = random_steps(agent)
    state = agent.init(KEY)
    new, _, metrics = agent.train_step(state, rollout, KEY, 0, rollout.observation[0])

    changed = vector(new.params) != vector(state.params)
    assert changed.mean() > 0.5
    assert {"losses/td_loss", "losses/q_values", "charts/epsilon"} <= metrics.keys()


def test_other_actions_are_refused():
    with pytest.raises(pqn_jax.UsageError, match="PQN takes Discrete actions"):
        make("pqn", make("sac").action_space)
    with pytest.raises(pqn_jax.UsageError, match="num_minibatches"):
        make("pqn", num_minibatches=3)
