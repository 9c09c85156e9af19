"""Compiled training in all three scripts: against plain loops, agents trained alone, one device,
and known values.
"""

import contextlib
import io
import math
import re
import shutil
import signal
import types
from dataclasses import replace
from pathlib import Path

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.experimental.functional import FuncEnv
from helpers import edited, find_jax_env, make_agent, make_trainer, more, one_line, read_events

import dqn_jax
import per_dqn_jax
import ppo_jax
from cleanreplay import checkpoints, compiled, disk, load_policy, read_flags
from cleanreplay.compiled import JaxEnvs, RunnerState
from cleanreplay.sweep import Sweep
from dqn_jax import DQN, Step

GAMMA = 0.8
DQN_FLAGS = dict(
    adam_epsilon=1e-2,  # with less, Adam makes large steps of the rounding of small gradients
    total_timesteps=16_000,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    num_envs=4,
    target_network_frequency=40,
    learning_rate=1e-3,
    gamma=GAMMA,
    end_e=1.0,
)
PPO_FLAGS = dict(num_envs=4, num_steps=32, gamma=GAMMA, learning_rate=3e-3, ent_coef=0.0)
SCRIPTS = [(dqn_jax, DQN_FLAGS), (per_dqn_jax, DQN_FLAGS), (ppo_jax, PPO_FLAGS)]
IDS = ["dqn", "per_dqn", "ppo"]
GROUPS = [more(0), more(1), 2]


# ------------------------------------------------------------------------------------ environments


