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
rings after each other, [K * T, N, ...]. Every factory is that ring, one way to choose where a
sample starts, and one gather.

Shape letters: T rows of the ring (time), N environments, K clusters, L rows added, B batch drawn,
W steps in a window (`sequence_length`).

An *index* names an item for as long as it is held: it counts the rows ever written, modulo a
bounded multiple of T (so nothing overflows), times N, plus the environment; that times K, plus the
cluster. The slot that an index refers to is its row modulo T; whether the slot has been overwritten
since is arithmetic, not bookkeeping (`_is_held`).

Mistakes. Wrong structures, shapes, dtypes and sizes raise when a function is traced. Mistakes that
depend on values (sampling an empty buffer, popping too much, an index that is gone) raise
ValueError when the function is called with concrete arrays; inside `jax.jit` they are harmless in
the way that the function's text says, and with `debug=True` an error under
`jax.experimental.checkify` (not by default: it costs a compiled function 50 us a call and more).

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

TINY = float(np.finfo(np.float32).tiny)

__all__ = [
    "CircularBuffer",
    "PrioritisedReplay",
    "PrioritisedState",
    "Replay",
    "RingState",
    "Sample",
    "circular_buffer",
    "clustered_replay",
    "importance_weights",
    "n_step_transition",
    "prioritised_replay",
    "shuffled_minibatches",
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
    core: Core  # for `clustered_replay`


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
    add_and_sample: Callable[..., tuple[PrioritisedState, Sample]]
    get: Callable[[PrioritisedState, Any], PyTree]
    update: Callable[..., PrioritisedState]
    size: Callable[[PrioritisedState], Array]
    can_sample: Callable[[PrioritisedState], Array]
    core: Core
    set_priorities: Callable[[PrioritisedState, Any, Any], PrioritisedState]


class CircularBuffer(NamedTuple):
    """The functions of `circular_buffer`.

    init(item) -> state, add(state, item) -> state and add_batch(state, items [B, ...],
      mask [B] = None) -> state: as in `Replay`, of items.
    pop(state, n) -> (state, items [n, ...]): the n oldest, oldest first; `n` is static. With fewer
      than n held: ValueError; inside jit all that are held go, and the rows after them hold old
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
    if layout.debug:
        return True
    for x in values:  # noqa: SIM110 (faster than all(), and part of every call)
        if isinstance(x, jax.core.Tracer):
            return False
    return True


def _check(ok: Any, message: str, **values: Any) -> None:
    """Raises if `ok` is concrete and False; if it is traced, leaves that to checkify."""
    if isinstance(ok, jax.core.Tracer):
        checkify.debug_check(ok, message, **{k: jnp.asarray(v) for k, v in values.items()})
    elif not ok:
        raise ValueError(message.format(**values))


def _host(x: Any) -> Any:
    """`x` as NumPy if it is concrete, so that a check of it in Python dispatches nothing."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def _are_priorities(given: Any) -> Any:
    """Whether all of them are 0 or more, and finite. JAX or NumPy arrays."""
    if isinstance(given, np.ndarray) and given.dtype == np.float32:
        # As integers, the bits of what is infinite, NaN or has a minus sign are the largest.
        infinity = 0x7F800000
        if np.maximum.reduce(given.view(np.uint32), axis=None, initial=0) < infinity:
            return True
    return ((given >= 0) & (given < np.inf)).all()


def _indices(name: str, indices: Any) -> Any:
    """Indices as an array: lists and Python ints are taken, floats are not."""
    array = indices if isinstance(indices, jax.Array) else np.asarray(indices)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}: indices must be integers, got {array.dtype}")
    if isinstance(array, np.ndarray):  # what int32 cannot hold is no index
        array = array.astype(np.int64)
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
    """Raises unless `mask` is None or a bool array [rows]."""
    if mask is None:
        return
    given = f"{mask.dtype}{mask.shape}" if hasattr(mask, "dtype") else type(mask).__name__
    if given != f"bool({rows},)":
        raise ValueError(f"add_batch: mask is {given}, expected bool and ({rows},): a flag a row")


# --------------------------------------------------------------------------------- xla, on a cpu
# To wake a second thread takes 60 us, and XLA does it where more than 8 operations are ready.


def _once(x: Array) -> Array:
    """`x`, uint32 below 2**31 - 1; XLA computes it once, and not again for each of its uses."""
    return jax.lax.rem(x, np.uint32(2**31 - 1))  # changes nothing; XLA believes it is expensive


def _after(x: Array, other: Array) -> Array:
    """`x`, int32; XLA computes it after `other`."""
    first = other.reshape(-1)[:1].astype(bool).astype(jnp.int32).sum()
    return x + jnp.minimum(first, 0)  # 0, which XLA does not know


def _few_at_once(fn: Callable[..., Array], index: Array, *trees: PyTree) -> PyTree:
    """fn(index, leaf of each of `trees`) for all leaves, of which XLA computes few at once."""
    leaves, structure = jax.tree.flatten(trees[0])
    done: list[Array] = []
    for each in zip(leaves, *map(jax.tree.leaves, trees[1:]), strict=True):
        if done and len(done) % 4 == 0:
            index = _after(index, done[-1])
        done.append(fn(index, *each))
    return jax.tree.unflatten(structure, done)


