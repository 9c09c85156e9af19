"""Every function under every transformation, traced once a shape, and never the whole storage."""

import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, encode, shift, shift_by
from jax.sharding import PartitionSpec

import buffers

ITEM = encode(0)
ROWS = 4  # of a batch
DRAWS = 5
REPLICAS = 4
STEPS = 3


def clustered(buffer):
    """Two clusters: items, or steps by their first items, of even and of odd ids."""
    return buffers.clustered_replay(2, buffer, lambda item: item["id"].ravel()[0] % 2, 1.0)


def kinds(size, num_envs, **windows):
    """A buffer of each kind for so many items. With exponent 1 sums of weights are exact."""
    windows["num_envs"] = num_envs
    return {
        "circular": buffers.circular_buffer(size),
        "items": buffers.uniform_replay(size),
        "sequences": buffers.uniform_replay(size, **windows),
        "prioritised": buffers.prioritised_replay(size, 1.0),
        "prioritised sequences": buffers.prioritised_replay(size, 1.0, **windows),
        "clustered": clustered(buffers.uniform_replay(size // 2)),
        "clustered steps": clustered(buffers.prioritised_replay(size // 2, 1.0, num_envs=num_envs)),
    }


SMALL = kinds(12, num_envs=3, sequence_length=3, period=2)
KINDS = [kind for kind in SMALL if kind not in ("items", "prioritised")]  # sequences of one


def functions(buffer):
    """{name: function(state, x) -> (state, what it gives)} for each function of a buffer."""
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
    """The `x` of these functions with axes `lead` in front: everything in it is different."""
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
    """A step that calls all of these functions: (state, x) -> (state, {name: what it gives})."""

    def step(state, x):
        given = {}
        for name, function in functions.items():
            state, given[name] = function(state, x)
        return state, given

    return step


def one_by_one(step, states, xs):
    """Steps of one replica after the other."""
    ends = []
    for replica in range(REPLICAS):
        state = at(states, replica)
        given = []
        for t in range(STEPS):
            state, of_step = step(state, at(xs, replica, t))
            given.append(of_step)
        ends.append((state, stack(given)))
    return stack(ends)


def vmap_on_devices(loop):
    """A loop for each replica under `vmap`, half of the replicas on either device."""
    mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("replica")
    return jax.jit(jax.shard_map(jax.vmap(loop), mesh=mesh, in_specs=spec, out_specs=spec))


# Clustered steps do what all other replays do.
@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        ("circular", vmap_on_devices),
        ("circular", jax.pmap),
        ("sequences", vmap_on_devices),
        ("clustered steps", vmap_on_devices),
    ],
)
def test_a_transformed_program_gives_what_single_calls_give(kind, transform):
    buffer = SMALL[kind]
    step = in_turn(functions(buffer))
    given = stack([buffer.init(ITEM)] * REPLICAS), inputs(buffer, REPLICAS, STEPS)
    expected = one_by_one(step, *given)
    got = expected[1]["get"]["id"].reshape(REPLICAS * STEPS, -1)
    assert len(np.unique(got, axis=0)) == len(got)  # so that a mixed-up replica or step would show

    ends = transform(lambda state, x: jax.lax.scan(step, state, x))(*given)

    assert len(ends[0].size.sharding.device_set) > 1
    assert shapes(ends) == shapes(expected)
    close = partial(np.testing.assert_allclose, rtol=1e-6)  # XLA may divide in another way
    jax.tree.map(close, jax.device_get(ends), expected)


@pytest.fixture
def traced(caplog):
    """A function that lists what JAX traced or compiled since it was called last."""

    def since():
        found = [m for m in caplog.messages if m.startswith(("Finished tracing", "Compiling"))]
        caplog.clear()
        return found

    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(1)
        assert since()  # or else this would see nothing
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
            assert not traced(), name  # also of the state that it gave itself


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
        assert pointers(state) == before or name == "update", name  # which may use new memory


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_was_given_away_is_refused(kind):
    buffer = SMALL[kind]
    x = inputs(buffer)
    given_away = buffer.add_batch(buffer.init(ITEM), x["items"])
    buffer.add(given_away, x["item"])
    indices = np.zeros(DRAWS, np.int32)
    calls = [partial(function, given_away, x) for function in functions(buffer).values()]
    calls.append(partial(buffer.get, given_away, indices))
    calls.append(partial(buffer.update, given_away, shift, indices))
    if "set_priorities" in functions(buffer):
        calls.append(partial(buffer.priorities, given_away, indices))
        calls.append(partial(buffer.set_priorities, given_away, indices, np.ones(DRAWS)))
    for call in calls:
        with pytest.raises(RuntimeError, match="donated"):
            call()


@pytest.mark.parametrize("kind", ["circular", "prioritised"])
def test_without_donation_the_old_state_stays(kind):
    buffer = replace(SMALL[kind], donate=False)
    state = buffer.add_batch(buffer.init(ITEM), inputs(buffer)["items"])
    before = jax.tree.map(np.array, state)
    for name, function in functions(buffer).items():
        new, _ = function(state, inputs(buffer))
        differs = jax.tree.map(lambda x, y: np.any(x != y), new, before)

        assert_trees_equal(state, before)
        assert new is state or any(jax.tree.leaves(differs)), name


CAPACITY = 1_000_000
STORAGE_BYTES = CAPACITY * sum(leaf.nbytes for leaf in jax.tree.leaves(ITEM))
LARGE = kinds(CAPACITY, num_envs=4, sequence_length=5)


def storage_copies(compiled):
    """The shapes of the `copy` operations as large as a leaf of the storage, or of the tree."""
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


# With priorities, an addition after a draw copies a level of the tree.
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("circular", ALL),
        ("items", ("update_at", "add_and_sample")),
        ("sequences", ALL),
        ("prioritised", ("add_batch", "update_at")),
        ("prioritised sequences", ("add", "add_batch", "masked")),
        ("prioritised sequences", ("add_and_sample",)),
        ("prioritised sequences", ("update_one", "set_priorities")),
        ("clustered", ("add_batch", "update_at")),
        ("clustered steps", ("add_batch", "set_priorities")),
        ("clustered steps", ("update_at",)),
    ],
)
def test_writes_in_a_loop_do_not_touch_the_whole_storage(kind, names):
    buffer = LARGE[kind]
    of_kind = functions(buffer)
    step = in_turn({name: of_kind[name] for name in names if name in of_kind})
    run = jax.jit(partial(jax.lax.scan, step), donate_argnums=0)
    state = jax.eval_shape(buffer.init, ITEM)

    assert_in_place(run.lower(state, shapes(inputs(buffer), 100)).compile())


