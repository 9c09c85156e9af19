"""Measures writes to a vault, beside Flashbax's Vault and a plain file on the same disk.

    pip install -e ".[bench,atari]" && python benchmarks/vault_writes.py

Adds time steps to a ring buffer of each library in turn and writes them to its vault: steps of
CartPole and frames of Breakout (84x84 uint8), as a random policy sees them. The first write of a
vault compiles and is left out; the others go round the ring. Prints a line for each number of steps
per write: the median time of ours, of Flashbax's, and of writing and synchronising a plain file of
the same size, the median ratio of Flashbax's time to ours, and the bytes on disk of all writes
divided by the bytes in memory.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import flashbax
import flashbax.vault
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from machine import header, table

import buffers
from cleanreplay import vault

HEADS = [
    *("environment", "rows", "MB", "ours ms", "Flashbax ms", "plain file ms"),
    *("Flashbax / ours", "ours on disk", "Flashbax's on disk"),
]


def observed(envs: Any, num_actions: int, rows: int) -> np.ndarray:
    """Collects observations [rows, ...] of eight environments in sequence, with random actions."""
    random = np.random.default_rng(0)
    observations = [envs.reset(seed=0)[0]]
    while len(observations) * 8 < rows:
        observations.append(envs.step(random.integers(num_actions, size=8))[0])
    return np.concatenate(np.swapaxes(observations, 0, 1))[:rows]


def cartpole(rows: int) -> np.ndarray:
    """Collects observations [rows, 4]."""
    return observed(gym.make_vec("CartPole-v1", num_envs=8), 2, rows)


def breakout(rows: int) -> np.ndarray:
    """Collects observations [rows, 84, 84]."""
    from ale_py.vector_env import AtariVectorEnv

    return observed(AtariVectorEnv("breakout", num_envs=8, stack_num=1), 4, rows).squeeze(1)


def steps(observation: np.ndarray) -> dict[str, np.ndarray]:
    """Makes items [rows, ...] with these observations."""
    n, random = len(observation), np.random.default_rng(1)
    action, done = random.integers(2, size=n, dtype=np.int32), random.random(n) < 0.01
    return dict(observation=observation, action=action, reward=np.ones(n, np.float32), done=done)


def measure(items: dict, writes: int, folder: Path) -> list[str]:
    """Measures `writes` writes, each of an equal part of the items. Returns cells of the table."""
    rows, size = len(items["action"]) // writes, sum(x.nbytes for x in items.values()) / writes
    item, ring = jax.tree.map(lambda x: x[0], items), rows * (writes - 1)
    replay = buffers.uniform_replay(ring)
    state, ours = replay.init(item), vault.Vault(folder / "ours", item)
    peer = flashbax.make_trajectory_buffer(
        add_batch_size=1,
        sample_batch_size=1,
        sample_sequence_length=2,
        period=1,
        min_length_time_axis=2,
        max_length_time_axis=ring,
    )
    peer_state = peer.init(jax.tree.map(jnp.asarray, item))
    peer_add = jax.jit(peer.add, donate_argnums=0)
    theirs = flashbax.vault.Vault(
        vault_name="theirs",
        experience_structure=peer_state.experience,
        rel_dir=str(folder),
        vault_uid="",
    )
    times = []
    for i in range(writes):
        now = jax.tree.map(lambda x, i=i: x[i * rows : (i + 1) * rows], items)
        raw = b"".join(x.tobytes() for x in now.values())
        state = jax.block_until_ready(replay.add_batch(state, now))
        sequence = jax.tree.map(lambda x: x[None], now)
        peer_state = jax.block_until_ready(peer_add(peer_state, sequence))
        took = seconds(ours.write, state), seconds(theirs.write, peer_state)
        times.append([*took, seconds(plain, raw, folder / "plain")])
    assert len(ours) == rows * writes
    ms = [1e3 * statistics.median(x) for x in zip(*times[1:], strict=True)]
    ratio = statistics.median(b / a for a, b, _ in times[1:])
    disk = [f"{on_disk(folder / name) / size / writes:.3f}" for name in ("ours", "theirs")]
    return [f"{rows:,}", f"{size / 1e6:.2f}", *(f"{x:.1f}" for x in ms), f"{ratio:.1f}", *disk]


def seconds(fn: Any, *args: Any) -> float:
    """Returns the seconds that a call takes."""
    start = time.perf_counter()
    fn(*args)
    return time.perf_counter() - start


def plain(raw: bytes, path: Path) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(raw)
        os.fsync(file.fileno())


def on_disk(folder: Path) -> int:
    """Adds up the bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--writes", type=int, default=12, help="number of writes to each vault")
    args = parser.parse_args()
    print(header(["jax", "tensorstore", "flashbax", "numpy"])[0])
    rows = []
    for name, observations, sizes in (
        ("CartPole", cartpole, (1_000, 10_000)),
        ("Breakout", breakout, (1_000, 4_000)),
    ):
        for n in sizes:
            with tempfile.TemporaryDirectory(dir=".") as folder:
                items = steps(observations(n * args.writes))
                cells = measure(items, args.writes, Path(folder).absolute())
            rows.append([name, *cells])
    print(table(HEADS, rows))


if __name__ == "__main__":
    main()
