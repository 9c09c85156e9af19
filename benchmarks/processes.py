"""Measures seconds per 100,000 steps of ppo_jax.py with environments in several processes.

    python benchmarks/processes.py

Trains with 8 environments in one process, in one with `--vectorization async`, and in 2 and 4
processes with `--distributed`, all on the cores of this machine. An environment computes or only
waits for some milliseconds per step; the last row is of MuJoCo. Prints median, minimum and maximum
of interleaved rounds, for the second half of each run. A round takes ten minutes.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, header, line, spread, table
from returns import scalars

SETTINGS = {
    "1": (1, "sync"),
    "1, `--vectorization async`": (1, "async"),
    "2": (2, "sync"),
    "4": (4, "sync"),
}
HERE = Path(__file__).parent


def slow(milliseconds: float, computes: bool, steps: int) -> tuple[str, str, int]:
    """Returns a slow environment, its arguments, and the number of steps that a run takes."""
    kwargs = json.dumps({"seconds": milliseconds / 1000, "computes": computes})
    return "async_envs:Slow-v0", kwargs, steps


ENVIRONMENTS = {
    "CartPole-v1": ("CartPole-v1", "{}", 81_920),
    "waits 1 ms": slow(1, False, 16_384),
    "waits 5 ms": slow(5, False, 6_144),
    "computes 1 ms": slow(1, True, 16_384),
    "computes 5 ms": slow(5, True, 6_144),
    "Humanoid-v5": ("Humanoid-v5", "{}", 16_384),
}


def seconds(env: tuple[str, str, int], processes: int, vectorization: str) -> float:
    """Trains, and returns the seconds per 100,000 steps."""
    env_id, kwargs, steps = env
    flags = f"--num-envs 8 --total-timesteps {steps} --log-interval 1024 --eval-episodes 0"
    flags += f" --checkpoint-interval 0 --env-id {env_id} --vectorization {vectorization}"
    command = [sys.executable, str(ROOT / "ppo_jax.py"), *flags.split(), "--env-kwargs", kwargs]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    joins = [["--distributed", f"{address},{processes},{i}"] for i in range(processes)]
    with tempfile.TemporaryDirectory() as folder:
        options: Any = {
            "cwd": folder,
            "env": os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"},
            "stdout": subprocess.DEVNULL,
        }
        started = [
            subprocess.Popen([*command, *(join if processes > 1 else [])], **options)
            for join in joins
        ]
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"{command} ended with exit codes {codes}")
        (run,) = Path(folder, "runs").iterdir()
        points = scalars(run, "charts/SPS")
    half = len(points) // 2
    taken = points[-1].wall_time - points[half].wall_time
    return 100_000 * taken / (points[-1].step - points[half].step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=list(ENVIRONMENTS), help="environments")
    args = parser.parse_args()
    print(header(["jax", "gymnasium", "mujoco"])[0])
    print(table(["a step", *SETTINGS], []))
    for name in args.only:
        found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        for _ in range(args.rounds):
            for setting, how in SETTINGS.items():
                found[setting].append(seconds(ENVIRONMENTS[name], *how))
        print(line([name, *(spread(values, digits=1) for values in found.values())]), flush=True)


if __name__ == "__main__":
    main()
