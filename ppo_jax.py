"""PPO, the clipped variant: Schulman et al. 2017, arXiv 1707.06347.

    python ppo_jax.py --env-id CartPole-v1 --num-envs 64
    python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

In an iteration N environments make S steps with the same parameters, which are then updated:

    for each iteration:                                                     # train
        noise = draw_noise(key, step, rollout_shape)
        for each of S steps:                                                # collect_rollout
            action = act(params, observation, noise)
            observation, reward, terminated, truncated = envs.step(action)
        state, params, metrics = train_step(state, rollout, key, step)
        when they are due: write_point, save, evaluate_agent

Environments written in JAX are compiled with the learning into one program: see compiled.py.

Advantages of Schulman et al. 2016, arXiv 1506.02438, and the details of Huang et al. 2022. Differs:
an episode cut off by a time limit is bootstrapped; running statistics change between rollouts.
B are the rows of a batch, A the actions, or the length of one in a Box.
"""

import json
import math
import re
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from jax import Array
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

        actor: Any = None
        critic: Any = None
        if x.dtype == jnp.uint8 and x.ndim > 2:
            import images

            if images.are_images(x):
                orthogonal = nn.initializers.orthogonal(2**0.5)
                actor = critic = images.nature_cnn(x, orthogonal)
        if actor is None:
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
    """A step of an environment [...], of N of them [N, ...], or those of a rollout [S, N, ...].

    In Gymnasium's NEXT_STEP mode the step after an episode's end only resets the environment. Its
    action is ignored and its reward is 0. It is not `valid`: nothing is learned from it. So the
    observation of a row is always what the row before it led to, also at the end of an episode.
    """

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # a time limit cut the episode off
    valid: Any
    next_observation: Any = None  # only of a rollout: the observation after its last step [N, ...]


class Moments(NamedTuple):
    """Running statistics of an array [...]."""

    mean: Array  # [...]
    variance: Array  # [...]
    rows: Array  # [] taken in so far


class State(NamedTuple):
    """All that learning changes."""

    params: Any
    opt_state: optax.OptState
    observations: Moments | None  # of observations, None if they are not normalised
    returns: Moments | None  # of discounted returns, None if rewards are not normalised
    discounted: Array  # [N], discounted returns so far of the episodes that go on


class Batch(NamedTuple):
    """Steps, and what policy and value said of them when they were made: [B, ...]."""

    observation: Array  # normalised, if observations are
    action: Array
    valid: Array
    log_prob: Array
    value: Array
    advantage: Array


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
    delta = jnp.where(rollout.valid, delta, 0.0)
    done = rollout.terminated | rollout.truncated
    discount = gamma * gae_lambda * (rollout.valid & ~done)
    return discounted_sum(delta, discount, jnp.zeros_like(delta[0]), reverse=True)


