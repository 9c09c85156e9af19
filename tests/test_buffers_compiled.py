"""Every function under every transformation: traced once per shape, never copying the storage."""

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from buffer_helpers import encode, shift, shift_by
from helpers import assert_trees_equal
from jax.sharding import PartitionSpec

import buffers

ITEM = encode(0)
ROWS = 4  # of a batch
DRAWS = 5
REPLICAS = 4
STEPS = 3


def clustered(buffer):
    """Makes a replay with two clusters: steps whose first items have even and odd ids."""
    return buffers.clustered_replay(2, buffer, lambda item: item["id"].ravel()[0] % 2, 1.0)


def kinds(size, num_envs, **windows):
    """Makes a buffer of each kind for `size` items. With exponent 1 sums of weights are exact."""
    windows["num_envs"] = num_envs
    return {
        "circular": buffers.circular_buffer(size),
        "sequences": buffers.uniform_replay(size, **windows),
        "prioritised": buffers.prioritised_replay(size, 1.0),
        "prioritised sequences": buffers.prioritised_replay(size, 1.0, **windows),
        "clustered": clustered(buffers.prioritised_replay(size // 2, 1.0, num_envs=num_envs)),
    }


SMALL = kinds(12, num_envs=3, sequence_length=3, period=2)
KINDS = ["circular", "prioritised sequences", "clustered"]  # these contain all others


def functions(buffer):
    """Returns {name: function(state, x) -> (state, result)} for each function of a buffer."""
    found = {
        "add": lambda state, x: (buffer.add(state, x["item"]), ()),
        "add_batch": lambda state, x: (buffer.add_batch(state, x["items"]), ()),
        "masked": lambda state, x: (buffer.add_batch(state, x["items"], x["mask"]), ()),
        "update": lambda state, x: (buffer.update(state, shift), ()),
        "size": lambda state, x: (state, buffer.size(state)),
    }
    if isinstance(buffer, buffers.CircularBuffer):
        return found | functions_of_a_queue(buffer)
    return found | functions_of_a_replay(buffer)


def functions_of_a_queue(queue):
    def can(state, x):
        return state, [queue.can_add(state, 2), queue.can_add(state, 3), queue.can_pop(state, 4)]

    return {
        "update_at": lambda state, x: (queue.update(state, shift, x["held"]), ()),
        "update_one": lambda state, x: (queue.update(state, shift_by, x["held"][0], x["by"]), ()),
        "get": lambda state, x: (state, queue.get(state, x["held"])),
        "pop": lambda state, x: queue.pop(state, 2),
        "can": can,
    }


def functions_of_a_replay(replay):
    def draw(state, x):
        return replay.sample(state, jax.random.wrap_key_data(x["key"]), DRAWS)

    def update_at(state, x):
        sample = draw(state, x)
        return replay.update(state, shift, sample.indices), sample

    def update_one(state, x):
        sample = draw(state, x)
        return replay.update(state, shift_by, sample.indices[:1], x["by"]), sample

    def add_and_sample(state, x):
        key = jax.random.wrap_key_data(x["key"])
        return replay.add_and_sample(state, x["items"], key, DRAWS)

    def set_priorities(state, x):
        sample = draw(state, x)
        priorities = (1 + sample.indices % 4).astype(np.float32)  # alike for an item drawn twice
        state = replay.set_priorities(state, sample.indices, priorities)
        return state, (sample, replay.priorities(state, sample.indices))

    found = {"set_priorities": set_priorities} if replay.set_priorities else {}
    return found | {
        "update_at": update_at,
        "update_one": update_one,
        "add_and_sample": add_and_sample,
        "get": lambda state, x: (state, replay.get(state, draw(state, x).indices)),
        "can_sample": lambda state, x: (state, replay.can_sample(state)),
        "indices": lambda state, x: (state, replay.indices(state)),
    }


def inputs(buffer, *lead):
    """Makes the `x` of these functions with leading axes `lead`. All its values differ."""
    shape = (*lead, ROWS, *([buffer.envs] if buffer.has_env_axis else []))
    items = encode(np.arange(math.prod(shape)).reshape(shape))
    rng = np.random.default_rng(0)
    return {
        "item": jax.tree.map(lambda leaf: leaf.take(0, axis=len(lead)), items),
        "items": items,
        "mask": rng.random((*lead, ROWS)) < 0.5,
        "key": rng.integers(2**32, size=(*lead, 2), dtype=np.uint32),
        "held": rng.integers(3, size=(*lead, 2), dtype=np.int32),
        "by": rng.integers(10, 20, (*lead, 1), dtype=np.int32),
    }


def at(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def stack(trees):
    return jax.tree.map(lambda *leaves: np.stack(jax.device_get(leaves)), *trees)


def shapes(tree, *lead):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)


def in_turn(functions):
    """Makes a step that calls all these functions: (state, x) -> (state, {name: result})."""

    def step(state, x):
        given = {}
        for name, function in functions.items():
            state, given[name] = function(state, x)
        return state, given

    return step


def one_by_one(step, states, xs):
    """Takes the steps of one replica after the other."""
    ends = []
    for replica in range(REPLICAS):
        state = at(states, replica)
        given = []
        for t in range(STEPS):
            state, of_step = step(state, at(xs, replica, t))
            given.append(of_step)
        ends.append((state, stack(given)))
    return stack(ends)


@pytest.mark.parametrize("kind", ["circular", "clustered"])
def test_a_transformed_program_gives_what_single_calls_give(kind):
    """The program is a loop under `vmap`, with half of the replicas on either device."""
    buffer = SMALL[kind]
    step = in_turn(functions(buffer))
    given = stack([buffer.init(ITEM)] * REPLICAS), inputs(buffer, REPLICAS, STEPS)
    expected = one_by_one(step, *given)

    mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("replica")
    loops = jax.vmap(lambda state, x: jax.lax.scan(step, state, x))
    ends = jax.jit(jax.shard_map(loops, mesh=mesh, in_specs=spec, out_specs=spec))(*given)

    assert len(ends[0].size.sharding.device_set) > 1
    assert shapes(ends) == shapes(expected)
    close = partial(np.testing.assert_allclose, rtol=1e-6)  # XLA may divide in another way
    jax.tree.map(close, jax.device_get(ends), expected)


@pytest.fixture
def traced(caplog):
    """Returns a function that lists what JAX has traced or compiled since its last call."""

    def since():
        found = [m for m in caplog.messages if m.startswith(("Finished tracing", "Compiling"))]
        caplog.clear()
        return found

    with jax.log_compiles():
        yield since


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_traced_once_for_each_shape(kind, traced):
    buffer = SMALL[kind]
    xs = inputs(buffer, STEPS)
    state = buffer.init(ITEM)
    for t in range(STEPS):
        for name, function in functions(buffer).items():
            state, _ = function(state, at(xs, t))
            first = traced()
            state, _ = function(state, at(xs, t))

            assert t == 0 or not first, name
            assert not traced(), name  # also with the state that it returned itself


def pointers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.storage)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_uses_up_the_state_and_keeps_its_memory(kind):
    buffer = SMALL[kind]
    state = buffer.add_batch(buffer.init(ITEM), inputs(buffer)["items"])
    for name, function in functions(buffer).items():
        old = state
        before = pointers(old)
        state, _ = function(old, inputs(buffer))

        assert old.size.is_deleted() == (state is not old), name
        assert pointers(state) == before or name == "update", name  # `update` may use new memory


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_given_away_is_refused(kind):
    buffer = SMALL[kind]
    x = inputs(buffer)
    given_away = buffer.add_batch(buffer.init(ITEM), x["items"])
    buffer.add(given_away, x["item"])

    for function in functions(buffer).values():
        with pytest.raises(RuntimeError, match="donated"):
            function(given_away, x)


def test_without_donation_the_old_state_stays():
    buffer = buffers.circular_buffer(12, donate=False)
    state = buffer.init(ITEM)
    before = jax.tree.map(np.array, state)

    buffer.add(state, encode(1))

    assert_trees_equal(state, before)


CAPACITY = 1_000_000
STORAGE_BYTES = CAPACITY * sum(leaf.nbytes for leaf in jax.tree.leaves(ITEM))
LARGE = kinds(CAPACITY, num_envs=4, sequence_length=5)


def storage_copies(compiled):
    """Lists the shapes of `copy` operations as large as a leaf of the storage, or of the tree."""
    if jax.default_backend() != "cpu":
        pytest.skip("the program that is read is that of a CPU")
    copies = re.findall(r"= \(?(\w+\[([\d,]+)\])\S* copy(?:-start)?\(", compiled.as_text())
    return [shape for shape, sizes in copies if math.prod(map(int, sizes.split(","))) >= CAPACITY]


def assert_in_place(compiled):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= STORAGE_BYTES
    assert memory.temp_size_in_bytes < STORAGE_BYTES / 100
    assert storage_copies(compiled) == []


ALL = ("add", "add_batch", "masked", "update_at", "update_one", "pop", "add_and_sample")


# With priorities, an addition after a sample copies a level of the tree.
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("circular", ALL),
        ("sequences", ALL),
        ("prioritised", ("add_batch", "update_at")),
        ("prioritised sequences", ("add", "add_batch", "masked")),
        ("prioritised sequences", ("add_and_sample",)),
        ("prioritised sequences", ("update_one", "set_priorities")),
        ("clustered", ("add_batch", "set_priorities")),
        ("clustered", ("update_at",)),
    ],
)
def test_writes_in_a_loop_do_not_touch_the_whole_storage(kind, names):
    buffer = LARGE[kind]
    of_kind = functions(buffer)
    step = in_turn({name: of_kind[name] for name in names if name in of_kind})
    run = jax.jit(partial(jax.lax.scan, step), donate_argnums=0)
    state = jax.eval_shape(buffer.init, ITEM)

    assert_in_place(run.lower(state, shapes(inputs(buffer), 100)).compile())


