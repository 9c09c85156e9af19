"""What a run says: a mistake in one line, where it stands, and how it ends."""

import json
import os
import re
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Counter
from gymnasium.spaces import Box
from helpers import COUNTER, ROOT, SMALL_DQN, make_agent, more, one_line, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import sac_jax
from cleanreplay import checkpoints, flags, read_flags
from cleanreplay.environments import make_first


class Mistaken(Counter):
    def __init__(self):
        {}["lenght"]


class WithoutFile(Counter):
    def step(self, action):
        Path("level.xml").read_text()


class WholeActions(Counter):
    action_space = Box(0, 5, (2,), np.int64)


gym.register("Mistaken-v0", Mistaken)
gym.register("WithoutFile-v0", WithoutFile)
gym.register("WholeActions-v0", WholeActions)


def test_a_mistake_in_an_environment_keeps_its_traceback():
    with pytest.raises(KeyError, match="lenght"):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(env_id="Mistaken-v0"))


def test_a_missing_file_of_an_environment_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo_jax.py", "--env-id", "WithoutFile-v0"])
    with pytest.raises(FileNotFoundError, match=r"level\.xml") as caught:
        ppo_jax.main()
    assert caught.value.__notes__[0].startswith("in WithoutFile-v0 at step 0 of /")


def test_whole_numbers_as_continuous_actions_are_a_mistake(run_main):
    assert "a Box of floats, not" in one_line(run_main(ppo_jax, "--env-id", "WholeActions-v0"))


def test_a_login_that_is_missing_is_one_line(run_main, monkeypatch):
    class LoginError(Exception):
        pass

    def init(**_):
        raise LoginError("use `wandb login`")

    fake = types.SimpleNamespace(Error=LoginError, init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert one_line(run_main(ppo_jax, "--track")) == "error: track: use `wandb login`"
    assert not Path("runs").exists()


class Endless(Counter):
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}


gym.register("GoesOn-v0", Endless)


def test_before_an_episode_ends_the_return_is_nan(run_main):
    flags = "--total-timesteps 200 --learning-starts 8 --batch-size 8 --eval-episodes 0"
    _, out, _ = run_main(dqn_jax, *flags.split(), "--env-id", "GoesOn-v0")
    assert out.endswith(": mean return of the last episodes nan\n")


def test_the_last_lines_say_which_seed_has_which_return(run_main):
    small = "--num-envs 4 --num-steps 8 --num-minibatches 1 --update-epochs 1 --total-timesteps 64"
    more = "--env-id environments:Chain-v0 --num-seeds 3 --seed 7 --eval-episodes 0"
    _, out, _ = run_main(ppo_jax, *small.split(), *more.split(), "--log-interval", "64")
    *_, first, second, third, mean = out.strip().splitlines()
    returns = []
    for seed, line in zip((7, 8, 9), (first, second, third), strict=True):
        start, _, number = line.rpartition(" ")
        assert start == f"seed {seed}: mean return of the last episodes"
        returns.append(float(number))
    assert float(mean.rpartition(" ")[2]) == pytest.approx(np.mean(returns), abs=0.01)


class NotFinite(Counter):
    """After 200 steps a reward, an observation or a parameter is not finite."""

    steps: list = []  # noqa: RUF012

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.steps.append(action)
        is_bad = len(self.steps) > 200
        if is_bad and self.what == "reward":
            reward = np.nan
        if is_bad and self.what == "no reward":
            reward = None
        if is_bad and self.what == "observation":
            observation = observation + np.inf
        if is_bad and self.what == "parameters":
            reward = 1e38  # whose square is infinite
        return observation, reward, *rest


gym.register("NotFinite-v0", NotFinite, disable_env_checker=True)


