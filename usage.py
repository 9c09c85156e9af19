"""The command line of a run: its flags are checked and read from its folder, and Ctrl-C is heeded.

A copy of a script works without this module, but says less.
"""

import fcntl
import importlib
import json
import math
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.error import Error as UsageError
from jax.tree_util import keystr, tree_flatten_with_path
from tqdm import tqdm

# Flags of a run that a resume cannot change. Those of the algorithm cannot change, either.
NOT_RESUMABLE = ("env_id", "env_kwargs", "seed", "num_seeds")
MAY_BE_0 = (
    *("seed", "eval_episodes", "checkpoint_interval", "learning_starts"),
    *("burn_in", "policy_steps"),
)
NOT_NEGATIVE = (
    *("learning_rate", "policy_lr", "q_lr", "adam_epsilon", "max_grad_norm", "clip_coef"),
    *("alpha", "target_kl", "priority_exponent", "priority_epsilon"),
)
FRACTIONS = (
    *("gamma", "gae_lambda", "tau", "start_e", "end_e", "exploration_fraction"),
    *("importance_exponent", "priority_max_fraction", "critic_dropout"),
)
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
    for flags in (args, run):
        for field in fields(flags):
            check_flag(field.name, getattr(flags, field.name), field.type)
    check_env(run)


def check_flag(name: str, value: Any, expected: Any) -> None:
    """Raises UsageError if the value is not of the expected type, or out of range."""
    if expected == tuple[int, ...]:
        for number in value:
            check_flag(name, number, int)
    is_number = expected is float and type(value) is int
    if expected in (int, float, bool, str) and type(value) is not expected and not is_number:
        raise UsageError(f"{name} must be of type {expected.__name__}, not {value!r}")
    least = 0 if name in MAY_BE_0 else 1
    bits = 29 if name == "buffer_size" else 31
    if expected is int and not least <= value < 2**bits:
        raise UsageError(f"{name} must be from {least} to 2**{bits} - 1, not {value}")
    if type(value) is float and not math.isfinite(value):
        raise UsageError(f"{name} must be a finite number, not {value}")
    if name in FRACTIONS and not 0 <= value <= 1:
        raise UsageError(f"{name} must be from 0 to 1, not {value}")
    if name in NOT_NEGATIVE and value is not None and value < 0:
        raise UsageError(f"{name} must be 0 or more, not {value}")


def check_env(run: Any) -> None:
    """Raises UsageError if there is no such environment, or if it does not take the arguments."""
    what = f"--env-id {run.env_id}"
    module, _, name = run.env_id.rpartition(":")
    try:
        if module:
            importlib.import_module(module)  # registers its environments
        spec = gym.spec(name)
    except (gym.error.NameNotFound, gym.error.NamespaceNotFound) as error:
        hint = "--env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module"
        raise UsageError(f"{what}: {error} {hint}") from error
    except gym.error.Error as error:  # such as no such version
        raise UsageError(f"{what}: {error}") from error
    except ModuleNotFoundError as error:
        hint = ": pip install ale-py" if module == "ale_py" else ""
        raise UsageError(f"{what}: {error}{hint}") from error
    except TypeError as error:  # a relative import
        raise UsageError(f"{what}: {module} is not the name of a module") from error
    mode: Any = None if run.vectorization == "auto" else "sync"
    is_atari = str(spec.entry_point).startswith("ale_py")
    if is_atari and (mode or not spec.vector_entry_point):
        game = name.removeprefix("ALE/").partition("-")[0].removesuffix("NoFrameskip")
        better = f"ale_py:ALE/{game}-v5 with --vectorization auto"
        tqdm.write(f"{what} has raw frames of 210 x 160 x 3: {better} has DeepMind's preprocessing")
    if run.env_kwargs != "{}":
        check_env_kwargs(run, mode, is_atari)


