"""`indices`: every item of a buffer by name, oldest first."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import Windows, both, decode, describe, encode, fast_at_ends, shift, start_at

import buffers

KEY = jax.random.key(0)
SHAPES = both(
    Windows(6),
    Windows(6, envs=3),
    Windows(6, length=2),
    Windows(6, envs=2, length=3, period=2),
)


def filled(shape, rows):
    """The state of an empty buffer after so many rows, whose ids are the indices."""
    replay = shape.replay()
    state = replay.init(encode(0))
    for row in range(rows):
        ids = shape.ids(row, 1)[0]
        state = replay.add(state, encode(ids))
    return state


@fast_at_ends("rows", [0, 3, 6, 10], ids=["empty", "half full", "full", "gone round"])
@fast_at_ends("shape", SHAPES, ids=describe)
def test_items_held_come_first_and_oldest_first(shape, rows):
    indices, is_held = shape.replay().indices(filled(shape, rows))
    oldest_row = max(rows - 6, 0)
    held = shape.ids(oldest_row, rows - oldest_row).ravel().tolist()
    empty_places = shape.max_size - len(held)
    assert indices.tolist() == held + [-1] * empty_places
    assert is_held.tolist() == [True] * len(held) + [False] * empty_places
    assert indices.dtype == jnp.int32


@pytest.mark.parametrize("factory", [buffers.uniform_replay, buffers.prioritised_replay])
def test_a_ring_that_has_gone_round_gives_each_item_once_and_in_order(factory):
    replay = factory(8, num_envs=2)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(26).reshape(13, 2)))
    indices, is_held = replay.indices(state)
    assert is_held.all()
    assert decode(replay.get(state, indices)).tolist() == list(range(18, 26))


def test_indices_are_right_when_the_cursor_wraps_at_its_modulus():
    replay = buffers.uniform_replay(6, num_envs=2)
    modulus = buffers.cursor_modulus(3, 2)
    state = start_at(replay.init(encode(0)), modulus - 2)
    state = replay.add_batch(state, encode(np.arange(8).reshape(4, 2)))
    indices, _ = replay.indices(state)
    assert indices.tolist() == [2 * modulus - 2, 2 * modulus - 1, 0, 1, 2, 3]
    assert decode(replay.get(state, indices)).tolist() == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("rows", [5, 10])
def test_drawn_windows_begin_at_the_indices_that_are_held(rows):
    """All but the last (W - 1) * num_envs, and where index // num_envs is a multiple of period."""
    shape = Windows(6, envs=2, length=3, period=2)
    replay = shape.replay()
    state = filled(shape, rows)
    indices, is_held = replay.indices(state)
    with_steps_after_them = indices[is_held][: -(3 - 1) * 2]
    starts = with_steps_after_them[with_steps_after_them // 2 % 2 == 0]
    assert starts.tolist() == shape.valid(0, rows)

    sample = replay.sample(state, KEY, 256)
    assert np.unique(sample.indices).tolist() == starts.tolist()
    windows = decode(replay.get(state, starts))
    np.testing.assert_array_equal(windows, shape.window(np.asarray(starts)))


def test_indices_are_right_inside_jit_and_vmap():
    shape = Windows(6, envs=3)
    replay = shape.replay()
    half_full, gone_round = filled(shape, 3), filled(shape, 10)
    states = jax.tree.map(lambda *x: jnp.stack(x), half_full, gone_round)
    indices, is_held = jax.jit(jax.vmap(replay.indices))(states)
    assert indices[0].tolist() == [*range(9), *[-1] * 9]
    assert is_held[0].tolist() == [True] * 9 + [False] * 9
    assert indices[1].tolist() == list(range(12, 30))
    assert is_held[1].all()


def test_every_priority_is_set_by_name():
    replay = buffers.prioritised_replay(8, priority_exponent=1.0)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(13)))

    @jax.jit
    def set_all(state):
        """The priority of an item is its id, which is each number of its observation as well."""
        indices, _ = replay.indices(state)
        items = replay.get(state, indices)
        return replay.set_priorities(state, indices, items["obs"][:, 0])

    sample = replay.sample(set_all(state), KEY, 512)
    ids = decode(sample.experience)
    assert set(ids.tolist()) == set(range(5, 13))
    np.testing.assert_allclose(sample.probabilities, ids / sum(range(5, 13)), rtol=1e-6)


def test_places_that_are_empty_are_left_alone():
    replay = buffers.prioritised_replay(8)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(3)))

    @jax.jit
    def change_all(state):
        indices, _ = replay.indices(state)
        state = replay.set_priorities(state, indices, jnp.full(8, 5.0))
        return replay.update(state, shift, indices)

    state = change_all(state)
    assert (np.asarray(state.tree[0])[:8] > 0).tolist() == [True] * 3 + [False] * 5
    assert state.storage["id"].ravel().tolist() == [1, 2, 3, 0, 0, 0, 0, 0]


def test_an_epoch_takes_each_item_once():
    replay = buffers.uniform_replay(12, num_envs=2)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(18).reshape(9, 2)))

    @jax.jit
    def epochs(state, key):
        indices, _ = replay.indices(state)
        order = buffers.shuffled_minibatches(key, rows=12, epochs=2, num_minibatches=3)
        return replay.get(state, indices[order])

    ids = decode(epochs(state, KEY))
    assert ids.shape == (2, 3, 4)
    for epoch in ids.reshape(2, 12):
        assert sorted(epoch) == list(range(6, 18))
        assert list(epoch) != list(range(6, 18))


@pytest.mark.parametrize("factory", [buffers.uniform_replay, buffers.prioritised_replay])
def test_indices_of_clusters_come_one_after_the_other(factory):
    replay = buffers.clustered_replay(3, factory(4), lambda item: item["id"] % 3)
    state = replay.add_batch(replay.init(encode(0)), encode([0, 3, 6, 9, 12, 1, 4]))
    indices, is_held = replay.indices(state)
    first_cluster = [True, True, True, True]  # without id 0, which a full cluster has lost
    second_cluster = [True, True, False, False]
    third_cluster = [False, False, False, False]
    assert is_held.tolist() == first_cluster + second_cluster + third_cluster
    assert decode(replay.get(state, indices[is_held])).tolist() == [3, 6, 9, 12, 1, 4]
    assert set(indices[~is_held].tolist()) == {-1}


def test_stacked_states_are_told_to_use_vmap():
    replay = buffers.uniform_replay(4)
    states = jax.vmap(lambda _: replay.init(encode(0)))(jnp.arange(2))
    with pytest.raises(ValueError, match=r"several states, stacked: .* under jax\.vmap"):
        replay.indices(states)


def test_indices_are_int32_with_64_bits_as_well():
    replay = buffers.uniform_replay(4)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        indices, is_held = replay.indices(replay.init(np.float32(0)))
    assert (indices.dtype, is_held.dtype) == (jnp.int32, jnp.bool_)
