"""DQN (Mnih et al. 2015) on vectorised Gymnasium environments, in one file beside buffers.py.

"Human-level control through deep reinforcement learning", Nature 518; with `--double-q` the target
of van Hasselt et al. 2016, "Deep reinforcement learning with double Q-learning", arXiv 1509.06461.

    python dqn_jax.py --env-id CartPole-v1 --num-envs 8
    tensorboard --logdir runs

Differs from the paper: Adam for RMSProp, no clipping of rewards and errors, hyperparameters for
classic control. An episode that a time limit cuts off is bootstrapped; one that ends is not.

`train` repeats two things: `collect` steps all environments with fixed parameters, `train_step`
learns from that in one compiled call, while the next rollout is being collected. Shape letters:
S steps of a rollout, N environments, B batch.
"""

import copy
import importlib.util
import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers import RecordVideo
from gymnasium.wrappers.vector import TransformAction
from jax.flatten_util import ravel_pytree
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams, text
from tqdm import tqdm

import buffers

# === shared: choice ===
# A flag that may be left to the script: --x, --no-x or neither.
Choice = Annotated[bool | None, tyro.conf.arg(metavar="/ --no-...")]
# === end shared ===


@dataclass(frozen=True)
class Args:
    """Flags of a run."""

    # === shared: experiment flags ===
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """the name of this experiment, part of the name of its folder under runs/"""
    seed: int = 1
    """seed of the environments, the exploration, the network and the replay"""
    env_id: str = "CartPole-v1"
    """the id of a registered Gymnasium environment; module:id imports the module first"""
    total_timesteps: int = 500_000
    """environment steps of all environments together; the last iteration is a whole one"""
    async_envs: bool = False
    """step each environment in a process of its own: pays for slow environments only"""
    log_interval: int = 1_000
    """environment steps between two points of losses/ and charts/SPS"""
    compiled: Choice = None
    """compile environment and training into one program; if not said, where that is possible"""
    num_seeds: int = 1
    """agents trained at once, with this seed and the ones after it; compiled only"""
    num_devices: int = 1
    """devices to spread the seeds over, or the environments of one agent; compiled only"""
    checkpoint_interval: int | None = None
    """environment steps between two checkpoints; if not said one at the end; 0: none at all"""
    keep_checkpoints: int = 2
    """how many of the newest checkpoints are kept: where one is damaged, the one before is used"""
    resume: str | None = None
    """folder of a run to go on with, to the same total-timesteps or more"""
    eval_episodes: int = 10
    """episodes of an evaluation, in which the agent does not explore; 0: no evaluation"""
    eval_interval: int | None = None
    """environment steps between two evaluations; if not said one at the end"""
    evaluate: str | None = None
    """folder of a run whose newest checkpoint is evaluated, without any training"""
    capture_video: bool = False
    """record an episode of each evaluation, an MP4 in videos/ of the run's folder"""
    track: bool = False
    """log to Weights & Biases, too"""
    wandb_project_name: str = "cleanreplay"
    """project in Weights & Biases"""
    wandb_entity: str | None = None
    """team or user in Weights & Biases; if not said that of the login"""
    # === end shared ===
    num_envs: int = 1
    """environments stepped together; the ratio of gradient to environment steps stays the same"""
    learning_rate: float = 2.5e-4
    """step size of Adam"""
    buffer_size: int = 10_000
    """transitions that the replay buffer holds"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """how far the target network moves towards the online one when it is updated"""
    target_network_frequency: int = 500
    """environment steps between two updates of the target network"""
    batch_size: int = 128
    """transitions of one gradient step"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """probability of a random action once exploration-fraction is over"""
    exploration_fraction: float = 0.5
    """fraction of total-timesteps in which start-e goes linearly to end-e"""
    learning_starts: int = 10_000
    """environment steps before the first gradient step"""
    train_frequency: int = 10
    """environment steps, of all environments together, for one gradient step"""
    n_step: int = 1
    """rewards summed in a target before it bootstraps, fewer at the end of an episode"""
    double_q: bool = False
    """let the online network choose the action whose target value is bootstrapped from"""


# === shared: environments ===
class UsageError(ValueError):
    """A mistake in the flags, found before any training."""


def require(ok: bool, message: str) -> None:
    """Raises UsageError unless `ok`."""
    if not ok:
        raise UsageError(message)


def functional(envs: VectorEnv) -> Any:
    """The functional environment behind `envs`, None if there is none or wrappers change it."""
    spec: Any = envs.spec
    inner = getattr(envs.unwrapped, "envs", [envs])[0].unwrapped
    env = copy.copy(getattr(inner, "func_env", None))
    # Gymnasium puts jitted and batched functions of the instance before the pure ones of the class.
    for name in ("initial", "transition", "observation", "reward", "terminal") if env else ():
        vars(env).pop(name, None)
    return None if spec.additional_wrappers else env


def make_envs(args: Any) -> VectorEnv:
    """The environment's native vector version where that pays, else a sync or an async one.

    If training is to be compiled a single one, for its spaces and its functions.
    """
    for name, library in (("capture_video", "moviepy"), ("track", "wandb")):
        missing = getattr(args, name) and importlib.util.find_spec(library) is None
        require(not missing, f"{name} needs {library}: pip install {library}")
    try:
        module, _, name = args.env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        spec, n, native = gym.spec(name), args.num_envs, "vector_entry_point"
        if args.compiled is not False and not args.async_envs:
            envs = gym.make_vec(spec, 1, "sync" if spec.entry_point else native)
            if functional(envs) is not None:
                return envs
            envs.close()
        ordinary = not args.compiled and args.num_seeds == args.num_devices == 1
        message = "compiled, num_seeds and num_devices are for functional environments"
        require(ordinary, f"{message}, which {args.env_id} is not, and not for async_envs")
        if spec.vector_entry_point and not args.async_envs and (n >= 4 or not spec.entry_point):
            envs = gym.make_vec(spec, n, native)
            # Gymnasium 1.4 steps functional environments wrongly: those that did not reset in a
            # step are put back to where they were.
            if functional(envs) is None:
                return envs
        mode, options = ("async", {"context": "spawn"}) if args.async_envs else ("sync", {})
        return gym.make_vec(spec, n, mode, vector_kwargs={"copy": False, **options})
    except (gym.error.Error, ImportError) as error:
        raise UsageError(f"env_id {args.env_id}: {error}") from error


def check_envs(args: Any, envs: VectorEnv) -> None:
    """Raises UsageError unless `collect` and the networks can work with these environments."""
    space: Any = envs.single_observation_space
    box, name = isinstance(space, gym.spaces.Box), f"env_id {args.env_id}"
    require(box, f"{name}: observations must be a Box, got {space}: wrap it in FlattenObservation")
    large = not is_image(space.shape, space.dtype) or sorted(space.shape)[-2] >= 36
    require(large, f"{name}: images must be 36x36 or more, got {space}: use ResizeObservation")
    mode = envs.metadata.get("autoreset_mode")
    known = mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    require(known, f"{name}: metadata['autoreset_mode'] must be NEXT_STEP or SAME_STEP, got {mode}")
    spec: Any = envs.spec
    modes = envs.metadata.get("render_modes", []) if spec.entry_point else []
    ok = not args.capture_video or "rgb_array" in modes
    require(ok, f"{name}: capture_video takes render mode rgb_array, a single one has {modes}")


def check_devices(args: Any, *parts: str) -> None:
    """Raises UsageError unless the seeds, or these `parts` of one agent, spread over devices."""
    found = args.num_devices if args.evaluate else jax.local_device_count()
    message = f"num_devices {args.num_devices}"
    require(args.num_devices <= found, f"{message} is more than this machine has, {found}")
    for name in parts if args.num_seeds == 1 else ("num_seeds",):
        value = getattr(args, name)
        require(value % args.num_devices == 0, f"{message} must divide {name}, got {value}")


def discrete_actions(space: Any) -> tuple[int, Callable | None]:
    """How many actions a space has, and what makes it [N, ...] of 0 ... n - 1, if anything has to.

    0 if it is neither Discrete nor one integer of a Box, as in Gymnasium's tabular environments.
    """
    if isinstance(space, gym.spaces.Discrete):
        start = int(space.start)
        return int(space.n), (lambda action: action + start) if start else None
    if not isinstance(space, gym.spaces.Box) or space.shape != (1,) or space.dtype.kind not in "iu":
        return 0, None
    low, high = int(space.low[0]), int(space.high[0])
    return high - low + 1, lambda action: action.reshape(-1, 1) + low


# === end shared ===


# === shared: network torso ===
def is_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an observation is a uint8 image: [H, W], [H, W, C] or [C, H, W]."""
    return dtype == np.uint8 and len(shape) in (2, 3)


