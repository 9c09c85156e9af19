"""R2D2: its memory in acting, in windows and in the policy, and its loss against plain NumPy."""

import gymnasium as gym
import jax
import numpy as np
import pytest
from by_hand import box, keys_of_gradient_step, moves_of_target
from helpers import make_trainer, more

import dqn_jax
import r2d2_jax
from cleanreplay import load_policy, memory_tasks, protocol  # noqa: F401  (registers)
from r2d2_jax import R2D2, Args, Run, Step, rescale, unscale

KEY = jax.random.PRNGKey(0)
OBSERVATIONS = box(3)
SMALL = dict(hidden_size=5, burn_in=2, train_length=4, n_step=3, period=2, num_envs=2)


def make(num_actions=2, first_action=0, **flags):
    """The algorithm, its first State, and parameters of networks that differ from each other."""
    actions = gym.spaces.Discrete(num_actions, start=first_action)
    agent = R2D2(Args(**SMALL | flags), OBSERVATIONS, actions)
    return agent, agent.init(KEY), agent.init(jax.random.PRNGKey(1)).params


# -------------------------------------------------------------------------- the loss in plain NumPy


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


class PlainNetwork:
    """The network, of one environment, a step at a time."""

    def __init__(self, params, num_actions):
        self.params = jax.tree.map(np.float64, params["params"])
        self.num_actions = num_actions

    def dense(self, name, x):
        layer = self.params[name]
        return x @ layer["kernel"] + layer["bias"]

    def gate(self, name, x, hidden):
        cell = self.params["lstm"]
        recurrent = hidden @ cell[f"h{name}"]["kernel"] + cell[f"h{name}"]["bias"]
        return x @ cell[f"i{name}"]["kernel"] + recurrent

    def step(self, carry, observation, last_action):
        """The carry after a step, and Q(s, .) [num_actions]."""
        cell, hidden = carry
        one_hot = np.zeros(self.num_actions)
        if last_action > 0:
            one_hot[last_action - 1] = 1
        x = np.concatenate([np.maximum(self.dense("encoder_0", observation), 0), one_hot])
        forget = sigmoid(self.gate("f", x, hidden))
        new = sigmoid(self.gate("i", x, hidden)) * np.tanh(self.gate("g", x, hidden))
        output = sigmoid(self.gate("o", x, hidden))
        cell = forget * cell + new
        hidden = output * np.tanh(cell)
        value = self.dense("value", np.maximum(self.dense("value_0", hidden), 0))
        advantage = self.dense("advantage", np.maximum(self.dense("advantage_0", hidden), 0))
        return (cell, hidden), value + advantage - advantage.mean()


def plain_values(network, steps):
    """Q(s, .) of each step of a window, which begins with the stored carry."""
    cell, hidden, last_action = steps.memory
    carry = (np.float64(cell[0]), np.float64(hidden[0]))
    values = []
    for t in range(len(steps.reward)):
        carry, q = network.step(carry, steps.observation[t], last_action[t])
        values.append(q)
        if not steps.valid[t]:
            carry = (np.zeros_like(carry[0]), np.zeros_like(carry[1]))
    return values


def plain_errors(args, online, target, steps):
    """The TD errors of the steps that are learned from, a step at a time; None where one resets."""
    q = plain_values(online, steps)
    next_q = plain_values(target, steps)
    h, inverse = (rescale, unscale) if args.rescale_values else (float, float)
    errors = []
    for t in range(args.burn_in, args.burn_in + args.train_length):
        if not steps.valid[t]:
            errors.append(None)
            continue
        total, discount = 0.0, 1.0
        for i in range(t, t + args.n_step):
            total += discount * steps.reward[i]
            discount *= args.gamma
            if steps.terminated[i]:
                discount = 0.0
            if steps.terminated[i] or steps.truncated[i]:
                break
        best = np.argmax(q[i + 1] if args.double_q else next_q[i + 1])
        goal = h(total + discount * inverse(next_q[i + 1][best]))
        errors.append(float(goal) - q[t][steps.action[t]])
    return errors


