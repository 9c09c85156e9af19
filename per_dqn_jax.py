"""DQN with prioritised replay on Gymnasium environments: Schaul et al. 2016, arXiv 1511.05952.

    python per_dqn_jax.py --env-id CartPole-v1 --num-envs 8
    python per_dqn_jax.py --env-id phys2d/CartPole-v1 --num-envs 10 --num-seeds 10

In an iteration N environments make S steps with the same parameters, and these are then updated:

    for each log interval:                                                # train
        for each of its iterations:                                       # OrdinaryLoop.intervals
            noise = draw_noise(key, schedule)
            for each of S steps:                                          # collect_rollout
                action = act(policy, observation, noise)
                observation, reward, terminated, truncated = envs.step(action)
            state, metrics = train_step(state, rollout, schedule, key)    # update_training
        write_metrics; when they are due, save and evaluate_agents

Environments written in JAX are compiled with the learning into one program: compiled.py.

The proportional variant. Differs from the paper: Adam for RMSProp, no clipping of rewards and
errors, hyperparameters for classic control. An episode that a time limit cuts off is bootstrapped.
"""

import importlib
import json
import math
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, astuple, dataclass, replace
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
from gymnasium.vector import VectorEnv
from jax import Array
from jax.experimental import multihost_utils
from jax.flatten_util import ravel_pytree
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


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if x.dtype == jnp.uint8 and x.ndim > 2:
            images = importlib.import_module("images")
            if images.are_images(x):
                return nn.Dense(self.num_actions)(images.nature_cnn(x))
        x = x.reshape(len(x), -1).astype(jnp.float32)
        x = nn.relu(nn.Dense(120)(x))
        x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)


