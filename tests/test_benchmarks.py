"""The benchmarks: what they make of numbers, against numbers worked out by hand."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import agents
import async_envs
import curves
import machine
import replay_buffers
import returns
import training

from cleanreplay import policies, read_flags

pytestmark = pytest.mark.benchmarks

AGENTS = sorted(agents.AGENTS.glob("*.safetensors"))
LEAST = {  # mean returns of the agents whose names begin so
    "Acrobot-v1": -120.0,
    "CartPole-v1": 475.0,
    "HalfCheetah-v5__ppo_jax": 1_800.0,
    "HalfCheetah-v5__sac_jax": 2_000.0,
    "Hopper-v5": 2_000.0,
    "InvertedPendulum-v5": 950.0,
    "LunarLander-v3__dqn_jax": 230.0,
    "LunarLander-v3__per_dqn_jax": 200.0,
    "LunarLander-v3__ppo_jax": 230.0,
    "MountainCar-v0": -160.0,
    "Pendulum-v1": -300.0,
    "Walker2d-v5": 2_500.0,
    "cleanreplay.bit_flipping-BitFlipping15-v0": -12.0,
    "cleanreplay.memory_tasks-CartPoleNoVelocity-v0": 475.0,
    "phys2d-CartPole-v1": 475.0,
}
NEEDS = {"LunarLander-v3": "Box2D"} | dict.fromkeys(
    ["HalfCheetah-v5", "Hopper-v5", "InvertedPendulum-v5", "Walker2d-v5"], "mujoco"
)
ITEM = {"action": jnp.int32(1), "observation": jnp.ones(2)}


def write_run(folder, returns_at, speeds_at=(), wall=0.0, evaluated_at=()):
    """A run as the scripts log it: (step, return, length), (step, SPS, seconds), (step, return)."""
    writer = EventFileWriter(str(folder))

    def log(step, seconds, group="charts", **metrics):
        points = [Summary.Value(tag=f"{group}/{tag}", simple_value=x) for tag, x in metrics.items()]
        writer.add_event(Event(wall_time=wall + seconds, step=step, summary=Summary(value=points)))

    for step, value, length in returns_at:
        log(step, step / 10, episodic_return=value, episodic_length=length)
    for step, value, seconds in speeds_at:
        log(step, seconds, SPS=value)
    for step, value in evaluated_at:
        log(step, step / 10, group="eval", episodic_return=value)
    writer.close()


def test_the_interquartile_mean_leaves_out_a_quarter_at_each_end():
    assert returns.interquartile_mean(np.array([9.0, 1.0, 2.0, 3.0])) == 2.5
    assert returns.interquartile_mean(np.array([100.0, 1.0, 2.0, 3.0, -50.0])) == 2.0
    assert returns.interquartile_mean(np.array([1.0, 3.0])) == 2.0


def test_the_interquartile_mean_is_that_of_each_row():
    rows = np.array([[4.0, 0.0, 2.0, 1.0], [0.0, 8.0, 8.0, 8.0]])
    np.testing.assert_array_equal(returns.interquartile_mean(rows), [1.5, 8.0])


def mean_of_seeds(scores):
    return scores.mean(-1)


def test_the_interval_is_that_of_all_resamples():
    # Of two seeds a resample has the mean 0, 5 or 10, with probabilities 1/4, 1/2, 1/4.
    two_seeds = np.array([0.0, 10.0])
    assert returns.bootstrap(two_seeds, mean_of_seeds) == (0.0, 10.0)
    alike = np.array([7.0, 7.0, 7.0])
    assert returns.bootstrap(alike) == (7.0, 7.0)


def test_the_interval_of_many_seeds_is_that_of_a_normal_distribution():
    scores = np.random.default_rng(1).normal(size=400)
    low, high = returns.bootstrap(scores, mean_of_seeds)
    standard_error = scores.std() / 20
    assert high - low == pytest.approx(2 * 1.96 * standard_error, rel=0.1)
    assert (low, high) == returns.bootstrap(scores, mean_of_seeds)  # the resamples are the same


def test_a_mean_is_of_the_last_hundred_points_where_each_is_an_episode():
    lengths = np.full(150, 9.0)
    steps = np.cumsum(lengths + 1)  # with the step that resets
    values = np.arange(150.0)
    curve = returns.last_means(steps, values, lengths)
    assert curve.means[0] == 0
    assert curve.means[98] == 49.0
    assert curve.means[149] == np.arange(50, 150).mean()
    np.testing.assert_array_equal(np.flatnonzero(curve.complete), np.arange(99, 150))
    without_lengths = returns.last_means(steps, values, None)
    np.testing.assert_array_equal(without_lengths.means, curve.means)


def test_a_mean_is_of_fewer_points_where_each_is_many_episodes():
    # 50 episodes of 9 steps in each log interval of 500 steps: two points hold a hundred.
    steps = np.array([500.0, 1000.0, 1500.0])
    curve = returns.last_means(steps, np.array([10.0, 20.0, 40.0]), np.full(3, 9.0))
    np.testing.assert_array_equal(curve.means, [10.0, 15.0, 30.0])
    np.testing.assert_array_equal(curve.complete, [False, True, True])
    assert returns.reached(curve, 15.0) == 1000
    assert returns.reached(curve, 10.0) == 1000  # one point is not a hundred episodes
    assert returns.reached(curve, 31.0) == float("inf")


def test_a_point_after_intervals_without_an_episode_covers_all_their_steps():
    # 64 episodes of 499 steps end together, once in 32,000 steps; log intervals have 1,000.
    steps = 32_000.0 * np.arange(1, 4)
    curve = returns.last_means(steps, np.array([10.0, 20.0, 40.0]), np.full(3, 499.0))
    np.testing.assert_array_equal(curve.means, [10.0, 15.0, 30.0])
    np.testing.assert_array_equal(curve.complete, [False, True, True])


def test_a_curve_on_a_grid_is_the_last_value_of_each_seed():
    complete = np.array([True, True])
    one = returns.Curve(np.array([10.0, 20.0]), means=np.array([1.0, 2.0]), complete=complete)
    two = returns.Curve(np.array([0.0, 40.0]), means=np.array([5.0, 6.0]), complete=complete)
    grid, scores = returns.on_grid([one, two], points=3)
    np.testing.assert_array_equal(grid, [0, 10, 20])
    np.testing.assert_array_equal(scores, [[np.nan, 5], [1, 5], [2, 5]])


@pytest.fixture
def started(monkeypatch):
    """The commands that `returns.run` starts; each only makes the folder of a run."""
    commands = []

    def pretend(command, cwd, **_):
        commands.append(command[1:])
        (Path(cwd) / "runs" / "E-v1__dqn_jax__1__17").mkdir(parents=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(returns.subprocess, "run", pretend)
    return commands


def test_a_run_that_is_there_is_not_started_again(tmp_path, started):
    for _ in range(2):
        (folder,) = returns.run("dqn_jax --tau 1", "E-v1", 1, ["--num-seeds", "3"], tmp_path)
        assert folder.name == "E-v1__dqn_jax__1__17"
    ((_, *flags),) = started
    assert flags == ["--env-id", "E-v1", "--seed", "1", "--tau", "1", "--num-seeds", "3"]


@pytest.mark.parametrize("more", [[], 40 * ["--hidden-sizes", "256"]], ids=["short", "long"])
def test_runs_with_other_flags_are_other_runs(more, tmp_path, started):
    """A name of a file has at most 255 bytes."""
    (one,) = returns.run("dqn_jax", "E-v1", 1, [*more, "--tau", "1"], tmp_path)
    (other,) = returns.run("dqn_jax", "E-v1", 1, [*more, "--tau", "0.5"], tmp_path)
    assert one != other
    assert len(started) == 2


def test_agents_are_in_the_order_of_their_seeds(tmp_path):
    for name in ("seed_10", "seed_2", "checkpoints"):
        (tmp_path / name).mkdir()
    assert returns.agents(tmp_path) == [tmp_path, tmp_path / "seed_2", tmp_path / "seed_10"]


def test_a_run_that_fails_says_where_to_look(tmp_path, monkeypatch):
    failed = type("Done", (), {"returncode": 2})
    monkeypatch.setattr(returns.subprocess, "run", lambda *_, **__: failed)
    told = r"exit code 2 and 0 new folders under runs/, expected 0 and 1: see .*output\.txt"
    with pytest.raises(RuntimeError, match=told):
        returns.run("dqn_jax", "E-v1", 1, [], tmp_path)


def test_a_summary_has_mean_interval_and_steps_of_all_seeds():
    means = np.array([[100.0, 480.0], [500.0, 490.0], [300.0, 400.0]])
    curves = [returns.Curve(np.array([1e3, 2e3]), x, np.array([True, True])) for x in means]
    summary = returns.summary("CartPole-v1", "ppo_jax", curves)
    assert summary["returns"] == [480.0, 490.0, 400.0]
    assert summary["mean"] == pytest.approx(1_370 / 3)
    assert summary["standard_deviation"] == pytest.approx(49.33, abs=0.01)
    assert summary["interquartile_mean"] == pytest.approx(1_370 / 3)  # of three, none is left out
    assert summary["interval"] == [400.0, 490.0]
    assert summary["steps_to_threshold"] == [2_000.0, 1_000.0, float("inf")]
    assert summary["median_steps_to_threshold"] == 2_000.0
    assert summary["published"]["CleanRL"] == "490.04 ± 6.12"


def test_evaluations_are_a_curve_whose_points_are_all_complete(tmp_path):
    write_run(tmp_path, [(100, 5.0, 10.0)], evaluated_at=[(1000, 470.0), (2000, 480.0)])
    curve = returns.evaluations(tmp_path)
    np.testing.assert_array_equal(curve.steps, [1000, 2000])
    np.testing.assert_array_equal(curve.means, [470, 480])
    assert returns.reached(curve, 475.0) == 2000


def test_curves_of_own_runs_are_by_environment_and_name(tmp_path, monkeypatch):
    folders = []
    runs = [("A-v0", "dqn"), ("A-v0", "dqn"), ("A-v0", "ppo"), ("B-v0", "dqn")]
    for i, (env_id, name) in enumerate(runs):
        folder = tmp_path / str(i)
        write_run(folder, [], evaluated_at=[(1000, float(i))])
        (folder / "args.json").write_text(json.dumps({"run": {"env_id": env_id, "exp_name": name}}))
        folders.append(folder)
    drawn = {}

    def plot(env_id, of_scripts, path, mean):
        for script, seeds in of_scripts.items():
            drawn[path.name, script] = [curve.means.tolist() for curve in seeds]

    monkeypatch.setattr(curves, "plot", plot)
    curves.main(tuple(folders), tmp_path / "curves", evaluated=True)
    assert drawn == {
        ("A-v0.png", "dqn"): [[0.0], [1.0]],
        ("A-v0.png", "ppo"): [[2.0]],
        ("B-v0.png", "dqn"): [[3.0]],
    }


def test_a_published_return_is_that_of_the_algorithm(tmp_path):
    write_run(tmp_path, [], evaluated_at=[(1000, 9000.0)])
    curve = returns.evaluations(tmp_path)
    for script, cleanrl in {"ppo_jax [d]": "1442.64", "sac_jax": "9634.89"}.items():
        summary = returns.summary("HalfCheetah-v5", script, [curve])
        assert summary["published"]["CleanRL"].startswith(cleanrl)
    prioritised = returns.summary("CartPole-v1", "per_dqn_jax --num-envs 8", [curve])
    assert prioritised["published"]["CleanRL"] == "498.38 ± 2.29"


def write_run_that_gets_faster(folder):
    """At 100 steps/s, then at 400. Points are of 10 episodes: 20 of return 10, then 20 of 500."""
    speeds = [(1000, 100, 10.0), (2000, 100, 20.0), (3000, 133, 22.5), (4000, 160, 25.0)]
    episodes = [(90 * (i + 1), 10.0 if i < 20 else 500.0, 8.0) for i in range(40)]
    write_run(folder, episodes, speeds, wall=1000.0)


def test_speed_and_time_to_threshold_of_a_run(tmp_path):
    write_run_that_gets_faster(tmp_path)
    outcome = training.read([tmp_path], start=990.0, threshold=475.0)
    assert outcome.whole == 160
    assert outcome.second_half == pytest.approx(400)
    # The points 20 to 29 are the first ten of 500.
    assert outcome.steps_to_threshold == 2700
    assert outcome.seconds_to_threshold == pytest.approx(10 + 270)
    assert outcome.final == 500


def test_the_speed_of_two_agents_is_that_of_both(tmp_path):
    write_run_that_gets_faster(tmp_path)
    outcome = training.read([tmp_path, tmp_path], start=990.0, threshold=501.0)
    assert outcome.second_half == pytest.approx(800)
    assert outcome.steps_to_threshold == float("inf")


def test_a_run_without_a_second_half_says_so():
    with pytest.raises(ValueError, match="got 1 in all: train for longer"):
        training.speed(np.array([1000.0]), np.array([1.0]))


def test_flags_that_a_command_does_not_set_are_those_of_its_script():
    command = "ppo_jax.py --num-envs=64 --env-id A"
    assert training.num_envs_of(command) == 64
    assert training.num_envs_of("ppo_jax.py") == 4
    assert training.num_envs_of("per_dqn_jax.py") == 1
    assert training.flag(command, "--env-id", "B") == "A"


def test_a_configuration_is_compared_with_a_peer_in_the_same_environment():
    here = training.Configuration("x", "ppo_jax.py --num-envs 64")
    base = training.beside(here, training.CONFIGURATIONS)
    assert base.name == "Stable-Baselines3 PPO, 4 environments"
    elsewhere = training.Configuration("x", "ppo_jax.py --num-envs=64 --env-id A")
    assert training.beside(elsewhere, training.CONFIGURATIONS) is None


def test_no_two_configurations_have_the_same_name():
    names = [configuration.name for configuration in training.CONFIGURATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "environments:Chain-v0"])
def test_steps_of_environments_alone_are_those_of_all_of_them(env_id, monkeypatch):
    calls = []

    def repeat(walk, number, repeat):
        calls.append(walk())
        return [60.0, 0.5]

    def timeit(walk, number):
        calls.append(walk())
        return 2.0 * number

    monkeypatch.setattr(training.timeit, "repeat", repeat)
    monkeypatch.setattr(training.timeit, "timeit", timeit)
    assert training.environments_alone(env_id, num_envs=2) == 1_000 * 2 / 2.0
    assert len(calls) == 2


def test_a_peer_has_our_hyperparameters():
    settings = training.settings_of_peer("sb3", "dqn", num_envs=8)
    assert settings["learning_rate"] == 2.5e-4
    assert settings["train_freq"] == 10
    assert settings["gradient_steps"] == 8
    assert settings["exploration_final_eps"] == 0.05


def test_a_peer_logs_each_thousand_steps_the_mean_of_the_episodes_since_the_last():
    """An episode ends every 400 steps, with a return that is the step."""
    points = []
    log = SimpleNamespace(write=lambda step, metrics: points.append((step, metrics)))
    on_step = training.log_as_ours(log, num_envs=8)
    for step in range(8, 3_001, 8):
        info = {"episode": {"r": step, "l": 4}} if step % 400 == 0 else {}
        assert on_step({"self": SimpleNamespace(num_timesteps=step), "infos": [info]}, {})
    means = [(step, metrics["charts/episodic_return"]) for step, metrics in points]
    assert means == [(1000, 600.0), (2000, 1600.0), (3000, 2600.0)]
    assert all(metrics["charts/episodic_length"] == 4 for _, metrics in points)
    assert all(metrics["charts/SPS"] > 0 for _, metrics in points)


@pytest.mark.slow
@pytest.mark.parametrize(("vectorization", "processes"), [("sync", 1), ("async", 2)])
def test_slow_environments_take_their_time(vectorization, processes, monkeypatch):
    """Two that wait for 10 ms a step: one after the other, or at once in processes of their own."""
    monkeypatch.syspath_prepend(Path(async_envs.__file__).parent)
    kwargs = {"seconds": 0.01, "computes": False}
    speed = async_envs.steps_per_second(kwargs, 2, 600, vectorization)
    most = processes / 0.01
    assert 0.3 * most < speed < 1.1 * most


def test_ratios_are_repetition_by_repetition():
    assert machine.ratios([2.0, 2.0, 12.0], [1.0, 2.0, 4.0]) == [2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0, 3.0, 2.0], "2.00 (1.00 to 3.00)"),
        ([2.0, 2.0], "2.00"),
        ([50.0, float("inf"), 60.0], "60.00 (50.00 to never)"),
        ([50.0, float("inf"), float("inf")], "never"),
    ],
)
def test_a_spread_has_the_median_and_where_they_differ_the_range(values, shown):
    assert machine.spread(values, 2) == shown


def test_a_repetition_has_fewer_calls_if_they_are_slow():
    assert replay_buffers.calls_a_repetition(10.0, 500) == 500
    assert replay_buffers.calls_a_repetition(1_000.0, 500) == 50
    assert replay_buffers.calls_a_repetition(1e6, 500) == 2


def actions_after(name, buffer, *operations):
    """The actions that the last one of these operations draws from a library's buffer."""
    peer = replay_buffers.make(name, buffer, ITEM, capacity=320)
    state = peer.state
    indices = np.arange(replay_buffers.BATCH, dtype=np.int32) % 160
    for operation in operations:
        if peer.counts_on:
            indices = indices + int(state.cursor - state.size)
        state, drawn = peer.calls[operation](state, None, indices, None)
    return np.asarray(drawn["action"])


