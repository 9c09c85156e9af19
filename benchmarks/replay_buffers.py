"""Microseconds of each operation of the buffers, from Python and inside lax.scan, beside peers.

    pip install -e ".[bench]" && python benchmarks/replay_buffers.py

Prints a table with a line for each operation, place and capacity: the median of interleaved
repetitions, and of a peer the median, smallest and largest ratio to ours in the same repetition
(above 1: ours is faster). Buffers are full, with the write position in the middle, of CartPole
transitions or, with `--item image`, of one (32, 32, 3) float32 observation. A peer that is not
installed is left out, and the output says so.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
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

import buffers

REPETITIONS = 15
BATCH = 256
# NumPy, since `main` sets how JAX dispatches, which counts only before its first array.
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
    """What one library is measured on."""

    states: dict[str, Any]  # of each buffer, by its name; replaced as it is written to
    # By name of the buffer and of the operation:
    # call(state, key, indices, priorities) -> (state, what was drawn)
    calls: dict[tuple[str, str], Callable[..., tuple[Any, Any]]]


def several(item: Any, count: int) -> Any:
    """That many items."""
    return jax.tree.map(lambda x: jnp.tile(x, (count, *[1] * x.ndim)), item)


def full(item: Any, init: Callable, add_batch: Callable, capacity: int) -> Any:
    """The state of a full buffer with the write position in the middle, written in blocks."""
    state, block = init(item), several(item, capacity // 10)
    for _ in range(15):
        state = add_batch(state, block)
    return state


def jitted(replay: Any) -> Any:
    """Its functions within jit, where mistakes in values are not looked for."""
    in_jit = replay._replace(
        add=jax.jit(replay.add, donate_argnums=0),
        add_batch=jax.jit(replay.add_batch, donate_argnums=0),
        sample=jax.jit(replay.sample, static_argnums=2),
    )
    if not hasattr(replay, "set_priorities"):
        return in_jit
    return in_jit._replace(set_priorities=jax.jit(replay.set_priorities, donate_argnums=0))


def ours_in_jit(item: Any, capacity: int) -> Library:
    """The operations of buffers.py, called as those of Flashbax are."""
    return ours(item, capacity, jitted)


def ours(item: Any, capacity: int, wrap: Callable = lambda replay: replay) -> Library:
    """The operations of buffers.py."""
    rows, mask = several(item, 128), jnp.arange(128) % 10 > 0
    uniform = wrap(buffers.uniform_replay(capacity))
    per = wrap(buffers.prioritised_replay(capacity))

    def sample_and_set(state: Any, key: Any, _: Any, priorities: Any) -> tuple[Any, Any]:
        drawn = per.sample(state, key, BATCH)
        return per.set_priorities(state, drawn.indices, priorities), drawn

    return Library(
        {
            "uniform": full(item, uniform.init, uniform.add_batch, capacity),
            "prioritised": full(item, per.init, per.add_batch, capacity),
        },
        {
            ("uniform", "add 1"): lambda s, *_: (uniform.add(s, item), 0),
            ("uniform", "add 128"): lambda s, *_: (uniform.add_batch(s, rows), 0),
            ("uniform", "add 128, masked"): lambda s, *_: (uniform.add_batch(s, rows, mask), 0),
            ("uniform", "sample 256"): lambda s, key, *_: (s, uniform.sample(s, key, BATCH)),
            ("prioritised", "add 1"): lambda s, *_: (per.add(s, item), 0),
            ("prioritised", "add 128"): lambda s, *_: (per.add_batch(s, rows), 0),
            ("prioritised", "sample 256"): lambda s, key, *_: (s, per.sample(s, key, BATCH)),
            ("prioritised", "set 256"): lambda s, _, i, p: (per.set_priorities(s, i, p), 0),
            ("prioritised", "sample, set 256"): sample_and_set,
        },
    )


def flashbax(item: Any, capacity: int) -> Library:
    """Flashbax's item buffers, jitted and with the state donated, as its README does."""
    import flashbax as fbx

    rows, one = several(item, 128), several(item, 1)
    sizes: Any = dict(max_length=capacity, min_length=1, sample_batch_size=BATCH, add_batches=True)
    uniform = fbx.make_item_buffer(**sizes)
    per = fbx.make_prioritised_item_buffer(**sizes, priority_exponent=0.6)
    uniform_add, per_add = (jax.jit(b.add, donate_argnums=0) for b in (uniform, per))
    uniform_sample, per_sample = jax.jit(uniform.sample), jax.jit(per.sample)
    per_set = jax.jit(per.set_priorities, donate_argnums=0)

    def sample_and_set(state: Any, key: Any, _: Any, priorities: Any) -> tuple[Any, Any]:
        drawn = per_sample(state, key)
        return per_set(state, drawn.indices, priorities), drawn

    return Library(
        {
            "uniform": full(item, uniform.init, uniform_add, capacity),
            "prioritised": full(item, per.init, per_add, capacity),
        },
        {
            ("uniform", "add 1"): lambda s, *_: (uniform_add(s, one), 0),
            ("uniform", "add 128"): lambda s, *_: (uniform_add(s, rows), 0),
            ("uniform", "sample 256"): lambda s, key, *_: (s, uniform_sample(s, key)),
            ("prioritised", "add 1"): lambda s, *_: (per_add(s, one), 0),
            ("prioritised", "add 128"): lambda s, *_: (per_add(s, rows), 0),
            ("prioritised", "sample 256"): lambda s, key, *_: (s, per_sample(s, key)),
            ("prioritised", "set 256"): lambda s, _, i, p: (per_set(s, i, p), 0),
            ("prioritised", "sample, set 256"): sample_and_set,
        },
    )


