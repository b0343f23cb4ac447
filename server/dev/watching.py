"""Waiting for the next save."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from watchfiles import watch

_LOOK_AGAIN = 1000
"""Milliseconds after which the files are compared although nothing was reported: network file systems report nothing,
and a change may come between the last comparison and the start of the watch."""
_SETTLED = 50
"""Milliseconds without a change after which a save is complete. Many editors write a file in several steps."""


def wait_for_change(paths: Iterable[Path], has_changed: Callable[[], bool]) -> None:
    """Wait until `has_changed()` returns True. It is called after each change in the folders of the files.

    Folders, because many editors replace a file instead of writing to it.

    Raises:
        KeyboardInterrupt: Ctrl-C.
    """
    folders = {path.parent for path in paths if path.parent.is_dir()}
    for _ in watch(
        *folders,
        watch_filter=None,
        step=_SETTLED,
        rust_timeout=_LOOK_AGAIN,
        yield_on_timeout=True,
        raise_interrupt=True,
        recursive=False,
    ):
        if has_changed():
            return
