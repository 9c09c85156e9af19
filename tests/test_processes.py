"""Compiled training in two processes, which talk to each other as those of two machines do."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import asdict, replace

import environments  # noqa: F401  registers the environments
import jax
import numpy as np
import pytest
from helpers import ROOT, make_trainer, more, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
from cleanreplay import checkpoints, read_flags


def has_name():
    """Whether this machine's name leads to it, by which processes on CPUs find each other."""
    try:
        return bool(socket.gethostbyname(socket.gethostname()))
    except OSError:
        return False


together = pytest.mark.skipif(not has_name(), reason="this machine's name has no address")
CARTPOLE = "--env-id phys2d/CartPole-v1 --num-envs 4 --log-interval 500 --eval-episodes 2"
# Flags of a short run; only then do all gradients begin, because rounding differs, and a draw by
# priority makes much of that in time.
SMALL = {
    dqn_jax: "--learning-starts 800 --batch-size 32",
    per_dqn_jax: "--learning-starts 800 --batch-size 32",
    ppo_jax: "--num-steps 25 --num-minibatches 1 --update-epochs 1",
}


def flags_of(module, more):
    return f"{CARTPOLE} {SMALL[module]} {more}".split()


def start(module, folder, flags, number):
    """That many processes of a script that train together; alone it is not told so."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = []
    for i in range(number):
        join = ["--distributed", f"{address},{number},{i}"] if number > 1 else []
        processes.append(
            subprocess.Popen(
                [sys.executable, str(ROOT / f"{module.__name__}.py"), *flags, *join],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return processes


def train(module, folder, flags, number):
    """Trains to the end: the folder of the run, and what each process printed."""
    folder.mkdir(exist_ok=True)
    processes = start(module, folder, flags, number)
    printed = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        # Threads of Gloo, by which the processes talk, print as well and break each other's lines.
        printed.append([x for x in out.splitlines() if re.search(r"waits at| steps|__", x)])
    (run,) = (folder / "runs").iterdir()
    return run, printed


def checkpoint(module, folder):
    """The newest checkpoint, as one process reads it: step, RunnerState, the returns so far."""
    run, args = read_flags(folder, module.Run, module.Args)
    like = make_trainer(module, args, run).init()
    step, training, about = checkpoints.Checkpoints(folder).restore(like)
    return step, training, about["returns"]


def assert_same_run(module, one, other, **tolerance):
    """Checkpoints and the points of all charts, but for the speed."""
    step, training, returns = checkpoint(module, one)
    other_step, other_training, other_returns = checkpoint(module, other)
    assert step == other_step
    np.testing.assert_allclose(returns, other_returns, **tolerance)
    pairs = zip(jax.tree.leaves(training), jax.tree.leaves(other_training), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, **tolerance)
    seeds = sorted(path.name for path in one.glob("seed_*"))
    assert seeds == sorted(path.name for path in other.glob("seed_*"))
    for seed in (".", *seeds):
        scalars, other_scalars = read_events(one / seed)[0], read_events(other / seed)[0]
        assert scalars.keys() == other_scalars.keys()
        for tag in scalars.keys() - {"charts/SPS"}:
            # A mean over a rollout may differ in its last bit where what is learned does not.
            np.testing.assert_allclose(
                scalars[tag],
                other_scalars[tag],
                rtol=max(tolerance["rtol"], 1e-6),
                atol=tolerance["atol"],
                err_msg=tag,
            )


BIT_FOR_BIT = dict(rtol=0, atol=0)
ROUNDED = dict(rtol=1e-3, atol=3e-4)


@together
@pytest.mark.slow
@pytest.mark.parametrize("module", [dqn_jax, ppo_jax], ids=["dqn", "ppo"])
def test_four_seeds_in_two_processes(module, tmp_path, monkeypatch):
    """They are those of one process, bit for bit, and what two saved one process goes on with."""
    flags = flags_of(module, "--num-seeds 4 --total-timesteps 1000")
    two, printed = train(module, tmp_path / "two", flags, 2)
    one, (lines,) = train(module, tmp_path / "one", flags, 1)
    assert_same_run(module, one, two, **BIT_FOR_BIT)
    assert sorted(path.name for path in two.glob("seed_*")) == ["seed_2", "seed_3", "seed_4"]
    # The first process alone prints, as one that is alone does.
    waits = [words.pop(0) for words in printed]
    for i in range(2):
        assert re.fullmatch(rf"process {i} waits at localhost:\d+ for all 2 of them", waits[i])
    assert printed[1] == []
    assert len(printed[0]) == len(lines)
    assert printed[0][-1].split(": ")[1] == lines[-1].split(": ")[1]
    # Neither the flags of a run nor its checkpoints say how many processes there were.
    saved = json.loads((two / "args.json").read_text())
    assert saved == json.loads((one / "args.json").read_text())
    for folder in (one, two):
        monkeypatch.chdir(folder.parent.parent)
        run, args = read_flags(folder, module.Run, module.Args)
        module.train(replace(args, total_timesteps=1_500), replace(run, resume=str(folder)))
    assert checkpoint(module, two)[0] == 1_500
    assert_same_run(module, one, two, **BIT_FOR_BIT)


@together
@pytest.mark.slow
@pytest.mark.parametrize("module", [dqn_jax, per_dqn_jax, ppo_jax], ids=["dqn", "per_dqn", "ppo"])
def test_one_agent_in_two_processes(module, tmp_path):
    """It is that of one process up to rounding; each process steps half of its environments."""
    flags = flags_of(module, "--total-timesteps 1000")
    two, _ = train(module, tmp_path / "two", flags, 2)
    one, _ = train(module, tmp_path / "one", flags, 1)
    assert_same_run(module, one, two, **ROUNDED)


@together
@pytest.mark.slow
def test_two_processes_go_on_with_what_one_saved(tmp_path):
    flags = flags_of(ppo_jax, "--num-seeds 2")
    folder, _ = train(ppo_jax, tmp_path, [*flags, "--total-timesteps", "500"], 1)
    more = ["--total-timesteps", "1000", "--resume", str(folder)]
    same, _ = train(ppo_jax, tmp_path, more, 2)
    assert same == folder
    assert checkpoint(ppo_jax, folder)[0] == 1_000
    assert [step for step, _ in read_events(folder)[0]["charts/SPS"]] == [500, 1_000]


@pytest.mark.slow
@together
@pytest.mark.parametrize(
    ("number", "which"),
    [(signal.SIGINT, 1), more(signal.SIGTERM, 0)],
    ids=["Ctrl-C to the second", "SIGTERM to the first"],
)
def test_a_signal_to_one_process_ends_both_with_a_checkpoint(number, which, tmp_path):
    flags = flags_of(dqn_jax, "--total-timesteps 200000 --num-seeds 2 --eval-episodes 0")
    processes = start(dqn_jax, tmp_path, flags, 2)
    first_words = ""
    while "a second" not in first_words:
        first_words = processes[0].stdout.readline()
        assert first_words, processes[0].communicate()
    processes[which].send_signal(number)
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130, err
    (folder,) = (tmp_path / "runs").iterdir()
    step, _, _ = checkpoint(dqn_jax, folder)
    assert step == read_events(folder)[0]["charts/SPS"][-1][0] < 200_000


@together
@pytest.mark.slow
def test_a_mistake_in_a_resume_ends_both_processes_in_one_line(tmp_path):
    flags = {"run": asdict(ppo_jax.Run(num_seeds=2)), "args": asdict(ppo_jax.Args())}
    (tmp_path / "args.json").write_text(json.dumps(flags))
    mistake = ["--resume", str(tmp_path), "--env-id", "phys2d/CartPole-v1"]
    for process in start(ppo_jax, tmp_path, mistake, 2):
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert err.splitlines() == [
            "error: resume: env_id must stay CartPole-v1, not become phys2d/CartPole-v1"
        ]


@pytest.mark.slow
def test_an_unreachable_coordinator_is_a_usage_error(tmp_path):
    (process,) = start(dqn_jax, tmp_path, ["--distributed", "auto"], 1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    (line,) = err.strip().splitlines()
    assert line.startswith("error: distributed: ")
    assert "coordinator_address" in line


@pytest.mark.parametrize(
    ("how", "words"),
    [("localhost:12345,2", "expected 3"), ("localhost:12345,two,0", "'two'")],
    ids=["no ID", "no number"],
)
def test_a_malformed_distributed_flag_is_a_usage_error(how, words, run_main):
    code, _, err = run_main(dqn_jax, "--distributed", how)
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: distributed: ")
    assert words in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--env-id CartPole-v1", "CartPole-v1 is not written in JAX; "),
        ("--env-id phys2d/CartPole-v1 --num-envs 2 --capture-video", "capture_video"),
        ("--env-id phys2d/CartPole-v1 --num-envs 2 --save-experience", "save_experience"),
        ("--env-id phys2d/CartPole-v1 --num-envs 3", "num_devices"),
    ],
    ids=["ordinary", "video", "experience", "odd"],
)
def test_what_two_processes_do_not_do(flags, words, run_main, monkeypatch, tmp_path):
    """Said in one line, before a folder is made."""
    monkeypatch.setattr("cleanreplay.distributed.join", lambda how: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_devices", lambda process: jax.devices()[process : process + 1])
    code, _, err = run_main(dqn_jax, "--distributed", "localhost:12345,2,0", *flags.split())
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert words in line
    assert not (tmp_path / "runs").exists()
