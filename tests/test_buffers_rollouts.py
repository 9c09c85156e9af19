"""masked_mean, repeat and shuffled_minibatches: what learns from rollouts and from samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, fast_at_ends, more
from scipy import stats

import buffers

# ------------------------------------------------------------------------------------- masked_mean


@fast_at_ends(
    ("shape", "lead"), [((6,), ()), ((6,), (3,)), ((4, 5), ()), ((4, 5), (2, 3))], ids=str
)
def test_means_are_of_what_the_mask_keeps_over_its_axes(shape, lead):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*lead, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.5
    means = buffers.masked_mean(jnp.asarray(x), jnp.asarray(mask))
    assert means.shape == lead
    np.testing.assert_allclose(means, x[..., mask].mean(axis=-1), rtol=1e-6)


def test_what_the_mask_leaves_out_may_be_nan():
    x = jnp.array([[1.0, np.nan, 3.0], [np.inf, np.nan, 5.0]])
    means = buffers.masked_mean(x, jnp.array([False, False, True]))
    assert means.tolist() == [3.0, 5.0]


def test_the_mean_of_nothing_is_0():
    x = jnp.array([[1.0, np.nan], [3.0, 4.0]])
    assert buffers.masked_mean(x, jnp.zeros(2, bool)).tolist() == [0.0, 0.0]
    assert buffers.masked_mean(x, jnp.zeros((2, 2), bool)).tolist() == 0.0


# ------------------------------------------------------------------------------------------ repeat

VALUES = np.array([3.0, 1.0, 4.0, 1.0, 5.0], np.float32)
NUMBERS = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], np.int32)
START = {"total": np.float32(2), "seen": np.array([-1, -1], np.int32)}


def step(state, value, number):
    """Its result depends on the order of the calls, and on every input."""
    total = state["total"] * 2 + value
    metrics = {"total": total, "numbers": number.sum(), "is_even": number[0] % 4 == 0}
    return {"total": total, "seen": number + state["seen"] % 2}, metrics


def looped(count):
    """The state and metrics after a plain loop over the first `count` rows."""
    state = START
    for row in range(count):
        state, metrics = step(state, VALUES[row], NUMBERS[row])
    return state, metrics


@fast_at_ends("count", [1, 3, 5])
def test_repeat_is_a_loop_over_the_first_rows(count):
    state, metrics = looped(count)
    expected = state, {name: np.float32(x) for name, x in metrics.items()}
    got = buffers.repeat(step, jax.tree.map(jnp.asarray, START), (VALUES, NUMBERS), count)
    assert_trees_equal(got, expected)


def test_repeat_without_a_call_keeps_the_state_and_measures_nothing():
    start = jax.tree.map(jnp.asarray, START)
    state, metrics = buffers.repeat(step, start, (VALUES, NUMBERS), 0)
    assert_trees_equal(state, START)
    inf = np.float32(np.inf)
    assert_trees_equal(metrics, {"total": inf, "numbers": inf, "is_even": inf})


def test_one_program_repeats_any_number_of_times():
    traces = []

    @jax.jit
    def run(state, values, numbers, count):
        traces.append(count)
        return buffers.repeat(step, state, (values, numbers), count)

    for count in (0, 2, 5):
        state, _ = run(START, VALUES, NUMBERS, count)
        assert_trees_equal(state, looped(count)[0] if count else START)
    assert len(traces) == 1


# ----------------------------------------------------------------------------- shuffled_minibatches


@pytest.mark.parametrize(
    ("rows", "epochs", "num_minibatches"),
    [
        (1, 3, 1),
        more(2, 9, 2),
        more(64, 5, 4),
        more(65, 4, 5),
        more(300, 1, 1),
        (70_000, 3, 7),
    ],
)
def test_minibatches_of_an_epoch_hold_every_row_once(rows, epochs, num_minibatches):
    minibatches = buffers.shuffled_minibatches(jax.random.key(0), rows, epochs, num_minibatches)
    assert minibatches.shape == (epochs, num_minibatches, rows // num_minibatches)
    assert minibatches.dtype == jnp.int32
    for order in np.asarray(minibatches).reshape(epochs, rows):
        np.testing.assert_array_equal(np.sort(order), np.arange(rows))


@pytest.mark.parametrize(
    ("rows", "epochs", "num_minibatches"),
    [more(64, 5, 4), (65, 4, 5), more(300, 1, 1), (70_000, 3, 7)],
)
def test_every_epoch_and_every_key_has_an_order_of_its_own(rows, epochs, num_minibatches):
    minibatches = buffers.shuffled_minibatches(jax.random.key(0), rows, epochs, num_minibatches)
    orders = np.asarray(minibatches).reshape(epochs, rows).tolist()
    rollout = range(rows)  # the order in which rows come, that of no epoch
    assert len({tuple(order) for order in [rollout, *orders]}) == epochs + 1

    other = buffers.shuffled_minibatches(jax.random.key(1), rows, epochs, num_minibatches)
    assert np.mean(minibatches == other) < 0.2


def test_rows_that_minibatches_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="rows must be a multiple of num_minibatches=5, got 12: "):
        buffers.shuffled_minibatches(jax.random.key(0), 12, 3, 5)


def test_orders_are_equally_likely():
    minibatches = buffers.shuffled_minibatches(jax.random.key(0), 4, 30_000, 2)
    in_base_4 = minibatches.reshape(30_000, 4) @ jnp.array([64, 16, 4, 1])
    order = np.unique(in_base_4, return_inverse=True)[1]
    assert stats.chisquare(np.bincount(order, minlength=24)).pvalue > 1e-3
    # Nor does an epoch depend on the one before.
    pairs = order.reshape(-1, 2) @ [24, 1]
    assert stats.chisquare(np.bincount(pairs, minlength=24**2)).pvalue > 1e-3


@fast_at_ends(("rows", "epochs", "groups"), [(60, 5_000, 60), (2**16, 20, 64), (2**17, 10, 64)])
def test_rows_land_everywhere_alike(rows, epochs, groups):
    """Counts of (group of rows, minibatch); with 2**16 rows many have the same random bits."""
    minibatches = buffers.shuffled_minibatches(jax.random.key(1), rows, epochs, groups)
    group = np.asarray(minibatches) // (rows // groups)
    minibatch = np.arange(groups)[:, None]
    cells = group * groups + minibatch
    counts = np.bincount(cells.ravel(), minlength=groups**2)
    expected = epochs * rows / groups**2
    # The counts of an epoch are hypergeometric: every row and every place is taken once.
    statistic = ((counts - expected) ** 2).sum() / expected * (rows - 1) / rows
    assert 1e-3 < stats.chi2((groups - 1) ** 2).sf(statistic) < 1 - 1e-3


@pytest.mark.parametrize("rows", [2**16, 2**20])
def test_small_minibatches_of_many_rows_are_of_all_times(rows):
    """Their mean rows spread as those of 64 numbers that are drawn without replacement."""
    (minibatches,) = buffers.shuffled_minibatches(jax.random.key(2), rows, 1, rows // 64)
    means = np.asarray(minibatches).mean(axis=1) / rows
    np.testing.assert_allclose(means.std(), np.sqrt(1 / 12 / 64), rtol=0.1)


def test_minibatches_are_the_same_under_jit_and_vmap():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (24, 3, 4)
    eager = [buffers.shuffled_minibatches(key, *sizes) for key in keys]
    assert len({tuple(minibatches.ravel().tolist()) for minibatches in eager}) == 3

    jitted = jax.jit(buffers.shuffled_minibatches, static_argnums=(1, 2, 3))
    assert_trees_equal([jitted(key, *sizes) for key in keys], eager)
    together = jax.vmap(lambda key: buffers.shuffled_minibatches(key, *sizes))(keys)
    assert_trees_equal(together, jnp.stack(eager))
