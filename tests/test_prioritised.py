"""Prioritised replay: samples in proportion to priorities, and a tree that agrees with them."""

from functools import cache, partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import Windows, as_mask, batches, decode, encode
from helpers import examples
from hypothesis import given
from scipy import stats

import buffers


@cache
def replay_of(size, exponent=1.0):
    return buffers.prioritised_replay(size, exponent)


def filled(priorities, exponent=1.0):
    """Makes a full buffer of ids 0, 1, ... with these priorities. Returns it and its state."""
    size = len(priorities)
    replay = replay_of(size, exponent)
    state = replay.add_batch(replay.init(0), jnp.arange(size))
    return replay, replay.set_priorities(state, np.arange(size), priorities)


def spread(size):
    """Makes float32 priorities: a tenth are 0, the others from 0.5 to 3."""
    rng = np.random.default_rng(0)
    priorities = rng.uniform(0.5, 3, size).astype(np.float32)
    priorities[: size // 10] = 0
    return rng.permutation(priorities)


def assert_inner_nodes_are_sums(state, rtol=0.0):
    """Fails unless each node is the sum of four of the level before; the rest is padding."""
    nodes = np.float64(state.tree[0])
    for level in state.tree[1:]:
        nodes = nodes.reshape(-1, 4).sum(axis=-1)
        np.testing.assert_allclose(level[: len(nodes)], nodes, rtol=rtol, atol=0)
        assert not level[len(nodes) :].any()
        nodes = np.pad(nodes, (0, len(level) - len(nodes)))


def weights_of(state, size):
    """Returns the weights of all positions, which are the priorities if the exponent is 1."""
    return state.tree[0][:size].tolist()


def assert_in_proportion(drawn, weights):
    """Fails unless counts are within 2 of their shares, as with one draw per equal share."""
    counts = np.bincount(drawn, minlength=len(weights))
    assert not counts[weights == 0].any()
    np.testing.assert_allclose(counts, len(drawn) * weights / weights.sum(), atol=2.1)


def test_draws_are_in_proportion_to_priorities():
    size = 5_002  # a tree with two stored levels
    weights = np.float64(spread(size)) ** 0.6
    replay, state = filled(spread(size), 0.6)

    sample = replay.sample(state, jax.random.key(1), 2**17)

    assert_in_proportion(sample.experience, weights)
    wanted = (weights / weights.sum())[np.asarray(sample.experience)]
    np.testing.assert_allclose(sample.probabilities, wanted, rtol=1e-5)


def test_batches_of_one_draw_are_independent():
    weights = np.array([1, 0, 2, 3, 10])
    replay, state = filled(np.float32(weights))
    keys = jax.random.split(jax.random.key(0), 2**16)

    drawn = jax.vmap(lambda key: replay.sample(state, key, 1).experience[0])(keys)

    counts = np.bincount(drawn, minlength=5)[weights > 0]
    assert stats.chisquare(counts, weights[weights > 0] * 2**12).pvalue > 1e-3


def test_a_batch_has_one_draw_from_each_equal_share():
    """Priorities add up to 32: of 32 samples, three are the item of priority 3, in order."""
    priorities = np.array([1] * 8 + [3] * 8)
    replay, state = filled(np.float32(priorities))
    draw = jax.vmap(lambda key: replay.sample(state, key, 32).experience)

    drawn = draw(jax.random.split(jax.random.key(0), 20))

    np.testing.assert_array_equal(drawn, np.tile(np.repeat(np.arange(16), priorities), (20, 1)))


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_ten_million_items_are_drawn_alike():
    """One float32 per draw would be too coarse."""
    replay = buffers.prioritised_replay(10**7)
    state = replay.add_batch(replay.init(0), jnp.arange(10**7))

    @jax.jit
    def run(state, keys):
        draw = jax.vmap(lambda key: replay.sample(state, key, 256).experience)
        return jax.lax.map(draw, keys)

    keys = jax.random.split(jax.random.key(0), (2 * 10**4, 4))
    counts = np.bincount(np.asarray(run(state, keys)).ravel(), minlength=10**7)

    assert 0.99 < counts.var() / counts.mean() < 1.003  # 1 for a Poisson distribution


@pytest.mark.parametrize(
    ("weights", "fraction", "child", "rest"),
    [
        ([1, 2, 3, 4], 0.05, 0, 0.5),
        ([1, 2, 3, 4], 0.25, 1, 0.75),
        ([1, 2, 3, 4], 0.45, 2, 0.5),
        ([1, 2, 3, 4], 0.9, 3, 0.75),
        # A rounded sum may lead to the end of all children, where no weight is.
        ([1, 2, 0, 0], 1.0, 1, 1.0),
        ([1, 0, 3, 0], 1.0, 2, 1.0),
        ([0, 0, 0, 3], 0.0, 3, 0.0),
        ([0, 2, 1, 0], 0.0, 1, 0.0),
    ],
)
def test_a_child_without_weight_is_never_chosen(weights, fraction, child, rest):
    found = buffers._choose_child(jnp.float32([weights]), jnp.float32([fraction]))

    assert found[0].tolist() == [child]
    assert found[1].tolist() == [weights[child]]
    np.testing.assert_allclose(found[2], [rest], atol=1e-6)


@pytest.mark.usefixtures("optimised")
def test_ten_thousand_updates_leave_no_error_behind():
    updates, batch = 10_000, 64
    size = 5_003  # a prime, so that the positions of one batch differ
    replay, state = filled(np.ones(size, np.float32))
    rng = np.random.default_rng(3)
    first = rng.integers(size, size=(updates, 1), dtype=np.int32)
    positions = (first + 371 * np.arange(batch, dtype=np.int32)) % size
    priorities = (10.0 ** rng.uniform(-3, 3, (updates, batch))).astype(np.float32)

    def update(state, given):
        return replay.set_priorities(state, *given), None

    run = jax.jit(partial(jax.lax.scan, update), donate_argnums=0)
    state, _ = run(state, (positions, priorities))

    wanted = np.ones(size, np.float32)
    wanted[positions.ravel()] = priorities.ravel()  # the last value remains
    assert weights_of(state, size) == wanted.tolist()
    assert_inner_nodes_are_sums(state, 1e-5)
    assert state.max_priority == priorities.max()


def test_no_priorities_and_no_items_change_nothing():
    replay, state = filled(np.arange(5_000, dtype=np.float32))
    before = jax.tree.map(np.array, state)

    state = replay.set_priorities(state, np.zeros(0, np.int32), np.zeros(0, np.float32))
    state = replay.add_batch(state, np.zeros(0, np.int32))

    jax.tree.map(np.testing.assert_array_equal, state, before)


def test_a_batch_over_the_only_window_cannot_be_drawn_from():
    replay = buffers.prioritised_replay(4, sequence_length=4, period=4)
    state = replay.add_batch(replay.init(0.0), np.arange(4, dtype=np.float32))

    assert replay.can_sample(state)
    with pytest.raises(ValueError, match="nothing to sample"):
        replay.add_and_sample(state, np.ones(1, np.float32), jax.random.key(0), 3)


def test_bad_priorities_are_ignored_inside_jit():
    replay, state = filled(np.ones(5_000, np.float32))
    bad = [np.nan, np.inf, -np.inf, -1.0]

    state = jax.jit(replay.set_priorities)(state, np.arange(6), np.float32([2, *bad, 0]))

    assert weights_of(state, 5_000) == [2, 1, 1, 1, 1, 0] + [1] * 4_994
    assert_inner_nodes_are_sums(state)
    assert state.max_priority == 2


def test_priorities_for_windows_that_are_gone_are_ignored():
    replay = buffers.prioritised_replay(8, 1.0, sequence_length=3, period=2)
    state = replay.add_batch(replay.init(0), jnp.arange(8))
    assert weights_of(state, 8) == [1, 0, 1, 0, 1, 0, 0, 0]
    old = np.array([0, 2, 4])
    state = replay.set_priorities(state, old, [2.0, 3.0, 4.0])
    state = replay.add(state, 8)  # sequence 6, 7, 8 is complete, that at 0 has lost its first item
    assert weights_of(state, 8) == [0, 0, 3, 0, 4, 0, 4, 0]
    no_window = [1, 3, 5, 7, 8, 10, -1, 2**31 - 1]
    state = replay.set_priorities(state, no_window, np.full(8, 99.0))
    state = replay.set_priorities(state, old, [50.0, 6.0, 7.0])

    assert weights_of(state, 8) == [0, 0, 6, 0, 7, 0, 4, 0]
    assert state.max_priority == 7


@pytest.mark.parametrize(
    ("priorities", "of_new"),
    [([(8.0, 3.0), (2.0, 0.0)], 8.0), ([(0.0, 0.25)], 0.25), ([], 1.0)],
)
def test_new_items_get_the_largest_priority_ever_set(priorities, of_new):
    replay = replay_of(6)
    state = replay.add_batch(replay.init(0), jnp.arange(2))
    for given_two in priorities:
        state = jax.jit(replay.set_priorities)(state, np.arange(2), np.float32(given_two))
    set_before = weights_of(state, 2)

    state = replay.set_priorities(state, [2], [99.0])  # this item does not exist yet
    state = replay.add_batch(state, jnp.arange(2), np.array([False, True]))

    assert weights_of(state, 6) == [*set_before, of_new, 0, 0, 0]


def test_the_tree_stores_levels_of_more_than_1024_nodes():
    tree = jax.eval_shape(replay_of(10**6).init, 0).tree

    assert [level.size for level in tree] == [1_000_000, 250_000, 62_500, 15_628, 3_908]
    assert [level.size for level in buffers.tree_init(4_096)] == [4_096]


# A number stands for an item: a held one, a former one, or one that never existed.
settings = st.tuples(st.integers(0, 999), st.sampled_from([0.0, 0.01, 0.5, 2.0, 7.0]))
four_settings = st.lists(settings, min_size=4, max_size=4)
operation = st.tuples(st.just("add"), batches(3, 10)) | st.tuples(st.just("set"), four_settings)


def assert_draws_have_weights(weights, shape, state, key):
    """Fails unless sequences are complete, and their probabilities proportional to the weights."""
    sample = shape.prioritised().replay().sample(state, key, 64)
    windows = decode(sample.experience)
    starts = shape.starts(windows)
    np.testing.assert_array_equal(windows, shape.window(starts))
    np.testing.assert_array_equal(sample.indices, shape.index_of(starts))
    probabilities = weights[starts % shape.max_size] / weights.sum()
    np.testing.assert_allclose(sample.probabilities, probabilities, rtol=2e-6)
    assert (probabilities > 0).all()


def assert_priorities_are(model, shape, state, total):
    """Fails unless priorities are the model's, and 0 for items that begin no held sequence."""
    ids = np.arange(total * shape.num_envs - 2 * shape.max_size, (total + 2) * shape.num_envs)
    indices = np.where(ids >= 0, shape.index_of(ids), -1).reshape(2, -1)  # of any shape
    found = shape.prioritised().replay().priorities(state, indices)
    wanted = np.array([model.get(i, 0.0) for i in ids.tolist()]).reshape(2, -1)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=0)


