"""cleanreplay/agent_file.py: an agent in one file, that is whole and says all that it needs."""

import json
import shutil
from pathlib import Path

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO, edited, fast_at_ends, make_agent
from safetensors.numpy import load_file, save_file

import dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import UsageError, agent_file, load_policy, trees
from cleanreplay.agent_file import BestAgent

OBSERVATIONS = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
BOX = gym.spaces.Box(-1, 1, (3,))


@pytest.fixture
def trained():
    """The folder of a run, with its best agent."""
    run = dqn_jax.Run(**COUNTER | dict(eval_episodes=1))
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    return folder


def new_agent(script, flags, env_id):
    """An agent, the parameters of its policy, and what args.json would say."""
    args, run = script.Args(**flags), script.Run(env_id=env_id)
    agent = make_agent(script, args, run)
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    return agent, params, {"script": script.__file__, "run": vars(run), "args": vars(args)}


@pytest.mark.parametrize(
    ("script", "flags", "actions", "some"),
    [
        (dqn_jax, {}, gym.spaces.Discrete(2), ["params/params/Dense_2/kernel"]),
        (
            ppo_jax,
            {"normalize_observations": "yes"},
            gym.spaces.Discrete(2),
            ["params/params/Dense_0/bias", "obs_rms/mean", "obs_rms/var"],
        ),
        (sac_jax, {}, BOX, ["policy/actor/params/Dense_1/kernel"]),
    ],
)
def test_arrays_have_their_names_in_the_state(script, flags, actions, some):
    agent = script.Agent(script.Args(**flags), BOX, actions)
    state = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
    names = agent_file.policy_names(agent)
    shapes = trees.by_name(state, "/")
    for name, x in zip(names, jax.tree.leaves(agent.policy_params(state)), strict=True):
        assert shapes[name] is x
    assert set(some) <= set(names)


def test_only_target_networks_are_copies_when_training_begins():
    for script, target in ((dqn_jax, "target_params"), (sac_jax, "target_critics"), (ppo_jax, "")):
        agent = script.Agent(
            script.Args(), BOX, BOX if script is sac_jax else gym.spaces.Discrete(2)
        )
        names = trees.names(jax.eval_shape(agent.init, jax.random.PRNGKey(0)), "/")
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
    about = agent_file.read_about(alone)
    assert about["args"]["total_timesteps"] == 200
    assert about["step"] == 200


def test_a_script_that_was_moved_is_found_in_the_working_directory(trained, tmp_path):
    file = trained / "best.safetensors"
    wanted = load_policy(file)(OBSERVATIONS)
    about, arrays = agent_file.read(file)
    agent_file.write(file, arrays, about | {"script": "/gone/moved_dqn.py"})
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
    with pytest.raises(UsageError, match=r"is damaged, .*Dense_2/kernel has another checksum"):
        load_policy(file)


def test_a_file_of_another_project_is_no_agent(tmp_path):
    save_file({"weight": np.zeros(3)}, "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"^model.safetensors is no agent"):
        load_policy("model.safetensors")


def test_a_format_of_the_future_asks_for_an_update(trained, monkeypatch):
    file = trained / "best.safetensors"
    monkeypatch.setattr(agent_file, "FORMAT", 2)
    agent_file.write(file, *reversed(agent_file.read(file)))
    monkeypatch.undo()
    with pytest.raises(
        UsageError, match="has format 2, and here formats up to 1 are known: update"
    ):
        load_policy(file)


def test_an_agent_of_another_network_is_named_with_its_shapes(trained):
    about, arrays = agent_file.read(trained / "best.safetensors")
    about["args"]["hidden_sizes"] = [7, 5]
    agent_file.write(trained / "best.safetensors", arrays, about)
    with pytest.raises(UsageError, match=r"Dense_0/bias is \(120,\) there, \(7,\) here"):
        load_policy(trained / "best.safetensors")


def test_a_damaged_file_ends_a_resume_before_it_trains(trained):
    (trained / "best.safetensors").write_bytes(b"")
    run = dqn_jax.Run(**COUNTER | dict(resume=str(trained), eval_episodes=1))
    with pytest.raises(UsageError, match=r"best.safetensors is damaged"):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300)), run)
    assert [path.name for path in (trained / "checkpoints").iterdir()] == ["200"]


def test_numbers_of_any_dtype_come_back_as_they_were(tmp_path):
    arrays = {
        "half": np.asarray(jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)),
        "turned": np.arange(6.0).reshape(2, 3).T,  # not in the order of C
        "one": np.float32(3),
        "none": np.zeros((0, 2), np.uint8),
        "flags": np.array([True, False]),
    }
    agent_file.write(tmp_path / "x.safetensors", arrays, {})
    _, found = agent_file.read(tmp_path / "x.safetensors")
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
        np.testing.assert_array_equal(found[name], x)


def test_parameters_that_are_computed_are_saved_and_loaded_but_no_run_begins_with_them():
    """As if the policy acted with the mean of two networks."""
    script = edited(
        dqn_jax, ("return state.params\n", "return jax.tree.map(lambda x: 2 * x, state.params)\n")
    )
    agent, params, about = new_agent(script, SMALL_DQN, COUNTER["env_id"])
    BestAgent(Path(), agent, about).save_if_better(100, params, 1.0)
    file = Path(agent_file.NAME)
    assert "params/Dense_0/bias" in load_file(file)
    wanted = agent.policy(params)(OBSERVATIONS)
    np.testing.assert_array_equal(load_policy(file)(OBSERVATIONS), wanted)
    with pytest.raises(UsageError, match="computes params/Dense_0/bias, which is not in the State"):
        agent_file.read_into_state(file, agent)


def save_as_before(folder, params, score):
    """Saves a best agent as Orbax's folder, as versions up to 0.2 did."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["return"], enable_async_checkpointing=False
    )
    manager = ocp.CheckpointManager(folder.absolute() / "best", options=options)
    items = ocp.args.Composite(params=ocp.args.StandardSave(params))
    metrics = {"return": score, "checksums": trees.checksums(params)}
    manager.save(100, args=items, metrics=metrics)


@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_the_best_agent_of_an_old_run_is_loaded(script):
    flags = SMALL_DQN if script is dqn_jax else SMALL_PPO
    agent, params, about = new_agent(script, flags, COUNTER["env_id"])
    folder = Path("run")
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps(about))
    save_as_before(folder, params, 5.0)
    wanted = agent.policy(params)(OBSERVATIONS)
    np.testing.assert_array_equal(load_policy(folder)(OBSERVATIONS), wanted)


def test_a_resumed_old_run_writes_the_file_when_an_agent_is_better():
    args = dqn_jax.Args(**SMALL_DQN)
    state, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    for score, is_better in ((1e9, False), (-1e9, True)):
        save_as_before(folder, state.params, score)
        longer = dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300 if is_better else 250))
        run = dqn_jax.Run(**COUNTER | dict(eval_episodes=1, resume=str(folder)))
        dqn_jax.train(longer, run)
        assert (folder / "best.safetensors").exists() == is_better
        shutil.rmtree(folder / "best")