@pytest.mark.parametrize("what", ["reward", "no reward", "observation", "parameters"])
def test_numbers_that_are_not_finite_are_named_and_leave_the_last_good_checkpoint(what, run_main):
    NotFinite.steps.clear()
    flags = "--learning-starts 20 --batch-size 8 --buffer-size 40 --train-frequency 2"
    more = "--env-id NotFinite-v0 --log-interval 20 --checkpoint-interval 20 --eval-episodes 0"
    kwargs = f'{{"what": "{what}"}}'
    result = run_main(dqn_jax, *flags.split(), *more.split(), "--env-kwargs", kwargs)
    line = one_line(result, code=1)
    if what == "parameters":
        assert "diverged, parameters are not finite" in line
    else:
        # 200 steps, and a row for each reset.
        start, step = line.rsplit(" ", 1)
        name = what.removeprefix("no ")
        assert start == f"error: NotFinite-v0: the {name} is not finite in environment 0 at step"
        assert 230 < int(step) < 270
    (folder,) = Path("runs").iterdir()
    run, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    agent = make_agent(dqn_jax, args, run)
    init = jax.jit(agent.init)
    step, state, _ = checkpoints.Checkpoints(folder).restore(init(jax.random.PRNGKey(0)))
    assert step >= 220
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


@pytest.mark.parametrize("env_id", ["NoSuch/Thing-v0", "NoSuchThing-v0"])
def test_an_environment_that_is_not_registered_has_a_hint_at_its_module(env_id, run_main):
    line = one_line(run_main(dqn_jax, "--env-id", env_id))
    assert line.startswith(f"error: --env-id {env_id}: ")
    assert line.endswith(" --env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module")


@pytest.mark.parametrize(("flag", "part"), [("--track", "wandb"), ("--capture-video", "moviepy")])
def test_a_package_that_is_missing_is_named_in_one_line(
    flag, part, run_main, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, part, None)
    assert f"pip install {part}" in one_line(run_main(dqn_jax, flag))
    assert list(tmp_path.iterdir()) == []


