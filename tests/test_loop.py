"""What is common to all scripts: environments, the collector against environments stepped alone, a
whole run against a plain loop, log entries, wrappers, the sketch of the loop, JAX's settings.
"""

import gc
import inspect
import os
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import COUNTER, SMALL_DQN, SMALL_PPO, slow
from environments import Counter
from events import read_events
from test_dqn import linear, random_rollout

import checkpoints
import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import sac_jax
from dqn_jax import Args, Run, Step, train

SCRIPTS = (dqn_jax, per_dqn_jax, ppo_jax, r2d2_jax, sac_jax)


# ----------------------------------------------------------------------------------- environments


def is_native(envs):
    """Whether it is a vector version of the environment, and not single ones."""
    if not isinstance(envs, gym.vector.SyncVectorEnv):
        return True
    return not isinstance(envs.envs[0], gym.Wrapper)


@pytest.mark.parametrize(
    ("env_id", "flags", "native_from", "shape", "reward"),
    [
        ("Counter-v0", {}, None, (3,), 1),  # there is no native one
        ("CartPole-v1", {}, 4, (4,), 1),
        ("CartPole-v1", {"env_kwargs": '{"sutton_barto_reward": true}'}, 4, (4,), 0),
        ("CartPole-v1", {"vectorization": "sync"}, None, (4,), 1),
        ("VectorOnly-v0", {}, 1, (3,), 1),  # there is no other
        ("Preprocessed-v0", {}, 1, (2,), 1),  # the native one observes something else
        ("TakesKwargs-v0", {}, 1, (3,), 1),
        # The native one does not take it.
        ("TakesKwargs-v0", {"env_kwargs": '{"scale": 3}', "vectorization": "sync"}, None, (3,), 3),
        ("Image-v0", {"env_kwargs": '{"shape": [9, 10, 3]}'}, None, (9, 10, 3), None),
        ("environments:Start-v0", {}, None, (1,), None),
        # Functional: in the native one all others stand still where one resets.
        ("phys2d/CartPole-v1", {"vectorization": "sync"}, None, (4,), None),
    ],
)
def test_the_environment_is_the_same_at_any_number_of_them(
    env_id, flags, native_from, shape, reward
):
    run = Run(env_id=env_id, **flags)
    for n in (1, 2, 4, 8):
        envs = dqn_jax.make_envs(Args(), run, n)
        assert envs.num_envs == n
        assert envs.single_observation_space.shape == shape
        assert is_native(envs) == (native_from is not None and n >= native_from), n
        if reward is not None:
            envs.reset(seed=0)
            _, rewards, *_ = envs.step(envs.action_space.sample())
            np.testing.assert_array_equal(rewards, [reward] * n)
        envs.close()


@pytest.mark.parametrize(("log_interval", "is_longer"), [(399, True), (400, False)])
def test_an_iteration_longer_than_the_log_interval_is_said(log_interval, is_longer, capsys):
    args = Args(num_envs=4, train_frequency=400, total_timesteps=800, learning_starts=400)
    _, _, folder = train(args, Run(log_interval=log_interval, eval_episodes=0))
    assert ("each log entry, has 400 steps" in capsys.readouterr().out) == is_longer
    scalars, _ = read_events(folder)
    assert [step for step, _ in scalars["charts/epsilon"]] == [400, 800]


# ------------------------------------------------------------------------------------ the collector


def collect(alg, envs, params, key, count, seed):
    """Rollouts, `env_state` before and after each, and numbers of the charts."""
    observation, _ = envs.reset(seed=seed)
    n = envs.num_envs
    states = [(observation, (), np.ones(n, bool), np.zeros((2, n)))]
    rollouts = []
    charts = defaultdict(list)
    for i in range(count):
        step = i * alg.steps_per_iteration
        rollout, state, new = dqn_jax.collect_rollout(alg, envs, params, states[-1], key, step)
        rollouts.append(rollout)
        states.append(state)
        for tag, numbers in new.items():
            charts[tag] += numbers
    envs.close()
    return rollouts, states, charts


