"""What all scripts have in common, tested with the small agents of small_agents.py."""

import re
import shlex
import signal
from contextlib import closing

import environments
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from by_hand import box
from helpers import ROOT, read_events, start_python
from numpy.testing import assert_allclose, assert_array_equal
from small_agents import (
    BOX,
    DISCRETE,
    KEY,
    MULTI,
    ON_POLICY,
    SCRIPTS,
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

import ppo_jax
from cleanreplay import protocol

WITH_MEMORY = [("r2d2", "discrete"), ("recurrent_ppo", "multi")]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("dqn", "discrete"), ("sac", "box"), ("iql", "box"), ("ppo", "box"), *WITH_MEMORY],
)
def test_a_policy_explores_only_with_a_key(name, kind):
    agent, params = actor(name, kind)
    x = observations(50)

    greedy = protocol.policy(agent, params)(x, step=20)
    explored = protocol.policy(agent, params, KEY)(x, step=20)

    assert_array_equal(greedy, act(agent, params, x))
    assert_array_equal(explored, act(agent, params, x, KEY, 20))
    assert np.mean(explored != greedy) > 0.1


@pytest.mark.parametrize(("name", "kind"), WITH_MEMORY)
def test_a_policy_resets_its_recurrent_state_where_is_first_is_true(name, kind):
    """It resets even NaN, only there, and everything if the number of environments changes."""
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
    assert_array_equal(got, np.where(is_first, forgot.T, remembered.T).T)
    assert_array_equal(policy(x[2, :50]), forgot[:50])


def small_box(dtype):
    """Makes a Box with bounds that the dtype cannot represent exactly."""
    return gym.spaces.Box(dtype([0.1, -0.3]), dtype([0.7, 6e4]), dtype=dtype)


HALF = gym.spaces.Box(np.float32([0.1, -np.inf, -np.inf]), np.float32([np.inf, 0.1, np.inf]))
HUGE = gym.spaces.Box(np.float32([-3e38, 5]), np.float32([3e38, 5]))
MATRIX = gym.spaces.Box(np.float32([[300], [-1]]), np.float32([[500], [9]]))
ENDS = [[-1, -1], [0, 0], [1, 1]]
TO_ENV = [
    ("dqn", gym.spaces.Discrete(3, start=-1), [0, 2], [-1, 1]),
    ("ppo", gym.spaces.Discrete(3, start=-1), [0, 2], [-1, 1]),
    ("ppo", MULTI, [[0, 0], [2, 4]], [[1, -2], [3, 2]]),
    ("ppo", BOX, [[-9, -1.5], [1.5, 9]], [[-1, 0], [1, 3]]),
    # A missing bound is taken to be 2 away from the other one.
    ("ppo", HALF, [[-3, 3, 3], [1, -1, -1]], [[0.1, 0.1, 3], [2.1, -1.9, -1]]),
    ("ppo", MATRIX, [[-1, -1], [0.25, 7]], [[[300], [-1]], [[425], [9]]]),
]
BOXES = [(HUGE, ENDS, [[-3e38, 5], [0, 5], [3e38, 5]])]
for dtype in (np.float16, np.float64):
    BOXES += [(small_box(dtype), ENDS, [[0.1, -0.3], [0.4, 29_999.85], [0.7, 6e4]])]
TO_ENV += [(name, *row) for name in ("sac", "ppo") for row in BOXES]


@pytest.mark.parametrize(("name", "space", "actions", "wanted"), TO_ENV)
def test_actions_are_those_of_the_space(name, space, actions, wanted):
    """They have its dtype, although JAX has no float64."""
    agent = make(name, space)
    actions = np.array(actions, agent.example_step.action.dtype)
    got, compiled = agent.to_env_action(actions), jax.jit(agent.to_env_action)(actions)

    close = dict(rtol=1e-3 if space.dtype == np.float16 else 1e-6, atol=1e-6)
    assert_allclose(got, wanted, **close)
    assert_allclose(compiled, wanted, **close)
    if isinstance(space, gym.spaces.Box):
        assert got.dtype == space.dtype
        assert all(space.contains(action) for action in got)
        assert compiled.dtype == min(space.dtype, np.dtype(np.float32))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_iteration_that_learns_returns_its_new_policy(name):
    agent = learner(name)
    for step, (before, state, policy, metrics) in iterations(name).items():
        learns = step >= 16 or name in ON_POLICY

        assert (vector(before[0]) != vector(state[0])).any() == learns
        assert_array_equal(vector(policy), vector(agent.policy_params(state)))
        assert np.isfinite(list(metrics.values())).all() == learns


