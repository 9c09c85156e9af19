"""ppo_jax.py: its pure functions against slow loops and SciPy, what masks keep out, and what it
learns against known values.
"""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from test_dqn import read_events, run_script

import buffers
import ppo_jax
from ppo_jax import Args, Batch, Moments, Transition, UsageError

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "ppo_jax.py"


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


for kind in ("match", "truncation", "termination"):
    gym.register(f"BoxProbe-{kind}-v0", BoxProbe, kwargs={"kind": kind})
gym.register("BoxProbe-narrow-v0", BoxProbe, kwargs={"kind": "match", "bound": 0.1})
gym.register("ManyActions-v0", ManyActions)


def random_rollout(rng, steps, n, next_step, discrete=True, resetting=None):
    """What `collect` returns in either autoreset mode, with observations [3]."""
    terminated, truncated = rng.random((2, steps, n)) < 0.15
    mask = np.ones((steps, n), bool)
    if next_step:
        resetting = rng.random(n) < 0.3 if resetting is None else resetting
        for t in range(steps):
            mask[t] = ~resetting
            terminated[t] &= mask[t]
            truncated[t] &= mask[t]
            resetting = terminated[t] | truncated[t]
    observation = rng.normal(size=(steps + 1, n, 3)).astype(np.float32)
    next_observation = observation[1:].copy()
    if not next_step:
        over = terminated | truncated
        next_observation[over] = rng.normal(size=(over.sum(), 3))
    action = (
        rng.integers(2, size=(steps, n), dtype=np.int32)
        if discrete
        else rng.normal(size=(steps, n, 2)).astype(np.float32)
    )
    reward = (rng.normal(size=(steps, n)) * mask).astype(np.float32)
    return Transition(
        observation[:-1], action, reward, next_observation, terminated, truncated
    ), mask


# ------------------------------------------------------------------------------------ the algorithm


@pytest.mark.parametrize("next_step", [True, False])
@pytest.mark.parametrize("gae_lambda", [0.0, 0.9, 1.0])
def test_gae_against_a_plain_loop(next_step, gae_lambda):
    rng = np.random.default_rng(0)
    gamma, steps, n = 0.8, 40, 6
    rollout, mask = random_rollout(rng, steps, n, next_step)
    assert mask.all() != next_step
    value, next_value = rng.normal(size=(2, steps, n)).astype(np.float32)
    got = jax.jit(ppo_jax.gae)(rollout, mask, value, next_value, gamma, gae_lambda)
    assert rollout.terminated.sum() > 10
    assert rollout.truncated.sum() > 10
    wanted = np.zeros((steps, n))
    for t, i in zip(*np.nonzero(mask), strict=True):
        weight = 1.0
        for k in range(t, steps):
            assert mask[k, i]  # an episode goes on until it ends
            bootstrap = 0.0 if rollout.terminated[k, i] else next_value[k, i]
            delta = rollout.reward[k, i] + gamma * bootstrap - value[k, i]
            wanted[t, i] += weight * delta
            weight *= gamma * gae_lambda
            if rollout.terminated[k, i] or rollout.truncated[k, i]:
                break
    np.testing.assert_allclose(got, wanted, atol=2e-6)


def test_log_probability_and_entropy_of_logits_against_scipy():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(20, 5)).astype(np.float32) * 3
    action = rng.integers(5, size=20, dtype=np.int32)
    log_prob, entropy = ppo_jax.evaluate(jnp.asarray(logits), jnp.asarray(action))
    for i in range(20):
        p = scipy.special.softmax(logits[i].astype(float))
        discrete = scipy.stats.rv_discrete(values=(np.arange(5), p))
        assert log_prob[i] == pytest.approx(discrete.logpmf(action[i]), rel=1e-4, abs=1e-5)
        assert entropy[i] == pytest.approx(scipy.stats.entropy(p), rel=1e-4, abs=1e-5)


