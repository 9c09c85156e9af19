"""recurrent_ppo_jax.py: its memory in acting, in sequences and in the policy, against the network
applied a step at a time, and what it learns.
"""

import inspect
from contextlib import closing
from dataclasses import replace
from functools import cache, partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from helpers import COUNTER, fast_at_ends, make_agent, make_trainer, more, read_events
from jax.flatten_util import ravel_pytree
from optax.tree_utils import tree_get

import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
from cleanreplay import load_policy, memory_tasks, protocol  # noqa: F401  (registers)
from recurrent_ppo_jax import Args, RecurrentPPO, Run, UsageError, train

KEY = jax.random.PRNGKey(0)
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(3, start=5)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
MULTI = gym.spaces.MultiDiscrete([2, 4], start=[1, -2])
SPACES = {"discrete": DISCRETE, "multi": MULTI, "box": BOX}
BOTH = pytest.mark.parametrize("space", [more(DISCRETE), BOX], ids=["discrete", "box"])
ALL = fast_at_ends("space", SPACES.values(), ids=SPACES)
SMALL = dict(
    num_envs=4,
    num_steps=24,
    sequence_length=8,
    num_minibatches=2,
    update_epochs=2,
    hidden_size=5,
    gamma=0.9,
    gae_lambda=0.8,
    normalize_rewards=False,
)


class Random(gym.Env):
    """Random observations and rewards; one step in three ends the episode, in one way or another.

    The first observation of an episode has a 1 in the third place, the others a 0.
    """

    observation_space = OBSERVATIONS

    def __init__(self, kind):
        self.action_space = SPACES[kind]

    def observe(self, is_first):
        return np.append(self.np_random.normal(size=2), is_first).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(True), {}

    def step(self, action):
        assert self.action_space.contains(action)
        terminated, truncated = self.np_random.random(2) < 0.18
        reward = self.np_random.normal()
        return self.observe(False), reward, terminated, truncated and not terminated, {}


for kind in SPACES:
    gym.register(f"Random-{kind}-v0", partial(Random, kind), disable_env_checker=True)


def make(space=DISCRETE, **flags):
    """The algorithm, and a State whose policy is not uniform and whose memory matters."""
    agent = RecurrentPPO(Args(**SMALL | flags), OBSERVATIONS, space)
    state = jax.jit(agent.init)(KEY)
    params, unravel = ravel_pytree(state.params)
    params = params + 0.3 * jax.random.normal(jax.random.PRNGKey(2), params.shape)
    return agent, state._replace(params=unravel(params))


@cache
def collected_with(kind):
    """The algorithm, a State with statistics, the second of two rollouts, and what follows it."""
    agent, state = make(SPACES[kind], normalize_observations=True)
    stats = recurrent_ppo_jax.RunningMeanStd(jnp.full(3, 0.2), jnp.full(3, 4.0), jnp.float32(9))
    state = state._replace(obs_rms=stats)
    run = Run(env_id=f"Random-{kind}-v0")
    with closing(recurrent_ppo_jax.make_envs(agent.args, run, 4)) as envs:
        env_state = (*recurrent_ppo_jax.reset(envs, KEY, 1), agent.no_memory(4))
        for step in (0, agent.steps_per_iteration):
            inputs = (agent.policy_params(state), env_state, KEY, step)
            rollout, env_state = recurrent_ppo_jax.collect_rollout(agent, envs, *inputs)
    assert min(rollout.terminated.sum(), rollout.truncated.sum()) > 4
    # In the last step and in the one after it some environments only reset.
    assert set(rollout.valid[-1]) == set(env_state[1]) == {True, False}
    return agent, state, rollout, env_state


def collected(space):
    """The same for one of the spaces."""
    return collected_with(next(kind for kind in SPACES if SPACES[kind] is space))


def batch_of(agent, state, rollout, next_observation):
    """The Batch [B, L, ...] that `train_step` makes of a rollout, and its metrics."""
    optimize = agent.optimize
    agent.optimize = lambda state, batch, key, rate: (state, {"batch": batch})
    try:
        _, _, metrics = jax.jit(agent.train_step)(state, rollout, KEY, 0, next_observation)
    finally:
        agent.optimize = optimize
    return metrics.pop("batch"), metrics


