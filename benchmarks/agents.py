"""Evaluates the agents in files, and prints a table of their returns.

    python benchmarks/agents.py
    python benchmarks/agents.py runs/CartPole-v1__dqn_jax__1__1795189555123456/best.safetensors

Each agent plays `--episodes` episodes without exploration, with the seeds 0, 1, 2 and so on.
Without a file it evaluates those in benchmarks/agents. With `--store` it copies the files there.
"""

import argparse
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, table

from cleanreplay import agent_file, disk, policies
from cleanreplay.watch import play

AGENTS = ROOT / "benchmarks" / "agents"
HEADS = ["agent", "flags", "steps", "return", "lowest", "highest", "kB"]


def evaluate(file: Path, episodes: int) -> np.ndarray:
    """Plays episodes with an agent. Returns their returns [episodes]."""
    script = ROOT / agent_file.open_agent(file).about["script"]
    loaded = policies.load_agent(file, script)
    agent, params, run = loaded.agent, loaded.params, replace(loaded.run, vectorization="sync")
    with closing(loaded.script.make_envs(loaded.args, run, 1)) as envs:
        played = [
            play(agent, params, envs, seed, run.eval_max_steps, lambda observation: None)
            for seed in range(episodes)
        ]
    return np.array([returns[-1] for _, returns in played])


def flags(file: Path) -> str:
    """Returns the command that trained an agent: its script and non-default flags."""
    about = agent_file.open_agent(file).about
    module = policies.import_script(ROOT / about["script"])
    given = [about["script"]]
    for name, kind in {"run": module.Run, "args": module.Args}.items():
        for flag, default in vars(kind()).items():
            value = about[name].get(flag, default)
            value = tuple(value) if isinstance(value, list) else value
            if value != default and str(value) != str(default):  # JSON has NaN as a text
                given.append(as_text(flag.replace("_", "-"), value, default))
    return " ".join(given)


def as_text(flag: str, value: Any, default: Any) -> str:
    """Writes a flag as on the command line."""
    if isinstance(default, bool):  # and not True, False or None
        return f"--{flag}" if value else f"--no-{flag}"
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([f"--{flag}", *map(str, values)])


def store(file: Path) -> Path:
    """Copies an agent to benchmarks/agents, with names of its script and data instead of paths."""
    stored = agent_file.open_agent(file)
    about = stored.about
    for flag in ("offline_data", "init_from"):
        if about["args"].get(flag):
            about["args"][flag] = Path(about["args"][flag]).name
    name = f"{about['run']['env_id']}__{about['run']['exp_name']}"
    copy = AGENTS / f"{re.sub('[/:]', '-', name)}.safetensors"
    arrays = stored.read(stored.shapes)
    disk.write(copy, arrays.items(), about | {"script": Path(about["script"]).name})
    return copy


def row(file: Path, returns: np.ndarray) -> list[str]:
    """Makes a row of the table."""
    spread = f"{returns.mean():.1f} ± {returns.std(ddof=1):.1f}"
    steps = f"{agent_file.open_agent(file).about['step']:,}"
    ends = [f"{returns.min():.1f}", f"{returns.max():.1f}"]
    size = f"{file.stat().st_size / 1_000:.0f}"
    return [f"`{file.name}`", f"`{flags(file)}`", steps, spread, *ends, size]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="files of agents")
    parser.add_argument("--episodes", type=int, default=100, help="episodes of each agent")
    parser.add_argument("--store", action="store_true", help="copy the files to benchmarks/agents")
    given = parser.parse_args()
    files = given.files or sorted(AGENTS.glob("*.safetensors"))
    if given.store:
        files = [store(file) for file in files]
    print(table(HEADS, [row(file, evaluate(file, given.episodes)) for file in files]))


if __name__ == "__main__":
    main()