RATE = dict(learning_rate=0.1, adam_epsilon=0.01)
NORM = dict(max_grad_norm=0.5)


@pytest.mark.parametrize(
    ("name", "optimizer", "flags", "epsilon", "norm"),
    [
        ("dqn", "optimizer", RATE, 0.01, np.inf),
        ("r2d2", "optimizer", RATE | NORM, 0.01, 0.5),
        ("ppo", "optimizer", NORM, 1e-5, 0.5),
        ("sac", "critic_optimizer", dict(q_lr=0.1), 1e-8, np.inf),
        ("sac", "alpha_optimizer", dict(q_lr=0.1), 1e-8, np.inf),
        ("sac", "actor_optimizer", dict(policy_lr=0.1), 1e-8, np.inf),
    ],
)
def test_small_gradients_make_small_steps(name, optimizer, flags, epsilon, norm):
    """Kingma and Ba 2015, algorithm 1: the first step is learning rate * g / (abs(g) + epsilon)."""
    optimizer = getattr(make(name, **flags), optimizer)
    optimizer = optimizer(0.1) if name in ON_POLICY else optimizer
    gradient = {"kernel": jnp.array([[1e-7], [-0.01]]), "bias": jnp.array([1.0])}
    step, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)

    for layer, g in gradient.items():
        clipped = g * min(1, norm / np.linalg.norm(vector(gradient)))
        wanted = -0.1 * clipped / (abs(clipped) + epsilon)
        assert_allclose(step[layer], wanted, rtol=1e-3)


@pytest.mark.parametrize("name", SCRIPTS)
def test_optimizers_know_the_parameters(name):
    """Those with weight decay must."""
    agent = make(name)
    seen = []

    def update(gradient, state, params):
        seen.append((gradient, params))
        return gradient, state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    agent.critic_optimizer = agent.actor_optimizer = agent.alpha_optimizer = optimizer
    agent.optimizer = (lambda rate: optimizer) if name in ON_POLICY else optimizer

    def learn(state, rollout):
        train_step(agent, state, rollout, KEY, 24, rollout.observation[0])

    jax.eval_shape(learn, jax.eval_shape(agent.init, KEY), random_steps(agent))

    assert len(seen) >= (3 if name == "sac" else 1)
    for gradient, params in seen:
        assert jax.tree.map(jnp.shape, gradient) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize(
    ("anneal_lr", "wanted"), [(True, [2e-3, 1.5e-3, 1e-3, 0, 0]), (False, [2e-3] * 5)]
)
@pytest.mark.parametrize("name", ON_POLICY)
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
        assert_allclose(rates(step), rate, rtol=1e-6, atol=1e-9)