def _take(x: Array, i: Array) -> Array:
    """x[i] for `i` that are all in range."""
    axes = jax.lax.GatherDimensionNumbers(tuple(range(i.ndim, i.ndim + x.ndim - 1)), (0,), (0,))
    item = x.shape[1:]

    def gather(x: Array, i: Array) -> Array:
        index = jax.lax.expand_dims(i, (i.ndim,))
        return jax.lax.gather(x, index, axes, (1, *item), mode="promise_in_bounds")

    def in_one_thread(x: Array, i: Array) -> Array:
        i = _once(i.astype(jnp.uint32)).astype(jnp.int32)
        zero = _after(jnp.int32(0), i)
        rows, half = jnp.broadcast_to(zero.astype(x.dtype), i.shape + item), len(i) // 2
        for start, part in ((zero, i[:half]), (zero + half, i[half:])):
            rows = jax.lax.dynamic_update_slice_in_dim(rows, gather(x, part), start, axis=0)
        return rows

    # XLA gives a gather from a large array to several threads, what it writes to a part to one.
    large = 2**19  # bytes
    if i.size < 2 or len(i) < 2 or x.nbytes < large or i.size * x.nbytes // len(x) >= large:
        return gather(x, i)
    return jax.lax.platform_dependent(x, i, cpu=in_one_thread, default=gather)


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
    streams, sequences = num_envs is not None, sequence_length is not None
    return Layout(max_size // envs, envs, window, period, streams, sequences, debug)


def _empty(layout: Layout) -> RingState:
    """The state of an empty ring, but for its storage."""
    return RingState(storage=(), cursor=jnp.int32(0), size=jnp.int32(0))


def _empty_storage(layout: Layout, item: PyTree) -> PyTree:
    """For items like `item`, in which Python scalars have JAX's default dtypes."""
    if not jax.tree.leaves(item):
        raise ValueError(f"init: the item has no arrays in it, got {item!r}")
    lead = (layout.rows * layout.clusters, layout.envs)
    return jax.tree.map(lambda x: jnp.zeros(lead + jnp.shape(x), jnp.result_type(x)), item)


def _length(items: PyTree) -> int:
    """The length of the leading axis, as far as the first leaf tells."""
    return next((next(iter(jnp.shape(leaf)), 1) for leaf in jax.tree.leaves(items)), 0)


def _rows(layout: Layout, ring: State, items: PyTree, one: bool = False) -> PyTree:
    """Rows [L, N, ...] for `_put`, of what `add` (if `one`) or `add_batch` is given."""
    _check_state(layout, ring)
    name, lead, axes = ("add", (), "") if one else ("add_batch", (_length(items),), "rows, ")
    if layout.streams:
        lead, axes = (*lead, layout.envs), axes + "num_envs, "
    _check_items(name, ring.storage, items, lead, axes)
    rows = 1 if one else _length(items)
    return jax.tree.map(lambda x, s: jnp.reshape(x, (rows, *s.shape[1:])), items, ring.storage)


def _advance(layout: Layout, ring: State, items: PyTree, mask: Any = None) -> tuple[State, Array]:
    """The state after `items` [L, ...], but for its storage, and the slot [L] of each row.

    Rows that are left out, their `mask` [L] being False, or that newer ones of the same batch would
    overwrite, get slots past the end, all different, which `_put` drops.
    """
    length = _length(items)
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

    def put(slot: Array, s: Array, x: Array) -> Array:
        x = x.astype(s.dtype)
        if one:
            return jax.lax.dynamic_update_slice_in_dim(s, x, slot[0], 0)
        # A scatter and not dynamic_update_slice: XLA does it in place for a block that wraps, too.
        # Of windows [1, N, ...]: XLA copies the rows first where `s.at[slot]` has it add that axis.
        windows = jax.lax.ScatterDimensionNumbers(tuple(range(1, s.ndim + 1)), (), (0,))
        x, at = jnp.expand_dims(x, 1), jnp.expand_dims(slot, 1)
        return jax.lax.scatter(s, at, x, windows, unique_indices=True, mode="drop")

    return _few_at_once(put, slot, storage, rows)


def _position(layout: Layout, indices: Array) -> Array:
    """Where the item of each index stands in `_flat` storage."""
    # Unsigned, here and in draws: JAX's remainder of what may be negative is a dozen operations,
    # which XLA repeats for each leaf.
    indices = indices.astype(jnp.uint32)
    cluster, index = indices % layout.clusters, indices // layout.clusters
    return (cluster * layout.capacity + index % layout.capacity).astype(jnp.int32)


def _is_held(layout: Layout, cursor: Any, size: Any, index: Any, window: int = 1) -> Any:
    """Whether the `window` rows from each index of one ring are stored. JAX or NumPy arrays."""
    age = (cursor - index // layout.envs) % layout.modulus  # 1: the newest row
    exists = (index >= 0) & (index < layout.modulus * layout.envs)
    return exists & (age >= window) & (age <= size)


def _is_stored(layout: Layout, state: State, indices: Any, window: int = 1) -> Any:
    """The same of whichever ring each index is of, on the host if nothing is traced."""
    cursor, size, indices = _host(state.cursor), _host(state.size), _host(indices)
    cluster, index = indices % layout.clusters, indices // layout.clusters
    if cursor.ndim:
        cursor, size = cursor[cluster], size[cluster]
    return _is_held(layout, cursor, size, index, window)


def _check_state(layout: Layout, state: State) -> None:
    shape = jax.tree.leaves(state.storage)[0].shape[:2]
    expected = (layout.rows * layout.clusters, layout.envs)
    if shape != expected:
        raise ValueError(
            f"the state holds {shape[0]} rows of {shape[1]} environments, this buffer "
            f"{expected[0]} of {expected[1]}: it was made by another one's init"
        )


def _flat(leaf: Array) -> Array:
    """[T, N, ...] as [T * N, ...], without a copy."""
    return leaf.reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _gather(layout: Layout, ring: State, indices: Array) -> PyTree:
    """The item at each index; in a buffer of sequences the W items from it, on an axis after."""
    _check_state(layout, ring)
    if layout.sequences:
        steps = layout.envs * layout.clusters * jnp.arange(layout.window)
        indices = jnp.expand_dims(indices, -1) + jnp.expand_dims(steps, range(indices.ndim))
    position = _position(layout, indices)
    return _few_at_once(lambda i, s: _take(_flat(s), i), position, ring.storage)


def _update(
    layout: Layout, state: State, fn: Callable[..., PyTree], indices: Any, args: tuple
) -> State:
    """`fn` on every item, or on those at `indices` [B], which must be held to be written."""
    items = jax.tree.map(_flat, state.storage)
    if indices is None:
        if args:
            raise TypeError("update: args go with indices, a row for each; got no indices")
        new = jax.vmap(fn)(items)
        lead = (layout.capacity * layout.clusters,)
        _check_items("update: fn's result", state.storage, new, lead, "max_size, ")
        new = jax.tree.map(lambda s, x: x.astype(s.dtype).reshape(s.shape), state.storage, new)
    else:
        if indices.ndim != 1:
            raise ValueError(f"update: indices must have shape [B], got {indices.shape}")
        position = _position(layout, indices)
        new = jax.vmap(fn)(jax.tree.map(lambda x: _take(x, position), items), *args)
        _check_items("update: fn's result", state.storage, new, position.shape, "indices, ")
        held = _is_stored(layout, state, indices)
        past_end = layout.rows * layout.clusters
        slot, env = jnp.where(held, position // layout.envs, past_end), position % layout.envs
        new = jax.tree.map(
            lambda s, x: s.at[slot, env].set(x.astype(s.dtype), mode="drop"), state.storage, new
        )
    return state._replace(storage=new)


def _donate(donate: bool) -> dict[str, Any]:
    return {"donate_argnames": "state"} if donate else {}


def _get_and_update(
    layout: Layout, donate: bool, check: Callable[..., None], index: Callable[[State, Any], Any]
) -> tuple[Callable[..., PyTree], Callable[..., State]]:
    """`get` and `update` where `index(state, indices)` are the indices meant by those given.

    `check(name of the function, state, indices)` raises ValueError for those that are not held.
    """

    @jax.jit
    def get_jit(state: State, indices: Array) -> PyTree:
        return _gather(layout, state, index(state, indices))

    def get(state: State, indices: Any) -> PyTree:
        indices = _indices("get", indices)
        check("get", state, indices)
        return get_jit(state, indices)

    @partial(jax.jit, static_argnames="fn", **_donate(donate))
    def update_jit(state: State, fn: Callable, indices: Any, args: tuple) -> State:
        indices = None if indices is None else index(state, indices)
        return _update(layout, state, fn, indices, args)

    def update(state: State, fn: Callable, indices: Any = None, *args: PyTree) -> State:
        if indices is not None:
            indices = jnp.atleast_1d(_indices("update", indices))
            check("update", state, indices)
        return update_jit(state, fn, indices, args)

    return get, update


# --------------------------------------------------------------------------------- windows, replay


def _bits(key: Array, rows: int, count: int) -> list[Array]:
    """The rows of jax.random.bits(key, (rows, count)): Threefry (Salmon et al. 2011), unrolled."""
    partitionable = getattr(jax.config, "jax_threefry_partitionable", True)
    if jax.random.key_impl(key) != "threefry2x32" or not partitionable:
        return list(jax.random.bits(key, (rows, count)))
    first, second = jax.random.key_data(key)
    keys = first, second, first ^ second ^ np.uint32(0x1BD11BDA)

    def row(start: int) -> Array:
        x = jnp.full(count, keys[0])
        y = jax.lax.iota(np.uint32, count) + (keys[1] + np.uint32(start))
        for i in range(5):
            for left in ((13, 15, 26, 6), (17, 29, 16, 24))[i % 2]:
                x = x + y
                y = x ^ ((y << left) | (y >> (32 - left)))
            x, y = x + keys[(i + 1) % 3], y + keys[(i + 2) % 3] + np.uint32(i + 1)
        return x ^ y

    return [row(start * count) for start in range(rows)]


def _random(key: Array, rows: int, count: int) -> list[Array]:
    """The rows of jax.random.uniform(key, (rows, count)): float32, 0 to below 1."""
    one = np.float32(1).view(np.uint32)
    mantissas = [_once(bits >> 9) | one for bits in _bits(key, rows, count)]
    return [jax.lax.bitcast_convert_type(bits, jnp.float32) - 1 for bits in mantissas]


def _scaled(bits: Any, bound: Array) -> Array:
    """[B] uint32 in 0 to bound - 1 (0 if bound is 0): floor(bound * r / 2**64).

    `r`, `bits` [2, B] uint32, are 64 random bits each, so that no number is favoured by more than
    bound / 2**64. The product is taken in halves of 16 bits.
    """
    high, low = bits
    n = bound.astype(jnp.uint32)  # below 2**30
    n_high, n_low = n >> 16, n & 0xFFFF

    def upper(x: Array) -> Array:
        """The upper 32 bits of the 64-bit product x * n."""
        low_product, high_product = (x & 0xFFFF) * n_low, (x >> 16) * n_low
        middle = (x & 0xFFFF) * n_high + (low_product >> 16) + (high_product & 0xFFFF)
        return (x >> 16) * n_high + (high_product >> 16) + (middle >> 16)

    added = upper(low)
    carry = (high * n + added) < added  # whether that sum passes 2**32
    return upper(high) + carry.astype(jnp.uint32)


def _starts(layout: Layout, cursor: Any, size: Any) -> tuple[Any, Any]:
    """At how many rows a window may start, and the count of the first. JAX or NumPy arrays.

    The rows held are counted cursor - size, ..., cursor - 1. A window starts at a multiple of
    `period` and ends at a row that is held, so it never crosses the write position. The count is
    not taken modulo `layout.modulus`: it may be negative.
    """
    skipped = -(cursor - size) % layout.period
    starts = (size - skipped - layout.window + layout.period) // layout.period
    return starts * (starts > 0).astype(np.int32), cursor - size + skipped


def _uniform(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
    """Indices [B] of windows, each as likely as the others, and their probabilities [B]."""
    starts, first = _starts(layout, state.cursor, state.size)
    total = starts * layout.envs
    draw = _scaled(_bits(key, 2, batch_size), total)
    first = (first + layout.modulus).astype(jnp.uint32)
    row = (first + layout.period * (draw // layout.envs)) % layout.modulus
    index = (row * layout.envs + draw % layout.envs).astype(jnp.int32)
    count = total.astype(np.float32)
    probability = jnp.where(count > 0, 1 / jnp.maximum(count, 1), 0)
    return index, jnp.broadcast_to(probability, index.shape)


def _at_most(x: Any, most: int) -> Any:
    """The smaller one; of a JAX or a NumPy array."""
    return (jnp if isinstance(x, jax.core.Tracer) else np).minimum(x, np.int32(most))


def _any_start(layout: Layout, state: State, added: Any = None) -> Any:
    """Whether there is a window to draw, `added` rows from now; on the host if not traced."""
    cursor, size = _host(state.cursor), _host(state.size)
    if added is not None:
        cursor, size = cursor + added, _at_most(size + added, layout.rows)
    return _starts(layout, cursor, size)[0] > 0


class Core(NamedTuple):
    """What makes one kind of replay buffer. A `state` here is one whose storage is left out."""

    layout: Layout
    # (layout) -> state
    empty: Callable[..., State] = _empty
    # (layout, state, items [L, ...], mask [L] or None) -> state, slots [L] for `_put`
    advance: Callable[..., tuple[State, Array]] = _advance
    # (layout, state, key, B) -> indices [B], probabilities [B]
    choose: Callable[..., tuple[Array, Array]] = _uniform
    # (layout, state, added) -> whether there is anything to draw, `added` rows from now
    drawable: Callable[..., Any] = _any_start
    # (layout, state, indices [B], priorities [B]) -> state
    set_priorities: Callable[..., State] | None = None
    # (name of the function, items [L, ...], mask) -> rows that go to each ring; raises ValueError
    arriving: Callable[..., Any] | None = None


def _replay(core: Core, donate: bool) -> Any:
    """The `Replay`, or `PrioritisedReplay`: the ring and the gather with this core."""
    layout, donated = core.layout, _donate(donate)
    # A weight, or a number of rows held, with which there is something to draw for certain.
    enough = TINY if core.set_priorities else layout.window + layout.period - 1

    def check_can_sample(name: str, state: State, added: Any = None) -> None:
        if not _is_checked(layout, state.size):
            return
        # Nearly always the first of these numbers tells, which is much faster to look at.
        known = state.tree[-1] if core.set_priorities else state.size
        if added is not None:  # a new item that is a window of its own
            known = added * np.int32(layout.window == layout.period == 1)
        if not isinstance(known, jax.core.Tracer) and np.asarray(known).item(0) >= enough:
            return
        ok = core.drawable(layout, state, added).any()
        message = (
            f"{name}: nothing to draw, {{size}} steps held and a draw takes {layout.window} "
            f"from a multiple of {layout.period} on, of a priority above 0 if there are any: "
            "add more, or ask can_sample"
        )
        size = _host(state.size)
        size = size if added is None else _at_most(size + added, layout.rows)
        _check(ok, message, size=size.sum())

    @jax.jit
    def init(item: PyTree) -> State:
        return core.empty(layout)._replace(storage=_empty_storage(layout, item))

    alone = jax.jit(lambda item: jax.tree.map(lambda x: jnp.expand_dims(x, 0), item))

    def write(state: State, items: PyTree, rows: PyTree, mask: Any = None) -> State:
        new, slot = core.advance(layout, state._replace(storage=()), items, mask)
        one = mask is None and _length(rows) == 1 and not core.arriving
        return new._replace(storage=_put(state.storage, slot, rows, one))

    @partial(jax.jit, **donated)
    def add_jit(state: State, item: PyTree) -> State:
        return write(state, alone(item), _rows(layout, state, item, one=True))

    @partial(jax.jit, **donated)
    def add_batch_jit(state: State, items: PyTree, mask: Array | None = None) -> State:
        _check_mask(mask, _length(items))
        return write(state, items, _rows(layout, state, items), mask)

    def add(state: State, item: PyTree) -> State:
        if core.arriving:
            core.arriving("add", alone(item))
        return add_jit(state, item)

    def add_batch(state: State, items: PyTree, mask: Array | None = None) -> State:
        if core.arriving:
            core.arriving("add_batch", items, mask)
        return add_batch_jit(state, items, mask)

    def draw(state: State, key: Array, batch_size: int) -> Sample:
        _check_state(layout, state)
        known = state._replace(storage=())
        indices, probabilities = core.choose(layout, known, key, batch_size)
        return Sample(_gather(layout, state, indices), indices, probabilities)

    sample_jit = jax.jit(draw, static_argnames="batch_size")

    def sample(state: State, key: Array, batch_size: int) -> Sample:
        check_can_sample("sample", state)
        return sample_jit(state, key, _positive("batch_size", batch_size))

    @partial(jax.jit, static_argnames="batch_size", **donated)
    def add_and_sample_jit(
        state: State, items: PyTree, key: Array, batch_size: int
    ) -> tuple[State, Sample]:
        state = write(state, items, _rows(layout, state, items))
        return state, draw(state, key, batch_size)

    def add_and_sample(
        state: State, items: PyTree, key: Array, batch_size: int
    ) -> tuple[State, Sample]:
        name = "add_and_sample"
        added = core.arriving(name, items) if core.arriving else np.int32(_length(items))
        check_can_sample(name, state, added)
        return add_and_sample_jit(state, items, key, _positive("batch_size", batch_size))

    def check_indices(name: str, state: State, indices: Any) -> None:
        if _is_checked(layout, state.size, indices):
            window = layout.window if name == "get" else 1  # `update` is of single items
            held = _is_stored(layout, state, indices, window)
            _check(held.all(), f"{name}: an index is not in the buffer (any more)")

    get, update = _get_and_update(layout, donate, check_indices, lambda state, indices: indices)

    size = jax.jit(lambda state: state.size.sum() * layout.envs)
    can_sample = jax.jit(lambda state: core.drawable(layout, state).any())
    if not core.arriving:
        add, add_batch = add_jit, add_batch_jit
    functions = (init, add, add_batch, sample, add_and_sample, get, update, size, can_sample)
    weigh = core.set_priorities
    if weigh is None:
        return Replay(*functions, core)

    @partial(jax.jit, **donated)
    def set_priorities_jit(state: State, indices: Any, priorities: Any) -> State:
        expected = jax.eval_shape(partial(core.empty, layout))
        if jax.tree.map(jnp.shape, state) != jax.tree.map(jnp.shape, expected):
            raise ValueError("set_priorities: the state was made by another buffer's init")
        indices, priorities = indices.reshape(-1), priorities.reshape(-1).astype(jnp.float32)
        return weigh(layout, state, indices, priorities)

    def set_priorities(state: State, indices: Any, priorities: Any) -> State:
        indices = _indices("set_priorities", indices)
        if not isinstance(priorities, jax.Array):
            priorities = np.asarray(priorities, np.float32)
        if priorities.shape != indices.shape or indices.ndim > 1:
            raise ValueError(
                f"set_priorities: indices and priorities must have the same shape [B], got "
                f"{indices.shape} and {priorities.shape}"
            )
        if _is_checked(layout, priorities):
            ok = _are_priorities(_host(priorities))
            _check(ok, "set_priorities: priorities must be 0 or more, and finite: one is not")
        # Without the storage, which does not change: to pass an array costs a microsecond.
        new = set_priorities_jit(state._replace(storage=()), indices, priorities)
        return new._replace(storage=state.storage)

    return PrioritisedReplay(*functions, core, set_priorities)


# ---------------------------------------------------------------------------------------- circular


def circular_buffer(max_size: int, *, donate: bool = True, debug: bool = False) -> CircularBuffer:
    """A ring of the last `max_size` items; with `can_add` and `can_pop` a FIFO queue.

    Args:
      max_size: how many items are held; then each new one overwrites the oldest.
      donate, debug: as in `uniform_replay`.

    Raises:
      TypeError, ValueError: `max_size` is not an int from 1 to 2**29.
    """
    layout = _layout(max_size, debug=debug)
    ring = _replay(Core(layout), donate)  # of which a queue has what does not draw

    def index(state: RingState, i: Array) -> Array:
        """The index of the i-th oldest item, or -1."""
        held = (i >= 0) & (i < state.size)
        return jnp.where(held, (state.cursor - state.size + i) % layout.modulus, -1)

    @partial(jax.jit, static_argnames="n", **_donate(donate))
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

    get, update = _get_and_update(layout, donate, check_indices, index)

    can_add = jax.jit(lambda state, n: state.size + n <= max_size)
    can_pop = jax.jit(lambda state, n: state.size >= n)
    return CircularBuffer(
        ring.init, ring.add, ring.add_batch, pop, get, update, ring.size, can_add, can_pop
    )


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
    return _replay(Core(_layout(max_size, num_envs, sequence_length, period, debug)), donate)


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
            node = _once(node.astype(jnp.uint32) // FANOUT).astype(jnp.int32)
            sums = level.at[node].set(_sums(_take(children, node))[-1])
        levels.append(sums)
    return tuple(levels)


def _sums(weights: Array) -> Array:
    """[F, B], the sums of the first 1, 2, ..., F of each of `weights` [B, F].

    Not cumsum, which XLA makes of many small steps. Each sum adds up the same terms in the same
    order: where a weight is 0 it equals the one before.
    """
    if weights.shape[1] > FANOUT:
        ones = np.tri(weights.shape[1], dtype=np.float32)
        return jnp.einsum("fk,bk->fb", ones, weights, precision=jax.lax.Precision.HIGHEST)
    sums = [weights[:, 0]]
    for k in range(1, weights.shape[1]):
        sums.append(sums[-1] + weights[:, k])
    return jnp.stack(sums)


def _choose(sums: Array, target: Array) -> tuple[Array, Array]:
    """In whose share of `sums` [F, B] `target` [B], 0 or more, lies, 0 to F - 1, and how far in it.

    Never in that of a weight 0; where all are 0 the first. A target of the total or more, as
    rounding makes, lies in the last share. `sums` may be [F, 1], the same for all.
    """
    # The second is False from the last weight above 0 on.
    is_passed = (sums <= target[None]) & (sums < sums[-1:])
    share = jnp.sum(is_passed, axis=0, dtype=jnp.int32)
    flat, columns = sums.reshape(-1), sums.shape[1]
    last = jnp.maximum(share - 1, 0) * columns + np.arange(target.size, dtype=np.int32) % columns
    before = _take(flat, last)
    return share, target - jnp.where(share > 0, before, 0)


def _tree_draw(tree: tuple[Array, ...], key: Array, count: int) -> tuple[Array, Array]:
    """Positions [B] drawn in proportion to their weights, one from each of B equal shares.

    Stratified as in Schaul et al. 2016, section 3.3. Returns the positions and their
    probabilities; position 0 and probability 0 if all weights are 0.
    """
    uniform = _random(key, -(-len(tree) // LEVELS_PER_DRAW), count)
    sums = _sums(tree[-1][None])
    total = sums[-1, 0]
    share = (jnp.arange(count, dtype=jnp.float32) + uniform[0]) / count
    node, target = _choose(sums, share * total)
    for depth, level in enumerate(reversed(tree[:-1]), start=1):
        sums = _sums(_take(level.reshape(-1, FANOUT), node))
        if depth % LEVELS_PER_DRAW == 0:
            target = uniform[depth // LEVELS_PER_DRAW] * sums[-1]
        child, target = _choose(sums, target)
        node = node * FANOUT + child
    weights = _take(tree[0], node)
    # A function of the weights, as well, so that nothing is written before they are read: XLA would
    # copy the tree in a loop that draws and sets. (It drops an optimization_barrier too soon.)
    node = jnp.where(weights >= 0, node, 0)
    return node, weights / jnp.where(total > 0, total, 1)


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
      num_envs, sequence_length, period, donate, debug: as in `uniform_replay`. A window has one
        priority, that of its first item.

    Raises:
      TypeError, ValueError: as in `uniform_replay`; `priority_exponent` is negative or not finite.
    """
    layout = _layout(max_size, num_envs, sequence_length, period, debug)
    if not 0 <= priority_exponent < np.inf:
        raise ValueError(f"priority_exponent must be 0 or more, got {priority_exponent}")
    # Whatever the priorities are, no sum overflows, nor does 1 / sum underflow.
    largest = np.finfo(np.float32).max / (8 * layout.capacity)

    def weight(priorities: Array) -> Array:
        return jnp.minimum(priorities**priority_exponent, largest)

    def empty(layout: Layout) -> PrioritisedState:
        return PrioritisedState(*_empty(layout), _tree(layout.capacity), jnp.float32(0))

    def advance(
        layout: Layout, state: PrioritisedState, items: PyTree, mask: Any = None
    ) -> tuple[PrioritisedState, Array]:
        """The ring's, and the weights of windows that can now be drawn, or cannot any more."""
        new, slots = _advance(layout, state, items, mask)
        length = _length(items)
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
        tree = _tree_set(state.tree, positions.reshape(-1), weights, each(changed))
        return new._replace(tree=tree), _after(slots, tree[-1])

    def choose(
        layout: Layout, state: PrioritisedState, key: Array, batch_size: int
    ) -> tuple[Array, Array]:
        positions, probabilities = _tree_draw(state.tree, key, batch_size)
        positions = positions.astype(jnp.uint32)
        newest = (state.cursor + layout.modulus - 1).astype(jnp.uint32)
        age = (newest - positions // layout.envs) % layout.rows
        row = (newest - age) % layout.modulus
        index = row * layout.envs + positions % layout.envs
        return index.astype(jnp.int32), probabilities

    def drawable(layout: Layout, state: PrioritisedState, added: Any = None) -> Any:
        """Whether a weight is above 0, or there will be a new window."""
        has_weight = _host(state.tree[-1]).sum(axis=-1) > 0
        if added is None:
            return has_weight
        newest = _at_most(_host(state.size), layout.window - 1)  # those that end among the new
        is_new = _any_start(layout, state._replace(size=newest), added)
        return is_new | (has_weight & _any_start(layout, state, added))

    def set_priorities(
        layout: Layout, state: PrioritisedState, indices: Array, priorities: Array
    ) -> PrioritisedState:
        known = _is_held(layout, state.cursor, state.size, indices, layout.window)
        known &= indices // layout.envs % layout.period == 0
        known &= (priorities >= 0) & (priorities < jnp.inf)
        largest_known = jnp.max(jnp.where(known, priorities, 0), initial=0)
        return state._replace(
            tree=_tree_set(state.tree, indices % layout.capacity, weight(priorities), known),
            max_priority=jnp.maximum(state.max_priority, largest_known),
        )

    return _replay(Core(layout, empty, advance, choose, drawable, set_priorities), donate)


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
    return weights / jnp.max(weights, initial=TINY)


# --------------------------------------------------------------------------------------- clustered


def clustered_replay(
    num_clusters: int,
    cluster_buffer: Replay | PrioritisedReplay,
    clustering_fn: Callable[[PyTree], Any],
    distribution_power: float = 0.0,
    *,
    donate: bool = True,
    debug: bool = False,
) -> Any:
    """A replay buffer for each cluster; a draw is of a cluster, then of an item in it.

    Rare kinds of items are kept and drawn as long as there are new ones of their kind, such as the
    trajectories of a high return:

        >>> import jax, jax.numpy as jnp, buffers
        >>> def high_or_low(trajectory):
        ...     return (trajectory["reward"].sum() > 10).astype(jnp.int32)
        >>> replay = buffers.clustered_replay(2, buffers.uniform_replay(100), high_or_low)
        >>> state = replay.init({"observation": jnp.zeros((50, 4)), "reward": jnp.zeros(50)})
        >>> trajectories = {"observation": jnp.ones((8, 50, 4)), "reward": jnp.ones((8, 50))}
        >>> state = replay.add_batch(state, trajectories)
        >>> replay.sample(state, jax.random.key(0), 3).experience["reward"].shape
        (3, 50)

    Args:
      num_clusters: K.
      cluster_buffer: a `uniform_replay` or a `prioritised_replay`, with streams or without, of the
        size of one cluster; its donate and debug do not count. Each has a max_priority of its own.
      clustering_fn: gives the cluster, an integer from 0 to K - 1, of what `add` takes: an item, or
        a step of N environments. Outside that: ValueError; inside jit the row is not stored.
      distribution_power: a cluster is drawn with a probability in proportion to the number of items
        that a draw may start at, to this power: 0 draws all clusters alike that have any, 1 draws
        as one uniform buffer.
      donate, debug: as in `uniform_replay`.

    Returns:
      The functions of `cluster_buffer`, a `Replay` or a `PrioritisedReplay`. The leaves of their
      state are the inner one's with an axis K in front, and the storage [K * T, N, ...].

    Raises:
      TypeError, ValueError: `num_clusters` is not an int of at least 1, `cluster_buffer` is not one
        of those, or all clusters together hold more than 2**29 items.
    """
    clusters = _positive("num_clusters", num_clusters)
    inner = getattr(cluster_buffer, "core", None)
    if inner is None or inner.arriving:
        raise TypeError(
            "cluster_buffer must be what uniform_replay or prioritised_replay returns, got "
            f"{type(cluster_buffer).__name__}"
        )
    layout = inner.layout._replace(clusters=clusters, debug=debug)
    if layout.capacity * clusters > 2**29:
        raise ValueError(
            f"{clusters} clusters of {layout.capacity} items are more than 2**29, the most that "
            "int32 can index"
        )

    @jax.jit
    def clusters_of(items: PyTree) -> Array:
        """[L] int32."""
        cluster = jnp.asarray(jax.vmap(clustering_fn)(items))
        if cluster.ndim != 1 or not jnp.issubdtype(cluster.dtype, jnp.integer):
            given = f"{cluster.dtype} of shape {cluster.shape[1:]}"
            raise TypeError(f"clustering_fn must return one integer, got {given}")
        return cluster.astype(jnp.int32)

    def arriving(name: str, items: PyTree, mask: Any = None) -> Any:
        if not _is_checked(layout, mask, *jax.tree.leaves(items)):
            return None
        cluster = _host(clusters_of(items))
        ok = (cluster >= 0) & (cluster < clusters)
        ok = ok if mask is None else ok | ~_host(mask)
        _check(ok.all(), f"{name}: clustering_fn gave a cluster outside 0 to {clusters - 1}")
        return (cluster[:, None] == np.arange(clusters)[None]).sum(0, dtype=np.int32)

    def empty(layout: Layout) -> State:
        return jax.tree.map(
            lambda x: jnp.broadcast_to(x, (clusters, *x.shape)), inner.empty(layout)
        )

    def advance(
        layout: Layout, state: State, items: PyTree, mask: Any = None
    ) -> tuple[State, Array]:
        member = clusters_of(items)[None] == jnp.arange(clusters)[:, None]  # [K, L]
        member = member if mask is None else member & mask[None]
        new, slots = jax.vmap(lambda s, m: inner.advance(layout, s, items, m))(state, member)
        first = layout.rows * jnp.arange(clusters)[:, None]
        return new, jnp.min(jnp.where(slots < layout.rows, first + slots, slots), axis=0)

    def choose(layout: Layout, state: State, key: Array, batch_size: int) -> tuple[Array, Array]:
        cluster_key, key = jax.random.split(key)
        uniform = _random(cluster_key, 1, batch_size)[0]
        state = state._replace(size=_after(state.size, uniform))
        starts, _ = _starts(layout, state.cursor, state.size)
        weights = starts.astype(jnp.float32) ** distribution_power
        weights = jnp.where(inner.drawable(layout, state), weights, 0)
        sums = _sums(weights[None])
        cluster, _ = _choose(sums, uniform * sums[-1])
        # From every cluster a batch, of which each draw takes one: cheap beside the gather.
        indices, probabilities = jax.vmap(lambda s: inner.choose(layout, s, key, batch_size))(state)
        share = weights / jnp.maximum(sums[-1], TINY)
        b = jnp.arange(batch_size)
        return indices[cluster, b] * clusters + cluster, share[cluster] * probabilities[cluster, b]

    def set_priorities(layout: Layout, state: State, indices: Array, priorities: Array) -> State:
        cluster, index = indices % clusters, indices // clusters
        mine = jnp.where(cluster[None] == jnp.arange(clusters)[:, None], index[None], -1)  # [K, B]
        return jax.vmap(lambda s, i: inner.set_priorities(layout, s, i, priorities))(state, mine)

    weigh = set_priorities if inner.set_priorities else None
    return _replay(Core(layout, empty, advance, choose, inner.drawable, weigh, arriving), donate)


# ------------------------------------------------------------------------------------------ n-step


def n_step_transition(window: Any, gamma: float, mask: Any = None) -> tuple[Any, Array, Array]:
    """Folds windows of consecutive steps into transitions of n steps, fewer where an episode ends.

    The reward is r_0 + gamma r_1 + ... + gamma**(m - 1) r_(m - 1), where m is n, or the number of
    steps up to the first that terminated or was truncated (Sutton and Barto 2018, section 7.1).

    Args:
      window: a NamedTuple, leaves [B, W, ...], of observation, action, reward, next_observation,
        terminated and truncated. Where next_observation is None it is the observation of the step
        after, which in NEXT_STEP autoreset mode is right at the end of an episode, too: every
        observation is stored once, and n is W - 1. Otherwise n is W.
      gamma: discount factor of one step.
      mask: [B, W] bool, False for a step that only resets; None: there are none.

    Returns:
      The transitions, a NamedTuple like `window` of leaves [B, ...]: first observation and action,
      that reward, and what step m - 1 led to. The factor [B] of the bootstrapped value, gamma**m,
      and 0 if terminated. Whether a window starts at a step that counts [B] bool.
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


def shuffled_minibatches(key: Array, rows: int, epochs: int, num_minibatches: int) -> Array:
    """Random orders of rows: [epochs, num_minibatches, rows // num_minibatches], by a sort."""
    if rows % num_minibatches:
        raise ValueError(f"rows must be a multiple of {num_minibatches=}, got {rows}: change one")
    low, number = (rows - 1).bit_length(), jnp.arange(rows, dtype=jnp.uint32)
    bits = jax.random.bits(key, (epochs, rows), jnp.uint32)
    order = jnp.sort((bits >> low << low) | number[None], axis=1, stable=False) % (1 << low)
    return order.astype(jnp.int32).reshape(epochs, num_minibatches, -1)
