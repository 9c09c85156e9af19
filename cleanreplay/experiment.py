"""Saves, resumes, evaluates and records a run whose environments are stepped from Python."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import buffers
from cleanreplay import distributed, offline, protocol, shares
from cleanreplay.environments import Successes, rate
from cleanreplay.errors import LostProcessError, NotFiniteError, UsageError
from cleanreplay.protocol import Agent, Log
from cleanreplay.run_folder import RunFolder, check_finite

ENDED = (
    "the processes of the environments ended at their start; their output is above. Each "
    "imports the file that Python was started with: call `train` there under `if __name__ == "
    '"__main__":`'
)
STATISTICS: dict = {"episodic_return": np.mean, "median": np.median, "min": np.min, "max": np.max}


class Experiment(AbstractContextManager):
    """Has the methods of a script's `Log`, and also saves, resumes and evaluates.

    Args:
      log: writes the charts. Its attributes are also attributes of this.
      agent: the algorithm.
      make_envs: `make_envs(N)` makes N environments; a second argument is a folder for a video.
      script: the file that trains.
      env_spaces: see `spaces.of_envs`.
    """

    def __init__(
        self, log: Log, agent: Agent, make_envs: Callable, script: str, env_spaces: dict
    ) -> None:
        self.log = log
        self.agent = agent
        self.run = log.run
        self.make_envs = make_envs
        self.is_first = jax.process_index() == 0  # only the first logs, saves and evaluates
        # With several processes a signal ends the run once all of them know of it.
        self.signals: list = log.stop if jax.process_count() == 1 else []
        self.run_folder = RunFolder(agent, log.run, log.folder, script, self.signals, env_spaces)
        log.folder = self.run_folder.path
        self.on_exit = ExitStack()
        self.envs: Any = None  # those that train
        self.exchange: shares.Exchange | None = None  # with other processes
        self.learned: tuple = ()  # of the last iteration: its end, the State and the parameters
        self.counted: list = []  # successes to be logged

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the `Log`, such as `write` and `first_step`."""
        return getattr(self.log, name)

    def __enter__(self) -> "Experiment":
        self.on_exit.enter_context(distributed.ends_together())
        self.on_exit.enter_context(self.run_folder)
        self.on_exit.push(self.log.__exit__)  # runs first, so the folder is told of its errors
        return self

    def begin(self, envs: Any, init: Callable) -> Any:
        """Begins the run in these environments.

        Returns the State of `init()`, or with --resume that of the newest checkpoint.
        """
        self.envs = envs
        folder = self.run_folder
        state = folder.begin(init, partial(protocol.on_resume, self.agent))
        others = () if self.is_first else (True, distributed.NoWriter())
        self.log.open(folder.first_step, folder.recent_returns, *others)
        folder.write_header(self.log.writer)
        folder.write_experience(state)
        if self.log.first_step >= self.log.total:  # a complete run is only evaluated
            self.evaluate(self.log.first_step, state, self.agent.policy_params(state))
        return state

    def jit(self, train_step: Callable, **how: Any) -> Callable:
        """Compiles `train_step`. With --distributed it learns from the steps of all processes."""
        learn = jax.jit(train_step, **how)
        if jax.process_count() == 1:
            return learn
        more = (self.agent.args.frame_stack, self.signals, self.log)
        self.exchange = shares.Exchange(learn, self.envs, *more)
        self.on_exit.push(self.leave)
        return self.exchange

    def leave(self, kind: Any, error: Any, traceback: Any) -> None:
        """Leaves the other processes. If one of them was lost, saves the last iteration."""
        if isinstance(error, LostProcessError) and self.learned:
            end, state, params = self.learned
            self.run_folder.save(end, state, params, self.log.recent_returns)
        if self.exchange:
            self.exchange.end(error)

    @contextmanager
    def saves_on_error(self, step: int, learned: Callable | None = None) -> Iterator[None]:
        """Saves what was learned if the environments fail in `with`, at `step`.

        `learned()` returns the State and the parameters to save; by default they are those of the
        last iteration. A note on the error names the environment, the step and the folder.
        """
        try:
            yield
        except Exception as error:
            error.add_note(f"in {self.run.env_id} at step {step} of {self.run_folder.path}")
            end_processes(self.envs, error)
            if step > self.log.first_step:
                state, params, *_ = learned() if learned else self.learned[1:]
                try:
                    self.run_folder.save(step, state, params, self.log.recent_returns)
                except NotFiniteError as diverged:
                    error.add_note(f"not saved: {diverged}")
            raise

    def count_episodes(self, step: int, rollout: Any) -> None:
        """Records the returns of the episodes that end in a rollout, which began at `step`."""
        check_rollout(rollout, self.run, step)
        if self.exchange:  # `end_iteration` counts the episodes of all processes
            return
        self.log.count_episodes(step, rollout)
        if self.envs.ended:  # it may have successes of the next rollout already
            count = int((rollout.terminated | rollout.truncated).sum())
            self.counted += self.envs.ended[:count]
            del self.envs.ended[:count]

    def end_iteration(self, end: int, state: Any, params: Any, metrics: dict) -> bool:
        """Logs, saves and evaluates what is due at step `end`. Returns whether the run is over."""
        run = self.run
        step = end - self.agent.steps_per_iteration
        check_metrics(metrics)
        self.learned = (end, state, params)
        if self.exchange:
            self.log.count_episodes(step, self.exchange.rollout)
            self.counted += self.exchange.successes
            self.log.stop.extend(self.exchange.stop)
        ends = end >= self.total or len(self.log.stop) > 0
        if self.counted and (ends or buffers.is_due(run.log_interval, step, end)):
            metrics = metrics | {"charts/success_rate": rate(self.counted)}
            self.counted.clear()
        is_last = self.log.end_iteration(end, state, params, metrics)
        if is_last or buffers.is_due(run.log_interval, step, end):
            check_finite(params, self.run_folder.path)
            self.run_folder.write_experience(state)
        if is_last or buffers.is_due(run.checkpoint_interval, step, end):
            if self.exchange:
                self.exchange.checksum = shares.checksum(params)
            self.run_folder.save(end, state, params, self.log.recent_returns)
        if is_last or buffers.is_due(run.eval_interval, step, end):
            self.evaluate(end, state, params)
        return is_last

    def evaluate(self, step: int, state: Any, params: Any) -> None:
        """Logs the returns of an evaluation, saves the best agent, and records a video."""
        if not self.is_first:
            return
        run, stop = self.run, self.signals
        returns = np.zeros(0)

        def play(envs: Any) -> np.ndarray:
            protocol.before_evaluation(self.agent, envs, state)
            return play_episodes(self.agent, run, params, envs, stop)

        if run.eval_episodes > 0 and not stop:
            with closing(Successes(self.make_envs(run.eval_episodes))) as envs:
                returns = play(envs)
            if stop:
                return  # the evaluation was interrupted
            log_returns(self.log, step, returns, envs.first)
            if self.agent.rollout_shape[0] == 0:  # training plays no episodes
                self.log.recent_returns.clear()
                self.log.recent_returns.extend(returns)
            tqdm.write(f"{step:,} steps: return {returns.mean():.2f} in an evaluation")
            folder = self.run_folder
            folder.save_if_best(step, folder.policy_part(state), returns.mean())
        if not stop:
            self.log.at_evaluation(step, params, returns)
        if run.capture_video and not stop:
            with closing(self.make_envs(1, f"{self.run_folder.path}/videos/{step}")) as envs:
                play(envs)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        never_began = self.log.writer is None
        self.on_exit.__exit__(kind, error, traceback)
        has_processes = self.run.vectorization == "async"
        if never_began and has_processes and isinstance(error, EOFError | ConnectionError):
            raise UsageError(f"vectorization: {ENDED}") from error


