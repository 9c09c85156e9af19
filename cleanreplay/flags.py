"""Checks flags before a run begins, and reads them from the folder of a run that is resumed."""

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import current_process
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import numpy as np
from tqdm import tqdm

from cleanreplay import agent_file, distributed, environments, terminal
from cleanreplay.errors import UsageError

INT32 = 2**31 - 1
POSITIVE = float(np.finfo(np.float32).tiny)  # as a limit it means: more than 0
# The least and the largest value of flags with these names. No other flag is limited.
LIMITS: dict[tuple, tuple] = {
    (1, INT32): (
        *("total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs"),
        *("batch_size", "target_network_frequency", "train_frequency", "gradient_steps"),
        *("policy_frequency", "hidden_sizes", "hidden_size", "n_step", "frame_stack"),
        *("train_length", "period", "sequence_length", "num_seeds", "num_devices", "log_interval"),
        *("eval_interval", "eval_max_steps"),
    ),
    (2, INT32): ("n_atoms",),  # of C51
    (1, 2**29 - 1): ("buffer_size",),
    (0, INT32): (
        *("seed", "eval_episodes", "checkpoint_interval", "learning_starts", "burn_in"),
        "policy_steps",
    ),
    (0, 1): (
        *("gamma", "gae_lambda", "q_lambda", "tau", "start_e", "end_e", "exploration_fraction"),
        *("importance_exponent", "priority_max_fraction", "critic_dropout", "her_fraction"),
        *("offline_fraction", "best_fraction", "expectile", "policy_dropout"),
    ),
    (0, math.inf): (
        *("learning_rate", "policy_lr", "q_lr", "clip_coef", "alpha", "target_kl"),
        *("priority_exponent", "priority_epsilon", "beta", "max_weight", "reward_scale"),
    ),
    (POSITIVE, math.inf): ("adam_epsilon", "max_grad_norm"),
}
CGROUPS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory"))
GPU_MEMORY = (
    ". JAX takes 75% of a GPU: set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 for more of it, and "
    "XLA_PYTHON_CLIENT_PREALLOCATE=false where another process uses it"
)
# Flags of a run that a resume cannot change. It cannot change those of the algorithm, either.
NOT_RESUMABLE = ("env_id", "env_kwargs", "seed", "num_seeds", "sweep")
PLACES = ("offline_data", "init_from")  # flags that may be folders
MINARI = "minari:"  # --offline-data minari:NAME is a dataset of Minari


def parse(parse_flags: Any) -> Any:
    """Parses the command line: (Run, Args). With --resume, the flags of that run are the defaults.

    `parse_flags` is a partial of tyro.cli, with the class of the flags. With --distributed, joins
    the other processes.
    """
    terminal.give_up_dead_streams()
    (flags_class,) = parse_flags.args
    tokens = with_whole_numbers(sys.argv[1:], flags_class.__annotations__.values())
    flags = parse_flags(args=tokens)
    run, args = flags
    if run.distributed:
        distributed.join(run.distributed)
    if run.resume:
        of_run = partial(read_flags, run.resume, type(run), type(args))
        flags = parse_flags(args=tokens, default=flags_class(*distributed.of_first(of_run)))
    return flags


def with_whole_numbers(tokens: list[str], classes: Any) -> list[str]:
    """Replaces 1e6 by 1000000 in the command line, where a flag of these dataclasses is an int."""
    types = {name: kind for flags in classes for name, kind in get_type_hints(flags).items()}
    names = {name for name, kind in types.items() if kind is int}
    result = []
    is_next = False  # whether the next token is the value of an int flag
    for token in tokens:
        flag, equals, value = token.partition("=")
        is_int = flag.startswith("--") and flag[2:].replace("-", "_") in names
        if is_int and equals:
            token = f"{flag}={as_whole_number(value)}"
        elif is_next:
            token = as_whole_number(token)
        is_next = is_int and not equals
        result.append(token)
    return result


