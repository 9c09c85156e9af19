"""Counts the episodes that succeeded, where the last `info` of an episode says `is_success`."""

from typing import Any

import gymnasium as gym
import numpy as np


class Successes(gym.vector.VectorWrapper):
    """Keeps what the environments say of the success of each episode.

    `ended` are the successes of the episodes that ended, from the first on that said one, and
    `first` [N] that of the first episode of each environment. One that says nothing is NaN.
    """

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        self.ended: list = []
        self.first = np.full(envs.num_envs, np.nan)
        self.say_it = False  # whether an `info` had a success so far

    def __getattr__(self, name: str) -> Any:
        """What the environments have, such as `call` and `set_attr`."""
        if name == "env":  # before it is there
            raise AttributeError(name)
        return getattr(self.env, name)

    def step(self, actions: Any) -> tuple:
        """A step of each environment."""
        result = self.env.step(actions)
        info = result[4]
        if self.say_it or "is_success" in info:
            self.say_it = True
            self.note(np.asarray(result[2] | result[3]), info)
        return result

    def note(self, over: np.ndarray, info: dict) -> None:
        """Keeps the successes of the episodes that are over [N]."""
        if not over.any():
            return
        successes = np.array(info.get("is_success", np.full(len(over), np.nan)), float)
        successes[~np.broadcast_to(info.get("_is_success", True), len(over))] = np.nan
        self.ended.extend(successes[over])
        is_first = over & np.isnan(self.first)
        self.first[is_first] = successes[is_first]


def rate(successes: Any) -> float:
    """The fraction of episodes that succeeded, NaN if none says it."""
    said = np.asarray(successes, float)
    said = said[~np.isnan(said)]
    return float(said.mean()) if said.size > 0 else np.nan
