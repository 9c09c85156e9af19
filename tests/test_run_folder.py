"""cleanreplay/run_folder.py: how a run ends, and what a signal, an error or a kill leaves."""

import errno
import json
import math
import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Timer

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
from cleanreplay.run_folder import RunFolder, locked

ARGS = dqn_jax.Args(**SMALL_DQN)
# Flags of processes, whose runs take a second or two.
SMALL = "--learning-starts 50 --batch-size 8 --buffer-size 100 --log-interval 20".split()  # noqa: SIM905
OFTEN = "--checkpoint-interval 10 --eval-interval 20 --eval-episodes 1".split()  # noqa: SIM905


def folder_of(**flags):
    """A RunFolder of DQN with these flags, and the State that it begins with."""
    run = dqn_jax.Run(**COUNTER | flags)
    agent = make_agent(dqn_jax, ARGS, run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    return RunFolder(agent, run, Path("run").absolute(), dqn_jax.__file__, []), state


def test_returns_that_do_not_exist_yet_come_back():
    """They are null, which all readers of JSON know."""
    folder, state = folder_of()
    with folder:
        folder.begin(lambda: state, None)
        folder.save(16, state, state.params, [math.nan, 2.0])
    again, _ = folder_of(resume=str(folder.path))
    with again:
        again.begin(lambda: state, lambda state: state)

    assert disk.open_file(checkpoints.newest(folder.path)).about["returns"] == [None, 2.0]
    np.testing.assert_array_equal(again.recent_returns, [math.nan, 2.0])
    assert again.first_step == 16


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


def test_a_place_that_cannot_be_written_is_one_line():
    Path("runs").write_text("")
    with pytest.raises(UsageError, match=r"runs/.* cannot be written: Not a directory"):
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER))


def test_a_full_disk_is_what_the_system_reports():
    """It may be another disk than that of the run, such as /dev/shm."""
    folder, _ = folder_of()
    with pytest.raises(UsageError, match=r"No space left on device: '/dev/shm/x'.*run"), folder:
        raise OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x")


def constants_of(folder):
    """The numbers in JSON that JSON does not know, such as NaN, of all files of a run."""
    found = []
    texts = [file.read_bytes() for file in folder.glob("*.json")]
    texts.append((folder / "experience/vault.json").read_bytes().rpartition(b"\n")[0])
    for file in folder.rglob("*.safetensors"):
        data = file.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        texts += [header, json.loads(header)["__metadata__"][disk.KEY].encode()]
    for text in texts:
        json.loads(text, parse_constant=found.append)
    return found, len(texts)


def test_all_files_of_a_run_are_json_that_every_reader_knows():
    """CartPole has bounds without end, and no episode is over at the first checkpoint."""
    run = dqn_jax.Run(checkpoint_interval=5, log_interval=5, eval_interval=10, eval_episodes=1)
    args = dqn_jax.Args(
        **SMALL_DQN | dict(total_timesteps=10, learning_starts=8, train_frequency=5)
    )
    _, _, folder = dqn_jax.train(replace(args, save_experience=True), run)

    assert constants_of(folder) == ([], 9)


def test_a_damaged_record_is_moved_and_begins_anew(tmp_path, capsys):
    Path("run.json").write_text('[{"step": 0,')
    tracking.write_origin(tmp_path, 200, Path(dqn_jax.__file__))

    assert "run.json was damaged and is now run.json.damaged" in capsys.readouterr().out
    (aside,) = tmp_path.glob("run.json.damaged*")
    assert aside.read_text() == '[{"step": 0,'
    assert [start["step"] for start in json.loads(Path("run.json").read_text())] == [200]


def at_step(number, what, monkeypatch):
    """Does something when Counter-v0 is stepped for that many times."""
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
    assert "evaluation" not in out  # it is in a hurry
    assert out.splitlines()[-1].startswith(f"{only_run()}: mean return of the last episodes")
    assert steps_in(only_run()) == [50]
    assert logged_steps(only_run()) == [20, 40, 50]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_training_from_python_returns(number, monkeypatch):
    """As an interrupt in a notebook. A second one would end the process."""
    handlers = [signal.getsignal(number)]

    def signal_once():
        signal.raise_signal(number)
        handlers.append(signal.getsignal(number))

    at_step(STEPS, signal_once, monkeypatch)
    _, _, folder = dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER | dict(eval_episodes=2)))

    assert steps_in(folder) == [50]
    assert logged_steps(folder, "eval/episodic_return") == []
    assert handlers == [signal.getsignal(number), signal.SIG_DFL]


# DQN collects while a thread learns: the iteration that was learned meanwhile is not logged.
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


class NotFiniteThenFailing(environments.Counter):
    """From step 60 on its rewards are NaN, and at step 70 it fails."""

    steps = 0

    def step(self, action):
        self.steps += 1
        observation, reward, *others = super().step(action)
        if self.steps == 70:
            raise RuntimeError("the simulator is gone")
        return (observation, math.nan if self.steps > 60 else reward, *others)