def alone(seed, actions):
    """The steps of one Counter that is reset by hand, and what each led to."""
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
    """Five rollouts [6, 3] of Counter with exploration, and one of all their steps."""
    args = Args(num_envs=3, train_frequency=18, start_e=0.5, end_e=0.5)
    alg = linear(dqn_jax, args, features=3, num_actions=3)
    assert alg.rollout_shape == (6, 3)
    params = jnp.asarray(np.random.default_rng(0).normal(size=9), jnp.float32)
    key = jax.random.PRNGKey(0)
    envs = dqn_jax.make_envs(alg.args, Run(env_id="Counter-v0"), 3)
    rollouts, states, _ = collect(alg, envs, params, key, count=5, seed=5)
    steps = jax.tree.map(lambda *x: np.concatenate(x), *rollouts)
    observations = np.concatenate([steps.observation, states[-1][0][None]])
    explored = [alg.act(params, x, (), key, 3 * t)[0] for t, x in enumerate(steps.observation)]
    return SimpleNamespace(
        rollouts=rollouts,
        states=states,
        steps=steps,
        next_observations=observations[1:],
        greedy=(steps.observation @ np.asarray(params).reshape(3, 3)).argmax(-1),
        explored=np.stack(explored),
    )


def test_collected_arrays_have_the_dtypes_of_a_step(counters):
    for rollout in counters.rollouts:
        arrays = {name: x for name, x in rollout._asdict().items() if name != "memory"}
        assert {name: x.dtype for name, x in arrays.items()} == {
            "observation": np.float32,
            "action": np.int32,
            "reward": np.float32,
            "terminated": bool,
            "truncated": bool,
            "valid": bool,
        }


def test_a_rollout_begins_where_the_last_one_ended(counters):
    for (observation, *_), rollout in zip(counters.states[:-1], counters.rollouts, strict=True):
        np.testing.assert_array_equal(observation, rollout.observation[0])


def test_collected_actions_are_those_of_act_at_their_steps(counters):
    np.testing.assert_array_equal(counters.steps.action, counters.explored)
    assert 0.4 < np.mean(counters.steps.action == counters.greedy) < 0.9


def test_the_step_after_an_end_only_resets(counters):
    """Also over the bounds of rollouts; its reward is 0."""
    steps = counters.steps
    done = steps.terminated | steps.truncated
    assert steps.valid[0].all()
    np.testing.assert_array_equal(steps.valid[1:], ~done[:-1])
    np.testing.assert_array_equal(counters.states[-1][2], ~done[-1])
    assert (steps.reward[~steps.valid] == 0).all()
    begins_with_a_reset = [~valid for _, _, valid, _ in counters.states[:-1]]
    np.testing.assert_array_equal(begins_with_a_reset, np.outer([0, 1, 0, 0, 1], [1, 1, 1]))


def test_collected_steps_are_those_of_environments_stepped_alone(counters):
    """All of every step, over rollouts."""
    for i in range(3):
        every_step = [jax.tree.map(lambda x, t=t, i=i: x[t, i], counters.steps) for t in range(30)]
        steps = [step for step in every_step if step.valid]
        assert sum(step.terminated for step in steps) > 1
        assert sum(step.truncated for step in steps) > 1
        wanted = alone(5 + i, [step.action for step in steps])
        next_observations = counters.next_observations[counters.steps.valid[:, i], i]
        for got, after, (step, wanted_after) in zip(steps, next_observations, wanted, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, step)
            np.testing.assert_array_equal(after, wanted_after)


def test_collector_counts_the_episodes_of_counter():
    """They last 2, 3, 4, 5, 2, ... steps, with rewards 1, 2, ...; a step between them resets."""
    alg = linear(dqn_jax, Args(num_envs=2, train_frequency=10), features=3, num_actions=3)
    envs = dqn_jax.make_envs(alg.args, Run(env_id="Counter-v0"), 2)
    _, states, scalars = collect(alg, envs, jnp.zeros(9), None, count=5, seed=0)
    assert scalars["charts/episodic_length"] == [2, 2, 3, 3, 4, 4, 5, 5, 2, 2, 3, 3]
    assert scalars["charts/episodic_return"] == [3, 3, 6, 6, 10, 10, 15, 15, 3, 3, 6, 6]
    # They end at step 2, 6, 11, 17, 20 and 24.
    returns = [unfinished[0, 0] for *_, unfinished in states]
    lengths = [unfinished[1, 0] for *_, unfinished in states]
    assert returns == [0, 3, 6, 6, 0, 0]
    assert lengths == [0, 2, 3, 3, 0, 0]