def random_windows(rng, agent, count, rows=None):
    """Windows [W, count] of random steps, in which episodes end in both ways; or so many rows."""
    shape = (rows or agent.replay.window, count)
    ends = rng.random(shape) < 0.25
    valid = np.ones(shape, bool)
    valid[1:] = ~ends[:-1]
    ends &= valid
    valid[1:] = ~ends[:-1]
    by_itself = rng.random(shape) < 0.5
    size = agent.args.hidden_size
    carry = [rng.normal(size=(*shape, size)).astype(np.float32) for _ in range(2)]
    return Step(
        observation=rng.normal(size=(*shape, 3)).astype(np.float32),
        action=rng.integers(0, agent.num_actions, shape),
        reward=np.where(valid, rng.normal(size=shape), 0).astype(np.float32),
        terminated=ends & by_itself,
        truncated=ends & ~by_itself,
        valid=valid,
        memory=(*carry, rng.integers(0, agent.num_actions + 1, shape)),
    )


@pytest.mark.parametrize(
    "flags",
    [
        {},
        dict(double_q=False, rescale_values=True),
        more(dict(burn_in=0, n_step=1, num_actions=3)),
        more(dict(rescale_values=True, gamma=0.9)),
    ],
    ids=str,
)
def test_the_loss_is_that_of_a_step_by_step_computation(flags):
    agent, state, other = make(**flags)
    windows = random_windows(np.random.default_rng(0), agent, count=40)
    learned = slice(agent.args.burn_in, agent.args.burn_in + agent.args.train_length)
    assert min(getattr(windows, name)[learned].sum() for name in ("terminated", "truncated")) > 5
    weights = np.linspace(0.2, 1, 40).astype(np.float32)
    loss, (_, td_error) = jax.jit(agent.loss)(state.params, other, windows, weights)

    online, target = (PlainNetwork(params, agent.num_actions) for params in (state.params, other))
    total = count = 0
    for i in range(40):
        window = jax.tree.map(lambda x, i=i: x[:, i], windows)
        for t, error in enumerate(plain_errors(agent.args, online, target, window)):
            if error is None:
                assert td_error[t, i] == 0
                continue
            np.testing.assert_allclose(td_error[t, i], error, atol=2e-5)
            total += weights[i] * error**2
            count += 1
    np.testing.assert_allclose(loss, total / count, rtol=1e-4)


def test_the_burn_in_only_brings_the_memory_up_to_date():
    """The gradient is that of the steps after it, which begin with a memory that is given."""
    agent, state, _ = make()
    windows = random_windows(np.random.default_rng(0), agent, count=4)
    carry, *inputs = agent.inputs(windows)
    _, carry = agent.network.apply(state.params, carry, *[x[:2] for x in inputs])
    after = [x[2:] for x in inputs]
    wanted = jax.grad(lambda params: agent.network.apply(params, carry, *after)[0].sum())
    got = jax.grad(lambda params: agent.unroll(params, windows).sum())
    pairs = zip(*map(jax.tree.leaves, (got(state.params), wanted(state.params))), strict=True)
    for x, y in pairs:
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def h_of_the_paper(x):
    """In float64."""
    x = np.float64(x)
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + 1e-3 * x


VALUES = np.float32(np.geomspace(1e-8, 1e6, 1_001))
VALUES = np.concatenate([-VALUES, [0], VALUES])


def test_rescaling_is_the_function_of_the_paper_from_the_smallest_values_to_the_largest():
    np.testing.assert_allclose(rescale(VALUES), h_of_the_paper(VALUES), rtol=1e-5)


def test_unscaling_is_the_inverse_from_the_smallest_values_to_the_largest():
    np.testing.assert_allclose(h_of_the_paper(unscale(VALUES)), VALUES, rtol=1e-5)
    np.testing.assert_allclose(unscale(rescale(VALUES)), VALUES, rtol=1e-5)
    np.testing.assert_allclose(rescale(unscale(VALUES)), VALUES, rtol=1e-5)


