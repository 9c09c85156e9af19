"""Flips bits, in JAX: each action flips one of N bits, until they equal the N bits of a goal.

Andrychowicz et al. 2017, arXiv 1707.01495, section 3.1; here an episode ends at its goal.
`--env-id cleanreplay.bit_flipping:BitFlipping15-v0` imports this module, which registers
environments of 6 to 50 bits.
"""

from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete


class BitFlipping(FuncEnv):
    """A state is [2, N]: the bits and the goal, as float32. The reward is -1 until they match."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        box = Box(0.0, 1.0, (bits,))
        self.observation_space = Dict(observation=box, achieved_goal=box, desired_goal=box)
        self.action_space = Discrete(bits)

    def initial(self, rng, params=None):
        return jax.random.bernoulli(rng, shape=(2, self.bits)).astype(jnp.float32)

    def transition(self, state, action, rng, params=None):
        return state.at[0, action].set(1 - state[0, action])

    def observation(self, state, rng, params=None):
        return {"observation": state[0], "achieved_goal": state[0], "desired_goal": state[1]}

    def reward(self, state, action, next_state, rng, params=None):
        return self.compute_reward(*next_state, {})

    def terminal(self, state, rng, params=None):
        return self.compute_terminated(*state, {})

    def transition_info(self, state, action, next_state, params=None):
        return {"is_success": self.compute_terminated(*next_state, {})}

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: dict) -> Any:
        return (achieved_goal == desired_goal).all(-1)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict) -> Any:
        return self.compute_terminated(achieved_goal, desired_goal, info) - 1.0


def make(bits: int, **kwargs: Any) -> gym.Env:
    return FunctionalJaxEnv(BitFlipping(bits), metadata={"render_modes": []}, **kwargs)


for bits in (6, 10, 15, 20, 25, 30, 40, 50):
    gym.register(
        f"BitFlipping{bits}-v0",
        "cleanreplay.bit_flipping:make",
        max_episode_steps=bits,
        disable_env_checker=True,
        kwargs={"bits": bits},
    )