class Walk(FuncEnv):
    """A walk from 1, 2 or 3 on, with actions -1, 0 and 1 and slips, that ends below 0 or above 4.

    Everything that may be random is; the observation shows the position and a random number.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3, start=-1)

    def initial(self, rng, params=None):
        return jax.random.randint(rng, (), 1, 4)

    def transition(self, state, action, rng, params=None):
        return state + action + jax.random.randint(rng, (), -1, 2)

    def observation(self, state, rng, params=None):
        return jnp.stack([state.astype(jnp.float32), jax.random.uniform(rng)])

    def reward(self, state, action, next_state, rng, params=None):
        return 10.0 * state + next_state + jax.random.uniform(rng)

    def terminal(self, state, rng, params=None):
        return (state < 0) | (state > 4)


def make_walk(n):
    """DQN for the walk, its environments with a time limit of 6 steps, and params to act with."""
    args = dqn_jax.Args(num_envs=n, train_frequency=25 * n, start_e=0.5, end_e=0.5)
    agent = DQN(args, Walk.observation_space, Walk.action_space)
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    shapes, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.PRNGKey(0), len(shapes))
    drawn = [jax.random.normal(key, x.shape) for key, x in zip(keys, shapes, strict=True)]
    params = jax.tree.unflatten(structure, drawn)  # answers that differ
    return agent, JaxEnvs(agent, Walk(), 6), params


INITIAL = jax.jit(Walk().initial)
TRANSITION = jax.jit(Walk().transition)
OBSERVATION = jax.jit(Walk().observation)
REWARD = jax.jit(Walk().reward)
TERMINAL = jax.jit(Walk().terminal)


class Loop:
    """What `JaxEnvs` does, for one environment after the other."""

    def __init__(self, agent, key, n):
        self.agent = agent
        keys = jax.random.split(key, n)
        self.state = [INITIAL(key) for key in keys]
        self.observation = [np.asarray(OBSERVATION(*x)) for x in zip(self.state, keys, strict=True)]
        self.length = [0] * n
        self.valid = [True] * n

    def step_one(self, i, action, key):
        """A step of environment i: its row, with what the action led to."""
        row = dict(
            observation=self.observation[i],
            action=action,
            reward=0.0,
            terminated=False,
            truncated=False,
            valid=self.valid[i],
        )
        if self.valid[i]:
            before = self.state[i]
            self.state[i] = TRANSITION(before, action - 1, key)
            self.length[i] += 1
            row["reward"] = REWARD(before, action - 1, self.state[i], key)
            row["terminated"] = bool(TERMINAL(self.state[i], key))
            row["truncated"] = self.length[i] == 6 and not row["terminated"]
        else:
            self.state[i] = INITIAL(key)
            self.length[i] = 0
        self.valid[i] = not (row["terminated"] or row["truncated"])
        self.observation[i] = np.asarray(OBSERVATION(self.state[i], key))
        return row

    def collect(self, params, env_keys, act_key=None, step=0):
        """The rows [S][N] of a rollout with the keys [S, N] of the environments."""
        rows = []
        for t, keys in enumerate(env_keys):
            observation = np.stack(self.observation)
            now = step + t * len(keys)
            actions = np.asarray(self.agent.act(params, observation, act_key, now))
            row = [self.step_one(i, action, keys[i]) for i, action in enumerate(actions)]
            rows.append(row)
        return rows


def test_collected_is_what_a_plain_loop_collects():
    """Over three rollouts, with starts, a time limit, both ends of an episode and exploration."""
    n = 3
    agent, envs, params = make_walk(n)
    key = jax.random.PRNGKey(0)
    state = envs.reset(key, n)
    loop = Loop(agent, key, n)
    terminated = truncated = resets = 0
    collect = jax.jit(envs.collect)
    for i in range(3):
        key = jax.random.PRNGKey(i)
        step = 75 * i
        state, (rollout, _) = collect(state, params, key, step)
        act_key, env_key = jax.random.split(key)
        rows = loop.collect(params, jax.random.split(env_key, (25, n)), act_key, step)

        for name in Step._fields:
            got = getattr(rollout, name)
            wanted = [[step[name] for step in row] for row in rows]
            np.testing.assert_array_equal(got, np.array(wanted, got.dtype), err_msg=name)
            assert got.dtype == getattr(agent.example_step, name).dtype, name
        np.testing.assert_array_equal(state.observation, loop.observation)
        np.testing.assert_array_equal(state.valid, loop.valid)
        np.testing.assert_array_equal(state.length, loop.length)

        terminated += rollout.terminated.sum()
        truncated += rollout.truncated.sum()
        resets += (~rollout.valid).sum()
        assert len(np.unique(rollout.action)) > 1
    assert min(terminated, truncated, resets) > 8


def test_evaluation_is_what_a_plain_loop_gives():
    """The return of the first episode in each environment, with the best actions."""
    n = 12
    agent, envs, params = make_walk(n)
    key = jax.random.PRNGKey(5)
    loop = Loop(agent, jax.random.fold_in(key, 0), n)
    rows = loop.collect(params, jax.random.split(key, (6, n)))
    returns = np.zeros(n)
    ended = np.zeros(n, bool)
    counted = 0
    for row in rows:
        for i in np.flatnonzero(~ended):
            returns[i] += row[i]["reward"]
            ended[i] = row[i]["terminated"] or row[i]["truncated"]
            counted += 1
    assert ended.all()
    assert n < counted < 6 * n  # some end before the time limit
    got, over, _ = envs.evaluate(params, n, key, 30_000)
    np.testing.assert_allclose(got, returns, rtol=1e-6)
    assert over.all()


def test_an_evaluation_without_a_time_limit_ends():
    """Of an episode that never ends, the rewards of the first steps are the return."""

    class Endless(environments.Chain):
        def reward(self, state, action, next_state, rng, params=None):
            return jnp.float32(0.5)

        def terminal(self, state, rng, params=None):
            return jnp.bool_(False)

    agent = DQN(dqn_jax.Args(), Endless.observation_space, Endless.action_space)
    envs = JaxEnvs(agent, Endless(), None)
    assert envs.time_limit == np.iinfo(np.int32).max
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    returns, over, _ = envs.evaluate(params, 2, jax.random.PRNGKey(0), 3_000)
    np.testing.assert_array_equal(returns, [1_500, 1_500])
    assert not over.any()


def test_environments_draw_afresh():
    """No two episodes, and no two environments, start alike; the last observation is true."""
    run = dqn_jax.Run(env_id="phys2d/CartPole-v1")
    args = dqn_jax.Args(num_envs=4, train_frequency=400, end_e=1.0)
    trainer = make_trainer(dqn_jax, args, run)
    agent, envs = trainer.agent, trainer.envs
    state = envs.reset(jax.random.PRNGKey(0), 4)
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    after, (rollout, _) = envs.collect(state, params, jax.random.PRNGKey(1), 0)

    following = np.concatenate([rollout.observation[1:], after.observation[None]])
    starts = np.concatenate([state.observation, following[~rollout.valid]])
    assert len(starts) > 20
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert (np.abs(starts) <= 0.05).all()
    angles_at_the_end = following[..., 2][rollout.terminated]
    assert (np.abs(angles_at_the_end) > 0.2094).all()


def test_what_is_not_functional_as_registered_is_stepped_ordinarily(capsys):
    """The wrappers of a registration are kept, and one line says why nothing is compiled."""
    args = ppo_jax.Args(num_steps=4)
    run = ppo_jax.Run(env_id="ChainWrapped-v0")
    assert find_jax_env(ppo_jax, args, run) is None
    (line,) = capsys.readouterr().out.splitlines()
    said = "ChainWrapped-v0 is not compiled, because of its wrappers: <TimeAwareObservation"
    assert line.startswith(said)
    agent = make_agent(ppo_jax, args, run)
    assert agent.example_step.observation.shape == (6,)
    for count in ("num_seeds", "num_devices"):
        with pytest.raises(ppo_jax.UsageError, match=said):
            ppo_jax.train(args, replace(run, **{count: 2}))


@pytest.mark.more
def test_an_end_that_is_a_number_is_an_end():
    run = dqn_jax.Run(env_id="ChainOfNumbers-v0")
    args = dqn_jax.Args(num_envs=2, train_frequency=16)
    envs = make_trainer(dqn_jax, args, run).envs
    envs.agent.act = lambda params, observation, *_: jnp.ones(2, jnp.int32)  # to the right
    state = envs.reset(jax.random.PRNGKey(1), 2)
    _, (rollout, _) = envs.collect(state, None, jax.random.PRNGKey(2), 0)
    assert np.flatnonzero(rollout.terminated[:, 0]).tolist() == [3]
    assert np.flatnonzero(~rollout.valid[:, 0]).tolist() == [4]


def test_ordinary_training_loses_no_step_when_another_environment_resets():
    """As it would in Gymnasium's vector version of an environment written in JAX."""
    envs = dqn_jax.make_envs(dqn_jax.Args(), dqn_jax.Run(env_id="ChainOfCells-v0"), 4)
    envs.reset(seed=0)
    cells = []
    for actions in [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]]:
        observation, *_ = envs.step(np.array(actions))
        cells.append(observation.argmax(axis=-1).tolist())
    envs.close()
    by_hand = [[1, 0, 0, 0], [2, 1, 1, 0], [3, 2, 0, 0], [4, 3, 0, 0], [0, 4, 0, 0]]
    assert cells == by_hand


WRAPPED = ("wrappers: list = []", "wrappers: list = [gym.wrappers.TimeAwareObservation]")
VECTOR_WRAPPED = (
    "    if envs.metadata.get",
    "    envs = gym.wrappers.vector.TransformReward(envs, np.sign)\n    if envs.metadata.get",
)


