"""docs/take_out.md: an agent in NumPy, in ONNX and in jax.export acts as with load_policy."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import save_agent
from jax import export
from test_docs_programs import MODULES, run_block, write_module

import cleanreplay
import dqn_jax
import iql_jax
import ppo_jax
import pqn_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax

pytestmark = pytest.mark.pages

BOX = dict(env_id="Pendulum-v1")
AGENTS = [
    (dqn_jax, {}),
    (pqn_jax, {}),
    (r2d2_jax, dict(last_action=True)),
    (ppo_jax, {}),
    (ppo_jax, BOX),
    (recurrent_ppo_jax, BOX | dict(last_action=True)),
    (sac_jax, BOX),
    (iql_jax, BOX | dict(offline_data="data.npz")),
]


def observations(size, count=50):
    return np.random.default_rng(size).normal(size=(count, size)).astype(np.float32)


@pytest.mark.parametrize(("script", "flags"), AGENTS)
def test_an_agent_acts_in_numpy(script, flags, monkeypatch):
    """A recurrent one, too, for three steps and at the start of the next episode."""
    save_agent(script, **dict(env_id="CartPole-v1") | flags)
    write_module("my_numpy_policy", monkeypatch)
    policy = runpy.run_path("my_numpy_policy.py")["Policy"]("best.safetensors")
    reference = cleanreplay.load_policy("best.safetensors")
    has_memory = script in (r2d2_jax, recurrent_ppo_jax)

    for t in range(4):
        x = observations(3 if flags.get("env_id") else 4) * (t + 1)
        is_first = [t == 3] if has_memory else []
        action, expected = policy(x, *is_first), reference(x, *is_first)
        assert action.shape == expected.shape
        np.testing.assert_allclose(action, expected, rtol=1e-5, atol=1e-5)


def run_program(name, monkeypatch, *arguments):
    Path(f"{name}.py").write_text(MODULES[name])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(f"{name}.py", run_name="__main__")


@pytest.mark.filterwarnings("ignore")  # of onnx
def test_an_agent_acts_in_onnxruntime(monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    save_agent(dqn_jax, env_id="CartPole-v1")
    run_program("my_onnx", monkeypatch, "best.safetensors", "agent.onnx")
    session = onnxruntime.InferenceSession("agent.onnx")
    reference = cleanreplay.load_policy("best.safetensors")

    for count in (1, 50):
        x = observations(4, count)
        (actions,) = session.run(None, {"observation": x})
        np.testing.assert_array_equal(actions, reference(x))


@pytest.mark.parametrize(("script", "flags"), [AGENTS[0], AGENTS[6]])
def test_an_agent_is_a_program_for_batches_of_any_size(script, flags, monkeypatch):
    agent, params = save_agent(script, **dict(env_id="CartPole-v1") | flags)
    run_program("my_export", monkeypatch, "best.safetensors", "agent.bin")
    program = export.deserialize(Path("agent.bin").read_bytes())

    for count in (1, 50):
        x = observations(3 if flags else 4, count)
        np.testing.assert_allclose(program.call(x), agent.act(params, x), rtol=1e-5, atol=1e-6)
    if script is dqn_jax:
        assert run_block("docs/take_out.md", 4)["actions"].shape == (10,)
