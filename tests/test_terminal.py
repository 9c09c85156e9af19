"""cleanreplay/terminal.py: signals, and output streams without a reader."""

import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver

import pytest

import dqn_jax
from cleanreplay import terminal

ALL = [getattr(signal, name) for name in terminal.SIGNALS]


def handlers():
    return [signal.getsignal(number) for number in ALL]


@pytest.fixture(autouse=True)
def begin_with_no_signal_ignored():
    """Restores signals, because background jobs ignore SIGINT, and jobs under nohup SIGHUP."""
    before = handlers()
    for number in ALL:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in zip(ALL, before, strict=True):
        signal.signal(number, handler)


def note(*numbers, has_processes=False):
    """Raises signals while they are noted. Returns the noted ones, and the handlers then."""
    stop = []
    with terminal.noted_signals(stop, has_processes):
        for number in numbers:
            signal.raise_signal(number)
        return stop, handlers()


def test_each_signal_is_noted_and_a_second_one_would_end_the_run(capfd):
    stop, inside = note(*ALL)

    assert stop == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert inside == [signal.SIG_DFL] * 3
    assert handlers() == [signal.default_int_handler] * 3
    assert capfd.readouterr().err.count("stopping after this iteration") == 3


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop, inside = note(signal.SIGHUP, signal.SIGTERM)

    assert inside[ALL.index(signal.SIGHUP)] == signal.SIG_IGN
    assert stop == [signal.SIGTERM]


def test_a_signal_is_noted_though_its_message_is_not_written(monkeypatch):
    def write(descriptor, text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", write)

    assert note(signal.SIGINT)[0] == [signal.SIGINT]


def test_processes_of_environments_begin_ignoring_signals(monkeypatch):
    found = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: found.extend(handlers()))
    _, inside = note(has_processes=True)

    assert found == [signal.SIG_IGN] * 3
    assert signal.SIG_IGN not in inside


def test_signals_are_as_before_if_processes_cannot_start(monkeypatch):
    def fail():
        raise OSError("no more processes")

    monkeypatch.setattr(forkserver, "ensure_running", fail)
    with pytest.raises(OSError, match="no more"):
        note(has_processes=True)

    assert handlers() == [signal.default_int_handler] * 3


def test_a_run_in_another_thread_leaves_signals_alone():
    with ThreadPoolExecutor(1) as thread:
        _, inside = thread.submit(note, has_processes=True).result()

    assert inside == [signal.default_int_handler] * 3


def test_a_stream_is_given_up_when_its_reader_is_gone(monkeypatch):
    reader, writer = os.pipe()
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.give_up_dead_streams()
        terminal.give_up_dead_streams()
        print("read", flush=True)

        assert sys.stdout.stream is stream  # wrapped once
        assert sys.stdout.write("more") == 4
        assert os.read(reader, 100) == b"read\nmore"
        os.close(reader)
        for _ in range(3):
            print("not read", flush=True)
        assert not sys.stdout.isatty()  # it is still usable as a stream


def test_a_text_that_waits_for_a_dead_reader_is_given_up(monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.give_up_dead_streams()
        print("waits", file=sys.stderr)
        os.close(reader)
        sys.stderr.flush()


def test_a_script_gives_up_dead_streams(run_main):
    run_main(dqn_jax, "--help")

    assert isinstance(sys.stdout, terminal.Stream)
