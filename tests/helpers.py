"""What several test files share: flags and results of short runs; items and settings of buffers."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import buffers
from cleanreplay import compiled, jax_envs, policies, spaces

# ---------------------------------------------------------------------------------------- all tests

# Cases of a parameter, see the markers in pyproject.toml.
slow = partial(pytest.param, marks=pytest.mark.slow)
more = partial(pytest.param, marks=pytest.mark.more)


def fast_at_ends(names, cases, **options):
    """`pytest.mark.parametrize` in which the cases between the first and the last are `more`."""
    first, *between, last = cases
    marked = [more(case) if isinstance(names, str) else more(*case) for case in between]
    return pytest.mark.parametrize(names, [first, *marked, last], **options)


# --------------------------------------------------------------------------------------------- runs

# Flags with which a run takes a second or two.
SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)
SMALL_PPO = dict(total_timesteps=64, num_steps=8, num_minibatches=1, update_epochs=1)
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)


def one_line(result, code=2):
    """The one line on stderr of `run_main`, which ended with this exit code."""
    given, _, err = result
    (line,) = err.strip().splitlines()
    assert given == code
    assert line.startswith("error: ")
    return line


ROOT = Path(__file__).parent.parent


def start_python(folder, *arguments, **options):
    """A process of its own, in which scripts and the tests' environments can be imported."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options,
    )


def make_agent(script, args, run, **options):
    """The agent of a script for the environment of a run, as `train` makes it."""
    with closing(script.make_envs(args, run, 1)) as envs:
        spaces = envs.single_observation_space, envs.single_action_space
    return script.Agent(args, *spaces, **options)


def network_of(script, observations, num_actions=2, **flags):
    """The network of a script for observations like these [B, ...], and Discrete actions."""
    high = 1 if observations.dtype == bool else 255
    space = gym.spaces.Box(0, high, observations.shape[1:], observations.dtype)
    return script.Agent(script.Args(**flags), space, gym.spaces.Discrete(num_actions)).network


def spaces_of(script, args, run):
    """What args.json has of the spaces of a run."""
    with closing(script.make_envs(args, run, 1)) as envs:
        return spaces.of_envs(envs)


def find_jax_env(script, args, run):
    """The environment of a run if it is compiled, otherwise None."""
    with closing(script.make_envs(args, run, 1)) as envs:
        return jax_envs.find_jax_env(envs, run)


def make_trainer(script, args, run):
    """The compiled programs of a run in an environment written in JAX."""
    with closing(script.make_envs(args, run, 1)) as envs:
        spaces = envs.single_observation_space, envs.single_action_space
        jax_env = jax_envs.find_jax_env(envs, run)
    return compiled.Trainer(partial(script.Agent, args, *spaces), jax_env, run)


def edited(script, *replaced):
    """A copy of a script, in a folder of its own, in which each `(old, new)` is replaced.

    It is a module with a file, so that its runs can be resumed and loaded. As in

        copy = edited(dqn_jax, ("wrappers: list = []", "wrappers: list = [Mine]"))
    """
    text = Path(script.__file__).read_text()
    for old, new in replaced:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder = Path(tempfile.mkdtemp(prefix="edited_", dir="."))  # each test has an empty folder
    file = folder.absolute() / f"{folder.name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = copy
    spec.loader.exec_module(copy)
    return copy


# Scripts that the diffs of docs/other_algorithms/ make, and those that they make them from.
OTHER_ALGORITHMS = {"c51_jax": "per_dqn_jax", "qr_dqn_jax": "per_dqn_jax", "td3_jax": "sac_jax"}


def diff_of(name):
    """The diff that makes one of OTHER_ALGORITHMS."""
    return ROOT / "docs" / "other_algorithms" / f"{name.removesuffix('_jax')}.diff"


def hunks(diff):
    """The (old, new) texts of a diff."""
    found = []
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        found.append((old, new))
    return found


@cache
def other_algorithm(name):
    """The module of one of OTHER_ALGORITHMS, which has a file."""
    text = (ROOT / f"{OTHER_ALGORITHMS[name]}.py").read_text()
    for old, new in hunks(diff_of(name).read_text()):
        text = text.replace(old, new)
    file = Path(tempfile.mkdtemp(prefix="other_", dir=".")).absolute() / f"{name}.py"
    file.write_text(text)
    return policies.import_script(file)


def flip_a_bit(file, name):
    """Changes a number of an array in a file of safetensors."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8:start])[name]["data_offsets"]
    data[start + begin] ^= 1
    file.write_bytes(data)


def read_events(folder):
    """Scalars {tag: [(step, value), ...]} and the text of `hyperparameters`, "" if it has none."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    text = [tag for tag in tags["tensors"] if tag.startswith("hyperparameters")]
    tensors = [e.tensor_proto for tag in text for e in events.Tensors(tag)]
    return scalars, tensors[-1].string_val[0].decode() if tensors else ""


# ------------------------------------------------------------------------------------------ buffers


