"""docs/buffers.md, "Coming from": each line runs, and the peers' quickstarts give the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from events import ROOT

import buffers

PAGE = (ROOT / "docs" / "buffers.md").read_text()


def test_every_line_of_coming_from_runs():
    section = PAGE.split("## Coming from")[1]
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
