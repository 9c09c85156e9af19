"""clustered_replay: where items are stored and how they are sampled, against plain Python."""

from collections import deque

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import as_mask, batches, decode, encode, kept
from helpers import examples
from hypothesis import given
from scipy import stats

import buffers

K = 3
ROWS = 4


def even_or_odd(x):
    return x % 2


UNIFORM = buffers.uniform_replay(ROWS)
STREAMS = buffers.prioritised_replay(2 * ROWS, num_envs=2)
REPLAYS = {
    "uniform": buffers.clustered_replay(K, UNIFORM, lambda item: item["id"] % K),
    "streams": buffers.clustered_replay(K, STREAMS, lambda step: step["id"][0] // 2 % K),
}
# Clusters of even and of odd numbers, whose priorities are the weights.
TWO = buffers.clustered_replay(2, buffers.prioritised_replay(3, 1.0), even_or_odd)


def ids_of(kind, rows):
    ids = np.asarray(rows, np.int32)
    return np.stack([2 * ids, 2 * ids + 1], axis=-1) if kind == "streams" else ids


@pytest.mark.parametrize("kind", REPLAYS)
@examples(25)
@given(added=st.lists(batches(4, 14), max_size=8))
def test_each_cluster_holds_its_newest(kind, added):
    replay = REPLAYS[kind]
    state = replay.init(encode(0))
    clusters = [deque(maxlen=ROWS) for _ in range(K)]
    total = 0
    for length, mask in added:
        rows = range(total, total + length)
        total += length
        state = replay.add_batch(state, encode(ids_of(kind, rows)), as_mask(mask))
        for row in kept(rows, mask):
            clusters[row % K].append(row)

        held = set(ids_of(kind, [row for cluster in clusters for row in cluster]).ravel().tolist())
        assert int(replay.size(state)) == len(held)
        assert bool(replay.can_sample(state)) == bool(held)
        if not held:
            with pytest.raises(ValueError, match="nothing to sample"):
                replay.sample(state, jax.random.key(0), 512)
            continue
        sample = replay.sample(state, jax.random.key(total), 512)
        drawn = decode(sample.experience)
        assert set(drawn.tolist()) == held
        np.testing.assert_array_equal(decode(replay.get(state, sample.indices)), drawn)


def index_of_each(replay, state):
    """Returns {id: index} of all items, which are their ids."""
    indices, is_held = replay.indices(state)
    ids = replay.get(state, indices[is_held])
    return dict(zip(ids.tolist(), indices[is_held].tolist(), strict=True))


@pytest.mark.parametrize(
    ("inner", "power"),
    # With power 0 all clusters that are not empty are equally likely.
    [(UNIFORM, 0.0), (UNIFORM, -1.0), (buffers.prioritised_replay(ROWS), 0.5)],
)
def test_draws_have_the_exact_distribution(inner, power):
    replay = buffers.clustered_replay(5, inner, lambda x: x % 5, power)
    added = [0, 5, 10, 15, 20, 1, 3, 8]  # clusters 2 and 4 stay empty, 0 loses its oldest items
    state = replay.add_batch(replay.init(0), jnp.array(added))
    held = np.array([5, 10, 15, 20, 1, 3, 8])
    weights = np.ones(7)
    if replay.set_priorities:
        priorities = np.array([1.0, 0.0, 2.0, 3.0, 5.0, 1.0, 4.0])
        index_of = index_of_each(replay, state)
        state = replay.set_priorities(state, [index_of[i] for i in held.tolist()], priorities)
        weights = priorities**0.6

    # For each held item: the size of its cluster, and the sum of the weights there.
    sizes = np.array([4, 4, 4, 4, 1, 2, 2])
    weight_sums = np.array([weights[held % 5 == i % 5].sum() for i in held])
    cluster_probabilities = sizes**power / (4**power + 1**power + 2**power)
    wanted = cluster_probabilities * weights / weight_sums

    keys = jax.random.split(jax.random.key(1), 100_000)
    sample_one = jax.jit(jax.vmap(lambda key: replay.sample(state, key, 1)))
    sample = sample_one(keys)  # independent: not stratified
    drawn = np.asarray(sample.experience[:, 0])
    counts = np.array([(drawn == i).sum() for i in held])
    is_possible = wanted > 0

    assert counts[is_possible].sum() == len(drawn)
    expected = wanted[is_possible] * len(drawn)
    assert stats.chisquare(counts[is_possible], expected).pvalue > 1e-3
    probability_of_id = np.zeros(held.max() + 1)
    probability_of_id[held] = wanted
    np.testing.assert_allclose(sample.probabilities[:, 0], probability_of_id[drawn], rtol=1e-5)


def test_a_cluster_without_priority_is_not_drawn():
    state = TWO.add_batch(TWO.init(0), jnp.arange(6))
    index_of = index_of_each(TWO, state)
    state = TWO.set_priorities(state, [index_of[1], index_of[3], index_of[5]], [0.0] * 3)

    sample = TWO.sample(state, jax.random.key(1), 256)

    assert set(sample.experience.tolist()) == {0, 2, 4}
    np.testing.assert_allclose(sample.probabilities, 1 / 3, rtol=1e-6)


def test_new_items_get_the_largest_priority_of_their_cluster():
    state = TWO.add_batch(TWO.init(0), jnp.arange(2))
    index_of = index_of_each(TWO, state)

    state = TWO.set_priorities(state, [index_of[1]], [8.0])
    state = TWO.add_batch(state, jnp.arange(2, 4))

    assert state.max_priority.tolist() == [0, 8]
    assert state.tree[0][:, :3].tolist() == [[1, 1, 0], [8, 8, 0]]


def test_items_that_are_gone_are_not_read_and_get_no_priority():
    state = TWO.add_batch(TWO.init(0), jnp.arange(6))
    index_of = index_of_each(TWO, state)
    state = TWO.add_batch(state, jnp.arange(6, 9))  # overwrites 0, 1 and 2
    with pytest.raises(ValueError, match="get: an index is not in the buffer"):
        TWO.get(state, index_of[1])

    of_all = [index_of[i] for i in range(6)]
    state = TWO.set_priorities(state, of_all, np.arange(20.0, 26))

    assert state.tree[0][:, :3].tolist() == [[1, 1, 24], [1, 23, 25]]
    assert TWO.priorities(state, of_all).tolist() == [0, 0, 0, 23, 24, 25]


def test_windows_of_one_step_are_taken():
    inner = buffers.uniform_replay(20, sequence_length=1)
    replay = buffers.clustered_replay(2, inner, even_or_odd)
    state = replay.add_batch(replay.init(0), jnp.arange(6))

    drawn = replay.sample(state, jax.random.key(0), 64).experience

    assert drawn.shape == (64, 1)
    assert set(drawn.ravel().tolist()) == set(range(6))


@pytest.mark.parametrize("dtype", [bool, np.uint8])
def test_a_cluster_may_be_a_bool_or_any_integer(dtype):
    """Its dtype need not be able to count the rows of all clusters."""
    inner = buffers.uniform_replay(40_000)
    replay = buffers.clustered_replay(2, inner, lambda x: (x >= 4).astype(dtype))

    state = replay.add_batch(replay.init(np.int32(0)), np.array([4, 5, 3], np.int32))

    assert state.size.tolist() == [1, 2]
    indices, is_held = replay.indices(state)
    assert replay.get(state, indices[is_held]).tolist() == [3, 4, 5]
    assert (indices[~is_held] == -1).all()


def test_a_cluster_out_of_range_counts_as_the_nearest():
    replay = buffers.clustered_replay(3, UNIFORM, lambda x: x)
    items = jnp.array([-1, 1, 3, 2**31 - 1, -(2**31)])

    state = replay.add_batch(replay.init(0), items)

    assert state.size.tolist() == [2, 1, 2]
    assert state.storage[:2, 0].tolist() == [-1, -(2**31)]


MISTAKES = [
    ((0, UNIFORM, even_or_odd), ValueError, "num_clusters"),
    ((2**27 + 1, UNIFORM, even_or_odd), ValueError, r"2\*\*29"),
    ((2, buffers.circular_buffer(4), even_or_odd), TypeError, "CircularBuffer"),
    ((2, TWO, even_or_odd), TypeError, "more clusters"),
    ((2, buffers.uniform_replay(20, sequence_length=2), even_or_odd), TypeError, "sequence_length"),
    ((2, UNIFORM, even_or_odd, 4.1), ValueError, "distribution_power"),
    ((2, UNIFORM, even_or_odd, np.nan), ValueError, "distribution_power"),
    ((2, UNIFORM, lambda x: 1.0), TypeError, "clustering_fn"),
    ((2, UNIFORM, lambda x: jnp.zeros(2, jnp.int32)), TypeError, "clustering_fn"),
]


def first_state(*settings):
    replay = buffers.clustered_replay(*settings)
    return replay.add(replay.init(0), 1)


@pytest.mark.parametrize(("settings", "error", "word"), MISTAKES)
def test_a_mistake_in_a_clustered_buffer_is_named(settings, error, word):
    with pytest.raises(error, match=word) as caught:
        first_state(*settings)

    assert "\n" not in str(caught.value)


def test_a_buffer_at_its_limits_is_made():
    assert buffers.clustered_replay(2**27, UNIFORM, even_or_odd, 4).max_size == 2**29
    assert buffers.clustered_replay(2, UNIFORM, even_or_odd, -4).max_size == 2 * ROWS