class Step(NamedTuple):
    """A step of an environment [...], of N of them [N, ...], or those of a rollout [S, N, ...]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # it was cut off
    is_step: Any  # False after the end of an episode, where the environment only resets
    next_observation: Any = None  # of a rollout the observation after it [N, ...]


class Transition(NamedTuple):
    """n steps of an environment taken as one [B, ...]."""

    observation: Array
    action: Array  # [B]
    reward: Array  # [B], the discounted sum of n rewards, or of fewer where the episode ended
    discount: Array  # [B], of the value of next_observation, 0 where the episode terminated
    next_observation: Array
    is_valid: Array  # [B], False where the first step only resets


class State(NamedTuple):
    """All that learning changes."""

    params: Array  # [P], as one vector: the fewer arrays, the faster the call of a program
    target_params: Array  # [P]
    opt_state: optax.OptState
    replay: Any  # the replay buffer's state, of Steps
    updates: Array  # gradient steps so far


class DQN:
    """The algorithm, as pure functions of a `State`."""

    acts_while_learning = True  # a rollout is collected while the one before is learned from

    def __init__(self, args: Args, observation: np.ndarray, action_space: Any) -> None:
        starts = args.batch_size <= args.learning_starts < args.total_timesteps
        require(starts, "learning_starts must be at least batch_size, less than total_timesteps")
        is_discrete = isinstance(action_space, gym.spaces.Discrete)
        require(is_discrete, f"DQN takes Discrete actions, not {action_space}")
        self.args = args
        self.num_actions = int(action_space.n)
        self.first_action = int(action_space.start)
        # The fewest steps that are whole gradient steps and whole steps of all environments.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        self.updates_per_iteration = self.steps_per_iteration // args.train_frequency
        self.is_offline = args.offline != ""
        steps = 0 if self.is_offline else self.steps_per_iteration // args.num_envs
        self.rollout_shape = (steps, args.num_envs)
        self.no_noise = np.int32(-1)
        self.example = Step(observation, np.int32(0), np.float32(0), *[np.False_] * 3)
        self.stored = self.example  # as the replay holds it: of a stack only the newest frame
        if args.frame_stack > 1:
            self.stored = self.example._replace(observation=observation[-1])
        self.network = QNetwork(self.num_actions)
        shapes = jax.eval_shape(self.network.init, jax.random.PRNGKey(0), observation[None])
        _, self.unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, shapes))
        self.optimizer = optax.adam(args.learning_rate, eps=args.adam_epsilon)
        window = args.frame_stack + args.n_step  # a stack, and n steps after it
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        if self.is_offline:
            rows = len(self.open_vault(args.offline, create=False))
        capacity = rows * args.num_envs
        self.experience_size = capacity if args.save_experience else 0
        streams: Any = {"num_envs": args.num_envs, "sequence_length": window}
        self.replay = buffers.prioritised_replay(capacity, args.priority_exponent, **streams)

    def open_vault(self, folder: Path | str, create: bool = True) -> Any:
        """The experience that is kept on disk there."""
        vault = importlib.import_module("vault")
        return vault.Vault(folder, self.stored, self.args.num_envs, create=create)

    def init(self, key: Array) -> State:
        """The state before training."""
        params, _ = ravel_pytree(self.network.init(key, self.example.observation[None]))
        opt_state = self.optimizer.init(params)
        replay = self.replay.init(self.stored)
        return State(params, params, opt_state, replay, updates=jnp.int32(0))

    def restart(self, state: State) -> State:
        """The state where environments start anew, before training and after a resume."""
        replay = state.replay
        if self.is_offline:
            vault = self.open_vault(self.args.offline, create=False)
            rows = 0 if replay.size else len(vault)  # a checkpoint has them, with their priorities
            for begin in range(0, rows, 4096):
                steps = vault.read(begin, min(begin + 4096, rows))
                replay = self.replay.add_batch(replay, steps)
            return state._replace(replay=replay)
        # The episodes that went on are cut off: what the last row observed ends them.
        steps = replay.storage
        last = (replay.cursor - 1) % len(steps.is_step)
        before = (replay.cursor - 2) % len(steps.is_step)
        goes_on = steps.is_step[before] & ~steps.terminated[before]
        truncated = steps.truncated.at[before].set(goes_on)
        is_step = steps.is_step.at[last].set(False)
        steps = steps._replace(truncated=truncated, is_step=is_step)
        return state._replace(replay=replay._replace(storage=steps))

    def schedule(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """What changes with time, for the iterations that start at `steps`."""
        args = self.args
        exploration_steps = args.exploration_fraction * args.total_timesteps
        epsilon = np.interp(steps, [0, exploration_steps], [args.start_e, args.end_e])
        learns = steps + self.steps_per_iteration > args.learning_starts
        gradient_steps = np.where(learns, self.updates_per_iteration, 0)
        beta = np.interp(steps, [0, args.total_timesteps], [args.importance_exponent, 1])
        return {
            "epsilon": epsilon.astype(np.float32),
            "gradient_steps": gradient_steps,
            "beta": beta.astype(np.float32),
        }

    def draw_noise(self, key: Array, schedule: dict) -> Array:
        """The noise of a rollout [S, N]: random actions, -1 for the best one."""
        explore_key, action_key = jax.random.split(key)
        action = jax.random.randint(action_key, self.rollout_shape, 0, self.num_actions)
        explores = jax.random.uniform(explore_key, self.rollout_shape) < schedule["epsilon"]
        return jnp.where(explores, action, self.no_noise)

    def policy(self, state: State) -> Array:
        """What `act` needs of a state."""
        return state.params

    @partial(jax.jit, static_argnums=0)
    def act(self, policy: Array, observation: Array, noise: Array) -> Array:
        """Actions [N] with noise [N]."""
        best_action = jnp.argmax(self.q_values(policy, observation), axis=-1)
        return jnp.where(noise < 0, best_action, noise)

    def to_env_action(self, action: Any) -> Any:
        """The environment's actions, which need not start at 0."""
        return action + self.first_action

    def q_values(self, params: Array, observation: Array) -> Any:
        """Q(s, .) [B, num_actions]."""
        return self.network.apply(self.unravel(params), observation)

    def fold(self, window: Step) -> Transition:
        """Windows [B, W, ...] of steps as transitions of n steps, fewer where an episode ends."""
        args = self.args
        observation = buffers.stack_frames(window.observation, args.frame_stack, window.is_step)
        first = args.frame_stack - 1  # the steps before it only fill its stack
        steps = slice(first, first + args.n_step)
        ends = (window.terminated[:, steps], window.truncated[:, steps])
        reward, discount, taken = buffers.n_step_return(window.reward[:, steps], *ends, args.gamma)
        last = observation[jnp.arange(len(taken)), taken]
        action = window.action[:, first]
        is_valid = window.is_step[:, first]
        return Transition(observation[:, 0], action, reward, discount, last, is_valid)

    def loss(self, params: Array, target_params: Array, batch: Transition, weights: Array) -> tuple:
        """Weighted mean squared TD error of the batch; the metrics and the TD errors [B]."""
        next_q = self.q_values(target_params, batch.next_observation)
        chooser = next_q
        if self.args.double_q:
            chooser = self.q_values(params, batch.next_observation)
        next_action = jnp.argmax(chooser, axis=-1)
        next_value = next_q[jnp.arange(len(next_q)), next_action]
        target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
        # Not by an index, because its gradient would be a scatter.
        chosen = jax.nn.one_hot(batch.action, self.num_actions, dtype=jnp.float32)
        values = self.q_values(params, batch.observation)
        value = jnp.sum(values * chosen, axis=-1)
        rows = jnp.maximum(batch.is_valid.sum(), 1)
        td_error = target - value
        loss = jnp.sum(weights * td_error**2, where=batch.is_valid) / rows
        mean_value = jnp.sum(value, where=batch.is_valid) / rows
        return loss, ({"losses/td_loss": loss, "losses/q_values": mean_value}, td_error)

    def gradient_step(self, state: State, schedule: dict, key: Array) -> tuple[State, dict]:
        """Learns from a batch of the replay; moves the target network when it is due."""
        args = self.args
        sample = self.replay.sample(state.replay, key, args.batch_size)
        batch = self.fold(split_rows(sample.experience))
        gradient_of_loss = jax.grad(self.loss, has_aux=True)
        probabilities = jnp.where(batch.is_valid, sample.probabilities, 0)
        num_items = self.replay.size(state.replay)
        weights = buffers.importance_weights(probabilities, num_items, schedule["beta"])
        gradient, (metrics, td_error) = gradient_of_loss(
            state.params, state.target_params, batch, weights
        )
        # A step that only resets is not drawn again.
        priorities = jnp.where(batch.is_valid, jnp.abs(td_error) + args.priority_epsilon, 0)
        replay = self.replay.set_priorities(state.replay, sample.indices, priorities)
        smallest = jnp.min(weights, where=batch.is_valid, initial=1)
        metrics["losses/importance_weight_min"] = smallest
        metrics["losses/priority_max"] = replay.max_priority
        changes, opt_state = self.optimizer.update(gradient, state.opt_state)
        params = optax.apply_updates(state.params, changes)
        updates = state.updates + 1
        period = max(args.target_network_frequency // args.train_frequency, 1)
        tau = jnp.where(updates % period == 0, args.tau, 0.0)
        target_params = optax.incremental_update(params, state.target_params, tau)
        return State(params, target_params, opt_state, replay, updates), metrics

    def train_step(self, state: State, rollout: Step, schedule: dict, key: Array) -> tuple:
        """Stores a rollout [S, N] and makes the gradient steps: State, metrics of the last one."""
        steps = rollout._replace(next_observation=None)
        if self.args.frame_stack > 1:
            steps = steps._replace(observation=rollout.observation[:, :, -1])
        if self.args.clip_rewards:
            steps = steps._replace(reward=jnp.sign(rollout.reward))
        state = state._replace(replay=self.replay.add_batch(state.replay, steps))
        keys = jax.random.split(key, self.updates_per_iteration)

        def update(i: Array, carry: tuple) -> tuple:
            state, _ = carry
            return self.gradient_step(state, schedule, keys[i])

        nan = jnp.float32(jnp.nan)  # which is not logged
        no_metrics = {"losses/td_loss": nan, "losses/q_values": nan}
        no_metrics |= {"losses/importance_weight_min": nan, "losses/priority_max": nan}
        return jax.lax.fori_loop(0, schedule["gradient_steps"], update, (state, no_metrics))


Algorithm = DQN


# === common to all scripts ===
#
# What is used of an algorithm: steps_per_iteration, rollout_shape, example, no_noise, is_offline,
# acts_while_learning, experience_size; the functions init, restart, schedule, draw_noise, policy,
# act, to_env_action, train_step and, where experience is kept, open_vault.

LONGEST_EPISODE = 30_000  # steps of an evaluation; episodes of Atari have up to 27,000


class UsageError(ValueError):
    """A mistake in the flags, found before any training."""


def require(condition: Any, message: str) -> None:
    """Raises UsageError unless the condition holds."""
    if not condition:
        raise UsageError(message)


@dataclass(frozen=True)
class Run:
    """Flags of the experiment."""

    exp_name: str = Path(__file__).stem  # part of the folder's name
    env_id: str = "CartPole-v1"  # a registered Gymnasium environment; module:id imports the module
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as {"continuous": true}
    seed: int = 1  # seed of the environments, the exploration, the network and the learning
    num_seeds: int = 1  # agents trained at once, with this seed and those after it; compiled only
    num_devices: int = 1  # of each process, to spread these over, or the environments of one agent
    async_envs: bool = False  # step each environment in a process of its own
    log_interval: int = 1_000  # steps between two points of the charts
    resume: str = ""  # folder of a run to go on with; its flags are the defaults of the others
    checkpoint_interval: int = 100_000  # steps between two checkpoints; there is one at the end
    eval_episodes: int = 10  # episodes without exploration at each checkpoint; 0: no evaluation
    capture_video: bool = False  # record one more episode there
    track: bool = False  # log to Weights & Biases, too: WANDB_PROJECT, WANDB_ENTITY say where


@dataclass(frozen=True)
class Processes:
    """Flags of this process, where several on one or many machines train together: compiled only.

    SLURM, Open MPI and Kubernetes need no more than --distributed.
    """

    distributed: bool = False  # train with other processes
    coordinator_address: str | None = None  # HOST:PORT of the first one
    num_processes: int | None = None  # how many they are
    process_id: int | None = None  # which one this is, from 0


class Flags(NamedTuple):
    """All flags."""

    experiment: Run
    algorithm: Args
    processes: Processes = Processes()


class Training(NamedTuple):
    """All that changes and that a checkpoint holds; compiled [num_seeds, ...]."""

    agent: State
    key: Array
    current: Array  # [2, N], return and length so far of the episodes that go on
    ended: Array  # [3], number, returns, lengths of those that ended in this log interval
    envs: Any = None  # where functional environments stand


def split_rows(batch: Any) -> Any:
    """A batch [B, ...], split over the devices that train an agent together: docs/scale.md."""
    devices = jax.sharding.get_abstract_mesh().shape.get("envs", 1)
    rows = len(jax.tree.leaves(batch)[0])
    if devices == 1 or rows % devices > 0:
        return batch
    return jax.lax.with_sharding_constraint(batch, jax.sharding.PartitionSpec("envs"))


def start_training(alg: Algorithm, seed: Array) -> tuple[Training, Array]:
    """The state before training, and a key to start functional environments with."""
    key = jax.random.PRNGKey(seed)
    agent_key, env_key, key = jax.random.split(key, 3)
    agent = alg.init(agent_key)
    current = jnp.zeros((2, alg.args.num_envs))
    return Training(agent, key, current, ended=jnp.zeros(3)), env_key


def count_episodes(training: Training, rollout: Step) -> Training:
    """Adds each step of a rollout [S, N] to the episodes that ended or to those that go on."""
    done = rollout.terminated | rollout.truncated
    # Whether the episode of a step ends in this rollout: at that step or at a later one, [S, N].
    ends = jax.lax.cumsum(done.astype(jnp.int32), reverse=True) > 0
    # Whether the episode ends that was going on before, [N].
    first_ends = jnp.any(done, axis=0)
    steps = jnp.stack([rollout.reward, rollout.is_step])  # [2, S, N]
    sums = jnp.sum(training.current, axis=1, where=first_ends)
    sums += jnp.sum(steps, axis=(1, 2), where=ends)
    ended = training.ended + jnp.append(done.sum(), sums)
    current = jnp.where(first_ends, 0.0, training.current)
    current += jnp.sum(steps, axis=1, where=~ends)
    return training._replace(current=current, ended=ended)


def update_training(alg: Algorithm, training: Training, rollout: Step, schedule: dict) -> tuple:
    """Learns from a rollout [S, N] and counts its episodes: Training, metrics, policy."""
    key, learn_key = jax.random.split(training.key)
    agent, metrics = alg.train_step(training.agent, rollout, schedule, learn_key)
    training = count_episodes(training._replace(agent=agent, key=key), rollout)
    number = training.ended[0]
    means = training.ended[1:] / jnp.where(number > 0, number, jnp.nan)  # NaN is not logged
    metrics["charts/episodic_return"] = means[0]
    metrics["charts/episodic_length"] = means[1]
    for name, value in schedule.items():
        metrics[f"charts/{name}"] = value
    return training, metrics, alg.policy(agent)


def is_native(run: Run, num_envs: int, kwargs: dict) -> bool:
    """Whether to take the environment's own vector version, and not single ones in a loop.

    From 4 environments on it is faster. It is also taken if there are no single ones, or if they
    observe something else, so that the environment is the same at every num_envs.
    """
    single: Any = None
    native: Any = None
    with suppress(Exception):  # there is none, or it takes other arguments
        single = gym.make(run.env_id, **kwargs)
    if single is not None and hasattr(single.unwrapped, "func_env"):
        return False  # its native version stops all of them while one resets
    with suppress(Exception):
        native = gym.make_vec(run.env_id, vectorization_mode="vector_entry_point", **kwargs)
    if single is None:
        return native is not None
    if native is not None:
        is_faster = num_envs >= 4 and not run.async_envs
        return is_faster or native.single_observation_space != single.observation_space
    if single.spec.vector_entry_point and kwargs:
        is_other = is_native(run, 1, {})
        require(not is_other, "its vector version, which is always taken, refuses these arguments")
    return False


def ignore_interrupts(env: gym.Env) -> gym.Env:
    """In a terminal Ctrl-C reaches all processes, but only that of the training ends by it."""
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return env


def make_envs(args: Args, run: Run, num_envs: int, video_folder: str = "") -> VectorEnv:
    """N environments that are stepped together; records their episodes if a folder is given."""
    options: dict = {"vectorization_mode": "vector_entry_point"}
    try:
        kwargs = json.loads(run.env_kwargs)
        if is_native(run, num_envs, kwargs):
            require(not video_folder, "capture_video: its vector version is never drawn")
        else:
            options = {"vectorization_mode": "sync", "vector_kwargs": {"copy": False}}
            if run.async_envs:
                how = {"copy": False, "context": "forkserver"}
                options = {"vectorization_mode": "async", "vector_kwargs": how}
            options["wrappers"] = [ignore_interrupts]
        if video_folder:
            record = partial(gym.wrappers.RecordVideo, video_folder=video_folder)
            options["render_mode"] = "rgb_array"
            options["wrappers"].append(record)
        envs = gym.make_vec(run.env_id, num_envs, **options, **kwargs)
    except Exception as error:
        raise UsageError(f"{run.env_id} with env_kwargs {run.env_kwargs}: {error}") from error
    mode = str(envs.metadata.get("autoreset_mode"))
    require("NEXT_STEP" in mode, f"{run.env_id}: its autoreset_mode must be NEXT_STEP, not {mode}")
    space = envs.single_observation_space
    hint = f"{run.env_id}: observations are {space}, no Box: wrap it as in docs/environments.md"
    require(isinstance(space, gym.spaces.Box), hint)
    if args.frame_stack > 1:
        return importlib.import_module("images").FrameStack(envs, args.frame_stack)
    return envs


def environment_seed(run: Run, *step: int) -> int:
    """The seed of the first of N environments that start at `step`; an evaluation has 0, 1."""
    words = np.random.SeedSequence([run.seed, *step]).generate_state(1)
    return int(words[0]) // 4  # 30 bits: some environments take no more than 31


def collect_rollout(
    alg: Algorithm, envs: VectorEnv, observation: np.ndarray, is_step: Any, policy: Any, noise: Any
) -> tuple:
    """Steps the environments with noise [S, N, ...]: Steps [S, N, ...]; the next is_step [N]."""
    steps_and_envs = noise.shape[:2]
    rollout = jax.tree.map(lambda x: np.empty(steps_and_envs + x.shape, x.dtype), alg.example)
    for t in range(len(noise)):
        action = np.asarray(alg.act(policy, observation, noise[t]))
        rollout.observation[t] = observation  # before the step, which may write over it
        observation, reward, terminated, truncated, _ = envs.step(alg.to_env_action(action))
        rollout.action[t] = action
        rollout.reward[t] = reward
        rollout.terminated[t] = terminated
        rollout.truncated[t] = truncated
        rollout.is_step[t] = is_step
        is_step = ~(rollout.terminated[t] | rollout.truncated[t])
    return rollout._replace(next_observation=observation.copy()), is_step


def evaluate(
    alg: Algorithm, run: Run, policy: Any, episodes: int, video_folder: str = ""
) -> np.ndarray:
    """Returns [episodes] of the first episode of as many environments, without exploration."""
    no_noise = np.stack([alg.no_noise] * episodes)
    returns = np.zeros(episodes)
    is_over = np.zeros(episodes, bool)
    with closing(make_envs(alg.args, run, episodes, video_folder)) as envs:
        observation, _ = envs.reset(seed=environment_seed(run, 0, 1))
        for _ in range(LONGEST_EPISODE):
            action = np.asarray(alg.act(policy, observation, no_noise))
            observation, reward, terminated, truncated, _ = envs.step(alg.to_env_action(action))
            returns += np.where(is_over, 0, reward)
            is_over |= terminated | truncated
            if is_over.all():
                return returns
    tqdm.write(f"an evaluation cuts off episodes after {LONGEST_EPISODE:,} steps")
    return returns


class OrdinaryLoop:
    """Trains one agent in environments that are stepped from Python."""

    def __init__(self, alg: Algorithm, run: Run) -> None:
        self.alg = alg
        self.run = run
        self.update = jax.jit(partial(update_training, alg), donate_argnums=0)
        self.draw_noises = jax.jit(jax.vmap(self.draw_noise))

    def start(self) -> Training:
        """The state before training."""
        seed = np.uint32(self.run.seed % 2**32)
        training, _ = jax.jit(start_training, static_argnums=0)(self.alg, seed)
        return training

    def draw_noise(self, step: Array, schedule: dict) -> Array:
        """The noise of the rollout that starts at `step`."""
        key = jax.random.fold_in(jax.random.PRNGKey(self.run.seed), step)
        return self.alg.draw_noise(key, schedule)

    def iterations(self, steps: range) -> Iterator:
        """Yields the first step of each iteration, its schedule and its noise."""
        for begin in steps:
            starts = np.arange(begin, begin + steps.step, self.alg.steps_per_iteration)
            schedules = self.alg.schedule(starts)
            noises = np.asarray(self.draw_noises(starts, schedules))  # in one call, which is faster
            for i, step in enumerate(starts):
                schedule = {name: values[i] for name, values in schedules.items()}
                yield int(step), schedule, noises[i]

    def intervals(self, training: Training, steps: range) -> Iterator:
        """Trains: yields step, Training, metrics after each log interval, None if one failed."""
        alg = self.alg
        failure = None
        agent = alg.restart(training.agent)
        training = training._replace(agent=agent, current=jnp.zeros_like(training.current))
        # A copy, because `update` writes over the state while the policy is acted with.
        policy = jax.tree.map(jnp.copy, alg.policy(agent))
        learning: Future = Future()
        learning.set_result((training, {}, policy))
        envs = make_envs(alg.args, self.run, alg.args.num_envs)
        with closing(envs), ThreadPoolExecutor(max_workers=1) as learner:
            observation, _ = envs.reset(seed=environment_seed(self.run, steps.start))
            is_step = np.ones(len(observation), bool)
            for step, schedule, noise in self.iterations(steps):
                try:
                    rollout, is_step = collect_rollout(
                        alg, envs, observation, is_step, policy, noise
                    )
                except Exception as error:
                    error.add_note(f"in {self.run.env_id} at step {step}")
                    failure = error
                training, metrics, policy = learning.result()
                if failure:
                    yield step, training, None
                    raise failure
                observation = rollout.next_observation
                if step in steps[1:]:
                    yield step, training, metrics
                if step in steps:
                    training = training._replace(ended=jnp.zeros(3))
                learning = learner.submit(self.update, training, rollout, schedule)
                if not alg.acts_while_learning:
                    _, _, policy = learning.result()
            training, metrics, _ = learning.result()
            yield steps[-1] + steps.step, training, metrics

    def evaluate(self, policy: Any) -> np.ndarray:
        """Returns [eval_episodes] without exploration."""
        return evaluate(self.alg, self.run, policy, self.run.eval_episodes)


def check_flags(args: Args, run: Run) -> None:
    """Finds the mistakes that can be seen without an environment."""
    flags = asdict(args) | asdict(run)
    for name, value in flags.items():
        least = 0 if name in ("seed", "eval_episodes") else 1
        if type(value) is int and value < least:
            raise UsageError(f"{name} must be at least {least}, not {value}")
    is_object = isinstance(json.loads(run.env_kwargs), dict)
    require(is_object, f"env_kwargs must be an object in JSON, not {run.env_kwargs}")
    if run.track:
        importlib.import_module("wandb")


def set_up(args: Args, run: Run) -> tuple:
    """The algorithm and the loop that trains it; checks the flags."""
    check_flags(args, run)
    with tempfile.TemporaryDirectory() as folder:
        video_folder = f"{folder}/videos" if run.capture_video else ""
        envs: Any = make_envs(args, replace(run, async_envs=False), 1, video_folder)
        envs.close()
    space = envs.single_observation_space
    dtype = np.uint8 if space.dtype == np.uint8 else np.float32
    env = envs.unwrapped.envs[0] if hasattr(envs.unwrapped, "envs") else envs
    kwargs = json.loads(run.env_kwargs)
    is_vector = run.async_envs and is_native(run, 1, kwargs)
    require(not is_vector, f"async_envs: {run.env_id} has a vector version, which is always taken")
    is_functional = hasattr(env.unwrapped, "func_env") and not envs.spec.additional_wrappers
    try:
        alg = Algorithm(args, np.zeros(space.shape, dtype), envs.single_action_space)
        if is_functional and not alg.is_offline:
            require(not run.async_envs, f"async_envs: {run.env_id} is compiled")
            compiled = importlib.import_module("compiled")
            parts = [partial(start_training, alg), partial(update_training, alg)]
            loop: Any = compiled.CompiledLoop(alg, run, env, *parts, LONGEST_EPISODE)
        else:
            is_one = run.num_seeds == run.num_devices == jax.process_count() == 1
            require(is_one, f"{run.env_id} trains one agent only, on one device of one process")
            loop = OrdinaryLoop(alg, run)
    except ValueError as error:
        raise UsageError(error) from error
    is_kept = alg.experience_size == 0 or run.num_seeds == jax.process_count() == 1
    require(is_kept, "save_experience: only that of one agent in one process is kept")
    is_drawn = not run.capture_video or jax.process_count() == 1
    require(is_drawn, "capture_video: resume the run in one process for a video")
    return alg, loop


def steps_per_interval(alg: Algorithm, run: Run) -> int:
    """The steps of a log interval, which is whole iterations."""
    steps = math.ceil(run.log_interval / alg.steps_per_iteration) * alg.steps_per_iteration
    is_kept = alg.experience_size == 0 or steps <= alg.experience_size
    require(is_kept, f"save_experience: log_interval {steps} is more than buffer_size holds")
    return steps


def new_folder(run: Run) -> Path:
    """A folder under runs/ that no other run has, the same in all processes."""

    def folder(start: int) -> Path:
        name = f"{run.env_id}__{run.exp_name}__{run.seed}__{start}"
        return Path("runs", re.sub("[/:]", "-", name)).absolute()

    start = int(time.time())
    while jax.process_index() == 0:
        with suppress(FileExistsError):  # of a run that started in the same second
            folder(start).mkdir(parents=True)
            break
        start += 1
    return folder(int(multihost_utils.broadcast_one_to_all(start)))


def saved_flags(folder: Path) -> Flags:
    """The flags that a run was started with."""
    saved = json.loads((folder / "args.json").read_text())
    is_ours = saved["args"].keys() == asdict(Args()).keys()
    require(is_ours, f"resume: {folder} is a run of another script")
    return Flags(Run(**saved["run"]), Args(**saved["args"]))


def open_folder(args: Args, run: Run) -> Path:
    """The folder of a new run, or of the one to go on with; the flags are in its args.json."""
    if run.resume:
        folder = Path(run.resume).absolute()
        started, started_args, _ = saved_flags(folder)
        same_args = replace(started_args, total_timesteps=args.total_timesteps)
        require(args == same_args, "resume: only total_timesteps may change")
        for name in ("env_id", "env_kwargs", "seed", "num_seeds"):
            before = getattr(started, name)
            require(getattr(run, name) == before, f"resume: {name} must stay {before}")
        run = started
    else:
        folder = new_folder(run)
    flags = {"run": asdict(run), "args": asdict(args)}
    if jax.process_index() == 0:
        (folder / "args.json").write_text(json.dumps(flags))
    return folder


def open_writers(run: Run, folder: Path, flags: dict, begun: int) -> list:
    """TensorBoard's event files, one for each agent; only the first process has them."""
    if jax.process_index() > 0:
        return []
    if run.track:  # Weights & Biases follows the event files
        wandb = importlib.import_module("wandb")
        name = folder.name
        wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
    table = "|flag|value|\n|-|-|\n"
    for name, value in flags.items():
        table += f"|{name}|{value}|\n"
    start = SessionLog(status=SessionLog.START)  # TensorBoard drops what it has of later steps
    writers = []
    for i in range(run.num_seeds):
        path = folder / f"seed_{run.seed + i}" if i > 0 else folder
        writer = event_file_writer.EventFileWriter(str(path), flush_secs=1)  # wandb replaces it
        event = partial(Event, wall_time=time.time(), step=begun + 1)
        writer.add_event(event(session_log=start))
        writer.add_event(event(summary=text_pb("hyperparameters", table)))
        writers.append(writer)
    return writers


def write_metrics(writers: list, step: int, metrics: dict) -> None:
    """Writes {tag: one value, or one for each agent}, but not NaN."""
    rows = {tag: np.ravel(values) for tag, values in metrics.items()}
    for i, writer in enumerate(writers):
        points = []
        for tag, values in rows.items():
            value = values[i % len(values)]
            if not math.isnan(value):
                points.append(Summary.Value(tag=tag, simple_value=value))
        # All in one event, because add_scalar takes 0.2 ms for each.
        writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))


