"""sac_jax.py: its losses, updates, networks and policy, against NumPy and SciPy."""

from functools import cache, partial
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import dense, random_rollout
from helpers import read_events
from numpy.testing import assert_allclose, assert_array_equal
from on_policy import OBSERVATIONS, random_params
from scipy.stats import binom, kstest, norm
from small_agents import learner, make

import sac_jax
from sac_jax import SAC, Args, Run, Step, train

KEY = jax.random.PRNGKey(10)


def assert_close(actual, expected):
    jax.tree.map(partial(assert_allclose, rtol=1e-3, atol=1e-5), actual, expected)


def hidden(params, name, x):
    for i in range(2):
        x = np.maximum(dense(params[f"{name}_{i}"], x), 0)
    return x


def log_cosh(u):
    return np.logaddexp(u, -u) - np.log(2)


def plain_policy(actor, observation, noise):
    params = jax.tree.map(np.float64, actor["params"])
    x = hidden(params, "actor", observation)
    mean = dense(params["mean"], x)
    std = np.exp(-5 + 3.5 * (np.tanh(dense(params["log_std"], x)) + 1))
    u = mean + std * noise
    log_prob = norm.logpdf(u, mean, std) + 2 * log_cosh(u)  # tanh'(u) is 1 / cosh(u)**2
    return np.tanh(u), log_prob.sum(axis=1)


def plain_q(critics, observation, action):
    """Computes Q(s, a) [2, B]."""
    x = np.concatenate([observation, action], axis=1)
    both = [jax.tree.map(lambda p, k=k: np.float64(p[k]), critics["params"]) for k in range(2)]
    return np.stack([dense(params["q"], hidden(params, "q", x))[:, 0] for params in both])


def random_window():
    """Makes sequences [64, 4, ...] of steps."""
    rng = np.random.default_rng(3)
    steps, _ = random_rollout(rng, 4, rng.random(64) < 0.2, features=3)
    action = rng.uniform(-1, 1, (4, 64, 2)).astype(np.float32)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), Step(*steps)._replace(action=action))


def with_windows(**flags):
    """Makes an agent whose replay returns its own state as the sample, and the agent's State.

    Optimisers are gradient descent at rate 0.1.
    """
    agent = make("sac", gamma=0.9, hidden_sizes=(16, 16), n_step=3, **flags)
    agent.replay = SimpleNamespace(
        init=lambda item: None,
        sample=lambda windows, key, rows: SimpleNamespace(experience=windows),
    )
    descent = optax.sgd(0.1)
    agent.actor_optimizer = agent.alpha_optimizer = agent.critic_optimizer = descent
    shapes = jax.eval_shape(agent.init, KEY)
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    actor = random_params(state.policy.actor, 0)
    state = state._replace(
        critics=random_params(state.critics, 1),
        target_critics=random_params(state.critics, 2),
        policy=state.policy._replace(actor=actor, log_alpha=jnp.float32(-0.7)),
        replay=random_window(),
    )
    return agent, state


@cache
def example():
    """Makes an agent, its State, a batch, `gradient_step` and `update_policy`."""
    agent, state = with_windows()
    batch = jax.tree.map(np.asarray, agent.to_transitions(state.replay, KEY))
    return agent, state, batch, jax.jit(agent.gradient_step), jax.jit(agent.update_policy)


def descended(params, gradient):
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)


def test_the_loss_of_the_critics_is_what_numpy_gives():
    agent, state, batch, *_ = example()
    noise = np.float64(jax.random.normal(jax.random.split(KEY, 3)[2], (64, 2)))
    action, log_prob = plain_policy(state.policy.actor, batch.next_observation, noise)
    next_q = plain_q(state.target_critics, batch.next_observation, action)
    target = batch.reward + batch.discount * (next_q.min(axis=0) - np.exp(-0.7) * log_prob)
    values = plain_q(state.critics, batch.observation, batch.action)[:, batch.valid]
    losses = ((values - target[batch.valid]) ** 2).mean(axis=1)
    loss, metrics = jax.jit(agent.critic_loss)(state.critics, state, batch, KEY)

    assert float(loss) == pytest.approx(losses.sum(), rel=1e-4)
    assert metrics == pytest.approx(
        {
            "losses/qf1_loss": losses[0],
            "losses/qf2_loss": losses[1],
            "losses/qf_loss": losses.mean(),
            "losses/qf1_values": values[0].mean(),
            "losses/qf2_values": values[1].mean(),
        },
        rel=1e-4,
        abs=1e-5,
    )


