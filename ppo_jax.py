"""PPO, the clipped variant: Schulman et al. 2017, arXiv 1707.06347. CleanReplay, MIT license.

    python ppo_jax.py --env-id CartPole-v1
    python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

Read `train_loop` first: N environments take S steps in `collect_rollout`, then the agent learns
from them. For environments in JAX, cleanreplay/compiled.py compiles both into one program.

Advantages as in Schulman et al. 2016, arXiv 1506.02438, details as in Huang et al. 2022, "The 37
implementation details of PPO". Differs: advantages bootstrap if a time limit truncates an episode;
running statistics change only between rollouts; the bounds of a Box are scaled to -1 and 1.
B: batch size. A: outputs of the network for an action.
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
    """Flags of the algorithm. Steps are environment steps, summed over all environments."""

    total_timesteps: int = 500_000  # number of training steps
    num_envs: int = 4  # number of environments, stepped together
    num_steps: int = 128  # steps of each environment in a rollout
    hidden_sizes: tuple[int, ...] = (64, 64)  # widths of the hidden layers; not used for images
    num_minibatches: int = 4  # gradient steps per epoch, each on an equal part of the rollout
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # clipping range of the probability ratio
    clip_vloss: bool = True  # also clip the value loss
    ent_coef: float = 0.01  # coefficient of the entropy bonus
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # largest norm of a gradient; larger ones are scaled down to it
    target_kl: float | None = None  # KL divergence from the old policy at which the epochs end
    normalize_observations: bool | None = None  # None: only float observations, with Box actions
    normalize_rewards: bool | None = None  # by the deviation of returns; None: only for Box actions
    frame_stack: int = 1  # number of latest observations that the agent sees
    clip_rewards: bool = False  # learn from the sign of rewards; charts show them unclipped
    init_from: str = ""  # begin with what this run (a folder) or agent (a file) has learned


class Categorical:
    """Discrete or MultiDiscrete actions [B, *shape]. The outputs of the network are logits [B, A].

    All MultiDiscrete actions have the same number of logits. Surplus ones are never sampled.
    """

    has_log_std = False  # the network has no further parameters for it

    def __init__(self, space):
        choices = np.asarray(space.n if isinstance(space, gym.spaces.Discrete) else space.nvec)
        self.start = space.start
        self.exists = np.arange(choices.max()) < choices[..., None]  # [*shape, choices]
        self.num_outputs = self.exists.size
        self.example = np.zeros(space.shape, np.int32)

    def logits(self, output):
        """Returns logits [B, *shape, choices]."""
        logits = output.reshape(*output.shape[:-1], *self.exists.shape)
        return jnp.where(self.exists, logits, -1e9)

    def mode(self, output):
        """Returns the most probable actions."""
        return jnp.argmax(self.logits(output), axis=-1)

    def sample(self, output, key):
        """Samples actions."""
        return jax.random.categorical(key, self.logits(output))

    def log_prob_and_entropy(self, output, action):
        """Returns log-probabilities and entropies [B], which share one log_softmax."""
        log_probs = nn.log_softmax(self.logits(output))
        # One-hot instead of indexing, whose gradient is a slow scatter.
        chosen = jax.nn.one_hot(action, log_probs.shape[-1], dtype=output.dtype)
        of_each = (log_probs * chosen, -jnp.exp(log_probs) * log_probs)
        return [x.reshape(*output.shape[:-1], -1).sum(axis=-1) for x in of_each]

    def to_env(self, action):
        """Returns the environment's actions, which need not start at 0."""
        return action + np.asarray(self.start, action.dtype)


