"""Checkpoints and runs that go on; what is left of a run that is stopped or fails."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from environments import Chain
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from helpers import (
    COUNTER,
    ROOT,
    SMALL_DQN,
    fast_at_ends,
    flip_a_bit,
    make_agent,
    make_trainer,
    more,
    one_line,
    read_events,
    start_python,
)

import dqn_jax
import per_dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import checkpoints, disk, load_policy, protocol, read_flags, replays
from cleanreplay.run_folder import locked
from dqn_jax import UsageError

DQN_FLAGS = dict(learning_starts=100, batch_size=8, buffer_size=200, n_step=2)
COMPILED = [
    more(dqn_jax, DQN_FLAGS),  # what PER resumes has all of it
    (per_dqn_jax, DQN_FLAGS),
    more(ppo_jax, dict(num_steps=16, num_minibatches=1, update_epochs=1)),
]
# Flags with which a run takes a second or two.
SMALL = "--learning-starts 50 --batch-size 8 --buffer-size 100 --log-interval 20".split()  # noqa: SIM905
SHORT = ["--total-timesteps", "100", "--gamma", "0.5", *SMALL]


def assert_equal_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def checkpoint_steps(folder):
    """Steps of the whole checkpoints of a run; a half written one has a longer name."""
    return checkpoints.steps_in(folder)


def logged_steps(folder, tag="charts/SPS"):
    """The steps at which a run has points in a chart."""
    scalars, _ = read_events(folder)
    return [step for step, _ in scalars[tag]]


def gradient_steps(state):
    """How many Adam has taken."""
    return int(optax.tree_utils.tree_get(state.opt_state, "count"))


def run_folder(parent):
    """The folder of the only run below this one."""
    (folder,) = Path(parent, "runs").iterdir()
    return folder


# With two devices, one agent spreads its environments over them; two agents have one each.
@pytest.mark.parametrize(("num_seeds", "num_devices"), [(2, 1), more(1, 2), more(2, 2)])
@pytest.mark.parametrize(("module", "flags"), COMPILED, ids=["dqn", "per_dqn", "ppo"])
def test_a_compiled_run_goes_on_bit_for_bit(module, flags, num_seeds, num_devices, stop_at):
    run = dict(env_id="environments:Chain-v0", num_seeds=num_seeds, num_devices=num_devices)
    run |= dict(log_interval=80, eval_episodes=2)
    # The schedules depend on total_timesteps, so both halves have that of the whole.
    args = module.Args(total_timesteps=640, num_envs=4, **flags)
    whole, _, folder = module.train(args, module.Run(exp_name="whole", **run))

    step = 256 if module is ppo_jax else 320  # log intervals are whole iterations
    _, _, half = module.train(args, module.Run(exp_name="half", **run), stop_at(step))
    assert checkpoint_steps(half) == [step]
    second_half = module.Run(exp_name="half", resume=str(half), **run)
    resumed, _, same = module.train(args, second_half)
    assert same == half

    assert_equal_trees(whole, resumed)
    for name in (".", "seed_2")[:num_seeds]:
        expected, _ = read_events(folder / name)
        got, _ = read_events(half / name)
        assert expected.keys() == got.keys()
        for tag in expected.keys() - {"charts/SPS"}:
            assert got[tag] == expected[tag], tag


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (dqn_jax, "--learning-starts 50 --batch-size 8"),
        more(ppo_jax, "--num-steps 16"),
        more(sac_jax, "--learning-starts 50 --batch-size 8 --env-id Pendulum-v1"),
    ],
)
def test_a_resumed_run_has_the_layers_of_the_run(module, flags, run_main, tmp_path):
    flags = f"--hidden-sizes 7 5 --eval-episodes 0 --num-envs 2 --total-timesteps 100 {flags}"
    code, _, error = run_main(module, *flags.split())
    assert code == 0, error
    (folder,) = (tmp_path / "runs").iterdir()
    code, _, error = run_main(module, "--resume", str(folder), "--total-timesteps", "200")
    assert code == 0, error
    policy = load_policy(folder)
    assert policy(np.zeros((2, 3 if module is sac_jax else 4), np.float32)).shape[0] == 2
    _, args = read_flags(folder, module.Run, module.Args)
    assert args.hidden_sizes == (7, 5)


def test_an_ordinary_run_goes_on_and_later_points_are_dropped(tmp_path):
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=400, n_step=3)
    run = dict(env_id="environments:Counter-v0", log_interval=20, checkpoint_interval=100)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=0, **run))

    # As if it had been killed at step 180: the newest checkpoint is that of step 100.
    (folder / "checkpoints" / "200").rename(tmp_path / "lost")
    longer = dqn_jax.Args(total_timesteps=300, **flags)
    state, _, same = dqn_jax.train(longer, dqn_jax.Run(resume=str(folder), **run))
    assert same == folder

    for tag in ("charts/epsilon", "charts/SPS", "charts/episodic_return"):
        assert logged_steps(folder, tag) == list(range(20, 301, 20)), tag
    scalars, _ = read_events(folder)
    epsilon = [value for step, value in scalars["charts/epsilon"] if step > 100]
    # That of the iteration that ends there, which began 10 steps before.
    expected = np.interp(np.arange(110, 300, 20), [0, 150], [1.0, 0.05])
    np.testing.assert_allclose(epsilon, expected, rtol=1e-6)
    # A gradient step in each iteration of 10 steps that starts at 50 or later.
    assert gradient_steps(state) == 25
    assert checkpoint_steps(folder) == [200, 300]
    saved = json.loads((folder / "args.json").read_text())
    assert saved["args"]["total_timesteps"] == 300


def test_what_is_saved_is_what_train_returns():
    """A thread is learning while the next rollout is collected: it is waited for."""
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=400, n_step=3)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    run = dqn_jax.Run(env_id="environments:Counter-v0", eval_episodes=0)
    state, _, folder = dqn_jax.train(args, run)
    saver = checkpoints.Checkpoints(folder)
    step, saved, about = saver.restore(jax.tree.map(jnp.zeros_like, state))
    assert step == about["step"] == 200
    assert_equal_trees(saved, state)
    assert int(saved.replay.size) == 100  # rows of two environments
    # Two environments end episodes of 2, 3, 4 and 5 steps, and as many rewards of 1, 2, ...
    assert about["returns"][:8] == [3.0, 3.0, 6.0, 6.0, 10.0, 10.0, 15.0, 15.0]


def run_of_dqn():
    """The State of a new DQN, and what saves it."""
    agent = make_agent(dqn_jax, dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    return jax.jit(agent.init)(jax.random.PRNGKey(0)), checkpoints.Checkpoints("run")


def save(saver, step, state):
    """Saves a State of DQN."""
    saver.save(step, state, {"step": step})


def test_a_checkpoint_that_is_written_later_is_of_its_own_step(monkeypatch):
    """Training overwrites the state before the thread begins to write."""
    state, saver = run_of_dqn()
    wanted = jax.tree.map(np.array, state)
    write = disk.write
    overwritten = threading.Event()

    def write_late(*given, **named):
        assert overwritten.wait(timeout=20)
        write(*given, **named)

    monkeypatch.setattr(disk, "write", write_late)
    save(saver, 100, state)
    like = jax.tree.map(jnp.zeros_like, state)
    for x in jax.tree.leaves(state):
        x.delete()
    overwritten.set()
    saver.wait()
    step, saved, _ = saver.restore(like)
    assert step == 100
    assert_equal_trees(saved, wanted)


def test_a_small_state_is_copied_without_a_program():
    state, saver = run_of_dqn()
    names = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, _, **__: names.append(name))
    try:
        save(saver, 100, state)
        saver.wait()
    finally:
        jax.monitoring.clear_event_listeners()
    assert not [name for name in names if "compile" in name]


def test_a_state_that_is_too_large_to_be_copied_is_written_at_once(monkeypatch):
    state, saver = run_of_dqn()
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    monkeypatch.setattr(checkpoints, "COPIED", size - 1)
    save(saver, 100, state)
    assert checkpoint_steps("run") == [100]


def large_state():
    """A pytree with leaves that are large, of several chunks and blocks, and one that is small."""
    random = np.random.default_rng(0)
    return {
        "ring": jnp.asarray(random.integers(0, 9, (1, 300, 4, 90), np.uint8)),
        "weights": jnp.asarray(random.standard_normal((70, 1_000), np.float32)),
        "step": jnp.int32(7),
    }


@pytest.fixture
def small_limits(monkeypatch):
    """Leaves of 10 kB are large, chunks have 1 kB and blocks 4 kB."""
    monkeypatch.setattr(disk, "LARGE", 10_000)
    monkeypatch.setattr(disk, "CHUNK_BYTES", 1_000)
    monkeypatch.setattr(disk, "CHUNKS_AT_ONCE", 4)


def test_large_leaves_are_compressed_arrays_that_come_back_as_they_were(small_limits):
    saver = checkpoints.Checkpoints("run")
    save(saver, 100, large_state())
    saver.wait()
    folder = Path("run/checkpoints/100")
    assert {x.name for x in folder.iterdir()} == {"ring", "weights", "state.safetensors"}
    _, restored, _ = saver.restore(jax.tree.map(jnp.zeros_like, large_state()))
    assert_equal_trees(restored, large_state())
    read = disk.open_file(folder / "state.safetensors").read(["weights"])
    np.testing.assert_array_equal(read["weights"], large_state()["weights"])


@pytest.mark.parametrize("what", ["a chunk is missing", "chunks are swapped", "a chunk is cut"])
def test_a_damaged_large_leaf_is_found(what, small_limits, capsys):
    saver = checkpoints.Checkpoints("run")
    for step in (100, 200):
        save(saver, step, large_state())
    saver.wait()
    chunks = sorted(Path("run/checkpoints/200/ring").glob("[0-9]*"))
    first, second = chunks[0].read_bytes(), chunks[1].read_bytes()
    assert first != second
    if what == "a chunk is missing":
        chunks[0].unlink()
    else:
        chunks[0].write_bytes(second if what == "chunks are swapped" else first[:50])
    step, restored, _ = saver.restore(jax.tree.map(jnp.zeros_like, large_state()))
    assert step == 100
    assert_equal_trees(restored, large_state())
    assert "checkpoint 200 is damaged" in capsys.readouterr().out


def fail_once(monkeypatch):
    """The next file of arrays meets a full disk."""
    write = disk.write

    def full(*given, **named):
        monkeypatch.setattr(disk, "write", write)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "write", full)


def test_an_error_of_an_earlier_checkpoint_does_not_stop_the_next_one(monkeypatch):
    state, saver = run_of_dqn()
    fail_once(monkeypatch)
    save(saver, 100, state)
    with pytest.raises(UsageError, match="no space left on the disk"):
        save(saver, 200, state)
    saver.wait()
    assert checkpoint_steps("run") == [200]


@pytest.mark.parametrize("failing", ["only", "first"])
def test_a_disk_that_is_full_in_the_thread_ends_the_run_with_one_line(
    failing, run_main, monkeypatch
):
    """At the end of the run, or at the next checkpoint."""
    fail_once(monkeypatch)
    interval = "200" if failing == "only" else "50"
    code, out, err = run_main(dqn_jax, *SHORT, "--checkpoint-interval", interval)
    assert err.splitlines()[-1].startswith("error: no space left on the disk of ")
    assert code == 2
    assert ("100 steps: return" in out) == (failing == "only")


def last_line(out):
    return out.strip().splitlines()[-1]


@pytest.mark.more
def test_a_complete_run_is_evaluated_once_more_and_reports_the_same(run_main):
    pytest.importorskip("moviepy")
    pytest.importorskip("pygame")
    code, out, err = run_main(dqn_jax, *SHORT)
    assert code == 0, err
    reported = last_line(out)
    folder = reported.split(":")[0]
    assert "mean return of the last episodes" in reported
    before, _ = read_events(folder)
    flags = json.loads(Path(folder, "args.json").read_text())

    evaluation = ["--eval-episodes", "3", "--capture-video"]
    code, out, err = run_main(dqn_jax, "--resume", folder, *evaluation)
    assert code == 0, err
    assert "100 steps: return" in out
    assert last_line(out) == reported

    after, _ = read_events(folder)
    assert after.keys() == before.keys()
    for tag in before:
        if not tag.startswith("eval/"):
            assert after[tag] == before[tag], tag
    assert [step for step, _ in before["eval/episodic_return"]] == [100]
    assert [step for step, _ in after["eval/episodic_return"]] == [100, 100]
    (video,) = Path(folder, "videos").rglob("*.mp4")
    assert video.parent.name == "100"
    assert video.stat().st_size > 0
    assert checkpoint_steps(folder) == [100]
    assert json.loads(Path(folder, "args.json").read_text()) == flags


def test_a_complete_compiled_run_reports_the_same_returns_of_each_agent():
    args = per_dqn_jax.Args(total_timesteps=640, num_envs=4, **DQN_FLAGS)
    run = dict(env_id="environments:Chain-v0", num_seeds=2, log_interval=80, eval_episodes=2)
    state, returns, folder = per_dqn_jax.train(args, per_dqn_jax.Run(**run))
    resumed_run = per_dqn_jax.Run(resume=str(folder), **run)
    resumed, same_returns, _ = per_dqn_jax.train(args, resumed_run)
    assert np.isfinite(returns).all()
    assert returns.shape == (2,)
    np.testing.assert_array_equal(same_returns, returns)
    assert_equal_trees(resumed, state)
    for name in (".", "seed_2"):
        scalars, _ = read_events(folder / name)
        first, again = scalars["eval/episodic_return"]
        assert first == again


def test_a_resume_takes_the_flags_of_the_folder_and_more_steps(run_main):
    """How often a run is evaluated, saved and logged may change for the time being."""
    code, out, err = run_main(dqn_jax, *SHORT, "--eval-episodes", "0")
    assert code == 0, err
    folder = last_line(out).split(":")[0]
    started = json.loads(Path(folder, "args.json").read_text())
    assert started["args"]["gamma"] == 0.5

    flags = "--total-timesteps 120 --eval-episodes 1 --checkpoint-interval 50 --log-interval 10"
    code, _, err = run_main(dqn_jax, "--resume", folder, *flags.split())
    assert code == 0, err
    saved = json.loads(Path(folder, "args.json").read_text())
    assert saved["args"] == started["args"] | {"total_timesteps": 120}
    assert saved["run"] == started["run"]
    assert saved["run"]["resume"] == ""

    assert logged_steps(folder) == [20, 40, 60, 80, 100, 110, 120]
    assert logged_steps(folder, "eval/episodic_return") == [120]
    _, table = read_events(folder)
    assert "|gamma|0.5|" in table
    assert f"|resume|{folder}|" in table


def start(folder, *flags):
    """dqn_jax.py in a process of its own, once it has printed a line of progress."""
    process = start_python(folder, str(ROOT / "dqn_jax.py"), *flags)
    assert process.stdout.readline().endswith(": 1 x CartPole-v1, cpu\n")
    assert "steps" in process.stdout.readline()
    return process


def resume_to(folder, total_timesteps):
    """Trains the run of DQN in this folder up to so many steps, in this process: its State."""
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    args = replace(args, total_timesteps=total_timesteps)
    state, _, _ = dqn_jax.train(args, replace(run, resume=str(folder), eval_episodes=0))
    return state


def at_step(number, what, monkeypatch):
    """Does something when Counter-v0 is stepped for that many times."""
    step = environments.Counter.step
    count = 0

    def counting_step(self, action):
        nonlocal count
        count += 1
        if count == number:
            what()
        return step(self, action)

    monkeypatch.setattr(environments.Counter, "step", counting_step)


RESETS = 12  # of the first 55 steps of Counter-v0, which are none of its `step`
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@fast_at_ends("number", SIGNALS)
def test_a_signal_keeps_a_checkpoint_of_the_last_iteration(number, run_main, monkeypatch):
    with monkeypatch.context() as patched:
        at_step(55 - RESETS, lambda: signal.raise_signal(number), patched)
        flags = ["--env-id", "environments:Counter-v0", "--total-timesteps", "200", *SMALL]
        code, out, _ = run_main(dqn_jax, *flags)
    assert code == 130
    assert "evaluation" not in out  # it is in a hurry
    folder = run_folder(Path())
    assert last_line(out).startswith(f"{folder.absolute()}: mean return of the last episodes")
    assert checkpoint_steps(folder) == [50]  # the rollout from step 50 on was collected ahead
    resume_to(folder.absolute(), 200)
    assert logged_steps(folder) == [20, 40, 50, *range(60, 201, 20)]


@fast_at_ends("number", SIGNALS)
def test_a_signal_in_training_from_python_saves_and_returns(number, monkeypatch):
    """As an interrupt in a notebook; afterwards signals do what they did before."""
    before = [signal.getsignal(x) for x in SIGNALS]
    at_step(55 - RESETS, lambda: signal.raise_signal(number), monkeypatch)
    args = dqn_jax.Args(**SMALL_DQN)
    run = dqn_jax.Run(env_id="environments:Counter-v0", eval_episodes=2)
    _, _, folder = dqn_jax.train(args, run)
    assert checkpoint_steps(folder) == [50]
    assert logged_steps(folder) == [50]
    scalars, _ = read_events(folder)
    assert "eval/episodic_return" not in scalars
    assert [signal.getsignal(x) for x in SIGNALS] == before


def kill(process):
    """Ends a process with SIGKILL, which it can do nothing about."""
    process.kill()
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, err


@pytest.mark.slow
def test_sigkill_loses_no_more_than_a_checkpoint_interval(tmp_path):
    process = start(tmp_path, "--total-timesteps", "20000", "--checkpoint-interval", "100", *SMALL)
    time.sleep(0.5)
    kill(process)
    folder = run_folder(tmp_path)
    last = logged_steps(folder)[-1]
    newest = checkpoint_steps(folder)[-1]
    assert newest % 100 == 0
    assert last - newest <= 200  # and one of them may have been half written
    resume_to(folder, newest + 40)
    assert logged_steps(folder) == list(range(20, newest + 41, 20))


def newest_checkpoint(folder, module=dqn_jax):
    """The step, the state and the last returns of the newest whole checkpoint of a run."""
    run, args = read_flags(folder, module.Run, module.Args)
    agent = make_agent(module, args, run)
    like = jax.jit(agent.init)(jax.random.PRNGKey(0))
    step, state, about = checkpoints.Checkpoints(folder).restore(like)
    return step, state, about["returns"]


@pytest.mark.slow
def test_killed_while_it_saves_a_run_goes_on_and_all_can_be_read(tmp_path):
    """A checkpoint every 10 steps, an evaluation every 20: it is saving most of the time."""
    intervals = "--checkpoint-interval 10 --eval-interval 20 --eval-episodes 1"
    flags = ["--total-timesteps", "100000", *intervals.split(), *SMALL]
    random = np.random.default_rng(0)
    newest = 0
    for number in range(10):
        process = start(tmp_path, *flags)
        folder = run_folder(tmp_path)
        time.sleep(random.uniform(0, 0.5))
        kill(process)
        flags = ["--resume", str(folder)]

        step, state, recent = newest_checkpoint(folder)
        # A process that is killed at once may not have written the checkpoint that it began.
        assert step >= newest, f"after kill {number}"
        assert step % 10 == 0
        newest = step
        # A row of the replay for each step, and gradient steps from step 50 on.
        assert int(state.replay.size) == min(step, 100)
        assert gradient_steps(state) == max(step - 50, 0) // 10
        assert np.isfinite(recent).all()
        assert load_policy(folder)(np.zeros((3, 4), np.float32)).shape == (3,)
    assert newest > 30


# DQN collects while a thread learns: the iteration that was learned meanwhile is not logged.
@pytest.mark.parametrize(
    ("module", "flags", "num_updates", "last_logged"),
    [
        (dqn_jax, dict(learning_starts=50, batch_size=8, buffer_size=100), 123, 1260),
        (ppo_jax, dict(num_steps=8, num_minibatches=1, update_epochs=1), 80, 1280),
    ],
    ids=["dqn", "ppo"],
)
def test_a_failing_environment_is_named_and_keeps_a_checkpoint(
    module, flags, num_updates, last_logged, tmp_path
):
    args = module.Args(total_timesteps=2_000, num_envs=2, **flags)
    run = module.Run(env_id="environments:Failing-v0", log_interval=20)
    with pytest.raises(RuntimeError, match="broken") as caught:
        module.train(args, run)
    # Episodes of 2, 3, 4 and 5 steps, each followed by a row that only resets: the 500th `step` of
    # each of the two is its 643rd row, which is in the iteration from step 1280 on.
    folder = run_folder(tmp_path)
    assert caught.value.__notes__ == [f"in environments:Failing-v0 at step 1280 of {folder}"]
    assert checkpoint_steps(folder) == [1280]
    step, state, _ = newest_checkpoint(folder, module)
    assert (step, gradient_steps(state)) == (1280, num_updates)
    assert logged_steps(folder)[-1] == last_logged


def test_of_a_failure_in_the_first_rollout_nothing_is_left_to_resume(tmp_path, monkeypatch):
    """Nothing was learned, and a resume says so: the run is started anew."""
    args = dqn_jax.Args(**SMALL_DQN)
    run = dict(env_id="environments:Counter-v0", eval_episodes=0, log_interval=20)
    with monkeypatch.context() as patched:
        patched.setattr(environments.Counter, "step", environments.Failing(fail_at=0).step)
        with pytest.raises(RuntimeError, match="broken") as caught:
            dqn_jax.train(args, dqn_jax.Run(**run))
    folder = run_folder(tmp_path)
    assert caught.value.__notes__ == [f"in environments:Counter-v0 at step 0 of {folder}"]
    assert checkpoint_steps(folder) == []
    with pytest.raises(UsageError, match=f"{folder}/checkpoints has no checkpoint"):
        dqn_jax.train(args, dqn_jax.Run(resume=str(folder), **run))


# The disk is full when a point of the charts is written, in the first checkpoint, in a later one,
# and when the best agent is saved.
FULL_DISKS = {
    "in the event file": ("60k", "--checkpoint-interval 0 --log-interval 10"),
    "in the first checkpoint": ("100k", "--checkpoint-interval 500"),
    "in the second checkpoint": ("300k", "--checkpoint-interval 500"),
    "in the third checkpoint": ("500k", "--checkpoint-interval 500"),
    "in the best agent": ("280k", "--checkpoint-interval 500 --eval-interval 300"),
    "in the experience": ("300k", "--checkpoint-interval 0 --save-experience"),
}
USUAL = "in the second checkpoint"
WITH_A_CHECKPOINT = ("in the second checkpoint", "in the third checkpoint", "in the best agent")


@contextlib.contextmanager
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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of 600 kB is mounted")
@pytest.mark.parametrize("when", FULL_DISKS)
def test_a_full_disk_is_an_error_and_what_was_saved_stays(when, tmp_path, monkeypatch):
    """Libraries may print more beside our line, at the same time."""
    size, flags = FULL_DISKS[when]
    disk = tmp_path / "disk"
    with small_disk(disk, size), monkeypatch.context() as patched:
        more = "--total-timesteps 50000 --eval-episodes 1"
        done = subprocess.run(
            [sys.executable, str(ROOT / "dqn_jax.py"), *SMALL, *more.split(), *flags.split()],
            cwd=disk,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert re.search("error: .*no space left", done.stderr, re.I), done.stderr
        folder = run_folder(disk)
        assert (folder / "args.json").stat().st_size > 0

        if when in WITH_A_CHECKPOINT:
            newest = checkpoint_steps(folder)[-1]
            assert newest in (500, 1000)
            assert logged_steps(folder)[-1] >= newest
            # With room on the disk the run goes on from there.
            subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
            patched.chdir(disk)
            resume_to(folder, newest + 200)
            assert logged_steps(folder) == list(range(20, newest + 201, 20))
            assert checkpoint_steps(folder)[-1] == newest + 200


@pytest.fixture
def saved_run(tmp_path, monkeypatch):
    """The folder and the flags of a run with checkpoints at steps 100 and 200."""
    args = dqn_jax.Args(**SMALL_DQN)
    run = dict(eval_episodes=0, checkpoint_interval=100, log_interval=50)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**run))
    return folder, args, dqn_jax.Run(**run, resume=str(folder))


def test_a_damaged_checkpoint_is_moved_and_the_run_goes_on_from_the_one_before(saved_run, capsys):
    folder, args, run = saved_run
    (folder / "checkpoints/200/state.safetensors").write_bytes(b"damaged")
    dqn_jax.train(args, run)
    text = f"200 is damaged and was moved to {folder}/damaged: the run goes on from 100"
    assert text in capsys.readouterr().out
    assert logged_steps(folder) == [50, 100, 150, 200]
    assert checkpoint_steps(folder) == [100, 200]


def test_a_resume_deletes_what_a_killed_run_had_begun_to_write(saved_run):
    folder, args, run = saved_run
    begun = folder / "checkpoints" / ".150.new"
    begun.mkdir()
    (begun / "part").write_bytes(bytes(100))
    dqn_jax.train(replace(args, total_timesteps=250), run)
    assert not begun.exists()


def test_the_file_of_an_agent_cannot_be_resumed(saved_run, run_main):
    folder, args, run = saved_run
    dqn_jax.train(args, replace(run, eval_episodes=1))
    line = one_line(run_main(dqn_jax, "--resume", str(folder / "best.safetensors")))
    assert line.endswith("is an agent, and no folder of a run: --init-from begins with it")


def test_a_resume_moves_no_checkpoint_that_the_machine_cannot_read_now(saved_run, monkeypatch):
    folder, args, run = saved_run
    read = disk.open_file

    def read_once(file):
        monkeypatch.setattr(disk, "open_file", read)
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(disk, "open_file", read_once)
    with pytest.raises(UsageError, match=r"checkpoint 200 cannot be read now: .*Stale file handle"):
        dqn_jax.train(args, run)
    assert checkpoint_steps(folder) == [100, 200]
    dqn_jax.train(args, run)
    assert not (folder / "damaged").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EIO, "Input/output error"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (MemoryError(), True),
        (ValueError("INTERNAL: Error reading x [OS error 5: EIO Input/output error]"), True),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 80 bytes"), True),
        (FileNotFoundError(errno.ENOENT, "No such file"), False),
        (ValueError("NOT_FOUND: Error opening x [OS error 2: ENOENT No such file]"), False),
        (ValueError("Expecting value: line 1 column 1"), False),
    ],
)
def test_errors_of_the_machine_are_told_from_damage(error, expected):
    assert checkpoints.is_of_the_machine(error) is expected


def test_a_number_that_comes_back_as_another_is_damage(saved_run, capsys):
    """As after a flipped bit, which the format does not notice."""
    folder, args, run = saved_run
    flip_a_bit(folder / "checkpoints/200/state.safetensors", "replay/storage/reward")
    dqn_jax.train(args, run)
    assert "replay/storage/reward has another checksum" in capsys.readouterr().out


def test_what_a_checkpoint_tells_has_a_checksum(saved_run, capsys):
    folder, args, run = saved_run
    file = folder / "checkpoints/200/state.safetensors"
    file.write_bytes(file.read_bytes().replace(b"total_timesteps", b"total_timestepz", 1))
    dqn_jax.train(args, run)
    assert "what it tells of its arrays has another checksum" in capsys.readouterr().out


def test_a_damaged_best_agent_is_one_line(saved_run):
    folder, args, run = saved_run
    dqn_jax.train(args, replace(run, eval_episodes=1))
    (folder / "best.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        UsageError, match=r"best.safetensors is damaged, .*: copy it again, or delete "
    ):
        load_policy(folder)


def test_a_damaged_record_is_moved_and_begins_anew(saved_run, capsys):
    folder, args, run = saved_run
    (folder / "run.json").write_text('[{"step": 0,')
    dqn_jax.train(args, run)
    assert "run.json was damaged and is now run.json.damaged" in capsys.readouterr().out
    (aside,) = folder.glob("run.json.damaged*")
    assert aside.read_text() == '[{"step": 0,'
    assert len(json.loads((folder / "run.json").read_text())) == 1


def test_a_script_with_other_layers_names_the_first_that_differs(saved_run, monkeypatch):
    folder, args, run = saved_run

    class Smaller(dqn_jax.QNetwork):
        @dqn_jax.nn.compact
        def __call__(self, x):
            return dqn_jax.nn.Dense(self.num_actions, name="q")(x)

    monkeypatch.setattr(dqn_jax, "QNetwork", Smaller)
    layer = r"params/q/kernel is \(84, 2\) there, \(4, 2\) here"
    for begin in (
        lambda: dqn_jax.train(args, run),
        lambda: load_policy(folder),
    ):
        with pytest.raises(
            UsageError, match=f"is of another script or version: .*{layer}"
        ) as caught:
            begin()
        assert "\n" not in str(caught.value)


def test_two_processes_do_not_train_in_one_folder(saved_run):
    folder, args, run = saved_run
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with locked(folder), pytest.raises(UsageError, match="another process trains in"):
        dqn_jax.train(args, run)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    dqn_jax.train(args, run)


def test_flags_that_a_saved_run_lacks_have_their_defaults(saved_run):
    folder, _, _ = saved_run
    file = folder / "args.json"
    flags = json.loads(file.read_text())
    del flags["run"]["eval_max_steps"], flags["args"]["double_q"]
    file.write_text(json.dumps(flags))
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    assert (run.eval_max_steps, args.double_q) == (30_000, False)

    flags["args"]["no_such_flag"] = 1
    file.write_text(json.dumps(flags))
    with pytest.raises(UsageError, match="another script, which has no_such_flag"):
        read_flags(folder, dqn_jax.Run, dqn_jax.Args)


def test_a_flag_that_is_infinite_comes_back_as_it_was(tmp_path):
    args = ppo_jax.Args(target_kl=np.inf, max_grad_norm=np.inf)
    flags = {"run": vars(ppo_jax.Run()), "args": vars(args)}
    text = disk.to_json(flags)
    assert "Infinity" not in text
    (tmp_path / "args.json").write_text(text)
    assert read_flags(tmp_path, ppo_jax.Run, ppo_jax.Args)[1] == args


def test_a_compiled_run_that_is_saved_before_its_first_episode_ends_goes_on():
    """Returns that do not exist yet are null, which all readers of JSON know."""
    args = ppo_jax.Args(total_timesteps=16, num_steps=4, num_minibatches=1, update_epochs=1)
    run = ppo_jax.Run(env_id="phys2d/CartPole-v1", eval_episodes=0, log_interval=16)
    _, returns, folder = ppo_jax.train(args, run)
    assert np.isnan(returns).all()
    assert disk.open_file(checkpoints.newest(folder)).about["returns"] == [None]
    again = replace(args, total_timesteps=32)
    _, returns, _ = ppo_jax.train(again, replace(run, resume=str(folder)))
    assert np.isnan(returns).all()
    assert checkpoint_steps(folder) == [16, 32]


PEAK = """
import resource, sys
import dqn_jax
args = dqn_jax.Args(total_timesteps=int(sys.argv[1]), learning_starts=50, batch_size=8,
                    buffer_size=200_000, num_envs=2)
