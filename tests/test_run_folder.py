"""cleanreplay/run_folder.py: ends of runs by signals, errors and kills, and what they leave."""

import errno
import math
import signal
import sys
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import (
    COUNTER,
    ROOT,
    SMALL_DQN,
    SMALL_PPO,
    flags_of,
    gradient_steps,
    logged_steps,
    make_agent,
    newest_checkpoint,
    only_run,
    start_python,
)

import dqn_jax
import ppo_jax
from cleanreplay import UsageError, checkpoints, disk, load_policy, read_flags, tracking
from cleanreplay.checkpoints import steps_in
from cleanreplay.errors import NotFiniteError
from cleanreplay.experiment import Experiment
from cleanreplay.run_folder import RunFolder, locked

ARGS = dqn_jax.Args(**SMALL_DQN)
# Flags for programs whose runs take a second or two.
SMALL = "--learning-starts 50 --batch-size 8 --buffer-size 100 --log-interval 20".split()  # noqa: SIM905
OFTEN = "--checkpoint-interval 10 --eval-interval 20 --eval-episodes 1".split()  # noqa: SIM905


def folder_of(**flags):
    """Makes a RunFolder of DQN with these flags, and the State that it begins with."""
    run = dqn_jax.Run(**COUNTER | flags)
    agent = make_agent(dqn_jax, ARGS, run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    return RunFolder(agent, run, Path("run").absolute(), dqn_jax.__file__, []), state


def test_returns_that_do_not_exist_yet_come_back():
    """They are null in the file, which all readers of JSON know."""
    folder, state = folder_of()
    with folder:
        folder.begin(lambda: state, None)
        folder.save(16, state, state.params, [math.nan, 2.0])
    again, _ = folder_of(resume=str(folder.path))
    again.agent.args = replace(ARGS, init_from="nowhere")  # a resume does not read it again
    with again:
        again.begin(lambda: state, lambda state: state)

    assert disk.open_file(checkpoints.newest(folder.path)).about["returns"] == [None, 2.0]
    np.testing.assert_array_equal(again.recent_returns, [math.nan, 2.0])
    assert again.first_step == 16


def test_a_run_is_tracked_from_its_beginning_or_its_resume(monkeypatch):
    calls = []
    for name in ("init_wandb", "log_videos"):
        monkeypatch.setattr(tracking, name, lambda *given: calls.append(given))
    folder, state = folder_of(track=True)
    with folder:
        folder.begin(lambda: state, None)
        folder.save(16, state, state.params, [])
    again, _ = folder_of(track=True, resume=str(folder.path))
    with again:
        again.begin(lambda: state, lambda state: state)

    begun = [("run", vars(x.run) | vars(ARGS)) for x in (folder, again)]
    assert calls == [begun[0], (folder.path, 0), begun[1], (folder.path, 16)]


def test_without_wandb_a_tracked_run_leaves_no_folder(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    folder, state = folder_of(track=True)
    with pytest.raises(UsageError, match="track: pip install wandb"), folder:
        folder.begin(lambda: state, None)

    assert not folder.path.exists()


def test_a_checkpoint_interval_of_0_saves_nothing():
    folder, state = folder_of(checkpoint_interval=0)
    with folder:
        folder.begin(lambda: state, None)
        folder.save(100, state, state.params, [])
        folder.save_if_best(100, folder.policy_part(state), 1.0)

    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "args.json", "run.json"]


@pytest.mark.parametrize(("flag", "word"), [("init_from", "no checkpoint"), ("offline_data", "no")])
def test_a_mistake_with_other_runs_leaves_no_folder(flag, word):
    run = dqn_jax.Run(**COUNTER)
    args = dqn_jax.Args(**SMALL_DQN, **{flag: "nowhere"})
    with pytest.raises(UsageError, match=f"{flag}.*{word}"):
        dqn_jax.train(args, run)

    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written_is_one_line():
    Path("runs").write_text("")
    with pytest.raises(UsageError, match=r"runs/.* cannot be written: Not a directory"):
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER))


def test_a_full_disk_is_what_the_system_reports():
    """The full disk may not be that of the run, but /dev/shm, for example."""
    folder, _ = folder_of()
    with pytest.raises(UsageError, match=r"No space left on device: '/dev/shm/x'.*run"), folder:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")


def at_step(number, what, monkeypatch):
    step = environments.Counter.step
    made = count(1)

    def counting_step(self, action):
        if next(made) == number:
            what()
        return step(self, action)

    monkeypatch.setattr(environments.Counter, "step", counting_step)


STEPS = 55 - 12  # of the first 55 steps 12 are resets


def test_a_signal_ends_the_program_with_a_checkpoint(run_main, monkeypatch):
    """The rollout from step 50 on was collected ahead."""
    at_step(STEPS, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    code, out, _ = run_main(dqn_jax, "--env-id", COUNTER["env_id"], *SMALL)

    assert code == 130
    assert "evaluation" not in out  # a signal leaves no time for one
    assert out.splitlines()[-1].startswith(f"{only_run()}: mean return of the last episodes")
    assert steps_in(only_run()) == [50]
    assert logged_steps(only_run()) == [20, 40, 50]


def test_a_signal_in_training_from_python_returns(monkeypatch):
    """An interrupt in a notebook does this. A second one would end the process."""
    handlers = [signal.getsignal(signal.SIGHUP)]

    def signal_once():
        signal.raise_signal(signal.SIGHUP)
        handlers.append(signal.getsignal(signal.SIGHUP))

    at_step(STEPS, signal_once, monkeypatch)
    _, _, folder = dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER | dict(eval_episodes=2)))

    assert steps_in(folder) == [50]
    assert logged_steps(folder, "eval/episodic_return") == []
    assert handlers == [signal.getsignal(signal.SIGHUP), signal.SIG_DFL]


