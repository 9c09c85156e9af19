"""Hindsight, --her-fraction: which sequences are relabelled, and their rewards."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import environments
import jax
import numpy as np
import pytest
from environments import Given, Reach
from gymnasium.spaces import Box, Dict
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import RecordEpisodeStatistics, TransformReward
from helpers import read_events

import dqn_jax
import sac_jax
from cleanreplay import goals, replays
from cleanreplay.environments import wrap
from cleanreplay.errors import UsageError

N = 2  # environments
ROWS = 40  # that the replay holds
ADDED = 57  # rows, so that the ring has wrapped
BATCH = 16
RELABELLED = 12  # sequences of a batch
# One task in NumPy, called by a callback, and one in JAX. `before`: frames of the first stack.
TASKS = {
    "NumPy": SimpleNamespace(
        script=sac_jax,
        env_id="environments:Reach-v0",
        desired=slice(3, 5),
        achieved=slice(5, 7),
        horizon=9,
        n_step=3,
        before=1,
        goal_of=lambda row: [row, 0],
        row_of=lambda goal: int(goal[0]),
    ),
    "bits": SimpleNamespace(
        script=dqn_jax,
        env_id="cleanreplay.bit_flipping:BitFlipping6-v0",
        desired=slice(12, 18),
        achieved=slice(6, 12),
        horizon=6,
        n_step=1,
        before=0,
        goal_of=lambda row: [row >> i & 1 for i in range(6)],
        row_of=lambda goal: sum(int(bit) << i for i, bit in enumerate(goal)),
    ),
}


def make_agent(task):
    sizes = dict(num_envs=N, batch_size=BATCH, learning_starts=BATCH, buffer_size=N * ROWS)
    steps = dict(n_step=task.n_step, frame_stack=1 + task.before)
    args = task.script.Args(**sizes, **steps, her_fraction=RELABELLED / BATCH)

    def make_envs(count):
        return task.script.make_envs(args, task.script.Run(env_id=task.env_id), count)

    with closing(make_envs(1)) as envs:
        spaces = envs.single_observation_space, envs.single_action_space
        return task.script.Agent(args, *spaces, **replays.options(args, envs, make_envs))


def added(task, like):
    """Makes random steps [ADDED, N]. Each row achieves a different goal, never a desired one."""
    random = np.random.default_rng(0)
    ends = random.random((ADDED, N)) < 0.2
    valid = np.ones((ADDED, N), bool)
    for t in range(1, ADDED):
        ends[t - 1] &= valid[t - 1]
        valid[t] = ~ends[t - 1]
    observation = np.zeros((ADDED, N, like.observation.shape[-1]), np.float32)
    observation[..., task.desired] = task.goal_of(63)
    observation[..., task.achieved] = [[task.goal_of(t)] * N for t in range(ADDED)]
    action = np.zeros((ADDED, N, *like.action.shape), like.action.dtype)
    terminated = ends & (random.random((ADDED, N)) < 0.5)
    reward = np.full((ADDED, N), -7, np.float32)
    return type(like)(observation, action, reward, terminated, ends & ~terminated, valid)


@pytest.fixture(scope="module", params=TASKS)
def drawn(request):
    """Makes a task, the added steps, and samples before and after hindsight."""
    task = TASKS[request.param]
    agent = make_agent(task)
    # Hindsight gets sequences of single observations, not of stacks.
    hindsight = agent.replay.replay if task.before else agent.replay
    steps = added(task, agent.example_step)
    state = hindsight.init(take(steps, 0, 0))
    state = hindsight.add_batch(state, steps)

    @jax.jit
    def draw(key):
        return hindsight.replay.sample(state, key, BATCH), hindsight.sample(state, key, BATCH)

    pairs = [draw(jax.random.PRNGKey(seed)) for seed in range(40)]
    replays.close(agent.replay)
    return task, steps, jax.tree.map(np.asarray, pairs)


def relabelled(task, pairs):
    """Lists the relabelled sequences: first row, environment, steps before and after."""
    for before, after in pairs:
        for b in range(RELABELLED):
            was, now = (take(sample.experience, b) for sample in (before, after))
            yield task.row_of(was.observation[0, task.achieved]), before.indices[b] % N, was, now


def take(steps, *index):
    return jax.tree.map(lambda x: x[index], steps)


def last_row(steps, row, env):
    """Returns the last row of an episode: the one after its end, or the newest."""
    while row < ADDED - 1 and steps.valid[row, env]:
        row += 1
    return row


def test_goals_are_achieved_later_in_the_episode(drawn):
    task, steps, pairs = drawn
    aheads = set()
    for first, env, _, now in relabelled(task, pairs):
        row = first + task.before
        left = last_row(steps, row, env) - row
        goal = now.observation[:, task.desired]
        ahead = task.row_of(goal[0]) - row
        np.testing.assert_array_equal(goal, np.broadcast_to(goal[0], goal.shape))
        assert min(1, left) <= ahead <= min(task.horizon, left)
        aheads.add(ahead)

    assert aheads == set(range(task.horizon + 1))


def test_rewards_and_ends_are_those_of_the_new_goal(drawn):
    """The test compares all steps of a sequence except the last one, the next observation."""
    task, _, pairs = drawn
    counts = {"reached": 0, "missed": 0, "cut off": 0}
    for first, _, was, now in relabelled(task, pairs):
        for i in range(len(now.valid) - 1):
            reached = first + i + 1 == task.row_of(now.observation[i, task.desired])
            ends = reached and was.valid[i]
            cut_off = was.terminated[i] and not ends
            counts["reached" if reached else "missed"] += 1
            counts["cut off"] += cut_off
            assert now.reward[i] == (0 if reached else -1)
            assert now.terminated[i] == ends
            assert now.truncated[i] == (was.truncated[i] or cut_off)

    assert min(counts["reached"], counts["missed"]) > 100
    # The last step of an episode has only one later goal, which it reaches.
    assert (counts["cut off"] > 20) == (task.n_step > 1)


def test_all_but_goals_and_their_rewards_stays(drawn):
    task, _, pairs = drawn
    for before, after in pairs:
        was, now = before.experience, after.experience
        np.testing.assert_array_equal(after.indices, before.indices)
        for x, y in zip(was, now, strict=True):
            np.testing.assert_array_equal(x[RELABELLED:], y[RELABELLED:])
        rest = [np.delete(x.observation, task.desired, axis=-1) for x in (was, now)]
        np.testing.assert_array_equal(*rest)
        np.testing.assert_array_equal(was.valid, now.valid)


# Functions of an achieved goal a and a desired goal d; `i` is the info. JAX can trace these:
TRACED = {
    "constant": lambda a, d, i: False,  # as compute_terminated of Fetch
    "one goal": lambda a, d, i: (a == d).all() - 1.0,
    "rows of goals": lambda a, d, i: abs(a - d).T[0],  # [2] or [B, 2]
}
CALLED_BACK = {
    "one goal, or an error": lambda a, d, i: float(np.abs(a - d).reshape(2).sum()),
    "one number for several": lambda a, d, i: bool(np.linalg.norm(a - d) <= 50),
    "an argument that changes": lambda a, d, i: np.subtract(a, d, out=a).T[0],
    "a mask": lambda a, d, i: -float(a[a != d].size),
    "rows of goals in NumPy": lambda a, d, i: np.abs(np.asarray(a) - np.asarray(d)).T[0],
}


@pytest.mark.parametrize("name", [*TRACED, *CALLED_BACK])
def test_a_function_gives_each_goal_what_it_gives_it_alone(name):
    function = (TRACED | CALLED_BACK)[name]
    achieved, desired = 40 * np.random.default_rng(0).integers(0, 2, (2, 3, 2, 2)).astype(
        np.float32
    )
    pairs = zip(achieved.copy().reshape(-1, 2), desired.reshape(-1, 2), strict=True)
    expected = np.reshape([float(function(*pair, {})) for pair in pairs], (3, 2))
    call = goals.of_goals(function, (2,))

    np.testing.assert_array_equal(jax.jit(call)(achieved, desired), expected)
    np.testing.assert_array_equal(jax.vmap(call)(achieved, desired), expected)
    program = str(jax.make_jaxpr(call)(achieved, desired))
    assert ("pure_callback" in program) == (name in CALLED_BACK)


class Simulator(Reach):
    """Computes rewards only between a reset and its closing."""

    is_open = False

    def reset(self, **kwargs):
        self.is_open = True
        return super().reset(**kwargs)

    def compute_reward(self, achieved_goal, desired_goal, info):
        assert self.is_open
        return super().compute_reward(achieved_goal, desired_goal, info)

    def close(self):
        self.is_open = False


class NeedsInfo(Simulator):
    def compute_reward(self, achieved_goal, desired_goal, info):
        return info["crashed"]


class TwoShapes(Reach):
    observation_space = Dict(desired_goal=Box(-9, 9, (3,)), achieved_goal=Box(-9, 9, (2,)))


IMAGE = Box(0, 255, (9, 9, 1), np.uint8)
# An environment, a fraction of the batch, and a word of the error.
MISTAKES = [
    (environments.Counter, 0.5, "no goals"),
    (lambda: Given(Reach.observation_space), 0.5, "no goals"),
    (TwoShapes, 0.5, "no goals"),
    (NeedsInfo, 0.5, "KeyError: 'crashed'"),
    (lambda: Given(Dict(image=IMAGE, achieved_goal=IMAGE)), 0.5, "images"),
    (Reach, 0.001, "less than 1 sequence"),
    (lambda: TransformReward(Reach(), lambda reward: 10 * reward), 0.5, "TransformReward may"),
]


@pytest.mark.parametrize(("env", "fraction", "word"), MISTAKES)
def test_a_mistake_with_goals_is_one_line(env, fraction, word):
    envs = wrap(SyncVectorEnv([env]), 1)
    with pytest.raises(UsageError, match=rf"^her_fraction.*{word}.*\Z"):
        replays.options(sac_jax.Args(her_fraction=fraction), envs, lambda count: envs)

    assert not getattr(envs.unwrapped.envs[0], "is_open", False)


def test_the_environment_that_is_asked_is_reset_and_open():
    """The environment in which goals are found may be closed."""
    first, second = (wrap(SyncVectorEnv([Simulator]), 1) for _ in range(2))
    found = goals.find_goals(sac_jax.Args(her_fraction=0.5), first, lambda count: second)
    first.close()

    far = np.float32([[0, 0], [1, 1]])
    np.testing.assert_array_equal(found.rewards(np.zeros_like(far), far), [0, -1])
    found.close()
    assert not second.unwrapped.envs[0].is_open


def test_a_small_part_of_a_small_batch_of_data_is_refused():
    args = sac_jax.Args(her_fraction=0.1, batch_size=16, offline_data="x", offline_fraction=0.25)
    with pytest.raises(UsageError, match="of 4 is less than 1 sequence"):
        goals.find_goals(args, wrap(SyncVectorEnv([Reach]), 1), None)


def test_a_wrapper_that_changes_no_reward_is_let_through():
    class Rewards(TransformReward):  # a wrapper that has its own `compute_reward`
        def compute_reward(self, achieved_goal, desired_goal, info):
            return 10 * self.env.unwrapped.compute_reward(achieved_goal, desired_goal, info)

    goals.check_wrappers(RecordEpisodeStatistics(Reach()))
    goals.check_wrappers(Rewards(Reach(), lambda reward: 10 * reward))


def found():
    """Finds goals of an environment without a time limit."""
    envs = SyncVectorEnv([Reach])
    return goals.find_goals(sac_jax.Args(her_fraction=0.5), envs, lambda count: envs)


def test_bytes_of_goals_are_given_as_floats():
    """Otherwise 3 - 5 would be 254."""
    assert found().as_goals(jax.numpy.uint8([3, 5])).dtype == np.float32


def test_no_goal_is_looked_for_beyond_the_replay():
    replay = make_agent(TASKS["bits"]).replay
    far = replace(replay, goals=replay.goals._replace(horizon=1_000_003))
    state = far.init(make_agent(TASKS["bits"]).example_step)
    program = jax.make_jaxpr(partial(far.sample, batch_size=BATCH))(state, jax.random.PRNGKey(0))

    assert "1000003" not in str(program)


def test_without_a_time_limit_goals_are_within_1000_steps():
    assert found().horizon == 1_000


@pytest.mark.slow
def test_fifteen_bits_are_learned_with_hindsight(optimised):
    learning = dict(learning_rate=1e-3, gamma=0.98, exploration_fraction=0.2, hidden_sizes=(256,))
    steps = dict(total_timesteps=50_000, num_envs=16, train_frequency=8, learning_starts=1_000)
    args = dqn_jax.Args(**learning, **steps, her_fraction=0.8, buffer_size=100_000)
    env_id = "cleanreplay.bit_flipping:BitFlipping15-v0"
    run = dqn_jax.Run(env_id=env_id, eval_episodes=100, checkpoint_interval=0)
    scalars, _ = read_events(dqn_jax.train(args, run)[2])

    assert scalars["eval/success_rate"][-1][1] >= 0.9
