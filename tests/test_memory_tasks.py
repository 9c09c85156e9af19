"""The tasks that need memory, against the environments of which they hide a part."""

from contextlib import closing

import gymnasium as gym
import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from cleanreplay import memory_tasks  # noqa: F401  (registers)


def steps_of(env_id):
    """Returns the first observations, and the results of 250 steps, with autoreset steps."""
    with closing(gym.make_vec(env_id, 2, vectorization_mode="sync")) as envs:
        observation, _ = envs.reset(seed=3)
        envs.action_space.seed(3)
        rows = [envs.step(envs.action_space.sample())[:4] for _ in range(250)]
    observations, *rest = [np.stack(column) for column in zip(*rows, strict=True)]
    assert all(x in envs.observation_space for x in observations)
    return np.concatenate([observation[None], observations]), *rest


@pytest.mark.parametrize(
    ("name", "version", "positions"), [("CartPole", 1, [0, 2]), ("MountainCarContinuous", 0, [0])]
)
def test_a_task_without_velocities_is_the_same_otherwise(name, version, positions):
    observation, *rest = steps_of(f"{name}-v{version}")
    shown, *same = steps_of(f"{name}NoVelocity-v0")

    assert_array_equal(shown, observation[..., positions])
    for x, y in zip(rest, same, strict=True):
        assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("name", "full", "positions"),
    [("CartPoleNoVelocity", "CartPole-v1", [0, 2]), ("PendulumNoVelocity", "Pendulum-v0", [0, 1])],
)
def test_a_task_in_jax_shows_the_positions(name, full, positions):
    task, whole = (gym.make(f"phys2d/{x}") for x in (f"{name}-v0", full))
    own, of_whole = task.unwrapped.func_env, whole.unwrapped.func_env
    state = of_whole.initial(jax.random.PRNGKey(0))
    shown = own.observation(state, None)

    assert_array_equal(shown, of_whole.observation(state, None)[np.array(positions)])
    assert own.observation_space.contains(np.asarray(shown))
    assert task.spec.max_episode_steps == whole.spec.max_episode_steps


@pytest.mark.parametrize("env_id", ["MemoryChain-v0", "phys2d/MemoryChain-v0"])
def test_a_chain_rewards_the_answer_to_its_first_observation(env_id):
    """Observations are the fraction of steps left, whether the step is the last, the answer."""
    env = gym.make(env_id, length=4)
    cues = set()
    for seed in range(8):
        (left, is_last, cue), _ = env.reset(seed=seed)
        assert (left, is_last) == (1, 0)
        cues.add(float(cue))
        for wanted in ([0.75, 0, 0], [0.5, 0, 0], [0.25, 1, 0]):
            observation, reward, terminated, truncated, _ = env.step(1)
            assert_array_equal(observation, np.float32(wanted))
            assert (reward, terminated, truncated) == (0, False, False)
        _, reward, terminated, _, _ = env.step(1)
        assert (reward, terminated) == (cue, True)

    assert cues == {-1.0, 1.0}
