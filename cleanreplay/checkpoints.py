"""Saves the state of training, restores it, and loads trained agents.

The folder of a run keeps the newest two checkpoints. Each, `checkpoints/STEP`, has the whole state
of training (item `state`), the parameters to act with (`params`) and the returns of the last
episodes (`recent`). `best/STEP` has the parameters that did best in an evaluation.
"""

import errno
import importlib.util
import logging
import math
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.tree_util import keystr, tree_leaves_with_path
from tqdm import tqdm

from cleanreplay import files, spaces, usage
from cleanreplay.agents import Script
from cleanreplay.errors import UsageError
from cleanreplay.packed import pack

RECENT = ocp.args.Composite(recent=ocp.args.JsonRestore())


class Checkpoints:
    """The checkpoints in `folder`. Each is written as a whole or not at all."""

    def __init__(self, folder: Path | str, saves: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self.saves = saves
        # Training overwrites the state that is saved, so saving cannot go on in the background.
        options = ocp.CheckpointManagerOptions(create=saves, enable_async_checkpointing=False)
        latest = replace(options, max_to_keep=2)
        best = replace(options, max_to_keep=1, best_fn=lambda metrics: metrics["return"])
        self.latest = ocp.CheckpointManager(self.folder / "checkpoints", options=latest)
        self.best = ocp.CheckpointManager(self.folder / "best", options=best)

    def save(self, step: int, state: Any, params: Any, recent_returns: Sequence) -> None:
        """Saves the state of training after `step`."""
        about = {
            "returns": [float(x) for x in recent_returns],
            "checksums": {"state": checksums(state), "params": checksums(params)},
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            params=ocp.args.StandardSave(params),
            recent=ocp.args.JsonSave(about),
        )
        self.write(self.latest, step, items)

    def save_if_best(self, step: int, params: Any, score: float, own: dict | None = None) -> None:
        """Keeps these parameters to act with, if no earlier ones had this score or a higher one.

        `own` are the flags of the algorithm in which this agent differs from args.json.
        """
        best_step = self.best.best_step()
        is_better = best_step is None or score > self.best.metrics(best_step)["return"]
        if math.isfinite(score) and is_better:
            items = ocp.args.Composite(params=ocp.args.StandardSave(params))
            metrics = {"return": float(score), "checksums": checksums(params), "args": own or {}}
            self.write(self.best, step, items, metrics=metrics)

    def write(self, manager: Any, step: int, items: Any, **metrics: Any) -> None:
        """Writes a checkpoint, unless there is one of this step. UsageError if the disk is full."""
        if not self.saves or step == 0 or step in manager.all_steps():
            return
        silence_orbax(True)
        try:
            manager.save(step, args=items, force=True, **metrics)
        except Exception as error:
            if files.is_full(error):  # it stays silent: it would log more when it is freed
                end_threads()
                raise UsageError(f"no space left on the disk of {manager.directory}") from error
            silence_orbax(False)
            raise
        silence_orbax(False)

    def restore(self, state: Any) -> tuple[int, Any, list]:
        """The step, the state and the recent returns of the newest checkpoint that can be read.

        `state` has its shapes and devices; its arrays are deleted. Damaged ones are moved aside.
        """
        shapes = jax.tree.map(abstract, state)
        for x in jax.tree.leaves(state):
            x.delete()  # so that memory never holds two replays
        damaged = {}
        for step in sorted(self.latest.all_steps(), reverse=True):
            try:
                about = self.about(step)
                state = read(self.latest, step, "state", shapes, about["checksums"]["state"])
                break
            except UsageError:
                raise
            except Exception as error:
                if is_of_the_machine(error):
                    text = f"resume: checkpoint {step} cannot be read now: {first_line(error)}"
                    raise UsageError(text) from error
                damaged[step] = first_line(error)
        else:
            raise UsageError(f"resume: no checkpoint in {self.latest.directory} can be read")
        for other, reason in damaged.items():
            self.move_aside(other)
            what = f"checkpoint {other} is damaged and was moved to {self.folder / 'damaged'}"
            tqdm.write(f"{what}: the run goes on from {step} ({reason})")
        return step, state, about["returns"]

    def about(self, step: int) -> dict:
        """What a checkpoint says beside its arrays: the last returns, and the checksums."""
        about = self.latest.restore(step, args=RECENT)["recent"]
        if isinstance(about, list):  # of an old version
            return {"returns": about, "checksums": {"state": {}, "params": {}}}
        return about

    def move_aside(self, step: int) -> None:
        """Moves a checkpoint to the folder `damaged`, so that one of this step can be saved."""
        if jax.process_index() == 0:
            aside = self.folder / "damaged" / f"{step}_{time.time_ns()}"
            aside.parent.mkdir(exist_ok=True)
            (self.latest.directory / str(step)).rename(aside)
        multihost_utils.sync_global_devices(f"moved {step}")
        self.latest.reload()

    def best_params(self, params: Any) -> Any:
        """The best parameters to act with, or without an evaluation the newest ones.

        `params` has their shapes. UsageError if they are damaged.
        """
        manager, step = self.best, self.best.best_step()
        try:
            if step is None:
                manager, step = self.latest, self.latest_step()
                sums = self.about(step)["checksums"]["params"]
            else:
                sums = manager.metrics(step).get("checksums", {})
            return read(manager, step, "params", params, sums)
        except UsageError:
            raise
        except Exception as error:
            text = f"{manager.directory / str(step)} cannot be read: {first_line(error)}"
            raise UsageError(text) from error

    def best_flags(self) -> dict:
        """The flags of the algorithm in which the best agent differs from args.json."""
        step = self.best.best_step()
        return {} if step is None else self.best.metrics(step).get("args", {})

    def latest_step(self) -> int:
        """The step of the newest checkpoint."""
        step = self.latest.latest_step()
        if step is None:
            raise UsageError(f"{self.latest.directory} has no checkpoint")
        return step


def silence_orbax(silent: bool) -> None:
    """Whether Orbax logs, in a hundred lines, what it raises as well."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).disabled = silent


def end_threads() -> None:
    """Waits a second for each thread that would keep Python from ending."""
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            with suppress(Exception):
                thread.join(timeout=1)


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and devices of an array, without its numbers."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def names(tree: Any) -> list[str]:
    """The name of each leaf, such as params.Dense_0.bias."""
    return [keystr(path, simple=True, separator=".") for path, _ in tree_leaves_with_path(tree)]


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their names."""
    return dict(zip(names(tree), jax.tree.leaves(tree), strict=True))


def checksums(tree: Any) -> dict[str, int]:
    """A checksum of each leaf, by its name. Without those that other hosts have a part of."""
    sums = {}
    for name, x in by_name(tree).items():
        if getattr(x, "is_fully_addressable", True) or x.is_fully_replicated:
            x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
            data: Any = np.asarray(x).reshape(-1).view(np.uint8)
            sums[name] = zlib.crc32(data)
    return sums


def is_of_the_machine(error: Exception) -> bool:
    """Whether an error of reading is about memory, files or rights, and not about contents."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return False
    numbers = re.findall(r"OS error (\d+)", str(error))  # of tensorstore, which has its own errors
    is_of_os = any(int(number) != errno.ENOENT for number in numbers)
    return is_of_os or isinstance(error, OSError | MemoryError) or "RESOURCE_EXH" in str(error)


def first_line(error: Exception) -> str:
    """The beginning of what an error says."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def read(
    manager: ocp.CheckpointManager, step: int, item: str, wanted: Any, sums: dict[str, int]
) -> Any:
    """An item of a checkpoint, as a pytree like `wanted`, whose leaves are found by their names.

    UsageError if a leaf is missing here or there, or has another shape. ValueError if a checksum of
    `sums` is another.
    """
    folder = manager.directory / str(step) / item
    saved = ocp.StandardCheckpointHandler().metadata(folder).tree
    shapes, leaves = by_name(saved), by_name(wanted)
    there, here = (
        {
            name: x.shape for name, x in tree.items() if not name.endswith("num_updates")
        }  # of old runs
        for tree in (shapes, leaves)
    )
    check_shapes(f"{folder} is of another script or version", there, here)
    where = jax.tree.leaves(wanted)[0].sharding
    others = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for name, x in shapes.items()
    }
    like = jax.tree.unflatten(jax.tree.structure(saved), (others | leaves).values())
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    restored = manager.restore(step, args=args)[item]
    found = dict(zip(shapes, jax.tree.leaves(restored), strict=True))
    check_sums(found, sums)
    return jax.tree.unflatten(jax.tree.structure(wanted), [found[name] for name in leaves])


