"""Joins processes that train together, with `jax.distributed`."""

import os
import pickle
import signal
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cleanreplay.errors import UsageError


def join(how: str) -> None:
    """Makes this process one of those that train together. Only the first one prints.

    `how` is "auto", what JAX finds out by itself under SLURM, Open MPI and Kubernetes, or
    "ADDRESS,PROCESSES,ID", such as "localhost:12345,2,0".
    """
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits, Ctrl-C ends it
    try:
        if how == "auto":
            jax.distributed.initialize()
        else:
            address, processes, own_id = how.split(",")
            print(f"process {own_id} waits at {address} for all {processes} of them", flush=True)
            jax.distributed.initialize(address, int(processes), int(own_id))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"distributed: {error}") from error
    signal.signal(signal.SIGINT, handler)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the end


def any_process(condition: bool) -> bool:
    """Returns whether the condition holds in any of the processes, which all call this."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.bool_(condition)).any())


def of_first(call: Callable[[], Any]) -> Any:
    """Returns in all processes what `call()` returns in the first one, or raises its error.

    The other processes do not call it. What it returns is pickled.
    """
    if jax.process_count() == 1:
        return call()
    sent = b""
    if jax.process_index() == 0:
        try:
            sent = pickle.dumps((call(), None))
        except Exception as reason:
            sent = pickle.dumps((None, reason))
    size = multihost_utils.broadcast_one_to_all(np.int32(len(sent)))
    padded = np.frombuffer(sent.ljust(int(size)), np.uint8)
    result, error = pickle.loads(bytes(multihost_utils.broadcast_one_to_all(padded)))
    if error is not None:
        raise error
    return result


class NoWriter:
    """Stands in for the EventFileWriter in all processes but the first."""

    def add_event(self, event: Any) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Has nothing to close."""