def recent_returns(intervals: Iterable, otherwise: Any) -> np.ndarray:
    """Mean return [num_seeds] over the fewest newest log intervals in which 100 episodes ended.

    `intervals` have `ended` of Training, the newest first. Without an episode it is `otherwise`.
    """
    total: Any = 0
    for ended in intervals:
        total = total + ended
        number, returns, _ = total.T
        if number.min() >= 100:
            break
    return np.where(number > 0, returns / np.maximum(number, 1), otherwise)


def evaluate_agents(
    alg: Algorithm, run: Run, loop: Any, training: Training, step: int, folder: Path
) -> Any:
    """The mean return of each agent [num_seeds] without exploration, and a video of an episode."""
    scores = np.nan
    policy = alg.policy(training.agent)
    if not jnp.isfinite(ravel_pytree(policy)[0]).all():
        tqdm.write(f"{step:,} steps: parameters are not finite, training has diverged")
    if run.eval_episodes > 0:
        returns = loop.evaluate(policy).reshape(run.num_seeds, -1)
        tqdm.write(f"{step:,} steps: return {returns.mean():.1f} without exploration")
        scores = returns.mean(axis=1)
    if run.capture_video:
        if training.envs is not None:  # compiled: that of the first agent
            policy = jax.tree.map(lambda x: x[0], policy)
        try:
            evaluate(alg, run, policy, 1, f"{folder}/videos/{step}")
        except Exception as error:
            error.add_note("MuJoCo without a screen needs MUJOCO_GL=egl or MUJOCO_GL=osmesa")
            raise
    return scores


