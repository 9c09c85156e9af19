"""What a run says: a mistake in one line, where it stands, and how it goes on."""

import re
import signal
import sys

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Chain
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv

import dqn_jax
import ppo_jax
import usage

SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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
    assert line.startswith(f"error: --env-id {env_id}: ")
    assert line.endswith(" --env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module")


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
    """What is collected first in a run, and the observation after it."""
    alg, _ = dqn_jax.make_algorithm(args, run)
    envs = dqn_jax.make_envs(args, run, args.num_envs)
    observation, _ = envs.reset(seed=5)
    n = args.num_envs
    env_state = (observation, (), np.ones(n, bool), np.zeros((2, n)))
    params = alg.policy_params(jax.jit(alg.init)(jax.random.PRNGKey(0)))
    key = jax.random.PRNGKey(0)
    rollout, (last, *_), _ = dqn_jax.collect_rollout(alg, envs, params, env_state, key, 0)
    envs.close()
    return rollout, last


def test_whole_numbers_of_several_kinds_are_one_hot_side_by_side():
    args = dqn_jax.Args(num_envs=2, train_frequency=16, **SMALL_DQN)
    rollout, last = first_rollout(args, dqn_jax.Run(env_id="Pairs-v0"))
    flat = np.float32([[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [1, 0, 0, 1, 0]])
    assert rollout.observation.dtype == np.float32
    for env in range(2):
        np.testing.assert_array_equal(rollout.observation[:, env], flat[np.arange(8) % 3])
    np.testing.assert_array_equal(last, [flat[2]] * 2)


def test_the_states_of_frozen_lake_are_one_hot():
    """The observation is that of the environment, stepped with the same actions."""
    run = dqn_jax.Run(env_id="FrozenLake-v1")
    args = dqn_jax.Args(**SMALL_DQN, train_frequency=40)
    rollout, _ = first_rollout(args, run)
    env = gym.make("FrozenLake-v1")
    state, _ = env.reset(seed=5)
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
    first, *progress, last = capsys.readouterr().out.splitlines()
    assert first.endswith(": 1 x Clock-v0, cpu")
    assert last == "seed 1: mean return of the last episodes 4.50"
    for line in progress:
        step, shown = re.fullmatch(r"(\d+) steps, \d+ a second, return (.*)", line).groups()
        assert shown == ("nan" if int(step) < 10 else "4.50")


def test_a_resumed_compiled_run_shows_its_return_until_an_episode_ends(capsys, stop_at):
    args = dqn_jax.Args(**STEPWISE)
    _, returns, folder = dqn_jax.train(args, dqn_jax.Run(**CLOCK), stop_at(40))
    np.testing.assert_array_equal(returns, [4.5])
    capsys.readouterr()
    _, returns, _ = dqn_jax.train(args, dqn_jax.Run(resume=str(folder), **CLOCK))
    np.testing.assert_array_equal(returns, [4.5])
    _, *progress, _ = capsys.readouterr().out.splitlines()
    assert {line.split(", ")[2] for line in progress} == {"return 4.50"}


@pytest.mark.parametrize("env_id", ["Counter-v0", "Clock-v0"])
def test_a_run_that_is_stopped_at_once_saves_its_first_iteration(env_id):
    run = dqn_jax.Run(env_id=env_id, log_interval=4)
    _, returns, folder = dqn_jax.train(dqn_jax.Args(**STEPWISE), run, [signal.SIGINT])
    assert np.isnan(returns).all()  # no episode of either has ended
    end = 1 if env_id == "Counter-v0" else 4  # compiled: after the log interval
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(end)]


# --- flags


def test_learning_starts_of_0_is_the_batch_size():
    """So the first gradient step is in the iteration of 10 steps that reaches beyond 40 steps."""
    args = dqn_jax.Args(total_timesteps=100, learning_starts=0, batch_size=40, buffer_size=100)
    run = dqn_jax.Run(env_id="Counter-v0", eval_episodes=0)
    state, _, _ = dqn_jax.train(args, run)
    assert int(state.num_updates) == 6


def test_many_seeds_in_an_ordinary_environment_are_refused_with_what_does_it(run_main):
    line = (
        "num_seeds, num_devices, distributed: CartPole-v1 is not written in JAX; "
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
        ("--track", "wandb"),
        ("--capture-video", "moviepy"),
    ],
)
def test_a_module_that_is_missing_is_named_in_one_line(
    flags, part, run_main, monkeypatch, tmp_path
):
    monkeypatch.setitem(sys.modules, part, None)
    code, _, err = run_main(dqn_jax, *flags.split())
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert part in line
    assert list(tmp_path.iterdir()) == []


# --- what cannot be meant