def test_log_probability_and_entropy_of_gaussians_against_scipy():
    rng = np.random.default_rng(0)
    mean, log_std, action = rng.normal(size=(3, 20, 4)).astype(np.float32)
    output = jnp.concatenate([mean, log_std], axis=-1)
    log_prob, entropy = ppo_jax.evaluate(output, jnp.asarray(action))
    normal = scipy.stats.norm(mean.astype(float), np.exp(log_std.astype(float)))
    np.testing.assert_allclose(log_prob, normal.logpdf(action).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(entropy, normal.entropy().sum(-1), rtol=1e-4)


def test_actions_are_drawn_from_the_policy():
    rng, n = np.random.default_rng(0), 40_000
    p = np.array([0.1, 0.2, 0.7])
    logits = np.tile(np.log(p).astype(np.float32), (n, 1))
    counts = np.bincount(ppo_jax.sample(rng.gumbel(size=(n, 3)), logits))
    assert scipy.stats.chisquare(counts, n * p).pvalue > 1e-3
    output = np.tile(np.array([1.0, -2.0, np.log(3.0), np.log(0.5)], np.float32), (n, 1))
    actions = ppo_jax.sample(rng.normal(size=(n, 2)), output)
    assert scipy.stats.kstest(actions[:, 0], scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(actions[:, 1], scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3


def test_losses_by_hand():
    """Two actions of probability 0.8 and 0.2 now; four rows, and a fifth that is masked."""

    def apply(params, observation):
        shape = (len(observation), 2)
        return jnp.broadcast_to(params["logits"], shape), jnp.broadcast_to(params["v"], shape[:1])

    params = {"logits": jnp.log(jnp.array([0.8, 0.2])), "v": jnp.float32(1.0)}
    batch = Batch(
        observation=jnp.zeros((5, 1)),
        action=jnp.array([0, 0, 1, 1, 0]),
        log_prob=jnp.log(jnp.array([0.5, 0.5, 0.25, 0.5, 1e-6])),
        value=jnp.array([0.5, 0.9, 1.0, 3.0, 1e6]),
        advantage=jnp.array([1.0, -1.0, 2.0, -2.0, 1e6]),
        mask=jnp.array([True, True, True, True, False]),
    )
    ratio = np.array([1.6, 1.6, 0.8, 0.4])
    # Positive advantages: at most 1.1; negative: at least 0.9, which makes the loss larger.
    surrogate = np.array([1.1 * 1, 1.6 * -1, 0.8 * 2, 0.9 * -2])
    target = np.array([1.5, -0.1, 3.0, 1.0])
    plain = (1.0 - target) ** 2
    clipped = (np.array([0.6, 1.0, 1.0, 2.9]) - target) ** 2
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.2))
    for clip_vloss, error in ((False, plain), (True, np.maximum(plain, clipped))):
        args = Args(clip_coef=0.1, clip_vloss=clip_vloss, norm_adv=False, ent_coef=0.3, vf_coef=0.7)
        loss, losses = ppo_jax.loss_fn(params, batch, apply, args)
        assert losses.policy_loss == pytest.approx(-surrogate.mean(), rel=1e-5)
        assert losses.value_loss == pytest.approx(error.mean() / 2, rel=1e-5)
        assert losses.entropy == pytest.approx(entropy, rel=1e-5)
        assert losses.old_approx_kl == pytest.approx(-np.log(ratio).mean(), rel=1e-4)
        assert losses.approx_kl == pytest.approx((ratio - 1 - np.log(ratio)).mean(), rel=1e-4)
        assert losses.clipfrac == 1.0
        wanted = -surrogate.mean() - 0.3 * entropy + 0.7 * error.mean() / 2
        assert loss == pytest.approx(wanted, rel=1e-5)
    # Normalised over the rows that are not masked, with the unbiased standard deviation.
    _, losses = ppo_jax.loss_fn(params, batch, apply, Args(clip_coef=10.0))
    a = np.array([1.0, -1.0, 2.0, -2.0])
    wanted = -(ratio * (a - a.mean()) / a.std(ddof=1)).mean()
    assert losses.policy_loss == pytest.approx(wanted, rel=1e-5)


def test_moments_against_numpy():
    rng = np.random.default_rng(0)
    moments = Moments(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    seen = np.empty((0, 3))
    for size in (1, 7, 100, 30):
        x = (rng.normal(size=(size, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = np.ones(size, bool) if size == 1 else rng.random(size) < 0.7
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        moments = jax.jit(partial(ppo_jax.update_moments, args=Args()))(moments, x, mask)
        assert moments.rows == len(seen)
        np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-4)
        np.testing.assert_allclose(moments.variance, seen.var(0), rtol=1e-3)
    assert (jnp.abs(ppo_jax.normalize(jnp.array([[1e3, -1e3, 0.0]]), moments)) <= 10).all()
    kept = ppo_jax.update_moments(moments, x, np.zeros(30, bool), Args())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), kept, moments)


def test_rewards_are_divided_by_the_deviation_of_discounted_returns():
    """Against a loop over two rollouts, so that returns carry over, and masked rows do not."""
    rng = np.random.default_rng(1)
    n, gamma = 4, 0.9
    args = Args(num_envs=n, num_steps=20, normalize_rewards=True, gamma=gamma)
    _, agent, _ = make_step(args)
    running, seen, resetting = np.zeros(n), [], None
    for _ in range(2):
        rollout, mask = random_rollout(rng, 20, n, next_step=True, resetting=resetting)
        resetting = rollout.terminated[-1] | rollout.truncated[-1]
        reward = np.where(mask, rollout.reward + 1, 99).astype(np.float32)
        rollout = rollout._replace(reward=reward)
        for t in range(20):
            for i in range(n):
                if mask[t, i]:
                    running[i] = gamma * running[i] + rollout.reward[t, i]
                    seen.append(running[i])
                if not mask[t, i] or rollout.terminated[t, i] or rollout.truncated[t, i]:
                    running[i] = 0.0
        agent, scaled = ppo_jax.normalize_rewards(agent, rollout, jnp.asarray(mask), args)
        wanted = np.clip(rollout.reward / np.std(seen), -10, 10)
        np.testing.assert_allclose(scaled.reward[mask], wanted[mask], rtol=1e-3)
        np.testing.assert_allclose(agent.discounted_return, running, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------- the train step


def make_step(args, discrete=True, same_step=False, optimizer=None):
    """A queue, an agent as `train` makes it, and `train_step` compiled and not donated."""
    n = args.num_envs
    queue = buffers.circular_buffer(args.num_steps)
    network = ppo_jax.ActorCritic(2, gaussian=not discrete)
    key = jax.random.PRNGKey(args.seed)
    init, _, apply = ppo_jax.flatten_network(network, np.zeros(3, np.float32))
    params = init(key)
    params += 0.1 * jax.random.normal(key, params.shape)  # a policy that is not uniform
    optimizer = optimizer or optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm), optax.scale_by_adam(eps=1e-5)
    )
    item = jax.tree.map(lambda x: x[0], random_rollout(np.random.default_rng(0), 1, n, True)[0])
    item = item._replace(action=item.action if discrete else np.zeros((n, 2), np.float32))

    def moments(use, shape):
        return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.float32(0)) if use else None

    agent = ppo_jax.Agent(
        params,
        optimizer.init(params),
        queue.init((item, np.ones(n, bool))),
        moments(args.normalize_observations, (3,)),
        moments(args.normalize_rewards, ()),
        jnp.zeros(n),
    )
    step = partial(
        ppo_jax.train_step,
        args=args,
        queue=queue,
        apply=apply,
        optimizer=optimizer,
        same_step=same_step,
    )
    return queue, agent, partial(jax.jit(step), learning_rate=np.float32(args.learning_rate))


