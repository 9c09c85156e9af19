"""cleanreplay/agent_file.py: an agent in one file, and runs that begin with one."""

import shutil
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import (
    CHAINED,
    COUNTED,
    DAMAGE,
    assert_trees_equal,
    edited,
    flip_a_bit,
    make_trainer,
    save_agent,
    saved_run,
)
from safetensors.numpy import load_file, save_file

import dqn_jax
import per_dqn_jax
import ppo_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import UsageError, agent_file, checkpoints, disk, load_policy, protocol, watch

OBSERVATIONS = 100 * np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
BOX = gym.spaces.Box(-1, 1, (3,))
DISCRETE = gym.spaces.Discrete(2)
BEST = "best.safetensors"
# What a State has beside what was learned.
NOT_LEARNED = dict.fromkeys((dqn_jax, sac_jax), "replay")
NOT_LEARNED |= dict.fromkeys((ppo_jax, recurrent_ppo_jax), "discounted_return")


def rewrite(file, **changed):
    """Writes the file of an agent again, and tells something else about it."""
    stored = disk.open_file(Path(file))
    arrays = stored.read(stored.shapes)
    disk.write(stored.file, arrays.items(), stored.about | changed)


def begin(saved, place=None, **flags):
    """The agent of a run with other flags, a new State, and that which begins with `place`."""
    agent = saved.agent(**flags)
    fresh = jax.jit(agent.init)(jax.random.PRNGKey(99))
    return agent, fresh, agent_file.start_from(str(place or saved.folder), fresh, agent)


@pytest.mark.parametrize(
    ("script", "flags", "actions", "some"),
    [
        (dqn_jax, {}, DISCRETE, {"params/params/q/kernel"}),
        (ppo_jax, {}, BOX, {"params/params/actor_0/bias", "obs_rms/mean", "obs_rms/var"}),
        (sac_jax, {}, BOX, {"policy/actor/params/actor_1/kernel"}),
    ],
)
def test_the_policy_needs_what_policy_params_returns(script, flags, actions, some):
    agent = script.Agent(script.Args(**flags), BOX, actions)
    state = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
    leaves = disk.by_name(state)
    needed = {id(x) for x in jax.tree.leaves(agent.policy_params(state))}
    found = agent_file.policy_leaves(agent)

    assert found == {name: x.shape for name, x in leaves.items() if id(x) in needed}
    assert some <= set(found)


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
    with pytest.raises(UsageError, match=r"no script .*moved_dqn.py: say where"):
        load_policy(BEST)
    shutil.copy(dqn_jax.__file__, "moved_dqn.py")

    np.testing.assert_array_equal(load_policy(BEST)(OBSERVATIONS), wanted)


def test_parameters_that_are_computed_are_computed_again():
    """As if the policy acted with parameters twice as large. A run begins with what was learned."""
    twice = "return jax.tree.map(lambda x: 2 * x, state.params)\n"
    script = edited(dqn_jax, ("return state.params\n", twice))
    agent, params = save_agent(script)
    begun = jax.jit(agent.init)(jax.random.PRNGKey(1))
    begun = agent_file.start_from(BEST, begun, agent)

    kernel = load_file(BEST)["params/params/q_0/kernel"]
    np.testing.assert_array_equal(2 * kernel, params["params"]["q_0"]["kernel"])
    wanted = protocol.policy(agent, params)(OBSERVATIONS)
    np.testing.assert_array_equal(load_policy(BEST)(OBSERVATIONS), wanted)
    assert_trees_equal(agent.policy_params(begun), jax.tree.map(np.asarray, params))


