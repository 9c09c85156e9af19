"""ppo_jax.py: its pure functions against slow loops and SciPy, what masks keep out, and what it
learns against known values.
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import scipy.stats
from conftest import slow
from events import read_events
from jax.flatten_util import ravel_pytree
from optax.tree_utils import tree_get

import buffers
import checkpoints
import ppo_jax
from ppo_jax import PPO, Args, Batch, Run, RunningMeanStd, Step, UsageError, train


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class BoxProbe(gym.Env):
    """One thing to learn with continuous actions, which must come clipped to the space.

    match: one step, reward -(action - observation)**2, the observation is +0.5 or -0.5.
    truncation: reward 1 a step, truncated after 3 steps, never terminated.
    termination: the observations 0 and 1, reward 1 a step, terminated after the second.
    """

    observation_space = gym.spaces.Box(-10.0, 10.0, (1,), np.float32)

    def __init__(self, kind: str, bound: float = 2.0) -> None:
        self.kind = kind
        self.action_space = gym.spaces.Box(-bound, bound, (1,), np.float32)

    def _observe(self) -> np.ndarray:
        return np.array([self.value], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.steps = 0
        self.value = float(self.np_random.choice([-0.5, 0.5])) if self.kind == "match" else 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.steps += 1
        if self.kind == "match":
            reward = -float((action[0] - self.value) ** 2)
            return self._observe(), reward, True, False, {}
        if self.kind == "truncation":
            return self._observe(), 1.0, False, self.steps == 3, {}
        self.value = 1.0
        return self._observe(), 1.0, self.steps == 2, False, {}


class ManyActions(BoxProbe):
    def __init__(self) -> None:
        super().__init__("match")
        self.action_space = gym.spaces.MultiDiscrete([2, 2])


class Probes(gym.Env):
    """An episode of one of several probes, drawn anew; the observation: which, and its own.

    Discrete actions are called 1 and 2 here.
    """

    def __init__(self, kinds: list[gym.Env]) -> None:
        self.kinds = kinds
        space = kinds[0].action_space
        self.observation_space = gym.spaces.Box(-10.0, 10.0, (len(kinds) + 1,), np.float32)
        self.start = int(isinstance(space, gym.spaces.Discrete))
        self.action_space = gym.spaces.Discrete(2, start=1) if self.start else space

    def _observe(self, observation: np.ndarray) -> np.ndarray:
        return np.append(np.arange(len(self.kinds)) == self.kind, observation).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.kind = self.np_random.integers(len(self.kinds))
        if seed is not None:
            for i, env in enumerate(self.kinds):
                env.reset(seed=seed + i)
        observation, info = self.kinds[self.kind].reset()
        return self._observe(observation), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        observation, *rest = self.kinds[self.kind].step(action - self.start)
        return self._observe(observation), *rest


DISCRETE_KINDS = ["observation", "discount", "truncation", "both"]
BOX_KINDS = ["match", "truncation", "termination"]
gym.register("Probes-v0", lambda: Probes([environments.Probe(kind) for kind in DISCRETE_KINDS]))
gym.register("BoxProbes-v0", lambda: Probes([BoxProbe(kind) for kind in BOX_KINDS]))
gym.register("BoxProbe-narrow-v0", BoxProbe, kwargs={"kind": "match", "bound": 0.1})
gym.register("ManyActions-v0", ManyActions)

LAST = np.random.default_rng(9).normal(size=(4, 3)).astype(np.float32)  # after a rollout
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(2)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
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
    if space is DISCRETE:
        action = rng.integers(2, size=(steps, n), dtype=np.int32)
    else:
        action = rng.normal(size=(steps, n, 2)).astype(np.float32)
    reward = (rng.normal(size=(steps, n)) * valid).astype(np.float32)
    return Step(
        observation=observation,
        action=action,
        reward=reward,
        terminated=terminated,
        truncated=truncated,
        valid=valid,
    )


def assert_equal(actual, expected):
    """Exactly, of trees of arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def vector(params):
    """All parameters in a row."""
    return np.asarray(ravel_pytree(params)[0])


# ----------------------------------------------------------------------------------- the functions


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_is_what_a_plain_loop_gives(gae_lambda):
    rng = np.random.default_rng(0)
    gamma = 0.8
    steps = 40
    n = 6
    rollout = random_rollout(rng, steps, n)
    value, next_value = rng.normal(size=(2, steps, n)).astype(np.float32)
    got = jit(ppo_jax.gae)(rollout, value, next_value, gamma, gae_lambda)
    assert rollout.terminated.sum() > 10
    assert rollout.truncated.sum() > 10
    wanted = np.zeros((steps, n))
    for t, i in zip(*np.nonzero(rollout.valid), strict=True):
        weight = 1.0
        for k in range(t, steps):
            assert rollout.valid[k, i]  # an episode goes on until it ends
            bootstrap = 0.0 if rollout.terminated[k, i] else next_value[k, i]
            delta = rollout.reward[k, i] + gamma * bootstrap - value[k, i]
            wanted[t, i] += weight * delta
            weight *= gamma * gae_lambda
            if rollout.terminated[k, i] or rollout.truncated[k, i]:
                break
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_discounted_sum_is_what_a_plain_loop_gives(reverse):
    rng = np.random.default_rng(0)
    x, discount = rng.normal(size=(2, 19, 3)).astype(np.float32)
    first = rng.normal(size=3).astype(np.float32)
    y = first
    wanted = np.zeros((19, 3))
    for t in reversed(range(19)) if reverse else range(19):
        y = x[t] + discount[t] * y
        wanted[t] = y
    got = ppo_jax.discounted_sum(x, discount, first, reverse=reverse)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_masked_mean_and_variance_are_those_of_the_rows_that_numpy_takes(shape):
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype(np.float32)
    mask = rng.random(50) < 0.5
    x[~mask] = np.nan
    np.testing.assert_allclose(ppo_jax.masked_mean(x, mask), x[mask].mean(0), rtol=1e-5)
    np.testing.assert_allclose(ppo_jax.masked_var(x, mask), x[mask].var(0), rtol=1e-5)


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_masked_mean_and_variance_of_no_row_are_0(shape):
    x = np.full(shape, np.nan, np.float32)
    none = np.zeros(50, bool)
    np.testing.assert_array_equal(ppo_jax.masked_mean(x, none), np.zeros(shape[1:]))
    np.testing.assert_array_equal(ppo_jax.masked_var(x, none), np.zeros(shape[1:]))


