"""The private folder that all processes of an engine on this host share."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_DIRECTORY = "LOGITSHIP_SHARED_DIRECTORY"
"""Variable that an engine's processes inherit from the first one."""
_PREFIX = "logitship-engine-"
_OWNER = "owner"
"""A file in the folder that the first process has locked while it is alive."""


def make_shared_directory() -> None:
    """Make the folder, before the first process starts others. It is removed when that process ends.

    If that was killed, the next engine that starts removes its folder.

    Raises:
        OSError: it cannot be made.
    """
    if SHARED_DIRECTORY in os.environ:
        return
    for left_behind in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_left_behind(left_behind)
    new = Path(tempfile.mkdtemp(prefix="logitship-new-"))
    owner = os.open(new / _OWNER, os.O_CREAT | os.O_WRONLY)  # stays open
    fcntl.flock(owner, fcntl.LOCK_EX)
    path = new.with_name(new.name.replace("logitship-new-", _PREFIX))
    new.rename(path)  # with the lock: others remove folders without one
    os.environ[SHARED_DIRECTORY] = str(path)
    atexit.register(shutil.rmtree, path, ignore_errors=True)


def _remove_if_left_behind(path: Path) -> None:
    with contextlib.suppress(OSError), (path / _OWNER).open("rb") as owner:  # another user's, or in use
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
