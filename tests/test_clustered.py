"""clustered_replay: where items go and how they are drawn, against plain Python."""

from collections import deque

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_mask, batches, decode, encode, examples, fast_at_ends, kept, more, shift
from hypothesis import given
from scipy import stats

import buffers

K = 3
ROWS = 4


def by_id(item):
    return item["id"] % K


def by_first_id(step):
    return step["id"][0] // 2 % K


INNER = {
    "uniform": buffers.uniform_replay(ROWS),
    "prioritised": buffers.prioritised_replay(ROWS),
    "streams": buffers.prioritised_replay(2 * ROWS, num_envs=2),
}
REPLAYS = {
    kind: buffers.clustered_replay(K, inner, by_first_id if kind == "streams" else by_id)
    for kind, inner in INNER.items()
}


def ids_of(kind, rows):
    ids = np.asarray(rows, np.int32)
    return np.stack([2 * ids, 2 * ids + 1], axis=-1) if kind == "streams" else ids


@pytest.mark.parametrize("kind", ["uniform", more("prioritised"), "streams"])
@examples(40)
@given(added=st.lists(batches(1, 4, 14), max_size=8))
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
            with pytest.raises(ValueError, match="nothing to draw"):
                replay.sample(state, jax.random.key(0), 512)
            continue
        sample = replay.sample(state, jax.random.key(total), 512)
        drawn = decode(sample.experience)
        assert set(drawn.tolist()) == held
        np.testing.assert_array_equal(decode(replay.get(state, sample.indices)), drawn)


def index_of_each(ids, drawn, indices):
    """{id: index} of all items, of which each must be drawn."""
    index_of = dict(zip(drawn.tolist(), indices.tolist(), strict=True))
    assert sorted(index_of) == sorted(ids)
    return index_of


@pytest.mark.parametrize(
    ("kind", "power"),
    [
        ("uniform", 0.0),  # clusters alike, but for those that are empty
        more("uniform", 0.5),
        more("uniform", 1.0),
        more("prioritised", 0.0),
        ("prioritised", 0.5),
        more("prioritised", 1.0),
    ],
)
def test_draws_have_the_exact_distribution(kind, power):
    replay = buffers.clustered_replay(5, INNER[kind], lambda x: x % 5, power)
    added = [0, 5, 10, 15, 20, 1, 3, 8]  # clusters 2 and 4 stay empty, 0 loses its oldest
    state = replay.add_batch(replay.init(0), jnp.array(added))
    held = np.array([5, 10, 15, 20, 1, 3, 8])
    weights = np.ones(7)
    if kind == "prioritised":
        priorities = np.array([1.0, 0.0, 2.0, 3.0, 5.0, 1.0, 4.0])
        probe = replay.sample(state, jax.random.key(9), 4096)
        index_of = index_of_each(held, probe.experience, probe.indices)
        state = replay.set_priorities(state, [index_of[i] for i in held.tolist()], priorities)
        weights = priorities**0.6

    # For each item held: how large its cluster is, and the sum of the weights there.
    sizes = np.array([4, 4, 4, 4, 1, 2, 2])
    weight_sums = np.array([weights[held % 5 == i % 5].sum() for i in held])
    cluster_probabilities = sizes**power / (4**power + 1**power + 2**power)
    wanted = cluster_probabilities * weights / weight_sums

    sample_one = jax.jit(jax.vmap(lambda key: replay.sample(state, key, 1)))
    keys = jax.random.split(jax.random.key(1), 100_000)
    sample = sample_one(keys)  # independent: not stratified
    drawn = np.asarray(sample.experience[:, 0])
    counts = np.array([(drawn == i).sum() for i in held])
    assert counts.sum() == len(drawn)
    is_possible = wanted > 0
    assert (counts[~is_possible] == 0).all()
    expected = wanted[is_possible] * len(drawn)
    assert stats.chisquare(counts[is_possible], expected).pvalue > 1e-3

    probability_of_id = np.zeros(held.max() + 1)
    probability_of_id[held] = wanted
    np.testing.assert_allclose(sample.probabilities[:, 0], probability_of_id[drawn], rtol=1e-5)


