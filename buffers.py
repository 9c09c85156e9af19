"""Replay buffers for JAX: pure, jitted functions over pytrees of arrays.

A factory returns a NamedTuple of functions; the state that they pass along is a NamedTuple of
arrays and nothing else, so it can be jitted, vmapped, sharded, donated and checkpointed:

    >>> import jax, jax.numpy as jnp, buffers
    >>> replay = buffers.uniform_replay(max_size=10_000)
    >>> item = {"observation": jnp.zeros(4), "reward": 0.0}    # arrays or Python scalars
    >>> state = replay.init(item)                              # only shapes and dtypes are used
    >>> state = replay.add(state, item)                        # in place: the old state is donated
    >>> items = {"observation": jnp.ones((3, 4)), "reward": jnp.arange(3.0)}
    >>> state = replay.add_batch(state, items, mask=jnp.array([True, False, True]))
    >>> int(replay.size(state))
    3
    >>> sample = replay.sample(state, jax.random.key(0), batch_size=128)
    >>> sample.experience["observation"].shape
    (128, 4)

Storage is a ring of rows. A row is one time step of all environments: every leaf of the storage
has shape [T, N, ...]. A buffer of single items is the case N = 1. Every factory is that ring, one
way to choose where a sample starts, and one gather.

Shape letters: T rows of the ring (time), N environments, L rows added, B batch drawn,
W steps in a window (`sequence_length`).

An *index* names an item for as long as it is held: it counts the rows ever written, modulo a
bounded multiple of T (so nothing overflows), times N, plus the environment. The slot that an index
refers to is its row modulo T; whether the slot has been overwritten since is arithmetic, not
bookkeeping (`_is_held`).

Mistakes. Wrong structures, shapes, dtypes and sizes raise when a function is traced. Mistakes that
depend on values (sampling an empty buffer, popping too much, an index that is gone) raise
ValueError when the function is called with concrete arrays; inside `jax.jit` they are harmless in
the way that the function's text says, and with `debug=True` an error under
`jax.experimental.checkify`. (Not by default: a check that is left in a compiled function costs it
JAX's fast dispatch, 50 us a call with one array and 400 us more with forty, even if nobody looks.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

PyTree = Any
Array = jax.Array

__all__ = [
    "CircularBuffer",
    "Replay",
    "RingState",
    "Sample",
    "circular_buffer",
    "uniform_replay",
]


# ------------------------------------------------------------------------------------------- types


class RingState(NamedTuple):
    """The last T rows written. The state of `circular_buffer` and `uniform_replay`."""

    storage: PyTree  # leaves [T, N, ...]
    cursor: Array  # [] int32, rows ever written modulo `Layout.modulus`; next slot: cursor % T
    size: Array  # [] int32, rows held, 0 to T


class Sample(NamedTuple):
    """What `sample` draws."""

    experience: PyTree  # leaves [B, ...], with `sequence_length` [B, W, ...]
    indices: Array  # [B] int32, for `get`, `update` (and `set_priorities`)
    probabilities: Array  # [B] float32, of each draw; 0 where there was nothing to draw


class CircularBuffer(NamedTuple):
    """The functions of `circular_buffer`; B, n: any number of items, `...`: an item's own shape.

    init(item) -> state: empty storage for items like `item`.
    add(state, item) -> state: one item, over the oldest one when full.
    add_batch(state, items [B, ...], mask [B] = None) -> state: items in order, those whose `mask`
      is False left out; of more items than fit, the newest stay.
    pop(state, n) -> (state, items [n, ...]): the n oldest, oldest first; `n` is static. With fewer
      than n held: ValueError; inside jit all that are held go, and the rows after them hold old
      contents of the storage.
    get(state, indices) -> items [*indices.shape, ...]: 0 is the oldest, size - 1 the newest.
      Outside that: ValueError; inside jit some slot's contents.
    update(state, fn, indices=None, *args) -> state: `fn(item, *args) -> item` applied to every
      item, or to those at `indices` [B] with the rows of `args` [B, ...]. `fn` is static: define
      it once and pass what varies in `args`, a new lambda is a new compilation. Outside 0 to
      size - 1: ValueError; inside jit ignored. An index given twice is written once.
    size(state) -> [] int32. can_add(state, n), can_pop(state, n) -> [] bool: whether n items fit
      without loss; whether n are held. With these two it is a FIFO queue.
    """

    init: Callable[[PyTree], RingState]
    add: Callable[[RingState, PyTree], RingState]
    add_batch: Callable[..., RingState]
    pop: Callable[[RingState, int], tuple[RingState, PyTree]]
    get: Callable[[RingState, Any], PyTree]
    update: Callable[..., RingState]
    size: Callable[[RingState], Array]
    can_add: Callable[[RingState, Any], Array]
    can_pop: Callable[[RingState, Any], Array]


class Replay(NamedTuple):
    """The functions of `uniform_replay`.

    In a buffer of items (`num_envs=None`) a row is one item; with `num_envs=N` a row is one step
    of N environments, and every array below that is said to be [L, ...] is [L, N, ...].

    init(item) -> state: empty storage for items like `item`, which is one item of one environment.
    add(state, item) -> state: one row, an item or [N, ...].
    add_batch(state, items [L, ...], mask [L] = None) -> state: rows in order, those whose `mask` is
      False left out; of more rows than fit, the newest stay.
    sample(state, key, batch_size) -> Sample: draws with replacement; `batch_size` is static. With
      nothing to draw: ValueError; inside jit some slot's contents, of probability 0.
    add_and_sample(state, items [L, ...], key, batch_size) -> (state, Sample): `add_batch`, then
      `sample`, in one dispatch.
    get(state, indices) -> experience [*indices.shape, ...] as `sample` gave it. For an index that
      has been overwritten: ValueError; inside jit what is in its slot now.
    update(state, fn, indices=None, *args) -> state: `fn(item, *args) -> item` applied to every
      item, or to those at `indices` [B] with the rows of `args` [B, ...]; of a window, to the item
      it starts at. `fn` is static: define it once and pass what varies in `args`, a new lambda is
      a new compilation. For an index that has been overwritten: ValueError; inside jit ignored. An
      index given twice is written once.
    size(state) -> [] int32: items held, over all environments.
    can_sample(state) -> [] bool: whether there is anything to draw.
    """

    init: Callable[[PyTree], RingState]
    add: Callable[[RingState, PyTree], RingState]
    add_batch: Callable[..., RingState]
    sample: Callable[[RingState, Array, int], Sample]
    add_and_sample: Callable[[RingState, PyTree, Array, int], tuple[RingState, Sample]]
    get: Callable[[RingState, Any], PyTree]
    update: Callable[..., RingState]
    size: Callable[[RingState], Array]
    can_sample: Callable[[RingState], Array]


# ------------------------------------------------------------------------------------------ checks


def _is_checked(layout: Layout, *values: Any) -> bool:
    """Whether mistakes in these values are looked for: not in traced ones, unless asked to."""
    return layout.debug or not any(isinstance(x, jax.core.Tracer) for x in values)


def _check(ok: Any, message: str, **values: Any) -> None:
    """Raises if `ok` is concrete and False; if it is traced, leaves that to checkify."""
    if isinstance(ok, jax.core.Tracer):
        checkify.debug_check(ok, message, **{k: jnp.asarray(v) for k, v in values.items()})
    elif not ok:
        raise ValueError(message.format(**values))


def _host(x: Any) -> Any:
    """`x` as NumPy if it is concrete, so that a check of it in Python dispatches nothing."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _indices(name: str, indices: Any) -> Any:
    """Indices as an array: lists and Python ints are taken, floats are not."""
    array = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: indices must be integers, got {array.dtype}")
    if isinstance(array, np.ndarray):  # of 64 bits: what int32 cannot hold is no index
        array = np.where((array < 0) | (array >= 2**31), -1, array)
    return array.astype(np.int32)