class PPO:
    """The algorithm, as pure functions of a `State`."""

    acts_while_learning = False  # rollouts are collected with the newest parameters

    def __init__(self, args: Args, observation_space: Any, action_space: Any) -> None:
        is_vector = isinstance(action_space, gym.spaces.Box) and len(action_space.shape) == 1
        self.is_box = is_vector and np.issubdtype(action_space.dtype, np.floating)
        if not self.is_box and not isinstance(action_space, gym.spaces.Discrete):
            raise UsageError(f"PPO takes Discrete actions or a Box [A] of floats: {action_space}")
        self.args = args
        self.action_space = action_space
        self.rollout_shape = (args.num_steps, args.num_envs)
        self.steps_per_iteration = args.num_envs * args.num_steps
        if self.steps_per_iteration % args.num_minibatches > 0:
            raise UsageError("num_minibatches must divide num_envs * num_steps")
        num_actions = action_space.shape[0] if self.is_box else int(action_space.n)
        self.no_noise = np.zeros(num_actions, np.float32)
        dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        observation = np.zeros(observation_space.shape, dtype)
        action = np.zeros(num_actions, np.float32) if self.is_box else np.int32(0)
        no = np.False_
        self.example = Step(observation, action, np.float32(0), no, no, no)
        if args.normalize_observations == "yes" and dtype == np.uint8:
            import images

            if images.are_images(self.example.observation[None]):
                raise UsageError("normalize_observations takes no images: the network scales them")
        self.network: Any = ActorCritic(num_actions, self.is_box)
        self.split_batch = lambda batch: batch  # compiled.py may split it over devices
        # Compiled for this object, so that the programs go when it goes.
        self.act = jax.jit(self.act)
        self.draw_noise = jax.jit(self.draw_noise, static_argnums=2)

    def optimizer(self, learning_rate: Any) -> optax.GradientTransformation:
        """Adam with clipped gradients, at a learning rate that may change from step to step."""
        clip = optax.clip_by_global_norm(self.args.max_grad_norm)
        # As one vector, because many small arrays are slower; not for one that minds their shapes.
        return optax.flatten(optax.chain(clip, optax.adam(learning_rate, eps=1e-5)))

    def init(self, key: Array) -> State:
        """The state before training."""
        observation = self.example.observation

        def moments(choice: Choice, auto: bool, axes: tuple) -> Moments | None:
            if choice == "no" or (choice == "auto" and not auto):
                return None
            zeros = jnp.zeros(axes, jnp.float32)
            return Moments(mean=zeros, variance=zeros + 1, rows=jnp.float32(0))

        is_float = self.is_box and observation.dtype != np.uint8
        observations = moments(self.args.normalize_observations, is_float, observation.shape)
        returns = moments(self.args.normalize_rewards, self.is_box, ())
        params = self.network.init(key, observation[None])
        opt_state = self.optimizer(self.args.learning_rate).init(params)
        discounted = jnp.zeros(self.args.num_envs, jnp.float32)
        return State(params, opt_state, observations, returns, discounted)

    def cut_episodes_off(self, state: State) -> State:
        """The state of a resumed run, whose environments start anew."""
        return state._replace(discounted=jnp.zeros_like(state.discounted))

    def draw_noise(self, key: Array, step: Any, shape: tuple[int, int]) -> Array:
        """Noise [S, N, A] of steps from `step` on: normal, or Gumbel for logits."""
        draw = jax.random.normal if self.is_box else jax.random.gumbel
        return draw(jax.random.fold_in(key, step), shape + self.no_noise.shape)

    def acting_params(self, state: State) -> tuple:
        """The part of a state that `act` needs."""
        return state.params, state.observations

    def act(self, params: tuple, observation: Any, noise: Any) -> Array:
        """Actions [N] or [N, A] with noise [N, A]."""
        network_params, moments = params
        output, _ = self.network.apply(network_params, normalize(observation, moments))
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
        goes_on = rollout.valid & ~(rollout.terminated | rollout.truncated)
        went_on = jnp.concatenate([jnp.ones_like(goes_on[:1]), goes_on[:-1]])
        discount = self.args.gamma * went_on
        returns = discounted_sum(rollout.reward, discount, state.discounted)
        moments = update_moments(state.returns, returns.ravel(), rollout.valid.ravel())
        deviation = jnp.sqrt(moments.variance + 1e-8)
        reward = jnp.clip(rollout.reward / deviation, -10, 10)
        state = state._replace(returns=moments, discounted=goes_on[-1] * returns[-1])
        return state, rollout._replace(reward=reward)

    def loss(self, params: Any, batch: Batch) -> tuple[Array, dict]:
        """Schulman et al. 2017, eq. 9, to be minimised, and the metrics."""
        args = self.args
        output, value = self.network.apply(params, batch.observation)
        log_prob, entropy = log_prob_and_entropy(output, batch.action)
        advantage = batch.advantage
        if args.norm_adv:
            rows = jnp.maximum(batch.valid.sum(dtype=jnp.float32), 2)
            unbiased_variance = masked_variance(advantage, batch.valid) / (1 - 1 / rows)
            deviation = advantage - masked_mean(advantage, batch.valid)
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
            error = jnp.maximum(error, (batch.value + change - target) ** 2)
        value_loss = 0.5 * error
        approx_kl = ratio - 1 - log_ratio
        losses = {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": -log_ratio,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": is_clipped,
        }
        # One mean of them all: many small ones would cost as much as the gradient.
        means = masked_mean(jnp.stack(list(losses.values()), axis=-1), batch.valid)
        metrics = dict(zip(losses, means, strict=True))
        loss = metrics["losses/policy_loss"] + args.vf_coef * metrics["losses/value_loss"]
        return loss - args.ent_coef * metrics["losses/entropy"], metrics

    def optimize(self, state: State, batch: Batch, key: Array, learning_rate: Array) -> tuple:
        """The epochs of gradient steps on parts of a batch: State, metrics of the last epoch."""
        args = self.args
        gradient_of_loss = jax.grad(self.loss, has_aux=True)
        optimizer = self.optimizer(learning_rate)

        def gradient_step(nets: tuple, indices: Array) -> tuple[tuple, dict]:
            params, opt_state = nets
            minibatch = self.split_batch(jax.tree.map(lambda x: x[indices], batch))
            gradient, metrics = gradient_of_loss(params, minibatch)
            changes, opt_state = optimizer.update(gradient, opt_state, params)
            return (optax.apply_updates(params, changes), opt_state), metrics

        def epoch(carry: tuple, minibatches: Array) -> tuple[tuple, tuple]:
            nets, stopped = carry
            new_nets, metrics = jax.lax.scan(gradient_step, nets, minibatches)
            metrics = jax.tree.map(jnp.mean, metrics)
            # A loop cannot be left: epochs after the policy went too far are thrown away.
            nets = jax.tree.map(partial(jnp.where, stopped), nets, new_nets)
            stops = stopped | (metrics["losses/approx_kl"] > args.target_kl)
            return (nets, stops), (stopped, metrics)

        rows = len(batch.value)
        order = buffers.shuffled_minibatches(key, rows, args.update_epochs, args.num_minibatches)
        start = ((state.params, state.opt_state), jnp.bool_(False))
        (nets, _), (stopped, metrics) = jax.lax.scan(epoch, start, order)
        last = jnp.sum(~stopped) - 1
        metrics = jax.tree.map(lambda x: x[last], metrics)
        params, opt_state = nets
        return state._replace(params=params, opt_state=opt_state), metrics

    def train_step(self, state: State, rollout: Step, key: Array, step: Array) -> tuple:
        """Learns from the rollout [S, N] that began at `step`.

        Returns the State, the parameters to act with, and the metrics.
        """
        args = self.args
        if args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state, rollout = self.normalize_rewards(state, rollout)
        # s' is the s of the row after, at the end of an episode, too.
        raw = jnp.concatenate([rollout.observation, rollout.next_observation[None]])
        raw = raw.reshape(-1, *raw.shape[2:])
        observation = normalize(raw, state.observations)
        output, values = self.network.apply(state.params, observation)
        values = values.reshape(-1, args.num_envs)
        advantage = gae(rollout, values[:-1], values[1:], args.gamma, args.gae_lambda)
        rows = self.steps_per_iteration
        action = rollout.action.reshape(rows, *rollout.action.shape[2:])
        log_prob, _ = log_prob_and_entropy(output[:rows], action)
        batch = Batch(
            observation[:rows],
            action,
            rollout.valid.ravel(),
            log_prob,
            values[:-1].ravel(),
            advantage.ravel(),
        )
        steps_left = jnp.maximum(args.total_timesteps - step, 0)
        share = steps_left / args.total_timesteps if args.anneal_lr else 1.0
        learning_rate = jnp.float32(args.learning_rate * share)
        state, metrics = self.optimize(state, batch, jax.random.fold_in(key, step), learning_rate)
        metrics["charts/learning_rate"] = learning_rate
        if state.observations is not None:  # not before: actions were taken with the old ones
            moments = update_moments(state.observations, raw[:rows], batch.valid)
            state = state._replace(observations=moments)
        rest = masked_variance(batch.advantage, batch.valid)
        total = masked_variance(batch.advantage + batch.value, batch.valid)
        metrics["losses/explained_variance"] = jnp.where(total > 0, 1 - rest / total, 0.0)
        return state, self.acting_params(state), metrics


