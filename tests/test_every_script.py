"""What all scripts do alike, asked of the small agents that small_agents.py makes once."""

import tempfile
from contextlib import closing
from dataclasses import replace
from functools import cache

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import box
from helpers import make_agent, read_events
from small_agents import (
    BOX,
    DISCRETE,
    KEY,
    MULTI,
    PPO,
    SCRIPTS,
    WITH_EPSILON,
    WITH_REPLAY,
    act,
    actor,
    iterations,
    learner,
    make,
    observations,
    random_steps,
    train_step,
    vector,
)

from cleanreplay import protocol

OF_PPO = [(name, kind) for name in PPO for kind in ("discrete", "multi", "box")]


@pytest.mark.parametrize(
    ("name", "kind"), [*[(name, "discrete") for name in WITH_EPSILON], ("sac", "box"), *OF_PPO]
)
def test_a_policy_explores_only_with_a_key(name, kind):
    agent, params = actor(name, kind)
    x = observations(50)

    greedy = protocol.policy(agent, params)(x, step=20)
    explored = protocol.policy(agent, params, KEY)(x, step=20)

    np.testing.assert_array_equal(greedy, act(agent, params, x))
    np.testing.assert_array_equal(explored, act(agent, params, x, KEY, 20))
    assert np.mean(explored != greedy) > 0.1


@pytest.mark.parametrize(("name", "kind"), [("r2d2", "discrete"), *OF_PPO[3::2]])
def test_a_policy_forgets_where_is_first_says_so(name, kind):
    """Even NaN, and nothing elsewhere."""
    agent, params = actor(name, kind)
    policy, remembers, forgets = [protocol.policy(agent, params) for _ in range(3)]
    x = observations(3, 200)
    is_first = np.arange(200) % 3 == 0
    for t in (0, 1):
        remembers(x[t])
        policy(np.where(is_first[:, None] & (t == 1), np.float32(np.nan), x[t]))
    remembered, forgot = remembers(x[2]), forgets(x[2])

    got = policy(x[2], is_first.astype(int).tolist())

    assert (remembered != forgot)[is_first].mean() > 0.1
    assert (remembered != forgot)[~is_first].mean() > 0.1
    np.testing.assert_array_equal(got, np.where(is_first, forgot.T, remembered.T).T)


def small_box(dtype):
    """Bounds that the dtype does not have exactly."""
    return gym.spaces.Box(dtype([0.1, -0.3]), dtype([0.7, 6e4]), dtype=dtype)


HALF = gym.spaces.Box(np.float32([0.1, -np.inf, -np.inf]), np.float32([np.inf, 0.1, np.inf]))
ENDS_AND_MIDDLE = ([[-1, -1], [0, 0], [1, 1]], [[0.1, -0.3], [0.4, 29_999.85], [0.7, 6e4]])
STARTS = (gym.spaces.Discrete(3, start=-1), [0, 2], [-1, 1])
IN_BOXES = [(small_box(dtype), *ENDS_AND_MIDDLE) for dtype in (np.float16, np.float64)]
OUTSIDE = [
    (MULTI, [[0, 0], [2, 4]], [[1, -2], [3, 2]]),
    (BOX, [[-9, -1.5], [1.5, 9]], [[-1, 0], [1, 3]]),
    # A missing bound is taken to be 2 away from the other one.
    (HALF, [[-3, 3, 3], [1, -1, -1]], [[0.1, 0.1, 3], [2.1, -1.9, -1]]),
]
TO_ENV = [(name, *STARTS) for name in [*WITH_EPSILON, *PPO]]
TO_ENV += [(name, *row) for name in ["sac", *PPO] for row in IN_BOXES]
TO_ENV += [(name, *row) for name in PPO for row in OUTSIDE]


