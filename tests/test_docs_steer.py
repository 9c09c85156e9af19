"""The changes and programs of docs/steer.md: what they do to a run while it trains."""

import re
import signal
from contextlib import chdir, closing
from functools import partial

import gymnasium as gym
import jax
import numpy as np
import pytest
from environments import Given, register_given
from helpers import edited, flags_of, gradient_steps, hunks, make_agent, only_run, read_events
from test_docs import PAGES, blocks
from test_docs_programs import MODULES

import cleanreplay
import dqn_jax
import ppo_jax
from cleanreplay import checkpoints, experiment, shares

pytestmark = pytest.mark.pages

PAGE = "docs/steer.md"
SMALL = dict(total_timesteps=480, num_envs=2, learning_starts=200, log_interval=240)
SMALL |= dict(env_id="Four-v0", eval_episodes=0, checkpoint_interval=0, hidden_sizes=(8,))
PPO = dict(num_envs=2, num_steps=32, num_minibatches=1, update_epochs=1, hidden_sizes=(8,))

register_given("Four-v0", gym.spaces.Box(0.0, 1.0, (4,)), gym.spaces.Discrete(2))


def run_program(number, *replaced, **names):
    """The names that a program of the page leaves, in which each (old, new) is replaced."""
    code = blocks(PAGE, "python")[number]
    for old, new in replaced:
        assert code.count(old) == 1, old
        code = code.replace(old, new)
    exec(code, names)
    return names


def changes(title):
    """The (old, new) texts of each diff of a section."""
    section = PAGES[PAGE].split(f"\n## {title}\n")[1].split("\n## ")[0]
    diffs = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)
    return [pair for diff in diffs for pair in hunks(f"@@\n{diff}")]


def train(script, **flags):
    args, run = flags_of(script, **flags)
    return script.train(args, run)


def test_code_is_called_at_each_evaluation(monkeypatch):
    monkeypatch.setattr(dqn_jax, "Log", dqn_jax.Log)  # it is put back afterwards
    args, run = flags_of(dqn_jax, **SMALL | dict(eval_episodes=2, eval_interval=240))
    small = [("dqn_jax.Args(num_envs=8)", "args"), ("dqn_jax.Run(eval_interval=50_000)", "run")]
    history = run_program(0, *small, args=args, run=run)["history"]
    charts, _ = read_events(only_run())

    assert history == charts["eval/episodic_return"] == [(240, 4.0), (480, 4.0)]


@pytest.mark.parametrize("env_id", ["Four-v0", "environments:Chain-v0"])
def test_a_run_that_is_good_enough_ends(env_id):
    """After the evaluation at step 240, with the next iteration: it is saved and evaluated."""
    ((old, new),) = changes("End a run early")
    script = edited(dqn_jax, (old, new.replace(">= 475", ">= 0")))
    flags = dict(eval_episodes=1, eval_interval=240, checkpoint_interval=240)
    _, _, folder = train(script, **SMALL | flags | dict(env_id=env_id, total_timesteps=4_800))
    first, last = [step for step, _ in read_events(folder)[0]["eval/episodic_return"]]

    assert first == 240
    assert first < last == checkpoints.steps_in(folder)[-1] < 1_000


def test_a_learning_rate_is_annealed_to_zero():
    """By 48 gradient steps. Adam moves a parameter by the rate if all its gradients are 1."""
    schedule, *_ = changes("Change a hyperparameter")
    agent = make_agent(edited(dqn_jax, schedule), *flags_of(dqn_jax, **SMALL))
    gradient = np.ones(3, np.float32)
    state = agent.optimizer.init(gradient)
    rates = []
    for _ in range(50):
        update, state = agent.optimizer.update(gradient, state)
        rates.append(-update[0])

    expected = 2.5e-4 * np.maximum(1 - np.arange(50) / 48, 0)
    np.testing.assert_allclose(rates, expected, rtol=1e-5, atol=1e-10)


