"""A whole run that is stepped from Python: against a plain loop, and what it leaves in memory."""

import gc
import itertools
import time
import weakref
from functools import partial
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Given
from gymnasium.envs.registration import EnvSpec
from helpers import COUNTER, SMALL_DQN, edited, make_agent, read_events

import dqn_jax
from cleanreplay.experiment import Experiment, play_episodes

ARGS = dqn_jax.Args(total_timesteps=3_000, num_envs=8, learning_starts=600)
RUN = dqn_jax.Run(seed=2, log_interval=500, eval_episodes=0)
CHARTS = {"charts/epsilon", "charts/gradient_steps", "charts/replay_ratio"}
LOSSES = {"losses/td_loss", "losses/q_values"}


def plain_run():
    """As `train_loop` without a thread and charts: State, Steps by step, metrics by step.

    A rollout is collected with the parameters from before the last update.
    """
    agent = make_agent(dqn_jax, ARGS, RUN)
    size = agent.steps_per_iteration
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(2), 3)
    train_step = jax.jit(agent.train_step)
    state = jax.jit(agent.init)(init_key)
    params = [state.params, state.params]
    envs = dqn_jax.make_envs(ARGS, RUN, ARGS.num_envs)
    env_state = dqn_jax.reset(envs, init_key, 0)
    rollouts = {}
    metrics = {}
    for step in range(0, ARGS.total_timesteps, size):
        inputs = (params[-2], env_state, act_key, step)
        rollout, env_state = dqn_jax.collect_rollout(agent, envs, *inputs)
        state, new_params, metrics[step + size] = train_step(state, rollout, learn_key, step)
        params.append(new_params)
        rollouts[step + size] = rollout
    envs.close()
    return state, rollouts, metrics


def episodes(rollouts):
    """[(step, return), ...] of the episodes of CartPole that end in the rollouts."""
    lengths = 0
    ended = []
    for step, rollout in rollouts.items():
        for valid, done in zip(rollout.valid, rollout.terminated | rollout.truncated, strict=True):
            lengths = lengths + valid  # it pays 1 a step
            ended += [(step, length) for length in lengths[done]]
            lengths = np.where(done, 0, lengths)
    return ended


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run and a plain loop give, and the steps of the points of its charts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("run"))
        state, returns, folder = dqn_jax.train(ARGS, RUN)
    plain_state, rollouts, metrics = plain_run()
    scalars, text = read_events(folder)
    return SimpleNamespace(
        state=state,
        returns=returns,
        scalars=scalars,
        text=text,
        plain_state=plain_state,
        ended=episodes(rollouts),
        metrics=metrics,
        points=[-(-step // 40) * 40 for step in range(500, 3_001, 500)],
    )


def test_a_run_learns_what_a_plain_loop_does(run):
    """The figure at the end is the mean of the last 100 episodes."""
    jax.tree.map(np.testing.assert_array_equal, run.state, run.plain_state)
    # One gradient step per 10 steps, from the iteration on that passes learning_starts.
    assert int(run.state.opt_state[0].count) == (3_000 - 600) // 10
    assert len(run.ended) > 100
    np.testing.assert_allclose(run.returns, [np.mean([x for _, x in run.ended[-100:]])])


def test_charts_of_learning_are_of_the_iteration_that_ends_there(run):
    """There is no loss before the first gradient step."""
    for tag in CHARTS | LOSSES:
        steps = run.points if tag in CHARTS else run.points[1:]
        expected = [(x, pytest.approx(float(run.metrics[x][tag]), rel=1e-6)) for x in steps]
        assert run.scalars[tag] == expected, tag
    speed = run.scalars["charts/SPS"]
    assert [step for step, value in speed if value > 0] == run.points
    others = {"charts/SPS", "charts/episodic_return", "charts/episodic_length"}
    assert set(run.scalars) == CHARTS | LOSSES | others
    assert "|learning_starts|600|" in run.text
    assert "|env_id|CartPole-v1|" in run.text


def test_a_wrapper_works_in_training_evaluation_and_video(monkeypatch):
    used = []

    class Doubled(gym.Wrapper):
        def step(self, action):
            used.append(self.render_mode)
            observation, reward, *others = self.env.step(action)
            return observation, 2 * reward, *others

    monkeypatch.setattr(environments, "Doubled", Doubled, raising=False)
    new = "import environments\n    wrappers: list = [environments.Doubled]"
    script = edited(dqn_jax, ("wrappers: list = []", new))
    run = script.Run(log_interval=100, eval_episodes=1, capture_video=True)
    _, _, folder = script.train(script.Args(**SMALL_DQN), run)

    scalars, _ = read_events(folder)
    lengths = dict(scalars["charts/episodic_length"])
    assert dict(scalars["charts/episodic_return"]) == {x: 2 * lengths[x] for x in lengths}
    assert scalars["eval/episodic_return"][0][1] % 2 == 0
    assert set(used) == {None, "rgb_array"}
    assert len(list(folder.glob("videos/*/*.mp4"))) == 1


def test_the_first_parameters_outlive_the_first_state(monkeypatch):
    """Training overwrites the state while they act for the second rollout, from step 11 on."""
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
    """Environment i adds i to the seed that it is given."""
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
