"""Training in functional environments: many seeds, devices and hosts, as one compiled program.

A script calls `train` of this module where its environment is a FuncEnv of Gymnasium: pure
functions in JAX. Environment, replay and learning become one program, called once a log interval:

    for each agent:                                   # vmap over the seeds
        for each iteration of the log interval:       # scan: Program.run_interval
            for each of S steps:                      # scan: FunctionalEnvs.collect
                N environments make a step            # vmap: FunctionalEnvs.step
            the agent learns from the S * N steps     # train_step of the algorithm
"""

import json
import math
import os
import signal
import sys
import time
from collections import defaultdict, deque
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm


class EnvState(NamedTuple):
    """Where N environments stand between two steps."""

    observation: Array  # [N, ...], what the policy sees
    valid: Array  # [N] bool, False where the next step only resets
    inner: Any  # [N, ...], the states of the functional environment
    length: Array  # [N] int32, steps of the episode so far


class FunctionalEnvs:
    """N copies of a functional environment, with autoreset in NEXT_STEP mode.

    Observations become the dtype of the algorithm's example, and rewards float32. `time_limit` is
    the number of steps after which an episode is cut off, None if it is not.
    """

    def __init__(self, alg: Any, func_env: Any, time_limit: int | None) -> None:
        self.alg = alg
        self.time_limit = time_limit or np.iinfo(np.int32).max
        self.dtype = alg.example.observation.dtype
        self.initial = jax.vmap(func_env.initial)
        self.transition = jax.vmap(func_env.transition)
        self.observation = jax.vmap(func_env.observation)
        self.reward = jax.vmap(func_env.reward)
        self.terminal = jax.vmap(func_env.terminal)

    def observe(self, stack: Array, valid: Array, inner: Any, keys: Array) -> Array:
        """What the policy sees in states `inner`: a frame, or the last K of its episode.

        A stack [N, K, ...] has zeros from before an episode's start: where the step that led here
        was not `valid` [N], only the newest frame belongs to the episode.
        """
        frame = self.observation(inner, keys).astype(self.dtype)
        if self.alg.args.frame_stack == 1:
            return frame
        valid = jnp.expand_dims(valid, range(1, stack.ndim))
        older = jnp.where(valid, stack[:, 1:], 0)
        return jnp.concatenate([older, frame[:, None]], axis=1)

    def reset(self, key: Array, num_envs: int) -> EnvState:
        """Starts an episode in each of them."""
        keys = jax.random.split(key, num_envs)
        inner = self.initial(keys)
        stack = jnp.zeros((num_envs, *self.alg.example.observation.shape), self.dtype)
        observation = self.observe(stack, jnp.zeros(num_envs, bool), inner, keys)
        length = jnp.zeros(num_envs, jnp.int32)
        return EnvState(observation, jnp.ones(num_envs, bool), inner, length)

    def step(self, params: Any, state: EnvState, inputs: tuple) -> tuple[EnvState, Any]:
        """One step of each; `inputs` are their noise, their keys and the starts to reset to."""
        noise, keys, starts = inputs
        valid = state.valid
        action = self.alg.act(params, state.observation, noise)
        action = action.astype(self.alg.example.action.dtype)
        env_action = self.alg.to_env_action(action)
        after = self.transition(state.inner, env_action, keys)
        reward = self.reward(state.inner, env_action, after, keys)
        reward = jnp.where(valid, reward, 0)
        length = jnp.where(valid, state.length + 1, 0)
        terminated = valid & self.terminal(after, keys).astype(bool)
        truncated = (length >= self.time_limit) & ~terminated
        step = self.alg.example._replace(
            observation=state.observation,
            action=action,
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
        )
        choose = jax.vmap(jnp.where)
        inner = jax.tree.map(lambda x, start: choose(valid, x, start), after, starts)
        observation = self.observe(state.observation, valid, inner, keys)
        return EnvState(observation, ~(terminated | truncated), inner, length), step

    def collect(self, state: EnvState, params: Any, noise: Array, key: Array) -> tuple:
        """S steps of each, with noise [S, N, ...]: the EnvState and the Steps [S, N, ...]."""
        keys = jax.random.split(key, noise.shape[:2])
        # A start for every step, whether it is needed or not: one call takes a tenth of the time.
        starts = jax.vmap(self.initial)(keys)
        state, rollout = jax.lax.scan(partial(self.step, params), state, (noise, keys, starts))
        return state, rollout._replace(next_observation=state.observation)

    def evaluate(
        self, params: Any, episodes: int, key: Array, longest_episode: int, explores: bool = False
    ) -> tuple:
        """The first episode of as many environments.

        Returns their returns [episodes], and whether they ended [episodes] within so many steps.
        """
        no_noise = self.alg.no_noise
        noise = jnp.broadcast_to(no_noise, (episodes, *no_noise.shape))
        last = self.alg.args.total_timesteps
        steps = min(self.time_limit, longest_episode)
        keys = jax.random.split(key, (steps, episodes))

        def has_more(carry: tuple) -> Array:
            t, _, _, over = carry
            return (t < steps) & ~over.all()

        def step(carry: tuple) -> tuple:
            t, state, returns, over = carry
            drawn = noise
            if explores:
                (drawn,) = self.alg.draw_noise(keys[t, 0], last, (1, episodes))
            no_starts = state.inner  # none is needed, as the first episode is the only one
            state, row = self.step(params, state, (drawn, keys[t], no_starts))
            returns += jnp.where(over, 0, row.reward)
            return t + 1, state, returns, over | row.terminated | row.truncated

        state = self.reset(jax.random.fold_in(key, 0), episodes)
        returns = jnp.zeros(episodes, jnp.float32)
        start = (jnp.int32(0), state, returns, jnp.zeros(episodes, bool))
        _, _, returns, over = jax.lax.while_loop(has_more, step, start)
        return returns, over


