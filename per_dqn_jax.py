"""DQN with prioritised replay on Gymnasium environments: Schaul et al. 2016, arXiv 1511.05952.

    python per_dqn_jax.py --env-id CartPole-v1 --num-envs 8
    python per_dqn_jax.py --env-id phys2d/CartPole-v1 --num-envs 10 --num-seeds 10

An iteration: N environments make S steps with fixed parameters, `train_step` learns from them.
Ordinary environments are stepped from Python, functional ones are compiled with the learning.

The proportional variant. Differs from the paper: Adam for RMSProp, no clipping of rewards and
errors, hyperparameters for classic control. An episode that a time limit cuts off is bootstrapped.
"""

import importlib
import json
import math
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import tyro
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding, PartitionSpec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm

import buffers


@dataclass(frozen=True)
class Args:
    """Flags of the algorithm. Steps are environment steps, of all environments together."""

    total_timesteps: int = 500_000  # steps of training
    num_envs: int = 1  # environments stepped together
    learning_rate: float = 2.5e-4  # step size of Adam
    adam_epsilon: float = 1e-2  # added to what Adam divides by: steps of small gradients shrink
    buffer_size: int = 10_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # how far the target network moves towards the online one at an update
    target_network_frequency: int = 500  # steps between two updates of the target network
    batch_size: int = 128  # transitions of one gradient step
    start_e: float = 1.0  # probability of a random action at the start
    end_e: float = 0.05  # probability of a random action once exploration-fraction is over
    exploration_fraction: float = 0.5  # part of total-timesteps from start-e to end-e
    learning_starts: int = 10_000  # steps before the first gradient step
    train_frequency: int = 10  # steps for one gradient step
    n_step: int = 1  # rewards summed in a target before it bootstraps
    double_q: bool = True  # the online network chooses the action that is bootstrapped from
    priority_exponent: float = 0.6  # alpha: 0 draws all alike, 1 in proportion to their priority
    importance_exponent: float = 0.4  # beta at the start, how much of that bias is corrected; to 1
    priority_epsilon: float = 1e-6  # added to abs(TD error): no transition is left out for good
    frame_stack: int = 1  # how many of an episode's last observations the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show them as they are
    save_experience: bool = False  # keep all that the replay is given in the run's experience/
    offline: str = ""  # such a folder: learn from it alone, without stepping an environment


def prepare(x: jax.Array) -> jax.Array:
    """Observations [B, ...] as float32: uint8 images from 36x36 on [B, H, W, C], others [B, F]."""
    images, x = x.dtype == jnp.uint8, x.astype(jnp.float32)
    if images and x.ndim in (3, 4, 5):
        x = x[..., None] if x.ndim == 3 else x
        x = jnp.moveaxis(x, -3, -1) if x.shape[-3] < x.shape[-1] else x  # channels are in front
        x = jnp.moveaxis(x, 1, 3).reshape(len(x), *x.shape[2:4], -1) if x.ndim == 5 else x
    x = x / 255 if images else x
    return x if images and x.ndim == 4 and min(x.shape[1:3]) >= 36 else x.reshape(len(x), -1)


def convolve(x: jax.Array, channels: int, size: int, stride: int) -> jax.Array:
    """nn.Conv of x [B, H, W, C] as a product: in a loop on a CPU its gradient takes 20 times."""
    b, h, w, k = len(x), x.shape[1] // stride, x.shape[2] // stride, size // stride
    x = x[:, : h * stride, : w * stride].reshape(b, h, stride, w, -1).swapaxes(2, 3)
    x = x.reshape(b, h, w, -1)  # blocks of stride x stride pixels are channels
    window = [x[:, i : i + h - k + 1, j : j + w - k + 1] for i in range(k) for j in range(k)]
    return nn.Dense(channels)(jnp.concatenate(window, axis=-1))


def nature_cnn(x: jax.Array) -> jax.Array:
    """Features [B, 512] of images [B, H, W, C], by the convolutions of Mnih et al. 2015."""
    for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        x = nn.relu(convolve(x, channels, size, stride))
    return nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = prepare(x)
        for size in (120, 84) if x.ndim == 2 else ():
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.num_actions)(nature_cnn(x) if x.ndim == 4 else x)