@pytest.mark.parametrize(
    ("edit", "name"), [(WRAPPED, "<TimeAwareObservation"), (VECTOR_WRAPPED, "<TransformReward, ")]
)
def test_a_wrapper_in_the_script_is_named_as_what_prevents_several_seeds(edit, name, run_main):
    copy = edited(dqn_jax, edit)
    line = one_line(run_main(copy, "--env-id", "phys2d/CartPole-v1", "--num-seeds", "2"))
    said = "phys2d/CartPole-v1 is not compiled, because of its wrappers: "
    assert line.startswith(f"error: num_seeds, sweep, num_devices, distributed: {said}{name}")
    assert line.endswith("; start a run for each agent instead, see docs/scale.md")
    assert not Path("runs").exists()


@pytest.mark.parametrize("edit", [WRAPPED, VECTOR_WRAPPED])
def test_a_wrapper_in_the_script_is_named_where_one_agent_is_stepped_from_python(edit, capsys):
    copy = edited(dqn_jax, edit)
    assert find_jax_env(copy, copy.Args(), copy.Run(env_id="phys2d/CartPole-v1")) is None
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("phys2d/CartPole-v1 is not compiled, because of its wrappers: <T")


def test_a_vectorization_that_prevents_several_seeds_is_named():
    run = dqn_jax.Run(env_id="Chain-v0", vectorization="sync", num_seeds=2)
    with pytest.raises(dqn_jax.UsageError, match="is not compiled with --vectorization sync; "):
        find_jax_env(dqn_jax, dqn_jax.Args(), run)


def test_observations_that_prevent_several_seeds_are_named():
    run = dqn_jax.Run(env_id="ChainOfCells-v0", num_seeds=2)
    with pytest.raises(
        dqn_jax.UsageError, match=r"are no Box and no Dict of these: Discrete\(5\); "
    ):
        find_jax_env(dqn_jax, dqn_jax.Args(), run)


def test_a_stack_of_frames_is_no_wrapper_that_prevents_compiling():
    args = dqn_jax.Args(frame_stack=2)
    assert find_jax_env(dqn_jax, args, dqn_jax.Run(env_id="Chain-v0", num_seeds=2)) is not None


def test_an_ordinary_environment_is_not_said_to_be_uncompiled(capsys):
    assert find_jax_env(dqn_jax, dqn_jax.Args(), dqn_jax.Run(env_id="Counter-v0")) is None
    assert capsys.readouterr().out == ""


def test_a_wrapper_that_the_environment_is_made_with_is_kept():
    run = dqn_jax.Run(env_id="ChainTenfold-v0")
    assert find_jax_env(dqn_jax, dqn_jax.Args(), run) is None


@pytest.mark.parametrize(("vectorization", "expected"), [("auto", True), ("sync", False)])
def test_a_vectorization_that_is_asked_for_steps_ordinarily(vectorization, expected):
    run = dqn_jax.Run(env_id="Chain-v0", vectorization=vectorization)
    assert (find_jax_env(dqn_jax, dqn_jax.Args(), run) is not None) is expected


# ---------------------------------------------------------------------------------- what it counts


def random_rollout(rng, steps, valid):
    """Rewards, ends and resets of environments that begin `valid`: a Step, and the next valid."""
    rows = []
    for _ in range(steps):
        done = (rng.random(len(valid)) < 0.2) & valid
        terminated = done & (rng.random(len(valid)) < 0.5)
        reward = rng.integers(-9, 9, len(valid)) * valid
        row = Step(None, None, reward.astype(np.float32), terminated, done & ~terminated, valid)
        rows.append(row)
        valid = ~done
    return jax.tree.map(lambda *x: np.stack(x), *rows), valid


def test_episodes_are_counted_across_rollouts():
    """Number, returns and lengths of those that ended, and what the others have so far."""
    n = 4
    rng = np.random.default_rng(0)
    valid = np.ones(n, bool)
    runner = RunnerState(None, None, None, jnp.zeros((2, n)), finished=jnp.zeros(3))
    current = np.zeros((2, n))
    ended = np.zeros(3)
    count = jax.jit(compiled.count_episodes)
    for _ in range(5):
        rollout, valid = random_rollout(rng, 6, valid)
        for t in range(6):
            for i in range(n):
                current[:, i] += [rollout.reward[t, i], rollout.valid[t, i]]
                if rollout.terminated[t, i] or rollout.truncated[t, i]:
                    ended += [1, *current[:, i]]
                    current[:, i] = 0
        runner = count(runner, rollout)
        np.testing.assert_array_equal(runner.unfinished, current)
        np.testing.assert_array_equal(runner.finished, ended)
    assert ended[0] > 15
    assert current.any()


def test_each_agent_has_its_own_window_of_log_entries_with_100_episodes():
    """[episodes, their returns, their lengths] of two agents, the newest first."""
    newest = np.array([[99, 99.0, 0], [300, 600.0, 0]])
    before = np.array([[1, 101.0, 0], [100, 1_000.0, 0]])
    oldest = np.array([[50, 5e9, 0], [50, 5e9, 0]])
    returns = compiled.recent_returns([newest, before, oldest], [0.0, 0.0])
    np.testing.assert_array_equal(returns, [2.0, 2.0])
    np.testing.assert_array_equal(compiled.recent_returns([newest], [0.0, 0.0]), [1.0, 2.0])


