"""The scripts as source text and as programs."""

import ast
import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from functools import partial
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path

import pytest
from helpers import ROOT, edited, read_events

import dqn_jax

NAMES = "dqn_jax per_dqn_jax ppo_jax pqn_jax r2d2_jax recurrent_ppo_jax sac_jax iql_jax"
SCRIPTS = {name: importlib.import_module(name) for name in NAMES.split()}


def text(name):
    return (ROOT / f"{name}.py").read_text()


def the_only(pattern):
    """Returns the text that a pattern finds exactly once in each script. Fails if they differ."""
    found = [re.findall(pattern, text(name), re.DOTALL | re.MULTILINE) for name in SCRIPTS]
    ((one,),) = {tuple(x) for x in found}
    return one


def test_below_the_mark_the_scripts_are_the_same_text():
    assert "def main()" in the_only("^# === the same in all scripts ===$(.*)")


def test_a_script_lists_what_the_project_needs():
    block = the_only("^# /// script$(.*?)^# ///$")
    listed = tomllib.loads(re.sub(r"(?m)^# ?", "", block))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert listed["dependencies"] == project["dependencies"]
    assert listed["requires-python"] == project["requires-python"]


@pytest.mark.parametrize(
    ("found", "is_used"),
    [
        (None, False),
        (ModuleSpec("cleanreplay", None), False),  # a folder of its name, such as a clone
        (ModuleSpec("cleanreplay", None, origin="cleanreplay/__init__.py"), True),
    ],
)
def test_the_package_is_used_if_it_is_one(found, is_used, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)

    assert "cleanreplay" in the_only("^import buffers$(.*?)^@dataclass")
    assert (edited(dqn_jax).cleanreplay is not None) == is_used


# Code of recurrent scripts, and what the others have instead.
OF_MEMORY = {
    "(*reset(envs, init_key, log.first_step), agent.no_memory(envs.num_envs))": (
        "reset(envs, init_key, log.first_step)"
    ),
    "self.num_sequences": "self.steps_per_iteration",
}


def code_of(name, function):
    """Returns the code of a function, without docstring, name of the agent, and OF_MEMORY."""
    module = SCRIPTS[name]
    source = inspect.getsource(attrgetter(function)(module))
    (node,) = ast.parse(textwrap.dedent(source)).body
    if ast.get_docstring(node):
        node.body = node.body[1:]
    code = ast.unparse(node).replace(f"agent: {module.Agent.__name__}", "")
    for old, new in OF_MEMORY.items():
        code = code.replace(old, new)
    return code


OF_DQN = "Agent.policy_params Agent.to_env_action"
OF_TRANSITIONS = "Agent.to_transitions collect_rollout train_loop"
OF_ACTIONS = ["__init__", "mode", "sample", "log_prob_and_entropy", "to_env"]
OF_PPO = [f"{kind}.{name}" for kind in ("Categorical", "Gaussian") for name in OF_ACTIONS]
OF_PPO += ["Categorical.logits", "masked_var", "update_rms", "normalize", "gae", OF_DQN]
OF_PPO += [f"Agent.{name}" for name in ("optimizer", "normalize_rewards", "on_resume", "learned")]


