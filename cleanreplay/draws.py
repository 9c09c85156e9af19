"""Samples the batches of --her-fraction and --offline-data: `draw` of an agent."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
from jax import Array

import buffers
from cleanreplay import goals


class Draw(NamedTuple):
    """Samples a batch, as `draw(replay, state, key, batch_size)`, where `state` is a State."""

    args: Any  # flags of the algorithm
    relabel: Callable | None  # of `goals.hindsight`
    close: Callable[[], None]  # ends what was made for it

    def windows(self, replay: Any, state: Any, key: Array, count: int) -> buffers.Sample:
        """Samples windows of one replay, part of them with other goals."""
        sample = replay.sample(state, key, count)
        if self.relabel is None:
            return sample
        return self.relabel(replay, state, sample, jax.random.fold_in(key, 0))

    def __call__(self, replay: Any, state: Any, key: Array, batch_size: int) -> buffers.Sample:
        """Samples windows of the replay, and then those of the data, whose indices are -1."""
        if not self.args.offline_data:
            return self.windows(replay, state.replay, key, batch_size)
        count = round(self.args.offline_fraction * batch_size)
        sample = self.windows(replay, state.replay, key, batch_size - count)
        rows, num_envs = state.offline.storage.valid.shape
        data = buffers.uniform_replay(
            rows * num_envs, num_envs=num_envs, sequence_length=replay.window
        )
        more = self.windows(data, state.offline, jax.random.fold_in(key, 2), count)
        more = more._replace(indices=jnp.full_like(more.indices, -1))
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), sample, more)


def options(args: Any, envs: gym.vector.VectorEnv, make_envs: Callable) -> dict[str, Draw]:
    """Returns arguments of an agent for environments such as `envs`: {"draw": ...}, or {}.

    `make_envs(1)` makes one for goals that JAX cannot trace. UsageError if the environments have no
    goals, and --her-fraction asks for them.
    """
    has_goals = getattr(args, "her_fraction", 0) > 0
    if not has_goals and not getattr(args, "offline_data", ""):
        return {}
    if not has_goals:
        return {"draw": Draw(args, None, lambda: None)}
    return {"draw": Draw(args, *goals.hindsight(args, envs, make_envs))}
