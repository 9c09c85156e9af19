"""Samples goals in hindsight (HER): Andrychowicz et al. 2017, arXiv 1707.01495.

Part of each batch gets a new desired goal, which was achieved later in the episode, and rewards for
it. Observations are the Dict of Gymnasium's environments with goals, {achieved_goal, desired_goal,
observation}, which a script flattens.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import wrappers
from gymnasium.spaces import Box, flatdim
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import vector
from jax import Array

from cleanreplay import environments
from cleanreplay.errors import UsageError
from cleanreplay.packed import Packed

LONGEST = 1_000  # horizon of later goals, if no time limit ends episodes
# Wrappers that do not change rewards and observations.
TRANSPARENT = (
    *(wrappers.PassiveEnvChecker, wrappers.OrderEnforcing, wrappers.TimeLimit),
    *(wrappers.RecordEpisodeStatistics, wrappers.RecordVideo, wrappers.RenderCollection),
    *(wrappers.HumanRendering, wrappers.TransformAction, vector.RecordEpisodeStatistics),
)
NEEDED = (
    "observations must be a Dict with achieved_goal and desired_goal, two equal Boxes, and the "
    "environment must have compute_reward(achieved_goal, desired_goal, info)"
)


def of_goals(function: Any, shape: tuple) -> Callable:
    """Makes `function(achieved, desired, info)` take goals [..., *shape] inside jit.

    If JAX can trace it, it becomes part of the program. Otherwise it runs in a `pure_callback`. A
    function that does not broadcast over goals is mapped over them.
    """
    distances = np.reshape([0, *10.0 ** np.arange(-4, 7)], (-1, *[1] * len(shape)))
    desired: Any = (distances + np.zeros(shape)).astype(np.float32)
    achieved: Any = np.zeros_like(desired)

    def of_rows(achieved: Any, desired: Any) -> Any:
        if isinstance(achieved, np.ndarray):  # `function` may change its arguments
            achieved, desired = achieved.copy(), desired.copy()
        return function(achieved, desired, {})

    each = [of_rows(*pair) for pair in zip(achieved, desired, strict=True)]
    try:
        takes_many = np.array_equal(each, np.broadcast_to(of_rows(achieved, desired), len(each)))
    except Exception:  # any error means that it does not take several goals
        takes_many = False

    def call_back(achieved: Any, desired: Any) -> np.ndarray:
        lead = achieved.shape[: achieved.ndim - len(shape)]
        achieved, desired = (np.asarray(x).reshape(-1, *shape) for x in (achieved, desired))
        result: Any
        if takes_many:
            result = np.broadcast_to(of_rows(achieved, desired), len(achieved))
        else:
            result = [of_rows(*pair) for pair in zip(achieved, desired, strict=True)]
        return np.asarray(result, np.float32).reshape(lead)

    def call(achieved: Array, desired: Array) -> Array:
        lead = achieved.shape[: achieved.ndim - len(shape)]
        rows = [x.reshape(-1, *shape) for x in (achieved, desired)]
        try:
            result = (of_rows if takes_many else jax.vmap(of_rows))(*rows)
            result = jnp.asarray(result, jnp.float32)
            return jnp.broadcast_to(result, len(rows[0])).reshape(lead)
        except Exception:  # it is written in NumPy: it worked with arrays above
            result_shape = jax.ShapeDtypeStruct(lead, np.float32)
            return jax.pure_callback(
                call_back, result_shape, achieved, desired, vmap_method="broadcast_all"
            )

    return call


def find_task(envs: gym.vector.VectorEnv, make_envs: Callable) -> tuple[Any, Callable]:
    """Finds an environment with `compute_reward` for those of `envs`, and a function to close it.

    It is the functional environment, or a new one from `make_envs(1)`, which is reset once.
    UsageError if these environments have no goals.
    """
    names = getattr(environments.before_wrap(envs).single_observation_space, "spaces", {})
    env = first_of(envs)
    task = getattr(env.unwrapped, "func_env", env)
    pair: list = [names.get(name) for name in ("achieved_goal", "desired_goal")]
    are_boxes = all(isinstance(space, Box) for space in pair) and pair[0].shape == pair[1].shape
    if not are_boxes or method_of(task, "compute_reward") is None:
        raise UsageError(f"her_fraction: {env} has no goals: {NEEDED}")
    check_wrappers(environments.before_wrap(envs))
    check_wrappers(env)
    if task is not env:
        return task, lambda: None
    own = make_envs(1)
    own.reset(seed=0)
    return first_of(own), own.close


def check_wrappers(env: Any) -> None:
    """Raises UsageError for a wrapper that may change the rewards or the goals.

    Only wrappers outside of the environment with `compute_reward` matter.
    """
    while env is not env.unwrapped and not hasattr(type(env), "compute_reward"):
        if not isinstance(env, TRANSPARENT):
            text = (
                f"{type(env).__name__} may change rewards or goals, which are computed without it"
            )
            raise UsageError(f"her_fraction: {text}: let it have compute_reward, or leave it out")
        env = env.env


def first_of(envs: gym.vector.VectorEnv) -> Any:
    """Returns the first environment of several, or the vector environment itself."""
    env: Any = envs.unwrapped
    return env.envs[0] if isinstance(env, SyncVectorEnv) else env


def method_of(task: Any, name: str) -> Callable | None:
    """Returns a method of an environment, or of an environment in it; None without one."""
    if not isinstance(task, gym.Env):
        return getattr(task, name, None)
    return task.get_wrapper_attr(name) if task.has_wrapper_attr(name) else None


def one_at_a_time(function: Callable, lock: threading.Lock) -> Callable:
    """Makes a function wait while another thread holds the lock."""

    def call(*args: Any) -> Any:
        with lock:
            return function(*args)

    return call


class Goals(NamedTuple):
    """The places of goals in flat observations [..., F], and their rewards."""

    fraction: float  # of a batch that gets new goals
    before: int  # steps of a sequence that only fill its first stack
    shape: tuple  # of a goal
    achieved: slice  # of an observation
    desired: slice
    rewards: Callable  # of achieved and desired goals
    ends: Callable | None  # whether episodes end there, if the environment computes it
    horizon: int  # later goals are from so many next steps
    close: Callable[[], None]  # closes the environment that computes rewards

    def as_goals(self, flat: Array) -> Array:
        """Converts flat goals [..., G] to float32 of the environment's shape."""
        return flat.reshape(*flat.shape[:-1], *self.shape).astype(jnp.float32)

    def relabel(self, replay: Any, state: Any, sample: Any, key: Array) -> Any:
        """Gives the first sequences [B, W, ...] of a Sample goals that were achieved later.

        Computes their rewards and ends for these goals.
        """
        rows = round(self.fraction * len(sample.indices))
        steps = jax.tree.map(lambda x: x[:rows], sample.experience)
        first = sample.indices[:rows] + self.before * replay.envs
        horizon = min(self.horizon, replay.max_size // replay.envs)  # no ring is longer
        later = replay.later(state, first, key, state.storage.valid, horizon=horizon)
        single_steps = replace(replay, sequence_length=None)  # a view of the same state
        goal = single_steps.get(state, later).observation[:, None, self.achieved]
        observation = steps.observation.at[..., self.desired].set(goal)
        # A step is rewarded for the goal achieved after it; a sequence's last step is not used.
        achieved = self.as_goals(jnp.roll(observation[..., self.achieved], -1, axis=1))
        desired = self.as_goals(observation[..., self.desired])
        steps = steps._replace(observation=observation, reward=self.rewards(achieved, desired))
        if self.ends:
            terminated = (self.ends(achieved, desired) > 0) & steps.valid
            cut_off = steps.terminated & ~terminated
            steps = steps._replace(terminated=terminated, truncated=steps.truncated | cut_off)
        experience = jax.tree.map(lambda x, y: x.at[:rows].set(y), sample.experience, steps)
        return sample._replace(experience=experience)


def find_goals(args: Any, envs: gym.vector.VectorEnv, make_envs: Callable) -> Goals:
    """Finds the goals of environments such as `envs`. UsageError if they have none.

    `make_envs(1)` makes an environment for rewards that JAX cannot trace.
    """
    offline = round(args.offline_fraction * args.batch_size) if args.offline_data else 0
    for part in (args.batch_size - offline, offline):
        if part > 0 and round(args.her_fraction * part) == 0:
            raise UsageError(f"her_fraction: {args.her_fraction} of {part} is less than 1 sequence")
    if isinstance(envs.single_observation_space, Packed):
        raise UsageError("her_fraction takes no images: goals are found in a vector of numbers")
    task, close = find_task(envs, make_envs)
    names = environments.before_wrap(envs).single_observation_space.spaces
    ends_at = np.cumsum([flatdim(space) for space in names.values()])
    end_of = dict(zip(names, ends_at.tolist(), strict=True))  # in the order of the flat vector
    shape = names["desired_goal"].shape
    size = flatdim(names["desired_goal"])
    achieved, desired = (
        slice(end_of[name] - size, end_of[name]) for name in ("achieved_goal", "desired_goal")
    )
    try:
        lock = threading.Lock()
        compute_reward: Any = method_of(task, "compute_reward")
        rewards = of_goals(one_at_a_time(compute_reward, lock), shape)
        compute_terminated = method_of(task, "compute_terminated")
        ends = compute_terminated and of_goals(one_at_a_time(compute_terminated, lock), shape)
    except Exception as error:
        close()
        text = f"compute_reward of {task} fails with two goals and an empty info"
        raise UsageError(f"her_fraction: {text}: {type(error).__name__}: {error}") from error
    horizon = getattr(first_of(envs).spec, "max_episode_steps", None) or LONGEST
    before = args.frame_stack - 1
    places = (shape, achieved, desired)
    return Goals(args.her_fraction, before, *places, rewards, ends, horizon, close)
