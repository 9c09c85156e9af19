"""The batches of --her-fraction and --offline-data: a function `draw` for an agent."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
from jax import Array

import buffers
from cleanreplay import goals


def options(args: Any, envs: gym.vector.VectorEnv) -> dict[str, Callable]:
    """Arguments of an agent for environments such as `envs`: {"draw": ...}, or {} without flags.

    UsageError if the environments have no goals, and --her-fraction asks for them.
    """
    has_goals = getattr(args, "her_fraction", 0) > 0
    if not has_goals and not getattr(args, "offline_data", ""):
        return {}
    relabel = goals.hindsight(args, envs) if has_goals else None

    def windows(replay: Any, state: Any, key: Array, count: int) -> buffers.Sample:
        sample = replay.sample(state, key, count)
        return relabel(replay, state, sample, jax.random.fold_in(key, 0)) if relabel else sample

    def draw(replay: Any, state: Any, key: Array, batch_size: int) -> buffers.Sample:
        """Windows of the replay, and then those of the data, whose indices are -1."""
        if not args.offline_data:
            return windows(replay, state.replay, key, batch_size)
        count = round(args.offline_fraction * batch_size)
        sample = windows(replay, state.replay, key, batch_size - count)
        rows, num_envs = state.offline.storage.valid.shape
        data = buffers.uniform_replay(
            rows * num_envs, num_envs=num_envs, sequence_length=replay.window
        )
        more = windows(data, state.offline, jax.random.fold_in(key, 2), count)
        more = more._replace(indices=jnp.full_like(more.indices, -1))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), sample, more)

    return {"draw": draw}
