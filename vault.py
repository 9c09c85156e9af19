"""Experience on disk: every row that a replay buffer was given, in zarr arrays, beyond its ring.

    vault = Vault("runs/experience", item, num_envs=8)  # as `init` of the buffer takes them
    vault.write(state)  # now and then: the rows that were added since the last time
    items = vault.read(0, len(vault))  # NumPy arrays, of the item's structure

Row r of a run is row r of its vault: writing twice is harmless, a resumed run writes over what came
after its checkpoint. Each leaf is a zarr 3 array; `vault.json` says how many of their rows count.
"""

import fcntl
import json
import os
import weakref
import zlib
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

CHUNK_BYTES, CHUNK_ROWS = 2**20, 2**14  # at most; appending to a chunk writes all of it
PIECES = 4096, 256, 16, 1, 0  # rows that leave the ring at once: each size is compiled


def describe(items: Any, axes: int = 0) -> dict[str, str]:
    """The name of each leaf, its dtype and its shape without the first axes."""
    leaves = jax.tree_util.tree_leaves_with_path(items)
    names = [jax.tree_util.keystr(key, simple=True, separator=".") or "item" for key, _ in leaves]
    kinds = [f"{jnp.result_type(x)}{[*jnp.shape(x)[axes:]]}" for _, x in leaves]
    return dict(zip([quote(name, safe="") for name in names], kinds, strict=True))


@partial(jax.jit, static_argnums=(2, 3))
def ring_rows(storage: Any, slot: Any, count: int, axes: int) -> Any:
    """The `count` rows of a ring from `slot` on; its leaves have that many axes of 1 in front."""
    rows = partial(jax.lax.dynamic_slice_in_dim, start_index=slot, slice_size=count)
    return jax.tree.map(lambda x: rows(x.reshape(x.shape[axes:])), storage)


