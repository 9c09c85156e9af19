"""The files of a vault: damage, kills, full disks, and who may write."""

import contextlib
import os
import resource
import signal
import tempfile
import textwrap
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers import start_python
from test_vault import ITEM, assert_holds, copy_of_written, rows, state_after

import buffers
from cleanreplay.vault import Vault


def open_vault(folder, **options):
    return Vault(folder, ITEM, num_envs=2, **options)


@pytest.fixture
def folder(tmp_path):
    return copy_of_written(tmp_path)


def flipped(path, every):
    """Writes a file with one bit flipped, for every `every`-th bit; then as it was."""
    whole = path.read_bytes() if path.is_file() else b""  # a folder has no bits
    for bit in range(0, 8 * len(whole), every):
        broken = bytearray(whole)
        broken[bit // 8] ^= 1 << bit % 8
        path.write_bytes(broken)
        yield
    if whole:
        path.write_bytes(whole)


def missing(path):
    path.rename(path.with_name("elsewhere"))
    yield
    path.with_name("elsewhere").rename(path)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("0", partial(flipped, every=7)),  # a chunk of each array
        ("vault.json", partial(flipped, every=7)),
        ("0", missing),
    ],
)
def test_damage_is_an_error_that_names_the_file(folder, name, damage):
    vault = open_vault(folder)
    paths = [path for path in folder.rglob("*") if path.name == name]
    for path in paths:
        for _ in damage(path):
            with pytest.raises(ValueError, match=str(path)):
                vault.read(0, 40)

    assert paths
    assert_holds(vault, 0, 40)


def test_damage_of_what_describes_an_array_is_an_error(folder):
    for path in folder.rglob("zarr.json"):
        path.write_bytes(b"{")

    with pytest.raises(ValueError, match=str(folder)):
        open_vault(folder).read(0, 40)


def test_a_vault_recovers_from_a_kill_while_it_is_made(tmp_path):
    (tmp_path / "vault.json.__lock").touch()
    assert len(open_vault(tmp_path)) == 0
    (tmp_path / "vault.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"vault\.json"):
        open_vault(tmp_path)  # the arrays exist: nothing is counted anew


def test_files_that_killed_writers_left_are_removed(folder):
    """Otherwise the next write of its chunk would write into such a file, which may be longer."""
    left_over = []
    for path in [path for path in folder.rglob("*") if path.name in ("0", "vault.json")]:
        left_over.append(path.with_name(f"{path.name}.__lock"))
        left_over.append(path.with_name(f"{path.name}_0123456789abcdef.__lock"))
    for path in left_over:
        path.write_bytes(np.random.default_rng(0).bytes(5_000))

    assert open_vault(folder).write(state_after(50)) == 10
    assert_holds(open_vault(folder), 0, 50)
    assert not any(path.exists() for path in left_over)


def test_a_full_disk_leaves_the_earlier_rows(folder):
    vault = open_vault(folder)
    replay = buffers.uniform_replay(160, num_envs=2)
    noise = np.random.default_rng(0).integers(256, size=(40, 2, 3, 2), dtype=np.uint8)
    state = replay.add_batch(replay.init(ITEM), rows(0, 40))
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

    assert_holds(open_vault(folder), 0, 40)
    assert vault.write(state) == 40
    np.testing.assert_array_equal(vault.read(40, 80)["frame"], noise)


@pytest.mark.parametrize(("text", "error"), [("No space left", OSError), ("other", ValueError)])
def test_an_error_of_zarr_says_that_the_disk_is_full(folder, monkeypatch, text, error):
    def fail(self, stored):
        raise ValueError(text)

    monkeypatch.setattr(Vault, "_save", fail)
    with pytest.raises(error, match=text.lower()):
        open_vault(folder).write(state_after(43))
    assert len(open_vault(folder)) == 40


def test_a_second_writer_is_an_error(folder):
    first, second = open_vault(folder), open_vault(folder, create=False)
    first.write(state_after(40))
    with pytest.raises(BlockingIOError, match="is written by another process"):
        second.write(state_after(41))
    assert_holds(second, 0, 40)

    del first
    assert second.write(state_after(41)) == 1


@contextlib.contextmanager
def as_another_user():
    """Returns a context in which root acts as the user nobody; other users stay themselves."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@pytest.mark.parametrize("create", [False, True])
def test_a_vault_that_may_only_be_read_is_read(create):
    with tempfile.TemporaryDirectory() as folder:  # no other user can enter the parent of tmp_path
        path = copy_of_written(Path(folder))
        (path / "+lock").unlink()
        before = sorted(path.rglob("*"))
        for x in [*before, path]:
            x.chmod(0o555 if x.is_dir() else 0o444)
        Path(folder).chmod(0o755)
        with as_another_user():
            vault = open_vault(path, create=create)
            assert_holds(vault, 0, 40)
            with pytest.raises(PermissionError):
                vault.write(state_after(41))
        for x in [path, *before]:
            x.chmod(0o755)
        assert sorted(path.rglob("*")) == before


WRITER = """
    import sys
    from cleanreplay.vault import Vault
    from test_vault import ITEM, REPLAY, rows

    vault = Vault(sys.argv[1], ITEM, num_envs=2)
    state = REPLAY.init(ITEM)
    for start in range(0, 30_000, 3):
        state = REPLAY.add_batch(state, rows(start, start + 3))
        vault.write(state)
        print(start + 3, flush=True)
"""


@pytest.mark.slow
def test_a_vault_killed_at_any_moment_has_every_row(tmp_path):
    with start_python(tmp_path, "-c", textwrap.dedent(WRITER), f"{tmp_path}/vault") as run:
        for _ in range(30):
            run.stdout.readline()
        time.sleep(0.01)  # otherwise the kill would always be between two writes
        run.kill()
        known = max(map(int, run.stdout.read().split()), default=90)
    vault = open_vault(tmp_path / "vault")

    assert known <= len(vault) <= known + 3
    assert_holds(vault, 0, len(vault))