def check_env_kwargs(run: Any, mode: Any, is_atari: bool) -> None:
    """Raises UsageError if the environment does not take the arguments."""
    what = f"--env-id {run.env_id} --env-kwargs '{run.env_kwargs}'"
    try:
        kwargs = json.loads(run.env_kwargs)
        if not isinstance(kwargs, dict):
            raise ValueError('not a JSON object, such as {"continuous": true}')
        gym.make_vec(run.env_id, 1, mode, **kwargs).close()
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what}: {error}") from error
    for key in ("episodic_life", "life_loss_info"):
        if is_atari and kwargs.get(key):
            raise UsageError(
                f"{what}: with {key} charts would count lives, not games: leave it out"
            )


def check_iteration(steps: int, total_timesteps: int, log_interval: int) -> None:
    """Raises UsageError if an iteration has more steps than the training; says if it is long."""
    how = "num_envs and train_frequency, or num_steps"
    if steps > total_timesteps:
        text = f"an iteration has {steps} steps, because of {how}"
        raise UsageError(f"total_timesteps must be {steps} or more: {text}")
    if steps > log_interval:
        tqdm.write(f"each iteration, and so each log entry, has {steps:,} steps, because of {how}")


def check_memory(init: Callable) -> None:
    """Raises UsageError if the first State has more bytes than the memory, or has no inputs."""
    try:
        leaves = jax.tree.leaves(jax.eval_shape(init))
    except ZeroDivisionError:  # older versions of Flax make no weights without inputs
        leaves = []
    if not leaves or any(x.size == 0 for x in leaves):
        raise UsageError("env_id: the observations or actions of the environment have no numbers")
    stats = jax.local_devices()[0].memory_stats() or {}
    has = stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    needs = sum(x.size * x.dtype.itemsize for x in leaves)
    if needs > has:
        text = f"replay and networks need {needs / 1e9:.1f} GB, and there are {has / 1e9:.1f} GB"
        raise UsageError(f"buffer_size: {text}")


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
    args = {name: tuple(x) if isinstance(x, list) else x for name, x in args.items()}
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


def explain(error: Exception, run: Any, folder: Path, step: int, envs: Any) -> None:
    """Adds to what the environments raised where it happened, and which processes are dead."""
    error.from_environment = True  # type: ignore[attr-defined]  # `main` shows its traceback
    error.add_note(f"in {run.env_id} at step {step} of {folder}")
    if isinstance(error, EOFError | ConnectionError) and hasattr(envs.unwrapped, "processes"):
        # A process of gymnasium.vector.AsyncVectorEnv was killed. Closing would wait for it.
        processes = envs.unwrapped.processes
        for process in processes:
            process.join(timeout=0.5)
        dead = [process.name for process in processes if not process.is_alive()]
        error.add_note(f"killed: {', '.join(dead)}")
        envs.close(terminate=True)


def check_rollout(rollout: Any, run: Any, step: int) -> None:
    """Raises FloatingPointError if the environments returned NaN or infinity, and says when."""
    for name, values in (("reward", rollout.reward), ("observation", rollout.observation)):
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            t, env, *_ = np.argwhere(~np.isfinite(values))[0]
            where = f"environment {env} at step {step + t * values.shape[1]}"
            raise FloatingPointError(f"{run.env_id}: the {name} is not finite in {where}")


def raise_if_other(folder: Any, wanted: Any, error: Exception) -> None:
    """Raises UsageError if the arrays in `folder` are not `wanted`, and names the first of them."""
    import orbax.checkpoint as ocp

    def shapes_by_name(tree: Any) -> dict:
        leaves, _ = tree_flatten_with_path(tree)
        return {keystr(path, simple=True, separator="."): tuple(x.shape) for path, x in leaves}

    try:
        saved = shapes_by_name(ocp.StandardCheckpointer().metadata(folder).item_metadata.tree)
    except Exception:
        return  # it cannot be read
    expected = shapes_by_name(wanted)
    for name in expected | saved:
        there = saved.get(name, "missing")
        here = expected.get(name, "missing")
        if there != here:
            text = f"{folder} is of another script or version: {name} is {there} there, {here} here"
            raise UsageError(text) from error
