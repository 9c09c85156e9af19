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
rings one after the other, [K * T, N, ...]. Shape letters: T rows of the ring (time), N
environments, K clusters, L rows added, B batch drawn, W steps in a window (`sequence_length`).

In a replay buffer an *index* names an item for as long as it is held: the number of its row since
the first ever written, modulo a multiple of T (so that nothing overflows), times N, plus the
environment; in a clustered buffer this times K, plus the cluster. In a circular buffer index i is
the i-th oldest item.

Wrong structures, shapes and dtypes raise when a function is traced. Mistakes in values (an empty
buffer is sampled, an index is gone) raise ValueError where they are concrete arrays; inside
`jax.jit` they raise nothing and leave the state intact, and with `debug=True` they are errors under
`jax.experimental.checkify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental import checkify
from jax.numpy import float32, int32, uint32
from jax.tree_util import keystr, tree_leaves, tree_leaves_with_path, tree_map, tree_structure

PyTree = Any
State = Any  # a NamedTuple that has at least the fields of RingState
Choice = tuple[Array, Array]  # indices [B] int32 and their probabilities [B] float32
Advanced = tuple[State, Array]  # a state after rows were added, and the slots of these
TINY = float(np.finfo(np.float32).tiny)


# ------------------------------------------------------------------------------------------- types
class RingState(NamedTuple):
    """The last T rows written. The state of `circular_buffer` and `uniform_replay`."""

    storage: PyTree = ()  # leaves [T, N, ...]
    cursor: Any = np.int32(0)  # [] rows ever written modulo `cursor_modulus`; next slot: cursor % T
    size: Any = np.int32(0)  # [] rows held, 0 to T


class PrioritisedState(NamedTuple):
    """The state of `prioritised_replay`: a `RingState`, and the weights that are drawn by."""

    storage: PyTree = ()  # leaves [T, N, ...]
    cursor: Any = np.int32(0)  # []
    size: Any = np.int32(0)  # []
    tree: Any = ()  # [nodes] float32, see `TOP`; tree[t * N + n] is a priority ** exponent
    top: Any = ()  # [nodes] float32, the last levels of the tree
    max_priority: Any = np.float32(0)  # [] the largest ever set; 0 before the first


class Sample(NamedTuple):
    """What `sample` draws."""

    experience: PyTree  # leaves [B, ...], with `sequence_length` [B, W, ...]
    indices: Array  # [B] int32, for `get`, `update` and `set_priorities`
    probabilities: Array  # [B] float32, of each draw; 0 where there was nothing to draw


class Replay(NamedTuple):
    """The functions of `uniform_replay`, `prioritised_replay` and `clustered_replay`.

    New items of a prioritised buffer get the largest priority that was ever set, or 1 if none above
    0 was. If all priorities are 0 there is nothing to draw, unless the exponent is 0. `size` and
    `can_sample` also take states that `jax.vmap` or `jax.pmap` stacked, and give an answer for each
    of them; the other functions are called under `jax.vmap`.
    """

    init: Callable  # (item) -> state
    add: Callable  # (state, item) -> state
    add_batch: Callable  # (state, items, mask=None) -> state
    sample: Callable  # (state, key, batch_size) -> Sample
    add_and_sample: Callable  # (state, items, key, batch_size) -> (state, Sample)
    get: Callable  # (state, indices) -> experience
    update: Callable  # (state, fn, indices=None, *args) -> state
    indices: Callable  # (state) -> (indices [max_size] int32, is_held [max_size] bool)
    size: Callable  # (state) -> [] int32
    can_sample: Callable  # (state, min_size=1) -> [] bool
    set_priorities: Any = None  # (state, indices, priorities) -> state; None if not prioritised
    core: Any = None  # the parts that `clustered_replay` makes a buffer of; not for users

    def __repr__(self) -> str:
        rows, envs, window, period, *_, clusters = self.core.layout
        sizes = f"max_size={rows * envs}, num_envs={envs}, sequence_length={window}, {period=}"
        return f"Replay({sizes}, num_clusters={clusters}, prioritised={bool(self.set_priorities)})"


class CircularBuffer(NamedTuple):
    """The functions of `circular_buffer`."""

    init: Callable  # (item) -> state
    add: Callable  # (state, item) -> state
    add_batch: Callable  # (state, items, mask=None) -> state
    pop: Callable  # (state, n) -> (state, items)
    get: Callable  # (state, indices) -> items
    update: Callable  # (state, fn, indices=None, *args) -> state
    size: Callable  # (state) -> [] int32
    can_add: Callable  # (state, n) -> [] bool
    can_pop: Callable  # (state, n) -> [] bool
    max_size: int

    def __repr__(self) -> str:
        return f"CircularBuffer(max_size={self.max_size})"


# ------------------------------------------------------------------------------------------ checks
def _is_checked(layout: Layout, *values: Any) -> bool:
    """Whether mistakes in these values are looked for: not in traced ones, unless asked to."""
    return layout.debug or not any(isinstance(value, Tracer) for value in values)


def _check(ok: Any, message: str, **values: Any) -> None:
    """Raises unless all of `ok` is True; if it is traced, leaves that to checkify."""
    if isinstance(ok, Tracer):
        arrays = {name: jnp.asarray(value) for name, value in values.items()}
        checkify.debug_check(ok.all(), message, **arrays)
    elif not np.asarray(ok).all():
        raise ValueError(message.format(**values))


def _positive(name: str, value: Any) -> int:
    """The value, which must be an int of at least 1."""
    if not isinstance(value, int | np.integer):
        given = f"an array {jax.typeof(value)}" if isinstance(value, Array) else repr(value)
        raise TypeError(
            f"{name} must be a Python int, got {given}: it sets the shape of an array. Did you "
            "swap two arguments? Under jit, mark it static"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _as_indices(name: str, indices: Any) -> Any:
    """Indices as an array of int32: lists and Python ints are taken, floats are not."""
    array = indices if isinstance(indices, Array) else np.asarray(indices)
    is_integer = array.dtype.kind in "iu"
    if array.size and not is_integer:
        raise TypeError(f"{name}: indices must be integers, got {array.dtype}")
    if isinstance(array, np.ndarray):
        array = np.clip(array, -1, 2**31 - 1)  # of which neither is an index
    if array.dtype == np.int32:
        return array
    return array.astype(np.int32)


def _check_state(core: Core, state: State) -> None:
    """Raises unless the state is one that this buffer's `init` made, and not several, stacked."""
    if state.size.ndim > len(core.cluster_axis):
        raise ValueError("these are several states, stacked: call the function under jax.vmap")
    expected = (core.layout.slots, core.layout.envs)
    for leaf in tree_leaves(state.storage):
        given = leaf.shape[:2]
        if given != expected:
            raise ValueError(
                "the state was made by another buffer's init: "
                f"it holds [rows, environments] {given} and not {expected}"
            )
        if any(jax.typeof(leaf).sharding.spec):
            raise ValueError(
                "the storage is sharded over Explicit axes: make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,), one for each axis"
            )


def _check_items(name: str, storage: PyTree, items: PyTree, lead: tuple, axes: str) -> None:
    """Raises unless every leaf of `items` is `lead` (named `axes`) + the shape given to init."""
    given = tree_structure(items)
    expected = tree_structure(storage)
    if given != expected:  # type: ignore[operator]
        raise ValueError(f"{name}: items have structure {given}, expected {expected} as in init")
    leaves = tree_leaves(items)
    slots = tree_leaves_with_path(storage)
    for leaf, (path, slot) in zip(leaves, slots, strict=True):
        where = f"{name}: leaf {keystr(path) or '(the item itself)'} has"
        shape = jnp.shape(leaf)
        wanted = lead + slot.shape[2:]
        if shape != wanted:
            hint = "" if name.startswith("update") else ": add takes one row, add_batch several"
            raise ValueError(
                f"{where} shape {shape}, expected {wanted}, which is ({axes}item){hint}"
            )
        dtype = jnp.result_type(leaf)
        is_python_scalar = jax.typeof(leaf).weak_type  # which takes the dtype of its slot
        fits = is_python_scalar and jnp.result_type(slot, leaf) == slot.dtype
        if dtype != slot.dtype and not fits:
            raise TypeError(
                f"{where} dtype {dtype}, expected {slot.dtype} as given to init: convert it with "
                f".astype({str(slot.dtype)!r}), or give init an item of dtype {dtype}"
            )


# -------------------------------------------------------------------------- what XLA needs on a CPU
# Each function is something simpler, which it says first, for a compiler that repeats and copies
# too much, and wakes threads for too little. The comments say how many times as long a call takes
# without it, as measured on two cores with JAX 0.12.0.1.


def _computed_once(i: Array) -> Array:
    """`i`, uint32 and below 2**31 - 1, which XLA would compute anew for each of its uses."""
    return lax.rem(i, np.uint32(2**31 - 1))  # setting 256 priorities: 3.3; in a scan 1.5


def _key_after(key: Array, count: Array, arrays: PyTree) -> Array:
    """`key`, once the arrays are there, `count` never negative: else XLA wakes a thread for it."""
    flat = [x.ravel() for x in tree_leaves(arrays)]
    ends = [x[:1] != x[-1:] for x in flat]
    is_negative = count.ravel()[0] < 0
    is_never = is_negative & jnp.concatenate(ends).any()
    return jnp.stack([key, key])[is_never.astype(int32)]  # `add_and_sample`: 1.5


def _take(x: Array, i: Array) -> Array:
    """x[i] for `i` [B, ...] in range. XLA divides it among threads if x is of 512 KiB or more."""
    i = i.astype(uint32)
    bytes_read = i.size * x.nbytes // len(x)
    is_divided = x.nbytes >= 2**19 > bytes_read  # drawing 256 of 1,000,000 items: 1.7
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if i.ndim == 0 or len(i) < 2 or is_key or not is_divided:
        return _take_directly(x, i)
    return lax.platform_dependent(x, i, cpu=_take_in_one_thread, default=_take_directly)


def _take_directly(x: Array, i: Array) -> Array:
    return x.at[i].get(mode="promise_in_bounds")


def _take_in_one_thread(x: Array, i: Array) -> Array:
    """Two halves, because what is written to a part of an array is not divided."""
    i = _computed_once(i)
    half = len(i) // 2
    zero = (i.ravel()[0] >> 31).astype(int32)  # which XLA does not know to be 0
    shape = i.shape + x.shape[1:]
    rows = jnp.broadcast_to(zero.astype(x.dtype), shape)
    rows = lax.dynamic_update_slice_in_dim(rows, _take_directly(x, i[:half]), zero, 0)
    return lax.dynamic_update_slice_in_dim(rows, _take_directly(x, i[half:]), zero + half, 0)


def _put(i: Array, x: Array, rows: Array) -> Array:
    """x.at[i].set(rows, mode="drop") for `i` [L] that are all different, without a copy of rows."""
    item_axes = tuple(range(1, x.ndim + 1))
    windows = lax.ScatterDimensionNumbers(item_axes, (), (0,))  # adding 128 images of 12 kB: 1.8
    at = jnp.expand_dims(i, 1)
    rows = jnp.expand_dims(rows, 1)
    return lax.scatter(x, at, rows, windows, unique_indices=True, mode="drop")


def _put_one(i: Array, x: Array, row: Array) -> Array:
    """x.at[i].set(row) for `i` [1] in range, as a slice."""
    row = jnp.where(True, row, x[:1])  # on the mesh of x, which Explicit axes ask for
    return lax.dynamic_update_slice_in_dim(x, row, i[0], 0)  # on JAX 0.10.2, in a scan: 3.3


def _groups(tree: Array, i: Array) -> Array:
    """tree.reshape(-1, 4)[i] [B, 4], of a single one as a slice, as `_put_nodes` writes it."""
    if len(i) > 1:
        return _take(tree.reshape(-1, 4), i)
    return lax.dynamic_slice_in_dim(tree, 4 * i[0], 4)[None]


def _put_nodes(tree: Array, i: Array, nodes: Array) -> Array:
    """tree.at[i].set(nodes) for `i` in range. A single one waits, or XLA copies the tree for it."""
    if len(i) > 1:
        return tree.at[i].set(nodes, mode="promise_in_bounds")
    return _put_one(i, tree, lax.optimization_barrier(nodes))  # adding one in a scan: 2.4


def _random_below(bound: Array, bits: Array) -> Array:
    """floor(bound * r / 2**64) [B] uint32 of 64 random bits r each, `bits` [2, B] uint32."""
    n = bound.astype(uint32)  # below 2**30
    carried = _upper_half(bits[1], n)
    low = bits[0] * n + carried
    carry = (low < carried).astype(uint32)
    return _upper_half(bits[0], n) + carry  # instead of jax.random.randint, drawing 256 items: 2.7


def _upper_half(x: Array, y: Array) -> Array:
    """The upper 32 of the 64 bits of x * y, both uint32, from products of 16 bits."""
    x_high = x >> 16
    y_high = y >> 16
    x_low = x & 0xFFFF
    y_low = y & 0xFFFF
    high = x_high * y_low
    middle = x_low * y_high + (x_low * y_low >> 16) + (high & 0xFFFF)
    return x_high * y_high + (high >> 16) + (middle >> 16)


# -------------------------------------------------------------------------------------------- ring
def cursor_modulus(rows: int, envs: int) -> int:
    """What the cursor of a ring [T, N] counts modulo: a multiple of T; no index reaches 2**30."""
    return 2**30 // (rows * envs) * rows


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
    def slots(self) -> int:
        """Rows that fit, of all clusters."""
        return self.rows * self.clusters

    @property
    def modulus(self) -> int:
        """What the cursor counts modulo. Indices of all clusters must fit."""
        return cursor_modulus(self.rows, self.envs * self.clusters)


def _layout(
    max_size: Any, num_envs: Any = None, length: Any = None, period: Any = 1, debug: bool = False
) -> Layout:
    """The layout of these arguments of a factory, or an error that names sizes that work."""
    max_size = _positive("max_size", max_size)
    envs = 1 if num_envs is None else _positive("num_envs", num_envs)
    window = 1 if length is None else _positive("sequence_length", length)
    unit = envs * _positive("period", period)
    smallest = -(-window // period) * unit  # so that a window fits
    below = max(max_size // unit * unit, smallest)
    above = max(-(-max_size // unit) * unit, smallest)
    if max_size not in (below, above):
        sizes = f"{below} or {above}" if below < above else f"{below}"
        raise ValueError(
            f"max_size must be a multiple of num_envs * period = {envs} * {period}, and hold "
            f"{window} steps of each environment, got {max_size}: use {sizes}"
        )
    if max_size > 2**29:
        raise ValueError(f"max_size must be at most 2**29, which int32 can index, got {max_size}")
    streams = num_envs is not None
    sequences = length is not None
    return Layout(max_size // envs, envs, window, period, streams, sequences, debug)


def _as_rows(layout: Layout, name: str, storage: PyTree, items: PyTree, lead: tuple) -> PyTree:
    """Rows [L, N, ...] in the storage's dtypes, of items [*lead, ...] or [*lead, N, ...]."""
    length = lead[0] if lead else 1
    axes = "rows, " if lead else ""
    if layout.streams:
        lead = (*lead, layout.envs)
        axes += "num_envs, "
    _check_items(name, storage, items, lead, axes)
    return _reshaped(storage, items, length)


def _reshaped(storage: PyTree, items: PyTree, length: int) -> PyTree:
    """Rows [length, N, ...] in the storage's dtypes, of as many items in any shape."""

    def reshaped(leaf: Any, slots: Array) -> Array:
        shape = (length, *slots.shape[1:])
        return jnp.asarray(leaf, slots.dtype).reshape(shape)

    return tree_map(reshaped, items, storage)


def _length(rows: PyTree) -> int:
    """L of rows [L, ...]; 1 if these are not any."""
    shapes = [jnp.shape(leaf) for leaf in tree_leaves(rows)]
    return shapes[0][0] if shapes and shapes[0] else 1


def _advance(layout: Layout, ring: State, rows: PyTree, mask: Any = None) -> Advanced:
    """The state after `rows` [L, N, ...], but for its storage, and the slot [L] of each row.

    Rows that are left out, their `mask` [L] being False, or that newer ones of the same batch would
    overwrite, get slots past the end, all different, which are not written.
    """
    length = _length(rows)
    numpy: Any = jnp
    if mask is None:  # what is known is computed once, when this is traced
        numpy = np
        mask = np.ones(length, bool)
    rank = numpy.cumsum(mask, dtype=np.int32) - 1  # of each row, among those that are added
    count = numpy.sum(mask, dtype=np.int32)
    is_kept = mask & (rank >= count - layout.rows)
    slot = (ring.cursor + rank).astype(uint32) % layout.rows  # unsigned: see `_position`
    past_end = layout.slots + np.arange(length, dtype=np.int32)
    slot = jnp.where(is_kept, slot.astype(int32), past_end)
    cursor = (ring.cursor + count) % layout.modulus
    size = jnp.minimum(ring.size + count, layout.rows)
    return ring._replace(cursor=cursor, size=size), slot


def _position(layout: Layout, indices: Array) -> Array:
    """Where the item of each index stands in storage [T * N, ...]."""
    # Unsigned, here and in draws: a remainder that may be negative is a dozen operations a leaf.
    indices = indices.astype(uint32)
    cluster = indices % layout.clusters
    index = indices // layout.clusters
    position = cluster * layout.capacity + index % layout.capacity
    return position.astype(int32)


def _load(layout: Layout, storage: PyTree, indices: Array) -> PyTree:
    """The item at each index; in a buffer of sequences the W items from it, on an axis after."""
    if layout.sequences:
        steps = layout.envs * layout.clusters * jnp.arange(layout.window)
        steps = jnp.expand_dims(steps, range(indices.ndim))
        indices = jnp.expand_dims(indices, -1) + steps
    position = _position(layout, indices)
    return _items_at(storage, position)


def _items_at(storage: PyTree, position: Array) -> PyTree:
    return tree_map(lambda leaf: _take(lax.collapse(leaf, 0, 2), position), storage)


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
    oldest = cursor - size
    skipped = -oldest % layout.period
    starts = (size - skipped - layout.window + layout.period) // layout.period
    return jnp.maximum(starts, 0), oldest + skipped


def _uniform(layout: Layout, state: State, key: Array, count: int, cluster: Any) -> Choice:
    """Windows of a ring, all as likely: 64 random bits favour none by more than 2**-34 of that."""
    starts, first = _starts(layout, state.cursor[cluster], state.size[cluster])
    total = starts * layout.envs
    bits = jax.random.bits(key, (2, count), uint32)
    draw = _random_below(total, bits)
    first = (first + layout.modulus).astype(uint32)
    row = (first + layout.period * (draw // layout.envs)) % layout.modulus
    index = row * layout.envs + draw % layout.envs
    windows = total.astype(float32)
    probability = jnp.where(windows > 0, 1 / jnp.maximum(windows, 1), 0)
    return index.astype(int32), jnp.broadcast_to(probability, index.shape)


# ------------------------------------------------------------------- the functions of every buffer
def _has_start(layout: Layout, state: State) -> Array:
    return _starts(layout, state.cursor, state.size)[0] > 0


class Core(NamedTuple):
    """What makes one kind of buffer. A `state` here is one whose storage is left out."""

    layout: Layout
    empty: Callable = RingState  # () -> the state before the first row
    advance: Callable = _advance  # (layout, state, rows [L, N, ...], mask [L] or None) -> Advanced
    choose: Callable = _uniform  # (layout, state, key, B, cluster [B] or ...) -> Choice
    drawable: Callable = _has_start  # (layout, state) -> is there anything to draw, in each cluster
    set_priorities: Any = None  # (layout, state, indices [B], priorities [B]) -> state
    meant: Callable = lambda layout, state, i: i  # of indices `i` that a user gives, those meant
    gone: str = "an index is not in the buffer (any more)"
    cluster_axis: tuple = ()  # (-1,) if the counters have an axis K

    def init(self, item: PyTree) -> State:
        """Empty storage for items like `item`: arrays or Python scalars, of one environment."""
        if not tree_leaves(item):
            raise ValueError(f"init: the item has no arrays in it, got {item!r}")
        lead = (self.layout.slots, self.layout.envs)
        item = tree_map(jnp.asarray, item)
        storage = tree_map(lambda x: jnp.zeros(lead + x.shape, x.dtype), item)
        return self.empty()._replace(storage=storage)

    def add(self, state: State, item: PyTree) -> State:
        """The state with one more row: an item, or with `num_envs` a step [N, ...]."""
        _check_state(self, state)
        row = _as_rows(self.layout, "add", state.storage, item, ())
        return self.write(state, row, None)

    def add_batch(self, state: State, items: PyTree, mask: Any = None) -> State:
        """The state with more rows, in order: items [L, ...], or with `num_envs` [L, N, ...]. Those
        where `mask` [L] bool is False are left out. Of more than fit the newest are kept.
        """
        _check_state(self, state)
        length = _length(items)
        rows = _as_rows(self.layout, "add_batch", state.storage, items, (length,))
        dtype = getattr(mask, "dtype", type(mask).__name__)
        given = f"{dtype}{getattr(mask, 'shape', '')}"
        wanted = f"bool({length},)"
        if mask is not None and given != wanted:
            raise ValueError(f"add_batch: mask is {given}, expected bool and ({length},), by row")
        return self.write(state, rows, mask)

    def write(self, state: State, rows: PyTree, mask: Any) -> State:
        """The state after `rows` [L, N, ...], without those where `mask` [L] is False."""
        counters = state._replace(storage=())
        new, slot = self.advance(self.layout, counters, rows, mask)
        put = _put_one if mask is None and len(slot) == 1 else _put
        return new._replace(storage=tree_map(partial(put, slot), state.storage, rows))

    def sample(self, state: State, key: Array, batch_size: int) -> Sample:
        _check_state(self, state)
        counters = state._replace(storage=())
        indices, probabilities = self.choose(self.layout, counters, key, batch_size, ...)
        return Sample(_load(self.layout, state.storage, indices), indices, probabilities)

    def add_and_sample(self, state: State, items: PyTree, key: Array, batch_size: int) -> Any:
        state = self.add_batch(state, items)
        key = _key_after(key, state.size, state)
        return state, self.sample(state, key, batch_size)

    def get(self, state: State, indices: Array) -> PyTree:
        _check_state(self, state)
        indices = self.meant(self.layout, state, indices)
        return _load(self.layout, state.storage, indices)

    def are_stored(self, state: State, indices: Array, window: int = 1) -> Array:
        """Whether the `window` rows from each of the given indices are stored."""
        _check_state(self, state)
        indices = self.meant(self.layout, state, indices)
        cluster = indices % self.layout.clusters if state.cursor.ndim else ...
        index = indices // self.layout.clusters
        return _is_held(self.layout, state.cursor[cluster], state.size[cluster], index, window)

    def update_all(self, state: State, fn: Callable) -> State:
        """`fn` on every item."""
        _check_state(self, state)
        items = tree_map(lambda leaf: lax.collapse(leaf, 0, 2), state.storage)
        new = jax.vmap(fn)(items)
        lead = (self.layout.slots * self.layout.envs,)
        _check_items("update: fn's result", state.storage, new, lead, "max_size, ")
        return state._replace(storage=_reshaped(state.storage, new, self.layout.slots))

    def update_at(self, state: State, fn: Callable, indices: Array, args: tuple) -> State:
        """`fn` on the items at `indices` [B], which must be held to be written."""
        _check_state(self, state)
        if indices.ndim != 1:
            raise ValueError(f"update: indices must have shape [B], got {indices.shape}")
        layout = self.layout
        position = _position(layout, self.meant(layout, state, indices))
        new = jax.vmap(fn)(_items_at(state.storage, position), *args)
        _check_items("update: fn's result", state.storage, new, position.shape, "indices, ")
        is_stored = self.are_stored(state, indices)
        slot = jnp.where(is_stored, position // layout.envs, layout.slots)
        env = position % layout.envs
        storage = tree_map(lambda x, y: x.at[slot, env].set(y, mode="drop"), state.storage, new)
        return state._replace(storage=storage)

    def weigh(self, state: State, indices: Array, priorities: Array) -> State:
        _check_state(self, state)
        priorities = priorities.reshape(-1).astype(float32)
        return self.set_priorities(self.layout, state, indices.reshape(-1), priorities)

    def indices(self, state: State) -> tuple[Array, Array]:
        """The indices of all items, oldest first: (indices [max_size] int32, is_held [max_size]
        bool), for `get`, `update` and `set_priorities`. The items held come first, then an index
        of -1 for each place that is still empty. In a clustered buffer this is so for each cluster,
        one after the other. With `sequence_length` W a window that can be drawn begins at each item
        held but the last (W - 1) * num_envs; with `period` only where index // num_envs (of a
        clustered buffer index // K // num_envs) is a multiple of it.
        """
        _check_state(self, state)
        layout = self.layout
        place = jnp.arange(layout.capacity, dtype=int32)[None]  # in a ring, from its oldest item
        is_held = place // layout.envs < state.size.reshape(-1, 1)
        oldest = (state.cursor - state.size).reshape(-1, 1)
        row = (oldest + place // layout.envs) % layout.modulus
        cluster = jnp.arange(layout.clusters, dtype=int32)[:, None]
        index = (row * layout.envs + place % layout.envs) * layout.clusters + cluster
        return jnp.where(is_held, index, -1).ravel(), is_held.ravel()

    def size(self, state: State) -> Array:
        """Items held, over all environments: [] int32."""
        return state.size.sum(axis=self.cluster_axis, dtype=int32) * self.layout.envs

    def can_sample(self, state: State, min_size: Any = 1) -> Array:
        """Whether something can be drawn, and at least `min_size` items are held: [] bool."""
        is_drawable = self.drawable(self.layout, state).any(axis=self.cluster_axis)
        return is_drawable & (self.size(state) >= min_size)


def _replay(core: Core, donate: bool) -> Replay:
    """The functions above with this core, compiled. Called from Python they check values first."""
    jit = partial(jax.jit, donate_argnames="state" if donate else None)
    sample, add_and_sample = _draws(core, jit)
    get, update = _access(core, jit)
    set_priorities = None
    if core.set_priorities:
        set_priorities = _priority_setter(core, jit)
    return Replay(
        init=jax.jit(core.init),
        add=jit(core.add),
        add_batch=jit(core.add_batch),
        sample=sample,
        add_and_sample=add_and_sample,
        get=get,
        update=update,
        indices=jax.jit(core.indices),
        size=jax.jit(core.size),
        can_sample=jax.jit(core.can_sample),
        set_priorities=set_priorities,
        core=core,
    )


def _draws(core: Core, jit: Callable) -> tuple[Callable, Callable]:
    """`sample` and `add_and_sample`."""
    check_drawable = _drawable_check(core)
    sample_in_jit = jax.jit(core.sample, static_argnames="batch_size")
    add_and_sample_in_jit = jit(core.add_and_sample, static_argnames="batch_size")

    def sample(state: State, key: Array, batch_size: int) -> Sample:
        """Draws `batch_size`, which is static, with replacement. With nothing to draw: ValueError;
        inside jit the contents of some slot, with probability 0.
        """
        count = _positive("sample(state, key, batch_size): batch_size", batch_size)
        check_drawable("sample", state)
        return sample_in_jit(state, key, count)

    def add_and_sample(state: State, items: PyTree, key: Array, batch_size: int) -> Any:
        """`add_batch` and then `sample`, in one dispatch: (state, Sample)."""
        count = _positive("add_and_sample(state, items, key, batch_size): batch_size", batch_size)
        check_drawable("add_and_sample", state, items)
        return add_and_sample_in_jit(state, items, key, count)

    return sample, add_and_sample


def _access(core: Core, jit: Callable) -> tuple[Callable, Callable]:
    """`get` and `update`, which take indices."""
    are_stored = jax.jit(core.are_stored, static_argnames="window")
    get_in_jit = jax.jit(core.get)
    update_all_in_jit = jit(core.update_all, static_argnames="fn")
    update_at_in_jit = jit(core.update_at, static_argnames="fn")

    def check_stored(name: str, state: State, indices: Any, window: int) -> None:
        if _is_checked(core.layout, state.size, indices):
            _check(are_stored(state, indices, window), f"{name}: {core.gone}", size=state.size)

    def get(state: State, indices: Any) -> PyTree:
        """What `sample` gave for `indices`, [*indices.shape, ...]; in a circular buffer 0 is the
        oldest. For an index that is not there (any more): ValueError; inside jit some contents.
        """
        indices = _as_indices("get", indices)
        check_stored("get", state, indices, core.layout.window)
        return get_in_jit(state, indices)

    def update(state: State, fn: Callable, indices: Any = None, *args: PyTree) -> State:
        """The state with each item replaced by `fn(item, *args)`: every item, or those at `indices`
        [B] (of a window its first), each with its row of `args` [B, ...]. `fn` is static: define it
        once and pass what changes in `args`. For an index that is not in the buffer (any more):
        ValueError; inside jit it is ignored. One that is given twice is written once.
        """
        if indices is not None:
            indices = jnp.atleast_1d(_as_indices("update", indices))
            check_stored("update", state, indices, 1)
            return update_at_in_jit(state, fn, indices, args)
        if args:
            raise TypeError("update: args go with indices, a row for each; got no indices")
        return update_all_in_jit(state, fn)

    return get, update


def _drawable_check(core: Core) -> Callable:
    """The function that raises unless there is something to draw, once `items` are added."""
    layout = core.layout
    size = jax.jit(core.size)
    can_sample = jax.jit(core.can_sample)
    wanted = f"sequence_length={layout.window} steps from a multiple of period={layout.period}"
    wanted += ", of a priority above 0" if core.set_priorities else ""

    @jax.jit
    def after(state: State, items: PyTree) -> State:
        return core.add_batch(state, items)._replace(storage=())

    def is_known(state: State) -> bool:
        """Whether one number tells already, which is read faster than any function is called."""
        if core.set_priorities:
            return np.asarray(state.top).item(-4) >= TINY
        return np.asarray(state.size).item(0) >= layout.window + layout.period - 1

    def check(name: str, state: State, items: PyTree = None) -> None:
        is_checked = _is_checked(layout, state.size)
        is_traced = isinstance(state.size, Tracer)
        stays = items is None or layout.period == 1  # else the items may overwrite the only window
        if not is_checked or (stays and not is_traced and is_known(state)):
            return
        _check_state(core, state)
        if items is not None:
            state = after(state, items)
        message = f"{name}: nothing to draw, {{size}} items held; a draw takes {wanted}"
        _check(can_sample(state), message, size=size(state))

    return check


def _priority_setter(core: Core, jit: Callable) -> Callable:
    set_in_jit = jit(core.weigh)

    def set_priorities(state: State, indices: Any, priorities: Any) -> State:
        """The state with `priorities` [B] of the items, or of the windows that start, at `indices`
        [B]: before the exponent, such as abs(TD error) + epsilon. Indices that were overwritten, or
        where no window begins, are ignored; one that is given twice gets one of its priorities.
        Negative, infinite or NaN: ValueError; inside jit that row is ignored.
        """
        indices = _as_indices("set_priorities", indices)
        if not isinstance(priorities, Array):
            priorities = np.asarray(priorities, np.float32)
        if priorities.shape != indices.shape or indices.ndim > 1:
            shapes = f"got {indices.shape} and {priorities.shape}"
            raise ValueError(f"set_priorities: indices and priorities must both be [B], {shapes}")
        if _is_checked(core.layout, priorities):
            numpy = jnp if core.layout.debug else np
            given = numpy.asarray(priorities)
            ok = (given >= 0) & (given < np.inf)
            _check(ok, "set_priorities: priorities must be 0 or more, and finite: one is not")
        # Without the storage, which does not change: to pass an array costs a microsecond.
        new = set_in_jit(state._replace(storage=()), indices, priorities)
        return new._replace(storage=state.storage)

    return set_priorities


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
        is_held = (i >= 0) & (i < state.size)
        oldest = state.cursor - state.size
        return jnp.where(is_held, (oldest + i) % layout.modulus, -1)

    gone = "indices must be from 0 (oldest) to size - 1, and size is {size}"
    core = Core(layout, meant=meant, gone=gone)
    ring = _replay(core, donate)  # of which a queue has what does not draw

    @jax.jit
    def can_add(state: RingState, n: Any) -> Array:
        """Whether n more items fit without loss: [] bool."""
        return state.size + n <= max_size

    @jax.jit
    def can_pop(state: RingState, n: Any) -> Array:
        """Whether n items are held: [] bool."""
        return state.size >= n

    return CircularBuffer(
        init=ring.init,
        add=ring.add,
        add_batch=ring.add_batch,
        pop=_popper(core, can_pop, donate),
        get=ring.get,
        update=ring.update,
        size=ring.size,
        can_add=can_add,
        can_pop=can_pop,
        max_size=max_size,
    )


def _popper(core: Core, can_pop: Callable, donate: bool) -> Callable:
    """`pop` of a circular buffer."""
    max_size = core.layout.capacity

    @partial(jax.jit, static_argnames="n", donate_argnames="state" if donate else None)
    def compiled_pop(state: RingState, n: int) -> Any:
        items = core.get(state, jnp.arange(n))
        size = jnp.maximum(state.size - n, 0)
        return state._replace(size=size), items

    def pop(state: RingState, n: int) -> Any:
        """(state, items [n, ...]): the n oldest, oldest first; `n` is static. With fewer than n
        held: ValueError; inside jit all are removed, and the rows of `items` after them are stale.
        """
        if _positive("n", n) > max_size:
            raise ValueError(f"pop: n is {n}, but at most max_size = {max_size} items are held")
        if _is_checked(core.layout, state.size):
            ok = can_pop(state, n)
            _check(ok, "pop: {n} items asked for, but {size} held", n=n, size=state.size)
        return compiled_pop(state, n)

    return pop


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
        environment. They never cross the write position, but they do cross the ends of episodes:
        store a flag that marks these. None: `sample` gives items [B, ...].
      period: windows start at steps whose count since the first is a multiple of it;
        `period=sequence_length` gives windows that do not overlap.
      donate: whether functions that return a state work in place and use up the one they are given.
        False keeps old states alive, at the cost of copying the storage each call.
      debug: whether mistakes in values, inside jit, are errors under checkify.

    Raises TypeError or ValueError for sizes that are not ints of at least 1, and for a `max_size`
    over 2**29, too small for a window, or not a multiple of num_envs * period.
    """
    layout = _layout(max_size, num_envs, sequence_length, period, debug)
    return _replay(Core(layout), donate)


# ---------------------------------------------------------------------------------------- sum tree
# `tree` has a weight for each position, then further levels: node i of a level is the sum of nodes
# 4 i to 4 i + 3 of the one before, recomputed when one changes: differences would leave rounding
# errors. Levels are padded to a multiple of 4. Those of at most TOP nodes are in `top`, summed anew
# as a whole; the last one has 4.
TOP = 256
# With 24 bits a float32 tells the nodes of this many levels (2**14) apart, and not those of many
# more: a single number would favour some of ten million items and miss others.
LEVELS_PER_DRAW = 7


class Level(NamedTuple):
    """Where a level of the tree is, in groups of 4 nodes that have the same parent."""

    in_top: bool  # in `top`, otherwise in `tree`
    start: int  # its first group
    groups: int


def _levels(positions: int) -> list[Level]:
    """The levels of a tree of so many positions, from these up."""
    levels: list[Level] = []
    nodes = positions
    while len(levels) < 2 or nodes > 1:
        in_top = len(levels) > 0 and nodes <= TOP
        start = sum(level.groups for level in levels if level.in_top == in_top)
        groups = -(-nodes // 4)
        levels.append(Level(in_top, start, groups))
        nodes = groups
    return levels


def _sums(groups: Array) -> Array:
    """[B], the sum of each of `groups` [B, 4]."""
    first_pair = groups[:, 0] + groups[:, 1]
    second_pair = groups[:, 2] + groups[:, 3]
    return first_pair + second_pair


def _set_weights(
    state: State, levels: list[Level], positions: Array, weights: Array, where: Array
) -> State:
    """The state with `weights` [B] at `positions` [B], in the rows where `where` [B] is True."""
    if len(positions) == 0:
        return state
    node = jnp.where(where, positions, 0).astype(uint32)  # the sums above 0 stay right
    if len(node) == 1:
        old = lax.dynamic_slice_in_dim(state.tree, node[0], 1)
        tree = _put_nodes(state.tree, node, jnp.where(where, weights, old))
    else:
        at = jnp.where(where, positions, state.tree.size)
        tree = state.tree.at[at].set(weights, mode="drop")
    in_tree = [level for level in levels if not level.in_top]
    for below, level in itertools.pairwise(in_tree):
        node = _computed_once(node // 4)
        children = _groups(tree, below.start + node)
        sums = _sums(children)
        tree = _put_nodes(tree, 4 * level.start + node, sums)
    last = in_tree[-1]
    nodes = tree[4 * last.start : 4 * (last.start + last.groups)]
    top = []
    for level in levels[len(in_tree) :]:
        sums = _sums(nodes.reshape(-1, 4))
        nodes = jnp.pad(sums, (0, 4 * level.groups - len(sums)))
        top.append(nodes)
    return state._replace(tree=tree, top=jnp.concatenate(top))


def _draw_positions(state: State, capacity: int, key: Array, count: int, cluster: Any) -> Choice:
    """Positions [B] uint32 in proportion to their weights, one from each of B equal shares.

    Stratified as in Schaul et al. 2016, section 3.3. With their probabilities; both are 0 if no
    weight is above 0. `cluster` [B] int32 has the tree of each draw; ... if there is only one.
    """
    _, *levels = reversed(_levels(capacity))  # below the root, which is the last one
    numbers = -(-(1 + len(levels)) // LEVELS_PER_DRAW)
    uniform = jax.random.uniform(key, (numbers, count))
    fraction = (jnp.arange(count, dtype=float32) + uniform[0]) / count  # of the node's weight
    tree = np.uint32(0) if cluster is ... else cluster.astype(uint32)
    root = state.top[..., -4:][cluster]
    children = jnp.broadcast_to(root, (count, 4))
    node, fraction = _choose_child(children, fraction)
    for depth, level in enumerate(levels, start=1):
        nodes = state.top if level.in_top else state.tree
        first = tree * (nodes.shape[-1] // 4) + level.start
        children = _take(nodes.reshape(-1, 4), first + node)
        if depth % LEVELS_PER_DRAW == 0:
            fraction = uniform[depth // LEVELS_PER_DRAW]
        child, fraction = _choose_child(children, fraction)
        node = _computed_once(4 * node + child)
        # Else XLA computes this level once more for each below it: in a scan 1.25 times as long.
        node, fraction = lax.optimization_barrier((node, fraction))
    first = tree * state.tree.shape[-1]
    weight = _take(state.tree.ravel(), first + node)
    total = root.sum(axis=-1)
    probabilities = weight / jnp.where(total > 0, total, 1)
    # They wait for the reads: else a scan that draws and sets copies the tree, 4 times as long.
    return jnp.where(probabilities >= 0, node, 0), probabilities


def _choose_child(weights: Array, fraction: Array) -> tuple[Array, Array]:
    """Which of 4 children, of `weights` [B, 4], is at a fraction [B] of their sum: [B] uint32.

    And at which fraction of that child's weight. First it is the left or the right pair, then one
    of it, never the right one if that has no weight: it would be drawn where sums were rounded.
    """
    a, b, c, d = weights.T
    target = fraction * _sums(weights)
    is_right = (target >= a + b) & (c + d > 0)
    target = jnp.where(is_right, target - (a + b), target)
    first = jnp.where(is_right, c, a)
    second = jnp.where(is_right, d, b)
    is_second = (target >= first) & (second > 0)
    target = jnp.where(is_second, target - first, target)
    child = 2 * is_right.astype(uint32) + is_second.astype(uint32)
    return child, target / jnp.where(is_second, second, first)


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
    priority_exponent = float(priority_exponent)
    if not 0 <= priority_exponent < np.inf:
        raise ValueError(f"priority_exponent must be 0 or more, got {priority_exponent}")
    # Whatever the priorities are, no sum overflows, nor does 1 / sum underflow.
    largest = np.finfo(np.float32).max / (8 * layout.capacity)

    def weight(priorities: Array) -> Array:
        return jnp.minimum(priorities**priority_exponent, largest)

    core = Core(
        layout,
        empty=partial(_empty_tree, layout.capacity),
        advance=partial(_advance_prioritised, weight),
        choose=_choose_prioritised,
        drawable=_has_weight,
        set_priorities=partial(_set_priorities_of, weight),
    )
    return _replay(core, donate)


def _empty_tree(capacity: int) -> PrioritisedState:
    """The state of a buffer without items: all sums of the tree are 0."""
    levels = _levels(capacity)
    tree_size = 4 * sum(level.groups for level in levels if not level.in_top)
    top_size = 4 * sum(level.groups for level in levels if level.in_top)
    tree = jnp.zeros(tree_size, float32)
    return PrioritisedState(tree=tree, top=jnp.zeros(top_size, float32))


def _advance_prioritised(
    weight: Callable, layout: Layout, state: State, rows: PyTree, mask: Any = None
) -> Advanced:
    """As `_advance`, with the weights of windows that can now be drawn, or cannot any more."""
    new, slots = _advance(layout, state, rows, mask)
    length = _length(rows)
    count = length if mask is None else jnp.sum(mask, dtype=int32)
    # Row k counts from the first of these; windows that it completes start up to W - 1 before it.
    k = jnp.arange(1 - layout.window, length)
    is_changed = (k >= -state.size) & (k >= count - layout.rows) & (k < count)
    row = state.cursor + k
    is_start = (k <= count - layout.window) & (row % layout.period == 0)
    new_weight = weight(jnp.where(state.max_priority > 0, state.max_priority, 1))
    weights = jnp.repeat(jnp.where(is_start, new_weight, 0), layout.envs)
    is_changed = jnp.repeat(is_changed, layout.envs)
    slot = row % layout.rows
    env = jnp.arange(layout.envs)[None]
    positions = (slot[:, None] * layout.envs + env).reshape(-1)
    new = _set_weights(new, _levels(layout.capacity), positions, weights, is_changed)
    return new, slots


def _choose_prioritised(
    layout: Layout, state: State, key: Array, count: int, cluster: Any
) -> Choice:
    """Windows in proportion to their weights, of all of its ring."""
    positions, probabilities = _draw_positions(state, layout.capacity, key, count, cluster)
    slot = positions // layout.envs
    env = positions % layout.envs
    newest = (state.cursor[cluster] + layout.modulus - 1).astype(uint32)
    row = (newest - (newest - slot) % layout.rows) % layout.modulus  # the last written to that slot
    return (row * layout.envs + env).astype(int32), probabilities


def _has_weight(layout: Layout, state: State) -> Array:
    return state.top[..., -4:].sum(axis=-1) > 0


def _set_priorities_of(
    weight: Callable, layout: Layout, state: State, indices: Array, priorities: Array
) -> State:
    """The state with the weights of these priorities, where both can be used."""
    is_start = indices // layout.envs % layout.period == 0
    is_priority = (priorities >= 0) & (priorities < jnp.inf)
    is_held = _is_held(layout, state.cursor, state.size, indices, layout.window)
    is_used = is_held & is_start & is_priority
    largest = jnp.max(jnp.where(is_used, priorities, 0), initial=0)
    positions = indices % layout.capacity
    levels = _levels(layout.capacity)
    state = _set_weights(state, levels, positions, weight(priorities), is_used)
    return state._replace(max_priority=jnp.maximum(state.max_priority, largest))


def importance_weights(probabilities: Any, size: Any, beta: Any) -> Array:
    """(size * P)**-beta, divided by the largest of the batch: Schaul et al. 2016, section 3.4.

    Args:
      probabilities: [B], of a `Sample`. Where one is 0, nothing was drawn: that weight is 0.
      size: items that could have been drawn, such as `replay.size(state)`. The division cancels it.
      beta: how much of the bias is corrected, from 0 (nothing, all weights are 1) to 1.

    Returns [B] float32, from 0 to 1.
    """
    probabilities = jnp.asarray(probabilities)
    size = jnp.asarray(size, float32)
    beta = jnp.asarray(beta, float32)
    is_drawn = probabilities > 0
    scaled = jnp.where(is_drawn, size * probabilities, 1)
    weights = jnp.where(is_drawn, scaled**-beta, 0)
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
    The state is that of `cluster_buffer` with an axis K in front, and storage [K * T, N, ...].

    Args:
      num_clusters: K.
      cluster_buffer: a `uniform_replay` or a `prioritised_replay`, with streams or without, of the
        size of one cluster; its donate and debug do not count. Each has a max_priority of its own.
        Neighbours in a cluster are not consecutive steps: store windows or episodes as items.
      clustering_fn: gives the cluster, an integer from 0 to K - 1 or a bool, of what `add` takes:
        an item, or a step of N environments. One outside of that counts as the nearest.
      distribution_power: a cluster is drawn in proportion to the number of items that a draw may
        start at, to this power, from -4 to 4: 0 draws all clusters alike that have any, 1 as one
        uniform buffer.
      donate, debug: as in `uniform_replay`.

    Raises TypeError or ValueError if an argument is none of these, `cluster_buffer` has a
    `sequence_length` above 1, or all clusters together hold more than 2**29 items.
    """
    clusters = _positive("num_clusters", num_clusters)
    inner = _core_of_cluster(cluster_buffer, clusters)
    distribution_power = float(distribution_power)
    if not abs(distribution_power) <= 4:
        raise ValueError(f"distribution_power must be from -4 to 4, got {distribution_power}")
    layout = inner.layout._replace(clusters=clusters, debug=debug)
    core = Core(
        layout,
        empty=partial(_empty_clusters, inner, clusters),
        advance=partial(_advance_clusters, inner, clustering_fn),
        choose=partial(_choose_clustered, inner, distribution_power),
        drawable=inner.drawable,
        set_priorities=partial(_set_clustered, inner) if inner.set_priorities else None,
        cluster_axis=(-1,),
    )
    return _replay(core, donate)


def _core_of_cluster(cluster_buffer: Any, clusters: int) -> Core:
    """What `cluster_buffer` is made of, or an error if it cannot be that of so many clusters."""
    core = getattr(cluster_buffer, "core", None)
    if core is None or core.cluster_axis:
        given = type(cluster_buffer).__name__
        raise TypeError(f"cluster_buffer must be a uniform or a prioritised replay, got {given}")
    if core.layout.window > 1:
        raise TypeError(
            f"cluster_buffer has sequence_length={core.layout.window}, but the steps of a cluster "
            "do not follow each other: leave it out, and store whole windows or episodes as items"
        )
    if core.layout.capacity * clusters > 2**29:
        raise ValueError(f"{clusters} times {core.layout.capacity} items are more than 2**29")
    return core


def _empty_clusters(core: Core, clusters: int) -> State:
    """The state of so many clusters without items."""
    return tree_map(lambda x: jnp.broadcast_to(x, (clusters, *x.shape)), core.empty())


def _advance_clusters(
    inner: Core, clustering_fn: Callable, layout: Layout, state: State, rows: PyTree, mask: Any
) -> Advanced:
    """Every cluster advances by all rows, of which those of others are left out."""
    items = rows if layout.streams else tree_map(lambda leaf: leaf[:, 0], rows)
    cluster = jnp.asarray(jax.vmap(clustering_fn)(items))  # [L]
    is_integer = cluster.dtype == bool or jnp.issubdtype(cluster.dtype, jnp.integer)
    if cluster.ndim != 1 or not is_integer:
        given = jax.typeof(cluster)
        raise TypeError(f"clustering_fn must return one integer or bool, got {given}")
    if cluster.dtype.itemsize < 4:  # slots are computed in it
        cluster = cluster.astype(int32)
    cluster = jnp.clip(cluster, 0, layout.clusters - 1)
    is_member = jax.nn.one_hot(cluster, layout.clusters, dtype=bool, axis=0)  # [K, L]
    if mask is not None:
        is_member &= mask[None]
    advance = partial(inner.advance, layout, rows=rows)
    new, slots = jax.vmap(lambda s, m: advance(s, mask=m))(state, is_member)  # slots [K, L]
    slot = jnp.min(slots, axis=0)  # past the end in all rings but that of its cluster
    is_kept = slot < layout.rows
    return new, jnp.where(is_kept, layout.rows * cluster + slot, slot)


def _choose_clustered(
    inner: Core, power: float, layout: Layout, state: State, key: Array, count: int, _: Any
) -> Choice:
    """For each draw a cluster, then a window of it."""
    cluster_key, key = jax.random.split(key)
    starts = _starts(layout, state.cursor, state.size)[0]
    weights = starts.astype(float32) ** power
    weights = jnp.where(inner.drawable(layout, state), weights, 0)
    # As jax.random.choice, but all comparisons at once, and the sum taken from what it adds up:
    sums = jnp.cumsum(weights)
    uniform = jax.random.uniform(cluster_key, (count,))
    target = sums[-1] * (1 - uniform)
    cluster = jnp.searchsorted(sums, target, method="compare_all")
    share = weights[cluster] / jnp.maximum(sums[-1], TINY)
    key = _key_after(key, cluster, cluster)
    indices, probabilities = inner.choose(layout, state, key, count, cluster)
    return indices * layout.clusters + cluster, share * probabilities


def _set_clustered(
    inner: Core, layout: Layout, state: State, indices: Array, priorities: Array
) -> State:
    """Every cluster sets all priorities, with index -1 for those of others."""
    cluster = indices % layout.clusters
    index = indices // layout.clusters
    is_member = jax.nn.one_hot(cluster, layout.clusters, dtype=bool, axis=0)  # [K, B]
    index_in = jnp.where(is_member, index[None], -1)
    set_inner = partial(inner.set_priorities, layout, priorities=priorities)
    return jax.vmap(lambda s, i: set_inner(s, indices=i))(state, index_in)


# ------------------------------------------------------- after a draw, and minibatches of a rollout
def n_step_return(
    reward: Any, terminated: Any, truncated: Any, gamma: float
) -> tuple[Array, Array, Array]:
    """Discounted sums of the rewards of n steps, or of fewer where an episode ends.

    r_0 + gamma r_1 + ... + gamma**(m - 1) r_(m - 1), where m is n, or the number of steps up to the
    first that terminated or was truncated (Sutton and Barto 2018, section 7.1). To bootstrap, add
    discount * V(s_m), where s_m is the observation after step m - 1.

    Args:
      reward: [B, n] float32, of consecutive steps of one environment.
      terminated, truncated: [B, n] bool.
      gamma: discount factor of one step.

    Returns three arrays [B]: the sums, float32; the discount of the value that follows, float32,
    gamma**m, and 0 if terminated; and m, the steps taken, int32, 1 to n.
    """
    n = reward.shape[1]
    is_end = (terminated | truncated).astype(int32)
    ends_before = jnp.cumsum(is_end, axis=1) - is_end
    is_taken = ends_before == 0
    steps = jnp.sum(is_taken, axis=1, dtype=int32)
    powers = float32(gamma) ** jnp.arange(n, dtype=float32)
    taken = jnp.where(is_taken, reward, 0)
    total = jnp.sum(taken * powers[None], axis=1)
    is_terminated = jnp.any(is_taken & terminated, axis=1)
    discount = float32(gamma) ** steps.astype(float32)
    return total, jnp.where(is_terminated, 0, discount), steps


def stack_frames(frames: Any, count: int, mask: Any) -> Any:
    """Turns windows of single observations into windows of stacks: an episode's last K of them.

    So an image is stored once and not in K stacks (Mnih et al. 2015, Methods, "Preprocessing").

    Args:
      frames: [B, W, ...], the observations of W consecutive steps.
      count: K, 1 to W. With 1 the frames are returned as they are.
      mask: [B, W] bool, False for a step that only resets. In the stacks after it, zeros stand for
        the observations up to it.

    Returns [B, W - K + 1, K, ...], the stack of each step from the K-th on, the newest frame last.
    """
    if count == 1:
        return frames
    stacks = []
    no_frame = jnp.zeros((), frames.dtype)
    for last in range(count - 1, frames.shape[1]):
        first = last - count + 1
        is_step = mask[:, first:last].astype(int32)
        goes_on = lax.cumprod(is_step, axis=1, reverse=True)
        is_kept = jnp.pad(goes_on > 0, ((0, 0), (0, 1)), constant_values=True)
        is_kept = jnp.expand_dims(is_kept, range(2, frames.ndim))
        stacks.append(jnp.where(is_kept, frames[:, first : last + 1], no_frame))
    return jnp.stack(stacks, axis=1)


def shuffled_minibatches(key: Array, rows: int, epochs: int, num_minibatches: int) -> Array:
    """Random orders of rows: [epochs, num_minibatches, rows // num_minibatches] int32, by a sort.

    ValueError if `num_minibatches` does not divide `rows`.
    """
    if rows % num_minibatches:
        raise ValueError(f"rows must be a multiple of {num_minibatches=}, got {rows}: change one")
    row = jnp.arange(rows, dtype=uint32)
    low_bits = (rows - 1).bit_length()  # those that a row's number takes
    random = jax.random.bits(key, (epochs, rows), uint32)
    if low_bits > 16:  # what is left of the random bits would be too few to shuffle by
        row_of = jnp.broadcast_to(row[None], random.shape)
        _, order = lax.sort((random, row_of), dimension=1, is_stable=False, num_keys=1)
    else:
        keys = (random >> low_bits << low_bits) | row[None]
        order = jnp.sort(keys, axis=1, stable=False) % (1 << low_bits)
    return order.astype(int32).reshape(epochs, num_minibatches, -1)
