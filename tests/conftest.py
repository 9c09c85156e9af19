"""Configuration that must precede the import of JAX, strict promotion for buffers, fixtures."""

import os
import signal
import sys
import tempfile

from quick import QUICK

# Flags of XLA are added to the user's, once: xdist's workers inherit them.
os.environ.setdefault("XLA_FLAGS", "")
if "--xla_force_host_platform_device_count=4" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
# Each program is compiled once for all tests, for xdist's workers, which inherit this, and for
# scripts that run as programs. Set the folder yourself to keep it from one run to the next.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="cleanreplay-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# LLVM's optimisations take longer than they save here; see `optimised` for where they matter. XLA's
# own still run: the text of the compiled programs is the same to the letter.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if (
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    and QUICK["XLA_FLAGS"] not in os.environ["XLA_FLAGS"]
):
    os.environ["XLA_FLAGS"] += QUICK["XLA_FLAGS"]
# By default a GPU multiplies in TF32, with 10 bits of the mantissa.
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")

import jax
import pytest
from hypothesis import HealthCheck, settings
from tensorboard.summary.writer import event_file_writer

# TensorBoard reads the event files of a folder in the order of their names, which end in the second
# and in this count of the process: 9 would come after 10.
event_file_writer._global_uid = event_file_writer.AtomicCounter(10_000)

# `pytest --hypothesis-profile full` tries four times as many examples; .ci/run does so once.
for name, examples in (("quick", 25), ("full", 100)):
    settings.register_profile(
        name,
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("quick")


@pytest.fixture(autouse=True, scope="module")
def strict_promotion(request):
    """Forbids implicit promotion of dtypes and ranks in the tests of buffers.py."""
    if not request.module.__name__.startswith("test_buffers"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(autouse=True, scope="session")
def _signals_are_not_ignored():
    """Restores signals that nohup or a shell's background ignores, also for started processes."""
    handlers = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Changes to an empty working directory, because runs write to `runs/` in it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def optimised():
    """Compiles programs as for a user: for tests that run them for long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def stop_at(monkeypatch):
    """Returns a function that makes `stop` of a compiled run, with a signal at the given step."""
    from cleanreplay import compiled

    def stop_at(step):
        stop = []
        log_entries = compiled.log_entries

        def log_and_signal(logs, begin, interval, entries, seconds):
            if begin < step <= begin + interval * entries.finite.shape[1]:
                stop.append(signal.SIGTERM)
            log_entries(logs, begin, interval, entries, seconds)

        monkeypatch.setattr(compiled, "log_entries", log_and_signal)
        monkeypatch.setattr(compiled, "LONG_CALL", 0)  # a call is one log entry, however fast
        return stop

    return stop_at


@pytest.fixture
def run_main(monkeypatch, capsys):
    """Returns a function that runs `main` of a script in this process: exit code, out, err."""

    def run(module, *flags):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags])
        with pytest.raises(SystemExit) as caught:
            module.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    return run
