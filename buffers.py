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
has shape [T, N, ...]. A buffer of single items is the case N = 1, and a clustered buffer has K such
rings one after the other, [K * T, N, ...]. Every factory is that ring, a way to choose where a
sample starts, and a gather. Shape letters: T rows of the ring (time), N environments, K clusters,
L rows added, B batch drawn, W steps in a window (`sequence_length`).

An *index* names an item for as long as it is held. It is the number of the item's row, counted from
the first row ever written, modulo a bounded multiple of T (so that nothing overflows), times N,
plus the environment. A clustered buffer multiplies that by K and adds the cluster. The slot of an
index is its row modulo T, and arithmetic tells whether that slot has been overwritten (`_is_held`).

Wrong structures, shapes, dtypes and sizes raise when a function is traced. Mistakes that depend on
values (sampling an empty buffer, popping too much, an index that is gone) raise ValueError when the
function is called with concrete arrays. Inside `jax.jit` they do no harm, as each function's text
says; with `debug=True` they are errors under `jax.experimental.checkify` there (not by default: it
costs a compiled function 50 us a call and more).

Papers. Prioritised replay: Schaul et al. 2016, "Prioritized Experience Replay", arXiv 1511.05952.
"""

from __future__ import annotations

import itertools
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
Levels = list[tuple[bool, int, int]]  # see `_levels`
TINY = float(np.finfo(np.float32).tiny)


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
    tree: Array  # [nodes] float32, see `TOP`; tree[t * N + n] is a priority ** exponent
    top: Array  # [nodes] float32, the last levels of the tree
    max_priority: Array  # [] float32, the largest ever set; 0 before the first


class Sample(NamedTuple):
    """What `sample` draws."""

    experience: PyTree  # leaves [B, ...], with `sequence_length` [B, W, ...]
    indices: Array  # [B] int32, for `get`, `update` and `set_priorities`
    probabilities: Array  # [B] float32, of each draw; 0 where there was nothing to draw


class Replay(NamedTuple):
    """The functions of `uniform_replay`, `prioritised_replay` and `clustered_replay`.

    In a buffer of items (`num_envs=None`) a row is one item. With `num_envs=N` a row is one step
    of N environments, and what is said to be [L, ...] below is [L, N, ...].

    init(item) -> state: empty storage for items like `item`, which is one item of one environment.
    add(state, item) -> state: one row, an item or [N, ...].
    add_batch(state, items [L, ...], mask [L] = None) -> state: the rows in order, without those
      where `mask` is False. If there are more of them than fit, the newest are kept.
    sample(state, key, batch_size) -> Sample: draws with replacement; `batch_size` is static. With
      nothing to draw: ValueError; inside jit the contents of some slot, with probability 0.
    add_and_sample(state, items [L, ...], key, batch_size) -> (state, Sample): both in one dispatch.
    get(state, indices) -> experience [*indices.shape, ...] as `sample` gave it. For an index that
      has been overwritten: ValueError; inside jit what is in its slot now.
    update(state, fn, indices=None, *args) -> state: `fn(item, *args) -> item` applied to every
      item, or to those at `indices` [B] with the rows of `args` [B, ...]. The index of a window
      means its first item. `fn` is static: define it once and pass what changes in `args`, because
      a new lambda is compiled anew. For an index that has been overwritten: ValueError; inside jit
      it is ignored. An index that is given twice is written once.
    size(state) -> [] int32: items held, over all environments.
    can_sample(state, min_size=1) -> [] bool: whether there is something to draw, and at least
      `min_size` items are held.
    set_priorities(state, indices [B], priorities [B]) -> state: only of a prioritised buffer, None
      otherwise. Priorities of items, or of the windows that start at them, before the exponent,
      such as abs(TD error) + epsilon. Indices that have been overwritten since they were drawn are
      ignored; an index that is given twice gets one of its priorities. Negative, infinite or NaN:
      ValueError; inside jit that row is ignored.

    New items of a prioritised buffer get the largest priority that was ever set (before the first,
    1). If all priorities are 0 there is nothing to draw. Of states that `jax.vmap` or `jax.pmap`
    stacked, `size` and `can_sample` give an answer each; the others are called under `jax.vmap`.
    """

    init: Callable[[PyTree], State]
    add: Callable[[State, PyTree], State]
    add_batch: Callable[..., State]
    sample: Callable[[State, Array, int], Sample]
    add_and_sample: Callable[[State, PyTree, Array, int], tuple[State, Sample]]
    get: Callable[[State, Any], PyTree]
    update: Callable[..., State]
    size: Callable[[State], Array]
    can_sample: Callable[..., Array]
    core: Core  # for `clustered_replay`
    set_priorities: Any = None


class CircularBuffer(NamedTuple):
    """The functions of `circular_buffer`.

    init(item) -> state, add(state, item) -> state and add_batch(state, items [L, ...],
      mask [L] = None) -> state: as in `Replay`, of items.
    pop(state, n) -> (state, items [n, ...]): the n oldest, oldest first; `n` is static. With fewer
      than n held: ValueError; inside jit all that are held go, and the rows after them are old
      contents of the storage.
    get(state, indices) -> items [*indices.shape, ...]: 0 is the oldest, size - 1 the newest.
      Outside that: ValueError; inside jit some slot's contents.
    update(state, fn, indices=None, *args) -> state: as in `Replay`, of these indices.
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


