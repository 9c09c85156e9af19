"""Trains in environments written in JAX: many seeds, devices and hosts in one compiled program.

A script calls `train` of this module if `find_jax_env` finds a `FuncEnv` of Gymnasium, which is a
set of pure functions in JAX. Environment, replay and learning become one program:

    for each agent:                                     # vmap over seeds, and values of --sweep
        for each log entry:                             # fori_loop: Trainer.run_entries
            for each iteration:                         # scan: Trainer.iterate
                for each of S steps:                    # scan: JaxEnvs.collect
                    N environments take a step          # vmap: JaxEnvs.step
                the agent learns from the S * N steps   # train_step of the algorithm
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, closing
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import buffers
from cleanreplay import disk, distributed, replays
from cleanreplay.devices import SplitNetwork, make_mesh, num_parts, split
from cleanreplay.errors import NotFiniteError, UsageError
from cleanreplay.experiment import check_metrics, log_returns, play_episodes
from cleanreplay.jax_envs import JaxEnvs, JaxEnvState, find_jax_env
from cleanreplay.protocol import Log, saves_experience, takes
from cleanreplay.run_folder import RunFolder, are_finite
from cleanreplay.sweep import Sweep, replace_args

MAX_ENTRIES = 100  # log entries in one call of the compiled program
LONG_CALL = 0.5  # seconds; after a shorter call the next one covers twice as many log entries


class RunnerState(NamedTuple):
    """The state of training of an agent. In a checkpoint it is that of all: [num_agents, ...]."""

    agent: Any  # the State of the algorithm
    key: Array  # constant; the step of an iteration is folded into it
    envs: JaxEnvState
    unfinished: Array  # [2, N], return and length so far of each unfinished episode
    finished: Array  # [3], number, returns and lengths of the episodes of this log entry
    values: Any = ()  # constant values of the flags in --sweep, by their names


class Entry(NamedTuple):
    """A log entry of an agent."""

    metrics: dict  # of the last iteration, and means of the episodes
    finished: Array  # [3], number, returns and lengths of the episodes
    finite: Array  # [3] bool, whether all rewards, observations and parameters are finite


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


def check_flags(args: Any, run: Any, num_agents: int) -> None:
    """Raises UsageError for flags that need a single process or agent."""
    if run.capture_video and jax.process_count() > 1:
        raise UsageError("capture_video: resume the run in one process for a video")
    is_alone = num_agents == 1 and jax.process_count() == 1
    if getattr(args, "save_experience", False) and not is_alone:
        raise UsageError("save_experience: only that of one agent in one process is kept")


class Trainer:
    """The compiled programs that train and evaluate all agents.

    The agents are divided over the axis "seeds" of the mesh of devices, and the environments of an
    agent over the axis "envs". Everything else is replicated.
    """

    def __init__(self, make_agent: partial, jax_env: Any, run: Any) -> None:
        self.make_agent = make_agent
        self.jax_env = jax_env
        self.run = run
        self.args = make_agent.args[0]
        self.sweep = Sweep(self.args, run)
        self.mesh = make_mesh(len(self.sweep), self.args.num_envs, run.num_devices)
        self.place_agent(make_agent)
        agent: Any = self.agent
        self.iterations = math.ceil(run.log_interval / agent.steps_per_iteration)
        self.interval = self.iterations * agent.steps_per_iteration  # steps between two log entries
        self.limit = 1  # log entries in one call of the compiled program
        self.max_entries = MAX_ENTRIES
        if saves_experience(agent):  # the vault is written after each call
            self.max_entries = min(MAX_ENTRIES, agent.args.buffer_size // self.interval)
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        evaluate_all = jax.vmap(self.evaluate_one, spmd_axis_name="seeds")
        self.evaluate_all = jax.jit(evaluate_all, out_shardings=self.replicated)
        self.take_agent = jax.jit(
            lambda params, i: jax.tree.map(lambda x: x[i], params), out_shardings=self.replicated
        )
        self.which_are_finite = jax.jit(
            jax.vmap(partial(are_finite, xp=jnp)), out_shardings=self.replicated
        )
        self.sweep.check(self.first_entry)

    def place_agent(self, make_agent: Callable) -> None:
        """Makes the agent that is trained, and its environments."""
        recurrent = {}
        if takes(make_agent, "wrap_network"):
            recurrent["wrap_network"] = lambda network: SplitNetwork(network, self.mesh)
        self.agent = make_agent(shard_batch=self.shard_batch, **recurrent)
        time_limit = self.jax_env.spec.max_episode_steps
        self.envs = JaxEnvs(self.agent, self.jax_env.unwrapped.func_env, time_limit)

    def of(self, values: Any) -> "Trainer":
        """Returns the trainer of an agent with these values [] of the flags in --sweep."""
        if not values:
            return self
        one = copy(self)
        one.place_agent(replace_args(self.make_agent, values))
        return one

    def first_entry(self, values: dict) -> tuple:
        """Trains an agent with these values up to its first log entry."""
        one = self.of(values)
        return one.run_entry(one.init_one(jnp.uint32(0)), jnp.int32(0))

    def shard_batch(self, batch: Any) -> Any:
        """Splits a batch [B, ...] over the devices of an agent, if they divide it."""
        batch_size = len(jax.tree.leaves(batch)[0])
        return split(batch, self.mesh) if num_parts(self.mesh, batch_size) > 1 else batch

    def init_one(self, seed: Any, values: Any = ()) -> RunnerState:
        """Makes the RunnerState of an agent before the first step."""
        if values:
            return self.of(values).init_one(seed)._replace(values=values)
        num_envs = self.args.num_envs
        agent_key, env_key, key = jax.random.split(jax.random.PRNGKey(seed), 3)
        return RunnerState(
            agent=self.agent.init(agent_key),
            key=key,
            envs=self.envs.reset(env_key, num_envs),
            unfinished=jnp.zeros((2, num_envs)),
            finished=jnp.zeros(3),
        )

    def init(self) -> RunnerState:
        """Makes the RunnerState of all agents before the first step, on the devices."""
        # One after the other: XLA hangs in ten QR decompositions at once.
        init_all = partial(jax.lax.map, lambda agent: self.init_one(*agent))
        agents = (self.sweep.seeds, self.sweep.values)
        per_agent = NamedSharding(self.mesh, PartitionSpec("seeds"))
        shardings = jax.eval_shape(init_all, agents)._replace(
            agent=per_agent,
            key=per_agent,
            envs=NamedSharding(self.mesh, PartitionSpec("seeds", "envs")),
            unfinished=per_agent,
            finished=self.replicated,
            values=per_agent,
        )
        return jax.jit(init_all, out_shardings=shardings)(agents)

    def iterate(self, runner: RunnerState, step: Array) -> tuple[RunnerState, tuple]:
        """Makes the iteration of an agent that begins at `step`: a rollout, and learning from it.

        Returns metrics, whether all rewards and all observations were finite [2], and the numbers
        [S, N] of the info, as `JaxEnvs.step` gives them.
        """
        rollout_key, learn_key = jax.random.split(runner.key)
        params = self.agent.policy_params(runner.agent)
        rollout_key = jax.random.fold_in(rollout_key, step)
        envs, (rollout, info) = self.envs.collect(runner.envs, params, rollout_key, step)
        # Replicated, or XLA would split a replay like the rollouts that it stores, and gather it
        # again for each sample.
        inputs = (rollout, envs.observation)
        rollout, observation = jax.lax.with_sharding_constraint(inputs, self.replicated)
        more = {}
        if takes(self.agent.train_step, "next_observation"):
            more["next_observation"] = observation
        learned = self.agent.train_step(runner.agent, rollout, learn_key, step, **more)
        agent, _, metrics, *_ = learned
        rewards_and_observations = (rollout.reward, (rollout.observation, observation))
        finite = jnp.stack([are_finite(x, jnp) for x in rewards_and_observations])
        runner = count_episodes(runner._replace(agent=agent, envs=envs), rollout)
        return runner, (metrics, finite, info)

    def run_entry(self, runner: RunnerState, step: Array) -> tuple[RunnerState, Entry]:
        """Makes the iterations of an agent up to the next log entry."""
        steps = step + self.agent.steps_per_iteration * jnp.arange(self.iterations)
        runner = runner._replace(finished=jnp.zeros(3))
        runner, (metrics, finite, info) = jax.lax.scan(self.iterate, runner, steps)
        metrics = jax.tree.map(lambda x: x[-1], metrics)
        check_metrics(metrics)
        number, returns, lengths = runner.finished
        # Without an episode they are infinite, which is not logged.
        any_ended = number > 0
        metrics["charts/episodic_return"] = jnp.where(any_ended, returns / number, jnp.inf)
        metrics["charts/episodic_length"] = jnp.where(any_ended, lengths / number, jnp.inf)
        for name, x in info.items():
            tag = "charts/success_rate" if name == "is_success" else f"info/{name}"
            said = jnp.isfinite(x)
            mean = jnp.sum(x, where=said) / jnp.maximum(said.sum(), 1)
            metrics[tag] = jnp.where(said.any(), mean, jnp.inf)
        params = are_finite(self.agent.policy_params(runner.agent), jnp)
        return runner, Entry(metrics, runner.finished, jnp.append(finite.all(axis=0), params))

    def run_entries(self, runner: RunnerState, step: Array, num_entries: Array) -> tuple:
        """Trains an agent for `num_entries`. Returns RunnerState and Entry [MAX_ENTRIES, ...]."""
        one = self.of(runner.values)
        _, shapes = jax.eval_shape(one.run_entry, runner, step)
        entries = jax.tree.map(lambda x: jnp.zeros((MAX_ENTRIES, *x.shape), x.dtype), shapes)

        def run_entry(i: Array, carry: tuple) -> tuple:
            runner, entries = carry
            runner, entry = one.run_entry(runner, step + i * self.interval)
            return runner, jax.tree.map(lambda all_, x: all_.at[i].set(x), entries, entry)

        return jax.lax.fori_loop(0, num_entries, run_entry, (runner, entries))

    def compile(self, runner: RunnerState) -> Any:
        """Compiles `run_entries` of all agents, which overwrites its first argument."""
        shardings = jax.tree.map(lambda x: x.sharding, runner)
        axes = replays.axes(runner)
        run_all = jax.vmap(self.run_entries, (axes, None, None), (axes, 0), spmd_axis_name="seeds")
        return jax.jit(run_all, donate_argnums=0, out_shardings=(shardings, self.replicated))

    def evaluate_one(self, params: Any, values: Any = ()) -> tuple[Array, Array, Array]:
        """Plays [eval_episodes] of an agent: their returns, whether they ended, and succeeded."""
        # Training never folds in 2**31, so evaluations have their own keys.
        key = jax.random.PRNGKey(np.uint32(self.run.seed % 2**32))
        key = jax.random.fold_in(key, 2**31)
        run = self.run
        episodes = run.eval_episodes
        envs = self.of(values).envs
        return envs.evaluate(params, episodes, key, run.eval_max_steps, run.eval_explores)

    def evaluate(self, params: Any, values: Any = ()) -> tuple[np.ndarray, np.ndarray]:
        """Plays episodes of each agent: returns [num_agents, eval_episodes], and successes."""
        returns, over, succeeded = self.evaluate_all(params, values)
        if not np.all(over):
            tqdm.write(f"an evaluation cuts off episodes after {self.run.eval_max_steps:,} steps")
        return np.asarray(returns), np.where(np.isinf(succeeded), np.nan, succeeded)

    def first_params(self, runner: RunnerState) -> Any:
        """Returns the parameters of `act` of the first agent that has not diverged."""
        params = self.agent.policy_params(runner.agent)
        return self.take_agent(params, self.sweep.first_left())

    def num_entries(self, step: int) -> int:
        """Counts the log entries of the next call, up to a checkpoint, an evaluation or the end.

        `adapt` sets their limit, so that progress is shown about every second.
        """
        intervals = [self.run.checkpoint_interval, self.run.eval_interval]
        goals = [(step // interval + 1) * interval for interval in intervals if interval > 0]
        goal = min([self.args.total_timesteps, *goals])
        return min(self.limit, math.ceil((goal - step) / self.interval))

    def adapt(self, is_long: bool) -> None:
        """Doubles the log entries of a call, unless the last one took half a second or more."""
        if not is_long:
            self.limit = max(1, min(2 * self.limit, self.max_entries))


def make_trainer(script: Any, args: Any, run: Any) -> Trainer:
    """Makes the compiled programs of a run: `script` is a module, such as ppo_jax."""
    with closing(script.make_envs(args, run, 1)) as envs:
        spaces = envs.single_observation_space, envs.single_action_space
        jax_env = find_jax_env(envs, run)
    return Trainer(partial(script.Agent, args, *spaces), jax_env, run)


def recent_returns(entries: deque, before: Any) -> np.ndarray:
    """Averages the last 100 or more returns of each agent [num_agents], in whole log entries.

    `entries` are `finished` of RunnerState [num_agents, 3], newest first. Where no episode ended
    the result is `before` [num_agents].
    """
    total = np.zeros_like(entries[0])
    for finished in entries:
        needs_more = total[:, :1] < 100
        if not needs_more.any():
            break
        total += np.where(needs_more, finished, 0)
    return np.where(total[:, 0] > 0, total[:, 1] / np.maximum(total[:, 0], 1), before)


def check_entries(
    entries: Entry, step: int, interval: int, run_folder: RunFolder, sweep: Sweep
) -> None:
    """Raises NotFiniteError for the first entry [num_agents, entries] that is not finite.

    The entries are those of a call that began at `step`. In a sweep a line names the agent that
    diverged, and the other agents continue, until none is left.
    """
    for entry, agent, what in np.argwhere(~entries.finite.swapaxes(0, 1)).tolist():
        if agent in sweep.lost:
            continue
        sweep.lost.add(agent)
        begin = step + entry * interval
        text = f"{run_folder.path}: diverged, parameters are not finite"
        if what < 2:
            name = ("reward", "observation")[what]
            text = f"{run_folder.run.env_id}: the {name} is not finite"
        text += f": {sweep.label(agent)}, between steps {begin:,} and {begin + interval:,}"
        if len(sweep.lost) == len(sweep) or not sweep.values:
            raise NotFiniteError(text)
        tqdm.write(f"{text}; the other agents continue")


def log_entries(logs: list, step: int, interval: int, entries: Entry, seconds: float) -> None:
    """Logs the entries [num_agents, entries] of a call that began at `step`, and took `seconds`."""
    count = entries.finite.shape[1]
    for agent, log in enumerate(logs):
        for i in range(count):
            end = step + (i + 1) * interval
            row = {tag: values[agent, i] for tag, values in entries.metrics.items()}
            if log is logs[0] and i == count - 1:
                log.add_metrics(end, row)
                continue
            before = seconds * (count - 1 - i) / count
            elapsed = time.monotonic() - before - log.start_time
            row["charts/SPS"] = (end - log.first_step) / max(elapsed, 1e-9)
            log.write(end, row, time.time() - before)


def evaluate_agents(
    trainer: Trainer,
    logs: list,
    run_folder: RunFolder,
    make_envs: Callable,
    runner: RunnerState,
    step: int,
) -> np.ndarray:
    """Logs the returns of an evaluation, saves the best agent, records a video of the first.

    Returns the mean return of each agent [num_agents].
    """
    run = trainer.run
    params = trainer.agent.policy_params(runner.agent)
    returns = np.zeros((len(logs), 0))
    if run.eval_episodes > 0:
        returns, successes = trainer.evaluate(params, runner.values)
        for log, *own in zip(logs, returns, successes, strict=True):
            log_returns(log, step, *own)
        are_left = trainer.which_are_finite(params)
        scores = np.where(are_left, returns.mean(axis=1), -np.inf)
        best = int(np.argmax(scores))
        line = f"{step:,} steps: return {returns[are_left].mean():.2f} in an evaluation"
        of_best = f", the best {scores[best]:.2f} with {trainer.sweep.label(best)}"
        tqdm.write(line + of_best if run.sweep else line)
        _, values = trainer.sweep.flags(best)
        part = trainer.take_agent(run_folder.policy_part(runner.agent), best)
        run_folder.save_if_best(step, part, scores[best], values)
    for i, log in enumerate(logs):
        log.at_evaluation(step, trainer.take_agent(params, i), returns[i])
    if run.capture_video:
        first, values = trainer.take_agent((params, runner.values), 0)
        with closing(make_envs(1, f"{run_folder.path}/videos/{step}")) as envs:
            play_episodes(trainer.of(values).agent, run, first, envs, run_folder.stop)
    return returns.mean(axis=1) if returns.size > 0 else np.full(len(logs), np.nan)


def open_logs(
    trainer: Trainer, run_folder: RunFolder, make_log: Callable, returns: np.ndarray
) -> list:
    """Opens the `Log` of each agent in its folder. The first agent's shows the progress."""
    logs: list = []
    is_first_process = jax.process_index() == 0
    for i, before in enumerate(returns):
        folder = trainer.sweep.folder(run_folder.path, i)
        log: Log = make_log(trainer.agent, run_folder.run, folder, run_folder.stop)
        writer = None if is_first_process else distributed.NoWriter()
        quiet = None if is_first_process and i == 0 else True
        log.open(run_folder.first_step, [before], quiet, writer)
        run_flags, args_flags = write_own_flags(trainer.sweep, run_folder, folder, i)
        run_folder.write_header(log.writer, run_flags | args_flags)
        logs.append(log)
    return logs


