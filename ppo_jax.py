"""PPO on Gymnasium environments: Schulman et al. 2017, arXiv 1707.06347, the clipped variant.

    python ppo_jax.py --env-id CartPole-v1 --num-envs 64
    python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

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

Advantages of Schulman et al. 2016, arXiv 1506.02438, and the details of Huang et al. 2022. Differs:
an episode cut off by a time limit is bootstrapped; running statistics change between rollouts.
B are the rows of a batch, A the actions, or the axes of one in a Box.
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
from typing import Any, Literal, NamedTuple

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

Choice = Literal["auto", "yes", "no"]


@dataclass(frozen=True)
class Args:
    """Flags of the algorithm. Steps are environment steps, of all environments together."""

    total_timesteps: int = 500_000  # steps of training
    num_envs: int = 4  # environments stepped together
    num_steps: int = 128  # steps of each environment in a rollout
    num_minibatches: int = 4  # gradient steps of an epoch, each on an equal part of the rollout
    update_epochs: int = 4  # how many times a rollout is learned from, shuffled anew each time
    learning_rate: float = 2.5e-4  # step size of Adam
    anneal_lr: bool = True  # let the learning rate go linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the advantages: 0 trusts the values, 1 the rewards
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # how far the ratio of new to old probability is followed away from 1
    clip_vloss: bool = True  # follow the value no further than clip-coef from its old one, either
    ent_coef: float = 0.01  # weight of the entropy, which is maximised
    vf_coef: float = 0.5  # weight of the value loss
    max_grad_norm: float = 0.5  # norm that longer gradients are scaled down to
    target_kl: float = math.inf  # KL divergence from the old policy that ends the epochs
    normalize_observations: Choice = "auto"  # auto: with Box actions
    normalize_rewards: Choice = "auto"  # by the deviation of the return; auto: with Box actions
    frame_stack: int = 1  # how many of an episode's last observations the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show them as they are


class ActorCritic(nn.Module):
    """Logits [B, A], or if `gaussian` means and log deviations [B, 2 * A]; and V(s) [B]."""

    num_actions: int
    gaussian: bool

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        def dense(x: Array, features: int, scale: float) -> Array:
            return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))(x)

        def mlp(x: Array) -> Array:
            x = nn.tanh(dense(x, 64, 2**0.5))
            return nn.tanh(dense(x, 64, 2**0.5))

        may_be_images = x.dtype == jnp.uint8 and x.ndim > 2
        if may_be_images and importlib.import_module("images").are_images(x):
            actor = critic = importlib.import_module("images").nature_cnn(x)
        else:
            x = x.reshape(len(x), -1).astype(jnp.float32)
            actor = mlp(x)
            critic = mlp(x)
        output = dense(actor, self.num_actions, 0.01)
        value = dense(critic, 1, 1.0)
        if self.gaussian:
            zeros = nn.initializers.zeros
            log_std = self.param("log_std", zeros, (self.num_actions,), jnp.float32)
            log_std = jnp.broadcast_to(log_std, output.shape)
            output = jnp.concatenate([output, log_std], axis=-1)
        return output, value[:, 0]


class Step(NamedTuple):
    """A step of an environment [...], of N of them [N, ...], or those of a rollout [S, N, ...]."""

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # it was cut off
    is_step: Any  # False after the end of an episode, where the environment only resets
    next_observation: Any = None  # of a rollout the observation after it [N, ...]


class Moments(NamedTuple):
    """Running statistics of an array [...]."""

    mean: Array  # [...]
    variance: Array  # [...]
    rows: Array  # [] taken in so far


class State(NamedTuple):
    """All that learning changes."""

    params: Array  # [P], as one vector: the fewer arrays, the faster the call of a program
    opt_state: optax.OptState
    observations: Moments | None  # of observations, None if they are not normalised
    returns: Moments | None  # of discounted returns, None if rewards are not normalised
    discounted: Array  # [N], discounted returns so far of the episodes that go on


class Batch(NamedTuple):
    """Steps, and what policy and value said of them when they were made: [B, ...]."""

    observation: Array  # normalised, if observations are
    action: Array
    is_step: Array
    log_prob: Array
    value: Array
    advantage: Array


LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean [...] of the rows of x [B, ...] whose mask [B] is set, 0 if there are none."""
    number = jnp.maximum(mask.sum(), 1)
    mask = mask.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(mask, x, 0.0).sum(axis=0) / number


