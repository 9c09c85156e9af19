"""Counts of the environments that are made, and calls for goals, one at a time."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import environments  # noqa: F401  (registers)
import gymnasium as gym
import pytest

import dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import compiled, goals


@pytest.fixture
def made(monkeypatch):
    """Lists all vector environments that are made."""
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
        # One more for the goals, which is open until the run ends.
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


def test_goals_are_asked_for_in_one_thread_at_a_time():
    inside = []
    most = []

    def ask(goal):
        inside.append(goal)
        time.sleep(0.01)
        most.append(len(inside))
        inside.pop()
        return goal

    ask_alone = goals.one_at_a_time(ask, threading.Lock())
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(ask_alone, range(4)))

    assert answers == [0, 1, 2, 3]
    assert most == [1] * 4
