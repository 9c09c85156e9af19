"""What outlasts a run: checkpoints, its flags, evaluations; in all three scripts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import environments  # noqa: F401  (registers)
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from test_compiled import IDS, PPO, SCRIPTS
from test_dqn import ROOT, read_events, run_script

import dqn_jax
import ppo_jax

STEPS = 2_048


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def args_of(module, flags, **changes):
    short = dict(total_timesteps=STEPS, log_interval=512, eval_episodes=0, learning_rate=1e-3)
    return module.Args(**{**flags, **short, **changes})


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def stopped(module, args, step, monkeypatch):
    """Trains until `step` is logged, as if interrupted there; the folder."""
    log = module.log

    def stop(run, args, at, *rest):
        if at > step:
            raise KeyboardInterrupt
        log(run, args, at, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(module, "log", stop)
        with pytest.raises(KeyboardInterrupt):
            module.train(args)
    (folder, *_) = sorted(map(str, Path("runs").iterdir()))
    return folder


@pytest.mark.parametrize(
    ("module", "flags", "more"),
    [
        (*SCRIPTS[0], dict(num_devices=2)),
        (*SCRIPTS[1], dict(num_seeds=2)),
        (*SCRIPTS[2], dict()),
    ],
    ids=["dqn-2-devices", "per-2-seeds", "ppo"],
)
def test_a_compiled_run_goes_on_bit_for_bit(module, flags, more, monkeypatch):
    """With evaluations on the way, which must not change anything either."""
    args, num_seeds = args_of(module, flags, **more), more.get("num_seeds", 1)
    whole = module.train(replace(args, checkpoint_interval=0))
    assert not (Path(whole.folder) / "checkpoints").exists()
    shutil.rmtree("runs")
    looked_at = replace(args, checkpoint_interval=1_024, eval_interval=512, eval_episodes=1)
    folder = stopped(module, looked_at, 1_536, monkeypatch)
    (saved,) = (Path(folder) / "checkpoints").iterdir()
    assert 1_024 <= int(saved.name) < STEPS
    args = module.load_args(module.Args, folder, resume=folder)
    assert args == replace(looked_at, resume=folder)
    result = module.train(args)
    same(result.agent, whole.agent)
    assert result.returns == pytest.approx(whole.returns)
    assert result.folder == folder
    assert len(list(Path("runs").iterdir())) == num_seeds
    scalars, _ = read_events(folder)
    steps = [step for step, _ in scalars["charts/episodic_return"]]
    assert steps == sorted(set(steps))
    assert steps[-1] == STEPS
    assert len(scalars["eval/episodic_return"]) >= 4
    scores = module.train(replace(args, resume=None, evaluate=folder, eval_episodes=3)).returns
    assert len(scores) == 3


@pytest.mark.parametrize(("module", "flags"), SCRIPTS, ids=IDS)
def test_an_ordinary_run_goes_on(module, flags, capsys):
    args = args_of(module, flags, compiled=False, total_timesteps=1_024)
    if module is not ppo_jax:
        args = replace(args, n_step=3)
    first = module.train(args)
    flags = module.load_args(module.Args, first.folder, resume=first.folder)
    again = module.train(flags)  # is at its end
    same(again.agent.params, first.agent.params)
    same(again.agent.opt_state, first.agent.opt_state)
    result = module.train(replace(flags, total_timesteps=STEPS))
    assert "the environments start new episodes" in capsys.readouterr().out
    assert np.abs(result.agent.params - first.agent.params).max() > 1e-3
    assert module.load_args(module.Args, first.folder).total_timesteps == STEPS
    scalars, _ = read_events(first.folder)
    assert scalars["charts/SPS"][-1][0] == STEPS
    if module is not ppo_jax:
        # No window of 3 steps goes on past the end: two rows of 4 environments start none.
        masks = [np.asarray(agent.replay.storage[1]) for agent in (first.agent, again.agent)]
        assert 0 < (masks[0] & ~masks[1]).sum() <= 8


# Of what orbax was still reading when it found the damage.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("harm", ["cut", "flip"])
def test_a_damaged_checkpoint_is_skipped(harm, capsys):
    args = args_of(ppo_jax, PPO, checkpoint_interval=512)
    result = ppo_jax.train(args)
    checkpoints = Path(result.folder) / "checkpoints"
    assert sorted(p.name for p in checkpoints.iterdir()) == [str(STEPS - 512), str(STEPS)]
    files = [p for p in (checkpoints / str(STEPS)).rglob("*") if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    resumed = ppo_jax.train(replace(args, resume=result.folder))
    out, err = capsys.readouterr()
    assert f"{STEPS} is damaged and skipped" in err
    assert f"goes on from step {STEPS - 512}" in out
    same(resumed.agent, result.agent)


@pytest.mark.parametrize("why", ["no folder", "full disk"])
def test_training_goes_on_where_nothing_can_be_saved(why, capsys, monkeypatch):
    args = args_of(ppo_jax, PPO, checkpoint_interval=512)
    saved = []
    if why == "full disk":
        save = ocp.PyTreeCheckpointer.save

        def fail(self, path, tree, **kwargs):
            if saved:
                raise OSError(28, "No space left on device")
            saved.append(path)
            save(self, path, tree, **kwargs)

        monkeypatch.setattr(ocp.PyTreeCheckpointer, "save", fail)
    else:
        start = ppo_jax.start_run

        def start_run(args, folder, *rest):
            run = start(args, folder, *rest)
            (Path(folder) / "checkpoints").write_text("")
            return run

        monkeypatch.setattr(ppo_jax, "start_run", start_run)
    result = ppo_jax.train(args)
    err = capsys.readouterr().err
    assert f"no checkpoint of step {STEPS}, training goes on: [Errno " in err
    if saved:
        found = dqn_jax.saved_steps(os.path.join(result.folder, "checkpoints"))
        assert [os.path.basename(saved[0])] == list(map(str, found)) == ["512"]


def test_a_checkpoint_that_does_not_fit_is_not_begun(capsys, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    result = ppo_jax.train(args_of(ppo_jax, PPO))
    assert "training goes on: it takes 0.1 MB, and 0.0 MB are free" in capsys.readouterr().err
    assert not (Path(result.folder) / "checkpoints").exists()


# No file may grow beyond 40 kB: the system refuses to write more, as on a full disk.
LIMITED = """
import resource
import ppo_jax
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
ppo_jax.FLUSH_SECONDS = 0.0
ppo_jax.main(ppo_jax.train, ppo_jax.Args)
"""


def test_training_goes_on_where_files_cannot_grow(tmp_path):
    """Events that do not fit are lost; as soon as there is room again they are logged again."""
    flags = ["--env-id", "phys2d/CartPole-v1", "--total-timesteps", "98304", "--eval-episodes", "1"]
    flags += ["--log-interval", "512", "--num-envs", "32", "--num-steps", "16"]
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, *flags],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "logging pauses, training goes on: [Errno 27] File too large" in done.stderr
    assert "no checkpoint of step 98304, training goes on: " in done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert not dqn_jax.saved_steps(str(folder / "checkpoints"))
    sizes = [file.stat().st_size for file in folder.glob("events*")]
    assert len(sizes) >= 2
    assert max(sizes) <= 40_000
    scalars, _ = read_events(str(folder))
    steps = [step for step, _ in scalars["charts/SPS"]]
    assert steps[0] == 512
    assert steps[-1] == 98_304
    assert len(steps) > 150  # of 192
    assert scalars["charts/final_return"][-1][0] == 98_304


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file left open
@pytest.mark.parametrize("why", ["file", "full"])
def test_a_folder_that_cannot_be_written_is_one_line(why, monkeypatch):
    if why == "file":
        Path("runs").write_text("")
    else:

        def fail(self):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ppo_jax.EventsWriter, "flush", fail)
    message = "runs/.* must be a folder that can be written: .*Errno"
    with pytest.raises(ppo_jax.UsageError, match=message):
        ppo_jax.train(args_of(ppo_jax, PPO))


def test_mistakes_when_a_run_goes_on():
    args = args_of(ppo_jax, PPO, total_timesteps=1_024, checkpoint_interval=0)
    folder = ppo_jax.train(args).folder
    for changes, message in (
        (dict(seed=3), "seed 3: the run in .* was started with 1: leave the flag out"),
        (dict(total_timesteps=512), "total_timesteps 512 is less than the 1024 of the run"),
        (dict(resume="nowhere"), "nowhere must be the folder of a run of this script"),
        (dict(), "has no checkpoint that is whole: start the run anew"),
    ):
        with pytest.raises(ppo_jax.UsageError, match=message):
            ppo_jax.train(replace(args, **{"resume": folder, **changes}))


@pytest.mark.parametrize("module", [dqn_jax, ppo_jax], ids=["dqn", "ppo"])
def test_flags_metrics_and_evaluation_from_the_command_line(module, tmp_path):
    name = f"{module.__name__}.py"
    for file in ("buffers.py", name):
        (tmp_path / file).write_text((ROOT / file).read_text())
    flags = ["--total-timesteps", "1024", "--num-envs", "2", "--eval-episodes", "3"]
    if module is not ppo_jax:
        flags += ["--learning-starts", "500"]
    done = run_script(*flags, folder=tmp_path, script=tmp_path / name)
    assert done.returncode == 0, done.stderr
    assert "mean return of 3 episodes without exploration" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    stored = json.loads((folder / "args.json").read_text())
    assert stored["total_timesteps"] == 1024
    assert stored["exp_name"] == module.__name__
    scalars, events = read_events(folder)
    assert events.SummaryMetadata("_hparams_/session_start_info").plugin_data.plugin_name
    last = scalars["charts/final_return"][-1]
    assert last[0] in (1024, 1030)  # the last iteration is a whole one
    assert np.isfinite(last[1])
    flags = ["--evaluate", f"runs/{folder.name}", "--eval-episodes", "3"]
    done = run_script(*flags, folder=tmp_path, script=tmp_path / name)
    assert done.returncode == 0, done.stderr
    summary, returns = done.stdout.strip().splitlines()
    assert "mean return of 3 episodes" in summary
    mean = np.mean([float(x) for x in returns.split()])
    assert scalars["eval/episodic_return"][-1][1] == pytest.approx(mean, abs=0.01)
    flags = ["--resume", f"runs/{folder.name}", "--seed", "9"]
    done = run_script(*flags, folder=tmp_path, script=tmp_path / name)
    assert done.returncode == 2
    assert "seed 9" in done.stderr


# Notes each step that is logged where a kill cannot undo it.
RUNNER = """
import ppo_jax
log = ppo_jax.log
def noted(run, args, step, *rest):
    log(run, args, step, *rest)
    with open("progress", "a") as file:
        print(step, file=file)
