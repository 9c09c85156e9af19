"""Compiled training in all three scripts: against plain loops, agents trained alone, one device,
and known values.
"""

import json
import math
import re
from dataclasses import replace
from functools import partial

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from events import read_events
from gymnasium.experimental.functional import FuncEnv

import dqn_jax
import per_dqn_jax
import ppo_jax
from compiled import CompiledLoop, FunctionalEnvs
from dqn_jax import DQN, Step, Training

GAMMA = 0.8
DQN_FLAGS = dict(
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
# PER has all that DQN has.
GROUPS = [slow(0), 1, 2]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def make_walk(n, **flags):
    """DQN for the walk, its environments with a time limit of 6 steps, and a policy to act with."""
    args = dqn_jax.Args(num_envs=n, train_frequency=1, **flags)
    alg = DQN(args, np.zeros(2, np.float32), Walk.action_space)
    policy = alg.policy(jax.jit(alg.init)(jax.random.PRNGKey(0)))
    policy = jax.random.normal(jax.random.PRNGKey(0), policy.shape)  # answers that differ
    return alg, FunctionalEnvs(alg, Walk(), 6), policy


WALK = Walk()
INITIAL, TRANSITION, OBSERVATION, REWARD, TERMINAL = (
    jax.jit(getattr(WALK, name))
    for name in ("initial", "transition", "observation", "reward", "terminal")
)


class Loop:
    """What `FunctionalEnvs` does, for one environment after the other."""

    def __init__(self, alg, key, n):
        self.alg, keys = alg, jax.random.split(key, n)
        self.state = [INITIAL(key) for key in keys]
        self.observation = [np.asarray(OBSERVATION(*x)) for x in zip(self.state, keys, strict=True)]
        self.length, self.resetting = [0] * n, [False] * n

    def collect(self, policy, noise, key):
        """The rows [S][N] of a rollout, each with its action and what it led to."""
        rows = []
        for t, keys in enumerate(jax.random.split(key, noise.shape)):
            rows.append([])
            actions = self.alg.act(policy, np.stack(self.observation), noise[t])
            for i, (key, action) in enumerate(zip(keys, np.asarray(actions), strict=True)):
                row = dict(observation=self.observation[i], action=action, reward=0.0)
                row |= dict(terminated=False, truncated=False, is_step=not self.resetting[i])
                if self.resetting[i]:
                    self.state[i], self.length[i], self.resetting[i] = INITIAL(key), 0, False
                else:
                    before, self.length[i] = self.state[i], self.length[i] + 1
                    self.state[i] = TRANSITION(before, action - 1, key)
                    row["reward"] = REWARD(before, action - 1, self.state[i], key)
                    row["terminated"] = bool(TERMINAL(self.state[i], key))
                    row["truncated"] = self.length[i] == 6 and not row["terminated"]
                    self.resetting[i] = row["terminated"] or row["truncated"]
                self.observation[i] = np.asarray(OBSERVATION(self.state[i], key))
                rows[-1].append(row)
        return rows


def test_collected_is_what_a_plain_loop_collects():
    """Over three rollouts, with starts, a time limit, both ends of an episode and exploration."""
    n, steps = 3, 25
    alg, envs, policy = make_walk(n)
    key = jax.random.PRNGKey(0)
    state, loop = envs.reset(key, n), Loop(alg, key, n)
    rng, ends = np.random.default_rng(0), np.zeros(3, int)
    collect = jax.jit(envs.collect)
    for i in range(3):
        noise = rng.integers(-1, 3, (steps, n)).astype(np.int32)  # -1: the best action
        state, rollout = collect(state, policy, noise, jax.random.PRNGKey(i))
        rows = loop.collect(policy, noise, jax.random.PRNGKey(i))
        for name in Step._fields[:-1]:
            got, wanted = getattr(rollout, name), [[x[name] for x in row] for row in rows]
            np.testing.assert_array_equal(got, np.array(wanted, got.dtype), err_msg=name)
            assert got.dtype == getattr(alg.example, name).dtype, name
        np.testing.assert_array_equal(rollout.next_observation, loop.observation)
        np.testing.assert_array_equal(state.observation, loop.observation)
        np.testing.assert_array_equal(state.resetting, loop.resetting)
        np.testing.assert_array_equal(state.length, loop.length)
        ends += [x.sum() for x in (rollout.terminated, rollout.truncated, ~rollout.is_step)]
        assert len(set(np.ravel(rollout.action[noise < 0]))) > 1  # the network's answers differ
    assert min(ends) > 8


def test_evaluation_is_what_a_plain_loop_gives():
    """The return of the first episode in each environment, with the best actions."""
    n, seed = 12, 5
    alg, envs, policy = make_walk(n)
    key = jax.random.PRNGKey(seed)
    loop = Loop(alg, jax.random.fold_in(key, 0), n)
    rows = loop.collect(policy, np.full((6, n), -1, np.int32), key)
    returns, ended, counted = np.zeros(n), np.zeros(n, bool), 0
    for row in rows:
        for i in np.flatnonzero(~ended):
            returns[i] += row[i]["reward"]
            ended[i], counted = row[i]["terminated"] or row[i]["truncated"], counted + 1
    assert ended.all()
    assert n < counted < 6 * n  # some end before the time limit
    got, is_over = envs.evaluate(policy, n, key, 30_000)
    np.testing.assert_allclose(got, returns, rtol=1e-6)
    assert is_over.all()


def test_an_evaluation_without_a_time_limit_ends():
    """After 30,000 steps of an episode that never ends, its reward so far is the return."""

    class Endless(environments.Chain):
        def reward(self, state, action, next_state, rng, params=None):
            return jnp.float32(0.5)

        def terminal(self, state, rng, params=None):
            return jnp.bool_(False)

    alg = DQN(dqn_jax.Args(), np.zeros(5, np.float32), Endless.action_space)
    envs, state = FunctionalEnvs(alg, Endless(), None), jax.jit(alg.init)(jax.random.PRNGKey(0))
    assert envs.time_limit == np.iinfo(np.int32).max
    assert dqn_jax.LONGEST_EPISODE == 30_000
    key, longest = jax.random.PRNGKey(0), dqn_jax.LONGEST_EPISODE
    returns, is_over = envs.evaluate(alg.policy(state), 2, key, longest)
    np.testing.assert_array_equal(returns, [15_000, 15_000])
    assert not is_over.any()


class Counts:
    """A stand-in for an algorithm, which learns nothing."""

    rollout_shape = 6, 4

    @staticmethod
    def train_step(state, rollout, schedule, key):
        return state, {}

    @staticmethod
    def policy(state):
        return state


def test_episodes_are_counted_across_rollouts():
    """Number, returns and lengths of those that ended, and what the others have so far."""
    (steps, n), rng = Counts.rollout_shape, np.random.default_rng(0)
    training = Training(0, jax.random.PRNGKey(0), jnp.zeros((2, n)), jnp.zeros(3))
    resetting, current, ended = np.zeros(n, bool), np.zeros((2, n)), np.zeros(3)
    step = jax.jit(partial(dqn_jax.update_training, Counts))
    for _ in range(5):
        rows = []
        for _ in range(steps):
            done = (rng.random(n) < 0.2) & ~resetting
            rows.append((rng.integers(-9, 9, n) * ~resetting, done, ~resetting))
            current += [rows[-1][0], ~resetting]
            ended += [done.sum(), *current[:, done].sum(axis=1)]
            current[:, done], resetting = 0, done
        reward, done, is_step = map(np.stack, zip(*rows, strict=True))
        rollout = Step(None, None, reward.astype(np.float32), done, False & done, is_step)
        training, metrics, _ = step(training, rollout, {"epsilon": 0.5})
        np.testing.assert_array_equal(training.current, current)
        np.testing.assert_array_equal(training.ended, ended)
        assert metrics["charts/episodic_return"] == pytest.approx(ended[1] / ended[0])
        assert metrics["charts/episodic_length"] == pytest.approx(ended[2] / ended[0])
        assert metrics["charts/epsilon"] == 0.5
    assert ended[0] > 15
    assert current.any()


def test_environments_draw_afresh():
    """No two episodes, and no two environments, start alike; the last observation is true."""
    run = dqn_jax.Run(env_id="phys2d/CartPole-v1")
    args = dqn_jax.Args(num_envs=4)
    env = dqn_jax.make_envs(args, run, 1).envs[0].unwrapped.func_env
    alg = DQN(args, np.zeros(4, np.float32), gym.spaces.Discrete(2))
    envs = FunctionalEnvs(alg, env, 500)
    state = envs.reset(jax.random.PRNGKey(0), 4)
    policy = alg.policy(jax.jit(alg.init)(jax.random.PRNGKey(0)))
    noise = np.broadcast_to(np.arange(4, dtype=np.int32) % 2, (100, 4))
    after, rollout = envs.collect(state, policy, noise, jax.random.PRNGKey(1))
    following = np.concatenate([rollout.observation[1:], rollout.next_observation[None]])
    starts = np.concatenate([state.observation, following[~rollout.is_step]])
    assert len(starts) > 20
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert (np.abs(starts) <= 0.05).all()
    assert (np.abs(following[..., 2])[rollout.terminated] > 0.2095).all()
    np.testing.assert_array_equal(after.observation, rollout.next_observation)


def test_what_is_not_functional_as_registered_is_stepped_ordinarily():
    """The wrappers of a registration are kept."""
    args, run = ppo_jax.Args(num_steps=4), ppo_jax.Run(env_id="ChainWrapped-v0")
    alg, loop = ppo_jax.set_up(args, run)
    assert isinstance(loop, ppo_jax.OrdinaryLoop)
    assert not isinstance(loop, CompiledLoop)
    training = loop.start()
    assert training.envs is None
    assert training.current.shape == (2, 4)
    assert alg.example.observation.shape == (6,)
    for more in ("num_seeds", "num_devices"):
        with pytest.raises(ppo_jax.UsageError, match="ChainWrapped-v0 trains one agent only"):
            ppo_jax.set_up(args, replace(run, **{more: 2}))


# ----------------------------------------------------------------------------------- what it learns


def train_chain(module, args, env_id):
    """Trains in a chain: the algorithm, the parameters, the mean return, the scalars."""
    run = module.Run(env_id=env_id, eval_episodes=3)
    training, returns, folder = module.train(args, run)
    alg = module.Algorithm(args, np.zeros(5, np.float32), environments.Chain.action_space)
    return alg, training.agent.params[0], returns, read_events(folder)[0]


@pytest.mark.parametrize(
    ("module", "env_id"),
    [slow(dqn_jax, "Chain-v0"), (per_dqn_jax, "Chain-v0")],
    ids=["dqn", "per_dqn"],
)
def test_q_values_of_a_chain(module, env_id):
    """The time limit of 9 steps, which many episodes reach, changes no value."""
    # Smaller steps of Adam for PER, whose values are exact early: where gradients vanish, Adam's
    # steps do not.
    rate = 5e-4 if module is per_dqn_jax else 1e-3
    args = module.Args(**DQN_FLAGS | {"learning_rate": rate})
    alg, params, _, scalars = train_chain(module, args, env_id)
    states = np.arange(4)
    right, left = GAMMA ** (3.0 - states), GAMMA ** (4.0 - np.maximum(states - 1, 0))
    values = alg.q_values(params, np.eye(5, dtype=np.float32)[:4])
    np.testing.assert_allclose(values, np.stack([left, right], axis=1), atol=0.03)
    assert scalars["eval/episodic_return"] == [(16_000, 1.0)]
    # One point for each log interval, of what holds for its last iteration.
    steps = list(range(1_000, 16_001, 1_000))
    for tag in ("charts/episodic_return", "charts/SPS", "charts/epsilon", "losses/td_loss"):
        assert [step for step, _ in scalars[tag]] == steps, tag
    assert scalars["charts/gradient_steps"] == [(step, 1.0) for step in steps]
    if module is per_dqn_jax:
        beta = [0.4 + 0.6 * (step - 4) / 16_000 for step in steps]
        np.testing.assert_allclose([x for _, x in scalars["charts/beta"]], beta, rtol=1e-5)


def test_policy_and_values_of_a_chain():
    args = ppo_jax.Args(**PPO_FLAGS, total_timesteps=20_000)
    alg, params, returns, scalars = train_chain(ppo_jax, args, "Chain-v0")
    output, values = alg.actor_critic(params, np.eye(5, dtype=np.float32)[:4])
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
    training, _, folder = ppo_jax.train(args, run)
    scalars, _ = read_events(folder)
    assert np.isfinite([value for points in scalars.values() for _, value in points]).all()
    assert scalars["charts/episodic_length"] == [(1_024, 200.0), (2_048, 200.0)]
    ((_, score),) = scalars["eval/episodic_return"]
    assert -2_000 < score < -500
    # 4 environments, 2 iterations of 256 steps: one of them only resets.
    np.testing.assert_array_equal(training.agent.observations.rows, [4 * 2 * (256 - 1)])
    assert np.abs(training.agent.observations.mean[0]).max() < 1


# ------------------------------------------------------------------------------------- many at once

SEEDS = [2**32 - 1, 2**32]  # Gymnasium takes seeds of more than 32 bits, and so does this


def train_two(module, flags, **run):
    """A short training: the state, and the scalars of each agent without the speed, the folder."""
    run = {"env_id": "Chain-v0", "eval_episodes": 0, **run}
    if module is ppo_jax:  # CartPole starts at random
        run |= {"env_id": "phys2d/CartPole-v1"}
    run = module.Run(**run)
    flags = {**flags, "total_timesteps": 2_000}
    if module is not ppo_jax:  # rounding differs, and a draw by priority makes much of that in time
        flags |= {"learning_starts": 1_800}
    args = module.Args(**flags)
    training, returns, folder = module.train(args, run)
    folders = [folder, *(folder / f"seed_{run.seed + i}" for i in range(1, run.num_seeds))]
    assert sorted(folder.glob("seed_*")) == folders[1:]
    assert returns.shape == (run.num_seeds,)
    saved = json.loads((folder / "args.json").read_text())
    assert (module.Run(**saved["run"]), module.Args(**saved["args"])) == (run, args)
    scalars = []
    for x in folders:
        events, text = read_events(x)
        assert f"|seed|{run.seed}|\n" in text
        assert len(events.pop("charts/SPS")) == 2
        scalars.append(events)
    return training, scalars


def assert_same_agent(one, other, scalars, other_scalars):
    """Up to rounding, which is another on other processors; scalars {tag: points}."""
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-4)
    assert set(scalars) == set(other_scalars)
    for tag, points in scalars.items():
        np.testing.assert_allclose(points, other_scalars[tag], rtol=1e-3, atol=1e-4, err_msg=tag)


