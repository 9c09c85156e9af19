"""Compiled training in all three scripts: against the ordinary loop, agents trained alone, one
device, and known values.
"""

import environments  # noqa: F401  (registers)
import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from test_dqn import read_events, run_script

import buffers
import dqn_jax
import per_dqn_jax
import ppo_jax
from dqn_jax import EnvState, Functional, Transition, UsageError

GAMMA = 0.8
DQN = dict(
    env_id="Chain-v0",
    total_timesteps=8_000,
    learning_starts=200,
    buffer_size=1_000,
    batch_size=64,
    train_frequency=4,
    num_envs=4,
    target_network_frequency=40,
    learning_rate=2e-3,
    gamma=GAMMA,
    end_e=1.0,
)
PPO = dict(env_id="Chain-v0", num_envs=4, num_steps=32, gamma=GAMMA, learning_rate=3e-3)
SCRIPTS = [(dqn_jax, DQN), (per_dqn_jax, DQN), (ppo_jax, PPO)]
IDS = ["dqn", "per_dqn", "ppo"]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_functional(env_id, time_limit):
    envs = dqn_jax.make_envs(dqn_jax.Args(env_id=env_id))
    _, to_env = dqn_jax.discrete_actions(envs.single_action_space)
    example = dqn_jax.example_transition(envs)._replace(action=np.zeros((), np.int32))
    env = dqn_jax.functional(envs)
    return Functional(env, time_limit, to_env or (lambda action: action), example)


def test_collected_is_what_the_ordinary_loop_collects():
    """The chain draws nothing at random: the same actions must give the same arrays."""
    n, steps = 3, 40
    envs = dqn_jax.make_envs(dqn_jax.Args(env_id="Chain-v0", num_envs=n, compiled=False))
    assert envs.num_envs == n
    functional = make_functional("Chain-v0", envs.spec.max_episode_steps)
    keys = jax.random.split(jax.random.PRNGKey(0), n)
    state = dqn_jax.reset_envs(envs, seed=0)
    compiled = jax.vmap(lambda key: dqn_jax.reset_functional(functional, key))(keys)
    rng, truncated, terminated = np.random.default_rng(0), 0, 0
    for round in range(3):
        actions = rng.random((steps, n)) < [0.4, 0.6, 0.9]
        actions = actions.astype(np.int32)
        args = (lambda t, _, actions=actions: actions[t], steps)
        state, wanted, mask, episodes = dqn_jax.collect(envs, state, *args, functional.example)

        @jax.jit
        def collect(state, actions=actions, round=round):
            key = jax.random.PRNGKey(round)
            act = jnp.asarray(actions)
            return dqn_jax.collect_functional(functional, state, lambda t, _: act[t], steps, key)

        compiled, got, got_mask, sums = collect(compiled)
        np.testing.assert_array_equal(got_mask, mask)
        for name, x, y in zip(Transition._fields, got, wanted, strict=True):
            assert x.dtype == y.dtype, name
            np.testing.assert_array_equal(x, y, err_msg=name)
        returns, lengths = zip(*episodes, strict=True)
        assert [int(x) for x in sums] == [len(episodes), sum(returns), sum(lengths)]
        np.testing.assert_array_equal(compiled.episode_return, state.episode_return)
        np.testing.assert_array_equal(compiled.resetting, state.resetting)
        np.testing.assert_array_equal(compiled.episode_length, state.episode_length)
        truncated, terminated = truncated + got.truncated.sum(), terminated + got.terminated.sum()
    assert truncated > 5
    assert terminated > 20


def test_environments_draw_afresh():
    """No two episodes, and no two environments, start alike; the true final observation is kept."""
    functional = make_functional("phys2d/CartPole-v1", 500)
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    state = jax.vmap(lambda key: dqn_jax.reset_functional(functional, key))(keys)
    _, rollout, mask, _ = dqn_jax.collect_functional(
        functional, state, lambda t, _: jnp.arange(4) % 2, 100, jax.random.PRNGKey(1)
    )
    starts = np.concatenate([state.observation, rollout.next_observation[~mask]])
    assert len(starts) > 20
    assert len(np.unique(starts, axis=0)) == len(starts)
    assert (np.abs(starts) <= 0.05).all()
    angle = np.abs(rollout.next_observation[..., 2])[rollout.terminated]
    assert (angle > 0.2095).all()
    np.testing.assert_array_equal(rollout.next_observation[:-1], rollout.observation[1:])


