"""ppo_jax.py: its pure functions against NumPy, SciPy and slow loops, what masks keep out, and
what it learns against known values.
"""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
from helpers import fast_at_ends, make_agent, more, read_events
from jax.flatten_util import ravel_pytree
from optax.tree_utils import tree_get

import cleanreplay
import ppo_jax
from cleanreplay import protocol
from ppo_jax import PPO, Args, Batch, Run, RunningMeanStd, Step, UsageError, train


class BoxProbe(gym.Env):
    """One thing to learn with actions that must come as numbers from 300 to 500.

    match: one step, the best action is 400 + 100 * observation, which is 380 or 420.
    truncation: reward 1 a step, truncated after 3 steps, never terminated.
    termination: the observations 0 and 1, reward 1 a step, terminated after the second.
    """

    observation_space = gym.spaces.Box(-10.0, 10.0, (1,), np.float32)
    action_space = gym.spaces.Box(300.0, 500.0, (1,), np.float32)

    def __init__(self, kind):
        self.kind = kind

    def _observe(self):
        return np.array([self.value], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.value = float(self.np_random.choice([-0.2, 0.2])) if self.kind == "match" else 0.0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.steps += 1
        if self.kind == "match":
            distance = float(action[0]) - (400 + 100 * self.value)
            return self._observe(), -((distance / 100) ** 2), True, False, {}
        if self.kind == "truncation":
            return self._observe(), 1.0, False, self.steps == 3, {}
        self.value = 1.0
        return self._observe(), 1.0, self.steps == 2, False, {}


class Probes(gym.Env):
    """An episode of one of several probes, drawn anew; the observation: which, and its own.

    Discrete actions are called 1 and 2 here.
    """

    def __init__(self, kinds):
        self.kinds = kinds
        space = kinds[0].action_space
        self.observation_space = gym.spaces.Box(-10.0, 10.0, (len(kinds) + 1,), np.float32)
        self.start = int(isinstance(space, gym.spaces.Discrete))
        self.action_space = gym.spaces.Discrete(2, start=1) if self.start else space

    def _observe(self, observation):
        return np.append(np.arange(len(self.kinds)) == self.kind, observation).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.kind = self.np_random.integers(len(self.kinds))
        if seed is not None:
            for i, env in enumerate(self.kinds):
                env.reset(seed=seed + i)
        observation, info = self.kinds[self.kind].reset()
        return self._observe(observation), info

    def step(self, action):
        assert self.action_space.contains(action)
        observation, *rest = self.kinds[self.kind].step(action - self.start)
        return self._observe(observation), *rest


DISCRETE_KINDS = ["observation", "discount", "truncation", "both"]
BOX_KINDS = ["match", "truncation", "termination"]
gym.register("Probes-v0", lambda: Probes([environments.Probe(kind) for kind in DISCRETE_KINDS]))
gym.register("BoxProbes-v0", lambda: Probes([BoxProbe(kind) for kind in BOX_KINDS]))
gym.register("BoxProbe-match-v0", BoxProbe, kwargs={"kind": "match"})

LAST = np.random.default_rng(9).normal(size=(4, 3)).astype(np.float32)  # after a rollout
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(2)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
MULTI = gym.spaces.MultiDiscrete([3, 5], start=[1, -2])
KEY = jax.random.PRNGKey(7)
# XLA compiles in half of the time.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random_rollout(rng, steps, n, space=DISCRETE, resetting=None):
    """Steps as `collect_rollout` returns them, with observations [3]."""
    terminated, truncated = rng.random((2, steps, n)) < 0.15
    valid = np.ones((steps, n), bool)
    resetting = rng.random(n) < 0.3 if resetting is None else resetting
    for t in range(steps):
        valid[t] = ~resetting
        terminated[t] &= valid[t]
        truncated[t] &= valid[t]
        resetting = terminated[t] | truncated[t]
    observation = rng.normal(size=(steps, n, 3)).astype(np.float32)
    action = rng.normal(size=(steps, n, 2)).astype(np.float32)
    if space is DISCRETE:
        action = rng.integers(2, size=(steps, n), dtype=np.int32)
    reward = (rng.normal(size=(steps, n)) * valid).astype(np.float32)
    return Step(observation, action, reward, terminated, truncated, valid)


def assert_equal(actual, expected):
    """Exactly, of trees of arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def vector(params):
    """All parameters in a row."""
    return np.asarray(ravel_pytree(params)[0])


# ----------------------------------------------------------------------------------- the functions


def plain_gae(rollout, value, next_value, gamma, gae_lambda):
    """The sum of discounted temporal differences to the end of the episode, in a loop."""
    advantage = np.zeros(value.shape)
    steps = len(value)
    for t, i in zip(*np.nonzero(rollout.valid), strict=True):
        weight = 1.0
        for k in range(t, steps):
            assert rollout.valid[k, i]  # an episode goes on until it ends
            bootstrap = 0.0 if rollout.terminated[k, i] else next_value[k, i]
            delta = rollout.reward[k, i] + gamma * bootstrap - value[k, i]
            advantage[t, i] += weight * delta
            weight *= gamma * gae_lambda
            if rollout.terminated[k, i] or rollout.truncated[k, i]:
                break
    return advantage


@fast_at_ends("gae_lambda", [0.9, 0.0, 1.0])
def test_gae_is_what_a_plain_loop_gives(gae_lambda):
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, 40, 6)
    assert rollout.terminated.sum() > 10
    assert rollout.truncated.sum() > 10
    value, next_value = rng.normal(size=(2, 40, 6)).astype(np.float32)
    got = jit(ppo_jax.gae)(rollout, value, next_value, 0.8, gae_lambda)
    wanted = plain_gae(rollout, value, next_value, 0.8, gae_lambda)
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("shape", [(50,), (3, 50)])
def test_masked_variances_are_those_of_the_columns_that_numpy_takes(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    mask = rng.random(50) < 0.5
    x[..., ~mask] = np.nan
    np.testing.assert_allclose(ppo_jax.masked_var(x, mask), x[..., mask].var(-1), rtol=1e-5)
    none = np.zeros(50, bool)  # of no column it is 0
    np.testing.assert_array_equal(ppo_jax.masked_var(x, none), np.zeros(shape[:-1]))


def test_running_statistics_are_those_of_all_rows_that_were_taken_in():
    rng = np.random.default_rng(0)
    stats = RunningMeanStd(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    assert_equal(ppo_jax.update_rms(stats, np.full((30, 3), np.nan), np.zeros(30, bool)), stats)
    seen = np.empty((0, 3))
    for rows in (1, 7, 30, 0, 20):
        x = (rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = rng.permutation(30) < rows
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        stats = ppo_jax.update_rms(stats, x, mask)
        assert stats.num_rows == len(seen)
        np.testing.assert_allclose(stats.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(stats.var, seen.var(0), rtol=1e-3)


def test_observations_are_normalised_to_deviations_from_the_mean_and_at_most_10():
    stats = RunningMeanStd(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.25]), jnp.float32(9))
    x = np.array([[3.0, -2.0], [1.0, 0.0], [99.0, -99.0]], np.float32)
    wanted = [[1.0, 0.0], [0.0, 4.0], [10.0, -10.0]]
    np.testing.assert_allclose(ppo_jax.normalize(x, stats), wanted, rtol=1e-6)
    assert ppo_jax.normalize(x, None) is x


# ----------------------------------------------------------------------------------------- acting


def explore(agent, params, key=0, step=0):
    """Actions of 20,000 environments that all observe zeros."""
    observation = np.zeros((20_000, 3), np.float32)
    actions = agent.act(params, observation, jax.random.PRNGKey(key), step)
    assert actions.dtype == agent.example_step.action.dtype
    return np.asarray(actions)


def fixed_policy(space, output, **params):
    """The algorithm, and parameters whose actor gives `output` for every observation."""
    agent = PPO(Args(), OBSERVATIONS, space)
    state = jax.jit(agent.init)(KEY)
    zeros = jax.tree.map(jnp.zeros_like, state.params)["params"] | params
    zeros["actor"]["bias"] = jnp.asarray(output, jnp.float32)
    return agent, agent.policy_params(state._replace(params={"params": zeros}))


def test_discrete_actions_are_drawn_from_the_policy():
    p = np.array([0.1, 0.2, 0.7])
    agent, params = fixed_policy(gym.spaces.Discrete(3), np.log(p))
    actions = explore(agent, params)
    assert scipy.stats.chisquare(np.bincount(actions), 20_000 * p).pvalue > 1e-3
    np.testing.assert_array_equal(explore(agent, params), actions)
    # Draws are independent of those of the next environment, the next step and another key.
    for others in (
        np.roll(actions, 1),
        explore(agent, params, step=1),
        explore(agent, params, key=1),
    ):
        counts = np.bincount(actions * 3 + others)
        wanted = 20_000 * np.outer(p, p).ravel()
        assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-3
    np.testing.assert_array_equal(agent.act(params, np.zeros((5, 3), np.float32)), 2)


def test_multi_discrete_actions_are_drawn_from_the_policy_and_only_those_that_exist():
    """The first has three choices, and the logits of two more must not count."""
    p = np.array([0.1, 0.2, 0.7]), np.array([0.3, 0.1, 0.1, 0.4, 0.1])
    agent, params = fixed_policy(MULTI, np.concatenate([np.log(p[0]), [9.0, 9.0], np.log(p[1])]))
    first, second = explore(agent, params).T
    assert first.max() < 3
    counts = np.bincount(first * 5 + second, minlength=15)
    assert scipy.stats.chisquare(counts, 20_000 * np.outer(*p).ravel()).pvalue > 1e-3
    np.testing.assert_array_equal(agent.act(params, np.zeros((4, 3), np.float32)), [[2, 3]] * 4)
    output, _ = agent.network.apply(params[0], np.zeros((4, 3), np.float32))
    action = np.array([[0, 0], [2, 3], [1, 4], [2, 0]], np.int32)
    log_prob, entropy = agent.actions.log_prob_and_entropy(output, action)
    wanted = np.log(p[0][action[:, 0]] * p[1][action[:, 1]])
    np.testing.assert_allclose(log_prob, wanted, rtol=1e-5)
    np.testing.assert_allclose(entropy, sum(map(scipy.stats.entropy, p)), rtol=1e-5)


def test_continuous_actions_are_drawn_from_the_policy():
    log_std = jnp.log(np.array([3.0, 0.5], np.float32))
    agent, params = fixed_policy(BOX, [1.0, -2.0], log_std=log_std)
    actions = explore(agent, params)
    first, second = actions.T
    assert scipy.stats.kstest(first, scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(second, scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3
    np.testing.assert_array_equal(explore(agent, params), actions)
    for others in (
        second,
        explore(agent, params, step=1)[:, 0],
        explore(agent, params, key=1)[:, 0],
    ):
        assert abs(np.corrcoef(first, others)[0, 1]) < 0.03  # 4 standard deviations
    greedy = agent.act(params, np.zeros((5, 3), np.float32))
    np.testing.assert_array_equal(greedy, [[1.0, -2.0]] * 5)


def test_act_sees_normalised_observations():
    agent = PPO(Args(), OBSERVATIONS, BOX)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    stats = RunningMeanStd(jnp.array([1.0, 2, 3]), jnp.array([4.0, 9, 16]), jnp.float32(10))
    normalized = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    raw = (normalized * [2, 3, 4] + [1, 2, 3]).astype(np.float32)
    wanted = agent.act((state.params, None), normalized)
    np.testing.assert_allclose(agent.act((state.params, stats), raw), wanted, rtol=1e-4)
    # Normalisation matters for these actions.
    assert np.abs(wanted - agent.act((state.params, None), raw)).max() > 1e-3


@pytest.mark.parametrize(
    "space",
    [
        gym.spaces.Discrete(3, start=1),
        MULTI,
        gym.spaces.MultiDiscrete([[2, 4], [3, 2]]),
        gym.spaces.Box(300, 500, (2,)),
        gym.spaces.Box(-1, 9, (2,)),
        gym.spaces.Box(np.float32([[0, 1, 2], [3, 4, 5]]), 9.0),
    ],
    ids=str,
)
def test_the_policy_takes_the_environments_actions_and_explores_only_with_a_key(space):
    agent = PPO(Args(), OBSERVATIONS, space)
    params = agent.policy_params(jax.jit(agent.init)(KEY))
    observation = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    modes = protocol.policy(agent, params)(observation)
    wanted = agent.to_env_action(np.asarray(agent.act(params, observation)))
    np.testing.assert_array_equal(modes, wanted)
    draws = protocol.policy(agent, params, KEY)(observation, step=3)
    wanted = agent.to_env_action(np.asarray(agent.act(params, observation, KEY, 3)))
    np.testing.assert_array_equal(draws, wanted)
    assert np.mean(draws != modes) > 0.3
    assert all(space.contains(action) for action in [*modes, *draws])


def env_actions(action_space, actions, is_compiled):
    """The environment's actions [5, A] for `actions` [5] of the policy, the same on all axes."""
    agent = PPO(Args(), OBSERVATIONS, action_space)
    actions = np.float32(actions)[:, None].repeat(action_space.shape[0], axis=1)
    convert = jax.jit(agent.to_env_action) if is_compiled else agent.to_env_action
    return convert(actions)


IN_BOTH_LOOPS = pytest.mark.parametrize("is_compiled", [False, True], ids=["ordinary", "compiled"])
INF = np.inf


@IN_BOTH_LOOPS
@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        ([300], [500], [[300], [400], [425], [500], [500]]),
        ([-1], [1], [[-1], [0], [0.25], [1], [1]]),
        ([-INF], [INF], [[-1], [0], [0.25], [1], [7]]),
        ([0.1], [INF], [[0.1], [1.1], [1.35], [2.1], [8.1]]),
        ([-INF], [0.1], [[-1.9], [-0.9], [-0.65], [0.1], [0.1]]),
        (
            [0, -INF, 300],
            [1, INF, 500],
            [[0, -1, 300], [0.5, 0, 400], [0.625, 0.25, 425], [1, 1, 500], [1, 7, 500]],
        ),
    ],
    ids=str,
)
def test_minus_1_to_1_covers_each_axis_and_a_missing_bound_is_2_away(
    low, high, wanted, is_compiled
):
    space = gym.spaces.Box(np.float32(low), np.float32(high))
    got = env_actions(space, [-1, 0, 0.25, 1, 7], is_compiled)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@IN_BOTH_LOOPS
