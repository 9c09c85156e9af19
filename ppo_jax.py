"""PPO, the clipped variant: Schulman et al. 2017, arXiv 1707.06347. CleanReplay, MIT license.

    python ppo_jax.py --env-id CartPole-v1 --num-envs 64
    python ppo_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

In each iteration N environments take S steps, and then the agent learns:

    for each iteration:                                                     # train
        for each of S steps:                                                # collect_rollout
            action, memory = act(params, observation, memory, key, step)
            observation, reward, terminated, truncated, info = envs.step(action)
        state, params, metrics = train_step(state, rollout, next_observation, key, step)
        when due: add_metrics, save, evaluate_agent

An environment that is written in JAX is compiled together with the learning: see compiled.py.

Advantages of Schulman et al. 2016, arXiv 1506.02438, and the details of Huang et al. 2022. Differs:
if a time limit truncates an episode, its advantages bootstrap; running statistics change between
rollouts. B: batch size. A: number of discrete actions, or dimension of a Box action.
"""

import json
import math
import re
import sys
import time
import warnings
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
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
from gymnasium.error import Error as UsageError
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from jax import Array
from tensorboard.compat.proto.event_pb2 import Event
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
    hidden_sizes: tuple[int, ...] = (64, 64)  # widths of the layers, but for images
    num_minibatches: int = 4  # gradient steps per epoch, each on an equal part of the rollout
    update_epochs: int = 4  # epochs per rollout
    learning_rate: float = 2.5e-4  # learning rate of Adam
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # clipping range of the probability ratio
    clip_vloss: bool = True  # clip the value loss, too
    ent_coef: float = 0.01  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # norm to which longer gradients are clipped
    target_kl: float | None = None  # KL divergence from the old policy that ends the epochs
    normalize_observations: Choice = "auto"  # auto: with Box actions
    normalize_rewards: Choice = "auto"  # by the deviation of the return; auto: with Box actions
    frame_stack: int = 1  # number of last observations that the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show the rewards


class ActorCritic(nn.Module):
    """Logits [B, A], or if `is_gaussian` means and log deviations [B, 2 A]; and V(s) [B]."""

    num_actions: int
    is_gaussian: bool
    hidden_sizes: tuple[int, ...] = (64, 64)

    @nn.compact
    def __call__(self, x):
        def dense(x, features, scale):
            return nn.Dense(features, kernel_init=nn.initializers.orthogonal(scale))(x)

        def mlp(x):
            for width in self.hidden_sizes:
                x = nn.tanh(dense(x, width, 2**0.5))
            return x

        actor = critic = None
        if x.dtype in (jnp.uint8, bool) and x.ndim > 2:
            import images

            if images.are_images(x):
                actor = critic = images.cnn(x, nn.initializers.orthogonal(2**0.5))
        if actor is None:
            x = x.reshape(len(x), -1).astype(jnp.float32)
            actor = mlp(x)
            critic = mlp(x)
        output = dense(actor, self.num_actions, 0.01)
        value = dense(critic, 1, 1.0)
        if self.is_gaussian:
            log_std = self.param("log_std", nn.initializers.zeros, (self.num_actions,), jnp.float32)
            output = jnp.concatenate([output, jnp.broadcast_to(log_std, output.shape)], axis=-1)
        return output, value[:, 0]


class Step(NamedTuple):
    """A step [N, ...] of N environments, or the steps [S, N, ...] of a rollout.

    An episode s0, s1, s2 that terminates, and the start t0 of the next one (Gymnasium's NEXT_STEP):

        observation   s0     s1     s2     t0     The row of s2 only resets the environment: its
        terminated    False  True   False  False  action is ignored, its reward is 0, and nothing
        valid         True   True   False  True   is learned from it.
    """

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # a time limit cut the episode off
    valid: Any
    memory: Any = ()  # of the agent, before the step; this one has none