def test_a_copy_would_be_seen():
    buffer = replace(LARGE["items"], donate=False)
    state = jax.eval_shape(buffer.init, ITEM)
    compiled = buffer._add.__wrapped__.lower(state, shapes(ITEM)).compile()

    assert len(storage_copies(compiled)) == len(ITEM)
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def operations_that_write(shape, compiled):
    """The names of the XLA operations by which fusions write a float32 array of this shape."""
    text = compiled.as_text()
    computation = r"^%(\S+) \([^\n]*\{\n.*?ROOT \S+ = \S+ ([\w-]+)\("  # its name and last operation
    last_operation = dict(re.findall(computation, text, re.S | re.M))
    sizes = ",".join(map(str, shape))
    fusions = re.findall(rf"= f32\[{sizes}\]\S* fusion\(.*?calls=%([\w.-]+)", text)
    return {last_operation[name] for name in fusions}


@pytest.mark.slow
def test_stacked_agents_write_to_their_trees_by_scattering():
    """XLA has other ways to write a part of a tree: with `vmap` they computed the whole of it."""
    replay = buffers.prioritised_replay(CAPACITY, num_envs=10, sequence_length=2)

    def draw(i, state):
        sample = replay.sample(state, jax.random.key(i), 128)
        return replay.set_priorities(state, sample.indices, 1 + sample.experience["obs"][:, 0, 0])

    def step(state, row):
        return jax.lax.fori_loop(0, 2, draw, replay.add_batch(state, row)), ()

    run = partial(jax.lax.scan, jax.vmap(step, in_axes=(0, None)))
    state = shapes(jax.eval_shape(replay.init, ITEM), 3)  # agents
    rows = shapes(ITEM, 100, 1, 10)
    compiled = jax.jit(run, donate_argnums=0).lower(state, rows).compile()

    assert_in_place(compiled)
    assert operations_that_write(state.tree[0].shape, compiled) == {"scatter"}


@pytest.mark.parametrize(("kind", "masked"), [("sequences", False), ("prioritised", True)])
def test_rows_are_written_without_a_copy_of_them(kind, masked):
    buffer = LARGE[kind]
    image = np.zeros((32, 32, 3), np.float32)
    state = jax.eval_shape(buffer.init, image)
    rows = shapes(image, 16, *([buffer.envs] if buffer.has_env_axis else []))
    mask = [shapes(np.True_, 16)] if masked else []
    memory = buffer._add_batch.__wrapped__.lower(state, rows, *mask).compile().memory_analysis()

    assert memory.temp_size_in_bytes < 16 * image.nbytes / 2


def test_a_gather_from_a_large_array_is_a_gather():
    rows = 2**20
    rng = np.random.default_rng(0)
    x = rng.random((rows, 3), np.float32)
    several = [rng.integers(rows, size=s, dtype=np.int32) for s in [(), 0, 1, 2, 7, (1, 5), (5, 3)]]
    several[-1][:2, 0] = [0, rows - 1]  # the ends
    take = jax.jit(lambda x, several: [buffers._gather(x, i) for i in several])

    assert_trees_equal(take(x, several), [x[i] for i in several])
    assert_trees_equal(buffers._gather(jnp.asarray(x), several[-1]), x[several[-1]])
    of_both = jax.vmap(take)(np.stack([x, x[::-1]]), [np.stack([i, i]) for i in several])
    assert_trees_equal(of_both, [np.stack([x[i], x[::-1][i]]) for i in several])


def threads(function, *args):
    """The operations of the compiled program that XLA gives to several threads."""
    text = jax.jit(function).lower(*args).compile().as_text()
    return re.findall(r'.*outer_dimension_partitions":\["[^]].*', text)


def test_a_draw_from_large_storage_takes_one_thread():
    """To wake a second thread takes longer than a draw; XLA goes by what could be drawn."""
    if not threads(lambda x, i: x[i], jnp.zeros(CAPACITY), jnp.zeros(8, int)):
        pytest.skip("a machine of one core, or another XLA: it uses one thread anyway")
    buffer = LARGE["prioritised sequences"]
    state = jax.eval_shape(buffer.init, ITEM)
    indices = jax.ShapeDtypeStruct((32,), np.int32)

    assert threads(lambda state, key: buffer.sample(state, key, 32), state, jax.random.key(0)) == []
    assert threads(buffer.get, state, indices) == []
