"""Items of any structure and dtype, batches of one and of none, indices of any shape and type."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, decode, encode, fast_at_ends, more, shift

import buffers


class Transition(NamedTuple):
    observation: jax.Array
    info: tuple


PROTOTYPES = {
    "int": 3,
    "key": jax.random.key(0),
    "zero-size": np.zeros((0, 2), np.float32),
    "NamedTuple": Transition(np.zeros((2, 1), np.int8), (True, jax.random.key(0))),
    "nested": {
        "scalars": {"int": 3, "float": 3.0, "bool": True},
        "uint8": np.zeros((4, 4), np.uint8),
        "int8": np.zeros(2, np.int8),
        "bool": np.zeros(2, bool),
        "bfloat16": jnp.zeros(2, jnp.bfloat16),
        "complex64": jnp.zeros(2, jnp.complex64),
        "keys": jax.random.split(jax.random.key(0), 2),
        "a": (1, [2.0, {"b": np.zeros((2, 1), np.float32)}]),
        "none": None,
    },
}


def random_items(prototype, length, seed):
    """Items [length, ...] like `prototype`, random and different from leaf to leaf."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        shape = (length, *jnp.shape(x))
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(rng.integers(1000)), shape)
        values = rng.permutation(np.prod(shape)).reshape(shape) % 128
        if dtype == jnp.bool_:
            return values % 2 == 0
        return values.astype(dtype)

    return jax.tree.map(leaf, prototype)


KINDS_OF_ITEMS = ["int", "key", "zero-size", "NamedTuple", "nested"]


@fast_at_ends("name", KINDS_OF_ITEMS)
def test_a_circular_buffer_holds_items_of_any_pytree_and_dtype(name):
    prototype = PROTOTYPES[name]
    rows = random_items(prototype, 4, seed=1)
    row_1 = jax.tree.map(lambda x: x[1], rows)
    batch_of_row_0 = jax.tree.map(lambda x: x[:1], rows)
    expected = jax.tree.map(lambda x: x[np.array([0, 2, 3, 1, 0])], rows)

    circular = buffers.circular_buffer(6)
    state = circular.init(prototype)
    state = circular.add_batch(state, rows, np.array([True, False, True, True]))
    state = circular.add(state, row_1)
    state = circular.add_batch(state, batch_of_row_0)
    assert_trees_equal(circular.get(state, np.arange(5)), expected)

    state = circular.update(state, lambda x: x)
    state = circular.update(state, lambda x: x, np.array([0, 0]))
    assert_trees_equal(circular.get(state, np.arange(5)), expected)
    assert isinstance(repr(state), str)
    state, items = circular.pop(state, 5)
    assert_trees_equal(items, expected)


@fast_at_ends("name", KINDS_OF_ITEMS)
def test_a_replay_buffer_holds_items_of_any_pytree_and_dtype(name):
    prototype = PROTOTYPES[name]
    items = random_items(prototype, 12, seed=2)
    rows = jax.tree.map(lambda x: x.reshape(4, 3, *x.shape[1:]), items)
    replay = buffers.uniform_replay(12, num_envs=3, sequence_length=2)
    state = replay.add_batch(replay.init(prototype), rows)
    sample = replay.sample(state, jax.random.key(0), 7)
    in_windows = np.asarray(sample.indices)[:, None] + [[0, 3]]
    assert_trees_equal(sample.experience, jax.tree.map(lambda x: x[in_windows], items))

    together = replay.add_and_sample(replay.init(prototype), rows, jax.random.key(0), 7)
    assert_trees_equal(together, (state, sample))


def test_python_scalars_and_numpy_float64_become_jax_default_dtypes():
    prototype = {"int": 1, "float": 1.0, "bool": True, "array": np.zeros(2), "f64": np.float64(1)}
    circular = buffers.circular_buffer(3)
    state = circular.init(prototype)
    f32 = jnp.float32
    dtypes = {name: leaf.dtype for name, leaf in state.storage.items()}
    assert dtypes == {"int": jnp.int32, "float": f32, "bool": jnp.bool_, "array": f32, "f64": f32}

    first = {"int": 4, "float": 5, "bool": False, "array": np.full(2, 0.1), "f64": 7}
    second = {"int": 5, "float": 0.5, "bool": True, "array": np.ones(2), "f64": 8.0}
    state = circular.add(state, first)
    state = circular.add(state, second)
    items = circular.get(state, np.arange(2))
    assert items["int"].tolist() == [4, 5]
    assert items["float"].tolist() == [5.0, 0.5]
    assert items["bool"].tolist() == [False, True]
    assert items["array"].tolist() == [[np.float32(0.1)] * 2, [1.0, 1.0]]
    assert items["f64"].tolist() == [7.0, 8.0]


