"""Messages of a run: mistakes in one line, its progress, and its end."""

import json
import math
import re
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gymnasium as gym
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Given
from helpers import SMALL_DQN, edited, one_line, read_events

import dqn_jax
import ppo_jax
from cleanreplay import flags
from cleanreplay.environments import make_first
from cleanreplay.errors import NotFiniteError, UsageError
from cleanreplay.experiment import Experiment, check_rollout

# Flags of a script, and a word of the line.
MISTAKES = [
    (dqn_jax, "--env-kwargs []", "JSON"),
    (dqn_jax, "--env-kwargs {x", "'{x': Expecting"),
    (dqn_jax, '--env-kwargs {"wind":1}', "wind"),
    (dqn_jax, '--env-id environments:TakesKwargs-v0 --env-kwargs {"scale":3}', "scale"),  # native
    (dqn_jax, '--env-kwargs {"num_envs":3}', "num_envs"),
    (dqn_jax, "--env-id CartPole-v9", "`v1`"),
    (dqn_jax, "--env-id NoSuchThing-v0", "ale_py:ALE/Pong-v5"),
    (dqn_jax, "--env-id ../x:Y-v0", "../x is not the name of a module"),
    (dqn_jax, "--env-id no_such_module:Nothing-v0", "no_such_module"),
    (dqn_jax, "--env-id CartPole", "CartPole-v1"),
    (dqn_jax, "--env-id environments:CounterSameStep-v0", "NEXT_STEP"),
    (dqn_jax, "--env-id environments:Blind-v0", "no numbers"),
    (dqn_jax, "--env-id environments:VectorOnly-v0 --vectorization async", "VectorOnly-v0"),
    (dqn_jax, "--env-id environments:VectorOnly-v0 --capture-video", "capture_video"),
    (dqn_jax, "--seed=-1", "seed"),
    (dqn_jax, "--num-envs 97 --train-frequency 1000 --total-timesteps 90000", "97000"),
    (dqn_jax, "--save-experience --log-interval 9991", "10001"),
    (dqn_jax, "--num-seeds 2", "num_seeds"),
    (dqn_jax, "--env-id environments:Chain-v0 --num-devices 64", "num_devices"),
    (dqn_jax, "--env-id environments:Chain-v0 --num-seeds 3 --num-devices 2", "num_devices"),
    (dqn_jax, "--env-id environments:Chain-v0 --num-seeds 2 --save-experience", "save_experience"),
    (dqn_jax, "--resume .", "not the folder of a run"),
    (ppo_jax, '--env-id ale_py:ALE/Pong-v5 --env-kwargs {"difficulty":1}', "difficulty"),
    (dqn_jax, '--env-id ale_py:ALE/Pong-v5 --env-kwargs {"episodic_life":true}', "lives"),
    (dqn_jax, '--env-id ale_py:ALE/Pong-v5 --env-kwargs {"life_loss_info":true}', "lives"),
]


@pytest.mark.parametrize(("script", "flags", "word"), MISTAKES)
def test_a_mistake_ends_a_run_in_one_line(script, flags, word, run_main, tmp_path):
    assert word in one_line(run_main(script, *flags.split()))
    assert list(tmp_path.iterdir()) == []


def test_a_video_without_its_package_is_one_line(run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)

    assert "pip install moviepy" in one_line(run_main(dqn_jax, "--capture-video"))
    assert not Path("runs").exists()


# A flag, its limits in words, values at the limits, and values beyond them.
LIMITS = [
    ("n_atoms", "from 2 to 2**31 - 1", (2, 2**31 - 1), (1, 2**31)),
    ("num_envs", "from 1 to 2**31 - 1", [1, 2**31 - 1], [0, 2**31]),
    ("eval_max_steps", "from 1 to 2**31 - 1", [1], [0]),
    ("hidden_sizes", "from 1 to 2**31 - 1", [(1, 64)], [(64, 0)]),
    ("buffer_size", "from 1 to 2**29 - 1", [1, 2**29 - 1], [0, 2**29]),
    ("learning_starts", "from 0 to 2**31 - 1", [0, 2**31 - 1], [-1]),
    ("checkpoint_interval", "from 0 to 2**31 - 1", [0], [-1]),
    ("gamma", "from 0 to 1", [0.0, 1.0], [-0.1, 1.1]),
    ("her_fraction", "from 0 to 1", [0.0, 1.0], [1.1]),
    ("learning_rate", "0 or more", [0.0, 1e30], [-1e-9]),
    ("learning_rate", "a finite number", [], [math.nan, math.inf]),
    ("max_grad_norm", "more than 0", [1e-30], [0.0]),
    ("adam_epsilon", "more than 0", [1e-30], [0.0]),
    ("some_other_flag", "", [-1e30, math.inf], []),
]


