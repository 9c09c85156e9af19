"""dqn_jax.py: its pure functions against hand computations, and what it learns against known
values.
"""

from dataclasses import replace
from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import (
    PROBE,
    TWO,
    PlainReplay,
    box,
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
from helpers import fast_at_ends, more, read_events
from scipy.stats import chisquare

import dqn_jax
from cleanreplay import protocol
from dqn_jax import Args, Run, train

KEY = jax.random.PRNGKey(0)
VECTOR = np.zeros(1, np.float32)

# ------------------------------------------------------------------------------------ the algorithm


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_is_that_computed_by_hand(double_q):
    """A row that only resets counts for nothing."""
    agent = linear(dqn_jax, Args(gamma=0.5, double_q=double_q))
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    batch = agent.to_transitions(windows_by_hand(), KEY)
    grad_fn = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))

    (loss, metrics), grad = grad_fn(params, target_params, batch)

    errors = td_errors_by_hand(double_q)
    assert loss == pytest.approx(np.mean(errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    # The gradient does not flow through the target.
    np.testing.assert_allclose(grad, [-2 * (errors[0] + errors[2]) / 3, -2 * errors[1] / 3])


def test_loss_without_a_valid_row_is_0():
    agent = linear(dqn_jax, Args())
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    batch = agent.to_transitions(windows_by_hand(valid=False), KEY)
    grad_fn = jax.jit(jax.value_and_grad(agent.loss, has_aux=True))

    (loss, metrics), grad = grad_fn(params, target_params, batch)

    assert loss == 0
    assert metrics == {"losses/td_loss": 0, "losses/q_values": 0}
    np.testing.assert_array_equal(grad, np.zeros(2))


def test_epsilon_falls_in_a_straight_line():
    args = Args(total_timesteps=1_000, learning_starts=200, exploration_fraction=0.5)
    agent = linear(dqn_jax, args)
    wanted = {0: 1, 120: 0.772, 160: 0.696, 240: 0.544, 480: 0.088, 500: 0.05, 960: 0.05}
    epsilon = [agent.epsilon_at(step) for step in wanted]
    np.testing.assert_allclose(epsilon, list(wanted.values()), rtol=1e-6)


def test_epsilon_is_end_e_throughout_with_an_exploration_fraction_of_0():
    agent = linear(dqn_jax, Args(exploration_fraction=0.0))
    np.testing.assert_allclose([agent.epsilon_at(1), agent.epsilon_at(40)], 0.05, rtol=1e-6)


def test_learning_starts_with_the_iteration_that_passes_learning_starts():
    args = Args(total_timesteps=320, num_envs=8, learning_starts=200)  # 40 steps an iteration

    # The iteration from step 160 to 200 ends where learning starts.
    steps, metrics = train_without_gradients(dqn_jax, args)
    np.testing.assert_array_equal(metrics["charts/gradient_steps"], [0, 0, 0, 0, 0, 4, 4, 4])
    assert steps == list(range(200, 320, 10))
    epsilon = 1 - np.minimum(np.arange(0, 320, 40) / 160, 1) * 0.95
    np.testing.assert_allclose(metrics["charts/epsilon"], epsilon, rtol=1e-6)

    # Here it passes it.
    _, metrics = train_without_gradients(dqn_jax, replace(args, learning_starts=199))
    np.testing.assert_array_equal(metrics["charts/gradient_steps"], [0, 0, 0, 0, 4, 4, 4, 4])


@fast_at_ends("num_envs", [1, 8, 64])
@fast_at_ends("train_frequency", [1, 10, 16])
@pytest.mark.parametrize("gradient_steps", [1, 3])
def test_gradient_steps_keep_their_ratio_to_environment_steps(
    num_envs, train_frequency, gradient_steps
):
    """As many per train_frequency environment steps, whatever the number of environments."""
    args = Args(
        total_timesteps=6_400,
        num_envs=num_envs,
        learning_starts=1_600,
        train_frequency=train_frequency,
        gradient_steps=gradient_steps,
    )
    steps, metrics = train_without_gradients(dqn_jax, args)
    size = np.lcm(num_envs, train_frequency)
    trained = -(-6_400 // size) * size  # whole iterations
    begun = 1_600 // size * size  # the iteration that passes learning_starts learns whole
    numbers = np.arange((trained - begun) // train_frequency * gradient_steps)
    assert steps == (begun + numbers * train_frequency // gradient_steps).tolist()
    assert metrics["charts/gradient_steps"].sum() == len(steps)
    assert metrics["charts/replay_ratio"][-1] == pytest.approx(gradient_steps / train_frequency)


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
    """Whether the action is not the greedy one, with probability 0.2, here and there."""
    counts = np.bincount((explores * 2 + others).ravel(), minlength=4)
    wanted = explores.size * np.array([0.64, 0.16, 0.16, 0.04])
    assert chisquare(counts, wanted).pvalue > 1e-3


def test_exploration_draws_for_each_step_and_environment():
    action = explore(0.3)
    for column in action.T:
        counts = np.bincount(column, minlength=3)
        assert chisquare(counts, 2_000 * np.array([0.8, 0.1, 0.1])).pvalue > 1e-3
    explores = action > 0
    for i in range(4):
        for j in range(i):
            assert_independent(explores[:, i], explores[:, j])
    assert_independent(explores[1:], explores[:-1])


def test_exploration_depends_on_the_step_and_the_key_alone():
    action = explore(0.3)
    np.testing.assert_array_equal(action, explore(0.3))
    assert_independent(action > 0, explore(0.3, first_step=8_000) > 0)
    assert_independent(action > 0, explore(0.3, key=1) > 0)


def test_exploration_is_never_at_epsilon_0_and_uniform_at_epsilon_1():
    assert set(explore(0.0).ravel()) == {0}
    counts = np.bincount(explore(1.0).ravel(), minlength=3)
    assert chisquare(counts).pvalue > 1e-3


def test_act_without_a_key_is_greedy():
    agent = linear(dqn_jax, Args(start_e=1.0), num_actions=3)
    params = jnp.array([5.0, 7.0, 6.0])
    observation = np.array([[1.0], [-1.0]], np.float32)
    np.testing.assert_array_equal(agent.act(params, observation), [1, 0])


def test_the_policy_takes_the_environments_actions_and_explores_only_with_a_key():
    args = Args(end_e=0.5, total_timesteps=50_000)
    agent = linear(dqn_jax, args, num_actions=3, start=5)
    params = jnp.array([5.0, 7.0, 6.0])
    observation = np.ones((200, 1), np.float32)
    np.testing.assert_array_equal(protocol.policy(agent, params)(observation), 6)
    policy = protocol.policy(agent, params, KEY)
    for step in (0, 40_000):
        wanted = 5 + np.asarray(agent.act(params, observation, KEY, step))
        assert set(wanted) == {5, 6, 7}
        np.testing.assert_array_equal(policy(observation, step=step), wanted)


def test_small_gradients_make_small_steps():
    """Kingma and Ba 2015, algorithm 1: the first step is learning rate * g / (abs(g) + epsilon)."""
    agent = dqn_jax.Agent(Args(adam_epsilon=0.01, learning_rate=0.1), box(1), TWO)
    gradient = {"kernel": jnp.array([[1e-4], [-0.01]]), "bias": jnp.array([1.0])}
    step, _ = agent.optimizer.update(gradient, agent.optimizer.init(gradient))
    for name, g in gradient.items():
        np.testing.assert_allclose(step[name], -0.1 * g / (abs(g) + 0.01), rtol=1e-4)


def test_another_optimizer_knows_the_parameters_and_their_shapes():
    """AdamW with weight decay of kernels only, which have two dimensions."""
    agent = dqn_jax.Agent(Args(gamma=0.5, batch_size=4), box(1), TWO)
    agent.network = nn.Dense(2)
    agent.optimizer = optax.adamw(
        0.1,
        eps=8.0,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    )
    start = agent.init(KEY)
    online = {"kernel": jnp.array([[0.5, 4.0]]), "bias": jnp.array([0.5, -2.0])}
    target = {"kernel": jnp.array([[10.0, 4.0]]), "bias": jnp.zeros(2)}
    state = start._replace(params={"params": online}, target_params={"params": target})
    rollout = jax.tree.map(lambda x: np.zeros((10, 1, *x.shape), x.dtype), agent.example_step)
    state = state._replace(replay=agent.replay.add_batch(state.replay, rollout))

    def sample(*arguments):
        return draw(*arguments)._replace(experience=windows_by_hand())

    draw = agent.replay.sample
    agent.replay = SimpleNamespace(sample=sample)

    state, metrics = jax.jit(agent.gradient_step)(state, KEY, 0, 10)

    # Values 1 and 2 of the actions, targets 6, 2 and 8: the errors are 5, 0 and 7, the gradient of
    # the first action's weights -2 * (5 + 7) / 3 = -8, and 0 of the second one's.
    assert metrics["losses/td_loss"] == pytest.approx((25 + 49) / 3)
    step = 0.1 * 8 / (8 + 8)
    kernel = [[0.5 + step - 0.1 * 0.1 * 0.5, 4 - 0.1 * 0.1 * 4]]
    np.testing.assert_allclose(state.params["params"]["kernel"], kernel, rtol=1e-6)
    np.testing.assert_allclose(state.params["params"]["bias"], [0.5 + step, -2.0], rtol=1e-6)


class Measured(dqn_jax.Agent):
    """With one more metric: how many rows of a batch are learned from."""

    def loss(self, params, target_params, batch):
        loss, metrics = super().loss(params, target_params, batch)
        return loss, metrics | {"losses/rows": batch.valid.sum()}


def test_metrics_of_the_loss_are_in_those_of_the_train_step():
    """Infinite before learning starts, as the others are: the charts leave that out."""
    args = Args(num_envs=2, train_frequency=8, batch_size=16, learning_starts=16)
    agent = linear(SimpleNamespace(Agent=Measured), args)
    rng = np.random.default_rng(0)
    train_step = jax.jit(agent.train_step)
    state = agent.init(KEY)
    resetting = np.zeros(2, bool)
    rows = []
    for step in (0, 8, 16):
        rollout, resetting = random_rollout(rng, 4, resetting)
        state, _, metrics = train_step(state, rollout, jax.random.PRNGKey(1), step)
        rows.append(float(metrics["losses/rows"]))
    assert rows[:2] == [np.inf, np.inf]
    (key,) = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(1), 16), 1)
    drawn = agent.replay.sample(state.replay, key, 16).experience
    assert 0 < rows[2] == drawn.valid[:, 0].sum() < 16


def test_a_metric_of_the_loss_has_a_chart(monkeypatch):
    """From the point on after learning started; of one that always counts all rows."""
    monkeypatch.setattr(dqn_jax, "Agent", Measured)
    flags = dict(total_timesteps=100, num_envs=2, learning_starts=50, batch_size=16)
    run = Run(env_id="Probe-truncation-v0", log_interval=20, eval_episodes=0, checkpoint_interval=0)
    _, _, folder = train(Args(**flags), run)
    scalars, _ = read_events(folder)
    losses = dict(scalars["losses/td_loss"])
    rows = dict(scalars["losses/rows"])
    assert rows.keys() == losses.keys() == {60, 80, 100}
    for count in rows.values():
        assert 0 < count < 16
        assert count % 1 == 0


@fast_at_ends(
    "flags",
    [
        dict(n_step=3, target_network_frequency=4, tau=0.5, double_q=True, clip_rewards=True),
        dict(n_step=1, target_network_frequency=10, tau=1.0),
        dict(target_network_frequency=8, gradient_steps=2),
    ],
)
def test_train_step_is_what_a_plain_loop_gives(flags):
    """Stored, sampled, updated, target moved when it is due: one thing at a time.

    The buffer of 10 steps of 3 environments is overwritten; a step that only resets is garbage.
    """
    sizes = dict(num_envs=3, train_frequency=4, batch_size=8, buffer_size=28, learning_starts=12)
    args = Args(**flags, **sizes, gamma=0.9)
    agent = linear(dqn_jax, args)
    rng = np.random.default_rng(0)
    plain = PlainReplay()
    params = np.array([0.5, -0.5])
    target_params = np.array([1.5, 0.5])
    state = state_of(agent, params.astype(np.float32), target_params.astype(np.float32))
    train_step = jax.jit(agent.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    resets = 0
    for step in (0, 12, 24, 36):
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        state, acting, metrics = train_step(state, rollout, key, step)
        reward = np.sign(rollout.reward) if args.clip_rewards else rollout.reward
        plain.add(rollout._replace(reward=reward))
        losses = [np.inf, np.inf]  # before learning starts
        update = step // 4 * args.gradient_steps  # counted from step 0
        keys = jax.random.split(jax.random.fold_in(key, step), 3 * args.gradient_steps)
        for own_key in keys if step > 0 else []:
            drawn = agent.replay.sample(state.replay, own_key, 8).indices
            assert min(drawn) >= 3 * max(len(plain.rows) - 10, 0)  # what has not been overwritten
            *batch, valid = plain.batch(drawn, 3, args.n_step, 0.9)
            params, error, value = plain_gradient_step(params, target_params, batch, args.double_q)
            losses = [np.mean(error**2), value.mean()]
            update += 1
            began, ended = [x * 4 // args.gradient_steps for x in (update - 1, update)]
            if ended // args.target_network_frequency > began // args.target_network_frequency:
                target_params = args.tau * params + (1 - args.tau) * target_params
            resets += (~valid).sum()

        got = [metrics["losses/td_loss"], metrics["losses/q_values"]]
        np.testing.assert_allclose(got, losses, rtol=1e-4)
        np.testing.assert_allclose(state.params, params, rtol=1e-4)
        np.testing.assert_array_equal(acting, state.params)
        assert metrics["charts/gradient_steps"] == (len(keys) if step > 0 else 0)
        np.testing.assert_allclose(state.target_params, target_params, rtol=1e-4)
    assert update == 12 * args.gradient_steps
    assert resets > 5
    assert int(agent.replay.size(state.replay)) == 30


@fast_at_ends(
    ("flags", "wanted"),
    [
        (dict(target_network_frequency=12), [3, 6]),
        (dict(target_network_frequency=12, gradient_steps=2), [6, 12]),
        (dict(target_network_frequency=12, gradient_steps=2, tau=0.25), [6, 12]),
        (dict(target_network_frequency=10, tau=0.25), [3, 5]),  # which reach 10 and 20 steps
        (dict(target_network_frequency=1), [1, 2]),
    ],
)
def test_the_target_moves_at_the_multiples_of_its_period(flags, wanted):
    agent = linear(dqn_jax, Args(**flags, train_frequency=4, batch_size=8, buffer_size=40))
    state = filled(agent, state_of(agent, [0.5, -0.5], [1.5, 0.5]))
    moves = moves_of_target(agent, state, last_update=wanted[-1])
    assert list(moves) == wanted
    for old_target, params, target in moves.values():
        moved = agent.args.tau * params + (1 - agent.args.tau) * old_target
        np.testing.assert_allclose(target, moved, rtol=1e-6)


def test_metrics_are_infinite_without_a_gradient_step_and_finite_with_one():
    """The charts leave out what is infinite."""
    args = Args(num_envs=2, train_frequency=8, batch_size=8, buffer_size=40, learning_starts=32)
    agent = linear(dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 4, np.zeros(2, bool))
    before, after = metrics_around_the_start(agent, rollout)
    infinite = {tag for tag, x in before.items() if not np.isfinite(x)}
    assert infinite == {"losses/td_loss", "losses/q_values"}
    assert np.isfinite(list(after.values())).all()
    assert (before["charts/gradient_steps"], after["charts/gradient_steps"]) == (0, 1)


@pytest.mark.more
def test_what_is_drawn_in_to_transitions_does_not_depend_on_the_batch():
    """Its key is another one than that of the draw from the replay."""
    agent = linear(dqn_jax, Args(batch_size=8, buffer_size=40))
    of_draw, of_batch = keys_of_gradient_step(agent, filled(agent, agent.init(KEY)), KEY)
    assert (of_draw != of_batch).any()


def test_rewards_are_learned_from_by_their_sign():
    args = Args(num_envs=2, train_frequency=6, batch_size=8, clip_rewards=True)
    agent = linear(dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 3, np.zeros(2, bool))
    rollout = rollout._replace(
        reward=np.array([[2.5, -7.0], [0.0, 0.25], [100.0, -0.5]], np.float32),
        terminated=np.array([[False, False], [False, False], [True, False]]),
        truncated=np.array([[False, False], [False, False], [False, True]]),
        valid=np.ones((3, 2), bool),
    )
    state, _, _ = jax.jit(agent.train_step)(agent.init(KEY), rollout, KEY, 0)
    windows = agent.replay.get(state.replay, np.arange(4))
    transitions = agent.to_transitions(windows, KEY)

    np.testing.assert_array_equal(transitions.reward, [1, -1, 0, 1])
    np.testing.assert_array_equal(state.replay.storage.reward[:3], rollout.reward)


def cut_by_hand(rows):
    """Rows of which no episode goes on: the last one is lost, the one before it is cut off."""
    *earlier, before_last, last = rows
    goes_on = before_last.valid & ~before_last.terminated
    assert goes_on.any()
    no = np.zeros(6, bool)
    cut_off = before_last._replace(truncated=goes_on)
    lost = last._replace(valid=no, terminated=no, truncated=no)
    return [*earlier, cut_off, lost]


@pytest.fixture(scope="module", params=[more(1), 3])
def restart(request):
    """A replay of 12 rows of 6 environments, of which it holds 10, before and after a restart.

    `went_on` and `restarted` are the transitions of all windows that are held after 4 rows more,
    where the environments went on and where they started anew; `rows` and `cut_rows` are all rows
    of these, by hand.
    """
    n_step = request.param
    args = Args(n_step=n_step, num_envs=6, train_frequency=24, batch_size=8, buffer_size=60)
    agent = linear(dqn_jax, replace(args, gamma=0.9))
    rng = np.random.default_rng(32)  # episodes end in the last row, both ways, and before it
    before = state_of(agent, *np.zeros((2, 2), np.float32))
    train_step = jax.jit(agent.train_step)
    to_transitions = jax.jit(agent.to_transitions)
    resetting = np.zeros(6, bool)
    plain = PlainReplay()
    for _ in range(3):
        rollout, resetting = random_rollout(rng, 4, resetting)
        before, _, _ = train_step(before, rollout, KEY, 0)
        plain.add(rollout)
    after = protocol.on_resume(agent, before)
    cut_rows = cut_by_hand(plain.rows)

    rollout, _ = random_rollout(rng, 4, np.zeros(6, bool))
    plain.add(rollout)
    # Of 16 rows the last 10 are held, and a window is n_step + 1 of them.
    first_rows = range(6, 16 - n_step)
    indices = np.array([6 * row + i for row in first_rows for i in range(6)])

    def transitions(state):
        new, _, _ = train_step(state, rollout, KEY, 0)
        return to_transitions(agent.replay.get(new.replay, indices), KEY)

    return SimpleNamespace(
        n_step=n_step,
        before=before,
        after=after,
        indices=indices,
        went_on=transitions(before),
        restarted=transitions(after),
        rows=plain.rows,
        cut_rows=[*cut_rows, *plain.rows[12:]],
    )


def test_a_restart_loses_the_last_row_and_cuts_episodes_off_before_it(restart):
    held = np.arange(2, 12)  # rows, in the ring at their number modulo 10
    wanted = jax.tree.map(lambda *x: np.stack(x), *restart.cut_rows[2:12])
    stored = jax.tree.map(lambda x: np.asarray(x)[held % 10], restart.after.replay.storage)
    jax.tree.map(np.testing.assert_array_equal, stored, wanted)

    # All else stays.
    replay = restart.after.replay._replace(storage=restart.before.replay.storage)
    same = restart.after._replace(replay=replay)
    jax.tree.map(np.testing.assert_array_equal, same, restart.before)


def test_no_window_goes_across_a_restart(restart):
    """All windows that are held, where the environments went on and where they started anew."""
    for batch, rows in ((restart.went_on, restart.rows), (restart.restarted, restart.cut_rows)):
        plain = PlainReplay(rows)
        *expected, is_valid = plain.batch(restart.indices, 6, restart.n_step, 0.9)
        np.testing.assert_array_equal(batch.valid, is_valid)
        for got, x in zip(batch, expected, strict=False):
            np.testing.assert_allclose(np.asarray(got)[is_valid], x, rtol=1e-5, atol=1e-6)

    # Only the last row before the restart is lost.
    row, environment = np.divmod(restart.indices, 6)
    stepped = np.stack([step.valid for step in restart.rows])[row, environment]
    assert (~stepped).any()
    assert stepped[row == 11].any()
    np.testing.assert_array_equal(restart.went_on.valid, stepped)
    np.testing.assert_array_equal(restart.restarted.valid, stepped & (row != 11))


def test_windows_that_reach_a_restart_bootstrap_from_the_last_observation(restart):
    batch = restart.restarted
    row, environment = np.divmod(restart.indices, 6)
    reaching = 0
    for b in np.flatnonzero(batch.valid & (row < 11) & (row + restart.n_step >= 11)):
        i = environment[b]
        until_cut = restart.rows[row[b] : 11]
        if any(step.terminated[i] or step.truncated[i] for step in until_cut):
            continue
        reaching += 1
        np.testing.assert_array_equal(batch.next_observation[b], restart.rows[11].observation[i])
        assert batch.discount[b] == pytest.approx(0.9 ** len(until_cut))
        total = sum(0.9**m * step.reward[i] for m, step in enumerate(until_cut))
        assert batch.reward[b] == pytest.approx(total, rel=1e-5)
    assert reaching > 1


def test_a_buffer_that_does_not_divide_is_rounded_up():
    """So that it holds at least what was asked for, and at least one window."""
    for size, num_envs, n_step, rows in ((10, 3, 1, 4), (9, 3, 1, 3), (10, 8, 3, 4)):
        agent = linear(dqn_jax, Args(buffer_size=size, num_envs=num_envs, n_step=n_step))
        assert agent.replay.init(agent.example_step).storage.reward.shape == (rows, num_envs)


# ------------------------------------------------------------------------------------- the learning


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        ("Probe-constant-v0", [[0.0]], [[1.0, 1.0]]),
        ("Probe-observation-v0", [[-1.0], [1.0]], [[-1.0, -1.0], [1.0, 1.0]]),
        ("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("Probe-action-v0", [[0.0]], [[-1.0, 1.0]]),
        ("Start-v0", [[0.0]], [[-1.0, 1.0]]),  # its actions are 1 and 2
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),  # 1 / (1 - gamma): a cut is not an end
    ],
)
def test_probe_values_are_learned(env_id, observations, values):
    _, q = learned_q(dqn_jax, env_id, np.array(observations, np.float32), PROBE)
    np.testing.assert_allclose(q, values, atol=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "value"), [("Probe-truncation-v0", 2.0), ("Probe-discount-v0", 0.5)]
)
def test_probe_values_are_learned_from_n_steps(env_id, value):
    """Ends of both kinds within three steps leave the values what they are with one."""
    _, q = learned_q(dqn_jax, env_id, VECTOR[None], PROBE, n_step=3, total_timesteps=6_000)
    np.testing.assert_allclose(q, value, atol=0.01)


@pytest.mark.slow
def test_a_probe_value_is_learned_with_double_q_and_soft_target():
    flags = dict(double_q=True, tau=0.5)
    _, q = learned_q(dqn_jax, "Probe-truncation-v0", VECTOR[None], PROBE, **flags)
    np.testing.assert_allclose(q, 2.0, atol=0.01)


@pytest.mark.slow
def test_an_image_probe_is_learned():
    """uint8 images go through the Nature CNN, stay uint8 in the buffer, and can be learned from."""
    black = np.zeros((4, 36, 36), np.uint8)
    white = np.full((4, 36, 36), 255, np.uint8)
    flags = dict(total_timesteps=560, learning_starts=64, batch_size=16, learning_rate=1e-3)
    state, q = learned_q(dqn_jax, "ProbeImage-v0", np.stack([black, white]), PROBE, **flags)
    stored = state.replay.storage
    assert stored.observation.dtype == jnp.uint8
    assert stored.observation.shape == (125, 8, 4, 36, 36)
    np.testing.assert_allclose(q, [[1.0, -1.0], [-1.0, 1.0]], atol=0.1)