@pytest.mark.parametrize("num_envs", [2, 4])
def test_cartpole_is_collected_without_a_loss(num_envs):
    """Its reward is 1 a step; the observation after the last one is out of bounds.

    Four or more are a native vector version; fewer ones write over what they observed.
    """
    steps = 1_600 // num_envs
    args = Args(num_envs=num_envs, train_frequency=num_envs * steps, end_e=1.0)
    alg = linear(dqn_jax, args, features=4)
    envs = dqn_jax.make_envs(alg.args, Run(), num_envs)
    assert is_native(envs) == (num_envs == 4)

    key = jax.random.PRNGKey(0)
    (rollout,), (_, (last, *_)), _ = collect(alg, envs, jnp.zeros(8), key, count=1, seed=0)

    valid = rollout.valid
    np.testing.assert_array_equal(rollout.reward, valid)
    done = (rollout.terminated | rollout.truncated)[:-1]
    assert done.sum() > 20
    np.testing.assert_array_equal(valid[1:], ~done)
    position, _, angle, _ = np.abs(rollout.observation[1:][done]).T
    assert ((angle > 0.2094) | (position > 2.4)).all()
    # Position and angle move on by 0.02 s times their speeds.
    next_observation = np.concatenate([rollout.observation[1:], last[None]])
    moved = rollout.observation[..., [0, 2]] + 0.02 * rollout.observation[..., [1, 3]]
    after = next_observation[..., [0, 2]]
    np.testing.assert_allclose(after[valid], moved[valid], rtol=1e-4, atol=1e-6)


class Replayed:
    """A vector environment that gives the steps of a rollout."""

    def __init__(self, rollout):
        self.rows = iter(zip(*rollout[:6], strict=True))

    def step(self, actions):
        observation, _, reward, terminated, truncated, _ = next(self.rows)
        return observation, reward, terminated, truncated, {}


def test_episodes_are_counted_as_in_a_plain_loop():
    """Across rollouts, with what is returned for a reset left out."""
    n = 4
    alg = linear(dqn_jax, Args(num_envs=n, train_frequency=6 * n))
    rng = np.random.default_rng(2)
    resetting = np.zeros(n, bool)
    state = (np.zeros((n, 1)), (), ~resetting, np.zeros((2, n)))
    totals = np.zeros((2, n))
    episodes = []
    counted = []
    for _ in range(30):
        rollout, resetting = random_rollout(rng, 6, resetting, garbage=1e6)
        rollout = rollout._replace(reward=np.round(8 * rollout.reward))  # exact sums
        envs = Replayed(rollout)
        got, state, charts = dqn_jax.collect_rollout(alg, envs, jnp.zeros(2), state, None, 0)
        np.testing.assert_array_equal(got.valid, rollout.valid)
        for t in range(6):
            totals += np.where(rollout.valid[t], [rollout.reward[t], np.ones(n)], 0)
            for i in np.flatnonzero(rollout.terminated[t] | rollout.truncated[t]):
                episodes.append(tuple(totals[:, i]))
                totals[:, i] = 0
        counted += zip(*charts.values(), strict=True)
        np.testing.assert_array_equal(state[-1], totals)
    assert len(episodes) > 100
    assert counted == episodes