class RunningMeanStd(NamedTuple):
    """Running statistics of an array [...]."""

    mean: Array  # [...]
    var: Array  # [...]
    num_rows: Array  # []


class State(NamedTuple):
    """Everything that learning changes."""

    params: Any
    opt_state: optax.OptState
    obs_rms: RunningMeanStd | None  # None if observations are not normalised
    return_rms: RunningMeanStd | None  # None if rewards are not normalised
    discounted_return: Array  # [N], so far, of each unfinished episode


class Batch(NamedTuple):
    """Steps [B, ...] with the log-probabilities and values of the policy that took them."""

    observation: Array  # normalised, if observations are
    action: Array
    valid: Array
    log_prob: Array
    value: Array
    advantage: Array


def masked_mean(x, mask):
    """Mean [...] of the rows of x [B, ...] whose mask [B] is set, 0 if there are none."""
    rows = jnp.maximum(mask.sum(), 1)
    mask = mask.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(mask, x, 0.0).sum(axis=0) / rows


def masked_var(x, mask):
    """Variance [...] of the same rows."""
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask)


def update_rms(stats: RunningMeanStd, x, mask) -> RunningMeanStd:
    """Adds the rows of x [B, ...] whose mask [B] is set: Chan et al. 1979."""
    rows = mask.sum()
    num_rows = stats.num_rows + rows
    weight = rows / jnp.maximum(num_rows, 1)
    delta = masked_mean(x, mask) - stats.mean
    within = (1 - weight) * stats.var + weight * masked_var(x, mask)
    between = weight * (1 - weight) * delta**2
    return RunningMeanStd(stats.mean + weight * delta, within + between, num_rows)


def normalize(x, stats: RunningMeanStd | None):
    """Observations [..., *shape] in standard deviations from the mean, clipped to 10."""
    if stats is None:
        return x
    std = jnp.sqrt(stats.var + 1e-8)
    return jnp.clip((x - stats.mean) / std, -10, 10)


def discounted_sum(x, discount, first, reverse: bool = False):
    """y[t] = x[t] + discount[t] * y[t - 1], or y[t + 1] in reverse; [S, N], `first` is [N]."""

    def step(previous, row):
        x, discount = row
        y = x + discount * previous
        return y, y

    _, sums = jax.lax.scan(step, first, (x, discount), unroll=8, reverse=reverse)
    return sums


def log_prob_and_entropy(output, action):
    """Log-probabilities and entropies [B] of actions [B] int32 or [B, A] float32."""
    if jnp.issubdtype(action.dtype, jnp.integer):
        log_probs = nn.log_softmax(output)
        # One-hot instead of indexing, whose gradient is a slow scatter.
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


def gae(rollout: Step, value, next_value, gamma: float, gae_lambda: float):
    """Advantages [S, N] from V(s) and V(s') [S, N]: Schulman et al. 2016, eq. 16."""
    bootstrap = jnp.where(rollout.terminated, 0.0, next_value)
    delta = rollout.reward + gamma * bootstrap - value
    delta = jnp.where(rollout.valid, delta, 0.0)
    done = rollout.terminated | rollout.truncated
    discount = gamma * gae_lambda * (rollout.valid & ~done)
    return discounted_sum(delta, discount, jnp.zeros_like(delta[0]), reverse=True)


