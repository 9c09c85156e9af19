"""Writes the spaces of an agent as JSON, so that it loads without its environment.

Other spaces, such as Text, are None.
"""

from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

from cleanreplay import environments
from cleanreplay.packed import Packed, Part


def of_envs(envs: gym.vector.VectorEnv) -> dict:
    """Returns the spaces of environments as JSON.

    `given` is that of the observations before they are made arrays.
    """
    found = {"observation": envs.single_observation_space, "action": envs.single_action_space}
    found["given"] = environments.before_wrap(envs).single_observation_space
    return {name: to_json(space) for name, space in found.items()}


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
    if isinstance(space, MultiBinary):
        return {"binary": space.n}
    if not isinstance(space, Dict | Tuple):
        return None
    entries: Any = space.spaces
    names = {"names": list(entries)} if isinstance(space, Dict) else {}
    parts = [to_json(part) for part in (entries.values() if names else entries)]
    return None if None in parts else names | {"spaces": parts}


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
    if "binary" in about:
        return MultiBinary(about["binary"])
    if "spaces" in about:
        parts = [from_json(part) for part in about["spaces"]]
        if "names" not in about:
            return Tuple(parts)
        return Dict(OrderedDict(zip(about["names"], parts, strict=True)))  # in this order
    shape = tuple(about["shape"])
    if "layout" in about:
        layout = tuple(Part(name, tuple(of_one), dtype) for name, of_one, dtype in about["layout"])
        return Packed(layout, shape[:-1])
    dtype: Any = np.dtype(about["dtype"])
    low, high = (np.full(shape, np.array(about[name]).astype(dtype)) for name in ("low", "high"))
    return Box(low, high, dtype=dtype)