@pytest.mark.parametrize(("name", "words", "within", "beyond"), LIMITS)
def test_a_flag_is_within_its_limits(name, words, within, beyond):
    for value in within:
        flags.check_flag(name, value, type(value))

    for value in beyond:
        text = f"{name} must be {words}, not {value}"
        with pytest.raises(UsageError, match=f"^{re.escape(text)}$"):
            flags.check_flag(name, value, type(value))


# The type of a flag, a value of another type, and one of its type.
TYPES = [
    (int, 2.0, 2),
    (bool, 1, True),
    (float, "1", 1),
    (str, {"x": 1}, "x"),
    (bool | None, "no", None),
    (bool | None, 0, False),
    (float | None, True, 0.1),
    (Literal["auto", "sync"], "process", "sync"),
]


@pytest.mark.parametrize(("expected", "wrong", "right"), TYPES, ids=str)
def test_a_flag_from_python_has_its_type(expected, wrong, right):
    flags.check_flag("my_flag", right, expected)

    with pytest.raises(UsageError, match=f"^my_flag must be .*, not {wrong!r}$"):
        flags.check_flag("my_flag", wrong, expected)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--num-envs 8e0 --total-timesteps=1e6", "--num-envs 8 --total-timesteps=1000000"),
        ("--num_envs 8.0 --seed 123456789012", "--num_envs 8 --seed 123456789012"),
        ("--learning-rate 1e0 --exp-name 1e3 --env-id=2e0 num-envs 1e3", None),
        ("--num-envs 1.5 --seed=1e-3 --n-step inf --batch-size nan --seed many", None),
    ],
)
def test_a_whole_number_in_any_form_is_an_int(given, read):
    classes = (dqn_jax.Run, dqn_jax.Args)

    assert flags.with_whole_numbers(given.split(), classes) == (read or given).split()


def write_run(run, args):
    Path("run").mkdir()
    Path("run/args.json").write_text(json.dumps({"run": run, "args": args}))


def test_flags_of_a_resumed_run_are_the_defaults(monkeypatch):
    given = {"normalize_observations": False, "target_kl": "inf", "hidden_sizes": [8, 9]}
    write_run({"seed": 3, "exp_name": "nan", "distributed": "auto"}, given | {"num_envs": 2})
    found = []
    command = "ppo_jax.py --resume run --total-timesteps 3e5 --num-envs 4"
    monkeypatch.setattr(sys, "argv", command.split())
    monkeypatch.setattr(ppo_jax, "train", lambda args, run, stop: found.extend([args, run]))
    with pytest.raises(TypeError):  # when the results are unpacked
        ppo_jax.main()

    kept = given | {"target_kl": math.inf, "hidden_sizes": (8, 9)}
    assert found[0] == ppo_jax.Args(**kept, num_envs=4, total_timesteps=300_000)
    assert found[1] == ppo_jax.Run(seed=3, exp_name="nan", resume="run")


def test_a_flag_that_the_script_does_not_have_is_named():
    write_run({"old": 1}, {"dropped": 3, "gamma": 0.5})

    with pytest.raises(UsageError, match=r"has dropped, old: .* delete them from run/args\.json$"):
        flags.read_flags("run", dqn_jax.Run, dqn_jax.Args)


@pytest.mark.parametrize("name", ["reward", "observation"])
def test_a_number_that_is_not_finite_is_named(name):
    rollout = SimpleNamespace(reward=np.zeros((4, 3)), observation=np.zeros((4, 3, 2)))
    run = dqn_jax.Run(env_id="Mine-v0")
    check_rollout(rollout, run, 100)
    getattr(rollout, name)[2, 1] = np.inf

    line = f"^Mine-v0: the {name} is not finite in environment 1 at step 106$"
    with pytest.raises(NotFiniteError, match=line):
        check_rollout(rollout, run, 100)


def large_later(env, action):
    return 1e38 if env.step_count > 200 else 1.0


gym.register("Diverging-v0", Given, kwargs={"length": -1, "reward": large_later})


def test_a_run_that_diverges_leaves_its_last_good_checkpoint(run_main):
    flags = "--env-id Diverging-v0 --learning-starts 20 --batch-size 8 --buffer-size 40"
    often = "--log-interval 20 --checkpoint-interval 20 --train-frequency 2 --eval-episodes 0"
    line = one_line(run_main(dqn_jax, *flags.split(), *often.split()), code=1)

    assert "diverged, parameters are not finite" in line
    (folder,) = Path("runs").iterdir()
    assert max(int(x.name) for x in (folder / "checkpoints").iterdir()) >= 200


