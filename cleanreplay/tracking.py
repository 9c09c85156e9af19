"""Records the origin of a run in `run.json`, and its flags in TensorBoard and with `--track` in
Weights & Biases.
"""

import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text.summary_v2 import text_pb
from tqdm import tqdm

from cleanreplay import disk
from cleanreplay.errors import UsageError

PACKAGES = ("jax", "jaxlib", "flax", "optax", "gymnasium", "numpy")


def init_wandb(name: str, flags: dict[str, Any]) -> None:
    """Begins or resumes the run `name` in Weights & Biases, which then reads the event files.

    The environment variables WANDB_PROJECT and WANDB_ENTITY set its place.
    """
    try:
        import wandb
    except ModuleNotFoundError as error:
        raise UsageError(f"track: pip install {error.name}") from error
    try:
        wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
    except wandb.Error as error:
        raise UsageError(f"track: {error}") from error


def log_videos(folder: Path, begin: int) -> None:
    """Sends the videos that were recorded after step `begin` to Weights & Biases."""
    import wandb

    for video in sorted(folder.glob("videos/*/*.mp4")):
        step = int(video.parent.name)
        if step > begin:
            wandb.log({"video": wandb.Video(str(video), caption=f"{step:,} steps")})


def write_header(writer: Any, flags: dict[str, Any], begin: int) -> None:
    """Writes the flags to an event file, as a text and for the page HPARAMS.

    TensorBoard then drops points after step `begin` from other event files.
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


def let_events_follow(folder: Path) -> None:
    """Renames the event files of a run that are newer than the clock, as if it was set back.

    TensorBoard reads event files in the order of the times in their names. It would drop the points
    of a resumed run if its file came first.
    """
    for place in {file.parent for file in folder.rglob("events.out.tfevents.*")}:
        last = int(time.time()) - 1
        for file in sorted(place.glob("events.out.tfevents.*"), reverse=True):
            begin, second, end = re.split(r"(?<=tfevents\.)(\d+)", file.name, maxsplit=1)
            if int(second) > last:
                file.rename(file.with_name(f"{begin}{last:010}{end}"))
            last = min(int(second), last - 1)


def write_origin(folder: Path, begin: int, script: Path) -> None:
    """Adds an entry to run.json: with what `script` trains from step `begin` on."""
    file = folder / "run.json"
    starts = read_origin(file)
    commit = ""
    if shutil.which("git"):
        describe = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        done = subprocess.run(
            describe, cwd=script.parent, capture_output=True, text=True, check=False
        )
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
    disk.write_whole(file, json.dumps(starts, indent=1).encode())


def read_origin(file: Path) -> list:
    """Reads run.json. Moves a damaged file aside, because the run does not depend on it."""
    try:
        starts = json.loads(file.read_text())
        if isinstance(starts, list):
            return starts
    except FileNotFoundError:
        return []
    except ValueError:
        pass
    aside = file.replace(file.with_name(f"run.json.damaged_{time.time_ns()}"))
    tqdm.write(f"{file} was damaged and is now {aside.name}: its record begins anew")
    return []
