"""load_policy gives the agent of a run that was best in an evaluation."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from helpers import SMALL_DQN, SMALL_PPO, make_agent, more, spaces_of

import cleanreplay
import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
from cleanreplay import agent_file, checkpoints, compiled, disk, experiment, spaces

SCRIPTS = {
    "dqn": (dqn_jax, SMALL_DQN),
    "per_dqn": (per_dqn_jax, SMALL_DQN),
    "ppo": (ppo_jax, SMALL_PPO),
}
ABOUT = {"returns": [], "is_whole": True, "num_agents": None, "own": {}}  # of a checkpoint
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20)
CHAIN = dict(env_id="environments:Chain-v0", log_interval=64, eval_episodes=2)
OBSERVATIONS = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)


def agents_of(run):
    """DQN, and parameters to act with that always choose action 0, 1 or 2."""
    agent = make_agent(dqn_jax, dqn_jax.Args(**SMALL_DQN), run)
    params = jax.jit(agent.init)(jax.random.PRNGKey(0)).params
    always = []
    for action in range(3):
        one = jax.tree.map(np.zeros_like, params)
        one["params"]["q"]["bias"][action] = 1
        always.append(one)
    return agent, always


def folder_of(run):
    """A folder as one of a run of DQN, in which nothing is saved but the flags."""
    folder = Path("run").absolute()
    folder.mkdir()
    args = asdict(dqn_jax.Args(**SMALL_DQN))
    saved = {"script": dqn_jax.__file__, "run": asdict(run), "args": args}
    saved["spaces"] = spaces_of(dqn_jax, dqn_jax.Args(**SMALL_DQN), run)
    (folder / "args.json").write_text(json.dumps(saved))
    return folder


def action_of(folder):
    """The only action that the loaded agent takes, whatever it observes."""
    actions = cleanreplay.load_policy(folder)(OBSERVATIONS)
    assert actions.shape == (7,)
    (action,) = set(actions.tolist())
    return action


def about_of(folder):
    """What args.json of the run in this folder has."""
    return json.loads((folder / "args.json").read_text())


def save_if_better(folder, step, params, score):
    """Saves the best agent of the run in this folder, as after it was opened anew."""
    leaves = disk.by_name({"params": params})
    agent_file.BestAgent(folder, about_of(folder)).save_if_better(step, leaves, score)


def save(folder, step, state):
    """Writes a checkpoint to the folder of a run."""
    saver = checkpoints.Checkpoints(folder)
    saver.save(step, state, about_of(folder) | ABOUT)
    saver.wait()


def step_of_best(folder):
    """The step at which the best agent was saved."""
    return agent_file.open_agent(folder / "best.safetensors").about["step"]


def greedy(agent, params, observations):
    """The environment's actions without exploration."""
    return agent.to_env_action(np.asarray(agent.act(params, observations)))


def wide_observations(*shape):
    """Random ones, so far apart that agents that are about the same act otherwise at some."""
    return 100 * np.random.default_rng(0).normal(size=shape).astype(np.float32)


# --- the best one


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([3.0, 2.0, 1.0], 0),
        ([1.0, 3.0, 2.0], 1),
        ([1.0, 2.0, 3.0], 2),
        ([-3.0, -1.0, -2.0], 1),
        ([1.0, 2.0, 2.0], 1),  # of equal ones the first
        ([0.0, 0.0, -1.0], 0),
        ([1.0, np.nan, 0.0], 0),
        ([np.nan, 1.0, np.nan], 1),
        ([1.0, np.inf, 0.0], 0),  # rewards that are no numbers are no reason to keep an agent
        ([1.0, np.float32(2.5), np.float64(2.25)], 1),
    ],
)
def test_the_agent_of_the_highest_score_is_kept(scores, best):
    run = dqn_jax.Run(**COUNTER)
    agent, always = agents_of(run)
    folder = folder_of(run)
    saved = agent_file.BestAgent(folder, about_of(folder))
    for step, params, score in zip((100, 200, 300), always, scores, strict=True):
        saved.save_if_better(step, disk.by_name({"params": params}), score)
    assert action_of(folder) == best
    assert sorted(path.name for path in folder.iterdir()) == ["args.json", "best.safetensors"]