Algorithm = PPO
ENV_ID = "CartPole-v1"  # of a run without --env-id


# === common to all scripts ===
#
# It uses of an algorithm: args, example, no_noise, rollout_shape, steps_per_iteration,
# acts_while_learning, init, cut_episodes_off, draw_noise, acting_params, act, to_env_action,
# train_step; and `stored`, to keep experience.

LONGEST_EPISODE = 30_000  # steps of an evaluation; episodes of Atari have up to 27,000


class UsageError(ValueError):
    """A mistake in the flags, which the command line shows in one line."""


@dataclass(frozen=True)
class Run:
    """Flags of the experiment. Many seeds, devices or processes need an environment in JAX."""

    exp_name: str = Path(__file__).stem  # part of the folder's name
    env_id: str = ENV_ID  # a registered environment; MODULE:ID, as ale_py:ALE/Pong-v5, imports it
    env_kwargs: str = "{}"  # arguments of the environment in JSON, such as {"continuous": true}
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the environment's own, or sync
    seed: int = 1  # seed of the environments, the exploration, the network and the learning
    num_seeds: int = 1  # agents trained at once, with this seed and those after it
    num_devices: int = 1  # devices of a process that agents, or the environments of one, share
    distributed: str = ""  # train with other processes: auto, or ADDRESS,PROCESSES,ID
    log_interval: int = 1_000  # steps between two points of the charts
    eval_interval: int = 100_000  # steps between two evaluations; there is one at the end
    eval_episodes: int = 10  # episodes of an evaluation; 0: no evaluation
    eval_explores: bool = False  # evaluate with the exploration that training ends with
    capture_video: bool = False  # record one more episode at each evaluation
    checkpoint_interval: int = 100_000  # steps between two checkpoints, one at the end; 0: none
    resume: str = ""  # folder of a run to go on with; its flags are the defaults of the others
    track: bool = False  # log to Weights & Biases, too: WANDB_PROJECT, WANDB_ENTITY say where