def join_processes(how: str) -> None:
    """Makes this process one of those that train together. Only the first one prints.

    `how` is "auto", what JAX finds out by itself under SLURM, Open MPI and Kubernetes, or
    "ADDRESS,PROCESSES,ID", such as "localhost:12345,2,0".
    """
    heeded = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits, Ctrl-C ends it
    try:
        if how == "auto":
            jax.distributed.initialize()
        else:
            address, processes, own_id = how.split(",")
            print(f"process {own_id} waits at {address} for all {processes} of them", flush=True)
            jax.distributed.initialize(address, int(processes), int(own_id))
    except (RuntimeError, ValueError) as error:
        raise ConnectionError(f"distributed: {error}") from error
    signal.signal(signal.SIGINT, heeded)
    if jax.process_index() > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the end


def make_mesh(num_seeds: int, num_envs: int, num_devices: int) -> Mesh:
    """The devices ["seeds", "envs"] of a run, `num_devices` of each process.

    gcd(num_seeds, devices) agents are placed side by side; each gets the devices that are left.
    """
    devices = []
    for process in range(jax.process_count()):
        local = jax.local_devices(process)
        if len(local) < num_devices:
            raise ValueError(f"num_devices: {num_devices} are wanted, {len(local)} are there")
        devices += local[:num_devices]
    side_by_side = math.gcd(num_seeds, len(devices))
    grid = np.reshape(devices, (side_by_side, -1))
    devices_of_one = grid.shape[1]
    if num_envs % devices_of_one > 0:
        text = f"num_devices: {devices_of_one} devices for each agent do not divide its {num_envs}"
        raise ValueError(f"{text} environments")
    return Mesh(grid, ("seeds", "envs"))


class Training(NamedTuple):
    """All that changes of an agent, and that a checkpoint holds; of all agents [num_seeds, ...]."""

    agent: Any  # the State of the algorithm
    key: Array  # stays the same; the step of an iteration is folded into it
    envs: EnvState
    current: Array  # [2, N], return and length so far of the episodes that go on
    ended: Array  # [3], number, returns, lengths of those that ended in this log interval


