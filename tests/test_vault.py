"""Experience on disk: row r of a run is row r of its vault, even after a kill or a full disk."""

import shutil
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal

import buffers
from cleanreplay import vault as vault_module
from cleanreplay.vault import Vault

ITEM = {"count": np.int32(0), "frame": np.zeros((3, 2), np.uint8)}
REPLAY = buffers.uniform_replay(20, num_envs=2, donate=False)  # of ten rows


def rows(start, stop, envs=2):
    """Makes rows of a run, each different from all others."""
    count = np.arange(start * envs, stop * envs, dtype=np.int32).reshape(-1, envs)
    frame = (count[..., None, None] * 7 + np.arange(6).reshape(3, 2)) % 251
    return {"count": count, "frame": frame.astype(np.uint8)}


@cache
def state_after(own, others=0):
    """Makes the state after `own` rows of the run, and `others` that differ from the run's."""
    count = own + others
    if count == 0:
        return REPLAY.init(ITEM)
    before = state_after(own, others - 1) if others else state_after(own - 1)
    row = jax.tree.map(lambda x: x[0] + (others > 0), rows(count - 1, count))
    return REPLAY.add(before, row)


def assert_holds(vault, start, stop):
    """Fails unless the vault holds these rows of the run."""
    got = vault.read(start, stop)
    for name, x in rows(start, stop).items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x)


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@cache
def written():
    """Makes the folder of a vault with 40 rows of the run."""
    folder = Path(tempfile.mkdtemp(prefix="vault_", dir=".")).absolute()
    vault = Vault(folder, ITEM, num_envs=2)
    for count in (10, 20, 30, 40):
        vault.write(state_after(count))
    return folder


def copy_of_written(tmp_path):
    """Copies that folder, to write to it or to damage it."""
    return shutil.copytree(written(), tmp_path / "experience")


@pytest.fixture
def folder(tmp_path):
    return copy_of_written(tmp_path)


@pytest.mark.parametrize(
    ("factory", "counts"),
    [
        # Writes that cross the end of the ring, and one of the whole ring.
        (buffers.uniform_replay, (3, 7, 10, 0, 1, 9, 5, 10)),
        (buffers.prioritised_replay, (3, 10)),
    ],
)
def test_row_r_of_the_run_is_row_r_of_the_vault(tmp_path, factory, counts):
    replay = factory(20, num_envs=2)
    vault = Vault(tmp_path, ITEM, num_envs=2)
    state = replay.init(ITEM)
    total = 0
    assert_holds(vault, 0, 0)
    for count in counts:
        state = replay.add_batch(state, rows(total, total + count))
        total += count

        assert vault.write(state) == count
        assert vault.write(state) == 0
        assert len(vault) == total
        assert_holds(vault, 0, total)
    assert_holds(Vault(tmp_path, ITEM, num_envs=2), total - 5, total)


def test_a_queue_is_written_with_what_was_popped_since(tmp_path):
    queue = buffers.circular_buffer(8)
    vault = Vault(tmp_path, ITEM)
    items = jax.tree.map(lambda x: x[:, 0], rows(0, 12, 1))
    state = queue.add_batch(queue.init(ITEM), jax.tree.map(lambda x: x[:6], items))
    assert vault.write(state) == 6
    state, _ = queue.pop(state, 4)
    state = queue.add_batch(state, jax.tree.map(lambda x: x[6:], items))
    assert vault.write(state) == 6
    np.testing.assert_array_equal(vault.read(0, 12)["frame"], items["frame"])

    state, _ = queue.pop(queue.add(state, ITEM), 8)  # one of them is not on disk
    with pytest.raises(ValueError, match=r"^1 rows"):
        vault.write(state)