class Vault:
    """The experience of one run, in a folder that is made if it is not there.

    Args:
      path: the folder. Any number of processes may read, one may write. Linux and macOS.
      item: as for `init` of the buffer, an item of one environment: arrays of any dtype.
      num_envs: as for the buffer; None for a buffer of items.
      create: whether a folder without a vault is made into one. False: nothing is written.

    A vault in a folder that this user may not write to can be read.

    FileNotFoundError if there is no vault and `create` is False; ValueError if it holds other items
    or was damaged; TypeError for typed keys.
    """

    def __init__(
        self, path: Any, item: Any, num_envs: int | None = None, *, create: bool = True
    ) -> None:
        if "key<" in str(describe(item)):
            raise TypeError("the item has a typed key: store what jax.random.key_data gives for it")
        row = lambda x: np.zeros((num_envs or 1, *jnp.shape(x)), jnp.result_type(x))  # noqa: E731
        item, self.env = jax.tree.map(row, item), 0 if num_envs is None else slice(None)
        self.path, self.leaves = Path(path).absolute(), describe(item)
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not (self.path / "vault.json").exists():
            raise FileNotFoundError(f"{self.path} holds no vault")
        self.files = ts.KvStore.open({"driver": "file", "path": f"{self.path}/"}).result()
        if create and not any(x.name == "vault.json" or x.is_dir() for x in self.path.iterdir()):
            self._count(0)
        len(self)  # compares the leaves
        self.lock: int | None = None  # opened by the first write, which a reader has no right to
        arrays = map(self._open, self.leaves, jax.tree.leaves(item))
        self.arrays = jax.tree.unflatten(jax.tree.structure(item), arrays)

    def _open(self, name: str, row: np.ndarray) -> Any:
        """The array [rows, N, ...] of a leaf; its length is one that no run reaches."""
        rows = min(max(CHUNK_BYTES // max(row.nbytes, 1), 1), CHUNK_ROWS)
        chunks = {"chunk_shape": [rows, *(max(size, 1) for size in row.shape)]}
        codecs = [{"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]
        metadata = {"chunk_grid": {"name": "regular", "configuration": chunks}, "codecs": codecs}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.path}/{name}/"},
            "dtype": row.dtype.name,
            "metadata": metadata,
            "fill_missing_data_reads": False,  # a missing chunk is an error
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(spec, shape=[2**40, *row.shape], create=True, open=True).result()

    def __len__(self) -> int:
        """How many rows can be read."""
        text, _, checksum = (self.path / "vault.json").read_bytes().rpartition(b"\n")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError(f"{self.path}/vault.json was damaged: its checksum is another")
        if (about := json.loads(text))["leaves"] != self.leaves:
            raise ValueError(f"{self.path} holds {about['leaves']}, not {self.leaves}")
        return about["rows"]

    def _count(self, rows: int) -> None:
        """Makes `rows` the number of rows that count; if it is killed, wholly or not at all."""
        text = json.dumps({"leaves": self.leaves, "rows": rows}, indent=1).encode()
        self.files["vault.json"] = text + b"\n%08x" % zlib.crc32(text)

    def read(self, start: int, stop: int) -> Any:
        """Rows `start` to `stop` - 1 as NumPy arrays [rows, N, ...], of items [rows, ...].

        IndexError if they are not all there; ValueError that names the file that was damaged.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop}, of a vault that has {len(self)}")
        reads = jax.tree.map(lambda array: array[start:stop].read(), self.arrays)
        return jax.tree.map(lambda read: read.result()[:, self.env], reads)

    def write(self, state: Any) -> int:
        """Appends the rows that `state` has and the vault has not; returns how many.

        `state` is that of a `uniform_replay`, `prioritised_replay` or `circular_buffer`. After a
        resume write the restored state first: it drops the vault's rows that came after it.

        ValueError if rows were overwritten or popped before they were written, or if it is the
        state of another run or buffer; BlockingIOError if another process writes; PermissionError
        if this user may not.
        """
        if self.lock is None:
            self.lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self.lock)
        try:  # until the process ends or forgets this vault
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{self.path} is written by another process") from error
        axes = state.cursor.ndim  # of length 1, in front, as of one agent that is compiled
        ring, envs = jax.tree.leaves(state.storage)[0].shape[axes : axes + 2]
        if (given := describe(state.storage, axes + 1)) != self.leaves:
            raise ValueError(f"the state holds {given}, {self.path} {self.leaves}")
        modulus = 2**30 // (ring * envs) * ring  # of the state's count of rows, as in buffers.py
        rows, cursor, held = len(self), state.cursor.item(), state.size.item()
        ahead = (cursor - rows + modulus // 2 - 1) % modulus - modulus // 2 + 1
        known, new = rows + min(ahead, 0), max(ahead, 0)
        if new > held:
            raise ValueError(f"{new - held} rows are gone: write before {held + 1} more are added")
        same = min(16, held - new, known)  # compared, written again: one is the same if the run is
        first, parts = cursor - same - new, list[Any]()
        while first < cursor or not parts:
            size = next(x for x in PIECES if x <= min(cursor - first, ring - first % ring))
            parts.append(ring_rows(state.storage, first % ring, size, axes))
            first += size
        items = jax.tree.map(lambda *x: np.concatenate(x), *jax.device_get(parts))
        pairs = zip(*map(jax.tree.leaves, (self.read(known - same, known), items)), strict=True)
        equal = [[x.tobytes() == y.tobytes() for x, y in zip(*p, strict=False)] for p in pairs]
        if rows and not (known and (same == 0 or np.all(equal, axis=0).any())):
            hint = "take a new path for a new run; after a resume write the restored state first"
            raise ValueError(f"{self.path} has {rows} rows of another run: {hint}")
        write = lambda array, x: array[known - same : known + new].write(x)  # noqa: E731
        jax.tree.map(lambda put: put.result(), jax.tree.map(write, self.arrays, items))
        self._count(known + new)
        return new
