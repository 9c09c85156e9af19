"""How often environments are made, and which one is asked for the rewards of goals."""

import threading
import time

import environments
import gymnasium as gym
import numpy as np
import pytest

import dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import compiled, goals


@pytest.fixture
def made(monkeypatch):
    """All vector environments that are made."""
    made = []
    make_vec = gym.make_vec

    def note(*args, **kwargs):
        made.append(make_vec(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(gym, "make_vec", note)
    return made


@pytest.mark.parametrize(
    ("script", "args", "run", "sizes"),
    [
        (dqn_jax, {}, {}, [1, 1]),
        (ppo_jax, {"num_envs": 4}, {"vectorization": "sync"}, [1, 4]),
        (ppo_jax, {}, {"env_id": "phys2d/CartPole-v1"}, [1]),  # compiled
        # One for the goals, which is open until the run ends.
        (sac_jax, {"her_fraction": 0.5}, {"env_id": "environments:Reach-v0"}, [1, 1, 1]),
    ],
)
def test_one_environment_is_made_before_those_that_train(
    script, args, run, sizes, made, monkeypatch
):
    closed = []

    def train_loop(*_):
        closed.extend(envs.unwrapped.closed for envs in made)

    monkeypatch.setattr(script, "train_loop", train_loop)
    monkeypatch.setattr(compiled, "train_loop", lambda _, runner, returns, *__: (runner, returns))
    script.train(script.Args(**args), script.Run(**run, checkpoint_interval=0))

    assert [envs.num_envs for envs in made] == sizes
    assert closed == ([True] + [False] * (len(sizes) - 1)) * (len(sizes) > 1)
    assert all(envs.unwrapped.closed for envs in made)


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
            time.sleep(0.01)
            far = np.linalg.norm(np.asarray(achieved_goal - desired_goal), axis=-1)
            return (far <= self.radius).astype(np.float32)
        finally:
            Threshold.inside -= 1


gym.register("Threshold-v0", Threshold)


def test_goals_are_asked_after_a_reset_in_one_thread_at_a_time():
    args = sac_jax.Args(her_fraction=0.5)
    run = sac_jax.Run(env_id="Threshold-v0")

    def make_envs(num_envs):
        return sac_jax.make_envs(args, run, num_envs)

    first = make_envs(1)
    found = goals.find_goals(args, first, make_envs)
    first.close()
    goal = np.zeros((4, 2), np.float32)
    rewards = []
    threads = [
        threading.Thread(target=lambda: rewards.append(found.rewards(goal, goal))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.close()

    assert Threshold.most == 1
    np.testing.assert_array_equal(rewards, np.ones((4, 4)))
