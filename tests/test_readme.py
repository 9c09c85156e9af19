"""The README: its code and its tables of names run, its flags are those of the scripts."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from events import ROOT, read_events

import buffers
import dqn_jax
import per_dqn_jax
import ppo_jax

README = (ROOT / "README.md").read_text()


def test_the_example_runs():
    code = re.search(r"```python\n(import jax.*?)```", README, re.DOTALL).group(1)
    names = {}
    exec(code, names)
    assert names["sample"].experience["observation"].shape == (128, 4)


def test_every_line_of_coming_from_runs():
    section = README.split("### Coming from")[1].split("\n## ")[0]
    lines = re.findall(r"^\|.*\| `(.+)` \|$", section, re.MULTILINE)
    assert len(lines) > 30
    item = {"observation": jnp.zeros(3), "reward": 0.0}

    def several(*lead):
        return {
            "observation": jnp.ones((*lead, 3)),
            "reward": jnp.arange(np.prod(lead)).reshape(lead) * 1.0,
        }

    names = dict(
        buffers=buffers,
        jax=jax,
        jnp=jnp,
        key=jax.random.key(0),
        item=item,
        items=several(20),
        step=several(4) | {"reward": 20 * jnp.arange(4.0) - 1},
        steps=several(20, 4),
        sequences=several(4, 20),
        item_update_fn=lambda x: jax.tree.map(lambda leaf: leaf + 1, x),
        clustering_fn=lambda x: jnp.int32(x["reward"] > 5),
    )
    for line in lines:
        exec(line, names)
    # What some of them must have given.
    assert names["window"]["reward"].shape == (32, 2)
    np.testing.assert_array_equal(names["second"]["reward"], names["first"]["reward"] + 1)
    assert names["can_add"]
    assert names["can_pop"]
    np.testing.assert_array_equal(names["batch"]["reward"], np.arange(32).reshape(8, 4))
    np.testing.assert_allclose(names["weights"], 1, rtol=1e-6)
    assert names["data"]["observation"].shape == (128, 3)


def test_flat_buffer_quickstart_on_two_devices():
    """Flashbax's quickstart in our names: add in batches, can_sample, sample, under pmap."""
    replay = buffers.uniform_replay(64, num_envs=2, sequence_length=2)
    item = {"obs": jnp.zeros(5), "reward": jnp.float32(0)}
    states = jax.pmap(lambda _: replay.init(item))(jnp.arange(2))
    add = jax.pmap(replay.add, donate_argnums=0)
    for t in range(40):
        step = {"obs": jnp.full((2, 2, 5), t * 1.0), "reward": jnp.full((2, 2), t * 1.0)}
        states = add(states, step)
        assert jax.pmap(replay.can_sample)(states).tolist() == [t >= 1] * 2
    draw = jax.pmap(lambda state, key: replay.sample(state, key, 16).experience)
    pairs = draw(states, jax.random.split(jax.random.key(0), 2))
    first, second = pairs["reward"][:, :, 0], pairs["reward"][:, :, 1]
    np.testing.assert_array_equal(second, first + 1)
    assert first.min() >= 40 - 32
    assert (first[0] != first[1]).any()


def test_flat_buffer_quickstart_line_by_line():
    """The one of Flashbax's README: beside it where that is installed."""
    steps = [
        {"obs": jnp.array([1, 2]), "reward": jnp.array(3.0)},
        {"obs": jnp.array([4, 5]), "reward": jnp.array(6.0)},
        {"obs": jnp.array([7, 8]), "reward": jnp.array(9.0)},
    ]
    replay = buffers.uniform_replay(32, sequence_length=2)
    state = replay.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
    answers, drawn = [], []
    for step in steps:
        state = replay.add(state, step)
        answers.append(bool(replay.can_sample(state, min_size=2 + 1)))  # two pairs, three steps
    for seed in range(20):
        pair = replay.sample(state, jax.random.PRNGKey(seed), 1).experience
        drawn.append(pair["reward"][0].tolist())
    assert answers == [False, False, True]
    assert set(map(tuple, drawn)) == {(3.0, 6.0), (6.0, 9.0)}
    flashbax = pytest.importorskip("flashbax")
    buffer = flashbax.make_flat_buffer(max_length=32, min_length=2, sample_batch_size=1)
    theirs = buffer.init({"obs": jnp.array([0, 0]), "reward": jnp.array(0.0)})
    for step, answer in zip(steps, answers, strict=True):
        theirs = buffer.add(theirs, step)
        assert bool(buffer.can_sample(theirs)) == answer
    pairs = [buffer.sample(theirs, jax.random.PRNGKey(i)).experience for i in range(20)]
    found = {(float(p.first["reward"][0]), float(p.second["reward"][0])) for p in pairs}
    assert found == set(map(tuple, drawn))


def test_the_functional_environment_of_the_readme_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    (code,) = [block for block in blocks if "FuncEnv" in block]
    (tmp_path / "readme_chain.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    args = ppo_jax.Args(total_timesteps=20_000, num_envs=8, learning_rate=3e-3)
    run = ppo_jax.Run(env_id="readme_chain:MyChain-v0", log_interval=2_000, eval_episodes=0)
    training, returns, _ = ppo_jax.train(args, run)
    assert returns[0] > 0.99
    assert training.envs is not None  # it was compiled with the training


def test_the_tables_of_flags_have_those_of_the_scripts():
    rows = re.findall(r"^\| (`--[a-z-]+`(?:, `--[a-z-]+`)*) \|", README, re.MULTILINE)
    written = set(re.findall(r"--([a-z-]+)", " ".join(rows)))
    groups = [x for script in (dqn_jax, per_dqn_jax, ppo_jax) for x in (script.Args, script.Run)]
    assert written == {name.replace("_", "-") for group in groups for name in vars(group())}


def test_reference_runs_show_what_a_new_run_should_look_like():
    folders = sorted((ROOT / "runs" / "reference").iterdir())
    files = [file for folder in folders for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < 5_000_000
    found = {tuple(folder.name.split("__")[:2]) for folder in folders}
    discrete = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0", "phys2d-CartPole-v1")
    scripts = ("dqn_jax", "per_dqn_jax", "ppo_jax")
    wanted = {(env, script) for env in discrete for script in scripts}
    assert found >= wanted | {("Pendulum-v1", "ppo_jax")}
    for folder in folders:
        scalars, _ = read_events(folder)
        own = "losses/td_loss" if "dqn" in folder.name else "losses/policy_loss"
        for tag in ("charts/episodic_return", "charts/SPS", "eval/episodic_return", own):
            assert scalars[tag], (folder.name, tag)
        assert scalars["charts/SPS"][-1][0] >= 499_000