class PPO:
    """The algorithm, as pure functions of a `State`."""

    collects_while_learning = False  # a rollout is collected with the newest parameters

    def __init__(self, args: Args, observation_space, action_space):
        is_vector = isinstance(action_space, Box) and len(action_space.shape) == 1
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
        has_image_dtype = observation_space.dtype in (np.uint8, bool)
        dtype = observation_space.dtype if has_image_dtype else np.float32
        observation = np.zeros(observation_space.shape, dtype)
        action = np.zeros(num_actions, np.float32) if self.is_box else np.int32(0)
        self.example_step = Step(observation, action, np.float32(0), *[np.False_] * 3)
        if args.normalize_observations == "yes" and dtype != np.float32 and observation.ndim > 1:
            raise UsageError("normalize_observations takes no images: the network scales them")
        self.network: Any = ActorCritic(num_actions, self.is_box, args.hidden_sizes)
        self.shard_batch = lambda batch: batch  # compiled.py may split a batch over devices
        self.act = jax.jit(self.act)  # for this object, so that the program is freed with it

    def optimizer(self, learning_rate):
        """Adam with clipped gradients. The learning rate may change from step to step."""
        clip = optax.clip_by_global_norm(self.args.max_grad_norm)
        # Faster as one flat vector. Leave `flatten` out if the optimizer depends on shapes.
        return optax.flatten(optax.chain(clip, optax.adam(learning_rate, eps=1e-5)))

    def init(self, key) -> State:
        """The state before training."""
        args = self.args
        observation = self.example_step.observation

        def init_rms(choice, auto: bool, shape):
            if choice == "no" or (choice == "auto" and not auto):
                return None
            zeros = jnp.zeros(shape, jnp.float32)
            return RunningMeanStd(mean=zeros, var=zeros + 1, num_rows=jnp.float32(0))

        is_float = observation.dtype == np.float32
        obs_rms = init_rms(args.normalize_observations, self.is_box and is_float, observation.shape)
        return_rms = init_rms(args.normalize_rewards, self.is_box, ())
        params = self.network.init(key, observation[None])
        opt_state = self.optimizer(args.learning_rate).init(params)
        discounted_return = jnp.zeros(args.num_envs, jnp.float32)
        return State(params, opt_state, obs_rms, return_rms, discounted_return)

    def on_resume(self, state: State) -> State:
        """The state of a resumed run, whose environments begin new episodes."""
        return state._replace(discounted_return=jnp.zeros_like(state.discounted_return))

    def policy_params(self, state: State):
        """The part of a state that `act` needs."""
        return state.params, state.obs_rms

    def act(self, params, observation, memory=(), key=None, step=0):
        """Actions [N] or [N, A]: drawn from the policy with a key, its mode without one.

        And the memory, which this agent has none of.
        """
        network_params, obs_rms = params
        output, _ = self.network.apply(network_params, normalize(observation, obs_rms))
        if key is not None:
            # 0 * output: the draw waits for the output, or XLA starts a thread, which takes longer.
            key = jax.random.fold_in(key, step + jnp.int32(0 * output[0, 0]))
        if not self.is_box:
            is_greedy = key is None
            action = jnp.argmax(output, -1) if is_greedy else jax.random.categorical(key, output)
            return action, memory
        action, log_std = jnp.split(output, 2, axis=-1)
        if key is not None:
            noise = jax.random.normal(key, action.shape, action.dtype)
            action = action + jnp.exp(log_std) * noise
        return action, memory

    def to_env_action(self, action):
        """The environment's actions: -1 to 1 covers a bounded Box. The loss uses `action`."""
        if not self.is_box:
            return action + int(self.action_space.start)
        box = self.action_space
        if box.is_bounded():
            fraction = 0.5 * (action + 1)
            action = box.low * (1 - fraction) + box.high * fraction
        return action.clip(box.low, box.high)

    def normalize_rewards(self, state: State, rollout: Step) -> tuple[State, Step]:
        """Divides rewards by the standard deviation of the discounted return so far."""
        if state.return_rms is None:
            return state, rollout
        not_done = rollout.valid & ~(rollout.terminated | rollout.truncated)
        previous_not_done = jnp.concatenate([jnp.ones_like(not_done[:1]), not_done[:-1]])
        discount = self.args.gamma * previous_not_done
        returns = discounted_sum(rollout.reward, discount, state.discounted_return)
        stats = update_rms(state.return_rms, returns.ravel(), rollout.valid.ravel())
        reward = jnp.clip(rollout.reward / jnp.sqrt(stats.var + 1e-8), -10, 10)
        state = state._replace(return_rms=stats, discounted_return=not_done[-1] * returns[-1])
        return state, rollout._replace(reward=reward)

    def loss(self, params, batch: Batch):
        """Schulman et al. 2017, eq. 9, to be minimised, and the metrics."""
        args = self.args
        output, value = self.network.apply(params, batch.observation)
        log_prob, entropy = log_prob_and_entropy(output, batch.action)
        advantage = batch.advantage
        if args.norm_adv:
            std = masked_var(advantage, batch.valid) ** 0.5
            advantage = (advantage - masked_mean(advantage, batch.valid)) / (std + 1e-8)
        log_ratio = log_prob - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage)
        target = batch.advantage + batch.value
        value_loss = 0.5 * (value - target) ** 2
        if args.clip_vloss:
            change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
            value_loss = jnp.maximum(value_loss, 0.5 * (batch.value + change - target) ** 2)
        approx_kl = ratio - 1 - log_ratio
        is_clipped = jnp.abs(ratio - 1) > args.clip_coef
        # Averaged together, because many small reductions cost as much as the gradient.
        rows = [policy_loss, value_loss, entropy, -log_ratio, approx_kl, is_clipped]
        means = masked_mean(jnp.stack(rows, axis=-1), batch.valid)
        policy_loss, value_loss, entropy, old_approx_kl, approx_kl, clipfrac = means
        loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
        return loss, {
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/old_approx_kl": old_approx_kl,
            "losses/approx_kl": approx_kl,
            "losses/clipfrac": clipfrac,
        }

    def optimize(self, state: State, batch: Batch, key, learning_rate) -> tuple[State, dict]:
        """The epochs of gradient steps on minibatches: State, metrics of the last epoch."""
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
            # A scan cannot be left: epochs after the policy went too far are thrown away.
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

    def train_step(self, state: State, rollout: Step, next_observation, key, step):
        """Learns from the rollout [S, N] that began at `step`: State, `act`'s params, metrics."""
        args = self.args
        if args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state, rollout = self.normalize_rewards(state, rollout)
        # s' is the s of the next row, also at the end of an episode.
        observations = jnp.concatenate([rollout.observation, next_observation[None]])
        observations = observations.reshape(-1, *observations.shape[2:])
        normalized = normalize(observations, state.obs_rms)
        output, values = self.network.apply(state.params, normalized)
        values = values.reshape(-1, args.num_envs)
        advantage = gae(rollout, values[:-1], values[1:], args.gamma, args.gae_lambda)
        rows = self.steps_per_iteration
        action = rollout.action.reshape(rows, *rollout.action.shape[2:])
        log_prob, _ = log_prob_and_entropy(output[:rows], action)
        valid, value, advantage = jax.tree.map(jnp.ravel, (rollout.valid, values[:-1], advantage))
        batch = Batch(normalized[:rows], action, valid, log_prob, value, advantage)
        learning_rate = jnp.float32(args.learning_rate)
        if args.anneal_lr:
            learning_rate *= jnp.maximum(1 - step / args.total_timesteps, 0)
        state, metrics = self.optimize(state, batch, jax.random.fold_in(key, step), learning_rate)
        if state.obs_rms is not None:  # only now: the actions were chosen with the old ones
            stats = update_rms(state.obs_rms, observations[:rows], valid)
            state = state._replace(obs_rms=stats)
        residual = masked_var(advantage, valid)
        total = masked_var(advantage + value, valid)
        metrics["losses/explained_variance"] = jnp.where(total > 0, 1 - residual / total, 0.0)
        metrics["charts/learning_rate"] = learning_rate
        return state, self.policy_params(state), metrics