def _positive(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be a Python int, got {value!r}: it sets the shape of an array, so it "
            "cannot be a traced value (under jit, mark it static)"
        ) from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, got {number}")
    return number


def _item_like(item: PyTree) -> PyTree:
    """The ShapeDtypeStruct of each leaf of `item`, Python scalars with JAX's default dtypes."""
    if not jax.tree.leaves(item):
        raise ValueError(f"init: the item has no arrays in it, got {item!r}")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), item)


def _check_items(
    name: str, storage: PyTree, items: PyTree, lead: tuple[int, ...], axes: str
) -> None:
    """Raises unless every leaf of `items` is `lead` (named `axes`) + the shape given to init."""
    given: Any = jax.tree.structure(items)
    wanted = jax.tree.structure(storage)
    if given != wanted:
        raise ValueError(
            f"{name}: items have structure {given}, expected {wanted} as given to init"
        )
    slots, _ = jax.tree_util.tree_flatten_with_path(storage)
    for (path, slot), leaf in zip(slots, jax.tree.leaves(items), strict=True):
        where = f"{name}: leaf {jax.tree_util.keystr(path) or '(the item itself)'}"
        expected = lead + slot.shape[2:]
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"{where} has shape {jnp.shape(leaf)}, expected {expected}, which is ({axes}item)"
                + ("" if "update" in name else ": add takes one row, add_batch several")
            )
        dtype = jnp.result_type(leaf)
        is_literal = jax.typeof(leaf).weak_type  # a Python scalar takes the dtype of its slot
        if dtype != slot.dtype and not (is_literal and jnp.result_type(slot, leaf) == slot.dtype):
            raise TypeError(
                f"{where} has dtype {dtype}, expected {slot.dtype} as given to init: convert it "
                f"with .astype({str(slot.dtype)!r}), or give init an item of dtype {dtype}"
            )


