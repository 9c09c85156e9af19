"""docs/other_algorithms/: the diffs apply, and the scripts are right, against plain loops."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from by_hand import TWO, box, random_rollout, windows_by_hand
from helpers import OTHER_ALGORITHMS, ROOT, diff_of, hunks, other_algorithm
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal

pytestmark = pytest.mark.pages

KEY = jax.random.PRNGKey(0)


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_a_diff_applies_at_one_place_only(name, tmp_path):
    """So git cannot apply it at a wrong place after lines have moved."""
    file = tmp_path / f"{name}.py"
    shutil.copy(ROOT / f"{OTHER_ALGORITHMS[name]}.py", file)
    text = file.read_text()
    places = {text.count(old) for old, _ in hunks(diff_of(name).read_text())}
    command = ["git", "apply", str(diff_of(name))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert places == {1}, "make the diff anew, see docs/other_algorithms.md"
    assert done.returncode == 0, done.stderr
    assert file.read_text() == Path(other_algorithm(name).__file__).read_text()


BOUNDS = gym.spaces.Box(-2.0, 2.0, (1,))


OF_BOX = ("td3_jax", "td3_bc_jax")


@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_a_copy_learns_from_a_rollout(name):
    module = other_algorithm(name)
    sizes = dict(num_envs=4, train_frequency=40, learning_starts=8, batch_size=8, buffer_size=100)
    data = dict(offline_data="data.npz", offline_fraction=0.5) if name == "td3_bc_jax" else {}
    args = module.Args(**sizes, **data, hidden_sizes=(5,))
    agent = module.Agent(args, box(1), BOUNDS if name in OF_BOX else TWO)
    rollout, _ = random_rollout(np.random.default_rng(0), 10, np.zeros(4, bool))
    if name in OF_BOX:
        rollout = rollout._replace(action=np.float32(rollout.action[..., None]))
    state = jax.jit(agent.init)(KEY)
    after, _, metrics = jax.jit(agent.train_step)(state, module.Step(*rollout), KEY, 0)

    assert np.isfinite(list(metrics.values())).all()
    assert (ravel_pytree(after[0])[0] != ravel_pytree(state[0])[0]).any()


# C51 and QR-DQN: outputs are s * params, and actions 0 and 1 have five numbers each

# In both algorithms action 1 is the best one online, and action 0 in the target network.
ONLINE = np.array([[0.3, -0.2, 0.1, -0.1, 0.2], [-1.0, 0.0, 1.0, 2.0, 1.5]])
TARGET = np.array([[-2.0, 1.0, 0.5, 1.5, 3.0], [0.5, 0.4, -0.3, -0.2, -0.6]])
WEIGHTS = np.array([0.5, 1.0, 0.25])  # of the three sequences by hand; the fourth is not valid
FLAGS = {
    "c51_jax": dict(n_atoms=5, v_min=-2.0, v_max=2.0),
    "qr_dqn_jax": dict(n_quantiles=5, kappa=0.5),
}
OF_RETURNS = pytest.mark.parametrize("name", FLAGS)


def with_numbers(name, **flags):
    """Makes the agent of C51 or QR-DQN. The atoms of C51 are -2, -1, 0, 1 and 2."""
    module = other_algorithm(name)
    args = module.Args(gamma=0.5, batch_size=4, **FLAGS[name], **flags)
    agent = module.Agent(args, box(1), TWO)
    agent.network = SimpleNamespace(
        init=lambda key, observation: jnp.zeros(10),
        apply=lambda params, x: (x @ params.reshape(1, 10)).reshape(-1, 2, 5),
    )
    return agent


def plain_projection(probabilities, reward, discount):
    """Runs algorithm 1 of Bellemare et al. 2017 for the atoms -2 to 2, one after the other."""
    projected = np.zeros(5)
    for atom, probability in zip(range(-2, 3), probabilities, strict=True):
        place = np.clip(reward + discount * atom, -2, 2) + 2
        below = int(np.floor(place))
        above = int(np.ceil(place))
        projected[below] += probability * (1 if below == above else above - place)
        projected[above] += 0 if below == above else probability * (place - below)
    return projected


def divergence(logits, next_logits, reward, discount):
    """Computes the loss of C51 for one row: the KL divergence."""
    target = plain_projection(scipy.special.softmax(next_logits), reward, discount)
    return scipy.special.rel_entr(target, scipy.special.softmax(logits)).sum()


def quantile_loss(quantiles, next_quantiles, reward, discount):
    """Computes the loss of QR-DQN for one row: algorithm 1 of Dabney et al. 2018, kappa 0.5."""
    total = 0.0
    for i, quantile in enumerate(quantiles):
        for target in reward + discount * next_quantiles:
            error = target - quantile
            huber = error**2 / 2 if abs(error) <= 0.5 else 0.5 * (abs(error) - 0.25)
            fraction = (2 * i + 1) / 10
            total += (fraction if error >= 0 else 1 - fraction) * huber / 0.5 / 5
    return total


LOSSES = {"c51_jax": divergence, "qr_dqn_jax": quantile_loss}


@OF_RETURNS
@pytest.mark.parametrize("double_q", [False, True])
def test_the_loss_is_the_weighted_mean_of_a_plain_loop(name, double_q):
    """The rewards are 1, 2, 3, the actions 0, 1, 0; the second step terminates."""
    agent = with_numbers(name, double_q=double_q)
    batch = agent.to_transitions(windows_by_hand(), KEY)
    weights = jnp.array([*WEIGHTS, 1e6])
    params = jnp.float32(ONLINE.ravel()), jnp.float32(TARGET.ravel())
    loss, (metrics, of_rows) = agent.loss(*params, batch, weights)
    following = TARGET[1 if double_q else 0]
    rows = [(0, 1.0, 0.5), (1, 2.0, 0.0), (0, 3.0, 0.5)]
    losses = np.array([LOSSES[name](ONLINE[a], following, r, d) for a, r, d in rows])
    means = ONLINE.mean(axis=1)
    if name == "c51_jax":
        means = scipy.special.softmax(ONLINE, axis=1) @ np.arange(-2, 3)

    assert_allclose(of_rows[:3], losses, rtol=1e-5)
    assert loss == pytest.approx((WEIGHTS * losses).mean(), rel=1e-5)
    assert metrics["losses/loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx(means[[0, 1, 0]].mean(), rel=1e-5)


# TD3, with the networks Q(s, a) = critic . (s, a) and actions s * actor; all observations are 1

CRITICS = np.array([[1.0, 2.0], [0.5, -1.0]])
TARGET_CRITICS = np.array([[2.0, -1.0], [1.0, 1.5]])


def td3(**flags):
    """Makes the agent, its State, and the batch of the four sequences by hand."""
    module = other_algorithm("td3_jax")
    agent = module.Agent(module.Args(**flags, gamma=0.5), box(1), BOUNDS)
    agent.critic = SimpleNamespace(
        init=lambda key, observation, action: jnp.zeros(2),
        apply=lambda critic, x, action, rngs: jnp.concatenate([x, action], axis=1) @ critic,
    )
    agent.actor = SimpleNamespace(
        init=lambda key, observation: jnp.zeros(1),
        apply=lambda actor, observation: observation * actor,
    )
    windows = windows_by_hand()
    windows = windows._replace(action=windows.action[..., None] / 2)
    agent.replay = SimpleNamespace(
        init=lambda step: None, sample=lambda *inputs: SimpleNamespace(experience=windows)
    )
    state = agent.init(KEY)
    state = state._replace(
        critics=jnp.float32(CRITICS),
        target_critics=jnp.float32(TARGET_CRITICS),
        policy=state.policy._replace(actor=jnp.float32([0.5])),
        target_actor=jnp.float32([0.9]),
    )
    return agent, state, agent.to_transitions(windows, KEY)


def test_the_target_of_td3_is_that_by_hand(monkeypatch):
    """Noise is scaled, then clipped, then the action is clipped; the smaller value counts."""
    agent, state, batch = td3(policy_noise=0.2, noise_clip=0.3)
    noise = np.float32([[1.0], [0.0], [-5.0], [0.0]])
    monkeypatch.setattr(jax.random, "normal", lambda key, shape, dtype: noise)
    loss, metrics = agent.critic_loss(state.critics, state, batch, KEY)
    # 0.9 + 0.2 is clipped to 1, and the noise -1 of the third row to -0.3.
    next_q = TARGET_CRITICS @ [[1, 1, 1], [1, 0.9, 0.6]]
    target = [1, 2, 3] + np.array([0.5, 0, 0.5]) * next_q.min(axis=0)
    values = CRITICS @ [[1, 1, 1], [0, 0.5, 0]]
    losses = ((values - target) ** 2).mean(axis=1)

    assert float(loss) == pytest.approx(losses.sum(), rel=1e-5)
    assert metrics["losses/qf1_loss"] == pytest.approx(losses[0], rel=1e-5)
    assert metrics["losses/qf2_loss"] == pytest.approx(losses[1], rel=1e-5)


def test_td3_moves_policy_and_targets_at_every_second_step():
    """Each target moves by tau towards the network that has just been updated."""
    agent, state, _ = td3(tau=0.25)
    first, _ = agent.gradient_step(state, KEY, 1)
    second, _ = agent.gradient_step(state, KEY, 2)
    actor = second.policy.actor

    assert first.policy.actor == state.policy.actor
    assert first.target_actor == state.target_actor
    assert_array_equal(first.target_critics, state.target_critics)
    assert actor > state.policy.actor  # the first critic prefers larger actions
    assert_allclose(second.target_actor, 0.75 * 0.9 + 0.25 * actor, rtol=1e-5)
    wanted = 0.75 * TARGET_CRITICS + 0.25 * second.critics
    assert_allclose(second.target_critics, wanted, rtol=1e-5)


def test_td3_bc_imitates_and_maximises_the_value_in_its_own_unit():
    """The loss is eq. 5. The policy changes at every second step."""
    module = other_algorithm("td3_bc_jax")
    args = module.Args(offline_data="x", offline_fraction=0.5, bc_alpha=2.0, hidden_sizes=(5,))
    agent = module.Agent(args, box(1), BOUNDS)
    state = jax.jit(agent.init)(KEY)
    windows = windows_by_hand()
    windows = windows._replace(action=windows.action[..., None] / 2)
    batch = agent.to_transitions(windows, KEY)
    networks = state.networks
    loss = agent.actor_loss(networks.actor, networks.critics, batch)

    action = np.tanh(agent.actor.apply(networks.actor, batch.observation))
    q = np.asarray(agent.q_values(networks.critics, batch.observation, action))[0]
    rows = np.asarray(batch.valid)
    imitation = ((action - batch.action) ** 2).mean(axis=1)[rows].mean()
    assert_allclose(loss, imitation - 2 * q[rows].mean() / abs(q[rows]).mean(), rtol=1e-5)
    agent.replay = SimpleNamespace(sample=lambda *inputs: SimpleNamespace(experience=windows))
    first, _ = agent.gradient_step(state, KEY, 1)
    second, _ = agent.gradient_step(state, KEY, 2)
    of_actor = [ravel_pytree(x.networks.actor)[0] for x in (state, first, second)]
    assert_array_equal(of_actor[0], of_actor[1])
    assert (of_actor[0] != of_actor[2]).any()


@pytest.mark.parametrize("penalty", [0.0, 3.0])
def test_cql_lowers_the_values_of_other_actions(penalty):
    """The penalty is that of eq. 4 of Kumar et al. 2020."""
    module = other_algorithm("cql_jax")
    agent = module.Agent(module.Args(penalty=penalty, hidden_sizes=(5,)), box(1), TWO)
    state = jax.jit(agent.init)(KEY)
    batch = agent.to_transitions(windows_by_hand(), KEY)
    plain = module.DQN.loss
    loss, metrics = plain(agent, state.params, state.target_params, batch)

    q_values = np.asarray(agent.network.apply(state.params, batch.observation))
    next_q = np.asarray(agent.network.apply(state.target_params, batch.next_observation))
    taken = q_values[np.arange(len(q_values)), batch.action]
    rows = np.asarray(batch.valid)
    errors = (batch.reward + batch.discount * next_q.max(axis=1) - taken)[rows] ** 2
    excess = (scipy.special.logsumexp(q_values, axis=1) - taken)[rows]
    assert_allclose(loss, errors.mean() + penalty * excess.mean(), rtol=1e-5)
