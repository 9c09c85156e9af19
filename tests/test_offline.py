"""--offline-data: what it reads, what part of a batch it is, and what is kept of it."""

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
import per_dqn_jax
import sac_jax
from cleanreplay import UsageError, checkpoints, disk, flags, offline, replays, spaces
from cleanreplay.vault import Vault

ROWS = 30  # of the data
COUNTER_RUN = dqn_jax.Run(**COUNTER)
MINARI = pytest.mark.filterwarnings("ignore")  # it warns of its own code


def steps_of(agent, numbers, **leaves):
    """Steps of one environment, of which these numbers are observed; other leaves are given."""
    steps = jax.tree.map(lambda x: np.stack([x] * len(numbers)), agent.example_step)
    steps.observation.T[:] = numbers
    return steps._replace(valid=np.ones(len(numbers), bool), **leaves)


def write_steps(agent, steps, num_envs=None, about=None):
    """Writes steps [rows], or [rows, N], to a vault `data`."""
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
    """An agent, and its State with the data and 20 steps of its own."""
    args = script.Args(**SMALL_DQN | flags, offline_data=offline_data)
    agent = make_agent(script, args, run, **replays.options(args, None, None))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    steps = jax.tree.map(lambda x: x[:, None], steps_of(agent, np.arange(20)))
    state = state._replace(replay=agent.replay.add_batch(state.replay, steps))
    return agent, replays.with_data(state, partial(offline.read, agent, run, {}))


