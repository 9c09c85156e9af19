"""PPO on Gymnasium environments: Schulman et al. 2017, arXiv 1707.06347, the clipped variant.

    python ppo_jax.py --env-id CartPole-v1 --num-envs 64
    python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

An iteration: N environments make S steps with fixed parameters, `train_step` learns from them.
Ordinary environments are stepped from Python, functional ones are compiled with the learning.
Actions: Discrete, or a Box [A]. Shape letters: B rows of a batch, A actions or axes of one.

Advantages of Schulman et al. 2016, arXiv 1506.02438, and the details of Huang et al. 2022. Differs:
an episode cut off by a time limit is bootstrapped; running statistics change between rollouts.
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
from typing import Any, Literal, NamedTuple

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
    normalize_observations: Literal["auto", "yes", "no"] = "auto"  # auto: with Box actions
    normalize_rewards: Literal["auto", "yes", "no"] = "auto"  # by the deviation of the return
    frame_stack: int = 1  # how many of an episode's last observations the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show them as they are


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


class ActorCritic(nn.Module):
    """Logits [B, A], or if `gaussian` means and log deviations [B, 2 * A]; and V(s) [B]."""

    num_actions: int
    gaussian: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def dense(x: jax.Array, size: int, scale: float) -> jax.Array:
            return nn.Dense(size, kernel_init=nn.initializers.orthogonal(scale))(x)

        def mlp(x: jax.Array) -> jax.Array:
            return nn.tanh(dense(nn.tanh(dense(x, 64, 2**0.5)), 64, 2**0.5))

        x = prepare(x)
        if x.ndim == 4:
            actor = critic = nature_cnn(x)
        else:
            actor, critic = mlp(x), mlp(x)
        output, value = dense(actor, self.num_actions, 0.01), dense(critic, 1, 1.0)[:, 0]
        if self.gaussian:
            log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,))
            output = jnp.concatenate([output, jnp.broadcast_to(log_std, output.shape)], axis=-1)
        return output, value


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

    mean: jax.Array  # [...]
    variance: jax.Array  # [...]
    rows: jax.Array  # [] taken in so far


class State(NamedTuple):
    """All that learning changes."""

    params: jax.Array  # [P], as one vector: the fewer arrays, the faster the call of a program
    opt_state: optax.OptState
    observations: Moments | None  # of observations, None if they are not normalised
    returns: Moments | None  # of discounted returns, None if rewards are not normalised
    discounted: jax.Array  # [N], discounted returns so far of the episodes that go on


LOSSES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean [...] of the rows of x [B, ...] whose mask [B] is set, 0 if there are none."""
    total = jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).sum(axis=0)
    return total / jnp.maximum(mask.sum(), 1)


