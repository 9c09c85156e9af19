"""Agents with other values of some flags in one compiled program: --sweep."""

import contextlib
import io
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from environments import Chain
from helpers import make_trainer, one_line, read_events
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

import dqn_jax
import per_dqn_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import UsageError, agent_file, compiled, load_policy, read_flags
from cleanreplay.sweep import Sweep, make_settings

ARGS = dqn_jax.Args()
CHAIN = dict(env_id="environments:Chain-v0", eval_episodes=2)
RATES = ("learning_rate=0.01,0.0001",)
# All of an iteration is learned from, and the last log entry is after 3 gradient steps.
DQN = dict(
    total_timesteps=320,
    num_envs=4,
    learning_starts=100,
    batch_size=8,
    buffer_size=200,
    train_frequency=80,
    target_network_frequency=80,
)
PPO = dict(total_timesteps=128, num_envs=4, num_steps=8, num_minibatches=2, update_epochs=2)


# --------------------------------------------------------------------------------------- the flag


def test_a_grid_changes_its_last_flag_fastest():
    assert make_settings(("learning_rate=1e-4,0.1", "gamma=0.9,1"), ARGS) == [
        {"learning_rate": 1e-4, "gamma": 0.9},
        {"learning_rate": 1e-4, "gamma": 1.0},
        {"learning_rate": 0.1, "gamma": 0.9},
        {"learning_rate": 0.1, "gamma": 1.0},
    ]


def test_flags_that_are_joined_have_their_values_together():
    """Also beside another flag, of which there is a grid."""
    pairs = ("learning-rate:gamma=1e-4:0.9,0.1:1", "tau=0.5,1")
    assert make_settings(pairs, ARGS) == [
        {"learning_rate": 1e-4, "gamma": 0.9, "tau": 0.5},
        {"learning_rate": 1e-4, "gamma": 0.9, "tau": 1.0},
        {"learning_rate": 0.1, "gamma": 1.0, "tau": 0.5},
        {"learning_rate": 0.1, "gamma": 1.0, "tau": 1.0},
    ]


def test_without_a_sweep_there_is_one_setting_without_values():
    assert make_settings((), ARGS) == [{}]


MISTAKES = [
    (
        ["batch_size=32,64"],
        "sweep: batch_size is of type int, and only floats can be swept; "
        "start a run for each value instead, see docs/scale.md",
    ),
    (["double_q=0,1"], "sweep: double_q is of type bool, and only floats can be swept"),
    (["hidden_sizes=0,1"], "sweep: hidden_sizes is of type tuple, and only floats"),
    (["learnin_rate=1"], "sweep: learnin_rate is no flag of the algorithm: learning_rate?"),
    (["seed=1,2"], "sweep: seed is no flag of the algorithm"),
    (["gamma=0.9,1.5"], "gamma must be from 0 to 1, not 1.5"),
    (["gamma=0.9,"], "sweep: gamma must be a number, not ''"),
    (["gamma"], "sweep: gamma must be written as gamma=0.9,0.99, or two flags together as "),
    (["gamma:tau=0.9:1,0.8"], "sweep: gamma:tau=0.9:1,0.8 must be written as "),
    (["gamma=0.9", "gamma:tau=0.8:1"], "sweep: gamma is there twice"),
    (["gamma:gamma=0.9:0.8"], "sweep: gamma is there twice"),
    (["gamma=0.9,0.90", "tau=0.5"], "sweep: gamma=0.9, tau=0.5 is there twice"),
]


@pytest.mark.parametrize(("items", "message"), MISTAKES)
def test_a_sweep_that_cannot_be_meant_is_refused(items, message):
    with pytest.raises(UsageError) as caught:
        make_settings(items, ARGS)
    assert str(caught.value).startswith(message)


def test_a_flag_that_may_be_none_can_be_swept():
    assert make_settings(("target_kl=0.1,0.2",), ppo_jax.Args())[1] == {"target_kl": 0.2}


def sweep_of_six():
    """Three settings, each with the seeds 3 and 4."""
    return Sweep(ARGS, dqn_jax.Run(seed=3, num_seeds=2, sweep=("gamma:tau=0.9:1,0.8:0.5,0:1",)))


