"""Owns the folder of a run: its lock, flags, checkpoints, agents, experience, and its end."""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cleanreplay import agent_file, disk, flags, offline, protocol, replays, terminal, tracking
from cleanreplay.checkpoints import Checkpoints, newest
from cleanreplay.distributed import check_same, of_first
from cleanreplay.errors import NotFiniteError, UsageError
from cleanreplay.flags import PLACES

DONATED = (
    "`state` is overwritten while a thread learns from it: use it after `learning.result()`, or "
    "take what you need before `submit`"
)


class RunFolder(AbstractContextManager):
    """The folder of a run. Use it in `with`: leaving it releases the lock and restores signals.

    Args:
      agent: a `protocol.Agent`.
      run: flags of the experiment.
      folder: is made, or with --resume exists.
      script: the file that trains, which `load_policy` will need.
      stop: in `with`, signals are appended to it.
      env_spaces: from `spaces.of_envs`, saved for `load_policy`.

    Raises UsageError for flags that do not fit the agent or the resumed run.
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
        self.is_first_process = jax.process_index() == 0
        self.agent = agent
        self.run = replace(run, distributed="", track=run.track and self.is_first_process)
        self.path = of_first(lambda: folder)
        self.script = Path(script).absolute()
        self.stop = stop
        self.env_spaces = env_spaces or {}
        self.first_step = 0  # of the start or the resume
        self.recent_returns: list = []  # restored by --resume
        self.lost: list = []  # agents that had diverged
        self.checkpoints: Checkpoints | None = None  # this and `best` need --checkpoint-interval
        self.best: agent_file.BestAgent | None = None
        self.vault: Any = None  # the experience on disk, with --save-experience
        self.on_exit = ExitStack()
        args = agent.args
        protocol.check_step(agent.example_step)
        flags.check_iteration(agent, run.log_interval)
        check_experience(agent, run)
        self.before = flags.check_resume(args, run) if run.resume else (self.run, args)
        self.about = self.flags()
        check_same(self.facts())

    def flags(self) -> dict:
        """Returns the contents of args.json."""
        args = flags.with_absolute_places(vars(self.agent.args))
        about = {"script": str(self.script), "spaces": self.env_spaces}
        return about | {"run": vars(self.before[0]), "args": args}

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same in all processes that train together."""
        flags = vars(self.run) | vars(self.agent.args)
        places = ("track", "resume", *PLACES)
        facts = {name: value for name, value in flags.items() if name not in places}
        facts |= {f"the version of {name}": version(name) for name in tracking.PACKAGES}
        text = self.script.read_bytes()
        return facts | {f"the CRC-32 of {self.script.name}": zlib.crc32(text)}

    def __enter__(self) -> "RunFolder":
        self.on_exit.callback(replays.close, getattr(self.agent, "replay", None))
        has_processes = self.run.vectorization == "async"
        self.on_exit.enter_context(terminal.noted_signals(self.stop, has_processes))
        return self

    def begin(self, init: Callable, on_resume: Callable) -> Any:
        """Begins the run. Returns the State of `init()`.

        With --resume it is `on_resume` of the newest checkpoint's State, and this sets
        `first_step`, `recent_returns` and `lost`.
        """
        run = self.run
        flags.check_memory(init)
        state = init()
        if not run.resume:  # their errors leave no folder
            state = protocol.on_data(self.agent, self.with_data(state))
            state = self.with_learned(state)
        if run.track and not run.resume:  # without a login no folder is made
            self.begin_tracking()
        if self.is_first_process:
            self.lock()
        if run.track and run.resume:
            self.begin_tracking()
        checkpoints = Checkpoints(self.path)
        self.on_exit.callback(checkpoints.wait)
        if run.resume:
            state = on_resume(self.restore(checkpoints, replays.without_data(state)))
            state = self.with_data(state)
            tracking.let_events_follow(self.path)
        if self.is_first_process:
            self.vault = open_vault(self.agent, state, run, self.path, self.script, self.env_spaces)
            self.write_flags()
        if run.checkpoint_interval > 0:
            self.checkpoints = checkpoints
            if self.is_first_process:
                self.best = agent_file.BestAgent(self.path, self.about)
        if run.track:
            self.on_exit.callback(tracking.log_videos, self.path, self.first_step)
        return state

    def with_learned(self, state: Any) -> Any:
        """Returns the State, which with --init-from begins with what another agent has learned."""
        source = getattr(self.agent.args, "init_from", "")
        return agent_file.start_from(source, state, self.agent) if source else state

    def with_data(self, state: Any) -> Any:
        """Adds the data of --offline-data to a State. UsageError if they are too large."""
        if not getattr(self.agent.args, "offline_data", ""):
            return state

        def read(item: Any) -> Any:
            data = of_first(partial(offline.read, self.agent, self.run, self.env_spaces, item))
            flags.check_memory(lambda: (state, data))
            return data

        return replays.with_data(state, read)

    def lock(self) -> None:
        """Makes the folder, and locks it until the end. UsageError if it cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.on_exit.enter_context(locked(self.path))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error

    def begin_tracking(self) -> None:
        """Begins the run in Weights & Biases, or resumes it."""
        tracking.init_wandb(self.path.name, vars(self.run) | vars(self.agent.args))

    def restore(self, checkpoints: Checkpoints, state: Any) -> Any:
        """Restores the newest checkpoint. `state` gives its shapes, and is overwritten."""
        steps = int(of_first(partial(newest, self.path)).parent.name)
        total = self.agent.args.total_timesteps
        if total < min(steps, self.before[1].total_timesteps):
            raise UsageError(f"resume: the run has {steps} steps, more than {total}")
        self.first_step, state, about = checkpoints.restore(state)
        self.recent_returns = [math.nan if x is None else x for x in about["returns"]]
        self.lost = about.get("lost", [])
        return state

    def write_flags(self) -> None:
        """Writes args.json, and adds to run.json."""
        disk.write_whole(self.path / "args.json", disk.to_json(self.about).encode())
        tracking.write_origin(self.path, self.first_step, self.script)

    def write_header(self, writer: Any, own: dict[str, Any] | None = None) -> None:
        """Writes the flags to an agent's event file; `own` are those that differ from the run's."""
        flags = vars(self.run) | vars(self.agent.args) | (own or {})
        tracking.write_header(writer, flags, self.first_step)

    def save(
        self, step: int, state: Any, params: Any, recent_returns: Sequence, **agents: Any
    ) -> None:
        """Saves the state of training after `step`. NotFiniteError unless `params` are finite.

        `agents` describes the agents of a State with an axis for them: their number `num_agents`,
        the diverged ones `lost`, and their values of flags, `swept`.
        """
        check_finite(params, self.path)
        if self.checkpoints is None:
            return
        returns = [float(x) if math.isfinite(x) else None for x in recent_returns]
        about = {"step": step, "returns": returns, "is_whole": True, "num_agents": None, "own": {}}
        self.checkpoints.save(step, replays.without_data(state), self.about | about | agents)

    @cached_property
    def policy_names(self) -> list[str]:
        """Names the leaves that the policy needs. Cached: this takes longer than writing them."""
        return list(agent_file.policy_leaves(self.agent))

    def policy_part(self, state: Any) -> dict[str, Any]:
        """Returns the leaves of a State that the policy needs, by their names."""
        leaves = disk.by_name(state)
        return {name: leaves[name] for name in self.policy_names}

    def save_if_best(
        self, step: int, leaves: dict[str, Any], score: float, own: dict[str, Any] | None = None
    ) -> None:
        """Saves an agent, if its score is higher than that of the best agent.

        Args:
          step: of the evaluation.
          leaves: `policy_part` of a State.
          score: the mean return.
          own: flags of the algorithm in which this agent differs from args.json.
        """
        if self.best is not None:
            self.best.save_if_better(step, leaves, score, own)

    def write_experience(self, state: Any) -> None:
        """Appends the new rows of the replay to the vault, with --save-experience.

        Call it first with the state that `begin` returned: this drops rows that were written after
        the checkpoint.
        """
        if self.vault is not None:
            self.vault.write(protocol.experience(state))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if isinstance(error, RuntimeError) and "deleted" in str(error):
            error.add_note(DONATED)
        if isinstance(error, Exception) and not hasattr(error, "__notes__"):
            error.add_note(f"in {self.run.env_id}, {self.path}")
        self.on_exit.close()
        if isinstance(error, OSError) and disk.is_full(error):
            raise UsageError(f"{error}: what was saved is in {self.path}") from error


def are_finite(tree: Any, xp: Any = np) -> Any:
    """Returns whether all numbers of a pytree are finite: [] bool. Inside jit `xp` is jax.numpy."""
    return xp.stack([xp.isfinite(x).all() for x in jax.tree.leaves(tree)]).all()


def check_finite(params: Any, folder: Path) -> None:
    """Raises NotFiniteError if parameters are NaN or infinite."""
    if not are_finite(params):
        raise NotFiniteError(f"{folder}: diverged, parameters are not finite")


def check_experience(agent: Any, run: Any) -> None:
    """Raises UsageError if --save-experience cannot keep all steps of the replay."""
    longest = run.log_interval + agent.steps_per_iteration  # steps between two writes
    if protocol.saves_experience(agent) and longest > agent.args.buffer_size:
        raise UsageError(f"buffer_size must be >= {longest} to save each log_interval")


def open_vault(
    agent: Any, state: Any, run: Any, folder: Path, script: Path, env_spaces: dict
) -> Any:
    """Opens the vault of the run with --save-experience, otherwise returns None."""
    if not protocol.saves_experience(agent):
        return None
    from cleanreplay.vault import Vault

    about = {"env_id": run.env_id, "env_kwargs": json.loads(run.env_kwargs), "seed": run.seed}
    about |= {"script": script.stem, "spaces": json.loads(disk.to_json(env_spaces))}
    item = replays.item_of(protocol.experience(state))
    return Vault(folder / "experience", item, agent.args.num_envs, about=about)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Locks the folder in `with`. UsageError if another process trains there."""
    with (folder / ".lock").open("a") as file:
        if not disk.lock(file, folder):
            raise UsageError(f"another process trains in {folder}")
        yield
