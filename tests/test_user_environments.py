"""Environments as users have them, with mistakes in them or observations that are no vector: what
a run says, how it ends, and how it is evaluated.
"""

import gc
import sys
import types
from dataclasses import replace
from pathlib import Path

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from conftest import slow
from environments import Counter
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Sequence, Tuple
from test_buffers import assert_trees_equal

import checkpoints
import dqn_jax
import ppo_jax
import usage
from vault import Vault

SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)
SMALL_PPO = dict(total_timesteps=64, num_steps=8, num_minibatches=1, update_epochs=1)
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def one_line(result, code=2):
    """The one line on stderr of a command that ended with this exit code."""
    given, _, err = result
    (line,) = err.strip().splitlines()
    assert given == code
    return line


# --- mistakes


class Mistaken(Counter):
    def __init__(self):
        {}["lenght"]


class WithoutFile(Counter):
    def step(self, action):
        Path("level.xml").read_text()


class WholeActions(Counter):
    action_space = Box(0, 5, (2,), np.int64)


gym.register("Mistaken-v0", Mistaken)
gym.register("WithoutFile-v0", WithoutFile)
gym.register("WholeActions-v0", WholeActions)


def test_a_mistake_in_an_environment_keeps_its_traceback():
    with pytest.raises(KeyError, match="lenght"):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(env_id="Mistaken-v0"))


def test_a_missing_file_of_an_environment_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ppo_jax.py", "--env-id", "WithoutFile-v0"])
    with pytest.raises(FileNotFoundError, match=r"level\.xml") as caught:
        ppo_jax.main()
    assert caught.value.__notes__[0].startswith("in WithoutFile-v0 at step 0 of /")


def test_whole_numbers_as_continuous_actions_are_a_mistake(run_main):
    assert "a Box [A] of floats" in one_line(run_main(ppo_jax, "--env-id", "WholeActions-v0"))


def test_fewer_steps_than_were_made_change_nothing(run_main):
    args = dqn_jax.Args(**SMALL_DQN)
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    before = (folder / "args.json").read_text()
    line = one_line(run_main(dqn_jax, "--resume", str(folder), "--total-timesteps", "150"))
    assert line == "error: resume: 200 steps were made, more than 150"
    assert (folder / "args.json").read_text() == before


def test_a_login_that_is_missing_is_one_line(run_main, monkeypatch):
    class LoginError(Exception):
        pass

    def init(**_):
        raise LoginError("use `wandb login`")

    fake = types.SimpleNamespace(Error=LoginError, init=init)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert one_line(run_main(ppo_jax, "--track")) == "error: track: use `wandb login`"
    assert not Path("runs").exists()


# --- observations


class Observes(gym.Env):
    """Shows one observation for ever."""

    action_space = Discrete(2)

    def __init__(self, space, observation):
        self.observation_space = space
        self.observation = observation

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation, {}

    def step(self, action):
        return self.observation, 1.0, False, False, {}


PIXELS = np.arange(12, dtype=np.float32).reshape(3, 4)
OBSERVATIONS = {
    "Discrete": (Discrete(4, start=2), np.int64(3), [0, 1, 0, 0]),
    "MultiBinary": (MultiBinary(3), np.int8([1, 0, 1]), [1, 0, 1]),
    "Dict": (
        Dict({"where": Box(-1, 1, (2,)), "door": Discrete(2)}),
        {"door": np.int64(1), "where": np.float32([0.5, -0.25])},
        [0, 1, 0.5, -0.25],
    ),
    "Tuple": (
        Tuple([Discrete(2), Box(-1, 1, (1,))]),
        (np.int64(0), np.float32([0.5])),
        [1, 0, 0.5],
    ),
    "Image": (Box(0, 12, (3, 4)), PIXELS, PIXELS),
    "Small": (Box(0, 255, (3, 4), np.uint8), np.uint8(PIXELS), np.uint8(PIXELS)),
}
for kind, (space, observation, _) in OBSERVATIONS.items():
    given = {"space": space, "observation": observation}
    how = {"max_episode_steps": 5, "disable_env_checker": True}  # it dislikes the same object
    gym.register(f"Observes{kind}-v0", Observes, kwargs=given, **how)
of_any_length = {"space": Sequence(Box(0, 1, (1,))), "observation": ()}
gym.register("ObservesSequence-v0", Observes, kwargs=of_any_length)


class Words(gym.Space):
    """A kind of space that Gymnasium does not know, as MiniGrid's missions are of."""