@pytest.fixture(scope="module", params=GROUPS, ids=IDS)
def group(request, tmp_path_factory):
    """Two agents that are trained together: script, flags, the state, scalars."""
    module, flags = SCRIPTS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("group"))
        return module, flags, *train_two(module, flags, seed=SEEDS[0], num_seeds=2)


def test_an_agent_of_a_group_is_the_one_trained_alone(group):
    module, flags, training, scalars = group
    params = training.agent.params
    assert np.abs(params[0] - params[1]).max() > 1e-2
    alone, alone_scalars = train_two(module, flags, seed=SEEDS[1])
    assert_same_agent(params[1], alone.agent.params[0], scalars[1], alone_scalars[0])
    assert len(alone.agent.params.sharding.device_set) == 1


def test_environments_of_one_agent_spread_over_devices(group):
    """They are in two parts, all the rest is on both devices; the agent is the same."""
    module, flags, training, scalars = group
    params = training.agent.params
    two, two_scalars = train_two(module, flags, seed=SEEDS[1], num_devices=2)
    assert_same_agent(params[1], two.agent.params[0], scalars[1], two_scalars[0])
    for x in jax.tree.leaves(two.envs):
        assert x.shape[:2] == (1, 4)
        assert sorted(part.index[1].start or 0 for part in x.addressable_shards) == [0, 2]
    for x in jax.tree.leaves(two._replace(envs=None)):
        assert x.sharding.is_fully_replicated
        assert len(x.sharding.device_set) == 2


