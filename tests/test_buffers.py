"""What the buffers hold and draw, against plain Python lists and exact distributions."""

from collections import deque
from itertools import count, islice

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Windows,
    as_mask,
    assert_trees_equal,
    batches,
    decode,
    describe,
    encode,
    examples,
    kept,
    shift,
    shift_by,
    start_at,
)
from hypothesis import given
from scipy import stats

import buffers

KEY = jax.random.key(0)
GENERAL = Windows(8, envs=3, length=3, period=2)
CIRCULAR = buffers.circular_buffer(5)

OPERATIONS = [
    st.just(("add", (1, None))),
    st.tuples(st.just("add_batch"), batches(3, 8)),
    st.just(("update", None)),
    st.tuples(st.just("update at"), st.lists(st.integers(0, 99), min_size=2, max_size=2)),
]
POP = st.tuples(st.just("pop"), st.sampled_from([1, 5]))


def assert_holds(state, held):
    """The circular buffer has the ids of a deque, and room for the rest."""
    number = len(held)
    assert int(CIRCULAR.size(state)) == number
    if held:
        items = CIRCULAR.get(state, np.arange(5) % number)
        assert decode(items).tolist() == np.resize(held, 5).tolist()
    assert CIRCULAR.can_pop(state, number)
    assert not CIRCULAR.can_pop(state, number + 1)
    assert CIRCULAR.can_add(state, 5 - number)
    assert not CIRCULAR.can_add(state, 6 - number)


@examples(60)
@given(
    cursor=st.sampled_from([0, buffers.cursor_modulus(5, 1) - 9]),
    operations=st.lists(st.one_of(*OPERATIONS, POP), max_size=15),
)
def test_a_circular_buffer_is_a_deque(cursor, operations):
    held = deque(maxlen=5)
    new_ids = count(1)
    state = start_at(CIRCULAR.init(encode(0)), cursor)
    for name, argument in operations:
        if name == "add":
            held.append(next(new_ids))
            state = CIRCULAR.add(state, encode(held[-1]))
        elif name == "add_batch":
            length, mask = argument
            ids = list(islice(new_ids, length))
            held.extend(kept(ids, mask))
            state = CIRCULAR.add_batch(state, encode(ids), as_mask(mask))
        elif name == "pop" and argument <= len(held):
            state, items = CIRCULAR.pop(state, argument)
            assert decode(items).tolist() == [held.popleft() for _ in range(argument)]
        elif name == "pop":
            with pytest.raises(ValueError, match=f"{len(held)} held"):
                CIRCULAR.pop(state, argument)
        elif name == "update":
            held = deque([i + 1 for i in held], maxlen=5)
            state = CIRCULAR.update(state, shift)
        elif held:
            positions = [i % len(held) for i in argument]
            for position in set(positions):
                held[position] += 1
            state = CIRCULAR.update(state, shift, positions)

        assert_holds(state, held)


def add_rows(shape, state, total, new_ids, name, batch):
    """Adds rows `total`, ... of new ids. Returns the state, and the ids {place: id} of the rows."""
    length, mask = batch
    ids = np.array(list(islice(new_ids, length * shape.num_envs)))
    rows = ids.reshape(length, *shape.lead)
    added = np.ravel(kept(rows, mask)).astype(int).tolist()
    if name == "add":
        state = shape.replay().add(state, encode(rows[0]))
    else:
        state = shape.replay().add_batch(state, encode(rows), as_mask(mask))
    return state, dict(enumerate(added, start=total * shape.num_envs))


def assert_holds_places(shape, state, id_at):
    """The replay has the items at the newest of the places, and none before or after them."""
    replay = shape.replay()
    places = sorted(id_at)
    held = places[-shape.max_size :]
    assert replay.size(state) == len(held)
    assert replay.can_sample(state) == bool(held)
    assert 0 <= state.cursor < shape.modulus
    if held:
        all_held = np.resize(held, shape.max_size)
        items = replay.get(state, shape.index_of(all_held))
        assert decode(items).tolist() == [id_at[place] for place in all_held.tolist()]
        gone = places[: -shape.max_size]
        for place in [held[-1] + 1, *gone[:1], *gone[-1:]]:
            with pytest.raises(ValueError, match="not in the buffer"):
                replay.get(state, shape.index_of([place]))


@pytest.mark.parametrize("shape", [Windows(5), Windows(5, envs=3).prioritised()], ids=describe)
@examples(60)
@given(
    before_wrap=st.sampled_from([None, 7]), operations=st.lists(st.one_of(OPERATIONS), max_size=10)
)
def test_a_replay_holds_the_newest_rows(shape, before_wrap, operations):
    """The places are row * N + environment. They are unbounded, unlike indices."""
    total = 0 if before_wrap is None else shape.modulus - before_wrap
    state = start_at(shape.replay().init(encode(0)), total)
    new_ids = count(1)
    id_at = {}  # of all that was ever added
    for name, argument in operations:
        held = sorted(id_at)[-shape.max_size :]
        if name in ("add", "add_batch"):
            state, added = add_rows(shape, state, total, new_ids, name, argument)
            id_at |= added
            total += len(added) // shape.num_envs
        elif name == "update":
            id_at = {place: old_id + 1 for place, old_id in id_at.items()}
            state = shape.replay().update(state, shift)
        elif held:
            places = [held[i % len(held)] for i in argument]
            for place in set(places):
                id_at[place] += 1
            state = shape.replay().update(state, shift, shape.index_of(places))

        assert_holds_places(shape, state, id_at)


SEQUENCES = [
    Windows(7, length=3),
    Windows(6, length=5, period=3),  # at times full with nothing to draw
    Windows(6, envs=3, length=3, period=2),
]


