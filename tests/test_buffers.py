"""Contents and samples of the buffers, against plain Python lists and exact distributions."""

from collections import deque
from itertools import count, islice

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import Windows, as_mask, batches, decode, encode, kept, shift, shift_by
from helpers import assert_trees_equal, examples
from hypothesis import given
from scipy import stats

import buffers

KEY = jax.random.key(0)
GENERAL = Windows(8, envs=3, length=3, period=2)
CIRCULAR = buffers.circular_buffer(5)

OPERATIONS = [
    st.just(("add", None)),
    st.tuples(st.just("add_batch"), batches(3, 8)),
    st.just(("update", None)),
    st.tuples(st.just("update at"), st.lists(st.integers(0, 99), min_size=2, max_size=2)),
    st.tuples(st.just("pop"), st.sampled_from([1, 5])),
]


def assert_holds(state, held):
    """Fails unless the circular buffer has the ids of a deque, and room for the rest."""
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
    operations=st.lists(st.one_of(OPERATIONS), max_size=15),
)
def test_a_circular_buffer_is_a_deque(cursor, operations):
    held = deque(maxlen=5)
    new_ids = count(1)
    state = CIRCULAR.init(encode(0))._replace(cursor=jnp.int32(cursor))
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


SEQUENCES = [
    Windows(7, length=3),
    Windows(6, length=5, period=3),  # at times full with nothing to sample
    Windows(6, envs=3, length=3, period=2),
]


@pytest.mark.parametrize("shape", SEQUENCES)
@examples(40)
@given(
    before_wrap=st.sampled_from([None, 12]),
    added=st.lists(batches(4) | st.sampled_from([(1, None), (11, None)]), max_size=6),
)
def test_windows_drawn_are_the_valid_ones(shape, before_wrap, added):
    replay = shape.replay()
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    total = first
    state = replay.init(encode(0))._replace(cursor=jnp.int32(first))
    for length, mask in added:
        ids, number_kept = shape.masked_ids(total, length, mask)
        state = replay.add_batch(state, encode(ids), as_mask(mask))
        total += number_kept

        valid = shape.valid(first, total)
        assert 0 <= state.cursor < shape.modulus
        assert replay.can_sample(state) == bool(valid)
        if not valid:
            with pytest.raises(ValueError, match="nothing to sample"):
                replay.sample(state, KEY, 1024)
            continue
        sample = replay.sample(state, jax.random.key(total), 1024)
        windows = decode(sample.experience)
        starts = shape.starts(windows)
        assert set(starts.tolist()) == set(valid)
        np.testing.assert_array_equal(windows, shape.window(starts))
        np.testing.assert_array_equal(sample.indices, shape.index_of(starts))
        np.testing.assert_allclose(sample.probabilities, 1 / len(valid), rtol=1e-6)


@pytest.mark.parametrize("shape", [Windows(12), Windows(12, envs=3, length=3, period=2)])
def test_draws_are_uniform_and_independent(shape):
    replay = shape.replay()
    state = replay.init(encode(0))
    total = 0
    for length in (5, 30, 5):
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
    """They are floor(bound * r / 2**64) to the last bit, as with Python's integers."""
    bounds = [0, 1, 2, 3, 1000, 65535, 65536, 65537, 10**6, 2**29 - 1, 2**29]
    bits = jax.random.bits(KEY, (2, len(bounds), 2000), jnp.uint32)
    high, low = np.asarray(bits).astype(object)

    got = buffers._random_below(jnp.array(bounds)[:, None], bits)

    wanted = np.array(bounds, object)[:, None] * ((high << 32) + low) >> 64
    assert got.tolist() == wanted.tolist()


@pytest.fixture(scope="module")
def drawn():
    """Makes a replay that keeps old states, its state after 21 rows, and a sample of 32."""
    replay = GENERAL.replay(donate=False)
    state = replay.add_batch(replay.init(encode(0)), encode(GENERAL.ids(0, 21)))
    return replay, state, replay.sample(state, KEY, 32)


def test_an_update_of_all_changes_every_item(drawn):
    replay, state, sample = drawn

    state = replay.update(state, shift)

    updated = replay.get(state, sample.indices)
    assert_trees_equal(decode(updated), decode(sample.experience) + 1)


def test_arguments_of_an_update_move_with_their_indices(drawn):
    replay, state, sample = drawn
    indices = np.unique(sample.indices)[::-1][:2]

    state = replay.update(state, shift_by, indices, np.int32([1_000, 2_000]))

    first_of_each = replay.get(state, indices)["id"][:, 0]
    assert first_of_each.tolist() == [indices[0] + 1_000, indices[1] + 2_000]


def test_an_update_of_a_window_is_of_the_item_it_starts_at():
    replay = buffers.uniform_replay(6, sequence_length=3)
    state = replay.add_batch(replay.init(encode(0)), encode(10 * np.arange(6)))

    state = replay.update(state, shift, np.array([2, 4]))  # 4 is an item, but starts no sequence

    windows = decode(replay.get(state, np.array([0, 3])))
    np.testing.assert_array_equal(windows, [[0, 10, 21], [30, 41, 50]])


def test_add_and_sample_is_add_batch_then_sample(drawn):
    replay, state, _ = drawn
    items = encode(GENERAL.ids(100, 3))

    together = replay.add_and_sample(state, items, KEY, 16)

    added = replay.add_batch(state, items)
    assert_trees_equal(together, (added, replay.sample(added, KEY, 16)))


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
    assert modulus % period == 0  # and sequences start at multiples of the period
    assert modulus >= 2 * rows  # whether an index is stored is never ambiguous
    assert (modulus + rows) * (envs or 1) < 2**31  # and no sequence overflows
