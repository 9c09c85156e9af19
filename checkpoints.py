"""What lets a run go on, and its agent be used: checkpoints, flags of a resumed run, signals.

A script imports this module where `--checkpoint-interval` is above 0, or with `--resume`. The
folder of a run keeps the newest two checkpoints. Each, `checkpoints/STEP`, has all of the training
(item `state`), the parameters to act with (`params`) and the returns of the last episodes
(`recent`). `best/STEP` has the parameters to act with that were best in an evaluation.
"""

import errno
import json
import logging
import math
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

FIXED = ("env_id", "env_kwargs", "seed", "num_seeds")  # flags of a run that a resume cannot change


class ResumeError(OSError):
    """A run cannot go on."""


def read_flags(folder: Path | str, run_class: Any, args_class: Any) -> tuple[Any, Any]:
    """The flags of the run in `folder`, as `Run` and `Args` of its script."""
    try:
        text = Path(folder, "args.json").read_text()
    except OSError as error:
        text = "is not the folder of a run, which a script makes in runs/ and has args.json"
        raise ResumeError(f"resume: {folder} {text}") from error
    with suppress(ValueError, KeyError, TypeError):
        saved = json.loads(text)
        if saved["args"].keys() == asdict(args_class()).keys():
            run = run_class(**saved["run"] | {"distributed": ""})
            return run, args_class(**saved["args"])
    raise ResumeError(f"resume: {folder} is a run of another script or version")


def reopen_folder(args: Any, run: Any) -> Path:
    """The folder of --resume; args.json gets total_timesteps. ResumeError: a fixed flag changed."""
    folder = Path(run.resume).absolute()
    before, before_args = read_flags(folder, type(run), type(args))
    flags = asdict(run) | asdict(args)
    for name, value in (asdict(before) | asdict(before_args)).items():
        may_change = name == "total_timesteps" or (hasattr(run, name) and name not in FIXED)
        if flags[name] != value and not may_change:
            raise ResumeError(f"resume: {name} must stay {value}, not become {flags[name]}")
    made = Checkpoints(folder).newest_step()
    if args.total_timesteps < min(made, before_args.total_timesteps):
        raise ResumeError(f"resume: {made} steps were made, more than {args.total_timesteps}")
    if jax.process_index() == 0:
        flags = {"run": asdict(before), "args": asdict(args)}
        (folder / "args.json").write_text(json.dumps(flags))
    return folder


def write(manager: ocp.CheckpointManager, step: int, items: Any, **metrics: Any) -> None:
    """Writes a checkpoint, if there is none of this step. OSError if the disk is full."""
    if step == 0 or step in manager.all_steps():
        return
    try:
        manager.save(step, args=items, force=True, **metrics)
        return
    except Exception as error:
        if "no space left" not in str(error).lower():
            raise
    # Orbax says the same in many lines: let it finish, so that ours is the last one.
    logging.getLogger("asyncio").disabled = True
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            with suppress(Exception):
                thread.join(timeout=1)
    raise OSError(errno.ENOSPC, "no space left", str(manager.directory))


class Checkpoints:
    """The checkpoints of the run in `folder`, each written whole or not at all."""

    def __init__(self, folder: Path | str) -> None:
        folder = Path(folder).absolute()
        # Training writes over the state that is saved, so it is not saved while training goes on.
        newest_two = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        best_one = ocp.CheckpointManagerOptions(
            max_to_keep=1,
            best_fn=lambda metrics: metrics["return"],
            enable_async_checkpointing=False,
        )
        self.newest_two = ocp.CheckpointManager(folder / "checkpoints", options=newest_two)
        self.best_one = ocp.CheckpointManager(folder / "best", options=best_one)

    def save(self, step: int, state: Any, params: Any, recent: Sequence) -> None:
        """Saves the state of training after `step`, unless it is saved already."""
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            params=ocp.args.StandardSave(params),
            recent=ocp.args.JsonSave([float(x) for x in recent]),
        )
        write(self.newest_two, step, items)

    def save_if_best(self, step: int, params: Any, score: float) -> None:
        """Keeps parameters to act with, if no earlier ones had a higher score."""
        if math.isfinite(score):
            items = ocp.args.Composite(params=ocp.args.StandardSave(params))
            write(self.best_one, step, items, metrics={"return": float(score)})

    def newest(self, like: Any) -> tuple[int, Any, list]:
        """Step, state and `recent` of the newest checkpoint; `like` has shapes and devices."""
        step = self.newest_step()
        state = ocp.args.StandardRestore(like)
        items = ocp.args.Composite(state=state, recent=ocp.args.JsonRestore())
        restored = self.newest_two.restore(step, args=items)
        return step, restored["state"], restored["recent"]

    def best(self, like: Any) -> Any:
        """The parameters that were best in an evaluation; without one those saved last."""
        items = ocp.args.Composite(params=ocp.args.StandardRestore(like))
        step = self.best_one.best_step()
        if step is not None:
            return self.best_one.restore(step, args=items)["params"]
        return self.newest_two.restore(self.newest_step(), args=items)["params"]

    def newest_step(self) -> int:
        """The step of the newest checkpoint; ResumeError if there is none."""
        step = self.newest_two.latest_step()
        if step is None:
            raise ResumeError(f"{self.newest_two.directory} has no checkpoint")
        return step


def shapes_of(state: Any) -> Any:
    """The shapes, dtypes and devices of a state's arrays, without the arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def truncate_episodes(replay: Any) -> Any:
    """Marks the unfinished episodes of a replay as truncated, because environments start anew.

    Its last row becomes the one that only resets: it shows what the row before it led to.
    """
    steps = replay.storage
    rows = len(steps.valid)
    last = (replay.cursor - 1) % rows
    before = (replay.cursor - 2) % rows
    unfinished = steps.valid[before] & ~steps.terminated[before]
    steps = steps._replace(
        terminated=steps.terminated.at[last].set(False),
        truncated=steps.truncated.at[before].set(unfinished).at[last].set(False),
        valid=steps.valid.at[last].set(False),
    )
    return replay._replace(storage=steps)


def note_signals(signals: list[int], run: Any) -> None:
    """Appends Ctrl-C and SIGTERM to the list; a second of the same kind ends the process."""

    def note(number: int, _: Any) -> None:
        signals.append(number)
        signal.signal(number, signal.SIG_DFL)

    if run.vectorization == "async":
        # A terminal signals the environments' processes, too, which training needs until it saves.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
