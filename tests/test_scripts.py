"""The scripts as texts that are read and as programs that are run."""

import ast
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from contextlib import closing
from functools import partial
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from helpers import ROOT, edited, read_events

import dqn_jax
from cleanreplay import checkpoints

NAMES = ("dqn_jax", "per_dqn_jax", "ppo_jax", "r2d2_jax", "recurrent_ppo_jax", "sac_jax")
SCRIPTS = {name: importlib.import_module(name) for name in NAMES}
MARK = "# === the same in all scripts ==="


def text(name):
    return (ROOT / f"{name}.py").read_text()


def test_below_the_mark_the_scripts_are_the_same_text():
    parts = [text(name).split(f"\n{MARK}\n") for name in SCRIPTS]

    assert [len(x) for x in parts] == [2] * len(SCRIPTS)
    assert len({below for _, below in parts}) == 1


def code_of(name, function):
    """The code of a function of a script, without its docstring and the name of the agent."""
    module = SCRIPTS[name]
    source = inspect.getsource(attrgetter(function)(module))
    (node,) = ast.parse(textwrap.dedent(source)).body
    if ast.get_docstring(node):
        node.body = node.body[1:]
    return ast.unparse(node).replace(f"agent: {module.Agent.__name__}", "")


OF_DQN = "Agent.policy_params Agent.to_env_action"
OF_TRANSITIONS = "Agent.to_transitions collect_rollout train_loop"
OF_ACTIONS = ["__init__", "mode", "sample", "log_prob_and_entropy", "to_env"]
OF_PPO = [f"{kind}.{name}" for kind in ("Categorical", "Gaussian") for name in OF_ACTIONS]


@pytest.mark.parametrize(
    ("name", "other", "functions"),
    [
        ("dqn_jax", "per_dqn_jax", f"{OF_DQN} {OF_TRANSITIONS} QNetwork.__call__"),
        ("dqn_jax", "per_dqn_jax", "Agent.init Agent.act Agent.train_step"),
        ("dqn_jax", "r2d2_jax", OF_DQN),
        ("dqn_jax", "sac_jax", OF_TRANSITIONS),
        ("dqn_jax", "ppo_jax", "collect_rollout"),
        ("r2d2_jax", "recurrent_ppo_jax", "Agent.no_memory keep_memory collect_rollout"),
        ("ppo_jax", "recurrent_ppo_jax", " ".join([*OF_PPO, "Categorical.logits"])),
    ],
)
def test_a_function_of_two_scripts_is_the_same_code(name, other, functions):
    """So each does what the tests of the other one say."""
    for function in functions.split():
        assert code_of(name, function) == code_of(other, function), function


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_two_groups_and_a_line_for_every_flag(name, run_main):
    module = SCRIPTS[name]
    code, out, _ = run_main(module, "--help")
    letters = re.sub(r"[│\s]", "", out)  # the width of a terminal breaks lines
    _, *groups = re.split("experimentoptions|algorithmoptions", letters)

    assert code == 0
    for group, flags in zip(groups, (module.Run, module.Args), strict=True):
        comments = re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(flags), re.MULTILINE)
        assert [flag for flag, _ in comments] == list(vars(flags()))
        for flag, comment in comments:
            assert f"--{flag.replace('_', '-')}" in group
            assert comment.replace(" ", "") in group


