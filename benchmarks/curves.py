"""Draws learning curves of your own runs: a picture per environment, a line per script.

    pip install -e ".[plot]"
    python benchmarks/curves.py runs/CartPole-v1__* --output curves

A line is the mean over the runs with the same `--exp-name`, such as those of several seeds, and
the shaded area its 95% bootstrap interval, as in `returns.py`.
"""

import json
from collections import defaultdict
from pathlib import Path

import tyro
from returns import agents, curve, evaluations, plot


def main(
    folders: tyro.conf.Positional[tuple[Path, ...]],
    output: Path = Path("curves"),
    evaluated: bool = False,
) -> None:
    """Draws the runs in these folders.

    Args:
        folders: folders of runs, each with an args.json
        output: folder of the pictures
        evaluated: draw the evaluations instead of the mean of the last 100 episodes
    """
    curves: dict = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        run = json.loads((folder / "args.json").read_text())["run"]
        read = evaluations if evaluated else curve
        curves[run["env_id"]][run["exp_name"]] += [read(agent) for agent in agents(folder)]
    mean = "mean of an evaluation" if evaluated else "mean of the last 100 episodes"
    for env_id, of_scripts in curves.items():
        path = output / f"{env_id.replace('/', '-').replace(':', '-')}.png"
        plot(env_id, of_scripts, path, mean)
        print(path)


if __name__ == "__main__":
    tyro.cli(main)