def test_log_probability_and_entropy_of_logits_are_those_of_scipy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 5)).astype(np.float32) * 3
    action = rng.integers(5, size=20, dtype=np.int32)
    log_prob, entropy = ppo_jax.log_prob_and_entropy(jnp.asarray(logits), jnp.asarray(action))
    for i in range(20):
        p = scipy.special.softmax(logits[i].astype(float))
        distribution = scipy.stats.rv_discrete(values=(np.arange(5), p))
        wanted = distribution.logpmf(action[i])
        assert log_prob[i] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert entropy[i] == pytest.approx(scipy.stats.entropy(p), rel=1e-4, abs=1e-5)


def test_log_probability_and_entropy_of_gaussians_are_those_of_scipy():
    rng = np.random.default_rng(0)
    mean, log_std, action = rng.normal(size=(3, 20, 4)).astype(np.float32)
    output = jnp.concatenate([mean, log_std], axis=-1)
    log_prob, entropy = ppo_jax.log_prob_and_entropy(output, jnp.asarray(action))
    normal = scipy.stats.norm(mean.astype(float), np.exp(log_std.astype(float)))
    np.testing.assert_allclose(log_prob, normal.logpdf(action).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(entropy, normal.entropy().sum(-1), rtol=1e-4)


NO_ROWS = RunningMeanStd(jnp.zeros(3), jnp.ones(3), jnp.float32(0))


def test_moments_are_those_of_all_rows_that_were_taken_in():
    rng = np.random.default_rng(0)
    moments = NO_ROWS
    seen = np.empty((0, 3))
    for rows in (1, 7, 30, 20):
        x = (rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = rng.permutation(30) < rows
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        moments = ppo_jax.update_rms(moments, x, mask)
        assert moments.num_rows == len(seen)
        np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(moments.var, seen.var(0), rtol=1e-3)


@pytest.mark.parametrize("rows", [0, 9])
def test_moments_stay_the_same_without_a_row(rows):
    moments = NO_ROWS
    if rows > 0:
        moments = RunningMeanStd(
            jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 9.0, 0.5]), jnp.float32(rows)
        )
    x = np.full((30, 3), np.nan, np.float32)
    assert_equal(ppo_jax.update_rms(moments, x, np.zeros(30, bool)), moments)


def test_observations_are_normalised_to_deviations_from_the_mean_and_at_most_10():
    moments = RunningMeanStd(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.25]), jnp.float32(9))
    x = np.array([[3.0, -2.0], [1.0, 0.0], [99.0, -99.0]], np.float32)
    wanted = [[1.0, 0.0], [0.0, 4.0], [10.0, -10.0]]
    np.testing.assert_allclose(ppo_jax.normalize(x, moments), wanted, rtol=1e-6)
    assert ppo_jax.normalize(x, None) is x


# ----------------------------------------------------------------------------------- the algorithm


def make_state(alg, output, **params):
    """A state in which the last layer of the actor gives `output` for every observation."""
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    zeros = jax.tree.map(jnp.zeros_like, state.params)
    zeros["params"]["Dense_4"]["bias"] = jnp.asarray(output, jnp.float32)
    return state._replace(params={"params": zeros["params"] | params})


def explore(alg, params, key=0, step=0):
    """Actions of 20,000 environments that all observe zeros."""
    observation = np.zeros((20_000, 3), np.float32)
    actions = alg.act(params, observation, jax.random.PRNGKey(key), step)
    assert actions.dtype == alg.example_step.action.dtype
    return np.asarray(actions)


def test_discrete_actions_are_drawn_from_the_policy():
    p = np.array([0.1, 0.2, 0.7])
    alg = PPO(Args(), OBSERVATIONS, gym.spaces.Discrete(3))
    params = alg.policy_params(make_state(alg, output=np.log(p)))
    actions = explore(alg, params)
    assert scipy.stats.chisquare(np.bincount(actions), 20_000 * p).pvalue > 1e-3
    np.testing.assert_array_equal(explore(alg, params), actions)
    # Draws are independent of those of the next environment, the next step and another key.
    for others in (np.roll(actions, 1), explore(alg, params, step=1), explore(alg, params, key=1)):
        counts = np.bincount(actions * 3 + others)
        wanted = 20_000 * np.outer(p, p).ravel()
        assert scipy.stats.chisquare(counts, wanted).pvalue > 1e-3
    np.testing.assert_array_equal(alg.act(params, np.zeros((5, 3), np.float32)), 2)


