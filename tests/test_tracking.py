"""Videos of evaluations and Weights & Biases; each needs a library of its own."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import environments  # noqa: F401  registers the environments
import jax
import numpy as np
import pytest
from helpers import ROOT, more, one_line, read_events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import dqn_jax
import ppo_jax


def tracked_values(path):
    """{key: values in order} of all that a run logged, from wandb's file of records.

    The file is LevelDB's log: blocks of 32 KiB; a header of 7 bytes, with the length and whether
    what follows is a record (1) or the first, a middle or the last part (4) of one.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    at = 7
    record = b""
    values = {}
    while at + 7 <= len(data):
        if at % 32_768 > 32_768 - 7:
            at += -at % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            for item in Record.FromString(record).history.item:
                key = item.key or ".".join(item.nested_key)
                values.setdefault(key, []).append(json.loads(item.value_json))
            record = b""
    return values


def frames(path):
    """How many the video has, and their shape."""
    from moviepy import VideoFileClip

    with VideoFileClip(str(path)) as clip:
        return clip.n_frames, clip.get_frame(0).shape


@pytest.mark.more
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # moviepy, NumPy 2.5
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (dqn_jax, dict(learning_starts=100, batch_size=16)),
        more(ppo_jax, dict(num_steps=64)),
    ],
    ids=["ordinary", "compiled"],
)
def test_each_evaluation_is_recorded(module, flags, monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    env_id = "CartPole-v1" if module is dqn_jax else "phys2d/CartPole-v1"
    run = module.Run(
        env_id=env_id,
        log_interval=256,
        eval_interval=256,
        eval_episodes=1,
        capture_video=True,
    )
    _, _, folder = module.train(module.Args(total_timesteps=512, num_envs=4, **flags), run)
    videos = sorted(folder.glob("videos/*/*.mp4"))
    scores = dict(read_events(folder)[0]["eval/episodic_return"])
    assert [int(video.parent.name) for video in videos] == sorted(scores)
    assert len(videos) == 2
    for video in videos:
        count, shape = frames(video)
        assert shape == (400, 600, 3)
        if module is dqn_jax:
            # It is the episode that was evaluated: CartPole's return is its length, and the first
            # frame is that of the reset; the reader may round down.
            assert count - scores[int(video.parent.name)] in (0, 1)
        else:
            assert 5 < count <= 501


def test_the_page_hparams_has_the_flags_and_the_last_returns(run_main, tmp_path):
    flags = "--total-timesteps 512 --eval-episodes 1 --hidden-sizes 7 5 --checkpoint-interval 0"
    assert run_main(ppo_jax, *flags.split())[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    plugin = {
        tag: HParamsPluginData.FromString(content)
        for tag, content in events.PluginTagToContent("hparams").items()
    }
    given = plugin["_hparams_/session_start_info"].session_start_info.hparams
    assert set(given) == set(vars(ppo_jax.Run()) | vars(ppo_jax.Args()))
    assert given["env_id"].string_value == "CartPole-v1"
    assert given["hidden_sizes"].string_value == "(7, 5)"
    assert given["total_timesteps"].number_value == 512
    experiment = plugin["_hparams_/experiment"].experiment
    assert {info.name for info in experiment.hparam_infos} == set(given)
    columns = [info.name.tag for info in experiment.metric_infos]
    assert columns == ["eval/episodic_return", "charts/episodic_return"]
    assert set(columns) <= set(events.Tags()["scalars"])


def test_run_json_says_with_which_versions_and_command_a_run_was_made(run_main, tmp_path):
    flags = ["--total-timesteps", "512", "--eval-episodes", "0"]
    assert run_main(ppo_jax, *flags)[0] == 0
    (folder,) = (tmp_path / "runs").iterdir()
    more = ["--resume", str(folder), "--total-timesteps", "1024"]
    assert run_main(ppo_jax, *more)[0] == 0
    first, second = json.loads((folder / "run.json").read_text())
    assert (first["step"], second["step"]) == (0, 512)
    assert first["command"].endswith("ppo_jax.py --total-timesteps 512 --eval-episodes 0")
    assert second["command"].endswith(f"--resume {folder} --total-timesteps 1024")
    assert first["versions"]["jax"] == jax.__version__
    assert first["device"] == jax.devices()[0].device_kind
    git = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert first["commit"].removesuffix("-dirty") == head.strip()


@pytest.mark.slow  # 8 of its 14 seconds wandb waits
def test_weights_and_biases_follows_the_events(tmp_path):
    names = ("DISPLAY", "WANDB_API_KEY")
    env = {name: value for name, value in os.environ.items() if name not in names}
    flags = "--total-timesteps 2000 --num-envs 4 --learning-starts 500 --batch-size 16 --track"
    flags += " --capture-video --eval-interval 1000"
    done = subprocess.run(
        [sys.executable, str(ROOT / "dqn_jax.py"), *flags.split()],
        cwd=tmp_path,
        env=env | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    (file,) = (tmp_path / "wandb").glob(f"offline-run-*{folder.name}/*.wandb")
    tracked = tracked_values(file)
    scalars, _ = read_events(folder)
    for tag, points in scalars.items():
        values = [value for _, value in points]
        np.testing.assert_allclose(tracked[tag], values, rtol=1e-5, err_msg=tag)
    assert tracked["global_step"][-1] == 2000
    assert len(list((tmp_path / "wandb").glob("offline-run-*/files/media/videos/*.mp4"))) == 2


def test_without_weights_and_biases_one_line_says_what_to_install(run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = run_main(ppo_jax, "--track", "--total-timesteps", "512")
    assert one_line(result) == "error: track: pip install wandb"
    assert not Path("runs").exists()
