"""Wrappers of replays: their methods, and what they change."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal

import buffers
from cleanreplay import replays
from dqn_jax import Step

KEY = jax.random.PRNGKey(0)
ROWS = 12
SETTINGS = {"num_envs": 2, "sequence_length": 2, "donate": False}
UNIFORM = buffers.uniform_replay(2 * ROWS, **SETTINGS)
PRIORITISED = buffers.prioritised_replay(2 * ROWS, **SETTINGS)


def steps(first=0, count=ROWS, stack=None):
    """Makes steps [count, 2] of two environments. Observations [.., 1] are numbers from `first` on.

    With a stack of K they are [.., K, 1]: the latest K numbers, and zeros before `first`.
    """
    numbers = first + np.arange(2 * count, dtype=np.float32).reshape(count, 2, 1)
    if stack:
        ago = [np.where(numbers - 2 * k < first, 0, numbers - 2 * k) for k in range(stack)]
        numbers = np.stack(ago[::-1], axis=2)
    no = np.zeros((count, 2), bool)
    action = np.zeros((count, 2), np.int32)
    return Step(numbers, action, np.ones((count, 2), np.float32), no, no, ~no)


def take(steps, *index):
    return jax.tree.map(lambda x: x[index], steps)


def filled(replay, stack=None, first=0):
    """Makes the state of a replay with all the steps."""
    rows = steps(first, stack=stack)
    return replay.add_batch(replay.init(take(rows, 0, 0)), rows)


def relabelled(replay, state, sample, key):
    """Relabels the first sequence of each batch with the reward 5."""
    reward = sample.experience.reward.at[0].set(5)
    return sample._replace(experience=sample.experience._replace(reward=reward))


GOALS = SimpleNamespace(relabel=relabelled)
HINDSIGHT = replays.Hindsight(PRIORITISED, GOALS)
MIXED = replays.Mixed(PRIORITISED, 0.5, lambda replay: replay)


@pytest.fixture(scope="module")
def mixed():
    """Makes a state with data from 1,000 on, which are half of each batch."""
    data = filled(MIXED.of_data(ROWS, 2), first=1_000)
    return MIXED.add_batch(MIXED.init(take(steps(), 0, 0))._replace(data=data), steps()), data


def test_other_methods_are_those_of_the_replay(mixed):
    """They get its state, and the data remain unchanged."""
    state, data = mixed
    state = MIXED.add_batch(state, steps(first=500, count=3))
    wanted = PRIORITISED.add_batch(filled(PRIORITISED), steps(first=500, count=3))

    assert state.data is data
    assert_trees_equal(state.replay, wanted)
    assert MIXED.size(state) == PRIORITISED.size(wanted) == 2 * ROWS
    assert state.max_priority is state.replay.max_priority


def test_a_wrapper_has_the_attributes_of_the_replay():
    assert (MIXED.envs, MIXED.window, MIXED.max_size) == (2, 2, 2 * ROWS)
    assert not replays.Mixed(UNIFORM, 0.5, None).set_priorities


def test_hindsight_changes_what_is_sampled():
    state, sample = HINDSIGHT.add_and_sample(filled(HINDSIGHT), steps(), KEY, 4)
    same = PRIORITISED.sample(state, KEY, 4)

    assert_trees_equal(state, PRIORITISED.add_batch(filled(PRIORITISED), steps()))
    np.testing.assert_array_equal(sample.experience.reward, [[5, 5], [1, 1], [1, 1], [1, 1]])
    np.testing.assert_array_equal(sample.experience.observation, same.experience.observation)


def test_the_newest_frame_of_each_stack_is_stored():
    stacked = replays.Stacked(replays.with_longer_sequences(PRIORITISED, 2), 3)
    together = filled(stacked, stack=3)
    one_by_one = stacked.init(take(steps(stack=3), 0, 0))
    for t in range(ROWS):
        one_by_one = stacked.add(one_by_one, take(steps(stack=3), t))

    np.testing.assert_array_equal(together.storage.observation, steps().observation)
    assert_trees_equal(one_by_one, together)


@pytest.mark.parametrize(("size", "period", "expected"), [(4, 1, 8), (6, 3, 12), (20, 1, 20)])
def test_a_replay_of_longer_sequences_holds_one(size, period, expected):
    replay = buffers.uniform_replay(size, num_envs=2, sequence_length=2, period=period)
    longer = replays.with_longer_sequences(replay, 2)

    assert (longer.window, longer.period, longer.max_size) == (4, period, expected)


@pytest.fixture
def options(monkeypatch):
    """Returns a function that makes an agent's options from flags, with the goals above."""
    closed = []
    given = SimpleNamespace(relabel=relabelled, close=lambda: closed.append("goals"))
    monkeypatch.setattr(replays.goals, "find_goals", lambda *args: given)
    flags = {"buffer_size": 9, "frame_stack": 1, "her_fraction": 0.0, "offline_data": ""}

    def make(**changed):
        args = SimpleNamespace(**flags | {"offline_fraction": 0.5} | changed)
        return replays.options(args, None, None)

    return make, closed


def test_flags_without_a_wrapper_make_no_options(options):
    make, _ = options

    assert make() == {}
    assert replays.options(SimpleNamespace(frame_stack=4), None, None) == {}  # no replay


@pytest.mark.parametrize("replay", [UNIFORM, PRIORITISED], ids=["uniform", "prioritised"])
def test_all_wrappers_at_once_work_in_a_program(replay, options):
    make, closed = options
    wrap = make(frame_stack=3, her_fraction=0.5, offline_data="here")["wrap_replay"]
    wrapped = wrap(replay)
    state = filled(wrapped, stack=3)
    state = replays.with_data(state, lambda item: filled(wrapped.of_data(ROWS, 2), first=1_000))

    def sampled(state, key):
        sample = wrapped.sample(state, key, 4)
        if replay.set_priorities:
            state = wrapped.set_priorities(state, sample.indices, jnp.ones(4))
        return state, sample.experience

    scan = jax.jit(lambda state: jax.lax.scan(sampled, state, jax.random.split(KEY)))
    _, experience = scan(state)

    assert experience.observation.shape == (2, 4, 2, 3, 1)
    np.testing.assert_array_equal(experience.reward[0], [[5, 5], [1, 1], [5, 5], [1, 1]])
    assert (experience.observation[:, 2:, :, 2] >= 1_000).all()
    replays.close(wrapped)
    assert closed == ["goals"]
