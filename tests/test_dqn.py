"""dqn_jax.py: its pure functions against hand computations, its collector against environments
stepped alone, a whole run against a plain loop, and what it learns against known values. Of
images.py the network.
"""

from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from types import SimpleNamespace

import environments  # noqa: F401  (registers)
import flax.linen as nn
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import slow
from events import read_events
from scipy.stats import chisquare

import dqn_jax
import images
from dqn_jax import DQN, Args, Run, Step, Training, UsageError, train


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


VECTOR = np.zeros(1, np.float32)
TWO = gym.spaces.Discrete(2)


def linear(module, args, features=1, num_actions=2):
    """The algorithm of a script, with Q(s, .) = s @ params and plain gradient descent."""

    class Linear(module.Algorithm):
        def q_values(self, params, observation):
            return observation @ params.reshape(features, num_actions)

    alg = Linear(args, np.zeros(features, np.float32), gym.spaces.Discrete(num_actions))
    alg.optimizer = optax.sgd(0.1)
    return alg


def state_of(alg, params, target_params):
    params, target_params = jnp.asarray(params), jnp.asarray(target_params)
    opt_state, replay = alg.optimizer.init(params), alg.replay.init(alg.example)
    state_class = type(jax.eval_shape(alg.init, jax.random.PRNGKey(0)))
    return state_class(params, target_params, opt_state, replay, jnp.int32(0))


# ------------------------------------------------------------------------------------ the network


def in_order(params):
    """The layers of a QNetwork; with convolutions flax numbers the one of the actions first."""
    layers = [params[f"Dense_{i}"] for i in range(len(params))]
    return layers if len(layers) == 3 else layers[1:] + layers[:1]


def kernels(shape, dtype):
    """Shapes of the layers' kernels of a QNetwork for observations of that shape."""
    network = dqn_jax.QNetwork(2)
    x = jax.ShapeDtypeStruct((2, *shape), dtype)
    out, params = jax.eval_shape(network.init_with_output, jax.random.PRNGKey(0), x)
    assert (out.shape, out.dtype) == ((2, 2), jnp.float32)
    return [layer["kernel"].shape for layer in in_order(params["params"])]


def after_convolutions(height, width):
    """How many features the convolutions leave of an image, by flax."""
    x = jax.ShapeDtypeStruct((1, height, width, 1), jnp.float32)
    for channels, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        # Rows and columns that do not fill a stride are left out.
        x = jax.ShapeDtypeStruct(
            (1, x.shape[1] // stride * stride, x.shape[2] // stride * stride, x.shape[3]), x.dtype
        )
        conv = nn.Conv(channels, (size, size), (stride, stride), "VALID")
        x, _ = jax.eval_shape(conv.init_with_output, jax.random.PRNGKey(0), x)
    return int(np.prod(x.shape))


def test_shapes_of_observations():
    """Images of 36x36 and more keep their form, with the channels last; others are flattened."""
    forms = {
        (36, 36): (36, 36, 1),
        (84, 84): (84, 84, 1),
        (36, 40, 3): (36, 40, 3),
        (40, 36, 12): (40, 36, 12),
        (4, 36, 40): (36, 40, 4),
        (1, 84, 84): (84, 84, 1),
        (2, 3, 36, 40): (36, 40, 6),
        (4, 84, 84, 1): (84, 84, 4),
    }
    flat = [(128,), (8, 8), (35, 40), (40, 35), (40, 35, 3), (4, 35, 36), (2, 3, 35, 36)]
    for shape in [*forms, *flat]:
        size = int(np.prod(shape))
        perceptron = [(size, 120), (120, 84), (84, 2)]
        assert kernels(shape, jnp.float32) == perceptron, shape
        if shape in flat:
            assert kernels(shape, jnp.uint8) == perceptron, shape
            continue
        height, width, channels = forms[shape]
        x = jax.ShapeDtypeStruct((2, *shape), jnp.float32)
        out = jax.eval_shape(images.channels_last, x)
        assert (out.shape, out.dtype) == ((2, height, width, channels), jnp.float32), shape
        features = after_convolutions(height, width)
        convolutions = [(64 * channels, 32), (512, 64), (576, 64), (features, 512), (512, 2)]
        assert kernels(shape, jnp.uint8) == convolutions, shape


def test_values_of_observations():
    """Images are divided by 255, all else is the number it is; stacked frames become channels."""
    x = np.random.default_rng(0).integers(256, size=(2, 4, 36, 40), dtype=np.uint8)
    last = np.moveaxis(x, 1, -1)
    np.testing.assert_array_equal(images.channels_last(jnp.asarray(x)), last)
    network = dqn_jax.QNetwork(2)
    apply = jax.jit(network.apply)
    params = jax.jit(network.init)(jax.random.PRNGKey(0), x)
    np.testing.assert_array_equal(apply(params, x), apply(params, last))

    class Features(nn.Module):
        """What the first layer of `nature_cnn` sees."""

        @nn.compact
        def __call__(self, x):
            seen = []
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(images, "convolve", lambda x, **_: seen.append(x) or x)
                images.nature_cnn(x)
            return seen[0]

    seen, _ = Features().init_with_output(jax.random.PRNGKey(0), x)
    assert seen.dtype == jnp.float32
    np.testing.assert_allclose(seen, last / 255, rtol=1e-6)
    for other in (x[:, :, 0], x.astype(np.float32)):
        params = jax.jit(network.init)(jax.random.PRNGKey(0), other)
        numbers = other.reshape(2, -1).astype(np.float32)
        np.testing.assert_array_equal(apply(params, other), apply(params, numbers))


@pytest.mark.parametrize(
    ("env_id", "layers"),
    [
        ("Image-v0", [(64, 120), (120, 84), (84, 2)]),
        ("CartPole-v1", [(4, 120), (120, 84), (84, 2)]),
        # 8x8 pixels of each channel, 4x4 of 32, 3x3 of 64; and the one place that is left.
        ("ImageGrey-v0", [(64, 32), (512, 64), (576, 64), (64, 512), (512, 2)]),
        ("ImageColour-v0", [(192, 32), (512, 64), (576, 64), (64, 512), (512, 2)]),
        ("ProbeImage-v0", [(256, 32), (512, 64), (576, 64), (64, 512), (512, 2)]),
    ],
)
def test_network_of_an_environment(env_id, layers):
    space = gym.make(env_id).observation_space
    assert kernels(space.shape, space.dtype) == layers


class FlaxNatureCNN(nn.Module):
    """The network of Mnih et al. 2015 as anyone would write it."""

    @nn.compact
    def __call__(self, x):
        for i, (channels, size, stride) in enumerate(((32, 8, 4), (64, 4, 2), (64, 3, 1))):
            conv = nn.Conv(channels, (size, size), (stride, stride), "VALID", name=f"Dense_{i}")
            x = nn.relu(conv(x))
        x = nn.relu(nn.Dense(512, name="Dense_3")(x.reshape(len(x), -1)))
        return nn.Dense(3, name="Dense_4")(x)


@pytest.mark.parametrize("shape", [(44, 40, 4), (43, 50, 3)])
def test_convolutions_are_those_of_flax(shape):
    """With the same weights, also where the stride does not divide the height or the width."""
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(2, *shape), dtype=np.uint8)
    network = dqn_jax.QNetwork(3)
    params = jax.jit(network.init)(jax.random.PRNGKey(1), x)["params"]
    for layer in params.values():  # flax begins with biases of 0
        layer["bias"] = rng.normal(size=layer["bias"].shape).astype(np.float32) / 10
    same = {f"Dense_{i}": dict(layer) for i, layer in enumerate(in_order(params))}
    for i, (size, stride) in enumerate(((8, 4), (4, 2), (3, 1))):
        kernel, k = np.asarray(same[f"Dense_{i}"]["kernel"]), size // stride
        kernel = kernel.reshape(k, k, stride, stride, -1, kernel.shape[-1]).swapaxes(1, 2)
        same[f"Dense_{i}"]["kernel"] = kernel.reshape(size, size, -1, kernel.shape[-1])
    out = jax.jit(network.apply)({"params": params}, x)
    wanted = jax.jit(FlaxNatureCNN().apply)({"params": same}, x.astype(np.float32) / 255)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-5)


