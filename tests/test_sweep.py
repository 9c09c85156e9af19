"""Agents with different values of some flags in one compiled program: --sweep."""

import math
import re
import shutil
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers import read_events, train_compiled

import dqn_jax
import per_dqn_jax
import ppo_jax
import sac_jax
from cleanreplay import UsageError, agent_file, checkpoints, compiled, disk, load_policy, read_flags
from cleanreplay.compiled import make_trainer
from cleanreplay.sweep import Sweep, in_words, make_settings

CHAIN = "environments:Chain-v0"
# Each batch is a whole iteration, and the last log entry is after 3 gradient steps.
ARGS = dqn_jax.Args(
    total_timesteps=320,
    num_envs=4,
    learning_starts=100,
    batch_size=8,
    buffer_size=400,
    train_frequency=80,
    target_network_frequency=80,
    hidden_sizes=(8,),
    learning_rate=0.01,
)


def test_settings_are_a_grid_whose_last_flag_changes_fastest():
    """Joined flags take their values together. A swept flag may be None by default."""
    items = ("learning-rate:target-kl=1e-4:0.9,0.1:1", "gamma=0.5,1")

    assert make_settings(items, ppo_jax.Args(target_kl=None)) == [
        {"learning_rate": 1e-4, "target_kl": 0.9, "gamma": 0.5},
        {"learning_rate": 1e-4, "target_kl": 0.9, "gamma": 1.0},
        {"learning_rate": 0.1, "target_kl": 1.0, "gamma": 0.5},
        {"learning_rate": 0.1, "target_kl": 1.0, "gamma": 1.0},
    ]


# Items of --sweep, and a word of the error.
MISTAKES = [
    (["batch_size=32,64"], "of type int"),
    (["hidden_sizes=0,1"], "of type tuple"),
    (["learnin_rate=1"], "learning_rate?"),
    (["seed=1,2"], "seed is no flag"),
    (["gamma=0.9,1.5"], "gamma must be from 0 to 1"),
    (["gamma=0.9,"], "not ''"),
    (["gamma"], "must be written as"),
    (["gamma:tau=0.9:1,0.8"], "must be written as"),
    (["gamma=0.9", "gamma:tau=0.8:1"], "gamma appears twice"),
    (["gamma:gamma=0.9:0.8"], "gamma appears twice"),
    (["gamma=0.9,0.90", "tau=0.5"], "gamma=0.9, tau=0.5 appears twice"),
]


@pytest.mark.parametrize(("items", "word"), MISTAKES)
def test_an_invalid_sweep_is_refused(items, word):
    with pytest.raises(UsageError) as caught:
        make_settings(items, ARGS)

    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_values_that_differ_late_have_labels_of_their_own():
    settings = make_settings(["gamma=0.9,0.90000001"], ARGS)

    assert [in_words(x) for x in settings] == [["gamma=0.9"], ["gamma=0.90000001"]]


def test_a_seed_that_no_run_can_have_is_refused():
    Sweep(ARGS, dqn_jax.Run(seed=2**31 - 2, num_seeds=2))

    with pytest.raises(UsageError, match="num_seeds"):
        Sweep(ARGS, dqn_jax.Run(seed=2**31 - 1, num_seeds=2))


@pytest.fixture
def sweep():
    """Makes three settings, each with the seeds 3 and 4."""
    return Sweep(ARGS, dqn_jax.Run(seed=3, num_seeds=2, sweep=("gamma:tau=0.9:1,0.8:0.5,0:1",)))


def test_each_setting_has_each_seed(sweep):
    assert len(sweep) == 6
    assert sweep.seeds.tolist() == [3, 4, 3, 4, 3, 4]
    np.testing.assert_array_equal(sweep.values["gamma"], np.float32([0.9, 0.9, 0.8, 0.8, 0, 0]))
    np.testing.assert_array_equal(sweep.values["tau"], np.float32([1, 1, 0.5, 0.5, 1, 1]))


def test_folders_and_lines_show_the_values(sweep):
    assert sweep.folder(Path("run"), 0) == Path("run/gamma=0.9,tau=1,seed=3")
    assert sweep.folder(Path("run"), 3) == Path("run/gamma=0.8,tau=0.5,seed=4")
    assert sweep.label(3) == "gamma=0.8, tau=0.5, seed 4"


def test_without_a_sweep_folders_and_lines_show_the_seeds():
    sweep = Sweep(ARGS, dqn_jax.Run(seed=3, num_seeds=2))

    assert sweep.values == {}
    assert [sweep.folder(Path("run"), i) for i in range(2)] == [Path("run"), Path("run/seed_4")]
    assert [sweep.label(i) for i in range(2)] == ["seed 3", "seed 4"]


