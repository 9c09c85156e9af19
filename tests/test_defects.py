"""What users met in runs of the scripts: each test is of one thing that went wrong."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import environments  # noqa: F401  registers the environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import slow
from environments import Chain, Counter
from events import ROOT, read_events
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv

import dqn_jax
import images
import per_dqn_jax
import ppo_jax

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
    training, returns, folder = module.train(args, run)
    assert training.envs is not None
    assert np.isfinite(returns).all()
    assert np.isfinite(read_events(folder)[0]["eval/episodic_return"][-1][1])
    assert training.envs.observation.dtype == jnp.float32
    if module is not ppo_jax:
        assert training.agent.replay.storage.observation.dtype == jnp.float32
        assert training.agent.replay.storage.reward.dtype == jnp.float32


@pytest.fixture
def _wide_numbers():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.usefixtures("_wide_numbers")
@pytest.mark.parametrize("env_id", ["Chain-v0", slow("Counter-v0")])
@pytest.mark.parametrize("name", NAMES)
def test_with_64_bits_all_runs(name, env_id):
    module, flags = SCRIPTS[name]
    args = module.Args(**flags | dict(num_envs=4))
    run = module.Run(env_id=env_id, log_interval=64, eval_episodes=0)
    training, _, _ = module.train(args, run)
    assert training.agent.params.dtype == jnp.float32
    assert np.isfinite(training.agent.params).all()


@pytest.mark.slow
@pytest.mark.usefixtures("_wide_numbers")
def test_with_64_bits_continuous_actions_run():
    run = ppo_jax.Run(env_id="phys2d/Pendulum-v0", log_interval=64, eval_episodes=0)
    training, _, _ = ppo_jax.train(ppo_jax.Args(**SMALL_PPO), run)
    assert training.agent.params.dtype == jnp.float32


def test_numbers_that_are_no_image_are_taken_as_they_are():
    """A one-hot view of uint8 is 0 and 1 for the network, and not 0 and 1 / 255."""
    view = np.random.default_rng(0).integers(2, size=(3, 7, 7, 20)).astype(np.uint8)
    for network in (dqn_jax.QNetwork(4), ppo_jax.ActorCritic(4, gaussian=False)):
        params = jax.jit(network.init)(jax.random.PRNGKey(0), view)
        got = network.apply(params, view)
        wanted = network.apply(params, view.reshape(3, -1).astype(np.float32))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


# --- seeds


def first_numbers(module, seed, num_envs, *step):
    """A random number of each environment at its first reset, as Counter-v0 observes it."""
    run = module.Run(env_id="environments:Counter-v0", seed=seed)
    envs = module.make_envs(module.Args(), run, num_envs)
    observation, _ = envs.reset(seed=module.environment_seed(run, *step))
    return [float(x) for x in observation[:, 2]]


def test_environments_of_two_seeds_are_different_ones():
    """Those of ten seeds of eight environments are eighty; evaluation has others again."""
    training = []
    evaluation = []
    for seed in range(1, 11):
        training += first_numbers(dqn_jax, seed, 8, 0)
        training += first_numbers(dqn_jax, seed, 8, 100_000)  # after a resume
        evaluation += first_numbers(dqn_jax, seed, 8, 0, 1)
    assert len(set(training)) == 160
    assert len(set(evaluation)) == 80
    assert not set(training) & set(evaluation)


def test_training_and_evaluation_take_these_seeds(monkeypatch):
    seeds = []

    class Seeds(Counter):
        def reset(self, *, seed=None, options=None):
            if seed is not None:
                seeds.append(seed)
            return super().reset(seed=seed, options=options)

    gym.register("Seeds-v0", Seeds)
    try:
        args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2))
        run = dqn_jax.Run(env_id="Seeds-v0", seed=7, log_interval=100, eval_episodes=3)
        _, _, folder = dqn_jax.train(args, run)
        at_start = dqn_jax.environment_seed(run, 0)
        in_evaluation = dqn_jax.environment_seed(run, 0, 1)
        wanted = [at_start, at_start + 1, in_evaluation, in_evaluation + 1, in_evaluation + 2]
        assert seeds == wanted
        seeds.clear()
        longer = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2, total_timesteps=300))
        run = dqn_jax.Run(**vars(run) | dict(resume=str(folder), eval_episodes=0))
        dqn_jax.train(longer, run)
        after = dqn_jax.environment_seed(run, 200)
        assert seeds == [after, after + 1]
    finally:
        del gym.registry["Seeds-v0"]


def test_a_compiled_evaluation_starts_where_no_training_does():
    """With the keys of training and of an evaluation for the seeds around it."""
    starts = []
    for seed in (1, 2, 1_000_001):
        run = dqn_jax.Run(env_id="phys2d/CartPole-v1", seed=seed, eval_episodes=4)
        _, loop = dqn_jax.set_up(dqn_jax.Args(num_envs=4), run)
        starts += list(np.asarray(loop.start().envs.observation[0]))
        taken = []

        def evaluate(policy, episodes, key, longest_episode, loop=loop, taken=taken):
            taken.append(loop.envs.reset(jax.random.fold_in(key, 0), episodes))
            return jnp.zeros(episodes), jnp.ones(episodes, bool)

        loop.envs.evaluate = evaluate
        loop.evaluate_one(jnp.zeros(1))
        starts += list(np.asarray(taken[0].observation))
    assert len(np.unique(np.stack(starts), axis=0)) == 24


# --- what is saved


def windows_around(alg, state, first_row, num_rows):
    """Transitions of all windows that start in these rows of the replay of one environment."""
    indices = np.arange(first_row, first_row + num_rows)
    return alg.fold(alg.replay.get(state.replay, indices))


@pytest.mark.parametrize("n_step", [1, 3, 16])
def test_a_cut_is_a_truncation(n_step):
    """Windows up to it bootstrap from the last observation, none goes across, no stack is empty."""
    args = dqn_jax.Args(
        num_envs=1, train_frequency=1, frame_stack=2, n_step=n_step, gamma=0.5, buffer_size=100
    )
    alg = dqn_jax.DQN(args, np.zeros((2, 1), np.float32), gym.spaces.Discrete(2))
    state = jax.jit(alg.init)(jax.random.PRNGKey(0))

    def add(state, numbers):
        rows = len(numbers)
        steps = dqn_jax.Step(
            observation=jnp.asarray(numbers, jnp.float32).reshape(rows, 1, 1),
            action=jnp.zeros((rows, 1), jnp.int32),
            reward=jnp.ones((rows, 1), jnp.float32),
            terminated=jnp.zeros((rows, 1), bool),
            truncated=jnp.zeros((rows, 1), bool),
            is_step=jnp.ones((rows, 1), bool),
        )
        return state._replace(replay=alg.replay.add_batch(state.replay, steps))

    state = add(state, np.arange(1, 31))
    state = alg.restart(state)
    state = add(state, np.arange(101, 131))
    transitions = windows_around(alg, state, first_row=10, num_rows=25)
    for i in range(25):
        # The window's newest observation in the first stack is that of row i + 11.
        number = i + 12
        row = i + 11
        assert transitions.is_valid[i] == (row != 29)  # which only ends the episode
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


def test_experience_goes_on_after_a_resume_with_many_steps(tmp_path):
    """At n_step of 16 the vault said that the rows were of another run."""
    flags = SMALL_DQN | dict(n_step=20, save_experience=True)
    _, _, folder = dqn_jax.train(dqn_jax.Args(**flags), dqn_jax.Run(**COUNTER))
    longer = dqn_jax.Args(**flags | dict(total_timesteps=300))
    dqn_jax.train(longer, dqn_jax.Run(**COUNTER, resume=str(folder)))
    alg = dqn_jax.DQN(longer, np.zeros(3, np.float32), gym.spaces.Discrete(3))
    vault = alg.open_vault(folder / "experience")
    assert len(vault) == 300
    steps = vault.read(0, 300)
    assert not steps.is_step[199]
    assert steps.truncated[198] | steps.terminated[198] | ~steps.is_step[198]


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(monkeypatch):
    now = time.time()
    monkeypatch.setattr(dqn_jax.time, "time", lambda: now)
    folders = [dqn_jax.new_folder(dqn_jax.Run()) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() for folder in folders)


class Undrawn(Counter):
    """It says that it can be drawn, and cannot, like MuJoCo without a screen."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012  (Gymnasium's)

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        raise RuntimeError("no OpenGL context")