@pytest.mark.parametrize(
    ("low", "high", "middle"), [(-3e38, 3e38, 0), (0, 3e38, 1.5e38), (-3e38, -2.5e38, -2.75e38)]
)
def test_bounds_that_are_huge_do_not_overflow(low, high, middle, is_compiled):
    """Warnings are errors here."""
    space = gym.spaces.Box(low, high, (1,))
    got = env_actions(space, [-4, -1, 0, 1, 4], is_compiled)
    wanted = np.float32([low, low, middle, high, high])
    np.testing.assert_allclose(got[:, 0], wanted, rtol=1e-6)


@fast_at_ends("dtype", [np.float16, np.float32, np.float64])
def test_actions_have_the_dtype_of_their_space(dtype):
    """In JAX, which has no float64, they are of float32 at most."""
    space = gym.spaces.Box(dtype([0.1, -INF, 0.3]), dtype([0.7, INF, INF]), dtype=dtype)
    actions = [-3, -1, -0.123, 1, 3]
    got = env_actions(space, actions, is_compiled=False)
    assert got.dtype == dtype
    assert all(space.contains(action) for action in got)
    compiled = env_actions(space, actions, is_compiled=True)
    assert compiled.dtype == min(np.dtype(dtype), np.dtype(np.float32))
    np.testing.assert_allclose(compiled, got, rtol=1e-3 if dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_discrete_actions_are_counted_from_the_start_of_the_space(array):
    agent = PPO(Args(), OBSERVATIONS, gym.spaces.Discrete(3, start=-1))
    assert agent.to_env_action(array([0, 2])).tolist() == [-1, 1]


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_multi_discrete_actions_are_counted_from_each_start_of_the_space(array):
    agent = PPO(Args(), OBSERVATIONS, MULTI)
    assert agent.to_env_action(array([[0, 0], [2, 4]])).tolist() == [[1, -2], [3, 2]]


@IN_BOTH_LOOPS
def test_actions_of_a_box_of_two_dimensions_are_scaled_each_by_its_own_bounds(is_compiled):
    space = gym.spaces.Box(np.float32([[0, 10, -1]] * 2), np.float32([[1, 20, 1], [3, 30, 9]]))
    agent = PPO(Args(), OBSERVATIONS, space)
    convert = jax.jit(agent.to_env_action) if is_compiled else agent.to_env_action
    got = convert(np.float32([[-1] * 6, [0, 0, 0, 1, 1, 1]]))
    wanted = [[[0, 10, -1]] * 2, [[0.5, 15, 0], [3, 30, 9]]]
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_the_first_policy_covers_the_box_and_the_rollout_keeps_its_tails():
    """The environment asserts that actions are in its Box, and its rewards tell them."""
    args = Args(num_envs=8, num_steps=128)
    run = Run(env_id="BoxProbe-match-v0")
    agent = make_agent(ppo_jax, args, run)
    params = agent.policy_params(jax.jit(agent.init)(KEY))
    with ppo_jax.closing(ppo_jax.make_envs(args, run, 8)) as envs:
        env_state = ppo_jax.reset(envs, KEY, 0)
        rollout, _ = ppo_jax.collect_rollout(agent, envs, params, env_state, KEY, 0)
    assert scipy.stats.kstest(rollout.action.ravel(), "norm").pvalue > 1e-3
    distance = rollout.action.clip(-1, 1) - rollout.observation
    wanted = np.where(rollout.valid, -(distance[..., 0] ** 2), 0)
    np.testing.assert_allclose(rollout.reward, wanted, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------- the loss and the state


@pytest.mark.parametrize(
    ("space", "dtype", "by_default"),
    [
        (DISCRETE, np.float32, (False, False)),
        (BOX, np.float32, (True, True)),
        (BOX, np.uint8, (False, True)),
    ],
)
def test_what_is_normalised(space, dtype, by_default):
    observations = gym.spaces.Box(0, 255, (3,), dtype)

    def normalised(of_observations, of_rewards):
        args = Args(normalize_observations=of_observations, normalize_rewards=of_rewards)
        state = jax.eval_shape(PPO(args, observations, space).init, jax.random.PRNGKey(0))
        return state.obs_rms is not None, state.return_rms is not None

    assert normalised(None, None) == by_default
    assert normalised(True, False) == (True, False)
    assert normalised(False, True) == (False, True)


def scipy_log_prob(output, action):
    """Log-probabilities and entropies of actions [B], or of Gaussians [B, A]."""
    output = np.float64(output)
    if action.ndim == 1:
        p = scipy.special.softmax(output, axis=-1)
        return np.log(p[np.arange(len(p)), action]), scipy.stats.entropy(p, axis=-1)
    mean, log_std = np.split(output, 2, axis=-1)
    normal = scipy.stats.norm(mean, np.exp(log_std))
    return normal.logpdf(action).sum(axis=-1), normal.entropy().sum(axis=-1)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("is_box", [False, True])
def test_the_loss_is_what_numpy_gives(is_box, flag):
    """Over the valid rows; `flag`: whether values are clipped and advantages normalised."""
    rng = np.random.default_rng(0)
    args = Args(clip_coef=0.3, ent_coef=0.02, vf_coef=0.6, clip_vloss=flag, norm_adv=flag)
    output = rng.normal(size=(200, 4)).astype(np.float32)
    action = rng.normal(size=(200, 2)) if is_box else rng.integers(4, size=200, dtype=np.int32)
    log_prob, entropy = scipy_log_prob(output, action)
    log_ratio, value, old_value, advantage = rng.normal(scale=0.5, size=(4, 200))
    valid = rng.random(200) < 0.7
    advantage[~valid] = 1e6
    batch = Batch(None, action, valid, log_prob - log_ratio, old_value, advantage)
    agent = PPO(args, OBSERVATIONS, BOX if is_box else gym.spaces.Discrete(4))
    agent.network = SimpleNamespace(apply=lambda params, observation: params)
    arrays = jax.tree.map(jnp.asarray, (batch, (output, value)))
    loss, metrics = agent.loss(arrays[1], arrays[0])

    entropy, log_ratio, value, old_value, advantage = np.stack(
        [entropy, log_ratio, value, old_value, advantage]
    )[:, valid]
    target = advantage + old_value
    error = (value - target) ** 2
    if flag:
        near = old_value + np.clip(value - old_value, -0.3, 0.3)
        error = np.maximum(error, (near - target) ** 2)
        advantage = (advantage - advantage.mean()) / advantage.std()
    ratio = np.exp(log_ratio)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.7, 1.3) * advantage)
    wanted = {
        "losses/policy_loss": -surrogate.mean(),
        "losses/value_loss": error.mean() / 2,
        "losses/entropy": entropy.mean(),
        "losses/old_approx_kl": -log_ratio.mean(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > 0.3).mean(),
    }
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    total = -surrogate.mean() - 0.02 * entropy.mean() + 0.6 * error.mean() / 2
    assert loss == pytest.approx(total, rel=1e-4)


