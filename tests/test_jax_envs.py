"""Environments written in JAX: their steps against a plain loop, and obstacles to compiling."""

from dataclasses import replace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, make_jax
from gymnasium.experimental.functional import FuncEnv
from helpers import edited, find_jax_env

import dqn_jax
from cleanreplay import UsageError
from cleanreplay.compiled import make_trainer
from cleanreplay.jax_envs import JaxEnvs
from dqn_jax import DQN, Step

TIME_LIMIT = 6


class Walk(FuncEnv):
    """Walks from 1, 2 or 3, with actions -1, 0 and 1 and slips, until it is below 0 or above 4.

    The observation shows the position and a random number. Rewards and ends are integers.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3, start=-1)

    def initial(self, rng, params=None):
        return jax.random.randint(rng, (), 1, 4)

    def transition(self, state, action, rng, params=None):
        return state + action + jax.random.randint(rng, (), -1, 2)

    def observation(self, state, rng, params=None):
        return jnp.stack([state.astype(jnp.float32), jax.random.uniform(rng)])

    def reward(self, state, action, next_state, rng, params=None):
        return 10 * state + next_state + 100 * action + jax.random.randint(rng, (), 0, 9)

    def terminal(self, state, rng, params=None):
        return jnp.int32((state < 0) | (state > 4))


INITIAL = jax.jit(Walk().initial)
TRANSITION = jax.jit(Walk().transition)
OBSERVATION = jax.jit(Walk().observation)
REWARD = jax.jit(Walk().reward)
TERMINAL = jax.jit(Walk().terminal)


def make_walk(num_envs, frame_stack):
    """Makes a DQN for stacks of the walk's observations, environments, and params to act with."""
    args = dqn_jax.Args(num_envs=num_envs, train_frequency=25 * num_envs, start_e=0.5, end_e=0.5)
    space = gym.spaces.Box(-np.inf, np.inf, (frame_stack, 2) if frame_stack > 1 else (2,))
    args = replace(args, frame_stack=frame_stack, hidden_sizes=(8,))
    agent = DQN(args, space, Walk.action_space)
    params = jax.eval_shape(agent.init, jax.random.PRNGKey(0)).params
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), params)
    return agent, JaxEnvs(agent, Walk(), TIME_LIMIT), params


class Loop:
    """Does the same as `JaxEnvs`, for one environment after the other."""

    def __init__(self, agent, key, n):
        self.agent = agent
        self.state = [None] * n
        self.stack = np.zeros((n, agent.args.frame_stack, 2), np.float32)
        self.length = [0] * n
        self.valid = [True] * n
        for i, own_key in enumerate(jax.random.split(key, n)):
            self.state[i] = INITIAL(own_key)
            self.stack[i, -1] = OBSERVATION(self.state[i], own_key)

    def observation(self):
        return self.stack.reshape(-1, *self.agent.example_step.observation.shape).copy()

    def step_one(self, i, action, key):
        """Takes a step of environment i. Returns the rest of its Step."""
        if not self.valid[i]:
            self.state[i] = INITIAL(key)
            self.length[i] = 0
            self.stack[i] = 0
            row = dict(reward=0, terminated=False, truncated=False, valid=False)
        else:
            before = self.state[i]
            self.state[i] = TRANSITION(before, action - 1, key)
            self.length[i] += 1
            terminated = bool(TERMINAL(self.state[i], key))
            row = dict(
                reward=int(REWARD(before, action - 1, self.state[i], key)),
                terminated=terminated,
                truncated=self.length[i] == TIME_LIMIT and not terminated,
                valid=True,
            )
        self.valid[i] = not (row["terminated"] or row["truncated"])
        self.stack[i, :-1] = self.stack[i, 1:]
        self.stack[i, -1] = OBSERVATION(self.state[i], key)
        return row

    def collect(self, params, env_keys, act_key=None, step=0):
        """Takes a step with each of the keys [S, N]. Returns a Step [S, N, ...]."""
        rollout = []
        for t, keys in enumerate(env_keys):
            observation = self.observation()
            actions = self.agent.act(params, observation, act_key, step + t * len(keys))
            actions = np.asarray(actions)
            rows = [self.step_one(i, action, keys[i]) for i, action in enumerate(actions)]
            rest = {name: np.array([row[name] for row in rows]) for name in rows[0]}
            rollout.append(Step(observation, actions, **rest))
        return jax.tree.map(lambda *x: np.stack(x), *rollout)