@pytest.mark.parametrize("env_id", ["Chain-v0", "ChainVector-v0"])
@pytest.mark.parametrize(("module", "flags"), SCRIPTS[:2], ids=IDS[:2])
def test_q_values_of_a_chain(module, flags, env_id):
    result = module.train(module.Args(**{**flags, "env_id": env_id}))
    *_, q = module.flatten_network(module.QNetwork(2), np.zeros(5, np.float32))
    states = np.arange(4)
    right, left = GAMMA ** (3.0 - states), GAMMA ** (4.0 - np.maximum(states - 1, 0))
    values = q(result.agent.params, np.eye(5, dtype=np.float32)[:4])
    np.testing.assert_allclose(values, np.stack([left, right], axis=1), atol=0.03)


def test_policy_and_values_of_a_chain():
    args = ppo_jax.Args(**{**PPO, "total_timesteps": 20_000, "ent_coef": 0.0})
    result = ppo_jax.train(args)
    *_, apply = ppo_jax.flatten_network(ppo_jax.ActorCritic(2, False), np.zeros(5, np.float32))
    output, values = apply(result.agent.params, np.eye(5, dtype=np.float32)[:4])
    assert (np.diff(output, axis=1) > 3).all()
    np.testing.assert_allclose(values, GAMMA ** (3.0 - np.arange(4)), atol=0.05)
    assert np.mean(result.returns) > 0.99


@pytest.mark.parametrize(
    "env_id",
    ["phys2d/CartPole-v1", "phys2d/Pendulum-v0", "tabular/Blackjack-v0", "tabular/CliffWalking-v0"],
)
def test_the_environments_that_gymnasium_ships(env_id):
    flags = dict(env_id=env_id, num_envs=4, total_timesteps=2_048)
    if env_id.startswith("phys2d"):
        result = ppo_jax.train(ppo_jax.Args(**flags, compiled=True))
        scalars, _ = read_events(result.folder)
        assert np.isfinite([value for points in scalars.values() for _, value in points]).all()
        assert {"charts/SPS", "losses/value_loss", "charts/learning_rate"} < set(scalars)
        lengths = {value for _, value in scalars["charts/episodic_length"]}
        assert lengths == {200.0} if "Pendulum" in env_id else max(lengths) < 200
        return
    result = dqn_jax.train(dqn_jax.Args(**flags, learning_starts=1_000, train_frequency=16))
    stored = result.agent.replay.storage[0]
    assert stored.action.dtype == jnp.int32
    actions = np.unique(stored.action.ravel()[:1_500])
    assert set(actions) == set(range(4 if "Cliff" in env_id else 2))


def test_a_call_for_each_log_interval_and_what_is_logged():
    """Episodes of CartPole last as long as their return, and all of them are counted."""
    flags = dict(env_id="phys2d/CartPole-v1", num_envs=4, train_frequency=8, learning_starts=1_500)
    args = dqn_jax.Args(**flags, total_timesteps=4_000, log_interval=1_000)
    result = dqn_jax.train(args)
    scalars, _ = read_events(result.folder)
    # Warm-up is a call of its own and ends within an interval.
    steps = [1_000, 1_496, 2_496, 3_496, 4_000]
    assert [step for step, _ in scalars["charts/episodic_return"]] == steps
    assert scalars["charts/episodic_return"] == scalars["charts/episodic_length"]
    assert [step for step, _ in scalars["losses/td_loss"]] == [2_496, 3_496, 4_000]
    wanted = dqn_jax.linear_schedule(1.0, 0.05, 2_000, 992)
    assert scalars["charts/epsilon"][0][1] == pytest.approx(wanted)
    assert int(result.agent.since_target) == (4_000 - 1_496) % args.target_network_frequency
    assert len(result.returns) == 100