def test_a_cluster_without_priority_is_not_drawn():
    replay = buffers.clustered_replay(2, buffers.prioritised_replay(4), lambda x: x % 2)
    state = replay.add_batch(replay.init(0), jnp.arange(6))
    sample = replay.sample(state, jax.random.key(0), 256)
    is_odd = np.asarray(sample.experience) % 2 == 1
    indices_of_odd = np.asarray(sample.indices)[is_odd]
    state = replay.set_priorities(state, indices_of_odd, np.zeros(len(indices_of_odd)))

    sample = replay.sample(state, jax.random.key(1), 256)
    assert (np.asarray(sample.experience) % 2 == 0).all()
    np.testing.assert_allclose(sample.probabilities, 1 / 3, rtol=1e-6)
    # New items of a cluster get the largest priority of that cluster.
    assert state.max_priority.tolist() == [0, 0]


def filled_and_indices():
    """Prioritised clusters of ids 0, ..., 8, three in each, and the index of each id."""
    replay = REPLAYS["prioritised"]
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(9)))
    sample = replay.sample(state, jax.random.key(0), 64)
    return state, index_of_each(range(9), decode(sample.experience), sample.indices)


def test_an_update_changes_one_item():
    replay = REPLAYS["prioritised"]
    state, index_of = filled_and_indices()
    state = replay.update(state, shift, np.array([index_of[4]]))
    assert replay.get(state, index_of[4])["id"] == 5
    for other in (0, 1, 2, 3, 5):
        assert replay.get(state, index_of[other])["id"] == other


def test_indices_of_items_that_are_gone_are_errors_of_get_and_change_no_priority():
    replay = REPLAYS["prioritised"]
    state, index_of = filled_and_indices()
    state = replay.add_batch(state, encode(np.arange(9, 15)))  # two more each: 0, 1, 2 are gone
    with pytest.raises(ValueError, match="get: an index is not in the buffer"):
        replay.get(state, index_of[1])

    leaves = np.asarray(state.tree[0])[:, :4]
    gone = [index_of[0], index_of[1], index_of[2]]
    state = replay.set_priorities(state, gone, [7.0, 8.0, 9.0])
    np.testing.assert_array_equal(state.tree[0][:, :4], leaves)
    state = replay.set_priorities(state, [index_of[3]], [0.0])
    assert (np.asarray(state.tree[0])[:, :4] != leaves).sum() == 1


def test_priorities_are_read_from_the_cluster_of_each_item():
    """The priority of item i is i + 1. Two clusters hold its newest three each."""
    inner = buffers.prioritised_replay(3, 0.5)
    replay = buffers.clustered_replay(2, inner, lambda item: item % 2)
    state = replay.init(0)
    first = []
    for i in range(20):
        state = replay.add(state, i)
        indices, is_held = replay.indices(state)
        ids = replay.get(state, indices[is_held])
        newest = indices[is_held][ids == i]
        state = replay.set_priorities(state, newest, [i + 1.0])
        first = first or newest.tolist()  # of item 0
    np.testing.assert_allclose(replay.priorities(state, indices[is_held]), ids + 1, rtol=1e-6)
    assert replay.priorities(state, indices[~is_held]).tolist() == [0] * int((~is_held).sum())
    assert replay.priorities(state, first).tolist() == [0]


def test_a_power_below_zero_prefers_small_clusters():
    replay = buffers.clustered_replay(300, buffers.uniform_replay(8), lambda x: x, -1.0)
    items = jnp.concatenate([jnp.full(8, 7), jnp.array([250])])
    state = replay.add_batch(replay.init(0), items)
    drawn = np.asarray(replay.sample(state, jax.random.key(0), 20_000).experience)
    assert stats.binomtest(int((drawn == 250).sum()), 20_000, 8 / 9).pvalue > 1e-3
    assert set(drawn.tolist()) == {7, 250}


def test_trajectories_clustered_by_return_keep_the_rare_good_ones():
    """An item may be a whole trajectory: the one good among 50 bad ones stays."""

    def is_good(trajectory):
        return (trajectory["reward"].sum() >= 10).astype(jnp.int32)

    replay = buffers.clustered_replay(2, buffers.uniform_replay(5), is_good)
    state = replay.init({"observation": jnp.zeros((10, 2)), "reward": jnp.zeros(10)})
    good = {"observation": jnp.ones((10, 2)), "reward": jnp.full(10, 2.0)}
    state = replay.add(state, good)
    bad = {"observation": jnp.zeros((50, 10, 2)), "reward": jnp.zeros((50, 10))}
    state = replay.add_batch(state, bad)
    assert replay.size(state) == 1 + 5

    drawn = replay.sample(state, jax.random.key(0), 1000).experience
    assert drawn["reward"].shape == (1000, 10)
    rate_of_good = float((drawn["reward"].sum(axis=1) == 20).mean())
    assert 0.45 < rate_of_good < 0.55
    np.testing.assert_array_equal(drawn["observation"][:, 0, 0], drawn["reward"][:, 0] / 2)


