"""Checkpoints and runs that go on; what is left of a run that is stopped or fails."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import environments  # noqa: F401  registers the environments
import jax
import numpy as np
import pytest
from conftest import slow
from events import ROOT, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax

DQN_FLAGS = dict(learning_starts=100, batch_size=8, buffer_size=200, n_step=2)
COMPILED = [
    slow(dqn_jax, DQN_FLAGS),  # what PER resumes has all of it
    (per_dqn_jax, DQN_FLAGS),
    (ppo_jax, dict(num_steps=16, num_minibatches=1, update_epochs=1)),
]


def assert_equal_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("module", "flags"), COMPILED, ids=["dqn", "per_dqn", "ppo"])
def test_a_compiled_run_goes_on_bit_for_bit(module, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = dict(env_id="environments:Chain-v0", num_seeds=2, log_interval=80, eval_episodes=2)
    # The schedules depend on total_timesteps, so both halves have that of the whole.
    args = module.Args(total_timesteps=640, num_envs=4, **flags)
    whole, _, folder = module.train(args, module.Run(exp_name="whole", **run))
    points = []

    def stop():
        points.append(0)
        return len(points) >= 4

    _, _, half = module.train(args, module.Run(exp_name="half", **run), stop)
    (step,) = [int(path.name) for path in (half / "checkpoints").iterdir()]
    assert 0 < step < 640
    resumed, _, same = module.train(args, module.Run(exp_name="half", resume=str(half), **run))
    assert same == half
    assert_equal_trees(whole, resumed)
    for name in (".", "seed_2"):
        expected, got = read_events(folder / name)[0], read_events(half / name)[0]
        assert expected.keys() == got.keys()
        for tag in expected.keys() - {"charts/SPS"}:
            assert got[tag] == expected[tag], tag


def test_an_ordinary_run_goes_on_and_later_points_are_dropped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = dict(num_envs=2, learning_starts=50, batch_size=8, buffer_size=400, n_step=3)
    run = dict(env_id="environments:Counter-v0", log_interval=20, checkpoint_interval=100)
    args = dqn_jax.Args(total_timesteps=200, **flags)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=0, **run))
    # As if it had been killed at step 180: the newest checkpoint is that of step 100.
    (folder / "checkpoints" / "200").rename(tmp_path / "lost")
    longer = dqn_jax.Args(total_timesteps=300, **flags)
    training, _, same = dqn_jax.train(longer, dqn_jax.Run(resume=str(folder), **run))
    assert same == folder
    scalars, _ = read_events(folder)
    assert [step for step, _ in scalars["charts/epsilon"]] == list(range(20, 301, 20))
    epsilon = [value for step, value in scalars["charts/epsilon"] if step > 100]
    expected = np.interp(np.arange(110, 300, 20), [0, 150], [1.0, 0.05])
    np.testing.assert_allclose(epsilon, expected, rtol=1e-6)
    # A gradient step in each iteration of 10 steps that starts at 50 or later.
    assert int(training.agent.updates) == 25
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [200, 300]
    saved = json.loads((folder / "args.json").read_text())
    assert saved["args"]["total_timesteps"] == 300


@pytest.mark.parametrize("ends", ["in no row", "in the last row", "in the row before"])
def test_no_window_goes_on_past_the_cut(ends):
    """The environments start anew: the last row before it only resets, which no window starts at.

    The row before that one cuts its episode off, if it went on.
    """
    args = dqn_jax.Args(total_timesteps=200, learning_starts=50, batch_size=8, n_step=3)
    run = dqn_jax.Run(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)
    alg, loop = dqn_jax.set_up(args, run)
    training = loop.start()
    steps = jax.tree.map(lambda x: np.zeros((10, 1, *x.shape), x.dtype), alg.example)
    steps = steps._replace(
        is_step=np.ones((10, 1), bool),
        observation=np.arange(30, dtype=np.float32).reshape(10, 1, 3),
    )
    if ends == "in the last row":
        steps.terminated[9] = True
    if ends == "in the row before":
        steps.terminated[8] = True
        steps.is_step[9] = False
    state = training.agent._replace(replay=alg.replay.add_batch(training.agent.replay, steps))
    restarted = alg.restart(state)
    storage = jax.tree.map(lambda x: np.asarray(x)[:12, 0], restarted.replay.storage)
    np.testing.assert_array_equal(storage.is_step, [True] * 9 + [False] * 3)
    is_cut = ends != "in the row before"
    np.testing.assert_array_equal(storage.truncated, [False] * 8 + [is_cut] + [False] * 3)
    np.testing.assert_array_equal(storage.terminated[:9], steps.terminated[:9, 0])
    np.testing.assert_array_equal(storage.observation[:10], steps.observation[:, 0])
    # All windows that start before the last row count, and none goes past the cut.
    anew = steps._replace(observation=steps.observation + 1_000)
    replay = alg.replay.add_batch(restarted.replay, anew)
    batch = alg.fold(alg.replay.get(replay, np.arange(10)))
    np.testing.assert_array_equal(batch.is_valid, [True] * 9 + [False])
    assert batch.next_observation[:9].max() < 1_000
    last = [steps.observation[min(row + 3, 9), 0] for row in range(9)]
    np.testing.assert_array_equal(batch.next_observation[:9], last)
    lengths = [min(3, 9 - row) for row in range(9)]
    discount = [args.gamma**length for length in lengths]
    if not is_cut:
        discount[6:] = [0.0] * 3
    np.testing.assert_allclose(batch.discount[:9], discount, rtol=1e-6)


SMALL = "--learning-starts 50 --batch-size 8 --buffer-size 100 --log-interval 20".split()  # noqa: SIM905


def test_a_complete_run_is_evaluated_and_flags_are_those_of_the_folder(run_main):
    code, out, _ = run_main(dqn_jax, "--total-timesteps", "100", "--gamma", "0.5", *SMALL)
    folder = out.split()[-8].rstrip(":")
    assert code == 0
    assert "mean return of the last episodes" in out
    before = read_events(folder)[0]
    flags = json.loads(Path(folder, "args.json").read_text())
    code, out, err = run_main(dqn_jax, "--resume", folder, "--eval-episodes", "3")
    assert code == 0, err
    assert "100 steps: return" in out
    saved = json.loads(Path(folder, "args.json").read_text())
    assert saved == flags  # those that it was started with
    assert saved["args"]["gamma"] == 0.5
    assert saved["run"]["eval_episodes"] == 10
    assert saved["run"]["seed"] == 1
    after = read_events(folder)[0]
    assert after["losses/td_loss"] == before["losses/td_loss"]
    assert [step for step, _ in after["eval/episodic_return"]][-1] == 100

    code, _, err = run_main(dqn_jax, "--resume", folder, "--buffer-size", "200")
    assert code == 2
    assert err.strip() == "error: resume: only total_timesteps may change"
    code, _, err = run_main(dqn_jax, "--resume", folder, "--seed", "7")
    assert code == 2
    assert err.strip() == "error: resume: seed must stay 1"
    assert json.loads(Path(folder, "args.json").read_text()) == flags


def start(folder, *flags):
    """dqn_jax.py in a process of its own, once it has printed a line of progress."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "dqn_jax.py"), *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "steps" in process.stdout.readline()
    return process


