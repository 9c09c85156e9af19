"""Videos of evaluations, flags in TensorBoard, run.json, and Weights & Biases."""

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import environments  # noqa: F401  registers the environments
import jax
import pytest
from helpers import ROOT, read_events, slow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer.event_file_writer import EventFileWriter

import dqn_jax
import ppo_jax
from cleanreplay import UsageError, tracking


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # moviepy, NumPy 2.5
@pytest.mark.parametrize(
    ("script", "env_id", "flags"),
    [
        (dqn_jax, "CartPole-v1", dict(learning_starts=100, batch_size=16)),
        slow(ppo_jax, "phys2d/CartPole-v1", dict(num_steps=32)),
    ],
    ids=["ordinary", "compiled"],
)
def test_each_evaluation_is_recorded(script, env_id, flags, monkeypatch):
    from moviepy import VideoFileClip

    monkeypatch.delenv("DISPLAY", raising=False)
    every = dict(log_interval=128, eval_interval=128, eval_episodes=1, checkpoint_interval=0)
    run = script.Run(env_id=env_id, capture_video=True, eval_max_steps=30, **every)
    _, _, folder = script.train(script.Args(total_timesteps=256, num_envs=4, **flags), run)

    scores = dict(read_events(folder)[0]["eval/episodic_return"])
    videos = {int(video.parent.name): video for video in folder.glob("videos/*/*.mp4")}
    assert len(videos) == 2
    assert videos.keys() == scores.keys()
    for step, video in videos.items():
        with VideoFileClip(str(video)) as clip:
            assert clip.get_frame(0).shape == (400, 600, 3)
            # In a run that is stepped from Python it is the evaluated episode: CartPole's return is
            # its length, and the first frame is that of the reset; the reader may round down.
            difference = clip.n_frames - scores[step]
            assert difference in (0, 1) if script is dqn_jax else 5 < clip.n_frames <= 31


def test_an_event_file_has_the_flags_and_drops_later_points(tmp_path):
    flags = vars(ppo_jax.Run()) | vars(ppo_jax.Args(hidden_sizes=(7, 5), total_timesteps=512))
    writer = EventFileWriter(str(tmp_path))
    for step in (7, 8):
        event = Event(step=step)
        event.summary.value.add(tag="x", simple_value=1)
        writer.add_event(event)
    tracking.write_header(writer, flags, begin=7)
    writer.close()

    scalars, text = read_events(tmp_path)
    contents = EventAccumulator(str(tmp_path)).Reload().PluginTagToContent("hparams")
    plugin = {tag: HParamsPluginData.FromString(content) for tag, content in contents.items()}
    given = plugin["_hparams_/session_start_info"].session_start_info.hparams
    experiment = plugin["_hparams_/experiment"].experiment

    assert scalars == {"x": [(7, 1)]}
    assert "|hidden_sizes|(7, 5)|" in text.splitlines()
    assert {info.name for info in experiment.hparam_infos} == set(given) == set(flags)
    assert given["hidden_sizes"].string_value == "(7, 5)"
    assert given["total_timesteps"].number_value == 512
    columns = [info.name.tag for info in experiment.metric_infos]
    assert columns == ["eval/episodic_return", "charts/episodic_return"]


def test_run_json_has_versions_and_command_of_each_start(tmp_path, monkeypatch):
    for step, seed in ((0, "1"), (512, "2")):
        monkeypatch.setattr(sys, "argv", ["ppo_jax.py", "--seed", seed])
        tracking.write_origin(tmp_path, step, ROOT / "ppo_jax.py")

    first, second = json.loads((tmp_path / "run.json").read_text())
    assert (first["step"], second["step"]) == (0, 512)
    assert first["command"] == f"{sys.executable} ppo_jax.py --seed 1"
    assert second["command"].endswith("--seed 2")
    assert first["versions"].keys() == set(tracking.PACKAGES)
    assert first["versions"]["jax"] == jax.__version__
    assert first["device"] == jax.devices()[0].device_kind
    git = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert first["commit"].removesuffix("-dirty") == head.strip()


@pytest.mark.parametrize("text", ['[{"step": 0,', "{}"])
def test_a_damaged_run_json_is_moved_aside(text, tmp_path, capsys):
    file = tmp_path / "run.json"
    file.write_text(text)

    assert tracking.read_origin(file) == []
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith("run.json.damaged")
    assert aside.read_text() == text
    assert aside.name in capsys.readouterr().out


def test_weights_and_biases_begins_or_resumes_a_run(monkeypatch):
    """It reads the charts from the event files."""
    begun = []
    wandb = SimpleNamespace(Error=RuntimeError, init=lambda **given: begun.append(given))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracking.init_wandb("name", {"gamma": 0.5})

    name = dict(id="name", name="name", config={"gamma": 0.5})
    assert begun == [name | dict(sync_tensorboard=True, resume="allow")]


def test_an_error_of_weights_and_biases_is_a_usage_error(monkeypatch):
    def fail(**_):
        raise RuntimeError("no login")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=RuntimeError, init=fail))
    with pytest.raises(UsageError, match="track: no login"):
        tracking.init_wandb("name", {})


def test_videos_after_the_first_step_are_tracked(tmp_path, monkeypatch):
    for step in (90, 100, 200):
        (tmp_path / "videos" / str(step)).mkdir(parents=True)
        (tmp_path / "videos" / str(step) / "x.mp4").touch()
    logged = []
    wandb = SimpleNamespace(log=logged.append, Video=lambda path, caption: (Path(path), caption))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    tracking.log_videos(tmp_path, 100)

    assert logged == [{"video": (tmp_path / "videos/200/x.mp4", "200 steps")}]


def test_event_files_of_a_resume_come_last():
    """The clock may have been set back: TensorBoard drops points after a restart."""
    later = int(time.time()) + 5_000
    names = [f"{later - 1:010}.a.1.2", f"{later:010}.b.3.4", "0000000007.c.5.6"]
    for name in names:
        Path(f"events.out.tfevents.{name}").write_text(name)
    tracking.let_events_follow(Path())
    before = f"events.out.tfevents.{int(time.time()):010}"

    found = sorted(Path().glob("events*"))
    assert [file.read_text() for file in found] == [names[2], *names[:2]]
    assert found[0].name.endswith("0000000007.c.5.6")
    assert found[-1].name < before