# Flags of dqn_jax.py, and what the line says.
MISTAKES = [
    ("--env-kwargs []", "--env-kwargs '[]': not a JSON object"),
    ('--env-kwargs {"wind":1}', "wind"),
    ('--env-kwargs {"num_envs":3}', "num_envs"),
    ("--env-id ../x:Y-v0", "../x is not the name of a module"),
    ("--env-id no_such_module:Nothing-v0", "No module named 'no_such_module'"),
    ("--env-id Pendulum-v1", "DQN takes Discrete actions, not Box"),
    ("--env-id environments:CounterSameStep-v0", "NEXT_STEP"),
    ("--env-id environments:Blind-v0", "the observations or actions of the environment have no"),
    ("--env-id environments:VectorOnly-v0 --vectorization async", "VectorOnly-v0"),
    ("--learning-starts 600000", "learning_starts must be from batch_size to total_timesteps - 1"),
    ("--learning-starts 100", "learning_starts must be from batch_size to total_timesteps - 1"),
    ("--num-envs 0", "num_envs must be from 1 to 2**31 - 1, not 0"),
    ("--frame-stack 0", "frame_stack must be from 1 to"),
    ("--hidden-sizes 64 0", "hidden_sizes must be from 1 to"),
    ("--eval-episodes=-1", "eval_episodes must be from 0 to"),
    ("--seed=-1", "seed must be from 0 to"),
    ("--total-timesteps 2147483648", "total_timesteps must be from 1 to 2**31 - 1"),
    ("--buffer-size 536870912", "buffer_size must be from 1 to 2**29 - 1"),
    ("--learning-rate=-1", "learning_rate must be 0 or more, not -1.0"),
    ("--learning-rate nan", "learning_rate must be a finite number, not nan"),
    ("--gamma 1.5", "gamma must be from 0 to 1, not 1.5"),
    ("--start-e 2", "start_e must be from 0 to 1, not 2.0"),
    (
        "--num-envs 97 --train-frequency 1000 --total-timesteps 1500 --learning-starts 1000",
        "total_timesteps must be 97000 or more: an iteration has 97000 steps",
    ),
    ("--save-experience --log-interval 20000", "buffer_size must be >= 20010"),
    ("--num-devices 2", "num_devices"),
    ("--env-id environments:ChainWrapped-v0 --num-seeds 2", "num_seeds"),
    ("--env-id environments:Chain-v0 --num-devices 64", "num_devices"),
    ("--env-id environments:Chain-v0 --num-seeds 3 --num-devices 2", "num_devices"),
    ("--env-id environments:Chain-v0 --num-seeds 2 --save-experience", "save_experience"),
    ("--distributed localhost", "distributed"),
    ("--distributed localhost:1,two,0", "distributed"),
    ("--resume .", "resume: . is not the folder of a run"),
    ("--env-id environments:VectorOnly-v0 --capture-video", "cannot record a video"),
]


@pytest.mark.parametrize(("flags", "message"), MISTAKES)
def test_a_mistake_is_one_line_with_exit_code_2_and_no_folder(flags, message, run_main, tmp_path):
    code, _, err = run_main(dqn_jax, *flags.split())
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "run", "message"),
    [
        (dict(num_envs=2.0), {}, "num_envs must be of type int, not 2.0"),
        (dict(double_q=1), {}, "double_q must be of type bool, not 1"),
        ({}, dict(env_kwargs={"x": 1}), "env_kwargs must be of type str, not {'x': 1}"),
    ],
)
def test_a_value_of_another_type_from_python_is_an_error(args, run, message):
    with pytest.raises(dqn_jax.UsageError, match=re.escape(message)):
        dqn_jax.train(dqn_jax.Args(**args), dqn_jax.Run(**run))


def test_a_replay_larger_than_the_memory_is_an_error_before_it_is_made(run_main, monkeypatch):
    monkeypatch.setattr(usage.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096}.get(name, 100))
    line = "buffer_size: replay and networks need 0.0 GB, and there are 0.0 GB"
    assert_error(run_main(dqn_jax), line)


def test_an_iteration_longer_than_the_log_interval_is_said(run_main):
    flags = "--num-envs 30 --train-frequency 70 --total-timesteps 420 --log-interval 100"
    more = "--learning-starts 0 --eval-episodes 0 --checkpoint-interval 0"
    _, out, _ = run_main(dqn_jax, *flags.split(), *more.split())
    assert "each iteration, and so each log entry, has 210 steps" in out


def test_an_observation_with_a_text_points_to_the_page_on_wrappers(run_main):
    """As that of MiniGrid without its wrapper."""
    pytest.importorskip("minigrid")
    code, _, err = run_main(dqn_jax, "--env-id", "minigrid:MiniGrid-Empty-5x5-v0")
    line = err.strip().splitlines()[-1]
    assert code == 2
    assert line.startswith("error: observations Dict(")
    assert "a wrapper must choose what the network sees, see docs/environments.md" in line


# --- Atari


def test_keys_that_make_charts_count_lives_are_refused(run_main):
    pytest.importorskip("ale_py")
    flags = ["--env-id", "ale_py:ALE/Breakout-v5", "--env-kwargs"]
    for key in ("episodic_life", "life_loss_info"):
        _, _, err = run_main(dqn_jax, *flags, f'{{"{key}": true}}')
        assert f"with {key} charts would count lives, not games: leave it out" in err


@pytest.mark.parametrize(
    ("env_id", "vectorization"),
    [("ale_py:BreakoutNoFrameskip-v4", "auto"), ("ale_py:ALE/Breakout-v5", "sync")],
)
def test_raw_frames_give_a_notice_with_the_environment_that_is_meant(env_id, vectorization, capsys):
    pytest.importorskip("ale_py")
    usage.check_env(dqn_jax.Run(env_id=env_id, vectorization=vectorization))
    assert "ale_py:ALE/Breakout-v5 with --vectorization auto has" in capsys.readouterr().out
    usage.check_env(dqn_jax.Run(env_id="ale_py:ALE/Breakout-v5"))
    assert capsys.readouterr().out == ""