with_words = {"space": Dict({"words": Words(), "cell": Discrete(2)}), "observation": {}}
gym.register("ObservesWords-v0", Observes, kwargs=with_words)


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_observations_that_are_no_vector_are_flattened(kind):
    _, _, flat = OBSERVATIONS[kind]
    args = dqn_jax.Args(**SMALL_DQN)
    run = dqn_jax.Run(env_id=f"Observes{kind}-v0")
    alg, _ = dqn_jax.make_algorithm(args, run)
    envs = dqn_jax.make_envs(args, run, 2)
    at_first, _ = envs.reset(seed=0)
    later, *_ = envs.step(np.zeros(2, int))
    envs.close()
    for observation in (at_first, later):
        np.testing.assert_array_equal(observation, [flat, flat])
    assert alg.example_step.observation.shape == np.shape(flat)


@pytest.mark.parametrize("kind", ["Dict", slow("Image"), slow("Small")])
def test_observations_that_are_no_vector_are_learned_from(kind):
    _, _, flat = OBSERVATIONS[kind]
    run = dqn_jax.Run(env_id=f"Observes{kind}-v0", eval_episodes=0)
    state, _, _ = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    stored = np.asarray(state.replay.storage.observation[:100, 0])
    np.testing.assert_array_equal(stored, np.broadcast_to(flat, stored.shape))


@pytest.mark.parametrize("kind", ["Sequence", "Words"])
def test_observations_that_have_no_flat_form_are_a_mistake(kind, run_main):
    line = one_line(run_main(dqn_jax, "--env-id", f"Observes{kind}-v0"))
    assert "cannot be flattened to a Box: a wrapper must choose what the network sees" in line


# --- vector environments


class Loose(gym.vector.VectorEnv):
    """Four counters whose flags are numbers, and which give a reward for the step that resets."""

    metadata: dict = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.envs = gym.vector.SyncVectorEnv([Counter] * num_envs)  # a pool, not a list
        self.single_observation_space = self.envs.single_observation_space
        self.single_action_space = self.envs.single_action_space
        self.observation_space = self.envs.observation_space
        self.action_space = self.envs.action_space

    def reset(self, **kwargs):
        self.is_over = np.zeros(self.num_envs, bool)
        return self.envs.reset(**kwargs)

    def step(self, actions):
        observation, reward, terminated, truncated, info = self.envs.step(actions)
        reward = np.where(self.is_over, 100.0, reward)
        self.is_over = terminated | truncated
        return observation, reward, terminated.astype(int), truncated.astype(int), info


gym.register("Loose-v0", vector_entry_point=Loose)


@pytest.mark.slow
def test_flags_that_are_numbers_and_rewards_for_resets_change_nothing():
    args = dqn_jax.Args(**SMALL_DQN, num_envs=4)
    settings = COUNTER | {"checkpoint_interval": 0}
    strict, strict_returns, _ = dqn_jax.train(args, dqn_jax.Run(**settings))
    loose, loose_returns, _ = dqn_jax.train(args, dqn_jax.Run(**settings | {"env_id": "Loose-v0"}))
    np.testing.assert_array_equal(loose_returns, strict_returns)
    assert_trees_equal(loose, strict)


# --- what a run says


class Endless(Counter):
    def step(self, action):
        return np.zeros(3, np.float32), 1.0, False, False, {}


gym.register("GoesOn-v0", Endless)


def test_before_an_episode_ends_the_return_is_nan(run_main):
    flags = "--total-timesteps 200 --learning-starts 0 --batch-size 8 --eval-episodes 0"
    _, out, _ = run_main(dqn_jax, *flags.split(), "--env-id", "GoesOn-v0")
    assert out.endswith(": mean return of the last episodes nan\n")


def test_the_last_lines_say_which_seed_has_which_return(run_main):
    small = "--num-envs 4 --num-steps 8 --num-minibatches 1 --update-epochs 1 --total-timesteps 64"
    more = "--env-id environments:Chain-v0 --num-seeds 3 --seed 7 --eval-episodes 0"
    _, out, _ = run_main(ppo_jax, *small.split(), *more.split(), "--log-interval", "64")
    *_, first, second, third, mean = out.strip().splitlines()
    returns = []
    for seed, line in zip((7, 8, 9), (first, second, third), strict=True):
        start, _, number = line.rpartition(" ")
        assert start == f"seed {seed}: mean return of the last episodes"
        returns.append(float(number))
    assert float(mean.rpartition(" ")[2]) == pytest.approx(np.mean(returns), abs=0.01)


