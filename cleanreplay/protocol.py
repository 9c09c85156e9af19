"""Defines what this package needs of an algorithm, and of a script."""

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

    Two methods may take an extra parameter. An `act` with `memory`, after the observation, takes
    and returns a recurrent state: a tuple of arrays [N, ...], initially `no_memory(N)`. A
    `train_step` with `next_observation` is also given the observation [N, ...] after the rollout.
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
        """Chooses actions [N]; explores unless the key is None. `args` are key and step."""

    def train_step(self, state: Any, rollout: Any, *args: Any, **kwargs: Any) -> Any:
        """Learns from a rollout [S, N]. `args` are key and step.

        Returns the State, its `policy_params`, the metrics, and possibly more.
        """


class Hooks(Agent, Protocol):
    """Optional methods of an algorithm. Without them a State has only parameters and replays."""

    def on_resume(self, state: Any) -> Any:
        """Returns the State of a resumed run, whose environments begin new episodes.

        Unfinished episodes in its replays are already truncated.
        """

    def on_data(self, state: Any, steps: Any) -> Any:
        """Returns the State of a new run, given all steps [rows, N, ...] of --offline-data."""

    def learned(self, state: Any) -> Any:
        """Returns the State with () for what a run with --init-from does not take of it.

        Replays are already ().
        """

    def before_evaluation(self, envs: Any, state: Any) -> None:
        """Prepares environments for an evaluation of a State, or for a video.

        Only those of runs that are stepped from Python.
        """


def on_resume(agent: Any, state: Any) -> Any:
    """Returns the State of a resumed run, with unfinished episodes truncated in its replays."""
    state = replays.map_replays(replays.truncate_episodes, state)
    return agent.on_resume(state) if hasattr(agent, "on_resume") else state


def on_data(agent: Any, state: Any) -> Any:
    """Returns the State, or RunnerState, after `on_data` of the agent."""
    data = replays.data_of(state)
    if data is None or not hasattr(agent, "on_data"):
        return state
    before = getattr(state, "agent", state)
    see = agent.on_data if before is state else jax.vmap(agent.on_data, in_axes=(0, None))
    # A number in place of each replay, so that no replay is copied.
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
    """Returns the state of the replay for --save-experience. UsageError unless exactly one."""
    found = replays.rings(state)
    if len(found) != 1:
        text = f"State has {len(found)} replay buffers, not one: leave the flag out"
        raise UsageError(f"save_experience: {text}")
    return found[0]


def policy(agent: Any, params: Any, key: Any = None) -> Callable:
    """Makes a function from NumPy observations [N, ...] to the environment's actions [N, ...].

    With a key it explores. For a recurrent agent it keeps the recurrent state between calls.
    `is_first` [N] marks starts of episodes; all episodes start at the first call, and if N changes.
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
    """The charts and the progress of an agent: `Log` of a script."""

    run: Any  # flags of the experiment
    args: Any  # flags of the algorithm
    folder: Path
    stop: list  # not empty if the run is to end
    first_step: int
    total: int  # steps of the whole run
    recent_returns: Any  # deque
    start_time: float
    writer: Any

    def open(
        self, first_step: int, recent_returns: Any = (), quiet: Any = None, writer: Any = None
    ) -> None:
        """Begins the charts and the progress bar."""

    def count_episodes(self, step: int, rollout: Any) -> None:
        """Records the returns of the episodes that end in a rollout, which began at `step`."""

    def end_iteration(self, end: int, state: Any, params: Any, metrics: dict) -> bool:
        """Logs what is due at step `end`. Returns whether the run is over."""

    def add_metrics(self, step: int, metrics: dict) -> None:
        """Logs metrics and shows the progress."""

    def write(self, step: int, metrics: dict, wall_time: float = 0) -> None:
        """Adds a point to each chart whose number is finite."""

    def finish(self, why: str) -> None:
        """Ends the run with this iteration or the next one. Sets `total` to 0."""

    def at_evaluation(self, step: int, params: Any, returns: Any) -> None:
        """Runs after an evaluation, with the parameters of `act`, and the returns of episodes.

        With --eval-episodes 0 it also runs, with empty `returns`.
        """

    def mean_return(self) -> float:
        """Returns the mean return of the last episodes."""

    def __exit__(self, *error: Any) -> Any:
        """Ends the event file."""


class Script(Protocol):
    """The part of a script that `load_policy` uses."""

    Run: Any  # dataclasses of flags
    Args: Any

    Agent: Any  # makes the algorithm from Args, the observation space and the action space

    def make_envs(self, args: Any, run: Any, num_envs: int) -> Any:
        """Makes N environments that are stepped together."""


# The fields of a Step that this package reads by name. A Step may have more.
STEP_FIELDS = ("observation", "action", "reward", "terminated", "truncated", "valid")


def check_step(step: Any) -> None:
    """Raises UsageError if a Step lacks a field that this package reads, or a field is empty."""
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
    """Returns whether the flag --save-experience exists, and is set."""
    return getattr(agent.args, "save_experience", False)