def count_episodes(training: Training, rollout: Any) -> Training:
    """Adds the steps of a rollout [S, N] to the returns and lengths of their episodes."""

    def count(carry: tuple, step: tuple) -> tuple[tuple, None]:
        current, ended = carry
        reward, valid, done = step
        current += jnp.stack([reward, valid])
        ended += jnp.append(done.sum(), jnp.sum(current, axis=1, where=done))
        return (jnp.where(done, 0.0, current), ended), None

    done = rollout.terminated | rollout.truncated
    start = (training.current, training.ended)
    (current, ended), _ = jax.lax.scan(count, start, (rollout.reward, rollout.valid, done))
    return training._replace(current=current, ended=ended)


class Program:
    """The compiled programs that train num_seeds agents and evaluate them.

    Agents are spread over the axis "seeds" of the mesh of devices, the environments of an agent
    over "envs". All else of an agent is whole on each of its devices.
    """

    def __init__(self, alg: Any, run: Any, script: Any) -> None:
        env: Any = gym.make(run.env_id, **json.loads(run.env_kwargs))
        self.alg = alg
        self.run = run
        self.script = script
        self.envs = FunctionalEnvs(alg, env.unwrapped.func_env, env.spec.max_episode_steps)
        try:
            self.mesh = make_mesh(run.num_seeds, alg.args.num_envs, run.num_devices)
        except ValueError as error:
            raise script.UsageError(error) from error
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        alg.split_batch = self.split_batch
        evaluate_all = jax.vmap(self.evaluate_one, spmd_axis_name="seeds")
        self.evaluate_all = jax.jit(evaluate_all, out_shardings=self.everywhere)
        self.one_agent = jax.jit(
            lambda params, i: jax.tree.map(lambda x: x[i], params), out_shardings=self.everywhere
        )

    def split_batch(self, batch: Any) -> Any:
        """A batch [B, ...], split over the devices that train an agent together."""
        devices = self.mesh.shape["envs"]
        rows = len(jax.tree.leaves(batch)[0])
        if devices == 1 or rows % devices > 0:
            return batch
        rows_on = NamedSharding(self.mesh, PartitionSpec("envs"))
        return jax.lax.with_sharding_constraint(batch, rows_on)

    def start_one(self, seed: Array) -> Training:
        """The Training of an agent before the first step."""
        num_envs = self.alg.args.num_envs
        agent_key, env_key, key = jax.random.split(jax.random.PRNGKey(seed), 3)
        return Training(
            agent=self.alg.init(agent_key),
            key=key,
            envs=self.envs.reset(env_key, num_envs),
            current=jnp.zeros((2, num_envs)),
            ended=jnp.zeros(3),
        )

    def start(self) -> Training:
        """The Training of all agents before the first step, on the devices."""
        # One after the other: XLA hangs in ten QR decompositions at once.
        start_all = partial(jax.lax.map, self.start_one)
        seeds = (self.run.seed + np.arange(self.run.num_seeds)).astype(np.uint32)
        agents_on = NamedSharding(self.mesh, PartitionSpec("seeds"))
        places = jax.eval_shape(start_all, seeds)._replace(
            agent=agents_on,
            key=agents_on,
            envs=NamedSharding(self.mesh, PartitionSpec("seeds", "envs")),
            current=agents_on,
            ended=self.everywhere,  # each process reads it
        )
        return jax.jit(start_all, out_shardings=places)(seeds)

    def iterate(self, training: Training, step: Array) -> tuple[Training, dict]:
        """The iteration of an agent that begins at `step`: a rollout, and learning from it."""
        noise_key, env_key, learn_key = jax.random.split(training.key, 3)
        noise = self.alg.draw_noise(noise_key, step, self.alg.rollout_shape)
        params = self.alg.acting_params(training.agent)
        env_key = jax.random.fold_in(env_key, step)
        envs, rollout = self.envs.collect(training.envs, params, noise, env_key)
        # Whole on each device: XLA would split a replay like what is stored in it, and put it
        # together again for each draw.
        rollout = jax.lax.with_sharding_constraint(rollout, self.everywhere)
        agent, _, metrics = self.alg.train_step(training.agent, rollout, learn_key, step)
        training = training._replace(agent=agent, envs=envs)
        return count_episodes(training, rollout), metrics

    def run_interval(self, training: Training, steps: Array) -> tuple[Training, dict]:
        """The iterations of an agent in a log interval: Training, metrics of the last one."""
        training = training._replace(ended=jnp.zeros(3))
        training, metrics = jax.lax.scan(self.iterate, training, steps)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        number, returns, lengths = training.ended
        metrics["charts/episodic_return"] = returns / number  # NaN, not written, if none ended
        metrics["charts/episodic_length"] = lengths / number
        return training, metrics

    def compile(self, training: Training) -> Any:
        """A function: Training of all agents, steps -> the same after them, metrics."""
        places = jax.tree.map(lambda x: x.sharding, training)
        run_all = jax.vmap(self.run_interval, in_axes=(0, None), spmd_axis_name="seeds")
        return jax.jit(run_all, donate_argnums=0, out_shardings=(places, self.everywhere))

    def evaluate_one(self, params: Any) -> tuple[Array, Array]:
        """The returns [eval_episodes] of an agent, and whether the episodes ended."""
        # No key of training is one that 2**31 was folded into.
        key = jax.random.PRNGKey(np.uint32(self.run.seed % 2**32))
        key = jax.random.fold_in(key, 2**31)
        run = self.run
        longest = self.script.LONGEST_EPISODE
        return self.envs.evaluate(params, run.eval_episodes, key, longest, run.eval_explores)

    def evaluate(self, params: Any) -> np.ndarray:
        """The mean return of each agent [num_seeds]."""
        returns, over = self.evaluate_all(params)
        if not np.all(over):
            tqdm.write(
                f"an evaluation cuts off episodes after {self.script.LONGEST_EPISODE:,} steps"
            )
        return np.asarray(returns).mean(axis=1)


