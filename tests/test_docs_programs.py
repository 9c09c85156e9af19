"""The programs of README.md and docs/ run, once and with small sizes."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import jax.numpy as jnp
import pytest
from helpers import ROOT, find_jax_env, make_agent, read_events, save_agent, slow
from test_docs import PAGES, blocks

import buffers
import cleanreplay
import dqn_jax
import ppo_jax
import r2d2_jax
import sac_jax

pytestmark = pytest.mark.pages

MODULES = {
    name: code
    for text in PAGES.values()
    for name, code in re.findall(r"`(my_\w+)\.py`[^`]*?:\n\n```python\n(.*?)```", text, re.DOTALL)
}


def write_module(name, monkeypatch):
    Path(f"{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(Path.cwd())


def run_block(page, number, old="", new="", **names):
    """Runs a block of Python of a page, which begins with these names. Returns its variables."""
    code = blocks(page, "python")[number]
    assert re.search(old, code)
    exec(re.sub(old, new, code) if old else code, names)
    return names


@pytest.mark.parametrize("page", ["README.md", "docs/buffers.md"])
def test_the_example_runs(page):
    names = run_block(page, 0)
    assert names["sample"].experience["observation"].shape == (128, 4)
    if page == "README.md":
        assert names["weights"].tolist() == [1.0] * 128  # all were equally likely
        largest = abs(names["td_error"]).max()
        assert names["state"].max_priority == pytest.approx(largest + 1e-6)


def test_the_target_of_the_page_is_that_of_n_steps():
    """One sequence is truncated at its second step; in the other no episode ends."""
    no_end = jnp.zeros((2, 4), bool)
    window = dict(reward=jnp.ones((2, 4)), observation=jnp.tile(jnp.arange(4.0), (2, 1)))
    window |= dict(terminated=no_end, truncated=no_end.at[0, 1].set(True))
    given = dict(window=window, n=3, value=lambda x: x, buffers=buffers, jnp=jnp)
    names = run_block("docs/buffers.md", 1, **given)

    of_two_steps = 1 + 0.99 + 0.99**2 * 2  # bootstraps from the value of observation 2
    of_three_steps = 1 + 0.99 + 0.99**2 + 0.99**3 * 3
    assert names["target"].tolist() == pytest.approx([of_two_steps, of_three_steps])


def test_the_vault_of_the_page_holds_the_rows():
    replay = buffers.uniform_replay(800, num_envs=8)
    steps = {"reward": jnp.arange(80.0).reshape(10, 8)}
    state = replay.add_batch(replay.init({"reward": 0.0}), steps)
    names = run_block("docs/buffers.md", 2, item={"reward": 0.0}, state=state)

    assert names["steps"]["reward"].tolist() == steps["reward"].tolist()


@pytest.mark.parametrize(("number", "runs"), [(2, 1), (3, 3)])
def test_train_is_called_from_python(number, runs):
    run_block("docs/runs.md", number, "20_000", "200, learning_starts=150")
    assert len(list(Path("runs").glob("*/args.json"))) == runs


def test_a_run_is_resumed_from_python():
    args = dqn_jax.Args(total_timesteps=200, learning_starts=150)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=0))
    names = run_block("docs/runs.md", 4, 'runs/.*(?=")', str(folder))

    assert names["folder"] == folder
    assert cleanreplay.checkpoints.newest(folder).parent.name == "400"


@pytest.mark.parametrize(
    ("page", "number", "script", "env_id", "frames"),
    [
        ("docs/runs.md", 0, dqn_jax, "CartPole-v1", 1),
        ("docs/runs.md", 1, dqn_jax, "CartPole-v1", 4),
        ("docs/r2d2.md", 0, r2d2_jax, "cleanreplay.memory_tasks:CartPoleNoVelocity-v0", 1),
    ],
    ids=["single", "stacked", "with memory"],
)
def test_a_saved_agent_plays_an_episode(page, number, script, env_id, frames):
    save_agent(script, env_id=env_id, frame_stack=frames)
    names = run_block(page, number, r'"runs/.*"', '"."')
    assert names["episodic_return"] >= 8


def test_the_corridor_draws_itself(monkeypatch):
    write_module("my_corridor", monkeypatch)
    env = gym.make("my_corridor:Corridor-v0", render_mode="rgb_array")
    env.reset(seed=0)
    env.step(1)
    image = env.render()

    assert image.shape == (40, 400, 3)
    assert (image[0, ::40] == 255).all(axis=1).tolist() == [True, False] + [True] * 8


@pytest.mark.filterwarnings("ignore")  # of Minari
def test_the_dataset_of_demonstrations_is_read(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_module("my_pusher", monkeypatch)
    runpy.run_path("my_pusher.py")
    agent = make_agent(sac_jax, sac_jax.Args(), sac_jax.Run(env_id="MountainCarContinuous-v0"))
    name = "minari:mountaincar/pusher-v0"

    dataset = cleanreplay.offline.open_minari(name)
    steps = cleanreplay.offline.of_minari(agent, agent.example_step, name, dataset, None).storage

    assert steps.valid.sum() == 885
    assert steps.terminated.sum() == 10


# Library, script, environment, flags, and the minimum return, which random actions reach.
ENVIRONMENTS = [
    ("gymnasium", dqn_jax, "my_corridor:Corridor-v0", {}, -11),
    ("gymnasium", dqn_jax, "my_taxi:MaskedTaxi-v0", {}, -2_000),
    ("gymnasium", dqn_jax, "my_fast_corridor:FastCorridor-v0", {}, -11),
    ("gymnasium", dqn_jax, "my_random_cartpole:RandomCartPole-v0", {}, 1),
    ("gymnasium", dqn_jax, "my_bandit:Bandit-v0", {}, 0),
    ("gymnasium", sac_jax, "my_reach:Reach-v0", {"her_fraction": 0.8}, -20),
    ("gymnasium_robotics", sac_jax, "my_fetch:FetchReach-v4", {"her_fraction": 0.8}, -50),
    ("minigrid", dqn_jax, "my_minigrid:Empty-v0", {}, 0),
    ("minatar", dqn_jax, "my_minatar:MinAtar/Asterix-v1", {}, 0),
    ("gymnax", dqn_jax, "my_gymnax:Breakout-MinAtar", {}, 0),
    ("jumanji", dqn_jax, "my_jumanji:Snake-v1", {}, 0),
    ("envpool", ppo_jax, "my_envpool:EnvPool/CartPole-v1", {}, 8),
    ("shimmy.dm_control", ppo_jax, "shimmy:dm_control/cartpole-balance-v0", {}, 200),
]
COMPILED = ("my_fast_corridor", "my_random_cartpole", "my_bandit", "my_gymnax", "my_jumanji")


@pytest.mark.filterwarnings("ignore:.*precision lowered", "ignore::UserWarning")  # of the spaces
@pytest.mark.parametrize(("library", "script", "env_id", "flags", "least"), ENVIRONMENTS)
def test_environments_train(library, script, env_id, flags, least, monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "disable")  # without a screen dm_control would warn
    pytest.importorskip(library)
    name = env_id.partition(":")[0]
    if name in MODULES:
        write_module(name, monkeypatch)
    flags = flags | (
        {"learning_starts": 260} if script in (dqn_jax, sac_jax) else {"num_steps": 32}
    )
    args = script.Args(total_timesteps=320, num_envs=2, **flags)
    run = script.Run(env_id=env_id, log_interval=320, eval_episodes=2, checkpoint_interval=0)
    assert (find_jax_env(script, args, run) is not None) == (name in COMPILED)

    scalars, _ = read_events(script.train(args, run)[2])
    assert scalars["eval/episodic_return"][-1][1] >= least
    assert ("eval/success_rate" in scalars) == ("her_fraction" in flags)


# Replacements that make a recipe smaller for its test.
SMALLER = {
    "whole_episodes": [("LENGTH = 10 ", "LENGTH = 7 "), ("STEPS = 20_000", "STEPS = 2_000")],
    "optuna": [("ROUNDS = 4", "ROUNDS = 1"), ("POINTS = 16", "POINTS = 3"), ("40_000", "10_000")],
}
LONG = ("whole_episodes", "two_players", "relabelled", "optuna")
PROGRAMS = {
    page.split("/")[-1].removesuffix(".md"): block
    for page in PAGES
    if "recipes" in page
    for block in blocks(page, "python")
    if block not in MODULES.values()
}


@pytest.mark.parametrize("name", [slow(x) if x in LONG else x for x in PROGRAMS])
def test_recipes_run_as_they_stand(name):
    code = PROGRAMS[name]
    for old, new in SMALLER.get(name, ()):
        assert code.count(old) == 1
        code = code.replace(old, new)
    for package in ("minari", "optuna"):
        if f"import {package}" in code:
            pytest.importorskip(package)
    if "environ" not in code and "jax.config" not in code:
        exec(code, {"__name__": "recipe"})
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
