"""The charts of successes, if the last info of an episode has `is_success`."""

from functools import partial

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import register_jax
from gymnasium.vector import SyncVectorEnv
from helpers import SMALL_DQN, read_events

import dqn_jax
from cleanreplay.environments import Successes, as_number, rate
from cleanreplay.jax_envs import info_of


class Coin(environments.Given):
    """Makes every `one_in`-th episode succeed. Its return is the success; earlier infos differ."""

    def __init__(self, length, one_in):
        super().__init__(length=length)
        self.one_in = one_in
        self.episode = 0

    def reset(self, **kwargs):
        self.episode += 1
        observation, _ = super().reset(**kwargs)
        return observation, {"is_success": True}

    def step(self, action):
        observation, _, over, truncated, _ = super().step(action)
        success = self.episode % self.one_in == 0 if over else self.step_count % 2 == 0
        info = {"is_success": success}
        return observation, float(over and success), over, truncated, info


gym.register("Coin-v0", Coin, kwargs={"length": 4, "one_in": 3})


def take_steps(envs, count):
    envs.reset()
    for _ in range(count):
        envs.step(np.zeros(envs.num_envs, int))
    envs.close()


class Late(Coin):
    """Reports `is_success` only in every second episode."""

    def step(self, action):
        *result, info = super().step(action)
        return *result, info if self.episode % 2 == 0 else {}


def test_the_last_step_of_each_episode_shows_if_it_succeeded():
    envs = Successes(SyncVectorEnv([lambda: Coin(4, 3), lambda: Coin(6, 1), lambda: Late(7, 1)]))
    take_steps(envs, 20)  # episodes of 5, 7 and 8 steps, with their autoreset steps

    np.testing.assert_array_equal(envs.ended, [0, 1, np.nan, 0, 1, 1, 1, 0, 1])
    np.testing.assert_array_equal(envs.first, [0, 1, np.nan])


def test_environments_that_do_not_report_success_have_no_chart_of_it():
    envs = Successes(SyncVectorEnv([environments.Counter]))
    take_steps(envs, 20)

    assert envs.ended == []
    np.testing.assert_array_equal(envs.first, [np.nan])


def test_a_rate_is_of_the_episodes_that_reported_success():
    assert rate([1, 0, np.nan, 0]) == pytest.approx(1 / 3)
    assert np.isnan(rate([np.nan]))
    assert np.isnan(rate([]))


@pytest.mark.parametrize(
    ("given", "number"),
    [(True, 1), (np.array([0.5]), 0.5), ([1.0, 0.0], np.nan), ("yes", np.nan), (None, np.nan)],
)
def test_a_success_that_is_no_number_is_left_out(given, number):
    np.testing.assert_equal(as_number(given), number)


def test_an_ordinary_run_has_charts_of_successes():
    """An entry has the successes of the same episodes as the returns."""
    args = dqn_jax.Args(**SMALL_DQN | dict(train_frequency=40, gradient_steps=1))
    run = dqn_jax.Run(env_id=f"{__name__}:Coin-v0", log_interval=40, eval_episodes=3)
    scalars, _ = read_events(dqn_jax.train(args, run)[2])
    steps, rates = zip(*scalars["charts/success_rate"], strict=True)

    assert steps == (40, 80, 120, 160, 200)
    assert len(set(rates)) > 1
    assert scalars["charts/success_rate"] == scalars["charts/episodic_return"]
    assert scalars["eval/success_rate"] == [(200, 0)]


class Says(environments.Chain):
    """Reports two numbers for each step, the action and 10, and what is not a number.

    An episode succeeds unless a time limit ends it; its return is the success.
    """

    def transition_info(self, state, action, next_state, params=None):
        more = {"text": "right", "place": jnp.zeros(3), "nothing": None}
        return {"action": action, "ten": 10, "is_success": next_state == 4} | more


register_jax("Says-v0", Says())


class NotForJit(environments.Chain):
    """Gymnasium calls `transition_info` outside of jit."""

    def transition_info(self, state, action, next_state, params=None):
        return {"is_success": bool(next_state == 4)}


def test_an_info_that_jax_cannot_trace_is_left_out():
    assert jax.eval_shape(partial(info_of, NotForJit()), 1, 1, 2) == {}


@pytest.fixture(scope="module")
def compiled_run(tmp_path_factory):
    """Trains a compiled run with random actions, without any NaN. Returns charts and steps.

    A log entry has three steps of each environment. In the first one no episode ends.
    """
    run = dqn_jax.Run(env_id=f"{__name__}:Says-v0", log_interval=12, eval_episodes=20)
    flags = dict(num_envs=4, end_e=1.0, total_timesteps=240, buffer_size=240, train_frequency=4)
    with pytest.MonkeyPatch.context() as patch, jax.debug_nans(True):
        patch.chdir(tmp_path_factory.mktemp("compiled"))
        state, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN | flags), run)
    scalars, _ = read_events(folder)
    return scalars, jax.tree.map(lambda x: np.asarray(x)[0], state.replay.storage)


def test_a_compiled_run_has_charts_of_successes(compiled_run):
    scalars, _ = compiled_run
    steps, rates = zip(*scalars["charts/success_rate"], strict=True)

    assert 12 not in steps
    assert len(set(rates)) > 1
    assert scalars["charts/success_rate"] == scalars["charts/episodic_return"]
    assert scalars["eval/success_rate"] == scalars["eval/episodic_return"]


def test_numbers_in_the_info_of_a_compiled_run_have_charts(compiled_run):
    """They show means over the steps of a log entry, without autoreset steps."""
    scalars, steps = compiled_run
    action, valid = (x.reshape(20, 12) for x in (steps.action, steps.valid))

    assert [tag for tag in scalars if tag.startswith("info/")] == ["info/action", "info/ten"]
    assert scalars["info/ten"] == [(step, 10.0) for step in range(12, 241, 12)]
    means = [x for _, x in scalars["info/action"]]
    np.testing.assert_allclose(means, action.mean(axis=1, where=valid), rtol=1e-6)
    assert not valid.all()
