"""sac_jax.py: the losses against NumPy, the policy's density against SciPy's, actions and
their bounds, what is learned against known values, and runs that are wrong or go on.
"""

import signal
from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import keys_of_gradient_step, moves_of_target
from helpers import fast_at_ends, make_agent, more, read_events, slow
from scipy.stats import binom, kstest, norm

import sac_jax
from cleanreplay import load_policy, protocol
from sac_jax import SAC, Args, Run, Step, train


def box(*bounds):
    """The space of actions with the bounds (low, high) of each axis."""
    low, high = np.float32(bounds).T
    return gym.spaces.Box(low, high)


def make(args, features=1, action_space=None):
    """The algorithm for observations [features]."""
    observation_space = gym.spaces.Box(-np.inf, np.inf, (features,), np.float32)
    return SAC(args, observation_space, action_space or box((-1, 1)))


# --- the losses, written once more in NumPy with float64


def layers_of(params, network=...):
    """[(kernel, bias)] of the layers in float64; of one of two stacked networks."""
    order = ("actor_0", "actor_1", "q_0", "q_1", "q", "mean", "log_std")
    layers = [params["params"][name] for name in order if name in params["params"]]
    pairs = [(layer["kernel"], layer["bias"]) for layer in layers]
    return [(np.float64(kernel)[network], np.float64(bias)[network]) for kernel, bias in pairs]


def forward(layers, x):
    """The outputs of the heads above two hidden layers."""
    for kernel, bias in layers[:2]:
        x = np.maximum(x @ kernel + bias, 0)
    return [x @ kernel + bias for kernel, bias in layers[2:]]


def log_cosh(u):
    return np.logaddexp(u, -u) - np.log(2)


def plain_policy(actor, observation, noise):
    """Actions and their log-probabilities."""
    mean, raw = forward(actor, observation)
    std = np.exp(-5 + 0.5 * (2 - -5) * (np.tanh(raw) + 1))
    u = mean + std * noise
    log_prob = norm.logpdf(u, mean, std) + 2 * log_cosh(u)  # tanh'(u) is 1 / cosh(u)**2
    return np.tanh(u), log_prob.sum(axis=1)


def plain_q(critics, observation, action):
    """Q(s, a) [2, B]."""
    x = np.concatenate([observation, action], axis=1)
    return np.stack([forward(layers_of(critics, k), x)[0][:, 0] for k in range(2)])


def plain_transitions(window, n_step, gamma):
    """Reward, discount and next observation of each window, in a loop."""
    rewards = []
    discounts = []
    next_observations = []
    for b in range(len(window.reward)):
        total = 0.0
        for t in range(n_step):
            total += gamma**t * window.reward[b, t]
            if window.terminated[b, t] or window.truncated[b, t]:
                break
        rewards.append(total)
        discounts.append(0 if window.terminated[b, t] else gamma ** (t + 1))
        next_observations.append(window.observation[b, t + 1])
    return np.float64(rewards), np.float64(discounts), np.float64(next_observations)


def random_window(rng, rows, steps, features, actions):
    """Windows of steps, a fifth of which terminate, a fifth are truncated, a fifth only reset."""
    ends = rng.random((rows, steps))
    window = Step(
        observation=rng.normal(size=(rows, steps, features)).astype(np.float32),
        action=rng.uniform(-1, 1, (rows, steps, actions)).astype(np.float32),
        reward=rng.normal(size=(rows, steps)).astype(np.float32),
        terminated=ends < 0.2,
        truncated=(ends > 0.2) & (ends < 0.4),
        valid=ends < 0.8,
    )
    for kind in (window.terminated, window.truncated, ~window.valid):
        assert kind[:, 0].sum() > 3
    return window


def with_windows(args, features, action_space):
    """The algorithm, whose replay gives the windows that are put in the place of its state."""
    agent = make(args, features, action_space)
    agent.replay = SimpleNamespace(
        init=lambda item: None,
        sample=lambda windows, key, rows: SimpleNamespace(experience=windows),
    )
    return agent


