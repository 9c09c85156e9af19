"""Whether episodes succeeded, where the last `info` of an episode says `is_success`."""

from typing import Any

import gymnasium as gym
import numpy as np


class Successes(gym.vector.VectorWrapper):
    """Keeps what the environments say of the success of each episode.

    `ended` are the successes of the episodes that ended since it was cleared, and `first` [N] that
    of the first episode of each environment, NaN as long as it has not said it.
    """

    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__(envs)
        self.ended: list = []
        self.first = np.full(envs.num_envs, np.nan)

    def step(self, actions: Any) -> tuple:
        """A step of each environment."""
        result = self.env.step(actions)
        info = result[4]
        if "is_success" in info:
            over = np.asarray(result[2] | result[3]) & info.get("_is_success", True)
            if over.any():
                successes = np.asarray(info["is_success"], float)
                self.ended.extend(successes[over])
                is_first = over & np.isnan(self.first)
                self.first[is_first] = successes[is_first]
        return result


def rate(successes: Any) -> float:
    """The fraction of episodes that succeeded, NaN if none says it."""
    said = np.asarray(successes, float)
    said = said[~np.isnan(said)]
    return float(said.mean()) if said.size > 0 else np.nan
