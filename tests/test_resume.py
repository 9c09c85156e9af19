"""--resume: a run continues from its newest checkpoint as if it had never ended."""

import json
import shutil

import numpy as np
import pytest
from helpers import (
    COUNTED,
    COUNTER,
    SMALL_DQN,
    assert_trees_equal,
    flags_of,
    gradient_steps,
    logged_steps,
    read_events,
    saved_run,
)

import dqn_jax
import per_dqn_jax
import ppo_jax
from cleanreplay import UsageError, flags
from cleanreplay.checkpoints import steps_in
from cleanreplay.run_folder import locked

# Two agents in a compiled program.
CHAINED = COUNTER | SMALL_DQN | dict(env_id="environments:Chain-v0", num_envs=4, num_seeds=2)
CHAINED |= dict(total_timesteps=320, log_interval=80, checkpoint_interval=160, buffer_size=200)


def killed(saved):
    """Copies a run as if it had been killed after its first checkpoint."""
    copy = saved.copied()
    *_, last = steps_in(copy.folder)
    shutil.rmtree(copy.folder / "checkpoints" / str(last))
    return copy


@pytest.mark.parametrize(("script", "flags"), [(dqn_jax, {}), (ppo_jax, {}), (dqn_jax, CHAINED)])
def test_a_resumed_run_continues_bit_for_bit(script, flags):
    whole = saved_run(script, **flags)
    resumed = killed(whole).train()

    assert_trees_equal(resumed.state, whole.state)
    files = [file.relative_to(whole.folder).parent for file in whole.folder.rglob("events*")]
    assert len(files) == len(whole.returns)
    for name in files:
        charts, _ = read_events(resumed.folder / name)
        wanted, _ = read_events(whole.folder / name)
        del charts["charts/SPS"], wanted["charts/SPS"]
        assert charts == wanted
    assert flags or resumed.returns == whole.returns


def test_later_points_are_dropped_and_more_steps_made():
    resumed = killed(saved_run(dqn_jax, **COUNTED)).train(total_timesteps=300)

    for tag in ("charts/epsilon", "charts/SPS", "charts/episodic_return"):
        assert logged_steps(resumed.folder, tag) == list(range(20, 301, 20)), tag
    assert logged_steps(resumed.folder, "eval/episodic_return") == [300]
    charts, _ = read_events(resumed.folder)
    epsilon = [value for step, value in charts["charts/epsilon"] if step > 100]
    # Epsilon is that of the iteration that ends there, which began 10 steps before.
    expected = np.interp(np.arange(110, 300, 20), [0, 150], [1.0, 0.05])
    np.testing.assert_allclose(epsilon, expected, rtol=1e-6)
    # A gradient step in each iteration of 10 steps that starts at 50 or later.
    assert gradient_steps(resumed.state) == 25
    assert steps_in(resumed.folder) == [200, 300]


def test_a_complete_run_is_evaluated_once_more(capsys):
    saved = saved_run(dqn_jax, **COUNTED).copied()
    files = [saved.folder / name for name in ("args.json", "best.safetensors")]
    texts = [file.read_bytes() for file in files]
    again = saved.train(eval_episodes=3)

    assert "200 steps: return" in capsys.readouterr().out
    np.testing.assert_array_equal(again.returns, saved.returns)
    assert [file.read_bytes() for file in files] == texts
    assert steps_in(saved.folder) == [100, 200]
    assert logged_steps(saved.folder, "eval/episodic_return") == [200, 200]
    assert logged_steps(saved.folder) == list(range(20, 201, 20))


def test_a_complete_run_may_have_more_steps_than_its_flag():
    """With --total-timesteps 60 it takes four iterations of 16, which are 64 steps."""
    again = saved_run(ppo_jax).copied().train()

    assert steps_in(again.folder) == [32, 64]
    assert_trees_equal(again.state, saved_run(ppo_jax).state)


def test_a_resume_takes_the_flags_of_the_run(run_main):
    """A resume may temporarily change how often the run is evaluated, saved and logged."""
    saved = saved_run(dqn_jax, **COUNTED).copied()
    started = json.loads((saved.folder / "args.json").read_text())
    more = "--total-timesteps 220 --eval-episodes 2 --checkpoint-interval 10 --log-interval 10"
    code, out, _ = run_main(dqn_jax, "--resume", str(saved.folder), *more.split())

    assert code == 0
    assert out.splitlines()[-1].startswith(f"{saved.folder}: mean return of the last episodes")
    written = json.loads((saved.folder / "args.json").read_text())
    assert written["args"] == started["args"] | {"total_timesteps": 220}
    assert written["run"] == started["run"]
    assert steps_in(saved.folder) == [210, 220]
    assert logged_steps(saved.folder) == [*range(20, 201, 20), 210, 220]
    assert logged_steps(saved.folder, "eval/episodic_return") == [200, 220]
    _, table = read_events(saved.folder)
    assert "|gamma|0.5|" in table
    assert f"|resume|{saved.folder}|" in table


def check(saved, **changed):
    """Compares the flags of a run with changed ones, as a resume does first."""
    given = vars(saved.args) | vars(saved.run) | changed
    flags.check_resume(*flags_of(saved.script, **given))


def train_locked(saved):
    with locked(saved.folder):
        saved.train()


# A user's mistake with a run of 200 steps, and words of the error.
MISTAKES = [
    (lambda saved: saved.train(gamma=0.9), "gamma must stay 0.5, not become 0.9"),
    (lambda saved: check(saved, buffer_size=300), "buffer_size must stay 400, not"),
    (lambda saved: check(saved, env_id="CartPole-v1"), "env_id must stay"),
    (lambda saved: check(saved, seed=2), "seed must stay 1"),
    (lambda saved: check(saved, num_seeds=2), "num_seeds must stay 1"),
    (lambda saved: check(saved, sweep=("gamma=0,1",)), "sweep must stay"),
    (lambda saved: saved.train(total_timesteps=150), "the run has 200 steps, more than 150"),
    (lambda saved: saved._replace(script=per_dqn_jax).train(double_q=False), "replay"),
    (lambda saved: saved.train(resume=f"{saved.folder}/best.safetensors"), "--init-from"),
    (lambda saved: saved.train(resume=f"{saved.folder}/checkpoints"), "folder of a run"),
    (train_locked, "another process trains in"),
]


@pytest.mark.parametrize(("resume", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_a_mistake_in_a_resume_changes_nothing(resume, words):
    saved = saved_run(dqn_jax, **COUNTED).copied()
    (saved.folder / ".lock").touch()
    before = {path: path.stat().st_mtime_ns for path in saved.folder.rglob("*")}
    with pytest.raises(UsageError, match=words) as caught:
        resume(saved)

    assert "\n" not in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in saved.folder.rglob("*")} == before