def test_without_an_episode_the_return_stays_the_same():
    none_and_two = np.array([[0, 0.0, 0], [2, 8.0, 0]])
    for before in (np.nan, 7.0):
        returns = compiled.recent_returns([none_and_two], [before, 1.0])
        np.testing.assert_array_equal(returns, [before, 4.0])


# ----------------------------------------------------------------------------------- what it learns


def train_chain(module, args, env_id):
    """Trains in a chain: the algorithm, the parameters, the mean return, the scalars."""
    run = module.Run(env_id=env_id, eval_episodes=3)
    state, returns, folder = module.train(args, run)
    chain = environments.Chain
    agent = module.Agent(args, chain.observation_space, chain.action_space)
    params = jax.tree.map(lambda x: x[0], state.params)
    return agent, params, returns, read_events(folder)[0]


def values_of_a_chain():
    """Q-values [4 states, left and right]: the reward is 1 for the step to state 4, the end."""
    states = np.arange(4)
    right = GAMMA ** (3.0 - states)
    after_left = np.maximum(states - 1, 0)
    left = GAMMA ** (4.0 - after_left)
    return np.stack([left, right], axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "env_id"),
    [(dqn_jax, "Chain-v0"), (per_dqn_jax, "Chain-v0")],
    ids=["dqn", "per_dqn"],
)
def test_q_values_of_a_chain(module, env_id):
    """The time limit of 9 steps, which many episodes reach, changes no value."""
    # Smaller steps of Adam for PER, whose values are exact early: where gradients vanish, Adam's
    # steps do not.
    rate = 5e-4 if module is per_dqn_jax else 1e-3
    args = module.Args(**DQN_FLAGS | {"learning_rate": rate})
    agent, params, _, scalars = train_chain(module, args, env_id)
    values = agent.network.apply(params, np.eye(5, dtype=np.float32)[:4])
    np.testing.assert_allclose(values, values_of_a_chain(), atol=0.03)
    assert scalars["eval/episodic_return"] == [(16_000, 1.0)]

    # One point for each log interval, of what holds for its last iteration.
    steps = list(range(1_000, 16_001, 1_000))
    for tag in ("charts/episodic_return", "charts/SPS", "charts/epsilon", "losses/td_loss"):
        assert [step for step, _ in scalars[tag]] == steps, tag
    assert scalars["charts/gradient_steps"] == [(step, 1.0) for step in steps]
    if module is per_dqn_jax:
        beta = [0.4 + 0.6 * step / 16_000 for step in steps]
        np.testing.assert_allclose([x for _, x in scalars["charts/beta"]], beta, rtol=1e-5)


@pytest.mark.slow
def test_policy_and_values_of_a_chain():
    args = ppo_jax.Args(**PPO_FLAGS, total_timesteps=20_000)
    agent, params, returns, scalars = train_chain(ppo_jax, args, "Chain-v0")
    output, values = agent.network.apply(params, np.eye(5, dtype=np.float32)[:4])
    assert (np.diff(output, axis=1) > 3).all()
    np.testing.assert_allclose(values, GAMMA ** (3.0 - np.arange(4)), atol=0.05)
    assert returns[0] > 0.99
    # The log interval is rounded up to whole iterations of 128 steps, and so is the training.
    assert scalars["eval/episodic_return"] == [(20_480, 1.0)]
    steps = range(1_024, 20_481, 1_024)
    rates = [3e-3 * max(1 - (step - 128) / 20_000, 0) for step in steps]
    np.testing.assert_allclose(
        scalars["charts/learning_rate"], np.stack([steps, rates], axis=1), rtol=1e-5
    )


@pytest.mark.slow
def test_pendulum():
    """Box actions; episodes that only the time limit ends, after 200 steps."""
    run = ppo_jax.Run(env_id="phys2d/Pendulum-v0", log_interval=1_024, eval_episodes=2)
    args = ppo_jax.Args(num_steps=256, total_timesteps=2_048)
    state, _, folder = ppo_jax.train(args, run)
    scalars, _ = read_events(folder)
    assert np.isfinite([value for points in scalars.values() for _, value in points]).all()
    assert scalars["charts/episodic_length"] == [(1_024, 200.0), (2_048, 200.0)]
    ((_, score),) = scalars["eval/episodic_return"]
    assert -2_000 < score < -500
    # 4 environments, 2 iterations of 256 steps: one of them only resets.
    np.testing.assert_array_equal(state.obs_rms.num_rows, [4 * 2 * (256 - 1)])
    assert np.abs(state.obs_rms.mean[0]).max() < 1


# ------------------------------------------------------------------------------------- many at once

SEEDS = [2**31 - 2, 2**31 - 1]  # the largest


def short_training(module, flags, **run):
    """Args and Run."""
    run = {"env_id": "Chain-v0", "eval_episodes": 0, **run}
    flags = {**flags, "total_timesteps": 2_000}
    if module is ppo_jax:  # CartPole starts at random
        run |= {"env_id": "phys2d/CartPole-v1"}
    else:  # rounding differs, and a draw by priority makes much of that in time
        flags |= {"learning_starts": 1_800}
    return module.Args(**flags), module.Run(**run)


def agent_folders(folder, first_seed, num_seeds):
    """Those of the agents of a run, of which the first one's is the folder of the run."""
    later = range(first_seed + 1, first_seed + num_seeds)
    return [folder, *(folder / f"seed_{seed}" for seed in later)]


