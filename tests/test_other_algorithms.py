"""docs/other_algorithms/: the diffs apply, and what they change of the scripts is right, against
plain loops and known values.
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import PROBE, TWO, box, filled, windows_by_hand
from helpers import (
    OTHER_ALGORITHMS,
    ROOT,
    diff_of,
    find_jax_env,
    hunks,
    make_agent,
    network_of,
    other_algorithm,
    read_events,
)

from cleanreplay import load_policy, protocol

pytestmark = pytest.mark.pages

KEY = jax.random.PRNGKey(0)
HOW = """
{diff} does not apply to {script}.py, which was edited. Make it anew:
    cp {script}.py {name}.py
    patch {name}.py {diff}
(what did not apply is in {name}.py.rej: edit {name}.py)
    diff -U1 --label a/{name}.py --label b/{name}.py {script}.py {name}.py > {diff}
"""


def how_to_make_anew(name):
    diff = diff_of(name).relative_to(ROOT)
    return HOW.format(diff=diff, script=OTHER_ALGORITHMS[name], name=name)


@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_every_hunk_has_one_place_in_the_script(name):
    """So git cannot apply it at another one, wherever lines have moved."""
    text = (ROOT / f"{OTHER_ALGORITHMS[name]}.py").read_text()
    places = {text.count(old) for old, _ in hunks(diff_of(name).read_text())}
    assert places == {1}, how_to_make_anew(name)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_git_applies_the_diff(name, tmp_path):
    file = tmp_path / f"{name}.py"
    shutil.copy(ROOT / f"{OTHER_ALGORITHMS[name]}.py", file)
    command = ["git", "apply", str(diff_of(name))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, how_to_make_anew(name) + done.stderr
    assert file.read_text() == Path(other_algorithm(name).__file__).read_text()


# --- C51 and QR-DQN: Q(s, .) is s * params, and actions 0 and 1 have ATOMS numbers each

ATOMS = 5
WEIGHTS = np.array([0.5, 1.0, 0.25])  # of the three windows by hand; the fourth one only resets


def with_numbers(name, **flags):
    """The agent of C51 or QR-DQN, whose network has two actions of ATOMS numbers each."""
    module = other_algorithm(name)
    agent = module.Agent(module.Args(gamma=0.5, batch_size=4, **flags), box(1), TWO)
    agent.network = SimpleNamespace(
        init=lambda key, observation: jnp.zeros(2 * ATOMS),
        apply=lambda params, x: (x @ params.reshape(1, 2 * ATOMS)).reshape(-1, 2, ATOMS),
    )
    return agent


def c51(**flags):
    """The atoms of the returns are -2, -1, 0, 1 and 2."""
    return with_numbers("c51_jax", n_atoms=ATOMS, v_min=-2.0, v_max=2.0, **flags)


def qr_dqn(**flags):
    return with_numbers("qr_dqn_jax", n_quantiles=ATOMS, **flags)


def plain_projection(agent, probabilities, reward, discount):
    """Algorithm 1 of Bellemare et al. 2017, one row and one atom after the other."""
    args = agent.args
    width = (args.v_max - args.v_min) / (args.n_atoms - 1)
    projected = np.zeros_like(probabilities)
    for row in range(len(reward)):
        for atom in range(args.n_atoms):
            value = reward[row] + discount[row] * (args.v_min + atom * width)
            place = (np.clip(value, args.v_min, args.v_max) - args.v_min) / width
            below = int(np.floor(place))
            above = int(np.ceil(place))
            if below == above:
                projected[row, below] += probabilities[row, atom]
            else:
                projected[row, below] += probabilities[row, atom] * (above - place)
                projected[row, above] += probabilities[row, atom] * (place - below)
    return projected


@pytest.mark.parametrize(
    ("reward", "discount"),
    [
        (0.0, 1.0),  # every atom is hit
        (1.0, 1.0),  # the same, and the largest is clipped
        (-3.0, 0.5),  # most are clipped at the lower end
        (0.3, 0.729),  # of three steps: between the atoms
        (0.25, 0.0),  # terminated: the reward alone, between two atoms
        (-1.0, 0.0),  # terminated: the reward alone is an atom
        (1e6, 0.0),  # beyond the largest one
    ],
)
def test_projection_is_what_a_plain_loop_gives(reward, discount):
    probabilities = np.random.default_rng(0).dirichlet(np.ones(ATOMS), 8)
    rewards, discounts = np.full((2, 8), [[reward], [discount]])
    agent = c51()
    got = jax.jit(agent.project)(*map(np.float32, (probabilities, rewards, discounts)))
    wanted = plain_projection(agent, probabilities, rewards, discounts)
    np.testing.assert_allclose(got, wanted, atol=1e-6)
    np.testing.assert_allclose(got.sum(axis=1), 1, atol=1e-6)


def test_projection_keeps_the_mean_unless_it_clips():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(51), 8).astype(np.float32)
    rewards = np.linspace(-90, 90, 8, dtype=np.float32)
    module = other_algorithm("c51_jax")
    agent = module.Agent(module.Args(n_atoms=51, v_min=-100.0, v_max=100.0), box(1), TWO)
    projected = agent.project(probabilities, rewards, np.full(8, 0.1, np.float32))
    np.testing.assert_allclose(
        projected @ agent.atoms, rewards + 0.1 * (probabilities @ agent.atoms), rtol=1e-4, atol=1e-3
    )


def softmax(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return shares / shares.sum(axis=-1, keepdims=True)


def numbers_by_hand():
    """The numbers [2, ATOMS] of both actions, online and in the target network.

    Action 1 is the best one online, and action 0 in the target network, by both algorithms.
    """
    online = np.array([[0.3, -0.2, 0.1, -0.1, 0.2], [-1.0, 0.0, 1.0, 2.0, 1.5]])
    target = np.array([[-2.0, 1.0, 0.5, 1.5, 3.0], [0.5, 0.4, -0.3, -0.2, -0.6]])
    return online, target


def losses_of_windows(agent, double_q, loss_of):
    """The losses [3] of the three windows by hand, and the probabilities or values of the targets.

    `loss_of(numbers of the action, numbers of the next action, reward, discount)` is of one row.
    Rewards 1, 2, 3; actions 0, 1, 0; the second terminates.
    """
    online, target = numbers_by_hand()
    following = target[1 if double_q else 0]
    rows = [(0, 1.0, 0.5), (1, 2.0, 0.0), (0, 3.0, 0.5)]
    return np.array([loss_of(online[a], following, r, d) for a, r, d in rows])


def check_loss(agent, losses, q_values):
    """The loss is the weighted mean of losses [3], and a row that only resets is not in it."""
    online, target = numbers_by_hand()
    params, target_params = jnp.float32(online.ravel()), jnp.float32(target.ravel())
    batch = agent.to_transitions(windows_by_hand(), KEY)
    np.testing.assert_array_equal(batch.valid, [True, True, True, False])
    loss, (metrics, of_rows) = agent.loss(params, target_params, batch, jnp.array([*WEIGHTS, 1e6]))
    np.testing.assert_allclose(of_rows[:3], losses, rtol=1e-5)
    assert loss == pytest.approx(np.mean(WEIGHTS * losses), rel=1e-5)
    assert metrics["losses/loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx(q_values[[0, 1, 0]].mean(), rel=1e-5)


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_of_c51_is_the_kl_divergence_by_hand(double_q):
    agent = c51(double_q=double_q)

    def divergence(logits, next_logits, reward, discount):
        probabilities = softmax(next_logits)[None]
        (target,) = plain_projection(agent, probabilities, [reward], [discount])
        prediction = softmax(logits)
        return sum(t * np.log(t / p) for t, p in zip(target, prediction, strict=True) if t > 0)

    online, _ = numbers_by_hand()
    losses = losses_of_windows(agent, double_q, divergence)
    check_loss(agent, losses, softmax(online) @ np.arange(-2.0, 3.0))


def test_gradient_of_c51_is_that_of_the_cross_entropy():
    """By the logits of the action: what is predicted, minus the target."""
    agent = c51(double_q=False)
    online, target = numbers_by_hand()
    batch = agent.to_transitions(windows_by_hand(), KEY)
    weights = jnp.array([*WEIGHTS, 1e6])
    inputs = jnp.float32(online.ravel()), jnp.float32(target.ravel()), batch, weights
    gradient, _ = jax.grad(agent.loss, has_aux=True)(*inputs)

    probabilities = softmax(target[0])[None].repeat(3, axis=0)
    targets = plain_projection(agent, probabilities, [1.0, 2.0, 3.0], [0.5, 0.0, 0.5])
    wanted = np.zeros((2, ATOMS))
    for action, weight, row in zip([0, 1, 0], WEIGHTS, targets, strict=True):
        wanted[action] += weight / 3 * (softmax(online[action]) - row)
    np.testing.assert_allclose(gradient.reshape(2, ATOMS), wanted, rtol=1e-4, atol=1e-6)


def plain_quantile_loss(quantiles, targets, kappa):
    """The sum over quantiles of the mean over targets: algorithm 1 of the paper."""
    total = 0.0
    for i, quantile in enumerate(quantiles):
        fraction = (2 * i + 1) / (2 * len(quantiles))
        for target in targets:
            error = target - quantile
            huber = error**2 / 2 if abs(error) <= kappa else kappa * (abs(error) - kappa / 2)
            weight = fraction if error >= 0 else 1 - fraction
            total += weight * huber / kappa / len(targets)
    return total


@pytest.mark.parametrize(("double_q", "kappa"), [(False, 1.0), (True, 0.5)])
def test_loss_of_qr_dqn_is_what_a_plain_loop_gives(double_q, kappa):
    agent = qr_dqn(double_q=double_q, kappa=kappa)

    def loss(quantiles, next_quantiles, reward, discount):
        return plain_quantile_loss(quantiles, reward + discount * next_quantiles, kappa)

    online, _ = numbers_by_hand()
    check_loss(agent, losses_of_windows(agent, double_q, loss), online.mean(axis=1))


def test_quantiles_of_a_distribution_have_the_least_loss():
    """Of 1,000 targets, 0 to 999: at the fractions 0.1, 0.3, ..., 0.9, up to kappa."""
    agent = qr_dqn(kappa=1e-3)
    targets = jnp.arange(1_000.0)[None]
    gradient = jax.jit(jax.grad(lambda x: agent.quantile_loss(x, targets).sum()))
    np.testing.assert_allclose(
        gradient(jnp.array([[99.5, 299.5, 499.5, 699.5, 899.5]])), 0, atol=1e-3
    )
    off = gradient(jnp.array([[199.5, 199.5, 599.5, 599.5, 999.5]]))
    np.testing.assert_allclose(off, [[0.1, -0.1, 0.1, -0.1, 0.1]], atol=1e-3)


@pytest.mark.parametrize("make", [c51, qr_dqn])
def test_priorities_are_the_losses_of_the_rows(make):
    """One that only resets gets priority 0."""
    agent = make(priority_epsilon=0.125)
    online, target = numbers_by_hand()
    params, target_params = jnp.float32(online.ravel()), jnp.float32(target.ravel())
    priorities = []
    replay = agent.replay
    state = filled(agent, agent.init(KEY), steps=10)
    state = state._replace(params=params, target_params=target_params)

    def sample(state, key, batch_size):
        drawn = replay.sample(state, key, batch_size)
        return drawn._replace(experience=windows_by_hand())

    def set_priorities(state, indices, values):
        priorities.append(values)
        return replay.set_priorities(state, indices, values)

    agent.replay = SimpleNamespace(sample=sample, set_priorities=set_priorities)
    agent.gradient_step(state, KEY, 0, 10)
    batch = agent.to_transitions(windows_by_hand(), KEY)
    _, (_, losses) = agent.loss(params, target_params, batch, jnp.ones(4))
    assert (losses[:3] > 0.01).all()
    np.testing.assert_allclose(priorities[0], [*(losses[:3] + 0.125), 0], rtol=1e-6)


@pytest.mark.parametrize("make", [c51, qr_dqn])
def test_the_greedy_action_has_the_largest_mean(make):
    agent = make()
    online, target = numbers_by_hand()
    observation = np.ones((2, 1), np.float32)
    np.testing.assert_array_equal(agent.act(jnp.float32(online.ravel()), observation), 1)
    np.testing.assert_array_equal(agent.act(jnp.float32(target.ravel()), observation), 0)


@pytest.mark.parametrize("name", ["c51_jax", "qr_dqn_jax"])
@pytest.mark.parametrize("observation", [np.zeros((6, 4)), np.zeros((6, 84, 84), np.uint8)])
def test_the_network_has_numbers_of_each_action_for_vectors_and_images(name, observation):
    number = {"n_atoms" if name == "c51_jax" else "n_quantiles": 7}
    network = network_of(other_algorithm(name), observation, num_actions=3, **number)
    output, _ = jax.eval_shape(network.init_with_output, KEY, observation)
    assert output.shape == (6, 3, 7)


OF_RETURNS = {
    "c51_jax": dict(n_atoms=21, v_min=-2.5, v_max=2.5),
    "qr_dqn_jax": dict(n_quantiles=5, kappa=1.0, learning_rate=5e-3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_RETURNS)
@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        ("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),
    ],
)
def test_probe_values_are_learned(name, env_id, observations, values):
    module = other_algorithm(name)
    args = module.Args(**vars(PROBE) | {"double_q": True} | OF_RETURNS[name])
    run = module.Run(env_id=env_id, eval_episodes=0, checkpoint_interval=0)
    state, _, _ = module.train(args, run)
    agent = make_agent(module, args, run)
    numbers = agent.network.apply(state.params, np.array(observations, np.float32))
    np.testing.assert_allclose(agent.q_values(numbers), values, atol=0.1)


# --- TD3


def td3(**flags):
    """The agent for one number as the observation, and actions of two axes, -1 to 1 and -2 to 2."""
    module = other_algorithm("td3_jax")
    space = gym.spaces.Box(np.float32([-1, -2]), np.float32([1, 2]))
    return module.Agent(module.Args(**flags), box(1), space)


def q_by_hand(critics, observation, action):
    """Q(s, a) [2, B] of two critics, with the weights [2, 3] of s and both axes of a."""
    return critics @ np.concatenate([observation, action], axis=1).T


def with_linear_networks(**flags):
    """The agent, whose networks are Q(s, a) = critic . (s, a), and actions s * actor."""
    agent = td3(**flags)
    agent.critic = SimpleNamespace(
        init=lambda key, observation, action: jax.random.normal(key, 3),
        apply=lambda critic, observation, action, rngs: (
            jnp.concatenate([observation, action], axis=1) @ critic
        ),
    )
    agent.actor = SimpleNamespace(
        init=lambda key, observation: jax.random.normal(key, 2),
        apply=lambda actor, observation: observation * actor,
    )
    return agent


CRITICS = np.array([[1.0, 2.0, -1.0], [0.5, -1.0, 1.0]])
TARGET_CRITICS = np.array([[2.0, -1.0, 0.5], [1.0, 1.5, -0.5]])
ACTOR = np.array([0.5, -0.25])
TARGET_ACTOR = np.array([0.9, -0.4])


def linear_state(agent):
    """The state before training, with these weights."""
    state = agent.init(KEY)
    critics, targets, actor, target_actor = map(
        jnp.float32, (CRITICS, TARGET_CRITICS, ACTOR, TARGET_ACTOR)
    )
    policy = state.policy._replace(actor=actor)
    return state._replace(
        critics=critics, target_critics=targets, policy=policy, target_actor=target_actor
    )


def transitions_by_hand():
    """Four transitions: of one step, terminated, of two steps, and one that only resets."""
    return other_algorithm("td3_jax").Transition(
        observation=jnp.array([[1.0], [-1.0], [0.5], [1e6]]),
        action=jnp.array([[0.1, 0.2], [-0.3, 0.4], [0.5, -0.6], [1.0, 1.0]]),
        reward=jnp.array([1.0, 2.0, 3.0, 1e6]),
        discount=jnp.array([0.5, 0.0, 0.25, 0.5]),
        next_observation=jnp.array([[1.0], [1.0], [-1.0], [1e6]]),
        valid=jnp.array([True, True, True, False]),
    )


def test_target_of_td3_is_that_by_hand(monkeypatch):
    """The noise is scaled, then clipped, then the action is clipped; the smaller value counts."""
    agent = with_linear_networks(policy_noise=0.2, noise_clip=0.3)
    noise = np.float32([[1.0, -0.5], [0.0, 0.0], [5.0, -5.0], [0.0, 0.0]])
    batch = transitions_by_hand()
    state = linear_state(agent)
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: noise)
    loss, metrics = agent.critic_loss(state.critics, state, batch, KEY)

    # 0.9 + 0.2 is clipped to 1, and the noises 1 and -1 of the third row to 0.3 and -0.3.
    next_action = np.array([[1.0, -0.5], [0.9, -0.4], [-0.6, 0.1]])
    next_q = q_by_hand(TARGET_CRITICS, np.array([[1.0], [1.0], [-1.0]]), next_action)
    target = [1, 2, 3] + np.array([0.5, 0.0, 0.25]) * next_q.min(axis=0)
    assert (next_q.argmin(axis=0) == [0, 0, 1]).all()
    values = q_by_hand(CRITICS, np.asarray(batch.observation), np.asarray(batch.action))[:, :3]
    losses = ((values - target) ** 2).mean(axis=1)
    assert loss == pytest.approx(losses.sum(), rel=1e-5)
    assert metrics["losses/qf1_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert metrics["losses/qf2_loss"] == pytest.approx(losses[1], rel=1e-5)


def test_the_actor_of_td3_follows_the_first_critic():
    """By the gradient of -Q: the mean of s times the weights of the action."""
    agent = with_linear_networks()
    state = linear_state(agent)
    inputs = (state.policy.actor, state.critics, transitions_by_hand(), KEY)
    loss, gradient = jax.value_and_grad(agent.actor_loss)(*inputs)
    observation = np.array([[1.0], [-1.0], [0.5]])
    wanted = -q_by_hand(CRITICS, observation, observation * ACTOR)[0].mean()
    assert loss == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(gradient, -observation.mean() * CRITICS[0, 1:], rtol=1e-5)


def test_the_policy_and_the_targets_of_td3_move_at_every_second_gradient_step():
    """Each target by tau towards the network that has just been updated."""
    agent = td3(tau=0.25, batch_size=8, buffer_size=40, hidden_sizes=(8,))
    step = agent.example_step._replace(reward=np.float32(1), valid=np.True_)
    rollout = jax.tree.map(lambda x: np.broadcast_to(x, (30, 1, *x.shape)), step)
    observation = np.random.default_rng(0).normal(size=(30, 1, 1)).astype(np.float32)
    rollout = rollout._replace(observation=observation)
    state = jax.jit(agent.init)(KEY)
    state = state._replace(replay=agent.replay.add_batch(state.replay, rollout))
    gradient_step = jax.jit(agent.gradient_step)
    moved = []
    for update in range(1, 5):
        before = state
        state, _ = gradient_step(state, jax.random.PRNGKey(update), update)
        networks = [(x.policy.actor, x.target_actor, x.target_critics) for x in (before, state)]
        moved.append([bool(differ(*pair)) for pair in zip(*networks, strict=True)])
        assert differ(before.critics, state.critics)
        if update % 2 == 0:
            follows(before.target_actor, state.policy.actor, state.target_actor)
            follows(before.target_critics, state.critics, state.target_critics)
    assert moved == [[False] * 3, [True] * 3] * 2


def differ(tree, other):
    """Whether any number differs."""
    differs = jax.tree.map(lambda a, b: (np.asarray(a) != np.asarray(b)).any(), tree, other)
    return any(jax.tree.leaves(differs))


def follows(old, online, new):
    """Fails unless `new` is a quarter of the way from `old` to `online`."""
    wanted = jax.tree.map(lambda a, b: 0.75 * a + 0.25 * b, old, online)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), new, wanted)


def test_td3_explores_with_noise_and_at_first_at_random():
    """Actions are -1 to 1 on each axis, and those of the environment between its bounds."""
    agent = with_linear_networks(exploration_noise=0.1, learning_starts=400)
    actor = jnp.float32([0.5, 0.95])
    observation = np.ones((4_000, 1), np.float32)
    np.testing.assert_allclose(agent.act(actor, observation[:1]), [[0.5, 0.95]])
    random = np.asarray(agent.act(actor, observation, KEY, 399))
    assert random.min() < -0.99
    assert abs(random.mean()) < 0.03
    noisy = np.asarray(agent.act(actor, observation, KEY, 400))
    assert noisy[:, 0].mean() == pytest.approx(0.5, abs=0.01)
    assert noisy[:, 0].std() == pytest.approx(0.1, rel=0.05)
    assert noisy[:, 1].max() == 1
    assert (noisy[:, 1] == 1).mean() == pytest.approx(0.309, abs=0.03)  # beyond 0.5 deviations
    np.testing.assert_allclose(
        protocol.policy(agent, actor)(observation[:1]), [[0.5, 1.9]], rtol=1e-6
    )


class Target(gym.Env):
    """Reward -(action - 2)**2 for an action from 1 to 5, one of two steps; then it terminates."""

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = gym.spaces.Box(1.0, 5.0, (1,), np.float32)
    time = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple:
        super().reset(seed=seed)
        self.time = 0
        return np.float32([0]), {}

    def step(self, action: Any) -> tuple:
        self.time += 1
        reward = -((float(action[0]) - 2) ** 2)
        return np.float32([self.time / 2]), reward, self.time == 2, False, {}


gym.register("TwoTargets-v0", Target)


@pytest.mark.slow
def test_td3_learns_the_best_action_and_its_value():
    """Reward -(a - 2)**2 in each of two steps, which is 0 at best."""
    module = other_algorithm("td3_jax")
    sizes = dict(total_timesteps=8_000, num_envs=8, train_frequency=2, learning_starts=1_000)
    rates = dict(policy_lr=1e-3, q_lr=3e-3, tau=0.05, gamma=0.5)
    args = module.Args(**sizes, **rates, batch_size=64, hidden_sizes=(64, 64))
    run = module.Run(env_id="TwoTargets-v0", eval_episodes=0, checkpoint_interval=0)
    state, _, _ = module.train(args, run)
    agent = make_agent(module, args, run)
    observation = np.float32([[0.0], [0.5]])
    action = agent.act(state.policy.actor, observation)
    np.testing.assert_allclose(agent.to_env_action(action), 2, atol=0.15)
    q = agent.q_values(state.critics, observation, action, KEY)
    np.testing.assert_allclose(q, 0, atol=0.15)
    other = np.zeros((2, 1), np.float32)  # the environment's action 3
    np.testing.assert_allclose(agent.q_values(state.critics, observation, other, KEY), -1, atol=0.3)


# --- runs

SMALL = dict(learning_starts=64, batch_size=16, buffer_size=300, hidden_sizes=(16,))


@pytest.mark.more
@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_runs_are_resumed_and_loaded(name):
    """By the copy, whose name the folder has."""
    module = other_algorithm(name)
    run = module.Run(eval_episodes=0, log_interval=100)
    _, _, folder = module.train(module.Args(total_timesteps=200, **SMALL), run)
    assert f"__{name}__" in folder.name
    args = module.Args(total_timesteps=400, **SMALL)
    state, _, _ = module.train(args, replace(run, resume=str(folder)))
    scalars, _ = read_events(folder)
    assert [step for step, _ in scalars["charts/SPS"]] == [100, 200, 300, 400]
    agent = make_agent(module, args, run)
    shape = (50, *agent.example_step.observation.shape)
    observation = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    actions = protocol.policy(agent, agent.policy_params(state))(observation)
    assert len(np.unique(actions)) > 1
    np.testing.assert_array_equal(load_policy(folder)(observation), actions)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "env_id"),
    [
        ("c51_jax", "phys2d/CartPole-v1"),
        ("qr_dqn_jax", "phys2d/CartPole-v1"),
        ("td3_jax", "phys2d/Pendulum-v0"),
    ],
)
def test_many_seeds_train_in_one_compiled_program(name, env_id):
    module = other_algorithm(name)
    args = module.Args(total_timesteps=400, num_envs=2, **SMALL)
    run = module.Run(env_id=env_id, num_seeds=2, log_interval=200, eval_episodes=2)
    assert find_jax_env(module, args, run) is not None
    state, returns, _ = module.train(args, run)
    assert returns.shape == (2,)
    params = module.Agent.policy_params(None, state)
    assert all(np.isfinite(x).all() and len(x) == 2 for x in jax.tree.leaves(params))
