"""load_policy: the agent of a run or in a file, as a function from observations to actions."""

import json
import shutil
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from environments import Reach, register_given
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from helpers import COUNTED, flags_of, save_agent, saved_run

import dqn_jax
import ppo_jax
from cleanreplay import UsageError, agent_file, disk, experiment, load_policy, policies, spaces
from cleanreplay.agent_file import BestAgent
from cleanreplay.environments import before_wrap
from cleanreplay.packed import unpack

OBSERVATIONS = 100 * np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)


def greedy(agent, params, observations=OBSERVATIONS):
    return agent.to_env_action(np.asarray(agent.act(params, observations)))


def change_args_json(name, **changed):
    about = json.loads(Path("args.json").read_text())
    about[name] |= changed
    Path("args.json").write_text(json.dumps(about))


@pytest.mark.parametrize("is_reopened", [False, True])
@pytest.mark.parametrize(
    ("scores", "steps", "best"),
    [
        ([3.0, 2.0, 1.0], (1, 2, 3), 0),
        ([-3.0, -1.0, -2.0], (1, 2, 3), 1),
        ([1.0, 2.0, 2.0], (1, 2, 3), 1),  # the first of equal ones
        ([1.0, 3.0, 4.0], (2, 3, 1), 2),  # a resumed run goes back to its checkpoint
        ([1.0, 2.0, 3.0], (1, 2, 2), 1),  # a second evaluation of an agent may be luckier
        ([np.nan, 1.0, np.nan], (1, 2, 3), 1),
        ([1.0, np.inf, 0.0], (1, 2, 3), 0),  # an infinite score does not count
        ([1.0, np.float32(2.25), np.float64(2.5)], (1, 2, 3), 2),
    ],
)
def test_the_agent_of_the_highest_score_is_kept(scores, steps, best, is_reopened):
    about = {"args": {"a": 1, "b": 2}}
    files = BestAgent(Path(), about)
    for i, score in enumerate(scores):
        files = BestAgent(Path(), about) if is_reopened else files
        files.save_if_better(steps[i], {"x": np.full(3, i)}, score, {"a": i})

    stored = agent_file.open_agent("best.safetensors")
    assert (stored.about["step"], stored.about["return"]) == (steps[best], scores[best])
    assert (stored.about["args"], stored.about["own"]) == ({"a": best, "b": 2}, {"a": best})
    np.testing.assert_array_equal(stored.read(["x"])["x"], [best] * 3)


def test_the_best_agent_of_a_run_is_loaded(monkeypatch):
    acting = []
    left = iter([1.0, 4.0, 2.0, 3.0])

    def play_episodes(agent, run, params, envs, stop):
        acting.append(greedy(agent, params))
        return np.full(envs.num_envs, next(left))

    monkeypatch.setattr(experiment, "play_episodes", play_episodes)
    flags = COUNTED | dict(eval_interval=60, checkpoint_interval=60, learning_rate=0.1)
    _, _, folder = dqn_jax.train(*flags_of(dqn_jax, **flags))

    assert len({actions.tobytes() for actions in acting}) == 4
    np.testing.assert_array_equal(load_policy(folder)(OBSERVATIONS), acting[1])


def test_only_what_the_policy_needs_is_read(monkeypatch):
    """A replay may have gigabytes. Without evaluations the newest checkpoint is read."""
    saved = saved_run(dqn_jax)
    read = []
    take = disk.Stored.read

    def note(stored, wanted):
        read.extend(wanted)
        return take(stored, wanted)

    monkeypatch.setattr(disk.Stored, "read", note)
    actions = load_policy(saved.folder)(OBSERVATIONS[:, :2])

    wanted = greedy(saved.agent(), saved.state.params, OBSERVATIONS[:, :2])
    np.testing.assert_array_equal(actions, wanted)
    assert sorted(read) == sorted(agent_file.policy_leaves(saved.agent()))