# With sequences of 5 steps it is at times full with nothing to sample.
@pytest.mark.parametrize(
    "shape",
    [Windows(7), Windows(6, length=5, period=3), Windows(20, envs=3, length=3, period=2)],
)
@examples(25)
@given(operations=st.lists(operation, max_size=12), before_wrap=st.sampled_from([None, 12]))
def test_the_tree_is_what_the_operations_leave(shape, operations, before_wrap):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "SMALL", 4)  # so that small trees also have several levels
        compare_with_a_dictionary(shape, operations, before_wrap)


def compare_with_a_dictionary(shape, operations, before_wrap):
    replay = shape.prioritised().replay()
    total = first = 0 if before_wrap is None else shape.modulus - before_wrap
    state = replay.init(encode(0))._replace(cursor=jnp.int32(first))
    model = {}  # id of the first item -> priority, for all sequences that can be sampled
    largest = 0.0
    for name, argument in operations:
        if name == "add":
            length, mask = argument
            ids, number_kept = shape.masked_ids(total, length, mask)
            state = replay.add_batch(state, encode(ids), as_mask(mask))
            total += number_kept
            model = {i: model.get(i, largest or 1.0) for i in shape.valid(first, total)}
        else:
            low = max(first - 1, total - 2 * shape.rows) * shape.num_envs
            high = (total + 2) * shape.num_envs
            new = {low + at % (high - low): priority for at, priority in argument}
            model |= {i: new[i] for i in new.keys() & model.keys()}
            largest = max([largest, *(new[i] for i in new.keys() & model.keys())])
            ids = (list(new) * 4)[:4]  # one of those twice or more
            state = replay.set_priorities(state, shape.index_of(ids), [new[i] for i in ids])

        weights = np.zeros(shape.max_size)
        for i, priority in model.items():
            weights[i % shape.max_size] = priority**0.6
        np.testing.assert_allclose(weights_of(state, len(weights)), weights, rtol=1e-6, atol=0)
        assert_inner_nodes_are_sums(state, 1e-6)
        assert_priorities_are(model, shape, state, total)
        assert replay.can_sample(state) == (weights.sum() > 0)
        if weights.sum() > 0:
            assert_draws_have_weights(weights, shape, state, jax.random.key(total))