def test_a_lower_score_of_a_run_that_goes_on_changes_nothing():
    """Nor does it where the folder was closed and opened again between the two."""
    run = dqn_jax.Run(**COUNTER)
    agent, always = agents_of(run)
    folder = folder_of(run)
    save_if_better(folder, 100, always[1], 5.0)
    save_if_better(folder, 200, always[2], 4.0)
    assert action_of(folder) == 1
    save_if_better(folder, 300, always[0], 6.0)
    assert action_of(folder) == 0
    assert step_of_best(folder) == 300


def test_a_second_evaluation_of_the_best_agent_leaves_its_file_alone():
    """A complete run that is resumed evaluates the same agent, which may be luckier."""
    agent, always = agents_of(dqn_jax.Run(**COUNTER))
    folder = folder_of(dqn_jax.Run(**COUNTER))
    save_if_better(folder, 100, always[1], 5.0)
    before = (folder / "best.safetensors").read_bytes()
    save_if_better(folder, 100, always[1], 7.0)
    assert (folder / "best.safetensors").read_bytes() == before


def test_the_best_agent_of_a_run_is_that_of_its_best_evaluation(monkeypatch):
    """Not the newest, which acts otherwise."""
    args = dqn_jax.Args(**SMALL_DQN | dict(learning_rate=0.1))
    run = dqn_jax.Run(**COUNTER, eval_interval=60, eval_episodes=1)
    scores = iter([1.0, 4.0, 2.0, 3.0])
    agents = []

    def play_episodes(agent, run, params, envs, stop):
        agents.append(jax.tree.map(np.array, params))
        return np.full(envs.num_envs, next(scores))

    monkeypatch.setattr(experiment, "play_episodes", play_episodes)
    _, _, folder = dqn_jax.train(args, run)

    assert step_of_best(folder) == 120
    agent = make_agent(dqn_jax, args, run)
    observations = wide_observations(1000, 3)
    wanted = [greedy(agent, params, observations) for params in agents]
    assert len(wanted) == 4
    loaded = cleanreplay.load_policy(folder)(observations)
    np.testing.assert_array_equal(loaded, wanted[1])
    assert (loaded != wanted[3]).any()


@pytest.mark.parametrize("eval_episodes", [0, 1])
def test_without_an_evaluation_that_is_a_number_it_is_the_agent_saved_last(
    eval_episodes, monkeypatch
):
    monkeypatch.setattr(experiment, "play_episodes", lambda *_, stop: np.array([np.nan]))
    args = dqn_jax.Args(**SMALL_DQN | dict(learning_rate=0.1))
    run = dqn_jax.Run(**COUNTER, checkpoint_interval=100, eval_episodes=eval_episodes)
    state, _, folder = dqn_jax.train(args, run)
    agent = make_agent(dqn_jax, args, run)
    observations = wide_observations(1000, 3)

    loaded = cleanreplay.load_policy(folder)(observations)
    wanted = greedy(agent, state.params, observations)
    np.testing.assert_array_equal(loaded, wanted)

    # Without the checkpoint of the end it is that of step 100.
    shutil.rmtree(folder / "checkpoints" / "200")
    saver = checkpoints.Checkpoints(folder)
    step, earlier, _ = saver.restore(jax.tree.map(jnp.zeros_like, state))
    assert step == 100
    loaded = cleanreplay.load_policy(folder)(observations)
    wanted = greedy(agent, earlier.params, observations)
    np.testing.assert_array_equal(loaded, wanted)


@pytest.mark.parametrize("name", ["dqn", more("per_dqn"), "ppo"])
def test_only_what_the_policy_needs_is_read(name, monkeypatch):
    """A replay may have gigabytes."""
    module, flags = SCRIPTS[name]
    args = module.Args(**flags)
    run = module.Run(**COUNTER, eval_episodes=0)
    state, _, folder = module.train(args, run)
    agent = make_agent(module, args, run)
    read = []
    take = disk.Stored.read

    def note(stored, wanted):
        read.extend(wanted)
        return take(stored, wanted)

    monkeypatch.setattr(disk.Stored, "read", note)
    policy = cleanreplay.load_policy(folder)
    wanted = greedy(agent, agent.policy_params(state), OBSERVATIONS)
    np.testing.assert_array_equal(policy(OBSERVATIONS), wanted)
    assert sorted(read) == sorted(agent_file.policy_leaves(agent))


