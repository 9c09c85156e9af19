"""What the buffers hold and draw, against plain Python lists and exact distributions."""

import ast
import doctest
import pydoc
import sys
from collections import deque
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from hypothesis import given, settings
from scipy import stats

import buffers


def examples(percent):
    """So many of the examples of the profile, see conftest.py."""
    return settings(max_examples=settings.default.max_examples * percent // 100)


# ----------------------------------------------------------------------------------------- helpers


def encode(ids):
    """Items [*ids.shape, ...] with the id in every field, so that a misaligned gather shows."""
    ids = np.asarray(ids, np.int32)
    return {
        "id": ids,
        "obs": np.repeat(ids[..., None], 3, axis=-1).astype(np.float32),
        "img": np.tile((ids % 256).astype(np.uint8)[..., None, None], (2, 2)),
    }


def decode(items):
    """The ids of items, all of whose fields must agree."""
    ids = np.asarray(items["id"])
    assert_trees_equal(items, encode(ids))
    return ids


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def shift(item):
    return jax.tree.map(lambda x: x + 1, item)


def shift_by(item, by):
    return jax.tree.map(lambda x: x + by.astype(x.dtype), item)


def start_at(state, cursor):
    """An empty state that has already counted `cursor` rows."""
    return state._replace(cursor=jnp.int32(cursor))


class Windows(NamedTuple):
    """The arguments of a replay buffer, and all that it may draw, in plain Python."""

    rows: int
    envs: int | None = None
    length: int | None = None
    period: int = 1
    factory: Callable = buffers.uniform_replay

    def prioritised(self):
        return self._replace(factory=buffers.prioritised_replay)

    @property
    def lead(self):
        """The axes of one row."""
        return () if self.envs is None else (self.envs,)

    @property
    def max_size(self):
        return self.rows * (self.envs or 1)

    @property
    def modulus(self):
        return buffers._layout(self.max_size, self.envs, self.length, self.period).modulus

    def replay(self, donate=True):
        return make_replay(self, donate)

    def ids(self, first, count):
        """Ids of rows `first`, ..., `first + count - 1`: row * N + environment."""
        ids = np.arange(first, first + count)[:, None] * (self.envs or 1)
        return (ids + np.arange(self.envs or 1)).reshape(count, *self.lead)

    def valid(self, first, total):
        """The first id of every window there is, when rows `first`, ..., `total - 1` were added."""
        held = range(max(first, total - self.rows), total)
        return [
            row * (self.envs or 1) + env
            for row in held
            if row % self.period == 0 and row + (self.length or 1) <= total
            for env in range(self.envs or 1)
        ]

    def window(self, start):
        """The ids of the windows that start at each id of `start`."""
        if self.length is None:
            return start
        return start[..., None] + (self.envs or 1) * np.arange(self.length)


@cache  # so that tests share what is compiled
def make_replay(shape, donate):
    return shape.factory(
        shape.max_size,
        num_envs=shape.envs,
        sequence_length=shape.length,
        period=shape.period,
        donate=donate,
    )


def describe(value):
    if isinstance(value, Windows):
        name = f"{value.rows}x{value.envs or 1}-window{value.length}-period{value.period}"
        return name + "-prioritised" * (value.factory is buffers.prioritised_replay)
    return None


def both(*shapes):
    """Those of uniform replay, and the same of prioritised replay."""
    return [*shapes, *(shape.prioritised() for shape in shapes)]


def general_first(general, *special):
    """The general one, uniform and prioritised; by default none of what are special cases of it."""
    return [general, general.prioritised(), *map(slow, both(*special))]


# ------------------------------------------------------------------ operations against plain Python


def batches(*lengths):
    """A static length, and a mask of that length or None."""
    masks = {n: st.none() | st.lists(st.booleans(), min_size=n, max_size=n) for n in lengths}
    return st.sampled_from(lengths).flatmap(lambda n: st.tuples(st.just(n), masks[n]))


def kept(rows, mask):
    return [row for row, keep in zip(rows, mask or [True] * len(rows), strict=True) if keep]


def as_mask(mask):
    return None if mask is None else np.array(mask)


CIRCULAR = buffers.circular_buffer(5)
CIRCULAR_MODULUS = buffers._layout(5).modulus

circular_operations = st.lists(
    st.one_of(
        st.just(("add",)),
        st.tuples(st.just("add_batch"), batches(3, 8)),
        st.tuples(st.just("pop"), st.sampled_from([1, 2, 5])),
        st.just(("update",)),
        st.tuples(st.just("update at"), st.lists(st.integers(0, 4), min_size=2, max_size=2)),
    ),
    max_size=20,
)


@pytest.mark.parametrize("cursor", [0, CIRCULAR_MODULUS - 9])
@given(operations=circular_operations)
def test_circular_buffer_is_a_deque(cursor, operations):
    held, ids = deque(maxlen=5), count(1)
    state = start_at(CIRCULAR.init(encode(0)), cursor)
    for name, *args in operations:
        if name == "add":
            held.append(next(ids))
            state = CIRCULAR.add(state, encode(held[-1]))
        elif name == "add_batch":
            ((length, mask),) = args
            rows = [next(ids) for _ in range(length)]
            held.extend(kept(rows, mask))
            state = CIRCULAR.add_batch(state, encode(rows), as_mask(mask))
        elif name == "pop" and args[0] <= len(held):
            state, items = CIRCULAR.pop(state, args[0])
            assert decode(items).tolist() == [held.popleft() for _ in range(args[0])]
        elif name == "pop":
            with pytest.raises(ValueError, match=f"{args[0]} items asked for, but {len(held)}"):
                CIRCULAR.pop(state, args[0])
        elif name == "update":
            held = deque([i + 1 for i in held], maxlen=5)
            state = CIRCULAR.update(state, shift)
        elif held:
            at = [i % len(held) for i in args[0]]
            for i in set(at):
                held[i] += 1
            state = CIRCULAR.update(state, shift, np.array(at))

        assert CIRCULAR.size(state) == len(held)
        assert decode(CIRCULAR.get(state, np.arange(len(held)))).tolist() == list(held)
        for n in range(7):
            assert CIRCULAR.can_add(state, n) == (len(held) + n <= 5)
            assert CIRCULAR.can_pop(state, n) == (len(held) >= n)


replay_operations = st.lists(
    st.one_of(
        st.just(("add",)),
        st.tuples(st.just("add_batch"), batches(3, 8)),
        st.just(("update",)),
        st.tuples(st.just("update at"), st.lists(st.integers(0, 99), min_size=2, max_size=2)),
    ),
    max_size=15,
)


@pytest.mark.parametrize("before_wrap", [None, 7])
@pytest.mark.parametrize(
    "shape",
    [
        Windows(5),
        slow(Windows(5).prioritised()),
        Windows(5, envs=3),
        Windows(5, envs=3).prioritised(),
    ],
    ids=describe,
)
@given(operations=replay_operations)
def test_replay_holds_the_newest_rows(shape, before_wrap, operations):
    """Also over the wrap of the cursor: `indices` are unbounded here, and bounded in the buffer."""
    replay, envs = shape.replay(), shape.envs or 1
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    indices, values, total, ids = [], {}, first, count(1)
    state = start_at(replay.init(encode(0)), first)

    def buffer_index(indices):
        return np.array(indices, np.int64) % (shape.modulus * envs)

    for name, *args in operations:
        if name in ("add", "add_batch"):
            length, mask = args[0] if args else (1, None)
            rows = np.array([next(ids) for _ in range(length * envs)]).reshape(length, *shape.lead)
            for row in kept(rows, mask):
                values |= {total * envs + env: i for env, i in enumerate(np.atleast_1d(row))}
                total += 1
            indices = sorted(values)[-shape.max_size :]
            if name == "add":
                state = replay.add(state, encode(rows[0]))
            else:
                state = replay.add_batch(state, encode(rows), as_mask(mask))
        elif name == "update":
            values = {i: value + 1 for i, value in values.items()}
            state = replay.update(state, shift)
        elif indices:
            at = [indices[i % len(indices)] for i in args[0]]
            for i in set(at):
                values[i] += 1
            state = replay.update(state, shift, buffer_index(at))

        assert replay.size(state) == len(indices)
        assert replay.can_sample(state) == bool(indices)
        held = replay.get(state, buffer_index(indices))
        assert decode(held).tolist() == [values[i] for i in indices]
        for gone in [total * envs, *sorted(values)[: -shape.max_size][-1:]]:
            with pytest.raises(ValueError, match="not in the buffer"):
                replay.get(state, buffer_index([gone]))


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
    [*SEQUENCES, *map(slow, SPECIAL_SEQUENCES)]
    + [slow(shape.prioritised()) for shape in SEQUENCES + SPECIAL_SEQUENCES],
    ids=describe,
)
@examples(50)
@given(added=st.lists(batches(4) | st.sampled_from([(1, None), (11, None)]), max_size=6))
def test_windows_drawn_are_the_valid_ones(shape, before_wrap, added):
    replay = shape.replay()
    first = total = 0 if before_wrap is None else shape.modulus - before_wrap
    state = start_at(replay.init(encode(0)), first)
    for length, mask in added:
        keep = [True] * length if mask is None else mask
        ids = np.full((length, *shape.lead), -1)
        ids[np.array(keep)] = shape.ids(total, sum(keep))
        total += sum(keep)
        state = replay.add_batch(state, encode(ids), as_mask(mask))

        valid = shape.valid(first, total)
        assert replay.can_sample(state) == bool(valid)
        if not valid:
            with pytest.raises(ValueError, match="nothing to draw"):
                replay.sample(state, jax.random.key(0), 1024)
            continue
        sample = replay.sample(state, jax.random.key(total), 1024)
        windows = decode(sample.experience)
        starts = windows[:, 0]
        assert set(starts.tolist()) == set(valid)
        np.testing.assert_array_equal(windows, shape.window(starts))
        np.testing.assert_array_equal(sample.indices, starts % (shape.modulus * (shape.envs or 1)))
        if shape.factory is buffers.uniform_replay:
            wanted = np.float32(1) / np.float32(len(valid))
            np.testing.assert_array_equal(sample.probabilities, wanted)
        else:  # new items are all alike
            np.testing.assert_allclose(sample.probabilities, 1 / len(valid), rtol=1e-6)


