"""Does for a script what it cannot do alone. A module is imported at its first use.

    experiment    a run that is saved, resumed, evaluated and recorded
    run_folder    owns the folder of a run: its lock, flags, what is saved, its end
    checkpoints   saves and restores the state of training
    agent_file    saves the best agent in one file, which can be read without this package
    policies      loads trained agents
    disk          stores arrays by their names
    watch         shows a trained agent, as a program
    usage         errors in flags, and the flags of a run that is resumed
    tracking      flags in TensorBoard, Weights & Biases, where a run comes from
    compiled      trains in environments written in JAX, and many agents at once
    processes     several processes that train together
    images        convolutions, stacks of frames, videos
    packed        observations of images and numbers, as bytes
    vault         experience on disk
    replays       batches of stacks, with other goals (goals), with data from before (offline)
    success       which episodes succeeded, in environments that say it
    spaces        the spaces that an agent is made for
    memory_tasks  two environments that take memory
    bit_flipping  an environment with goals

A script imports this package at one place, and this package imports no script. What it needs of an
algorithm is the protocol `Agent` in `agents`.
"""

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cleanreplay.errors import UsageError as UsageError

if TYPE_CHECKING:
    from cleanreplay import (  # noqa: F401
        checkpoints,
        compiled,
        experiment,
        images,
        packed,
        spaces,
        success,
        usage,
        vault,
    )

__version__ = "0.3.0"

# Names that programs of users import from here, and the modules that have them.
PUBLIC = {"read_flags": "usage", "play_episodes": "experiment", "Trainer": "compiled"}


def __getattr__(name: str) -> Any:
    """Imports a module of this package, or one of PUBLIC, at its first use."""
    if name in PUBLIC:
        return getattr(importlib.import_module(f"cleanreplay.{PUBLIC[name]}"), name)
    if find_spec(f"cleanreplay.{name}") is None:
        raise AttributeError(f"cleanreplay has no {name}")
    return importlib.import_module(f"cleanreplay.{name}")


def load_policy(place: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """Loads an agent, as a function from observations [N, ...] to actions [N, ...].

    `place` is the folder of a run, whose best agent it is, or the file of an agent. It does not
    explore. An agent with a memory is also told where episodes begin, as in
    `policy(observations, is_first)`. `script` is the file that trained it, if it was moved.
    UsageError if the agent or the script is not there, or does not fit.
    """
    from cleanreplay import policies

    return policies.load_policy(place, script)
