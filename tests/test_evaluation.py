"""Evaluations: with the best actions, or with the exploration at the end of training."""

import signal
from contextlib import closing
from functools import cache
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, Given, register_jax
from helpers import COUNTER, SMALL_DQN, flags_of, make_agent, read_events

import dqn_jax
import ppo_jax
from cleanreplay import experiment
from cleanreplay.checkpoints import steps_in
from cleanreplay.compiled import make_trainer

STEPS = 100  # of an episode
REWARDS = (0.0, 1.0, 1000.0)  # of the actions: a return shows how often each was taken
ONES = gym.spaces.Box(1.0, 1.0, (1,), np.float32)  # an observation without information
ACTIONS = gym.spaces.Discrete(3)


class Counting(Given):
    def __init__(self):
        super().__init__(ONES, ACTIONS, STEPS, lambda env, action: REWARDS[action])


class CountingInJax(Chain):
    observation_space = ONES
    action_space = ACTIONS

    def observation(self, state, rng, params=None):
        return jnp.ones(1)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.array(REWARDS)[action]

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


gym.register("Counting-v0", Counting, disable_env_checker=True)
register_jax("CountingInJax-v0", CountingInJax(), max_episode_steps=STEPS)
BOTH = pytest.mark.parametrize("env_id", ["Counting-v0", "CountingInJax-v0"])


@cache
def evaluation(script, args, run):
    """Makes the agent of a run, and a function from its parameters to returns of episodes."""
    agent = make_agent(script, args, run)
    if run.env_id == "Counting-v0":
        return agent, lambda params: play(agent, run, params)
    evaluate = jax.jit(make_trainer(script, args, run).evaluate_one)
    return agent, lambda params: evaluate(params)[0]


def play(agent, run, params):
    with closing(dqn_jax.make_envs(agent.args, run, run.eval_episodes)) as envs:
        return experiment.play_episodes(agent, run, params, envs, stop=())


def params_of(agent, output):
    """Makes parameters of a policy whose last layer always has this output."""
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    params = jax.tree.map(np.array, state.params)
    layer = params["params"].get("q") or params["params"]["actor"]
    layer["kernel"][:] = 0
    layer["bias"][:] = output
    return agent.policy_params(state._replace(params=params))


def count_actions(script, output, **flags):
    """Counts how often each action was taken in 20 episodes [20, 3], from their returns."""
    agent, evaluate = evaluation(script, *flags_of(script, eval_episodes=20, **flags))
    returns = np.asarray(evaluate(params_of(agent, output)), np.int64)
    twos, ones = np.divmod(returns, 1000)
    return np.stack([STEPS - ones - twos, ones, twos], axis=1)


def assert_shares(counts, shares):
    """Fails unless shares are within four standard deviations, and episodes differ."""
    expected = counts.sum() * np.array(shares)
    deviation = np.sqrt(expected * (1 - np.array(shares)))
    np.testing.assert_array_less(abs(counts.sum(axis=0) - expected), 4 * deviation)
    assert len(np.unique(counts, axis=0)) > 10


@BOTH
@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_the_best_actions_are_taken_by_default(env_id, script):
    counts = count_actions(script, [0, 0, 1], env_id=env_id)

    np.testing.assert_array_equal(counts, [[0, 0, STEPS]] * 20)


@BOTH
@pytest.mark.parametrize(("start_e", "end_e", "total"), [(0.5, 0.25, 99_999), (0, 1, 2**31 - 1)])
def test_dqn_explores_with_the_epsilon_of_the_end(env_id, start_e, end_e, total):
    """It also does so after the largest number of steps that int32 holds."""
    flags = dict(start_e=float(start_e), end_e=float(end_e), total_timesteps=total)
    counts = count_actions(dqn_jax, [1, 0, 0], env_id=env_id, eval_explores=True, **flags)

    assert_shares(counts, [1 - end_e * 2 / 3, end_e / 3, end_e / 3])


@BOTH
def test_ppo_draws_actions_from_its_policy(env_id):
    shares = [0.1, 0.2, 0.7]
    counts = count_actions(ppo_jax, np.log(shares), env_id=env_id, eval_explores=True)

    assert_shares(counts, shares)