# What reads the file of the best agent, or of the newest checkpoint, of a run.
READERS = {
    "load_policy": (lambda saved: load_policy(saved.folder), BEST),
    "load_policy of a checkpoint": (lambda saved: load_policy(saved.folder), None),
    "watch": (lambda saved: watch.watch(watch.Flags(str(saved.folder))), BEST),
    "init_from": (lambda saved: begin(saved), None),
    "init_from of a file": (lambda saved: begin(saved, saved.folder / BEST), BEST),
}
DAMAGES = DAMAGE | {
    "a bit": (lambda file: flip_a_bit(file, "params/params/q/bias"), "q/bias has another checksum"),
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


def test_a_damaged_agent_ends_a_resume_before_it_trains():
    saved = saved_run(dqn_jax, **COUNTED).copied()
    (saved.folder / BEST).write_bytes(b"")
    with pytest.raises(UsageError, match=r"best.safetensors is damaged"):
        saved.train(total_timesteps=300)

    assert {path.name for path in (saved.folder / "checkpoints").iterdir()} == {"100", "200"}


def test_a_file_that_cannot_be_read_now_is_not_damaged(monkeypatch):
    def fail(file):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(disk, "open_file", fail)
    with pytest.raises(UsageError, match=r"^x cannot be read now: PermissionError"):
        agent_file.open_agent("x")


def test_another_network_is_named_with_its_shapes():
    agent, _ = save_agent(dqn_jax)
    rewrite(BEST, args=vars(agent.args) | {"hidden_sizes": [9]})

    with pytest.raises(UsageError, match=r"q/kernel is \(84, 3\) there, \(9, 3\) here"):
        load_policy(BEST)


@pytest.mark.parametrize("script", NOT_LEARNED)
def test_a_run_begins_with_all_that_was_learned_and_no_more(script):
    saved = saved_run(script)
    _, fresh, state = begin(saved)

    for name in state._fields:
        wanted = fresh if name == NOT_LEARNED[script] else saved.state
        assert_trees_equal(getattr(state, name), getattr(wanted, name))


def test_a_resumed_run_goes_on_from_its_own_checkpoint(capsys):
    """Not from what it began with once more."""
    saved = saved_run(dqn_jax, **COUNTED)
    args = replace(saved.args, init_from=str(saved.folder), learning_rate=0.0)
    begun = saved._replace(args=args).train()
    resumed = begun.train(resume=str(begun.folder))

    assert capsys.readouterr().out.count("starts from") == 1
    assert_trees_equal(begun.state.params, saved.state.params)
    assert_trees_equal(resumed.state.opt_state, begun.state.opt_state)


def test_other_numbers_of_environments_are_no_obstacle():
    saved = saved_run(ppo_jax)
    _, _, state = begin(saved, num_envs=3)

    assert_trees_equal(state.params, saved.state.params)
    assert state.discounted_return.shape == (3,)


def test_agents_begin_with_several_in_turn():
    saved = saved_run(per_dqn_jax, **CHAINED)
    trainer = make_trainer(per_dqn_jax, saved.args, replace(saved.run, num_seeds=3))
    runner = agent_file.start_from(str(saved.folder), trainer.init(), trainer.agent)
    _, _, alone = begin(saved)

    wanted = jax.tree.map(lambda x: x[np.array([0, 1, 0])], saved.state.params)
    assert_trees_equal(runner.agent.params, wanted)
    assert np.all(runner.agent.replay.size == 0)
    assert_trees_equal(alone.params, jax.tree.map(lambda x: x[0], saved.state.params))


def test_several_agents_begin_with_the_file_of_one():
    agent, params = save_agent(dqn_jax, "environments:Chain-v0")
    run = dqn_jax.Run(env_id="environments:Chain-v0", num_seeds=2)
    trainer = make_trainer(dqn_jax, agent.args, run)
    runner = agent_file.start_from(BEST, trainer.init(), trainer.agent)

    assert_trees_equal(runner.agent.params, jax.tree.map(lambda x: np.stack([x, x]), params))


@pytest.mark.parametrize(
    ("script", "fresh_field"),
    [(dqn_jax, "opt_state"), (ppo_jax, "opt_state"), (sac_jax, "critics")],
)
def test_a_file_gives_what_the_policy_needs(script, fresh_field):
    """A target network is a copy again; the state of the optimiser begins anew."""
    env_id = saved_run(script).run.env_id
    _, params = save_agent(script, env_id)
    agent, fresh, state = begin(saved_run(script), BEST)

    assert_trees_equal(agent.policy_params(state), jax.tree.map(jax.numpy.asarray, params))
    assert_trees_equal(getattr(state, fresh_field), getattr(fresh, fresh_field))
    if script is dqn_jax:
        assert_trees_equal(state.target_params, state.params)


def test_a_run_passes_over_a_damaged_checkpoint(capsys):
    """And begins with the one before it, or with the best agent where no other is left."""
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


def test_agents_that_diverged_are_left_out(capsys):
    saved = saved_run(per_dqn_jax, **CHAINED).copied()
    file = checkpoints.newest(saved.folder)
    rewrite(file, lost=[0])
    _, _, state = begin(saved)

    assert_trees_equal(state.params, jax.tree.map(lambda x: x[1], saved.state.params))
    assert "agents [0] diverged" in capsys.readouterr().out


@pytest.mark.parametrize("of_file", [False, True])
def test_statistics_are_not_dropped_silently(of_file):
    save_agent(ppo_jax, "environments:OnceBox-v0")
    saved = saved_run(ppo_jax)
    place = BEST if of_file else saved.folder
    with pytest.raises(UsageError, match=r"obs_rms/mean is \(.*\) there, missing here"):
        begin(saved, place, normalize_observations=False)


def begin_with_other_statistics(saved):
    save_agent(ppo_jax, "environments:OnceBox-v0", normalize_observations=False)
    begin(saved_run(ppo_jax), BEST)


# What a user does with a run, and words of the error.
MISTAKES = [
    (lambda saved: begin(saved, hidden_sizes=(9,)), r"q/kernel is \(5, 3\) there, \(9, 3\) here"),
    (lambda saved: begin(saved, saved.folder / BEST, hidden_sizes=(9,)), r"script: params/"),
    (lambda saved: begin(saved, "nowhere"), "nowhere/checkpoints has no checkpoint"),
    (begin_with_other_statistics, "obs_rms/.* is missing there"),
]


@pytest.mark.parametrize(("start", "words"), MISTAKES)
def test_a_mistake_in_init_from_is_one_line(start, words):
    with pytest.raises(UsageError, match=f"^init_from: .*{words}") as caught:
        start(saved_run(dqn_jax, **COUNTED))

    assert "\n" not in str(caught.value)


def test_sac_acts_with_its_policy_from_the_first_step():
    saved = saved_run(sac_jax)
    actor = jax.tree.map(np.array, saved.state.policy.actor)
    actor["params"]["mean"]["bias"] = np.float32([3.0])  # its actions are near 1
    inputs = (actor, np.zeros((1_000, 2), np.float32), jax.random.PRNGKey(1), 0)

    assert abs(np.mean(saved.agent().act(*inputs))) < 0.1
    assert np.mean(saved.agent(init_from="runs/another").act(*inputs)) > 0.9


def test_alpha_is_a_flag_without_autotune():
    saved = saved_run(sac_jax)
    _, _, state = begin(saved, autotune=False, alpha=0.05)

    assert state.policy.log_alpha == pytest.approx(np.log(0.05))
    assert abs(saved.state.policy.log_alpha) < 1