class Step(NamedTuple):
    """A step of an environment [...], of N of them [N, ...], or those of a rollout [S, N, ...]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # it was cut off
    is_step: Any  # False after the end of an episode, where the environment only resets
    next_observation: Any = None  # of a rollout the observation after it [N, ...]


class State(NamedTuple):
    """All that learning changes."""

    params: jax.Array  # [P], as one vector: the fewer arrays, the faster the call of a program
    target_params: jax.Array  # [P]
    opt_state: optax.OptState
    replay: Any  # the replay buffer's state, of Steps
    updates: jax.Array  # gradient steps so far


class DQN:
    """The algorithm, pure functions of a `State`. All that the loops below know of it is here."""

    overlap = True  # rollouts are collected while the one before is learned from

    def __init__(self, args: Args, observation: np.ndarray, space: Any) -> None:
        starts = args.batch_size <= args.learning_starts < args.total_timesteps
        require(starts, "learning_starts must be at least batch_size, less than total_timesteps")
        require(isinstance(space, gym.spaces.Discrete), f"DQN takes Discrete actions, not {space}")
        self.args, self.space, n = args, space, args.num_envs
        self.size = math.lcm(n, args.train_frequency)  # steps of an iteration
        self.shape = 0 if args.offline else self.size // n, n  # S, N
        self.greedy = np.int32(-1)  # the noise without which there is no exploration
        self.example = Step(observation, self.greedy, np.float32(0), *[np.False_] * 3)
        self.network = QNetwork(int(space.n))
        tree = jax.eval_shape(self.network.init, jax.random.PRNGKey(0), observation[None])
        self.unravel = ravel_pytree(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree))[1]
        self.optimizer = optax.adam(args.learning_rate, eps=args.adam_epsilon)
        frame = observation[-1 if args.frame_stack > 1 else ...]
        self.stored = self.example._replace(observation=frame)
        rows = max(math.ceil(args.buffer_size / n), args.frame_stack + args.n_step)
        rows = len(self.vault(Path(args.offline).resolve(strict=True))) if args.offline else rows
        window: dict[str, Any] = dict(num_envs=n, sequence_length=args.frame_stack + args.n_step)
        self.replay = buffers.prioritised_replay(rows * n, args.priority_exponent, **window)

    def init(self, key: jax.Array) -> State:
        """The state before training."""
        params, _ = ravel_pytree(self.network.init(key, self.example.observation[None]))
        replay = self.replay.init(self.stored)
        return State(params, params, self.optimizer.init(params), replay, jnp.int32(0))

    def vault(self, path: Any) -> Any:
        """The experience that is kept there."""
        return importlib.import_module("vault").Vault(path, self.stored, self.args.num_envs)

    def restart(self, state: State) -> State:
        """The state where the environments start anew: no window goes on from the steps before."""
        if self.args.offline:
            vault, replay = self.vault(self.args.offline), state.replay
            for i in range(0, len(vault), 4096):
                replay = self.replay.add_batch(replay, vault.read(i, min(i + 4096, len(vault))))
            return state._replace(replay=replay)
        is_step = state.replay.storage.is_step
        rows = (state.replay.cursor - 1 - np.arange(self.args.n_step)) % len(is_step)
        storage = state.replay.storage._replace(is_step=is_step.at[rows].set(False))
        return state._replace(replay=state.replay._replace(storage=storage))

    def schedule(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """What changes from one iteration to the next, of those that start at `steps`."""
        args, duration = self.args, self.args.exploration_fraction * self.args.total_timesteps
        updates = np.where(steps + self.size > args.learning_starts, self.size, 0)
        return {
            "epsilon": np.interp(steps, [0, duration], [args.start_e, args.end_e]),
            "gradient_steps": updates // args.train_frequency,
            "beta": np.interp(steps, [0, args.total_timesteps], [args.importance_exponent, 1]),
        }

    def explore(self, key: jax.Array, now: dict) -> jax.Array:
        """The noise of a rollout [S, N]: random actions, -1 for the best one."""
        explore_key, action_key = jax.random.split(key)
        action = jax.random.randint(action_key, self.shape, 0, self.space.n)
        explores = jax.random.uniform(explore_key, self.shape) < now["epsilon"]
        return jnp.where(explores, action, self.greedy)

    def view(self, state: State) -> jax.Array:
        """What `act` needs of a state."""
        return state.params

    @partial(jax.jit, static_argnums=0)
    def act(self, view: jax.Array, observation: Any, noise: Any) -> jax.Array:
        """Actions [N] with this noise [N]."""
        return jnp.where(noise < 0, jnp.argmax(self.q(view, observation), axis=-1), noise)

    def to_env(self, action: Any) -> Any:
        """The environment's actions for those of `act`."""
        return action + self.space.start

    def q(self, params: jax.Array, observation: Any) -> Any:
        """Q(s, .) [B, num_actions]."""
        return self.network.apply(self.unravel(params), observation)

    def loss(self, params: jax.Array, target_params: jax.Array, window: Step, weigh: Any) -> tuple:
        """Weighted mean squared TD error of windows [B, W, ...]; metrics, priorities."""
        window = buffers.stack_frames(window, self.args.frame_stack, window.is_step)
        batch, discount, valid = buffers.n_step_transition(window, self.args.gamma, window.is_step)
        next_q = self.q(target_params, batch.next_observation)
        chooser = self.q(params, batch.next_observation) if self.args.double_q else next_q
        bootstrap = next_q[jnp.arange(len(next_q)), jnp.argmax(chooser, axis=-1)]
        target = jax.lax.stop_gradient(batch.reward + discount * bootstrap)
        chosen = jax.nn.one_hot(batch.action, self.space.n)  # the gradient of an index is a scatter
        value = jnp.sum(self.q(params, batch.observation) * chosen, axis=-1)
        rows = jnp.maximum(valid.sum(), 1)
        weights = weigh(valid)
        loss = jnp.sum(weights * (target - value) ** 2, where=valid) / rows
        metrics = {"losses/td_loss": loss, "losses/q_values": value.sum(where=valid) / rows}
        metrics["losses/importance_weight_min"] = weights.min(where=valid, initial=1)
        # A step that only resets is not drawn again.
        priorities = jnp.where(valid, jnp.abs(target - value) + self.args.priority_epsilon, 0)
        return loss, (metrics, priorities)

    def train_step(self, state: State, rollout: Step, now: dict, key: jax.Array) -> tuple:
        """Stores a rollout [S, N] and makes the gradient steps: State, metrics."""
        args, frame = self.args, rollout.observation[:, :, -1 if self.args.frame_stack > 1 else ...]
        reward = jnp.sign(rollout.reward) if args.clip_rewards else rollout.reward
        stored = rollout._replace(observation=frame, reward=reward, next_observation=None)
        state = state._replace(replay=self.replay.add_batch(state.replay, stored))
        target_period = max(args.target_network_frequency // args.train_frequency, 1)
        keys = jax.random.split(key, self.size // args.train_frequency)

        def update(i: jax.Array, carry: tuple) -> tuple:
            state, updates = carry[0], carry[0].updates + 1
            sample = self.replay.sample(state.replay, keys[i], args.batch_size)
            nets, gradient = (state.params, state.target_params), jax.grad(self.loss, has_aux=True)
            size = self.replay.size(state.replay)

            def weigh(valid: jax.Array) -> jax.Array:
                drawn = jnp.where(valid, sample.probabilities, 0)
                return buffers.importance_weights(drawn, size, now["beta"])

            grads, (metrics, priorities) = gradient(*nets, sample.experience, weigh)
            replay = self.replay.set_priorities(state.replay, sample.indices, priorities)
            metrics["losses/priority_max"] = replay.max_priority
            changes, opt_state = self.optimizer.update(grads, state.opt_state)
            params = optax.apply_updates(state.params, changes)
            tau = jnp.where(updates % target_period == 0, args.tau, 0.0)
            target_params = optax.incremental_update(params, state.target_params, tau)
            return State(params, target_params, opt_state, replay, updates), metrics

        names = "td_loss", "q_values", "importance_weight_min", "priority_max"
        none = {f"losses/{name}": jnp.float32(jnp.nan) for name in names}
        return jax.lax.fori_loop(0, now["gradient_steps"], update, (state, none))


Algorithm = DQN


# === common to all scripts ===


class UsageError(ValueError):
    """A mistake in the flags, found before any training."""


def require(ok: Any, message: str) -> None:
    """Raises UsageError unless `ok`."""
    if not ok:
        raise UsageError(message)


@dataclass(frozen=True)
class Run:
    """Flags of the experiment."""

    exp_name: str = Path(__file__).stem  # part of the folder's name
    env_id: str = "CartPole-v1"  # a registered Gymnasium environment; module:id imports the module
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as {"continuous": true}
    seed: int = 1  # seed of the environments, the exploration, the network and the learning
    num_seeds: int = 1  # agents trained at once, with this seed and those after it; compiled only
    num_devices: int = 1  # to spread these over, or the environments of one agent; compiled only
    log_interval: int = 1_000  # steps between two points of the charts
    resume: str = ""  # folder of a run to go on with; its flags are the defaults of the others
    checkpoint_interval: int = 100_000  # steps between two checkpoints; there is one at the end
    eval_episodes: int = 10  # episodes without exploration at each checkpoint; 0: no evaluation
    capture_video: bool = False  # record one more episode there
    track: bool = False  # log to Weights & Biases, too: WANDB_PROJECT, WANDB_ENTITY say where


class EnvState(NamedTuple):
    """Where N environments stand between two rollouts."""

    observation: Any  # [N, ...]
    resetting: Any  # [N] bool, the next step ignores its action and only resets
    inner: Any = None  # [N, ...], the state of a functional environment
    length: Any = None  # [N], steps of its episode so far


class Training(NamedTuple):
    """All that changes and that a checkpoint holds; compiled [num_seeds, ...]."""

    agent: Any  # its State
    key: jax.Array
    current: jax.Array  # [2, N], return and length so far of the episodes that go on
    ended: jax.Array  # [3], number, returns, lengths of those that ended since the last point
    envs: EnvState | None  # of functional environments


def make_envs(run: Run, n: int, video: str = "") -> Any:
    """A gym.vector.VectorEnv of n environments, the same for every n; a folder for a `video`."""
    make = partial(gym.make_vec, run.env_id, n, **json.loads(run.env_kwargs))
    record = partial(gym.wrappers.RecordVideo, video_folder=video)
    options: dict = dict(render_mode="rgb_array", wrappers=[record]) if video else {}
    native: Any = None
    with suppress(Exception):  # there is none, or it takes other arguments
        native = make(vectorization_mode="vector_entry_point")
    envs: Any = None if hasattr(native, "func_env") else native  # Gymnasium steps these wrongly
    if n < 4 or not envs:
        try:
            envs = make(vectorization_mode="sync", vector_kwargs={"copy": False}, **options)
        except Exception as error:
            require(envs, f"{run.env_id} with env_kwargs {run.env_kwargs}: {error}")
    if native and envs.single_observation_space != native.single_observation_space:
        envs = native
    require(not video or envs is not native, f"capture_video: {run.env_id} is native, never drawn")
    mode = str(envs.metadata.get("autoreset_mode"))
    require("NEXT_STEP" in mode, f"{run.env_id}: its autoreset_mode must be NEXT_STEP, not {mode}")
    return envs


def see(alg: Algorithm, frame: Any, seen: Any = None, goes_on: Any = None) -> Any:
    """`frame` [N, ...], or the last K [N, K, ...], with zeros where its episode does not go on."""
    if alg.args.frame_stack == 1:
        return frame
    xp: Any = np if isinstance(frame, np.ndarray) else jnp
    zeros = xp.zeros((len(frame), alg.args.frame_stack, *frame.shape[1:]), frame.dtype)
    seen = zeros if seen is None else xp.where(goes_on.reshape(-1, *[1] * frame.ndim), seen, zeros)
    return xp.concatenate([seen[:, 1:], frame[:, None]], axis=1)


def collect(alg: Algorithm, envs: Any, state: EnvState, view: Any, noise: np.ndarray) -> tuple:
    """Steps the environments with `noise` [S, N, ...]: the EnvState, and the Steps [S, N, ...]."""
    observation, goes_on = state.observation, ~state.resetting
    rollout = jax.tree.map(lambda x: np.empty(alg.shape + x.shape, x.dtype), alg.example)
    _, _, reward, terminated, truncated, is_step, _ = rollout
    for t in range(len(noise)):
        rollout.observation[t] = observation  # now: the step may write over it
        rollout.action[t] = action = np.asarray(alg.act(view, observation, noise[t]))
        frame, reward[t], terminated[t], truncated[t], _ = envs.step(alg.to_env(action))
        observation, is_step[t] = see(alg, frame, observation, goes_on), goes_on
        goes_on = ~(terminated[t] | truncated[t])
    return EnvState(observation, ~goes_on), rollout._replace(next_observation=observation.copy())


class FunctionalEnvs:
    """A functional environment with time limit and NEXT_STEP autoreset, for compiled programs."""

    def __init__(self, alg: Algorithm, env: Any, time_limit: int | None) -> None:
        self.alg, self.env, self.time_limit = alg, env, time_limit or math.inf

    def reset(self, key: jax.Array, n: int) -> EnvState:
        """Starts an episode in n of them."""
        keys, zeros = jax.random.split(key, n), jnp.zeros(n, jnp.int32)
        inner = jax.vmap(self.env.initial)(keys)
        frame = jax.vmap(self.env.observation)(inner, keys)
        return EnvState(see(self.alg, frame), zeros > 0, inner, zeros)

    def step(self, view: Any, state: EnvState, x: tuple) -> tuple[EnvState, Step]:
        """A step of N of them, with noise, keys, and states for those that only reset."""
        (noise, keys, starts), is_step, each = x, ~state.resetting, jax.vmap
        action = self.alg.act(view, state.observation, noise)
        taken = self.alg.to_env(action)
        after = each(self.env.transition)(state.inner, taken, keys)
        reward = jnp.where(is_step, each(self.env.reward)(state.inner, taken, after, keys), 0.0)
        length = jnp.where(is_step, state.length + 1, 0)
        terminated = is_step & each(self.env.terminal)(after, keys)
        done = terminated | (length >= self.time_limit)
        inner = jax.tree.map(lambda *x: each(jnp.where)(is_step, *x), after, starts)
        step = Step(state.observation, action, reward, terminated, done & ~terminated, is_step)
        frame = each(self.env.observation)(inner, keys)
        return EnvState(see(self.alg, frame, state.observation, is_step), done, inner, length), step

    def collect(self, state: EnvState, view: Any, noise: Any, key: jax.Array) -> tuple:
        """What the function `collect` does."""
        keys = jax.random.split(key, noise.shape[:2])
        starts = jax.vmap(jax.vmap(self.env.initial))(keys)  # at once: a tenth of the time
        state, rollout = jax.lax.scan(partial(self.step, view), state, (noise, keys, starts))
        return state, rollout._replace(next_observation=state.observation)

    def evaluate(self, view: Any, n: int, seed: int) -> jax.Array:
        """Returns [n] of n episodes without exploration, of at most 10,000 steps."""
        key, greedy, steps = jax.random.PRNGKey(seed), self.alg.greedy, min(self.time_limit, 10_000)
        noise = jnp.broadcast_to(greedy, (int(steps), n, *greedy.shape))
        _, rollout = self.collect(self.reset(jax.random.fold_in(key, 0), n), view, noise, key)
        done = rollout.terminated | rollout.truncated
        return jnp.sum(rollout.reward, axis=0, where=jnp.cumsum(done, axis=0) - done == 0)


def evaluate(alg: Algorithm, run: Run, view: Any, n: int, seed: int, video: str = "") -> Any:
    """What `FunctionalEnvs.evaluate` does, in ordinary environments; `video` as of `make_envs`."""
    returns, over, noise = np.zeros(n), np.zeros(n, bool), np.stack([alg.greedy] * n)
    with closing(make_envs(run, n, video)) as envs:
        observation = see(alg, envs.reset(seed=seed)[0])
        for _ in range(30_000):  # some episodes never end; the longest of Atari have 27,000 steps
            action = alg.to_env(np.asarray(alg.act(view, observation, noise)))
            frame, reward, terminated, truncated, _ = envs.step(action)
            observation = see(alg, frame, observation, ~over)
            returns += np.where(over, 0, reward)
            over |= terminated | truncated
            if over.all():
                break
    return returns


def learn(alg: Algorithm, training: Training, rollout: Step, now: dict) -> tuple:
    """Learns from a rollout [S, N], counts the episodes: Training, metrics, view to act with."""
    key, learn_key = jax.random.split(training.key)
    agent, metrics = alg.train_step(training.agent, rollout, now, learn_key)
    done, t = rollout.terminated | rollout.truncated, jnp.arange(alg.shape[0])[:, None]
    end = jnp.max(jnp.where(done, t + 1, 0), axis=0, initial=0)  # [N], of the last that ended
    new = jnp.stack([rollout.reward, rollout.is_step])
    current = jnp.where(end > 0, 0.0, training.current) + jnp.where(t >= end, new, 0.0).sum(axis=1)
    sums = jnp.sum(training.current - current, axis=1) + jnp.sum(new, axis=(1, 2))
    ended = training.ended + jnp.append(done.sum(), sums)
    mean_return, mean_length = ended[1:] / jnp.where(ended[0] > 0, ended[0], jnp.nan)
    metrics |= {"charts/episodic_return": mean_return, "charts/episodic_length": mean_length}
    metrics |= {f"charts/{name}": x for name, x in now.items()}
    return Training(agent, key, current, ended, training.envs), metrics, alg.view(agent)


def train_compiled(alg: Algorithm, run: Run, envs: Any, training: Training, steps: range) -> Any:
    """Trains in functional environments: gives step, Training, metrics for each log interval."""

    def iterate(training: Training, now: dict) -> tuple[Training, dict]:
        key, noise_key, env_key = jax.random.split(training.key, 3)
        noise, view = alg.explore(noise_key, now), alg.view(training.agent)
        env_state, rollout = envs.collect(training.envs, view, noise, env_key)
        return learn(alg, training._replace(envs=env_state, key=key), rollout, now)[:2]

    agents = jax.vmap(partial(jax.lax.scan, iterate), in_axes=(0, None))
    places = jax.tree.map(lambda x: x.sharding, training), None
    compiled = jax.jit(agents, donate_argnums=0, out_shardings=places)
    for step in steps:
        schedule = alg.schedule(np.arange(step, step + steps.step, alg.size))
        training = training._replace(ended=jnp.zeros_like(training.ended))
        training, metrics = compiled(training, schedule)
        yield step + steps.step, training, jax.tree.map(lambda x: x[:, -1], metrics)


def train_on_host(alg: Algorithm, run: Run, envs: Any, training: Training, steps: range) -> Any:
    """What `train_compiled` does, in ordinary environments; if one fails, without the metrics."""
    n, key = alg.shape[1], jax.random.PRNGKey(run.seed)
    explore = jax.jit(jax.vmap(lambda i, now: alg.explore(jax.random.fold_in(key, i), now)))
    update = jax.jit(partial(learn, alg), donate_argnums=0)
    view = jax.tree.map(jnp.copy, alg.view(training.agent))  # `update` takes the training away
    training = training._replace(agent=alg.restart(training.agent), current=jnp.zeros((2, n)))
    with closing(make_envs(run, n)) as envs, ThreadPoolExecutor(max_workers=1) as learner:
        env_state = EnvState(see(alg, envs.reset(seed=run.seed + steps.start)[0]), np.zeros(n) > 0)
        learning: Any = learner.submit(lambda: (training, {}, view))
        for begin in steps:
            at = np.arange(begin, begin + steps.step, alg.size)
            schedule = alg.schedule(at)
            noise = np.asarray(explore(at, schedule))
            for i, step in enumerate(at):
                try:
                    env_state, rollout = collect(alg, envs, env_state, view, noise[i])
                except Exception as error:
                    error.add_note(f"in {run.env_id} at step {step}")
                    yield int(step), learning.result()[0], None
                    raise
                training, metrics, view = learning.result()
                if i == 0:
                    if begin > steps.start:
                        yield begin, training, metrics
                    training = training._replace(ended=jnp.zeros(3))
                now = {name: x[i] for name, x in schedule.items()}
                learning = learner.submit(update, training, rollout, now)
                if not alg.overlap:
                    view = learning.result()[-1]
        yield steps[-1] + steps.step, *learning.result()[:2]


def set_up(args: Args, run: Run, folder: Path) -> tuple[Any, Any, Training]:
    """The algorithm, FunctionalEnvs or None, and the state before training; checks the flags."""
    low = [k for k, x in (asdict(args) | asdict(run)).items() if type(x) is int and x < 1]
    require(not set(low) - {"seed", "eval_episodes"}, f"must be at least 1: {', '.join(low)}")
    with closing(make_envs(run, 1, f"{folder}/videos" if run.capture_video else "")) as single:
        space, action_space = single.single_observation_space, single.single_action_space
        inner, spec = getattr(single, "envs", [single])[0].unwrapped, single.spec
    hint = f"{run.env_id}: observations are {space}, no Box: wrap it as in docs/environments.md"
    require(isinstance(space, gym.spaces.Box), hint)
    shape = (args.frame_stack, *space.shape) if args.frame_stack > 1 else space.shape
    observation = np.zeros(shape, np.uint8 if space.dtype == np.uint8 else np.float32)
    alg, n = Algorithm(args, observation, action_space), args.num_envs
    on_host = spec.additional_wrappers or getattr(args, "offline", "")
    env = None if on_host else getattr(inner, "func_env", None)
    envs, one = FunctionalEnvs(alg, env, spec.max_episode_steps), run.num_seeds == 1
    require(env or run.num_seeds == run.num_devices == 1, f"{run.env_id} trains one agent only")

    def start(seed: jax.Array) -> Training:
        agent_key, env_key, key = jax.random.split(jax.random.PRNGKey(seed), 3)
        env_state = envs.reset(env_key, n) if env else None
        return Training(alg.init(agent_key), key, jnp.zeros((2, n)), jnp.zeros(3), env_state)

    seeds = (run.seed + np.arange(run.num_seeds)).astype(np.uint32)
    if not env:
        return alg, None, jax.jit(start)(seeds[0])
    training = jax.jit(partial(jax.lax.map, start))(seeds)  # XLA hangs in ten QR at once
    parts, devices = n if one else run.num_seeds, jax.devices()[: run.num_devices]
    fits = len(devices) == run.num_devices and parts % len(devices) == 0
    require(fits, f"num_devices: only {len(devices)} are there, or it does not divide {parts}")
    mesh = jax.sharding.Mesh(np.array(devices), "devices")
    spread = NamedSharding(mesh, PartitionSpec(*[None] * one, "devices"))  # jit follows the data
    rest = NamedSharding(mesh, PartitionSpec()) if one else spread
    return alg, envs, jax.device_put(training, Training._make([*[rest] * 4, spread]))


def start_log(run: Run, folder: Path, flags: dict, begun: int) -> Callable[[int, dict], None]:
    """What writes {tag: [num_seeds]} of a step to TensorBoard's event files, one for each agent."""
    if run.track:  # Weights & Biases follows the event files
        wandb, name = importlib.import_module("wandb"), folder.name
        wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
    folders = [str(folder), *(f"{folder}/seed_{run.seed + i}" for i in range(1, run.num_seeds))]
    writers = [event_file_writer.EventFileWriter(x) for x in folders]
    table = "|flag|value|\n|-|-|\n" + "".join(f"|{k}|{x}|\n" for k, x in flags.items())
    start = partial(Event, wall_time=time.time(), step=begun + 1)
    for writer in writers:
        writer.add_event(start(session_log=SessionLog(status=SessionLog.START)))  # drops later
        writer.add_event(start(summary=text_pb("hyperparameters", table)))

    def log(step: int, metrics: dict) -> None:
        for i, writer in enumerate(writers):  # in one event: add_scalar takes 0.2 ms for each
            values = {tag: np.broadcast_to(x, len(writers))[i] for tag, x in metrics.items()}
            points = [Summary.Value(tag=tag, simple_value=x) for tag, x in values.items() if x == x]
            writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))
            writer.flush()  # raises the error of a full disk

    return log


