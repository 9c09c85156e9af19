"""Steps per second and time to a threshold of the scripts, beside Stable-Baselines3 and SBX.

    pip install -e ".[bench]" && python benchmarks/training.py --json training.json

Each configuration runs in a process of its own, in turns, as many rounds as `--rounds`; the round
is the seed. Runs are kept in `--folder`: stopped and started again, it goes on. Prints a line for
each configuration: environment steps per second of the whole run, compilation included, and of its
second half, with the least and most of all rounds; their ratios to Stable-Baselines3 with the
fewest environments, in the same round; which share the second half has of what the environments
alone do with random actions; and the steps and seconds after which 100 episodes first had a mean
return of the threshold, the start of the process included.

    python benchmarks/training.py --only dqn_jax --add "dqn_jax, double" "dqn_jax.py --double-q"

adds a configuration: a name, and a script of this repository with its flags, or any other command
that writes charts/SPS and charts/episodic_return under runs/ and takes --seed and
--total-timesteps. `--only` keeps those whose name has one of these words in it.

The peers take the hyperparameters of our scripts, which are CleanRL's; their loss is their own.
"""

import argparse
import json
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from machine import MISSING, header, line, table, write_json
from returns import THRESHOLDS, agents, curve, new_run, reached, scalars

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for the scripts, where they are imported

PEERS = {"sb3": "stable_baselines3", "sbx": "sbx"}
NOTE = (
    "Stable-Baselines3 and SBX minimise the Huber loss in DQN, ours and CleanRL's the squared "
    "error: with these hyperparameters a Huber loss may diverge, and then never reach the "
    "threshold. SBX's PPO does not clip the value loss, ours, CleanRL's and Stable-Baselines3's do."
)
SECONDS = 3.0  # that the environments alone are stepped


class Configuration(NamedTuple):
    """What is run: a script or a command with its flags."""

    name: str
    command: str
    timesteps: int = 500_000


def peer(library: str, algorithm: str, num_envs: int) -> Configuration:
    """One of Stable-Baselines3 or SBX."""
    name = {"sb3": "Stable-Baselines3", "sbx": "SBX"}[library]
    command = f"benchmarks/training.py --peer {library} --algorithm {algorithm}"
    return Configuration(
        f"{name} {algorithm.upper()}, {environments(num_envs)}", f"{command} --num-envs {num_envs}"
    )


def script(name: str, num_envs: int, timesteps: int = 500_000) -> Configuration:
    """One of ours."""
    return Configuration(
        f"{name}, {environments(num_envs)}", f"{name}.py --num-envs {num_envs}", timesteps
    )


def environments(num_envs: int) -> str:
    """Words for the table."""
    return f"{num_envs} environment{'s' if num_envs > 1 else ''}"


def compiled(
    name: str, num_envs: int, num_seeds: int = 1, timesteps: int = 500_000
) -> Configuration:
    """One of ours on a functional environment: not CartPole-v1's physics, the same size."""
    agents = f", {num_seeds} agents" if num_seeds > 1 else ""
    flags = f"--num-envs {num_envs} --num-seeds {num_seeds} --log-interval 10000"
    return Configuration(
        f"{name}, compiled, {environments(num_envs)}{agents}",
        f"{name}.py --env-id phys2d/CartPole-v1 {flags}",
        timesteps,
    )


# Where many environments make a run of 500,000 steps one of seconds, it is a longer one.
CONFIGURATIONS = [
    *(script("dqn_jax", n) for n in (1, 8, 64)),
    *(script("per_dqn_jax", n) for n in (1, 8, 64)),
    *(peer("sb3", "dqn", n) for n in (1, 8)),
    *(peer("sbx", "dqn", n) for n in (1, 8)),
    *(script("ppo_jax", n) for n in (1, 4, 8)),
    script("ppo_jax", 64, 2_000_000),
    *(peer("sb3", "ppo", n) for n in (4, 64)),
    *(peer("sbx", "ppo", n) for n in (4, 64)),
    compiled("dqn_jax", 10),
    compiled("dqn_jax", 10, num_seeds=10),
    compiled("per_dqn_jax", 10),
    compiled("ppo_jax", 4, timesteps=2_000_000),
    compiled("ppo_jax", 4, num_seeds=10),
    compiled("ppo_jax", 64, timesteps=5_000_000),
]