# --- kinds of agents


@pytest.mark.more
@pytest.mark.parametrize("name", ["dqn", "per_dqn", "ppo"])
@pytest.mark.parametrize("best", [0, 2])
def test_of_many_seeds_it_is_the_best_one(name, best, monkeypatch):
    module, flags = SCRIPTS[name]
    returns = np.zeros((3, 2))  # of two episodes of each
    returns[best] = 1.0
    monkeypatch.setattr(compiled.Trainer, "evaluate", lambda *_: (returns, returns))
    args = module.Args(**flags | dict(num_envs=4))
    run = module.Run(**CHAIN, num_seeds=3)
    states, _, folder = module.train(args, run)

    agent = make_agent(module, args, run)
    params = agent.policy_params(states)
    observations = np.random.default_rng(0).normal(size=(1000, 5)).astype(np.float32)
    wanted = []
    for seed in range(3):
        own = jax.tree.map(lambda x, seed=seed: x[seed], params)
        wanted.append(greedy(agent, own, observations))
    loaded = cleanreplay.load_policy(folder)(observations)
    np.testing.assert_array_equal(loaded, wanted[best])
    assert (loaded != wanted[1]).any()


@pytest.mark.more
def test_of_many_seeds_without_an_evaluation_it_is_the_first_one():
    args = ppo_jax.Args(**SMALL_PPO | dict(num_envs=4))
    run = ppo_jax.Run(**CHAIN | dict(eval_episodes=0), num_seeds=3)
    states, _, folder = ppo_jax.train(args, run)

    agent = make_agent(ppo_jax, args, run)
    first_agent = jax.tree.map(lambda x: x[0], agent.policy_params(states))
    observations = np.random.default_rng(0).normal(size=(1000, 5)).astype(np.float32)
    loaded = cleanreplay.load_policy(folder)(observations)
    wanted = greedy(agent, first_agent, observations)
    np.testing.assert_array_equal(loaded, wanted)


def test_an_agent_of_stacks_takes_stacks():
    args = dqn_jax.Args(**SMALL_DQN | dict(frame_stack=4, learning_rate=0.1))
    run = dqn_jax.Run(**COUNTER, eval_episodes=1)
    state, _, folder = dqn_jax.train(args, run)
    agent = make_agent(dqn_jax, args, run)
    stacks = wide_observations(500, 4, 3)

    actions = cleanreplay.load_policy(folder)(stacks)

    np.testing.assert_array_equal(actions, greedy(agent, state.params, stacks))
    q_values = agent.network.apply(state.params, stacks)
    np.testing.assert_array_equal(actions, np.argmax(q_values, axis=1))
    # The frames before the newest one matter.
    only_newest = stacks.copy()
    only_newest[:, :3] = 0
    assert (cleanreplay.load_policy(folder)(only_newest) != actions).any()


@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_actions_that_start_at_1_are_those_of_the_environment(name):
    module, flags = SCRIPTS[name]
    run = module.Run(env_id="environments:Start-v0", log_interval=20, eval_episodes=1)
    args = module.Args(**flags | dict(learning_rate=0.01, total_timesteps=640))
    _, _, folder = module.train(args, run)
    envs = gym.make_vec("environments:Start-v0", 3)
    observation, _ = envs.reset(seed=0)

    actions = cleanreplay.load_policy(folder)(observation)

    np.testing.assert_array_equal(actions, [2, 2, 2])  # the better one
    _, reward, *_ = envs.step(actions)
    np.testing.assert_array_equal(reward, [1, 1, 1])