def write_own_flags(sweep: Sweep, run_folder: RunFolder, folder: Path, i: int) -> tuple[dict, dict]:
    """Writes args.json of agent `i` to its folder, unless that is the folder of the run.

    Returns the flags of the experiment and of the algorithm in which it differs from the run.
    """
    if folder == run_folder.path:
        return {}, {}
    run_flags, args_flags = sweep.flags(i)
    if jax.process_index() == 0:
        about = run_folder.about
        flags = {"run": about["run"] | run_flags, "args": about["args"] | args_flags}
        disk.write_whole(folder / "args.json", disk.to_json(about | flags).encode())
    return run_flags, args_flags


def train(
    make_agent: partial,
    make_envs: Callable[..., Any],
    make_log: Callable[..., Any],
    script: str,
    jax_env: Any,
    env_spaces: dict,
    run: Any,
    folder: Path,
    stop: list,
) -> tuple[Any, np.ndarray, Path]:
    """Trains all agents, as `train` of a script does: leaves of the State are [num_agents, ...].

    Args:
      make_agent: makes a `protocol.Agent`. Its first argument is Args. It takes `shard_batch`, a
        function that splits a batch over devices. If it takes `wrap_network`, see `SplitNetwork`.
      make_envs: makes environments that are stepped from Python, for a video.
      make_log: makes a `protocol.Log`, for an agent in a folder.
      script: the file that trains.
      jax_env: the environment, from `find_jax_env`.
      env_spaces: see `spaces.of_envs`.
      run, folder, stop: flags of the experiment, its folder, and the signals that end it.
    """
    trainer = Trainer(make_agent, jax_env, run)
    check_flags(trainer.args, run, len(trainer.sweep))
    run_folder = RunFolder(trainer.agent, run, folder, script, stop, env_spaces)
    with distributed.ends_together(), run_folder, ExitStack() as stack:
        runner = run_folder.begin(trainer.init, on_resume=lambda runner: runner)
        trainer.sweep.lost.update(run_folder.lost)
        run_folder.write_experience(runner.agent)
        returns = np.array(run_folder.recent_returns or [math.nan] * len(trainer.sweep))
        logs = open_logs(trainer, run_folder, make_log, returns)
        for log in logs:
            stack.push(log.__exit__)
        runner, returns = train_loop(trainer, runner, returns, logs, run_folder, make_envs)
    returns[list(trainer.sweep.lost)] = np.nan
    for i, mean_return in enumerate(returns):
        label = trainer.sweep.label(i)
        tqdm.write(f"{label}: mean return of the last episodes {mean_return:.2f}")
    return runner.agent, returns, run_folder.path