def train_two(module, flags, **run):
    """A short training: RunnerState, and the scalars of each agent without the speed."""
    args, run = short_training(module, flags, **run)
    trainings = []

    def keep(trainer, logs, run_folder, make_envs, training, step):
        trainings.append(training)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "evaluate_agents", keep)
        state, returns, folder = module.train(args, run)
    (training,) = trainings
    assert state is training.agent
    assert returns.shape == (run.num_seeds,)
    assert read_flags(folder, module.Run, module.Args) == (run, args)

    folders = agent_folders(folder, run.seed, run.num_seeds)
    assert sorted(folder.glob("seed_*")) == folders[1:]
    scalars = []
    for i, agent_folder in enumerate(folders):
        events, text = read_events(agent_folder)
        assert f"|seed|{run.seed + i}|\n" in text
        assert len(events.pop("charts/SPS")) == 2
        scalars.append(events)
    return training, scalars


def params_of(training, i):
    """The parameters of agent i."""
    return jax.tree.map(lambda x: np.asarray(x[i]), training.agent.params)


def assert_same_agent(one, other, scalars, other_scalars):
    """Up to rounding, which is another on other processors; scalars {tag: points}."""
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=2e-4)
    assert set(scalars) == set(other_scalars)
    for tag, points in scalars.items():
        np.testing.assert_allclose(points, other_scalars[tag], rtol=1e-3, atol=1e-4, err_msg=tag)


@pytest.fixture(scope="module", params=GROUPS, ids=IDS)
def group(request, tmp_path_factory):
    """Two agents that are trained together: script, flags, RunnerState, scalars."""
    module, flags = SCRIPTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("group"))
        training, scalars = train_two(module, flags, seed=SEEDS[0], num_seeds=2)
    return module, flags, training, scalars


def test_an_agent_of_a_group_is_the_one_trained_alone(group):
    module, flags, training, scalars = group
    first = params_of(training, 0)
    second = params_of(training, 1)
    differences = jax.tree.map(lambda x, y: np.abs(x - y).max(), first, second)
    assert max(jax.tree.leaves(differences)) > 1e-2

    alone, alone_scalars = train_two(module, flags, seed=SEEDS[1])
    assert_same_agent(second, params_of(alone, 0), scalars[1], alone_scalars[0])
    for x in jax.tree.leaves(alone):
        assert len(x.sharding.device_set) == 1


def starts_of_parts(x, axis):
    """Where the part of each device begins on this axis of an array."""
    return sorted(part.index[axis].start or 0 for part in x.addressable_shards)


@pytest.mark.more
def test_environments_of_one_agent_spread_over_devices(group):
    """They are in two parts, all the rest is on both devices; the agent is the same."""
    module, flags, training, scalars = group
    two, two_scalars = train_two(module, flags, seed=SEEDS[1], num_devices=2)
    assert_same_agent(params_of(training, 1), params_of(two, 0), scalars[1], two_scalars[0])
    for x in jax.tree.leaves(two.envs):
        assert x.shape[:2] == (1, 4)
        assert starts_of_parts(x, axis=1) == [0, 2]
    for x in jax.tree.leaves(two._replace(envs=None)):
        assert x.sharding.is_fully_replicated
        assert len(x.sharding.device_set) == 2


@pytest.mark.more
@pytest.mark.parametrize("group", GROUPS[::2], ids=IDS[::2], indirect=True)
def test_seeds_spread_over_devices(group):
    module, flags, training, scalars = group
    two, two_scalars = train_two(module, flags, seed=SEEDS[0], num_seeds=2, num_devices=2)
    for i in range(2):
        assert_same_agent(params_of(training, i), params_of(two, i), scalars[i], two_scalars[i])
    assert two.finished.sharding.is_fully_replicated  # each process reads it
    for x in jax.tree.leaves(two._replace(finished=None)):
        assert starts_of_parts(x, axis=0) == [0, 1]