def test_gradients_of_all_parameters_together_are_no_longer_than_half():
    """As seen in the first step of Adam; epsilon is 1e-5."""
    optimizer = PPO(Args(), OBSERVATIONS, DISCRETE).optimizer(jnp.float32(1e-3))
    gradients = {"a": jnp.array([3e-4, -4.0]), "b": jnp.array([3.0])}
    steps, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    clipped = np.array([3e-5, -0.4, 0.3])
    np.testing.assert_allclose(vector(steps), -1e-3 * clipped / (abs(clipped) + 1e-5), rtol=1e-4)


def plain_returns(running, rollout, gamma):
    """The discounted return at each valid step; `running`, those of environments, goes on."""
    returns = []
    for t, i in np.ndindex(rollout.reward.shape):
        if rollout.valid[t, i]:
            running[i] = gamma * running[i] + rollout.reward[t, i]
            returns.append(running[i])
        if not rollout.valid[t, i] or rollout.terminated[t, i] or rollout.truncated[t, i]:
            running[i] = 0.0
    return returns


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """Against a loop over three rollouts, so that returns carry over, and masked rows do not."""
    rng = np.random.default_rng(1)
    args = Args(num_envs=4, num_steps=20, normalize_rewards=True, gamma=0.9)
    agent = PPO(args, OBSERVATIONS, DISCRETE)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    running = np.zeros(4)
    seen = []
    resetting = None
    for _ in range(3):
        rollout = random_rollout(rng, 20, 4, resetting=resetting)
        resetting = rollout.terminated[-1] | rollout.truncated[-1]
        mask = rollout.valid
        reward = np.where(mask, rollout.reward + 1, 99).astype(np.float32)
        rollout = rollout._replace(reward=reward)
        seen += plain_returns(running, rollout, gamma=0.9)

        state, scaled = jit(agent.normalize_rewards)(state, rollout)

        wanted = np.clip(reward / np.std(seen), -10, 10)
        np.testing.assert_allclose(scaled.reward[mask], wanted[mask], rtol=1e-3)
        np.testing.assert_allclose(state.discounted_return, running, rtol=1e-4, atol=1e-6)
    assert np.count_nonzero(running) > 1
    # Where environments start anew no return goes on, and all else is kept.
    assert_equal(protocol.on_resume(agent, state), state._replace(discounted_return=jnp.zeros(4)))