class NatureCNN(nn.Module):
    """Features [B, 512] of images [B, ...], by the convolutions of Mnih et al. 2015."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim == 3:
            x = x[..., None]
        elif x.shape[1] < x.shape[3]:  # Gymnasium stacks frames in front
            x = jnp.moveaxis(x, 1, -1)
        x = x.astype(jnp.float32) / 255.0
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), (stride, stride), padding="VALID")(x))
        return nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))


def flatten_network(network: nn.Module, observation: Any) -> tuple[Callable, Callable, Callable]:
    """Parameters as one vector [P]: passing an array to a program costs as much as a layer.

    Returns:
      `init(key)`, which gives them for observations like this one; `unravel(params)`, which makes
      them what the network takes, best outside of loops; `apply(params, observations)`.
    """
    shapes = jax.eval_shape(network.init, jax.random.PRNGKey(0), observation[None])
    unravel = ravel_pytree(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes))[1]

    def init(key: jax.Array) -> jax.Array:
        return ravel_pytree(network.init(key, observation[None]))[0]

    return init, unravel, lambda params, x: network.apply(unravel(params), x)


# === end shared ===


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if is_image(x.shape[1:], x.dtype):
            x = NatureCNN()(x)
        else:
            x = x.reshape(x.shape[0], -1).astype(jnp.float32)
            x = nn.relu(nn.Dense(120)(x))
            x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)


# === shared: transition ===
class Transition(NamedTuple):
    """A step of an environment, [...], or of N of them S times, [S, N, ...]."""

    observation: Any
    action: Any
    reward: Any  # float32
    next_observation: Any  # at the end of an episode its true last one
    terminated: Any  # bool, the episode ended by itself
    truncated: Any  # bool, it was cut off


# === end shared ===


# === shared: devices ===
def shards(args: Any) -> int:
    """Over how many devices the environments and batches of one agent are spread."""
    return args.num_devices if args.num_seeds == 1 else 1


def over_devices(reduce: Callable, x: Any, args: Any) -> Any:
    """`reduce`, as jax.lax.psum, of x over these devices."""
    return reduce(x, "devices") if shards(args) > 1 else x


# === end shared ===


class Agent(NamedTuple):
    """All that training changes."""

    params: jax.Array  # [P], see `flatten_network`
    target_params: jax.Array  # [P]
    opt_state: optax.OptState
    replay: Any  # the buffer's state, of (Transition, mask or None)
    key: jax.Array  # [2] uint32
    since_target: jax.Array  # [] int32, environment steps since the target network moved


class Result(NamedTuple):
    """What `train` returns."""

    agent: Agent  # with num_seeds > 1 of all of them, [num_seeds, ...]
    returns: list[float]  # of the last 100 episodes, oldest first; or the mean for each seed
    folder: str  # where the run was logged; that of the first seed


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to exactly `end` at step `duration` and after it."""
    return end if step >= duration else start + (end - start) * step / duration


def epsilon_greedy(
    greedy: Callable, explore: np.ndarray, random_actions: np.ndarray, t: int, observation: Any
) -> np.ndarray:
    """Actions [N] at step t: those of `random_actions` [S, N] where `explore` [S, N] says so."""
    if explore[t].all():  # a call of the network saved
        return random_actions[t]
    actions = np.array(greedy(observation))
    np.copyto(actions, random_actions[t], where=explore[t], casting="same_kind")
    return actions


class Batch(NamedTuple):
    """What a gradient step is made from."""

    transition: Transition  # [B, ...], of n steps or fewer
    discount: jax.Array  # [B] factor of the bootstrapped value, 0 if terminated
    valid: jax.Array  # [B] bool, False where there was only a reset


def select(values: jax.Array, action: jax.Array) -> jax.Array:
    """values[b, action[b]], [B]. A product and not an index: the gradient of that is a scatter."""
    return jnp.sum(values * jax.nn.one_hot(action, values.shape[-1]), axis=-1)


def td_target(batch: Batch, next_q: jax.Array, chooser: jax.Array) -> jax.Array:
    """Targets [B]: r + discount * Q(s', argmax_a chooser(s', a)), and r alone if s' is terminal.

    `next_q` [B, num_actions] comes from the target network. `chooser` [B, num_actions] is the same
    (Mnih et al. 2015, algorithm 1), or from the online network (van Hasselt et al. 2016, eq. 4).
    """
    bootstrap = select(next_q, jnp.argmax(chooser, axis=-1))
    return batch.transition.reward + batch.discount * bootstrap


def loss_fn(
    params: Any, target_params: Any, batch: Batch, q: Callable, args: Args
) -> tuple[jax.Array, jax.Array]:
    """Mean squared TD error and mean Q(s, a) of a batch [B]; `q(params, observations)`.

    On several devices this one's part of them: their sum is the mean over all.
    """
    transition, _, valid = batch
    next_q = q(target_params, transition.next_observation)
    chooser = q(params, transition.next_observation) if args.double_q else next_q
    target = jax.lax.stop_gradient(td_target(batch, next_q, chooser))
    value = select(q(params, transition.observation), transition.action)
    rows = jnp.maximum(over_devices(jax.lax.psum, valid.sum(), args), 1)
    loss = jnp.sum((target - value) ** 2, where=valid) / rows
    return loss, jnp.sum(value, where=valid) / rows


def make_replay(args: Args, example: Transition, once: bool) -> tuple[Any, tuple]:
    """The buffer and what it holds an item of: transitions, or steps of streams.

    From streams of N environments windows are drawn, for n_step > 1, or `once`: to store each
    observation once, as the next one of the step before. They hold the steps that only reset, too,
    and with them the mask.
    """
    factory = partial(buffers.uniform_replay, args.buffer_size)
    if args.n_step == 1 and not once:
        return factory(sequence_length=1), (example, None)
    try:
        replay = factory(num_envs=args.num_envs, sequence_length=args.n_step + once)
    except ValueError as error:
        raise UsageError(f"buffer_size or n_step: {error}") from error
    return replay, (example._replace(next_observation=None) if once else example, np.True_)


