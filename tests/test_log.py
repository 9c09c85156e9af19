"""`Log`: which episodes it counts, and what stands in a log entry."""

import math
from types import SimpleNamespace

import environments  # noqa: F401  registers the environments
import jax.numpy as jnp
import numpy as np
from by_hand import linear, random_rollout
from helpers import read_events

import dqn_jax
from dqn_jax import Args, Run


def make_log(tmp_path, num_envs, total_timesteps=1_000):
    """An open `Log` of a run in so many environments."""
    args = SimpleNamespace(num_envs=num_envs, total_timesteps=total_timesteps)
    agent = SimpleNamespace(args=args, steps_per_iteration=10 * num_envs)
    log = dqn_jax.Log(agent, Run(), tmp_path, stop=[])
    log.open(first_step=0)
    return log


def test_the_episodes_of_counter_are_counted(tmp_path):
    """They last 2, 3, 4, 5, 2, ... steps, with rewards 1, 2, ...; a step between them resets."""
    agent = linear(dqn_jax, Args(num_envs=2, train_frequency=10), features=3, num_actions=3)
    envs = dqn_jax.make_envs(agent.args, Run(env_id="Counter-v0"), 2)
    observation, _ = envs.reset(seed=0)
    state = (observation, np.ones(2, bool))
    unfinished = []
    with make_log(tmp_path, num_envs=2) as log:
        for _ in range(5):
            rollout, state = dqn_jax.collect_rollout(agent, envs, jnp.zeros(9), state, None, 0)
            log.count_episodes(0, rollout)
            unfinished.append(log.unfinished[:, 0].tolist())
    envs.close()
    returns, lengths = np.transpose(log.ended).tolist()
    assert lengths == [2, 2, 3, 3, 4, 4, 5, 5, 2, 2, 3, 3]
    assert returns == [3, 3, 6, 6, 10, 10, 15, 15, 3, 3, 6, 6]
    # They end at step 2, 6, 11, 17, 20 and 24.
    assert unfinished == [[3, 2], [6, 3], [6, 3], [0, 0], [0, 0]]


def test_episodes_are_counted_as_in_a_plain_loop(tmp_path):
    """Across rollouts, without the steps that only reset."""
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


def test_a_log_entry_has_means_of_what_was_counted_since_the_last_one(tmp_path):
    """And no chart of episodes if none ended, and no number that is not finite."""
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


def test_an_iteration_is_logged_where_its_interval_is_crossed_and_at_the_end(tmp_path):
    with make_log(tmp_path, num_envs=30, total_timesteps=2_200) as log:
        is_over = [
            log.end_iteration(end, None, None, {"end": end}) for end in range(300, 2_401, 300)
        ]
    assert is_over == [False] * 7 + [True]
    points = read_events(tmp_path)[0]["end"]
    assert [step for step, _ in points] == [1_200, 2_100, 2_400]


def test_a_run_is_over_when_a_signal_came_and_its_last_iteration_is_logged(tmp_path):
    with make_log(tmp_path, num_envs=1) as log:
        assert not log.end_iteration(10, None, None, {"end": 10})
        log.stop.append(15)
        assert log.end_iteration(20, None, None, {"end": 20})
    assert read_events(tmp_path)[0]["end"] == [(20, 20)]
