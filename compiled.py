"""Training in environments written in JAX: many seeds, devices and hosts in one compiled program.

A script calls `train` of this module if its environment is a `FuncEnv` of Gymnasium, that is pure
functions in JAX. Environment, replay and learning become one program:

    for each agent:                                     # vmap over the seeds
        for each log entry:                             # fori_loop: Trainer.run_entries
            for each iteration:                         # scan: Trainer.iterate
                for each of S steps:                    # scan: JaxEnvs.collect
                    N environments take a step          # vmap: JaxEnvs.step
                the agent learns from the S * N steps   # train_step of the algorithm
"""

import json
import math
import os
import signal
import sys
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.error import Error as UsageError
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tensorboard.summary.writer import event_file_writer
from tqdm import tqdm

MAX_ENTRIES = 100  # log entries in one call of the compiled program
LONG_CALL = 0.5  # seconds; calls that take less are doubled


class JaxEnvState(NamedTuple):
    """N environments between two steps."""

    observation: Array  # [N, ...], what the policy sees
    valid: Array  # [N] bool, False where the next step only resets
    memory: tuple  # arrays [N, ...], of the agent
    inner: Any  # [N, ...], the states of the FuncEnv
    length: Array  # [N] int32, steps of the episode so far


class JaxEnvs:
    """N copies of an environment written in JAX, with autoreset in NEXT_STEP mode.

    Observations get the dtype of the algorithm's example, and rewards float32. `time_limit` is the
    number of steps after which an episode is truncated, None if it is not.
    """

    def __init__(self, alg: Any, func_env: Any, time_limit: int | None) -> None:
        self.alg = alg
        self.time_limit = time_limit or np.iinfo(np.int32).max
        self.dtype = alg.example_step.observation.dtype
        self.initial = jax.vmap(func_env.initial)
        self.transition = jax.vmap(func_env.transition)
        self.observation = jax.vmap(func_env.observation)
        self.reward = jax.vmap(func_env.reward)
        self.terminal = jax.vmap(func_env.terminal)

    def observe(self, stack: Array, valid: Array, inner: Any, keys: Array) -> Array:
        """What the policy sees in the states `inner`: a frame, or a stack of K frames.

        A stack [N, K, ...] is zero before the start of the episode. Where the last step was not
        `valid` [N], only the newest frame belongs to the episode.
        """
        frame = self.observation(inner, keys).astype(self.dtype)
        if self.alg.args.frame_stack == 1:
            return frame
        valid = jnp.expand_dims(valid, range(1, stack.ndim))
        older = jnp.where(valid, stack[:, 1:], 0)
        return jnp.concatenate([older, frame[:, None]], axis=1)

    def reset(self, key: Array, num_envs: int) -> JaxEnvState:
        """Starts an episode in each environment."""
        keys = jax.random.split(key, num_envs)
        inner = self.initial(keys)
        stack = jnp.zeros((num_envs, *self.alg.example_step.observation.shape), self.dtype)
        observation = self.observe(stack, jnp.zeros(num_envs, bool), inner, keys)
        example = self.alg.example_step.memory
        memory = tuple(jnp.zeros((num_envs, *x.shape), x.dtype) for x in example)
        length = jnp.zeros(num_envs, jnp.int32)
        return JaxEnvState(observation, jnp.ones(num_envs, bool), memory, inner, length)

    def step(
        self, params: Any, act_key: Any, state: JaxEnvState, inputs: tuple
    ) -> tuple[JaxEnvState, Any]:
        """Takes a step in each environment, with an action of `act` for this key, or without one.

        `inputs` are the number of the step, the keys [N] of the environments, and the states [N]
        that they start from if they reset.
        """
        step, keys, starts = inputs
        valid = state.valid
        action, memory = self.alg.act(params, state.observation, state.memory, act_key, step)
        action = action.astype(self.alg.example_step.action.dtype)
        env_action = self.alg.to_env_action(action)
        after = self.transition(state.inner, env_action, keys)
        reward = self.reward(state.inner, env_action, after, keys)
        reward = jnp.where(valid, reward, 0)
        length = jnp.where(valid, state.length + 1, 0)
        terminated = valid & self.terminal(after, keys).astype(bool)
        truncated = (length >= self.time_limit) & ~terminated
        row = self.alg.example_step._replace(
            observation=state.observation,
            action=action,
            reward=reward.astype(jnp.float32),
            terminated=terminated,
            truncated=truncated,
            valid=valid,
            memory=state.memory,
        )
        choose = jax.vmap(jnp.where)
        memory = tuple(choose(valid, x, jnp.zeros_like(x)) for x in memory)
        inner = jax.tree.map(lambda x, start: choose(valid, x, start), after, starts)
        observation = self.observe(state.observation, valid, inner, keys)
        return JaxEnvState(observation, ~(terminated | truncated), memory, inner, length), row

    def collect(self, state: JaxEnvState, params: Any, key: Array, step: Array) -> tuple:
        """Takes S steps in each environment, from `step` on: the next state, Steps [S, N, ...]."""
        num_steps, num_envs = self.alg.rollout_shape
        act_key, env_key = jax.random.split(key)
        keys = jax.random.split(env_key, (num_steps, num_envs))
        # A start for every step, whether it is needed or not: one call takes a tenth of the time.
        starts = jax.vmap(self.initial)(keys)
        steps = step + num_envs * jnp.arange(num_steps)
        take_step = partial(self.step, params, act_key)  # `act` folds the number of the step in
        return jax.lax.scan(take_step, state, (steps, keys, starts))

    def evaluate(
        self, params: Any, episodes: int, key: Array, max_steps: int, explores: bool = False
    ) -> tuple:
        """The first episode of as many environments.

        Returns their returns [episodes], and whether they ended [episodes] within max_steps.
        """
        max_steps = min(self.time_limit, max_steps)
        first_step = self.alg.args.total_timesteps
        keys = jax.random.split(key, (max_steps, episodes))
        act_key = jax.random.fold_in(key, 1) if explores else None

        def has_more(carry: tuple) -> Array:
            t, _, _, over = carry
            return (t < max_steps) & ~over.all()

        def step(carry: tuple) -> tuple:
            t, state, returns, over = carry
            no_starts = state.inner  # none is needed, as the first episode is the only one
            inputs = (first_step + t, keys[t], no_starts)
            state, row = self.step(params, act_key, state, inputs)
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
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it waits, Ctrl-C ends it
    try:
        if how == "auto":
            jax.distributed.initialize()
        else:
            address, processes, own_id = how.split(",")
            print(f"process {own_id} waits at {address} for all {processes} of them", flush=True)
            jax.distributed.initialize(address, int(processes), int(own_id))
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"distributed: {error}") from error
    signal.signal(signal.SIGINT, handler)
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
            raise UsageError(f"num_devices: {num_devices} are wanted, {len(local)} are there")
        devices += local[:num_devices]
    side_by_side = math.gcd(num_seeds, len(devices))
    grid = np.reshape(devices, (side_by_side, -1))
    per_agent = grid.shape[1]
    if num_envs % per_agent > 0:
        text = f"num_devices: {per_agent} devices for each agent do not divide its {num_envs}"
        raise UsageError(f"{text} environments")
    return Mesh(grid, ("seeds", "envs"))


