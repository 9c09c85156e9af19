"""--offline-data: what it reads, what part of a batch it is, and what is kept of it."""

import json
import os
from functools import partial
from pathlib import Path

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    COUNTER,
    SMALL_DQN,
    fast_at_ends,
    make_agent,
    more,
    one_line,
    read_events,
    spaces_of,
)

import buffers
import dqn_jax
import per_dqn_jax
import sac_jax
from cleanreplay import checkpoints, disk, offline, replays
from cleanreplay.vault import Vault

ROWS = 30  # of the data
COUNTER_RUN = dqn_jax.Run(**COUNTER)


def step_of(agent, number):
    """A step of one environment, of which `number` is observed."""
    observation = np.full(agent.example_step.observation.shape, number, np.float32)
    return agent.example_step._replace(observation=observation, valid=np.True_)


def vault_with(agent, path, num_envs=None, first=1_000):
    """A vault of ROWS steps of each environment, numbered from `first` on."""
    replay = buffers.uniform_replay(ROWS * (num_envs or 1), num_envs=num_envs)
    rows = [step_of(agent, first + t) for t in range(ROWS)]
    steps = jax.tree.map(lambda *x: np.stack(x), *rows)
    if num_envs:
        steps = jax.tree.map(lambda x: np.stack([x] * num_envs, axis=1), steps)
    state = replay.add_batch(replay.init(agent.example_step), steps)
    vault = Vault(path, agent.example_step, num_envs)
    vault.write(state)
    return vault


def agent_with(script, place, **flags):
    """An agent for Counter-v0, and its State with the data."""
    args = script.Args(**SMALL_DQN | flags, offline_data=str(place))
    agent = make_agent(script, args, COUNTER_RUN, **replays.options(args, None, None))
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    rows = [step_of(agent, t) for t in range(20)]
    steps = jax.tree.map(lambda *x: np.stack(x)[:, None], *rows)
    state = state._replace(replay=agent.replay.add_batch(state.replay, steps))
    return agent, replays.with_data(state, partial(offline.read, agent, COUNTER_RUN, {}))


@pytest.fixture
def place():
    """A vault of single items."""
    vault_with(make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN), "data")
    return "data"


@pytest.mark.parametrize("script", [dqn_jax, per_dqn_jax])
def test_a_part_of_each_batch_is_of_the_data(script, place):
    agent, state = agent_with(script, place, offline_fraction=0.25, n_step=3)
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


def test_what_is_drawn_of_the_data_has_the_weight_1_and_changes_no_priority(place):
    agent, state = agent_with(per_dqn_jax, place)
    seen = []

    def loss(params, target_params, batch, weights):
        seen.append(np.asarray(weights))
        value = params["params"]["q_0"]["bias"].sum()  # some gradient
        return value, ({}, jnp.arange(8.0))

    agent.loss = loss
    with jax.disable_jit():
        state = state._replace(replay=agent.replay.set_priorities(state.replay, [3], [50.0]))
        before = state.replay.data
        state, _ = agent.gradient_step(state, jax.random.PRNGKey(1), 0, 10)
    (weights,) = seen
    np.testing.assert_array_equal(weights[4:], 1)
    assert (np.asarray(weights[:4]) < 1).any()
    for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(state.replay.data), strict=True):
        np.testing.assert_array_equal(x, y)


def test_data_do_not_change_the_weights_of_the_replay():
    """They are as many as it likes, and so each of them is drawn rarely."""
    agent = make_agent(per_dqn_jax, per_dqn_jax.Args(), COUNTER_RUN)
    vault_with(agent, "data", num_envs=1_000)
    agent, state = agent_with(per_dqn_jax, "data")
    seen = []
    given = agent.loss

    def loss(params, target_params, batch, weights):
        seen.append(np.asarray(weights))
        return given(params, target_params, batch, weights)

    agent.loss = loss
    with jax.disable_jit():
        agent.gradient_step(state, jax.random.PRNGKey(1), 0, 10)
    np.testing.assert_array_equal(seen[0], 1)  # all priorities are alike


