"""IQL, implicit Q-learning: Kostrikov et al. 2022, arXiv 2110.06169. CleanReplay, MIT license.

    python iql_jax.py --env-id Hopper-v5 --offline-data minari:mujoco/hopper/medium-v0
    python iql_jax.py --env-id Pendulum-v1 --offline-data my_trajectories.npz

Learns from offline data: environments are stepped only in evaluations, and steps are gradient
steps. `--beta 0` imitates the data (behaviour cloning). With `--offline-fraction 0.5` half of each
batch is offline data, and the agent collects the other half. `--init-from RUN` begins with an agent
that has learned from the data. Read `loss` first: it has a loss for each of three networks.

Equation numbers are the paper's. Differs: the three networks take each gradient step together, from
their previous parameters. Observations are normalised. Truncated episodes bootstrap. B: batch size.
A: size of an action.
"""

# `uv run` and `pipx run` install what is listed here.
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.7,!=0.11.1", "jaxlib>=0.7,!=0.11.1", "flax>=0.11", "optax>=0.2.5",
#     "gymnasium[classic-control]>=1.1", "numpy>=1.26", "tyro>=0.9.2", "tensorboard>=2.18",
#     "tqdm>=4.66", "tensorstore>=0.1.72", "safetensors>=0.5",
# ]
# ///

import importlib
import json
import math
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from jax import Array
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm

import buffers

if getattr(find_spec("cleanreplay"), "origin", None):  # None for a folder that is not a package
    import cleanreplay  # saves, resumes, evaluates, handles images, compiles the loop
    from cleanreplay import UsageError
else:  # this file and buffers.py alone train and log
    cleanreplay: Any = None  # type: ignore[no-redef]

    class UsageError(Exception):  # type: ignore[no-redef]
        """An error made by the user. The command line prints it as one line."""


@dataclass(frozen=True)
class Args:
    """Flags of the algorithm. Steps are gradient steps.

    With --offline-fraction below 1 they are environment steps, summed over all environments.
    """

    total_timesteps: int = 1_000_000  # number of training steps
    offline_data: str = ""  # an .npz file, a run with --save-experience, a vault, or minari:NAME
    offline_fraction: float = 1.0  # fraction of a batch from offline-data; 1: no environment steps
    best_fraction: float = 1.0  # fraction of the episodes that is kept: those of highest return
    expectile: float = 0.7  # tau of the value: 0.5 averages the data's actions, 1 takes the best
    beta: float = 3.0  # preference for better actions; 0: imitate all equally (cloning)
    max_weight: float = 100.0  # largest weight of an action in the policy's loss
    reward_scale: float = 0.0  # factor of the rewards; 0: 1,000 / range of the data's returns
    normalize_observations: bool = True  # by the mean and the standard deviation of the data
    random_return: float = math.nan  # return for which eval/normalized is 0
    expert_return: float = math.nan  # return for which eval/normalized is 100
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # Polyak coefficient of the target critics
    batch_size: int = 256  # transitions per gradient step
    learning_rate: float = 3e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the policy's learning rate to 0 if offline-fraction is 1
    hidden_sizes: tuple[int, ...] = (256, 256)  # widths of the hidden layers
    critic_layer_norm: bool = False  # layer normalisation in the critics
    policy_dropout: float = 0.0  # dropout rate of the policy
    n_step: int = 1  # n of the n-step return
    frame_stack: int = 1  # number of latest observations that the agent sees
    clip_rewards: bool = False  # learn from the sign of rewards; charts show them unclipped
    her_fraction: float = 0.0  # fraction of a batch with goals achieved later in the episode
    init_from: str = ""  # begin with what this run (a folder) or agent (a file) has learned
    num_envs: int = 1  # number of environments, stepped together if offline-fraction is below 1
    buffer_size: int = 1_000_000  # capacity of the replay buffer in environment steps
    learning_starts: int = 5_000  # environment steps before learning starts; at least batch-size
    train_frequency: int = 1  # environment steps between gradient steps
    gradient_steps: int = 1  # gradient steps every train-frequency environment steps
    save_experience: bool = False  # write every step in the replay to the run's folder, too


