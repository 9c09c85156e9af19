"""Environments in processes of their own: --vectorization async."""

import os
import signal
from types import SimpleNamespace

import gymnasium as gym
import pytest
from helpers import ROOT, read_events, start_python

import dqn_jax
from cleanreplay import experiment


@pytest.mark.parametrize(
    ("training", "how"), [(True, ("async", {"context": "forkserver"})), (False, ("sync", None))]
)
def test_only_environments_that_train_have_processes(training, how, monkeypatch):
    """Processes of an evaluation would start slowly, and a fork of JAX can hang."""
    made = []
    make_vec = gym.make_vec

    def make(*given, vectorization_mode, vector_kwargs, **named):
        made.append((vectorization_mode, vector_kwargs))
        return make_vec(*given, vectorization_mode="sync", **named)

    monkeypatch.setattr(gym, "make_vec", make)
    run = dqn_jax.Run(env_id="CartPole-v1", vectorization="async")
    dqn_jax.make_envs(dqn_jax.Args(), run, 4, training=training).close()

    assert made == [how]


def start(folder, flags):
    """Starts dqn_jax.py as a program, with two environments in processes of their own."""
    small = "--num-envs 2 --learning-starts 50 --batch-size 8 --log-interval 20 --eval-episodes 0"
    program = [str(ROOT / "dqn_jax.py"), "--vectorization", "async"]
    # A group of processes of its own, as a terminal makes it.
    return start_python(folder, *program, *small.split(), *flags.split(), start_new_session=True)


@pytest.mark.slow
def test_signals_to_all_processes_end_a_run_with_a_checkpoint(tmp_path):
    """A terminal and SLURM also send signals to the processes of the environments."""
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


@pytest.mark.parametrize(
    ("error", "notes"), [(EOFError(), ["killed: second"]), (ValueError("an info"), [])]
)
def test_an_error_of_a_step_ends_the_processes(error, notes):
    """Otherwise `close` would wait for their answers forever."""
    killed = []
    processes = [
        SimpleNamespace(
            name=name,
            is_alive=lambda name=name: name == "first",
            join=lambda timeout: None,
            kill=lambda name=name: killed.append(name),
        )
        for name in ("first", "second")
    ]
    envs = SimpleNamespace(unwrapped=SimpleNamespace(processes=processes, closed=False))
    experiment.end_processes(envs, error)

    assert killed == ["first", "second"]
    assert envs.unwrapped.closed
    assert getattr(error, "__notes__", []) == notes
