"""Trains one agent in several processes, each of which steps its share of the environments.

Every process runs the `train_loop` of the script. Once an iteration they exchange their rollouts,
and all learn from the same data. So each has the same State, equal to that of a single process.
"""

import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.vector.utils import batch_space

from cleanreplay import disk, distributed
from cleanreplay.errors import LostProcessError, UsageError
from cleanreplay.protocol import Log

CHECKSUM, STOP, FAILED, FINISHED = range(4)  # numbers that are sent with a rollout


def divide(num_envs: int) -> list[slice]:
    """Divides N environments over the processes. With a remainder the first ones get one more."""
    processes = jax.process_count()
    if num_envs < processes:
        raise UsageError(f"num_envs must be {processes} or more: each process steps at least one")
    rows = [own.tolist() for own in np.array_split(np.arange(num_envs), processes)]
    return [slice(own[0], own[-1] + 1) for own in rows]


def make_envs(make: Callable, num_envs: int, video_folder: str = "", training: bool = False) -> Any:
    """Makes N environments, or for training a `Share` of them."""
    if training:
        return Share(partial(make, training=True), num_envs)
    return make(num_envs, video_folder)


class Share(gym.vector.VectorWrapper):
    """N environments, of which this process steps its own. The rows of the others are zero.

    So a script's arrays, steps and random numbers are as in a single process.
    """

    def __init__(self, make_envs: Callable, num_envs: int) -> None:
        self.own = divide(num_envs)[jax.process_index()]
        super().__init__(make_envs(self.own.stop - self.own.start))
        self.total = num_envs
        self.observation_space = batch_space(self.env.single_observation_space, num_envs)
        self.action_space = batch_space(self.env.single_action_space, num_envs)

    num_envs = property(lambda self: self.total)

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of this process's environments, such as `call` and `set_attr`."""
        if name == "env":  # before it is set
            raise AttributeError(name)
        return getattr(self.env, name)

    def among_all(self, x: Any) -> np.ndarray:
        """Places the rows of this process among those of all [N, ...]."""
        rows = np.zeros((self.total, *np.shape(x)[1:]), np.asarray(x).dtype)
        rows[self.own] = x
        return rows

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple:
        """Starts an episode in each environment of this process."""
        observation, info = self.env.reset(seed=seed + self.own.start, options=options)
        return self.among_all(observation), info

    def step(self, actions: Any) -> tuple:
        """Takes a step of each environment of this process."""
        *rows, info = self.env.step(actions[self.own])
        return *[self.among_all(x) for x in rows], info