# Flags of dqn_jax.py, and what the line says.
MISTAKES = [
    ("--env-kwargs []", "--env-kwargs '[]': not a JSON object"),
    ("--env-kwargs {x", "--env-id CartPole-v1 --env-kwargs '{x': Expecting property name"),
    ('--env-kwargs {"wind":1}', "wind"),
    ('--env-id environments:TakesKwargs-v0 --env-kwargs {"scale":3}', "scale"),  # the native one
    ("--env-id CartPole-v9", "`v1`"),
    ('--env-kwargs {"num_envs":3}', "num_envs"),
    ("--env-id ../x:Y-v0", "../x is not the name of a module"),
    ("--env-id no_such_module:Nothing-v0", "No module named 'no_such_module'"),
    ("--env-id Pendulum-v1", "DQN takes Discrete actions, not Box"),
    ("--env-id environments:Answers-v0", ": try ppo_jax.py"),
    ("--env-id environments:CounterSameStep-v0", "NEXT_STEP"),
    ("--env-id environments:Blind-v0", "the observations or actions of the environment have no"),
    ("--env-id environments:VectorOnly-v0 --vectorization async", "VectorOnly-v0"),
    ("--learning-starts 600000", "learning_starts must be from batch_size to total_timesteps - 1"),
    ("--learning-starts 100", "learning_starts must be from batch_size to total_timesteps - 1"),
    ("--num-envs 0", "num_envs must be from 1 to 2**31 - 1, not 0"),
    ("--frame-stack 0", "frame_stack must be from 1 to"),
    ("--train-frequency 0", "train_frequency must be from 1 to"),
    ("--n-step 0", "n_step must be from 1 to"),
    ("--log-interval=-1", "log_interval must be from 1 to"),
    ("--eval-interval 0", "eval_interval must be from 1 to"),
    ("--checkpoint-interval=-1", "checkpoint_interval must be from 0 to"),
    ("--hidden-sizes 64 0", "hidden_sizes must be from 1 to"),
    ("--eval-episodes=-1", "eval_episodes must be from 0 to"),
    ("--seed=-1", "seed must be from 0 to"),
    ("--total-timesteps 2147483648", "total_timesteps must be from 1 to 2**31 - 1"),
    ("--buffer-size 536870912", "buffer_size must be from 1 to 2**29 - 1"),
    ("--learning-rate=-1", "learning_rate must be 0 or more, not -1.0"),
    ("--learning-rate nan", "learning_rate must be a finite number, not nan"),
    ("--adam-epsilon 0", "adam_epsilon must be more than 0, not 0.0"),
    ("--gamma 1.5", "gamma must be from 0 to 1, not 1.5"),
    ("--start-e 2", "start_e must be from 0 to 1, not 2.0"),
    (
        "--num-envs 97 --train-frequency 1000 --total-timesteps 1500 --learning-starts 1000",
        "total_timesteps must be 97000 or more: an iteration has 97000 steps",
    ),
    ("--save-experience --log-interval 20000", "buffer_size must be >= 20010"),
    ("--num-devices 2", "num_devices"),
    ("--distributed auto", "distributed"),
    (
        "--num-seeds 2",
        "num_seeds, sweep, num_devices, distributed: CartPole-v1 is not written in JAX; "
        "start a run for each agent instead, see docs/scale.md",
    ),
    ("--env-id environments:ChainWrapped-v0 --num-seeds 2", "num_seeds"),
    ("--env-id environments:Chain-v0 --num-devices 64", "num_devices"),
    ("--env-id environments:Chain-v0 --num-seeds 3 --num-devices 2", "num_devices"),
    ("--env-id environments:Chain-v0 --num-seeds 2 --save-experience", "save_experience"),
    ("--distributed localhost", "distributed"),
    ("--distributed localhost:1,two,0", "distributed"),
    ("--resume .", "error: . is not the folder of a run"),
    ("--env-id environments:VectorOnly-v0 --capture-video", "cannot record a video"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2_and_no_folder(flags, message, run_main, tmp_path):
    assert message in one_line(run_main(dqn_jax, *flags.split()))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", [ppo_jax, r2d2_jax])
def test_a_gradient_of_norm_0_is_refused(script, run_main):
    line = one_line(run_main(script, "--max-grad-norm", "0"))
    assert line == "error: max_grad_norm must be more than 0, not 0.0"


@pytest.mark.parametrize("script", [dqn_jax, more(per_dqn_jax), more(sac_jax)])
def test_the_largest_counts_of_steps_begin_to_learn(script):
    """A target network that never moves, and a run that a signal ends."""
    largest = dict(total_timesteps=2**31 - 1, target_network_frequency=2**31 - 1)
    small = dict(learning_starts=8, batch_size=8, buffer_size=100, train_frequency=1)
    env_id = "Pendulum-v1" if script is sac_jax else "environments:Counter-v0"
    run = script.Run(env_id=env_id, eval_episodes=0, checkpoint_interval=0)
    args = script.Args(**largest, **small, gradient_steps=4)
    _, _, folder = script.train(args, run, stop=["at once"])
    assert read_events(folder)[0]["charts/gradient_steps"] == [(1, 0.0)]


@pytest.mark.parametrize(
    ("args", "run", "message"),
    [
        (dict(num_envs=2.0), {}, "num_envs must be of type int, not 2.0"),
        (dict(double_q=1), {}, "double_q must be of type bool, not 1"),
        ({}, dict(env_kwargs={"x": 1}), "env_kwargs must be of type str, not {'x': 1}"),
        (
            {},
            dict(vectorization="process"),
            "vectorization must be one of auto, sync, async, not 'process'",
        ),
    ],
)
def test_a_value_of_another_type_from_python_is_an_error(args, run, message):
    with pytest.raises(dqn_jax.UsageError, match=re.escape(message)):
        dqn_jax.train(dqn_jax.Args(**args), dqn_jax.Run(**run))


@pytest.mark.parametrize("value", ["no", 0, 1.0])
def test_what_is_yes_no_or_by_default_is_no_other_value(value):
    args = ppo_jax.Args(normalize_observations=value)
    message = "normalize_observations must be of type bool, not"
    with pytest.raises(dqn_jax.UsageError, match=message):
        ppo_jax.train(args, ppo_jax.Run())


@pytest.mark.parametrize("value", [None, True, False])
def test_what_is_yes_no_or_by_default_is_kept_by_a_resume(value, run_main):
    flags = ["--total-timesteps", "64", "--num-steps", "8", "--eval-episodes", "0"]
    code, out, err = run_main(ppo_jax, *flags, "--normalize-observations", str(value))
    assert code == 0, err
    folder = out.splitlines()[-1].partition(": mean")[0]

    _, args = read_flags(folder, ppo_jax.Run, ppo_jax.Args)
    assert args.normalize_observations is value


@pytest.mark.parametrize("form", ["--num-envs 8e0", "--num-envs=8e0", "--num_envs 8.0"])
def test_a_whole_number_in_any_form_is_one_for_a_flag_that_is_an_int(form, monkeypatch):
    flags = parsed(
        monkeypatch, *form.split(), "--total-timesteps", "1e6", "--learning-rate", "1e-3"
    )
    run, args = flags
    assert (args.num_envs, args.total_timesteps, args.learning_rate) == (8, 1_000_000, 1e-3)
    assert type(args.num_envs) is type(args.total_timesteps) is int


def test_a_whole_number_in_any_form_is_one_at_a_resume(monkeypatch):
    run = dqn_jax.Run(**COUNTER, checkpoint_interval=100)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    _, args = parsed(monkeypatch, "--resume", str(folder), "--total-timesteps", "3e2")
    assert args == dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300))


