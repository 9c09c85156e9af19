"""Flags and results of short runs, shared by several test files."""

import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir, closing, redirect_stdout
from dataclasses import fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import settings
from quick import QUICK
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cleanreplay import agent_file, checkpoints, compiled, disk, jax_envs, policies, spaces
from cleanreplay.flags import read_flags
from cleanreplay.run_folder import RunFolder

# Cases of a parameter, see the markers in pyproject.toml.
slow = partial(pytest.param, marks=pytest.mark.slow)

# Flags with which a run takes a second or two.
SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)
SMALL_PPO = dict(total_timesteps=64, num_steps=8, num_minibatches=1, update_epochs=1)
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)
# Flags of DQN, with two checkpoints and an agent that was evaluated.
COUNTED = COUNTER | SMALL_DQN | dict(buffer_size=400, num_envs=2, n_step=3, gamma=0.5)
COUNTED |= dict(hidden_sizes=(7, 5), checkpoint_interval=100, eval_episodes=1)

# Runs with two checkpoints that a resume continues bit for bit: episodes have one step, so they end
# at the checkpoint, and actions do not depend on whether the last iteration has been learned.
ONCE = COUNTER | dict(env_id="environments:Once-v0", total_timesteps=40, checkpoint_interval=20)
ONCE |= dict(learning_starts=10, batch_size=4, buffer_size=30, end_e=1.0)
ONCE_PPO = COUNTER | SMALL_PPO | dict(total_timesteps=60, checkpoint_interval=32, num_envs=2)
ONCE_PPO |= dict(env_id="environments:OnceBox-v0")
SHORT = {"dqn_jax": ONCE | dict(target_network_frequency=20), "ppo_jax": ONCE_PPO}


def one_line(result, code=2):
    """Returns the only line on stderr of `run_main`. Fails unless the exit code is `code`."""
    given, _, err = result
    (line,) = err.strip().splitlines()
    assert given == code
    assert line.startswith("error: ")
    return line


ROOT = Path(__file__).parent.parent


def start_python(folder, *arguments, env=(), **options):
    """Starts a process in which scripts and the tests' environments can be imported.

    It compiles quickly, for one device. `env` are additional environment variables.
    """
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | QUICK | path | dict(env),
        **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) | options,
    )


def make_agent(script, args, run, **options):
    """Makes the agent of a script for the environment of a run, as `train` does."""
    with closing(script.make_envs(args, run, 1)) as envs:
        spaces = envs.single_observation_space, envs.single_action_space
    return script.Agent(args, *spaces, **options)


def network_of(script, observations, num_actions=2, **flags):
    """Makes the network of a script for observations like these [B, ...] and Discrete actions."""
    high = 1 if observations.dtype == bool else 255
    space = gym.spaces.Box(0, high, observations.shape[1:], observations.dtype)
    return script.Agent(script.Args(**flags), space, gym.spaces.Discrete(num_actions)).network


class SavedRun(NamedTuple):
    """A run that `saved_run` made. Tests share its folder: change only that of `copied()`."""

    script: Any
    args: Any
    run: Any
    state: Any
    returns: Any
    folder: Path

    def copied(self):
        """Copies the run to a new folder, with flags that resume it."""
        folder = Path("runs", self.folder.name).absolute()
        shutil.copytree(self.folder, folder)
        return self._replace(folder=folder, run=replace(self.run, resume=str(folder)))

    def train(self, **flags):
        """Resumes the run, or trains it anew, with some flags changed. Returns the new run."""
        args, run = flags_of(self.script, **vars(self.args) | vars(self.run) | flags)
        return SavedRun(self.script, args, run, *self.script.train(args, run))

    def agent(self, **flags):
        """Makes its agent, with some flags of the algorithm changed."""
        return make_agent(self.script, replace(self.args, **flags), self.run)


def flags_of(script, **flags):
    """Makes Args and Run of a script from flags of both."""
    names = flags.keys() & {field.name for field in fields(script.Run)}
    run = {name: flags.pop(name) for name in names}
    return script.Args(**flags), script.Run(**run)


def only_run(parent="."):
    (folder,) = Path(parent, "runs").absolute().iterdir()
    return folder


def newest_checkpoint(folder, script):
    """Restores the newest checkpoint of a run: its step, State and metadata."""
    run, args = read_flags(folder, script.Run, script.Args)
    like = jax.jit(make_agent(script, args, run).init)(jax.random.PRNGKey(0))
    return checkpoints.Checkpoints(folder).restore(like)


def gradient_steps(state):
    return int(optax.tree_utils.tree_get(state.opt_state, "count"))


@cache
def saved_run(script, **flags):
    """Trains with these flags of both kinds, or by default those of SHORT, once per process."""
    args, run = flags_of(script, **flags or SHORT[script.__name__])
    with chdir(tempfile.mkdtemp(prefix="saved_", dir=".")):
        return SavedRun(script, args, run, *script.train(args, run))