class Gaussian:
    """Actions of a Box of floats as vectors [B, A]. The outputs are means and log deviations.

    -1 and 1 are the bounds of the Box. A missing bound is taken to be 2 away from the other one.
    """

    has_log_std = True  # the network has log deviations that do not depend on observations

    def __init__(self, space):
        self.space = space
        self.num_outputs = space.low.size
        self.example = np.zeros(self.num_outputs, np.float32)
        low, high = np.array([space.low, space.high], float)  # float64 avoids overflow
        low = np.where(np.isfinite(low), low, np.where(np.isfinite(high), high - 2, -1))
        high = np.where(np.isfinite(high), high, low + 2)
        self.middle, self.half = (low + high) / 2, (high - low) / 2

    def mode(self, output):
        """Returns the means."""
        return jnp.split(output, 2, axis=-1)[0]

    def sample(self, output, key):
        """Samples actions."""
        mean, log_std = jnp.split(output, 2, axis=-1)
        return mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape, mean.dtype)

    def log_prob_and_entropy(self, output, action):
        """Returns log-probabilities and entropies [B]."""
        mean, log_std = jnp.split(output, 2, axis=-1)
        deviations = (action - mean) * jnp.exp(-log_std)
        constant = log_std + 0.5 * math.log(2 * math.pi)
        of_each = (-0.5 * deviations**2 - constant, constant + 0.5)
        return [x.sum(axis=-1) for x in of_each]

    def to_env(self, action):
        """Returns the environment's actions, within its bounds."""
        space = self.space
        action = action.reshape(len(action), *space.shape)
        action = (self.middle + self.half * action).clip(space.low, space.high)
        return action.astype(min(space.dtype, action.dtype))  # JAX has no float64


class ActorCritic(nn.Module):
    """Computes outputs of the policy [B, A], of a Gaussian [B, 2 A], and V(s) [B].

    The actor and the critic share only the convolutions of images.
    """

    num_outputs: int
    has_log_std: bool  # log deviations that do not depend on observations
    features: Callable  # turns observations into vectors
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        def dense(x, width, scale, name):
            return nn.Dense(width, kernel_init=nn.initializers.orthogonal(scale), name=name)(x)

        def mlp(x, name):
            for i, width in enumerate(self.hidden_sizes):
                x = nn.tanh(dense(x, width, 2**0.5, f"{name}_{i}"))
            return x

        x = self.features(x)
        output = dense(mlp(x, "actor"), self.num_outputs, 0.01, "actor")
        value = dense(mlp(x, "critic"), 1, 1.0, "critic")
        if self.has_log_std:
            log_std = self.param("log_std", nn.initializers.zeros, (self.num_outputs,), jnp.float32)
            output = jnp.concatenate([output, jnp.broadcast_to(log_std, output.shape)], axis=-1)
        return output, value[:, 0]


class Step(NamedTuple):
    """A step [N, ...] of N environments, or the steps [S, N, ...] of a rollout.

    An episode s0, s1, s2 that terminates, and the start t0 of the next one (Gymnasium's NEXT_STEP):

        observation   s0     s1     s2     t0     The step at s2 is the autoreset step: its
        terminated    False  True   False  False  action is ignored, its reward is 0, and nothing
        valid         True   True   False  True   is learned from it.
    """

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended in a terminal state
    truncated: Any  # a time limit cut the episode off
    valid: Any  # False for an autoreset step


class RunningMeanStd(NamedTuple):
    """Running statistics of an array [...]."""

    mean: Array  # [...]
    var: Array  # [...]
    num_rows: Array  # []


class State(NamedTuple):
    """Everything that training changes, and so everything that a checkpoint must hold."""

    params: Any
    opt_state: optax.OptState
    obs_rms: RunningMeanStd | None  # None if observations are not normalised
    return_rms: RunningMeanStd | None  # None if rewards are not normalised
    discounted_return: Any  # [N], of each unfinished episode so far


class Batch(NamedTuple):
    """Steps [B, ...] with the log-probabilities and values of the policy that took them."""

    observation: Array  # normalised, if observations are
    action: Array
    valid: Array
    log_prob: Array
    value: Array
    advantage: Array


def masked_var(x, mask):
    """Computes variances [...] of x [..., B] where `mask` [B] is set."""
    mean = buffers.masked_mean(x, mask)
    return buffers.masked_mean((x - mean[..., None]) ** 2, mask)