@fast_at_ends("num_envs", [None, 1, 3])
def test_a_vault_has_single_items_or_steps_of_environments(num_envs):
    agent = make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN)
    vault_with(agent, "data", num_envs)
    _, state = agent_with(dqn_jax, "data")
    numbers = np.asarray(state.replay.data.storage.observation)[..., 0]
    expected = np.repeat(np.arange(1_000, 1_000 + ROWS)[:, None], num_envs or 1, axis=1)
    np.testing.assert_array_equal(numbers, expected)


def test_a_run_learns_from_the_experience_of_another_and_keeps_none_of_it():
    args = dqn_jax.Args(**SMALL_DQN, save_experience=True)
    _, _, source = dqn_jax.train(args, COUNTER_RUN)
    name = os.path.relpath(source)
    args = dqn_jax.Args(**SMALL_DQN, offline_data=name)
    state, _, folder = dqn_jax.train(args, COUNTER_RUN)
    assert state.replay.data.storage.valid.shape == (200, 1)
    held = jax.tree.map(lambda x: np.asarray(x)[-100:], state.replay.data.storage)
    vault = Vault(source / "experience").read(100, 200)
    np.testing.assert_array_equal(held.observation, vault["observation"])
    saved = disk.open_file(checkpoints.newest(folder))
    assert not [name for name in saved.shapes if "/data/" in name]
    assert json.loads((folder / "args.json").read_text())["args"]["offline_data"] == str(source)


def test_a_resumed_run_has_the_data_from_any_folder(place, tmp_path, monkeypatch, run_main):
    flags = ["--env-id", "environments:Counter-v0", "--log-interval", "20", "--eval-episodes", "0"]
    flags += [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_DQN.items()]
    code, out, err = run_main(dqn_jax, *flags, "--offline-data", place)
    assert code == 0, err
    folder = out.splitlines()[-1].partition(": mean")[0]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    resume = ["--resume", folder, "--total-timesteps"]
    code, out, err = run_main(dqn_jax, *resume, "300")
    assert code == 0, err
    assert f"50% of each batch is from {tmp_path / place}, which has {ROWS} steps" in out
    assert "offline_data must stay" in one_line(
        run_main(dqn_jax, *resume, "400", "--offline-data=")
    )


def test_each_agent_of_a_sweep_has_the_data():
    sweep = ("gamma=0.5,0.6",)
    run = dqn_jax.Run(
        env_id="environments:Chain-v0", sweep=sweep, log_interval=100, eval_episodes=0
    )
    agent = make_agent(dqn_jax, dqn_jax.Args(), run)
    vault_with(agent, "data", num_envs=2)
    args = dqn_jax.Args(**SMALL_DQN, offline_data="data")
    state, _, folder = dqn_jax.train(args, run)
    assert state.replay.data.storage.observation.shape == (2, ROWS, 2, 5)
    longer = dqn_jax.Args(**SMALL_DQN | {"total_timesteps": 400}, offline_data="data")
    dqn_jax.train(longer, dqn_jax.Run(**vars(run) | {"resume": str(folder)}))


def refusal(run_main, *flags, script=dqn_jax):
    """The one line about data."""
    more = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL_DQN.items()]
    line = one_line(run_main(script, "--env-id", "environments:Counter-v0", *more, *flags))
    assert line.startswith("error: offline_")
    return line


def test_a_run_without_experience_is_refused(run_main):
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), COUNTER_RUN)
    line = refusal(run_main, "--offline-data", str(folder))
    assert "holds no vault: a run has one with --save-experience" in line


def test_steps_of_another_shape_are_refused(run_main):
    agent = make_agent(dqn_jax, dqn_jax.Args(), dqn_jax.Run())
    vault_with(agent, "data")
    line = refusal(run_main, "--offline-data", "data")
    assert "observation is float32[1, 4] there, and float32[1, 3] is needed" in line


def test_a_damaged_vault_is_refused(run_main, place):
    file = Path(place, "vault.json")
    file.write_bytes(file.read_bytes().replace(b'"rows": 30', b'"rows": 31'))
    assert "its checksum is another" in refusal(run_main, "--offline-data", place)