gym.register("FailingReset-v0", FailingReset)
gym.register("NotFiniteThenFailing-v0", NotFiniteThenFailing)


@pytest.mark.parametrize(
    ("env_id", "has_record", "where"),
    [
        ("FailingReset-v0", True, " at step 0 of "),
        (COUNTER["env_id"], False, ", "),
        ("phys2d/CartPole-v1", False, ", "),
    ],
    ids=["reset", "record", "record of a compiled run"],
)
def test_a_run_that_cannot_begin_is_closed(env_id, has_record, where, monkeypatch):
    """If the first reset fails, and if its record cannot be written."""
    if not has_record:
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
    with pytest.raises(RuntimeError, match="the simulator is gone") as caught:
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER | dict(env_id="NotFiniteThenFailing-v0")))

    where, not_saved = caught.value.__notes__
    assert where.startswith("in NotFiniteThenFailing-v0 at step ")
    assert not_saved.endswith("diverged, parameters are not finite")


@pytest.mark.parametrize("name", ["state.safetensors", "best.safetensors"])
def test_a_full_disk_at_the_end_is_one_line(name, monkeypatch):
    """A checkpoint meets it in a thread."""
    write = disk.write

    def write_unless_full(file, *given, **named):
        if file.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(file, *given, **named)

    monkeypatch.setattr(disk, "write", write_unless_full)
    with pytest.raises(UsageError, match=r"[Nn]o space left on .*/runs/"):
        dqn_jax.train(ARGS, dqn_jax.Run(**COUNTER | dict(eval_episodes=1)))


def resume_to(folder, total_timesteps):
    """Trains the run of DQN in this folder up to so many steps, in this process."""
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    flags = dict(total_timesteps=total_timesteps, resume=str(folder), eval_episodes=0)
    dqn_jax.train(*flags_of(dqn_jax, **vars(args) | vars(run) | flags))


@pytest.mark.slow
def test_a_run_killed_while_it_saves_goes_on(tmp_path):
    """A checkpoint every 10 steps, an evaluation every 20: it is saving most of the time."""
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

        # A process that is killed at once may not have written the checkpoint that it began.
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


@contextmanager
def small_disk(folder, size):
    """Makes this folder a disk of this size."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mount is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


# It is full when a point of the charts is written, in a checkpoint, and in the experience.
FULL_DISKS = [
    ("60k", "--checkpoint-interval 0 --log-interval 10"),
    ("300k", "--checkpoint-interval 500"),
    ("300k", "--checkpoint-interval 0 --save-experience"),
]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="a file system is mounted")
@pytest.mark.parametrize(("size", "flags"), FULL_DISKS)
def test_on_a_full_disk_what_was_saved_stays(size, flags, tmp_path, monkeypatch):
    """Libraries may print more beside our line, at the same time."""
    folder = tmp_path / "disk"
    with small_disk(folder, size), monkeypatch.context() as patched:
        more = "--total-timesteps 50000 --eval-episodes 1".split()  # noqa: SIM905
        process = start_python(folder, str(ROOT / "dqn_jax.py"), *SMALL, *more, *flags.split())
        _, err = process.communicate()
        assert process.returncode == 2, err
        assert re.search("error: .*no space left", err, re.IGNORECASE), err
        run = only_run(folder)
        assert (run / "args.json").stat().st_size > 0

        if "--checkpoint-interval 500" in flags:
            newest = steps_in(run)[-1]
            # With room on the disk the run goes on from there.
            subprocess.run(["mount", "-o", "remount,size=20m", str(folder)], check=True)
            patched.chdir(folder)
            resume_to(run, newest + 200)
            assert logged_steps(run) == list(range(20, newest + 201, 20))
            assert steps_in(run)[-1] == newest + 200


# DQN collects while a thread learns, PPO in turn. Rollouts have 10 and 16 steps.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags", "number", "step", "which"),
    [(dqn_jax, SMALL_DQN, 10, 100, 0), (ppo_jax, SMALL_PPO, 2, 32, 1)],
)
def test_a_killed_process_is_named(script, flags, number, step, which, monkeypatch):
    """The others take the step in which it is killed."""
    collect = script.collect_rollout
    numbers = count()
    processes = []

    def collect_and_kill(agent, envs, *given, **named):
        if next(numbers) == number:
            processes.extend(envs.unwrapped.processes)
            os.kill(processes[which].pid, signal.SIGSTOP)  # the step waits for it
            Timer(0.5, processes[which].kill).start()
        return collect(agent, envs, *given, **named)

    monkeypatch.setattr(script, "collect_rollout", collect_and_kill)
    with pytest.raises((EOFError, ConnectionError)) as caught:
        script.train(*flags_of(script, **COUNTER | flags, num_envs=2, vectorization="async"))

    where = f"in environments:Counter-v0 at step {step} of {only_run()}"
    assert caught.value.__notes__ == [where, f"killed: {processes[which].name}"]
    assert steps_in(only_run()) == [step]
    for process in processes:
        process.join(timeout=20)
        assert not process.is_alive()
