"""Measures returns of scripts x environments x seeds: at the end, and steps to a threshold.

    pip install -e ".[bench]"
    python benchmarks/returns.py --scripts dqn_jax "dqn_jax --num-envs 8" ppo_jax --seeds 10

Runs what has not been run yet, `--jobs` processes at a time, in the folder `--folder`; stopped and
started again, it continues. A script may have flags of its own; flags after `--` go to all scripts.
With `--num-seeds-flag` one process trains all seeds, by the scripts' `--num-seeds`.

Prints a table and writes it with a learning curve for each environment to the folder `--plots`:
`returns.md`, `returns.json`, `ENVIRONMENT.png`. The scripts log the mean return of the episodes
that ended in a log interval. For each seed it takes the mean of the fewest last points that hold at
least 100 episodes together, and the environment steps when such a mean first reached the
environment's threshold. With `--evaluations` it takes the evaluations instead, as is usual for SAC.
Over the seeds it shows mean, standard deviation, and the interquartile mean with a 95% interval of
a percentile bootstrap, which resamples seeds within each environment (Agarwal et al. 2021, "Deep
reinforcement learning at the edge of the statistical precipice", arXiv 2108.13264). Published
returns are beside ours, with their sources under the table.
"""

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import ROOT, header, table, write_json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

THRESHOLDS = {
    "CartPole-v1": 475.0,
    "Acrobot-v1": -100.0,
    "MountainCar-v0": -110.0,
    "phys2d/CartPole-v1": 475.0,
    "LunarLander-v3": 200.0,
}
EPISODES = 100  # a return here is the mean of so many
RESAMPLES = 2_000

SOURCES = {
    "CleanRL": "mean and standard deviation over 3 seeds of 500,000 steps, which its tables call "
    "average episodic return: https://docs.cleanrl.dev/rl-algorithms/dqn/ (dqn_jax.py) and "
    "https://docs.cleanrl.dev/rl-algorithms/ppo/ (ppo.py; in MuJoCo ppo_continuous_action.py, "
    "1,000,000 steps of the v4 environments) and https://docs.cleanrl.dev/rl-algorithms/sac/ "
    "(sac_continuous_action.py)",
    "rl-baselines3-zoo": "one run with tuned hyperparameters, of the number of steps given, "
    "evaluated without exploration, standard deviation over episodes: "
    "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md",
}
# Published returns of [environment, algorithm] by source.
PUBLISHED: dict[tuple[str, str], dict[str, str]] = {
    ("CartPole-v1", "dqn"): {
        "CleanRL": "498.38 ± 2.29",
        "rl-baselines3-zoo": "500.0 ± 0.0 (50k)",
    },
    ("CartPole-v1", "ppo"): {
        "CleanRL": "490.04 ± 6.12",
        "rl-baselines3-zoo": "500.0 ± 0.0 (100k)",
    },
    ("Acrobot-v1", "dqn"): {
        "CleanRL": "-88.89 ± 1.56",
        "rl-baselines3-zoo": "-76.6 ± 11.8 (100k)",
    },
    ("Acrobot-v1", "ppo"): {
        "CleanRL": "-86.36 ± 1.32",
        "rl-baselines3-zoo": "-73.5 ± 18.2 (1M)",
    },
    ("MountainCar-v0", "dqn"): {
        "CleanRL": "-188.90 ± 11.78",
        "rl-baselines3-zoo": "-100.8 ± 9.9 (120k)",
    },
    ("MountainCar-v0", "ppo"): {
        "CleanRL": "-200.00 ± 0.00",
        "rl-baselines3-zoo": "-110.4 ± 19.5 (1M)",
    },
    ("LunarLander-v3", "dqn"): {"rl-baselines3-zoo": "154.4 ± 79.2 (v2, 100k)"},
    ("LunarLander-v3", "ppo"): {"rl-baselines3-zoo": "242.1 ± 31.8 (v2, 1M)"},
    ("HalfCheetah-v5", "ppo"): {"CleanRL": "1442.64 ± 46.03 (v4)"},
    ("Hopper-v5", "ppo"): {"CleanRL": "2382.86 ± 271.74 (v4)"},
    ("Walker2d-v5", "ppo"): {"CleanRL": "2287.95 ± 571.78 (v4)"},
    ("InvertedPendulum-v5", "ppo"): {"CleanRL": "963.09 ± 22.20 (v4)"},
    ("HalfCheetah-v5", "sac"): {"CleanRL": "9634.89 ± 1423.73 (v2, 1M)"},
    ("Hopper-v5", "sac"): {"CleanRL": "2310.46 ± 342.82 (v2, 1M)"},
    ("Walker2d-v5", "sac"): {"CleanRL": "3591.45 ± 911.33 (v2, 1M)"},
    ("Pendulum-v1", "ppo"): {"rl-baselines3-zoo": "-172.2 ± 104.2 (100k)"},
}