@pytest.mark.filterwarnings("ignore:.*Ignored saving a video")
def test_a_video_that_fails_loses_nothing():
    """What was learned and logged is kept; the message names what MuJoCo needs."""
    pytest.importorskip("moviepy")
    gym.register("Undrawn-v0", Undrawn)
    try:
        args = dqn_jax.Args(**SMALL_DQN)
        run = dqn_jax.Run(env_id="Undrawn-v0", log_interval=100, capture_video=True)
        with pytest.raises(RuntimeError, match="no OpenGL context") as caught:
            dqn_jax.train(args, run)
    finally:
        del gym.registry["Undrawn-v0"]
    assert "MUJOCO_GL" in "".join(caught.value.__notes__)
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
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def test_training_that_diverges_is_said(capsys):
    args = dqn_jax.Args(**SMALL_DQN | dict(learning_rate=float("inf")))
    dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    out, _ = capsys.readouterr()
    assert "200 steps: parameters are not finite, training has diverged" in out


# --- resume


def test_what_is_part_of_the_training_stays_at_a_resume(run_main):
    small = "--learning-starts 50 --batch-size 8 --buffer-size 100 --log-interval 50".split()  # noqa: SIM905
    code, out, err = run_main(dqn_jax, "--total-timesteps", "100", *small)
    assert code == 0, err
    folder = out.split()[-8].rstrip(":")
    started = json.loads(Path(folder, "args.json").read_text())
    for name, value in (
        ("env-id", "Acrobot-v1"),
        ("env-kwargs", '{"sutton_barto_reward": true}'),
        ("seed", "2"),
        ("num-seeds", "2"),
    ):
        result = run_main(dqn_jax, "--resume", folder, f"--{name}", value)
        if name == "num-seeds":
            assert_one_line(result, "one agent only")
        else:
            assert_one_line(result, f"{name.replace('-', '_')} must stay")
    assert_one_line(run_main(dqn_jax, "--resume", folder, "--gamma", "0.5"), "total_timesteps")
    flags = ("--eval-episodes", "3", "--checkpoint-interval", "50", "--log-interval", "25")
    code, _, err = run_main(dqn_jax, "--resume", folder, "--total-timesteps", "150", *flags)
    assert code == 0, err
    saved = json.loads(Path(folder, "args.json").read_text())
    assert saved["run"] == started["run"]
    assert saved["args"] == started["args"] | {"total_timesteps": 150}

    assert_one_line(run_main(per_dqn_jax, "--resume", folder), "run of another script")
    assert_one_line(run_main(ppo_jax, "--resume", folder), "run of another script")
    shutil.rmtree(Path(folder, "checkpoints"))
    assert_one_line(run_main(dqn_jax, "--resume", folder), "has no checkpoint")


def test_a_resumed_offline_run_keeps_its_priorities():
    kept = SMALL_DQN | dict(save_experience=True)
    _, _, folder = per_dqn_jax.train(per_dqn_jax.Args(**kept), per_dqn_jax.Run(**COUNTER))
    offline = SMALL_DQN | dict(offline=str(folder / "experience"), total_timesteps=300)
    args = per_dqn_jax.Args(**offline)
    before, _, folder = per_dqn_jax.train(args, per_dqn_jax.Run(**COUNTER, exp_name="offline"))
    run = per_dqn_jax.Run(**COUNTER, exp_name="offline", resume=str(folder))
    alg, loop = per_dqn_jax.set_up(args, run)
    _, _, restored = per_dqn_jax.open_checkpoints(run, folder, loop.start())
    after = alg.restart(restored.agent)
    assert len(np.unique(before.agent.replay.tree)) > 10
    np.testing.assert_array_equal(after.replay.tree, before.agent.replay.tree)
    assert after.replay.size == before.agent.replay.size


# --- experience


def test_offline_needs_experience_and_writes_none(run_main, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_one_line(run_main(dqn_jax, "--offline", str(empty)), "holds no vault")
    assert not any(empty.iterdir())
    assert_one_line(run_main(dqn_jax, "--offline", "/nowhere"), "/nowhere holds no vault")
    args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=2, save_experience=True))
    _, _, folder = dqn_jax.train(args, dqn_jax.Run(**COUNTER))
    flags = ["--env-id", "environments:Counter-v0", "--offline", str(folder / "experience")]
    assert_one_line(run_main(dqn_jax, *flags, "--num-envs", "3"), "float32[2, 3]", "float32[3, 3]")
    assert len(list(Path("runs").iterdir())) == 1


def test_experience_is_saved_before_it_is_overwritten():
    args = dqn_jax.Args(**SMALL_DQN | dict(save_experience=True))
    run = dqn_jax.Run(**COUNTER | dict(log_interval=110))
    with pytest.raises(dqn_jax.UsageError, match="log_interval 110 is more than buffer_size"):
        dqn_jax.train(args, run)
    assert not Path("runs").exists()


# --- flags in one line


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        (dqn_jax, ["--seed", "-1"], ["seed must be at least 0, not -1"]),
        (dqn_jax, ["--env-kwargs", "[1]"], ["env_kwargs", "[1]"]),
        (
            dqn_jax,
            ["--save-experience", "--env-id", "environments:Chain-v0", "--num-seeds", "2"],
            ["save_experience"],
        ),
        (
            ppo_jax,
            ["--env-id", "ale_py:ALE/Pong-v5", "--env-kwargs", '{"difficulty": 1}'],
            ["difficulty", "refuses"],
        ),
    ],
)
def test_mistakes_in_flags(module, flags, words, run_main):
    if "ale_py:ALE/Pong-v5" in flags:
        pytest.importorskip("ale_py")
    assert_one_line(run_main(module, *flags), *words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("flag", "library"), [("--track", "wandb"), ("--capture-video", "moviepy")]
)
def test_a_library_that_is_missing_is_named(flag, library, run_main, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    code, _, err = run_main(dqn_jax, flag)
    assert code == 2
    assert library in err.lower()
    assert len(err.strip().splitlines()) == 1
    assert not Path("runs").exists()


def test_the_time_limit_of_the_flags_holds_in_functional_environments():
    run = dqn_jax.Run(env_id="Chain-v0", env_kwargs='{"max_episode_steps": 5}')
    _, loop = dqn_jax.set_up(dqn_jax.Args(), run)
    assert loop.envs.time_limit == 5
    _, loop = dqn_jax.set_up(dqn_jax.Args(), dqn_jax.Run(env_id="Chain-v0"))
    assert loop.envs.time_limit == 9


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
def test_episodes_that_never_end_are_cut_off_alike_and_that_is_said(env_id, monkeypatch, capsys):
    """After as many steps in ordinary and in compiled environments."""
    monkeypatch.setattr(dqn_jax, "LONGEST_EPISODE", 300)
    run = dqn_jax.Run(env_id=env_id, eval_episodes=2)
    alg, loop = dqn_jax.set_up(dqn_jax.Args(), run)
    training = loop.start()
    returns = loop.evaluate(alg.policy(training.agent))
    np.testing.assert_array_equal(np.ravel(returns), [150, 150])
    out, _ = capsys.readouterr()
    assert "cuts off episodes after 300 steps" in out


def test_the_longest_episode_of_atari_is_within_an_evaluation():
    """108,000 frames of 4 a step."""
    assert dqn_jax.LONGEST_EPISODE >= 27_000


# --- what is alone


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


@pytest.mark.parametrize("network", [dqn_jax.QNetwork(2), ppo_jax.ActorCritic(2, gaussian=False)])
@pytest.mark.parametrize(
    "shape", [(64, 2, 64), (40, 3, 50), (4, 36, 40, 3, 1), (2, 4, 84, 84, 1), (35, 84, 3)]
)
def test_what_is_no_image_is_flattened_whatever_its_shape(network, shape):
    x = jax.ShapeDtypeStruct((1, *shape), jnp.uint8)
    params = jax.eval_shape(network.init, jax.random.PRNGKey(0), x)["params"]
    assert params["Dense_0"]["kernel"].shape[0] == np.prod(shape)
