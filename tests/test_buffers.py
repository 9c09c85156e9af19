"""What the buffers hold and draw, against plain Python lists and exact distributions; its help."""

import ast
import doctest
import pydoc
import sys
from collections import deque
from itertools import count
from pathlib import Path

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
    both,
    decode,
    describe,
    encode,
    examples,
    fast_at_ends,
    kept,
    more,
    shift,
    shift_by,
    start_at,
)
from hypothesis import given
from scipy import stats

import buffers


def general_first(general, *special):
    """The general `Windows`, of both replays; its special cases, too, but only as `more`."""
    return [general, general.prioritised(), *map(more, both(*special))]


# ------------------------------------------------------------------ operations against plain Python

CIRCULAR = buffers.circular_buffer(5)
CIRCULAR_MODULUS = buffers.cursor_modulus(5, 1)

circular_operations = st.lists(
    st.one_of(
        st.just(("add", None)),
        st.tuples(st.just("add_batch"), batches(3, 8)),
        st.tuples(st.just("pop"), st.sampled_from([1, 2, 5])),
        st.just(("update", None)),
        st.tuples(st.just("update at"), st.lists(st.integers(0, 4), min_size=2, max_size=2)),
    ),
    max_size=20,
)


@pytest.mark.parametrize("cursor", [0, CIRCULAR_MODULUS - 9])
@given(operations=circular_operations)
def test_circular_buffer_is_a_deque(cursor, operations):
    held = deque(maxlen=5)
    new_ids = count(1)
    state = start_at(CIRCULAR.init(encode(0)), cursor)
    for name, argument in operations:
        if name == "add":
            held.append(next(new_ids))
            state = CIRCULAR.add(state, encode(held[-1]))
        elif name == "add_batch":
            length, mask = argument
            ids = [next(new_ids) for _ in range(length)]
            held.extend(kept(ids, mask))
            state = CIRCULAR.add_batch(state, encode(ids), as_mask(mask))
        elif name == "pop" and argument <= len(held):
            state, items = CIRCULAR.pop(state, argument)
            assert decode(items).tolist() == [held.popleft() for _ in range(argument)]
        elif name == "pop":
            with pytest.raises(ValueError, match=f"{argument} items asked for, but {len(held)}"):
                CIRCULAR.pop(state, argument)
        elif name == "update":
            held = deque([i + 1 for i in held], maxlen=5)
            state = CIRCULAR.update(state, shift)
        elif held:
            positions = [i % len(held) for i in argument]
            for position in set(positions):
                held[position] += 1
            state = CIRCULAR.update(state, shift, np.array(positions))

        assert CIRCULAR.size(state) == len(held)
        assert decode(CIRCULAR.get(state, np.arange(len(held)))).tolist() == list(held)
        for number in range(7):
            assert CIRCULAR.can_add(state, number) == (len(held) + number <= 5)
            assert CIRCULAR.can_pop(state, number) == (len(held) >= number)


replay_operations = st.lists(
    st.one_of(
        st.just(("add", (1, None))),
        st.tuples(st.just("add_batch"), batches(3, 8)),
        st.just(("update", None)),
        st.tuples(st.just("update at"), st.lists(st.integers(0, 99), min_size=2, max_size=2)),
    ),
    max_size=15,
)


