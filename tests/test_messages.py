"""What a run says: a mistake in one line, where it stands, and how it goes on."""

import importlib
import re
import signal
import sys
from pathlib import Path

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Chain
from events import ROOT
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv

import dqn_jax
import ppo_jax

SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)
SMALL = "--total-timesteps 100 --learning-starts 50 --batch-size 8 --log-interval 50".split()  # noqa: SIM905
ALL_SCRIPTS = sorted(path.stem for path in ROOT.glob("*_jax.py"))


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_of(folder="."):
    """The folder of the only run."""
    (run,) = Path(folder, "runs").absolute().iterdir()
    return run


def assert_error(result, line):
    """Exit code 2, and on stderr this line alone."""
    code, _, err = result
    assert err == f"error: {line}\n"
    assert code == 2


# --- the environment


@pytest.mark.parametrize("env_id", ["NoSuch/Thing-v0", "NoSuchThing-v0"])
def test_an_environment_that_is_not_registered_has_a_hint_at_its_module(env_id, run_main):
    code, _, err = run_main(dqn_jax, "--env-id", env_id)
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith(f"error: --env-id {env_id} --env-kwargs '{{}}': ")
    assert line.endswith(" --env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module.")


def test_arguments_that_are_no_json_name_their_flag(run_main):
    code, _, err = run_main(dqn_jax, "--env-kwargs", "{x")
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("error: --env-id CartPole-v1 --env-kwargs '{x': Expecting property name")


# --- observations that are no vectors


class Pairs(gym.Env):
    """It observes three pairs of whole numbers in turns."""

    observation_space = gym.spaces.MultiDiscrete([2, 3])
    action_space = gym.spaces.Discrete(2)
    pairs = ((0, 0), (1, 2), (0, 1))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.array(self.pairs[0]), {}

    def step(self, action):
        self.count += 1
        return np.array(self.pairs[self.count % 3]), 1.0, False, self.count == 8, {}


gym.register("Pairs-v0", Pairs)


def first_rollout(args, run):
    """What is collected first in a run."""
    alg, _ = dqn_jax.set_up(args, run)
    envs = dqn_jax.make_envs(args, run, args.num_envs)
    key = jax.random.PRNGKey(0)
    state, env_state, log = dqn_jax.start(alg, run, envs, key, signals=())
    params = alg.acting_params(state)
    noise = np.asarray(alg.draw_noise(key, 0, alg.rollout_shape))
    rollout, _ = dqn_jax.collect_rollout(alg, envs, params, env_state, noise, log)
    envs.close()
    log.writer.close()
    return rollout


def test_whole_numbers_of_several_kinds_are_one_hot_side_by_side():
    args = dqn_jax.Args(num_envs=2, train_frequency=16, **SMALL_DQN)
    rollout = first_rollout(args, dqn_jax.Run(env_id="Pairs-v0", checkpoint_interval=0))
    flat = np.float32([[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]])
    assert rollout.observation.dtype == np.float32
    for env in range(2):
        np.testing.assert_array_equal(rollout.observation[:, env], flat[np.arange(8) % 3])
    np.testing.assert_array_equal(rollout.next_observation, [flat[2]] * 2)


@pytest.mark.parametrize("env_id", ["ImageSmall-v0", "environments:Probe-both-v0", "ProbeImage-v0"])
def test_of_uint8_images_only_those_that_are_too_small_are_said_to_be_flattened(env_id, capsys):
    dqn_jax.set_up(dqn_jax.Args(), dqn_jax.Run(env_id=env_id))
    line = "observations Box(0, 255, (8, 8), uint8) are flattened for the network\n"
    assert capsys.readouterr().out == (line if env_id == "ImageSmall-v0" else "")


def test_the_states_of_frozen_lake_are_one_hot():
    """The observation is that of the environment, stepped with the same actions."""
    run = dqn_jax.Run(env_id="FrozenLake-v1", checkpoint_interval=0)
    args = dqn_jax.Args(**SMALL_DQN, train_frequency=40)
    rollout = first_rollout(args, run)
    env = gym.make("FrozenLake-v1")
    state, _ = env.reset(seed=dqn_jax.environment_seed(run, 0))
    states = []
    valid = True
    for action in rollout.action[:, 0]:
        states.append(state)
        if valid:
            state, _, terminated, truncated, _ = env.step(action)
            valid = not (terminated or truncated)
        else:
            state, _ = env.reset()
            valid = True
    assert len(set(states)) > 1
    np.testing.assert_array_equal(rollout.observation[:, 0], np.eye(16)[states])


# --- numbers


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.0, "0"),
        (1.0, "1"),
        (-1, "-1"),
        (0.95625, "0.9563"),
        (0.0123456, "0.01235"),
        (83.14159, "83.14"),
        (-21.0, "-21"),
        (496.1, "496.1"),
        (-200.04, "-200"),
        (999.94, "999.9"),
        (1234.5678, "1235"),
        (12345678.0, "12345678"),
        (-54321.2, "-54321"),
        (np.float32(0.1), "0.1"),
        (float("nan"), "none yet"),
        (np.float32("nan"), "none yet"),
    ],
)
def test_numbers_have_four_significant_digits(number, text):
    for name in ALL_SCRIPTS:
        assert importlib.import_module(name).shown(number) == text