class MLP(nn.Module):
    """Computes outputs [B, F] from observations [B, ...] and, if given, actions [B, A]."""

    num_outputs: int
    features: Callable  # turns observations into vectors
    hidden_sizes: tuple[int, ...]
    layer_norm: bool = False
    dropout: float = 0.0

    @nn.compact
    def __call__(self, observation, *action):
        x = jnp.concatenate([self.features(observation), *action], axis=-1)
        for width in self.hidden_sizes:
            x = nn.Dense(width)(x)
            x = nn.relu(nn.LayerNorm()(x) if self.layer_norm else x)
            x = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(x)
        return nn.Dense(self.num_outputs)(x)


class Actor(nn.Module):
    """Computes means [B, A] between -1 and 1 and log deviations [A] of a Gaussian."""

    num_actions: int
    mlp: MLP

    @nn.compact
    def __call__(self, observation):
        log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,), jnp.float32)
        return nn.tanh(self.mlp(observation)), jnp.clip(log_std, -5, 2)


class Step(NamedTuple):
    """A step [N, ...] of N environments, or the steps [S, N, ...] of a rollout.

    An episode s0, s1, s2 that terminates, and the start t0 of the next one (Gymnasium's NEXT_STEP):

        observation   s0     s1     s2     t0     The step at s2 is the autoreset step: its
        terminated    False  True   False  False  action is ignored, its reward is 0, and nothing
        valid         True   True   False  True   is learned from it.
    """

    observation: Any
    action: Any  # between -1 and 1
    reward: Any
    terminated: Any  # the episode ended in a terminal state
    truncated: Any  # a time limit cut the episode off
    valid: Any  # False for an autoreset step


class Transition(NamedTuple):
    """Transitions of n steps, or of fewer at the end of an episode."""

    observation: Array  # [B, ...]
    action: Array  # [B, A]
    reward: Array  # [B], discounted sum of the rewards
    discount: Array  # [B], of the value of next_observation; 0 if the episode terminated
    next_observation: Array  # [B, ...]
    valid: Array  # [B], False if the first step is an autoreset step


class Networks(NamedTuple):
    """The parameters of the networks."""

    critics: Any  # the parameters of both critics, stacked: [2, ...]
    value: Any
    actor: Any


class Scales(NamedTuple):
    """Statistics of the data, with which observations and rewards are normalised."""

    mean: Any  # of observations
    std: Any
    reward: Any  # [], factor of the rewards


class State(NamedTuple):
    """Everything that training changes, and so everything that a checkpoint must hold."""

    networks: Networks
    target_critics: Any
    opt_state: optax.OptState
    scales: Scales
    replay: Any  # the state of the replay buffer of Steps


def range_of_returns(steps: Step):
    """Returns the largest minus the smallest return [] of the episodes in Steps [T, N].

    Unfinished episodes are left out. Returns 0 if no episode is finished.
    """
    over = steps.terminated | steps.truncated
    goes_on = jnp.pad(~over[:-1], ((1, 0), (0, 0))) * 1.0
    reward = jnp.where(steps.valid, steps.reward, 0)
    returns = buffers.discounted_sum(reward, goes_on, jnp.zeros_like(reward[0]))
    largest = jnp.max(returns, where=over, initial=-jnp.inf)
    smallest = jnp.min(returns, where=over, initial=jnp.inf)
    return jnp.where(over.any(), largest - smallest, 0)


