"""The operator's list of processors that may not run: `--blocked-digests`, read again when the file changes.

The file has the form of the one of `--allow-processor`, see `allowed_processors`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from .allowed_processors import read_digests
from .refusals import StartError

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 0.2
"""Seconds between two looks at the file. Those that run a blocked class have to end within a second."""

_Stamp = tuple[int, int, int] | None


class BlockedProcessors:
    """The digests in a file. Thread-safe.

    Guarantees:
    * A file that cannot be read any more, or that has an invalid line, changes nothing: what is blocked stays blocked.
    * `on_blocked` is called after `digests` has changed.

    Args:
        path: the file.

    Raises:
        ValueError: the file cannot be read, or a line is not a digest.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._digests = read_digests(path, "blocked_digests")
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def digests(self) -> frozenset[str]:
        """The blocked digests at this moment."""
        return self._digests

    def watch(self, on_blocked: Callable[[frozenset[str]], None]) -> None:
        """Start a thread that looks at the file until `close`.

        Args:
            on_blocked: called in this thread with the digests that were added.

        Raises:
            StartError: the thread cannot be started.
        """
        self._thread = threading.Thread(
            target=self._watch, args=(on_blocked,), name="logitship-blocked-digests", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StartError(f"no thread can be started that reads --blocked-digests: {error}") from None

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def refresh(self) -> frozenset[str]:
        """Read the file if it has changed. Return the digests that were added."""
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return frozenset()
        self._stamp = stamp
        try:
            digests = read_digests(self._path, "blocked_digests")
        except ValueError as error:
            logger.error("%s: what was blocked before stays blocked", error)
            return frozenset()
        added, removed = digests - self._digests, self._digests - digests
        self._digests = digests
        for digest in sorted(added):
            logger.warning("processor %s is blocked: its requests end now", digest)
        for digest in sorted(removed):
            logger.warning("processor %s is not blocked any more", digest)
        return added

    def _watch(self, on_blocked: Callable[[frozenset[str]], None]) -> None:
        while not self._stopped.wait(CHECK_INTERVAL):
            try:
                if added := self.refresh():
                    on_blocked(added)
            except Exception:  # boundary: engine thread
                logger.exception("processors that have been blocked may go on")

    def _read_stamp(self) -> _Stamp:
        """Return what changes with the file, also if another takes its place, as in a mounted ConfigMap."""
        try:
            status = os.stat(self._path)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