@pytest.mark.parametrize("exponent", [0, 0.4, 2])
def test_the_exponent_turns_priorities_into_weights(exponent):
    priorities = np.float32([0, 1e-6, 2, 3, 0.5, 7e4])
    replay, state = filled(priorities, exponent)

    weights = weights_of(state, 6)
    read = replay.priorities(state, np.arange(6))
    state = replay.add(state, 6)  # with the largest priority, over the oldest item

    np.testing.assert_allclose(weights, np.float64(priorities) ** exponent, rtol=1e-6)
    np.testing.assert_allclose(read, priorities if exponent else np.ones(6), rtol=1e-6)
    np.testing.assert_allclose(state.tree[0][0], 7e4**exponent, rtol=1e-6)


def test_exponents_of_numpy_are_numbers_with_64_bits_as_well():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        inner = buffers.prioritised_replay(6, np.float64(0.5))
        replay = buffers.clustered_replay(2, inner, lambda item: 0, np.float64(0.5))
        state = replay.add(replay.init(np.float32(0)), np.float32(1))
        sample = replay.sample(state, jax.random.key(0), 3)

        assert sample.probabilities.dtype == np.float32


@pytest.mark.parametrize(("priority", "exponent"), [(3e38, 1), (1e-17, 2)])
def test_large_and_small_priorities_are_drawn(priority, exponent):
    size = 1_000
    priorities = np.full(size, priority, np.float32)
    priorities[::10] = 0
    replay, state = filled(priorities, exponent)

    sample = replay.sample(state, jax.random.key(0), 2**16)

    assert_in_proportion(sample.experience, np.float64(priorities > 0))
    np.testing.assert_allclose(sample.probabilities, 1 / 900, rtol=1e-5)
    later = replay.add_batch(state, jnp.arange(size))  # with the largest: all of them
    assert np.isfinite(buffers.tree_total(later.tree))
    assert replay.can_sample(later)


@pytest.mark.parametrize(
    ("probabilities", "beta", "weights"),
    # (size * P) ** -beta, over the largest of them
    [
        ([0.1, 0.4, 0.5], 0.5, [1, 0.5, 5**-0.5]),
        ([0.2, 0.4, 0], 1, [1, 0.5, 0]),
        ([0.1, 0], 0.0, [1, 0]),
        ([0, 0], 0.5, [0, 0]),
    ],
)
def test_importance_weights_are_those_by_hand(probabilities, beta, weights):
    found = buffers.importance_weights(np.float32(probabilities), beta)

    np.testing.assert_allclose(found, weights, rtol=1e-6)
    assert found.dtype == np.float32
