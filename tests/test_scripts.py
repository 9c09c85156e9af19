"""The scripts as texts that are read and as programs that are run."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import ROOT, edited, fast_at_ends, more, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import checkpoints

SCRIPTS = {
    "dqn_jax": dqn_jax,
    "per_dqn_jax": per_dqn_jax,
    "ppo_jax": ppo_jax,
    "r2d2_jax": r2d2_jax,
    "recurrent_ppo_jax": recurrent_ppo_jax,
    "sac_jax": sac_jax,
}
MARK = "# === the same in all scripts ==="
# Flags with which a run takes a second or two.
SMALL = {
    "dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "per_dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "ppo_jax": "--num-steps 16 --update-epochs 1 --num-minibatches 1",
    "r2d2_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500 --train-frequency 20",
    "recurrent_ppo_jax": "--num-steps 16 --sequence-length 16 --update-epochs 1 "
    "--num-minibatches 1",
    "sac_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500 --train-frequency 20",
}


def text(name):
    return (ROOT / f"{name}.py").read_text()


# Runs a script as if cleanreplay was not installed.
ALONE = """
import runpy, sys
sys.modules["cleanreplay"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_alone(name, flags, folder):
    """The finished process of a script in `folder`, without cleanreplay. Warnings are errors."""
    warnings = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache")
    return subprocess.run(
        [sys.executable, *warnings, "-c", ALONE, f"{name}.py", *flags.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_below_the_mark_the_scripts_are_the_same_text():
    parts = [text(name).split(f"\n{MARK}\n") for name in SCRIPTS]
    assert [len(x) for x in parts] == [2] * len(SCRIPTS)
    assert len({below for _, below in parts}) == 1


@fast_at_ends("name", SCRIPTS)
def test_help_has_two_groups_and_a_line_for_every_flag(name, run_main):
    code, out, _ = run_main(SCRIPTS[name], "--help")
    assert code == 0
    letters = re.sub(r"[│\s]", "", out)  # the width of a terminal breaks lines
    _, *groups = re.split("experimentoptions|algorithmoptions", letters)
    module = SCRIPTS[name]
    for group, flags in zip(groups, (module.Run, module.Args), strict=True):
        comments = re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(flags), re.MULTILINE)
        assert [flag for flag, _ in comments] == list(vars(flags()))
        for flag, comment in comments:
            assert f"--{flag.replace('_', '-')}" in group
            assert comment.replace(" ", "") in group


def steps_of_points(name):
    """Where a run of 2,000 steps in 4 environments has points, with a log interval of 100.

    An iteration has 20 steps; that of PPO, with a memory or without, has 64, and each second of
    them, or the one after it, reaches a multiple of 100.
    """
    ends = range(64, 2_049, 64) if "ppo" in name else range(20, 2_001, 20)
    size = ends.step
    return [end for end in ends if end // 100 > (end - size) // 100]


def assert_prints_progress(printed, folder, env_id, points):
    nothing, first, *progress, last = printed.strip().splitlines()
    reason = "the package cleanreplay is not installed"
    assert nothing == f"nothing is saved or evaluated: {reason}"
    assert first == f"{folder}: 4 x {env_id}, cpu"
    line = r"([\d,]+) steps, [\d,]+ a second, return ([-\d.]+|nan)"
    shown = [re.fullmatch(line, x) for x in progress]
    assert [int(x[1].replace(",", "")) for x in shown] == points
    assert re.fullmatch(rf"{folder}: mean return of the last episodes [-\d.]+", last)


# What is in the charts of each script, and of one of them alone.
COMMON_CHARTS = "charts/episodic_return charts/episodic_length charts/SPS"
PPO_CHARTS = (
    "losses/policy_loss losses/value_loss losses/entropy losses/old_approx_kl losses/approx_kl "
    "losses/clipfrac losses/explained_variance charts/learning_rate"
)
OWN_CHARTS = {
    "dqn_jax": "losses/td_loss losses/q_values charts/epsilon charts/gradient_steps "
    "charts/replay_ratio",
    "per_dqn_jax": "losses/td_loss losses/q_values losses/importance_weight_min "
    "losses/priority_max charts/epsilon charts/gradient_steps charts/replay_ratio charts/beta",
    "ppo_jax": PPO_CHARTS,
    "r2d2_jax": "losses/td_loss losses/q_values losses/priority_max charts/epsilon "
    "charts/gradient_steps charts/replay_ratio",
    "recurrent_ppo_jax": PPO_CHARTS,
    "sac_jax": "losses/qf1_values losses/qf2_values losses/qf1_loss losses/qf2_loss "
    "losses/qf_loss losses/actor_loss losses/alpha losses/alpha_loss charts/gradient_steps "
    "charts/replay_ratio",
}


def assert_charts_are_complete(scalars, name, points):
    assert set(scalars) == set(f"{COMMON_CHARTS} {OWN_CHARTS[name]}".split())
    for tag, values in scalars.items():
        steps = [step for step, _ in values]
        assert np.isfinite([value for _, value in values]).all(), tag
        assert steps == sorted(set(steps)), tag
        assert set(steps) <= set(points), tag
    assert [step for step, _ in scalars["charts/SPS"]] == points


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_copied_with_buffers_alone_it_trains_and_logs(name, tmp_path):
    for file in (f"{name}.py", "buffers.py"):
        shutil.copy(ROOT / file, tmp_path)
    flags = f"--total-timesteps 2000 --num-envs 4 --log-interval 100 {SMALL[name]}"
    done = run_alone(name, flags, tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    points = steps_of_points(name)
    env_id = SCRIPTS[name].ENV_ID if "cleanreplay" not in SCRIPTS[name].ENV_ID else "CartPole-v1"
    assert_prints_progress(done.stdout, folder, env_id, points)

    scalars, _ = read_events(folder)
    assert_charts_are_complete(scalars, name, points)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "what"),
    [
        ("--resume runs/x", "resume"),
        ("--num-seeds 2", "num_seeds"),
        ("--sweep gamma=0.9,1", "sweep"),
        ("--capture-video", "capture_video"),
        ("--frame-stack 2", "frame_stack"),
        ("--env-id environments:ProbeImage-v0", "images"),
    ],
)
def test_what_takes_the_package_is_refused_without_it(flags, what, tmp_path):
    for file in (ROOT / "dqn_jax.py", ROOT / "buffers.py", ROOT / "tests/environments.py"):
        shutil.copy(file, tmp_path)
    done = run_alone("dqn_jax", flags, tmp_path)
    *_, line = done.stderr.strip().splitlines()
    assert (done.returncode, line.count(what)) == (2, 1), done.stderr
    assert line.endswith("this needs the package cleanreplay, which is not installed")
    assert not (tmp_path / "runs").exists()


NOT_IN_A_CLONE = shutil.ignore_patterns(".*", "runs", "*.egg-info", "build")


@pytest.mark.slow
def test_pip_installs_all_that_a_copied_script_needs(tmp_path):
    """In another folder it saves and resumes, and load_policy finds the script."""
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_IN_A_CLONE)
    subprocess.run([*pip, "--target", site, source], check=True)
    assert {x.name for x in site.iterdir() if "-" not in x.name and x.name != "__pycache__"} == {
        "buffers.py",
        "cleanreplay",
    }
    shutil.rmtree(source)
    shutil.copy(ROOT / "dqn_jax.py", tmp_path / "mine.py")
    env = os.environ | {"PYTHONPATH": str(site)}
    small = f"--total-timesteps 1000 --eval-episodes 1 {SMALL['dqn_jax']}"
    run = partial(subprocess.run, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    run([sys.executable, "mine.py", *small.split()])
    (folder,) = (tmp_path / "runs").iterdir()
    done = run([sys.executable, "mine.py", "--resume", folder, "--total-timesteps", "2000"])
    assert "2,000 steps: return" in done.stdout
    code = "import cleanreplay, numpy as np; print(cleanreplay.__file__)\n"
    code += f"print(cleanreplay.load_policy({str(folder)!r})(np.zeros((5, 4))).shape)"
    where, shape = run([sys.executable, "-c", code]).stdout.split("\n", 1)
    assert where.startswith(str(site))
    assert shape.strip() == "(5,)"


def copy_beside_a_clone(folder):
    """Copies a script as `mine.py` into a folder that has a clone named `cleanreplay`."""
    folder.mkdir()
    shutil.copytree(ROOT, folder / "cleanreplay", ignore=NOT_IN_A_CLONE)
    shutil.copy(ROOT / "dqn_jax.py", folder / "mine.py")


@pytest.mark.slow
def test_beside_a_clone_named_cleanreplay_an_editable_install_is_found(tmp_path):
    """Python takes the clone for a part of a package without `__init__.py`, and looks further."""
    copy_beside_a_clone(tmp_path / "work")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=NOT_IN_A_CLONE)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    env = os.environ | {"PYTHONPATH": sysconfig.get_path("purelib")}
    run = partial(subprocess.run, cwd=tmp_path / "work", env=env, check=True)
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", source])
    flags = f"--total-timesteps 1000 --eval-episodes 0 {SMALL['dqn_jax']}"
    run([python, "mine.py", *flags.split()])
    (folder,) = (tmp_path / "work" / "runs").iterdir()
    assert [x.name for x in (folder / "checkpoints").iterdir()] == ["1000"]


# Runs a script where cleanreplay is not installed.
NOT_INSTALLED = """
import os, runpy, sys
sys.path = [x for x in sys.path if not os.path.exists(os.path.join(x, "cleanreplay/__init__.py"))]
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.slow
def test_a_clone_named_cleanreplay_is_not_taken_for_the_package(tmp_path):
    copy_beside_a_clone(tmp_path / "work")
    shutil.copy(ROOT / "buffers.py", tmp_path / "work")
    flags = f"--total-timesteps 1000 {SMALL['dqn_jax']}"
    command = [sys.executable, "-c", NOT_INSTALLED, "mine.py", *flags.split()]
    done = subprocess.run(
        command, cwd=tmp_path / "work", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nothing is saved or evaluated")
    assert (tmp_path / "work" / "runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_lists_what_the_project_needs(name):
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#.*$\n)+?)^# ///$", text(name))
    listed = tomllib.loads(re.sub(r"(?m)^# ?", "", block))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert listed["dependencies"] == project["dependencies"]
    assert listed["requires-python"] == project["requires-python"]


@pytest.mark.slow
def test_uv_installs_all_that_a_copied_script_needs(tmp_path):
    for file in ("ppo_jax.py", "buffers.py"):
        shutil.copy(ROOT / file, tmp_path)
    uv = [sys.executable, "-m", "uv", "run", "--no-project", "--python", sys.executable]
    flags = f"--total-timesteps 2000 {SMALL['ppo_jax']}"
    done = subprocess.run(
        [*uv, "ppo_jax.py", *flags.split()],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to fetch" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr
    scalars, _ = read_events(next((tmp_path / "runs").iterdir()))
    assert [step for step, _ in scalars["losses/policy_loss"]][-1] >= 1900


def test_the_package_imports_no_script():
    modules = sorted(file.stem for file in (ROOT / "cleanreplay").glob("[a-z]*.py"))
    code = f"import sys\nfor name in {modules}: __import__(f'cleanreplay.{{name}}')\n"
    code += f"assert not {set(SCRIPTS)} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_run_with_a_checkpoint_imports_neither_orbax_nor_tensorstore(tmp_path):
    code = "import dqn_jax, sys\n"
    code += "run = dqn_jax.Run(eval_episodes=1)\n"
    code += "args = dqn_jax.Args(total_timesteps=200, learning_starts=50, batch_size=8)\n"
    code += "_, _, folder = dqn_jax.train(args, run)\n"
    code += "assert (folder / 'checkpoints' / '200').is_dir()\n"
    code += "assert not {'orbax', 'tensorstore'} & set(sys.modules)"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True)


SHORT = "--total-timesteps 200 --learning-starts 50 --batch-size 8 --env-id"
BUG = 'Path("no/such/file").read_text()'
OWN_CODE = "# Insert your own code here: `state` is complete, and no thread is running.\n"
COLLECTOR = "    observation, valid = env_state\n    num_steps"


def saved_steps():
    """The steps of the checkpoints of the only run in this folder."""
    (folder,) = Path("runs").iterdir()
    return checkpoints.steps_in(folder)


@pytest.mark.parametrize(
    ("old", "new", "saved"),
    [
        (OWN_CODE, BUG + "\n", []),
        (COLLECTOR, f"    if step == 150:\n        {BUG}\n{COLLECTOR}", [150]),
    ],
)
def test_a_bug_in_inserted_code_shows_its_traceback(old, new, saved, monkeypatch):
    """In the collector it is an error like one of the environments: what was learned is saved."""
    script = edited(dqn_jax, (old, new))
    monkeypatch.setattr(sys, "argv", ["script.py", *f"{SHORT} environments:Counter-v0".split()])
    with pytest.raises(FileNotFoundError, match="no/such/file"):
        script.main()
    assert saved_steps() == saved


class BrokenEvaluation(environments.Counter):
    """Fails in an evaluation, whose environments are stepped later than the one of the training."""

    trained: Any = None

    def step(self, action):
        BrokenEvaluation.trained = BrokenEvaluation.trained or self
        if self is not BrokenEvaluation.trained:
            raise gym.error.ResetNeeded("mine")
        return super().step(action)


def test_an_error_of_gymnasium_in_an_evaluation_shows_its_traceback(monkeypatch):
    """What was learned is saved before."""
    gym.register("BrokenEvaluation-v0", BrokenEvaluation)
    monkeypatch.setattr(sys, "argv", ["dqn_jax.py", *f"{SHORT} BrokenEvaluation-v0".split()])
    with pytest.raises(gym.error.ResetNeeded, match="mine"):
        dqn_jax.main()
    assert saved_steps() == [200]


@pytest.mark.parametrize("module", [dqn_jax, more(per_dqn_jax), more(ppo_jax)])
def test_the_figure_at_the_end_is_the_mean_of_the_last_100_episodes(module):
    """Episodes of Counter have returns 3, 6, 10, 15 in turns, and last 18 steps with the resets."""
    flags = dict(learning_starts=499, batch_size=1)
    if module is ppo_jax:
        flags = dict(num_envs=1, num_steps=100, num_minibatches=1, update_epochs=1)
    args = module.Args(total_timesteps=500, **flags)
    run = module.Run(env_id="Counter-v0", log_interval=500, eval_episodes=0, checkpoint_interval=0)
    _, returns, folder = module.train(args, run)
    assert returns.tolist() == [8.5]
    # The only point of the charts shows the mean of all 111.
    ((step, mean),) = read_events(folder)[0]["charts/episodic_return"]
    assert step == 500
    assert mean == np.float32((27 * (3 + 6 + 10 + 15) + 3 + 6 + 10) / 111)


@pytest.mark.parametrize("name", ["dqn_jax", more("ppo_jax")])
def test_atari_is_learned_from(name):
    pytest.importorskip("ale_py")
    module = SCRIPTS[name]
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    run = module.Run(
        env_id="ale_py:ALE/Pong-v5",
        env_kwargs=kwargs,
        log_interval=64,
        eval_episodes=2,
        checkpoint_interval=0,
    )
    own = dict(num_steps=8, num_minibatches=1, update_epochs=1)
    if name == "dqn_jax":
        own = dict(learning_starts=32, batch_size=4, train_frequency=32, buffer_size=200)
    args = module.Args(total_timesteps=128, num_envs=8, **own)
    state, _, folder = module.train(args, run)
    scalars, _ = read_events(folder)
    loss = "losses/td_loss" if name == "dqn_jax" else "losses/value_loss"
    assert np.isfinite(scalars[loss][-1][1])
    # 200 frames are 50 steps, in which the opponent scores at most twice.
    assert -3 <= scalars["eval/episodic_return"][-1][1] <= 0
    # The Nature CNN of 4x84x84 and its heads.
    numbers = sum(x.size for x in jax.tree.leaves(state.params))
    assert numbers == (1_687_206 if name == "dqn_jax" else 1_687_719)


def test_atari_is_the_same_environment_at_every_number():
    pytest.importorskip("ale_py")
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    run = dqn_jax.Run(env_id="ale_py:ALE/Pong-v5", env_kwargs=kwargs)
    one = dqn_jax.make_envs(dqn_jax.Args(), run, 1)
    many = dqn_jax.make_envs(dqn_jax.Args(), run, 8)
    assert one.single_observation_space == many.single_observation_space
    for envs in (one, many):
        envs.reset(seed=3)
        cut = []
        for _ in range(50):
            _, _, _, truncated, _ = envs.step(np.zeros(envs.num_envs, int))
            cut.append(truncated.all())
        assert cut == [False] * 49 + [True]
