"""Compiled runs: a group of agents and each alone, what a program computes, and what is left."""

import re
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, register_jax
from helpers import make_trainer, read_events, train_compiled

import dqn_jax
import ppo_jax
from cleanreplay import checkpoints, disk, load_policy

SEEDS = range(3, 7)


def own_folders(folder, seeds):
    """The folders of the agents of a run, of which the first one's is the folder of the run."""
    return [folder, *(folder / f"seed_{seed}" for seed in seeds[1:])]


# Four agents in a chain, of which some go right and some do not, on two devices.
FOUR_ARGS = ppo_jax.Args(num_steps=8, total_timesteps=64)
FOUR_RUN = ppo_jax.Run(
    env_id="environments:Chain-v0",
    num_seeds=4,
    seed=3,
    num_devices=2,
    log_interval=32,
    eval_interval=32,
    eval_episodes=1,
)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What the four agents have left, and what the code of a user has seen of evaluations."""
    seen = []

    class Noted(ppo_jax.Log):
        def at_evaluation(self, step, params, returns):
            seen.append((self.folder, step, params, returns.tolist()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_jax, "Log", Noted)
        left = train_compiled(ppo_jax, FOUR_ARGS, FOUR_RUN, tmp_path_factory.mktemp("four"))
    left.folders = own_folders(left.folder, SEEDS)
    left.scalars = [read_events(folder)[0] for folder in left.folders]
    left.seen = seen
    return left


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The third of the four agents trained alone, its environments on two devices."""
    run = replace(FOUR_RUN, num_seeds=1, seed=SEEDS[2], eval_episodes=0)
    return train_compiled(ppo_jax, FOUR_ARGS, run, tmp_path_factory.mktemp("alone"))


def params_of(state, i):
    """The parameters of agent i."""
    return jax.tree.map(lambda x: np.asarray(x[i]), state.params)


def goes_right(state):
    """Whether the policy of each agent [4] goes right in all states of the chain."""
    agent = ppo_jax.Agent(FOUR_ARGS, Chain.observation_space, Chain.action_space)
    output, _ = jax.vmap(agent.network.apply, in_axes=(0, None))(state.params, jnp.eye(5)[:4])
    return (output[..., 1] > output[..., 0]).all(axis=1).astype(float).tolist()


def test_an_agent_of_a_group_is_the_one_trained_alone(four, alone):
    own = params_of(four.state, 2)
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), own, params_of(four.state, 0))
    scalars, _ = read_events(alone.folder)

    assert max(jax.tree.leaves(differences)) > 1e-2
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-4)  # rounding differs
    jax.tree.map(close, own, params_of(alone.state, 0))
    own_scalars = {tag: x for tag, x in four.scalars[2].items() if not tag.startswith("eval/")}
    assert set(own_scalars) == set(scalars)
    assert {tag for tag in scalars if tag.startswith("losses/")}
    for tag in set(scalars) - {"charts/SPS"}:
        close(own_scalars[tag], scalars[tag], err_msg=tag)
    close(four.returns[2:3], alone.returns)


def starts_of_parts(x, axis):
    """Where the part of each device begins on this axis of an array."""
    return sorted(part.index[axis].start or 0 for part in x.addressable_shards)


def test_agents_or_environments_are_spread_over_devices(four, alone):
    """What is not spread is on both devices; what each process reads is."""
    for x in jax.tree.leaves(four.runner._replace(finished=None)):
        assert starts_of_parts(x, axis=0) == [0, 2]
    for x in jax.tree.leaves(alone.runner.envs):
        assert starts_of_parts(x, axis=1) == [0, 2]
    for x in (four.runner.finished, *jax.tree.leaves(alone.runner._replace(envs=None))):
        assert x.sharding.is_fully_replicated
        assert len(x.sharding.device_set) == 2


def test_each_agent_of_a_group_is_evaluated(four):
    expected = goes_right(four.state)

    assert set(expected) == {0.0, 1.0}
    for scalars, score in zip(four.scalars, expected, strict=True):
        (first, _), last = scalars["eval/episodic_return"]
        assert first == 32
        assert last == (64, score)


def test_the_best_agent_of_a_group_is_kept(four):
    scores = np.array([[x for _, x in own["eval/episodic_return"]] for own in four.scalars])
    policy = load_policy(four.folder)

    assert scores[0].max() < scores.max() == 1.0  # it is not the first
    np.testing.assert_array_equal(policy(np.eye(5, dtype=np.float32)[:4]), [1, 1, 1, 1])


def test_the_code_of_a_user_sees_each_agent_in_an_evaluation(four):
    steps = [step for _, step, _, _ in four.seen]
    agent = four.trainer.agent

    assert steps == [32] * 4 + [64] * 4
    last = zip(four.seen[4:], four.folders, goes_right(four.state), strict=True)
    for i, ((own_folder, _, params, returns), folder, score) in enumerate(last):
        assert (own_folder, returns) == (folder, [score])
        own = jax.tree.map(lambda x, i=i: x[i], agent.policy_params(four.state))
        jax.tree.map(np.testing.assert_array_equal, params, own)