def test_a_text_that_looks_like_a_number_stays_the_same(monkeypatch):
    run, args = parsed(monkeypatch, "--exp-name", "1e3", "--env-id=2e0", "--seed", "123456789012")
    assert (run.exp_name, run.env_id, run.seed) == ("1e3", "2e0", 123456789012)


@pytest.mark.parametrize("number", ["1.5", "1e-3", "inf", "nan", "many"])
def test_a_number_that_is_not_whole_is_a_mistake_for_a_flag_that_is_an_int(number, run_main):
    code, _, err = run_main(dqn_jax, "--num-envs", number)
    assert code == 2
    assert "--num-envs" in err
    assert number in err


def parsed(monkeypatch, *flags):
    """The flags that `main` of dqn_jax reads from this command line."""
    found = []
    monkeypatch.setattr(sys, "argv", ["dqn_jax.py", *flags])
    monkeypatch.setattr(dqn_jax, "train", lambda args, run, stop: found.extend([run, args]))
    with pytest.raises(TypeError):  # where the results are unpacked
        dqn_jax.main()
    return found


def test_a_flag_that_the_script_has_dropped_can_be_deleted_from_the_folder():
    run = dqn_jax.Run(**COUNTER)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    file = folder / "args.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps(saved | {"args": saved["args"] | {"dropped": 3}}))
    said = "which has dropped: if this script had the flags once, delete them from "
    with pytest.raises(dqn_jax.UsageError, match=f"{said}{file}$"):
        read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    file.write_text(json.dumps(saved))
    _, args = read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    longer = replace(args, total_timesteps=300)
    state, _, _ = dqn_jax.train(longer, replace(run, resume=str(folder)))
    assert state.replay.cursor > 0


UNGUARDED = """
import dqn_jax
args = dqn_jax.Args(num_envs=2, total_timesteps=400, learning_starts=100, batch_size=8)
dqn_jax.train(args, dqn_jax.Run(vectorization="async", eval_episodes=0))
"""


@pytest.mark.slow
def test_a_file_that_its_own_processes_would_run_again_is_told_how_to_call_train(tmp_path):
    """Nothing hangs, and no process shows a traceback."""
    (tmp_path / "mine.py").write_text(UNGUARDED)
    done = run_python("mine.py")
    assert done.returncode == 1
    mistake = "cleanreplay.errors.UsageError: vectorization: the processes of the"
    (line,) = [x for x in done.stderr.splitlines() if x.startswith(mistake)]
    how = 'call `train` there under `if __name__ == "__main__":`'
    assert line.endswith(how)
    own = "each process of the environments imports this file: "
    assert done.stderr.count(own) == 2
    assert done.stderr.count("Traceback") == 2  # of the main process: the mistake and its cause


@pytest.mark.slow
def test_a_pipe_that_is_closed_while_the_help_is_printed_shows_no_traceback():
    command = f"{sys.executable} {dqn_jax.__file__} --help | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("usage: ")
    assert "dqn_jax.py [-h]" in done.stdout
    assert done.stderr == ""


