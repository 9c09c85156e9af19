"""cleanreplay/packed.py: Dict observations of images and numbers, packed as bytes."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain, Given, register_jax
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import SyncVectorEnv
from helpers import SMALL_DQN, save_agent

import cleanreplay
import dqn_jax
import ppo_jax
from cleanreplay import policies, spaces
from cleanreplay.compiled import make_trainer
from cleanreplay.environments import wrap
from cleanreplay.errors import UsageError
from cleanreplay.networks import features_of
from cleanreplay.packed import Packed, Part, pack, unpack

KEY = jax.random.PRNGKey(0)
LAYOUT = (Part("image", (9, 9, 1), "uint8"), Part("numbers", (2,), "float32"))
BYTES = 81 + 8


class Both(Chain):
    observation_space = Dict(
        numbers=Box(-9, 9, (2,), np.float32), image=Box(0, 255, (9, 9, 1), np.uint8)
    )

    def observation(self, state, rng, params=None):
        image = jnp.full((9, 9, 1), state + 1, jnp.uint8)
        return {"image": image, "numbers": jnp.float32([0.3, state])}


register_jax("Both-v0", Both())


def random_parts(*lead):
    random = np.random.default_rng(0)
    return {
        "image": random.integers(2, size=(*lead, 9, 9, 1), dtype=np.uint8),
        "numbers": random.normal(size=(*lead, 2)).astype(np.float32),
    }


@pytest.mark.parametrize("xp", [np, jnp])
def test_unpacked_is_what_was_packed_bit_by_bit(xp):
    layout = (Part("flags", (5, 6, 7), "bool"), *LAYOUT)
    random = np.random.default_rng(0)
    parts = {
        "image": random.integers(256, size=(4, 3, 9, 9, 1), dtype=np.uint8),
        "flags": random.random((4, 3, 5, 6, 7)) < 0.5,
        "numbers": np.float32([np.nan, -0.0] * 12).reshape(4, 3, 2),
    }
    packed = pack({name: xp.asarray(x) for name, x in parts.items()}, layout)
    again = unpack(packed, layout)

    assert isinstance(packed, np.ndarray) == (xp is np)
    assert (packed.shape, packed.dtype) == ((4, 3, 210 + BYTES), np.uint8)
    assert list(again) == ["flags", "image", "numbers"]
    for name, x in again.items():
        assert x.dtype == parts[name].dtype
        assert np.asarray(x).tobytes() == parts[name].tobytes()


# An entry of a Dict of each kind: its space, the observation, and the unpacked value.
ENTRIES = {
    "grey": (Box(0, 255, (36, 40), np.uint8), np.full((36, 40), 7, np.uint8), None),
    "planes": (Box(0, 1, (4, 7, 7), bool), np.arange(196).reshape(4, 7, 7) == 5, None),
    "where": (Box(-1e9, 1e9, (1, 2), np.float64), np.array([[1.25, 2]]), [1.25, 2]),
    "kind": (Discrete(3, start=5), np.int64(6), [0, 1, 0]),
    "inner": (
        Dict({"a": Box(0, 9, (1,), np.int64), "b": Discrete(2)}),
        {"a": np.array([7]), "b": np.int64(1)},
        [7, 0, 1],
    ),
    "small": (Box(0, 255, (2, 2), np.uint8), np.uint8([[1, 2], [3, 4]]), [1, 2, 3, 4]),
}


@pytest.mark.parametrize("frame_stack", [1, 3])
def test_a_dict_with_an_image_is_packed(frame_stack):
    """Its images stay as they are, and everything else becomes flat numbers."""
    space = Dict({name: entry[0] for name, entry in ENTRIES.items()})
    shown = {name: entry[1] for name, entry in ENTRIES.items()}
    envs = wrap(SyncVectorEnv([lambda: Given(space, shown=shown)] * 2), frame_stack)
    envs.reset(seed=0)
    observation, *_ = envs.step(np.zeros(2, int))
    envs.close()
    layout = envs.single_observation_space.layout

    assert [part.dtype for part in layout] == ["uint8", "bool", *["float32"] * 4]
    assert envs.observation_space.contains(observation)
    for name, x in unpack(observation, layout).items():
        _, seen, flat = ENTRIES[name]
        wanted = np.stack([seen if flat is None else np.float32(flat)] * 2)
        if frame_stack == 3:  # two steps of the episode
            wanted = np.stack([np.zeros_like(wanted), wanted, wanted], axis=1)
        np.testing.assert_array_equal(x, wanted)


@pytest.mark.parametrize("lead", [(), (4,)])
def test_a_packed_space_is_the_same_after_json(lead):
    again = spaces.from_json(spaces.to_json(Packed(LAYOUT, lead)))

    assert again == Packed(LAYOUT, lead)
    assert again.layout == LAYOUT


class Features(nn.Module):
    space: Box

    @nn.compact
    def __call__(self, x):
        features, _ = features_of(self.space, (7,), None)
        return features(x)


def test_a_network_sees_the_image_and_beside_it_the_numbers():
    given = random_parts(3)
    both = Features(Packed(LAYOUT))
    params = both.init(KEY, pack(given, LAYOUT))
    of_image = {name.removeprefix("image_"): x for name, x in params["params"].items()}
    vectors = both.apply(params, pack(given, LAYOUT))

    image = Features(Both.observation_space["image"])
    np.testing.assert_array_equal(
        vectors[:, :128], image.apply({"params": of_image}, given["image"])
    )
    np.testing.assert_array_equal(vectors[:, 128:], given["numbers"])
    assert features_of(Packed(LAYOUT), (7,), None)[1] == (7,)


def test_compiled_environments_pack_as_others_do():
    args = dqn_jax.Args(**SMALL_DQN | dict(num_envs=3), frame_stack=2)
    trainer = make_trainer(dqn_jax, args, dqn_jax.Run(env_id="Both-v0"))
    state = jax.jit(trainer.envs.reset, static_argnums=1)(jax.random.key(0), 3)
    observation = jax.vmap(lambda inner: Both().observation(inner, None))(state.inner)
    parts = unpack(state.observation, LAYOUT)

    for name, newest in observation.items():
        np.testing.assert_array_equal(parts[name][:, 1], newest)
        assert not parts[name][:, 0].any()


def test_a_saved_agent_takes_the_dict():
    agent, params = save_agent(dqn_jax, "Both-v0", frame_stack=2)
    given = random_parts(6, 2)
    policy = cleanreplay.load_policy(".")

    np.testing.assert_array_equal(policy(given), agent.act(params, pack(given, LAYOUT)))
    assert len(policy({name: x[:0] for name, x in given.items()})) == 0


# An input of a policy, and words of the error.
MISTAKES = [
    (np.zeros((3, BYTES), np.uint8), "a dict of image, numbers"),
    ({"image": random_parts(3)["image"]}, "a dict of image, numbers"),
    (random_parts(3) | {"image": np.zeros((3, 9, 9), np.uint8)}, "[N, 9, 9, 1]"),
    (random_parts(3) | {"numbers": np.zeros((3, 3))}, "[N, 2], not (3, 3)"),
    (random_parts(3) | {"image": np.full((3, 9, 9, 1), 256)}, "uint8"),
    (random_parts(3) | {"numbers": np.zeros((2, 2))}, "as many rows in numbers"),
]


@pytest.mark.parametrize(("given", "words"), MISTAKES)
def test_other_observations_than_the_dict_are_an_error(given, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        policies.as_packed(given, np.zeros(BYTES, np.uint8), LAYOUT)


def test_numbers_of_another_shape_and_dtype_are_taken():
    given = random_parts(3)
    wanted = pack(given, LAYOUT)
    given["numbers"] = given["numbers"].astype(np.float64).reshape(3, 1, 2)
    taken = policies.as_packed(given, np.zeros(BYTES, np.uint8), LAYOUT)

    np.testing.assert_array_equal(taken, wanted)


def test_bytes_are_not_normalised():
    agent = ppo_jax.Agent(ppo_jax.Args(normalize_observations=True), Packed(LAYOUT), Discrete(2))

    with pytest.raises(UsageError, match="normalize_observations"):
        jax.eval_shape(agent.init, KEY)
