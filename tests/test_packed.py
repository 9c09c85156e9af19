"""cleanreplay/packed.py: observations of images and numbers, a Dict, as bytes."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import gymnasium as gym
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.functional_jax_env import FunctionalJaxEnv
from gymnasium.experimental.functional import FuncEnv
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from helpers import SMALL_DQN, SMALL_PPO, make_agent, make_trainer, more, read_events

import cleanreplay
import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import goals, policies, protocol, replays, spaces
from cleanreplay.environments import describe, layout_of, wrap
from cleanreplay.errors import UsageError
from cleanreplay.packed import Packed, Part, pack, unpack
from cleanreplay.vault import Vault


class Bars(FuncEnv):
    """An image of a bar that lies or stands, anywhere, and two numbers, of which one is +1 or -1.

    The right action, with a reward of 1, is whether the bar stands, or the opposite if the number
    is -1. Half of them are right for who does not see both. Each observation is a new one.
    """

    observation_space = Dict(
        numbers=Box(-1, 1, (2,), np.float32), image=Box(0, 255, (9, 9, 1), np.uint8)
    )
    action_space = Discrete(2)

    def initial(self, rng, params=None):
        return jax.random.randint(rng, (4,), 0, jnp.array([2, 2, 9, 5]))

    def transition(self, state, action, rng, params=None):
        return self.initial(rng)

    def observation(self, state, rng, params=None):
        stands, is_plus, row, column = state
        along = jnp.arange(9)
        bar = (along[:, None] == row) & (along >= column) & (along < column + 5)
        image = jnp.where(stands, bar.T, bar)[..., None].astype(jnp.uint8)
        return {"image": image, "numbers": jnp.float32([2 * is_plus - 1, 0.3])}

    def reward(self, state, action, next_state, rng, params=None):
        action = action if jnp.ndim(action) == 0 else jnp.where(action[0] > 0, 1, 0)
        return jnp.float32(action == (state[0] == state[1]))

    def terminal(self, state, rng, params=None):
        return jnp.bool_(False)


class BarsBox(Bars):
    """Its action is 1 if a number is above 0."""

    action_space = Box(-1, 1, (1,), np.float32)


def make_bars(func_env, **kwargs):
    return FunctionalJaxEnv(func_env, metadata={"render_modes": []}, **kwargs)


unchecked = {"max_episode_steps": 10, "disable_env_checker": True}
gym.register("Bars-v0", partial(make_bars, Bars()), **unchecked)
gym.register("BarsBox-v0", partial(make_bars, BarsBox()), **unchecked)
LAYOUT = (Part("image", (9, 9, 1), "uint8"), Part("numbers", (2,), "float32"))

SMALL = {
    "dqn": (dqn_jax, SMALL_DQN),
    "per_dqn": (per_dqn_jax, SMALL_DQN),
    "sac": (sac_jax, SMALL_DQN),
    "r2d2": (r2d2_jax, SMALL_DQN | dict(burn_in=2, train_length=4, period=2, n_step=1)),
    "ppo": (ppo_jax, SMALL_PPO),
    "recurrent_ppo": (recurrent_ppo_jax, SMALL_PPO | dict(sequence_length=4)),
}
SCRIPTS = ["dqn", *[more(name) for name in SMALL if name != "dqn"]]


@pytest.mark.parametrize("xp", [np, jnp])
def test_unpacked_is_what_was_packed_bit_by_bit(xp):
    layout = (Part("flags", (5, 6, 7), "bool"), *LAYOUT)
    random = np.random.default_rng(0)
    parts = {
        "image": random.integers(256, size=(4, 3, 9, 9, 1), dtype=np.uint8),
        "flags": random.random((4, 3, 5, 6, 7)) < 0.5,
        "numbers": np.float32([np.nan, -0.0] * 12).reshape(4, 3, 2),
    }
    given = {name: xp.asarray(x) for name, x in parts.items()}
    packed = pack(given, layout)
    assert (packed.shape, packed.dtype) == ((4, 3, 210 + 81 + 8), np.uint8)
    again = unpack(packed, layout)
    assert list(again) == ["flags", "image", "numbers"]
    for name, x in again.items():
        assert x.dtype == parts[name].dtype
        assert np.asarray(x).tobytes() == parts[name].tobytes()


class Everything(gym.Env):
    """A Dict whose entries are of all kinds; it counts its steps."""

    observation_space = Dict(
        {
            "where": Box(-1e9, 1e9, (2, 2), np.float64),
            "kind": Discrete(3, start=5),
            "inner": Dict({"a": Box(0, 9, (1,), np.int64), "b": Discrete(2)}),
            "grey": Box(0, 255, (36, 40), np.uint8),
            "small": Box(0, 255, (2, 2), np.uint8),
            "planes": Box(0, 1, (4, 7, 7), bool),
        }
    )
    action_space = Discrete(2)

    def observe(self):
        n = self.steps
        return {
            "where": np.full((2, 2), n + 0.25),
            "kind": np.int64(5 + n % 3),
            "inner": {"a": np.array([n]), "b": np.int64(n % 2)},
            "grey": np.full((36, 40), n, np.uint8),
            "small": np.full((2, 2), n + 7, np.uint8),
            "planes": np.arange(4 * 49).reshape(4, 7, 7) == n,
        }

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action):
        self.steps += 1
        return self.observe(), 1.0, False, self.steps == 5, {}


gym.register("Everything-v0", Everything)


def test_entries_that_are_no_images_are_flat_numbers():
    envs = wrap(SyncVectorEnv([Everything] * 2), 1)
    space = envs.single_observation_space
    envs.reset(seed=0)
    observation, *_ = envs.step(np.zeros(2, int))
    assert envs.observation_space.contains(observation)
    for row in range(2):
        parts = unpack(observation, space.layout)
        assert (parts["grey"][row] == 1).all()
        np.testing.assert_array_equal(np.flatnonzero(parts["planes"][row]), [1])
        assert parts["where"][row].tolist() == [1.25] * 4
        assert parts["kind"][row].tolist() == [0, 1, 0]
        assert parts["inner"][row].tolist() == [1, 0, 1]
        assert parts["small"][row].tolist() == [8] * 4
    assert [part.dtype for part in space.layout[:2]] == ["uint8", "bool"]
    envs.close()


def test_a_stack_has_the_frames_of_images_and_numbers():
    envs = wrap(SyncVectorEnv([Everything]), 3)
    layout = envs.single_observation_space.layout
    envs.reset(seed=0)
    observation, *_ = envs.step(np.zeros(1, int))
    parts = unpack(observation, layout)
    assert parts["grey"].shape == (1, 3, 36, 40)
    assert parts["grey"][0, :, 0, 0].tolist() == [0, 0, 1]
    assert parts["where"][0, :, 0].tolist() == [0, 0.25, 1.25]
    envs.close()


def test_a_dict_without_an_image_is_flattened():
    assert layout_of(Dict(a=Box(0, 255, (4, 4), np.uint8), b=Discrete(3))) == ()


@pytest.mark.parametrize(
    ("env_id", "frame_stack", "wanted"),
    [
        ("Bars-v0", 1, "images (image of 9 x 9 with 1 channels) and 2 numbers"),
        ("Bars-v0", 3, "images (image of 9 x 9 with 3 channels) and 6 numbers"),
    ],
)
def test_a_line_says_what_is_read_as_an_image(env_id, frame_stack, wanted):
    args = dqn_jax.Args(frame_stack=frame_stack)
    with closing(dqn_jax.make_envs(args, dqn_jax.Run(env_id=env_id), 1)) as envs:
        assert describe(envs) == f"observations are a Dict of {wanted}"


@pytest.mark.parametrize("lead", [(), (4,)])
def test_the_space_is_the_same_after_it_was_written_as_json(lead):
    again = spaces.from_json(spaces.to_json(Packed(LAYOUT, lead)))
    assert again == Packed(LAYOUT, lead)
    assert again.layout == LAYOUT


def bars(count, *frames):
    """Random observations of Bars-v0, a dict of arrays [count, *frames, ...]."""
    rng = jax.random.split(jax.random.key(0), (count, *frames))
    env = Bars()

    def observe(key):
        return env.observation(env.initial(key), key)

    for _ in (count, *frames):
        observe = jax.vmap(observe)
    return jax.tree.map(np.asarray, jax.jit(observe)(rng))


def run_of(name, **options):
    """A script, and the flags of a short run of it in Bars."""
    script, flags = SMALL[name]
    env_id = "BarsBox-v0" if name == "sac" else "Bars-v0"
    how = dict(env_id=env_id, log_interval=50, eval_episodes=2) | options
    return script, flags, script.Run(**how)


@pytest.mark.more
@pytest.mark.parametrize(("vectorization", "frame_stack"), [("auto", 2), ("sync", 1)])
@pytest.mark.parametrize("name", SMALL)
def test_a_trained_agent_takes_the_dict(name, vectorization, frame_stack):
    """In compiled runs and in others, and it acts as the agent does on the bytes."""
    script, flags, run = run_of(name, vectorization=vectorization)
    args = script.Args(**flags | dict(num_envs=2), frame_stack=frame_stack)
    state, _, folder = script.train(args, run)
    agent = make_agent(script, args, run)
    params = agent.policy_params(state)
    if vectorization == "auto":  # one of several agents
        params = jax.tree.map(lambda x: x[0], params)
    given = bars(6, *[frame_stack] * (frame_stack > 1))

    is_first = [np.ones(6, bool)] * ("r2d2" in name or "recurrent" in name)
    actions = cleanreplay.load_policy(folder)(given, *is_first)

    wanted = protocol.policy(agent, params)(pack(given, LAYOUT), *is_first)
    np.testing.assert_array_equal(actions, wanted)
    none = {name: x[:0] for name, x in given.items()}
    assert len(cleanreplay.load_policy(folder)(none, *[x[:0] for x in is_first])) == 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_both_the_image_and_the_numbers_reach_the_network(name):
    script, flags, run = run_of(name)
    agent = make_agent(script, script.Args(**flags | dict(num_envs=2)), run)
    params = jax.jit(lambda key: agent.policy_params(agent.init(key)))(jax.random.PRNGKey(0))

    @jax.jit
    def output(parts):
        x = pack(parts, LAYOUT)
        if hasattr(agent, "no_memory"):
            _, (_, hidden, _) = agent.act(params, x, agent.no_memory(1))
            return hidden
        if script is sac_jax:
            return agent.actor.apply(params, x)[0]
        of_network = params if script in (dqn_jax, per_dqn_jax) else params[0]
        return jax.tree.leaves(agent.network.apply(of_network, x))[0]

    given = bars(1)
    for entry in ("image", "numbers"):
        other = given | {entry: given[entry] + np.ones_like(given[entry])}
        assert not np.allclose(output(other), output(given)), entry


def test_compiled_environments_pack_as_others_do():
    args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=3), frame_stack=2)
    trainer = make_trainer(dqn_jax, args, dqn_jax.Run(env_id="Bars-v0"))
    state = jax.jit(trainer.envs.reset, static_argnums=1)(jax.random.key(0), 3)
    observation = jax.vmap(lambda inner: Bars().observation(inner, None))(state.inner)
    parts = unpack(state.observation, LAYOUT)
    for name, newest in observation.items():
        np.testing.assert_array_equal(parts[name][:, 1], newest)
        assert not parts[name][:, 0].any()


@pytest.mark.parametrize("name", ["dqn", "per_dqn", "sac", "r2d2"])
def test_the_replay_stores_bytes_of_the_newest_frame(name):
    script, flags, run = run_of(name)
    args = script.Args(**flags | dict(num_envs=1), frame_stack=2)
    agent = make_agent(script, args, run, **replays.options(args, None, None))
    stored = agent.replay.init(agent.example_step).storage.observation
    assert (stored.shape[2:], stored.dtype) == ((81 + 8,), np.uint8)
    assert agent.example_step.observation.shape == (2, 81 + 8)


@pytest.mark.more
@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_the_replay_and_the_vault_keep_images_as_bytes(vectorization):
    script, flags, run = run_of("dqn", vectorization=vectorization, eval_episodes=0)
    args = script.Args(**flags | dict(num_envs=2), frame_stack=2, save_experience=True)
    state, _, folder = script.train(args, run)
    stored = state.replay.storage.observation
    assert stored.dtype == np.uint8
    assert stored.shape[-2:] == (2, 81 + 8)  # environments, and the bytes of one frame
    vault = Vault(folder / "experience")
    parts = unpack(vault.read(0, len(vault))["observation"], LAYOUT)
    assert parts["image"].shape == (100, 2, 9, 9, 1)
    assert set(parts["image"].ravel()) == {0, 1}
    assert set(parts["numbers"][..., 0].ravel()) == {-1, 1}
    assert set(parts["numbers"][..., 1].ravel()) == {np.float32(0.3)}


@pytest.mark.more
@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_a_run_of_images_and_numbers_is_resumed(vectorization):
    script, flags, run = run_of("dqn", vectorization=vectorization, checkpoint_interval=100)
    args = script.Args(**flags | dict(num_envs=2), frame_stack=2)
    _, _, folder = script.train(args, run)
    more = replace(args, total_timesteps=300)
    script.train(more, replace(run, resume=str(folder)))
    assert read_events(folder)[0]["eval/episodic_return"][-1][0] == 300


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((3, 89), np.uint8), "observations must be a dict of image, numbers"),
        ({"image": np.zeros((3, 9, 9, 1), np.uint8)}, "must be a dict of image, numbers"),
        (bars(3) | {"image": np.zeros((3, 9, 9), np.uint8)}, r"must be \[N, 9, 9, 1\], not"),
        (bars(3) | {"numbers": np.zeros((3, 3))}, r"must be \[N, 2\], not \(3, 3\)"),
        (bars(3) | {"image": np.full((3, 9, 9, 1), 256)}, "must be uint8, as in training"),
    ],
)
def test_other_observations_than_the_dict_are_an_error(given, message):
    example = np.zeros(89, np.uint8)
    with pytest.raises(ValueError, match=message):
        policies.as_observations(given, example, LAYOUT)


def test_numbers_of_another_shape_and_dtype_are_taken():
    given = bars(3)
    wanted = pack(given, LAYOUT)
    given["numbers"] = given["numbers"].astype(np.float64).reshape(3, 1, 2)
    taken = policies.as_observations(given, np.zeros(89, np.uint8), LAYOUT)
    np.testing.assert_array_equal(taken, wanted)


@pytest.mark.parametrize("script", [ppo_jax, recurrent_ppo_jax])
def test_bytes_are_not_normalised(script):
    run = script.Run(env_id="Bars-v0")
    agent = make_agent(script, script.Args(normalize_observations=True), run)
    with pytest.raises(UsageError, match="normalize_observations takes no images"):
        jax.eval_shape(agent.init, jax.random.PRNGKey(0))


def test_hindsight_takes_no_images():
    with (
        closing(wrap(SyncVectorEnv([Everything]), 1)) as envs,
        pytest.raises(UsageError, match="her_fraction takes no images"),
    ):
        goals.find_goals(dqn_jax.Args(her_fraction=0.5), envs, None)


LEARN = {
    "dqn": dict(
        total_timesteps=10_000,
        num_envs=8,
        learning_starts=500,
        learning_rate=1e-3,
        train_frequency=4,
        batch_size=64,
        gamma=0.1,
        target_network_frequency=100,
    ),
    "ppo": dict(
        total_timesteps=20_480,
        num_envs=16,
        num_steps=64,
        learning_rate=1e-3,
        num_minibatches=8,
        update_epochs=10,
        gamma=0.1,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARN)
def test_what_takes_the_image_and_the_numbers_is_learned(name):
    """All of ten steps are right. Who sees one of them has five right."""
    script, _, run = run_of(name, log_interval=1_000, eval_episodes=20)
    _, _, folder = script.train(script.Args(**LEARN[name]), run)
    assert read_events(folder)[0]["eval/episodic_return"][-1][1] > 9.5