def start_from(folder: str, state: Any, learned: Callable) -> Any:
    """A new State, or RunnerState of compiled.py, that begins with what another run has learned.

    `learned(state)` is the part that is taken, with () for what is not. Of several agents in
    `folder` the first is taken by the first here, and so on; of too few all in turn. UsageError if
    the newest checkpoint of the run has other shapes, or cannot be read.
    """
    saver = Checkpoints(folder, saves=False)
    step = saver.latest.latest_step()
    if step is None:
        raise UsageError(f"init_from: {saver.latest.directory} has no checkpoint")
    agent = getattr(state, "agent", state)
    leaves, wanted = by_name(agent), by_name(learned(agent))
    try:
        found, has_several = read_learned(saver, step, leaves, wanted, agent is not state)
    except UsageError:
        raise
    except Exception as error:
        where = saver.latest.directory / str(step)
        raise UsageError(f"init_from: {where} cannot be read: {first_line(error)}") from error

    def fitting(name: str, like: jax.Array) -> jax.Array:
        x = found[name]
        x = x if has_several else x[None]
        rows = np.arange(len(like)) % len(x) if agent is not state else 0
        return jax.device_put(x[rows].astype(like.dtype), like.sharding)

    taken = [fitting(name, x) if name in wanted else x for name, x in leaves.items()]
    agent = jax.tree.unflatten(jax.tree.structure(agent), taken)
    tqdm.write(f"starts from {folder}, as it was after {step:,} steps")
    return state._replace(agent=agent) if hasattr(state, "agent") else agent


