"""--save-experience keeps everything that was added to the replay, also what it overwrote."""

import json
import shutil
from types import SimpleNamespace

import environments  # noqa: F401  registers the environments
import jax
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, saved_run

import dqn_jax
from cleanreplay import UsageError
from cleanreplay.run_folder import check_experience
from cleanreplay.vault import Vault

# 200 rows, of which the ring holds 90. A vault compares fewer rows than a log interval has.
EXPERIENCE = COUNTER | SMALL_DQN | dict(buffer_size=90, log_interval=50, checkpoint_interval=100)
EXPERIENCE |= dict(save_experience=True)


def vault_of(run):
    item = run.agent().example_step
    return Vault(run.folder / "experience", item, run.args.num_envs, create=False)


def assert_same_rows(steps, held):
    for name in steps._fields:
        rows = np.asarray(getattr(held, name))
        np.testing.assert_array_equal(getattr(steps, name), rows, err_msg=name)


def test_all_steps_are_kept_beyond_the_ring():
    """Counter-v0 observes its episode and the step in it; the reward of a step is its number."""
    run = saved_run(dqn_jax, **EXPERIENCE)
    vault = vault_of(run)
    assert len(vault) == 200
    in_the_ring = np.arange(110, 200) % 90
    held = jax.tree.map(lambda x: x[in_the_ring], run.state.replay.storage)
    assert_same_rows(vault.read(110, 200), held)

    steps = vault.read(0, 200)
    episode, step, _ = steps.observation[:, 0].T
    begins = np.flatnonzero(~steps.valid[:, 0]) + 1
    np.testing.assert_array_equal(episode[begins[:-1]], np.arange(1, len(begins)))
    np.testing.assert_array_equal(step[begins[:-1]], 0)
    np.testing.assert_array_equal(steps.reward[steps.valid], step[steps.valid[:, 0]] + 1)


def test_a_resumed_run_drops_what_follows_its_checkpoint():
    run = saved_run(dqn_jax, **EXPERIENCE).copied()
    shutil.rmtree(run.folder / "checkpoints" / "200")  # as if it had been killed before
    wanted = jax.tree.map(np.copy, vault_of(run).read(0, 100))
    run.train(total_timesteps=300)
    rows = vault_of(run).read(0, 300)

    # The last row before the cut is an autoreset step; the one before it cuts off its episode.
    assert wanted.valid[98:].all()
    wanted.truncated[98] = True
    wanted.valid[99] = False
    assert_same_rows(jax.tree.map(lambda x: x[:100], rows), wanted)
    # Each step that does not end its episode is followed by the next one.
    episode, step, _ = rows.observation[:, 0].T
    ends = rows.terminated[:-1, 0] | rows.truncated[:-1, 0]
    goes_on = rows.valid[:-1, 0] & ~ends
    np.testing.assert_array_equal(episode[1:][goes_on], episode[:-1][goes_on])
    np.testing.assert_array_equal(step[1:][goes_on], step[:-1][goes_on] + 1)
    assert not rows.valid[1:, 0][ends].any()


def test_all_steps_of_a_compiled_agent_are_kept():
    flags = dict(env_id="environments:Chain-v0", num_envs=2, buffer_size=160, log_interval=100)
    run = saved_run(dqn_jax, **EXPERIENCE | flags)
    vault = vault_of(run)

    assert len(vault) == 100
    of_the_first_agent = jax.tree.map(lambda x: x[0], run.state.replay.storage)
    in_the_ring = np.arange(20, 100) % 80
    held = jax.tree.map(lambda x: x[in_the_ring], of_the_first_agent)
    assert_same_rows(vault.read(20, 100), held)
    about = {"env_id": "environments:Chain-v0", "env_kwargs": {}, "seed": 1}
    known = json.loads((run.folder / "args.json").read_text())["spaces"]
    assert vault.about == about | {"script": "dqn_jax", "spaces": known}


def test_a_replay_must_hold_what_is_between_two_writes():
    """With iterations of 70 steps, entries are at 140, 210, 350, ...: up to 140 steps apart."""
    args = SimpleNamespace(save_experience=True, buffer_size=170)
    agent = SimpleNamespace(args=args, steps_per_iteration=70)
    check_experience(agent, dqn_jax.Run(log_interval=100))
    with pytest.raises(UsageError, match="buffer_size must be >= 171 "):
        check_experience(agent, dqn_jax.Run(log_interval=101))
    args.save_experience = False
    check_experience(agent, dqn_jax.Run(log_interval=101))
