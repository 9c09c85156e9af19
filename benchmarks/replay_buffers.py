"""Microseconds of each operation of the buffers, from Python and inside lax.scan, beside peers.

    pip install -e ".[bench]" && python benchmarks/replay_buffers.py --json buffers.json

Prints the machine and the versions, then, for each buffer, operation, place and capacity, a line:
our median, least and most over interleaved repetitions, and of each peer its median, and the
median, least and greatest of its ratio to ours in the same repetition (above 1: ours is faster).
Under it what compiling that operation in a loop takes and what memory the compiled loop needs
beside the buffer, then the memory of each buffer: that of a process of its own, grown by filling
it, and at most while each operation that it has runs once.

Buffers are full, with the write position in the middle (the circular one is half full), of CartPole
transitions or, with `--item image`, of one (32, 32, 3) float32 observation. A peer that is not
installed has a cell that says so, an operation that it does not have an empty one. `--json` writes
all of it, with the time of each repetition.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from machine import MISSING, header, line, memory_bytes, table, write_json

import buffers

REPETITIONS = 15
COMPILATIONS = 5
BATCH = 256
WINDOWS = 32  # drawn at once, of LENGTH steps each, of ENVS environments
LENGTH = 8
ENVS = 8
CLUSTERS = 8
AGENTS = 4  # of which `vmap` stacks the buffers, as the compiled scripts do
REPETITION_SECONDS = 0.3  # of slow operations fewer calls are made in a repetition
# NumPy, since `main` sets how JAX dispatches, which counts only before its first array.
KEY = np.zeros(2, np.uint32)
ITEMS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "observation": np.ones(4, np.float32),
        "action": np.int32(1),
        "reward": np.float32(1),
        "next_observation": np.ones(4, np.float32),
        "terminated": np.array(False),
    },
    "image": {"observation": np.ones((32, 32, 3), np.float32)},
}


class Library(NamedTuple):
    """What one library is measured on: one of its buffers."""

    state: Any
    # By name of the operation: call(state, key, indices, priorities) -> (state, what was drawn)
    calls: dict[str, Callable[..., tuple[Any, Any]]]
    first: Callable[[Any], int] = lambda state: 0  # the least index of an item that is held


def stack(library: Library | None) -> Library | None:
    """The loop of AGENTS agents, each with a prioritised buffer of its own, under `vmap`."""
    if library is None:
        return None
    add, draw = library.calls["add 128"], library.calls["sample, set 256"]

    def of_one(state: Any, key: Any, indices: Any, priorities: Any) -> tuple[Any, Any]:
        return draw(add(state, key, indices, priorities)[0], key, indices, priorities)

    of_all = jax.jit(jax.vmap(of_one, in_axes=(0, 0, None, None)), donate_argnums=0)

    def call(state: Any, key: Any, indices: Any, priorities: Any) -> tuple[Any, Any]:
        return of_all(state, jax.random.split(key, AGENTS), indices, priorities)

    states = jax.tree.map(lambda x: jnp.stack([x] * AGENTS), library.state)
    return Library(states, {"add 128, sample, set 256": call})


def several(item: Any, count: int) -> Any:
    """That many items, of all clusters in turn."""

    def rows(x: Any) -> Any:
        cluster = (jnp.arange(count) % CLUSTERS).reshape(count, *[1] * x.ndim)
        return jnp.broadcast_to(cluster, (count, *x.shape)).astype(x.dtype)

    return jax.tree.map(rows, item)


def cluster_of(item: Any) -> Any:
    """The cluster of an item that `several` made."""
    return jnp.ravel(jax.tree.leaves(item)[0])[0].astype(jnp.int32)


def raised(item: Any) -> Any:
    """What an update changes an item to."""
    return jax.tree.map(lambda x: x ^ True if x.dtype == bool else x + 1, item)


def filled(state: Any, add_batch: Callable, block: Any, blocks: int = 15) -> Any:
    """The state after so many blocks; 15 of a tenth end in the middle of a full buffer."""
    for _ in range(blocks):
        state = add_batch(state, block)
    return state


def steps(item: Any, count: int) -> Any:
    """That many steps of ENVS environments: leaves [count, ENVS, ...]."""
    rows = several(item, count * ENVS)
    return jax.tree.map(lambda x: x.reshape(count, ENVS, *x.shape[1:]), rows)


def jitted(replay: Any) -> Any:
    """Its functions within jit, where mistakes in values are not looked for."""
    static = {"sample": 2, "pop": 1, "update": 1, "add_and_sample": 3}
    readers = {"sample", "get"}
    names = {"add", "add_batch", "set_priorities", *static, *readers}
    names = {name for name in names if getattr(replay, name, None)}
    return replay._replace(
        **{
            name: jax.jit(
                getattr(replay, name),
                static_argnums=static.get(name, ()),
                donate_argnums=() if name in readers else 0,
            )
            for name in names
        }
    )


def ours_in_jit(buffer: str, item: Any, capacity: int) -> Library | None:
    """The operations of buffers.py, called as those of Flashbax are."""
    return ours(buffer, item, capacity, jitted)


def ours(
    buffer: str, item: Any, capacity: int, wrap: Callable = lambda replay: replay
) -> Library | None:
    """The operations of buffers.py."""
    if buffer == "stack of prioritised":
        return stack(ours("prioritised", item, capacity, wrap))
    rows, mask = several(item, 128), jnp.arange(128) % 10 > 0
    block = several(item, capacity // 10)
    if buffer == "circular":
        queue = wrap(buffers.circular_buffer(capacity))

        def add_and_pop(s: Any, *_: Any) -> tuple[Any, Any]:
            return queue.pop(queue.add_batch(s, rows), 128)

        return Library(
            filled(queue.init(item), queue.add_batch, block, 5),
            {
                "add 1": lambda s, *_: (queue.add(s, item), 0),
                "add 128": lambda s, *_: (queue.add_batch(s, rows), 0),
                "add 128, pop 128": add_and_pop,
                "get 256": lambda s, _, i, __: (s, queue.get(s, i % (capacity // 2))),
            },
        )
    if buffer.endswith("windows"):
        prioritised = buffer.startswith("prioritised")
        factory = buffers.prioritised_replay if prioritised else buffers.uniform_replay
        windows: Any = wrap(factory(capacity, num_envs=ENVS, sequence_length=LENGTH))
        step = jax.tree.map(lambda x: x[0], steps(item, 1))
        return Library(
            filled(windows.init(item), windows.add_batch, steps(item, capacity // ENVS // 10)),
            {
                "add 1 step": lambda s, *_: (windows.add(s, step), 0),
                "sample 32": lambda s, key, *_: (s, windows.sample(s, key, WINDOWS)),
            },
        )
    if buffer == "clustered":
        inner = buffers.uniform_replay(capacity // CLUSTERS)
        clustered = wrap(buffers.clustered_replay(CLUSTERS, inner, cluster_of))
        return Library(
            filled(clustered.init(item), clustered.add_batch, block),
            {
                "add 1": lambda s, *_: (clustered.add(s, item), 0),
                "add 128": lambda s, *_: (clustered.add_batch(s, rows), 0),
                "sample 256": lambda s, key, *_: (s, clustered.sample(s, key, BATCH)),
            },
        )
    per = buffer == "prioritised"
    replay: Any = wrap((buffers.prioritised_replay if per else buffers.uniform_replay)(capacity))

    def sample_and_set(s: Any, key: Any, _: Any, priorities: Any) -> tuple[Any, Any]:
        drawn = replay.sample(s, key, BATCH)
        return replay.set_priorities(s, drawn.indices, priorities), drawn

    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (replay.add(s, item), 0),
        "add 128": lambda s, *_: (replay.add_batch(s, rows), 0),
        "add 128, masked": lambda s, *_: (replay.add_batch(s, rows, mask), 0),
        "sample 256": lambda s, key, *_: (s, replay.sample(s, key, BATCH)),
        "add 128 and sample 256": lambda s, key, *_: replay.add_and_sample(s, rows, key, BATCH),
        "get 256": lambda s, _, i, __: (s, replay.get(s, i)),
        "update 256": lambda s, _, i, __: (replay.update(s, raised, i), 0),
        "update all": lambda s, *_: (replay.update(s, raised), 0),
    }
    if per:
        calls |= {
            "set 256": lambda s, _, i, p: (replay.set_priorities(s, i, p), 0),
            "sample, set 256": sample_and_set,
        }
    return Library(
        filled(replay.init(item), replay.add_batch, block),
        calls,
        lambda s: int(s.cursor - s.size),
    )


def flashbax(buffer: str, item: Any, capacity: int) -> Library | None:
    """Flashbax's buffers, jitted and with the state donated, as its README does."""
    import flashbax as fbx

    if buffer == "stack of prioritised":
        return stack(flashbax("prioritised", item, capacity))
    rows, one = several(item, 128), several(item, 1)

    def compiled(functions: Any) -> tuple[Callable, Callable]:
        return jax.jit(functions.add, donate_argnums=0), jax.jit(functions.sample)

    if buffer == "circular":
        # [1, T, ...]: one environment, whose steps are the items.
        time_major = partial(jax.tree.map, lambda x: x[None])
        queue = fbx.make_trajectory_queue(capacity, 1, 128, 128)
        add, _ = compiled(queue)
        pop = jax.jit(queue.sample, donate_argnums=0)

        def add_and_pop(s: Any, *_: Any) -> tuple[Any, Any]:
            return pop(add(s, time_major(rows)))

        state = filled(queue.init(item), add, time_major(several(item, capacity // 10)), 5)
        return Library(state, {"add 128, pop 128": add_and_pop})
    if buffer.endswith("windows"):
        sizes: Any = dict(
            add_batch_size=ENVS,
            sample_batch_size=WINDOWS,
            sample_sequence_length=LENGTH,
            period=1,
            min_length_time_axis=LENGTH,
            max_size=capacity,
        )
        prioritised = buffer.startswith("prioritised")
        make: Any = (
            fbx.make_prioritised_trajectory_buffer if prioritised else fbx.make_trajectory_buffer
        )
        windows = make(**sizes)
        add, sample = compiled(windows)
        batch_major = partial(jax.tree.map, lambda x: jnp.swapaxes(x, 0, 1))
        step = batch_major(steps(item, 1))
        block = batch_major(steps(item, capacity // ENVS // 10))
        return Library(
            filled(windows.init(item), add, block),
            {
                "add 1 step": lambda s, *_: (add(s, step), 0),
                "sample 32": lambda s, key, *_: (s, sample(s, key)),
            },
        )
    if buffer == "clustered":
        return None
    sizes = dict(max_length=capacity, min_length=1, sample_batch_size=BATCH, add_batches=True)
    if buffer == "prioritised":
        replay: Any = fbx.make_prioritised_item_buffer(**sizes, priority_exponent=0.6)
    else:
        replay = fbx.make_item_buffer(**sizes)
    add, sample = compiled(replay)
    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (add(s, one), 0),
        "add 128": lambda s, *_: (add(s, rows), 0),
        "sample 256": lambda s, key, *_: (s, sample(s, key)),
    }
    if buffer == "prioritised":
        put = jax.jit(replay.set_priorities, donate_argnums=0)

        def sample_and_set(s: Any, key: Any, _: Any, priorities: Any) -> tuple[Any, Any]:
            drawn = sample(s, key)
            return put(s, drawn.indices, priorities), drawn

        calls |= {
            "set 256": lambda s, _, i, p: (put(s, i, p), 0),
            "sample, set 256": sample_and_set,
        }
    return Library(filled(replay.init(item), add, several(item, capacity // 10)), calls)


def dejax(buffer: str, item: Any, capacity: int) -> Library | None:
    """Its buffers, patched for today's JAX: without jnp.alltrue, and checks left in jit."""
    if buffer not in ("uniform", "clustered"):
        return None
    import dejax as library
    from dejax import circular_buffer, clustered, uniform

    no_checks = types.SimpleNamespace(check=lambda *_: None)
    circular_buffer.checkify = uniform.checkify = clustered.checkify = no_checks
    circular_buffer.jnp = types.SimpleNamespace(alltrue=jnp.all, logical_and=jnp.logical_and)
    rows = several(item, 128)
    if buffer == "clustered":
        inner = library.uniform_replay(capacity // CLUSTERS)
        replay = library.clustered_replay(CLUSTERS, inner, cluster_of)
    else:
        replay = library.uniform_replay(capacity)
    add, add_batch = (jax.jit(f, donate_argnums=0) for f in (replay.add_fn, replay.add_batch_fn))
    sample = jax.jit(replay.sample_fn, static_argnums=2)
    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (add(s, item), 0),
        "add 128": lambda s, *_: (add_batch(s, rows), 0),
        "sample 256": lambda s, key, *_: (s, sample(s, key, BATCH)),
    }
    if buffer == "uniform":
        update = jax.jit(replay.update_fn, static_argnums=1, donate_argnums=0)
        calls |= {"update all": lambda s, *_: (update(s, raised), 0)}
        block = several(item, capacity // 10)
        return Library(filled(replay.init_fn(item), add_batch, block), calls)
    # Filled directly: an add copies a cluster, so that filling would take minutes.
    state = replay.init_fn(item)
    inside = state.cluster_state_batch.storage
    middle = jnp.full(CLUSTERS, capacity // CLUSTERS // 2)
    full = inside.replace(
        head=middle.astype(inside.head.dtype),
        tail=jnp.copy(middle).astype(inside.tail.dtype),
        full=jnp.ones(CLUSTERS, bool),
    )
    return Library(
        state.replace(cluster_state_batch=state.cluster_state_batch.replace(storage=full)), calls
    )


def numpy_of(item: Any) -> dict[str, np.ndarray]:
    """An item for libraries that are not of JAX."""
    return {name: np.asarray(x) for name, x in item.items()}


def naive_numpy(buffer: str, item: Any, capacity: int) -> Library | None:
    """What one writes by hand: an array for each field, `%`, and a cumulative sum of priorities."""
    if buffer not in ("circular", "uniform", "prioritised"):
        return None
    one, rows = numpy_of(item), numpy_of(several(item, 128))
    storage = {k: np.zeros((capacity, *x.shape), x.dtype) for k, x in one.items()}
    for field in storage.values():
        field[:] = 1
    per, half = buffer == "prioritised", capacity // 2
    weights, rng = np.ones(capacity if per else 0), np.random.default_rng(0)
    cursor, oldest, size = half, 0, half if buffer == "circular" else capacity

    def add(items: dict[str, np.ndarray], count: int) -> Any:
        nonlocal cursor, size, oldest
        slots = cursor if count == 1 else (cursor + np.arange(count)) % capacity
        for name, x in items.items():
            storage[name][slots] = x
        if per:
            weights[slots] = 1
        cursor, size = (cursor + count) % capacity, min(size + count, capacity)

    def get(slots: Any) -> dict[str, np.ndarray]:
        return {name: x[slots] for name, x in storage.items()}

    def pop(count: int) -> dict[str, np.ndarray]:
        nonlocal oldest, size
        items = get((oldest + np.arange(count)) % capacity)
        oldest, size = (oldest + count) % capacity, size - count
        return items

    def draw() -> np.ndarray:
        if not per:
            return rng.integers(size, size=BATCH)
        sums = np.cumsum(weights)
        return np.searchsorted(sums, rng.random(BATCH) * sums[-1], side="right") % capacity

    def update(slots: Any) -> Any:
        for x in storage.values():
            x[slots] = ~x[slots] if x.dtype == bool else x[slots] + 1

    def put(slots: Any, priorities: Any) -> Any:
        weights[slots % capacity] = priorities**0.6

    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (s, add(one, 1)),
        "add 128": lambda s, *_: (s, add(rows, 128)),
    }
    if buffer == "circular":
        calls |= {
            "add 128, pop 128": lambda s, *_: (s, (add(rows, 128), pop(128))),
            "get 256": lambda s, _, i, __: (s, get((oldest + i % half) % capacity)),
        }
    else:
        calls |= {
            "sample 256": lambda s, *_: (s, get(draw())),
            "add 128 and sample 256": lambda s, *_: (s, (add(rows, 128), get(draw()))),
            "get 256": lambda s, _, i, __: (s, get(i % capacity)),
            "update 256": lambda s, _, i, __: (s, update(i % capacity)),
            "update all": lambda s, *_: (s, update(slice(None))),
        }
    if per:
        calls |= {
            "set 256": lambda s, _, i, p: (s, put(i, p)),
            "sample, set 256": lambda s, _, __, p: (s, put(draw(), p)),
        }
    return Library((storage, weights), calls)


class Naive(NamedTuple):
    """The state of `naive_jax`."""

    storage: Any  # [capacity, ...]
    weights: Any  # [capacity]
    cursor: Any
    oldest: Any
    size: Any


def naive_jax(buffer: str, item: Any, capacity: int) -> Library | None:
    """What one writes by hand: `.at[slots].set`, and a cumulative sum of priorities."""
    if buffer not in ("circular", "uniform", "prioritised"):
        return None
    rows, per, half = several(item, 128), buffer == "prioritised", capacity // 2

    def add_rows(s: Naive, items: Any) -> Naive:
        count = len(jax.tree.leaves(items)[0])
        slots = (s.cursor + jnp.arange(count)) % capacity
        return s._replace(
            storage=jax.tree.map(lambda x, y: x.at[slots].set(y), s.storage, items),
            weights=s.weights.at[slots].set(1.0) if per else s.weights,
            cursor=(s.cursor + count) % capacity,
            size=jnp.minimum(s.size + count, capacity),
        )

    def get_rows(s: Naive, slots: Any) -> Any:
        return jax.tree.map(lambda x: x[slots], s.storage)

    def draw(s: Naive, key: Any) -> Any:
        if not per:
            slots = jax.random.randint(key, (BATCH,), 0, s.size)
        else:
            sums = jnp.cumsum(s.weights)
            targets = jax.random.uniform(key, (BATCH,)) * sums[-1]
            slots = jnp.searchsorted(sums, targets, side="right") % capacity
        return slots, get_rows(s, slots)

    def pop_rows(s: Naive) -> tuple[Naive, Any]:
        items = get_rows(s, (s.oldest + jnp.arange(128)) % capacity)
        return s._replace(oldest=(s.oldest + 128) % capacity, size=s.size - 128), items

    def update_rows(s: Naive, slots: Any) -> Naive:
        changed = raised(get_rows(s, slots))
        return s._replace(storage=jax.tree.map(lambda x, y: x.at[slots].set(y), s.storage, changed))

    def put_rows(s: Naive, slots: Any, priorities: Any) -> Naive:
        return s._replace(weights=s.weights.at[slots % capacity].set(priorities**0.6))

    writer = partial(jax.jit, donate_argnums=0)
    add, pop, update, put = (writer(f) for f in (add_rows, pop_rows, update_rows, put_rows))
    update_all = writer(lambda s: s._replace(storage=raised(s.storage)))
    add_and_sample = writer(lambda s, items, key: ((n := add_rows(s, items)), draw(n, key)))
    get, sample = jax.jit(get_rows), jax.jit(draw)
    one = jax.tree.map(lambda x: x[None], item)

    def sample_and_set(s: Any, key: Any, _: Any, priorities: Any) -> tuple[Any, Any]:
        slots, items = sample(s, key)
        return put(s, slots, priorities), items

    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (add(s, one), 0),
        "add 128": lambda s, *_: (add(s, rows), 0),
    }
    if buffer == "circular":
        calls |= {
            "add 128, pop 128": lambda s, *_: pop(add(s, rows)),
            "get 256": lambda s, _, i, __: (s, get(s, (s.oldest + i % half) % capacity)),
        }
    else:
        calls |= {
            "sample 256": lambda s, key, *_: (s, sample(s, key)),
            "add 128 and sample 256": lambda s, key, *_: add_and_sample(s, rows, key),
            "get 256": lambda s, _, i, __: (s, get(s, i % capacity)),
            "update 256": lambda s, _, i, __: (update(s, i % capacity), 0),
            "update all": lambda s, *_: (update_all(s), 0),
        }
    if per:
        calls |= {
            "set 256": lambda s, _, i, p: (put(s, i, p), 0),
            "sample, set 256": sample_and_set,
        }
    state = Naive(
        storage=jax.tree.map(lambda x: jnp.ones((capacity, *x.shape), x.dtype), item),
        weights=jnp.ones(capacity if per else 0),
        cursor=jnp.int32(half),
        oldest=jnp.int32(0),
        size=jnp.int32(half if buffer == "circular" else capacity),
    )
    return Library(state, calls)


def stable_baselines3(buffer: str, item: Any, capacity: int) -> Library | None:
    """Its ReplayBuffer of one environment; `add 128` is one of 128 environments."""
    if buffer != "uniform":
        return None
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    observation = numpy_of(item)["observation"]
    box = gym.spaces.Box(-1.0, 1.0, observation.shape)
    states: dict[int, Any] = {}
    rows: dict[int, tuple] = {}
    for envs in (1, 128):
        replay = ReplayBuffer(capacity, box, gym.spaces.Discrete(2), n_envs=envs, device="cpu")
        replay.pos, replay.full = replay.buffer_size // 2, True
        for field in vars(replay).values():
            if isinstance(field, np.ndarray):
                field[:] = 1  # memory that was never written to reads faster than other memory
        x = np.tile(observation, (envs, *[1] * observation.ndim))
        zeros = np.zeros(envs)
        states[envs], rows[envs] = replay, (x, x, zeros.astype(int), zeros, zeros, [{}] * envs)
    return Library(
        states,
        {
            "add 1": lambda s, *_: (s, s[1].add(*rows[1])),
            "add 128": lambda s, *_: (s, s[128].add(*rows[128])),
            "sample 256": lambda s, *_: (s, s[1].sample(BATCH)),
        },
    )


def cpprb(buffer: str, item: Any, capacity: int) -> Library | None:
    """Its ReplayBuffer and PrioritizedReplayBuffer, in C++."""
    if buffer not in ("uniform", "prioritised"):
        return None
    import cpprb as library

    one, rows = numpy_of(item), numpy_of(several(item, 128))
    shapes: Any = {
        name: {"shape": x.shape, "dtype": x.dtype} if x.shape else {"dtype": x.dtype}
        for name, x in one.items()
    }
    per = buffer == "prioritised"
    if per:
        replay = library.PrioritizedReplayBuffer(capacity, shapes, alpha=0.6)
    else:
        replay = library.ReplayBuffer(capacity, shapes)
    block = numpy_of(several(item, capacity // 10))
    for _ in range(15):
        replay.add(**block)

    def draw() -> dict[str, np.ndarray]:
        return replay.sample(BATCH, beta=0.4) if per else replay.sample(BATCH)

    calls: dict[str, Callable] = {
        "add 1": lambda s, *_: (s, replay.add(**one)),
        "add 128": lambda s, *_: (s, replay.add(**rows)),
        "sample 256": lambda s, *_: (s, draw()),
    }
    if per:
        calls |= {
            "set 256": lambda s, _, i, p: (s, replay.update_priorities(i % capacity, p)),
            "sample, set 256": lambda s, _, __, p: (
                s,
                replay.update_priorities(draw()["indexes"], p),
            ),
        }
    return Library(replay, calls)


def memcpy(buffer: str, item: Any, capacity: int) -> Library | None:
    """What the machine does at most: as many bytes as are drawn, copied from one place."""
    if buffer not in ("uniform", "prioritised"):
        return None
    size = sum(x.nbytes for x in jax.tree.leaves(item))
    storage = np.ones((capacity, size), np.uint8)
    out = np.ones((BATCH, size), np.uint8)

    def copy(s: Any, _: Any, indices: Any, __: Any) -> tuple[Any, Any]:
        first = indices[0] % (capacity - BATCH)
        np.copyto(out, storage[first : first + BATCH])
        return s, 0

    return Library(storage, {"sample 256": copy})


BUFFERS = (
    "circular",
    "uniform",
    "prioritised",
    "uniform windows",
    "prioritised windows",
    "stack of prioritised",
    "clustered",
)
LIBRARIES: dict[str, Callable[[str, Any, int], Library | None]] = {
    "ours": ours,
    "ours_in_jit": ours_in_jit,
    "naive_jax": naive_jax,
    "naive_numpy": naive_numpy,
    "flashbax": flashbax,
    "dejax": dejax,
    "stable_baselines3": stable_baselines3,
    "cpprb": cpprb,
    "memcpy": memcpy,
}
OWN = {"ours", "ours_in_jit", "naive_jax", "naive_numpy", "memcpy"}
NUMPY = {"naive_numpy", "stable_baselines3", "cpprb", "memcpy"}
ONLY_FROM_PYTHON = NUMPY | {"ours_in_jit"}  # inside scan all is in jit


def arguments(library: str, state: Library, capacity: int, count: int) -> Any:
    """Keys [count], indices of items held and priorities [count, B], for as many calls."""
    first = state.first(state.state)
    indices = jax.random.randint(KEY, (count, BATCH), first, first + capacity)
    priorities = jnp.abs(jax.random.normal(KEY, (count, BATCH))) + 1e-6
    calls = jax.block_until_ready((jax.random.split(KEY, count), indices, priorities))
    return jax.device_get(calls) if library in NUMPY else calls


def from_python(call: Callable, state: Any, calls: Any) -> tuple[Any, float]:
    """The state after these calls, and microseconds a call."""
    drawn: Any = 0
    calls = list(zip(*map(list, calls), strict=True))
    start = time.perf_counter()
    for each in calls:
        state, drawn = call(state, *each)
    jax.block_until_ready((state, drawn))
    return state, (time.perf_counter() - start) / len(calls) * 1e6


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def scanned(call: Callable, state: Any, calls: Any) -> Any:
    """All calls in one program, which uses all that they draw."""

    def step(state: Any, each: Any) -> tuple[Any, Any]:
        state, drawn = call(state, *each)
        leaves = map(jnp.asarray, jax.tree.leaves(drawn))
        return state, sum(jnp.sum(x.astype(jnp.float32)) for x in leaves)

    return jax.lax.scan(step, state, calls)


def inside_scan(call: Callable, state: Any, calls: Any) -> tuple[Any, float]:
    """As `from_python`, inside `scan`."""
    start = time.perf_counter()
    state, _ = jax.block_until_ready(scanned(call, state, calls))
    return state, (time.perf_counter() - start) / len(calls[0]) * 1e6


def calls_a_repetition(microseconds: float, most: int) -> int:
    """As many calls as a repetition has the time for: all, a tenth, or two."""
    fits = (n for n in (most, most // 10) if n * microseconds < REPETITION_SECONDS * 1e6)
    return next(fits, 2)


def measure(
    operation: str,
    libraries: dict[str, Library],
    how: Callable,
    most: int,
    capacity: int,
    repetitions: int,
) -> dict[str, list[float]]:
    """Microseconds of each repetition of one operation, for each library that has it."""
    left_out = ONLY_FROM_PYTHON - {"memcpy"} if how is inside_scan else set()
    measured = [k for k, v in libraries.items() if operation in v.calls and k not in left_out]
    times: dict[str, list[float]] = {library: [] for library in measured}

    def repeat(library: str, count: int) -> float:
        own = libraries[library]
        each = arguments(library, own, capacity, count)
        run = from_python if library == "memcpy" else how
        state, microseconds = run(own.calls[operation], own.state, each)
        libraries[library] = own._replace(state=state)
        return microseconds

    counts = {}
    for library in measured:
        repeat(library, 2)  # compiles
        counts[library] = calls_a_repetition(repeat(library, 2), most)
        repeat(library, counts[library])  # compiles the loop of that length
    for _ in range(repetitions):
        for library in measured:
            times[library].append(repeat(library, counts[library]))
    return times


def compile_cost(
    operation: str, libraries: dict[str, Library], capacity: int
) -> dict[str, tuple[list[float], int]]:
    """Of each library in JAX: seconds to trace and compile a loop of it, and bytes it needs.

    The bytes are those beside its arguments and results: more than a few are a copy of something.
    """
    names = [k for k, v in libraries.items() if operation in v.calls and k not in ONLY_FROM_PYTHON]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    needed = dict.fromkeys(names, 0)
    for _ in range(COMPILATIONS):
        for name in names:
            own = libraries[name]
            each = arguments(name, own, capacity, 20)
            jax.clear_caches()
            start = time.perf_counter()
            program = scanned.lower(own.calls[operation], own.state, each).compile()
            seconds[name].append(time.perf_counter() - start)
            analysis: Any = program.memory_analysis()  # None where a device has no such thing
            needed[name] = analysis.temp_size_in_bytes if analysis else 0
    return {name: (seconds[name], needed[name]) for name in names}


def resident(peak: bool = False) -> int:
    """Bytes of physical memory of this process, now or at most so far; Linux only."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith(field))


def settled() -> int:
    """`resident`, once what is free has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident()


def memory(library: str, buffer: str, item: str, capacity: int) -> dict[str, int]:
    """Bytes that a full buffer takes in this process, which must be new, and at most while used."""

    def make() -> Library:
        own = LIBRARIES[library](buffer, jax.tree.map(jnp.asarray, ITEMS[item]), capacity)
        if own is None:
            raise ValueError(f"{library} has no {buffer} buffer")
        if library == "stable_baselines3":  # the second one, of 128 environments, does not count
            del own.state[128], own.calls["add 128"]
        return own

    def use(own: Library) -> Library:
        for call in own.calls.values():
            each: Any = [x[0] for x in arguments(library, own, capacity, 1)]
            state, drawn = jax.block_until_ready(call(own.state, *each))
            own = own._replace(state=state)
            del drawn
        return own

    use(make())  # loads and compiles what a first use does
    before = settled()
    own = make()
    held = settled() - before
    arrays = [x for x in jax.tree.leaves(own.state) if isinstance(x, jax.Array | np.ndarray)]
    size = sum(x.nbytes for x in arrays)
    del arrays
    own = use(own)  # compiles, which takes memory as well
    settled()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    use(own)
    return {"arrays": size, "resident": held, "peak": resident(peak=True) - before}


def memory_of_each(buffer: str, item: str, capacity: int, names: list[str]) -> dict[str, Any]:
    """`memory` of each library, each in a process of its own."""
    found: dict[str, Any] = {}
    for name in names:
        command = [sys.executable, __file__, "--memory-of", name, buffer, item, str(capacity)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"memory of {name}, {buffer}: {done.stderr.strip()[-300:]}", file=sys.stderr)
        else:
            found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def ratios(theirs: list[float], own: list[float]) -> list[float]:
    """Theirs divided by ours, repetition by repetition."""
    return [x / y for x, y in zip(theirs, own, strict=True)]


def cells(times: dict[str, list[float]], peers: list[str], missing: set[str]) -> list[str]:
    """Our time; of each peer its median, and its ratio to ours."""
    row = [spread(times["ours"])]
    for peer in peers:
        if peer in missing:
            row += [MISSING, ""]
        elif peer in times:
            both = ratios(times[peer], times["ours"])
            row += [f"{statistics.median(times[peer]):.2f}", spread(both)]
        else:
            row += ["", ""]
    return row


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="measure only buffers whose name starts so")
    parser.add_argument("--item", nargs="+", choices=ITEMS, default=["cartpole"])
    parser.add_argument("--capacities", nargs="*", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--peers", nargs="*", choices=LIBRARIES, help="only these beside ours")
    parser.add_argument("--times-only", action="store_true", help="no compile times, no memory")
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    parser.add_argument("--memory-of", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument(
        "--async-dispatch",
        action="store_true",
        help="JAX's default on CPUs; without it programs run in the thread that calls them, as "
        "the scripts of this repository have it",
    )
    args = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", args.async_dispatch)
    if args.memory_of:
        library, buffer, item, capacity = args.memory_of
        print(json.dumps(memory(library, buffer, item, int(capacity))))
        return
    multiple = 10 * ENVS
    for capacity in args.capacities:
        if capacity % multiple:
            near = max(multiple, round(capacity / multiple) * multiple)
            parser.error(f"--capacities: multiples of {multiple}, got {capacity}: use {near}")
    peers = [name for name in LIBRARIES if name != "ours" and name in (args.peers or LIBRARIES)]
    missing = {name for name in peers if name not in OWN and not importlib.util.find_spec(name)}
    for name in sorted(missing):
        print(f"{name} is not installed: pip install -e '.[bench]'")
    packages = ["jax", "jaxlib", "numpy", *(name for name in peers if name not in OWN)]
    text, about = header(packages)
    about["machine"]["device"] = jax.devices()[0].device_kind
    about["machine"]["dispatch"] = "asynchronous" if args.async_dispatch else "synchronous"
    print(f"{text}device {about['machine']['device']}, {about['machine']['dispatch']} dispatch")
    print("microseconds, by capacity and item\n")
    heads = ["buffer", "operation", "from", "item", "capacity", "ours"]
    print(table([*heads, *(x for peer in peers for x in (peer, "ratio"))], []))
    costs: list[dict[str, Any]] = []
    times_of: list[dict[str, Any]] = []
    memory_rows: list[dict[str, Any]] = []
    for item_name, capacity in ((i, c) for i in args.item for c in args.capacities):
        item = jax.tree.map(jnp.asarray, ITEMS[item_name])
        size = capacity * sum(x.nbytes for x in jax.tree.leaves(item))
        if 13 * size > memory_bytes():
            print(f"left out: {capacity:,} of {item_name} take {13 * size / 1e9:.0f} GB in all")
            continue
        for buffer in (name for name in BUFFERS if name.startswith(args.only)):
            at = {"buffer": buffer, "item": item_name, "capacity": capacity}
            present = [name for name in ("ours", *peers) if name not in missing]
            made = {name: LIBRARIES[name](buffer, item, capacity) for name in present}
            libraries = {name: library for name, library in made.items() if library}
            for operation in libraries["ours"].calls:
                if not args.times_only:
                    cost = compile_cost(operation, libraries, capacity)
                    costs += [
                        at
                        | {"operation": operation, "library": name}
                        | {"seconds": seconds, "bytes": needed}
                        for name, (seconds, needed) in cost.items()
                    ]
                    # What would take the memory of the machine is not run.
                    for name, (_, needed) in cost.items():
                        if needed > memory_bytes() / 4:
                            del libraries[name].calls[operation]
                for how, where, count in ((from_python, "Python", 300), (inside_scan, "scan", 500)):
                    times = measure(operation, libraries, how, count, capacity, args.repetitions)
                    row = [buffer, operation, where, item_name, f"{capacity:,}"]
                    print(line([*row, *cells(times, peers, missing)]), flush=True)
                    times_of += [
                        at
                        | {"operation": operation, "from": where, "library": name, "times": each}
                        | {"median": statistics.median(each)}
                        | {"ratio": statistics.median(ratios(each, times["ours"]))}
                        for name, each in times.items()
                    ]
            names = list(libraries)
            del made, libraries
            gc.collect()
            if not args.times_only and Path("/proc/self/clear_refs").exists():
                in_process = [name for name in names if name not in ("ours_in_jit", "memcpy")]
                for name, found in memory_of_each(buffer, item_name, capacity, in_process).items():
                    memory_rows.append(at | {"library": name} | found)
    if costs:
        print(
            "\nA loop of the operation inside scan: to trace and compile, and beside its buffer\n"
        )
        print(
            table(
                ["buffer", "operation", "item", "capacity", "library", "seconds", "MB"],
                (
                    [
                        *(str(c[k]) for k in ("buffer", "operation", "item")),
                        f"{c['capacity']:,}",
                        c["library"],
                        spread(c["seconds"]),
                        f"{c['bytes'] / 1e6:.2f}",
                    ]
                    for c in costs
                ),
            )
        )
    if memory_rows:
        print("\nMB of a full buffer: of its arrays, of its process, and at most while used\n")
        kinds = ("arrays", "resident", "peak")
        print(
            table(
                ["buffer", "item", "capacity", "library", *kinds],
                (
                    [m["buffer"], m["item"], f"{m['capacity']:,}", m["library"]]
                    + [f"{m[kind] / 1e6:.1f}" if m[kind] else "" for kind in kinds]
                    for m in memory_rows
                ),
            )
        )
    measured = {"microseconds": times_of, "compile": costs, "memory": memory_rows}
    write_json(args.json, about | measured)


if __name__ == "__main__":
    main()
