"""Items of any structure and dtype, numbers and their slots, indices of any type."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import decode, encode, shift
from helpers import assert_trees_equal

import buffers

KEY = jax.random.key(0)
NESTED = {
    "scalars": {"int": 3, "float": 3.0, "bool": True},
    "uint8": np.zeros((4, 4), np.uint8),
    "bool": np.zeros(2, bool),
    "bfloat16": jnp.zeros(2, jnp.bfloat16),
    "complex64": jnp.zeros(2, jnp.complex64),
    "keys": (jax.random.split(KEY, 2), KEY),
    "list": [2.0, {"zero-size": np.zeros((0, 2), np.float32)}],
    "none": None,
}


def random_items(prototype, length, seed):
    """Makes random items [length, ...] like `prototype`, different in each leaf."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        shape = (length, *jnp.shape(x))
        dtype = jnp.result_type(x)
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(rng.integers(1000)), shape)
        values = rng.permutation(np.prod(shape)).reshape(shape) % 128
        return values % 2 == 0 if dtype == jnp.bool_ else values.astype(dtype)

    return jax.tree.map(leaf, prototype)


def at(items, index):
    return jax.tree.map(lambda leaf: leaf[index], items)


def test_a_circular_buffer_holds_any_pytree():
    circular = buffers.circular_buffer(6)
    rows = random_items(NESTED, 4, seed=1)
    expected = at(rows, np.array([0, 2, 3, 1, 0]))

    state = circular.add_batch(circular.init(NESTED), rows, np.array([True, False, True, True]))
    state = circular.add(state, at(rows, 1))
    state = circular.add_batch(state, at(rows, np.array([0])))
    state = circular.update(state, lambda item: item, np.array([0, 0]))

    assert_trees_equal(circular.get(state, np.arange(5)), expected)


# Arrays in a large storage are gathered differently than in a small one, but keys are not.
@pytest.mark.parametrize("slots", [12, 2**16])
def test_a_replay_holds_any_pytree(slots):
    replay = buffers.uniform_replay(slots, sequence_length=2)
    items = random_items(NESTED, 12, seed=2)

    state = replay.add_batch(replay.init(NESTED), items)
    sample = replay.sample(state, KEY, 7)

    in_windows = np.asarray(sample.indices)[:, None] + [[0, 1]]
    assert_trees_equal(sample.experience, at(items, in_windows))


SLOTS = {
    "u8": np.uint8(0),
    "i32": 1,
    "u32": np.uint32(0),
    "f16": np.float16(0),
    "bf16": jnp.bfloat16(0),
    "f32": np.float64(1),  # JAX makes it a float32
    "c64": np.complex64(0),
}
NUMBERS = buffers.circular_buffer(3)


@cache
def zeros(*lead):
    storage = NUMBERS.init(SLOTS).storage
    return {name: np.zeros(lead, slots.dtype) for name, slots in storage.items()}


def two_zeros():
    return NUMBERS.add_batch(NUMBERS.init(SLOTS), zeros(2))


TOO_LARGE = [
    ("u8", 300),
    ("u8", -1),
    ("i32", 2**40 + 5),
    ("i32", np.int64(2**40 + 5)),
    ("i32", np.array(-(2**63))),
    ("f16", 1e6),
    ("f32", 2**130),
    ("f32", np.float64(-1e300)),
    ("c64", 1e300),
]


@pytest.mark.parametrize(("name", "number"), TOO_LARGE)
def test_a_number_that_does_not_fit_is_an_error(name, number):
    state = two_zeros()

    with pytest.raises(ValueError, match=rf"add: leaf \['{name}'\] .*does not hold") as raised:
        NUMBERS.add(state, zeros() | {name: number})
    assert f" {number}," in str(raised.value)
    assert NUMBERS.size(state) == 2  # the state was not used up


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("u32", np.array([7, 2**32], np.uint64)), ("f32", np.array([np.nan, 1e300]))],
)
def test_an_array_with_a_number_that_does_not_fit_is_an_error(name, numbers):
    with pytest.raises(ValueError, match=rf"add_batch: .* {re.escape(str(numbers[1]))}, which"):
        NUMBERS.add_batch(two_zeros(), zeros(2) | {name: numbers})


