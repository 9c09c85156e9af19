"""docs/other_algorithms/: the diffs apply, and the scripts are right, against plain loops."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import on_policy
import pytest
import scipy.special
from by_hand import TWO, box, dense, linear, random_rollout, windows_by_hand
from helpers import OTHER_ALGORITHMS, ROOT, diff_of, hunks, other_algorithm
from jax.flatten_util import ravel_pytree
from numpy.testing import assert_allclose, assert_array_equal
from on_policy import perceptron
from scipy.special import expit
from small_agents import random_steps, train_step

from cleanreplay import memory_tasks  # noqa: F401  (registers)
from cleanreplay.compiled import make_trainer

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
REPLAY = dict(num_envs=4, train_frequency=40, learning_starts=8, batch_size=8, buffer_size=100)
ROLLOUT = dict(num_envs=4, num_steps=10, num_minibatches=2, update_epochs=1)
SIZES = {
    "td3_bc_jax": REPLAY | dict(offline_data="data.npz", offline_fraction=0.5),
    "rnd_ppo_jax": ROLLOUT,
    "gru_ppo_jax": ROLLOUT | dict(sequence_length=10, hidden_size=4),
    "attention_ppo_jax": ROLLOUT | dict(sequence_length=10, hidden_size=4, context_length=3),
}
WITHOUT_LAYERS = ("gru_ppo_jax", "attention_ppo_jax")


@pytest.mark.parametrize("name", OTHER_ALGORITHMS)
def test_a_copy_learns_from_a_rollout(name):
    module = other_algorithm(name)
    layers = {} if name in WITHOUT_LAYERS else dict(hidden_sizes=(5,))
    args = module.Args(**SIZES.get(name, REPLAY), **layers)
    agent = module.Agent(args, box(1), BOUNDS if name in OF_BOX else TWO)
    agent.train_step = jax.jit(agent.train_step)
    rollout = random_steps(agent)
    state = jax.jit(agent.init)(KEY)
    after, _, metrics = train_step(agent, state, rollout, KEY, 0, rollout.observation[0])

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


# Munchausen DQN: Q(s, .) is s * params, and a window has three steps


def munchausen(**flags):
    """Makes the agent, and random windows [20, 4] of steps in which episodes end."""
    module = other_algorithm("munchausen_dqn_jax")
    agent = linear(module, module.Args(gamma=0.8, n_step=3, batch_size=20, **flags), 2, 3)
    steps, _ = random_rollout(np.random.default_rng(3), 4, np.zeros(20, bool), features=2)
    steps = steps._replace(reward=3 * steps.reward)
    return agent, module.Step(*[x.swapaxes(0, 1) for x in steps])


def log_policy(q_values, action, temperature):
    """Returns tau log pi(a|s), of the policy softmax(Q / tau)."""
    return temperature * scipy.special.log_softmax(q_values / temperature)[action]


def plain_target(args, step, q_target):
    """The target of one window in its order, eq. 3 of the paper for n = 1."""
    target = 0.0
    for k in range(3):
        action = step.action[k]
        bonus = log_policy(q_target[k], action, args.temperature)
        bonus = np.clip(bonus, args.min_log_policy, 0)
        entropy = -bonus if k > 0 else 0
        reward = np.sign(step.reward[k]) if args.clip_rewards else step.reward[k]
        target += 0.8**k * (reward + entropy + args.munchausen_alpha * bonus)
        if step.terminated[k] or step.truncated[k]:
            break
    if step.terminated[k]:
        return target
    following = q_target[k + 1]
    values = [q - log_policy(following, a, args.temperature) for a, q in enumerate(following)]
    policy = scipy.special.softmax(following / args.temperature)
    return target + 0.8 ** (k + 1) * (policy * values).sum()


@pytest.mark.parametrize("clip_rewards", [False, True])
def test_the_target_of_munchausen_is_that_of_a_plain_loop(clip_rewards):
    """The log-policy is clipped for some steps, and the sign of a reward is that of its own."""
    flags = dict(munchausen_alpha=0.7, temperature=0.5, min_log_policy=-0.6)
    agent, windows = munchausen(**flags, clip_rewards=clip_rewards)
    online, target = np.random.default_rng(0).normal(size=(2, 2, 3))
    batch = agent.to_transitions(windows, KEY, jnp.float32(target.ravel()))
    loss, _ = agent.loss(jnp.float32(online.ravel()), jnp.float32(target.ravel()), batch)

    q_target = windows.observation @ target
    rows = [type(windows)(*[x[i] for x in windows]) for i in range(20)]
    targets = [plain_target(agent.args, *row) for row in zip(rows, q_target, strict=True)]
    values = (windows.observation[:, 0] @ online)[np.arange(20), windows.action[:, 0]]
    valid = windows.valid[:, 0]
    assert_allclose(loss, ((targets - values)[valid] ** 2).mean(), rtol=1e-5)


def test_munchausen_learns_nothing_from_n_steps_if_each_is_consistent():
    """With the rewards that each step's own target wants, the target of three steps is Q, too."""
    agent, windows = munchausen(temperature=0.5, min_log_policy=-99.0)
    weights = np.random.default_rng(0).normal(size=(2, 3))
    q_values = windows.observation @ weights
    taken = np.take_along_axis(q_values, windows.action[..., None], axis=-1)[..., 0]
    values = 0.5 * scipy.special.logsumexp(q_values / 0.5, axis=-1)
    following = np.where(windows.terminated[:, :-1], 0, values[:, 1:])
    reward = taken[:, :-1] - 0.9 * (taken - values)[:, :-1] - 0.8 * following
    windows = windows._replace(reward=np.float32(np.append(reward, reward[:, :1], axis=1)))
    params = jnp.float32(weights.ravel())
    batch = agent.to_transitions(windows, KEY, params)
    loss, _ = agent.loss(params, params, batch)

    assert abs(reward).mean() > 0.3
    assert loss < 1e-10