class IQL:
    """The algorithm, as pure functions of a `State`.

    `shard_batch` may split a batch over devices, see cleanreplay/compiled.py. `wrap_replay` may
    return a replay that also samples offline data, see cleanreplay/replays.py.
    """

    def __init__(
        self,
        args: Args,
        observation_space,
        action_space,
        shard_batch=lambda batch: batch,
        wrap_replay=lambda replay: replay,
    ):
        # Learning from data alone takes no environment steps: steps are gradient steps.
        is_alone = args.offline_fraction == 1
        self.learning_starts = 0 if is_alone else args.learning_starts
        if not (is_alone or args.batch_size <= args.learning_starts < args.total_timesteps):
            raise UsageError("learning_starts must be from batch_size to total_timesteps - 1")
        if not args.offline_data:
            raise UsageError("offline_data: IQL learns from offline data, give a file or folder")
        is_bounded = isinstance(action_space, Box) and action_space.is_bounded()
        if not is_bounded or action_space.dtype.kind != "f" or len(action_space.shape) != 1:
            what = "IQL takes a Box [A] of floats with finite bounds"
            raise UsageError(f"{what}, not {action_space}: for Discrete actions use dqn_jax.py")
        self.args = args
        self.shard_batch = shard_batch
        self.action_space = action_space
        self.num_actions = action_space.shape[0]
        # The smallest number of steps that num_envs and train_frequency both divide.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        self.updates_per_iteration = self.steps_per_iteration // args.train_frequency
        self.updates_per_iteration *= args.gradient_steps
        self.rollout_shape = (self.steps_per_iteration // args.num_envs, args.num_envs)
        if is_alone:
            self.steps_per_iteration = self.updates_per_iteration = 100  # in one compiled call
            self.rollout_shape = (0, args.num_envs)
        self.example_step = example_of(observation_space, np.zeros(self.num_actions, np.float32))
        self.is_float = self.example_step.observation.dtype == np.float32
        self.critic, self.value, self.actor = self.networks_for(observation_space)
        self.optimizer = optax.adam(args.learning_rate)
        decay = optax.cosine_decay_schedule(1.0, args.total_timesteps)
        self.policy_rate = decay if args.anneal_lr and is_alone else lambda update: 1.0
        window = 1 + args.n_step  # length of the sequences that the replay samples
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        replay = buffers.uniform_replay(
            rows * args.num_envs, num_envs=args.num_envs, sequence_length=window
        )
        self.replay = wrap_replay(replay)
        self.act = jax.jit(self.act)  # per agent: the compiled program is freed with the agent

    def networks_for(self, observation_space) -> tuple:
        """Makes the networks of a critic, the value and the policy."""
        args = self.args
        features, _ = features_of(observation_space)  # hidden layers follow convolutions, too
        mlp: Any = partial(MLP, features=features, hidden_sizes=args.hidden_sizes)
        policy = mlp(self.num_actions, dropout=args.policy_dropout)
        return mlp(1, layer_norm=args.critic_layer_norm), mlp(1), Actor(self.num_actions, policy)

    def init(self, key) -> State:
        """Returns the initial state. Call it in `jit`, so that `target_critics` are a copy."""
        critic_key, value_key, actor_key = jax.random.split(key, 3)
        observation = self.example_step.observation[None]
        action = self.example_step.action[None]
        init_both = jax.vmap(self.critic.init, in_axes=(0, None, None))
        critics = init_both(jax.random.split(critic_key), observation, action)
        value = self.value.init(value_key, observation)
        networks = Networks(critics, value, self.actor.init(actor_key, observation))
        opt_state = self.optimizer.init(networks)
        zeros = jnp.zeros(observation.shape[1:] if self.is_float else (), jnp.float32)
        scales = Scales(zeros, zeros + 1, jnp.float32(self.args.reward_scale or 1))
        replay = self.replay.init(self.example_step)
        return State(networks, critics, opt_state, scales, replay)

    def read_data(self, state: State) -> State:
        """Fills the replay from an .npz file. The package also reads other data, and checks it."""
        if self.args.offline_fraction < 1:
            need("offline_fraction below 1")
        low, high = self.action_space.low, self.action_space.high
        try:
            rows = buffers.read_trajectories(self.args.offline_data)
            rows["action"] = 2 * (rows["action"] - low) / (high - low) - 1
            steps = Step(**{name: x[:, None] for name, x in rows.items()})
            replay = self.replay.add_batch(state.replay, steps)
        except (OSError, TypeError, ValueError) as error:
            raise UsageError(f"offline_data: {error}") from error
        return self.on_data(state._replace(replay=replay), steps)

    def on_data(self, state: State, steps: Step) -> State:
        """Computes the scales of observations and rewards from the data [T, N, ...]."""
        args, scales = self.args, state.scales
        if args.normalize_observations and self.is_float:
            where = jnp.expand_dims(steps.valid, range(2, steps.observation.ndim))
            mean = jnp.mean(steps.observation, axis=(0, 1), where=where)
            std = jnp.std(steps.observation, axis=(0, 1), where=where) + 1e-3
            shape = scales.mean.shape  # with --frame-stack that of a stack
            scales = scales._replace(
                mean=jnp.broadcast_to(mean, shape), std=jnp.broadcast_to(std, shape)
            )
        if not args.reward_scale:
            span = range_of_returns(steps)
            scales = scales._replace(reward=jnp.where(span > 0, 1_000 / span, 1.0))
        return state._replace(scales=scales)

    def policy_params(self, state: State):
        """Returns the part of a state that `act` needs."""
        return state.networks.actor, state.scales

    def normalize(self, observation, scales: Scales):
        """Normalises float observations [..., *shape] to the data's mean 0 and deviation 1."""
        return (observation - scales.mean) / scales.std if self.is_float else observation

    def act(self, params, observation, key=None, step=0):
        """Chooses actions [N, A]: the mean without a key, else sampled ones."""
        actor, scales = params
        mean, log_std = self.actor.apply(actor, self.normalize(observation, scales))
        if key is None:
            return mean
        noise = jax.random.normal(jax.random.fold_in(key, step), mean.shape, mean.dtype)
        return (mean + jnp.exp(log_std) * noise).clip(-1, 1)

    def to_env_action(self, action):
        """Returns the environment's actions, within its bounds."""
        low, high = self.action_space.low, self.action_space.high
        fraction = 0.5 * (action + 1)
        action = (low * (1 - fraction) + high * fraction).clip(low, high)
        return action.astype(min(low.dtype, action.dtype))  # JAX has no float64

    def q_values(self, critics, observation, action):
        """Computes Q(s, a) [2, B] of both critics."""
        both = jax.vmap(self.critic.apply, in_axes=(0, None, None))
        return both(critics, observation, action)[..., 0]

    def to_transitions(self, window: Step, key) -> Transition:
        """Turns sequences [B, n + 1, ...] into transitions. `key` is for changes of your own."""
        steps = jax.tree.map(lambda x: x[:, :-1], window)
        reward = jnp.sign(steps.reward) if self.args.clip_rewards else steps.reward
        reward, discount, num_steps = buffers.n_step_return(
            reward, steps.terminated, steps.truncated, self.args.gamma
        )
        next_observation = window.observation[jnp.arange(len(num_steps)), num_steps]
        first = jax.tree.map(lambda x: x[:, 0], window)
        return Transition(
            first.observation, first.action, reward, discount, next_observation, first.valid
        )

    def loss(self, networks: Networks, target_critics, batch: Transition, key):
        """Returns the sum of eqs. 5, 6 and 7, each of which trains one network, and the metrics."""
        args = self.args
        value = self.value.apply(networks.value, batch.observation)[:, 0]
        next_value = self.value.apply(networks.value, batch.next_observation)[:, 0]
        target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
        q = self.q_values(networks.critics, batch.observation, batch.action)
        target_q = self.q_values(target_critics, batch.observation, batch.action).min(axis=0)
        advantage = target_q - value
        asymmetry = jnp.where(advantage > 0, args.expectile, 1 - args.expectile)
        weight = jnp.exp(args.beta * jax.lax.stop_gradient(advantage)).clip(max=args.max_weight)
        mean, log_std = self.actor.apply(networks.actor, batch.observation, rngs={"dropout": key})
        log_prob = jax.scipy.stats.norm.logpdf(batch.action, mean, jnp.exp(log_std)).sum(axis=-1)
        losses = {
            "losses/value_loss": asymmetry * advantage**2,
            "losses/qf_loss": jnp.mean((q - target) ** 2, axis=0),
            "losses/actor_loss": -weight * log_prob,
            "losses/qf_values": q.mean(axis=0),
            "losses/advantage": advantage,
            "losses/weight": weight,
        }
        means = buffers.masked_mean(jnp.stack([*losses.values()]), batch.valid)
        loss = means[0] + 2 * means[1] + means[2]  # the mean over two critics becomes their sum
        return loss, dict(zip(losses, means, strict=True))

    def gradient_step(self, state: State, key, update) -> tuple[State, dict]:
        """Learns from a sampled batch. `update` counts as if learning had begun at step 0."""
        args, scales = self.args, state.scales
        sample_key, loss_key = jax.random.split(key)
        sample = self.replay.sample(state.replay, sample_key, args.batch_size)
        window = self.shard_batch(sample.experience)
        batch = self.to_transitions(window, jax.random.fold_in(sample_key, 1))
        batch = batch._replace(
            observation=self.normalize(batch.observation, scales),
            next_observation=self.normalize(batch.next_observation, scales),
            reward=batch.reward * scales.reward,
        )
        grad_fn = jax.grad(self.loss, has_aux=True)
        gradient, metrics = grad_fn(state.networks, state.target_critics, batch, loss_key)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.networks)
        rate = self.policy_rate(update)
        updates = updates._replace(actor=jax.tree.map(lambda x: rate * x, updates.actor))
        networks = optax.apply_updates(state.networks, updates)
        targets = optax.incremental_update(networks.critics, state.target_critics, args.tau)
        return State(networks, targets, opt_state, scales, state.replay), metrics

    def train_step(self, state: State, rollout: Step, key, step):
        """Stores the rollout [S, N] that began at `step`, and takes the gradient steps.

        Returns the State, the parameters to act with, and the metrics of the last gradient step.
        """
        state = state._replace(replay=self.replay.add_batch(state.replay, rollout))
        learns = step + self.steps_per_iteration > self.learning_starts
        gradient_steps = jnp.where(learns, self.updates_per_iteration, 0)
        keys = jax.random.split(jax.random.fold_in(key, step), self.updates_per_iteration)
        first = step // self.steps_per_iteration * self.updates_per_iteration + 1
        inputs = (keys, first + jnp.arange(self.updates_per_iteration))
        state, metrics = buffers.repeat(self.gradient_step, state, inputs, gradient_steps)
        metrics["charts/gradient_steps"] = gradient_steps
        metrics["charts/replay_ratio"] = gradient_steps / self.steps_per_iteration
        return state, self.policy_params(state), metrics


