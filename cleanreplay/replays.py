"""Wraps the replay of an algorithm: --frame-stack, --her-fraction and --offline-data.

A wrapper has all methods and attributes of its replay, so an algorithm need not know of it. Other
functions find and change the states of replays in a State.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

import buffers
from cleanreplay import goals


@dataclass(frozen=True)
class Wrapper:
    """A replay with the methods and attributes of `replay`, which a subclass may override."""

    replay: Any

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped replay."""
        if name.startswith("__"):  # `copy` looks for such names before `replay` is set
            raise AttributeError(name)
        return getattr(self.replay, name)

    def add_and_sample(self, state: Any, items: Any, key: Array, batch_size: int) -> tuple:
        """Adds steps [S, N, ...], and then samples. Returns (state, Sample)."""
        state = self.add_batch(state, items)
        return state, self.sample(state, key, batch_size)

    def close(self) -> None:
        """Closes what was made for this wrapper."""


@dataclass(frozen=True)
class Stacked(Wrapper):
    """Stores the newest frame of each stack of `count` K, and samples sequences of stacks.

    Sequences are [B, W, K, ...]. Those of the wrapped replay are K - 1 steps longer. The function
    of `update` is given frames.
    """

    count: int

    def init(self, item: Any) -> Any:
        """Returns the empty state, for an item whose observation is a stack [K, ...]."""
        return self.replay.init(item._replace(observation=item.observation[-1]))

    def add(self, state: Any, item: Any) -> Any:
        """Adds a step [N, ...]."""
        newest = item.observation[:, -1] if self.has_env_axis else item.observation[-1]
        return self.replay.add(state, item._replace(observation=newest))

    def add_batch(self, state: Any, items: Any, mask: Any = None) -> Any:
        """Adds steps [S, N, ...]."""
        newest = items.observation[:, :, -1] if self.has_env_axis else items.observation[:, -1]
        return self.replay.add_batch(state, items._replace(observation=newest), mask)

    def get(self, state: Any, indices: Array) -> Any:
        """Returns sequences [B, W, ...], without the steps that only fill the first stack."""
        return self.with_stacks(self.replay.get(state, indices))

    def sample(self, state: Any, key: Array, batch_size: int) -> buffers.Sample:
        """Samples sequences [B, W, ...], without the steps that only fill the first stack."""
        sample = self.replay.sample(state, key, batch_size)
        return sample._replace(experience=self.with_stacks(sample.experience))

    def with_stacks(self, steps: Any) -> Any:
        """Turns sequences of frames [B, K - 1 + W, ...] into sequences of stacks [B, W, K, ...]."""
        stacks = buffers.stack_frames(steps.observation, self.count, steps.valid)
        rest = jax.tree.map(lambda x: x[:, self.count - 1 :], steps._replace(observation=()))
        return rest._replace(observation=stacks)


@dataclass(frozen=True)
class Hindsight(Wrapper):
    """Gives part of each batch goals that were achieved later."""

    goals: goals.Goals

    def sample(self, state: Any, key: Array, batch_size: int) -> buffers.Sample:
        """Samples sequences, the first of which get new goals."""
        sample = self.replay.sample(state, key, batch_size)
        return self.goals.relabel(self.replay, state, sample, jax.random.fold_in(key, 0))

    def close(self) -> None:
        """Closes the environment that computes rewards."""
        self.goals.close()


class MixedState(NamedTuple):
    """The state of a replay, and that of a replay with offline data, which never changes.

    A checkpoint holds () for the data. Several agents share them: they have no axis of agents.
    """

    replay: Any
    data: Any

    @property
    def max_priority(self) -> Array:
        """Returns the largest priority of the replay."""
        return self.replay.max_priority