@pytest.mark.parametrize(
    ("flags", "space", "message"),
    [
        ({}, gym.spaces.MultiBinary(2), r"takes Discrete or Mul.*, not MultiBinary.*ActionWrapper"),
        (
            {},
            gym.spaces.Box(0, 3, (2,), np.int32),
            r"a Box of floats, not Box\(0, 3.*ActionWrapper",
        ),
        (dict(num_envs=3, num_steps=5), DISCRETE, r"num_minibatches must divide num_envs \* num"),
    ],
)
def test_what_the_algorithm_cannot_do_is_a_usage_error(flags, space, message):
    with pytest.raises(UsageError, match=message):
        PPO(Args(**flags), OBSERVATIONS, space)


def test_statistics_of_images_are_a_usage_error():
    images = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    agent = PPO(Args(normalize_observations=True), images, DISCRETE)
    with pytest.raises(UsageError, match="normalize_observations takes no images"):
        jax.eval_shape(agent.init, KEY)


# ----------------------------------------------------------------------------------- the train step


SMALL = dict(
    num_envs=4,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    gamma=0.9,
    gae_lambda=0.8,
    learning_rate=1e-2,
    anneal_lr=False,
)
NORMALIZED = dict(normalize_observations=True, normalize_rewards=True)


def make_step(space=DISCRETE, optimize=None, **flags):
    """The algorithm, a State, and `train_step` of it and a rollout."""
    agent = PPO(Args(**SMALL | flags), OBSERVATIONS, space)
    agent.optimize = optimize or agent.optimize
    state = jax.jit(agent.init)(jax.random.PRNGKey(1))
    # A policy that is not uniform.
    params, unravel = ravel_pytree(state.params)
    params = params + 0.1 * jax.random.normal(jax.random.PRNGKey(2), params.shape)

    @jit
    def step(state, rollout, step=192, last=LAST):
        return agent.train_step(state, rollout, KEY, step, last)

    return agent, state._replace(params=unravel(params)), step


