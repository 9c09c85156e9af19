"""Does for a script what it cannot do alone. A module is imported at its first use.

    experiment    a run that is saved, resumed, evaluated and recorded
    run_folder    the folder of a run: its lock, flags, what is saved, its end
    checkpoints   the state of training on disk
    agent_file    the best agent in one file, which can be read without this package
    policies      trained agents as functions
    disk          arrays by their names, in files that are written as a whole
    watch         a program that shows a trained agent
    flags         checks of flags, and the flags of a run that is resumed
    tracking      flags in TensorBoard, Weights & Biases, where a run comes from
    terminal      signals, and output that nobody reads
    environments  the first environment of a run, stacks, packed Dicts, successes
    networks      vectors of observations: convolutions of images
    spaces        the spaces that an agent is made for, as JSON
    packed        observations of images and numbers, as bytes
    replays       stacks, hindsight (goals) and offline data (offline) around a replay
    vault         experience on disk
    jax_envs      environments written in JAX, stepped together
    compiled      trains in them, and many agents at once
    devices       agents, and the batches of one agent, divided over devices
    sweep         agents with other values of some flags
    distributed   several processes that train together
    shares        one agent in several processes, each with a share of its environments
    memory_tasks  two environments that take memory
    bit_flipping  an environment with goals

A script imports this package at one place, and this package imports no script. What it needs of an
algorithm is the protocol `Agent` in `protocol`.
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
        environments,
        experiment,
        flags,
        jax_envs,
        networks,
        packed,
        replays,
        shares,
        spaces,
        vault,
    )

__version__ = "0.3.0"

# Names that programs of users import from here, and the modules that have them.
PUBLIC = {"read_flags": "flags", "play_episodes": "experiment", "make_trainer": "compiled"}


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
