"""What PPO and recurrent PPO share; only of PPO if test_scripts.py finds the same code."""

from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal
from on_policy import (
    BOTH,
    BOX,
    DISCRETE,
    KEY,
    MULTI,
    OBSERVATIONS,
    SPACES,
    assert_trees_equal,
    collected,
    log_prob_and_entropy,
    make,
)

import ppo_jax
import recurrent_ppo_jax
from ppo_jax import Args, Categorical, Gaussian

IMAGES = gym.spaces.Box(0, 255, (10, 10, 2), np.uint8)


@BOTH
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_log_probabilities_and_entropies_are_scipys(script, space):
    rng = np.random.default_rng(0)
    actions = script.Gaussian(BOX) if space is BOX else script.Categorical(space)
    width = actions.num_outputs * (2 if actions.has_log_std else 1)
    output = rng.normal(size=(20, 10, width)).astype(np.float32)
    if space is BOX:
        action = rng.normal(size=(20, 10, 2)).astype(np.float32)
    else:
        action = rng.integers(getattr(space, "nvec", 3), size=(20, 10, *space.shape))

    log_prob, entropy = actions.log_prob_and_entropy(output, action)

    wanted = log_prob_and_entropy(space, output, action)
    assert_allclose(log_prob, wanted[0], rtol=1e-4)
    assert_allclose(entropy, wanted[1], rtol=1e-5)


def test_multi_discrete_actions_are_drawn_as_they_exist():
    """The first action has two choices, so that its other two logits must not count."""
    p = np.array([0.3, 0.7]), np.array([0.3, 0.1, 0.4, 0.2])
    output = np.concatenate([np.log(p[0]), [9.0, 9.0], np.log(p[1])]).astype(np.float32)
    actions = Categorical(MULTI)
    first, second = np.asarray(actions.sample(output[None].repeat(20_000, axis=0), KEY)).T
    counts = np.bincount(first * 4 + second, minlength=8)

    assert first.max() == 1
    assert scipy.stats.chisquare(counts, 20_000 * np.outer(*p).ravel()).pvalue > 1e-3
    assert_array_equal(actions.mode(output[None]), [[1, 2]])


