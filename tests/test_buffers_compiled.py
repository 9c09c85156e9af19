"""Every function under every transformation, traced once a shape, and never the whole storage."""

import math
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal, encode, more, shift, shift_by
from jax.sharding import PartitionSpec

import buffers

# ---------------------------------------------------------------------------------- transformations

FACTORIES = {
    "circular": lambda: buffers.circular_buffer(5),
    "items": lambda: buffers.uniform_replay(6),
    "sequences": lambda: buffers.uniform_replay(18, num_envs=3, sequence_length=3, period=2),
    # Exponent 1: sums of these weights are exact, in whatever order they are taken.
    "prioritised": lambda: buffers.prioritised_replay(6, 1.0),
    "prioritised sequences": lambda: buffers.prioritised_replay(
        18, 1.0, num_envs=3, sequence_length=3, period=2
    ),
    "clustered": lambda: buffers.clustered_replay(
        2, buffers.uniform_replay(6), lambda item: item["id"] % 2
    ),
    "clustered streams": lambda: buffers.clustered_replay(
        2,
        buffers.prioritised_replay(18, 1.0, num_envs=3),
        lambda step: step["id"][0] % 2,
        1.0,
    ),
}
BUFFERS = {kind: factory() for kind, factory in FACTORIES.items()}
ENVS = {kind: (3,) if kind.endswith(("sequences", "streams")) else () for kind in BUFFERS}
# Items are sequences of one. What prioritised sequences do is done by sequences and by the
# clustered streams, which are prioritised.
SPECIAL = ("items", "prioritised", "prioritised sequences", "clustered")
KINDS = [more(kind) if kind in SPECIAL else kind for kind in BUFFERS]
REPLICAS = 4
STEPS = 3
DEVICES = 2


def circular_step(buffer, state, x):
    """Every function of a circular buffer, and all that it returns."""
    one = jax.tree.map(lambda leaf: leaf[0], x["items"])
    out = {"init": buffer.init(one)}
    state = buffer.add(state, one)
    state = buffer.add_batch(state, x["items"])
    state = buffer.add_batch(state, x["items"], x["mask"])
    state = buffer.update(state, shift)
    state = buffer.update(state, shift_by, jnp.array([2, 0]), jnp.array([10, 20]))
    out["got"] = buffer.get(state, jnp.array([[0, 1], [2, 0]]))
    state, out["popped"] = buffer.pop(state, 2)
    out["size"] = buffer.size(state)
    out["can"] = [buffer.can_add(state, 2), buffer.can_add(state, 3), buffer.can_pop(state, 4)]
    return state, out


def replay_step(buffer, state, x):
    """Every function of a replay buffer, and all that it returns."""
    out = {"init": buffer.init(encode(0)), "can_sample": buffer.can_sample(state)}
    key = jax.random.wrap_key_data(x["key"])
    state = buffer.add(state, jax.tree.map(lambda leaf: leaf[0], x["items"]))
    state = buffer.add_batch(state, x["items"])
    state = buffer.add_batch(state, x["items"], x["mask"])
    out["sample"] = buffer.sample(state, key, 5)
    state = buffer.update(state, shift)
    state = buffer.update(state, shift_by, out["sample"].indices[:1], jnp.array([10]))
    out["got"] = buffer.get(state, out["sample"].indices)
    out["indices"] = buffer.indices(state)
    if getattr(buffer, "set_priorities", None):
        priorities = jnp.array([0.5, 3.0, 1.0, 0.0, 2.0])
        at = jnp.where(jnp.arange(5) < 1, out["sample"].indices, -1)  # one: no duplicates
        state = buffer.set_priorities(state, at, priorities)
        out["priorities"] = buffer.priorities(state, out["sample"].indices)
    state, out["add_and_sample"] = buffer.add_and_sample(state, x["items"], key, 4)
    out["size"] = buffer.size(state)
    return state, out


def step_of(kind):
    buffer = BUFFERS[kind]
    function = circular_step if kind == "circular" else replay_step
    return lambda state, x: function(buffer, state, x)


