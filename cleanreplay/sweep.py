"""Gives each agent of a compiled run its own hyperparameters: the flag --sweep.

    --sweep learning_rate=1e-4,1e-3 gamma=0.95,0.99     # a grid: four configurations
    --sweep learning_rate:gamma=1e-4:0.95,1e-3:0.99     # two configurations of two values

Each configuration is trained with each seed. The algorithm is not changed for this: inside the
compiled program each agent is made from flags whose swept values are traced numbers.
"""

import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np

from cleanreplay import flags
from cleanreplay.errors import UsageError

ALONE = "start a run for each value instead, see docs/scale.md"
# Flags that describe the whole run in args.json, and their values for an agent alone.
OF_ONE = {"num_seeds": 1, "sweep": ()}


class Sweep:
    """The agents of a run: all seeds of the first configuration, then all of the next, and so on.

    Without --sweep the flags are the only configuration. Raises UsageError for flags that cannot be
    swept, and for invalid values.
    """

    def __init__(self, args: Any, run: Any) -> None:
        self.run = run
        if run.seed + run.num_seeds - 1 > flags.INT32:
            raise UsageError(f"num_seeds: the last seed is beyond 2**31 - 1, as seed is {run.seed}")
        self.settings = make_settings(run.sweep, args)
        seeds = run.seed + np.arange(run.num_seeds)
        self.seeds = np.tile(seeds, len(self.settings)).astype(np.uint32)  # [agents]
        self.values = {  # of each swept flag, [agents]
            name: np.repeat(np.array([x[name] for x in self.settings], np.float32), run.num_seeds)
            for name in self.settings[0]
        }
        self.lost: set[int] = set()  # agents of a sweep that diverged

    def __len__(self) -> int:
        return len(self.seeds)

    def of_agent(self, i: int) -> tuple[dict[str, float], int]:
        """Returns the values of agent `i`, and its seed."""
        setting, seed = divmod(i, self.run.num_seeds)
        return self.settings[setting], self.run.seed + seed

    def first_left(self) -> int:
        """Returns the first agent that has not diverged."""
        return min(set(range(len(self))) - self.lost)

    def about(self) -> dict[str, Any]:
        """Returns the description of the agents in a checkpoint, as JSON."""
        values = [self.of_agent(i)[0] for i in range(len(self))]
        swept = {name: [x[name] for x in values] for name in self.values}
        return {"num_agents": len(self), "lost": sorted(self.lost), "swept": swept}

    def label(self, i: int) -> str:
        """Returns the name of agent `i` in messages, such as `seed 1` or `gamma=0.99, seed 1`."""
        values, seed = self.of_agent(i)
        return ", ".join([*in_words(values), f"seed {seed}"])

    def folder(self, run_folder: Path, i: int) -> Path:
        """Returns the folder of agent `i`. Without --sweep the first one has that of the run."""
        values, seed = self.of_agent(i)
        if values:
            return run_folder / ",".join([*in_words(values), f"seed={seed}"])
        return run_folder / f"seed_{seed}" if i > 0 else run_folder

    def flags(self, i: int) -> tuple[dict, dict]:
        """Returns agent `i`'s own flags of the experiment, and of the algorithm.

        A run with these flags trains this agent alone.
        """
        values, seed = self.of_agent(i)
        return OF_ONE | {"seed": seed}, values

    def check(self, trace: Callable) -> None:
        """Raises UsageError for a flag that must be constant in a compiled program.

        `trace(values)` makes an agent with these values and returns what it has learned.
        """
        for name in self.values:
            try:
                program = jax.make_jaxpr(trace)({name: np.float32(1)}).jaxpr
            except (jax.errors.JAXTypeError, TypeError) as error:
                why = "a shape, a number of steps or a branch of the program depends on it"
                text = f"sweep: {name} must be constant in a program, because {why}: {place(error)}"
                raise UsageError(f"{text}; {ALONE}") from error
            used = [x for equation in program.eqns for x in equation.invars]
            if not any(x is program.invars[0] for x in [*used, *program.outvars]):
                why = "it is not used with the other flags, or is constant in a program"
                raise UsageError(f"sweep: {name} changes nothing: {why}; {ALONE}")


def in_words(values: dict[str, float]) -> list[str]:
    """Writes flags with their values, such as gamma=0.99: six digits if these are exact, or all."""
    texts = {name: f"{value:g}" for name, value in values.items()}
    return [
        f"{name}={text if float(text) == values[name] else values[name]}"
        for name, text in texts.items()
    ]


def replace_args(make_agent: partial, values: dict) -> partial:
    """Replaces values of flags in Args, the first argument of `make_agent`."""
    args, *rest = make_agent.args
    return partial(make_agent.func, replace(args, **values), *rest, **make_agent.keywords)


def make_settings(items: Sequence[str], args: Any) -> list[dict[str, float]]:
    """Lists the values of each configuration; the last item changes fastest. [{}] without items.

    UsageError if a flag or a configuration appears twice.
    """
    lists = [read_item(item, args) for item in items]
    names = [name for item in items for name in names_in(item)]
    settings = [
        {name: x for point in points for name, x in point.items()}
        for points in itertools.product(*lists)
    ]
    labels = [", ".join(in_words(setting)) for setting in settings]
    for what in (names, labels):
        for name in what:
            if what.count(name) > 1:
                raise UsageError(f"sweep: {name} appears twice")
    return settings


def names_in(item: str) -> list[str]:
    """Returns the flags of an item of --sweep."""
    return [name.replace("-", "_") for name in item.partition("=")[0].split(":")]


def read_item(item: str, args: Any) -> list[dict[str, float]]:
    """Reads the points of an item of --sweep, as gamma=0.9,0.99 or gamma:tau=0.9:1,0.99:0.5."""
    _, equals, right = item.partition("=")
    names = names_in(item)
    points = [point.split(":") for point in right.split(",")]
    if not equals or any(len(point) != len(names) for point in points):
        expected = "gamma=0.9,0.99, or two flags together as gamma:tau=0.9:1,0.99:0.5"
        raise UsageError(f"sweep: {item} must be written as {expected}")
    for name in names:
        check_name(name, args)
    return [
        {name: read_value(name, text, args) for name, text in zip(names, point, strict=True)}
        for point in points
    ]


def check_name(name: str, args: Any) -> None:
    """Raises UsageError if the algorithm has no such flag, or if it is no float."""
    types = get_type_hints(type(args))
    if name not in types:
        near = get_close_matches(name, types, 1)
        hint = f": {near[0]}?" if near else ""
        raise UsageError(f"sweep: {name} is no flag of the algorithm{hint}")
    if types[name] not in (float, float | None):
        what = getattr(types[name], "__name__", types[name])
        raise UsageError(f"sweep: {name} is of type {what}, and only floats can be swept; {ALONE}")


def read_value(name: str, text: str, args: Any) -> float:
    """Reads a flag's value. UsageError if it is not a number, or is beyond the flag's limits."""
    try:
        value = float(text)
    except ValueError as error:
        raise UsageError(f"sweep: {name} must be a number, not {text!r}") from error
    flags.check_flag(name, value, float)
    return value


def place(error: Exception) -> str:
    """Returns the line of a script, or of this package, that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "site-packages" not in frame.filename]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}: {last.line}"
