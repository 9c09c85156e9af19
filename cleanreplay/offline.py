"""Reads --offline-data: a fixed dataset that part of each batch is sampled from.

As in RLPD: Ball et al. 2023, arXiv 2302.02948, section 4.1. The data are the folder of a run with
--save-experience, a vault, minari:DATASET, or an .npz file with the arrays that
`buffers.read_trajectories` reads. This module reads them as the state of a replay that holds all
steps; `replays.Mixed` samples from it.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import jax
import numpy as np
from gymnasium.spaces import Box
from tqdm import tqdm

import buffers
from cleanreplay import environments, spaces
from cleanreplay.errors import UsageError
from cleanreplay.flags import MINARI

ROUNDING = 2e-5  # actions up to so far beyond -1 and 1 are clipped: 1e-5 of the range


def read(agent: Any, run: Any, env_spaces: dict, item: Any) -> Any:
    """Reads --offline-data, as the state of a replay of items like `item`.

    `env_spaces` are those of the run, see `spaces.of_envs`. UsageError if the data do not fit.
    """
    args = agent.args
    name = args.offline_data
    if args.offline_fraction == 1:
        check_alone(args)
    elif round(args.offline_fraction * args.batch_size) in (0, args.batch_size):
        text = "must be 1, or leave at least one of batch_size for the data and one for the replay"
        raise UsageError(f"offline_fraction {text}, not {args.offline_fraction}")
    if name.endswith(".npz"):
        data = of_npz(agent, item, name)
    elif name.startswith(MINARI):
        dataset = open_minari(name)
        check_origin(name, about_minari(dataset), run, env_spaces)
        data = of_minari(agent, item, name, dataset, env_spaces.get("given"))
    else:
        vault = open_vault(name)
        check_origin(name, vault.about, run, env_spaces)
        data = of_vault(item, vault)
    fraction = getattr(args, "best_fraction", 1)
    if fraction < 1:
        data = best_episodes(item, name, data, fraction)
    data = data._replace(storage=checked(agent, name, data.storage))
    rows, num_envs = data.storage.valid.shape
    if rows < agent.replay.window:
        raise UsageError(f"offline_data: {name} has {rows} rows, too few for n_step, frame_stack")
    part = f"{args.offline_fraction:.0%} of each batch"
    tqdm.write(f"{part} is from {name}, which has {int(data.storage.valid.sum()):,} steps")
    return data


def check_alone(args: Any) -> None:
    """Raises UsageError for flags that exclude learning from data alone."""
    if args.save_experience:
        raise UsageError("save_experience: --offline-fraction 1 makes no steps to save")
    if jax.process_count() > 1:
        raise UsageError("distributed: --offline-fraction 1 makes no steps to share")


def best_episodes(item: Any, name: str, data: Any, fraction: float) -> Any:
    """Keeps the given fraction of the episodes with the highest returns; at least one.

    `data` is the state of a replay [rows, N, ...] of items like `item`. The result is the state of
    a replay of one environment. An unfinished episode counts, too, without its last step.
    """
    rows, num_envs = data.storage.valid.shape
    steps = jax.tree.map(
        lambda x: np.array(x).swapaxes(0, 1).reshape(-1, *x.shape[2:]), data.storage
    )
    last = rows * np.arange(1, num_envs + 1) - 1  # of each environment
    cut = last[steps.valid[last] & ~steps.terminated[last]]
    steps.valid[cut], steps.truncated[cut] = False, False
    steps.truncated[cut - 1] |= steps.valid[cut - 1] & ~steps.terminated[cut - 1]
    episode = np.cumsum(~steps.valid) - ~steps.valid  # an autoreset row ends an episode
    returns = np.bincount(episode[steps.valid], steps.reward[steps.valid])
    exists = np.unique(episode[steps.valid])
    best = exists[np.argsort(-returns[exists], kind="stable")]
    best = best[: max(1, round(fraction * len(best)))]
    least = returns[best[-1]]
    tqdm.write(f"{len(best):,} of {len(exists):,} episodes are kept, from return {least:.2f} on")
    kept = jax.tree.map(lambda x: x[np.isin(episode, best)], steps)
    return as_replay(item, name, kept._asdict())


def check_origin(name: str, about: dict, run: Any, env_spaces: dict) -> None:
    """Raises UsageError if bounds of actions differ, and reports if the environment differs.

    `about` may have `env_id`, `env_kwargs` and `spaces` of the data.
    """
    here = {"env_id": run.env_id.rpartition(":")[2], "env_kwargs": json.loads(run.env_kwargs)}
    there = about | {"env_id": about.get("env_id", run.env_id).rpartition(":")[2]}
    for what, value in here.items():
        if there.get(what, value) != value:
            tqdm.write(f"{name} has steps of {what} {there[what]}, and this run of {value}")
    pair = [found.get("action") for found in (about.get("spaces", {}), env_spaces)]
    boxes: list = [spaces.from_json(action) for action in pair if action and "low" in action]
    if len(boxes) < 2 or boxes[0].shape != boxes[1].shape:
        return
    data, run_box = boxes
    if not (np.allclose(data.low, run_box.low) and np.allclose(data.high, run_box.high)):
        raise UsageError(f"offline_data: {name} has actions in {data}, this run in {run_box}")


def checked(agent: Any, name: str, steps: Any) -> Any:
    """Returns steps [rows, N, ...] with actions within their bounds.

    UsageError for a number that is not finite, or an action that this run cannot take.
    """
    for leaf, values in steps._asdict().items():
        for x in jax.tree.leaves(values):
            if x.dtype.kind == "f" and not np.isfinite(x).all():
                row = np.argwhere(~np.isfinite(x))[0][0]
                raise UsageError(f"offline_data: {name}, row {row}: the {leaf} is not finite")
    action = np.asarray(steps.action)
    if action.dtype.kind == "f":
        least, largest = -1 - ROUNDING, 1 + ROUNDING
        bounds = "the bounds of the action space"
    else:
        least, largest = 0, agent.num_actions - 1
        bounds = f"the {agent.num_actions} actions of this run"
    beyond = (action < least) | (action > largest)
    if beyond.any():
        row = np.argwhere(beyond)[0][0]
        raise UsageError(f"offline_data: {name} has an action in row {row} beyond {bounds}")
    return steps._replace(action=steps.action.clip(-1, 1)) if action.dtype.kind == "f" else steps


def open_vault(name: str) -> Any:
    """Opens a vault, or the vault of a run."""
    from cleanreplay.vault import Vault

    path = Path(name)
    try:
        return Vault(path / "experience" if (path / "experience").exists() else path, create=False)
    except FileNotFoundError as error:
        text = f"{error}: a run has one with --save-experience"
        raise UsageError(f"offline_data: {text}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"offline_data: {error}") from error


def of_vault(item: Any, vault: Any) -> Any:
    """Reads the state of a replay with all steps of a vault."""
    try:
        return vault.load(item)[1]
    except (ValueError, OSError) as error:
        raise UsageError(f"offline_data: {error}") from error


def of_npz(agent: Any, item: Any, name: str) -> Any:
    """Reads the state of a replay with all steps of an .npz file."""
    try:
        rows = buffers.read_trajectories(name)
    except (ValueError, OSError) as error:
        raise UsageError(f"offline_data: {error}") from error
    rows["action"] = as_stored_actions(agent, item.action, rows["action"])
    return as_replay(item, name, rows)


def as_replay(item: Any, name: str, rows: dict[str, np.ndarray]) -> Any:
    """Makes the state of a replay of `rows` [rows, ...]. UsageError if they differ from `item`."""
    steps = {}
    for leaf, x in rows.items():
        like = getattr(item, leaf)
        what = f"offline_data: each {leaf} of {name}"
        if x.shape[1:] != like.shape:
            text = f"{list(x.shape[1:])}, and this run needs {list(like.shape)}"
            raise UsageError(f"{what} has shape {text}")
        steps[leaf] = as_dtype(x, like.dtype, what)[:, None]
    replay = buffers.uniform_replay(len(steps["valid"]), num_envs=1)
    return replay.add_batch(replay.init(item), item._replace(**steps))


def open_minari(name: str) -> Any:
    """Loads a dataset of Minari, minari:NAME."""
    try:
        import minari

        return minari.load_dataset(name.removeprefix(MINARI), download=True)
    except ModuleNotFoundError as error:
        text = f'{name} needs {error.name}: pip install "minari[hdf5]"'
        raise UsageError(f"offline_data: {text}") from error
    except Exception as error:  # neither on this disk nor elsewhere
        raise UsageError(f"offline_data: {name} cannot be loaded: {error}") from error


def about_minari(dataset: Any) -> dict:
    """Returns the environment and the action space of a dataset, in the format of a vault."""
    action = spaces.to_json(dataset.action_space)
    spec = dataset.env_spec
    return {"spaces": {"action": action}} | ({"env_id": spec.id} if spec else {})


def reference_returns(args: Any) -> tuple[float, float]:
    """Returns the returns for which eval/normalized is 0 and 100, or NaN.

    A flag precedes what a Minari dataset has (`minari.get_normalized_score`).
    """
    given = (args.random_return, args.expert_return)
    if not args.offline_data.startswith(MINARI) or np.isfinite(given).all():
        return given
    metadata = open_minari(args.offline_data).storage.metadata
    known = [metadata.get(name) for name in ("ref_min_score", "ref_max_score")]
    low, high = np.where(np.isfinite(given), given, np.array(known, float))  # None becomes NaN
    return float(low), float(high)


def of_minari(agent: Any, item: Any, name: str, dataset: Any, given: dict | None) -> Any:
    """Reads the state of a replay with all steps of a Minari dataset.

    An autoreset row follows each episode. A Dict of observations is flattened in the order of
    `given`, see `spaces.of_envs`, because the order in Minari differs.
    """
    found = dataset.iterate_episodes()
    episodes = [steps_of(agent, item, dataset, episode, given) for episode in found]
    rows = {leaf: np.concatenate([episode[leaf] for episode in episodes]) for leaf in episodes[0]}
    return as_replay(item, name, rows)


def as_dtype(x: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """Converts numbers to a dtype, as training converts those of an environment.

    UsageError if conversion to integers or bools would change them.
    """
    with np.errstate(all="ignore"):
        result = x.astype(dtype)
    if dtype.kind != "f" and (result != x).any():
        row = np.argwhere(result != x)[0][0]
        wrong = x[result != x][0]
        raise UsageError(f"{what} must be {dtype} without rounding, not {wrong} as in row {row}")
    return result


def steps_of(
    agent: Any, item: Any, dataset: Any, episode: Any, given: dict | None
) -> dict[str, np.ndarray]:
    """Returns the rows [L + 1, ...] of an episode of L steps, as the agent stores them."""
    observation = as_flat(dataset.observation_space, episode.observations, given)
    length = len(episode.rewards)
    actions = np.asarray(episode.actions)
    lengths = (len(observation), len(actions), len(episode.terminations))
    if lengths != (length + 1, length, length):
        counts = f"{lengths[0]} observations, {lengths[1]} actions and {length} rewards"
        raise UsageError(
            f"offline_data: episode {episode.id} has {counts}, not one observation more"
        )
    action = as_stored_actions(agent, item.action, actions)
    is_last = np.arange(length + 1) == length - 1
    terminated = np.append(episode.terminations, False)
    return {
        "observation": observation,
        "action": np.concatenate([action, action[-1:]]),
        "reward": np.append(episode.rewards, 0),
        "terminated": terminated,
        "truncated": is_last & ~terminated,  # also where the collector stopped
        "valid": np.arange(length + 1) < length,
    }


def as_flat(there: gym.Space, x: Any, given: dict | None) -> np.ndarray:
    """Flattens observations to [L, F] as a run does, except those of a Box [L, ...]."""
    if isinstance(there, Box):
        return np.asarray(x)
    here = spaces.from_json(given) if given else there
    with suppress(ValueError):  # other entries
        if not isinstance(here, Box):
            return environments.flat(here, x)
    raise UsageError(f"offline_data: the data have observations {there}, this run {here}")


def as_stored_actions(agent: Any, like: Any, actions: np.ndarray) -> np.ndarray:
    """Inverts `to_env_action`: turns actions of the environment [L, ...] into stored actions."""
    kinds = {"i": "iu", "f": "f"}[like.dtype.kind]
    if actions.dtype.kind not in kinds or actions.shape[1:] != like.shape:
        has = f"{actions.dtype} {list(actions.shape[1:])}"
        wants = f"{like.dtype} {list(like.shape)}"
        raise UsageError(f"offline_data: the data have actions {has}, this run {wants}")
    if like.dtype.kind == "i":
        return actions - agent.to_env_action(0)
    low = agent.to_env_action(np.full(like.shape, -1.0, np.float32))
    high = agent.to_env_action(np.full(like.shape, 1.0, np.float32))
    is_free = high > low  # otherwise the only action is stored as 0
    return np.where(is_free, 2 * (actions - low) / np.where(is_free, high - low, 1) - 1, 0)
