"""The private folder that all processes of an engine on this host share."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

SHARED_DIRECTORY = "LOGITSHIP_SHARED_DIRECTORY"
"""Variable that an engine's processes inherit from the first one."""


def make_shared_directory() -> None:
    """Make the folder, before the first process starts others. It is removed when that process ends.

    Raises:
        OSError: it cannot be made.
    """
    if SHARED_DIRECTORY not in os.environ:
        os.environ[SHARED_DIRECTORY] = path = tempfile.mkdtemp(prefix="logitship-")
        atexit.register(shutil.rmtree, path, ignore_errors=True)