@pytest.mark.parametrize("before_wrap", [None, 7])
@pytest.mark.parametrize(
    "shape",
    [
        Windows(5),
        more(Windows(5).prioritised()),
        more(Windows(5, envs=3)),
        Windows(5, envs=3).prioritised(),
    ],
    ids=describe,
)
@given(operations=replay_operations)
def test_replay_holds_the_newest_rows(shape, before_wrap, operations):
    """Also over the wrap of the cursor: the places here are unbounded, unlike indices."""
    replay = shape.replay()
    envs = shape.num_envs
    total = 0 if before_wrap is None else shape.modulus - before_wrap
    state = start_at(replay.init(encode(0)), total)
    new_ids = count(1)
    id_at = {}  # of all that was ever added: row * N + environment -> id
    held = []  # the places of the newest rows
    for name, argument in operations:
        if name in ("add", "add_batch"):
            length, mask = argument
            ids = np.array([next(new_ids) for _ in range(length * envs)])
            rows = ids.reshape(length, *shape.lead)
            for row in kept(rows, mask):
                for env, new_id in enumerate(np.atleast_1d(row)):
                    id_at[total * envs + env] = new_id
                total += 1
            held = sorted(id_at)[-shape.max_size :]
            if name == "add":
                state = replay.add(state, encode(rows[0]))
            else:
                state = replay.add_batch(state, encode(rows), as_mask(mask))
        elif name == "update":
            id_at = {place: old_id + 1 for place, old_id in id_at.items()}
            state = replay.update(state, shift)
        elif held:
            places = [held[i % len(held)] for i in argument]
            for place in set(places):
                id_at[place] += 1
            state = replay.update(state, shift, shape.index_of(places))

        assert replay.size(state) == len(held)
        assert replay.can_sample(state) == bool(held)
        items = replay.get(state, shape.index_of(held))
        assert decode(items).tolist() == [id_at[place] for place in held]
        newest_gone = sorted(id_at)[: -shape.max_size][-1:]
        for place in [total * envs, *newest_gone]:
            with pytest.raises(ValueError, match="not in the buffer"):
                replay.get(state, shape.index_of([place]))


SEQUENCES = [
    Windows(7, length=3),
    Windows(8, length=3, period=2),
    Windows(6, length=5, period=3),  # at times full with nothing to draw
    Windows(6, envs=3, length=3, period=2),
]
SPECIAL_SEQUENCES = [
    Windows(7, length=7),
    Windows(8, length=4, period=4),
    Windows(6, envs=3, length=2),
    Windows(6, envs=2, length=1, period=3),
]


@pytest.mark.parametrize("before_wrap", [None, 12])
@pytest.mark.parametrize(
    "shape",
    [SEQUENCES[0], *map(more, SEQUENCES[1:-1]), SEQUENCES[-1], *map(more, SPECIAL_SEQUENCES)]
    + [more(shape.prioritised()) for shape in SEQUENCES + SPECIAL_SEQUENCES],
    ids=describe,
)
@examples(50)
@given(added=st.lists(batches(4) | st.sampled_from([(1, None), (11, None)]), max_size=6))
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
                replay.sample(state, jax.random.key(0), 1024)
            continue
        sample = replay.sample(state, jax.random.key(total), 1024)
        windows = decode(sample.experience)
        starts = shape.starts(windows)
        assert set(starts.tolist()) == set(valid)
        np.testing.assert_array_equal(windows, shape.window(starts))
        np.testing.assert_array_equal(sample.indices, shape.index_of(starts))
        if shape.factory is buffers.uniform_replay:
            wanted = np.float32(1) / np.float32(len(valid))
            np.testing.assert_array_equal(sample.probabilities, wanted)
        else:  # new items are all alike
            np.testing.assert_allclose(sample.probabilities, 1 / len(valid), rtol=1e-6)


# ------------------------------------------------------------------------------------ distribution


def assert_equally_likely(counts):
    assert len(counts) == 1 or stats.chisquare(counts).pvalue > 1e-3


@fast_at_ends("added", [[5], [12], [12, 5], [5, 30, 5]], ids=str)
@fast_at_ends(
    "shape",
    [
        Windows(12),
        Windows(12, period=3),
        Windows(12, envs=3),
        Windows(12, length=4),
        Windows(12, length=4, period=4),
        Windows(12, envs=3, length=3, period=2),
    ],
    ids=describe,
)
def test_draws_are_uniform(shape, added):
    replay = shape.replay()
    state = replay.init(encode(0))
    total = 0
    for length in added:
        state = replay.add_batch(state, encode(shape.ids(total, length)))
        total += length
    valid = shape.valid(0, total)

    sample = replay.sample(state, jax.random.key(total), 50_000)
    windows = decode(sample.experience)
    starts = shape.starts(windows)
    np.testing.assert_array_equal(windows, shape.window(starts))
    assert set(starts.tolist()) <= set(valid)
    assert_equally_likely([np.sum(starts == start) for start in valid])
    np.testing.assert_array_equal(sample.probabilities, np.float32(1) / np.float32(len(valid)))

    # Draws do not depend on each other: pairs of neighbours are uniform over pairs, too.
    neighbours = np.searchsorted(valid, starts).reshape(-1, 2)
    pairs = neighbours @ [len(valid), 1]
    assert_equally_likely(np.bincount(pairs, minlength=len(valid) ** 2))