@pytest.mark.parametrize("n_step", [more(1), 3])
def test_losses_are_what_numpy_gives(n_step):
    rng = np.random.default_rng(n_step)
    args = Args(n_step=n_step, gamma=0.9)
    agent = with_windows(args, 5, box((-1, 1), (-2, 2), (0, 5)))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    targets = jax.jit(agent.init)(jax.random.PRNGKey(1)).critics  # not those of the critics
    policy = state.policy._replace(log_alpha=jnp.float32(-0.7))
    state = state._replace(target_critics=targets, policy=policy)
    window = random_window(rng, rows=64, steps=n_step + 1, features=5, actions=3)
    valid = window.valid[:, 0]
    key = jax.random.PRNGKey(10)
    actor = layers_of(policy.actor)
    batch = agent.to_transitions(window, key)

    loss, metrics = jax.jit(agent.critic_loss)(state.critics, state, batch, key)
    reward, discount, last = plain_transitions(window, n_step, 0.9)
    noise = np.float64(jax.random.normal(jax.random.split(key, 3)[2], (64, 3)))
    next_action, log_prob = plain_policy(actor, last, noise)
    next_value = plain_q(targets, last, next_action).min(axis=0) - np.exp(-0.7) * log_prob
    target = reward + discount * next_value
    values = plain_q(state.critics, window.observation[:, 0], window.action[:, 0])[:, valid]
    losses = ((values - target[valid]) ** 2).mean(axis=1)
    wanted = {
        "losses/qf1_loss": losses[0],
        "losses/qf2_loss": losses[1],
        "losses/qf_loss": losses.mean(),
        "losses/qf1_values": values[0].mean(),
        "losses/qf2_values": values[1].mean(),
    }
    assert loss == pytest.approx(losses.sum(), rel=1e-5)
    assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-5)

    inputs = (policy.actor, policy.log_alpha, state.critics, batch, key)
    loss, got_log_prob = jax.jit(agent.actor_loss)(*inputs)
    noise = np.float64(jax.random.normal(jax.random.split(key)[1], (64, 3)))
    action, log_prob = plain_policy(actor, window.observation[:, 0], noise)
    q = plain_q(state.critics, window.observation[:, 0], action).min(axis=0)
    assert loss == pytest.approx((np.exp(-0.7) * log_prob - q)[valid].mean(), rel=1e-5)
    np.testing.assert_allclose(got_log_prob, log_prob, rtol=1e-4, atol=1e-4)

    loss = agent.alpha_loss(policy.log_alpha, got_log_prob, batch.valid)
    assert loss == pytest.approx(np.exp(-0.7) * (-log_prob[valid] + 3).mean(), rel=1e-4)


def test_target_critics_follow_by_tau():
    agent = with_windows(Args(tau=0.05), 5, box((-1, 1), (-2, 2), (0, 5)))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    targets = jax.jit(agent.init)(jax.random.PRNGKey(1)).critics
    window = random_window(np.random.default_rng(0), rows=64, steps=2, features=5, actions=3)
    state = state._replace(target_critics=targets, replay=window)
    after, _ = jax.jit(agent.gradient_step)(state, jax.random.PRNGKey(1), 1)
    wanted = jax.tree.map(lambda old, new: 0.95 * old + 0.05 * new, targets, after.critics)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    jax.tree.map(close, after.target_critics, wanted)


def test_a_batch_of_resets_changes_nothing():
    """Nor does it divide by zero."""
    args = Args(n_step=3, tau=0.05, batch_size=64, gamma=0.9)
    agent = with_windows(args, 5, box((-1, 1), (-2, 2), (0, 5)))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    window = random_window(np.random.default_rng(0), rows=64, steps=4, features=5, actions=3)
    state = state._replace(replay=window._replace(valid=np.zeros_like(window.valid)))

    after, metrics = jax.jit(agent.gradient_step)(state, jax.random.PRNGKey(1), 2)

    jax.tree.map(np.testing.assert_array_equal, after.critics, state.critics)
    jax.tree.map(np.testing.assert_array_equal, after.policy.actor, state.policy.actor)
    assert after.policy.log_alpha == state.policy.log_alpha
    assert {float(value) for value in metrics.values()} == {0.0, 1.0}  # alpha is 1


# --- the policy and its actions


def with_gaussian(mean, log_std):
    """The algorithm, whose actor gives this mean and log deviation [A] for any observation."""
    agent = make(Args(), action_space=box(*[(-1, 1)] * len(mean)))

    def apply(params, observation):
        shape = (len(observation), len(mean))
        return [np.broadcast_to(np.float32(x), shape) for x in (mean, log_std)]

    agent.actor = SimpleNamespace(apply=apply)
    return agent


MEAN = [0.5, -1.0, 0.0]
LOG_STD = [-1.0, 0.3, 2.0]


def noise_far_out():
    """Noise [1000, 3], of which the first rows are so large that tanh is 1 in float32."""
    noise = np.random.default_rng(0).normal(size=(1000, 3)).astype(np.float32)
    noise[:4] *= 20
    return noise