def show_batch(state, batch, key, learning_rate):
    """In the place of `optimize`."""
    return state, {"batch": batch, "learning_rate": learning_rate}


@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_a_batch_has_what_numpy_gives(space):
    """Of the signs of rewards, or normalised: by what was seen in rollouts before this one."""
    flags = NORMALIZED if space is BOX else dict(clip_rewards=True)
    agent, state, step = make_step(space, show_batch, **flags)
    seen = np.empty((0, 3))
    for seed in range(2):
        rollout = random_rollout(np.random.default_rng(seed), 16, 4, space)
        rollout = rollout._replace(observation=rollout.observation * 3 + 2)
        scaled = rollout._replace(reward=np.sign(rollout.reward))
        observations = np.concatenate([rollout.observation, LAST[None]])
        if space is BOX:
            _, scaled = agent.normalize_rewards(state, rollout)
            if len(seen) > 0:
                observations = (observations - seen.mean(0)) / seen.std(0)
            observations = np.clip(observations, -10, 10)
            seen = np.concatenate([seen, rollout.observation[rollout.valid]])

        state, acting, metrics = step(state, rollout)
        batch = metrics.pop("batch")

        output, value = agent.network.apply(state.params, observations.reshape(-1, 3))
        value = np.asarray(value).reshape(17, 4)
        log_prob, _ = scipy_log_prob(output[:64], np.asarray(batch.action))
        advantage = plain_gae(scaled, value[:-1], value[1:], 0.9, 0.8)
        close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4)
        close(batch.observation, observations[:-1].reshape(64, 3))
        close(batch.value, value[:-1].ravel())
        close(batch.log_prob, log_prob)
        close(batch.advantage, advantage.ravel())
        np.testing.assert_array_equal(batch.valid, rollout.valid.ravel())
        np.testing.assert_array_equal(batch.action, rollout.action.reshape(batch.action.shape))
        target = (advantage + value[:-1])[rollout.valid]
        explained = 1 - advantage[rollout.valid].var() / target.var()
        close(metrics["losses/explained_variance"], explained)
        assert_equal(acting, (state.params, state.obs_rms))  # the next rollout's policy
        if space is BOX:
            close(state.obs_rms.mean, seen.mean(0))
            close(state.obs_rms.var, seen.var(0))
            assert state.obs_rms.num_rows == len(seen)