ppo_jax.log = noted
ppo_jax.main(ppo_jax.train, ppo_jax.Args)
"""


def test_kills_lose_at_most_an_interval(tmp_path):
    """CLEANREPLAY_KILLS=20 makes it a long one."""
    kills, interval = int(os.environ.get("CLEANREPLAY_KILLS", "3")), 8_192
    flags = ["--env-id", "phys2d/CartPole-v1", "--eval-episodes", "0"]
    flags += ["--total-timesteps", "100000000"]
    flags += ["--checkpoint-interval", str(interval), "--log-interval", "2048", "--num-envs", "64"]
    rng, folder, lost = np.random.default_rng(0), None, []
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for kill in range(kills):
        resume = ["--resume", str(folder)] if folder else []
        command = [sys.executable, "-u", "-c", RUNNER, *flags, *resume]
        with open("out", "w") as out:
            process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=out, stderr=out
            )
        try:
            deadline, before = time.time() + 90, newest(folder)
            while newest(folder) <= before and time.time() < deadline:
                assert process.poll() is None, Path("out").read_text()
                time.sleep(0.02)
                folder = folder or next(iter(tmp_path.glob("runs/*")), None)
            assert newest(folder) > before, Path("out").read_text()
            time.sleep(rng.uniform(0, 0.5))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        if kill:
            text = Path("out").read_text()
            assert f"goes on from step {before}" in text, text
        lost.append(int(Path("progress").read_text().split()[-1]) - newest(folder))
    print(f"{kills} kills, at most {max(lost)} steps lost, {kills - 1} runs went on")
    assert max(lost) <= interval


def newest(folder):
    return max(
        dqn_jax.saved_steps(os.path.join(folder, "checkpoints")) if folder else [], default=0
    )
