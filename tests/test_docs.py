"""docs/: each module there runs, each command has flags that exist."""

import os
import re
import shlex
import subprocess
import sys

import pytest
from events import ROOT

import dqn_jax
import per_dqn_jax
import ppo_jax

PAGE = (ROOT / "docs" / "environments.md").read_text()
SCRIPTS = {script.__name__: script for script in (dqn_jax, per_dqn_jax, ppo_jax)}
MODULES = dict(re.findall(r"`(my_\w+)\.py`[^`]*?:\n\n```python\n(.*?)```", PAGE, re.DOTALL))
JOINED = re.sub(r"\\?\n +", " ", PAGE)
BLOCKS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", JOINED, re.DOTALL)
    for line in block.splitlines()
]
TEXT = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL).replace("\n", " ")
INLINE = re.findall(r"`(python [^`]*)`", TEXT)


@pytest.mark.parametrize("command", BLOCKS + INLINE)
def test_commands_have_flags_that_exist(command):
    python, script, *flags = shlex.split(command)
    script = SCRIPTS[script.removesuffix(".py")]
    assert python == "python"
    names = {name for group in (script.Args, script.Run) for name in vars(group())}
    given = {flag for flag in flags if flag.startswith("--")}
    assert given <= {f"--{name.replace('_', '-')}" for name in names}


def module(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "env", "envs"),
    [("my_corridor", "Corridor-v0", None), ("my_fast_corridor", "FastCorridor-v0", "compiled")],
)
def test_environments_of_your_own_are_learned(name, env, envs, tmp_path, monkeypatch):
    module(name, tmp_path, monkeypatch)
    args = dqn_jax.Args(
        total_timesteps=12_000,
        num_envs=4,
        learning_starts=500,
        learning_rate=1e-3,
        train_frequency=4,
    )
    run = dqn_jax.Run(env_id=f"{name}:{env}", log_interval=1_000, eval_episodes=0)
    training, _, folder = dqn_jax.train(args, run)
    assert (training.envs is not None) == (envs == "compiled")
    view = training.agent.params
    if envs:
        view = view[0]
    alg = dqn_jax.set_up(args, run, folder)[0]
    returns = dqn_jax.evaluate(alg, run, view, 2, 0)
    assert returns == pytest.approx([-0.9, -0.9])  # nine steps, the shortest way


@pytest.mark.parametrize(
    ("library", "name", "env"),
    [
        ("minigrid", "my_minigrid", "Empty-v0"),
        ("gymnax", "my_gymnax", "Breakout-MinAtar"),
        ("gymnax", "my_gymnax", "SpaceInvaders-MinAtar"),
    ],
)
def test_wrapped_libraries_train(library, name, env, tmp_path, monkeypatch):
    pytest.importorskip(library)
    module(name, tmp_path, monkeypatch)
    args = dqn_jax.Args(total_timesteps=4_000, num_envs=4, learning_starts=500)
    run = dqn_jax.Run(env_id=f"{name}:{env}", log_interval=1_000, eval_episodes=2)
    training, returns, _ = dqn_jax.train(args, run)
    assert (training.envs is not None) == (library == "gymnax")
    assert returns[0] >= 0


RECIPES = (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", RECIPES, re.DOTALL))
def test_recipes_run_as_they_stand(block):
    if "import minari" in block:
        pytest.importorskip("minari")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
