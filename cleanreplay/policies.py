"""Loads trained agents: as functions from observations to actions, or with their parts."""

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from cleanreplay import agent_file, disk, environments, flags, protocol, spaces
from cleanreplay.errors import UsageError
from cleanreplay.packed import pack
from cleanreplay.protocol import Script


class Loaded(NamedTuple):
    """A trained agent."""

    agent: Any  # a `protocol.Agent`
    params: Any  # of its `act`
    script: Script  # the module that trained it
    args: Any  # flags of the algorithm
    run: Any  # flags of the experiment
    observation_space: Any


def load_agent(place: Path | str, script: Path | str = "") -> Loaded:
    """Loads the agent of a file, or the best agent of a run, or else that of its checkpoint."""
    saved = flags.read_run(place)
    module: Any = import_script(Path(script or saved["script"]))
    if Path(module.__file__).name != Path(saved["script"]).name:
        tqdm.write(f"{place} was trained by {saved['script']}, and {script} loads it")
    run, args = flags.read_flags(place, module.Run, module.Args)
    stored = agent_file.open_agent(agent_file.find(place))
    number, own = agent_file.first_left(stored.about)
    args = replace(args, **own)
    flags.check_flags(args, run)
    observation_space, action_space = spaces_of(saved, partial(module.make_envs, args, run), run)
    agent = module.Agent(args, observation_space, action_space)
    known = disk.names(jax.eval_shape(agent.init, agent_file.KEY_SHAPE))
    what = f"{stored.file} is of another script or version"
    found = agent_file.read_leaves(stored, agent_file.policy_leaves(agent), known, what)
    if number is not None:
        found = {name: x[number] for name, x in found.items()}
    params = agent_file.policy_params(agent, found)
    return Loaded(agent, params, module, args, run, observation_space)


def load_policy(place: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """Loads an agent as a function, see `cleanreplay.load_policy`."""
    loaded = load_agent(place, script)
    agent, params = loaded.agent, loaded.params
    act = protocol.policy(agent, params)
    example = agent.example_step.observation
    layout = getattr(loaded.observation_space, "layout", ())

    def policy(observations: Any, *is_first: Any) -> np.ndarray:
        observations = as_observations(observations, example, layout)
        if len(observations) == 0:  # networks need at least one
            return protocol.policy(agent, params)(example[None])[:0]
        return act(observations, *is_first)

    return policy


def spaces_of(saved: dict, make_envs: Callable, run: Any) -> list:
    """Returns the spaces of observations and actions of a run.

    If one is not in JSON, such as a Tuple of an edited script, both are read from the environment.
    """
    known = [saved["spaces"].get(name) for name in ("observation", "action")]
    if all(known):
        return [spaces.from_json(about) for about in known]
    with closing(environments.make_first(run, make_envs)) as envs:
        return [envs.single_observation_space, envs.single_action_space]


def as_observations(given: Any, example: np.ndarray, layout: tuple = ()) -> np.ndarray:
    """Converts observations [N, ...] to the dtype of a single `example`.

    With a layout they are a dict of arrays [N, ...], which is packed. ValueError if the shape
    differs, or the conversion would change numbers.
    """
    if layout:
        names = [part.name for part in layout]
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise ValueError(f"observations must be a dict of {', '.join(names)}")
        parts = {}
        count = np.shape(given[names[0]])[:1]
        for name, shape, dtype in layout:
            like = np.zeros((*example.shape[:-1], *shape), dtype)
            x = np.asarray(given[name])
            if x.ndim == 0 or x.shape[:1] != count:
                raise ValueError(f"observations must have as many rows in {name} as in {names[0]}")
            has_numbers = like.dtype.kind == "f" and x.size == len(x) * like.size
            parts[name] = as_observations(x.reshape(-1, *like.shape) if has_numbers else x, like)
        return pack(parts, layout)
    given = np.asarray(given)
    if given.shape[1:] != example.shape:
        expected = ", ".join(map(str, example.shape))
        raise ValueError(f"observations must be [N, {expected}], not {given.shape}")
    expected = f"observations must be {example.dtype}, as in training"
    is_float = example.dtype.kind == "f"
    if given.dtype.kind not in "iub" and not is_float:
        raise ValueError(f"{expected}, not {given.dtype}")
    observations = given.astype(example.dtype, copy=False)
    if not is_float and (observations != given).any():
        raise ValueError(f"{expected}: numbers from {given.min()} to {given.max()} do not fit")
    return observations


def import_script(file: Path) -> Script:
    """Imports a script as a module. It need not be on Python's path."""
    file = (file if file.is_file() else Path(file.name)).absolute()  # in the working directory
    for name in (file.stem, str(file)):
        module: Any = sys.modules.get(name)
        if module is not None and Path(module.__file__ or "").absolute() == file:
            return module
    if not file.is_file():
        raise UsageError(f"no script {file}: give its place, as in load_policy(folder, script)")
    spec: Any = importlib.util.spec_from_file_location(str(file), file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(file)] = module  # where dataclasses look for it; no module has this name
    spec.loader.exec_module(module)
    return module
