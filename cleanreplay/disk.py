"""Stores arrays by their names, with JSON about them: in safetensors, large ones in zarr.

A file has all that is needed to read it. NumPy, torch and JAX can read it without this code. Large
arrays of a checkpoint are beside it, each in its own folder.
"""

import errno
import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jax
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from tqdm import tqdm

from cleanreplay.errors import UsageError

KEY, SUM = "cleanreplay", "crc32"  # keys of the metadata, whose values are texts
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
LARGE = 1_000_000  # bytes; arrays of checkpoints that are larger are compressed
CHUNK_BYTES = 2**20  # at most; chunks are compressed and written one by one
CHUNKS_AT_ONCE = 8  # in memory while a large array is written or read
# With tensorstore's own locks a killed writer leaves a file, which the next write of the chunk
# reuses without truncating it. Without locks each write has its own file.
CONTEXT = {"file_io_locking": {"mode": "none"}}


def is_full(error: BaseException) -> bool:
    """Returns whether the reason of an error is a full disk, or a user's full quota."""
    text = str(error).lower()  # tensorstore has errors of its own
    has_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return has_number or "no space left" in text or "quota exceeded" in text


def write_whole(file: Path, data: bytes) -> None:
    """Replaces a file. If the process is killed, the old file or the new one remains, complete."""
    new = file.with_name(f".{file.name}.new")
    try:
        with new.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())  # or a power failure could leave an empty one
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)  # it exists if the disk is full


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, after files were renamed."""
    if os.name == "nt":  # Windows opens no folders
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def to_json(value: Any, indent: int | None = None) -> str:
    """Writes JSON, in which NaN and infinities are the texts "nan", "inf" and "-inf".

    Types that JSON does not know are written as text, and an Enum as its value.
    """

    def finite(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: finite(y) for key, y in x.items()}
        if isinstance(x, list | tuple):
            return [finite(y) for y in x]
        return str(x) if isinstance(x, float) and not math.isfinite(x) else x

    def as_known(x: Any) -> Any:
        return getattr(x, "value", str(x))

    return json.dumps(finite(value), indent=indent, default=as_known, allow_nan=False)


def lock(file: Any, where: Path) -> bool:
    """Locks an open file until it is closed. Returns False if another process has locked it.

    Without support for locks it writes a line about `where`, and returns True.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        tqdm.write(f"{where}: no locks on Windows, so nothing keeps a second process out")
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        what = f"its file system has no locks ({error.strerror})"
        tqdm.write(f"{where}: {what}, so nothing keeps a second process out")
    return True


def names(tree: Any) -> list[str]:
    """Names the leaves of a pytree by their paths, such as params/Dense_0/bias."""
    return [keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(tree)]


