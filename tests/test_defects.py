"""What users met in runs of the scripts: each test is of one thing that went wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from environments import Chain, Counter
from events import ROOT, read_events
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv

import checkpoints
import compiled
import dqn_jax
import images
import per_dqn_jax
import ppo_jax
import usage

SMALL_DQN = dict(total_timesteps=200, learning_starts=50, batch_size=8, buffer_size=100)
SMALL_PPO = dict(total_timesteps=64, num_steps=8, num_minibatches=1, update_epochs=1)
SCRIPTS = {
    "dqn": (dqn_jax, SMALL_DQN),
    "per_dqn": (per_dqn_jax, SMALL_DQN),
    "ppo": (ppo_jax, SMALL_PPO),
}
NAMES = ["dqn", slow("per_dqn"), slow("ppo")]
COUNTER = dict(env_id="environments:Counter-v0", log_interval=20, eval_episodes=0)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def assert_one_line(result, *words):
    """Exit code 2, and one line on stderr that has these words."""
    code, _, err = result
    (line,) = err.strip().splitlines()
    assert code == 2
    assert line.startswith("error: ")
    for word in words:
        assert word in line


# --- kinds of numbers


class OtherNumbers(Chain):
    """Whole numbers for observations and rewards."""

    observation_space = gym.spaces.Box(0, 1, (5,), np.int32)

    def observation(self, state, rng, params=None):
        return super().observation(state, rng).astype(jnp.int32)

    def reward(self, state, action, next_state, rng, params=None):
        return jnp.int32(next_state == 4)


def make_other_numbers(**kwargs):
    return FunctionalJaxEnv(OtherNumbers(), metadata={"render_modes": []}, **kwargs)


gym.register("OtherNumbers-v0", make_other_numbers, max_episode_steps=9, disable_env_checker=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("env_id", ["OtherNumbers-v0", slow("tabular/Blackjack-v0")])
def test_functional_environments_of_whole_numbers(name, env_id):
    module, flags = SCRIPTS[name]
    args = module.Args(**flags | dict(num_envs=4))
    run = module.Run(env_id=env_id, log_interval=64, eval_episodes=2)
    alg, is_jax_env = module.make_algorithm(args, run)
    assert is_jax_env
    state, returns, folder = module.train(args, run)
    assert np.isfinite(returns).all()
    assert np.isfinite(read_events(folder)[0]["eval/episodic_return"][-1][1])
    assert alg.example_step.observation.dtype == np.float32
    envs = compiled.Trainer(alg, run).init().envs
    assert envs.observation.dtype == jnp.float32
    if module is not ppo_jax:
        assert state.replay.storage.observation.dtype == jnp.float32
        assert state.replay.storage.reward.dtype == jnp.float32


# --- seeds


def test_each_run_evaluation_and_resume_has_environments_of_its_own(monkeypatch):
    seeds = []

    class Seeds(Counter):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    gym.register("Seeds-v0", Seeds)
    try:
        for seed in (1, 2, 3):
            args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2))
            run = dqn_jax.Run(env_id="Seeds-v0", seed=seed, log_interval=100, eval_episodes=3)
            _, _, folder = dqn_jax.train(args, run)
            longer = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2, total_timesteps=300))
            run = dqn_jax.Run(**vars(run) | dict(resume=str(folder), eval_episodes=0))
            dqn_jax.train(longer, run)
    finally:
        del gym.registry["Seeds-v0"]
    assert len(seeds) == len(set(seeds)) == 3 * (2 + 3 + 2)


def first_evaluated(program):
    """The observations with which the episodes of an evaluation start, four of one agent."""
    taken = []
    reset = program.envs.reset

    def evaluate(params, episodes, key, *_):
        state = reset(jax.random.fold_in(key, 0), episodes)
        taken.append(np.asarray(state.observation))
        return jnp.zeros(episodes), jnp.ones(episodes, bool)

    program.envs.evaluate = evaluate
    program.evaluate_one(jnp.zeros(1))
    return taken[0]


def test_a_compiled_evaluation_starts_where_no_training_does():
    """With the keys of training and of an evaluation for the seeds around it."""
    starts = []
    for seed in (1, 2, 1_000_001):
        run = dqn_jax.Run(env_id="phys2d/CartPole-v1", seed=seed, eval_episodes=4)
        alg, _ = dqn_jax.make_algorithm(dqn_jax.Args(num_envs=4), run)
        program = compiled.Trainer(alg, run)
        in_training = np.asarray(program.init().envs.observation[0])
        starts += [*in_training, *first_evaluated(program)]
    assert len(np.unique(np.stack(starts), axis=0)) == 24


# --- what is saved


def add_numbered(alg, state, numbers):
    """Adds steps of one environment that observe these numbers, with rewards of 1 and no end."""
    rows = len(numbers)
    steps = dqn_jax.Step(
        observation=jnp.asarray(numbers, jnp.float32).reshape(rows, 1, 1),
        action=jnp.zeros((rows, 1), jnp.int32),
        reward=jnp.ones((rows, 1), jnp.float32),
        terminated=jnp.zeros((rows, 1), bool),
        truncated=jnp.zeros((rows, 1), bool),
        valid=jnp.ones((rows, 1), bool),
    )
    return state._replace(replay=alg.replay.add_batch(state.replay, steps))


def windows_around(alg, state, first_row, num_rows):
    """Transitions of all windows that start in these rows of the replay of one environment."""
    indices = np.arange(first_row, first_row + num_rows)
    return alg.to_transitions(alg.replay.get(state.replay, indices))


@pytest.mark.parametrize("n_step", [slow(1), 3, slow(16)])
def test_a_cut_is_a_truncation(n_step):
    """Windows up to it bootstrap from the last observation, none goes across, no stack is empty."""
    args = dqn_jax.Args(
        num_envs=1, train_frequency=1, frame_stack=2, n_step=n_step, gamma=0.5, buffer_size=100
    )
    space = gym.spaces.Box(0, 1_000, (2, 1), np.float32)
    alg = dqn_jax.DQN(args, space, gym.spaces.Discrete(2))
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    state = add_numbered(alg, state, np.arange(1, 31))
    state = alg.on_resume(state)
    state = add_numbered(alg, state, np.arange(101, 131))

    transitions = windows_around(alg, state, first_row=10, num_rows=25)
    for i in range(25):
        # The window's newest observation in the first stack is that of row i + 11.
        number = i + 12
        row = i + 11
        assert transitions.valid[i] == (row != 29)  # which only ends the episode
        if row < 29:
            steps = min(n_step, 29 - row)
            stack = transitions.observation[i].ravel().tolist()
            last_stack = transitions.next_observation[i].ravel().tolist()
            assert stack == [number - 1, number]
            assert last_stack == [number + steps - 1, number + steps]
            assert transitions.reward[i] == sum(0.5**k for k in range(steps))
            assert transitions.discount[i] == 0.5**steps  # bootstrapped: no end
        if row > 30:
            assert transitions.observation[i].min() > 100


class Undrawn(Counter):
    """It says that it can be drawn, and cannot: at all, or once an episode has begun."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (Gymnasium's)

    def __init__(self, render_mode=None, at_first=False):
        super().__init__()
        self.render_mode = render_mode
        self.at_first = at_first

    def render(self):
        if self.at_first and self.step_count == 0:
            return np.zeros((16, 16, 3), np.uint8)
        raise RuntimeError("no OpenGL context")