def test_continuous_actions_are_drawn_from_the_policy():
    alg = PPO(Args(), OBSERVATIONS, BOX)
    log_std = jnp.log(np.array([3.0, 0.5], np.float32))
    params = alg.policy_params(make_state(alg, output=[1.0, -2.0], log_std=log_std))
    actions = explore(alg, params)
    first, second = actions.T
    assert scipy.stats.kstest(first, scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(second, scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3
    for others in (second, explore(alg, params, step=1)[:, 0], explore(alg, params, key=1)[:, 0]):
        assert abs(np.corrcoef(first, others)[0, 1]) < 0.03  # 4 standard deviations
    np.testing.assert_array_equal(alg.act(params, np.zeros((5, 3), np.float32)), [[1.0, -2.0]] * 5)


def test_act_sees_normalised_observations():
    alg = PPO(Args(), OBSERVATIONS, BOX)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    moments = RunningMeanStd(
        jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 9.0, 16.0]), jnp.float32(10)
    )
    params = alg.policy_params(state._replace(obs_rms=moments))
    normalized = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    raw = (normalized * [2, 3, 4] + [1, 2, 3]).astype(np.float32)

    without_moments = (state.params, None)
    wanted = alg.act(without_moments, normalized)
    np.testing.assert_allclose(alg.act(params, raw), wanted, rtol=1e-4)
    # Normalisation matters for these actions.
    assert np.abs(wanted - alg.act(without_moments, raw)).max() > 1e-3


@pytest.mark.parametrize(
    ("space", "dtype", "auto"),
    [
        (DISCRETE, np.float32, (False, False)),
        (BOX, np.float32, (True, True)),
        (BOX, np.uint8, (False, True)),
    ],
)
def test_what_is_normalised(space, dtype, auto):
    observations = gym.spaces.Box(0, 255, (3,), dtype)

    def normalised(of_observations, of_rewards):
        args = Args(normalize_observations=of_observations, normalize_rewards=of_rewards)
        state = jax.eval_shape(PPO(args, observations, space).init, jax.random.PRNGKey(0))
        if state.obs_rms is not None:
            assert state.obs_rms.mean.shape == (3,)
        return state.obs_rms is not None, state.return_rms is not None

    assert normalised("auto", "auto") == auto
    assert normalised("yes", "yes") == (True, True)
    assert normalised("no", "no") == (False, False)
    assert normalised("yes", "no") == (True, False)


class FixedNetwork:
    """The same logits and value for every observation."""

    def apply(self, params, observation):
        rows = len(observation)
        return jnp.broadcast_to(params["logits"], (rows, 2)), jnp.broadcast_to(params["v"], rows)


# Two actions of probability 0.8 and 0.2 now; four rows, and a fifth that is masked.
FIXED = {"logits": np.log(np.float32([0.8, 0.2])), "v": np.float32(1.0)}
BATCH = Batch(
    observation=np.zeros((5, 1), np.float32),
    action=np.array([0, 0, 1, 1, 0], np.int32),
    valid=np.array([True, True, True, True, False]),
    log_prob=np.log(np.float32([0.5, 0.5, 0.25, 0.5, 1e-6])),
    value=np.array([0.5, 0.9, 1.0, 3.0, 1e6], np.float32),
    advantage=np.array([1.0, -1.0, 2.0, -2.0, 1e6], np.float32),
)
RATIO = np.array([1.6, 1.6, 0.8, 0.4])
TARGET = np.array([1.5, -0.1, 3.0, 1.0])


def losses_of_batch(**flags):
    alg = PPO(Args(**flags), OBSERVATIONS, DISCRETE)
    alg.network = FixedNetwork()
    return alg.loss(FIXED, BATCH)


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_losses_are_those_computed_by_hand(clip_vloss):
    total, losses = losses_of_batch(
        clip_coef=0.1, norm_adv=False, ent_coef=0.3, vf_coef=0.7, clip_vloss=clip_vloss
    )
    # Positive advantages: at most 1.1; negative: at least 0.9, which makes the loss larger.
    surrogate = np.array([1.1 * 1, 1.6 * -1, 0.8 * 2, 0.9 * -2]).mean()
    error = (1.0 - TARGET) ** 2
    if clip_vloss:
        error = np.maximum(error, (np.array([0.6, 1.0, 1.0, 2.9]) - TARGET) ** 2)
    value_loss = error.mean() / 2
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.2))
    wanted = {
        "losses/policy_loss": -surrogate,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/old_approx_kl": -np.log(RATIO).mean(),
        "losses/approx_kl": (RATIO - 1 - np.log(RATIO)).mean(),
        "losses/clipfrac": 1.0,
    }
    assert losses.keys() == wanted.keys()
    for tag, value in wanted.items():
        assert losses[tag] == pytest.approx(value, rel=1e-4), tag
    assert total == pytest.approx(-surrogate - 0.3 * entropy + 0.7 * value_loss, rel=1e-5)


def test_clipfrac_is_the_share_of_ratios_that_were_clipped():
    _, losses = losses_of_batch(clip_coef=0.5)
    assert losses["losses/clipfrac"] == 0.75  # all but the ratio 0.8


def test_advantages_are_normalised_over_valid_rows_and_the_target_of_the_value_is_not():
    _, losses = losses_of_batch(clip_coef=10.0)
    advantage = BATCH.advantage[:4]
    normalized = (advantage - advantage.mean()) / advantage.std()
    policy_loss = -(RATIO * normalized).mean()
    value_loss = ((1.0 - TARGET) ** 2).mean() / 2
    assert losses["losses/policy_loss"] == pytest.approx(policy_loss, rel=1e-5)
    assert losses["losses/value_loss"] == pytest.approx(value_loss, rel=1e-5)