def as_whole_number(text: str) -> str:
    """Returns 1000000 for 1e6, and any text that is not a whole number unchanged."""
    with suppress(ValueError):
        return str(int(text))
    with suppress(ValueError):
        number = float(text)
        return str(int(number)) if number.is_integer() else text
    return text


def check(args: Any, run: Any, make_envs: Callable) -> Any:
    """Checks the flags, and makes the first environment with `make_envs(1)`.

    Raises UsageError for an invalid flag.
    """
    check_process()
    if Path(run.resume).is_file():
        text = f"resume: {run.resume} is an agent, not the folder of a run"
        raise UsageError(f"{text}: use --init-from to begin with it")
    with distributed.ends_together():
        check_flags(args, run)
        envs = environments.make_first(run, make_envs)
        if run.capture_video and jax.process_index() == 0:
            environments.check_video(make_envs, envs.single_observation_space)
    return envs


def check_process() -> None:
    """Ends a process of --vectorization async if it begins to train.

    Such a process imports the file that Python was started with.
    """
    if getattr(current_process(), "_inheriting", False):
        how = 'call `train` under `if __name__ == "__main__":`'
        print(f"each process of the environments imports this file: {how}", file=sys.stderr)
        sys.exit(1)


def check_flags(args: Any, run: Any) -> None:
    """Raises UsageError for a flag of the wrong type, or beyond its limits."""
    for flags in (args, run):
        for name, kind in get_type_hints(type(flags)).items():
            check_flag(name, getattr(flags, name), kind)


def check_flag(name: str, value: Any, expected: Any) -> None:
    """Raises UsageError if a value is of the wrong type, or beyond the limits of its flag."""
    for plain in (int, float, bool, str):
        if expected == plain | None and value is not None:
            expected = plain
    is_number = expected is float and type(value) is int
    if expected in (int, float, bool, str) and type(value) is not expected and not is_number:
        raise UsageError(f"{name} must be of type {expected.__name__}, not {value!r}")
    if get_origin(expected) is Literal and value not in get_args(expected):
        choices = ", ".join(map(str, get_args(expected)))
        raise UsageError(f"{name} must be one of {choices}, not {value!r}")
    for (least, largest), names in LIMITS.items():
        if name not in names or value is None:
            continue
        for number in value if isinstance(value, tuple) else [value]:
            if not math.isfinite(number):
                raise UsageError(f"{name} must be a finite number, not {value}")
            if not least <= number <= largest:
                raise UsageError(f"{name} must be {in_words(least, largest)}, not {value}")


def in_words(least: float, largest: float) -> str:
    """Writes the limits of a flag in words."""
    if least == POSITIVE:
        return "more than 0"
    if largest == math.inf:
        return f"{least} or more"
    if largest == 1:
        return f"from {least} to 1"
    return f"from {least} to 2**{math.ceil(math.log2(largest))} - 1"


def check_iteration(agent: Any, log_interval: int) -> None:
    """Raises UsageError if an iteration is longer than the training; reports a long iteration."""
    steps = agent.steps_per_iteration
    how = "because of num_envs and train_frequency, or num_steps"
    if agent.rollout_shape[0] == 0:
        how = "which are gradient steps"
    if steps > agent.args.total_timesteps:
        text = f"an iteration has {steps} steps, {how}"
        raise UsageError(f"total_timesteps must be {steps} or more: {text}")
    if steps > log_interval:
        tqdm.write(f"each iteration, and so each log entry, has {steps:,} steps, {how}")


def check_memory(make: Callable) -> None:
    """Raises UsageError if the arrays that `make()` returns do not fit into memory."""
    leaves = jax.tree.leaves(jax.eval_shape(make))
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    has = stats.get("bytes_limit") or min([math.inf, *memory_limits()])
    needs = sum(x.size * x.dtype.itemsize for x in leaves)
    if needs > has:
        text = f"replay, data and networks need {needs / 1e9:.1f} GB, of {has / 1e9:.1f} GB in all"
        raise UsageError(f"buffer_size: {text}{GPU_MEMORY if device.platform == 'gpu' else ''}")