def read_learned(
    saver: Checkpoints, step: int, leaves: dict, wanted: dict, for_several: bool
) -> tuple[dict, bool]:
    """What a checkpoint has of the leaves `wanted`, and whether it is of several agents.

    UsageError if they have other shapes than here; ValueError if a checksum is another.
    """
    path = saver.latest.directory / str(step) / "state"
    saved = ocp.StandardCheckpointHandler().metadata(path).tree
    of_several = "agent" in saved  # it was trained by compiled.py
    saved = saved["agent"] if of_several else saved
    fields = {name.partition(".")[0] for name in wanted}
    saved = {field: part for field, part in saved.items() if field in fields}
    shapes = {
        name: x.shape[of_several:]
        for name, x in by_name(saved).items()
        if name in wanted or name not in leaves
    }
    here = {name: x.shape[for_several:] for name, x in wanted.items()}
    check_shapes(f"init_from: {path} is of another network or script", shapes, here)
    arrays = read_arrays(path, {"agent": saved} if of_several else saved)
    found = by_name(arrays["agent"] if of_several else arrays)
    prefix = "agent." if of_several else ""
    named_as_saved = {prefix + name: x for name, x in found.items()}
    check_sums(named_as_saved, saver.about(step)["checksums"]["state"])
    return found, of_several


def check_shapes(what: str, there: dict, here: dict) -> None:
    """Raises UsageError if leaves have other names or shapes in a checkpoint than in this run."""
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


