"""cleanreplay/disk.py: arrays and files that are written as a whole, and locks."""

import errno
import fcntl
import sys

import pytest

from cleanreplay import disk


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_used(number, tmp_path, monkeypatch, capsys):
    """As Lustre, and some of FUSE and NFS."""

    def flock(file, operation):
        raise OSError(number, "not here")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("w") as file:
        assert disk.lock(file, tmp_path)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}: its file system has no locks (not here)")


def test_without_the_module_for_locks_nothing_is_locked(tmp_path, monkeypatch, capsys):
    """As on Windows."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with (tmp_path / "lock").open("w") as file, (tmp_path / "lock").open("w") as other:
        assert disk.lock(file, tmp_path)
        assert disk.lock(other, tmp_path)
    assert capsys.readouterr().out.count("no locks on Windows") == 2


def test_another_error_of_a_lock_is_raised(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("w") as file, pytest.raises(OSError, match="Input/output"):
        disk.lock(file, tmp_path)


def test_a_file_is_replaced_or_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "args.json"
    disk.write_whole(file, b"one")
    disk.write_whole(file, b"two")
    assert file.read_text() == "two"

    def fail(self, target):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(type(file), "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        disk.write_whole(file, b"three")
    assert file.read_text() == "two"


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