# ------------------------------------------------------------------------------------ the algorithm


def windows_by_hand(invalid=False):
    """Three windows of two steps, in which every observation is 1; a fourth one full of garbage.

    Only the first step of a window counts, and the observation of the second one.
    """
    garbage = [1e6] * 4
    return Step(
        observation=jnp.ones((4, 2, 1)).at[3].set(1e6),
        action=jnp.array([[0, 1], [1, 0], [0, 1], [1, 1]]),
        reward=jnp.array([[1.0, 2.0, 3.0, 1e6], garbage]).T,
        terminated=jnp.array([[False, True, False, False], [True] * 4]).T,
        truncated=jnp.array([[False, False, True, True], [True] * 4]).T,
        is_step=jnp.array([[not invalid] * 3 + [False], [True] * 4]).T,
    )


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_by_hand(double_q):
    """Terminated: the reward alone. Truncated: bootstrapped as any other step. Resets: nothing."""
    alg = linear(dqn_jax, Args(gamma=0.5, double_q=double_q))
    params, target_params = jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0])
    grad_fn = jax.jit(jax.value_and_grad(alg.loss, has_aux=True))
    (loss, metrics), grad = grad_fn(params, target_params, alg.fold(windows_by_hand()))
    # Action 1 is best online, action 0 in the target network, which judges either of them.
    bootstrap = 4.0 if double_q else 10.0
    errors = np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
    assert loss == pytest.approx(np.mean(errors**2))
    assert metrics["losses/td_loss"] == loss
    assert metrics["losses/q_values"] == pytest.approx((1 + 2 + 1) / 3)
    # The gradient does not flow through the target.
    np.testing.assert_allclose(grad, [-2 * (errors[0] + errors[2]) / 3, -2 * errors[1] / 3])


def test_loss_without_a_valid_row():
    alg = linear(dqn_jax, Args())
    grad_fn = jax.jit(jax.value_and_grad(alg.loss, has_aux=True))
    batch = alg.fold(windows_by_hand(invalid=True))
    out = grad_fn(jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0]), batch)
    zero = {"losses/td_loss": 0, "losses/q_values": 0}
    jax.tree.map(np.testing.assert_array_equal, out, ((0, zero), np.zeros(2)))