@pytest.mark.parametrize("group", GROUPS[::2], ids=IDS[::2], indirect=True)
def test_seeds_spread_over_devices(group):
    module, flags, training, scalars = group
    spread = dict(seed=SEEDS[0], num_seeds=2, num_devices=2)
    two, two_scalars = train_two(module, flags, **spread)
    for i in range(2):
        ours, theirs = training.agent.params[i], two.agent.params[i]
        assert_same_agent(ours, theirs, scalars[i], two_scalars[i])
    assert two.ended.sharding.is_fully_replicated  # each process reads it
    for x in jax.tree.leaves(two._replace(ended=None)):
        parts = {part.device: part.index[0].start or 0 for part in x.addressable_shards}
        assert sorted(parts.values()) == [0, 1]


@pytest.mark.parametrize(("module", "flags"), [slow(*SCRIPTS[0]), *SCRIPTS[1:]], ids=IDS)
def test_devices_of_one_agent_exchange_no_more_than_a_rollout_or_a_batch(module, flags):
    """Nothing as large as the replay: in each gradient step the compiled program gathers less."""
    own = {"buffer_size": 100_000, "learning_starts": 200} if module is not ppo_jax else {}
    args = module.Args(**flags | own)
    _, loop = module.set_up(args, module.Run(env_id="Chain-v0", num_devices=2))
    training = loop.start()
    steps = loop.alg.steps_per_iteration
    schedules = loop.alg.schedule(np.arange(0, 2 * steps, steps))
    with jax.sharding.set_mesh(loop.mesh):
        text = loop.program(training).lower(training, schedules).compile().as_text()
    collective = r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute)\("
    shapes = re.findall(collective, text)
    assert {"all-gather", "all-reduce"} <= {kind for _, kind in shapes}
    largest = 0
    for shape, _ in shapes:
        for axes in re.findall(r"\[([\d,]*)\]", shape):
            largest = max(largest, math.prod(int(n) for n in axes.split(",") if n))
    batch = args.batch_size * 2 if module is not ppo_jax else args.num_envs * args.num_steps
    numbers = math.prod(loop.alg.example.observation.shape)
    weights = 84 * 120 if module is not ppo_jax else 64 * 64
    assert 0 < largest <= max(batch * numbers, weights)


def test_each_agent_of_a_group_is_evaluated(monkeypatch):
    """Each is written to its own folder; the line that is printed has the mean of all."""
    args = ppo_jax.Args(num_steps=8, total_timesteps=32)
    run = ppo_jax.Run(env_id="Chain-v0", num_seeds=4, log_interval=32, eval_episodes=1, seed=3)
    training, _, folder = ppo_jax.train(args, run)
    folders = [folder, *(folder / f"seed_{seed}" for seed in (4, 5, 6))]
    scores = [read_events(x)[0]["eval/episodic_return"] for x in folders]
    alg = ppo_jax.Algorithm(args, np.zeros(5, np.float32), environments.Chain.action_space)
    params, _ = alg.policy(training.agent)
    output, _ = jax.vmap(alg.actor_critic, in_axes=(0, None))(params, jnp.eye(5)[:4])
    goes_right = jnp.diff(output)[..., 0] > 0
    assert scores == [[(32, float(x))] for x in goes_right.all(axis=1)]
    assert {x for ((_, x),) in scores} == {0.0, 1.0}
