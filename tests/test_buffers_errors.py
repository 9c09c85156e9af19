"""Mistakes: the error, the unchanged state, and what happens inside jit instead."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import decode, encode, shift
from helpers import assert_trees_equal
from jax.experimental import checkify

import buffers

KEY = jax.random.key(0)
ITEM = encode(1)
ROWS = encode([1, 2])
FLAGS = np.ones((4, 3), bool)  # of the steps of "streams"
WRAP = 2**30 // 6  # rows after which those of "items" are counted from 0
ENDS = [2**31 - 1, -(2**31)]


def parity(item):
    return item["id"] % 2


MAKERS = {
    "circular": partial(buffers.circular_buffer, 5),
    "items": partial(buffers.uniform_replay, 6),
    "large": partial(buffers.uniform_replay, 12),
    "streams": partial(buffers.uniform_replay, 12, num_envs=3),
    "sequences": partial(buffers.uniform_replay, 8, sequence_length=4, period=2),
    "prioritised": partial(buffers.prioritised_replay, 6),
    "clustered": partial(buffers.clustered_replay, 2, buffers.uniform_replay(6), parity),
}


@cache
def make(kind, **options):
    """Makes a buffer of a kind, the same at each call, so that it compiles once."""
    return MAKERS[kind](**options)


def filled(kind, **options):
    """Makes a buffer with items 0, 1 and 2: "empty items" has none, "full items" had ten."""
    amount, _, name = kind.rpartition(" ")
    buffer = make(name, **options)
    ids = np.arange(10)
    is_added = ids < {"empty": 0, "": 3, "full": 10}[amount]  # one program adds any number
    if name == "streams":
        ids = np.stack([ids] * 3, axis=1)
    return buffer, buffer.add_batch(buffer.init(encode(0)), encode(ids), is_added)


def assert_refused(error, word, buffer, state, name, arguments):
    """Fails unless the call raises one line with the word, and leaves the state unchanged."""
    before = jax.tree.map(np.array, state)
    options = {"horizon": 2} if name == "later" else {}
    with pytest.raises(error, match=re.escape(word)) as raised:
        getattr(buffer, name)(state, *arguments, **options)

    assert "\n" not in str(raised.value)
    assert_trees_equal(jax.tree.map(np.array, state), before)


SIZES = [  # max_size, num_envs, sequence_length, period
    ((0, None, None, 1), ValueError, "max_size must be at least 1"),
    ((2.5, None, None, 1), TypeError, "max_size must be a Python int"),
    ((2**29 + 1, None, None, 1), ValueError, "2**29"),
    ((8, 0, None, 1), ValueError, "num_envs must be at least 1"),
    ((8, None, 0, 1), ValueError, "sequence_length"),
    ((8, None, None, 0), ValueError, "period"),
    ((100, 8, None, 1), ValueError, "use 96 or 104"),
    ((7, 3, 5, 2), ValueError, "hold 6 steps of each environment, got 7: use 18"),
]


@pytest.mark.parametrize(("sizes", "error", "word"), SIZES)
def test_impossible_sizes_are_errors(sizes, error, word):
    max_size, num_envs, length, period = sizes
    options = {"num_envs": num_envs, "sequence_length": length, "period": period}

    with pytest.raises(error, match=re.escape(word)):
        buffers.uniform_replay(max_size, **options)
    for size in re.findall(r"\d+", word.partition("use ")[2]):
        buffers.uniform_replay(int(size), **options)


def test_the_largest_sizes_are_possible():
    assert buffers.circular_buffer(2**29).max_size == 2**29
    assert buffers.uniform_replay(2**29, num_envs=2**29).num_slots == 1


@pytest.mark.parametrize("exponent", [-0.1, np.inf, np.nan])
def test_an_impossible_exponent_is_an_error(exponent):
    with pytest.raises(ValueError, match="priority_exponent must be 0 or more"):
        buffers.prioritised_replay(6, exponent)


def without_images(item):
    return {"id": item["id"], "obs": item["obs"]}


def of_one_number(item):
    return item | {"obs": item["obs"][:1]}


def of_float_images(item):
    return item | {"img": item["img"].astype(np.float32)}


# A user's mistake with a state, and words of the error.
MISTAKES = [
    ("circular", "add", (without_images(ITEM),), ValueError, "structure"),
    ("circular", "add", (of_one_number(ITEM),), ValueError, "(1,), expected (3,)"),
    ("circular", "add", (ROWS,), ValueError, "add_batch"),
    ("circular", "add", (of_float_images(ITEM),), TypeError, "['img'] has dtype float32"),
    ("items", "add_batch", (ITEM,), ValueError, "(), expected (1,), which is (rows, item)"),
    ("items", "add_batch", (ROWS | {"id": np.arange(3)},), ValueError, "expected (3, 2, 2)"),
    ("streams", "add", (ITEM,), ValueError, "(), expected (3,), which is (num_envs, item)"),
    ("streams", "add_batch", (ROWS,), ValueError, "(2, 3), which is (rows, num_envs, item)"),
    ("circular", "add_batch", (ROWS, np.array([True])), ValueError, "mask is bool(1,)"),
    ("circular", "add_batch", (ROWS, np.int32([1, 0])), ValueError, "mask is int32(2,)"),
    ("circular", "add_batch", (ROWS, [True, False]), ValueError, "list"),
    ("circular", "pop", (0,), ValueError, "at least 1, got 0"),
    ("circular", "pop", (6,), ValueError, "max_size = 5"),
    ("items", "sample", (KEY, 0), ValueError, "batch_size must be at least 1"),
    ("items", "sample", (128, KEY), TypeError, "swap"),
    ("items", "add_and_sample", (ROWS, 128, KEY), TypeError, "got an array key"),
    ("items", "can_sample", (7,), ValueError, "at most max_size = 6"),
    ("circular", "update", (without_images,), ValueError, "fn's result: items have structure"),
    ("circular", "update", (of_one_number, [0, 1]), ValueError, "(2, 1), expected (2, 3)"),
    ("circular", "update", (shift, None, FLAGS), TypeError, "got no indices"),
    ("circular", "update", (shift, [[0, 1]]), ValueError, "[B], got (1, 2)"),
    ("circular", "update", (shift, [0.0, 1.0]), TypeError, "update: indices"),
    ("items", "get", (1.0,), TypeError, "get: indices must be integers, got float64"),
    ("prioritised", "set_priorities", ([0, 1], [1, 2, 3]), ValueError, "(2,) and (3,)"),
    ("prioritised", "set_priorities", ([[0, 1]], [[1, 2]]), ValueError, "(1, 2) and (1, 2)"),
    ("prioritised", "set_priorities", ([0.0, 1.0], [1, 2]), TypeError, "indices"),
    ("prioritised", "priorities", ([0.0],), TypeError, "priorities: indices"),
    ("streams", "later", ([0], KEY, FLAGS[:3]), ValueError, "bool[4, 3], got bool[3, 3]"),
    ("streams", "later", ([0], KEY, np.int8(FLAGS)), ValueError, "int8[4, 3]"),
    ("full streams", "later", ([17], KEY, FLAGS), ValueError, "later: an index is not in"),
    ("clustered", "later", ([0], KEY, FLAGS), ValueError, "episodes"),
]
# Mistakes in values; one of each function is tried under checkify.
IN_DEBUG = [
    ("empty items", "sample", (KEY, 2), ValueError, "sample: nothing to sample, 0 items held"),
    ("empty sequences", "add_and_sample", (ROWS, KEY, 2), ValueError, "2 items held"),
    ("circular", "pop", (4,), ValueError, "4 items asked for, but 3 held"),
    ("circular", "get", ([0, 3],), ValueError, "get: indices must be from 0 (oldest) to size - 1"),
    ("full items", "update", (shift, [9, 3]), ValueError, "update: an index is not in"),
    ("prioritised", "set_priorities", ([0, 1], [1, np.nan]), ValueError, "finite"),
]
VALUES = [
    *IN_DEBUG,
    ("sequences", "sample", (KEY, 2), ValueError, "3 items held"),
    ("empty prioritised", "sample", (KEY, 2), ValueError, "of a priority above 0"),
    ("empty clustered", "sample", (KEY, 2), ValueError, "0 items held"),
    ("circular", "update", (shift, [0, 3]), ValueError, "size is 3"),
    ("full items", "get", ([9, 3],), ValueError, "not in the buffer"),
    ("full items", "get", ([6 * WRAP + 5],), ValueError, "not in the buffer"),
    ("full items", "get", ([2**32 + 5],), ValueError, "not in the buffer"),
    ("full sequences", "get", ([7],), ValueError, "not in the buffer"),
    ("prioritised", "set_priorities", ([0, 1], [np.inf, 1]), ValueError, "finite"),
    ("prioritised", "set_priorities", ([0, 1], [1, -1]), ValueError, "0 or more"),
]


@pytest.mark.parametrize(("kind", "name", "arguments", "error", "word"), MISTAKES + VALUES)
def test_a_mistake_is_an_error_and_changes_nothing(kind, name, arguments, error, word):
    buffer, state = filled(kind)

    assert_refused(error, word, buffer, state, name, arguments)


def test_an_item_without_arrays_is_an_error():
    with pytest.raises(ValueError, match="no arrays"):
        make("circular").init({"a": None})


def test_a_traced_size_is_told_to_be_static():
    replay, state = filled("items")

    with pytest.raises(TypeError, match="static"):
        jax.jit(replay.sample)(state, KEY, 2)


FOREIGN = [  # a buffer, the kind whose state it gets, a call
    ("items", "circular", "sample", (KEY, 2), "[rows, environments] (5, 1) and not (6, 1)"),
    ("streams", "items", "get", ([0],), "(6, 1) and not (4, 3)"),
    ("items", "prioritised", "add", (ITEM,), "not a RingState"),
    ("prioritised", "items", "add_batch", (ROWS,), "not a PrioritisedState"),
    ("clustered", "large", "add", (ITEM,), "(12, 1)"),  # as many slots as both clusters have
]


@pytest.mark.parametrize(("kind", "other", "name", "arguments", "word"), FOREIGN)
def test_a_state_of_another_buffer_is_an_error(kind, other, name, arguments, word):
    _, state = filled(other)

    assert_refused(ValueError, word, make(kind), state, name, arguments)


STACKED = [
    ("circular", "add", (ITEM,)),
    ("circular", "add_batch", (ROWS,)),
    ("circular", "get", ([0, 1, 2],)),  # more than states
    ("circular", "update", (shift,)),
    ("circular", "update", (shift, [0])),
    ("circular", "pop", (1,)),
    ("prioritised", "sample", (KEY, 2)),
    ("prioritised", "add_and_sample", (ROWS, KEY, 2)),
    ("prioritised", "set_priorities", ([0], [1])),
    ("prioritised", "priorities", ([0],)),
    ("prioritised", "indices", ()),
    ("clustered", "sample", (KEY, 2)),
]


@cache
def stacked(*kinds):
    """Stacks states of a buffer."""
    states = [filled(kind)[1] for kind in kinds]
    return jax.tree.map(lambda *x: jnp.stack(x), *states)


@pytest.mark.parametrize(("kind", "name", "arguments"), STACKED)
def test_stacked_states_are_told_to_use_vmap(kind, name, arguments):
    states = stacked(kind, kind)

    assert_refused(ValueError, "under jax.vmap", make(kind), states, name, arguments)


@pytest.mark.parametrize(("kind", "items"), [("streams", 9), ("prioritised", 3), ("clustered", 3)])
def test_stacked_states_have_a_size_each(kind, items):
    buffer, states = make(kind), stacked(f"empty {kind}", kind)

    assert buffer.size(states).tolist() == [0, items]
    assert buffer.can_sample(states, 0).tolist() == [False, True]
    assert buffer.can_sample(states, items).tolist() == [False, True]
    assert buffer.can_sample(states, items + 1).tolist() == [False, False]


@pytest.mark.parametrize(("kind", "name", "arguments", "_", "word"), IN_DEBUG)
def test_a_mistake_in_values_is_found_by_checkify(kind, name, arguments, _, word):
    buffer, state = filled(kind, debug=True)

    call = jax.jit(lambda state: getattr(buffer, name)(state, *arguments))
    error, _ = checkify.checkify(call, errors=checkify.user_checks)(state)

    with pytest.raises(checkify.JaxRuntimeError, match=re.escape(word)):
        error.throw()


@pytest.mark.parametrize("debug", [False, True])
def test_checks_are_in_the_program_only_in_debug(debug):
    buffer, state = filled("items", debug=debug)

    program = str(jax.make_jaxpr(lambda state: buffer.sample(state, KEY, 2))(state))

    assert (" check[" in program) == debug


@pytest.mark.parametrize("kind", ["empty streams", "sequences"])
def test_a_draw_of_nothing_in_jit_has_probability_0(kind):
    buffer, state = filled(kind)

    sample = jax.jit(lambda state: buffer.sample(state, KEY, 5))(state)

    assert sample.probabilities.tolist() == [0.0] * 5
    assert len(decode(sample.experience)) == 5
    assert ((sample.indices >= 0) & (sample.indices < 12)).all()


def test_a_pop_of_too_many_in_jit_empties_the_buffer():
    circular, state = filled("circular")

    state, items = jax.jit(lambda state: circular.pop(state, 5))(state)

    assert circular.size(state) == 0
    assert decode(items)[:3].tolist() == [0, 1, 2]
    state = circular.add(state, encode(9))
    assert decode(circular.get(state, [0])).tolist() == [9]


@pytest.mark.parametrize(
    ("kind", "held", "outside", "ids"),
    [
        ("circular", 1, [3, 5, 8, -1, -5, 5 * (2**30 // 5)], [0, 2, 2, 0, 0]),
        ("full items", 8, [0, 3, 10, 99, -1, 6 * WRAP + 5, 5 - 6 * WRAP], [6, 7, 9, 9, 4, 5]),
    ],
)
def test_an_update_in_jit_ignores_what_is_not_held(kind, held, outside, ids):
    buffer, state = filled(kind)
    update = jax.jit(lambda state, indices: buffer.update(state, shift, indices))

    state = update(state, jnp.array([held, *outside, *ENDS]))

    assert state.storage["id"].ravel().tolist() == ids


def test_items_without_priority_are_not_drawn_beside_a_new_one():
    replay, state = filled("prioritised")
    state = replay.set_priorities(state, np.arange(3), np.zeros(3))

    assert not replay.can_sample(state)
    sample = jax.jit(lambda state: replay.sample(state, KEY, 5))(state)
    assert sample.probabilities.tolist() == [0.0] * 5
    state, sample = replay.add_and_sample(state, encode([3]), KEY, 5)
    assert decode(sample.experience).tolist() == [3] * 5
