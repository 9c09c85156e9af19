"""Settings that must stand before JAX is imported, and strictness for the buffers."""

import os
import signal
import sys
import tempfile
from functools import partial

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()
# A program is compiled once: for all tests, for xdist's workers, which inherit this, and for the
# scripts that are run as programs. Set the folder yourself to keep it from one run to the next.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = tempfile.TemporaryDirectory(prefix="cleanreplay-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# LLVM's optimisations take longer than they save here; see `optimised` for where they matter. XLA's
# own are made nevertheless: the programs' text is the same to the letter.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from hypothesis import HealthCheck, settings

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

slow = partial(pytest.param, marks=pytest.mark.slow)  # a test's parameters, see pyproject.toml


@pytest.fixture(autouse=True, scope="module")
def strict_promotion(request):
    """buffers.py never leans on implicit promotion of dtypes or ranks."""
    if not request.module.__name__.startswith("test_buffers"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def optimised():
    """Programs are compiled as a user's: for tests that run them for long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def signals_at(monkeypatch):
    """Gives, for a step, `signals` of a compiled run that one comes to with the point there."""
    import compiled

    def signals_at(step):
        signals = []
        write_point = compiled.write_point

        def write_and_signal(*what):
            if what[3] == step:
                signals.append(signal.SIGTERM)
            write_point(*what)

        monkeypatch.setattr(compiled, "write_point", write_and_signal)
        return signals

    return signals_at


@pytest.fixture
def run_main(tmp_path, monkeypatch, capsys):
    """Runs `main` of a script in this process, in a folder of its own: exit code, out, err."""
    monkeypatch.chdir(tmp_path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(module, *flags):
        monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *flags])
        with pytest.raises(SystemExit) as caught:
            module.main()
        out, err = capsys.readouterr()
        return caught.value.code or 0, out, err

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