def make_orders(args, seed=0):
    size = args.num_envs * args.num_steps
    rows = np.tile(np.arange(size, dtype=np.int32), (args.update_epochs, 1))
    return np.random.default_rng(seed).permuted(rows, axis=1)


SMALL = dict(num_envs=4, num_steps=16, num_minibatches=2, update_epochs=3, learning_rate=1e-2)


@pytest.mark.parametrize(("discrete", "next_step"), [(True, True), (False, False)])
def test_train_step_against_a_plain_loop(discrete, next_step):
    """Masked rows are thrown away there; here they must be as good as that."""
    args = Args(**{**SMALL, "update_epochs": 2}, gamma=0.9, ent_coef=0.02)
    optimizer = optax.identity()
    queue, agent, step = make_step(args, discrete, not next_step, optimizer)
    rollout, mask = random_rollout(np.random.default_rng(3), 16, 4, next_step, discrete)
    orders = make_orders(args)
    new, metrics = step(agent, rollout, mask, orders)
    rollout = jax.tree.map(jnp.asarray, rollout)

    apply = step.func.__wrapped__.keywords["apply"]

    def values(params, x):
        return apply(params, x.reshape(-1, 3))[1].reshape(x.shape[:-1])

    def log_probs(params, rows):
        output, value = apply(params, rollout.observation.reshape(-1, 3)[rows])
        action = rollout.action.reshape(64, -1)[rows]
        if discrete:
            logp = jax.nn.log_softmax(output)
            entropy = -(jnp.exp(logp) * logp).sum(-1)
            return logp[jnp.arange(len(rows)), action[:, 0]], entropy, value
        mean, log_std = output[:, :2], output[:, 2:]
        logp = jax.scipy.stats.norm.logpdf(action, mean, jnp.exp(log_std)).sum(-1)
        return logp, (0.5 * jnp.log(2 * jnp.pi * jnp.e) + log_std).sum(-1), value

    value = values(agent.params, rollout.observation)
    next_value = values(agent.params, rollout.next_observation)
    advantage = ppo_jax.gae(rollout, mask, value, next_value, 0.9, 0.95).ravel()
    value = value.ravel()
    target = advantage + value
    old = log_probs(agent.params, np.arange(64))[0]

    def loss(params, rows):
        logp, entropy, v = log_probs(params, rows)
        ratio = jnp.exp(logp - old[rows])
        a = (advantage[rows] - advantage[rows].mean()) / (advantage[rows].std(ddof=1) + 1e-8)
        policy = jnp.maximum(-a * ratio, -a * jnp.clip(ratio, 0.8, 1.2)).mean()
        near = value[rows] + jnp.clip(v - value[rows], -0.2, 0.2)
        error = jnp.maximum((v - target[rows]) ** 2, (near - target[rows]) ** 2).mean()
        return policy - 0.02 * entropy.mean() + 0.5 * 0.5 * error

    params, grad = agent.params, jax.jit(jax.grad(loss))
    for order in orders:
        for rows in order.reshape(2, -1):
            kept = rows[mask.ravel()[rows]]
            params = params - 1e-2 * grad(params, kept)
    np.testing.assert_allclose(new.params, params, rtol=1e-4, atol=2e-6)
    kept = mask.ravel()
    explained = 1 - np.var((target - value)[kept]) / np.var(target[kept])
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-4)
    assert queue.size(new.queue) == 0  # all that came in was taken out
    assert new.queue.cursor == 16