def dejax(item: Any, capacity: int) -> Library:
    """Its uniform buffer, patched for today's JAX: without jnp.alltrue, and checks left in jit."""
    import dejax as library
    from dejax import circular_buffer, uniform

    no_checks = types.SimpleNamespace(check=lambda *_: None)
    circular_buffer.checkify = uniform.checkify = no_checks
    circular_buffer.jnp = types.SimpleNamespace(alltrue=jnp.all, logical_and=jnp.logical_and)
    rows = several(item, 128)
    buffer = library.uniform_replay(capacity)
    add, add_batch = (jax.jit(f, donate_argnums=0) for f in (buffer.add_fn, buffer.add_batch_fn))
    sample = jax.jit(buffer.sample_fn, static_argnums=2)
    return Library(
        {"uniform": full(item, buffer.init_fn, add_batch, capacity)},
        {
            ("uniform", "add 1"): lambda s, *_: (add(s, item), 0),
            ("uniform", "add 128"): lambda s, *_: (add_batch(s, rows), 0),
            ("uniform", "sample 256"): lambda s, key, *_: (s, sample(s, key, BATCH)),
        },
    )


def numpy_of(item: Any) -> dict[str, np.ndarray]:
    """An item for libraries that are not of JAX."""
    return {name: np.asarray(x) for name, x in item.items()}


def stable_baselines3(item: Any, capacity: int) -> Library:
    """Its ReplayBuffer of one environment; `add 128` is one of 128 environments."""
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    observation = numpy_of(item)["observation"]
    box = gym.spaces.Box(-1.0, 1.0, observation.shape)
    states, rows = {}, {}
    for envs in (1, 128):
        buffer = ReplayBuffer(capacity, box, gym.spaces.Discrete(2), n_envs=envs, device="cpu")
        buffer.pos, buffer.full = buffer.buffer_size // 2, True
        x = np.tile(observation, (envs, *[1] * observation.ndim))
        zeros = np.zeros(envs)
        states[envs], rows[envs] = buffer, (x, x, zeros.astype(int), zeros, zeros, [{}] * envs)

    def add(envs: int) -> Callable:
        return lambda s, *_: (s, states[envs].add(*rows[envs]))

    return Library(
        {"uniform": states},
        {
            ("uniform", "add 1"): add(1),
            ("uniform", "add 128"): add(128),
            ("uniform", "sample 256"): lambda s, *_: (s, states[1].sample(BATCH)),
        },
    )


