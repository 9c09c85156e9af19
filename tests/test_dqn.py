"""dqn_jax.py: its pure functions against hand computations. See also test_every_script.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import (
    TWO,
    PlainReplay,
    box,
    linear,
    plain_gradient_step,
    random_rollout,
    state_of,
    td_errors_by_hand,
    windows_by_hand,
)
from scipy.stats import chisquare

import dqn_jax
from cleanreplay import protocol
from dqn_jax import Args

KEY = jax.random.PRNGKey(0)
PARAMS = jnp.array([1.0, 2.0])
TARGET_PARAMS = jnp.array([10.0, 4.0])


def loss_by_hand(valid, **flags):
    """The loss of windows whose errors are known, its metrics and its gradient."""
    agent = linear(dqn_jax, Args(gamma=0.5, **flags))
    batch = agent.to_transitions(windows_by_hand(valid), KEY)
    grad_fn = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))
    (loss, metrics), grad = grad_fn(PARAMS, TARGET_PARAMS, batch)
    return loss, metrics, grad


@pytest.mark.parametrize("double_q", [False, True])
def test_the_loss_is_that_by_hand(double_q):
    """The gradient does not flow through the target."""
    loss, metrics, grad = loss_by_hand(valid=True, double_q=double_q)

    errors = td_errors_by_hand(double_q)
    assert loss == pytest.approx(np.mean(errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    np.testing.assert_allclose(grad, [-2 * (errors[0] + errors[2]) / 3, -2 * errors[1] / 3])


def test_the_loss_of_autoreset_steps_alone_is_0():
    loss, metrics, grad = loss_by_hand(valid=False)

    assert loss == 0
    assert metrics == {"losses/td_loss": 0, "losses/q_values": 0}
    np.testing.assert_array_equal(grad, np.zeros(2))


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
    np.testing.assert_allclose(q_values, rows @ last["kernel"] + last["bias"], rtol=1e-4, atol=1e-5)


def explore(epsilon, key=0, first_step=0):
    """Actions [2,000, 4] of 4 environments with 3 actions, of which 0 is the greedy one."""
    flags = dict(start_e=epsilon, end_e=epsilon, num_envs=4, train_frequency=8_000)
    agent = linear(dqn_jax, Args(**flags), num_actions=3)
    observation = np.ones((4, 1), np.float32)
    key = jax.random.PRNGKey(key)
    steps = first_step + 4 * jnp.arange(2_000)
    params = jnp.array([1.0, 0.0, 0.0])
    act = jax.vmap(lambda step: agent.act(params, observation, key, step))
    return np.asarray(act(steps))


def assert_independent(explores, others):
    """Fails unless the action is not the greedy one, with probability 0.2, here and there."""
    counts = np.bincount((explores * 2 + others).ravel(), minlength=4)
    wanted = explores.size * np.array([0.64, 0.16, 0.16, 0.04])
    assert chisquare(counts, wanted).pvalue > 1e-3


def test_exploration_draws_for_each_step_and_environment():
    action = explore(0.3)
    explores = action > 0

    for column in action.T:
        counts = np.bincount(column, minlength=3)
        assert chisquare(counts, 2_000 * np.array([0.8, 0.1, 0.1])).pvalue > 1e-3
    for i in range(4):
        for j in range(i):
            assert_independent(explores[:, i], explores[:, j])
    assert_independent(explores[1:], explores[:-1])


def test_exploration_depends_on_the_step_and_the_key_alone():
    action = explore(0.3)

    np.testing.assert_array_equal(action, explore(0.3))
    assert_independent(action > 0, explore(0.3, first_step=8_000) > 0)
    assert_independent(action > 0, explore(0.3, key=1) > 0)


def test_exploration_is_never_at_epsilon_0():
    assert set(explore(0.0).ravel()) == {0}


@pytest.mark.parametrize(
    "flags",
    [
        dict(n_step=3, target_network_frequency=4, tau=0.5, double_q=True, clip_rewards=True),
        dict(target_network_frequency=8, gradient_steps=2),
    ],
    ids=["n-step", "one-step"],
)
def test_train_step_is_what_a_plain_loop_gives(flags):
    """Stored, sampled, updated, target moved when it is due: one thing at a time.

    The buffer of 10 steps of 3 environments is overwritten; autoreset steps are garbage.
    """
    sizes = dict(num_envs=3, train_frequency=4, batch_size=8, buffer_size=28, learning_starts=12)
    args = Args(**flags, **sizes, gamma=0.9)
    agent = linear(dqn_jax, args)
    rng = np.random.default_rng(0)
    plain = PlainLearner(agent, params=np.array([0.5, -0.5]), target_params=np.array([1.5, 0.5]))
    state = state_of(agent, plain.params, plain.target_params)
    train_step = jax.jit(agent.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    for step in (0, 12, 24, 36):
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        state, acting, metrics = train_step(state, rollout, key, step)
        losses = plain.train_step(state.replay, rollout, key, step)

        got = [metrics["losses/td_loss"], metrics["losses/q_values"]]
        np.testing.assert_allclose(got, losses, rtol=1e-4)
        np.testing.assert_allclose(state.params, plain.params, rtol=1e-4)
        np.testing.assert_array_equal(acting, state.params)
        np.testing.assert_allclose(state.target_params, plain.target_params, rtol=1e-4)
    assert plain.resets > 5
    assert int(agent.replay.size(state.replay)) == 30


class PlainLearner:
    """Learns with Q(s, .) = s * params from batches of 8 of 3 environments."""

    def __init__(self, agent, params, target_params):
        self.agent = agent
        self.params = params
        self.target_params = target_params
        self.steps = PlainReplay()
        self.resets = 0  # autoreset steps in batches

    def train_step(self, replay, rollout, key, step):
        """Loss and mean value of the last gradient step; learning starts at step 12."""
        args = self.agent.args
        reward = np.sign(rollout.reward) if args.clip_rewards else rollout.reward
        self.steps.add(rollout._replace(reward=reward))
        losses = [np.inf, np.inf]
        number = 3 * args.gradient_steps
        keys = jax.random.split(jax.random.fold_in(key, step), number)
        for i, own_key in enumerate(keys if step > 0 else []):
            losses = self.gradient_step(replay, own_key)
            began, ended = [step + x * 12 // number for x in (i, i + 1)]
            if ended // args.target_network_frequency > began // args.target_network_frequency:
                self.target_params = args.tau * self.params + (1 - args.tau) * self.target_params
        return losses

    def gradient_step(self, replay, key):
        """Loss and mean value of a batch that the agent's replay draws with this key."""
        args = self.agent.args
        drawn = self.agent.replay.sample(replay, key, 8).indices
        assert min(drawn) >= 3 * max(len(self.steps.rows) - 10, 0)  # what is not overwritten
        *batch, valid = self.steps.batch(drawn, 3, args.n_step, 0.9)
        inputs = (self.params, self.target_params, batch, args.double_q)
        self.params, error, value = plain_gradient_step(*inputs)
        self.resets += (~valid).sum()
        return [np.mean(error**2), value.mean()]