NORMALIZED = dict(normalize_observations=True, normalize_rewards=True)


@pytest.mark.parametrize(("discrete", "flags"), [(True, {}), (False, NORMALIZED)])
def test_masked_rows_change_nothing(discrete, flags):
    args = Args(**SMALL, **flags)
    _, agent, step = make_step(args, discrete)
    rng = np.random.default_rng(5)
    rollout, mask = random_rollout(rng, 16, 4, True, discrete)
    # After a truncation the observation of the masked row is the episode's last: it is needed.
    free = ~mask
    free[1:] &= ~rollout.truncated[:-1] | rollout.terminated[:-1]
    assert free.sum() > 5

    def garbage(x, where):
        x = x.copy()
        x[where] = rng.integers(2, size=x[where].shape) if x.dtype == bool else 77
        return x

    other = Transition(
        garbage(rollout.observation, free), *(garbage(x, ~mask) for x in rollout[1:])
    )
    last = other.next_observation.copy()
    last[-1] = rollout.next_observation[-1]  # of rows that are not masked
    other = other._replace(next_observation=last)
    orders = make_orders(args)
    a, metrics_a = step(agent, rollout, mask, orders)
    b, metrics_b = step(agent, other, mask, orders)
    empty = agent.queue._replace(storage=None)  # the queue still holds old contents
    jax.tree.map(np.testing.assert_array_equal, a._replace(queue=empty), b._replace(queue=empty))
    assert metrics_a == metrics_b
    c, _ = step(agent, other, np.ones_like(mask), orders)
    assert not np.array_equal(a.params, c.params)  # the mask does something