run = dqn_jax.Run(env_id="environments:Image-v0", env_kwargs='{"shape": [40, 40, 1]}',
                  eval_episodes=0, log_interval=50, resume=sys.argv[2])
_, _, folder = dqn_jax.train(args, run)
print(folder)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.more
def test_a_resume_holds_one_replay(tmp_path):
    """Of 320 MB. The peak of a resume is near that of the training."""
    peaks = []
    folder = ""
    for total in ("100", "150"):
        command = [sys.executable, "-c", PEAK, total, folder]
        env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        *_, folder, peak = done.stdout.splitlines()
        peaks.append(int(peak))
    assert peaks[0] > 400_000
    assert peaks[1] < 1.3 * peaks[0]


def add_numbered(agent, state, numbers):
    """Adds steps of one environment that observe these numbers, with rewards of 1 and no end.

    An observation is a stack of two: 0 comes before the first number.
    """
    rows = len(numbers)
    stacks = np.stack([np.append(0, numbers[:-1]), numbers], axis=-1)
    steps = dqn_jax.Step(
        observation=jnp.asarray(stacks, jnp.float32).reshape(rows, 1, 2, 1),
        action=jnp.zeros((rows, 1), jnp.int32),
        reward=jnp.ones((rows, 1), jnp.float32),
        terminated=jnp.zeros((rows, 1), bool),
        truncated=jnp.zeros((rows, 1), bool),
        valid=jnp.ones((rows, 1), bool),
    )
    return state._replace(replay=agent.replay.add_batch(state.replay, steps))


