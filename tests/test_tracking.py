"""Videos of evaluations and Weights & Biases; each needs a library of its own."""

import importlib.util
import json
import os
import struct
import sys
from dataclasses import replace
from pathlib import Path

import environments  # noqa: F401  (registers)
import gymnasium as gym
import numpy as np
import pytest
from test_dqn import ROOT, read_events, run_script

import dqn_jax
import per_dqn_jax
import ppo_jax

MODULES = [dqn_jax, per_dqn_jax, ppo_jax]
IDS = [module.__name__ for module in MODULES]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def tracked_values(path):
    """{key: values in order} of all that a run logged, from wandb's file of records.

    The file is LevelDB's log: blocks of 32 KiB; a header of 7 bytes, with the length and whether
    what follows is a record (1) or the first, a middle or the last part (4) of one.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, values = path.read_bytes(), 7, b"", {}
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


@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")  # moviepy, NumPy 2.5
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (dqn_jax, "--learning-starts 500"),
        (ppo_jax, "--env-id phys2d/CartPole-v1 --num-seeds 2 --eval-interval 1024"),
    ],
    ids=["ordinary", "compiled"],
)
def test_video_and_tracking_without_screen_and_network(module, flags, tmp_path, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    flags = ["--total-timesteps", "2048", "--num-envs", "4", "--eval-episodes", "2", *flags.split()]
    flags += ["--capture-video", "--track", "--wandb-project-name", "tests"]
    done = run_script(*flags, folder=tmp_path, script=ROOT / f"{module.__name__}.py")
    assert done.returncode == 0, done.stderr
    folders = sorted((tmp_path / "runs").iterdir())
    assert len(folders) == (2 if module is ppo_jax else 1)
    videos = sorted(folders[0].glob("videos/*/*.mp4"))
    steps = [int(video.parent.name) for video in videos]
    scores = read_events(folders[0])[0]["eval/episodic_return"]
    assert steps == sorted(step for step, _ in scores)
    assert len(videos) == (2 if module is ppo_jax else 1)
    for video in videos:
        count, shape = frames(video)
        assert 5 < count <= 501
        assert shape == (400, 600, 3)
    for folder in folders:
        (file,) = (tmp_path / "wandb").glob(f"offline-run-*{folder.name}/*.wandb")
        tracked, (scalars, _) = tracked_values(file), read_events(folder)
        tags = {key for key in tracked if "/" in key and not key.startswith("eval/video")}
        assert tags == set(scalars)
        for tag, points in scalars.items():
            np.testing.assert_allclose(tracked[tag], [y for _, y in points], rtol=1e-6, err_msg=tag)
        assert tracked["global_step"][-1] == points[-1][0]
        assert ("eval/video.path" in tracked) == (folder == folders[0])

    # A video of a finished run: of the first episode that is evaluated, to its end.
    flags = ["--evaluate", f"runs/{folders[0].name}", "--capture-video", "--eval-episodes", "1"]
    videos[-1].unlink()
    done = run_script(*flags, folder=tmp_path, script=ROOT / f"{module.__name__}.py")
    assert done.returncode == 0, done.stderr
    # CartPole's return is its length; the first frame is the reset's; the reader may round down.
    if module is not ppo_jax:
        assert frames(videos[-1])[0] - float(done.stdout.split()[-1]) in (0, 1)


@pytest.mark.parametrize("module", MODULES, ids=IDS)
@pytest.mark.parametrize(
    ("flag", "library"), [("capture_video", "moviepy"), ("track", "wandb")], ids=str
)
def test_a_missing_library_is_one_line(module, flag, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    assert importlib.util.find_spec(library) is None
    with pytest.raises(module.UsageError, match=f"{flag} needs {library}: pip install {library}$"):
        module.train(module.Args(**{flag: True}))
    assert not Path("runs").exists()


def test_tracking_without_a_login_is_one_line(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://localhost:9")
    done = run_script("--track", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: track: ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("module", MODULES, ids=IDS)
def test_an_environment_without_pictures_is_refused(module):
    args = module.Args(env_id="Counter-v0", capture_video=True)
    with pytest.raises(module.UsageError, match="capture_video takes render mode rgb_array"):
        module.train(args)


# Gymnasium warns of frames that were not written.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("module", [dqn_jax, ppo_jax], ids=["dqn", "ppo"])
def test_a_video_that_fails_does_not_end_the_run(module, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gym.wrappers.RecordVideo, "stop_recording", fail)
    args = module.Args(total_timesteps=1_024, num_envs=4, eval_episodes=1, capture_video=True)
    if module is dqn_jax:
        args = replace(args, learning_starts=500)
    result = module.train(args)
    err = capsys.readouterr().err
    assert "no video in " in err
    assert "the run goes on: [Errno 28] No space left" in err
    scalars, _ = read_events(result.folder)
    assert np.isfinite(scalars["charts/final_return"][-1][1])
