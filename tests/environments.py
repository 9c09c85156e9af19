"""Environments whose right answers are known, registered with Gymnasium when this is imported."""

from collections.abc import Callable, Sequence
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
    """The observation tells the reset and the step: [episode, step, noise].

    Episodes last 2 + (episode % 4) steps; every second one ends by truncation. Reward: step + 1.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self) -> None:
        self.episode = -1

    def _observe(self) -> np.ndarray:
        return np.array([self.episode, self.step_count, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.step_count = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        self.step_count += 1
        over = self.step_count == 2 + self.episode % 4
        by_truncation = self.episode % 2 == 1
        reward = float(self.step_count)
        return self._observe(), reward, over and not by_truncation, over and by_truncation, {}


class Blind(Counter):
    """Observes nothing."""

    observation_space = gym.spaces.Box(0.0, 1.0, (0,), np.float32)

    def _observe(self) -> np.ndarray:
        return np.zeros(0, np.float32)


class Given(gym.Env):
    """Observes samples of the space; an episode has `length` steps and ends by termination.

    `reward(env, action)` may look at `env.observation` (the last one) and `env.step_count`.
    """

    def __init__(
        self,
        observation_space: gym.Space = Counter.observation_space,
        action_space: gym.Space = Counter.action_space,
        length: int = 4,
        reward: Callable[[Any, Any], float] = lambda env, action: 1.0,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.length, self.reward = length, reward

    def _observe(self) -> Any:
        self.observation = self.observation_space.sample()
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


class Shows(Given):
    """Shows one observation for ever."""

    def __init__(self, observation_space: gym.Space, shown: Any = None) -> None:
        super().__init__(observation_space)
        self.shown = shown

    def _observe(self) -> Any:
        return self.shown


class Probe(gym.Env):
    """One thing to learn, with a known value.

    constant: one observation, one step, reward 1.
    observation: one step, reward = the observation, which is +1 or -1.
    discount: two steps, the observations 0 and 1, reward 1 at the second.
    action: one step, reward +1 for action 1 and -1 for action 0.
    both: one step, reward +1 if the action matches the observation, else -1.
    truncation: reward 1 a step, truncated after 3 steps, never terminated.

    With a `shape` the observation is an image of one colour, white for +1 and black for the others.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(self, kind: str, shape: Sequence[int] = ()) -> None:
        self.kind, self.shape = kind, tuple(shape)
        self.observation_space = (
            gym.spaces.Box(0, 255, self.shape, np.uint8)
            if shape
            else gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        )

    def _observe(self) -> np.ndarray:
        if self.shape:
            return np.full(self.shape, 255 if self.value > 0 else 0, np.uint8)
        return np.array([self.value], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.step_count = 0
        random = self.kind in ("observation", "both")
        self.value = float(self.np_random.choice([-1.0, 1.0])) if random else 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.step_count += 1
        if self.kind == "truncation":
            return self._observe(), 1.0, False, self.step_count == 3, {}
        if self.kind == "discount" and self.step_count == 1:
            self.value = 1.0
            return self._observe(), 0.0, False, False, {}
        matches = action == (1 if self.kind == "action" else int(self.value > 0))
        reward = {"constant": 1.0, "discount": 1.0, "observation": self.value}.get(
            self.kind, 1.0 if matches else -1.0
        )
        return self._observe(), reward, True, False, {}


class Start(Probe):
    """Actions that start at 1: reward +1 for action 2 and -1 for action 1."""

    action_space = gym.spaces.Discrete(2, start=1)

    def __init__(self) -> None:
        super().__init__("action")

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert self.action_space.contains(action)
        return super().step(action - 1)


class Failing(Counter):
    """Step `fail_at` and those after it, counted over all episodes, raise an error."""

    def __init__(self, fail_at: int = 500) -> None:
        super().__init__()
        self.steps_left = fail_at

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.steps_left -= 1
        if self.steps_left <= 0:
            raise RuntimeError("broken")
        return super().step(action)


class Preprocessed(Counter):
    """Without the noise, as the vector version of an environment may observe something else."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def _observe(self) -> np.ndarray:
        return super()._observe()[:2]


class Scaled(Counter):
    """Rewards times `scale`."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        observation, reward, *rest = super().step(action)
        return observation, self.scale * reward, *rest


class Reach(gym.Env):
    """A point in the plane moves by the action, to a goal that ends the episode.

    The reward is 0 if the point is within 0.3 of the goal, else -1; it is computed for many goals
    at once, and whether an episode ends for one goal only, as AntMaze of gymnasium-robotics does.
    Its Dict is not in the order of the alphabet.
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
    """A native vector version without arguments, in the autoreset mode NEXT_STEP."""
    return SyncVectorEnv([Counter] * num_envs)


def preprocessed(num_envs: int) -> SyncVectorEnv:
    """A native vector version that observes something else than the single version."""
    return SyncVectorEnv([Preprocessed] * num_envs)


def same_step(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    """A native vector version in the other autoreset mode."""
    return SyncVectorEnv([Counter] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)


gym.register("Blind-v0", Blind)
same = gym.spaces.Box(0.5, 0.5, (2,), np.float32)  # all samples of it are equal
for name, space, reward in (
    ("Once-v0", gym.spaces.Discrete(2), lambda env, action: action),
    ("OnceBox-v0", gym.spaces.Box(-1.0, 1.0, (1,), np.float32), lambda env, action: action[0]),
):
    kwargs = dict(observation_space=same, action_space=space, length=1, reward=reward)
    gym.register(name, Given, kwargs=kwargs, disable_env_checker=True)
gym.register("Counter-v0", Counter)
gym.register("CounterSameStep-v0", vector_entry_point=same_step)
gym.register("VectorOnly-v0", vector_entry_point=counters)
gym.register("Preprocessed-v0", Counter, vector_entry_point=preprocessed)
gym.register("TakesKwargs-v0", Scaled, vector_entry_point=counters)
gym.register("Failing-v0", Failing)
gym.register("Start-v0", Start)
gym.register("Reach-v0", Reach, max_episode_steps=9)
gym.register("Probe-v0", Probe)
for kind in ("constant", "observation", "discount", "action", "both", "truncation"):
    gym.register(f"Probe-{kind}-v0", Probe, kwargs={"kind": kind})
gym.register("Image-v0", Probe, kwargs={"kind": "both", "shape": (8, 8)})  # it takes any shape
shapes = {"Probe": (4, 36, 36), "Small": (8, 8), "Grey": (40, 40), "Colour": (40, 40, 3)}
for name, shape in shapes.items():
    image_id = "ProbeImage-v0" if name == "Probe" else f"Image{name}-v0"
    gym.register(image_id, Probe, kwargs={"kind": "both", "shape": shape})


class Chain(FuncEnv):
    """Five states in a row, observed one-hot: action 1 goes right, 0 left, from state 0 on.

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


class Answers(FuncEnv):
    """One step: reward 1 for each of two answers that is right, of three choices and of five.

    The right ones are observed one-hot. The first answer counts from 1, the second from -2.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (8,), np.float32)
    action_space = gym.spaces.MultiDiscrete([3, 5], start=[1, -2])

    def initial(self, rng, params=None):
        return jnp.append(jax.random.randint(rng, (2,), 0, jnp.array([3, 5])), 0)

    def transition(self, state, action, rng, params=None):
        return state.at[2].set(1)

    def observation(self, state, rng, params=None):
        return jnp.concatenate([jax.nn.one_hot(state[0], 3), jax.nn.one_hot(state[1], 5)])

    def reward(self, state, action, next_state, rng, params=None):
        return (action == state[:2] + jnp.array([1, -2])).astype(jnp.float32).sum()

    def terminal(self, state, rng, params=None):
        return state[2] == 1


class Masked(FuncEnv):
    """Four actions, of which a step allows some: reward 1, or 0 for one that is not allowed."""

    observation_space = gym.spaces.Dict(
        action_mask=gym.spaces.Box(0.0, 1.0, (4,), np.float32),
        observation=gym.spaces.Box(0.0, 1.0, (1,), np.float32),
    )
    action_space = gym.spaces.Discrete(4)

    def initial(self, rng, params=None):
        return jax.random.permutation(rng, jnp.array([1.0, 1.0, 0.0, 0.0]))

    def transition(self, state, action, rng, params=None):
        return self.initial(rng)

    def observation(self, state, rng, params=None):
        return {"action_mask": state, "observation": jnp.zeros(1)}

    def reward(self, state, action, next_state, rng, params=None):
        return state[action]

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


def make_jax(env: FuncEnv, **kwargs: Any) -> FunctionalJaxEnv:
    """Makes the Gymnasium environment of one written in JAX."""
    return FunctionalJaxEnv(env, metadata={"render_modes": []}, **kwargs)


def make_jax_vector(env: FuncEnv, num_envs: int, **kwargs: Any) -> FunctionalJaxVectorEnv:
    """Makes its vector version."""
    return FunctionalJaxVectorEnv(env, num_envs, **kwargs)


UNCHECKED = {"max_episode_steps": 9, "disable_env_checker": True}


def register_jax(env_id: str, env: FuncEnv, **options: Any) -> None:
    """Registers an environment written in JAX; its episodes have at most 9 steps."""
    gym.register(env_id, partial(make_jax, env), **UNCHECKED | options)


class ChainOfCells(Chain):
    """Observed as a number, so that it is not compiled."""

    observation_space = gym.spaces.Discrete(5)

    def observation(self, state, rng, params=None):
        return state


time_aware = gym.wrappers.TimeAwareObservation.wrapper_spec()
register_jax("Chain-v0", Chain())
register_jax("Answers-v0", Answers())
register_jax("Masked-v0", Masked())
register_jax("ChainWrapped-v0", Chain(), additional_wrappers=(time_aware,))
cells = ChainOfCells()
register_jax("ChainOfCells-v0", cells, vector_entry_point=partial(make_jax_vector, cells))
