"""Environments in processes of their own: --vectorization async."""

import os
import signal
from contextlib import closing
from pathlib import Path

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import ROOT, make_agent, read_events, start_python

import dqn_jax


def collect(vectorization):
    """A rollout of the first parameters, and the processes that stepped its environments.

    CartPole has a vector version, which is faster in one process.
    """
    args = dqn_jax.Args(num_envs=2, train_frequency=100)
    run = dqn_jax.Run(env_id="CartPole-v1", vectorization=vectorization)
    agent = make_agent(dqn_jax, args, run)
    key = jax.random.PRNGKey(0)
    params = agent.policy_params(jax.jit(agent.init)(key))
    with closing(dqn_jax.make_envs(args, run, 2, training=True)) as envs:
        env_state = dqn_jax.reset(envs, key, 0)
        rollout, _ = dqn_jax.collect_rollout(agent, envs, params, env_state, key, 0)
        is_async = isinstance(envs.unwrapped, AsyncVectorEnv)
        workers = {x.pid for x in envs.unwrapped.processes} if is_async else set()
    return rollout, workers


@pytest.mark.slow
def test_environments_in_processes_give_the_same_rollouts():
    expected, no_workers = collect("sync")
    rollout, workers = collect("async")

    jax.tree.map(np.testing.assert_array_equal, rollout, expected)
    assert not no_workers
    assert len(workers | {os.getpid()}) == 3


def test_environments_of_an_evaluation_have_no_processes():
    """They would start slowly."""
    run = dqn_jax.Run(env_id="CartPole-v1", vectorization="async")
    with closing(dqn_jax.make_envs(dqn_jax.Args(), run, 4)) as envs:
        assert isinstance(envs, SyncVectorEnv)


def start(folder, flags):
    """dqn_jax.py as a program, with two environments in processes of their own."""
    small = "--num-envs 2 --learning-starts 50 --batch-size 8 --log-interval 20 --eval-episodes 0"
    program = [str(ROOT / "dqn_jax.py"), "--vectorization", "async"]
    # Its own group of processes, as a terminal makes one.
    return start_python(folder, *program, *small.split(), *flags.split(), start_new_session=True)


@pytest.mark.slow
def test_signals_to_all_processes_end_a_run_with_a_checkpoint(tmp_path):
    """As a terminal and SLURM send them, also to those of the environments."""
    process = start(tmp_path, "--env-id environments:Counter-v0 --total-timesteps 40000")
    assert process.stdout.readline().endswith(": 2 x environments:Counter-v0, cpu\n")
    assert process.stdout.readline().startswith("2,0")  # a twentieth of the steps
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)

    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert 2_000 <= int(checkpoint.name) < 40_000
    assert read_events(folder)[0]["charts/SPS"][-1][0] == int(checkpoint.name)


class ChangingInfos(environments.Counter):
    """Now and then two of them have infos of two types, which fit into no array."""

    def step(self, action):
        *others, _ = super().step(action)
        return (*others, {"x": "text" if self.np_random.random() < 0.5 else 1})


gym.register("ChangingInfos-v0", ChangingInfos)


@pytest.mark.slow
def test_an_error_between_two_answers_is_shown(tmp_path):
    """`close` would wait for ever for an answer that was read already."""
    process = start(tmp_path, "--env-id test_async_envs:ChangingInfos-v0 --total-timesteps 2000")
    _, err = process.communicate(timeout=120)

    assert process.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'text'" in err
    assert "in test_async_envs:ChangingInfos-v0 at step " in err


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_run_is_saved(tmp_path):
    process = start(tmp_path, "--env-id environments:Counter-v0 --total-timesteps 400000")
    process.stdout.readline()
    assert process.stdout.readline().startswith("20,0")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    forkserver = [x for x in children if "forkserver" in Path(f"/proc/{x}/cmdline").read_text()]
    workers = Path(f"/proc/{forkserver[0]}/task/{forkserver[0]}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 1
    *_, where, dead = err.strip().splitlines()
    assert where.startswith("in environments:Counter-v0 at step ")
    assert dead.startswith("killed: Worker<AsyncVectorEnv>-")
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list((folder / "checkpoints").iterdir())) == 1
