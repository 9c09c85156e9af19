"""Reads data that exist before a run: --offline-data, of which part of each batch is drawn.

As in RLPD: Ball et al. 2023, arXiv 2302.02948, section 4.1. The data are the folder of a run with
--save-experience, a vault of such steps, or minari:DATASET. Here they are read, as the state of a
replay that holds all of them; `replays.Mixed` draws from it.
"""

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from tqdm import tqdm

import buffers
from cleanreplay.errors import UsageError
from cleanreplay.flags import MINARI


def read(agent: Any, run: Any, env_spaces: dict, item: Any) -> Any:
    """Reads the state of a replay of items like `item`, with the data of --offline-data.

    `env_spaces` are those of the run, see `spaces.of_envs`.
    """
    args = agent.args
    name = args.offline_data
    if round(args.offline_fraction * args.batch_size) in (0, args.batch_size):
        text = "must leave at least one of batch_size for the data, and one for the replay"
        raise UsageError(f"offline_fraction {text}, not {args.offline_fraction}")
    if name.startswith(MINARI):
        data = of_minari(agent, item, name, env_spaces.get("entries"))
    else:
        data = of_vault(item, run, name)
    steps = data.storage
    check_actions(agent, name, steps.action)
    rows, num_envs = steps.valid.shape
    if rows < agent.replay.window:
        raise UsageError(f"offline_data: {name} has {rows} rows, too few for n_step, frame_stack")
    part = f"{args.offline_fraction:.0%} of each batch"
    tqdm.write(f"{part} is from {name}, which has {int(steps.valid.sum()):,} steps")
    return data


def check_actions(agent: Any, name: str, action: Any) -> None:
    """Raises UsageError if Discrete actions are not among those of the run."""
    number = getattr(agent, "num_actions", None)
    if action.dtype.kind == "i" and (action.min() < 0 or action.max() >= number):
        given = f"from {action.min()} to {action.max()}"
        raise UsageError(f"offline_data: {name} has actions {given}, and this run has {number}")


def of_vault(item: Any, run: Any, name: str) -> Any:
    """Reads the state of a replay with all steps of a vault, or of that of a run."""
    from cleanreplay.vault import Vault

    path = Path(name)
    try:
        vault = Vault(path / "experience" if (path / "experience").exists() else path, create=False)
        _, state = vault.load(item)
    except FileNotFoundError as error:
        text = f"{error}: a run has one with --save-experience"
        raise UsageError(f"offline_data: {text}") from error
    except (ValueError, OSError) as error:
        raise UsageError(f"offline_data: {error}") from error
    env_id = vault.about.get("env_id", run.env_id)
    if env_id != run.env_id:
        tqdm.write(f"{name} has steps of {env_id}, and this run is in {run.env_id}")
    return state


def of_minari(agent: Any, item: Any, name: str, entries: dict | None) -> Any:
    """Reads the state of a replay with all steps of a Minari dataset.

    Each episode is followed by a row that only resets. A Dict of observations is flattened in the
    order of `entries`, see `spaces.entries_of`: Minari keeps its own.
    """
    try:
        import minari

        dataset: Any = minari.load_dataset(name.removeprefix(MINARI), download=True)
    except ModuleNotFoundError as error:
        text = f'{name} needs {error.name}: pip install "minari[hdf5]"'
        raise UsageError(f"offline_data: {text}") from error
    except Exception as error:  # it is not on this disk, and was not found elsewhere
        raise UsageError(f"offline_data: {name} cannot be loaded: {error}") from error
    found = dataset.iterate_episodes()
    episodes = [steps_of(agent, item, dataset, episode, entries) for episode in found]
    steps = {}
    for leaf, first in episodes[0].items():
        like = getattr(item, leaf)
        rows = np.concatenate([episode[leaf] for episode in episodes])
        if first.shape[1:] != like.shape:
            text = f"{list(first.shape[1:])}, and this run needs {list(like.shape)}"
            raise UsageError(f"offline_data: each {leaf} of {name} has shape {text}")
        steps[leaf] = rows.astype(like.dtype)
    replay = buffers.uniform_replay(len(steps["valid"]), num_envs=1)
    rows = item._replace(**{leaf: x[:, None] for leaf, x in steps.items()})
    return replay.add_batch(replay.init(item), rows)


def steps_of(
    agent: Any, item: Any, dataset: Any, episode: Any, entries: dict | None
) -> dict[str, np.ndarray]:
    """Returns the rows of an episode of L steps [L + 1, ...], as the agent stores them."""
    observation = as_flat(dataset.observation_space, episode.observations, entries)
    length = len(episode.rewards)
    actions = np.asarray(episode.actions)
    action = as_stored_actions(agent, item.action, dataset.action_space, actions)
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


def as_flat(space: gym.Space, x: Any, entries: dict | None) -> np.ndarray:
    """Keeps observations [L, ...] of a Box, and flattens others to [L, F] as Gymnasium does."""
    if isinstance(space, gym.spaces.Box):
        return np.asarray(x)
    if isinstance(space, gym.spaces.Dict):
        if not entries or set(entries) != set(space.spaces):
            raise UsageError(f"offline_data: the data have observations {space}, this run others")
        parts = [as_flat(space[name], x[name], inner) for name, inner in entries.items()]
        return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    rows: list = [gym.spaces.flatten(space, row) for row in x]
    return np.stack(rows)


def as_stored_actions(agent: Any, like: Any, space: gym.Space, actions: np.ndarray) -> np.ndarray:
    """Turns actions of the environment [L, ...] into what the agent stores: the inverse of
    `to_env_action`.
    """
    if isinstance(space, gym.spaces.Discrete) and like.dtype.kind == "i":
        return actions - agent.to_env_action(0)
    is_box = isinstance(space, gym.spaces.Box) and like.dtype.kind == "f"
    if not is_box or actions.shape[1:] != like.shape:
        raise UsageError(f"offline_data: the data have actions {space}, this run others")
    low = agent.to_env_action(np.full(like.shape, -1.0, np.float32))
    high = agent.to_env_action(np.full(like.shape, 1.0, np.float32))
    return 2 * (actions - low) / (high - low) - 1
