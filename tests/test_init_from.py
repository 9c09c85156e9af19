"""--init-from: a new run begins with what another one has learned, and with an empty replay."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO, flip_a_bit, make_agent, more, one_line

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import agent_file, protocol

SAC = dict(total_timesteps=60, learning_starts=40, batch_size=8, hidden_sizes=(8,))
R2D2 = dict(total_timesteps=300, learning_starts=160, buffer_size=200, train_length=8, burn_in=4)
R2D2 |= dict(period=4, hidden_size=8, batch_size=4)
RUNS = [
    (dqn_jax, SMALL_DQN, "environments:Counter-v0"),
    more(per_dqn_jax, SMALL_DQN, "environments:Counter-v0"),
    (ppo_jax, SMALL_PPO | dict(normalize_observations=True), "Pendulum-v1"),
    more(r2d2_jax, R2D2, "environments:Counter-v0"),
    more(recurrent_ppo_jax, SMALL_PPO | dict(sequence_length=4), "Pendulum-v1"),
    more(sac_jax, SAC, "Pendulum-v1"),
]


def begun(script, args, run):
    """The State that a run with --init-from begins with."""
    agent = make_agent(script, args, run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(99))
    return agent, agent_file.start_from(args.init_from, state, agent)


def trained(script, flags, run):
    """The State of a run, and its folder."""
    state, _, folder = script.train(script.Args(**flags), run)
    return state, str(folder)


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(("script", "flags", "env_id"), RUNS)
def test_all_that_was_learned_is_taken_and_nothing_else(script, flags, env_id):
    run = script.Run(env_id=env_id, log_interval=20, eval_episodes=0)
    state, folder = trained(script, flags, run)
    args = script.Args(**flags, init_from=folder)
    agent, new = begun(script, args, run)
    assert_equal(protocol.learned(agent, new), protocol.learned(agent, state))
    fresh = jax.jit(agent.init)(jax.random.PRNGKey(99))
    for name in state._fields:
        if getattr(protocol.learned(agent, state), name) == ():
            assert_equal(getattr(new, name), getattr(fresh, name))
    script.train(args, run)


def test_other_numbers_of_environments_and_a_larger_replay_are_no_obstacle():
    run = ppo_jax.Run(**COUNTER)
    state, folder = trained(ppo_jax, SMALL_PPO, run)
    args = ppo_jax.Args(**SMALL_PPO | dict(num_envs=2), init_from=folder)
    _, new = begun(ppo_jax, args, run)
    assert_equal(new.params, state.params)
    assert new.discounted_return.shape == (2,)
    state, folder = trained(dqn_jax, SMALL_DQN, dqn_jax.Run(**COUNTER))
    args = dqn_jax.Args(**SMALL_DQN | dict(buffer_size=150, num_envs=3), init_from=folder)
    _, new = begun(dqn_jax, args, dqn_jax.Run(**COUNTER))
    assert_equal(new.params, state.params)
    assert new.replay.size == 0


COMPILED = dict(env_id="environments:Chain-v0", log_interval=100, eval_episodes=0)


def compiled_begin(args, run):
    """The parameters that a compiled run begins with: it learns nothing."""
    state, _, _ = dqn_jax.train(replace(args, learning_rate=0.0), run)
    return state.params


def test_agents_of_compiled_runs_start_from_each_other_in_turn():
    two = dqn_jax.Run(**COMPILED, num_seeds=2)
    state, folder = trained(dqn_jax, SMALL_DQN, two)
    args = dqn_jax.Args(**SMALL_DQN, init_from=folder)
    three = compiled_begin(args, replace(two, num_seeds=3))
    expected = jax.tree.map(lambda x: np.asarray(x)[[0, 1, 0]], state.params)
    assert_equal(three, expected)
    _, ordinary = begun(dqn_jax, args, replace(two, num_seeds=1))
    assert_equal(ordinary.params, jax.tree.map(lambda x: x[0], expected))


def test_a_compiled_run_starts_from_an_ordinary_one():
    run = dqn_jax.Run(**COMPILED)
    state, folder = trained(dqn_jax, SMALL_DQN, replace(run, vectorization="sync"))
    args = dqn_jax.Args(**SMALL_DQN, init_from=folder)
    params = compiled_begin(args, replace(run, num_seeds=2))
    assert_equal(params, jax.tree.map(lambda x: np.stack([x, x]), state.params))


@pytest.mark.parametrize(
    ("script", "flags", "env_id"),
    [RUNS[0], RUNS[2], more(r2d2_jax, R2D2, "environments:Counter-v0")],
)
def test_the_file_of_an_agent_gives_its_networks_and_statistics(script, flags, env_id):
    """A target network is a copy again; the state of the optimiser begins anew."""
    run = script.Run(env_id=env_id, log_interval=20, eval_episodes=1)
    state, folder = trained(script, flags, run)
    args = script.Args(**flags, init_from=f"{folder}/best.safetensors")
    agent, new = begun(script, args, run)
    params = agent.policy_params(state)
    assert_equal(agent.policy_params(new), params)
    if "target_params" in state._fields:
        assert_equal(new.target_params, params)
    fresh = jax.jit(agent.init)(jax.random.PRNGKey(99))
    assert_equal(new.opt_state, fresh.opt_state)
    script.train(args, run)


@pytest.mark.more
def test_the_file_of_an_agent_of_sac_gives_the_actor():
    run = sac_jax.Run(env_id="Pendulum-v1", log_interval=20, eval_episodes=1)
    state, folder = trained(sac_jax, SAC, run)
    args = sac_jax.Args(**SAC, init_from=f"{folder}/best.safetensors")
    agent, new = begun(sac_jax, args, run)
    fresh = jax.jit(agent.init)(jax.random.PRNGKey(99))
    assert_equal(new.policy.actor, state.policy.actor)
    assert_equal(new.critics, fresh.critics)
    assert_equal(new.target_critics, fresh.critics)


def test_all_agents_of_a_compiled_run_start_from_the_file_of_one():
    run = dqn_jax.Run(**COMPILED | dict(eval_episodes=1))
    state, folder = trained(dqn_jax, SMALL_DQN, run)
    args = dqn_jax.Args(**SMALL_DQN, init_from=f"{folder}/best.safetensors")
    params = compiled_begin(args, replace(run, num_seeds=2))
    assert_equal(params, jax.tree.map(lambda x: np.concatenate([x, x]), state.params))


def test_the_file_of_another_network_is_refused_with_its_shapes(run_main):
    run = dqn_jax.Run(**COUNTER | dict(eval_episodes=1))
    _, folder = trained(dqn_jax, SMALL_DQN, run)
    file = f"{folder}/best.safetensors"
    flags = ["--env-id", run.env_id, "--init-from", file, "--hidden-sizes", "7"]
    line = one_line(run_main(dqn_jax, *flags))
    assert line.startswith(f"error: init_from: {file} is of another network or script: params/")
    assert "q/kernel is (84, 3) there, (7, 3) here" in line


def test_another_network_is_refused_with_its_shapes(run_main):
    run = dqn_jax.Run(**COUNTER)
    _, folder = trained(dqn_jax, SMALL_DQN, run)
    flags = ["--env-id", run.env_id, "--init-from", folder, "--hidden-sizes", "7"]
    line = one_line(run_main(dqn_jax, *flags))
    assert "is of another network or script: params/" in line
    assert "q/kernel is (84, 3) there, (7, 3) here" in line


def test_statistics_that_only_one_of_two_runs_has_are_refused():
    run = ppo_jax.Run(env_id="Pendulum-v1", eval_episodes=0, log_interval=16)
    _, folder = trained(ppo_jax, SMALL_PPO | dict(normalize_observations=False), run)
    args = ppo_jax.Args(**SMALL_PPO, init_from=folder, normalize_observations=True)
    with pytest.raises(ppo_jax.UsageError, match=r"obs_rms.* is missing there"):
        begun(ppo_jax, args, run)


def test_a_folder_without_a_run_is_refused(run_main):
    line = one_line(run_main(dqn_jax, "--init-from", "nowhere"))
    assert line.startswith("error: init_from: ")
    assert line.endswith("nowhere/checkpoints has no checkpoint")


def test_sac_acts_with_its_policy_from_the_first_step():
    run = sac_jax.Run(env_id="Pendulum-v1")
    agent = make_agent(sac_jax, sac_jax.Args(), run)
    started = make_agent(sac_jax, sac_jax.Args(init_from="runs/another"), run)
    state = jax.jit(agent.init)(jax.random.PRNGKey(0))
    state.policy.actor["params"]["mean"]["bias"] = np.float32([3.0])  # its actions are near 1
    observation = np.zeros((1_000, 3), np.float32)
    inputs = (state.policy.actor, observation, jax.random.PRNGKey(1), 0)
    assert abs(np.mean(agent.act(*inputs))) < 0.1
    assert np.mean(started.act(*inputs)) > 0.9


def test_alpha_is_a_flag_without_autotune():
    run = sac_jax.Run(env_id="Pendulum-v1", eval_episodes=0, log_interval=20)
    _, folder = trained(sac_jax, SAC, run)
    for autotune, alpha in ((True, None), (False, 0.05)):
        args = sac_jax.Args(**SAC, init_from=folder, autotune=autotune, alpha=0.05)
        _, new = begun(sac_jax, args, run)
        assert (np.exp(new.policy.log_alpha) == pytest.approx(0.05)) == (alpha == 0.05)


def test_a_damaged_checkpoint_is_refused(run_main):
    _, folder = trained(dqn_jax, SMALL_DQN, dqn_jax.Run(**COUNTER))
    for path in Path(folder, "checkpoints").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    line = one_line(run_main(dqn_jax, "--env-id", COUNTER["env_id"], "--init-from", folder))
    assert line.startswith("error: init_from: ")
    assert "is damaged, or no agent" in line


def test_a_number_that_comes_back_as_another_is_refused():
    """As after a flipped bit, which the format may not notice."""
    run = dqn_jax.Run(**COUNTER)
    _, folder = trained(dqn_jax, SMALL_DQN, run)
    flip_a_bit(Path(folder, "checkpoints", "200", "state.safetensors"), "params/params/q_0/bias")
    with pytest.raises(dqn_jax.UsageError, match=r"q_0/bias has another checksum"):
        begun(dqn_jax, dqn_jax.Args(**SMALL_DQN, init_from=folder), run)


def test_a_resumed_run_goes_on_from_its_own_checkpoint():
    run = dqn_jax.Run(**COUNTER)
    _, source = trained(dqn_jax, SMALL_DQN, run)
    args = dqn_jax.Args(**SMALL_DQN, init_from=source)
    state, _, folder = dqn_jax.train(args, run)
    resumed, _, _ = dqn_jax.train(args, replace(run, resume=str(folder)))
    assert_equal(resumed.params, state.params)