@pytest.mark.parametrize(("threshold", "rate"), [(0, 2e-5), (400, 2.5e-4)])
def test_a_learning_rate_falls_when_the_return_is_high(threshold, rate):
    """It is that of the next gradient step, and a checkpoint holds it."""
    _, held, (old, new) = changes("Change a hyperparameter")
    script = edited(dqn_jax, held, (old, new.replace(">= 400", f">= {threshold}")))
    flags = SMALL | dict(checkpoint_interval=480)
    state, _, folder = train(script, **flags)
    opt_state = state.opt_state
    saved = cleanreplay.disk.open_file(checkpoints.newest(folder))
    (name,) = [name for name in saved.shapes if name.endswith("learning_rate")]

    assert opt_state.hyperparams["learning_rate"] == np.float32(rate)
    assert saved.read([name])[name] == np.float32(rate)
    agent = make_agent(script, *flags_of(script, **flags))
    begun = agent.optimizer.init(state.params)._replace(hyperparams=opt_state.hyperparams)
    update, _ = agent.optimizer.update(jax.tree.map(np.ones_like, state.params), begun)
    assert -update["params"]["q"]["bias"] == pytest.approx([rate] * 2, rel=1e-5)


@pytest.fixture(scope="module")
def corridor(tmp_path_factory):
    """The module of the page under another name, so that the one without a goal stays."""
    folder = tmp_path_factory.mktemp("corridor")
    code = MODULES["my_corridor"].replace("Corridor-v0", "Goals-v0")
    for old, new in changes("A curriculum")[:2]:
        assert code.count(old) == 1
        code = code.replace(old, new)
    (folder / "my_goals.py").write_text(code)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield "my_goals:Goals-v0"


def curriculum(follows=True):
    """PPO whose evaluations follow the goal of training, or not."""
    pairs = changes("A curriculum")[2:]
    return edited(ppo_jax, *(pairs if follows else pairs[:-1]))


def goals_of(script, env_id, monkeypatch, **flags):
    """The goals of the environments in each rollout and in each evaluation, and the run."""
    found = {"collect_rollout": [], "play_episodes": []}

    def note(module, name, position):
        function = getattr(module, name)

        def noting(*args):
            found[name].append(args[position].unwrapped.call("goal"))
            return function(*args)

        monkeypatch.setattr(module, name, noting)

    note(script, "collect_rollout", 1)
    note(experiment, "play_episodes", 3)
    evaluations = dict(eval_episodes=3, eval_interval=128, eval_max_steps=20, log_interval=64)
    small = PPO | evaluations | dict(env_id=env_id, total_timesteps=256)
    args, run = flags_of(script, **small | flags)
    return *found.values(), script.train(args, run)


def test_a_curriculum_reaches_all_environments_and_outlives_a_resume(corridor, monkeypatch):
    """At first actions at random reach the goal in most episodes, so that it moves on."""
    script = curriculum()
    with monkeypatch.context() as patch:
        trained, evaluated, (state, _, folder) = goals_of(script, corridor, patch)
    with monkeypatch.context() as patch:
        flags = dict(resume=str(folder), total_timesteps=320)
        trained_on, _, (state_on, _, _) = goals_of(script, corridor, patch, **flags)
    chart = dict(read_events(folder)[0]["charts/goal"])

    assert 2 < chart[64] <= chart[128] <= chart[256] == state.goal
    assert trained == [(goal, goal) for goal in [2, chart[64], chart[128], chart[192]]]
    assert evaluated == [(goal,) * 3 for goal in [chart[128], chart[256]]]
    assert trained_on == [(state.goal, state.goal)]
    assert chart[320] == state_on.goal


def test_evaluations_have_the_whole_task_without_the_method(corridor, monkeypatch):
    trained, evaluated, _ = goals_of(curriculum(follows=False), corridor, monkeypatch)

    assert trained[-1] > (2, 2)
    assert evaluated == [(9, 9, 9)] * 2


@pytest.fixture(scope="module")
def learner(corridor, tmp_path_factory):
    """The script, and its algorithm with a compiled `train_step`."""
    with chdir(tmp_path_factory.mktemp("learner")):
        script = curriculum()
        agent = make_agent(script, *flags_of(script, **PPO, env_id=corridor))
    agent.train_step = jax.jit(agent.train_step)
    return script, agent


@pytest.mark.parametrize(
    ("terminate", "truncate", "goal", "expected"),
    [(19, 1, 2, 3), (9, 1, 2, 2), (0, 0, 2, 2), (19, 1, 9, 9)],
)
def test_a_goal_moves_on_if_most_episodes_reached_it(terminate, truncate, goal, expected, learner):
    script, agent = learner
    row = np.arange(64).reshape(32, 2)
    rollout = script.Step(*[np.zeros((32, 2, *x.shape), x.dtype) for x in agent.example_step])
    rollout = rollout._replace(terminated=row < terminate, truncated=row >= 64 - truncate)
    state = agent.init(jax.random.PRNGKey(0))._replace(goal=np.int32(goal))
    given = (state, rollout, jax.random.PRNGKey(1), 0, rollout.observation[0])
    after, _, metrics = agent.train_step(*given)

    assert after.goal == metrics["charts/goal"] == expected