def test_priorities_mix_the_largest_and_the_mean_error():
    agent, *_ = make(priority_max_fraction=0.75)
    td_error = np.float32([[1, 0], [-3, 4], [0, 0], [2, 0]])
    valid = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], bool)
    np.testing.assert_allclose(
        agent.priorities(td_error, valid), [0.75 * 3 + 0.25 * 2, 0.75 * 4 + 0.25 * 4], rtol=1e-6
    )


# ------------------------------------------------------------------------------- the gradient steps


def filled(rows=40, **flags):
    """The algorithm, and a State whose replay has random steps."""
    agent, state, _ = make(batch_size=4, buffer_size=200, **flags)
    steps = random_windows(np.random.default_rng(0), agent, agent.args.num_envs, rows)
    return agent, state._replace(replay=agent.replay.add_batch(state.replay, steps))


def test_the_target_is_copied_at_the_multiples_of_its_period():
    agent, state = filled(target_network_frequency=50, train_frequency=16)
    moves = moves_of_target(agent, state, last_update=7)
    assert list(moves) == [4, 7]  # which reach 50 and 100 steps
    for _, params, target in moves.values():
        np.testing.assert_array_equal(target, params)


@pytest.mark.more
def test_what_is_drawn_in_to_window_does_not_depend_on_the_batch():
    """Its key is another one than that of the draw from the replay."""
    agent, state = filled()
    of_draw, of_batch = keys_of_gradient_step(agent, state, KEY, "to_window")
    assert (of_draw != of_batch).any()


def test_metrics_are_infinite_without_a_gradient_step_and_finite_with_one():
    agent, state = filled(rows=80, train_frequency=8, learning_starts=48)
    rollout = random_windows(np.random.default_rng(1), agent, 2, rows=4)
    train_step = jax.jit(agent.train_step)
    for step, learns in ((40, False), (48, True)):  # the first one ends where learning starts
        _, _, metrics = train_step(state, rollout, KEY, step)
        losses = {tag: x for tag, x in metrics.items() if tag.startswith("losses/")}
        assert losses.keys() == {f"losses/{x}" for x in ("td_loss", "q_values", "priority_max")}
        assert metrics["charts/gradient_steps"] == learns
        if learns:
            assert np.isfinite(list(losses.values())).all()
        else:
            np.testing.assert_array_equal(list(losses.values()), np.inf)


# -------------------------------------------------------------------------------------- the memory


def rollouts(agent, params, run, count):
    """Steps [S, N] of rollouts one after the other, and the key that they were drawn with."""
    envs = r2d2_jax.make_envs(agent.args, run, agent.args.num_envs)
    env_state = (*r2d2_jax.reset(envs, KEY, 0), agent.no_memory(agent.args.num_envs))
    collected = []
    for i in range(count):
        step = i * agent.steps_per_iteration
        rollout, env_state = r2d2_jax.collect_rollout(agent, envs, params, env_state, KEY, step)
        collected.append(rollout)
    envs.close()
    return collected


def memories_of(agent, params, steps):
    """The memory before each step, from one that is cleared by hand where an episode begins."""
    n = agent.args.num_envs
    memory = agent.no_memory(n)
    rows = []
    for t in range(len(steps.reward)):
        memory = [np.array(x) for x in memory]
        for i in range(n):
            if t > 0 and not steps.valid[t - 1, i]:
                for x in memory:
                    x[i] = 0
        rows.append(memory)
        _, memory = agent.act(params, steps.observation[t], tuple(memory), KEY, t * n)
    return [np.stack(x) for x in zip(*rows, strict=True)]


CHAIN = Run(env_id="cleanreplay.memory_tasks:MemoryChain-v0", env_kwargs='{"length": 5}')