def update_rms(stats: RunningMeanStd, x, mask) -> RunningMeanStd:
    """Updates the statistics with a batch x [B, ...], where `mask` [B] is set: Chan et al. 1979."""
    x = jnp.moveaxis(x, 0, -1)
    rows = mask.sum()
    num_rows = stats.num_rows + rows
    weight = rows / jnp.maximum(num_rows, 1)
    delta = buffers.masked_mean(x, mask) - stats.mean
    within = (1 - weight) * stats.var + weight * masked_var(x, mask)
    between = weight * (1 - weight) * delta**2
    return RunningMeanStd(stats.mean + weight * delta, within + between, num_rows)


def normalize(x, stats: RunningMeanStd | None):
    """Normalises observations [..., *shape] to mean 0 and deviation 1, clipped to -10 and 10."""
    if stats is None:
        return x
    std = jnp.sqrt(stats.var + 1e-8)
    return jnp.clip((x - stats.mean) / std, -10, 10)


def gae(rollout: Step, value, next_value, gamma: float, gae_lambda: float):
    """Computes advantages [S, N] from V(s) and V(s') [S, N]: Schulman et al. 2016, eq. 16."""
    bootstrap = jnp.where(rollout.terminated, 0.0, next_value)
    delta = rollout.reward + gamma * bootstrap - value
    delta = jnp.where(rollout.valid, delta, 0.0)
    done = rollout.terminated | rollout.truncated
    discount = gamma * gae_lambda * (rollout.valid & ~done)
    return buffers.discounted_sum(delta, discount, jnp.zeros_like(delta[0]), reverse=True)


