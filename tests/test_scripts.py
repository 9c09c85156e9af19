"""The scripts as texts that are read and as programs that are run."""

import ast
import difflib
import inspect
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import slow
from environments import Counter  # noqa: F401  registers the environments
from events import ROOT, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax

SCRIPTS = {"dqn_jax": dqn_jax, "per_dqn_jax": per_dqn_jax, "ppo_jax": ppo_jax}
MARK = "# === common to all scripts ==="
# Flags with which a run takes a second or two.
SMALL = {
    "dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "per_dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "ppo_jax": "--num-steps 16 --update-epochs 1 --num-minibatches 1",
}


def text(name):
    return (ROOT / f"{name}.py").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_mark_stands_once_in_a_script(name):
    lines = text(name).splitlines()
    assert max(map(len, lines)) <= 100
    assert lines.count(MARK) == 1


def test_below_the_mark_the_scripts_are_the_same_text():
    parts = {text(name).split(MARK)[1] for name in SCRIPTS}
    assert len(parts) == 1


def test_per_dqn_differs_from_dqn_in_few_lines():
    lines = [text(name).splitlines() for name in ("dqn_jax", "per_dqn_jax")]
    changed = [x for x in difflib.ndiff(*lines) if x[0] in "+-"]
    assert 0 < len(changed) <= 54