@pytest.mark.parametrize(
    ("anneal_lr", "wanted"), [(True, [2e-3, 1.5e-3, 1e-3, 0, 0]), (False, [2e-3] * 5)]
)
def test_the_learning_rate_goes_linearly_to_0_at_the_end_and_stays_there(anneal_lr, wanted):
    flags = dict(anneal_lr=anneal_lr, learning_rate=2e-3, total_timesteps=3000)
    _, state, step = make_step(optimize=show_batch, **flags)
    rollout = random_rollout(np.random.default_rng(3), 16, 4)
    rates = []
    for begin in (0, 750, 1500, 3000, 3512):
        _, _, metrics = step(state, rollout, begin)
        assert metrics["learning_rate"] == metrics["charts/learning_rate"]
        rates.append(metrics["learning_rate"])
    np.testing.assert_allclose(rates, wanted, rtol=1e-6, atol=1e-9)


def count_rows(params, batch):
    """A loss by which SGD adds the learning rate to params [64] where the batch has the row."""
    return -params[batch.observation].sum(), {"losses/approx_kl": params.sum()}


@pytest.mark.parametrize(
    ("target_kl", "epochs"), [(None, 3), (90.0, 3), (80.0, 2), (20.0, 1), (0.0, 1)]
)
def test_epochs_take_every_row_once_and_stop_at_the_target_kl(target_kl, epochs):
    """The KL divergences of the three epochs are 24, 88 and 152."""
    agent = PPO(
        Args(**SMALL | dict(num_minibatches=4, update_epochs=3), target_kl=target_kl),
        OBSERVATIONS,
        DISCRETE,
    )
    agent.loss = count_rows
    agent.optimizer = optax.sgd
    params = jnp.zeros(64)
    state = ppo_jax.State(params, optax.sgd(1.0).init(params), None, None, None)
    batch = Batch(np.arange(64), *[None] * 5)
    state, metrics = jit(agent.optimize)(state, batch, KEY, 1.0)
    np.testing.assert_array_equal(state.params, epochs)
    assert metrics["losses/approx_kl"] == 64 * epochs - 40


