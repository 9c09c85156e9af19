"""Compiled training: environment, replay and learning as one program, for one agent or many.

A script imports this module where its environment is functional, a FuncEnv of Gymnasium: pure
functions in JAX. A log interval is then one call of one program:

    for each agent:                                   # vmap over the seeds
        for each iteration of the log interval:       # scan: CompiledLoop.run_interval
            for each of S steps:                      # scan: FunctionalEnvs.collect
                N environments make a step            # vmap: FunctionalEnvs.step
            the agent learns from the S * N steps     # update_training of the script
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
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
        self.evaluate_all = jax.jit(jax.vmap(self.evaluate_one))
        self.place_on_devices()

    def place_on_devices(self) -> None:
        """Spreads many agents over the devices, or the environments of one.

        Only where the state lies is said here. JAX does the rest.
        """
        one_agent = self.run.num_seeds == 1
        parts = self.alg.args.num_envs if one_agent else self.run.num_seeds
        wanted = self.run.num_devices
        devices = jax.devices()[:wanted]
        if len(devices) < wanted:
            raise ValueError(f"num_devices: {wanted} are wanted, only {len(devices)} are there")
        if parts % wanted > 0:
            what = "num_envs" if one_agent else "num_seeds"
            raise ValueError(f"num_devices: {wanted} devices do not divide {what}, {parts}")
        mesh = Mesh(np.array(devices), "devices")
        self.everywhere = NamedSharding(mesh, PartitionSpec())
        if one_agent:
            self.agents_on = self.everywhere
            self.envs_on = NamedSharding(mesh, PartitionSpec(None, "devices"))
        else:
            self.agents_on = NamedSharding(mesh, PartitionSpec("devices"))
            self.envs_on = self.agents_on

    def start(self) -> Any:
        """The Training of all agents [num_seeds, ...] before the first step, on the devices."""

        def start_one(seed: Array) -> Any:
            training, env_key = self.start_training(seed)
            return training._replace(envs=self.envs.reset(env_key, self.alg.args.num_envs))

        # One after the other: XLA hangs in ten QR decompositions at once.
        start_all = jax.jit(partial(jax.lax.map, start_one))
        seeds = (self.run.seed + np.arange(self.run.num_seeds)).astype(np.uint32)
        training = start_all(seeds)
        places = training._replace(
            agent=self.agents_on,
            key=self.agents_on,
            current=self.agents_on,
            ended=self.agents_on,
            envs=self.envs_on,
        )
        return jax.device_put(training, places)

    def iterate(self, training: Any, schedule: dict) -> tuple[Any, dict]:
        """An iteration of one agent: a rollout, and what is learned from it."""
        key, noise_key, env_key = jax.random.split(training.key, 3)
        noise = self.alg.draw_noise(noise_key, schedule)
        policy = self.alg.policy(training.agent)
        env_state, rollout = self.envs.collect(training.envs, policy, noise, env_key)
        training = training._replace(envs=env_state, key=key)
        training, metrics, _ = self.update_training(training, rollout, schedule)
        return training, metrics

    def run_interval(self, training: Any, schedules: dict) -> tuple[Any, dict]:
        """The iterations of a log interval of one agent: Training, metrics of the last one."""
        training = training._replace(ended=jnp.zeros_like(training.ended))
        training, metrics = jax.lax.scan(self.iterate, training, schedules)
        return training, jax.tree.map(lambda x: x[-1], metrics)

    def intervals(self, training: Any, steps: range) -> Iterator[tuple[int, Any, dict]]:
        """Trains: yields the step, the Training and the metrics after each log interval."""
        places = jax.tree.map(lambda x: x.sharding, training)
        run_all = jax.jit(
            jax.vmap(self.run_interval, in_axes=(0, None)),
            donate_argnums=0,
            out_shardings=(places, None),
        )
        for begin in steps:
            end = begin + steps.step
            starts = np.arange(begin, end, self.alg.steps_per_iteration)
            training, metrics = run_all(training, self.alg.schedule(starts))
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