class Amounts(gym.Env):
    """Observes integers beyond int32, and pays 1 if the action is 1."""

    observation_space = gym.spaces.Box(0, 2**50, (1,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        return np.array([2**40 + 5]), {}

    def step(self, action):
        return np.array([2**40 + 5]), float(action), False, True, {}


def test_large_integers_are_the_same_numbers_for_acting_and_learning():
    gym.register("Amounts-v0", Amounts)
    args = Args(num_envs=2, train_frequency=8, batch_size=2, learning_starts=2)
    run = Run(env_id="Amounts-v0", eval_episodes=1)
    alg, _ = dqn_jax.make_algorithm(args, run)
    seen = []

    def act(params, observation, memory, *_):
        seen.append(observation)
        return np.ones(len(observation)), memory

    alg.act = act
    envs = dqn_jax.make_envs(args, run, 2)
    (rollout,), _, _ = collect(alg, envs, None, None, count=1, seed=0)
    dqn_jax.evaluate(alg, run, None, 1)
    for observation in (*seen, *rollout.observation):
        assert observation.dtype == np.float32
        np.testing.assert_array_equal(observation, np.float32(2**40 + 5))


def test_a_log_entry_has_means_of_what_was_counted_since_the_last_one(tmp_path):
    """And no chart of episodes if none ended, and no loss if nothing was learned."""
    log = dqn_jax.Log(tmp_path, {"total_timesteps": 1_000})
    log.scalars["charts/episodic_return"] += [1.0, 2.0, 6.0]
    log.scalars["charts/episodic_length"] += [4.0, 4.0, 7.0]
    log.add_metrics(100, {"losses/td_loss": 0.5, "charts/gradient_steps": 2})
    log.add_metrics(200, {"losses/td_loss": 0.0, "charts/gradient_steps": 0})
    log.scalars["charts/episodic_return"] += [10.0] * 99
    log.add_metrics(300, {"charts/nothing": np.nan})
    log.writer.close()

    scalars, _ = read_events(tmp_path)
    speed = scalars.pop("charts/SPS")
    assert [step for step, value in speed if value > 0] == [100, 200, 300]
    assert scalars == {
        "losses/td_loss": [(100, 0.5)],
        "charts/gradient_steps": [(100, 2), (200, 0)],
        "charts/episodic_return": [(100, 3), (300, 10)],
        "charts/episodic_length": [(100, 5)],
    }
    assert list(log.recent_returns) == [6, *[10] * 99]


# ------------------------------------------------------------------------------------ a whole run


SHORT = Args(total_timesteps=3_000, learning_starts=600)
SHORT_RUN = Run(log_interval=500, eval_episodes=0)
LEARNING_TAGS = {"charts/epsilon", "charts/gradient_steps", "charts/replay_ratio"}
LEARNING_TAGS |= {"losses/td_loss", "losses/q_values"}


@pytest.fixture(scope="module", params=[slow(1), 8])
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
    kernel = state.params["params"]["Dense_0"]["kernel"]
    assert (other_state.params["params"]["Dense_0"]["kernel"] != kernel).any()
    assert other_returns != returns


def plain_run(args):
    """As `train` without a thread and charts: State, episodes [(step, return)], metrics by step.

    A rollout is collected with the parameters from before the last update.
    """
    alg, _ = dqn_jax.make_algorithm(args, SHORT_RUN)
    size = alg.steps_per_iteration
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(1), 3)
    train_step = jax.jit(alg.train_step)
    state = jax.jit(alg.init)(init_key)
    params = [state.params, state.params]
    envs = dqn_jax.make_envs(args, SHORT_RUN, args.num_envs)
    observation, _ = envs.reset(seed=int(jax.random.fold_in(init_key, 0)[0]) // 4)
    env_state = (observation, (), np.ones(args.num_envs, bool), np.zeros((2, args.num_envs)))
    ended = []
    metrics = {}
    for step in range(0, args.total_timesteps, size):
        inputs = (params[-2], env_state, act_key, step)
        rollout, env_state, charts = dqn_jax.collect_rollout(alg, envs, *inputs)
        inputs = (rollout, env_state[0], learn_key, step)
        state, new_params, metrics[step + size] = train_step(state, *inputs)
        params.append(new_params)
        ended += [(step + size, total) for total in charts["charts/episodic_return"]]
    envs.close()
    return state, ended, metrics


@pytest.fixture(scope="module")
def run(two_runs):
    """The first of two runs, what a plain loop gives, and the steps of the points of its charts."""
    args, ((state, returns, folder), _) = two_runs
    plain_state, ended, metrics = plain_run(args)
    size = np.lcm(args.num_envs, 10)
    return SimpleNamespace(
        state=state,
        returns=returns,
        folder=folder,
        plain_state=plain_state,
        ended=ended,
        metrics=metrics,
        steps_per_iteration=size,
        points=[-(-step // size) * size for step in range(500, 3_001, 500)],
    )


def test_a_run_learns_what_a_plain_loop_does(run):
    jax.tree.map(np.testing.assert_array_equal, run.state, run.plain_state)
    # One gradient step per 10 steps, from the iteration on that passes learning_starts.
    updates = (3_000 - 600) // 10
    assert int(run.state.num_updates) == int(run.state.opt_state[0].count) == updates
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


def edited(module, old, new):
    """A copy of a script in which one text was replaced."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    copy = ModuleType("edited")
    copy.__file__ = module.__file__
    sys.modules["edited"] = copy
    exec(compile(source.replace(old, new), module.__file__, "exec"), copy.__dict__)
    return copy


WRAPPED = "wrappers: list = [environments.Doubled]"


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
    copy = edited(dqn_jax, "wrappers: list = []", "import environments\n    " + WRAPPED)
    yield copy, used
    del sys.modules["edited"]


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
    assert dqn_jax.make_algorithm(args, run)[1]
    assert not script.make_algorithm(args, run)[1]
    script.train(args, run)
    assert len(used) > 300  # and resets


CALLS = {  # how the loop of `train` calls what the sketch names
    "train_step": "submit(train_step,",
    "add_metrics": ".add_metrics(",
    "save": ".save(",
    "evaluate_agent": "evaluate_agent(",
}


@pytest.mark.parametrize("module", SCRIPTS)
def test_the_sketch_names_functions_in_the_order_of_train(module):
    sketch = module.__doc__[module.__doc__.index("    for each iteration:") :].split("\n\n")[0]
    calls = re.findall(r"(\w+)\((.*)\)", sketch)
    (when_due,) = re.findall("when due: (.*)", sketch)
    names = [name for name, _ in calls] + re.findall(r"# (\w+)$", sketch, re.M)
    owners = (module, module.Algorithm, module.Log, checkpoints.Checkpoints, gym.vector.VectorEnv)
    for name in names + when_due.split(", "):
        assert any(hasattr(owner, name) for owner in owners), name
    for name, arguments in calls:
        if hasattr(module.Algorithm, name):
            signature = inspect.signature(getattr(module.Algorithm, name))
            assert ["self", *arguments.split(", ")] == list(signature.parameters), name

    collects = "ahead = collect(" if module.Algorithm.collects_while_learning else "or collect("
    wanted = CALLS | {"collect_rollout": collects}
    loop = inspect.getsource(module.train).partition("for step in range")[2]
    in_train = sorted(wanted, key=lambda name: loop.index(wanted[name]))
    assert [word for word in re.findall(r"\w+", sketch) if word in wanted] == in_train
    collector = inspect.getsource(module.collect_rollout)
    assert sketch.index("act(") < sketch.index("envs.step(")
    assert collector.index("alg.act(") < collector.index("envs.step(")


# --------------------------------------------------------------------------------- JAX's settings


FAST_FLAGS = {
    dqn_jax: dict(learning_starts=128, num_envs=2),
    per_dqn_jax: dict(learning_starts=128, num_envs=2),
    ppo_jax: dict(num_steps=64, num_envs=2),
    r2d2_jax: dict(learning_starts=128, num_envs=2),
    sac_jax: dict(learning_starts=256),
}
TINY = dict(log_interval=128, eval_episodes=1, eval_max_steps=50)


def assert_learned(folder):
    scalars, _ = read_events(folder)
    losses = [values for tag, values in scalars.items() if tag.startswith("losses/")]
    assert losses
    assert np.isfinite([value for values in losses for _, value in values]).all()


@pytest.mark.parametrize(
    ("module", "setting"),
    [
        slow(dqn_jax, "JAX_DEBUG_NANS"),
        (per_dqn_jax, "JAX_DEBUG_NANS"),
        slow(ppo_jax, "JAX_DEBUG_NANS"),
        slow(r2d2_jax, "JAX_DEBUG_NANS"),
        slow(sac_jax, "JAX_DEBUG_NANS"),
        (dqn_jax, "JAX_ENABLE_X64"),
        slow(per_dqn_jax, "JAX_ENABLE_X64"),
        slow(ppo_jax, "JAX_ENABLE_X64"),
        slow(r2d2_jax, "JAX_ENABLE_X64"),
        slow(sac_jax, "JAX_ENABLE_X64"),
    ],
)
def test_a_setting_of_jax_ends_no_run(module, setting, tmp_path):
    flags = TINY | FAST_FLAGS[module] | {"total_timesteps": 384}
    texts = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    subprocess.run(
        [sys.executable, module.__file__, *texts], env=os.environ | {setting: "1"}, check=True
    )
    (folder,) = tmp_path.glob("runs/*")
    assert_learned(folder)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_enable_x64"])
@pytest.mark.parametrize("module", SCRIPTS)
def test_a_setting_of_jax_ends_no_compiled_run(module, setting):
    env_id = "phys2d/Pendulum-v0" if module is sac_jax else "phys2d/CartPole-v1"
    run = module.Run(env_id=env_id, checkpoint_interval=0, **TINY)
    jax.config.update(setting, True)
    try:
        _, _, folder = module.train(module.Args(total_timesteps=384, **FAST_FLAGS[module]), run)
    finally:
        jax.config.update(setting, False)
    assert_learned(folder)


@pytest.mark.slow
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
