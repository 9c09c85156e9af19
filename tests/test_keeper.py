"""cleanreplay/keeper.py: what is left of a run whose environments die."""

import itertools
import os
import signal
from pathlib import Path
from threading import Timer

import environments  # noqa: F401  registers the environments
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO, slow

import dqn_jax
import ppo_jax


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
@pytest.mark.parametrize("which", [0, slow(1)])
@pytest.mark.parametrize(
    ("script", "flags", "step"),
    [(dqn_jax, SMALL_DQN, 100), slow(ppo_jax, SMALL_PPO, 32)],
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