def test_rewards_are_learned_from_by_their_sign():
    """The replay stores them as they are."""
    args = Args(num_envs=2, train_frequency=6, batch_size=8, clip_rewards=True)
    agent = linear(dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 3, np.zeros(2, bool))
    no = np.zeros((3, 2), bool)
    reward = np.array([[2.5, -7.0], [0.0, 0.25], [100.0, -0.5]], np.float32)
    rollout = rollout._replace(reward=reward, terminated=no, truncated=no, valid=~no)
    state = agent.init(KEY)
    replay = agent.replay.add_batch(state.replay, rollout)
    transitions = agent.to_transitions(agent.replay.get(replay, np.arange(4)), KEY)

    np.testing.assert_array_equal(transitions.reward, [1, -1, 0, 1])
    np.testing.assert_array_equal(replay.storage.reward[:3], rollout.reward)


def cut_by_hand(rows):
    """Rows of which no episode goes on: the last one is lost, the one before it is cut off."""
    *earlier, before_last, last = rows
    goes_on = before_last.valid & ~before_last.terminated
    assert goes_on.any()
    no = np.zeros(6, bool)
    cut_off = before_last._replace(truncated=goes_on)
    lost = last._replace(valid=no, terminated=no, truncated=no)
    return [*earlier, cut_off, lost]


def test_a_restart_loses_a_row_and_cuts_episodes_off_before_it():
    """Of 12 rows the buffer holds 10, in the ring at their number modulo 10."""
    agent = linear(dqn_jax, Args(num_envs=6, train_frequency=24, buffer_size=60))
    rng = np.random.default_rng(32)  # episodes end in the last row, both ways, and before it
    rollout, _ = random_rollout(rng, 12, np.zeros(6, bool))
    before = agent.init(KEY)
    before = before._replace(replay=agent.replay.add_batch(before.replay, rollout))
    plain = PlainReplay()
    plain.add(rollout)

    after = protocol.on_resume(agent, before)

    wanted = jax.tree.map(lambda *x: np.stack(x), *cut_by_hand(plain.rows)[2:])
    order = np.arange(2, 12) % 10
    stored = jax.tree.map(lambda x: np.asarray(x)[order], after.replay.storage)
    jax.tree.map(np.testing.assert_array_equal, stored, wanted)
    otherwise = after._replace(replay=after.replay._replace(storage=before.replay.storage))
    jax.tree.map(np.testing.assert_array_equal, otherwise, before)
