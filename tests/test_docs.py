"""README.md, docs/ and benchmarks/README.md: links lead somewhere, code runs, flags exist."""

import os
import re
import shlex
import subprocess
import sys

import jax.numpy as jnp
import pytest
from conftest import slow
from events import ROOT, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
from vault import Vault

SCRIPTS = {script.__name__: script for script in (dqn_jax, per_dqn_jax, ppo_jax)}
FILES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), ROOT / "benchmarks" / "README.md"]
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def blocks(page, language):
    """The blocks of code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def anchors(text):
    """Those of the headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_readme_is_short():
    assert len(PAGES["README.md"].splitlines()) <= 250


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def commands(page):
    """Those that start a script or a benchmark, in blocks and in the text."""
    joined = re.sub(r" \\\n +", " ", PAGES[page])
    text = re.sub(r"```.*?```", "", joined, flags=re.DOTALL).replace("\n", " ")
    inside = re.findall(r"```bash\n(.*?)```", joined, re.DOTALL)
    lines = [line for block in inside for line in block.splitlines()]
    found = re.findall(r"`([^`]*python [^`]*\.py[^`]*)`", text) + lines
    return [line.split("python ")[-1] for line in found if re.search(r"python \S+\.py", line)]


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(page):
    for command in commands(page):
        path, *flags = shlex.split(command)
        given = {flag for flag in flags if flag.startswith("--")}
        if script := SCRIPTS.get(path.removesuffix(".py")):
            groups = (script.Args, script.Run, script.Processes)
            names = {name for group in groups for name in vars(group())}
            assert given <= {f"--{name.replace('_', '-')}" for name in names}, command
        else:
            source = (ROOT / path).read_text()
            assert all(f'"{flag}"' in source for flag in given - {"--"}), command


