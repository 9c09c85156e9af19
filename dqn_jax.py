"""DQN (Mnih et al. 2015) on vectorised Gymnasium environments, in one file beside buffers.py.

"Human-level control through deep reinforcement learning", Nature 518; with `--double-q` the target
of van Hasselt et al. 2016, "Deep reinforcement learning with double Q-learning", arXiv 1509.06461.

    python dqn_jax.py --env-id CartPole-v1 --num-envs 8
    tensorboard --logdir runs

Differs from the paper: Adam for RMSProp, no clipping of rewards and errors, hyperparameters for
classic control. An episode that a time limit cuts off is bootstrapped; one that ends is not.

`train` repeats two things: `collect` steps all environments with fixed parameters, `train_step`
learns from that in one compiled call, while the next rollout is being collected. Shape letters:
S steps of a rollout, N environments, B batch.
"""

import importlib
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from tensorboardX import SummaryWriter
from tqdm import tqdm

import buffers


@dataclass(frozen=True)
class Args:
    """Flags of a run."""

    # === shared: experiment flags ===
    exp_name: str = os.path.basename(__file__).removesuffix(".py")
    """the name of this experiment, part of the name of its folder under runs/"""
    seed: int = 1
    """seed of the environments, the exploration, the network and the replay"""
    env_id: str = "CartPole-v1"
    """the id of a registered Gymnasium environment; module:id imports the module first"""
    total_timesteps: int = 500_000
    """environment steps of all environments together; the last iteration is a whole one"""
    async_envs: bool = False
    """step each environment in a process of its own: pays for slow environments only"""
    log_interval: int = 1_000
    """environment steps between two points of losses/ and charts/SPS; episodes are all logged"""
    # === end shared ===
    num_envs: int = 1
    """environments stepped together; the ratio of gradient to environment steps stays the same"""
    learning_rate: float = 2.5e-4
    """step size of Adam"""
    buffer_size: int = 10_000
    """transitions that the replay buffer holds"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """how far the target network moves towards the online one when it is updated"""
    target_network_frequency: int = 500
    """environment steps between two updates of the target network"""
    batch_size: int = 128
    """transitions of one gradient step"""
    start_e: float = 1.0
    """probability of a random action at the start"""
    end_e: float = 0.05
    """probability of a random action once exploration-fraction is over"""
    exploration_fraction: float = 0.5
    """fraction of total-timesteps in which start-e goes linearly to end-e"""
    learning_starts: int = 10_000
    """environment steps before the first gradient step"""
    train_frequency: int = 10
    """environment steps, of all environments together, for one gradient step"""
    n_step: int = 1
    """rewards summed in a target before it bootstraps, fewer at the end of an episode"""
    double_q: bool = False
    """let the online network choose the action whose target value is bootstrapped from"""


# === shared: environments ===
class UsageError(ValueError):
    """A mistake in the flags, found before any training."""


def require(ok: bool, message: str) -> None:
    """Raises UsageError unless `ok`."""
    if not ok:
        raise UsageError(message)


def make_envs(env_id: str, num_envs: int, async_envs: bool) -> VectorEnv:
    """The environment's native vector version where that pays, else a sync or an async one."""
    try:
        module, _, name = env_id.rpartition(":")
        if module:
            importlib.import_module(module)
        spec = gym.spec(name)
        if spec.vector_entry_point and not async_envs and (num_envs >= 4 or not spec.entry_point):
            envs = gym.make_vec(spec, num_envs, "vector_entry_point")
            # Gymnasium 1.4 steps functional environments wrongly: those that did not reset in a
            # step are put back to where they were.
            if not hasattr(envs.unwrapped, "func_env"):
                return envs
        mode, options = ("async", {"context": "spawn"}) if async_envs else ("sync", {})
        return gym.make_vec(spec, num_envs, mode, vector_kwargs={"copy": False, **options})
    except (gym.error.Error, ImportError) as error:
        raise UsageError(f"env_id {env_id}: {error}") from error


