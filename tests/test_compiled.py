"""Compiled runs: the program's results, its log entries, a resume. See also test_sweep.py."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, register_jax
from helpers import read_events, train_compiled

import dqn_jax
from cleanreplay import checkpoints, disk
from cleanreplay.compiled import make_trainer


class Clock(Chain):
    """Gives reward 0.5 per step, for at most 9 steps. From state 8 on, what `wrong` names is wrong.

    The last number of an observation is random. The state has an empty array, as in MuJoCo.
    """

    def initial(self, rng, params=None):
        return {"step": jnp.int32(0), "wrong": jnp.int32(0), "empty": jnp.zeros((0, 3))}

    def transition(self, state, action, rng, params=None):
        return state | {"step": state["step"] + 1}

    def observation(self, state, rng, params=None):
        is_wrong = (state["step"] >= 8) & (state["wrong"] == OBSERVATION)
        observation = jnp.zeros(5).at[-1].set(jax.random.uniform(rng))
        return jnp.where(is_wrong, jnp.nan, observation)

    def reward(self, state, action, next_state, rng, params=None):
        is_late = state["step"] >= 8
        reward = jnp.where(is_late & (state["wrong"] == REWARD), jnp.nan, 0.5)
        return jnp.where(state["wrong"] == PARAMETERS, 3e38, reward)  # its square is infinite

    def terminal(self, state, rng, params=None):
        return state["step"] < 0


RIGHT, REWARD, OBSERVATION, PARAMETERS = range(4)
register_jax("Clock-v0", Clock())
# An iteration is a step of one environment. With autoreset steps, the first episode is over after
# step 10, the fourth one after step 40, and the fifth not before step 49.
CLOCK_ARGS = dqn_jax.Args(
    total_timesteps=48,
    train_frequency=1,
    learning_starts=10,
    batch_size=8,
    buffer_size=100,
    hidden_sizes=(8,),
)
CLOCK_RUN = dqn_jax.Run(env_id="Clock-v0", num_seeds=2, log_interval=4, eval_episodes=0)


@cache
def clocks():
    """Makes the program of two agents, and its RunnerState before the first step."""
    trainer = make_trainer(dqn_jax, CLOCK_ARGS, CLOCK_RUN)
    runner = trainer.init()
    return trainer.compile(runner), runner


def run_clocks(*counts, wrong=RIGHT):
    """Calls the program for each count of log entries. Returns RunnerState, all entries [2, ...].

    `wrong` is what is wrong in the environment of the second agent.
    """
    program, start = clocks()
    runner = jax.tree.map(jnp.copy, start)  # the program overwrites it
    runner.envs.inner["wrong"] = runner.envs.inner["wrong"].at[1].set(wrong)
    all_entries = []
    step = 0
    for count in counts:
        runner, entries = program(runner, step, count)
        all_entries.append(jax.tree.map(lambda x, count=count: x[:, :count], entries))
        step += 4 * count
    return runner, jax.tree.map(lambda *x: np.concatenate(x, axis=1), *all_entries)


def test_one_call_for_several_log_entries_is_a_call_for_each():
    together = run_clocks(4)
    one_by_one = run_clocks(1, 1, 2)

    jax.tree.map(np.testing.assert_array_equal, together, one_by_one)


def test_each_iteration_draws_afresh():
    runner, _ = run_clocks(4)

    drawn = np.asarray(runner.agent.replay.storage.observation)[:, :16, :, -1]
    assert len(np.unique(drawn)) == 2 * 16


def test_a_log_entry_has_the_means_of_its_episodes():
    _, entries = run_clocks(4)

    for name, mean in (("episodic_return", 4.5), ("episodic_length", 9.0)):
        expected = [[np.inf, np.inf, mean, np.inf]] * 2  # infinite if no episode ended
        np.testing.assert_array_equal(entries.metrics[f"charts/{name}"], expected)
    expected = [[[0, 0, 0], [0, 0, 0], [1, 4.5, 9], [0, 0, 0]]] * 2
    np.testing.assert_array_equal(entries.finished, expected)
    # The loss is that of the last iteration; the first gradient step is at step 10.
    np.testing.assert_array_equal(entries.metrics["charts/gradient_steps"], [[0, 0, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (REWARD, [[True, True, False]]),
        (OBSERVATION, [[True, False, False]]),  # the one after the last step of an entry counts
        (PARAMETERS, [[True, True, False]]),
    ],
)
def test_numbers_that_are_not_finite_are_noticed_in_their_entry(wrong, expected):
    _, entries = run_clocks(3, wrong=wrong)

    assert entries.finite[0].all()
    np.testing.assert_array_equal(entries.finite[1, :, wrong - 1], *expected)
    if wrong != OBSERVATION:
        assert entries.finite[1, :, 1].all()
    if wrong != REWARD:
        assert entries.finite[1, :, 0].all()


def shown_returns(printed):
    found = re.findall(r"^(\d+) steps, .* a second, return (\S+)$", printed, re.MULTILINE)
    return {int(step): shown for step, shown in found}


def test_a_run_shows_its_return_once_an_episode_has_ended(tmp_path, stop_at):
    """The line is of the first agent. A signal ends and saves the run at step 40, for a resume."""
    left = train_compiled(dqn_jax, CLOCK_ARGS, CLOCK_RUN, tmp_path, stop_at(40))
    saved = disk.open_file(checkpoints.newest(left.folder)).about
    points = read_events(left.folder)[0]["charts/SPS"]

    steps = range(4, 41, 4)
    assert left.printed.startswith(f"{left.folder}: ")
    assert shown_returns(left.printed) == {x: "nan" if x < 10 else "4.50" for x in steps}
    assert left.returns.tolist() == [4.5, 4.5]
    assert [step for step, _ in points] == list(steps)
    assert (saved["step"], saved["returns"]) == (40, [4.5, 4.5])
