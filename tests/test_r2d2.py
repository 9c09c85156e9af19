"""R2D2: its recurrent state in acting and in sequences, and its loss against plain NumPy."""

from functools import cache
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import TWO, box, dense, lstm_step, random_rollout
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal

import r2d2_jax
from cleanreplay import load_policy, memory_tasks, protocol  # noqa: F401  (registers)
from r2d2_jax import R2D2, Args, Run, Step, rescale, unscale

KEY = jax.random.PRNGKey(0)
SMALL = dict(hidden_size=5, burn_in=2, train_length=4, n_step=3, period=2, num_envs=2)


def make(**flags):
    return R2D2(Args(**SMALL | flags), box(3), TWO)


@cache
def parameters(seed):
    return jax.jit(make().init)(jax.random.PRNGKey(seed)).params


def plain_values(params, steps):
    """Computes Q(s, .) [W, B, 2] of steps [W, B] from the stored state, and the state after."""
    layers = jax.tree.map(np.float64, params["params"])
    cell, hidden = (np.float64(x[0]) for x in steps.memory[:2])
    last_action = np.eye(3)[steps.memory[2]][..., 1:]  # one-hot, zeros if there was none
    values = []
    for t, valid in enumerate(steps.valid):
        encoded = np.maximum(dense(layers["encoder_0"], steps.observation[t]), 0)
        x = np.concatenate([encoded, last_action[t]], axis=1)
        cell, hidden = lstm_step(layers["lstm"], cell, hidden, x)
        value, advantage = [
            dense(layers[name], np.maximum(dense(layers[f"{name}_0"], hidden), 0))
            for name in ("value", "advantage")
        ]
        values.append(value + advantage - advantage.mean(axis=1, keepdims=True))
        cell, hidden = (np.where(valid[:, None], x, 0) for x in (cell, hidden))
    return np.stack(values), (cell, hidden)


def plain_errors(args, q, next_q, steps):
    """Computes TD errors of the steps [W] to learn from, one at a time; 0 for autoreset steps."""
    h, inverse = (rescale, unscale) if args.rescale_values else (float, float)
    errors = np.zeros(args.train_length)
    for number in range(args.train_length):
        t = args.burn_in + number
        if not steps.valid[t]:
            continue
        total, discount = 0.0, 1.0
        for i in range(t, t + args.n_step):
            total += discount * steps.reward[i]
            discount *= args.gamma
            if steps.terminated[i]:
                discount = 0.0
            if steps.terminated[i] or steps.truncated[i]:
                break
        best = np.argmax(q[i + 1] if args.double_q else next_q[i + 1])
        errors[number] = h(total + discount * inverse(next_q[i + 1][best]))
        errors[number] -= q[t][steps.action[t]]
    return errors


def random_windows(agent, count, seed=0):
    """Makes sequences [W, count] of random steps, in which episodes end in both ways."""
    rng = np.random.default_rng(seed)
    shape = (agent.replay.window, count)
    rollout, _ = random_rollout(rng, shape[0], np.zeros(count, bool), features=3)
    carry = rng.normal(size=(2, *shape, agent.args.hidden_size)).astype(np.float32)
    return Step(*rollout, memory=(*carry, rng.integers(3, size=shape)))


OF_LOSS = [{}, dict(double_q=False, rescale_values=True, gamma=0.9), dict(burn_in=0, n_step=1)]


@pytest.mark.parametrize("flags", OF_LOSS, ids=str)
def test_the_loss_is_that_of_a_plain_loop(flags):
    agent = make(**flags)
    args = agent.args
    windows = random_windows(agent, count=40)
    learned = slice(args.burn_in, args.burn_in + args.train_length)
    valid = windows.valid[learned]
    weights = np.linspace(0.2, 1, 40).astype(np.float32)
    inputs = (parameters(0), parameters(1), windows, weights)

    loss, (metrics, td_error) = jax.jit(agent.loss)(*inputs)

    q, next_q = (plain_values(parameters(seed), windows)[0] for seed in (0, 1))
    errors = np.empty(td_error.shape)
    for i in range(40):
        window = jax.tree.map(lambda x, i=i: x[:, i], windows)
        errors[:, i] = plain_errors(args, q[:, i], next_q[:, i], window)
    chosen = np.take_along_axis(q[learned], windows.action[learned][..., None], axis=-1)[..., 0]
    assert_allclose(td_error, errors, atol=2e-5)
    assert_allclose(loss, (weights * errors**2)[valid].mean(), rtol=1e-4)
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx(chosen[valid].mean(), rel=1e-4)


def test_the_burn_in_only_brings_the_recurrent_state_up_to_date():
    """The gradient is that of the steps after it, which begin with a given state."""
    agent = make()
    windows = random_windows(agent, count=4)
    carry, *inputs = agent.inputs(windows)
    after = [x[2:] for x in inputs]

    @jax.jit
    def gradients(params):
        _, given = agent.network.apply(params, carry, *[x[:2] for x in inputs])
        wanted = jax.grad(lambda params: agent.network.apply(params, given, *after)[0].sum())
        got = jax.grad(lambda params: agent.unroll(params, windows).sum())
        return ravel_pytree(got(params))[0], ravel_pytree(wanted(params))[0]

    got, wanted = gradients(parameters(0))
    assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def h_of_the_paper(x):
    x = np.float64(x)
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