def test_the_losses_of_the_policy_are_what_numpy_gives():
    agent, state, batch, *_ = example()
    policy = state.policy
    noise = np.float64(jax.random.normal(jax.random.split(KEY)[1], (64, 2)))
    action, log_prob = plain_policy(policy.actor, batch.observation, noise)
    q = plain_q(state.critics, batch.observation, action).min(axis=0)
    inputs = (policy.actor, policy.log_alpha, state.critics, batch, KEY)
    loss, got_log_prob = jax.jit(agent.actor_loss)(*inputs)
    alpha_loss = agent.alpha_loss(policy.log_alpha, got_log_prob, batch.valid)

    assert loss == pytest.approx((np.exp(-0.7) * log_prob - q)[batch.valid].mean(), rel=1e-4)
    assert_allclose(got_log_prob, log_prob, rtol=1e-4, atol=1e-4)
    assert alpha_loss == pytest.approx(np.exp(-0.7) * (2 - log_prob[batch.valid]).mean(), rel=1e-4)


def test_the_critics_follow_the_gradient_of_their_loss():
    agent, state, batch, gradient_step, _ = example()
    after, metrics = gradient_step(state, KEY, 1)
    critic_key = jax.random.split(KEY, 3)[1]
    grad = jax.jit(jax.grad(agent.critic_loss, has_aux=True))
    gradient, wanted = grad(state.critics, state, batch, critic_key)

    assert_close(after.critics, descended(state.critics, gradient))
    assert_close({name: metrics[name] for name in wanted}, wanted)
    assert_close(after.policy, state.policy)


def test_actor_and_alpha_follow_the_gradients_of_their_losses():
    agent, state, batch, _, update_policy = example()
    policy = state.policy
    after = update_policy(policy, state.critics, batch, KEY)
    grad = jax.jit(jax.value_and_grad(agent.actor_loss, has_aux=True))
    (loss, log_prob), gradient = grad(policy.actor, policy.log_alpha, state.critics, batch, KEY)
    alpha_loss = agent.alpha_loss(policy.log_alpha, log_prob, batch.valid)

    assert_close(after.actor, descended(policy.actor, gradient))
    assert_close(after.log_alpha, descended(policy.log_alpha, alpha_loss))  # its own gradient
    assert_close(after.losses, [loss, alpha_loss])


def test_the_steps_of_the_policy_follow_each_other():
    """They use the new critics, and a new key each."""
    _, state, batch, gradient_step, update_policy = example()
    after, metrics = gradient_step(state, KEY, 2)
    policy = state.policy
    for key in jax.random.split(jax.random.split(KEY, 3)[2]):
        policy = update_policy(policy, after.critics, batch, key)

    assert_close(after.policy, policy)
    assert metrics["losses/alpha"] == pytest.approx(np.exp(after.policy.log_alpha))
    assert metrics["losses/actor_loss"] == after.policy.losses[0]
    assert metrics["losses/alpha_loss"] == after.policy.losses[1]


def test_alpha_stays_if_it_is_not_tuned():
    agent, state = with_windows(autotune=False)
    after, metrics = jax.jit(agent.gradient_step)(state, KEY, 2)

    assert after.policy.log_alpha == np.float32(-0.7)
    assert metrics["losses/alpha"] == pytest.approx(np.exp(-0.7))
    assert "losses/alpha_loss" not in metrics


@pytest.mark.parametrize(
    ("frequency", "steps", "wanted"), [(2, 0, [0, 2, 2, 4, 4, 6]), (5, 3, [0, 0, 0, 0, 3, 3])]
)
def test_the_policy_is_updated_at_its_frequency(frequency, steps, wanted):
    """An update has `policy_steps`, or as many steps as the critics took."""
    agent, state = with_windows(policy_frequency=frequency, policy_steps=steps)
    agent.critic_loss = lambda critics, *inputs: (critics["params"]["q"]["bias"].sum(), {})
    agent.update_policy = lambda policy, *inputs: policy._replace(losses=policy.losses + 1)
    gradient_step = jax.jit(agent.gradient_step)
    counts = []
    for update in range(1, 7):
        state, _ = gradient_step(state, KEY, update)
        counts.append(int(state.policy.losses[0]))

    assert counts == wanted


def test_the_log_probability_is_that_of_scipy_far_out():
    """Its gradient is finite."""
    agent = make("sac")
    agent.actor = SimpleNamespace(apply=lambda params, observation: params)
    mean, log_std = [np.tile(np.float32(x), (1000, 1)) for x in ([0.5, -1, 0], [-1, 0.3, 4])]
    u = mean + np.exp(log_std) * np.float64(jax.random.normal(KEY, mean.shape))
    wanted = norm.logpdf(u, mean, np.exp(log_std)) + 2 * log_cosh(u)
    action, log_prob = agent.sample_actions((mean, log_std), None, KEY)
    gradient = jax.grad(lambda params: agent.sample_actions(params, None, KEY)[1].sum())

    assert np.abs(u).max() > 100
    assert_allclose(log_prob, wanted.sum(axis=1), rtol=1e-5, atol=1e-3)
    assert_allclose(action, np.tanh(u), rtol=1e-3, atol=1e-6)
    assert all(np.isfinite(x).all() for x in gradient((mean, log_std)))