def test_schedule():
    args = Args(total_timesteps=1_000, num_envs=8, learning_starts=200, exploration_fraction=0.5)
    alg = linear(dqn_jax, args)
    assert alg.rollout_shape == (5, 8)
    schedule = alg.schedule(np.array([0, 120, 160, 200, 240, 480, 520, 960]))
    epsilon = [1, 0.772, 0.696, 0.62, 0.544, 0.088, 0.05, 0.05]
    np.testing.assert_allclose(schedule["epsilon"], epsilon, rtol=1e-6)
    # The iteration from step 160 to 200 ends where learning starts.
    np.testing.assert_array_equal(schedule["gradient_steps"], [0, 0, 0, 4, 4, 4, 4, 4])
    passes = linear(dqn_jax, replace(args, learning_starts=201))  # within that from 200 to 240
    np.testing.assert_array_equal(passes.schedule(np.array([160, 200]))["gradient_steps"], [0, 4])
    at_once = linear(dqn_jax, replace(args, exploration_fraction=0.0))
    np.testing.assert_allclose(at_once.schedule(np.array([0, 40]))["epsilon"], 0.05)


@pytest.mark.parametrize("num_envs", [1, 8, 64])
@pytest.mark.parametrize("train_frequency", [1, 10, 16])
def test_ratio_of_gradient_steps_to_environment_steps(num_envs, train_frequency):
    """One gradient step per train_frequency environment steps, whatever the number of them."""
    args = Args(total_timesteps=6_400, num_envs=num_envs, learning_starts=1_600)
    alg = linear(dqn_jax, replace(args, train_frequency=train_frequency))
    size = alg.steps_per_iteration
    steps = np.arange(0, 6_400, size)
    begun = 1_600 // size * size  # the iteration that passes learning_starts learns whole
    learning = len(steps) * size - begun
    assert alg.schedule(steps)["gradient_steps"].sum() == learning / train_frequency


def test_exploration_draws_for_each_step_and_environment():
    args = Args(num_envs=4, train_frequency=8_000)
    alg = linear(dqn_jax, args, num_actions=3)
    draw_noise = partial(jax.jit(alg.draw_noise), jax.random.PRNGKey(0))
    noise = np.asarray(draw_noise({"epsilon": 0.3}))
    assert noise.shape == (2_000, 4)
    for column in noise.T:
        counts = [(column == action).sum() for action in (-1, 0, 1, 2)]
        assert chisquare(counts, 2_000 * np.array([0.7, 0.1, 0.1, 0.1])).pvalue > 1e-3
    # Pairs of environments, and of steps, are independent.
    explores = noise >= 0
    joint = [explores[:, i] * 2 + explores[:, j] for i in range(4) for j in range(i)]
    for pair in [*joint, (explores[1:] * 2 + explores[:-1]).ravel()]:
        counts = np.bincount(pair, minlength=4)
        wanted = len(pair) * np.array([0.49, 0.21, 0.21, 0.09])
        assert chisquare(counts, wanted).pvalue > 1e-3
    assert set(np.ravel(draw_noise({"epsilon": 0.0}))) == {-1}
    assert set(np.ravel(draw_noise({"epsilon": 1.0}))) == {0, 1, 2}


def test_act_is_greedy_where_the_noise_says_so():
    alg = linear(dqn_jax, Args(num_envs=4), num_actions=3)
    observation = np.array([[1.0], [-1.0], [1.0], [-1.0]], np.float32)
    action = alg.act(jnp.array([5.0, 7.0, 6.0]), observation, np.array([-1, -1, 2, 1], np.int32))
    np.testing.assert_array_equal(action, [1, 0, 2, 1])
    assert alg.no_noise == -1


def random_rollout(rng, steps, resetting, features=1, garbage=0.0):
    """Steps [steps, N] of environments that end at random, and which of them reset at the next.

    The reward of a step that only resets is 0, or `garbage` that should not be looked at.
    """
    n = len(resetting)
    terminated, truncated, is_step = np.zeros((3, steps, n), bool)
    for t in range(steps):
        is_step[t] = ~resetting
        terminated[t] = is_step[t] & (rng.random(n) < 0.15)
        truncated[t] = is_step[t] & ~terminated[t] & (rng.random(n) < 0.15)
        resetting = terminated[t] | truncated[t]
    return Step(
        observation=rng.normal(size=(steps, n, features)).astype(np.float32),
        action=rng.integers(2, size=(steps, n), dtype=np.int32),
        reward=np.where(is_step, rng.normal(size=(steps, n)), garbage).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        is_step=is_step,
        next_observation=rng.normal(size=(n, features)).astype(np.float32),
    ), resetting


class PlainReplay:
    """All steps ever stored, as a list [row][environment]."""

    def __init__(self):
        self.rows = []

    def add(self, rollout):
        rollout = rollout._replace(next_observation=None)
        self.rows += [jax.tree.map(lambda x, t=t: x[t], rollout) for t in range(len(rollout[0]))]

    def transition(self, index, num_envs, n_step, gamma):
        """Observation, action, reward, discount, next observation; None of one that only resets."""
        row, i = divmod(int(index), num_envs)
        stream = [jax.tree.map(lambda x: x[i], step) for step in self.rows[row : row + n_step + 1]]
        total, m, first = 0.0, 0, stream[0]
        if not first.is_step:
            return None
        while True:
            step, m = stream[m], m + 1
            total += gamma ** (m - 1) * float(step.reward)
            if step.terminated:
                return first.observation, first.action, total, 0.0, stream[m].observation
            if step.truncated or m == n_step:
                return first.observation, first.action, total, gamma**m, stream[m].observation

    def batch(self, *where):
        """The transitions of indices as arrays, and which of them count."""
        found = [self.transition(index, *where[1:]) for index in where[0]]
        valid = np.array([x is not None for x in found])
        return *map(np.array, zip(*[x for x in found if x is not None], strict=True)), valid


