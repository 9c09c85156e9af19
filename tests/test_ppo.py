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

import buffers
import ppo_jax
from ppo_jax import LOSSES, PPO, Args, Batch, Moments, Run, Step, UsageError, train


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
        self.kind, self.bound = kind, bound
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
        self.kinds, space = kinds, kinds[0].action_space
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

OBSERVATION = np.zeros(3, np.float32)
DISCRETE = gym.spaces.Discrete(2)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
# XLA compiles in half of the time.
jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def random_rollout(rng, steps, n, space=DISCRETE, resetting=None):
    """What `collect_rollout` returns, with observations [3]."""
    terminated, truncated = rng.random((2, steps, n)) < 0.15
    is_step = np.ones((steps, n), bool)
    resetting = rng.random(n) < 0.3 if resetting is None else resetting
    for t in range(steps):
        is_step[t] = ~resetting
        terminated[t] &= is_step[t]
        truncated[t] &= is_step[t]
        resetting = terminated[t] | truncated[t]
    observation = rng.normal(size=(steps + 1, n, 3)).astype(np.float32)
    if space is DISCRETE:
        action = rng.integers(2, size=(steps, n), dtype=np.int32)
    else:
        action = rng.normal(size=(steps, n, 2)).astype(np.float32)
    reward = (rng.normal(size=(steps, n)) * is_step).astype(np.float32)
    flags = terminated, truncated, is_step
    return Step(observation[:-1], action, reward, *flags, observation[-1])