# DQN collects while a thread learns: the iteration learned at that time is not logged.
@pytest.mark.parametrize(
    ("script", "flags", "num_updates", "last_logged"),
    [(dqn_jax, SMALL_DQN, 3, 60), (ppo_jax, SMALL_PPO | dict(total_timesteps=200), 5, 80)],
)
def test_a_failing_environment_leaves_a_checkpoint(script, flags, num_updates, last_logged):
    """Episodes of 2, 3, 4, 5, 2 and 3 steps, each with a reset: `step` 32 is in row 41 of both."""
    env = dict(env_id="environments:Failing-v0", env_kwargs='{"fail_at": 32}', num_envs=2)
    with pytest.raises(RuntimeError, match="broken") as caught:
        script.train(*flags_of(script, **COUNTER | flags | env))

    folder = only_run()
    assert caught.value.__notes__ == [f"in environments:Failing-v0 at step 80 of {folder}"]
    assert steps_in(folder) == [80]
    _, state, _ = newest_checkpoint(folder, script)
    assert gradient_steps(state) == num_updates
    assert logged_steps(folder)[-1] == last_logged


class FailingReset(environments.Counter):
    def reset(self, **kwargs):
        raise OSError(errno.EIO, "Input/output error")


gym.register("FailingReset-v0", FailingReset)


@pytest.mark.parametrize(
    ("env_id", "where"), [("FailingReset-v0", " at step 0 of "), ("phys2d/CartPole-v1", ", ")]
)
def test_a_run_that_cannot_begin_is_closed(env_id, where, monkeypatch):
    """Here the first reset fails, or the record of a compiled run cannot be written."""
    if env_id != "FailingReset-v0":
        monkeypatch.setattr(tracking, "write_origin", lambda *given: FailingReset().reset())
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="Input/output error") as caught:
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER | dict(env_id=env_id)))

    assert caught.value.__notes__ == [f"in {env_id}{where}{only_run()}"]
    assert signal.getsignal(signal.SIGINT) == handler
    assert steps_in(only_run()) == []
    with locked(only_run()), pytest.raises(UsageError, match=r"^another process trains in"):
        locked(only_run()).__enter__()


def test_an_error_is_shown_although_the_agent_diverged():
    killed = []

    def save(*given):
        raise NotFiniteError("diverged")

    process = SimpleNamespace(kill=lambda: killed.append(True))
    experiment = SimpleNamespace(
        log=SimpleNamespace(first_step=0, recent_returns=[]),
        envs=SimpleNamespace(unwrapped=SimpleNamespace(processes=[process])),
        run=dqn_jax.Run(env_id="Broken-v0"),
        run_folder=SimpleNamespace(path="here", save=save),
    )
    saves = Experiment.saves_on_error(experiment, 10, lambda: ("state", "params"))
    with pytest.raises(RuntimeError, match="gone") as caught, saves:
        raise RuntimeError("the simulator is gone")

    assert caught.value.__notes__ == ["in Broken-v0 at step 10 of here", "not saved: diverged"]
    assert killed == [True]


def test_a_full_disk_in_the_last_checkpoint_is_one_line(monkeypatch):
    def write(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", write)
    with pytest.raises(UsageError, match=r"no space left on .*/runs/"):
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER))


def resume_to(folder, total_timesteps):
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    flags = dict(total_timesteps=total_timesteps, resume=str(folder), eval_episodes=0)
    dqn_jax.train(*flags_of(dqn_jax, **vars(args) | vars(run) | flags))


@pytest.mark.slow
def test_a_run_killed_while_it_saves_can_be_resumed(tmp_path):
    """With a checkpoint every 10 steps, an evaluation every 20, it saves most of the time."""
    flags = ["--total-timesteps", "100000", *OFTEN, *SMALL]
    newest = 0
    for seconds in (0.1, 0.4, 0.25):
        process = start_python(tmp_path, str(ROOT / "dqn_jax.py"), *flags)
        assert process.stdout.readline().endswith(": 1 x CartPole-v1, cpu\n")
        assert "steps" in process.stdout.readline()
        time.sleep(seconds)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        folder = only_run(tmp_path)
        flags = ["--resume", str(folder)]

        # A process that is killed immediately may not have finished its checkpoint.
        step, state, about = newest_checkpoint(folder, dqn_jax)
        assert step >= newest
        assert step % 10 == 0
        newest = step
        # A row of the replay for each step, and gradient steps from step 50 on.
        assert int(state.replay.size) == min(step, 100)
        assert gradient_steps(state) == max(step - 50, 0) // 10
        assert np.isfinite(about["returns"]).all()
        assert load_policy(folder)(np.zeros((3, 4), np.float32)).shape == (3,)
    resume_to(folder, newest + 40)
    assert logged_steps(folder)[-2:] == [(newest + 30) // 20 * 20, newest + 40]
