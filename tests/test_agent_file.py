"""cleanreplay/agent_file.py: an agent in one file, that is whole and says all that it needs."""

from pathlib import Path

import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, edited, fast_at_ends, make_agent
from safetensors.numpy import load_file, save_file

import dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import UsageError, agent_file, disk, load_policy, protocol

OBSERVATIONS = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
BOX = gym.spaces.Box(-1, 1, (3,))


def rewrite(file, **changed):
    """Writes the file of an agent again, and tells something else about it."""
    stored = disk.open_file(file)
    arrays = stored.read(stored.shapes)
    disk.write(file, arrays.items(), stored.about | changed)


@pytest.fixture
def trained():
    """The folder of a run, with its best agent."""
    run = dqn_jax.Run(**COUNTER | dict(eval_episodes=1))
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    return folder


@pytest.mark.parametrize(
    ("script", "flags", "actions", "some"),
    [
        (dqn_jax, {}, gym.spaces.Discrete(2), ["params/params/q/kernel"]),
        (
            ppo_jax,
            {"normalize_observations": True},
            gym.spaces.Discrete(2),
            ["params/params/actor_0/bias", "obs_rms/mean", "obs_rms/var"],
        ),
        (sac_jax, {}, BOX, ["policy/actor/params/actor_1/kernel"]),
    ],
)
def test_the_policy_needs_the_leaves_that_policy_params_returns(script, flags, actions, some):
    agent = script.Agent(script.Args(**flags), BOX, actions)
    state = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
    leaves = disk.by_name(state)
    found = agent_file.policy_leaves(agent)
    needed = {id(x) for x in jax.tree.leaves(agent.policy_params(state))}
    assert set(found) == {name for name, x in leaves.items() if id(x) in needed}
    assert set(some) <= set(found)
    assert all(leaves[name].shape == shape for name, shape in found.items())


def test_only_target_networks_are_copies_when_training_begins():
    for script, target in ((dqn_jax, "target_params"), (sac_jax, "target_critics"), (ppo_jax, "")):
        agent = script.Agent(
            script.Args(), BOX, BOX if script is sac_jax else gym.spaces.Discrete(2)
        )
        names = disk.names(jax.eval_shape(agent.init, jax.random.PRNGKey(0)))
        found = agent_file.copies(agent, names)
        assert sorted(found) == sorted(x for x in names if target and x.startswith(f"{target}/"))
        for name, original in found.items():
            assert name == f"target_{original}"


def test_the_file_alone_is_the_agent(trained, tmp_path):
    wanted = load_policy(trained)(OBSERVATIONS)
    alone = tmp_path / "agent.safetensors"
    (trained / "best.safetensors").rename(alone)
    (trained / "args.json").unlink()
    np.testing.assert_array_equal(load_policy(alone)(OBSERVATIONS), wanted)
    about = agent_file.open_agent(alone).about
    assert about["args"]["total_timesteps"] == 200
    assert about["step"] == 200


def test_a_script_that_was_moved_is_found_in_the_working_directory(trained, tmp_path):
    file = trained / "best.safetensors"
    wanted = load_policy(file)(OBSERVATIONS)
    rewrite(file, script="/gone/moved_dqn.py")
    with pytest.raises(UsageError, match=r"no script moved_dqn.py: say where"):
        load_policy(file)
    (tmp_path / "moved_dqn.py").write_text(Path(dqn_jax.__file__).read_text())
    np.testing.assert_array_equal(load_policy(file)(OBSERVATIONS), wanted)


@fast_at_ends("part", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_that_was_cut_off_is_damaged(part, trained):
    file = trained / "best.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(part * len(whole))])
    with pytest.raises(
        UsageError, match=r"best.safetensors is damaged, .*: copy it again, or delete "
    ):
        load_policy(file)


def test_a_bit_that_flipped_is_found_by_a_checksum(trained):
    file = trained / "best.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 64
    file.write_bytes(data)
    with pytest.raises(UsageError, match=r"is damaged, .*q_1/kernel has another checksum"):
        load_policy(file)


def test_a_file_of_another_project_is_no_agent(tmp_path):
    save_file({"weight": np.zeros(3)}, "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UsageError,
        match=r"^model.safetensors is damaged, or no agent \(.*CleanReplay did not write it",
    ):
        load_policy("model.safetensors")


def test_an_agent_of_another_network_is_named_with_its_shapes(trained):
    file = trained / "best.safetensors"
    rewrite(file, args=agent_file.open_agent(file).about["args"] | {"hidden_sizes": [7, 5]})
    with pytest.raises(UsageError, match=r"q/kernel is \(84, 3\) there, \(5, 3\) here"):
        load_policy(trained / "best.safetensors")


def test_a_damaged_file_ends_a_resume_before_it_trains(trained):
    (trained / "best.safetensors").write_bytes(b"")
    run = dqn_jax.Run(**COUNTER | dict(resume=str(trained), eval_episodes=1))
    with pytest.raises(UsageError, match=r"best.safetensors is damaged"):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300)), run)
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["200"]


def test_parameters_that_are_computed_are_computed_again(tmp_path):
    """As if the policy acted with parameters twice as large. A run begins with what was learned."""
    script = edited(
        dqn_jax, ("return state.params\n", "return jax.tree.map(lambda x: 2 * x, state.params)\n")
    )
    args, run = script.Args(**SMALL_DQN), script.Run(**COUNTER | dict(eval_episodes=1))
    state, _, folder = script.train(args, run)
    file = folder / "best.safetensors"
    bias = "params/params/q_0/bias"
    np.testing.assert_array_equal(load_file(file)[bias], disk.by_name(state)[bias])
    agent = make_agent(script, args, run)
    wanted = protocol.policy(agent, agent.policy_params(state))(OBSERVATIONS)
    np.testing.assert_array_equal(load_policy(file)(OBSERVATIONS), wanted)
    begun = jax.jit(agent.init)(jax.random.PRNGKey(1))
    begun = agent_file.start_from(str(file), begun, agent)
    jax.tree.map(np.testing.assert_array_equal, begun.params, state.params)
