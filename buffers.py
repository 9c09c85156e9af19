"""Replay buffers for JAX: pure, jitted functions over pytrees of arrays. CleanReplay, MIT license.

A buffer is a frozen dataclass: a configuration with jitted methods. They take and return a state, a
NamedTuple of arrays only, so it can be jitted, vmapped, sharded, donated and saved:

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

The terms, with a ring of N = 3 environments and T = 4 slots as an example, after 5 rows:

               env 0   env 1   env 2
    slot 0   |  12   |  13   |  14   |  row 4, the newest: cursor - 1
    slot 1   |   3   |   4   |   5   |  row 1, the oldest: the next row goes here, slot cursor % T
    slot 2   |   6   |   7   |   8   |  row 2
    slot 3   |   9   |  10   |  11   |  row 3

  row       one time step of all environments, or one item (N = 1). Rows are numbered from 0 in the
            order in which they are added; cursor is the number of the next row.
  slot      the place of a row in the storage, whose leaves are [T, N, ...]: row % T.
  index     the number of an item, shown in the table: row * N + env. It identifies this item also
            after it was overwritten. In a circular buffer index i is the i-th oldest item instead.
  position  the place of an item, and of its weight, in arrays [T * N, ...]: index % (T * N).
  modulus   row numbers wrap at this multiple of T, so that no index overflows int32.
  sequence  W consecutive rows of one environment (sequence_length; `window` in the code). Its index
            is that of its first item.
  cluster   one of the K rings of a clustered buffer. Their storage is one array [K * T, N, ...],
            and an index is (index in the ring) * K + cluster.
  counters  a state without its storage.

Other shape letters: L rows added, B items sampled.

Wrong structures, shapes and dtypes raise when a function is traced. Invalid values (a sample from
an empty buffer, an overwritten index) raise ValueError if they are concrete arrays. Inside
`jax.jit` they raise nothing and leave the state intact; with `debug=True` they are errors under
`jax.experimental.checkify`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property, partial, wraps
from types import MethodType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.experimental import checkify
from jax.numpy import float32, int32, uint32
from jax.tree_util import (
    keystr,
    tree_flatten,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_structure,
    tree_unflatten,
)

PyTree = Any
State = Any  # a RingState or a PrioritisedState
TINY = float(np.finfo(np.float32).tiny)
PYTHON = {int: np.number, float: np.inexact}  # Python's numbers, and the dtypes for them
NUMPY = (np.ndarray, np.generic)


# ------------------------------------------------------------------------------------------- types
class RingState(NamedTuple):
    """The state of `circular_buffer` and `uniform_replay`: the last T rows added.

    In a clustered buffer the storage is [K * T, N, ...], and all else has a leading axis K.
    """

    storage: PyTree = ()  # leaves [T, N, ...]
    cursor: Any = np.int32(0)  # [] number of the next row, modulo `modulus`
    size: Any = np.int32(0)  # [] rows held, 0 to T


class PrioritisedState(NamedTuple):
    """The state of `prioritised_replay`: a `RingState`, and the weights to sample by."""

    storage: PyTree = ()  # leaves [T, N, ...]
    cursor: Any = np.int32(0)  # []
    size: Any = np.int32(0)  # []
    tree: Any = ()  # levels of a sum tree of the weights of all positions, see `tree_init`
    max_priority: Any = np.float32(0)  # [] the largest ever set; 0 before the first


class Sample(NamedTuple):
    """A batch, as `sample` returns it."""

    experience: PyTree  # leaves [B, ...], with `sequence_length` [B, W, ...]
    indices: Array  # [B] int32, for `get`, `update` and `set_priorities`
    probabilities: Array  # [B] float32, of sampling each; 0 if nothing could be sampled


# --------------------------------------------------------------------------------- compiled methods
def _explains_donation(function: Callable) -> Callable:
    """Wraps `function`, so that it explains JAX's error for a donated state."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, ValueError) as error:
            if "deleted" not in str(error):  # JAX has no class for this error
                raise
            hint = (
                "the state was donated to an earlier call, which changed it in place, and has been "
                "deleted: continue with what that call returned, as in state = buffer.add(state, "
                "item), or make the buffer with donate=False"
            )
            raise RuntimeError(hint) from error

    return call


def _compiled(*, donates: bool = False, static: Any = None) -> Callable:
    """Compiles a method with `jax.jit`, for each buffer by itself, at its first use.

    So each buffer donates as it is configured, and its programs are freed together with it.

    Args:
      donates: whether the method works in place and uses up its argument `state`.
      static: the name of an argument that is a constant of the program.
    """

    def decorate(method: Callable) -> Any:
        def compiled(buffer: Any) -> Callable:
            donated = "state" if donates and buffer.donate else None
            method_of_it = MethodType(method, buffer)
            jitted = jax.jit(method_of_it, static_argnames=static, donate_argnames=donated)
            return _explains_donation(jitted)

        compiled.__doc__ = method.__doc__
        return cached_property(compiled)

    return decorate


