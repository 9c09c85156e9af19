"""`Log`: the episodes that it counts, and the contents of a log entry."""

import math
import time
from types import SimpleNamespace

import numpy as np
from by_hand import random_rollout
from helpers import read_events

import dqn_jax
from dqn_jax import Run


def make_log(tmp_path, num_envs, total_timesteps=1_000):
    args = SimpleNamespace(num_envs=num_envs, total_timesteps=total_timesteps)
    agent = SimpleNamespace(args=args, steps_per_iteration=10 * num_envs)
    log = dqn_jax.Log(agent, Run(), tmp_path, stop=[])
    log.open(first_step=0)
    return log


def test_episodes_are_counted_as_in_a_plain_loop(tmp_path):
    """Episodes continue across rollouts; autoreset steps do not count."""
    n = 4
    rng = np.random.default_rng(2)
    resetting = np.zeros(n, bool)
    totals = np.zeros((2, n))
    episodes = []
    with make_log(tmp_path, num_envs=n) as log:
        for _ in range(30):
            rollout, resetting = random_rollout(rng, 6, resetting)
            rollout = rollout._replace(reward=np.round(8 * rollout.reward))  # exact sums
            log.count_episodes(0, rollout)
            for t in range(6):
                totals += np.where(rollout.valid[t], [rollout.reward[t], np.ones(n)], 0)
                for i in np.flatnonzero(rollout.terminated[t] | rollout.truncated[t]):
                    episodes.append(totals[:, i].tolist())
                    totals[:, i] = 0
            np.testing.assert_array_equal(log.unfinished, totals)

    assert len(episodes) > 100
    assert np.array(log.ended).tolist() == episodes


def test_an_entry_has_means_of_what_was_counted_since(tmp_path):
    """It has no charts of episodes if none ended, and only finite numbers."""
    with make_log(tmp_path, num_envs=1) as log:
        log.ended += [(1.0, 4.0), (2.0, 4.0), (6.0, 7.0)]
        log.add_metrics(100, {"losses/td_loss": 0.5, "mine": 2})
        log.add_metrics(200, {"losses/td_loss": math.inf, "mine": 0})
        log.ended += [(10.0, 1.0)] * 99
        log.add_metrics(300, {"charts/nothing": math.nan})

    scalars, _ = read_events(tmp_path)
    speed = scalars.pop("charts/SPS")
    assert [step for step, value in speed if value > 0] == [100, 200, 300]
    assert scalars == {
        "losses/td_loss": [(100, 0.5)],
        "mine": [(100, 2), (200, 0)],
        "charts/episodic_return": [(100, 3), (300, 10)],
        "charts/episodic_length": [(100, 5), (300, 1)],
    }
    assert list(log.recent_returns) == [6, *[10] * 99]


def test_an_entry_is_made_at_each_interval_and_at_the_end(tmp_path):
    ends = range(300, 2_401, 300)
    with make_log(tmp_path, num_envs=30, total_timesteps=2_200) as log:
        is_over = [log.end_iteration(end, None, None, {"end": end}) for end in ends]

    assert is_over == [False] * 7 + [True]
    points = read_events(tmp_path)[0]["end"]
    assert [step for step, _ in points] == [1_200, 2_100, 2_400]


def test_the_iteration_of_a_signal_is_the_last_and_logged(tmp_path):
    with make_log(tmp_path, num_envs=1) as log:
        assert not log.end_iteration(10, None, None, {"end": 10})
        log.stop.append(15)
        assert log.end_iteration(20, None, None, {"end": 20})

    assert read_events(tmp_path)[0]["end"] == [(20, 20)]


def test_a_clock_that_is_set_back_changes_no_speed(tmp_path, monkeypatch):
    now = time.time()
    with make_log(tmp_path, num_envs=1) as log:
        monkeypatch.setattr(time, "time", lambda: now - 3_600)
        log.add_metrics(10, {})
        monkeypatch.setattr(time, "monotonic", lambda: log.start_time)  # the clock stands still
        log.add_metrics(20, {})

    speeds = [speed for _, speed in read_events(tmp_path)[0]["charts/SPS"]]
    assert all(np.isfinite(speeds))
    assert min(speeds) > 0