def in_time(agent, x):
    """Sequences [B, L, ...] as the steps [S, N, ...] that they were cut from."""
    x = np.asarray(x)
    length = agent.args.sequence_length
    rows = x.reshape(-1, agent.args.num_envs, length, *x.shape[2:]).swapaxes(1, 2)
    return rows.reshape(agent.rollout_shape + x.shape[2:])


def plain_step(agent, state, observation, memory):
    """Output [N, ...] and V(s) [N] of the network, applied to one step with this memory."""
    cell, hidden, last_action = memory
    normalized = recurrent_ppo_jax.normalize(observation, state.obs_rms)
    valid = np.ones((1, len(observation)), bool)
    inputs = (cell, hidden), normalized[None], last_action[None], valid
    output, value, _ = jax.jit(agent.network.apply)(state.params, *inputs)
    return np.asarray(output[0]), np.asarray(value[0])


def plain_values(agent, state, rollout, env_state):
    """V(s) [S + 1, N] of each step by its own memory, and of the one after the rollout."""
    memories = [tuple(x[t] for x in rollout.memory) for t in range(agent.args.num_steps)]
    rows = [*zip(rollout.observation, memories, strict=True), (env_state[0], env_state[2])]
    return np.stack([plain_step(agent, state, *row)[1] for row in rows])


# ------------------------------------------------------------------------------------- the memory


@ALL
def test_the_memory_is_zero_where_an_episode_begins_and_nowhere_else(space):
    _, _, rollout, _ = collected(space)
    begins = rollout.observation[..., 2] == 1
    assert begins.sum() > 10
    assert (~rollout.valid & begins).sum() == 0  # a step that only resets has that of its episode
    for x in rollout.memory:
        np.testing.assert_array_equal((x == 0).all(axis=-1), begins)


@ALL
def test_the_memory_has_the_last_action_as_the_network_sees_it(space):
    _, _, rollout, (*_, after) = collected(space)
    last_action = np.concatenate([rollout.memory[2], after[2][None]])[1:][rollout.valid]
    if space is BOX:
        assert np.abs(rollout.action).max() > 2
        wanted = np.clip(rollout.action, -1, 1)
    elif space is MULTI:
        first, second = np.moveaxis(rollout.action, -1, 0)
        wanted = np.concatenate([np.eye(4)[first], np.eye(4)[second]], axis=-1)
        assert first.max() == 1
    else:
        wanted = np.eye(3)[rollout.action]
    np.testing.assert_array_equal(last_action, wanted[rollout.valid])


