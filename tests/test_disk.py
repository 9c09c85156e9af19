"""cleanreplay/disk.py: arrays, atomic writes of files, and locks."""

import errno
import fcntl
import json
import math
import sys
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from cleanreplay import disk


def raising(number):
    def fail(*_):
        raise OSError(number, "not here")

    return fail


def test_a_file_is_locked_until_it_is_closed(tmp_path):
    file = tmp_path / "lock"
    with file.open("w") as first, file.open("w") as second:
        assert disk.lock(first, tmp_path)
        assert not disk.lock(second, tmp_path)
    with file.open("w") as third:
        assert disk.lock(third, tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_used(number, tmp_path, monkeypatch, capsys):
    """Such as Lustre, and some of FUSE and NFS."""
    monkeypatch.setattr(fcntl, "flock", raising(number))
    with (tmp_path / "lock").open("w") as file:
        assert disk.lock(file, tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert str(tmp_path) in line


def test_without_the_module_for_locks_nothing_is_locked(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "lock").open("w") as file:
        assert disk.lock(file, tmp_path)
    assert "Windows" in capsys.readouterr().out


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", raising(errno.EIO))
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="not here"):
        disk.lock(file, tmp_path)


def test_a_file_is_replaced_or_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "args.json"
    disk.write_whole(file, b"one")
    disk.write_whole(file, b"two")
    assert file.read_text() == "two"

    monkeypatch.setattr(type(file), "replace", raising(errno.EIO))
    with pytest.raises(OSError, match="not here"):
        disk.write_whole(file, b"three")
    assert file.read_text() == "two"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "x"), True),
        (OSError(errno.EDQUOT, "x"), True),
        (ValueError("[OS error 28: ENOSPC No space left on device]"), True),
        (ValueError("[OS error 122: EDQUOT Disk quota exceeded]"), True),
        (OSError(errno.EIO, "x"), False),
    ],
)
def test_a_full_disk_and_a_full_quota_are_known(error, expected):
    assert disk.is_full(error) is expected


def test_numbers_and_objects_that_json_lacks_are_texts():
    kind = Enum("Kind", {"A": "a"})
    value = {"x": [math.nan, math.inf, (-math.inf, 0.5)], "file": Path("a/b"), "kind": kind.A}

    read = json.loads(disk.to_json(value))
    assert read == {"x": ["nan", "inf", ["-inf", 0.5]], "file": "a/b", "kind": "a"}


@pytest.mark.parametrize(
    ("shape", "chunk", "lengths"),
    [
        ((3,), (3,), [3]),
        ((20,), (4,), [8, 8, 4]),
        ((5, 2), (2, 2), [8, 2]),
        ((2, 9), (1, 4), [8, 1, 8, 1]),
        ((3, 2, 2), (1, 2, 2), [8, 4]),
    ],
)
def test_blocks_are_whole_chunks_that_cover_an_array(shape, chunk, lengths, monkeypatch):
    monkeypatch.setattr(disk, "CHUNK_BYTES", 16)
    monkeypatch.setattr(disk, "CHUNKS_AT_ONCE", 2)
    array = np.arange(math.prod(shape)).reshape(shape)
    found = [array[index].ravel() for index in disk.blocks(shape, itemsize=4)]

    assert disk.chunk_shape(shape, itemsize=4) == chunk
    assert [len(block) for block in found] == lengths
    np.testing.assert_array_equal(np.concatenate(found), array.ravel())