def inputs(kind):
    """Empty states [REPLICAS, ...] and inputs [REPLICAS, STEPS, ...], all different."""
    lead = (REPLICAS, STEPS, 4, *ENVS[kind])
    rng = np.random.default_rng(0)
    xs = {
        "items": encode(np.arange(math.prod(lead)).reshape(lead)),
        "mask": rng.random((REPLICAS, STEPS, 4)) < 0.5,
        "key": rng.integers(2**32, size=(REPLICAS, STEPS, 2), dtype=np.uint32),
    }
    states = [BUFFERS[kind].init(encode(0)) for _ in range(REPLICAS)]
    return stack(states), xs


def stack(trees, axis=0):
    return jax.tree.map(lambda *leaves: np.stack(jax.device_get(leaves), axis), *trees)


def at(tree, *index):
    return jax.tree.map(lambda leaf: leaf[index], tree)


def loop(step, states, xs):
    """`step(states, x)` for x over axis 1: all replicas at once."""
    outs = []
    for t in range(STEPS):
        states, out = step(states, jax.tree.map(lambda leaf, t=t: leaf[:, t], xs))
        outs.append(out)
    return states, stack(outs, axis=1)


def one_by_one(step, states, xs):
    """`step(state, x)` for each replica and each x."""
    ends = []
    for r in range(REPLICAS):
        state = at(states, r)
        outs = []
        for t in range(STEPS):
            state, out = step(state, at(xs, r, t))
            outs.append(out)
        ends.append((state, stack(outs)))
    return stack(ends)


def scan(step, states, xs):
    run = jax.jit(lambda state, x: jax.lax.scan(step, state, x))
    return stack([run(at(states, r), at(xs, r)) for r in range(REPLICAS)])


def shard_map(step, states, xs):
    """Under `vmap`, half of the replicas on each of two devices."""
    mesh = jax.make_mesh((DEVICES,), ("replica",))
    by_replica = PartitionSpec("replica")

    def local(states, xs):
        assert states.size.shape[0] == REPLICAS // DEVICES
        return jax.vmap(step)(states, xs)

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=by_replica, out_specs=by_replica))
    states, xs = jax.device_put((states, xs), jax.NamedSharding(mesh, by_replica))
    states, outs = loop(mapped, states, xs)
    assert len(states.size.sharding.device_set) == DEVICES
    return states, outs


# One replica is a program under jit and scan, several in one, or one on each device: what these
# are made of is not compiled apart from them.
TRANSFORMATIONS = {
    "jit and scan": scan,
    "vmap and shard_map": shard_map,
    "pmap": lambda step, states, xs: loop(jax.pmap(step), states, xs),
}


@cache
def eager(kind):
    return one_by_one(step_of(kind), *inputs(kind))


# `pmap` is made of `shard_map`: it is tried with the buffers that have all that the others have,
# and by default with the smaller one.
PMAPPED = ("circular", "clustered streams")


def is_special(kind, transformation):
    return kind in SPECIAL or (kind, transformation) == ("clustered streams", "pmap")


@pytest.mark.parametrize(
    ("kind", "transformation"),
    [
        more(k, t) if is_special(k, t) else (k, t)
        for k in BUFFERS
        for t in TRANSFORMATIONS
        if t != "pmap" or k in PMAPPED
    ],
)
def test_every_function_gives_the_same_under_every_transformation(kind, transformation):
    states, outs = eager(kind)
    got = outs["got"]["id"].reshape(REPLICAS * STEPS, -1)
    assert len(np.unique(got, axis=0)) == len(got)  # so that a mixed-up replica or step would show

    transformed = TRANSFORMATIONS[transformation](step_of(kind), *inputs(kind))
    assert_trees_equal(jax.device_get(transformed), (states, outs))


# ----------------------------------------------------------------------------- one trace a shape


@pytest.fixture
def compilations(caplog):
    """A function that lists what JAX traced or compiled since it was called last."""

    def since():
        found = [m for m in caplog.messages if m.startswith(("Finished tracing", "Compiling"))]
        caplog.clear()
        return found

    with jax.log_compiles():
        yield since


def reading(read):
    """The call of a function that changes no state: it returns the very state that it is given."""

    def call(state, i):
        read(state, i)
        return state

    return call