def flags(page):
    """Those that a page's table names."""
    rows = re.findall(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \|", PAGES[page], re.MULTILINE)
    return re.findall(r"--([a-z-]+)", " ".join(rows))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_flags_have_those_of_the_scripts(name):
    script, page = SCRIPTS[name], f"docs/{name.removesuffix('_jax')}.md"
    written = flags("docs/dqn.md") if name == "per_dqn_jax" else []
    written += flags(page)
    assert sorted(written) == sorted(x.replace("_", "-") for x in vars(script.Args()))
    for page, group in (("docs/lasting.md", script.Run), ("docs/scale.md", script.Processes)):
        assert sorted(flags(page)) == sorted(x.replace("_", "-") for x in vars(group()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_metrics_have_those_of_the_scripts(name):
    source = (ROOT / f"{name}.py").read_text()
    page = f"docs/{name.removesuffix('_jax')}.md"
    tags = set(
        re.findall(r"`((?:charts|losses|eval)/\w+)`", PAGES[page] + PAGES["docs/lasting.md"])
    )
    for tag in tags:
        assert f'"{tag.split("/")[1]}"' in source or f'"{tag}"' in source, tag
    if name == "per_dqn_jax":
        tags |= set(re.findall(r"`((?:charts|losses)/\w+)`", PAGES["docs/dqn.md"]))
    assert tags >= set(re.findall(r'"((?:charts|losses|eval)/\w+)"', source))
    assert name != "ppo_jax" or tags >= {f"losses/{loss}" for loss in ppo_jax.LOSSES}


@pytest.mark.parametrize("page", ["README.md", "docs/buffers.md"])
def test_the_example_runs(page):
    names = {}
    exec(blocks(page, "python")[0], names)
    key = "s" if page == "README.md" else "observation"
    assert names["sample"].experience[key].shape == (128, 4)
    if page == "README.md":  # V(s) is the first number of s, as the next one's is 0 in the mean
        assert names["w"].tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0], abs=0.2)


def test_the_vault_of_the_page_holds_the_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    replay = dqn_jax.buffers.uniform_replay(800, num_envs=8)
    names = dict(Vault=Vault, item={"reward": 0.0})
    steps = {"reward": jnp.arange(80.0).reshape(10, 8)}
    names["state"] = replay.add_batch(replay.init(names["item"]), steps)
    exec(blocks("docs/buffers.md", "python")[2], names)
    assert names["steps"]["reward"].tolist() == steps["reward"].tolist()


def test_the_target_of_the_page_is_that_of_n_steps():
    """Of one window whose second step is truncated, and of one in which no episode ends."""
    ends = jnp.zeros((2, 4), bool)
    window = {"reward": jnp.ones((2, 4)), "observation": jnp.tile(jnp.arange(4.0), (2, 1))}
    window |= {"terminated": ends, "truncated": ends.at[0, 1].set(True)}
    names = dict(window=window, n=3, value=lambda x: x, buffers=dqn_jax.buffers, jnp=jnp)
    exec(blocks("docs/buffers.md", "python")[1], names)
    wanted = [1 + 0.99 + 0.99**2 * 2, 1 + 0.99 + 0.99**2 + 0.99**3 * 3]
    assert names["target"].tolist() == pytest.approx(wanted)


def test_train_is_called_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    (code,) = blocks("docs/lasting.md", "python")
    exec(code.replace("20_000", "12_000"), names)
    assert names["returns"].shape == (1,)
    assert (names["folder"] / "args.json").exists()


MODULES = {
    name: code
    for text in PAGES.values()
    for name, code in re.findall(r"`(my_\w+)\.py`[^`]*?:\n\n```python\n(.*?)```", text, re.DOTALL)
}


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
    training, _, _ = dqn_jax.train(args, run)
    assert (training.envs is not None) == (envs == "compiled")
    alg, _ = dqn_jax.set_up(args, run)
    policy = alg.policy(training.agent)
    if envs:
        policy = policy[0]
    returns = dqn_jax.evaluate(alg, run, policy, 2)
    assert returns == pytest.approx([-0.9, -0.9])  # nine steps, the shortest way


@pytest.mark.parametrize(
    ("library", "name", "env"),
    [
        ("minigrid", "my_minigrid", "Empty-v0"),
        ("gymnax", "my_gymnax", "Breakout-MinAtar"),
        slow("gymnax", "my_gymnax", "SpaceInvaders-MinAtar"),
    ],
)
def test_wrapped_libraries_train(library, name, env, tmp_path, monkeypatch):
    pytest.importorskip(library)
    module(name, tmp_path, monkeypatch)
    args = dqn_jax.Args(total_timesteps=2_000, num_envs=4, learning_starts=500)
    run = dqn_jax.Run(env_id=f"{name}:{env}", log_interval=1_000, eval_episodes=2)
    training, returns, _ = dqn_jax.train(args, run)
    assert (training.envs is not None) == (library == "gymnax")
    assert returns[0] >= 0


def test_ray_trains_the_sweep_of_the_page(tmp_path):
    """Two short runs of it, in processes of Ray's."""
    pytest.importorskip("ray")
    code = MODULES["my_sweep"].replace("100_000", "12_000")
    code = code.replace("(1e-4, 2.5e-4, 1e-3)", "(1e-3,)")
    (tmp_path / "my_sweep.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "my_sweep.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    results = [line for line in lines if line and line[0] == "0.001"]
    assert [line[1] for line in results] == ["1", "2"]
    for _, _, mean_return, folder in results:
        assert float(mean_return) > 8
        assert read_events(folder)[0]["charts/SPS"][-1][0] == 12_000


@pytest.mark.parametrize("block", blocks("docs/recipes.md", "python"))
def test_recipes_run_as_they_stand(block):
    if "import minari" in block:
        pytest.importorskip("minari")
    if "environ" not in block and "jax.config" not in block:
        exec(block, {"__name__": "recipe"})
        return
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    command = [sys.executable, "-c", block]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_block_of_python_is_run_by_a_test():
    ours = {"README.md": 1, "docs/buffers.md": 3, "docs/lasting.md": 1}
    for page in PAGES:
        others = [x for x in blocks(page, "python") if x not in MODULES.values()]
        wanted = len(others) if page == "docs/recipes.md" else ours.get(page, 0)
        assert len(others) == wanted, page


def test_reference_runs_show_what_a_new_run_should_look_like():
    folders = sorted((ROOT / "runs" / "reference").iterdir())
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 5_000_000
    found = {tuple(folder.name.split("__")[:2]) for folder in folders}
    discrete = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "LunarLander-v3")
    wanted = {(env, script) for env in discrete for script in SCRIPTS}
    assert found >= wanted | {("Pendulum-v1", "ppo_jax")}
    for folder in folders:
        scalars, _ = read_events(folder)
        own = "losses/td_loss" if "dqn" in folder.name else "losses/policy_loss"
        for tag in ("charts/episodic_return", "charts/SPS", own):
            assert scalars[tag], (folder.name, tag)
        assert scalars["charts/SPS"][-1][0] >= 499_000