# ------------------------------------------------------------------------------------- many at once


def flags_of(module, flags, **changes):
    short = dict(total_timesteps=1_024, log_interval=512, env_id="phys2d/CartPole-v1")
    return module.Args(**{**flags, **short, **changes})


@pytest.mark.parametrize(("module", "flags"), SCRIPTS, ids=IDS)
def test_an_agent_of_a_group_is_the_agent_trained_alone(module, flags):
    # Rounding differs, and a draw by priority makes much of that in time.
    flags = flags if module is ppo_jax else {**flags, "learning_starts": 900}
    group = module.train(flags_of(module, flags, num_seeds=3, seed=5))
    assert len(group.returns) == 3
    assert len({int(seed.name.split("__")[2]) for seed in _folders()}) == 3
    alone = module.train(flags_of(module, flags, seed=6))
    np.testing.assert_allclose(group.agent.params[1], alone.agent.params, rtol=1e-5, atol=1e-6)
    assert group.returns[1] == pytest.approx(np.mean(alone.returns), rel=1e-5)
    for other in (0, 2):
        assert np.abs(group.agent.params[other] - alone.agent.params).max() > 1e-2


def _folders():
    from pathlib import Path

    return sorted(Path("runs").iterdir())


@pytest.mark.parametrize(("module", "flags"), SCRIPTS[2:], ids=IDS[2:])
def test_seeds_spread_over_devices(module, flags):
    one = module.train(flags_of(module, flags, num_seeds=4))
    two = module.train(flags_of(module, flags, num_seeds=4, num_devices=2))
    assert len(two.agent.params.sharding.device_set) == 2
    np.testing.assert_allclose(one.agent.params, two.agent.params, rtol=1e-5, atol=1e-6)


def on_devices(count, fn, split):
    """`fn` of arrays that are cut into `count` along the first axis where `split` says so."""
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((count,), ("devices",), axis_types=auto)
    each, same = PartitionSpec("devices"), PartitionSpec()
    specs = tuple(each if cut else same for cut in split)
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=(same, each), check_vma=False)
    )


class Drawn(buffers.NamedTuple):
    """The state of a stand-in for a replay buffer, which draws all that it holds."""

    storage: tuple
    probabilities: jax.Array
    max_priority: jax.Array


class AllOfIt(buffers.NamedTuple):
    """A stand-in for a replay buffer that draws all that it holds."""

    @staticmethod
    def add_batch(state, items, mask=None):
        return state

    @staticmethod
    def sample(state, key, batch_size):
        assert len(state.probabilities) == batch_size
        return buffers.Sample(state.storage, jnp.arange(batch_size), state.probabilities)

    @staticmethod
    def size(state):
        return len(state.probabilities)

    @staticmethod
    def set_priorities(state, indices, priorities):
        return state._replace(probabilities=priorities)