Flags = NamedTuple("Flags", [("experiment", Run), ("algorithm", Args)])  # noqa: UP014


class EnvState(NamedTuple):
    """Where N environments stand between two rollouts."""

    observation: Any  # [N, ...]
    valid: np.ndarray  # [N] bool, False where the next step only resets
    unfinished: np.ndarray  # [2, N], returns and lengths so far of the episodes that go on


class Log(NamedTuple):
    """What a run shows and keeps."""

    folder: Path
    writer: Any  # an event file of TensorBoard
    bar: Any  # of tqdm
    begun: int  # the step where training began
    start_time: float  # and when, in seconds
    checkpoints: Any  # None if nothing is saved
    vault: Any  # experience on disk, None without --save-experience
    scalars: dict[str, list]  # numbers since the last point of the charts, which shows their means
    recent: deque  # returns of the last 100 episodes
    signals: Sequence[int]  # that have come to end the run


def make_envs(args: Args, run: Run, num_envs: int, videos: str = "") -> VectorEnv:
    """Environments that are stepped together; `videos` is a folder to record their episodes in."""
    options: dict = {} if run.vectorization == "auto" else {"vectorization_mode": run.vectorization}
    if run.vectorization == "async":
        options["vector_kwargs"] = {"context": "forkserver"}  # a fork of JAX's threads can hang
    if videos:
        record = partial(gym.wrappers.RecordVideo, video_folder=videos)
        options = {"vectorization_mode": "sync", "wrappers": [record], "render_mode": "rgb_array"}
    try:
        kwargs = json.loads(run.env_kwargs)
        envs: Any = gym.make_vec(run.env_id, num_envs, **options, **kwargs)
        # Few are faster one by one. Gymnasium's vector version of those in JAX loses transitions.
        one_by_one = num_envs < 4 or hasattr(envs.unwrapped, "func_env")
        if one_by_one and envs.spec.vector_entry_point and envs.spec.entry_point and not options:
            with suppress(Exception):  # if there is a single version, and it is the same
                singles = gym.make_vec(run.env_id, num_envs, "sync", {"copy": False}, **kwargs)
                are_alike = singles.single_observation_space == envs.single_observation_space
                (envs if are_alike else singles).close()
                envs = singles if are_alike else envs
    except Exception as error:
        flags = f"--env-id {run.env_id} --env-kwargs '{run.env_kwargs}'"
        error.add_note(f"in {flags}")
        theirs = (gym.error.Error, ModuleNotFoundError, json.JSONDecodeError)
        is_of_kwargs = re.search("unexpected keyword argument|must be a mapping", str(error))
        if not isinstance(error, theirs) and not is_of_kwargs:
            raise
        hint = ""
        if isinstance(error, gym.error.NamespaceNotFound | gym.error.NameNotFound):
            hint = " --env-id MODULE:ID, such as ale_py:ALE/Pong-v5, imports its module."
        raise UsageError(f"{flags}: {error}{hint}") from error
    if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        raise UsageError(f"{run.env_id}: its autoreset_mode must be NEXT_STEP")
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        with suppress(NotImplementedError):  # a space that Gymnasium does not know
            envs = gym.wrappers.vector.FlattenObservation(envs)
    if not isinstance(envs.single_observation_space, gym.spaces.Box):
        space = envs.single_observation_space
        raise UsageError(f"{run.env_id}: observations {space} cannot be flattened to a Box")
    if args.frame_stack > 1:
        import images

        return images.FrameStack(envs, args.frame_stack)
    return envs


