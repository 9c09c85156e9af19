"""The folder of a run: its flags, its lock, what is saved in it, and how the run ends."""

import errno
import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cleanreplay import agents, tracking, usage
from cleanreplay.checkpoints import Checkpoints
from cleanreplay.errors import NotFiniteError, UsageError

STOPPING = b"\nstopping after this iteration; once more ends the run without saving\n"
DONATED = (
    "`state` is overwritten while a thread learns from it: use it after `learning.result()`, or "
    "take what you need before `submit`"
)


class Keeper(AbstractContextManager):
    """What is kept of the run that trains `agent`, in its folder.

    It is used in `with`, which ends what began with the run. Raises UsageError for flags that
    cannot be meant.

    Args:
      agent: an `agents.Agent`.
      run: flags of the experiment.
      folder: is made, or with --resume there already.
      script: the file that trains, which `load_policy` will need.
      stop: in `with`, signals are appended to it.
    """

    def __init__(self, agent: Any, run: Any, folder: Path, script: Path | str, stop: list) -> None:
        self.agent = agent
        self.run = run
        self.folder = folder
        self.script = Path(script).absolute()
        self.stop = stop
        self.first_step = 0  # of the start or the resume
        self.recent_returns: list = []  # those that were restored
        self.vault: Any = None  # the experience on disk, with --save-experience
        self.on_exit = ExitStack()
        args = agent.args
        agents.check_step(agent.example_step)
        usage.check_iteration(agent.steps_per_iteration, args.total_timesteps, run.log_interval)
        check_experience(agent, run)
        self.before = usage.check_resume(args, run) if run.resume else (run, args)

    def __enter__(self) -> "Keeper":
        self.on_exit.callback(note_signals(self.stop, self.run.vectorization == "async"))
        return self

    def begin(self, init: Callable, on_resume: Callable) -> Any:
        """The State of `init()`, or with --resume `on_resume` of the newest one that was saved.

        Sets `first_step` and `recent_returns`.
        """
        run, args = self.run, self.agent.args
        usage.check_memory(init)
        if run.track:
            tracking.init_wandb(self.folder.name, vars(run) | vars(args))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folder, saves=run.checkpoint_interval > 0)
        state = init()
        if run.resume:
            steps = self.checkpoints.latest_step()
            if args.total_timesteps < min(steps, self.before[1].total_timesteps):
                text = f"{steps} steps were made, more than {args.total_timesteps}"
                raise UsageError(f"resume: {text}")
            self.first_step, state, self.recent_returns = self.checkpoints.restore(state)
            state = on_resume(state)
        self.vault = open_vault(self.agent, run, self.folder, self.script)
        if jax.process_index() == 0:
            self.on_exit.callback(lock(self.folder))
            flags = {"script": str(self.script), "run": vars(self.before[0]), "args": vars(args)}
            (self.folder / "args.json").write_text(usage.to_json(flags))
            tracking.write_origin(self.folder, self.first_step, self.script)
        if run.track:
            self.on_exit.callback(tracking.log_videos, self.folder, self.first_step)
        return state

    def write_header(self, writer: Any) -> None:
        """Writes the flags to the event file of an agent."""
        tracking.write_header(writer, vars(self.run) | vars(self.agent.args), self.first_step)

    def save(self, step: int, state: Any, params: Any, recent_returns: Sequence) -> None:
        """Saves the state of training after `step`, if the parameters are finite."""
        check_finite(params, self.folder)
        self.checkpoints.save(step, state, params, recent_returns)

    def save_if_best(self, step: int, params: Any, score: float) -> None:
        """Keeps these parameters to act with, if no earlier ones had this score or a higher one."""
        self.checkpoints.save_if_best(step, params, score)

    def write_experience(self, state: Any) -> None:
        """Appends what is new in the replay to the vault, with --save-experience.

        The first one is the state from `begin`: a resume drops what came after it.
        """
        if self.vault is not None:
            self.vault.write(self.agent.experience(state))

    @contextmanager
    def saves_on_error(self, envs: Any, step: int, learned: Callable, recent: Sequence) -> Iterator:
        """If the environments raise an error at `step`, saves what was learned until then.

        `learned()` is what `train_step` returned. A note says where it happened.
        """
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self.run.env_id} at step {step} of {self.folder}")
            close_if_killed(envs, error)
            if step > self.first_step:
                state, params, *_ = learned()
                self.save(step, state, params, recent)
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "deleted" in str(error):
            error.add_note(DONATED)
        if isinstance(error, Exception) and not hasattr(error, "__notes__"):
            error.add_note(f"in {self.run.env_id}, {self.folder}")
        self.on_exit.close()
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise UsageError(f"no space left on the disk of {self.folder}") from error


def check_finite(params: Any, folder: Path) -> None:
    """Raises NotFiniteError if parameters are NaN or infinite."""
    if not all(np.isfinite(x).all() for x in jax.tree.leaves(params)):
        raise NotFiniteError(f"{folder}: diverged, parameters are not finite")


def check_experience(agent: Any, run: Any) -> None:
    """Raises UsageError if --save-experience cannot keep all steps of the replay."""
    longest = run.log_interval + agent.steps_per_iteration  # steps between two writes
    if agents.saves_experience(agent) and longest > agent.args.buffer_size:
        raise UsageError(f"buffer_size must be >= {longest} to save each log_interval")


def open_vault(agent: Any, run: Any, folder: Path, script: Path) -> Any:
    """The experience on disk with --save-experience, otherwise None."""
    if not agents.saves_experience(agent):
        return None
    from cleanreplay.vault import Vault

    about = {"env_id": run.env_id, "env_kwargs": json.loads(run.env_kwargs), "seed": run.seed}
    about["script"] = script.stem
    return Vault(folder / "experience", agent.stored_step, agent.args.num_envs, about=about)


def lock(folder: Path) -> Callable[[], None]:
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


def note_signals(stop: list, has_processes: bool) -> Callable[[], None]:
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

    if has_processes:
        # A terminal signals the processes of the environments, too. Training needs them until then.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, note)

    def undo() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    return undo


def close_if_killed(envs: Any, error: Exception) -> None:
    """If processes of gymnasium.vector.AsyncVectorEnv were killed, names them in a note.

    It ends the others at once: `close` would wait for the dead ones, or fail.
    """
    processes = getattr(envs.unwrapped, "processes", [])
    if not processes or not isinstance(error, EOFError | ConnectionError):
        return
    for process in processes:
        process.join(timeout=0.5)
    dead = [process.name for process in processes if not process.is_alive()]
    error.add_note(f"killed: {', '.join(dead)}")
    for process in processes:
        process.terminate()
    envs.unwrapped.closed = True
