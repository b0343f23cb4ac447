"""Landlock: restricts which files a sandbox can read, and denies access to TCP and to processes outside.

See the kernel's `Documentation/userspace-api/landlock.rst`. Every access right known both here and to the running
kernel is handled, and so denied; reading below some paths is then allowed.
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
"""Number of file access rights by ABI version, from bit 0 (execute) up."""
_BIND_AND_CONNECT_TCP = 0b11
_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 0b11


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scope", ctypes.c_uint64))


class _PathBeneathAttributes(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """Return the ABI version of Landlock in this kernel; 0 if Landlock is not available or disabled."""
    try:
        return syscall("landlock_create_ruleset", None, 0, _CREATE_RULESET_VERSION)
    except OSError:
        return 0


def create_ruleset(readable: Iterable[Path], abi: int) -> int:
    """Create a ruleset that only allows reading files and directories below `readable`.

    Args:
        readable: directories or files. Those that do not exist or cannot be accessed are skipped.
        abi: the ABI version, see `abi`.

    Returns:
        A file descriptor of the ruleset, close-on-exec. Forked children can restrict themselves with it.

    Raises:
        OSError: a system call failed.
    """
    attributes = _RulesetAttributes(
        files=(1 << max(count for since, count in _RIGHTS_ON_FILES.items() if since <= abi)) - 1,
        network=_BIND_AND_CONNECT_TCP if abi >= 4 else 0,
        scope=_SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0,
    )
    # An older kernel accepts a longer structure if the fields unknown to it are zero.
    ruleset = syscall("landlock_create_ruleset", attributes, ctypes.sizeof(attributes), 0)
    try:
        for path in readable:
            _allow_reading(ruleset, path)
    except BaseException:  # cleanup, then re-raised
        os.close(ruleset)
        raise
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Enforce a ruleset on this thread, irrevocably. Requires no_new_privs.

    Raises:
        OSError: the system call failed.
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