def set_up(args: Args, run: Run) -> tuple[Algorithm, bool]:
    """The algorithm, and whether its environment is written in JAX and so is compiled with it."""
    warnings.filterwarnings("ignore", ".*AutoresetMode")  # which `make_envs` looks at
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # `act` takes a third of the time
    flags = asdict(args) | asdict(run)
    for name, value in flags.items():
        may_be_0 = ("seed", "eval_episodes", "checkpoint_interval", "learning_starts")
        least = 0 if name in may_be_0 else 1
        if type(value) is int and not least <= value < 2**31:
            raise UsageError(f"{name} must be from {least} to 2**31 - 1, not {value}")
    look = run if run.vectorization == "auto" else replace(run, vectorization="sync")
    with closing(make_envs(args, look, 1)) as envs:
        alg = Algorithm(args, envs.single_observation_space, envs.single_action_space)
    vector: Any = envs.unwrapped
    space: Any = vector.single_observation_space
    is_flattened = not isinstance(space, gym.spaces.Box) or len(space.shape) != 1
    if is_flattened and alg.example.observation.dtype == np.uint8:
        import images

        is_flattened = not images.are_images(alg.example.observation[None])
    if is_flattened:
        tqdm.write(f"observations {space} are flattened for the network")
    longest_gap = run.log_interval + alg.steps_per_iteration  # between two points of the charts
    if flags.get("save_experience"):
        import vault  # noqa: F401  without it the run should not begin

        if longest_gap > flags["buffer_size"]:
            raise UsageError(f"buffer_size must be >= {longest_gap} to save each log_interval")
    if run.capture_video:
        import images

        images.draw_frame(run.env_id, json.loads(run.env_kwargs), space)
    single: Any = vector.envs[0] if isinstance(vector, gym.vector.SyncVectorEnv) else vector
    is_in_jax = hasattr(single.unwrapped, "func_env") and isinstance(space, gym.spaces.Box)
    if look is run and is_in_jax and not single.spec.additional_wrappers:
        return alg, True
    if run.num_seeds > 1 or run.num_devices > 1 or run.distributed:
        how = "start a run for each seed instead, see docs/scale.md"
        raise UsageError(f"num_seeds, num_devices, distributed: {run.env_id} is not in JAX; {how}")
    return alg, False


def environment_seed(run: Run, step: int, evaluation: bool = False) -> int:
    """A seed for environments that start at `step`; runs, resumes and evaluations share none."""
    (word,) = np.random.SeedSequence([run.seed, step, evaluation]).generate_state(1)
    return int(word) // 4  # 30 bits, because some environments take no more than 31


def count_episodes(rollout: Step, unfinished: np.ndarray, scalars: dict) -> np.ndarray:
    """Adds returns and lengths of episodes that end to `scalars`; gives those of others [2, N]."""
    steps = np.stack([rollout.reward, rollout.valid], dtype=np.float64)  # [2, S, N]
    sums = unfinished[:, None] + np.cumsum(steps, axis=1)  # as if no episode ended
    for t, env in np.argwhere(rollout.terminated | rollout.truncated):
        episode = sums[:, t, env].copy()
        scalars["charts/episodic_return"].append(episode[0])
        scalars["charts/episodic_length"].append(episode[1])
        sums[:, t:, env] -= episode[:, None]
    return sums[:, -1]


def collect_rollout(
    alg: Algorithm, envs: VectorEnv, params: Any, state: EnvState, noise: Any, log: Log
) -> tuple[Step, EnvState]:
    """Steps the environments with noise [S, N, ...]: Steps [S, N, ...], the next EnvState."""
    observation, valid, _ = state
    steps_and_envs = noise.shape[:2]
    rollout = jax.tree.map(lambda x: np.empty(steps_and_envs + x.shape, x.dtype), alg.example)
    for t in range(len(noise)):
        action = np.asarray(alg.act(params, observation, noise[t]))
        rollout.observation[t] = observation  # before the step, which may write over it
        observation, reward, terminated, truncated, info = envs.step(alg.to_env_action(action))
        rollout.action[t] = action
        rollout.reward[t] = reward
        rollout.terminated[t] = terminated
        rollout.truncated[t] = truncated
        rollout.valid[t] = valid
        valid = ~(rollout.terminated[t] | rollout.truncated[t])
    rollout.reward[~rollout.valid] = 0  # whatever the environment gives for a reset
    rollout = rollout._replace(next_observation=observation.copy())
    unfinished = count_episodes(rollout, state.unfinished, log.scalars)
    return rollout, EnvState(rollout.next_observation, valid, unfinished)


