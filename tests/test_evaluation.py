"""Evaluations: of the best actions, or with the exploration that training ends with."""

import signal
from contextlib import closing

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from helpers import (
    COUNTER,
    SMALL_DQN,
    fast_at_ends,
    find_jax_env,
    make_agent,
    make_trainer,
    read_events,
)

import dqn_jax
import ppo_jax
from cleanreplay import compiled, experiment

STEPS = 200  # of an episode
REWARDS = (0.0, 1.0, 1000.0)  # of the actions: a return tells how often each was taken


class Counting(gym.Env):
    """An observation that says nothing."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.step_count += 1
        over = self.step_count == STEPS
        return np.ones(1, np.float32), REWARDS[action], False, over, {}


class CountingInJax(Chain):
    observation_space = Counting.observation_space
    action_space = Counting.action_space

    def observation(self, state, rng, params=None):
        return jnp.ones(1)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.array(REWARDS)[action]

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


def make_counting(**kwargs):
    return FunctionalJaxEnv(CountingInJax(), metadata={"render_modes": []}, **kwargs)


gym.register("Counting-v0", Counting, disable_env_checker=True)
gym.register("CountingInJax-v0", make_counting, max_episode_steps=STEPS, disable_env_checker=True)


def policy_params(agent, layer, output):
    """Those of an agent with this output of its last layer, whatever it observes."""
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    params = jax.tree.map(np.array, state.params)
    params["params"][layer]["kernel"][:] = 0
    params["params"][layer]["bias"][:] = output
    return agent.policy_params(state._replace(params=params))


def play(module, agent, run, params, episodes, stop=()):
    """The returns of the first episodes of so many environments."""
    with closing(module.make_envs(agent.args, run, episodes)) as envs:
        return experiment.play_episodes(agent, run, params, envs, stop)


def count_actions(module, args, layer, output, **flags):
    """How often each action was taken in 20 episodes [20, 3], from their returns."""
    run = module.Run(eval_episodes=20, **flags)
    agent = make_agent(module, args, run)
    params = policy_params(agent, layer, output)
    if find_jax_env(module, args, run):
        returns, over, _ = jax.jit(make_trainer(module, args, run).evaluate_one)(params)
        assert np.all(over)
    else:
        returns = play(module, agent, run, params, 20)
    twos, ones = np.divmod(np.asarray(returns, np.int64), 1000)
    return np.stack([STEPS - ones - twos, ones, twos], axis=1)


def assert_shares(counts, shares):
    """Within four standard deviations; no two episodes have the same draws."""
    expected = counts.sum() * np.array(shares)
    deviation = np.sqrt(expected * (1 - np.array(shares)))
    np.testing.assert_array_less(abs(counts.sum(axis=0) - expected), 4 * deviation)
    assert len(np.unique(counts, axis=0)) > 10


BOTH = pytest.mark.parametrize("env_id", ["Counting-v0", "CountingInJax-v0"])
DQN_HEAD = "q"
PPO_HEAD = "actor"


@BOTH
@fast_at_ends("best", range(3))
def test_the_best_actions_are_taken_by_default(env_id, best):
    for module, head in ((dqn_jax, DQN_HEAD), (ppo_jax, PPO_HEAD)):
        counts = count_actions(module, module.Args(), head, np.eye(3)[best], env_id=env_id)
        np.testing.assert_array_equal(counts, [STEPS * np.eye(3)[best]] * 20)


@BOTH
@pytest.mark.parametrize("end_e", [1.0, 0.25])
def test_dqn_explores_with_the_epsilon_that_training_ends_with(env_id, end_e):
    args = dqn_jax.Args(start_e=0.5, end_e=end_e)
    flags = dict(env_id=env_id, eval_explores=True)
    counts = count_actions(dqn_jax, args, DQN_HEAD, [1, 0, 0], **flags)
    assert_shares(counts, [1 - end_e * 2 / 3, end_e / 3, end_e / 3])


@BOTH
def test_an_evaluation_after_the_most_steps_that_int32_holds_explores_as_at_the_end(env_id):
    args = dqn_jax.Args(total_timesteps=2**31 - 1, start_e=0.0, end_e=1.0)
    flags = dict(env_id=env_id, eval_explores=True)
    counts = count_actions(dqn_jax, args, DQN_HEAD, [1, 0, 0], **flags)
    assert_shares(counts, [1 / 3] * 3)


@BOTH
def test_ppo_draws_actions_from_its_policy(env_id):
    shares = [0.1, 0.2, 0.7]
    flags = dict(env_id=env_id, eval_explores=True)
    counts = count_actions(ppo_jax, ppo_jax.Args(), PPO_HEAD, np.log(shares), **flags)
    assert_shares(counts, shares)


def test_an_evaluation_of_training_explores_if_asked_to():
    """An agent that always takes action 0 would have a return of 0."""
    args = dqn_jax.Args(
        total_timesteps=20, learning_starts=19, batch_size=1, buffer_size=100, end_e=1.0
    )
    run = dqn_jax.Run(env_id="Counting-v0", eval_episodes=2, eval_explores=True)
    _, _, folder = dqn_jax.train(args, run)
    ((step, score),) = read_events(folder)[0]["eval/episodic_return"]
    twos, ones = divmod(score, 1000)
    assert step == 20
    assert 40 < twos < 95
    assert score not in (STEPS, STEPS * 1000.0, 0.0)


@BOTH
def test_an_evaluation_logs_mean_median_lowest_and_highest_return(env_id, monkeypatch):
    returns = np.array([3.0, 0.0, 10.0, 1.0])
    monkeypatch.setattr(experiment, "play_episodes", lambda *args, **kwargs: returns)
    monkeypatch.setattr(compiled.Trainer, "evaluate", lambda *args: [returns[None]] * 2)
    args = dqn_jax.Args(total_timesteps=20, learning_starts=19, batch_size=1, buffer_size=100)
    run = dqn_jax.Run(env_id=env_id, eval_episodes=4, log_interval=10)
    _, _, folder = dqn_jax.train(args, run)
    charts, _ = read_events(folder)
    got = [charts[f"eval/{name}"] for name in ("episodic_return", "median", "min", "max")]
    assert got == [[(20, 3.5)], [(20, 2.0)], [(20, 0.0)], [(20, 10.0)]]


def test_a_signal_in_an_evaluation_ends_the_run_with_the_iteration_after_it(monkeypatch):
    """The evaluation at step 50, after 60 steps, would take 200. One more rollout is collected."""
    stop = []
    made = []
    step = Counting.step

    def signal_in_the_evaluation(self, action):
        made.append(action)
        if len(made) == 67:
            stop.append(signal.SIGINT)
        return step(self, action)

    monkeypatch.setattr(Counting, "step", signal_in_the_evaluation)
    args = dqn_jax.Args(total_timesteps=100, learning_starts=19, batch_size=1, buffer_size=100)
    run = dqn_jax.Run(env_id="Counting-v0", eval_interval=50, eval_episodes=1)
    _, _, folder = dqn_jax.train(args, run, stop)
    assert len(made) == 77
    assert "eval/episodic_return" not in read_events(folder)[0]
    assert not (folder / "best.safetensors").exists()
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["60"]


def test_a_signal_ends_the_first_episodes_after_the_step_that_is_made():
    run = dqn_jax.Run(env_id="Counting-v0")
    agent = make_agent(dqn_jax, dqn_jax.Args(), run)
    params = policy_params(agent, DQN_HEAD, [0, 1, 0])
    returns = play(dqn_jax, agent, run, params, 3, stop=[signal.SIGTERM])
    np.testing.assert_array_equal(returns, [1, 1, 1])  # after one step


@BOTH
def test_an_evaluation_cuts_its_episodes_off(env_id, capsys):
    run = dqn_jax.Run(env_id=env_id, eval_episodes=3, eval_max_steps=50)
    args = dqn_jax.Args()
    agent = make_agent(dqn_jax, args, run)
    params = policy_params(agent, DQN_HEAD, [0, 1, 0])
    if find_jax_env(dqn_jax, args, run):
        of_one_agent = jax.tree.map(lambda x: x[None], params)
        (returns,), _ = make_trainer(dqn_jax, args, run).evaluate(of_one_agent)
    else:
        returns = play(dqn_jax, agent, run, params, 3)
    assert "an evaluation cuts off episodes after 50 steps" in capsys.readouterr().out
    np.testing.assert_array_equal(returns, [50, 50, 50])


def test_the_code_of_a_user_gets_the_parameters_and_the_returns(monkeypatch):
    """Of an ordinary run, when an evaluation is due; without episodes there are no returns."""
    seen = []

    class Noted(dqn_jax.Log):
        def at_evaluation(self, step, params, returns):
            seen.append((step, jax.tree.map(np.array, params), returns.tolist()))

    monkeypatch.setattr(dqn_jax, "Log", Noted)
    args = dqn_jax.Args(**SMALL_DQN)
    for episodes, returns in ((2, [3.0, 3.0]), (0, [])):
        run = dqn_jax.Run(**COUNTER | dict(eval_episodes=episodes), eval_interval=120)
        state, _, _ = dqn_jax.train(args, run)
        assert [(step, got) for step, _, got in seen] == [(120, returns), (200, returns)]
        jax.tree.map(np.testing.assert_array_equal, seen[-1][1], state.params)
        seen.clear()
