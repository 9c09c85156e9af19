"""DQN: Mnih et al. 2015, doi.org/10.1038/nature14236. CleanReplay, MIT license.

    python dqn_jax.py --env-id CartPole-v1 --num-envs 8
    python dqn_jax.py --env-id phys2d/CartPole-v1 --num-envs 10 --num-seeds 10

Read `train_loop` first: the agent learns from a rollout, S steps of N environments, in a thread.
Meanwhile `collect_rollout` takes the next S steps, with the parameters from before. If the
environment is written in JAX, cleanreplay/compiled.py makes one program of both: they take turns.

Differs from the paper: Adam for RMSProp, no clipping of rewards and errors, hyperparameters for
classic control. If a time limit truncates an episode, the target bootstraps.
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

if getattr(find_spec("cleanreplay"), "origin", None):  # None of a folder that is no package
    import cleanreplay  # saves, resumes, evaluates, sees images, compiles the loop
    from cleanreplay import UsageError
else:  # this file and buffers.py alone train and log
    cleanreplay: Any = None  # type: ignore[no-redef]

    class UsageError(Exception):  # type: ignore[no-redef]
        """A mistake of the user, which the command line prints as one line."""


@dataclass(frozen=True)
class Args:
    """Flags of the algorithm. Steps are environment steps, of all environments together."""

    total_timesteps: int = 500_000  # steps of training
    num_envs: int = 1  # environments stepped together
    learning_rate: float = 2.5e-4  # learning rate of Adam
    adam_epsilon: float = 1e-8  # epsilon of Adam
    buffer_size: int = 10_000  # steps that the replay buffer holds
    gamma: float = 0.99  # discount factor
    tau: float = 1.0  # Polyak coefficient of the target network; 1 copies the online network
    target_network_frequency: int = 500  # steps between two updates of the target network
    batch_size: int = 128  # transitions per gradient step
    start_e: float = 1.0  # epsilon, the probability of a random action, at the start
    end_e: float = 0.05  # epsilon from the end of exploration-fraction on
    exploration_fraction: float = 0.5  # fraction of total-timesteps over which epsilon is annealed
    learning_starts: int = 10_000  # steps before the first gradient step; 0: batch-size
    train_frequency: int = 10  # steps between gradient steps
    gradient_steps: int = 1  # gradient steps every train-frequency steps
    hidden_sizes: tuple[int, ...] = (120, 84)  # widths of the layers, but for images
    n_step: int = 1  # n of the n-step return
    double_q: bool = False  # double DQN: the online network selects the next action
    frame_stack: int = 1  # number of last observations that the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show the rewards
    her_fraction: float = 0.0  # part of a batch that gets goals achieved later in the episode
    offline_data: str = ""  # a run with --save-experience, a vault, or minari:NAME, to draw from
    offline_fraction: float = 0.5  # part of a batch that is drawn from offline-data
    init_from: str = ""  # a run, or the file of an agent: begins with what it had learned
    save_experience: bool = False  # write all steps that the replay stores to the run's folder


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int
    hidden_sizes: tuple[int, ...] = (120, 84)
    layout: tuple = ()  # of observations that are images and numbers, packed into bytes

    @nn.compact
    def __call__(self, x):
        if self.layout:
            x = cleanreplay.images.features(x, self.layout)
        if cleanreplay and cleanreplay.images.are_images(x):
            return nn.Dense(self.num_actions)(cleanreplay.images.cnn(x))
        x = x.reshape(len(x), -1).astype(jnp.float32)
        for width in self.hidden_sizes:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_actions)(x)


class Step(NamedTuple):
    """A step [N, ...] of N environments, or the steps [S, N, ...] of a rollout.

    An episode s0, s1, s2 that terminates, and the start t0 of the next one (Gymnasium's NEXT_STEP):

        observation   s0     s1     s2     t0     The step at s2 only resets the environment: its
        terminated    False  True   False  False  action is ignored, its reward is 0, and nothing
        valid         True   True   False  True   is learned from it.
    """

    observation: Any
    action: Any
    reward: Any
    terminated: Any  # the episode ended by itself
    truncated: Any  # a time limit cut the episode off
    valid: Any  # False if the step only resets


class Transition(NamedTuple):
    """Transitions of n steps, or of fewer at the end of an episode."""

    observation: Array  # [B, ...]
    action: Array  # [B]
    reward: Array  # [B], discounted sum of the rewards
    discount: Array  # [B], of the value of next_observation; 0 if the episode terminated
    next_observation: Array  # [B, ...]
    valid: Array  # [B], False if the first step only resets


class State(NamedTuple):
    """All that training changes, and so all that a checkpoint must hold."""

    params: Any
    target_params: Any
    opt_state: optax.OptState
    replay: Any  # the state of the replay buffer of Steps
    offline: Any = ()  # the state of a buffer with --offline-data


def draw_windows(replay, state: State, key, batch_size: int):
    """Draws windows of the replay. --her-fraction and --offline-data have others drawn, too."""
    return replay.sample(state.replay, key, batch_size)


class DQN:
    """The algorithm, as pure functions of a `State`.

    `shard_batch` may split a batch over devices, see cleanreplay/compiled.py. `draw` may draw
    other windows than those of the replay, see cleanreplay/draws.py.
    """

    def __init__(
        self,
        args: Args,
        observation_space,
        action_space,
        shard_batch=lambda batch: batch,
        draw=draw_windows,
    ):
        self.learning_starts = args.learning_starts or args.batch_size
        if not args.batch_size <= self.learning_starts < args.total_timesteps:
            raise UsageError("learning_starts must be from batch_size to total_timesteps - 1")
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UsageError(f"DQN takes Discrete actions, not {action_space}: try ppo_jax.py")
        self.args = args
        self.shard_batch = shard_batch
        self.draw = draw
        self.num_actions = int(action_space.n)
        self.first_action = int(action_space.start)
        # The smallest number of steps that is a whole number of steps of all environments, and of
        # gradient steps: num_envs and train_frequency divide it.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        self.updates_per_iteration = self.steps_per_iteration // args.train_frequency
        self.updates_per_iteration *= args.gradient_steps
        self.rollout_shape = (self.steps_per_iteration // args.num_envs, args.num_envs)
        has_image_dtype = observation_space.dtype in (np.uint8, bool)
        dtype = observation_space.dtype if has_image_dtype else np.float32
        observation = np.zeros(observation_space.shape, dtype)
        flags = dict(terminated=np.False_, truncated=np.False_, valid=np.False_)
        self.example_step = Step(observation, np.int32(0), np.float32(0), **flags)
        self.stored_step = self.example_step  # of a frame stack the replay stores the newest frame
        if args.frame_stack > 1:
            self.stored_step = self.example_step._replace(observation=observation[-1])
        layout = getattr(observation_space, "layout", ())
        self.network: Any = QNetwork(self.num_actions, args.hidden_sizes, layout)
        # Faster as one flat vector. Leave `flatten` out if the optimizer depends on shapes.
        self.optimizer = optax.flatten(optax.adam(args.learning_rate, eps=args.adam_epsilon))
        # The replay draws windows of consecutive steps: a stack of frames, and n steps after it.
        window = args.frame_stack + args.n_step
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        self.replay = buffers.uniform_replay(
            rows * args.num_envs, num_envs=args.num_envs, sequence_length=window
        )
        exploration_steps = int(args.exploration_fraction * args.total_timesteps)
        self.epsilon_at = optax.linear_schedule(args.start_e, args.end_e, max(exploration_steps, 1))
        period = args.target_network_frequency * args.gradient_steps // args.train_frequency
        self.target_period = min(max(period, 1), 2**31 - 1)  # in gradient steps
        self.act = jax.jit(self.act)  # for this object, so that the program is freed with it

    def init(self, key) -> State:
        """The state before training. Jitted, because `params` stand in it twice."""
        params = self.network.init(key, self.example_step.observation[None])
        opt_state = self.optimizer.init(params)
        replay = self.replay.init(self.stored_step)
        return State(params, params, opt_state, replay)

    def on_resume(self, state: State) -> State:
        """The state of a resumed run, whose environments begin new episodes."""
        return state._replace(replay=cleanreplay.checkpoints.truncate_episodes(state.replay))

    def learned(self, state: State) -> State:
        """The part of a state that another run may begin with, see --init-from."""
        return state._replace(replay=(), offline=())

    def policy_params(self, state: State):
        """The part of a state that `act` needs."""
        return state.params

    def experience(self, state: State):
        """The part of a state that --save-experience writes to disk."""
        return state.replay

    def act(self, params, observation, key=None, step=0):
        """Chooses actions [N]: epsilon-greedily if there is a key, otherwise greedily."""
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
        """The environment's actions, which need not start at 0."""
        return action + self.first_action

    def policy(self, params, key=None):
        """A function from NumPy observations [N, ...] to the environment's actions [N]."""

        def policy(observation, step=0):
            return self.to_env_action(np.asarray(self.act(params, observation, key, step)))

        return policy

    def to_transitions(self, window: Step, key) -> Transition:
        """Turns windows of steps [B, W, ...] into transitions. The key is for draws of your own."""
        first = self.args.frame_stack - 1  # the steps before it only fill its stack
        steps = jax.tree.map(lambda x: x[:, first : first + self.args.n_step], window)
        reward, discount, num_steps = buffers.n_step_return(
            steps.reward, steps.terminated, steps.truncated, self.args.gamma
        )
        stack = buffers.stack_frames(window.observation, self.args.frame_stack, window.valid)
        next_stack = stack[jnp.arange(len(num_steps)), num_steps]
        action = steps.action[:, 0]
        valid = steps.valid[:, 0]
        return Transition(stack[:, 0], action, reward, discount, next_stack, valid)

    def loss(self, params, target_params, batch: Transition):
        """Mean squared TD error of the batch, and the metrics."""
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

    def gradient_step(self, state: State, key, update) -> tuple[State, dict]:
        """Learns from a batch of the replay; `update` is the number of this gradient step."""
        args = self.args
        sample = self.draw(self.replay, state, key, args.batch_size)
        window = self.shard_batch(sample.experience)
        batch = self.to_transitions(window, jax.random.fold_in(key, 1))
        grad_fn = jax.grad(self.loss, has_aux=True)
        gradient, metrics = grad_fn(state.params, state.target_params, batch)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        tau = jnp.where(update % self.target_period == 0, args.tau, 0.0)
        target_params = optax.incremental_update(params, state.target_params, tau)
        return State(params, target_params, opt_state, state.replay, state.offline), metrics

    def train_step(self, state: State, rollout: Step, key, step):
        """Stores the rollout [S, N] that began at `step`, and takes the gradient steps.

        Returns the State, the parameters to act with, and the metrics of the last gradient step.
        """
        if self.args.frame_stack > 1:
            rollout = rollout._replace(observation=rollout.observation[:, :, -1])
        if self.args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state = state._replace(replay=self.replay.add_batch(state.replay, rollout))
        learns = step + self.steps_per_iteration > self.learning_starts
        gradient_steps = jnp.where(learns, self.updates_per_iteration, 0)
        keys = jax.random.split(jax.random.fold_in(key, step), self.updates_per_iteration)
        first = step // self.args.train_frequency * self.args.gradient_steps + 1
        inputs = (keys, first + jnp.arange(self.updates_per_iteration))
        state, metrics = buffers.repeat(self.gradient_step, state, inputs, gradient_steps)
        metrics["charts/epsilon"] = self.epsilon_at(step)
        metrics["charts/gradient_steps"] = gradient_steps
        metrics["charts/replay_ratio"] = gradient_steps / self.steps_per_iteration
        return state, self.policy_params(state), metrics


def collect_rollout(agent: DQN, envs, params, env_state: tuple, key, step: int):
    """Takes S steps in N environments: Steps [S, N, ...], and the next `env_state`."""
    observation, valid = env_state
    num_steps, num_envs = agent.rollout_shape
    example = agent.example_step
    rollout = Step(*[np.empty((num_steps, num_envs, *x.shape), x.dtype) for x in example])
    for t in range(num_steps):
        observation = np.array(observation, example.observation.dtype)  # `envs` may overwrite it
        action = np.asarray(agent.act(params, observation, key, step + t * num_envs))
        env_action = agent.to_env_action(action)
        next_observation, reward, terminated, truncated, info = envs.step(env_action)
        now = Step(observation, action, reward, terminated, truncated, valid)
        for rows, x in zip(rollout, now, strict=True):
            rows[t] = x
        observation = next_observation
        valid = ~(rollout.terminated[t] | rollout.truncated[t])
    rollout.reward[~rollout.valid] = 0  # whatever the environments return for a reset
    return rollout, (observation, valid)


def train_loop(agent: DQN, envs, log, key) -> State:
    """Learns from each rollout in a thread while the next one is collected. Returns the State."""
    init_key, act_key, learn_key = jax.random.split(key, 3)
    state = log.begin(envs, partial(jax.jit(agent.init), init_key))  # or the one that is resumed
    params = jax.tree.map(jnp.copy, agent.policy_params(state))  # `state` will be overwritten
    train_step = jax.jit(agent.train_step, donate_argnums=0)  # the new state overwrites the old one
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
ENV_ID = "CartPole-v1"  # of a run without --env-id


# === the same in all scripts ===


@dataclass(frozen=True)
class Run:
    """Flags of the experiment. Several agents, devices or processes need an environment in JAX."""

    exp_name: str = Path(__file__).stem  # part of the folder's name
    env_id: str = ENV_ID  # Gymnasium environment; MODULE:ID, as ale_py:ALE/Pong-v5, imports MODULE
    env_kwargs: str = "{}"  # arguments of the environment as JSON, such as {"continuous": true}
    vectorization: Literal["auto", "sync", "async"] = "auto"  # auto: the environment's own, or sync
    seed: int = 1  # random seed
    num_seeds: int = 1  # agents trained in parallel, with this seed and those after it
    sweep: tuple[str, ...] = ()  # values of float flags, as gamma=0.9,0.99; an agent for each
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


def need(what: str) -> Any:
    """The package cleanreplay, for something that cannot do without it."""
    if cleanreplay is None:
        raise UsageError(f"{what}: this needs the package cleanreplay, which is not installed")
    return cleanreplay


def make_envs(args: Args, run: Run, num_envs: int, video_folder: str = "", training: bool = False):
    """Makes N environments that are stepped together."""
    wrappers: list = []  # of a single environment, such as gym.wrappers.TimeAwareObservation
    kwargs = json.loads(run.env_kwargs)
    if video_folder:
        kwargs["render_mode"] = "rgb_array"
        wrappers.append(partial(gym.wrappers.RecordVideo, video_folder=video_folder))
    mode: Any = run.vectorization if training else "sync"  # processes take seconds to start
    if run.vectorization == "auto":  # None: the environment's own vector version, or sync
        mode = "sync" if wrappers else None
    how = {"context": "forkserver"} if mode == "async" else None  # a fork of JAX can hang
    make = partial(gym.make_vec, run.env_id, num_envs, wrappers=wrappers, **kwargs)
    warnings.filterwarnings("ignore", ".*AutoresetMode")  # the mode is checked below
    module, _, name = run.env_id.rpartition(":")
    if module:
        importlib.import_module(module)  # registers its environments
    is_toy = str(gym.spec(name).vector_entry_point).startswith("gymnasium.envs.")
    if mode is None and is_toy and num_envs < 4:  # those of Gymnasium are slow for a few
        mode = "sync"
    envs: Any = make(vectorization_mode=mode, vector_kwargs=how)
    if mode is None and hasattr(envs.unwrapped, "func_env"):
        envs.close()  # it steps those written in JAX wrongly: where one resets, others stand still
        envs = make(vectorization_mode="sync")
    if envs.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
        raise UsageError(f"env_id {run.env_id}: its autoreset_mode must be NEXT_STEP")
    space = envs.single_observation_space
    is_vector = isinstance(space, Box) and (space.dtype.kind == "f" or len(space.shape) < 2)
    if args.frame_stack > 1 or not is_vector:
        envs = need("images, frame_stack or no Box").images.wrap(envs, args.frame_stack)
    return cleanreplay.success.Successes(envs) if cleanreplay and training else envs


def reset(envs, key, step: int):
    """Starts an episode in each environment: observations, and the valid [N] of the next step."""
    seed = int(jax.random.fold_in(key, step)[0]) // 4  # below 2**30: environment i adds i to it
    observation, _ = envs.reset(seed=seed)
    return observation, np.ones(envs.num_envs, bool)


class Log(AbstractContextManager):
    """The charts of a run in TensorBoard, and its progress.

    `cleanreplay.experiment.Experiment` has the same methods, and also saves, resumes and evaluates.
    """

    def __init__(self, agent: Agent, run: Run, folder: Path, stop: list):
        self.run, self.args = run, agent.args
        self.folder = folder
        self.stop = stop  # has an item if the run is to end
        self.first_step = 0
        self.total = agent.args.total_timesteps
        self.steps_per_iteration = agent.steps_per_iteration
        self.unfinished = np.zeros((2, agent.args.num_envs))  # return and length of each episode
        self.ended: list = []  # returns and lengths of the episodes that are to be logged
        self.recent_returns: deque = deque(maxlen=100)
        self.writer: Any = None

    def open(self, first_step: int, recent_returns=(), quiet: bool | None = None, writer=None):
        """Begins the charts and the bar of progress. A run that is resumed has a `first_step`."""
        if not quiet:
            where = f"{self.unfinished.shape[1]} x {self.run.env_id}"
            tqdm.write(f"{self.folder}: {where}, {jax.devices()[0].device_kind}")
        self.first_step = first_step
        self.recent_returns.extend(recent_returns)
        self.start_time = time.time()
        self.bar: Any = tqdm(initial=first_step, total=self.total, unit=" steps", disable=quiet)
        # The class is looked up only now, because W&B has replaced it in its module.
        self.writer = writer or event_file_writer.EventFileWriter(str(self.folder), flush_secs=1)

    def begin(self, envs, init) -> State:
        """Begins the run in these environments. Returns the State of `init()`."""
        names = ["resume", "num_seeds", "num_devices", "distributed", "capture_video", "track"]
        names += ["save_experience", "her_fraction", "offline_data", "init_from", "sweep"]
        for flags in (self.run, self.args):
            for flag in names:
                if getattr(flags, flag, None) != getattr(type(flags), flag, None):
                    need(flag)
        tqdm.write("nothing is saved or evaluated: the package cleanreplay is not installed")
        self.open(first_step=0)
        return init()

    def saves_on_error(self, step: int, learned=None):
        """In `with`: if the environments fail, nothing is saved here."""
        return nullcontext()

    def count_episodes(self, step: int, rollout: Step):
        """Keeps the returns and lengths of the episodes that end in a rollout from `step` on."""
        done = rollout.terminated | rollout.truncated
        rewards_and_steps = np.stack([rollout.reward, rollout.valid], axis=1)  # [S, 2, N]
        for row, over in zip(rewards_and_steps, done, strict=True):
            self.unfinished += row
            if over.any():
                self.ended.extend(self.unfinished[:, over].T)
                self.unfinished[:, over] = 0

    def end_iteration(self, end: int, state: State, params, metrics: dict) -> bool:
        """Logs what is due at step `end`. Returns whether the run is over."""
        is_last = end >= self.total or len(self.stop) > 0
        if is_last or buffers.is_due(self.run.log_interval, end - self.steps_per_iteration, end):
            self.add_metrics(end, metrics)
        return is_last

    def add_metrics(self, step: int, metrics: dict):
        """Logs metrics, the means of the episodes that ended and the speed; shows the progress."""
        speed = (step - self.first_step) / (time.time() - self.start_time)
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
        """Adds a point to each chart whose number is finite."""
        event = Event(wall_time=wall_time or time.time(), step=step)
        for tag, x in metrics.items():
            if math.isfinite(x):
                event.summary.value.add(tag=tag, simple_value=x)
        self.writer.add_event(event)  # one event for all charts is fastest

    def at_evaluation(self, step: int, params, returns):
        """Insert your own code here: compiled runs call it, too, for each agent. `params` act."""

    def mean_return(self) -> float:
        """The mean return of the last 100 episodes, NaN before the first."""
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
    first = cleanreplay.usage.check(args, run, make_more) if cleanreplay else make_more(1)
    with closing(first):  # all that is to know of the environments is read from it
        spaces = (first.single_observation_space, first.single_action_space)
        more = cleanreplay.draws.options(args, first, make_more) if cleanreplay else {}
        make_agent = partial(Agent, args, *spaces, **more)
        jax_env = cleanreplay and cleanreplay.compiled.find_jax_env(first, run)
        env_spaces: Any = cleanreplay and cleanreplay.spaces.of_envs(first)
    if jax_env:
        script = (make_agent, make_more, Log, __file__)
        return cleanreplay.compiled.train(*script, jax_env, env_spaces, run, folder, stop)
    agent = make_agent()
    log = Log(agent, run, folder, stop)
    experiment: Any = log
    if cleanreplay:
        experiment = cleanreplay.experiment.Experiment(log, agent, make_more, __file__, env_spaces)
    with experiment, closing(make_more(args.num_envs, training=True)) as envs:
        state = train_loop(agent, envs, experiment, jax.random.PRNGKey(run.seed))
    return state, np.array([log.mean_return()]), folder


def main():
    """The command line. Exit codes: 1 for an error, 2 for a usage error, 130 for Ctrl-C."""
    Flags = NamedTuple("Flags", [("experiment", Run), ("algorithm", Args)])  # noqa: UP014
    what = "\n\n".join((__doc__ or "").split("\n\n")[:2])  # the paper, and two commands
    parse = partial(tyro.cli, Flags, description=what, config=[tyro.conf.OmitArgPrefixes])
    stop: list[int] = []
    try:
        run, args = cleanreplay.usage.parse(parse) if cleanreplay else parse()
        _, returns, folder = train(args, run, stop)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1 if isinstance(error, FloatingPointError) else 2)
    print(f"{folder}: mean return of the last episodes {np.mean(returns):.2f}")
    sys.exit(130 if stop else 0)


if __name__ == "__main__":
    main()