def store(agent: Agent, rollout: Transition, mask: Any, replay: Any) -> Agent:
    """Puts a rollout [S, N] into the replay buffer, as `make_replay` made it."""
    stored, is_step = agent.replay.storage
    if stored.next_observation is None:
        rollout = rollout._replace(next_observation=None)
    if is_step is not None:
        return agent._replace(replay=replay.add_batch(agent.replay, (rollout, mask)))
    items = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout)
    return agent._replace(replay=replay.add_batch(agent.replay, (items, None), mask.reshape(-1)))


def cut_off(agent: Agent, window: int) -> Agent:
    """No start of a window that would go on past the newest step, where an environment restarts."""
    _, mask = agent.replay.storage
    if mask is None:
        return agent
    rows = np.arange(agent.replay.cursor - (window - 1), agent.replay.cursor) % len(mask)
    mask[rows] = False
    return agent


def train_step(
    agent: Agent,
    rollout: Transition,
    mask: Any,
    args: Args,
    replay: Any,
    q: Callable,
    optimizer: optax.GradientTransformation,
) -> tuple[Agent, dict[str, jax.Array]]:
    """Stores a rollout [S, N] and makes S * N / train_frequency gradient steps."""
    agent = store(agent, rollout, mask, replay)

    def update(agent: Agent, key: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
        sample = replay.sample(agent.replay, key, args.batch_size)
        window, mask = sample.experience
        batch = Batch(*buffers.n_step_transition(window, args.gamma, mask))
        (loss, value), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            agent.params, agent.target_params, batch, q, args
        )
        loss, value, grads = over_devices(jax.lax.psum, (loss, value, grads), args)
        updates, opt_state = optimizer.update(grads, agent.opt_state)
        params = optax.apply_updates(agent.params, updates)
        since_target = agent.since_target + args.train_frequency
        tau = jnp.where(since_target >= args.target_network_frequency, args.tau, 0.0)
        agent = agent._replace(
            params=params,
            target_params=optax.incremental_update(params, agent.target_params, tau),
            opt_state=opt_state,
            since_target=since_target % args.target_network_frequency,
        )
        metrics = {"losses/td_loss": loss, "losses/q_values": value}
        return agent, metrics

    key, subkey = jax.random.split(agent.key)
    keys = jax.random.split(subkey, mask.size * shards(args) // args.train_frequency)
    agent, metrics = jax.lax.scan(update, agent._replace(key=key), keys)
    metrics = jax.tree.map(jnp.mean, metrics)
    return agent, metrics


# === shared: collector ===
class EnvState(NamedTuple):
    """Where N environments stand between two rollouts."""

    observation: Any  # [N, ...]
    resetting: Any  # [N] bool, the next step ignores its action and only resets
    episode_return: Any  # [N] float64, so far; float32 in a compiled program
    episode_length: Any  # [N] int64, so far; int32
    inner: Any = None  # [N, ...], the state of a functional environment


def reset_envs(envs: VectorEnv, seed: int, begun: int = 0) -> EnvState:
    """All environments at the start of an episode, after `begun` steps of a run that goes on.

    Ordinary environments cannot be saved. The episodes that were cut short count in no statistic.
    """
    if begun:
        print("the environments start new episodes")
    n = envs.num_envs
    return EnvState(
        envs.reset(seed=seed + begun)[0], np.zeros(n, bool), np.zeros(n), np.zeros(n, int)
    )


def example_transition(envs: VectorEnv) -> Transition:
    """Zeros of the shapes and dtypes of one step: uint8 is kept, else int32 and float32."""

    def zeros(space: Any) -> np.ndarray:
        integer = np.int32 if np.issubdtype(space.dtype, np.integer) else np.float32
        return np.zeros(space.shape, np.uint8 if space.dtype == np.uint8 else integer)

    observation, action = zeros(envs.single_observation_space), zeros(envs.single_action_space)
    return Transition(observation, action, np.float32(0), observation, np.False_, np.False_)


def collect(
    envs: VectorEnv, state: EnvState, act: Callable, num_steps: int, example: Transition
) -> tuple[EnvState, Transition, np.ndarray, list[tuple[float, int]]]:
    """Takes the actions [N] `act(t, observation)` for t = 0 ... S - 1 in N environments.

    In NEXT_STEP autoreset mode the step after the end of an episode only resets: it is no part of
    any episode, and its mask is False. The last observation of an episode is what its last step
    returned. In SAME_STEP mode no step is masked, and that observation is in `info`.

    Returns:
      The new state; transitions [S, N]; their mask [S, N]; the (return, length) of each episode
      that ended.
    """
    same_step = envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    lead = (num_steps, envs.num_envs)
    rollout = Transition(*(np.empty(lead + x.shape, x.dtype) for x in example))
    observation, infos = state.observation, []
    for t in range(num_steps):
        rollout.observation[t] = observation  # now: the step may write over it
        rollout.action[t] = action = act(t, observation)
        observation, reward, terminated, truncated, info = envs.step(action)
        rollout.reward[t] = reward
        rollout.terminated[t], rollout.truncated[t] = terminated, truncated
        infos.append(info)
    rollout.next_observation[:-1] = rollout.observation[1:]
    rollout.next_observation[-1] = observation
    done = rollout.terminated | rollout.truncated
    mask, resetting = np.ones_like(done), np.zeros_like(done[0])
    if same_step:
        for t, i in np.argwhere(done):
            rollout.next_observation[t, i] = infos[t]["final_obs"][i]
    else:
        mask[0], mask[1:], resetting = ~state.resetting, ~done[:-1], done[-1]

    returns, lengths = state.episode_return.copy(), state.episode_length.copy()
    episodes: list[tuple[float, int]] = []
    start = 0
    for end in (np.flatnonzero(done.any(axis=1)) + 1).tolist():
        returns += rollout.reward[start:end].sum(axis=0)
        lengths += mask[start:end].sum(axis=0)
        over, start = done[end - 1], end
        episodes += zip(returns[over].tolist(), lengths[over].tolist(), strict=True)
        returns[over] = lengths[over] = 0
    returns += rollout.reward[start:].sum(axis=0)
    lengths += mask[start:].sum(axis=0)
    return EnvState(observation, resetting, returns, lengths), rollout, mask, episodes


class Functional(NamedTuple):
    """A functional environment, and how an agent sees it."""

    env: Any  # gymnasium.experimental.functional.FuncEnv
    time_limit: int | None  # steps of an episode
    to_env: Callable  # from an agent's actions [N] to those of N environments
    example: Transition  # of one step


class Episodes(NamedTuple):
    """Sums over the episodes that ended."""

    ended: jax.Array  # [] int32
    returns: jax.Array  # [] float32
    lengths: jax.Array  # [] int32


def reset_functional(functional: Functional, key: jax.Array) -> EnvState:
    """A functional environment at the start of an episode."""
    env, example = functional.env, functional.example
    inner, action = env.initial(key), functional.to_env(example.action[None])[0]
    # Some environments start in other dtypes and shapes than they go on in.
    inner = jax.tree.map(
        lambda x, to: jnp.broadcast_to(jnp.asarray(x, to.dtype), to.shape),
        inner,
        jax.eval_shape(env.transition, inner, action, key),
    )
    observation = jnp.asarray(env.observation(inner, key), example.observation.dtype)
    return EnvState(observation, jnp.bool_(False), jnp.float32(0), jnp.int32(0), inner)


def step_functional(
    functional: Functional, state: EnvState, action: Any, keys: jax.Array, start: Any
) -> tuple[EnvState, tuple[jax.Array, jax.Array, jax.Array]]:
    """A step of a functional environment in NEXT_STEP mode: reward, terminated, truncated.

    `start` is the environment's state if this step has to reset.
    """
    env, (key, observation_key) = functional.env, keys
    goes_on, after = ~state.resetting, env.transition(state.inner, action, key)
    reward = jnp.reshape(env.reward(state.inner, action, after, key), ()).astype(jnp.float32)
    reward = jnp.where(goes_on, reward, 0.0)
    terminated = goes_on & jnp.reshape(env.terminal(after, key), ()).astype(bool)
    length = state.episode_length + goes_on
    truncated = length >= functional.time_limit if functional.time_limit else jnp.bool_(False)
    done = terminated | truncated
    sums = jnp.where(done, 0.0, state.episode_return + reward), jnp.where(done, 0, length)
    inner = jax.tree.map(
        lambda start, x, old: jnp.where(goes_on, x, start).astype(old.dtype),
        start,
        after,
        state.inner,
    )
    observation = env.observation(inner, observation_key).astype(state.observation.dtype)
    return EnvState(observation, done, *sums, inner), (reward, terminated, truncated)


def collect_functional(
    functional: Functional, state: EnvState, act: Callable, num_steps: int, key: jax.Array
) -> tuple[EnvState, Transition, jax.Array, Episodes]:
    """What `collect` does, inside a compiled program, of a functional environment."""
    keys = jax.random.split(key, (num_steps, len(state.resetting), 3))
    # To draw all starts at once takes a tenth of the time, and memory for a state of each step.
    size = num_steps * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.inner))
    initial = jax.vmap(functional.env.initial)
    starts = jax.vmap(initial)(keys[:, :, 2]) if size < 2**26 else None

    def step(state: EnvState, x: tuple) -> tuple[EnvState, tuple]:
        t, keys, start = x
        action = act(t, state.observation)
        start = initial(keys[:, 2]) if start is None else start
        after, (reward, terminated, truncated) = jax.vmap(partial(step_functional, functional))(
            state, functional.to_env(action), keys[:, :2], start
        )
        row = Transition(state.observation, action, reward, None, terminated, truncated)
        return after, (row, ~state.resetting)

    every = (jnp.arange(num_steps), keys, starts)
    after, (rollout, mask) = jax.lax.scan(step, state, every)
    following = jnp.concatenate([rollout.observation[1:], after.observation[None]])
    # What has ended is all that came in, less what goes on.
    episodes = Episodes(
        jnp.sum(rollout.terminated | rollout.truncated),
        state.episode_return.sum() + rollout.reward.sum() - after.episode_return.sum(),
        state.episode_length.sum() + mask.sum() - after.episode_length.sum(),
    )
    return after, rollout._replace(next_observation=following), mask, episodes


