"""What makes a run last: its folder, checkpoints, resuming, Ctrl-C, and loading a trained agent.

A script imports this module if it lies beside it. The folder of a run keeps the newest two
checkpoints. Each, `checkpoints/STEP`, has the whole state of training (item `state`), the
parameters to act with (`params`) and the returns of the last episodes (`recent`). `best/STEP` has
the parameters that did best in an evaluation.

    policy = checkpoints.load_policy(folder, dqn_jax)  # the best agent, as a function
    actions = policy(observations)
"""

import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from gymnasium.error import Error as UsageError
from tqdm import tqdm

import tracking
import usage


class Checkpoints:
    """What is kept of the run in `folder`. A checkpoint is written as a whole or not at all."""

    def __init__(self, folder: Path | str, saves: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self.saves = saves
        self.run: Any = None  # the flags of the run that trains
        # Training overwrites the state that is saved, so saving cannot go on in the background.
        options = ocp.CheckpointManagerOptions(create=saves, enable_async_checkpointing=False)
        latest = replace(options, max_to_keep=2)
        best = replace(options, max_to_keep=1, best_fn=lambda metrics: metrics["return"])
        self.latest = ocp.CheckpointManager(self.folder / "checkpoints", options=latest)
        self.best = ocp.CheckpointManager(self.folder / "best", options=best)
        self.begin = 0  # the step of the checkpoint that was restored
        self.recent_returns: list = []  # the returns that were restored
        self.vault: Any = None  # the experience on disk, with --save-experience
        self.on_close: list = []  # functions to call when the run ends

    def write_header(self, writer: Any, flags: dict) -> None:
        """Writes the flags to an event file, which `close` will close."""
        tracking.write_header(writer, flags, self.begin)
        self.on_close.append(writer.close)

    def save(self, step: int, state: Any, params: Any, recent_returns: Sequence) -> None:
        """Saves the state of training after `step`, if its parameters are finite."""
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(params)):
            raise FloatingPointError(f"{self.folder}: diverged, parameters are not finite")
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            params=ocp.args.StandardSave(params),
            recent=ocp.args.JsonSave([float(x) for x in recent_returns]),
        )
        self.write(self.latest, step, items)

    def save_if_best(self, step: int, params: Any, score: float) -> None:
        """Keeps these parameters to act with, if no earlier ones had this score or a higher one."""
        best_step = self.best.best_step()
        is_better = best_step is None or score > self.best.metrics(best_step)["return"]
        if math.isfinite(score) and is_better:
            items = ocp.args.Composite(params=ocp.args.StandardSave(params))
            self.write(self.best, step, items, metrics={"return": float(score)})

    def write(self, manager: Any, step: int, items: Any, **metrics: Any) -> None:
        """Writes a checkpoint, unless there is one of this step. UsageError if the disk is full."""
        if not self.saves or step == 0 or step in manager.all_steps():
            return
        try:
            manager.save(step, args=items, force=True, **metrics)
            return
        except Exception as error:
            if "no space left" not in str(error).lower():
                raise
        # Orbax prints many lines about it. Let it finish, so that ours is the last one.
        logging.getLogger("asyncio").disabled = True
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not thread.daemon:
                with suppress(Exception):
                    thread.join(timeout=1)
        raise UsageError(f"no space left on the disk of {manager.directory}")

    def write_experience(self, state: Any) -> None:
        """Appends the new steps of the replay to the vault, with --save-experience."""
        if self.vault is not None:
            self.vault.write(state.replay)

    def check_rollout(self, rollout: Any, step: int) -> None:
        """Raises FloatingPointError if the environments returned NaN or infinity."""
        usage.check_rollout(rollout, self.run, step)

    def on_error(
        self, error: Exception, envs: Any, step: int, learning: Any, recent_returns: Sequence
    ) -> None:
        """Saves what was learned from the steps before the environments raised an error."""
        usage.explain(error, self.run, self.folder, step, envs)
        if step > self.begin:
            state, params, _ = learning.result()
            self.save(step, state, params, recent_returns)

    def restore(self, state: Any) -> Any:
        """The state of the newest checkpoint. `state` has its shapes and devices, and is used up.

        A damaged checkpoint is passed over. Sets `begin` and `recent_returns`.
        """
        shapes = jax.tree.map(abstract, state)
        for x in jax.tree.leaves(state):
            x.delete()  # so that memory never holds two replays
        items = ocp.args.Composite(
            state=ocp.args.StandardRestore(shapes), recent=ocp.args.JsonRestore()
        )
        damaged = []
        self.begin = self.latest_step()
        for step in sorted(self.latest.all_steps(), reverse=True):
            try:
                restored = self.latest.restore(step, args=items)
                break
            except Exception as error:
                usage.raise_if_other(self.latest.directory / f"{step}/state", shapes, error)
                damaged.append(step)
        else:
            raise UsageError(f"resume: no checkpoint in {self.latest.directory} can be read")
        for other in damaged:
            tqdm.write(f"checkpoint {other} is damaged and deleted: the run goes on from {step}")
            self.latest.delete(other)
        self.begin = step
        self.recent_returns = restored["recent"]
        return restored["state"]

    def best_params(self, params: Any) -> Any:
        """The best parameters to act with, or without an evaluation the newest ones."""
        items = ocp.args.Composite(params=ocp.args.StandardRestore(params))
        manager = self.latest if self.best.best_step() is None else self.best
        step = self.latest_step() if manager is self.latest else self.best.best_step()
        try:
            return manager.restore(step, args=items)["params"]
        except Exception as error:
            usage.raise_if_other(manager.directory / str(step) / "params", params, error)
            raise

    def latest_step(self) -> int:
        """The step of the newest checkpoint."""
        step = self.latest.latest_step()
        if step is None:
            raise UsageError(f"{self.latest.directory} has no checkpoint")
        return step

    def close(self) -> None:
        """Ends what began with the run: its lock, event files, and the handling of signals."""
        while self.on_close:
            self.on_close.pop()()


def abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and devices of an array, without its numbers."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def open_run(
    alg: Any, run: Any, folder: Path, init: Callable, stop: list
) -> tuple[Checkpoints, Any]:
    """Makes the folder of a new run, or resumes one. Returns what is kept, and the first State.

    From now on a signal is appended to `stop`.
    """
    usage.check_iteration(alg.steps_per_iteration, alg.args.total_timesteps, run.log_interval)
    usage.check_memory(init)
    tracking.check_vault(alg, run)
    before, args_before = run, alg.args
    if run.resume:
        before, args_before = usage.check_resume(alg.args, run)
    if run.track:
        tracking.init_wandb(folder.name, vars(run) | vars(alg.args))
    folder.mkdir(parents=True, exist_ok=True)
    saver = Checkpoints(folder, saves=run.checkpoint_interval > 0)
    saver.run = run
    state = init()
    if run.resume:
        steps = saver.latest_step()
        if alg.args.total_timesteps < min(steps, args_before.total_timesteps):
            raise UsageError(
                f"resume: {steps} steps were made, more than {alg.args.total_timesteps}"
            )
        state = alg.on_resume(saver.restore(state))
    saver.vault = tracking.open_vault(alg, run, folder)
    saver.write_experience(getattr(state, "agent", state))  # a resumed run drops what came later
    if jax.process_index() == 0:
        saver.on_close.append(usage.lock_run(folder))
        flags = {"run": vars(before), "args": vars(alg.args)}
        (folder / "args.json").write_text(json.dumps(flags))
        tracking.write_origin(folder, saver.begin)
    if run.track:
        saver.on_close.append(partial(tracking.log_videos, folder, saver.begin))
    saver.on_close.append(usage.stop_on_signals(stop, run))
    return saver, state


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


def load_policy(folder: Path | str, script: Any) -> Callable[[Any], np.ndarray]:
    """Loads the best agent of a run as a function from observations [N, ...] to actions [N, ...].

    `script` is the module that trained it, such as dqn_jax. The agent does not explore. One with a
    memory keeps it from call to call: give `policy(observations, is_first)` also where episodes
    begin, [N] bool. It has forgotten all at the first call, and if N changes.
    """
    run, args = usage.read_flags(folder, script.Run, script.Args)
    alg, _ = script.make_algorithm(args, replace(run, capture_video=False))
    like = jax.jit(lambda key: alg.policy_params(alg.init(key)))(jax.random.PRNGKey(0))
    params = Checkpoints(folder).best_params(like)
    dtype = alg.example_step.observation.dtype
    shape = alg.example_step.observation.shape

    memory = script.no_memory(alg, 0)

    def policy(observations: Any, is_first: Any = False) -> np.ndarray:
        nonlocal memory
        if np.shape(observations)[1:] != shape:
            expected = ", ".join(map(str, shape))
            raise ValueError(f"observations must be [N, {expected}], not {np.shape(observations)}")
        num_envs = len(observations)
        if any(len(x) != num_envs for x in memory):
            memory = script.no_memory(alg, num_envs)
        memory = script.keep_memory(memory, ~np.broadcast_to(is_first, num_envs))
        action, memory = alg.act(params, np.asarray(observations, dtype), memory)
        return alg.to_env_action(np.asarray(action))

    return policy