def test_the_memory_in_a_drawn_window_is_the_one_that_the_actor_had():
    agent, state, _ = make(train_frequency=12, start_e=0.5, end_e=0.5)
    collected = rollouts(agent, state.params, CHAIN, 8)
    steps = jax.tree.map(lambda *x: np.concatenate(x), *collected)
    assert (~steps.valid).sum() > 10
    replay = agent.replay.init(agent.example_step)
    for rollout in collected:
        replay = agent.replay.add_batch(replay, rollout)
    wanted = memories_of(agent, state.params, steps)

    sample = agent.replay.sample(replay, KEY, 64)
    row, env = np.divmod(np.asarray(sample.indices), agent.args.num_envs)
    assert set(row % agent.args.period) == {0}
    for got, expected in zip(sample.experience.memory, wanted, strict=True):
        for b in range(64):
            np.testing.assert_allclose(
                got[b], expected[row[b] : row[b] + agent.replay.window, env[b]], atol=1e-6
            )


def test_an_unrolled_window_has_the_values_that_the_actor_had():
    """Across ends of episodes, because both begin them with an empty memory."""
    agent, state, _ = make(train_frequency=24, burn_in=0, train_length=20)
    collected = rollouts(agent, state.params, CHAIN, 2)
    steps = jax.tree.map(lambda *x: np.concatenate(x), *collected)
    q = agent.unroll(state.params, steps)
    network = jax.jit(agent.network.apply)
    for t in range(len(steps.reward)):
        row = jax.tree.map(lambda x, t=t: x[t : t + 1], steps)
        wanted, _ = network(state.params, *agent.inputs(row))
        np.testing.assert_allclose(q[t], wanted[0], atol=1e-5)


def test_the_memory_of_an_agent_in_a_compiled_rollout_begins_anew():
    run = Run(env_id="cleanreplay.memory_tasks:phys2d/MemoryChain-v0", env_kwargs='{"length": 4}')
    trainer = make_trainer(r2d2_jax, Args(**SMALL | dict(train_frequency=40)), run)
    params = trainer.agent.init(KEY).params
    envs = trainer.envs
    _, (steps, _) = jax.jit(envs.collect)(envs.reset(KEY, 2), params, KEY, 0)
    begins = np.concatenate([np.ones((1, 2), bool), ~steps.valid[:-1]])
    assert begins.sum() > 6
    for x in steps.memory:
        is_empty = (np.asarray(x).reshape(*begins.shape, -1) == 0).all(axis=-1)
        np.testing.assert_array_equal(is_empty, begins)


def policies_and_observations(count):
    """Policies of the same agent, whose memory matters, and observations [3, 200, 3]."""
    agent, state, _ = make(num_actions=4, first_action=5, hidden_size=16)
    x = np.random.default_rng(0).normal(size=(3, 200, 3)).astype(np.float32)
    return [protocol.policy(agent, state.params) for _ in range(count)], x


@pytest.mark.parametrize("dtype", [bool, int])
def test_the_policy_forgets_where_is_first_says_so_and_nowhere_else(dtype):
    (policy, remembers, forgets), x = policies_and_observations(3)
    is_first = np.arange(200) % 3 == 0
    for each in (policy, remembers):
        for t in (0, 1):
            each(x[t])
    remembered, forgot = remembers(x[2]), forgets(x[2])
    assert (remembered != forgot)[is_first].mean() > 0.2
    assert (remembered != forgot)[~is_first].mean() > 0.2
    assert set(remembered) <= {5, 6, 7, 8}
    wanted = np.where(is_first, forgot, remembered)
    np.testing.assert_array_equal(policy(x[2], is_first.astype(dtype).tolist()), wanted)


def test_the_policy_recovers_from_what_is_not_finite_once_the_next_episode_begins():
    """The memory of the other environments was not touched."""
    (policy, finite), x = policies_and_observations(2)
    is_first = np.arange(200) % 2 == 0
    finite(x[0])
    policy(np.where(is_first[:, None], np.float32([np.nan, np.inf, -np.inf]), x[0]))
    for t, begins in ((1, is_first), (2, False)):
        np.testing.assert_array_equal(policy(x[t], begins), finite(x[t], begins))