def test_literals_take_the_dtype_of_their_slot():
    circular = buffers.circular_buffer(2)
    state = circular.init({"u": np.uint8(0), "h": jnp.bfloat16(0)})
    state = circular.add(state, {"u": 200, "h": 1.5})
    items = circular.get(state, np.array([0]))
    assert (items["u"].dtype, items["u"].tolist()) == (jnp.uint8, [200])
    assert (items["h"].dtype, items["h"].tolist()) == (jnp.bfloat16, [1.5])


def test_init_uses_shapes_only():
    replay = buffers.uniform_replay(4)
    state = replay.init(encode(77))
    assert replay.size(state) == 0
    assert not replay.can_sample(state)
    assert all(not leaf.any() for leaf in jax.tree.leaves(state.storage))
    shapes = jax.eval_shape(replay.init, encode(0))
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(lambda x: x.shape, shapes)


@fast_at_ends("num_envs", [None, 1, 2])
def test_a_batch_of_one_stays_a_batch(num_envs):
    row_shape = () if num_envs is None else (num_envs,)
    replay = buffers.uniform_replay(2, num_envs=num_envs, sequence_length=1)
    state = replay.add_batch(replay.init(encode(0)), encode(np.full((1, *row_shape), 3)))
    drawn = replay.sample(state, jax.random.key(0), 1).experience
    assert decode(drawn).tolist() == [[3]]
    assert decode(replay.get(state, np.array([0]))).tolist() == [[3]]


def test_an_item_that_is_popped_alone_stays_a_batch():
    circular = buffers.circular_buffer(1)
    state = circular.add(circular.init(encode(0)), encode(3))
    state, items = circular.pop(state, 1)
    assert decode(items).tolist() == [3]


@pytest.mark.parametrize("mask", [None, np.zeros(0, bool)], ids=["no mask", "mask"])
def test_a_batch_of_none_adds_nothing(mask):
    circular = buffers.circular_buffer(3)
    state = circular.add(circular.init(encode(0)), encode(3))
    state = circular.add_batch(state, encode(np.zeros(0)), mask)
    assert circular.size(state) == 1
    assert decode(circular.get(state, np.array([0]))).tolist() == [3]


# ------------------------------------------------------------------------------------ indices


@fast_at_ends("shape", [(), (1,), (4,), (2, 3)])
def test_indices_may_have_any_shape(shape):
    indices = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    replay = buffers.uniform_replay(8, sequence_length=2)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(8)))
    windows = decode(replay.get(state, indices))
    np.testing.assert_array_equal(windows, indices[..., None] + np.arange(2))

    circular = buffers.circular_buffer(8)
    state = circular.add_batch(circular.init(encode(0)), encode(np.arange(3, 11)))
    np.testing.assert_array_equal(decode(circular.get(state, indices)), indices + 3)


@fast_at_ends(
    "indices", [2, [200, 1], np.uint8([200, 1]), np.int64([200, 1]), np.uint32([200, 1])], ids=repr
)
@pytest.mark.parametrize("factory", [buffers.circular_buffer, buffers.uniform_replay])
def test_indices_may_be_of_any_integer_type(factory, indices):
    buffer = factory(300)  # more than an index of 8 bits can count
    state = buffer.add_batch(buffer.init(encode(0)), encode(np.arange(300)))
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(decode(buffer.get(state, indices)), indices)
        state = buffer.update(state, shift, indices)
    expected = np.arange(300) + np.isin(np.arange(300), indices)
    np.testing.assert_array_equal(decode(buffer.get(state, np.arange(300))), expected)


def test_update_function_may_return_literals():
    circular = buffers.circular_buffer(3)
    items = {"a": np.array([1, 2], np.int32), "b": np.array([1, 2], np.float32)}
    state = circular.add_batch(circular.init({"a": 0, "b": 0.0}), items)
    state = circular.update(state, lambda item: {"a": 7, "b": item["b"]}, np.array([1]))
    assert circular.get(state, np.arange(2))["a"].tolist() == [1, 7]
    assert circular.get(state, np.arange(2))["b"].tolist() == [1.0, 2.0]


# ------------------------------------------------------------------------------- keys, x64, meshes