Algorithm = PPO
ENV_ID = "CartPole-v1"  # of a run without --env-id


# === common to all scripts ===

EVALUATION: dict = {"episodic_return": np.mean, "median": np.median, "min": np.min, "max": np.max}


@dataclass(frozen=True)
class Run:
    """Flags of the experiment. Several agents, devices or processes need an environment in JAX."""

    exp_name: str = Path(__file__).stem  # part of the folder's name
    env_id: str = ENV_ID  # Gymnasium environment; MODULE:ID, as ale_py:ALE/Pong-v5, imports MODULE
    env_kwargs: str = "{}"  # arguments of the environment as JSON, such as {"continuous": true}
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the environment's own, or sync
    seed: int = 1  # random seed
    num_seeds: int = 1  # agents trained in parallel, with this seed and those after it
    num_devices: int = 1  # devices per process that agents, or environments of one, are spread over
    distributed: str = ""  # train with other processes: auto, or ADDRESS,PROCESSES,ID
    log_interval: int = 1_000  # steps between two log entries
    eval_interval: int = 100_000  # steps between two evaluations; there is one at the end
    eval_episodes: int = 10  # episodes per evaluation; 0: no evaluation
    eval_max_steps: int = 30_000  # steps after which an evaluation cuts its episodes off
    eval_explores: bool = False  # explore in evaluations, as at the end of training
    capture_video: bool = False  # record one more episode at each evaluation
    checkpoint_interval: int = 100_000  # steps between two checkpoints, one at the end; 0: none
    resume: str = ""  # folder of a run to resume; its flags are the defaults
    track: bool = False  # log to Weights & Biases, too; WANDB_PROJECT, WANDB_ENTITY say where