def test_small_gradients_make_small_steps():
    """Kingma and Ba 2015, algorithm 1: the first step is learning rate * g / (abs(g) + epsilon)."""
    alg = dqn_jax.Algorithm(Args(adam_epsilon=0.01, learning_rate=0.1), VECTOR, TWO)
    gradient = jnp.array([1e-4, -0.01, 1.0])
    step, _ = alg.optimizer.update(gradient, alg.optimizer.init(gradient))
    np.testing.assert_allclose(step, -0.1 * gradient / (abs(gradient) + 0.01), rtol=1e-4)


@pytest.mark.parametrize(
    "flags",
    [
        dict(n_step=1, target_network_frequency=10, tau=1.0),
        dict(n_step=3, target_network_frequency=4, tau=0.5, double_q=True, clip_rewards=True),
    ],
)
def test_train_step_against_a_plain_loop(flags):
    """Stored, sampled, updated, target moved when it is due: one thing at a time.

    The buffer of 10 steps of 3 environments is overwritten; a step that only resets is garbage.
    """
    args = Args(**flags, num_envs=3, train_frequency=4, batch_size=8, buffer_size=28, gamma=0.9)
    alg, rng, plain = linear(dqn_jax, args), np.random.default_rng(0), PlainReplay()
    params, target_params = np.array([0.5, -0.5]), np.array([1.5, 0.5])
    state = state_of(alg, params.astype(np.float32), target_params.astype(np.float32))
    step, resetting, updates, resets = jax.jit(alg.train_step), np.zeros(3, bool), 0, 0
    period = {10: 2, 4: 1}[args.target_network_frequency]
    for i in range(4):
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        key = jax.random.fold_in(jax.random.PRNGKey(3), i)
        state, metrics = step(state, rollout, {"gradient_steps": 3 if i else 0}, key)
        reward = np.sign(rollout.reward) if args.clip_rewards else rollout.reward
        plain.add(rollout._replace(reward=reward))
        for j in range(3 if i else 0):
            drawn = alg.replay.sample(state.replay, jax.random.split(key, 3)[j], 8).indices
            assert min(drawn) >= 3 * max(len(plain.rows) - 10, 0)  # what has not been overwritten
            batch = plain.batch(drawn, 3, args.n_step, 0.9)
            observation, action, reward, discount, following, valid = batch
            next_q, rows = following * target_params, np.arange(valid.sum())
            best = (following * (params if args.double_q else target_params)).argmax(-1)
            error = reward + discount * next_q[rows, best] - (observation * params)[rows, action]
            value = (observation * params)[rows, action].mean()
            grad = np.zeros(2)
            np.add.at(grad, action, -2 / len(rows) * error * observation[:, 0])
            params, updates = params - 0.1 * grad, updates + 1
            if updates % period == 0:
                target_params = args.tau * params + (1 - args.tau) * target_params
            resets += (~valid).sum()
        if i:  # of the last gradient step
            assert metrics["losses/td_loss"] == pytest.approx(np.mean(error**2), rel=1e-4)
            assert metrics["losses/q_values"] == pytest.approx(value, rel=1e-4)
        else:
            assert all(np.isnan(x) for x in metrics.values())
        np.testing.assert_allclose(state.params, params, rtol=1e-4)
        np.testing.assert_allclose(state.target_params, target_params, rtol=1e-4)
    assert int(state.updates) == updates == 9
    assert resets > 5
    assert int(alg.replay.size(state.replay)) == 30