def filled_with_keys(buffer):
    """A state of seven items, the first of them twice, and their six keys."""
    keys = jax.random.split(jax.random.key(1), 6)
    items = {"key": keys, **{name: jnp.arange(6.0) for name in "abcde"}}
    first = jax.tree.map(lambda x: x[0], items)
    state = buffer.add(buffer.init(first), first)
    return buffer.add_batch(state, items), keys


def assert_keys_equal(actual, expected):
    np.testing.assert_array_equal(jax.random.key_data(actual), jax.random.key_data(expected))


# Numbers would be gathered in another way if their storage were as large as that of 65,536 keys.
@pytest.mark.parametrize("size", [100, 65_536])
@pytest.mark.parametrize("factory", [buffers.uniform_replay, more(buffers.prioritised_replay)])
def test_a_replay_buffer_stores_typed_keys(factory, size):
    replay = factory(size)
    state, keys = filled_with_keys(replay)
    sample = replay.sample(state, keys[0], 16)
    numbers = np.int32(sample.experience["a"])
    assert_keys_equal(sample.experience["key"], keys[numbers])
    items = replay.get(state, sample.indices)
    assert_trees_equal(sample.experience["a"], items["a"])
    replay.update(state, lambda item: item, sample.indices)


@pytest.mark.parametrize("size", [100, 65_536])
def test_a_circular_buffer_stores_typed_keys(size):
    circular = buffers.circular_buffer(size)
    state, keys = filled_with_keys(circular)
    items = circular.get(state, [1, 4])
    assert_keys_equal(items["key"], keys[np.array([0, 3])])
    state = circular.update(state, lambda item: item)
    state, popped = circular.pop(state, 2)
    assert_keys_equal(popped["key"], keys[np.array([0, 0])])


def test_size_is_int32_with_64_bits_as_well():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        for buffer in (
            buffers.circular_buffer(5),
            buffers.uniform_replay(6, num_envs=2),
            buffers.prioritised_replay(6),
            buffers.clustered_replay(2, buffers.uniform_replay(6), lambda item: 0),
        ):
            size = buffer.size(buffer.init(np.float32(0)))
            assert (size.dtype, size.shape) == (np.int32, ())


def explicit_mesh():
    return jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


@pytest.mark.parametrize("kind", [more("uniform"), "streams", "prioritised", "clustered"])
def test_a_state_may_be_on_a_mesh_of_explicit_axes(kind):
    inner = buffers.uniform_replay(6)
    buffer = {
        "uniform": inner,
        "streams": buffers.uniform_replay(12, num_envs=2, sequence_length=2),
        "prioritised": buffers.prioritised_replay(6),
        "clustered": buffers.clustered_replay(2, inner, lambda item: item["id"] % 2),
    }[kind]
    row_shape = (2,) if kind == "streams" else ()
    everywhere = jax.NamedSharding(explicit_mesh(), jax.sharding.PartitionSpec())

    def run(place):
        state = place(buffer.init(encode(0)))
        for i in range(3):
            state = buffer.add(state, encode(np.full(row_shape, i)))
        ids = np.broadcast_to(np.arange(3), (*row_shape, 3)).T
        state = buffer.add_batch(state, encode(ids))
        sample = buffer.sample(state, place(jax.random.key(0)), 4)
        if buffer.set_priorities:
            state = buffer.set_priorities(state, sample.indices, np.arange(4.0))
        state = buffer.update(state, lambda x: {**x, "id": x["id"] + 1}, sample.indices)
        return state, sample, buffer.get(state, sample.indices), buffer.size(state)

    on_the_mesh = run(lambda x: jax.device_put(x, everywhere))
    on_one_device = run(lambda x: x)
    assert_trees_equal(jax.device_get(on_the_mesh), jax.device_get(on_one_device))


def test_storage_that_is_sharded_over_explicit_axes_is_an_error():
    buffer = buffers.uniform_replay(12, num_envs=2)
    over_envs = jax.NamedSharding(explicit_mesh(), jax.sharding.PartitionSpec(None, "x"))
    state = buffer.add(buffer.init(encode(0)), encode([0, 1]))
    state = state._replace(storage=jax.device_put(state.storage, over_envs))
    for call in (
        lambda: buffer.sample(state, jax.random.key(0), 2),
        lambda: buffer.get(state, [0]),
    ):
        with pytest.raises(ValueError, match=r"sharded over Explicit axes: .*AxisType.Auto"):
            call()
