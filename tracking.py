"""What a run writes beside charts and checkpoints: its flags to TensorBoard, with `--track` to
Weights & Biases, where it comes from to `run.json`, its experience with `--save-experience`.
"""

import json
import platform
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from gymnasium.error import Error as UsageError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.summary_v2 import text_pb

PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnasium", "numpy")


def init_wandb(name: str, flags: dict[str, Any]) -> None:
    """Begins the run `name` in Weights & Biases, or resumes it. It follows the event files.

    The environment variables WANDB_PROJECT and WANDB_ENTITY say where.
    """
    import wandb

    try:
        wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
    except wandb.Error as error:
        raise UsageError(f"track: {error}") from error


def log_videos(folder: Path, begin: int) -> None:
    """Gives the videos that were recorded after step `begin` to Weights & Biases."""
    import wandb

    for video in sorted(folder.glob("videos/*/*.mp4")):
        step = int(video.parent.name)
        if step > begin:
            wandb.log({"video": wandb.Video(str(video), caption=f"{step:,} steps")})


def write_header(writer: Any, flags: dict[str, Any], begin: int) -> None:
    """Writes the flags to an event file, as a text and for the page HPARAMS.

    TensorBoard drops points of others after step `begin`.
    """
    table = "|flag|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in flags.items())
    plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in flags.items()}
    columns = [hparams.HParam(name) for name in flags]
    results = [hparams.Metric("eval/episodic_return"), hparams.Metric("charts/episodic_return")]
    now = time.time()
    restart = SessionLog(status=SessionLog.START)
    writer.add_event(Event(wall_time=now, step=begin + 1, session_log=restart))
    for summary in (
        text_pb("hyperparameters", table),
        hparams.hparams_config_pb(columns, results),
        hparams.hparams_pb(plain),
    ):
        writer.add_event(Event(wall_time=now, step=begin + 1, summary=summary))


def write_origin(folder: Path, begin: int) -> None:
    """Adds to run.json with what this process trains from step `begin` on: one entry a resume."""
    file = folder / "run.json"
    starts = json.loads(file.read_text()) if file.exists() else []
    commit = ""
    if shutil.which("git"):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        here = Path(__file__).parent
        done = subprocess.run(describe, cwd=here, capture_output=True, text=True, check=False)
        commit = done.stdout.strip()
    starts.append(
        {
            "step": begin,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": shlex.join([sys.executable, *sys.argv]),
            "commit": commit,
            "host": platform.node(),
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
            "versions": {name: version(name) for name in PACKAGES},
        }
    )
    new = folder / ".run.json"  # a process that is killed leaves the old file or the new one
    new.write_text(json.dumps(starts, indent=1))
    new.replace(file)


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