def test_target_kl_stops_after_an_epoch():
    rollout, mask = random_rollout(np.random.default_rng(2), 16, 4, True)
    orders = make_orders(Args(**SMALL))

    def learned(orders=orders, **changes):
        args = Args(**{**SMALL, **changes})
        _, agent, step = make_step(args)
        return step(agent, rollout, mask, orders)

    one, metrics_one = learned(orders[:1], update_epochs=1)
    stopped, metrics = learned(target_kl=0.0)
    np.testing.assert_allclose(stopped.params, one.params, rtol=1e-6)
    assert stopped.opt_state[1].count == 2
    np.testing.assert_allclose(metrics["losses/approx_kl"], metrics_one["losses/approx_kl"], 1e-4)
    never, _ = learned(target_kl=1e3)
    assert never.opt_state[1].count == 6
    assert np.abs(np.asarray(never.params - stopped.params)).max() > 1e-3


@cache
def params_after_two_steps(**changes):
    rollout, mask = random_rollout(np.random.default_rng(2), 16, 4, True)
    args = Args(**{**SMALL, **changes})
    _, agent, step = make_step(args)
    # Values far from the first ones, so that clipping shows; statistics that are not (0, 1).
    agent, _ = step(agent, rollout._replace(reward=rollout.reward * 9), mask, make_orders(args))
    agent, _ = step(agent, rollout, mask, make_orders(args, 1))
    return np.asarray(agent.params)


@pytest.mark.parametrize(
    "changes",
    [
        dict(norm_adv=False),
        dict(clip_vloss=False),
        dict(normalize_observations=True),
        dict(normalize_rewards=True),
    ],
)
def test_switches_do_something(changes):
    difference = params_after_two_steps() - params_after_two_steps(**changes)
    assert np.abs(difference).max() > 1e-4


def test_statistics_change_after_the_update_that_they_were_taken_in():
    """What is learned from is the policy that acted: the first gradient step has the ratio 1."""
    args = Args(**{**SMALL, "update_epochs": 1, "num_minibatches": 1}, **NORMALIZED)
    _, agent, step = make_step(args, discrete=False)
    rollout, mask = random_rollout(np.random.default_rng(2), 16, 4, True, False)
    rollout = rollout._replace(observation=rollout.observation * 3 + 2)
    agent, metrics = step(agent, rollout, mask, make_orders(args))
    seen = rollout.observation[mask]
    np.testing.assert_allclose(agent.observations.mean, seen.mean(0), rtol=1e-4)
    np.testing.assert_allclose(agent.observations.variance, seen.var(0), rtol=1e-4)
    _, metrics = step(agent, rollout, mask, make_orders(args))
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert metrics["losses/clipfrac"] == 0


# ------------------------------------------------------------------------------------- the learning


PROBE = dict(
    total_timesteps=16_000,
    num_envs=4,
    num_steps=32,
    learning_rate=3e-3,
    gamma=0.5,
    normalize_rewards=False,
    log_interval=100_000,
)


def learned(result, observations, num_actions=2, gaussian=False):
    """The actor's output and V(s), of observations [B, ...]."""
    observations = np.asarray(observations)
    network = ppo_jax.ActorCritic(num_actions, gaussian)
    *_, apply = ppo_jax.flatten_network(network, observations[0])
    normalized = ppo_jax.normalize(observations, result.agent.observations)
    return jax.tree.map(np.asarray, apply(result.agent.params, normalized))


@pytest.mark.parametrize(
    ("kind", "observations", "values", "actions"),
    [
        ("observation", [[-1.0], [1.0]], [-1.0, 1.0], None),
        ("discount", [[0.0], [1.0]], [0.5, 1.0], None),
        ("both", [[-1.0], [1.0]], [1.0, 1.0], [0, 1]),
        ("truncation", [[0.0]], [2.0], None),  # 1 / (1 - gamma): a cut is not an end
    ],
)
def test_probe_values(kind, observations, values, actions):
    result = ppo_jax.train(Args(**PROBE, env_id=f"Probe-{kind}-v0", ent_coef=0.0))
    logits, value = learned(result, np.array(observations, np.float32))
    np.testing.assert_allclose(value, values, atol=0.05)
    if actions is not None:
        assert list(logits.argmax(-1)) == actions
        assert jax.nn.softmax(logits).max(-1).min() > 0.95


