"""Names, shapes and checksums of the leaves of a pytree, to compare what was saved with a run."""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path

from cleanreplay.errors import UsageError


def names(tree: Any, separator: str = ".") -> list[str]:
    """The name of each leaf, such as params.Dense_0.bias."""
    paths = [path for path, _ in tree_leaves_with_path(tree)]
    return [keystr(path, simple=True, separator=separator) for path in paths]


def by_name(tree: Any, separator: str = ".") -> dict[str, Any]:
    """The leaves of a tree by their names."""
    return dict(zip(names(tree, separator), jax.tree.leaves(tree), strict=True))


def checksums(tree: Any) -> dict[str, int]:
    """A checksum of each leaf, by its name. Without those that other hosts have a part of."""
    sums = {}
    for name, x in by_name(tree).items():
        if getattr(x, "is_fully_addressable", True) or x.is_fully_replicated:
            x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            data: Any = np.asarray(x).reshape(-1).view(np.uint8)
            sums[name] = zlib.crc32(data)
    return sums


def check_shapes(what: str, there: dict, here: dict) -> None:
    """Raises UsageError if leaves have other names or shapes where they were saved than here."""
    # Parameters first: their names say more than those of the optimizer.
    for name in sorted(here | there, key=lambda name: "params" not in name):
        if there.get(name) != here.get(name):
            shapes = [tree.get(name, "missing") for tree in (there, here)]
            raise UsageError(f"{what}: {name} is {shapes[0]} there, {shapes[1]} here")


def check_sums(found: dict, sums: dict[str, int]) -> None:
    """Raises ValueError if the checksum of a leaf is another than in `sums`, if it is there."""
    for name, number in checksums(found).items():
        if sums.get(name, number) != number:
            raise ValueError(f"{name} has another checksum than when it was saved")