@pytest.mark.parametrize(
    ("gradient", "clipped"),
    [
        ([3.0, -4.0, 0.0], [0.3, -0.4, 0.0]),
        ([1e-5, -3e-5, 0.4], [1e-5, -3e-5, 0.4]),
    ],
)
def test_first_step_of_the_optimizer_is_adams_with_a_gradient_no_longer_than_half(
    gradient, clipped
):
    """Of all parameters together, as one vector; epsilon is 1e-5."""
    optimizer = PPO(Args(), OBSERVATIONS, DISCRETE).optimizer(jnp.float32(1e-3))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradients = {"a": jnp.array(gradient[:2]), "b": jnp.array(gradient[2:])}
    changes, _ = optimizer.update(gradients, optimizer.init(params), params)
    wanted = -1e-3 * np.array(clipped) / (np.abs(clipped) + 1e-5)
    np.testing.assert_allclose(changes["a"], wanted[:2], rtol=1e-4)
    np.testing.assert_allclose(changes["b"], wanted[2:], rtol=1e-4)


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
    args = Args(num_envs=4, num_steps=20, normalize_rewards="yes", gamma=0.9)
    alg = PPO(args, OBSERVATIONS, DISCRETE)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
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

        state, scaled = jit(alg.normalize_rewards)(state, rollout)

        wanted = np.clip(rollout.reward / np.std(seen), -10, 10)
        np.testing.assert_allclose(scaled.reward[mask], wanted[mask], rtol=1e-3)
        np.testing.assert_allclose(state.discounted_return, running, rtol=1e-4, atol=1e-6)
        assert np.any(running) or not resetting.all()
    assert np.count_nonzero(state.discounted_return) > 1


def test_no_return_goes_on_where_environments_start_anew_and_all_else_is_kept():
    alg = PPO(Args(normalize_rewards="yes"), OBSERVATIONS, DISCRETE)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    state = state._replace(discounted_return=jnp.array([0.5, 0.0, -1.0, 2.0]))
    assert_equal(alg.on_resume(state), state._replace(discounted_return=jnp.zeros(4)))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(
    ("low", "high", "actions", "wanted"),
    [
        ([300, -1], [500, 1], [[-1, 0.25], [0, -1], [1, 1], [7, -7]], [[300, 0.25], [400, -1]]),
        ([0, -np.inf], [np.inf, 2], [[-1, 1], [3, 7], [0.5, -9], [0, 2]], [[0, 1], [3, 2]]),
    ],
)
def test_actions_from_minus_1_to_1_cover_a_bounded_box_and_others_are_clipped(
    low, high, actions, wanted, array
):
    wanted = [*wanted, *{300: [[500, 1], [500, -1]], 0: [[0.5, -9], [0, 2]]}[low[0]]]
    box = gym.spaces.Box(np.float32(low), np.float32(high))
    got = PPO(Args(), OBSERVATIONS, box).to_env_action(array(np.float32(actions)))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_discrete_actions_are_counted_from_the_start_of_the_space(array):
    alg = PPO(Args(), OBSERVATIONS, gym.spaces.Discrete(3, start=-1))
    assert alg.to_env_action(array([0, 2])).tolist() == [-1, 1]


def test_actions_are_scaled_and_clipped_in_the_environment_and_not_in_the_rollout():
    """The environment asserts that they are in its Box; what is learned from keeps the tails."""
    args = Args(num_envs=8, num_steps=128)
    run = Run(env_id="BoxProbe-narrow-v0", checkpoint_interval=0)
    alg, _ = ppo_jax.make_algorithm(args, run)
    envs = ppo_jax.make_envs(args, run, 8)
    observation, _ = envs.reset(seed=0)
    env_state = (observation, np.ones(8, bool), np.zeros((2, 8)))
    params = alg.policy_params(make_state(alg, output=[0.0]))

    key = jax.random.PRNGKey(0)
    rollout, _, _ = ppo_jax.collect_rollout(alg, envs, params, env_state, key, 0)
    envs.close()

    assert scipy.stats.kstest(rollout.action.ravel(), "norm").pvalue > 1e-3
    in_env = (0.1 * rollout.action).clip(np.float32(-0.1), np.float32(0.1))
    distance = (in_env - rollout.observation)[..., 0]
    wanted = np.where(rollout.valid, -(distance**2), 0)
    np.testing.assert_allclose(rollout.reward, wanted, rtol=1e-5)


