"""Steps N environments written in JAX together: vector environments that can be compiled."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from jax import Array
from tqdm import tqdm

from cleanreplay import environments
from cleanreplay.errors import UsageError
from cleanreplay.packed import pack
from cleanreplay.protocol import STEP_FIELDS, Agent, takes


class JaxEnvState(NamedTuple):
    """N environments between two steps."""

    observation: Array  # [N, ...], what the policy sees
    valid: Array  # [N] bool, False where the next step is an autoreset step
    memory: tuple  # the agent's recurrent state, arrays [N, ...]; () if it has none
    inner: Any  # [N, ...], the states of the FuncEnv
    length: Array  # [N] int32, steps of the episode so far


def as_box(observation: Any, space: Any) -> Array:
    """Converts a Dict to an array, as `environments.wrap` does: a vector, or bytes."""
    if isinstance(space, Box):
        return observation
    if layout := environments.layout_of(space):
        return pack(jax.tree.map(jnp.asarray, observation), layout)
    return jnp.concatenate([observation[name].ravel() for name in space.spaces])


def info_of(func_env: Any, *step: Any) -> dict:
    """Returns the scalars in `transition_info` of a step: (state, action, next state)."""
    try:
        info = func_env.transition_info(*step)
    except jax.errors.JAXTypeError:  # it cannot be jitted: Gymnasium calls it outside
        return {}
    numbers = (bool, int, float, np.ndarray, np.generic, Array)
    info = {name: x for name, x in info.items() if isinstance(x, numbers) and jnp.ndim(x) == 0}
    return jax.tree.map(jnp.float32, info)


class JaxEnvs:
    """N copies of an environment written in JAX, with autoreset in NEXT_STEP mode.

    Observations are cast to the dtype of the algorithm's example, and rewards to float32.
    `time_limit` is the number of steps after which an episode is truncated, None without a limit.
    """

    def __init__(self, agent: Agent, func_env: Any, time_limit: int | None) -> None:
        self.agent: Any = agent  # its `act` may take `memory`
        more = set(agent.example_step._fields) - {*STEP_FIELDS, "memory"}
        if more:
            where = "cleanreplay/jax_envs.py does not fill: give it in JaxEnvs.step"
            raise UsageError(f"Step has {', '.join(sorted(more))}, which {where}")
        self.has_memory = takes(agent.act, "memory")
        self.time_limit = time_limit or np.iinfo(np.int32).max
        self.dtype = agent.example_step.observation.dtype
        self.initial = jax.vmap(func_env.initial)
        self.transition = jax.vmap(func_env.transition)
        space = func_env.observation_space
        self.observation = jax.vmap(lambda *args: as_box(func_env.observation(*args), space))
        self.reward = jax.vmap(func_env.reward)
        self.terminal = jax.vmap(func_env.terminal)
        self.info = jax.vmap(partial(info_of, func_env))

    def observe(self, stack: Array, valid: Array, inner: Any, keys: Array) -> Array:
        """Returns observations in the states `inner`: frames [N, ...], or stacks [N, K, ...].

        A stack is zero before the start of the episode. Where the last step was not `valid` [N],
        only the newest frame belongs to the episode.
        """
        frame = self.observation(inner, keys).astype(self.dtype)
        if self.agent.args.frame_stack == 1:
            return frame
        valid = jnp.expand_dims(valid, range(1, stack.ndim))
        older = jnp.where(valid, stack[:, 1:], 0)
        return jnp.concatenate([older, frame[:, None]], axis=1)

    def reset(self, key: Array, num_envs: int) -> JaxEnvState:
        """Starts an episode in each environment."""
        keys = jax.random.split(key, num_envs)
        inner = self.initial(keys)
        stack = jnp.zeros((num_envs, *self.agent.example_step.observation.shape), self.dtype)
        observation = self.observe(stack, jnp.zeros(num_envs, bool), inner, keys)
        memory = self.agent.no_memory(num_envs) if self.has_memory else ()
        length = jnp.zeros(num_envs, jnp.int32)
        return JaxEnvState(observation, jnp.ones(num_envs, bool), memory, inner, length)

    def step(
        self, params: Any, act_key: Any, state: JaxEnvState, inputs: tuple
    ) -> tuple[JaxEnvState, tuple]:
        """Takes a step in each environment, with actions of `act`, which explores if given a key.

        `inputs` are the number of the step, the keys [N] of the environments, and the states [N] to
        start from at a reset. Returns the next state, a Step and the scalars [N] of its info, which
        are infinite in an autoreset step, and `is_success` wherever no episode ends.
        """
        step, keys, starts = inputs
        valid = state.valid
        if self.has_memory:
            inputs = (state.observation, state.memory, act_key, step)
            action, memory = self.agent.act(params, *inputs)
            stored = {"memory": state.memory}
        else:
            action = self.agent.act(params, state.observation, act_key, step)
            memory, stored = (), {}
        action = action.astype(self.agent.example_step.action.dtype)
        env_action = self.agent.to_env_action(action)
        after = self.transition(state.inner, env_action, keys)
        reward = self.reward(state.inner, env_action, after, keys)
        reward = jnp.where(valid, reward, 0)
        length = jnp.where(valid, state.length + 1, 0)
        terminated = valid & self.terminal(after, keys).astype(bool)
        truncated = (length >= self.time_limit) & ~terminated
        row = type(self.agent.example_step)(
            observation=state.observation,
            action=action,
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            **stored,
        )
        info = self.info(state.inner, env_action, after)
        where = dict.fromkeys(info, valid) | {"is_success": terminated | truncated}
        info = {name: jnp.where(where[name], x, jnp.inf) for name, x in info.items()}
        choose = jax.vmap(jnp.where)
        memory = tuple(choose(valid, x, jnp.zeros_like(x)) for x in memory)
        inner = jax.tree.map(lambda x, start: choose(valid, x, start), after, starts)
        observation = self.observe(state.observation, valid, inner, keys)
        after_step = JaxEnvState(observation, ~(terminated | truncated), memory, inner, length)
        return after_step, (row, info)

    def collect(self, state: JaxEnvState, params: Any, key: Array, step: Array) -> tuple:
        """Takes S steps in each environment, from `step` on.

        Returns the next state, Steps [S, N, ...], and the scalars [S, N] of their info.
        """
        num_steps, num_envs = self.agent.rollout_shape
        act_key, env_key = jax.random.split(key)
        keys = jax.random.split(env_key, (num_steps, num_envs))
        # A start for every step, needed or not: a single call takes a tenth of the time.
        starts = jax.vmap(self.initial)(keys)
        steps = step + num_envs * jnp.arange(num_steps)
        take_step = partial(self.step, params, act_key)  # `act` folds the number of the step in
        return jax.lax.scan(take_step, state, (steps, keys, starts))

    def evaluate(
        self, params: Any, episodes: int, key: Array, max_steps: int, explores: bool = False
    ) -> tuple:
        """Plays one episode in each of `episodes` environments.

        Gives the returns [episodes], whether the episodes ended [episodes] within max_steps, and
        whether they succeeded [episodes], infinite where the environment does not report it.
        """
        max_steps = min(self.time_limit, max_steps)
        first_step = min(self.agent.args.total_timesteps, 2**31 - 1 - max_steps)  # as play_episodes
        keys = jax.random.split(key, (max_steps, episodes))
        act_key = jax.random.fold_in(key, 1) if explores else None

        def has_more(carry: tuple) -> Array:
            t, _, _, over, _ = carry
            return (t < max_steps) & ~over.all()

        def step(carry: tuple) -> tuple:
            t, state, returns, over, succeeded = carry
            no_starts = state.inner  # only the first episode is played
            inputs = (first_step + t, keys[t], no_starts)
            state, (row, info) = self.step(params, act_key, state, inputs)
            returns += jnp.where(over, 0, row.reward)
            if "is_success" in info:
                succeeded = jnp.where(over, succeeded, info["is_success"])
            return t + 1, state, returns, over | row.terminated | row.truncated, succeeded

        state = self.reset(jax.random.fold_in(key, 0), episodes)
        returns = jnp.zeros(episodes, jnp.float32)
        unknown = jnp.full(episodes, jnp.inf)
        start = (jnp.int32(0), state, returns, jnp.zeros(episodes, bool), unknown)
        _, _, returns, over, succeeded = jax.lax.while_loop(has_more, step, start)
        return returns, over, succeeded


def find_jax_env(envs: Any, run: Any) -> Any:
    """Returns the single environment of `envs` if it is written in JAX, otherwise None.

    Its wrappers must be among those that this module replaces. UsageError instead of None if flags
    ask for several agents or devices. Prints how the network reads observations that are not
    vectors.
    """
    if line := environments.describe(envs):
        tqdm.write(f"{run.env_id}: {line}")
    env = envs.unwrapped
    if isinstance(env, SyncVectorEnv):
        env = env.envs[0]
    why = why_not_compiled(envs, env, run)
    if not why:
        return env
    if run.num_seeds > 1 or run.sweep or run.num_devices > 1:
        how = "start a run for each agent instead, see docs/scale.md"
        flags = "num_seeds, sweep, num_devices"
        raise UsageError(f"{flags}: {run.env_id} {why}; {how}")
    if hasattr(env.unwrapped, "func_env") and run.vectorization == "auto":
        tqdm.write(f"{run.env_id} {why}")
    return None


def why_not_compiled(envs: Any, env: Any, run: Any) -> str:
    """Explains why a run steps `env` of `envs` from Python, with "" if it is compiled."""
    if not hasattr(env.unwrapped, "func_env"):
        return "is not written in JAX"
    if run.vectorization != "auto":
        return f"is not compiled with --vectorization {run.vectorization}"
    space = env.unwrapped.observation_space
    parts = space.spaces.values() if isinstance(space, Dict) else [space]
    if not all(isinstance(part, Box) for part in parts):
        return f"is not compiled, because its observations are no Box and no Dict of these: {space}"
    envs = environments.before_wrap(envs)  # JaxEnvs packs or flattens a Dict, and stacks frames
    while isinstance(env, PassiveEnvChecker | OrderEnforcing | TimeLimit):
        env = env.env
    for wrapped in (envs, env):
        if wrapped is not wrapped.unwrapped:
            return f"is not compiled, because of its wrappers: {wrapped}"
    return ""