def memory_limits() -> list[int]:
    """Reads the bytes of memory of this machine, and the limits of a container or a job."""
    if not hasattr(os, "sysconf"):  # Windows
        return []
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in cgroup_files():
        with suppress(OSError, ValueError):  # without a limit the file has the word max
            limits.append(int(file.read_text()))
    return limits


def cgroup_files() -> set[Path]:
    """Returns the files in which Linux may limit the memory of this process and its groups."""
    groups = {root / place for root in CGROUPS for place in cgroup_places()}
    folders = groups | {parent for group in groups for parent in group.parents}
    names = ("memory.max", "memory.limit_in_bytes")  # of version 2, and of version 1
    return {folder / name for folder in folders for name in names}


def cgroup_places() -> list[str]:
    """Returns the paths of this process's groups, below that of the machine or the container."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return [""]
    return ["", *(line.split(":", 2)[2].lstrip("/") for line in lines)]


def read_run(place: Path | str) -> dict:
    """Reads the flags `run` and `args`, and the file of the `script`, from the folder of a run or
    the file of an agent.
    """
    if Path(place).is_file():
        return agent_file.open_agent(place).about
    try:
        saved = json.loads(Path(place, "args.json").read_text())
        return saved | {"run": dict(saved["run"]), "args": dict(saved["args"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        text = "is not the folder of a run: scripts make these in runs/, with args.json"
        raise UsageError(f"{place} {text}") from error


def read_flags(place: Path | str, run_class: Any, args_class: Any) -> tuple[Any, Any]:
    """Reads the flags of a run, or of an agent in a file, as `Run` and `Args` of its script.

    Flags that are newer than the run have their default values.
    """
    saved = read_run(place)
    run, args = saved["run"], saved["args"]
    unknown = (run.keys() - vars(run_class()).keys()) | (args.keys() - vars(args_class()).keys())
    if unknown:
        text = f"is a run of another script, which has {', '.join(sorted(unknown))}"
        how = f": if this script once had the flags, delete them from {Path(place, 'args.json')}"
        raise UsageError(f"{place} {text}{how if Path(place).is_dir() else ''}")
    run = from_json(run | {"distributed": ""}, run_class)
    return run_class(**run), args_class(**from_json(args, args_class))


def from_json(flags: dict, flags_class: Any) -> dict:
    """Restores the types that flags had before they were written as JSON."""
    types = get_type_hints(flags_class)
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in flags.items()}
    for name, x in flags.items():
        if isinstance(types[name], type) and not isinstance(x, types[name]) and x is not None:
            flags[name] = types[name](x)  # such as a Path, or an Enum
        elif x in ("inf", "-inf", "nan") and types[name] is not str:
            flags[name] = float(x)
    return flags


def with_absolute_places(flags: dict) -> dict:
    """Makes the paths in flags absolute, so that they hold in any working directory."""
    flags = dict(flags)
    for name in PLACES:
        place = flags.get(name, "")
        if place and not place.startswith(MINARI):
            flags[name] = str(Path(place).absolute())
    return flags


def check_resume(args: Any, run: Any) -> tuple[Any, Any]:
    """Reads the former flags of a resumed run. UsageError if one differs that may not change."""
    of_run = partial(read_flags, run.resume, type(run), type(args))
    before, args_before = distributed.of_first(of_run)
    flags = with_absolute_places(vars(run) | vars(args))
    for name, value in (vars(before) | vars(args_before)).items():
        may_change = name == "total_timesteps" or (hasattr(run, name) and name not in NOT_RESUMABLE)
        if name == "sweep":  # 0.001 is 1e-3
            from cleanreplay.sweep import make_settings  # which imports this module

            may_change = make_settings(value, args) == make_settings(run.sweep, args)
        if flags[name] != value and not may_change:
            raise UsageError(f"resume: {name} must stay {value}, not become {flags[name]}")
    return before, args_before