def test_actions_that_the_run_has_not_are_refused(run_main):
    agent = make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN)
    item = step_of(agent, 0)._replace(action=np.int32(3))
    replay = buffers.uniform_replay(ROWS)
    items = jax.tree.map(lambda x: np.stack([x] * ROWS), item)
    Vault("data", item).write(replay.add_batch(replay.init(item), items))
    line = refusal(run_main, "--offline-data", "data")
    assert "has actions from 3 to 3, and this run has 3" in line


def test_fewer_rows_than_a_window_are_refused(run_main, place):
    assert f"has {ROWS} rows, too few" in refusal(run_main, "--offline-data", place, "--n-step=30")


@pytest.mark.parametrize("fraction", ["1", "0", "0.01"])
def test_a_fraction_that_leaves_nothing_is_refused(run_main, place, fraction):
    line = refusal(run_main, "--offline-data", place, "--offline-fraction", fraction)
    assert "must leave at least one of batch_size" in line


def test_steps_of_another_environment_are_said(place, capsys):
    vault = Vault("other", step_of(make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN), 0))
    vault.about = {"env_id": "Other-v0"}
    replay = buffers.uniform_replay(ROWS)
    item = step_of(make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN), 0)
    items = jax.tree.map(lambda x: np.stack([x] * ROWS), item)
    vault.write(replay.add_batch(replay.init(item), items))
    agent_with(dqn_jax, "other")
    said = "other has steps of Other-v0, and this run is in environments:Counter-v0"
    assert said in capsys.readouterr().out


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


