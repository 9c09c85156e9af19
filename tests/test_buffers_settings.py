"""Buffers as values of their settings; numbers that do not fit; states that were given away."""

import copy
import pickle
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, encode

import buffers

KEY = jax.random.key(0)


def parity(item):
    return item["id"] % 2


MAKERS = {
    "circular": partial(buffers.circular_buffer, 6),
    "uniform": partial(buffers.uniform_replay, 6, sequence_length=2),
    "prioritised": partial(buffers.prioritised_replay, 6, 0.5),
    "clustered": lambda: buffers.clustered_replay(2, buffers.prioritised_replay(6), parity),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_buffers_of_the_same_settings_are_equal(kind):
    buffer = MAKERS[kind]()
    state = buffer.add(buffer.init(encode(0)), encode(3))  # it has compiled functions
    for same in (MAKERS[kind](), pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert same == buffer
        assert hash(same) == hash(buffer)
        assert repr(same) == repr(buffer)
        assert same.size(state) == 1
    assert len({maker() for maker in MAKERS.values()}) == len(MAKERS)
    assert "\n" not in repr(buffer)


def test_a_buffer_may_be_a_static_argument():
    traced = []

    @partial(jax.jit, static_argnums=0)
    def size(buffer, state):
        traced.append(buffer)
        return buffer.size(state)

    state = MAKERS["uniform"]().init(encode(0))
    assert size(MAKERS["uniform"](), state) == size(MAKERS["uniform"](), state) == 0
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("max_size", "num_envs", "length", "period", "held"),
    [(33, None, 4, 4, 32), (33, None, None, 4, 32), (104, 8, 3, 3, 96), (32, None, 4, 4, 32)],
)
def test_max_size_is_rounded_down_to_the_period(max_size, num_envs, length, period, held):
    sizes = {"num_envs": num_envs, "sequence_length": length, "period": period}
    replay = buffers.uniform_replay(max_size, **sizes)
    assert replay.max_size == held
    assert replay == buffers.uniform_replay(held, **sizes)


@pytest.mark.parametrize(
    ("kind", "other"),
    [("uniform", "prioritised"), ("prioritised", "uniform"), ("clustered", "prioritised")],
)
def test_a_state_of_another_kind_is_an_error(kind, other):
    buffer, state = MAKERS[kind](), MAKERS[other]().init(encode(0))
    for call in (buffer.add, buffer.add_batch):
        with pytest.raises(ValueError, match="the state was made by another buffer's init: it "):
            call(state, encode(0) if call == buffer.add else encode([0]))


@pytest.mark.parametrize(
    ("slot", "number"),
    [
        (np.uint8(0), 300),
        (np.uint8(0), -1),
        (np.int32(0), 2**40 + 5),
        (np.int32(0), np.int64(2**40 + 5)),
        (np.int32(0), np.array(2**40 + 5)),
        (np.float16(0), 1e6),
        (np.float16(0), 10**6),
        (jnp.bfloat16(0), 1e39),
        (np.float32(0), 2**130),
        (np.float32(0), np.float64(-1e300)),
        (np.float32(0), np.array(1e300)),
        (np.complex64(0), 1e300),
    ],
    ids=repr,
)
def test_a_number_that_does_not_fit_is_an_error(slot, number):
    buffer = buffers.circular_buffer(3)
    state = buffer.init({"x": slot})
    message = rf"add: leaf \['x'\] has {re.escape(str(number))}, which {slot.dtype} does not hold: "
    with pytest.raises(ValueError, match=message + "give init an item of a larger dtype"):
        buffer.add(state, {"x": number})
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda state: buffer.add(state, {"x": number}))(state)
    assert buffer.size(state) == 0  # the state was not used up


@pytest.mark.parametrize(
    ("slot", "numbers"),
    [
        (np.int32(0), np.array([7, 2**33 + 5])),
        (np.int32(0), np.array([7, -(2**63)])),
        (np.uint32(0), np.array([7, 2**32], np.uint64)),
        (np.float32(0), np.array([np.nan, 1e300])),
    ],
    ids=repr,
)
def test_an_array_of_64_bits_with_a_number_that_does_not_fit_is_an_error(slot, numbers):
    replay = buffers.uniform_replay(3)
    state = replay.init({"x": slot})
    message = rf"leaf \['x'\] has {re.escape(str(numbers[1]))}, which {slot.dtype} does not hold"
    with pytest.raises(ValueError, match="add_batch: " + message):
        replay.add_batch(state, {"x": numbers})
    with pytest.raises(ValueError, match="add_batch: " + message):
        replay.add_and_sample(replay.add(state, {"x": slot}), {"x": numbers}, KEY, 2)


@pytest.mark.parametrize(
    ("slot", "numbers"),
    [
        (np.int32(0), np.array([-(2**31), 2**31 - 1])),
        (np.uint32(0), np.array([0, 2**32 - 1], np.uint64)),
        (np.float32(0), np.array([np.nan, np.inf, -np.inf, 0.5, 3e38])),
        (np.complex64(0), np.array([1e30 + 1j])),
        (np.int32(0), np.zeros(0, np.int64)),
    ],
    ids=repr,
)
def test_an_array_of_64_bits_whose_numbers_fit_is_stored(slot, numbers):
    buffer = buffers.circular_buffer(6)
    state = buffer.add_batch(buffer.init(slot), numbers)
    _, stored = buffer.pop(state, len(numbers)) if len(numbers) else (None, numbers)
    np.testing.assert_array_equal(stored, numbers.astype(slot.dtype))