def _check_mask(mask: Any, rows: int) -> None:
    """Raises unless `mask` is a bool array [rows]."""
    given = f"{mask.dtype}{mask.shape}" if hasattr(mask, "dtype") else type(mask).__name__
    if given != f"bool({rows},)":
        raise ValueError(f"add_batch: mask is {given}, expected bool and ({rows},): a flag a row")


# -------------------------------------------------------------------------------------------- ring


class Layout(NamedTuple):
    """The sizes that a factory was called with; Python ints, fixed at compile time."""

    rows: int  # T
    envs: int  # N
    window: int  # W
    period: int  # windows start at rows whose count is a multiple of it
    streams: bool  # whether items given to `add` have the axis N
    sequences: bool  # whether samples have the axis W
    debug: bool  # whether checks of traced values are left in for checkify

    @property
    def capacity(self) -> int:
        """Items that fit: T * N."""
        return self.rows * self.envs

    @property
    def modulus(self) -> int:
        """The cursor counts modulo this: a multiple of T such that an index stays below 2**30."""
        return 2**30 // self.capacity * self.rows


def _layout(
    max_size: int,
    num_envs: int | None = None,
    sequence_length: int | None = None,
    period: int = 1,
    debug: bool = False,
) -> Layout:
    max_size = _positive("max_size", max_size)
    envs = 1 if num_envs is None else _positive("num_envs", num_envs)
    window = 1 if sequence_length is None else _positive("sequence_length", sequence_length)
    unit = envs * _positive("period", period)
    least = -(-window // period) * unit  # so that a window fits
    if max_size % unit:
        sizes = {max(max_size // unit * unit, least), max(-(-max_size // unit) * unit, least)}
        raise ValueError(
            f"max_size {max_size} is not a multiple of num_envs * period = {envs} * {period}: use "
            + " or ".join(str(size) for size in sorted(sizes))
        )
    if max_size > 2**29:
        raise ValueError(
            f"max_size {max_size} is more than 2**29 items, the most that int32 can index"
        )
    if window > max_size // envs:
        raise ValueError(
            f"sequence_length {window} is longer than the {max_size // envs} steps that max_size "
            f"{max_size} keeps of each of {envs} environments: max_size must be at least {least}"
        )
    return Layout(
        rows=max_size // envs,
        envs=envs,
        window=window,
        period=period,
        streams=num_envs is not None,
        sequences=sequence_length is not None,
        debug=debug,
    )


def _empty(layout: Layout, item: PyTree) -> RingState:
    like = _item_like(item)
    lead = (layout.rows, layout.envs)
    return RingState(
        storage=jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), like),
        cursor=jnp.int32(0),
        size=jnp.int32(0),
    )


def _row(layout: Layout, ring: RingState, item: PyTree) -> PyTree:
    """One row for `_write`, as `add` takes it: an item, or [N, ...]."""
    lead, axes = ((layout.envs,), "num_envs, ") if layout.streams else ((), "")
    _check_state(layout, ring)
    _check_items("add", ring.storage, item, lead, axes)
    return jax.tree.map(lambda x, s: jnp.reshape(x, (1, *s.shape[1:])), item, ring.storage)


def _length(items: PyTree) -> int:
    """The length of the leading axis, as far as the first leaf tells."""
    return next((next(iter(jnp.shape(leaf)), 1) for leaf in jax.tree.leaves(items)), 0)


def _rows(layout: Layout, ring: RingState, items: PyTree) -> PyTree:
    """Rows for `_write`, as `add_batch` takes them: [L, ...], or [L, N, ...]."""
    _check_state(layout, ring)
    count = _length(items)
    lead, axes = ((layout.envs,), "num_envs, ") if layout.streams else ((), "")
    _check_items("add_batch", ring.storage, items, (count, *lead), "rows, " + axes)
    return jax.tree.map(lambda x, s: jnp.reshape(x, (count, *s.shape[1:])), items, ring.storage)


def _write(layout: Layout, ring: RingState, rows: PyTree, mask: Array | None = None) -> RingState:
    """`rows`, leaves [L, N, ...], after the newest; those with a False `mask` [L] left out."""
    count: Any = jax.tree.leaves(rows)[0].shape[0]
    # `rank` is the place of a row among those stored. Rows that are left out, or that newer ones of
    # the same batch would overwrite, get slots past the end, which the scatter drops.
    if mask is None:
        first = max(count - layout.rows, 0)
        rows = jax.tree.map(lambda x: x[first:], rows)
        slot = (ring.cursor + jnp.arange(first, count)) % layout.rows
    else:
        _check_mask(mask, count)
        past_end = layout.rows + jnp.arange(count)
        rank, count = jnp.cumsum(mask, dtype=jnp.int32) - 1, jnp.sum(mask, dtype=jnp.int32)
        keep = mask & (rank >= count - layout.rows)
        slot = jnp.where(keep, (ring.cursor + rank) % layout.rows, past_end)
    return ring._replace(
        # A scatter and not dynamic_update_slice: XLA does it in place for a block that wraps, too.
        storage=jax.tree.map(
            lambda s, x: s.at[slot].set(x.astype(s.dtype), mode="drop", unique_indices=True),
            ring.storage,
            rows,
        ),
        cursor=(ring.cursor + count) % layout.modulus,
        size=jnp.minimum(ring.size + count, layout.rows),
    )


def _is_held(layout: Layout, cursor: Any, size: Any, indices: Any, window: int = 1) -> Any:
    """Whether the `window` rows from each index are stored. Works on JAX and NumPy arrays."""
    age = (cursor - indices // layout.envs) % layout.modulus  # 1: the newest row
    exists = (indices >= 0) & (indices < layout.modulus * layout.envs)
    return exists & (age >= window) & (age <= size)


def _check_state(layout: Layout, state: RingState) -> None:
    shape = jax.tree.leaves(state.storage)[0].shape[:2]
    if shape != (layout.rows, layout.envs):
        raise ValueError(
            f"the state holds {shape[0]} rows of {shape[1]} environments, this buffer "
            f"{layout.rows} of {layout.envs}: it was made by another one's init"
        )


def _flat(leaf: Array) -> Array:
    """[T, N, ...] as [T * N, ...] (no copy): the item of index i stands at i % (T * N)."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _gather(layout: Layout, ring: RingState, indices: Array) -> PyTree:
    """The item at each index; in a buffer of sequences the W items from it, on an axis after."""
    _check_state(layout, ring)
    if layout.sequences:
        steps = layout.envs * jnp.arange(layout.window)
        indices = jnp.expand_dims(indices, -1) + jnp.expand_dims(steps, range(indices.ndim))
    position = indices % layout.capacity
    return jax.tree.map(lambda s: _flat(s).at[position].get(mode="promise_in_bounds"), ring.storage)


def _update(
    layout: Layout, state: RingState, fn: Callable[..., PyTree], indices: Any, args: tuple
) -> RingState:
    """`fn` on every item, or on those at `indices` [B], which must be held to be written."""
    items = jax.tree.map(_flat, state.storage)
    if indices is None:
        if args:
            raise TypeError("update: args go with indices, a row for each; got no indices")
        new = jax.vmap(fn)(items)
        _check_items("update: fn's result", state.storage, new, (layout.capacity,), "max_size, ")
        new = jax.tree.map(lambda s, x: x.astype(s.dtype).reshape(s.shape), state.storage, new)
    else:
        if indices.ndim != 1:
            raise ValueError(f"update: indices must have shape [B], got {indices.shape}")
        position = indices % layout.capacity
        new = jax.vmap(fn)(jax.tree.map(lambda x: x[position], items), *args)
        _check_items("update: fn's result", state.storage, new, position.shape, "indices, ")
        held = _is_held(layout, state.cursor, state.size, indices)
        slot, env = jnp.where(held, position // layout.envs, layout.rows), position % layout.envs
        new = jax.tree.map(
            lambda s, x: s.at[slot, env].set(x.astype(s.dtype), mode="drop"), state.storage, new
        )
    return state._replace(storage=new)


def _donate(donate: bool) -> dict[str, Any]:
    return {"donate_argnames": "state"} if donate else {}


# ---------------------------------------------------------------------------------------- circular


def circular_buffer(max_size: int, *, donate: bool = True, debug: bool = False) -> CircularBuffer:
    """A ring of the last `max_size` items; with `can_add` and `can_pop` a FIFO queue.

    Args:
      max_size: how many items are held; then each new one overwrites the oldest.
      donate: whether functions that return a state use up the one they were given, so that they
        work in place. False keeps old states alive, at the cost of copying the storage each call.
      debug: whether mistakes in values, inside jit, are errors under checkify.

    Raises:
      TypeError, ValueError: `max_size` is not an int from 1 to 2**29.
    """
    layout = _layout(max_size, debug=debug)
    donated = _donate(donate)

    @jax.jit
    def init(item: PyTree) -> RingState:
        return _empty(layout, item)

    @partial(jax.jit, **donated)
    def add(state: RingState, item: PyTree) -> RingState:
        return _write(layout, state, _row(layout, state, item))

    @partial(jax.jit, **donated)
    def add_batch(state: RingState, items: PyTree, mask: Array | None = None) -> RingState:
        return _write(layout, state, _rows(layout, state, items), mask)

    def index(state: RingState, i: Array) -> Array:
        """The index of the i-th oldest item, or -1."""
        held = (i >= 0) & (i < state.size)
        return jnp.where(held, (state.cursor - state.size + i) % layout.modulus, -1)

    @partial(jax.jit, static_argnames="n", **donated)
    def pop_jit(state: RingState, n: int) -> tuple[RingState, PyTree]:
        items = _gather(layout, state, index(state, jnp.arange(n)))
        return state._replace(size=jnp.maximum(state.size - n, 0)), items

    def pop(state: RingState, n: int) -> tuple[RingState, PyTree]:
        if _positive("n", n) > max_size:
            raise ValueError(f"pop: n is {n}, but at most max_size = {max_size} items are held")
        if _is_checked(layout, state.size):
            size = _host(state.size)
            _check(size >= n, "pop: {n} items asked for, but {size} held", n=n, size=size)
        return pop_jit(state, n)

    def check_indices(name: str, state: RingState, indices: Any) -> None:
        if _is_checked(layout, state.size, indices):
            i, size = _host(indices), _host(state.size)
            message = name + ": indices must be from 0 (oldest) to size - 1, and size is {size}"
            _check(((i >= 0) & (i < size)).all(), message, size=size)

    @jax.jit
    def get_jit(state: RingState, indices: Array) -> PyTree:
        return _gather(layout, state, index(state, indices))

    def get(state: RingState, indices: Any) -> PyTree:
        indices = _indices("get", indices)
        check_indices("get", state, indices)
        return get_jit(state, indices)

    @partial(jax.jit, static_argnames="fn", **donated)
    def update_jit(state: RingState, fn: Callable, indices: Any, args: tuple) -> RingState:
        indices = None if indices is None else index(state, indices)
        return _update(layout, state, fn, indices, args)

    def update(state: RingState, fn: Callable, indices: Any = None, *args: PyTree) -> RingState:
        if indices is not None:
            indices = jnp.atleast_1d(_indices("update", indices))
            check_indices("update", state, indices)
        return update_jit(state, fn, indices, args)

    @jax.jit
    def can_add(state: RingState, n: Any) -> Array:
        return state.size + n <= max_size

    @jax.jit
    def can_pop(state: RingState, n: Any) -> Array:
        return state.size >= n

    @jax.jit
    def size(state: RingState) -> Array:
        return state.size

    return CircularBuffer(init, add, add_batch, pop, get, update, size, can_add, can_pop)


# --------------------------------------------------------------------------------- windows, replay


def _random_below(key: Array, count: int, bound: Array) -> Array:
    """[count] int32, uniform in 0 to bound - 1 (0 if bound is 0): floor(bound * r / 2**64).

    `r` has 64 random bits, so that no number is favoured by more than bound / 2**64. The product is
    taken in halves of 16 bits. A third of the random bits and half the time of jax.random.randint.
    """
    high, low = jax.random.bits(key, (2, count), jnp.uint32)
    n = bound.astype(jnp.uint32)  # below 2**30

    def upper(x: Array) -> Array:
        """The upper 32 bits of the 64-bit product x * n."""
        low_product, high_product = (x & 0xFFFF) * (n & 0xFFFF), (x >> 16) * (n & 0xFFFF)
        middle = (x & 0xFFFF) * (n >> 16) + (low_product >> 16) + (high_product & 0xFFFF)
        return (x >> 16) * (n >> 16) + (high_product >> 16) + (middle >> 16)

    carry = (high * n + upper(low)) < upper(low)  # whether that sum passes 2**32
    return (upper(high) + carry.astype(jnp.uint32)).astype(jnp.int32)


def _starts(layout: Layout, cursor: Any, size: Any) -> tuple[Any, Any]:
    """At how many rows a window may start, and the count of the first. JAX or NumPy arrays.

    The rows held are counted cursor - size, ..., cursor - 1. A window starts at a multiple of
    `period` and ends at a row that is held, so it never crosses the write position.
    """
    skipped = -(cursor - size) % layout.period
    starts = (size - skipped - layout.window + layout.period) // layout.period
    return starts * (starts > 0).astype(np.int32), (cursor - size + skipped) % layout.modulus


def _replay(
    layout: Layout,
    donate: bool,
    choose: Callable[[Any, Array, int], tuple[Array, Array]],
) -> Replay:
    """A replay buffer of the ring, the gather and `choose(state, key, B) -> (indices, P)`, [B]."""
    donated = _donate(donate)

    def check_can_sample(name: str, state: RingState, added: int = 0) -> None:
        if _is_checked(layout, state.size):
            cursor, size = (
                _host(state.cursor) + np.int32(added),
                _host(state.size) + np.int32(added),
            )
            minimum = jnp.minimum if isinstance(size, jax.core.Tracer) else np.minimum
            starts, _ = _starts(layout, cursor, minimum(size, np.int32(layout.rows)))
            message = (
                f"{name}: nothing to draw, {{size}} steps held and a draw takes {layout.window} "
                f"from a multiple of {layout.period} on: add more, or ask can_sample"
            )
            _check(starts > 0, message, size=size)

    @jax.jit
    def init(item: PyTree) -> RingState:
        return _empty(layout, item)

    @partial(jax.jit, **donated)
    def add(state: RingState, item: PyTree) -> RingState:
        return _write(layout, state, _row(layout, state, item))

    @partial(jax.jit, **donated)
    def add_batch(state: RingState, items: PyTree, mask: Array | None = None) -> RingState:
        return _write(layout, state, _rows(layout, state, items), mask)

    def draw(state: RingState, key: Array, batch_size: int) -> Sample:
        indices, probabilities = choose(state, key, batch_size)
        return Sample(_gather(layout, state, indices), indices, probabilities)

    sample_jit = jax.jit(draw, static_argnames="batch_size")

    def sample(state: RingState, key: Array, batch_size: int) -> Sample:
        check_can_sample("sample", state)
        return sample_jit(state, key, _positive("batch_size", batch_size))

    @partial(jax.jit, static_argnames="batch_size", **donated)
    def add_and_sample_jit(
        state: RingState, items: PyTree, key: Array, batch_size: int
    ) -> tuple[RingState, Sample]:
        state = _write(layout, state, _rows(layout, state, items))
        return state, draw(state, key, batch_size)

    def add_and_sample(
        state: RingState, items: PyTree, key: Array, batch_size: int
    ) -> tuple[RingState, Sample]:
        check_can_sample("add_and_sample", state, _length(items))
        return add_and_sample_jit(state, items, key, _positive("batch_size", batch_size))

    def check_indices(name: str, state: RingState, indices: Any, window: int) -> None:
        if _is_checked(layout, state.size, indices):
            i, cursor, size = _host(indices), _host(state.cursor), _host(state.size)
            held = _is_held(layout, cursor, size, i, window)
            _check(held.all(), f"{name}: an index is not in the buffer (any more)")

    get_jit = jax.jit(partial(_gather, layout))

    def get(state: RingState, indices: Any) -> PyTree:
        indices = _indices("get", indices)
        check_indices("get", state, indices, layout.window)
        return get_jit(state, indices)

    update_jit = jax.jit(partial(_update, layout), static_argnames="fn", **donated)

    def update(state: RingState, fn: Callable, indices: Any = None, *args: PyTree) -> RingState:
        if indices is not None:
            indices = jnp.atleast_1d(_indices("update", indices))
            check_indices("update", state, indices, 1)
        return update_jit(state, fn, indices, args)

    @jax.jit
    def size(state: RingState) -> Array:
        return state.size * layout.envs

    @jax.jit
    def can_sample(state: RingState) -> Array:
        return _starts(layout, state.cursor, state.size)[0] > 0

    return Replay(init, add, add_batch, sample, add_and_sample, get, update, size, can_sample)


# ----------------------------------------------------------------------------------------- uniform


def uniform_replay(
    max_size: int,
    *,
    num_envs: int | None = None,
    sequence_length: int | None = None,
    period: int = 1,
    donate: bool = True,
    debug: bool = False,
) -> Replay:
    """A ring of the last `max_size` items, drawn from uniformly and with replacement.

    Args:
      max_size: items held, over all environments; then each new row overwrites the oldest.
      num_envs: N, items then come as steps of N environments [N, ...], stored time-major, and
        `add_batch` takes [L, N, ...]. None: items come one by one.
      sequence_length: W, `sample` then gives windows [B, W, ...] of W consecutive steps of one
        environment. They never cross the write position, but they do cross episode ends: store
        what tells. None: `sample` gives items [B, ...].
      period: windows start at steps whose count since the first is a multiple of it;
        `period=sequence_length` gives windows that do not overlap.
      donate: whether functions that return a state use up the one they were given, so that they
        work in place. False keeps old states alive, at the cost of copying the storage each call.
      debug: whether mistakes in values, inside jit, are errors under checkify.

    Raises:
      TypeError, ValueError: a size is not an int of at least 1, `max_size` is not a multiple of
        num_envs * period or exceeds 2**29, or a window is longer than what is held.
    """
    layout = _layout(max_size, num_envs, sequence_length, period, debug)

    def choose(state: RingState, key: Array, batch_size: int) -> tuple[Array, Array]:
        starts, first = _starts(layout, state.cursor, state.size)
        total = starts * layout.envs
        draw = _random_below(key, batch_size, total)
        row = (first + layout.period * (draw // layout.envs)) % layout.modulus
        probability = jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(jnp.float32), 0)
        return row * layout.envs + draw % layout.envs, jnp.broadcast_to(probability, (batch_size,))

    return _replay(layout, donate, choose)