class Curve(NamedTuple):
    """The learning curve of one seed."""

    steps: np.ndarray  # environment steps at each point of charts/episodic_return
    means: np.ndarray  # mean of the last 100 episodes, of fewer at the start; or of an evaluation
    complete: np.ndarray  # whether a mean is of 100 episodes, or of an evaluation


def new_run(command: list[str], work: Path) -> Path:
    """Runs a command in the folder `work`. Returns the folder that it makes under runs/.

    Folders that stopped runs have left there do not count.
    """
    before = set((work / "runs").glob("*"))
    with (work / "output.txt").open("w") as output:
        code = subprocess.run(
            command,
            cwd=work,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    new = set((work / "runs").glob("*")) - before
    if code or len(new) != 1:
        raise RuntimeError(
            f"{shlex.join(command)} ended with exit code {code} and {len(new)} new folders under "
            f"runs/, expected 0 and 1: see {work / 'output.txt'}, then start this again"
        )
    return new.pop()


def agents(folder: Path) -> list[Path]:
    """Returns the folders of a run's agents by seed: the run's, with --num-seeds those in it."""
    return [folder, *sorted(folder.glob("seed_*"), key=lambda x: int(x.name[len("seed_") :]))]


def run(script: str, env_id: str, seed: int, flags: list[str], folder: Path) -> list[Path]:
    """Runs a script unless it was run before. Returns the folders of the agents."""
    name, *own = shlex.split(script)
    flags = [*own, *flags]
    label = "_".join([name, *flags]).replace("--", "").replace("/", "-")
    if len(label) > 200:  # the name of a file has at most 255 characters
        label = f"{label[:190]}_{zlib.crc32(label.encode())}"
    work = folder / label / f"{env_id.replace('/', '-')}-{seed}"
    done = work / "done"
    if not done.exists() or not done.read_text():
        work.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / f"{name}.py"), "--env-id", env_id]
        done.write_text(new_run([*command, "--seed", str(seed), *flags], work).name)
    return agents(work / "runs" / done.read_text())