def windows_around(agent, state, first_row, num_rows):
    """Transitions of all windows that start in these rows of the replay of one environment."""
    indices = np.arange(first_row, first_row + num_rows)
    return agent.to_transitions(agent.replay.get(state.replay, indices), None)


@pytest.mark.parametrize("n_step", [more(1), 3, more(16)])
def test_a_cut_is_a_truncation(n_step):
    """Windows up to it bootstrap from the last observation, none goes across, no stack is empty."""
    args = dqn_jax.Args(
        num_envs=1, train_frequency=1, frame_stack=2, n_step=n_step, gamma=0.5, buffer_size=100
    )
    space = gym.spaces.Box(0, 1_000, (2, 1), np.float32)
    options = replays.options(args, None, None)
    agent = dqn_jax.DQN(args, space, gym.spaces.Discrete(2), **options)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    state = add_numbered(agent, state, np.arange(1, 31))
    state = protocol.on_resume(agent, state)
    state = add_numbered(agent, state, np.arange(101, 131))

    transitions = windows_around(agent, state, first_row=10, num_rows=25)
    for i in range(25):
        # The window's newest observation in the first stack is that of row i + 11.
        number = i + 12
        row = i + 11
        assert transitions.valid[i] == (row != 29)  # which only ends the episode
        if row < 29:
            steps = min(n_step, 29 - row)
            stack = transitions.observation[i].ravel().tolist()
            last_stack = transitions.next_observation[i].ravel().tolist()
            assert stack == [number - 1, number]
            assert last_stack == [number + steps - 1, number + steps]
            assert transitions.reward[i] == sum(0.5**k for k in range(steps))
            assert transitions.discount[i] == 0.5**steps  # bootstrapped: no end
        if row == 30:  # the first of the new episode
            assert transitions.observation[i].ravel().tolist() == [0, 101]
        if row > 30:
            assert transitions.observation[i].min() > 100


