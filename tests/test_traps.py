"""What a user who edits a copy of a script may get wrong: it works, or an error says what to do."""

import math
from enum import Enum
from pathlib import Path

import environments
import gymnasium as gym
import numpy as np
import pytest
from helpers import COUNTER, SMALL_DQN, SMALL_PPO, edited, more, one_line, read_events

import cleanreplay
import dqn_jax
import ppo_jax

COMPILED = dict(env_id="phys2d/CartPole-v1", num_seeds=2, log_interval=100, eval_episodes=0)


def short(script, **flags):
    """Trains for 200 steps in Counter: what `train` returns."""
    return script.train(script.Args(**SMALL_DQN), script.Run(**COUNTER | flags))


def short_compiled(script):
    """Trains two agents for 200 steps in a compiled program: what `train` returns."""
    return script.train(script.Args(**SMALL_DQN), script.Run(**COMPILED))


# ------------------------------------------------------------------------------------------- flags

FLAGS = """
    warmup: int = 0  # a number of any kind
    shift: int = -3  # a negative one
    limit: float = float("inf")  # an infinite one
    bounds: tuple[float, ...] = (-1.5, 2.0)  # several
    maybe: float | None = None  # none
    kind: Literal["a", "b"] = "b"  # one of two
    place: Path = Path("some/where")  # a path
    save_experience: bool"""


def test_a_flag_of_any_type_and_value_works_and_is_kept_by_a_resume(run_main):
    script = edited(dqn_jax, ("\n    save_experience: bool", FLAGS))
    args = script.Args(**SMALL_DQN, warmup=-7, place=Path("else/where"))
    _, _, folder = script.train(args, script.Run(**COUNTER))
    code, _, err = run_main(script, "--resume", str(folder), "--total-timesteps", "300")
    assert code == 0, err
    _, kept = cleanreplay.flags.read_flags(folder, script.Run, script.Args)
    assert (kept.warmup, kept.shift, kept.limit) == (-7, -3, math.inf)
    assert (kept.bounds, kept.maybe, kept.kind) == ((-1.5, 2.0), None, "b")
    assert kept.place == Path("else/where")


@pytest.mark.more
def test_a_flag_that_is_an_enum_is_kept_by_a_resume():
    class Colour(Enum):
        RED = "red"

    script = edited(
        dqn_jax,
        ("\n    save_experience: bool", "\n    colour: Any = None\n    save_experience: bool"),
    )
    script.Args.__dataclass_fields__["colour"].type = Colour
    _, _, folder = script.train(script.Args(**SMALL_DQN, colour=Colour.RED), script.Run(**COUNTER))
    _, kept = cleanreplay.flags.read_flags(folder, script.Run, script.Args)
    assert kept.colour is Colour.RED


# ------------------------------------------------------------------------------- a field of `Step`

FIELD = ("    valid: Any  # False if the step only resets", "    valid: Any\n    cost: Any")
EXAMPLE = ("action=np.int32(0))\n", "np.int32(0), np.float32(0))\n")
FILLED = ("truncations, valids = rollout", "truncations, valids, costs = rollout\n    costs[:] = 7")
LEARNED = (
    'metrics["charts/epsilon"]',
    'metrics["cost"] = rollout.cost.mean()\n        metrics["charts/epsilon"]',
)


def test_a_new_field_of_step_that_is_not_filled_is_an_error():
    script = edited(dqn_jax, FIELD)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cost'"):
        short(script)
    script = edited(dqn_jax, FIELD, EXAMPLE)
    with pytest.raises(ValueError, match="too many values to unpack"):
        short(script)


def test_a_new_field_of_step_that_is_filled_is_stored_and_can_be_learned_from():
    script = edited(dqn_jax, FIELD, EXAMPLE, FILLED, LEARNED)
    state, _, folder = short(script)
    assert np.unique(state.replay.storage.cost).tolist() == [7.0]
    assert {x for _, x in read_events(folder)[0]["cost"]} == {7.0}


def test_a_new_field_of_step_in_a_compiled_run_is_an_error_that_says_where_to_fill_it():
    script = edited(dqn_jax, FIELD, EXAMPLE, FILLED)
    with pytest.raises(script.UsageError, match=r"Step has cost, .* JaxEnvs\.step"):
        short_compiled(script)


def test_a_renamed_field_of_step_is_an_error_before_anything_is_written(tmp_path):
    field = ("    valid: Any  # False if", "    mask: Any  # False if")
    script = edited(dqn_jax, field)
    with pytest.raises(script.UsageError, match="Step must have valid"):
        short(script)
    assert not (tmp_path / "runs").exists()


