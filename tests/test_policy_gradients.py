"""What PPO and recurrent PPO share: actions, losses and statistics against NumPy and SciPy, epochs,
first weights, and what is an error.
"""

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

IMAGES = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)


# Actions


def actions_of(script, space):
    """The distribution of actions that the agent takes."""
    is_box = isinstance(space, gym.spaces.Box)
    return script.Gaussian(space) if is_box else script.Categorical(space)


@BOTH
@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_log_probabilities_and_entropies_are_scipys(script, space):
    rng = np.random.default_rng(0)
    actions = actions_of(script, space)
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


@BOTH
def test_multi_discrete_actions_are_drawn_as_they_exist(script):
    """The first has two choices, and the logits of two more must not count."""
    p = np.array([0.3, 0.7]), np.array([0.3, 0.1, 0.4, 0.2])
    output = np.concatenate([np.log(p[0]), [9.0, 9.0], np.log(p[1])]).astype(np.float32)
    actions = actions_of(script, MULTI)
    first, second = np.asarray(actions.sample(output[None].repeat(20_000, axis=0), KEY)).T
    counts = np.bincount(first * 4 + second, minlength=8)

    assert first.max() == 1
    assert scipy.stats.chisquare(counts, 20_000 * np.outer(*p).ravel()).pvalue > 1e-3
    assert_array_equal(actions.mode(output[None]), [[1, 2]])


@BOTH
def test_actions_of_a_box_are_drawn_from_a_gaussian(script):
    output = np.float32([1.0, -2.0, np.log(3.0), np.log(0.5)])
    actions = actions_of(script, BOX)
    draws = np.asarray(actions.sample(output[None].repeat(20_000, axis=0), KEY))
    first, second = draws.T

    assert scipy.stats.kstest(first, scipy.stats.norm(1.0, 3.0).cdf).pvalue > 1e-3
    assert scipy.stats.kstest(second, scipy.stats.norm(-2.0, 0.5).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.03  # 4 standard deviations
    assert_array_equal(actions.mode(output[None]), [[1.0, -2.0]])


@BOTH
@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        ([-3e38], [3e38], [[-3e38], [0], [7.5e37], [3e38]]),
        ([[300], [-1]], [[500], [9]], [[[300], [-1]], [[400], [4]], [[425], [5.25]], [[500], [9]]]),
    ],
    ids=["huge", "matrix"],
)
def test_a_box_is_covered_by_minus_1_to_1(script, low, high, wanted):
    space = gym.spaces.Box(np.float32(low), np.float32(high))
    action = np.float32([-1, 0, 0.25, 7])[:, None].repeat(np.size(low), axis=1)

    assert_allclose(actions_of(script, space).to_env(action), wanted, rtol=1e-6)


# Statistics


@BOTH
def test_running_statistics_are_those_of_all_rows(script):
    rng = np.random.default_rng(0)
    stats = script.RunningMeanStd(jnp.zeros(3), jnp.ones(3), jnp.float32(0))
    nothing = np.full((30, 3), np.nan, np.float32), np.zeros(30, bool)
    assert_trees_equal(script.update_rms(stats, *nothing), stats)
    seen = np.empty((0, 3))
    for rows in (1, 30, 0, 20):
        x = (rng.normal(size=(30, 3)) * [1, 10, 0.1] + [5, -3, 100]).astype(np.float32)
        mask = rng.permutation(30) < rows
        seen = np.concatenate([seen, x[mask]])
        x[~mask] = np.nan
        stats = script.update_rms(stats, x, mask)

        assert stats.num_rows == len(seen)
        assert_allclose(stats.mean, seen.mean(0), rtol=1e-4)
        assert_allclose(stats.var, seen.var(0), rtol=1e-3)