# --- numbers that are not finite


class NotFinite(Counter):
    """After 200 steps a reward, an observation or a parameter is not finite."""

    steps: list = []  # noqa: RUF012

    def __init__(self, what):
        super().__init__()
        self.what = what

    def step(self, action):
        observation, reward, *rest = super().step(action)
        self.steps.append(action)
        is_bad = len(self.steps) > 200
        if is_bad and self.what == "reward":
            reward = np.nan
        if is_bad and self.what == "no reward":
            reward = None
        if is_bad and self.what == "observation":
            observation = observation + np.inf
        if is_bad and self.what == "parameters":
            reward = 1e38  # whose square is infinite
        return observation, reward, *rest


gym.register("NotFinite-v0", NotFinite, disable_env_checker=True)


@pytest.mark.parametrize("what", ["reward", "no reward", "observation", "parameters"])
def test_numbers_that_are_not_finite_are_named_and_leave_the_last_good_checkpoint(what, run_main):
    NotFinite.steps.clear()
    flags = "--learning-starts 20 --batch-size 8 --buffer-size 40 --train-frequency 2"
    more = "--env-id NotFinite-v0 --log-interval 20 --checkpoint-interval 20 --eval-episodes 0"
    kwargs = f'{{"what": "{what}"}}'
    result = run_main(dqn_jax, *flags.split(), *more.split(), "--env-kwargs", kwargs)
    line = one_line(result, code=1)
    if what == "parameters":
        assert "diverged, parameters are not finite" in line
    else:
        # 200 steps, and a row for each reset.
        start, step = line.rsplit(" ", 1)
        name = what.removeprefix("no ")
        assert start == f"error: NotFinite-v0: the {name} is not finite in environment 0 at step"
        assert 230 < int(step) < 270
    (folder,) = Path("runs").iterdir()
    run, args = usage.read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    alg, _ = dqn_jax.make_algorithm(args, run)
    saver = checkpoints.Checkpoints(folder)
    state = saver.restore(alg.init(jax.random.PRNGKey(0)))
    assert saver.begin >= 220
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


# --- many runs in one process


@pytest.mark.slow
def test_programs_and_arrays_of_a_run_go_when_it_is_over():
    def count():
        gc.collect()
        (client,) = {device.client for device in jax.devices()}
        return len(client.live_executables()), len(jax.live_arrays())

    counts = []
    for seed in range(3):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER, seed=seed))
        ppo_jax.train(ppo_jax.Args(**SMALL_PPO), ppo_jax.Run(**COUNTER, seed=seed))
        counts.append(count())
    assert counts[2] <= counts[1]


# --- experience on disk where a run was cut


@pytest.mark.parametrize("log_interval", [slow(20), slow(90), 99])
def test_experience_has_no_seam_where_a_run_was_resumed(log_interval, monkeypatch):
    args = dqn_jax.Args(**SMALL_DQN | {"total_timesteps": 400}, save_experience=True)
    args = replace(args, train_frequency=1)
    run = dqn_jax.Run(**COUNTER | {"log_interval": log_interval})
    stop = []
    collect = dqn_jax.collect_rollout

    def collect_until_the_cut(*given):
        rollout, *others = collect(*given)
        if rollout.observation[0, 0, 0] == 44 and rollout.observation[0, 0, 1] == 1:
            stop.append(2)
        return rollout, *others

    monkeypatch.setattr(dqn_jax, "collect_rollout", collect_until_the_cut)
    _, _, folder = dqn_jax.train(args, run, stop)
    monkeypatch.setattr(dqn_jax, "collect_rollout", collect)
    cut = checkpoints.Checkpoints(folder).latest_step()
    assert 100 < cut < 300
    alg, _ = dqn_jax.make_algorithm(args, run)
    dqn_jax.train(args, replace(run, resume=str(folder)))
    rows = Vault(folder / "experience", alg.stored_step, 1, create=False).read(0, 400)
    episode, step, _ = rows.observation[:, 0].T
    goes_on = rows.valid[:-1, 0] & ~rows.terminated[:-1, 0] & ~rows.truncated[:-1, 0]
    ends = rows.terminated[:-1, 0] | rows.truncated[:-1, 0]
    assert not goes_on[cut - 1]
    np.testing.assert_array_equal(episode[1:][goes_on], episode[:-1][goes_on])
    np.testing.assert_array_equal(step[1:][goes_on], step[:-1][goes_on] + 1)
    assert not rows.valid[1:, 0][ends].any()