def greedy_action(alg: Algorithm, params: Any, observation: Any) -> np.ndarray:
    """The environment's actions [N] for observations [N, ...], without exploration."""
    no_noise = np.stack([alg.no_noise] * len(observation))
    return alg.to_env_action(np.asarray(alg.act(params, observation, no_noise)))


def evaluate(
    alg: Any, run: Run, params: Any, episodes: int, videos: str = "", signals: Sequence[int] = ()
) -> np.ndarray:
    """Returns [episodes] of the first episode of as many environments; a signal ends them."""
    returns = np.zeros(episodes)
    over = np.zeros(episodes, bool)
    seed = environment_seed(run, 0, evaluation=True)
    noise: Any = np.stack([alg.no_noise] * episodes)
    with closing(make_envs(alg.args, run, episodes, videos)) as envs:
        observation, _ = envs.reset(seed=seed)
        for t in range(LONGEST_EPISODE):
            if run.eval_explores:
                key = jax.random.PRNGKey(seed + t)
                (noise,) = alg.draw_noise(key, alg.args.total_timesteps, (1, episodes))
            action = alg.to_env_action(np.asarray(alg.act(params, observation, noise)))
            observation, reward, terminated, truncated, _ = envs.step(action)
            returns += np.where(over, 0, reward)
            over |= terminated | truncated
            if over.all() or signals:
                return returns
    tqdm.write(f"an evaluation cuts off episodes after {LONGEST_EPISODE:,} steps")
    return returns


def load_policy(folder: Path | str) -> Callable[[Any], np.ndarray]:
    """The best agent of a run: a function of observations [N, ...] to the environment's actions."""
    import checkpoints

    run, args = checkpoints.read_flags(folder, Run, Args)
    alg, _ = set_up(args, replace(run, capture_video=False))
    like = jax.jit(lambda key: alg.acting_params(alg.init(key)))(jax.random.PRNGKey(0))
    return partial(greedy_action, alg, checkpoints.Checkpoints(folder).best(like))


def open_folder(args: Args, run: Run) -> Path:
    """The folder of the run, which has its flags: a new one under runs/, or that of --resume."""
    flags = {"run": asdict(run), "args": asdict(args)}
    if run.resume:
        import checkpoints

        folder = checkpoints.reopen_folder(args, run)
    else:
        name = f"{run.env_id}__{run.exp_name}__{run.seed}__{time.time_ns() // 10**6}"
        folder = Path("runs", re.sub("[/:]", "-", name)).absolute()
    if run.track:  # Weights & Biases follows the event files
        import wandb

        name = folder.name
        try:
            wandb.init(id=name, name=name, config=flags, sync_tensorboard=True, resume="allow")
        except wandb.Error as error:
            raise UsageError(f"track: {error}") from error
    if not run.resume:
        folder.mkdir(parents=True)
        (folder / "args.json").write_text(json.dumps(flags))
    seeds = f"{run.num_seeds} agents (steps and speed are of each), " if run.num_seeds > 1 else ""
    device = jax.devices()[0].device_kind
    tqdm.write(f"{folder}: {seeds}{args.num_envs} x {run.env_id}, {device}")
    return folder


def open_writer(folder: Path, flags: dict, begun: int) -> Any:
    """An event file of TensorBoard, which begins with a table of the flags."""
    table = "|flag|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in flags.items())
    start = SessionLog(status=SessionLog.START)  # TensorBoard drops what it has of later steps
    writer = event_file_writer.EventFileWriter(str(folder), flush_secs=1)  # wandb replaces it
    event = partial(Event, wall_time=time.time(), step=begun + 1)
    writer.add_event(event(session_log=start))
    writer.add_event(event(summary=text_pb("hyperparameters", table)))
    return writer