@BOTH
def test_normalised_observations_are_at_most_10(script):
    stats = script.RunningMeanStd(jnp.array([1.0, -2.0]), jnp.array([4.0, 0.0]), jnp.float32(9))
    x = np.float32([[3.0, -2.0], [99.0, -2.0003], [1.0, 0.0]])

    assert_allclose(script.normalize(x, stats), [[1, 0], [10, -3], [0, 10]], rtol=1e-3)
    assert script.normalize(x, None) is x


@BOTH
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
def test_floats_and_rewards_are_normalised_by_default(script, space, dtype, flags, wanted):
    """With Box actions."""
    args = script.Args(normalize_observations=flags[0], normalize_rewards=flags[1])
    agent = script.Agent(args, gym.spaces.Box(0, 255, (3,), dtype), space)
    state = jax.eval_shape(agent.init, KEY)

    assert (state.obs_rms is not None, state.return_rms is not None) == wanted


def plain_returns(running, rollout):
    """The discounted return at each valid step; `running`, those of environments, goes on."""
    returns = []
    for t, i in np.ndindex(rollout.reward.shape):
        if rollout.valid[t, i]:
            running[i] = 0.9 * running[i] + rollout.reward[t, i]
            returns.append(running[i])
        if not rollout.valid[t, i] or rollout.terminated[t, i] or rollout.truncated[t, i]:
            running[i] = 0.0
    return returns


@BOTH
def test_rewards_are_divided_by_the_deviation_of_returns(script):
    """Returns carry over from rollout to rollout, and steps that only reset have none."""
    agent, state, rollouts, *_ = collected(script, "box")
    normalize_rewards = jax.jit(agent.normalize_rewards)
    running = np.zeros(4)
    seen = []
    for rollout in rollouts:
        valid = rollout.valid
        reward = np.where(valid, rollout.reward + 1, np.float32(99))
        rollout = rollout._replace(reward=reward)
        seen += plain_returns(running, rollout)
        state, scaled = normalize_rewards(state, rollout)

        assert_allclose(scaled.reward[valid], (reward / np.std(seen))[valid], rtol=1e-3)
        assert_allclose(state.discounted_return, running, rtol=1e-4, atol=1e-6)
    assert np.count_nonzero(running) > 1


@BOTH
def test_normalised_rewards_are_at_most_10(script):
    """The deviation was 2 in so many steps before that these do not change it."""
    agent, state, (rollout, *_), *_ = collected(script, "box")
    stats = script.RunningMeanStd(jnp.float32(0), jnp.float32(4), jnp.float32(1e9))
    rollout = rollout._replace(reward=np.full((24, 4), np.float32([3, -7, 30, -30])))
    _, scaled = agent.normalize_rewards(state._replace(return_rms=stats), rollout)

    assert_allclose(scaled.reward[0], [1.5, -3.5, 10, -10], rtol=1e-3)


@BOTH
def test_unfinished_returns_are_left_out_of_what_goes_on(script):
    agent, state, *_ = collected(script, "box")
    state = state._replace(discounted_return=jnp.ones(4))

    assert_trees_equal(agent.on_resume(state), state._replace(discounted_return=jnp.zeros(4)))
    assert_trees_equal(agent.learned(state), state._replace(discounted_return=()))


# The loss and the epochs


def random_batch(script, rng, space):
    """Makes a Batch of 200 steps, in sequences of 20 if it is recurrent, and new outputs."""
    shape = (20, 10) if script is recurrent_ppo_jax else (200,)
    new_output, old_output = rng.normal(scale=0.5, size=(2, *shape, 4))
    action = rng.integers(4, size=shape) if space.shape == () else rng.normal(size=(*shape, 2))
    old_log_prob, _ = log_prob_and_entropy(space, old_output, action)
    valid = rng.random(shape) < 0.7
    old_value, advantage, value = rng.normal(scale=0.5, size=(3, *shape))
    advantage = np.where(valid, advantage + 0.3, 1e6)
    memory = dict(memory=(np.zeros(1),) * 3) if script is recurrent_ppo_jax else {}
    batch = script.Batch(
        observation=np.zeros(1),
        action=action,
        valid=valid,
        log_prob=old_log_prob,
        value=old_value,
        advantage=advantage,
        **memory,
    )
    return batch, new_output, value