def test_actions_of_a_box_are_scaled_and_clipped_to_it():
    run = ppo_jax.Run(env_id="Pendulum-v1", log_interval=64, eval_episodes=0)
    args = ppo_jax.Args(**SMALL_PPO)
    state, _, folder = ppo_jax.train(args, run)
    agent = make_agent(ppo_jax, args, run)
    params, moments = agent.policy_params(state)
    params = jax.tree.map(np.array, params)
    params["params"]["actor"]["kernel"] *= 1_000  # the mean of the actions
    leaves = disk.by_name({"params": params, "obs_rms": moments})
    agent_file.BestAgent(folder, about_of(folder)).save_if_better(64, leaves, 0.0)
    observations = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    output, _ = agent.network.apply(params, ppo_jax.normalize(observations, moments))
    mean = np.asarray(output)[:, :1]
    assert mean.min() < -1
    assert mean.max() > 1
    assert (np.abs(mean) < 1).any()

    actions = cleanreplay.load_policy(folder)(observations)

    assert actions.shape == (100, 1)
    assert actions.dtype == np.float32
    np.testing.assert_allclose(actions, np.clip(2 * mean, -2, 2), rtol=1e-4, atol=1e-5)
    space = gym.make("Pendulum-v1").action_space
    for action in actions:
        assert action in space


# --- after a resume


def test_the_best_agent_stays_at_a_resume_though_it_comes_after_the_checkpoint():
    """A better one takes its place, also at a step before it."""
    run = dqn_jax.Run(**COUNTER)
    agent, always = agents_of(run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    folder = folder_of(run)
    save(folder, 100, state._replace(params=jax.tree.map(jnp.asarray, always[0])))
    save_if_better(folder, 150, always[1], 9.0)
    step, _, _ = checkpoints.Checkpoints(folder).restore(state)
    assert step == 100
    assert action_of(folder) == 1
    save_if_better(folder, 120, always[2], 1.0)
    assert action_of(folder) == 1
    save_if_better(folder, 130, always[0], 10.0)
    assert action_of(folder) == 0


def test_an_agent_of_the_checkpoint_or_before_stays_at_a_resume():
    run = dqn_jax.Run(**COUNTER)
    agent, always = agents_of(run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    folder = folder_of(run)
    save_if_better(folder, 100, always[1], 3.0)
    save(folder, 100, state._replace(params=jax.tree.map(jnp.asarray, always[0])))
    checkpoints.Checkpoints(folder).restore(state)
    assert action_of(folder) == 1
    save_if_better(folder, 200, always[2], 2.0)
    assert action_of(folder) == 1
    save_if_better(folder, 300, always[0], 4.0)
    assert action_of(folder) == 0


# --- where nothing is saved


def test_a_checkpoint_interval_of_0_saves_nothing():
    run = dqn_jax.Run(**COUNTER, checkpoint_interval=0, eval_episodes=0)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), run)
    left = sorted(path.name.split(".")[0] for path in folder.glob("[a-z]*"))
    assert left == ["args", "events", "run"]
    with pytest.raises(dqn_jax.UsageError, match="has no checkpoint"):
        cleanreplay.load_policy(folder)


# --- mistakes


def test_a_run_of_another_script_is_named():
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    with pytest.raises(dqn_jax.UsageError, match=f"^{folder} is a run of another script"):
        cleanreplay.load_policy(folder, ppo_jax.__file__)
    run = per_dqn_jax.Run(**COUNTER, resume=str(folder))
    with pytest.raises(dqn_jax.UsageError, match="of another script or version: replay"):
        per_dqn_jax.train(per_dqn_jax.Args(**SMALL_DQN, double_q=False), run)


def test_a_folder_that_is_no_run_is_an_error_and_stays_as_it_is():
    """The error does not speak of a resume."""
    Path("empty").mkdir()
    with pytest.raises(dqn_jax.UsageError, match=r"^empty is not the folder of a run"):
        cleanreplay.load_policy("empty")
    assert not any(Path("empty").iterdir())


def test_a_video_that_a_run_records_is_not_needed_to_load_its_agent(monkeypatch):
    """The machine that uses an agent need not have moviepy, or the flags of several processes."""
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    saved = json.loads((folder / "args.json").read_text())
    saved["run"] |= {"capture_video": True, "distributed": "localhost:1,2,0", "track": True}
    (folder / "args.json").write_text(json.dumps(saved))
    monkeypatch.setitem(sys.modules, "moviepy", None)
    assert cleanreplay.load_policy(folder)(OBSERVATIONS).shape == (7,)