def assert_equal(actual, expected):
    """Exactly, of trees of arrays."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# ----------------------------------------------------------------------------------- the functions


@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_against_a_plain_loop(gae_lambda):
    rng = np.random.default_rng(0)
    gamma, steps, n = 0.8, 40, 6
    rollout = random_rollout(rng, steps, n)
    value, next_value = rng.normal(size=(2, steps, n)).astype(np.float32)
    got = jit(ppo_jax.gae)(rollout, value, next_value, gamma, gae_lambda)
    assert rollout.terminated.sum() > 10
    assert rollout.truncated.sum() > 10
    wanted = np.zeros((steps, n))
    for t, i in zip(*np.nonzero(rollout.is_step), strict=True):
        weight = 1.0
        for k in range(t, steps):
            assert rollout.is_step[k, i]  # an episode goes on until it ends
            bootstrap = 0.0 if rollout.terminated[k, i] else next_value[k, i]
            delta = rollout.reward[k, i] + gamma * bootstrap - value[k, i]
            wanted[t, i] += weight * delta
            weight *= gamma * gae_lambda
            if rollout.terminated[k, i] or rollout.truncated[k, i]:
                break
    np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.parametrize("reverse", [False, True])
def test_discounted_sum_against_a_plain_loop(reverse):
    rng = np.random.default_rng(0)
    x, discount = rng.normal(size=(2, 19, 3)).astype(np.float32)
    first = rng.normal(size=3).astype(np.float32)
    y, wanted = first, np.zeros((19, 3))
    for t in reversed(range(19)) if reverse else range(19):
        wanted[t] = y = x[t] + discount[t] * y
    got = ppo_jax.discounted_sum(x, discount, first, reverse=reverse)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(50,), (50, 3)])
def test_masked_mean_and_variance_against_numpy(shape):
    rng = np.random.default_rng(0)
    x, mask = rng.normal(size=shape).astype(np.float32), rng.random(50) < 0.5
    x[~mask] = np.nan
    np.testing.assert_allclose(ppo_jax.masked_mean(x, mask), x[mask].mean(0), rtol=1e-5)
    np.testing.assert_allclose(ppo_jax.masked_variance(x, mask), x[mask].var(0), rtol=1e-5)
    none = np.zeros(50, bool)
    np.testing.assert_array_equal(ppo_jax.masked_mean(x, none), np.zeros(shape[1:]))
    np.testing.assert_array_equal(ppo_jax.masked_variance(x, none), np.zeros(shape[1:]))


def test_log_probability_and_entropy_of_logits_against_scipy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 5)).astype(np.float32) * 3
    action = rng.integers(5, size=20, dtype=np.int32)
    log_prob, entropy = ppo_jax.log_prob_and_entropy(jnp.asarray(logits), jnp.asarray(action))
    for i in range(20):
        p = scipy.special.softmax(logits[i].astype(float))
        discrete = scipy.stats.rv_discrete(values=(np.arange(5), p))
        assert log_prob[i] == pytest.approx(discrete.logpmf(action[i]), rel=1e-4, abs=1e-5)
        assert entropy[i] == pytest.approx(scipy.stats.entropy(p), rel=1e-4, abs=1e-5)


def test_log_probability_and_entropy_of_gaussians_against_scipy():
    rng = np.random.default_rng(0)
    mean, log_std, action = rng.normal(size=(3, 20, 4)).astype(np.float32)
    output = jnp.concatenate([mean, log_std], axis=-1)
    log_prob, entropy = ppo_jax.log_prob_and_entropy(output, jnp.asarray(action))
    normal = scipy.stats.norm(mean.astype(float), np.exp(log_std.astype(float)))
    np.testing.assert_allclose(log_prob, normal.logpdf(action).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(entropy, normal.entropy().sum(-1), rtol=1e-4)


def test_moments_against_numpy():
    rng = np.random.default_rng(0)
    moments = Moments(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    seen = np.empty((0, 3))
    for rows in (1, 7, 30, 20):
        x = (rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = rng.permutation(30) < rows
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        moments = ppo_jax.update_moments(moments, x, mask)
        assert moments.rows == len(seen)
        np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(moments.variance, seen.var(0), rtol=1e-3)
    kept = ppo_jax.update_moments(moments, x, np.zeros(30, bool))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), kept, moments)
    unseen = Moments(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    assert_equal(ppo_jax.update_moments(unseen, x, np.zeros(30, bool)), unseen)


def test_normalize_by_hand():
    moments = Moments(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.25]), jnp.float32(9))
    x = np.array([[3.0, -2.0], [1.0, 0.0], [99.0, -99.0]], np.float32)
    wanted = [[1.0, 0.0], [0.0, 4.0], [10.0, -10.0]]
    np.testing.assert_allclose(ppo_jax.normalize(x, moments), wanted, rtol=1e-6)
    assert ppo_jax.normalize(x, None) is x


# ----------------------------------------------------------------------------------- the algorithm


def make_state(alg, **params):
    """A state in which the last layer of the actor gives `output` for every observation."""
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    tree = jax.tree.map(jnp.zeros_like, alg.unravel(state.params))
    tree["params"]["Dense_4"]["bias"] = jnp.asarray(params.pop("output"), jnp.float32)
    tree["params"] |= params
    return state._replace(params=jax.flatten_util.ravel_pytree(tree)[0])


def test_discrete_actions_are_drawn_from_the_policy():
    args, p = Args(num_envs=200, num_steps=150), np.array([0.1, 0.2, 0.7])
    alg = PPO(args, OBSERVATION, gym.spaces.Discrete(3))
    policy = alg.policy(make_state(alg, output=np.log(p)))
    noise = alg.draw_noise(jax.random.PRNGKey(0), {})
    assert noise.shape == (150, 200, 3)
    actions = alg.act(policy, np.zeros((30_000, 3), np.float32), noise.reshape(-1, 3))
    assert actions.dtype == alg.example.action.dtype
    actions = np.asarray(actions).reshape(150, 200)
    counts = np.bincount(actions.ravel())
    assert scipy.stats.chisquare(counts, 30_000 * p).pvalue > 1e-3
    # Each draw is apart from the one before in time, and from that of the next environment.
    for pairs in (actions[::2] * 3 + actions[1::2], actions[:, ::2] * 3 + actions[:, 1::2]):
        counts = np.bincount(pairs.ravel())
        assert scipy.stats.chisquare(counts, 15_000 * np.outer(p, p).ravel()).pvalue > 1e-3
    greedy = alg.act(policy, np.zeros((5, 3), np.float32), np.stack([alg.no_noise] * 5))
    np.testing.assert_array_equal(greedy, 2)


def test_continuous_actions_are_drawn_from_the_policy():
    alg = PPO(Args(num_envs=200, num_steps=100), OBSERVATION, BOX)
    std = np.array([3.0, 0.5], np.float32)
    policy = alg.policy(make_state(alg, output=[1.0, -2.0], log_std=jnp.log(std)))
    noise = alg.draw_noise(jax.random.PRNGKey(0), {})
    assert noise.shape == (100, 200, 2)
    actions = alg.act(policy, np.zeros((20_000, 3), np.float32), noise.reshape(-1, 2))
    assert actions.dtype == alg.example.action.dtype
    assert scipy.stats.kstest(actions[:, 0], scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(actions[:, 1], scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.03  # 4 standard deviations
    greedy = alg.act(policy, np.zeros((5, 3), np.float32), np.stack([alg.no_noise] * 5))
    np.testing.assert_array_equal(greedy, [[1.0, -2.0]] * 5)


def test_act_sees_normalised_observations():
    rng = np.random.default_rng(0)
    alg = PPO(Args(), OBSERVATION, BOX)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    moments = Moments(jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 9.0, 16.0]), jnp.float32(10))
    policy = alg.policy(state._replace(observations=moments))
    x = rng.normal(size=(20, 3)).astype(np.float32)
    raw, noise = x * [2, 3, 4] + [1, 2, 3], np.stack([alg.no_noise] * 20)
    wanted = alg.act((state.params, None), x, noise)
    np.testing.assert_allclose(alg.act(policy, raw.astype(np.float32), noise), wanted, rtol=1e-4)
    assert np.abs(wanted - alg.act((state.params, None), raw, noise)).max() > 1e-3


@pytest.mark.parametrize("anneal_lr", [False, True])
def test_learning_rate(anneal_lr):
    """Goes linearly to 0 at the end of training, and stays there."""
    args = Args(total_timesteps=3000, learning_rate=2e-3, anneal_lr=anneal_lr)
    schedule = PPO(args, OBSERVATION, DISCRETE).schedule(np.array([0, 750, 1500, 3000, 3512]))
    wanted = [2e-3, 1.5e-3, 1e-3, 0, 0] if anneal_lr else [2e-3] * 5
    assert set(schedule) == {"learning_rate"}
    assert schedule["learning_rate"].dtype == np.float32
    np.testing.assert_array_equal(schedule["learning_rate"], np.float32(wanted))


@pytest.mark.parametrize(
    ("space", "observation", "auto"),
    [
        (DISCRETE, OBSERVATION, (False, False)),
        (BOX, OBSERVATION, (True, True)),
        (BOX, np.zeros(3, np.uint8), (False, True)),
    ],
)
def test_what_is_normalised(space, observation, auto):
    for flag, (observations, rewards) in dict(auto=auto, yes=[True] * 2, no=[False] * 2).items():
        args = Args(normalize_observations=flag, normalize_rewards=flag)
        state = jax.eval_shape(PPO(args, observation, space).init, jax.random.PRNGKey(0))
        assert (state.observations is not None) == observations
        assert (state.returns is not None) == rewards
        if observations:
            assert state.observations.mean.shape == observation.shape
    args = Args(normalize_observations="yes", normalize_rewards="no")
    state = jax.eval_shape(PPO(args, observation, space).init, jax.random.PRNGKey(0))
    assert (state.observations is not None, state.returns is not None) == (True, False)


def test_losses_by_hand():
    """Two actions of probability 0.8 and 0.2 now; four rows, and a fifth that is masked."""

    def actor_critic(params, observation):
        shape = (len(observation), 2)
        return jnp.broadcast_to(params["logits"], shape), jnp.broadcast_to(params["v"], shape[:1])

    def loss(**flags):
        alg = PPO(Args(**flags), OBSERVATION, DISCRETE)
        alg.actor_critic = actor_critic
        total, means = alg.loss(params, batch)
        return total, dict(zip(LOSSES, means, strict=True))

    params = {"logits": jnp.log(jnp.array([0.8, 0.2])), "v": jnp.float32(1.0)}
    batch = Batch(
        observation=jnp.zeros((5, 1)),
        action=jnp.array([0, 0, 1, 1, 0]),
        is_step=jnp.array([True, True, True, True, False]),
        log_prob=jnp.log(jnp.array([0.5, 0.5, 0.25, 0.5, 1e-6])),
        value=jnp.array([0.5, 0.9, 1.0, 3.0, 1e6]),
        advantage=jnp.array([1.0, -1.0, 2.0, -2.0, 1e6]),
    )
    ratio = np.array([1.6, 1.6, 0.8, 0.4])
    # Positive advantages: at most 1.1; negative: at least 0.9, which makes the loss larger.
    surrogate = np.array([1.1 * 1, 1.6 * -1, 0.8 * 2, 0.9 * -2])
    target = np.array([1.5, -0.1, 3.0, 1.0])
    plain = (1.0 - target) ** 2
    clipped = (np.array([0.6, 1.0, 1.0, 2.9]) - target) ** 2
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.2))
    for clip_vloss, error in ((False, plain), (True, np.maximum(plain, clipped))):
        flags = dict(clip_coef=0.1, norm_adv=False, ent_coef=0.3, vf_coef=0.7)
        total, losses = loss(**flags, clip_vloss=clip_vloss)
        assert losses["policy_loss"] == pytest.approx(-surrogate.mean(), rel=1e-5)
        assert losses["value_loss"] == pytest.approx(error.mean() / 2, rel=1e-5)
        assert losses["entropy"] == pytest.approx(entropy, rel=1e-5)
        assert losses["old_approx_kl"] == pytest.approx(-np.log(ratio).mean(), rel=1e-4)
        assert losses["approx_kl"] == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
        assert losses["clipfrac"] == 1.0
        wanted = -surrogate.mean() - 0.3 * entropy + 0.7 * error.mean() / 2
        assert total == pytest.approx(wanted, rel=1e-5)
    assert loss(clip_coef=0.5)[1]["clipfrac"] == 0.75  # all but the ratio 0.8
    # Normalised over the rows that are not masked; the target of the value is as before.
    _, losses = loss(clip_coef=10.0)
    a = np.array([1.0, -1.0, 2.0, -2.0])
    wanted = -(ratio * (a - a.mean()) / a.std(ddof=1)).mean()
    assert losses["policy_loss"] == pytest.approx(wanted, rel=1e-5)
    assert losses["value_loss"] == pytest.approx(plain.mean() / 2, rel=1e-5)


def test_optimizer_by_hand():
    """The first step of Adam, with epsilon 1e-5, of gradients that are scaled down to 0.5."""
    alg = PPO(Args(), OBSERVATION, DISCRETE)
    for gradient, clipped in (
        ([3.0, -4.0, 0.0], [0.3, -0.4, 0.0]),
        ([1e-5, -3e-5, 0.4], [1e-5, -3e-5, 0.4]),
    ):
        start = alg.optimizer.init(jnp.zeros(3))
        changes, _ = alg.optimizer.update(jnp.array(gradient), start)
        wanted = np.array(clipped) / (np.abs(clipped) + 1e-5)
        np.testing.assert_allclose(changes, wanted, rtol=1e-4)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """Against a loop over three rollouts, so that returns carry over, and masked rows do not."""
    rng = np.random.default_rng(1)
    n, gamma = 4, 0.9
    args = Args(num_envs=n, num_steps=20, normalize_rewards="yes", gamma=gamma)
    alg = PPO(args, OBSERVATION, DISCRETE)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    running, seen, resetting = np.zeros(n), [], None
    for _ in range(3):
        rollout = random_rollout(rng, 20, n, resetting=resetting)
        resetting = rollout.terminated[-1] | rollout.truncated[-1]
        mask = rollout.is_step
        reward = np.where(mask, rollout.reward + 1, 99).astype(np.float32)
        rollout = rollout._replace(reward=reward)
        for t in range(20):
            for i in range(n):
                if mask[t, i]:
                    running[i] = gamma * running[i] + rollout.reward[t, i]
                    seen.append(running[i])
                if not mask[t, i] or rollout.terminated[t, i] or rollout.truncated[t, i]:
                    running[i] = 0.0
        state, scaled = jit(alg.normalize_rewards)(state, rollout)
        wanted = np.clip(rollout.reward / np.std(seen), -10, 10)
        np.testing.assert_allclose(scaled.reward[mask], wanted[mask], rtol=1e-3)
        np.testing.assert_allclose(state.discounted, running, rtol=1e-4, atol=1e-6)
        assert np.any(running) or not resetting.all()
    # Where environments start anew no return goes on; all else is kept.
    assert np.count_nonzero(state.discounted) > 1
    assert_equal(alg.restart(state), state._replace(discounted=jnp.zeros(n)))


def test_to_env_action():
    """Box actions are clipped, discrete ones counted from `start`; NumPy arrays and JAX ones."""
    box = gym.spaces.Box(np.float32([-1, 0]), np.float32([2, 0.5]))
    actions = np.array([[-3.0, 0.25], [1.0, 7.0], [2.5, -1.0]], np.float32)
    wanted = np.array([[-1.0, 0.25], [1.0, 0.5], [2.0, 0.0]], np.float32)
    for array in (np.asarray, jnp.asarray):
        clipped = PPO(Args(), OBSERVATION, box).to_env_action(array(actions))
        np.testing.assert_array_equal(clipped, wanted)
        assert clipped.dtype == np.float32
        alg = PPO(Args(), OBSERVATION, gym.spaces.Discrete(3, start=-1))
        started = alg.to_env_action(array([0, 2]))
        assert started.tolist() == [-1, 1]


def test_actions_are_clipped_in_the_environment_and_not_in_the_rollout():
    """The environment asserts that they are; what is learned from keeps the tails."""
    run, args = Run(env_id="BoxProbe-narrow-v0"), Args(num_envs=8, num_steps=128)
    alg = PPO(args, np.zeros(1, np.float32), gym.spaces.Box(-0.1, 0.1, (1,)))
    policy = alg.policy(make_state(alg, output=[0.0]))
    noise = np.asarray(alg.draw_noise(jax.random.PRNGKey(0), {}))
    envs = ppo_jax.make_envs(args, run, 8)
    observation, _ = envs.reset(seed=0)
    is_step = np.ones(8, bool)
    rollout, _ = ppo_jax.collect_rollout(alg, envs, observation, is_step, policy, noise)
    envs.close()
    np.testing.assert_array_equal(rollout.action, noise)
    assert scipy.stats.kstest(rollout.action.ravel(), "norm").pvalue > 1e-3
    clipped = rollout.action.clip(np.float32(-0.1), np.float32(0.1))
    reward = np.where(rollout.is_step, -((clipped - rollout.observation)[..., 0] ** 2), 0)
    np.testing.assert_allclose(rollout.reward, reward, rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "space", "message"),
    [
        ({}, gym.spaces.MultiDiscrete([2, 2]), r"PPO takes Discrete .* or a Box \[A\], not Multi"),
        ({}, gym.spaces.Box(-1, 1, (2, 3)), r"PPO takes Discrete .* or a Box \[A\], not Box"),
        (dict(num_envs=3, num_steps=5), DISCRETE, "num_minibatches must divide the rollout"),
    ],
)
def test_mistakes_in_flags(flags, space, message):
    with pytest.raises(UsageError, match=message):
        PPO(Args(**flags), OBSERVATION, space)


def test_mistakes_in_flags_are_found_before_training(tmp_path):
    with pytest.raises(UsageError, match="PPO takes Discrete actions or a Box"):
        train(Args(), Run(env_id="ManyActions-v0"))
    with pytest.raises(UsageError, match="num_steps must be at least 1, not 0"):
        train(Args(num_steps=0, update_epochs=-1), Run())
    with pytest.raises(UsageError, match="update_epochs must be at least 1, not -1"):
        train(Args(update_epochs=-1), Run())
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------- the train step


SMALL = dict(num_envs=4, num_steps=16, num_minibatches=2, update_epochs=2, gamma=0.9)
NORMALIZED = dict(normalize_observations="yes", normalize_rewards="yes")
KEY = jax.random.PRNGKey(7)


def make_step(space=DISCRETE, optimizer=None, loss=None, **flags):
    """The algorithm, a State, and `train_step` of it, a rollout, a key and a learning rate."""
    alg = PPO(Args(**{**SMALL, **flags}), OBSERVATION, space)
    alg.optimizer, alg.loss = optimizer or alg.optimizer, loss or alg.loss
    state = jax.jit(alg.init)(jax.random.PRNGKey(1))
    # A policy that is not uniform.
    params = state.params + 0.1 * jax.random.normal(jax.random.PRNGKey(2), state.params.shape)

    @jit
    def step(state, rollout, key=KEY, learning_rate=1e-2):
        return alg.train_step(state, rollout, {"learning_rate": learning_rate}, key)

    return alg, state._replace(params=params), step


@cache
def make_plain_step(box):
    """Of rewards that are clipped; with a Box, of observations and rewards that are normalised."""
    flags = dict(gae_lambda=0.8, ent_coef=0.02, vf_coef=0.6)
    flags |= NORMALIZED if box else dict(clip_rewards=True)
    alg, state, step = make_step(BOX if box else DISCRETE, optax.identity(), **flags)
    if box:
        observations = Moments(jnp.array([0.1, 0.2, -0.3]), jnp.array([0.5, 1, 2]), jnp.float32(30))
        returns = Moments(jnp.float32(0.2), jnp.float32(3), jnp.float32(30))
        discounted = jnp.array([0.5, 0, 0, -1])
        state = state._replace(observations=observations, returns=returns, discounted=discounted)
    return alg, state, step


@pytest.mark.parametrize("space", [slow(DISCRETE), BOX], ids=["discrete", "box"])
def test_train_step_against_a_plain_loop(space):
    """Masked rows are thrown away there; here they must be as good as that."""
    alg, state, step = make_plain_step(space is BOX)
    rollout = random_rollout(np.random.default_rng(3), 16, 4, space)
    assert rollout.truncated.any()
    new, metrics = step(state, rollout)

    minibatches = np.asarray(buffers.shuffled_minibatches(KEY, 64, 2, 2))
    every = np.concatenate([rollout.observation, rollout.next_observation[None]])
    if space is DISCRETE:
        rollout = rollout._replace(reward=np.sign(rollout.reward))
    else:
        _, rollout = alg.normalize_rewards(state, rollout)
        every = ppo_jax.normalize(every, state.observations)
    observation = every[:-1].reshape(64, 3)
    action = rollout.action.reshape(64, *rollout.action.shape[2:])
    mask = rollout.is_step.ravel()

    def apply(params, x):
        output, value = alg.network.apply(alg.unravel(params), x.reshape(-1, 3))
        return output, value.reshape(x.shape[:-1])

    def log_probs(params, rows):
        output, value = apply(params, observation[rows])
        if space is DISCRETE:
            logp = jax.nn.log_softmax(output)
            entropy = -(jnp.exp(logp) * logp).sum(-1)
            return logp[jnp.arange(len(rows)), action[rows]], entropy, value
        mean, log_std = output[:, :2], output[:, 2:]
        logp = jax.scipy.stats.norm.logpdf(action[rows], mean, jnp.exp(log_std)).sum(-1)
        return logp, (0.5 * jnp.log(2 * jnp.pi * jnp.e) + log_std).sum(-1), value

    @jit
    def learned(params):
        _, value = apply(params, every)
        advantage = ppo_jax.gae(rollout, value[:-1], value[1:], 0.9, 0.8).ravel()
        value = value[:-1].ravel()
        target = advantage + value
        old = log_probs(params, np.arange(64))[0]

        def loss(params, rows):
            logp, entropy, v = log_probs(params, rows)
            ratio = jnp.exp(logp - old[rows])
            a = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std(ddof=1) + 1e-8)
            policy = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.2)).mean()
            near = value[rows] + jnp.clip(v - value[rows], -0.2, 0.2)
            error = jnp.maximum((v - target[rows]) ** 2, (near - target[rows]) ** 2).mean()
            kl = (ratio - 1 - jnp.log(ratio)).mean()
            return policy - 0.02 * entropy.mean() + 0.6 * 0.5 * error, (policy, kl)

        for epoch in minibatches:
            parts = []
            for rows in epoch:
                gradient, part = jax.grad(loss, has_aux=True)(params, rows[mask[rows]])
                params = params - 1e-2 * gradient
                parts.append(part)
        explained = 1 - jnp.var((target - value)[mask]) / jnp.var(target[mask])
        return params, *jnp.array(parts).mean(0), explained  # losses are those of the last epoch

    params, policy, kl, explained = learned(state.params)
    assert np.abs(params - state.params).max() > 1e-3
    np.testing.assert_allclose(new.params, params, rtol=1e-4, atol=2e-6)
    np.testing.assert_allclose(metrics["losses/policy_loss"], policy, rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(metrics["losses/approx_kl"], kl, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-4)
    assert set(metrics) == {f"losses/{name}" for name in (*LOSSES, "explained_variance")}


@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "box"])
def test_masked_rows_change_nothing(space):
    _, state, step = make_plain_step(space is BOX)
    rollout = random_rollout(np.random.default_rng(8), 16, 4, space)
    mask = rollout.is_step
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
        next_observation=garbage(rollout.next_observation, last_is_free),
    )
    expected = step(state, rollout)
    assert_equal(step(state, other), expected)
    unmasked, _ = step(state, other._replace(is_step=np.ones_like(mask)))
    assert not np.array_equal(expected[0].params, unmasked.params)  # the mask does something


def test_a_rollout_without_a_step_is_harmless():
    """All environments only reset: nothing to learn from, and nothing is divided by 0."""
    _, state, step = make_step(num_steps=1, num_minibatches=4, **NORMALIZED)
    rollout = random_rollout(np.random.default_rng(0), 1, 4, resetting=np.ones(4, bool))
    assert not rollout.is_step.any()
    new, metrics = step(state, rollout)
    np.testing.assert_array_equal(new.params, state.params)
    assert_equal((new.observations, new.returns), (state.observations, state.returns))
    assert all(value == 0 for value in metrics.values())


def test_target_kl_stops_after_an_epoch():
    rollout = random_rollout(np.random.default_rng(2), 16, 4)
    _, state, one = make_step(update_epochs=1)
    *_, two = make_step(update_epochs=2)
    *_, stops = make_step(update_epochs=3, target_kl=1e-3)
    *_, stops_at_once = make_step(update_epochs=3, target_kl=0.0)

    def assert_same(actual, expected):
        # The metrics are those of the last epoch that counted.
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), actual, expected)

    def kl(learned):
        return learned[1]["losses/approx_kl"]

    # The longer the steps, the sooner the policy is too far from the old one.
    expected = one(state, rollout, KEY, 2e-2)
    assert kl(expected) > 1e-3
    assert expected[0].opt_state[1].count == 2
    assert_same(stops(state, rollout, KEY, 2e-2), expected)

    expected = two(state, rollout, KEY, 1e-3)
    assert kl(one(state, rollout, KEY, 1e-3)) < 1e-3 < kl(expected)
    assert_same(stops(state, rollout, KEY, 1e-3), expected)

    never, _ = stops(state, rollout, KEY, 1e-5)
    assert never.opt_state[1].count == 6
    assert_same(stops_at_once(state, rollout, KEY, 1e-3), one(state, rollout, KEY, 1e-3))


def test_statistics_change_after_the_update_that_they_were_taken_in():
    """What is learned from is the policy that acted, and what it saw."""

    def loss(params, batch):
        zeros = 0 * batch.log_prob
        parts = jnp.stack([batch.log_prob, *batch.observation.T, zeros, zeros], axis=-1)
        return 0 * params.sum(), ppo_jax.masked_mean(parts, batch.is_step)

    alg, state, step = make_step(BOX, loss=loss, num_minibatches=1, **NORMALIZED)
    seen = np.empty((0, 3))
    for seed in range(2):
        rollout = random_rollout(np.random.default_rng(seed), 16, 4, BOX)
        rollout = rollout._replace(observation=rollout.observation * 3 + 2)
        mask = rollout.is_step
        x = rollout.observation[mask]
        x = np.clip((x - seen.mean(0)) / seen.std(0) if seed else x, -10, 10)
        mean, log_std = np.split(np.asarray(alg.actor_critic(state.params, x)[0]), 2, axis=-1)
        log_prob = scipy.stats.norm.logpdf(rollout.action[mask], mean, np.exp(log_std)).sum(-1)
        state, metrics = step(state, rollout)
        got = [metrics[f"losses/{name}"] for name in LOSSES[:4]]
        np.testing.assert_allclose(got, [log_prob.mean(), *x.mean(0)], rtol=1e-4, atol=1e-6)
        seen = np.concatenate([seen, rollout.observation[mask]])
        np.testing.assert_allclose(state.observations.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(state.observations.variance, seen.var(0), rtol=1e-4)
        assert state.observations.rows == len(seen)


# ------------------------------------------------------------------------------------- the network


def test_initial_network():
    """Orthogonal weights, biases 0, a policy that is almost uniform, log_std 0."""
    alg = PPO(Args(), np.zeros(5, np.float32), gym.spaces.Box(-1, 1, (3,)))
    params = alg.unravel(jax.jit(alg.init)(jax.random.PRNGKey(0)).params)["params"]
    scales = {f"Dense_{i}": scale for i, scale in enumerate([2**0.5] * 4 + [0.01, 1.0])}
    assert set(params) == {"log_std", *scales}
    for name, scale in scales.items():
        kernel, bias = np.asarray(params[name]["kernel"]), params[name]["bias"]
        smaller = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.T
        np.testing.assert_allclose(smaller @ smaller.T, scale**2 * np.eye(len(smaller)), atol=1e-5)
        assert not np.any(bias)
    assert params["Dense_4"]["kernel"].shape == (64, 3)
    np.testing.assert_array_equal(params["log_std"], np.zeros(3))


def test_network_by_hand():
    """Actor and critic have two hidden layers each, of tanh."""
    alg, state, _ = make_step(BOX)
    params = jax.tree.map(np.asarray, alg.unravel(state.params)["params"])
    x = np.random.default_rng(0).normal(size=(10, 3)).astype(np.float32)

    def dense(i, x):
        return x @ params[f"Dense_{i}"]["kernel"] + params[f"Dense_{i}"]["bias"]

    def mlp(i):
        return np.tanh(dense(i + 1, np.tanh(dense(i, x))))

    output, value = alg.actor_critic(state.params, x)
    np.testing.assert_allclose(output[:, :2], dense(4, mlp(0)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(output[:, 2:], np.tile(params["log_std"], (10, 1)))
    np.testing.assert_allclose(value, dense(5, mlp(2))[:, 0], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- the learning


def learned(env_id, total_timesteps, **flags):
    """What `train` learned: its State, and of observations [B, ...] the actor's output and V(s)."""
    flags = dict(num_envs=16, num_steps=16, learning_rate=6e-3, gamma=0.5, ent_coef=0.0) | flags
    args = Args(**flags, total_timesteps=total_timesteps)
    run = Run(env_id=env_id, log_interval=total_timesteps, eval_episodes=0)
    training, *_ = train(args, run)
    env, state = gym.make(env_id), training.agent
    alg = PPO(args, env.observation_space.sample(), env.action_space)

    def answer(observations):
        normalized = ppo_jax.normalize(np.asarray(observations), state.observations)
        return jax.tree.map(np.asarray, alg.actor_critic(state.params, normalized))

    return state, answer


