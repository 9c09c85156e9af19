"""SAC, soft actor-critic: Haarnoja et al. 2018, arXiv 1812.05905.

    python sac_jax.py --env-id Pendulum-v1 --total-timesteps 20000
    python sac_jax.py --env-id phys2d/Pendulum-v0 --num-seeds 5

In an iteration N environments make S steps with the same parameters, which are then updated:

    for each iteration:                                                     # train
        noise = draw_noise(key, step, rollout_shape)
        for each of S steps:                                                # collect_rollout
            action = act(params, observation, noise)
            observation, reward, terminated, truncated = envs.step(action)
        state, params, metrics = train_step(state, rollout, key, step)
        when they are due: write_point, save, evaluate_agent

Environments written in JAX are compiled with the learning into one program: see compiled.py.

Equations are the paper's. Differs from it: as in CleanRL the policy makes two gradient steps after
every second one of the critics. An episode that a time limit cuts off is bootstrapped; one that
ends is not. B are the rows of a batch, A the length of an action.
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


@dataclass(frozen=True)
class Args:
    """Flags of the algorithm. Steps are environment steps, of all environments together."""

    total_timesteps: int = 100_000  # steps of training
    num_envs: int = 1  # environments stepped together
    buffer_size: int = 1_000_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 0.005  # how far the target critics move towards the critics at an update
    batch_size: int = 256  # transitions of one gradient step
    learning_starts: int = 5_000  # steps of random actions, without learning; 0: batch-size
    train_frequency: int = 1  # steps for one gradient step of the critics
    policy_lr: float = 3e-4  # step size of Adam for the policy
    q_lr: float = 1e-3  # step size of Adam for the critics and for alpha
    policy_frequency: int = 2  # gradient steps of the critics until the policy makes as many
    target_network_frequency: int = 1  # gradient steps between two updates of the target critics
    alpha: float = 0.2  # weight of the entropy, if it is not tuned
    autotune: bool = True  # tune alpha, from 1 on, until the entropy is minus an action's length
    n_step: int = 1  # rewards summed in a target before it bootstraps
    frame_stack: int = 1  # how many of an episode's last observations the networks see
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show them as they are
    save_experience: bool = False  # keep on disk all steps that were stored, in the run's folder


def features(x: Array) -> Array:
    """Observations [B, ...] as vectors [B, F]; called in a network, which gets their layers."""
    if x.dtype == jnp.uint8 and x.ndim > 2:
        import images

        if images.are_images(x):
            return images.nature_cnn(x)
    return x.reshape(len(x), -1).astype(jnp.float32)


class Critic(nn.Module):
    """Q(s, a) [B] of observations [B, ...] and actions [B, A]."""

    @nn.compact
    def __call__(self, observation: Array, action: Array) -> Array:
        x = jnp.concatenate([features(observation), action], axis=-1)
        x = nn.relu(nn.Dense(256)(x))
        x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(1)(x)[:, 0]


class Actor(nn.Module):
    """Means and log deviations [B, A] of the Gaussian whose tanh is the action."""

    num_actions: int

    @nn.compact
    def __call__(self, observation: Array) -> tuple[Array, Array]:
        x = features(observation)
        x = nn.relu(nn.Dense(256)(x))
        x = nn.relu(nn.Dense(256)(x))
        mean = nn.Dense(self.num_actions)(x)
        log_std = 3.5 * nn.tanh(nn.Dense(self.num_actions)(x)) - 1.5  # between -5 and 2
        return mean, log_std


class Step(NamedTuple):
    """A step of an environment [...], of N of them [N, ...], or those of a rollout [S, N, ...].

    In Gymnasium's NEXT_STEP mode the step after an episode's end only resets the environment. Its
    action is ignored and its reward is 0. It is not `valid`: nothing is learned from it. So the
    observation of a row is always what the row before it led to, also at the end of an episode.
    """

    observation: Any
    action: Any  # between -1 and 1
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # a time limit cut the episode off
    valid: Any
    next_observation: Any = None  # only of a rollout: the observation after its last step [N, ...]


class Transition(NamedTuple):
    """n steps of an environment, taken as one [B, ...]."""

    observation: Array
    action: Array  # [B, A]
    reward: Array  # [B], the discounted sum of n rewards, or of fewer where the episode ended
    discount: Array  # [B], of the value of next_observation; 0 where the episode terminated
    next_observation: Array
    valid: Array  # [B], False where the first of the steps only resets


class Policy(NamedTuple):
    """What an update of the policy changes."""

    params: dict  # of the actor, and log_alpha
    opt_state: optax.OptState
    losses: Array  # [2], of actor and alpha at the newest update, NaN before it; for the charts


class State(NamedTuple):
    """All that learning changes."""

    critics: Any  # the parameters of both critics, stacked: [2, ...]
    target_critics: Any
    critic_opt_state: optax.OptState
    policy: Policy
    replay: Any  # the state of the replay buffer of Steps


def masked_mean(x: Array, mask: Array) -> Array:
    """Mean [...] of x [..., B] over the rows whose mask [B] is set, 0 if there are none."""
    return jnp.sum(x, axis=-1, where=mask) / jnp.maximum(mask.sum(), 1)


class SAC:
    """The algorithm, as pure functions of a `State`."""

    acts_while_learning = True  # a rollout is collected while the one before is learned from

    def __init__(self, args: Args, observation_space: Any, action_space: Any) -> None:
        self.learning_starts = args.learning_starts or args.batch_size
        if not args.batch_size <= self.learning_starts < args.total_timesteps:
            raise UsageError(
                f"learning_starts {self.learning_starts} must be from batch_size {args.batch_size} "
                f"to total_timesteps {args.total_timesteps} - 1; --learning-starts 0 is batch_size"
            )
        is_bounded = isinstance(action_space, gym.spaces.Box) and action_space.is_bounded()
        if not is_bounded or action_space.dtype.kind != "f" or len(action_space.shape) != 1:
            raise UsageError(
                f"SAC takes actions of a Box [A] of floats with finite bounds, not {action_space}: "
                "dqn_jax.py takes Discrete ones, ppo_jax.py a Box without bounds"
            )
        self.args = args
        self.action_space = action_space
        self.num_actions = action_space.shape[0]
        # The fewest steps that are whole gradient steps and whole steps of all environments.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        self.updates_per_iteration = self.steps_per_iteration // args.train_frequency
        self.rollout_shape = (self.steps_per_iteration // args.num_envs, args.num_envs)
        action = np.zeros(self.num_actions, np.float32)
        self.no_noise = np.stack([action, np.full_like(action, np.nan)])
        dtype = np.uint8 if observation_space.dtype == np.uint8 else np.float32
        observation = np.zeros(observation_space.shape, dtype)
        no = np.False_
        self.example = Step(observation, action, np.float32(0), no, no, no)
        self.stored = self.example  # as the replay holds it: only the newest frame of a stack
        if args.frame_stack > 1:
            self.stored = self.example._replace(observation=observation[-1])
        self.actor: Any = Actor(self.num_actions)
        self.critic: Any = Critic()
        self.critic_optimizer = optax.adam(args.q_lr)
        alpha_lr = args.q_lr if args.autotune else 0.0
        adams = {"actor": optax.adam(args.policy_lr), "log_alpha": optax.adam(alpha_lr)}
        self.policy_optimizer = optax.partition(adams, {"actor": "actor", "log_alpha": "log_alpha"})
        # A draw is a window: the frames of a stack, and n steps after it.
        window = args.frame_stack + args.n_step
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        self.replay = buffers.uniform_replay(
            rows * args.num_envs, num_envs=args.num_envs, sequence_length=window
        )
        self.split_batch = lambda batch: batch  # compiled.py may split it over devices
        # Compiled for this object, so that the programs go when it goes.
        self.act = jax.jit(self.act)
        self.draw_noise = jax.jit(self.draw_noise, static_argnums=2)

    def init(self, key: Array) -> State:
        """The state before training."""
        actor_key, critic_key = jax.random.split(key)
        observation = self.example.observation[None]
        action = self.example.action[None]
        init_both = jax.vmap(self.critic.init, in_axes=(0, None, None))
        critics = init_both(jax.random.split(critic_key), observation, action)
        log_alpha = jnp.log(jnp.float32(1 if self.args.autotune else self.args.alpha))
        params = {"actor": self.actor.init(actor_key, observation), "log_alpha": log_alpha}
        no_losses = jnp.full(2, jnp.nan, jnp.float32)
        policy = Policy(params, self.policy_optimizer.init(params), no_losses)
        opt_state = self.critic_optimizer.init(critics)
        return State(critics, critics, opt_state, policy, self.replay.init(self.stored))

    def cut_episodes_off(self, state: State) -> State:
        """The state of a resumed run, whose environments start anew."""
        import checkpoints

        return state._replace(replay=checkpoints.truncate_episodes(state.replay))

    def draw_noise(self, key: Array, step: Any, shape: tuple[int, int]) -> Array:
        """Noise [S, N, 2, A] of steps from `step` on: normal, and random actions or NaN."""
        normal_key, action_key = jax.random.split(jax.random.fold_in(key, step))
        normal = jax.random.normal(normal_key, (*shape, self.num_actions))
        action = jax.random.uniform(action_key, normal.shape, minval=-1, maxval=1)
        action = jnp.where(step < self.learning_starts, action, jnp.nan)
        return jnp.stack([normal, action], axis=-2)

    def acting_params(self, state: State) -> Any:
        """The part of a state that `act` needs."""
        return state.policy.params["actor"]

    def act(self, params: Any, observation: Any, noise: Any) -> Array:
        """Actions [N, A] between -1 and 1 with noise [N, 2, A]."""
        action, _ = self.sample_actions(params, observation, noise[:, 0])
        random_action = noise[:, 1]
        return jnp.where(jnp.isnan(random_action), action, random_action)

    def to_env_action(self, action: Any) -> Any:
        """The environment's actions, between its bounds."""
        low = self.action_space.low
        high = self.action_space.high
        share = 0.5 * (action + 1)
        return (low * (1 - share) + high * share).clip(low, high)

    def sample_actions(self, params: Any, observation: Any, noise: Any) -> tuple[Array, Array]:
        """Actions tanh(u) [B, A] with noise [B, A], and their log-probabilities [B].

        Eq. 8 and appendix C, "Enforcing action bounds".
        """
        mean, log_std = self.actor.apply(params, observation)
        u = mean + jnp.exp(log_std) * noise
        log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
        # This is log(1 - tanh(u)**2), of which tanh(u) = 1 would make -inf.
        log_slope = 2 * (math.log(2) - u - nn.softplus(-2 * u))
        return nn.tanh(u), jnp.sum(log_prob - log_slope, axis=-1)

    def q_values(self, critics: Any, observation: Array, action: Array) -> Array:
        """Q(s, a) [2, B] of both critics."""
        apply = jax.vmap(self.critic.apply, in_axes=(0, None, None))
        return apply(critics, observation, action)

    def to_transitions(self, window: Step) -> Transition:
        """Makes n-step transitions [B, ...] of windows [B, W, ...], shorter at an episode's end.

        Their rewards are without the entropy of the steps between, which eq. 3 would add.
        """
        args = self.args
        observation = buffers.stack_frames(window.observation, args.frame_stack, window.valid)
        first = args.frame_stack - 1  # the steps before it only fill its stack
        after = first + args.n_step
        reward, discount, taken = buffers.n_step_return(
            window.reward[:, first:after],
            window.terminated[:, first:after],
            window.truncated[:, first:after],
            args.gamma,
        )
        return Transition(
            observation=observation[:, 0],
            action=window.action[:, first],
            reward=reward,
            discount=discount,
            next_observation=observation[jnp.arange(len(taken)), taken],
            valid=window.valid[:, first],
        )

    def critic_loss(self, critics: Any, state: State, batch: Transition, noise: Array) -> tuple:
        """Eq. 5 without its 1/2, summed over both critics, and the metrics. The noise is [B, A]."""
        observation = batch.next_observation
        action, log_prob = self.sample_actions(state.policy.params["actor"], observation, noise)
        next_q = self.q_values(state.target_critics, observation, action).min(axis=0)
        next_value = next_q - jnp.exp(state.policy.params["log_alpha"]) * log_prob  # eq. 3
        target = batch.reward + batch.discount * next_value  # eq. 2
        values = self.q_values(critics, batch.observation, batch.action)
        losses = masked_mean((values - target) ** 2, batch.valid)
        means = masked_mean(values, batch.valid)
        return losses.sum(), {
            "losses/qf1_values": means[0],
            "losses/qf2_values": means[1],
            "losses/qf1_loss": losses[0],
            "losses/qf2_loss": losses[1],
            "losses/qf_loss": losses.mean(),
        }

    def policy_loss(self, params: dict, critics: Any, batch: Transition, noise: Array) -> tuple:
        """Eq. 7 for the actor plus eq. 18 for alpha, and both apart [2]. The noise is [B, A]."""
        action, log_prob = self.sample_actions(params["actor"], batch.observation, noise)
        q = self.q_values(critics, batch.observation, action).min(axis=0)
        alpha = jnp.exp(params["log_alpha"])
        actor_loss = jax.lax.stop_gradient(alpha) * log_prob - q
        target_entropy = -self.num_actions
        alpha_loss = -alpha * jax.lax.stop_gradient(log_prob + target_entropy)
        losses = masked_mean(jnp.stack([actor_loss, alpha_loss]), batch.valid)
        return losses.sum(), losses

    def gradient_step(self, state: State, key: Array, update: Array) -> tuple[State, dict]:
        """Learns from a batch of the replay; `update` is the number of this gradient step."""
        args = self.args
        sample_key, critic_key, policy_key = jax.random.split(key, 3)
        sample = self.replay.sample(state.replay, sample_key, args.batch_size)
        batch = self.to_transitions(self.split_batch(sample.experience))
        noise = jax.random.normal(critic_key, batch.action.shape)
        gradient_of_loss = jax.grad(self.critic_loss, has_aux=True)
        gradient, metrics = gradient_of_loss(state.critics, state, batch, noise)
        changes, opt_state = self.critic_optimizer.update(gradient, state.critic_opt_state)
        critics = optax.apply_updates(state.critics, changes)

        def update_policy(policy: Policy) -> Policy:
            gradient_of_loss = jax.grad(self.policy_loss, has_aux=True)
            for key in jax.random.split(policy_key, args.policy_frequency):
                noise = jax.random.normal(key, batch.action.shape)
                gradient, losses = gradient_of_loss(policy.params, critics, batch, noise)
                changes, opt_state = self.policy_optimizer.update(gradient, policy.opt_state)
                policy = Policy(optax.apply_updates(policy.params, changes), opt_state, losses)
            return policy

        # A branch with many seeds, too, because `update` is one number for all of them.
        is_due = update % args.policy_frequency == 0
        policy = jax.lax.cond(is_due, update_policy, lambda policy: policy, state.policy)
        tau = jnp.where(update % args.target_network_frequency == 0, args.tau, 0.0)
        target_critics = optax.incremental_update(critics, state.target_critics, tau)
        metrics["losses/alpha"] = jnp.exp(policy.params["log_alpha"])
        metrics["losses/actor_loss"] = policy.losses[0]
        if args.autotune:
            metrics["losses/alpha_loss"] = policy.losses[1]
        return State(critics, target_critics, opt_state, policy, state.replay), metrics

    def train_step(self, state: State, rollout: Step, key: Array, step: Array) -> tuple:
        """Stores the rollout [S, N] that began at `step` and makes its gradient steps.

        Returns the State, the parameters to act with, and the metrics of the last gradient step,
        which are NaN where none was made.
        """
        args = self.args
        steps = rollout._replace(next_observation=None)
        if args.frame_stack > 1:
            steps = steps._replace(observation=rollout.observation[:, :, -1])
        if args.clip_rewards:
            steps = steps._replace(reward=jnp.sign(rollout.reward))
        state = state._replace(replay=self.replay.add_batch(state.replay, steps))
        keys = jax.random.split(jax.random.fold_in(key, step), self.updates_per_iteration)
        first = step // args.train_frequency
        _, shapes = jax.eval_shape(self.gradient_step, state, keys[0], first)
        no_metrics = jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan), shapes)

        def update(i: Array, carry: tuple) -> tuple:
            state, _ = carry
            return self.gradient_step(state, keys[i], first + i)

        learns = step + self.steps_per_iteration > self.learning_starts
        gradient_steps = jnp.where(learns, self.updates_per_iteration, 0)
        state, metrics = jax.lax.fori_loop(0, gradient_steps, update, (state, no_metrics))
        metrics["charts/gradient_steps"] = gradient_steps
        return state, self.acting_params(state), metrics


Algorithm = SAC
ENV_ID = "Pendulum-v1"  # of a run without --env-id


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
