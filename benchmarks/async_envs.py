"""Measures steps per second of dqn_jax.py with slow environments, in one process and in several.

    python benchmarks/async_envs.py

A step of the environment takes `--milliseconds`. It either computes, or only waits, as with a
simulator in another process. Prints a line for each kind: steps per second with `--vectorization
sync` and with `async`, as median, minimum and maximum of interleaved rounds, and their ratio.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from machine import header, ratios, spread
from returns import scalars

import dqn_jax


class Slow(gym.Env):
    """An environment that observes zeros. A step takes `seconds`, an episode has 100 steps."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float, computes: bool) -> None:
        self.seconds = seconds
        self.computes = computes

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple:
        end = time.perf_counter() + self.seconds
        if not self.computes:
            time.sleep(self.seconds)
        while time.perf_counter() < end:
            pass
        return np.zeros(4, np.float32), 0.0, False, False, {}


if __name__ == "async_envs":  # as the scripts and the processes of the environments import it
    slow = "async_envs:Slow"
    gym.register("Slow-v0", slow, max_episode_steps=100, disable_env_checker=True)


def steps_per_second(kwargs: dict, num_envs: int, steps: int, vectorization: Any) -> float:
    """Measures the second half of a run, which excludes the start of processes and compilation."""
    args = dqn_jax.Args(total_timesteps=steps, num_envs=num_envs, learning_starts=steps // 4)
    run = dqn_jax.Run(
        env_id="async_envs:Slow-v0",
        env_kwargs=json.dumps(kwargs),
        vectorization=vectorization,
        log_interval=steps // 10,
        eval_episodes=0,
        checkpoint_interval=0,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        _, _, folder = dqn_jax.train(args, run)
    points = scalars(folder, "charts/SPS")
    half = len(points) // 2
    seconds = points[-1].wall_time - points[half].wall_time
    return (points[-1].step - points[half].step) / seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--milliseconds", type=float, default=2.0)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # The processes of the environments import this file by its name.
    sys.path.insert(0, str(Path(__file__).parent))
    print(header(["jax", "gymnasium"])[0])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for computes in (True, False):
            kwargs = {"seconds": args.milliseconds / 1000, "computes": computes}
            ordinary: list[float] = []
            asynchronous: list[float] = []
            for _ in range(args.rounds):
                for found, how in ((ordinary, "sync"), (asynchronous, "async")):
                    found.append(steps_per_second(kwargs, args.num_envs, args.steps, how))
            ratio = spread(ratios(asynchronous, ordinary), digits=1)
            kind = "computes" if computes else "waits"
            print(f"{kind}: {spread(ordinary)}, {spread(asynchronous)}, ratio {ratio}")


if __name__ == "__main__":
    main()