# === end shared ===


# === shared: checkpoints ===
# What may differ from the flags that a run was started with when it goes on or is evaluated.
FREE = (
    *("resume", "evaluate", "total_timesteps", "checkpoint_interval", "keep_checkpoints"),
    *("eval_episodes", "eval_interval", "log_interval", "async_envs", "capture_video"),
    *("track", "wandb_project_name", "wandb_entity"),
)


def load_args(args_type: type, folder: str, **changes: Any) -> Any:
    """The flags that the run in `folder` was started with, and `changes`."""
    try:
        with open(os.path.join(folder, "args.json")) as file:
            return args_type(**json.load(file) | changes)
    except (OSError, ValueError, TypeError) as error:
        message = f"{folder} must be the folder of a run of this script, with its args.json: "
        raise UsageError(f"{message}{error}") from error


def save_args(args: Any, folder: str) -> None:
    """Writes args.json, whole or not at all."""
    flags = {k: v for k, v in vars(args).items() if k not in ("resume", "evaluate")}
    path = os.path.join(folder, "args.json")
    with open(f"{path}.tmp", "w") as file:
        json.dump(flags, file, indent=2)
    os.replace(f"{path}.tmp", path)


def check_resumed(args: Any, folder: str) -> None:
    """Raises UsageError unless the run in `folder` can go on, or be evaluated, with these flags."""
    before = load_args(type(args), folder)
    for name, value in vars(before).items():
        message = f"{name} {getattr(args, name)}: the run in {folder} was started with {value}"
        require(name in FREE or getattr(args, name) == value, f"{message}: leave the flag out")
    message = f"total_timesteps {args.total_timesteps} is less than the {before.total_timesteps}"
    ok = args.total_timesteps >= before.total_timesteps
    require(ok, f"{message} of the run in {folder}: give the same or more")


def due(interval: int | None, step: int, steps: int) -> bool:
    """Whether the last `steps` steps up to `step` crossed a multiple of the interval, if any."""
    return bool(interval) and step // interval > (step - steps) // interval  # type: ignore


def needs_state(args: Any, step: int, steps: int) -> bool:
    """Whether what is reached at `step` is saved or evaluated: training has to wait for that."""
    intervals = (args.checkpoint_interval, args.eval_interval)
    return any(due(interval, step, steps) for interval in intervals)


