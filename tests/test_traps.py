"""What users may get wrong in a copy of a script: it works, or an error tells what to do."""

import math
from pathlib import Path

import jax
import pytest
from helpers import COUNTER, SMALL_DQN, edited, read_events

import cleanreplay
import dqn_jax
from cleanreplay.compiled import make_trainer


def train(script, **flags):
    return script.train(script.Args(**SMALL_DQN), script.Run(**COUNTER | flags))


def trace(script):
    """Traces the compiled program of a script without running it."""
    run = script.Run(env_id="phys2d/CartPole-v1", log_interval=100)
    trainer = make_trainer(script, script.Args(**SMALL_DQN), run)
    return jax.eval_shape(trainer.first_entry, {})


COLOURS = 'import math\nfrom enum import Enum\nColour = Enum("Colour", ["RED", "BLUE"])\n'
FLAGS = """
    warmup: int = 0  # a number of any kind
    shift: int = -3  # a negative one
    limit: float = float("inf")  # an infinite one
    bounds: tuple[float, ...] = (-1.5, 2.0)  # several
    maybe: float | None = None  # none
    kind: Literal["a", "b"] = "b"  # one of two
    colour: Colour = Colour.RED  # of a class
    place: Path = Path("some/where")  # a path
    save_experience: bool"""


def test_a_flag_of_any_type_is_kept_by_a_resume(run_main):
    script = edited(dqn_jax, ("import math\n", COLOURS), ("\n    save_experience: bool", FLAGS))
    args = script.Args(**SMALL_DQN, warmup=-7, place=Path("x"), colour=script.Colour.BLUE)
    _, _, folder = script.train(args, script.Run(**COUNTER))
    code, _, err = run_main(script, "--resume", str(folder))
    _, kept = cleanreplay.flags.read_flags(folder, script.Run, script.Args)

    assert code == 0, err
    assert kept == args
    assert kept.limit == math.inf
    assert kept.bounds == (-1.5, 2.0)


FIELD = ("    valid: Any  # False for an autoreset step", "    valid: Any\n    cost: Any")
EXAMPLE = ("action=np.int32(0))\n", "np.int32(0), np.float32(0))\n")
FILLED = ("truncations, valids = rollout", "truncations, valids, costs = rollout\n    costs[:] = 7")
OWN = 'metrics["losses/own"] = %s\n        metrics["charts/epsilon"]'


def test_a_field_of_step_and_a_metric_can_be_added():
    """The metric is also logged before the first gradient step."""
    metric = ('metrics["charts/epsilon"]', OWN % "step + rollout.cost.mean()")
    script = edited(dqn_jax, FIELD, EXAMPLE, FILLED, metric)
    state, _, folder = train(script)

    assert (state.replay.storage.cost == 7).all()
    points = read_events(folder)[0]["losses/own"]
    assert points == [(step, step - 10 + 7.0) for step in range(20, 201, 20)]


def test_a_field_of_step_must_be_filled_in_compiled_runs():
    script = edited(dqn_jax, FIELD, EXAMPLE, FILLED)

    with pytest.raises(script.UsageError, match=r"Step has cost, .* JaxEnvs\.step"):
        trace(script)


def test_a_renamed_field_of_step_is_an_error_before_a_run_begins(tmp_path):
    script = edited(dqn_jax, ("    valid: Any  # False for", "    mask: Any  # False for"))
    with pytest.raises(script.UsageError, match="Step must have valid"):
        train(script)

    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("begin", [train, trace])
def test_a_metric_that_is_an_array_is_named(begin):
    script = edited(dqn_jax, ('metrics["charts/epsilon"]', OWN % "rollout.reward[0]"))

    with pytest.raises(script.UsageError, match="the metric losses/own must be a number"):
        begin(script)


FOURTH = (
    ("self.policy_params(state), metrics\n", "self.policy_params(state), metrics, step\n"),
    ("state, params, metrics = learning", "state, params, metrics, last = learning"),
)


def test_train_step_may_return_a_fourth_value():
    """It does so if environments fail and the state is saved, and in compiled runs."""
    script = edited(dqn_jax, *FOURTH)
    trace(script)
    with pytest.raises(RuntimeError, match="broken"):
        train(script, env_id="environments:Failing-v0", env_kwargs='{"fail_at": 100}')

    (checkpoint,) = Path("runs").glob("*/checkpoints/*")
    assert checkpoint.name == "120"  # 100 steps are 128 with the resets, in iterations of 10


USED = """
            import time
            time.sleep(0.5)
            print(state.params["params"]["q_0"]["bias"][0])
            with log.saves_on_error("""


def test_the_state_that_a_thread_overwrites_is_named():
    script = edited(dqn_jax, ("\n            with log.saves_on_error(", USED))
    with pytest.raises(RuntimeError, match="deleted") as caught:
        train(script)

    assert any("learning.result()" in note for note in caught.value.__notes__)
