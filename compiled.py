"""Compiled training: environment, replay and learning as one program, for one agent or many.

A script imports this module where its environment is functional, a FuncEnv of Gymnasium: pure
functions in JAX. A log interval is then one call of one program:

    for each agent:                                   # vmap over the seeds
        for each iteration of the log interval:       # scan: CompiledLoop.run_interval
            for each of S steps:                      # scan: FunctionalEnvs.collect
                N environments make a step            # vmap: FunctionalEnvs.step
            the agent learns from the S * N steps     # update_training of the script
"""

import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm


class EnvState(NamedTuple):
    """Where N environments stand between two steps."""

    observation: Array  # [N, ...], what the policy sees
    resetting: Array  # [N] bool, the next step ignores its action and only resets
    inner: Any  # [N, ...], the states of the functional environment
    length: Array  # [N] int32, steps of the episode so far


class FunctionalEnvs:
    """N copies of a functional environment, with a time limit and autoreset in NEXT_STEP mode.

    Args:
      alg: the algorithm of a script.
      func_env: gymnasium.experimental.functional.FuncEnv; its observations and rewards may be of
        any dtype, they become that of the algorithm's example and float32.
      time_limit: steps after which an episode is cut off, None if it is not.
    """

    def __init__(self, alg: Any, func_env: Any, time_limit: int | None) -> None:
        self.alg = alg
        self.time_limit = time_limit or np.iinfo(np.int32).max
        self.dtype = alg.example.observation.dtype
        self.initial = jax.vmap(func_env.initial)
        self.transition = jax.vmap(func_env.transition)
        self.observation = jax.vmap(func_env.observation)
        self.reward = jax.vmap(func_env.reward)
        self.terminal = jax.vmap(func_env.terminal)

    def observe(self, stack: Array, goes_on: Array, inner: Any, keys: Array) -> Array:
        """What the policy sees in states `inner`: a frame, or the last K of its episode.

        A stack [N, K, ...] has zeros from before an episode's start, where `goes_on` [N] is False.
        """
        frame = self.observation(inner, keys).astype(self.dtype)
        if self.alg.args.frame_stack == 1:
            return frame
        goes_on = goes_on.reshape(-1, *[1] * frame.ndim)
        older = jnp.where(goes_on, stack[:, 1:], 0)
        return jnp.concatenate([older, frame[:, None]], axis=1)

    def reset(self, key: Array, num_envs: int) -> EnvState:
        """Starts an episode in each of them."""
        keys = jax.random.split(key, num_envs)
        inner = self.initial(keys)
        axes = self.alg.example.observation.shape
        no_stack = jnp.zeros((num_envs, *axes), self.dtype)
        resetting = jnp.zeros(num_envs, bool)
        observation = self.observe(no_stack, resetting, inner, keys)
        return EnvState(observation, resetting, inner, length=jnp.zeros(num_envs, jnp.int32))

    def step(self, policy: Any, state: EnvState, inputs: tuple) -> tuple[EnvState, Any]:
        """One step of each; `inputs` are their noise, their keys and the starts to reset to."""
        noise, keys, starts = inputs
        is_step = ~state.resetting
        action = self.alg.act(policy, state.observation, noise)
        action = action.astype(self.alg.example.action.dtype)
        env_action = self.alg.to_env_action(action)
        after = self.transition(state.inner, env_action, keys)
        reward = self.reward(state.inner, env_action, after, keys)
        reward = jnp.where(is_step, reward, 0)
        length = jnp.where(is_step, state.length + 1, 0)
        terminated = is_step & self.terminal(after, keys)
        is_late = length >= self.time_limit
        step = self.alg.example._replace(
            observation=state.observation,
            action=action,
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=is_late & ~terminated,
            is_step=is_step,
        )
        choose = jax.vmap(jnp.where)
        inner = jax.tree.map(lambda x, start: choose(is_step, x, start), after, starts)
        observation = self.observe(state.observation, is_step, inner, keys)
        return EnvState(observation, terminated | is_late, inner, length), step

    def collect(
        self, state: EnvState, policy: Any, noise: Array, key: Array
    ) -> tuple[EnvState, Any]:
        """S steps of each, with noise [S, N, ...]: the EnvState and the Steps [S, N, ...]."""
        keys = jax.random.split(key, noise.shape[:2])
        # A start for every step, whether it is needed or not: one call takes a tenth of the time.
        starts = jax.vmap(self.initial)(keys)
        state, rollout = jax.lax.scan(partial(self.step, policy), state, (noise, keys, starts))
        return state, rollout._replace(next_observation=state.observation)

    def evaluate(
        self, policy: Any, episodes: int, key: Array, longest_episode: int
    ) -> tuple[Array, Array]:
        """The first episode of as many environments, without exploration.

        Returns their returns [episodes], and whether they ended [episodes] within so many steps.
        """
        no_noise = self.alg.no_noise
        noise = jnp.broadcast_to(no_noise, (episodes, *no_noise.shape))
        steps = min(self.time_limit, longest_episode)
        keys = jax.random.split(key, (steps, episodes))

        def has_more(carry: tuple) -> Array:
            t, _, _, is_over = carry
            return (t < steps) & ~is_over.all()

        def step(carry: tuple) -> tuple:
            t, state, returns, is_over = carry
            no_starts = state.inner  # none is needed, as the first episode is the only one
            state, row = self.step(policy, state, (noise, keys[t], no_starts))
            returns += jnp.where(is_over, 0, row.reward)
            return t + 1, state, returns, is_over | row.terminated | row.truncated

        state = self.reset(jax.random.fold_in(key, 0), episodes)
        returns = jnp.zeros(episodes, jnp.float32)
        start = (jnp.int32(0), state, returns, jnp.zeros(episodes, bool))
        _, _, returns, is_over = jax.lax.while_loop(has_more, step, start)
        return returns, is_over