@pytest.mark.parametrize("name", [*SCRIPTS, "compiled", "images"])
def test_functions_are_short_and_have_docstrings(name):
    for node in ast.walk(ast.parse(text(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            public = not node.name.startswith("_") and node.col_offset in (0, 4)
            nested = isinstance(node, ast.FunctionDef) and node.col_offset == 4
            is_method = any(x.arg == "self" for x in node.args.args) if nested else True
            if public and is_method:
                assert ast.get_docstring(node), node.name
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 100, node.name


@pytest.mark.parametrize("name", [*SCRIPTS, "compiled", "images"])
def test_what_went_is_gone(name):
    for word in ("psum", "shard_map", "tensorboardX", "=== shared", "SAME_STEP"):
        assert word not in text(name), word


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_three_groups_and_a_line_for_every_flag(name, run_main):
    code, out, _ = run_main(SCRIPTS[name], "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    _, *groups = re.split("experiment options|algorithm options|processes options", words)
    module = SCRIPTS[name]
    for group, flags in zip(groups, (module.Run, module.Args, module.Processes), strict=True):
        comments = re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(flags), re.MULTILINE)
        assert [flag for flag, _ in comments] == list(vars(flags()))
        for flag, comment in comments:
            assert f"--{flag.replace('_', '-')}" in group
            assert comment in group


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("dqn_jax", "--env-id Nothing-v0", "Nothing"),
        ("dqn_jax", "--env-kwargs {", "error: "),
        ("dqn_jax", '--env-kwargs {"wind":1}', "wind"),
        ("dqn_jax", "--env-id Pendulum-v1", "Discrete"),
        ("dqn_jax", "--env-id Blackjack-v1", "Tuple"),
        ("dqn_jax", "--learning-starts 600000", "learning_starts"),
        ("dqn_jax", "--num-envs 0", "num_envs"),
        ("dqn_jax", "--num-seeds 2", "one agent"),
        ("dqn_jax", "--num-devices 2", "one agent"),
        ("dqn_jax", "--env-id environments:Chain-v0 --num-devices 64", "num_devices"),
        ("dqn_jax", "--env-id environments:Chain-v0 --num-seeds 3 --num-devices 2", "num_devices"),
        ("dqn_jax", "--env-id environments:CounterSameStep-v0", "NEXT_STEP"),
        ("dqn_jax", "--process-id 1", "distributed"),
        ("dqn_jax", "--env-id environments:Chain-v0 --async-envs", "async_envs"),
        ("dqn_jax", "--env-id environments:VectorOnly-v0 --async-envs", "async_envs"),
        ("per_dqn_jax", "--resume nowhere", "nowhere"),
        ("ppo_jax", "--num-minibatches 3", "num_minibatches"),
        ("ppo_jax", "--env-id environments:VectorOnly-v0 --capture-video", "capture_video"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(name, flags, message, run_main, tmp_path):
    code, _, err = run_main(SCRIPTS[name], *flags.split())
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert message in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_copied_with_buffers_alone_it_runs_and_its_events_can_be_read(name, tmp_path):
    for file in (f"{name}.py", "buffers.py"):
        shutil.copy(ROOT / file, tmp_path)
    flags = f"--total-timesteps 2000 --num-envs 4 --log-interval 100 {SMALL[name]}"
    warnings = "-W", "error", "-W", "ignore:Error reading persistent compilation cache"
    done = subprocess.run(
        [sys.executable, *warnings, f"{name}.py", *flags.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *progress, evaluation, newest, last = done.stdout.strip().splitlines()
    assert 14 <= len(progress) <= 19  # with the newest about every 5 percent
    for word in ("steps", "a second", "return"):
        assert word in newest
    assert "without exploration" in evaluation
    (folder,) = (tmp_path / "runs").iterdir()
    assert last.startswith(f"{folder}: mean return of the last episodes ")
    saved = json.loads((folder / "args.json").read_text())
    module = SCRIPTS[name]
    assert saved["args"].keys() == vars(module.Args()).keys()
    assert saved["run"].keys() == vars(module.Run()).keys()

    scalars, table = read_events(folder)
    own = {
        "dqn_jax": "losses/td_loss losses/q_values charts/epsilon charts/gradient_steps",
        "per_dqn_jax": "losses/td_loss losses/q_values losses/importance_weight_min "
        "losses/priority_max charts/epsilon charts/gradient_steps charts/beta",
        "ppo_jax": "losses/policy_loss losses/value_loss losses/entropy losses/old_approx_kl "
        "losses/approx_kl losses/clipfrac losses/explained_variance charts/learning_rate",
    }
    common = "charts/episodic_return charts/episodic_length charts/SPS eval/episodic_return"
    assert set(scalars) == set(f"{common} {own[name]}".split())
    for tag, points in scalars.items():
        steps, values = np.array(points).T
        assert np.isfinite(values).all(), tag
        assert (np.diff(steps) > 0).all(), tag
    end = scalars["charts/SPS"][-1][0]
    assert 2000 <= end < 2000 + 64 + 100
    assert [step for step, _ in scalars["eval/episodic_return"]] == [end]
    assert "|env_id|CartPole-v1|" in table
    assert "|total_timesteps|2000|" in table


@pytest.mark.parametrize("module", SCRIPTS.values(), ids=SCRIPTS)
def test_the_figure_at_the_end_is_of_the_last_points_with_100_episodes(
    module, tmp_path, monkeypatch
):
    """Points are given in place of training: number, sum of returns and lengths of episodes."""
    monkeypatch.chdir(tmp_path)
    points = [(50, 5000.0), (0, 0.0), (70, 70.0), (0, 0.0), (20, 40.0), (15, 15.0)]

    def give(loop, training, steps):
        for step, (number, total) in zip(steps, points, strict=True):
            ended = np.array([number, total, number], np.float32)
            yield step + steps.step, training._replace(ended=ended), {}

    monkeypatch.setattr(module.OrdinaryLoop, "intervals", give)
    size = 512 if module is ppo_jax else 10
    flags = {} if module is ppo_jax else dict(learning_starts=1, batch_size=1)
    args = module.Args(total_timesteps=len(points) * size, **flags)
    _, returns, _ = module.train(args, module.Run(log_interval=size, eval_episodes=0))
    np.testing.assert_allclose(returns, [(70 + 40 + 15) / 105])


@pytest.mark.parametrize("name", ["dqn_jax", slow("ppo_jax")])
def test_atari_is_learned_from(name, tmp_path, monkeypatch):
    pytest.importorskip("ale_py")
    monkeypatch.chdir(tmp_path)
    module = SCRIPTS[name]
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    flags = dict(env_id="ale_py:ALE/Pong-v5", env_kwargs=kwargs, log_interval=64, eval_episodes=2)
    own = dict(num_steps=8, num_minibatches=1, update_epochs=1)
    if name == "dqn_jax":
        own = dict(learning_starts=32, batch_size=4, train_frequency=32, buffer_size=200)
    args = module.Args(total_timesteps=64, num_envs=8, **own)
    training, _, folder = module.train(args, module.Run(**flags))
    scalars, _ = read_events(folder)
    loss = "losses/td_loss" if name == "dqn_jax" else "losses/value_loss"
    assert np.isfinite(scalars[loss][-1][1])
    # 200 frames are 50 steps, in which the opponent scores at most twice.
    assert -3 <= scalars["eval/episodic_return"][-1][1] <= 0
    # The Nature CNN of 4x84x84 and its heads.
    assert training.agent.params.size == (1_687_206 if name == "dqn_jax" else 1_687_719)


def test_atari_is_the_same_environment_at_every_number():
    pytest.importorskip("ale_py")
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    run = dqn_jax.Run(env_id="ale_py:ALE/Pong-v5", env_kwargs=kwargs)
    one, many = [dqn_jax.make_envs(dqn_jax.Args(), run, n) for n in (1, 8)]
    assert one.single_observation_space == many.single_observation_space
    for envs in (one, many):
        envs.reset(seed=3)
        cut = [envs.step(np.zeros(envs.num_envs, int))[3].all() for _ in range(50)]
        assert cut == [False] * 49 + [True]
