"""dqn_jax.py: its pure functions against hand computations, its collector against environments
stepped alone, a whole run against a plain loop, and what it learns against known values. Of
images.py the network.
"""

from collections import defaultdict, deque
from dataclasses import replace
from itertools import pairwise
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
from dqn_jax import Args, EnvState, Run, Step, UsageError, train


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


VECTOR = np.zeros(1, np.float32)
TWO = gym.spaces.Discrete(2)


def box(shape):
    """The space of observations of that shape."""
    return gym.spaces.Box(-np.inf, np.inf, shape, np.float32)


def linear(module, args, features=1, num_actions=2):
    """The algorithm of a script, with Q(s, .) = s @ params and plain gradient descent."""
    alg = module.Algorithm(args, box((features,)), gym.spaces.Discrete(num_actions))
    alg.network = SimpleNamespace(
        init=lambda key, observation: jnp.zeros(features * num_actions),
        apply=lambda params, observation: observation @ params.reshape(features, num_actions),
    )
    alg.optimizer = optax.sgd(0.1)
    return alg


def state_of(alg, params, target_params):
    """The state before training, with other parameters."""
    state = alg.init(jax.random.PRNGKey(0))
    params = jnp.asarray(params)
    return state._replace(params=params, target_params=jnp.asarray(target_params))


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


def random_params(network, x):
    """Weights of a network for x, of a size at which its values stay moderate."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.PRNGKey(0), x)
    return jax.tree.map(
        lambda leaf: (rng.normal(size=leaf.shape) / np.sqrt(leaf.shape[0])).astype(leaf.dtype),
        shapes,
    )


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


def test_stacked_frames_become_channels_and_other_observations_are_the_numbers_that_they_are():
    x = np.random.default_rng(0).integers(256, size=(2, 4, 36, 40), dtype=np.uint8)
    last = np.moveaxis(x, 1, -1)
    np.testing.assert_array_equal(images.channels_last(jnp.asarray(x)), last)
    network = dqn_jax.QNetwork(2)
    apply = jax.jit(network.apply)
    params = random_params(network, x)
    np.testing.assert_array_equal(apply(params, x), apply(params, last))

    for other in (x[:, :, 0], x.astype(np.float32)):
        params = random_params(network, other)
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


@pytest.mark.parametrize("shape", [slow((44, 40, 4)), (43, 50, 3)])
def test_convolutions_are_those_of_flax(shape):
    """With the same weights, also where the stride does not divide the height or the width.

    Of pixels divided by 255.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(256, size=(2, *shape), dtype=np.uint8)
    network = dqn_jax.QNetwork(3)
    params = random_params(network, x)["params"]
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


def windows_by_hand(valid=True):
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
        valid=jnp.array([[valid] * 3 + [False], [True] * 4]).T,
    )


@pytest.mark.parametrize("double_q", [False, True])
def test_loss_by_hand(double_q):
    """Terminated: the reward alone. Truncated: bootstrapped as any other step. Resets: nothing."""
    alg = linear(dqn_jax, Args(gamma=0.5, double_q=double_q))
    params = jnp.array([1.0, 2.0])
    target_params = jnp.array([10.0, 4.0])
    grad_fn = jax.jit(jax.value_and_grad(alg.loss, has_aux=True))
    (loss, metrics), grad = grad_fn(params, target_params, alg.to_transitions(windows_by_hand()))
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
    batch = alg.to_transitions(windows_by_hand(valid=False))
    (loss, metrics), grad = grad_fn(jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0]), batch)
    assert loss == 0
    assert metrics == {"losses/td_loss": 0, "losses/q_values": 0}
    np.testing.assert_array_equal(grad, np.zeros(2))


def test_epsilon_falls_in_a_straight_line():
    args = Args(total_timesteps=1_000, learning_starts=200, exploration_fraction=0.5)
    alg = linear(dqn_jax, args)
    wanted = {0: 1, 120: 0.772, 160: 0.696, 240: 0.544, 480: 0.088, 500: 0.05, 960: 0.05}
    epsilon = [alg.epsilon(step) for step in wanted]
    np.testing.assert_allclose(epsilon, list(wanted.values()), rtol=1e-6)


def test_epsilon_is_its_end_at_once_where_no_part_of_training_explores():
    alg = linear(dqn_jax, Args(exploration_fraction=0.0))
    np.testing.assert_allclose([alg.epsilon(0), alg.epsilon(40)], 0.05, rtol=1e-6)


def train_without_gradients(args):
    """Updates after, and metrics of, all iterations of a training whose gradient steps do nothing.

    The metrics are of an algorithm whose loss has none.
    """
    alg = linear(dqn_jax, args)
    alg.gradient_step = lambda state, *_: (state._replace(updates=state.updates + 1), {})
    rollout = jax.tree.map(lambda x: np.zeros(alg.rollout_shape + x.shape, x.dtype), alg.example)

    def iterate(state, step):
        state, _, metrics = alg.train_step(state, rollout, jax.random.PRNGKey(0), step)
        return state, metrics

    steps = np.arange(0, args.total_timesteps, alg.steps_per_iteration)
    state, metrics = jax.jit(lambda state: jax.lax.scan(iterate, state, steps))(
        alg.init(jax.random.PRNGKey(0))
    )
    return int(state.updates), metrics


