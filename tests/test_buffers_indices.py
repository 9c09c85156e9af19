"""`indices`: those of all items, oldest first; `later`: a later step of the same episode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import Windows, decode, encode

import buffers

KEY = jax.random.key(0)
SHAPES = [Windows(6), Windows(6, envs=2, length=3, period=2).prioritised()]


@pytest.mark.parametrize("before_wrap", [None, 2])
@pytest.mark.parametrize("rows", [0, 3, 10], ids=["empty", "half full", "gone round"])
@pytest.mark.parametrize("shape", SHAPES)
def test_items_held_come_first_and_oldest_first(shape, rows, before_wrap):
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    state = shape.replay().init(encode(0))._replace(cursor=jnp.int32(first))
    for row in range(first, first + rows):
        state = shape.replay().add(state, encode(shape.ids(row, 1)[0]))
    number_held = min(rows, 6)
    held = shape.ids(first + rows - number_held, number_held).ravel()

    indices, is_held = shape.replay().indices(state)

    number_empty = shape.max_size - len(held)
    assert indices.tolist() == shape.index_of(held).tolist() + [-1] * number_empty
    assert is_held.tolist() == [True] * len(held) + [False] * number_empty
    assert indices.dtype == jnp.int32


def test_indices_of_clusters_come_one_after_the_other():
    inner = buffers.uniform_replay(4)
    replay = buffers.clustered_replay(3, inner, lambda item: item["id"] % 3)
    state = replay.add_batch(replay.init(encode(0)), encode([0, 3, 6, 9, 12, 1, 4]))

    indices, is_held = replay.indices(state)

    assert is_held.tolist() == [True] * 4 + [True, True, False, False] + [False] * 4
    assert decode(replay.get(state, indices[is_held])).tolist() == [3, 6, 9, 12, 1, 4]
    assert set(indices[~is_held].tolist()) == {-1}


def possible(goes_on, place, horizon):
    """Lists the places, row * N + env, of later steps of an episode; the place itself if none."""
    rows, envs = goes_on.shape
    places = []
    for row in range(place // envs, min(place // envs + horizon, rows - 1)):
        if not goes_on[row, place % envs]:
            break
        places.append((row + 1) * envs + place % envs)
    return places or [place]


@pytest.mark.parametrize("horizon", [1, 5])
@pytest.mark.parametrize(
    ("rows", "before_wrap"), [(3, None), (87, None), (8, 4)], ids=["begun", "gone round", "wrap"]
)
def test_every_later_step_of_the_episode_is_drawn(rows, before_wrap, horizon):
    shape = Windows(20, envs=3, length=2, period=2).prioritised()
    replay = shape.replay()
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    goes_on = np.random.default_rng(rows).random((rows, 3)) > 0.25
    state = replay.init(np.False_)._replace(cursor=jnp.int32(first))
    state = replay.add_batch(state, goes_on)
    held = np.arange(3 * max(rows - 20, 0), 3 * rows)
    indices = shape.index_of(3 * first + held)

    def draw(key):
        return replay.later(state, indices, key, state.storage, horizon=horizon)

    drawn = jax.vmap(draw)(jax.random.split(KEY, 200))

    assert drawn.dtype == jnp.int32
    for place, later in zip(held.tolist(), np.asarray(drawn).T, strict=True):
        wanted = np.array(possible(goes_on, place, horizon))
        assert set(later.tolist()) == set(shape.index_of(3 * first + wanted).tolist())


def test_all_later_steps_are_as_likely():
    replay = buffers.uniform_replay(8)
    state = replay.add_batch(replay.init(np.False_), np.ones(8, bool))
    indices = jnp.full(70_000, 2)  # five later steps are held, four of them within the horizon

    later = replay.later(state, indices, KEY, state.storage, horizon=4)

    found, counts = np.unique(later, return_counts=True)
    assert found.tolist() == [3, 4, 5, 6]
    np.testing.assert_allclose(counts, 17_500, rtol=0.03)
