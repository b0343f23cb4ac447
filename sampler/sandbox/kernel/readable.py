"""Which directories a sandbox may read: those that an import may need."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
_SYSTEM_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64")


def readable_paths() -> tuple[Path, ...]:
    """The directories of Python's library, of installed packages and of the system's libraries, sorted.

    Entries of `sys.path` are among them if packages were installed there. The folder of the server's own script is such
    an entry too, and so are those of `PYTHONPATH`: whoever keeps an `.env` beside their script does not mean to show it
    to clients. For the same reason, the working directory, a home folder, `/` and folders right below it never are.
    """
    entries = {path for path in _import_path() if _holds_packages(path) and not _is_too_wide(path)}
    return tuple(sorted(set(_libraries()) | entries))


def _libraries() -> Iterator[Path]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = [sysconfig.get_path(name) for name in names]
    prefixes = [str(Path(sys.base_prefix, name)) for name in ("lib", "lib64")]
    for each in (*installed, *prefixes, *_SYSTEM_LIBRARIES):
        if os.path.isdir(each):  # of a folder that may not be entered, Path.is_dir raises
            yield Path(each)


def _import_path() -> Iterator[Path]:
    for entry in sys.path:
        if os.path.isabs(entry) and os.path.isdir(entry):
            yield Path(entry)


def _holds_packages(path: Path) -> bool:
    # An installer leaves a `*.dist-info` beside each package.
    return path.name in _PACKAGE_FOLDERS or next(path.glob("*.dist-info"), None) is not None


def _is_too_wide(path: Path) -> bool:
    private = [Path.cwd(), *_home()]
    places = (path, path.resolve())
    return any(len(place.parts) <= 2 or place in (each, *each.parents) for place in places for each in private)


def _home() -> Iterator[Path]:
    home = os.path.expanduser("~")
    if os.path.isabs(home):
        yield Path(home)
        yield Path(home).resolve()
