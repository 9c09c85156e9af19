"""Measures speed and time to a threshold of the scripts, beside Stable-Baselines3 and SBX.

    pip install -e ".[bench]" && python benchmarks/training.py --json training.json

Each configuration runs in its own process, in turns, `--rounds` times; the round is the seed. Runs
are kept in `--folder`: stopped and started again, it continues. Prints a line for each: environment
steps per second of the whole run, compilation included, and of its second half; their ratios to
Stable-Baselines3 with the fewest environments, in the same round; the speed of the second half as a
share of that of the environments alone with random actions; steps, and seconds since the process
began, until the mean return of 100 episodes reached the threshold. The peers have our scripts'
hyperparameters, except that their DQN has the Huber loss, SBX's PPO does not clip the value loss,
and the critics of their SAC have the learning rate of the policy.

    python benchmarks/training.py --only dqn_jax --add "dqn_jax, double" "dqn_jax.py --double-q"

adds a configuration: a script of this repository with its flags, or any other command that takes
--seed and --total-timesteps, and writes charts/SPS and charts/episodic_return under runs/.
"""

import argparse
import importlib.util
import json
import re
import shlex
import sys
import time
import timeit
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from machine import MISSING, ROOT, header, ratios, spread, table, write_json
from returns import THRESHOLDS, agents, curve, new_run, reached, scalars

import ppo_jax
from cleanreplay.jax_envs import JaxEnvs, find_jax_env

PEERS = {"sb3": ("Stable-Baselines3", "stable_baselines3"), "sbx": ("SBX", "sbx")}
HEADS = [
    *("configuration", "whole run", "ratio", "second half", "ratio", "of the environments alone"),
    *("thousand steps to threshold", "seconds to it", "return at the end"),
]
Configuration = namedtuple("Configuration", "name command timesteps", defaults=[500_000])
# Environment steps per second of all agents. Infinity: never reached. Seconds of the whole process.
Outcome = namedtuple("Outcome", "whole second_half steps_to_threshold seconds_to_threshold final")


def flag(command: str, name: str, default: str) -> str:
    """Returns the value of a flag in a command, or the default."""
    words = shlex.split(command.replace(f"{name}=", f"{name} "))
    return words[words.index(name) + 1] if name in words else default


def algorithm_of(command: str) -> str:
    """Returns the algorithm that a command trains: ppo, sac or dqn."""
    return next((name for name in ("ppo", "sac") if name in command), "dqn")


def num_envs_of(command: str) -> int:
    """Returns the number of environments of a command: by default 4 for PPO, 1 for DQN and SAC."""
    return int(flag(command, "--num-envs", "4" if algorithm_of(command) == "ppo" else "1"))


def sized(name: str, command: str, num_envs: int, timesteps: int = 500_000) -> Any:
    """Makes the configuration of a command with `num_envs` environments."""
    seeds = flag(command, "--num-seeds", "1")
    name += f", {num_envs} environment" + "s" * (num_envs > 1)
    name += f", {seeds} agents" * (seeds != "1")
    return Configuration(name, f"{command} --num-envs {num_envs}", timesteps)


# Compiled: phys2d/CartPole-v1 differs in its physics, not in size. Runs of seconds are made longer.
COMPILED = ".py --env-id phys2d/CartPole-v1 --log-interval 10000"
PENDULUM = " --env-id Pendulum-v1"
PEER = "benchmarks/training.py --peer {} --algorithm {}"
CONFIGURATIONS: list[Configuration] = [
    *(sized(x, f"{x}.py", n) for x in ("dqn_jax", "per_dqn_jax") for n in (1, 8, 64)),
    *(sized(f"{PEERS[x][0]} DQN", PEER.format(x, "dqn"), n) for x in PEERS for n in (1, 8)),
    *(sized("ppo_jax", "ppo_jax.py", n) for n in (1, 4, 8)),
    sized("ppo_jax", "ppo_jax.py", 64, 2_000_000),
    *(sized(f"{PEERS[x][0]} PPO", PEER.format(x, "ppo"), n) for x in PEERS for n in (4, 64)),
    *(sized("dqn_jax, compiled", "dqn_jax" + COMPILED + x, 10) for x in ("", " --num-seeds 10")),
    sized("per_dqn_jax, compiled", "per_dqn_jax" + COMPILED, 10),
    sized("ppo_jax, compiled", "ppo_jax" + COMPILED, 4, 2_000_000),
    sized("ppo_jax, compiled", "ppo_jax" + COMPILED + " --num-seeds 10", 4),
    sized("ppo_jax, compiled", "ppo_jax" + COMPILED, 64, 5_000_000),
    *(sized("sac_jax", "sac_jax.py --log-interval 1000" + PENDULUM, n, 20_000) for n in (1, 8)),
    *(
        sized(f"{PEERS[x][0]} SAC", PEER.format(x, "sac") + PENDULUM, n, 20_000)
        for x in PEERS
        for n in (1, 8)
    ),
]