@pytest.mark.parametrize("init_from", ["", "a run"])
def test_actions_are_uniform_until_learning_starts(init_from):
    """They are not uniform if the agent has learned before."""
    agent = make("sac", learning_starts=400, total_timesteps=999, init_from=init_from)
    actor = random_params(jax.eval_shape(agent.init, KEY).policy.actor)
    observation = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    mean, log_std = agent.actor.apply(actor, observation)
    for step in (399, 400):
        noise = jax.random.normal(jax.random.fold_in(KEY, step), (4, 2))
        wanted = np.tanh(mean + np.exp(log_std) * noise)
        if step == 399 and not init_from:
            wanted = 2 * norm.cdf(noise) - 1
        assert_allclose(agent.act(actor, observation, KEY, step), wanted, rtol=1e-4, atol=1e-5)
    assert_allclose(agent.act(actor, observation), np.tanh(mean), rtol=1e-5)


def test_targets_begin_as_the_critics_which_differ():
    agent = learner("sac")
    state = agent.init(KEY)
    first, second = state.critics["params"]["q"]["kernel"]

    jax.tree.map(assert_array_equal, state.target_critics, state.critics)
    assert (first != second).all()


def test_alpha_begins_at_1_and_is_continued_if_it_is_tuned():
    agent = learner("sac")
    state = agent.init(KEY)

    assert state.policy.log_alpha == 0
    assert agent.learned(state) is state


def test_alpha_is_a_flag_if_it_is_not_tuned():
    agent = make("sac", autotune=False, alpha=0.25)
    state = jax.jit(agent.init)(KEY)

    assert np.exp(state.policy.log_alpha) == pytest.approx(0.25)
    assert agent.learned(state).policy.log_alpha == ()


INF = np.inf
UNBOUNDED = [gym.spaces.Discrete(2), gym.spaces.Box(-INF, INF, (1,)), gym.spaces.Box(0, INF, (1,))]
OTHERS = [*UNBOUNDED, gym.spaces.Box(0, 3, (2,), np.int32), gym.spaces.Box(-1, 1, (2, 2))]


@pytest.mark.parametrize("space", OTHERS, ids=str)
def test_other_actions_are_a_usage_error(space):
    with pytest.raises(sac_jax.UsageError) as caught:
        SAC(Args(), OBSERVATIONS, space)

    (line,) = str(caught.value).splitlines()
    assert str(space) in line


def test_layers_of_the_critics_are_normalised():
    rng = np.random.default_rng(0)
    observation, action = rng.normal(size=(2, 20, 3)).astype(np.float32)
    critic = make("sac", hidden_sizes=(7, 5), critic_layer_norm=True).critic
    params = random_params(jax.eval_shape(critic.init, KEY, observation, action))
    x = np.concatenate([observation, action], axis=1)
    layers = params["params"]
    for i in range(2):
        x = dense(layers[f"q_{i}"], x)
        x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
        x = x * layers[f"norm_{i}"]["scale"] + layers[f"norm_{i}"]["bias"]
        x = np.maximum(x, 0)
    got = critic.apply(params, observation, action, rngs={"dropout": KEY})

    assert_allclose(got, dense(layers["q"], x)[:, 0], rtol=2e-4, atol=1e-4)


def test_units_of_the_critics_are_dropped_others_scaled():
    """Each critic drops different units, as does each key: their sum is binomial."""
    width, fraction = 20_000, 0.25
    agent = make("sac", hidden_sizes=(width,), critic_dropout=fraction)
    layers = {
        "q_0": {"kernel": np.zeros((2, 5, width)), "bias": np.ones((2, width))},
        "q": {"kernel": np.ones((2, width, 1)), "bias": np.zeros((2, 1))},
    }
    critics = {"params": jax.tree.map(np.float32, layers)}
    inputs = np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float32)
    q_values = jax.jit(agent.q_values)
    values = [q_values(critics, *inputs, jax.random.PRNGKey(seed)) for seed in range(20)]
    kept = np.concatenate(values).ravel() * (1 - fraction)

    assert_allclose(kept, kept.round(), atol=0.05)
    assert len(set(kept.round())) > 30  # of 40
    assert kstest(kept, binom(width, 1 - fraction).cdf).pvalue > 0.01


@pytest.mark.slow
def test_a_pendulum_is_swung_up(optimised):
    """A policy that does not swing it up has a return of about -1200."""
    sizes = dict(hidden_sizes=(64, 64), batch_size=64, learning_starts=1_000, buffer_size=8_000)
    args = Args(total_timesteps=8_000, policy_lr=1e-3, **sizes)
    run = Run(env_id="phys2d/Pendulum-v0", eval_interval=10_000, checkpoint_interval=0)
    _, _, folder = train(args, run)

    ((step, score),) = read_events(folder)[0]["eval/episodic_return"]
    assert step == 8_000
    assert score > -300
