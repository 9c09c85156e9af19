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
from gymnasium.spaces import Box, Dict, Tuple
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
    given_space: Any  # of observations before they are made arrays; None if it is not known


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
    make_envs = partial(module.make_envs, args, run)
    observation_space, action_space, given_space = spaces_of(saved, make_envs, run)
    agent = module.Agent(args, observation_space, action_space)
    known = disk.names(jax.eval_shape(agent.init, agent_file.KEY_SHAPE))
    what = f"{stored.file} is of another script or version"
    found = agent_file.read_leaves(stored, agent_file.policy_leaves(agent), known, what)
    if number is not None:
        found = {name: x[number] for name, x in found.items()}
    params = agent_file.policy_params(agent, found)
    return Loaded(agent, params, module, args, run, observation_space, given_space)


def load_policy(place: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """Loads an agent as a function, see `cleanreplay.load_policy`."""
    loaded = load_agent(place, script)
    agent, params = loaded.agent, loaded.params
    act = protocol.policy(agent, params)
    example = agent.example_step.observation
    layout = getattr(loaded.observation_space, "layout", ())
    space = loaded.given_space
    if isinstance(space, Box) or getattr(loaded.args, "frame_stack", 1) > 1:
        space = None  # they are arrays [N, ...] already

    def policy(observations: Any, *is_first: Any) -> np.ndarray:
        is_single = space is not None and is_one(space, observations)
        if is_single:
            observations = jax.tree.map(lambda x: np.asarray(x)[None], observations)
        if layout:
            observations = as_packed(observations, example, layout, space)
        else:
            observations = as_observations(observations, example, space)
        if len(observations) == 0:  # networks need at least one
            return protocol.policy(agent, params)(example[None])[:0]
        actions = act(observations, *is_first)
        return actions[0] if is_single else actions

    return policy


def spaces_of(saved: dict, make_envs: Callable, run: Any) -> list:
    """Returns the spaces of observations and actions of a run, and that of what it is given.

    If one of the first two is not in JSON, such as Text of an edited script, all are read from the
    environment.
    """
    known = [saved["spaces"].get(name) for name in ("observation", "action", "given")]
    if all(known[:2]):
        return [about and spaces.from_json(about) for about in known]
    with closing(environments.make_first(run, make_envs)) as envs:
        given = environments.before_wrap(envs).single_observation_space
        return [envs.single_observation_space, envs.single_action_space, given]


def is_one(space: Any, x: Any) -> bool:
    """Returns whether this is an observation of a space, and not N of them."""
    if isinstance(space, Dict):
        entries = space.spaces.items()
        return isinstance(x, Mapping) and all(n in x and is_one(part, x[n]) for n, part in entries)
    if isinstance(space, Tuple):
        return isinstance(x, tuple) and all(map(is_one, space.spaces, x))
    return np.shape(x) == space.shape


def as_flat(space: Any, x: Any, shape: tuple) -> Any:
    """Flattens observations [N, ...] of a space. If they are [N, *shape] they stay as they are.

    ValueError if they are not among the observations of the space.
    """
    is_raw = isinstance(x, Mapping) or (isinstance(space, Tuple) and isinstance(x, tuple))
    if not is_raw and np.shape(x)[1:] == shape:
        return x
    for entry, rows in environments.leaves_of(space, x):
        is_batch = np.ndim(rows) > 0 and np.shape(rows)[1:] == entry.shape
        if not is_batch or not (isinstance(entry, Box) or all(map(entry.contains, rows))):
            raise ValueError(f"observations must be in {entry}, one or [N, ...], not {rows}")
    return environments.flat(space, x)


def as_packed(given: Any, example: np.ndarray, layout: tuple, space: Any = None) -> np.ndarray:
    """Packs observations, a dict of arrays [N, ...], as those of training were packed.

    Entries that are no Box in `space` are flattened. ValueError as in `as_observations`.
    """
    names = [part.name for part in layout]
    if not isinstance(given, Mapping) or set(given) != set(names):
        raise ValueError(f"observations must be a dict of {', '.join(names)}")
    parts = {}
    count = np.shape(given[names[0]])[:1]
    for name, shape, dtype in layout:
        like = np.zeros((*example.shape[:-1], *shape), dtype)
        x = given[name]
        if space is not None and not isinstance(space[name], Box):
            x = as_flat(space[name], x, shape)
        x = np.asarray(x)
        if x.ndim == 0 or x.shape[:1] != count:
            raise ValueError(f"observations must have as many rows in {name} as in {names[0]}")
        has_numbers = like.dtype.kind == "f" and x.size == len(x) * like.size
        parts[name] = as_observations(x.reshape(-1, *like.shape) if has_numbers else x, like)
    return pack(parts, layout)


def as_observations(given: Any, example: np.ndarray, space: Any = None) -> np.ndarray:
    """Converts observations [N, ...] to the dtype of a single `example`.

    Those of `space`, if it is no Box, are flattened. ValueError if the shape differs, or the
    conversion would change numbers.
    """
    given = np.asarray(given if space is None else as_flat(space, given, example.shape))
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