@pytest.mark.parametrize("script", [dqn_jax, per_dqn_jax, sac_jax])
def test_a_part_of_each_batch_is_of_the_data(script):
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
    """They are as many as it likes, and so each of them is drawn rarely."""
    write_data(per_dqn_jax, num_envs=1_000)
    agent, state = agent_with(per_dqn_jax)

    def loss(params, target_params, batch, weights):
        value = params["params"]["q_0"]["bias"].sum()  # some gradient
        return value, ({"weights": weights}, jnp.arange(8.0) + 2)

    agent.loss = loss
    step = jax.jit(agent.gradient_step)
    _, metrics = step(state, jax.random.PRNGKey(1), 0, 10)
    np.testing.assert_array_equal(metrics["weights"], 1)  # all priorities are alike
    state = state._replace(replay=agent.replay.set_priorities(state.replay, [3], [50.0]))
    after, metrics = step(state, jax.random.PRNGKey(1), 0, 10)
    np.testing.assert_array_equal(metrics["weights"][4:], 1)
    assert (metrics["weights"][:4] < 1).any()
    priorities = agent.replay.priorities(after.replay, np.arange(20))
    assert {5} <= set(np.rint(priorities).tolist()) <= {0, 1, 2, 3, 4, 5, 50}
    for x, y in zip(after.replay.data.storage, state.replay.data.storage, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("num_envs", [None, 3])
def test_a_vault_has_single_items_or_steps_of_environments(num_envs):
    write_data(dqn_jax, num_envs=num_envs)
    _, state = agent_with(dqn_jax)

    numbers = np.asarray(state.replay.data.storage.observation)[..., 0]
    expected = np.repeat(np.arange(1_000, 1_000 + ROWS)[:, None], num_envs or 1, axis=1)
    np.testing.assert_array_equal(numbers, expected)


def test_with_clip_rewards_signs_of_their_rewards_are_learned():
    write_data(dqn_jax, reward=np.linspace(-5, 5, ROWS, dtype=np.float32))
    agent, state = agent_with(dqn_jax, clip_rewards=True)

    sample = agent.replay.sample(state.replay, jax.random.PRNGKey(0), 8)
    transitions = agent.to_transitions(sample.experience, jax.random.PRNGKey(1))
    assert set(np.asarray(transitions.reward)[4:].tolist()) == {-1, 1}


def test_steps_of_another_environment_are_said(capsys):
    write_data(dqn_jax, about={"env_id": "Other-v0"})
    agent_with(dqn_jax, n_step=ROWS - 1)  # they are just enough for a sequence

    said = capsys.readouterr().out
    assert "data has steps of env_id Other-v0, and this run of Counter-v0" in said
    assert f"50% of each batch is from data, which has {ROWS} steps" in said


def test_a_run_learns_from_another_and_is_resumed_anywhere(monkeypatch):
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
        dqn_jax.train(replace(args, offline_data=""), run)
    state, _, _ = dqn_jax.train(replace(args, total_timesteps=220), run)
    np.testing.assert_array_equal(state.replay.data.storage.observation, held)


def test_each_agent_of_a_sweep_has_the_data():
    every = dict(log_interval=100, eval_episodes=0, checkpoint_interval=0)
    run = dqn_jax.Run(env_id="environments:Chain-v0", sweep=("gamma=0.5,0.6",), **every)
    write_data(dqn_jax, dqn_jax.Run(env_id="environments:Chain-v0"), num_envs=2)
    state, _, _ = dqn_jax.train(dqn_jax.Args(**SMALL_DQN, offline_data="data"), run)

    assert state.replay.data.storage.observation.shape == (2, ROWS, 2, 5)


def minari_dataset(env, name, actions, cut=False):
    """A dataset of two episodes with these actions, the second of which the collector may cut."""
    minari = pytest.importorskip("minari")
    env = minari.DataCollector(env)
    for seed in range(2):
        env.reset(seed=seed)
        for t, action in enumerate(actions):
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated or (cut and seed == 1 and t == 2):
                break
    env.reset()  # keeps what was not over
    about = dict(algorithm_name="x", author="x", author_email="x", code_permalink="x")
    dataset = env.create_dataset(name, description="x", eval_env="CartPole-v1", **about)
    env.close()
    return dataset


def pendulum_dataset(*forces):
    """A dataset with these forces in each of its episodes."""
    actions = [np.array([x], np.float32) for x in forces]
    minari_dataset(gym.make("Pendulum-v1"), "test/data-v0", actions)
    return np.stack(actions)


def read_minari(script, env_id):
    """The agent of a run, and the Steps of the dataset test/data-v0 as it reads them."""
    args = script.Args(offline_data="minari:test/data-v0")
    run = script.Run(env_id=env_id)
    agent = make_agent(script, args, run)
    entries = spaces_of(script, args, run).get("entries")
    dataset = offline.open_minari(args.offline_data)
    data = offline.of_minari(agent, agent.example_step, args.offline_data, dataset, entries)
    return agent, data.storage


@pytest.fixture(autouse=True)
def _minari_folder(tmp_path, monkeypatch):
    """Datasets are in the folder of the test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@MINARI
def test_a_dataset_of_minari_is_read_with_its_ends():
    dataset = minari_dataset(gym.make("CartPole-v1"), "test/data-v0", [0, 1] * 50, cut=True)
    _, steps = read_minari(dqn_jax, "CartPole-v1")
    first, second = dataset.iterate_episodes()
    rows = len(first) + 1

    np.testing.assert_array_equal(steps.observation[:rows, 0], np.float32(first.observations))
    np.testing.assert_array_equal(steps.observation[rows:, 0], np.float32(second.observations))
    np.testing.assert_array_equal(steps.action[: rows - 1, 0], first.actions)
    valid = np.ones(len(steps.valid), bool)
    valid[[rows - 1, -1]] = False
    np.testing.assert_array_equal(steps.valid[:, 0], valid)
    assert np.flatnonzero(steps.terminated).tolist() == [rows - 2]
    assert np.flatnonzero(steps.truncated).tolist() == [len(steps.valid) - 2]
    np.testing.assert_array_equal(steps.reward[:, 0], valid)


@MINARI
def test_actions_of_a_box_are_stored_between_minus_1_and_1():
    actions = pendulum_dataset(-2.0, -1.0, 0.0, 0.5, 2.0)
    agent, steps = read_minari(sac_jax, "Pendulum-v1")

    stored = np.asarray(steps.action)[:5, 0]
    np.testing.assert_allclose(stored[:, 0], [-1, -0.5, 0, 0.25, 1], atol=1e-6)
    np.testing.assert_allclose(agent.to_env_action(stored), actions, atol=1e-6)


@MINARI
def test_a_dict_is_flattened_in_the_order_of_its_space():
    """That of the environment: Minari keeps the entries in the order of the alphabet."""
    env = gym.wrappers.TimeLimit(environments.Reach(), 9)
    dataset = minari_dataset(env, "test/data-v0", [np.array([0.5, -0.5], np.float32)] * 9)
    _, steps = read_minari(sac_jax, "environments:Reach-v0")

    seen = next(iter(dataset.iterate_episodes())).observations
    space = environments.Reach.observation_space
    row = {name: seen[name][3] for name in space.spaces}
    assert list(space.spaces) != list(dataset.observation_space.spaces)
    np.testing.assert_array_equal(steps.observation[3, 0], gym.spaces.flatten(space, row))


def damaged():
    """A vault whose file was changed."""
    write_data(dqn_jax)
    file = Path("data", "vault.json")
    file.write_bytes(file.read_bytes().replace(b'"rows": 30', b'"rows": 31'))


def written(*args, **options):
    """Writes data like these."""
    return lambda: write_data(dqn_jax, *args, **options)


OTHER_SHAPE = "observation is float32.1, 4. there, and float32.1, 3. is needed"
# What makes the data, the flags, and a word of the error.
MISTAKES = {
    "no vault": (lambda: None, {}, "data holds no vault: a run has one"),
    "another shape": (written(dqn_jax.Run()), {}, OTHER_SHAPE),
    "damaged": (damaged, {}, "checksum"),
    "too large": (written(action=np.full(ROWS, 3, np.int32)), {}, "row 0 beyond the 3 actions"),
    "negative": (written(action=np.full(ROWS, -1, np.int32)), {}, "row 0 beyond"),
    "not finite": (written(reward=np.float32([0] * 29 + [np.inf])), {}, "row 29: the reward"),
    "too few rows": (written(), {"n_step": 30}, "has 30 rows"),
    "no replay": (written(), {"offline_fraction": 1.0}, "batch_size"),
    "no data": (written(), {"offline_fraction": 0.0}, "batch_size"),
    "nearly none": (written(), {"offline_fraction": 0.01}, "batch_size"),
    "no dataset": (lambda: None, {"offline_data": "minari:test/no-v0"}, "no-v0 cannot be|pip"),
}


UNIT = gym.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize("data_box", [UNIT, gym.spaces.Box(-np.inf, 1, (2,))])
def test_actions_of_other_bounds_are_refused(data_box):
    there = {"spaces": {"action": spaces.to_json(data_box)}}
    offline.check_origin("data", there, COUNTER_RUN, there["spaces"])  # its own
    offline.check_origin("data", {}, COUNTER_RUN, there["spaces"])  # not known
    run_box = gym.spaces.Box(-1, 2, (2,))

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


@pytest.mark.parametrize(("observations", "terminations"), [(3, 3), (5, 3), (4, 2)])
def test_an_episode_whose_lengths_do_not_fit_is_refused(observations, terminations):
    agent = make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN)
    dataset = SimpleNamespace(observation_space=UNIT, action_space=gym.spaces.Discrete(3))
    episode = SimpleNamespace(id=7, observations=np.zeros((observations, 2)), rewards=np.zeros(3))
    episode.actions, episode.terminations = np.zeros(3, int), np.zeros(terminations, bool)

    with pytest.raises(UsageError, match="episode 7"):
        offline.steps_of(agent, agent.example_step, dataset, episode, None)


def test_the_only_action_of_a_dimension_is_stored_as_0():
    low, high = np.float32([-2, 3]), np.float32([2, 3])
    agent = SimpleNamespace(to_env_action=lambda x: low + (x + 1) / 2 * (high - low))
    space = gym.spaces.Box(low, high)
    like = np.zeros(2, np.float32)

    stored = offline.as_stored_actions(agent, like, space, np.float32([[1, 3], [-2, 3]]))

    np.testing.assert_array_equal(stored, [[0.5, 0], [-1, 0]])


@MINARI
@pytest.mark.parametrize("mistake", MISTAKES)
def test_data_that_do_not_fit_are_refused(mistake):
    make_data, flags, word = MISTAKES[mistake]
    make_data()
    with pytest.raises(UsageError, match=rf"^offline_(data|fraction).*({word})"):
        agent_with(dqn_jax, **flags)


@MINARI
@pytest.mark.parametrize(
    ("script", "env_id", "words"),
    [
        (dqn_jax, "CartPole-v1", "the data have actions Box"),
        (sac_jax, "environments:Reach-v0", "the data have actions Box"),  # fewer numbers
        (sac_jax, "MountainCarContinuous-v0", "each observation of .* has shape .3., .* .2."),
    ],
)
def test_a_dataset_of_another_environment_is_refused(script, env_id, words):
    pendulum_dataset(0.0, 0.0)
    with pytest.raises(UsageError, match=f"^offline_data: {words}"):
        read_minari(script, env_id)
