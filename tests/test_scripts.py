"""The scripts as texts that are read and as programs that are run."""

import ast
import difflib
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import sys

import environments  # noqa: F401  registers the environments
import jax
import numpy as np
import pytest
from conftest import slow
from events import ROOT, read_events

import compiled
import dqn_jax
import per_dqn_jax
import ppo_jax
import sac_jax

SCRIPTS = {
    "dqn_jax": dqn_jax,
    "per_dqn_jax": per_dqn_jax,
    "ppo_jax": ppo_jax,
    "sac_jax": sac_jax,
}
MARK = "# === common to all scripts ==="
# Flags with which a run takes a second or two.
SMALL = {
    "dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "per_dqn_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500",
    "ppo_jax": "--num-steps 16 --update-epochs 1 --num-minibatches 1",
    "sac_jax": "--learning-starts 200 --batch-size 16 --buffer-size 500 --train-frequency 20",
}


def text(name):
    return (ROOT / f"{name}.py").read_text()


def run_script(name, flags, folder):
    """The finished process of a script in `folder`, to which warnings are errors."""
    warnings = ("-W", "error", "-W", "ignore:Error reading persistent compilation cache")
    return subprocess.run(
        [sys.executable, *warnings, f"{name}.py", *flags.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_below_the_mark_the_scripts_are_the_same_text():
    parts = [text(name).split(f"\n{MARK}\n") for name in SCRIPTS]
    assert [len(x) for x in parts] == [2] * len(SCRIPTS)
    assert len({below for _, below in parts}) == 1


def test_per_dqn_differs_from_dqn_in_few_lines():
    lines = [text(name).splitlines() for name in ("dqn_jax", "per_dqn_jax")]
    changed = [x for x in difflib.ndiff(*lines) if x[0] in "+-"]
    assert 0 < len(changed) <= 60


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_sketch_of_the_loop_names_functions_that_are_there(name):
    tree = ast.parse(text(name))
    docstring = ast.get_docstring(tree)
    sketch = docstring[docstring.index("    for each iteration:") :].split("\n\n")[0]
    functions = re.findall(r"# (\w+)$", sketch, re.MULTILINE)
    called = re.findall(r"(?<![.\w])(\w+)\(", sketch)
    when_due = re.search(r"when they are due: (.+)$", sketch, re.MULTILINE)[1].split(", ")
    assert functions == ["train", "collect_rollout"]
    assert called == ["draw_noise", "act", "train_step"]
    assert when_due == ["write_point", "save", "evaluate_agent"]
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {*functions, *called, *when_due} <= defined


def test_the_sketch_of_compiled_training_names_methods_that_are_there():
    methods = re.findall(r"# .*?(\w+)\.(\w+)$", compiled.__doc__, re.MULTILINE)
    assert len(methods) == 3
    for owner, method in methods:
        assert inspect.isfunction(getattr(getattr(compiled, owner), method))


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_has_two_groups_and_a_line_for_every_flag(name, run_main):
    code, out, _ = run_main(SCRIPTS[name], "--help")
    assert code == 0
    letters = re.sub(r"[│\s]", "", out)  # the width of a terminal breaks lines
    _, *groups = re.split("experimentoptions|algorithmoptions", letters)
    module = SCRIPTS[name]
    for group, flags in zip(groups, (module.Run, module.Args), strict=True):
        comments = re.findall(r"^    (\w+): .*  # (.+)$", inspect.getsource(flags), re.MULTILINE)
        assert [flag for flag, _ in comments] == list(vars(flags()))
        for flag, comment in comments:
            assert f"--{flag.replace('_', '-')}" in group
            assert comment.replace(" ", "") in group


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("dqn_jax", "--env-id Nothing-v0", "Nothing"),
        ("dqn_jax", "--env-id no_such_module:Nothing-v0", "no_such_module"),
        ("dqn_jax", "--env-kwargs {", "--env-kwargs '{': "),
        ("dqn_jax", "--env-kwargs []", "--env-kwargs '[]': "),
        ("dqn_jax", '--env-kwargs {"wind":1}', "wind"),
        ("dqn_jax", "--env-id Pendulum-v1", "Discrete"),
        ("dqn_jax", "--env-id environments:CounterSameStep-v0", "NEXT_STEP"),
        ("dqn_jax", "--learning-starts 600000", "learning_starts"),
        ("dqn_jax", "--num-envs 0", "num_envs must be from 1 to"),
        ("dqn_jax", "--seed=-1", "seed must be from 0 to"),
        ("dqn_jax", "--total-timesteps 2147483648", "total_timesteps must be from 1 to 2**31 - 1"),
        ("dqn_jax", "--save-experience --log-interval 20000", "log_interval"),
        ("dqn_jax", "--num-seeds 2", "num_seeds"),
        ("dqn_jax", "--num-devices 2", "num_devices"),
        ("dqn_jax", "--env-id environments:ChainWrapped-v0 --num-seeds 2", "num_seeds"),
        ("dqn_jax", "--env-id environments:Chain-v0 --num-devices 64", "num_devices"),
        ("dqn_jax", "--env-id environments:Chain-v0 --num-seeds 3 --num-devices 2", "num_devices"),
        (
            "dqn_jax",
            "--env-id environments:Chain-v0 --num-seeds 2 --vectorization sync",
            "num_seeds",
        ),
        (
            "dqn_jax",
            "--env-id environments:Chain-v0 --num-seeds 2 --save-experience",
            "save_experience",
        ),
        ("dqn_jax", "--env-id environments:VectorOnly-v0 --vectorization async", "VectorOnly-v0"),
        ("dqn_jax", "--distributed localhost", "distributed"),
        ("dqn_jax", "--distributed localhost:1,two,0", "distributed"),
        ("dqn_jax", "--resume .", "resume: . is not the folder of a run"),
        ("per_dqn_jax", "--resume nowhere", "nowhere"),
        ("ppo_jax", "--num-minibatches 3", "num_minibatches"),
        ("ppo_jax", "--env-id environments:ChainVector-v0 --capture-video", "cannot draw"),
        ("ppo_jax", "--env-id environments:VectorOnly-v0 --capture-video", "cannot draw"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(name, flags, message, run_main, tmp_path):
    code, _, err = run_main(SCRIPTS[name], *flags.split())
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "package"), [("--track", "wandb"), ("--capture-video", "moviepy")]
)
def test_a_package_that_is_missing_is_one_line_and_no_folder(
    flag, package, run_main, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it was not installed
    code, _, err = run_main(dqn_jax, flag)
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert package in line
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_script_cannot_be_resumed(run_main, tmp_path):
    flags = {"run": vars(ppo_jax.Run()), "args": vars(ppo_jax.Args())}
    saved = tmp_path / "args.json"
    saved.write_text(json.dumps(flags))
    code, _, err = run_main(dqn_jax, "--resume", str(tmp_path))
    assert code == 2
    assert err == f"error: resume: {tmp_path} is a run of another script or version\n"
    assert list(tmp_path.iterdir()) == [saved]


def steps_of_points(name):
    """Where a run of 2,000 steps in 4 environments has points, with a log interval of 100.

    An iteration has 20 steps; that of PPO has 64, and each second of them, or the one after it,
    reaches a multiple of 100.
    """
    ends = range(20, 2_001, 20) if name != "ppo_jax" else range(64, 2_049, 64)
    size = ends.step
    return [end for end in ends if end // 100 > (end - size) // 100]


def assert_prints_progress(printed, folder, env_id, points):
    nothing, first, *progress, evaluation, last = printed.strip().splitlines()
    assert nothing == "nothing is saved, because checkpoints.py is not beside the script"
    assert first == f"{folder}: 4 x {env_id}, cpu"
    line = r"([\d,]+) steps, [\d,]+ a second, return ([-\d.]+|none yet)"
    shown = [re.fullmatch(line, x) for x in progress]
    assert [int(x[1].replace(",", "")) for x in shown] == points
    assert re.fullmatch(rf"{points[-1]:,} steps: return [-\d.]+ in an evaluation", evaluation)
    assert re.fullmatch(rf"{folder}: mean return of the last episodes [-\d.]+ \(seed 1\)", last)


# What is in the charts of each script, and of one of them alone.
COMMON_CHARTS = "charts/episodic_return charts/episodic_length charts/SPS eval/episodic_return"
OWN_CHARTS = {
    "dqn_jax": "losses/td_loss losses/q_values charts/epsilon charts/gradient_steps",
    "per_dqn_jax": "losses/td_loss losses/q_values losses/importance_weight_min "
    "losses/priority_max charts/epsilon charts/gradient_steps charts/beta",
    "ppo_jax": "losses/policy_loss losses/value_loss losses/entropy losses/old_approx_kl "
    "losses/approx_kl losses/clipfrac losses/explained_variance charts/learning_rate",
    "sac_jax": "losses/qf1_values losses/qf2_values losses/qf1_loss losses/qf2_loss "
    "losses/qf_loss losses/actor_loss losses/alpha losses/alpha_loss charts/gradient_steps",
}


def assert_charts_are_complete(scalars, name, points):
    assert set(scalars) == set(f"{COMMON_CHARTS} {OWN_CHARTS[name]}".split())
    for tag, values in scalars.items():
        steps = [step for step, _ in values]
        assert np.isfinite([value for _, value in values]).all(), tag
        assert steps == sorted(set(steps)), tag
        assert set(steps) <= set(points), tag
    assert [step for step, _ in scalars["charts/SPS"]] == points
    assert [step for step, _ in scalars["eval/episodic_return"]] == points[-1:]


@pytest.mark.parametrize("name", ["dqn_jax", slow("per_dqn_jax"), slow("ppo_jax"), slow("sac_jax")])
def test_copied_with_buffers_alone_it_runs_and_its_events_can_be_read(name, tmp_path):
    module = SCRIPTS[name]
    for file in (f"{name}.py", "buffers.py"):
        shutil.copy(ROOT / file, tmp_path)
    flags = f"--total-timesteps 2000 --num-envs 4 --log-interval 100 {SMALL[name]}"
    done = run_script(name, flags, tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    points = steps_of_points(name)
    assert_prints_progress(done.stdout, folder, module.ENV_ID, points)

    arguments, events = sorted(folder.iterdir())
    assert arguments.name == "args.json"
    assert events.name.startswith("events.out.tfevents.")
    saved = json.loads(arguments.read_text())
    assert saved["args"].keys() == vars(module.Args()).keys()
    assert saved["run"].keys() == vars(module.Run()).keys()

    scalars, table = read_events(folder)
    assert_charts_are_complete(scalars, name, points)
    assert f"|env_id|{module.ENV_ID}|" in table
    assert "|total_timesteps|2000|" in table


REACHING = '''
import gymnasium as gym
import numpy as np


class Reaching(gym.Env):
    """Episode k lasts 2 + k % 4 steps, and succeeds if k is divisible by 3."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.episode = seed % 2 - 1  # two environments begin with the episodes 0 and 1
        self.episode += 1
        self.steps_left = 2 + self.episode % 4
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps_left -= 1
        info = {"is_success": self.episode % 3 == 0}
        return np.zeros(1, np.float32), 0.0, self.steps_left == 0, False, info


gym.register("Reaching-v0", Reaching)
'''


def ended_episodes(first, steps):
    """The rows where episodes of Reaching end, from `first` on, and whether they succeeded."""
    episode = first
    row = 0
    while True:
        row += 2 + episode % 4
        if row > steps:
            return
        yield row, episode % 3 == 0
        row += 1  # which only resets
        episode += 1


def import_script(path, monkeypatch):
    """The script at this path as a module of its own, with what lies beside it."""
    monkeypatch.syspath_prepend(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_chart_of_your_own_is_two_lines_in_collect_rollout(tmp_path, monkeypatch):
    """It shows the exact mean of the successes of the episodes that ended between two points."""
    monkeypatch.chdir(tmp_path)
    line = "        valid = ~(rollout.terminated[t] | rollout.truncated[t])\n"
    own_lines = (
        '        if "is_success" in info:\n'
        '            log.scalars["charts/success_rate"].extend(info["is_success"][~valid])\n'
    )
    assert own_lines in (ROOT / "docs" / "runs.md").read_text()
    assert text("dqn_jax").count(line) == 1
    script = tmp_path / "charting_dqn.py"
    script.write_text(text("dqn_jax").replace(line, line + own_lines))
    (tmp_path / "reaching.py").write_text(REACHING)
    charting = import_script(script, monkeypatch)
    args = charting.Args(total_timesteps=400, num_envs=2, learning_starts=200)
    run = charting.Run(
        env_id="reaching:Reaching-v0", log_interval=40, eval_episodes=0, checkpoint_interval=0
    )
    _, _, folder = charting.train(args, run)

    ended = [*ended_episodes(first=0, steps=200), *ended_episodes(first=1, steps=200)]
    expected = []
    for point in range(40, 401, 40):
        successes = [success for row, success in ended if point - 40 < 2 * row <= point]
        expected.append((point, np.float32(np.mean(successes))))
    assert len({mean for _, mean in expected}) > 3
    assert read_events(folder)[0]["charts/success_rate"] == expected


@pytest.mark.parametrize("module", [dqn_jax, slow(per_dqn_jax), slow(ppo_jax)])
def test_the_figure_at_the_end_is_the_mean_of_the_last_100_episodes(module, tmp_path, monkeypatch):
    """Episodes of Counter have returns 3, 6, 10, 15 in turns, and last 18 steps with the resets."""
    monkeypatch.chdir(tmp_path)
    flags = dict(learning_starts=499, batch_size=1)
    if module is ppo_jax:
        flags = dict(num_envs=1, num_steps=100, num_minibatches=1, update_epochs=1)
    args = module.Args(total_timesteps=500, **flags)
    run = module.Run(env_id="Counter-v0", log_interval=500, eval_episodes=0, checkpoint_interval=0)
    _, returns, folder = module.train(args, run)
    assert returns.tolist() == [8.5]
    # The only point of the charts shows the mean of all 111.
    ((step, mean),) = read_events(folder)[0]["charts/episodic_return"]
    assert step == 500
    assert mean == np.float32((27 * (3 + 6 + 10 + 15) + 3 + 6 + 10) / 111)


@pytest.mark.parametrize("name", ["dqn_jax", slow("ppo_jax")])
def test_atari_is_learned_from(name, tmp_path, monkeypatch):
    pytest.importorskip("ale_py")
    monkeypatch.chdir(tmp_path)
    module = SCRIPTS[name]
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    run = module.Run(
        env_id="ale_py:ALE/Pong-v5",
        env_kwargs=kwargs,
        log_interval=64,
        eval_episodes=2,
        checkpoint_interval=0,
    )
    own = dict(num_steps=8, num_minibatches=1, update_epochs=1)
    if name == "dqn_jax":
        own = dict(learning_starts=32, batch_size=4, train_frequency=32, buffer_size=200)
    args = module.Args(total_timesteps=128, num_envs=8, **own)
    state, _, folder = module.train(args, run)
    scalars, _ = read_events(folder)
    loss = "losses/td_loss" if name == "dqn_jax" else "losses/value_loss"
    assert np.isfinite(scalars[loss][-1][1])
    # 200 frames are 50 steps, in which the opponent scores at most twice.
    assert -3 <= scalars["eval/episodic_return"][-1][1] <= 0
    # The Nature CNN of 4x84x84 and its heads.
    numbers = sum(x.size for x in jax.tree.leaves(state.params))
    assert numbers == (1_687_206 if name == "dqn_jax" else 1_687_719)


def test_atari_is_the_same_environment_at_every_number():
    pytest.importorskip("ale_py")
    kwargs = json.dumps({"max_num_frames_per_episode": 200, "reward_clipping": False})
    run = dqn_jax.Run(env_id="ale_py:ALE/Pong-v5", env_kwargs=kwargs)
    one = dqn_jax.make_envs(dqn_jax.Args(), run, 1)
    many = dqn_jax.make_envs(dqn_jax.Args(), run, 8)
    assert one.single_observation_space == many.single_observation_space
    for envs in (one, many):
        envs.reset(seed=3)
        cut = []
        for _ in range(50):
            _, _, _, truncated, _ = envs.step(np.zeros(envs.num_envs, int))
            cut.append(truncated.all())
        assert cut == [False] * 49 + [True]