@pytest.fixture
def draw(monkeypatch):
    """Makes the next draws of normal noise these."""

    def draw(noise):
        monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: noise)

    return draw


def test_log_probability_is_that_of_scipy(draw):
    """Far out, too."""
    agent = with_gaussian(MEAN, LOG_STD)
    noise = noise_far_out()
    u = MEAN + np.exp(LOG_STD) * noise
    assert np.abs(u).max() > 100

    draw(noise)
    action, log_prob = agent.sample_actions(None, np.zeros((1000, 1)), None)

    expected = norm.logpdf(u, MEAN, np.exp(LOG_STD)) + 2 * log_cosh(u)
    np.testing.assert_allclose(log_prob, expected.sum(axis=1), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(action, np.tanh(u), rtol=1e-4)


def test_log_probability_has_a_finite_gradient(draw):
    """Far out, too."""
    agent = with_gaussian(MEAN, LOG_STD)

    def total_log_prob(noise):
        draw(noise)
        _, log_prob = agent.sample_actions(None, noise, None)
        return log_prob.sum()

    assert np.isfinite(jax.grad(total_log_prob)(noise_far_out())).all()


def test_density_of_actions_integrates_to_one(draw):
    agent = with_gaussian([0.4], [-0.7])
    noise = np.linspace(-8, 8, 4001, dtype=np.float32)[:, None]
    draw(noise)
    action, log_prob = agent.sample_actions(None, noise, None)
    integral = np.trapezoid(np.exp(log_prob), action[:, 0])
    np.testing.assert_allclose(integral, 1, rtol=1e-3)


def box_of_eight(dtype):
    """Bounds that float32 does not have exactly, or far apart; the last axis is a point."""
    low = np.array([-1, -2, 0, 0.1, -0.3, 1e-8, -3e38, 5], dtype)
    high = np.array([1, 2, 5, 0.3, 0.7, 1e8, 3e38, 5], dtype)
    return gym.spaces.Box(low, high, dtype=dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_actions_reach_the_bounds_and_never_leave_them(dtype):
    space = box_of_eight(dtype)
    agent = make(Args(), action_space=space)
    ends = np.float32([-1, 0, 1])[:, None].repeat(8, axis=1)
    expected = [space.low, space.low / 2 + space.high / 2, space.high]
    np.testing.assert_allclose(agent.to_env_action(ends), expected, rtol=1e-6)
    compiled_action = jax.jit(agent.to_env_action)(jnp.asarray(ends))
    np.testing.assert_allclose(compiled_action, expected, rtol=1e-6)
    for action in np.random.default_rng(0).uniform(-1, 1, (1000, 8)).astype(np.float32):
        assert space.contains(agent.to_env_action(action))


@fast_at_ends("dtype", [np.float16, np.float32, np.float64])
def test_actions_have_the_dtype_of_their_space(dtype):
    """In JAX, which has no float64, they are of float32 at most."""
    space = gym.spaces.Box(dtype([0.1, -0.3, -6e4]), dtype([0.7, 0.3, 6e4]), dtype=dtype)
    agent = make(Args(), action_space=space)
    actions = np.float32([-1, -0.123, 0.5, 1])[:, None].repeat(3, axis=1)
    got = agent.to_env_action(actions)
    assert got.dtype == dtype
    assert all(space.contains(action) for action in got)
    compiled = jax.jit(agent.to_env_action)(actions)
    assert compiled.dtype == min(np.dtype(dtype), np.dtype(np.float32))
    np.testing.assert_allclose(compiled, got, rtol=1e-3 if dtype == np.float16 else 1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_policy_stays_in_the_box_whatever_it_sees(dtype):
    space = box_of_eight(dtype)
    agent = make(Args(), action_space=space)
    params = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.PRNGKey(0))
    observation = np.random.default_rng(0).normal(scale=1e6, size=(100, 1)).astype(np.float32)

    actions = np.asarray(agent.act(params, observation, jax.random.PRNGKey(1), 50_000))

    assert np.abs(actions).max() == 1
    for action in actions:
        assert space.contains(agent.to_env_action(action))


def before_learning():
    """The algorithm, that learns from step 400 on, parameters to act with, and observations."""
    agent = make(Args(learning_starts=400), action_space=box((-1, 1), (0, 3)))
    params = agent.policy_params(jax.jit(agent.init)(jax.random.PRNGKey(0)))
    return agent, params, np.float32([[0.3], [-2.0], [0.0], [9.0]])


def test_actions_are_uniform_until_learning_starts():
    agent, params, observation = before_learning()
    act = jax.vmap(agent.act, in_axes=(None, None, None, 0))
    actions = act(params, observation, jax.random.PRNGKey(0), np.arange(0, 400))
    actions = np.asarray(actions)
    assert kstest(actions.ravel(), "uniform", args=(-1, 2)).pvalue > 0.01
    second = actions[:-1, :, 1].ravel()
    for axis in (0, 1):  # steps are independent of each other
        assert abs(np.corrcoef(actions[1:, :, axis].ravel(), second)[0, 1]) < 0.1


def test_the_policy_acts_when_learning_has_started():
    """By its Gaussian, and without a key by its mean."""
    agent, params, observation = before_learning()
    mean, log_std = agent.actor.apply(params, observation)
    assert ((log_std > -5) & (log_std < 2)).all()
    act = jax.vmap(agent.act, in_axes=(None, None, None, 0))
    actions = act(params, observation, jax.random.PRNGKey(0), np.arange(400, 1_400))
    near = np.abs(mean) + 3 * np.exp(log_std) < 8  # where float32 tells tanh from 1
    assert near.any()
    noise = (np.arctanh(np.float64(actions[:, near])) - mean[near]) / np.exp(log_std[near])
    assert kstest(noise.ravel(), "norm").pvalue > 0.01
    np.testing.assert_allclose(agent.act(params, observation), np.tanh(mean), rtol=1e-5)


def test_the_policy_takes_the_environments_actions_and_explores_only_with_a_key():
    agent, params, observation = before_learning()
    key = jax.random.PRNGKey(1)
    for policy_key, step in ((None, 0), (key, 399), (key, 400)):
        action = np.asarray(agent.act(params, observation, policy_key, step))
        wanted = [-1, 0] + (action + 1) * [1, 1.5]  # in bounds of -1 to 1, and of 0 to 3
        got = protocol.policy(agent, params, policy_key)(observation, step=step)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert (got != protocol.policy(agent, params)(observation)).any()


# --- DroQ


def test_layers_of_the_critics_are_normalised():
    rng = np.random.default_rng(0)
    observation, action = rng.normal(size=(2, 20, 3)).astype(np.float32)
    critic = make(Args(hidden_sizes=(7, 5), critic_layer_norm=True)).critic
    params = critic.init(jax.random.PRNGKey(0), observation, action)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape), params)  # scales and biases, too
    x = np.concatenate([observation, action], axis=1)
    layers = params["params"]
    for i in range(2):
        x = x @ layers[f"q_{i}"]["kernel"] + layers[f"q_{i}"]["bias"]
        x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
        x = x * layers[f"norm_{i}"]["scale"] + layers[f"norm_{i}"]["bias"]
        x = np.maximum(x, 0)
    wanted = x @ layers["q"]["kernel"] + layers["q"]["bias"]
    got = critic.apply(params, observation, action, rngs={"dropout": jax.random.PRNGKey(0)})
    np.testing.assert_allclose(got, wanted[:, 0], rtol=2e-4, atol=1e-4)