@pytest.mark.parametrize("normalized", [False, True])
def test_continuous_probe_learns_the_observation(normalized):
    args = Args(
        **{**PROBE, "total_timesteps": 40_000},
        env_id="BoxProbe-match-v0",
        normalize_observations=normalized,
        ent_coef=0.0,
    )
    result = ppo_jax.train(args)
    assert (result.agent.observations is not None) == normalized
    output, value = learned(result, np.array([[-0.5], [0.5]], np.float32), 1, gaussian=True)
    np.testing.assert_allclose(output[:, 0], [-0.5, 0.5], atol=0.1)
    assert (output[:, 1] < -0.5).all()  # less and less noise
    np.testing.assert_allclose(value, -np.exp(2 * output[:, 1]), atol=0.1)


@pytest.mark.parametrize(
    ("kind", "observations", "values"),
    [("truncation", [[0.0]], [2.0]), ("termination", [[0.0], [1.0]], [1.5, 1.0])],
)
def test_continuous_probe_values(kind, observations, values):
    result = ppo_jax.train(Args(**PROBE, env_id=f"BoxProbe-{kind}-v0"))
    _, value = learned(result, np.array(observations, np.float32), 1, gaussian=True)
    np.testing.assert_allclose(value, values, atol=0.05)


def test_actions_are_clipped_in_the_environment_and_not_in_the_loss(monkeypatch):
    """The environment asserts that they are; what is learned from keeps the tails."""
    collect, actions = ppo_jax.collect, []

    def spy(*args):
        collected = collect(*args)
        actions.append(collected[1].action)
        return collected

    monkeypatch.setattr(ppo_jax, "collect", spy)
    ppo_jax.train(Args(env_id="BoxProbe-narrow-v0", total_timesteps=1024))
    assert np.abs(actions).max() > 2.0
    assert scipy.stats.kstest(actions[0].ravel(), "norm").pvalue > 1e-3


def test_same_step_environments_train():
    result = ppo_jax.train(Args(env_id="CounterSameStep-v0", total_timesteps=2048))
    assert np.isfinite(result.agent.params).all()
    assert set(result.returns) == {3.0, 6.0, 10.0, 15.0}


def test_image_probe():
    """uint8 images go through the Nature CNN, whose features actor and critic share."""
    args = Args(
        env_id="ProbeImage-v0",
        total_timesteps=512,
        num_envs=2,
        num_steps=16,
        learning_rate=1e-3,
        ent_coef=0.0,
    )
    result = ppo_jax.train(args)
    assert result.agent.queue.storage[0].observation.dtype == jnp.uint8
    images = np.stack([np.zeros((4, 36, 36), np.uint8), np.full((4, 36, 36), 255, np.uint8)])
    logits, _ = learned(result, images)
    assert list(logits.argmax(-1)) == [0, 1]


def test_initial_network():
    """Orthogonal weights, biases 0, a policy that is almost uniform, log_std 0."""
    network = ppo_jax.ActorCritic(3, gaussian=True)
    params = network.init(jax.random.PRNGKey(0), np.zeros((1, 5), np.float32))["params"]
    scales = {f"Dense_{i}": scale for i, scale in enumerate([2**0.5] * 4 + [0.01, 1.0])}
    for name, scale in scales.items():
        kernel, bias = np.asarray(params[name]["kernel"]), params[name]["bias"]
        smaller = kernel if kernel.shape[0] <= kernel.shape[1] else kernel.T
        np.testing.assert_allclose(smaller @ smaller.T, scale**2 * np.eye(len(smaller)), atol=1e-5)
        assert not np.any(bias)
    assert params["Dense_4"]["kernel"].shape == (64, 3)
    assert not np.any(params["log_std"])


TAGS = {
    "charts/episodic_return",
    "charts/episodic_length",
    "charts/SPS",
    "charts/learning_rate",
    *(f"losses/{name}" for name in ppo_jax.Losses._fields),
    "losses/explained_variance",
    "charts/final_return",
    "eval/episodic_return",
}


@pytest.mark.parametrize(("env_id", "seeds"), [("CartPole-v1", (1, 1)), ("Pendulum-v1", (1, 1, 2))])
def test_same_seed_same_run(env_id, seeds):
    args = dict(env_id=env_id, total_timesteps=1_500)
    first, second, *others = [ppo_jax.train(Args(seed=seed, **args)) for seed in seeds]
    jax.tree.map(np.testing.assert_array_equal, first.agent, second.agent)
    assert first.returns == second.returns
    for other in others:
        assert first.returns != other.returns
        assert not np.array_equal(first.agent.params, other.agent.params)
    scalars, _ = read_events(first.folder)
    assert set(scalars) == TAGS
    for tag, points in scalars.items():
        assert np.isfinite([value for _, value in points]).all(), tag