@pytest.mark.parametrize(
    ("name", "other", "functions", "different"),
    [
        ("dqn_jax", "per_dqn_jax", f"{OF_DQN} {OF_TRANSITIONS} QNetwork.__call__", 0),
        ("dqn_jax", "per_dqn_jax", "Agent.init Agent.act", 0),
        ("dqn_jax", "per_dqn_jax", "Agent.train_step", 2),  # learning_starts
        ("dqn_jax", "per_dqn_jax", "Agent.__init__", 12),
        ("dqn_jax", "r2d2_jax", OF_DQN, 0),
        ("dqn_jax", "r2d2_jax", "train_loop", 0),
        ("dqn_jax", "sac_jax", OF_TRANSITIONS, 0),
        ("sac_jax", "iql_jax", f"Agent.to_env_action Agent.train_step {OF_TRANSITIONS}", 0),
        ("dqn_jax", "pqn_jax", f"{OF_DQN} Agent.act collect_rollout", 0),
        ("ppo_jax", "pqn_jax", "train_loop", 0),
        ("dqn_jax", "ppo_jax", "collect_rollout", 0),
        ("r2d2_jax", "recurrent_ppo_jax", "Agent.no_memory keep_memory collect_rollout", 0),
        ("ppo_jax", "recurrent_ppo_jax", " ".join(OF_PPO), 0),
        ("ppo_jax", "recurrent_ppo_jax", "train_loop", 0),
        ("ppo_jax", "recurrent_ppo_jax", "Agent.optimize", 1),
        ("ppo_jax", "recurrent_ppo_jax", "Agent.loss", 2),
        ("ppo_jax", "recurrent_ppo_jax", "Agent.init", 6),
    ],
)
def test_functions_of_two_scripts_differ_in_so_many_lines(name, other, functions, different):
    """Only lines about the script differ. So the tests of one script hold for the other."""
    for function in functions.split():
        code, of_other = [code_of(script, function).splitlines() for script in (name, other)]
        assert len(set(code) ^ set(of_other)) == different, function


PLACE = "runs/x"
NEED_THE_PACKAGE = dict(resume=PLACE, offline_data=PLACE, init_from=PLACE, distributed="auto")
NEED_THE_PACKAGE |= dict(num_seeds=2, num_devices=2, frame_stack=2, her_fraction=0.5)
NEED_THE_PACKAGE |= dict.fromkeys(["capture_video", "track", "save_experience"], True)
NEED_THE_PACKAGE |= dict(sweep=("gamma=0.9,1",), env_id="environments:ProbeImage-v0")


@pytest.mark.parametrize("flag", NEED_THE_PACKAGE)
def test_flags_that_need_the_package_are_refused_without_it(flag, monkeypatch):
    monkeypatch.setattr(dqn_jax, "cleanreplay", None)
    given = {flag: NEED_THE_PACKAGE[flag]}
    of_run = hasattr(dqn_jax.Run(), flag)
    args, run = dqn_jax.Args(**{} if of_run else given), dqn_jax.Run(**given if of_run else {})

    with pytest.raises(dqn_jax.UsageError, match="needs the package cleanreplay") as caught:
        dqn_jax.train(args, run)
    assert ("images" if flag == "env_id" else flag) in str(caught.value)
    assert not Path("runs").exists()


SHORT = "--total-timesteps 200 --learning-starts 50 --batch-size 8"
IN_COUNTER = f"{SHORT} --env-id environments:Counter-v0".split()


def test_without_the_package_a_script_trains_and_logs(run_main, monkeypatch):
    monkeypatch.setattr(dqn_jax, "cleanreplay", None)
    code, out, _ = run_main(dqn_jax, *IN_COUNTER, "--log-interval", "100")
    (folder,) = Path("runs").absolute().iterdir()

    assert code == 0
    assert re.findall(r"^(\d+) steps,", out, re.MULTILINE) == ["100", "200"]
    assert out.splitlines()[-1].startswith(f"{folder}: ")
    assert [step for step, _ in read_events(folder)[0]["charts/SPS"]] == [100, 200]


NOT_IN_A_CLONE = shutil.ignore_patterns(".*", "runs", "*.egg-info", "build")


@pytest.mark.slow
def test_pip_installs_all_that_a_copied_script_needs(tmp_path):
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
    small = f"{SHORT} --eval-episodes 1"
    run = partial(subprocess.run, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    run([sys.executable, "mine.py", *small.split()])
    (folder,) = (tmp_path / "runs").iterdir()
    done = run([sys.executable, "mine.py", "--resume", folder, "--total-timesteps", "400"])
    assert "400 steps: return" in done.stdout
    where = run([sys.executable, "-c", "import cleanreplay; print(cleanreplay.__file__)"]).stdout
    assert where.startswith(str(site))


def test_the_package_imports_no_script():
    for file in (ROOT / "cleanreplay").glob("*.py"):
        assert not re.search(r"^\s*(import|from) \w+_jax\b", file.read_text(), re.MULTILINE), file
