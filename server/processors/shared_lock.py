"""A lock that several processes of one host share, with the state that it guards."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from uuid import uuid4


class SharedLock:
    """A context manager in which this process has the newest state, and no other process or thread changes it.

    Args:
        file: the state. Its folder belongs to these processes alone.
        read: takes the state that another process has written.
        write: returns this process's state. Called at the end of each block; an unchanged state is not written again.
    """

    def __init__(self, file: Path, read: Callable[[bytes], None], write: Callable[[], bytes]) -> None:
        self._file = file
        self._read = read
        self._write = write
        self._thread_lock = threading.Lock()
        self._held = contextlib.ExitStack()
        self._version: tuple[int, int] | None = None
        """Inode and time of the file that was read or written last."""
        self._content = b""

    def __enter__(self) -> None:
        with contextlib.ExitStack() as held:
            held.enter_context(self._thread_lock)
            # A file of its own for each block: a process that was forked meanwhile shares the lock of an open one.
            lock = held.enter_context(self._file.with_suffix(".lock").open("ab"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
            version = self._current_version()
            if version is None:
                self._content = b""  # it is the first block, or a cleaner of temporary files has removed the file
            elif version != self._version:
                content = self._file.read_bytes()
                self._read(content)
                self._version, self._content = version, content
            self._held = held.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._held:
            content = self._write()
            if content != self._content:
                replace_file(self._file, content)
                self._version, self._content = self._current_version(), content

    def _current_version(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._file)
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns


def replace_file(file: Path, content: bytes) -> None:
    """Write a file, so that no process ever reads a part of it."""
    new = file.with_name(f"{uuid4().hex}.new")
    try:
        new.write_bytes(content)
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)