VALUES = np.float32(np.geomspace(1e-8, 1e6, 1_001))
VALUES = np.concatenate([-VALUES, [0], VALUES])


def test_rescaling_is_the_function_of_the_paper():
    assert_allclose(rescale(VALUES), h_of_the_paper(VALUES), rtol=1e-5)
    assert_allclose(h_of_the_paper(unscale(VALUES)), VALUES, rtol=1e-5)


def test_priorities_mix_the_largest_and_the_mean_error():
    agent = make(priority_max_fraction=0.75)
    td_error = np.float32([[1, 0], [-3, 4], [0, 0], [2, 0]])
    valid = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], bool)
    wanted = [0.75 * 3 + 0.25 * 2, 0.75 * 4 + 0.25 * 4]

    assert_allclose(agent.priorities(td_error, valid), wanted, rtol=1e-6)


def test_a_gradient_step_weighs_sequences_and_sets_priorities():
    """The gradient of the loss is the weights here, and TD errors are 1."""
    agent = make(importance_exponent=0.5, priority_max_fraction=0.0)
    agent.optimizer = optax.sgd(0.1)
    agent.loss = lambda params, target_params, window, weights: (
        (params * weights).sum(),
        ({}, jnp.float32(window.valid[2:6])),
    )
    windows = random_windows(agent, count=3, seed=1)
    drawn = SimpleNamespace(
        experience=jax.tree.map(lambda x: x.swapaxes(0, 1), windows),
        probabilities=jnp.array([0.25, 0.0625, 1.0]),
        indices=None,
    )
    agent.replay = SimpleNamespace(
        sample=lambda replay, key, batch_size: drawn,
        set_priorities=lambda replay, indices, x: SimpleNamespace(priorities=x, max_priority=7.0),
    )
    params = jnp.array([1.0, 2.0, 3.0])
    state = r2d2_jax.State(params, params, agent.optimizer.init(params), None)

    state, metrics = agent.gradient_step(state, KEY, 0, 1)

    assert_allclose(state.params, params - 0.1 * np.array([0.5, 1, 0.25]), rtol=1e-6)
    assert_allclose(state.replay.priorities, 1, rtol=1e-5)  # the mean of valid steps
    assert metrics == {"losses/priority_max": 7.0}


def test_rewards_are_learned_from_by_their_sign():
    windows = random_windows(make(), count=4)
    drawn = jax.tree.map(lambda x: x.swapaxes(0, 1), windows)

    for flag, wanted in ((True, np.sign(windows.reward)), (False, windows.reward)):
        window = make(clip_rewards=flag).to_window(drawn, KEY)
        assert_array_equal(window.reward, wanted)
        assert_array_equal(window.observation, windows.observation)


def test_an_action_is_the_best_one_and_is_remembered():
    """The recurrent state has it; 0 is no action."""
    agent = make()
    params = parameters(0)
    windows = random_windows(agent, count=40)
    step = jax.tree.map(lambda x: x[:1], windows)._replace(valid=np.ones((1, 40), bool))
    (values,), carry = plain_values(params, step)
    memory = tuple(x[0] for x in step.memory)

    action, (*got, last_action) = agent.act(params, step.observation[0], memory)

    assert_array_equal(action, values.argmax(axis=-1))
    assert_array_equal(last_action, action + 1)
    assert_allclose(got, carry, rtol=1e-4, atol=1e-5)


def test_forget_gates_begin_with_the_bias_of_the_flag():
    params = jax.jit(make(forget_bias=3.0).init)(KEY).params["params"]
    gates = {name: layer.get("bias") for name, layer in params["lstm"].items()}

    assert_array_equal(gates["hf"], [3.0] * 5)
    for name in ("hi", "hg", "ho"):
        assert_array_equal(gates[name], [0.0] * 5)


@pytest.mark.slow
def test_a_loaded_policy_remembers_for_five_steps():
    """A policy that does not remember is right half of the time, and gets -1 otherwise."""
    env_id = "cleanreplay.memory_tasks:MemoryChain-v0"
    run = Run(env_id=env_id, env_kwargs='{"length": 5}')
    sizes = dict(burn_in=0, train_length=8, hidden_size=16)
    args = Args(total_timesteps=8_000, learning_starts=1_000, **sizes)
    _, _, folder = r2d2_jax.train(args, run)
    policy = load_policy(folder)
    envs = [gym.make("MemoryChain-v0", length=5) for _ in range(60)]
    observations = np.stack([env.reset(seed=seed)[0] for seed, env in enumerate(envs)])
    for _ in range(5):
        steps = [env.step(action) for env, action in zip(envs, policy(observations), strict=True)]
        observations, rewards, *_ = map(np.stack, zip(*[x[:3] for x in steps], strict=True))

    assert set(rewards) == {1}