def test_fewer_steps_than_were_made_change_nothing(run_main):
    args = dqn_jax.Args(**SMALL_DQN)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    before = (folder / "args.json").read_text()
    line = one_line(run_main(dqn_jax, "--resume", str(folder), "--total-timesteps", "150"))
    assert line == "error: resume: 200 steps were made, more than 150"
    assert (folder / "args.json").read_text() == before


@pytest.mark.more
def test_a_complete_run_of_whole_iterations_is_resumed_with_the_steps_that_were_asked_for():
    """100 steps are two iterations of 64, so that 128 were made."""
    args = ppo_jax.Args(total_timesteps=100, num_steps=16, num_minibatches=1, update_epochs=1)
    run = dict(env_id="environments:Counter-v0", eval_episodes=0)
    _, returns, folder = ppo_jax.train(args, ppo_jax.Run(**run))
    _, again, _ = ppo_jax.train(args, ppo_jax.Run(resume=str(folder), **run))
    np.testing.assert_array_equal(again, returns)


@pytest.mark.slow
def test_the_second_ctrl_c_ends_the_process(tmp_path):
    """Where the first waits for an environment that hangs."""
    code = """
import gymnasium as gym, time, environments
class Hanging(environments.Counter):
    def step(self, action):
        print("hangs", flush=True)
        time.sleep(1000)
gym.register("Hanging-v0", Hanging)
import dqn_jax
dqn_jax.main()
"""
    process = start_python(tmp_path, "-c", code, "--env-id", "Hanging-v0")
    assert process.stdout.readline().endswith(": 1 x Hanging-v0, cpu\n")
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