def exchanged_arrays(program_text):
    """The collective operations of a compiled program, and the size of their largest array."""
    collective = r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute)\("
    operations = set()
    largest = 0
    for result, operation in re.findall(collective, program_text):
        operations.add(operation)
        for shape in re.findall(r"\[([\d,]*)\]", result):
            size = math.prod(int(n) for n in shape.split(",") if n)
            largest = max(largest, size)
    return operations, largest


@pytest.mark.more
@pytest.mark.parametrize(("module", "flags"), SCRIPTS, ids=IDS)
def test_devices_of_one_agent_exchange_no_more_than_a_rollout_or_a_batch(module, flags):
    """Nothing as large as the replay: in each gradient step the compiled program gathers less."""
    if module is not ppo_jax:
        flags = flags | {"buffer_size": 100_000}
    args, run = short_training(module, flags, num_devices=2)
    trainer = make_trainer(module, args, run)
    agent = trainer.agent
    runner = trainer.init()
    text = trainer.compile(runner).lower(runner, 0, 1).compile().as_text()
    operations, largest = exchanged_arrays(text)

    assert {"all-gather", "all-reduce"} <= operations
    batch = args.batch_size * 2 if module is not ppo_jax else args.num_envs * args.num_steps
    numbers = math.prod(agent.example_step.observation.shape)
    weights = 84 * 120 if module is not ppo_jax else 64 * 64
    assert 0 < largest <= max(batch * numbers, weights)


def train_four(**flags):
    """Four agents in a chain, of which some go right and some do not: state, returns, folders."""
    args = ppo_jax.Args(num_steps=8, total_timesteps=64)
    run = ppo_jax.Run(env_id="Chain-v0", num_seeds=4, log_interval=32, eval_episodes=1, seed=3)
    state, returns, folder = ppo_jax.train(args, replace(run, **flags))
    return state, returns, agent_folders(folder, first_seed=3, num_seeds=4)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """State, returns and folders of the four agents, and what their training printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(tmp_path_factory.mktemp("four"))
        state, returns, folders = train_four()
    return state, returns, folders, printed.getvalue()


def goes_right(state):
    """Whether the policy of each agent [4] goes right in all states of the chain."""
    chain = environments.Chain
    args = ppo_jax.Args(num_steps=8, total_timesteps=64)
    agent = ppo_jax.Agent(args, chain.observation_space, chain.action_space)
    output, _ = jax.vmap(agent.network.apply, in_axes=(0, None))(state.params, jnp.eye(5)[:4])
    return (output[..., 1] > output[..., 0]).all(axis=1)


def test_each_agent_of_a_group_is_evaluated(four):
    """Each score is in the agent's own folder."""
    state, _, folders, _ = four
    expected = [float(x) for x in goes_right(state)]
    assert set(expected) == {0.0, 1.0}
    for folder, score in zip(folders, expected, strict=True):
        scalars, _ = read_events(folder)
        assert scalars["eval/episodic_return"] == [(64, score)]


def test_the_best_agent_of_a_group_is_kept():
    """It is evaluated after each 32 steps, as --eval-interval says."""
    _, _, folders = train_four(eval_interval=32)
    scores = []
    for folder in folders:
        scalars, _ = read_events(folder)
        steps, agent_scores = zip(*scalars["eval/episodic_return"], strict=True)
        assert steps == (32, 64)
        scores.append(agent_scores)
    assert max(scores[0]) < np.max(scores) == 1.0  # it is not the first
    policy = load_policy(folders[0])
    np.testing.assert_array_equal(policy(np.eye(5, dtype=np.float32)[:4]), [1, 1, 1, 1])


def test_the_code_of_a_user_gets_the_parameters_and_the_returns_of_each_agent(four):
    """In an evaluation, with the folder of the agent."""
    state, _, folders, _ = four
    chain = environments.Chain
    right = goes_right(state)
    seen = []

    class Noted(ppo_jax.Log):
        def at_evaluation(self, step, params, returns):
            seen.append((self.folder, step, params, returns.tolist()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_jax, "Log", Noted)
        train_four()
    assert [folder.name for folder, *_ in seen[1:]] == [folder.name for folder in folders[1:]]
    agent = ppo_jax.Agent(ppo_jax.Args(num_steps=8), chain.observation_space, chain.action_space)
    for i, (_, step, params, returns) in enumerate(seen):
        assert (step, returns) == (64, [float(right[i])])
        wanted = jax.tree.map(lambda x, i=i: x[i], agent.policy_params(state))
        jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_the_line_of_an_evaluation_has_the_mean_of_all_agents(four):
    state, _, _, printed = four
    mean = float(np.mean(goes_right(state)))
    assert 0 < mean < 1
    assert f"64 steps: return {mean:.2f} in an evaluation\n" in printed


def test_a_complete_run_that_is_resumed_has_the_same_returns_and_is_evaluated_again(four):
    state, returns, originals, _ = four
    folder = Path("copy").absolute()
    shutil.copytree(originals[0], folder)
    again, same_returns, folders = train_four(resume=str(folder))
    assert folders[0] == folder
    assert len(set(returns)) > 1
    np.testing.assert_array_equal(same_returns, returns)
    for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(x, y)
    for folder, score in zip(folders, goes_right(state), strict=True):
        scalars, _ = read_events(folder)
        assert scalars["eval/episodic_return"] == [(64, float(score)), (64, float(score))]
        assert [step for step, _ in scalars["charts/SPS"]] == [32, 64]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "flags"), [SCRIPTS[0], more(*SCRIPTS[2])], ids=IDS[::2])
def test_several_log_entries_of_one_call_are_those_of_a_call_for_each(module, flags, monkeypatch):
    """Each entry has its own step and values. No call is long, so that the next covers twice."""
    args = module.Args(**flags | {"total_timesteps": 4_000})
    run = module.Run(env_id="Chain-v0", num_seeds=2, log_interval=100, eval_episodes=0)
    states = []
    scalars = []
    calls = []
    log_entries = compiled.log_entries

    def count_calls(*given):
        calls.append(len(states))
        log_entries(*given)

    monkeypatch.setattr(compiled, "log_entries", count_calls)
    monkeypatch.setattr(compiled, "LONG_CALL", 1e9)
    for entries in (1, 100):
        monkeypatch.setattr(compiled, "MAX_ENTRIES", entries)
        state, _, folder = module.train(args, run)
        for agent_folder in agent_folders(folder, 1, 2):
            events, _ = read_events(agent_folder)
            speed = events.pop("charts/SPS")
            scalars.append((events, [step for step, _ in speed]))
        states.append(state)
    jax.tree.map(np.testing.assert_array_equal, *states)
    for (one, steps), (other, other_steps) in zip(scalars[:2], scalars[2:], strict=True):
        assert steps == other_steps
        assert one.keys() == other.keys()
        for tag, points in one.items():
            np.testing.assert_allclose(points, other[tag], rtol=1e-5, atol=1e-6, err_msg=tag)
    assert calls.count(0) > 4 * calls.count(1)


def test_a_signal_between_two_calls_saves_what_was_learned(stop_at):
    args = dqn_jax.Args(**DQN_FLAGS)
    run = dqn_jax.Run(env_id="Chain-v0", eval_episodes=0)
    _, _, folder = dqn_jax.train(args, run, stop_at(2_000))
    (checkpoint,) = (folder / "checkpoints").iterdir()
    scalars, _ = read_events(folder)
    assert 2_000 <= int(checkpoint.name) == scalars["charts/SPS"][-1][0] < 16_000