def test_units_of_the_critics_are_dropped_and_the_others_scaled():
    """Each critic drops others, and with another key others again: their sum is binomial."""
    width, fraction = 20_000, 0.25
    agent = make(Args(hidden_sizes=(width,), critic_dropout=fraction))
    layers = {
        "q_0": {"kernel": np.zeros((2, 2, width)), "bias": np.ones((2, width))},
        "q": {"kernel": np.ones((2, width, 1)), "bias": np.zeros((2, 1))},
    }
    critics = {"params": jax.tree.map(np.float32, layers)}
    zeros = np.zeros((1, 1), np.float32)
    q_values = jax.jit(agent.q_values)
    values = [q_values(critics, zeros, zeros, jax.random.PRNGKey(seed)) for seed in range(20)]
    kept = np.concatenate(values).ravel() * (1 - fraction)
    np.testing.assert_allclose(kept, kept.round(), atol=0.05)
    assert len(set(kept.round())) > 30  # of 40
    assert kstest(kept, binom(width, 1 - fraction).cdf).pvalue > 0.01


# --- what is learned


class Target(gym.Env):
    """Three states, observed one-hot; in the end zeros are seen.

    target: one step, reward -(action - 2)**2 for an action from 1 to 5.
    ends: three states, reward 1 a step, terminates.
    goes: one state, reward 1 a step, truncated after three steps.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = box((1, 5))

    def __init__(self, kind):
        self.kind = kind

    def _observe(self):
        return np.eye(4, 3, dtype=np.float32)[self.time if self.kind == "ends" else 0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self._observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        if self.kind == "target":
            return self._observe(), -((float(action[0]) - 2) ** 2), True, False, {}
        is_over = self.time == 3
        ends = self.kind == "ends"
        return self._observe(), 1.0, is_over and ends, is_over and not ends, {}


gym.register("Target-v0", Target)


class Quadratic(nn.Module):
    """Q(s, a) that is a parabola in the action, another one for each state."""

    features: Any
    hidden_sizes: Any
    layer_norm: bool
    dropout: float

    @nn.compact
    def __call__(self, observation, action):
        powers = [observation, observation * action, observation * action**2]
        return nn.Dense(1)(jnp.concatenate(powers, axis=-1))[:, 0]


class Linear(nn.Module):
    """One Gaussian for each state."""

    num_actions: int
    features: Any
    hidden_sizes: Any

    @nn.compact
    def __call__(self, observation):
        return nn.Dense(self.num_actions)(observation), nn.Dense(self.num_actions)(observation)


@pytest.fixture
def simple_networks(monkeypatch):
    """They can have the right values exactly, and learn them in little time."""
    monkeypatch.setattr(sac_jax, "Critic", Quadratic)
    monkeypatch.setattr(sac_jax, "Actor", Linear)


PROBE = dict(
    total_timesteps=4_000,
    num_envs=8,
    train_frequency=2,
    learning_starts=1_000,
    batch_size=64,
    buffer_size=6_000,
    gamma=0.5,
    tau=0.1,
    policy_lr=3e-3,
    q_lr=3e-2,
)


def learned(kind, **flags):
    """The algorithm and the State after training with PROBE's flags and these."""
    args = Args(**PROBE | flags)
    env_kwargs = f'{{"kind": "{kind}"}}'
    run = Run(env_id="Target-v0", env_kwargs=env_kwargs, eval_episodes=0, checkpoint_interval=0)
    state, _, _ = train(args, run)
    return make_agent(sac_jax, args, run), state