def test_windows_that_are_items_keep_steps_that_follow_each_other():
    """Each window is clustered by its last step; the steps in it stay together."""
    replay = buffers.clustered_replay(2, buffers.uniform_replay(8), lambda x: x["id"][-1] % 2)
    starts = np.arange(10)
    windows = encode(starts[:, None] + np.arange(3))
    state = replay.add_batch(replay.init(encode(np.zeros(3))), windows)
    drawn = decode(replay.sample(state, jax.random.key(0), 256).experience)
    assert set(drawn[:, 0].tolist()) == set(range(10))
    np.testing.assert_array_equal(np.diff(drawn, axis=1), 1)


@pytest.mark.parametrize("make", [buffers.uniform_replay, buffers.prioritised_replay])
def test_windows_of_a_cluster_are_refused(make):
    message = r"sequence_length=2, but .* do not follow each other.*store whole windows or episodes"
    with pytest.raises(TypeError, match=message):
        buffers.clustered_replay(2, make(20, sequence_length=2), by_id)


def test_windows_of_one_step_are_taken():
    inner = buffers.uniform_replay(20, sequence_length=1)
    replay = buffers.clustered_replay(2, inner, lambda x: x % 2)
    state = replay.add_batch(replay.init(0), jnp.arange(6))
    drawn = replay.sample(state, jax.random.key(0), 64).experience
    assert drawn.shape == (64, 1)
    assert set(drawn.ravel().tolist()) == set(range(6))


@pytest.mark.parametrize(
    ("is_large", "sizes"), [(lambda x: x >= 4, [4, 2]), (lambda x: True, [0, 4])]
)
def test_a_cluster_may_be_a_bool(is_large, sizes):
    replay = buffers.clustered_replay(2, buffers.uniform_replay(4), is_large)
    state = replay.add_batch(replay.init(0), jnp.arange(6))
    assert state.size.tolist() == sizes


def test_a_cluster_out_of_range_counts_as_the_nearest():
    replay = buffers.clustered_replay(3, buffers.uniform_replay(4), lambda x: x)
    for add_batch in (replay.add_batch, jax.jit(replay.add_batch)):
        state = add_batch(replay.init(0), jnp.array([-1, 1, 3, 2**31 - 1, -(2**31)]))
        assert state.size.tolist() == [2, 1, 2]
        assert state.storage[:2, 0].tolist() == [-1, -(2**31)]


@pytest.mark.parametrize(
    ("error", "message", "num_clusters", "inner"),
    [
        (ValueError, "num_clusters must be at least 1", 0, INNER["uniform"]),
        (TypeError, "uniform or prioritised, got CircularBuffer", 2, buffers.circular_buffer(4)),
        (
            TypeError,
            "got ClusteredReplay: give one clustered buffer more clusters",
            2,
            buffers.clustered_replay(2, INNER["uniform"], by_id),
        ),
        (ValueError, r"more than 2\*\*29", 2**28, INNER["uniform"]),
    ],
)
def test_impossible_buffers_are_errors(error, message, num_clusters, inner):
    with pytest.raises(error, match=message):
        buffers.clustered_replay(num_clusters, inner, by_id)


@fast_at_ends("dtype", [bool, jnp.int8, jnp.uint8, jnp.int16])
def test_a_cluster_may_be_of_any_integer_dtype(dtype):
    """Also of one that cannot count the rows of all clusters."""
    replay = buffers.clustered_replay(2, buffers.uniform_replay(40_000), lambda x: x.astype(dtype))
    state = replay.add_batch(replay.init(np.int32(0)), np.array([1, 1, 0], np.int32))
    indices, is_held = replay.indices(state)
    assert replay.get(state, indices[is_held]).tolist() == [0, 1, 1]


@pytest.mark.parametrize("power", [4.1, -5.0, np.nan, np.inf])
def test_powers_that_would_overflow_are_an_error(power):
    with pytest.raises(ValueError, match="distribution_power must be from -4 to 4, got"):
        buffers.clustered_replay(2, INNER["uniform"], by_id, power)


@pytest.mark.parametrize("fn", [lambda x: 1.0, lambda x: jnp.zeros(2, jnp.int32)])
def test_clusters_that_are_not_integers_are_an_error(fn):
    replay = buffers.clustered_replay(2, buffers.uniform_replay(4), fn)
    with pytest.raises(TypeError, match="clustering_fn must return one integer or bool, got"):
        replay.add(replay.init(0), 1)