def test_of_several_agents_the_first_one_left_is_loaded():
    """It has its own flags. The first agent has diverged."""
    agent, params = save_agent(dqn_jax)
    stored = agent_file.open_agent("best.safetensors")
    arrays = stored.read(stored.shapes).items()
    about = dict(is_whole=True, num_agents=3, lost=[0], swept={"gamma": [0.1, 0.2, 0.3]})
    stacked = [(f"agent/{name}", np.stack([0 * x, x, 2 * x])) for name, x in arrays]
    disk.write(Path("agents.safetensors"), stacked, stored.about | about)
    actions = load_policy("agents.safetensors")(OBSERVATIONS)

    np.testing.assert_array_equal(actions, greedy(agent, params))
    assert policies.load_agent("agents.safetensors").args.gamma == 0.2


def test_no_observations_give_no_actions():
    save_agent(ppo_jax, "Pendulum-v1")

    assert load_policy(".")(np.zeros((0, 3))).shape == (0, 1)


IMAGE = np.zeros((6, 6), np.uint8)
FLAGS = np.zeros((6, 6), bool)
FLOATS = np.zeros(3, np.float32)
NUMBERS = np.arange(72).reshape(2, 6, 6)


@pytest.mark.parametrize(
    ("example", "given", "words"),
    [
        (IMAGE, NUMBERS / 2, "uint8, as in training, not float64"),
        (IMAGE, 0 * NUMBERS + 256, "uint8, .*: numbers from 256 to 256 do not fit"),
        (FLAGS, NUMBERS % 3, "bool, .*: numbers from 0 to 2 do not fit"),
        (FLOATS, np.zeros(3), r"\[N, 3\], not \(3,\)"),
    ],
)
def test_observations_unlike_those_of_training_are_an_error(example, given, words):
    """Otherwise images would be cut to integers below 256, and become different images."""
    with pytest.raises(ValueError, match=f"observations must be {words}"):
        policies.as_observations(given, example)


@pytest.mark.parametrize(
    ("example", "given"),
    [(IMAGE, NUMBERS), (FLAGS, NUMBERS % 2), (FLOATS, NUMBERS[0, :, :3]), (FLOATS, [[0.5, 1, 2]])],
)
def test_equal_numbers_of_another_dtype_are_taken(example, given):
    observations = policies.as_observations(given, example)

    assert observations.dtype == example.dtype
    np.testing.assert_array_equal(observations, given)


def test_a_run_of_another_script_is_named():
    save_agent(dqn_jax)
    with pytest.raises(UsageError, match=r"^. is a run of another script"):
        load_policy(".", ppo_jax.__file__)


def test_a_folder_that_is_no_run_stays_as_it_is():
    with pytest.raises(UsageError, match=r"^. is not the folder of a run"):
        load_policy(".")

    assert not any(Path().iterdir())


SERVED_ELSEWHERE = dict(capture_video=True, track=True, distributed="localhost:1,2,0")


@pytest.mark.parametrize(
    ("name", "changed"), [("run", SERVED_ELSEWHERE), ("spaces", dict(observation=None))]
)
def test_packages_of_training_are_not_needed_to_load_an_agent(name, changed, monkeypatch):
    """Examples are moviepy, wandb, several processes. Unknown spaces are the environment's."""
    agent, params = save_agent(dqn_jax)
    change_args_json(name, **changed)
    monkeypatch.setitem(sys.modules, "moviepy", None)

    np.testing.assert_array_equal(load_policy(".")(OBSERVATIONS), greedy(agent, params))


def test_an_agent_is_loaded_without_its_environment(monkeypatch):
    register_given("Simulator-v0", action_space=Discrete(3, start=-1))
    agent, params = save_agent(dqn_jax, "Simulator-v0", frame_stack=2)
    monkeypatch.delitem(gym.registry, "Simulator-v0")
    change_args_json("run", env_id="my_simulator:Simulator-v0")
    observations = np.stack([OBSERVATIONS, 0 * OBSERVATIONS], axis=1)
    actions = load_policy(".")(observations)

    np.testing.assert_array_equal(actions, greedy(agent, params, observations))
    assert set(actions) <= {-1, 0, 1}