def check_envs(env_id: str, envs: VectorEnv) -> None:
    """Raises UsageError unless `collect` and the networks can work with these environments."""
    space: Any = envs.single_observation_space
    box, name = isinstance(space, gym.spaces.Box), f"env_id {env_id}"
    require(box, f"{name}: observations must be a Box, got {space}: wrap it in FlattenObservation")
    large = not is_image(space.shape, space.dtype) or sorted(space.shape)[-2] >= 36
    require(large, f"{name}: images must be 36x36 or more, got {space}: use ResizeObservation")
    mode = envs.metadata.get("autoreset_mode")
    known = mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)
    require(known, f"{name}: metadata['autoreset_mode'] must be NEXT_STEP or SAME_STEP, got {mode}")


# === end shared ===


# === shared: network torso ===
def is_image(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether an observation is a uint8 image: [H, W], [H, W, C] or [C, H, W]."""
    return dtype == np.uint8 and len(shape) in (2, 3)


class NatureCNN(nn.Module):
    """Features [B, 512] of images [B, ...], by the convolutions of Mnih et al. 2015."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim == 3:
            x = x[..., None]
        elif x.shape[1] < x.shape[3]:  # Gymnasium stacks frames in front
            x = jnp.moveaxis(x, 1, -1)
        x = x.astype(jnp.float32) / 255.0
        for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(nn.Conv(channels, (size, size), (stride, stride), padding="VALID")(x))
        return nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))


# === end shared ===


class QNetwork(nn.Module):
    """Q(s, .) [B, num_actions] of observations [B, ...]."""

    num_actions: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if is_image(x.shape[1:], x.dtype):
            x = NatureCNN()(x)
        else:
            x = x.reshape(x.shape[0], -1).astype(jnp.float32)
            x = nn.relu(nn.Dense(120)(x))
            x = nn.relu(nn.Dense(84)(x))
        return nn.Dense(self.num_actions)(x)


# === shared: transition ===
class Transition(NamedTuple):
    """A step of an environment, [...], or of N of them S times, [S, N, ...]."""

    observation: Any
    action: Any
    reward: Any  # float32
    next_observation: Any  # at the end of an episode its true last one
    terminated: Any  # bool, the episode ended by itself
    truncated: Any  # bool, it was cut off


# === end shared ===


class Agent(NamedTuple):
    """All that training changes."""

    params: Any
    target_params: Any
    opt_state: optax.OptState
    replay: Any  # the buffer's state, of (Transition, mask or None)
    key: jax.Array  # [2] uint32
    since_target: jax.Array  # [] int32, environment steps since the target network moved


class Result(NamedTuple):
    """What `train` returns."""

    agent: Agent
    returns: list[float]  # of the last 100 episodes, oldest first
    folder: str  # where the run was logged


def linear_schedule(start: float, end: float, duration: float, step: int) -> float:
    """From `start` at step 0 to exactly `end` at step `duration` and after it."""
    return end if step >= duration else start + (end - start) * step / duration


def epsilon_greedy(
    greedy: Callable, explore: np.ndarray, random_actions: np.ndarray, t: int, observation: Any
) -> np.ndarray:
    """Actions [N] at step t: those of `random_actions` [S, N] where `explore` [S, N] says so."""
    if explore[t].all():  # a call of the network saved
        return random_actions[t]
    actions = np.array(greedy(observation))
    np.copyto(actions, random_actions[t], where=explore[t], casting="same_kind")
    return actions


class Batch(NamedTuple):
    """What a gradient step is made from."""

    transition: Transition  # [B, ...], of n steps or fewer
    discount: jax.Array  # [B] factor of the bootstrapped value, 0 if terminated
    valid: jax.Array  # [B] bool, False where there was only a reset


def select(values: jax.Array, action: jax.Array) -> jax.Array:
    """values[b, action[b]], [B]. A product and not an index: the gradient of that is a scatter."""
    return jnp.sum(values * jax.nn.one_hot(action, values.shape[-1]), axis=-1)


