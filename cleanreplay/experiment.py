"""A run that lasts: the `Log` of a script, and saving, resuming, evaluating and recording."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from cleanreplay import images, spaces
from cleanreplay.agents import Agent, Log
from cleanreplay.errors import NotFiniteError, UsageError
from cleanreplay.keeper import Keeper, check_finite
from cleanreplay.success import Successes, rate

ENDED = (
    "the processes of the environments ended as they began, and what they print is above. Each "
    "imports the file that Python was started with: call `train` there under `if __name__ == "
    '"__main__":`'
)
STATISTICS: dict = {"episodic_return": np.mean, "median": np.median, "min": np.min, "max": np.max}


class Experiment(AbstractContextManager):
    """Has the methods of a script's `Log`, and stands in its place.

    Args:
      log: writes the charts.
      agent: the algorithm.
      make_envs: makes as many environments as it is told, with a folder for a video or without.
      script: the file that trains.
    """

    def __init__(self, log: Log, agent: Agent, make_envs: Callable, script: str) -> None:
        self.log = log
        self.agent = agent
        self.run = log.run
        self.make_envs = make_envs
        self.learned: tuple = ()  # the State and the parameters of the last iteration
        self.successes: list = []  # of episodes that ended, and are not counted yet
        self.counted: list = []  # those that are to be logged
        if self.run.capture_video:
            images.check_video(make_envs)
        self.on_exit = ExitStack()
        env_spaces = spaces.of_envs(make_envs)
        self.keeper = Keeper(agent, self.run, log.folder, script, log.stop, env_spaces)

    first_step = property(lambda self: self.log.first_step)
    total = property(lambda self: self.log.total)
    writer = property(lambda self: self.log.writer)

    def __enter__(self) -> "Experiment":
        self.on_exit.enter_context(self.keeper)
        self.on_exit.push(self.log.__exit__)  # first, so that the keeper hears of its errors
        return self

    def begin(self, init: Callable) -> Any:
        """Begins the run: the State of `init()`, or with --resume that of the newest checkpoint."""
        state = self.keeper.begin(init, self.agent.on_resume)
        self.log.open(self.keeper.first_step, self.keeper.recent_returns)
        self.keeper.write_header(self.log.writer)
        self.keeper.write_experience(state)
        if self.first_step >= self.total:  # a complete run is only evaluated
            self.evaluate(self.first_step, self.agent.policy_params(state))
        return state

    def saves_on_error(
        self, envs: Any, step: int, learned: Callable | None = None
    ) -> AbstractContextManager:
        """In `with`: if the environments fail at `step`, saves what `learned()` returns.

        That is the State and the parameters; without it they are those of the last iteration.
        """
        if isinstance(envs, Successes):
            self.successes = envs.ended
        learned = learned or (lambda: self.learned)
        return self.keeper.saves_on_error(envs, step, learned, self.log.recent_returns)

    def count_episodes(self, step: int, rollout: Any) -> None:
        """Keeps the returns of the episodes that end in a rollout, which began at `step`."""
        check_rollout(rollout, self.run, step)
        self.log.count_episodes(step, rollout)
        if self.successes:  # those of the next rollout are among them
            count = int((rollout.terminated | rollout.truncated).sum())
            self.counted += self.successes[:count]
            del self.successes[:count]

    def end_iteration(self, end: int, state: Any, params: Any, metrics: dict) -> bool:
        """Logs, saves and evaluates what is due at step `end`. Returns whether the run is over."""
        run = self.run
        step = end - self.agent.steps_per_iteration
        check_metrics(metrics)
        self.learned = (state, params)
        ends = end >= self.total or len(self.log.stop) > 0
        if self.counted and (ends or is_due(run.log_interval, step, end)):
            metrics = metrics | {"charts/success_rate": rate(self.counted)}
            self.counted.clear()
        is_last = self.log.end_iteration(end, state, params, metrics)
        if is_last or is_due(run.log_interval, step, end):
            check_finite(params, self.log.folder)
            self.keeper.write_experience(state)
        if is_last or is_due(run.checkpoint_interval, step, end):
            self.keeper.save(end, state, params, self.log.recent_returns)
        if is_last or is_due(run.eval_interval, step, end):
            self.evaluate(end, params)
        return is_last

    def evaluate(self, step: int, params: Any) -> None:
        """Logs the returns of an evaluation, keeps the best agent, and records a video."""
        run, stop = self.run, self.log.stop
        returns = np.zeros(0)
        play = partial(play_episodes, self.agent, run, params, stop=stop)
        if run.eval_episodes > 0 and not stop:
            with closing(Successes(self.make_envs(run.eval_episodes))) as envs:
                returns = play(envs)
            if stop:
                return  # it was interrupted
            log_returns(self.log, step, returns, envs.first)
            tqdm.write(f"{step:,} steps: return {returns.mean():.2f} in an evaluation")
            self.keeper.save_if_best(step, params, returns.mean())
        if not stop:
            self.log.at_evaluation(step, params, returns)
        if run.capture_video and not stop:
            with closing(self.make_envs(1, f"{self.log.folder}/videos/{step}")) as envs:
                play(envs)

    def write(self, step: int, metrics: dict) -> None:
        """Adds a point to each chart whose number is finite."""
        self.log.write(step, metrics)

    def mean_return(self) -> float:
        """The mean return of the last episodes."""
        return self.log.mean_return()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.on_exit.__exit__(kind, error, traceback)
        never_began = self.writer is None
        has_processes = self.run.vectorization == "async"
        if never_began and has_processes and isinstance(error, EOFError | ConnectionError):
            raise UsageError(f"vectorization: {ENDED}") from error


def log_returns(log: Log, step: int, returns: np.ndarray, successes: np.ndarray) -> None:
    """Logs the returns of the episodes of an evaluation, and how many succeeded, if they say so."""
    values = {f"eval/{name}": f(returns) for name, f in STATISTICS.items()}
    log.write(step, values | {"eval/success_rate": rate(successes)})


def is_due(interval: int, step: int, end: int) -> bool:
    """Whether a multiple of the interval is in (step, end]; never for an interval of 0."""
    return interval > 0 and end // interval > step // interval


def check_metrics(metrics: dict) -> None:
    """Raises UsageError if a metric is no number."""
    for tag, x in metrics.items():
        if np.ndim(x) > 0:
            raise UsageError(f"the metric {tag} must be a number, not an array {np.shape(x)}")


def check_rollout(rollout: Any, run: Any, step: int) -> None:
    """Raises NotFiniteError if the environments returned NaN or infinity, and says when."""
    for name in ("reward", "observation"):
        values = getattr(rollout, name)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            t, env, *_ = np.argwhere(~np.isfinite(values))[0]
            where = f"environment {env} at step {step + t * values.shape[1]}"
            raise NotFiniteError(f"{run.env_id}: the {name} is not finite in {where}")


def play_episodes(agent: Any, run: Any, params: Any, envs: Any, stop: list) -> np.ndarray:
    """The returns [N] of one episode in each of N environments."""
    returns = np.zeros(envs.num_envs)
    over = np.zeros(envs.num_envs, bool)
    key = jax.random.fold_in(jax.random.PRNGKey(run.seed), 2**31)  # no step of training is so large
    act = agent.policy(params, key if run.eval_explores else None)
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
