"""Measures milliseconds of a gradient step of DQN on images: dqn_jax.py beside PyTorch.

    pip install -e ".[bench]" && python benchmarks/image_step.py

Each samples 32 of 2,000 transitions, and takes a step of Adam. Both run in turn, each time in a new
process, on a GPU if JAX finds one, else on one core and on two. dqn_jax.py takes its steps once in
a loop inside one compiled call, and once each in a call of its own. Prints median, minimum and
maximum over the rounds, and the ratio of PyTorch's time to ours in each round.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from machine import header, ratios, spread, table, write_json

SHAPES = {"84 x 84 x 4": (4, 84, 84), "10 x 10 x 4": (4, 10, 10)}
TRANSITIONS, BATCH, LOOP = 2_000, 32, 5


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
    action = rng.integers(6, size=TRANSITIONS)
    reward = rng.normal(size=TRANSITIONS)
    return observation, action, reward.astype(np.float32)


def time_ours(shape: tuple) -> list[float]:
    """Measures dqn_jax.py. Returns milliseconds of [a step in a loop, a step alone]."""
    import gymnasium as gym
    import jax

    import dqn_jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    args = dqn_jax.Args(batch_size=BATCH, buffer_size=TRANSITIONS)
    space: Any = gym.spaces.Box(0, 255, shape, np.uint8)
    agent: Any = dqn_jax.DQN(args, space, gym.spaces.Discrete(6))
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


def time_torch(shape: tuple) -> list[float]:
    """Measures the code of CleanRL's dqn_atari.py. Returns milliseconds of [a step]."""
    import torch
    from torch import nn

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    observation, action, reward = experience(shape)
    channels, height, width = shape
    is_large = min(height, width) >= 36  # as in networks.py
    layers = [(32, 8, 4), (64, 4, 2), (64, 3, 1)] if is_large else [(16, 3, 1)]
    hidden = 512 if is_large else 128
    scale = 255 if is_large else 1

    def make_network() -> Any:
        modules: list = []
        inputs = channels
        for outputs, size, stride in layers:
            modules += [nn.Conv2d(inputs, outputs, size, stride), nn.ReLU()]
            inputs = outputs
        convolutions = nn.Sequential(*modules, nn.Flatten())
        features = convolutions(torch.zeros(1, *shape)).shape[1]
        dense = nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 6)
        return nn.Sequential(convolutions, *dense).to(device)

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
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    args = parser.parse_args()
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