def collect_rollout(agent: IQL, envs, params, env_state: tuple, key, step: int):
    """Takes S steps in N environments. Returns Steps [S, N, ...] and the next `env_state`."""
    observation, valid = env_state
    num_steps, num_envs = shape = agent.rollout_shape
    rollout = Step(*[np.empty((*shape, *x.shape), x.dtype) for x in agent.example_step])
    observations, actions, rewards, terminations, truncations, valids = rollout
    for t in range(num_steps):
        observations[t] = observation  # `envs` may overwrite it
        action = np.asarray(agent.act(params, observations[t], key, step + t * num_envs))
        env_action = agent.to_env_action(action)
        observation, rewards[t], terminations[t], truncations[t], info = envs.step(env_action)
        actions[t] = action
        valids[t] = valid
        valid = ~(terminations[t] | truncations[t])
    rewards[~valids] = 0  # whatever the environments return for an autoreset step
    return rollout, (observation, valid)


def train_loop(agent: IQL, envs, log, key) -> State:
    """Learns from each rollout in a thread while collecting the next. Returns the final State."""
    init_key, act_key, learn_key = jax.random.split(key, 3)
    state = log.begin(envs, partial(jax.jit(agent.init), init_key))  # or the resumed state
    params = jax.tree.map(jnp.copy, agent.policy_params(state))  # `state` will be overwritten
    train_step = log.jit(agent.train_step, donate_argnums=0)  # the new state overwrites the old one
    collect = partial(collect_rollout, agent, envs, key=act_key)
    with log.saves_on_error(log.first_step):
        env_state = reset(envs, init_key, log.first_step)
        rollout, env_state = collect(params, env_state, step=log.first_step)

    with ThreadPoolExecutor(1) as thread:
        for step in range(log.first_step, log.total, agent.steps_per_iteration):
            end = step + agent.steps_per_iteration
            learning = thread.submit(train_step, state, rollout, learn_key, step)
            with log.saves_on_error(end, learning.result):
                next_rollout, env_state = collect(params, env_state, step=end)
            log.count_episodes(step, rollout)
            state, params, metrics = learning.result()
            # Insert your own code here: `state` is complete, and no thread is running.
            if log.end_iteration(end, state, params, metrics):
                break
            rollout = next_rollout
    return state