class Outcome(NamedTuple):
    """What one run gave."""

    whole: float  # environment steps per second of the run, of all agents together
    second_half: float
    steps_to_threshold: float  # infinity: never
    seconds_to_threshold: float  # since the start of the process
    final_return: float  # of the last points that hold 100 episodes


def flag(command: str, name: str, default: str) -> str:
    """The value that a command gives a flag, or the default."""
    words = shlex.split(command)
    if name in words[:-1]:
        return words[words.index(name) + 1]
    values = [word.split("=", 1)[1] for word in words if word.startswith(f"{name}=")]
    return values[-1] if values else default


def num_envs_of(command: str) -> int:
    """How many environments it steps: CleanRL's PPO has 4, its DQN 1."""
    return int(flag(command, "--num-envs", "4" if "ppo" in command else "1"))


def algorithm_of(command: str) -> str:
    """By the name of the script, or what a peer is asked for."""
    return "ppo" if "ppo" in command else "dqn"


def speed(steps: np.ndarray, times: np.ndarray) -> float:
    """Steps per second of the second half of a run, from its points of charts/SPS."""
    middle = int(np.searchsorted(steps, steps[-1] / 2))
    if middle >= len(steps) - 1:
        raise ValueError(
            f"expected two points of charts/SPS in the second half of a run, got {len(steps)} in "
            "all: train for longer"
        )
    return float((steps[-1] - steps[middle]) / (times[-1] - times[middle]))


def read(folders: list[Path], start: float, threshold: float) -> Outcome:
    """The outcome of a process that started then, from the folders of its agents.

    Agents trained together are one run: their speeds add up, and the time to the threshold is that
    of the median one.
    """
    each = []
    for folder in folders:
        points = scalars(folder, "charts/SPS")
        if not points:
            raise ValueError(f"{folder}: no point of charts/SPS: train for longer")
        steps, values, times = np.array([(p.step, p.value, p.wall_time) for p in points]).T
        to_threshold = seconds = float("inf")
        final = float("nan")
        returns = scalars(folder, "charts/episodic_return")
        if returns:
            learning = curve(folder)
            to_threshold, final = reached(learning, threshold), float(learning.means[-1])
        if to_threshold < float("inf"):
            # A peer may log several points at a step: it was over after the last one.
            last = int(np.searchsorted(learning.steps, to_threshold, side="right")) - 1
            seconds = returns[last].wall_time - start
        each.append(Outcome(float(values[-1]), speed(steps, times), to_threshold, seconds, final))
    fields = [[getattr(one, name) for one in each] for name in Outcome._fields]
    return Outcome(*map(sum, fields[:2]), *map(statistics.median, fields[2:]))


def run(configuration: Configuration, args: argparse.Namespace, seed: int) -> Outcome:
    """The outcome of one configuration, run by this unless it was before."""
    env_id = flag(configuration.command, "--env-id", args.env_id)
    total = args.total_timesteps or configuration.timesteps
    given = {"--env-id": env_id, "--seed": str(seed), "--total-timesteps": str(total)}
    words = shlex.split(configuration.command)
    if words[0].endswith(".py"):
        words = [sys.executable, str(ROOT / words[0]), *words[1:]]
    # What the command itself says stands.
    for name, value in given.items():
        words += [] if flag(configuration.command, name, "") else [name, value]
    label = re.sub(r"[^\w.]+", "-", f"{configuration.command} {env_id} {total}").strip("-")
    work = (args.folder / label / str(seed)).resolve()
    done = work / "done.json"
    if not done.exists():
        work.mkdir(parents=True, exist_ok=True)
        start = time.time()
        done.write_text(json.dumps({"start": start, "folder": new_run(words, work).name}))
    found = json.loads(done.read_text())
    folders = agents(work / "runs" / found["folder"])
    return read(folders, found["start"], THRESHOLDS.get(env_id, float("inf")))