def masked_variance(x: Array, mask: Array) -> Array:
    """Variance [...] of the same rows."""
    deviation = x - masked_mean(x, mask)
    return masked_mean(deviation**2, mask)


def update_moments(moments: Moments, x: Array, mask: Array) -> Moments:
    """Takes in the rows of x [B, ...] whose mask [B] is set: Chan et al. 1979."""
    new_rows = mask.sum()
    rows = moments.rows + new_rows
    share = new_rows / jnp.maximum(rows, 1)
    step = masked_mean(x, mask) - moments.mean
    mean = moments.mean + share * step
    within = (1 - share) * moments.variance + share * masked_variance(x, mask)
    between = share * (1 - share) * step**2
    return Moments(mean, within + between, rows)


def normalize(x: Array, moments: Moments | None) -> Array:
    """Observations [..., *shape] in standard deviations from the mean, at most 10."""
    if moments is None:
        return x
    deviation = jnp.sqrt(moments.variance + 1e-8)
    return jnp.clip((x - moments.mean) / deviation, -10, 10)


def discounted_sum(x: Array, discount: Array, first: Array, reverse: bool = False) -> Array:
    """y[t] = x[t] + discount[t] * y[t - 1], all [S, N], from y[-1] = `first` [N] on."""

    def step(before: Array, row: tuple) -> tuple[Array, Array]:
        x, discount = row
        y = x + discount * before
        return y, y

    _, sums = jax.lax.scan(step, first, (x, discount), unroll=8, reverse=reverse)
    return sums