# ------------------------------------------------------------------------------------- the program


def test_copy_pasted_script_runs_and_its_events_can_be_read(tmp_path):
    """buffers.py and the script in an empty folder are all that is needed."""
    for name in ("buffers.py", "ppo_jax.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    flags = "--total-timesteps 3000 --log-interval 512 --target-kl 0.5"
    done = run_script(*flags.split(), folder=tmp_path, script=tmp_path / "ppo_jax.py")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("CartPole-v1__ppo_jax__1__")
    assert re.search(rf"{folder.name}: mean return of the last \d+ episodes", done.stdout)
    scalars, events = read_events(folder)
    assert set(scalars) == TAGS
    for tag, points in scalars.items():
        steps, values = zip(*points, strict=True)
        assert np.isfinite(values).all(), tag
        assert list(steps) == sorted(steps)
    # The last iteration is a whole one, and has the last of six rates.
    steps, rates = zip(*scalars["charts/learning_rate"], strict=True)
    assert list(steps) == [512 * i for i in range(1, 7)]
    np.testing.assert_allclose(rates, 2.5e-4 * np.arange(6, 0, -1) / 6, rtol=1e-5)
    (text,) = events.Tensors("hyperparameters/text_summary")
    assert "|clip_coef|0.2|" in text.tensor_proto.string_val[0].decode()


def test_constant_learning_rate_and_number_of_gradient_steps():
    result = ppo_jax.train(Args(anneal_lr=False, total_timesteps=3_000))
    scalars, _ = read_events(result.folder)
    np.testing.assert_allclose([rate for _, rate in scalars["charts/learning_rate"]], 2.5e-4)
    assert result.agent.opt_state[1].count == 6 * 4 * 4
    assert result.agent.queue.size == 0
    assert result.agent.queue.cursor == 6 * 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(env_id="CartPole-v9"), "env_id CartPole-v9: .*"),
        (dict(env_id="FrozenLake-v1"), "env_id FrozenLake-v1: observations must be a Box"),
        (
            dict(env_id="ManyActions-v0"),
            r"env_id ManyActions-v0: PPO takes actions Discrete\(n\) or Box .*, got MultiDiscrete",
        ),
        (
            dict(env_id="ProbeImage-v0", normalize_observations=True),
            "normalize_observations: not for images",
        ),
        (
            dict(num_envs=3, num_steps=5),
            r"num_envs \* num_steps = 15 must be a multiple of num_minibatches 4",
        ),
        (dict(num_envs=1, num_steps=4), "norm_adv: a minibatch must have at least 2 of the 4 rows"),
        (dict(num_envs=0), "num_envs must be at least 1, got 0"),
        (dict(update_epochs=0), "update_epochs must be at least 1, got 0"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(gamma=1.5), "gamma must be from 0 to 1, got 1.5"),
        (dict(gae_lambda=-0.1), "gae_lambda must be from 0 to 1, got -0.1"),
        (dict(learning_rate=3.0), "learning_rate must be from 0 to 1"),
        (dict(clip_coef=-0.2), "clip_coef must be at least 0 and finite, got -0.2"),
        (dict(max_grad_norm=float("inf")), "max_grad_norm must be at least 0 and finite, got inf"),
        (dict(target_kl=float("nan")), "target_kl must be at least 0 and finite, got nan"),
    ],
)
def test_mistakes_in_flags_are_found_before_training(changes, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        ppo_jax.train(Args(**changes))
    assert not (tmp_path / "runs").exists()


def test_mistakes_in_flags_are_one_line_and_exit_code_2(tmp_path):
    done = run_script("--num-minibatches", "3", folder=tmp_path, script=SCRIPT)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: num_envs * num_steps = 512 must be a multiple")
    assert not (tmp_path / "runs").exists()


def test_help_has_a_line_for_every_flag(tmp_path):
    done = run_script("--help", folder=tmp_path, script=SCRIPT)
    assert done.returncode == 0
    for name in vars(Args()):
        assert f"--{name.replace('_', '-')}" in done.stdout
