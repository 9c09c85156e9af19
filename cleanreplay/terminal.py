"""Handles signals, and output streams that nobody reads any more."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOPPING = b"\nstopping after this iteration; once more ends the run without saving\n"
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP


@contextmanager
def noted_signals(stop: list, has_processes: bool) -> Iterator[None]:
    """Appends Ctrl-C, SIGTERM and SIGHUP to `stop` in `with`, which ends the run.

    A second signal of a kind ends the process. Ignored signals stay ignored, as under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]

    def note(number: int, _: Any) -> None:
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)
        with suppress(OSError):  # the terminal may be gone
            os.write(2, STOPPING)  # the signal may have interrupted a print

    before = {number: signal.getsignal(number) for number in numbers}
    try:
        if has_processes:
            ignore_in_processes(numbers)
        for number in numbers:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_in_processes(numbers: list) -> None:
    """Makes the processes of environments ignore these signals, which reach a whole group.

    Training needs the environments until it ends. Windows has neither such groups nor a fork
    server.
    """
    if sys.platform == "win32":
        return
    from multiprocessing import forkserver

    for number in numbers:
        signal.signal(number, signal.SIG_IGN)  # the fork server inherits it
    forkserver.ensure_running()


class Stream:
    """A stream of text whose output is dropped once it cannot be written."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes a text, and nothing after the first failure."""
        self.attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Flushes the stream."""
        self.attempt(self.stream.flush)

    def attempt(self, function: Callable, *given: Any) -> None:
        """Calls a function of the stream. If it fails, sends all later output to os.devnull."""
        try:
            function(*given)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)


def give_up_dead_streams() -> None:
    """Drops output to a closed terminal, or to a pipe that nobody reads, instead of raising."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Stream):
            setattr(sys, name, Stream(stream))
