"""Hindsight, --her-fraction: which windows get other goals, and their rewards."""

import environments
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict
from gymnasium.vector import SyncVectorEnv
from helpers import fast_at_ends, one_line, read_events

import dqn_jax
import per_dqn_jax
import sac_jax
from cleanreplay import goals, replays
from cleanreplay.environments import wrap

N = 2  # environments
ROWS = 40  # that the replay holds
BATCH = 16
RELABELLED = 12  # of a batch
PLACES = {"observation": slice(0, 3), "desired_goal": slice(3, 5), "achieved_goal": slice(5, 7)}


def reach(frame_stack=1):
    """Environments of one `Reach`, as a script makes them."""
    return wrap(SyncVectorEnv([environments.Reach]), frame_stack)


def sac_of(args, envs):
    """An agent for these environments, of which one is also asked for rewards."""
    spaces = envs.single_observation_space, envs.single_action_space
    return sac_jax.SAC(args, *spaces, **replays.options(args, envs, lambda count: envs))


def sac(**flags):
    """An agent for `Reach`, whose goals at odd rows are near the one before."""
    args = sac_jax.Args(
        num_envs=N,
        her_fraction=RELABELLED / BATCH,
        batch_size=BATCH,
        learning_starts=BATCH,
        buffer_size=N * ROWS,
        **flags,
    )
    envs = reach(args.frame_stack)
    return sac_of(args, envs)


def hindsight_of(agent):
    """The replay of an agent, of which single observations are seen, and no stacks."""
    return agent.replay.replay if agent.args.frame_stack > 1 else agent.replay


def stored(agent):
    """The state of a replay that has gone round, and the episode of each of its rows [57, N].

    A step stands at [number of the row, 0]: a later goal says which row it is of, and only the next
    row is within 0.3 of a goal if it is the goal.
    """
    rows = 57
    random = np.random.default_rng(0)
    ends = random.random((rows, N)) < 0.2
    valid = np.ones((rows, N), bool)
    for t in range(1, rows):
        ends[t - 1] &= valid[t - 1]
        valid[t] = ~ends[t - 1]
    observation = np.zeros((rows, N, 7), np.float32)
    observation[..., PLACES["desired_goal"]] = -7
    observation[..., PLACES["achieved_goal"].start] = np.arange(rows)[:, None]
    action = np.zeros((rows, N, 2), np.float32)
    terminated = ends & (random.random((rows, N)) < 0.5)
    reward = np.where(valid, -1, 0).astype(np.float32)
    steps = sac_jax.Step(observation, action, reward, terminated, ends & ~terminated, valid)
    episode = np.concatenate([np.zeros((1, N), int), np.cumsum(~valid, axis=0)[:-1]])
    replay = hindsight_of(agent)
    item = jax.tree.map(lambda x: x[0, 0], steps)
    return replay.add_batch(replay.init(item), steps), episode


def drawn(agent, seeds):
    """Pairs of a sample without other goals and the same one with them, as NumPy arrays."""
    replay_state, episode = stored(agent)

    @jax.jit
    def draw(replay_state, key):
        replay = hindsight_of(agent)
        before = replay.replay.sample(replay_state, key, BATCH)
        return before, replay.sample(replay_state, key, BATCH)

    pairs = [draw(replay_state, jax.random.PRNGKey(seed)) for seed in range(seeds)]
    return jax.tree.map(np.asarray, pairs), episode


def part(window, name):
    """A part of the flat observations [B, W, F] of windows."""
    return window.observation[..., PLACES[name]]


@fast_at_ends(
    "flags", [{}, {"n_step": 3}, {"frame_stack": 3}], ids=["plain", "n_step", "frame_stack"]
)
def test_goals_are_achieved_later_in_the_episode(flags):
    agent = sac(**flags)
    pairs, episode = drawn(agent, 50)
    first = agent.args.frame_stack - 1
    aheads = set()
    for _, after in pairs:
        goal = part(after.experience, "desired_goal")[:RELABELLED]
        np.testing.assert_array_equal(goal, np.broadcast_to(goal[:, :1], goal.shape))
        row = part(after.experience, "achieved_goal")[:RELABELLED, first, 0].astype(int)
        goal_row = goal[:, 0, 0].astype(int)
        env = after.indices[:RELABELLED] % N
        np.testing.assert_array_equal(episode[goal_row, env], episode[row, env])
        # A step at the end of the episode, which only resets, has no later one.
        ends = ~after.experience.valid[:RELABELLED, first] | (row == 56)
        assert (goal_row > row)[~ends].all()
        aheads.update((goal_row - row).tolist())
    assert {0, 1, 2, 3, 4, 5} <= aheads


FLAGS = [{}, {"n_step": 3}, {"n_step": 3, "frame_stack": 2}]