@BOTH
def test_an_evaluation_cuts_its_episodes_off(env_id, capsys):
    run = dqn_jax.Run(env_id=env_id, eval_episodes=3, eval_max_steps=50)
    agent = make_agent(dqn_jax, dqn_jax.Args(), run)
    params = params_of(agent, [0, 1, 0])
    if env_id == "Counting-v0":
        returns = play(agent, run, params)
    else:
        of_one_agent = jax.tree.map(lambda x: x[None], params)
        (returns,), _ = make_trainer(dqn_jax, dqn_jax.Args(), run).evaluate(of_one_agent)

    assert "an evaluation cuts off episodes after 50 steps" in capsys.readouterr().out
    np.testing.assert_array_equal(returns, [50, 50, 50])


class Uneven(Given):
    """Has a first episode of 2, 3 or 4 steps, with rewards of 1."""

    def reset(self, *, seed=None, options=None):
        self.length = self.length if seed is None else 2 + seed % 3
        return super().reset(seed=seed)


gym.register("Uneven-v0", Uneven, disable_env_checker=True)


def test_a_return_is_that_of_the_first_episode():
    run = dqn_jax.Run(env_id="Uneven-v0", eval_episodes=3)
    agent = make_agent(dqn_jax, dqn_jax.Args(), run)

    assert sorted(play(agent, run, params_of(agent, [0, 1, 0]))) == [2, 3, 4]


def test_an_evaluation_logs_statistics_of_the_returns():
    logged = []
    log = SimpleNamespace(write=lambda *given: logged.append(given), args=dqn_jax.Args())
    experiment.log_returns(log, 20, np.array([3.0, 0.0, 10.0, 1.0]), np.array([1.0, 0.0]))

    ((step, values),) = logged
    names = ("episodic_return", "median", "min", "max", "success_rate")
    assert step == 20
    assert values == dict(zip([f"eval/{x}" for x in names], [3.5, 2, 0, 10, 0.5], strict=True))


def test_a_signal_in_an_evaluation_ends_the_run(monkeypatch):
    """The evaluation at step 50, after 60 steps, would take 100. One more rollout is collected."""
    stop = []
    made = []
    step = Counting.step

    def signal_in_the_evaluation(self, action):
        made.append(action)
        if len(made) == 67:
            stop.append(signal.SIGINT)
        return step(self, action)

    monkeypatch.setattr(Counting, "step", signal_in_the_evaluation)
    flags = COUNTER | SMALL_DQN | dict(env_id="Counting-v0", total_timesteps=100)
    flags |= dict(eval_interval=50, eval_episodes=1)
    _, _, folder = dqn_jax.train(*flags_of(dqn_jax, **flags), stop)

    assert len(made) == 77
    assert "eval/episodic_return" not in read_events(folder)[0]
    assert not (folder / "best.safetensors").exists()
    assert steps_in(folder) == [60]


def test_a_users_at_evaluation_gets_parameters_and_returns(monkeypatch):
    seen = []
    note = lambda log, *given: seen.append(jax.tree.map(np.array, given))  # noqa: E731
    monkeypatch.setattr(dqn_jax.Log, "at_evaluation", note)
    flags = COUNTER | SMALL_DQN | dict(eval_episodes=2, eval_interval=120)
    state, _, _ = dqn_jax.train(*flags_of(dqn_jax, **flags))

    assert [(step, list(returns)) for step, _, returns in seen] == [(120, [3, 3]), (200, [3, 3])]
    jax.tree.map(np.testing.assert_array_equal, seen[-1][1], state.params)


def test_without_episodes_there_are_no_returns():
    seen = []
    run = dqn_jax.Run(eval_episodes=0)
    log = SimpleNamespace(at_evaluation=lambda *given: seen.append(given))
    ordinary = SimpleNamespace(run=run, log=log, agent=None, is_first=True, signals=())
    experiment.Experiment.evaluate(ordinary, 120, "state", "params")

    ((step, params, returns),) = seen
    assert (step, params, returns.shape) == (120, "params", (0,))