def test_the_largest_counts_of_steps_begin_to_learn():
    """The target network never moves, and a signal ends the run."""
    many = dict.fromkeys(["total_timesteps", "target_network_frequency"], 2**31 - 1)
    small = SMALL_DQN | dict(learning_starts=8, train_frequency=1, gradient_steps=4)
    run = dqn_jax.Run(env_id="environments:Counter-v0", eval_episodes=0, checkpoint_interval=0)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**small | many), run, stop=["at once"])

    assert read_events(folder)[0]["charts/gradient_steps"] == [(1, 0.0)]


def test_the_memory_is_that_of_the_machine_or_of_a_job(monkeypatch, tmp_path):
    """Both versions of Linux's control groups are read. A group without a limit has `max`."""
    job = tmp_path / "slurm/job_1"
    (tmp_path / "memory").mkdir()
    job.mkdir(parents=True)
    (job / "memory.max").write_text("max\n")
    (tmp_path / "slurm/memory.max").write_text("5000\n")
    (tmp_path / "memory/memory.limit_in_bytes").write_text("3000\n")
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 100}
    monkeypatch.setattr(flags.os, "sysconf", pages.get)
    monkeypatch.setattr(flags, "CGROUPS", (tmp_path, tmp_path / "memory"))
    monkeypatch.setattr(flags, "cgroup_places", lambda: ["", "slurm/job_1"])

    assert sorted(flags.memory_limits()) == [3_000, 5_000, 409_600]


def test_a_replay_larger_than_the_memory_is_one_line(run_main, monkeypatch):
    monkeypatch.setattr(flags, "memory_limits", lambda: [10**9, 200_000_000])
    line = one_line(run_main(dqn_jax, "--buffer-size", "10000000"))

    assert line.endswith("buffer_size: replay, data and networks need 0.3 GB, of 0.2 GB in all")
    assert not Path("runs").exists()


def test_a_replay_larger_than_a_gpu_names_its_variables(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 4 * 10**9})
    monkeypatch.setattr(flags.jax, "local_devices", lambda: [gpu])
    flags.check_memory(lambda: jnp.zeros(10**9))

    need = "need 4.4 GB, of 4.0 GB in all.*XLA_PYTHON_CLIENT_MEM_FRACTION.*PREALLOCATE"
    with pytest.raises(UsageError, match=need):
        flags.check_memory(lambda: jnp.zeros(11 * 10**8))


RAW, GAME = "ale_py:BreakoutNoFrameskip-v4", "ale_py:ALE/Breakout-v5"


@pytest.mark.parametrize(("env_id", "how"), [(RAW, "auto"), (GAME, "sync"), (GAME, "auto")])
def test_raw_frames_of_atari_give_a_notice(env_id, how, capsys):
    run = dqn_jax.Run(env_id=env_id, vectorization=how)
    make_first(run, partial(dqn_jax.make_envs, dqn_jax.Args(), run)).close()

    is_raw = (env_id, how) != (GAME, "auto")
    assert (f"{GAME} with --vectorization auto" in capsys.readouterr().out) == is_raw


def test_a_process_of_environments_does_not_train(monkeypatch, capsys):
    monkeypatch.setattr(flags.current_process(), "_inheriting", True, raising=False)

    with pytest.raises(SystemExit, match="1"):
        flags.check_process()
    assert "imports this file" in capsys.readouterr().err


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError()])
def test_processes_that_end_at_their_start_are_reported(error):
    begun = SimpleNamespace(on_exit=ExitStack(), log=SimpleNamespace(writer=None))
    begun.run = dqn_jax.Run(vectorization="async")

    with pytest.raises(UsageError, match=r"^vectorization: the processes"):
        Experiment.__exit__(begun, type(error), error, None)
    begun.run = dqn_jax.Run()
    Experiment.__exit__(begun, type(error), error, None)


def test_annotations_that_are_texts_are_read(run_main):
    copy = edited(
        dqn_jax, ("import importlib\n", "from __future__ import annotations\nimport importlib\n")
    )
    of_chain = ["--env-id", "environments:Chain-v0", "--learning-starts"]

    assert "learning_starts must be" in one_line(run_main(copy, *of_chain, "5e9"))
    assert "gamma must be" in one_line(run_main(copy, *of_chain, "5e2", "--sweep", "gamma=2"))


def test_a_resume_accepts_the_same_sweep_written_differently():
    run = dqn_jax.Run(sweep=("learning_rate=1e-3,0.1",), resume="x")
    about = {"run": vars(replace(run, resume="")), "args": vars(dqn_jax.Args())}
    Path("x").mkdir()
    Path("x/args.json").write_text(json.dumps(about))

    flags.check_resume(dqn_jax.Args(), replace(run, sweep=("learning_rate=0.001,1e-1",)))
    with pytest.raises(UsageError, match="sweep must stay"):
        flags.check_resume(dqn_jax.Args(), replace(run, sweep=("learning_rate=0.002,1e-1",)))
