"""Compiled training: counting, logging, division into calls, and sharing of devices."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dqn_jax
from cleanreplay import compiled, devices
from cleanreplay.compiled import Entry, RunnerState, Trainer, make_trainer
from cleanreplay.sweep import Sweep
from dqn_jax import Step


def test_episodes_are_counted_across_rollouts():
    """It has number, returns and lengths of finished episodes, and of the others so far."""
    runner = RunnerState(None, None, None, jnp.zeros((2, 2)), finished=jnp.zeros(3))
    count = jax.jit(compiled.count_episodes)
    # Steps of two environments. The second one begins with an autoreset step.
    rewards = np.float32([[1, 0], [2, 5], [4, 7], [0, 9]])
    valid = np.array([[True, False], [True, True], [True, True], [False, True]])
    terminated = np.array([[False, False], [False, False], [True, False], [False, False]])
    truncated = np.array([[False, False], [False, False], [False, False], [False, True]])
    rollout = Step(None, None, rewards, terminated, truncated, valid)
    first = count(runner, jax.tree.map(lambda x: x[:3], rollout))
    second = count(first, jax.tree.map(lambda x: x[3:], rollout))

    assert first.finished.tolist() == [1, 7, 3]
    assert first.unfinished.tolist() == [[0, 12], [0, 2]]
    assert second.finished.tolist() == [2, 28, 6]
    assert second.unfinished.tolist() == [[0, 0], [0, 0]]


def test_each_agent_averages_its_own_last_100_episodes():
    """It takes whole log entries, newest first: [episodes, their returns, their lengths]."""
    newest = np.array([[99, 99.0, 0], [300, 600.0, 0]])
    before = np.array([[1, 101.0, 0], [100, 1_000.0, 0]])
    oldest = np.array([[50, 5e9, 0], [50, 5e9, 0]])
    none = np.zeros((2, 3))

    assert compiled.recent_returns([newest, before, oldest], [0, 0]).tolist() == [2, 2]
    assert compiled.recent_returns([newest], [0, 0]).tolist() == [1, 2]
    assert compiled.recent_returns([none], [7, 1]).tolist() == [7, 1]


def test_entries_are_logged_at_their_steps_and_times(monkeypatch):
    """A call of 6 seconds has three entries of two agents. The first agent's last one is shown."""
    monkeypatch.setattr(
        compiled, "time", SimpleNamespace(time=lambda: 100.0, monotonic=lambda: 100.0)
    )
    rows = []

    def make_log():
        return SimpleNamespace(
            first_step=10,
            start_time=90.0,
            write=lambda step, row, time: rows.append((step, row, time)),
            add_metrics=lambda step, row: rows.append((step, row)),
        )

    entries = Entry({"x": np.arange(6.0).reshape(2, 3)}, None, np.ones((2, 3, 3), bool))
    compiled.log_entries([make_log(), make_log()], 100, 20, entries, seconds=6.0)

    assert rows == [
        (120, {"x": 0.0, "charts/SPS": 110 / 6}, 96.0),
        (140, {"x": 1.0, "charts/SPS": 130 / 8}, 98.0),
        (160, {"x": 2.0}),
        (120, {"x": 3.0, "charts/SPS": 110 / 6}, 96.0),
        (140, {"x": 4.0, "charts/SPS": 130 / 8}, 98.0),
        (160, {"x": 5.0, "charts/SPS": 150 / 10}, 100.0),
    ]


def check(finite, step, interval, sweep, run):
    """Calls `check_entries` for entries with these flags [agents, entries, 3]."""
    run_folder = SimpleNamespace(run=run, path="runs/here")
    compiled.check_entries(Entry({}, None, finite), step, interval, run_folder, sweep)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ([0, 2], "CartPole-v1: the reward is not finite"),
        ([2], "runs/here: diverged, parameters are not finite"),
    ],
)
def test_the_first_agent_whose_numbers_are_not_finite_is_named(what, text):
    run = dqn_jax.Run(seed=7, num_seeds=3)
    finite = np.ones((3, 4, 3), bool)  # seeds, log entries, and rewards, observations, parameters
    finite[1, 3] = False
    finite[2, 2, what] = False
    with pytest.raises(FloatingPointError) as caught:
        check(finite, 1_000, 100, Sweep(dqn_jax.Args(), run), run)

    assert str(caught.value) == f"{text}: seed 9, between steps 1,200 and 1,300"


