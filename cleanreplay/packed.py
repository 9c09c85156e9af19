"""Packs observations of images and numbers: a Dict becomes a row of bytes.

A Dict with an image is packed into one array of uint8. It is then stacked, stored and saved like
any other observation, and images take no more bytes than before. Numbers are float32, and packing
keeps every bit of them. The `layout` of the space describes the bytes.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box


class Part(NamedTuple):
    """An entry of a Dict. An image keeps its shape and dtype; other entries are flat float32."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class Packed(Box):
    """The space of bytes [*lead, P] that hold the parts in `layout`."""

    def __init__(self, layout: tuple[Part, ...], lead: tuple[int, ...] = ()) -> None:
        super().__init__(0, 255, (*lead, sum(map(num_bytes, layout))), np.uint8)
        self.layout = layout


def num_bytes(part: Part) -> int:
    """Counts the bytes of a part."""
    return math.prod(part.shape) * np.dtype(part.dtype).itemsize


def pack(parts: dict, layout: tuple[Part, ...]) -> Any:
    """Packs arrays {name: [*lead, *shape]} into bytes [*lead, P], of NumPy or JAX.

    Numbers may have any shape of the right size. The first part is an image, which shows `lead`.
    """
    first = parts[layout[0].name]
    lead = first.shape[: first.ndim - len(layout[0].shape)]
    rows = []
    for name, shape, dtype in layout:
        flat = parts[name].astype(dtype).reshape(*lead, math.prod(shape))
        rows.append(flat.view(np.uint8))
    xp: Any = np if isinstance(first, np.ndarray) else jnp
    return xp.concatenate(rows, axis=-1)


def unpack(x: Any, layout: tuple[Part, ...]) -> dict:
    """Unpacks bytes [*lead, P] into arrays {name: [*lead, *shape]}, of NumPy or JAX."""
    parts = {}
    end = 0
    for part in layout:
        start, end = end, end + num_bytes(part)
        flat = x[..., start:end].copy().view(part.dtype)
        parts[part.name] = flat.reshape(*x.shape[:-1], *part.shape)
    return parts
