"""Recurrent agents on several devices: their results, and the communication of the devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import flags_of

import r2d2_jax
import recurrent_ppo_jax
from cleanreplay.compiled import make_trainer
from cleanreplay.devices import SplitNetwork, make_mesh, split

NETWORK = r2d2_jax.QNetwork(3, 8, True, lambda x: x, (5,))
W, B = 6, 4


@pytest.fixture(scope="module")
def inputs():
    """Makes parameters of the network, a carry [B, 8], and steps [W, B], some autoreset steps."""
    draw = np.random.default_rng(0)
    carry = tuple(draw.normal(size=(2, B, 8)).astype(np.float32))
    observation = draw.normal(size=(W, B, 2)).astype(np.float32)
    steps = (observation, draw.integers(0, 4, (W, B)), draw.random((W, B)) < 0.8)
    return jax.jit(NETWORK.init)(jax.random.PRNGKey(0), carry, *steps), carry, *steps


def loss(network, params, carry, *steps):
    """Computes a loss with a gradient in all parameters, through outputs and the last carry."""
    q_values, carry = network.apply(params, carry, *steps)
    return jnp.mean(q_values**2) + jnp.mean(carry[0])


def program_of_two(network, mesh, inputs):
    """Compiles the gradient of the loss of a batch that is split over two devices."""

    def loss_of_parts(params, carry, *steps):
        return loss(network, params, split(carry, mesh), *split(steps, mesh, axis=1))

    return jax.jit(jax.grad(loss_of_parts)).lower(*inputs).compile()


def sums_in_loops(program):
    """Counts the sums over devices inside and outside the loops of a program."""
    text = program.as_text()
    bodies = re.findall(r"body=%?([\w.-]+)", text)
    inside = beside = 0
    for computation in re.split(r"\n(?=\S)", text):
        count = len(re.findall(r" all-reduce(?:-start)?\(", computation))
        name = re.match(r"(?:ENTRY )?%?([\w.-]+)", computation)
        if name and name[1] in bodies:
            inside += count
        else:
            beside += count
    return inside, beside


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_split_network_gives_what_the_network_gives(devices, inputs):
    """Each device has the whole batch if their number does not divide it."""
    network = SplitNetwork(NETWORK, make_mesh(1, devices, devices))
    result = jax.jit(jax.value_and_grad(partial(loss, network)))(*inputs)
    expected = jax.jit(jax.value_and_grad(partial(loss, NETWORK)))(*inputs)

    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, result, expected)


def test_gradients_are_summed_over_devices_after_the_loop(inputs):
    mesh = make_mesh(1, 2, 2)
    inside, beside = sums_in_loops(program_of_two(SplitNetwork(NETWORK, mesh), mesh, inputs))
    inside_without, _ = sums_in_loops(program_of_two(NETWORK, mesh, inputs))

    assert inside == 0 < beside
    assert inside_without > 0


# Learning begins late, because rounding differs, and learning amplifies the differences.
SMALL = dict(env_id="phys2d/CartPole-v1", num_envs=4, eval_episodes=0, log_interval=160)
R2D2 = dict(total_timesteps=480, learning_starts=320, train_frequency=80, batch_size=4, period=2)
R2D2 |= dict(burn_in=2, train_length=4, n_step=2, hidden_size=8)
PPO = dict(total_timesteps=160, num_steps=40, sequence_length=8, hidden_size=8, num_minibatches=2)


@pytest.mark.slow
@pytest.mark.parametrize(("script", "flags"), [(r2d2_jax, R2D2), (recurrent_ppo_jax, PPO)])
def test_an_agent_on_two_devices_is_that_on_one(script, flags):
    """It also learns the same: means are of the whole batch."""
    params = []
    for devices in (1, 2):
        trainer = make_trainer(script, *flags_of(script, **SMALL | flags, num_devices=devices))
        runner = trainer.init()
        entries = script.Args(**flags).total_timesteps // trainer.interval
        runner, _ = trainer.compile(runner)(runner, 0, entries)
        params.append(jax.tree.map(np.asarray, runner.agent.params))

    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=3e-4)
    jax.tree.map(close, *params)