def calls(kind, buffer):
    """(name, call(state, i) -> state) for each function of a buffer, all inputs made beforehand."""
    lead = ENVS[kind]
    one = [encode(np.full(lead, i)) for i in range(50)]
    many = [encode(np.full((5, *lead), i)) for i in range(50)]
    masks = [np.arange(5) % 3 != i % 3 for i in range(50)]
    held = [np.array([i % 3, 1]) for i in range(50)]
    keys = list(jax.random.split(jax.random.key(0), 50))
    yield "add", lambda state, i: buffer.add(state, one[i])
    yield "add_batch", lambda state, i: buffer.add_batch(state, many[i])
    yield "add_batch with mask", lambda state, i: buffer.add_batch(state, many[i], masks[i])
    yield "update", lambda state, i: buffer.update(state, shift)
    yield "size", reading(lambda state, i: buffer.size(state))
    if kind == "circular":
        yield from circular_calls(buffer, one, held)
    else:
        yield from replay_calls(buffer, many, keys)


def circular_calls(buffer, one, held):
    yield "get", reading(lambda state, i: buffer.get(state, held[i]))
    yield "update at", lambda state, i: buffer.update(state, shift, held[i])
    yield "can_add", reading(lambda state, i: buffer.can_add(state, i))
    yield "can_pop", reading(lambda state, i: buffer.can_pop(state, i))
    yield "add and pop", lambda state, i: buffer.pop(buffer.add(state, one[i]), 1)[0]


def replay_calls(buffer, many, keys):
    def sample_update_get(state, i):
        sample = buffer.sample(state, keys[i], 7)
        buffer.get(state, sample.indices)
        return buffer.update(state, shift, sample.indices)

    def add_and_sample(state, i):
        state, _ = buffer.add_and_sample(state, many[i], keys[i], 6)
        return state

    def set_priorities(state, i):
        indices = buffer.sample(state, keys[i], 7).indices
        buffer.priorities(state, indices)
        return buffer.set_priorities(state, indices, np.full(7, 1 + i % 3, np.float32))

    yield "can_sample", reading(lambda state, i: buffer.can_sample(state))
    yield "sample, update, get", sample_update_get
    yield "add_and_sample", add_and_sample
    if buffer.set_priorities:
        yield "priorities, set_priorities", set_priorities


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_is_traced_once_for_each_shape(kind, compilations):
    buffer = FACTORIES[kind]()  # of which nothing is compiled yet
    state = buffer.init(encode(0))
    for name, call in calls(kind, buffer):
        state = call(state, 0)
        assert compilations(), f"{name}: not even the first call was seen"
        for i in range(1, 50):
            state = call(state, i)
        assert compilations() == [], name


# --------------------------------------------------------------------------- in-place writes

CAPACITY = 1_000_000
ITEM = {"id": np.int32(0), "obs": np.zeros(3, np.float32), "img": np.zeros((2, 2), np.uint8)}
STORAGE_BYTES = CAPACITY * (4 + 12 + 4)

LARGE = {
    "circular": buffers.circular_buffer,
    "items": buffers.uniform_replay,
    "streams": lambda size, **kwargs: buffers.uniform_replay(size, num_envs=4, **kwargs),
    "sequences": lambda size, **kwargs: buffers.uniform_replay(
        size, num_envs=4, sequence_length=5, **kwargs
    ),
    "prioritised": buffers.prioritised_replay,
    "prioritised sequences": lambda size, **kwargs: buffers.prioritised_replay(
        size, num_envs=4, sequence_length=5, **kwargs
    ),
    "clustered": lambda size, **kwargs: buffers.clustered_replay(
        4, buffers.prioritised_replay(size // 4), lambda item: item["id"] % 4, **kwargs
    ),
}


def shapes(tree, *lead):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*lead, *x.shape), x.dtype), tree)


HAVE_PRIORITIES = ("prioritised", "prioritised sequences", "clustered")
GIVE_MORE = ("pop", "add_and_sample", "sample, update", "sample, set_priorities")