class Far(gym.Env):
    """One step; the best action is 420, of 300 to 500."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Box(300.0, 500.0, (1,))

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), -(((action[0] - 420) / 100) ** 2), True, False, {}


gym.register("Far-v0", Far)


@pytest.mark.slow
def test_an_action_in_a_box_far_from_0_is_learned():
    state, answer = learned("Far-v0", 20_480, normalize_rewards="no")
    output, _ = answer([[0.0]])
    assert 400 + 100 * output[0, 0] == pytest.approx(420, abs=5)


@pytest.mark.parametrize(
    ("flags", "space", "message"),
    [
        (
            {},
            gym.spaces.MultiDiscrete([2, 2]),
            r"PPO takes Discrete .* or a Box \[A\] of floats: Multi",
        ),
        ({}, gym.spaces.Box(-1, 1, (2, 3)), r"PPO takes Discrete .* or a Box \[A\] of floats: Box"),
        (
            dict(num_envs=3, num_steps=5),
            DISCRETE,
            r"num_minibatches must divide num_envs \* num_steps",
        ),
    ],
)
def test_what_the_algorithm_cannot_do_is_a_usage_error(flags, space, message):
    with pytest.raises(UsageError, match=message):
        PPO(Args(**flags), OBSERVATIONS, space)


def test_statistics_of_images_are_a_usage_error():
    images = gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
    with pytest.raises(UsageError, match="normalize_observations takes no images"):
        PPO(Args(normalize_observations="yes"), images, DISCRETE)


@pytest.mark.parametrize(
    ("flags", "env_id", "message"),
    [
        ({}, "ManyActions-v0", "PPO takes Discrete actions or a Box"),
        (
            dict(num_steps=0, update_epochs=-1),
            "CartPole-v1",
            r"num_steps must be from 1 to 2\*\*31 - 1, not 0",
        ),
        (
            dict(update_epochs=-1),
            "CartPole-v1",
            r"update_epochs must be from 1 to 2\*\*31 - 1, not -1",
        ),
    ],
)
def test_a_mistake_in_flags_is_found_before_there_is_a_folder(flags, env_id, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        train(Args(**flags), Run(env_id=env_id))
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------- the train step


SMALL = dict(
    num_envs=4,
    num_steps=16,
    num_minibatches=2,
    update_epochs=2,
    gamma=0.9,
    learning_rate=1e-2,
    anneal_lr=False,
)
NORMALIZED = dict(normalize_observations="yes", normalize_rewards="yes")
KEY = jax.random.PRNGKey(7)
STEP = 192  # where the iteration begins


def make_step(space=DISCRETE, optimizer=None, loss=None, **flags):
    """The algorithm, a State, and `train_step` of it and a rollout."""
    alg = PPO(Args(**{**SMALL, **flags}), OBSERVATIONS, space)
    alg.optimizer = optimizer or alg.optimizer
    alg.loss = loss or alg.loss
    state = jax.jit(alg.init)(jax.random.PRNGKey(1))
    # A policy that is not uniform.
    params, unravel = ravel_pytree(state.params)
    params = params + 0.1 * jax.random.normal(jax.random.PRNGKey(2), params.shape)

    @jit
    def step(state, rollout, step=STEP, last=LAST):
        return alg.train_step(state, rollout, last, KEY, step)

    return alg, state._replace(params=unravel(params)), step


@cache
def make_plain_step(box):
    """Of rewards that are clipped; with a Box, of observations and rewards that are normalised."""
    flags = dict(gae_lambda=0.8, ent_coef=0.02, vf_coef=0.6)
    if not box:
        return make_step(DISCRETE, optax.sgd, **flags, clip_rewards=True)
    alg, state, step = make_step(BOX, optax.sgd, **flags, **NORMALIZED)
    observations = RunningMeanStd(
        jnp.array([0.1, 0.2, -0.3]), jnp.array([0.5, 1, 2]), jnp.float32(30)
    )
    state = state._replace(
        obs_rms=observations,
        return_rms=RunningMeanStd(jnp.float32(0.2), jnp.float32(3), jnp.float32(30)),
        discounted_return=jnp.array([0.5, 0, 0, -1]),
    )
    return alg, state, step


def plain_log_prob(output, action):
    """Log-probability and entropy, by what JAX has; actions are numbers or [B, 2]."""
    if action.ndim == 1:
        log_probs = jax.nn.log_softmax(output)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        return log_probs[jnp.arange(len(action)), action], entropy
    mean = output[:, :2]
    log_std = output[:, 2:]
    log_prob = jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std)).sum(-1)
    entropy = (0.5 * jnp.log(2 * jnp.pi * jnp.e) + log_std).sum(-1)
    return log_prob, entropy


def plain_loss(params, apply, batch):
    """The total loss of a batch of which all rows count; that of the policy, and the KL."""
    output, value = apply(params, batch.observation)
    log_prob, entropy = plain_log_prob(output, batch.action)
    ratio = jnp.exp(log_prob - batch.log_prob)
    advantage = batch.advantage - batch.advantage.mean()
    advantage /= batch.advantage.std() + 1e-8
    clipped = jnp.clip(ratio, 0.8, 1.2)
    policy_loss = jnp.maximum(-advantage * ratio, -advantage * clipped).mean()
    target = batch.advantage + batch.value
    near = batch.value + jnp.clip(value - batch.value, -0.2, 0.2)
    value_loss = 0.5 * jnp.maximum((value - target) ** 2, (near - target) ** 2).mean()
    kl = (ratio - 1 - jnp.log(ratio)).mean()
    return policy_loss - 0.02 * entropy.mean() + 0.6 * value_loss, (policy_loss, kl)


def plain_train_step(alg, rollout, observations, minibatches, params):
    """Parameters after the minibatches, without masked rows: these are thrown away.

    And the metrics; the losses are those of the last epoch. `observations` [17, 4, 3] are those of
    the rollout and the ones after it, as the network sees them.
    """
    mask = rollout.valid.ravel()
    output, value = alg.network.apply(params, observations.reshape(-1, 3))
    value = value.reshape(17, 4)
    advantage = ppo_jax.gae(rollout, value[:-1], value[1:], 0.9, 0.8).ravel()
    action = rollout.action.reshape(64, *rollout.action.shape[2:])
    log_prob, _ = plain_log_prob(output[:64], action)
    observation = observations[:-1].reshape(64, 3)
    batch = Batch(observation, action, mask, log_prob, value[:-1].ravel(), advantage)

    for epoch in minibatches:
        losses = []
        for rows in epoch:
            minibatch = jax.tree.map(lambda x, rows=rows[mask[rows]]: x[rows], batch)
            gradient_fn = jax.grad(plain_loss, has_aux=True)
            gradient, policy_loss_and_kl = gradient_fn(params, alg.network.apply, minibatch)
            params = jax.tree.map(lambda x, slope: x - 1e-2 * slope, params, gradient)
            losses.append(policy_loss_and_kl)
    policy_loss, kl = jnp.array(losses).mean(0)
    target = batch.advantage + batch.value
    explained_variance = 1 - jnp.var((target - batch.value)[mask]) / jnp.var(target[mask])
    return params, policy_loss, kl, explained_variance


@pytest.mark.parametrize("space", [slow(DISCRETE), BOX], ids=["discrete", "box"])
def test_train_step_is_what_a_plain_loop_gives(space):
    """Masked rows are thrown away there; here they must be as good as that."""
    alg, state, step = make_plain_step(space is BOX)
    rollout = random_rollout(np.random.default_rng(3), 16, 4, space)
    assert rollout.truncated.any()

    new, acting, metrics = step(state, rollout)

    observations = np.concatenate([rollout.observation, LAST[None]])
    if space is DISCRETE:
        rollout = rollout._replace(reward=np.sign(rollout.reward))
    else:
        _, rollout = alg.normalize_rewards(state, rollout)
        observations = ppo_jax.normalize(observations, state.obs_rms)
    key = jax.random.fold_in(KEY, STEP)
    minibatches = np.asarray(buffers.shuffled_minibatches(key, 64, 2, 2))
    plain_step = jit(partial(plain_train_step, alg, rollout, observations, minibatches))
    params, policy_loss, kl, explained_variance = plain_step(state.params)

    assert np.abs(vector(params) - vector(state.params)).max() > 1e-3
    np.testing.assert_allclose(vector(new.params), vector(params), rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(metrics["losses/policy_loss"], policy_loss, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(metrics["losses/approx_kl"], kl, rtol=1e-3, atol=1e-7)
    explained = metrics["losses/explained_variance"]
    np.testing.assert_allclose(explained, explained_variance, rtol=1e-4)
    assert_equal(acting, (new.params, new.obs_rms))
    assert metrics.keys() == LEARNING_TAGS


@pytest.mark.parametrize("space", [slow(DISCRETE), BOX], ids=["discrete", "box"])
def test_masked_rows_change_nothing(space):
    _, state, step = make_plain_step(space is BOX)
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
        x[where] = 77
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
    new, _, _ = expected
    assert not np.array_equal(vector(new.params), vector(unmasked.params))


def test_a_rollout_without_a_step_is_harmless():
    """All environments only reset: nothing to learn from, and nothing is divided by 0."""
    _, state, step = make_step(num_steps=1, num_minibatches=4, **NORMALIZED)
    rollout = random_rollout(np.random.default_rng(0), 1, 4, resetting=np.ones(4, bool))
    assert not rollout.valid.any()
    new, _, metrics = step(state, rollout)
    assert_equal(new.params, state.params)
    assert_equal((new.obs_rms, new.return_rms), (state.obs_rms, state.return_rms))
    assert metrics.pop("charts/learning_rate") == np.float32(1e-2)
    assert all(value == 0 for value in metrics.values())


@pytest.mark.parametrize("anneal_lr", [slow(False), True])
def test_the_learning_rate_goes_linearly_to_0_at_the_end_and_stays_there(anneal_lr):
    """By the length of a gradient step, which is proportional to it."""
    _, state, step = make_step(
        optimizer=optax.sgd,
        anneal_lr=anneal_lr,
        learning_rate=2e-3,
        total_timesteps=3000,
        num_minibatches=1,
        update_epochs=1,
    )
    rollout = random_rollout(np.random.default_rng(3), 16, 4)
    before = vector(state.params)
    lengths = []
    rates = []
    for begin in (0, 750, 1500, 3000, 3512):
        new, _, metrics = step(state, rollout, begin)
        rates.append(metrics["charts/learning_rate"])
        lengths.append(np.linalg.norm(vector(new.params) - before))
    wanted = [2e-3, 1.5e-3, 1e-3, 0, 0] if anneal_lr else [2e-3] * 5
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    assert lengths[0] > 1e-4
    shares = np.array(lengths) / lengths[0]
    np.testing.assert_allclose(shares, np.array(wanted) / 2e-3, rtol=1e-3)


def test_each_iteration_shuffles_anew():
    _, state, step = make_plain_step(True)
    rollout = random_rollout(np.random.default_rng(3), 16, 4, BOX)

    def learned_at(begin):
        new, _, _ = step(state, rollout, begin)
        return vector(new.params)

    first = learned_at(0)
    np.testing.assert_array_equal(learned_at(0), first)
    assert not np.array_equal(learned_at(64), first)


def make_optimize(**flags):
    """`optimize` of a random batch, at a learning rate."""
    alg, state, _ = make_step(**flags)
    rng = np.random.default_rng(2)
    observation = rng.normal(size=(64, 3)).astype(np.float32)
    action = rng.integers(2, size=64, dtype=np.int32)
    output, value = alg.network.apply(state.params, observation)
    log_prob, _ = ppo_jax.log_prob_and_entropy(output, action)
    batch = Batch(
        observation=observation,
        action=action,
        valid=rng.random(64) < 0.8,
        log_prob=log_prob,
        value=value,
        advantage=rng.normal(size=64).astype(np.float32),
    )

    return partial(jit(alg.optimize), state, batch, KEY)


@cache
def optimize_for(epochs):
    return make_optimize(update_epochs=epochs)


def assert_same_learning(actual, expected):
    """Also the metrics, which are those of the last epoch that counted."""
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), actual, expected)


def test_target_kl_ends_learning_after_the_epoch_that_went_too_far():
    """The longer the steps, the sooner the policy is too far from the old one."""
    stops = make_optimize(update_epochs=3, target_kl=1e-3)

    after_one = optimize_for(1)(2e-2)
    assert after_one[1]["losses/approx_kl"] > 1e-3
    assert tree_get(after_one[0].opt_state, "count") == 2
    assert_same_learning(stops(2e-2), after_one)

    after_two = optimize_for(2)(1e-3)
    assert optimize_for(1)(1e-3)[1]["losses/approx_kl"] < 1e-3
    assert after_two[1]["losses/approx_kl"] > 1e-3
    assert_same_learning(stops(1e-3), after_two)

    after_all, _ = stops(1e-5)
    assert tree_get(after_all.opt_state, "count") == 6


def test_a_target_kl_of_0_leaves_one_epoch():
    stops_at_once = make_optimize(update_epochs=3, target_kl=0.0)
    assert_same_learning(stops_at_once(1e-3), optimize_for(1)(1e-3))


def means_as_losses(params, batch):
    """A loss that learns nothing, and means over a batch: of log_prob, and of what was seen."""
    nothing = 0.0 * ravel_pytree(params)[0].sum()
    return nothing, {
        "losses/approx_kl": nothing,
        "log_prob": ppo_jax.masked_mean(batch.log_prob, batch.valid),
        "seen": ppo_jax.masked_mean(batch.observation, batch.valid).sum(),
    }


def test_statistics_change_after_the_update_that_they_were_taken_in():
    """What is learned from is the policy that acted, and what it saw."""
    alg, state, step = make_step(BOX, loss=means_as_losses, num_minibatches=1, **NORMALIZED)
    seen = np.empty((0, 3))
    for seed in range(2):
        rollout = random_rollout(np.random.default_rng(seed), 16, 4, BOX)
        rollout = rollout._replace(observation=rollout.observation * 3 + 2)
        mask = rollout.valid
        x = rollout.observation[mask]
        if len(seen) > 0:
            x = (x - seen.mean(0)) / seen.std(0)
        x = np.clip(x, -10, 10)
        output, _ = alg.network.apply(state.params, x)
        mean, log_std = np.split(np.asarray(output), 2, axis=-1)
        log_prob = scipy.stats.norm.logpdf(rollout.action[mask], mean, np.exp(log_std)).sum(-1)

        state, (_, moments), metrics = step(state, rollout)

        np.testing.assert_allclose(metrics["log_prob"], log_prob.mean(), rtol=1e-4)
        np.testing.assert_allclose(metrics["seen"], x.mean(0).sum(), rtol=1e-4, atol=1e-5)
        seen = np.concatenate([seen, rollout.observation[mask]])
        np.testing.assert_allclose(state.obs_rms.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(state.obs_rms.var, seen.var(0), rtol=1e-4)
        assert state.obs_rms.num_rows == len(seen)
        assert_equal(moments, state.obs_rms)  # with which the next rollout is acted


# ------------------------------------------------------------------------------------- the network


@pytest.mark.parametrize(
    ("shape", "dtype", "features"),
    [((5,), np.float32, 64), ((4, 36, 36), np.uint8, 512)],
    ids=["numbers", "images"],
)
def test_weights_are_orthogonal_at_first_and_the_policy_is_almost_uniform(shape, dtype, features):
    observations = gym.spaces.Box(0, 255, shape, dtype)
    alg = PPO(Args(), observations, gym.spaces.Box(-1, 1, (3,)))
    params = jax.jit(alg.init)(jax.random.PRNGKey(0)).params["params"]
    scales = {f"Dense_{i}": 2**0.5 for i in range(4)}  # the hidden layers
    scales |= {"Dense_4": 0.01, "Dense_5": 1.0}  # the actor's output, and the critic's
    assert set(params) == {"log_std", *scales}
    for name, scale in scales.items():
        kernel = np.asarray(params[name]["kernel"])
        if kernel.shape[0] > kernel.shape[1]:
            kernel = kernel.T
        identity = np.eye(len(kernel))
        np.testing.assert_allclose(kernel @ kernel.T, scale**2 * identity, atol=1e-5)
        assert not np.any(params[name]["bias"])
    assert params["Dense_4"]["kernel"].shape == (features, 3)
    np.testing.assert_array_equal(params["log_std"], np.zeros(3))


def test_actor_and_critic_have_two_hidden_layers_of_tanh_each():
    alg, state, _ = make_step(BOX)
    params = jax.tree.map(np.asarray, state.params["params"])
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)

    def dense(i, x):
        return x @ params[f"Dense_{i}"]["kernel"] + params[f"Dense_{i}"]["bias"]

    def mlp(i):
        return np.tanh(dense(i + 1, np.tanh(dense(i, x))))

    output, value = alg.network.apply(state.params, x)
    np.testing.assert_allclose(output[:, :2], dense(4, mlp(0)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(output[:, 2:], np.tile(params["log_std"], (10, 1)))
    np.testing.assert_allclose(value, dense(5, mlp(2))[:, 0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- the learning


def learned(env_id, total_timesteps, **flags):
    """What `train` learned: its State, and of observations [B, ...] the actor's output and V(s)."""
    flags = dict(num_envs=16, num_steps=16, learning_rate=6e-3, gamma=0.5, ent_coef=0.0) | flags
    args = Args(**flags, total_timesteps=total_timesteps)
    run = Run(env_id=env_id, log_interval=total_timesteps, eval_episodes=0, checkpoint_interval=0)
    state, _, _ = train(args, run)
    alg, _ = ppo_jax.make_algorithm(args, run)

    def answer(observations):
        normalized = ppo_jax.normalize(np.asarray(observations), state.obs_rms)
        return jax.tree.map(np.asarray, alg.network.apply(state.params, normalized))

    return state, answer


