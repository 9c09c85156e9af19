"""Returns, means, loops and minibatches, with which agents learn from rollouts and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal
from scipy import stats

import buffers


def slow_return(reward, terminated, truncated, gamma):
    """Computes return, discount of the next value, and number of steps of one sequence."""
    total = 0.0
    for m in range(len(reward)):
        total += gamma**m * reward[m]
        if terminated[m] or truncated[m]:
            break
    return total, 0.0 if terminated[m] else gamma ** (m + 1), m + 1


@pytest.mark.parametrize(("n", "dtype"), [(1, np.float64), (5, bool)])
def test_n_step_returns_are_those_of_a_slow_loop(n, dtype):
    rng = np.random.default_rng(n)
    reward = rng.normal(size=(300, n)).astype(np.float32)
    terminated, truncated = (rng.random((2, 300, n)) < 0.15).astype(dtype)

    got = jax.jit(buffers.n_step_return)(reward, terminated, truncated, 0.9)

    assert [x.dtype for x in got] == [np.float32, np.float32, np.int32]
    for b, row in enumerate(zip(*jax.device_get(got), strict=True)):
        wanted = slow_return(reward[b], terminated[b], truncated[b], 0.9)
        np.testing.assert_allclose(row, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rewards", "flags"), [((5,), (5,)), ((2, 5), (1, 5))])
def test_n_step_returns_need_arrays_of_one_shape(rewards, flags):
    flags = jnp.zeros(flags, bool)

    with pytest.raises(ValueError, match=r"must be \[B, n\].*\[None\]"):
        buffers.n_step_return(jnp.ones(rewards), flags, flags, 0.9)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_discounted_sum_is_that_of_a_loop(reverse):
    rng = np.random.default_rng(0)
    x, discount = rng.normal(size=(2, 11, 3)).astype(np.float32)
    y = first = np.float32([1.0, -2.0, 0.0])
    wanted = np.zeros((11, 3))
    for t in reversed(range(11)) if reverse else range(11):
        y = wanted[t] = x[t] + discount[t] * y

    sums = buffers.discounted_sum(jnp.asarray(x), discount, jnp.asarray(first), reverse)

    np.testing.assert_allclose(sums, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_due_has_a_multiple_after_the_step():
    assert buffers.is_due(10, 9, 10) is True
    assert buffers.is_due(10, 10, 20)
    assert not buffers.is_due(10, 10, 19)
    assert not buffers.is_due(0, 0, 9)


@pytest.mark.parametrize(("shape", "lead"), [((6,), ()), ((4, 5), (2, 3))], ids=str)
def test_means_are_of_what_the_mask_keeps_over_its_axes(shape, lead):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*lead, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.5

    means = buffers.masked_mean(jnp.asarray(x), jnp.asarray(mask))

    assert means.shape == lead
    np.testing.assert_allclose(means, x[..., mask].mean(axis=-1), rtol=1e-6)


def test_what_the_mask_leaves_out_may_be_nan():
    x = jnp.array([[1.0, np.nan, 3.0], [np.inf, np.nan, 5.0]])

    assert buffers.masked_mean(x, jnp.array([False, False, True])).tolist() == [3.0, 5.0]
    assert buffers.masked_mean(x, jnp.zeros(3, bool)).tolist() == [0.0, 0.0]
    assert buffers.masked_mean(x, jnp.zeros((2, 3), bool)).tolist() == 0.0


VALUES = np.float32([3, 1, 4, 1, 5])
NUMBERS = np.arange(10, dtype=np.int32).reshape(5, 2)
START = {"total": np.float32(2), "seen": np.int32([-1, -1])}


def step(state, value, number):
    """Takes a step whose result depends on the order of the calls, and on every input."""
    total = state["total"] * 2 + value
    metrics = {"total": total, "numbers": number.sum(), "is_even": number[0] % 4 == 0}
    return {"total": total, "seen": number + state["seen"] % 2}, metrics


def test_one_program_repeats_the_first_rows_any_number_of_times():
    traces = []

    @jax.jit
    def run(state, values, numbers, count):
        traces.append(count)
        return buffers.repeat(step, state, (values, numbers), count)

    wanted, metrics = START, dict.fromkeys(("total", "numbers", "is_even"), np.inf)
    for count in range(6):
        as_floats = {name: np.float32(x) for name, x in metrics.items()}
        assert_trees_equal(run(START, VALUES, NUMBERS, count), (wanted, as_floats))
        if count < 5:
            wanted, metrics = step(wanted, VALUES[count], NUMBERS[count])
    assert len(traces) == 1


@pytest.mark.parametrize(("rows", "epochs", "num_minibatches"), [(1, 3, 1), (70_000, 3, 7)])
def test_minibatches_of_an_epoch_hold_every_row_once(rows, epochs, num_minibatches):
    minibatches = buffers.shuffled_minibatches(jax.random.key(0), rows, epochs, num_minibatches)

    assert minibatches.shape == (epochs, num_minibatches, rows // num_minibatches)
    assert minibatches.dtype == jnp.int32
    for order in np.asarray(minibatches).reshape(epochs, rows):
        np.testing.assert_array_equal(np.sort(order), np.arange(rows))


def test_rows_that_minibatches_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="num_minibatches=5, got 12"):
        buffers.shuffled_minibatches(jax.random.key(0), 12, 3, 5)


def test_orders_are_equally_likely_and_independent():
    minibatches = buffers.shuffled_minibatches(jax.random.key(0), 4, 30_000, 2)
    in_base_4 = minibatches.reshape(30_000, 4) @ jnp.array([64, 16, 4, 1])
    order = np.unique(in_base_4, return_inverse=True)[1]
    pairs = order.reshape(-1, 2) @ [24, 1]

    assert stats.chisquare(np.bincount(order, minlength=24)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(pairs, minlength=24**2)).pvalue > 1e-3
