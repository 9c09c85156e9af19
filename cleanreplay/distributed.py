"""Joins processes that train together, with `jax.distributed`, and ends them together."""

import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cleanreplay.errors import LostProcessError, UsageError

HEARTBEAT = 10  # seconds without a heartbeat after which a process is considered dead
LOST = (
    "distributed: another process ended, and so does this one. The first process saves what was "
    "learned; if the first process ended, its last checkpoint stays"
)


def join(how: str) -> None:
    """Joins the processes that train together. Only the first one prints.

    `how` is "ADDRESS,PROCESSES,ID", such as "localhost:12345,2,0", or "auto": under SLURM, Open MPI
    and Kubernetes JAX finds these by itself.
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits, Ctrl-C ends it
    try:
        if how == "auto":
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT)
        else:
            address, processes, own_id = how.split(",")
            print(f"process {own_id} waits at {address} for all {processes} of them", flush=True)
            jax.distributed.initialize(
                address, int(processes), int(own_id), heartbeat_timeout_seconds=HEARTBEAT
            )
        # They connect now: here JAX waits half a minute at most, later without a limit.
        multihost_utils.process_allgather(np.uint8(0))
    except (RuntimeError, ValueError) as error:
        first_line = str(error).partition("\n")[0]
        raise UsageError(f"distributed: {first_line}") from error
    signal.signal(signal.SIGINT, handler)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the process ends


def gather(x: Any) -> np.ndarray:
    """Gathers an array of the same shape and dtype from all P processes: [P, ...].

    LostProcessError if one of them has ended.
    """
    with lost_process():
        return multihost_utils.process_allgather(x)


@contextmanager
def lost_process() -> Iterator[None]:
    """Raises LostProcessError for the error of a collective in `with`, if a process has ended."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if jax.process_count() == 1 or not any(name in str(error) for name in ("Gloo", "NCCL")):
            raise
        raise LostProcessError(LOST) from error


@contextmanager
def ends_together() -> Iterator[None]:
    """Ends this process at once after an error in `with`, if others train with it.

    Otherwise Python would wait for them at its exit. They notice that this process has ended.
    """
    try:
        yield
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if isinstance(error, UsageError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(2 if isinstance(error, UsageError) else 1)


def any_process(condition: bool) -> bool:
    """Returns whether the condition holds in any process. All processes must call this."""
    if jax.process_count() == 1:
        return condition
    return bool(gather(np.bool_(condition)).any())


def of_first(call: Callable[[], Any]) -> Any:
    """Returns in all processes what `call()` returns in the first one, or raises its error.

    The other processes do not call it. Its result is pickled.
    """
    if jax.process_count() == 1:
        return call()
    sent = b""
    if jax.process_index() == 0:
        try:
            sent = pickle.dumps((call(), None))
        except Exception as reason:
            sent = pickle.dumps((None, reason))
    with lost_process():
        # Two numbers, because JAX has int32 only.
        size = multihost_utils.broadcast_one_to_all(np.array(divmod(len(sent), 2**30), np.int32))
        padded = np.frombuffer(sent.ljust(int(size[0]) * 2**30 + int(size[1])), np.uint8)
        result, error = pickle.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if error is not None:
        raise error
    return result


def check_same(facts: dict[str, Any]) -> None:
    """Raises UsageError in all processes if the value of a fact differs in one of them."""
    if jax.process_count() == 1:
        return
    sent = np.frombuffer(json.dumps({k: str(x) for k, x in facts.items()}).encode(), np.uint8)
    sizes = gather(np.int32(sent.size))
    received = gather(np.pad(sent, (0, sizes.max() - sent.size)))
    first, *others = (json.loads(bytes(x[:n])) for x, n in zip(received, sizes, strict=True))
    for i, other in enumerate(others, 1):
        for name, value in first.items():
            if other.get(name) != value:
                text = f"{name} is {value} in the first process, {other.get(name)} in process {i}"
                raise UsageError(f"distributed: {text}: it must be the same in all")


class NoWriter:
    """Replaces the EventFileWriter in all processes but the first."""

    def add_event(self, event: Any) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Does nothing."""