@pytest.mark.parametrize("name", ["ours", "naive_jax", "naive_numpy"])
def test_queues_hold_what_is_added_until_it_is_popped(name):
    actions = actions_after(name, "circular", "add 128, pop 128", "add 128, pop 128", "get 256")
    # Of 160 held and 128 added the first 128 are popped, twice: what is left begins with row 96.
    np.testing.assert_array_equal(actions[:8], (np.arange(8) + 96) % 8)


@pytest.mark.parametrize("name", ["ours", "naive_jax", "naive_numpy"])
def test_all_items_of_a_buffer_are_updated(name):
    actions = actions_after(name, "uniform", "update all", "get 256")
    np.testing.assert_array_equal(actions[:160], np.arange(160) % 8 + 1)


def test_what_is_measured_of_a_peer_is_measured_of_ours():
    for _, operations in replay_buffers.PEERS.values():
        for buffer, names in operations.items():
            assert set(names) <= set(replay_buffers.BUFFERS[buffer])


def test_all_libraries_draw_from_items_of_all_clusters():
    clusters = jax.vmap(replay_buffers.cluster_of)(replay_buffers.several(ITEM, 12))
    np.testing.assert_array_equal(clusters, np.arange(12) % 8)


def test_json_has_no_infinity(tmp_path):
    path = tmp_path / "a" / "b.json"
    machine.write_json(path, {"x": [float("inf"), 1.5], "y": float("nan")})
    assert json.loads(path.read_text()) == {"x": [None, 1.5], "y": None}