Agent = IQL
ENV_ID = "Pendulum-v1"  # default of --env-id


# === the same in all scripts ===


@dataclass(frozen=True)
class Run:
    """Flags of the experiment. Several agents or devices need an environment written in JAX."""

    exp_name: str = Path(__file__).stem  # part of the name of the run's folder
    env_id: str = ENV_ID  # Gymnasium environment; MODULE:ID, as ale_py:ALE/Pong-v5, imports MODULE
    env_kwargs: str = "{}"  # arguments of the environment as JSON, such as {"continuous": true}
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the environment's own, or sync
    seed: int = 1  # random seed
    num_seeds: int = 1  # agents trained in parallel, with seeds seed, seed + 1, ...
    sweep: tuple[str, ...] = ()  # values of float flags, as gamma=0.9,0.99; one agent for each
    num_devices: int = 1  # devices per process, which share the agents or one agent's environments
    distributed: str = ""  # train in several processes: auto, or ADDRESS,PROCESSES,ID
    log_interval: int = 1_000  # steps between two log entries
    eval_interval: int = 100_000  # steps between two evaluations; the last one is at the end
    eval_episodes: int = 10  # episodes per evaluation; 0: no evaluation
    eval_max_steps: int = 30_000  # steps after which an evaluation cuts off its episodes
    eval_explores: bool = False  # explore in evaluations, as at the end of training
    capture_video: bool = False  # record a video of one more episode at each evaluation
    checkpoint_interval: int = 100_000  # steps between checkpoints, the last at the end; 0: none
    resume: str = ""  # folder of a run to resume; its flags are the defaults
    track: bool = False  # also log to Weights & Biases, see WANDB_PROJECT and WANDB_ENTITY