@pytest.mark.parametrize(
    "space",
    [
        Discrete(5, start=-2),
        MultiDiscrete([[3, 5], [2, 2]], start=[[1, -2], [0, 0]]),
        Box(np.float32([0.1, -np.inf, 1e-45]), np.float32([1 / 3, 2, np.inf]), dtype=np.float32),
        Box(0, 255, (84, 84, 4), np.uint8),
        Box(-(2**62), 2**62 + 1, (1,), np.int64),
        Box(0.0, 1.0, (0,), np.float32),
        Box(-1, 1, (), np.float16),
        MultiBinary((2, 3)),
        Dict([("b", Discrete(2)), ("a", Tuple([MultiBinary(3), Dict(c=Box(0, 1, (1,)))]))]),
    ],
)
def test_a_space_is_the_same_after_it_was_written_as_json(space):
    text = disk.to_json(spaces.to_json(space))
    again = spaces.from_json(json.loads(text))

    assert (type(again), again, again.dtype) == (type(space), space, space.dtype)
    assert len(text) < 200


def test_a_space_that_only_an_edited_script_knows_is_none():
    assert spaces.to_json(Tuple([Discrete(2), Text(9)])) is None


# Their entries are not in the order of the alphabet.
NUMBERS_OF_ALL_KINDS = Dict(
    where=Box(-1, 1, (1, 2)),
    door=Discrete(3, start=-1),
    both=Tuple([MultiBinary((2, 2)), MultiDiscrete([2, 3])]),
    inner=Dict(c=Box(0, 9, (2,), np.int64), a=Discrete(2)),
)
WITH_IMAGE = Dict(image=Box(0, 255, (9, 9, 1), np.uint8), **NUMBERS_OF_ALL_KINDS.spaces)
SPACES = {
    "dict": NUMBERS_OF_ALL_KINDS,
    "image": WITH_IMAGE,
    "tuple": NUMBERS_OF_ALL_KINDS["both"],
    "discrete": Discrete(3, start=-1),
    "binary": MultiBinary((2, 2)),
    "goals": Reach.observation_space,
}
for kind, space in SPACES.items():
    register_given(f"Observes-{kind}-v0", space, action_space=Box(-1, 1, (1,)))


@pytest.mark.parametrize("kind", SPACES)
def test_an_agent_takes_what_the_environment_gives(kind):
    agent, params = save_agent(ppo_jax, f"Observes-{kind}-v0")
    envs = ppo_jax.make_envs(agent.args, ppo_jax.Run(env_id=f"Observes-{kind}-v0"), 4)
    arrays, _ = envs.reset(seed=3)
    wanted = greedy(agent, params, arrays)
    before = unpack(arrays, envs.layout) if kind == "image" else arrays  # flat already
    given, _ = before_wrap(envs).reset(seed=3)
    one, _ = gym.make(f"Observes-{kind}-v0").reset(seed=3)
    policy = load_policy(".")

    assert len(np.unique(wanted)) > 1
    np.testing.assert_array_equal(policy(given), wanted)
    np.testing.assert_array_equal(policy(before), wanted)
    np.testing.assert_allclose(policy(one), wanted[0], rtol=1e-5)


DOORS = Dict(door=Discrete(3), where=Box(-1, 1, (2,)))
WHERE = np.zeros((2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"door": np.array([0, 3]), "where": WHERE}, r"in Discrete\(3\), .*not \[0 3\]"),
        ({"door": np.array([0, 1]), "where": WHERE[0]}, r"in Box.*not \[0. 0.\]"),
        ({"door": np.array([0, 1])}, "a dict of door, where"),
        (np.zeros((2, 4)), "a dict of door, where"),
    ],
)
def test_what_the_environment_cannot_give_is_an_error(given, words):
    with pytest.raises(ValueError, match=f"observations must be {words}"):
        policies.as_observations(given, np.zeros(5, np.float32), space=DOORS)


def test_arrays_that_are_flat_already_are_taken():
    flat = np.arange(10.0).reshape(2, 5)
    taken = policies.as_observations(flat, np.zeros(5, np.float32), space=DOORS)

    np.testing.assert_array_equal(taken, flat)


def test_another_script_is_named_and_replaces_no_module(capsys):
    save_agent(dqn_jax)
    wanted = load_policy(".")(OBSERVATIONS)
    shutil.copy(dqn_jax.__file__, "mine.py")
    modules = dict(sys.modules)
    policy = load_policy(".", "mine.py")

    np.testing.assert_array_equal(policy(OBSERVATIONS), wanted)
    assert "dqn_jax.py, and mine.py loads it" in capsys.readouterr().out
    assert all(sys.modules[name] is module for name, module in modules.items())
    assert "mine" not in sys.modules