@fast_at_ends("flags", FLAGS, ids=["plain", "n_step", "n_step, frame_stack"])
def test_rewards_and_ends_are_those_of_the_new_goal(flags):
    """Of all steps of a window but the last, which only follows them."""
    pairs, _ = drawn(sac(**flags), 50)
    reached_or_not = np.zeros(2)
    cut_off = 0  # steps that terminated at the old goal, and do not reach the new one
    for before, after in pairs:
        steps = jax.tree.map(lambda x: x[:RELABELLED, :-1], after.experience)
        next_achieved = part(after.experience, "achieved_goal")[:RELABELLED, 1:]
        reached = (next_achieved == part(steps, "desired_goal")).all(axis=-1)
        np.testing.assert_array_equal(steps.reward, np.where(reached, 0, -1))
        np.testing.assert_array_equal(steps.terminated, reached & steps.valid)
        was = jax.tree.map(lambda x: x[:RELABELLED, :-1], before.experience)
        truncated = was.truncated | (was.terminated & ~reached)
        np.testing.assert_array_equal(steps.truncated, truncated)
        reached_or_not += [reached.sum(), (~reached).sum()]
        cut_off += (was.terminated & ~reached).sum()
    assert (reached_or_not > 100).all()
    assert (cut_off > 20) == ("n_step" in flags)  # a last step has one later goal, which it reaches


def test_the_other_windows_stay_as_they_are():
    pairs, _ = drawn(sac(), 5)
    for before, after in pairs:
        np.testing.assert_array_equal(after.indices, before.indices)
        np.testing.assert_array_equal(after.probabilities, before.probabilities)
        for x, y in zip(before.experience, after.experience, strict=True):
            np.testing.assert_array_equal(x[RELABELLED:], y[RELABELLED:])


def test_with_clip_rewards_the_signs_of_new_rewards_are_learned():
    class Large(environments.Reach):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return 100 * super().compute_reward(achieved_goal, desired_goal, info)

    args = sac(clip_rewards=True).args
    envs = wrap(SyncVectorEnv([Large]), 1)
    agent = sac_of(args, envs)
    pairs, _ = drawn(agent, 3)
    experience = [jax.tree.map(lambda x: x[:RELABELLED], after.experience) for _, after in pairs]
    transitions = [agent.to_transitions(steps, jax.random.PRNGKey(0)) for steps in experience]
    assert {float(x) for steps in experience for x in steps.reward[:, 0]} == {-100, 0}
    assert {float(x) for batch in transitions for x in batch.reward} == {-1, 0}


def distance(achieved_goal, desired_goal, info):
    """Takes goals of NumPy and of JAX."""
    return abs(achieved_goal - desired_goal).sum(-1)


def one_only(achieved_goal, desired_goal, info):
    """Of several goals it gives one number, without an error."""
    return bool(np.linalg.norm(achieved_goal - desired_goal) <= 0.5)


def constant(achieved_goal, desired_goal, info):
    """As compute_terminated of Fetch."""
    return False


def fails_with_many(achieved_goal, desired_goal, info):
    """As an environment that checks the shape of its goal."""
    assert achieved_goal.shape == (2,)
    return float(np.abs(achieved_goal - desired_goal).sum())


def far(achieved_goal, desired_goal, info):
    """One number for several goals, and large distances count as reached."""
    return bool(np.linalg.norm(achieved_goal - desired_goal) <= 50)


def by_axis(achieved_goal, desired_goal, info):
    """Takes a goal [2] or goals [B, 2], in JAX."""
    assert achieved_goal.ndim < 3
    return jnp.linalg.norm(achieved_goal - desired_goal, axis=-1)


def with_a_mask(achieved_goal, desired_goal, info):
    """NumPy that JAX cannot trace for another reason than most."""
    apart = achieved_goal != desired_goal
    return -float(achieved_goal[apart].size)


def in_jax(achieved_goal, desired_goal, info):
    """JAX, for one goal."""
    return (achieved_goal == desired_goal).all() - 1.0


GOALS = 40.0 * np.random.default_rng(0).integers(0, 2, (2, 3, 2, 2)).astype(np.float32)
OF_ONE = [distance, one_only, constant, fails_with_many, far, with_a_mask, in_jax]


@pytest.mark.parametrize("function", OF_ONE)
def test_a_function_of_goals_gives_for_each_what_it_gives_for_it_alone(function):
    achieved, desired = GOALS
    expected = [
        [float(function(a, d, {})) for a, d in zip(*pair, strict=True)]
        for pair in zip(achieved, desired, strict=True)
    ]
    call = goals.of_goals(function, (2,))
    np.testing.assert_array_equal(jax.jit(call)(achieved, desired), expected)
    np.testing.assert_array_equal(jax.vmap(call)(achieved, desired), expected)