def test_each_setting_has_each_seed():
    sweep = sweep_of_six()
    assert len(sweep) == 6
    assert sweep.seeds.tolist() == [3, 4, 3, 4, 3, 4]
    np.testing.assert_array_equal(sweep.values["gamma"], np.float32([0.9, 0.9, 0.8, 0.8, 0, 0]))
    np.testing.assert_array_equal(sweep.values["tau"], np.float32([1, 1, 0.5, 0.5, 1, 1]))


def test_folders_and_lines_show_the_values():
    sweep = sweep_of_six()
    assert sweep.folder(Path("run"), 0) == Path("run/gamma=0.9,tau=1,seed=3")
    assert sweep.folder(Path("run"), 3) == Path("run/gamma=0.8,tau=0.5,seed=4")
    assert sweep.label(3) == "gamma=0.8, tau=0.5, seed 4"


def test_an_agent_of_a_sweep_whose_numbers_are_not_finite_is_named_once_and_the_others_go_on(
    capsys,
):
    """The error comes when none is left."""
    finite = np.ones((3, 2, 3), bool)  # agents, log entries; rewards, observations, parameters
    finite[1, 1:, 2] = False
    run = dqn_jax.Run(sweep=("gamma=0.9,0.8,0.7",))
    run_folder = SimpleNamespace(run=run, path=Path("here"))
    sweep = Sweep(ARGS, run)
    check = partial(compiled.check_entries, run_folder=run_folder, sweep=sweep)
    for step in (0, 200):
        check(compiled.Entry({}, None, finite), step, 100)
        finite[1] = False
    (line,) = capsys.readouterr().out.splitlines()
    where = "gamma=0.8, seed 1, between steps 100 and 200; the other agents go on"
    assert line == f"here: diverged, parameters are not finite: {where}"
    assert sweep.lost == {1}
    finite[:] = False
    with pytest.raises(
        FloatingPointError, match=r"CartPole-v1: the reward is not finite: gamma=0\.7"
    ):
        check(compiled.Entry({}, None, finite), 400, 100)


def test_without_a_sweep_folders_and_lines_show_the_seeds():
    sweep = Sweep(ARGS, dqn_jax.Run(seed=3, num_seeds=2))
    assert [sweep.folder(Path("run"), i) for i in range(2)] == [Path("run"), Path("run/seed_4")]
    assert [sweep.label(i) for i in range(2)] == ["seed 3", "seed 4"]


# ------------------------------------------------------------------------------- what can be swept

STEPS = "exploration_fraction has one value in a program, because a shape, a number of steps or "
EXPONENT = "priority_exponent has one value in a program"
DRAWN = {
    name: f"{name} changes nothing: it is not used" for name in ("her_fraction", "offline_fraction")
}
REFUSED = {
    dqn_jax: {"exploration_fraction": STEPS, **DRAWN},
    per_dqn_jax: {"exploration_fraction": STEPS, "priority_exponent": EXPONENT, **DRAWN},
    ppo_jax: {},
    r2d2_jax: {"exploration_fraction": STEPS, "priority_exponent": EXPONENT},
    recurrent_ppo_jax: {},
    sac_jax: {
        "critic_dropout": "critic_dropout has one value in a program",
        "alpha": "alpha changes nothing: it is not used with the other flags",  # it is tuned
        **DRAWN,
    },
}


@pytest.mark.more
@pytest.mark.parametrize("script", REFUSED, ids=lambda script: script.__name__)
def test_every_float_flag_can_be_swept_or_is_refused(script):
    env_id = "phys2d/Pendulum-v0" if script is sac_jax else "phys2d/CartPole-v1"
    names = [x.name for x in fields(script.Args) if x.type in (float, float | None)]
    assert set(REFUSED[script]) < set(names)
    for name in names:
        run = script.Run(env_id=env_id, sweep=(f"{name}=0.25,0.5",))
        if name in REFUSED[script]:
            with pytest.raises(UsageError, match=f"sweep: {REFUSED[script][name]}"):
                make_trainer(script, script.Args(), run)
        else:
            make_trainer(script, script.Args(), run)