def run_python(*command):
    """The result of a program in Python."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}"}
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment,
    )


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_replay_larger_than_the_memory_of_its_container_is_an_error(
    name, run_main, monkeypatch, tmp_path
):
    """In either version of Linux's control groups, of which one may have no limit."""
    group = tmp_path / "cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / name).write_text("3000000\n")
    monkeypatch.setattr(flags, "CGROUPS", (group, group / "memory"))
    line = one_line(run_main(dqn_jax, "--buffer-size", "1000000"))
    assert line.endswith("replay and networks need 0.0 GB, and there are 0.0 GB")


def test_a_replay_larger_than_the_memory_of_a_job_is_an_error(monkeypatch, tmp_path):
    """As SLURM's, whose group is below that of the machine."""
    job = tmp_path / "cgroup/slurm/job_1/step_0"
    job.mkdir(parents=True)
    (tmp_path / "cgroup/slurm/job_1/memory.max").write_text("5000")
    (job / "memory.max").write_text("max")
    monkeypatch.setattr(flags, "CGROUPS", (tmp_path / "cgroup",))
    monkeypatch.setattr(flags, "cgroup_places", lambda: ["", "slurm/job_1/step_0"])
    assert min(flags.memory_limits()) == 5_000


def test_a_replay_larger_than_the_memory_of_a_gpu_is_told_of_its_variables(monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 3_000_000_000})
    monkeypatch.setattr(flags.jax, "local_devices", lambda: [gpu])
    with pytest.raises(dqn_jax.UsageError) as caught:
        flags.check_memory(lambda: jax.numpy.zeros(10**9))
    said = "buffer_size: replay and networks need 4.0 GB, and there are 3.0 GB. "
    assert str(caught.value).startswith(said)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in str(caught.value)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE=false" in str(caught.value)


def test_a_replay_larger_than_the_memory_is_an_error_before_it_is_made(run_main, monkeypatch):
    monkeypatch.setattr(flags.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 100))
    monkeypatch.setattr(flags, "CGROUPS", ())
    line = "buffer_size: replay and networks need 0.0 GB, and there are 0.0 GB"
    assert one_line(run_main(dqn_jax)) == f"error: {line}"


def test_an_observation_with_a_text_points_to_the_page_on_wrappers(run_main):
    """As that of MiniGrid without its wrapper."""
    pytest.importorskip("minigrid")
    code, _, err = run_main(dqn_jax, "--env-id", "minigrid:MiniGrid-Empty-5x5-v0")
    line = err.strip().splitlines()[-1]
    assert code == 2
    assert line.startswith("error: observations Dict(")
    assert "a wrapper must choose what the network sees, see docs/environments.md" in line


def test_keys_that_make_charts_count_lives_are_refused(run_main):
    pytest.importorskip("ale_py")
    flags = ["--env-id", "ale_py:ALE/Breakout-v5", "--env-kwargs"]
    for key in ("episodic_life", "life_loss_info"):
        _, _, err = run_main(dqn_jax, *flags, f'{{"{key}": true}}')
        assert f"with {key} charts would count lives, not games: leave it out" in err


def make_first_of(run):
    """Makes the first environment of a run."""
    make_first(run, partial(dqn_jax.make_envs, dqn_jax.Args(), run)).close()


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [("ale_py:BreakoutNoFrameskip-v4", "auto"), ("ale_py:ALE/Breakout-v5", "sync")],
)
def test_raw_frames_give_a_notice_with_the_environment_that_is_meant(env_id, vectorization, capsys):
    pytest.importorskip("ale_py")
    make_first_of(dqn_jax.Run(env_id=env_id, vectorization=vectorization))
    assert "ale_py:ALE/Breakout-v5 with --vectorization auto has" in capsys.readouterr().out
    make_first_of(dqn_jax.Run(env_id="ale_py:ALE/Breakout-v5"))
    assert capsys.readouterr().out == ""


def test_an_argument_that_the_vector_version_does_not_take_is_a_mistake(run_main):
    pytest.importorskip("ale_py")
    pong = ["--env-id", "ale_py:ALE/Pong-v5", "--env-kwargs", '{"difficulty": 1}']
    assert "difficulty" in one_line(run_main(ppo_jax, *pong))
    assert not Path("runs").exists()
