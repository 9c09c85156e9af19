"""What a run writes beside charts and checkpoints: its flags to TensorBoard, with `--track` to
Weights & Biases, and its experience with `--save-experience`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from gymnasium.error import Error as UsageError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.text.summary_v2 import text_pb


def init_wandb(name: str, flags: dict[str, Any]) -> None:
    """Begins the run `name` in Weights & Biases, or resumes it. It follows the event files.

    The environment variables WANDB_PROJECT and WANDB_ENTITY say where.
    """
    import wandb

    try:
        wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
    except wandb.Error as error:
        raise UsageError(f"track: {error}") from error


def write_header(writer: Any, flags: dict[str, Any], begin: int) -> None:
    """Writes the flags to an event file. TensorBoard drops points of others after step `begin`."""
    table = "|flag|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in flags.items())
    now = time.time()
    restart = SessionLog(status=SessionLog.START)
    writer.add_event(Event(wall_time=now, step=begin + 1, session_log=restart))
    summary = text_pb("hyperparameters", table)
    writer.add_event(Event(wall_time=now, step=begin + 1, summary=summary))


def check_vault(alg: Any, run: Any) -> None:
    """Raises UsageError if --save-experience cannot keep all steps of the replay."""
    alg = getattr(alg, "alg", alg)  # of compiled.Trainer
    if getattr(alg.args, "save_experience", False):
        import vault  # noqa: F401  without it the run should not begin

        longest = run.log_interval + alg.steps_per_iteration  # steps between two writes
        if longest > alg.args.buffer_size:
            raise UsageError(f"buffer_size must be >= {longest} to save each log_interval")


def open_vault(alg: Any, run: Any, folder: Path) -> Any:
    """The experience on disk with --save-experience, otherwise None."""
    alg = getattr(alg, "alg", alg)  # of compiled.Trainer
    if not getattr(alg.args, "save_experience", False):
        return None
    from vault import Vault

    about = {"env_id": run.env_id, "env_kwargs": json.loads(run.env_kwargs), "seed": run.seed}
    about["script"] = Path(sys.modules[alg.init.__module__].__file__ or "").stem
    return Vault(folder / "experience", alg.stored_step, alg.args.num_envs, about=about)