def call(
    run_entries: Callable, runner: RunnerState, step: int, count: int
) -> tuple[RunnerState, Entry]:
    """Calls the compiled program. Returns the RunnerState, and `count` entries [num_agents, ...].

    LostProcessError if another process has ended.
    """
    with distributed.lost_process():
        runner, entries = run_entries(runner, step, count)
        return runner, jax.tree.map(lambda x: np.asarray(x)[:, :count], entries)


def is_stopped(stop: list) -> bool:
    """Returns whether any process received a signal. If so, adds one to an empty `stop`."""
    is_interrupted = distributed.any_process(len(stop) > 0)
    if is_interrupted and not stop:
        stop.append(signal.SIGTERM)
    return is_interrupted


def train_loop(
    trainer: Trainer,
    runner: RunnerState,
    returns: np.ndarray,
    logs: list,
    run_folder: RunFolder,
    make_envs: Callable,
) -> tuple[RunnerState, np.ndarray]:
    """Calls the compiled program until the end. Returns RunnerState, mean returns [num_agents]."""
    run, total = trainer.run, trainer.args.total_timesteps
    run_entries = trainer.compile(runner)
    evaluate = partial(evaluate_agents, trainer, logs, run_folder, make_envs)
    finished: deque = deque(maxlen=1_000)  # of each log entry, the newest first
    end = run_folder.first_step
    if end >= total:  # a complete run is only evaluated
        evaluate(runner, end)
    while end < total:
        step, count = end, trainer.num_entries(end)
        end = step + count * trainer.interval
        began = time.monotonic()
        runner, entries = call(run_entries, runner, step, count)
        seconds = time.monotonic() - began
        trainer.adapt(distributed.any_process(seconds > LONG_CALL))
        finished.extendleft(entries.finished.swapaxes(0, 1))
        returns = recent_returns(finished, returns)
        logs[0].recent_returns.clear()
        logs[0].recent_returns.extend(returns)
        log_entries(logs, step, trainer.interval, entries, seconds)
        check_entries(entries, step, trainer.interval, run_folder, trainer.sweep)
        run_folder.write_experience(runner.agent)
        is_interrupted = is_stopped(run_folder.stop)
        is_finished = distributed.any_process(any(log.total == 0 for log in logs))
        is_last = is_interrupted or is_finished or end >= total
        if is_last or buffers.is_due(run.checkpoint_interval, step, end):
            params = trainer.first_params(runner)
            run_folder.save(end, runner, params, list(returns), **trainer.sweep.about())
        if is_interrupted:
            break
        if is_last or buffers.is_due(run.eval_interval, step, end):
            means = evaluate(runner, end)
            if trainer.agent.rollout_shape[0] == 0:  # training plays no episodes
                returns = means
        if is_last:
            break
    return runner, returns
