"""dqn_jax.py: its pure functions against hand computations. See also test_every_script.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import TWO, box, linear, random_rollout, state_of, td_errors_by_hand, windows_by_hand
from numpy.testing import assert_allclose, assert_array_equal

import dqn_jax
from cleanreplay import protocol
from dqn_jax import Args

KEY = jax.random.PRNGKey(0)


@pytest.mark.parametrize("double_q", [False, True])
def test_the_loss_is_that_by_hand(double_q):
    """The gradient does not flow through the target."""
    agent = linear(dqn_jax, Args(gamma=0.5, double_q=double_q))
    batch = agent.to_transitions(windows_by_hand(), KEY)
    grad_fn = jax.value_and_grad(agent.loss, has_aux=True)
    params, target_params = jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0])

    (loss, metrics), grad = grad_fn(params, target_params, batch)

    errors = td_errors_by_hand(double_q)
    assert loss == pytest.approx(np.mean(errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    assert_allclose(grad, [-2 * (errors[0] + errors[2]) / 3, -2 * errors[1] / 3])


def test_the_network_has_hidden_layers_of_relu():
    network = dqn_jax.Agent(Args(hidden_sizes=(7, 5)), box(2, 3), TWO).network
    x = np.random.default_rng(0).normal(size=(9, 2, 3)).astype(np.float32)
    params = network.init(KEY, x)

    q_values = network.apply(params, x)

    rows = x.reshape(9, 6)
    for name in ("q_0", "q_1"):
        layer = params["params"][name]
        rows = np.maximum(rows @ layer["kernel"] + layer["bias"], 0)
    last = params["params"]["q"]
    assert_allclose(q_values, rows @ last["kernel"] + last["bias"], rtol=1e-4, atol=1e-5)


def plain_transition(window, clip_rewards):
    """Computes reward, discount and number of steps of a sequence [n + 1], with gamma 0.9."""
    total = 0.0
    for m in range(3):
        reward = np.sign(window.reward[m]) if clip_rewards else window.reward[m]
        total += 0.9**m * reward
        if window.terminated[m]:
            return total, 0.0, m + 1
        if window.truncated[m]:
            break
    return total, 0.9 ** (m + 1), m + 1


@pytest.mark.parametrize("clip_rewards", [False, True])
def test_transitions_are_what_a_plain_loop_gives(clip_rewards):
    rng = np.random.default_rng(0)
    steps, _ = random_rollout(rng, 4, rng.random(64) < 0.2)
    window = jax.tree.map(lambda x: x.swapaxes(0, 1), steps)
    agent = linear(dqn_jax, Args(gamma=0.9, n_step=3, clip_rewards=clip_rewards))

    got = agent.to_transitions(window, KEY)

    for name in ("observation", "action", "valid"):
        assert_array_equal(getattr(got, name), getattr(window, name)[:, 0])
    for i in np.flatnonzero(got.valid):
        row = jax.tree.map(lambda x, i=i: x[i], window)
        reward, discount, length = plain_transition(row, clip_rewards)
        assert got.reward[i] == pytest.approx(reward, abs=1e-5)
        assert got.discount[i] == pytest.approx(discount)
        assert got.next_observation[i] == window.observation[i, length]


def test_a_gradient_step_follows_the_loss_and_moves_the_target():
    """The target moves at steps 4 and 8. Each batch has its own key."""
    agent = linear(dqn_jax, Args(target_network_frequency=4, tau=0.25, batch_size=8))
    rollout, _ = random_rollout(np.random.default_rng(0), 20, np.zeros(1, bool))
    state = state_of(agent, [0.5, -0.5], [1.5, 0.5])
    state = state._replace(replay=agent.replay.add_batch(state.replay, rollout))
    grad_fn = jax.jit(jax.grad(agent.loss, has_aux=True))
    for step, moves in ((0, 0), (2, 1), (4, 0), (6, 1)):
        key = jax.random.fold_in(KEY, step)
        windows = agent.replay.sample(state.replay, key, 8).experience
        batch = agent.to_transitions(windows, key)
        gradient, _ = grad_fn(state.params, state.target_params, batch)
        params = state.params - 0.1 * gradient
        target_params = state.target_params + moves * 0.25 * (params - state.target_params)

        state, _ = agent.gradient_step(state, key, step, step + 2)

        assert_allclose(state.params, params, rtol=1e-4)
        assert_allclose(state.target_params, target_params, rtol=1e-4)


def test_a_restart_loses_a_row_and_cuts_episodes_off_before_it():
    """The buffer holds 10 of 12 rows, in its ring at their number modulo 10."""
    agent = linear(dqn_jax, Args(num_envs=6, train_frequency=24, buffer_size=60))
    rng = np.random.default_rng(32)  # episodes end in the last row, both ways, and before it
    rollout, _ = random_rollout(rng, 12, np.zeros(6, bool))
    before = agent.init(KEY)
    before = before._replace(replay=agent.replay.add_batch(before.replay, rollout))

    after = protocol.on_resume(agent, before)

    wanted = jax.tree.map(lambda x: x[2:].copy(), rollout)
    wanted.truncated[-2] = wanted.valid[-2] & ~wanted.terminated[-2]
    for x in (wanted.valid, wanted.terminated, wanted.truncated):
        x[-1] = False
    order = np.arange(2, 12) % 10
    stored = jax.tree.map(lambda x: np.asarray(x)[order], after.replay.storage)
    assert wanted.truncated[-2].any()
    jax.tree.map(assert_array_equal, stored, wanted)
    otherwise = after._replace(replay=after.replay._replace(storage=before.replay.storage))
    jax.tree.map(assert_array_equal, otherwise, before)