def environments_alone(env_id: str, num_envs: int, seconds: float = SECONDS) -> float:
    """Environment steps per second with random actions, drawn before.

    Made as the scripts make them. A functional environment is stepped inside a compiled program.
    """
    from ppo_jax import Args, Run, make_envs, set_up  # PPO takes any actions

    run = Run(env_id=env_id)
    _, functional, _ = set_up(Args(num_envs=num_envs), run, Path())
    envs = make_envs(run, num_envs)
    actions = [envs.action_space.sample() for _ in range(1_000)]
    envs.reset(seed=0)

    def walk() -> None:
        for action in actions:
            envs.step(action)

    if functional:
        walk = functional_walk(functional, np.stack(actions))
    walk()  # compiles, and does what is slow the first time only
    steps, start = 0, time.perf_counter()
    while (taken := time.perf_counter() - start) < seconds:
        walk()
        steps += len(actions) * num_envs
    envs.close()
    return steps / taken


def functional_walk(functional: Any, actions: np.ndarray) -> Callable[[], None]:
    """What steps functional environments with these actions [S, N, ...], each time further on."""
    import jax
    import jax.numpy as jnp

    from ppo_jax import FunctionalEnvs

    given: Any = SimpleNamespace(act=lambda _, observation, action: action, to_env=lambda x: x)
    envs = FunctionalEnvs(given, functional.env, functional.time_limit)

    @jax.jit
    def walk(state: Any, key: Any) -> tuple[Any, Any, Any]:
        key, rollout_key = jax.random.split(key)
        state, rollout = envs.collect(state, None, actions, rollout_key)
        # The sum of all that was collected, without which the compiler leaves it out.
        return state, key, sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(rollout))

    key = jax.random.PRNGKey(0)
    state = envs.reset(key, actions.shape[1])

    def further() -> None:
        nonlocal state, key
        state, key, _ = jax.block_until_ready(walk(state, key))

    return further


def train_peer(args: argparse.Namespace) -> None:
    """Trains with Stable-Baselines3 or SBX, and logs as our scripts do."""
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    name = f"{args.env_id.replace('/', '-')}__{args.peer}_{args.algorithm}"
    writer = EventFileWriter(f"runs/{name}__{args.seed}__{int(time.time())}")
    ended: list[dict[str, float]] = []  # episodes since the last point

    class Log(BaseCallback):
        """A point each 1,000 steps."""

        start = 0.0

        def _on_training_start(self) -> None:
            self.start = time.time()

        def _on_step(self) -> bool:
            step = self.num_timesteps
            ended.extend(x["episode"] for x in self.locals["infos"] if "episode" in x)
            if step // 1_000 > (step - args.num_envs) // 1_000:
                metrics = {"charts/SPS": step / (time.time() - self.start)}
                if ended:
                    metrics["charts/episodic_return"] = np.mean([x["r"] for x in ended])
                    metrics["charts/episodic_length"] = np.mean([x["l"] for x in ended])
                    ended.clear()
                values = [Summary.Value(tag=tag, simple_value=x) for tag, x in metrics.items()]
                point = Summary(value=values)
                writer.add_event(Event(wall_time=time.time(), step=step, summary=point))
            return True

    envs = make_vec_env(args.env_id, args.num_envs, args.seed)
    settings = {"seed": args.seed, "device": "cpu"}
    make = dqn_of if args.algorithm == "dqn" else ppo_of
    make(args.peer, envs, args.num_envs, settings).learn(args.total_timesteps, callback=Log())
    writer.close()


