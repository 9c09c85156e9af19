"""Reads the folder of a run back, and what else the tests of the scripts share."""

from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent


def read_events(folder):
    """Scalars {tag: [(step, value), ...]} and the text of `hyperparameters`, "" if it has none."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    text = [tag for tag in tags["tensors"] if tag.startswith("hyperparameters")]
    tensors = [e.tensor_proto for tag in text for e in events.Tensors(tag)]
    return scalars, tensors[-1].string_val[0].decode() if tensors else ""


@pytest.fixture(autouse=True, scope="module")
def compile_once(tmp_path_factory):
    """In a module that imports this a program is compiled once, however often it is trained."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
