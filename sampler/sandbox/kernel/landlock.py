"""Landlock: which files a sandbox may read, and that it reaches no socket and no process outside itself.

See `Documentation/userspace-api/landlock.rst` of the kernel. Every right that is known here and to the running kernel
is handled, and so refused; reading below some paths is then given back.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

from .syscalls import syscall

_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1

_READ_FILE, _READ_DIRECTORY = 1 << 2, 1 << 3
_RIGHTS_ON_FILES = {1: 13, 2: 14, 3: 15, 5: 16}
"""ABI to the number of rights on files that it knows, bit 0 (execute) and up."""
_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneathAttributes(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Landlock's version in this kernel; 0 if it is not compiled in or not switched on."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def create_ruleset(readable: Iterable[Path], abi: int) -> int:
    """Make a ruleset under which only files and directories below `readable` can be opened, and only to be read.

    Args:
        readable: directories or files. Those that do not exist or cannot be reached are left out.
        abi: what `abi()` says.

    Returns:
        its file descriptor, close-on-exec. Processes forked later can be restricted by it.

    Raises:
        OSError: the kernel refused.
    """
    attributes = _RulesetAttributes(
        files=(1 << max(count for since, count in _RIGHTS_ON_FILES.items() if since <= abi)) - 1,
        network=_BIND_AND_CONNECT_TCP if abi >= 4 else 0,
        scope=_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0,
    )
    # An older kernel refuses a longer structure only where the part that it does not know is not zero.
    ruleset = syscall("landlock_create_ruleset", attributes, ctypes.sizeof(attributes), 0)
    try:
        for path in readable:
            _allow_reading(ruleset, path)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Put this thread under a ruleset, for good. Needs no_new_privs.

    Raises:
        OSError: the kernel refused.
    """
    syscall("landlock_restrict_self", ruleset, 0)


def _allow_reading(ruleset: int, path: Path) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        rights = _READ_FILE | _READ_DIRECTORY if os.path.isdir(path) else _READ_FILE
        syscall("landlock_add_rule", ruleset, _RULE_PATH_BENEATH, _PathBeneathAttributes(rights, parent), 0)
    finally:
        os.close(parent)