def join_processes(
    stop: Callable[[], bool], address: str | None, num_processes: int | None, process_id: int | None
) -> Callable[[], bool]:
    """Makes this process one of those that train together. Only the first one prints.

    None is what JAX finds out by itself under SLURM, Open MPI and Kubernetes. Returns a function
    that says whether `stop` is true in any of the processes, which all call it at the same time.
    ConnectionError if they do not find each other.
    """
    wait: dict = {}
    if jax.__version_info__ >= (0, 8, 2):
        wait["shutdown_timeout_seconds"] = 60  # for the others, where this process has failed
    try:
        jax.distributed.initialize(address, num_processes, process_id, **wait)
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(f"distributed: {error}") from error
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the end
    return lambda: bool(multihost_utils.process_allgather(np.bool_(stop())).any())


def make_mesh(num_seeds: int, num_envs: int, num_devices: int) -> Mesh:
    """The devices ["seeds", "envs"] of a run, `num_devices` of each process.

    As many agents lie side by side as divide the devices; the others of them share an agent.
    """
    devices = []
    for process in range(jax.process_count()):
        local = jax.local_devices(process)
        if len(local) < num_devices:
            raise ValueError(f"num_devices: {num_devices} are wanted, only {len(local)} are there")
        devices += local[:num_devices]
    side_by_side = math.gcd(num_seeds, len(devices))
    grid = np.reshape(devices, (side_by_side, -1))
    devices_of_one = grid.shape[1]
    if num_envs % devices_of_one > 0:
        raise ValueError(
            f"num_devices: {len(devices)} devices for {num_seeds} agents are {devices_of_one} "
            f"for each, which do not divide its {num_envs} environments"
        )
    return Mesh(grid, ("seeds", "envs"))


