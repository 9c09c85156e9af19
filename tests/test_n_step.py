"""n_step_transition against a slow loop over random windows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow

import buffers


class Steps(NamedTuple):
    observation: Any
    action: Any
    reward: Any
    next_observation: Any
    terminated: Any
    truncated: Any


@pytest.mark.parametrize("jit", [slow(False), True])
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_against_a_slow_loop(n, once, jit):
    rng, batch, gamma = np.random.default_rng(n), 300, 0.9
    shape = (batch, n + once)
    window = Steps(
        {"x": rng.normal(size=(*shape, 2)).astype(np.float32)},
        rng.integers(4, size=shape),
        rng.normal(size=shape).astype(np.float32),
        None if once else {"x": rng.normal(size=(*shape, 2)).astype(np.float32)},
        rng.random(shape) < 0.15,
        rng.random(shape) < 0.15,
    )
    mask = rng.random(shape) < 0.8
    fold = jax.jit(buffers.n_step_transition) if jit else buffers.n_step_transition
    folded = fold(jax.tree.map(jnp.asarray, window), gamma, jnp.asarray(mask))
    transition, discount, valid = jax.device_get(folded)
    after = window.observation["x"] if once else window.next_observation["x"]
    for b in range(batch):
        total, m, done = 0.0, 0, False
        while m < n and not done:
            total += gamma**m * window.reward[b, m]
            done = window.terminated[b, m] or window.truncated[b, m]
            m += 1
        assert transition.reward[b] == pytest.approx(total, rel=1e-5, abs=1e-6)
        np.testing.assert_array_equal(transition.observation["x"][b], window.observation["x"][b, 0])
        assert transition.action[b] == window.action[b, 0]
        last = after[b, m if once else m - 1]
        np.testing.assert_array_equal(transition.next_observation["x"][b], last)
        assert transition.terminated[b] == window.terminated[b, m - 1]
        assert transition.truncated[b] == window.truncated[b, m - 1]
        wanted = 0.0 if window.terminated[b, m - 1] else gamma**m
        assert discount[b] == pytest.approx(wanted, rel=1e-5)
        assert valid[b] == mask[b, 0]
    assert fold(window, gamma)[2].all()  # without a mask every step counts
