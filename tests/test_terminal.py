"""cleanreplay/terminal.py: signals, and streams that nobody reads any more."""

import io
import os
import signal
import sys
import threading
import time
from multiprocessing import forkserver

import pytest
from helpers import ROOT, start_python

from cleanreplay import terminal

ALL = [getattr(signal, name) for name in terminal.SIGNALS]


def handlers():
    """Returns what the three signals do now."""
    return [signal.getsignal(number) for number in ALL]


@pytest.fixture(autouse=True)
def begin_with_no_signal_ignored():
    """A job in the background ignores SIGINT, and one under nohup SIGHUP."""
    before = handlers()
    for number in ALL:
        signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in zip(ALL, before, strict=True):
        signal.signal(number, handler)


def test_each_signal_is_noted_and_a_second_one_would_end_the_run(capfd):
    stop = []
    with terminal.noted_signals(stop, has_processes=False):
        for number in ALL:
            signal.raise_signal(number)
        inside = handlers()

    assert stop == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    assert inside == [signal.SIG_DFL] * 3
    assert handlers() == [signal.default_int_handler] * 3
    assert capfd.readouterr().err.count("stopping after this iteration") == 3


def test_a_signal_that_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = []
    with terminal.noted_signals(stop, has_processes=False):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        inside = signal.getsignal(signal.SIGHUP)

    assert inside == signal.SIG_IGN
    assert stop == [signal.SIGTERM]


def test_a_signal_is_noted_though_its_message_is_not_written(monkeypatch):
    def write(descriptor, text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", write)
    stop = []
    with terminal.noted_signals(stop, has_processes=False):
        signal.raise_signal(signal.SIGINT)

    assert stop == [signal.SIGINT]


def test_processes_of_environments_begin_ignoring_signals(monkeypatch):
    found = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: found.extend(handlers()))
    with terminal.noted_signals([], has_processes=True):
        inside = handlers()

    assert found == [signal.SIG_IGN] * 3
    assert signal.SIG_IGN not in inside


def test_signals_are_as_before_if_processes_cannot_start(monkeypatch):
    def fail():
        raise OSError("no more processes")

    monkeypatch.setattr(forkserver, "ensure_running", fail)
    with pytest.raises(OSError, match="no more"), terminal.noted_signals([], has_processes=True):
        pass

    assert handlers() == [signal.default_int_handler] * 3


def test_a_run_in_another_thread_leaves_signals_alone():
    found = []

    def note():
        with terminal.noted_signals([], has_processes=True):
            found.extend(handlers())

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()

    assert found == [signal.default_int_handler] * 3


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
        assert not sys.stdout.isatty()  # it is a stream as before


def test_a_text_that_waits_for_a_dead_reader_is_given_up(monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.give_up_dead_streams()
        print("waits", file=sys.stderr)
        os.close(reader)
        sys.stderr.flush()


@pytest.mark.slow
def test_ctrl_c_saves_where_nobody_reads_the_output(tmp_path):
    """As `2>&1 | tee log`, which Ctrl-C ends first."""
    flags = (
        "--env-id environments:Counter-v0 --learning-starts 50 --batch-size 8 --log-interval 500"
    )
    long = "--total-timesteps 100000000 --eval-episodes 0"
    script = str(ROOT / "dqn_jax.py")
    process = start_python(tmp_path, script, *flags.split(), *long.split())
    assert "cpu" in process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)

    assert process.wait(timeout=60) == 130
    (checkpoint,) = tmp_path.glob("runs/*/checkpoints/*")
    assert int(checkpoint.name) > 0
