"""`later`: for each step the index of a later one of its episode, all as likely."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Windows, both, describe, fast_at_ends, start_at

import buffers

DRAWS = 200  # so many that each of at most 5 later steps is drawn


def item(row, env, episode, valid):
    """What a step is known by."""
    return {"row": row, "env": env, "episode": episode, "valid": valid}


EXAMPLE = item(np.int32(0), np.int32(0), np.int32(0), np.False_)


def filled(replay, rows, cursor=0):
    """The state after `rows` steps of random episodes, and episodes [rows, N]."""
    random = np.random.default_rng(rows)
    valid = random.random((rows, replay.envs)) > 0.25
    first = np.zeros((1, replay.envs), np.int32)
    episode = np.concatenate([first, np.cumsum(~valid, axis=0)[:-1]]).astype(np.int32)
    row, env = np.mgrid[:rows, : replay.envs].astype(np.int32)
    items = item(row, env, episode, valid)
    if replay.num_envs is None:
        items = jax.tree.map(lambda x: x[:, 0], items)
    state = start_at(replay.init(EXAMPLE), cursor)
    return replay.add_batch(state, items), episode


def drawn_later(replay, state, indices, horizon):
    """Counts of the steps that `later` gives for each index: a Counter of (row, env) each."""
    draw = jax.jit(
        lambda state, key: replay.later(
            state, indices, key, state.storage["valid"], horizon=horizon
        )
    )
    single = buffers.uniform_replay(replay.max_size, num_envs=replay.num_envs)
    counts = [Counter() for _ in indices]
    for seed in range(DRAWS):
        later = draw(state, jax.random.key(seed))
        assert later.dtype == jnp.int32
        steps = single._load(state.storage, later)  # `get` does not take the states of both kinds
        for count, row, env in zip(counts, steps["row"], steps["env"], strict=True):
            count[int(row), int(env)] += 1
    return counts


def possible(episode, row, env, horizon):
    """The later steps of the same episode, or the step itself if there is none."""
    end = min(row + horizon, len(episode) - 1)
    rows = [r for r in range(row + 1, end + 1) if episode[r, env] == episode[row, env]]
    return {(r, env) for r in rows or [row]}


@pytest.mark.parametrize("horizon", [1, 5])
@fast_at_ends("rows", [3, 20, 87], ids=["begun", "full", "gone round"])
@fast_at_ends("shape", both(Windows(20), Windows(20, envs=3, length=2, period=2)), ids=describe)
def test_all_later_steps_of_the_episode_are_drawn_and_no_others(shape, rows, horizon):
    replay = shape.replay()
    state, episode = filled(replay, rows)
    indices, is_held = replay.indices(state)
    indices = indices[is_held]
    starts = [(int(i) // replay.envs, int(i) % replay.envs) for i in indices]
    for (row, env), count in zip(starts, drawn_later(replay, state, indices, horizon), strict=True):
        assert set(count) == possible(episode, row, env, horizon)


def test_all_later_steps_are_as_likely():
    replay = buffers.uniform_replay(8)
    items = item(*(np.arange(8, dtype=np.int32) for _ in range(3)), np.ones(8, bool))
    state = replay.add_batch(replay.init(EXAMPLE), items)
    indices = jnp.full(70_000, 2)  # of which five later ones are held, and four within the horizon
    goes_on = state.storage["valid"]
    later = replay.later(state, indices, jax.random.key(0), goes_on, horizon=4)
    found, counts = np.unique(later, return_counts=True)
    assert found.tolist() == [3, 4, 5, 6]
    np.testing.assert_allclose(counts, 17_500, rtol=0.03)


def test_it_is_right_when_the_cursor_wraps_at_its_modulus():
    replay = buffers.uniform_replay(16, num_envs=2)
    state, episode = filled(replay, 8, cursor=replay.modulus - 4)
    indices, _ = replay.indices(state)
    counts = drawn_later(replay, state, indices, 3)
    for i, count in enumerate(counts):
        assert set(count) == possible(episode, i // 2, i % 2, 3)


def test_under_vmap_it_is_that_of_each_state():
    replay = buffers.uniform_replay(20, num_envs=2, sequence_length=2)
    states = [filled(replay, rows)[0] for rows in (8, 15)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    keys = jax.random.split(jax.random.key(0))
    indices = jnp.array([replay.indices(state)[0][:6] for state in states])

    def later(state, indices, key):
        return replay.later(state, indices, key, state.storage["valid"], horizon=4)

    expected = [later(*each) for each in zip(states, indices, keys, strict=True)]
    np.testing.assert_array_equal(jax.vmap(later)(stacked, indices, keys), expected)


def test_flags_of_another_buffer_an_index_that_is_gone_and_a_horizon_of_0_are_refused():
    replay = buffers.uniform_replay(8, num_envs=2)
    state, _ = filled(replay, 5)
    key = jax.random.key(0)
    goes_on = state.storage["valid"]
    with pytest.raises(ValueError, match=r"later: goes_on must be bool\[4, 2\], got bool\[8, 1\]"):
        replay.later(state, [4], key, goes_on.reshape(8, 1), horizon=3)
    with pytest.raises(ValueError, match="later: "):
        replay.later(state, [0], key, goes_on, horizon=3)
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        replay.later(state, [4], key, goes_on, horizon=0)


def test_in_a_clustered_buffer_no_step_follows_another():
    replay = buffers.clustered_replay(2, buffers.uniform_replay(8), lambda item: item["env"])
    state = replay.init(EXAMPLE)
    with pytest.raises(ValueError, match="later: the steps of a cluster do not follow each other"):
        replay.later(state, [0], jax.random.key(0), state.storage["valid"], horizon=3)
