"""README.md, docs/ and benchmarks/: links lead somewhere, flags and metrics are those of the
scripts, programs run, changes to the scripts apply and train, reference runs are there.
"""

import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional, CartPoleParams
from helpers import (
    OTHER_ALGORITHMS,
    ROOT,
    diff_of,
    make_trainer,
    more,
    network_of,
    other_algorithm,
    read_events,
    slow,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.util import tensor_util

import cleanreplay
import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay.vault import Vault

pytestmark = pytest.mark.pages

MODULES_OF_SCRIPTS = (dqn_jax, per_dqn_jax, ppo_jax, r2d2_jax, recurrent_ppo_jax, sac_jax)
SCRIPTS = {x.__name__: x for x in MODULES_OF_SCRIPTS}
FILES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/*.md")),
]
RECIPES = [str(file.relative_to(ROOT)) for file in FILES if file.parent.name == "recipes"]
PAGES = {str(file.relative_to(ROOT)): file.read_text() for file in FILES}


def blocks(page, language):
    """The blocks of code of a page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


def anchors(text):
    """Those of the headings, as GitHub names them."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


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


def given_flags(words):
    return {word for word in words if word.startswith("--")}


def flags_of(script):
    defaults = vars(script.Args()) | vars(script.Run())
    switched_off = [f"no_{name}" for name, default in defaults.items() if isinstance(default, bool)]
    return {f"--{name.replace('_', '-')}" for name in [*defaults, *switched_off]}


@pytest.mark.parametrize("page", PAGES)
def test_commands_have_flags_that_exist(page):
    for command in commands(page):
        own, _, for_scripts = command.partition(" -- ")  # a benchmark hands those on
        path, *words = shlex.split(own)
        name = path.removesuffix(".py")
        script = other_algorithm(name) if name in OTHER_ALGORITHMS else SCRIPTS.get(name)
        if script is not None:
            assert given_flags(words) <= flags_of(script), command
        elif given_flags(words):
            source = (ROOT / path).read_text()
            for flag in given_flags(words):  # of argparse, or an argument that tyro makes a flag
                argument = f"\n    {flag.removeprefix('--').replace('-', '_')}: "
                assert f'"{flag}"' in source or argument in source, command
        for each in SCRIPTS.values():
            assert given_flags(shlex.split(for_scripts)) <= flags_of(each), command


def flags(text):
    """Those that the tables of a page or a section name."""
    rows = re.findall(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \|", text, re.MULTILINE)
    return re.findall(r"--([a-z-]+)", " ".join(rows))


def names_of(settings):
    """The flags of `Args` or `Run` as they are written, without the dashes in front."""
    return sorted(name.replace("_", "-") for name in vars(settings))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_flags_have_those_of_the_scripts(name):
    script = SCRIPTS[name]
    written = flags(PAGES[f"docs/{name.removesuffix('_jax')}.md"])
    if name == "per_dqn_jax":  # its page has those that DQN has not
        written += flags(PAGES["docs/dqn.md"])
    assert sorted(written) == names_of(script.Args())
    assert sorted(flags(PAGES["docs/runs.md"])) == names_of(script.Run())


def metrics(text, quote):
    """The names of metrics in a text, in quotes of a page or of a source."""
    return set(re.findall(rf"{quote}((?:charts|losses|eval)/\w+){quote}", text))


@pytest.mark.parametrize("name", SCRIPTS)
def test_tables_of_metrics_have_those_of_the_scripts(name):
    source = (ROOT / f"{name}.py").read_text()
    logged = metrics(source, '"')
    logged |= {f"eval/{name}" for name in cleanreplay.experiment.STATISTICS}
    logged |= {"charts/success_rate", "eval/success_rate"}
    page = PAGES[f"docs/{name.removesuffix('_jax')}.md"]
    written = metrics(page + PAGES["docs/runs.md"], "`")
    assert written <= logged
    if name == "per_dqn_jax":  # its page has those that DQN has not
        written |= metrics(PAGES["docs/dqn.md"], "`")
    assert logged <= written


@pytest.mark.parametrize(
    ("name", "title"), [("c51_jax", "C51"), ("qr_dqn_jax", "QR-DQN"), ("td3_jax", "TD3")]
)
def test_the_section_of_a_diff_has_its_flags_and_metrics_and_quotes_it(name, title):
    page = PAGES["docs/other_algorithms.md"]
    section = page.split(f"\n## {title}\n")[1].split("\n## ")[0]
    script, original = other_algorithm(name), SCRIPTS[OTHER_ALGORITHMS[name]]
    added = set(names_of(script.Args())) - set(names_of(original.Args()))
    assert set(flags(section)) == added
    diff = diff_of(name).read_text()
    new = [line for line in diff.splitlines()[2:] if line[0] == "+"]
    assert metrics("\n".join(new), '"') <= metrics(section, "`")
    shown = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    assert shown
    for block in shown:
        assert block in diff


@pytest.mark.parametrize("page", ["README.md", "docs/buffers.md"])
def test_the_example_runs(page):
    names = {}
    exec(blocks(page, "python")[0], names)
    assert names["sample"].experience["observation"].shape == (128, 4)
    if page == "README.md":
        assert names["weights"].tolist() == [1.0] * 128  # all were as likely
        largest = abs(names["td_error"]).max()
        assert names["state"].max_priority == pytest.approx(largest + 1e-6)


def test_the_vault_of_the_page_holds_the_rows():
    replay = dqn_jax.buffers.uniform_replay(800, num_envs=8)
    names = dict(item={"reward": 0.0})
    steps = {"reward": jnp.arange(80.0).reshape(10, 8)}
    names["state"] = replay.add_batch(replay.init(names["item"]), steps)
    exec(blocks("docs/buffers.md", "python")[2], names)
    assert names["steps"]["reward"].tolist() == steps["reward"].tolist()


def test_the_target_of_the_page_is_that_of_n_steps():
    """Of one window whose second step is truncated, and of one in which no episode ends."""
    no_end = jnp.zeros((2, 4), bool)
    window = {
        "reward": jnp.ones((2, 4)),
        "observation": jnp.tile(jnp.arange(4.0), (2, 1)),
        "terminated": no_end,
        "truncated": no_end.at[0, 1].set(True),
    }
    names = dict(window=window, n=3, value=lambda x: x, buffers=dqn_jax.buffers, jnp=jnp)
    exec(blocks("docs/buffers.md", "python")[1], names)
    of_two_steps = 1 + 0.99 + 0.99**2 * 2  # the value is that of observation 2
    of_three_steps = 1 + 0.99 + 0.99**2 + 0.99**3 * 3
    assert names["target"].tolist() == pytest.approx([of_two_steps, of_three_steps])


def test_train_is_called_from_python():
    names: dict[str, Any] = {}
    code = blocks("docs/runs.md", "python")[3]
    exec(code.replace("20_000", "12_000"), names)
    # Of 300 iterations of 40 steps the last 50 learn, with 4 gradient steps each.
    assert names["state"].opt_state[0].count == 200
    assert names["returns"].shape == (1,)
    assert (names["folder"] / "args.json").exists()


def test_a_signal_ends_the_loop_of_the_page(monkeypatch):
    seeds = []

    def train(args, run, stop):
        seeds.append(run.seed)
        if run.seed == 1:
            stop.append(2)

    monkeypatch.setattr(dqn_jax, "train", train)
    exec(blocks("docs/runs.md", "python")[4], {})
    assert seeds == [0, 1]


def play_greedily(params, frame_stack):
    """An episode of CartPole: the actions of the highest value, and all frames that were seen.

    The first observation has frames of zeros before its own.
    """
    network = network_of(dqn_jax, np.zeros((1, frame_stack, 4), np.float32))
    q_values = jax.jit(network.apply)
    frames = [np.zeros(4, np.float32)] * frame_stack
    actions = []
    over = False
    with gym.make("CartPole-v1") as env:
        frame, _ = env.reset(seed=0)
        while not over:
            frames.append(frame)
            q = q_values(params, np.stack(frames[-frame_stack:])[None])
            action = int(np.argmax(q))
            actions.append(action)
            frame, _, terminated, truncated, _ = env.step(action)
            over = terminated or truncated
    frames.append(frame)
    return actions, frames


@pytest.mark.parametrize("block", blocks("docs/walk.md", "python"))
def test_the_walk_quotes_dqn_as_it_is(block):
    assert block in (ROOT / "dqn_jax.py").read_text()


def make_agent(script, args, run):
    """The agent of a run that was trained with these flags."""
    with closing(script.make_envs(args, run, 1)) as envs:
        return script.Agent(args, envs.single_observation_space, envs.single_action_space)


@pytest.mark.parametrize(("block", "frame_stack"), [more(0, 1), (1, 4)], ids=["single", "stacked"])
def test_a_trained_agent_plays_an_episode(block, frame_stack):
    """It takes the actions of the highest value, of the last frames as they are stacked here."""
    args = dqn_jax.Args(
        total_timesteps=800,
        learning_starts=200,
        train_frequency=1,
        target_network_frequency=50,
        learning_rate=1e-3,
        frame_stack=frame_stack,
    )
    state, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=1))
    code = blocks("docs/runs.md", "python")[block]
    names: dict[str, Any] = {}
    exec(re.sub(r'"runs/.*"', repr(str(folder)), code), names)

    actions, frames = play_greedily(state.params, frame_stack)
    assert set(actions) == {0, 1}
    assert names["episodic_return"] == len(actions)
    newest = np.reshape(frames[-frame_stack:], names["observation"].shape)
    np.testing.assert_array_equal(names["observation"], newest)


def test_an_agent_is_read_with_numpy():
    """Its actions are those of the loaded policy."""
    args = dqn_jax.Args(total_timesteps=400, learning_starts=200, learning_rate=0.05)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(eval_episodes=1))
    names: dict[str, Any] = {}
    code = blocks("docs/runs.md", "python")[2]
    exec(re.sub(r"runs/.*(?=/best)", str(folder), code), names)
    observations = np.random.default_rng(0).normal(size=(10, 4))
    wanted = cleanreplay.load_policy(folder)(observations)
    assert set(wanted) == {0, 1}
    np.testing.assert_array_equal(names["actions"], wanted)


@pytest.mark.slow
def test_an_agent_with_a_memory_plays_an_episode():
    """It acts as the agent does whose memory goes from step to step, from an empty one on."""
    args = r2d2_jax.Args(total_timesteps=800, learning_starts=480)
    state, _, folder = r2d2_jax.train(args, r2d2_jax.Run(eval_episodes=1))
    (code,) = blocks("docs/r2d2.md", "python")
    names: dict[str, Any] = {}
    exec(re.sub(r'"runs/.*"', repr(str(folder)), code), names)

    agent = make_agent(r2d2_jax, args, r2d2_jax.Run())
    memory = agent.no_memory(1)
    steps = 0
    over = False
    with gym.make("cleanreplay.memory_tasks:CartPoleNoVelocity-v0") as env:
        observation, _ = env.reset(seed=0)
        while not over:
            action, memory = agent.act(state.params, observation[None], memory)
            observation, _, terminated, truncated, _ = env.step(int(action[0]))
            over = terminated or truncated
            steps += 1
    assert names["episodic_return"] == steps
    np.testing.assert_array_equal(names["observation"], observation)


class Crashes(gym.Env):
    """Episodes of two steps; every fourth of them ends in a crash."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple:
        self.steps += 1
        over = self.steps == 2
        crashes = over and self.episode % 4 == 0
        return np.zeros(1, np.float32), 0.0, over, False, {"crashed": crashes}


gym.register("Crashes-v0", Crashes)


def patched(heading, tmp_path, monkeypatch, script="dqn_jax"):
    """A script with the changes of docs/README.md under `heading`, as a module.

    Those of ppo_jax.py come last, after its name.
    """
    answer = PAGES["docs/README.md"].split(f"**... {heading}?**")[1].split("**...")[0]
    answer = answer.split("In `ppo_jax.py`")[script == "ppo_jax"]
    source = (ROOT / f"{script}.py").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", answer, re.DOTALL):
        lines = diff.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        assert source.count(old) == 1
        source = source.replace(old, new.replace("is_due(10_000,", "is_due(100,"))
    name = f"my_{script.removesuffix('_jax')}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    module.io, module.PIL = io, PIL  # which the page says to import
    module.histogram_pb = histogram_pb
    return module


def trained(module, env_id="CartPole-v1", init_from="", **more):
    """The State of a short run, its charts and its folder."""
    args = module.Args(total_timesteps=480, num_envs=2, learning_starts=200, init_from=init_from)
    run = module.Run(env_id=env_id, eval_episodes=0, checkpoint_interval=0)
    run = replace(run, **{"log_interval": 240} | more)
    state, _, folder = module.train(args, run)
    scalars, _ = read_events(folder)
    return state, scalars, folder


def test_how_to_log_a_number(tmp_path, monkeypatch):
    _, scalars, _ = trained(patched("log a number", tmp_path, monkeypatch))
    largest = dict(scalars["losses/largest_q"])
    mean = dict(scalars["losses/q_values"])
    assert largest.keys() == mean.keys() == {240, 480}
    assert all(largest[step] > mean[step] for step in mean)


def test_how_to_log_a_number_from_the_environment(tmp_path, monkeypatch):
    """Of the last 100 episodes of two environments, 50 each; a rollout is collected ahead.

    An episode takes three steps with its reset. After 125 steps of each environment 42 are over, of
    which 10 crash, and after 245 steps 82: of the last 50 those with numbers 36, 40, ..., 80.
    """
    my_dqn = patched("log a number from the environment", tmp_path, monkeypatch)
    _, scalars, _ = trained(my_dqn, "Crashes-v0")
    first, second = scalars["charts/crash_rate"]
    assert first == (240, pytest.approx(10 / 42))
    assert second == (480, pytest.approx(12 / 50))


def test_how_to_log_a_histogram(tmp_path, monkeypatch):
    """The last one has as many values as there are drawable windows, in their range."""
    my_per = patched("log a histogram", tmp_path, monkeypatch, "per_dqn_jax")
    state, _, folder = trained(my_per)
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    histograms = events.Tensors("priorities")
    assert [histogram.step for histogram in histograms] == [100, 200, 300, 400]
    first = tensor_util.make_ndarray(histograms[0].tensor_proto)
    assert first[:, 2].sum() == 100 - 2  # each but the newest of each environment
    assert (first[0, 0], first[-1, 1]) == (1, 1)  # nothing was learned yet
    last = tensor_util.make_ndarray(histograms[-1].tensor_proto)
    assert last[0, 0] < 1
    assert last[-1, 1] <= state.replay.max_priority


@pytest.mark.parametrize("env_id", ["CartPole-v1", more("phys2d/CartPole-v1")])
def test_how_to_log_an_image(env_id, tmp_path, monkeypatch):
    """The same code in ordinary and in compiled runs."""
    my_dqn = patched("log an image, or run other code of my own", tmp_path, monkeypatch)
    _, _, folder = trained(my_dqn, env_id, log_interval=60, eval_interval=120)
    events = EventAccumulator(str(folder), size_guidance={"images": 0})
    events.Reload()
    assert [image.step for image in events.Images("weights")] == [120, 240, 360, 480]
    image = PIL.Image.open(io.BytesIO(events.Images("weights")[0].encoded_image_string))
    assert image.size == (120, 4)


def test_how_to_add_a_wrapper(tmp_path, monkeypatch):
    state, _, _ = trained(patched("add a wrapper", tmp_path, monkeypatch))
    assert state.params["params"]["q_0"]["kernel"].shape == (5, 120)


def test_how_to_change_the_network(tmp_path, monkeypatch):
    state, _, _ = trained(patched("change the network", tmp_path, monkeypatch))
    assert "LayerNorm_1" in state.params["params"]


def test_how_to_change_the_optimiser(tmp_path, monkeypatch):
    state, _, _ = trained(patched("change the optimiser", tmp_path, monkeypatch))
    assert state.opt_state[1][0].mu["params"]["q_0"]["kernel"].shape == (4, 120)


def test_how_to_freeze_a_layer(tmp_path, monkeypatch):
    """The first layer stays that of the run before, which had another optimiser."""
    run = dqn_jax.Run(eval_episodes=0)
    args = dqn_jax.Args(total_timesteps=480, learning_starts=200)
    before, _, folder = dqn_jax.train(args, run)
    my_dqn = patched("freeze a layer", tmp_path, monkeypatch)
    after, _, _ = trained(my_dqn, init_from=str(folder))
    for name, layer in after.params["params"].items():
        stays = np.array_equal(layer["kernel"], before.params["params"][name]["kernel"])
        assert stays == (name == "q_0")


def test_how_to_change_the_exploration(tmp_path, monkeypatch):
    """A softmax of values 0 and 1 at a temperature of 1 / log(3) has the odds 1 to 3."""
    my_dqn = patched("change the exploration", tmp_path, monkeypatch)
    args = my_dqn.Args(start_e=1 / np.log(3), end_e=1 / np.log(3))
    spaces = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    agent = my_dqn.DQN(args, *spaces)
    agent.network = SimpleNamespace(apply=lambda params, x: x)
    values = np.tile(np.float32([0, 1]), (20_000, 1))
    actions = agent.act(None, values, jax.random.PRNGKey(0), 0)
    assert np.mean(actions) == pytest.approx(0.75, abs=0.015)
    assert agent.act(None, values).all()


def test_how_to_tune_hyperparameters(tmp_path, monkeypatch):
    """A trial that is pruned at its second report ends the run there."""
    my_dqn = patched("tune hyperparameters", tmp_path, monkeypatch)
    reports = []
    trial = SimpleNamespace(
        report=lambda value, step: reports.append((step, value)),
        should_prune=lambda: len(reports) == 2,
    )
    args = my_dqn.Args(total_timesteps=960, num_envs=2, learning_starts=200)
    _, returns, folder = my_dqn.train(args, my_dqn.Run(log_interval=100), trial=trial)
    assert [step for step, _ in reports] == [100, 200]
    assert reports[-1][1] == pytest.approx(returns[0])
    scalars, _ = read_events(folder)
    assert [step for step, _ in scalars["charts/SPS"]] == [100, 200]


def test_how_to_change_the_replay(tmp_path, monkeypatch):
    my_dqn = patched("change the replay", tmp_path, monkeypatch)
    agent = make_agent(my_dqn, my_dqn.Args(num_envs=2, n_step=2), my_dqn.Run())
    assert (agent.replay.period, agent.replay.window) == (3, 3)
    assert agent.replay.max_size >= 10_000
    trained(my_dqn)


@pytest.mark.slow
def test_how_to_start_many_short_runs(tmp_path):
    """The first process writes what it compiled, and the second one compiles nothing new."""
    (block,) = [x for x in blocks("docs/README.md", "bash") if "JAX_COMPILATION_CACHE_DIR" in x]
    variables = dict(re.findall(r"export (\w+)=(\S+)", block))
    variables["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path / "cache")
    code = "import jax; print(jax.jit(lambda x: 2 * x)(21))"
    kept = []
    for _ in range(2):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, check=True)
        assert done.stdout == b"42\n"
        kept.append({file.name for file in (tmp_path / "cache").glob("*-cache")})
    assert len(kept[0]) > 0
    assert kept[1] == kept[0]


def masked_agent(my_script):
    """An agent of six actions, parameters, and observations [64, 8] that begin with masks."""
    space = gym.spaces.Box(0.0, 1.0, (8,), np.float32)
    agent = my_script.Agent(my_script.Args(), space, gym.spaces.Discrete(6))
    params = agent.policy_params(jax.jit(agent.init)(jax.random.key(0)))
    observation = np.random.default_rng(0).random((64, 8), np.float32)
    observation[:, :6] = observation[:, :6] < 0.5
    observation[:, 3] = observation[:, :3].sum(axis=1) == 0  # there is one that is allowed
    return agent, params, observation


BOTH_MASKED = pytest.mark.parametrize("script", ["dqn_jax", "ppo_jax"])
ALWAYS, NEVER = 0, 10**6  # steps at which DQN explores always, and hardly ever


@BOTH_MASKED
def test_how_to_mask_actions_that_are_then_never_taken(script, tmp_path, monkeypatch):
    my_script = patched("mask actions", tmp_path, monkeypatch, script)
    agent, params, observation = masked_agent(my_script)
    rows = np.arange(64)
    assert observation[rows, np.asarray(agent.act(params, observation))].all()
    for step in (ALWAYS, NEVER):
        for seed in range(20):
            action = np.asarray(agent.act(params, observation, jax.random.key(seed), step))
            assert observation[rows, action].all()


@BOTH_MASKED
def test_all_actions_that_a_mask_allows_are_explored_equally_often(script, tmp_path, monkeypatch):
    """PPO's first policy is almost uniform."""
    my_script = patched("mask actions", tmp_path, monkeypatch, script)
    agent, params, _ = masked_agent(my_script)
    observation = np.tile(np.float32([1, 0, 1, 1, 0, 0, 0.3, 0.7]), (12_000, 1))
    counts = np.bincount(agent.act(params, observation, jax.random.key(0), ALWAYS), minlength=6)
    assert counts[[0, 2, 3]] == pytest.approx(4_000, rel=0.1)
    assert counts.sum() == counts[[0, 2, 3]].sum()


@BOTH_MASKED
def test_a_row_that_is_wholly_masked_is_finite(script, tmp_path, monkeypatch):
    my_script = patched("mask actions", tmp_path, monkeypatch, script)
    agent, params, observation = masked_agent(my_script)
    observation[:, :6] = 0
    network_params = params if script == "dqn_jax" else params[0]
    output = agent.network.apply(network_params, observation)
    if script == "dqn_jax":
        np.testing.assert_array_equal(output, np.full((64, 6), np.float32(-1e9)))
        return
    action = np.int32(np.arange(64) % 6)
    log_prob, entropy = agent.actions.log_prob_and_entropy(output[0], action)
    np.testing.assert_allclose(log_prob, -np.log(6), rtol=1e-6)
    np.testing.assert_allclose(entropy, np.log(6), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("vectorization", ["sync", "auto"], ids=["ordinary", "compiled"])
@BOTH_MASKED
def test_runs_with_masks_in_a_dict_take_no_other_actions(
    script, vectorization, tmp_path, monkeypatch
):
    """The environment gives no reward for an action that its mask forbids, and otherwise 1."""
    my_script = patched("mask actions", tmp_path, monkeypatch, script)
    flags = {"learning_starts": 200} if script == "dqn_jax" else {}
    args = my_script.Args(total_timesteps=1_024, num_envs=2, **flags)
    run = my_script.Run(env_id="environments:Masked-v0", vectorization=vectorization)
    assert is_written_in_jax(my_script, args, run) == (vectorization == "auto")
    _, returns, folder = my_script.train(args, run)
    assert returns == pytest.approx([9.0])
    scalars, _ = read_events(folder)
    assert {value for _, value in scalars["charts/episodic_return"]} == {9.0}
    assert scalars["eval/episodic_return"][-1][1] == 9.0


@pytest.mark.slow
def test_taxi_gives_its_mask_to_the_agent(tmp_path, monkeypatch):
    """A step costs 1, and an illegal pick-up or drop-off 10. An episode has at most 200 steps."""
    write_module("my_taxi", tmp_path, monkeypatch)
    my_dqn = patched("mask actions", tmp_path, monkeypatch)
    args = my_dqn.Args(total_timesteps=2_400, num_envs=2, learning_starts=200)
    run = my_dqn.Run(env_id="my_taxi:MaskedTaxi-v0", eval_episodes=0, checkpoint_interval=0)
    agent = make_agent(my_dqn, args, run)
    assert agent.example_step.observation.shape == (6 + 500,)
    _, returns, _ = my_dqn.train(args, run)
    assert -200 <= returns[0] < -100


def shows_last_reward(observation, reward, valid):
    """Whether observations [S, N, ...] end with the reward of the step before, 0 at a start."""
    begins = np.concatenate([np.ones_like(valid[:1]), ~valid[:-1]])
    last_reward = np.concatenate([np.zeros_like(reward[:1]), reward[:-1]])
    return np.array_equal(observation[..., -1], np.where(begins, 0, last_reward))


def test_the_wrapper_shows_the_last_reward(tmp_path, monkeypatch):
    """Two episodes and more of a bandit whose rewards are 0 and 1."""
    write_module("my_bandit", tmp_path, monkeypatch)
    args = recurrent_ppo_jax.Args(num_envs=2, num_steps=50, sequence_length=50, num_minibatches=1)
    run = recurrent_ppo_jax.Run(env_id="my_bandit:Bandit-v0", env_kwargs='{"is_jax": false}')
    assert not is_written_in_jax(recurrent_ppo_jax, args, run)
    agent = make_agent(recurrent_ppo_jax, args, run)
    key = jax.random.key(0)
    params = agent.policy_params(jax.jit(agent.init)(key))
    with closing(recurrent_ppo_jax.make_envs(args, run, 2)) as envs:
        env_state = (*recurrent_ppo_jax.reset(envs, jax.random.PRNGKey(0), 0), agent.no_memory(2))
        rows, _ = recurrent_ppo_jax.collect_rollout(agent, envs, params, env_state, key, 0)
    assert (~rows.valid).sum() == 4
    assert 10 < rows.reward.sum() < 90
    assert shows_last_reward(rows.observation, rows.reward, rows.valid)


def test_the_functional_wrapper_shows_the_last_reward(tmp_path, monkeypatch):
    write_module("my_bandit", tmp_path, monkeypatch)
    args = recurrent_ppo_jax.Args(num_envs=2, num_steps=50, sequence_length=50, num_minibatches=1)
    run = recurrent_ppo_jax.Run(env_id="my_bandit:Bandit-v0")
    trainer = make_trainer(recurrent_ppo_jax, args, run)
    key = jax.random.PRNGKey(0)
    params = trainer.agent.policy_params(trainer.agent.init(key))
    collect = jax.jit(trainer.envs.collect)
    _, (rows, _) = collect(trainer.envs.reset(key, 2), params, key, 0)
    assert (~rows.valid).sum() == 4
    assert 10 < rows.reward.sum() < 90
    assert shows_last_reward(*map(np.asarray, (rows.observation, rows.reward, rows.valid)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kwargs", "least", "most"),
    [("{}", 16.5, 18.0), ('{"shows_reward": false}', 8.5, 11.5)],
    ids=["with", "without"],
)
def test_a_bandit_is_learned_only_with_the_last_reward(
    kwargs, least, most, tmp_path, monkeypatch, optimised
):
    """An arm pays 0.9 or 0.1: 10 of 20 pulls at random, and 18 if the better one were known."""
    write_module("my_bandit", tmp_path, monkeypatch)
    args = recurrent_ppo_jax.Args(total_timesteps=30_720)
    run = recurrent_ppo_jax.Run(
        env_id="my_bandit:Bandit-v0",
        env_kwargs=kwargs,
        log_interval=30_720,
        eval_episodes=200,
        checkpoint_interval=0,
    )
    _, _, folder = recurrent_ppo_jax.train(args, run)
    ((_, mean_return),) = read_events(folder)[0]["eval/episodic_return"]
    assert least < mean_return < most


MODULES = {
    name: code
    for text in PAGES.values()
    for name, code in re.findall(r"`(my_\w+)\.py`[^`]*?:\n\n```python\n(.*?)```", text, re.DOTALL)
}


def write_module(name, tmp_path, monkeypatch):
    """Puts a module of a page into the folder in which the test runs."""
    (tmp_path / f"{name}.py").write_text(MODULES[name])
    monkeypatch.syspath_prepend(tmp_path)


def is_written_in_jax(script, args, run):
    """Whether the run is compiled."""
    with closing(script.make_envs(args, run, 1)) as envs:
        return cleanreplay.jax_envs.find_jax_env(envs, run) is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env", "is_compiled"),
    [("my_corridor", "Corridor-v0", False), ("my_fast_corridor", "FastCorridor-v0", True)],
)
def test_environments_of_your_own_are_learned(name, env, is_compiled, tmp_path, monkeypatch):
    write_module(name, tmp_path, monkeypatch)
    args = dqn_jax.Args(
        total_timesteps=12_000,
        num_envs=4,
        learning_starts=500,
        learning_rate=1e-3,
        train_frequency=4,
    )
    run = dqn_jax.Run(env_id=f"{name}:{env}", log_interval=1_000, eval_episodes=0)
    state, _, _ = dqn_jax.train(args, run)
    assert is_written_in_jax(dqn_jax, args, run) == is_compiled
    agent = make_agent(dqn_jax, args, run)
    params = agent.policy_params(state)
    if is_compiled:  # with an axis for the agents
        params = jax.tree.map(lambda x: x[0], params)
    with closing(dqn_jax.make_envs(args, run, 2)) as envs:
        returns = cleanreplay.experiment.play_episodes(agent, run, params, envs, [])
    assert returns == pytest.approx([-0.9, -0.9])  # nine steps, the shortest way


def test_each_agent_and_each_episode_has_its_own_pole(tmp_path, monkeypatch):
    """Its length stays the same in an episode, and the pole moves as one of this length does."""
    write_module("my_random_cartpole", tmp_path, monkeypatch)
    run = dqn_jax.Run(env_id="my_random_cartpole:RandomCartPole-v0", num_seeds=2)
    args = dqn_jax.Args(num_envs=3, train_frequency=300, end_e=1.0)
    trainer = make_trainer(dqn_jax, args, run)
    (_, lengths), *_ = [trainer.init().envs.inner]
    assert len(np.unique(lengths)) == 6
    assert ((lengths >= 0.25) & (lengths <= 1.0)).all()

    envs = trainer.envs
    state = envs.reset(jax.random.PRNGKey(0), 3)
    params = jax.jit(trainer.agent.init)(jax.random.PRNGKey(0)).params
    key = jax.random.PRNGKey(1)

    def step(state, t):
        keys = jax.random.split(jax.random.fold_in(key, t), 3)
        after, (row, _) = envs.step(params, key, state, (t, keys, envs.initial(keys)))
        return after, (state.inner, row, after.inner)

    _, (before, row, after) = jax.lax.scan(step, state, jnp.arange(60))
    resets = ~row.valid
    assert resets.sum() > 3
    np.testing.assert_array_equal(before[1][row.valid], after[1][row.valid])
    assert (before[1][resets] != after[1][resets]).all()
    cartpole = CartPoleFunctional()
    for t, i in [(0, 0), (0, 1), (40, 2)]:
        own = CartPoleParams(length=before[1][t, i])
        wanted = cartpole.transition(before[0][t, i], row.action[t, i], key, own)
        if row.valid[t, i]:
            np.testing.assert_allclose(after[0][t, i], wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore")  # of Minari
def test_the_dataset_of_demonstrations_is_read(tmp_path, monkeypatch):
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    write_module("my_pusher", tmp_path, monkeypatch)
    runpy.run_path("my_pusher.py")
    args = sac_jax.Args(offline_data="minari:mountaincar/pusher-v0")
    agent = make_agent(sac_jax, args, sac_jax.Run(env_id="MountainCarContinuous-v0"))
    steps = cleanreplay.offline.of_minari(
        agent, agent.example_step, args.offline_data, None
    ).storage
    assert steps.valid.sum() == 885
    assert steps.terminated.sum() == 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Gymnasium's checks of the robots' spaces
@pytest.mark.parametrize("name", ["my_reach:Reach-v0", "my_fetch:FetchReach-v4"])
def test_environments_with_goals_train(name, tmp_path, monkeypatch):
    if name.startswith("my_fetch"):
        pytest.importorskip("gymnasium_robotics")
    write_module(name.partition(":")[0], tmp_path, monkeypatch)
    args = sac_jax.Args(total_timesteps=400, learning_starts=256, her_fraction=0.8)
    run = sac_jax.Run(env_id=name, log_interval=200, eval_episodes=2)
    scalars, _ = read_events(sac_jax.train(args, run)[2])
    assert len(scalars["charts/success_rate"]) == 2


@pytest.mark.filterwarnings("ignore:.*precision lowered")  # in EnvPool's spaces
@pytest.mark.parametrize(
    ("library", "script", "env", "least"),
    [
        slow("minigrid", dqn_jax, "my_minigrid:Empty-v0", 0),
        ("minatar", dqn_jax, "my_minatar:MinAtar/Asterix-v1", 0),
        ("gymnax", dqn_jax, "my_gymnax:Breakout-MinAtar", 0),
        slow("gymnax", dqn_jax, "my_gymnax:SpaceInvaders-MinAtar", 0),
        ("jumanji", ppo_jax, "my_jumanji:Snake-v1", 0),
        ("envpool", ppo_jax, "my_envpool:EnvPool/CartPole-v1", 15),
        ("shimmy.dm_control_compatibility", ppo_jax, "shimmy:dm_control/cartpole-balance-v0", 200),
    ],
)
def test_wrapped_libraries_train(library, script, env, least, tmp_path, monkeypatch):
    """The least mean return is what actions at random reach."""
    monkeypatch.setenv("MUJOCO_GL", "disable")  # without a screen dm_control would warn
    pytest.importorskip(library)
    name = env.partition(":")[0]
    if name in MODULES:
        write_module(name, tmp_path, monkeypatch)
    flags = {"learning_starts": 500} if script is dqn_jax else {}
    args = script.Args(total_timesteps=2_048, num_envs=2, **flags)
    run = script.Run(env_id=env, log_interval=1_024, eval_episodes=2)
    assert is_written_in_jax(script, args, run) == (library in ("gymnax", "jumanji"))
    _, returns, _ = script.train(args, run)
    assert returns[0] >= least


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


@pytest.mark.slow
def test_experience_on_disk_alone_is_learned_from(tmp_path, monkeypatch):
    """Two steps, reward 1 at the second: with a discount of 0.5 their values are 0.5 and 1."""
    args = dqn_jax.Args(
        total_timesteps=800,
        num_envs=8,
        learning_rate=1e-2,
        buffer_size=200,  # a quarter of what is kept on disk
        gamma=0.5,
        target_network_frequency=40,
        batch_size=64,
        end_e=1.0,
        learning_starts=600,
        train_frequency=4,
        save_experience=True,
    )
    run = dqn_jax.Run(env_id="environments:Probe-discount-v0", log_interval=100, eval_episodes=0)
    _, _, folder = dqn_jax.train(args, run)

    code = MODULES["my_offline_dqn"].replace("PENALTY = 20.0", "PENALTY = 0.0")
    code = code.replace("range(20)", "range(2)")
    file = tmp_path / "my_offline_dqn.py"
    file.write_text(code)
    monkeypatch.setattr(sys, "argv", [str(file), str(folder)])
    names = runpy.run_path(str(file), run_name="__main__")
    state = names["state"]
    assert state.replay.size == 100  # rows of 8 steps
    assert state.opt_state[0].count == 2_000
    network = network_of(dqn_jax, np.zeros((1, 1), np.float32))
    q = network.apply(state.params, np.array([[0.0], [1.0]], np.float32))
    np.testing.assert_allclose(q, [[0.5, 0.5], [1.0, 1.0]], atol=0.02)


def test_the_penalty_of_offline_learning_is_that_of_the_paper(tmp_path, monkeypatch):
    write_module("my_offline_dqn", tmp_path, monkeypatch)
    offline = importlib.import_module("my_offline_dqn")
    space = gym.spaces.Box(-1.0, 1.0, (3,))
    agent = offline.ConservativeDQN(dqn_jax.Args(), space, gym.spaces.Discrete(4))
    random = np.random.default_rng(0)
    batch = dqn_jax.Transition(
        observation=random.standard_normal((8, 3), np.float32),
        action=random.integers(4, size=8, dtype=np.int32),
        reward=random.standard_normal(8, np.float32),
        discount=np.full(8, 0.9, np.float32),
        next_observation=random.standard_normal((8, 3), np.float32),
        valid=np.arange(8) < 6,
    )
    state = agent.init(jax.random.key(0))
    loss, metrics = agent.loss(state.params, state.target_params, batch)
    q = np.asarray(agent.network.apply(state.params, batch.observation), np.float64)[:6]
    excess = np.log(np.exp(q).sum(axis=1)) - q[np.arange(6), batch.action[:6]]
    np.testing.assert_allclose(loss, metrics["losses/td_loss"] + 20 * excess.mean(), rtol=1e-5)


def test_experience_of_another_environment_is_not_learned_from(tmp_path, monkeypatch):
    write_module("my_offline_dqn", tmp_path, monkeypatch)
    offline = importlib.import_module("my_offline_dqn")
    about = {"env_id": "CartPole-v1", "env_kwargs": {"sutton_barto_reward": True}, "seed": 1}
    Vault(tmp_path / "experience", 0.0, num_envs=8, about=about)
    wanted = r"has experience of .*'sutton_barto_reward': True.*, not of .*'env_kwargs': {}"
    with pytest.raises(SystemExit, match=wanted):
        offline.learn_from(tmp_path / "experience", dqn_jax.Run(), dqn_jax.Args())


# Whatever of a recipe is made smaller for its test.
SMALLER: dict[str, tuple[str, str]] = {
    "whole_episodes": (
        "LENGTH = 10  # steps to the goal; a wrong action ends the episode\nSTEPS = 20_000",
        "LENGTH = 7\nSTEPS = 2_000",
    ),
    "optuna": ("ROUNDS = 4\nPOINTS = 16  # of a round", "ROUNDS = 2\nPOINTS = 3"),
}
LONG = ("whole_episodes", "two_players", "relabelled", "optuna")
PROGRAMS = {
    page.split("/")[-1].removesuffix(".md"): block
    for page in RECIPES
    for block in blocks(page, "python")
    if block not in MODULES.values()
}


@pytest.mark.parametrize("name", [slow(x) if x in LONG else x for x in PROGRAMS])
def test_recipes_run_as_they_stand(name):
    code = PROGRAMS[name]
    if name in SMALLER:
        old, new = SMALLER[name]
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


def test_every_block_of_python_is_run_by_a_test():
    ours = ("README.md", "docs/buffers.md", "docs/runs.md", "docs/r2d2.md", "docs/walk.md")
    for page in PAGES:
        others = [x for x in blocks(page, "python") if x not in MODULES.values()]
        # A recipe is one program, or a module that a test of its own runs.
        assert not others or page in ours or (page in RECIPES and len(others) == 1), page


REFERENCE_RUNS = sorted((ROOT / "benchmarks" / "runs").iterdir())


def test_reference_runs_show_what_a_new_run_should_look_like():
    own = {"ppo_jax": "losses/policy_loss", "sac_jax": "losses/actor_loss"}
    for folder in REFERENCE_RUNS:
        scalars, _ = read_events(folder)
        script = folder.name.split("__")[1]
        for tag in ("charts/episodic_return", "charts/SPS", own.get(script, "losses/td_loss")):
            assert scalars[tag], (folder.name, tag)
        assert scalars["charts/SPS"][-1][0] >= (20_000 if script == "sac_jax" else 499_000)