gym.register("Undrawn-v0", Undrawn, disable_env_checker=True)


class Drawn(Undrawn):
    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


gym.register("DrawnElsewhere-v0", Drawn, vector_entry_point=environments.preprocessed)


def test_a_video_of_other_observations_is_an_error_before_a_folder_is_made(run_main):
    """Like Atari, whose vector version preprocesses what the single one shows."""
    pytest.importorskip("moviepy")
    result = run_main(dqn_jax, "--env-id", "DrawnElsewhere-v0", "--capture-video")
    wanted = "capture_video: cannot record a video: it observes Box("
    assert_one_line(result, wanted)
    assert not Path("runs").exists()


def test_a_video_that_cannot_be_drawn_is_an_error_before_a_folder_is_made(run_main):
    """Like MuJoCo without a screen."""
    pytest.importorskip("moviepy")
    result = run_main(dqn_jax, "--env-id", "Undrawn-v0", "--capture-video")
    assert_one_line(
        result, "capture_video: cannot record a video: no OpenGL context", "MUJOCO_GL=egl"
    )
    assert not Path("runs").exists()


@pytest.mark.filterwarnings("ignore:.*Ignored saving a video")
def test_a_video_that_fails_loses_nothing():
    """What was learned and logged is kept."""
    pytest.importorskip("moviepy")
    args = dqn_jax.Args(**SMALL_DQN)
    env = dict(env_id="Undrawn-v0", env_kwargs='{"at_first": true}')
    run = dqn_jax.Run(**env, log_interval=100, capture_video=True)
    with pytest.raises(RuntimeError, match="no OpenGL context"):
        dqn_jax.train(args, run)
    (folder,) = Path("runs").iterdir()
    assert [x.name for x in (folder / "checkpoints").iterdir()] == ["200"]
    scalars, _ = read_events(folder)
    assert scalars["losses/td_loss"][-1][0] == 200