# ---------------------------------------------------------------------- the methods of all buffers
class Buffer:
    """The methods of every buffer. Its `num_slots` rows are stored in arrays [num_slots, N, ...].

    Buffers of the same configuration are equal. A buffer can be pickled, and can be a static
    argument of `jax.jit`.
    """

    donate: bool
    debug: bool
    max_size: int  # items that fit, over all environments
    num_slots: int  # T, in a clustered buffer K * T
    envs: int  # N
    window: int  # W
    has_env_axis: bool  # whether `num_envs` was given: `add` takes steps [N, ...]
    has_time_axis: bool  # whether `sequence_length` was given: samples are [B, W, ...]
    counter_axes = 0  # 1 in a clustered buffer, whose counters are [K]
    state_type: Any = RingState
    gone = "an index is not in the buffer (any more)"

    # What subclasses define.

    def _empty(self) -> State:
        """Returns the counters of a buffer without items."""
        raise NotImplementedError

    def _advance(self, counters: State, rows: PyTree, mask: Any) -> tuple[State, Array]:
        """Returns the counters after `rows` [L, N, ...], and the slots [L] to write them to.

        A row that `mask` [L] leaves out, or a newer row would overwrite, gets a slot past the end.
        All slots differ, as `_put` promises to XLA.
        """
        raise NotImplementedError

    def _position(self, indices: Array) -> Array:
        """Returns the place of each item of `indices` [...] in storage [num_slots * N, ...]."""
        raise NotImplementedError

    def _is_stored(self, counters: State, indices: Array, window: int) -> Array:
        """Returns whether the `window` rows from each of `indices` [...] are held: bool [...]."""
        raise NotImplementedError

    def _size(self, counters: State) -> Array:
        """Returns the number of items held."""
        raise NotImplementedError

    def __getstate__(self) -> dict:
        """Returns the configuration to pickle or copy, without the compiled methods."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    @_compiled()
    def init(self, item: PyTree) -> State:
        """Makes empty storage for items like `item`: arrays or numbers, of one environment."""
        if not tree_leaves(item):
            raise ValueError(f"init: the item has no arrays in it, got {item!r}")
        lead = (self.num_slots, self.envs)
        item = tree_map(jnp.asarray, item)
        storage = tree_map(lambda x: jnp.zeros(lead + x.shape, x.dtype), item)
        return self._empty()._replace(storage=storage)

    def add(self, state: State, item: PyTree) -> State:
        """Adds one row: an item, or with `num_envs` a time step [N, ...]."""
        return self._add(state, _with_fitting_numbers("add", state, item))

    @_compiled(donates=True)
    def _add(self, state: State, item: PyTree) -> State:
        _check_state(self, state)
        rows = self._as_rows("add", state.storage, item, ())
        return self._write(state, rows, None)

    def add_batch(self, state: State, items: PyTree, mask: Any = None) -> State:
        """Adds rows in order: items [L, ...], or with `num_envs` [L, N, ...]. Skips those whose
        `mask` [L] bool is False. Keeps the newest rows if not all fit.
        """
        items = _with_fitting_numbers("add_batch", state, items)
        return self._add_batch(state, items, mask)

    @_compiled(donates=True)
    def _add_batch(self, state: State, items: PyTree, mask: Any = None) -> State:
        _check_state(self, state)
        length = _length(items)
        rows = self._as_rows("add_batch", state.storage, items, (length,))
        _check_mask(mask, length)
        return self._write(state, rows, mask)

    def _as_rows(self, name: str, storage: PyTree, items: PyTree, lead: tuple) -> PyTree:
        """Makes rows [L, N, ...], in the dtypes of storage, of [*lead, ...] or [*lead, N, ...]."""
        length = lead[0] if lead else 1
        axes = "rows, " if lead else ""
        if self.has_env_axis:
            lead = (*lead, self.envs)
            axes += "num_envs, "
        _check_items(name, storage, items, lead, axes)
        return _reshaped(storage, items, length)

    def _write(self, state: State, rows: PyTree, mask: Any) -> State:
        """Writes `rows` [L, N, ...], except those whose `mask` [L] is False."""
        counters, slots = self._advance(state._replace(storage=()), rows, mask)
        return counters._replace(storage=tree_map(partial(_put, slots), state.storage, rows))

    def get(self, state: State, indices: Any) -> PyTree:
        """Reads the items or sequences at `indices`: [*indices.shape, ...].

        In a circular buffer index 0 is the oldest item. ValueError if an index is not in the buffer
        (any more); inside jit its result is arbitrary.
        """
        indices = _as_indices("get", indices)
        self._check_stored("get", state, indices, self.window)
        return self._get(state, indices)

    @_compiled()
    def _get(self, state: State, indices: Array) -> PyTree:
        _check_state(self, state)
        return self._load(state.storage, self._resolve(state, indices))

    def _load(self, storage: PyTree, indices: Array) -> PyTree:
        """Returns the items at `indices` [...], or with `sequence_length` sequences [..., W]."""
        if self.has_time_axis:
            steps = self.envs * jnp.arange(self.window)
            steps = jnp.expand_dims(steps, range(indices.ndim))
            indices = jnp.expand_dims(indices, -1) + steps
        return _items_at(storage, self._position(indices))

    def update(self, state: State, fn: Callable, indices: Any = None, *args: PyTree) -> State:
        """Replaces items by `fn(item, *args)`: all, or those at `indices` [B] (of a sequence the
        first), each with its row of `args` [B, ...]. `fn` is static: define it once, and pass
        changing values in `args`. ValueError if an index is not in the buffer (any more); inside
        jit it is ignored. An index that is given twice is written once.
        """
        if indices is not None:
            indices = jnp.atleast_1d(_as_indices("update", indices))
            self._check_stored("update", state, indices, 1)
            return self._update_at(state, fn, indices, args)
        if args:
            raise TypeError("update: args go with indices, a row for each; got no indices")
        return self._update_all(state, fn)

    @_compiled(donates=True, static="fn")
    def _update_all(self, state: State, fn: Callable) -> State:
        _check_state(self, state)
        items = tree_map(lambda leaf: lax.collapse(leaf, 0, 2), state.storage)
        new = self._results(state, fn, items)
        _check_items("update: fn's result", state.storage, new, (self.max_size,), "max_size, ")
        return state._replace(storage=_reshaped(state.storage, new, self.num_slots))

    @_compiled(donates=True, static="fn")
    def _update_at(self, state: State, fn: Callable, indices: Array, args: tuple) -> State:
        _check_state(self, state)
        if indices.ndim != 1:
            raise ValueError(f"update: indices must have shape [B], got {indices.shape}")
        indices = self._resolve(state, indices)
        position = self._position(indices)
        new = self._results(state, fn, _items_at(state.storage, position), *args)
        _check_items("update: fn's result", state.storage, new, indices.shape, "indices, ")
        stored = self._is_stored(state, indices, 1)
        slot = jnp.where(stored, position // self.envs, self.num_slots)  # or past the end
        env = position % self.envs
        if len(slot) == 1:  # XLA would fuse this write with the read of the item, and copy storage
            slot, env, new = tree_map(lambda x: jnp.repeat(x, 2, axis=0), (slot, env, new))
        storage = tree_map(lambda x, y: x.at[slot, env].set(y, mode="drop"), state.storage, new)
        return state._replace(storage=storage)

    def _results(self, state: State, fn: Callable, *rows: PyTree) -> PyTree:
        """Applies `fn` to each row."""

        def fitting(*row: PyTree) -> PyTree:
            return _with_fitting_numbers("update: fn's result", state, fn(*row))

        return jax.vmap(fitting)(*rows)

    @_compiled()
    def size(self, state: State) -> Array:
        """Counts the items held, over all environments: [] int32."""
        return self._size(state)

    def _resolve(self, state: State, indices: Array) -> Array:
        """Converts a user's indices to those that the module's docstring defines."""
        return indices

    def _check_stored(self, name: str, state: State, indices: Any, window: int) -> None:
        """Raises unless the `window` rows from each index are held; in jit only with debug."""
        if _is_checked(self, state.size, indices):
            stored = self._are_stored(state, indices, window)
            _check(stored, f"{name}: {self.gone}", size=state.size)

    @_compiled(static="window")
    def _are_stored(self, state: State, indices: Array, window: int) -> Array:
        _check_state(self, state)
        return self._is_stored(state, self._resolve(state, indices), window)


class Replay(Buffer):
    """A buffer to sample from: `uniform_replay`, `prioritised_replay`, `clustered_replay`.

    `size` and `can_sample` also take states stacked by `jax.vmap` or `jax.pmap`, and answer for
    each. Call the other methods under `jax.vmap`.
    """

    period: int
    set_priorities: Any = None  # these two are methods in buffers with priorities
    priorities: Any = None

    # What subclasses define.

    def _draw(self, counters: State, key: Array, count: int) -> tuple[Array, Array]:
        """Samples `count` sequences: indices [count] int32 and probabilities [count] float32."""
        raise NotImplementedError

    def _num_starts(self, counters: State) -> Array:
        """Counts the rows at which a sequence can start."""
        raise NotImplementedError

    def _can_draw(self, counters: State) -> Array:
        """Returns whether anything can be sampled."""
        raise NotImplementedError

    def _all_indices(self, counters: State) -> Array:
        """Returns the index of each item [max_size], oldest first, then -1 for each empty place."""
        raise NotImplementedError

    def sample(self, state: State, key: Array, batch_size: int) -> Sample:
        """Samples `batch_size` (static) items or sequences, with replacement. ValueError if nothing
        can be sampled; inside jit the contents of arbitrary slots, with probability 0.
        """
        count = _positive("sample(state, key, batch_size): batch_size", batch_size)
        self._check_drawable("sample", state)
        return self._sample(state, key, count)

    @_compiled(static="count")
    def _sample(self, state: State, key: Array, count: int) -> Sample:
        _check_state(self, state)
        indices, probabilities = self._draw(state._replace(storage=()), key, count)
        experience = self._load(state.storage, indices)
        return Sample(experience, _after(indices, experience), probabilities)

    def add_and_sample(self, state: State, items: PyTree, key: Array, batch_size: int) -> Any:
        """Adds a batch and then samples. Returns (state, Sample)."""
        count = _positive("add_and_sample(state, items, key, batch_size): batch_size", batch_size)
        self._check_drawable("add_and_sample", state, items)
        state = self.add_batch(state, items)
        return state, self._sample(state, key, count)

    def can_sample(self, state: State, min_size: Any = 1) -> Array:
        """Returns whether `sample` has something to return, and `min_size` items are held: [] bool.

        ValueError if `min_size` is above `max_size`.
        """
        if not isinstance(min_size, Tracer) and min_size > self.max_size:
            limit = f"max_size = {self.max_size}, which is all that the buffer ever holds"
            raise ValueError(f"can_sample: min_size must be at most {limit}, got {min_size}")
        return self._can_sample(state._replace(storage=()), min_size)

    @_compiled()
    def _can_sample(self, counters: State, min_size: Any) -> Array:
        return self._can_draw(counters) & (self._size(counters) >= min_size)

    @_compiled()
    def indices(self, state: State) -> tuple[Array, Array]:
        """Lists the indices of all items, oldest first: indices [max_size] int32 and is_held
        [max_size] bool, for `get`, `update` and `set_priorities`. After the items held, each empty
        place has index -1. A clustered buffer lists one cluster after another. With
        `sequence_length` W a sequence starts at each item held but the last (W - 1) * num_envs;
        with `period` only where index // num_envs (of a clustered buffer index // K // num_envs) is
        a multiple of it.
        """
        _check_state(self, state)
        indices = self._all_indices(state._replace(storage=()))
        return indices, indices >= 0

    @_explains_donation
    def _check_drawable(self, name: str, state: State, items: PyTree = None) -> None:
        """Raises unless something can be sampled, once `items` are added."""
        if not _is_checked(self, state.size):
            return
        # With a period, `items` may overwrite the only sequence, which the state does not show.
        stays = items is None or self.period == 1
        if stays and not isinstance(state.size, Tracer) and self._can_surely_draw(state):
            return
        _check_state(self, state)
        if items is not None:
            state = self._counters_after(state, items)
        wanted = f"sequence_length={self.window} steps from a multiple of period={self.period}"
        wanted += ", of a priority above 0" if self.state_type is PrioritisedState else ""
        message = f"{name}: nothing to sample, {{size}} items held; a sample takes {wanted}"
        _check(self.can_sample(state), message, size=self.size(state))

    @_compiled()
    def _counters_after(self, state: State, items: PyTree) -> State:
        return self.add_batch(state, items)._replace(storage=())

    def _can_surely_draw(self, state: State) -> bool:
        """Returns True if one scalar of the state already shows that something can be sampled.

        Reading it is faster than calling `can_sample`: `sample` takes 28 us instead of 72 (measured
        as in the last section of this file).
        """
        return np.asarray(state.size).item(0) >= self.window + self.period - 1


class WithPriorities(Replay):
    """A replay buffer whose priorities can be set and read."""

    def set_priorities(self, state: State, indices: Any, priorities: Any) -> State:
        """Sets `priorities` [B], such as abs(TD error) + epsilon, of the items or sequences that
        start at `indices` [B]. The buffer applies the exponent. Ignores indices that were
        overwritten, or where no sequence starts; an index given twice gets one of its priorities.
        ValueError for a priority that is negative, infinite or NaN; inside jit it is ignored.
        """
        indices = _as_indices("set_priorities", indices)
        if not isinstance(priorities, Array):
            priorities = np.asarray(priorities, np.float32)
        if priorities.shape != indices.shape or indices.ndim > 1:
            shapes = f"got {indices.shape} and {priorities.shape}"
            raise ValueError(f"set_priorities: indices and priorities must both be [B], {shapes}")
        if _is_checked(self, priorities):
            numpy = jnp if self.debug else np  # NumPy is faster, but takes no traced arrays
            given = numpy.asarray(priorities)
            ok = (given >= 0) & (given < np.inf)
            _check(ok, "set_priorities: priorities must be 0 or more, and finite: one is not")
        # The storage does not change. Passing it takes 34 us instead of 27 with 5 arrays, and 57
        # instead of 28 with 20 (measured as in the last section of this file).
        new = self._set_priorities(state._replace(storage=()), indices, priorities)
        return new._replace(storage=state.storage)

    @_compiled(donates=True)
    def _set_priorities(self, state: State, indices: Array, priorities: Array) -> State:
        _check_state(self, state)
        return self._set(state, indices, priorities.astype(float32))

    def _set(self, counters: State, indices: Array, priorities: Array) -> State:
        """Returns the counters after `priorities` [B] float32 of `indices` [B] were set."""
        raise NotImplementedError

    def priorities(self, state: State, indices: Any) -> Array:
        """Reads the priorities [...] float32 of the items or sequences that start at `indices`
        [...], without the exponent: as given to `set_priorities`, up to a rounding error. They are
        0 where the item was overwritten, or no sequence starts. With exponent 0 all others are 1.
        """
        indices = _as_indices("priorities", indices)
        return self._get_priorities(state._replace(storage=()), indices)

    @_compiled()
    def _get_priorities(self, state: State, indices: Array) -> Array:
        _check_state(self, state)
        return self._priorities(state, indices)

    def _priorities(self, counters: State, indices: Array) -> Array:
        """Returns the priorities [...] of `indices` [...]."""
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- rings
def cursor_modulus(rows: int, envs: int) -> int:
    """Returns the modulus of a ring's cursor, a multiple of T: no index of [T, N] reaches 2**30."""
    return 2**30 // (rows * envs) * rows