@pytest.fixture
def minari_folder(tmp_path, monkeypatch):
    """Where datasets are."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_of_minari_is_read_with_the_ends_of_its_episodes(minari_folder):
    dataset = minari_dataset(gym.make("CartPole-v1"), "test/cart-v0", [0, 1] * 50, cut=True)
    args = dqn_jax.Args(**SMALL_DQN, offline_data="minari:test/cart-v0")
    agent = make_agent(dqn_jax, args, dqn_jax.Run())
    steps = offline.of_minari(agent, agent.example_step, args.offline_data, None).storage
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


@pytest.mark.filterwarnings("ignore")
def test_actions_of_a_box_are_stored_between_minus_1_and_1(minari_folder):
    actions = [np.array([x], np.float32) for x in (-2.0, -1.0, 0.0, 0.5, 2.0)]
    minari_dataset(gym.make("Pendulum-v1"), "test/pendulum-v0", actions)
    args = sac_jax.Args(offline_data="minari:test/pendulum-v0")
    agent = make_agent(sac_jax, args, sac_jax.Run())
    steps = offline.of_minari(agent, agent.example_step, args.offline_data, None).storage
    stored = np.asarray(steps.action)[:5, 0, 0]
    np.testing.assert_allclose(stored, [-1, -0.5, 0, 0.25, 1], atol=1e-6)
    back = agent.to_env_action(np.asarray(steps.action)[:5, 0])
    np.testing.assert_allclose(back, np.stack(actions), atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_a_dict_is_flattened_in_the_order_of_its_space(minari_folder):
    """That of the environment: Minari keeps the entries in the order of the alphabet."""
    env = gym.wrappers.TimeLimit(environments.Reach(), 9)
    dataset = minari_dataset(env, "test/reach-v0", [np.array([0.5, -0.5], np.float32)] * 9)
    run = sac_jax.Run(env_id="environments:Reach-v0")
    args = sac_jax.Args(offline_data="minari:test/reach-v0")
    agent = make_agent(sac_jax, args, run)
    entries = spaces_of(sac_jax, args, run)["entries"]
    steps = offline.of_minari(agent, agent.example_step, args.offline_data, entries).storage
    seen = next(iter(dataset.iterate_episodes())).observations
    space = environments.Reach.observation_space
    row = {name: seen[name][3] for name in space.spaces}
    assert list(space.spaces) != list(dataset.observation_space.spaces)
    np.testing.assert_array_equal(steps.observation[3, 0], gym.spaces.flatten(space, row))


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_that_is_not_there_is_refused(minari_folder, run_main):
    pytest.importorskip("minari")
    line = refusal(run_main, "--offline-data", "minari:test/nothing-v0")
    assert "minari:test/nothing-v0 cannot be loaded: " in line


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_with_fewer_numbers_in_an_action_is_refused(minari_folder):
    minari_dataset(gym.make("Pendulum-v1"), "test/pendulum-v0", [np.zeros(1, np.float32)] * 3)
    agent = make_agent(sac_jax, sac_jax.Args(), sac_jax.Run(env_id="environments:Reach-v0"))
    with pytest.raises(dqn_jax.UsageError, match="offline_data: the data have "):
        offline.of_minari(agent, agent.example_step, "minari:test/pendulum-v0", None)


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_of_other_actions_is_refused(minari_folder):
    minari_dataset(gym.make("Pendulum-v1"), "test/pendulum-v0", [np.zeros(1, np.float32)] * 3)
    agent = make_agent(dqn_jax, dqn_jax.Args(), dqn_jax.Run())
    with pytest.raises(dqn_jax.UsageError, match="offline_data: the data have actions Box"):
        offline.of_minari(agent, agent.example_step, "minari:test/pendulum-v0", None)


def test_with_clip_rewards_the_signs_of_their_rewards_are_learned():
    agent = make_agent(dqn_jax, dqn_jax.Args(), COUNTER_RUN)
    item = step_of(agent, 0)
    replay = buffers.uniform_replay(ROWS)
    items = jax.tree.map(lambda x: np.stack([x] * ROWS), item)
    items = items._replace(reward=np.linspace(-5, 5, ROWS, dtype=np.float32))
    Vault("data", item).write(replay.add_batch(replay.init(item), items))
    agent, state = agent_with(dqn_jax, "data", clip_rewards=True)
    sample = agent.replay.sample(state.replay, jax.random.PRNGKey(0), 8)
    transitions = agent.to_transitions(sample.experience, jax.random.PRNGKey(1))
    assert set(np.asarray(transitions.reward)[4:].tolist()) == {-1, 1}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Minari
def test_ten_demonstrations_solve_what_exploration_does_not_find(optimised, minari_folder):
    """MountainCarContinuous, by SAC: a policy that pushes where the car moves shows the flag."""
    minari = pytest.importorskip("minari")
    env = minari.DataCollector(gym.make("MountainCarContinuous-v0"))
    random = np.random.default_rng(0)
    for seed in range(10):
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            push = np.clip([np.sign(observation[1]) + random.normal(0, 0.3)], -1, 1)
            observation, _, terminated, truncated, _ = env.step(push.astype(np.float32))
            over = terminated or truncated
    about = dict(algorithm_name="x", author="x", author_email="x", code_permalink="x")
    env.create_dataset("test/car-v0", description="x", eval_env="CartPole-v1", **about)
    env.close()
    run = sac_jax.Run(env_id="MountainCarContinuous-v0", log_interval=500)
    returns = {}
    for data in ("", "minari:test/car-v0"):
        args = sac_jax.Args(total_timesteps=5_000, learning_starts=500, offline_data=data)
        scalars, _ = read_events(sac_jax.train(args, run)[2])
        returns[data] = scalars["eval/episodic_return"][-1][1]
    assert returns[""] < 10
    assert returns["minari:test/car-v0"] > 80


@pytest.mark.parametrize("script", [more(per_dqn_jax), more(sac_jax)])
def test_other_scripts_learn_from_data(script, run_main):
    env_id = "Pendulum-v1" if script is sac_jax else "CartPole-v1"
    flags = ["--env-id", env_id, "--learning-starts", "256", "--eval-episodes", "0"]
    flags += ["--total-timesteps", "300", "--log-interval", "100"]
    code, out, err = run_main(script, *flags, "--save-experience")
    assert code == 0, err
    folder = out.splitlines()[-1].partition(": mean")[0]
    code, _, err = run_main(script, *flags, "--offline-data", folder)
    assert code == 0, err
    assert Path(folder, "experience").exists()
