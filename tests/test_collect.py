"""`make_envs`, and `collect_rollout` against environments that are stepped alone."""

from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import linear
from environments import Given
from helpers import make_agent
from numpy.testing import assert_array_equal

import dqn_jax
from cleanreplay import UsageError, flags
from cleanreplay.experiment import play_episodes
from dqn_jax import Args, Run, Step


def is_native(envs):
    """Returns whether it is a native vector version, and not single environments."""
    if not isinstance(envs, gym.vector.SyncVectorEnv):
        return True
    return not isinstance(envs.envs[0], gym.Wrapper)


@pytest.mark.parametrize(
    ("env_id", "options", "native_from", "shape", "reward"),
    [
        ("Counter-v0", {}, None, (3,), 1),  # it has no native version
        ("CartPole-v1", {}, 4, (4,), 1),
        ("CartPole-v1", {"env_kwargs": '{"sutton_barto_reward": true}'}, 4, (4,), 0),
        ("CartPole-v1", {"vectorization": "sync"}, None, (4,), 1),
        ("VectorOnly-v0", {}, 1, (3,), 1),  # it has no other version
        ("Preprocessed-v0", {}, 1, (2,), 1),  # the native version observes something else
        # The native version does not take this argument.
        ("TakesKwargs-v0", {"env_kwargs": '{"scale": 3}', "vectorization": "sync"}, None, (3,), 3),
        ("environments:Start-v0", {}, None, (1,), None),  # its module is imported
        ("phys2d/CartPole-v1", {}, None, (4,), None),  # the native version resets wrongly
    ],
)
def test_the_environment_is_the_same_at_any_number_of_them(
    env_id, options, native_from, shape, reward
):
    run = Run(env_id=env_id, **options)
    for n in (1, 3, 4):
        envs = dqn_jax.make_envs(Args(), run, n)
        assert envs.num_envs == n
        assert envs.single_observation_space.shape == shape
        assert is_native(envs) == (native_from is not None and n >= native_from), n
        if reward is not None:
            envs.reset(seed=0)
            _, rewards, *_ = envs.step(envs.action_space.sample())
            assert_array_equal(rewards, [reward] * n)
        envs.close()


@pytest.mark.parametrize(("log_interval", "says_it"), [(399, True), (400, False)])
def test_an_iteration_longer_than_the_interval_is_reported(log_interval, says_it, capsys):
    agent = SimpleNamespace(steps_per_iteration=400, rollout_shape=(100, 4))
    agent.args = SimpleNamespace(total_timesteps=400)
    flags.check_iteration(agent, log_interval)
    assert ("400 steps" in capsys.readouterr().out) == says_it

    agent.args.total_timesteps = 399
    with pytest.raises(UsageError, match="total_timesteps must be 400 or more"):
        flags.check_iteration(agent, log_interval)


def collect(agent, envs, params, key, count, seed):
    """Collects rollouts. Returns them, and the `env_state` before and after each."""
    observation, _ = envs.reset(seed=seed)
    states = [(observation, np.ones(envs.num_envs, bool))]
    rollouts = []
    for i in range(count):
        step = i * agent.steps_per_iteration
        rollout, state = dqn_jax.collect_rollout(agent, envs, params, states[-1], key, step)
        rollouts.append(rollout)
        states.append(state)
    envs.close()
    return rollouts, states


def alone(seed, actions):
    """Steps one Counter, which it resets itself. Returns its steps and what each led to."""
    env = gym.make("Counter-v0")
    observation, _ = env.reset(seed=seed)
    steps = []
    for action in actions:
        after, reward, terminated, truncated, _ = env.step(int(action))
        steps.append((Step(observation, action, reward, terminated, truncated, True), after))
        observation = env.reset()[0] if terminated or truncated else after
    return steps


@pytest.fixture(scope="module")
def counters():
    """Collects five rollouts [6, 3] of Counter with exploration, and joins all their steps."""
    args = Args(num_envs=3, train_frequency=18, start_e=0.5, end_e=0.5)
    agent = linear(dqn_jax, args, features=3, num_actions=3)
    assert agent.rollout_shape == (6, 3)
    params = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float32)
    key = jax.random.PRNGKey(0)
    envs = dqn_jax.make_envs(agent.args, Run(env_id="Counter-v0"), 3)
    rollouts, states = collect(agent, envs, params, key, count=5, seed=5)
    steps = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)
    observations = np.concatenate([steps.observation, states[-1][0][None]])
    explored = [agent.act(params, x, key, 3 * t) for t, x in enumerate(steps.observation)]
    return SimpleNamespace(
        rollouts=rollouts,
        states=states,
        steps=steps,
        next_observations=observations[1:],
        greedy=(steps.observation @ np.asarray(params).reshape(3, 3)).argmax(-1),
        explored=np.stack(explored),
    )


def test_collected_actions_are_those_of_act_at_their_steps(counters):
    assert_array_equal(counters.steps.action, counters.explored)
    assert 0.4 < np.mean(counters.steps.action == counters.greedy) < 0.9


def test_the_step_after_an_end_is_an_autoreset_step(counters):
    """Ends at the bounds of rollouts count, too; its reward is 0."""
    steps = counters.steps
    done = steps.terminated | steps.truncated
    assert steps.valid[0].all()
    assert_array_equal(steps.valid[1:], ~done[:-1])
    assert_array_equal(counters.states[-1][1], ~done[-1])
    assert (steps.reward[~steps.valid] == 0).all()
    begins_with_a_reset = [~valid for _, valid in counters.states[:-1]]
    assert_array_equal(begins_with_a_reset, np.outer([0, 1, 0, 0, 1], [1, 1, 1]))


def test_collected_steps_are_those_of_environments_stepped_alone(counters):
    """Every field of every step is equal, across rollouts."""
    for i in range(3):
        every_step = [jax.tree.map(lambda x, t=t, i=i: x[t, i], counters.steps) for t in range(30)]
        steps = [step for step in every_step if step.valid]
        assert sum(step.terminated for step in steps) > 1
        assert sum(step.truncated for step in steps) > 1
        wanted = alone(5 + i, [step.action for step in steps])
        next_observations = counters.next_observations[counters.steps.valid[:, i], i]
        for got, after, (step, wanted_after) in zip(steps, next_observations, wanted, strict=True):
            jax.tree.map(assert_array_equal, got, step)
            assert_array_equal(after, wanted_after)


def test_large_integers_are_alike_in_acting_and_learning():
    space = gym.spaces.Box(2**40 + 5, 2**40 + 5, (1,), np.int64)
    make = partial(Given, space, gym.spaces.Discrete(2), length=1)
    gym.register("Amounts-v0", make, disable_env_checker=True)
    args = Args(num_envs=2, train_frequency=8, batch_size=2, learning_starts=2)
    run = Run(env_id="Amounts-v0", eval_episodes=1)
    agent = make_agent(dqn_jax, args, run)
    seen = []

    def act(params, observation, *_):
        seen.append(observation)
        return np.ones(len(observation), int)

    agent.act = act
    (rollout,), _ = collect(agent, dqn_jax.make_envs(args, run, 2), None, None, count=1, seed=0)
    play_episodes(agent, run, None, dqn_jax.make_envs(args, run, 1), [])
    for observation in (*seen, *rollout.observation):
        assert observation.dtype == np.float32
        assert_array_equal(observation, np.float32(2**40 + 5))
