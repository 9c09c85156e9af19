"""recurrent_ppo_jax.py: its recurrent state in rollouts and sequences, against an LSTM in NumPy.

See test_policy_gradients.py and test_ppo.py for what it shares with PPO.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from on_policy import (
    BOX,
    DISCRETE,
    KEY,
    MULTI,
    SIZES,
    SMALL,
    collected,
    learned,
    make,
    plain_outputs,
    random_state,
)

import recurrent_ppo_jax
from cleanreplay import memory_tasks  # noqa: F401  (registers)
from cleanreplay.compiled import make_trainer
from recurrent_ppo_jax import Args, Run

KINDS = pytest.mark.parametrize("kind", ["box", "multi"])


@KINDS
def test_the_memory_is_zero_where_an_episode_begins(kind):
    """It is not zero elsewhere: an autoreset step has that of its episode."""
    rollout = collected(recurrent_ppo_jax, kind).rollouts[-1]
    begins = rollout.observation[..., 2] == 1

    assert begins.sum() > 10
    for x in rollout.memory:
        assert_array_equal((x == 0).all(axis=-1), begins)


@KINDS
def test_the_memory_is_that_of_the_lstm_a_step_before(kind):
    case = collected(recurrent_ppo_jax, kind)
    rollout = case.rollouts[-1]
    _, _, carry = plain_outputs(case)
    for x, wanted in zip(rollout.memory[:2], carry, strict=True):
        valid = rollout.valid[:-1]
        assert_allclose(x[1:][valid], wanted[:-2][valid], rtol=1e-4, atol=1e-5)


@KINDS
def test_the_memory_has_the_action_a_step_before(kind):
    case = collected(recurrent_ppo_jax, kind)
    rollout = case.rollouts[-1]
    last_action = np.concatenate([rollout.memory[2][1:], case.next_memory[2][None]])
    encoded = np.stack([case.agent.actions.encode(action) for action in rollout.action])

    assert_array_equal(last_action[rollout.valid], encoded[rollout.valid])


def test_actions_are_encoded_one_hot_or_within_bounds():
    discrete, multi = map(recurrent_ppo_jax.Categorical, (DISCRETE, MULTI))
    gaussian = recurrent_ppo_jax.Gaussian(BOX)
    two = multi.encode(np.array([[1, 3], [0, 2]]))

    assert_array_equal(discrete.encode(np.array([2, 0])), [[0, 0, 1], [1, 0, 0]])
    assert_array_equal(two, [[0, 1, 0, 0, 0, 0, 0, 1], [1, 0, 0, 0, 0, 0, 1, 0]])
    assert_array_equal(gaussian.encode(np.array([[-3.0, 0.5]])), [[-1, 0.5]])


@KINDS
def test_sequences_give_what_the_rollout_gave(kind):
    """They begin with the stored memory: ratios of probabilities are 1, and values are equal."""
    agent, state, *_ = collected(recurrent_ppo_jax, kind)
    batch = learned(recurrent_ppo_jax, kind).batch
    in_loss = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
    _, metrics = jax.jit(agent.loss)(state.params, in_loss)
    advantage = np.asarray(batch.advantage)[batch.valid]

    assert batch.value.shape == (4 * 24 // 8, 8)
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert abs(metrics["losses/old_approx_kl"]) < 1e-5
    assert metrics["losses/clipfrac"] == 0
    assert metrics["losses/value_loss"] == pytest.approx((advantage**2).mean() / 2, rel=1e-4)


def test_a_minibatch_has_sequences_with_time_first():
    shapes = set()

    def loss(params, batch):
        shapes.add(batch.value.shape)
        return params["params"]["log_std"].sum(), {"losses/approx_kl": jnp.float32(0)}

    agent = make(recurrent_ppo_jax, BOX)
    agent.loss = loss
    state = collected(recurrent_ppo_jax, "box").state
    jax.eval_shape(agent.optimize, state, learned(recurrent_ppo_jax, "box").batch, KEY, 1.0)

    assert shapes == {(8, 6)}


def test_the_memory_begins_anew_in_a_compiled_rollout():
    run = Run(env_id="cleanreplay.memory_tasks:phys2d/MemoryChain-v0", env_kwargs='{"length": 4}')
    args = Args(**SMALL | SIZES[recurrent_ppo_jax])
    trainer = make_trainer(recurrent_ppo_jax, args, run)
    params = trainer.agent.policy_params(random_state(trainer.agent))
    envs = trainer.envs
    _, (steps, _) = jax.jit(envs.collect)(envs.reset(KEY, 4), params, KEY, 0)
    begins = np.concatenate([np.ones((1, 4), bool), ~steps.valid[:-1]])

    assert begins.sum() > 12
    for x in steps.memory:
        is_empty = (np.asarray(x).reshape(*begins.shape, -1) == 0).all(axis=-1)
        assert_array_equal(is_empty, begins)


def test_biases_of_forget_gates_begin_evenly_from_0_to_the_flag():
    agent = make(recurrent_ppo_jax, DISCRETE, max_forget_bias=3.0)
    layers = agent.init(KEY).params["params"]["lstm"]

    assert_allclose(layers["hf"]["bias"], [0, 0.75, 1.5, 2.25, 3])
    for name in ("hi", "hg", "ho"):
        assert_array_equal(layers[name]["bias"], np.zeros(5))


def test_the_network_may_do_without_the_last_action():
    agent = make(recurrent_ppo_jax, DISCRETE, last_action=False)
    params = random_state(agent).params
    cell, hidden, action = agent.no_memory(2)
    action[1, 0] = 1
    inputs = np.zeros((1, 2, 3), np.float32), action[None], np.ones((1, 2), bool)
    output, _, _ = agent.network.apply(params, (cell, hidden), *inputs)

    assert_array_equal(output[0, 0], output[0, 1])