def speed(steps: np.ndarray, times: np.ndarray) -> float:
    """Computes steps per second of the second half of a run, from its points of charts/SPS."""
    middle = int(np.searchsorted(steps, steps[-1] / 2))
    if middle >= len(steps) - 1:
        raise ValueError(f"too few points of charts/SPS, got {len(steps)} in all: train for longer")
    return float((steps[-1] - steps[middle]) / (times[-1] - times[middle]))


def read(folders: list[Path], start: float, threshold: float) -> Outcome:
    """Reads the outcome of a process: the sum of its agents' speeds, the median of the rest."""
    each = []
    for folder in folders:
        points = scalars(folder, "charts/SPS")
        steps, times = np.array([(point.step, point.wall_time) for point in points]).T
        learning, seconds = curve(folder), np.inf
        hit = reached(learning, threshold)
        if hit < np.inf:  # a peer may log several points at a step: the last one counts
            last = int(np.searchsorted(learning.steps, hit, side="right")) - 1
            seconds = scalars(folder, "charts/episodic_return")[last].wall_time - start
        each.append((points[-1].value, speed(steps, times), hit, seconds, learning.means[-1]))
    whole, second_half, *rest = zip(*each, strict=True)
    return Outcome(sum(whole), sum(second_half), *map(np.median, rest))


def run(configuration: Configuration, args: argparse.Namespace, seed: int) -> Outcome:
    """Runs a configuration unless it was run before. Returns its outcome."""
    command, total = configuration.command, args.total_timesteps or configuration.timesteps
    env_id, words = flag(command, "--env-id", args.env_id), shlex.split(command)
    if words[0].endswith(".py"):
        words = [sys.executable, str(ROOT / words[0]), *words[1:]]
    for name, value in {"--env-id": env_id, "--seed": seed, "--total-timesteps": total}.items():
        words += [] if flag(command, name, "") else [name, str(value)]  # its own flags stay
    label = re.sub(r"[^\w.]+", "-", f"{command} {env_id} {total}").strip("-")
    work = (args.folder / label / str(seed)).resolve()
    done = work / "done.json"
    if not done.exists():
        work.mkdir(parents=True, exist_ok=True)
        start = time.time()
        done.write_text(json.dumps({"start": start, "folder": new_run(words, work).name}))
    start, folder = json.loads(done.read_text()).values()
    return read(agents(work / "runs" / folder), start, THRESHOLDS.get(env_id, np.inf))


