"""Prioritised replay: draws in proportion to priorities, and a tree that agrees with them."""

from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    Windows,
    as_mask,
    assert_trees_equal,
    batches,
    decode,
    describe,
    encode,
    examples,
    fast_at_ends,
    more,
    start_at,
)
from hypothesis import given
from scipy import stats

import buffers

# ----------------------------------------------------------------------------------------- helpers


def filled(priorities, exponent=1.0):
    """A full buffer of ids 0, 1, ... with these priorities, and its functions."""
    size = len(priorities)
    replay = buffers.prioritised_replay(size, exponent)
    state = replay.add_batch(replay.init(0), jnp.arange(size))
    return replay, replay.set_priorities(state, np.arange(size), priorities)


def count_draws(replay, state, draws, batch_size, at_once=1, seed=0):
    """How often each item is drawn in batches of `batch_size`, `at_once` batches at a time."""

    @jax.jit
    def run(state, keys):
        draw = jax.vmap(lambda key: replay.sample(state, key, batch_size).experience)
        return jax.lax.map(draw, keys)

    steps = draws // (batch_size * at_once)
    keys = jax.random.split(jax.random.key(seed), (steps, at_once))
    return np.bincount(np.asarray(run(state, keys)).ravel(), minlength=state.storage.size)


def bins(expected):
    """The bin of each item: one of its own, or shared by those of which few are expected."""
    is_rare = expected < 5
    rare_so_far = np.cumsum(np.where(is_rare, expected, 0))
    last_shared = max(rare_so_far[-1] // 20 - 1, 0)
    shared = np.minimum(rare_so_far // 20, last_shared).astype(int)
    own = len(expected) + np.arange(len(expected))
    return np.unique(np.where(is_rare, shared, own), return_inverse=True)[1]


def exact(priorities, exponent):
    """The probability of each item."""
    weights = np.float64(priorities) ** exponent
    return weights / weights.sum()


def spread(size, seed=0):
    """Priorities from a gamma distribution, a tenth of them 0, float32."""
    rng = np.random.default_rng(seed)
    priorities = rng.gamma(0.7, size=size).astype(np.float32)
    priorities[rng.permutation(size)[: size // 10]] = 0
    return priorities


def assert_inner_nodes_are_sums(state, rtol):
    """Level by level: each node is the sum of four of the level before; the rest is padding."""
    nodes = np.float64(state.tree[0])
    for level in state.tree[1:]:
        nodes = nodes.reshape(-1, 4).sum(axis=-1)
        np.testing.assert_allclose(level[: len(nodes)], nodes, rtol=rtol, atol=0)
        assert not level[len(nodes) :].any()
        nodes = np.pad(nodes, (0, len(level) - len(nodes)))
    assert len(state.tree[-1]) <= buffers.SMALL + 3 or len(state.tree) == 1


def weights_of(state, capacity):
    """The weights of all positions; of a buffer with exponent 1 the priorities."""
    return np.asarray(state.tree[0])[:capacity]


def priorities_of(state, capacity):
    return weights_of(state, capacity).tolist()


# ------------------------------------------------------------------------------------ distribution


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    ("size", "exponent", "draws", "at_once"),
    [
        (10, 0.6, 2**18, 2**12),
        (1_000, 1.0, 2**20, 2**14),
        more(10**6, 0.6, 2**22, 2**16),
    ],
)
def test_draws_are_in_proportion_to_priorities(size, exponent, draws, at_once):
    priorities = spread(size)
    probabilities = exact(priorities, exponent)
    replay, state = filled(priorities, exponent)

    # One draw a batch: those of one batch depend on each other.
    counts = count_draws(replay, state, draws, 1, at_once)[:size]
    assert counts.sum() == draws
    assert counts[priorities == 0].sum() == 0
    drawable = priorities > 0
    expected_counts = probabilities[drawable] * draws
    bin_of = bins(expected_counts)
    observed = np.bincount(bin_of, counts[drawable])
    expected = np.bincount(bin_of, expected_counts)
    assert len(observed) >= min(9, size)
    assert 1e-3 < stats.chisquare(observed, expected).pvalue < 1 - 1e-6

    sample = replay.sample(state, jax.random.key(1), 256)
    wanted = probabilities[np.asarray(sample.experience)]
    np.testing.assert_allclose(sample.probabilities, wanted, rtol=1e-5)


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("size", [10, 1_000, more(10**6)])
def test_draws_of_a_batch_are_at_least_as_even_as_independent_ones(size):
    draws = 2**20
    priorities = spread(size, seed=1)
    replay, state = filled(priorities, 0.6)
    counts = count_draws(replay, state, draws, 256, 16)[:size]
    expected_counts = exact(priorities, 0.6) * draws
    bin_of = bins(expected_counts)
    observed = np.bincount(bin_of, counts)
    expected = np.bincount(bin_of, expected_counts)
    is_possible = expected > 0
    assert observed[~is_possible].sum() == 0
    assert stats.chisquare(observed[is_possible], expected[is_possible]).pvalue > 1e-3


def test_a_batch_has_one_draw_from_each_equal_share():
    """Priorities add up to 32: of 32 draws an item of priority 3 gets three, in order."""
    priorities = np.array([1] * 8 + [3] * 8)
    replay, state = filled(np.float32(priorities))
    expected = np.repeat(np.arange(16), priorities)
    for seed in range(20):
        drawn = replay.sample(state, jax.random.key(seed), 32).experience
        np.testing.assert_array_equal(drawn, expected)


def dispersion(replay, state, draws):
    """The variance of the counts of equally likely items, over their mean: 1 for a Poisson."""
    counts = count_draws(replay, state, draws, 256, 4)[: state.storage.size]
    return counts.var() / counts.mean()


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_ten_million_items_are_drawn_alike(monkeypatch):
    replay = buffers.prioritised_replay(10**7)
    state = replay.add_batch(replay.init(0), jnp.arange(10**7))
    assert 0.99 < dispersion(replay, state, 2 * 10**7) < 1.003
    # One float32 a draw is too coarse, which adds in proportion to the draws.
    monkeypatch.setattr(buffers, "LEVELS_PER_DRAW", 100)
    assert dispersion(buffers.prioritised_replay(10**7), state, 5 * 10**6) > 1.0125


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("zeros", [more("a tenth"), "the last child of each node"])
def test_an_item_of_priority_0_is_never_drawn(zeros):
    size = 100_003
    rng = np.random.default_rng(2)
    priorities = (10.0 ** rng.uniform(-6, 6, size)).astype(np.float32)
    if zeros == "a tenth":
        priorities[rng.permutation(size)[: size // 10]] = 0
        priorities[-40:] = 0
        priorities[:3] = 0
    else:
        priorities[7::8] = 0
        priorities[56:64] = priorities[448:512] = priorities[-5_000:] = 0
    replay, state = filled(priorities)
    counts = count_draws(replay, state, 10**7, 250, 4)
    assert counts.sum() == 10**7
    assert counts[: len(priorities)][priorities == 0].sum() == 0
    assert counts[len(priorities) :].sum() == 0


# ----------------------------------------------------------------------------------------- the tree


@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("updates", "batch"), [(100_000, 8), (10_000, 64)])
def test_a_hundred_thousand_updates_leave_no_error_behind(updates, batch):
    size = 2_999  # a prime: so that the positions of one batch differ
    rng = np.random.default_rng(3)
    replay, state = filled(np.ones(size, np.float32))
    first = rng.integers(size, size=(updates, 1))
    positions = ((first + 371 * np.arange(batch)) % size).astype(np.int32)
    priorities = (10.0 ** rng.uniform(-3, 3, (updates, batch))).astype(np.float32)

    def update(state, positions_and_priorities):
        return replay.set_priorities(state, *positions_and_priorities), None

    @partial(jax.jit, donate_argnums=0)
    def run(state, positions, priorities):
        return jax.lax.scan(update, state, (positions, priorities))[0]

    state = run(state, positions, priorities)
    wanted = np.ones(size, np.float32)
    wanted[positions.ravel()] = priorities.ravel()  # the last value stays
    np.testing.assert_array_equal(weights_of(state, size), wanted)
    assert_inner_nodes_are_sums(state, 1e-5)
    assert state.max_priority == priorities.max()


@pytest.mark.parametrize("size", [8, 2_000])
def test_no_priorities_and_no_items_change_nothing(size):
    replay = buffers.prioritised_replay(size, donate=False)
    before = replay.add_batch(replay.init(0.0), np.arange(5, dtype=np.float32))
    state = replay.set_priorities(before, np.zeros(0, np.int32), np.zeros(0, np.float32))
    state = replay.add_batch(state, np.zeros(0, np.float32))
    assert_trees_equal(state, before)


def test_adding_and_drawing_fails_if_the_only_window_is_overwritten():
    replay = buffers.prioritised_replay(4, sequence_length=4, period=4)
    state = replay.add_batch(replay.init(0.0), np.arange(4, dtype=np.float32))
    assert replay.can_sample(state)
    with pytest.raises(ValueError, match="add_and_sample: nothing to draw, "):
        replay.add_and_sample(state, np.ones(1, np.float32), jax.random.key(0), 3)


def test_an_item_given_twice_gets_one_of_its_priorities():
    for size in (12, 1_000):  # where all nodes are summed, and where a few are
        replay, state = filled(np.ones(size, np.float32))
        state = replay.set_priorities(state, np.array([7, 3, 7, 7]), np.float32([2, 5, 3, 4]))
        leaves = priorities_of(state, size)
        assert leaves[7] in (2, 3, 4)
        assert leaves[3] == 5
        assert sum(leaves) == size - 2 + 5 + leaves[7]
        assert_inner_nodes_are_sums(state, 0)


@fast_at_ends("bad", [np.nan, np.inf, -np.inf, -1.0])
def test_bad_priorities_are_ignored_inside_jit(bad):
    replay, state = filled(np.ones(1_000, np.float32))
    indices = np.array([7, 3, 8])
    state = jax.jit(replay.set_priorities)(state, indices, np.float32([2, bad, 0]))
    wanted = np.ones(1_000)
    wanted[7] = 2
    wanted[8] = 0
    np.testing.assert_array_equal(priorities_of(state, 1_000), wanted)
    assert_inner_nodes_are_sums(state, 0)
    assert state.max_priority == 2


def test_the_tree_takes_few_bytes():
    state = jax.eval_shape(buffers.prioritised_replay(10**6).init, 0)
    assert 10**6 <= sum(level.size for level in state.tree) <= 5.4 * 10**6 / 4


# --------------------------------------------------------------------------------- stale, new, max


def test_priorities_for_items_that_are_gone_are_ignored():
    replay = buffers.prioritised_replay(6, 1.0)
    state = replay.add_batch(replay.init(0), jnp.arange(6))
    state = replay.set_priorities(state, np.arange(6), np.arange(1, 7))
    old = replay.sample(state, jax.random.key(0), 64).indices
    assert set(old.tolist()) == set(range(6))
    state = replay.add_batch(state, jnp.arange(6, 10))  # over 0, ..., 3
    assert priorities_of(state, 6) == [6, 6, 6, 6, 5, 6]

    for set_priorities in (replay.set_priorities, jax.jit(replay.set_priorities)):
        state = set_priorities(state, old, 10 + old.astype(jnp.float32))
        assert priorities_of(state, 6) == [6, 6, 6, 6, 14, 15]
    assert state.max_priority == 15  # and not more for those that are gone

    not_yet = np.array([-1, 10, 11, 2**31 - 1])
    state = replay.set_priorities(state, not_yet, np.full(4, 99.0))
    assert priorities_of(state, 6) == [6, 6, 6, 6, 14, 15]


def test_priorities_for_windows_that_are_gone_are_ignored():
    replay = buffers.prioritised_replay(8, 1.0, sequence_length=3, period=2)
    state = replay.add_batch(replay.init(0), jnp.arange(8))
    assert priorities_of(state, 8) == [1, 0, 1, 0, 1, 0, 0, 0]
    old = jnp.array([0, 2, 4])
    state = replay.set_priorities(state, old, jnp.array([2.0, 3.0, 4.0]))
    state = replay.add(state, 8)  # window 6, ..., 8 is complete, that at 0 has lost its first item
    assert priorities_of(state, 8) == [0, 0, 3, 0, 4, 0, 4, 0]
    no_window = jnp.array([1, 3, 5, 7, 8])
    state = replay.set_priorities(state, no_window, jnp.full(5, 99.0))
    state = replay.set_priorities(state, old, jnp.array([50.0, 6.0, 7.0]))
    assert priorities_of(state, 8) == [0, 0, 6, 0, 7, 0, 4, 0]
    assert state.max_priority == 7


SIX = buffers.prioritised_replay(6, 1.0)
FIRST_TWO = np.array([0, 1])


def test_new_items_get_the_largest_priority_ever_set():
    state = SIX.add_batch(SIX.init(0), jnp.arange(2))
    assert priorities_of(state, 6) == [1, 1, 0, 0, 0, 0]
    state = SIX.set_priorities(state, FIRST_TWO, np.array([8.0, 3.0]))
    state = SIX.set_priorities(state, FIRST_TWO, np.array([2.0, 0.0]))
    state = SIX.add_batch(state, jnp.arange(2), np.array([False, True]))
    assert priorities_of(state, 6) == [2, 0, 8, 0, 0, 0]


def test_new_items_get_less_than_1_if_no_larger_priority_was_set():
    state = SIX.add_batch(SIX.init(0), jnp.arange(2))
    state = SIX.set_priorities(state, FIRST_TWO, np.array([0.0, 0.25]))
    state = SIX.add(state, 2)
    assert priorities_of(state, 6) == [0, 0.25, 0.25, 0, 0, 0]


def test_new_items_do_not_get_a_priority_that_was_ignored():
    state = SIX.add_batch(SIX.init(0), jnp.arange(2))
    state = SIX.set_priorities(state, FIRST_TWO, np.array([2.0, 8.0]))
    state = SIX.add_batch(state, jnp.arange(2, 4))
    indices = np.array([1, 2, 3, 4])  # of which 4 is not in the buffer
    bad = np.float32([np.nan, np.inf, -9, 99])
    state = jax.jit(SIX.set_priorities)(state, indices, bad)
    state = SIX.add(state, 4)
    assert priorities_of(state, 6) == [2, 8, 8, 8, 8, 0]


# ----------------------------------------------------------------------- against a plain dictionary

TREE_SHAPES = [
    Windows(7),
    more(Windows(9, length=3)),
    more(Windows(7, length=7)),
    more(Windows(8, length=3, period=2)),
    more(Windows(8, length=4, period=4)),
    more(Windows(6, length=5, period=3)),  # at times full with nothing to draw
    more(Windows(5, envs=3)),
    more(Windows(6, envs=3, length=2)),
    more(Windows(6, envs=3, length=3, period=2)),
    more(Windows(6, envs=2, length=1, period=3)),
    Windows(40, envs=4, length=2, period=2),  # more than one level
]

tree_operations = st.lists(
    st.one_of(
        st.tuples(st.just("add"), batches(3, 10)),
        st.tuples(
            st.just("set"),
            st.lists(
                st.tuples(st.integers(0, 999), st.sampled_from([0.0, 0.01, 0.5, 2.0, 7.0])),
                min_size=4,
                max_size=4,
            ),
        ),
    ),
    max_size=12,
)


def assert_draws_have_weights(weights, shape, state, key):
    """Windows of a sample are whole, and their probabilities in proportion to the weights."""
    sample = shape.prioritised().replay().sample(state, key, 64)
    windows = decode(sample.experience)
    starts = shape.starts(windows)
    np.testing.assert_array_equal(windows, shape.window(starts))
    np.testing.assert_array_equal(sample.indices, shape.index_of(starts))
    probabilities = weights[starts % shape.max_size] / weights.sum()
    np.testing.assert_allclose(sample.probabilities, probabilities, rtol=2e-6)
    assert (probabilities > 0).all()


def assert_priorities_are(model, shape, state, total):
    """Those of the model, and 0 for what is overwritten, comes later, or begins no window."""
    ids = np.arange(total * shape.num_envs - 2 * shape.max_size, (total + 2) * shape.num_envs)
    indices = np.where(ids >= 0, shape.index_of(ids), -1).reshape(2, -1)  # of any shape
    found = shape.prioritised().replay().priorities(state, indices)
    wanted = np.array([model.get(i, 0.0) for i in ids.tolist()]).reshape(2, -1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("before_wrap", [None, 12])
@pytest.mark.parametrize("shape", TREE_SHAPES, ids=describe)
@examples(15)
@given(operations=tree_operations)
def test_the_tree_is_what_the_operations_leave(shape, before_wrap, operations):
    replay = shape.prioritised().replay()
    first = 0 if before_wrap is None else shape.modulus - before_wrap
    total = first
    state = start_at(replay.init(encode(0)), first)
    model = {}  # id of the first item -> priority, of all windows that can be drawn
    largest = 0.0
    for name, argument in operations:
        if name == "add":
            length, mask = argument
            ids, number_kept = shape.masked_ids(total, length, mask)
            state = replay.add_batch(state, encode(ids), as_mask(mask))
            total += number_kept
            model = {i: model.get(i, largest or 1.0) for i in shape.valid(first, total)}
        else:
            # Items of now, of before, and of no time; one of those twice or more.
            low = max(first - 1, total - 2 * shape.rows) * shape.num_envs
            high = (total + 2) * shape.num_envs
            new = {low + at % (high - low): priority for at, priority in argument}
            for i in new.keys() & model.keys():
                model[i] = new[i]
                largest = max(largest, new[i])
            ids = (list(new) * 4)[:4]
            priorities = [new[i] for i in ids]
            state = replay.set_priorities(state, shape.index_of(ids), priorities)

        weights = np.zeros(shape.max_size)
        for i, priority in model.items():
            weights[i % shape.max_size] = priority**0.6
        np.testing.assert_allclose(weights_of(state, len(weights)), weights, rtol=1e-6, atol=0)
        assert_inner_nodes_are_sums(state, 1e-6)
        assert_priorities_are(model, shape, state, total)
        assert replay.can_sample(state) == (weights.sum() > 0)
        if weights.sum() > 0:
            assert_draws_have_weights(weights, shape, state, jax.random.key(total))


# ------------------------------------------------------------------------- exponents, large, small


@pytest.mark.parametrize("exponent", [0, more(1), more(2), more(0.0), 0.4])
def test_the_exponent_turns_priorities_into_weights(exponent):
    draws = 2**14
    priorities = np.float32([0, 1, 2, 3, 0.5, 0])
    replay, state = filled(priorities, exponent)
    weights = np.float64(priorities) ** exponent
    np.testing.assert_allclose(weights_of(state, 6), weights, rtol=1e-6)

    counts = count_draws(replay, state, draws, 1, 2**10)[:6]
    is_drawn = weights > 0
    assert (counts[~is_drawn] == 0).all()
    expected = exact(priorities, exponent) * draws
    assert stats.chisquare(counts[is_drawn], expected[is_drawn]).pvalue > 1e-3

    state = replay.add(state, 6)  # with the largest priority, over the oldest item
    assert state.tree[0][0] == np.float32(3.0) ** np.float32(exponent)


@pytest.mark.parametrize("exponent", [0.0, more(0.4), more(1.0), 2.0])
def test_priorities_that_are_read_may_be_set_again(exponent):
    """They are those that were set; with exponent 0 they are 1, as all items are alike."""
    priorities = np.float32([0, 1e-6, 3, 0.5, 7e4])
    replay, state = filled(priorities, exponent)
    found = replay.priorities(state, np.arange(5))
    np.testing.assert_allclose(found, priorities if exponent else np.ones(5), rtol=1e-6)
    before = weights_of(state, 5).copy()
    state = replay.set_priorities(state, np.arange(5), found)
    np.testing.assert_allclose(weights_of(state, 5), before, rtol=1e-6)
    assert state.max_priority == pytest.approx(7e4)


def test_exponents_of_numpy_are_numbers_with_64_bits_as_well():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        inner = buffers.prioritised_replay(6, np.float64(0.5))
        replay = buffers.clustered_replay(2, inner, lambda item: 0, np.float64(0.5))
        state = replay.add(replay.init(np.float32(0)), np.float32(1))
        sample = replay.sample(state, jax.random.key(0), 3)
        assert sample.probabilities.dtype == np.float32


@pytest.mark.parametrize(
    ("priority", "exponent"),
    [(3e38, 1), more(1e38, 0.6), more(1e19, 2), more(1e-10, 1), (1e-17, 2)],
)
def test_large_and_small_priorities_are_drawn(priority, exponent):
    size = 1_000
    priorities = np.full(size, priority, np.float32)
    priorities[::10] = 0
    replay, state = filled(priorities, exponent)
    assert np.isfinite(buffers.tree_total(state.tree))
    assert replay.can_sample(state)

    counts = count_draws(replay, state, 2**16, 256, 4)[:size]
    assert counts[::10].sum() == 0
    assert stats.chisquare(counts[priorities > 0]).pvalue > 1e-3
    sample = replay.sample(state, jax.random.key(0), 256)
    np.testing.assert_allclose(sample.probabilities, 1 / 900, rtol=1e-5)

    state = replay.add_batch(state, jnp.arange(size))  # with the largest: all of them
    assert np.isfinite(buffers.tree_total(state.tree))
    assert replay.can_sample(state)


# ------------------------------------------------------------------------------- importance weights


def test_importance_weights_are_those_by_hand():
    """(size * P) ** -beta, divided by the largest of them."""
    weights = buffers.importance_weights(np.float32([0.1, 0.4, 0.5]), 0.5)
    np.testing.assert_allclose(weights, [1, 0.5, 5**-0.5], rtol=1e-6)
    assert weights.dtype == jnp.float32
    weights = buffers.importance_weights(jnp.array([0.1, 0.4, 0.5]), 0.0)
    assert weights.tolist() == [1, 1, 1]


def test_importance_weights_are_0_where_probabilities_are():
    weights = buffers.importance_weights(np.float32([0.2, 0.4, 0]), 1)
    np.testing.assert_allclose(weights, [1, 0.5, 0], rtol=1e-6)
    assert buffers.importance_weights(jnp.array([0.1, 0.0]), 0.0).tolist() == [1, 0]
    assert buffers.importance_weights(jnp.zeros(2), 0.5).tolist() == [0, 0]


@fast_at_ends("beta", [0.0, 0.4, 1.0])
def test_importance_weights_undo_the_priorities(beta):
    priorities = spread(1_000)
    replay, state = filled(priorities, 0.6)

    @jax.jit
    def weigh(state, beta):
        sample = replay.sample(state, jax.random.key(0), 64)
        return sample, buffers.importance_weights(sample.probabilities, beta)

    sample, weights = weigh(state, beta)
    probabilities = exact(priorities, 0.6)[np.asarray(sample.experience)]
    wanted = (1_000 * probabilities) ** -beta
    np.testing.assert_allclose(weights, wanted / wanted.max(), rtol=1e-5)
    assert weights.max() == 1


# ------------------------------------------------------------------------------------- blind cliff

STATES = 16
GAMMA = 1 - 1 / STATES
# The wrong action ends the episode with nothing; the right one leads on, in the last state to 1.
VALUE_OF_RIGHT = GAMMA ** np.arange(STATES - 1.0, -1, -1)
TRUE_VALUES = np.stack([np.zeros(STATES), VALUE_OF_RIGHT], axis=1).astype(np.float32)


class Learner(NamedTuple):
    values: jax.Array
    steps: jax.Array
    is_learnt: jax.Array


def cliff_memory():
    """Every transition of all sequences of STATES actions, each until its first wrong action."""
    visits = [2 ** (STATES - i) for i in range(STATES)]  # half of the actions in a state are right
    state = np.concatenate([np.full(n, i, np.int32) for i, n in enumerate(visits)])
    is_right = np.concatenate([np.arange(n) % 2 for n in visits])
    order = np.random.default_rng(4).permutation(len(state))
    return {"state": state[order], "action": is_right.astype(np.int32)[order]}


def q_learning_step(learner, transition):
    """The learner after one transition, and its temporal difference error."""
    values = learner.values
    s = transition["state"]
    a = transition["action"]
    is_last = s == STATES - 1
    reward = jnp.where(is_last & (a == 1), 1.0, 0.0)
    goes_on = (a == 1) & ~is_last
    next_value = values[jnp.minimum(s + 1, STATES - 1)].max()
    error = reward + GAMMA * goes_on * next_value - values[s, a]
    values = values.at[s, a].add(error / 4)
    is_learnt = jnp.mean((values - TRUE_VALUES) ** 2) < 1e-3
    steps = learner.steps + ~learner.is_learnt
    return Learner(values, steps, learner.is_learnt | is_learnt), error


def updates_until_learnt(replay, is_prioritised, cap, at_once, seed):
    """How many steps of Q-learning it takes to know all values; about `cap` if more.

    `at_once` transitions are drawn at a time: which changes nothing where draws are independent.
    """
    memory = cliff_memory()
    state = replay.add_batch(replay.init(jax.tree.map(lambda x: x[0], memory)), memory)

    def goes_on(carry):
        _, _, learner = carry
        return ~learner.is_learnt & (learner.steps < cap)

    def turn(carry):
        state, key, learner = carry
        key, draw_key = jax.random.split(key)
        sample = replay.sample(state, draw_key, at_once)
        learner, errors = jax.lax.scan(q_learning_step, learner, sample.experience)
        if is_prioritised:
            state = replay.set_priorities(state, sample.indices, jnp.abs(errors) + 1e-6)
        return state, key, learner

    @jax.jit
    def run(state, key):
        key, start = jax.random.split(key)
        values = 0.1 * jax.random.normal(start, (STATES, 2))
        learner = Learner(values, steps=jnp.int32(0), is_learnt=jnp.bool(False))
        _, _, learner = jax.lax.while_loop(goes_on, turn, (state, key, learner))
        return learner.steps

    return int(run(state, jax.random.key(seed)))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_the_blind_cliff_is_learnt_in_far_fewer_updates():
    """Schaul et al. 2016, section 3.1 and figure 1: one transition in 131,070 has a reward."""
    size = 2 ** (STATES + 1) - 2
    cap = 1_000_000  # three seeds of uniform: 1.8, 3.2, 2.0 million
    prioritised = buffers.prioritised_replay(size, 1.0)
    uniform = buffers.uniform_replay(size)
    with_priorities = [updates_until_learnt(prioritised, True, cap, 1, seed) for seed in range(3)]
    without = [updates_until_learnt(uniform, False, cap, 4096, seed) for seed in range(3)]
    assert max(with_priorities) < cap
    assert 5 * np.median(with_priorities) < np.median(without)