def need(what: str) -> Any:
    """Returns the package cleanreplay. Raises UsageError without it, because `what` needs it."""
    if cleanreplay is None:
        raise UsageError(f"{what}: this needs the package cleanreplay, which is not installed")
    return cleanreplay


def features_of(observation_space, hidden_sizes=(), init=None, layer_norm=False):
    """Makes a function from observations [B, ...] to vectors [B, F], for the start of a network.

    Its layers belong to the flax module that calls it. Also returns the widths of the layers after
    it: `hidden_sizes`, or () after the convolutions of an image. `init` initialises the weights.
    `layer_norm` adds layer normalisation.
    """
    if cleanreplay:
        how = (init, layer_norm)
        return cleanreplay.networks.features_of(observation_space, hidden_sizes, *how)
    size = math.prod(observation_space.shape)
    return lambda x: x.reshape(x.shape[0], size).astype(jnp.float32), hidden_sizes


def example_of(observation_space, action, *more) -> Step:
    """Makes a Step of one environment, with the shapes and dtypes that the agent expects."""
    is_bytes = observation_space.dtype in (np.uint8, bool)
    dtype = observation_space.dtype if is_bytes else np.float32
    observation = np.zeros(observation_space.shape, dtype)
    return Step(observation, action, np.float32(0), np.False_, np.False_, np.False_, *more)


def make_envs(args: Args, run: Run, num_envs: int, video_folder: str = "", training: bool = False):
    """Makes N environments, which are stepped together."""
    wrappers: list = []  # of a single environment, such as gym.wrappers.TimeAwareObservation
    kwargs = json.loads(run.env_kwargs)
    if video_folder:
        kwargs["render_mode"] = "rgb_array"
        wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=video_folder))
    mode: Any = run.vectorization if training else "sync"  # processes take seconds to start
    if run.vectorization == "auto":  # None: the environment's own vector version, or sync
        mode = "sync" if wrappers else None
    start = "spawn" if sys.platform == "win32" else "forkserver"  # a fork of JAX can hang
    how = {"context": start} if mode == "async" else None
    make = partial(gym.make_vec, run.env_id, num_envs, wrappers=wrappers, **kwargs)
    warnings.filterwarnings("ignore", ".*AutoresetMode")  # the mode is checked below
    module, _, name = run.env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # registers its environments
    is_toy = str(gym.spec(name).vector_entry_point).startswith("gymnasium.envs.")
    if mode is None and is_toy and num_envs < 4:  # Gymnasium's own are slow for a few environments
        mode = "sync"
    envs: Any = make(vectorization_mode=mode, vector_kwargs=how)
    if mode is None and hasattr(envs.unwrapped, "func_env"):
        envs.close()  # wrong for environments in JAX: while one resets, others are not stepped
        envs = make(vectorization_mode="sync")
    if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        raise UsageError(f"env_id {run.env_id}: its autoreset_mode must be NEXT_STEP")
    space = envs.single_observation_space
    is_vector = isinstance(space, Box) and (space.dtype.kind == "f" or len(space.shape) < 2)
    if args.frame_stack > 1 or not is_vector:
        envs = need("images, frame_stack or non-Box").environments.wrap(envs, args.frame_stack)
    return cleanreplay.environments.Successes(envs) if cleanreplay and training else envs


