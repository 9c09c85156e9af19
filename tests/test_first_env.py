"""How often an environment is made before the first step, and what is asked of which one."""

import threading
import time

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control import cartpole
from gymnasium.envs.phys2d.cartpole import CartPoleJaxEnv
from helpers import SMALL_DQN, SMALL_PPO

import dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import replays


@pytest.fixture
def made(monkeypatch):
    """The number of environments of each class that were made, and of those that are open."""
    count = {"made": 0, "open": 0}

    def counted(cls):
        init, close = cls.__init__, cls.close

        def count_init(self, *args, **kwargs):
            count["made"] += 1
            count["open"] += 1
            self.is_counted = True
            init(self, *args, **kwargs)

        def count_close(self, *args, **kwargs):
            count["open"] -= self.is_counted  # it may be closed twice
            self.is_counted = False
            close(self, *args, **kwargs)

        monkeypatch.setattr(cls, "__init__", count_init)
        monkeypatch.setattr(cls, "close", count_close)

    for cls in (cartpole.CartPoleEnv, cartpole.CartPoleVectorEnv, CartPoleJaxEnv):
        counted(cls)
    counted(environments.Reach)
    return count


@pytest.mark.parametrize(
    ("script", "num_envs", "vectorization", "expected"),
    [
        (dqn_jax, 1, "auto", 1 + 1),
        (ppo_jax, 3, "auto", 1 + 3),
        (ppo_jax, 4, "auto", 1 + 1),  # one vector environment
        (ppo_jax, 4, "sync", 1 + 4),
    ],
)
def test_an_ordinary_run_makes_one_environment_and_those_that_train(
    script, num_envs, vectorization, expected, made
):
    flags = SMALL_DQN if script is dqn_jax else SMALL_PPO
    run = script.Run(vectorization=vectorization, eval_episodes=0, checkpoint_interval=0)
    script.train(script.Args(**flags | dict(num_envs=num_envs)), run)
    assert made == {"made": expected, "open": 0}


def test_a_compiled_run_makes_one_environment(made):
    run = ppo_jax.Run(env_id="phys2d/CartPole-v1", eval_episodes=2, checkpoint_interval=0)
    ppo_jax.train(ppo_jax.Args(**SMALL_PPO), run)
    assert made == {"made": 1, "open": 0}


def test_goals_have_an_environment_of_their_own_that_is_open_until_the_run_ends(made):
    flags = dict(total_timesteps=60, learning_starts=40, batch_size=8, hidden_sizes=(8,))
    args = sac_jax.Args(**flags, her_fraction=0.5)
    run = sac_jax.Run(env_id="environments:Reach-v0", eval_episodes=0, checkpoint_interval=0)
    sac_jax.train(args, run)
    assert made == {"made": 3, "open": 0}


class Threshold(environments.Reach):
    """Its rewards need what a reset sets, and note the threads that ask for them at once."""

    inside = 0
    most = 0

    def reset(self, **kwargs):
        self.radius = 0.3
        return super().reset(**kwargs)

    def compute_reward(self, achieved_goal, desired_goal, info):
        Threshold.inside += 1
        Threshold.most = max(Threshold.most, Threshold.inside)
        try:
            time.sleep(0.001)
            far = np.linalg.norm(np.asarray(achieved_goal - desired_goal), axis=-1)
            return (far <= self.radius).astype(np.float32)
        finally:
            Threshold.inside -= 1


gym.register("Threshold-v0", Threshold)


def test_goals_are_asked_of_an_environment_that_was_reset_in_one_thread_at_a_time():
    args = sac_jax.Args(batch_size=8, her_fraction=0.5)
    run = sac_jax.Run(env_id="Threshold-v0")

    def make_envs(num_envs):
        return sac_jax.make_envs(args, run, num_envs)

    first = make_envs(1)
    options = replays.options(args, first, make_envs)
    first.close()
    spaces = first.single_observation_space, first.single_action_space
    agent = sac_jax.SAC(args, *spaces, **options)
    state = agent.init(jax.random.PRNGKey(0))
    rows = jax.tree.map(
        lambda x: np.zeros((50, args.num_envs, *np.shape(x)), np.asarray(x).dtype),
        agent.example_step,
    )
    replay = agent.replay.add_batch(state.replay, rows._replace(valid=~rows.valid))
    state = state._replace(replay=replay)

    def sample(seed):
        key = jax.random.PRNGKey(seed)
        rewards = agent.replay.sample(state.replay, key, 8).experience.reward
        np.testing.assert_array_equal(rewards[:4, 0], np.ones(4))

    threads = [threading.Thread(target=sample, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Threshold.most == 1
    replays.close(agent.replay)
