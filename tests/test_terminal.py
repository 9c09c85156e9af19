"""cleanreplay/terminal.py: signals, and streams that nobody reads any more."""

import io
import os
import pty
import signal
import sys
import time

import environments  # noqa: F401  registers the environments
import pytest
from helpers import ROOT, more, start_python

from cleanreplay import terminal

COUNTER = "--env-id environments:Counter-v0 --learning-starts 50 --batch-size 8".split()  # noqa: SIM905
COMPILED = "--env-id phys2d/CartPole-v1 --learning-starts 50 --batch-size 8 --log-interval 500"
ENVIRONMENTS = [COUNTER, more(COMPILED.split())]
LONG = ["--total-timesteps", "100000000", "--eval-episodes", "0"]


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP under nohup, and SIGINT in a job in the background of a shell."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = []
    try:
        with terminal.noted_signals(stop, has_processes=False):
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stop == [signal.SIGTERM]


def test_a_signal_is_noted_where_its_message_cannot_be_written(monkeypatch):
    def write(descriptor, text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", write)
    stop = []
    with terminal.noted_signals(stop, has_processes=False):
        signal.raise_signal(signal.SIGINT)
    assert stop == [signal.SIGINT]


def test_signals_do_what_they_did_before_if_processes_cannot_be_started(monkeypatch):
    def fail(numbers):
        raise OSError("no more processes")

    monkeypatch.setattr(terminal, "ignore_in_processes", fail)
    before = [signal.getsignal(getattr(signal, name)) for name in terminal.SIGNALS]
    with pytest.raises(OSError, match="no more"), terminal.noted_signals([], has_processes=True):
        pass
    assert [signal.getsignal(getattr(signal, name)) for name in terminal.SIGNALS] == before


def test_signals_are_noted_where_there_is_no_sighup(monkeypatch):
    """As on Windows."""
    monkeypatch.delattr(signal, "SIGHUP")
    stop = []
    with terminal.noted_signals(stop, has_processes=False):
        signal.raise_signal(signal.SIGTERM)
    assert stop == [signal.SIGTERM]


def test_a_stream_is_given_up_when_its_reader_is_gone(monkeypatch):
    reader, writer = os.pipe()
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.give_up_dead_streams()
        print("read", flush=True)
        assert os.read(reader, 100) == b"read\n"
        os.close(reader)
        for _ in range(3):
            print("not read", flush=True)
        assert not sys.stdout.isatty()  # it is a stream as before


def test_a_text_that_waits_when_the_reader_goes_is_given_up_at_the_end(monkeypatch):
    reader, writer = os.pipe()
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        terminal.give_up_dead_streams()
        print("waits", file=sys.stderr)
        os.close(reader)
        sys.stderr.flush()


def newest_checkpoint(folder):
    """The step of the newest checkpoint of the only run in a folder."""
    (run,) = (folder / "runs").iterdir()
    return max(int(path.name) for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("flags", ENVIRONMENTS, ids=["ordinary", "compiled"])
def test_ctrl_c_saves_where_nobody_reads_the_output(flags, tmp_path):
    """As `2>&1 | tee log`, which Ctrl-C ends first."""
    script = str(ROOT / "dqn_jax.py")
    more = [*flags, *LONG, "--log-interval", "500"]
    process = start_python(tmp_path, script, *more)
    assert "cpu" in process.stdout.readline()
    time.sleep(1)
    process.stdout.close()
    process.stderr.close()
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert newest_checkpoint(tmp_path) > 0


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_ends_as_any_other(tmp_path):
    """As `| head -1`."""
    flags = ["--total-timesteps", "20000", "--eval-episodes", "1"]
    process = start_python(tmp_path, str(ROOT / "dqn_jax.py"), *COUNTER, *flags)
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=60) == 0, err
    assert "Traceback" not in err
    assert "BrokenPipe" not in err
    assert newest_checkpoint(tmp_path) == 20_000


IN_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "nohup"])
@pytest.mark.parametrize("flags", ENVIRONMENTS, ids=["ordinary", "compiled"])
def test_a_terminal_that_is_closed_ends_the_run_with_a_checkpoint_but_not_under_nohup(
    flags, how, tmp_path
):
    main, terminal_end = pty.openpty()
    run = [str(ROOT / "dqn_jax.py"), *flags, *LONG]
    if how == "nohup":
        run = ["-c", "import os, sys; os.execvp('nohup', ['nohup', *sys.argv[1:]])"]
        run += [sys.executable, str(ROOT / "dqn_jax.py"), *flags, *LONG]
    streams = dict(stdin=terminal_end, stdout=terminal_end, stderr=terminal_end, text=False)
    process = start_python(tmp_path, "-c", IN_A_TERMINAL, *run, **streams)
    os.close(terminal_end)
    while not list(tmp_path.glob("runs/*/events*")):
        time.sleep(0.1)
    time.sleep(5)
    os.close(main)
    if how == "nohup":
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 130
    assert newest_checkpoint(tmp_path) > 0


WITHOUT_UNIX = """
import signal, sys
sys.modules["fcntl"] = None
del signal.SIGHUP
import dqn_jax
dqn_jax.main()
"""


@pytest.mark.slow
def test_a_run_takes_no_locks_and_no_sighup(tmp_path):
    """Windows has neither."""
    flags = "--total-timesteps 200 --buffer-size 100 --log-interval 20 --save-experience"
    process = start_python(tmp_path, "-c", WITHOUT_UNIX, *COUNTER, *flags.split())
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.count("no locks on Windows") == 2  # of the run, and of its experience
    assert newest_checkpoint(tmp_path) == 200