def log_returns(log: Log, step: int, returns: np.ndarray, successes: np.ndarray) -> None:
    """Logs the returns of an evaluation, and its success rate if successes were reported.

    If the reference returns of the data are known it also logs eval/normalized: the mean return on
    a scale where these are 0 and 100.
    """
    values = {f"eval/{name}": f(returns) for name, f in STATISTICS.items()}
    if hasattr(log.args, "expert_return"):
        low, high = offline.reference_returns(log.args)
        values["eval/normalized"] = 100 * (returns.mean() - low) / (high - low)
    log.write(step, values | {"eval/success_rate": rate(successes)})


def check_metrics(metrics: dict) -> None:
    """Raises UsageError if a metric is not a scalar."""
    for tag, x in metrics.items():
        if np.ndim(x) > 0:
            raise UsageError(f"the metric {tag} must be a number, not an array {np.shape(x)}")


def check_rollout(rollout: Any, run: Any, step: int) -> None:
    """Raises NotFiniteError for NaN or infinity from an environment, with its index and step."""
    for name in ("reward", "observation"):
        values = getattr(rollout, name)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            t, env, *_ = np.argwhere(~np.isfinite(values))[0]
            where = f"environment {env} at step {step + t * values.shape[1]}"
            raise NotFiniteError(f"{run.env_id}: the {name} is not finite in {where}")


def play_episodes(agent: Any, run: Any, params: Any, envs: Any, stop: list) -> np.ndarray:
    """Plays one episode in each of N environments: returns [N]."""
    returns = np.zeros(envs.num_envs)
    over = np.zeros(envs.num_envs, bool)
    key = jax.random.fold_in(jax.random.PRNGKey(run.seed), 2**31)  # no step of training is so large
    act = protocol.policy(agent, params, key if run.eval_explores else None)
    # It explores as at the end of training. No step is beyond int32.
    first_step = min(agent.args.total_timesteps, 2**31 - 1 - run.eval_max_steps)
    observation, _ = envs.reset(seed=int(key[0]) // 4)
    for step in range(first_step, first_step + run.eval_max_steps):
        observation = np.asarray(observation, agent.example_step.observation.dtype)
        observation, reward, terminated, truncated, _ = envs.step(act(observation, step=step))
        returns += np.where(over, 0, reward)
        over |= terminated | truncated
        if over.all() or stop:
            return returns
    tqdm.write(f"an evaluation cuts off episodes after {run.eval_max_steps:,} steps")
    return returns


def end_processes(envs: Any, error: Exception) -> None:
    """Ends the processes of gymnasium.vector.AsyncVectorEnv after an error in a step.

    `close` would wait for answers that never come. A note names processes that were killed before.
    """
    processes = getattr(envs.unwrapped, "processes", [])
    if not processes:
        return
    if isinstance(error, EOFError | ConnectionError):
        for process in processes:
            process.join(timeout=0.5)
        dead = [process.name for process in processes if not process.is_alive()]
        error.add_note(f"killed: {', '.join(dead)}")
    for process in processes:
        process.kill()  # they ignore SIGTERM
    envs.unwrapped.closed = True