def open_vault(alg: Any, run: Run, folder: Path, state: Any) -> Any:
    """The experience on disk with --save-experience, otherwise None."""
    if not getattr(alg.args, "save_experience", False):
        return None
    from vault import Vault

    about = {"env_id": run.env_id, "env_kwargs": json.loads(run.env_kwargs)}
    about |= {"seed": run.seed, "script": Path(__file__).stem}
    vault = Vault(folder / "experience", alg.stored, alg.args.num_envs, about=about)
    vault.write(state.replay)  # drops what a resumed run had after its checkpoint
    return vault


def write_metrics(writer: Any, step: int, metrics: dict) -> None:
    """Adds a point to each chart of {tag: number}, but no NaN; all in one event, the fastest."""
    points = [Summary.Value(tag=k, simple_value=x) for k, x in metrics.items() if not math.isnan(x)]
    writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=points)))


def shown(number: Any) -> str:
    """Four significant digits, or all those of a whole number."""
    if math.isnan(number):
        return "none yet"
    return f"{number:.4g}" if abs(number) < 1000 else f"{number:.0f}"


def write_point(log: Log, step: int, metrics: dict) -> None:
    """Writes metrics and the means of `scalars`; shows how far training is, in a bar or lines."""
    log.recent.extend(log.scalars["charts/episodic_return"])
    means = {tag: np.mean(values) for tag, values in log.scalars.items() if values}
    log.scalars.clear()
    speed = (step - log.begun) / (time.time() - log.start_time)
    write_metrics(log.writer, step, metrics | means | {"charts/SPS": speed})
    text = f"return {shown(np.mean(log.recent or math.nan))}"
    if log.bar.disable and 20 * step // log.bar.total > 20 * log.bar.n // log.bar.total:
        print(f"{step:,} steps, {speed:,.0f} a second, {text}", flush=True)
    log.bar.n = step
    log.bar.set_postfix_str(text)


def is_due(interval: int, step: int, end: int) -> bool:
    """Whether the steps from `step` to `end` reach a multiple of the interval; 0: never."""
    return interval > 0 and end // interval > step // interval


def check_finite(log: Log, step: int, params: Any) -> None:
    """Ends training that has diverged, before it is saved over what was good."""
    if not all(jnp.isfinite(x).all() for x in jax.tree.leaves(params)):
        text = f"parameters are not finite at step {step:,}"
        raise FloatingPointError(f"{log.folder}: training has diverged, {text}")


def start(alg: Any, run: Run, envs: VectorEnv, key: Array, signals: Sequence[int]) -> tuple:
    """State, EnvState and Log of a run that begins or goes on."""
    state = jax.jit(alg.init)(key)
    folder = open_folder(alg.args, run)
    begun = 0
    recent: list = []
    saved: Any = None
    if run.checkpoint_interval > 0 or run.resume:
        import checkpoints

        saved = checkpoints.Checkpoints(folder)
    if run.resume:
        state = checkpoints.shapes_of(state)  # so that memory never holds two replays
        begun, state, recent = saved.newest(state)
        state = alg.cut_episodes_off(state)
    vault = open_vault(alg, run, folder, state)
    writer = open_writer(folder, asdict(run) | asdict(alg.args), begun)
    bar = tqdm(initial=begun, total=alg.args.total_timesteps, unit=" steps", disable=None)
    observation, _ = envs.reset(seed=environment_seed(run, begun))
    valid = np.ones(envs.num_envs, bool)
    env_state = EnvState(observation, valid, unfinished=np.zeros((2, envs.num_envs)))
    returns = deque(recent, maxlen=100)
    scalars: dict = defaultdict(list)
    log = Log(folder, writer, bar, begun, time.time(), saved, vault, scalars, returns, signals)
    return state, env_state, log


def save(log: Log, step: int, learned: tuple) -> None:
    """Saves the State, and apart from it what `act` needs, unless nothing of the run is saved."""
    state, params, _ = learned
    check_finite(log, step, params)
    if log.checkpoints is not None:
        log.checkpoints.save(step, state, params, log.recent)
        if log.signals:
            tqdm.write(f"interrupted at step {step:,} and saved: --resume {log.folder} goes on")


def evaluate_agent(alg: Algorithm, run: Run, params: Any, step: int, log: Log) -> None:
    """Logs the mean return in an evaluation, keeps the best agent, and records a video."""
    if run.eval_episodes > 0:
        score = evaluate(alg, run, params, run.eval_episodes, signals=log.signals).mean()
        if log.signals:
            return tqdm.write(f"the evaluation at step {step:,} was interrupted")
        tqdm.write(f"{step:,} steps: return {shown(score)} in an evaluation")
        write_metrics(log.writer, step, {"eval/episodic_return": score})
        if log.checkpoints is not None:
            log.checkpoints.save_if_best(step, params, score)
    if run.capture_video:
        evaluate(alg, run, params, 1, f"{log.folder}/videos/{step}", log.signals)