def test_a_package_that_is_missing_has_no_version():
    assert machine.versions(["no-such-package"]) == {"no-such-package": "not installed"}


@pytest.mark.slow
@pytest.mark.parametrize("file", AGENTS, ids=lambda file: file.stem)
def test_an_agent_that_comes_with_the_project_acts_well(file):
    env_id = file.stem.partition("__")[0]
    if env_id in NEEDS:
        pytest.importorskip(NEEDS[env_id])
    (least,) = [least for name, least in LEAST.items() if file.stem.startswith(name)]
    assert agents.evaluate(file, episodes=3).mean() >= least


def test_agents_that_come_with_the_project_are_small_and_name_their_script_without_a_path():
    assert AGENTS
    for file in AGENTS:
        assert file.stat().st_size < 1_000_000
        assert agents.flags(file).split()[0] in [x.name for x in agents.ROOT.glob("*_jax.py")]


@pytest.mark.parametrize("file", AGENTS, ids=lambda file: file.stem)
def test_the_flags_of_an_agent_are_a_command(file):
    script, *tokens = agents.flags(file).split()
    module = policies.import_script(agents.ROOT / script)
    Flags = NamedTuple("Flags", [("experiment", module.Run), ("algorithm", module.Args)])  # noqa: UP014
    given = tyro.cli(Flags, args=tokens, config=[tyro.conf.OmitArgPrefixes])
    assert given == read_flags(file, module.Run, module.Args)