class RunnerState(NamedTuple):
    """Everything that training changes. A checkpoint holds that of all agents [num_seeds, ...]."""

    agent: Any  # the State of the algorithm
    key: Array  # stays the same; the step of an iteration is folded into it
    envs: JaxEnvState
    unfinished: Array  # [2, N], return and length so far of each unfinished episode
    finished: Array  # [3], number, returns and lengths of the episodes of this log entry


def count_episodes(runner: RunnerState, rollout: Any) -> RunnerState:
    """Adds the steps of a rollout [S, N] to the returns and lengths of their episodes."""

    def count(carry: tuple, step: tuple) -> tuple[tuple, None]:
        unfinished, finished = carry
        reward, valid, done = step
        unfinished += jnp.stack([reward, valid])
        finished += jnp.append(done.sum(), jnp.sum(unfinished, axis=1, where=done))
        return (jnp.where(done, 0.0, unfinished), finished), None

    done = rollout.terminated | rollout.truncated
    start = (runner.unfinished, runner.finished)
    (unfinished, finished), _ = jax.lax.scan(count, start, (rollout.reward, rollout.valid, done))
    return runner._replace(unfinished=unfinished, finished=finished)


def check_flags(args: Any, run: Any, script: Any) -> None:
    """Raises UsageError for an ordinary environment, and what takes one process or one agent."""
    _, is_jax_env = script.make_algorithm(args, replace(run, capture_video=False))
    if not is_jax_env:
        how = "start a run for each seed instead, see docs/scale.md"
        flags = "num_seeds, num_devices, distributed"
        raise UsageError(f"{flags}: {run.env_id} is not written in JAX; {how}")
    if run.capture_video and jax.process_count() > 1:
        raise UsageError("capture_video: resume the run in one process for a video")
    is_alone = run.num_seeds == 1 and jax.process_count() == 1
    if getattr(args, "save_experience", False) and not is_alone:
        raise UsageError("save_experience: only that of one agent in one process is kept")