def cpprb(item: Any, capacity: int) -> Library:
    """Its ReplayBuffer and PrioritizedReplayBuffer, in C++."""
    import cpprb as library

    one = numpy_of(item)
    rows = {name: np.tile(x, (128, *[1] * x.ndim)) for name, x in one.items()}
    shapes: Any = {
        name: {"shape": x.shape, "dtype": x.dtype} if x.shape else {"dtype": x.dtype}
        for name, x in one.items()
    }
    uniform = library.ReplayBuffer(capacity, shapes)
    per = library.PrioritizedReplayBuffer(capacity, shapes, alpha=0.6)
    for buffer in (uniform, per):
        block = {k: np.tile(x, (capacity // 10, *[1] * x.ndim)) for k, x in one.items()}
        for _ in range(15):
            buffer.add(**block)

    def set_256(s: Any, _: Any, i: Any, p: Any) -> tuple[Any, Any]:
        return s, per.update_priorities(np.asarray(i) % capacity, np.asarray(p))

    def sample_and_set(s: Any, _: Any, __: Any, p: Any) -> tuple[Any, Any]:
        drawn = per.sample(BATCH, beta=0.4)
        return s, per.update_priorities(drawn["indexes"], np.asarray(p))

    return Library(
        {"uniform": uniform, "prioritised": per},
        {
            ("uniform", "add 1"): lambda s, *_: (s, uniform.add(**one)),
            ("uniform", "add 128"): lambda s, *_: (s, uniform.add(**rows)),
            ("uniform", "sample 256"): lambda s, *_: (s, uniform.sample(BATCH)),
            ("prioritised", "add 1"): lambda s, *_: (s, per.add(**one)),
            ("prioritised", "add 128"): lambda s, *_: (s, per.add(**rows)),
            ("prioritised", "sample 256"): lambda s, *_: (s, per.sample(BATCH, beta=0.4)),
            ("prioritised", "set 256"): set_256,
            ("prioritised", "sample, set 256"): sample_and_set,
        },
    )


PEERS: dict[str, Callable[[Any, int], Library]] = {
    "ours_in_jit": ours_in_jit,
    "flashbax": flashbax,
    "dejax": dejax,
    "stable_baselines3": stable_baselines3,
    "cpprb": cpprb,
}
ONLY_FROM_PYTHON = {"ours_in_jit", "stable_baselines3", "cpprb"}  # inside scan all is in jit


def arguments(capacity: int, count: int, first: int) -> tuple[Any, Any, Any]:
    """Keys [count], indices of items held and priorities [count, B], for as many calls."""
    key = jax.random.PRNGKey(0)
    indices = jax.random.randint(key, (count, BATCH), first, first + capacity)
    priorities = jnp.abs(jax.random.normal(key, (count, BATCH))) + 1e-6
    return jax.block_until_ready((jax.random.split(key, count), indices, priorities))


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


def measure(
    name: tuple[str, str], libraries: dict[str, Library], how: Callable, count: int, capacity: int
) -> dict[str, list[float]]:
    """Microseconds of each repetition of one operation, for each library that has it."""
    left_out = ONLY_FROM_PYTHON if how is inside_scan else set()
    measured = [k for k, v in libraries.items() if name in v.calls and k not in left_out]
    times: dict[str, list[float]] = {library: [] for library in measured}
    for repetition in range(REPETITIONS + 1):
        for library in times:
            states, calls = libraries[library]
            own = library.startswith("ours")
            first = int(states[name[0]].cursor - states[name[0]].size) if own else 0
            each = arguments(capacity, count, first)
            states[name[0]], microseconds = how(calls[name], states[name[0]], each)
            if repetition:  # the first one compiles
                times[library].append(microseconds)
    return times


def cells(times: dict[str, list[float]], peers: list[str]) -> str:
    """Our median; of each peer its median, and its ratio to ours."""
    own = times["ours"]
    row = [f"{statistics.median(own):.2f}"]
    for peer in peers:
        if peer in times:
            ratios = [theirs / mine for theirs, mine in zip(times[peer], own, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            row += [f"{statistics.median(times[peer]):.2f}", spread]
        else:
            row += ["-", "-"]
    return " | ".join(row)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="measure only buffers whose name starts so")
    parser.add_argument("--item", choices=ITEMS, default="cartpole")
    parser.add_argument("--capacities", nargs="*", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument(
        "--async-dispatch",
        action="store_true",
        help="JAX's default on CPUs; without it programs run in the thread that calls them, as "
        "the scripts of this repository have it",
    )
    args = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", args.async_dispatch)
    peers = [peer for peer in PEERS if peer == "ours_in_jit" or importlib.util.find_spec(peer)]
    for peer in PEERS.keys() - set(peers):
        print(f"{peer} is not installed: pip install -e '.[bench]'")
    names = ["jax", *(peer for peer in peers if peer != "ours_in_jit")]
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    print(f"{versions}; {jax.devices()[0].device_kind}, {os.cpu_count()} CPU cores; microseconds")
    print(f"{'asynchronous' if args.async_dispatch else 'synchronous'} dispatch\n")
    heads = " | ".join(f"{peer} | ratio" for peer in peers)
    print(f"| buffer | operation | from | capacity | ours | {heads} |")
    print("|---" * (5 + 2 * len(peers)) + "|")
    for capacity in args.capacities:
        item = jax.tree.map(jnp.asarray, ITEMS[args.item])
        libraries = {"ours": ours(item, capacity)}
        libraries |= {peer: PEERS[peer](item, capacity) for peer in peers}
        for how, where, count in ((from_python, "Python", 300), (inside_scan, "scan", 500)):
            for name in libraries["ours"].calls:
                if name[0].startswith(args.only):
                    times = measure(name, libraries, how, count, capacity)
                    row = " | ".join((*name, where, f"{capacity:,}", cells(times, peers)))
                    print(f"| {row} |", flush=True)


if __name__ == "__main__":
    main()
