"""Compiled training in two processes, which communicate as on two machines."""

import json
import shutil
import signal
import socket
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from helpers import ROOT, read_events, start_python, train_compiled

import dqn_jax
import r2d2_jax
import recurrent_ppo_jax
from cleanreplay import UsageError, checkpoints, distributed


def has_name():
    """Returns whether this machine's name resolves, by which processes on CPUs find each other."""
    try:
        return bool(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False


together = pytest.mark.skipif(not has_name(), reason="this machine's name has no address")
ENV = dict(env_id="phys2d/CartPole-v1", log_interval=500)
FLAGS = dict(total_timesteps=1_000, num_envs=4)
# Learning begins late, because rounding differs, and learning amplifies the differences.
DQN = dqn_jax.Args(**FLAGS, learning_starts=450, batch_size=32, start_e=0.5, end_e=0.5)
R2D2 = r2d2_jax.Args(**FLAGS, learning_starts=490, train_frequency=100, hidden_size=8)
PPO = dict(num_steps=25, sequence_length=5, num_minibatches=1, update_epochs=1, anneal_lr=False)
PPO = recurrent_ppo_jax.Args(**FLAGS | PPO, hidden_size=8)


def free_address():
    """Finds a free address at which processes can meet."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def start_two(script, folder, *flags):
    address = free_address()
    program = [str(ROOT / f"{script.__name__}.py"), *flags, "--distributed"]
    return [start_python(folder, *program, f"{address},2,{i}") for i in range(2)]


@together
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "args", "num_seeds", "rtol", "atol"),
    [
        (dqn_jax, DQN, 4, 0, 0),  # two agents in each
        (r2d2_jax, R2D2, 1, 1e-3, 3e-4),  # two environments in each
        (recurrent_ppo_jax, PPO, 1, 1e-3, 3e-4),
    ],
)
def test_two_processes_continue_a_run_as_one(script, args, num_seeds, rtol, atol, tmp_path):
    """The results are equal bit for bit, or up to rounding."""
    run = script.Run(**ENV, num_seeds=num_seeds, eval_episodes=2)
    begun = train_compiled(script, replace(args, total_timesteps=500), run, tmp_path)
    alone = shutil.copytree(begun.folder, tmp_path / "alone")
    flags = ("--total-timesteps", "1000", "--resume")
    one = start_python(tmp_path, str(ROOT / f"{script.__name__}.py"), *flags, str(alone))
    _, err = one.communicate(timeout=300)
    assert one.returncode == 0, err
    for process in start_two(script, tmp_path, *flags, str(begun.folder)):
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err

    close = partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    like = jax.tree.map(lambda x: x.copy(), begun.runner)
    step, runner, about = checkpoints.Checkpoints(begun.folder).restore(begun.runner)
    _, expected, about_one = checkpoints.Checkpoints(alone).restore(like)
    assert step == 1_000
    jax.tree.map(close, runner, expected)
    close(about["returns"], about_one["returns"])
    (scalars, _), (expected, _) = (read_events(folder) for folder in (begun.folder, alone))
    for tag in ("eval/episodic_return", "charts/episodic_return"):
        close(scalars[tag], expected[tag])


@together
@pytest.mark.slow
def test_a_signal_to_the_second_process_ends_both(tmp_path):
    """They write a checkpoint. The saved flags do not have the number of processes."""
    flags = "--env-id phys2d/CartPole-v1 --num-envs 4 --total-timesteps 200000 --num-seeds 2"
    processes = start_two(dqn_jax, tmp_path, *flags.split(), "--eval-episodes", "0")
    line = ""
    while "a second" not in line:
        line = processes[0].stdout.readline()
        assert line, processes[0].communicate()
    processes[1].send_signal(signal.SIGINT)
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err

    (folder,) = (tmp_path / "runs").iterdir()
    (step,) = checkpoints.steps_in(folder)
    assert step == read_events(folder)[0]["charts/SPS"][-1][0] < 200_000
    assert json.loads((folder / "args.json").read_text())["run"]["distributed"] == ""


def test_a_single_process_decides_alone():
    assert distributed.any_process(True)
    assert not distributed.any_process(False)
    assert distributed.of_first(lambda: "folder") == "folder"


def test_all_processes_get_what_the_first_one_returns(monkeypatch):
    def fail():
        raise UsageError("no folder")

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(distributed.multihost_utils, "broadcast_one_to_all", lambda x: x)

    assert distributed.of_first(lambda: {"folder": 1}) == {"folder": 1}
    with pytest.raises(UsageError, match="no folder"):
        distributed.of_first(fail)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--env-id phys2d/CartPole-v1 --num-envs 2 --capture-video", "capture_video"),
        ("--env-id phys2d/CartPole-v1 --num-envs 3", "num_devices"),
    ],
)
def test_what_two_processes_cannot_do_is_reported(flags, word, run_main, monkeypatch, tmp_path):
    monkeypatch.setattr("cleanreplay.distributed.join", lambda how: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_devices", lambda process: jax.devices()[process : process + 1])
    code, _, err = run_main(dqn_jax, "--distributed", "localhost:12345,2,0", *flags.split())

    (line,) = err.strip().splitlines()
    assert code == 2
    assert word in line
    assert not (tmp_path / "runs").exists()
