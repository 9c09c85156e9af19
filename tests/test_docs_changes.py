"""The changes to scripts in docs/README.md apply, train, and have the described effect."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import jax
import numpy as np
import PIL.Image
import pytest
from environments import Given
from helpers import edited, flags_of, hunks, make_agent, read_events, save_agent
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_docs import PAGES

import dqn_jax
import per_dqn_jax
import ppo_jax

pytestmark = pytest.mark.pages


def changed(*headings, script=dqn_jax, old="is_due(10_000,", new="is_due(100,"):
    """Changes a script as under the headings. Changes of ppo_jax.py come last, after its name."""
    pairs = []
    for heading in headings:
        answer = PAGES["docs/README.md"].split(f"**... {heading}?**")[1].split("**...")[0]
        answer = answer.split("In `ppo_jax.py`")[script is ppo_jax]
        diffs = re.findall(r"```diff\n(.*?)```", answer, re.DOTALL)
        pairs += [pair for diff in diffs for pair in hunks(f"@@\n{diff}")]
    module = edited(script, *[(before, after.replace(old, new)) for before, after in pairs])
    module.io, module.PIL = io, PIL  # the page tells users to import them
    return module


class Crashes(Given):
    """Has episodes of two steps. Every fourth one ends in a crash."""

    episode = 0

    def __init__(self):
        super().__init__(gym.spaces.Box(0.0, 1.0, (4,)), gym.spaces.Discrete(2), length=2)

    def reset(self, **options):
        self.episode += 1
        return super().reset(**options)

    def step(self, action):
        *step, over, truncated, _ = super().step(action)
        return *step, over, truncated, {"crashed": over and self.episode % 4 == 0}


gym.register("Crashes-v0", Crashes, max_episode_steps=9, disable_env_checker=True)


def trained(*headings, script=dqn_jax, flags=(), **how):
    """Trains briefly with a script that is changed like this. Returns what the run made."""
    module = changed(*headings, script=script, **how)
    short = dict(total_timesteps=480, num_envs=2, learning_starts=200, log_interval=240)
    short |= dict(env_id="Crashes-v0", eval_episodes=0, checkpoint_interval=0)
    args, run = flags_of(module, **short | dict(flags))
    state, _, folder = module.train(args, run)
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()
    agent = make_agent(module, args, run)
    scalars, _ = read_events(folder)
    about = dict(agent=agent, state=state, scalars=scalars, events=events, folder=folder)
    return SimpleNamespace(**about)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    headings = (
        "add a wrapper",
        "change the network",
        "change the optimiser",
        "change the replay",
        "change the exploration",
        "log a number",
        "log a number from the environment",
        "log an image",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("changed"))
        return trained(*headings)


def weights(run, name="q_0"):
    return run.state.params["params"][name]["kernel"]


def test_a_wrapper_is_added(run):
    assert weights(run).shape == (5, 120)


def test_a_network_is_changed(run):
    assert "LayerNorm_1" in run.state.params["params"]


def test_an_optimiser_is_changed(run):
    assert run.state.opt_state[1][0].mu["params"].keys() >= {"q_0"}


def test_a_replay_is_changed(run):
    replay = run.agent.replay

    assert replay.period == replay.window == 2
    assert replay.max_size >= 10_000


def test_a_number_is_logged(run):
    mean = dict(run.scalars["losses/q_values"])
    largest = dict(run.scalars["losses/largest_q"])

    assert largest.keys() == mean.keys() == {240, 480}
    assert all(largest[step] > mean[step] for step in mean)


def test_a_number_of_the_environment_is_logged(run):
    """The rate is over the last 100 episodes, 50 per environment; a rollout is collected ahead.

    An episode takes three steps with its reset. After 125 steps of each environment 42 are over and
    10 have crashed. After 245 steps 82 are over: of the last 50 numbers 36, 40, ..., 80 crashed.
    """
    first, second = run.scalars["charts/crash_rate"]

    assert first == (240, pytest.approx(10 / 42))
    assert second == (480, pytest.approx(12 / 50))


def test_an_image_is_logged(run):
    (logged,) = run.events.Images("weights")
    image = PIL.Image.open(io.BytesIO(logged.encoded_image_string))

    assert (logged.step, image.size) == (480, (120, 5))


OTHERS = [("log a histogram", per_dqn_jax), ("tune hyperparameters", dqn_jax)]


@pytest.mark.parametrize(("heading", "script"), OTHERS)
def test_other_changes_apply(heading, script):
    copy = changed(heading, script=script)

    assert Path(copy.__file__).read_text() != Path(script.__file__).read_text()


def test_a_layer_is_frozen():
    """It remains equal to that of the agent that the run began with."""
    _, before = save_agent(dqn_jax, env_id="Crashes-v0")
    run = trained("freeze a layer", flags=dict(init_from=str(Path.cwd())))

    for name, layer in before["params"].items():
        assert np.array_equal(weights(run, name), layer["kernel"]) == (name == "q_0")


@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_actions_are_those_that_a_mask_allows(script):
    my_script = changed("mask actions", script=script)
    space = gym.spaces.Box(0.0, 1.0, (8,), np.float32)
    agent = my_script.Agent(my_script.Args(), space, gym.spaces.Discrete(6))
    params = agent.policy_params(jax.jit(agent.init)(jax.random.key(0)))
    observation = np.random.default_rng(0).random((64, 8), np.float32)
    observation[:, :6] = observation[:, :6] < 0.5
    observation[:, 3] = observation[:, :3].sum(axis=1) == 0  # at least one action is allowed
    act = jax.jit(agent.act)

    explored = act(params, observation, jax.random.key(0), 0)
    greedy = act(params, observation, jax.random.key(0), 10**6)
    for action in (explored, greedy, agent.act(params, observation)):
        assert observation[np.arange(64), np.asarray(action)].all()
