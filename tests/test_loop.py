"""A whole run that is stepped from Python: what it learns, and what remains in memory."""

import gc
import itertools
import time
import weakref
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import numpy as np
from environments import Given
from gymnasium.envs.registration import EnvSpec
from helpers import (
    COUNTER,
    SMALL_DQN,
    assert_trees_equal,
    edited,
    make_agent,
    read_events,
    saved_run,
)

import dqn_jax
from cleanreplay.experiment import Experiment, play_episodes


def test_a_run_is_the_one_without_the_package(monkeypatch):
    ours = saved_run(dqn_jax)
    monkeypatch.setattr(dqn_jax, "cleanreplay", None)
    state, returns, folder = dqn_jax.train(ours.args, ours.run)
    charts, wanted = read_events(ours.folder)[0], read_events(folder)[0]

    assert_trees_equal(jax.tree.map(np.asarray, ours.state), jax.tree.map(np.asarray, state))
    assert ours.returns == returns
    assert [step for step, _ in charts.pop("charts/SPS")] == [20, 40]
    del wanted["charts/SPS"]
    assert charts == wanted


def test_a_wrapper_is_around_each_environment(monkeypatch):
    class Doubled(gym.Wrapper):
        def step(self, action):
            observation, reward, *others = self.env.step(action)
            return observation, 2 * reward, *others

    monkeypatch.setattr(environments, "Doubled", Doubled, raising=False)
    new = "import environments\n    wrappers: list = [environments.Doubled]"
    script = edited(dqn_jax, ("wrappers: list = []", new))
    for given in [(1,), (2,), (1, "videos")]:
        with closing(script.make_envs(script.Args(), script.Run(), *given)) as envs:
            envs.reset(seed=0)
            _, reward, *_ = envs.step(np.zeros(given[0], int))

        assert reward.tolist() == [2] * given[0]


def test_the_first_parameters_outlive_the_first_state(monkeypatch):
    """Training overwrites the state while they act in the second rollout, from step 11 on."""
    states = []
    begin = Experiment.begin
    calls = itertools.count(1)

    def begin_and_note(*inputs):
        states.append(begin(*inputs))
        return states[0]

    def wait(env, action):
        first = jax.tree.leaves(states[0].params)[0]
        while next(calls) > 10 and not first.is_deleted():
            time.sleep(0.01)
        return 1.0

    monkeypatch.setattr(Experiment, "begin", begin_and_note)
    monkeypatch.setitem(gym.registry, "Wait-v0", EnvSpec("Wait-v0", partial(Given, reward=wait)))
    state, _, _ = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(env_id="Wait-v0"))

    assert (state.opt_state[0].count == 15).all()


def test_the_programs_of_a_run_are_freed_with_it(monkeypatch):
    made = []

    class Noted(dqn_jax.DQN):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(weakref.ref(self))

    monkeypatch.setattr(dqn_jax, "Agent", Noted)
    dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    gc.collect()

    assert [agent() for agent in made] == [None]


def test_runs_evaluations_and_resumes_start_environments_apart():
    """Environment i adds i to the given seed."""
    seeds = []

    def note(seed):
        seeds.append(seed)
        return np.zeros((2, 3), np.float32), {}

    agent = make_agent(dqn_jax, dqn_jax.Args(), dqn_jax.Run(env_id="Counter-v0"))
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    rest = (np.zeros(2), np.zeros(2, bool), np.zeros(2, bool), {})
    envs = SimpleNamespace(num_envs=2, reset=note, step=lambda _: (np.zeros((2, 3)), *rest))
    for seed in (1, 2, 3):
        init_key, _, _ = jax.random.split(jax.random.PRNGKey(seed), 3)
        for step in (0, 200):
            dqn_jax.reset(envs, init_key, step)
        play_episodes(agent, dqn_jax.Run(seed=seed), params, envs, stop=[1])

    apart = np.abs(np.subtract.outer(seeds, seeds))[~np.eye(9, dtype=bool)]
    assert apart.min() > 100
    assert max(seeds) < 2**30
