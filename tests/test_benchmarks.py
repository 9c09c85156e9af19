"""The benchmarks: their statistics, against numbers computed by hand."""

import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import agents
import replay_buffers
import returns
import training

from cleanreplay import agent_file, disk, policies, read_flags

pytestmark = pytest.mark.benchmarks

AGENTS = sorted(agents.AGENTS.glob("*.safetensors"))


def write_run(folder, returns_at=(), speeds_at=(), wall=0.0):
    """Writes a run as the scripts log it: (step, return, length) and (step, SPS, seconds)."""
    writer = EventFileWriter(str(folder))

    def log(step, seconds, **metrics):
        points = [Summary.Value(tag=f"charts/{tag}", simple_value=x) for tag, x in metrics.items()]
        writer.add_event(Event(wall_time=wall + seconds, step=step, summary=Summary(value=points)))

    for step, value, length in returns_at:
        log(step, step / 10, episodic_return=value, episodic_length=length)
    for step, value, seconds in speeds_at:
        log(step, seconds, SPS=value)
    writer.close()


def test_the_interquartile_mean_is_that_of_each_row():
    of_four = np.array([[4.0, 0.0, 2.0, 1.0], [0.0, 8.0, 8.0, 8.0]])
    of_five = np.array([100.0, 1.0, 2.0, 3.0, -50.0])  # a quarter of five is one

    np.testing.assert_array_equal(returns.interquartile_mean(of_four), [1.5, 8.0])
    assert returns.interquartile_mean(of_five) == 2.0


def test_the_interval_of_a_mean_is_that_of_all_resamples():
    scores = np.random.default_rng(1).normal(size=400)
    low, high = returns.bootstrap(scores, lambda x: x.mean(-1))

    assert high - low == pytest.approx(2 * 1.96 * scores.std() / 20, rel=0.1)  # a normal one's


def test_a_mean_is_of_the_last_hundred_points_of_one_episode():
    lengths = np.full(150, 9.0)
    steps = np.cumsum(lengths + 1)  # with the autoreset step
    values = np.arange(150.0)

    curve = returns.last_means(steps, values, lengths)

    assert curve.means[[0, 98, 149]].tolist() == [0, 49, np.arange(50, 150).mean()]
    np.testing.assert_array_equal(np.flatnonzero(curve.complete), np.arange(99, 150))


def test_a_mean_is_of_fewer_points_of_many_episodes():
    """With 50 episodes of 9 steps in each log interval, two points hold a hundred."""
    steps = 500.0 * np.arange(1, 4)

    curve = returns.last_means(steps, np.array([10.0, 20.0, 40.0]), np.full(3, 9.0))

    np.testing.assert_array_equal(curve.means, [10.0, 15.0, 30.0])
    np.testing.assert_array_equal(curve.complete, [False, True, True])
    assert returns.reached(curve, 10.0) == 1_000.0  # one point is not a hundred episodes
    assert returns.reached(curve, 31.0) == float("inf")


def test_a_summary_has_mean_interval_and_steps_of_all_seeds():
    means = np.array([[100.0, 480.0], [500.0, 490.0], [300.0, 400.0]])
    seeds = [returns.Curve(np.array([1e3, 2e3]), x, np.array([True, True])) for x in means]

    summary = returns.summary("CartPole-v1", "per_dqn_jax --num-envs 8", seeds)

    assert summary["returns"] == [480.0, 490.0, 400.0]
    assert summary["mean"] == pytest.approx(1_370 / 3)
    assert summary["standard_deviation"] == pytest.approx(49.33, abs=0.01)
    assert summary["interquartile_mean"] == pytest.approx(1_370 / 3)  # of three, none is left out
    assert summary["interval"] == [400.0, 490.0]
    assert summary["steps_to_threshold"] == [2_000.0, 1_000.0, float("inf")]
    assert summary["median_steps_to_threshold"] == 2_000.0
    assert summary["published"]["CleanRL"] == "498.38 ± 2.29"  # that of DQN


