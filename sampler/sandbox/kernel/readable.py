"""The directories that a sandbox may read, because imports may need them."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
_SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")


def readable_paths() -> tuple[Path, ...]:
    """Return the directories of Python's standard library, installed packages and system libraries, sorted.

    Entries of `sys.path` are included only if packages were installed there. That excludes the directory of the
    server's own script and most entries of `PYTHONPATH`, which may hold private files such as an `.env`. For the same
    reason, the working directory, the home directory, `/` and the directories directly below it are excluded, unless
    they are Python's own or the system's library directories.
    """
    entries = {path for path in _import_path() if _holds_packages(path) and not _is_too_wide(path)}
    return tuple(sorted(set(_libraries()) | entries))


def _libraries() -> Iterator[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [sysconfig.get_path(name) for name in names]
    prefixes = [str(Path(sys.base_prefix, name)) for name in ("lib", "lib64")]
    for each in (*installed, *prefixes, *_SYSTEM_LIBRARIES):
        if os.path.isdir(each):  # Path.is_dir raises for a directory that cannot be accessed
            yield Path(each)


def _import_path() -> Iterator[Path]:
    for entry in sys.path:
        if os.path.isabs(entry) and os.path.isdir(entry):
            yield Path(entry)


def _holds_packages(path: Path) -> bool:
    # An installer creates a `*.dist-info` directory for each package.
    return path.name in _PACKAGE_FOLDERS or next(path.glob("*.dist-info"), None) is not None


def _is_too_wide(path: Path) -> bool:
    private = [*_home()]
    with contextlib.suppress(OSError):  # it was deleted
        private.append(Path.cwd())
    names = (path, path.resolve())
    return any(len(name.parts) <= 2 or name in (each, *each.parents) for name in names for each in private)


def _home() -> Iterator[Path]:
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        yield Path(home)
        yield Path(home).resolve()