def test_the_second_ctrl_c_ends_the_process(tmp_path):
    """Where the first waits for an environment that hangs."""
    code = """
import gymnasium as gym, time, environments
class Hanging(environments.Counter):
    def step(self, action):
        print("hangs", flush=True)
        time.sleep(1000)
gym.register("Hanging-v0", Hanging)
import dqn_jax
dqn_jax.main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--env-id", "Hanging-v0"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().endswith(": 1 x Hanging-v0, cpu\n")
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def test_training_that_diverges_ends():
    args = dqn_jax.Args(**SMALL_DQN | dict(learning_rate=1e38))
    with pytest.raises(FloatingPointError, match="diverged, parameters are not finite"):
        dqn_jax.train(args, dqn_jax.Run(**COUNTER))


class Diverging(Chain):
    def reward(self, state, action, next_state, rng, params=None):
        return jnp.float32(jnp.nan)


def make_diverging(**kwargs):
    return FunctionalJaxEnv(Diverging(), metadata={"render_modes": []}, **kwargs)


gym.register("Diverging-v0", make_diverging, max_episode_steps=9, disable_env_checker=True)


def test_compiled_training_that_diverges_leaves_the_last_good_checkpoint(run_main):
    """Rewards are NaN: the first gradient step is in the log interval that ends at step 60."""
    flags = "--env-id Diverging-v0 --learning-starts 50 --batch-size 8 --buffer-size 100"
    more = "--num-seeds 2 --log-interval 20 --checkpoint-interval 20 --eval-interval 20"
    code, _, err = run_main(dqn_jax, *flags.split(), *more.split())
    (folder,) = Path("runs").absolute().iterdir()
    said = f"{folder}: diverged, parameters are not finite"
    assert err == f"error: {said}\n"
    assert code == 1

    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["20", "40"]
    run, args = usage.read_flags(folder, dqn_jax.Run, dqn_jax.Args)
    alg, _ = dqn_jax.make_algorithm(args, run)
    saver = checkpoints.Checkpoints(folder)
    training = saver.restore(compiled.Trainer(alg, run).init())
    assert saver.begin == 40
    for leaf in jax.tree.leaves(training.agent.params):
        assert np.isfinite(leaf).all()
    assert not any((folder / "best").iterdir())  # a score that is NaN is that of no best agent


# --- resume


def folder_with_flags():
    """That of a run of DQN on CartPole in which nothing was saved."""
    folder = Path("run").absolute()
    folder.mkdir()
    flags = {"run": vars(dqn_jax.Run()), "args": vars(dqn_jax.Args())}
    (folder / "args.json").write_text(json.dumps(flags))
    return str(folder)


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--env-id", "Acrobot-v1", "env_id must stay"),
        ("--env-kwargs", '{"sutton_barto_reward": true}', "env_kwargs must stay"),
        ("--seed", "2", "seed must stay 1, not become 2"),
        ("--num-seeds", "2", "num_seeds"),
        ("--gamma", "0.5", "gamma must stay 0.99, not become 0.5"),
        ("--buffer-size", "200", "buffer_size must stay 10000, not become 200"),
    ],
)
def test_what_is_part_of_the_training_stays_at_a_resume(flag, value, words, run_main):
    folder = folder_with_flags()
    before = Path(folder, "args.json").read_text()
    assert_one_line(run_main(dqn_jax, "--resume", folder, flag, value), words)
    assert Path(folder, "args.json").read_text() == before


def test_a_run_without_a_checkpoint_is_not_resumed(run_main):
    assert_one_line(run_main(dqn_jax, "--resume", folder_with_flags()), "has no checkpoint")


def test_a_resumed_run_keeps_its_priorities():
    """Cutting its episodes off changes none."""
    args = per_dqn_jax.Args(**SMALL_DQN)
    run = per_dqn_jax.Run(**COUNTER)
    before, _, folder = per_dqn_jax.train(args, run)
    alg, _ = per_dqn_jax.make_algorithm(args, run)
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))
    after = alg.on_resume(checkpoints.Checkpoints(folder).restore(state))
    assert len(np.unique(np.concatenate(jax.tree.leaves(before.replay.tree), axis=None))) > 10
    jax.tree.map(np.testing.assert_array_equal, after.replay.tree, before.replay.tree)
    assert after.replay.max_priority == before.replay.max_priority
    assert after.replay.size == before.replay.size == 100


# --- flags in one line


def test_an_argument_that_the_vector_version_does_not_take_is_a_mistake(run_main):
    pytest.importorskip("ale_py")
    pong = ["--env-id", "ale_py:ALE/Pong-v5", "--env-kwargs", '{"difficulty": 1}']
    assert_one_line(run_main(ppo_jax, *pong), "difficulty")
    assert not Path("runs").exists()


def test_the_time_limit_of_the_flags_holds_in_functional_environments():
    for env_kwargs, limit in (("{}", 9), ('{"max_episode_steps": 5}', 5)):
        run = dqn_jax.Run(env_id="Chain-v0", env_kwargs=env_kwargs)
        alg, _ = dqn_jax.make_algorithm(dqn_jax.Args(), run)
        assert compiled.Trainer(alg, run).envs.time_limit == limit


# --- evaluation


class Endless(Chain):
    def reward(self, state, action, next_state, rng, params=None):
        return jnp.float32(0.5)

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


class EndlessCounter(Counter):
    def step(self, action):
        observation, _, _, _, info = super().step(action)
        return observation, 0.5, False, False, info


def make_endless(**kwargs):
    return FunctionalJaxEnv(Endless(), metadata={"render_modes": []}, **kwargs)


gym.register("Endless-v0", make_endless, disable_env_checker=True)
gym.register("EndlessCounter-v0", EndlessCounter, disable_env_checker=True)


@pytest.mark.parametrize("env_id", ["Endless-v0", "EndlessCounter-v0"])
def test_episodes_that_never_end_are_cut_off_alike(env_id):
    """After as many steps in ordinary and in compiled environments."""
    run = dqn_jax.Run(env_id=env_id, eval_episodes=2, eval_max_steps=300)
    alg, is_jax_env = dqn_jax.make_algorithm(dqn_jax.Args(), run)
    if is_jax_env:
        program = compiled.Trainer(alg, run)
        returns = program.evaluate(alg.policy_params(program.init().agent))
        np.testing.assert_array_equal(returns, [150])  # the mean of an agent
    else:
        params = alg.policy_params(jax.jit(alg.init)(jax.random.PRNGKey(0)))
        returns = dqn_jax.evaluate(alg, run, params, episodes=2)
        np.testing.assert_array_equal(returns, [150, 150])
    assert is_jax_env == (env_id == "Endless-v0")


# --- what is alone


@pytest.mark.slow
def test_images_are_trained_from_with_their_module_alone(tmp_path):
    """A script, buffers.py and images.py in an empty folder."""
    for file in ("dqn_jax.py", "buffers.py", "images.py"):
        shutil.copy(ROOT / file, tmp_path)
    shutil.copy(ROOT / "tests" / "environments.py", tmp_path)
    flags = "--env-id environments:ProbeImage-v0 --total-timesteps 100 --learning-starts 50"
    flags += " --batch-size 4 --buffer-size 50 --eval-episodes 0 --log-interval 50"
    done = subprocess.run(
        [sys.executable, "dqn_jax.py", *flags.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_stacks_are_among_the_observations_of_their_space():
    envs = images.FrameStack(gym.make_vec("CartPole-v1", 2, vectorization_mode="sync"), 3)
    observation, _ = envs.reset(seed=0)
    assert envs.single_observation_space.shape == (3, 4)
    assert envs.observation_space.shape == observation.shape == (2, 3, 4)
    assert envs.observation_space.contains(observation)


@pytest.mark.parametrize(
    "network", [dqn_jax.QNetwork(2), ppo_jax.ActorCritic(2, is_gaussian=False)]
)
@pytest.mark.parametrize("shape", [(64, 2, 64), (40, 3, 50), (4, 36, 40, 3, 1), (2, 4, 84, 84, 1)])
def test_what_is_no_image_is_flattened_whatever_its_shape(network, shape):
    x = jax.ShapeDtypeStruct((1, *shape), jnp.uint8)
    params = jax.eval_shape(network.init, jax.random.PRNGKey(0), x)["params"]
    assert params["Dense_0"]["kernel"].shape[0] == np.prod(shape)