def writes(kind, **kwargs):
    """name: (function(state, *args), shapes of args) for all that writes a few rows.

    It returns the state; those of GIVE_MORE return a pair of it and what they read.
    """
    buffer = LARGE[kind](CAPACITY, **kwargs)
    lead = (4,) if kind.endswith(("streams", "sequences")) else ()
    one, many = shapes(ITEM, *lead), shapes(ITEM, 8, *lead)
    mask, indices = jax.ShapeDtypeStruct((8,), bool), jax.ShapeDtypeStruct((8,), np.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    functions = {
        "add": (buffer.add, [one]),
        "add_batch": (buffer.add_batch, [many]),
        "add_batch with mask": (buffer.add_batch, [many, mask]),
        "update at": (lambda state, i: buffer.update(state, shift, i), [indices]),
        "update at one": (
            lambda state, i: buffer.update(state, shift, i),
            [jax.ShapeDtypeStruct((1,), np.int32)],
        ),
        "add, add_batch": (lambda s, x, xs: buffer.add_batch(buffer.add(s, x), xs), [one, many]),
    }
    if kind == "circular":
        functions["pop"] = (lambda state: buffer.pop(state, 8), [])
    else:
        functions["add_and_sample"] = (
            lambda s, x, k: buffer.add_and_sample(s, x, k, 8),
            [many, key],
        )

        def sample_and_update(state, key):
            sample = buffer.sample(state, key, 8)
            return buffer.update(state, shift, sample.indices), sample

        functions["sample, update"] = (sample_and_update, [key])
    if kind in HAVE_PRIORITIES:
        priorities = jax.ShapeDtypeStruct((8,), np.float32)
        functions["set_priorities"] = (buffer.set_priorities, [indices, priorities])

        def sample_and_set(state, key, priorities):
            sample = buffer.sample(state, key, 8)
            return buffer.set_priorities(state, sample.indices, priorities), sample

        functions["sample, set_priorities"] = (sample_and_set, [key, priorities])
    return jax.eval_shape(buffer.init, ITEM), functions


def only_on_cpus():
    """Skips a test that reads the program, which is another one on other devices."""
    if jax.default_backend() != "cpu":
        pytest.skip("the program that it reads is that of a CPU")


def storage_copies(compiled):
    """The shapes of the `copy` operations as large as a leaf of the storage, or of the tree."""
    only_on_cpus()
    copies = re.findall(r"= \(?(\w+\[([\d,]+)\])\S* copy(?:-start)?\(", compiled.as_text())
    return [shape for shape, sizes in copies if math.prod(map(int, sizes.split(","))) >= CAPACITY]


def assert_in_place(compiled):
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= STORAGE_BYTES
    assert memory.temp_size_in_bytes < STORAGE_BYTES / 100
    assert storage_copies(compiled) == []


def names_of_writes(kind):
    names = ["add", "add_batch", "add_batch with mask", "update at", "update at one"]
    names += ["add, add_batch"]
    names += ["pop"] if kind == "circular" else ["add_and_sample", "sample, update"]
    if kind in HAVE_PRIORITIES:
        names += ["set_priorities", "sample, set_priorities"]
    return names


def is_part_of_another(kind, name):
    """Whether it is tried with sequences, or in `add_and_sample` or "sample, set_priorities"."""
    parts = ["set_priorities"] if kind == "circular" else ["add_batch", "set_priorities"]
    return kind == "items" or name in parts


@pytest.mark.parametrize("looped", [more(False), True], ids=["called", "in a scan"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        more(kind, name) if is_part_of_another(kind, name) else (kind, name)
        for kind in LARGE
        if kind != "streams"  # which are sequences of one
        for name in names_of_writes(kind)
    ],
)
def test_writes_do_not_touch_the_whole_storage(kind, name, looped):
    state, functions = writes(kind)
    function, args = functions[name]
    if not looped:
        compiled = jax.jit(function, donate_argnums=0).lower(state, *args).compile()
    else:

        def body(state, xs):
            out = function(state, *xs)
            return out if name in GIVE_MORE else (out, None)

        run = jax.jit(lambda s, xs: jax.lax.scan(body, s, xs, length=100), donate_argnums=0)
        compiled = run.lower(state, shapes(tuple(args), 100)).compile()
    assert_in_place(compiled)


def operations_that_write(shape, compiled):
    """The names of the XLA operations by which fusions write a float32 array of this shape."""
    only_on_cpus()
    text = compiled.as_text()
    computation = r"^%(\S+) \([^\n]*\{\n.*?ROOT \S+ = \S+ ([\w-]+)\("  # its name and last operation
    last_operation = dict(re.findall(computation, text, re.S | re.M))
    sizes = ",".join(map(str, shape))
    fusions = re.findall(rf"= f32\[{sizes}\]\S* fusion\(.*?calls=%([\w.-]+)", text)
    return {last_operation[name] for name in fusions}


@pytest.mark.slow
@pytest.mark.parametrize(
    "agents", [more(0), 1, 3], ids=["one", "a stack of one", "a stack of three"]
)
def test_the_loop_of_a_script_does_not_touch_the_whole_tree(agents):
    """A row is added, then there are draws whose priorities are set, of several agents at once."""
    replay = buffers.prioritised_replay(CAPACITY, num_envs=10, sequence_length=2)

    def draw(_, carry):
        state, key, total = carry
        key, now = jax.random.split(key)
        sample = replay.sample(state, now, 128)
        state = replay.set_priorities(state, sample.indices, jax.random.uniform(now, (128,)))
        return state, key, total + sample.probabilities.sum() + sample.experience["obs"].sum()

    def step(state, row_and_key):
        row, key = row_and_key
        state = replay.add_batch(state, row)
        state, _, total = jax.lax.fori_loop(0, 2, draw, (state, key, jnp.float32(0)))
        return state, total

    state = jax.eval_shape(replay.init, ITEM)
    if agents:
        step = jax.vmap(step, in_axes=(0, None))
        state = shapes(state, agents)
    rows = shapes(ITEM, 100, 1, 10)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 100))
    run = jax.jit(partial(jax.lax.scan, step), donate_argnums=0)
    compiled = run.lower(state, (rows, keys)).compile()
    assert_in_place(compiled)
    # XLA has other ways to write a part of the tree. With `vmap` they computed the whole of it.
    assert operations_that_write(state.tree[0].shape, compiled) == {"scatter"}


