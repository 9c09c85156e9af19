"""--save-experience keeps all that the replay was given, beyond its ring."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, make_agent, more

import dqn_jax
import per_dqn_jax
from cleanreplay import checkpoints
from cleanreplay.run_folder import RunFolder
from cleanreplay.vault import Vault

FLAGS = dict(num_envs=2, learning_starts=50, batch_size=8, n_step=3, save_experience=True)


def vault_of(module, args, folder):
    """The experience of a run in Counter-v0."""
    space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    agent = module.Agent(args, space, gym.spaces.Discrete(3))
    return Vault(folder / "experience", agent.example_step, args.num_envs, create=False)


def assert_same_rows(steps, held):
    """Two Steps are alike in all that a replay holds."""
    for name in steps._fields:
        rows = np.asarray(getattr(held, name))
        np.testing.assert_array_equal(getattr(steps, name), rows, err_msg=name)


def assert_no_step_of_counter_is_missing(steps):
    """Counter-v0 observes its episode and the step in it; the reward of a step is its number."""
    episode = steps.observation[:, 0, 0]
    step = steps.observation[:, 0, 1]
    begins = np.flatnonzero(~steps.valid[:, 0]) + 1
    np.testing.assert_array_equal(episode[begins[:-1]], np.arange(1, len(begins)))
    np.testing.assert_array_equal(step[begins[:-1]], 0)
    before = steps.observation[..., 1]
    np.testing.assert_array_equal(steps.reward[steps.valid], before[steps.valid] + 1)


@pytest.mark.parametrize("module", [dqn_jax, more(per_dqn_jax)])
def test_all_steps_are_kept_beyond_the_ring(module):
    args = module.Args(total_timesteps=400, buffer_size=100, **FLAGS)
    state, _, folder = module.train(args, module.Run(**COUNTER))
    vault = vault_of(module, args, folder)
    assert len(vault) == 200
    in_the_ring = np.arange(150, 200) % 50
    held = jax.tree.map(lambda x: x[in_the_ring], state.replay.storage)
    assert_same_rows(vault.read(150, 200), held)
    assert_no_step_of_counter_is_missing(vault.read(0, 200))


@pytest.mark.parametrize("module", [dqn_jax, more(per_dqn_jax)])
def test_the_vault_says_what_its_experience_is_of(module):
    args = module.Args(**FLAGS)
    run = module.Run(env_kwargs='{"sutton_barto_reward": true}', seed=3)
    agent = make_agent(module, args, run)
    folder = Path("run").absolute()
    with RunFolder(agent, run, folder, module.__file__, []) as run_folder:
        run_folder.begin(partial(agent.init, jax.random.PRNGKey(0)), on_resume=None)
    assert Vault(folder / "experience").about == {
        "env_id": "CartPole-v1",
        "env_kwargs": {"sutton_barto_reward": True},
        "seed": 3,
        "script": module.__name__,
    }


@pytest.mark.more
def test_a_resumed_run_keeps_what_it_learns_from(tmp_path):
    flags = FLAGS | dict(buffer_size=400)
    run = COUNTER | dict(checkpoint_interval=100)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**run))
    (folder / "checkpoints" / "200").rename(tmp_path / "lost")  # as if it had been killed at 180
    before = jax.tree.map(np.copy, vault_of(dqn_jax, args, folder).read(0, 50))

    longer = dqn_jax.Args(total_timesteps=300, **flags)
    state, _, _ = dqn_jax.train(longer, dqn_jax.Run(resume=str(folder), **run))
    vault = vault_of(dqn_jax, args, folder)
    assert len(vault) == 150
    held = jax.tree.map(lambda x: x[:150], state.replay.storage)
    assert_same_rows(vault.read(0, 150), held)

    # The last row before the cut only resets, and the one before it cuts its episode off: so no
    # window goes on past the cut, and no other row is lost.
    goes_on = before.valid[48] & ~before.terminated[48]
    before.truncated[48] = goes_on
    before.valid[49] = False
    assert_same_rows(vault.read(0, 50), before)
    first = vault.read(50, 51)
    np.testing.assert_array_equal(first.observation[0, :, :2], 0)  # the first episode's start
    assert first.valid.all()


@pytest.mark.more
def test_it_goes_on_after_a_resume_with_many_steps():
    """At n_step of 16 the vault said that the rows were of another run."""
    flags = FLAGS | dict(num_envs=1, buffer_size=100, n_step=20)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    longer = dqn_jax.Args(total_timesteps=300, **flags)
    dqn_jax.train(longer, dqn_jax.Run(resume=str(folder), **COUNTER))
    vault = vault_of(dqn_jax, longer, folder)
    assert len(vault) == 300
    steps = vault.read(0, 300)
    assert not steps.valid[199]
    assert steps.truncated[198] | steps.terminated[198] | ~steps.valid[198]


@pytest.mark.parametrize("module", [dqn_jax, more(per_dqn_jax)])
def test_all_steps_of_a_compiled_agent_are_kept(module):
    args = module.Args(total_timesteps=400, buffer_size=200, **FLAGS)
    run = module.Run(env_id="phys2d/CartPole-v1", log_interval=100, eval_episodes=0)
    state, _, folder = module.train(args, run)
    space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    agent = module.Agent(args, space, gym.spaces.Discrete(2))
    vault = Vault(folder / "experience", agent.example_step, 2, create=False)
    assert len(vault) == 200
    of_the_first_agent = jax.tree.map(lambda x: x[0], state.replay.storage)
    assert_same_rows(vault.read(100, 200), of_the_first_agent)
    assert vault.about == {
        "env_id": "phys2d/CartPole-v1",
        "env_kwargs": {},
        "seed": 1,
        "script": module.__name__,
    }


def test_to_keep_that_of_many_agents_is_a_mistake():
    run = dqn_jax.Run(env_id="phys2d/CartPole-v1", num_seeds=2, log_interval=100)
    args = dqn_jax.Args(total_timesteps=400, buffer_size=200, **FLAGS)
    with pytest.raises(dqn_jax.UsageError, match="only that of one agent"):
        dqn_jax.train(args, run)
    assert not Path("runs").exists()


def test_a_vault_stores_only_the_newest_frame_of_a_stack():
    args = dqn_jax.Args(total_timesteps=200, buffer_size=400, frame_stack=2, **FLAGS)
    state, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    item = dqn_jax.Step(
        observation=np.zeros(3, np.float32),  # one frame
        action=np.int32(0),
        reward=np.float32(0),
        terminated=np.False_,
        truncated=np.False_,
        valid=np.False_,
    )
    vault = Vault(folder / "experience", item, 2, create=False)
    assert len(vault) == 100
    held = jax.tree.map(lambda x: x[:100], state.replay.storage)
    assert_same_rows(vault.read(0, 100), held)


def test_steps_that_would_be_lost_between_two_writes_are_a_mistake():
    """The replay is written at each point of the charts: it must hold the steps of an interval."""
    args = dqn_jax.Args(total_timesteps=400, buffer_size=100, **FLAGS)
    run = dqn_jax.Run(**COUNTER | dict(log_interval=110))
    with pytest.raises(dqn_jax.UsageError, match="buffer_size must be >= 120"):
        dqn_jax.train(args, run)
    assert not Path("runs").exists()


def test_iterations_that_do_not_divide_the_log_interval_lose_no_steps():
    """Points are at multiples of 70 steps: 140, 210, 350, ... are as far as 140 apart."""
    args = dqn_jax.Args(total_timesteps=700, **FLAGS | dict(num_envs=7, buffer_size=100))
    run = dqn_jax.Run(**COUNTER | dict(log_interval=100))
    with pytest.raises(dqn_jax.UsageError, match="buffer_size must be >= 170"):
        dqn_jax.train(args, run)
    _, _, folder = dqn_jax.train(replace(args, buffer_size=170), run)
    assert len(vault_of(dqn_jax, args, folder)) == 100


@pytest.mark.parametrize("log_interval", [more(20), more(90), 99])
def test_experience_has_no_seam_where_a_run_was_resumed(log_interval, monkeypatch):
    args = dqn_jax.Args(**SMALL_DQN | {"total_timesteps": 400}, save_experience=True)
    args = replace(args, train_frequency=1)
    run = dqn_jax.Run(**COUNTER | {"log_interval": log_interval})
    stop = []
    collect = dqn_jax.collect_rollout

    def collect_until_the_cut(*given, **named):
        rollout, *others = collect(*given, **named)
        if rollout.observation[0, 0, 0] == 44 and rollout.observation[0, 0, 1] == 1:
            stop.append(2)
        return rollout, *others

    monkeypatch.setattr(dqn_jax, "collect_rollout", collect_until_the_cut)
    _, _, folder = dqn_jax.train(args, run, stop)
    monkeypatch.setattr(dqn_jax, "collect_rollout", collect)
    (cut,) = checkpoints.steps_in(folder)
    assert 100 < cut < 300
    agent = make_agent(dqn_jax, args, run)
    dqn_jax.train(args, replace(run, resume=str(folder)))
    rows = Vault(folder / "experience", agent.example_step, 1, create=False).read(0, 400)
    episode, step, _ = rows.observation[:, 0].T
    goes_on = rows.valid[:-1, 0] & ~rows.terminated[:-1, 0] & ~rows.truncated[:-1, 0]
    ends = rows.terminated[:-1, 0] | rows.truncated[:-1, 0]
    assert not goes_on[cut - 1]
    np.testing.assert_array_equal(episode[1:][goes_on], episode[:-1][goes_on])
    np.testing.assert_array_equal(step[1:][goes_on], step[:-1][goes_on] + 1)
    assert not rows.valid[1:, 0][ends].any()