def q_of(agent, state, actions, states=1):
    """Q(s, a) [2, states, actions] of both critics, for the network's actions."""
    rows = states * len(actions)
    observation = np.eye(3, dtype=np.float32)[:states].repeat(len(actions), axis=0)
    action = np.tile(np.float32(actions), states).reshape(rows, 1)
    q = agent.q_values(state.critics, observation, action, jax.random.PRNGKey(0))
    return q.reshape(2, states, len(actions))


def entropy_of(agent, state):
    """The policy's entropy in the first state."""
    observation = np.eye(3, dtype=np.float32)[:1].repeat(10_000, axis=0)
    _, log_prob = agent.sample_actions(state.policy.actor, observation, jax.random.PRNGKey(0))
    return -log_prob.mean()


ACTIONS = [-0.9, -0.3, 0.0, 0.8]


@pytest.mark.slow
def test_it_learns_the_best_action_and_the_values_of_all(simple_networks):
    """Actions from 1 to 5 are -1 to 1 to the networks: the best one, 2, is -0.5."""
    agent, state = learned("target", total_timesteps=6_000)
    values = -((3 + 2 * np.array(ACTIONS) - 2) ** 2)
    np.testing.assert_allclose(q_of(agent, state, ACTIONS), [[values]] * 2, atol=0.02)
    observation = np.eye(3, dtype=np.float32)[:1]
    best = agent.act(state.policy.actor, observation)
    np.testing.assert_allclose(agent.to_env_action(best), 2, atol=0.05)
    # Alpha has brought the entropy to minus the number of axes.
    np.testing.assert_allclose(entropy_of(agent, state), -1, atol=0.05)


ENDS = ("ends", [1.75, 1.5, 1.0])
GOES = ("goes", [2.0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "values", "n_step"), [(*ENDS, 1), (*ENDS, 3), (*GOES, 1), (*GOES, 3)]
)
def test_values_are_right_at_both_kinds_of_end(kind, values, n_step, simple_networks):
    """Without entropy: a time limit is bootstrapped over, an end is not."""
    agent, state = learned(kind, autotune=False, alpha=0.0, n_step=n_step)
    assert state.policy.log_alpha == -np.inf
    expected = np.broadcast_to(np.reshape(values, (-1, 1)), (2, len(values), 4))
    np.testing.assert_allclose(q_of(agent, state, ACTIONS, len(values)), expected, atol=0.01)