class Log:
    """What a run logs to TensorBoard, shows and keeps."""

    def __init__(self, folder: Path, flags: dict, saver=None, quiet: bool | None = None):
        self.folder = folder
        self.saver = saver  # what checkpoints.py keeps of the run, or None without it
        self.begin = saver.begin if saver else 0  # the step of the start or the resume
        self.start_time = time.time()
        self.scalars: dict = defaultdict(list)  # numbers whose means are logged next
        self.recent_returns = deque(saver.recent_returns if saver else (), maxlen=100)
        total = flags["total_timesteps"]
        self.bar: Any = tqdm(initial=self.begin, total=total, unit=" steps", disable=quiet)
        self.writer = event_file_writer.EventFileWriter(str(folder), flush_secs=1)  # W&B patches it
        if saver:
            saver.write_header(self.writer, flags)

    def add_scalars(self, step: int, scalars: dict, wall_time: float = 0):
        """Adds a point to each chart, but no NaN, and to no loss if there was no gradient step."""
        learned = scalars.get("charts/gradient_steps", 1) > 0
        event = Event(wall_time=wall_time or time.time(), step=step)
        for tag, x in scalars.items():
            if not math.isnan(x) and (learned or not tag.startswith("losses/")):
                event.summary.value.add(tag=tag, simple_value=x)
        self.writer.add_event(event)  # one event for all charts is fastest

    def add_metrics(self, step: int, metrics: dict):
        """Logs metrics, the means of `scalars` and the speed, and shows the progress."""
        self.recent_returns.extend(self.scalars["charts/episodic_return"])
        means = {tag: np.mean(values) for tag, values in self.scalars.items() if values}
        self.scalars.clear()
        speed = (step - self.begin) / (time.time() - self.start_time)
        self.add_scalars(step, metrics | means | {"charts/SPS": speed})
        progress = f"return {np.mean(self.recent_returns or np.nan):.2f}"
        if self.bar.disable and is_due(self.bar.total // 20, self.bar.n, step):
            print(f"{step:,} steps, {speed:,.0f} a second, {progress}", flush=True)
        self.bar.n = step
        self.bar.set_postfix_str(progress)


def make_envs(args: Args, run: Run, num_envs: int, video_folder: str = "", training: bool = False):
    """N environments that are stepped together. Add wrappers of a single one to the list."""
    wrappers: list = []  # such as gym.wrappers.TimeAwareObservation
    kwargs = json.loads(run.env_kwargs)
    if video_folder:
        kwargs["render_mode"] = "rgb_array"
        wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=video_folder))
    mode: Any = run.vectorization if training else "sync"  # processes take seconds to start
    if run.vectorization == "auto":  # None: the environment's own vector version, or sync
        mode = "sync" if wrappers else None
    how = {"context": "forkserver"} if mode == "async" else None  # a fork of JAX can hang
    make = partial(gym.make_vec, run.env_id, num_envs, wrappers=wrappers, **kwargs)
    envs: Any = make(vectorization_mode=mode, vector_kwargs=how)
    # Gymnasium's own vector versions are slow for few environments; those in JAX lose transitions.
    is_toy = type(envs.unwrapped).__module__.startswith("gymnasium.envs.") and num_envs < 4
    if mode is None and (is_toy or hasattr(envs.unwrapped, "func_env")):
        envs = make(vectorization_mode="sync")
    if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        raise UsageError(f"{run.env_id}: its autoreset_mode must be NEXT_STEP")
    if args.frame_stack > 1 or not isinstance(envs.single_observation_space, Box):
        import images

        envs = images.wrap(envs, args.frame_stack)
    return envs


