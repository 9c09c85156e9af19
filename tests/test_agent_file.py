"""cleanreplay/agent_file.py: an agent in one file, and runs that begin with such a file."""

import shutil
from functools import cache
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import COUNTED, DAMAGE, assert_trees_equal, flip_a_bit, save_agent, saved_run
from safetensors.numpy import save_file

import dqn_jax
import ppo_jax
from cleanreplay import UsageError, agent_file, disk, load_policy
from cleanreplay.compiled import make_trainer

OBSERVATIONS = 100 * np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
BOX = gym.spaces.Box(-1, 1, (3,))
BEST = "best.safetensors"
CHAIN = "environments:Chain-v0"


def rewrite(file, **changed):
    """Writes the file of an agent again, with changed metadata."""
    stored = disk.open_file(Path(file))
    arrays = stored.read(stored.shapes)
    disk.write(stored.file, arrays.items(), stored.about | changed)


def begin(saved, place=None, **flags):
    """Makes the agent of a run with other flags, a new State, and one that begins with `place`."""
    agent = saved.agent(**flags)
    fresh = jax.jit(agent.init)(jax.random.PRNGKey(99))
    return agent, fresh, agent_file.start_from(str(place or saved.folder), fresh, agent)


def test_the_policy_needs_what_policy_params_returns():
    agent = ppo_jax.Agent(ppo_jax.Args(), BOX, BOX)
    state = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
    leaves = disk.by_name(state)
    needed = {id(x) for x in jax.tree.leaves(agent.policy_params(state))}
    found = agent_file.policy_leaves(agent)

    assert found == {name: x.shape for name, x in leaves.items() if id(x) in needed}
    assert {"params/params/actor_0/bias", "obs_rms/mean", "obs_rms/var"} <= set(found)


def test_the_file_alone_is_the_agent():
    saved = saved_run(dqn_jax, **COUNTED)
    shutil.copy(saved.folder / BEST, "alone.safetensors")
    about = agent_file.open_agent("alone.safetensors").about

    wanted = saved.agent().act(saved.state.params, OBSERVATIONS)
    np.testing.assert_array_equal(load_policy("alone.safetensors")(OBSERVATIONS), wanted)
    assert (about["step"], about["return"], about["args"]["total_timesteps"]) == (200, 3.0, 200)


def test_a_script_that_was_moved_is_in_the_working_directory():
    save_agent(dqn_jax)
    wanted = load_policy(BEST)(OBSERVATIONS)
    rewrite(BEST, script="/gone/moved_dqn.py")
    with pytest.raises(UsageError, match=r"no script .*moved_dqn.py: give its place"):
        load_policy(BEST)
    shutil.copy(dqn_jax.__file__, "moved_dqn.py")

    np.testing.assert_array_equal(load_policy(BEST)(OBSERVATIONS), wanted)


# Functions that read the file of the best agent, or of the newest checkpoint, of a run.
READERS = {
    "load_policy": (lambda saved: load_policy(saved.folder), BEST),
    "load_policy of a checkpoint": (lambda saved: load_policy(saved.folder), None),
    "init_from": (lambda saved: begin(saved), None),
    "a resume": (lambda saved: agent_file.BestAgent(saved.folder, {}), BEST),
}
DAMAGES = {
    "cut off": DAMAGE["cut off"],
    "a word": DAMAGE["a word"],
    "another project": (
        lambda file: save_file({"weight": np.zeros(3)}, file, metadata={"format": "pt"}),
        "CleanReplay did not write it",
    ),
}