def dqn_of(library: str, envs: Any, num_envs: int, settings: dict[str, Any]) -> Any:
    """Its DQN with the hyperparameters of dqn_jax.py."""
    import dqn_jax

    ours = dqn_jax.Args()
    settings |= dict(
        policy_kwargs={"net_arch": [120, 84]},
        learning_rate=ours.learning_rate,
        buffer_size=ours.buffer_size,
        learning_starts=ours.learning_starts,
        batch_size=ours.batch_size,
        tau=ours.tau,
        gamma=ours.gamma,
        # Counted in steps of all environments together: as many gradient steps as with one.
        train_freq=ours.train_frequency,
        gradient_steps=num_envs,
        target_update_interval=ours.target_network_frequency,
        exploration_fraction=ours.exploration_fraction,
        exploration_initial_eps=ours.start_e,
        exploration_final_eps=ours.end_e,
    )
    if library == "sbx":
        import sbx

        return sbx.DQN("MlpPolicy", envs, **settings)
    import stable_baselines3

    # Its default clips gradients, which CleanRL's does not.
    return stable_baselines3.DQN("MlpPolicy", envs, max_grad_norm=float("inf"), **settings)


def ppo_of(library: str, envs: Any, num_envs: int, settings: dict[str, Any]) -> Any:
    """Its PPO with the hyperparameters of ppo_jax.py."""
    import ppo_jax

    ours = ppo_jax.Args()
    settings |= dict(
        learning_rate=lambda remaining: ours.learning_rate * remaining,
        n_steps=ours.num_steps,
        batch_size=ours.num_steps * num_envs // ours.num_minibatches,
        n_epochs=ours.update_epochs,
        gamma=ours.gamma,
        gae_lambda=ours.gae_lambda,
        clip_range=ours.clip_coef,
        normalize_advantage=ours.norm_adv,
        ent_coef=ours.ent_coef,
        vf_coef=ours.vf_coef,
        max_grad_norm=ours.max_grad_norm,
    )
    if library == "sbx":
        import sbx

        return sbx.PPO("MlpPolicy", envs, policy_kwargs={"ortho_init": True}, **settings)
    import stable_baselines3

    settings |= dict(clip_range_vf=ours.clip_coef)  # SBX does not clip the value
    return stable_baselines3.PPO("MlpPolicy", envs, **settings)


def is_missing(command: str) -> bool:
    """Whether it is a peer that is not installed."""
    import importlib.util

    library = flag(command, "--peer", "")
    return library in PEERS and not all(
        importlib.util.find_spec(name) for name in {"stable_baselines3", PEERS[library]}
    )


def beside(configuration: Configuration, chosen: list[Configuration]) -> Configuration | None:
    """Stable-Baselines3's, with the same algorithm and the fewest of these environments."""
    peers = [
        c
        for c in chosen
        if "--peer sb3" in c.command
        and algorithm_of(c.command) == algorithm_of(configuration.command)
        and flag(c.command, "--env-id", "") == flag(configuration.command, "--env-id", "")
    ]
    return min(peers, key=lambda c: num_envs_of(c.command), default=None)


def spread(values: list[float], digits: int = 0) -> str:
    """Median, least and most."""
    median, low, high = statistics.median(values), min(values), max(values)
    if median == float("inf"):
        return "never"
    most = "never" if high == float("inf") else f"{high:,.{digits}f}"
    if low == high:
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ({low:,.{digits}f} to {most})"


def ratios(own: list[float], base: list[float]) -> list[float]:
    """Round by round."""
    return [x / y for x, y in zip(own, base, strict=True)]


HEADS = [
    *("configuration", "whole run", "ratio", "second half", "ratio", "of the environments alone"),
    *("thousand steps to threshold", "seconds to it", "return at the end"),
]