@pytest.mark.slow
def test_the_value_has_the_entropy_of_later_steps(simple_networks):
    """Q = 1 + gamma (Q + alpha H) is constant, 2 + alpha H if gamma is 0.5."""
    agent, state = learned("goes", autotune=False, alpha=0.5)
    entropy = entropy_of(agent, state)
    assert 0.6 < entropy < np.log(2)  # nearly uniform in [-1, 1], as the reward is constant
    np.testing.assert_allclose(q_of(agent, state, ACTIONS), 2 + 0.5 * entropy, atol=0.05)


def learner_and_rollout(**flags):
    """An algorithm with a train step after every step of 4 environments, and such a step."""
    sizes = dict(num_envs=4, train_frequency=2, learning_starts=32, batch_size=8, buffer_size=100)
    agent = make(Args(**sizes, **flags))
    assert agent.rollout_shape == (1, 4)
    rollout = jax.tree.map(lambda x: np.zeros((1, 4, *x.shape), x.dtype), agent.example_step)
    rollout = rollout._replace(valid=np.ones((1, 4), bool))
    return agent, rollout


@pytest.mark.parametrize("name", ["critic", "actor", "alpha"])
def test_an_optimizer_with_weight_decay_knows_the_parameters(name):
    """Of AdamW the parameters are those of Adam, less their decay."""
    agent, _ = learner_and_rollout(hidden_sizes=(4,), policy_frequency=1)
    state = filled(agent)
    policy = state.policy._replace(log_alpha=jnp.float32(2))  # at 0 nothing decays
    state = state._replace(policy=policy)
    optimizers = (optax.adam(0.1), optax.adamw(0.1, weight_decay=0.5))
    results = []
    for optimizer in optimizers:
        setattr(agent, f"{name}_optimizer", optimizer)
        opt_state = optimizer.init(parameters_of(state, name))
        given = with_opt_state(state, name, opt_state)
        after, _ = jax.jit(agent.gradient_step)(given, jax.random.PRNGKey(1), 1)
        results.append(parameters_of(after, name))

    wanted = jax.tree.map(
        lambda adam, before: adam - 0.05 * before, results[0], parameters_of(state, name)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), results[1], wanted)


def parameters_of(state, name):
    """The parameters that an optimiser changes."""
    policy = state.policy
    return {"critic": state.critics, "actor": policy.actor, "alpha": policy.log_alpha}[name]


def with_opt_state(state, name, opt_state):
    """The state, with another one of an optimiser."""
    if name == "critic":
        return state._replace(critic_opt_state=opt_state)
    return state._replace(policy=state.policy._replace(**{f"{name}_opt_state": opt_state}))


def test_the_policy_makes_as_many_steps_as_the_critics(simple_networks):
    """Two, after every second one."""
    agent, rollout = learner_and_rollout()
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    train_step = jax.jit(agent.train_step)
    for step in range(0, 52, 4):
        state, params, metrics = train_step(state, rollout, jax.random.PRNGKey(1), step)
        learns = step + 4 > 32
        assert metrics["charts/gradient_steps"] == 2 * learns
        losses = [value for tag, value in metrics.items() if tag.startswith("losses/")]
        assert len(losses) == 8
        assert np.isfinite(losses).all() if learns else np.isposinf(losses).all()
    jax.tree.map(np.testing.assert_array_equal, params, state.policy.actor)
    assert int(state.critic_opt_state[0].count) == 10
    assert int(state.policy.actor_opt_state[0].count) == 10
    assert int(state.policy.alpha_opt_state[0].count) == 10


def test_the_policy_makes_fewer_steps_than_the_critics_as_in_droq(simple_networks):
    """One after every fifth gradient step of the critics, of which there are ten a train step."""
    agent, rollout = learner_and_rollout(gradient_steps=5, policy_frequency=5, policy_steps=1)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    train_step = jax.jit(agent.train_step)
    for step in range(28, 52, 4):
        state, _, metrics = train_step(state, rollout, jax.random.PRNGKey(1), step)
    assert metrics["charts/replay_ratio"] == 2.5
    assert int(state.critic_opt_state[0].count) == 50
    assert int(state.policy.actor_opt_state[0].count) == 10


def filled(agent):
    """The first State, whose replay is full of random steps."""
    replay = agent.replay.init(agent.example_step)
    steps = random_window(np.random.default_rng(0), 50, agent.args.num_envs, 1, 1)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    return state._replace(replay=agent.replay.add_batch(replay, steps))


