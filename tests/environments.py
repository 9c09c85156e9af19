"""Environments with known solutions. Importing this module registers them with Gymnasium."""

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv, FunctionalJaxVectorEnv
from gymnasium.experimental.functional import FuncEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Counter(gym.Env):
    """Observes the numbers of the episode and of its step: [episode, step, noise].

    Episodes last 2 + (episode % 4) steps; every second one ends by truncation. Reward: step + 1,
    times `scale`. Step `fail_at`, counted over all episodes, raises an error.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, scale: float = 1.0, fail_at: int = -1) -> None:
        self.episode = -1
        self.scale, self.steps_left = scale, fail_at

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.step_count, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.step_count = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.steps_left -= 1
        if self.steps_left == 0:
            raise RuntimeError("broken")
        self.step_count += 1
        over = self.step_count == 2 + self.episode % 4
        by_truncation = self.episode % 2 == 1
        reward = self.scale * self.step_count
        return self._observe(), reward, over and not by_truncation, over and by_truncation, {}


class Given(gym.Env):
    """Observes samples of the space, or always `shown`; an episode ends after `length` steps.

    `reward(env, action)` may look at `env.observation` (the last one) and `env.step_count`.
    """

    def __init__(
        self,
        observation_space: gym.Space = Counter.observation_space,
        action_space: gym.Space = Counter.action_space,
        length: int = 4,
        reward: Callable[[Any, Any], float] = lambda env, action: 1.0,
        shown: Any = None,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.length, self.reward, self.shown = length, reward, shown

    def _observe(self) -> Any:
        self.observation = self.observation_space.sample() if self.shown is None else self.shown
        return self.observation

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.step_count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        reward = float(self.reward(self, action))
        self.step_count += 1
        return self._observe(), reward, self.step_count == self.length, False, {}


class Probe(gym.Env):
    """Has one thing to learn, with a known value.

    discount: two steps, the observations 0 and 1, reward 1 at the second.
    both: one step, reward +1 if the action matches the observation, which is +1 or -1, else -1.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def _observe(self) -> np.ndarray:
        return np.array([self.value], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.step_count = 0
        self.value = float(self.np_random.choice([-1.0, 1.0])) if self.kind == "both" else 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.step_count += 1
        if self.kind == "discount" and self.step_count == 1:
            self.value = 1.0
            return self._observe(), 0.0, False, False, {}
        is_right = self.kind == "discount" or action == int(self.value > 0)
        return self._observe(), 1.0 if is_right else -1.0, True, False, {}


class Reach(gym.Env):
    """Moves a point in the plane by the action. Reaching the goal ends the episode.

    The reward, 0 within 0.3 of the goal and else -1, is computed for many goals at once, the end
    of an episode only for one goal. The keys of the Dict are not in alphabetical order.
    """

    point = gym.spaces.Box(-9.0, 9.0, (2,))
    observation_space = gym.spaces.Dict(
        observation=gym.spaces.Box(-9.0, 9.0, (3,)), desired_goal=point, achieved_goal=point
    )
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _observe(self) -> dict:
        return {
            "observation": np.append(self.at, self.step_count).astype(np.float32),
            "desired_goal": self.goal.astype(np.float32),
            "achieved_goal": self.at.astype(np.float32),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.at, self.goal = np.zeros(2), self.np_random.uniform(-2, 2, 2)
        self.step_count = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[dict, float, bool, bool, dict]:
        self.at = self.at + action
        self.step_count += 1
        reward = float(self.compute_reward(self.at, self.goal, {}))
        terminated = self.compute_terminated(self.at, self.goal, {})
        return self._observe(), reward, terminated, False, {"is_success": terminated}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: dict) -> np.ndarray:
        return -(np.linalg.norm(achieved_goal - desired_goal, axis=-1) > 0.3).astype(np.float32)

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: dict) -> bool:
        return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.3)