def by_name(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree by their names."""
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def check_shapes(what: str, there: dict, here: dict) -> None:
    """Raises UsageError if names or shapes {name: shape} differ; `what` begins its text."""
    # Parameters first: their names are clearer than those of the optimizer.
    for name in sorted(here | there, key=lambda name: "params" not in name):
        if there.get(name) != here.get(name):
            shapes = [tree.get(name, "missing") for tree in (there, here)]
            raise UsageError(f"{what}: {name} is {shapes[0]} there, {shapes[1]} here")


class Stored(NamedTuple):
    """An opened file of arrays: its metadata, without the numbers."""

    file: Path
    about: dict  # as given to `write`
    shapes: dict[str, tuple[int, ...]]  # of all arrays, by their names
    sums: dict[str, int]  # checksums
    large: dict[str, str]  # dtypes of the arrays in folders beside the file

    def read(self, wanted: Iterable[str]) -> dict[str, np.ndarray]:
        """Reads arrays by their names. ValueError if one is damaged."""
        wanted = list(wanted)
        with opened(self.file) as file:
            found = {name: file.get_tensor(name) for name in wanted if name not in self.large}
        for name in wanted:
            if name in self.large:
                found[name] = np.empty(self.shapes[name], self.large[name])
                for index in self.blocks(name):
                    found[name][index] = self.read_block(name, index)
            self.check(name, crc32(found[name]))
        return found

    def blocks(self, name: str) -> Iterator[tuple[slice, ...]]:
        """Yields the indices of the blocks of a large array, in order."""
        return blocks(self.shapes[name], np.dtype(self.large[name]).itemsize)

    def read_block(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a block of a large array."""
        folder = folder_of(self.file, name)
        array = open_zarr(folder, self.shapes[name], self.large[name], create=False)
        return array[index].read().result()

    def check(self, name: str, number: int) -> None:
        """Raises ValueError if the checksum of an array differs from that in the file."""
        if self.sums[name] != number:
            raise ValueError(f"{name} has a different checksum than when it was saved")


def write(
    file: Path, arrays: Iterable[tuple[str, Any]], about: dict, compresses: bool = False
) -> None:
    """Writes arrays and `about` to a file, completely or not at all.

    Args:
      file: is replaced if it exists.
      arrays: pairs of a name and an array of NumPy or JAX. Compressed arrays are in memory one at a
        time.
      about: values that JSON takes.
      compresses: whether arrays of more than LARGE bytes get their own folders beside the file. A
        killed process may leave these incomplete: write to a new folder, and rename that.
    """
    small, sums, large = {}, {}, {}
    for name, x in arrays:
        x = np.asarray(x, order="C")
        if compresses and x.nbytes > LARGE:
            large[name] = [x.dtype.name, x.shape]
            sums[name] = write_blocks(folder_of(file, name), x)
        else:
            small[name] = x
            sums[name] = crc32(x)
    text = to_json({"about": about, "checksums": sums, "large": large})
    metadata = {KEY: text, SUM: str(zlib.crc32(text.encode()))}
    write_whole(file, save(small, metadata=metadata))


def open_file(file: Path) -> Stored:
    """Opens a file of arrays. ValueError if it is damaged, or if `write` did not write it."""
    with opened(file) as found:
        metadata = found.metadata() or {}
        shapes = {name: tuple(found.get_slice(name).get_shape()) for name in list(found.keys())}
    if KEY not in metadata:
        raise ValueError("CleanReplay did not write it")
    text = metadata[KEY]
    if metadata.get(SUM) != str(zlib.crc32(text.encode())):
        raise ValueError("its metadata have a different checksum than when they were saved")
    told = json.loads(text)
    large = {name: dtype for name, (dtype, _) in told["large"].items()}
    shapes |= {name: tuple(shape) for name, (_, shape) in told["large"].items()}
    return Stored(file, told["about"], shapes, told["checksums"], large)


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """Opens a file of safetensors in `with`. Its errors become ValueErrors."""
    try:
        with safe_open(file, framework="numpy") as found:
            yield found
    except SafetensorError as error:
        raise ValueError(str(error)) from error


def folder_of(file: Path, name: str) -> Path:
    """Returns the folder of a large array beside a file."""
    return file.parent / quote(name, safe="")


def crc32(x: np.ndarray, before: int = 0) -> int:
    """Computes the checksum of an array's numbers, continuing the checksum `before`."""
    data: Any = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
    return zlib.crc32(data, before)


def chunk_shape(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Returns the shape of a chunk: consecutive numbers, of at most CHUNK_BYTES."""
    chunk = [1] * len(shape)
    size = itemsize
    for axis in reversed(range(len(shape))):
        chunk[axis] = max(1, min(shape[axis], CHUNK_BYTES // size))
        size *= chunk[axis]
        if chunk[axis] < shape[axis]:
            break
    return tuple(chunk)


def blocks(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[slice, ...]]:
    """Yields the index of each block of an array, in order. A block has whole chunks."""
    chunk = chunk_shape(shape, itemsize)
    split = [axis for axis, size in enumerate(chunk) if size < shape[axis]]
    axis = split[-1] if split else 0  # chunks have length 1 in the axes before it
    rows = chunk[axis] * CHUNKS_AT_ONCE
    after = [slice(0, size) for size in shape[axis + 1 :]]
    for lead in np.ndindex(shape[:axis]):
        before = [slice(i, i + 1) for i in lead]
        for start in range(0, shape[axis], rows):
            yield (*before, slice(start, min(start + rows, shape[axis])), *after)


def chunks_of(shape: Sequence[int]) -> dict:
    """Returns zarr's metadata of chunks of this shape."""
    return {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [*shape]}}}


def open_zarr(
    folder: Path,
    shape: tuple[int, ...],
    dtype: str,
    metadata: dict | None = None,
    level: int = 1,
    create: bool = True,
) -> Any:
    """Opens an array in its own folder with tensorstore, or makes it, compressed by zstd.

    Reading a chunk that is missing, or whose checksum differs, raises an error. `metadata` are
    those of zarr 3; by default chunks are files in this folder.
    """
    import tensorstore as ts  # only runs with large replays need it

    if metadata is None:
        metadata = chunks_of(chunk_shape(shape, np.dtype(dtype).itemsize))
        metadata["chunk_key_encoding"] = {"name": "v2", "configuration": {"separator": "."}}
    codecs = [{"name": "zstd", "configuration": {"level": level}}, {"name": "crc32c"}]
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{folder}/"},
        "context": CONTEXT,
        "dtype": dtype,
        "metadata": metadata | {"codecs": codecs},
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, shape=shape, create=create, open=True).result()


def write_blocks(folder: Path, x: np.ndarray) -> int:
    """Writes a large array to its own folder. Returns its checksum."""
    store = open_zarr(folder, x.shape, x.dtype.name)
    number = 0
    for index in blocks(x.shape, x.itemsize):
        block = x[index]
        writing = store[index].write(block, can_reference_source_data_indefinitely=True)
        number = crc32(block, number)  # while threads compress and write
        writing.result()
    return number