def row(name: str, own: list[Outcome], base: list[Outcome], alone: list[float]) -> list[str]:
    """A line of the table."""
    cells = [name]
    for field in ("whole", "second_half"):
        values = [getattr(outcome, field) for outcome in own]
        cells.append(spread(values))
        theirs = [getattr(outcome, field) for outcome in base]
        cells.append(spread(ratios(values, theirs), 2) if theirs else "")
    share = ratios([outcome.second_half for outcome in own], alone)
    return [
        *cells,
        f"{100 * statistics.median(share):.1f}%",
        spread([outcome.steps_to_threshold / 1_000 for outcome in own]),
        spread([outcome.seconds_to_threshold for outcome in own], 1),
        spread([outcome.final_return for outcome in own], 1),
    ]


def main() -> None:
    """Runs, reads, prints and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", default=[""], help="words, one of them in the name")
    parser.add_argument("--add", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--total-timesteps", type=int, help="of all, in place of their own")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "training")
    parser.add_argument("--json", type=Path, help="write all of it to this file")
    # What the processes are told that this starts.
    parser.add_argument("--peer", choices=PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--algorithm", choices=["dqn", "ppo"], help=argparse.SUPPRESS)
    parser.add_argument("--num-envs", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        return train_peer(args)
    if args.alone:
        print(environments_alone(args.env_id, args.num_envs))
        return None
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    every = CONFIGURATIONS + [Configuration(*pair) for pair in args.add]
    added = {name for name, _ in args.add}
    chosen = [c for c in every if c.name in added or any(word in c.name for word in args.only)]
    if not chosen:
        parser.error(f"--only: no name has one of {args.only}: {', '.join(c.name for c in every)}")
    packages = ["jax", "flax", "gymnasium", "numpy", "torch", "stable-baselines3", "sbx-rl"]
    text, about = header(packages)
    print(text)
    present = [c for c in chosen if not is_missing(c.command)]
    places = {
        c.name: (flag(c.command, "--env-id", args.env_id), num_envs_of(c.command)) for c in present
    }
    outcomes: dict[str, list[Outcome]] = {c.name: [] for c in present}
    alone: dict[tuple[str, int], list[float]] = {place: [] for place in places.values()}
    for seed in range(1, args.rounds + 1):
        for (env_id, num_envs), speeds in alone.items():
            speeds.append(measured_alone(args.folder, env_id, num_envs, seed))
        for configuration in present:
            outcome = run(configuration, args, seed)
            outcomes[configuration.name].append(outcome)
            print(
                f"round {seed}: {configuration.name}: {outcome.whole:,.0f} steps/s",
                file=sys.stderr,
                flush=True,
            )
    print(line(HEADS))
    print(line(["---"] * len(HEADS)))
    results = []
    for configuration in chosen:
        name = configuration.name
        if name not in outcomes:
            print(line([name, MISSING, *[""] * (len(HEADS) - 2)]))
            results.append({"name": name, "missing": True})
            continue
        base = beside(configuration, present)
        speeds = alone[places[name]]
        print(line(row(name, outcomes[name], outcomes[base.name] if base else [], speeds)))
        results.append(
            configuration._asdict()
            | {"rounds": [outcome._asdict() for outcome in outcomes[name]]}
            | {"environments_alone": speeds, "ratio_to": base.name if base else None}
        )
    print("\nEnvironments alone, random actions, steps per second\n")
    rows = [[env_id, str(n), spread(speeds)] for (env_id, n), speeds in alone.items()]
    print(table(["environment", "environments", "steps/s"], rows))
    print(f"\n{NOTE}")
    write_json(args.json, about | {"note": NOTE, "results": results})
    return None


def measured_alone(folder: Path, env_id: str, num_envs: int, seed: int) -> float:
    """`environments_alone` in a process of its own, kept as the runs are."""
    kept = folder / "alone" / f"{env_id.replace('/', '-')}-{num_envs}-{seed}"
    if not kept.exists():
        command = [sys.executable, __file__, "--alone", "--env-id", env_id]
        done = subprocess.run(
            [*command, "--num-envs", str(num_envs)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(done.stdout.splitlines()[-1])
    return float(kept.read_text())


if __name__ == "__main__":
    main()