@pytest.mark.parametrize("indices", [None, np.array([1])], ids=["all", "at"])
@pytest.mark.parametrize(("slot", "number"), [(np.uint8(0), 300), (np.float16(0), 1e6)], ids=repr)
def test_a_number_of_an_update_that_does_not_fit_is_an_error(slot, number, indices):
    buffer = buffers.circular_buffer(2)
    state = buffer.add_batch(buffer.init({"x": slot}), {"x": np.zeros(2, slot.dtype)})
    message = rf"update: fn's result: leaf \['x'\] has {number}, which {slot.dtype} does not hold"
    with pytest.raises(ValueError, match=message):
        buffer.update(state, lambda _: {"x": number}, indices)
    assert buffer.size(state) == 2


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["direct", "jit"])
def test_a_weakly_typed_array_that_may_not_fit_is_an_error(jit):
    """Its numbers are not known in jit, and 300 would become 44."""
    buffer = buffers.circular_buffer(2)
    state = buffer.add(buffer.init(np.uint8(0)), 7)
    message = "has dtype int32, expected uint8 as given to init: convert it with .astype"
    weak = jnp.where(jnp.arange(2) > 0, 300, 5)
    for call in (
        lambda state: buffer.add(state, weak[0]),
        lambda state: buffer.add_batch(state, weak),
        lambda state: buffer.update(state, lambda x: jnp.where(x > 3, 300, 5)),
        lambda state: buffer.update(state, lambda x: jnp.where(x > 3, 300, 5), np.array([0])),
    ):
        with pytest.raises(TypeError, match=message):
            jit(call)(state)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["direct", "jit"])
def test_a_weakly_typed_array_that_fits_takes_the_dtype_of_its_slot(jit):
    buffer = buffers.circular_buffer(4)
    weak = jnp.where(jnp.arange(2) > 0, 300, 5)
    state = jit(lambda state: buffer.add(state, weak[1]))(buffer.init(np.float32(0)))
    state = jit(lambda state: buffer.add_batch(state, weak))(state)
    np.testing.assert_array_equal(buffer.get(state, np.arange(3)), np.float32([300, 5, 300]))
    state = jit(lambda state: buffer.update(state, lambda x: jnp.where(x > 7, 2, 1)))(state)
    np.testing.assert_array_equal(buffer.get(state, np.arange(3)), np.float32([2, 1, 2]))


def test_numbers_of_an_update_take_the_dtype_of_their_slot():
    buffer = buffers.circular_buffer(2)
    slots = {"u": np.uint8(0), "h": np.float16(0), "n": np.uint32(0)}
    state = buffer.add(buffer.init(slots), {"u": 200, "h": 1.5, "n": 2**32 - 1})
    state = buffer.update(state, lambda item: item | {"u": 255, "h": 7})
    item = {"u": np.uint8(255), "h": np.float16(7), "n": np.uint32(2**32 - 1)}
    assert_trees_equal(buffer.get(state, 0), item)


@pytest.mark.parametrize("number", [np.inf, np.nan, 3, 1.5, np.float32(2)], ids=repr)
def test_a_number_that_fits_is_stored(number):
    buffer = buffers.circular_buffer(3)
    state = buffer.add(buffer.init(0.0), number)
    np.testing.assert_array_equal(buffer.get(state, 0), np.float32(number))


@pytest.mark.parametrize("kind", MAKERS)
def test_a_state_that_was_given_away_says_what_to_do(kind):
    buffer = MAKERS[kind]()
    state = buffer.add_batch(buffer.init(encode(0)), encode([1, 2, 3]))
    buffer.add(state, encode(4))
    calls = [
        lambda: buffer.add(state, encode(5)),
        lambda: buffer.update(state, lambda item: item),
        lambda: buffer.get(state, [0]),
        lambda: buffer.size(state),
    ]
    if kind == "circular":
        calls += [lambda: buffer.pop(state, 1), lambda: buffer.can_pop(state, 1)]
    else:
        calls += [lambda: buffer.sample(state, KEY, 2), lambda: buffer.can_sample(state)]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"donated .* state = buffer.add\(.*donate=False"):
            call()


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_more_items_than_a_buffer_holds_can_never_be_sampled(jit):
    replay = buffers.uniform_replay(6)
    state = replay.init(encode(0))
    assert not jit(lambda state: replay.can_sample(state, 6))(state)
    with pytest.raises(ValueError, match=r"min_size must be at most max_size = 6, .*, got 7"):
        jit(lambda state: replay.can_sample(state, 7))(state)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["called", "in jit"])
@pytest.mark.parametrize("kind", ["uniform", "prioritised", "clustered"])
def test_a_draw_uses_its_key_once(kind, jit):
    """As JAX's own check of keys sees it."""
    replay = MAKERS[kind]()
    state = replay.add_batch(replay.init(encode(0)), encode([1, 2, 3]))
    with jax.debug_key_reuse(True):
        sample = jit(lambda state, key: replay.sample(state, key, 4))(state, jax.random.key(1))
    np.testing.assert_array_equal(
        sample.indices, replay.sample(state, jax.random.key(1), 4).indices
    )