def recent_returns(intervals: deque, before: Any) -> np.ndarray:
    """Mean returns [num_seeds] of the last 100 or more episodes, in whole log intervals.

    `intervals` are `ended` of Training [num_seeds, 3], the newest first; the mean returns are
    `before` [num_seeds] where no episode ended.
    """
    total = np.zeros_like(intervals[0])
    for ended in intervals:
        total = total + ended
        if total[:, 0].min() >= 100:
            break
    return np.where(total[:, 0] > 0, total[:, 1] / np.maximum(total[:, 0], 1), before)


def open_folder(args: Any, run: Any, script: Any) -> Path:
    """The folder of the run, which the first process makes and tells the others."""
    is_first = jax.process_index() == 0
    text = b""
    if is_first or run.resume:  # so that all of them end if the flags do not allow it
        own_run = replace(run, distributed="", track=run.track and is_first)
        text = str(script.open_folder(args, own_run)).encode()
    if jax.process_count() == 1:
        return Path(text.decode())
    letters = np.frombuffer(text.ljust(1000), np.uint8)
    return Path(bytes(multihost_utils.broadcast_one_to_all(letters)).decode().strip())


def any_process(condition: bool) -> bool:
    """Whether the condition holds in any of the processes, which all call this."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.bool_(condition)).any())


def start(program: Program, script: Any, signals: Any) -> tuple[Training, list, Any]:
    """Training of a run that begins or goes on, its event files [num_seeds], the script's Log."""
    run = program.run
    args = program.alg.args
    training = program.start()
    folder = open_folder(args, run, script)
    begun = 0
    recent = [math.nan] * run.num_seeds
    saved: Any = None
    if run.checkpoint_interval > 0 or run.resume:
        import checkpoints

        saved = checkpoints.Checkpoints(folder)
    if run.resume:
        training = checkpoints.shapes_of(training)  # so that memory never holds two replays
        begun, training, recent = saved.newest(training)
    vault = script.open_vault(program.alg, run, folder, training.agent)
    writers = []
    for i in range(run.num_seeds if jax.process_index() == 0 else 0):
        path = folder / f"seed_{run.seed + i}" if i > 0 else folder
        writers.append(script.open_writer(path, asdict(run) | asdict(args), begun))
    first = writers[0] if writers else None
    quiet = None if writers else True  # None: where there is no terminal
    bar = tqdm(initial=begun, total=args.total_timesteps, unit=" steps", disable=quiet)
    scalars: dict = defaultdict(list)
    returns = deque(recent)
    now = time.time()
    log = script.Log(folder, first, bar, begun, now, saved, vault, scalars, returns, signals)
    return training, writers, log