def examples(percent):
    """A decorator: the test tries so many percent of the examples of the profile (conftest.py)."""
    return settings(max_examples=settings.default.max_examples * percent // 100)


def encode(ids):
    """Items [*ids.shape, ...] with the id in every field, so that a misaligned gather shows.

    encode(7) is {"id": 7, "obs": [7.0, 7.0, 7.0], "img": [[7, 7], [7, 7]]}.
    """
    ids = np.asarray(ids, np.int32)
    return {
        "id": ids,
        "obs": np.repeat(ids[..., None], 3, axis=-1).astype(np.float32),
        "img": np.tile((ids % 256).astype(np.uint8)[..., None, None], (2, 2)),
    }


def decode(items):
    """The ids of the items that `encode` made; fails unless all fields of an item agree."""
    ids = np.asarray(items["id"])
    assert_trees_equal(items, encode(ids))
    return ids


def assert_trees_equal(actual, expected):
    """Fails unless both have the same structure, shapes, dtypes and numbers."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def shift(item):
    """For `update`: the item whose id is greater by 1."""
    return jax.tree.map(lambda x: x + 1, item)


def shift_by(item, by):
    """For `update` with an argument: the item whose id is greater by `by`."""
    return jax.tree.map(lambda x: x + by.astype(x.dtype), item)


def start_at(state, cursor):
    """The empty state, as if `cursor` rows had been added and removed: to test its wrap."""
    return state._replace(cursor=jnp.int32(cursor))


class Windows(NamedTuple):
    """The settings of a uniform or prioritised replay, and in plain Python what it may draw.

    The ids of the items are row * N + environment, where rows count from 0 and never wrap.
    `Windows(6, envs=3, length=2)` holds 6 rows of 3 environments, and draws windows of 2 steps.
    After 4 rows, `valid(0, 4)` is [0, 1, ..., 8]: all of which the next row was added, too.
    """

    rows: int
    envs: int | None = None
    length: int | None = None
    period: int = 1
    factory: Callable = buffers.uniform_replay

    def prioritised(self):
        """The same settings of a prioritised replay."""
        return self._replace(factory=buffers.prioritised_replay)

    @property
    def num_envs(self):
        """N."""
        return self.envs or 1

    @property
    def lead(self):
        """The axes of one row: (N,), or () of single items."""
        return () if self.envs is None else (self.envs,)

    @property
    def max_size(self):
        """How many items the buffer holds."""
        return self.rows * self.num_envs

    @property
    def modulus(self):
        """What the cursor counts modulo."""
        return buffers.cursor_modulus(self.rows, self.num_envs)

    def replay(self, donate=True):
        """The buffer of these settings: the same one at each call, so that it compiles once."""
        return make_replay(self, donate)

    def ids(self, first, count):
        """Ids of rows `first`, ..., `first + count - 1`: [count, N], or [count] of single items."""
        ids = np.arange(first, first + count)[:, None] * self.num_envs
        return (ids + np.arange(self.num_envs)).reshape(count, *self.lead)

    def masked_ids(self, first, length, mask):
        """Ids of a batch of `length` rows, and how many of them `mask` keeps.

        Those kept are rows `first`, `first + 1`, ...; the ids of the others are -1.
        """
        keep = np.array([True] * length if mask is None else mask)
        number_kept = int(keep.sum())
        ids = np.full((length, *self.lead), -1)
        ids[keep] = self.ids(first, number_kept)
        return ids, number_kept

    def index_of(self, ids):
        """The index of each id: the same number until the cursor wraps."""
        return np.asarray(ids, np.int64) % (self.modulus * self.num_envs)

    def valid(self, first, total):
        """The first id of every window there is, when rows `first`, ..., `total - 1` were added."""
        starts = []
        for row in range(max(first, total - self.rows), total):
            is_complete = row + (self.length or 1) <= total
            if is_complete and row % self.period == 0:
                starts += [row * self.num_envs + env for env in range(self.num_envs)]
        return starts

    def window(self, start):
        """The ids [..., W] of the windows that start at each id of `start`, or of single items."""
        if self.length is None:
            return start
        return start[..., None] + self.num_envs * np.arange(self.length)

    def starts(self, windows):
        """The ids [B] at which windows [B, W] start: the inverse of `window`."""
        return windows if self.length is None else windows[:, 0]


@cache
def make_replay(windows, donate):
    """See `Windows.replay`."""
    return windows.factory(
        windows.max_size,
        num_envs=windows.envs,
        sequence_length=windows.length,
        period=windows.period,
        donate=donate,
    )


def describe(value):
    """For `ids=` of pytest.mark.parametrize: "6x3-window2-period1" for Windows(6, 3, 2).

    None for any other value, which pytest then names itself.
    """
    if not isinstance(value, Windows):
        return None
    name = f"{value.rows}x{value.num_envs}-window{value.length}-period{value.period}"
    if value.factory is buffers.prioritised_replay:
        name += "-prioritised"
    return name


def both(*windows):
    """These `Windows` of uniform replay, and then the same ones of prioritised replay."""
    return [*windows, *(each.prioritised() for each in windows)]


def batches(*lengths):
    """A strategy of hypothesis: (length, mask), where the mask is a list of that length or None."""

    def with_mask(length):
        masks = st.lists(st.booleans(), min_size=length, max_size=length)
        return st.tuples(st.just(length), st.none() | masks)

    return st.sampled_from(lengths).flatmap(with_mask)


def kept(rows, mask):
    """The rows, in a list, that a mask of `batches` keeps: all if it is None."""
    if mask is None:
        return list(rows)
    return [row for row, keep in zip(rows, mask, strict=True) if keep]


def as_mask(mask):
    """A mask of `batches` as `add_batch` takes it."""
    return None if mask is None else np.array(mask)
