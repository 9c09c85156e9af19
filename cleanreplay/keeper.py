"""The folder of a run: its flags, its lock, what is saved in it, and how the run ends."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cleanreplay import agents, files, offline, terminal, tracking, usage
from cleanreplay.agent_file import BestAgent
from cleanreplay.checkpoints import Checkpoints, start_from
from cleanreplay.errors import NotFiniteError, UsageError

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
      env_spaces: `spaces.of_envs`, which is kept for `load_policy`.
    """

    def __init__(
        self,
        agent: Any,
        run: Any,
        folder: Path,
        script: Path | str,
        stop: list,
        env_spaces: dict | None = None,
    ) -> None:
        self.agent = agent
        self.run = run
        self.folder = folder
        self.script = Path(script).absolute()
        self.stop = stop
        self.env_spaces = env_spaces or {}
        self.first_step = 0  # of the start or the resume
        self.recent_returns: list = []  # those that were restored
        self.vault: Any = None  # the experience on disk, with --save-experience
        self.best: BestAgent | None = None  # None with --checkpoint-interval 0
        self.on_exit = ExitStack()
        args = agent.args
        if any(sign in folder.as_posix() for sign in "[\\"):  # Orbax takes them for a pattern
            raise UsageError(f"{folder}: what is saved there could not be read, because of [ or \\")
        agents.check_step(agent.example_step)
        usage.check_iteration(agent.steps_per_iteration, args.total_timesteps, run.log_interval)
        check_experience(agent, run)
        self.before = usage.check_resume(args, run) if run.resume else (run, args)

    def __enter__(self) -> "Keeper":
        has_processes = self.run.vectorization == "async"
        self.on_exit.enter_context(terminal.noted_signals(self.stop, has_processes))
        return self

    def begin(self, init: Callable, on_resume: Callable) -> Any:
        """The State of `init()`, or with --resume `on_resume` of the newest one that was saved.

        Sets `first_step` and `recent_returns`.
        """
        run = self.run
        is_first_process = jax.process_index() == 0
        usage.check_memory(init)
        if run.track and not run.resume:  # without a login there will be no folder
            self.begin_tracking()
        self.folder.mkdir(parents=True, exist_ok=True)
        if is_first_process:
            self.on_exit.enter_context(locked(self.folder))
        if run.track and run.resume:
            self.begin_tracking()
        self.checkpoints = Checkpoints(self.folder, saves=run.checkpoint_interval > 0)
        self.on_exit.callback(self.checkpoints.wait)
        state = init()
        if run.resume:
            state = on_resume(self.restore(state))
        elif source := getattr(self.agent.args, "init_from", ""):
            state = start_from(source, state, self.agent)
        if getattr(self.agent.args, "offline_data", ""):
            state = offline.add_to(state, self.agent, run, self.env_spaces)
        self.vault = open_vault(self.agent, run, self.folder, self.script)
        if is_first_process:
            self.write_flags()
        self.best = self.best_so_far()
        if run.track:
            self.on_exit.callback(tracking.log_videos, self.folder, self.first_step)
        return state

    def begin_tracking(self) -> None:
        """Begins the run in Weights & Biases, or resumes it."""
        tracking.init_wandb(self.folder.name, vars(self.run) | vars(self.agent.args))

    def restore(self, state: Any) -> Any:
        """The State of the newest checkpoint. `state` has its shapes; its arrays are deleted."""
        steps = self.checkpoints.latest_step()
        total = self.agent.args.total_timesteps
        if total < min(steps, self.before[1].total_timesteps):
            raise UsageError(f"resume: {steps} steps were made, more than {total}")
        self.first_step, state, self.recent_returns = self.checkpoints.restore(state)
        return state

    def flags(self) -> str:
        """What args.json has."""
        args = usage.with_absolute_places(vars(self.agent.args))
        flags = {"run": vars(self.before[0]), "args": args}
        about = {"script": str(self.script), "spaces": self.env_spaces}
        return usage.to_json(about | flags)

    def write_flags(self) -> None:
        """Writes args.json, and adds to run.json."""
        files.write_whole(self.folder / "args.json", self.flags().encode())
        tracking.write_origin(self.folder, self.first_step, self.script)

    def best_so_far(self) -> BestAgent | None:
        """The file of the best agent; None with --checkpoint-interval 0."""
        if self.run.checkpoint_interval == 0:
            return None
        _, _, metrics = self.checkpoints.old_best()
        score = metrics.get("return", -math.inf)
        return BestAgent(self.folder, self.agent, json.loads(self.flags()), score)

    def write_header(self, writer: Any, own: dict[str, Any] | None = None) -> None:
        """Writes the flags to the event file of an agent, with those that are its `own`."""
        flags = vars(self.run) | vars(self.agent.args) | (own or {})
        tracking.write_header(writer, flags, self.first_step)

    def save(self, step: int, state: Any, params: Any, recent_returns: Sequence) -> None:
        """Saves the state of training after `step`, if the parameters are finite."""
        check_finite(params, self.folder)
        self.checkpoints.save(step, offline.without_data(state), params, recent_returns)

    def save_if_best(
        self, step: int, params: Any, score: float, own: dict[str, Any] | None = None
    ) -> None:
        """Keeps these parameters to act with, if no earlier ones had this score or a higher one.

        `own` are the flags of the algorithm in which this agent differs from args.json.
        """
        if self.best is not None and jax.process_index() == 0:
            self.best.save_if_better(step, params, score, own)

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
            end_processes(envs, error)
            if step > self.first_step:
                state, params, *_ = learned()
                try:
                    self.save(step, state, params, recent)
                except NotFiniteError as diverged:
                    error.add_note(f"not saved: {diverged}")
            raise

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "deleted" in str(error):
            error.add_note(DONATED)
        if isinstance(error, Exception) and not hasattr(error, "__notes__"):
            error.add_note(f"in {self.run.env_id}, {self.folder}")
        self.on_exit.close()
        if isinstance(error, OSError) and files.is_full(error):
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """In `with`, no other process trains in the folder. UsageError if one does."""
    with (folder / ".lock").open("a") as file:
        if not files.lock(file, folder):
            raise UsageError(f"another process trains in {folder}")
        yield


def end_processes(envs: Any, error: Exception) -> None:
    """Ends the processes of gymnasium.vector.AsyncVectorEnv after an error in a step.

    `close` would wait for answers that never come. A note names those that were killed before.
    """
    processes = getattr(envs.unwrapped, "processes", [])
    if not processes:
        return
    if isinstance(error, EOFError | ConnectionError):
        for process in processes:
            process.join(timeout=0.5)
        dead = [process.name for process in processes if not process.is_alive()]
        error.add_note(f"killed: {', '.join(dead)}")
    for process in processes:
        process.kill()  # they ignore SIGTERM
    envs.unwrapped.closed = True
