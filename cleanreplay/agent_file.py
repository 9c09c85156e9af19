"""Saves the best agent of a run in one file, and finds and reads agents.

`best.safetensors` has the leaves of the State that the policy needs, by their names in a
checkpoint, such as params/params/Dense_0/kernel. It also has the contents of args.json, so the file
alone is an agent.
"""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from cleanreplay import checkpoints, disk, protocol
from cleanreplay.distributed import of_first
from cleanreplay.errors import UsageError
from cleanreplay.protocol import Agent

NAME = "best.safetensors"
KEY_SHAPE = jax.ShapeDtypeStruct((2,), np.uint32)  # of a random key


class DamagedError(UsageError):
    """A file is damaged, or has no agent."""


class BestAgent:
    """Writes the file of the agent with the best evaluation of a run.

    Args:
      folder: the folder of the run.
      about: the contents of args.json.
    """

    def __init__(self, folder: Path, about: dict) -> None:
        self.file = folder / NAME
        self.about = about
        self.score = -math.inf  # of the best agent
        self.step = 0
        if self.file.exists():
            before = open_agent(self.file).about
            self.score, self.step = before["return"], before["step"]

    def save_if_better(
        self, step: int, leaves: dict[str, Any], score: float, own: dict[str, Any] | None = None
    ) -> None:
        """Writes `policy_leaves` of an agent, if its score is higher than that of the file.

        An agent of the file's step is not written: its second evaluation may only be luckier. `own`
        has the flags of the algorithm in which this agent differs from args.json.
        """
        if not math.isfinite(score) or score <= self.score or step == self.step:
            return
        self.score, self.step = float(score), step
        own = own or {}
        about = self.about | {"args": self.about["args"] | own, "own": own}
        about |= {"step": step, "return": self.score, "is_whole": False, "num_agents": None}
        disk.write(self.file, leaves.items(), about)


def find(place: Path | str) -> Path:
    """Finds the file of an agent: `place` itself, or in the folder of a run the best agent.

    Without a best agent it is the newest checkpoint. UsageError if neither exists.
    """
    for file in (Path(place), Path(place, NAME)):
        if file.is_file():
            return file
    return checkpoints.newest(Path(place))


def open_agent(file: Path | str) -> disk.Stored:
    """Opens the file of an agent or a checkpoint. UsageError if it is damaged, or another file."""
    try:
        return disk.open_file(Path(file))
    except (OSError, ValueError) as error:
        raise cannot_be_read(file, error) from error


def read_leaves(
    stored: disk.Stored, wanted: dict, known: Iterable[str], what: str, absent: Iterable[str] = ()
) -> dict:
    """Reads leaves by their names in the State; those of several agents are [num_agents, ...].

    Args:
      stored: the opened file.
      wanted: the names, with the shapes of one agent.
      known: the names of all leaves of a State.
      what: begins the text of an error.
      absent: names of fields that are None in this State, such as statistics of observations.

    UsageError if a leaf is missing there or here, has a different shape, or is damaged.
    """
    has_several = stored.about["num_agents"] is not None
    prefix = "agent/" if has_several else ""
    fields = {name.partition("/")[0] for name in [*wanted, *absent]}
    there = {
        name.removeprefix(prefix): shape[has_several:]
        for name, shape in stored.shapes.items()
        if name.startswith(prefix)
    }
    compared = {
        name: shape
        for name, shape in there.items()
        if name in wanted or (name not in known and name.partition("/")[0] in fields)
    }
    disk.check_shapes(what, compared, wanted)
    try:
        found = stored.read([prefix + name for name in wanted])
    except (OSError, ValueError) as error:
        raise cannot_be_read(stored.file, error) from error
    return {name: found[prefix + name] for name in wanted}


def first_left(about: dict) -> tuple[int | None, dict]:
    """Returns the index of the first agent of a file that has not diverged, and its own flags.

    The index is None if the file has one agent, without an axis for it.
    """
    if about["num_agents"] is None:
        return None, about["own"]
    first, *_ = left_in(about)
    return first, {name: values[first] for name, values in about["swept"].items()}


def left_in(about: dict) -> list[int]:
    """Returns the indices of the agents of a file that have not diverged; [0] of a single one."""
    if about["num_agents"] is None:
        return [0]
    return [i for i in range(about["num_agents"]) if i not in about["lost"]]


def cannot_be_read(file: Path | str, error: Exception) -> UsageError:
    """Turns a reading error into a UsageError that names the file."""
    reason = checkpoints.first_line(error)
    if checkpoints.is_of_the_machine(error):
        return UsageError(f"{file} cannot be read now: {reason}")
    how = "copy it again"
    if Path(file).name == NAME:
        how += ", or delete it to load the newest checkpoint of the run"
    return DamagedError(f"{file} is damaged, or no agent ({reason}): {how}")