def test_rows_are_written_without_a_copy_of_them():
    buffer = LARGE["prioritised"]
    image = np.zeros((32, 32, 3), np.float32)
    state = jax.eval_shape(buffer.init, image)
    program = buffer._add_batch.__wrapped__.lower(state, shapes(image, 16), shapes(np.True_, 16))

    memory = program.compile().memory_analysis()

    assert memory.temp_size_in_bytes < 16 * image.nbytes / 2


def threads(function, *args):
    """Lists the operations of the compiled program that XLA splits over several threads."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r'.*outer_dimension_partitions":\["[^]].*', text)


@pytest.mark.usefixtures("optimised")
def test_a_draw_from_large_storage_takes_one_thread():
    """Waking a second thread takes longer than a sample; XLA decides by the storage's size."""
    if not threads(lambda x, i: x[i], jnp.zeros(CAPACITY), jnp.zeros(8, int)):
        pytest.skip("a machine of one core, or another XLA: it uses one thread anyway")
    buffer = LARGE["prioritised sequences"]
    state = jax.eval_shape(buffer.init, ITEM)
    indices = jax.ShapeDtypeStruct((32,), np.int32)

    assert threads(lambda state, key: buffer.sample(state, key, 32), state, jax.random.key(0)) == []
    assert threads(buffer.get, state, indices) == []
