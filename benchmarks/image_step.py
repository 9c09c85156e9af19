"""Measures milliseconds of a gradient step on images: our scripts beside PyTorch.

    pip install -e ".[bench]" && python benchmarks/image_step.py [--algorithm ppo]

A step of DQN samples 32 of 2,000 transitions. A step of PPO takes a minibatch of 256 time steps.
Both libraries run in turn, each time in a new process, on a GPU if JAX finds one, else on one core
and on two. Our script takes several steps in one compiled call, and then each step in its own call.
Prints median, minimum and maximum over the rounds, and the ratio of PyTorch's time to ours in each
round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from machine import header, ratios, spread, table, write_json

SHAPES = {"84 x 84 x 4": (4, 84, 84), "10 x 10 x 4": (4, 10, 10)}
TRANSITIONS, BATCH, LOOP = 2_000, 32, 5
ACTIONS = 6
ENVS, STEPS, MINIBATCHES = 8, 128, 4  # of PPO


def milliseconds(step: Callable[[], Any], repeats: int = 15) -> float:
    """Returns the median time of `repeats` calls, after two that are not counted."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[2:])


def experience(shape: tuple) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes random observations, actions and rewards."""
    rng = np.random.default_rng(0)
    observation = rng.integers(256, size=(TRANSITIONS, *shape), dtype=np.uint8)
    action = rng.integers(ACTIONS, size=TRANSITIONS)
    reward = rng.normal(size=TRANSITIONS)
    return observation, action, reward.astype(np.float32)


def time_dqn(shape: tuple) -> list[float]:
    """Measures dqn_jax.py. Returns milliseconds of [a step in a loop, a step alone]."""
    import gymnasium as gym
    import jax

    import dqn_jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    args = dqn_jax.Args(batch_size=BATCH, buffer_size=TRANSITIONS)
    space: Any = gym.spaces.Box(0, 255, shape, np.uint8)
    agent: Any = dqn_jax.DQN(args, space, gym.spaces.Discrete(ACTIONS))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    observation, action, reward = (x[:, None] for x in experience(shape))
    flags = np.zeros((TRANSITIONS, 1), bool)
    steps = dqn_jax.Step(observation, action.astype(np.int32), reward, flags, flags, ~flags)
    state = state._replace(replay=agent.replay.add_batch(state.replay, steps))

    def gradient_step(i: Any, state: Any) -> Any:
        return agent.gradient_step(state, jax.random.PRNGKey(i), i, i + 1)[0]

    def take_steps(state: Any) -> Any:
        return jax.lax.fori_loop(0, LOOP, gradient_step, state)

    loop = jax.jit(take_steps, donate_argnums=0)  # in place, as in training
    single = jax.jit(partial(gradient_step, 0), donate_argnums=0)

    def call(function: Callable) -> None:
        nonlocal state
        state = jax.block_until_ready(function(state))

    return [milliseconds(partial(call, loop)) / LOOP, milliseconds(partial(call, single))]


def time_ppo(shape: tuple) -> list[float]:
    """Measures ppo_jax.py. Returns milliseconds of [a step in a loop, a step alone]."""
    import gymnasium as gym
    import jax
    import jax.numpy as jnp

    import ppo_jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    space: Any = gym.spaces.Box(0, 255, shape, np.uint8)
    observation, action, advantage = experience(shape)

    def time_epoch(minibatches: int) -> float:
        rows = ENVS * STEPS // MINIBATCHES * minibatches
        args = ppo_jax.Args(
            num_envs=ENVS,
            num_steps=rows // ENVS,
            num_minibatches=minibatches,
            update_epochs=1,
        )
        agent: Any = ppo_jax.PPO(args, space, gym.spaces.Discrete(ACTIONS))
        state = jax.jit(agent.init)(jax.random.PRNGKey(0))
        log_prob = np.full(rows, -np.log(ACTIONS), np.float32)
        taken = observation, action.astype(np.int32), np.ones(rows, bool)
        data = *taken, log_prob, np.zeros(rows, np.float32), advantage
        batch = ppo_jax.Batch(*[jnp.asarray(x[:rows]) for x in data])
        epoch = jax.jit(agent.optimize, donate_argnums=0)

        def call() -> None:
            nonlocal state
            state = jax.block_until_ready(epoch(state, batch, jax.random.PRNGKey(1), 2.5e-4))[0]

        return milliseconds(call) / minibatches

    return [time_epoch(MINIBATCHES), time_epoch(1)]


def is_large(shape: tuple) -> bool:
    """Returns whether networks.py takes the three convolutions for such images."""
    return min(shape[1:]) >= 36


def torch_network(shape: tuple, *outputs: int) -> tuple[Any, list]:
    """Makes PyTorch's convolutions with a dense layer, and a linear layer for each output."""
    import torch
    from torch import nn

    layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if is_large(shape) else [(16, 3, 1)]
    hidden = 512 if is_large(shape) else 128
    modules: list = []
    inputs = shape[0]
    for features, size, stride in layers:
        modules += [nn.Conv2d(inputs, features, size, stride), nn.ReLU()]
        inputs = features
    convolutions = nn.Sequential(*modules, nn.Flatten())
    flat = convolutions(torch.zeros(1, *shape)).shape[1]
    torso = nn.Sequential(convolutions, nn.Linear(flat, hidden), nn.ReLU())
    return torso, [nn.Linear(hidden, n) for n in outputs]