class CompiledLoop:
    """Trains num_seeds agents. It has the methods of a script's `OrdinaryLoop`.

    Args:
      alg, run: the algorithm and the flags of the experiment.
      env: the functional environment as gym.make gives it, with its time limit.
      start_training: seed -> Training without environments, and the key to start these with.
      update_training: Training, rollout, schedule -> Training, metrics, policy.
      longest_episode: steps after which an evaluation cuts off an episode.

    ValueError if the agents or environments cannot be spread over the devices.
    """

    def __init__(
        self,
        alg: Any,
        run: Any,
        env: Any,
        start_training: Callable,
        update_training: Callable,
        longest_episode: int,
    ) -> None:
        self.alg = alg
        self.run = run
        self.envs = FunctionalEnvs(alg, env.unwrapped.func_env, env.spec.max_episode_steps)
        self.start_training = start_training
        self.update_training = update_training
        self.longest_episode = longest_episode
        self.place_on_devices()
        evaluate_all = jax.vmap(self.evaluate_one, spmd_axis_name="seeds")
        self.evaluate_all = jax.jit(evaluate_all, out_shardings=self.everywhere)

    def place_on_devices(self) -> None:
        """Says where the state of training lies; JAX makes the program for that.

        Agents are spread over the axis "seeds" of the mesh, the environments of an agent over
        "envs". All else that belongs to an agent is whole on each of its devices.
        """
        self.mesh = make_mesh(self.run.num_seeds, self.alg.args.num_envs, self.run.num_devices)
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.agents_on = NamedSharding(self.mesh, PartitionSpec("seeds"))
        self.envs_on = NamedSharding(self.mesh, PartitionSpec("seeds", "envs"))

    def start(self) -> Any:
        """The Training of all agents [num_seeds, ...] before the first step, on the devices."""

        def start_one(seed: Array) -> Any:
            training, env_key = self.start_training(seed)
            return training._replace(envs=self.envs.reset(env_key, self.alg.args.num_envs))

        # One after the other: XLA hangs in ten QR decompositions at once.
        start_all = partial(jax.lax.map, start_one)
        seeds = (self.run.seed + np.arange(self.run.num_seeds)).astype(np.uint32)
        places = jax.eval_shape(start_all, seeds)._replace(
            agent=self.agents_on,
            key=self.agents_on,
            current=self.agents_on,
            ended=self.everywhere,  # each process reads it
            envs=self.envs_on,
        )
        return jax.jit(start_all, out_shardings=places)(seeds)

    def iterate(self, training: Any, schedule: dict) -> tuple[Any, dict]:
        """An iteration of one agent: a rollout, and what is learned from it."""
        key, noise_key, env_key = jax.random.split(training.key, 3)
        noise = self.alg.draw_noise(noise_key, schedule)
        policy = self.alg.policy(training.agent)
        env_state, rollout = self.envs.collect(training.envs, policy, noise, env_key)
        # Whole on each device: XLA would split a replay like what is stored in it, and put it
        # together again for each draw.
        rollout = jax.lax.with_sharding_constraint(rollout, self.everywhere)
        training = training._replace(envs=env_state, key=key)
        training, metrics, _ = self.update_training(training, rollout, schedule)
        return training, metrics

    def run_interval(self, training: Any, schedules: dict) -> tuple[Any, dict]:
        """The iterations of a log interval of one agent: Training, metrics of the last one."""
        training = training._replace(ended=jnp.zeros_like(training.ended))
        training, metrics = jax.lax.scan(self.iterate, training, schedules)
        return training, jax.tree.map(lambda x: x[-1], metrics)

    def program(self, training: Any) -> Callable:
        """Training [num_seeds, ...], schedules -> the same after a log interval, and metrics."""
        places = jax.tree.map(lambda x: x.sharding, training)
        return jax.jit(
            jax.vmap(self.run_interval, in_axes=(0, None), spmd_axis_name="seeds"),
            donate_argnums=0,
            out_shardings=(places, self.everywhere),
        )

    def intervals(self, training: Any, steps: range) -> Iterator[tuple[int, Any, dict]]:
        """Trains: yields the step, the Training and the metrics after each log interval."""
        program = self.program(training)
        for begin in steps:
            end = begin + steps.step
            starts = np.arange(begin, end, self.alg.steps_per_iteration)
            with jax.sharding.set_mesh(self.mesh):  # over which `split_rows` splits batches
                training, metrics = program(training, self.alg.schedule(starts))
            yield end, training, metrics

    def evaluate_one(self, policy: Any) -> tuple[Array, Array]:
        """The returns [eval_episodes] of an agent, and whether the episodes ended."""
        # No key of training is one that 2**31 was folded into.
        seed = np.uint32(self.run.seed % 2**32)
        key = jax.random.fold_in(jax.random.PRNGKey(seed), 2**31)
        return self.envs.evaluate(policy, self.run.eval_episodes, key, self.longest_episode)

    def evaluate(self, policies: Any) -> np.ndarray:
        """Returns [num_seeds, eval_episodes] without exploration."""
        returns, is_over = self.evaluate_all(policies)
        if not np.all(is_over):
            tqdm.write(f"an evaluation cuts off episodes after {self.longest_episode:,} steps")
        return np.asarray(returns)
