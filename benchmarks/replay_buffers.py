"""Measures microseconds of the buffers' operations, in Python and lax.scan, beside peers.

    pip install -e ".[bench]" && python benchmarks/replay_buffers.py --json buffers.json

Prints a line for each buffer, operation, place and capacity: our median, minimum and maximum over
interleaved repetitions, and for each peer its median, and median, minimum and maximum of its ratio
to ours in the same repetition (above 1: ours is faster). Then, for a loop of each operation, the
time to compile it and the memory it needs besides the buffer; and the memory of each buffer in a
new process: of its arrays, of the process after filling it, and the peak while each operation runs
once. Buffers are full, with the write position in the middle; the circular one is half full.
"""

import argparse
import time
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from itertools import product
from multiprocessing import get_context
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import MISSING, header, line, ratios, records, resident, spread, table, write_json

import buffers

BATCH = 256
WINDOWS, LENGTH, ENVS = 32, 8, 8  # sequences per sample, their length, environments
CLUSTERS, AGENTS = 8, 4  # `vmap` stacks the buffers of the agents, as the compiled scripts do
KEY = np.zeros(2, np.uint32)  # NumPy: `main` configures JAX before its first array
STEP = dict(action=np.int32(1), reward=np.float32(1), terminated=np.array(False))
ITEMS: dict[str, dict[str, Any]] = {
    "cartpole": STEP | dict.fromkeys(("observation", "next_observation"), np.ones(4, np.float32)),
    "image": {"observation": np.ones((32, 32, 3), np.float32)},
}
Naive = namedtuple("Naive", "storage weights cursor oldest size")  # weights: {"": [capacity]}
# `calls` maps names of operations to call(state, key, indices, priorities) -> (state, sample). With
# `counts_on` indices keep increasing when items are overwritten.
Peer = namedtuple("Peer", "state calls held counts_on")


def several(item: dict[str, Any], *lead: int) -> dict:
    """Makes items [*lead, ...], of all clusters in turn."""
    turns = np.arange(np.prod(lead)).reshape(lead) % CLUSTERS
    shape = {name: turns.reshape(*lead, *[1] * x.ndim) for name, x in item.items()}
    return {k: jnp.broadcast_to(shape[k], lead + x.shape).astype(x.dtype) for k, x in item.items()}


def cluster_of(item: Any) -> Any:
    """Returns the cluster of an item that `several` made."""
    return jnp.ravel(jax.tree.leaves(item)[0])[0].astype(jnp.int32)


def raised(item: Any) -> Any:
    """Returns an item as an update changes it."""
    return {name: x ^ True if x.dtype == bool else x + 1 for name, x in item.items()}