def save_agent(script, env_id=COUNTER["env_id"], change=lambda params: None, **flags):
    """Writes an untrained agent as the best one of a run in the working directory.

    Returns the agent and the parameters of its policy. `change` may change a State's `params`.
    """
    args, run = flags_of(script, env_id=env_id, **flags)
    agent = make_agent(script, args, run)
    state = jax.tree.map(np.array, jax.jit(agent.init)(jax.random.PRNGKey(0)))
    change(getattr(state, "params", None))
    folder = RunFolder(agent, run, Path(), script.__file__, [], spaces_of(script, args, run))
    Path("args.json").write_text(disk.to_json(folder.about))
    best = agent_file.BestAgent(Path(), folder.about)
    best.save_if_better(100, folder.policy_part(state), 1.0)
    return agent, agent.policy_params(state)


def spaces_of(script, args, run):
    with closing(script.make_envs(args, run, 1)) as envs:
        return spaces.of_envs(envs)


def find_jax_env(script, args, run):
    """Returns the environment of a run if it is compiled, otherwise None."""
    with closing(script.make_envs(args, run, 1)) as envs:
        return jax_envs.find_jax_env(envs, run)


def train_compiled(script, args, run, folder, stop=None):
    """Trains in a compiled program, in a folder. Returns its objects, results and output."""
    seen = {}
    printed = io.StringIO()
    train_loop = compiled.train_loop

    def keep(trainer, *rest):
        runner, returns = train_loop(trainer, *rest)
        seen.update(trainer=trainer, runner=runner)
        return runner, returns

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        patch.setattr(compiled, "train_loop", keep)
        state, returns, folder = script.train(args, run, stop)
    seen.update(state=state, returns=returns, folder=folder, printed=printed.getvalue())
    return SimpleNamespace(**seen)


def edited(script, *replaced):
    """Imports a copy of a script in a new folder, in which each `(old, new)` is replaced.

    The module has a file, so that its runs can be resumed and loaded.
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


# Scripts that the diffs in docs/other_algorithms/ make, and the scripts that they change.
OTHER_ALGORITHMS = {"c51_jax": "per_dqn_jax", "qr_dqn_jax": "per_dqn_jax", "td3_jax": "sac_jax"}
OTHER_ALGORITHMS |= {"td3_bc_jax": "iql_jax", "cql_jax": "dqn_jax", "rnd_ppo_jax": "ppo_jax"}
OTHER_ALGORITHMS |= {"munchausen_dqn_jax": "dqn_jax", "gru_ppo_jax": "recurrent_ppo_jax"}
OTHER_ALGORITHMS |= {"attention_ppo_jax": "recurrent_ppo_jax"}


def diff_of(name):
    return ROOT / "docs" / "other_algorithms" / f"{name.removesuffix('_jax')}.diff"


def hunks(diff):
    """Lists the (old, new) texts of a diff."""
    found = []
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        new = "".join(line[1:] for line in lines if line[0] != "-")
        found.append((old, new))
    return found


@cache
def other_algorithm(name):
    text = (ROOT / f"{OTHER_ALGORITHMS[name]}.py").read_text()
    for old, new in hunks(diff_of(name).read_text()):
        text = text.replace(old, new)
    file = Path(tempfile.mkdtemp(prefix="other_", dir=".")).absolute() / f"{name}.py"
    file.write_text(text)
    return policies.import_script(file)


def flip_a_bit(file, name):
    """Flips a bit of an array in a file of safetensors."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    begin, _ = json.loads(data[8:start])[name]["data_offsets"]
    data[start + begin] ^= 1
    file.write_bytes(data)


def replace_in(file, old, new):
    file.write_bytes(file.read_bytes().replace(old, new, 1))


# Damage to a file of arrays, and a word of the error that it causes.
DAMAGE = {
    "replaced": (lambda file: file.write_bytes(b"damaged"), "Error"),
    "empty": (lambda file: file.write_bytes(b""), "Error"),
    "cut off": (lambda file: file.write_bytes(file.read_bytes()[:-5]), "Error"),
    "a word": (lambda file: replace_in(file, b"total_timesteps", b"total_timestepz"), "checksum"),
}


def read_events(folder):
    """Reads scalars {tag: [(step, value), ...]} and the text `hyperparameters`, "" if missing."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    text = [tag for tag in tags["tensors"] if tag.startswith("hyperparameters")]
    tensors = [e.tensor_proto for tag in text for e in events.Tensors(tag)]
    return scalars, tensors[-1].string_val[0].decode() if tensors else ""


def logged_steps(folder, tag="charts/SPS"):
    return [step for step, _ in read_events(folder)[0].get(tag, [])]


def examples(percent):
    """Decorates a test that tries so many percent of the profile's examples (conftest.py)."""
    return settings(max_examples=settings.default.max_examples * percent // 100)


def assert_trees_equal(actual, expected):
    """Fails unless both have the same structure, shapes, dtypes and numbers."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