# --- where a run stands


class Clock(Chain):
    """Episodes end by the time limit of 9 steps alone: a return of 4.5."""

    def reward(self, state, action, next_state, rng, params=None):
        return 0.5

    def terminal(self, state, rng, params=None):
        return state < 0


def make_clock(**kwargs):
    return FunctionalJaxEnv(Clock(), metadata={"render_modes": []}, **kwargs)


gym.register("Clock-v0", make_clock, max_episode_steps=9, disable_env_checker=True)

# A step of one environment is an iteration. The first episode and its reset are step 10, the fourth
# and its reset step 40, and no other ends before step 49.
STEPWISE = dict(
    total_timesteps=48,
    num_envs=1,
    train_frequency=1,
    learning_starts=8,
    batch_size=8,
    buffer_size=100,
)
CLOCK = dict(env_id="Clock-v0", log_interval=4, eval_episodes=0)


def test_before_the_first_episode_of_a_compiled_run_ends_there_is_no_return(capsys):
    dqn_jax.train(dqn_jax.Args(**STEPWISE), dqn_jax.Run(**CLOCK, checkpoint_interval=0))
    first, *progress = capsys.readouterr().out.splitlines()
    assert first == f"{run_of()}: 1 x Clock-v0, cpu"
    assert len(progress) == 12
    for number, line in enumerate(progress):
        shown = "none yet" if number < 2 else "4.5"
        assert re.fullmatch(rf"\d+ steps, \d+ a second, return {shown}", line)


def test_a_resumed_compiled_run_shows_its_return_until_an_episode_ends(capsys, signals_at):
    args = dqn_jax.Args(**STEPWISE)
    _, returns, folder = dqn_jax.train(args, dqn_jax.Run(**CLOCK), signals_at(40))
    np.testing.assert_array_equal(returns, [4.5])
    capsys.readouterr()
    _, returns, _ = dqn_jax.train(args, dqn_jax.Run(resume=str(folder), **CLOCK))
    np.testing.assert_array_equal(returns, [4.5])
    _, *progress = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[2] for line in progress] == ["return 4.5"] * 2


@pytest.mark.parametrize("env_id", ["Counter-v0", "Clock-v0"])
def test_a_run_that_is_interrupted_says_how_it_goes_on(env_id, capsys):
    args = dqn_jax.Args(**STEPWISE)
    run = dqn_jax.Run(env_id=env_id, log_interval=4)
    _, returns, folder = dqn_jax.train(args, run, signals=[signal.SIGINT])
    assert np.isnan(returns).all()  # no episode of either has ended
    end = 1 if env_id == "Counter-v0" else 4  # compiled: after the log interval
    *_, last = capsys.readouterr().out.splitlines()
    assert last == f"interrupted at step {end} and saved: --resume {folder} goes on"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(end)]


def test_a_run_that_is_not_interrupted_says_nothing_of_it(capsys):
    run = dqn_jax.Run(env_id="Counter-v0", eval_episodes=0)
    dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    assert "interrupted" not in capsys.readouterr().out


# --- flags


def test_learning_starts_of_0_is_the_batch_size():
    """So the first gradient step is in the iteration of 10 steps that reaches beyond 40 steps."""
    args = dqn_jax.Args(total_timesteps=100, learning_starts=0, batch_size=40, buffer_size=100)
    run = dqn_jax.Run(env_id="Counter-v0", eval_episodes=0)
    state, _, _ = dqn_jax.train(args, run)
    assert int(state.updates) == 6


def test_many_seeds_in_an_ordinary_environment_are_refused_with_what_does_it(run_main):
    line = (
        "num_seeds, num_devices, distributed: CartPole-v1 is not in JAX; "
        "start a run for each seed instead, see docs/scale.md"
    )
    assert_error(run_main(dqn_jax, "--num-seeds", "2"), line)


@pytest.mark.slow
def test_a_complete_run_of_whole_iterations_is_resumed_with_the_steps_that_were_asked_for():
    """100 steps are two iterations of 64, so that 128 were made."""
    args = ppo_jax.Args(total_timesteps=100, num_steps=16, num_minibatches=1, update_epochs=1)
    run = dict(env_id="environments:Counter-v0", eval_episodes=0)
    _, returns, folder = ppo_jax.train(args, ppo_jax.Run(**run))
    _, again, _ = ppo_jax.train(args, ppo_jax.Run(resume=str(folder), **run))
    np.testing.assert_array_equal(again, returns)


# --- parts that are missing


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ("--env-id environments:ProbeImage-v0", "images"),
        ("--frame-stack 2", "images"),
        ("--capture-video", "images"),
        ("--env-id phys2d/CartPole-v1", "compiled"),
        ("--save-experience", "vault"),
        ("--resume runs/some", "checkpoints"),
    ],
)
def test_a_part_that_is_not_beside_the_script_is_to_be_copied(flags, part, run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, part, None)
    code, _, err = run_main(dqn_jax, *flags.split())
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert line.endswith(f": copy {part}.py along")


def test_a_package_that_is_not_installed_is_to_be_installed(run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = run_main(dqn_jax, "--track")
    (line,) = err.splitlines()
    assert code == 2
    assert line.endswith(": pip install wandb")
