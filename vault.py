"""Experience on disk: every row that a replay buffer was given, in zarr arrays, beyond its ring.
Row r of a run is row r of its vault, so a resumed run overwrites what came after its checkpoint.

    vault = Vault("runs/experience", item, num_envs=8)  # as `init` of the buffer takes them
    vault.write(state)  # now and then: the rows that were added since the last time
    items = vault.read(0, len(vault))  # NumPy arrays, of the item's structure
    vault = Vault("runs/experience")  # one of which nothing is known: a dict of arrays by name
"""

import errno
import fcntl
import json
import operator
import os
import weakref
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax import default_backend
from jax.tree_util import (
    keystr,
    tree_leaves,
    tree_leaves_with_path,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from buffers import cursor_modulus

CHUNK_BYTES = 2**20  # at most; appending to a chunk writes all of it
CHUNK_ROWS = 2**14  # at most
COMPARED = 16  # rows, to tell whether a state is of the same run
# The vault has a lock of its own. With tensorstore's a killed writer leaves a file that the next
# write of a chunk goes into without cutting it; without, each write has a file of its own name.
CONTEXT = {"file_io_locking": {"mode": "none"}}


def describe(items: Any, axes: int = 0) -> dict[str, str]:
    """The name of each leaf, its dtype and its shape without the first axes."""
    leaves = {}
    for path, leaf in tree_leaves_with_path(items):
        name = keystr(path, simple=True, separator=".") or "item"
        shape = jnp.shape(leaf)[axes:]
        dtype = jnp.result_type(leaf)
        leaves[quote(name, safe="")] = f"{dtype}{[*shape]}"
    return leaves


def ring_of(state: Any) -> tuple[int, int]:
    """Rows and environments of a state's ring; axes of length 1 may stand in front of them."""
    lead = state.cursor.shape
    shape = tree_leaves(state.storage)[0].shape
    if shape[: len(lead)] != lead:
        hint = "add the same items to a circular_buffer, and write its state"
        raise TypeError(f"a clustered replay does not know the order of its items: {hint}")
    if state.cursor.size > 1:
        hint = "write that of one agent, such as jax.tree.map(lambda x: x[0], state)"
        raise ValueError(f"these are {state.cursor.size} states, stacked: {hint}")
    rows, envs, *_ = shape[len(lead) :]
    return rows, envs


def newest(state: Any, ring: int, count: int) -> Any:
    """The newest `count` rows of a ring, as NumPy arrays."""
    end = state.cursor.item()
    at = (0,) * state.cursor.ndim + (np.arange(end - count, end) % ring,)
    on_host = default_backend() == "cpu"  # NumPy sees the same memory, and takes rows faster
    storage = tree_map(np.asarray, state.storage) if on_host else state.storage
    return tree_map(lambda leaf: np.asarray(leaf[at]), storage)


def bytes_of(items: Any, count: int) -> list:
    """The bytes of the first rows' leaves, but not of flags: a resume changes those of the last."""
    leaves = tree_leaves(items)
    compared = [leaf for leaf in leaves if leaf.dtype != bool] or leaves  # all are flags
    return [tuple(leaf[row].tobytes() for leaf in compared) for row in range(count)]


class Vault:
    """The experience of one run, in a folder that is made if it is not there.

    Args:
      path: the folder. Any number of processes may read, with no right to write, and one may write.
      item, num_envs: as for the buffer: an item of one environment, and how many environments, or
        None in a buffer of single items. Without an item the vault must be there, and `read` gives
        {name of a leaf: array}.
      about: what JSON takes, such as {"env_id": "CartPole-v1"}. Kept unless the vault has its own.
      create: if False, no vault is made: FileNotFoundError for a folder without one.
      compression: zstd's level in a new vault, from 1 (fast) to 22 (small).

    Attributes: `about` is what the vault keeps, `num_envs` as given, or without an item as stored.
    ValueError if it holds other items or was damaged; TypeError for typed keys. Linux and macOS.
    """

    def __init__(
        self,
        path: Any,
        item: Any = None,
        num_envs: Any = None,
        *,
        about: Any = None,
        create: bool = True,
        compression: int = 1,
    ) -> None:
        if "key<" in str(describe(item)):
            raise TypeError("the item has a typed key: store what jax.random.key_data gives for it")
        item = tree_map(jnp.asarray, item)
        row = tree_map(lambda x: np.zeros((num_envs or 1, *x.shape), x.dtype), item)
        leaves = describe(row)
        about = json.loads(json.dumps(about or {}))  # as it will be read
        self.path = Path(path).absolute()
        self.file = self.path / "vault.json"
        if create and item is not None:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not self.file.exists():
            raise FileNotFoundError(f"{self.path} holds no vault")
        folder = {"driver": "file", "path": f"{self.path}/"}
        self.files = ts.KvStore.open(folder, context=ts.Context(CONTEXT)).result()
        has_arrays = any(path.is_dir() for path in self.path.iterdir())
        if not self.file.exists() and not has_arrays:
            about_arrays = {"leaves": leaves, "num_envs": num_envs, "compression": compression}
            self._save(about_arrays | {"about": about, "rows": 0})
        stored = self._load()
        self.leaves = stored["leaves"]
        if item is not None and leaves != self.leaves:
            raise ValueError(f"{self.path} holds {self.leaves}, not {leaves}")
        level = stored["compression"]
        self.arrays = {name: self._open(name, leaf, level) for name, leaf in self.leaves.items()}
        if item is None:
            envs = next(iter(self.arrays.values())).shape[1]
            num_envs = stored.get("num_envs", envs)  # a vault of version 0.1 may not say
            self.names: Any = {unquote(name): name for name in self.leaves}
        else:
            self.names = tree_unflatten(tree_structure(row), leaves)
        self.num_envs = num_envs
        self.about = stored["about"] or about
        self.env = 0 if num_envs is None else slice(None)
        self.lock: Any = None  # opened by the first write, which a reader has no right to

    def _open(self, name: str, described: str, level: int) -> Any:
        """The array [rows, N, ...] of a leaf; its length is one that no run reaches."""
        dtype, _, shape = described.removesuffix("]").partition("[")
        row = np.zeros(json.loads(f"[{shape}]"), dtype)
        fitting = CHUNK_BYTES // max(row.nbytes, 1)
        rows = min(fitting, CHUNK_ROWS)
        chunk = [max(size, 1) for size in (rows, *row.shape)]
        codecs = [{"name": "zstd", "configuration": {"level": level}}, {"name": "crc32c"}]
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.path}/{name}/"},
            "context": CONTEXT,
            "dtype": row.dtype.name,
            "metadata": {"chunk_grid": grid, "codecs": codecs},
            "fill_missing_data_reads": False,  # a missing chunk is an error
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(spec, shape=[2**40, *row.shape], create=True, open=True).result()

    def __len__(self) -> int:
        """How many rows can be read."""
        return self._load()["rows"]

    def _load(self) -> dict:
        """What vault.json says. Row 0 would be row `begin` of the run that is written last."""
        text, _, checksum = self.file.read_bytes().rpartition(b"\n")
        if checksum != b"%08x" % zlib.crc32(text):
            raise ValueError(f"{self.file} was damaged: its checksum is another")
        return {"about": {}, "begin": 0, "compression": 1} | json.loads(text)

    def _save(self, stored: dict) -> None:
        """Writes vault.json; if it is killed, wholly or not at all."""
        text = json.dumps(stored, indent=1).encode()
        self.files["vault.json"] = text + b"\n%08x" % zlib.crc32(text)

    def read(self, start: int, stop: int) -> Any:
        """Rows `start` to `stop` - 1 as NumPy arrays [rows, N, ...], of single items [rows, ...].

        IndexError if they are not all there; ValueError that names the file that was damaged.
        """
        rows = len(self)
        if not 0 <= start <= stop <= rows:
            raise IndexError(f"rows {start} to {stop}, of a vault that has {rows}")
        arrays = self._read(start, stop)
        return tree_map(lambda name: arrays[name][:, self.env], self.names)

    def _read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """Rows [rows, N, ...] by the names of their leaves."""
        reads = {name: array[start:stop].read() for name, array in self.arrays.items()}
        return {name: read.result() for name, read in reads.items()}

    def write(self, state: Any, *, begin_late: bool = False, new_run: bool = False) -> int:
        """Appends the rows that `state` has and the vault has not; returns how many.

        `state` is that of a `uniform_replay`, `prioritised_replay` or `circular_buffer`; TypeError
        for another. After a resume write the restored state first: the rows after it are dropped.
        ValueError if rows were overwritten before they were written, if the items differ, or if it
        is another run: none of the last rows that both have are equal (but for flags, which a
        resume changes). BlockingIOError while another process writes; PermissionError without the
        right to write; OSError if the disk is full.

        With `begin_late` the first write may miss rows: the oldest one held is then row 0. With
        `new_run` the state is of another run, whose rows are appended, from the oldest one held.
        """
        ring, envs = ring_of(state)
        given = describe(state.storage, state.cursor.ndim + 1)
        if given != self.leaves:
            raise ValueError(f"the state holds {given}, {self.path} {self.leaves}")
        self._keep_others_out()
        stored = self._load()
        modulus = cursor_modulus(ring, envs)
        if new_run or (begin_late and stored["rows"] == 0):
            oldest = state.cursor.item() - state.size.item()
            stored["begin"] = (oldest - stored["rows"]) % modulus
        known, new = self._new_rows(state, stored, ring, modulus)
        older = state.size.item() - new
        same = min(COMPARED, older, known)
        leaves = tree_leaves(newest(state, ring, same + new))
        items = dict(zip(given, leaves, strict=True))
        self._check_run(stored["rows"], known, same, items)
        end = known + new
        span = slice(known - same, end)  # what is compared is written again, with its flags of now
        writes = [self.arrays[name][span].write(rows) for name, rows in items.items()]
        stored["about"] = stored["about"] or self.about
        stored["rows"] = end
        try:
            for write in writes:
                write.result()
            self._save(stored)
        except ValueError as error:
            if "no space left" not in str(error).lower():
                raise
            raise OSError(errno.ENOSPC, "no space left", str(self.path)) from error
        return new

    def _keep_others_out(self) -> None:
        """Locks the vault until this process ends or forgets it."""
        is_new_lock = self.lock is None
        if is_new_lock:
            # No leaf's folder has this name, because quote() would change it.
            self.lock = os.open(self.path / "+lock", os.O_RDWR | os.O_CREAT)
            weakref.finalize(self, os.close, self.lock)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"{self.path} is written by another process") from error
        if is_new_lock:
            for left_over in self.path.rglob("*.__lock"):  # by writers that were killed
                left_over.unlink()

    def _new_rows(self, state: Any, stored: dict, ring: int, modulus: int) -> tuple[int, int]:
        """How many rows of the vault the state's run has written, and how many it has since."""
        rows = stored["rows"]
        held = state.size.item()
        ahead = (state.cursor.item() - stored["begin"] - rows) % modulus
        if ahead > modulus // 2:  # the cursor stands for the number that is nearest to `rows`
            ahead -= modulus
        gone = ahead - held
        if gone > 0:
            when = f"write before a pop, and before more than {ring} are added"
            hint = "" if rows else "; begin_late=True begins with the oldest one that is held"
            raise ValueError(f"{gone} rows were overwritten or popped unwritten: {when}{hint}")
        if rows + ahead < 0:
            raise ValueError(f"{self.path} begins with later rows than these: take a new path")
        return rows + min(ahead, 0), max(ahead, 0)

    def _check_run(self, rows: int, known: int, same: int, items: dict) -> None:
        """Raises unless one of the `same` rows up to `known` is as in `items`, or none is there."""
        if rows == 0 or (known > 0 and same == 0):
            return
        stored = bytes_of(self._read(known - same, known), same)
        given = bytes_of(items, same)
        if not any(map(operator.eq, stored, given)):
            raise ValueError(
                f"{self.path} has {rows} rows, but others than this state where both have some. "
                "A new run: take a new path, or write(state, new_run=True) appends it. A resumed "
                "run: write the restored state first. After `update`: what was written stays as it "
                "was, so write a buffer before you update it, or to a new path"
            )