def test_draws_are_uniform_over_a_million_items():
    replay = buffers.uniform_replay(1_000_000)
    state = replay.init(0)
    state = replay.add_batch(state, jnp.arange(1_000_000))
    state = replay.add_batch(state, jnp.arange(1_000_000, 1_300_000))
    sample = replay.sample(state, jax.random.key(0), 500_000)
    ids = np.asarray(sample.experience)
    assert ids.min() >= 300_000
    assert ids.max() < 1_300_000
    assert stats.chisquare(np.bincount((ids - 300_000) // 1_000, minlength=1_000)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(ids % 997, minlength=997)).pvalue > 1e-3


def test_draws_differ_between_keys_and_repeat_for_a_key():
    replay = buffers.uniform_replay(100)
    state = replay.add_batch(replay.init(0), jnp.arange(100))
    first = replay.sample(state, jax.random.key(0), 64).experience
    other_key = replay.sample(state, jax.random.key(1), 64).experience
    same_key = replay.sample(state, jax.random.key(0), 64).experience
    np.testing.assert_array_equal(first, same_key)
    assert np.mean(first == other_key) < 0.2


# ---------------------------------------------------------------------------- get, update, samples


SAMPLED = general_first(
    Windows(8, envs=3, length=3, period=2),
    Windows(8),
    Windows(8, envs=3),
    Windows(8, length=3),
)


def fill_and_draw(shape, added):
    """A state after so many rows, 32 draws, and the ids, which are the indices, of all items."""
    replay = shape.replay()
    state = replay.add_batch(replay.init(encode(0)), encode(shape.ids(0, added)))
    sample = replay.sample(state, jax.random.key(0), 32)
    held = shape.ids(max(0, added - 8), min(added, 8)).ravel()
    return state, sample, held


def ids_at(shape, state, indices):
    """The ids of single items, whether or not windows start at them."""
    items = shape._replace(length=None, period=1).replay()
    return decode(items.get(state, indices))


@pytest.mark.parametrize("shape", SAMPLED, ids=describe)
@pytest.mark.parametrize("added", [5, 21])
def test_get_gives_the_items_that_were_sampled(shape, added):
    state, sample, _ = fill_and_draw(shape, added)
    assert sample.indices.dtype == jnp.int32
    assert_trees_equal(shape.replay().get(state, sample.indices), sample.experience)


@pytest.mark.parametrize("shape", SAMPLED, ids=describe)
@pytest.mark.parametrize("added", [5, 21])
def test_update_changes_an_item_once_however_often_it_was_sampled(shape, added):
    state, sample, held = fill_and_draw(shape, added)
    assert len(set(sample.indices.tolist())) < 32
    state = shape.replay().update(state, shift, sample.indices)
    is_sampled = np.isin(held, sample.indices)
    np.testing.assert_array_equal(ids_at(shape, state, held), held + is_sampled)


@pytest.mark.parametrize("shape", SAMPLED, ids=describe)
@pytest.mark.parametrize("added", [5, 21])
def test_arguments_of_an_update_move_with_their_indices(shape, added):
    state, sample, held = fill_and_draw(shape, added)
    indices = np.unique(sample.indices)[::-1][:3]
    amounts = 1_000 * np.arange(1, len(indices) + 1, dtype=np.int32)
    state = shape.replay().update(state, shift_by, indices, amounts)
    expected = held.copy()
    for index, amount in zip(indices, amounts, strict=True):
        expected[held == index] += amount
    np.testing.assert_array_equal(ids_at(shape, state, held), expected)


@pytest.mark.parametrize("shape", SAMPLED, ids=describe)
@pytest.mark.parametrize("added", [5, 21])
def test_update_without_indices_changes_every_item(shape, added):
    state, _, held = fill_and_draw(shape, added)
    state = shape.replay().update(state, shift)
    np.testing.assert_array_equal(ids_at(shape, state, held), held + 1)
    assert shape.replay().size(state) == len(held) == min(added, 8) * shape.num_envs


def test_update_of_a_window_is_of_the_item_it_starts_at():
    replay = buffers.uniform_replay(6, sequence_length=3)
    state = replay.add_batch(replay.init(encode(0)), encode(10 * np.arange(6)))
    state = replay.update(state, shift, np.array([2, 4]))  # at 4 no window starts, but an item is
    windows = decode(replay.get(state, np.array([0, 1, 2, 3])))
    np.testing.assert_array_equal(windows[0], [0, 10, 21])
    np.testing.assert_array_equal(windows[3], [30, 41, 50])


@pytest.mark.parametrize(
    "shape", general_first(Windows(8, envs=3, length=3, period=2), Windows(8)), ids=describe
)
def test_add_and_sample_is_add_batch_then_sample(shape):
    replay = shape.replay(donate=False)
    state = replay.add_batch(replay.init(encode(0)), encode(shape.ids(0, 3)))
    for length in (3, 19):  # each is compiled
        items = encode(shape.ids(100, length))
        key = jax.random.key(length)
        added = replay.add_batch(state, items)
        sample = replay.sample(added, key, 16)
        assert_trees_equal(replay.add_and_sample(state, items, key, 16), (added, sample))


# ----------------------------------------------------------------------------------------- counters


WRAPPED = general_first(
    Windows(10, envs=3, length=4, period=5),
    Windows(6),
    Windows(6, envs=3),
    Windows(6, length=3, period=2),
)
LENGTHS = [4, 4, 1, 4, 1, 4, 1, 1, 9, 4, 4]  # of batches, each of which is compiled


@pytest.mark.parametrize("shape", WRAPPED, ids=describe)
def test_wrap_of_the_cursor_changes_nothing(shape):
    """The same run just before the cursor wraps and far from it: one draws what the other draws."""
    replay = shape.replay()
    near_cursor = shape.modulus - 2 * shape.rows
    far_cursor = 10 * shape.rows
    indices_between = (near_cursor - far_cursor) * shape.num_envs
    near = start_at(replay.init(encode(0)), near_cursor)
    far = start_at(replay.init(encode(0)), far_cursor)
    total = 0
    for step, length in enumerate(LENGTHS):
        items = encode(shape.ids(total, length))
        near = replay.add_batch(near, items)
        far = replay.add_batch(far, items)
        total += length
        assert_trees_equal(near.storage, far.storage)

        near_sample = replay.sample(near, jax.random.key(step), 16)
        far_sample = replay.sample(far, jax.random.key(step), 16)
        assert_trees_equal(near_sample.experience, far_sample.experience)
        expected_indices = shape.index_of(np.asarray(far_sample.indices) + indices_between)
        np.testing.assert_array_equal(near_sample.indices, expected_indices)
        assert_trees_equal(replay.get(near, near_sample.indices), near_sample.experience)

        near = replay.update(near, shift, near_sample.indices)
        far = replay.update(far, shift, far_sample.indices)
        assert_trees_equal(near.storage, far.storage)
        assert 0 <= near.cursor < shape.modulus
    assert total > 3 * shape.rows  # rows from before the wrap were overwritten after it


@pytest.mark.parametrize("shape", WRAPPED, ids=describe)
def test_old_indices_stay_errors_over_the_wrap_of_the_cursor(shape):
    replay = shape.replay()
    state = start_at(replay.init(encode(0)), shape.modulus - 2 * shape.rows)
    samples = []
    total = 0
    for step, length in enumerate(LENGTHS):
        state = replay.add_batch(state, encode(shape.ids(total, length)))
        total += length
        samples.append((total, replay.sample(state, jax.random.key(step), 16).indices))
        for drawn_at, indices in samples:
            if total - drawn_at >= shape.rows:
                with pytest.raises(ValueError, match="not in the buffer"):
                    replay.get(state, indices)
    assert total > 3 * shape.rows  # rows from before the wrap were overwritten after it


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


# ------------------------------------------------------------------------------------------- queue


def test_queue_of_rollouts_loses_nothing():
    """Rollouts written once and read once, in order, by turns that `can_add`, `can_pop` decide."""
    queue = buffers.circular_buffer(16)
    state = queue.init(encode(0))
    written = 0
    read = []
    rng = np.random.default_rng(0)
    turns = {"write": 0, "full": 0, "read": 0, "wait": 0}
    while len(read) < 400:
        if rng.random() < 0.5:
            if queue.can_add(state, 5):
                state = queue.add_batch(state, encode(np.arange(written, written + 5)))
                written += 5
                turns["write"] += 1
            else:
                assert written - len(read) > 11
                turns["full"] += 1
        elif queue.can_pop(state, 4):
            state, items = queue.pop(state, 4)
            read += decode(items).tolist()
            turns["read"] += 1
        else:
            assert written - len(read) < 4
            turns["wait"] += 1
    assert read == list(range(len(read)))
    assert queue.size(state) == written - len(read)
    assert min(turns.values()) > 0


# ------------------------------------------------------------------------------------- the module


def test_the_example_of_the_module_runs():
    result = doctest.testmod(buffers)
    assert result.attempted >= 10
    assert result.failed == 0


def test_the_module_stands_alone():
    source = Path(buffers.__file__).read_text()
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.split(".")[0])
    assert modules <= {"jax", "numpy"} | set(sys.stdlib_module_names)


@pytest.mark.parametrize("buffer", [buffers.circular_buffer(5), buffers.prioritised_replay(8)])
def test_every_function_of_a_buffer_has_help(buffer):
    names = [name for name in dir(buffer) if not name.startswith("_")]
    functions = [name for name in names if callable(getattr(buffer, name))]
    assert {"init", "add", "add_batch", "get", "update", "size"} < set(functions)
    for name in set(functions) - {"state_type"}:
        page = pydoc.plain(pydoc.render_doc(getattr(buffer, name)))
        title, empty, signature, text = page.split("\n")[:4]
        assert signature.startswith(f"{name}("), signature
        assert len(text) > 30, name


def test_a_buffer_prints_its_sizes():
    rest = "donate=True, debug=False"
    assert repr(buffers.circular_buffer(5)) == f"CircularBuffer(max_size=5, {rest})"
    sizes = "max_size=48, num_envs=4, sequence_length={}, period=1"
    for length in (None, 1):
        items = buffers.uniform_replay(48, num_envs=4, sequence_length=length)
        assert repr(items) == f"UniformReplay({sizes.format(length)}, {rest})"
    clustered = buffers.clustered_replay(7, buffers.prioritised_replay(9), len)
    text = "ClusteredReplay(num_clusters=7, cluster_buffer=PrioritisedReplay(max_size=9, "
    assert repr(clustered).startswith(text)
    assert repr(clustered).endswith(
        f"clustering_fn=<built-in function len>, distribution_power=0.0, {rest})"
    )


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 1000, 65535, 65536, 65537, 10**6, 2**29 - 1, 2**29])
def test_random_numbers_below_a_bound_are_exact(bound):
    """floor(bound * r / 2**64) to the last bit, against Python's integers."""
    bits = jax.random.bits(jax.random.PRNGKey(bound), (2, 2000), jnp.uint32)
    got = buffers._random_below(jnp.int32(bound), bits)
    high, low = np.asarray(bits).astype(object)
    r = (high << 32) + low
    assert got.tolist() == (bound * r >> 64).tolist()