# Flags of type float that have only one value in a program.
REFUSED = {
    per_dqn_jax: {"exploration_fraction", "priority_exponent", "her_fraction", "offline_fraction"},
    ppo_jax: set(),
    sac_jax: {"critic_dropout", "alpha", "her_fraction", "offline_fraction"},
}
# One flag for each reason, and words of the error.
EXAMPLES = [
    (per_dqn_jax, "her_fraction", "her_fraction changes nothing"),
    (per_dqn_jax, "exploration_fraction", "per_dqn_jax.py, line"),
    (per_dqn_jax, "priority_exponent", "priority_exponent must be constant in a program"),
    (sac_jax, "alpha", "alpha changes nothing"),  # it is tuned
]


def run_of(script, **flags):
    """Makes a run in an environment whose actions the script takes."""
    env_id = "phys2d/Pendulum-v0" if script is sac_jax else CHAIN
    return script.Run(env_id=env_id, **flags)


@pytest.mark.parametrize("script", REFUSED, ids=lambda script: script.__name__)
def test_every_other_flag_that_is_a_float_can_be_swept(script):
    """With all at once the program is traced, and depends on each of them. Also with 64 bits."""
    floats = [x.name for x in fields(script.Args) if x.type in (float, float | None)]
    values = {name: np.float32(0.5) for name in floats if name not in REFUSED[script]}
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        trainer = make_trainer(script, script.Args(), run_of(script, log_interval=1))
        program = jax.make_jaxpr(trainer.first_entry)(values).jaxpr

    assert len(values) == len(floats) - len(REFUSED[script])
    used = {id(x) for equation in program.eqns for x in equation.invars}
    for name, variable in zip(sorted(values), program.invars, strict=True):
        assert id(variable) in used, name


@pytest.mark.parametrize(("script", "name", "reason"), EXAMPLES)
def test_a_flag_that_has_one_value_in_a_program_is_refused(script, name, reason):
    with pytest.raises(UsageError, match=reason):
        make_trainer(script, script.Args(), run_of(script, sweep=(f"{name}=0.25,0.5",)))


SWEEP = dqn_jax.Run(
    env_id=CHAIN,
    num_seeds=2,
    num_devices=2,
    log_interval=80,
    eval_interval=160,
    eval_episodes=2,
    sweep=("learning_rate=3e38,0.01",),
)
# Returns of evaluations: diverged agents have the highest ones, the last agent more than the third.
SCORES = np.float32([[98, 99], [98, 99], [0, 1], [8, 9]])


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Trains with two learning rates, one of them too large, and the seeds 1 and 2.

    `seen` is what a user's code gets at evaluations. The second evaluation is the better one.
    """
    seen = []
    scores = iter([0 * SCORES, SCORES])

    class Noted(dqn_jax.Log):
        def at_evaluation(self, step, params, returns):
            seen.append((self.folder, step, params, returns.tolist()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dqn_jax, "Log", Noted)
        patch.setattr(compiled.Trainer, "evaluate", lambda *_: [next(scores)] * 2)
        left = train_compiled(dqn_jax, ARGS, SWEEP, tmp_path_factory.mktemp("four"))
    left.seen = seen
    return left


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Trains the last of the four agents alone, with its environments on two devices."""
    run = replace(SWEEP, num_seeds=1, seed=2, sweep=(), eval_episodes=0)
    return train_compiled(dqn_jax, ARGS, run, tmp_path_factory.mktemp("alone"))


def own_folder(four, i):
    return four.trainer.sweep.folder(four.folder, i)


def params_of(state, i):
    return jax.tree.map(lambda x: np.asarray(x[i]), state.params)


def test_an_agent_of_a_sweep_is_the_one_trained_alone(four, alone):
    """They are equal up to rounding: compilers treat constants and arrays differently."""
    close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    scalars, _ = read_events(alone.folder)
    own, _ = read_events(own_folder(four, 3))

    jax.tree.map(close, params_of(four.state, 3), params_of(alone.state, 0))
    assert {tag for tag in own if not tag.startswith("eval/")} == set(scalars)
    assert "losses/td_loss" in scalars
    for tag in set(scalars) - {"charts/SPS"}:
        close(own[tag], scalars[tag], err_msg=tag)


def starts_of_parts(x, axis):
    """Returns where the part of each device begins on this axis of an array."""
    return sorted(part.index[axis].start or 0 for part in x.addressable_shards)


def test_agents_or_environments_are_spread_over_devices(four, alone):
    """Everything else is on both devices, as is everything that each process reads."""
    for x in jax.tree.leaves(four.runner._replace(finished=None)):
        assert starts_of_parts(x, axis=0) == [0, 2]
    for x in jax.tree.leaves(alone.runner.envs):
        assert starts_of_parts(x, axis=1) == [0, 2]
    for x in (four.runner.finished, *jax.tree.leaves(alone.runner._replace(envs=None))):
        assert x.sharding.is_fully_replicated
        assert len(x.sharding.device_set) == 2