# PPO with a GRU or with attention: a step in NumPy, from the recurrent state that is stored with it

OF_MEMORY = pytest.mark.parametrize("name", ["gru_ppo_jax", "attention_ppo_jax"])
SMALL_MEMORY = {
    "gru_ppo_jax": dict(hidden_size=5, sequence_length=8),
    "attention_ppo_jax": dict(hidden_size=4, context_length=3, num_heads=2, sequence_length=8),
}


def gru_step(layers, hidden, x):
    """Takes a step of a GRU of flax: the new hidden state."""
    reset = expit(dense(layers["ir"], x) + dense(layers["hr"], hidden))
    update = expit(dense(layers["iz"], x) + dense(layers["hz"], hidden))
    new = np.tanh(dense(layers["in"], x) + reset * dense(layers["hn"], hidden))
    return (1 - update) * new + update * hidden


def attend(layers, past, x):
    """Adds to features [H] what they attend to: themselves and past [K, H] of the episode."""
    seen = np.append(past, x[None], axis=0)

    def project(name, rows):
        kernel, bias = layers[name]["kernel"], layers[name]["bias"]
        return np.einsum("kh,hnd->nkd", rows, kernel) + bias[:, None]

    query, key, value = project("query", x[None]), project("key", seen), project("value", seen)
    biases = layers["bias"][:, : len(seen)][:, ::-1]  # the last one is of the step itself
    scores = (query * key).sum(axis=-1) / np.sqrt(2) + biases
    attended = np.einsum("nk,nkd->nd", scipy.special.softmax(scores, axis=1), value)
    return x + np.einsum("nd,ndh->h", attended, layers["out"]["kernel"]) + layers["out"]["bias"]


def plain_step(params, observation, memory):
    """Computes the output, V(s) and the next recurrent state of a step, without the last action."""
    params = jax.tree.map(np.float64, params["params"])
    *memory, last_action = memory
    x = np.append(np.tanh(dense(params["encoder_0"], observation)), last_action)
    if "gru" in params:
        x = gru_step(params["gru"], memory[0], x)
        memory = [x]
    else:
        past, exists = memory
        feature = dense(params["embedding"], x)
        x = attend(params["attention"], past[exists > 0], feature)
        memory = [np.append(past[1:], feature[None], axis=0), np.append(exists[1:], 1)]
    return perceptron(params, "actor", x), perceptron(params, "critic", x)[0], memory


def memories_by_hand(params, steps):
    """The recurrent states [S - 1, N, ...] after all steps but the last one."""
    shape = steps.valid[1:].shape
    found = [
        plain_step(params, steps.observation[i], row(steps.memory, i)) for i in np.ndindex(shape)
    ]
    arrays = [np.stack(x) for x in zip(*[memory for *_, memory in found], strict=True)]
    return [x.reshape(*shape, *x.shape[1:]) for x in arrays]


def row(tree, i):
    return [np.asarray(x[i]) for x in tree]