def test_an_observation_without_its_batch_axis_is_an_error():
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    policy = cleanreplay.load_policy(folder)
    with pytest.raises(ValueError, match=r"observations must be \[N, 3\], not \(3,\)"):
        policy(OBSERVATIONS[0])


# --- observations


class Frames(environments.Counter):
    """Grey images, or images of two colours."""

    def __init__(self, dtype):
        super().__init__()
        high = 1 if dtype == "bool" else 255
        self.observation_space = gym.spaces.Box(0, high, (6, 6), dtype)

    def _observe(self):
        return np.zeros((6, 6), self.observation_space.dtype)


gym.register("Frames-v0", Frames, disable_env_checker=True)


def policy_of(run, script=dqn_jax, **flags):
    """The agent of a run that learned nothing."""
    args = script.Args(**flags | dict(total_timesteps=20, batch_size=8, buffer_size=100))
    _, _, folder = script.train(args, replace(run, eval_episodes=0))
    return cleanreplay.load_policy(folder)


def frames_run(dtype):
    """The flags of a run on images."""
    return dqn_jax.Run(env_id="Frames-v0", env_kwargs=json.dumps({"dtype": dtype}))


def test_images_that_are_not_what_was_trained_on_are_an_error():
    """They would be cut to whole numbers below 256, and taken for other images."""
    policy = policy_of(frames_run("uint8"), learning_starts=8)
    expected = "observations must be uint8, as in training"
    for wrong in (np.full((2, 6, 6), 0.5), np.zeros((2, 6, 6), np.float32)):
        with pytest.raises(ValueError, match=f"{expected}, not {wrong.dtype}"):
            policy(wrong)
    for wrong in (np.full((2, 6, 6), 256), np.full((2, 6, 6), -1), np.full((2, 6, 6), 2**40)):
        numbers = f"numbers from {wrong[0, 0, 0]} to {wrong[0, 0, 0]} do not fit"
        with pytest.raises(ValueError, match=f"{expected}: {numbers}"):
            policy(wrong)
    same = np.random.default_rng(0).integers(0, 256, (5, 6, 6))
    np.testing.assert_array_equal(policy(same), policy(same.astype(np.uint8)))


def test_whole_numbers_beyond_0_and_1_are_no_image_of_two_colours():
    policy = policy_of(frames_run("bool"), learning_starts=8)
    with pytest.raises(ValueError, match="must be bool, as in training: numbers from 0 to 2"):
        policy(np.arange(36).reshape(1, 6, 6) % 3)
    assert policy(np.ones((1, 6, 6), np.uint8)) == policy(np.ones((1, 6, 6), bool))


def test_numbers_of_another_dtype_are_taken_where_the_agent_was_trained_on_floats():
    policy = policy_of(dqn_jax.Run(**COUNTER), learning_starts=8)
    whole = np.random.default_rng(0).integers(-9, 9, (50, 3))
    for dtype in (np.float64, np.int64, np.int8):
        actions = policy(whole.astype(dtype))
        np.testing.assert_array_equal(actions, policy(whole.astype(np.float32)))


def test_no_observations_give_no_actions():
    policy = policy_of(dqn_jax.Run(**COUNTER), learning_starts=8)
    assert policy(np.zeros((0, 3))).shape == (0,)


@pytest.mark.more
def test_no_observations_give_no_actions_of_a_box_and_no_actions_of_a_memory():
    run = ppo_jax.Run(env_id="Pendulum-v1")
    args = ppo_jax.Args(**SMALL_PPO)
    _, _, folder = ppo_jax.train(args, replace(run, eval_episodes=0))
    actions = cleanreplay.load_policy(folder)(np.zeros((0, 3)))
    assert (actions.shape, actions.dtype) == ((0, 1), np.float32)
    flags = dict(learning_starts=16, train_length=4, burn_in=2, period=2, n_step=1)
    args = r2d2_jax.Args(total_timesteps=40, num_envs=1, batch_size=2, buffer_size=64, **flags)
    _, _, folder = r2d2_jax.train(args, r2d2_jax.Run(**COUNTER | dict(eval_episodes=0)))
    assert cleanreplay.load_policy(folder)(np.zeros((0, 3)), np.zeros(0, bool)).shape == (0,)