def test_a_function_of_a_batch_is_given_one_axis_of_goals():
    call = goals.of_goals(lambda *args: np.asarray(by_axis(*args)), (2,))
    for each in (call, goals.of_goals(by_axis, (2,))):
        expected = np.linalg.norm(GOALS[0] - GOALS[1], axis=-1)
        np.testing.assert_allclose(jax.jit(each)(*GOALS), expected, rtol=1e-6)


def test_only_what_jax_cannot_trace_is_called_back():
    def program(function):
        return str(jax.make_jaxpr(goals.of_goals(function, (2,)))(*GOALS))

    for function in (distance, by_axis, in_jax):
        assert "pure_callback" not in program(function)
    for function in (fails_with_many, with_a_mask, far):
        assert "pure_callback" in program(function)


def refusal(envs, fraction=0.5):
    """What `replays.options` says of environments."""
    with pytest.raises(sac_jax.UsageError) as caught:
        replays.options(sac_jax.Args(her_fraction=fraction), envs, lambda count: envs)
    return str(caught.value)


def test_a_fraction_of_no_window_is_refused():
    assert "her_fraction: 0.001 of batch_size is not one window" in refusal(reach(), 0.001)


def test_environments_without_goals_are_refused(run_main):
    flags = "--her-fraction 0.5 --env-id CartPole-v1".split()  # noqa: SIM905
    assert "her_fraction: " in one_line(run_main(dqn_jax, *flags))


def test_goals_without_a_function_of_rewards_are_refused():
    class Silent(environments.gym.Env):
        observation_space = environments.Reach.observation_space
        action_space = environments.Reach.action_space

    text = refusal(wrap(SyncVectorEnv([Silent]), 1))
    assert "must have compute_reward(achieved_goal, desired_goal, info)" in text


def test_a_function_of_rewards_that_needs_more_is_refused():
    class NeedsInfo(environments.Reach):
        def compute_reward(self, achieved_goal, desired_goal, info):
            return info["crashed"]

    assert "KeyError: 'crashed'" in refusal(wrap(SyncVectorEnv([NeedsInfo]), 1))


def test_goals_of_two_shapes_are_refused():
    class Two(environments.Reach):
        observation_space = Dict(
            observation=Box(-9, 9, (3,)),
            desired_goal=Box(-9, 9, (3,)),
            achieved_goal=Box(-9, 9, (2,)),
        )

    assert "two equal Boxes" in refusal(wrap(SyncVectorEnv([Two]), 1))


BITS = dict(
    num_envs=16,
    learning_rate=1e-3,
    gamma=0.98,
    train_frequency=8,
    learning_starts=1_000,
    exploration_fraction=0.2,
    hidden_sizes=(256,),
    buffer_size=100_000,
)


def success_in_bits(script, bits, **flags):
    """The last success rate of evaluations, in compiled training."""
    args = script.Args(**BITS | flags)
    env_id = f"cleanreplay.bit_flipping:BitFlipping{bits}-v0"
    run = script.Run(env_id=env_id, eval_episodes=100, checkpoint_interval=0)
    scalars, _ = read_events(script.train(args, run)[2])
    return scalars["eval/success_rate"][-1][1], scalars["charts/success_rate"][-1][1]


@pytest.mark.slow
@pytest.mark.parametrize("script", [dqn_jax, per_dqn_jax])
def test_six_bits_are_learned(optimised, script):
    in_evaluation, in_training = success_in_bits(script, 6, total_timesteps=8_000, her_fraction=0.8)
    assert in_evaluation == 1
    assert 0.5 < in_training < 1  # it explores


@pytest.mark.slow
def test_fifteen_bits_are_learned_with_hindsight_only(optimised):
    flags = dict(total_timesteps=50_000)
    assert success_in_bits(dqn_jax, 15, **flags, her_fraction=0.8)[0] > 0.9
    assert success_in_bits(dqn_jax, 15, **flags)[0] < 0.1


@pytest.mark.slow
def test_a_point_is_led_to_its_goal(optimised):
    """In an environment in NumPy, by SAC."""
    args = sac_jax.Args(
        total_timesteps=3_000, learning_starts=500, her_fraction=0.8, policy_lr=1e-3, gamma=0.95
    )
    run = sac_jax.Run(env_id="environments:Reach-v0", eval_episodes=50)
    scalars, _ = read_events(sac_jax.train(args, run)[2])
    assert scalars["eval/success_rate"][-1][1] > 0.8


@pytest.mark.more
def test_a_run_with_hindsight_is_resumed(run_main):
    flags = "--env-id environments:Reach-v0 --her-fraction 0.8 --learning-starts 256".split()  # noqa: SIM905
    code, out, _ = run_main(sac_jax, *flags, "--total-timesteps", "300")
    assert code == 0
    folder = out.splitlines()[-1].partition(": mean")[0]
    code, _, err = run_main(sac_jax, "--resume", folder, "--total-timesteps", "400")
    assert code == 0, err