class Exchange:
    """Replaces a compiled `train_step`: gathers the rollouts of all processes, and learns.

    Only one thread may communicate at a time, and it is the one that learns. So all other messages
    between processes are sent with the rollout.

    Args:
      learn: the compiled `train_step`, of this process alone.
      envs: the `Share` that trains.
      frame_stack: K; only the newest frame of a stack is sent.
      signals: those of this process.
      log: its `finish` may be called in any of the processes.
    """

    def __init__(
        self, learn: Callable, envs: Any, frame_stack: int, signals: list, log: Log
    ) -> None:
        self.learn = learn
        self.envs = envs
        self.log = log
        self.slices = divide(envs.num_envs)
        self.frame_stack = frame_stack
        self.older: Any = None  # [N, K - 1, ...], the frames before the next rollout
        self.signals = signals
        self.checksum = 0  # of the parameters at the last checkpoint
        self.rollout: Any = None  # [S, N, ...] of all processes
        self.successes: list = []  # of the episodes that ended in it
        self.stop: list = []  # a signal that one of the processes received
        self.sent: list[np.ndarray] = []  # by this process

    def __call__(self, state: Any, rollout: Any, key: Any, step: int, *more: Any) -> tuple:
        """Learns from the rollouts of all processes; `more` is the observation after a rollout."""
        seen = rollout.observation
        seen = np.concatenate([seen, *[np.asarray(x, seen.dtype)[None] for x in more]])
        if self.frame_stack > 1:
            seen = seen[:, :, -1]
        rollout = self.gather(rollout._replace(observation=seen))
        if self.frame_stack > 1:
            rollout = rollout._replace(observation=self.stack(rollout))
        length = len(rollout.reward)
        rest = rollout.observation[length:]
        self.rollout = rollout._replace(observation=rollout.observation[:length])
        return self.learn(state, self.rollout, key, step, *rest)

    def end(self, error: Any) -> None:
        """Ends the run of this process: waits for the others, or sends them an error."""
        if isinstance(error, LostProcessError) or (error and not self.sent):
            return
        self.sent = self.sent or [np.zeros(4, int)]  # of a run that was complete at its start
        self.sent[0][:] = (self.checksum, 0, error is not None, 0)
        told, *_ = all_gather(self.sent)  # the first process may still evaluate
        if error:
            return
        check(told)
        own = jax.process_index()
        if own > 0:
            print(f"process {own}: the run has ended", file=sys.__stdout__, flush=True)

    def gather(self, rollout: Any) -> Any:
        """Gathers the rows [S, N, ...] of all processes, and their other messages."""
        leaves, structure = jax.tree.flatten(rollout)
        own = self.slices[jax.process_index()]
        width = self.slices[0].stop  # of the largest share: the others are padded
        over = (rollout.terminated | rollout.truncated)[:, own]
        successes = np.full(len(over) * width, np.nan)
        ended = self.envs.ended[: over.sum()]
        del self.envs.ended[: over.sum()]
        successes[: len(ended)] = ended
        parts = [np.zeros((len(x), width, *x.shape[2:]), x.dtype) for x in leaves]
        for part, x in zip(parts, leaves, strict=True):
            part[:, : own.stop - own.start] = x[:, own]
        told = np.array([self.checksum, max([*self.signals, 0]), 0, self.log.total == 0])
        self.sent = [told, successes, *parts]
        told, successes, *parts = all_gather(self.sent)
        check(told)
        if told[:, FINISHED].any():
            self.log.total = 0
        self.successes = list(successes[~np.isnan(successes)])
        self.stop = [signal.Signals(told[:, STOP].max())] if told[:, STOP].any() else []
        sizes = [rows.stop - rows.start for rows in self.slices]
        leaves = [
            np.concatenate([x[:, :size] for x, size in zip(part, sizes, strict=True)], axis=1)
            for part in parts
        ]
        return jax.tree.unflatten(structure, leaves)

    def stack(self, rollout: Any) -> np.ndarray:
        """Returns the stacks [S, N, K, ...] of frames, as `environments.FrameStack` makes them."""
        frames = rollout.observation
        length, num_envs, *frame = frames.shape
        stacks = np.zeros((length, num_envs, self.frame_stack, *frame), frames.dtype)
        older = np.zeros_like(stacks[0, :, 1:]) if self.older is None else self.older
        for t in range(length):
            stacks[t, :, :-1] = older
            stacks[t, :, -1] = frames[t]
            if t < len(rollout.valid):
                older = stacks[t, :, 1:].copy()
                older[~rollout.valid[t]] = 0  # the episode is over
        self.older = older
        return stacks


def all_gather(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Gathers arrays of the same shapes and dtypes from all P processes: [P, ...] of each."""
    arrays = [np.ascontiguousarray(x) for x in arrays]
    sent = np.concatenate([x.reshape(-1).view(np.uint8) for x in arrays])
    received = distributed.gather(sent)
    result, end = [], 0
    for x in arrays:
        begin, end = end, end + x.nbytes
        part = np.ascontiguousarray(received[:, begin:end])
        result.append(part.view(x.dtype).reshape(-1, *x.shape))
    return result


def checksum(params: Any) -> int:
    """Computes the CRC-32 of all numbers of a pytree."""
    number = 0
    for x in jax.tree.leaves(params):
        number = disk.crc32(x, number)
    return number


def check(told: np.ndarray) -> None:
    """Raises an error in all processes if one of them failed, or learned different parameters.

    `told` [P, 4] are the numbers that were sent with a rollout.
    """
    failed = np.flatnonzero(told[:, FAILED])
    if failed.size > 0:
        raise LostProcessError(f"distributed: process {failed[0]} failed, see its output")
    others = np.flatnonzero(told[:, CHECKSUM] != told[0, CHECKSUM])
    if others.size > 0:
        text = f"the parameters of process {others[0]} differ from those of the first process"
        raise UsageError(f"distributed: {text}: all need processors of one kind")