def test_a_flag_that_sets_a_number_of_steps_is_refused_with_the_line_of_the_script(run_main):
    flags = "--env-id environments:Chain-v0 --sweep tau=0.5,1 exploration-fraction=0.1,0.2"
    line = one_line(run_main(dqn_jax, *flags.split()))
    lines = Path(dqn_jax.__file__).read_text().splitlines()
    (number,) = [i for i, x in enumerate(lines, 1) if "int(args.exploration_fraction" in x]
    assert f"{STEPS}a branch of the program depends on it: dqn_jax.py, line {number}: " in line
    assert line.endswith("; start a run for each value instead, see docs/scale.md")
    assert not Path("runs").exists()


def test_a_flag_that_changes_nothing_is_refused():
    with pytest.raises(
        UsageError, match="sweep: her_fraction changes nothing: it is not used with the "
    ):
        make_trainer(dqn_jax, ARGS, dqn_jax.Run(**CHAIN, sweep=("her_fraction=0.1,0.2",)))


def test_an_ordinary_environment_has_no_sweep(run_main):
    line = one_line(run_main(dqn_jax, "--sweep", "gamma=0.9,0.99"))
    assert "num_seeds, sweep, num_devices, distributed: CartPole-v1 is not written in JAX" in line


def test_experience_of_a_sweep_is_not_kept():
    run = dqn_jax.Run(**CHAIN, sweep=("gamma=0.9,0.99",))
    args = dqn_jax.Args(save_experience=True)
    with pytest.raises(UsageError, match="save_experience: only that of one agent"):
        dqn_jax.train(args, run)


# --------------------------------------------------------------------------------- what is trained


def agent_folders(folder):
    """The folders of the agents of a sweep."""
    return sorted(file.parent for file in folder.glob("*/args.json"))