def test_each_agent_has_a_folder_with_its_flags(four):
    found = sorted(file.parent.name for file in four.folder.glob("*/args.json"))
    rates = ["0.01", "3e+38"]
    own = replace(SWEEP, num_seeds=1, seed=2, sweep=())
    _, table = read_events(own_folder(four, 3))

    assert found == [f"learning_rate={rate},seed={seed}" for rate in rates for seed in (1, 2)]
    assert read_flags(own_folder(four, 3), dqn_jax.Run, dqn_jax.Args) == (own, ARGS)
    assert "|learning_rate|0.01|" in table
    assert "|seed|2|" in table


def test_each_agent_has_its_own_evaluation(four):
    assert [step for _, step, _, _ in four.seen] == [160] * 4 + [320] * 4
    for i, (folder, _, params, returns) in enumerate(four.seen[4:]):
        points = read_events(folder)[0]["eval/episodic_return"]
        mean = SCORES[i].mean()
        assert (folder, returns) == (own_folder(four, i), SCORES[i].tolist())
        assert points == [(160, 0), (320, mean)]
        jax.tree.map(np.testing.assert_array_equal, params, params_of(four.state, i))


def test_a_complete_sweep_that_is_resumed_is_evaluated_again(four, monkeypatch):
    monkeypatch.setattr(compiled.Trainer, "evaluate", lambda *_: (SCORES, SCORES))
    folder = Path(shutil.copytree(four.folder, "copy")).absolute()
    state, returns, _ = dqn_jax.train(ARGS, replace(SWEEP, resume=str(folder)))
    scalars, _ = read_events(four.trainer.sweep.folder(folder, 3))

    np.testing.assert_array_equal(returns, four.returns)
    jax.tree.map(np.testing.assert_array_equal, state, four.state)
    assert scalars["eval/episodic_return"] == [(160, 0), (320, 8.5), (320, 8.5)]
    assert [step for step, _ in scalars["charts/SPS"]] == [80, 160, 240, 320]


def test_the_agents_that_are_left_are_saved_and_evaluated(four):
    """The first one left is the newest agent of the run, and the best one is loaded."""
    about = disk.open_file(checkpoints.newest(four.folder)).about
    best = agent_file.open_agent(four.folder / agent_file.NAME)
    policy = load_policy(four.folder)
    observations = np.random.default_rng(0).normal(size=(500, 5)).astype(np.float32)
    actions = [
        np.asarray(four.trainer.agent.act(params_of(four.state, i), observations)) for i in (2, 3)
    ]

    assert np.isnan(four.returns).tolist() == [True, True, False, False]
    assert (about["num_agents"], about["lost"]) == (4, [0, 1])
    assert about["swept"] == {"learning_rate": [3e38, 3e38, 0.01, 0.01]}
    assert best.about["args"]["learning_rate"] == 0.01
    np.testing.assert_array_equal(policy(observations), actions[1])
    assert (actions[0] != actions[1]).any()


def test_lines_of_a_sweep_show_the_best_agent_and_each_return(four):
    best = "320 steps: return 4.50 in an evaluation, the best 8.50 with learning_rate=0.01, seed 2"

    assert f"\n{best}\n" in four.printed
    last = f"learning_rate=0.01, seed 2: mean return of the last episodes {four.returns[3]:.2f}"
    assert f"\n{last}\n" in four.printed


def test_devices_exchange_no_more_than_a_batch(alone):
    """In each gradient step two devices of one agent gather less than the replay holds."""
    program = alone.trainer.compile(alone.runner).lower(alone.runner, 0, 1).compile()
    found = re.findall(
        r"= (.+?) (all-gather|all-reduce|all-to-all|collective-permute)\(", program.as_text()
    )
    shapes = re.findall(r"\[([\d,]+)\]", " ".join(result for result, _ in found))
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in shapes]

    assert {"all-gather", "all-reduce"} <= {operation for _, operation in found}
    rollout = 80 * 5
    assert max(sizes) <= rollout < 400 * 5


def test_agents_explore_in_an_evaluation_by_their_own_flags():
    """Of two agents with the same parameters, one takes the best actions, and one random ones."""
    run = dqn_jax.Run(env_id=CHAIN, eval_episodes=20, eval_explores=True, sweep=("end_e=0,1",))
    trainer = make_trainer(dqn_jax, ARGS, run)
    params = dqn_jax.DQN.policy_params(trainer.agent, trainer.init().agent)
    returns, _ = trainer.evaluate(params, trainer.sweep.values)

    assert len(set(returns[0])) == 1
    assert len(set(returns[1])) == 2
