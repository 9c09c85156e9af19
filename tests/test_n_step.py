"""n_step_return against a slow loop over random windows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import fast_at_ends, more

import buffers


def slow_return(reward, terminated, truncated, gamma):
    """Return of one window, discount of the value that follows it, and steps until its end."""
    total = 0.0
    for m in range(len(reward)):
        total += gamma**m * reward[m]
        if terminated[m] or truncated[m]:
            break
    return total, 0.0 if terminated[m] else gamma ** (m + 1), m + 1


@pytest.mark.parametrize("jit", [more(False), True])
@fast_at_ends("n", [1, 2, 3, 5])
def test_returns_are_those_of_a_slow_loop(n, jit):
    rng = np.random.default_rng(n)
    reward = rng.normal(size=(300, n)).astype(np.float32)
    terminated = rng.random((300, n)) < 0.15
    truncated = rng.random((300, n)) < 0.15
    fold = jax.jit(buffers.n_step_return) if jit else buffers.n_step_return
    windows = [jnp.asarray(x) for x in (reward, terminated, truncated)]
    total, discount, steps = jax.device_get(fold(*windows, 0.9))
    assert (total.dtype, discount.dtype, steps.dtype) == (np.float32, np.float32, np.int32)
    for b in range(300):
        wanted = slow_return(reward[b], terminated[b], truncated[b], 0.9)
        assert total[b] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
        assert discount[b] == pytest.approx(wanted[1], rel=1e-5)
        assert steps[b] == wanted[2]


def test_the_next_observation_of_a_window_is_that_of_the_step_after():
    """As a caller picks it, of windows of n + 1 steps whose observations are numbered."""
    observation = jnp.tile(jnp.arange(4), (3, 1))
    reward = jnp.ones((3, 3))
    never = jnp.zeros((3, 3), bool)
    truncated = never.at[1, 0].set(True).at[2, 1].set(True)
    _, discount, steps = buffers.n_step_return(reward, never, truncated, 0.5)
    assert observation[jnp.arange(3), steps].tolist() == [3, 1, 2]
    assert discount.tolist() == [0.125, 0.5, 0.25]


def test_flags_of_a_return_may_be_floats():
    reward = jnp.ones((2, 3))
    terminated = np.float32([[0, 1, 0], [0, 0, 0]])
    truncated = np.float64([[0, 0, 0], [1, 0, 0]])
    as_floats = buffers.n_step_return(reward, terminated, truncated, 0.5)
    as_bools = buffers.n_step_return(reward, terminated > 0, truncated > 0, 0.5)
    for one, other in zip(as_floats, as_bools, strict=True):
        np.testing.assert_array_equal(one, other)
    assert as_floats[2].tolist() == [2, 1]


def test_a_return_of_one_window_without_an_axis_is_an_error():
    flags = jnp.zeros(5, bool)
    with pytest.raises(ValueError, match=r"must be \[B, n\], got .*\(5,\).* give \[None\]"):
        buffers.n_step_return(jnp.ones(5), flags, flags, 0.9)
    with pytest.raises(ValueError, match=r"must be \[B, n\], got"):
        buffers.n_step_return(jnp.ones((2, 5)), flags[None], flags[None], 0.9)
