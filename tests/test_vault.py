"""Experience on disk: row r of a run is row r of its vault, even after a kill or a full disk."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import ROOT, fast_at_ends

import buffers
from cleanreplay.vault import Vault

ITEM = {"count": np.int32(0), "frame": np.zeros((3, 2), np.uint8)}


def rows(start, stop, envs=2):
    """Rows of a run, each unlike all others."""
    count = np.arange(start * envs, stop * envs, dtype=np.int32).reshape(-1, envs)
    frame = (count[..., None, None] * 7 + np.arange(6).reshape(3, 2)) % 251
    return {"count": count, "frame": frame.astype(np.uint8)}


def row(i):
    """Row i of the run that `rows` has, as `add` takes it."""
    return jax.tree.map(lambda x: x[0], rows(i, i + 1))


def rows_of_another_run(start, stop):
    """Rows of which none is like the one that `rows` has there."""
    return jax.tree.map(lambda x: x + 1, rows(start, stop))


def replay_and_vault(path):
    """A replay of ten rows, each of two environments, and a vault for what it holds."""
    return buffers.uniform_replay(20, num_envs=2), Vault(path, ITEM, num_envs=2)


def copied(state):
    """A state to add to where the original is needed later: `add` and `add_batch` donate theirs."""
    return jax.tree.map(jnp.copy, state)


def assert_holds(vault, start, stop, envs=2):
    got = vault.read(start, stop)
    for name, x in rows(start, stop, envs).items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x)


@pytest.mark.parametrize("factory", [buffers.uniform_replay, buffers.prioritised_replay])
def test_row_r_of_the_run_is_row_r_of_the_vault(tmp_path, factory):
    replay = factory(20, num_envs=2)
    vault = Vault(tmp_path, ITEM, num_envs=2)
    state = replay.init(ITEM)
    total = 0
    for count in (3, 7, 10, 0, 1, 9, 5, 10):  # over the end of the ring, and all of it at once
        state = replay.add_batch(state, rows(total, total + count))
        assert vault.write(state) == count
        assert vault.write(state) == 0
        total += count
        assert len(vault) == total
        assert_holds(vault, 0, total)

    assert_holds(Vault(tmp_path, ITEM, num_envs=2), 17, 31)
    with pytest.raises(IndexError, match="rows 3 to 46, of a vault that has 45"):
        vault.read(3, 46)


def test_a_queue_is_written_with_what_was_popped_since(tmp_path):
    queue = buffers.circular_buffer(8)
    vault = Vault(tmp_path, ITEM)
    items = jax.tree.map(lambda x: x[:, 0], rows(0, 12, 1))
    first_six = jax.tree.map(lambda x: x[:6], items)
    last_six = jax.tree.map(lambda x: x[6:], items)

    state = queue.add_batch(queue.init(ITEM), first_six)
    assert vault.write(state) == 6
    state, _ = queue.pop(state, 4)
    state = queue.add_batch(state, last_six)
    assert vault.write(state) == 6
    np.testing.assert_array_equal(vault.read(0, 12)["frame"], items["frame"])


def test_an_item_that_was_added_and_popped_between_two_writes_is_gone(tmp_path):
    queue = buffers.circular_buffer(8)
    vault = Vault(tmp_path, ITEM)
    state = queue.init(ITEM)
    for _ in range(8):
        state = queue.add(state, ITEM)
    vault.write(state)
    state = queue.add(state, ITEM)
    state, _ = queue.pop(state, 8)
    message = "1 rows were overwritten or popped unwritten: write before a pop"
    with pytest.raises(ValueError, match=message):
        vault.write(state)


def test_rows_that_were_overwritten_are_an_error_that_counts_them(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    state = replay.add_batch(replay.init(ITEM), rows(0, 4))
    vault.write(state)
    for i in range(4, 17):
        state = replay.add(state, row(i))
    message = "3 rows were .* unwritten: .* before more than 10 are added"
    with pytest.raises(ValueError, match=message):
        vault.write(state)
    assert_holds(vault, 0, 4)
    assert len(vault) == 4


def test_a_resumed_run_writes_over_what_came_after_its_checkpoint(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    checkpoint = replay.add_batch(replay.init(ITEM), rows(0, 8))
    vault.write(checkpoint)
    state = replay.add_batch(copied(checkpoint), rows_of_another_run(8, 15))
    assert vault.write(state) == 7
    del vault

    again = Vault(tmp_path, ITEM, num_envs=2)
    assert again.write(checkpoint) == 0
    assert len(again) == 8
    state = replay.add_batch(checkpoint, rows(8, 13))
    assert again.write(state) == 5
    assert_holds(again, 0, 13)


def test_another_run_is_an_error(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    vault.write(replay.add_batch(replay.init(ITEM), rows(0, 8)))
    del vault

    new = Vault(tmp_path, ITEM, num_envs=2)
    for count in (0, 3, 8, 9):
        other = replay.add_batch(replay.init(ITEM), rows_of_another_run(0, count))
        message = r"has 8 rows, but others.*: take a new path, or write\(state, new_run=True\)"
        with pytest.raises(ValueError, match=message):
            new.write(other)
    other = replay.add_batch(replay.init(ITEM), rows_of_another_run(0, 8))
    longer = replay.add_batch(other, rows(8, 10))
    with pytest.raises(ValueError, match="A resumed run: write the restored state first"):
        new.write(longer)
    assert_holds(new, 0, 8)


def test_another_run_is_appended_if_that_is_said(tmp_path):
    """It goes on, and is resumed, behind the rows of the first one, with a ring of another size."""
    replay, vault = replay_and_vault(tmp_path)
    vault.write(replay.add_batch(replay.init(ITEM), rows(0, 8)))
    del vault

    larger = buffers.uniform_replay(28, num_envs=2)
    again = Vault(tmp_path, ITEM, num_envs=2)
    checkpoint = larger.add_batch(larger.init(ITEM), rows(8, 11))
    assert again.write(checkpoint, new_run=True) == 3
    state = larger.add_batch(copied(checkpoint), rows_of_another_run(11, 20))
    assert again.write(state) == 9
    assert len(again) == 20
    assert again.write(checkpoint) == 0  # a resume from it
    assert again.write(larger.add_batch(checkpoint, rows(11, 24))) == 13
    assert_holds(again, 0, 24)
    first = replay.add_batch(replay.init(ITEM), rows(0, 8))
    with pytest.raises(ValueError, match="has 24 rows, but others than this state"):
        again.write(first)


def test_rows_that_were_updated_after_they_were_written_are_an_error(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    state = replay.add_batch(replay.init(ITEM), rows(0, 8))
    vault.write(state)
    state = replay.update(state, lambda item: item | {"count": item["count"] + 1})
    with pytest.raises(ValueError, match=r"After `update`: .* write a buffer before you update it"):
        vault.write(state)
    assert_holds(vault, 0, 8)


def test_a_vault_may_be_compressed_more(tmp_path):
    """By the level that it was made with, however it is opened later."""
    replay = buffers.uniform_replay(40_000)
    item = {"x": np.float32(0)}
    noise = np.random.default_rng(0).normal(size=40_000).round(1).astype(np.float32)
    state = replay.add_batch(replay.init(item), {"x": noise})
    sizes = []
    for level in (1, 19):
        path = tmp_path / str(level)
        Vault(path, item, compression=level)
        vault = Vault(path)
        vault.write(state)
        np.testing.assert_array_equal(vault.read(0, 40_000)["x"], noise)
        sizes.append(sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))
    assert sizes[1] < 0.9 * sizes[0]


def reward_and_flag(reward):
    """Steps with these rewards [rows, environments], all of whose flags are set."""
    return {"reward": reward, "is_step": np.ones(reward.shape, bool)}


@fast_at_ends("count", [1, 2, 3])
def test_a_resume_changes_flags_of_the_last_rows_and_it_is_the_same_run(tmp_path, count):
    item = {"reward": 0.0, "is_step": True}
    replay = buffers.uniform_replay(20, num_envs=2)
    vault = Vault(tmp_path, item, num_envs=2)
    reward = np.arange(10, dtype=np.float32).reshape(5, 2)
    state = replay.add_batch(replay.init(item), reward_and_flag(reward[:count]))
    vault.write(state)

    # With other rewards it is another run.
    other = replay.add_batch(replay.init(item), reward_and_flag(reward[:count] + 1))
    with pytest.raises(ValueError, match=f"has {count} rows, but others"):
        vault.write(other)
    assert vault.write(state) == 0

    # With other flags in the last two rows, or in the only one, it is not.
    first_changed = count - min(count, 2)
    is_step = state.storage["is_step"].at[first_changed:count].set(False)
    state = state._replace(storage=state.storage | {"is_step": is_step})
    state = replay.add_batch(state, reward_and_flag(reward))
    assert vault.write(state) == 5
    got = vault.read(0, count + 5)
    np.testing.assert_array_equal(got["reward"], np.concatenate([reward[:count], reward]))
    expected = np.ones(count + 5, bool)
    expected[first_changed:count] = False
    np.testing.assert_array_equal(got["is_step"][:, 0], expected)


def test_rows_of_flags_alone_are_compared(tmp_path):
    replay = buffers.uniform_replay(20)
    vault = Vault(tmp_path, True)
    vault.write(replay.add_batch(replay.init(True), np.ones(3, bool)))
    other = replay.add_batch(replay.init(True), np.zeros(3, bool))
    with pytest.raises(ValueError, match="has 3 rows, but others"):
        vault.write(other)


def test_the_count_of_rows_is_followed_past_its_modulus(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    # A run of many rows, of which the vault and the replay have the last 10.
    begin = 2**30 // 20 * 10 - 7
    for name, x in rows(0, 10).items():
        vault.arrays[name][begin - 10 : begin].write(x).result()
    vault._save(vault._load() | {"rows": begin})
    state = replay.init(ITEM)
    state = state._replace(cursor=state.cursor + begin - 10)
    state = replay.add_batch(state, rows(0, 10))
    assert vault.write(state) == 0
    assert len(vault) == begin

    total = 10
    for count in (5, 6, 3, 10, 2):
        older = copied(state)
        state = replay.add_batch(state, rows(total, total + count))
        assert vault.write(state) == count
        if count < 10:  # of the last 10 rows both must have some
            assert vault.write(older) == 0
            assert len(vault) == begin - 10 + total
            assert vault.write(state) == count
        total += count
    assert state.cursor < 100  # it began anew at 0
    got = vault.read(begin - 10, begin - 10 + total)
    for name, x in rows(0, total).items():
        np.testing.assert_array_equal(got[name], x)


@fast_at_ends(
    "dtype", ["bool", "uint8", "int8", "int32", "uint32", "float16", "bfloat16", "float32"]
)
def test_dtypes_come_back_as_they_are(tmp_path, dtype):
    values = (jnp.arange(30).reshape(10, 3) % 7 - 3).astype(dtype)
    replay = buffers.uniform_replay(10)
    vault = Vault(tmp_path, values[0])
    vault.write(replay.add_batch(replay.init(values[0]), values))
    got = vault.read(0, 10)
    assert got.dtype == values.dtype
    assert got.tobytes() == np.asarray(values).tobytes()


def test_python_scalars_and_empty_leaves_come_back(tmp_path):
    item = (1.5, [True, 3], np.zeros((0, 2), np.float32))
    replay = buffers.uniform_replay(4)
    vault = Vault(tmp_path, item)
    vault.write(replay.add(replay.init(item), item))
    number, (flag, count), empty = vault.read(0, 1)
    assert number.tolist() == [1.5]
    assert flag.tolist() == [True]
    assert count.tolist() == [3]
    assert empty.shape == (1, 0, 2)


def test_typed_keys_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"store what jax.random.key_data gives"):
        Vault(tmp_path, {"key": jax.random.key(0)})


def test_other_items_and_other_buffers_are_errors(tmp_path):
    Vault(tmp_path, ITEM, num_envs=2)
    for item, envs in ((ITEM, 3), (ITEM, None), (ITEM | {"more": 1}, 2), (np.int32(0), 2)):
        with pytest.raises(ValueError, match=r"holds {'count': 'int32\[2\]', 'frame'.*, not {"):
            Vault(tmp_path, item, num_envs=envs)
    replay = buffers.uniform_replay(30, num_envs=3)
    with pytest.raises(ValueError, match=r"the state holds {'count': 'int32\[3\]'"):
        Vault(tmp_path, ITEM, num_envs=2).write(replay.init(ITEM))


def test_a_state_may_have_an_axis_of_one_in_front(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    state = replay.add_batch(replay.init(ITEM), rows(0, 6))
    assert vault.write(jax.tree.map(lambda x: x[None], state)) == 6
    assert_holds(vault, 0, 6)


@pytest.mark.parametrize("there", [False, True])
def test_a_vault_that_is_not_there_is_not_created_for_reading(tmp_path, there):
    path = tmp_path / "experience"
    if there:
        path.mkdir()
        (path / "notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileNotFoundError, match=f"^{path} holds no vault$"):
        Vault(path, ITEM, num_envs=2, create=False)
    assert sorted(tmp_path.rglob("*")) == before


class Body(NamedTuple):
    velocity: Any
    angle: Any


NESTED = {
    "b/c.d %": Body(velocity=np.zeros(2, np.float32), angle=(np.int32(0), np.uint8(0))),
    "a": [np.False_],
}


@fast_at_ends("num_envs", [None, 1, 3])
def test_a_vault_opened_without_an_item_reads_a_dict_of_arrays(tmp_path, num_envs):
    replay = buffers.uniform_replay(30, num_envs=num_envs)
    vault = Vault(tmp_path, NESTED, num_envs)
    envs = () if num_envs is None else (num_envs,)
    random = np.random.default_rng(0)
    steps = jax.tree.map(
        lambda x: random.integers(2, size=(10, *envs, *x.shape)).astype(x.dtype), NESTED
    )
    vault.write(replay.add_batch(replay.init(NESTED), steps))

    again = Vault(tmp_path)
    assert again.num_envs == num_envs
    got = again.read(2, 9)
    expected = {
        "a.0": steps["a"][0],
        "b/c.d %.velocity": steps["b/c.d %"].velocity,
        "b/c.d %.angle.0": steps["b/c.d %"].angle[0],
        "b/c.d %.angle.1": steps["b/c.d %"].angle[1],
    }
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert got[name].dtype == x.dtype
        np.testing.assert_array_equal(got[name], x[2:9])


def test_a_vault_opened_without_an_item_reads_bare_items(tmp_path):
    item = jnp.bfloat16(0)
    replay = buffers.uniform_replay(4)
    vault = Vault(tmp_path, item)
    vault.write(replay.add_batch(replay.init(item), jnp.arange(3, dtype=jnp.bfloat16)))
    got = Vault(tmp_path).read(0, 3)
    assert got.keys() == {"item"}
    assert got["item"].dtype == jnp.bfloat16
    assert got["item"].tolist() == [0, 1, 2]


def test_a_vault_opened_without_an_item_is_written_by_name(tmp_path):
    """The leaves of a NamedTuple are in another order than those of a dict."""
    item = Body(velocity=np.int32(0), angle=np.int32(0))
    replay = buffers.uniform_replay(4)
    state = replay.add(replay.init(item), Body(velocity=1, angle=2))
    Vault(tmp_path, item).write(state)
    vault = Vault(tmp_path)
    state = replay.add(state, Body(velocity=3, angle=4))
    assert vault.write(state) == 1
    got = vault.read(0, 2)
    assert got["velocity"].tolist() == [1, 3]
    assert got["angle"].tolist() == [2, 4]


@pytest.mark.parametrize("there", [False, True])
def test_without_an_item_there_must_be_a_vault(tmp_path, there):
    path = tmp_path / "experience"
    if there:
        path.mkdir()
    with pytest.raises(FileNotFoundError, match=f"^{path} holds no vault$"):
        Vault(path)
    assert path.exists() == there


def test_what_it_is_about_is_kept(tmp_path):
    about = {"env_id": "Probe-v0", "env_kwargs": {"sizes": (1, 2)}, "seed": 3}
    as_read = {"env_id": "Probe-v0", "env_kwargs": {"sizes": [1, 2]}, "seed": 3}
    assert Vault(tmp_path, ITEM, num_envs=2, about=about).about == as_read
    filled(tmp_path)
    assert Vault(tmp_path).about == as_read
    other = Vault(tmp_path, ITEM, num_envs=2, about={"env_id": "Other-v0"})
    assert other.about == as_read


def test_what_it_is_about_must_be_json(tmp_path):
    with pytest.raises(TypeError, match="ndarray is not JSON serializable"):
        Vault(tmp_path / "new", ITEM, num_envs=2, about={"mean": np.zeros(2)})
    assert not (tmp_path / "new").exists()


def test_a_ring_that_has_gone_round_is_written_only_if_that_is_said(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    state = replay.add_batch(replay.init(ITEM), rows(0, 9))
    state = replay.add_batch(state, rows(9, 17))
    with pytest.raises(ValueError, match=r"7 rows were .*; begin_late=True begins with the"):
        vault.write(state)
    assert len(vault) == 0
    assert vault.write(state, begin_late=True) == 10
    held = vault.read(0, 10)
    np.testing.assert_array_equal(held["count"], rows(7, 17)["count"])


def test_one_that_began_late_goes_on_as_any_other(tmp_path):
    """Row r of it is row r + 7 of the run."""
    replay, vault = replay_and_vault(tmp_path)
    state = replay.add_batch(replay.init(ITEM), rows(0, 17))
    vault.write(state, begin_late=True)
    checkpoint = replay.add_batch(state, rows(17, 20))
    assert vault.write(copied(checkpoint), begin_late=True) == 3
    state = replay.add_batch(copied(checkpoint), rows_of_another_run(20, 26))
    assert vault.write(state) == 6
    del vault

    again = Vault(tmp_path, ITEM, num_envs=2)
    assert again.write(checkpoint) == 0  # a resume drops what came after it
    assert len(again) == 13
    state = replay.add_batch(checkpoint, rows(20, 30))
    assert again.write(state) == 10
    np.testing.assert_array_equal(again.read(0, 23)["count"], rows(7, 30)["count"])

    state = replay.add_batch(state, rows(30, 42))
    with pytest.raises(ValueError, match=r"2 rows were .* before more than 10 are added$"):
        again.write(state, begin_late=True)


def test_reading_rows_from_before_a_vault_began_is_an_error(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    before = replay.add_batch(replay.init(ITEM), rows(0, 5))
    state = replay.add_batch(copied(before), rows(5, 17))
    vault.write(state, begin_late=True)
    with pytest.raises(ValueError, match="begins with later rows than these: take a new path"):
        vault.write(before)
    assert len(vault) == 10


def test_a_clustered_state_is_refused(tmp_path):
    inner = buffers.uniform_replay(20, num_envs=2)
    replay = buffers.clustered_replay(3, inner, lambda step: step["count"][0] % 3)
    with pytest.raises(TypeError, match="the order of its items: add the same items to a circular"):
        Vault(tmp_path, ITEM, num_envs=2).write(replay.init(ITEM))


def test_stacked_states_are_written_one_by_one(tmp_path):
    replay, vault = replay_and_vault(tmp_path)
    first = replay.add_batch(replay.init(ITEM), rows(0, 6))
    second = replay.add_batch(replay.init(ITEM), rows(6, 12))
    states = jax.tree.map(lambda *x: jnp.stack(x), first, second)
    hint = r"2 states, stacked: .* such as jax.tree.map\(lambda x: x\[0\], state\)"
    with pytest.raises(ValueError, match=hint):
        vault.write(states)
    assert vault.write(jax.tree.map(lambda x: x[0], states)) == 6
    assert_holds(vault, 0, 6)


def test_one_that_is_opened_for_reading_is_as_any_other(tmp_path):
    replay, state, vault = filled(tmp_path)
    del vault
    again = Vault(tmp_path, ITEM, num_envs=2, create=False)
    assert_holds(again, 0, 40)
    assert again.write(replay.add(state, row(40))) == 1
    assert_holds(again, 0, 41)


@contextlib.contextmanager
def as_another_user():
    """What is done inside, the root does as nobody; anyone else as himself."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("create", [False, True])
