"""Defines what this package asks of an algorithm, and of a script."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from cleanreplay import replays
from cleanreplay.errors import UsageError


class Agent(Protocol):
    """An algorithm, as pure functions of its State.

    Two methods may have one parameter more. An `act` with a parameter `memory`, after the
    observation, takes and returns one: a tuple of arrays [N, ...] that begins as `no_memory(N)`. A
    `train_step` with a parameter `next_observation` is also given the observation [N, ...] that
    follows the rollout.
    """

    args: Any  # its flags
    example_step: Any  # a Step of one environment, with the fields in STEP_FIELDS
    rollout_shape: tuple[int, int]  # (S, N)
    steps_per_iteration: int  # S * N

    def init(self, key: Any) -> Any:
        """Returns the State before training."""

    def policy_params(self, state: Any) -> Any:
        """Returns the part of a State that `act` needs."""

    def to_env_action(self, action: Any) -> Any:
        """Returns the environment's actions."""

    def act(self, params: Any, observation: Any, *args: Any, **kwargs: Any) -> Any:
        """Chooses actions [N], which explore if there is a key. The other two are key and step."""

    def train_step(self, state: Any, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        """Learns from a rollout [S, N]. The other two are key and step.

        Returns the State, `policy_params` of it, and the metrics. There may be more.
        """


class Hooks(Agent, Protocol):
    """Methods that an algorithm may have. Without them a State is parameters and replays."""

    def on_resume(self, state: Any) -> Any:
        """Returns the State of a resumed run, whose environments begin new episodes.

        In its replays unfinished episodes are truncated already.
        """

    def on_data(self, state: Any, steps: Any) -> Any:
        """Returns the State of a new run, given all steps [rows, N, ...] of --offline-data."""

    def learned(self, state: Any) -> Any:
        """Returns the State with () for what a run with --init-from does not take of it.

        In place of replays there is () already.
        """

    def before_evaluation(self, envs: Any, state: Any) -> None:
        """Prepares environments for an evaluation of a State, or for a video.

        Only those of runs that are stepped from Python.
        """


def on_resume(agent: Any, state: Any) -> Any:
    """Returns the State of a resumed run: the unfinished episodes in its replays are truncated."""
    state = replays.map_replays(replays.truncate_episodes, state)
    return agent.on_resume(state) if hasattr(agent, "on_resume") else state


def on_data(agent: Any, state: Any) -> Any:
    """Returns the State, or RunnerState, after the agent has seen the data of --offline-data."""
    data = replays.data_of(state)
    if data is None or not hasattr(agent, "on_data"):
        return state
    before = getattr(state, "agent", state)
    see = agent.on_data if before is state else jax.vmap(agent.on_data, in_axes=(0, None))
    # A number in place of each replay, which would be copied.
    small = replays.map_replays(lambda x: x.replay.cursor, before)
    where = jax.tree.map(lambda x: x.sharding, small)
    after = jax.jit(see, out_shardings=where)(small, data.storage)
    after = replays.with_replays_of(before, after)
    return after if before is state else state._replace(agent=after)


def learned(agent: Any, state: Any) -> Any:
    """Returns the State with () for what --init-from does not take of it, such as replays."""
    state = replays.map_replays(lambda replay: (), state)
    return agent.learned(state) if hasattr(agent, "learned") else state


def before_evaluation(agent: Any, envs: Any, state: Any) -> None:
    """Prepares environments for an evaluation of a State, if the agent has something to prepare."""
    if hasattr(agent, "before_evaluation"):
        agent.before_evaluation(envs, state)


def experience(state: Any) -> Any:
    """Returns the state of the replay that --save-experience writes. UsageError if not just one."""
    found = replays.rings(state)
    if len(found) != 1:
        text = f"State has {len(found)} replay buffers, and one can be saved: leave the flag out"
        raise UsageError(f"save_experience: {text}")
    return found[0]


def policy(agent: Any, params: Any, key: Any = None) -> Callable:
    """Makes a function from NumPy observations [N, ...] to the environment's actions [N, ...].

    It explores if there is a key. That of an agent with a memory keeps it from call to call:
    `is_first` [N] tells where episodes begin; they all do at the first call, and if N changes.
    """
    if not takes(agent.act, "memory"):

        def act(observation: Any, step: Any = 0) -> Any:
            return agent.to_env_action(np.asarray(agent.act(params, observation, key, step)))

        return act
    memory = agent.no_memory(0)

    def act_with_memory(observation: Any, is_first: Any = False, step: Any = 0) -> Any:
        nonlocal memory
        num_envs = len(observation)
        if len(memory[0]) != num_envs:
            memory = agent.no_memory(num_envs)
        continues = ~np.broadcast_to(np.asarray(is_first, bool), num_envs)
        memory = tuple([np.where(continues, np.asarray(x).T, 0).T for x in memory])
        action, memory = agent.act(params, observation, memory, key, step)
        return agent.to_env_action(np.asarray(action))

    return act_with_memory


class Log(Protocol):
    """The charts of an agent and its progress: `Log` of a script."""

    run: Any  # flags of the experiment
    args: Any  # flags of the algorithm
    folder: Path
    stop: list  # has an item if the run is to end
    first_step: int
    total: int  # steps at the end
    recent_returns: Any  # deque
    start_time: float
    writer: Any

    def open(
        self, first_step: int, recent_returns: Any = (), quiet: Any = None, writer: Any = None
    ) -> None:
        """Begins the charts and the bar of progress."""

    def count_episodes(self, step: int, rollout: Any) -> None:
        """Keeps the returns of the episodes that end in a rollout, which began at `step`."""

    def end_iteration(self, end: int, state: Any, params: Any, metrics: dict) -> bool:
        """Logs what is due at step `end`. Returns whether the run is over."""

    def add_metrics(self, step: int, metrics: dict) -> None:
        """Logs metrics and shows the progress."""

    def write(self, step: int, metrics: dict, wall_time: float = 0) -> None:
        """Adds a point to each chart whose number is finite."""

    def finish(self, why: str) -> None:
        """Ends the run with this iteration or the next one. Sets `total` to 0."""

    def at_evaluation(self, step: int, params: Any, returns: Any) -> None:
        """Is called after an evaluation with the parameters of `act`, and the returns of episodes.

        It is also called without --eval-episodes. Then `returns` is empty.
        """

    def mean_return(self) -> float:
        """Returns the mean return of the last episodes."""

    def __exit__(self, *error: Any) -> Any:
        """Ends the event file."""


class Script(Protocol):
    """What `load_policy` calls in the script that trained an agent."""

    Run: Any  # dataclasses of flags
    Args: Any

    Agent: Any  # makes the algorithm from Args, the space of observations and that of actions

    def make_envs(self, args: Any, run: Any, num_envs: int) -> Any:
        """Makes N environments that are stepped together."""


# The fields of a Step that are read by name here. A Step of a single environment may have more.
STEP_FIELDS = ("observation", "action", "reward", "terminated", "truncated", "valid")


def check_step(step: Any) -> None:
    """Raises UsageError if a Step lacks a field that this package reads, or one is empty."""
    missing = [name for name in STEP_FIELDS if not hasattr(step, name)]
    if missing:
        what = f"Step must have {', '.join(missing)}: cleanreplay reads the fields by these names"
        raise UsageError(f"{what}. Rename them in cleanreplay/ as well, or keep them")
    if any(np.size(x) == 0 for x in jax.tree.leaves(step)):
        raise UsageError("env_id: the observations or actions of the environment have no numbers")


def takes(function: Callable, parameter: str) -> bool:
    """Returns whether a function has a parameter of this name."""
    return parameter in inspect.signature(function).parameters


def saves_experience(agent: Any) -> bool:
    """Returns whether the flag --save-experience is there, and set."""
    return getattr(agent.args, "save_experience", False)
