"""n_step_return against a slow loop over random windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

import buffers


@pytest.mark.parametrize("jit", [slow(False), True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_returns_are_those_of_a_slow_loop(n, jit):
    rng, batch, gamma = np.random.default_rng(n), 300, 0.9
    reward = rng.normal(size=(batch, n)).astype(np.float32)
    terminated = rng.random((batch, n)) < 0.15
    truncated = rng.random((batch, n)) < 0.15
    fold = jax.jit(buffers.n_step_return) if jit else buffers.n_step_return
    arrays = map(jnp.asarray, (reward, terminated, truncated))
    total, discount, steps = jax.device_get(fold(*arrays, gamma))
    assert (total.dtype, discount.dtype, steps.dtype) == (np.float32, np.float32, np.int32)
    for b in range(batch):
        wanted, m, done = 0.0, 0, False
        while m < n and not done:
            wanted += gamma**m * reward[b, m]
            done = terminated[b, m] or truncated[b, m]
            m += 1
        assert total[b] == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert steps[b] == m
        wanted = 0.0 if terminated[b, m - 1] else gamma**m
        assert discount[b] == pytest.approx(wanted, rel=1e-5)


def test_the_next_observation_of_a_window_is_that_of_the_step_after():
    """As a caller picks it, of windows of n + 1 steps whose observations are numbered."""
    reward, never = jnp.ones((3, 3)), jnp.zeros((3, 3), bool)
    truncated = never.at[1, 0].set(True).at[2, 1].set(True)
    _, discount, steps = buffers.n_step_return(reward, never, truncated, 0.5)
    observation = jnp.tile(jnp.arange(4), (3, 1))
    assert observation[jnp.arange(3), steps].tolist() == [3, 1, 2]
    assert discount.tolist() == [0.125, 0.5, 0.25]