def test_a_process_tells_the_goal_to_its_own_environments(corridor, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    script = curriculum()
    make = partial(script.make_envs, *flags_of(script, env_id=corridor))
    with closing(shares.make_envs(make, 5, training=True)) as envs:
        envs.unwrapped.set_attr("goal", 4)
        assert envs.call("goal") == (4, 4)


POPULATION = [
    ("GENERATIONS = 5", "GENERATIONS = 2"),
    ("ENTRIES = 8", "ENTRIES = 1"),
    ('env_id="phys2d/CartPole-v1"', 'env_id="environments:Chain-v0", eval_episodes=2'),
    ("num_steps=32", "num_steps=8, num_minibatches=1, update_epochs=1, hidden_sizes=(4,)"),
    ("log_interval=1024", "log_interval=64"),
]


@pytest.fixture(scope="module")
def population():
    """What the program of the page leaves, made smaller."""
    return run_program(1, *POPULATION)


def test_the_worst_agents_continue_from_the_best(population):
    runner, trainer = population["runner"], population["trainer"]
    scores = np.array([3.0, 9.0, 1.0, 4.0, 5.0, 8.0, 2.0, 6.0])  # the worst are 2 and 6
    after = population["next_generation"](runner, scores, np.random.default_rng(0))
    parents = [0, 1, 5, 3, 4, 5, 1, 7]
    factors = np.asarray(after.values["learning_rate"] / runner.values["learning_rate"][parents,])

    before = jax.tree.leaves((runner.agent, runner.envs))
    for x, y in zip(before, jax.tree.leaves((after.agent, after.envs)), strict=True):
        np.testing.assert_array_equal(x[np.array(parents)], y)
    np.testing.assert_array_equal(runner.key, after.key)
    assert set(np.delete(factors, [2, 6])) == {1.0}
    assert set(factors[[2, 6]]) <= {0.5, 2.0}
    assert len(trainer.sweep) == 8


def test_a_population_is_compiled_once(population):
    """And the rates after two generations are those of the sweep, halved or doubled."""
    begun = np.float32([1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    rates = np.asarray(population["runner"].values["learning_rate"])
    powers = np.log2(rates[:, None] / begun)
    is_from_one = abs(powers - powers.round()) < 1e-4

    assert population["run_entries"]._cache_size() == 1
    assert is_from_one.any(axis=1).all()
    assert not np.array_equal(rates, begun)


class Interrupted(Given):
    """Its 300th step, of all environments together, is interrupted as in a notebook."""

    steps = 0

    def __init__(self):
        super().__init__(gym.spaces.Box(0.0, 1.0, (4,)), gym.spaces.Discrete(2))

    def step(self, action):
        Interrupted.steps += 1
        if Interrupted.steps == 300:
            signal.raise_signal(signal.SIGINT)
        return super().step(action)


gym.register("Interrupted-v0", Interrupted, disable_env_checker=True)


def test_the_cells_of_a_notebook_end_and_continue_a_run():
    """After 360 steps: the iteration up to there is learned from while the next one is collected.

    Every fifth step only resets, so that the 300th other one is within the 40 that follow.
    """
    flags = "(seed=3, env_id='Interrupted-v0', eval_episodes=0)"
    small = [("200_000", "600, learning_starts=160"), ("(seed=3)", flags)]
    names = run_program(2, *small)
    folder, begun = names["folder"], names["state"]
    assert checkpoints.steps_in(folder) == [360]
    assert gradient_steps(begun) == 20

    names = run_program(3, **names)
    observations = np.random.default_rng(0).random((9, 4), np.float32)
    agent = make_agent(dqn_jax, names["args"], names["run"])
    expected = agent.act(begun.params, observations)
    np.testing.assert_array_equal(names["policy"](observations), expected)

    names = run_program(4, **names)
    assert names["folder"] == folder
    assert checkpoints.steps_in(folder)[-1] == 600
    assert gradient_steps(names["state"]) == 44
