"""Resource limits of a sandbox."""

from __future__ import annotations

import contextlib
import errno
import mmap
import resource
from pathlib import Path

_DESCRIPTORS = 32
_ZERO_LIMITS = (
    resource.RLIMIT_CORE,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_NPROC,
)
_MIB = 1 << 20
_MAX_LIMIT = 1 << 38
"""Every machine in `MACHINES` has at least 512 GiB of address space, so a mapping of this size fits."""


def impose(memory: int) -> None:
    """Set the resource limits of this process, irrevocably.

    Args:
        memory: bytes of address space that it may allocate on top of its current size.

    Raises:
        OSError: a system call failed.
    """
    for each in _ZERO_LIMITS:
        resource.setrlimit(each, (0, 0))
    _lower(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    _lower(resource.RLIMIT_AS, address_space() + memory)


def die_first_when_memory_is_short() -> None:
    """Make this process and its children the first victims of the OOM killer. Does nothing without `/proc`."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def address_space() -> int:
    """Return the size of this process's address space in bytes, rounded up to a MiB. Temporarily sets `RLIMIT_AS`.

    `/proc/self/statm` has the number, but a sandbox's root directory has no `/proc`. So a binary search finds the
    largest mapping that fits under a known limit; the difference is the size. The limit is far above the current size,
    so that no other allocation fails meanwhile.

    Raises:
        OSError: ENOMEM; no mapping fits under the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _MAX_LIMIT if hard == resource.RLIM_INFINITY else min(_MAX_LIMIT, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        fits, too_large = 0, limit // _MIB + 1
        while too_large - fits > 1:
            middle = (fits + too_large) // 2
            fits, too_large = (middle, too_large) if _can_map(middle * _MIB) else (fits, middle)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if fits == 0:
        raise OSError(errno.ENOMEM, f"no mapping fits under the limit of {limit} bytes of address space")
    return limit - fits * _MIB


def _can_map(size: int) -> bool:
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE, prot=0).close()  # PROT_NONE: takes no memory
    except OSError:
        return False
    return True


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (lowest, lowest))
