"""Saves the state of training, restores it, and loads trained agents.

The folder of a run keeps the newest two checkpoints. Each, `checkpoints/STEP`, has the whole state
of training (item `state`), the parameters to act with (`params`) and the returns of the last
episodes (`recent`). The agent that did best in an evaluation is a file, see `agent_file`.
"""

import errno
import importlib.util
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from tqdm import tqdm

from cleanreplay import agent_file, files, spaces, trees, usage
from cleanreplay.agents import Script
from cleanreplay.errors import UsageError
from cleanreplay.packed import pack

COPIED = 100_000_000  # bytes of the largest state that is copied and written in a thread
RECENT = ocp.args.Composite(recent=ocp.args.JsonRestore())


class Checkpoints:
    """The checkpoints in `folder`. Each is written as a whole or not at all."""

    def __init__(self, folder: Path | str, saves: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self.saves = saves
        self.thread = ThreadPoolExecutor(1)
        self.writing: Future | None = None
        options = ocp.CheckpointManagerOptions(
            create=saves,
            max_to_keep=2,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=saves,  # what a killed run had begun to write
        )
        self.latest = ocp.CheckpointManager(self.folder / "checkpoints", options=options)

    def save(self, step: int, state: Any, params: Any, recent_returns: Sequence) -> None:
        """Saves the state of training after `step`, unless there is a checkpoint of this step.

        A small state is copied, because training overwrites it, and a thread writes the copy. An
        error in the thread is raised by the next `save` or `wait`.
        """
        self.wait()
        if not self.saves or step == 0 or step in self.latest.all_steps():
            return
        size = sum(x.nbytes for x in jax.tree.leaves(state))
        is_copied = size <= COPIED and jax.process_count() == 1
        if is_copied:
            state, params = jax.tree.map(lambda x: x.copy(), (state, params))
        self.writing = self.thread.submit(self.write, step, state, params, list(recent_returns))
        if not is_copied:
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is written. UsageError if the disk is full."""
        writing, self.writing = self.writing, None  # an error is raised once
        if writing is not None:
            writing.result()

    def write(self, step: int, state: Any, params: Any, recent_returns: list) -> None:
        """Writes a checkpoint. UsageError if the disk is full."""
        about = {
            "returns": [float(x) for x in recent_returns],
            "checksums": {"state": trees.checksums(state), "params": trees.checksums(params)},
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(without_empty(state)),
            params=ocp.args.StandardSave(params),
            recent=ocp.args.JsonSave(about),
        )
        silence_orbax(True)
        try:
            self.latest.save(step, args=items, force=True)
        except Exception as error:
            if files.is_full(error):  # it stays silent: it would log more when it is freed
                raise UsageError(f"no space left on the disk of {self.latest.directory}") from error
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

    def old_best(self) -> tuple[Any, int | None, dict]:
        """The best agent of an old version, in `best/STEP`: its manager, step and metrics."""
        if not (self.folder / "best").is_dir():
            return None, None, {}
        options = ocp.CheckpointManagerOptions(
            create=False, best_fn=lambda metrics: metrics["return"]
        )
        manager = ocp.CheckpointManager(self.folder / "best", options=options)
        step = manager.best_step()
        return manager, step, {} if step is None else manager.metrics(step)

    def params(self, like: Any) -> Any:
        """The parameters to act with: the best ones of an old version, otherwise the newest.

        `like` has their shapes. UsageError if they are damaged.
        """
        manager, step, metrics = self.old_best()
        try:
            if step is None:
                manager, step = self.latest, self.latest_step()
                sums = self.about(step)["checksums"]["params"]
            else:
                sums = metrics.get("checksums", {})
            return read(manager, step, "params", like, sums)
        except UsageError:
            raise
        except Exception as error:
            text = f"{manager.directory / str(step)} cannot be read: {first_line(error)}"
            raise UsageError(text) from error

    def latest_step(self) -> int:
        """The step of the newest checkpoint."""
        step = self.latest.latest_step()
        if step is None:
            raise UsageError(self.nothing_there())
        return step

    def nothing_there(self) -> str:
        """What an error says if there is no checkpoint."""
        run = self.folder.parent
        hint = f": all agents of the run are in {run}" if (run / "checkpoints").is_dir() else ""
        return f"{self.latest.directory} has no checkpoint{hint}"


def silence_orbax(silent: bool) -> None:
    """Whether Orbax logs, in a hundred lines, what it raises as well."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).disabled = silent


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and devices of an array, without its numbers."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def without_empty(tree: Any) -> Any:
    """A tree with None for each empty array, which Orbax cannot save."""
    return jax.tree.map(lambda x: x if x.size > 0 else None, tree)


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
    shapes, leaves = trees.by_name(saved), trees.by_name(without_empty(wanted))
    there, here = (
        {
            name: x.shape for name, x in tree.items() if not name.endswith("num_updates")
        }  # of old runs
        for tree in (shapes, leaves)
    )
    trees.check_shapes(f"{folder} is of another script or version", there, here)
    where = jax.tree.leaves(wanted)[0].sharding
    others = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where) for name, x in shapes.items()
    }
    like = jax.tree.unflatten(jax.tree.structure(saved), (others | leaves).values())
    args = ocp.args.Composite(**{item: ocp.args.StandardRestore(like)})
    restored = manager.restore(step, args=args)[item]
    found = dict(zip(shapes, jax.tree.leaves(restored), strict=True))
    trees.check_sums(found, sums)
    return jax.tree.map(
        lambda name, x: found[name] if x.size > 0 else jnp.zeros(x.shape, x.dtype, device=where),
        jax.tree.unflatten(jax.tree.structure(wanted), trees.names(wanted)),
        wanted,
    )