def test_a_renamed_field_of_state_works_with_saved_experience_and_resume():
    text = Path(dqn_jax.__file__).read_text()
    new = text.replace("state.replay", "state.memory").replace("    replay: Any", "    memory: Any")
    script = edited(dqn_jax, (text, new.replace("_replace(replay=", "_replace(memory=")))
    args = script.Args(**SMALL_DQN, save_experience=True)
    _, _, folder = script.train(args, script.Run(**COUNTER))
    longer = script.Args(**SMALL_DQN | dict(total_timesteps=300), save_experience=True)
    state, _, _ = script.train(longer, script.Run(**COUNTER, resume=str(folder)))
    assert state.memory.cursor == 300
    assert len(list((folder / "experience").iterdir())) > 0


# ----------------------------------------------------------------------------------------- metrics

OWN = (
    'metrics["charts/epsilon"]',
    'metrics["my_metric"] = step + 0.5\n        metrics["charts/epsilon"]',
)


@pytest.mark.parametrize("train", [short, short_compiled])
def test_a_metric_of_any_name_is_logged(train):
    _, _, folder = train(edited(dqn_jax, OWN))
    points = read_events(folder)[0]["my_metric"]
    assert points
    assert all(value == step - 10 + 0.5 for step, value in points)


@pytest.mark.parametrize("train", [short, more(short_compiled)])
def test_a_metric_that_is_an_array_is_an_error_that_names_it(train):
    script = edited(dqn_jax, (OWN[0], OWN[1].replace("step + 0.5", "rollout.reward[0]")))
    with pytest.raises(script.UsageError, match=r"the metric my_metric must be a number, .*\("):
        train(script)


@pytest.mark.more
def test_a_loss_is_logged_whatever_the_other_metrics_say():
    old = 'metrics["charts/learning_rate"] = learning_rate'
    new = 'metrics |= {"charts/gradient_steps": 0, "losses/mine": jnp.float32(4)}'
    script = edited(ppo_jax, (old, new))
    _, _, folder = script.train(script.Args(**SMALL_PPO), script.Run(**COUNTER))
    assert {x for _, x in read_events(folder)[0]["losses/mine"]} == {4.0}


# ---------------------------------------------------------------------------------- what is learned

FOURTH = (
    "return state, self.policy_params(state), metrics",
    "return state, self.policy_params(state), metrics, step",
)
IN_LOOP = (
    "state, params, metrics = learning.result()",
    "state, params, metrics, last = learning.result()",
)


@pytest.mark.parametrize("train", [short, more(short_compiled)])
def test_train_step_may_return_a_fourth_value(train):
    state, _, _ = train(edited(dqn_jax, FOURTH, IN_LOOP))
    assert (state.opt_state[0].count == 15).all()


class Breaks(environments.Counter):
    """Ends training at its 101st step."""

    steps = 0

    def step(self, action):
        Breaks.steps += 1
        if Breaks.steps > 100:
            raise OSError("the simulator is gone")
        return super().step(action)


def test_with_a_fourth_value_an_error_of_the_environment_still_saves(monkeypatch):
    monkeypatch.setitem(
        gym.registry, "Breaks-v0", gym.envs.registration.EnvSpec("Breaks-v0", Breaks)
    )
    Breaks.steps = 0
    script = edited(dqn_jax, FOURTH, IN_LOOP)
    with pytest.raises(OSError, match="the simulator is gone"):
        short(script, env_id="Breaks-v0")
    (checkpoint,) = Path("runs").glob("*/checkpoints/*")
    assert checkpoint.name == "120"  # 100 steps are 128 with the resets, in iterations of 10


USED = """
            import time
            time.sleep(0.5)
            print(state.params["params"]["q_0"]["bias"][0])
            with log.saves_on_error("""


@pytest.mark.parametrize("place", ["before the rollout", more("after the rollout")])
def test_the_state_that_a_thread_overwrites_is_an_error_that_says_so(place):
    pair = ("\n            with log.saves_on_error(", USED)
    if place == "after the rollout":
        new = USED.replace("with log.saves_on_error(", "state, params, metrics = learning")
        pair = ("\n            state, params, metrics = learning", new)
    with pytest.raises(RuntimeError, match="deleted") as caught:
        short(edited(dqn_jax, pair))
    assert any("learning.result()" in note for note in caught.value.__notes__)


# ---------------------------------------------------------------------------------------- wrappers


def test_a_wrapper_that_prevents_compiling_is_named(capsys):
    wrapped = ("wrappers: list = []", "wrappers: list = [gym.wrappers.RecordEpisodeStatistics]")
    script = edited(dqn_jax, wrapped)
    run = script.Run(env_id="phys2d/CartPole-v1", log_interval=100, eval_episodes=0)
    script.train(script.Args(**SMALL_DQN), run)
    assert "is not compiled" in capsys.readouterr().out
    with pytest.raises(script.UsageError, match="num_seeds"):
        short_compiled(script)


def test_a_wrong_flag_of_a_copy_is_one_line(run_main):
    script = edited(dqn_jax, OWN)
    result = run_main(script, "--env-id", "environments:Counter-v0", "--gamma", "2")
    assert one_line(result) == "error: gamma must be from 0 to 1, not 2.0"
