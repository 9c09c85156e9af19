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

Papers. Prioritised replay: Schaul et al. 2016, "Prioritized Experience Replay", arXiv 1511.05952.
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
State = Any  # a NamedTuple that has at least the fields of RingState

__all__ = [
    "CircularBuffer",
    "PrioritisedReplay",
    "PrioritisedState",
    "Replay",
    "RingState",
    "Sample",
    "circular_buffer",
    "importance_weights",
    "prioritised_replay",
    "uniform_replay",
]


# ------------------------------------------------------------------------------------------- types


class RingState(NamedTuple):
    """The last T rows written. The state of `circular_buffer` and `uniform_replay`."""

    storage: PyTree  # leaves [T, N, ...]
    cursor: Array  # [] int32, rows ever written modulo `Layout.modulus`; next slot: cursor % T
    size: Array  # [] int32, rows held, 0 to T


class PrioritisedState(NamedTuple):
    """The state of `prioritised_replay`: a `RingState`, and the weights that are drawn by."""

    storage: PyTree  # leaves [T, N, ...]
    cursor: Array  # [] int32
    size: Array  # [] int32
    tree: tuple[Array, ...]  # sum tree, see `_tree`; tree[0][t * N + n] is a priority ** exponent
    max_priority: Array  # [] float32, the largest ever set; 0 before the first


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


class PrioritisedReplay(NamedTuple):
    """The functions of `prioritised_replay`: those of `Replay`, of a `PrioritisedState`, and one.

    set_priorities(state, indices [B], priorities [B]) -> state: priorities of items, or of the
      windows that start at them, before the exponent, such as abs(TD error) + epsilon. Indices that
      have been overwritten since they were drawn are ignored; one that is given twice gets one of
      its priorities. Negative, infinite or NaN: ValueError; inside jit that row is ignored.

    New items get the largest priority that was ever set, before the first 1. `can_sample` is False
    also where all priorities are 0; `add_and_sample` after it needs a new item to draw.
    """

    init: Callable[[PyTree], PrioritisedState]
    add: Callable[[PrioritisedState, PyTree], PrioritisedState]
    add_batch: Callable[..., PrioritisedState]
    sample: Callable[[PrioritisedState, Array, int], Sample]
    add_and_sample: Callable[
        [PrioritisedState, PyTree, Array, int], tuple[PrioritisedState, Sample]
    ]
    get: Callable[[PrioritisedState, Any], PyTree]
    update: Callable[..., PrioritisedState]
    size: Callable[[PrioritisedState], Array]
    can_sample: Callable[[PrioritisedState], Array]
    set_priorities: Callable[[PrioritisedState, Any, Any], PrioritisedState]


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
    return array if array.dtype == np.int32 else array.astype(np.int32)


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


def _row(layout: Layout, ring: State, item: PyTree) -> PyTree:
    """One row for `_write`, as `add` takes it: an item, or [N, ...]."""
    lead, axes = ((layout.envs,), "num_envs, ") if layout.streams else ((), "")
    _check_state(layout, ring)
    _check_items("add", ring.storage, item, lead, axes)
    return jax.tree.map(lambda x, s: jnp.reshape(x, (1, *s.shape[1:])), item, ring.storage)


def _length(items: PyTree) -> int:
    """The length of the leading axis, as far as the first leaf tells."""
    return next((next(iter(jnp.shape(leaf)), 1) for leaf in jax.tree.leaves(items)), 0)


def _rows(layout: Layout, ring: State, items: PyTree) -> PyTree:
    """Rows for `_write`, as `add_batch` takes them: [L, ...], or [L, N, ...]."""
    _check_state(layout, ring)
    count = _length(items)
    lead, axes = ((layout.envs,), "num_envs, ") if layout.streams else ((), "")
    _check_items("add_batch", ring.storage, items, (count, *lead), "rows, " + axes)
    return jax.tree.map(lambda x, s: jnp.reshape(x, (count, *s.shape[1:])), items, ring.storage)


def _write(layout: Layout, ring: State, rows: PyTree, mask: Array | None = None) -> State:
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


def _check_state(layout: Layout, state: State) -> None:
    shape = jax.tree.leaves(state.storage)[0].shape[:2]
    if shape != (layout.rows, layout.envs):
        raise ValueError(
            f"the state holds {shape[0]} rows of {shape[1]} environments, this buffer "
            f"{layout.rows} of {layout.envs}: it was made by another one's init"
        )


