"""A whole run: against a plain loop, with a wrapper, with settings of JAX, one after another."""

import gc
from dataclasses import replace
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Counter
from helpers import (
    COUNTER,
    SMALL_DQN,
    SMALL_PPO,
    edited,
    find_jax_env,
    make_agent,
    more,
    read_events,
)

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from dqn_jax import Args, Run, train

SCRIPTS = (dqn_jax, per_dqn_jax, ppo_jax, r2d2_jax, recurrent_ppo_jax, sac_jax)


# ------------------------------------------------------------------------------------ a whole run


SHORT = Args(total_timesteps=3_000, learning_starts=600)
SHORT_RUN = Run(log_interval=500, eval_episodes=0)
LEARNING_TAGS = {"charts/epsilon", "charts/gradient_steps", "charts/replay_ratio"}
LEARNING_TAGS |= {"losses/td_loss", "losses/q_values"}


@pytest.fixture(scope="module", params=[more(1), 8])
def two_runs(request, tmp_path_factory):
    """Args, and what two runs with the same flags gave."""
    args = replace(SHORT, num_envs=request.param)
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            patch.chdir(tmp_path_factory.mktemp("run"))
            runs.append(train(args, SHORT_RUN))
    return args, runs


def test_the_same_seed_makes_the_same_run(two_runs):
    """The same parameters, the same replay, the same events."""
    _, (first, second) = two_runs
    state, returns, folder = first
    same_state, same_returns, same_folder = second
    jax.tree.map(np.testing.assert_array_equal, state, same_state)
    np.testing.assert_array_equal(returns, same_returns)

    scalars, _ = read_events(folder)
    same_scalars, _ = read_events(same_folder)
    assert scalars.pop("charts/SPS") != same_scalars.pop("charts/SPS")
    assert scalars == same_scalars


def test_another_seed_makes_another_run(two_runs):
    args, ((state, returns, _), _) = two_runs
    other_state, other_returns, _ = train(args, replace(SHORT_RUN, seed=2))
    kernel = state.params["params"]["q_0"]["kernel"]
    assert (other_state.params["params"]["q_0"]["kernel"] != kernel).any()
    assert other_returns != returns