@ALL
def test_sequences_from_the_stored_memory_have_the_probabilities_and_values_of_the_rollout(space):
    """So before the first gradient step the ratio of the probabilities is 1 everywhere."""
    agent, state, rollout, env_state = collected(space)
    batch, _ = batch_of(agent, state, rollout, env_state[0])
    assert batch.value.shape == (4 * 24 // 8, 8)
    of_loss = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
    output, value, _ = agent.network.apply(state.params, *agent.inputs(of_loss))
    log_prob, _ = agent.actions.log_prob_and_entropy(output, of_loss.action)
    np.testing.assert_allclose(log_prob, of_loss.log_prob, atol=1e-5)
    np.testing.assert_allclose(value, of_loss.value, atol=1e-5)
    _, metrics = agent.loss(state.params, of_loss)
    assert abs(metrics["losses/approx_kl"]) < 1e-6
    assert metrics["losses/clipfrac"] == 0


@ALL
def test_a_batch_has_the_log_probabilities_with_which_the_actions_were_drawn(space):
    agent, state, rollout, env_state = collected(space)
    batch, _ = batch_of(agent, state, rollout, env_state[0])
    got = in_time(agent, batch.log_prob)
    for t in range(24):
        memory = tuple(x[t] for x in rollout.memory)
        output, _ = plain_step(agent, state, rollout.observation[t], memory)
        action = rollout.action[t]
        if space is BOX:
            mean, log_std = np.split(output, 2, axis=-1)
            wanted = scipy.stats.norm(mean, np.exp(log_std)).logpdf(action).sum(axis=-1)
        elif space is MULTI:
            logits = agent.actions.logits(output)
            parts = zip((logits[:, 0, :2], logits[:, 1]), action.T, strict=True)
            log_probs = [scipy.special.log_softmax(x, axis=-1)[np.arange(4), a] for x, a in parts]
            wanted = sum(log_probs)
        else:
            wanted = scipy.special.log_softmax(output, axis=-1)[np.arange(4), action]
        np.testing.assert_allclose(got[t], wanted, atol=1e-4)


@BOTH
def test_the_values_of_a_batch_are_those_of_each_step_by_its_own_memory(space):
    """Also of the steps that only reset, whose values truncated episodes bootstrap from."""
    agent, state, rollout, env_state = collected(space)
    batch, _ = batch_of(agent, state, rollout, env_state[0])
    wanted = plain_values(agent, state, rollout, env_state)
    np.testing.assert_allclose(in_time(agent, batch.value), wanted[:-1], atol=1e-5)


@BOTH
def test_advantages_are_what_a_plain_loop_gives(space):
    agent, state, rollout, env_state = collected(space)
    values = plain_values(agent, state, rollout, env_state)
    wanted = np.zeros((25, 4))
    for t in reversed(range(24)):
        for i in np.flatnonzero(rollout.valid[t]):
            bootstrap = 0 if rollout.terminated[t, i] else values[t + 1, i]
            delta = rollout.reward[t, i] + 0.9 * bootstrap - values[t, i]
            over = rollout.terminated[t, i] or rollout.truncated[t, i]
            wanted[t, i] = delta + (0 if over else 0.9 * 0.8 * wanted[t + 1, i])
    batch, metrics = batch_of(agent, state, rollout, env_state[0])
    np.testing.assert_allclose(in_time(agent, batch.advantage), wanted[:-1], atol=1e-4)
    valid = rollout.valid
    target = (wanted + values)[:-1][valid]
    explained = 1 - wanted[:-1][valid].var() / target.var()
    np.testing.assert_allclose(metrics["losses/explained_variance"], explained, rtol=1e-3)


def test_a_batch_has_the_steps_of_the_rollout_in_sequences():
    agent, state, rollout, env_state = collected(DISCRETE)
    batch, _ = batch_of(agent, state, rollout, env_state[0])
    normalized = (rollout.observation - 0.2) / 2
    np.testing.assert_allclose(in_time(agent, batch.observation), normalized, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(in_time(agent, batch.action), rollout.action)
    np.testing.assert_array_equal(in_time(agent, batch.valid), rollout.valid)
    for x, y in zip(batch.memory, rollout.memory, strict=True):
        np.testing.assert_array_equal(in_time(agent, x), y)


def test_steps_that_only_reset_change_nothing_but_the_target_of_a_truncated_episode():
    agent, state, rollout, env_state = collected(BOX)
    mask = rollout.valid
    free = ~mask
    free[1:] &= rollout.terminated[:-1]  # an observation after a truncation is needed
    free[0] = False
    assert 2 < free.sum() < (~mask).sum()

    def garbage(x, where):
        x = x.copy()
        x[where] = 7
        return x

    other = rollout._replace(
        observation=garbage(rollout.observation, free), action=garbage(rollout.action, ~mask)
    )
    train_step = jax.jit(agent.train_step)
    expected = train_step(state, rollout, KEY, 0, env_state[0])
    got = train_step(state, other, KEY, 0, env_state[0])
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_the_memory_of_an_agent_in_a_compiled_rollout_begins_anew():
    run = Run(env_id="cleanreplay.memory_tasks:phys2d/MemoryChain-v0", env_kwargs='{"length": 4}')
    trainer = make_trainer(recurrent_ppo_jax, Args(**SMALL), run)
    params = trainer.agent.policy_params(trainer.agent.init(KEY))
    envs = trainer.envs
    _, (steps, _) = jax.jit(envs.collect)(envs.reset(KEY, 4), params, KEY, 0)
    begins = np.concatenate([np.ones((1, 4), bool), ~steps.valid[:-1]])
    assert begins.sum() > 12
    for x in steps.memory:
        is_empty = (np.asarray(x).reshape(*begins.shape, -1) == 0).all(axis=-1)
        np.testing.assert_array_equal(is_empty, begins)


# ----------------------------------------------------------------------------------------- acting


def draws(agent, state, step=0, key=KEY):
    """Actions of 20,000 environments that all observe zeros, and the output of the network."""
    observation = np.zeros((20_000, 3), np.float32)
    params = agent.policy_params(state)
    actions, _ = agent.act(params, observation, agent.no_memory(20_000), key, step)
    output, _ = plain_step(agent, state, observation[:1], agent.no_memory(1))
    return np.asarray(actions), output[0]


def test_discrete_actions_are_drawn_from_the_policy_and_anew_at_each_step():
    agent, state = make()
    actions, logits = draws(agent, state)
    p = scipy.special.softmax(np.float64(logits))
    assert scipy.stats.chisquare(np.bincount(actions, minlength=3), 20_000 * p).pvalue > 1e-3
    other, _ = draws(agent, state, step=1)
    counts = np.bincount(actions * 3 + other, minlength=9)
    assert scipy.stats.chisquare(counts, 20_000 * np.outer(p, p).ravel()).pvalue > 1e-3
    modes, _ = draws(agent, state, key=None)
    np.testing.assert_array_equal(modes, np.argmax(logits))


def test_continuous_actions_are_drawn_from_the_policy_and_anew_at_each_step():
    agent, state = make(BOX, normalize_observations=False)
    actions, output = draws(agent, state)
    mean, log_std = np.split(output, 2)
    for x, *moments in zip(actions.T, mean, np.exp(log_std), strict=True):
        assert scipy.stats.kstest(x, scipy.stats.norm(*moments).cdf).pvalue > 1e-3
    other, _ = draws(agent, state, step=1)
    assert abs(np.corrcoef(actions[:, 0], other[:, 0])[0, 1]) < 0.03  # 4 standard deviations
    modes, _ = draws(agent, state, key=None)
    np.testing.assert_allclose(modes, np.tile(mean, (20_000, 1)), rtol=1e-5)


@BOTH
def test_the_policy_forgets_where_is_first_says_so_and_nowhere_else(space):
    agent, state = make(space, normalize_observations=False)
    large = jax.tree.map(lambda x: 5 * x, agent.policy_params(state))  # what is remembered matters
    policy, remembers, forgets = [protocol.policy(agent, large) for _ in range(3)]
    x = 3 * np.random.default_rng(0).normal(size=(3, 200, 3)).astype(np.float32)
    is_first = np.arange(200) % 3 == 0
    for each in (policy, remembers):
        for t in (0, 1):
            each(x[t])
    remembered, forgot = remembers(x[2]), forgets(x[2])
    assert (remembered != forgot)[is_first].mean() > 0.2
    assert (remembered != forgot)[~is_first].mean() > 0.2
    assert all(space.contains(action) for action in remembered)
    wanted = np.where(is_first, forgot.T, remembered.T).T
    np.testing.assert_array_equal(policy(x[2], is_first), wanted)


@pytest.mark.more
def test_a_loaded_policy_takes_the_actions_of_the_agent_in_training():
    """Through ends of episodes, if it is told where they begin."""
    args = Args(**SMALL | dict(total_timesteps=192, num_envs=2))
    state, _, folder = train(args, Run(env_id="Random-box-v0", eval_episodes=0))
    agent = make_agent(recurrent_ppo_jax, args, Run(env_id="Random-box-v0"))
    policy = load_policy(folder)
    rng = np.random.default_rng(0)
    is_first = rng.random((30, 2)) < 0.3
    memory = agent.no_memory(2)
    for t in range(30):
        x = rng.normal(size=(2, 3)).astype(np.float32)
        for part in memory:
            part[is_first[t]] = 0
        action, memory = agent.act(agent.policy_params(state), x, memory)
        memory = tuple(np.array(part) for part in memory)
        wanted = agent.to_env_action(np.asarray(action))
        np.testing.assert_allclose(policy(x, is_first[t]), wanted, atol=1e-6)


# ------------------------------------------------------------------------------------- its parts


def test_forget_gates_begin_open_from_half_to_as_far_as_the_flag_says():
    agent = RecurrentPPO(Args(hidden_size=5, max_forget_bias=3.0), OBSERVATIONS, DISCRETE)
    layers = agent.init(KEY).params["params"]["lstm"]
    gates = {name: layer.get("bias") for name, layer in layers.items()}
    np.testing.assert_allclose(gates["hf"], [0, 0.75, 1.5, 2.25, 3])
    for name in ("hi", "hg", "ho"):
        np.testing.assert_array_equal(gates[name], [0.0] * 5)


@pytest.mark.parametrize("last_action", [True, False])
def test_the_network_sees_the_last_action_if_the_flag_says_so(last_action):
    agent, state = make(last_action=last_action)
    observation = np.zeros((2, 3), np.float32)
    cell, hidden, action = agent.no_memory(2)
    action[1, 0] = 1
    output, _ = plain_step(agent, state, observation, (cell, hidden, action))
    assert (output[0] != output[1]).any() == last_action


PARTS = {
    ppo_jax: "masked_var update_rms normalize gae RunningMeanStd State",
    r2d2_jax: "keep_memory",
}
METHODS = {
    ppo_jax.PPO: "optimizer on_resume learned policy_params to_env_action normalize_rewards",
    r2d2_jax.R2D2: "no_memory",
    r2d2_jax.QNetwork: "step",
}


def test_what_it_has_of_the_other_scripts_is_the_same_text():
    """So it does what the tests of those scripts say."""
    for script, names in PARTS.items():
        for name in names.split():
            own = inspect.getsource(getattr(recurrent_ppo_jax, name))
            assert own == inspect.getsource(getattr(script, name)), name
    for owner, names in METHODS.items():
        own_class = RecurrentPPO if owner is not r2d2_jax.QNetwork else None
        for name in names.split():
            own = inspect.getsource(getattr(own_class or recurrent_ppo_jax.ActorCritic, name))
            assert own == inspect.getsource(getattr(owner, name)), name


@pytest.mark.parametrize(
    ("flags", "space", "message"),
    [
        ({}, gym.spaces.MultiBinary(2), r"takes Discrete or Mul.*, not MultiBinary.*ActionWrapper"),
        (dict(num_steps=20, sequence_length=8), DISCRETE, "sequence_length must divide num_steps"),
        (dict(num_minibatches=5), DISCRETE, r"num_envs \* num_steps / sequence_length"),
    ],
)
def test_what_the_algorithm_cannot_do_is_a_usage_error(flags, space, message):
    with pytest.raises(UsageError, match=message):
        RecurrentPPO(Args(**SMALL | flags), OBSERVATIONS, space)


# ---------------------------------------------------------------------------------- whole runs


def test_a_run_takes_every_sequence_in_each_epoch_and_is_repeatable():
    args = Args(**SMALL | dict(total_timesteps=288))
    state, returns, _ = train(args, Run(**COUNTER))
    assert tree_get(state.opt_state, "count") == 3 * 2 * 2  # gradient steps
    same = train(args, Run(**COUNTER, exp_name="same"))[:2]
    jax.tree.map(np.testing.assert_array_equal, same, (state, returns))


COMPILED = dict(env_id="cleanreplay.memory_tasks:phys2d/PendulumNoVelocity-v0", log_interval=96)


@pytest.mark.more
def test_several_agents_of_a_compiled_run_go_on_bit_for_bit(stop_at):
    args = Args(**SMALL | dict(total_timesteps=384))
    run = Run(**COMPILED, num_seeds=2, eval_episodes=2)
    whole, _, folder = train(args, replace(run, exp_name="whole"))
    _, _, half = train(args, replace(run, exp_name="half"), stop_at(192))
    resumed, _, _ = train(args, replace(run, exp_name="half", resume=str(half)))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    expected, got = read_events(folder)[0], read_events(half)[0]
    for tag in expected.keys() - {"charts/SPS"}:
        assert got[tag] == expected[tag], tag


@pytest.mark.more
def test_an_agent_of_a_group_is_the_one_trained_alone():
    args = Args(**SMALL | dict(total_timesteps=192))
    run = Run(**COMPILED, num_seeds=2, eval_episodes=0)
    group, *_ = train(args, run)
    alone, *_ = train(args, replace(run, num_seeds=1, seed=2))
    pairs = zip(*map(jax.tree.leaves, (group.params, alone.params)), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x[1], y[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_images_are_learned_from():
    flags = dict(num_envs=2, num_steps=16, sequence_length=16, num_minibatches=1)
    args = Args(total_timesteps=256, learning_rate=2e-3, gamma=0.5, **flags)
    run = Run(env_id="environments:ProbeImage-v0", eval_episodes=0)
    state, _, _ = train(args, run)
    assert "conv_2" in state.params["params"]
    agent = make_agent(recurrent_ppo_jax, args, run)
    images = np.stack([np.zeros((4, 36, 36), np.uint8), np.full((4, 36, 36), 255, np.uint8)])
    action, _ = agent.act(agent.policy_params(state), images, agent.no_memory(2))
    assert list(action) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sync", "auto"], ids=["ordinary", "compiled"])
def test_multi_discrete_actions_are_learned_and_its_policy_can_be_loaded(how):
    """The reward of two right answers is 2."""
    flags = dict(num_envs=16, num_steps=16, sequence_length=16, hidden_size=32, ent_coef=0.0)
    args = Args(total_timesteps=20_480, learning_rate=5e-3, **flags)
    run = Run(env_id="environments:Answers-v0", vectorization=how, log_interval=20_480)
    _, _, folder = train(args, run)
    assert read_events(folder)[0]["eval/episodic_return"] == [(20_480, 2.0)]
    first, second = np.divmod(np.arange(15), 5)
    observations = np.concatenate([np.eye(3)[first], np.eye(5)[second]], axis=1, dtype=np.float32)
    actions = load_policy(folder)(observations)
    np.testing.assert_array_equal(actions, np.transpose([first + 1, second - 2]))


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True], ids=["ordinary", "compiled"])
def test_a_chain_is_remembered_and_its_values_are_learned(is_compiled, optimised):
    """The reward is 1 for an answer after four steps, of which the first one tells it."""
    args = Args(
        total_timesteps=20_480,
        num_steps=32,
        sequence_length=32,
        gamma=0.5,
        hidden_size=16,
        learning_rate=5e-3,
        ent_coef=0.0,
        normalize_rewards=False,
    )
    task = "phys2d/MemoryChain-v0" if is_compiled else "MemoryChain-v0"
    env_id = f"cleanreplay.memory_tasks:{task}"
    run = Run(env_id=env_id, env_kwargs='{"length": 4}', log_interval=4_096, checkpoint_interval=0)
    state, _, folder = train(args, run)
    assert read_events(folder)[0]["eval/episodic_return"] == [(20_480, 1.0)]

    agent = make_agent(recurrent_ppo_jax, args, run)
    params = jax.tree.map(lambda x: x[0], state.params) if is_compiled else state.params
    state = state._replace(params=params, obs_rms=None)
    memory = agent.no_memory(2)
    for t in range(4):
        cue = [-1.0, 1.0] if t == 0 else [0.0, 0.0]
        observation = np.float32([[1 - t / 4, t == 3, x] for x in cue])
        _, value = plain_step(agent, state, observation, memory)
        np.testing.assert_allclose(value, [0.5 ** (3 - t)] * 2, atol=0.05)
        action, memory = agent.act((params, None), observation, memory)
    assert list(action) == [0, 1]


@pytest.mark.slow
def test_a_chain_of_length_10_is_learned(optimised):
    env_id = "cleanreplay.memory_tasks:MemoryChain-v0"
    run = Run(env_id=env_id, env_kwargs='{"length": 10}', checkpoint_interval=0)
    _, _, folder = train(Args(total_timesteps=30_720), run)
    assert read_events(folder)[0]["eval/episodic_return"] == [(30_720, 1.0)]
