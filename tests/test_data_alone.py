"""Learning from data alone: --offline-fraction 1, .npz files, and the best of the episodes."""

from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import jax
import numpy as np
import pytest
from helpers import COUNTER, gradient_steps, network_of, one_line, read_events
from numpy.testing import assert_array_equal
from small_agents import make, vector

import buffers
import dqn_jax
import iql_jax
import per_dqn_jax
from cleanreplay import offline

# Two trajectories: one of three steps, which terminates, and one of two steps, which is cut off.
ENDS = dict(terminals=np.array([0, 0, 1, 0, 0]), timeouts=np.array([0, 0, 0, 0, 1]))
ARRAYS = ENDS | dict(observations=np.array([[1.0], [2], [3], [5], [6]]), rewards=np.arange(5.0))
ARRAYS |= dict(
    actions=np.array([0, 1, 2, 0, 1]), next_observations=np.array([[2.0], [3], [4], [6], [7]])
)
WITHOUT = {name: x for name, x in ARRAYS.items() if name != "next_observations"}
ROWS = dict(
    observation=[1, 2, 3, 4, 5, 6, 7],
    reward=[0, 1, 2, 0, 3, 4, 0],
    terminated=[0, 0, 1, 0, 0, 0, 0],
    truncated=[0, 0, 0, 0, 0, 1, 0],
    valid=[1, 1, 1, 0, 1, 1, 0],
)
# The step at 6 is unknown without the observation after it.
ROWS_WITHOUT = dict(
    observation=[1, 2, 3, 3, 5, 6],
    reward=[0, 1, 2, 0, 3, 0],
    terminated=[0, 0, 1, 0, 0, 0],
    truncated=[0, 0, 0, 0, 1, 0],
    valid=[1, 1, 1, 0, 1, 0],
)


def write(file="data.npz", **arrays):
    np.savez(file, **arrays)
    return file


@pytest.mark.parametrize(
    ("arrays", "wanted"),
    [
        (ARRAYS, ROWS),
        ({name: x for name, x in ARRAYS.items() if name != "timeouts"}, ROWS),  # the file's end
        (WITHOUT, ROWS_WITHOUT),
        # As in OGBench: a terminal ends a trajectory, and a mask of 0 is a termination.
        (ARRAYS | dict(terminals=np.array([0, 0, 1, 0, 1]), masks=np.array([1, 1, 0, 1, 1])), ROWS),
        # A new trajectory begins where the next observation differs from that of the next row.
        (
            ARRAYS | dict(terminals=np.zeros(5), timeouts=np.zeros(5)),
            ROWS | dict(terminated=[0] * 7, truncated=[0, 0, 1, 0, 0, 1, 0]),
        ),
    ],
)
def test_trajectories_become_rows(arrays, wanted):
    rows = buffers.read_trajectories(write(**arrays))

    for name, values in wanted.items():
        assert_array_equal(rows[name].ravel(), values, err_msg=name)
    assert_array_equal(rows["action"][rows["valid"]], arrays["actions"][: sum(wanted["valid"])])


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        (dict(observations=np.zeros(3)), "no array actions"),
        (ARRAYS | dict(rewards=np.zeros(4)), "5 rows of observations and 4 of rewards"),
        ({name: x[:0] for name, x in ARRAYS.items()}, "0 rows of observations"),
    ],
)
def test_a_file_that_lacks_something_is_refused(arrays, text):
    with pytest.raises(ValueError, match=text):
        buffers.read_trajectories(write(**arrays))


def counted(count=200):
    """Writes a file of Counter's steps, in trajectories of four steps."""
    step = np.arange(count) % 4
    observations = np.stack([step, step, step], 1).astype(np.float32)
    return write(
        observations=observations,
        next_observations=observations + 1,
        actions=np.arange(count) % 3,
        rewards=step + 1.0,
        terminals=step == 3,
    )


ALONE = dict(offline_fraction=1, total_timesteps=200, batch_size=8, hidden_sizes=(5,))
NEVER = COUNTER | dict(env_kwargs='{"fail_at": 1}', checkpoint_interval=100)  # a step would fail


def test_data_alone_take_no_steps_and_a_resumed_run_is_the_one_that_never_stopped():
    args, run = dqn_jax.Args(offline_data=counted(), **ALONE), dqn_jax.Run(**NEVER)
    whole, _, folder = dqn_jax.train(args, run)
    _, _, half = dqn_jax.train(replace(args, total_timesteps=100), run)
    resumed, _, _ = dqn_jax.train(args, replace(run, resume=str(half)))
    scalars, _ = read_events(folder)

    assert gradient_steps(whole) == 200
    assert scalars["charts/gradient_steps"][-1] == (200, 100)
    assert np.size(whole.replay.data.storage.valid) == 250
    assert len(whole.replay.replay.storage.valid) == 2  # the replay of the run stays small
    assert_array_equal(vector(resumed.params), vector(whole.params))


