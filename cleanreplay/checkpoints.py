"""Saves the state of training, and restores it.

The folder of a run keeps the newest two checkpoints. Each is a folder, `checkpoints/STEP`, with the
file `state.safetensors`, which has the leaves of the State by their paths. Large leaves are beside
it, see `disk`.
"""

import errno
import re
import shutil
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from cleanreplay import disk
from cleanreplay.distributed import of_first
from cleanreplay.errors import UsageError

COPIED = 100_000_000  # bytes; larger states are written without a copy and a thread
FILE = "state.safetensors"


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in the folder of a run, oldest first."""
    found = Path(folder, "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdigit())


def file_at(folder: Path, step: int) -> Path:
    """Returns the file of a checkpoint."""
    return Path(folder, "checkpoints", str(step), FILE)


def newest(folder: Path) -> Path:
    """Returns the file of the newest checkpoint in the folder of a run. UsageError without one."""
    steps = steps_in(folder)
    if not steps:
        run = Path(folder).parent
        hint = f": all agents of the run are in {run}" if (run / "checkpoints").is_dir() else ""
        raise UsageError(f"{folder}/checkpoints has no checkpoint{hint}")
    return file_at(folder, steps[-1])


class Checkpoints:
    """Writes the checkpoints of a run, each completely or not at all.

    Checkpoints that a killed process left incomplete are deleted.
    """

    def __init__(self, run_folder: Path | str) -> None:
        self.run_folder = Path(run_folder).absolute()
        self.folder = self.run_folder / "checkpoints"
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        self.step = 0  # of the newest checkpoint
        if jax.process_index() == 0:
            for begun in self.folder.glob(".*"):
                shutil.rmtree(begun)

    def save(self, step: int, state: Any, about: dict) -> None:
        """Saves the state of training after `step`, and `about` as JSON.

        Training overwrites the state, so a small one is copied, and a thread writes the copy. The
        next `wait` raises an error of the thread; so does the next `save`, after saving its own
        state. If a state is spread over several processes, all of them must call this.
        """
        try:
            self.wait()
        finally:
            if step != self.step:
                self.step = step
                self._begin(step, disk.by_name(state), about)

    def _begin(self, step: int, leaves: dict[str, jax.Array], about: dict) -> None:
        on_host = ((name, whole(x)) for name, x in leaves.items())
        if sum(x.nbytes for x in leaves.values()) <= COPIED:
            copies = [(name, np.array(x)) for name, x in on_host]
            if jax.process_index() == 0:
                self.writing = self.thread.submit(self._write, step, copies, about)
        elif jax.process_index() == 0:
            self._write(step, on_host, about)
        else:
            deque(on_host, maxlen=0)  # to take part in gathering each leaf

    def wait(self) -> None:
        """Waits until the last checkpoint is written. UsageError if the disk is full."""
        writing, self.writing = self.writing, None  # an error is raised once
        if writing is not None:
            writing.result()

    def _write(self, step: int, leaves: Iterable[tuple[str, np.ndarray]], about: dict) -> None:
        """Writes a checkpoint under a temporary name, renames it, and deletes old checkpoints."""
        new = self.folder / f".{step}.new"
        leaves = iter(leaves)
        try:
            new.mkdir(parents=True)
            disk.write(new / FILE, leaves, about, compresses=True)
            for folder in (new, *(path for path in new.iterdir() if path.is_dir())):
                disk.sync_folder(folder)
            new.rename(self.folder / str(step))
            disk.sync_folder(self.folder)
        except Exception as error:
            deque(leaves, maxlen=0)  # the other processes gather all leaves
            shutil.rmtree(new, ignore_errors=True)
            if disk.is_full(error):
                raise UsageError(f"no space left on the disk of {self.folder}") from error
            raise
        for old in steps_in(self.run_folder)[:-2]:
            gone = (self.folder / str(old)).rename(self.folder / f".{old}.old")
            shutil.rmtree(gone)

    def restore(self, state: Any) -> tuple[int, Any, dict]:
        """Restores the newest checkpoint that can be read. Returns its step, state and `about`.

        `state` gives the shapes and devices; its arrays are overwritten. Damaged checkpoints are
        moved aside. The first process reads, and sends the contents to the others.
        """
        of_first(partial(newest, self.run_folder))  # raises without a checkpoint
        leaves = disk.by_name(state)
        damaged = {}
        for step in reversed(of_first(partial(steps_in, self.run_folder))):
            file = file_at(self.run_folder, step)
            try:
                stored = of_first(partial(disk.open_file, file))
                read_into(leaves, stored)
                break
            except UsageError:
                raise
            except Exception as error:
                if is_of_the_machine(error):
                    text = f"resume: checkpoint {step} cannot be read now: {first_line(error)}"
                    raise UsageError(text) from error
                damaged[step] = first_line(error)
        else:
            raise UsageError(f"resume: no checkpoint in {self.folder} can be read")
        for other, reason in damaged.items():
            of_first(partial(self._move_aside, other))
            what = f"checkpoint {other} is damaged and was moved to {self.run_folder / 'damaged'}"
            tqdm.write(f"{what}: the run continues from {step} ({reason})")
        self.step = step
        return step, jax.tree.unflatten(jax.tree.structure(state), leaves.values()), stored.about

    def _move_aside(self, step: int) -> None:
        """Moves a checkpoint to the folder `damaged`, so that its step can be saved again."""
        aside = self.run_folder / "damaged" / f"{step}_{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        (self.folder / str(step)).rename(aside)


def whole(x: jax.Array) -> np.ndarray:
    """Returns a whole array in NumPy, without a copy if it is in the memory of this process.

    If it is spread over several processes, all of them must call this.
    """
    if not (x.is_fully_addressable or x.is_fully_replicated):
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def read_into(leaves: dict[str, jax.Array], stored: disk.Stored) -> None:
    """Replaces leaves by those of a checkpoint, which have the same shapes.

    Large leaves are overwritten in blocks: memory never holds two replays. UsageError if a leaf is
    missing here or there, or its shape differs. ValueError if a leaf is damaged.
    """
    here = {name: x.shape for name, x in leaves.items()}
    disk.check_shapes(f"{stored.file} is of another script or version", stored.shapes, here)
    small = of_first(partial(stored.read, [name for name in leaves if name not in stored.large]))
    for name, x in leaves.items():
        if name not in stored.large:
            leaves[name] = jax.device_put(small[name].astype(x.dtype), x.sharding)
            continue
        put = jax.jit(jax.lax.dynamic_update_slice, donate_argnums=0, out_shardings=x.sharding)
        number = 0
        for index in stored.blocks(name):
            block = of_first(partial(stored.read_block, name, index))
            number = disk.crc32(block, number)
            start = [part.start for part in index]
            leaves[name] = put(leaves[name], block.astype(x.dtype), start)
        stored.check(name, number)


def is_of_the_machine(error: Exception) -> bool:
    """Returns whether a reading error is about memory, files or rights, not contents."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return False
    numbers = re.findall(r"OS error (\d+)", str(error))  # of tensorstore, which has its own errors
    is_of_os = any(int(number) != errno.ENOENT for number in numbers)
    return is_of_os or isinstance(error, OSError | MemoryError) or "RESOURCE_EXH" in str(error)


def first_line(error: Exception) -> str:
    """Returns the beginning of the text of an error."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