class Clock(Chain):
    """Episodes end by the time limit of 9 steps alone: a return of 4.5."""

    def reward(self, state, action, next_state, rng, params=None):
        return 0.5

    def terminal(self, state, rng, params=None):
        return state < 0


def make_clock(**kwargs):
    return FunctionalJaxEnv(Clock(), metadata={"render_modes": []}, **kwargs)


gym.register("Clock-v0", make_clock, max_episode_steps=9, disable_env_checker=True)
# A step of one environment is an iteration. The first episode and its reset are step 10, the fourth
# and its reset step 40, and no other ends before step 49.
STEPWISE = dict(
    total_timesteps=48,
    num_envs=1,
    train_frequency=1,
    learning_starts=8,
    batch_size=8,
    buffer_size=100,
)
CLOCK = dict(env_id="Clock-v0", log_interval=4, eval_episodes=0)
TWO_LENGTHS = 3  # the first of two seeds whose agents choose different actions
RUN = "--env-id NotFiniteInJax-v0 --log-interval 16 --seed 3 --num-envs 2 --total-timesteps 64"
SMALL = {
    dqn_jax: "--learning-starts 16 --batch-size 8 --buffer-size 64 --train-frequency 8",
    ppo_jax: "--num-steps 8 --num-minibatches 1 --update-epochs 1",
}
NOT_FINITE = {script: [*f"{RUN} {own} --env-kwargs".split()] for script, own in SMALL.items()}


def test_before_the_first_episode_of_a_compiled_run_ends_there_is_no_return(capsys):
    dqn_jax.train(dqn_jax.Args(**STEPWISE), dqn_jax.Run(**CLOCK, checkpoint_interval=0))
    first, *progress, last = capsys.readouterr().out.splitlines()
    assert first.endswith(": 1 x Clock-v0, cpu")
    assert last == "seed 1: mean return of the last episodes 4.50"
    for line in progress:
        step, shown = re.fullmatch(r"(\d+) steps, \d+ a second, return (.*)", line).groups()
        assert shown == ("nan" if int(step) < 10 else "4.50")


def test_a_resumed_compiled_run_shows_its_return_until_an_episode_ends(capsys, stop_at):
    args = dqn_jax.Args(**STEPWISE)
    _, returns, folder = dqn_jax.train(args, dqn_jax.Run(**CLOCK), stop_at(40))
    np.testing.assert_array_equal(returns, [4.5])
    capsys.readouterr()
    _, returns, _ = dqn_jax.train(args, dqn_jax.Run(resume=str(folder), **CLOCK))
    np.testing.assert_array_equal(returns, [4.5])
    _, *progress, _ = capsys.readouterr().out.splitlines()
    assert {line.split(", ")[2] for line in progress} == {"return 4.50"}


@pytest.mark.parametrize("env_id", ["Counter-v0", "Clock-v0"])
def test_a_run_that_is_stopped_at_once_saves_its_first_iteration(env_id):
    run = dqn_jax.Run(env_id=env_id, log_interval=4)
    _, returns, folder = dqn_jax.train(dqn_jax.Args(**STEPWISE), run, [signal.SIGINT])
    assert np.isnan(returns).all()  # no episode of either has ended
    end = 1 if env_id == "Counter-v0" else 4  # compiled: after the log interval
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [str(end)]


class TwoLengths(Chain):
    """Action 0 ends the episode at once, action 1 after 30 steps. Rewards are drawn."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def transition(self, state, action, rng, params=None):
        return state + jnp.where(action == 0, 30, 1)

    def observation(self, state, rng, params=None):
        return jnp.ones(1)

    def reward(self, state, action, next_state, rng, params=None):
        return jax.random.randint(rng, (), 0, 10)

    def terminal(self, state, rng, params=None):
        return state >= 30


def make_two_lengths(**kwargs):
    return FunctionalJaxEnv(TwoLengths(), metadata={"render_modes": []}, **kwargs)


gym.register("TwoLengths-v0", make_two_lengths, disable_env_checker=True)


def train_two_lengths(seed, num_seeds):
    """Agents that learn nothing: the returns of `train`, those that are kept, the lengths."""
    flags = dict(total_timesteps=8_000, learning_rate=0.0, start_e=0.0, end_e=0.0, num_envs=4)
    args = dqn_jax.Args(**flags, learning_starts=7_000, train_frequency=40, buffer_size=400)
    run = dqn_jax.Run(env_id="TwoLengths-v0", eval_episodes=0, log_interval=400, seed=seed)
    _, returns, folder = dqn_jax.train(args, replace(run, num_seeds=num_seeds))
    kept = disk.open_file(checkpoints.newest(folder)).about["returns"]
    lengths = [
        read_events(agent_folder)[0]["charts/episodic_length"][-1][1]
        for agent_folder in agent_folders(folder, seed, num_seeds)
    ]
    return returns.tolist(), kept, lengths


@pytest.mark.more
def test_the_returns_of_agents_with_short_and_long_episodes_are_those_of_each_alone():
    """In what `train` returns, and in what the checkpoint keeps."""
    together, kept, lengths = train_two_lengths(seed=TWO_LENGTHS, num_seeds=2)
    assert sorted(lengths) == [1.0, 30.0]
    assert kept == together
    alone = [train_two_lengths(TWO_LENGTHS + i, num_seeds=1)[0][0] for i in range(2)]
    assert together == alone


class NotFinite(Chain):
    """From the 20th step on a reward, an observation or nothing is NaN. No episode ends."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, what):
        super().__init__()
        self.what = what

    def transition(self, state, action, rng, params=None):
        return state + 1

    def observation(self, state, rng, params=None):
        is_bad = (state >= 20) & (self.what == "observation")
        return jnp.where(is_bad, jnp.nan, jnp.ones(1))

    def reward(self, state, action, next_state, rng, params=None):
        large = 3e38 if self.what == "parameters" else 1.0  # their sum is infinite
        is_bad = (next_state >= 20) & (self.what == "reward")
        return jnp.where(is_bad, jnp.nan, large)

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