def test_discrete_probes():
    state, answer = learned("Probes-v0", 20_480)
    assert state.observations is state.returns is None
    which = dict(zip(DISCRETE_KINDS, np.eye(4, dtype=np.float32), strict=True))

    def at(kind, *own):
        return answer(np.stack([np.append(which[kind], np.float32(x)) for x in own]))

    np.testing.assert_allclose(at("observation", -1, 1)[1], [-1, 1], atol=0.05)
    np.testing.assert_allclose(at("discount", 0, 1)[1], [0.5, 1], atol=0.05)
    np.testing.assert_allclose(at("truncation", 0)[1], [2], atol=0.05)  # 1 / (1 - gamma)
    output, value = at("both", -1, 1)
    np.testing.assert_allclose(value, [1, 1], atol=0.05)
    assert scipy.special.softmax(output, axis=-1)[[0, 1], [0, 1]].min() > 0.95


def test_continuous_probes():
    state, answer = learned("BoxProbes-v0", 20_480, normalize_rewards="no")
    assert state.observations is not None
    which = dict(zip(BOX_KINDS, np.eye(3, dtype=np.float32), strict=True))

    def at(kind, *own):
        return answer(np.stack([np.append(which[kind], np.float32(x)) for x in own]))

    output, value = at("match", -0.5, 0.5)
    np.testing.assert_allclose(output[:, 0], [-0.5, 0.5], atol=0.1)
    assert (output[:, 1] < -0.5).all()  # less and less noise
    np.testing.assert_allclose(value, -np.exp(2 * output[:, 1]), atol=0.1)
    np.testing.assert_allclose(at("truncation", 0)[1], [2], atol=0.05)  # a cut is not an end
    np.testing.assert_allclose(at("termination", 0, 1)[1], [1.5, 1], atol=0.05)