@pytest.mark.parametrize("shape", SEQUENCES, ids=describe)
@examples(40)
@given(
    before_wrap=st.sampled_from([None, 12]),
    added=st.lists(batches(4) | st.sampled_from([(1, None), (11, None)]), max_size=6),
)
def test_windows_drawn_are_the_valid_ones(shape, before_wrap, added):
    replay = shape.replay()
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    total = first
    state = start_at(replay.init(encode(0)), first)
    for length, mask in added:
        ids, number_kept = shape.masked_ids(total, length, mask)
        state = replay.add_batch(state, encode(ids), as_mask(mask))
        total += number_kept

        valid = shape.valid(first, total)
        assert replay.can_sample(state) == bool(valid)
        if not valid:
            with pytest.raises(ValueError, match="nothing to draw"):
                replay.sample(state, KEY, 1024)
            continue
        sample = replay.sample(state, jax.random.key(total), 1024)
        windows = decode(sample.experience)
        starts = shape.starts(windows)
        assert set(starts.tolist()) == set(valid)
        np.testing.assert_array_equal(windows, shape.window(starts))
        np.testing.assert_array_equal(sample.indices, shape.index_of(starts))
        np.testing.assert_allclose(sample.probabilities, 1 / len(valid), rtol=1e-6)


@pytest.mark.parametrize("added", [[5], [5, 30, 5]], ids=str)
@pytest.mark.parametrize(
    "shape", [Windows(12), Windows(12, envs=3, length=3, period=2)], ids=describe
)
def test_draws_are_uniform_and_independent(shape, added):
    replay = shape.replay()
    state = replay.init(encode(0))
    total = 0
    for length in added:
        state = replay.add_batch(state, encode(shape.ids(total, length)))
        total += length
    valid = shape.valid(0, total)

    sample = replay.sample(state, jax.random.key(total), 50_000)
    starts = np.asarray(sample.indices)

    assert set(starts.tolist()) == set(valid)
    assert stats.chisquare([np.sum(starts == start) for start in valid]).pvalue > 1e-3
    neighbours = np.searchsorted(valid, starts).reshape(-1, 2)
    pairs = np.bincount(neighbours @ [len(valid), 1], minlength=len(valid) ** 2)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_random_numbers_below_a_bound_are_exact():
    """floor(bound * r / 2**64) to the last bit, against Python's integers."""
    bounds = [0, 1, 2, 3, 1000, 65535, 65536, 65537, 10**6, 2**29 - 1, 2**29]
    bits = jax.random.bits(KEY, (2, len(bounds), 2000), jnp.uint32)
    high, low = np.asarray(bits).astype(object)

    got = buffers._random_below(jnp.array(bounds)[:, None], bits)

    wanted = np.array(bounds, object)[:, None] * ((high << 32) + low) >> 64
    assert got.tolist() == wanted.tolist()


@pytest.fixture(scope="module", params=[5, 21])
def drawn(request):
    """A replay that keeps old states, its state after so many rows, and 32 draws."""
    replay = GENERAL.replay(donate=False)
    state = replay.init(encode(0))
    state = replay.add_batch(state, encode(GENERAL.ids(0, request.param)))
    return replay, state, replay.sample(state, KEY, 32)


def test_get_gives_the_windows_that_were_sampled(drawn):
    replay, state, sample = drawn

    assert sample.indices.dtype == jnp.int32
    assert_trees_equal(replay.get(state, sample.indices), sample.experience)


def test_arguments_of_an_update_move_with_their_indices(drawn):
    replay, state, sample = drawn
    indices = np.unique(sample.indices)[::-1][:2]

    state = replay.update(state, shift_by, indices, np.int32([1_000, 2_000]))

    first_of_each = replay.get(state, indices)["id"][:, 0]
    assert first_of_each.tolist() == [indices[0] + 1_000, indices[1] + 2_000]


def test_an_update_of_a_window_is_of_the_item_it_starts_at():
    replay = buffers.uniform_replay(6, sequence_length=3)
    state = replay.add_batch(replay.init(encode(0)), encode(10 * np.arange(6)))

    state = replay.update(state, shift, np.array([2, 4]))  # at 4 no window starts, but an item is

    windows = decode(replay.get(state, np.array([0, 3])))
    np.testing.assert_array_equal(windows, [[0, 10, 21], [30, 41, 50]])


@pytest.mark.parametrize("length", [3, 19])
def test_add_and_sample_is_add_batch_then_sample(drawn, length):
    replay, state, _ = drawn
    items = encode(GENERAL.ids(100, length))

    together = replay.add_and_sample(state, items, KEY, 16)

    added = replay.add_batch(state, items)
    assert_trees_equal(together, (added, replay.sample(added, KEY, 16)))


def test_can_sample_takes_a_least_size():
    replay = Windows(4, envs=3).replay()
    state = replay.init(encode(0))

    assert not replay.can_sample(state, min_size=0)
    state = replay.add_batch(state, encode(np.arange(9).reshape(3, 3)))
    assert [bool(replay.can_sample(state, n)) for n in (0, 1, 9, 10, 12)] == [True] * 3 + [
        False
    ] * 2


@given(
    max_size=st.integers(1, 2**29),
    envs=st.sampled_from([None, 1, 3, 1000]),
    period=st.integers(1, 50),
)
@examples(300)
def test_counters_stay_in_int32(max_size, envs, period):
    unit = (envs or 1) * period
    rows = max(max_size // unit, 1) * period
    modulus = buffers.cursor_modulus(rows, envs or 1)

    assert modulus % rows == 0  # a slot is the cursor modulo the rows
    assert modulus % period == 0  # and windows start at multiples of the period
    assert modulus >= 2 * rows  # whether an index is stored is never ambiguous
    assert (modulus + rows) * (envs or 1) < 2**31  # nor does a window overflow