def td_target(batch: Batch, next_q: jax.Array, chooser: jax.Array) -> jax.Array:
    """Targets [B]: r + discount * Q(s', argmax_a chooser(s', a)), and r alone if s' is terminal.

    `next_q` [B, num_actions] comes from the target network. `chooser` [B, num_actions] is the same
    (Mnih et al. 2015, algorithm 1), or from the online network (van Hasselt et al. 2016, eq. 4).
    """
    bootstrap = select(next_q, jnp.argmax(chooser, axis=-1))
    return batch.transition.reward + batch.discount * bootstrap


def loss_fn(
    params: Any, target_params: Any, batch: Batch, q: Callable, args: Args
) -> tuple[jax.Array, jax.Array]:
    """Mean squared TD error and mean Q(s, a) of a batch [B]; `q(params, observations)`."""
    transition, _, valid = batch
    next_q = q(target_params, transition.next_observation)
    chooser = q(params, transition.next_observation) if args.double_q else next_q
    target = jax.lax.stop_gradient(td_target(batch, next_q, chooser))
    value = select(q(params, transition.observation), transition.action)
    loss = jnp.mean((target - value) ** 2, where=valid)
    return loss, value.mean(where=valid)


def make_replay(args: Args, example: Transition, once: bool) -> tuple[Any, tuple]:
    """The buffer and what it holds an item of: transitions, or steps of streams.

    From streams of N environments windows are drawn, for n_step > 1, or `once`: to store each
    observation once, as the next one of the step before. They hold the steps that only reset, too,
    and with them the mask.
    """
    factory = partial(buffers.uniform_replay, args.buffer_size)
    if args.n_step == 1 and not once:
        return factory(sequence_length=1), (example, None)
    try:
        replay = factory(num_envs=args.num_envs, sequence_length=args.n_step + once)
    except ValueError as error:
        raise UsageError(f"buffer_size or n_step: {error}") from error
    return replay, (example._replace(next_observation=None) if once else example, np.True_)


def store(agent: Agent, rollout: Transition, mask: Any, replay: Any) -> Agent:
    """Puts a rollout [S, N] into the replay buffer, as `make_replay` made it."""
    stored, is_step = agent.replay.storage
    if stored.next_observation is None:
        rollout = rollout._replace(next_observation=None)
    if is_step is not None:
        return agent._replace(replay=replay.add_batch(agent.replay, (rollout, mask)))
    items = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollout)
    return agent._replace(replay=replay.add_batch(agent.replay, (items, None), mask.reshape(-1)))


