"""The charts of successes, where the last info of an episode says `is_success`."""

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.vector import SyncVectorEnv
from helpers import COUNTER, SMALL_DQN, read_events

import dqn_jax
import sac_jax
from cleanreplay.environments import Successes, rate


class Coin(gym.Env):
    """Episodes of `length` steps, of which every `one_in`-th succeeds."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length, one_in):
        self.length, self.one_in = length, one_in
        self.episode = 0

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.t = 0
        return np.zeros(1, np.float32), {"is_success": True}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        success = self.episode % self.one_in == 0 if over else self.t % 2 == 0
        return np.zeros(1, np.float32), 0.0, over, False, {"is_success": success}


gym.register("Coin-v0", Coin, kwargs={"length": 4, "one_in": 3})


def test_the_last_step_of_each_episode_says_whether_it_succeeded():
    envs = Successes(SyncVectorEnv([lambda: Coin(4, 3), lambda: Coin(6, 1)]))
    envs.reset()
    for _ in range(20):  # 4 episodes of 5 steps and 3 of 7, with those that only reset
        envs.step(np.zeros(2, int))
    envs.close()
    assert sorted(envs.ended) == [0, 0, 0, 1, 1, 1, 1]
    np.testing.assert_array_equal(envs.first, [0, 1])


def test_what_the_environments_have_can_be_used():
    envs = Successes(SyncVectorEnv([lambda: Coin(4, 3)] * 2))
    envs.set_attr("length", [5, 6])
    assert envs.get_attr("length") == (5, 6)


class Rewarded(Coin):
    """The reward is the success."""

    def step(self, action):
        observation, _, over, _, info = super().step(action)
        return observation, float(over and info["is_success"]), over, False, info


gym.register("Rewarded-v0", Rewarded, kwargs={"length": 2, "one_in": 2})


def test_an_entry_has_the_successes_of_the_episodes_whose_returns_it_has():
    args = dqn_jax.Args(**SMALL_DQN | dict(train_frequency=40, gradient_steps=1))
    run = dqn_jax.Run(env_id=f"{__name__}:Rewarded-v0", log_interval=40, eval_episodes=0)
    scalars, _ = read_events(dqn_jax.train(args, run)[2])
    assert len({x for _, x in scalars["charts/success_rate"]}) > 1
    assert scalars["charts/success_rate"] == scalars["charts/episodic_return"]


class NotForJit(environments.Chain):
    """Gymnasium calls `transition_info` outside of jit."""

    def transition_info(self, state, action, next_state, params=None):
        return {"is_success": bool(next_state == 4)}


def make_not_for_jit(**kwargs):
    return FunctionalJaxEnv(NotForJit(), metadata={"render_modes": []}, **kwargs)


gym.register("NotForJit-v0", make_not_for_jit, max_episode_steps=9, disable_env_checker=True)


def test_an_info_that_jax_cannot_trace_has_no_chart_in_compiled_runs():
    run = dqn_jax.Run(env_id=f"{__name__}:NotForJit-v0", log_interval=100, eval_episodes=2)
    scalars, _ = read_events(dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)[2])
    assert "charts/success_rate" not in scalars
    assert "eval/success_rate" not in scalars


class Says(environments.Chain):
    """Two numbers for each step: the action, and 10; and what is no number."""

    def transition_info(self, state, action, next_state, params=None):
        more = {"text": "right", "place": jnp.zeros(3), "nothing": None}
        return {"action": action, "ten": 10, "is_success": next_state == 4} | more


def make_says(**kwargs):
    return FunctionalJaxEnv(Says(), metadata={"render_modes": []}, **kwargs)


gym.register("Says-v0", make_says, max_episode_steps=9, disable_env_checker=True)


def test_numbers_in_the_info_of_a_compiled_environment_have_charts():
    """Means over the steps of a log entry, without those that only reset. The agent is random."""
    run = dqn_jax.Run(env_id=f"{__name__}:Says-v0", log_interval=100, eval_episodes=0)
    args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=4, end_e=1.0))
    state, _, folder = dqn_jax.train(args, run)
    scalars, _ = read_events(folder)
    assert [tag for tag in scalars if tag.startswith("info/")] == ["info/action", "info/ten"]
    assert scalars["info/ten"] == [(100, 10.0), (200, 10.0)]
    steps = jax.tree.map(lambda x: np.asarray(x)[0], state.replay.storage)  # the last 100
    mean = steps.action[steps.valid].mean()
    assert scalars["info/action"][-1] == (200, pytest.approx(mean))
    assert 0.2 < mean < 0.8


@pytest.mark.slow
def test_nothing_is_nan_on_the_way(monkeypatch):
    """Also in a log entry in which no episode ends."""
    run = dqn_jax.Run(env_id="cleanreplay.bit_flipping:BitFlipping40-v0", log_interval=16)
    with jax.debug_nans(True):
        _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    scalars, _ = read_events(folder)
    assert 0 < len(scalars["charts/success_rate"]) < 12


def test_environments_that_do_not_say_it_have_no_rate():
    envs = Successes(SyncVectorEnv([environments.Counter]))
    envs.reset()
    for _ in range(20):
        envs.step(np.zeros(1, int))
    assert envs.ended == []
    assert np.isnan(rate(envs.first))


def test_the_charts_have_the_rates_of_training_and_of_evaluations():
    args = dqn_jax.Args(**SMALL_DQN | dict(total_timesteps=300))
    run = dqn_jax.Run(env_id=f"{__name__}:Coin-v0", log_interval=60, eval_episodes=3)
    scalars, _ = read_events(dqn_jax.train(args, run)[2])
    training = scalars["charts/success_rate"]
    assert [step for step, _ in training] == [60, 120, 180, 240, 300]
    np.testing.assert_allclose([x for _, x in training], 1 / 3, atol=0.09)  # 12 or 13 episodes
    assert scalars["eval/success_rate"] == [(300, 0)]


def test_without_goals_there_is_no_chart():
    scalars, _ = read_events(dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))[2])
    assert not [tag for tag in scalars if "success" in tag]


@pytest.mark.parametrize("how", ["auto", "sync"], ids=["compiled", "ordinary"])
def test_successes_agree_with_lengths(how):
    """In bit flipping an episode that is shorter than the time limit succeeded."""
    env_id = "cleanreplay.bit_flipping:BitFlipping6-v0"
    run = dqn_jax.Run(env_id=env_id, vectorization=how, log_interval=200, eval_episodes=20)
    scalars, _ = read_events(dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)[2])
    lengths = scalars["charts/episodic_length"][-1][1]
    rates = scalars["charts/success_rate"][-1][1]
    assert 0 < rates < 1
    assert 6 - 5 * rates <= lengths + 1e-5 <= 6.01
    mean = scalars["eval/episodic_return"][-1][1]  # -6 where it fails, -5 or more where not
    assert -6 <= mean <= -6 + 6 * scalars["eval/success_rate"][-1][1]


@pytest.mark.more
def test_an_environment_of_goals_says_it_to_sac():
    args = sac_jax.Args(total_timesteps=300, learning_starts=256)
    run = sac_jax.Run(env_id="environments:Reach-v0", log_interval=100, eval_episodes=5)
    scalars, _ = read_events(sac_jax.train(args, run)[2])
    assert len(scalars["charts/success_rate"]) == 3
    assert len(scalars["eval/success_rate"]) == 1