@pytest.mark.parametrize("flags", [dict(tau=1.0), dict(tau=0.25, gradient_steps=4)], ids=str)
def test_the_targets_move_at_the_multiples_of_their_period(flags, simple_networks):
    """It is counted in gradient steps."""
    agent, _ = learner_and_rollout(target_network_frequency=3, **flags)
    moves = moves_of_target(agent, filled(agent), 7, "critics", "target_critics")
    assert list(moves) == [3, 6]
    for old_target, critics, target in moves.values():
        wanted = agent.args.tau * critics + (1 - agent.args.tau) * old_target
        np.testing.assert_allclose(target, wanted, rtol=1e-5, atol=1e-6)


def test_the_numbers_of_gradient_steps_count_from_step_0(simple_networks):
    """Those of the iteration from step 36 on, of 2 * 3 in 4 steps, are 55 to 60."""
    agent, rollout = learner_and_rollout(gradient_steps=3)
    updates = []

    def gradient_step(state, key, update):
        jax.debug.callback(lambda update: updates.append(int(update)), update, ordered=True)
        return state, {}

    agent.gradient_step = gradient_step
    jax.jit(agent.train_step)(filled(agent), rollout, jax.random.PRNGKey(1), 36)
    jax.effects_barrier()
    assert updates == [55, 56, 57, 58, 59, 60]


def test_a_hundred_steps_of_the_policy_are_a_loop_of_the_program(simple_networks):
    """Unrolled they would take minutes to compile."""
    programs = []
    for frequency in (4, 100):
        agent, _ = learner_and_rollout(policy_frequency=frequency)
        state = jax.eval_shape(agent.init, jax.random.PRNGKey(0))
        programs.append(jax.make_jaxpr(agent.gradient_step)(state, jax.random.PRNGKey(0), 100))
    assert str(programs[0]).count("\n") == str(programs[1]).count("\n")


@pytest.mark.more
def test_the_steps_of_the_policy_follow_each_other_with_keys_of_their_own(simple_networks):
    """They are those of update_policy, one after the other, with the new critics."""
    agent, _ = learner_and_rollout(policy_frequency=3)
    update_policy = agent.update_policy
    calls = []

    def noted(policy, critics, batch, key):
        inputs = (policy, critics, batch, key)
        jax.debug.callback(lambda *args: calls.append(args), *inputs, ordered=True)
        return update_policy(policy, critics, batch, key)

    agent.update_policy = noted
    before = filled(agent)
    after, _ = jax.jit(agent.gradient_step)(before, jax.random.PRNGKey(0), 3)
    jax.effects_barrier()
    assert len({tuple(key.tolist()) for *_, key in calls}) == len(calls) == 3
    policy = before.policy
    update_once = jax.jit(update_policy)
    for given, *inputs in calls:
        assert_trees_close(given, policy)
        assert_trees_close(inputs[0], after.critics)
        policy = update_once(policy, *inputs)
    assert_trees_close(after.policy, policy)


def assert_trees_close(actual, expected):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), actual, expected)


def test_what_is_drawn_in_to_transitions_does_not_depend_on_the_batch(simple_networks):
    """Its key is another one than that of the draw from the replay."""
    agent, _ = learner_and_rollout()
    of_draw, of_batch = keys_of_gradient_step(agent, filled(agent), jax.random.PRNGKey(0))
    assert (of_draw != of_batch).any()


def test_with_many_seeds_the_steps_of_the_policy_are_still_skipped(simple_networks):
    """They stay a branch of the program, and do not become a choice between results."""
    agent, rollout = learner_and_rollout()
    keys = jax.random.split(jax.random.PRNGKey(0))
    states = jax.eval_shape(jax.vmap(agent.init), keys)
    rollouts = jax.tree.map(lambda x: np.stack([x, x]), rollout)
    of_both_seeds = jax.vmap(agent.train_step, in_axes=(0, 0, 0, None))
    assert "cond[" in str(jax.make_jaxpr(of_both_seeds)(states, rollouts, keys, 48))


# --- runs