def jitted(method):
    """What `add` or `add_batch` of a buffer calls, as `jax.jit` returned it."""
    return getattr(method.__self__, f"_{method.__name__}").__wrapped__


@pytest.mark.parametrize("name", ["add", "add_batch", "add_batch with mask"])
def test_the_functions_donate_by_themselves(name):
    state, functions = writes("items")
    function, args = functions[name]
    assert_in_place(jitted(function).lower(state, *args).compile())


def test_a_copy_would_be_seen():
    state, functions = writes("items", donate=False)
    function, args = functions["add"]
    compiled = jitted(function).lower(state, *args).compile()
    assert len(storage_copies(compiled)) == len(ITEM)
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def pointers(state):
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.storage)]


@pytest.mark.parametrize("kind", KINDS)
def test_storage_stays_where_it_is(kind):
    buffer = BUFFERS[kind]
    state = buffer.init(encode(0))
    before = pointers(state)
    for name, call in calls(kind, buffer):
        if name != "update":  # of everything: it may use new memory
            for i in range(3):
                state = call(state, i)
                assert pointers(state) == before, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_donated_state_is_gone(kind):
    buffer = BUFFERS[kind]
    for name, call in calls(kind, buffer):
        state = buffer.add_batch(buffer.init(encode(0)), encode(np.zeros((5, *ENVS[kind]))))
        if call(state, 0) is state:
            assert name in ("size", "get", "can_add", "can_pop", "can_sample")
            assert buffer.size(state) > 0
        else:
            with pytest.raises(RuntimeError, match="deleted"):
                np.asarray(state.size)
            with pytest.raises((RuntimeError, ValueError), match="deleted"):
                buffer.add(state, encode(np.zeros(ENVS[kind])))


def assert_old_state_stays(buffer, functions):
    """After each of these functions the state that was given is what it was; the new one is not."""
    state = buffer.add_batch(buffer.init(encode(0)), encode([1, 2, 3]))
    before = jax.tree.map(np.array, state)
    for function in functions:
        new = jax.tree.map(np.array, function(state))
        assert_trees_equal(jax.tree.map(np.array, state), before)
        differs = jax.tree.map(np.not_equal, new, before)
        assert any(leaf.any() for leaf in jax.tree.leaves(differs))