def saved_steps(folder: str) -> list[int]:
    """The steps of the checkpoints in a folder of them, oldest first."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return sorted(int(name) for name in names if name.isdigit())


def checksum(arrays: list[np.ndarray]) -> np.ndarray:
    """CRC-32: what is read back unharmed in form may still be wrong."""
    crc = 0
    for x in arrays:
        crc = zlib.crc32(np.ascontiguousarray(x).view(np.uint8).data, crc)
    return np.array([crc], np.uint32)


def save_checkpoint(args: Any, folder: str, step: int, state: Any, returns: Any) -> None:
    """Saves the state of training, whole or not at all; a failure is told and training goes on."""
    folder = os.path.abspath(os.path.join(folder, "checkpoints"))
    try:
        for name in os.listdir(folder) if os.path.isdir(folder) else []:
            if not name.isdigit():  # what a killed run, or a full disk, left half written
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        arrays = [np.asarray(x) for x in jax.device_get(jax.tree.leaves(state)) if x.size]
        arrays.append(np.array([[*x, *[np.nan] * (100 - len(x))] for x in returns]))
        needs, free = sum(x.nbytes for x in arrays), shutil.disk_usage(os.path.dirname(folder)).free
        if needs > free:  # orbax would fill the disk, and say so in hundreds of lines
            raise OSError(f"it takes {needs / 1e6:.1f} MB, and {free / 1e6:.1f} MB are free")
        # Waits until it is written: the next call of training would write over what is read here.
        with ocp.PyTreeCheckpointer() as checkpointer:
            tree = {"arrays": arrays, "checksum": checksum(arrays)}
            checkpointer.save(os.path.join(folder, str(step)), tree, force=True)
        saved = saved_steps(folder)
        older = [x for x in saved if x <= step][: -args.keep_checkpoints]
        for x in older + [x for x in saved if x > step]:  # later: they were found to be damaged
            shutil.rmtree(os.path.join(folder, str(x)))
    except Exception as error:  # tensorstore raises many kinds
        print(f"no checkpoint of step {step}, training goes on: {error}", file=sys.stderr)


def load_checkpoint(folder: str, like: Any) -> tuple[int, Any, list[list[float]]]:
    """Step, state and returns of the newest checkpoint that is whole; a state is like `like`."""
    path = os.path.abspath(os.path.join(folder, "checkpoints"))
    shapes, structure = jax.tree.flatten(like)
    for step in reversed(saved_steps(path)):
        try:
            with ocp.PyTreeCheckpointer() as checkpointer:
                tree = checkpointer.restore(os.path.join(path, str(step)))
            if (checksum(tree["arrays"]) != tree["checksum"]).any():
                raise ValueError("the checksum is another one")
            *arrays, returns = tree["arrays"]
            rest = iter(arrays)
            leaves = [next(rest) if x.size else np.zeros(x.shape, x.dtype) for x in shapes]
            for i, (x, wanted) in enumerate(zip(leaves, shapes, strict=True)):
                if (x.shape, x.dtype) != (wanted.shape, wanted.dtype):
                    raise ValueError(f"array {i} is {x.dtype}{x.shape}, not {wanted}")
            return (
                step,
                jax.tree.unflatten(structure, leaves),
                [x[x == x].tolist() for x in returns],
            )
        except Exception as error:
            message = f"checkpoint {os.path.join(path, str(step))} is damaged and skipped"
            print(f"{message}: {error}", file=sys.stderr)
    message = f"{folder} has no checkpoint that is whole: start the run anew"
    raise UsageError(f"{message} (num_seeds > 1: they are in the folder of the first seed)")


class Greedy(NamedTuple):
    """How an agent acts when it is evaluated."""

    view: Callable  # from an agent to what acting takes of it
    act: Callable  # from that and observations [N, ...] to actions [N]
    to_env: Callable | None  # from these to the environment's


def evaluator(args: Any, greedy: Greedy, functional: Any) -> Callable:
    """What evaluates a state of training, given a folder and the step for a video.

    It returns the returns of eval_episodes episodes for each agent, [[]] of floats, and the file
    with a video of the first agent if there is one.
    """
    act, limit = jax.jit(greedy.act), 10_000  # some episodes would never end
    first_seed = args.seed + 1_000_000  # that training does not use; the same at each evaluation

    def play(view: Any, episodes: int, **options: Any) -> list[float]:
        """Returns of episodes one after the other; `options` for the environment."""
        spec: Any = copy.copy(gym.spec(args.env_id.rpartition(":")[2]))
        spec.max_episode_steps = spec.max_episode_steps or limit
        mode, returns = "sync" if spec.entry_point else "vector_entry_point", []
        envs = gym.make_vec(spec, 1, mode, **options)
        with closing(TransformAction(envs, greedy.to_env) if greedy.to_env else envs) as envs:
            for episode in range(episodes):
                observation, _ = envs.reset(seed=first_seed + episode)
                total, done = 0.0, False
                while not done:
                    action = np.asarray(act(view, observation))
                    observation, reward, terminated, truncated, _ = envs.step(action)
                    total, done = total + float(reward[0]), bool(terminated[0] | truncated[0])
                returns.append(total)
        return returns

    def record(view: Any, folder: str) -> str | None:
        """Plays the first episode for a video of at most 1,000 frames; a failure is told."""
        options: dict[str, Any] = dict(
            video_folder=folder, name_prefix="evaluation", video_length=1_000
        )
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame needs no screen
        try:
            play(view, 1, render_mode="rgb_array", wrappers=[partial(RecordVideo, **options)])
        except Exception as error:  # of the environment, the encoder or the disk
            tqdm.write(f"no video in {folder}, the run goes on: {error}", file=sys.stderr)
            return None
        return os.path.join(folder, "evaluation-episode-0.mp4")

    def one(view: Any, seed: jax.Array) -> jax.Array:
        """An episode in each of eval_episodes functional environments."""
        n, (reset_key, key) = args.eval_episodes, jax.random.split(jax.random.PRNGKey(seed))
        keys = jax.random.split(reset_key, n)
        envs = jax.vmap(partial(reset_functional, functional))(keys)

        def step(carry: tuple) -> tuple:
            t, envs, over, total = carry
            keys = jax.random.split(jax.random.fold_in(key, t), (n, 2))
            action = functional.to_env(greedy.act(view, envs.observation))
            after, (reward, _, _) = jax.vmap(partial(step_functional, functional))(
                envs, action, keys, envs.inner
            )
            return t + 1, after, over | after.resetting, total + jnp.where(over, 0.0, reward)

        carry = (0, envs, jnp.zeros(n, bool), jnp.zeros(n))
        return jax.lax.while_loop(lambda c: ~c[2].all() & (c[0] < limit), step, carry)[3]

    compiled = jax.jit(jax.vmap(one))

    def evaluate(state: Any, folder: str, step: int) -> tuple[list[list[float]], str | None]:
        if functional is None:
            view = jax.device_put(greedy.view(state))
            returns = [play(view, args.eval_episodes)]
        else:
            views = jax.tree.map(lambda x: x[: args.num_seeds], greedy.view(state.agent))
            seeds = np.arange(args.num_seeds) + first_seed
            returns = np.asarray(compiled(views, seeds.astype(np.uint32))).tolist()
            view = jax.tree.map(lambda x: x[0], views)
        folder = os.path.join(folder, "videos", str(step))
        return returns, record(view, folder) if args.capture_video else None

    return evaluate


# === end shared ===


# === shared: run ===
METRICS = ("charts/final_return", "eval/episodic_return")  # of TensorBoard's table of runs
FLUSH_SECONDS = 10.0


class EventFile:
    """TensorBoard's file of a run. Where it cannot be written, training goes on without.

    SummaryWriter writes in a thread of its own: a full disk ends that, and training would wait for
    it for ever.
    """

    def __init__(self, folder: str, suffix: str = "") -> None:
        self.path, self.suffix = os.path.join(folder, "events"), suffix
        self.file: EventsWriter | None = None
        self.open()

    def open(self) -> None:
        """Starts a file. Raises OSError if it cannot be written."""
        self.flushed = time.time()
        file = EventsWriter(self.path, self.suffix)
        file.flush()
        self.file = file

    def add(self, step: int, **content: Any) -> None:
        """Writes an event, such as one with a `summary`."""
        now = time.time()
        try:
            if self.file is None and now - self.flushed >= FLUSH_SECONDS:
                self.open()  # the last event of the file before may be cut off
            if self.file:
                self.file.write_event(Event(wall_time=now, step=step, **content))
                if now - self.flushed >= FLUSH_SECONDS:
                    self.flush()
        except OSError as error:
            self.fail(error)

    def flush(self, close: bool = False) -> None:
        """Writes what is buffered."""
        self.flushed = time.time()
        try:
            if self.file:
                self.file.close() if close else self.file.flush()
        except OSError as error:
            self.fail(error)

    def fail(self, error: OSError) -> None:
        """Gives the file up; `add` will try another one."""
        if self.file:
            tqdm.write(f"{self.path}: logging pauses, training goes on: {error}", file=sys.stderr)
        self.file = None


class Run(NamedTuple):
    """What a run is logged with."""

    folder: str
    events: EventFile
    tracked: Any  # the same run in Weights & Biases, or None
    progress: tqdm
    returns: deque[float]  # of the last 100 episodes, oldest first
    start_time: float  # in seconds
    first: int  # environment steps before that
    interrupts: list[int]  # signals that ask to stop


def run_folders(args: Any) -> list[str]:
    """A folder under runs/ for each seed; those of before if a run goes on."""
    seeds = range(args.seed, args.seed + args.num_seeds)
    if args.resume:
        first = os.path.normpath(args.resume)
        head, _, end = first.rpartition(f"__{args.seed}__")
        return [first] + [f"{head}__{seed}__{end}" for seed in seeds[1:]]
    name, end = f"{args.env_id}__{args.exp_name}".replace("/", "-").replace(":", "-"), ""
    while True:  # the same run may be started twice within a second
        stamp = f"{int(time.time())}{end}"
        folders = [os.path.join("runs", f"{name}__{seed}__{stamp}") for seed in seeds]
        if not any(map(os.path.exists, folders)):
            return folders
        end += "_"


def track(args: Any, folder: str) -> Any:
    """The run of that folder in Weights & Biases, None if not asked for."""
    if not args.track:
        return None
    import wandb

    name = os.path.basename(folder)
    try:
        tracked = wandb.init(
            project=args.wandb_project_name,
            entity=args.wandb_entity,
            id=name,
            name=name,
            config=vars(args),
            save_code=True,
            resume="allow",
            reinit="create_new",  # one for each seed
        )
    except wandb.Error as error:
        raise UsageError(f"track: {error}") from error
    tracked.define_metric("*", step_metric="global_step")
    return tracked


def start_run(args: Any, folder: str, first: int, returns: list[float], quiet: bool) -> Run:
    """Makes the folder with the flags in it, and a progress bar on a terminal."""
    # Ctrl-C is taken between iterations: within a write it could leave an event half written.
    interrupts: list[int] = []

    def interrupt(signum: int, _: Any) -> None:
        interrupts.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second stops at once

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    tracked = track(args, folder)
    try:
        os.makedirs(folder, exist_ok=True)
        save_args(args, folder)
        events = EventFile(folder, f".{first}" if args.resume else "")
    except OSError as error:
        raise UsageError(f"{folder} must be a folder that can be written: {error}") from error
    if args.resume:  # TensorBoard drops what was logged after the checkpoint
        events.add(first + 1, file_version="brain.Event:2")
        events.add(first + 1, session_log=SessionLog(status=SessionLog.START))
    rows = "\n".join(f"|{field.name}|{getattr(args, field.name)}|" for field in fields(args))
    table = text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    for summary in (table, *hparams(vars(args), dict.fromkeys(METRICS))[:2]):
        events.add(first, summary=summary)
    total, disable = args.total_timesteps, quiet or None
    progress = tqdm(total=total, initial=first, unit=" steps", disable=disable, dynamic_ncols=True)
    recent = deque(returns, maxlen=100)
    return Run(folder, events, tracked, progress, recent, time.time(), first, interrupts)


def write(run: Run, step: int, values: dict[str, float]) -> None:
    """One event with all values, in Weights & Biases as well."""
    values = {tag: float(x) for tag, x in values.items()}
    points = [Summary.Value(tag=tag, simple_value=x) for tag, x in values.items()]
    run.events.add(step, summary=Summary(value=points))
    if run.tracked:
        run.tracked.log({**values, "global_step": step})


def log(run: Run, args: Any, step: int, steps: int, episodes: list, metrics: dict) -> None:
    """Logs what the last `steps` environment steps up to `step` gave.

    Of the episodes that ended in them the mean, at once. The metrics when log_interval is crossed:
    to read them is to wait for the device. Raises KeyboardInterrupt if asked to stop.
    """
    values: dict[str, float] = {}
    if episodes:
        returns, lengths = zip(*episodes, strict=True)
        run.returns.extend(returns)
        values["charts/episodic_return"] = sum(returns) / len(returns)
        values["charts/episodic_length"] = sum(lengths) / len(lengths)
    if due(args.log_interval, step, steps):
        values |= jax.device_get(metrics)
        values["charts/SPS"] = int((step - run.first) / (time.time() - run.start_time))
        if run.returns:
            mean = sum(run.returns) / len(run.returns)
            run.progress.set_postfix_str(f"return {mean:.1f}", refresh=False)
    if values:
        write(run, step, values)
    run.progress.update(steps)
    if run.interrupts:
        raise KeyboardInterrupt


def run_training(args: Any, start: Callable, evaluate: Callable) -> tuple[Any, list[float], str]:
    """Logs what training gives, for each of num_seeds runs, and returns what a Result is of.

    `start(restore)` is a generator. With the state of training, or its shapes, it calls `restore`
    for the environment steps and the state to start from, (0, None) for a new run. It gives
    environment steps so far, how many are new, and for each run the episodes that ended in these
    and the metrics; and a function that returns the state of training. First of all it gives where
    it starts, and where `needs_state` it does not go on before it is asked to.
    """
    found: tuple = (0, None, [[]] * args.num_seeds)
    folder = args.resume or args.evaluate

    def restore(like: Any) -> tuple[int, Any]:
        nonlocal found
        if folder:
            found = load_checkpoint(folder, like)
        return found[:2]

    if folder:
        check_resumed(args, folder)
    progress, runs = start(restore), []
    try:
        step, *_, state = next(progress)
        if args.evaluate:
            scores, _ = evaluate(state(), args.evaluate, step)
            return state(), scores[0], args.evaluate
        if args.resume:
            print(f"{folder} goes on from step {step}")
        saved, evaluated = step if args.resume else None, None
        for i, name in enumerate(run_folders(args)):
            flags = replace(args, seed=args.seed + i)
            runs.append(start_run(flags, name, step, found[2][i], i > 0))

        def save() -> int:
            for run in runs:  # what is not written would be missing if the run goes on from here
                run.events.flush()
            save_checkpoint(args, runs[0].folder, step, state(), [run.returns for run in runs])
            return step

        def evaluate_all() -> int:
            scores, video = evaluate(state(), runs[0].folder, step)
            for i, (run, returns) in enumerate(zip(runs, scores, strict=True)):
                means[i] = float(np.mean(returns))
                write(run, step, {"eval/episodic_return": means[i]})
            if video and runs[0].tracked:
                import wandb

                film = wandb.Video(video, format="mp4")
                runs[0].tracked.log({"eval/video": film, "global_step": step})
            return step

        means: dict[int, float] = {}
        for step, steps, episodes, metrics, state in progress:  # noqa: B007
            for i, run in enumerate(runs):
                log(run, args, step, steps, episodes[i], metrics[i])
            if due(args.checkpoint_interval, step, steps):
                saved = save()
            if args.eval_episodes and due(args.eval_interval, step, steps):
                evaluated = evaluate_all()
        if args.checkpoint_interval != 0 and saved != step:
            save()
        if args.eval_episodes and evaluated != step:
            evaluate_all()
        returns = [float(np.mean(run.returns or np.nan)) for run in runs]
        for run, mean in zip(runs, returns, strict=True):
            write(run, step, {"charts/final_return": mean})
            run.events.add(step, summary=hparams({}, {})[2])
        if means:
            text = f"mean return of {args.eval_episodes} episodes without exploration"
            print(f"{runs[0].folder}: {text} {np.mean(list(means.values())):.2f}")
        return state(), returns if len(runs) > 1 else list(runs[0].returns), runs[0].folder
    finally:
        progress.close()
        for run in runs:
            run.progress.close()
            run.events.flush(close=True)
            if run.tracked:
                run.tracked.finish(exit_code=int(sys.exc_info()[0] is not None))
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def parse(args_type: type) -> Any:
    """The flags of the command line."""
    choices = {f"--{f.name}".replace("_", "-") for f in fields(args_type) if f.type is Choice}
    words: list[str] = []
    for word in sys.argv[1:]:  # tyro wants a value where None is one
        name = word.replace("--no-", "--")
        words += [name, str(word == name)] if name in choices else [word]
    args: Any = tyro.cli(args_type, description=__doc__, args=words)
    folder = args.resume or args.evaluate
    if not folder:
        return args
    # The flags of that run are the defaults. Of an evaluation the environments are not used.
    before = load_args(args_type, folder, **({"async_envs": False} if args.evaluate else {}))
    return tyro.cli(args_type, description=__doc__, args=words, default=before)


def main(train: Callable[[Any], Any], args_type: type) -> None:
    """The command line; exit code 2 for a mistake in the flags, 130 after Ctrl-C."""
    # A call as small as that of acting costs 12 us in this thread and 41 us in another one.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        args = parse(args_type)
        result = train(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: what was logged is kept", file=sys.stderr)
        sys.exit(130)
    returns = np.sort(result.returns or [np.nan])
    n, mean, std = len(result.returns), returns.mean(), returns.std()
    if args.evaluate:
        print(f"{result.folder}: mean return of {n} episodes {mean:.2f} +- {std:.2f}")
        print(*(f"{x:.2f}" for x in result.returns))
    elif args.num_seeds == 1:
        print(f"{result.folder}: mean return of the last {n} episodes {mean:.2f}")
    else:
        middle = returns[n // 4 : n - n // 4].mean()
        print(
            f"{result.folder} and the {n - 1} after it: final return {mean:.2f} +- {std:.2f}, "
            f"interquartile mean {middle:.2f}"
        )


# === end shared ===


# === shared: compiled training ===
class Training(NamedTuple):
    """All that a compiled run carries on, [R, ...] of R agents, or parts of one on R devices."""

    agent: Any
    envs: EnvState
    key: jax.Array


def train_compiled(
    args: Any,
    functional: Functional,
    init: Callable,
    iterate: Callable,
    schedule: Callable,
    size: int,
    warm_up: int,
    restore: Callable,
) -> Generator:
    """Trains num_seeds agents, one compiled call for each log_interval; for `run_training`.

    Args:
      functional: The environment.
      init: From two keys, one for the network, to an agent.
      iterate: From an agent, EnvState, key, values of `schedule` and whether to learn (a constant)
        to the next ones of the first two, Episodes and metrics.
      schedule: From the environment step at the start of an iteration to {tag: value}.
      size: Environment steps of an iteration, `iterate` on all devices.
      warm_up: Iterations without learning at the start.
      restore: See `run_training`.
    """
    parts, per_call = shards(args), math.ceil(args.log_interval / size)
    iterations = math.ceil(args.total_timesteps / size)

    def start(seed: jax.Array, part: jax.Array) -> Training:
        network_key, key = jax.random.split(jax.random.PRNGKey(seed))
        agent_key, env_key, key = jax.random.split(jax.random.fold_in(key, part), 3)
        env_keys = jax.random.split(env_key, args.num_envs // parts)
        envs = jax.vmap(partial(reset_functional, functional))(env_keys)
        return Training(init(network_key, agent_key), envs, key)

    def advance(state: Training, scheduled: dict, count: jax.Array, learning: bool) -> tuple:
        """`count` iterations; the sums of their Episodes and the last one's metrics."""

        def body(i: Any, carry: tuple) -> tuple:
            (agent, envs, key), before, _ = carry
            key, subkey = jax.random.split(key)
            now = {tag: values[i] for tag, values in scheduled.items()}
            agent, envs, episodes, metrics = iterate(agent, envs, subkey, now, learning)
            return Training(agent, envs, key), jax.tree.map(jnp.add, before, episodes), metrics

        none = Episodes(jnp.int32(0), jnp.float32(0), jnp.int32(0))
        shapes = jax.eval_shape(body, 0, (state, none, None))[2]
        metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        state, episodes, metrics = jax.lax.fori_loop(0, count, body, (state, none, metrics))
        return state, over_devices(jax.lax.psum, episodes, args), metrics

    def start_all(seeds: jax.Array, parts: jax.Array) -> Training:
        # One after the other: XLA hangs in the QR decompositions of 10 orthogonal initialisations
        # at once (JAX 0.10 on a CPU).
        return jax.lax.map(lambda x: start(*x), (seeds, parts))

    def spread(fn: Callable, *axes: int | None) -> Callable:
        """`fn` of all agents, on all devices."""
        if args.num_devices == 1:
            return fn
        auto = (jax.sharding.AxisType.Auto,)
        mesh = jax.make_mesh((args.num_devices,), ("devices",), axis_types=auto)
        each, same = jax.sharding.PartitionSpec("devices"), jax.sharding.PartitionSpec()
        specs = tuple(same if axis is None else each for axis in axes)
        return jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=each, check_vma=False)

    def compiled(learning: bool) -> Callable:
        fn = jax.vmap(partial(advance, learning=learning), in_axes=(0, None, None))
        return jax.jit(spread(fn, 0, None, None), donate_argnums=0)

    numbers = np.arange(max(args.num_seeds, parts))  # of seeds, or of the parts of one agent
    seeds = (args.seed + numbers * (parts == 1)).astype(np.uint32)
    numbers = (numbers * (parts > 1)).astype(np.uint32)
    begun, state = restore(jax.eval_shape(jax.vmap(start), seeds, numbers))
    if state is None:
        state = jax.jit(spread(start_all, 0, 0))(seeds, numbers)
    yield begun, 0, [[]] * len(seeds), [{}] * len(seeds), lambda: state
    calls = {learning: compiled(learning) for learning in (False, True)}

    def call(first: int, count: int) -> tuple:
        nonlocal state
        rows = [schedule((first + i) * size) for i in range(per_call)]
        scheduled = {tag: np.array([row[tag] for row in rows], np.float32) for tag in rows[0]}
        state, *logged = calls[first >= warm_up](state, scheduled, count)
        sums, metrics = jax.device_get(logged)
        episodes = []
        for ended, total, length in zip(*sums, strict=True):
            mean = [(total / ended, length / ended)] if ended else []
            episodes.append(mean * min(int(ended), 100))
        each = [
            {tag: x[i] for tag, x in metrics.items()} | rows[count - 1] for i in range(len(seeds))
        ]
        return (first + count) * size, count * size, episodes, each, lambda: state

    with ThreadPoolExecutor(max_workers=1) as device:
        running: Future[Any] | None = None
        first, count = begun // size, 0
        while first < iterations:
            if running and needs_state(args, first * size, count * size):
                yield running.result()  # the next call would take the state away
                running = None
            end = warm_up if first < warm_up else iterations
            count = min(per_call, end - first)
            before, running = running, device.submit(call, first, count)
            first += count
            if before:  # is logged while the next call runs
                yield before.result()
        if running:
            yield running.result()