def train_step(
    agent: Agent,
    rollout: Transition,
    mask: Any,
    args: Args,
    replay: Any,
    q: Callable,
    optimizer: optax.GradientTransformation,
) -> tuple[Agent, dict[str, jax.Array]]:
    """Stores a rollout [S, N] and makes S * N / train_frequency gradient steps."""
    agent = store(agent, rollout, mask, replay)

    def update(agent: Agent, key: jax.Array) -> tuple[Agent, dict[str, jax.Array]]:
        sample = replay.sample(agent.replay, key, args.batch_size)
        window, mask = sample.experience
        batch = Batch(*buffers.n_step_transition(window, args.gamma, mask))
        (loss, value), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            agent.params, agent.target_params, batch, q, args
        )
        updates, opt_state = optimizer.update(grads, agent.opt_state)
        params = optax.apply_updates(agent.params, updates)
        since_target = agent.since_target + args.train_frequency
        tau = jnp.where(since_target >= args.target_network_frequency, args.tau, 0.0)
        agent = agent._replace(
            params=params,
            target_params=optax.incremental_update(params, agent.target_params, tau),
            opt_state=opt_state,
            since_target=since_target % args.target_network_frequency,
        )
        metrics = {"losses/td_loss": loss, "losses/q_values": value}
        return agent, metrics

    key, subkey = jax.random.split(agent.key)
    keys = jax.random.split(subkey, mask.size // args.train_frequency)
    agent, metrics = jax.lax.scan(update, agent._replace(key=key), keys)
    metrics = jax.tree.map(jnp.mean, metrics)
    return agent, metrics


# === shared: collector ===
class EnvState(NamedTuple):
    """Where N environments stand between two rollouts."""

    observation: np.ndarray  # [N, ...]
    resetting: np.ndarray  # [N] bool, the next step ignores its action and only resets
    episode_return: np.ndarray  # [N] float64, so far
    episode_length: np.ndarray  # [N] int64, so far


def reset_envs(envs: VectorEnv, seed: int) -> EnvState:
    """All environments at the start of an episode."""
    n = envs.num_envs
    return EnvState(envs.reset(seed=seed)[0], np.zeros(n, bool), np.zeros(n), np.zeros(n, int))


def example_transition(envs: VectorEnv) -> Transition:
    """Zeros of the shapes and dtypes of one step: uint8 is kept, else int32 and float32."""

    def zeros(space: Any) -> np.ndarray:
        integer = np.int32 if np.issubdtype(space.dtype, np.integer) else np.float32
        return np.zeros(space.shape, np.uint8 if space.dtype == np.uint8 else integer)

    observation, action = zeros(envs.single_observation_space), zeros(envs.single_action_space)
    return Transition(observation, action, np.float32(0), observation, np.False_, np.False_)


def collect(
    envs: VectorEnv, state: EnvState, act: Callable, num_steps: int, example: Transition
) -> tuple[EnvState, Transition, np.ndarray, list[tuple[float, int]]]:
    """Takes the actions [N] `act(t, observation)` for t = 0 ... S - 1 in N environments.

    In NEXT_STEP autoreset mode the step after the end of an episode only resets: it is no part of
    any episode, and its mask is False. The last observation of an episode is what its last step
    returned. In SAME_STEP mode no step is masked, and that observation is in `info`.

    Returns:
      The new state; transitions [S, N]; their mask [S, N]; the (return, length) of each episode
      that ended.
    """
    same_step = envs.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    lead = (num_steps, envs.num_envs)
    rollout = Transition(*(np.empty(lead + x.shape, x.dtype) for x in example))
    observation, infos = state.observation, []
    for t in range(num_steps):
        rollout.observation[t] = observation  # now: the step may write over it
        rollout.action[t] = action = act(t, observation)
        observation, reward, terminated, truncated, info = envs.step(action)
        rollout.reward[t] = reward
        rollout.terminated[t], rollout.truncated[t] = terminated, truncated
        infos.append(info)
    rollout.next_observation[:-1] = rollout.observation[1:]
    rollout.next_observation[-1] = observation
    done = rollout.terminated | rollout.truncated
    mask, resetting = np.ones_like(done), np.zeros_like(done[0])
    if same_step:
        for t, i in np.argwhere(done):
            rollout.next_observation[t, i] = infos[t]["final_obs"][i]
    else:
        mask[0], mask[1:], resetting = ~state.resetting, ~done[:-1], done[-1]

    returns, lengths = state.episode_return.copy(), state.episode_length.copy()
    episodes: list[tuple[float, int]] = []
    start = 0
    for end in (np.flatnonzero(done.any(axis=1)) + 1).tolist():
        returns += rollout.reward[start:end].sum(axis=0)
        lengths += mask[start:end].sum(axis=0)
        over, start = done[end - 1], end
        episodes += zip(returns[over].tolist(), lengths[over].tolist(), strict=True)
        returns[over] = lengths[over] = 0
    returns += rollout.reward[start:].sum(axis=0)
    lengths += mask[start:].sum(axis=0)
    return EnvState(observation, resetting, returns, lengths), rollout, mask, episodes


# === end shared ===


# === shared: run ===
class Run(NamedTuple):
    """What a run is logged with."""

    folder: str
    writer: SummaryWriter
    progress: tqdm
    returns: deque[float]  # of the last 100 episodes, oldest first
    start_time: float  # in seconds
    interrupts: list[int]  # signals that ask to stop


def start_run(args: Any) -> Run:
    """Makes a folder under runs/ with the flags in it, and a progress bar on a terminal."""
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    folder = os.path.join("runs", name.replace("/", "-").replace(":", "-"))
    while os.path.exists(folder):  # the same run, started twice within a second
        folder += "_"
    writer = SummaryWriter(folder, flush_secs=10)
    rows = "\n".join(f"|{field.name}|{getattr(args, field.name)}|" for field in fields(args))
    writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    progress = tqdm(total=args.total_timesteps, unit=" steps", disable=None, dynamic_ncols=True)
    # Ctrl-C is taken between iterations: within a write it could leave the writer's queue locked.
    interrupts: list[int] = []

    def interrupt(signum: int, _: Any) -> None:
        interrupts.append(signum)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the second stops at once

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)
    return Run(folder, writer, progress, deque(maxlen=100), time.time(), interrupts)


