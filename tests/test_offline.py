"""--save-experience keeps what the replay was given, --offline learns from that alone."""

import re

import jax
import numpy as np
import pytest
from conftest import slow
from test_dqn import PROBE, TWO

import dqn_jax
import per_dqn_jax

SCRIPTS = [dqn_jax, per_dqn_jax]
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)


def vault_of(module, args, folder):
    """The experience of a run in Counter-v0."""
    alg = module.Algorithm(args, np.zeros(3, np.float32), dqn_jax.gym.spaces.Discrete(3))
    return alg.open_vault(folder / "experience")


@pytest.mark.parametrize("module", SCRIPTS)
def test_all_steps_are_kept_beyond_the_ring(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=100, n_step=3)
    args = module.Args(total_timesteps=400, save_experience=True, **flags)
    training, _, folder = module.train(args, module.Run(**COUNTER))
    vault = vault_of(module, args, folder)
    assert len(vault) == 200
    steps, replay = vault.read(0, 200), training.agent.replay
    newest = np.arange(150, 200) % 50
    for name in steps._fields[:-1]:
        held = np.asarray(getattr(replay.storage, name))[newest]
        np.testing.assert_array_equal(getattr(steps, name)[150:], held)
    # In Counter-v0 the first two numbers tell the episode and the step in it.
    episode, step = steps.observation[:, 0, 0], steps.observation[:, 0, 1]
    begins = np.flatnonzero(~steps.is_step[:, 0]) + 1
    np.testing.assert_array_equal(episode[begins[:-1]], np.arange(1, len(begins)))
    np.testing.assert_array_equal(
        steps.reward[steps.is_step], steps.observation[..., 1][steps.is_step] + 1
    )
    assert (step[begins[:-1]] == 0).all()


def test_a_resumed_run_keeps_what_it_learns_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=400, n_step=3)
    flags |= dict(save_experience=True)
    run = COUNTER | dict(checkpoint_interval=100)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**run))
    (folder / "checkpoints" / "200").rename(tmp_path / "lost")  # as if it had been killed at 180
    before = jax.tree.map(np.copy, vault_of(dqn_jax, args, folder).read(0, 50))
    longer = dqn_jax.Args(total_timesteps=300, **flags)
    training, _, _ = dqn_jax.train(longer, dqn_jax.Run(**run | dict(resume=str(folder))))
    vault = vault_of(dqn_jax, args, folder)
    steps = vault.read(0, len(vault))
    assert len(vault) == 150
    for name in steps._fields[:-1]:
        held = np.asarray(getattr(training.agent.replay.storage, name))[:150]
        np.testing.assert_array_equal(getattr(steps, name), held)
    # The last row before the cut only resets, and the one before it cuts its episode off: so no
    # window goes on past the cut, and no other row is lost.
    goes_on = before.is_step[48] & ~before.terminated[48]
    before.truncated[48] = goes_on
    before.is_step[49] = False
    for name in steps._fields[:-1]:
        np.testing.assert_array_equal(getattr(steps, name)[:50], getattr(before, name))
    np.testing.assert_array_equal(steps.observation[50, :, :2], 0)  # the first episode's start
    assert steps.is_step[50].all()


def test_of_a_compiled_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = dict(env_id="phys2d/CartPole-v1", log_interval=100, eval_episodes=0)
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=200)
    args = dqn_jax.Args(total_timesteps=400, save_experience=True, **flags)
    training, _, folder = dqn_jax.train(args, dqn_jax.Run(**run))
    alg = dqn_jax.Algorithm(args, np.zeros(4, np.float32), TWO)
    vault, storage = alg.open_vault(folder / "experience"), training.agent.replay.storage
    assert len(vault) == 200
    np.testing.assert_array_equal(vault.read(100, 200).observation, storage.observation[0])
    with pytest.raises(dqn_jax.UsageError, match="only that of one agent"):
        dqn_jax.train(args, dqn_jax.Run(num_seeds=2, **run))


@pytest.mark.parametrize("module", [dqn_jax, slow(per_dqn_jax)])
def test_offline_learns_the_values_of_what_is_there(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env_id, observations = "Probe-discount-v0", np.array([[0.0], [1.0]], np.float32)
    kept = module.Args(**vars(PROBE) | dict(save_experience=True, learning_starts=100, start_e=1.0))
    kept = module.Args(**vars(kept) | dict(total_timesteps=400, learning_rate=0.0))
    training, _, folder = module.train(kept, module.Run(env_id=env_id, eval_episodes=0))
    args = module.Args(**vars(PROBE) | dict(offline=str(folder / "experience")))
    run = module.Run(env_id=env_id, eval_episodes=2, exp_name="offline")
    training, returns, _ = module.train(args, run)
    alg = module.Algorithm(args, observations[0], TWO)
    q = np.asarray(jax.jit(alg.q_values)(training.agent.params, observations))
    np.testing.assert_allclose(q, [[0.5, 0.5], [1.0, 1.0]], atol=0.02)
    rows = len(alg.open_vault(args.offline))
    assert training.agent.replay.size == rows
    assert returns == [1.0]  # no episode ended: that of the evaluation


def test_what_is_not_there_is_an_error(tmp_path):
    missing = dqn_jax.Args(offline=str(tmp_path / "none"))
    with pytest.raises(FileNotFoundError, match="none"):  # which is told in one line
        dqn_jax.Algorithm(missing, np.zeros(4, np.float32), TWO)
    assert not (tmp_path / "none").exists()
    other = dqn_jax.Args(num_envs=3)
    alg = dqn_jax.Algorithm(other, np.zeros(4, np.float32), TWO)
    alg.open_vault(tmp_path)
    args = dqn_jax.Args(num_envs=2, offline=str(tmp_path))
    with pytest.raises(ValueError, match=re.escape("holds {'observation': 'float32[3, 4]'")):
        dqn_jax.Algorithm(args, np.zeros(4, np.float32), TWO)
