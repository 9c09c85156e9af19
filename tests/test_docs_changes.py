"""The changes to scripts in docs/README.md apply, train, and do what they say."""

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
from tensorboard.plugins.histogram.summary_v2 import histogram_pb
from tensorboard.util import tensor_util
from test_docs import PAGES

import dqn_jax
import per_dqn_jax
import ppo_jax

pytestmark = pytest.mark.pages


def changed(heading, script=dqn_jax):
    """A script with the changes under a heading. Those of ppo_jax.py come last, after its name."""
    answer = PAGES["docs/README.md"].split(f"**... {heading}?**")[1].split("**...")[0]
    answer = answer.split("In `ppo_jax.py`")[script is ppo_jax]
    diffs = re.findall(r"```diff\n(.*?)```", answer, re.DOTALL)
    pairs = [pair for diff in diffs for pair in hunks(f"@@\n{diff}")]
    often = [(old, new.replace("is_due(10_000,", "is_due(100,")) for old, new in pairs]
    module = edited(script, *often)
    module.io, module.PIL = io, PIL  # which the page says to import
    module.histogram_pb = histogram_pb
    return module


class Crashes(Given):
    """Episodes of two steps; every fourth of them ends in a crash."""

    episode = 0

    def __init__(self):
        super().__init__(gym.spaces.Box(0.0, 1.0, (4,)), gym.spaces.Discrete(2), length=2)

    def reset(self, **options):
        self.episode += 1
        return super().reset(**options)

    def step(self, action):
        *step, over, truncated, _ = super().step(action)
        return *step, over, truncated, {"crashed": over and self.episode % 4 == 0}


def trained(heading, script=dqn_jax, **flags):
    """What a short run is of, in a script that is changed like this."""
    module = changed(heading, script)
    short = dict(total_timesteps=480, num_envs=2, learning_starts=200, log_interval=240)
    short |= dict(env_id="CartPole-v1", eval_episodes=0, checkpoint_interval=0)
    args, run = flags_of(module, **short | flags)
    state, _, folder = module.train(args, run)
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()
    agent = make_agent(module, args, run)
    scalars, _ = read_events(folder)
    return SimpleNamespace(agent=agent, state=state, scalars=scalars, events=events)


def weights(run, name="q_0"):
    """The weights of a layer."""
    return run.state.params["params"][name]["kernel"]


HOLDS = {
    "add a wrapper": lambda run: weights(run).shape == (5, 120),
    "change the network": lambda run: "LayerNorm_1" in run.state.params["params"],
    "change the optimiser": lambda run: run.state.opt_state[1][0].mu["params"].keys() >= {"q_0"},
    "change the replay": lambda run: run.agent.replay.period == run.agent.replay.window == 2,
}


@pytest.mark.parametrize("heading", HOLDS)
def test_a_change_trains_and_is_there(heading):
    run = trained(heading)
    assert HOLDS[heading](run)
    assert run.agent.replay.max_size >= 10_000


def test_a_number_is_logged():
    scalars = trained("log a number").scalars
    mean = dict(scalars["losses/q_values"])
    largest = dict(scalars["losses/largest_q"])

    assert largest.keys() == mean.keys() == {240, 480}
    assert all(largest[step] > mean[step] for step in mean)


def test_a_number_of_the_environment_is_logged():
    """Of the last 100 episodes of two environments, 50 each; a rollout is collected ahead.

    An episode takes three steps with its reset. After 125 steps of each environment 42 are over, of
    which 10 crash, and after 245 steps 82: of the last 50 those with numbers 36, 40, ..., 80.
    """
    gym.register("Crashes-v0", Crashes, disable_env_checker=True)
    run = trained("log a number from the environment", env_id="Crashes-v0")

    first, second = run.scalars["charts/crash_rate"]
    assert first == (240, pytest.approx(10 / 42))
    assert second == (480, pytest.approx(12 / 50))


def test_a_histogram_is_logged():
    """The first has as many values as there are drawable windows; the last is in their range."""
    run = trained("log a histogram", per_dqn_jax)

    histograms = run.events.Tensors("priorities")
    assert [histogram.step for histogram in histograms] == [100, 200, 300, 400]
    first, *_, last = [tensor_util.make_ndarray(each.tensor_proto) for each in histograms]
    assert first[:, 2].sum() == 100 - 2  # each but the newest of each environment
    assert (first[0, 0], first[-1, 1]) == (1, 1)  # nothing was learned yet
    assert last[0, 0] < 1
    assert last[-1, 1] <= run.state.replay.max_priority