def masked_variance(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Their variance [...]."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def update_moments(moments: Moments, x: jax.Array, mask: jax.Array) -> Moments:
    """Takes in the rows of x [B, ...] whose mask [B] is set."""
    rows = moments.rows + mask.sum()
    share = mask.sum() / jnp.maximum(rows, 1)
    step = masked_mean(x, mask) - moments.mean
    within = (1 - share) * moments.variance + share * masked_variance(x, mask)
    return Moments(moments.mean + share * step, within + share * (1 - share) * step**2, rows)


def normalize(x: jax.Array, moments: Moments | None) -> jax.Array:
    """Observations [..., *shape] in standard deviations from the mean, at most 10."""
    if moments is None:
        return x
    return jnp.clip((x - moments.mean) / jnp.sqrt(moments.variance + 1e-8), -10, 10)


def discounted_sum(x: jax.Array, discount: jax.Array, first: jax.Array, **kwargs: Any) -> jax.Array:
    """y[t] = x[t] + discount[t] * y[t - 1], all [S, N], from y[-1] = `first` [N] on."""

    def step(before: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = row[0] + row[1] * before
        return y, y

    return jax.lax.scan(step, first, (x, discount), unroll=8, **kwargs)[1]


def log_prob_and_entropy(output: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies [B] of actions [B] int32 or [B, A] float32."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        log_probs = nn.log_softmax(output)
        chosen = jax.nn.one_hot(action, output.shape[-1])  # the gradient of an index is a scatter
        log_prob = jnp.sum(log_probs * chosen, axis=-1)
        return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)
    mean, log_std = jnp.split(output, 2, axis=-1)
    constant = log_std + 0.5 * math.log(2 * math.pi)
    log_prob = -0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - constant
    return log_prob.sum(axis=-1), jnp.sum(constant + 0.5, axis=-1)


def gae(rollout: Step, value: Any, next_value: Any, gamma: float, gae_lambda: float) -> jax.Array:
    """Advantages [S, N], 0 where a step only resets, from V(s) and V(s') [S, N].

    Schulman et al. 2016, eq. 16; bootstrapped from V(s') unless the episode ended by itself.
    """
    bootstrap = jnp.where(rollout.terminated, 0.0, next_value)
    delta = jnp.where(rollout.is_step, rollout.reward + gamma * bootstrap - value, 0.0)
    goes_on = rollout.is_step & ~(rollout.terminated | rollout.truncated)
    return discounted_sum(delta, gamma * gae_lambda * goes_on, 0 * delta[0], reverse=True)


class PPO:
    """The algorithm, pure functions of a `State`. All that the loops below know of it is here."""

    overlap = False  # rollouts are collected with the newest parameters

    def __init__(self, args: Args, observation: np.ndarray, action_space: Any) -> None:
        box = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
        discrete = isinstance(action_space, gym.spaces.Discrete)
        require(box or discrete, f"PPO takes Discrete actions or a Box [A], not {action_space}")
        self.args, self.space, self.box = args, action_space, box
        self.size = args.num_envs * args.num_steps  # steps of an iteration
        self.shape = args.num_steps, args.num_envs  # S, N
        require(self.size % args.num_minibatches == 0, "num_minibatches must divide the rollout")
        num_actions = action_space.shape[0] if box else int(action_space.n)
        self.greedy = np.zeros(num_actions, np.float32)  # the noise of no exploration
        action = self.greedy if box else np.int32(0)
        self.example = Step(observation, action, np.float32(0), *[np.False_] * 3)
        self.network = ActorCritic(num_actions, box)
        tree = jax.eval_shape(self.network.init, jax.random.PRNGKey(0), observation[None])
        self.unravel = ravel_pytree(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree))[1]
        clip = optax.clip_by_global_norm(args.max_grad_norm)  # the learning rate is scheduled
        self.optimizer = optax.chain(clip, optax.scale_by_adam(eps=1e-5))

    def init(self, key: jax.Array) -> State:
        """The state before training."""
        args, observation = self.args, self.example.observation
        params, _ = ravel_pytree(self.network.init(key, observation[None]))

        def moments(flag: str, auto: bool, shape: tuple[int, ...]) -> Moments | None:
            use = flag == "yes" or (flag == "auto" and auto)
            return Moments(jnp.zeros(shape), jnp.ones(shape), jnp.float32(0)) if use else None

        floats = self.box and observation.dtype != np.uint8
        observations = moments(args.normalize_observations, floats, observation.shape)
        returns, zeros = moments(args.normalize_rewards, self.box, ()), jnp.zeros(args.num_envs)
        return State(params, self.optimizer.init(params), observations, returns, zeros)

    def restart(self, state: State) -> State:
        """The state where the environments start anew."""
        return state._replace(discounted=jnp.zeros_like(state.discounted))

    def schedule(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """What changes from one iteration to the next, of those that start at `steps`."""
        left = np.maximum(1 - steps / self.args.total_timesteps, 0) if self.args.anneal_lr else 1
        return {"learning_rate": self.args.learning_rate * left * np.ones(len(steps))}

    def explore(self, key: jax.Array, now: dict) -> jax.Array:
        """The noise of a rollout [S, N, A]: normal for a Gaussian, Gumbel noise for logits."""
        draw = jax.random.normal if self.box else jax.random.gumbel
        return draw(key, (*self.shape, *self.greedy.shape))

    def view(self, state: State) -> Any:
        """What `act` needs of a state."""
        return state.params, state.observations

    def apply(self, params: jax.Array, observation: Any) -> Any:
        """The actor's output and V(s) [B] of observations [B, ...] that are normalised."""
        return self.network.apply(self.unravel(params), observation)

    @partial(jax.jit, static_argnums=0)
    def act(self, view: Any, observation: Any, noise: Any) -> jax.Array:
        """Actions [N] or [N, A] with this noise [N, A]."""
        output, _ = self.apply(view[0], normalize(observation, view[1]))
        if not self.box:
            return jnp.argmax(output + noise, axis=-1)
        mean, log_std = jnp.split(output, 2, axis=-1)
        return mean + jnp.exp(log_std) * noise

    def to_env(self, action: Any) -> Any:
        """The environment's actions for those of `act`, which the loss needs as they were drawn."""
        space = self.space
        return action.clip(space.low, space.high) if self.box else action + space.start

    def normalize_rewards(self, state: State, rollout: Step) -> tuple[State, Step]:
        """Divides rewards by the standard deviation of the discounted return up to now."""
        if state.returns is None:
            return state, rollout
        mask, done = rollout.is_step, rollout.terminated | rollout.truncated
        goes_on = mask & ~done
        discount = self.args.gamma * jnp.concatenate([jnp.ones_like(goes_on[:1]), goes_on[:-1]])
        returns = discounted_sum(rollout.reward, discount, state.discounted)
        moments = update_moments(state.returns, returns.reshape(-1), mask.reshape(-1))
        reward = jnp.clip(rollout.reward / jnp.sqrt(moments.variance + 1e-8), -10, 10)
        state = state._replace(returns=moments, discounted=goes_on[-1] * returns[-1])
        return state, rollout._replace(reward=reward)

    def loss(self, params: jax.Array, step: Step, old: tuple) -> tuple[jax.Array, jax.Array]:
        """Schulman et al. 2017, eq. 9, to be minimised, of steps [B]; and the means of LOSSES."""
        args, mask, (old_log_prob, old_value, advantage) = self.args, step.is_step, old
        output, value = self.apply(params, step.observation)
        log_prob, entropy = log_prob_and_entropy(output, step.action)
        target = advantage + old_value
        if args.norm_adv:
            unbiased = masked_variance(advantage, mask) / (1 - 1 / jnp.maximum(mask.sum(), 2))
            advantage = (advantage - masked_mean(advantage, mask)) / (unbiased**0.5 + 1e-8)
        log_ratio = log_prob - old_log_prob
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        error = (value - target) ** 2
        if args.clip_vloss:
            near = old_value + jnp.clip(value - old_value, -args.clip_coef, args.clip_coef)
            error = jnp.maximum(error, (near - target) ** 2)
        surrogate = jnp.minimum(advantage * ratio, advantage * clipped)
        is_clipped = jnp.where(jnp.abs(ratio - 1) > args.clip_coef, 1.0, 0.0)
        # One mean of them all: many small ones would cost as much as the gradient.
        parts = -surrogate, 0.5 * error, entropy, -log_ratio, ratio - 1 - log_ratio, is_clipped
        means = masked_mean(jnp.stack(parts, axis=-1), mask)
        return means[0] + args.vf_coef * means[1] - args.ent_coef * means[2], means

    def train_step(self, state: State, rollout: Step, now: dict, key: jax.Array) -> tuple:
        """Learns from a rollout [S, N], `update_epochs` times: State, metrics."""
        args, mask, reward = self.args, rollout.is_step, rollout.reward
        rollout = rollout._replace(reward=jnp.sign(reward) if args.clip_rewards else reward)
        state, rollout = self.normalize_rewards(state, rollout)

        def flat(tree: Any) -> Any:
            return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)

        # s' is the s of the row after, at the end of an episode, too.
        raw = jnp.concatenate([rollout.observation, rollout.next_observation[None]])
        observation = normalize(raw, state.observations)
        output, values = self.apply(state.params, flat(observation))
        values = values.reshape(-1, mask.shape[1])
        advantage = gae(rollout, values[:-1], values[1:], args.gamma, args.gae_lambda)
        log_prob, _ = log_prob_and_entropy(output[: mask.size], flat(rollout.action))
        old = log_prob.reshape(mask.shape), values[:-1], advantage
        rollout = rollout._replace(observation=observation[:-1], next_observation=None)
        rows = flat((rollout, old))

        def update(carry: tuple, index: jax.Array) -> tuple[tuple, jax.Array]:
            params, opt_state = carry
            batch = jax.tree.map(lambda x: x[index], rows)
            grads, losses = jax.grad(self.loss, has_aux=True)(params, *batch)
            changes, opt_state = self.optimizer.update(grads, opt_state)
            return (params - now["learning_rate"] * changes, opt_state), losses

        def epoch(carry: tuple, minibatches: jax.Array) -> tuple[tuple, None]:
            before, stop = carry
            nets, losses = jax.lax.scan(update, before[0], minibatches)
            after = jax.tree.map(partial(jnp.where, stop), before, (nets, losses.mean(axis=0)))
            return (after, stop | (after[1][4] > args.target_kl)), None

        sizes = mask.size, args.update_epochs, args.num_minibatches
        start = ((state.params, state.opt_state), jnp.zeros(len(LOSSES))), jnp.bool_(False)
        minibatches = buffers.shuffled_minibatches(key, *sizes)
        (((params, opt_state), losses), _), _ = jax.lax.scan(epoch, start, minibatches)
        metrics = {f"losses/{name}": x for name, x in zip(LOSSES, losses, strict=True)}
        state = state._replace(params=params, opt_state=opt_state)
        if state.observations is not None:  # not before: actions were taken with the old ones
            moments = update_moments(state.observations, flat(raw[:-1]), flat(mask))
            state = state._replace(observations=moments)
        target = advantage + values[:-1]
        rest, total = (masked_variance(flat(x), flat(mask)) for x in (advantage, target))
        explained = jnp.where(total > 0, 1 - rest / total, 0.0)
        return state, metrics | {"losses/explained_variance": explained}


Algorithm = PPO


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