def test_speed_and_time_to_threshold_are_those_of_a_run(tmp_path):
    """100 steps/s, then 400. Each point has 10 episodes: 20 points of return 10, 20 of 500."""
    speeds = [(1000, 100, 10.0), (2000, 100, 20.0), (3000, 133, 22.5), (4000, 160, 25.0)]
    episodes = [(90 * (i + 1), 10.0 if i < 20 else 500.0, 8.0) for i in range(40)]
    write_run(tmp_path, episodes, speeds, wall=1000.0)

    outcome = training.read([tmp_path], start=990.0, threshold=475.0)
    of_two = training.read([tmp_path, tmp_path], start=990.0, threshold=501.0)

    assert outcome.whole == 160
    assert outcome.second_half == pytest.approx(400)
    assert outcome.steps_to_threshold == 2700  # the points 20 to 29 are the first ten of 500
    assert outcome.seconds_to_threshold == pytest.approx(10 + 270)
    assert outcome.final == 500
    assert of_two.second_half == pytest.approx(800)
    assert of_two.steps_to_threshold == float("inf")


@pytest.mark.parametrize("library", ["ours", "naive_jax", "naive_numpy"])
@pytest.mark.parametrize(
    ("buffer", "operation", "actions"),
    [
        # Twice, 128 items are added to 160, and the first 128 popped: the rest begins with 96.
        ("circular", "add 128, pop 128", np.arange(96, 104) % 8),
        ("uniform", "update all", np.arange(8) + 1),
    ],
)
def test_a_library_is_measured_in_the_operation(library, buffer, operation, actions):
    item = {"action": jnp.int32(1), "observation": jnp.ones(2)}
    peer = replay_buffers.make(library, buffer, item, capacity=320)
    state = peer.state
    for _ in range(2 if buffer == "circular" else 1):
        state, _ = peer.calls[operation](state, None, None, None)
    first = int(state.cursor - state.size) if peer.counts_on else 0

    indices = first + np.arange(replay_buffers.BATCH, dtype=np.int32) % 160
    _, drawn = peer.calls["get 256"](state, None, indices, None)

    np.testing.assert_array_equal(drawn["action"][:8], actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("CartPole-v1__dqn_jax", 475.0),
        ("Pendulum-v1__sac_jax", -300.0),
        ("cleanreplay.memory_tasks-CartPoleNoVelocity-v0__recurrent_ppo_jax", 475.0),
    ],
)
def test_an_agent_that_comes_with_the_project_acts_well(name, least):
    file = agents.AGENTS / f"{name}.safetensors"

    assert agents.evaluate(file, episodes=3).mean() >= least


def test_an_agent_is_stored_without_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "AGENTS", tmp_path / "agents")
    (tmp_path / "agents").mkdir()
    of_run = {"env_id": "phys2d/CartPole-v1", "exp_name": "mine"}
    args = {"offline_data": "/home/me/data.npz", "init_from": ""}
    about = {"script": "/home/me/iql_jax.py", "run": of_run, "args": args}
    disk.write(tmp_path / "best", {"weight": np.arange(3.0)}.items(), about)
    copy = agents.store(tmp_path / "best")
    stored = agent_file.open_agent(copy)

    assert copy == tmp_path / "agents" / "phys2d-CartPole-v1__mine.safetensors"
    assert stored.about["script"] == "iql_jax.py"
    assert stored.about["args"] == {"offline_data": "data.npz", "init_from": ""}
    np.testing.assert_array_equal(stored.read(["weight"])["weight"], np.arange(3.0))


@pytest.mark.parametrize("file", AGENTS, ids=lambda file: file.stem)
def test_the_flags_of_a_small_agent_are_a_command(file):
    script, *tokens = agents.flags(file).split()
    module = policies.import_script(agents.ROOT / script)
    Flags = NamedTuple("Flags", [("experiment", module.Run), ("algorithm", module.Args)])  # noqa: UP014
    given = tyro.cli(Flags, args=tokens, config=[tyro.conf.OmitArgPrefixes])

    expected = read_flags(file, module.Run, module.Args)
    assert [*map(repr, given)] == [*map(repr, expected)]  # NaN differs from itself
    assert file.stat().st_size < 1_000_000