def plain_run(args):
    """As `train_loop` without a thread and charts: State, Steps by step, metrics by step.

    A rollout is collected with the parameters from before the last update.
    """
    agent = make_agent(dqn_jax, args, SHORT_RUN)
    size = agent.steps_per_iteration
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(1), 3)
    train_step = jax.jit(agent.train_step)
    state = jax.jit(agent.init)(init_key)
    params = [state.params, state.params]
    envs = dqn_jax.make_envs(args, SHORT_RUN, args.num_envs)
    env_state = dqn_jax.reset(envs, init_key, 0)
    rollouts = {}
    metrics = {}
    for step in range(0, args.total_timesteps, size):
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
def run(two_runs):
    """The first of two runs, what a plain loop gives, and the steps of the points of its charts."""
    args, ((state, returns, folder), _) = two_runs
    plain_state, rollouts, metrics = plain_run(args)
    size = np.lcm(args.num_envs, 10)
    return SimpleNamespace(
        state=state,
        returns=returns,
        folder=folder,
        plain_state=plain_state,
        ended=episodes(rollouts),
        metrics=metrics,
        steps_per_iteration=size,
        points=[-(-step // size) * size for step in range(500, 3_001, 500)],
    )


def test_a_run_learns_what_a_plain_loop_does(run):
    jax.tree.map(np.testing.assert_array_equal, run.state, run.plain_state)
    # One gradient step per 10 steps, from the iteration on that passes learning_starts.
    assert int(run.state.opt_state[0].count) == (3_000 - 600) // 10
    # The figure at the end: the mean of the last 100 episodes.
    assert len(run.ended) > 100
    last_returns = [total for _, total in run.ended[-100:]]
    np.testing.assert_allclose(run.returns, [np.mean(last_returns)])


def test_charts_of_episodes_have_the_means_of_those_since_the_last_point(run):
    scalars, _ = read_events(run.folder)
    charted = scalars["charts/episodic_return"]
    assert [step for step, _ in charted] == run.points
    begin = 0
    for end, mean in charted:
        returns = [total for step, total in run.ended if begin < step <= end]
        assert mean == pytest.approx(np.mean(returns))
        begin = end
    assert scalars["charts/episodic_length"] == charted  # CartPole pays 1 a step


def test_charts_of_learning_are_of_the_iteration_that_ends_there(run):
    """And the flags are there as a text."""
    scalars, text = read_events(run.folder)
    for tag in LEARNING_TAGS:
        wanted = []
        for step in run.points:
            learned = run.metrics[step]["charts/gradient_steps"] > 0
            if learned or tag.startswith("charts/"):
                wanted.append((step, pytest.approx(float(run.metrics[step][tag]), rel=1e-6)))
        assert scalars[tag] == wanted, tag
    assert len(scalars["losses/td_loss"]) == 5

    speed = scalars["charts/SPS"]
    assert [step for step, value in speed if value > 0] == run.points
    others = {"charts/SPS", "charts/episodic_return", "charts/episodic_length"}
    assert set(scalars) == LEARNING_TAGS | others
    assert "|learning_starts|600|" in text
    assert "|env_id|CartPole-v1|" in text


# ------------------------------------------------------------------------------- what a user edits


@pytest.fixture
def wrapped(monkeypatch):
    """A copy of dqn_jax.py with a wrapper that doubles rewards, and says where it was used."""
    used = []

    class Doubled(gym.Wrapper):
        def step(self, action):
            used.append(self.render_mode)
            observation, reward, *others = self.env.step(action)
            return observation, 2 * reward, *others

    monkeypatch.setattr(environments, "Doubled", Doubled, raising=False)
    new = "import environments\n    wrappers: list = [environments.Doubled]"
    return edited(dqn_jax, ("wrappers: list = []", new)), used


def test_a_wrapper_in_make_envs_works_in_training_evaluation_and_video(wrapped):
    script, used = wrapped
    args = script.Args(total_timesteps=600, num_envs=4, learning_starts=300)
    run = script.Run(log_interval=200, eval_episodes=1, capture_video=True)
    _, _, folder = script.train(args, run)
    scalars, _ = read_events(folder)
    returns = dict(scalars["charts/episodic_return"])
    lengths = dict(scalars["charts/episodic_length"])
    assert returns == {step: 2 * length for step, length in lengths.items()}
    assert scalars["eval/episodic_return"][0][1] % 2 == 0
    assert set(used) == {None, "rgb_array"}
    assert len(list(folder.glob("videos/*/*.mp4"))) == 1


def test_a_wrapped_environment_in_jax_trains_in_the_ordinary_loop(wrapped):
    script, used = wrapped
    args = script.Args(total_timesteps=400, num_envs=2, learning_starts=200)
    run = script.Run(env_id="phys2d/CartPole-v1", eval_episodes=0, checkpoint_interval=0)
    assert find_jax_env(dqn_jax, args, run) is not None
    assert find_jax_env(script, args, run) is None
    script.train(args, run)
    assert len(used) > 300  # and resets


# --------------------------------------------------------------------------------- JAX's settings


FAST_FLAGS = {
    dqn_jax: dict(learning_starts=128, num_envs=2),
    per_dqn_jax: dict(learning_starts=128, num_envs=2),
    ppo_jax: dict(num_steps=64, num_envs=2),
    r2d2_jax: dict(learning_starts=128, num_envs=2),
    recurrent_ppo_jax: dict(num_steps=64, sequence_length=16, num_envs=2),
    sac_jax: dict(learning_starts=256),
}
TINY = dict(log_interval=128, eval_episodes=1, eval_max_steps=50)


def assert_learned(folder):
    scalars, _ = read_events(folder)
    losses = [values for tag, values in scalars.items() if tag.startswith("losses/")]
    assert losses
    assert np.isfinite([value for values in losses for _, value in values]).all()


@pytest.mark.more
@pytest.mark.parametrize("compiled", [False, True], ids=["ordinary", "compiled"])
@pytest.mark.parametrize("module", SCRIPTS)
def test_settings_of_jax_end_no_run(module, compiled):
    phys2d, other = "phys2d/CartPole-v1", "CartPole-v1"
    if module is sac_jax:
        phys2d, other = "phys2d/Pendulum-v0", "Pendulum-v1"
    run = module.Run(env_id=phys2d if compiled else other, checkpoint_interval=0, **TINY)
    settings = ("jax_debug_nans", "jax_enable_x64")
    for setting in settings:
        jax.config.update(setting, True)
    try:
        _, _, folder = module.train(module.Args(total_timesteps=384, **FAST_FLAGS[module]), run)
    finally:
        for setting in settings:
            jax.config.update(setting, False)
    assert_learned(folder)


@pytest.mark.more
def test_programs_and_arrays_of_a_run_go_when_it_is_over():
    def count():
        gc.collect()
        (client,) = {device.client for device in jax.devices()}
        return len(client.live_executables()), len(jax.live_arrays())

    counts = []
    for seed in range(3):
        dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER, seed=seed))
        ppo_jax.train(ppo_jax.Args(**SMALL_PPO), ppo_jax.Run(**COUNTER, seed=seed))
        counts.append(count())
    assert counts[2] <= counts[1]


@pytest.mark.more
def test_each_run_evaluation_and_resume_has_environments_of_its_own():
    seeds = []

    class Seeds(Counter):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    gym.register("Seeds-v0", Seeds)
    try:
        for seed in (1, 2, 3):
            args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2))
            run = dqn_jax.Run(env_id="Seeds-v0", seed=seed, log_interval=100, eval_episodes=3)
            _, _, folder = dqn_jax.train(args, run)
            longer = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2, total_timesteps=300))
            run = dqn_jax.Run(**vars(run) | dict(resume=str(folder), eval_episodes=0))
            dqn_jax.train(longer, run)
    finally:
        del gym.registry["Seeds-v0"]
    assert len(seeds) == len(set(seeds)) == 3 * (2 + 3 + 2)