def asking(answer, kinds):
    """A function: the output and the values for a kind of probe at its own observations."""

    def at(kind, *observations):
        which = np.arange(len(kinds)) == kinds.index(kind)
        rows = [np.append(which, observation) for observation in observations]
        return answer(np.array(rows, np.float32))

    return at


def test_discrete_probes_are_learned():
    state, answer = learned("Probes-v0", 20_480)
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


def test_continuous_probes_are_learned():
    state, answer = learned("BoxProbes-v0", 20_480, normalize_rewards="no")
    assert state.obs_rms is not None
    at = asking(answer, BOX_KINDS)

    output, value = at("match", -0.5, 0.5)
    mean, log_std = output.T
    np.testing.assert_allclose(2 * mean, [-0.5, 0.5], atol=0.1)  # the Box is from -2 to 2
    assert (log_std < -0.5).all()  # less and less noise
    np.testing.assert_allclose(value, -4 * np.exp(2 * log_std), atol=0.1)
    _, value = at("truncation", 0)
    np.testing.assert_allclose(value, [2], atol=0.05)  # a cut is not an end
    _, value = at("termination", 0, 1)
    np.testing.assert_allclose(value, [1.5, 1], atol=0.05)


@pytest.mark.slow
def test_actor_and_critic_share_the_features_of_images():
    """uint8 images go through the Nature CNN."""
    state, answer = learned("ProbeImage-v0", 256, num_envs=2, learning_rate=2e-3)
    black = np.zeros((4, 36, 36), np.uint8)
    white = np.full((4, 36, 36), 255, np.uint8)
    logits, _ = answer(np.stack([black, white]))
    assert list(logits.argmax(-1)) == [0, 1]

    features = [(256, 32), (512, 64), (576, 64), (64, 512)]
    actor = (512, 2)
    critic = (512, 1)
    size = sum((inputs + 1) * outputs for inputs, outputs in [*features, actor, critic])
    assert vector(state.params).size == size