def test_the_policy_explores_only_with_a_key_as_act_does():
    agent, state, _ = make(start_e=0.5, end_e=0.5)
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    for key, step in ((None, 0), (KEY, 0), (KEY, 7)):
        wanted, _ = agent.act(state.params, x, agent.no_memory(200), key, step)
        got = protocol.policy(agent, state.params, key)(x, step=step)
        np.testing.assert_array_equal(got, wanted)
    assert (protocol.policy(agent, state.params)(x) != wanted).mean() > 0.1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run that learned to remember the first observation for five steps."""
    folder = tmp_path_factory.mktemp("r2d2")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        args = Args(
            total_timesteps=8_000, learning_starts=1_000, burn_in=0, train_length=8, hidden_size=16
        )
        _, _, folder = r2d2_jax.train(args, CHAIN)
    return folder


def mean_return(policy):
    """Of 60 episodes; the policy is told where they begin."""
    env = gym.make("MemoryChain-v0", length=5)
    total = 0
    for seed in range(60):
        observation, _ = env.reset(seed=seed)
        is_first = True
        is_over = False
        while not is_over:
            (action,) = policy(observation[None], [is_first])
            observation, reward, is_over, _, _ = env.step(action)
            total += reward
            is_first = False
    return total / 60


@pytest.mark.slow
def test_it_learns_to_remember_and_a_loaded_policy_does(trained):
    assert mean_return(load_policy(trained)) == 1


@pytest.mark.more
def test_a_loaded_policy_forgets_where_an_episode_begins(trained):
    """Told so at every step, it cannot know the first observation: it is right half of the time."""
    policy = load_policy(trained)
    assert abs(mean_return(lambda observation, _: policy(observation, [True]))) < 0.3


@pytest.mark.more
def test_a_loaded_policy_forgets_all_if_the_number_of_environments_changes(trained):
    policy = load_policy(trained)
    new = load_policy(trained)
    x = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
    policy(x[:3])
    np.testing.assert_array_equal(policy(x), new(x))


# ------------------------------------------------------------------------------------------- flags


def test_forget_gates_begin_as_open_as_the_flag_says():
    agent, state, _ = make(forget_bias=3.0)
    gates = {name: layer.get("bias") for name, layer in state.params["params"]["lstm"].items()}
    np.testing.assert_array_equal(gates["hf"], [3.0] * agent.args.hidden_size)
    for name in ("hi", "hg", "ho"):
        np.testing.assert_array_equal(gates[name], [0.0] * agent.args.hidden_size)


@pytest.mark.parametrize(("learning_starts", "least"), [(63, 64), (100, None)])
def test_learning_starts_once_the_replay_holds_a_window_of_each_environment(learning_starts, least):
    flags = dict(num_envs=4, burn_in=2, train_length=8, n_step=1, period=4)
    args = Args(learning_starts=learning_starts, **flags)
    if least is None:
        R2D2(args, OBSERVATIONS, gym.spaces.Discrete(2))
        return
    with pytest.raises(r2d2_jax.UsageError, match=f"learning_starts must be from {least} to"):
        R2D2(args, OBSERVATIONS, gym.spaces.Discrete(2))


def test_other_actions_are_a_usage_error_that_names_a_script_which_takes_them():
    space = gym.spaces.MultiDiscrete([2, 3])
    wanted = r"R2D2 takes Discrete actions, not MultiDiscrete.*: try recurrent_ppo_jax\.py"
    with pytest.raises(r2d2_jax.UsageError, match=wanted):
        R2D2(Args(), OBSERVATIONS, space)


@pytest.mark.slow
def test_an_agent_without_memory_stays_at_chance():
    args = dqn_jax.Args(total_timesteps=20_000, num_envs=8, learning_starts=1_000)
    run = dqn_jax.Run(env_id=CHAIN.env_id, env_kwargs=CHAIN.env_kwargs)
    _, returns, _ = dqn_jax.train(args, run)
    assert abs(returns[0]) < 0.3
