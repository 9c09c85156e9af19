"""Microseconds of each operation at two capacities, from Python and inside lax.scan.

    python benchmarks/buffers.py

Prints a table: the median of interleaved repetitions at 10,000 and at 1,000,000 CartPole
transitions, and the median of their ratios (1.0: the cost does not grow with the capacity).
"""

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))

import buffers

CAPACITIES = (10_000, 1_000_000)
REPETITIONS = 15
ITEM = {
    "observation": jnp.ones(4),
    "action": jnp.int32(1),
    "reward": jnp.float32(1),
    "next_observation": jnp.ones(4),
    "terminated": jnp.array(False),
}
ITEMS = jax.tree.map(lambda x: jnp.stack([x] * 128), ITEM)
MASK = jnp.arange(128) % 10 > 0
KEY = jax.random.PRNGKey(0)


def operations(replay: buffers.Replay) -> dict[str, Callable[[Any, Any], Any]]:
    """What is measured: (state, key) -> (state, what was drawn)."""
    return {
        "add 1": lambda state, key: (replay.add(state, ITEM), 0),
        "add 128": lambda state, key: (replay.add_batch(state, ITEMS), 0),
        "add 128, masked": lambda state, key: (replay.add_batch(state, ITEMS, MASK), 0),
        "sample 256": lambda state, key: (state, replay.sample(state, key, 256)),
    }


def full_buffer(capacity: int) -> tuple[buffers.Replay, Any]:
    """A buffer of that capacity, full and with the write position in the middle."""
    replay = buffers.uniform_replay(capacity)
    items = jax.tree.map(lambda x: jnp.broadcast_to(x, (capacity, *x.shape)), ITEM)
    state = replay.add_batch(replay.init(ITEM), items)
    return replay, replay.add_batch(state, jax.tree.map(lambda x: x[: capacity // 2], items))


def from_python(operation: Callable, state: Any, count: int) -> tuple[Any, float]:
    """The state after `count` calls, and microseconds a call."""
    start = time.perf_counter()
    for _ in range(count):
        state, drawn = operation(state, KEY)
    jax.block_until_ready((state, drawn))
    return state, (time.perf_counter() - start) / count * 1e6


@partial(jax.jit, static_argnums=(0, 2), donate_argnums=1)
def scanned(operation: Callable, state: Any, count: int) -> Any:
    """`count` calls in one program, which uses all that they draw."""

    def step(state: Any, key: Any) -> tuple[Any, Any]:
        state, drawn = operation(state, key)
        return state, sum(
            jnp.sum(x.astype(jnp.float32)) for x in map(jnp.asarray, jax.tree.leaves(drawn))
        )

    return jax.lax.scan(step, state, jax.random.split(KEY, count))


def inside_scan(operation: Callable, state: Any, count: int) -> tuple[Any, float]:
    """As `from_python`, inside `scan`."""
    start = time.perf_counter()
    state, _ = jax.block_until_ready(scanned(operation, state, count))
    return state, (time.perf_counter() - start) / count * 1e6


def main() -> None:
    """Measures and prints."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    pairs = [full_buffer(capacity) for capacity in CAPACITIES]
    print(f"JAX {jax.__version__}, {jax.devices()[0].device_kind}; microseconds")
    print("| operation | where | " + " | ".join(f"{c:,}" for c in CAPACITIES) + " | ratio |")
    print("|---|---|---|---|---|")
    for measure, where, count in ((from_python, "Python", 500), (inside_scan, "scan", 1000)):
        for name in operations(pairs[0][0]):
            times: list[list[float]] = []
            # A first repetition compiles and is not counted.
            calls = [operations(replay)[name] for replay, _ in pairs]
            for _ in range(REPETITIONS + 1):
                row = []
                for i, (replay, state) in enumerate(pairs):
                    state, microseconds = measure(calls[i], state, count)
                    pairs[i] = (replay, state)
                    row.append(microseconds)
                times.append(row)
            medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
            ratio = statistics.median(b / a for a, b in times[1:])
            cells = " | ".join(f"{x:.2f}" for x in medians)
            print(f"| {name} | {where} | {cells} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