class Four(NamedTuple):
    """What four agents have left."""

    state: Any
    returns: Any
    folder: Path
    printed: str


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Two learning rates, and the seeds 1 and 2. In evaluations the third agent is the best."""
    scores = np.float32([[0, 1], [0, 1], [98, 99], [0, 1]])
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(tmp_path_factory.mktemp("four"))
        patch.setattr(compiled.Trainer, "evaluate", lambda *_: (scores, scores))
        run = dqn_jax.Run(**CHAIN, num_seeds=2, log_interval=80, sweep=RATES)
        trained = dqn_jax.train(dqn_jax.Args(**DQN), run)
    return Four(*trained, printed.getvalue())


def test_each_agent_has_a_folder_with_its_values(four):
    assert four.returns.shape == (4,)
    assert [path.name for path in agent_folders(four.folder)] == [
        "learning_rate=0.0001,seed=1",
        "learning_rate=0.0001,seed=2",
        "learning_rate=0.01,seed=1",
        "learning_rate=0.01,seed=2",
    ]


def test_who_loads_one_agent_of_a_sweep_is_told_where_all_are(four):
    own = four.folder / "learning_rate=0.01,seed=2"
    with pytest.raises(
        UsageError, match=f"no checkpoint: all agents of the run are in {four.folder}"
    ):
        load_policy(own)


def test_the_flags_of_an_agent_are_those_of_a_run_that_trains_it_alone(four):
    own = read_flags(four.folder / "learning_rate=0.01,seed=2", dqn_jax.Run, dqn_jax.Args)
    run = dqn_jax.Run(**CHAIN, seed=2, log_interval=80)
    assert own == (run, dqn_jax.Args(**DQN, learning_rate=0.01))


def test_the_page_hparams_compares_the_values(four):
    seen = set()
    for folder in agent_folders(four.folder):
        contents = EventAccumulator(str(folder)).Reload().PluginTagToContent("hparams")
        content = contents["_hparams_/session_start_info"]
        given = HParamsPluginData.FromString(content).session_start_info.hparams
        seen.add((given["learning_rate"].number_value, given["seed"].number_value))
    assert seen == {(0.01, 1), (0.01, 2), (0.0001, 1), (0.0001, 2)}


def params_of(state, i):
    """The parameters of agent i."""
    return jax.tree.map(lambda x: np.asarray(x[i]), state.params)


def train_alone(script, args, run):
    """The parameters and scalars of a single agent, without the speed."""
    state, _, folder = script.train(args, run)
    scalars, _ = read_events(folder)
    scalars.pop("charts/SPS")
    return params_of(state, 0), scalars


def assert_same(state, i, folder, alone):
    """Up to rounding: a constant of a program is not computed with as a number of an array is."""
    params, expected = alone
    for x, y in zip(jax.tree.leaves(params_of(state, i)), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    scalars, _ = read_events(folder)
    own = {tag for tag in scalars if not tag.startswith("eval/")}
    assert own - {"charts/SPS"} == set(expected)
    assert "losses/td_loss" in expected or "losses/policy_loss" in expected
    for tag, points in expected.items():
        np.testing.assert_allclose(scalars[tag], points, rtol=1e-5, atol=1e-6, err_msg=tag)


def test_an_agent_of_a_sweep_of_dqn_is_the_one_trained_alone(four):
    args = dqn_jax.Args(**DQN, learning_rate=0.0001)
    run = dqn_jax.Run(**CHAIN | dict(eval_episodes=0), seed=2, log_interval=80)
    alone = train_alone(dqn_jax, args, run)
    assert_same(four.state, 3, four.folder / "learning_rate=0.0001,seed=2", alone)
    other = jax.tree.leaves(params_of(four.state, 1))
    assert max(np.abs(x - y).max() for x, y in zip(other, jax.tree.leaves(alone[0]), strict=True))


SWEPT = ("gamma:clip_coef=0.5:0.1,0.9:0.3", "ent_coef=0,0.1")


@pytest.mark.more
@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_agent_of_a_sweep_of_ppo_is_the_one_trained_alone(num_devices):
    run = ppo_jax.Run(env_id="phys2d/CartPole-v1", eval_episodes=0, log_interval=64)
    args = ppo_jax.Args(**PPO)
    together = replace(run, sweep=SWEPT, num_devices=num_devices)
    state, _, folder = ppo_jax.train(args, together)
    own = replace(args, gamma=0.9, clip_coef=0.3, ent_coef=0.1)
    alone = train_alone(ppo_jax, own, run)
    assert_same(state, 3, folder / "gamma=0.9,clip_coef=0.3,ent_coef=0.1,seed=1", alone)


@pytest.mark.more
@pytest.mark.parametrize("script", [per_dqn_jax, r2d2_jax, recurrent_ppo_jax, sac_jax])
def test_an_agent_of_a_sweep_of_another_script_is_the_one_trained_alone(script):
    env_id = "phys2d/Pendulum-v0" if script is sac_jax else "phys2d/CartPole-v1"
    flags = DQN | dict(total_timesteps=400)
    if script is r2d2_jax:
        flags = dict(total_timesteps=640, learning_starts=400, num_envs=4, batch_size=4)
        flags |= dict(train_frequency=80, buffer_size=400)
    elif script is recurrent_ppo_jax:
        flags = PPO | dict(sequence_length=8)
    elif script is sac_jax:
        flags |= dict(target_network_frequency=1)
    args = script.Args(**flags)
    run = script.Run(env_id=env_id, eval_episodes=0, log_interval=80)
    _, _, folder = script.train(args, replace(run, sweep=("gamma=0.5,0.9",)))
    _, _, own_folder = script.train(replace(args, gamma=0.9), run)
    swept, alone = (read_events(x)[0] for x in (folder / "gamma=0.9,seed=1", own_folder))
    losses = [tag for tag in alone if tag.startswith("losses/")]
    assert losses
    for tag in losses:
        np.testing.assert_allclose(swept[tag], alone[tag], rtol=1e-4, atol=1e-5, err_msg=tag)


def test_agents_explore_in_an_evaluation_as_their_own_flags_say():
    """Of two with the same parameters one takes the best actions, and one any."""
    run = dqn_jax.Run(**CHAIN | dict(eval_episodes=20), eval_explores=True, sweep=("end_e=0,1",))
    trainer = make_trainer(dqn_jax, dqn_jax.Args(**DQN), run)
    runner = trainer.init()
    params = trainer.agent.policy_params(runner.agent)
    returns, _ = trainer.evaluate(params, runner.values)
    assert len(set(returns[0])) == 1
    assert len(set(returns[1])) == 2


def test_the_best_agent_of_a_sweep_is_loaded_with_its_own_flags(monkeypatch, four):
    made = []

    class Noted(dqn_jax.DQN):
        def __init__(self, args, *rest):
            super().__init__(args, *rest)
            made.append(self)

    monkeypatch.setattr(dqn_jax, "Agent", Noted)
    policy = load_policy(four.folder)
    (agent,) = made
    assert agent.args == dqn_jax.Args(**DQN, learning_rate=0.0001)
    observations = np.random.default_rng(0).normal(size=(500, 5)).astype(np.float32)
    best = np.asarray(agent.act(params_of(four.state, 2), observations))
    np.testing.assert_array_equal(policy(observations), best)
    assert (agent.act(params_of(four.state, 0), observations) != best).any()


@pytest.mark.more
@pytest.mark.parametrize("script", [dqn_jax, ppo_jax])
def test_a_sweep_that_is_resumed_goes_on_bit_for_bit(script, stop_at):
    flags, rate = (DQN, "learning_rate") if script is dqn_jax else (PPO, "clip_coef")
    run = script.Run(
        **CHAIN | dict(eval_episodes=0), log_interval=32, num_seeds=2, sweep=(f"{rate}=0.1,0.01",)
    )
    args = script.Args(**flags)
    whole, *_ = script.train(args, run)
    _, _, half = script.train(args, run, stop_at(64 if script is ppo_jax else 160))
    resumed, _, _ = script.train(args, replace(run, resume=str(half)))
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    for folder in agent_folders(half):
        steps = [step for step, _ in read_events(folder)[0]["charts/SPS"]]
        assert steps == sorted(set(steps))
        assert steps[-1] == args.total_timesteps


def test_a_sweep_that_is_resumed_has_the_values_that_it_had(run_main, four):
    folder = str(four.folder)
    line = one_line(run_main(dqn_jax, "--resume", folder, "--sweep", "learning_rate=1,2"))
    assert "resume: sweep must stay ('learning_rate=0.01,0.0001',)" in line


def test_the_lines_of_a_sweep_say_which_agent_is_the_best(four):
    evaluation = "320 steps: return 25.00 in an evaluation, the best 98.50 with "
    assert f"\n{evaluation}learning_rate=0.0001, seed 1\n" in four.printed
    last = "learning_rate=0.01, seed 2: mean return of the last episodes "
    assert f"\n{last}{four.returns[1]:.2f}\n" in four.printed


@pytest.mark.more
def test_the_others_are_saved_and_evaluated_where_one_agent_diverges():
    """The first of two, whose learning rate is too large. Both have the return 0."""
    run = dqn_jax.Run(**CHAIN, log_interval=80, sweep=("learning_rate=3e38,0",))
    args = dqn_jax.Args(**DQN | dict(end_e=0.0))
    state, _, folder = dqn_jax.train(args, run)
    assert not np.isfinite(jax.tree.leaves(params_of(state, 0))[0]).all()
    assert agent_file.open_agent(folder / agent_file.NAME).about["args"]["learning_rate"] == 0.0
    observations = np.eye(5, dtype=np.float32)
    agent = dqn_jax.DQN(args, Chain.observation_space, Chain.action_space)
    expected = agent.act(params_of(state, 1), observations)
    np.testing.assert_array_equal(load_policy(folder)(observations), expected)


@pytest.mark.more
def test_values_are_spread_over_devices_as_the_agents_are():
    run = ppo_jax.Run(**CHAIN, sweep=("gamma=0.5,0.6,0.7,0.8",), num_devices=2)
    runner = make_trainer(ppo_jax, ppo_jax.Args(**PPO), run).init()
    gamma = runner.values["gamma"]
    assert gamma.dtype == jnp.float32
    parts = [np.asarray(part.data).tolist() for part in gamma.addressable_shards]
    assert parts == [np.float32([0.5, 0.6]).tolist(), np.float32([0.7, 0.8]).tolist()]