@pytest.mark.parametrize(("damage", "word"), DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize(("read", "name"), READERS.values(), ids=READERS)
def test_a_damaged_file_is_one_line(read, name, damage, word):
    saved = saved_run(dqn_jax, **COUNTED).copied()
    if name is None:
        (saved.folder / BEST).unlink()
        shutil.rmtree(saved.folder / "checkpoints/100")
    name = name or "checkpoints/200/state.safetensors"
    damage(saved.folder / name)
    with pytest.raises(UsageError, match=rf"{name} is damaged, or no agent \(.*{word}") as caught:
        read(saved)

    assert "\n" not in str(caught.value)
    assert ("delete it to load the newest" in str(caught.value)) == (name == BEST)


def test_a_leaf_that_is_damaged_is_named():
    save_agent(dqn_jax)
    flip_a_bit(Path(BEST), "params/params/q/bias")
    with pytest.raises(UsageError, match=r"is damaged, .*q/bias has a different checksum"):
        load_policy(BEST)


def test_a_file_that_cannot_be_read_now_is_not_damaged(monkeypatch):
    def fail(file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "open_file", fail)
    with pytest.raises(UsageError, match=r"^x cannot be read now: PermissionError"):
        agent_file.open_agent("x")


@pytest.mark.parametrize(
    ("script", "not_learned"), [(dqn_jax, "replay"), (ppo_jax, "discounted_return")]
)
def test_a_run_begins_with_all_that_was_learned_and_no_more(script, not_learned):
    saved = saved_run(script)
    _, fresh, state = begin(saved)

    for name in state._fields:
        wanted = fresh if name == not_learned else saved.state
        assert_trees_equal(getattr(state, name), getattr(wanted, name))


def test_other_numbers_of_environments_are_no_obstacle():
    saved = saved_run(ppo_jax)
    _, _, state = begin(saved, num_envs=3)

    assert_trees_equal(state.params, saved.state.params)
    assert state.discounted_return.shape == (3,)


@cache
def new_agents(num_seeds):
    """Makes a Trainer of several agents, and their RunnerState before the first step."""
    trainer = make_trainer(dqn_jax, dqn_jax.Args(), dqn_jax.Run(env_id=CHAIN, num_seeds=num_seeds))
    return trainer, trainer.init()


def write_two(lost):
    """Writes a checkpoint of two agents. Returns the parameters of their policies."""
    _, runner = new_agents(2)
    about = dict(is_whole=True, num_agents=2, lost=lost, step=10)
    disk.write(Path("two"), disk.by_name(runner).items(), about)
    return runner.agent.params


def begin_several(source):
    trainer, runner = new_agents(3)
    return agent_file.start_from(source, runner, trainer.agent).agent


def test_agents_begin_with_several_in_turn():
    before = write_two(lost=[])
    _, three = new_agents(3)
    started = begin_several("two")

    wanted = jax.tree.map(lambda x: x[np.array([0, 1, 0])], before)
    assert_trees_equal(started.params, wanted)
    assert_trees_equal(started.replay, three.agent.replay)


def test_several_agents_begin_with_the_file_of_one():
    _, params = save_agent(dqn_jax, CHAIN)

    wanted = jax.tree.map(lambda x: np.stack([x, x, x]), params)
    assert_trees_equal(begin_several(BEST).params, wanted)


@pytest.mark.parametrize(("lost", "first"), [([], 0), ([0], 1)])
def test_an_agent_begins_with_the_first_that_has_not_diverged(lost, first, capsys):
    before = write_two(lost)
    agent, _ = save_agent(dqn_jax, CHAIN)
    state = agent_file.start_from("two", jax.jit(agent.init)(jax.random.PRNGKey(99)), agent)

    printed = capsys.readouterr().out
    assert_trees_equal(state.params, jax.tree.map(lambda x: x[first], before))
    assert "starts from two, as it was after 10 steps" in printed
    assert ("agents [0] diverged" in printed) == (lost == [0])


@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_a_file_gives_what_the_policy_needs(script):
    """The target network is a copy again; the state of the optimiser begins anew."""
    env_id = saved_run(script).run.env_id
    _, params = save_agent(script, env_id)
    agent, fresh, state = begin(saved_run(script), BEST)

    assert_trees_equal(agent.policy_params(state), jax.tree.map(jax.numpy.asarray, params))
    assert_trees_equal(state.opt_state, fresh.opt_state)
    if script is dqn_jax:
        assert_trees_equal(state.target_params, state.params)


def test_a_run_passes_over_a_damaged_checkpoint(capsys):
    """It begins with the checkpoint before it, or with the best agent if none is left."""
    saved = saved_run(dqn_jax, **COUNTED).copied()
    name = "params/params/q/bias"
    older = disk.open_file(saved.folder / "checkpoints/100/state.safetensors").read([name])[name]
    flip_a_bit(saved.folder / "checkpoints/200/state.safetensors", name)
    _, _, state = begin(saved)
    shutil.rmtree(saved.folder / "checkpoints")
    _, _, of_best = begin(saved)

    assert "200/state.safetensors is damaged" in capsys.readouterr().out
    np.testing.assert_array_equal(state.params["params"]["q"]["bias"], older)
    assert_trees_equal(of_best.params, saved.state.params)


def begin_ppo(has_statistics, place=None):
    """Begins an agent with statistics of observations from one without them, or vice versa."""
    save_agent(ppo_jax, "environments:OnceBox-v0", normalize_observations=not has_statistics)
    begin(saved_run(ppo_jax), place, normalize_observations=has_statistics)


# A user's mistake with a run, and words of the error.
MISTAKES = [
    (lambda saved: begin(saved, hidden_sizes=(9,)), r"q/kernel is \(5, 3\) there, \(9, 3\) here"),
    (lambda saved: begin(saved, saved.folder / BEST, hidden_sizes=(9,)), r"script: params/"),
    (lambda saved: begin_ppo(False), r"obs_rms/mean is \(.*\) there, missing here"),
    (lambda saved: begin_ppo(False, BEST), r"obs_rms/mean is \(.*\) there, missing here"),
    (lambda saved: begin_ppo(True, BEST), "obs_rms/.* is missing there"),
]


@pytest.mark.parametrize(("start", "words"), MISTAKES)
def test_a_mistake_in_init_from_is_one_line(start, words):
    with pytest.raises(UsageError, match=f"^init_from: .*{words}") as caught:
        start(saved_run(dqn_jax, **COUNTED))

    assert "\n" not in str(caught.value)