@pytest.mark.parametrize("n_step", [1, 3])
def test_no_window_goes_across_a_restart(n_step):
    """Every window that is held, twice: where the environments went on, and where they started.

    Of the rows before a restart the last one is lost, and the one before it is cut off there.
    """
    args = Args(n_step=n_step, num_envs=6, train_frequency=24, batch_size=8, buffer_size=60)
    alg, rng = linear(dqn_jax, replace(args, gamma=0.9)), np.random.default_rng(1)
    state, step = state_of(alg, *np.zeros((2, 2), np.float32)), jax.jit(alg.train_step)
    resetting, plain = np.zeros(6, bool), PlainReplay()
    for _ in range(3):
        rollout, resetting = random_rollout(rng, 4, resetting)
        state, _ = step(state, rollout, {"gradient_steps": 0}, jax.random.PRNGKey(0))
        plain.add(rollout)
    restarted = alg.restart(state)
    goes_on = plain.rows[10].is_step & ~plain.rows[10].terminated
    assert goes_on.any()
    cut = list(plain.rows)
    cut[10] = cut[10]._replace(truncated=goes_on)
    cut[11] = cut[11]._replace(is_step=np.zeros(6, bool))
    held = np.arange(2, 12)  # rows, in the ring at their number modulo 10
    wanted = jax.tree.map(lambda *x: np.stack(x), *[cut[row] for row in held])
    stored = jax.tree.map(lambda x: np.asarray(x)[held % 10], restarted.replay.storage)
    jax.tree.map(np.testing.assert_array_equal, stored, wanted)
    same = restarted._replace(replay=restarted.replay._replace(storage=state.replay.storage))
    jax.tree.map(np.testing.assert_array_equal, same, state)  # all else stays

    rollout, _ = random_rollout(rng, 4, np.zeros(6, bool))
    plain.add(rollout)
    after_cut = PlainReplay()
    after_cut.rows = [*cut, *plain.rows[12:]]
    rows = range(6, 16 - n_step)  # of 16, the last 10 are held, and a window is n_step + 1 of them
    indices = np.array([6 * row + i for row in rows for i in range(6)])
    fold, valid = jax.jit(alg.fold), []
    for start, steps in ((state, plain), (restarted, after_cut)):
        new, _ = step(start, rollout, {"gradient_steps": 0}, jax.random.PRNGKey(0))
        batch = fold(alg.replay.get(new.replay, indices))
        *expected, is_valid = steps.batch(indices, 6, n_step, 0.9)
        np.testing.assert_array_equal(batch.is_valid, is_valid)
        for got, x in zip(batch, expected, strict=False):
            np.testing.assert_allclose(np.asarray(got)[is_valid], x, rtol=1e-5, atol=1e-6)
        valid.append(is_valid)
    row, environment = np.divmod(indices, 6)
    is_step = np.array([plain.rows[r].is_step[i] for r, i in zip(row, environment, strict=True)])
    assert (~is_step).any()
    assert is_step[row == 11].any()
    np.testing.assert_array_equal(valid[0], is_step)
    np.testing.assert_array_equal(valid[1], is_step & (row != 11))  # only the last row is lost
    # Those that reach the cut are bootstrapped from what was observed last.
    reaching = 0
    for b in np.flatnonzero(valid[1] & (row < 11) & (row + n_step >= 11)):
        i, until_cut = environment[b], range(row[b], 11)
        if any(plain.rows[r].terminated[i] or plain.rows[r].truncated[i] for r in until_cut):
            continue
        reaching += 1
        np.testing.assert_array_equal(batch.next_observation[b], plain.rows[11].observation[i])
        assert batch.discount[b] == pytest.approx(0.9 ** len(until_cut))
        total = sum(0.9**m * plain.rows[r].reward[i] for m, r in enumerate(until_cut))
        assert batch.reward[b] == pytest.approx(total, rel=1e-5)
    assert reaching > 1


# ----------------------------------------------------------------------------------- environments


def kind_of(envs):
    """Whether a native vector version, and what its environments are."""
    native = not isinstance(envs, gym.vector.SyncVectorEnv) or not isinstance(
        envs.envs[0], gym.Wrapper
    )
    return native, getattr(envs, "envs", [envs])[0].unwrapped


@pytest.mark.parametrize(
    ("env_id", "env_kwargs", "native_from", "shape", "reward"),
    [
        ("Counter-v0", "{}", None, (3,), 1),  # there is no native one
        ("CartPole-v1", "{}", 4, (4,), 1),
        ("CartPole-v1", '{"sutton_barto_reward": true}', 4, (4,), 0),
        ("VectorOnly-v0", "{}", 1, (3,), 1),  # there is no other
        ("Preprocessed-v0", "{}", 1, (2,), 1),  # the native one observes something else
        ("TakesKwargs-v0", "{}", 4, (3,), 1),
        ("TakesKwargs-v0", '{"scale": 3}', None, (3,), 3),  # which the native one does not take
        ("Image-v0", '{"shape": [9, 10, 3]}', None, (9, 10, 3), None),
        ("environments:Start-v0", "{}", None, (1,), None),
        # Functional: in the native one all others stand still where one resets.
        ("phys2d/CartPole-v1", "{}", None, (4,), None),
    ],
)
def test_the_environment_is_the_same_at_any_number_of_them(
    env_id, env_kwargs, native_from, shape, reward
):
    run = Run(env_id=env_id, env_kwargs=env_kwargs)
    for n in (1, 2, 4, 8):
        envs = dqn_jax.make_envs(Args(), run, n)
        assert envs.num_envs == n
        assert envs.single_observation_space.shape == shape
        assert kind_of(envs)[0] == (native_from is not None and n >= native_from), n
        if reward is not None:
            envs.reset(seed=0)
            np.testing.assert_array_equal(envs.step(envs.action_space.sample())[1], [reward] * n)
        envs.close()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(env_id="CounterSameStep-v0"), "its autoreset_mode must be NEXT_STEP, not .*SAME_STEP"),
        (Run(env_id="CartPole-v9"), "CartPole-v9 with env_kwargs {}: "),
        (Run(env_id="no_such_module:X-v0"), "no_such_module:X-v0 with env_kwargs {}: "),
        (Run(env_id="Counter-v0", env_kwargs='{"no": 1}'), "unexpected keyword argument 'no'"),
        (Run(env_id="FrozenLake-v1"), r"observations are Discrete\(16\), no Box"),
        (Run(env_id="Pendulum-v1"), r"DQN takes Discrete actions, not Box"),
        (Run(num_seeds=2), "CartPole-v1 trains one agent only"),
        (Run(num_seeds=0, log_interval=-1), "num_seeds must be at least 1, not 0"),
        (Run(log_interval=-1), "log_interval must be at least 1, not -1"),
        (Args(learning_starts=100), "learning_starts must be at least batch_size"),
        (Args(total_timesteps=10_000), "learning_starts must be .* less than total_timesteps"),
        (Args(num_envs=0), "num_envs must be at least 1, not 0"),
        (Args(train_frequency=0, n_step=0), "train_frequency must be at least 1, not 0"),
        (Args(n_step=0), "n_step must be at least 1, not 0"),
    ],
)
def test_mistakes_in_flags_are_found_before_training(run, message, tmp_path):
    args, run = (run, Run()) if isinstance(run, Args) else (Args(), run)
    with pytest.raises(UsageError, match=message):
        train(args, run)
    assert not (tmp_path / "runs").exists()


