"""An agent in one file: `best.safetensors`, which NumPy, torch and JAX can read without this code.

The file has the arrays that the policy needs. Their names are those that they have in the State of
the algorithm, such as params/params/Dense_0/kernel. Its metadata say all that args.json says of the
run, so that the file alone is an agent.
"""

import json
import math
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from cleanreplay import files, trees
from cleanreplay.agents import Agent
from cleanreplay.errors import UsageError

NAME = "best.safetensors"
KEY = "cleanreplay"  # of the metadata, whose values are texts
FORMAT = 1
KEY_SHAPE = jax.ShapeDtypeStruct((2,), np.uint32)  # of a random key


class BestAgent:
    """The file of the agent that did best in the evaluations of a run.

    Args:
      folder: that of the run.
      agent: an `agents.Agent`.
      about: what args.json says.
      score: of the best agent of an old version. Only a higher one is saved.
    """

    def __init__(self, folder: Path, agent: Agent, about: dict, score: float = -math.inf) -> None:
        self.file = folder / NAME
        self.agent = agent
        self.about = about
        self.score = score
        self.step = 0
        if self.file.exists():
            before = read_about(self.file)
            self.score, self.step = before["return"], before["step"]

    def save_if_better(
        self, step: int, params: Any, score: float, own: dict[str, Any] | None = None
    ) -> None:
        """Writes these parameters of `act`, unless earlier ones had this score or a higher one.

        Those of the step of the file are not written again: a second evaluation may be luckier.
        `own` are the flags of the algorithm in which this agent differs from args.json.
        """
        if not math.isfinite(score) or score <= self.score or step == self.step:
            return
        self.score, self.step = float(score), step
        own = own or {}
        about = self.about | {"args": self.about["args"] | own, "own": own}
        arrays = dict(zip(self.names, jax.tree.leaves(params), strict=True))
        write(self.file, arrays, about | {"step": step, "return": self.score})

    @cached_property
    def names(self) -> list[str]:
        """Those of the arrays: to find them takes longer than to write them."""
        return policy_names(self.agent)


def write(file: Path, arrays: dict[str, Any], about: dict) -> None:
    """Writes an agent: the whole file, or nothing."""
    arrays = {name: np.asarray(x, order="C") for name, x in arrays.items()}
    about = about | {"format": FORMAT, "checksums": trees.checksums(arrays)}
    files.write_whole(file, save(arrays, metadata={KEY: json.dumps(about)}))


def read_about(file: Path | str) -> dict:
    """What the file of an agent says of it: as args.json, with its `step` and its `return`.

    UsageError if it is damaged, or no agent.
    """
    return read(file, with_arrays=False)[0]


def read(file: Path | str, with_arrays: bool = True) -> tuple[dict, dict[str, np.ndarray]]:
    """What the file of an agent says of it, and its arrays by their names.

    UsageError if it is damaged, or no agent.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            text = (opened.metadata() or {}).get(KEY)
            about: dict[str, Any] = json.loads(text) if text else {"format": 0}
            check_format(file, about["format"])
            keys = opened.keys() if with_arrays else ()
            arrays = {name: opened.get_tensor(name) for name in keys}
        if with_arrays:
            trees.check_sums(arrays, about["checksums"])
    except (SafetensorError, ValueError) as error:
        how = "copy it again"
        if Path(file).name == NAME:
            how += ", or delete it to load the newest checkpoint of the run"
        raise UsageError(f"{file} is damaged, or no safetensors ({error}): {how}") from error
    return about, arrays


def check_format(file: Path | str, version: int) -> None:
    """Raises UsageError if a file of safetensors is no agent, or one that is too new."""
    if version == 0:
        raise UsageError(f"{file} is no agent: CleanReplay did not write it")
    if version > FORMAT:
        text = f"{file} has format {version}, and here formats up to {FORMAT} are known"
        raise UsageError(f"{text}: update cleanreplay")


def find(place: Path | str) -> Path | None:
    """The file of an agent: `place` itself, or that in the folder of a run if there is one."""
    file = Path(place, NAME) if Path(place).is_dir() else Path(place)
    return file if file.is_file() else None


def read_params(file: Path, agent: Agent) -> Any:
    """The parameters of `act` of an agent. UsageError if they are of another network."""
    _, found = read(file)
    shapes = jax.eval_shape(lambda key: agent.policy_params(agent.init(key)), KEY_SHAPE)
    here = dict(zip(policy_names(agent), jax.tree.leaves(shapes), strict=True))
    check_like(f"{file} is of another script or version", found, here)
    leaves = [jax.numpy.asarray(found[name]) for name in here]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def read_into_state(file: Path, agent: Agent) -> dict[str, np.ndarray]:
    """The arrays of an agent by the names of the leaves of a State that begins with them.

    A leaf that is a copy at the start of a run is a copy again, as in a target network.
    """
    _, found = read(file)
    like = trees.by_name(jax.eval_shape(agent.init, KEY_SHAPE), "/")
    names = policy_names(agent)
    computed = [name for name in names if name not in like]
    if computed:
        what = f"`policy_params` computes {computed[0]}, which is not in the State"
        raise UsageError(f"init_from: {what}: begin with the folder of the run")
    here = {name: like[name] for name in names}
    check_like(f"init_from: {file} is of another network or script", found, here)
    taken = {name: found.get(original) for name, original in copies(agent, list(like)).items()}
    return found | {name: x for name, x in taken.items() if x is not None}


def check_like(what: str, found: dict, here: dict) -> None:
    """Raises UsageError if arrays have other names or shapes than here."""
    there, expected = ({name: x.shape for name, x in tree.items()} for tree in (found, here))
    trees.check_shapes(what, there, expected)


def policy_names(agent: Agent) -> list[str]:
    """A name for each leaf of `policy_params`: that of the leaf of the State which it is."""
    state = jax.eval_shape(agent.init, KEY_SHAPE)
    program, shapes = jax.make_jaxpr(agent.policy_params, return_shape=True)(state)
    inputs, outputs = program.jaxpr.invars, program.jaxpr.outvars
    known = dict(zip(map(id, inputs), trees.names(state, "/"), strict=True))
    own = trees.names(shapes, "/")  # of what `policy_params` computes
    return [known.get(id(x), name) for x, name in zip(outputs, own, strict=True)]


def copies(agent: Agent, names: list[str]) -> dict[str, str]:
    """The leaves of a new State that are copies of others, by their names: the others' names."""
    outputs = jax.make_jaxpr(agent.init)(KEY_SHAPE).jaxpr.outvars
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(x), name)) for name, x in zip(names, outputs, strict=True)]
    return {name: original for name, original in pairs if name != original}
