"""Two tasks that take memory, as Gymnasium environments, and in JAX for compiled.py (phys2d/...).

`--env-id memory_tasks:CartPoleNoVelocity-v0` or `memory_tasks:phys2d/MemoryChain-v0` imports this
module, which registers them.
"""

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.envs.phys2d.cartpole import CartPoleFunctional
from gymnasium.experimental.functional import FuncEnv

NO_RENDER: dict = {"render_modes": []}


def without_velocities(**kwargs: Any) -> gym.Env:
    """CartPole-v1 that shows the positions of the cart and the pole, and not how fast they move."""
    env = gym.make("CartPole-v1", **kwargs)
    space: Any = env.observation_space
    space = gym.spaces.Box(space.low[::2], space.high[::2])
    return gym.wrappers.TransformObservation(env, lambda observation: observation[::2], space)


class MemoryChain(gym.Env):
    """The first observation says which of two actions the last step rewards, with 1 or else -1.

    As memory_len of bsuite: [fraction of the steps left, query, cue of the first step or 0].
    """

    action_space = gym.spaces.Discrete(2)
    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, length: int = 15) -> None:
        self.length = length

    def observe(self) -> np.ndarray:
        cue = 2.0 * self.cue - 1 if self.t == 0 else 0.0
        return np.array([1 - self.t / self.length, self.t == self.length - 1, cue], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.t += 1
        over = self.t == self.length
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        return self.observe(), reward, over, False, {}


class JaxMemoryChain(FuncEnv):
    """The same in JAX. A state is [t, cue]."""

    action_space = MemoryChain.action_space
    observation_space = MemoryChain.observation_space

    def __init__(self, length: int = 15) -> None:
        super().__init__()
        self.length = length

    def initial(self, rng, params=None):
        return jnp.stack([jnp.int32(0), jax.random.randint(rng, (), 0, 2)])

    def transition(self, state, action, rng, params=None):
        return state.at[0].add(1)

    def observation(self, state, rng, params=None):
        t, cue = state
        cue = jnp.where(t == 0, 2.0 * cue - 1, 0)
        return jnp.stack([1 - t / self.length, jnp.float32(t == self.length - 1), cue])

    def reward(self, state, action, next_state, rng, params=None):
        right = jnp.where(action == state[1], 1.0, -1.0)
        return jnp.where(next_state[0] == self.length, right, 0.0)

    def terminal(self, state, rng, params=None):
        return state[0] >= self.length


class JaxCartPoleNoVelocity(CartPoleFunctional):
    """CartPole in JAX, without velocities."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def observation(self, state, rng, params=None):
        return super().observation(state, rng, params)[::2]


def jax_memory_chain(length: int = 15, **kwargs: Any) -> gym.Env:
    return FunctionalJaxEnv(JaxMemoryChain(length), metadata=NO_RENDER, **kwargs)


def jax_cart_pole(**kwargs: Any) -> gym.Env:
    return FunctionalJaxEnv(JaxCartPoleNoVelocity(), metadata=NO_RENDER, **kwargs)


gym.register("CartPoleNoVelocity-v0", without_velocities)
gym.register("MemoryChain-v0", "memory_tasks:MemoryChain")
gym.register(
    "phys2d/CartPoleNoVelocity-v0", jax_cart_pole, max_episode_steps=500, disable_env_checker=True
)
gym.register(
    "phys2d/MemoryChain-v0", jax_memory_chain, max_episode_steps=1000, disable_env_checker=True
)
