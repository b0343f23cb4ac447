"""The author's file: imported anew for each run, with the author's modules that it imports."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from logitship.client.processor import CustomLogitProcessor
from logitship.client.serialization.provenance import is_installed, is_own_extension
from logitship.server.check.class_import import import_class

FileState = tuple[int, int, int]
"""Inode, size and time of the last change: at least one differs after a save."""


class AuthorFile:
    """A file with a processor class, and all the author's files that the class depends on.

    Args:
        target: `file.py`, or `file.py:Class`.
        data_files: other files whose change calls for a run, such as one with parameters.
    """

    def __init__(self, target: str, data_files: tuple[Path, ...] = ()) -> None:
        name, colon, _ = target.rpartition(":")
        self.target = target
        self.path = Path(name if colon else target).resolve()
        self._data_files = data_files
        self._kept_modules = frozenset(sys.modules)
        self._states: dict[Path, FileState | None] = {}

    @property
    def paths(self) -> list[Path]:
        """The files that the last run depended on, `path` first."""
        return list(dict.fromkeys([self.path, *self._states]))

    @property
    def has_changed(self) -> bool:
        """True if one of the files was saved since `load` read it."""
        return any(_state(path) != state for path, state in self._states.items())

    def load(self) -> type[CustomLogitProcessor]:
        """Import the file and return its class. Modules of the author's that earlier loads imported are imported anew.

        Raises:
            UsageError: there is no such file or class, or the file cannot be imported; the cause is the author's error.
        """
        self._evict_modules()
        # Before the import: a save during it triggers another run. Earlier files stay: an import error may hide them.
        self._states = {path: _state(path) for path in [self.path, *self._data_files, *self._states]}
        try:
            return import_class(self.target)
        finally:
            for path in self._own_modules().values():
                self._states.setdefault(path, _state(path))

    def _evict_modules(self) -> None:
        for name in self._own_modules():
            del sys.modules[name]
        importlib.invalidate_caches()

    def _own_modules(self) -> dict[str, Path]:
        """Return the names and files of the author's modules that were imported since this object was made."""
        found = {}
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            path = Path(file).resolve() if isinstance(file, str) else None
            if path is not None and (path == self.path or (name not in self._kept_modules and _is_authors(name))):
                found[name] = path
        return found


def _is_authors(module_name: str) -> bool:
    is_ours = module_name.partition(".")[0] == "logitship"
    # A compiled module cannot be imported twice.
    return not is_ours and not is_installed(module_name) and not is_own_extension(module_name)


def _state(path: Path) -> FileState | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
