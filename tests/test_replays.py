"""What wraps a replay: every method of it, and what it changes."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import buffers
from cleanreplay import replays
from dqn_jax import Step

KEY = jax.random.PRNGKey(0)
ROWS = 12


def steps(first=0, count=ROWS, stack=None):
    """Steps [count, 2] of two environments. Observations [.., 1] are numbered, from `first` on.

    With a stack of K they are [.., K, 1]: the last K numbers, and zeros before `first`.
    """
    numbers = first + np.arange(2 * count, dtype=np.float32).reshape(count, 2, 1)
    if stack:
        ago = [np.where(numbers - 2 * k < first, 0, numbers - 2 * k) for k in range(stack)]
        numbers = np.stack(ago[::-1], axis=2)
    no = np.zeros((count, 2), bool)
    action = np.zeros((count, 2), np.int32)
    return Step(numbers, action, np.ones((count, 2), np.float32), no, no, ~no)


def item(stack=None):
    """A step of one environment."""
    return jax.tree.map(lambda x: x[0, 0], steps(stack=stack))


KINDS = {"uniform": buffers.uniform_replay, "prioritised": buffers.prioritised_replay}


@pytest.fixture(params=KINDS)
def plain(request):
    """A replay of sequences of two steps."""
    return KINDS[request.param](2 * ROWS, num_envs=2, sequence_length=2)


def relabelled(replay, state, sample, key):
    """Hindsight that gives each first window of a batch the reward 5."""
    reward = sample.experience.reward.at[0].set(5)
    return sample._replace(experience=sample.experience._replace(reward=reward))


GOALS = SimpleNamespace(relabel=relabelled, close=lambda: None)


def mixed(replay):
    """The replay, half of whose batches are of data from 1,000 on, and a state with them."""
    wrapped = replays.Mixed(replay, 0.5, lambda replay: replay)
    data = wrapped.of_data(ROWS, 2)
    of_data = data.add_batch(data.init(item()), steps(first=1_000))
    return wrapped, wrapped.init(item())._replace(data=of_data)


# Arguments, after the state, of all methods that are the replay's.
CALLS = {
    "add": [jax.tree.map(lambda x: x[0], steps(first=500))],
    "add_batch": [steps(first=500, count=3)],
    "get": [np.array([0, 3])],
    "update": [lambda step: step._replace(reward=step.reward + 1), np.array([0, 3])],
    "size": [],
    "can_sample": [],
    "indices": [],
    "later": [np.array([0, 3]), KEY, np.ones((ROWS, 2), bool)],
    "priorities": [np.array([0, 3])],
    "set_priorities": [np.array([0, 3]), np.array([2.0, 3.0])],
}
OWN = {"init", "sample", "add_and_sample", "state_type"}


def methods_of(replay):
    names = [name for name in dir(type(replay)) if not name.startswith("_")]
    return {name for name in names if callable(getattr(replay, name))} - OWN


def assert_equal(x, y):
    assert jax.tree.structure(x) == jax.tree.structure(y)
    jax.tree.map(np.testing.assert_array_equal, x, y)


@pytest.mark.parametrize("wrapper", ["hindsight", "mixed"])
def test_every_other_method_is_that_of_the_replay(plain, wrapper):
    assert methods_of(plain) <= set(CALLS)
    wrapped, state = mixed(plain)
    if wrapper == "hindsight":
        wrapped, state = replays.Hindsight(plain, GOALS), plain.init(item())
    state = wrapped.add_batch(state, steps())
    own = plain.add_batch(plain.init(item()), steps())

    for name in methods_of(plain):  # some donate the state
        options = {"horizon": 5} if name == "later" else {}
        result = getattr(wrapped, name)(jax.tree.map(jnp.copy, state), *CALLS[name], **options)
        result = result.replay if isinstance(result, replays.MixedState) else result
        wanted = getattr(plain, name)(jax.tree.map(jnp.copy, own), *CALLS[name], **options)
        assert_equal(result, wanted)
    assert (wrapped.envs, wrapped.window, wrapped.max_size) == (2, 2, 2 * ROWS)


def test_data_stay_as_they_are(plain):
    wrapped, state = mixed(plain)
    after = wrapped.add_batch(state, steps())
    assert_equal(after.data, state.data)


def test_half_of_a_batch_is_of_the_data(plain):
    wrapped, state = mixed(plain)
    state, sample = wrapped.add_and_sample(state, steps(), KEY, 8)

    numbers = np.asarray(sample.experience.observation[:, 0, 0])
    assert (numbers[:4] < 100).all()
    assert (numbers[4:] >= 1_000).all()
    np.testing.assert_array_equal(np.asarray(sample.indices) < 0, [False] * 4 + [True] * 4)
    assert_equal(state.replay, plain.add_batch(plain.init(item()), steps()))


def test_hindsight_changes_what_is_sampled(plain):
    wrapped = replays.Hindsight(plain, GOALS)
    state, sample = wrapped.add_and_sample(plain.init(item()), steps(), KEY, 4)
    same = plain.sample(state, KEY, 4)

    np.testing.assert_array_equal(sample.experience.reward, [[5, 5], [1, 1], [1, 1], [1, 1]])
    np.testing.assert_array_equal(sample.experience.observation, same.experience.observation)


@pytest.fixture
def stacked(plain):
    """Stacks of three frames around the replay, and a state with the steps."""
    wrapped = replays.Stacked(replays.with_longer_sequences(plain, 2), 3)
    return wrapped, wrapped.add_batch(wrapped.init(item(stack=3)), steps(stack=3))


def test_a_stack_is_stored_once(stacked):
    wrapped, state = stacked
    assert state.storage.observation.shape == (ROWS, 2, 1)
    np.testing.assert_array_equal(state.storage.observation, steps().observation)


def test_rows_are_added_one_by_one_or_together(stacked):
    wrapped, state = stacked
    one_by_one = wrapped.init(item(stack=3))
    for t in range(ROWS):
        row = jax.tree.map(lambda x, t=t: x[t], steps(stack=3))
        one_by_one = wrapped.add(one_by_one, row)
    assert_equal(one_by_one, state)


def test_sequences_have_the_stacks_that_were_seen(stacked):
    wrapped, state = stacked
    seen = steps(stack=3).observation
    indices = np.arange(2 * (ROWS - 3))
    row, env = np.divmod(indices, 2)
    wanted = np.stack([seen[row + 2, env], seen[row + 3, env]], axis=1)

    np.testing.assert_array_equal(wrapped.get(state, indices).observation, wanted)
    sample = wrapped.sample(state, KEY, 64)
    np.testing.assert_array_equal(sample.experience.observation, wanted[sample.indices])
    assert sample.experience.reward.shape == (64, 2)


def test_wrappers_of_wrappers_work_in_a_program(plain):
    """All three at once, in a scan that samples and sets priorities."""
    longer = replays.with_longer_sequences(plain, 2)
    hindsight = replays.Hindsight(longer, GOALS)
    wrapped = replays.Stacked(replays.Mixed(hindsight, 0.5, lambda replay: replay), 3)
    state = wrapped.add_batch(wrapped.init(item(stack=3)), steps(stack=3))
    state = replays.with_data(state, lambda like: filled(wrapped.replay, like))

    def sampled(state, key):
        sample = wrapped.sample(state, key, 4)
        if plain.set_priorities:
            state = wrapped.set_priorities(state, sample.indices, jnp.ones(4))
        return state, sample.experience

    _, experience = jax.jit(lambda state: jax.lax.scan(sampled, state, jax.random.split(KEY)))(
        state
    )
    assert experience.observation.shape == (2, 4, 2, 3, 1)
    np.testing.assert_array_equal(experience.reward[:, 0], np.full((2, 2), 5))
    assert (experience.observation[:, 2:, :, 2] >= 1_000).all()


def filled(wrapped, like):
    """Data from 1,000 on, of items like this one."""
    data = wrapped.of_data(ROWS, 2)
    return data.add_batch(data.init(like), steps(first=1_000))
