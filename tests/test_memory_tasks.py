"""The tasks without velocities against the environments that they are made of."""

import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import fast_at_ends

from cleanreplay import memory_tasks  # noqa: F401  (registers)

TASKS = [
    ("CartPole-v1", [0, 2]),
    ("Pendulum-v1", [0, 1]),
    ("MountainCarContinuous-v0", [0]),
]


def steps_of(env_id, seed):
    """The observation at the start, and what 250 steps return, those that reset included."""
    with gym.make(env_id) as env:
        observation, _ = env.reset(seed=seed)
        env.action_space.seed(seed)
        assert env.observation_space.contains(observation)
        rows = [(observation, 0.0, False, False)]
        over = False
        for _ in range(250):
            if over:
                rows.append((env.reset()[0], 0.0, False, False))
                over = False
                continue
            *row, _ = env.step(env.action_space.sample())
            assert env.observation_space.contains(row[0])
            rows.append(tuple(row))
            over = row[2] or row[3]
    return [np.stack(column) for column in zip(*rows, strict=True)]


@fast_at_ends(("env_id", "positions"), TASKS)
def test_a_task_without_velocities_shows_the_positions_and_is_the_same_otherwise(env_id, positions):
    observation, *rest = steps_of(env_id, seed=3)
    shown, *same = steps_of(f"{env_id[:-3]}NoVelocity-v0", seed=3)
    np.testing.assert_array_equal(shown, observation[:, positions])
    for x, y in zip(rest, same, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "full", "positions"),
    [("CartPoleNoVelocity", "CartPole-v1", [0, 2]), ("PendulumNoVelocity", "Pendulum-v0", [0, 1])],
)
def test_a_task_in_jax_shows_the_positions_and_has_the_same_time_limit(name, full, positions):
    task, whole = (gym.make(f"phys2d/{x}") for x in (f"{name}-v0", full))
    own, of_whole = task.unwrapped.func_env, whole.unwrapped.func_env
    state = of_whole.initial(jax.random.PRNGKey(0))
    np.testing.assert_array_equal(own.initial(jax.random.PRNGKey(0)), state)
    shown = own.observation(state, None)
    np.testing.assert_array_equal(shown, of_whole.observation(state, None)[np.array(positions)])
    assert own.observation_space.contains(np.asarray(shown))
    assert task.spec.max_episode_steps == whole.spec.max_episode_steps
