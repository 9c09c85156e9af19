"""Items and configurations of buffers, for the tests of several files."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import numpy as np
from helpers import assert_trees_equal

import buffers


def encode(ids):
    """Makes items [*ids.shape, ...] with the id in every field, to reveal a misaligned gather.

    encode(7) is {"id": 7, "obs": [7.0, 7.0, 7.0], "img": [[7, 7], [7, 7]]}.
    """
    ids = np.asarray(ids, np.int32)
    return {
        "id": ids,
        "obs": np.repeat(ids[..., None], 3, axis=-1).astype(np.float32),
        "img": np.tile((ids % 256).astype(np.uint8)[..., None, None], (2, 2)),
    }


def decode(items):
    """Returns the ids of items that `encode` made. Fails unless all fields of an item agree."""
    ids = np.asarray(items["id"])
    assert_trees_equal(items, encode(ids))
    return ids


def shift(item):
    return jax.tree.map(lambda x: x + 1, item)


def shift_by(item, by):
    """Returns the item whose id is greater by `by`: for `update` with an argument."""
    return jax.tree.map(lambda x: x + by.astype(x.dtype), item)


class Windows(NamedTuple):
    """The configuration of a uniform or prioritised replay, and a model of what it may sample.

    The ids of the items are row * N + environment, where rows count from 0 and never wrap.
    `Windows(6, envs=3, length=2)` holds 6 rows of 3 environments, and samples sequences of 2 steps.
    After 4 rows, `valid(0, 4)` is [0, 1, ..., 8]: all items whose next row was added, too.
    """

    rows: int
    envs: int | None = None
    length: int | None = None
    period: int = 1
    factory: Callable = buffers.uniform_replay

    def prioritised(self):
        return self._replace(factory=buffers.prioritised_replay)

    @property
    def num_envs(self):
        return self.envs or 1

    @property
    def lead(self):
        """Returns the axes of one row: (N,), or () for single items."""
        return () if self.envs is None else (self.envs,)

    @property
    def max_size(self):
        return self.rows * self.num_envs

    @property
    def modulus(self):
        return buffers.cursor_modulus(self.rows, self.num_envs)

    def replay(self, donate=True):
        """Returns the buffer of this configuration, always the same object, so it compiles once."""
        return make_replay(self, donate)

    def ids(self, first, count):
        """Returns ids of rows `first` to `first + count - 1`: [count, N], or [count] for items."""
        ids = np.arange(first, first + count)[:, None] * self.num_envs
        return (ids + np.arange(self.num_envs)).reshape(count, *self.lead)

    def masked_ids(self, first, length, mask):
        """Returns ids of a batch of `length` rows, and how many of them `mask` keeps.

        The kept rows are `first`, `first + 1`, ...; the ids of the others are -1.
        """
        keep = np.array([True] * length if mask is None else mask)
        number_kept = int(keep.sum())
        ids = np.full((length, *self.lead), -1)
        ids[keep] = self.ids(first, number_kept)
        return ids, number_kept

    def index_of(self, ids):
        """Returns the index of each id: the same number until the cursor wraps."""
        return np.asarray(ids, np.int64) % (self.modulus * self.num_envs)

    def valid(self, first, total):
        """Lists the first id of every sequence after rows `first` to `total - 1` were added."""
        starts = []
        for row in range(max(first, total - self.rows), total):
            is_complete = row + (self.length or 1) <= total
            if is_complete and row % self.period == 0:
                starts += [row * self.num_envs + env for env in range(self.num_envs)]
        return starts

    def window(self, start):
        """Returns the ids [..., W] of the sequences that start at `start`, or of single items."""
        if self.length is None:
            return start
        return start[..., None] + self.num_envs * np.arange(self.length)

    def starts(self, windows):
        return windows if self.length is None else windows[:, 0]


@cache
def make_replay(windows, donate):
    return windows.factory(
        windows.max_size,
        num_envs=windows.envs,
        sequence_length=windows.length,
        period=windows.period,
        donate=donate,
    )


def batches(*lengths):
    """Makes a hypothesis strategy for (length, mask); the mask is a list of that length or None."""

    def with_mask(length):
        masks = st.lists(st.booleans(), min_size=length, max_size=length)
        return st.tuples(st.just(length), st.none() | masks)

    return st.sampled_from(lengths).flatmap(with_mask)


def kept(rows, mask):
    """Lists the rows that a mask of `batches` keeps: all if it is None."""
    if mask is None:
        return list(rows)
    return [row for row, keep in zip(rows, mask, strict=True) if keep]


def as_mask(mask):
    return None if mask is None else np.array(mask)