@pytest.mark.slow
def test_image_probe():
    """uint8 images go through the Nature CNN, whose features actor and critic share."""
    state, answer = learned("ProbeImage-v0", 256, num_envs=2, learning_rate=2e-3)
    images = np.stack([np.zeros((4, 36, 36), np.uint8), np.full((4, 36, 36), 255, np.uint8)])
    assert list(answer(images)[0].argmax(-1)) == [0, 1]
    assert state.params.size == sum(
        (inputs + 1) * outputs
        for inputs, outputs in [(256, 32), (512, 64), (576, 64), (64, 512), (512, 2), (512, 1)]
    )


# ------------------------------------------------------------------------------------- the program


TAGS = {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/SPS",
    "charts/learning_rate",
    *(f"losses/{name}" for name in LOSSES),
    "losses/explained_variance",
    "eval/episodic_return",
}


def test_same_seed_same_run():
    args = Args(total_timesteps=1_500, anneal_lr=False)
    runs = [Run(env_id="Pendulum-v1", log_interval=512, exp_name=name) for name in "ab"]
    (first, returns, folder), (second, same_returns, _) = [train(args, run) for run in runs]
    assert_equal(first, second)
    np.testing.assert_array_equal(returns, same_returns)
    assert returns.shape == (1,)
    scalars, _ = read_events(folder)
    assert set(scalars) == TAGS
    for tag, points in scalars.items():
        assert np.isfinite([value for _, value in points]).all(), tag
    assert [step for step, _ in scalars["charts/episodic_return"]] == [1024]  # episodes end there
    steps, rates = zip(*scalars["charts/learning_rate"], strict=True)
    assert list(steps) == [512, 1024, 1536]
    np.testing.assert_allclose(rates, 2.5e-4, rtol=1e-6)
    assert first.agent.opt_state[1].count == 3 * 4 * 4  # gradient steps
    assert first.agent.observations.rows == 1536 - 4  # without those that only reset
    # A run that is complete can be resumed: nothing is trained, and the state is the one saved.
    again, _, same_folder = train(args, replace(runs[0], resume=str(folder)))
    assert same_folder == folder
    assert_equal(jax.device_get(again), jax.device_get(first))