@pytest.mark.parametrize(("name", "space", "actions", "wanted"), TO_ENV)
def test_actions_are_those_of_the_space(name, space, actions, wanted):
    """In its dtype, though JAX has no float64."""
    agent = make(name, space)
    actions = np.array(actions, agent.example_step.action.dtype)
    got, compiled = agent.to_env_action(actions), jax.jit(agent.to_env_action)(actions)

    close = dict(rtol=1e-3 if space.dtype == np.float16 else 1e-6, atol=1e-6)
    np.testing.assert_allclose(got, wanted, **close)
    np.testing.assert_allclose(compiled, wanted, **close)
    if isinstance(space, gym.spaces.Box):
        assert got.dtype == space.dtype
        assert all(space.contains(action) for action in got)
        assert compiled.dtype == min(space.dtype, np.dtype(np.float32))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_iteration_that_learns_returns_its_new_policy(name):
    agent, _, _ = learner(name)
    for step, (before, state, policy, metrics) in iterations(name).items():
        learns = step >= 16 or name in PPO

        assert (vector(before[0]) != vector(state[0])).any() == learns
        np.testing.assert_array_equal(vector(policy), vector(agent.policy_params(state)))
        assert np.isfinite(list(metrics.values())).all() == learns


RATE = dict(learning_rate=0.1, adam_epsilon=0.01)
NORM = dict(max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("name", "optimizer", "flags", "epsilon", "norm"),
    [
        ("dqn", "optimizer", RATE, 0.01, np.inf),
        ("per_dqn", "optimizer", RATE, 0.01, np.inf),
        ("r2d2", "optimizer", RATE | NORM, 0.01, 0.5),
        ("ppo", "optimizer", NORM, 1e-5, 0.5),
        ("recurrent_ppo", "optimizer", NORM, 1e-5, 0.5),
        ("sac", "critic_optimizer", dict(q_lr=0.1), 1e-8, np.inf),
        ("sac", "alpha_optimizer", dict(q_lr=0.1), 1e-8, np.inf),
        ("sac", "actor_optimizer", dict(policy_lr=0.1), 1e-8, np.inf),
    ],
)
def test_small_gradients_make_small_steps(name, optimizer, flags, epsilon, norm):
    """Kingma and Ba 2015, algorithm 1: the first step is learning rate * g / (abs(g) + epsilon)."""
    optimizer = getattr(make(name, **flags), optimizer)
    optimizer = optimizer(0.1) if name in PPO else optimizer
    gradient = {"kernel": jnp.array([[1e-7], [-0.01]]), "bias": jnp.array([1.0])}
    step, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)

    for layer, g in gradient.items():
        clipped = g * min(1, norm / np.linalg.norm(vector(gradient)))
        wanted = -0.1 * clipped / (abs(clipped) + epsilon)
        np.testing.assert_allclose(step[layer], wanted, rtol=1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_optimizers_know_the_parameters(name):
    """As those with weight decay must. Here it takes away all of them."""
    agent = make(name)
    decay = optax.GradientTransformation(
        lambda params: (),
        lambda gradient, state, params=None: (jax.tree.map(jnp.negative, params), state),
    )
    agent.critic_optimizer = agent.actor_optimizer = agent.alpha_optimizer = decay
    agent.optimizer = (lambda rate: decay) if name in PPO else decay

    @jax.jit
    def learned(rollout):
        state = agent.init(KEY)
        if name == "sac":
            state = state._replace(policy=state.policy._replace(log_alpha=jnp.float32(2)))
        # In SAC this is gradient step 4, which is one of the policy.
        state, *_ = train_step(agent, state, rollout, KEY, 24, rollout.observation[0])
        return state[0], (state.policy[0], state.policy.log_alpha) if name == "sac" else ()

    assert not vector(learned(random_steps(agent))).any()


@pytest.mark.parametrize(
    ("anneal_lr", "wanted"), [(True, [2e-3, 1.5e-3, 1e-3, 0, 0]), (False, [2e-3] * 5)]
)
@pytest.mark.parametrize("name", PPO)
def test_the_learning_rate_goes_to_0_or_stays(name, anneal_lr, wanted):
    agent = make(name, anneal_lr=anneal_lr, learning_rate=2e-3, total_timesteps=3_000)
    agent.optimize = lambda state, batch, key, rate: (state, {"rate": rate})
    rollout = random_steps(agent)
    following = rollout.observation[0]

    @jax.jit
    def rates(step):
        _, _, metrics = agent.train_step(agent.init(KEY), rollout, KEY, step, following)
        return metrics["rate"], metrics["charts/learning_rate"]

    for step, rate in zip((0, 750, 1_500, 3_000, 3_512), wanted, strict=True):
        np.testing.assert_allclose(rates(step), rate, rtol=1e-6, atol=1e-9)


CONVOLUTIONS = "conv_0 conv_1 conv_2 conv_out"
Q, MLP = "q_0 q_1 q", "actor_0 actor_1 actor critic_0 critic_1 critic"
DUELING = "value_0 value advantage_0 advantage"
HEADS = "actor_0 actor critic_0 critic"
ACTOR = "actor_0 actor_1 mean log_std"
# The layers for 2 x 3 numbers, those for images of 4 x 36 x 36, and how many parameters they have.
LAYERS = {
    "dqn": (Q, 11_344, f"{CONVOLUTIONS} q", 113_316),
    "per_dqn": (Q, 11_344, f"{CONVOLUTIONS} q", 113_316),
    "r2d2": (f"encoder_0 lstm {DUELING}", 43_141, f"{CONVOLUTIONS} lstm {DUELING}", 268_645),
    "sac": (ACTOR, 68_612, f"{CONVOLUTIONS} {ACTOR}", 309_412),
    "ppo": (MLP, 9_541, f"{CONVOLUTIONS} actor critic", 113_829),
    "recurrent_ppo": (f"encoder_0 lstm {HEADS}", 43_141, f"{CONVOLUTIONS} lstm {HEADS}", 268_645),
}


@pytest.mark.parametrize("name", LAYERS)
def test_networks_have_layers_for_numbers_and_for_images(name):
    module = SCRIPTS[name][0]
    images = gym.spaces.Box(0, 255, (4, 36, 36), np.uint8)
    found = []
    for space in (box(2, 3), images):
        agent = module.Agent(module.Args(), space, BOX if name == "sac" else DISCRETE)
        state = jax.eval_shape(agent.init, KEY)
        params = state.policy.actor if name == "sac" else state.params
        found.append(set(params["params"]))
        found.append(sum(x.size for x in jax.tree.leaves(params)))

    assert found == [set(x.split()) if isinstance(x, str) else x for x in LAYERS[name]]


@cache
def run_of(name, seed=1):
    """The state, the returns and the charts of a short run without the package."""
    module = SCRIPTS[name][0]
    agent, args, run = learner(name)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.chdir(folder)
        patch.setattr(module, "cleanreplay", None)
        patch.setattr(module, "Agent", lambda *flags_and_spaces: agent)
        state, returns, folder = module.train(args, replace(run, seed=seed))
        scalars, _ = read_events(folder)
    return state, returns, scalars


def plain_run(name, seed):
    """The state after the same in a plain loop. With a replay it collects before it has learned."""
    module = SCRIPTS[name][0]
    agent, args, run = learner(name)
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(seed), 3)
    state = agent.init(init_key)
    acting = [agent.policy_params(state)] * 2
    with closing(module.make_envs(args, run, 2)) as envs:
        env_state = module.reset(envs, init_key, 0)
        if hasattr(agent, "no_memory"):
            env_state = (*env_state, agent.no_memory(2))
        for step in range(0, 64, 8):
            params = acting[-2 if name in WITH_REPLAY else -1]
            inputs = (params, env_state, act_key, step)
            rollout, env_state = module.collect_rollout(agent, envs, *inputs)
            state, params, _ = train_step(agent, state, rollout, learn_key, step, env_state[0])
            acting.append(params)
    return state


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_learns_what_a_plain_loop_does(name):
    state, _, _ = run_of(name)
    other, _, _ = run_of(name, seed=2)

    np.testing.assert_allclose(vector(state), vector(plain_run(name, seed=1)), 1e-3, 1e-4)
    assert (vector(state[0]) != vector(other[0])).any()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_run_has_a_chart_of_each_metric(name):
    """Of those that are finite. Each environment had returns 3, 6, 10, 15, 3, 6 and 10."""
    _, returns, scalars = run_of(name)
    *_, metrics = iterations(name)[16]
    of_episodes = {"charts/SPS", "charts/episodic_return", "charts/episodic_length"}

    assert scalars.keys() == of_episodes | metrics.keys()
    for tag, points in scalars.items():
        starts_late = name in WITH_REPLAY and (tag.startswith("losses/") or "beta" in tag)
        assert starts_late == ({step for step, _ in points}.isdisjoint({8, 16})), tag
        assert points[-1][0] == 64
    assert returns.tolist() == [pytest.approx(53 / 7)]