@cache
def make_whole_step(is_box):
    return make_step(BOX, **NORMALIZED) if is_box else make_step()


@pytest.mark.parametrize("space", [more(DISCRETE), BOX], ids=["discrete", "box"])
def test_masked_rows_change_nothing(space):
    _, state, step = make_whole_step(space is BOX)
    rollout = random_rollout(np.random.default_rng(8), 16, 4, space)
    mask = rollout.valid
    # After a truncation the observation of the masked row is the episode's last: it is needed.
    free = ~mask
    free[1:] &= ~rollout.truncated[:-1] | rollout.terminated[:-1]
    assert 5 < free.sum() < (~mask).sum()
    last_is_free = ~mask[-1] | rollout.terminated[-1]
    assert 0 < last_is_free.sum() < 4

    def garbage(x, where):
        x = x.copy()
        x[where] = 7
        return x

    other = rollout._replace(
        observation=garbage(rollout.observation, free),
        action=garbage(rollout.action, ~mask) if space is BOX else rollout.action ^ ~mask,
        reward=garbage(rollout.reward, ~mask),
    )
    last = garbage(LAST, last_is_free)
    expected = step(state, rollout)
    assert_equal(step(state, other, last=last), expected)

    # The mask does something.
    unmasked, _, _ = step(state, other._replace(valid=np.ones_like(mask)), last=last)
    assert not np.array_equal(vector(expected[0].params), vector(unmasked.params))


def test_each_iteration_shuffles_anew():
    _, state, step = make_whole_step(True)
    rollout = random_rollout(np.random.default_rng(3), 16, 4, BOX)
    first, again, second = (vector(step(state, rollout, t)[0].params) for t in (0, 0, 64))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, second)


def test_a_rollout_without_a_step_is_harmless():
    """All environments only reset: nothing to learn from, and nothing is divided by 0."""
    _, state, step = make_whole_step(True)
    rollout = random_rollout(np.random.default_rng(0), 16, 4, BOX)
    nothing = np.zeros((16, 4), bool)
    new, _, metrics = step(state, Step(*rollout[:3], nothing, nothing, nothing))
    assert_equal(new.params, state.params)
    assert_equal((new.obs_rms, new.return_rms), (state.obs_rms, state.return_rms))
    assert metrics.pop("charts/learning_rate") == np.float32(1e-2)
    assert all(value == 0 for value in metrics.values())


# ------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("shape", "dtype", "features"),
    [((5,), np.float32, 64), ((4, 36, 36), np.uint8, 512)],
    ids=["numbers", "images"],
)
def test_weights_are_orthogonal_at_first_and_the_policy_is_almost_uniform(shape, dtype, features):
    observations = gym.spaces.Box(0, 255, shape, dtype)
    agent = PPO(Args(), observations, gym.spaces.Box(-1, 1, (3,)))
    params = jax.jit(agent.init)(jax.random.PRNGKey(0)).params["params"]
    if dtype == np.uint8:
        hidden = ("conv_0", "conv_1", "conv_2", "conv_out")
    else:
        hidden = ("actor_0", "actor_1", "critic_0", "critic_1")
    scales = dict.fromkeys(hidden, 2**0.5) | {"actor": 0.01, "critic": 1.0}
    assert set(params) == {"log_std", *scales}
    for name, scale in scales.items():
        kernel = np.asarray(params[name]["kernel"])
        kernel = kernel.reshape(-1, kernel.shape[-1])
        if kernel.shape[0] > kernel.shape[1]:
            kernel = kernel.T
        identity = np.eye(len(kernel))
        np.testing.assert_allclose(kernel @ kernel.T, scale**2 * identity, atol=1e-5)
        assert not np.any(params[name]["bias"])
    assert params["actor"]["kernel"].shape == (features, 3)
    np.testing.assert_array_equal(params["log_std"], np.zeros(3))