def read_arrays(path: Path, saved: Any) -> Any:
    """Part of a checkpoint's tree, `saved`, as NumPy arrays. The rest of it is not read."""
    how = jax.tree.map(lambda x: ocp.RestoreArgs(restore_type=np.ndarray), saved)
    args = ocp.args.PyTreeRestore(item=saved, restore_args=how, partial_restore=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(path, args=args)


def truncate_episodes(replay: Any) -> Any:
    """Marks the unfinished episodes of a replay as truncated, because environments start anew.

    The last row has no successor, so it becomes the row that only resets. Its observation is what
    the row before led to.
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


def load_policy(folder: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """See `cleanreplay.load_policy`."""
    saved = usage.read_run(folder)
    module = import_script(Path(script or saved["script"]))
    run, args = usage.read_flags(folder, module.Run, module.Args)
    saver = Checkpoints(folder, saves=False)
    args = replace(args, **saver.best_flags())
    usage.check_flags(args, run)
    observation_space, action_space = spaces_of(saved, partial(module.make_envs, args, run), run)
    agent = module.Agent(args, observation_space, action_space)
    like = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.PRNGKey(0))
    params = saver.best_params(like)
    act = agent.policy(params)
    example = agent.example_step.observation
    layout = getattr(observation_space, "layout", ())

    def policy(observations: Any, *is_first: Any) -> np.ndarray:
        observations = as_observations(observations, example, layout)
        if len(observations) == 0:  # networks take one or more
            return agent.policy(params)(example[None])[:0]
        return act(observations, *is_first)

    return policy


def spaces_of(saved: dict, make_envs: Callable, run: Any) -> list:
    """The spaces of observations and actions of a run: those in its args.json, or of an old run
    those of its environment.
    """
    known = [saved.get("spaces", {}).get(name) for name in ("observation", "action")]
    if all(known):
        return [spaces.from_json(about) for about in known]
    usage.check_env(run)
    with closing(make_envs(1)) as envs:
        return [envs.single_observation_space, envs.single_action_space]


def as_observations(given: Any, example: np.ndarray, layout: tuple = ()) -> np.ndarray:
    """Observations [N, ...] as the agent takes them: `example` has shape and dtype of one.

    With a layout they are a dict of arrays [N, ...], which is packed. ValueError if they have
    another shape, or would be other numbers.
    """
    if layout:
        names = [part.name for part in layout]
        if not isinstance(given, Mapping) or set(given) != set(names):
            raise ValueError(f"observations must be a dict of {', '.join(names)}")
        parts = {}
        for name, shape, dtype in layout:
            like = np.zeros((*example.shape[:-1], *shape), dtype)
            x = np.asarray(given[name])
            has_numbers = like.dtype.kind == "f" and x.size == len(x) * like.size
            parts[name] = as_observations(x.reshape(-1, *like.shape) if has_numbers else x, like)
        return pack(parts, layout)
    given = np.asarray(given)
    if given.shape[1:] != example.shape:
        expected = ", ".join(map(str, example.shape))
        raise ValueError(f"observations must be [N, {expected}], not {given.shape}")
    expected = f"observations must be {example.dtype}, as in training"
    is_float = example.dtype.kind == "f"
    if given.dtype.kind not in "iub" and not is_float:
        raise ValueError(f"{expected}, not {given.dtype}")
    observations = given.astype(example.dtype, copy=False)
    if not is_float and (observations != given).any():
        raise ValueError(f"{expected}: numbers from {given.min()} to {given.max()} do not fit")
    return observations


def import_script(file: Path) -> Script:
    """The module of a script, which need not be on Python's path."""
    module: Any = sys.modules.get(file.stem)
    if module is not None and Path(module.__file__ or "").absolute() == file.absolute():
        return module
    if not file.is_file():
        raise UsageError(f"there is no script {file}: say where, as in load_policy(folder, script)")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