# === end shared ===


def check_args(args: Args) -> None:
    """Raises UsageError for flags that are out of range or do not go together."""
    for name, value in vars(args).items():
        if isinstance(value, float):
            require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
        elif type(value) is int:
            least = 0 if name in ("seed", "checkpoint_interval", "eval_episodes") else 1
            require(value >= least, f"{name} must be at least {least}, got {value}")
    batch, starts, total = args.batch_size, args.learning_starts, args.total_timesteps
    require(batch <= args.buffer_size, f"batch_size {batch} is larger than buffer_size")
    message = (
        f"learning_starts {starts} must be at least batch_size {batch}, for a batch to be drawn"
    )
    require(batch <= starts < total, f"{message}, and less than total_timesteps {total}")
    check_devices(args, "num_envs", "buffer_size", "batch_size")
    steps = math.lcm(args.num_envs, args.train_frequency)
    message = f"num_envs {args.num_envs} and train_frequency {args.train_frequency} do not divide"
    require(
        steps <= min(args.buffer_size, total),
        f"{message}: gradient steps come out whole after {steps} environment steps, more than "
        "buffer_size or total_timesteps; make one a multiple of the other",
    )


def train(args: Args) -> Result:
    """Trains an agent, or num_seeds of them, logged under runs/. Raises UsageError before that."""
    check_args(args)
    envs = make_envs(args)
    check_envs(args, envs)
    num_actions, to_env = discrete_actions(envs.single_action_space)
    message = f"env_id {args.env_id}: DQN takes actions Discrete(n)"
    require(num_actions > 0, f"{message}, got {envs.single_action_space}")
    # What a device has of the environments and batches; of all steps of an iteration the gradient
    # steps are a whole number.
    names = ("num_envs", "buffer_size", "batch_size")
    local = replace(args, **{name: getattr(args, name) // shards(args) for name in names})
    size = math.lcm(args.num_envs, args.train_frequency)
    shape = (size // args.num_envs, local.num_envs)

    example = example_transition(envs)._replace(action=np.zeros((), np.int32))
    network = QNetwork(num_actions)
    init_q, unravel, q = flatten_network(network, example.observation)
    optimizer = optax.adam(args.learning_rate)
    # In SAME_STEP mode the next observation of a last step is not the observation of the one after.
    is_next = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    once = is_next and is_image(example.observation.shape, example.observation.dtype)
    replay, item = make_replay(local, example, once)
    if once:
        leaves = jax.tree.leaves(jax.eval_shape(replay.init, item))
        gigabytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e9
        print(f"replay buffer: {local.buffer_size} steps, {gigabytes:.2f} GB")

    def init(network_key: jax.Array, key: jax.Array) -> Agent:
        params = init_q(network_key)
        opt_state, moved = optimizer.init(params), jnp.int32(0)
        return Agent(params, params.copy(), opt_state, replay.init(item), key, moved)

    def learn(
        agent: Agent, rollout: Transition, mask: Any, now: dict, learning: bool
    ) -> tuple[Agent, dict]:
        if not learning:
            return store(agent, rollout, mask, replay), {}
        return train_step(agent, rollout, mask, local, replay, q, optimizer)

    def schedule(step: int) -> dict[str, float]:
        duration = args.exploration_fraction * args.total_timesteps
        epsilon = linear_schedule(args.start_e, args.end_e, duration, step)
        return {"charts/epsilon": epsilon}

    def iterate(
        agent: Agent, env_state: EnvState, key: jax.Array, now: dict, learning: bool
    ) -> tuple[Agent, EnvState, Episodes, dict]:
        env_key, explore_key, action_key = jax.random.split(key, 3)
        explore = jax.random.uniform(explore_key, shape) < now["charts/epsilon"]
        random_actions = jax.random.randint(action_key, shape, 0, num_actions)
        params = unravel(agent.params)

        def act(t: jax.Array, observation: jax.Array) -> jax.Array:
            values: Any = network.apply(params, observation)
            return jnp.where(explore[t], random_actions[t], values.argmax(-1))

        collected = collect_functional(functional_env, env_state, act, shape[0], env_key)
        env_state, rollout, mask, episodes = collected
        agent, metrics = learn(agent, rollout, mask, now, learning)
        return agent, env_state, episodes, metrics

    def ordinary(envs: VectorEnv, restore: Callable) -> Generator:
        """Steps the environments from Python; for `run_training`."""

        @partial(jax.jit, donate_argnums=0, static_argnums=-1)
        def update(
            agent: Agent, rollout: Transition, mask: Any, now: dict, learning: bool
        ) -> tuple:
            """`learn`, and a copy of the parameters that is not donated with the agent."""
            agent, metrics = learn(agent, rollout, mask, now, learning)
            return agent, agent.params, metrics

        def agent_of(learning: Future) -> Agent:
            return learning.result()[0]

        greedy = jax.jit(lambda params, observation: q(params, observation).argmax(-1))
        key, network_key = jax.random.split(jax.random.PRNGKey(args.seed))
        begun, restored = restore(jax.eval_shape(init, network_key, key))
        agent = (
            init(network_key, key) if restored is None else cut_off(restored, args.n_step + once)
        )
        yield begun, 0, [[]], [{}], lambda: agent
        agent = jax.tree.map(jnp.asarray, agent)
        behaviour = agent.params.copy()
        rng = np.random.default_rng([args.seed, begun] if begun else args.seed)
        env_state = reset_envs(envs, args.seed, begun)
        # While one thread learns from a rollout, this one collects the next, with the parameters
        # from before: the same ones whichever is faster, so that runs repeat.
        with closing(envs), ThreadPoolExecutor(max_workers=1) as learner:
            learning: Future[Any] = learner.submit(lambda: (agent, behaviour, {}))
            for step in range(begun + size, args.total_timesteps + size, size):
                now = schedule(step - size)
                draws = rng.random((2, *shape))
                random_actions = (draws[1] * num_actions).astype(np.int32)
                explore = draws[0] < now["charts/epsilon"]
                act = partial(epsilon_greedy, partial(greedy, behaviour), explore, random_actions)
                collected = collect(envs, env_state, act, shape[0], example)
                env_state, rollout, mask, episodes = collected
                agent, behaviour, metrics = learning.result()
                learns = step > args.learning_starts
                learning = learner.submit(update, agent, rollout, mask, now, learns)
                yield step, size, [episodes], [metrics | now], partial(agent_of, learning)

    greedy = Greedy(lambda agent: agent.params, lambda p, x: q(p, x).argmax(-1), to_env)
    env = functional(envs) if args.compiled is not False else None
    if env is None:
        start = partial(ordinary, TransformAction(envs, to_env) if to_env else envs)
        return Result(*run_training(args, start, evaluator(args, greedy, None)))
    same, spec = to_env or (lambda action: action), gym.spec(args.env_id.rpartition(":")[2])
    functional_env = Functional(env, spec.max_episode_steps, same, example)
    warm_up = args.learning_starts // size
    setting = (functional_env, init, iterate, schedule, size, warm_up)
    start = partial(train_compiled, args, *setting)
    evaluate = evaluator(args, greedy, functional_env)
    state, returns, folder = run_training(args, start, evaluate)
    agent = state.agent if args.num_seeds > 1 else jax.tree.map(lambda x: x[0], state.agent)
    return Result(agent, returns, folder)


if __name__ == "__main__":
    main(train, Args)
