"""Environments in processes of their own, `--async-envs`."""

import os
import signal
import subprocess
import sys

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from conftest import slow
from events import ROOT, read_events

import dqn_jax
import ppo_jax

SMALL_DQN = dict(total_timesteps=200, num_envs=2, learning_starts=50, batch_size=8, n_step=2)
SMALL_PPO = dict(total_timesteps=64, num_envs=2, num_steps=8, num_minibatches=1)


@pytest.mark.parametrize(
    ("module", "flags"), [(dqn_jax, SMALL_DQN), slow(ppo_jax, SMALL_PPO)], ids=["dqn", "ppo"]
)
def test_training_is_that_of_environments_in_one_process(module, flags, tmp_path, monkeypatch):
    """Bit for bit: with the same seeds they do the same, and each observation is a copy."""
    monkeypatch.chdir(tmp_path)
    run = dict(env_id="environments:Counter-v0", log_interval=40, eval_episodes=2)
    args = module.Args(**flags)
    one, returns, folder = module.train(args, module.Run(**run))
    many, many_returns, many_folder = module.train(args, module.Run(**run, async_envs=True))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(returns, many_returns)
    scalars, many_scalars = read_events(folder)[0], read_events(many_folder)[0]
    assert scalars["eval/episodic_return"] == many_scalars["eval/episodic_return"]


def test_each_environment_has_a_process():
    """Also where there is a vector version, which is faster in one process."""
    args = dqn_jax.Args()
    run = dqn_jax.Run(env_id="CartPole-v1", async_envs=True)
    envs = dqn_jax.make_envs(args, run, 4)
    try:
        assert isinstance(envs, gym.vector.AsyncVectorEnv)
        workers = {process.pid for process in envs.processes}
        assert len(workers | {os.getpid()}) == 5
    finally:
        envs.close()


def start(folder, flags):
    small = "--num-envs 2 --learning-starts 50 --batch-size 8 --log-interval 20 --eval-episodes 0"
    return subprocess.Popen(
        [sys.executable, str(ROOT / "dqn_jax.py"), "--async-envs", *f"{small} {flags}".split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # as a terminal does
        text=True,
    )


def test_ctrl_c_in_a_terminal_keeps_a_checkpoint(tmp_path):
    """It goes to all processes, also to those of the environments."""
    process = start(tmp_path, "--env-id environments:Counter-v0 --total-timesteps 200000")
    assert "steps" in process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert int(checkpoint.name) == read_events(folder)[0]["charts/SPS"][-1][0]


def test_an_environment_that_fails_is_named_and_keeps_a_checkpoint(tmp_path):
    process = start(tmp_path, "--env-id environments:Failing-v0 --total-timesteps 2000")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    *_, error, last = err.strip().splitlines()
    assert "broken" in error
    assert last.startswith("in environments:Failing-v0 at step ")
    (folder,) = (tmp_path / "runs").iterdir()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [last.split()[-1]]
