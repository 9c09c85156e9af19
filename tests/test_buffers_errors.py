"""Mistakes: what is raised when tracing, when called, under checkify, and what jit does instead."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, decode, encode, more, shift
from jax.experimental import checkify

import buffers

CIRCULAR = buffers.circular_buffer(5)
ITEMS = buffers.uniform_replay(6)
STREAMS = buffers.uniform_replay(12, num_envs=3)
SEQUENCES = buffers.uniform_replay(8, sequence_length=4, period=2)
PRIORITISED = buffers.prioritised_replay(6)
KEY = jax.random.key(0)


def filled(buffer, *lead):
    """A buffer after items 0, 1, 2 (or rows of them)."""
    ids = np.broadcast_to(np.arange(3).reshape(3, *[1] * len(lead)), (3, *lead))
    return buffer.add_batch(buffer.init(encode(0)), encode(ids))


def without(items, name):
    return {key: leaf for key, leaf in items.items() if key != name}


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "max_size must be at least 1, got 0", lambda: buffers.circular_buffer(0)),
        (ValueError, "max_size must be at least 1, got -3", lambda: buffers.uniform_replay(-3)),
        (TypeError, "max_size must be a Python int, got 2.5", lambda: buffers.circular_buffer(2.5)),
        (TypeError, "max_size must be a Python int, got '8'", lambda: buffers.uniform_replay("8")),
        (ValueError, "max_size must be at most 2**29", lambda: buffers.circular_buffer(2**29 + 1)),
        (
            ValueError,
            "max_size must be at most 2**29",
            lambda: buffers.uniform_replay(2**30, num_envs=2),
        ),
        (
            ValueError,
            "num_envs must be at least 1, got 0",
            lambda: buffers.uniform_replay(8, num_envs=0),
        ),
        (
            TypeError,
            "num_envs must be a Python int, got 2.0",
            lambda: buffers.uniform_replay(8, num_envs=2.0),
        ),
        (
            ValueError,
            "sequence_length must be at least 1, got 0",
            lambda: buffers.uniform_replay(8, sequence_length=0),
        ),
        (
            ValueError,
            "period must be at least 1, got 0",
            lambda: buffers.uniform_replay(8, period=0),
        ),
        (
            ValueError,
            "multiple of num_envs = 8, and hold 1 steps of each environment, got 100: use 96 or 1",
            lambda: buffers.uniform_replay(100, num_envs=8),
        ),
        (
            ValueError,
            "num_envs = 8, and hold 3 steps of each environment, got 100: use 96 or 104",
            lambda: buffers.uniform_replay(100, num_envs=8, sequence_length=3, period=3),
        ),
        (
            ValueError,
            "num_envs = 8, and hold 1 steps of each environment, got 5: use 8",
            lambda: buffers.uniform_replay(5, num_envs=8),
        ),
        (
            ValueError,
            "num_envs = 2, and hold 5 steps of each environment, got 8: use 10",
            lambda: buffers.uniform_replay(8, num_envs=2, sequence_length=5),
        ),
    ],
)
def test_impossible_sizes_are_errors(error, message, make):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize("sizes", [(100, 8, 1, 1), (100, 8, 3, 3), (5, 8, 1, 1), (7, 3, 5, 1)])
def test_sizes_named_in_an_error_work(sizes):
    max_size, num_envs, length, period = sizes
    arguments = {"num_envs": num_envs, "sequence_length": length, "period": period}
    with pytest.raises(ValueError, match="use ") as error:
        buffers.uniform_replay(max_size, **arguments)
    named = re.findall(r"\d+", str(error.value).split("use ")[1])
    assert 1 <= len(named) <= 2
    for size in named:
        buffers.uniform_replay(int(size), **arguments)


def test_sizes_may_be_numpy_integers():
    buffer = buffers.circular_buffer(np.int64(3))
    _, items = buffer.pop(filled(buffer), np.int32(2))
    assert decode(items).tolist() == [0, 1]


# ------------------------------------------------------------------------------------------- items


@pytest.mark.parametrize("empty", [{}, (), None, {"a": None}], ids=repr)
def test_an_item_without_arrays_is_an_error(empty):
    with pytest.raises(ValueError, match="init: the item has no arrays in it"):
        CIRCULAR.init(empty)


ITEM_MISTAKES = [
    (ValueError, "structure .*'id'.*expected .*'id'", without(encode(1), "img")),
    (ValueError, "structure", (1, 2)),
    (
        ValueError,
        r"leaf \['obs'\] has shape \(4,\), expected \(3,\)",
        {**encode(1), "obs": np.zeros(4, np.float32)},
    ),
    (ValueError, r"leaf \['id'\] has shape \(1,\), expected \(\).*add_batch", encode([1])),
    (
        TypeError,
        r"leaf \['img'\] has dtype float32, expected uint8.*astype\('uint8'\)",
        {**encode(1), "img": np.zeros((2, 2), np.float32)},
    ),
    (
        TypeError,
        r"leaf \['id'\] has dtype float32, expected int32",
        {**encode(1), "id": np.float32(1)},
    ),
    (TypeError, r"leaf \['id'\] has dtype bool, expected int32", {**encode(1), "id": True}),
]


@pytest.mark.parametrize("buffer", [CIRCULAR, ITEMS], ids=["circular", "uniform"])
@pytest.mark.parametrize(("error", "message", "item"), ITEM_MISTAKES)
def test_an_item_unlike_the_first_is_an_error(buffer, error, message, item):
    state = filled(buffer)
    with pytest.raises(error, match="add: .*" + message):
        buffer.add(state, item)
    assert buffer.size(state) == 3  # the state was not used up


@pytest.mark.parametrize("prototype", [0, 0.0, np.uint8(0)], ids=repr)
def test_a_literal_must_fit_the_kind_of_its_slot(prototype):
    """An int literal fits a float slot, a float literal no int slot: it would lose its fraction."""
    state = CIRCULAR.init(prototype)
    with jax.numpy_dtype_promotion("standard"):
        if isinstance(prototype, float):
            assert CIRCULAR.add(state, 2).storage[0].tolist() == [2.0]
        else:
            with pytest.raises(TypeError, match=r"leaf \(the item itself\) has dtype float32"):
                CIRCULAR.add(state, 2.5)


@pytest.mark.parametrize("buffer", [CIRCULAR, ITEMS], ids=["circular", "uniform"])
@pytest.mark.parametrize(
    ("error", "message", "items"),
    [
        (ValueError, "structure", without(encode([1, 2]), "img")),
        (ValueError, "structure", {}),
        (ValueError, r"leaf \['id'\] has shape \(\), expected \(1,\).*rows, item", encode(1)),
        (
            ValueError,
            r"leaf \['obs'\] has shape \(2, 3\), expected \(3, 3\)",
            {**encode([1, 2]), "id": np.zeros(3, np.int32), "img": np.zeros((3, 2, 2), np.uint8)},
        ),
        (ValueError, r"has shape \(1, 2\), expected \(1,\)", encode([[1, 2]])),
        (
            TypeError,
            r"leaf \['obs'\] has dtype int32, expected float32",
            {**encode([1, 2]), "obs": np.zeros((2, 3), np.int32)},
        ),
    ],
)
def test_items_unlike_the_first_are_an_error(buffer, error, message, items):
    state = filled(buffer)
    with pytest.raises(error, match="add_batch: .*" + message):
        buffer.add_batch(state, items)
    if buffer is ITEMS:
        with pytest.raises(error, match=message):
            buffer.add_and_sample(state, items, KEY, 2)
    assert buffer.size(state) == 3


@pytest.mark.parametrize(
    ("function", "message", "ids"),
    [
        (STREAMS.add, r"add: .*\['id'\] has shape \(\), expected \(3,\).*num_envs, item", 0),
        (STREAMS.add, r"add: .*\['id'\] has shape \(2,\), expected \(3,\)", [0, 1]),
        (
            STREAMS.add_batch,
            r"add_batch: .*shape \(4,\), expected \(4, 3\).*rows, num_envs",
            [0] * 4,
        ),
        (STREAMS.add_batch, r"shape \(1, 4\), expected \(1, 3\)", [[0] * 4]),
    ],
)
def test_rows_of_another_number_of_environments_are_an_error(function, message, ids):
    with pytest.raises(ValueError, match=message):
        function(filled(STREAMS, 3), encode(ids))


@pytest.mark.parametrize(
    "mask",
    [
        np.array([True]),
        np.array([True, False, True]),
        np.array([[True, False]]),
        np.array(True),
        np.array([1, 0]),
        np.array([1.0, 0.0], np.float32),
        [True],
        [1, 0],
    ],
    ids=repr,
)
@pytest.mark.parametrize("buffer", [CIRCULAR, ITEMS], ids=["circular", "uniform"])
def test_a_mask_unlike_the_rows_is_an_error(buffer, mask):
    state = filled(buffer)
    with pytest.raises((TypeError, ValueError), match=r"add_batch: mask .*bool and \(2,\)"):
        buffer.add_batch(state, encode([1, 2]), mask)
    assert buffer.size(state) == 3


# ----------------------------------------------------------------------- n, batch_size, functions


@pytest.mark.parametrize(
    ("error", "message", "n"),
    [
        (ValueError, "n must be at least 1, got 0", 0),
        (ValueError, "n must be at least 1, got -1", -1),
        (ValueError, "pop: n is 6, but at most max_size = 5 items are held", 6),
        (TypeError, "n must be a Python int, got 2.0", 2.0),
    ],
)
def test_pop_of_an_impossible_number_is_an_error(error, message, n):
    state = filled(CIRCULAR)
    with pytest.raises(error, match=message):
        CIRCULAR.pop(state, n)
    assert CIRCULAR.size(state) == 3


@pytest.mark.parametrize(
    ("error", "message", "batch_size"),
    [
        (ValueError, "batch_size must be at least 1, got 0", 0),
        (TypeError, "batch_size must be a Python int, got 2.0", 2.0),
        (TypeError, "batch_size must be a Python int, got None", None),
    ],
)
def test_an_impossible_batch_size_is_an_error(error, message, batch_size):
    state = filled(ITEMS)
    with pytest.raises(error, match=message):
        ITEMS.sample(state, KEY, batch_size)
    with pytest.raises(error, match=message):
        ITEMS.add_and_sample(state, encode([1]), KEY, batch_size)
    assert ITEMS.size(state) == 3


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_in_the_place_of_the_batch_size_is_an_error(make_key):
    state, key = filled(ITEMS), make_key(0)
    message = r"key, batch_size\): batch_size must be a Python int, got an array .* swap"
    with pytest.raises(TypeError, match=r"^sample\(state, " + message):
        ITEMS.sample(state, 128, key)
    with pytest.raises(TypeError, match=r"^add_and_sample\(state, items, " + message):
        ITEMS.add_and_sample(state, encode([1]), 128, key)
    with pytest.raises(TypeError, match=message):
        jax.jit(lambda state, key: ITEMS.sample(state, 128, key))(state, key)
    assert ITEMS.size(state) == 3


def test_traced_sizes_are_errors():
    with pytest.raises(TypeError, match=r"n must be a Python int.*mark it static"):
        jax.jit(CIRCULAR.pop)(filled(CIRCULAR), 2)
    with pytest.raises(TypeError, match=r"batch_size must be a Python int.*mark it static"):
        jax.jit(ITEMS.sample)(filled(ITEMS), KEY, 2)


@pytest.mark.parametrize("indices", [None, np.array([0, 1])], ids=["all", "at"])
@pytest.mark.parametrize("buffer", [CIRCULAR, ITEMS], ids=["circular", "uniform"])
@pytest.mark.parametrize(
    ("error", "message", "fn"),
    [
        (ValueError, "structure", lambda item: without(item, "img")),
        (ValueError, "structure", lambda item: item["id"]),
        (
            ValueError,
            r"leaf \['obs'\] has shape \(\d+, 1\), expected \(\d+, 3\)",
            lambda item: {**item, "obs": item["obs"][:1]},
        ),
        (
            TypeError,
            r"leaf \['img'\] has dtype float32, expected uint8",
            lambda item: {**item, "img": item["img"].astype(jnp.float32)},
        ),
    ],
)
def test_an_update_that_changes_what_an_item_is_is_an_error(buffer, indices, error, message, fn):
    state = filled(buffer)
    with pytest.raises(error, match="update: fn's result: .*" + message):
        buffer.update(state, fn, indices)
    assert buffer.size(state) == 3


@pytest.mark.parametrize("indices", [1.0, np.float32([0, 1]), np.array([True, False])], ids=repr)
@pytest.mark.parametrize("buffer", [CIRCULAR, ITEMS], ids=["circular", "uniform"])
def test_indices_that_are_not_integers_are_an_error(buffer, indices):
    state = filled(buffer)
    with pytest.raises(TypeError, match="get: indices must be integers"):
        buffer.get(state, indices)
    with pytest.raises(TypeError, match="update: indices must be integers"):
        buffer.update(state, shift, indices)
    assert buffer.size(state) == 3


def test_an_update_with_arguments_for_another_number_of_items_is_an_error():
    state = filled(ITEMS)
    with pytest.raises(ValueError, match=r"(?s)size 2.*size 3"):
        ITEMS.update(state, lambda item, by: item, np.array([0, 1]), np.zeros(3))
    assert ITEMS.size(state) == 3


# ------------------------------------------------------------------------------------------ states


STACKED = {
    "circular": (CIRCULAR, ()),
    "items": (ITEMS, ()),
    "streams": (STREAMS, (3,)),
    "prioritised": (PRIORITISED, ()),
    "clustered": (buffers.clustered_replay(2, ITEMS, lambda item: item["id"] % 2), ()),
}


@pytest.mark.parametrize(
    ("kind", "stack"),
    [
        ("circular", "vmap"),
        more("items", "vmap"),  # which are streams of one environment
        ("streams", "vmap"),
        ("prioritised", "vmap"),
        ("clustered", "vmap"),
        ("circular", "pmap"),
        *[more(kind, "pmap") for kind in STACKED if kind != "circular"],
    ],
)
def test_states_that_are_stacked_are_told_to_use_vmap(kind, stack):
    """`size` and `can_sample` give an answer for each, the other functions say what to do."""
    buffer, lead = STACKED[kind]
    transform = {"vmap": jax.vmap, "pmap": jax.pmap}[stack]
    ids, mask = np.ones((2, 4, *lead)), np.array([[False] * 4, [True] * 3 + [False]])
    states = transform(lambda _: buffer.init(encode(0)))(np.arange(2))
    states = transform(buffer.add_batch)(states, encode(ids), mask)
    items = int(np.prod(lead, initial=1))
    assert buffer.size(states).tolist() == [0, 3 * items]
    one, many = encode(ids[0, 0]), encode(ids[0])
    calls = [
        lambda: buffer.add(states, one),
        lambda: buffer.add_batch(states, many),
        lambda: buffer.get(states, np.arange(3)),
        lambda: buffer.update(states, shift),
        lambda: buffer.update(states, shift, np.arange(3)),
    ]
    if kind == "circular":
        assert buffer.can_pop(states, 3).tolist() == [False, True]
        calls += [lambda: buffer.pop(transform(buffer.add_batch)(states, encode(ids), ~mask), 1)]
    else:
        assert buffer.can_sample(states).tolist() == [False, True]
        assert buffer.can_sample(states, 3 * items + 1).tolist() == [False, False]
        calls += [
            lambda: buffer.sample(states, KEY, 2),
            lambda: buffer.add_and_sample(states, many, KEY, 2),
            lambda: buffer.indices(states),
        ]
    if kind == "prioritised":
        calls += [
            lambda: buffer.set_priorities(states, np.arange(3), np.ones(3)),
            lambda: buffer.priorities(states, np.arange(3)),
        ]
    for call in calls:
        with pytest.raises(ValueError, match=r"several states, stacked: .* under jax\.vmap"):
            call()


def test_can_sample_takes_a_least_size():
    assert [bool(ITEMS.can_sample(filled(ITEMS), n)) for n in (0, 1, 3, 4)] == [True] * 3 + [False]
    assert not ITEMS.can_sample(ITEMS.init(encode(0)), min_size=0)
    assert STREAMS.can_sample(filled(STREAMS, 3), 9)
    assert not STREAMS.can_sample(filled(STREAMS, 3), 10)
    assert not SEQUENCES.can_sample(filled(SEQUENCES), 1)  # it takes 4 steps


def test_a_state_of_another_buffer_is_an_error():
    for call in (
        lambda: ITEMS.add(filled(CIRCULAR), encode(1)),
        lambda: ITEMS.sample(filled(CIRCULAR), KEY, 2),
        lambda: STREAMS.get(filled(ITEMS), [0]),
    ):
        with pytest.raises(ValueError, match=r"another buffer's init: it holds \[rows, env.* not"):
            call()


# ------------------------------------------------------------------------------ mistakes in values


def increment(buffer, indices):
    return lambda state: buffer.update(state, shift, np.array(indices))


def get(buffer, indices):
    return lambda state: (state, buffer.get(state, np.array(indices)))[1]


def overwritten(buffer):
    """Items 0, ..., 9 of which the first are gone."""
    return buffer.add_batch(buffer.init(encode(0)), encode(np.arange(10)))


def all_0(buffer):
    """Items 0, 1, 2 of priority 0."""
    return buffer.set_priorities(filled(buffer), np.arange(3), np.zeros(3))


# name: (make a buffer, its state before the mistake, the mistake, the message)
DYNAMIC_MISTAKES = {
    "sample empty": (
        "items",
        lambda b: b.init(encode(0)),
        lambda b, s: b.sample(s, KEY, 2),
        "sample: nothing to draw, 0 items held; .* of period=1(?!,)",
    ),
    "sample empty streams": (
        "streams",
        lambda b: b.init(encode(0)),
        lambda b, s: b.sample(s, KEY, 2),
        "sample: nothing to draw",
    ),
    "sample too few steps": (
        "sequences",
        filled,
        lambda b, s: b.sample(s, KEY, 2),
        "sample: nothing to draw.*3.* held",
    ),
    "add_and_sample too few steps": (
        "sequences",
        lambda b: b.init(encode(0)),
        lambda b, s: b.add_and_sample(s, encode([0, 1, 2]), KEY, 2),
        "add_and_sample: nothing to draw.*3.* held",
    ),
    "pop too many": (
        "circular",
        filled,
        lambda b, s: b.pop(s, 4),
        "pop: 4 items asked for, but 3 held",
    ),
    "circular get at size": (
        "circular",
        filled,
        lambda b, s: get(b, [0, 3])(s),
        "get: indices must be from 0 .*to size - 1, and size is 3",
    ),
    "circular get at -1": (
        "circular",
        filled,
        lambda b, s: get(b, [-1])(s),
        "get: indices must be from 0 .*to size - 1, and size is 3",
    ),
    "circular update at size": (
        "circular",
        filled,
        lambda b, s: increment(b, [0, 3])(s),
        "update: indices must be from 0 .*to size - 1, and size is 3",
    ),
    "get overwritten": (
        "items",
        overwritten,
        lambda b, s: get(b, [9, 3])(s),
        "get: an index is not in the buffer",
    ),
    "get not yet added": (
        "items",
        filled,
        lambda b, s: get(b, [3])(s),
        "get: an index is not in the buffer",
    ),
    "get at -1": (
        "items",
        filled,
        lambda b, s: get(b, [-1])(s),
        "get: an index is not in the buffer",
    ),
    "get a window that is not complete": (
        "sequences",
        overwritten,
        lambda b, s: get(b, [7])(s),
        "get: an index is not in the buffer",
    ),
    "update overwritten": (
        "items",
        overwritten,
        lambda b, s: increment(b, [9, 3])(s),
        "update: an index is not in the buffer",
    ),
    "update not yet added": (
        "items",
        filled,
        lambda b, s: increment(b, [0, 3])(s),
        "update: an index is not in the buffer",
    ),
    "sample of priorities 0": (
        "prioritised",
        all_0,
        lambda b, s: b.sample(s, KEY, 2),
        "sample: nothing to draw, 3 items held.*of a priority above 0",
    ),
    "sample empty prioritised": (
        "prioritised",
        lambda b: b.init(encode(0)),
        lambda b, s: b.sample(s, KEY, 2),
        "sample: nothing to draw",
    ),
} | {
    f"priority {bad}": (
        "prioritised",
        filled,
        lambda b, s, bad=bad: b.set_priorities(s, np.array([0, 1]), s.max_priority[None] + bad),
        "set_priorities: priorities must be 0 or more, and finite",
    )
    for bad in (np.float32([1, np.nan]), np.float32([np.inf, 1]), np.float32([1, -1]))
}


@cache  # so that tests share what is compiled
def make(kind, **kwargs):
    return {
        "circular": lambda: buffers.circular_buffer(5, **kwargs),
        "items": lambda: buffers.uniform_replay(6, **kwargs),
        "streams": lambda: buffers.uniform_replay(12, num_envs=3, **kwargs),
        "sequences": lambda: buffers.uniform_replay(8, sequence_length=4, period=2, **kwargs),
        "prioritised": lambda: buffers.prioritised_replay(6, **kwargs),
    }[kind]()


@pytest.mark.parametrize("name", DYNAMIC_MISTAKES)
def test_a_mistake_in_values_raises_and_leaves_the_state(name):
    kind, before, mistake, message = DYNAMIC_MISTAKES[name]
    buffer = make(kind)
    state = before(buffer)
    expected = jax.tree.map(np.array, state)
    with pytest.raises(ValueError, match=message):
        mistake(buffer, state)
    assert_trees_equal(jax.tree.map(np.array, state), expected)
    buffer.update(state, shift)  # donates the state: it was still there


def checked(function):
    """`function` with its checks, compiled: raises what checkify found."""
    checking = jax.jit(checkify.checkify(function, errors=checkify.user_checks))

    def call(*args):
        error, out = checking(*args)
        error.throw()
        return out

    return call


@pytest.mark.parametrize("name", DYNAMIC_MISTAKES)
def test_a_mistake_in_values_is_an_error_under_checkify(name):
    kind, before, mistake, message = DYNAMIC_MISTAKES[name]
    buffer = make(kind, debug=True)
    error, _ = checkify.checkify(
        jax.jit(lambda state: mistake(buffer, state)), errors=checkify.user_checks
    )(before(buffer))
    with pytest.raises(checkify.JaxRuntimeError, match=message):
        error.throw()


def test_there_is_no_error_under_checkify_without_a_mistake():
    replay, circular = make("items", debug=True), make("circular", debug=True)

    def run(state, queue):
        sample = replay.sample(state, KEY, 4)
        state = replay.update(state, shift, sample.indices)
        state, _ = replay.add_and_sample(state, encode([7, 8]), KEY, 4)
        queue = circular.update(queue, shift, jnp.array([0, 2]))
        return replay.get(state, sample.indices), circular.pop(queue, 3)[1]

    drawn, popped = checked(run)(filled(replay), filled(circular))
    assert set(decode(drawn).tolist()) <= {1, 2, 3}
    assert decode(popped).tolist() == [1, 1, 3]


def test_checks_see_into_scan_and_vmap():
    circular = make("circular", debug=True)

    def drain(state, n):
        return jax.lax.scan(lambda s, _: circular.pop(s, 1), state, length=n)[1]["id"]

    assert checked(lambda s: drain(s, 3))(filled(circular)).ravel().tolist() == [0, 1, 2]
    with pytest.raises(checkify.JaxRuntimeError, match="1 items asked for, but 0 held"):
        checked(lambda s: drain(s, 4))(filled(circular))

    pair = jax.tree.map(lambda *x: jnp.stack(x), filled(circular), circular.init(encode(0)))
    with pytest.raises(checkify.JaxRuntimeError, match="1 items asked for, but 0 held"):
        checked(jax.vmap(lambda s: circular.pop(s, 1)))(pair)


@pytest.mark.parametrize("name", DYNAMIC_MISTAKES)
def test_checks_are_left_in_only_if_asked_for(name):
    kind, before, mistake, _ = DYNAMIC_MISTAKES[name]
    for debug in (False, True):
        buffer = make(kind, debug=debug)
        jaxpr = jax.make_jaxpr(lambda state, b=buffer: mistake(b, state))(before(buffer))
        assert (" check[" in str(jaxpr)) == debug


# ---------------------------------------------------------------------------- the same, inside jit


@pytest.mark.parametrize(
    ("buffer", "lead", "rows"),
    [(ITEMS, (), 0), (STREAMS, (3,), 0), (SEQUENCES, (), 3)],
    ids=["items", "streams", "sequences"],
)
def test_jit_sample_of_nothing_has_probability_0(buffer, lead, rows):
    state = buffer.init(encode(0))
    if rows:
        state = buffer.add_batch(state, encode(np.zeros((rows, *lead))))
    sample = jax.jit(lambda s: buffer.sample(s, KEY, 5))(state)
    assert sample.probabilities.tolist() == [0.0] * 5
    assert decode(sample.experience).shape[0] == 5
    assert jnp.all((sample.indices >= 0) & (sample.indices < 12))


def test_jit_pop_of_too_many_leaves_an_empty_buffer():
    state, items = jax.jit(lambda s: CIRCULAR.pop(s, 5))(filled(CIRCULAR))
    assert CIRCULAR.size(state) == 0
    assert decode(items)[:3].tolist() == [0, 1, 2]
    state = CIRCULAR.add(state, encode(9))
    assert decode(CIRCULAR.get(state, np.array([0]))).tolist() == [9]


WRAP = 2**30 // 5 * 5  # a multiple of the modulus of CIRCULAR


@pytest.mark.parametrize("outside", [3, 4, 5, 8, -1, -5, WRAP, -WRAP, 2**31 - 1, -(2**31)])
def test_jit_update_outside_changes_nothing(outside):
    update = jax.jit(lambda s, i: CIRCULAR.update(s, shift, i))
    state = update(filled(CIRCULAR), jnp.array([outside, 1]))
    assert np.asarray(state.storage["id"]).ravel().tolist() == [0, 2, 2, 0, 0]


@pytest.mark.parametrize(
    "outside", [0, 3, 10, 99, -1, -6, 2**30 // 6 * 6 + 5, -(2**30) // 6 * 6 + 5]
)
def test_jit_update_of_what_is_gone_changes_nothing(outside):
    update = jax.jit(lambda s, i: ITEMS.update(s, shift, i))
    state = update(overwritten(ITEMS), jnp.array([outside, 8]))
    held = np.arange(4, 10)
    np.testing.assert_array_equal(decode(ITEMS.get(state, held)), held + (held == 8))


@pytest.mark.parametrize("indices", [[3], [-1], [2**31 - 1]], ids=str)
def test_jit_get_outside_gives_some_slot(indices):
    for buffer in (CIRCULAR, ITEMS):
        items = jax.jit(buffer.get)(overwritten(buffer), jnp.array(indices) + 10 * (indices == [3]))
        assert decode(items).tolist()[0] in range(10)


@pytest.mark.parametrize("index", [2**30 // 6 * 6 + 5, -(2**30 // 6 * 6) + 5, 2**32 + 5])
def test_an_index_that_was_never_given_is_not_in_the_buffer(index):
    with pytest.raises(ValueError, match="not in the buffer"):
        ITEMS.get(overwritten(ITEMS), np.array([index]))


# --------------------------------------------------------------------------------------- priorities


@pytest.mark.parametrize("exponent", [-0.1, -1, np.inf, np.nan])
def test_an_impossible_exponent_is_an_error(exponent):
    with pytest.raises(ValueError, match="priority_exponent must be 0 or more"):
        buffers.prioritised_replay(6, exponent)


@pytest.mark.parametrize(
    ("error", "message", "indices", "priorities"),
    [
        (ValueError, r"both be \[B\], got \(2,\) and \(3,\)", [0, 1], [1, 2, 3]),
        (ValueError, r"both be \[B\], got \(2,\) and \(\)", [0, 1], 1.0),
        (ValueError, r"got \(1, 2\) and \(1, 2\)", [[0, 1]], [[1, 2]]),
        (TypeError, "indices must be integers, got float64", [0.0, 1.0], [1, 2]),
    ],
)
def test_priorities_unlike_the_indices_are_an_error(error, message, indices, priorities):
    state = filled(PRIORITISED)
    with pytest.raises(error, match="set_priorities: .*" + message):
        PRIORITISED.set_priorities(state, indices, priorities)
    assert PRIORITISED.sample(state, KEY, 2).probabilities.min() > 0


def test_priorities_at_indices_that_are_not_integers_are_an_error():
    message = "priorities: indices must be integers, got float64"
    with pytest.raises(TypeError, match=message):
        PRIORITISED.priorities(filled(PRIORITISED), [0.0, 1.0])


def test_jit_ignores_bad_priorities_and_sets_the_others():
    priorities = np.float32([np.nan, 0, -1])
    set_priorities = jax.jit(PRIORITISED.set_priorities)
    state = set_priorities(filled(PRIORITISED), np.arange(3), priorities)
    assert state.tree[0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert PRIORITISED.can_sample(state)


def test_jit_sample_of_priorities_0_has_probability_0():
    state = all_0(PRIORITISED)
    assert not PRIORITISED.can_sample(state)
    sample = jax.jit(lambda s: PRIORITISED.sample(s, KEY, 5))(state)
    assert sample.probabilities.tolist() == [0.0] * 5
    assert set(decode(sample.experience).tolist()) <= {0, 1, 2}
    state, sample = PRIORITISED.add_and_sample(state, encode([3]), KEY, 5)
    assert decode(sample.experience).tolist() == [3] * 5
