"""Open descriptors of this process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter
from collections.abc import Iterator


def open_files() -> Counter[str]:
    """Return what the open descriptors refer to: sockets and pipes by their inode, files by their path."""
    files: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            files[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return files


@contextlib.contextmanager
def no_file_stays_open() -> Iterator[None]:
    """Check that a block leaves no descriptor open. Threads of earlier tests may close theirs meanwhile."""
    before = open_files()
    yield
    gc.collect()
    opened = open_files() - before
    assert not opened, opened