def test_a_line_has_the_mean_of_all_agents(four):
    mean = np.mean(goes_right(four.state))

    assert 0 < mean < 1
    assert f"64 steps: return {mean:.2f} in an evaluation\n" in four.printed
    for seed, x in zip(SEEDS, four.returns, strict=True):
        assert f"seed {seed}: mean return of the last episodes {x:.2f}\n" in four.printed


def test_a_complete_run_that_is_resumed_is_evaluated_again(four):
    folder = Path(shutil.copytree(four.folder, "copy")).absolute()
    run = replace(FOUR_RUN, resume=str(folder))
    state, returns, _ = ppo_jax.train(FOUR_ARGS, run)

    assert len(set(returns)) > 1
    np.testing.assert_array_equal(returns, four.returns)
    jax.tree.map(np.testing.assert_array_equal, state, four.state)
    for own_folder, score in zip(own_folders(folder, SEEDS), goes_right(state), strict=True):
        scalars, _ = read_events(own_folder)
        assert scalars["eval/episodic_return"][1:] == [(64, score), (64, score)]
        assert [step for step, _ in scalars["charts/SPS"]] == [32, 64]


class Clock(Chain):
    """Pays 0.5 a step and ends by a time limit of 9 steps. From state 8 on something is wrong.

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
# A step of one environment is an iteration. The first episode and its reset are step 10, the fourth
# and its reset step 40, and no other ends before step 49.
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
    """The program of two agents, and its RunnerState before the first step."""
    trainer = make_trainer(dqn_jax, CLOCK_ARGS, CLOCK_RUN)
    runner = trainer.init()
    return trainer.compile(runner), runner


def run_clocks(*counts, wrong=RIGHT):
    """Calls the program for so many log entries each: RunnerState, and all entries [2, ...].

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
        expected = [[np.inf, np.inf, mean, np.inf]] * 2  # infinite where none has ended
        np.testing.assert_array_equal(entries.metrics[f"charts/{name}"], expected)
    expected = [[[0, 0, 0], [0, 0, 0], [1, 4.5, 9], [0, 0, 0]]] * 2
    np.testing.assert_array_equal(entries.finished, expected)
    # That of the last iteration: the first gradient step is at step 10.
    np.testing.assert_array_equal(entries.metrics["charts/gradient_steps"], [[0, 0, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (REWARD, [[True, True, False]]),
        (OBSERVATION, [[True, False, False]]),  # that after the last step of an entry counts
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
    """The return in each line of progress, by its step."""
    found = re.findall(r"^(\d+) steps, .* a second, return (\S+)$", printed, re.MULTILINE)
    return {int(step): shown for step, shown in found}


def test_a_run_shows_its_return_once_an_episode_has_ended(tmp_path, stop_at):
    """A signal ends it at step 40 and saves what was learned and the return, for a resume."""
    left = train_compiled(dqn_jax, CLOCK_ARGS, CLOCK_RUN, tmp_path, stop_at(40))
    saved = disk.open_file(checkpoints.newest(left.folder)).about
    points = read_events(left.folder)[0]["charts/SPS"]
    run = replace(CLOCK_RUN, resume=str(left.folder))
    resumed = train_compiled(dqn_jax, CLOCK_ARGS, run, tmp_path)

    steps = range(4, 41, 4)
    assert shown_returns(left.printed) == {x: "nan" if x < 10 else "4.50" for x in steps}
    assert left.returns.tolist() == [4.5, 4.5]
    assert [step for step, _ in points] == list(steps)
    assert (saved["step"], saved["returns"]) == (40, [4.5, 4.5])
    assert shown_returns(resumed.printed) == {44: "4.50", 48: "4.50"}
    assert resumed.returns.tolist() == [4.5, 4.5]


@pytest.mark.slow
def test_dqn_learns_the_q_values_of_a_chain():
    """The time limit of 9 steps, which many episodes reach, changes no value."""
    gamma = 0.8
    args = dqn_jax.Args(
        adam_epsilon=1e-2,  # with less, Adam makes large steps of the rounding of small gradients
        total_timesteps=16_000,
        num_envs=4,
        gamma=gamma,
        learning_starts=200,
        buffer_size=1_000,
        batch_size=64,
        train_frequency=4,
        target_network_frequency=40,
        learning_rate=1e-3,
        end_e=1.0,
    )
    run = dqn_jax.Run(env_id="environments:Chain-v0", eval_episodes=3)
    state, _, folder = dqn_jax.train(args, run)
    agent = dqn_jax.Agent(args, Chain.observation_space, Chain.action_space)
    q_values = agent.network.apply(params_of(state, 0), np.eye(5, dtype=np.float32)[:4])
    states = np.arange(4)
    left = gamma ** (4.0 - np.maximum(states - 1, 0))

    expected = np.stack([left, gamma ** (3.0 - states)], axis=1)
    np.testing.assert_allclose(q_values, expected, atol=0.03)
    scalars, _ = read_events(folder)
    assert scalars["eval/episodic_return"] == [(16_000, 1.0)]
    for tag in ("charts/episodic_return", "charts/SPS", "charts/epsilon", "losses/td_loss"):
        assert [step for step, _ in scalars[tag]] == list(range(1_000, 16_001, 1_000)), tag
