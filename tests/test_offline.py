"""--offline-data: reading it, its fraction of a batch, and what a run keeps of it."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, flags_of, make_agent, saved_run, spaces_of
from test_experience import EXPERIENCE

import buffers
import dqn_jax
import iql_jax
import per_dqn_jax
import sac_jax
from cleanreplay import UsageError, checkpoints, disk, flags, offline, replays, spaces
from cleanreplay.vault import Vault

ROWS = 30  # of the data
COUNTER_RUN = dqn_jax.Run(**COUNTER)


def steps_of(agent, numbers, **leaves):
    """Makes steps of one environment that observes these numbers; other leaves are given."""
    steps = jax.tree.map(lambda x: np.stack([x] * len(numbers)), agent.example_step)
    steps.observation.T[:] = numbers
    return steps._replace(valid=np.ones(len(numbers), bool), **leaves)


def write_steps(agent, steps, num_envs=None, about=None):
    replay = buffers.uniform_replay(len(steps.valid) * (num_envs or 1), num_envs=num_envs)
    vault = Vault("data", agent.example_step, num_envs, about=about)
    vault.write(replay.add_batch(replay.init(agent.example_step), steps))


def write_data(script, run=COUNTER_RUN, num_envs=None, about=None, **leaves):
    """Writes ROWS steps of each environment, numbered from 1,000 on."""
    agent = make_agent(script, script.Args(), run)
    steps = steps_of(agent, np.arange(1_000, 1_000 + ROWS), **leaves)
    if num_envs:
        steps = jax.tree.map(lambda x: np.stack([x] * num_envs, axis=1), steps)
    write_steps(agent, steps, num_envs, about)


def agent_with(script, run=COUNTER_RUN, offline_data="data", **flags):
    """Makes an agent, and its State with the data and 20 steps of its own."""
    args = script.Args(**SMALL_DQN | flags, offline_data=offline_data)
    agent = make_agent(script, args, run, **replays.options(args, None, None))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    steps = jax.tree.map(lambda x: x[:, None], steps_of(agent, np.arange(20)))
    state = state._replace(replay=agent.replay.add_batch(state.replay, steps))
    return agent, replays.with_data(state, partial(offline.read, agent, run, {}))


def read_data(run=COUNTER_RUN, offline_data="data", **flags):
    """Makes the state of a replay with the data, for an agent of DQN with these flags."""
    agent = make_agent(dqn_jax, dqn_jax.Args(**SMALL_DQN | flags, offline_data=offline_data), run)
    return offline.read(agent, run, {}, agent.example_step)


@pytest.mark.parametrize("script", [per_dqn_jax, sac_jax])
def test_a_fraction_of_each_batch_is_offline_data(script):
    run = sac_jax.Run(env_id="Pendulum-v1") if script is sac_jax else COUNTER_RUN
    write_data(script, run)
    agent, state = agent_with(script, run, offline_fraction=0.25, n_step=3)
    draw = jax.jit(lambda state, key: agent.replay.sample(state.replay, key, 8))
    seen = set()
    for seed in range(50):
        sample = draw(state, jax.random.PRNGKey(seed))
        numbers = np.asarray(sample.experience.observation[:, :, 0])
        assert numbers.shape == (8, 4)
        np.testing.assert_array_equal(np.diff(numbers, axis=1), 1)  # consecutive steps
        assert (numbers[:6] < 20).all()
        assert (numbers[6:] >= 1_000).all()
        np.testing.assert_array_equal(sample.indices < 0, [False] * 6 + [True] * 2)
        seen.update(numbers[6:, 0].tolist())
    assert seen == {*range(1_000, 1_000 + ROWS - 3)}


def test_data_have_the_weight_1_and_no_priorities():
    """They may be many, so each of them is rarely sampled."""
    write_data(per_dqn_jax, num_envs=1_000)
    agent, state = agent_with(per_dqn_jax)

    def loss(params, target_params, batch, weights):
        value = params["params"]["q_0"]["bias"].sum()  # some gradient
        return value, ({"weights": weights}, jnp.arange(8.0) + 2)

    agent.loss = loss
    step = jax.jit(agent.gradient_step)
    _, metrics = step(state, jax.random.PRNGKey(1), 0, 10)
    np.testing.assert_array_equal(metrics["weights"], 1)  # all priorities are equal
    state = state._replace(replay=agent.replay.set_priorities(state.replay, [3], [50.0]))
    after, metrics = step(state, jax.random.PRNGKey(1), 0, 10)
    np.testing.assert_array_equal(metrics["weights"][4:], 1)
    assert (metrics["weights"][:4] < 1).any()
    priorities = agent.replay.priorities(after.replay, np.arange(20))
    assert {5} <= set(np.rint(priorities).tolist()) <= {0, 1, 2, 3, 4, 5, 50}
    for x, y in zip(after.replay.data.storage, state.replay.data.storage, strict=True):
        np.testing.assert_array_equal(x, y)


def test_steps_of_another_environment_are_reported(capsys):
    write_data(dqn_jax, about={"env_id": "Other-v0"})
    read_data(n_step=ROWS - 1)  # just enough rows for a sequence

    said = capsys.readouterr().out
    assert "data has steps of env_id Other-v0, and this run of Counter-v0" in said
    assert f"50% of each batch is from data, which has {ROWS} steps" in said


def test_a_run_has_the_data_of_another_wherever_it_is_resumed(monkeypatch):
    source = saved_run(dqn_jax, **EXPERIENCE).copied()
    args, run = flags_of(dqn_jax, **SMALL_DQN, **COUNTER)
    state, _, folder = dqn_jax.train(
        replace(args, offline_data=os.path.relpath(source.folder)), run
    )
    vault = Vault(source.folder / "experience").read(0, 200)
    held = np.asarray(state.replay.data.storage.observation)
    np.testing.assert_array_equal(held, vault["observation"])
    saved = disk.open_file(checkpoints.newest(folder))
    assert not [name for name in saved.shapes if "/data/" in name]
    about = json.loads((folder / "args.json").read_text())
    assert about["args"]["offline_data"] == str(source.folder)

    monkeypatch.chdir("/")
    run, args = flags.read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    run = replace(run, resume=str(folder))
    with pytest.raises(UsageError, match="offline_data must stay"):
        flags.check_resume(replace(args, offline_data=""), run)
    state, _, _ = dqn_jax.train(args, run)
    np.testing.assert_array_equal(state.replay.data.storage.observation, held)


def test_several_agents_share_the_data():
    write_data(dqn_jax, num_envs=2)
    args = dqn_jax.Args(**SMALL_DQN, offline_data="data")
    agent = make_agent(dqn_jax, args, COUNTER_RUN, **replays.options(args, None, None))
    states = jax.jit(jax.vmap(agent.init))(jax.random.split(jax.random.PRNGKey(0), 3))
    states = replays.with_data(states, partial(offline.read, agent, COUNTER_RUN, {}))

    data = states.replay.data.storage.observation
    np.testing.assert_array_equal(data, read_data().storage.observation)


BOX = gym.spaces.Box(-1, 1, (3,))
CHOICES = gym.spaces.Discrete(3, start=2)


def episode(observations, actions, ends=True):
    """Makes an episode of Minari with rewards 1, 2, ..., which ends or is cut off."""
    steps = np.arange(len(actions))
    episode = SimpleNamespace(id=7, observations=observations, actions=actions, rewards=steps + 1.0)
    episode.terminations = ends & (steps == len(steps) - 1)
    return episode


def dataset_of(observation_space, action_space, *episodes):
    """Makes the used parts of a dataset of Minari."""
    dataset = SimpleNamespace(observation_space=observation_space, action_space=action_space)
    dataset.env_spec = SimpleNamespace(id="Other-v0")
    dataset.iterate_episodes = lambda: iter(episodes)
    return dataset


def test_a_dataset_of_minari_is_read_with_its_ends(monkeypatch, capsys):
    first = episode(np.arange(9.0).reshape(3, 3), np.array([2, 4]))
    second = episode(np.ones((4, 3)), np.array([3, 3, 2]), ends=False)
    dataset = dataset_of(BOX, CHOICES, first, second)
    monkeypatch.setattr(offline, "open_minari", lambda name: dataset)
    agent = dqn_jax.Agent(dqn_jax.Args(offline_data="minari:x"), BOX, CHOICES)
    steps = offline.read(agent, COUNTER_RUN, {}, agent.example_step).storage

    both = np.concatenate([first.observations, second.observations])
    np.testing.assert_array_equal(steps.observation[:, 0], both)
    assert steps.action[:, 0].tolist() == [0, 2, 2, 1, 1, 0, 0]
    assert steps.reward[:, 0].tolist() == [1, 2, 0, 1, 2, 3, 0]
    assert np.flatnonzero(~steps.valid).tolist() == [2, 6]
    assert np.flatnonzero(steps.terminated).tolist() == [1]
    assert np.flatnonzero(steps.truncated).tolist() == [5]
    assert "minari:x has steps of env_id Other-v0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "metadata", "wanted"),
    [
        ({}, dict(ref_min_score=0.0, ref_max_score=9.0), (0, 9)),
        (dict(random_return=-2.0), dict(ref_min_score=0.0, ref_max_score=9.0), (-2, 9)),
        ({}, dict(ref_min_score=None), (np.nan, np.nan)),
    ],
)
def test_returns_are_normalized_by_what_minari_knows(flags, metadata, wanted, monkeypatch):
    dataset = SimpleNamespace(storage=SimpleNamespace(metadata=metadata))
    monkeypatch.setattr(offline, "open_minari", lambda name: dataset)
    args = iql_jax.Args(offline_data="minari:x", **flags)

    np.testing.assert_array_equal(offline.reference_returns(args), wanted)


def test_a_dict_is_flattened_in_the_order_of_its_space():
    """The order is that of the environment; Minari stores entries alphabetically."""
    run = sac_jax.Run(env_id="environments:Reach-v0")
    given = spaces_of(sac_jax, sac_jax.Args(), run)["given"]
    space = environments.Reach.observation_space
    rows = [space.sample() for _ in range(3)]
    seen = {name: np.stack([row[name] for row in rows]) for name in sorted(space.spaces)}
    flat = offline.as_flat(space, seen, given)

    np.testing.assert_array_equal(flat, [gym.spaces.flatten(space, row) for row in rows])


@pytest.mark.parametrize("here", [BOX, gym.spaces.Dict(b=BOX), gym.spaces.Tuple([BOX])])
def test_a_dataset_with_other_entries_is_refused(here):
    with pytest.raises(UsageError, match="the data have observations Dict"):
        offline.as_flat(gym.spaces.Dict(a=BOX), {"a": np.zeros((4, 3))}, spaces.to_json(here))


@pytest.mark.parametrize(
    ("script", "shape", "actions", "words"),
    [
        (dqn_jax, (3,), CHOICES, "the data have actions float64 .1."),
        (sac_jax, (3,), gym.spaces.Box(-1, 1, (2,)), "the data have actions float64 .1., this"),
        (sac_jax, (2,), gym.spaces.Box(-2, 2, (1,)), "each observation of .* shape .3., .* .2."),
    ],
)
def test_a_dataset_of_another_environment_is_refused(script, shape, actions, words):
    agent = script.Agent(script.Args(), gym.spaces.Box(-1, 1, shape), actions)
    data = episode(np.zeros((3, 3)), np.zeros((2, 1)))
    dataset = dataset_of(BOX, gym.spaces.Box(-2, 2, (1,)), data)

    with pytest.raises(UsageError, match=f"^offline_data: {words}"):
        offline.of_minari(agent, agent.example_step, "x", dataset, None)


@pytest.mark.parametrize(("observations", "terminations"), [(3, 3), (5, 3), (4, 2)])
def test_an_episode_whose_lengths_do_not_fit_is_refused(observations, terminations):
    agent = dqn_jax.Agent(dqn_jax.Args(), BOX, CHOICES)
    data = episode(np.zeros((observations, 3)), np.zeros(3, int))
    data.terminations = data.terminations[:terminations]

    with pytest.raises(UsageError, match="episode 7"):
        offline.steps_of(agent, agent.example_step, dataset_of(BOX, CHOICES), data, None)


def damaged():
    write_data(dqn_jax)
    file = Path("data", "vault.json")
    file.write_bytes(file.read_bytes().replace(b'"rows": 30', b'"rows": 31'))


def written(*args, **options):
    return lambda: write_data(dqn_jax, *args, **options)


OTHER_SHAPE = "observation is float32.1, 4. there, and float32.1, 3. is needed"
# A function that makes the data, the flags, and a word of the error.
MISTAKES = {
    "no vault": (lambda: None, {}, "data holds no vault: a run has one"),
    "another shape": (written(dqn_jax.Run()), {}, OTHER_SHAPE),
    "damaged": (damaged, {}, "checksum"),
    "too large": (written(action=np.full(ROWS, 3, np.int32)), {}, "row 0 beyond the 3 actions"),
    "negative": (written(action=np.full(ROWS, -1, np.int32)), {}, "row 0 beyond"),
    "not finite": (written(reward=np.float32([0] * 29 + [np.inf])), {}, "row 29: the reward"),
    "too few rows": (written(), {"n_step": 30}, "has 30 rows"),
    "no replay": (written(), {"offline_fraction": 0.99}, "batch_size"),
    "nearly none": (written(), {"offline_fraction": 0.01}, "batch_size"),
    "no dataset": (lambda: None, {"offline_data": "minari:test/no-v0"}, "no-v0 cannot be|pip"),
}


@pytest.mark.parametrize("data_box", [BOX, gym.spaces.Box(-np.inf, 1, (3,))])
def test_actions_of_other_bounds_are_refused(data_box):
    there = {"spaces": {"action": spaces.to_json(data_box)}}
    offline.check_origin("data", there, COUNTER_RUN, there["spaces"])  # its own
    run_box = gym.spaces.Box(-1, 2, (3,))

    with pytest.raises(UsageError, match=r"data has actions in .*, this run in .*2\.0"):
        offline.check_origin("data", there, COUNTER_RUN, {"action": spaces.to_json(run_box)})


def test_actions_beyond_their_bounds_by_rounding_are_clipped():
    agent = make_agent(sac_jax, sac_jax.Args(), sac_jax.Run(env_id="Pendulum-v1"))
    actions = np.float32([[1.00001], [-1.00001], [0.5]])
    steps = steps_of(agent, np.arange(3), action=actions)

    checked = offline.checked(agent, "data", steps)

    np.testing.assert_array_equal(checked.action, [[1], [-1], [0.5]])
    with pytest.raises(UsageError, match="row 1 beyond the bounds"):
        offline.checked(agent, "data", steps._replace(action=np.float32([[1], [-1.001], [0]])))


def test_numbers_become_integers_only_without_rounding():
    as_bytes = partial(offline.as_dtype, dtype=np.dtype(np.uint8), what="observations")
    exact = as_bytes(np.array([[0.0], [255.0]]))

    assert exact.dtype == np.uint8
    assert exact.tolist() == [[0], [255]]
    for number in (0.7, 300, -1, np.nan):
        with pytest.raises(UsageError, match="row 1"):
            as_bytes(np.array([[0], [number]]))


def test_the_only_action_of_a_dimension_is_stored_as_0():
    low, high = np.float32([-2, 3]), np.float32([2, 3])
    agent = SimpleNamespace(to_env_action=lambda x: low + (x + 1) / 2 * (high - low))
    like = np.zeros(2, np.float32)

    stored = offline.as_stored_actions(agent, like, np.float32([[1, 3], [-2, 3]]))

    np.testing.assert_array_equal(stored, [[0.5, 0], [-1, 0]])


@pytest.mark.filterwarnings("ignore")  # of Minari
@pytest.mark.parametrize("mistake", MISTAKES)
def test_data_that_do_not_fit_are_refused(mistake, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", "minari")
    make_data, flags, word = MISTAKES[mistake]
    make_data()
    with pytest.raises(UsageError, match=rf"^offline_(data|fraction).*({word})"):
        read_data(**flags)
