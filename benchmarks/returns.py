"""Returns of scripts x environments x seeds: where a run ends, and when it reaches a threshold.

    python benchmarks/returns.py --scripts dqn_jax per_dqn_jax --env-ids CartPole-v1 --seeds 5

Runs what has not been run yet, as many processes at a time as `--jobs`, in the folder `--folder`;
stopped and started again, it goes on. What stands after `--` goes to the scripts. Prints a table:
for each seed the mean return of the last 100 points of charts/episodic_return (an episode each, or
the mean of those that ended in the same rollout), and the environment steps when the mean of 100
points first reached the environment's threshold.
"""

import argparse
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
THRESHOLDS = {"CartPole-v1": 475.0, "Acrobot-v1": -100.0, "MountainCar-v0": -110.0}


def run(name: str, env_id: str, seed: int, flags: list[str], folder: Path) -> Path:
    """The folder of that run, made by the script if it is not there yet."""
    label = "_".join([name, *flags]).replace("--", "").replace("/", "-")
    work = folder / label / f"{env_id.replace('/', '-')}-{seed}"
    done = work / "done"
    if not done.exists():
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / f"{name}.py"), "--env-id", env_id]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with (work / "output.txt").open("w") as output:
            subprocess.run(
                [*command, "--seed", str(seed), *flags],
                cwd=work,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
        done.touch()
    return max((work / "runs").iterdir(), key=lambda path: path.stat().st_mtime)


def curve(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Environment steps, and the mean of the last 100 returns at each of them."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    points = events.Scalars("charts/episodic_return")
    steps, values = np.array([(p.step, p.value) for p in points]).T
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(1, len(sums)) - 100, 0)
    return steps, (sums[1:] - sums[first]) / (np.arange(1, len(sums)) - first)


def reached(steps: np.ndarray, means: np.ndarray, threshold: float) -> float:
    """The step when a full 100 points first had that mean; infinity if they never had."""
    hits = np.flatnonzero(means[99:] >= threshold)
    return float(steps[99 + hits[0]]) if len(hits) else float("inf")


def main() -> None:
    """Runs, reads and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", nargs="+", default=["dqn_jax", "per_dqn_jax"])
    parser.add_argument("--env-ids", nargs="+", default=["CartPole-v1", "Acrobot-v1"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "returns")
    parser.add_argument("flags", nargs="*", help="flags of the scripts, after --")
    args = parser.parse_args()
    tasks = list(product(args.env_ids, args.scripts, range(1, args.seeds + 1)))
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            task: pool.submit(run, task[1], task[0], task[2], args.flags, args.folder)
            for task in tasks
        }
    print(
        "| environment | script | mean of the last 100, by seed | mean | threshold | "
        "steps to it, in thousands, by seed | median |"
    )
    print("|---|---|---|---|---|---|---|")
    for env_id, script in product(args.env_ids, args.scripts):
        curves = [curve(runs[env_id, script, s].result()) for s in range(1, args.seeds + 1)]
        ends = [means[-1] for _, means in curves]
        threshold = THRESHOLDS.get(env_id, float("inf"))
        times = [reached(*c, threshold) / 1000 for c in curves]
        print(
            f"| {env_id} | {script} | {', '.join(f'{x:.1f}' for x in ends)} "
            f"| {np.mean(ends):.1f} | {threshold:g} | {', '.join(f'{x:.0f}' for x in times)} "
            f"| {statistics.median(times):.0f} |"
        )


if __name__ == "__main__":
    main()