@cache
def with_memory(name):
    script = other_algorithm(name)
    on_policy.SIZES[script] = SMALL_MEMORY[name]
    return on_policy.collected(script, "multi")


@cache
def compiled_steps(name):
    """Steps of a compiled rollout of episodes of four steps, and the parameters that acted."""
    script = other_algorithm(name)
    args = script.Args(**on_policy.SMALL | SMALL_MEMORY[name])
    env_id = "cleanreplay.memory_tasks:phys2d/MemoryChain-v0"
    trainer = make_trainer(script, args, script.Run(env_id=env_id, env_kwargs='{"length": 4}'))
    params = trainer.agent.policy_params(on_policy.random_state(trainer.agent))
    start = trainer.envs.reset(KEY, 4)
    _, (steps, _) = jax.jit(trainer.envs.collect)(start, params, KEY, 0)
    return params[0], jax.tree.map(np.asarray, steps)


def ordinary_steps(name):
    case = with_memory(name)
    steps = case.rollouts[-1]
    return case.state.params, steps._replace(observation=(steps.observation - np.float32(0.2)) / 2)


@OF_MEMORY
@pytest.mark.parametrize("steps_of", [ordinary_steps, compiled_steps], ids=["ordinary", "compiled"])
def test_the_recurrent_state_is_that_of_numpy_and_zero_where_an_episode_begins(name, steps_of):
    params, steps = steps_of(name)
    valid = steps.valid[:-1]
    wanted = memories_by_hand(params, steps)

    assert 0.2 < valid.mean() < 0.9
    for x, y in zip(steps.memory, wanted, strict=False):
        assert_allclose(x[1:][valid], y[valid], rtol=1e-4, atol=1e-5)
        assert_array_equal(x[1:][~valid], np.zeros_like(x[1:][~valid]))
    assert steps.memory[-1][1:][valid].any(axis=-1).all()
    assert not steps.memory[-1][1:][~valid].any()


@OF_MEMORY
def test_sequences_give_what_single_steps_give(name):
    """The whole rollout and its sequences, over ends of episodes."""
    agent, state, rollouts, next_observation, *_ = with_memory(name)
    params, steps = ordinary_steps(name)
    rows = [
        plain_step(params, steps.observation[i], row(steps.memory, i)) for i in np.ndindex(24, 4)
    ]
    outputs = np.reshape([output for output, *_ in rows], (24, 4, -1))
    values = np.reshape([value for _, value, _ in rows], (24, 4))
    output, value = jax.jit(agent.unroll)(params, steps, (next_observation - 0.2) / 2)
    sequences = jax.tree.map(lambda x: agent.to_sequences(x).swapaxes(0, 1), steps)
    in_loss, *_ = jax.jit(agent.network.apply)(params, *agent.inputs(sequences))

    assert_allclose(output, outputs, rtol=1e-4, atol=1e-4)
    assert_allclose(value[:-1], values, rtol=1e-4, atol=1e-4)
    assert_allclose(in_loss.swapaxes(0, 1), agent.to_sequences(output), rtol=1e-4, atol=1e-4)


# PPO with RND


@cache
def with_rnd():
    script = other_algorithm("rnd_ppo_jax")
    on_policy.SIZES[script] = dict(
        hidden_sizes=(5,),
        int_gamma=0.7,
        int_coef=0.5,
        ext_coef=3.0,
        norm_adv=False,
        clip_vloss=False,
    )
    return on_policy.collected(script, "multi"), on_policy.learned(script, "multi")


def embedding(params, x):
    """Applies the layers with relu, but for the last one."""
    *layers, last = [params["params"][f"Dense_{i}"] for i in range(len(params["params"]))]
    for layer in layers:
        x = np.maximum(dense(layer, x), 0)
    return dense(last, x)


class Counted(NamedTuple):
    """What RND makes of rollouts in their order."""

    following: np.ndarray
    target: np.ndarray
    reward: np.ndarray