# --- spaces

SIMULATOR = """
import environments, gymnasium as gym
class Simulator(environments.Counter):
    action_space = gym.spaces.Discrete(3, start=-1)
gym.register("Simulator-v0", Simulator, disable_env_checker=True)
"""


@pytest.mark.parametrize("frame_stack", [1, 2])
def test_an_agent_is_loaded_where_its_environment_is_not_installed(
    frame_stack, monkeypatch, tmp_path
):
    (tmp_path / "my_simulator.py").write_text(SIMULATOR)
    monkeypatch.syspath_prepend(tmp_path)
    args = dqn_jax.Args(**SMALL_DQN, frame_stack=frame_stack)
    run = dqn_jax.Run(env_id="my_simulator:Simulator-v0", eval_episodes=0, log_interval=100)
    _, _, folder = dqn_jax.train(args, run)
    observations = wide_observations(20, *[frame_stack] * (frame_stack > 1), 3)
    wanted = cleanreplay.load_policy(folder)(observations)
    (tmp_path / "my_simulator.py").unlink()
    monkeypatch.delitem(sys.modules, "my_simulator")
    monkeypatch.delitem(gym.registry, "Simulator-v0")

    actions = cleanreplay.load_policy(folder)(observations)

    np.testing.assert_array_equal(actions, wanted)
    assert set(actions) <= {-1, 0, 1}


def test_spaces_that_json_does_not_know_are_those_of_the_environment():
    _, _, folder = dqn_jax.train(dqn_jax.Args(**SMALL_DQN), dqn_jax.Run(**COUNTER))
    wanted = cleanreplay.load_policy(folder)(OBSERVATIONS)
    saved = json.loads((folder / "args.json").read_text())
    saved["spaces"]["observation"] = None
    (folder / "args.json").write_text(json.dumps(saved))
    np.testing.assert_array_equal(cleanreplay.load_policy(folder)(OBSERVATIONS), wanted)


@pytest.mark.more
def test_a_compiled_run_keeps_the_spaces_that_its_agent_sees():
    args = ppo_jax.Args(**SMALL_PPO | dict(num_envs=2), frame_stack=2)
    _, _, folder = ppo_jax.train(args, ppo_jax.Run(**CHAIN | dict(eval_episodes=0)))
    kept = json.loads((folder / "args.json").read_text())["spaces"]
    box = {"shape": [2, 5], "dtype": "float32", "low": 0.0, "high": 1.0}
    assert kept == {"observation": box, "action": {"n": 2, "start": 0}, "entries": None}


@pytest.mark.parametrize(
    "space",
    [
        Discrete(3),
        Discrete(5, start=-2),
        MultiDiscrete([3, 5], start=[1, -2]),
        MultiDiscrete([[3, 5], [2, 2]]),
        Box(-np.inf, np.inf, (3,), np.float32),
        Box(np.float32([0.1, -np.inf, 1e-45]), np.float32([1 / 3, 2, np.inf]), dtype=np.float32),
        Box(-0.1, 0.1, (2, 3), np.float64),
        Box(np.array([[0.1], [-1 / 3]]), np.array([[0.2], [np.inf]]), dtype=np.float64),
        Box(0, 255, (84, 84, 4), np.uint8),
        Box(0, 1, (2, 2), bool),
        Box(-(2**62), 2**62 + 1, (1,), np.int64),
        Box(0.0, 1.0, (0,), np.float32),
        Box(-1, 1, (), np.float16),
    ],
)
def test_a_space_is_the_same_after_it_was_written_as_json(space):
    text = disk.to_json(spaces.to_json(space))
    again = spaces.from_json(json.loads(text))
    assert type(again) is type(space)
    assert again == space
    assert again.dtype == space.dtype
    assert len(text) < 200


def test_a_space_that_only_an_edited_script_knows_is_none():
    assert spaces.to_json(gym.spaces.MultiBinary(3)) is None
