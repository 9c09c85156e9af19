"""Writes the spaces of an agent as JSON, so that it loads without its environment.

Spaces other than Box, Discrete and MultiDiscrete are None: `load_policy` then makes the
environment.
"""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Space

from cleanreplay import environments
from cleanreplay.packed import Packed, Part


def of_envs(envs: gym.vector.VectorEnv) -> dict:
    """Returns the spaces of environments as JSON, and the entries of their observations."""
    found = {"observation": envs.single_observation_space, "action": envs.single_action_space}
    entries = entries_of(environments.before_wrap(envs).single_observation_space)
    return {name: to_json(space) for name, space in found.items()} | {"entries": entries}


def entries_of(space: Space) -> dict | None:
    """Lists the names in a Dict in order, each with the names in its entry; None if no Dict."""
    if not isinstance(space, Dict):
        return None
    return {name: entries_of(part) for name, part in space.spaces.items()}


def to_json(space: Space) -> dict | None:
    """Writes a space as JSON."""
    if isinstance(space, Discrete):
        return {"n": int(space.n), "start": int(space.start)}
    if isinstance(space, MultiDiscrete):
        return {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    if isinstance(space, Box):
        about = {"shape": list(space.shape), "dtype": np.dtype(space.dtype).name}
        about |= {"low": bounds(space.low), "high": bounds(space.high)}
        return about | ({"layout": space.layout} if isinstance(space, Packed) else {})
    return None


def bounds(values: np.ndarray) -> Any:
    """Returns the bounds of a Box: nested lists, or a number if all are the same."""
    first = values.flat[0] if values.size > 0 else values.dtype.type(0)
    return first.item() if (values == first).all() else values.tolist()


def from_json(about: dict) -> Space:
    """Makes the space that `to_json` wrote."""
    if "n" in about:
        return Discrete(about["n"], start=about["start"])
    if "nvec" in about:
        return MultiDiscrete(np.array(about["nvec"]), start=np.array(about["start"]))
    shape = tuple(about["shape"])
    if "layout" in about:
        layout = tuple(Part(name, tuple(of_one), dtype) for name, of_one, dtype in about["layout"])
        return Packed(layout, shape[:-1])
    dtype: Any = np.dtype(about["dtype"])
    low, high = (np.full(shape, np.array(about[name]).astype(dtype)) for name in ("low", "high"))
    return Box(low, high, dtype=dtype)