class Probes(environments.Probe):
    """Episodes of four probes at random, which the observation names. The actions are 1 and 2."""

    kinds = ("observation", "discount", "truncation", "both")
    action_space = gym.spaces.Discrete(2, start=1)

    def __init__(self):
        super().__init__("both")
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (5,), np.float32)

    def _observe(self):
        return np.append(np.array(self.kinds) == self.kind, self.value).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        gym.Env.reset(self, seed=seed)
        self.kind = self.kinds[self.np_random.integers(4)]
        return super().reset()

    def step(self, action):
        return super().step(action - 1)


gym.register("Probes-v0", Probes)
FIRST = np.float32(
    [
        [1, 0, 0, 0, -1],
        [1, 0, 0, 0, 1],
        [0, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, -1],
        [0, 0, 0, 1, 1],
    ]
)
OFF_POLICY = dict(
    num_envs=8, gamma=0.5, learning_starts=400, buffer_size=2_000, batch_size=64, train_frequency=4
)
OF_DQN = OFF_POLICY | dict(target_network_frequency=40, learning_rate=1e-2, start_e=1.0, end_e=1.0)
ON_POLICY = dict(gamma=0.5, num_steps=16, num_envs=16, learning_rate=6e-3, ent_coef=0.0)
LEARNING = {
    "dqn": OF_DQN | dict(total_timesteps=6_000),
    "per_dqn": OF_DQN | dict(total_timesteps=8_000, n_step=3, tau=0.5),
    "r2d2": OF_DQN
    | dict(total_timesteps=8_000, burn_in=0, train_length=4, period=2, hidden_size=16),
    "ppo": ON_POLICY | dict(total_timesteps=20_480),
    "recurrent_ppo": ON_POLICY
    | dict(total_timesteps=20_480, sequence_length=16, hidden_size=32, normalize_rewards=False),
}


def values_of(name, agent, state):
    """V(s) of first observations of episodes."""
    memory = agent.no_memory(len(FIRST)) if hasattr(agent, "no_memory") else ()
    if memory:
        *carry, last_action = memory
        inputs = (tuple(carry), FIRST[None], last_action[None], np.ones((1, len(FIRST)), bool))
        outputs = agent.network.apply(state.params, *inputs)
        return outputs[0][0].max(axis=-1) if name == "r2d2" else outputs[1][0]
    outputs = agent.network.apply(state.params, FIRST)
    return outputs[1] if name == "ppo" else outputs.max(axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_probe_values_are_learned(name, optimised):
    """A truncation is bootstrapped over: reward 1 a step is worth 2."""
    module = SCRIPTS[name][0]
    args = module.Args(**LEARNING[name])
    run = module.Run(env_id="Probes-v0", eval_episodes=0, checkpoint_interval=0)
    state, _, _ = module.train(args, run)
    agent = make_agent(module, args, run)
    policy = protocol.policy(agent, agent.policy_params(state))

    np.testing.assert_allclose(values_of(name, agent, state), [-1, 1, 0.5, 2, 1, 1], atol=0.1)
    assert policy(FIRST)[4:].tolist() == [1, 2]