def plain_losses(batch, log_prob, entropy, value, clip_vloss, norm_adv):
    """The terms of the loss of the valid steps, with a clipping range of 0.3."""
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


@BOTH
@pytest.mark.parametrize(
    ("space", "clip_vloss", "norm_adv"),
    [(BOX, True, False), (gym.spaces.Discrete(4), False, True)],
    ids=["box", "discrete"],
)
def test_the_loss_is_what_numpy_gives(script, space, clip_vloss, norm_adv):
    flags = dict(clip_vloss=clip_vloss, norm_adv=norm_adv)
    agent = make(script, space, clip_coef=0.3, ent_coef=0.02, vf_coef=0.6, **flags)
    batch, output, value = random_batch(script, np.random.default_rng(0), space)
    carry = [None] if script is recurrent_ppo_jax else []
    agent.network = SimpleNamespace(apply=lambda params, *inputs: (*params, *carry))
    arrays = jax.tree.map(jnp.asarray, (batch, (output, value)))
    loss, metrics = agent.loss(arrays[1], arrays[0])
    wanted = plain_losses(batch, *log_prob_and_entropy(space, output, batch.action), value, **flags)

    assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    policy, of_value, entropy = list(wanted.values())[:3]
    assert loss == pytest.approx(policy + 0.6 * of_value - 0.02 * entropy, rel=1e-4)


@BOTH
@pytest.mark.parametrize(
    ("target_kl", "epochs"), [(None, 3), (1.4, 3), (1.3, 2), (0.0, 1)], ids=str
)
def test_epochs_take_every_row_once_up_to_the_target_kl(script, target_kl, epochs):
    """The KL divergences of the three epochs are 0.375, 1.375 and 2.375."""
    steps = 2 if script is recurrent_ppo_jax else 1  # of a row, which is a sequence then
    sizes = dict(num_envs=1, num_steps=24 * steps, num_minibatches=4, update_epochs=3)
    if script is recurrent_ppo_jax:
        sizes["sequence_length"] = steps
    agent = make(script, DISCRETE, **sizes, target_kl=target_kl)
    rows = jnp.arange(24 * steps)

    def count(params, batch):
        """A loss by which SGD adds 1 to the parameters of the rows."""
        assert batch.observation.shape == ((2, 6) if steps == 2 else (6,))
        return -params[batch.observation].sum(), {"losses/approx_kl": params.mean()}

    agent.loss = count
    agent.optimizer = optax.sgd
    params = jnp.zeros(rows.size)
    state = script.State(params, optax.sgd(1.0).init(params), None, None, None)
    rows = rows.reshape(24, 2) if steps == 2 else rows
    batch = script.Batch(rows, *[None] * (len(script.Batch._fields) - 1))
    state, metrics = agent.optimize(state, batch, KEY, 1.0)

    assert_array_equal(state.params, epochs)
    assert metrics["losses/approx_kl"] == pytest.approx(epochs - 0.625)


# First weights, and mistakes


CONVOLUTIONS = ["conv_0", "conv_1", "conv_2", "conv_out"]


@pytest.mark.parametrize(
    ("script", "space", "hidden"),
    [
        (ppo_jax, OBSERVATIONS, ["actor_0", "actor_1", "critic_0", "critic_1"]),
        (ppo_jax, IMAGES, CONVOLUTIONS),
        (recurrent_ppo_jax, OBSERVATIONS, ["encoder_0", "actor_0", "critic_0"]),
        (recurrent_ppo_jax, IMAGES, [*CONVOLUTIONS, "actor_0", "critic_0"]),
    ],
    ids=["ppo", "ppo-images", "recurrent", "recurrent-images"],
)
def test_weights_are_orthogonal_at_first(script, space, hidden):
    """Those of the policy are so small that it is almost uniform."""
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