def test_rollouts_are_those_of_a_plain_loop():
    """Three rollouts have starts, a time limit, both ends of episodes, exploration and stacks."""
    n = 3
    agent, envs, params = make_walk(n, frame_stack=2)
    key = jax.random.PRNGKey(7)
    state = envs.reset(key, n)
    loop = Loop(agent, key, n)
    collect = jax.jit(envs.collect)
    counts = np.zeros(3)
    for i in range(3):
        key = jax.random.PRNGKey(i)
        state, (rollout, _) = collect(state, params, key, 75 * i)
        act_key, env_key = jax.random.split(key)
        expected = loop.collect(params, jax.random.split(env_key, (25, n)), act_key, 75 * i)

        jax.tree.map(np.testing.assert_array_equal, rollout, expected)
        dtypes = jax.tree.map(lambda x: x.dtype, rollout)
        assert dtypes == jax.tree.map(lambda x: x.dtype, agent.example_step)
        np.testing.assert_array_equal(state.observation, loop.observation())
        np.testing.assert_array_equal(state.valid, loop.valid)
        np.testing.assert_array_equal(state.length, loop.length)
        counts += [rollout.terminated.sum(), rollout.truncated.sum(), (~rollout.valid).sum()]
    assert counts.min() > 8


@pytest.mark.parametrize("max_steps", [3, 30_000])
def test_an_evaluation_is_that_of_a_plain_loop(max_steps):
    """It plays the first episode in each environment, with the best actions."""
    n = 12
    agent, envs, params = make_walk(n, frame_stack=1)
    key = jax.random.PRNGKey(5)
    loop = Loop(agent, jax.random.fold_in(key, 0), n)

    returns, over, successes = envs.evaluate(params, n, key, max_steps)

    steps = loop.collect(params, jax.random.split(key, (min(max_steps, TIME_LIMIT), n)))
    done = steps.terminated | steps.truncated
    is_first = np.cumsum(done, axis=0) - done == 0
    np.testing.assert_array_equal(returns, (steps.reward * is_first).sum(axis=0))
    np.testing.assert_array_equal(over, done.any(axis=0))
    assert over.all() == (max_steps > TIME_LIMIT)
    assert not is_first[-1].all()  # some end before the others
    assert np.isinf(successes).all()  # not reported


def test_without_a_time_limit_an_episode_is_never_truncated():
    agent, _, _ = make_walk(1, frame_stack=1)

    assert JaxEnvs(agent, Walk(), None).time_limit == 2**31 - 1


@pytest.mark.parametrize(("env_kwargs", "limit"), [("{}", 9), ('{"max_episode_steps": 5}', 5)])
def test_the_time_limit_is_that_of_the_flags(env_kwargs, limit):
    run = dqn_jax.Run(env_id="Chain-v0", env_kwargs=env_kwargs)

    assert make_trainer(dqn_jax, dqn_jax.Args(), run).envs.time_limit == limit


def make_doubled(**kwargs):
    """Makes a chain in a wrapper that its registration does not have."""
    return gym.wrappers.TransformReward(make_jax(Chain(), **kwargs), lambda reward: 2 * reward)


gym.register("ChainDoubled-v0", make_doubled, max_episode_steps=9, disable_env_checker=True)
VECTOR_WRAPPER = (
    "    if envs.metadata.get",
    "    envs = gym.wrappers.vector.TransformReward(envs, np.sign)\n    if envs.metadata.get",
)
SEEDS = {"num_seeds": 2}
# The environment, flags, edits of the script, the reason, whether a line gives it if only one agent
# is trained, and a flag that needs compiling.
PREVENTED = [
    ("Counter-v0", {}, (), "not written in JAX", False, SEEDS),
    ("Chain-v0", {"vectorization": "sync"}, (), "--vectorization sync", False, SEEDS),
    ("ChainOfCells-v0", {}, (), "Discrete(5)", True, {"num_devices": 2}),
    ("ChainDoubled-v0", {}, (), "<TransformReward", True, {"sweep": ("gamma=0,1",)}),
    ("Chain-v0", {}, (VECTOR_WRAPPER,), "<TransformReward", True, SEEDS),
]


@pytest.mark.parametrize(("env_id", "flags", "edits", "word", "is_printed", "more"), PREVENTED)
def test_what_prevents_compiling_is_named(env_id, flags, edits, word, is_printed, more, capsys):
    script = edited(dqn_jax, *edits) if edits else dqn_jax
    run = script.Run(env_id=env_id, **flags)
    found = find_jax_env(script, script.Args(), run)
    lines = [x for x in capsys.readouterr().out.splitlines() if "not compiled" in x]
    with pytest.raises(UsageError) as caught:
        find_jax_env(script, script.Args(), replace(run, **more))

    assert found is None
    assert len(lines) == is_printed
    for line in (*lines, str(caught.value)):
        assert env_id in line
        assert word in line