def reset(envs, key, step: int):
    """Starts an episode in each environment. Returns observations, and `valid` [N], all True."""
    seed = int(jax.random.fold_in(key, step)[0]) // 4  # below 2**30: environment i has seed + i
    observation, _ = envs.reset(seed=seed)
    return observation, np.ones(envs.num_envs, bool)


class Log(AbstractContextManager):
    """Writes the charts of a run to TensorBoard, and shows its progress.

    `cleanreplay.experiment.Experiment` has the same methods, and also saves, resumes and evaluates.
    """

    def __init__(self, agent: Agent, run: Run, folder: Path, stop: list):
        self.agent, self.run, self.args = agent, run, agent.args
        self.folder = folder
        self.stop = stop  # the run ends once this has an item
        self.first_step = 0
        self.total = agent.args.total_timesteps
        self.steps_per_iteration = agent.steps_per_iteration
        self.unfinished = np.zeros((2, agent.args.num_envs))  # return and length of each episode
        self.ended: list = []  # returns and lengths of finished episodes, until they are logged
        self.recent_returns: deque = deque(maxlen=100)
        self.writer: Any = None

    def open(self, first_step: int, recent_returns=(), quiet: bool | None = None, writer=None):
        """Opens the charts and the progress bar. A resumed run continues at `first_step`."""
        if not quiet:
            where = f"{self.unfinished.shape[1]} x {self.run.env_id}"
            tqdm.write(f"{self.folder}: {where}, {jax.devices()[0].device_kind}")
        self.first_step = first_step
        self.recent_returns.extend(recent_returns)
        self.start_time = time.monotonic()
        self.bar: Any = tqdm(initial=first_step, total=self.total, unit=" steps", disable=quiet)
        # The class is looked up only now, because W&B has replaced it in its module.
        self.writer = writer or event_file_writer.EventFileWriter(str(self.folder), flush_secs=1)

    def begin(self, envs, init) -> State:
        """Begins the run in these environments. Returns the State of `init()`."""
        names = ["resume", "num_seeds", "num_devices", "distributed", "capture_video", "track"]
        names += ["save_experience", "her_fraction", "best_fraction", "init_from", "sweep"]
        read_data = getattr(self.agent, "read_data", None)  # from a file, without the package
        names += [] if read_data else ["offline_data"]
        for flags in (self.run, self.args):
            for flag in names:
                if getattr(flags, flag, None) != getattr(type(flags), flag, None):
                    need(flag)
        tqdm.write("nothing is saved or evaluated: the package cleanreplay is not installed")
        self.open(first_step=0)
        return read_data(init()) if read_data else init()

    def jit(self, train_step, **how):
        """Compiles `train_step`."""
        return jax.jit(train_step, **how)

    def saves_on_error(self, step: int, learned=None):
        """Returns a context for stepping environments. If they fail, nothing is saved here."""
        return nullcontext()

    def count_episodes(self, step: int, rollout: Step):
        """Collects returns and lengths of the episodes that end in a rollout from `step` on."""
        done = rollout.terminated | rollout.truncated
        rewards_and_steps = np.stack([rollout.reward, rollout.valid], 1, dtype=float)  # [S, 2, N]
        for row, over, is_end in zip(rewards_and_steps, done, done.any(axis=1), strict=True):
            self.unfinished += row
            if is_end:
                self.ended.extend(self.unfinished[:, over].T)
                self.unfinished[:, over] = 0

    def end_iteration(self, end: int, state: State, params, metrics: dict) -> bool:
        """Logs what is due at step `end`. Returns whether the run is over."""
        is_last = end >= self.total or len(self.stop) > 0
        if is_last or buffers.is_due(self.run.log_interval, end - self.steps_per_iteration, end):
            self.add_metrics(end, metrics)
        return is_last

    def add_metrics(self, step: int, metrics: dict):
        """Logs metrics, means of the finished episodes and the speed. Shows the progress."""
        speed = (step - self.first_step) / max(time.monotonic() - self.start_time, 1e-9)
        metrics = metrics | {"charts/SPS": speed}
        if self.ended:
            returns, lengths = np.transpose(self.ended)
            metrics["charts/episodic_return"] = returns.mean()
            metrics["charts/episodic_length"] = lengths.mean()
            self.recent_returns.extend(returns)
            self.ended.clear()
        self.write(step, metrics)
        progress = f"return {self.mean_return():.2f}"
        if self.bar.disable and buffers.is_due(self.total // 20, self.bar.n, step):
            print(f"{step:,} steps, {speed:,.0f} a second, {progress}", flush=True)
        self.bar.n = step
        self.bar.set_postfix_str(progress)

    def write(self, step: int, metrics: dict, wall_time: float = 0):
        """Adds a point to each chart. Leaves out numbers that are not finite."""
        event = Event(wall_time=wall_time or time.time(), step=step)
        for tag, x in metrics.items():
            if math.isfinite(x):
                event.summary.value.add(tag=tag, simple_value=x)
        self.writer.add_event(event)  # one event for all charts is fastest

    def finish(self, why: str):
        """Ends the run after this iteration or the next. It is saved and evaluated; exit code 0."""
        tqdm.write(f"the run ends: {why}")
        self.total = 0

    def at_evaluation(self, step: int, params, returns):
        """Insert your own code here. Compiled runs call it for each agent. `act` takes `params`."""

    def mean_return(self) -> float:
        """Returns the mean return of the last 100 episodes, NaN before the first."""
        return float(np.mean(self.recent_returns or np.nan))

    def __exit__(self, *error):
        if self.writer:
            self.writer.close()


def train(args: Args, run: Run, stop: list | None = None):
    """Trains until total_timesteps, or until `stop` has an item.

    Returns the State, the mean returns [num_agents] of the last episodes, and the run's folder.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # with it `act` takes 3 times as long
    stop = [] if stop is None else stop
    name = f"{run.env_id}__{run.exp_name}__{run.seed}__{time.time_ns() // 10**3}"
    folder = Path(run.resume or "runs/" + re.sub(r"[/:[\\]", "-", name)).absolute()
    make_more = partial(make_envs, args, run)
    first = cleanreplay.flags.check(args, run, make_more) if cleanreplay else make_more(1)
    with closing(first):  # the properties of all environments are read from this one
        spaces = (first.single_observation_space, first.single_action_space)
        more = cleanreplay.replays.options(args, first, make_more) if cleanreplay else {}
        make_agent = partial(Agent, args, *spaces, **more)
        jax_env = cleanreplay and cleanreplay.jax_envs.find_jax_env(first, run)
        env_spaces: Any = cleanreplay and cleanreplay.spaces.of_envs(first)
    if jax_env:
        script = (make_agent, make_more, Log, __file__)
        return cleanreplay.compiled.train(*script, jax_env, env_spaces, run, folder, stop)
    if cleanreplay and jax.process_count() > 1:  # each process steps a share of the environments
        make_more = partial(cleanreplay.shares.make_envs, make_more)
    agent = make_agent()
    log = Log(agent, run, folder, stop)
    experiment: Any = log
    if cleanreplay:
        experiment = cleanreplay.experiment.Experiment(log, agent, make_more, __file__, env_spaces)
    with experiment, closing(make_more(args.num_envs, training=True)) as envs:
        state = train_loop(agent, envs, experiment, jax.random.PRNGKey(run.seed))
    return state, np.array([log.mean_return()]), log.folder


def main():
    """Runs the command line. Exit codes: 1 for an error, 2 for a usage error, 130 for Ctrl-C."""
    Flags = NamedTuple("Flags", [("experiment", Run), ("algorithm", Args)])  # noqa: UP014
    what = "\n\n".join((__doc__ or "").split("\n\n")[:2])  # the paper, and two commands
    parse = partial(tyro.cli, Flags, description=what, config=[tyro.conf.OmitArgPrefixes])
    stop: list[int] = []
    try:
        run, args = cleanreplay.flags.parse(parse) if cleanreplay else parse()
        _, returns, folder = train(args, run, stop)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    print(f"{folder}: mean return of the last episodes {np.mean(returns):.2f}")
    sys.exit(130 if stop else 0)


if __name__ == "__main__":
    main()