def make_algorithm(args: Args, run: Run) -> tuple[Algorithm, bool]:
    """The algorithm, and whether compiled.py trains it: if the environment is written in JAX."""
    warnings.filterwarnings("ignore", ".*AutoresetMode")  # which `make_envs` checks
    if Path(__file__).with_name("usage.py").exists():
        import usage

        usage.check(args, run)
    with closing(make_envs(args, run, 1)) as envs:
        alg = Algorithm(args, envs.single_observation_space, envs.single_action_space)
    if run.capture_video:
        import images

        images.check_video(partial(make_envs, args, run, 1), envs.single_observation_space)
    env = envs.unwrapped.envs[0] if isinstance(envs.unwrapped, SyncVectorEnv) else envs.unwrapped
    while isinstance(env, PassiveEnvChecker | OrderEnforcing | TimeLimit):  # compiled.py needs none
        env = env.env
    is_jax_env = hasattr(env, "func_env") and isinstance(env.observation_space, Box)
    return alg, is_jax_env and run.vectorization == "auto"


def no_memory(alg: Algorithm, num_envs: int) -> tuple:
    """Arrays [N, ...] of zeros, the memory at the start of an episode; () of an agent without."""
    return tuple([np.zeros((num_envs, *x.shape), x.dtype) for x in alg.example_step.memory])


def keep_memory(memory: tuple, valid) -> tuple:
    """The memory after a step, zeros where the step only reset, that is, was not valid [N]."""
    return tuple([(np.asarray(x).T * valid).T for x in memory])


def collect_rollout(alg: Algorithm, envs, params, env_state: tuple, key, step: int):
    """Takes S steps in N environments: Steps [S, N, ...], the next `env_state`, the charts."""
    observation, memory, valid, unfinished = env_state  # unfinished [2, N]: return and length
    shape = alg.rollout_shape
    rollout = jax.tree.map(lambda x: np.empty(shape + x.shape, x.dtype), alg.example_step)
    charts: dict = defaultdict(list)  # numbers whose means are logged
    for t in range(shape[0]):
        rollout.observation[t] = observation
        for rows, x in zip(rollout.memory, memory, strict=True):
            rows[t] = x
        now = step + t * shape[1]
        action, memory = alg.act(params, rollout.observation[t], memory, key, now)
        memory = keep_memory(memory, valid)
        rollout.action[t] = action
        env_action = alg.to_env_action(rollout.action[t])
        observation, reward, terminated, truncated, info = envs.step(env_action)
        rollout.reward[t] = reward
        rollout.terminated[t] = terminated
        rollout.truncated[t] = truncated
        rollout.valid[t] = valid
        valid = ~(rollout.terminated[t] | rollout.truncated[t])
    rollout.reward[~rollout.valid] = 0  # whatever the environments return for a reset
    sums = np.cumsum([rollout.reward, rollout.valid], axis=1, dtype=float) + unfinished[:, None]
    for t, env in np.argwhere(rollout.terminated | rollout.truncated):
        charts["charts/episodic_return"].append(sums[0, t, env])
        charts["charts/episodic_length"].append(sums[1, t, env])
        sums[:, t:, env] -= sums[:, t, env, None]  # the next episode begins at 0
    observation = np.array(observation, rollout.observation.dtype)
    return rollout, (observation, memory, valid, sums[:, -1]), charts