def counters(num_envs: int) -> SyncVectorEnv:
    """Makes a native vector version without arguments, in the autoreset mode NEXT_STEP."""
    return SyncVectorEnv([Counter] * num_envs)


def preprocessed(num_envs: int) -> SyncVectorEnv:
    """Makes a native vector version whose observations differ from the single version's."""
    return SyncVectorEnv([lambda: Given(gym.spaces.Box(-1.0, 1.0, (2,)))] * num_envs)


def same_step(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    """Makes a native vector version in the autoreset mode SAME_STEP."""
    return SyncVectorEnv([Counter] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


def register_given(env_id: str, *args: Any, **kwargs: Any) -> None:
    gym.register(env_id, partial(Given, *args, **kwargs), disable_env_checker=True)


once = dict(observation_space=gym.spaces.Box(0.5, 0.5, (2,)), length=1)  # all samples are equal
register_given("Once-v0", **once, action_space=gym.spaces.Discrete(2), reward=lambda _, a: a)
register_given(
    "OnceBox-v0", **once, action_space=gym.spaces.Box(-1.0, 1.0, (1,)), reward=lambda _, a: a[0]
)
register_given("Blind-v0", gym.spaces.Box(0.0, 1.0, (0,)))
register_given("Start-v0", gym.spaces.Box(-1.0, 1.0, (1,)))
register_given("ProbeImage-v0", gym.spaces.Box(0, 255, (4, 36, 36), np.uint8))
register_given("ImageGrey-v0", gym.spaces.Box(0, 255, (40, 40), np.uint8))
gym.register("Counter-v0", Counter)
gym.register("CounterSameStep-v0", vector_entry_point=same_step)
gym.register("VectorOnly-v0", vector_entry_point=counters)
gym.register("Preprocessed-v0", Counter, vector_entry_point=preprocessed)
gym.register("TakesKwargs-v0", Counter, vector_entry_point=counters)
gym.register("Failing-v0", Counter, kwargs={"fail_at": 500})
gym.register(  # fails only in the second of several processes
    "FailsInSecond-v0", lambda: Counter(fail_at=500 if jax.process_index() == 1 else -1)
)
gym.register("Probe-discount-v0", Probe, kwargs={"kind": "discount"})
gym.register("Reach-v0", Reach, max_episode_steps=9)


class Chain(FuncEnv):
    """Has five states in a row, observed one-hot: action 1 goes right, 0 left, from state 0 on.

    Reward 1 for the step into the last state, which ends the episode: from state s it is 4 - s
    steps away, so that Q*(s, right) = gamma**(3 - s) and Q*(s, left) = gamma**(4 - max(s - 1, 0)).
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (5,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def initial(self, rng, params=None):
        return jnp.int32(0)

    def transition(self, state, action, rng, params=None):
        return jnp.clip(state + 2 * action - 1, 0, 4)

    def observation(self, state, rng, params=None):
        return jax.nn.one_hot(state, 5)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.where(next_state == 4, 1.0, 0.0)

    def terminal(self, state, rng, params=None):
        return state == 4


def make_jax(env: FuncEnv, **kwargs: Any) -> FunctionalJaxEnv:
    return FunctionalJaxEnv(env, metadata={"render_modes": []}, **kwargs)


def register_jax(env_id: str, env: FuncEnv, **options: Any) -> None:
    """Registers an environment written in JAX; its episodes have at most 9 steps."""
    options = {"max_episode_steps": 9, "disable_env_checker": True} | options
    gym.register(env_id, partial(make_jax, env), **options)


class ChainOfCells(Chain):
    """Observes the state as a number, so that it is not compiled."""

    observation_space = gym.spaces.Discrete(5)

    def observation(self, state, rng, params=None):
        return state


register_jax("Chain-v0", Chain())
cells = ChainOfCells()
register_jax("ChainOfCells-v0", cells, vector_entry_point=partial(FunctionalJaxVectorEnv, cells))