def test_evaluations_are_the_last_episodes():
    args = dqn_jax.Args(offline_data=counted(), **ALONE)
    run = dqn_jax.Run(**COUNTER | dict(eval_episodes=3, eval_interval=100))
    _, returns, folder = dqn_jax.train(args, run)

    (_, _), (_, last) = read_events(folder)[0]["eval/episodic_return"]
    assert returns == [pytest.approx(last)]


def test_agents_of_a_compiled_run_share_the_data():
    env_id = "environments:Chain-v0"
    with closing(dqn_jax.make_envs(dqn_jax.Args(), dqn_jax.Run(env_id=env_id), 1)) as envs:
        shape = envs.single_observation_space.shape
    arrays = ARRAYS | {name: np.zeros((5, *shape), np.float32) for name in ("observations",)}
    arrays |= dict(next_observations=arrays["observations"], actions=np.zeros(5, int))
    args = dqn_jax.Args(offline_data=write(**arrays), **ALONE)
    run = dqn_jax.Run(env_id=env_id, num_seeds=2, eval_episodes=1, checkpoint_interval=100)
    state, returns, _ = dqn_jax.train(args, run)

    assert state.replay.data.storage.valid.shape == (7, 1)
    assert np.isfinite(returns).all()
    one, two = (jax.tree.map(lambda x: x[i], state.params) for i in range(2))  # noqa: B023
    assert (vector(one) != vector(two)).any()


@pytest.mark.parametrize(
    ("module", "flags", "word"),
    [
        (dqn_jax, "--save-experience", "save_experience"),
        (dqn_jax, "--total-timesteps 99", "gradient steps"),
        (per_dqn_jax, "", "dqn_jax.py learns"),
        (iql_jax, "--env-id Pendulum-v1", "actions int64"),
    ],
)
def test_what_learning_from_data_alone_does_not_support_is_refused(module, flags, word, run_main):
    alone = f"--env-id environments:Counter-v0 --offline-fraction 1 --offline-data {counted()}"
    assert word in one_line(run_main(module, *alone.split(), *flags.split()))


def test_data_alone_take_one_process(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(dqn_jax.UsageError, match="no steps to share"):
        offline.check_alone(SimpleNamespace(save_experience=False))


def test_the_best_episodes_are_kept():
    """The data are of two environments; the last episode of the second one does not end."""
    agent = make("dqn", gym.spaces.Discrete(4))
    item = agent.example_step
    flags = dict(
        reward=[[1, 5], [1, 0], [9, 0], [0, 7], [4, 7], [0, 7]],
        terminated=[[0, 0], [1, 1], [0, 0], [0, 0], [1, 0], [0, 0]],
        truncated=np.zeros((6, 2)),
        valid=[[1, 1], [1, 1], [0, 0], [1, 1], [1, 1], [0, 1]],
    )
    steps = item._replace(**{k: np.array(x, getattr(item, k).dtype) for k, x in flags.items()})
    numbers = np.arange(12, dtype=np.float32).reshape(6, 2, 1)
    steps = steps._replace(observation=numbers + np.zeros(3, np.float32))
    steps = steps._replace(action=np.zeros((6, 2), np.int32))
    data = SimpleNamespace(storage=steps)

    def kept(fraction):
        found = offline.best_episodes(item, "data", data, fraction).storage
        return [np.asarray(x).ravel().tolist() for x in (found.observation[..., 0], found.valid)]

    # Returns are 2, 4, 5 and, of the episode without an end, 14.
    assert kept(0.25) == [[7, 9, 11], [True, True, False]]
    assert kept(0.5) == [[1, 3, 5, 7, 9, 11], [True, True, False, True, True, False]]
    assert len(kept(0.99)[0]) == 12


@pytest.mark.slow
def test_what_a_run_without_learning_has_seen_is_learned():
    """Two steps, reward 1 at the second: with a discount of 0.5 their values are 0.5 and 1."""
    run = dqn_jax.Run(env_id="environments:Probe-discount-v0", log_interval=100, eval_episodes=0)
    steps = dict(total_timesteps=800, num_envs=8, buffer_size=200, learning_starts=799, end_e=1.0)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**steps, save_experience=True), run)
    learning = dict(learning_rate=1e-2, gamma=0.5, target_network_frequency=10, batch_size=64)
    data = dict(offline_data=str(folder), offline_fraction=1, total_timesteps=1_000)
    state, _, _ = dqn_jax.train(dqn_jax.Args(**learning, **data), run)

    network = network_of(dqn_jax, np.zeros((1, 1), np.float32))
    q = network.apply(state.params, np.array([[0.0], [1.0]], np.float32))
    np.testing.assert_allclose(q, [[0.5, 0.5], [1.0, 1.0]], atol=0.02)