def ours(buffer: str, capacity: int) -> dict:
    """Returns the functions of one of our buffers, by the names that each library uses here."""
    make = buffers.uniform_replay if buffer.startswith("uniform") else buffers.prioritised_replay
    options: Any = dict(num_envs=ENVS, sequence_length=LENGTH) if buffer.endswith("windows") else {}
    replay: Any = make(capacity, **options)
    if buffer == "circular":
        replay = buffers.circular_buffer(capacity)
    if buffer == "clustered":
        inner = buffers.uniform_replay(capacity // CLUSTERS)
        replay = buffers.clustered_replay(CLUSTERS, inner, cluster_of)
    return {name: getattr(replay, name) for name in dir(replay) if not name.startswith("_")}


def flashbax(buffer: str, capacity: int) -> dict:
    """Returns the functions of Flashbax's. They give items the axes that it expects."""
    import flashbax as fbx

    def adds(axes: Callable) -> Callable:
        return lambda s, items: replay.add(s, jax.tree.map(axes, items))

    if buffer == "circular":  # one environment, whose steps are the items
        replay: Any = fbx.make_trajectory_queue(capacity, 1, 128, 128)
        own: dict = dict(add_batch=adds(lambda x: x[None]), pop=lambda s, _: replay.sample(s))
        return own | dict(init=replay.init)
    kind = "prioritised_" if buffer.startswith("prioritised") else ""
    device: dict = {"device": jax.default_backend()} if kind else {}  # selects its sum tree
    if buffer.endswith("windows"):
        sizes = dict(add_batch_size=ENVS, sample_batch_size=WINDOWS, sample_sequence_length=LENGTH)
        make = getattr(fbx, f"make_{kind}trajectory_buffer")
        replay = make(**sizes, period=1, min_length_time_axis=LENGTH, max_size=capacity, **device)
        add, add_batch = adds(lambda x: x[:, None]), adds(lambda x: jnp.swapaxes(x, 0, 1))
    else:
        make = getattr(fbx, f"make_{kind}item_buffer")
        sizes = dict(max_length=capacity, min_length=1, sample_batch_size=BATCH)
        replay = make(**sizes, add_batches=True, **device)
        add, add_batch = adds(lambda x: x[None]), replay.add
    own = dict(init=replay.init, add=add, add_batch=add_batch)
    own |= dict(sample=lambda s, key, _: replay.sample(s, key))
    return own | dict(set_priorities=getattr(replay, "set_priorities", None))


def dejax(buffer: str, capacity: int) -> dict:
    """Returns functions of dejax's, patched for today's JAX: no jnp.alltrue, no checks in jit."""
    import dejax as library
    from dejax import circular_buffer, clustered, uniform

    no_checks = SimpleNamespace(check=lambda *_: None)
    circular_buffer.checkify = uniform.checkify = clustered.checkify = no_checks
    circular_buffer.jnp = SimpleNamespace(alltrue=jnp.all, logical_and=jnp.logical_and)
    size = capacity // (CLUSTERS if buffer == "clustered" else 1)
    inner = replay = library.uniform_replay(size)
    if buffer == "clustered":
        replay = library.clustered_replay(CLUSTERS, inner, cluster_of)

    def init(item: Any) -> Any:
        state, add_batch = inner.init_fn(item), jax.jit(inner.add_batch_fn)
        for _ in range(15):
            state = add_batch(state, several(item, size // 10))
        if buffer == "uniform":
            return state
        # Copies of a full one: filling takes long, because `add` copies a cluster for each item.
        each = jax.tree.map(lambda x: jnp.stack([x] * CLUSTERS), state)
        return replay.init_fn(item).replace(cluster_state_batch=each)

    own = dict(init=init, add=replay.add_fn, add_batch=replay.add_batch_fn)
    return own | dict(sample=replay.sample_fn, update=replay.update_fn)


def naive(buffer: str, capacity: int, xp: Any) -> dict:
    """Returns functions written by hand: an array per field, `%`, cumulative sums of priorities."""
    in_numpy, prioritised, rng = xp is np, buffer == "prioritised", np.random.default_rng(0)

    def write(arrays: dict, slots: Any, values: dict) -> dict:
        if not in_numpy:
            return {name: x.at[slots].set(values[name]) for name, x in arrays.items()}
        for name, x in arrays.items():
            x[slots] = values[name]
        return arrays

    def init(item: Any) -> Naive:
        storage = {name: xp.ones((capacity, *x.shape), x.dtype) for name, x in item.items()}
        return Naive(storage, {"": xp.ones(capacity)} if prioritised else {}, 0, 0, 0)

    def add(s: Naive, items: Any, count: int = 1) -> Naive:
        slots = s.cursor if count == 1 else (s.cursor + xp.arange(count)) % capacity
        size = min(s.size + count, capacity) if in_numpy else jnp.minimum(s.size + count, capacity)
        written = write(s.storage, slots, items), write(s.weights, slots, {"": 1})
        return Naive(*written, (s.cursor + count) % capacity, s.oldest, size)

    def take(s: Naive, slots: Any) -> Any:
        return {name: x[slots] for name, x in s.storage.items()}

    def sample(s: Naive, key: Any, n: int) -> tuple[Any, Any]:
        if prioritised:
            sums = xp.cumsum(s.weights[""])
            uniform = rng.random(n) if in_numpy else jax.random.uniform(key, (n,))
            slots = xp.searchsorted(sums, uniform * sums[-1], side="right") % capacity
        else:
            randint = jax.random.randint
            slots = rng.integers(s.size, size=n) if in_numpy else randint(key, (n,), 0, s.size)
        return slots, take(s, slots)

    def pop(s: Naive, n: int) -> tuple[Naive, Any]:
        items = take(s, (s.oldest + xp.arange(n)) % capacity)
        return s._replace(oldest=(s.oldest + n) % capacity, size=s.size - n), items

    def update(s: Naive, fn: Callable, slots: Any = slice(None)) -> Naive:
        return s._replace(storage=write(s.storage, slots, fn(take(s, slots))))

    own: dict = dict(init=init, add=add, pop=pop, sample=sample, update=update)
    own["add_batch"] = lambda s, rows: add(s, rows, len(rows["observation"]))
    own["add_and_sample"] = lambda s, rows, k, n: ((s := add(s, rows, 128)), sample(s, k, n))
    own["get"] = lambda s, i: take(s, (s.oldest + i) % capacity)
    own["set_priorities"] = lambda s, i, p: s._replace(weights=write(s.weights, i, {"": p**0.6}))
    return own | dict(indices_of=itemgetter(0))


def stable_baselines3(buffer: str, capacity: int) -> dict:
    """Returns functions of its ReplayBuffer of one environment, for `add 128` of 128 of them."""
    import gymnasium as gym
    from stable_baselines3.common.buffers import ReplayBuffer

    rest: Any = {n: (np.zeros(n, int), np.zeros(n), np.zeros(n), [{}] * n) for n in (1, 128)}

    def init(item: Any) -> dict[int, Any]:
        spaces: Any = gym.spaces.Box(-1.0, 1.0, item["observation"].shape), gym.spaces.Discrete(2)
        both = {n: ReplayBuffer(capacity, *spaces, device="cpu", n_envs=n) for n in rest}
        for replay in both.values():
            replay.pos, replay.full = replay.buffer_size // 2, True
            for field in (x for x in vars(replay).values() if isinstance(x, np.ndarray)):
                field.fill(1)  # memory that was never written to reads faster than other memory
        return both

    own: dict = dict(init=init, sample=lambda s, _, n: s[1].sample(n))
    own["add"] = lambda s, x, n=1: (s[n].add(*[x["observation"]] * 2, *rest[n]), s)[1]
    return own | dict(add_batch=partial(own["add"], n=128))


def cpprb(buffer: str, capacity: int) -> dict:
    """Returns functions of its ReplayBuffer and PrioritizedReplayBuffer, which change in place."""
    import cpprb as library

    uniform = buffer == "uniform"
    make = library.ReplayBuffer if uniform else partial(library.PrioritizedReplayBuffer, alpha=0.6)
    own: dict = dict(sample=lambda s, _, n: s.sample(n) if uniform else s.sample(n, beta=0.4))
    own["init"] = lambda item: make(
        capacity, {k: {"shape": x.shape or 1, "dtype": x.dtype} for k, x in item.items()}
    )
    own["add"] = own["add_batch"] = lambda s, items: (s.add(**items), s)[1]
    own["set_priorities"] = lambda s, i, priorities: (s.update_priorities(i, priorities), s)[1]
    return own | dict(indices_of=itemgetter("indexes"))


def memcpy(buffer: str, capacity: int) -> dict:
    """Returns a `sample` that only copies as many bytes from one place: the machine's limit."""

    def init(item: Any) -> Any:
        size = sum(x.nbytes for x in item.values())
        return [np.ones((count, size), np.uint8) for count in (capacity, BATCH)]

    def sample(s: Any, key: Any, n: int) -> None:
        first = key[0] % (capacity - n)
        np.copyto(s[1], s[0][first : first + n])

    return dict(init=init, sample=sample)


STACK = "stack of prioritised"
SET = ("set 256", "sample, set 256")
BASIC = ("add 1", "add 128", "sample 256")
ITEM = ("add 1", "add 128", "add 128, masked", "sample 256", "add 128 and sample 256", "get 256")
BUFFERS: dict[str, tuple[str, ...]] = {
    "circular": ("add 1", "add 128", "add 128, pop 128", "get 256"),
    "uniform": (*ITEM, "update 256", "update all"),
    "prioritised": (*ITEM, "update 256", "update all", *SET),
    **dict.fromkeys(("uniform windows", "prioritised windows"), ("add 1 step", "sample 32")),
    STACK: ("add 128, sample, set 256",),
    "clustered": BASIC,
}
NAIVE = {k: sorted({*BUFFERS[k]} - {"add 128, masked"}) for k in [*BUFFERS][:3]}
BASICS = {"uniform": BASIC, "prioritised": (*BASIC, *SET)}
# For each library the function that returns its functions, and the operations to measure by buffer.
PEERS: dict[str, tuple[Callable[..., dict], dict[str, Any]]] = {
    "ours": (ours, BUFFERS),
    "ours_in_jit": (ours, BUFFERS),
    "naive_jax": (partial(naive, xp=jnp), NAIVE),
    "naive_numpy": (partial(naive, xp=np), NAIVE),
    "flashbax": (flashbax, BUFFERS | BASICS | {"circular": ["add 128, pop 128"], "clustered": []}),
    "dejax": (dejax, {"uniform": (*BASIC, "update all"), "clustered": BASIC}),
    "stable_baselines3": (stable_baselines3, {"uniform": BASIC}),
    "cpprb": (cpprb, BASICS),
    "memcpy": (memcpy, dict.fromkeys(BASICS, ("sample 256",))),
}
INSTALLED = ("flashbax", "dejax", "stable_baselines3", "cpprb")  # packages that may be missing
FULL = ("dejax", "stable_baselines3", "memcpy")  # `init` returns a full buffer
NUMPY = ("naive_numpy", "stable_baselines3", "cpprb", "memcpy")
ONLY_FROM_PYTHON = (*NUMPY, "ours_in_jit")  # inside scan everything is in jit
JITTED = ["add", "add_batch", "pop", "sample", "add_and_sample", "get", "update", "set_priorities"]
STATIC = {"pop": 1, "sample": 2, "add_and_sample": 3, "update": 1}  # numbers of static arguments
TITLES = {
    "compile": "A loop of the operation inside scan: to trace and compile, and beside its buffer",
    "memory": "MB of a full buffer: of its arrays, of its process, and at most while used",
}


def make(name: str, buffer: str, item: dict[str, Any], capacity: int) -> Peer:
    """Makes a full buffer of a library. All in JAX except ours are in jit, with donated states."""
    library, operations = PEERS[name]
    f: Any = library("prioritised" if buffer == STACK else buffer, capacity)
    for k in () if name in (*NUMPY, "ours") else [k for k in JITTED if f.get(k)]:
        donated = () if k in ("get", "sample") else 0
        f[k] = jax.jit(f[k], static_argnums=STATIC.get(k, ()), donate_argnums=donated)
    envs = (ENVS,) if buffer.endswith("windows") else ()
    one, rows = several(item, *envs) if envs else item, several(item, 128)
    block = several(item, capacity // 10 // (ENVS if envs else 1), *envs)
    if name in NUMPY:
        one, rows, block = jax.device_get((one, rows, block))
    state, blocks = f["init"](item), 5 if buffer == "circular" else 15  # each a tenth of it
    for _ in range(0 if name in FULL else blocks):
        state = f["add_batch"](state, block)
    add, add_batch, pop, sample, add_and_sample, get, update, put = map(f.get, JITTED)
    mask, indices_of = jnp.arange(128) % 10 > 0, f.get("indices_of", lambda drawn: drawn.indices)
    every: dict[str, Callable] = {
        "add 1": lambda s, *_: (add(s, one), 0),
        "add 1 step": lambda s, *_: (add(s, one), 0),
        "add 128": lambda s, *_: (add_batch(s, rows), 0),
        "add 128, masked": lambda s, *_: (add_batch(s, rows, mask), 0),
        "add 128, pop 128": lambda s, *_: pop(add_batch(s, rows), 128),
        "sample 256": lambda s, key, *_: (s, sample(s, key, BATCH)),
        "sample 32": lambda s, key, *_: (s, sample(s, key, WINDOWS)),
        "add 128 and sample 256": lambda s, key, *_: add_and_sample(s, rows, key, BATCH),
        "get 256": lambda s, _, i, __: (s, get(s, i)),
        "update 256": lambda s, _, i, __: (update(s, raised, i), 0),
        "update all": lambda s, *_: (update(s, raised), 0),
        "set 256": lambda s, _, i, p: (put(s, i, p), 0),
        "sample, set 256": lambda s, k, _, p: (put(s, indices_of(x := sample(s, k, BATCH)), p), x),
        "add 128, sample, set 256": lambda s, *x: every[SET[1]](add_batch(s, rows), *x),
    }
    if buffer == STACK:  # the loop of several agents, each with its own buffer
        state = jax.tree.map(lambda x: jnp.stack([x] * AGENTS), state)
        of_one, split = every[BUFFERS[STACK][0]], partial(jax.random.split, num=AGENTS)
        of_all = jax.jit(jax.vmap(of_one, in_axes=(0, 0, None, None)), donate_argnums=0)
        every[BUFFERS[STACK][0]] = lambda s, key, *x: of_all(s, split(key), *x)
    calls, held = {k: every[k] for k in operations[buffer]}, min(blocks, 10) * capacity // 10
    return Peer(state, calls, held, counts_on=library is ours and buffer in BASICS)


def arguments(name: str, peer: Peer, count: int) -> Any:
    """Makes arguments of `count` calls: keys [count], indices and priorities [count, B]."""
    first = peer.state.cursor - peer.state.size if peer.counts_on else 0
    indices = jax.random.randint(KEY, (count, BATCH), first, first + peer.held)
    priorities = jnp.abs(jax.random.normal(KEY, (count, BATCH))) + 1e-6
    calls = jax.block_until_ready((jax.random.split(KEY, count), indices, priorities))
    return jax.device_get(calls) if name in NUMPY else calls


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def inside_scan(call: Callable, state: Any, calls: Any) -> Any:
    """Makes all calls in one program. Returns the state, and the sum of everything sampled."""

    def step(state: Any, each: Any) -> tuple[Any, Any]:
        state, drawn = call(state, *each)
        leaves = map(jnp.asarray, jax.tree.leaves(drawn))
        return state, sum(jnp.sum(x.astype(jnp.float32)) for x in leaves)

    return jax.lax.scan(step, state, calls)


def calls_a_repetition(microseconds: float, most: int) -> int:
    """Returns how many calls fit into the time of a repetition: all, a tenth, or two."""
    return next((n for n in (most, most // 10) if n * microseconds < 300_000), 2)


def measure(operation: str, peers: dict[str, Peer], where: str, repetitions: int) -> dict:
    """Measures microseconds per call of an operation in each repetition, for each library."""
    left_out = () if where == "Python" else set(ONLY_FROM_PYTHON) - {"memcpy"}
    counts = {name: 2 for name, x in peers.items() if operation in x.calls and name not in left_out}
    times: dict[str, list[float]] = {name: [] for name in counts}

    def repeat(name: str) -> float:
        state, call = peers[name].state, peers[name].calls[operation]
        together = arguments(name, peers[name], counts[name])
        each = list(zip(*map(list, together), strict=True))
        start = time.perf_counter()
        if where == "scan" and name != "memcpy":
            state, drawn = inside_scan(call, state, together)
        else:
            for given in each:
                state, drawn = call(state, *given)
        jax.block_until_ready((state, drawn))
        microseconds = (time.perf_counter() - start) / counts[name] * 1e6
        peers[name] = peers[name]._replace(state=state)
        return microseconds

    for name in counts:
        repeat(name)  # compiles
        counts[name] = calls_a_repetition(repeat(name), 300 if where == "Python" else 500)
        repeat(name)  # compiles the loop of that length
    for name in [*counts] * repetitions:
        times[name].append(repeat(name))
    return times


def compile_cost(operation: str, peers: dict[str, Peer]) -> list[dict]:
    """Measures a loop of an operation five times: seconds to compile, MB besides its arguments."""
    in_jax = [k for k, x in peers.items() if operation in x.calls and k not in ONLY_FROM_PYTHON]
    costs: dict[str, dict] = {name: dict(library=name, seconds=[]) for name in in_jax}
    for name in in_jax * 5:
        peer, calls = peers[name], arguments(name, peers[name], 20)
        jax.clear_caches()
        start = time.perf_counter()
        program: Any = inside_scan.lower(peer.calls[operation], peer.state, calls).compile()
        costs[name]["seconds"].append(time.perf_counter() - start)
        costs[name]["MB"] = program.memory_analysis().temp_size_in_bytes / 1e6
    return list(costs.values())


def memory(name: str, buffer: str, item: str, capacity: int) -> dict:
    """Measures MB of a full buffer in this process, which must be new, and the peak in use."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    for _ in range(2):  # the first one includes loading and compiling
        peer: Any = None  # frees the first one before making the second
        before = resident()
        peer = make(name, buffer, jax.tree.map(jnp.asarray, ITEMS[item]), capacity)
        if name == "stable_baselines3":  # its buffer for `add 128` does not count
            del peer.state[128], peer.calls["add 128"]
        held = resident() - before
        arrays = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(peer.state))
        for _ in range(2):  # the first time compiles
            resident()
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
            for call in peer.calls.values():
                given = (x[0] for x in arguments(name, peer, 1))
                taken = jax.block_until_ready(call(peer.state, *given))
                peer = peer._replace(state=taken[0])
                del call, given, taken
    peak = resident("VmHWM:") - before
    return dict(library=name, arrays=arrays / 1e6, resident=held / 1e6, peak=peak / 1e6)


def cells(times: dict[str, list[float]], peers: list[str], missing: list[str]) -> list[str]:
    """Makes cells of the table: our time, and of each peer the median and its ratio to ours."""
    row = [spread(times["ours"], 2)]
    for peer in peers:
        row += [MISSING if peer in missing else "", ""]
        if peer in times:
            both = ratios(times[peer], times["ours"])
            row[-2:] = f"{np.median(times[peer]):.2f}", spread(both, 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="measure only buffers that begin with this")
    parser.add_argument("--item", nargs="+", choices=ITEMS, default=["cartpole"])
    parser.add_argument("--capacities", nargs="*", type=int, default=[10**4, 10**5, 10**6])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--peers", nargs="*", choices=PEERS, help="measure only these beside ours")
    parser.add_argument("--times-only", action="store_true", help="no compile times, no memory")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as in the scripts
    peers = [name for name in PEERS if name != "ours" and name in (args.peers or PEERS)]
    text, about = header(["jax", "jaxlib", "numpy", *(x for x in INSTALLED if x in peers)])
    missing = [name for name, version in about["versions"].items() if version == MISSING]
    print(f"{text}{jax.devices()[0].device_kind}\nmicroseconds, by capacity and item\n")
    heads = ["buffer", "operation", "from", "item", "capacity", "ours"]
    print(table([*heads, *(x for peer in peers for x in (peer, "ratio"))], []))
    found: dict[str, list[dict]] = {"microseconds": [], "compile": [], "memory": []}
    chosen = [name for name in BUFFERS if name.startswith(args.only)]
    for item_name, capacity, buffer in product(args.item, args.capacities, chosen):
        at = {"item": item_name, "capacity": capacity}
        item = jax.tree.map(jnp.asarray, ITEMS[item_name])
        names = [x for x in ("ours", *peers) if x not in missing and PEERS[x][1].get(buffer)]
        made = {name: make(name, buffer, item, capacity) for name in names}
        for operation in BUFFERS[buffer]:
            here = {"buffer": buffer, "operation": operation} | at
            if not args.times_only:
                found["compile"] += [here | cost for cost in compile_cost(operation, made)]
            for where in ("Python", "scan"):
                times = measure(operation, made, where, args.repetitions)
                row = [buffer, operation, where, item_name, f"{capacity:,}"]
                print(line([*row, *cells(times, peers, missing)]), flush=True)
                each = [{"from": where, "library": k, "times": x} for k, x in times.items()]
                found["microseconds"] += [here | x for x in each]
        del made
        if not args.times_only and Path("/proc/self/clear_refs").exists():
            for name in (x for x in names if x not in ("ours_in_jit", "memcpy")):
                with get_context("spawn").Pool(1) as new:
                    took = new.apply(memory, (name, buffer, item_name, capacity))
                found["memory"].append({"buffer": buffer} | at | took)
    for name, title in TITLES.items():
        if found[name]:
            print(f"\n{title}\n\n{records(found[name])}")
    write_json(args.json, about | found)


if __name__ == "__main__":
    main()