def test_one_that_may_only_be_read_is_read(create):
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is in one that no other user enters
        path = Path(folder) / "experience"
        replay, state, vault = filled(path)
        state = replay.add(state, row(40))
        del vault
        before = sorted(path.rglob("*"))
        for x in [*before, path]:
            x.chmod(0o555 if x.is_dir() else 0o444)
        Path(folder).chmod(0o755)
        with as_another_user():
            vault = Vault(path, ITEM, num_envs=2, create=create)
            assert len(vault) == 40
            assert_holds(vault, 0, 40)
            with pytest.raises(PermissionError):
                vault.write(state)
        for x in [path, *before]:
            x.chmod(0o755)
        assert sorted(path.rglob("*")) == before


def filled(path, count=40):
    """A vault of the first rows of a run, after the replay and the state that it has them from."""
    replay = buffers.uniform_replay(2 * count, num_envs=2)
    vault = Vault(path, ITEM, num_envs=2)
    state = replay.add_batch(replay.init(ITEM), rows(0, count))
    vault.write(state)
    return replay, state, vault


def chunks_in(folder):
    """The files with the rows: one for each of the two arrays, as a chunk has room for all."""
    chunks = [path for path in folder.rglob("*") if path.is_file() and path.name == "0"]
    assert len(chunks) == 2
    return chunks


