"""Settings that must stand before JAX is imported, and strictness for the buffers."""

import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
).strip()

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def strict_promotion(request):
    """buffers.py never leans on implicit promotion of dtypes or ranks."""
    if not request.module.__name__.startswith("test_buffers"):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
