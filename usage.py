"""The command line of a run: its flags are checked and read from its folder, and Ctrl-C is heeded.

A copy of a script works without this module, but says less.
"""

import fcntl
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.error import Error as UsageError
from tqdm import tqdm

MAY_BE_0 = ("seed", "eval_episodes", "checkpoint_interval", "learning_starts")
# Flags of a run that a resume cannot change. Those of the algorithm cannot change, either.
NOT_RESUMABLE = ("env_id", "env_kwargs", "seed", "num_seeds")
STOPPING = b"\nstopping after this iteration; once more ends the run without saving\n"


def prepare(flags: Any, parse: Callable) -> Any:
    """The flags (Run, Args) of the command line. With --resume, that run's are the defaults.

    With --distributed, this process joins the others.
    """
    run, args = flags
    if run.resume:
        defaults = read_flags(run.resume, type(run), type(args))
        flags = parse(default=type(flags)(*defaults))
    if run.distributed:
        import compiled

        compiled.join_processes(run.distributed)
    return flags


def check(args: Any, run: Any) -> None:
    """Raises UsageError for a flag that cannot be meant."""
    for name, value in (vars(args) | vars(run)).items():
        least = 0 if name in MAY_BE_0 else 1
        if type(value) is int and not least <= value < 2**31:
            raise UsageError(f"{name} must be from {least} to 2**31 - 1, not {value}")
        if type(value) is float and not math.isfinite(value):
            raise UsageError(f"{name} must be a finite number, not {value}")
    if run.env_kwargs == "{}":
        return
    try:
        kwargs = json.loads(run.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError('not a JSON object, such as {"continuous": true}')
        gym.make_vec(run.env_id, 1, **kwargs).close()
    except (TypeError, ValueError) as error:
        what = f"--env-id {run.env_id} --env-kwargs '{run.env_kwargs}'"
        raise UsageError(f"{what}: {error}") from error


def check_iteration(steps: int, total_timesteps: int, log_interval: int) -> None:
    """Raises UsageError if an iteration has more steps than the training; says if it is long."""
    how = "num_envs and train_frequency, or num_steps"
    if steps > total_timesteps:
        text = f"an iteration has {steps} steps, because of {how}"
        raise UsageError(f"total_timesteps must be {steps} or more: {text}")
    if steps > log_interval:
        tqdm.write(f"each iteration, and so each log entry, has {steps:,} steps, because of {how}")


def read_flags(folder: Path | str, run_class: Any, args_class: Any) -> tuple[Any, Any]:
    """The flags of the run in `folder`, as `Run` and `Args` of its script.

    Flags that are newer than the run have their default values.
    """
    try:
        text = Path(folder, "args.json").read_text()
        saved = json.loads(text, parse_constant=lambda _: None)  # infinity, in old runs
        run, args = saved["run"], saved["args"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = "is not the folder of a run, which a script makes in runs/ and has args.json"
        raise UsageError(f"resume: {folder} {text}") from error
    unknown = (run.keys() - vars(run_class()).keys()) | (args.keys() - vars(args_class()).keys())
    if unknown:
        text = f"is a run of another script, which has {', '.join(sorted(unknown))}"
        raise UsageError(f"resume: {folder} {text}")
    return run_class(**run | {"distributed": ""}), args_class(**args)


def check_resume(args: Any, run: Any) -> tuple[Any, Any]:
    """The former flags of a resumed run. Raises UsageError if one differs that may not."""
    before, args_before = read_flags(run.resume, type(run), type(args))
    flags = vars(run) | vars(args)
    for name, value in (vars(before) | vars(args_before)).items():
        may_change = name == "total_timesteps" or (hasattr(run, name) and name not in NOT_RESUMABLE)
        if flags[name] != value and not may_change:
            raise UsageError(f"resume: {name} must stay {value}, not become {flags[name]}")
    return before, args_before


def lock_run(folder: Path) -> Callable[[], None]:
    """Keeps other processes from training in the folder, until the function it returns is called.

    UsageError if one does.
    """
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UsageError(f"resume: another process trains in {folder}") from error
    return file.close


def stop_on_signals(stop: list, run: Any) -> Callable[[], None]:
    """From now on Ctrl-C, SIGTERM and SIGHUP are appended to `stop`, which ends the run.

    A second of the same kind ends the process. Returns a function that undoes this.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before: dict = {}

    def note(number: int, _: Any) -> None:
        os.write(2, STOPPING)  # print could be interrupted while it prints
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)

    if run.vectorization == "async":
        # A terminal signals the processes of the environments, too. Training needs them until then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, note)

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo
