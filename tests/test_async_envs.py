"""How environments are stepped together, `--vectorization`: one by one, as the vector version that
they have of their own, or in processes of their own.
"""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import environments
import gymnasium as gym
import jax
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv
from helpers import ROOT, find_jax_env, more, read_events

import dqn_jax
import ppo_jax

SMALL_DQN = dict(total_timesteps=200, num_envs=2, learning_starts=50, batch_size=8, n_step=2)
SMALL_PPO = dict(total_timesteps=64, num_envs=2, num_steps=8, num_minibatches=1)


def class_and_shape(env_id, num_envs, vectorization="auto"):
    """The class of the vector environment, and the shape of what one of them observes."""
    run = dqn_jax.Run(env_id=env_id, vectorization=vectorization)
    with closing(dqn_jax.make_envs(dqn_jax.Args(), run, num_envs)) as envs:
        assert envs.num_envs == num_envs
        observation, _ = envs.reset(seed=0)
        assert observation.shape == (num_envs, *envs.single_observation_space.shape)
        return type(envs.unwrapped), envs.single_observation_space.shape


@pytest.mark.parametrize(
    ("num_envs", "expected"),
    [
        (1, SyncVectorEnv),
        (2, SyncVectorEnv),
        (3, SyncVectorEnv),
        (4, CartPoleVectorEnv),
        (8, CartPoleVectorEnv),
    ],
)
def test_the_vector_version_is_taken_from_four_environments_on(num_envs, expected):
    assert class_and_shape("CartPole-v1", num_envs) == (expected, (4,))


@pytest.mark.parametrize("num_envs", [1, 3, 4])
def test_a_vector_version_with_other_observations_is_used_at_every_num_envs(num_envs):
    _, shape = class_and_shape("Preprocessed-v0", num_envs)
    assert shape == (2,)


@pytest.mark.parametrize("num_envs", [1, 4])
def test_a_vector_only_environment_is_used_at_every_num_envs(num_envs):
    assert class_and_shape("VectorOnly-v0", num_envs) == (SyncVectorEnv, (3,))


@pytest.mark.parametrize("num_envs", [1, 3, 4])
@pytest.mark.parametrize(("env_id", "shape"), [("CartPole-v1", (4,)), ("Preprocessed-v0", (3,))])
def test_sync_steps_single_environments_at_every_number(env_id, shape, num_envs):
    assert class_and_shape(env_id, num_envs, "sync") == (SyncVectorEnv, shape)


@pytest.mark.parametrize(("vectorization", "expected"), [("auto", True), ("sync", False)])
def test_sync_steps_an_environment_in_jax_like_any_other(vectorization, expected):
    run = ppo_jax.Run(env_id="phys2d/CartPole-v1", vectorization=vectorization)
    assert (find_jax_env(ppo_jax, ppo_jax.Args(), run) is not None) is expected


@pytest.mark.slow
def test_each_environment_has_a_process_where_they_are_async():
    """Also where there is a vector version, which is faster in one process."""
    run = dqn_jax.Run(env_id="CartPole-v1", vectorization="async")
    with closing(dqn_jax.make_envs(dqn_jax.Args(), run, 4)) as envs:
        assert isinstance(envs, SyncVectorEnv)  # for an evaluation, because processes start slowly
    with closing(dqn_jax.make_envs(dqn_jax.Args(), run, 4, training=True)) as envs:
        assert isinstance(envs.unwrapped, AsyncVectorEnv)
        workers = {process.pid for process in envs.processes}
        assert len(workers | {os.getpid()}) == 5


@pytest.mark.parametrize(
    ("module", "flags", "env_id", "vectorization"),
    [
        more(dqn_jax, SMALL_DQN, "environments:Counter-v0", "async"),
        more(ppo_jax, SMALL_PPO, "environments:Counter-v0", "async"),
        # Two of them are stepped without copies of their observations, but not with the flag.
        (dqn_jax, SMALL_DQN, "CartPole-v1", "sync"),
        more(ppo_jax, SMALL_PPO, "CartPole-v1", "sync"),
    ],
)
def test_training_is_the_same_bit_for_bit_however_environments_are_stepped(
    module, flags, env_id, vectorization
):
    """With the same seeds they do the same, and each observation that is kept is a copy."""
    run = dict(env_id=env_id, log_interval=40, eval_episodes=2, checkpoint_interval=0)
    args = module.Args(**flags)
    state, returns, folder = module.train(args, module.Run(**run))
    other_run = module.Run(**run, vectorization=vectorization)
    other_state, other_returns, other_folder = module.train(args, other_run)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other_state), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(returns, other_returns)
    scalars, _ = read_events(folder)
    other_scalars, _ = read_events(other_folder)
    del scalars["charts/SPS"]
    del other_scalars["charts/SPS"]
    assert scalars["eval/episodic_return"]
    assert scalars == other_scalars


def start(folder, flags):
    """dqn_jax.py as a program, with two environments in processes of their own."""
    small = "--num-envs 2 --learning-starts 50 --batch-size 8 --log-interval 20 --eval-episodes 0"
    return subprocess.Popen(
        [
            sys.executable,
            str(ROOT / "dqn_jax.py"),
            "--vectorization",
            "async",
            *small.split(),
            *flags.split(),
        ],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # as a terminal does
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_all_processes_keeps_a_checkpoint_and_prints_no_traceback(number, tmp_path):
    """As a terminal and SLURM send it, also to those of the environments."""
    process = start(tmp_path, "--env-id environments:Counter-v0 --total-timesteps 40000")
    assert process.stdout.readline().endswith(": 2 x environments:Counter-v0, cpu\n")
    assert process.stdout.readline().startswith("2,0")  # a twentieth of the steps
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (folder,) = (tmp_path / "runs").iterdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    step = int(checkpoint.name)
    assert 2000 <= step < 40_000
    assert read_events(folder)[0]["charts/SPS"][-1][0] == step


@pytest.mark.slow
def test_an_environment_that_fails_is_named_and_keeps_a_checkpoint(tmp_path):
    process = start(tmp_path, "--env-id environments:Failing-v0 --total-timesteps 2000")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    *_, error, last = err.strip().splitlines()
    assert "broken" in error
    # Step 500 of each of the two is their step 643 with those that only reset, and so in the
    # iteration of ten steps of both together that begins at 1280.
    (folder,) = (tmp_path / "runs").iterdir()
    assert last == f"in environments:Failing-v0 at step 1280 of {folder}"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["1280"]


class ChangingInfos(environments.Counter):
    """Now and then two of them have infos of two types, which fit into no array."""

    def step(self, action):
        *others, _ = super().step(action)
        return (*others, {"x": "text" if self.np_random.random() < 0.5 else 1})


gym.register("ChangingInfos-v0", ChangingInfos)


@pytest.mark.slow
def test_an_error_between_two_answers_of_the_processes_is_shown(tmp_path):
    """`close` would wait for ever for an answer that was read already."""
    process = start(tmp_path, "--env-id test_async_envs:ChangingInfos-v0 --total-timesteps 2000")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "ValueError: invalid literal for int() with base 10: 'text'" in err
    assert "in test_async_envs:ChangingInfos-v0 at step " in err


@pytest.mark.slow
def test_a_killed_process_is_named_and_what_was_learned_is_saved(tmp_path):
    process = start(tmp_path, "--env-id environments:Counter-v0 --total-timesteps 400000")
    process.stdout.readline()
    assert process.stdout.readline().startswith("20,0")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    forkserver = [x for x in children if "forkserver" in Path(f"/proc/{x}/cmdline").read_text()]
    workers = Path(f"/proc/{forkserver[0]}/task/{forkserver[0]}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    *_, where, dead = err.strip().splitlines()
    assert where.startswith("in environments:Counter-v0 at step ")
    assert dead.startswith("killed: Worker<AsyncVectorEnv>-")
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list((folder / "checkpoints").iterdir())) == 1