def log_prob_and_entropy(output: Array, action: Array) -> tuple[Array, Array]:
    """Log-probabilities and entropies [B] of actions [B] int32 or [B, A] float32."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        log_probs = nn.log_softmax(output)
        # Not by an index, because its gradient would be a scatter.
        chosen = jax.nn.one_hot(action, output.shape[-1], dtype=output.dtype)
        log_prob = log_probs * chosen
        entropy = -jnp.exp(log_probs) * log_probs
    else:
        mean, log_std = jnp.split(output, 2, axis=-1)
        deviations = (action - mean) * jnp.exp(-log_std)
        constant = log_std + 0.5 * math.log(2 * math.pi)
        log_prob = -0.5 * deviations**2 - constant
        entropy = constant + 0.5
    return log_prob.sum(axis=-1), entropy.sum(axis=-1)


def gae(rollout: Step, value: Array, next_value: Array, gamma: float, gae_lambda: float) -> Array:
    """Advantages [S, N], 0 where a step only resets, from V(s) and V(s') [S, N].

    Schulman et al. 2016, eq. 16; bootstrapped from V(s') unless the episode ended by itself.
    """
    bootstrap = jnp.where(rollout.terminated, 0.0, next_value)
    delta = rollout.reward + gamma * bootstrap - value
    delta = jnp.where(rollout.is_step, delta, 0.0)
    done = rollout.terminated | rollout.truncated
    discount = gamma * gae_lambda * (rollout.is_step & ~done)
    return discounted_sum(delta, discount, jnp.zeros_like(delta[0]), reverse=True)


class PPO:
    """The algorithm, as pure functions of a `State`."""

    acts_while_learning = False  # rollouts are collected with the newest parameters
    is_offline = False
    experience_size = 0

    def __init__(self, args: Args, observation: np.ndarray, action_space: Any) -> None:
        self.is_box = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
        is_discrete = isinstance(action_space, gym.spaces.Discrete)
        hint = f"PPO takes Discrete actions or a Box [A], not {action_space}"
        require(self.is_box or is_discrete, hint)
        self.args = args
        self.action_space = action_space
        self.steps_per_iteration = args.num_envs * args.num_steps
        self.rollout_shape = (args.num_steps, args.num_envs)
        remainder = self.steps_per_iteration % args.num_minibatches
        require(remainder == 0, "num_minibatches must divide the rollout")
        num_actions = action_space.shape[0] if self.is_box else int(action_space.n)
        self.no_noise = np.zeros(num_actions, np.float32)
        action = self.no_noise if self.is_box else np.int32(0)
        self.example = Step(observation, action, np.float32(0), *[np.False_] * 3)
        self.network = ActorCritic(num_actions, self.is_box)
        shapes = jax.eval_shape(self.network.init, jax.random.PRNGKey(0), observation[None])
        _, self.unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, shapes))
        clip = optax.clip_by_global_norm(args.max_grad_norm)
        # Without the learning rate, which is in the schedule.
        self.optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    def init(self, key: Array) -> State:
        """The state before training."""
        args = self.args
        observation = self.example.observation
        params, _ = ravel_pytree(self.network.init(key, observation[None]))

        def moments(choice: Choice, auto: bool, axes: tuple) -> Moments | None:
            if choice == "no" or (choice == "auto" and not auto):
                return None
            zeros = jnp.zeros(axes, jnp.float32)
            return Moments(mean=zeros, variance=zeros + 1, rows=jnp.float32(0))

        is_float = self.is_box and observation.dtype != np.uint8
        observations = moments(args.normalize_observations, is_float, observation.shape)
        returns = moments(args.normalize_rewards, self.is_box, ())
        opt_state = self.optimizer.init(params)
        discounted = jnp.zeros(args.num_envs, jnp.float32)
        return State(params, opt_state, observations, returns, discounted)

    def restart(self, state: State) -> State:
        """The state where environments start anew, before training and after a resume."""
        return state._replace(discounted=jnp.zeros_like(state.discounted))

    def schedule(self, steps: np.ndarray) -> dict:
        """What changes with time, for the iterations that start at `steps`."""
        left = np.ones(len(steps))
        if self.args.anneal_lr:
            left = np.maximum(1 - steps / self.args.total_timesteps, 0)
        learning_rate = self.args.learning_rate * left
        return {"learning_rate": learning_rate.astype(np.float32)}

    def draw_noise(self, key: Array, schedule: dict) -> Array:
        """The noise of a rollout [S, N, A]: normal for a Gaussian, Gumbel noise for logits."""
        draw = jax.random.normal if self.is_box else jax.random.gumbel
        return draw(key, (*self.rollout_shape, *self.no_noise.shape))

    def policy(self, state: State) -> tuple:
        """What `act` needs of a state."""
        return state.params, state.observations

    def actor_critic(self, params: Array, observation: Array) -> Any:
        """The actor's output and V(s) [B] of observations [B, ...] that are normalised."""
        return self.network.apply(self.unravel(params), observation)

    @partial(jax.jit, static_argnums=0)
    def act(self, policy: tuple, observation: Array, noise: Array) -> Array:
        """Actions [N] or [N, A] with noise [N, A]."""
        params, moments = policy
        output, _ = self.actor_critic(params, normalize(observation, moments))
        if not self.is_box:
            return jnp.argmax(output + noise, axis=-1)
        mean, log_std = jnp.split(output, 2, axis=-1)
        return mean + jnp.exp(log_std) * noise

    def to_env_action(self, action: Any) -> Any:
        """The environment's actions for those of `act`, which the loss needs as they were drawn."""
        if self.is_box:
            return action.clip(self.action_space.low, self.action_space.high)
        return action + int(self.action_space.start)

    def normalize_rewards(self, state: State, rollout: Step) -> tuple[State, Step]:
        """Divides rewards by the standard deviation of the discounted return up to now."""
        if state.returns is None:
            return state, rollout
        goes_on = rollout.is_step & ~(rollout.terminated | rollout.truncated)
        went_on = jnp.concatenate([jnp.ones_like(goes_on[:1]), goes_on[:-1]])
        discount = self.args.gamma * went_on
        returns = discounted_sum(rollout.reward, discount, state.discounted)
        moments = update_moments(state.returns, returns.ravel(), rollout.is_step.ravel())
        deviation = jnp.sqrt(moments.variance + 1e-8)
        reward = jnp.clip(rollout.reward / deviation, -10, 10)
        state = state._replace(returns=moments, discounted=goes_on[-1] * returns[-1])
        return state, rollout._replace(reward=reward)

    def loss(self, params: Array, batch: Batch) -> tuple[Array, Array]:
        """Schulman et al. 2017, eq. 9, to be minimised, and the means of LOSSES."""
        args = self.args
        mask = batch.is_step
        output, value = self.actor_critic(params, batch.observation)
        log_prob, entropy = log_prob_and_entropy(output, batch.action)
        advantage = batch.advantage
        if args.norm_adv:
            rows = jnp.maximum(mask.sum(dtype=jnp.float32), 2)
            unbiased_variance = masked_variance(advantage, mask) / (1 - 1 / rows)
            deviation = advantage - masked_mean(advantage, mask)
            advantage = deviation / (unbiased_variance**0.5 + 1e-8)
        log_ratio = log_prob - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = jnp.maximum(-advantage * ratio, -advantage * clipped)
        is_clipped = jnp.abs(ratio - 1) > args.clip_coef
        target = batch.advantage + batch.value
        error = (value - target) ** 2
        if args.clip_vloss:
            change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
            clipped_value = batch.value + change
            error = jnp.maximum(error, (clipped_value - target) ** 2)
        value_loss = 0.5 * error
        approx_kl = ratio - 1 - log_ratio
        # One mean of them all: many small ones would cost as much as the gradient.
        losses = [policy_loss, value_loss, entropy, -log_ratio, approx_kl, is_clipped]
        means = masked_mean(jnp.stack(losses, axis=-1), mask)
        policy_loss, value_loss, entropy = means[:3]
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
        return loss, means

    def optimize(self, state: State, batch: Batch, schedule: dict, key: Array) -> tuple:
        """The epochs of gradient steps on parts of a batch: State, means of LOSSES."""
        args = self.args
        gradient_of_loss = jax.grad(self.loss, has_aux=True)

        def gradient_step(carry: tuple, indices: Array) -> tuple[tuple, Array]:
            params, opt_state = carry
            minibatch = split_rows(jax.tree.map(lambda x: x[indices], batch))
            gradient, losses = gradient_of_loss(params, minibatch)
            changes, opt_state = self.optimizer.update(gradient, opt_state)
            params = params - schedule["learning_rate"] * changes
            return (params, opt_state), losses

        def epoch(carry: tuple, minibatches: Array) -> tuple:
            nets, losses, stop = carry
            new_nets, new_losses = jax.lax.scan(gradient_step, nets, minibatches)
            # A loop cannot be left: epochs after the policy went too far are thrown away.
            new = (new_nets, new_losses.mean(axis=0))
            nets, losses = jax.tree.map(partial(jnp.where, stop), (nets, losses), new)
            approx_kl = losses[LOSSES.index("approx_kl")]
            stop |= approx_kl > args.target_kl
            return (nets, losses, stop), None

        rows = len(batch.value)
        minibatches = buffers.shuffled_minibatches(
            key, rows, args.update_epochs, args.num_minibatches
        )
        nets = (state.params, state.opt_state)
        start = (nets, jnp.zeros(len(LOSSES), jnp.float32), jnp.bool_(False))
        (nets, losses, _), _ = jax.lax.scan(epoch, start, minibatches)
        params, opt_state = nets
        return state._replace(params=params, opt_state=opt_state), losses

    def train_step(self, state: State, rollout: Step, schedule: dict, key: Array) -> tuple:
        """Learns from a rollout [S, N], `update_epochs` times: State, metrics."""
        args = self.args
        if args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state, rollout = self.normalize_rewards(state, rollout)
        # s' is the s of the row after, at the end of an episode, too.
        raw = jnp.concatenate([rollout.observation, rollout.next_observation[None]])
        raw = raw.reshape(-1, *raw.shape[2:])
        observation = normalize(raw, state.observations)
        output, values = self.actor_critic(state.params, observation)
        values = values.reshape(-1, args.num_envs)
        advantage = gae(rollout, values[:-1], values[1:], args.gamma, args.gae_lambda)
        rows = self.steps_per_iteration
        action = rollout.action.reshape(rows, *rollout.action.shape[2:])
        log_prob, _ = log_prob_and_entropy(output[:rows], action)
        batch = Batch(
            observation[:rows],
            action,
            rollout.is_step.ravel(),
            log_prob,
            values[:-1].ravel(),
            advantage.ravel(),
        )
        state, losses = self.optimize(state, batch, schedule, key)
        metrics = {}
        for name, value in zip(LOSSES, losses, strict=True):
            metrics[f"losses/{name}"] = value
        if state.observations is not None:  # not before: actions were taken with the old ones
            moments = update_moments(state.observations, raw[:rows], batch.is_step)
            state = state._replace(observations=moments)
        rest = masked_variance(batch.advantage, batch.is_step)
        total = masked_variance(batch.advantage + batch.value, batch.is_step)
        explained = 1 - rest / total
        metrics["losses/explained_variance"] = jnp.where(total > 0, explained, 0.0)
        return state, metrics


Algorithm = PPO


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