@pytest.mark.parametrize("module", [dqn_jax, per_dqn_jax], ids=IDS[:2])
def test_gradient_step_on_four_devices_is_that_on_one(module):
    """The same batch in four parts, with windows that are no transitions in one of them."""
    rng, rows = np.random.default_rng(0), 32
    init, _, q = module.flatten_network(module.QNetwork(3), np.zeros(4, np.float32))
    params, optimizer = init(jax.random.PRNGKey(0)), optax.adam(1e-2)

    def draw(*shape):
        return rng.normal(size=(rows, 1, *shape)).astype(np.float32)

    window = Transition(
        draw(4),
        rng.integers(3, size=(rows, 1)).astype(np.int32),
        draw(),
        draw(4),
        rng.random((rows, 1)) < 0.3,
        np.zeros((rows, 1), bool),
    )
    mask = np.arange(rows)[:, None] > 2
    probabilities = rng.random(rows).astype(np.float32) / rows
    state = (window, mask)
    rollout = jax.tree.map(lambda x: x[:2], window)

    def step(count, agent, state, probabilities):
        args = module.Args(
            num_devices=count, batch_size=rows // count, train_frequency=2 * count, num_envs=1
        )
        agent = agent._replace(replay=Drawn(state, probabilities, jnp.float32(1)))
        extra = (jnp.float32(0.7),) if module is per_dqn_jax else ()
        agent, metrics = module.train_step(
            agent, rollout, np.ones((2, 1), bool), *extra, args, AllOfIt, q, optimizer
        )
        return (agent.params, metrics), agent.replay.probabilities

    opt_state, key = optimizer.init(params), jax.random.PRNGKey(0)
    agent = module.Agent(params, params + 0.1, opt_state, None, key, jnp.int32(0))
    (one, metrics), priorities = jax.jit(lambda *x: step(1, *x))(agent, state, probabilities)
    four = on_devices(4, lambda *x: step(4, *x), (False, True, True))
    (spread, spread_metrics), spread_priorities = four(agent, state, probabilities)
    assert np.abs(one - params).max() > 5e-3
    np.testing.assert_allclose(spread, one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(spread_priorities, priorities, rtol=1e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(spread_metrics[name], value, rtol=1e-5, err_msg=name)


def test_ppo_update_on_four_devices_is_that_on_one():
    """Minibatches of one device made of those of the four, with statistics over all of them."""
    from test_ppo import make_step, random_rollout

    n, steps, count = 8, 16, 4
    flags = dict(
        num_steps=steps,
        num_minibatches=2,
        update_epochs=2,
        normalize_rewards=True,
        normalize_observations=True,
        num_envs=n,
    )
    args = ppo_jax.Args(**flags)
    rollout, mask = random_rollout(np.random.default_rng(3), steps, n, True)
    assert 0 < (~mask).sum() < mask.size / 2
    local = np.random.default_rng(0).permuted(
        np.tile(np.arange(steps * n // count), (2, 1)), axis=1
    )
    local = local.astype(np.int32)
    # Row t * 2 + i of device d is the environment 2 * d + i at time t.
    part = n // count
    rows = local // part * n + local % part
    rows = np.stack([rows + part * d for d in range(count)], axis=1)  # [epochs, devices, rows]
    rows = rows.reshape(2, count, 2, -1).swapaxes(1, 2).reshape(2, -1)
    _, agent, one = make_step(args)
    one_agent, metrics = one(agent, rollout, mask, rows)

    spread_args = ppo_jax.Args(**flags, num_devices=count)
    _, small, _ = make_step(ppo_jax.Args(**{**flags, "num_envs": part}))
    *_, step = make_step(spread_args)

    def on_each(rollout, mask):
        new, metrics = step.func.__wrapped__(
            small,
            jax.tree.map(lambda x: x.swapaxes(0, 1), rollout),
            mask.swapaxes(0, 1),
            local,
            learning_rate=jnp.float32(args.learning_rate),
        )
        return (new.params, new.observations, new.returns, metrics), new.discounted_return

    across = jax.tree.map(lambda x: x.swapaxes(0, 1), rollout)
    (params, observations, returns, spread), discounted = on_devices(count, on_each, (True, True))(
        across, mask.swapaxes(0, 1)
    )
    assert np.abs(one_agent.params - agent.params).max() > 5e-4
    np.testing.assert_allclose(params, one_agent.params, rtol=1e-4, atol=1e-6)
    for got, wanted in ((observations, one_agent.observations), (returns, one_agent.returns)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), got, wanted)
    np.testing.assert_allclose(discounted, one_agent.discounted_return, rtol=1e-5)
    for name, value in metrics.items():
        np.testing.assert_allclose(spread[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("module", "flags"), SCRIPTS[1:], ids=IDS[1:])
def test_one_agent_on_four_devices_learns_the_chain(module, flags):
    steps = 20_000 if module is ppo_jax else flags["total_timesteps"]
    args = module.Args(**{**flags, "total_timesteps": steps, "num_devices": 4, "num_envs": 8})
    result = module.train(args)
    if module is ppo_jax:
        assert np.mean(result.returns) > 0.98
        return
    *_, q = module.flatten_network(module.QNetwork(2), np.zeros(5, np.float32))
    values = q(result.agent.params, np.eye(5, dtype=np.float32)[:4])
    np.testing.assert_allclose(values[:, 1], GAMMA ** (3.0 - np.arange(4)), atol=0.05)


# ------------------------------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(env_id="CartPole-v1", compiled=True), "functional environments, which CartPole-v1"),
        (dict(env_id="CartPole-v1", num_seeds=2), "num_seeds and num_devices are for functional"),
        (dict(env_id="Chain-v0", num_seeds=2, compiled=False), "are for functional"),
        (dict(env_id="Chain-v0", compiled=True, async_envs=True), "not for async_envs"),
        (dict(env_id="ChainWrapped-v0", compiled=True), "which ChainWrapped-v0 is not"),
        (dict(env_id="Chain-v0", num_devices=64, num_envs=64), "64 is more than this machine has"),
        (dict(env_id="Chain-v0", num_devices=3, num_envs=4), "3 must divide num_envs, got 4"),
        (dict(env_id="Chain-v0", num_devices=2, num_seeds=3), "2 must divide num_seeds, got 3"),
        (dict(env_id="ChainVector-v0", compiled=False), "ChainVector-v0"),
    ],
)
@pytest.mark.parametrize("module", [dqn_jax, ppo_jax], ids=["dqn", "ppo"])
def test_mistakes_are_found_before_training(module, flags, message, tmp_path):
    with pytest.raises(UsageError if module is dqn_jax else ppo_jax.UsageError, match=message):
        module.train(module.Args(**flags))
    assert not (tmp_path / "runs").exists()


def test_any_seed_is_one():
    """The environments of Gymnasium take seeds of more than 32 bits, and so does this."""
    flags = dict(env_id="Chain-v0", num_steps=8, total_timesteps=32, seed=2**32 + 7)
    assert np.isfinite(ppo_jax.train(ppo_jax.Args(**flags)).agent.params).all()


def test_wrappers_of_a_registration_are_kept_by_stepping_it_ordinarily():
    envs = dqn_jax.make_envs(dqn_jax.Args(env_id="ChainWrapped-v0"))
    assert dqn_jax.functional(envs) is None
    assert dqn_jax.reset_envs(envs, seed=0).observation.shape == (1, 6)


def test_command_line(tmp_path):
    flags = "--env-id phys2d/CartPole-v1 --total-timesteps 3000 --num-seeds 3 --learning-starts 500"
    done = run_script(*flags.split(), "--compiled", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "and the 2 after it: final return " in done.stdout
    assert "interquartile mean" in done.stdout
    folders = _folders()
    assert [folder.name.split("__")[2] for folder in folders] == ["1", "2", "3"]
    for i, folder in enumerate(folders):
        scalars, events = read_events(folder)
        (text,) = events.Tensors("hyperparameters/text_summary")
        assert f"|seed|{i + 1}|" in text.tensor_proto.string_val[0].decode()
        assert scalars["losses/td_loss"][-1][0] == 3000
        assert np.isfinite([value for _, value in scalars["losses/td_loss"]]).all()
    flags = "--env-id phys2d/CartPole-v1 --total-timesteps 600 --learning-starts 500 --no-compiled"
    done = run_script(*flags.split(), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "mean return of the last" in done.stdout


def test_states_of_other_dtypes_and_shapes_than_the_first():
    """CliffWalking starts with Python scalars and goes on with arrays, one of another shape."""
    functional = make_functional("tabular/CliffWalking-v0", None)
    state = dqn_jax.reset_functional(functional, jax.random.PRNGKey(0))
    action = functional.to_env(jnp.array([1]))[0]
    keys = jax.random.split(jax.random.PRNGKey(1))
    start = functional.env.initial(keys[0])
    after, outcome = dqn_jax.step_functional(functional, state, action, keys, start)
    assert isinstance(after, EnvState)
    shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (state, after)]
    assert shapes[0] == shapes[1]
    assert outcome == (-100, False, False)  # off the cliff
    assert after.episode_return == -100
    assert isinstance(functional.env.action_space, gym.spaces.Box)