def write_point(writers: list, log: Any, script: Any, step: int, metrics: dict) -> None:
    """A point of the charts of each agent; `metrics` have numbers [num_seeds]."""
    speed = (step - log.begun) / (time.time() - log.start_time)
    metrics = {tag: np.asarray(values) for tag, values in metrics.items()}
    for i, writer in enumerate(writers):
        row = {tag: values[i] for tag, values in metrics.items()}
        if i == 0:
            script.write_point(log, step, row)
        else:
            script.write_metrics(writer, step, row | {"charts/SPS": speed})


def evaluate_agents(
    program: Program, training: Training, step: int, writers: list, log: Any
) -> None:
    """Logs mean returns in an evaluation, keeps the best agent, records a video of the first."""
    run = program.run
    script = program.script
    params = program.alg.acting_params(training.agent)
    if run.eval_episodes > 0:
        scores = program.evaluate(params)
        tqdm.write(f"{step:,} steps: return {script.shown(scores.mean())} in an evaluation")
        for writer, score in zip(writers, scores, strict=False):  # only the first process has them
            script.write_metrics(writer, step, {"eval/episodic_return": score})
        if log.checkpoints is not None:
            best = int(np.argmax(scores))
            log.checkpoints.save_if_best(step, program.one_agent(params, best), scores[best])
    if run.capture_video:
        first = program.one_agent(params, 0)
        script.evaluate(program.alg, run, first, 1, f"{log.folder}/videos/{step}", log.signals)


def train(alg: Any, run: Any, script: Any, signals: Any) -> tuple[Any, np.ndarray, Path]:
    """As `train` of `script`, its module: States and mean returns [num_seeds, ...], folder."""
    if run.capture_video and jax.process_count() > 1:
        raise script.UsageError("capture_video: resume the run in one process for a video")
    is_alone = run.num_seeds == 1 and jax.process_count() == 1
    if getattr(alg.args, "save_experience", False) and not is_alone:
        raise script.UsageError("save_experience: only that of one agent in one process is kept")
    program = Program(alg, run, script)
    training, writers, log = start(program, script, signals)
    run_interval = program.compile(training)
    interval = math.ceil(run.log_interval / alg.steps_per_iteration) * alg.steps_per_iteration
    intervals: deque = deque(maxlen=1_000)  # `ended` of each, the newest first
    interrupted = False
    end = log.begun
    with ExitStack() as stack:
        for writer in writers:
            stack.callback(writer.close)
        for step in range(log.begun, alg.args.total_timesteps, interval):
            end = step + interval
            steps = np.arange(step, end, alg.steps_per_iteration, dtype=np.int32)
            training, metrics = run_interval(training, steps)
            intervals.appendleft(np.asarray(training.ended))
            recent = recent_returns(intervals, log.recent)
            log.recent.clear()
            log.recent.extend(recent)
            write_point(writers, log, script, end, metrics)
            params = alg.acting_params(training.agent)
            script.check_finite(log, end, params)
            if log.vault is not None:
                log.vault.write(training.agent.replay)
            interrupted = any_process(len(signals) > 0)
            if interrupted and not signals:  # the signal came to another process
                signals.append(signal.SIGTERM)
            stops = interrupted or end >= alg.args.total_timesteps
            if stops or script.is_due(run.checkpoint_interval, step, end):
                script.save(log, end, (training, program.one_agent(params, 0), metrics))
            if stops:
                break
            if script.is_due(run.eval_interval, step, end):
                evaluate_agents(program, training, end, writers, log)
        if not interrupted:
            evaluate_agents(program, training, end, writers, log)
    return training.agent, np.array(log.recent), log.folder