class Diverging(Chain):
    def reward(self, state, action, next_state, rng, params=None):
        return jnp.float32(3e38)


def make_diverging(**kwargs):
    return FunctionalJaxEnv(Diverging(), metadata={"render_modes": []}, **kwargs)


gym.register("Diverging-v0", make_diverging, max_episode_steps=9, disable_env_checker=True)


def test_compiled_training_that_diverges_leaves_the_last_good_checkpoint(run_main):
    """The loss is infinite: the first gradient step is in the log interval that ends at step 60."""
    flags = "--env-id Diverging-v0 --learning-starts 50 --batch-size 8 --buffer-size 100"
    more = "--num-seeds 2 --log-interval 20 --checkpoint-interval 20 --eval-interval 20"
    code, _, err = run_main(dqn_jax, *flags.split(), *more.split())
    (folder,) = Path("runs").absolute().iterdir()
    said = f"{folder}: diverged, parameters are not finite: seed 1, between steps 40 and 60"
    assert err == f"error: {said}\n"
    assert code == 1

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["20", "40"]
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    like = make_trainer(dqn_jax, args, run).init()
    step, training, _ = checkpoints.Checkpoints(folder).restore(like)
    assert step == 40
    for leaf in jax.tree.leaves(training.agent.params):
        assert np.isfinite(leaf).all()
    assert not (
        folder / "best.safetensors"
    ).exists()  # a score that is NaN is that of no best agent