def start_from(source: str, state: Any, agent: Any) -> Any:
    """A new State, or RunnerState of compiled.py, that begins with what another agent has learned.

    `source` is the file of an agent, or the folder of a run, of which the newest checkpoint is
    taken. Of several agents there the first is taken by the first here, and so on; of too few all
    in turn. UsageError if it has other shapes, or cannot be read.
    """
    before = getattr(state, "agent", state)
    for_several = before is not state
    if Path(source).is_file():
        found, has_several, when = agent_file.read_into_state(Path(source), agent), False, ""
    else:
        found, has_several, step = read_newest(source, before, agent, for_several)
        when = f", as it was after {step:,} steps"

    def fitting(like: jax.Array, x: np.ndarray) -> jax.Array:
        x = x if has_several else x[None]
        rows = np.arange(len(like)) % len(x) if for_several else 0
        return jax.device_put(x[rows].astype(like.dtype), like.sharding)

    leaves = trees.by_name(before, "/")
    taken = [fitting(x, found[name]) if name in found else x for name, x in leaves.items()]
    after = jax.tree.unflatten(jax.tree.structure(before), taken)
    tqdm.write(f"starts from {source}{when}")
    return state._replace(agent=after) if for_several else after


def read_newest(folder: str, state: Any, agent: Any, for_several: bool) -> tuple[dict, bool, int]:
    """What the newest checkpoint of a run has learned, by the names of the leaves of a State.

    Also whether it is of several agents, and its step.
    """
    saver = Checkpoints(folder, saves=False)
    step = saver.latest.latest_step()
    if step is None:
        raise UsageError(f"init_from: {saver.nothing_there()}")
    leaves, wanted = trees.by_name(state), trees.by_name(agent.learned(state))
    try:
        found, has_several = read_learned(saver, step, leaves, wanted, for_several)
    except UsageError:
        raise
    except Exception as error:
        where = saver.latest.directory / str(step)
        raise UsageError(f"init_from: {where} cannot be read: {first_line(error)}") from error
    as_in_files = dict(zip(leaves, trees.names(state, "/"), strict=True))
    return {as_in_files[name]: found[name] for name in wanted}, has_several, step


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
        for name, x in trees.by_name(saved).items()
        if name in wanted or name not in leaves
    }
    here = {name: x.shape[for_several:] for name, x in wanted.items()}
    trees.check_shapes(f"init_from: {path} is of another network or script", shapes, here)
    arrays = read_arrays(path, {"agent": saved} if of_several else saved)
    found = trees.by_name(arrays["agent"] if of_several else arrays)
    prefix = "agent." if of_several else ""
    named_as_saved = {prefix + name: x for name, x in found.items()}
    trees.check_sums(named_as_saved, saver.about(step)["checksums"]["state"])
    return found, of_several


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


class Loaded(NamedTuple):
    """A trained agent."""

    agent: Any  # an `agents.Agent`
    params: Any  # those of its `act`
    script: Script  # the module that trained it
    args: Any  # flags of the algorithm
    run: Any  # flags of the experiment
    observation_space: Any


def load_agent(place: Path | str, script: Path | str = "") -> Loaded:
    """The best agent of a run, or that of a file."""
    saved = usage.read_run(place)
    module = import_script(Path(script or saved["script"]))
    run, args = usage.read_flags(place, module.Run, module.Args)
    file = agent_file.find(place)
    if file:
        args = replace(args, **agent_file.read_about(file).get("own", {}))
    usage.check_flags(args, run)
    observation_space, action_space = spaces_of(saved, partial(module.make_envs, args, run), run)
    agent = module.Agent(args, observation_space, action_space)
    if file:
        params = agent_file.read_params(file, agent)
    else:
        like = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.PRNGKey(0))
        params = Checkpoints(place, saves=False).params(like)
    return Loaded(agent, params, module, args, run, observation_space)


def load_policy(place: Path | str, script: Path | str = "") -> Callable[..., np.ndarray]:
    """See `cleanreplay.load_policy`."""
    loaded = load_agent(place, script)
    agent, params = loaded.agent, loaded.params
    act = agent.policy(params)
    example = agent.example_step.observation
    layout = getattr(loaded.observation_space, "layout", ())

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
    file = file if file.is_file() else Path(file.name)  # in the working directory
    if not file.is_file():
        raise UsageError(f"there is no script {file}: say where, as in load_policy(folder, script)")
    spec: Any = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
