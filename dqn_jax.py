"""DQN: Mnih et al. 2015, doi.org/10.1038/nature14236. CleanReplay, MIT license.

    python dqn_jax.py --env-id CartPole-v1
    python dqn_jax.py --env-id phys2d/CartPole-v1 --num-envs 10 --num-seeds 10

Read `train_loop` first: a thread learns from a rollout, S steps of N environments, while
`collect_rollout` takes the next S steps with the previous parameters. If the environment is
written in JAX, cleanreplay/compiled.py compiles both into one program, in which they take turns.

Differs from the paper: Adam instead of RMSProp, no clipping of rewards and errors, hyperparameters
for classic control. Targets bootstrap if a time limit truncates an episode.
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
    """Flags of the algorithm. Steps are environment steps, summed over all environments."""

    total_timesteps: int = 500_000  # number of training steps
    num_envs: int = 1  # number of environments, stepped together
    learning_rate: float = 2.5e-4  # learning rate of Adam
    adam_epsilon: float = 1e-8  # epsilon of Adam
    buffer_size: int = 10_000  # capacity of the replay buffer in steps
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # Polyak coefficient of the target network; 1 copies the online network
    target_network_frequency: int = 500  # steps between two updates of the target network
    batch_size: int = 128  # transitions per gradient step
    start_e: float = 1.0  # initial epsilon, the probability of a random action
    end_e: float = 0.05  # final epsilon, after exploration-fraction of the run
    exploration_fraction: float = 0.5  # fraction of total-timesteps over which epsilon is annealed
    learning_starts: int = 10_000  # steps before the first gradient step; at least batch-size
    train_frequency: int = 10  # steps between gradient steps
    gradient_steps: int = 1  # gradient steps every train-frequency steps
    hidden_sizes: tuple[int, ...] = (120, 84)  # widths of the hidden layers; not used for images
    n_step: int = 1  # n of the n-step return
    double_q: bool = False  # double DQN: the online network selects the next action
    frame_stack: int = 1  # number of latest observations that the agent sees
    clip_rewards: bool = False  # learn from the sign of rewards; charts show them unclipped
    her_fraction: float = 0.0  # fraction of a batch with goals achieved later in the episode
    offline_data: str = ""  # an .npz file, a run with --save-experience, a vault, or minari:NAME
    offline_fraction: float = 0.5  # fraction of a batch from offline-data; 1: no environment steps
    init_from: str = ""  # begin with what this run (a folder) or agent (a file) has learned
    save_experience: bool = False  # write every step in the replay to the run's folder, too


class QNetwork(nn.Module):
    """Computes Q(s, .) [B, num_actions] from observations [B, ...]."""

    num_actions: int
    features: Callable  # turns observations into vectors
    hidden_sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        x = self.features(x)
        for i, width in enumerate(self.hidden_sizes):
            x = nn.relu(nn.Dense(width, name=f"q_{i}")(x))
        return nn.Dense(self.num_actions, name="q")(x)


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


class Transition(NamedTuple):
    """Transitions of n steps, or of fewer at the end of an episode."""

    observation: Array  # [B, ...]
    action: Array  # [B]
    reward: Array  # [B], discounted sum of the rewards
    discount: Array  # [B], of the value of next_observation; 0 if the episode terminated
    next_observation: Array  # [B, ...]
    valid: Array  # [B], False if the first step is an autoreset step


class State(NamedTuple):
    """Everything that training changes, and so everything that a checkpoint must hold."""

    params: Any
    target_params: Any
    opt_state: optax.OptState
    replay: Any  # the state of the replay buffer of Steps


class DQN:
    """The algorithm, as pure functions of a `State`.

    `shard_batch` may split a batch over devices, see cleanreplay/compiled.py. `wrap_replay` may
    return a replay that samples other batches, see cleanreplay/replays.py.
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
        is_alone = args.offline_data != "" and args.offline_fraction == 1
        self.learning_starts = 0 if is_alone else args.learning_starts
        if not (is_alone or args.batch_size <= args.learning_starts < args.total_timesteps):
            raise UsageError("learning_starts must be from batch_size to total_timesteps - 1")
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UsageError(f"DQN takes Discrete actions, not {action_space}: try ppo_jax.py")
        self.args = args
        self.shard_batch = shard_batch
        self.num_actions = int(action_space.n)
        self.first_action = int(action_space.start)
        # The smallest number of steps that num_envs and train_frequency both divide.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        turns = self.steps_per_iteration // args.train_frequency
        self.updates_per_iteration = turns * args.gradient_steps
        self.rollout_shape = (self.steps_per_iteration // args.num_envs, args.num_envs)
        if is_alone:
            self.steps_per_iteration = self.updates_per_iteration = 100
            self.rollout_shape = (0, args.num_envs)
        self.example_step = example_of(observation_space, action=np.int32(0))
        seen = features_of(observation_space, args.hidden_sizes)
        self.network: Any = QNetwork(self.num_actions, *seen)
        # Faster as one flat vector. Leave `flatten` out if the optimizer depends on shapes.
        self.optimizer = optax.flatten(optax.adam(args.learning_rate, eps=args.adam_epsilon))
        window = 1 + args.n_step  # length of the sequences that the replay samples
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        replay = buffers.uniform_replay(
            rows * args.num_envs, num_envs=args.num_envs, sequence_length=window
        )
        self.replay = wrap_replay(replay)
        exploration_steps = int(args.exploration_fraction * args.total_timesteps)
        self.epsilon_at = optax.linear_schedule(args.start_e, args.end_e, max(exploration_steps, 1))
        self.act = jax.jit(self.act)  # per agent: the compiled program is freed with the agent

    def init(self, key) -> State:
        """Returns the initial state. Call it in `jit`, so that `target_params` are a copy."""
        params = self.network.init(key, self.example_step.observation[None])
        opt_state = self.optimizer.init(params)
        replay = self.replay.init(self.example_step)
        return State(params, params, opt_state, replay)

    def policy_params(self, state: State):
        """Returns the part of a state that `act` needs."""
        return state.params

    def act(self, params, observation, key=None, step=0):
        """Chooses actions [N]: epsilon-greedily with a key, greedily without one."""
        q_values = self.network.apply(params, observation)
        action = jnp.argmax(q_values, axis=-1)
        if key is None:
            return action
        key = jax.random.fold_in(key, step)
        uniform = jax.random.uniform(key, (2, *action.shape), jnp.float32)  # one draw is faster
        explores = uniform[0] < self.epsilon_at(step)
        random_action = jnp.int32(uniform[1] * self.num_actions)
        return jnp.where(explores, random_action, action)

    def to_env_action(self, action):
        """Returns the environment's actions, which need not start at 0."""
        return action + self.first_action

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

    def loss(self, params, target_params, batch: Transition):
        """Returns the mean squared TD error of the batch, and the metrics."""
        next_q = self.network.apply(target_params, batch.next_observation)
        selector = next_q
        if self.args.double_q:
            selector = self.network.apply(params, batch.next_observation)
        next_action = jnp.argmax(selector, axis=-1)
        next_value = next_q[jnp.arange(len(next_q)), next_action]
        target = jax.lax.stop_gradient(batch.reward + batch.discount * next_value)
        # One-hot instead of indexing, whose gradient is a slow scatter.
        chosen = jax.nn.one_hot(batch.action, self.num_actions, dtype=jnp.float32)
        q_values = self.network.apply(params, batch.observation)
        value = jnp.sum(q_values * chosen, axis=-1)
        loss = buffers.masked_mean((target - value) ** 2, batch.valid)
        mean_value = buffers.masked_mean(value, batch.valid)
        return loss, {"losses/td_loss": loss, "losses/q_values": mean_value}

    def gradient_step(self, state: State, key, step, next_step) -> tuple[State, dict]:
        """Learns from a sampled batch at `step`. The next gradient step is at `next_step`."""
        args = self.args
        sample = self.replay.sample(state.replay, key, args.batch_size)
        window = self.shard_batch(sample.experience)
        batch = self.to_transitions(window, jax.random.fold_in(key, 1))
        grad_fn = jax.grad(self.loss, has_aux=True)
        gradient, metrics = grad_fn(state.params, state.target_params, batch)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        is_turn = buffers.is_due(args.target_network_frequency, step, next_step)
        tau = jnp.where(is_turn, args.tau, 0.0)
        target_params = optax.incremental_update(params, state.target_params, tau)
        return State(params, target_params, opt_state, state.replay), metrics

    def train_step(self, state: State, rollout: Step, key, step):
        """Stores the rollout [S, N] that began at `step`, and takes the gradient steps.

        Returns the State, the parameters to act with, and the metrics of the last gradient step.
        """
        state = state._replace(replay=self.replay.add_batch(state.replay, rollout))
        learns = step + self.steps_per_iteration > self.learning_starts
        gradient_steps = jnp.where(learns, self.updates_per_iteration, 0)
        keys = jax.random.split(jax.random.fold_in(key, step), self.updates_per_iteration)
        turns = np.arange(self.updates_per_iteration + 1)  # each at an environment step:
        at = step + turns * self.steps_per_iteration // self.updates_per_iteration
        inputs = (keys, at[:-1], at[1:])
        state, metrics = buffers.repeat(self.gradient_step, state, inputs, gradient_steps)
        metrics["charts/epsilon"] = self.epsilon_at(step)
        metrics["charts/gradient_steps"] = gradient_steps
        metrics["charts/replay_ratio"] = gradient_steps / self.steps_per_iteration
        return state, self.policy_params(state), metrics


def collect_rollout(agent: DQN, envs, params, env_state: tuple, key, step: int):
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


def train_loop(agent: DQN, envs, log, key) -> State:
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


Agent = DQN
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
