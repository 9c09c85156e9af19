"""One agent whose environments are stepped from Python by several processes."""

import signal
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from environments import Counter
from gymnasium.vector import SyncVectorEnv
from helpers import COUNTER, ONCE, ROOT, SMALL_PPO, flags_of, only_run, read_events, start_python
from test_processes import free_address, together

import dqn_jax
import iql_jax
import ppo_jax
import r2d2_jax
import recurrent_ppo_jax
import sac_jax
from cleanreplay import UsageError, checkpoints, disk, distributed, environments, shares
from cleanreplay.errors import LostProcessError


@pytest.fixture
def as_second(monkeypatch):
    """Pretends that this process is the second one of two."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)


def test_the_first_processes_have_an_environment_more(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 3)

    assert shares.divide(7) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    with pytest.raises(UsageError, match="num_envs must be 3 or more"):
        shares.divide(2)


def test_a_share_steps_its_rows_as_one_process_does(as_second):
    def make(num_envs, training=False):
        assert training
        return environments.Successes(SyncVectorEnv([Counter] * num_envs))

    share, whole = shares.make_envs(make, 5, training=True), make(5, training=True)
    (seen, _), (expected, _) = share.reset(seed=7), whole.reset(seed=7)
    actions = np.array([0, 1, 2, 0, 1])
    for _ in range(6):
        np.testing.assert_array_equal(seen[3:], expected[3:])
        assert not seen[:3].any()
        (seen, *rest, _), (expected, *rest_expected, _) = share.step(actions), whole.step(actions)
        for x, y in zip(rest, rest_expected, strict=True):
            np.testing.assert_array_equal(x[3:], y[3:])
            assert not x[:3].any()
    assert share.num_envs == 5
    assert share.ended == []


def test_environments_that_do_not_train_stay_whole(as_second):
    make = partial(shares.make_envs, lambda num_envs, folder: (num_envs, folder))

    assert make(3, "videos") == (3, "videos")


@pytest.fixture
def exchange(monkeypatch):
    """Makes an exchange of a single process, which returns what it would learn from."""
    monkeypatch.setattr(distributed, "gather", lambda x: x[None])
    envs = SimpleNamespace(num_envs=2, ended=[])
    log = SimpleNamespace(total=100)
    return shares.Exchange(lambda *given: given, envs, frame_stack=3, signals=[], log=log)


def test_a_rollout_arrives_with_its_stacks(exchange):
    """Only the newest frames are sent."""
    args, run = flags_of(ppo_jax, **COUNTER | SMALL_PPO | dict(num_envs=2, frame_stack=3))
    envs = ppo_jax.make_envs(args, run, 2)
    agent = ppo_jax.PPO(args, envs.single_observation_space, envs.single_action_space)
    params = agent.policy_params(agent.init(jax.random.PRNGKey(0)))
    state = ppo_jax.reset(envs, jax.random.PRNGKey(1), 0)
    for step in (0, 16, 32):
        key = jax.random.PRNGKey(2)
        rollout, state = ppo_jax.collect_rollout(agent, envs, params, state, key, step)
        _, arrived, _, _, following = exchange("state", rollout, key, step, state[0])
        jax.tree.map(np.testing.assert_array_equal, arrived, rollout)
        np.testing.assert_array_equal(following, state[0])


def test_the_end_of_one_process_is_the_end_of_all(exchange, monkeypatch):
    def gather(sent):
        other = sent.copy()
        other[8 * shares.FINISHED] = 1  # the numbers of 8 bytes come first
        return np.stack([sent, other])

    step = dqn_jax.Step(np.zeros((2, 2, 3, 1)), *[np.zeros((2, 2), bool)] * 5)
    exchange("state", step, None, 0)
    assert exchange.log.total == 100
    monkeypatch.setattr(distributed, "gather", gather)
    exchange.slices, exchange.older = [slice(0, 2), slice(2, 4)], None
    exchange("state", step, None, 0)
    assert exchange.log.total == 0


def test_signals_and_successes_travel_with_a_rollout(exchange):
    exchange.signals.append(signal.SIGINT)
    exchange.envs.ended += [1.0, 0.0, np.nan, 1.0]  # the last one is of the next rollout
    step = dqn_jax.Step(np.zeros((2, 2, 3, 1)), *[np.zeros((2, 2), bool)] * 5)
    step.terminated[:] = [[True, True], [True, False]]

    exchange("state", step, None, 0)

    assert exchange.stop == [signal.SIGINT]
    assert exchange.successes == [1.0, 0.0]
    assert exchange.envs.ended == [1.0]


@pytest.mark.parametrize(
    ("told", "error", "text"),
    [
        ([[5, 0, 0, 0], [5, 0, 1, 0]], LostProcessError, "process 1 failed"),
        ([[5] + [0] * 3, [5] + [0] * 3, [6] + [0] * 3], UsageError, "process 2 differ"),
    ],
)
def test_all_end_if_one_fails_or_learns_something_else(told, error, text):
    shares.check(np.array([[5, 0, 0, 0], [5, 0, 0, 0]]))
    with pytest.raises(error, match=text):
        shares.check(np.array(told))


def test_a_checksum_is_that_of_all_numbers():
    params = {"a": np.arange(3.0), "b": np.ones((2, 2), bool)}

    assert shares.checksum(params) == shares.checksum(jax.tree.map(np.copy, params))
    params["b"][1, 1] = False
    assert shares.checksum(params) != shares.checksum(params | {"b": np.ones((2, 2), bool)})


def test_processes_must_have_the_same_flags(as_second, monkeypatch):
    def gather(x):
        sent = bytes(np.atleast_1d(x))
        return np.stack([np.frombuffer(sent.replace(b"0.1", b"0.2"), x.dtype).reshape(x.shape), x])

    monkeypatch.setattr(distributed, "gather", gather)

    distributed.check_same({"gamma": 0.9})
    with pytest.raises(UsageError, match=r"gamma is 0\.2 in the first process"):
        distributed.check_same({"seed": 1, "gamma": 0.1})


@pytest.mark.parametrize(("error", "code"), [(UsageError("no"), 2), (OSError("broken"), 1)])
def test_an_error_ends_one_of_several_processes_at_once(error, code, as_second, monkeypatch, capfd):
    monkeypatch.setattr("os._exit", lambda code: codes.append(code))
    codes = []
    with distributed.ends_together():
        raise error

    assert codes == [code]
    assert capfd.readouterr().err.strip().endswith(str(error))


def test_an_error_of_gloo_means_a_lost_process(as_second):
    with pytest.raises(LostProcessError), distributed.lost_process():
        raise ValueError("INTERNAL: Gloo AllGather failed: Connection reset by peer")
    with pytest.raises(ValueError, match="shapes"), distributed.lost_process():
        raise ValueError("shapes")


# Whole runs in processes of their own. per_dqn_jax.py is DQN here, and pqn_jax.py is PPO.

FEW = dict(num_envs=5, vectorization="sync", eval_episodes=2, checkpoint_interval=20)
SMALL = ONCE | FEW | dict(total_timesteps=60, learning_starts=10, buffer_size=100)
RECURRENT = dict(hidden_size=4, burn_in=1, period=2)
REACH = dict(env_id="environments:Reach-v0")
ROLLOUT = COUNTER | SMALL_PPO | FEW | dict(num_steps=4, total_timesteps=60)
RUNS = {
    dqn_jax: SMALL | dict(env_id="environments:Counter-v0", frame_stack=3, save_experience=True),
    ppo_jax: ROLLOUT | dict(frame_stack=2),
    sac_jax: SMALL | REACH | dict(her_fraction=0.5, save_experience=True),
    r2d2_jax: SMALL | RECURRENT | dict(train_length=3, learning_starts=50, total_timesteps=160),
    recurrent_ppo_jax: ROLLOUT | RECURRENT | dict(sequence_length=2),
    iql_jax: SMALL | REACH | dict(offline_fraction=0.5),
}
PROGRAM = "import sys, test_shares; test_shares.train_all(*sys.argv[1:])"


def train_all(names, how=""):
    """Trains with the scripts of these names, with `how` in several processes.

    A second run of DQN begins with the agent and the data of the first one, IQL has the data of
    SAC, and PPO is resumed.
    """
    folders: dict = {}
    if how:
        distributed.join(how)
    for script, flags in RUNS.items():
        if script.__name__ not in names.split():
            continue
        known = vars(script.Args()) | vars(script.Run())
        args, run = flags_of(script, **{k: v for k, v in flags.items() if k in known})
        if script is iql_jax:
            args = replace(args, offline_data=str(folders[sac_jax]))
        _, _, folder = script.train(args, run)
        folders[script] = folder
        if script is dqn_jax:
            args = replace(args, init_from=str(folder), offline_data=str(folder))
            script.train(replace(args, save_experience=False), replace(run, exp_name="second"))
        if script is ppo_jax:
            script.train(replace(args, total_timesteps=100), replace(run, resume=str(folder)))


def start(folder, names, processes):
    """Starts processes that train together, each in its own folder, or a single one."""
    address = free_address()
    joins = [[f"{address},{processes},{i}"] for i in range(processes)] if processes > 1 else [[]]
    started = []
    for i, join in enumerate(joins):
        (folder / str(i)).mkdir(parents=True)
        started.append(start_python(folder / str(i), "-c", PROGRAM, names, *join))
    return started


def numbers_of(folder, name):
    """Reads all numbers of the last checkpoint, and the charts, of the run with a name."""
    (run,) = (folder / "0" / "runs").glob(f"*__{name}__*")
    stored = disk.open_file(checkpoints.newest(run))
    scalars, _ = read_events(run)
    del scalars["charts/SPS"]
    values = {tag: [point[:2] for point in points] for tag, points in scalars.items()}
    return values | stored.read(list(stored.shapes))


@together
@pytest.mark.slow
def test_processes_learn_bit_for_bit_what_one_does(tmp_path):
    """Five environments are split over three processes with DQN and PPO, over two otherwise."""
    three = "dqn_jax ppo_jax"
    two = " ".join(script.__name__ for script in RUNS if script.__name__ not in three.split())
    names = {1: f"{two} {three}", 2: two, 3: three}
    for numbers in ((1,), (2, 3)):  # the one first: others find its programs in the cache
        started = [start(tmp_path / str(n), names[n], processes=n) for n in numbers]
        for process in [process for group in started for process in group]:
            _, err = process.communicate(timeout=500)
            assert process.returncode == 0, err

    for processes, compared in {2: two, 3: f"{three} second"}.items():
        for name in compared.split():
            found, expected = (numbers_of(tmp_path / str(n), name) for n in (processes, 1))
            assert found.keys() == expected.keys()
            for key, values in expected.items():
                np.testing.assert_array_equal(found[key], values, err_msg=f"{name} {key}")
        assert list((tmp_path / str(processes)).glob("[12]/*")) == []  # of the other processes


LONG = "--num-envs 2 --total-timesteps 100000000 --eval-episodes 0 --checkpoint-interval 100000000"


def start_long(folder, env_id):
    """Starts two processes that train with PPO, and waits until they have learned."""
    address = free_address()
    program = [str(ROOT / "ppo_jax.py"), "--env-id", env_id, *LONG.split(), "--distributed"]
    processes = [start_python(folder, *program, f"{address},2,{i}") for i in range(2)]
    while not list(folder.glob("runs/*/events*")) or not read_events(only_run(folder))[0]:
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.2)
    return processes


def ended(processes, begin):
    """Returns the exit codes and the errors of processes that end soon."""
    results = []
    for process in processes:
        _, err = process.communicate(timeout=60)
        results.append((process.returncode, err))
    assert time.monotonic() - begin < 20
    return results


@together
@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "number", "sent", "codes", "is_saved"),
    [
        ("CartPole-v1", 1, "SIGKILL", (2, -9), True),
        ("CartPole-v1", 0, "SIGKILL", (-9, 2), False),
        ("CartPole-v1", 1, "SIGINT", (130, 130), True),
        ("phys2d/CartPole-v1", 1, "SIGKILL", (2, -9), False),
    ],
)
def test_all_processes_end_soon_after_one(env_id, number, sent, codes, is_saved, tmp_path):
    """They save the agent unless the first process is killed, or the run is compiled."""
    processes = start_long(tmp_path, env_id)

    begin = time.monotonic()
    processes[number].send_signal(getattr(signal, sent))
    results = ended(processes, begin)

    assert tuple(code for code, _ in results) == codes
    assert len(checkpoints.steps_in(only_run(tmp_path))) == is_saved
    if sent == "SIGKILL":
        assert results[1 - number][1].strip().splitlines()[-1].startswith("error: distributed: an")


@together
@pytest.mark.slow
def test_an_environment_that_fails_in_one_process_ends_all_processes(tmp_path):
    """The others report which process it was."""
    processes = start_long(tmp_path, "environments:FailsInSecond-v0")
    (code, err), (failed_code, failed_err) = ended(processes, time.monotonic())

    assert (code, failed_code) == (2, 1)
    assert err.strip().splitlines()[-1] == "error: distributed: process 1 failed, see its output"
    assert "RuntimeError: broken" in failed_err
    assert checkpoints.steps_in(only_run(tmp_path)) == [1_280]


@together
@pytest.mark.slow
def test_a_process_that_stands_still_ends_the_others(tmp_path):
    """JAX ends them, and reports the missing heartbeat."""
    first, second = start_long(tmp_path, "CartPole-v1")

    begin = time.monotonic()
    second.send_signal(signal.SIGSTOP)
    ((code, err),) = ended([first], begin)
    second.kill()
    second.communicate()

    assert code == -signal.SIGABRT
    assert "heartbeat" in err