def test_actor_and_critic_have_two_hidden_layers_of_tanh_each():
    agent, state, _ = make_step(BOX)
    params = jax.tree.map(np.asarray, state.params["params"])
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)

    def dense(name, x):
        return x @ params[name]["kernel"] + params[name]["bias"]

    def mlp(name):
        return dense(name, np.tanh(dense(f"{name}_1", np.tanh(dense(f"{name}_0", x)))))

    output, value = agent.network.apply(state.params, x)
    np.testing.assert_allclose(output[:, :2], mlp("actor"), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(output[:, 2:], np.tile(params["log_std"], (10, 1)))
    np.testing.assert_allclose(value, mlp("critic")[:, 0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- the learning


def learned(env_id, total_timesteps, **flags):
    """The algorithm, its State, and of observations [B, ...] the actor's output and V(s)."""
    flags = dict(num_envs=16, num_steps=16, learning_rate=6e-3, gamma=0.5, ent_coef=0.0) | flags
    args = Args(**flags, total_timesteps=total_timesteps)
    run = Run(env_id=env_id, log_interval=total_timesteps, eval_episodes=0, checkpoint_interval=0)
    state, _, _ = train(args, run)
    agent = make_agent(ppo_jax, args, run)

    def answer(observations):
        normalized = ppo_jax.normalize(np.asarray(observations), state.obs_rms)
        return jax.tree.map(np.asarray, agent.network.apply(state.params, normalized))

    return agent, state, answer


def asking(answer, kinds):
    """A function: the output and the values for a kind of probe at its own observations."""

    def at(kind, *observations):
        which = np.arange(len(kinds)) == kinds.index(kind)
        rows = [np.append(which, observation) for observation in observations]
        return answer(np.array(rows, np.float32))

    return at


@pytest.mark.slow
def test_discrete_probes_are_learned():
    _, state, answer = learned("Probes-v0", 20_480)
    assert state.obs_rms is state.return_rms is None
    at = asking(answer, DISCRETE_KINDS)

    _, value = at("observation", -1, 1)
    np.testing.assert_allclose(value, [-1, 1], atol=0.05)
    _, value = at("discount", 0, 1)
    np.testing.assert_allclose(value, [0.5, 1], atol=0.05)
    _, value = at("truncation", 0)
    np.testing.assert_allclose(value, [2], atol=0.05)  # 1 / (1 - gamma)
    output, value = at("both", -1, 1)
    np.testing.assert_allclose(value, [1, 1], atol=0.05)
    probabilities = scipy.special.softmax(output, axis=-1)
    assert probabilities[0, 0] > 0.95
    assert probabilities[1, 1] > 0.95


@pytest.mark.slow
def test_continuous_probes_are_learned():
    agent, state, answer = learned("BoxProbes-v0", 20_480, normalize_rewards=False)
    assert state.obs_rms is not None
    at = asking(answer, BOX_KINDS)

    output, value = at("match", -0.2, 0.2)
    mean, log_std = output.T
    np.testing.assert_allclose(agent.to_env_action(mean), [[380], [420]], atol=5)
    assert (log_std < -0.5).all()  # less and less noise
    np.testing.assert_allclose(value, -np.exp(2 * log_std), atol=0.05)
    _, value = at("truncation", 0)
    np.testing.assert_allclose(value, [2], atol=0.05)  # a cut is not an end
    _, value = at("termination", 0, 1)
    np.testing.assert_allclose(value, [1.5, 1], atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "auto"], ids=["ordinary", "compiled"])
def test_multi_discrete_actions_are_learned_and_its_policy_can_be_loaded(how):
    """The reward of two right answers is 2."""
    flags = dict(num_envs=16, num_steps=16, learning_rate=6e-3, ent_coef=0.0)
    args = Args(total_timesteps=20_480, **flags)
    run = Run(env_id="environments:Answers-v0", vectorization=how, log_interval=20_480)
    state, _, folder = train(args, run)
    assert read_events(folder)[0]["eval/episodic_return"] == [(20_480, 2.0)]
    params = state.params if how == "sync" else jax.tree.map(lambda x: x[0], state.params)
    first, second = np.divmod(np.arange(15), 5)
    observations = np.concatenate([np.eye(3)[first], np.eye(5)[second]], axis=1, dtype=np.float32)
    _, value = make_agent(ppo_jax, args, run).network.apply(params, observations)
    np.testing.assert_allclose(value, 2.0, atol=0.1)
    actions = cleanreplay.load_policy(folder)(observations)
    np.testing.assert_array_equal(actions, np.transpose([first + 1, second - 2]))


@pytest.mark.more
def test_actor_and_critic_share_the_features_of_images():
    """uint8 images go through the Nature CNN."""
    _, state, answer = learned("ProbeImage-v0", 256, num_envs=2, learning_rate=2e-3)
    black = np.zeros((4, 36, 36), np.uint8)
    white = np.full((4, 36, 36), 255, np.uint8)
    logits, _ = answer(np.stack([black, white]))
    assert list(logits.argmax(-1)) == [0, 1]

    features = [(256, 32), (512, 64), (576, 64), (64, 512)]
    actor = (512, 2)
    critic = (512, 1)
    size = sum((inputs + 1) * outputs for inputs, outputs in [*features, actor, critic])
    assert vector(state.params).size == size


def test_a_run_takes_every_step_in_each_epoch_is_repeatable_and_its_policy_can_be_loaded():
    args = Args(total_timesteps=1_500)
    run = Run(env_id="Pendulum-v1", eval_episodes=0)
    state, returns, folder = train(args, run)
    assert tree_get(state.opt_state, "count") == 3 * 4 * 4  # gradient steps
    assert state.obs_rms.num_rows == 1536 - 4  # without those that only reset
    same, same_returns, _ = train(args, replace(run, exp_name="same"))
    assert_equal((same, same_returns), (state, returns))

    observation = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    normalized = ppo_jax.normalize(observation, state.obs_rms)
    network = make_agent(ppo_jax, args, run).network
    output, _ = network.apply(state.params, normalized)
    actions = cleanreplay.load_policy(folder)(observation)
    np.testing.assert_allclose(actions, np.clip(2 * output[:, :1], -2, 2), rtol=1e-5, atol=1e-6)