def show_progress(bar: tqdm, steps: range, step: int, speed: float, returns: Callable) -> None:
    """The bar in a terminal; elsewhere a line about every 5 percent."""
    is_line_due = bar.disable and step % max(steps.stop // 20, 1) < steps.step
    if bar.update(steps.step) or is_line_due:
        text = f"return {returns().mean():.1f}"
        bar.set_postfix_str(text)
        if is_line_due:
            print(f"{step:,} steps, {speed:,.0f} a second, {text}", flush=True)


def open_checkpoints(run: Run, folder: Path, training: Training) -> tuple:
    """The checkpoints of a run; step and state of the newest, of a new run 0 and `training`."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    checkpoints = ocp.CheckpointManager(folder / "checkpoints", options=options)
    if not run.resume:
        return checkpoints, 0, training
    step = checkpoints.latest_step()
    require(step is not None, f"resume: {folder} has no checkpoint")
    return checkpoints, step, checkpoints.restore(step, args=ocp.args.StandardRestore(training))


def save(checkpoints: Any, writers: list, step: int, training: Training) -> None:
    """Saves the state of training and what was logged until then."""
    for writer in writers:
        writer.flush()  # raises the error of a full disk
    if step == checkpoints.latest_step():
        return
    folder = checkpoints.directory.parent
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(training))
    # In one line, where orbax would fail in many.
    has_room = shutil.disk_usage(folder).free > 2 * num_bytes
    require(has_room, f"no space left, --resume {folder}")
    checkpoints.save(step, args=ocp.args.StandardSave(training))


def train(args: Args, run: Run, stop: Callable[[], bool] = lambda: False) -> tuple:
    """Trains num_seeds agents, until `stop` says so after a log interval.

    Returns the state, the mean return of the last episodes [num_seeds], the folder.
    """
    alg, loop = set_up(args, run)
    interval = steps_per_interval(alg, run)
    folder = open_folder(args, run)
    checkpoints, begun, training = open_checkpoints(run, folder, loop.start())
    writers = open_writers(run, folder, asdict(run) | asdict(args), begun)
    vault = alg.open_vault(folder / "experience") if alg.experience_size > 0 else None
    if vault is not None:  # drops what a run that is resumed had after its checkpoint
        vault.write(training.agent.replay)
    steps = range(begun, args.total_timesteps, interval)
    # A run that is complete is only evaluated.
    intervals = loop.intervals(training, steps) if steps else [(begun, training, {})]
    is_quiet = jax.process_index() > 0 or None  # None: where there is no terminal
    bar = tqdm(total=len(steps) * interval, unit=" steps", unit_scale=True, disable=is_quiet)
    ended: deque = deque(maxlen=1_000)
    scores = np.nan
    start_time = time.time()
    for step, training, metrics in intervals:
        if vault is not None:
            vault.write(training.agent.replay)
        if metrics is None:  # an environment failed: its error comes next
            save(checkpoints, writers, step, training)
            continue
        is_stopped = stop()
        is_due = step >= args.total_timesteps or step % run.checkpoint_interval < interval
        speed = (step - begun) / (time.time() - start_time)
        if metrics:
            write_metrics(writers, step, metrics | {"charts/SPS": speed})
        if is_due or is_stopped:
            save(checkpoints, writers, step, training)
        if is_due and not is_stopped:
            scores = evaluate_agents(alg, run, loop, training, step, folder)
            write_metrics(writers, step, {"eval/episodic_return": scores})
        ended.appendleft(np.asarray(training.ended).reshape(-1, 3))
        show_progress(bar, steps, step, speed, partial(recent_returns, ended, scores))
        if is_stopped:
            break
    for writer in writers:
        writer.flush()
    return training, recent_returns(ended, otherwise=scores), folder


def parse_flags() -> Flags:
    """The flags of the command line. In a run that is resumed its own are the defaults."""
    parse = partial(tyro.cli, Flags, description=__doc__, config=[tyro.conf.OmitArgPrefixes])
    flags = parse()
    if flags.experiment.resume:
        flags = parse(default=saved_flags(Path(flags.experiment.resume)))
    is_joining = flags.processes.distributed or flags.processes == Processes()
    require(is_joining, "coordinator_address, num_processes, process_id: need distributed")
    return flags


def main() -> None:
    """The command line; exit code 2 for a mistake in the flags, 130 after Ctrl-C or SIGTERM."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # acting: 12 us a call, and not 41
    threading.excepthook = lambda _: None  # TensorBoard's thread: its writer raises the error, too
    interrupted = threading.Event()

    stop = interrupted.is_set

    def interrupt(number: int, _: Any) -> None:
        interrupted.set()
        signal.signal(number, signal.SIG_DFL)  # a second Ctrl-C ends the process

    try:
        run, args, processes = parse_flags()
        if processes.distributed:
            compiled = importlib.import_module("compiled")
            stop = compiled.join_processes(stop, *astuple(processes)[1:])
        for number in (signal.SIGINT, signal.SIGTERM):  # which JAX swallows, once it has joined
            signal.signal(number, interrupt)
        _, returns, folder = train(args, run, stop)
    except (UsageError, json.JSONDecodeError, ImportError, OSError) as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), file=sys.stderr)
        sys.exit(2)
    print(f"{folder}: mean return of the last episodes", *np.round(returns, 1))
    sys.exit(130 if stop() else 0)


if __name__ == "__main__":
    main()
