"""dqn_jax.py: its pure functions against hand computations, its collector against environments
stepped alone, and what it learns against known values.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboardX.event_file_writer import EventsWriter

import buffers
import dqn_jax
from dqn_jax import Args, Transition, UsageError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read_events(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }, events


# ------------------------------------------------------------------------------------ the algorithm


def batch_of_three(module=dqn_jax, invalid=False):
    """With gamma 0.5; `invalid`: a fourth row, full of garbage, that does not count."""
    rows = 3 + invalid
    return module.Batch(
        module.Transition(
            observation=jnp.zeros((rows, 1)),
            action=jnp.array([0, 1, 0, 1][:rows]),
            reward=jnp.array([1.0, 2.0, 3.0, 1e6][:rows]),
            next_observation=jnp.zeros((rows, 1)),
            terminated=jnp.array([False, True, False, False][:rows]),
            truncated=jnp.array([False, False, True, True][:rows]),
        ),
        discount=jnp.array([0.5, 0.0, 0.5, 9.0][:rows]),
        valid=jnp.array([True, True, True, False][:rows]),
    )


@pytest.mark.parametrize("jit", [False, True])
def test_td_target_by_hand(jit):
    target = jax.jit(dqn_jax.td_target) if jit else dqn_jax.td_target
    next_q = jnp.array([[1.0, 5.0], [7.0, 8.0], [4.0, 2.0]])
    online = jnp.array([[3.0, 2.0], [0.0, 1.0], [0.0, 1.0]])
    # Terminated: the reward alone. Truncated: bootstrapped as any other step.
    np.testing.assert_allclose(target(batch_of_three(), next_q, next_q), [3.5, 2.0, 5.0])
    # Double Q-learning: the online network chooses, the target network judges.
    np.testing.assert_allclose(target(batch_of_three(), next_q, online), [1.5, 2.0, 4.0])


@pytest.mark.parametrize("invalid", [False, True])
@pytest.mark.parametrize("double_q", [False, True])
def test_loss_by_hand(double_q, invalid):
    def q(params, observation):
        return jnp.broadcast_to(params, (len(observation), 2))

    params, target_params = jnp.array([1.0, 2.0]), jnp.array([10.0, 4.0])
    args, batch = Args(double_q=double_q), batch_of_three(invalid=invalid)
    loss = partial(dqn_jax.loss_fn, batch=batch, q=q, args=args)
    (value, mean_q), grad = jax.value_and_grad(loss, has_aux=True)(params, target_params)
    bootstrap = 4.0 if double_q else 10.0  # action 1 is best online, action 0 in the target
    errors = np.array([1 + bootstrap / 2 - 1, 2 - 2, 3 + bootstrap / 2 - 1])
    assert value == pytest.approx(np.mean(errors**2))
    assert mean_q == pytest.approx((1 + 2 + 1) / 3)
    # The gradient does not flow through the target.
    np.testing.assert_allclose(grad, [-2 * (errors[0] + errors[2]) / 3, -2 * errors[1] / 3])


def test_schedule():
    values = [dqn_jax.linear_schedule(1.0, 0.05, 1000, step) for step in (0, 500, 1000, 9000)]
    np.testing.assert_allclose(values, [1.0, 0.525, 0.05, 0.05])
    assert dqn_jax.linear_schedule(1.0, 0.05, 0, 5) == pytest.approx(0.05)


def test_epsilon_greedy_draws_for_each_environment():
    explore = np.array([[True, False, True], [True, True, True]])
    random_actions = np.array([[5, 6, 7], [8, 9, 10]])
    calls = []

    def greedy(observation):
        calls.append(observation)
        return jnp.array([1, 2, 3])

    act = partial(dqn_jax.epsilon_greedy, greedy, explore, random_actions)
    np.testing.assert_array_equal(act(0, "observation"), [5, 2, 7])
    np.testing.assert_array_equal(act(1, None), [8, 9, 10])
    assert calls == ["observation"]  # nobody is greedy at step 1


EXAMPLE = Transition(np.zeros(1, np.float32), 0, 0.0, np.zeros(1, np.float32), False, False)


def make_agent(replay, item, optimizer):
    params = jnp.array([[0.5, -0.5]])  # Q(s, a) = s @ params
    return dqn_jax.Agent(
        params,
        params + 1.0,
        optimizer.init(params),
        replay.init(item),
        jax.random.PRNGKey(3),
        jnp.int32(0),
    )


def random_rollout(steps, n, rng):
    return Transition(
        rng.normal(size=(steps, n, 1)).astype(np.float32),
        rng.integers(2, size=(steps, n), dtype=np.int32),
        rng.normal(size=(steps, n)).astype(np.float32),
        rng.normal(size=(steps, n, 1)).astype(np.float32),
        rng.random((steps, n)) < 0.2,
        rng.random((steps, n)) < 0.2,
    ), rng.random((steps, n)) < 0.8


def test_train_step_against_a_plain_loop():
    """Stored, sampled, updated, target moved when its interval is crossed: one thing at a time."""
    args = Args(train_frequency=4, target_network_frequency=10, batch_size=5, tau=0.5, gamma=0.9)
    replay = buffers.uniform_replay(50, sequence_length=1, donate=False)
    optimizer = optax.sgd(0.1)

    def q(params, observation):
        return observation @ params

    agent = make_agent(replay, (EXAMPLE, None), optimizer)
    rollout, mask = random_rollout(4, 6, np.random.default_rng(0))
    step = partial(dqn_jax.train_step, args=args, replay=replay, q=q, optimizer=optimizer)
    new, metrics = jax.jit(step)(agent, rollout, mask)

    rows = [jax.tree.map(lambda x, t=t, i=i: x[t, i], rollout) for t in range(4) for i in range(6)]
    kept = [row for row, keep in zip(rows, mask.ravel(), strict=True) if keep]
    assert int(replay.size(new.replay)) == len(kept)
    for i, row in enumerate(kept):
        stored, _ = replay.get(new.replay, i)
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), stored, row)

    params, target_params = np.asarray(agent.params), np.asarray(agent.target_params)
    key, subkey = jax.random.split(agent.key)
    losses, moves = [], []
    for i, k in enumerate(jax.random.split(subkey, 6)):  # 24 environment steps, one update each 4
        drawn, _ = replay.sample(new.replay, k, 5).experience
        b = jax.tree.map(lambda x: np.asarray(x[:, 0]), drawn)
        bootstrap = (b.next_observation @ target_params).max(-1)
        target = b.reward + 0.9 * (1 - b.terminated) * bootstrap
        value = (b.observation @ params)[np.arange(5), b.action]
        losses.append(np.mean((target - value) ** 2))
        grad = np.zeros_like(params)
        np.add.at(grad[0], b.action, -2 / 5 * (target - value) * b.observation[:, 0])
        params = params - 0.1 * grad
        if 4 * (i + 1) // 10 > 4 * i // 10:
            target_params = 0.5 * params + 0.5 * target_params
            moves.append(i)
    assert moves == [2, 4]
    np.testing.assert_allclose(new.params, params, rtol=1e-5)
    np.testing.assert_allclose(new.target_params, target_params, rtol=1e-5)
    np.testing.assert_allclose(metrics["losses/td_loss"], np.mean(losses), rtol=1e-5)
    assert int(new.since_target) == 4
    np.testing.assert_array_equal(new.key, key)


@pytest.mark.parametrize("once", [False, True])
def test_windows_of_a_stream_are_folded_and_resets_do_not_count(once):
    """The loss of n-step windows, against transitions that are folded by hand."""
    n, num_envs, steps = 3, 2, 12
    args = Args(n_step=n, buffer_size=steps * num_envs, num_envs=num_envs, batch_size=64, gamma=0.9)
    replay, item = dqn_jax.make_replay(args, EXAMPLE, once)
    optimizer = optax.sgd(0.0)
    rng = np.random.default_rng(1)
    rollout, _ = random_rollout(steps, num_envs, rng)
    rollout = rollout._replace(next_observation=np.roll(rollout.observation, -1, axis=0))
    done = rollout.terminated | rollout.truncated
    mask = np.concatenate([np.ones((1, num_envs), bool), ~done[:-1]])
    assert 3 < (~mask).sum() < 12
    agent = dqn_jax.store(make_agent(replay, item, optimizer), rollout, mask, replay)
    assert (agent.replay.storage[0].next_observation is None) == once
    sample = replay.sample(agent.replay, jax.random.PRNGKey(0), 64)
    window, is_step = sample.experience
    batch = dqn_jax.Batch(*buffers.n_step_transition(window, args.gamma, is_step))
    for b, index in enumerate(np.asarray(sample.indices)):
        t, i = index // num_envs, index % num_envs
        assert batch.valid[b] == mask[t, i]
        total, m = 0.0, 0
        while m < n:
            total += 0.9**m * rollout.reward[t + m, i]
            m += 1
            if done[t + m - 1, i]:
                break
        assert batch.transition.reward[b] == pytest.approx(total, rel=1e-5, abs=1e-6)
        after = rollout.next_observation[t + m - 1, i]
        np.testing.assert_array_equal(batch.transition.next_observation[b], after)
        ended = rollout.terminated[t + m - 1, i]
        assert batch.discount[b] == pytest.approx(0 if ended else 0.9**m)


# ------------------------------------------------------------------------------------ the collector


def alone(seed, actions):
    """The transitions and episodes of one Counter, reset by hand, for as many actions as given."""
    env = gym.make("Counter-v0")
    observation, _ = env.reset(seed=seed)
    transitions, episodes, total, length = [], [], 0.0, 0
    for action in actions:
        after, reward, terminated, truncated, _ = env.step(int(action))
        transitions.append(Transition(observation, action, reward, after, terminated, truncated))
        observation, total, length = after, total + reward, length + 1
        if terminated or truncated:
            episodes.append((total, length))
            observation, total, length = env.reset()[0], 0.0, 0
    return transitions, episodes


@pytest.mark.parametrize(
    ("env_id", "async_envs"),
    [("Counter-v0", False), ("environments:Counter-v0", True), ("CounterSameStep-v0", False)],
)
def test_collector_against_environments_stepped_alone(env_id, async_envs):
    n, num_steps, rollouts = 3, 7, 4
    envs = dqn_jax.make_envs(Args(env_id=env_id, num_envs=n, async_envs=async_envs))
    dqn_jax.check_envs(Args(env_id=env_id), envs)
    rng = np.random.default_rng(0)
    state, example = dqn_jax.reset_envs(envs, seed=5), dqn_jax.example_transition(envs)
    seen = [[] for _ in range(n)]
    episodes = []
    masked = 0
    for _ in range(rollouts):
        actions = rng.integers(3, size=(num_steps, n))

        def act(t, observation, actions=actions):
            assert observation.shape == (n, 3)
            return actions[t]

        state, rollout, mask, ended = dqn_jax.collect(envs, state, act, num_steps, example)
        episodes += ended
        masked += (~mask).sum()
        np.testing.assert_array_equal(rollout.action, actions)
        for t, i in zip(*np.nonzero(mask), strict=True):
            seen[i].append(jax.tree.map(lambda x, t=t, i=i: x[t, i], rollout))
    envs.close()
    ends = 0
    expected_episodes = []
    for i in range(n):
        expected, ended = alone(5 + i, [transition.action for transition in seen[i]])
        ends += sum(bool(row.terminated or row.truncated) for row in expected)
        expected_episodes += ended
        for got, wanted in zip(seen[i], expected, strict=True):
            jax.tree.map(np.testing.assert_array_equal, got, wanted)
    assert ends > 3 * n
    assert sorted(episodes) == sorted(expected_episodes)
    # A step is masked if, and only if, it does nothing but reset.
    pending = int(state.resetting.sum())
    assert masked == (0 if "SameStep" in env_id else ends - pending)


def test_native_vector_version_is_used_from_four_environments_on():
    assert isinstance(dqn_jax.make_envs(Args()), gym.vector.SyncVectorEnv)
    native = dqn_jax.make_envs(Args(num_envs=4))
    assert type(native).__name__ == "CartPoleVectorEnv"
    # CartPole's reward is 1 a step, its time limit 500: returns are lengths, and nothing is lost.
    state = dqn_jax.reset_envs(native, seed=0)
    rng = np.random.default_rng(0)
    state, rollout, mask, episodes = dqn_jax.collect(
        native, state, lambda t, o: rng.integers(2, size=4), 200, dqn_jax.example_transition(native)
    )
    assert all(total == length for total, length in episodes)
    assert sum(length for _, length in episodes) + state.episode_length.sum() == mask.sum()
    done = rollout.terminated | rollout.truncated
    np.testing.assert_array_equal(~mask[1:], done[:-1])
    np.testing.assert_array_equal(rollout.next_observation[:-1], rollout.observation[1:])
    angle = np.abs(rollout.next_observation[..., 2])[done]
    position = np.abs(rollout.next_observation[..., 0])[done]
    assert ((angle > 0.2095) | (position > 2.4)).all()  # the true final observation, not a reset's


def test_functional_environments_are_stepped_one_by_one():
    envs = dqn_jax.make_envs(Args(env_id="phys2d/CartPole-v1", num_envs=4, compiled=False))
    assert isinstance(envs, gym.vector.SyncVectorEnv)
    assert envs.num_envs == 4


# ------------------------------------------------------------------------------------- the learning


PROBE = Args(
    total_timesteps=10_000,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    target_network_frequency=40,
    learning_rate=2e-3,
    gamma=0.5,
    start_e=1.0,
    end_e=1.0,
)


def learned_q(result, observations, num_actions=2):
    *_, q = dqn_jax.flatten_network(dqn_jax.QNetwork(num_actions), observations[0])
    return np.asarray(q(result.agent.params, np.asarray(observations)))


def args_with(**changes):
    return Args(**{**vars(PROBE), **changes})


@pytest.mark.parametrize(
    ("kind", "observations", "values"),
    [
        ("constant", [[0.0]], [[1.0, 1.0]]),
        ("observation", [[-1.0], [1.0]], [[-1.0, -1.0], [1.0, 1.0]]),
        ("discount", [[0.0], [1.0]], [[0.5, 0.5], [1.0, 1.0]]),
        ("action", [[0.0]], [[-1.0, 1.0]]),
        ("both", [[-1.0], [1.0]], [[1.0, -1.0], [-1.0, 1.0]]),
        ("truncation", [[0.0]], [[2.0, 2.0]]),  # 1 / (1 - gamma): a cut is not an end
    ],
)
def test_probe_values(kind, observations, values):
    result = dqn_jax.train(args_with(env_id=f"Probe-{kind}-v0", num_envs=2))
    q = learned_q(result, np.array(observations, np.float32))
    np.testing.assert_allclose(q, values, atol=0.05)


@pytest.mark.parametrize(
    ("env_id", "value"),
    [("Probe-truncation-v0", 2.0), ("Probe-discount-v0", 0.5), ("CounterSameStep-v0", None)],
)
def test_n_step_probe_values(env_id, value):
    """Ends of both kinds within three steps leave the values what they are with one."""
    result = dqn_jax.train(args_with(env_id=env_id, n_step=3, num_envs=2))
    assert len(result.agent.replay.storage[0].reward) == 500
    if value is not None:
        q = learned_q(result, np.zeros((1, 1), np.float32))
        np.testing.assert_allclose(q, value, atol=0.05)


def test_probe_value_with_double_q_and_soft_target():
    result = dqn_jax.train(args_with(env_id="Probe-truncation-v0", double_q=True, tau=0.5))
    np.testing.assert_allclose(learned_q(result, np.zeros((1, 1), np.float32)), 2.0, atol=0.05)


def test_image_probe(capsys):
    """uint8 images go through the Nature CNN, stay uint8 in the buffer, and can be learned from."""
    args = args_with(
        env_id="ProbeImage-v0", total_timesteps=1_200, batch_size=16, learning_rate=3e-4
    )
    result = dqn_jax.train(args)
    stored, is_step = result.agent.replay.storage
    assert stored.observation.dtype == jnp.uint8
    assert stored.next_observation is None  # each observation once
    assert is_step.shape == (1000, 1)
    assert "replay buffer: 1000 steps, 0.01 GB" in capsys.readouterr().out
    sizes = (4 * 64 * 32 + 32, 32 * 16 * 64 + 64)  # the first two layers alone
    assert result.agent.params.size > sum(sizes)
    black, white = np.zeros((1, 4, 36, 36), np.uint8), np.full((1, 4, 36, 36), 255, np.uint8)
    q = learned_q(result, np.concatenate([black, white]))
    np.testing.assert_allclose(q, [[1.0, -1.0], [-1.0, 1.0]], atol=0.25)


@pytest.mark.parametrize("shape", [(84, 84), (84, 84, 3), (4, 84, 84)])
def test_nature_cnn_layouts(shape):
    """3,136 features go into the dense layer of the paper, whatever the layout of the image."""
    network = dqn_jax.QNetwork(5)
    image = np.zeros((1, *shape), np.uint8)
    params = network.init(jax.random.PRNGKey(0), image)
    channels = {2: 1, 3: min(shape)}[len(shape)]
    cnn = params["params"]["NatureCNN_0"]
    assert cnn["Conv_0"]["kernel"].shape == (8, 8, channels, 32)
    assert cnn["Dense_0"]["kernel"].shape == (3136, 512)
    assert network.apply(params, image).shape == (1, 5)


SHORT = dict(total_timesteps=3_000, learning_starts=500, log_interval=500)


@pytest.mark.parametrize("num_envs", [1, 8])
def test_same_seed_same_run(num_envs):
    first = dqn_jax.train(Args(num_envs=num_envs, **SHORT))
    second = dqn_jax.train(Args(num_envs=num_envs, **SHORT))
    other = dqn_jax.train(Args(num_envs=num_envs, seed=2, **SHORT))
    jax.tree.map(np.testing.assert_array_equal, first.agent, second.agent)
    assert first.returns == second.returns != other.returns


@pytest.mark.parametrize("num_envs", [1, 8, 64])
def test_ratio_of_gradient_steps_to_environment_steps(num_envs):
    """One gradient step per train_frequency environment steps, whatever the number of them."""
    args = Args(num_envs=num_envs, **SHORT)
    result = dqn_jax.train(args)
    iteration = np.lcm(num_envs, 10)
    total = -(-3_000 // iteration) * iteration
    learning = total - 500 // iteration * iteration
    assert int(result.agent.opt_state[0].count) == learning // 10


# ------------------------------------------------------------------------------------- the program


def run_script(*flags, folder, script=ROOT / "dqn_jax.py"):
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(
        [sys.executable, str(script), *flags],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_copy_pasted_script_runs_and_its_events_can_be_read(tmp_path):
    """buffers.py and the script in an empty folder are all that is needed."""
    for name in ("buffers.py", "dqn_jax.py"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    flags = "--total-timesteps 3000 --learning-starts 500 --log-interval 500 --num-envs 2"
    done = run_script(*flags.split(), folder=tmp_path, script=tmp_path / "dqn_jax.py")
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("CartPole-v1__dqn_jax__1__")
    assert re.search(rf"{folder.name}: mean return of the last 100 episodes \d+\.\d\d", done.stdout)
    scalars, events = read_events(folder)
    assert set(scalars) == {
        "charts/episodic_return",
        "charts/episodic_length",
        "charts/SPS",
        "charts/epsilon",
        "losses/td_loss",
        "losses/q_values",
        "charts/final_return",
        "eval/episodic_return",
    }
    for tag, points in scalars.items():
        steps, values = zip(*points, strict=True)
        assert np.isfinite(values).all(), tag
        assert list(steps) == sorted(steps)
    assert [step for step, _ in scalars["charts/epsilon"]] == list(range(500, 3001, 500))
    assert [step for step, _ in scalars["losses/td_loss"]] == list(range(1000, 3001, 500))
    np.testing.assert_allclose(scalars["charts/epsilon"][1][1], 1 - 0.95 * 990 / 1500, rtol=1e-6)
    assert scalars["charts/epsilon"][-1][1] == pytest.approx(0.05)
    # CartPole pays 1 a step: returns are lengths, and steps that only reset count in neither.
    assert scalars["charts/episodic_return"] == scalars["charts/episodic_length"]
    (text,) = events.Tensors("hyperparameters/text_summary")
    assert "|learning_starts|500|" in text.tensor_proto.string_val[0].decode()


def test_interrupt_keeps_what_was_logged(tmp_path):
    # A runner that was started in the background ignores SIGINT, and its children with it.
    restore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    script = [str(ROOT / "dqn_jax.py"), "--log-interval", "100"]
    process = subprocess.Popen(
        [sys.executable, "-c", restore, *script], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.time() + 120
        while not list(tmp_path.glob("runs/*/events*")) and time.time() < deadline:
            time.sleep(0.1)
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "interrupted: what was logged is kept" in stderr
    assert "Traceback" not in stderr
    (folder,) = (tmp_path / "runs").iterdir()
    scalars, _ = read_events(folder)
    assert len(scalars["charts/SPS"]) > 5
    assert scalars["charts/episodic_return"]


def test_interrupt_waits_for_a_write(monkeypatch):
    """A write that Ctrl-C cuts short would leave half an event, and hide those after it."""
    write, written = EventsWriter.write_event, []

    def write_event(self, event):
        if written and written[-1]:  # the first ones are written before training
            signal.raise_signal(signal.SIGINT)
        write(self, event)
        written.append(event.step)

    monkeypatch.setattr(EventsWriter, "write_event", write_event)
    with pytest.raises(KeyboardInterrupt):
        dqn_jax.train(Args(**SHORT))
    assert written
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(env_id="CartPole-v9"), "env_id CartPole-v9: .*"),
        (dict(env_id="no_such_module:X-v0"), "env_id no_such_module:X-v0: .*"),
        (
            dict(env_id="Pendulum-v1"),
            r"env_id Pendulum-v1: DQN takes actions Discrete\(n\), got Box",
        ),
        (
            dict(env_id="FrozenLake-v1"),
            "env_id FrozenLake-v1: observations must be a Box, got Disc",
        ),
        (dict(batch_size=20_000), "batch_size 20000 is larger than buffer_size"),
        (dict(learning_starts=100), "learning_starts 100 must be at least batch_size 128"),
        (
            dict(total_timesteps=10_000),
            "learning_starts 10000 must be .* less than total_timesteps",
        ),
        (dict(num_envs=0), "num_envs must be at least 1, got 0"),
        (dict(train_frequency=0), "train_frequency must be at least 1"),
        (
            dict(num_envs=7, train_frequency=4001),
            "num_envs 7 and train_frequency 4001 do not divide",
        ),
        (dict(gamma=1.5), "gamma must be from 0 to 1, got 1.5"),
        (dict(n_step=3, num_envs=3), "buffer_size or n_step: max_size 10000 is not a multiple"),
        (dict(seed=-1), "seed must be at least 0, got -1"),
        (dict(learning_rate=3.0), "learning_rate must be from 0 to 1"),
    ],
)
def test_mistakes_in_flags_are_found_before_training(changes, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        dqn_jax.train(Args(**changes))
    assert not (tmp_path / "runs").exists()


def test_disabled_autoreset_is_refused():
    envs = gym.make_vec(
        "Counter-v0", 2, "sync", vector_kwargs={"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    )
    with pytest.raises(UsageError, match="must be NEXT_STEP or SAME_STEP, got"):
        dqn_jax.check_envs(Args(env_id="Counter-v0"), envs)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--env-id CartPole-v9", "error: env_id CartPole-v9: "),
        ("--buffer-size 64", "error: batch_size 128 is larger than buffer_size"),
    ],
)
def test_mistakes_in_flags_are_one_line_and_exit_code_2(flags, message, tmp_path):
    done = run_script(*flags.split(), folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(message)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_help_has_a_line_for_every_flag(tmp_path):
    done = run_script("--help", folder=tmp_path)
    assert done.returncode == 0
    for name in vars(Args()):
        assert f"--{name.replace('_', '-')}" in done.stdout


def shared_blocks(script):
    """name: text, of what stands between the marks."""
    text = (ROOT / script).read_text()
    marks = [line.strip() for line in text.splitlines() if "# === " in line]
    names = [re.fullmatch(r"# === shared: ([\w ]+) ===", mark) for mark in marks[::2]]
    assert all(names)
    assert set(marks[1::2]) == {"# === end shared ==="}
    blocks = re.findall(r"# === shared: ([\w ]+) ===\n(.*?)# === end shared ===", text, re.DOTALL)
    assert len(dict(blocks)) == len(blocks) == len(names)
    return dict(blocks)


def test_text_that_the_scripts_share_is_the_same():
    blocks = shared_blocks("dqn_jax.py")
    assert len(blocks) >= 6
    for script in ("per_dqn_jax.py", "ppo_jax.py"):
        assert shared_blocks(script) == blocks, script