@pytest.mark.parametrize("indices", [None, [1]], ids=["all", "at"])
def test_a_number_of_an_update_that_does_not_fit_is_an_error(indices):
    with pytest.raises(ValueError, match=r"update: fn's result: .* 300, which uint8"):
        NUMBERS.update(two_zeros(), lambda item: item | {"u8": 300}, indices)


FITTING = [
    {"u8": 200, "i32": -(2**31), "u32": 2**32 - 1, "bf16": 1.5, "f32": 3},
    {"i32": np.int64(2**31 - 1), "u32": np.uint64(2**32 - 1), "f32": np.float64(0.1)},
    {"i32": np.int64(-(2**31)), "f16": np.inf, "f32": np.float64(-np.inf), "c64": 2.0},
]


@pytest.mark.parametrize("numbers", FITTING)
def test_numbers_that_fit_take_the_dtype_of_their_slot(numbers):
    state = NUMBERS.add(two_zeros(), zeros() | numbers)

    stored = NUMBERS.get(state, 2)
    wanted = {name: zeros()[name].dtype.type(number) for name, number in numbers.items()}
    assert_trees_equal(stored, zeros() | wanted)


def test_a_float_is_no_number_of_an_integer_slot():
    """Otherwise it would lose its fraction."""
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="float32"):
        NUMBERS.add(two_zeros(), zeros() | {"u8": 2.5})


WEAK = jnp.where(jnp.arange(2) > 0, 300, 5)  # int32 only by default


@pytest.mark.parametrize("name", ["u8", "u32"])
def test_a_weakly_typed_array_that_may_not_fit_is_an_error(name):
    """Its numbers are not known in jit; in 8 bits 300 would become 44."""
    with pytest.raises(TypeError, match=f"int32, expected {SLOTS[name].dtype}"):
        jax.jit(NUMBERS.add_batch)(two_zeros(), zeros(2) | {name: WEAK})


def test_a_weakly_typed_array_that_fits_is_stored():
    state = NUMBERS.add_batch(NUMBERS.init(SLOTS), zeros(2) | {"f32": WEAK})

    assert_trees_equal(NUMBERS.get(state, [0, 1])["f32"], np.float32([5, 300]))


@pytest.mark.parametrize("indices", [3, [[3, 0], [1, 6], [0, 2]]], ids=str)
def test_indices_may_have_any_shape(indices):
    replay = buffers.uniform_replay(8, sequence_length=2)
    state = replay.add_batch(replay.init(encode(0)), encode(np.arange(8)))

    windows = decode(replay.get(state, indices))

    np.testing.assert_array_equal(windows, np.expand_dims(indices, -1) + np.arange(2))


MANY = buffers.uniform_replay(300)  # more than an index of 8 bits can count


@pytest.mark.parametrize("dtype", [np.uint8, jnp.uint8], ids=str)
def test_indices_may_be_of_any_integer_type(dtype):
    state = MANY.add_batch(MANY.init(encode(0)), encode(np.arange(300)))

    state = MANY.update(state, shift, dtype([200, 1]))

    assert decode(MANY.get(state, dtype([200, 1, 2]))).tolist() == [201, 2, 2]


def test_sizes_and_indices_are_int32_with_64_bits_as_well():
    inner = buffers.uniform_replay(6, num_envs=2)
    clustered = buffers.clustered_replay(2, inner, lambda item: 0)

    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        found = [buffer.indices(buffer.init(np.float32(0))) for buffer in (inner, clustered)]
        sizes = [buffer.size(buffer.init(np.float32(0))) for buffer in (inner, clustered)]

    assert [(x.dtype, is_held.dtype) for x, is_held in found] == [(jnp.int32, jnp.bool_)] * 2
    assert [(size.dtype, size.shape) for size in sizes] == [(jnp.int32, ())] * 2


def test_storage_that_is_sharded_over_explicit_axes_is_an_error():
    buffer = buffers.uniform_replay(12, num_envs=2)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    over_envs = jax.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    state = buffer.add(buffer.init(encode(0)), encode([0, 1]))
    state = state._replace(storage=jax.device_put(state.storage, over_envs))

    with pytest.raises(ValueError, match="Explicit axes"):
        buffer.get(state, [0])