def make_not_finite(what, **kwargs):
    return FunctionalJaxEnv(NotFinite(what), metadata={"render_modes": []}, **kwargs)


gym.register("NotFiniteInJax-v0", make_not_finite, disable_env_checker=True)


@pytest.mark.parametrize(
    ("module", "what"),
    [
        (dqn_jax, "reward"),
        more(dqn_jax, "observation"),
        more(ppo_jax, "reward"),
        (ppo_jax, "observation"),
    ],
)
def test_numbers_of_a_compiled_environment_that_are_not_finite_are_named(module, what, run_main):
    """Not called diverged, though what is learned from them is."""
    where = "seed 3, between steps 32 and 48"
    line = one_line(run_main(module, *NOT_FINITE[module], f'{{"what": "{what}"}}'), code=1)
    assert line == f"error: NotFiniteInJax-v0: the {what} is not finite: {where}"


def test_an_agent_that_diverges_in_a_compiled_run_is_named(run_main):
    line = one_line(run_main(ppo_jax, *NOT_FINITE[ppo_jax], '{"what": "parameters"}'), code=1)
    where = "seed 3, between steps 0 and 16"
    assert line.endswith(f": diverged, parameters are not finite: {where}")


def test_of_several_agents_the_one_whose_numbers_are_not_finite_is_named():
    finite = np.ones((3, 4, 3), bool)  # seeds, log entries, and rewards, observations, parameters
    finite[1, 3, 0] = False
    finite[2, 2, [1, 2]] = False
    entries = compiled.Entry({}, np.zeros((3, 4, 3)), finite)
    run = dqn_jax.Run(seed=7, num_seeds=3)
    run_folder = types.SimpleNamespace(run=run, path=Path("runs/here"))
    with pytest.raises(FloatingPointError) as caught:
        compiled.check_entries(entries, 1_000, 100, run_folder, Sweep(dqn_jax.Args(), run))
    where = "seed 9, between steps 1,200 and 1,300"
    assert str(caught.value) == f"CartPole-v1: the observation is not finite: {where}"


def first_evaluated(program):
    """The observations with which the episodes of an evaluation start, four of one agent."""
    taken = []
    reset = program.envs.reset

    def evaluate(params, episodes, key, *_):
        state = reset(jax.random.fold_in(key, 0), episodes)
        taken.append(np.asarray(state.observation))
        unknown = jnp.full(episodes, -1.0)
        return jnp.zeros(episodes), jnp.ones(episodes, bool), unknown

    program.envs.evaluate = evaluate
    program.evaluate_one(jnp.zeros(1))
    return taken[0]


def test_a_compiled_evaluation_starts_where_no_training_does():
    """With the keys of training and of an evaluation for the seeds around it."""
    starts = []
    for seed in (1, 2, 1_000_001):
        run = dqn_jax.Run(env_id="phys2d/CartPole-v1", seed=seed, eval_episodes=4)
        program = make_trainer(dqn_jax, dqn_jax.Args(num_envs=4), run)
        in_training = np.asarray(program.init().envs.observation[0])
        starts += [*in_training, *first_evaluated(program)]
    assert len(np.unique(np.stack(starts), axis=0)) == 24


def test_the_time_limit_of_the_flags_holds_in_functional_environments():
    for env_kwargs, limit in (("{}", 9), ('{"max_episode_steps": 5}', 5)):
        run = dqn_jax.Run(env_id="Chain-v0", env_kwargs=env_kwargs)
        assert make_trainer(dqn_jax, dqn_jax.Args(), run).envs.time_limit == limit


class ChainWithoutContacts(Chain):
    """Its state has an empty array, as those of MuJoCo do."""

    def initial(self, rng, params=None):
        return super().initial(rng), jnp.zeros((0, 3))

    def transition(self, state, action, rng, params=None):
        return super().transition(state[0], action, rng), state[1]

    def observation(self, state, rng, params=None):
        return super().observation(state[0], rng)

    def reward(self, state, action, next_state, rng, params=None):
        return super().reward(state[0], action, next_state[0], rng)

    def terminal(self, state, rng, params=None):
        return super().terminal(state[0], rng)


def make_chain_without_contacts(**kwargs):
    return FunctionalJaxEnv(ChainWithoutContacts(), metadata={"render_modes": []}, **kwargs)


gym.register(
    "ChainWithoutContacts-v0",
    make_chain_without_contacts,
    max_episode_steps=9,
    disable_env_checker=True,
)


def test_a_run_whose_environments_have_empty_arrays_is_saved_and_resumed():
    small = dict(num_steps=16, num_minibatches=1, update_epochs=1)
    args = ppo_jax.Args(total_timesteps=256, anneal_lr=False, **small)
    run = ppo_jax.Run(env_id="ChainWithoutContacts-v0", eval_episodes=1, log_interval=64)
    *_, folder = ppo_jax.train(args, run)
    more = replace(args, total_timesteps=512)
    resumed, *_ = ppo_jax.train(more, replace(run, resume=str(folder)))
    straight, *_ = ppo_jax.train(more, run)
    for x, y in zip(jax.tree.leaves(resumed), jax.tree.leaves(straight), strict=True):
        np.testing.assert_array_equal(x, y)