def prepare_torch(shape: tuple) -> tuple[str, int]:
    """Lets PyTorch use all cores. Returns its device, and the number that divides pixels."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return "cuda" if torch.cuda.is_available() else "cpu", 255 if is_large(shape) else 1


def time_torch_dqn(shape: tuple) -> list[float]:
    """Measures the code of CleanRL's dqn_atari.py. Returns milliseconds of [a step]."""
    import torch
    from torch import nn

    device, scale = prepare_torch(shape)
    observation, action, reward = experience(shape)

    def make_network() -> Any:
        torso, heads = torch_network(shape, ACTIONS)
        return nn.Sequential(torso, *heads).to(device)

    def load(x: np.ndarray) -> Any:
        return torch.as_tensor(x).to(device)

    network, target_network = make_network(), make_network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    rng = np.random.default_rng(1)

    def gradient_step() -> None:
        i = rng.integers(TRANSITIONS - 1, size=BATCH)
        with torch.no_grad():
            next_q = target_network(load(observation[i + 1]).float() / scale)
            target = load(reward[i]) + 0.99 * next_q.max(1).values
        q_values = network(load(observation[i]).float() / scale)
        value = q_values.gather(1, load(action[i])[:, None])[:, 0]
        loss = nn.functional.mse_loss(target, value)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return [milliseconds(gradient_step)]


def time_torch_ppo(shape: tuple) -> list[float]:
    """Measures the gradient step of CleanRL's ppo_atari.py. Returns milliseconds of [a step]."""
    import torch
    from torch import nn

    device, scale = prepare_torch(shape)
    torso, (actor, critic) = torch_network(shape, ACTIONS, 1)
    network = nn.ModuleList([torso, actor, critic]).to(device)
    rows = ENVS * STEPS
    data = [torch.as_tensor(x[:rows]).to(device) for x in experience(shape)]
    observation, action, advantages = data[0].float(), data[1], data[2]
    old_log_prob = torch.full((rows,), -float(np.log(ACTIONS)), device=device)
    old_value = torch.zeros(rows, device=device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2.5e-4, eps=1e-5)
    order = np.random.default_rng(1).permutation(rows).reshape(MINIBATCHES, -1)
    minibatches = cycle(order)

    def gradient_step() -> None:
        i = next(minibatches)
        features = torso(observation[i] / scale)
        policy = torch.distributions.Categorical(logits=actor(features))
        value = critic(features).flatten()
        ratio = (policy.log_prob(action[i]) - old_log_prob[i]).exp()
        advantage = advantages[i]
        target = advantage + old_value[i]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        clipped = old_value[i] + (value - old_value[i]).clamp(-0.2, 0.2)
        value_loss = 0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2).mean()
        loss = policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return [milliseconds(gradient_step)]


ALGORITHMS = {"dqn": (time_dqn, time_torch_dqn), "ppo": (time_ppo, time_torch_ppo)}


def device_kind() -> str:
    """Returns the device that JAX computes on."""
    import jax

    return jax.devices()[0].device_kind


def in_new_process(function: Callable, shape: tuple, cores: set[int]) -> list[float]:
    with get_context("spawn").Pool(1, os.sched_setaffinity, (0, cores)) as pool:
        return pool.apply(function, (shape,))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="dqn")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
    time_ours, time_torch = ALGORITHMS[args.algorithm]
    text, about = header(["jax", "flax", "numpy", "torch"])
    available = sorted(os.sched_getaffinity(0))
    places = {str(count): set(available[:count]) for count in (1, 2)}
    with get_context("spawn").Pool(1) as pool:  # in this process JAX would keep the GPU's memory
        device = pool.apply(device_kind)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that PyTorch does not use a GPU, either
    else:
        places = {device: set(available)}
    print(text)
    rows, results = [], []
    for name, shape in SHAPES.items():
        for place, cores in places.items():
            ours, torch = [], []
            for _ in range(args.rounds):
                ours.append(in_new_process(time_ours, shape, cores))
                torch += in_new_process(time_torch, shape, cores)
            in_loop, alone = (list(x) for x in zip(*ours, strict=True))
            cells = [spread(in_loop, 2), spread(alone, 2), spread(torch, 2)]
            cells += [spread(ratios(torch, in_loop), 2), spread(ratios(torch, alone), 2)]
            rows.append([name, place, *cells])
            results.append({"images": name, "place": place, "ours": ours, "torch": torch})
    heads = ["images", "cores or device", "in a loop", "alone", "PyTorch"]
    print(table([*heads, "PyTorch / loop", "PyTorch / alone"], rows))
    write_json(args.json, about | {"results": results})


if __name__ == "__main__":
    main()
