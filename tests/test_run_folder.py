"""cleanreplay/run_folder.py: how a run ends, and what is left of one that fails."""

import errno
import itertools
import math
import os
import signal
from pathlib import Path
from threading import Timer

import environments
import gymnasium as gym
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO

import dqn_jax
import ppo_jax
from cleanreplay import UsageError, terminal, tracking
from cleanreplay.run_folder import locked


def kill_in_rollout(script, number, which, monkeypatch):
    """Kills the process of an environment in a step of that rollout. The others take the step.

    Returns a list, to which all processes of the environments are added then.
    """
    collect = script.collect_rollout
    numbers = itertools.count()
    processes = []

    def collect_and_kill(agent, envs, *given, **named):
        if next(numbers) == number:
            processes.extend(envs.unwrapped.processes)
            process = processes[which]
            os.kill(process.pid, signal.SIGSTOP)  # the step waits for it
            Timer(0.5, process.kill).start()
        return collect(agent, envs, *given, **named)

    monkeypatch.setattr(script, "collect_rollout", collect_and_kill)
    return processes


# DQN collects while a thread learns, PPO in turn. Rollouts have 10 and 16 steps.
@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("script", "flags", "step"),
    [(dqn_jax, SMALL_DQN, 100), (ppo_jax, SMALL_PPO, 32)],
    ids=["dqn", "ppo"],
)
def test_a_killed_process_is_named_and_what_was_learned_is_saved(
    script, flags, step, which, monkeypatch
):
    number = step // (10 if script is dqn_jax else 16)
    processes = kill_in_rollout(script, number, which, monkeypatch)
    args = script.Args(**flags, num_envs=2)
    run = script.Run(**COUNTER, vectorization="async")
    with pytest.raises((EOFError, ConnectionError)) as caught:
        script.train(args, run)
    (folder,) = Path("runs").absolute().iterdir()
    where = f"in environments:Counter-v0 at step {step} of {folder}"
    assert caught.value.__notes__ == [where, f"killed: {processes[which].name}"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(step)]
    for process in processes:
        process.join(timeout=20)
        assert not process.is_alive()


class FailingReset(environments.Counter):
    def reset(self, **kwargs):
        raise RuntimeError("no first observation")


def fail(*given, **named):
    raise OSError(errno.EIO, "Input/output error")


gym.register("FailingReset-v0", FailingReset)


def handlers():
    return [signal.getsignal(getattr(signal, name)) for name in terminal.SIGNALS]


def test_if_the_first_reset_fails_the_run_is_closed_and_the_error_says_where():
    before = handlers()
    run = dqn_jax.Run(**COUNTER | dict(env_id="FailingReset-v0"))
    with pytest.raises(RuntimeError, match="no first observation") as caught:
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    (folder,) = Path("runs").absolute().iterdir()
    assert caught.value.__notes__ == [f"in FailingReset-v0 at step 0 of {folder}"]
    assert handlers() == before
    with locked(folder):
        pass


@pytest.mark.parametrize("env_id", ["environments:Counter-v0", "phys2d/CartPole-v1"])
def test_if_its_record_cannot_be_written_the_run_is_closed(env_id, monkeypatch):
    """In ordinary and in compiled runs."""
    before = handlers()
    monkeypatch.setattr(tracking, "write_origin", fail)
    run = dqn_jax.Run(**COUNTER | dict(env_id=env_id))
    with pytest.raises(OSError, match="Input/output error") as caught:
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    (folder,) = Path("runs").absolute().iterdir()
    assert caught.value.__notes__ == [f"in {env_id}, {folder}"]
    assert handlers() == before
    with locked(folder):
        pass


def test_a_new_run_in_the_folder_of_another_one_is_told():
    folder = Path("runs")
    folder.mkdir()
    with (
        locked(folder),
        pytest.raises(UsageError, match=r"^another process trains in runs"),
    ):
        locked(folder).__enter__()


def test_a_run_in_a_folder_with_signs_of_patterns_is_resumed(tmp_path, monkeypatch):
    parent = tmp_path / "a[b]*\\c"
    parent.mkdir()
    monkeypatch.chdir(parent)
    args = dqn_jax.Args(**SMALL_DQN)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER, exp_name="dqn[lr=1e-3]"))
    longer = dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300))
    dqn_jax.train(longer, dqn_jax.Run(**COUNTER, exp_name="dqn[lr=1e-3]", resume=str(folder)))
    assert sorted(x.name for x in (folder / "checkpoints").iterdir()) == ["200", "300"]


class NotFiniteThenFailing(environments.Counter):
    """From step 60 on its rewards are NaN, and at step 70 it fails."""

    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *others = super().step(action)
        if self.steps == 70:
            raise RuntimeError("the simulator is gone")
        return (observation, math.nan if self.steps > 60 else reward, *others)


gym.register("NotFiniteThenFailing-v0", NotFiniteThenFailing)


def test_an_error_of_the_environment_is_shown_although_its_numbers_spoiled_the_agent():
    run = dqn_jax.Run(**COUNTER | dict(env_id="NotFiniteThenFailing-v0"))
    with pytest.raises(RuntimeError, match="the simulator is gone") as caught:
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    where, not_saved = caught.value.__notes__
    assert where.startswith("in NotFiniteThenFailing-v0 at step ")
    assert not_saved.endswith("diverged, parameters are not finite")