# ------------------------------------------------------------------------------------ distribution


@pytest.mark.parametrize("added", [[5], [12], [12, 5], [5, 30, 5]], ids=str)
@pytest.mark.parametrize(
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
    replay, draws, total = shape.replay(), 50_000, 0
    state = replay.init(encode(0))
    for length in added:
        state = replay.add_batch(state, encode(shape.ids(total, length)))
        total += length
    sample = replay.sample(state, jax.random.key(sum(added)), draws)
    windows = decode(sample.experience)
    starts = windows if shape.length is None else windows[:, 0]
    valid = shape.valid(0, total)

    np.testing.assert_array_equal(windows, shape.window(starts))
    assert set(starts.tolist()) <= set(valid)
    counts = [np.sum(starts == start) for start in valid]
    assert len(valid) == 1 or stats.chisquare(counts).pvalue > 1e-3
    np.testing.assert_array_equal(sample.probabilities, np.float32(1) / np.float32(len(valid)))

    # Draws do not depend on each other: pairs of neighbours are uniform over pairs, too.
    pairs = np.searchsorted(valid, starts).reshape(-1, 2) @ [len(valid), 1]
    counts = np.bincount(pairs, minlength=len(valid) ** 2)
    assert len(valid) == 1 or stats.chisquare(counts).pvalue > 1e-3


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
    draw = [replay.sample(state, jax.random.key(seed), 64).experience for seed in (0, 1, 0)]
    np.testing.assert_array_equal(draw[0], draw[2])
    assert np.mean(draw[0] == draw[1]) < 0.2


# ---------------------------------------------------------------------------- get, update, samples


@pytest.mark.parametrize(
    "shape",
    general_first(
        Windows(8, envs=3, length=3, period=2),
        Windows(8),
        Windows(8, envs=3),
        Windows(8, length=3),
    ),
    ids=describe,
)
@pytest.mark.parametrize("added", [5, 21])
def test_get_and_update_are_of_the_items_that_were_sampled(shape, added):
    replay, envs = shape.replay(), shape.envs or 1
    state = replay.add_batch(replay.init(encode(0)), encode(shape.ids(0, added)))
    sample = replay.sample(state, jax.random.key(0), 32)  # more draws than items: duplicates
    assert len(set(sample.indices.tolist())) < 32
    assert sample.indices.dtype == jnp.int32
    assert_trees_equal(replay.get(state, sample.indices), sample.experience)

    # Ids are row * N + environment, so here the index of an item is its id.
    held = shape.ids(max(0, added - 8), min(added, 8)).ravel()
    chosen = np.isin(held, sample.indices)
    items = Windows(8, shape.envs).replay()
    state = replay.update(state, shift, sample.indices)
    np.testing.assert_array_equal(decode(items.get(state, held)), held + chosen)

    # `args` come with a row for each index, and move with it.
    at = np.array(sorted(set(sample.indices.tolist()))[::-1][:3], np.int32)
    state = replay.update(state, shift_by, at, 1_000 * np.arange(1, len(at) + 1, dtype=np.int32))
    by = {i: 1_000 * k for k, i in enumerate(at.tolist(), start=1)}
    expected = held + chosen + [by.get(i, 0) for i in held.tolist()]
    np.testing.assert_array_equal(decode(items.get(state, held)), expected)

    state = replay.update(state, shift)
    np.testing.assert_array_equal(decode(items.get(state, held)), expected + 1)
    assert replay.size(state) == len(held) == min(added, 8) * envs


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
        actual = replay.add_and_sample(state, items, jax.random.key(length), 16)
        added = replay.add_batch(state, items)
        expected = added, replay.sample(added, jax.random.key(length), 16)
        assert_trees_equal(actual, expected)


# ----------------------------------------------------------------------------------------- counters


@pytest.mark.parametrize(
    "shape",
    general_first(
        Windows(10, envs=3, length=4, period=5),
        Windows(6),
        Windows(6, envs=3),
        Windows(6, length=3, period=2),
    ),
    ids=describe,
)
def test_wrap_of_the_cursor_changes_nothing(shape):
    """The same run just before the cursor wraps and far from it: one draws what the other draws."""
    replay, envs, margin = shape.replay(), shape.envs or 1, 2 * shape.rows
    wrap = shape.modulus * envs
    near, far = (
        start_at(replay.init(encode(0)), cursor)
        for cursor in (shape.modulus - margin, 10 * shape.rows)
    )
    moved = (shape.modulus - margin - 10 * shape.rows) * envs
    stale, total = [], 0
    for step, length in enumerate([4, 4, 1, 4, 1, 4, 1, 1, 9, 4, 4]):  # each is compiled
        items, key = encode(shape.ids(total, length)), jax.random.key(step)
        total += length
        near, far = replay.add_batch(near, items), replay.add_batch(far, items)
        a, b = replay.sample(near, key, 16), replay.sample(far, key, 16)
        assert_trees_equal(a.experience, b.experience)
        assert_trees_equal(near.storage, far.storage)
        np.testing.assert_array_equal(a.indices, (np.asarray(b.indices) + moved) % wrap)
        assert_trees_equal(replay.get(near, a.indices), a.experience)
        near, far = replay.update(near, shift, a.indices), replay.update(far, shift, b.indices)
        assert_trees_equal(near.storage, far.storage)
        assert 0 <= near.cursor < shape.modulus
        stale.append((total, a.indices, a.experience))
        for drawn_at, indices, _ in stale:
            if total - drawn_at >= shape.rows:
                with pytest.raises(ValueError, match="not in the buffer"):
                    replay.get(near, indices)
    assert total > margin + shape.rows  # rows from before the wrap were overwritten after it


@given(
    max_size=st.integers(1, 2**29),
    envs=st.sampled_from([None, 1, 3, 1000]),
    period=st.integers(1, 50),
)
@examples(300)
def test_counters_stay_in_int32(max_size, envs, period):
    unit = (envs or 1) * period
    layout = buffers._layout(max(max_size // unit, 1) * unit, envs, None, period)
    assert layout.modulus % layout.rows == 0  # a slot is the cursor modulo the rows
    assert layout.modulus % period == 0  # and windows start at multiples of the period
    assert layout.modulus >= 2 * layout.rows  # whether an index is held is never ambiguous
    assert layout.modulus * layout.envs + layout.capacity < 2**31  # nor does a window overflow


# ------------------------------------------------------------------------------------------- queue


def test_queue_of_rollouts_loses_nothing():
    """Rollouts written once and read once, in order, by turns that `can_add`, `can_pop` decide."""
    queue = buffers.circular_buffer(16)
    state = queue.init(encode(0))
    written, read = 0, []
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
    functions = {name: part for name, part in buffer._asdict().items() if callable(part)}
    assert set(buffer._fields) - set(functions) <= {"core", "max_size"}
    for name, function in functions.items():
        signature, text = pydoc.plain(pydoc.render_doc(function)).split("\n")[2:4]
        assert signature.startswith(f"{name}("), signature
        assert len(text) > 30, name


def test_a_buffer_prints_its_sizes():
    assert repr(buffers.circular_buffer(5)) == "CircularBuffer(max_size=5)"
    streams = buffers.prioritised_replay(48, num_envs=4, sequence_length=3, period=2)
    sizes = "max_size=48, num_envs=4, sequence_length=3, period=2"
    assert repr(streams) == f"Replay({sizes}, num_clusters=1, prioritised=True)"
    clustered = buffers.clustered_replay(7, buffers.uniform_replay(10_000), lambda item: 0)
    sizes = "max_size=10000, num_envs=1, sequence_length=1, period=1"
    assert repr(clustered) == f"Replay({sizes}, num_clusters=7, prioritised=False)"


@pytest.mark.parametrize("bound", [0, 1, 2, 3, 1000, 65535, 65536, 65537, 10**6, 2**29 - 1, 2**29])
def test_random_numbers_below_a_bound_are_exact(bound):
    """floor(bound * r / 2**64) to the last bit, against Python's integers."""
    bits = jax.random.bits(jax.random.PRNGKey(bound), (2, 2000), jnp.uint32)
    got = buffers._random_below(jnp.int32(bound), bits)
    numbers = zip(*np.asarray(bits).tolist(), strict=True)
    wanted = [((high << 32) + low) * bound >> 64 for high, low in numbers]
    assert got.tolist() == wanted


# ---------------------------------------------------------------------------------------- rollouts


@pytest.mark.parametrize(
    ("rows", "epochs", "num_minibatches"),
    [(1, 3, 1), slow(2, 9, 2), slow(64, 5, 4), (65, 4, 5), slow(300, 1, 1), (70_000, 3, 7)],
)
def test_minibatches_of_an_epoch_hold_every_row_once(rows, epochs, num_minibatches):
    got = buffers.shuffled_minibatches(jax.random.key(0), rows, epochs, num_minibatches)
    assert got.shape == (epochs, num_minibatches, rows // num_minibatches)
    assert got.dtype == jnp.int32
    orders = np.asarray(got).reshape(epochs, rows)
    np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(rows), (epochs, 1)))
    if rows > 2:  # each epoch has an order of its own, and none is that of the rollout
        assert len({tuple(order) for order in [range(rows), *orders.tolist()]}) == epochs + 1
        other = buffers.shuffled_minibatches(jax.random.key(1), rows, epochs, num_minibatches)
        assert np.mean(got == other) < 0.2


def test_rows_that_minibatches_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="rows must be a multiple of num_minibatches=5, got 12: "):
        buffers.shuffled_minibatches(jax.random.key(0), 12, 3, 5)


def test_orders_are_equally_likely():
    got = buffers.shuffled_minibatches(jax.random.key(0), 4, 30_000, 2).reshape(30_000, 4)
    order = np.unique(got @ jnp.array([64, 16, 4, 1]), return_inverse=True)[1]
    assert stats.chisquare(np.bincount(order, minlength=24)).pvalue > 1e-3
    # Nor does an epoch depend on the one before.
    pairs = order.reshape(-1, 2) @ [24, 1]
    assert stats.chisquare(np.bincount(pairs, minlength=24**2)).pvalue > 1e-3


@pytest.mark.parametrize(("rows", "epochs", "groups"), [(60, 5_000, 60), (2**17, 10, 64)])
def test_rows_land_everywhere_alike(rows, epochs, groups):
    """Counts of (group of rows, minibatch); with 2**17 rows many have the same random bits."""
    got = buffers.shuffled_minibatches(jax.random.key(1), rows, epochs, groups)
    cell = np.asarray(got) // (rows // groups) * groups + np.arange(groups)[:, None]
    counts = np.bincount(cell.ravel(), minlength=groups**2)
    expected = epochs * rows / groups**2
    # The counts of an epoch are hypergeometric: every row and every place is taken once.
    statistic = ((counts - expected) ** 2).sum() / expected * (rows - 1) / rows
    assert 1e-3 < stats.chi2((groups - 1) ** 2).sf(statistic) < 1 - 1e-3


def test_minibatches_are_the_same_under_jit_and_vmap():
    keys, sizes = jax.random.split(jax.random.key(0), 3), (24, 3, 4)
    eager = [buffers.shuffled_minibatches(key, *sizes) for key in keys]
    jitted = jax.jit(buffers.shuffled_minibatches, static_argnums=(1, 2, 3))
    assert_trees_equal([jitted(key, *sizes) for key in keys], eager)
    together = jax.vmap(lambda key: buffers.shuffled_minibatches(key, *sizes))(keys)
    assert_trees_equal(together, jnp.stack(eager))
    assert len({tuple(x.ravel().tolist()) for x in eager}) == 3