@pytest.mark.parametrize("factory", [buffers.circular_buffer, buffers.uniform_replay])
def test_without_donation_the_old_state_stays(factory):
    buffer = factory(4, donate=False)
    batch = encode([4, 5, 6])
    functions = [
        lambda state: buffer.add(state, encode(9)),
        lambda state: buffer.add_batch(state, batch),
        lambda state: buffer.add_batch(state, batch, np.array([True, False, True])),
        lambda state: buffer.update(state, shift),
        lambda state: buffer.update(state, shift, np.array([0])),
    ]
    if factory is buffers.circular_buffer:
        functions.append(lambda state: buffer.pop(state, 1)[0])
    else:
        key = jax.random.key(0)
        functions.append(lambda state: buffer.add_and_sample(state, batch, key, 2)[0])
    assert_old_state_stays(buffer, functions)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["circular", more("items"), "streams", "prioritised"])
def test_rows_are_written_without_a_copy_of_them(kind, masked):
    buffer = LARGE[kind](CAPACITY)
    state = jax.eval_shape(buffer.init, {"image": np.zeros((32, 32, 3), np.float32)})
    row_shape = (4,) if kind == "streams" else ()
    rows = {"image": jax.ShapeDtypeStruct((16, *row_shape, 32, 32, 3), np.float32)}
    mask = [jax.ShapeDtypeStruct((16,), bool)] if masked else []
    memory = jitted(buffer.add_batch).lower(state, rows, *mask).compile().memory_analysis()
    bytes_of_images = 16 * 32 * 32 * 3 * 4
    assert memory.temp_size_in_bytes < bytes_of_images / 2


# ------------------------------------------------------------------------------ gathers, one thread


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        (np.float32, ()),
        more(np.float32, (3,)),
        more(np.uint8, ()),
        (np.uint8, (2, 2)),
        (np.bool_, ()),
    ],
)
def test_a_gather_from_a_large_array_is_a_gather(item, dtype):
    """For each shape of indices, in one program."""
    rows = 2**20
    rng = np.random.default_rng(0)
    largest = 2 if dtype == np.bool_ else 200
    x = rng.integers(0, largest, (rows, *item)).astype(dtype)

    def random_indices(shape):
        """A third are of the first or of the last row."""
        i = rng.integers(0, rows, shape)
        is_end = rng.random(shape) < 0.3
        return np.where(is_end, rng.choice([0, rows - 1], shape), i).astype(np.int32)

    several = [random_indices(shape) for shape in [(), (0,), (1,), (2,), (7,), (1, 5), (5, 3)]]
    take = jax.jit(lambda x, several: [buffers._gather(x, i) for i in several])
    assert_trees_equal(take(jnp.asarray(x), several), [x[i] for i in several])

    eager = buffers._gather(jnp.asarray(x), jnp.asarray(several[-1]))
    assert_trees_equal(eager, x[several[-1]])

    reversed_x = x[::-1]
    got = jax.vmap(take)(jnp.stack([x, reversed_x]), [np.stack([i, i]) for i in several])
    assert_trees_equal(got, [np.stack([x[i], reversed_x[i]]) for i in several])


def threads(function, *args):
    """The operations of the compiled program that XLA gives to several threads."""
    text = jax.jit(function).lower(*args).compile().as_text()
    several = re.compile(r'outer_dimension_partitions":\["[^]]')
    return [line for line in text.splitlines() if several.search(line)]


@pytest.mark.parametrize("kind", [more("items"), more("streams"), "sequences", "prioritised"])
def test_a_draw_from_large_storage_takes_one_thread(kind):
    """To wake a second thread takes longer than a draw; XLA goes by what could be drawn."""
    if not threads(lambda x, i: x[i], jnp.zeros(CAPACITY), jnp.zeros(8, int)):
        pytest.skip("a machine of one core, or another XLA: it uses one thread anyway")
    buffer = LARGE[kind](CAPACITY)
    state = jax.eval_shape(buffer.init, ITEM)
    key = jax.random.key(0)
    indices = jax.ShapeDtypeStruct((32,), np.int32)
    assert threads(lambda state, key: buffer.sample(state, key, 32), state, key) == []
    assert threads(buffer.get, state, indices) == []
