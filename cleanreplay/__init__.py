"""Serves the runs of a script. A module is imported at its first use.

    experiment    a run that is saved, resumed, evaluated and recorded
    run_folder    the folder of a run: its lock, flags, signals and saved files
    checkpoints   the state of training on disk
    agent_file    the best agent in one file
    policies      trained agents as functions
    disk          arrays by their names, atomic writes, locks
    watch         a program that shows a trained agent
    flags         checks of flags, and the flags of a resumed run
    tracking      flags in TensorBoard, Weights & Biases, the origin of a run
    terminal      signals, and closed output streams
    environments  the first environment of a run, stacks, packed Dicts, successes
    networks      vectors of observations: convolutions of images
    spaces        the spaces of an agent, as JSON
    packed        observations of images and numbers, as bytes
    replays       stacks, hindsight (goals) and offline data (offline) around a replay
    vault         experience on disk
    jax_envs      environments written in JAX, stepped together
    compiled      training in these environments, and of many agents at once
    devices       agents, and the batches of one agent, divided over devices
    sweep         agents with other values of some flags
    distributed   several processes that train together
    shares        one agent in several processes, each with a share of its environments
    memory_tasks  environments that need a recurrent state
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
    """Imports a module of this package, or a name in PUBLIC, at its first use."""
    if name in PUBLIC:
        return getattr(importlib.import_module(f"cleanreplay.{PUBLIC[name]}"), name)
    if find_spec(f"cleanreplay.{name}") is None:
        raise AttributeError(f"cleanreplay has no {name}")
    return importlib.import_module(f"cleanreplay.{name}")


def load_policy(place: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """Loads an agent, as a function from observations [N, ...] to actions [N, ...].

    The function does not explore. For a recurrent agent it is `policy(observations, is_first)`,
    where `is_first` [N] marks the starts of episodes. Observations that are no Box, such as a Dict,
    are given as the environment gives them, N of them or one. `place` is the folder of a run, whose
    best agent is loaded, or the file of an agent. `script` is the file that trained it, if it was
    moved. UsageError if the agent or the script is missing, or does not fit.
    """
    from cleanreplay import policies

    return policies.load_policy(place, script)