class Ring(Buffer):
    """A buffer of the last T rows: their numbers, their slots, and where sequences start.

    The counters of the rings of a clustered buffer are stacked; `cluster` [B] selects rings.
    """

    max_size: int
    num_envs: int | None = None
    sequence_length: int | None = None
    period: int = 1
    clusters = 1  # number of rings that share the range of indices

    def __post_init__(self) -> None:
        _check_sizes(self)

    def _empty(self) -> State:
        return RingState()

    # N and W as numbers, also if the user gave None.
    envs = property(lambda self: self.num_envs or 1)
    window = property(lambda self: self.sequence_length or 1)
    num_slots = property(lambda self: self.max_size // self.envs)
    modulus = property(lambda self: cursor_modulus(self.num_slots, self.envs * self.clusters))
    has_env_axis = property(lambda self: self.num_envs is not None)
    has_time_axis = property(lambda self: self.sequence_length is not None)

    def _advance(self, counters: State, rows: PyTree, mask: Any) -> tuple[State, Array]:
        length = _length(rows)
        rank: Any = np.arange(length, dtype=np.int32)
        count: Any = length
        if mask is None:
            is_kept = rank >= count - self.num_slots
        else:
            rank = jnp.cumsum(mask, dtype=int32) - 1  # of each row, among those that are added
            count = jnp.sum(mask, dtype=int32)
            is_kept = mask & (rank >= count - self.num_slots)
        slot = (counters.cursor + rank) % self.num_slots
        past_end = self.num_slots + np.arange(length, dtype=np.int32)
        cursor = (counters.cursor + count) % self.modulus
        size = jnp.minimum(counters.size + count, self.num_slots)
        return counters._replace(cursor=cursor, size=size), jnp.where(is_kept, slot, past_end)

    def _position(self, indices: Array) -> Array:
        return indices % self.max_size

    def _is_stored(self, counters: State, indices: Array, window: int, cluster: Any = 0) -> Array:
        exists = (indices >= 0) & (indices < self.modulus * self.envs)
        row = indices // self.envs
        age = (counters.cursor.ravel()[cluster] - row) % self.modulus  # 1: the newest row
        return exists & (age >= window) & (age <= counters.size.ravel()[cluster])

    def _size(self, counters: State) -> Array:
        return counters.size * self.envs

    def _starts(self, cursor: Array, size: Array) -> tuple[Array, Array]:
        """Returns how many rows can start a sequence, and the first of them, perhaps negative.

        The rows held are cursor - size, ..., cursor - 1. A sequence starts at a multiple of
        `period` and ends at a row held, so it does not cross the write position.
        """
        oldest = cursor - size
        skipped = -oldest % self.period
        starts = (size - skipped - self.window + self.period) // self.period
        return jnp.maximum(starts, 0), oldest + skipped

    def _all_indices(self, counters: State) -> Array:
        rank = jnp.arange(self.max_size, dtype=int32)
        row = (counters.cursor - counters.size + rank // self.envs) % self.modulus
        index = row * self.envs + rank % self.envs
        return jnp.where(rank // self.envs < counters.size, index, -1)


@dataclass(frozen=True)
class CircularBuffer(Ring):
    """A ring of the last `max_size` items; with `can_add` and `can_pop` a FIFO queue.

    Args:
      max_size: items held; once full, each new item overwrites the oldest.
      donate, debug: as in `uniform_replay`.

    Raises TypeError or ValueError if `max_size` is not an int from 1 to 2**29.
    """

    max_size: int
    _: KW_ONLY
    donate: bool = True
    debug: bool = False

    gone = "indices must be from 0 (oldest) to size - 1, and size is {size}"

    def _resolve(self, state: RingState, indices: Array) -> Array:
        """Returns the index of the i-th oldest item, or -1."""
        exists = (indices >= 0) & (indices < state.size)
        oldest = state.cursor - state.size
        return jnp.where(exists, (oldest + indices) % self.modulus, -1)

    @_compiled()
    def can_add(self, state: RingState, n: Any) -> Array:
        """Returns whether n more items fit without loss: [] bool."""
        return state.size + n <= self.max_size

    @_compiled()
    def can_pop(self, state: RingState, n: Any) -> Array:
        """Returns whether n items are held: [] bool."""
        return state.size >= n

    def pop(self, state: RingState, n: int) -> Any:
        """Removes the n oldest items [n, ...]. Returns (state, items); `n` is static. ValueError if
        fewer are held; inside jit all are removed, and the other rows of `items` are stale.
        """
        n = _positive("n", n)
        if n > self.max_size:
            held = f"at most max_size = {self.max_size} items are held"
            raise ValueError(f"pop: n is {n}, but {held}")
        if _is_checked(self, state.size):
            message = "pop: {n} items asked for, but {size} held"
            _check(self.can_pop(state, n), message, n=n, size=state.size)
        return self._pop(state, n)

    @_compiled(donates=True, static="n")
    def _pop(self, state: RingState, n: int) -> Any:
        items = self._get(state, jnp.arange(n, dtype=int32))
        size = jnp.maximum(state.size - n, 0)
        return state._replace(cursor=_after(state.cursor, items), size=size), items


@dataclass(frozen=True)
class UniformReplay(Ring, Replay):
    """A ring of the last `max_size` items, sampled uniformly and with replacement.

    Args:
      max_size: items held, over all environments; once full, each new row overwrites the oldest.
        Rounded down to a multiple of num_envs * period.
      num_envs: N; `add` then takes time steps of N environments [N, ...]. None: single items.
      sequence_length: W; `sample` then returns sequences [B, W, ...] of W consecutive time steps of
        one environment. They never cross the write position, but they do cross the ends of
        episodes: store a flag that marks these. None: `sample` returns items [B, ...].
      period: sequences start at rows whose number is a multiple of it; with
        `period=sequence_length` they do not overlap.
      donate: whether methods that return a state work in place, which deletes the state they are
        given. False keeps old states alive, at the cost of copying the storage each call.
      debug: whether invalid values, inside jit, are errors under checkify.

    Raises TypeError or ValueError for sizes that are not ints of at least 1, and for a `max_size`
    over 2**29, too small for a sequence, or not a multiple of num_envs.
    """

    max_size: int
    _: KW_ONLY
    num_envs: int | None = None
    sequence_length: int | None = None
    period: int = 1
    donate: bool = True
    debug: bool = False

    def _num_starts(self, counters: State) -> Array:
        return self._starts(counters.cursor, counters.size)[0]

    def _can_draw(self, counters: State) -> Array:
        return self._num_starts(counters) > 0

    def _draw(
        self, counters: State, key: Array, count: int, cluster: Any = 0
    ) -> tuple[Array, Array]:
        """Samples sequences of a ring, all equally likely."""
        cursor, size = counters.cursor.ravel()[cluster], counters.size.ravel()[cluster]
        starts, first = self._starts(cursor, size)
        total = starts * self.envs
        draw = _random_below(total, jax.random.bits(key, (2, count), uint32))
        row = (first + self.period * (draw // self.envs)) % self.modulus
        index = row * self.envs + draw % self.envs
        probability = jnp.where(total > 0, 1 / jnp.maximum(total, 1).astype(float32), 0)
        return index, jnp.broadcast_to(probability, index.shape)

    def later(
        self, state: State, indices: Any, key: Array, goes_on: Array, *, horizon: int
    ) -> Array:
        """Samples for each time step at `indices` [B] a later one of its episode: [B] int32.

        The next `horizon` (static) steps are equally likely, up to the end of the episode and the
        newest row. Without a later step it is the index itself. This is the strategy "future" of
        hindsight: Andrychowicz et al. 2017, arXiv 1707.01495, section 4.5.

        ValueError if an index was overwritten; inside jit its result is arbitrary.

        Args:
          goes_on: [T, N] bool, in the storage's order, such as `state.storage.valid`: whether the
            next row is of the same episode.
        """
        indices = _as_indices("later", indices)
        horizon = _positive("later: horizon", horizon)
        wanted = (self.num_slots, self.envs)
        if goes_on.shape != wanted or goes_on.dtype != bool:
            given = f"{goes_on.dtype}{list(goes_on.shape)}"
            raise ValueError(f"later: goes_on must be bool{list(wanted)}, got {given}")
        self._check_stored("later", state, indices, 1)
        return self._later(state._replace(storage=()), indices, key, goes_on, horizon)

    @_compiled(static="horizon")
    def _later(
        self, counters: State, indices: Array, key: Array, goes_on: Array, horizon: int
    ) -> Array:
        steps = jnp.arange(horizon, dtype=int32)[None]
        position = self._position(indices[:, None] + self.envs * steps)
        age = (counters.cursor - indices // self.envs) % self.modulus  # 1: the newest row
        follows = _gather(lax.collapse(goes_on, 0, 2), position) & (steps + 1 < age[:, None])
        count = jnp.where(follows.all(axis=1), horizon, jnp.argmin(follows, axis=1)).astype(int32)
        ahead = 1 + _random_below(count, jax.random.bits(key, (2, *indices.shape), uint32))
        ahead = jnp.minimum(ahead, count)
        return (indices + self.envs * ahead) % (self.modulus * self.envs)


# ---------------------------------------------------------------------------------------- sum tree
# A 4-ary sum tree is a tuple of levels. levels[0] has the weight of each position; node i of a
# higher level is the sum of nodes 4 i to 4 i + 3 of the level below. Sizes are multiples of 4.
SMALL = 1024  # levels of at most so many nodes are not stored, but computed for each batch
# A float32 has 24 random bits, and each level takes 2. Deeper levels take the bits of another
# number: a single one would favour some of ten million items and miss others.
LEVELS_PER_DRAW = 7


def tree_init(capacity: int) -> tuple[Array, ...]:
    """Makes the levels of a tree of zeros: [capacity], [capacity / 4], ..., [more than SMALL]."""
    levels: list = []
    nodes = capacity
    while not levels or nodes > SMALL:
        groups = -(-nodes // 4)
        levels.append(jnp.zeros(4 * groups, float32))
        nodes = groups
    return tuple(levels)


def tree_set(levels: tuple, positions: Array, weights: Array, valid: Array) -> tuple[Array, ...]:
    """Sets `weights` [B] at `positions` [B] of a tree, where `valid` [B] is True.

    The sums above are computed from their children: adding differences would let rounding errors
    grow.
    """
    past_end = levels[0].size
    new = [levels[0].at[jnp.where(valid, positions, past_end)].set(weights, mode="drop")]
    # Where not valid, the sums above position 0 are computed again, which changes nothing.
    node = jnp.where(valid, positions, 0).astype(uint32)
    for level in levels[1:]:
        node = _computed_once(node // 4)
        sums = _sum(_gather(new[-1].reshape(-1, 4), node))
        new.append(level.at[node].set(sums, mode="promise_in_bounds"))
    return tuple(new)


def tree_total(levels: tuple) -> Array:
    """Sums all weights of each tree."""
    return levels[-1].sum(axis=-1)


def tree_draw(levels: tuple, key: Array, count: int, tree: Any = 0) -> tuple[Array, Array]:
    """Samples positions [B] in proportion to their weights. Returns their probabilities [B], too.

    Each of B equal shares of the total gives one (stratified: Schaul et al. 2016, section 3.3). The
    probabilities are 0 if no weight is above 0. The levels of several trees have leading axes;
    `tree` [B] then selects the tree of each sample.
    """
    levels = _with_small_levels(levels)
    key = _after(key, levels[-1])
    numbers = -(-len(levels) // LEVELS_PER_DRAW)
    uniform = jax.random.uniform(key, (numbers, count))
    fraction = (jnp.arange(count, dtype=float32) + uniform[0]) / count
    node = jnp.zeros(count, uint32)
    for depth, level in enumerate(reversed(levels)):
        if depth > 0 and depth % LEVELS_PER_DRAW == 0:
            fraction = uniform[depth // LEVELS_PER_DRAW]
        first = jnp.asarray(tree).astype(uint32) * (level.shape[-1] // 4)
        children = _gather(level.reshape(-1, 4), first + node)
        if depth == 0:
            total = _sum(children)
        child, weight, fraction = _choose_child(children, fraction)
        node = _computed_once(4 * node + child)
    return node.astype(int32), weight / jnp.where(total > 0, total, 1)


def _with_small_levels(levels: tuple) -> tuple[Array, ...]:
    """Adds the levels that are not stored, up to the four children of the root."""
    while levels[-1].shape[-1] > 4:
        below = levels[-1]
        sums = _sum(below.reshape(*below.shape[:-1], -1, 4))
        padding = [(0, 0)] * (sums.ndim - 1) + [(0, -sums.shape[-1] % 4)]
        levels = (*levels, jnp.pad(sums, padding))
    return levels


def _choose_child(weights: Array, fraction: Array) -> tuple[Array, Array, Array]:
    """Finds the child, 0 to 3, whose share of the sum of `weights` [B, 4] contains `fraction` [B].

    Returns the child [B] uint32, its weight, and the place of the fraction within its share, from 0
    to 1. Chooses the left or the right pair, then a child of the pair: never a child of weight 0,
    to which rounded sums could lead.
    """
    a, b, c, d = (weights[:, i] for i in range(4))
    target = fraction * _sum(weights)
    is_right = (target >= a + b) & (c + d > 0)
    target = jnp.where(is_right, target - (a + b), target)
    first, second = jnp.where(is_right, c, a), jnp.where(is_right, d, b)
    is_second = (target >= first) & (second > 0)
    target = jnp.where(is_second, target - first, target)
    weight = jnp.where(is_second, second, first)
    child = 2 * is_right.astype(uint32) + is_second.astype(uint32)
    return child, weight, target / weight


def _sum(groups: Array) -> Array:
    """Sums `groups` [..., 4]."""
    a, b, c, d = (groups[..., i] for i in range(4))
    return (a + b) + (c + d)


# ------------------------------------------------------------------------------------- prioritised
@dataclass(frozen=True)
class PrioritisedReplay(WithPriorities, UniformReplay):
    """A ring of the last `max_size` items, sampled in proportion to priority ** exponent.

    Schaul et al. 2016, section 3.3, equation 1, with stratified sampling; `importance_weights`
    corrects the bias. New items get the largest priority set so far, or 1 if none was above 0. An
    item of priority 0 is never sampled; with exponent 0 all items are equally likely.

    Args:
      max_size: items held, over all environments; once full, each new row overwrites the oldest.
      priority_exponent: alpha, 0 or more; 0 is uniform replay.
      num_envs, sequence_length, period, donate, debug: as in `uniform_replay`. A sequence has one
        priority, that of its first item.

    Raises TypeError and ValueError as `uniform_replay`, and if the exponent is below 0 or infinite.
    """

    priority_exponent: float = 0.6

    state_type = PrioritisedState

    def __post_init__(self) -> None:
        super().__post_init__()
        exponent = float(self.priority_exponent)
        if not 0 <= exponent < np.inf:
            raise ValueError(f"priority_exponent must be 0 or more, got {exponent}")
        object.__setattr__(self, "priority_exponent", exponent)

    def _set(self, counters: State, indices: Array, priorities: Array) -> State:
        is_start = indices // self.envs % self.period == 0
        is_priority = (priorities >= 0) & (priorities < jnp.inf)
        valid = self._is_stored(counters, indices, self.window) & is_start & is_priority
        weights = self._weights(priorities)
        tree = tree_set(counters.tree, indices % self.max_size, weights, valid)
        largest = jnp.max(jnp.where(valid, priorities, 0), initial=0)
        return counters._replace(
            cursor=_after(counters.cursor, tree[-1]),
            tree=tree,
            max_priority=jnp.maximum(counters.max_priority, largest),
        )

    def _priorities(self, counters: State, indices: Array, cluster: Any = 0) -> Array:
        weights = counters.tree[0]
        weights = weights.reshape(-1, weights.shape[-1])[cluster, indices % self.max_size]
        is_stored = self._is_stored(counters, indices, self.window, cluster)
        inverse = 1 / self.priority_exponent if self.priority_exponent > 0 else 1.0
        return jnp.where(is_stored, weights**inverse, 0)

    def _weights(self, priorities: Array) -> Array:
        """Computes weights of priorities, limited so that their sums, and 1 / sum, stay finite."""
        largest = np.finfo(np.float32).max / (8 * self.max_size)
        return jnp.minimum(priorities**self.priority_exponent, largest)

    def _empty(self) -> State:
        return PrioritisedState(tree=tree_init(self.max_size))

    def _advance(self, counters: State, rows: PyTree, mask: Any) -> tuple[State, Array]:
        """Also sets the weights of new sequences, and 0 at rows where none is complete."""
        new, slots = super()._advance(counters, rows, mask)
        length = _length(rows)
        count = length if mask is None else jnp.sum(mask, dtype=int32)
        # Weights of sequences of W = 3 rows, after 4 rows were added at the cursor c:
        #   first row   c-4  c-3 | c-2   c-1    c    c+1  | c+2     c+3
        #   weight      unchanged| new: now complete      | 0: not complete
        # Rows that do not exist, or that others of the 4 overwrite, are left out.
        k = jnp.arange(1 - self.window, length)
        row = counters.cursor + k
        is_start = (k <= count - self.window) & (row % self.period == 0)
        changes = (k >= -counters.size) & (k >= count - self.num_slots) & (k < count)
        weight = self._weights(jnp.where(counters.max_priority > 0, counters.max_priority, 1))
        weights = jnp.repeat(jnp.where(is_start, weight, 0), self.envs)
        env = np.arange(self.envs, dtype=np.int32)
        positions = (row % self.num_slots)[:, None] * self.envs + env[None]
        changes = jnp.repeat(changes, self.envs)
        tree = tree_set(counters.tree, positions.ravel(), weights, changes)
        return new._replace(cursor=_after(new.cursor, tree[-1]), tree=tree), slots

    def _can_draw(self, counters: State) -> Array:
        return tree_total(counters.tree) > 0

    def _can_surely_draw(self, state: State) -> bool:
        return np.asarray(state.tree[-1]).item(0) >= TINY

    def _draw(
        self, counters: State, key: Array, count: int, cluster: Any = 0
    ) -> tuple[Array, Array]:
        """Samples sequences in proportion to their weights."""
        positions, probabilities = tree_draw(counters.tree, key, count, cluster)
        slot = positions // self.envs
        newest = counters.cursor.ravel()[cluster] - 1
        row = newest - (newest - slot) % self.num_slots  # the newest row in this slot
        return row % self.modulus * self.envs + positions % self.envs, probabilities


# --------------------------------------------------------------------------------------- clustered
@dataclass(frozen=True)
class ClusteredReplay(WithPriorities):
    """A replay buffer for each cluster: `sample` chooses a cluster, then an item in it.

    Rare kinds of items, such as trajectories of a high return, stay until new ones replace them.
    The state is that of `cluster_buffer` with a leading axis K, and storage [K * T, N, ...].

    Args:
      num_clusters: K.
      cluster_buffer: a uniform or prioritised buffer of the size of one cluster; its donate and
        debug are ignored. Each cluster has its own max_priority. Neighbours in a cluster are not
        consecutive time steps: store sequences or episodes as items.
      clustering_fn: returns the cluster of what `add` takes, an item or a time step of N
        environments: an integer, which is clipped to 0 to K - 1, or a bool.
      distribution_power: clusters are sampled in proportion to the number of items that can be
        sampled in them, to this power, from -4 to 4: 0 samples all clusters that have any equally,
        1 samples as one uniform buffer does.
      donate, debug: as in `uniform_replay`.

    Raises TypeError or ValueError for any other argument, for a `cluster_buffer` with a
    `sequence_length` above 1, and if all clusters together hold more than 2**29 items.
    """

    num_clusters: int
    cluster_buffer: Replay
    clustering_fn: Callable[[PyTree], Any]
    distribution_power: float = 0.0
    _: KW_ONLY
    donate: bool = True
    debug: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_clusters", _positive("num_clusters", self.num_clusters))
        _check_cluster_buffer(self)
        power = float(self.distribution_power)
        if not abs(power) <= 4:
            raise ValueError(f"distribution_power must be from -4 to 4, got {power}")
        object.__setattr__(self, "distribution_power", power)

    @cached_property
    def ring(self) -> Any:
        """Makes the buffer of one cluster, whose indices leave room for those of the others."""
        ring = copy(self.cluster_buffer)
        object.__setattr__(ring, "clusters", self.num_clusters)
        return ring

    envs = property(lambda self: self.ring.envs)
    window = property(lambda self: self.ring.window)
    period = property(lambda self: self.ring.period)
    max_size = property(lambda self: self.num_clusters * self.ring.max_size)
    num_slots = property(lambda self: self.num_clusters * self.ring.num_slots)
    has_env_axis = property(lambda self: self.ring.has_env_axis)
    has_time_axis = property(lambda self: self.ring.has_time_axis)
    counter_axes = 1
    state_type = property(lambda self: self.ring.state_type)

    @property
    def set_priorities(self) -> Any:
        """Returns the method if `cluster_buffer` has one, otherwise None."""
        return super().set_priorities if self.ring.set_priorities else None

    @property
    def priorities(self) -> Any:
        """Returns the method if `cluster_buffer` has one, otherwise None."""
        return super().priorities if self.ring.priorities else None

    def later(self, *args: Any, **kwargs: Any) -> Any:
        """Raises ValueError: the steps of a cluster do not follow each other."""
        raise ValueError(
            "later: the steps of a cluster do not follow each other: store whole sequences or "
            "episodes as items"
        )

    def _empty(self) -> State:
        lead = (self.num_clusters,)
        return tree_map(lambda x: jnp.broadcast_to(x, lead + x.shape), self.ring._empty())

    def _split(self, indices: Array) -> tuple[Array, Array]:
        """Splits each index into the index in its ring, and the cluster."""
        return indices // self.num_clusters, indices % self.num_clusters

    def _members(self, cluster: Array) -> Array:
        """Returns whether each of `cluster` [B] equals each of the K clusters: bool [K, B]."""
        return jnp.arange(self.num_clusters)[:, None] == cluster[None]

    def _advance(self, counters: State, rows: PyTree, mask: Any) -> tuple[State, Array]:
        """Adds all rows to every cluster, with a mask that leaves out those of other clusters."""
        items = rows if self.has_env_axis else tree_map(lambda leaf: leaf[:, 0], rows)
        cluster = jnp.asarray(jax.vmap(self.clustering_fn)(items))  # [L]
        if cluster.ndim != 1 or cluster.dtype.kind not in "bui":
            given = jax.typeof(cluster)
            raise TypeError(f"clustering_fn must return one integer or bool, got {given}")
        cluster = jnp.clip(cluster.astype(int32), 0, self.num_clusters - 1)
        masks = self._members(cluster)
        if mask is not None:
            masks &= mask[None]
        advance = jax.vmap(self.ring._advance, in_axes=(0, None, 0))
        new, slots = advance(counters, rows, masks)  # slots [K, L]
        slot = jnp.min(slots, axis=0)  # past the end in all rings but that of its cluster
        past_end = self.num_slots + np.arange(len(slot), dtype=np.int32)
        in_storage = self.ring.num_slots * cluster + slot
        return new, jnp.where(slot < self.ring.num_slots, in_storage, past_end)

    def _position(self, indices: Array) -> Array:
        index, cluster = self._split(indices)
        return cluster * self.ring.max_size + self.ring._position(index)

    def _is_stored(self, counters: State, indices: Array, window: int) -> Array:
        index, cluster = self._split(indices)
        return self.ring._is_stored(counters, index, window, cluster)

    def _size(self, counters: State) -> Array:
        return self.ring._size(counters).sum(axis=-1, dtype=int32)

    def _num_starts(self, counters: State) -> Array:
        return self.ring._num_starts(counters).sum(axis=-1, dtype=int32)

    def _can_draw(self, counters: State) -> Array:
        return self.ring._can_draw(counters).any(axis=-1)

    def _can_surely_draw(self, state: State) -> bool:
        return self.ring._can_surely_draw(state)

    def _draw(self, counters: State, key: Array, count: int) -> tuple[Array, Array]:
        """Samples `count` clusters, and an item of each."""
        cluster_key, key = jax.random.split(key)
        starts = self.ring._num_starts(counters).astype(float32)
        weights = jnp.where(self.ring._can_draw(counters), starts**self.distribution_power, 0)
        sums = jnp.cumsum(weights)  # [K]
        total = sums[-1]
        target = total * (1 - jax.random.uniform(cluster_key, (count, 1)))  # above 0
        cluster = jnp.sum(sums[None] < target, axis=1, dtype=int32)  # the first sum that reaches it
        key = _after(key, cluster)
        cluster_probability = weights[cluster] / jnp.maximum(total, TINY)
        indices, probabilities = self.ring._draw(counters, key, count, cluster)
        return indices * self.num_clusters + cluster, cluster_probability * probabilities

    def _all_indices(self, counters: State) -> Array:
        index = jax.vmap(self.ring._all_indices)(counters)  # [K, items of one]
        cluster = jnp.arange(self.num_clusters, dtype=int32)[:, None]
        return jnp.where(index >= 0, index * self.num_clusters + cluster, -1).ravel()

    def _set(self, counters: State, indices: Array, priorities: Array) -> State:
        """Gives all priorities to every cluster, with index -1 for items of other clusters."""
        index, cluster = self._split(indices)
        indices_of_each = jnp.where(self._members(cluster), index[None], -1)
        return jax.vmap(self.ring._set, in_axes=(0, 0, None))(counters, indices_of_each, priorities)

    def _priorities(self, counters: State, indices: Array) -> Array:
        return self.ring._priorities(counters, *self._split(indices))


circular_buffer = CircularBuffer
uniform_replay = UniformReplay
prioritised_replay = PrioritisedReplay
clustered_replay = ClusteredReplay


# ---------------------------------------- other functions: returns, means, loops, minibatches
def importance_weights(probabilities: Any, beta: Any) -> Array:
    """Computes (size * P)**-beta over the largest of the batch: Schaul et al. 2016, section 3.4.

    The size of the buffer cancels: the weights are (smallest P / P)**beta.

    Args:
      probabilities: [B], of a `Sample`. Where one is 0, nothing was sampled: that weight is 0.
      beta: how much of the bias is corrected, from 0 (nothing, all weights are 1) to 1.

    Returns [B] float32, from 0 to 1.
    """
    probabilities = jnp.asarray(probabilities, float32)
    beta = jnp.asarray(beta, float32)
    drawn = probabilities > 0
    smallest = jnp.min(probabilities, where=drawn, initial=jnp.inf)
    ratio = smallest / jnp.where(drawn, probabilities, 1)
    return jnp.where(drawn, ratio**beta, 0)


def n_step_return(
    reward: Any, terminated: Any, truncated: Any, gamma: float
) -> tuple[Array, Array, Array]:
    """Sums the discounted rewards of n steps, or of fewer where an episode ends.

    r_0 + gamma r_1 + ... + gamma**(m - 1) r_(m - 1), where m is n, or the number of steps up to the
    first that terminated or was truncated (Sutton and Barto 2018, section 7.1). To bootstrap, add
    discount * V(s_m), where s_m is the observation after step m - 1.

    Args:
      reward: [B, n] float32, of consecutive steps of one environment.
      terminated, truncated: [B, n] bool, or numbers that are 0 for False.
      gamma: discount factor of one step.

    Returns three arrays [B]: the sums, float32; the discount of the value to bootstrap from,
    float32: gamma**m, or 0 if terminated; and m, int32, 1 to n.
    """
    shapes = [jnp.shape(x) for x in (reward, terminated, truncated)]
    if len(shapes[0]) != 2 or len(set(shapes)) > 1:
        hint = "of a single sequence of n steps give x[None] of each x"
        raise ValueError(f"reward, terminated and truncated must be [B, n], got {shapes}: {hint}")
    terminated = jnp.asarray(terminated).astype(bool)
    truncated = jnp.asarray(truncated).astype(bool)
    n = shapes[0][1]
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


def discounted_sum(x: Array, discount: Any, first: Array, reverse: bool = False) -> Array:
    """Computes y[t] = x[t] + discount[t] * y[t - 1] [S, N], from `first` [N]; reverse: y[t + 1]."""

    def step(previous: Array, row: tuple) -> tuple[Array, Array]:
        x, discount = row
        y = x + discount * previous
        return y, y

    # Eight steps in one iteration of the loop have less overhead.
    _, sums = lax.scan(step, first, (x, discount), unroll=8, reverse=reverse)
    return sums


def stack_frames(frames: Any, count: int, mask: Any) -> Any:
    """Turns sequences of frames into sequences of stacks of an episode's last K frames.

    So a frame is stored once and not in K stacks (Mnih et al. 2015, Methods, "Preprocessing").

    Args:
      frames: [B, W, ...], the observations of W consecutive steps.
      count: K, 1 to W. With 1 the frames are returned as they are.
      mask: [B, W] bool, False for an autoreset step. In the stacks after it, the frames up to it
        are zeros.

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


def read_trajectories(file: Any) -> dict[str, np.ndarray]:
    """Reads trajectories from an .npz file, as the rows that a replay of one environment holds.

    Args:
      file: its arrays [L, ...] are named as in D4RL and OGBench: `observations`, `actions`,
        `rewards`, `terminals`, and optionally `timeouts`, `next_observations` and `masks`. A
        trajectory ends at a terminal or a timeout, at a next observation that differs from the
        observation of the next row, and at the end of the file. With `masks` a step terminated
        where its mask is 0, and a terminal only ends a trajectory.

    Returns arrays [rows, ...]: observation, action, reward, terminated, truncated, and valid, which
    is False in an autoreset row. This row follows the last step of each trajectory, and has the
    observation after it. Without `next_observations` that observation is not known: the last step
    of a trajectory that did not terminate then becomes the autoreset row.

    ValueError if an array is missing, or if lengths differ.
    """
    arrays = _load_trajectories(file)
    rewards, observations = arrays["rewards"], arrays["observations"]
    following = arrays.get("next_observations", observations)
    terminated = arrays["masks"] == 0 if "masks" in arrays else arrays["terminals"] != 0
    over = terminated | (arrays["terminals"] != 0) | (arrays.get("timeouts", 0) != 0)
    over[-1] = True
    if following is not observations:
        differs = (following[:-1] != observations[1:]).reshape(len(over) - 1, -1)
        over[:-1] |= differs.any(axis=1)
        is_reset = np.zeros_like(over)
    else:
        is_reset = over & ~terminated
    order = np.repeat(np.arange(len(over)), 1 + (over & ~is_reset))
    is_reset = is_reset[order] | np.append(False, order[1:] == order[:-1])
    last = np.append(is_reset[1:], True) & ~is_reset
    return {
        "observation": np.where(
            is_reset.reshape(-1, *[1] * (observations.ndim - 1)),
            following[order],
            observations[order],
        ),
        "action": arrays["actions"][order],
        "reward": np.where(is_reset, 0, rewards[order]),
        "terminated": terminated[order] & ~is_reset,
        "truncated": last & ~terminated[order],
        "valid": ~is_reset,
    }


def _load_trajectories(file: Any) -> dict[str, np.ndarray]:
    """Loads the arrays of `read_trajectories`. ValueError if one is missing, or lengths differ."""
    with np.load(file) as found:
        arrays = {name: found[name] for name in found.files}
    for name in ("observations", "actions", "rewards", "terminals"):
        if name not in arrays:
            raise ValueError(f"{file} has no array {name}, but {', '.join(arrays)}")
    rows = len(arrays["rewards"])
    for name in ("observations", "actions", "terminals"):
        if len(arrays[name]) != rows or rows == 0:
            text = f"{len(arrays[name])} rows of {name} and {rows} of rewards"
            raise ValueError(f"{file} has {text}: the numbers must be equal, and 1 or more")
    return arrays


def masked_mean(x: Array, mask: Array) -> Array:
    """Averages x [..., *mask.shape] where `mask` is True: [...], 0 if it is True nowhere."""
    axes = tuple(range(-mask.ndim, 0))
    count = jnp.maximum(mask.sum(), 1).astype(x.dtype)
    return jnp.sum(x, axis=axes, where=mask) / count


def is_due(interval: int, step: int, end: int) -> bool:
    """Returns whether a multiple of the interval is in (step, end]; never for an interval of 0."""
    return interval > 0 and end // interval > step // interval


def repeat(step: Callable, state: PyTree, inputs: tuple, count: Any) -> tuple[PyTree, dict]:
    """Calls `state, metrics = step(state, *row)` with each of the first `count` rows of `inputs`.

    It is a `jax.lax.scan` over arrays [K, ...] that ends after `count` rows, which may be traced.

    Args:
      step: takes a state, and a row [...] of each input; returns the next state, and a dict of
        numbers.
      state: a pytree.
      inputs: arrays [K, ...].
      count: 0 to K.

    Returns the state and the metrics of the last call, float32. Without a call the metrics are
    infinite, so that nobody takes them for measurements.
    """

    def call(i: Any, carry: tuple) -> tuple[PyTree, dict]:
        state, metrics = step(carry[0], *[jnp.asarray(x)[i] for x in inputs])
        return state, tree_map(lambda x: jnp.asarray(x, float32), metrics)

    _, shapes = jax.eval_shape(call, 0, (state, None))
    none = tree_map(lambda x: jnp.full(x.shape, jnp.inf, x.dtype), shapes)
    return lax.fori_loop(0, count, call, (state, none))


def shuffled_minibatches(key: Array, rows: int, epochs: int, num_minibatches: int) -> Array:
    """Shuffles numbers of rows: [epochs, num_minibatches, rows // num_minibatches] int32.

    ValueError if `num_minibatches` does not divide `rows`.
    """
    if rows % num_minibatches:
        raise ValueError(f"rows must be a multiple of {num_minibatches=}, got {rows}: change one")
    order = jnp.argsort(jax.random.bits(key, (epochs, rows), uint32), axis=1)
    return order.reshape(epochs, num_minibatches, -1)


# ------------------------------------------------------------------------------------------ checks
def _is_checked(buffer: Buffer, *values: Any) -> bool:
    """Returns whether values are checked: if they are concrete, or debug is set."""
    return buffer.debug or not any(isinstance(value, Tracer) for value in values)


def _check(ok: Any, message: str, **values: Any) -> None:
    """Raises unless all of `ok` is True; if it is traced, leaves that to checkify."""
    if isinstance(ok, Tracer):
        arrays = {name: jnp.asarray(value) for name, value in values.items()}
        checkify.debug_check(ok.all(), message, **arrays)
    elif not np.asarray(ok).all():
        raise ValueError(message.format(**values))


def _positive(name: str, value: Any) -> int:
    """Returns the value as an int. Raises unless it is an int of at least 1."""
    if not isinstance(value, int | np.integer):
        given = f"an array {jax.typeof(value)}" if isinstance(value, Array) else repr(value)
        raise TypeError(
            f"{name} must be a Python int, got {given}: it sets the shape of an array. Did you "
            "swap two arguments? Under jit, mark it static"
        )
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _check_sizes(ring: Ring) -> None:
    """Converts the sizes of a ring to ints, or raises an error that suggests sizes."""
    for name in ("max_size", "num_envs", "sequence_length", "period"):
        value = getattr(ring, name)
        if value is not None:
            object.__setattr__(ring, name, _positive(name, value))
    max_size, envs, period = ring.max_size, ring.envs, ring.period
    steps = -(-ring.window // period) * period  # hold a sequence from a multiple of `period`
    below = max(max_size // envs, steps) * envs
    above = max(-(-max_size // envs), steps) * envs
    if max_size not in (below, above):
        sizes = f"{below} or {above}" if below < above else f"{below}"
        raise ValueError(
            f"max_size must be a multiple of num_envs = {envs}, and hold {steps} steps of each "
            f"environment, got {max_size}: use {sizes}"
        )
    if max_size > 2**29:
        raise ValueError(f"max_size must be at most 2**29, which int32 can index, got {max_size}")
    object.__setattr__(ring, "max_size", max_size // (envs * period) * envs * period)


def _check_cluster_buffer(buffer: ClusteredReplay) -> None:
    """Raises unless the buffer of a cluster has a valid type, single items and a valid size."""
    inner = buffer.cluster_buffer
    if not isinstance(inner, UniformReplay):
        given = type(inner).__name__
        hint = ": give one clustered buffer more clusters" if type(inner) is type(buffer) else ""
        raise TypeError(f"cluster_buffer must be uniform or prioritised, got {given}{hint}")
    if inner.window > 1:
        raise TypeError(
            f"cluster_buffer has sequence_length={inner.window}, but the steps of a cluster "
            "do not follow each other: leave it out, and store whole sequences or episodes as items"
        )
    if inner.max_size * buffer.num_clusters > 2**29:
        sizes = f"{buffer.num_clusters} times {inner.max_size}"
        raise ValueError(f"{sizes} items are more than 2**29")


def _check_state(buffer: Buffer, state: State) -> None:
    """Raises unless this buffer's `init` made the state, and no states are stacked in it."""
    another = "the state was made by another buffer's init: it"
    if not isinstance(state, buffer.state_type):
        kinds = f"{type(state).__name__} and not a {buffer.state_type.__name__}"
        raise ValueError(f"{another} is a {kinds}")
    if state.size.ndim > buffer.counter_axes:
        raise ValueError("these are several states, stacked: call the function under jax.vmap")
    expected = (buffer.num_slots, buffer.envs)
    for leaf in tree_leaves(state.storage):
        given = leaf.shape[:2]
        if given != expected or state.size.ndim < buffer.counter_axes:
            raise ValueError(f"{another} holds [rows, environments] {given} and not {expected}")
        if any(jax.typeof(leaf).sharding.spec):
            raise ValueError(
                "the storage is sharded over Explicit axes: make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,), one for each axis"
            )


def _check_items(name: str, storage: PyTree, items: PyTree, lead: tuple, axes: str) -> None:
    """Raises unless each leaf of `items` has shape `lead` (named `axes`) + that given to init."""
    given = tree_structure(items)
    expected = tree_structure(storage)
    if given != expected:  # type: ignore[operator]
        raise ValueError(f"{name}: items have structure {given}, expected {expected} as in init")
    for item, (path, slots) in zip(tree_leaves(items), tree_leaves_with_path(storage), strict=True):
        where = f"{name}: leaf {keystr(path) or '(the item itself)'} has"
        shape = jnp.shape(item)
        wanted = lead + slots.shape[2:]
        if shape != wanted:
            hint = "" if name.startswith("update") else ": add takes one row, add_batch several"
            raise ValueError(
                f"{where} shape {shape}, expected {wanted}, which is ({axes}item){hint}"
            )
        dtype = jnp.result_type(item)
        if dtype != slots.dtype and not _is_weak_and_fits(slots, item):
            raise TypeError(
                f"{where} dtype {dtype}, expected {slots.dtype} as given to init: convert it with "
                f".astype({str(slots.dtype)!r}), or give init an item of dtype {dtype}"
            )


def _with_fitting_numbers(name: str, state: State, items: PyTree) -> PyTree:
    """Converts Python numbers to the dtypes of their slots. Raises if a number does not fit.

    JAX would silently truncate Python numbers and 64-bit arrays of NumPy.
    """
    for x in tree_leaves(items):
        if type(x) in PYTHON or (isinstance(x, NUMPY) and x.itemsize > 4):
            return _converted(name, getattr(state, "storage", None), items)
    return items


def _converted(name: str, storage: PyTree, items: PyTree) -> PyTree:
    """Converts as described in `_with_fitting_numbers`."""
    if tree_structure(items) != tree_structure(storage):  # type: ignore[operator]
        return items  # `_check_items` will raise
    leaves, structure = tree_flatten(items)
    for i, (x, slots) in enumerate(zip(leaves, tree_leaves(storage), strict=True)):
        number = _not_held(slots.dtype, x)
        if number is not None:
            path, _ = tree_leaves_with_path(storage)[i]
            where = f"{name}: leaf {keystr(path) or '(the item itself)'} has {number}"
            hint = "give init an item of a larger dtype"
            raise ValueError(f"{where}, which {slots.dtype} does not hold: {hint}")
        if type(x) in PYTHON and jnp.issubdtype(slots.dtype, PYTHON[type(x)]):
            leaves[i] = np.asarray(x, slots.dtype)
    return tree_unflatten(structure, leaves)


def _is_weak_and_fits(slots: Array, x: Any) -> bool:
    """Returns whether `x` is weakly typed and the slots may store it, as `jnp.where(y, 1, 0)`.

    Its values are not known in jit, so the slots must hold all values of its dtype.
    """
    if not jax.typeof(x).weak_type or jnp.result_type(slots, x) != slots.dtype:
        return False
    low, high = _limits(x.dtype)
    least, largest = _limits(slots.dtype)
    return least <= low and high <= largest


def _not_held(dtype: Any, x: Any) -> Any:
    """Returns the first finite number of `x` that a dtype does not hold, or None."""
    low, high = _limits(dtype)
    if type(x) in PYTHON:
        return x if abs(x) < np.inf and not low <= x <= high else None
    if not isinstance(x, NUMPY) or x.dtype.kind not in "iuf" or x.dtype == dtype:
        return None
    outside = ((x < low) | (x > high)) & (np.abs(x) != np.inf)
    return np.asarray(x)[outside][0] if outside.any() else None


@cache
def _limits(dtype: Any) -> tuple:
    """Returns the least and the largest finite number of a dtype; infinities if it has none."""
    if jnp.issubdtype(dtype, np.integer):
        return int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
    if jnp.issubdtype(dtype, np.inexact):
        return float(jnp.finfo(dtype).min), float(jnp.finfo(dtype).max)
    return -np.inf, np.inf


def _check_mask(mask: Any, length: int) -> None:
    """Raises unless a mask is bool [L]."""
    dtype = getattr(mask, "dtype", type(mask).__name__)
    given = f"{dtype}{getattr(mask, 'shape', '')}"
    if mask is not None and given != f"bool({length},)":
        raise ValueError(f"add_batch: mask is {given}, expected bool and ({length},): one per row")


def _as_indices(name: str, indices: Any) -> Any:
    """Converts indices, also lists and Python ints, to an array of int32. TypeError for floats."""
    array = indices if isinstance(indices, Array) else np.asarray(indices)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: indices must be integers, got {array.dtype}")
    if isinstance(array, np.ndarray):
        array = np.clip(array, -1, 2**31 - 1)  # no item has the index -1 or 2**31 - 1
    return array if array.dtype == np.int32 else array.astype(np.int32)


# ------------------------------------------------------------------------------------------ arrays
def _length(rows: PyTree) -> int:
    """Returns L of rows [L, ...]; 1 without this axis."""
    shapes = [jnp.shape(leaf) for leaf in tree_leaves(rows)]
    return shapes[0][0] if shapes and shapes[0] else 1


def _reshaped(storage: PyTree, items: PyTree, length: int) -> PyTree:
    """Reshapes items to rows [length, N, ...], in the storage's dtypes."""

    def reshaped(leaf: Any, slots: Array) -> Array:
        return jnp.asarray(leaf, slots.dtype).reshape(length, *slots.shape[1:])

    return tree_map(reshaped, items, storage)


def _items_at(storage: PyTree, position: Array) -> PyTree:
    """Returns the items at `position` [...] in storage [T, N, ...], taken as [T * N, ...]."""
    if position.shape[:1] == (1,):
        two = _items_at(storage, jnp.repeat(position, 2, axis=0))
        return tree_map(lambda leaf: leaf[:1], two)
    return tree_map(lambda leaf: _gather(lax.collapse(leaf, 0, 2), position), storage)


# ----------------------------------------------------------------------------------- faster in XLA
# Each docstring gives microseconds of a call from Python, with and without the function (JAX 0.12
# on 2 CPU cores, 256 items sampled of 5 arrays each, unless stated otherwise).
def _gather(x: Array, i: Array) -> Array:
    """Returns x[i] for `i` [B, ...] in range, in one thread of a CPU.

    XLA divides a gather from 256 KiB or more among threads, and waking them takes longer. It does
    not divide a gather that is written to a part of an array, so the result is written in halves.
    Sampling from 1,000,000 items with priorities: 80 and 148.
    """
    i = i.astype(uint32)  # so that JAX does not look for negative indices
    is_divided = x.nbytes >= 2**18 > i.size * x.nbytes // len(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if i.ndim == 0 or len(i) < 2 or is_key or not is_divided:
        return x[i]

    def in_halves(x: Array, i: Array) -> Array:
        zero = (i.ravel()[0] >> 31).astype(int32)  # XLA would simplify a literal 0
        half = len(i) // 2
        out = jnp.broadcast_to(zero.astype(x.dtype), i.shape + x.shape[1:])
        out = lax.dynamic_update_slice_in_dim(out, x[i[:half]], zero, 0)
        return lax.dynamic_update_slice_in_dim(out, x[i[half:]], zero + half, 0)

    return lax.platform_dependent(x, i, cpu=in_halves, default=lambda x, i: x[i])


def _put(i: Array, x: Array, rows: Array) -> Array:
    """Returns x.at[i].set(rows, mode="drop") for distinct `i` [L].

    That expression would copy the rows first. Adding 128 images of 32x32x3 float32: 118 and 230.
    """
    item_axes = tuple(range(1, x.ndim + 1))
    windows = lax.ScatterDimensionNumbers(item_axes, (), (0,))
    i, rows = jnp.expand_dims(i, 1), jnp.expand_dims(rows, 1)
    return lax.scatter(x, i, rows, windows, unique_indices=True, mode="drop")


def _computed_once(i: Array) -> Array:
    """Returns `i`, below 2**31 - 1, computed before it is used.

    Otherwise XLA computes the way down a tree anew at each level. Sampling from 1,000,000 items and
    then setting their priorities: 210 and 367; in lax.scan 59 and 140.
    """
    return lax.rem(i, np.uint32(2**31 - 1))  # JAX 0.10 ignores lax.optimization_barrier on a CPU


def _after(x: Array, *read: PyTree) -> Array:
    """Returns `x`, integers or a key, which XLA cannot use before it has `read`.

    Otherwise XLA may write to an array, at a place that depends on `x`, before reading from it, and
    so copies the array first. It also generates random bits in parallel with `read`, and wakes a
    thread for them. Sampling from 10,000 items with priorities: 32 and 118; from 8 clusters: 94 and
    164.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _after(jax.random.key_data(x), *read)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    zero: Any = np.int32(0)
    for leaf in tree_leaves(read):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.size:
            is_set = leaf.ravel()[0] != jnp.zeros((), leaf.dtype)
            zero += is_set.astype(int32) >> 1  # XLA would simplify a literal 0
    return x + zero.astype(x.dtype)


def _random_below(bound: Array, bits: Array) -> Array:
    """Computes floor(bound * r / 2**64) [B] int32, of 64 random bits r: `bits` [2, B] uint32.

    Multiplies 16 bits of r at a time, as JAX has no 64-bit numbers by default. Sampling from
    1,000,000 items: 39, and 129 with jax.random.randint, for which XLA wakes a thread.
    """
    high, low = bits
    n = bound.astype(uint32)
    draw = jnp.zeros_like(low)
    for digit in (low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16):
        carry = ((n & 0xFFFF) * digit + (draw & 0xFFFF)) >> 16
        draw = (n >> 16) * digit + (draw >> 16) + carry
    return draw.astype(int32)