def environments_alone(env_id: str, num_envs: int, seconds: float = 3.0) -> float:
    """Measures environment steps per second with random actions, compiled if written in JAX."""
    run, args = ppo_jax.Run(env_id=env_id), ppo_jax.Args(num_envs=num_envs)  # for any action space
    with closing(ppo_jax.make_envs(args, run, 1)) as one:
        agent = ppo_jax.Agent(args, one.single_observation_space, one.single_action_space)
        jax_env = find_jax_env(one, run)
    envs = ppo_jax.make_envs(args, run, num_envs)
    actions = np.stack([envs.action_space.sample() for _ in range(1_000)])
    envs.reset(seed=0)
    if jax_env:
        walker: Any = SimpleNamespace(
            args=args,
            example_step=agent.example_step,
            rollout_shape=actions.shape[:2],
            act=lambda actions, _, key, step: actions[step // num_envs],
            to_env_action=lambda action: action,
        )
        func_env, limit = jax_env.unwrapped.func_env, jax_env.spec.max_episode_steps
        jax_envs = JaxEnvs(walker, func_env, limit)
        key, collect = jax.random.PRNGKey(0), jax.jit(jax_envs.collect)
        state = jax_envs.reset(key, num_envs)

    def walk() -> Any:
        if jax_env:
            return jax.block_until_ready(collect(state, actions, key, 0))
        return [envs.step(action) for action in actions]

    number = max(1, round(seconds / timeit.repeat(walk, number=1, repeat=2)[1]))  # [0] compiles
    return number * len(actions) * num_envs / timeit.timeit(walk, number=number)


FLAGS = {  # of ours those that the peers have, too, under the peers' names
    "dqn": "learning_rate buffer_size learning_starts batch_size tau gamma exploration_fraction "
    "train_freq=train_frequency target_update_interval=target_network_frequency "
    "exploration_initial_eps=start_e exploration_final_eps=end_e",
    "ppo": "n_steps=num_steps n_epochs=update_epochs gamma gae_lambda clip_range=clip_coef "
    "normalize_advantage=norm_adv ent_coef vf_coef max_grad_norm",
    "sac": "learning_rate=policy_lr buffer_size learning_starts batch_size tau gamma "
    "train_freq=train_frequency",
}


def settings_of_peer(peer: str, algorithm: str, num_envs: int) -> dict[str, Any]:
    """Returns arguments that give a peer's agent our hyperparameters."""
    ours: Any = importlib.import_module(f"{algorithm}_jax").Args()
    names = (name.split("=") for name in FLAGS[algorithm].split())
    settings: dict = {name[0]: getattr(ours, name[-1]) for name in names}
    own: dict[str, Any] = {}  # of Stable-Baselines3 alone
    if algorithm != "ppo":  # as many gradient steps per environment step as with one environment
        layers = [120, 84] if algorithm == "dqn" else [256, 256]
        settings |= dict(gradient_steps=num_envs, policy_kwargs={"net_arch": layers})
    if algorithm == "dqn":
        own = {"max_grad_norm": np.inf}  # its default clips gradients, CleanRL's does not
    if algorithm == "ppo":
        settings |= dict(learning_rate=lambda remaining: ours.learning_rate * remaining)
        settings["batch_size"] = ours.num_steps * num_envs // ours.num_minibatches
        settings["policy_kwargs"] = {"ortho_init": True}
        own = {"clip_range_vf": ours.clip_coef}
    return settings | (own if peer == "sb3" else {})


def log_as_ours(log: Any, num_envs: int) -> Callable[[dict, dict], bool]:
    """Makes a callback for a peer, which logs speed and mean episodes every 1,000 steps."""
    ended: list[dict[str, float]] = []  # episodes since the last point
    start = time.time()

    def on_step(training: dict, _: dict) -> bool:
        step = training["self"].num_timesteps
        ended.extend(x["episode"] for x in training["infos"] if "episode" in x)
        if step // 1_000 > (step - num_envs) // 1_000:
            metrics, number = {"charts/SPS": step / (time.time() - start)}, len(ended) or np.nan
            metrics["charts/episodic_return"] = sum(x["r"] for x in ended) / number
            metrics["charts/episodic_length"] = sum(x["l"] for x in ended) / number
            ended.clear()
            log.write(step, metrics)  # without NaN
        return True

    return on_step


def train_peer(args: argparse.Namespace) -> None:
    """Trains with Stable-Baselines3 or SBX, with our hyperparameters and our logs."""
    from stable_baselines3.common.env_util import make_vec_env

    settings = settings_of_peer(args.peer, args.algorithm, args.num_envs)
    folder = Path(f"runs/{args.peer}__{time.time():.0f}")
    about: Any = SimpleNamespace(args=args, steps_per_iteration=args.num_envs)
    log = ppo_jax.Log(about, ppo_jax.Run(), folder, [])
    log.open(first_step=0, quiet=True)
    envs = make_vec_env(args.env_id, args.num_envs, args.seed)
    make = getattr(importlib.import_module(PEERS[args.peer][1]), args.algorithm.upper())
    model = make("MlpPolicy", envs, **settings, seed=args.seed, device="cpu")
    with log:
        model.learn(args.total_timesteps, callback=log_as_ours(log, args.num_envs))


def beside(configuration: Configuration, chosen: list[Configuration]) -> Any:
    """Finds Stable-Baselines3's configuration with the same algorithm, fewest environments."""
    env_id, algorithm = (
        flag(configuration.command, "--env-id", ""),
        algorithm_of(configuration.command),
    )
    peers = [
        c for c in chosen if "--peer sb3" in c.command and algorithm_of(c.command) == algorithm
    ]
    peers = [c for c in peers if flag(c.command, "--env-id", "") == env_id]
    return min(peers, key=lambda c: num_envs_of(c.command), default=None)


def row(name: str, own: list[Outcome], base: list[Outcome], alone: list[float]) -> list[str]:
    cells, columns = [name], [list(x) for x in zip(*own, strict=True)]
    for i, mine in enumerate(columns[:2]):
        theirs = [outcome[i] for outcome in base]
        cells += [spread(mine), spread(ratios(mine, theirs), 2) if base else ""]
    cells += [f"{100 * np.median(ratios(columns[1], alone)):.1f}%"]
    cells += [spread([steps / 1_000 for steps in columns[2]])]
    return [*cells, spread(columns[3], 1), spread(columns[4], 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[""], help="run names with one of these words")
    parser.add_argument("--add", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, help="steps of each, instead of its own")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "training")
    parser.add_argument("--json", type=Path, help="also write all results to this file")
    for name, kind in {"peer": str, "algorithm": str, "num-envs": int, "seed": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)  # for `train_peer`
    args = parser.parse_args()
    if args.peer:
        return train_peer(args)
    chosen = [c for c in CONFIGURATIONS if any(word in c.name for word in args.only)]
    chosen += [Configuration(*pair) for pair in args.add]
    packages = ["jax", "flax", "gymnasium", "numpy", "torch", "stable-baselines3", "sbx-rl"]
    text, about = header(packages)
    print(text)
    missing = [f"--peer {k}" for k, x in PEERS.items() if not importlib.util.find_spec(x[1])]
    present = [c for c in chosen if not any(peer in c.command for peer in missing)]
    where = {c: (flag(c.command, "--env-id", args.env_id), num_envs_of(c.command)) for c in present}
    outcomes: dict[Configuration, list[Outcome]] = {c: [] for c in present}
    alone: dict[tuple[str, int], list[float]] = {place: [] for place in where.values()}
    for seed in range(1, args.rounds + 1):
        for place, speeds in alone.items():
            with get_context("spawn").Pool(1) as new:
                speeds.append(new.apply(environments_alone, place))
        for c in present:
            outcomes[c].append(run(c, args, seed))
            print(f"round {seed}: {c.name}: {outcomes[c][-1].whole:,.0f} steps/s", file=sys.stderr)
    rows = [[c.name, MISSING, *[""] * (len(HEADS) - 2)] for c in chosen]
    for c in present:
        base = outcomes.get(beside(c, present), [])
        rows[chosen.index(c)] = row(c.name, outcomes[c], base, alone[where[c]])
    print(f"{table(HEADS, rows)}\n\nEnvironments alone, random actions, steps per second\n")
    rows = [[env_id, str(n), spread(speeds)] for (env_id, n), speeds in alone.items()]
    print(table(["environment", "environments", "steps/s"], rows))
    results = [c._asdict() | {"rounds": [x._asdict() for x in outcomes[c]]} for c in present]
    return write_json(args.json, about | {"results": results, "alone": list(alone.items())})


if __name__ == "__main__":
    main()