def test_an_image_is_logged():
    run = trained("log an image, or run other code of my own")

    (logged,) = run.events.Images("weights")
    image = PIL.Image.open(io.BytesIO(logged.encoded_image_string))
    assert (logged.step, image.size) == (480, (120, 4))


def test_a_layer_is_frozen():
    """It stays that of the agent that the run began with."""
    _, before = save_agent(dqn_jax, env_id="CartPole-v1")
    run = trained("freeze a layer", init_from=str(Path.cwd()))

    for name, layer in before["params"].items():
        assert np.array_equal(weights(run, name), layer["kernel"]) == (name == "q_0")


def test_the_exploration_is_a_softmax():
    """Of values 0 and 1 at a temperature of 1 / log(3) it has the odds 1 to 3."""
    my_dqn = changed("change the exploration")
    args = my_dqn.Args(start_e=1 / np.log(3), end_e=1 / np.log(3))
    agent = my_dqn.DQN(args, gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2))
    agent.network = SimpleNamespace(apply=lambda params, x: x)
    values = np.tile(np.float32([0, 1]), (20_000, 1))

    actions = agent.act(None, values, jax.random.PRNGKey(0), 0)
    assert np.mean(actions) == pytest.approx(0.75, abs=0.015)
    assert agent.act(None, values).all()


def test_a_trial_that_is_pruned_ends_the_run():
    reports = []
    trial = SimpleNamespace(
        report=lambda value, step: reports.append((step, value)),
        should_prune=lambda: len(reports) == 2,
    )
    my_dqn = changed("tune hyperparameters")
    args = my_dqn.Args(total_timesteps=960, num_envs=2, learning_starts=200)
    _, returns, _ = my_dqn.train(args, my_dqn.Run(log_interval=100), trial=trial)

    assert [step for step, _ in reports] == [100, 200]
    assert reports[-1][1] == pytest.approx(returns[0])


BOTH_MASKED = pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
ALWAYS, NEVER = 0, 10**6  # steps at which DQN explores always, and hardly ever


@BOTH_MASKED
def test_actions_are_those_that_a_mask_allows(script):
    """They are explored equally often: PPO's first policy is almost uniform."""
    my_script = changed("mask actions", script)
    space = gym.spaces.Box(0.0, 1.0, (8,), np.float32)
    agent = my_script.Agent(my_script.Args(), space, gym.spaces.Discrete(6))
    params = agent.policy_params(jax.jit(agent.init)(jax.random.key(0)))
    observation = np.random.default_rng(0).random((64, 8), np.float32)
    observation[:, :6] = observation[:, :6] < 0.5
    observation[:, 3] = observation[:, :3].sum(axis=1) == 0  # there is one that is allowed
    act = jax.jit(agent.act)

    taken = [act(params, observation, jax.random.key(seed), NEVER) for seed in range(20)]
    for action in (*taken, agent.act(params, observation)):
        assert observation[np.arange(64), np.asarray(action)].all()
    one = np.tile(np.float32([1, 0, 1, 1, 0, 0, 0.3, 0.7]), (12_000, 1))
    counts = np.bincount(agent.act(params, one, jax.random.key(0), ALWAYS), minlength=6)
    assert counts[[0, 2, 3]] == pytest.approx(4_000, rel=0.1)
    assert counts.sum() == counts[[0, 2, 3]].sum()


@pytest.mark.parametrize(("script", "how"), [(dqn_jax, "sync"), (ppo_jax, "auto")])
def test_runs_with_masks_in_a_dict_take_no_other_actions(script, how):
    """The environment gives no reward for an action that its mask forbids, and otherwise 1."""
    my_script = changed("mask actions", script)
    short = dict(learning_starts=200) if script is dqn_jax else dict(num_steps=64)
    args = my_script.Args(total_timesteps=256, num_envs=2, **short)
    run = my_script.Run(env_id="environments:Masked-v0", vectorization=how, checkpoint_interval=0)
    _, returns, folder = my_script.train(args, run)

    assert returns == pytest.approx([9.0])
    assert read_events(folder)[0]["eval/episodic_return"][-1][1] == 9.0