def test_in_a_sweep_the_other_agents_continue_until_none_is_left(capsys):
    run = dqn_jax.Run(sweep=("gamma=0.9,0.8,0.7",))
    sweep = Sweep(dqn_jax.Args(), run)
    finite = np.ones((3, 2, 3), bool)
    finite[1, 1:, 2] = False
    check(finite, 0, 100, sweep, run)
    check(finite, 200, 100, sweep, run)  # it is named once
    lines = capsys.readouterr().out.splitlines()
    lost = set(sweep.lost)
    finite[:] = False
    with pytest.raises(FloatingPointError, match=r"the reward is not finite: gamma=0\.7, seed 1"):
        check(finite, 400, 100, sweep, run)

    where = "gamma=0.8, seed 1, between steps 100 and 200; the other agents continue"
    assert lines == [f"runs/here: diverged, parameters are not finite: {where}"]
    assert lost == {1}


@pytest.mark.parametrize(
    ("step", "limit", "intervals", "expected"),
    [
        (0, 100, (100, 250), 5),  # a checkpoint
        (100, 100, (100, 250), 5),
        (200, 100, (100, 250), 3),  # an evaluation, in the midst of a log entry
        (300, 100, (100, 250), 2),  # the end
        (200, 2, (100, 250), 2),  # the limit
        (0, 100, (0, 250), 13),  # no checkpoints
    ],
)
def test_a_call_ends_where_something_is_due(step, limit, intervals, expected):
    run = SimpleNamespace(checkpoint_interval=intervals[0], eval_interval=intervals[1])
    args = SimpleNamespace(total_timesteps=330)
    trainer = SimpleNamespace(run=run, args=args, interval=20, limit=limit)

    assert Trainer.num_entries(trainer, step) == expected


def test_calls_cover_more_log_entries_until_they_are_long():
    trainer = SimpleNamespace(limit=1, max_entries=5)
    limits = []
    for is_long in (False, False, True, False):
        Trainer.adapt(trainer, is_long)
        limits.append(trainer.limit)

    assert limits == [2, 4, 4, 5]


def test_a_log_interval_is_whole_iterations():
    """A call has at most as many iterations as the replay holds if experience is saved."""
    args = dqn_jax.Args(save_experience=True, buffer_size=100)
    trainer = make_trainer(
        dqn_jax, args, dqn_jax.Run(env_id="environments:Chain-v0", log_interval=25)
    )

    assert (trainer.iterations, trainer.interval, trainer.max_entries) == (3, 30, 3)


@pytest.mark.parametrize(("seed", "expected"), [(3, 3), (2**32 + 3, 3)])
def test_an_evaluation_has_a_key_that_training_never_has(seed, expected):
    """The steps that training folds into its keys are below 2**31."""
    given = []
    run = dqn_jax.Run(seed=seed, eval_episodes=4, eval_max_steps=50, eval_explores=True)
    trainer = SimpleNamespace(run=run, envs=SimpleNamespace(evaluate=lambda *x: given.append(x)))
    trainer.of = lambda values: trainer
    Trainer.evaluate_one(trainer, "params")

    ((params, episodes, key, *rest),) = given
    assert (params, episodes, rest) == ("params", 4, [50, True])
    fold = jax.random.fold_in(jax.random.PRNGKey(expected), 2**31)
    np.testing.assert_array_equal(key, fold)


@pytest.mark.parametrize(
    ("num_agents", "num_devices", "shape"),
    [(4, 2, (2, 1)), (1, 2, (1, 2)), (2, 4, (2, 2)), (3, 2, (1, 2)), (6, 4, (2, 2))],
)
def test_devices_are_shared_by_agents_and_environments(num_agents, num_devices, shape):
    mesh = devices.make_mesh(num_agents, num_envs=4, num_devices=num_devices)

    assert tuple(mesh.shape.items()) == (("seeds", shape[0]), ("envs", shape[1]))
