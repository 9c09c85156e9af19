"""What scripts with a replay share: dqn_jax.py, per_dqn_jax.py, r2d2_jax.py and sac_jax.py."""

from collections import namedtuple

import jax
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy.stats import chisquare
from small_agents import (
    BOX,
    KEY,
    WITH_REPLAY,
    act,
    actor,
    iterations,
    learner,
    make,
    observations,
    random_steps,
    vector,
)

import dqn_jax
from cleanreplay import protocol


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_exploration_goes_from_any_action_to_the_best(name):
    agent, params = actor(name, "discrete")
    x = observations(2_000)
    best = act(agent, params, x)
    start, middle, end = (act(agent, params, x, KEY, step) for step in (0, 16, 32))

    assert chisquare(np.bincount(start - 5)).pvalue > 1e-3
    assert np.mean(middle == best) == pytest.approx(0.5 + 0.5 / 4, abs=0.05)  # epsilon is 0.5
    assert_array_equal(end, best)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_epsilon_falls_in_a_straight_line(name):
    epsilon_at = make(name, total_timesteps=1_000, exploration_fraction=0.5).epsilon_at
    wanted = {0: 1, 120: 0.772, 160: 0.696, 240: 0.544, 480: 0.088, 500: 0.05, 960: 0.05}
    at_once = make(name, exploration_fraction=0.0).epsilon_at
    charts = {step: metrics["charts/epsilon"] for step, (*_, metrics) in iterations(name).items()}
    of_run = learner(name).epsilon_at

    assert {step: epsilon_at(step) for step in wanted} == pytest.approx(wanted)
    assert [at_once(1), at_once(40)] == pytest.approx([0.05] * 2)
    assert charts == pytest.approx({step: float(of_run(step)) for step in charts})


# The smallest learning_starts: a batch, or enough steps for a sequence.
@pytest.mark.parametrize(("name", "least"), [("dqn", 8), ("sac", 8), ("r2d2", 16)])
def test_learning_starts_out_of_range_is_refused(name, least):
    for accepted in (least, 63):
        make(name, learning_starts=accepted)

    for refused in (least - 1, 64):
        with pytest.raises(dqn_jax.UsageError, match=f"learning_starts.* {least}|batch_size"):
            make(name, learning_starts=refused)


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_other_actions_are_refused_with_a_script_for_them(name):
    with pytest.raises(dqn_jax.UsageError, match="ppo_jax"):
        make(name, BOX)


@pytest.mark.parametrize(
    ("name", "sizes", "rows"),
    [
        ("dqn", dict(buffer_size=10, num_envs=3), 4),
        ("per_dqn", dict(buffer_size=9, num_envs=3), 3),
        ("sac", dict(buffer_size=10, num_envs=8, n_step=3), 4),  # a sequence has 4 steps
        ("r2d2", dict(buffer_size=13), 8),  # 5 steps, which begin at every second one
        ("r2d2", dict(buffer_size=17), 10),
    ],
)
def test_a_replay_holds_what_is_asked_for_and_a_window(name, sizes, rows):
    agent = make(name, **sizes)
    state = jax.eval_shape(agent.replay.init, agent.example_step)

    assert state.storage.reward.shape == (rows, agent.args.num_envs)


def gradient_steps_of(agent):
    """Trains. Returns the step numbers that gradient steps get, the last key, and metrics."""
    State = namedtuple("State", "replay, key, counts")  # counts: how often they got each number
    size = agent.steps_per_iteration
    steps = np.arange(0, agent.args.total_timesteps, size)
    takes_two = protocol.takes(agent.gradient_step, "next_step")
    zeros = np.zeros(4 * (len(steps) + 1) * size, np.int32)
    rollout = random_steps(agent)

    def gradient_step(state, key, *numbers):
        counts = [x.at[number].add(1) for x, number in zip(state.counts, numbers, strict=True)]
        return state._replace(key=key, counts=tuple(counts)), {}

    def iterate(state, step):
        state, _, metrics = agent.train_step(state, rollout, KEY, step)
        return state, metrics

    agent.gradient_step = gradient_step
    agent.policy_params = lambda state: ()
    state = State(agent.replay.init(agent.example_step), KEY, (zeros,) * (2 if takes_two else 1))
    state, metrics = jax.jit(lambda state: jax.lax.scan(iterate, state, steps))(state)
    numbers = [np.repeat(np.arange(len(x)), x).tolist() for x in state.counts]
    return numbers, state.key, metrics


@pytest.mark.parametrize(
    ("num_envs", "frequency", "total", "turns", "begun"),
    [
        (8, 10, 320, 1, 200),  # an iteration ends at step 200, where learning starts
        (5, 16, 250, 3, 160),  # the one from 160 to 240 learns, and the last one ends at 320
    ],
)
@pytest.mark.parametrize("name", ["dqn", "r2d2", "sac"])
def test_gradient_steps_keep_their_ratio_to_steps(name, num_envs, frequency, total, turns, begun):
    flags = dict(num_envs=num_envs, train_frequency=frequency, total_timesteps=total)
    if name == "r2d2":
        turns = 1
    else:
        flags |= dict(gradient_steps=turns)
    agent = make(name, learning_starts=200, **flags)
    size = agent.steps_per_iteration

    numbers, key, metrics = gradient_steps_of(agent)

    ends = np.arange(size, 321, size)
    at = np.arange((320 - begun) * turns // frequency + 1)
    steps = (begun + at * frequency // turns).tolist()
    count_from_1 = (begun * turns // frequency + at[1:]).tolist()
    assert numbers == ([count_from_1] if name == "sac" else [steps[:-1], steps[1:]])
    of_each = np.where(ends > begun, size * turns // frequency, 0)
    assert_array_equal(metrics["charts/gradient_steps"], of_each)
    assert_allclose(metrics["charts/replay_ratio"], of_each / size, rtol=1e-6)
    keys = jax.random.split(jax.random.fold_in(KEY, 320 - size), of_each[-1])
    assert_array_equal(key, keys[-1])


@pytest.mark.parametrize("name", WITH_REPLAY)
def test_metrics_are_infinite_before_learning_starts(name):
    """So the charts leave them out."""
    *_, metrics = iterations(name)[8]
    infinite = {tag for tag, x in metrics.items() if np.isposinf(x)}

    assert infinite == {tag for tag in metrics if tag.startswith("losses/") or "beta" in tag}


@pytest.mark.parametrize("name", [name for name in WITH_REPLAY if name != "iql"])
def test_the_target_moves_at_the_multiples_of_its_period(name):
    """It moves at steps 20, 40, 60, or gradient steps 3 and 6: one per iteration of 8 steps."""
    online, target = ("critics", "target_critics") if name == "sac" else ("params", "target_params")
    tau = 1.0 if name == "r2d2" else 0.25
    moved = []
    for step, (before, state, *_) in iterations(name).items():
        old, new = vector(getattr(before, target)), vector(getattr(state, target))
        if (new != old).any():
            moved.append(step)
            wanted = tau * vector(getattr(state, online)) + (1 - tau) * old
            assert_allclose(new, wanted, rtol=1e-5, atol=1e-6)

    assert moved == ([16, 40] if name == "sac" else [16, 32, 56])