CONVOLUTIONS = "conv_0 conv_1 conv_2 conv_out"
Q, MLP = "q_0 q_1 q", "actor_0 actor_1 actor critic_0 critic_1 critic"
DUELING = "value_0 value advantage_0 advantage"
HEADS = "actor_0 actor critic_0 critic"
ACTOR = "actor_0 actor_1 mean log_std"
NORMS = "conv_0_norm conv_1_norm conv_2_norm conv_out_norm"
NORMALISED = ("q_0 norm_0 q_1 norm_1 q", 69_636, f"{CONVOLUTIONS} {NORMS} q", 114_660)
# The layers for 2 x 3 numbers and for images of 4 x 36 x 36, and the numbers of their parameters.
LAYERS = {
    "dqn": (Q, 11_344, f"{CONVOLUTIONS} q", 113_316),
    "r2d2": (f"encoder_0 lstm {DUELING}", 43_141, f"{CONVOLUTIONS} lstm {DUELING}", 268_645),
    "sac": (ACTOR, 68_612, f"{CONVOLUTIONS} {ACTOR}", 309_412),
    "ppo": (MLP, 9_541, f"{CONVOLUTIONS} actor critic", 113_829),
    "pqn": NORMALISED,
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


def test_a_run_of_ppo_learns_what_a_plain_loop_does(monkeypatch):
    """Each environment has returns 3, 6, 10, 15, 3, 6 and 10."""
    agent = learner("ppo")
    run = ppo_jax.Run(env_id="Bounded-v0", log_interval=8)
    monkeypatch.setattr(ppo_jax, "Agent", lambda *flags_and_spaces: agent)
    monkeypatch.setattr(ppo_jax, "cleanreplay", None)
    state, returns, folder = ppo_jax.train(agent.args, run)
    init_key, act_key, learn_key = jax.random.split(jax.random.PRNGKey(run.seed), 3)
    wanted = agent.init(init_key)
    with closing(ppo_jax.make_envs(agent.args, run, 2)) as envs:
        env_state = ppo_jax.reset(envs, init_key, 0)
        for step in range(0, 64, 8):
            params = agent.policy_params(wanted)
            inputs = (agent, envs, params, env_state, act_key, step)
            rollout, env_state = ppo_jax.collect_rollout(*inputs)
            learned = agent.train_step(wanted, rollout, learn_key, step, env_state[0])
            wanted, _, metrics = learned

    assert_allclose(vector(state), vector(wanted), 1e-3, 1e-4)
    assert returns.tolist() == [pytest.approx(53 / 7)]
    of_episodes = {"charts/SPS", "charts/episodic_return", "charts/episodic_length"}
    scalars, _ = read_events(folder)
    assert scalars.keys() == of_episodes | metrics.keys()
    assert [step for step, _ in scalars["charts/SPS"]] == list(range(8, 65, 8))


gym.register("Match-v0", environments.Probe, kwargs={"kind": "both"})
OF_DQN = dict(total_timesteps=4_000, num_envs=8, learning_starts=400, batch_size=64)
OF_DQN |= dict(train_frequency=4, target_network_frequency=40, learning_rate=1e-2, gamma=0.5)
OF_PPO = dict(total_timesteps=10_240, num_envs=16, num_steps=16, learning_rate=6e-3, gamma=0.5)
LEARNING = {
    "per_dqn": OF_DQN,
    "ppo": OF_PPO,
    "pqn": OF_PPO | dict(reward_scale=1, end_e=0.05, hidden_sizes=(64,)),
    "recurrent_ppo": OF_PPO | dict(sequence_length=16, hidden_size=32),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNING)
def test_the_right_actions_are_learned(name, optimised):
    """At the end one action in twenty of DQN is random, so the mean return is 0.95."""
    module = SCRIPTS[name][0]
    run = module.Run(env_id="Match-v0", eval_episodes=0)
    _, returns, _ = module.train(module.Args(**LEARNING[name]), run)

    assert returns > 0.7


def start_first_command(name):
    """Starts the first command in the help of a script, compiled as for a user."""
    text = re.search(r"^    python (.*)", SCRIPTS[name][0].__doc__, re.MULTILINE)[1]
    file, *flags = shlex.split(text)
    as_users_do = {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    return start_python(".", ROOT / file, *flags, env=as_users_do)


@pytest.mark.slow
def test_the_first_command_of_ppo_learns():
    """CartPole-v1 counts as solved at 475. All seeds in benchmarks/returns.md end above it."""
    process = start_first_command("ppo")
    out, err = process.communicate()

    assert process.returncode == 0, err
    assert float(out.split()[-1]) >= 475


@pytest.mark.slow
def test_the_first_command_of_dqn_reaches_475():
    """All seeds in docs/dqn.md do so in training, but some end in a dip. The run is stopped."""
    process = start_first_command("dqn")
    returns = (re.search(r" a second, return (\S+)", line) for line in process.stdout)
    solved = any(found and float(found[1]) >= 475 for found in returns)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()

    assert solved, err
    assert process.returncode == 130, err
