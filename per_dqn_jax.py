"""DQN with prioritised replay: Schaul et al. 2016, arXiv 1511.05952. CleanReplay, MIT license.

    python per_dqn_jax.py --env-id CartPole-v1 --num-envs 8
    python per_dqn_jax.py --env-id phys2d/CartPole-v1 --num-seeds 10

A rollout is S steps of N environments. The agent learns from it while they take the next S steps:

    collect the first rollout
    for each iteration:                                                     # train
        in a thread:
            state, params, metrics = train_step(state, rollout, next_observation, key, step)
        meanwhile, for each of S steps of the next rollout:                 # collect_rollout
            action, memory = act(params, observation, memory, key, step)    # with the old params
            observation, reward, terminated, truncated, info = envs.step(action)
        when both are done: rollout = the next rollout
        when due: add_metrics, save, evaluate_agent

With an environment written in JAX, both take turns in one compiled program: see compiled.py.

The proportional variant. Differs from the paper: Adam for RMSProp, no clipping of rewards and
errors, hyperparameters for classic control. If a time limit truncates, the target bootstraps.
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
    double_q: bool = True  # double DQN: the online network selects the next action
    priority_exponent: float = 0.6  # alpha: 0 is uniform replay, 1 is proportional to priorities
    importance_exponent: float = 0.4  # beta of the importance weights at the start; it goes to 1
    priority_epsilon: float = 1e-6  # added to the absolute TD error
    frame_stack: int = 1  # number of last observations that the network sees
    clip_rewards: bool = False  # learn from the sign of rewards; the charts show the rewards
    save_experience: bool = False  # write all steps that the replay stores to the run's folder


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int
    hidden_sizes: tuple[int, ...] = (120, 84)

    @nn.compact
    def __call__(self, x):
        if x.dtype in (jnp.uint8, bool) and x.ndim > 2:
            import images

            if images.are_images(x):
                return nn.Dense(self.num_actions)(images.cnn(x))
        x = x.reshape(len(x), -1).astype(jnp.float32)
        for width in self.hidden_sizes:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(self.num_actions)(x)


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


class Transition(NamedTuple):
    """Transitions of n steps, or of fewer at the end of an episode."""

    observation: Array  # [B, ...]
    action: Array  # [B]
    reward: Array  # [B], discounted sum of the rewards
    discount: Array  # [B], of the value of next_observation; 0 if the episode terminated
    next_observation: Array  # [B, ...]
    valid: Array  # [B], False if the first step only resets


class State(NamedTuple):
    """Everything that learning changes."""

    params: Any
    target_params: Any
    opt_state: optax.OptState
    replay: Any  # the state of the replay buffer of Steps
    num_updates: Array  # gradient steps so far


class DQN:
    """The algorithm, as pure functions of a `State`."""

    collects_while_learning = True  # the next rollout, with the parameters from before

    def __init__(self, args: Args, observation_space, action_space):
        self.learning_starts = args.learning_starts or args.batch_size
        if not args.batch_size <= self.learning_starts < args.total_timesteps:
            raise UsageError("learning_starts must be from batch_size to total_timesteps - 1")
        if not isinstance(action_space, gym.spaces.Discrete):
            raise UsageError(f"DQN takes Discrete actions, not {action_space}")
        self.args = args
        self.num_actions = int(action_space.n)
        self.first_action = int(action_space.start)
        # The smallest number of steps that num_envs and train_frequency divide.
        self.steps_per_iteration = math.lcm(args.num_envs, args.train_frequency)
        self.updates_per_iteration = self.steps_per_iteration // args.train_frequency
        self.updates_per_iteration *= args.gradient_steps
        self.rollout_shape = (self.steps_per_iteration // args.num_envs, args.num_envs)
        has_image_dtype = observation_space.dtype in (np.uint8, bool)
        dtype = observation_space.dtype if has_image_dtype else np.float32
        observation = np.zeros(observation_space.shape, dtype)
        self.example_step = Step(observation, np.int32(0), np.float32(0), *[np.False_] * 3)
        self.stored_step = self.example_step  # of a frame stack the replay stores the newest frame
        if args.frame_stack > 1:
            self.stored_step = self.example_step._replace(observation=observation[-1])
        self.network: Any = QNetwork(self.num_actions, args.hidden_sizes)
        # Faster as one flat vector. Leave `flatten` out if the optimizer depends on shapes.
        self.optimizer = optax.flatten(optax.adam(args.learning_rate, eps=args.adam_epsilon))
        exploration_steps = int(args.exploration_fraction * args.total_timesteps)
        self.epsilon = optax.linear_schedule(args.start_e, args.end_e, max(exploration_steps, 1))
        self.beta = optax.linear_schedule(args.importance_exponent, 1.0, args.total_timesteps)
        # The replay draws windows of consecutive steps: a stack of frames, and n steps after it.
        window = args.frame_stack + args.n_step
        rows = max(math.ceil(args.buffer_size / args.num_envs), window)
        self.replay = buffers.prioritised_replay(
            rows * args.num_envs,
            args.priority_exponent,
            num_envs=args.num_envs,
            sequence_length=window,
        )
        self.shard_batch = lambda batch: batch  # compiled.py may split a batch over devices
        self.act = jax.jit(self.act)  # for this object, so that the program is freed with it

    def init(self, key) -> State:
        """The state before training."""
        params = self.network.init(key, self.example_step.observation[None])
        opt_state = self.optimizer.init(params)
        replay = self.replay.init(self.stored_step)
        return State(params, params, opt_state, replay, num_updates=jnp.int32(0))

    def on_resume(self, state: State) -> State:
        """The state of a resumed run, whose environments begin new episodes."""
        import checkpoints

        return state._replace(replay=checkpoints.truncate_episodes(state.replay))

    def policy_params(self, state: State):
        """The part of a state that `act` needs."""
        return state.params

    def act(self, params, observation, memory=(), key=None, step=0):
        """Actions [N]: epsilon-greedy with a key, greedy without one. And the memory: none here."""
        q_values = self.network.apply(params, observation)
        action = jnp.argmax(q_values, axis=-1)
        if key is None:
            return action, memory
        key = jax.random.fold_in(key, step)
        uniform = jax.random.uniform(key, (2, *action.shape), jnp.float32)
        explores = uniform[0] < self.epsilon(step)
        random_action = jnp.int32(uniform[1] * self.num_actions)
        return jnp.where(explores, random_action, action), memory

    def to_env_action(self, action):
        """The environment's actions, which need not start at 0."""
        return action + self.first_action

    def to_transitions(self, window: Step) -> Transition:
        """Turns windows of steps [B, W, ...] into transitions [B, ...]."""
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

    def loss(self, params, target_params, batch: Transition, weights):
        """Weighted mean squared TD error of the batch; the metrics and the TD errors [B]."""
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
        rows = jnp.maximum(batch.valid.sum(), 1)
        td_error = target - value
        loss = jnp.sum(weights * td_error**2, where=batch.valid) / rows
        mean_value = jnp.sum(value, where=batch.valid) / rows
        return loss, ({"losses/td_loss": loss, "losses/q_values": mean_value}, td_error)

    def gradient_step(self, state: State, key, step) -> tuple[State, dict]:
        """Learns from a batch of the replay, and updates the target network when it is due."""
        args = self.args
        sample = self.replay.sample(state.replay, key, args.batch_size)
        batch = self.to_transitions(self.shard_batch(sample.experience))
        grad_fn = jax.grad(self.loss, has_aux=True)
        probabilities = jnp.where(batch.valid, sample.probabilities, 0)
        weights = buffers.importance_weights(probabilities, self.beta(step))
        gradient, (metrics, td_error) = grad_fn(state.params, state.target_params, batch, weights)
        # A step that only resets is not drawn again.
        priorities = jnp.where(batch.valid, jnp.abs(td_error) + args.priority_epsilon, 0)
        replay = self.replay.set_priorities(state.replay, sample.indices, priorities)
        smallest_weight = jnp.min(weights, where=batch.valid, initial=1)
        metrics["losses/importance_weight_min"] = smallest_weight
        metrics["losses/priority_max"] = replay.max_priority
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        num_updates = state.num_updates + 1
        period = args.target_network_frequency * args.gradient_steps // args.train_frequency
        tau = jnp.where(num_updates % max(period, 1) == 0, args.tau, 0.0)
        target_params = optax.incremental_update(params, state.target_params, tau)
        return State(params, target_params, opt_state, replay, num_updates), metrics

    def train_step(self, state: State, rollout: Step, next_observation, key, step):
        """Stores the rollout [S, N] that began at `step`, and takes the gradient steps.

        Returns the State, the parameters to act with, and the metrics of the last gradient step. If
        there was none they are 0, and not logged. The next rollout begins at next_observation.
        """
        if self.args.frame_stack > 1:
            rollout = rollout._replace(observation=rollout.observation[:, :, -1])
        if self.args.clip_rewards:
            rollout = rollout._replace(reward=jnp.sign(rollout.reward))
        state = state._replace(replay=self.replay.add_batch(state.replay, rollout))
        keys = jax.random.split(jax.random.fold_in(key, step), self.updates_per_iteration)
        _, shapes = jax.eval_shape(self.gradient_step, state, keys[0], step)
        no_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        def update(i, carry):
            return self.gradient_step(carry[0], keys[i], step)

        learns = step + self.steps_per_iteration > self.learning_starts
        gradient_steps = jnp.where(learns, self.updates_per_iteration, 0)
        state, metrics = jax.lax.fori_loop(0, gradient_steps, update, (state, no_metrics))
        metrics["charts/epsilon"] = self.epsilon(step)
        metrics["charts/beta"] = self.beta(step)
        metrics["charts/gradient_steps"] = gradient_steps
        metrics["charts/replay_ratio"] = gradient_steps / self.steps_per_iteration
        return state, self.policy_params(state), metrics


Algorithm = DQN
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