def test_actions_of_a_box_are_drawn_from_a_gaussian():
    output = np.float32([1.0, -2.0, np.log(3.0), np.log(0.5)])
    actions = Gaussian(BOX)
    draws = np.asarray(actions.sample(output[None].repeat(20_000, axis=0), KEY))
    first, second = draws.T

    assert scipy.stats.kstest(first, scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(second, scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # 4 standard deviations
    assert_array_equal(actions.mode(output[None]), [[1.0, -2.0]])


def test_running_statistics_are_those_of_all_rows():
    rng = np.random.default_rng(0)
    stats = ppo_jax.RunningMeanStd(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    seen = np.empty((0, 3))
    for rows in (0, 1, 30, 0, 20):
        x = (rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = rng.permutation(30) < rows
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        stats = ppo_jax.update_rms(stats, x, mask)

        assert stats.num_rows == len(seen)
        assert_allclose(stats.mean, seen.mean(0) if len(seen) else 0, rtol=1e-4)
        assert_allclose(stats.var, seen.var(0) if len(seen) else 1, rtol=1e-3)


def test_normalised_observations_are_at_most_10():
    stats = ppo_jax.RunningMeanStd(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.0]), jnp.float32(9))
    x = np.float32([[3.0, -2.0], [99.0, -2.0003], [1.0, 0.0]])

    assert_allclose(ppo_jax.normalize(x, stats), [[1, 0], [10, -3], [0, 10]], rtol=1e-3)
    assert ppo_jax.normalize(x, None) is x


@pytest.mark.parametrize(
    ("space", "dtype", "flags", "wanted"),
    [
        (DISCRETE, np.float32, (None, None), (False, False)),
        (BOX, np.float32, (None, None), (True, True)),
        (BOX, np.uint8, (None, None), (False, True)),
        (DISCRETE, np.float32, (True, False), (True, False)),
        (BOX, np.float32, (False, True), (False, True)),
    ],
    ids=str,
)
def test_floats_and_rewards_are_normalised_by_default(space, dtype, flags, wanted):
    args = Args(normalize_observations=flags[0], normalize_rewards=flags[1])
    agent = ppo_jax.Agent(args, gym.spaces.Box(0, 255, (3,), dtype), space)
    state = jax.eval_shape(agent.init, KEY)

    assert (state.obs_rms is not None, state.return_rms is not None) == wanted


def plain_returns(running, rollout):
    """Computes discounted returns at each valid step, and continues `running`, those of envs."""
    returns = []
    for t, i in np.ndindex(rollout.reward.shape):
        if rollout.valid[t, i]:
            running[i] = 0.9 * running[i] + rollout.reward[t, i]
            returns.append(running[i])
        if not rollout.valid[t, i] or rollout.terminated[t, i] or rollout.truncated[t, i]:
            running[i] = 0.0
    return returns


def test_rewards_are_divided_by_the_deviation_of_returns():
    """Returns continue from rollout to rollout, and autoreset steps have none."""
    agent, state, rollouts, *_ = collected(ppo_jax, "box")
    running = np.zeros(4)
    seen = []
    for rollout in rollouts:
        valid = rollout.valid
        reward = np.where(valid, rollout.reward + 1, np.float32(99))
        rollout = rollout._replace(reward=reward)
        seen += plain_returns(running, rollout)
        state, scaled = agent.normalize_rewards(state, rollout)

        assert_allclose(scaled.reward[valid], (reward / np.std(seen))[valid], rtol=1e-3)
        assert_allclose(state.discounted_return, running, rtol=1e-4, atol=1e-6)
    assert np.count_nonzero(running) > 1


def test_normalised_rewards_are_at_most_10():
    """The deviation was 2 for so many earlier steps that these do not change it."""
    agent, state, (rollout, *_), *_ = collected(ppo_jax, "box")
    stats = ppo_jax.RunningMeanStd(jnp.float32(0), jnp.float32(4), jnp.float32(1e9))
    rollout = rollout._replace(reward=np.full((24, 4), np.float32([3, -7, 30, -30])))
    _, scaled = agent.normalize_rewards(state._replace(return_rms=stats), rollout)

    assert_allclose(scaled.reward[0], [1.5, -3.5, 10, -10], rtol=1e-3)


def test_returns_of_unfinished_episodes_are_not_continued():
    agent, state, *_ = collected(ppo_jax, "box")
    state = state._replace(discounted_return=jnp.ones(4))

    assert_trees_equal(agent.on_resume(state), state._replace(discounted_return=jnp.zeros(4)))
    assert_trees_equal(agent.learned(state), state._replace(discounted_return=()))


def random_batch(rng, space):
    """Makes a Batch of 200 steps, and new outputs and values of the network."""
    new_output, old_output = rng.normal(scale=0.5, size=(2, 200, 4))
    action = rng.normal(size=(200, 2)) if space is BOX else rng.integers(4, size=200)
    old_log_prob, _ = log_prob_and_entropy(space, old_output, action)
    valid = rng.random(200) < 0.7
    old_value, advantage, value = rng.normal(scale=0.5, size=(3, 200))
    advantage = np.where(valid, advantage + 0.3, 1e6)
    batch = ppo_jax.Batch(np.zeros(1), action, valid, old_log_prob, old_value, advantage)
    return batch, new_output, value


def plain_losses(batch, log_prob, entropy, value, clip_vloss, norm_adv):
    """Computes the terms of the loss over the valid steps, with a clipping range of 0.3."""
    valid = batch.valid
    log_ratio = (log_prob - batch.log_prob)[valid]
    value, old_value, advantage = [x[valid] for x in (value, batch.value, batch.advantage)]
    target = advantage + old_value
    error = (value - target) ** 2
    if clip_vloss:
        near = old_value + np.clip(value - old_value, -0.3, 0.3)
        error = np.maximum(error, (near - target) ** 2)
    if norm_adv:
        advantage = (advantage - advantage.mean()) / advantage.std()
    ratio = np.exp(log_ratio)
    surrogate = np.minimum(ratio * advantage, np.clip(ratio, 0.7, 1.3) * advantage)
    return {
        "losses/policy_loss": -surrogate.mean(),
        "losses/value_loss": error.mean() / 2,
        "losses/entropy": entropy[valid].mean(),
        "losses/old_approx_kl": -log_ratio.mean(),
        "losses/approx_kl": (ratio - 1 - log_ratio).mean(),
        "losses/clipfrac": (np.abs(ratio - 1) > 0.3).mean(),
    }


@pytest.mark.parametrize(
    ("space", "clip_vloss", "norm_adv"),
    [(BOX, True, False), (gym.spaces.Discrete(4), False, True)],
    ids=["box", "discrete"],
)
def test_the_loss_is_what_numpy_gives(space, clip_vloss, norm_adv):
    flags = dict(clip_vloss=clip_vloss, norm_adv=norm_adv)
    agent = make(ppo_jax, space, clip_coef=0.3, ent_coef=0.02, vf_coef=0.6, **flags)
    batch, output, value = random_batch(np.random.default_rng(0), space)
    agent.network = SimpleNamespace(apply=lambda params, observation: params)
    arrays = jax.tree.map(jnp.asarray, (batch, (output, value)))

    loss, metrics = agent.loss(arrays[1], arrays[0])

    log_prob, entropy = log_prob_and_entropy(space, output, batch.action)
    wanted = plain_losses(batch, log_prob, entropy, value, **flags)
    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    policy, of_value, of_entropy = list(wanted.values())[:3]
    assert loss == pytest.approx(policy + 0.6 * of_value - 0.02 * of_entropy, rel=1e-4)


@pytest.mark.parametrize(("target_kl", "epochs"), [(None, 3), (1.3, 2), (0.0, 1)], ids=str)
def test_epochs_take_every_row_once_up_to_the_target_kl(target_kl, epochs):
    """The KL divergences of the three epochs are 0.375, 1.375 and 2.375."""
    sizes = dict(num_envs=1, num_steps=24, num_minibatches=4, update_epochs=3)
    agent = make(ppo_jax, DISCRETE, **sizes, target_kl=target_kl)

    def count(params, batch):
        """Computes a loss with which SGD adds 1 to the parameters of the rows."""
        assert batch.observation.shape == (6,)
        return -params[batch.observation].sum(), {"losses/approx_kl": params.mean()}

    agent.loss = count
    agent.optimizer = optax.sgd
    params = jnp.zeros(24)
    state = ppo_jax.State(params, optax.sgd(1.0).init(params), None, None, None)
    batch = ppo_jax.Batch(jnp.arange(24), None, None, None, None, None)
    state, metrics = agent.optimize(state, batch, KEY, 1.0)

    assert_array_equal(state.params, epochs)
    assert metrics["losses/approx_kl"] == pytest.approx(epochs - 0.625)


@pytest.mark.parametrize(
    ("script", "space", "hidden"),
    [
        (ppo_jax, OBSERVATIONS, ["actor_0", "actor_1", "critic_0", "critic_1"]),
        (ppo_jax, IMAGES, ["conv_0", "conv_out"]),
        (recurrent_ppo_jax, OBSERVATIONS, ["encoder_0", "actor_0", "critic_0"]),
        (recurrent_ppo_jax, IMAGES, ["conv_0", "conv_out", "actor_0", "critic_0"]),
    ],
    ids=["ppo", "ppo-images", "recurrent", "recurrent-images"],
)
def test_weights_are_orthogonal_at_first(script, space, hidden):
    """The policy's are so small that it is almost uniform."""
    state = script.Agent(script.Args(num_envs=4), space, BOX).init(KEY)
    params = state.params["params"]
    scales = dict.fromkeys(hidden, 2**0.5) | {"actor": 0.01, "critic": 1.0}

    assert_array_equal(params["log_std"], [0, 0])
    assert_trees_equal(state.return_rms, script.RunningMeanStd(0, 1, 0))
    assert_array_equal(state.discounted_return, np.zeros(4))
    for name, scale in scales.items():
        kernel = np.asarray(params[name]["kernel"])
        kernel = kernel.reshape(-1, kernel.shape[-1])
        kernel = kernel if len(kernel) < kernel.shape[1] else kernel.T
        assert_allclose(kernel @ kernel.T, scale**2 * np.eye(len(kernel)), atol=1e-5)
        assert not params[name]["bias"].any()


WHOLE = gym.spaces.Box(0, 3, (2,), np.int32)
BINARY = gym.spaces.MultiBinary(2)
STATISTICS = dict(normalize_observations=True)
MISTAKES = [
    (ppo_jax, {}, OBSERVATIONS, BINARY, "MultiBinary"),
    (ppo_jax, {}, OBSERVATIONS, WHOLE, "floats"),
    (ppo_jax, dict(num_envs=3, num_steps=5), OBSERVATIONS, DISCRETE, "num_minibatches"),
    (ppo_jax, STATISTICS, IMAGES, DISCRETE, "normalize_observations"),
    (recurrent_ppo_jax, {}, OBSERVATIONS, BINARY, "MultiBinary"),
    (recurrent_ppo_jax, {}, OBSERVATIONS, WHOLE, "floats"),
    (recurrent_ppo_jax, dict(sequence_length=7), OBSERVATIONS, DISCRETE, "sequence_length"),
    (recurrent_ppo_jax, dict(num_minibatches=3), OBSERVATIONS, DISCRETE, "num_minibatches"),
]


@pytest.mark.parametrize(("script", "flags", "seen", "taken", "word"), MISTAKES)
def test_a_mistake_is_a_usage_error(script, flags, seen, taken, word):
    with pytest.raises(script.UsageError) as caught:
        jax.eval_shape(script.Agent(script.Args(**flags), seen, taken).init, KEY)

    (line,) = str(caught.value).splitlines()
    assert word in line