def test_ctrl_c_keeps_a_checkpoint_of_the_last_interval(tmp_path, monkeypatch):
    process = start(tmp_path, "--total-timesteps", "20000", "--eval-episodes", "0", *SMALL)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    last, _ = read_events(folder)[0]["charts/SPS"][-1]
    assert int(checkpoint.name) == last
    monkeypatch.chdir(tmp_path)
    saved = json.loads((folder / "args.json").read_text())
    args = dqn_jax.Args(**saved["args"] | {"total_timesteps": last + 40})
    run = dqn_jax.Run(**saved["run"] | {"resume": str(folder)})
    dqn_jax.train(args, run)
    steps = [step for step, _ in read_events(folder)[0]["charts/SPS"]]
    assert steps == list(range(20, last + 41, 20))


def test_sigkill_loses_no_more_than_a_checkpoint_interval(tmp_path):
    process = start(tmp_path, "--total-timesteps", "20000", "--checkpoint-interval", "100", *SMALL)
    time.sleep(0.5)
    process.kill()
    process.communicate()
    (folder,) = (tmp_path / "runs").iterdir()
    last, _ = read_events(folder)[0]["charts/SPS"][-1]
    newest = max(int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit())
    assert last - newest <= 200  # and one of them may have been half written


def test_a_failing_environment_is_named_and_keeps_a_checkpoint(tmp_path):
    flags = "--env-id environments:Failing-v0 --num-envs 2 --total-timesteps 2000"
    done = subprocess.run(
        [sys.executable, str(ROOT / "dqn_jax.py"), *flags.split(), *SMALL],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    *_, error, last = done.stderr.strip().splitlines()
    assert error == "RuntimeError: broken"
    assert last.startswith("in environments:Failing-v0 at step ")
    step = int(last.split()[-1])
    assert 1000 <= step < 2000  # each of the two environments fails at its 500th step
    (folder,) = (tmp_path / "runs").iterdir()
    assert [p.name for p in (folder / "checkpoints").iterdir()] == [str(step)]
    assert max(x for x, _ in read_events(folder)[0]["losses/td_loss"]) == (step - 1) // 20 * 20


@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of 600 kB is mounted")
def test_a_full_disk_is_one_line_and_what_was_saved_stays(tmp_path, run_main):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mount is not allowed here")
    try:
        os.chdir(tmp_path)
        flags = ["--total-timesteps", "5000", "--checkpoint-interval", "500", "--eval-episodes"]
        code, _, err = run_main(dqn_jax, *flags, "0", *SMALL)
        assert code == 2
        (line,) = err.strip().splitlines()
        assert "no space left" in line.lower()
        (folder,) = (tmp_path / "runs").iterdir()
        newest = max(int(path.name) for path in (folder / "checkpoints").iterdir())
        assert read_events(folder)[0]["charts/SPS"][-1][0] >= newest
        assert f"--resume {folder}" in line
    finally:
        os.chdir(ROOT)
        subprocess.run(["umount", "-l", str(tmp_path)], check=False)
