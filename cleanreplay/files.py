"""Files that others may read or write at the same time."""

import errno
import os
from pathlib import Path
from typing import Any

from tqdm import tqdm

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


def is_full(error: BaseException) -> bool:
    """Whether an error says that the disk is full, or the quota of the user."""
    text = str(error).lower()  # of Orbax and tensorstore, which have errors of their own
    has_number = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return has_number or "no space left" in text or "quota exceeded" in text


def write_whole(file: Path, data: bytes) -> None:
    """Replaces a file. A process that is killed leaves the old one or the new one."""
    new = file.with_name(f".{file.name}.new")
    try:
        with new.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())  # or a power failure could leave an empty one
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)  # there is one if the disk is full


def lock(file: Any, where: Path) -> bool:
    """Locks an open file until it is closed. Returns False if another process has locked it.

    Where there are no locks it says so, and returns True. `where` is named in the message.
    """
    try:
        import fcntl
    except ModuleNotFoundError:
        tqdm.write(f"{where}: no locks on Windows, so nothing keeps a second process out")
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        what = f"its file system has no locks ({error.strerror})"
        tqdm.write(f"{where}: {what}, so nothing keeps a second process out")
    return True