# ------------------------------------------------------------------------------------- the program


LEARNING_TAGS = {
    "charts/learning_rate",
    "losses/policy_loss",
    "losses/value_loss",
    "losses/entropy",
    "losses/old_approx_kl",
    "losses/approx_kl",
    "losses/clipfrac",
    "losses/explained_variance",
}
TAGS = LEARNING_TAGS | {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/SPS",
    "eval/episodic_return",
}
PENDULUM_ARGS = Args(total_timesteps=1_500, anneal_lr=False)
PENDULUM_RUN = Run(env_id="Pendulum-v1", log_interval=512, eval_episodes=2)


@pytest.fixture(scope="module")
def pendulum(tmp_path_factory):
    """State, returns and folder of a run of three iterations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("pendulum"))
        return train(PENDULUM_ARGS, PENDULUM_RUN)


def test_the_charts_have_all_metrics_at_each_log_interval(pendulum):
    _, returns, folder = pendulum
    scalars, _ = read_events(folder)
    assert set(scalars) == TAGS
    for tag, points in scalars.items():
        assert np.isfinite([value for _, value in points]).all(), tag
    for tag in LEARNING_TAGS:
        assert [step for step, _ in scalars[tag]] == [512, 1024, 1536]
    np.testing.assert_allclose([rate for _, rate in scalars["charts/learning_rate"]], 2.5e-4)
    # The four first episodes end in the second iteration, and no others.
    ((step, mean_return),) = scalars["charts/episodic_return"]
    assert step == 1024
    assert returns == pytest.approx([mean_return])
    assert scalars["charts/episodic_length"] == [(1024, 200.0)]
    assert [step for step, _ in scalars["eval/episodic_return"]] == [1536]


def test_an_iteration_learns_from_each_valid_step_in_each_epoch(pendulum):
    state, _, _ = pendulum
    assert tree_get(state.opt_state, "count") == 3 * 4 * 4  # gradient steps
    assert state.obs_rms.num_rows == 1536 - 4  # without those that only reset


def test_the_same_seed_makes_the_same_run(pendulum):
    state, returns, _ = pendulum
    same, same_returns, _ = train(PENDULUM_ARGS, replace(PENDULUM_RUN, exp_name="same"))
    assert_equal(same, state)
    np.testing.assert_array_equal(same_returns, returns)


def test_a_resumed_run_that_was_complete_has_the_state_and_the_returns_that_were_saved(pendulum):
    state, returns, folder = pendulum
    again, same_returns, same_folder = train(
        PENDULUM_ARGS, replace(PENDULUM_RUN, resume=str(folder))
    )
    assert same_folder == folder
    np.testing.assert_array_equal(same_returns, returns)
    state = state._replace(discounted_return=np.zeros(4))  # the environments start anew
    assert_equal(jax.device_get(again), jax.device_get(state))


def test_a_loaded_policy_gives_actions_without_noise(pendulum):
    state, _, folder = pendulum
    observation = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    normalized = ppo_jax.normalize(observation, state.obs_rms)
    output, _ = ppo_jax.ActorCritic(1, is_gaussian=True).apply(state.params, normalized)
    actions = checkpoints.load_policy(folder, ppo_jax)(observation)
    np.testing.assert_allclose(actions, np.clip(2 * output[:, :1], -2, 2), rtol=1e-5)