def folder_with_flags():
    """That of a run of DQN on CartPole in which nothing was saved."""
    folder = Path("run").absolute()
    folder.mkdir()
    flags = {"run": vars(dqn_jax.Run()), "args": vars(dqn_jax.Args())}
    (folder / "args.json").write_text(json.dumps(flags))
    return str(folder)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--env-id", "Acrobot-v1", "env_id must stay"),
        ("--env-kwargs", '{"sutton_barto_reward": true}', "env_kwargs must stay"),
        ("--seed", "2", "seed must stay 1, not become 2"),
        ("--num-seeds", "2", "num_seeds"),
        ("--gamma", "0.5", "gamma must stay 0.99, not become 0.5"),
        ("--buffer-size", "200", "buffer_size must stay 10000, not become 200"),
    ],
)
def test_what_is_part_of_the_training_stays_at_a_resume(flag, value, words, run_main):
    folder = folder_with_flags()
    before = Path(folder, "args.json").read_text()
    assert words in one_line(run_main(dqn_jax, "--resume", folder, flag, value))
    assert Path(folder, "args.json").read_text() == before


def test_a_resumed_run_keeps_its_priorities():
    """Cutting its episodes off changes none."""
    args = per_dqn_jax.Args(**SMALL_DQN)
    run = per_dqn_jax.Run(**COUNTER)
    before, _, folder = per_dqn_jax.train(args, run)
    agent = make_agent(per_dqn_jax, args, run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    _, state, _ = checkpoints.Checkpoints(folder).restore(state)
    after = protocol.on_resume(agent, state)
    assert len(np.unique(np.concatenate(jax.tree.leaves(before.replay.tree), axis=None))) > 10
    jax.tree.map(np.testing.assert_array_equal, after.replay.tree, before.replay.tree)
    assert after.replay.max_priority == before.replay.max_priority
    assert after.replay.size == before.replay.size == 100