class PPO:
    """The algorithm, as pure functions of a `State`.

    `shard_batch` may split a batch over devices, see cleanreplay/compiled.py.
    """

    def __init__(
        self, args: Args, observation_space, action_space, shard_batch=lambda batch: batch
    ):
        if isinstance(action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            self.actions: Any = Categorical(action_space)
        elif isinstance(action_space, Box) and action_space.dtype.kind == "f":
            self.actions = Gaussian(action_space)
        else:
            takes = "Discrete or MultiDiscrete actions, or a Box of floats"
            raise UsageError(f"PPO takes {takes}, not {action_space}: add a gym.ActionWrapper")
        self.args = args
        self.shard_batch = shard_batch
        self.is_box = isinstance(action_space, Box)
        self.rollout_shape = (args.num_steps, args.num_envs)
        self.steps_per_iteration = args.num_envs * args.num_steps
        if self.steps_per_iteration % args.num_minibatches > 0:
            raise UsageError("num_minibatches must divide num_envs * num_steps")
        self.example_step = example_of(observation_space, self.actions.example)
        orthogonal = nn.initializers.orthogonal(2**0.5)
        seen = features_of(observation_space, args.hidden_sizes, init=orthogonal)
        outputs = (self.actions.num_outputs, self.actions.has_log_std)
        self.network: Any = ActorCritic(*outputs, *seen)
        self.act = jax.jit(self.act)  # per agent: the compiled program is freed with the agent

    def optimizer(self, learning_rate):
        """Makes Adam with clipped gradients. The learning rate may change from step to step."""
        clip = optax.clip_by_global_norm(self.args.max_grad_norm)
        # Faster as one flat vector. Leave `flatten` out if the optimizer depends on shapes.
        return optax.flatten(optax.chain(clip, optax.adam(learning_rate, eps=1e-5)))

    def init(self, key) -> State:
        """Returns the initial state."""
        args = self.args
        observation = self.example_step.observation

        def init_rms(wanted: bool | None, by_default: bool, shape):
            if not (by_default if wanted is None else wanted):
                return None
            zeros = jnp.zeros(shape, jnp.float32)
            return RunningMeanStd(mean=zeros, var=zeros + 1, num_rows=jnp.float32(0))

        by_default = self.is_box and observation.dtype == np.float32
        obs_rms = init_rms(args.normalize_observations, by_default, observation.shape)
        return_rms = init_rms(args.normalize_rewards, self.is_box, ())
        params = self.network.init(key, normalize(observation[None], obs_rms))
        opt_state = self.optimizer(args.learning_rate).init(params)
        discounted_return = jnp.zeros(args.num_envs, jnp.float32)
        return State(params, opt_state, obs_rms, return_rms, discounted_return)

    def on_resume(self, state: State) -> State:
        """Sets the returns of unfinished episodes to 0, because environments begin new ones."""
        return state._replace(discounted_return=jnp.zeros_like(state.discounted_return))

    def learned(self, state: State) -> State:
        """Removes what --init-from does not take over: returns of unfinished episodes."""
        return state._replace(discounted_return=())

    def policy_params(self, state: State):
        """Returns the part of a state that `act` needs."""
        return state.params, state.obs_rms

    def act(self, params, observation, key=None, step=0):
        """Chooses actions [N, ...]: samples the policy with a key, takes its mode without one."""
        network_params, obs_rms = params
        output, _ = self.network.apply(network_params, normalize(observation, obs_rms))
        if key is not None:
            # With 0 * output the sampling waits for the output. Otherwise XLA starts a thread for
            # it, and a call takes 160 us instead of 45 (Box actions [4, 6], JAX 0.12, 2 cores).
            key = jax.random.fold_in(key, step + jnp.int32(0 * output.ravel()[0]))
        return self.actions.mode(output) if key is None else self.actions.sample(output, key)

    def to_env_action(self, action):
        """Returns the environment's actions."""
        return self.actions.to_env(action)

    def normalize_rewards(self, state: State, rollout: Step) -> tuple[State, Step]:
        """Divides rewards by the standard deviation of the discounted return so far."""
        if state.return_rms is None:
            return state, rollout
        not_done = rollout.valid & ~(rollout.terminated | rollout.truncated)
        # 1 in the first step, because `discounted_return` is already 0 where an episode ended.
        previous_not_done = jnp.concatenate([jnp.ones_like(not_done[:1]), not_done[:-1]])
        discount = self.args.gamma * previous_not_done
        returns = buffers.discounted_sum(rollout.reward, discount, state.discounted_return)
        stats = update_rms(state.return_rms, returns.ravel(), rollout.valid.ravel())
        reward = jnp.clip(rollout.reward / jnp.sqrt(stats.var + 1e-8), -10, 10)
        state = state._replace(return_rms=stats, discounted_return=not_done[-1] * returns[-1])
        return state, rollout._replace(reward=reward)

    def loss(self, params, batch: Batch):
        """Returns minus the objective of Schulman et al. 2017, eq. 9, and the metrics."""
        args = self.args
        output, value = self.network.apply(params, batch.observation)
        log_prob, entropy = self.actions.log_prob_and_entropy(output, batch.action)
        advantage = batch.advantage
        if args.norm_adv:
            std = masked_var(advantage, batch.valid) ** 0.5
            mean = buffers.masked_mean(advantage, batch.valid)
            advantage = (advantage - mean) / (std + 1e-8)
        log_ratio = log_prob - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage)
        target = batch.advantage + batch.value
        value_loss = 0.5 * (value - target) ** 2
        if args.clip_vloss:
            change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
            value_loss = jnp.maximum(value_loss, 0.5 * (batch.value + change - target) ** 2)
        losses = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": -log_ratio,
            "losses/approx_kl": ratio - 1 - log_ratio,
            "losses/clipfrac": jnp.abs(ratio - 1) > args.clip_coef,
        }
        # Averaged together, because many small reductions cost as much as the gradient.
        means = buffers.masked_mean(jnp.stack([*losses.values()]), batch.valid)
        loss = means[0] + args.vf_coef * means[1] - args.ent_coef * means[2]
        return loss, dict(zip(losses, means, strict=True))

    def optimize(self, state: State, batch: Batch, key, learning_rate) -> tuple[State, dict]:
        """Takes the gradient steps of all epochs. Returns the State, metrics of the last epoch."""
        args = self.args
        optimizer = self.optimizer(learning_rate)
        max_kl = math.inf if args.target_kl is None else args.target_kl

        def gradient_step(train_state, indices):
            params, opt_state = train_state
            minibatch = self.shard_batch(jax.tree.map(lambda x: x[indices], batch))
            gradient, metrics = jax.grad(self.loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), metrics

        def epoch(carry, minibatches):
            train_state, stopped = carry
            new_train_state, metrics = jax.lax.scan(gradient_step, train_state, minibatches)
            metrics = jax.tree.map(jnp.mean, metrics)
            # A scan cannot end early: after an epoch exceeds max_kl, later updates are discarded.
            train_state = jax.tree.map(partial(jnp.where, stopped), train_state, new_train_state)
            stops = stopped | (metrics["losses/approx_kl"] > max_kl)
            return (train_state, stops), (stopped, metrics)

        order = buffers.shuffled_minibatches(
            key, self.steps_per_iteration, args.update_epochs, args.num_minibatches
        )
        start = ((state.params, state.opt_state), jnp.bool_(False))
        (train_state, _), (stopped, metrics) = jax.lax.scan(epoch, start, order)
        last = jnp.sum(~stopped) - 1
        metrics = jax.tree.map(lambda x: x[last], metrics)
        params, opt_state = train_state
        return state._replace(params=params, opt_state=opt_state), metrics

    def train_step(self, state: State, rollout: Step, key, step, next_observation):
        """Learns from the rollout [S, N] that began at `step`, and next_observation after it.

        Returns the State, the parameters to act with, and the metrics.
        """
        args = self.args
        if args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state, rollout = self.normalize_rewards(state, rollout)
        # s' is the s of the next step, also at the end of an episode.
        next_observation = jnp.asarray(next_observation, rollout.observation.dtype)
        observations = jnp.concatenate([rollout.observation, next_observation[None]])
        observations = observations.reshape(-1, *observations.shape[2:])
        normalized = normalize(observations, state.obs_rms)
        output, values = self.network.apply(state.params, normalized)
        values = values.reshape(-1, args.num_envs)
        advantage = gae(rollout, values[:-1], values[1:], args.gamma, args.gae_lambda)
        rows = self.steps_per_iteration
        action = rollout.action.reshape(rows, *rollout.action.shape[2:])
        log_prob, _ = self.actions.log_prob_and_entropy(output[:rows], action)
        valid, value, advantage = jax.tree.map(jnp.ravel, (rollout.valid, values[:-1], advantage))
        batch = Batch(normalized[:rows], action, valid, log_prob, value, advantage)
        learning_rate = jnp.float32(args.learning_rate)
        if args.anneal_lr:
            learning_rate *= jnp.maximum(1 - step / args.total_timesteps, 0)
        state, metrics = self.optimize(state, batch, jax.random.fold_in(key, step), learning_rate)
        if state.obs_rms is not None:  # only now: actions were chosen with the old statistics
            stats = update_rms(state.obs_rms, observations[:rows], valid)
            state = state._replace(obs_rms=stats)
        residual = masked_var(advantage, valid)
        total = masked_var(advantage + value, valid)
        metrics["losses/explained_variance"] = jnp.where(total > 0, 1 - residual / total, 0.0)
        metrics["charts/learning_rate"] = learning_rate
        return state, self.policy_params(state), metrics


def collect_rollout(agent: PPO, envs, params, env_state: tuple, key, step: int):
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


def train_loop(agent: PPO, envs, log, key) -> State:
    """Alternates between collecting a rollout and learning from it. Returns the final State."""
    init_key, act_key, learn_key = jax.random.split(key, 3)
    state = log.begin(envs, partial(jax.jit(agent.init), init_key))  # or the resumed state
    params = agent.policy_params(state)
    train_step = log.jit(agent.train_step)
    with log.saves_on_error(log.first_step):
        env_state = reset(envs, init_key, log.first_step)

    for step in range(log.first_step, log.total, agent.steps_per_iteration):
        with log.saves_on_error(step):
            rollout, env_state = collect_rollout(agent, envs, params, env_state, act_key, step)
        log.count_episodes(step, rollout)
        state, params, metrics = train_step(state, rollout, learn_key, step, env_state[0])
        # Insert your own code here.
        end = step + agent.steps_per_iteration
        if log.end_iteration(end, state, params, metrics):
            break
    return state


Agent = PPO
ENV_ID = "CartPole-v1"  # default of --env-id


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