def scalars(folder: Path, tag: str) -> list[Any]:
    """Reads the points of a tag, each with step, value and wall_time; none if it was not logged."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events.Scalars(tag) if tag in events.Tags()["scalars"] else []


def curve(folder: Path) -> Curve:
    """Reads charts/episodic_return and charts/episodic_length of a run."""
    points = scalars(folder, "charts/episodic_return")
    if not points:
        raise ValueError(f"{folder}: no point of charts/episodic_return: train for longer")
    steps, values = np.array([(p.step, p.value) for p in points]).T
    lengths = np.array([p.value for p in scalars(folder, "charts/episodic_length")])
    return last_means(steps, values, lengths if len(lengths) == len(steps) else None)


def evaluations(folder: Path) -> Curve:
    """Reads the mean return of each evaluation of a run."""
    points = scalars(folder, "eval/episodic_return")
    if not points:
        raise ValueError(f"{folder}: no point of eval/episodic_return: was it run without them?")
    steps, means = np.array([(p.step, p.value) for p in points]).T
    return Curve(steps, means, np.ones(len(steps), bool))


def last_means(steps: np.ndarray, values: np.ndarray, lengths: np.ndarray | None) -> Curve:
    """Computes at each point the mean of the fewest points up to it with 100 episodes together.

    A point is the mean of the episodes that ended since the previous point. The number of episodes
    is estimated from their mean length, with the autoreset step, and the number of steps. A point
    has at least one episode, and exactly one if lengths were not logged.

    All points have the same weight here, but in a script all episodes have. So the mean that a
    script prints at the end is lower if many short episodes with low returns ended in an interval.
    """
    ends = np.arange(1, len(steps) + 1)
    first, complete = np.maximum(ends - EPISODES, 0), ends >= EPISODES
    sums = np.concatenate([[0.0], np.cumsum(values)])
    if lengths is not None:
        starts = np.concatenate([[0.0], steps])
        total = np.concatenate([[0.0], np.cumsum(lengths + 1)])
        for count in range(EPISODES, 0, -1):  # the fewest points last
            j = np.maximum(ends - count, 0)
            mean = (total[ends] - total[j]) / (ends - j)
            enough = (starts[ends] - starts[j]) / mean >= EPISODES - 1e-6
            first, complete = np.where(enough, j, first), complete | enough
    return Curve(steps, (sums[1:] - sums[first]) / (ends - first), complete)


def reached(curve: Curve, threshold: float) -> float:
    """Returns the first step at which 100 episodes had that mean, infinity if none."""
    hits = np.flatnonzero(curve.complete & (curve.means >= threshold))
    return float(curve.steps[hits[0]]) if len(hits) else float("inf")


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """Computes means of the last axis without its lowest and highest quarter, rounded down."""
    cut = scores.shape[-1] // 4
    ordered = np.sort(scores, axis=-1)
    return ordered[..., cut : scores.shape[-1] - cut].mean(-1)


def bootstrap(
    scores: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = interquartile_mean
) -> tuple[np.ndarray, np.ndarray]:
    """Computes the ends of the 95% interval of a statistic over the last axis, the seeds.

    All other axes share the resampled seeds, as the points of one curve must.
    """
    seeds = scores.shape[-1]
    draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    resampled = np.stack([statistic(scores[..., draw]) for draw in draws])
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return low, high


def on_grid(curves: list[Curve], points: int = 150) -> tuple[np.ndarray, np.ndarray]:
    """Returns steps [P] that all seeds reached, and the latest mean return of each [P, seeds].

    A seed without a return yet has NaN.
    """
    grid = np.linspace(0, min(c.steps[-1] for c in curves), points)
    columns = []
    for steps, means, _ in curves:
        last = np.searchsorted(steps, grid, side="right") - 1
        columns.append(np.where(last >= 0, means[np.maximum(last, 0)], np.nan))
    return grid, np.stack(columns, axis=-1)


def plot(env_id: str, curves: dict[str, list[Curve]], path: Path, mean: str) -> None:
    """Draws learning curves of all scripts: mean over seeds, and its 95% bootstrap interval."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Curves also differ in line, marker, hatch and brightness, for those who do not see colours.
    looks = list(
        zip(
            ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3))),
            ("o", "s", "^", "D", "v", "x"),
            ("", "///", "\\\\\\", "...", "xxx", "|||"),
            ("#000000", "#b2421f", "#1f77b4", "#8a8a00", "#7a3f9d", "#2a8f5b"),
            strict=True,
        )
    )
    figure, axes = pyplot.subplots(figsize=(7.2, 4.4), dpi=90, layout="constrained")
    most = max(c.steps[-1] for seeds in curves.values() for c in seeds)
    unit, name = (1e6, "millions") if most >= 2e6 else (1e3, "thousands")
    for i, (script, seeds) in enumerate(curves.items()):
        line, marker, hatch, colour = looks[i % len(looks)]
        steps, scores = on_grid(seeds)
        has_all = ~np.isnan(scores).any(-1)
        steps, scores = steps[has_all], scores[has_all]
        label = f"{script}, {len(seeds)} seed{'s' if len(seeds) > 1 else ''}"
        axes.plot(
            steps / unit,
            scores.mean(-1),
            linestyle=line,
            marker=marker,
            markevery=(5 * i, 30),
            markersize=4,
            color=colour,
            linewidth=1.4,
            label=textwrap.fill(label, 100),
        )
        low, high = bootstrap(scores, lambda x: x.mean(-1))
        axes.fill_between(
            steps / unit, low, high, alpha=0.18, color=colour, hatch=hatch, linewidth=0
        )
    if env_id in THRESHOLDS:
        axes.axhline(THRESHOLDS[env_id], color="0.5", linewidth=0.7)
    axes.set(
        title=env_id,
        xlabel=f"environment steps, in {name}",
        ylabel=f"return, {mean}",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower left")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without the version and the date in it, the same data give the same file.
    figure.savefig(path, metadata={"Software": None}, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def summary(env_id: str, script: str, curves: list[Curve]) -> dict[str, Any]:
    """Summarises one script in one environment for the table."""
    ends = np.array([c.means[-1] for c in curves])
    threshold = THRESHOLDS.get(env_id)
    limit = float("inf") if threshold is None else threshold
    times = [reached(c, limit) for c in curves]
    low, high = bootstrap(ends)
    algorithm = script.removeprefix("per_").split("_")[0]
    return {
        "environment": env_id,
        "script": script,
        "returns": ends.tolist(),
        "mean": float(ends.mean()),
        "standard_deviation": float(ends.std(ddof=1)) if len(ends) > 1 else float("nan"),
        "interquartile_mean": float(interquartile_mean(ends)),
        "interval": [float(low), float(high)],
        "threshold": threshold,
        "steps_to_threshold": times,
        "median_steps_to_threshold": statistics.median(times),
        "published": PUBLISHED.get((env_id, algorithm), {}),
    }


def heads(mean: str) -> list[str]:
    """Returns the columns of the table."""
    return [
        *("environment", "script", f"{mean}, by seed", "mean ± std"),
        *("interquartile mean (95% interval)", "threshold"),
        *("steps to it, in thousands, by seed", "median", *SOURCES),
    ]


def row(s: dict[str, Any]) -> list[str]:
    """Makes a row of the table."""

    def thousands(steps: float) -> str:
        return f"{steps / 1000:.0f}" if steps < float("inf") else "never"

    low, high = s["interval"]
    return [
        s["environment"],
        s["script"],
        ", ".join(f"{x:.1f}" for x in s["returns"]),
        f"{s['mean']:.1f}" + (f" ± {s['standard_deviation']:.1f}" if len(s["returns"]) > 1 else ""),
        f"{s['interquartile_mean']:.1f} ({low:.1f} to {high:.1f})",
        "" if s["threshold"] is None else f"{s['threshold']:g}",
        "" if s["threshold"] is None else ", ".join(map(thousands, s["steps_to_threshold"])),
        "" if s["threshold"] is None else thousands(s["median_steps_to_threshold"]),
        *(s["published"].get(source, "") for source in SOURCES),
    ]


def main() -> None:
    """Runs the scripts, prints the table, and writes table and plots."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scripts", nargs="+", default=["dqn_jax", "per_dqn_jax"])
    parser.add_argument("--env-ids", nargs="+", default=["CartPole-v1", "Acrobot-v1"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "returns")
    parser.add_argument("--plots", type=Path, default=ROOT / "benchmarks" / "plots")
    parser.add_argument(
        "--num-seeds-flag", action="store_true", help="all seeds in one process, by --num-seeds"
    )
    parser.add_argument(
        "--evaluations", action="store_true", help="take the evaluations, not the last 100 episodes"
    )
    parser.add_argument("flags", nargs="*", help="flags of the scripts, after --")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {args.seeds}")
    flags, seeds = args.flags, range(1, args.seeds + 1)
    if args.num_seeds_flag:
        flags, seeds = [*flags, "--num-seeds", str(args.seeds)], range(1, 2)
    tasks = list(product(args.env_ids, args.scripts))
    with ThreadPoolExecutor(args.jobs) as pool:
        runs = {
            task: [pool.submit(run, task[1], task[0], s, flags, args.folder) for s in seeds]
            for task in tasks
        }
    curves: dict[tuple[str, str], list[Curve]] = {}
    for task in tasks:
        folders = [folder for done in runs[task] for folder in done.result()]
        if len(folders) != args.seeds:
            raise RuntimeError(
                f"{task}: expected a folder for each of {args.seeds} seeds, got {len(folders)}: "
                f"remove the runs of it under {args.folder} and start this again"
            )
        curves[task] = [(evaluations if args.evaluations else curve)(folder) for folder in folders]
    summaries = [summary(*task, curves[task]) for task in tasks]
    text, about = header(["jax", "flax", "optax", "gymnasium", "numpy"])
    mean = "mean of an evaluation" if args.evaluations else "mean of the last 100 episodes"
    lines = [table(heads(mean), map(row, summaries)), ""]
    lines += [f"{name}: {source}." for name, source in SOURCES.items()]
    note = f"Flags of all runs: {shlex.join(flags)}. " if flags else ""
    text = "\n".join([*lines, "", note + text.replace("\n", "; ").strip("; ") + "."])
    print(text)
    args.plots.mkdir(parents=True, exist_ok=True)
    (args.plots / "returns.md").write_text(text + "\n")
    write_json(args.plots / "returns.json", about | {"flags": flags, "results": summaries})
    for env_id in args.env_ids:
        chosen = {script: curves[env_id, script] for script in args.scripts}
        try:
            plot(
                env_id,
                chosen,
                args.plots / f"{env_id.replace('/', '-').replace(':', '-')}.png",
                mean,
            )
        except ModuleNotFoundError as error:
            print(f"no plots: {error}: pip install -e '.[bench]'", file=sys.stderr)


if __name__ == "__main__":
    main()