def imported(name, found, monkeypatch):
    """A script imported anew where `find_spec` finds this of the package."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    spec = importlib.util.spec_from_file_location(f"{name}_anew", ROOT / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_package_is_used_if_it_is_one(name, monkeypatch):
    """A folder of its name, such as a clone, has no file and so no `origin`."""
    for found in (None, ModuleSpec("cleanreplay", None)):
        assert imported(name, found, monkeypatch).cleanreplay is None

    package = ModuleSpec("cleanreplay", None, origin="cleanreplay/__init__.py")
    assert imported(name, package, monkeypatch).cleanreplay is not None


NEED_THE_PACKAGE = dict(
    resume="runs/x",
    num_seeds=2,
    num_devices=2,
    distributed="auto",
    capture_video=True,
    track=True,
    sweep=("gamma=0.9,1",),
    env_id="environments:ProbeImage-v0",
    save_experience=True,
    her_fraction=0.5,
    offline_data="runs/x",
    init_from="runs/x",
    frame_stack=2,
)


@pytest.mark.parametrize("flag", NEED_THE_PACKAGE)
def test_what_takes_the_package_is_refused_without_it(flag, monkeypatch):
    monkeypatch.setattr(dqn_jax, "cleanreplay", None)
    given = {flag: NEED_THE_PACKAGE[flag]}
    of_run = hasattr(dqn_jax.Run(), flag)
    args, run = dqn_jax.Args(**{} if of_run else given), dqn_jax.Run(**given if of_run else {})

    with pytest.raises(dqn_jax.UsageError, match="needs the package cleanreplay") as caught:
        dqn_jax.train(args, run)
    assert ("images" if flag == "env_id" else flag) in str(caught.value)
    assert not Path("runs").exists()


# Runs a script as if cleanreplay was not installed.
ALONE = """
import runpy, sys
sys.modules["cleanreplay"] = None
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SMALL = "--learning-starts 200 --batch-size 16 --buffer-size 500"


@pytest.mark.slow
def test_copied_with_buffers_alone_a_script_trains_and_logs(tmp_path):
    """Warnings are errors."""
    for file in ("dqn_jax.py", "buffers.py"):
        shutil.copy(ROOT / file, tmp_path)
    strict = ["-W", "error", "-W", "ignore:Error reading persistent compilation cache"]
    python = [sys.executable, *strict, "-c", ALONE, "dqn_jax.py"]
    flags = f"--total-timesteps 1000 --num-envs 4 --log-interval 200 {SMALL}"
    done = subprocess.run(
        [*python, *flags.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    nothing, first, *progress, last = done.stdout.strip().splitlines()
    (folder,) = (tmp_path / "runs").iterdir()
    assert nothing.startswith("nothing is saved or evaluated")
    assert first == f"{folder}: 4 x CartPole-v1, cpu"
    line = r"([\d,]+) steps, [\d,]+ a second, return [-\d.]+"
    steps = [re.fullmatch(line, x)[1] for x in progress]
    assert steps == ["200", "400", "600", "800", "1,000"]
    assert re.fullmatch(rf"{folder}: mean return of the last episodes [-\d.]+", last)
    scalars, _ = read_events(folder)
    assert [step for step, _ in scalars["charts/SPS"]] == [200, 400, 600, 800, 1_000]


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
    small = f"--total-timesteps 1000 --eval-episodes 1 {SMALL}"
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


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_lists_what_the_project_needs(name):
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#.*$\n)+?)^# ///$", text(name))
    listed = tomllib.loads(re.sub(r"(?m)^# ?", "", block))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert listed["dependencies"] == project["dependencies"]
    assert listed["requires-python"] == project["requires-python"]


def test_the_package_imports_no_script():
    modules = sorted(file.stem for file in (ROOT / "cleanreplay").glob("[a-z]*.py"))
    code = f"import sys\nfor name in {modules}: __import__(f'cleanreplay.{{name}}')\n"
    code += f"assert not {set(SCRIPTS)} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.slow
def test_a_run_imports_neither_orbax_nor_tensorstore(tmp_path):
    code = "import dqn_jax, sys\n"
    code += "args = dqn_jax.Args(total_timesteps=200, learning_starts=50, batch_size=8)\n"
    code += "_, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=1))\n"
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


@pytest.mark.parametrize("num_envs", [1, 4])
def test_atari_is_the_same_environment_at_every_number(num_envs):
    """It is cut off after 40 frames, which are 10 steps."""
    pytest.importorskip("ale_py")
    kwargs = json.dumps({"max_num_frames_per_episode": 40, "reward_clipping": False})
    run = dqn_jax.Run(env_id="ale_py:ALE/Pong-v5", env_kwargs=kwargs)
    cut = []
    with closing(dqn_jax.make_envs(dqn_jax.Args(), run, num_envs)) as envs:
        envs.reset(seed=3)
        for _ in range(10):
            _, _, _, truncated, _ = envs.step(np.zeros(num_envs, int))
            cut.append(truncated.all())

    assert envs.single_observation_space == gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    assert cut == [False] * 9 + [True]