def log(run: Run, args: Any, step: int, steps: int, episodes: list, metrics: dict) -> None:
    """Logs what the last `steps` environment steps up to `step` gave.

    Of the episodes that ended in them the mean, at once. The metrics when log_interval is crossed:
    to read them is to wait for the device. Raises KeyboardInterrupt if asked to stop.
    """
    if episodes:
        returns, lengths = zip(*episodes, strict=True)
        run.returns.extend(returns)
        run.writer.add_scalar("charts/episodic_return", np.mean(returns), step)
        run.writer.add_scalar("charts/episodic_length", np.mean(lengths), step)
    if step // args.log_interval > (step - steps) // args.log_interval:
        for name, value in metrics.items():
            run.writer.add_scalar(name, float(value), step)
        run.writer.add_scalar("charts/SPS", int(step / (time.time() - run.start_time)), step)
        if run.returns:
            run.progress.set_postfix_str(f"return {np.mean(run.returns):.1f}", refresh=False)
    run.progress.update(steps)
    if run.interrupts:
        raise KeyboardInterrupt


def end_run(run: Run) -> None:
    """Writes what is left, and gives Ctrl-C back."""
    run.progress.close()
    run.writer.close()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(train: Callable[[Any], Any], args_type: type) -> None:
    """The command line; exit code 2 for a mistake in the flags, 130 after Ctrl-C."""
    args: Any = tyro.cli(args_type, description=__doc__)
    # A call as small as that of acting costs 12 us in this thread and 41 us in another one.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    try:
        result = train(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted: what was logged is kept", file=sys.stderr)
        sys.exit(130)
    episodes, mean = len(result.returns), np.mean(result.returns or np.nan)
    print(f"{result.folder}: mean return of the last {episodes} episodes {mean:.2f}")


# === end shared ===


def check_args(args: Args) -> None:
    """Raises UsageError for flags that are out of range or do not go together."""
    for name, value in vars(args).items():
        if isinstance(value, float):
            require(0 <= value <= 1, f"{name} must be from 0 to 1, got {value}")
        elif type(value) is int:
            least = 0 if name == "seed" else 1
            require(value >= least, f"{name} must be at least {least}, got {value}")
    batch, starts, total = args.batch_size, args.learning_starts, args.total_timesteps
    require(batch <= args.buffer_size, f"batch_size {batch} is larger than buffer_size")
    message = (
        f"learning_starts {starts} must be at least batch_size {batch}, for a batch to be drawn"
    )
    require(batch <= starts < total, f"{message}, and less than total_timesteps {total}")
    steps = math.lcm(args.num_envs, args.train_frequency)
    message = f"num_envs {args.num_envs} and train_frequency {args.train_frequency} do not divide"
    require(
        steps <= min(args.buffer_size, total),
        f"{message}: gradient steps come out whole after {steps} environment steps, more than "
        "buffer_size or total_timesteps; make one a multiple of the other",
    )


def train(args: Args) -> Result:
    """Trains one agent, logging it under runs/. Raises UsageError before it writes anything."""
    check_args(args)
    envs = make_envs(args.env_id, args.num_envs, args.async_envs)
    check_envs(args.env_id, envs)
    action_space: Any = envs.single_action_space
    require(
        isinstance(action_space, gym.spaces.Discrete) and action_space.start == 0,
        f"env_id {args.env_id}: DQN takes actions Discrete(n), got {action_space}",
    )
    num_actions = int(action_space.n)
    # Of this many steps of all environments, the gradient steps are a whole number.
    num_steps = math.lcm(args.num_envs, args.train_frequency) // args.num_envs

    network = QNetwork(num_actions)
    # Flattened to one vector: fewer and larger operations.
    optimizer = optax.flatten(optax.adam(args.learning_rate))
    key, network_key = jax.random.split(jax.random.PRNGKey(args.seed))
    example = example_transition(envs)
    # In SAME_STEP mode the next observation of a last step is not the observation of the one after.
    is_next = envs.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
    once = is_next and is_image(example.observation.shape, example.observation.dtype)
    replay, item = make_replay(args, example, once)
    if once:
        leaves = jax.tree.leaves(jax.eval_shape(replay.init, item))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / 1e9
        print(f"replay buffer: {args.buffer_size} steps, {size:.2f} GB")
    params: Any = network.init(network_key, example.observation[None])
    agent = Agent(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=optimizer.init(params),
        replay=replay.init(item),
        key=key,
        since_target=jnp.int32(0),
    )
    q: Any = network.apply
    greedy = jax.jit(lambda params, observation: q(params, observation).argmax(-1))
    step = partial(train_step, args=args, replay=replay, q=q, optimizer=optimizer)

    @partial(jax.jit, donate_argnums=0, static_argnums=-1)
    def learn(agent: Agent, rollout: Transition, mask: Any, warm_up: bool) -> tuple:
        """The new agent, a copy of its parameters that is not donated with it, and metrics."""
        if warm_up:
            agent, metrics = store(agent, rollout, mask, replay), dict[str, jax.Array]()
        else:
            agent, metrics = step(agent, rollout, mask)
        return agent, agent.params, metrics

    rng = np.random.default_rng(args.seed)
    env_state = reset_envs(envs, args.seed)
    run = start_run(args)
    behaviour = jax.tree.map(jnp.copy, params)
    duration = args.exploration_fraction * args.total_timesteps
    global_step = 0
    try:
        # While one thread learns from a rollout, this one collects the next, with the parameters
        # from before: the same ones whichever is faster, so that runs repeat.
        with ThreadPoolExecutor(max_workers=1) as learner:
            learning: Future[Any] = learner.submit(lambda: (agent, behaviour, {}))
            while global_step < args.total_timesteps:
                epsilon = linear_schedule(args.start_e, args.end_e, duration, global_step)
                draws = rng.random((2, num_steps, args.num_envs))
                random_actions = (draws[1] * num_actions).astype(np.int32)
                policy = partial(greedy, behaviour)
                act = partial(epsilon_greedy, policy, draws[0] < epsilon, random_actions)
                collected = collect(envs, env_state, act, num_steps, example)
                env_state, rollout, mask, episodes = collected
                agent, behaviour, metrics = learning.result()
                global_step += mask.size
                warm_up = global_step <= args.learning_starts
                learning = learner.submit(learn, agent, rollout, mask, warm_up)
                metrics = metrics | {"charts/epsilon": epsilon}
                log(run, args, global_step, mask.size, episodes, metrics)
            agent, _, _ = learning.result()
    finally:
        end_run(run)
        envs.close()
    return Result(agent, list(run.returns), run.folder)


if __name__ == "__main__":
    main(train, Args)