def test_a_buffer_that_does_not_divide_is_rounded_up():
    """So that it holds at least what was asked for, and at least one window."""
    for size, num_envs, n_step, rows in ((10, 3, 1, 4), (9, 3, 1, 3), (10, 8, 3, 4)):
        alg = linear(dqn_jax, Args(buffer_size=size, num_envs=num_envs, n_step=n_step))
        assert alg.replay.init(alg.example).storage.reward.shape == (rows, num_envs)


# ------------------------------------------------------------------------------------ the collector


def alone(seed, actions):
    """The steps of one Counter that is reset by hand, for as many actions as given."""
    env = gym.make("Counter-v0")
    observation, _ = env.reset(seed=seed)
    steps = []
    for action in actions:
        after, reward, terminated, truncated, _ = env.step(int(action))
        steps.append(Step(observation, action, reward, terminated, truncated, True, after))
        observation = env.reset()[0] if terminated or truncated else after
    return steps


def test_collector_against_environments_stepped_alone():
    """All of every step, over rollouts, with and without exploration."""
    n, rollouts = 3, 5
    alg = linear(dqn_jax, Args(num_envs=n, train_frequency=18), features=3, num_actions=3)
    assert alg.rollout_shape == (6, n)
    envs = dqn_jax.make_envs(alg.args, Run(env_id="Counter-v0"), n)
    observation, _ = envs.reset(seed=5)
    is_step, rng = np.ones(n, bool), np.random.default_rng(0)
    policy = jnp.asarray(rng.normal(size=9), jnp.float32)
    collected, noises, resetting = [], [], []
    for _ in range(rollouts):
        noises.append(rng.integers(-1, 3, size=(6, n), dtype=np.int32))
        resetting.append(~is_step)
        rollout, is_step = dqn_jax.collect_rollout(
            alg, envs, observation, is_step, policy, noises[-1]
        )
        observation = rollout.next_observation
        collected.append(rollout)
    envs.close()
    for before, after in pairwise(collected):
        np.testing.assert_array_equal(before.next_observation, after.observation[0])
    np.testing.assert_array_equal(resetting, np.outer([0, 1, 0, 0, 1], [1] * n))
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *collected)
    noise = np.concatenate(noises)
    assert {name: x.dtype for name, x in rollout._asdict().items()} == {
        "observation": np.float32,
        "action": np.int32,
        "reward": np.float32,
        "terminated": bool,
        "truncated": bool,
        "is_step": bool,
        "next_observation": np.float32,
    }
    greedy = (rollout.observation @ np.asarray(policy).reshape(3, 3)).argmax(-1)
    np.testing.assert_array_equal(rollout.action, np.where(noise < 0, greedy, noise))
    following = np.concatenate([rollout.observation[1:], collected[-1].next_observation[None]])
    done = rollout.terminated | rollout.truncated
    np.testing.assert_array_equal(rollout.is_step[1:], ~done[:-1])  # the step after an end resets
    assert rollout.is_step[0].all()
    np.testing.assert_array_equal(is_step, ~done[-1])
    assert (rollout.reward[~rollout.is_step] == 0).all()
    rollout = rollout._replace(next_observation=following)
    for i in range(n):
        kept = [jax.tree.map(lambda x, t=t, i=i: x[t, i], rollout) for t in range(6 * rollouts)]
        kept = [step for step in kept if step.is_step]
        assert sum(step.terminated for step in kept) > 1
        assert sum(step.truncated for step in kept) > 1
        wanted = alone(5 + i, [step.action for step in kept])
        for got, expected in zip(kept, wanted, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_native_environments_are_collected_without_a_loss():
    """CartPole's reward is 1 a step; the observation after the last one is out of bounds."""
    alg = linear(dqn_jax, Args(num_envs=4, train_frequency=800), features=4)
    envs = dqn_jax.make_envs(alg.args, Run(), 4)
    assert type(envs).__name__ == "CartPoleVectorEnv"
    observation, _ = envs.reset(seed=0)
    noise = np.random.default_rng(0).integers(2, size=(200, 4), dtype=np.int32)
    is_step, policy = np.ones(4, bool), np.zeros(8, np.float32)
    rollout, _ = dqn_jax.collect_rollout(alg, envs, observation, is_step, policy, noise)
    envs.close()
    np.testing.assert_array_equal(rollout.reward, rollout.is_step)
    done = (rollout.terminated | rollout.truncated)[:-1]
    assert done.sum() > 20
    np.testing.assert_array_equal(rollout.is_step[1:], ~done)
    last = np.abs(rollout.observation[1:][done])
    assert ((last[:, 2] > 0.2095) | (last[:, 0] > 2.4)).all()


def test_statistics_of_episodes_against_a_plain_loop():
    """Across rollouts, and across the points of the charts, which start the sums anew."""
    n, steps = 4, 6
    stub = SimpleNamespace(train_step=lambda state, *_: (state, {}), policy=lambda state: state)
    update, rng = jax.jit(partial(dqn_jax.update_training, stub)), np.random.default_rng(2)
    training = Training(0, jax.random.PRNGKey(0), jnp.zeros((2, n)), jnp.zeros(3))
    resetting, totals, lengths = np.zeros(n, bool), np.zeros(n), np.zeros(n)
    seen = 0
    for _ in range(10):
        training = training._replace(ended=jnp.zeros(3))
        episodes = []
        for _ in range(3):
            rollout, resetting = random_rollout(rng, steps, resetting)
            rollout = rollout._replace(reward=np.round(8 * rollout.reward))  # exact sums
            training, metrics, _ = update(training, rollout, {"epsilon": 0.5})
            for t in range(steps):
                for i in range(n):
                    totals[i] += rollout.reward[t, i]
                    lengths[i] += rollout.is_step[t, i]
                    if rollout.terminated[t, i] or rollout.truncated[t, i]:
                        episodes.append((totals[i], lengths[i]))
                        totals[i] = lengths[i] = 0
        np.testing.assert_array_equal(training.current, [totals, lengths])
        sums = np.sum(episodes, axis=0)
        np.testing.assert_array_equal(training.ended, [len(episodes), *sums])
        assert metrics["charts/episodic_return"] == pytest.approx(sums[0] / len(episodes), rel=1e-6)
        assert metrics["charts/episodic_length"] == pytest.approx(sums[1] / len(episodes), rel=1e-6)
        assert metrics["charts/epsilon"] == 0.5
        seen += len(episodes)
    assert seen > 100
    # Nothing is logged where no episode ends, though sums of such rewards leave a rest.
    no_end, reward = np.zeros((steps, n), bool), rollout.reward / np.float32(10)
    rollout = rollout._replace(terminated=no_end, truncated=no_end, reward=reward)
    _, metrics, _ = update(training._replace(ended=jnp.zeros(3)), rollout, {"epsilon": 0.5})
    assert np.isnan(metrics["charts/episodic_return"])


def test_rewards_are_learned_from_by_their_sign():
    """And counted as they are."""
    args = Args(num_envs=2, train_frequency=6, batch_size=8, clip_rewards=True)
    alg = linear(dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 3, np.zeros(2, bool))
    rollout = rollout._replace(
        reward=np.array([[2.5, -7.0], [0.0, 0.25], [100.0, -0.5]], np.float32),
        terminated=np.array([[False, False], [False, False], [True, False]]),
        truncated=np.array([[False, False], [False, False], [False, True]]),
        is_step=np.ones((3, 2), bool),
    )
    agent = state_of(alg, *np.zeros((2, 2), np.float32))
    training = Training(agent, jax.random.PRNGKey(0), jnp.zeros((2, 2)), jnp.zeros(3))
    update = jax.jit(partial(dqn_jax.update_training, alg))
    training, metrics, _ = update(training, rollout, {"gradient_steps": 0})
    stored = training.agent.replay.storage.reward[:3]
    np.testing.assert_array_equal(stored, [[1, -1], [0, 1], [1, -1]])
    np.testing.assert_array_equal(training.ended, [2, 102.5 - 7.25, 6])
    assert metrics["charts/episodic_return"] == (102.5 - 7.25) / 2


# ------------------------------------------------------------------------------------ a whole run


SHORT = Args(total_timesteps=3_000, learning_starts=600)
SHORT_RUN = Run(log_interval=500, eval_episodes=0)


@pytest.fixture(scope="module", params=[1, 8])
def two_runs(request, tmp_path_factory):
    """Algorithm, Run, and what two runs with the same flags gave."""
    with pytest.MonkeyPatch.context() as patch:
        args, run, runs = replace(SHORT, num_envs=request.param), SHORT_RUN, []
        for _ in range(2):
            patch.chdir(tmp_path_factory.mktemp("run"))
            runs.append(train(args, run))
    return DQN(args, np.zeros(4, np.float32), TWO), args, run, runs


def test_same_seed_same_run(two_runs):
    """The same parameters, the same replay, the same events."""
    *_, args, run, (first, second) = two_runs
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    scalars, others = (read_events(folder)[0] for *_, folder in (first, second))
    assert scalars.pop("charts/SPS") != others.pop("charts/SPS")
    assert scalars == others
    other = train(args, replace(run, seed=2))
    assert (other[0].agent.params != first[0].agent.params).any()
    assert other[1] != first[1]


def test_run_against_a_plain_loop(two_runs):
    """Without threads: a rollout is collected with the parameters of before the last update."""
    alg, args, run, ((trained, returns, folder), _) = two_runs
    _, loop = dqn_jax.set_up(args, run)
    training = loop.start()
    size = alg.steps_per_iteration
    interval = -(-500 // size) * size
    draw_noise = jax.jit(alg.draw_noise)
    update = jax.jit(partial(dqn_jax.update_training, alg), donate_argnums=0)
    envs = dqn_jax.make_envs(args, run, args.num_envs)
    observation, _ = envs.reset(seed=dqn_jax.environment_seed(run, 0))
    is_step = np.ones(args.num_envs, bool)
    policies = [jnp.copy(alg.policy(training.agent))] * 2
    charts, ended, totals = {}, [], np.zeros(args.num_envs)
    for step in range(0, args.total_timesteps, interval):
        ended.append([])
        for at in range(step, step + interval, size):
            schedule = {name: x[0] for name, x in alg.schedule(np.array([at])).items()}
            key = jax.random.fold_in(jax.random.PRNGKey(1), at)
            noise = np.asarray(draw_noise(key, schedule))
            rollout, is_step = dqn_jax.collect_rollout(
                alg, envs, observation, is_step, policies.pop(0), noise
            )
            observation = rollout.next_observation
            training, metrics, policy = update(training, rollout, schedule)
            policies.append(policy)
            for t, done in enumerate(rollout.terminated | rollout.truncated):
                totals += rollout.reward[t]
                ended[-1] += list(totals[done])
                totals[done] = 0
        charts[step + interval] = metrics
    envs.close()
    jax.tree.map(np.testing.assert_array_equal, trained.agent, training.agent)

    scalars, text = read_events(folder)
    steps = range(interval, args.total_timesteps + interval, interval)
    mean_returns = [float(np.mean(x)) for x in ended]
    charted = scalars.pop("charts/episodic_return")
    assert charted == [(s, pytest.approx(x)) for s, x in zip(steps, mean_returns, strict=True)]
    assert scalars.pop("charts/episodic_length") == charted  # CartPole pays 1 a step
    assert all(value > 0 for _, value in scalars.pop("charts/SPS"))
    assert set(scalars) == {
        "charts/epsilon",
        "charts/gradient_steps",
        "losses/td_loss",
        "losses/q_values",
    }
    for tag, points in scalars.items():  # without losses before there is a gradient step
        wanted = [(s, charts[s][tag]) for s in steps if not np.isnan(charts[s][tag])]
        assert points == [(s, pytest.approx(float(x), rel=1e-6)) for s, x in wanted], tag
    assert 3 < len(scalars["losses/td_loss"]) < len(steps)
    assert "|learning_starts|600|" in text
    assert "|env_id|CartPole-v1|" in text
    # The figure at the end: the last log intervals that together have at least 100 episodes.
    last = [list(chain(*ended[i:])) for i in range(len(ended))]
    last = [x for x in last if len(x) >= 100]
    assert len(last) > 1
    assert len(last[-1]) > len(ended[-1])
    assert returns == pytest.approx(np.mean(last[-1]), rel=1e-5)
    # One gradient step per 10 steps, from the iteration on that passes learning_starts.
    learning = len(steps) * interval - 600 // size * size
    assert int(trained.agent.updates) == int(trained.agent.opt_state[0].count) == learning // 10


# ------------------------------------------------------------------------------------- the learning


PROBE = Args(
    total_timesteps=4_000,
    num_envs=8,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    target_network_frequency=40,
    learning_rate=1e-2,
    gamma=0.5,
    start_e=1.0,
    end_e=1.0,
)


def learned_q(module, env_id, observations, args, **flags):
    """Q(s, .) of observations after training with PROBE's flags and these."""
    training, _, _ = module.train(
        module.Args(**vars(args) | flags), module.Run(env_id=env_id, eval_episodes=0)
    )
    alg = module.Algorithm(module.Args(), observations[0], TWO)
    return training, np.asarray(jax.jit(alg.q_values)(training.agent.params, observations))


@pytest.mark.parametrize(
    ("env_id", "observations", "values"),
    [
        slow("Probe-constant-v0", [[0.0]], [[1.0, 1.0]]),
        slow("Probe-observation-v0", [[-1.0], [1.0]], [[-1.0, -1.0], [1.0, 1.0]]),
        ("Probe-discount-v0", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        slow("Probe-action-v0", [[0.0]], [[-1.0, 1.0]]),
        ("Start-v0", [[0.0]], [[-1.0, 1.0]]),  # its actions are 1 and 2
        ("Probe-both-v0", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("Probe-truncation-v0", [[0.0]], [[2.0, 2.0]]),  # 1 / (1 - gamma): a cut is not an end
    ],
)
def test_probe_values(env_id, observations, values):
    _, q = learned_q(dqn_jax, env_id, np.array(observations, np.float32), PROBE)
    np.testing.assert_allclose(q, values, atol=0.01)


@pytest.mark.parametrize(
    ("env_id", "value"), [("Probe-truncation-v0", 2.0), slow("Probe-discount-v0", 0.5)]
)
def test_n_step_probe_values(env_id, value):
    """Ends of both kinds within three steps leave the values what they are with one."""
    _, q = learned_q(dqn_jax, env_id, VECTOR[None], PROBE, n_step=3)
    np.testing.assert_allclose(q, value, atol=0.01)


def test_probe_value_with_double_q_and_soft_target():
    flags = dict(double_q=True, tau=0.5)
    _, q = learned_q(dqn_jax, "Probe-truncation-v0", VECTOR[None], PROBE, **flags)
    np.testing.assert_allclose(q, 2.0, atol=0.01)


def test_image_probe():
    """uint8 images go through the Nature CNN, stay uint8 in the buffer, and can be learned from."""
    black, white = np.zeros((4, 36, 36), np.uint8), np.full((4, 36, 36), 255, np.uint8)
    flags = dict(total_timesteps=600, batch_size=16, learning_rate=3e-4, adam_epsilon=1e-8)
    training, q = learned_q(dqn_jax, "ProbeImage-v0", np.stack([black, white]), PROBE, **flags)
    stored = training.agent.replay.storage
    assert stored.observation.dtype == jnp.uint8
    assert stored.observation.shape == (125, 8, 4, 36, 36)
    assert stored.next_observation is None  # each observation once
    np.testing.assert_allclose(q, [[1.0, -1.0], [-1.0, 1.0]], atol=0.1)