def policy_leaves(agent: Agent) -> dict[str, tuple]:
    """Returns the names and shapes of the leaves of a State that `policy_params` uses."""
    state = jax.eval_shape(agent.init, KEY_SHAPE)
    program = jax.make_jaxpr(agent.policy_params)(state).jaxpr
    used = {id(x) for step in program.eqns for x in step.invars} | set(map(id, program.outvars))
    leaves = zip(disk.by_name(state).items(), program.invars, strict=True)
    return {name: like.shape for (name, like), x in leaves if id(x) in used}


def policy_params(agent: Agent, found: dict[str, np.ndarray]) -> Any:
    """Computes the parameters of `act` from the leaves that `policy_leaves` names."""
    state = jax.eval_shape(agent.init, KEY_SHAPE)
    leaves = [
        jnp.asarray(found[name], like.dtype) if name in found else like
        for name, like in disk.by_name(state).items()
    ]
    return agent.policy_params(jax.tree.unflatten(jax.tree.structure(state), leaves))


def start_from(source: str, state: Any, agent: Any) -> Any:
    """Begins a State, or RunnerState of compiled.py, with what another agent has learned.

    Args:
      source: the file of an agent, or the folder of a run: its newest readable checkpoint, or else
        its best agent. The agents of `state` take those that have not diverged, in order; if these
        are fewer, they are taken again from the first.
      state: a new state.
      agent: its `learned` selects the leaves that are taken.

    UsageError if a leaf has a different shape, or cannot be read.
    """
    before = getattr(state, "agent", state)
    for_several = before is not state
    found, about = of_first(partial(read_learned, source, before, agent, for_several))
    has_several = about["num_agents"] is not None
    left = np.array(left_in(about))

    def fitting(like: jax.Array, x: np.ndarray) -> jax.Array:
        x = x if has_several else x[None]
        rows = left[np.arange(len(like)) % len(left)] if for_several else left[0]
        return jax.device_put(x[rows].astype(like.dtype), like.sharding)

    leaves = disk.by_name(before)
    taken = [fitting(x, found[name]) if name in found else x for name, x in leaves.items()]
    after = jax.tree.unflatten(jax.tree.structure(before), taken)
    tqdm.write(f"starts from {source}, as it was after {about['step']:,} steps")
    if has_several and about["lost"]:
        tqdm.write(f"{source}: agents {about['lost']} diverged, and are left out")
    return state._replace(agent=after) if for_several else after


def files_in(source: str) -> list[Path]:
    """Lists the files that a run can begin with, in the order to try them."""
    place = Path(source)
    if place.is_file():
        return [place]
    steps = reversed(checkpoints.steps_in(place))
    best = [place / NAME] if (place / NAME).is_file() else []
    files = [*(checkpoints.file_at(place, step) for step in steps), *best]
    return files or [checkpoints.newest(place)]


def read_learned(source: str, state: Any, agent: Any, for_several: bool) -> tuple[dict, dict]:
    """Reads what another agent has learned, by the names of leaves, and its `about`.

    A line reports each damaged file, if another file remains to begin with.
    """
    try:
        *files, last = files_in(source)
        for file in files:
            try:
                return read_file(file, state, agent, for_several)
            except DamagedError as error:
                tqdm.write(f"init_from: {error}")
        return read_file(last, state, agent, for_several)
    except UsageError as error:
        raise UsageError(f"init_from: {error}") from error


def read_file(file: Path, state: Any, agent: Any, for_several: bool) -> tuple[dict, dict]:
    """Reads what the agent of a file has learned, see `read_learned`.

    A checkpoint gives all leaves that `learned` selects. The file of an agent gives those of its
    policy, and of leaves that start as copies of them, as in a target network.
    """
    stored = open_agent(file)
    is_whole = stored.about["is_whole"]
    leaves = {name: x.shape[for_several:] for name, x in disk.by_name(state).items()}
    learned = protocol.learned(agent, state)
    of_state = {name: leaves[name] for name in disk.names(learned)}
    wanted = of_state if is_whole else policy_leaves(agent)
    absent = disk.names(jax.tree.map(lambda x: x is None, learned, is_leaf=lambda x: x is None))
    absent = [name for name in absent if name not in leaves]
    what = f"{file} is of another network or script"
    found = read_leaves(stored, wanted, leaves, what, absent)
    if not is_whole:
        originals = copies(agent, list(leaves)).items()
        found |= {name: found[original] for name, original in originals if original in found}
    return found, stored.about


def copies(agent: Agent, names: list[str]) -> dict[str, str]:
    """Finds leaves of a new State that are copies of others: {name: name of the original}."""
    outputs = jax.make_jaxpr(agent.init)(KEY_SHAPE).jaxpr.outvars
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(x), name)) for name, x in zip(names, outputs, strict=True)]
    return {name: original for name, original in pairs if name != original}