class Actions(gym.Env):
    """Any space of actions."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, space):
        self.action_space = {
            "unbounded": gym.spaces.Box(-np.inf, np.inf, (2,)),
            "half": gym.spaces.Box(np.float32([0, -1]), np.float32([1, np.inf])),
            "whole": gym.spaces.Box(0, 3, (2,), np.int32),
            "matrix": gym.spaces.Box(-1, 1, (2, 2)),
        }[space]


gym.register("Actions-v0", Actions)


@pytest.mark.parametrize("space", ["discrete", "unbounded", "half", "whole", "matrix"])
def test_other_actions_are_a_usage_error(space, run_main, tmp_path):
    flags = ["--env-id", "Actions-v0", "--env-kwargs", f'{{"space": "{space}"}}']
    if space == "discrete":
        flags = ["--env-id", "CartPole-v1"]
    code, out, err = run_main(sac_jax, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: SAC takes a Box [A] of floats with finite bounds, not ")
    assert err.endswith(": try ppo_jax.py\n")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", ["--learning-starts 255", "--total-timesteps 5000"])
def test_learning_starts_is_checked(flags, run_main, tmp_path):
    code, out, err = run_main(sac_jax, *flags.split())
    assert (code, out) == (2, "")
    assert "learning_starts must be from batch_size to total_timesteps - 1" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


SMALL = dict(learning_starts=64, batch_size=16, buffer_size=400, num_envs=2, train_frequency=4)


def test_a_run_on_pendulum_has_the_charts_of_cleanrl(run_main):
    """With all that changes the shape of a rollout; its actions are those of the network."""
    flags = dict(frame_stack=2, n_step=2, clip_rewards=True)
    args = Args(total_timesteps=480, hidden_sizes=(16, 16), **SMALL, **flags)
    state, returns, folder = train(args, Run(log_interval=40, eval_episodes=1))
    assert state.replay.storage.observation.shape == (200, 2, 3)
    assert np.abs(state.replay.storage.action).max() <= 1
    assert state.replay.storage.reward.min() < -1  # what is learned from is the sign
    assert -2_000 < returns[0] < 0
    scalars, text = read_events(folder)
    losses = {tag for tag in scalars if tag.startswith("losses/")}
    names = "qf1_values qf2_values qf1_loss qf2_loss qf_loss actor_loss alpha alpha_loss"
    assert losses == {f"losses/{name}" for name in names.split()}
    assert {len(scalars[tag]) for tag in losses} == {11}  # the first point was before learning
    assert "|env_id|Pendulum-v1|" in text


@pytest.mark.more
@pytest.mark.parametrize("networks", ["simple", more("real")])
def test_a_compiled_run_goes_on_bit_for_bit(networks, request, stop_at):
    """A signal comes in its third log interval."""
    if networks == "simple":
        request.getfixturevalue("simple_networks")
    args = Args(total_timesteps=360, **SMALL)
    run = dict(env_id="phys2d/Pendulum-v0", num_seeds=2, log_interval=60, eval_episodes=0)
    whole, returns, folder = train(args, Run(exp_name="whole", **run))
    _, _, half = train(args, Run(exp_name="half", **run), stop_at(180))
    resumed, same_returns, _ = train(args, Run(exp_name="half", resume=str(half), **run))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    np.testing.assert_array_equal(returns, same_returns)
    for name in (".", "seed_2"):
        expected, _ = read_events(folder / name)
        got, _ = read_events(half / name)
        assert expected.pop("charts/SPS") != got.pop("charts/SPS")
        assert got == expected


@pytest.mark.more
def test_an_ordinary_run_goes_on_with_its_agent(simple_networks, monkeypatch):
    """A signal comes at step 200, in an iteration that goes on to step 204."""
    args = Args(total_timesteps=300, **SMALL)
    run = dict(log_interval=100, eval_episodes=1)
    stop = []
    add_metrics = sac_jax.Log.add_metrics

    def stop_at_step_200(log, step, metrics):
        if step == 200:
            stop.append(signal.SIGTERM)
        add_metrics(log, step, metrics)

    with monkeypatch.context() as patched:
        patched.setattr(sac_jax.Log, "add_metrics", stop_at_step_200)
        half, _, folder = train(args, Run(**run), stop)
    assert int(half.critic_opt_state[0].count) == (204 - 64) / 4
    state, _, _ = train(args, Run(**run, resume=str(folder)))
    assert int(state.critic_opt_state[0].count) == (300 - 64) / 4
    actions = load_policy(folder)(np.float32([[1, 0, 0], [-1, 0, 8]]))
    assert actions.shape == (2, 1)
    assert np.abs(actions).max() <= 2


@pytest.mark.parametrize("env_id", [slow("phys2d/Pendulum-v0"), slow("Pendulum-v1")])
def test_a_pendulum_is_swung_up(env_id, optimised):
    """A policy that does not swing it up has about -1200."""
    args = Args(total_timesteps=8_000, learning_starts=1_000, buffer_size=8_000)
    run = Run(env_id=env_id, eval_interval=10_000)
    _, _, folder = train(args, run)
    scalars, _ = read_events(folder)
    ((step, score),) = scalars["eval/episodic_return"]
    assert step == 8_000
    assert score > -250