def train(args: Args, run: Run, stop: Callable = lambda: False) -> tuple[Training, Any, Path]:
    """Trains num_seeds agents: the state, the mean of the last returns [num_seeds], the folder."""
    name = re.sub("[/:]", "-", f"{run.env_id}__{run.exp_name}__{run.seed}__{int(time.time())}")
    folder = Path(run.resume or f"runs/{name}").absolute()
    alg, envs, training = set_up(args, run, folder)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    manager = ocp.CheckpointManager(folder / "checkpoints", options=options)
    begun, seed = manager.latest_step() or 0, run.seed + 1_000_000  # which training does not use
    if run.resume:
        training = manager.restore(begun, args=ocp.args.StandardRestore(training))
    (folder / "args.json").write_text(json.dumps({"run": asdict(run), "args": asdict(args)}))
    vault = alg.vault(folder / "experience") if getattr(args, "save_experience", False) else None
    require(vault is None or run.num_seeds == 1, "save_experience: only that of one agent is kept")
    if vault is not None:  # of a run that is resumed it drops what came after the checkpoint
        vault.write(training.agent.replay)
    log = start_log(run, folder, asdict(run) | asdict(args), begun)
    total, interval = args.total_timesteps, math.ceil(run.log_interval / alg.size) * alg.size
    steps, recent, start_time = range(begun, total, interval), deque[Any](), time.time()
    loop, score = (train_compiled if envs else train_on_host), math.nan
    intervals = loop(alg, run, envs, training, steps) if steps else [(begun, training, {})]
    every: Any = envs and jax.jit(jax.vmap(partial(envs.evaluate, n=run.eval_episodes, seed=seed)))
    bar = tqdm(total=len(steps) * interval, unit=" steps", unit_scale=True, disable=None)
    for step, training, metrics in intervals:
        stopped, metrics = (asked := stop()) or metrics is None, jax.device_get(metrics or {})
        recent.append(np.asarray(training.ended).reshape(-1, 3))
        while (sum(recent) - recent[0])[:, 0].min() >= 100:
            recent.popleft()
        metrics["charts/SPS"] = sps = (step - begun or math.nan) / (time.time() - start_time)
        is_due = step >= total or step % run.checkpoint_interval < interval
        view = alg.view(training.agent)
        if run.eval_episodes and is_due and not stopped:
            scores = every(view) if envs else evaluate(alg, run, view, run.eval_episodes, seed)
            metrics["eval/episodic_return"] = score = np.mean(scores, axis=-1)
            tqdm.write(f"{step:,} steps: return {np.mean(scores):.1f} without exploration")
        if run.capture_video and is_due and not stopped:
            first = jax.tree.map(lambda x: x[0], view) if envs else view
            evaluate(alg, run, first, 1, seed, f"{folder}/videos/{step}")
        number, returns, _ = sum(recent).T
        returns = np.where(number, returns / np.maximum(number, 1), score)  # offline none ends
        bar.set_postfix_str(f"return {returns.mean():.1f}", refresh=False)
        bar.update(interval)
        if bar.disable and step % max(total // 20, 1) < interval:
            print(f"{step:,} steps, {sps:,.0f} a second, return {returns.mean():.1f}", flush=True)
        log(step, metrics)
        if vault is not None:
            vault.write(training.agent.replay)
        if (stopped or is_due) and step != manager.latest_step():
            size = sum(x.nbytes for x in jax.tree.leaves(training))  # orbax fails in many lines
            require(shutil.disk_usage(folder).free > 2 * size, f"no space left, --resume {folder}")
            manager.save(step, args=ocp.args.StandardSave(training))
        if asked:  # where an environment failed, the next step of the loop raises its error
            break
    return training, returns, folder


def main() -> None:
    """The command line; exit code 2 for a mistake in the flags, 130 after Ctrl-C."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # acting: 12 us a call, and not 41
    threading.excepthook = lambda _: None  # TensorBoard's thread: its writer raises the error, too
    Flags = NamedTuple("Flags", [("experiment", Run), ("algorithm", Args)])  # noqa: UP014
    parse = partial(tyro.cli, Flags, description=__doc__, config=[tyro.conf.OmitArgPrefixes])
    interrupted = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        run, args = parse()
        if run.resume:
            saved = json.loads(Path(run.resume, "args.json").read_text())
            run, args = parse(default=Flags(Run(**saved["run"]), Args(**saved["args"])))
            same = saved["args"] | {"total_timesteps": args.total_timesteps}
            require(asdict(args) == same, "resume: only total_timesteps may change")
        _, returns, folder = train(args, run, interrupted.is_set)
    except (UsageError, json.JSONDecodeError, ImportError, OSError) as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), file=sys.stderr)
        sys.exit(2)
    print(f"{folder}: mean return of the last episodes", *(f"{x:.1f}" for x in returns))
    sys.exit(130 if interrupted.is_set() else 0)


if __name__ == "__main__":
    main()