def _indices(name: str, indices: Any) -> Any:
    """Indices as an array of int32: lists and Python ints are taken, floats are not."""
    array = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: indices must be integers, got {array.dtype}")
    if isinstance(array, np.ndarray):
        array = np.clip(array, -1, 2**31 - 1)  # of which neither is an index
    return array if array.dtype == np.int32 else array.astype(np.int32)


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int | np.integer):
        raise TypeError(
            f"{name} must be a Python int, got {value!r}: it sets the shape of an array, so it "
            "cannot be a traced value (under jit, mark it static)"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _check_state(core: Core, state: State) -> None:
    """Raises unless the state is one that this buffer's `init` made, and not several, stacked."""
    if state.size.ndim > core.empty().size.ndim:
        raise ValueError("these are several states, stacked: call the function under jax.vmap")
    expected = core.layout.rows * core.layout.clusters, core.layout.envs
    for leaf in jax.tree.leaves(state.storage):
        if leaf.shape[:2] != expected:
            given = f"[rows, environments] {leaf.shape[:2]} and not {expected}"
            raise ValueError(f"the state was made by another buffer's init: it holds {given}")
        if any(jax.typeof(leaf).sharding.spec):
            axes = "axis_types=(jax.sharding.AxisType.Auto,), one for each axis"
            raise ValueError(
                f"the storage is sharded over Explicit axes: make the mesh with {axes}"
            )


def _check_items(name: str, storage: PyTree, items: PyTree, lead: tuple, axes: str) -> None:
    """Raises unless every leaf of `items` is `lead` (named `axes`) + the shape given to init."""
    given, wanted = jax.tree.structure(items), jax.tree.structure(storage)
    if given != wanted:  # type: ignore[operator]
        raise ValueError(f"{name}: items have structure {given}, expected {wanted} as in init")
    slots, _ = jax.tree_util.tree_flatten_with_path(storage)
    for (path, slot), leaf in zip(slots, jax.tree.leaves(items), strict=True):
        where = f"{name}: leaf {jax.tree_util.keystr(path) or '(the item itself)'} has"
        shape, dtype = lead + slot.shape[2:], jnp.result_type(leaf)
        if jnp.shape(leaf) != shape:
            hint = "" if "update" in name else ": add takes one row, add_batch several"
            raise ValueError(
                f"{where} shape {jnp.shape(leaf)}, expected {shape}, which is ({axes}item){hint}"
            )
        is_literal = jax.typeof(leaf).weak_type  # a Python scalar takes the dtype of its slot
        if dtype != slot.dtype and not (is_literal and jnp.result_type(slot, leaf) == slot.dtype):
            raise TypeError(
                f"{where} dtype {dtype}, expected {slot.dtype} as given to init: convert it with "
                f".astype({str(slot.dtype)!r}), or give init an item of dtype {dtype}"
            )


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
    clusters: int = 1  # K, rings of the sizes above

    @property
    def capacity(self) -> int:
        """Items that fit, of one cluster: T * N."""
        return self.rows * self.envs

    @property
    def modulus(self) -> int:
        """The cursor counts modulo this: a multiple of T such that an index stays below 2**30."""
        return 2**30 // (self.capacity * self.clusters) * self.rows


def _layout(
    max_size: Any, num_envs: Any = None, length: Any = None, period: Any = 1, debug: bool = False
) -> Layout:
    max_size = _positive("max_size", max_size)
    envs = 1 if num_envs is None else _positive("num_envs", num_envs)
    window = 1 if length is None else _positive("sequence_length", length)
    unit = envs * _positive("period", period)
    least = -(-window // period) * unit  # so that a window fits
    sizes = {max(max_size // unit * unit, least), max(-(-max_size // unit) * unit, least)}
    if max_size not in sizes:
        raise ValueError(
            f"max_size must be a multiple of num_envs * period = {envs} * {period}, and hold "
            f"{window} steps of each environment, got {max_size}: use "
            + " or ".join(str(size) for size in sorted(sizes))
        )
    if max_size > 2**29:
        raise ValueError(f"max_size must be at most 2**29, which int32 can index, got {max_size}")
    streams, sequences = num_envs is not None, length is not None
    return Layout(max_size // envs, envs, window, period, streams, sequences, debug)


def _rows(layout: Layout, storage: PyTree, items: PyTree, one: bool) -> PyTree:
    """Rows [L, N, ...] in the storage's dtypes: what `add` (if `one`) or `add_batch` is given."""
    shape = next((jnp.shape(x) for x in jax.tree.leaves(items)), ())
    length = shape[0] if shape and not one else 1
    name, lead, axes = ("add", (), "") if one else ("add_batch", (length,), "rows, ")
    if layout.streams:
        lead, axes = (*lead, layout.envs), axes + "num_envs, "
    _check_items(name, storage, items, lead, axes)
    return jax.tree.map(
        lambda x, s: jnp.asarray(x, s.dtype).reshape(length, *s.shape[1:]), items, storage
    )


def _advance(layout: Layout, ring: State, rows: PyTree, mask: Any = None) -> tuple[State, Array]:
    """The state after `rows` [L, N, ...], but for its storage, and the slot [L] of each row.

    Rows that are left out, their `mask` [L] being False, or that newer ones of the same batch would
    overwrite, get slots past the end, all different, which `_put` drops.
    """
    length = len(jax.tree.leaves(rows)[0])
    rank: Any = np.arange(length, dtype=np.int32)
    count: Any = np.int32(length)
    if mask is None:
        keep = rank >= count - layout.rows
    else:
        rank, count = jnp.cumsum(mask, dtype=jnp.int32) - 1, jnp.sum(mask, dtype=jnp.int32)
        keep = mask & (rank >= count - layout.rows)
    past_end = layout.rows * layout.clusters + np.arange(length, dtype=np.int32)
    slot = (ring.cursor + rank).astype(jnp.uint32) % layout.rows  # unsigned: see `_position`
    slot = jnp.where(keep, slot.astype(jnp.int32), past_end)
    cursor = (ring.cursor + count) % layout.modulus
    return ring._replace(cursor=cursor, size=jnp.minimum(ring.size + count, layout.rows)), slot


def _put(storage: PyTree, slot: Array, rows: PyTree, one: bool) -> PyTree:
    """Writes row [L, N, ...] to `slot` [L]; if `one`, L is 1 and the slot not past the end."""

    def put(s: Array, x: Array) -> Array:
        if one:
            x = jnp.where(True, x, s[:1])  # x, on the mesh of s, which Explicit axes ask for
            return jax.lax.dynamic_update_slice_in_dim(s, x, slot[0], 0)
        # A scatter and not dynamic_update_slice: XLA does it in place for a block that wraps, too.
        # Of windows [1, N, ...]: XLA copies the rows first where `s.at[slot]` has it add that axis.
        windows = jax.lax.ScatterDimensionNumbers(tuple(range(1, s.ndim + 1)), (), (0,))
        x, at = jnp.expand_dims(x, 1), jnp.expand_dims(slot, 1)
        return jax.lax.scatter(s, at, x, windows, unique_indices=True, mode="drop")

    return jax.tree.map(put, storage, rows)


def _once(i: Array) -> Array:
    """`i`, uint32 below 2**31 - 1, which XLA computes once and not anew for each of its uses."""
    return jax.lax.rem(i, np.uint32(2**31 - 1))


def _take(x: Array, i: Array) -> Array:
    """x[i] for `i` [B, ...] that are all in range."""
    item = x.shape[1:]
    axes = jax.lax.GatherDimensionNumbers(tuple(range(i.ndim, i.ndim + len(item))), (0,), (0,))

    def gather(x: Array, i: Array) -> Array:
        at = jnp.expand_dims(i, i.ndim)
        return jax.lax.gather(x, at, axes, (1, *item), mode="promise_in_bounds")

    def in_one_thread(x: Array, i: Array) -> Array:
        i, half = _once(i.astype(jnp.uint32)).astype(jnp.int32), len(i) // 2
        zero = (i.ravel()[0] < 0).astype(jnp.int32)  # 0, which XLA does not know
        rows = jnp.broadcast_to(zero.astype(x.dtype), i.shape + item)
        rows = jax.lax.dynamic_update_slice_in_dim(rows, gather(x, i[:half]), zero, 0)
        return jax.lax.dynamic_update_slice_in_dim(rows, gather(x, i[half:]), zero + half, 0)

    # To wake a second thread takes 10 to 60 us, and XLA on a CPU gives it half of a gather from
    # more than 512 KiB, however little is read. What is written to a part of an array it does not.
    i, large, is_key = i.astype(jnp.int32), 2**19, jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    is_large = x.nbytes >= large > i.size * x.nbytes // len(x) and not is_key
    if i.ndim == 0 or len(i) < 2 or not is_large:
        return gather(x, i)
    return jax.lax.platform_dependent(x, i, cpu=in_one_thread, default=gather)


def _position(layout: Layout, indices: Array) -> Array:
    """Where the item of each index stands in storage [T * N, ...]."""
    # Unsigned, here and in draws: JAX's remainder of what may be negative is a dozen operations,
    # which XLA repeats for each leaf.
    indices = indices.astype(jnp.uint32)
    cluster, index = indices % layout.clusters, indices // layout.clusters
    return (cluster * layout.capacity + index % layout.capacity).astype(jnp.int32)


def _is_held(layout: Layout, cursor: Array, size: Array, index: Array, window: int = 1) -> Array:
    """Whether the `window` rows from each index of one ring are stored."""
    age = (cursor - index // layout.envs) % layout.modulus  # 1: the newest row
    exists = (index >= 0) & (index < layout.modulus * layout.envs)
    return exists & (age >= window) & (age <= size)


def _starts(layout: Layout, cursor: Array, size: Array) -> tuple[Array, Array]:
    """At how many rows a window may start, and the count of the first.

    The rows held are counted cursor - size, ..., cursor - 1; here the count may be negative. A
    window starts at a multiple of `period` and ends at a row held, not across the write position.
    """
    skipped = -(cursor - size) % layout.period
    starts = (size - skipped - layout.window + layout.period) // layout.period
    return jnp.maximum(starts, 0), cursor - size + skipped


def _scaled(bits: Array, bound: Array) -> Array:
    """[B] uint32 in 0 to bound - 1 (0 if bound is 0): floor(bound * r / 2**64).

    `r`, `bits` [2, B] uint32, are 64 random bits each, so that no number is favoured by more than
    bound / 2**64. (jax.random.randint takes four times as long, called from Python on a CPU.)
    """
    n = bound.astype(jnp.uint32)  # below 2**30

    def upper(x: Array) -> Array:
        """The upper 32 bits of x * n, by products of 16 bits."""
        low, high = (x & 0xFFFF) * (n & 0xFFFF), (x >> 16) * (n & 0xFFFF)
        middle = (x & 0xFFFF) * (n >> 16) + (low >> 16) + (high & 0xFFFF)
        return (x >> 16) * (n >> 16) + (high >> 16) + (middle >> 16)

    added = upper(bits[1])
    return upper(bits[0]) + (bits[0] * n + added < added).astype(jnp.uint32)  # with its carry


def _uniform(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
    """Indices [B] of windows, each as likely as the others, and their probabilities [B]."""
    starts, first = _starts(layout, state.cursor, state.size)
    total = starts * layout.envs
    draw = _scaled(jax.random.bits(key, (2, batch_size), jnp.uint32), total)
    first = (first + layout.modulus).astype(jnp.uint32)
    row = (first + layout.period * (draw // layout.envs)) % layout.modulus
    index = (row * layout.envs + draw % layout.envs).astype(jnp.int32)
    count = total.astype(jnp.float32)
    probability = jnp.where(count > 0, 1 / jnp.maximum(count, 1), 0)
    return index, jnp.broadcast_to(probability, index.shape)


# ------------------------------------------------------------------- the functions of every buffer


class Core(NamedTuple):
    """What makes one kind of buffer. A `state` here is one whose storage is left out."""

    layout: Layout
    empty: Callable[[], State] = lambda: RingState((), jnp.int32(0), jnp.int32(0))
    # (layout, state, rows [L, N, ...], mask [L] or None) -> state, slots [L] for `_put`
    advance: Callable[..., tuple[State, Array]] = _advance
    # (layout, state, key, B) -> indices [B], probabilities [B]
    choose: Callable[..., tuple[Array, Array]] = _uniform
    # (layout, state) -> whether there is anything to draw
    drawable: Callable[..., Array] = lambda layout, s: _starts(layout, s.cursor, s.size)[0] > 0
    # (layout, state, indices [B], priorities [B]) -> state
    set_priorities: Callable[..., State] | None = None
    # (layout, state, given) -> the indices that are meant by those that the user gives
    meant: Callable[..., Array] = lambda layout, state, given: given
    gone: str = "an index is not in the buffer (any more)"


def _init(core: Core, item: PyTree) -> State:
    """Storage for items like `item`, in which Python scalars have JAX's default dtypes."""
    if not jax.tree.leaves(item):
        raise ValueError(f"init: the item has no arrays in it, got {item!r}")
    lead = (core.layout.rows * core.layout.clusters, core.layout.envs)
    storage = jax.tree.map(lambda x: jnp.zeros(lead + jnp.shape(x), jnp.result_type(x)), item)
    return core.empty()._replace(storage=storage)


def _write(core: Core, state: State, items: PyTree, mask: Any = None, one: bool = False) -> State:
    """What `add`, with `one`, and `add_batch` do."""
    _check_state(core, state)
    rows = _rows(core.layout, state.storage, items, one)
    length = len(jax.tree.leaves(rows)[0])
    given = f"{getattr(mask, 'dtype', type(mask).__name__)}{getattr(mask, 'shape', '')}"
    if mask is not None and given != f"bool({length},)":
        raise ValueError(f"add_batch: mask is {given}, expected bool and ({length},): a flag a row")
    new, slot = core.advance(core.layout, state._replace(storage=()), rows, mask)
    return new._replace(storage=_put(state.storage, slot, rows, mask is None and len(slot) == 1))


def _draw(core: Core, state: State, key: Array, batch_size: int) -> Sample:
    _check_state(core, state)
    counters = state._replace(storage=())
    indices, probabilities = core.choose(core.layout, counters, key, batch_size)
    return Sample(_gather(core.layout, state.storage, indices), indices, probabilities)


def _write_and_draw(core: Core, state: State, items: PyTree, key: Array, batch_size: int) -> Any:
    state = _write(core, state, items)
    # The key, always the first of two, waits for all writes: else XLA wakes a thread to draw bits.
    ends = jnp.concatenate([(x := s.ravel())[:1] != x[-1:] for s in jax.tree.leaves(state)])
    key = jnp.stack([key, key])[(ends.any() & (state.size.ravel()[0] < 0)).astype(jnp.int32)]
    return state, _draw(core, state, key, batch_size)


def _gather(layout: Layout, storage: PyTree, indices: Array) -> PyTree:
    """The item at each index; in a buffer of sequences the W items from it, on an axis after."""
    if layout.sequences:
        steps = layout.envs * layout.clusters * jnp.arange(layout.window)
        indices = jnp.expand_dims(indices, -1) + jnp.expand_dims(steps, range(indices.ndim))
    position = _position(layout, indices)
    return jax.tree.map(lambda s: _take(jax.lax.collapse(s, 0, 2), position), storage)


def _get(core: Core, state: State, indices: Array) -> PyTree:
    _check_state(core, state)
    return _gather(core.layout, state.storage, core.meant(core.layout, state, indices))


def _is_stored(core: Core, state: State, indices: Array, window: int = 1) -> Array:
    """Whether the `window` rows from each of the given indices are stored."""
    _check_state(core, state)
    indices = core.meant(core.layout, state, indices)
    cluster, index = indices % core.layout.clusters, indices // core.layout.clusters
    cursor, size = state.cursor, state.size
    if cursor.ndim:
        cursor, size = cursor[cluster], size[cluster]
    return _is_held(core.layout, cursor, size, index, window)


def _update(core: Core, state: State, fn: Callable, indices: Any, args: tuple) -> State:
    """`fn` on every item, or on those at `indices` [B], which must be held to be written."""
    _check_state(core, state)
    layout, name = core.layout, "update: fn's result"
    items = jax.tree.map(lambda s: jax.lax.collapse(s, 0, 2), state.storage)
    if indices is None:
        if args:
            raise TypeError("update: args go with indices, a row for each; got no indices")
        new = jax.vmap(fn)(items)
        _check_items(name, state.storage, new, (layout.capacity * layout.clusters,), "max_size, ")
        put = lambda s, x: jnp.asarray(x, s.dtype).reshape(s.shape)  # noqa: E731
    else:
        if indices.ndim != 1:
            raise ValueError(f"update: indices must have shape [B], got {indices.shape}")
        position = _position(layout, core.meant(layout, state, indices))
        new = jax.vmap(fn)(jax.tree.map(lambda x: _take(x, position), items), *args)
        _check_items(name, state.storage, new, position.shape, "indices, ")
        held, env = _is_stored(core, state, indices), position % layout.envs
        slot = jnp.where(held, position // layout.envs, layout.rows * layout.clusters)
        put = lambda s, x: s.at[slot, env].set(jnp.asarray(x, s.dtype), mode="drop")  # noqa: E731
    return state._replace(storage=jax.tree.map(put, state.storage, new))


def _set_priorities(core: Core, state: State, indices: Array, priorities: Array) -> State:
    _check_state(core, state)
    indices, priorities = indices.reshape(-1), priorities.reshape(-1).astype(jnp.float32)
    return core.set_priorities(core.layout, state, indices, priorities)  # type: ignore[misc]


def _replay(core: Core, donate: bool) -> Replay:
    """The functions above with this core, jitted. Called from Python they check values first."""
    layout = core.layout

    def jit(fn: Callable, *static: str, changes: bool = False, **arguments: Any) -> Any:
        donated = "state" if changes and donate else None
        fn = partial(fn, core, **arguments)
        return jax.jit(fn, static_argnames=static, donate_argnames=donated)

    write, draw = jit(_write, changes=True), jit(_draw, "batch_size")
    write_and_draw = jit(_write_and_draw, "batch_size", changes=True)
    get_in_jit, update_in_jit = jit(_get), jit(_update, "fn", changes=True)
    set_in_jit = jit(_set_priorities, changes=True)
    clusters = tuple(range(-core.empty().size.ndim, 0))  # the axis K, if there is one

    @jax.jit
    def size(state: State) -> Array:
        return state.size.sum(axis=clusters, dtype=jnp.int32) * layout.envs

    @jax.jit
    def can_sample(state: State, min_size: Any = 1) -> Array:
        return core.drawable(layout, state).any(axis=clusters) & (size(state) >= min_size)

    @jax.jit
    def after(state: State, items: PyTree) -> State:
        return _write(core, state, items)._replace(storage=())

    @partial(jax.jit, static_argnames="window")
    def are_stored(state: State, indices: Array, window: int) -> Array:
        return _is_stored(core, state, indices, window).all()

    def check_drawable(name: str, state: State, items: PyTree = None) -> None:
        known, at = (state.top, -4) if core.set_priorities else (state.size, 0)
        enough = TINY if core.set_priorities else layout.window + layout.period - 1
        if isinstance(known, jax.core.Tracer):
            if not layout.debug:
                return
        elif np.asarray(known).item(at) >= enough:  # nearly always, and faster than any call
            return
        _check_state(core, state)
        state = state if items is None else after(state, items)
        wanted = f"{layout.window} steps from a multiple of {layout.period}, of a priority above 0"
        message = f"{name}: nothing to draw, {{size}} items held; a draw takes {wanted}"
        _check(can_sample(state), message, size=size(state))

    def check_indices(name: str, state: State, indices: Any, window: int) -> None:
        if _is_checked(layout, state.size, indices):
            _check(are_stored(state, indices, window), f"{name}: {core.gone}", size=state.size)

    def sample(state: State, key: Array, batch_size: int) -> Sample:
        check_drawable("sample", state)
        return draw(state, key, _positive("batch_size", batch_size))

    def add_and_sample(state: State, items: PyTree, key: Array, batch_size: int) -> Any:
        check_drawable("add_and_sample", state, items)
        return write_and_draw(state, items, key, _positive("batch_size", batch_size))

    def get(state: State, indices: Any) -> PyTree:
        indices = _indices("get", indices)
        check_indices("get", state, indices, layout.window)
        return get_in_jit(state, indices)

    def update(state: State, fn: Callable, indices: Any = None, *args: PyTree) -> State:
        if indices is not None:
            indices = jnp.atleast_1d(_indices("update", indices))
            check_indices("update", state, indices, 1)
        return update_in_jit(state, fn, indices, args)

    def set_priorities(state: State, indices: Any, priorities: Any) -> State:
        indices = _indices("set_priorities", indices)
        if not isinstance(priorities, jax.Array):
            priorities = np.asarray(priorities, np.float32)
        if priorities.shape != indices.shape or indices.ndim > 1:
            shapes = f"got {indices.shape} and {priorities.shape}"
            raise ValueError(f"set_priorities: indices and priorities must both be [B], {shapes}")
        if _is_checked(layout, priorities):
            given = (jnp if layout.debug else np).asarray(priorities)
            ok = ((given >= 0) & (given < np.inf)).all()
            _check(ok, "set_priorities: priorities must be 0 or more, and finite: one is not")
        # Without the storage, which does not change: to pass an array costs a microsecond.
        new = set_in_jit(state._replace(storage=()), indices, priorities)
        return new._replace(storage=state.storage)

    put = set_priorities if core.set_priorities else None
    init, add = jit(_init), jit(_write, changes=True, one=True)
    return Replay(
        init, add, write, sample, add_and_sample, get, update, size, can_sample, core, put
    )


# ------------------------------------------------------------------------------- circular, uniform


def circular_buffer(max_size: int, *, donate: bool = True, debug: bool = False) -> CircularBuffer:
    """A ring of the last `max_size` items; with `can_add` and `can_pop` a FIFO queue.

    Args:
      max_size: how many items are held; then each new one overwrites the oldest.
      donate, debug: as in `uniform_replay`.

    Raises TypeError or ValueError if `max_size` is not an int from 1 to 2**29.
    """
    layout = _layout(max_size, debug=debug)

    def meant(layout: Layout, state: RingState, i: Array) -> Array:
        """The index of the i-th oldest item, or -1."""
        held = (i >= 0) & (i < state.size)
        return jnp.where(held, (state.cursor - state.size + i) % layout.modulus, -1)

    gone = "indices must be from 0 (oldest) to size - 1, and size is {size}"
    core = Core(layout, meant=meant, gone=gone)
    ring = _replay(core, donate)  # of which a queue has what does not draw

    @partial(jax.jit, static_argnames="n", donate_argnames="state" if donate else None)
    def pop_in_jit(state: RingState, n: int) -> tuple[RingState, PyTree]:
        items = _get(core, state, jnp.arange(n))
        return state._replace(size=jnp.maximum(state.size - n, 0)), items

    def pop(state: RingState, n: int) -> tuple[RingState, PyTree]:
        if _positive("n", n) > max_size:
            raise ValueError(f"pop: n is {n}, but at most max_size = {max_size} items are held")
        if _is_checked(layout, state.size):
            ok = can_pop(state, n).all()
            _check(ok, "pop: {n} items asked for, but {size} held", n=n, size=state.size)
        return pop_in_jit(state, n)

    can_add = jax.jit(lambda state, n: state.size + n <= max_size)
    can_pop = jax.jit(lambda state, n: state.size >= n)
    return CircularBuffer(
        ring.init, ring.add, ring.add_batch, pop, ring.get, ring.update, ring.size, can_add, can_pop
    )


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
      num_envs: N, `add` then takes steps of N environments [N, ...]. None: single items.
      sequence_length: W, `sample` then gives windows [B, W, ...] of W consecutive steps of one
        environment. They never cross the write position, but they do cross episode ends: store
        what tells. None: `sample` gives items [B, ...].
      period: windows start at steps whose count since the first is a multiple of it;
        `period=sequence_length` gives windows that do not overlap.
      donate: whether functions that return a state use up the one they were given, so that they
        work in place. False keeps old states alive, at the cost of copying the storage each call.
      debug: whether mistakes in values, inside jit, are errors under checkify.

    Raises TypeError or ValueError for sizes that are not ints of at least 1, and for a `max_size`
    over 2**29, too small for a window, or not a multiple of num_envs * period.
    """
    return _replay(Core(_layout(max_size, num_envs, sequence_length, period, debug)), donate)


# ---------------------------------------------------------------------------------------- sum tree
#
# `tree` has a weight for each position, and after them further levels: node i of the next level is
# the sum of nodes 4 i to 4 i + 3, recomputed from them when one changes: a difference added to it
# would leave a rounding error behind for good. Levels are padded with zeros to a multiple of 4: 5.4
# bytes a position in all. The levels of at most TOP nodes are in `top`, and are summed anew as a
# whole; the last one has 4.
TOP = 256
# With 24 bits a float32 tells the nodes of this many levels (2**14) apart, and not those of many
# more: a single number would favour some of ten million items and miss others.
LEVELS_PER_DRAW = 7


def _levels(positions: int) -> tuple[Levels, list[int]]:
    """Of each level, is it in `top`, its first group of 4, its groups; groups of tree and top."""
    levels: Levels = []
    start, nodes = [0, 0], positions
    while len(levels) < 2 or nodes > 1:
        is_top, groups = bool(levels) and nodes <= TOP, -(-nodes // 4)
        levels.append((is_top, start[is_top], groups))
        start[is_top] += groups
        nodes = groups
    return levels, start


def _sum(groups: Array) -> Array:
    """[B], the sum of each of `groups` [B, 4]."""
    return groups[:, 0] + groups[:, 1] + (groups[:, 2] + groups[:, 3])


def _tree_set(state: State, levels: Levels, positions: Array, weights: Array, where: Array) -> Any:
    """The state with `weights` [B] at `positions` [B], in the rows where `where` [B] is True."""
    if len(positions) == 1:  # XLA makes slices of it, reads and writes them at once and copies all
        positions, weights, where = (jnp.repeat(x, 2) for x in (positions, weights, where))
    tree = state.tree.at[jnp.where(where, positions, state.tree.size)].set(weights, mode="drop")
    node = jnp.where(where, positions, 0).astype(jnp.uint32)  # the sums above 0 stay right
    top: list[Array] = []
    for (_, start, groups), (is_top, above, padded) in itertools.pairwise(levels):
        if is_top:
            below = top[-1] if top else tree[4 * start : 4 * (start + groups)]
            top.append(jnp.pad(_sum(below.reshape(-1, 4)), (0, 4 * padded - groups)))
        else:
            node = _once(node // 4)
            sums = _sum(_take(tree.reshape(-1, 4), start + node))
            tree = tree.at[4 * above + node].set(sums, mode="promise_in_bounds")
    tree, last = jax.lax.optimization_barrier((tree, jnp.concatenate(top)))  # else XLA copies it
    return state._replace(tree=tree, top=last)


def _tree_draw(tree: Array, top: Array, levels: Levels, key: Array, count: int) -> Any:
    """Positions [B] uint32 in proportion to their weights, one from each of B equal shares.

    Stratified as in Schaul et al. 2016, section 3.3. With their probabilities; both are 0 if no
    weight is above 0.
    """
    uniform = jax.random.uniform(key, (-(-len(levels) // LEVELS_PER_DRAW), count))
    node = jnp.zeros(count, jnp.uint32)
    fraction = (jnp.arange(count, dtype=jnp.float32) + uniform[0]) / count  # of the node's weight
    for i, (is_top, start, _) in enumerate(reversed(levels)):
        nodes = top if is_top else tree
        group = _take(nodes.reshape(-1, 4), start + node) if i else jnp.tile(top[-4:], (count, 1))
        if i and i % LEVELS_PER_DRAW == 0:
            fraction = uniform[i // LEVELS_PER_DRAW]
        # To the left or the right pair, then to one of it. Never to the right if nothing has a
        # weight there: so what has none is never drawn, in whichever way the sums were rounded.
        a, b, c, d = group.T
        target = fraction * _sum(group)
        is_right = (target >= a + b) & (c + d > 0)
        target = jnp.where(is_right, target - (a + b), target)
        left, right = jnp.where(is_right, c, a), jnp.where(is_right, d, b)
        is_second = (target >= left) & (right > 0)
        target = jnp.where(is_second, target - left, target)
        fraction = target / jnp.where(is_second, right, left)
        node = 4 * node + 2 * is_right.astype(jnp.uint32) + is_second.astype(jnp.uint32)
        # Otherwise XLA computes a level once more for each level below it.
        node, fraction = jax.lax.optimization_barrier((_once(node), fraction))
    total = top[-4:].sum()
    # A division is not repeated, and the positions depend on it, so that nothing is written before
    # the tree is read: XLA would copy it in a loop that draws and sets.
    probabilities = _take(tree, node) / jnp.where(total > 0, total, 1)
    return jnp.where(probabilities >= 0, node, 0), probabilities


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
) -> Replay:
    """A ring of the last `max_size` items, drawn from in proportion to priority ** exponent.

    Schaul et al. 2016, section 3.3, equation 1, with stratified draws; `importance_weights` undoes
    the bias. An item of priority 0 is never drawn (but with exponent 0 all are alike).

    Args:
      max_size: items held, over all environments; then each new row overwrites the oldest.
      priority_exponent: alpha, 0 or more; 0 is uniform replay.
      num_envs, sequence_length, period, donate, debug: as in `uniform_replay`. A window has one
        priority, that of its first item.

    Raises TypeError and ValueError as `uniform_replay`, and if the exponent is below 0 or infinite.
    """
    layout = _layout(max_size, num_envs, sequence_length, period, debug)
    if not 0 <= priority_exponent < np.inf:
        raise ValueError(f"priority_exponent must be 0 or more, got {priority_exponent}")
    # Whatever the priorities are, no sum overflows, nor does 1 / sum underflow.
    largest = np.finfo(np.float32).max / (8 * layout.capacity)
    levels, sizes = _levels(layout.capacity)

    def weight(priorities: Array) -> Array:
        return jnp.minimum(priorities**priority_exponent, largest)

    def empty() -> PrioritisedState:
        tree, top = (jnp.zeros(4 * groups, jnp.float32) for groups in sizes)
        return PrioritisedState((), jnp.int32(0), jnp.int32(0), tree, top, jnp.float32(0))

    def advance(layout: Layout, state: State, rows: PyTree, mask: Any = None) -> Any:
        """The ring's, and the weights of windows that can now be drawn, or cannot any more."""
        new, slots = _advance(layout, state, rows, mask)
        length = len(jax.tree.leaves(rows)[0])
        count = length if mask is None else jnp.sum(mask, dtype=jnp.int32)
        # Row k counts from the first of these rows. The windows that one of them completes start
        # up to W - 1 rows before it.
        k = jnp.arange(1 - layout.window, length)
        changed = (k >= -state.size) & (k >= count - layout.rows) & (k < count)
        row = state.cursor + k
        is_start = (k <= count - layout.window) & (row % layout.period == 0)
        new_weight = weight(jnp.where(state.max_priority > 0, state.max_priority, 1))
        positions = row[:, None] % layout.rows * layout.envs + jnp.arange(layout.envs)[None]
        each = partial(jnp.repeat, repeats=layout.envs)
        weights = each(jnp.where(is_start, new_weight, 0))
        return _tree_set(new, levels, positions.reshape(-1), weights, each(changed)), slots

    def choose(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
        positions, chances = _tree_draw(state.tree, state.top, levels, key, batch_size)
        newest = (state.cursor + layout.modulus - 1).astype(jnp.uint32)
        row = (newest - (newest - positions // layout.envs) % layout.rows) % layout.modulus
        return (row * layout.envs + positions % layout.envs).astype(jnp.int32), chances

    def set_priorities(layout: Layout, state: State, indices: Array, priorities: Array) -> State:
        known = _is_held(layout, state.cursor, state.size, indices, layout.window)
        known &= indices // layout.envs % layout.period == 0
        known &= (priorities >= 0) & (priorities < jnp.inf)
        largest_known = jnp.max(jnp.where(known, priorities, 0), initial=0)
        state = _tree_set(state, levels, indices % layout.capacity, weight(priorities), known)
        return state._replace(max_priority=jnp.maximum(state.max_priority, largest_known))

    drawable = lambda layout, state: state.top[..., -4:].sum(axis=-1) > 0  # noqa: E731
    return _replay(Core(layout, empty, advance, choose, drawable, set_priorities), donate)


def importance_weights(probabilities: Any, size: Any, beta: Any) -> Array:
    """(size * P)**-beta, divided by the largest of the batch: Schaul et al. 2016, section 3.4.

    Args:
      probabilities: [B], of a `Sample`. Where one is 0, nothing was drawn: that weight is 0.
      size: items that could have been drawn, such as `replay.size(state)`. The division cancels it.
      beta: how much of the bias is corrected, from 0 (nothing, all weights are 1) to 1.

    Returns [B] float32, above 0 to 1.
    """
    probabilities, size = jnp.asarray(probabilities), jnp.asarray(size, jnp.float32)
    drawn = probabilities > 0
    scaled = jnp.where(drawn, size * probabilities, 1)
    weights = jnp.where(drawn, scaled ** -jnp.asarray(beta, jnp.float32), 0)
    return weights / jnp.max(weights, initial=TINY)


# --------------------------------------------------------------------------------------- clustered


def clustered_replay(
    num_clusters: int,
    cluster_buffer: Replay,
    clustering_fn: Callable[[PyTree], Any],
    distribution_power: float = 0.0,
    *,
    donate: bool = True,
    debug: bool = False,
) -> Replay:
    """A replay buffer for each cluster; a draw is of a cluster, then of an item in it.

    Rare kinds of items, such as trajectories of a high return, stay until new ones replace them.

    Args:
      num_clusters: K.
      cluster_buffer: a `uniform_replay` or a `prioritised_replay`, with streams or without, of the
        size of one cluster; its donate and debug do not count. Each has a max_priority of its own.
      clustering_fn: gives the cluster, an integer from 0 to K - 1, of what `add` takes: an item, or
        a step of N environments. One that is outside of that counts as the nearest.
      distribution_power: a cluster is drawn in proportion to the number of items that a draw may
        start at, to this power: 0 draws all clusters alike that have any, 1 as one uniform buffer.
      donate, debug: as in `uniform_replay`.

    Returns the functions of `cluster_buffer`. The leaves of their state are the inner one's with an
    axis K in front, and the storage [K * T, N, ...].

    Raises TypeError or ValueError if `num_clusters` is not an int of at least 1, `cluster_buffer`
    is not one of those, or all clusters together hold more than 2**29 items.
    """
    clusters = _positive("num_clusters", num_clusters)
    inner = getattr(cluster_buffer, "core", None)
    if inner is None or inner.empty().size.ndim:
        given = type(cluster_buffer).__name__
        raise TypeError(f"cluster_buffer must be a uniform or a prioritised replay, got {given}")
    layout = inner.layout._replace(clusters=clusters, debug=debug)
    if layout.capacity * clusters > 2**29:
        raise ValueError(f"{clusters} times {layout.capacity} items are more than 2**29")

    def clusters_of(items: PyTree) -> Array:
        """[L]"""
        cluster = jnp.asarray(jax.vmap(clustering_fn)(items))
        if cluster.ndim != 1 or not jnp.issubdtype(cluster.dtype, jnp.integer):
            raise TypeError(f"clustering_fn must return one integer, got {jax.typeof(cluster)}")
        return jnp.clip(cluster, 0, clusters - 1)

    def empty() -> State:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (clusters, *x.shape)), inner.empty())

    def advance(layout: Layout, state: State, rows: PyTree, mask: Any = None) -> Any:
        items = rows if layout.streams else jax.tree.map(lambda x: x[:, 0], rows)
        member = clusters_of(items)[None] == jnp.arange(clusters)[:, None]  # [K, L]
        member = member if mask is None else member & mask[None]
        new, slots = jax.vmap(lambda s, m: inner.advance(layout, s, rows, m))(state, member)
        first = layout.rows * jnp.arange(clusters)[:, None]
        return new, jnp.min(jnp.where(slots < layout.rows, first + slots, slots), axis=0)

    def choose(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
        cluster_key, key = jax.random.split(key)
        starts, _ = _starts(layout, state.cursor, state.size)
        weights = starts.astype(jnp.float32) ** distribution_power
        weights = jnp.where(inner.drawable(layout, state), weights, 0)
        cluster = jax.random.choice(cluster_key, clusters, (batch_size,), p=weights)
        # From every cluster a batch, of which each draw takes one: cheap beside the gather.
        indices, probabilities = jax.vmap(lambda s: inner.choose(layout, s, key, batch_size))(state)
        share = weights / jnp.maximum(weights.sum(), TINY)
        b = jnp.arange(batch_size)
        return indices[cluster, b] * clusters + cluster, share[cluster] * probabilities[cluster, b]

    def set_priorities(layout: Layout, state: State, indices: Array, priorities: Array) -> State:
        cluster, index = indices % clusters, indices // clusters
        mine = jnp.where(cluster[None] == jnp.arange(clusters)[:, None], index[None], -1)  # [K, B]
        return jax.vmap(lambda s, i: inner.set_priorities(layout, s, i, priorities))(state, mine)

    weigh = set_priorities if inner.set_priorities else None
    return _replay(Core(layout, empty, advance, choose, inner.drawable, weigh), donate)


# ------------------------------------------------------------------------------------------ n-step


def n_step_transition(window: Any, gamma: float, mask: Any = None) -> tuple[Any, Array, Array]:
    """Folds windows of consecutive steps into transitions of n steps, fewer where an episode ends.

    The reward is r_0 + gamma r_1 + ... + gamma**(m - 1) r_(m - 1), where m is n, or the number of
    steps up to the first that terminated or was truncated (Sutton and Barto 2018, section 7.1).

    Args:
      window: a NamedTuple, leaves [B, W, ...], of observation, action, reward, next_observation,
        terminated and truncated. Where next_observation is None, n is W - 1, and it is taken to be
        the observation of the step after, which in NEXT_STEP autoreset mode is right at the end of
        an episode, too. Otherwise n is W.
      gamma: discount factor of one step.
      mask: [B, W] bool, False for a step that only resets; None: there are none.

    Returns the transitions, a NamedTuple like `window` of leaves [B, ...]: first observation and
    action, that reward, and what step m - 1 led to; the factor [B] of the bootstrapped value,
    gamma**m, and 0 if terminated; whether a window starts at a step that counts [B] bool.
    """
    once = window.next_observation is None
    n = window.reward.shape[1] - once
    terminated, truncated = window.terminated[:, :n], window.truncated[:, :n]
    over = (terminated | truncated).astype(jnp.int32)
    taken = jnp.cumsum(over, axis=1) == over  # none before it is
    steps = jnp.sum(taken, axis=1, dtype=jnp.int32)  # m
    powers = jnp.float32(gamma) ** jnp.arange(n, dtype=jnp.float32)
    is_terminated = jnp.any(taken & terminated, axis=1)
    after = window.observation if once else window.next_observation
    at = steps if once else steps - 1
    rows = jnp.arange(len(steps))
    transition = window._replace(
        observation=jax.tree.map(lambda x: x[:, 0], window.observation),
        action=jax.tree.map(lambda x: x[:, 0], window.action),
        reward=jnp.sum(jnp.where(taken, window.reward[:, :n], 0) * powers[None], axis=1),
        next_observation=jax.tree.map(lambda x: x[rows, at], after),
        terminated=is_terminated,
        truncated=jnp.any(taken & truncated, axis=1),
    )
    discount = jnp.where(is_terminated, 0, jnp.float32(gamma) ** steps.astype(jnp.float32))
    valid = jnp.ones_like(is_terminated) if mask is None else mask[:, 0]
    return transition, discount, valid


def stack_frames(window: Any, count: int, mask: Array) -> Any:
    """Windows of single observations as windows of stacks: of an episode the last K observations.

    So an image is stored once and not in K stacks (Mnih et al. 2015, Methods, "Preprocessing").

    Args:
      window: a NamedTuple, leaves [B, W, ...], with an array `observation`.
      count: K, 1 to W. With 1 the window is returned as it is.
      mask: [B, W] bool, False for a step that only resets. In the stacks after it, zeros stand for
        the observations up to it.

    Returns `window` from its K-th step on, leaves [B, W - K + 1, ...], with observations
    [B, W - K + 1, K, ...], the newest last.
    """
    if count == 1:
        return window
    frames = window.observation

    def stack(i: int) -> Array:
        later = jnp.cumprod(mask[:, i : i + count - 1][:, ::-1], axis=1, dtype=jnp.int32)
        kept = jnp.pad(later[:, ::-1], ((0, 0), (0, 1)), constant_values=1) > 0
        kept = jnp.expand_dims(kept, range(2, frames.ndim))
        return jnp.where(kept, frames[:, i : i + count], 0)

    stacks = [stack(i) for i in range(frames.shape[1] - count + 1)]
    rest = jax.tree.map(lambda x: x[:, count - 1 :], window)
    return rest._replace(observation=jnp.stack(stacks, axis=1))


def shuffled_minibatches(key: Array, rows: int, epochs: int, num_minibatches: int) -> Array:
    """Random orders of rows: [epochs, num_minibatches, rows // num_minibatches], by a sort."""
    if rows % num_minibatches:
        raise ValueError(f"rows must be a multiple of {num_minibatches=}, got {rows}: change one")
    low, number = (rows - 1).bit_length(), jnp.arange(rows, dtype=jnp.uint32)
    bits = jax.random.bits(key, (epochs, rows), jnp.uint32)
    order = jnp.sort((bits >> low << low) | number[None], axis=1, stable=False) % (1 << low)
    return order.astype(jnp.int32).reshape(epochs, num_minibatches, -1)
