"""ppo_jax.py and recurrent_ppo_jax.py: acting and the train step, against networks in NumPy."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal
from on_policy import (
    BOTH,
    KEY,
    SPACES,
    assert_trees_equal,
    collected,
    in_time,
    learned,
    log_prob_and_entropy,
    plain_gae,
    plain_outputs,
)

# The rewards of "box" are normalised, those of "multi" replaced by their signs.
KINDS = pytest.mark.parametrize("kind", ["box", "multi"])


@BOTH
@KINDS
def test_actions_are_drawn_with_the_key_of_their_step(script, kind):
    case = collected(script, kind)
    rollout = case.rollouts[-1]
    output, _, _ = plain_outputs(case)
    for t in (0, 1, 23):
        key = jax.random.fold_in(KEY, 192 + 4 * t)
        draw = case.agent.actions.sample(jnp.float32(output[t]), key)
        assert_allclose(rollout.action[t], draw, rtol=1e-3, atol=1e-4)


@BOTH
@KINDS
def test_a_batch_has_the_steps_of_the_rollout(script, kind):
    case = collected(script, kind)
    rollout = case.rollouts[-1]
    batch = jax.tree.map(partial(in_time, case.agent), learned(script, kind).batch)

    assert_allclose(batch.observation, (rollout.observation - 0.2) / 2, rtol=1e-4, atol=1e-5)
    assert_array_equal(batch.action, rollout.action)
    assert_array_equal(batch.valid, rollout.valid)
    assert_trees_equal(getattr(batch, "memory", ()), getattr(rollout, "memory", ()))


@BOTH
@KINDS
def test_log_probabilities_of_a_batch_are_of_its_actions(script, kind):
    case = collected(script, kind)
    output, _, _ = plain_outputs(case)
    wanted, _ = log_prob_and_entropy(SPACES[kind], output[:-1], case.rollouts[-1].action)

    log_prob = in_time(case.agent, learned(script, kind).batch.log_prob)
    assert_allclose(log_prob, wanted, rtol=1e-4, atol=1e-4)


@BOTH
@KINDS
def test_values_of_a_batch_are_those_of_its_steps(script, kind):
    """The batch includes autoreset steps, from whose values truncated episodes bootstrap."""
    case = collected(script, kind)
    _, value, _ = plain_outputs(case)

    assert_allclose(in_time(case.agent, learned(script, kind).batch.value), value[:-1], atol=1e-5)


def plain_advantages(script, kind):
    """Computes the advantages and values of the rollout in a loop."""
    case = collected(script, kind)
    rollout = case.rollouts[-1]
    _, value, _ = plain_outputs(case)
    reward = np.sign(rollout.reward)
    if kind == "box":
        _, normalized = case.agent.normalize_rewards(case.state, rollout)
        reward = np.asarray(normalized.reward)
    return plain_gae(rollout, reward, value, 0.9, 0.8), value[:-1]


@BOTH
@KINDS
def test_advantages_are_what_a_plain_loop_gives(script, kind):
    wanted, _ = plain_advantages(script, kind)

    advantage = in_time(collected(script, kind).agent, learned(script, kind).batch.advantage)
    assert_allclose(advantage, wanted, atol=1e-4)


@BOTH
def test_explained_variance_is_that_of_the_valid_steps(script):
    advantage, value = plain_advantages(script, "box")
    valid = collected(script, "box").rollouts[-1].valid
    wanted = 1 - advantage[valid].var() / (advantage + value)[valid].var()

    got = learned(script, "box").metrics["losses/explained_variance"]
    assert got == pytest.approx(wanted, rel=1e-3)


@BOTH
def test_statistics_change_after_the_batch_is_made(script):
    case = collected(script, "box")
    rollout = case.rollouts[-1]
    stats = script.update_rms(
        case.state.obs_rms, rollout.observation.reshape(-1, 3), rollout.valid.ravel()
    )
    after = learned(script, "box")

    jax.tree.map(partial(assert_allclose, rtol=1e-5), after.state.obs_rms, stats)
    assert_trees_equal(after.params, (case.state.params, after.state.obs_rms))
    assert after.state.return_rms.num_rows == rollout.valid.sum()


@cache
def train_step_of(script):
    """Makes a function that calls `train_step` with a rollout, its step and next observation."""
    agent, state, _, next_observation, *_ = collected(script, "box")
    train_step = jax.jit(agent.train_step)

    def step(rollout, begin=192, next_observation=next_observation):
        return train_step(state, rollout, KEY, begin, next_observation)

    return step


@BOTH
def test_autoreset_steps_change_nothing(script):
    """Only their value counts, if an episode was truncated before them."""
    rollout = collected(script, "box").rollouts[-1]
    resets = ~rollout.valid
    is_free = resets.copy()
    is_free[0] = False
    is_free[1:] &= rollout.terminated[:-1]
    assert 2 < is_free.sum() < resets.sum()
    other = rollout._replace(
        observation=np.where(is_free[..., None], np.float32(7), rollout.observation),
        action=np.where(resets[..., None], np.float32(7), rollout.action),
        reward=np.where(resets, np.float32(7), rollout.reward),
    )
    step = train_step_of(script)

    assert_trees_equal(step(other), step(rollout))


@BOTH
def test_each_iteration_shuffles_anew(script):
    rollout = collected(script, "box").rollouts[-1]
    step = train_step_of(script)
    first, again, second = [ravel_pytree(step(rollout, t)[0].params)[0] for t in (0, 0, 96)]

    assert_array_equal(first, again)
    assert (first != second).any()


@BOTH
def test_a_rollout_without_a_step_is_harmless(script):
    """All its steps are autoreset steps: nothing is learned, and nothing is divided by 0."""
    case = collected(script, "box")
    nothing = np.zeros((24, 4), bool)
    rollout = case.rollouts[-1]._replace(terminated=nothing, truncated=nothing, valid=nothing)
    state, _, metrics = train_step_of(script)(rollout)

    kept = ("params", "obs_rms", "return_rms")
    for name in kept:
        assert_trees_equal(getattr(state, name), getattr(case.state, name))
    assert metrics.pop("charts/learning_rate") == np.float32(1e-2)
    assert set(map(float, metrics.values())) == {0.0}