@dataclass(frozen=True)
class Mixed(Wrapper):
    """Samples `fraction` of each batch from offline data, see offline.py. Their indices are -1.

    All other methods are for the replay alone. With a fraction of 1 it stays empty. `wrap` adds to
    the replay of the data the wrappers that `replay` has.
    """

    fraction: float
    wrap: Callable

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the wrapped replay. Its methods then take a MixedState."""
        found = super().__getattr__(name)
        if not callable(found):
            return found

        def of_replay(state: MixedState, *args: Any, **kwargs: Any) -> Any:
            result = found(state.replay, *args, **kwargs)
            return state._replace(replay=result) if is_state(result) else result

        return of_replay

    def of_data(self, rows: int, envs: int) -> Any:
        """Makes a replay for data of N environments, with `rows` steps of each."""
        window = self.replay.window
        replay = buffers.uniform_replay(rows * envs, num_envs=envs, sequence_length=window)
        return self.wrap(replay)

    def init(self, item: Any) -> MixedState:
        """Returns the empty state. `with_data` adds the data later."""
        no_data = self.of_data(self.replay.window, self.replay.envs).init(item)
        return MixedState(self.replay.init(item), no_data)

    def add_batch(self, state: MixedState, items: Any, mask: Any = None) -> MixedState:
        """Adds steps [S, N, ...] to the replay."""
        if self.fraction == 1:
            return state
        return state._replace(replay=self.replay.add_batch(state.replay, items, mask))

    def sample(self, state: MixedState, key: Array, batch_size: int) -> buffers.Sample:
        """Samples sequences of the replay, and then those of the data."""
        data = self.of_data(*state.data.storage.valid.shape)
        count = round(self.fraction * batch_size)
        key_of_data = key if self.fraction == 1 else jax.random.fold_in(key, 2)
        more = data.sample(state.data, key_of_data, count)
        more = more._replace(indices=jnp.full_like(more.indices, -1))
        if self.fraction == 1:
            return more
        sample = self.replay.sample(state.replay, key, batch_size - count)
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), sample, more)


def options(args: Any, envs: gym.vector.VectorEnv, make_envs: Callable) -> dict[str, Callable]:
    """Returns arguments of an agent for environments such as `envs`: {"wrap_replay": ...}, or {}.

    `make_envs(1)` makes an environment for rewards that JAX cannot trace. UsageError if the
    environments have no goals, and --her-fraction asks for them.
    """
    count = args.frame_stack if hasattr(args, "buffer_size") else 1
    has_goals = getattr(args, "her_fraction", 0) > 0
    has_data = bool(getattr(args, "offline_data", ""))
    if count == 1 and not has_goals and not has_data:
        return {}
    found = goals.find_goals(args, envs, make_envs) if has_goals else None

    def with_goals(replay: Any) -> Any:
        return Hindsight(replay, found) if found else replay

    def wrap(replay: Any) -> Any:
        if has_data and args.offline_fraction == 1:  # it stays empty
            replay = replace(replay, max_size=replay.window * replay.envs)
        if count > 1:
            replay = with_longer_sequences(replay, count - 1)
        replay = with_goals(replay)
        if has_data:
            replay = Mixed(replay, args.offline_fraction, with_goals)
        return Stacked(replay, count) if count > 1 else replay

    return {"wrap_replay": wrap}


def close(replay: Any) -> None:
    """Closes the wrappers of a replay."""
    while isinstance(replay, Wrapper):
        replay.close()
        replay = replay.replay


def with_longer_sequences(replay: Any, more: int) -> Any:
    """Makes a replay whose sequences have `more` steps more. It holds at least one sequence."""
    window, period = replay.window + more, replay.period
    rows = -(-(window + period - 1) // period) * period
    size = max(replay.max_size, rows * replay.envs)
    return replace(replay, sequence_length=window, max_size=size)


def is_state(x: Any) -> bool:
    """Returns whether `x` is the state of a replay."""
    return isinstance(x, buffers.RingState | buffers.PrioritisedState | MixedState)


def map_replays(function: Callable, state: Any) -> Any:
    """Replaces each state of a replay in a State or RunnerState by `function` of it."""
    return jax.tree.map(lambda x: function(x) if is_state(x) else x, state, is_leaf=is_state)


def with_replays_of(before: Any, after: Any) -> Any:
    """Returns the State `after` with the replays of `before`, in place of the numbers there."""
    return jax.tree.map(lambda x, y: x if is_state(x) else y, before, after, is_leaf=is_state)


def rings(state: Any) -> list:
    """Returns the states of the replays in a State, without those of offline data."""
    states = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    return [x.replay if isinstance(x, MixedState) else x for x in states]


def data_of(state: Any) -> Any:
    """Returns the state of the replay with offline data in a State or RunnerState, or None."""
    states = jax.tree.leaves(state, is_leaf=is_state)
    return next((x.data for x in states if isinstance(x, MixedState)), None)


def with_data(state: Any, read: Callable) -> Any:
    """Adds offline data to a State or RunnerState: `read(item)`, with an item of the replay."""

    def add(x: Any) -> Any:
        if not isinstance(x, MixedState):
            return x
        where = x.replay.cursor.sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, PartitionSpec())
        return x._replace(data=jax.device_put(read(item_of(x.replay)), where))

    return map_replays(add, state)


def axes(state: Any) -> Any:
    """Returns `in_axes` of `jax.vmap` over the agents of a State: 0, and None for the data."""

    def axis(x: Any) -> Any:
        return MixedState(0, None) if isinstance(x, MixedState) else 0

    return jax.tree.map(axis, state, is_leaf=is_state)


def without_data(state: Any) -> Any:
    """Returns a State or RunnerState without offline data, for a checkpoint."""
    return map_replays(lambda x: x._replace(data=()) if isinstance(x, MixedState) else x, state)


def item_of(ring: Any) -> Any:
    """Returns an item of zeros like those of a ring, which may have an axis of agents."""
    lead = ring.cursor.ndim + 2
    return jax.tree.map(lambda x: np.zeros(x.shape[lead:], x.dtype), ring.storage)


def truncate_episodes(replay: Any) -> Any:
    """Marks the unfinished episodes of a replay as truncated, because environments start anew.

    The last row has no successor, so it becomes an autoreset row: its observation is the one after
    the row before.
    """
    if isinstance(replay, MixedState):
        return replay._replace(replay=truncate_episodes(replay.replay))
    steps = replay.storage
    rows = len(steps.valid)
    last = (replay.cursor - 1) % rows
    before = (replay.cursor - 2) % rows
    unfinished = steps.valid[before] & ~steps.terminated[before]
    steps = steps._replace(
        terminated=steps.terminated.at[last].set(False),
        truncated=steps.truncated.at[before].set(unfinished).at[last].set(False),
        valid=steps.valid.at[last].set(False),
    )
    return replay._replace(storage=steps)