def test_learning_starts_with_the_iteration_that_passes_learning_starts():
    args = Args(total_timesteps=320, num_envs=8, learning_starts=200)  # 40 steps an iteration
    updates, metrics = train_without_gradients(args)
    # The iteration from step 160 to 200 ends where learning starts.
    np.testing.assert_array_equal(metrics["charts/gradient_steps"], [0, 0, 0, 0, 0, 4, 4, 4])
    assert updates == 12
    epsilon = 1 - np.minimum(np.arange(0, 320, 40) / 160, 1) * 0.95
    np.testing.assert_allclose(metrics["charts/epsilon"], epsilon, rtol=1e-6)
    _, passes = train_without_gradients(replace(args, learning_starts=199))
    np.testing.assert_array_equal(passes["charts/gradient_steps"], [0, 0, 0, 0, 4, 4, 4, 4])


@pytest.mark.parametrize("num_envs", [1, 8, 64])
@pytest.mark.parametrize("train_frequency", [1, 10, 16])
def test_ratio_of_gradient_steps_to_environment_steps(num_envs, train_frequency):
    """One gradient step per train_frequency environment steps, whatever the number of them."""
    args = Args(total_timesteps=6_400, num_envs=num_envs, learning_starts=1_600)
    updates, metrics = train_without_gradients(replace(args, train_frequency=train_frequency))
    size = np.lcm(num_envs, train_frequency)
    trained = -(-6_400 // size) * size  # whole iterations
    begun = 1_600 // size * size  # the iteration that passes learning_starts learns whole
    assert updates == (trained - begun) / train_frequency
    assert metrics["charts/gradient_steps"].sum() == updates


def explore(epsilon, key=0, step=0):
    """Noise [2,000, 4] of a rollout of 4 environments with 3 actions."""
    flags = dict(start_e=epsilon, end_e=epsilon, num_envs=4, train_frequency=8_000)
    alg = linear(dqn_jax, Args(**flags), num_actions=3)
    return np.asarray(alg.draw_noise(jax.random.PRNGKey(key), step, (2_000, 4)))


def assert_independent(explores, others):
    """Whether to explore, with probability 0.3, here and there."""
    counts = np.bincount((explores * 2 + others).ravel(), minlength=4)
    wanted = explores.size * np.array([0.49, 0.21, 0.21, 0.09])
    assert chisquare(counts, wanted).pvalue > 1e-3


def test_exploration_draws_for_each_step_and_environment():
    noise = explore(0.3)
    assert noise.shape == (2_000, 4)
    for column in noise.T:
        counts = [(column == action).sum() for action in (-1, 0, 1, 2)]
        assert chisquare(counts, 2_000 * np.array([0.7, 0.1, 0.1, 0.1])).pvalue > 1e-3
    explores = noise >= 0
    for i in range(4):
        for j in range(i):
            assert_independent(explores[:, i], explores[:, j])
    assert_independent(explores[1:], explores[:-1])


def test_exploration_draws_anew_for_each_iteration_and_seed():
    noise = explore(0.3)
    np.testing.assert_array_equal(noise, explore(0.3))
    assert_independent(noise >= 0, explore(0.3, step=8_000) >= 0)
    assert_independent(noise >= 0, explore(0.3, key=1) >= 0)


def test_exploration_at_its_bounds():
    assert set(explore(0.0).ravel()) == {-1}
    assert set(explore(1.0).ravel()) == {0, 1, 2}


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
    terminated = np.zeros((steps, n), bool)
    truncated = np.zeros((steps, n), bool)
    valid = np.zeros((steps, n), bool)
    for t in range(steps):
        valid[t] = ~resetting
        terminated[t] = valid[t] & (rng.random(n) < 0.15)
        truncated[t] = valid[t] & ~terminated[t] & (rng.random(n) < 0.15)
        resetting = terminated[t] | truncated[t]
    rollout = Step(
        observation=rng.normal(size=(steps, n, features)).astype(np.float32),
        action=rng.integers(2, size=(steps, n), dtype=np.int32),
        reward=np.where(valid, rng.normal(size=(steps, n)), garbage).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        next_observation=rng.normal(size=(n, features)).astype(np.float32),
    )
    return rollout, resetting


class PlainReplay:
    """All steps ever stored, as a list [row][environment]."""

    def __init__(self):
        self.rows = []

    def add(self, rollout):
        rollout = rollout._replace(next_observation=None)
        for t in range(len(rollout.reward)):
            self.rows.append(jax.tree.map(lambda x, t=t: x[t], rollout))

    def transition(self, index, num_envs, n_step, gamma):
        """Observation, action, reward, discount, next observation; None of one that only resets."""
        row, i = divmod(int(index), num_envs)
        stream = [jax.tree.map(lambda x: x[i], step) for step in self.rows[row : row + n_step + 1]]
        first = stream[0]
        if not first.valid:
            return None
        total = 0.0
        for m in range(n_step):
            total += gamma**m * float(stream[m].reward)
            after = stream[m + 1].observation
            if stream[m].terminated:
                return first.observation, first.action, total, 0.0, after
            if stream[m].truncated:
                break
        return first.observation, first.action, total, gamma ** (m + 1), after

    def batch(self, indices, num_envs, n_step, gamma):
        """The transitions of indices as arrays, and which of them count."""
        found = [self.transition(index, num_envs, n_step, gamma) for index in indices]
        valid = np.array([x is not None for x in found])
        columns = zip(*[x for x in found if x is not None], strict=True)
        return *map(np.array, columns), valid


def test_small_gradients_make_small_steps():
    """Kingma and Ba 2015, algorithm 1: the first step is learning rate * g / (abs(g) + epsilon)."""
    alg = dqn_jax.Algorithm(Args(adam_epsilon=0.01, learning_rate=0.1), box((1,)), TWO)
    gradient = {"kernel": jnp.array([[1e-4], [-0.01]]), "bias": jnp.array([1.0])}
    step, _ = alg.optimizer.update(gradient, alg.optimizer.init(gradient))
    for name, g in gradient.items():
        np.testing.assert_allclose(step[name], -0.1 * g / (abs(g) + 0.01), rtol=1e-4)


def test_another_optimizer_knows_the_parameters_and_their_shapes(monkeypatch):
    """AdamW with weight decay of kernels only, which have two dimensions."""
    alg = dqn_jax.Algorithm(Args(gamma=0.5, batch_size=4), box((1,)), TWO)
    alg.network = nn.Dense(2)
    alg.optimizer = optax.adamw(
        0.1,
        eps=8.0,
        weight_decay=0.1,
        mask=lambda params: jax.tree.map(lambda x: x.ndim == 2, params),
    )
    start = alg.init(jax.random.PRNGKey(0))
    online = {"kernel": jnp.array([[0.5, 4.0]]), "bias": jnp.array([0.5, -2.0])}
    target = {"kernel": jnp.array([[10.0, 4.0]]), "bias": jnp.zeros(2)}
    state = start._replace(params={"params": online}, target_params={"params": target})
    rollout = jax.tree.map(lambda x: np.zeros((10, 1, *x.shape), x.dtype), alg.example)
    state = state._replace(replay=alg.replay.add_batch(state.replay, rollout))

    def sample(*arguments):
        return draw(*arguments)._replace(experience=windows_by_hand())

    draw = alg.replay.sample
    monkeypatch.setattr(alg, "replay", alg.replay._replace(sample=sample))
    state, metrics = jax.jit(alg.gradient_step)(state, jax.random.PRNGKey(0), 0)
    # Values 1 and 2 of the actions, targets 6, 2 and 8: the errors are 5, 0 and 7, the gradient of
    # the first action's weights -2 * (5 + 7) / 3 = -8, and 0 of the second one's.
    assert metrics["losses/td_loss"] == pytest.approx((25 + 49) / 3)
    step = 0.1 * 8 / (8 + 8)
    kernel = [[0.5 + step - 0.1 * 0.1 * 0.5, 4 - 0.1 * 0.1 * 4]]
    np.testing.assert_allclose(state.params["params"]["kernel"], kernel, rtol=1e-6)
    np.testing.assert_allclose(state.params["params"]["bias"], [0.5 + step, -2.0], rtol=1e-6)


class Measured(dqn_jax.Algorithm):
    """With one more metric: how many rows of a batch are learned from."""

    def loss(self, params, target_params, batch):
        loss, metrics = super().loss(params, target_params, batch)
        return loss, metrics | {"losses/rows": batch.valid.sum()}


def test_a_metric_of_the_loss_is_one_of_the_train_step():
    """NaN before learning starts, as the others are."""
    args = Args(num_envs=2, train_frequency=8, batch_size=16, learning_starts=16)
    alg = linear(SimpleNamespace(Algorithm=Measured), args)
    rng = np.random.default_rng(0)
    train_step = jax.jit(alg.train_step)
    state = alg.init(jax.random.PRNGKey(0))
    resetting = np.zeros(2, bool)
    rows = []
    for step in (0, 8, 16):
        rollout, resetting = random_rollout(rng, 4, resetting)
        state, _, metrics = train_step(state, rollout, jax.random.PRNGKey(1), step)
        rows.append(float(metrics["losses/rows"]))
    np.testing.assert_array_equal(np.isnan(rows), [True, True, False])
    (key,) = jax.random.split(jax.random.fold_in(jax.random.PRNGKey(1), 16), 1)
    drawn = alg.replay.sample(state.replay, key, 16).experience
    assert 0 < rows[2] == drawn.valid[:, 0].sum() < 16


def test_a_metric_of_the_loss_has_a_chart(monkeypatch):
    """From the point on after learning started; of one that always counts all rows."""
    monkeypatch.setattr(dqn_jax, "Algorithm", Measured)
    flags = dict(total_timesteps=100, num_envs=2, learning_starts=50, batch_size=16)
    run = Run(env_id="Probe-truncation-v0", log_interval=20, eval_episodes=0, checkpoint_interval=0)
    _, _, folder = train(Args(**flags), run)
    scalars, _ = read_events(folder)
    losses = dict(scalars["losses/td_loss"])
    rows = dict(scalars["losses/rows"])
    assert rows.keys() == losses.keys() == {80, 100}
    assert all(0 < count < 16 and count % 1 == 0 for count in rows.values())


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
    sizes = dict(num_envs=3, train_frequency=4, batch_size=8, buffer_size=28, learning_starts=12)
    args = Args(**flags, **sizes, gamma=0.9)
    alg = linear(dqn_jax, args)
    rng = np.random.default_rng(0)
    plain = PlainReplay()
    params = np.array([0.5, -0.5])
    target_params = np.array([1.5, 0.5])
    state = state_of(alg, params.astype(np.float32), target_params.astype(np.float32))
    train_step = jax.jit(alg.train_step)
    key = jax.random.PRNGKey(3)
    resetting = np.zeros(3, bool)
    updates = 0
    resets = 0
    period = {10: 2, 4: 1}[args.target_network_frequency]
    for step in (0, 12, 24, 36):
        rollout, resetting = random_rollout(rng, 4, resetting, garbage=1e6)
        state, acting, metrics = train_step(state, rollout, key, step)
        reward = np.sign(rollout.reward) if args.clip_rewards else rollout.reward
        plain.add(rollout._replace(reward=reward))
        keys = jax.random.split(jax.random.fold_in(key, step), 3)
        for own_key in keys if step > 0 else []:
            drawn = alg.replay.sample(state.replay, own_key, 8).indices
            assert min(drawn) >= 3 * max(len(plain.rows) - 10, 0)  # what has not been overwritten
            batch = plain.batch(drawn, 3, args.n_step, 0.9)
            observation, action, reward, discount, following, valid = batch
            rows = np.arange(valid.sum())
            next_q = following * target_params
            best = (following * (params if args.double_q else target_params)).argmax(-1)
            value = (observation * params)[rows, action]
            error = reward + discount * next_q[rows, best] - value
            grad = np.zeros(2)
            np.add.at(grad, action, -2 / len(rows) * error * observation[:, 0])
            params = params - 0.1 * grad
            updates += 1
            if updates % period == 0:
                target_params = args.tau * params + (1 - args.tau) * target_params
            resets += (~valid).sum()
        losses = [metrics["losses/td_loss"], metrics["losses/q_values"]]
        if step > 0:  # of the last gradient step
            np.testing.assert_allclose(losses, [np.mean(error**2), value.mean()], rtol=1e-4)
        else:
            np.testing.assert_array_equal(losses, [np.nan, np.nan])
        np.testing.assert_allclose(state.params, params, rtol=1e-4)
        np.testing.assert_array_equal(acting, state.params)
        np.testing.assert_allclose(state.target_params, target_params, rtol=1e-4)
    assert int(state.updates) == updates == 9
    assert resets > 5
    assert int(alg.replay.size(state.replay)) == 30


def test_rewards_are_learned_from_by_their_sign():
    """And counted as they are."""
    args = Args(num_envs=2, train_frequency=6, batch_size=8, clip_rewards=True)
    alg = linear(dqn_jax, args)
    rollout, _ = random_rollout(np.random.default_rng(0), 3, np.zeros(2, bool))
    rollout = rollout._replace(
        reward=np.array([[2.5, -7.0], [0.0, 0.25], [100.0, -0.5]], np.float32),
        terminated=np.array([[False, False], [False, False], [True, False]]),
        truncated=np.array([[False, False], [False, False], [False, True]]),
        valid=np.ones((3, 2), bool),
    )
    state, _, _ = jax.jit(alg.train_step)(
        alg.init(jax.random.PRNGKey(0)), rollout, jax.random.PRNGKey(0), 0
    )
    np.testing.assert_array_equal(state.replay.storage.reward[:3], [[1, -1], [0, 1], [1, -1]])
    scalars = defaultdict(list)
    dqn_jax.count_episodes(rollout, np.zeros((2, 2)), scalars)
    assert scalars["charts/episodic_return"] == [102.5, -7.25]


@pytest.mark.parametrize("n_step", [slow(1), 3])
def test_no_window_goes_across_a_restart(n_step):
    """Every window that is held, twice: where the environments went on, and where they started.

    Of the rows before a restart the last one is lost, and the one before it is cut off there.
    """
    args = Args(n_step=n_step, num_envs=6, train_frequency=24, batch_size=8, buffer_size=60)
    alg = linear(dqn_jax, replace(args, gamma=0.9))
    rng = np.random.default_rng(1)
    state = state_of(alg, *np.zeros((2, 2), np.float32))
    train_step = jax.jit(alg.train_step)
    key = jax.random.PRNGKey(0)
    resetting = np.zeros(6, bool)
    plain = PlainReplay()
    for _ in range(3):
        rollout, resetting = random_rollout(rng, 4, resetting)
        state, _, _ = train_step(state, rollout, key, 0)
        plain.add(rollout)
    restarted = alg.cut_episodes_off(state)
    goes_on = plain.rows[10].valid & ~plain.rows[10].terminated
    assert goes_on.any()
    cut = list(plain.rows)
    cut[10] = cut[10]._replace(truncated=goes_on)
    no = np.zeros(6, bool)
    cut[11] = cut[11]._replace(valid=no, terminated=no, truncated=no)
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
    to_transitions = jax.jit(alg.to_transitions)
    valid = []
    for start, steps in ((state, plain), (restarted, after_cut)):
        new, _, _ = train_step(start, rollout, key, 0)
        batch = to_transitions(alg.replay.get(new.replay, indices))
        *expected, is_valid = steps.batch(indices, 6, n_step, 0.9)
        np.testing.assert_array_equal(batch.valid, is_valid)
        for got, x in zip(batch, expected, strict=False):
            np.testing.assert_allclose(np.asarray(got)[is_valid], x, rtol=1e-5, atol=1e-6)
        valid.append(is_valid)
    row, environment = np.divmod(indices, 6)
    counts = np.array([plain.rows[r].valid[i] for r, i in zip(row, environment, strict=True)])
    assert (~counts).any()
    assert counts[row == 11].any()
    np.testing.assert_array_equal(valid[0], counts)
    np.testing.assert_array_equal(valid[1], counts & (row != 11))  # only the last row is lost
    # Those that reach the cut are bootstrapped from what was observed last.
    reaching = 0
    for b in np.flatnonzero(valid[1] & (row < 11) & (row + n_step >= 11)):
        i = environment[b]
        until_cut = range(row[b], 11)
        if any(plain.rows[r].terminated[i] or plain.rows[r].truncated[i] for r in until_cut):
            continue
        reaching += 1
        np.testing.assert_array_equal(batch.next_observation[b], plain.rows[11].observation[i])
        assert batch.discount[b] == pytest.approx(0.9 ** len(until_cut))
        total = sum(0.9**m * plain.rows[r].reward[i] for m, r in enumerate(until_cut))
        assert batch.reward[b] == pytest.approx(total, rel=1e-5)
    assert reaching > 1


# ----------------------------------------------------------------------------------- environments


def is_native(envs):
    """Whether it is a vector version of the environment, and not single ones."""
    if not isinstance(envs, gym.vector.SyncVectorEnv):
        return True
    return not isinstance(envs.envs[0], gym.Wrapper)


@pytest.mark.parametrize(
    ("env_id", "flags", "native_from", "shape", "reward"),
    [
        ("Counter-v0", {}, None, (3,), 1),  # there is no native one
        ("CartPole-v1", {}, 4, (4,), 1),
        ("CartPole-v1", {"env_kwargs": '{"sutton_barto_reward": true}'}, 4, (4,), 0),
        ("CartPole-v1", {"vectorization": "sync"}, None, (4,), 1),
        ("VectorOnly-v0", {}, 1, (3,), 1),  # there is no other
        ("Preprocessed-v0", {}, 1, (2,), 1),  # the native one observes something else
        ("TakesKwargs-v0", {}, 4, (3,), 1),
        # The native one does not take it.
        ("TakesKwargs-v0", {"env_kwargs": '{"scale": 3}', "vectorization": "sync"}, None, (3,), 3),
        ("Image-v0", {"env_kwargs": '{"shape": [9, 10, 3]}'}, None, (9, 10, 3), None),
        ("environments:Start-v0", {}, None, (1,), None),
        # Functional: in the native one all others stand still where one resets.
        ("phys2d/CartPole-v1", {"vectorization": "sync"}, None, (4,), None),
    ],
)
def test_the_environment_is_the_same_at_any_number_of_them(
    env_id, flags, native_from, shape, reward
):
    run = Run(env_id=env_id, **flags)
    for n in (1, 2, 4, 8):
        envs = dqn_jax.make_envs(Args(), run, n)
        assert envs.num_envs == n
        assert envs.single_observation_space.shape == shape
        assert is_native(envs) == (native_from is not None and n >= native_from), n
        if reward is not None:
            envs.reset(seed=0)
            np.testing.assert_array_equal(envs.step(envs.action_space.sample())[1], [reward] * n)
        envs.close()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (Run(env_id="CounterSameStep-v0"), "its autoreset_mode must be NEXT_STEP"),
        (Run(env_id="CartPole-v9"), "--env-id CartPole-v9 --env-kwargs '{}': "),
        (Run(env_id="no_such_module:X-v0"), "--env-id no_such_module:X-v0 --env-kwargs '{}': "),
        (Run(env_id="Counter-v0", env_kwargs='{"no": 1}'), "unexpected keyword argument 'no'"),
        (Run(env_id="Counter-v0", env_kwargs='{"no'), "Counter-v0 --env-kwargs '{\"no': "),
        (
            Run(env_id="TakesKwargs-v0", env_kwargs='{"scale": 3}'),
            "counters.* unexpected keyword argument 'scale'",  # by the vector version
        ),
        (Run(env_id="Pendulum-v1"), "DQN takes Discrete actions, not Box"),
        (Run(num_seeds=2), "num_seeds, num_devices, distributed"),
        (Run(num_devices=2), "num_seeds, num_devices, distributed"),
        (Run(distributed="auto"), "num_seeds, num_devices, distributed"),
        (Run(num_seeds=0, log_interval=-1), "num_seeds must be from 1 to .*, not 0"),
        (Run(log_interval=-1), "log_interval must be from 1 to .*, not -1"),
        (Run(log_interval=2**31), "log_interval must be from 1 to 2\\*\\*31 - 1, not 2147483648"),
        (Run(eval_interval=0), "eval_interval must be from 1 to .*, not 0"),
        (Run(eval_episodes=-1), "eval_episodes must be from 0 to .*, not -1"),
        (Run(checkpoint_interval=-1), "checkpoint_interval must be from 0 to .*, not -1"),
        (Run(seed=-1), "seed must be from 0 to .*, not -1"),
        (Args(learning_starts=100), "learning_starts 100 must be from batch_size 128 to"),
        (
            Args(total_timesteps=10_000),
            "learning_starts 10000 must be .* to total_timesteps 10000 - 1; .* 0 is batch_size",
        ),
        (Args(num_envs=0), "num_envs must be from 1 to .*, not 0"),
        (Args(train_frequency=0, n_step=0), "train_frequency must be from 1 to .*, not 0"),
        (Args(n_step=0), "n_step must be from 1 to .*, not 0"),
        (Args(frame_stack=0), "frame_stack must be from 1 to .*, not 0"),
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


def collect(alg, envs, params, noises, seed):
    """Rollouts with these noises, EnvStates before and after each, and `scalars` of episodes."""
    observation, _ = envs.reset(seed=seed)
    n = envs.num_envs
    states = [EnvState(observation, np.ones(n, bool), np.zeros((2, n)))]
    log = SimpleNamespace(scalars=defaultdict(list))
    rollouts = []
    for noise in noises:
        rollout, state = dqn_jax.collect_rollout(alg, envs, params, states[-1], noise, log)
        rollouts.append(rollout)
        states.append(state)
    envs.close()
    return rollouts, states, log.scalars


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
    n = 3
    alg = linear(dqn_jax, Args(num_envs=n, train_frequency=18), features=3, num_actions=3)
    assert alg.rollout_shape == (6, n)
    rng = np.random.default_rng(0)
    params = jnp.asarray(rng.normal(size=9), jnp.float32)
    noises = [rng.integers(-1, 3, size=(6, n), dtype=np.int32) for _ in range(5)]
    envs = dqn_jax.make_envs(alg.args, Run(env_id="Counter-v0"), n)
    collected, states, _ = collect(alg, envs, params, noises, seed=5)
    for before, after in pairwise(collected):
        np.testing.assert_array_equal(before.next_observation, after.observation[0])
    resetting = [~state.valid for state in states[:-1]]
    np.testing.assert_array_equal(resetting, np.outer([0, 1, 0, 0, 1], [1] * n))
    rollout = jax.tree.map(lambda *x: np.concatenate(x), *collected)
    noise = np.concatenate(noises)
    assert {name: x.dtype for name, x in rollout._asdict().items()} == {
        "observation": np.float32,
        "action": np.int32,
        "reward": np.float32,
        "terminated": bool,
        "truncated": bool,
        "valid": bool,
        "next_observation": np.float32,
    }
    greedy = (rollout.observation @ np.asarray(params).reshape(3, 3)).argmax(-1)
    np.testing.assert_array_equal(rollout.action, np.where(noise < 0, greedy, noise))
    following = np.concatenate([rollout.observation[1:], collected[-1].next_observation[None]])
    done = rollout.terminated | rollout.truncated
    np.testing.assert_array_equal(rollout.valid[1:], ~done[:-1])  # the step after an end resets
    assert rollout.valid[0].all()
    np.testing.assert_array_equal(states[-1].valid, ~done[-1])
    np.testing.assert_array_equal(states[-1].observation, collected[-1].next_observation)
    assert (rollout.reward[~rollout.valid] == 0).all()
    rollout = rollout._replace(next_observation=following)
    for i in range(n):
        kept = [jax.tree.map(lambda x, t=t, i=i: x[t, i], rollout) for t in range(len(noise))]
        kept = [step for step in kept if step.valid]
        assert sum(step.terminated for step in kept) > 1
        assert sum(step.truncated for step in kept) > 1
        wanted = alone(5 + i, [step.action for step in kept])
        for got, expected in zip(kept, wanted, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_collector_counts_the_episodes_of_counter():
    """They last 2, 3, 4, 5, 2, ... steps, with rewards 1, 2, ...; a step between them resets."""
    alg = linear(dqn_jax, Args(num_envs=2, train_frequency=10), features=3, num_actions=3)
    envs = dqn_jax.make_envs(alg.args, Run(env_id="Counter-v0"), 2)
    noises = np.zeros((5, 5, 2), np.int32)
    _, states, scalars = collect(alg, envs, jnp.zeros(9), noises, seed=0)
    assert scalars["charts/episodic_length"] == [2, 2, 3, 3, 4, 4, 5, 5, 2, 2, 3, 3]
    assert scalars["charts/episodic_return"] == [3, 3, 6, 6, 10, 10, 15, 15, 3, 3, 6, 6]
    # They end at step 2, 6, 11, 17, 20 and 24.
    returns = [state.unfinished[0, 0] for state in states]
    lengths = [state.unfinished[1, 0] for state in states]
    assert returns == [0, 3, 6, 6, 0, 0]
    assert lengths == [0, 2, 3, 3, 0, 0]


@pytest.mark.parametrize("num_envs", [2, 4])
def test_cartpole_is_collected_without_a_loss(num_envs):
    """Its reward is 1 a step; the observation after the last one is out of bounds.

    Four or more are a native vector version; fewer ones write over what they observed.
    """
    steps = 1_600 // num_envs
    args = Args(num_envs=num_envs, train_frequency=num_envs * steps)
    alg = linear(dqn_jax, args, features=4)
    envs = dqn_jax.make_envs(alg.args, Run(), num_envs)
    assert is_native(envs) == (num_envs == 4)
    noise = np.random.default_rng(0).integers(2, size=(steps, num_envs), dtype=np.int32)
    (rollout,), _, _ = collect(alg, envs, jnp.zeros(8), [noise], seed=0)
    np.testing.assert_array_equal(rollout.reward, rollout.valid)
    done = (rollout.terminated | rollout.truncated)[:-1]
    assert done.sum() > 20
    np.testing.assert_array_equal(rollout.valid[1:], ~done)
    last = np.abs(rollout.observation[1:][done])
    assert ((last[:, 2] > 0.2095) | (last[:, 0] > 2.4)).all()
    # Position and angle move on by 0.02 s times their speeds.
    following = np.concatenate([rollout.observation[1:], rollout.next_observation[None]])
    moved = rollout.observation[..., [0, 2]] + 0.02 * rollout.observation[..., [1, 3]]
    steps = rollout.valid
    np.testing.assert_allclose(following[..., [0, 2]][steps], moved[steps], rtol=1e-4, atol=1e-6)


def test_episodes_are_counted_as_in_a_plain_loop():
    """Across rollouts."""
    n = 4
    rng = np.random.default_rng(2)
    resetting = np.zeros(n, bool)
    unfinished = np.zeros((2, n))
    scalars = defaultdict(list)
    totals = np.zeros(n)
    lengths = np.zeros(n)
    episodes = []
    for _ in range(30):
        rollout, resetting = random_rollout(rng, 6, resetting)
        rollout = rollout._replace(reward=np.round(8 * rollout.reward))  # exact sums
        unfinished = dqn_jax.count_episodes(rollout, unfinished, scalars)
        for t in range(6):
            totals += rollout.reward[t]
            lengths += rollout.valid[t]
            for i in np.flatnonzero(rollout.terminated[t] | rollout.truncated[t]):
                episodes.append((totals[i], lengths[i]))
                totals[i] = 0
                lengths[i] = 0
        np.testing.assert_array_equal(unfinished, [totals, lengths])
    assert len(episodes) > 100
    counted = zip(scalars["charts/episodic_return"], scalars["charts/episodic_length"], strict=True)
    assert list(counted) == episodes


def test_a_point_has_means_of_what_was_counted_since_the_last_one(monkeypatch):
    """And no chart of episodes where none ended."""
    written = []
    monkeypatch.setattr(dqn_jax, "write_metrics", lambda *point: written.append(point[1:]))
    bar = SimpleNamespace(disable=False, n=0, set_postfix_str=written.append)
    scalars = defaultdict(list)
    log = dqn_jax.Log(None, None, bar, 0, 0.0, None, None, scalars, deque(maxlen=3), ())
    scalars["charts/episodic_return"] += [1.0, 2.0, 6.0]
    scalars["charts/episodic_length"] += [4.0, 4.0, 7.0]
    dqn_jax.write_point(log, 100, {"losses/td_loss": 0.5})
    dqn_jax.write_point(log, 200, {})
    scalars["charts/episodic_return"] += [10.0]
    dqn_jax.write_point(log, 300, {})
    (first, _, second, _, third, shown) = written
    assert first[0] == 100
    assert first[1].pop("charts/SPS") > 0
    assert first[1] == {
        "losses/td_loss": 0.5,
        "charts/episodic_return": 3,
        "charts/episodic_length": 5,
    }
    assert second[1].keys() == {"charts/SPS"}
    assert third[1]["charts/episodic_return"] == 10
    assert list(log.recent) == [2, 6, 10]
    assert shown == "return 6"
    assert bar.n == 300


# ------------------------------------------------------------------------------------ a whole run


SHORT = Args(total_timesteps=3_000, learning_starts=600)
SHORT_RUN = Run(log_interval=500, eval_episodes=0)


@pytest.fixture(scope="module", params=[slow(1), 8])
def two_runs(request, tmp_path_factory):
    """Args, and what two runs with the same flags gave."""
    args = replace(SHORT, num_envs=request.param)
    runs = []
    with pytest.MonkeyPatch.context() as patch:
        for _ in range(2):
            patch.chdir(tmp_path_factory.mktemp("run"))
            runs.append(train(args, SHORT_RUN))
    return args, runs


def test_same_seed_same_run(two_runs):
    """The same parameters, the same replay, the same events."""
    args, (first, second) = two_runs
    jax.tree.map(np.testing.assert_array_equal, first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    scalars, _ = read_events(first[2])
    others, _ = read_events(second[2])
    assert scalars.pop("charts/SPS") != others.pop("charts/SPS")
    assert scalars == others
    other = train(args, replace(SHORT_RUN, seed=2))
    kernels = [run[0].params["params"]["Dense_0"]["kernel"] for run in (first, other)]
    assert (kernels[0] != kernels[1]).any()
    assert other[1] != first[1]


def plain_run(args):
    """As `train` without threads and charts: State, episodes [(step, return)], metrics by step.

    A rollout is collected with the parameters of before the last update.
    """
    alg, _ = dqn_jax.set_up(args, SHORT_RUN)
    size = alg.steps_per_iteration
    init_key, noise_key, learn_key = jax.random.split(jax.random.PRNGKey(1), 3)
    train_step = jax.jit(alg.train_step)
    state = jax.jit(alg.init)(init_key)
    acting = [state.params, state.params]
    envs = dqn_jax.make_envs(args, SHORT_RUN, args.num_envs)
    observation, _ = envs.reset(seed=dqn_jax.environment_seed(SHORT_RUN, 0))
    env_state = EnvState(observation, np.ones(args.num_envs, bool), np.zeros((2, args.num_envs)))
    totals = np.zeros(args.num_envs)
    ended = []
    metrics = {}
    for step in range(0, args.total_timesteps, size):
        log = SimpleNamespace(scalars=defaultdict(list))
        noise = np.asarray(alg.draw_noise(noise_key, step, alg.rollout_shape))
        rollout, env_state = dqn_jax.collect_rollout(alg, envs, acting[-2], env_state, noise, log)
        state, params, metrics[step + size] = train_step(state, rollout, learn_key, step)
        acting.append(params)
        for t, done in enumerate(rollout.terminated | rollout.truncated):
            totals += rollout.reward[t]
            ended += [(step + size, total) for total in totals[done]]
            totals[done] = 0
    envs.close()
    return state, ended, metrics


def test_run_against_a_plain_loop(two_runs):
    """What is learned, and the charts of it, whose losses are of the iteration before the last."""
    args, ((learned, returns, folder), _) = two_runs
    state, ended, metrics = plain_run(args)
    jax.tree.map(np.testing.assert_array_equal, learned, state)
    size = np.lcm(args.num_envs, 10)
    points = [-(-step // size) * size for step in range(500, 3_001, 500)]
    scalars, text = read_events(folder)
    charted = scalars.pop("charts/episodic_return")
    means = []
    for begin, end in pairwise([0, *points]):
        means.append(np.mean([total for step, total in ended if begin < step <= end]))
    assert charted == [(s, pytest.approx(x)) for s, x in zip(points, means, strict=True)]
    assert scalars.pop("charts/episodic_length") == charted  # CartPole pays 1 a step
    speed = scalars.pop("charts/SPS")
    assert [step for step, value in speed if value > 0] == points
    assert set(scalars) == {
        "charts/epsilon",
        "charts/gradient_steps",
        "losses/td_loss",
        "losses/q_values",
    }
    for tag, values in scalars.items():  # without losses before there is a gradient step
        wanted = [(s, float(metrics[s - size][tag])) for s in points]
        wanted = [(s, pytest.approx(x, rel=1e-6)) for s, x in wanted if not np.isnan(x)]
        assert values == wanted, tag
    assert len(scalars["losses/td_loss"]) == 5
    assert "|learning_starts|600|" in text
    assert "|env_id|CartPole-v1|" in text
    # The figure at the end: the mean of the last 100 episodes.
    assert len(ended) > 100
    np.testing.assert_allclose(returns, [np.mean([total for _, total in ended[-100:]])])
    # One gradient step per 10 steps, from the iteration on that passes learning_starts.
    assert int(learned.updates) == int(learned.opt_state[0].count) == (3_000 - 600) // 10


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
    """The State, and Q(s, .) of observations, after training with PROBE's flags and these."""
    run = module.Run(env_id=env_id, eval_episodes=0, checkpoint_interval=0)
    state, _, _ = module.train(module.Args(**vars(args) | flags), run)
    return state, np.asarray(jax.jit(module.QNetwork(2).apply)(state.params, observations))


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


@pytest.mark.slow
def test_probe_value_with_double_q_and_soft_target():
    flags = dict(double_q=True, tau=0.5)
    _, q = learned_q(dqn_jax, "Probe-truncation-v0", VECTOR[None], PROBE, **flags)
    np.testing.assert_allclose(q, 2.0, atol=0.01)


def test_image_probe():
    """uint8 images go through the Nature CNN, stay uint8 in the buffer, and can be learned from."""
    black = np.zeros((4, 36, 36), np.uint8)
    white = np.full((4, 36, 36), 255, np.uint8)
    flags = dict(total_timesteps=560, learning_starts=64, batch_size=16, learning_rate=1e-3)
    state, q = learned_q(dqn_jax, "ProbeImage-v0", np.stack([black, white]), PROBE, **flags)
    stored = state.replay.storage
    assert stored.observation.dtype == jnp.uint8
    assert stored.observation.shape == (125, 8, 4, 36, 36)
    assert stored.next_observation is None  # each observation once
    np.testing.assert_allclose(q, [[1.0, -1.0], [-1.0, 1.0]], atol=0.1)