def test_all_rows_are_loaded_into_a_replay(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(vault_module, "LOADED_ROWS", 16)
    vault = Vault(folder)
    replay, state = vault.load()

    assert (replay.max_size, replay.num_envs) == (80, 2)
    for name, x in rows(0, 40).items():
        np.testing.assert_array_equal(state.storage[name], x)
    _, state = vault.load({"frame": ITEM["frame"]})
    assert state.storage.keys() == {"frame"}
    with pytest.raises(ValueError, match="no rows"):
        Vault(tmp_path / "new", ITEM).load()


def test_a_resumed_run_overwrites_what_follows_its_checkpoint(folder):
    vault = Vault(folder, ITEM, num_envs=2)
    assert vault.write(state_after(40, others=7)) == 7
    del vault  # and its lock

    again = Vault(folder, ITEM, num_envs=2)
    assert again.write(state_after(40)) == 0
    assert len(again) == 40
    assert again.write(state_after(45)) == 5
    assert_holds(again, 0, 45)


def test_another_run_is_appended_if_asked(folder):
    """It continues, and is resumed, after the rows of the first, with a ring of different size."""
    larger = buffers.uniform_replay(28, num_envs=2, donate=False)
    vault = Vault(folder, ITEM, num_envs=2)
    checkpoint = larger.add_batch(larger.init(ITEM), rows(40, 43))
    assert vault.write(checkpoint, new_run=True) == 3
    other = jax.tree.map(lambda x: x + 1, rows(43, 52))
    assert vault.write(larger.add_batch(checkpoint, other)) == 9
    assert len(vault) == 52
    assert vault.write(checkpoint) == 0  # a resume from it
    assert vault.write(larger.add_batch(checkpoint, rows(43, 56))) == 13
    assert_holds(vault, 0, 56)

    with pytest.raises(ValueError, match="others in their place"):
        vault.write(state_after(10))


def test_a_vault_may_begin_late(tmp_path):
    """Its row r is row r + 7 of the run."""
    vault = Vault(tmp_path, ITEM, num_envs=2)
    with pytest.raises(ValueError, match=r"^7 rows were .*begin_late"):
        vault.write(state_after(17))
    assert len(vault) == 0
    assert vault.write(state_after(17), begin_late=True) == 10
    assert vault.write(state_after(20), begin_late=True) == 3
    assert vault.write(state_after(20, others=6)) == 6
    del vault

    again = Vault(tmp_path, ITEM, num_envs=2)
    assert again.write(state_after(20)) == 0  # a resume drops what came after it
    assert len(again) == 13
    assert again.write(state_after(30)) == 10
    np.testing.assert_array_equal(again.read(0, 23)["count"], rows(7, 30)["count"])
    with pytest.raises(ValueError, match=r"^2 rows were .* before more than 10 are added$"):
        again.write(state_after(42), begin_late=True)
    with pytest.raises(ValueError, match="begins after these rows"):
        again.write(state_after(5))


def test_the_count_of_rows_is_followed_past_its_modulus(tmp_path):
    vault = Vault(tmp_path, ITEM, num_envs=2)
    # The vault and the replay have the last 10 rows of a long run.
    begin = 2**30 // 20 * 10 - 7
    for name, x in rows(0, 10).items():
        vault.arrays[name][begin - 10 : begin].write(x).result()
    vault._save(vault._load() | {"rows": begin})
    state = REPLAY.init(ITEM)
    state = state._replace(cursor=state.cursor + begin - 10)
    state = REPLAY.add_batch(state, rows(0, 10))
    total = 10
    for count in (5, 6, 3, 10, 2):
        older = state
        state = REPLAY.add_batch(state, rows(total, total + count))
        assert vault.write(state) == count
        if count < 10:  # of the last 10 rows both must have some
            assert vault.write(older) == 0
            assert len(vault) == begin - 10 + total
            assert vault.write(state) == count
        total += count
    assert state.cursor < 100  # it began anew at 0
    got = vault.read(begin - 10, begin - 10 + total)
    np.testing.assert_array_equal(got["frame"], rows(0, total)["frame"])


def reward_and_flag(reward):
    """Makes steps with these rewards [rows, environments] and with all flags set."""
    return {"reward": reward, "is_step": np.ones(reward.shape, bool)}


@pytest.mark.parametrize("count", [1, 3])
def test_flags_of_the_last_rows_may_change_at_a_resume(tmp_path, count):
    item = {"reward": 0.0, "is_step": True}
    vault = Vault(tmp_path, item, num_envs=2)
    reward = np.arange(10, dtype=np.float32).reshape(5, 2)
    state = REPLAY.add_batch(REPLAY.init(item), reward_and_flag(reward[:count]))
    vault.write(state)
    other = REPLAY.add_batch(REPLAY.init(item), reward_and_flag(reward[:count] + 1))
    with pytest.raises(ValueError, match=f"has {count} rows, and this state has others"):
        vault.write(other)

    first_changed = count - min(count, 2)
    is_step = state.storage["is_step"].at[first_changed:count].set(False)
    state = state._replace(storage=state.storage | {"is_step": is_step})
    assert vault.write(REPLAY.add_batch(state, reward_and_flag(reward))) == 5
    got = vault.read(0, count + 5)
    np.testing.assert_array_equal(got["reward"], np.concatenate([reward[:count], reward]))
    expected = np.ones(count + 5, bool)
    expected[first_changed:count] = False
    np.testing.assert_array_equal(got["is_step"][:, 0], expected)


def test_rows_of_flags_alone_are_compared(tmp_path):
    replay = buffers.uniform_replay(20)
    vault = Vault(tmp_path, True)
    vault.write(replay.add_batch(replay.init(True), np.ones(3, bool)))

    with pytest.raises(ValueError, match="others"):
        vault.write(replay.add_batch(replay.init(True), np.zeros(3, bool)))


class Body(NamedTuple):
    velocity: Any
    angle: Any


DTYPES = ("bfloat16", "bool", "float16", "float32", "int32", "int8", "uint32", "uint8")
ANY_LEAVES = {
    "+lock": np.zeros((0, 2), np.float32),
    "a": [True, 3],
    "b/c.d %": Body(velocity=np.zeros(2, np.float32), angle=(np.int32(0), 1.5)),
} | {name: jnp.zeros(3, name) for name in DTYPES}
NAMES = ("+lock", "a.0", "a.1", "b/c.d %.velocity", "b/c.d %.angle.0", "b/c.d %.angle.1", *DTYPES)


@pytest.mark.parametrize("num_envs", [None, 1])
def test_any_leaves_come_back_by_structure_or_name(tmp_path, num_envs):
    replay = buffers.uniform_replay(20, num_envs=num_envs, donate=False)
    vault = Vault(tmp_path, ANY_LEAVES, num_envs)
    lead = (10,) if num_envs is None else (10, num_envs)
    random = np.random.default_rng(0)
    steps = jax.tree.map(
        lambda x: random.integers(2, size=(*lead, *jnp.shape(x))).astype(jnp.result_type(x)),
        ANY_LEAVES,
    )
    state = replay.add_batch(replay.init(ANY_LEAVES), steps)
    vault.write(state)
    assert_trees_equal(vault.read(0, 10), steps)
    del vault

    again = Vault(tmp_path)
    assert again.num_envs == num_envs
    again.write(replay.add_batch(state, steps))
    wanted = dict(zip(NAMES, jax.tree.leaves(steps), strict=True))
    assert_trees_equal(again.read(10, 20), wanted)


@pytest.mark.parametrize("is_there", [False, True])
def test_what_a_vault_is_about_is_kept(tmp_path, is_there):
    """Also a vault that was made without it has it after the next write."""
    about = {"env_id": "Probe-v0", "env_kwargs": {"sizes": (1, 2)}, "seed": 3}
    as_read = {"env_id": "Probe-v0", "env_kwargs": {"sizes": [1, 2]}, "seed": 3}
    if is_there:
        Vault(tmp_path, ITEM, num_envs=2)
    vault = Vault(tmp_path, ITEM, num_envs=2, about=about)
    assert vault.about == as_read
    if is_there:
        vault.write(state_after(3))
    del vault

    assert Vault(tmp_path).about == as_read
    assert Vault(tmp_path, ITEM, num_envs=2, about={"env_id": "Other-v0"}).about == as_read


@pytest.mark.parametrize(("given", "level"), [({}, 1), ({"compression": 19}, 19)])
def test_a_vault_keeps_the_level_of_its_compression(tmp_path, given, level):
    Vault(tmp_path, 0.0, **given)
    codec = str(Vault(tmp_path).arrays["item"].codec.to_json())

    assert f"'level': {level}" in codec


def test_a_state_may_have_an_axis_of_one_in_front(folder):
    state = jax.tree.map(lambda x: x[None], state_after(43))

    vault = Vault(folder)
    assert vault.write(state) == 3
    assert_holds(vault, 0, 43)


def updated():
    """Makes a state whose items differ from the added ones."""
    return REPLAY.update(state_after(40), lambda item: item | {"count": item["count"] + 1})


def clustered():
    inner = buffers.uniform_replay(20, num_envs=2)
    return buffers.clustered_replay(3, inner, lambda step: step["count"][0] % 3).init(ITEM)


TWO = partial(jax.tree.map, lambda x: jnp.stack([x, x]))  # stacks two states
OF_THREE = buffers.uniform_replay(30, num_envs=3).init(ITEM)
# Mistakes with a vault of 40 rows and its path: the call, the error, words of it.
MISTAKES = {
    "overwritten": (lambda v, _: v.write(state_after(53)), ValueError, "^3 rows .* than 10"),
    "no rows": (lambda v, _: v.write(state_after(0)), ValueError, "new run"),
    "fewer of others": (lambda v, _: v.write(state_after(0, 3)), ValueError, "40 rows"),
    "more of others": (lambda v, _: v.write(state_after(0, 41)), ValueError, "resumed"),
    "updated": (lambda v, _: v.write(updated()), ValueError, "update"),
    "clustered": (lambda v, _: v.write(clustered()), TypeError, "clustered"),
    "stacked": (lambda v, _: v.write(TWO(state_after(41))), ValueError, "^these are 2 states"),
    "three envs": (lambda v, _: v.write(OF_THREE), ValueError, r"holds .*int32\[3\]"),
    "read too far": (lambda v, _: v.read(3, 41), IndexError, "3 to 41.* 40"),
    "read before": (lambda v, _: v.read(-1, 3), IndexError, "-1 to 3"),
    "load others": (lambda v, _: v.load({"x": 0}), ValueError, "x is missing"),
    "open with three": (lambda _, path: Vault(path, ITEM, 3), ValueError, "holds"),
    "more leaves": (lambda _, path: Vault(path, ITEM | {"x": 1}, 2), ValueError, "'x'"),
    "a key": (lambda _, path: Vault(path, jax.random.key(0)), TypeError, "key_data"),
    "not JSON": (lambda _, path: Vault(path / "x", 0, about={1: path}), TypeError, "JSON"),
    "not made": (lambda _, path: Vault(path / "x", 0, create=False), FileNotFoundError, "no vault"),
    "no item": (lambda _, path: Vault(path / "x"), FileNotFoundError, "x holds no vault$"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_error_and_nothing_is_written(mistake, folder, tmp_path):
    act, error, words = MISTAKES[mistake]
    vault = Vault(folder, ITEM, num_envs=2)
    before = contents(tmp_path)
    with pytest.raises(error, match=words) as caught:
        act(vault, folder)

    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before