def evaluate(alg: Algorithm, run: Run, params, episodes: int, video_folder: str = "", stop=()):
    """The returns [episodes] of one episode in each of as many environments."""
    returns = np.zeros(episodes)
    over = np.zeros(episodes, bool)
    dtype = alg.example_step.observation.dtype
    key = jax.random.fold_in(jax.random.PRNGKey(run.seed), 2**31)  # no training has such a step
    act_key = key if run.eval_explores else None
    with closing(make_envs(alg.args, run, episodes, video_folder)) as envs:
        observation, _ = envs.reset(seed=int(key[0]) // 4)
        memory = no_memory(alg, episodes)
        for step in range(alg.args.total_timesteps, alg.args.total_timesteps + run.eval_max_steps):
            observation = np.asarray(observation, dtype)
            action, memory = alg.act(params, observation, memory, act_key, step)
            action = alg.to_env_action(np.asarray(action))
            observation, reward, terminated, truncated, _ = envs.step(action)
            returns += np.where(over, 0, reward)
            over |= terminated | truncated
            if over.all() or stop:
                break
    return returns


def load_policy(folder: Path | str):
    """The best agent of a run, as a function from observations [N, ...] to actions [N, ...]."""
    import checkpoints

    return checkpoints.load_policy(folder, sys.modules[__name__])


def start(alg: Algorithm, run: Run, init, stop: list, now: int = 0, quiet: bool | None = None):
    """Begins a run with the State of `init()`, or resumes one. Returns its State and its Log."""
    name = f"{run.env_id}__{run.exp_name}__{run.seed}__{now or time.time_ns() // 10**3}"
    folder = Path(run.resume or "runs/" + re.sub("[/:]", "-", name)).absolute()
    saver = None
    if Path(__file__).with_name("checkpoints.py").exists():
        import checkpoints

        saver, state = checkpoints.open_run(alg, run, folder, init, stop)
    else:
        tqdm.write("nothing is saved, because checkpoints.py is not beside the script")
        state = init()
    tqdm.write(f"{folder}: {alg.args.num_envs} x {run.env_id}, {jax.devices()[0].device_kind}")
    return state, Log(folder, vars(run) | vars(alg.args), saver, quiet)


def evaluate_agent(alg: Algorithm, run: Run, params, step: int, log: Log, stop):
    """Logs the returns of an evaluation, keeps the best agent, and records a video."""
    if run.eval_episodes > 0:
        returns = evaluate(alg, run, params, run.eval_episodes, stop=stop)
        if stop:
            return  # it was interrupted
        tqdm.write(f"{step:,} steps: return {returns.mean():.2f} in an evaluation")
        log.add_scalars(step, {f"eval/{name}": f(returns) for name, f in EVALUATION.items()})
        if log.saver:
            log.saver.save_if_best(step, params, returns.mean())
    if run.capture_video:
        evaluate(alg, run, params, 1, f"{log.folder}/videos/{step}", stop)


def is_due(interval: int, step: int, end: int) -> bool:
    """Whether a multiple of the interval is in (step, end]; never for an interval of 0."""
    return interval > 0 and end // interval > step // interval


def train(args: Args, run: Run, stop: list | None = None):
    """Trains to the end, or until `stop` has an item: the State, mean returns, the folder."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # `act` takes a third of the time
    alg, is_jax_env = make_algorithm(args, run)
    stop = [] if stop is None else stop
    if is_jax_env or run.num_seeds > 1 or run.num_devices > 1 or run.distributed:
        import compiled

        return compiled.train(alg, run, sys.modules[__name__], stop)
    total = args.total_timesteps
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(run.seed), 3)
    state, log = start(alg, run, partial(jax.jit(alg.init), init_key), stop)
    params = jax.tree.map(jnp.copy, alg.policy_params(state))  # not overwritten with the state
    train_step = jax.jit(alg.train_step, donate_argnums=0)  # the new state overwrites the old one
    envs = make_envs(args, run, args.num_envs, training=True)
    observation, _ = envs.reset(seed=int(jax.random.fold_in(init_key, log.begin)[0]) // 4)
    memory = no_memory(alg, args.num_envs)
    env_state = (observation, memory, np.ones(args.num_envs, bool), np.zeros((2, args.num_envs)))
    learning = ahead = None  # the update in the thread, and the rollout collected meanwhile

    def collect(step: int):
        try:
            return collect_rollout(alg, envs, params, env_state, act_key, step)
        except Exception as error:
            if log.saver:
                log.saver.on_error(error, envs, step, learning, log.recent_returns)
            raise

    with closing(envs), closing(log.saver or log.writer), ThreadPoolExecutor(1) as learner:
        if log.begin >= total:  # a complete run is only evaluated
            evaluate_agent(alg, run, params, log.begin, log, stop)
        for step in range(log.begin, total, alg.steps_per_iteration):
            end = step + alg.steps_per_iteration
            rollout, env_state, charts = ahead or collect(step)
            learning = learner.submit(train_step, state, rollout, env_state[0], learn_key, step)
            ahead = collect(end) if alg.collects_while_learning and end < total else None
            if log.saver:
                log.saver.check_rollout(rollout, step)
            state, params, metrics = learning.result()
            # Insert your own code here: `state` is complete, and no thread is running.
            is_last = end >= total or len(stop) > 0
            for tag, numbers in charts.items():
                log.scalars[tag] += numbers
            if is_last or is_due(run.log_interval, step, end):
                log.add_metrics(end, metrics)
                if not all(np.isfinite(x).all() for x in jax.tree.leaves(params)):
                    raise FloatingPointError(f"{log.folder}: diverged, parameters are not finite")
                if log.saver:
                    log.saver.write_experience(state)
            if log.saver and (is_last or is_due(run.checkpoint_interval, step, end)):
                log.saver.save(end, state, params, log.recent_returns)
            if is_last and stop:  # a later signal ends the next iteration, which is saved
                break
            if is_last or is_due(run.eval_interval, step, end):
                evaluate_agent(alg, run, params, end, log, stop)
    return state, np.array([np.mean(log.recent_returns or np.nan)]), log.folder


def main():
    """The command line. Exit codes: 1 for an error, 2 for a usage error, 130 for Ctrl-C."""
    Flags = NamedTuple("Flags", [("experiment", Run), ("algorithm", Args)])  # noqa: UP014
    what = "\n\n".join(__doc__.split("\n\n")[:2])  # the paper, and two commands
    parse = partial(tyro.cli, Flags, description=what, config=[tyro.conf.OmitArgPrefixes])
    stop: list[int] = []
    try:
        run, args = parse()
        if Path(__file__).with_name("usage.py").exists():
            import usage

            run, args = usage.prepare(Flags(run, args), parse)
        _, returns, folder = train(args, run, stop)
    except (UsageError, ImportError, OSError, FloatingPointError) as error:
        if hasattr(error, "from_environment"):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    print(f"{folder}: mean return of the last episodes {np.mean(returns):.2f}")
    sys.exit(130 if stop else 0)


if __name__ == "__main__":
    main()