def plain_rnd(state, rollouts, following, gamma):
    """Computes the intrinsic rewards [S, N] of the last rollout, and inputs and targets [S, N]."""
    seen = np.zeros((0, 3))
    returns, weights = [], np.zeros(0)
    running = np.zeros(4)
    for rollout, after in zip(rollouts, following, strict=True):
        seen = np.append(seen, rollout.observation[rollout.valid], axis=0)
        after = np.append(rollout.observation[1:], after[None], axis=0)
        x = ((after - seen.mean(axis=0)) / seen.std(axis=0)).clip(-5, 5)
        target = embedding(state.target, x)
        error = embedding(state.params.predictor, x) - target
        reward = (error**2).mean(axis=-1) * rollout.valid
        for of_step, valid in zip(reward, rollout.valid, strict=True):
            running = np.where(valid, gamma * running + of_step, running)
            returns.extend(running[valid])
        rows = rollout.valid.sum()
        weights *= min(1, rows / max(weights.sum(), 1))  # of the rollouts before: half at most
        weights = np.append(weights, np.ones(rows))
    mean = np.average(returns, weights=weights)
    return Counted(x, target, reward / np.average((returns - mean) ** 2, weights=weights) ** 0.5)


def test_the_intrinsic_reward_is_the_normalised_error_of_the_prediction():
    """Over three rollouts: statistics of observations and of returns that do not end."""
    case, _ = with_rnd()
    intrinsic = jax.jit(case.agent.intrinsic_rewards)
    state = case.state
    following = [*[rollout.observation[0] for rollout in case.rollouts[1:]], case.next_observation]
    following[0] = following[0] + np.float32(40)  # clipped
    for rollout, after in zip(case.rollouts, following, strict=True):
        observations = np.append(rollout.observation, after[None], axis=0).reshape(-1, 3)
        state, inputs, target, reward = intrinsic(state, observations, rollout.valid)
    wanted = plain_rnd(case.state, case.rollouts, following, 0.7)

    assert_allclose(inputs.reshape(24, 4, 3), wanted.following, rtol=1e-4, atol=1e-4)
    assert_allclose(target.reshape(24, 4, -1), wanted.target, rtol=1e-4, atol=1e-3)
    assert_allclose(reward, wanted.reward, rtol=1e-4)


def plain_gae_over_ends(reward, valid, value, gamma, gae_lambda):
    """Advantages of each environment without the steps that only reset: 0 there."""
    advantage = np.zeros_like(reward)
    for i in range(reward.shape[1]):
        following, later = value[-1, i], 0.0
        for t in reversed(np.flatnonzero(valid[:, i])):
            later = reward[t, i] + gamma * following - value[t, i] + gamma * gae_lambda * later
            following, advantage[t, i] = value[t, i], later
    return advantage


def test_rnd_has_advantages_of_both_rewards():
    """Those of intrinsic rewards continue over the ends of episodes."""
    (agent, state, rollouts, next_observation, *_), after = with_rnd()
    rollout, valid = rollouts[-1], rollouts[-1].valid
    found = np.reshape(after.batch.advantage, (24, 4, 2))
    _, last = agent.network.apply(state.params.policy, (next_observation - 0.2) / 2)
    value = np.append(np.reshape(after.batch.value, (24, 4, 2)), last[None], axis=0)
    reward = plain_rnd(state, [rollout], [next_observation], 0.7).reward
    over_ends = plain_gae_over_ends(reward, valid, value[..., 1], 0.7, 0.8)
    mean = float(reward[valid].mean())
    of_episodes = on_policy.plain_gae(rollout, np.sign(rollout.reward), value[..., 0], 0.9, 0.8)

    assert_allclose(found[..., 0], of_episodes, rtol=1e-3, atol=1e-4)
    assert_allclose(found[..., 1][valid], over_ends[valid], rtol=1e-3, atol=1e-4)
    assert after.metrics["charts/intrinsic_reward"] == pytest.approx(mean, rel=1e-3)


def test_the_loss_of_rnd_has_two_values_and_the_prediction():
    (agent, state, *_), after = with_rnd()
    batch = after.batch
    loss, metrics = jax.jit(agent.loss)(state.params, batch)
    valid = np.asarray(batch.valid)
    advantage = np.asarray(batch.advantage)[valid]
    predicted = embedding(state.params.predictor, np.asarray(batch.following))
    error = float(((predicted - batch.embedding) ** 2)[valid].mean())
    policy_loss = -(3 * advantage[:, 0] + 0.5 * advantage[:, 1]).mean()
    value_loss = (advantage**2).sum(axis=1).mean() / 2
    entropy = float(metrics["losses/entropy"])

    assert metrics["losses/predictor_loss"] == pytest.approx(error, rel=1e-4)
    assert metrics["losses/value_loss"] == pytest.approx(value_loss, rel=1e-4)
    wanted = policy_loss + 0.5 * value_loss - 0.01 * entropy + error
    assert loss == pytest.approx(wanted, rel=1e-4)