def _flat(leaf: Array) -> Array:
    """[T, N, ...] as [T * N, ...] (no copy): the item of index i stands at i % (T * N)."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _gather(layout: Layout, ring: State, indices: Array) -> PyTree:
    """The item at each index; in a buffer of sequences the W items from it, on an axis after."""
    _check_state(layout, ring)
    if layout.sequences:
        steps = layout.envs * jnp.arange(layout.window)
        indices = jnp.expand_dims(indices, -1) + jnp.expand_dims(steps, range(indices.ndim))
    position = indices % layout.capacity
    return jax.tree.map(lambda s: _flat(s).at[position].get(mode="promise_in_bounds"), ring.storage)


def _update(
    layout: Layout, state: State, fn: Callable[..., PyTree], indices: Any, args: tuple
) -> State:
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


def _scaled(bits: Array, bound: Array) -> Array:
    """[B] int32 in 0 to bound - 1 (0 if bound is 0): floor(bound * r / 2**64).

    `r`, `bits` [2, B] uint32, are 64 random bits each, so that no number is favoured by more than
    bound / 2**64. The product is taken in halves of 16 bits. A third of the random bits and half
    the time of jax.random.randint.
    """
    high, low = bits
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


def _uniform(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
    """Indices [B] of windows, each as likely as the others, and their probabilities [B]."""
    starts, first = _starts(layout, state.cursor, state.size)
    total = starts * layout.envs
    draw = _scaled(jax.random.bits(key, (2, batch_size), jnp.uint32), total)
    row = (first + layout.period * (draw // layout.envs)) % layout.modulus
    # 1 / total, or 0. As a function of the draw, since XLA would start a second thread for one more
    # branch of the program, and that takes 60 us.
    probabilities = jnp.where(draw < total, 1 / jnp.maximum(total, draw + 1).astype(np.float32), 0)
    return row * layout.envs + draw % layout.envs, probabilities


def _at_most(x: Any, most: int) -> Any:
    """The smaller one; of a JAX or a NumPy array."""
    return (jnp if isinstance(x, jax.core.Tracer) else np).minimum(x, np.int32(most))


def _any_start(layout: Layout, state: State, added: int = 0) -> Any:
    """Whether there is a window to draw, `added` rows from now; traced or on the host."""
    cursor, size = _host(state.cursor) + np.int32(added), _host(state.size) + np.int32(added)
    return _starts(layout, cursor, _at_most(size, layout.rows))[0] > 0


def _replay(
    layout: Layout,
    donate: bool,
    empty: Callable[[Layout, PyTree], Any] = _empty,
    write: Callable[..., Any] = _write,
    choose: Callable[[Layout, Any, Array, int], tuple[Array, Array]] = _uniform,
    drawable: Callable[..., Any] = _any_start,
) -> Replay:
    """A replay buffer: the ring and the gather, with a way to choose indices.

    `empty` and `write` are those of the ring with what else the state keeps up to date;
    `choose(layout, state, key, B)` gives indices and probabilities [B]; `drawable(layout, state,
    added)` whether it can, once as many more rows are added, on the host if not traced.
    """
    donated = _donate(donate)

    def check_can_sample(name: str, state: State, added: int = 0) -> None:
        if _is_checked(layout, state.size):
            message = (
                f"{name}: nothing to draw, {{size}} steps held and a draw takes {layout.window} "
                f"from a multiple of {layout.period} on, of a priority above 0 if there are any: "
                "add more, or ask can_sample"
            )
            size = _at_most(_host(state.size) + np.int32(added), layout.rows)
            _check(drawable(layout, state, added), message, size=size)

    @jax.jit
    def init(item: PyTree) -> Any:
        return empty(layout, item)

    @partial(jax.jit, **donated)
    def add(state: State, item: PyTree) -> State:
        return write(layout, state, _row(layout, state, item))

    @partial(jax.jit, **donated)
    def add_batch(state: State, items: PyTree, mask: Array | None = None) -> State:
        return write(layout, state, _rows(layout, state, items), mask)

    def draw(state: State, key: Array, batch_size: int) -> Sample:
        indices, probabilities = choose(layout, state, key, batch_size)
        return Sample(_gather(layout, state, indices), indices, probabilities)

    sample_jit = jax.jit(draw, static_argnames="batch_size")

    def sample(state: State, key: Array, batch_size: int) -> Sample:
        check_can_sample("sample", state)
        return sample_jit(state, key, _positive("batch_size", batch_size))

    @partial(jax.jit, static_argnames="batch_size", **donated)
    def add_and_sample_jit(
        state: State, items: PyTree, key: Array, batch_size: int
    ) -> tuple[State, Sample]:
        state = write(layout, state, _rows(layout, state, items))
        return state, draw(state, key, batch_size)

    def add_and_sample(
        state: State, items: PyTree, key: Array, batch_size: int
    ) -> tuple[State, Sample]:
        check_can_sample("add_and_sample", state, _length(items))
        return add_and_sample_jit(state, items, key, _positive("batch_size", batch_size))

    def check_indices(name: str, state: State, indices: Any, window: int) -> None:
        if _is_checked(layout, state.size, indices):
            i, cursor, size = _host(indices), _host(state.cursor), _host(state.size)
            held = _is_held(layout, cursor, size, i, window)
            _check(held.all(), f"{name}: an index is not in the buffer (any more)")

    get_jit = jax.jit(partial(_gather, layout))

    def get(state: State, indices: Any) -> PyTree:
        indices = _indices("get", indices)
        check_indices("get", state, indices, layout.window)
        return get_jit(state, indices)

    update_jit = jax.jit(partial(_update, layout), static_argnames="fn", **donated)

    def update(state: State, fn: Callable, indices: Any = None, *args: PyTree) -> Any:
        if indices is not None:
            indices = jnp.atleast_1d(_indices("update", indices))
            check_indices("update", state, indices, 1)
        return update_jit(state, fn, indices, args)

    @jax.jit
    def size(state: State) -> Array:
        return state.size * layout.envs

    @jax.jit
    def can_sample(state: State) -> Array:
        return drawable(layout, state)

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
    return _replay(_layout(max_size, num_envs, sequence_length, period, debug), donate)


# ---------------------------------------------------------------------------------------- sum tree
#
# tree[0] has a weight for each position. tree[l + 1][i] is the sum of the FANOUT nodes from
# tree[l][FANOUT * i] on, recomputed from them whenever one changes: a difference added to it would
# leave a rounding error behind for good. The last level has at most TOP nodes. Levels are padded
# with zeros to a multiple of FANOUT: 4.6 bytes a position in all.

FANOUT = 8
TOP = 64
# With 24 bits a float32 tells the nodes of this many levels (2**15) apart, and not those of many
# more: a single number would favour some of ten million items and miss others.
LEVELS_PER_DRAW = 4


def _tree(positions: int) -> tuple[Array, ...]:
    """The tree of that many weights, all 0."""
    levels, nodes = [], positions
    while True:
        levels.append(jnp.zeros(-(-nodes // FANOUT) * FANOUT, jnp.float32))
        if nodes <= TOP:
            return tuple(levels)
        nodes = levels[-1].size // FANOUT


def _tree_set(
    tree: tuple[Array, ...], positions: Array, weights: Array, where: Array
) -> tuple[Array, ...]:
    """The tree with `weights` [B] at `positions` [B], in the rows where `where` [B] is True."""
    past_end = tree[0].size
    levels = [tree[0].at[jnp.where(where, positions, past_end)].set(weights, mode="drop")]
    node = jnp.where(where, positions, 0)  # the sums above position 0 are right before and after
    for level in tree[1:]:
        children = levels[-1].reshape(-1, FANOUT)
        if len(children) <= node.size:  # cheaper to sum them all
            sums = jnp.zeros_like(level).at[: len(children)].set(children.sum(axis=-1))
        else:
            node = node // FANOUT
            sums = level.at[node].set(children.at[node].get(mode="promise_in_bounds").sum(axis=-1))
        levels.append(sums)
    return tuple(levels)


def _tree_draw(tree: tuple[Array, ...], key: Array, count: int) -> tuple[Array, Array]:
    """Positions [B] drawn in proportion to their weights, one from each of B equal shares.

    Stratified as in Schaul et al. 2016, section 3.3. Returns the positions and their
    probabilities; position 0 and probability 0 if all weights are 0.
    """

    def descend(cumulative: Array, target: Array) -> tuple[Array, Array]:
        """The child [B] in whose share of `cumulative` [F, B] `target` lies, and the rest of it."""
        # Below the total, whatever was rounded, so that no child of weight 0 at the end is chosen.
        # Those before are not, since equal terms have equal sums. A total of 0 gives child 0.
        tiny, epsilon = jnp.finfo(jnp.float32).tiny, jnp.finfo(jnp.float32).eps
        target = jnp.minimum(target, cumulative[-1] * (1 - epsilon) - tiny)
        # One after the other: XLA would give two small reductions to two threads.
        before = jnp.max(jnp.where(cumulative <= target[None], cumulative, 0), axis=0)
        is_passed = (cumulative <= before[None]) & (target >= 0)[None]
        child = jnp.sum(is_passed, axis=0, dtype=jnp.int32)
        return child, target - before

    def sums(rows: Array) -> Array:
        """[F, B], the sums of the first 1, 2, ..., F of each of `rows` [B, F].

        A product with a triangle of ones: faster than cumsum, which XLA makes of many small steps.
        """
        ones = np.tri(rows.shape[1], dtype=np.float32)
        return jnp.einsum("fk,bk->fb", ones, rows, precision=jax.lax.Precision.HIGHEST)

    uniform = jax.random.uniform(key, (-(-len(tree) // LEVELS_PER_DRAW), count))
    uniform, top = jax.lax.optimization_barrier((uniform, tree[-1]))  # in this order, see descend
    cumulative = sums(top[None])
    total = cumulative[-1, 0]
    share = (jnp.arange(count, dtype=jnp.float32) + uniform[0]) / count
    node, target = descend(cumulative, share * total)
    for depth, level in enumerate(reversed(tree[:-1]), start=1):
        rows = level.reshape(-1, FANOUT).at[node].get(mode="promise_in_bounds")
        cumulative = sums(rows)
        if depth % LEVELS_PER_DRAW == 0:
            target = uniform[depth // LEVELS_PER_DRAW] * cumulative[-1]
        child, target = descend(cumulative, target)
        node = node * FANOUT + child
    weights = tree[0].at[node].get(mode="promise_in_bounds")
    probabilities = weights / jnp.where(total > 0, total, 1)
    # Drawn for good before the tree is written again: otherwise XLA copies it in a loop.
    return jax.lax.optimization_barrier((node, probabilities))


# ------------------------------------------------------------------------------------- prioritised


def prioritised_replay(
    max_size: int,
    priority_exponent: float = 0.6,
    *,
    num_envs: int | None = None,
    sequence_length: int | None = None,
    period: int = 1,
    donate: bool = True,
    debug: bool = False,
) -> PrioritisedReplay:
    """A ring of the last `max_size` items, drawn from in proportion to priority ** exponent.

    Proportional prioritisation of Schaul et al. 2016, section 3.3 and equation 1, with stratified
    draws; `importance_weights` makes up for the bias. An item of priority 0 is never drawn (but
    with exponent 0, where all are alike).

    Args:
      max_size: items held, over all environments; then each new row overwrites the oldest.
      priority_exponent: alpha, 0 or more; 0 is uniform replay.
      num_envs: as in `uniform_replay`.
      sequence_length: as in `uniform_replay`. A window has one priority, that of its first item.
      period: as in `uniform_replay`.
      donate: as in `uniform_replay`.
      debug: as in `uniform_replay`.

    Raises:
      TypeError, ValueError: as in `uniform_replay`; `priority_exponent` is negative or not finite.
    """
    layout = _layout(max_size, num_envs, sequence_length, period, debug)
    if not 0 <= priority_exponent < np.inf:
        raise ValueError(f"priority_exponent must be 0 or more, got {priority_exponent}")
    # So that no sum overflows, whatever the priorities are.
    largest = np.finfo(np.float32).max / (2 * layout.capacity)

    def weight(priorities: Array) -> Array:
        return jnp.minimum(priorities**priority_exponent, largest)

    def empty(layout: Layout, item: PyTree) -> PrioritisedState:
        return PrioritisedState(*_empty(layout, item), _tree(layout.capacity), jnp.float32(0))

    def write(
        layout: Layout, state: PrioritisedState, rows: PyTree, mask: Array | None = None
    ) -> PrioritisedState:
        """The ring's, and the weights of windows that can now be drawn, or cannot any more."""
        new = _write(layout, state, rows, mask)
        count = (new.cursor - state.cursor) % layout.modulus if mask is not None else _length(rows)
        # Row k counts from the first of these rows. The windows that one of them completes start
        # up to W - 1 rows before it.
        k = jnp.arange(1 - layout.window, _length(rows))
        changed = (k >= -state.size) & (k >= count - layout.rows) & (k < count)
        row = state.cursor + k
        is_start = (k <= count - layout.window) & (row % layout.period == 0)
        new_weight = weight(jnp.where(state.max_priority > 0, state.max_priority, 1))
        positions = row[:, None] % layout.rows * layout.envs + jnp.arange(layout.envs)[None]

        def each(x: Array) -> Array:
            return jnp.broadcast_to(x[:, None], positions.shape).reshape(-1)

        weights = each(jnp.where(is_start, new_weight, 0))
        return new._replace(
            tree=_tree_set(state.tree, positions.reshape(-1), weights, each(changed))
        )

    def choose(
        layout: Layout, state: PrioritisedState, key: Array, batch_size: int
    ) -> tuple[Array, Array]:
        positions, probabilities = _tree_draw(state.tree, key, batch_size)
        age = (state.cursor - 1 - positions // layout.envs) % layout.rows  # 0: the newest row
        row = (state.cursor - 1 - age) % layout.modulus
        return row * layout.envs + positions % layout.envs, probabilities

    def drawable(layout: Layout, state: PrioritisedState, added: int = 0) -> Any:
        """Whether a weight is above 0, or there will be a new window."""
        has_weight = _host(state.tree[-1]).sum() > 0
        if not added:
            return has_weight
        newest = _at_most(_host(state.size), layout.window - 1)  # those that end among the new
        is_new = _any_start(layout, state._replace(size=newest), added)
        return is_new | (has_weight & _any_start(layout, state, added))

    # Without the storage, which it does not change: an array less to pass is a microsecond.
    @partial(jax.jit, donate_argnames=("tree", "max_priority") if donate else ())
    def set_priorities_jit(
        tree: Any, max_priority: Array, cursor: Array, size: Array, indices: Any, priorities: Any
    ) -> tuple[tuple[Array, ...], Array]:
        indices, priorities = indices.reshape(-1), priorities.reshape(-1).astype(jnp.float32)
        known = _is_held(layout, cursor, size, indices, layout.window)
        known &= indices // layout.envs % layout.period == 0
        known &= (priorities >= 0) & (priorities < jnp.inf)
        tree = _tree_set(tree, indices % layout.capacity, weight(priorities), known)
        return tree, jnp.max(priorities, initial=max_priority, where=known)

    def set_priorities(state: PrioritisedState, indices: Any, priorities: Any) -> PrioritisedState:
        _check_state(layout, state)
        indices = _indices("set_priorities", indices)
        if not isinstance(priorities, jax.Array):
            priorities = np.asarray(priorities, np.float32)
        if priorities.shape != indices.shape or indices.ndim > 1:
            raise ValueError(
                f"set_priorities: indices and priorities must have the same shape [B], got "
                f"{indices.shape} and {priorities.shape}"
            )
        if _is_checked(layout, priorities):
            given = _host(priorities)
            ok = ((given >= 0) & (given < np.inf)).all()
            _check(ok, "set_priorities: priorities must be 0 or more, and finite: one is not")
        _, cursor, size, tree, max_priority = state
        changed = set_priorities_jit(tree, max_priority, cursor, size, indices, priorities)
        return state._replace(tree=changed[0], max_priority=changed[1])

    replay = _replay(layout, donate, empty, write, choose, drawable)
    return PrioritisedReplay(**replay._asdict(), set_priorities=set_priorities)


def importance_weights(probabilities: Any, size: Any, beta: Any) -> Array:
    """(size * P)**-beta, divided by the largest of the batch: Schaul et al. 2016, section 3.4.

    Args:
      probabilities: [B], of a `Sample`. Where one is 0, nothing was drawn: that weight is 0.
      size: items that could have been drawn, such as `replay.size(state)`. It cancels in the
        division, but for rounding.
      beta: how much of the bias is corrected, from 0 (nothing, all weights are 1) to 1.

    Returns:
      [B] float32, above 0 to 1.
    """
    probabilities, size = jnp.asarray(probabilities), jnp.asarray(size, jnp.float32)
    drawn = probabilities > 0
    scaled = jnp.where(drawn, size * probabilities, 1)
    weights = jnp.where(drawn, scaled ** -jnp.asarray(beta, jnp.float32), 0)
    return weights / jnp.max(weights, initial=jnp.finfo(jnp.float32).tiny)