def train(args: Args, run: Run, signals: Sequence[int] = ()) -> tuple[State, np.ndarray, Path]:
    """Trains until a signal comes: State, mean returns of the last episodes [num_seeds], folder."""
    alg, is_functional = set_up(args, run)
    if is_functional:
        import compiled

        return compiled.train(alg, run, sys.modules[__name__], signals)
    init_key, noise_key, learn_key = jax.random.split(jax.random.PRNGKey(run.seed), 3)
    envs = make_envs(args, run, args.num_envs)
    state, env_state, log = start(alg, run, envs, init_key, signals)
    params = jax.tree.map(jnp.copy, alg.acting_params(state))
    learn = jax.jit(alg.train_step, donate_argnums=0)  # writes over the state, not over `params`
    with closing(envs), closing(log.writer), ThreadPoolExecutor(max_workers=1) as thread:
        learning: Any = thread.submit(lambda: (state, params, {}))  # there is no rollout yet
        end = log.begun
        for step in range(log.begun, args.total_timesteps, alg.steps_per_iteration):
            end = step + alg.steps_per_iteration
            noise = np.asarray(alg.draw_noise(noise_key, step, alg.rollout_shape))
            try:
                rollout, env_state = collect_rollout(alg, envs, params, env_state, noise, log)
            except Exception as error:
                error.add_note(f"in {run.env_id} at step {step} of {log.folder}")
                save(log, step, learning.result())
                raise
            state, params, metrics = learning.result()  # from the rollout before this one
            # A thread learns while DQN collects the next rollout. PPO waits for what is learned.
            learning = thread.submit(learn, state, rollout, learn_key, step)
            if not alg.acts_while_learning:
                state, params, metrics = learning.result()
            stops = end >= args.total_timesteps or len(signals) > 0
            if stops or is_due(run.log_interval, step, end):
                write_point(log, end, metrics)
                check_finite(log, end, params)
                if log.vault is not None:
                    log.vault.write(learning.result()[0].replay)
            if stops or is_due(run.checkpoint_interval, step, end):
                save(log, end, learning.result())
            if stops:
                break
            if is_due(run.eval_interval, step, end):
                evaluate_agent(alg, run, learning.result()[1], end, log)
        state, params, _ = learning.result()
        if not signals:
            evaluate_agent(alg, run, params, end, log)
    return state, np.array([np.mean(log.recent or math.nan)]), log.folder


def main() -> None:
    """The command line. Exit code 1: it has diverged; 2: a mistake; 130: Ctrl-C or SIGTERM."""
    what = __doc__.partition("\n\nIn an iteration")[0]
    parse = partial(tyro.cli, Flags, description=what, config=[tyro.conf.OmitArgPrefixes])
    signals: list[int] = []
    try:
        run, args = parse()
        if run.distributed:
            import compiled

            compiled.join_processes(run.distributed)
        if not Path(__file__).with_name("checkpoints.py").exists() and not run.resume:
            print("nothing is saved, because checkpoints.py is not beside the script")
            run = replace(run, checkpoint_interval=0)
        if run.checkpoint_interval > 0 or run.resume:
            import checkpoints

            if run.resume:  # the flags of that run are the defaults of the others
                run, args = parse(default=Flags(*checkpoints.read_flags(run.resume, Run, Args)))
            checkpoints.note_signals(signals, run)  # after JAX, which has handlers of its own
        _, returns, folder = train(args, run, signals)
    except (UsageError, gym.error.Error, ImportError, OSError, FloatingPointError) as error:
        if hasattr(error, "__notes__"):  # it was raised by the environment
            raise
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            is_ours = error.name in ("images", "vault", "compiled", "checkpoints")
            hint = f": copy {error.name}.py along" if is_ours else f": pip install {error.name}"
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    seeds = (f"{shown(x)} (seed {run.seed + i})" for i, x in enumerate(returns))
    print(f"{folder}: mean return of the last episodes", ", ".join(seeds))
    sys.exit(130 if signals else 0)


if __name__ == "__main__":
    main()