def with_flipped_bits(path, every):
    """Writes a file with one bit flipped, for each so many-th of its bits; then as it was."""
    whole = path.read_bytes()
    for bit in range(0, 8 * len(whole), every):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        yield
    path.write_bytes(whole)


def test_every_flipped_bit_is_an_error_that_names_the_file(tmp_path):
    _, _, vault = filled(tmp_path)
    for path in [*chunks_in(tmp_path), tmp_path / "vault.json"]:
        for _ in with_flipped_bits(path, every=7):
            with pytest.raises(ValueError, match=str(path)):
                vault.read(0, 40)
    assert_holds(vault, 0, 40)


def test_flipped_bits_of_what_describes_the_arrays_do_no_silent_harm(tmp_path):
    """Few of them mean anything: each is an error that names the file or changes nothing."""
    _, _, vault = filled(tmp_path)
    errors = 0
    for path in tmp_path.rglob("zarr.json"):
        for _ in with_flipped_bits(path, every=5):
            try:
                again = Vault(tmp_path, ITEM, num_envs=2)
            except ValueError as error:
                errors += str(path.parent) in str(error)
            else:
                assert_holds(again, 0, 40)
    assert errors > 400
    assert_holds(vault, 0, 40)


def test_a_vault_recovers_from_a_kill_while_it_is_made(tmp_path):
    (tmp_path / "vault.json.__lock").touch()
    assert len(Vault(tmp_path, ITEM, num_envs=2)) == 0
    (tmp_path / "vault.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"vault\.json"):
        Vault(tmp_path, ITEM, num_envs=2)  # there are arrays: nothing is counted anew


def test_what_killed_writers_left_does_no_harm_and_is_removed(tmp_path):
    """Such a file was written into by the next write of its chunk, and was longer than that."""
    replay, state, writer = filled(tmp_path)
    del writer  # and its lock
    left_over = []
    for path in [tmp_path / "vault.json", *chunks_in(tmp_path)]:
        left_over.append(path.with_name(f"{path.name}.__lock"))
        left_over.append(path.with_name(f"{path.name}_0123456789abcdef.__lock"))
    for path in left_over:
        path.write_bytes(np.random.default_rng(0).bytes(5_000))

    again = Vault(tmp_path, ITEM, num_envs=2)
    assert again.write(replay.add_batch(state, rows(40, 50))) == 10
    assert_holds(Vault(tmp_path, ITEM, num_envs=2), 0, 50)
    assert not any(path.exists() for path in left_over)


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    _, _, vault = filled(tmp_path)
    for path in [p for p in tmp_path.rglob("*") if p.name == "0"]:  # chunks, and folders of them
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(ValueError, match=str(path)):
            vault.read(0, 40)
        (tmp_path / "elsewhere").rename(path)
    assert_holds(vault, 0, 40)


def test_a_disk_that_is_full_leaves_what_was_there(tmp_path):
    replay, state, vault = filled(tmp_path)
    noise = np.random.default_rng(0).integers(256, size=(40, 2, 3, 2), dtype=np.uint8)
    state = replay.add_batch(state, rows(40, 80) | {"frame": noise})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))  # bytes of a file
    try:
        with pytest.raises((ValueError, OSError), match="File too large"):
            vault.write(state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert_holds(Vault(tmp_path, ITEM, num_envs=2), 0, 40)
    assert vault.write(state) == 40
    np.testing.assert_array_equal(vault.read(40, 80)["frame"], noise)


def test_a_leaf_may_be_named_like_the_lock(tmp_path):
    replay = buffers.uniform_replay(4)
    item = {"lock": np.float32(0), "+lock": np.float32(0)}
    state = replay.add(replay.init(item), {"lock": np.float32(1), "+lock": np.float32(2)})
    vault = Vault(tmp_path, item)
    vault.write(state)
    rows = vault.read(0, 1)
    assert (rows["lock"].item(), rows["+lock"].item()) == (1, 2)


def test_the_second_writer_is_told(tmp_path):
    replay, state, _vault = filled(tmp_path)
    second = Vault(tmp_path, ITEM, num_envs=2)
    assert_holds(second, 0, 40)
    with pytest.raises(BlockingIOError, match="is written by another process"):
        second.write(replay.add(state, row(40)))


WRITER = """
    import sys
    import jax
    from buffers import uniform_replay
    from cleanreplay.vault import Vault
    from test_vault import ITEM, rows

    replay, vault = uniform_replay(60, num_envs=2), Vault(sys.argv[1], ITEM, num_envs=2)
    start = max(len(vault) - 20, 0)  # where a checkpoint may stand
    state = replay.init(ITEM)
    state = state._replace(cursor=state.cursor + start)
    state = replay.add_batch(state, rows(max(start - 30, 0), start)) if start else state
    state = state._replace(cursor=state.cursor * 0 + start)
    print("opened", vault.write(state), flush=True)
    while True:
        count = 1 + start % 7
        state = replay.add_batch(state, rows(start, start + count))
        start += count
        vault.write(state)
        print(start, flush=True)
"""


def write_until_killed(path, random):
    """A process writes to the vault and is killed at some moment: the rows that it said it has."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "opened 0\n"
        for _ in range(random.integers(1, 60)):
            known = int(run.stdout.readline())
        time.sleep(random.uniform(0, 0.03))  # or it would always be between two writes
        run.send_signal(signal.SIGKILL)
        return max([known, *map(int, run.stdout.read().split())])


@pytest.mark.slow
def test_a_vault_killed_at_any_moment_has_every_row_written(tmp_path):
    random = np.random.default_rng(25)
    path = tmp_path / "vault"
    for _ in range(10):
        known = write_until_killed(path, random)
        vault = Vault(path, ITEM, num_envs=2)
        assert known <= len(vault) <= known + 7
        assert_holds(vault, 0, len(vault))