class Trainer:
    """The compiled programs that train num_seeds agents and evaluate them.

    Agents are spread over the axis "seeds" of the mesh of devices, the environments of an agent
    over "envs". Everything else is replicated.
    """

    def __init__(self, alg: Any, run: Any) -> None:
        env: Any = gym.make(run.env_id, **json.loads(run.env_kwargs))
        self.alg = alg
        self.args = alg.args
        self.steps_per_iteration = alg.steps_per_iteration
        self.run = run
        self.envs = JaxEnvs(alg, env.unwrapped.func_env, env.spec.max_episode_steps)
        self.iterations = math.ceil(run.log_interval / alg.steps_per_iteration)
        self.interval = self.iterations * alg.steps_per_iteration  # steps between two log entries
        self.limit = 1  # log entries in one call of the compiled program
        self.max_entries = MAX_ENTRIES
        if getattr(alg.args, "save_experience", False):  # the vault is written after each call
            self.max_entries = min(MAX_ENTRIES, alg.args.buffer_size // self.interval)
        self.mesh = make_mesh(run.num_seeds, alg.args.num_envs, run.num_devices)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        alg.shard_batch = self.shard_batch
        evaluate_all = jax.vmap(self.evaluate_one, spmd_axis_name="seeds")
        self.evaluate_all = jax.jit(evaluate_all, out_shardings=self.replicated)
        self.take_agent = jax.jit(
            lambda params, i: jax.tree.map(lambda x: x[i], params), out_shardings=self.replicated
        )

    def shard_batch(self, batch: Any) -> Any:
        """A batch [B, ...], split over the devices that train an agent together."""
        devices = self.mesh.shape["envs"]
        rows = len(jax.tree.leaves(batch)[0])
        if devices == 1 or rows % devices > 0:
            return batch
        rows_on = NamedSharding(self.mesh, PartitionSpec("envs"))
        return jax.lax.with_sharding_constraint(batch, rows_on)

    def init_one(self, seed: Array) -> RunnerState:
        """The RunnerState of an agent before the first step."""
        num_envs = self.args.num_envs
        agent_key, env_key, key = jax.random.split(jax.random.PRNGKey(seed), 3)
        return RunnerState(
            agent=self.alg.init(agent_key),
            key=key,
            envs=self.envs.reset(env_key, num_envs),
            unfinished=jnp.zeros((2, num_envs)),
            finished=jnp.zeros(3),
        )

    def init(self) -> RunnerState:
        """The RunnerState of all agents before the first step, on the devices."""
        # One after the other: XLA hangs in ten QR decompositions at once.
        init_all = partial(jax.lax.map, self.init_one)
        seeds = (self.run.seed + np.arange(self.run.num_seeds)).astype(np.uint32)
        per_agent = NamedSharding(self.mesh, PartitionSpec("seeds"))
        shardings = jax.eval_shape(init_all, seeds)._replace(
            agent=per_agent,
            key=per_agent,
            envs=NamedSharding(self.mesh, PartitionSpec("seeds", "envs")),
            unfinished=per_agent,
            finished=self.replicated,
        )
        return jax.jit(init_all, out_shardings=shardings)(seeds)

    def on_resume(self, runner: RunnerState) -> RunnerState:
        """The environments are saved, too, so their episodes go on."""
        return runner

    def iterate(self, runner: RunnerState, step: Array) -> tuple[RunnerState, dict]:
        """The iteration of an agent that begins at `step`: a rollout, and learning from it."""
        rollout_key, learn_key = jax.random.split(runner.key)
        params = self.alg.policy_params(runner.agent)
        rollout_key = jax.random.fold_in(rollout_key, step)
        envs, rollout = self.envs.collect(runner.envs, params, rollout_key, step)
        # Replicated, or XLA would split a replay like the rollouts that it stores, and put it
        # together again for each draw.
        inputs = (rollout, envs.observation)
        rollout, observation = jax.lax.with_sharding_constraint(inputs, self.replicated)
        agent, _, metrics = self.alg.train_step(runner.agent, rollout, observation, learn_key, step)
        return count_episodes(runner._replace(agent=agent, envs=envs), rollout), metrics

    def run_entry(self, runner: RunnerState, step: Array) -> tuple[RunnerState, dict]:
        """The iterations of an agent up to the next log entry, and the metrics of the last one."""
        steps = step + self.alg.steps_per_iteration * jnp.arange(self.iterations)
        runner = runner._replace(finished=jnp.zeros(3))
        runner, metrics = jax.lax.scan(self.iterate, runner, steps)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        number, returns, lengths = runner.finished
        metrics["charts/episodic_return"] = returns / jnp.maximum(number, 1)
        metrics["charts/episodic_length"] = lengths / jnp.maximum(number, 1)
        metrics["finished"] = runner.finished
        params = jax.tree.leaves(self.alg.policy_params(runner.agent))
        metrics["finite"] = jnp.stack([jnp.isfinite(x).all() for x in params]).all()
        return runner, metrics

    def run_entries(self, runner: RunnerState, step: Array, num_entries: Array) -> tuple:
        """Trains an agent for a number of log entries: RunnerState, metrics [MAX_ENTRIES, ...]."""
        _, shapes = jax.eval_shape(self.run_entry, runner, step)
        metrics = jax.tree.map(lambda x: jnp.zeros((MAX_ENTRIES, *x.shape), x.dtype), shapes)

        def run_entry(i: Array, carry: tuple) -> tuple:
            runner, metrics = carry
            runner, entry = self.run_entry(runner, step + i * self.interval)
            return runner, jax.tree.map(lambda all_, x: all_.at[i].set(x), metrics, entry)

        return jax.lax.fori_loop(0, num_entries, run_entry, (runner, metrics))

    def compile(self, runner: RunnerState) -> Any:
        """`run_entries` of all agents. Its first argument is overwritten."""
        shardings = jax.tree.map(lambda x: x.sharding, runner)
        run_all = jax.vmap(self.run_entries, in_axes=(0, None, None), spmd_axis_name="seeds")
        return jax.jit(run_all, donate_argnums=0, out_shardings=(shardings, self.replicated))

    def evaluate_one(self, params: Any) -> tuple[Array, Array]:
        """The returns [eval_episodes] of an agent, and whether the episodes ended."""
        # Training never folds in 2**31, so the keys of evaluations are distinct.
        key = jax.random.PRNGKey(np.uint32(self.run.seed % 2**32))
        key = jax.random.fold_in(key, 2**31)
        run = self.run
        episodes = run.eval_episodes
        return self.envs.evaluate(params, episodes, key, run.eval_max_steps, run.eval_explores)

    def evaluate(self, params: Any) -> np.ndarray:
        """The returns [num_seeds, eval_episodes] of each agent."""
        returns, over = self.evaluate_all(params)
        if not np.all(over):
            tqdm.write(f"an evaluation cuts off episodes after {self.run.eval_max_steps:,} steps")
        return np.asarray(returns)

    def num_entries(self, step: int) -> int:
        """Log entries of the next call: up to the next checkpoint, the next evaluation or the end.

        `adapt` limits them, so that the progress is shown about every second.
        """
        intervals = [self.run.checkpoint_interval, self.run.eval_interval]
        goals = [(step // interval + 1) * interval for interval in intervals if interval > 0]
        goal = min([self.args.total_timesteps, *goals])
        return min(self.limit, math.ceil((goal - step) / self.interval))

    def adapt(self, is_long: bool) -> None:
        """Doubles the log entries of a call, until it takes half a second or more."""
        if not is_long:
            self.limit = max(1, min(2 * self.limit, self.max_entries))


def recent_returns(entries: deque, before: Any) -> np.ndarray:
    """Mean returns [num_seeds] of the last 100 or more episodes, in whole log entries.

    `entries` are `finished` of RunnerState [num_seeds, 3], the newest first; the mean returns are
    `before` [num_seeds] where no episode ended.
    """
    total = np.zeros_like(entries[0])
    for finished in entries:
        total = total + finished
        if total[:, 0].min() >= 100:
            break
    return np.where(total[:, 0] > 0, total[:, 1] / np.maximum(total[:, 0], 1), before)


def any_process(condition: bool) -> bool:
    """Whether the condition holds in any of the processes, which all call this."""
    if jax.process_count() == 1:
        return condition
    return bool(multihost_utils.process_allgather(np.bool_(condition)).any())


class NoWriter:
    """Stands in for the EventFileWriter in all processes but the first."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Opens no file."""

    def add_event(self, event: Any) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Has nothing to close."""


def start(trainer: Trainer, script: Any, stop: list) -> tuple[RunnerState, list]:
    """Begins or resumes a run. Returns the RunnerState, and a Log of each agent."""
    run = replace(trainer.run, distributed="")
    now = time.time_ns() // 10**3
    quiet = None
    if jax.process_count() > 1:  # the first process names the folder
        digits = np.frombuffer(str(now).encode(), np.uint8)
        now = int(bytes(multihost_utils.broadcast_one_to_all(digits)))
    if jax.process_index() > 0:
        run = replace(run, track=False)
        event_file_writer.EventFileWriter = NoWriter
        quiet = True
    runner, log = script.start(trainer, run, trainer.init, stop, now, quiet)
    logs = [log]
    for i in range(1, run.num_seeds):
        folder = log.folder / f"seed_{run.seed + i}"
        logs.append(script.Log(folder, vars(run) | vars(trainer.args), log.saver, quiet=True))
    log.recent_returns = list(log.recent_returns) or [math.nan] * run.num_seeds
    return runner, logs


def log_entries(logs: list, step: int, interval: int, metrics: dict, seconds: float) -> None:
    """Logs the metrics [num_seeds, entries] of a call that began at `step` and took so long."""
    entries = metrics["finite"].shape[1]
    for agent, log in enumerate(logs):
        for i in range(entries):
            end = step + (i + 1) * interval
            row = {tag: values[agent, i] for tag, values in metrics.items() if "/" in tag}
            if metrics["finished"][agent, i, 0] == 0:  # no episode ended
                del row["charts/episodic_return"], row["charts/episodic_length"]
            if log is logs[0] and i == entries - 1:
                log.add_metrics(end, row)
                continue
            wall_time = time.time() - seconds * (entries - 1 - i) / entries
            row["charts/SPS"] = (end - log.begin) / (wall_time - log.start_time)
            log.add_scalars(end, row, wall_time)


def evaluate_agents(
    trainer: Trainer, runner: RunnerState, step: int, logs: list, script: Any, stop: Any
) -> None:
    """Logs the returns of an evaluation, keeps the best agent, records a video of the first."""
    run = trainer.run
    saver = logs[0].saver
    params = trainer.alg.policy_params(runner.agent)
    if run.eval_episodes > 0:
        returns = trainer.evaluate(params)
        tqdm.write(f"{step:,} steps: return {returns.mean():.2f} in an evaluation")
        for log, own in zip(logs, returns, strict=True):
            charts = {f"eval/{name}": f(own) for name, f in script.EVALUATION.items()}
            log.add_scalars(step, charts)
        if saver:
            scores = returns.mean(axis=1)
            best = int(np.argmax(scores))
            saver.save_if_best(step, trainer.take_agent(params, best), scores[best])
    if run.capture_video:
        first = trainer.take_agent(params, 0)
        script.evaluate(trainer.alg, run, first, 1, f"{logs[0].folder}/videos/{step}", stop)


def train(alg: Any, run: Any, script: Any, stop: Any) -> tuple[Any, np.ndarray, Path]:
    """Same as `train` of the script, for all agents at once: leaves [num_seeds, ...]."""
    check_flags(alg.args, run, script)
    trainer = Trainer(alg, run)
    runner, logs = start(trainer, script, stop)
    log = logs[0]
    run_entries = trainer.compile(runner)
    finished: deque = deque(maxlen=1_000)  # of each log entry, the newest first
    with ExitStack() as stack:
        for each in logs:
            stack.enter_context(closing(each.saver or each.writer))
        if log.begin >= alg.args.total_timesteps:  # a complete run is only evaluated
            evaluate_agents(trainer, runner, log.begin, logs, script, stop)
        end = log.begin
        while end < alg.args.total_timesteps:
            step = end
            entries = trainer.num_entries(step)
            end = step + entries * trainer.interval
            began = time.time()
            runner, metrics = run_entries(runner, step, entries)
            metrics = {tag: np.asarray(x)[:, :entries] for tag, x in metrics.items()}
            seconds = time.time() - began
            trainer.adapt(any_process(seconds > LONG_CALL))
            finished.extendleft(metrics["finished"].swapaxes(0, 1))
            log.recent_returns = list(recent_returns(finished, log.recent_returns))
            log_entries(logs, step, trainer.interval, metrics, seconds)
            if not metrics["finite"].all():
                raise FloatingPointError(f"{log.folder}: diverged, parameters are not finite")
            if log.saver:
                log.saver.write_experience(runner.agent)
            is_interrupted = any_process(len(stop) > 0)
            if is_interrupted and not stop:  # the signal came to another process
                stop.append(signal.SIGTERM)
            is_last = is_interrupted or end >= alg.args.total_timesteps
            if log.saver and (is_last or script.is_due(run.checkpoint_interval, step, end)):
                params = trainer.take_agent(alg.policy_params(runner.agent), 0)
                log.saver.save(end, runner, params, log.recent_returns)
            if is_interrupted:
                break
            if is_last or script.is_due(run.eval_interval, step, end):
                evaluate_agents(trainer, runner, end, logs, script, stop)
    for i, mean_return in enumerate(log.recent_returns):
        tqdm.write(f"seed {run.seed + i}: mean return of the last episodes {mean_return:.2f}")
    return runner.agent, np.array(log.recent_returns), log.folder
