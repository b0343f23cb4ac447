"""Resource limits of a sandbox."""

from __future__ import annotations

import contextlib
import errno
import mmap
import resource
from pathlib import Path

_DESCRIPTORS = 32
_NOTHING = (
    resource.RLIMIT_CORE,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_MSGQUEUE,
    resource.RLIMIT_NPROC,
)
_MIB = 1 << 20
_LARGEST = 1 << 38
"""The address space is at least 512 GiB on every machine of `MACHINES`, so this much is free in one piece."""


def impose(memory: int) -> None:
    """Limit this process, for good.

    Args:
        memory: bytes of address space that it may take on top of what it has.

    Raises:
        OSError: the kernel refused.
    """
    for each in _NOTHING:
        resource.setrlimit(each, (0, 0))
    _lower(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    _lower(resource.RLIMIT_AS, address_space() + memory)


def die_first_when_memory_is_short() -> None:
    """Have the kernel end this process, and those forked from it, before all others when the machine is out of memory.

    Needs `/proc`; where that is missing, nothing changes.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def address_space() -> int:
    """Bytes of address space that this process has, rounded up to a MiB. Changes the soft `RLIMIT_AS` for a moment.

    `/proc/self/statm` has the number, but a sandbox's root directory has no `/proc`. So the largest mapping that still
    fits under a known limit is looked for: the limit less that is what there is. The limit is far above what is in use,
    so that nothing fails meanwhile.

    Raises:
        OSError: ENOMEM; an earlier limit leaves no room.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _LARGEST if hard == resource.RLIM_INFINITY else min(_LARGEST, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        fits, too_much = 0, limit // _MIB + 1
        while too_much - fits > 1:
            middle = (fits + too_much) // 2
            fits, too_much = (middle, too_much) if _can_map(middle * _MIB) else (fits, middle)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    if fits == 0:
        raise OSError(errno.ENOMEM, f"no room for a mapping under {limit} bytes of address space")
    return limit - fits * _MIB


def _can_map(size: int) -> bool:
    try:
        mmap.mmap(-1, size, mmap.MAP_PRIVATE, prot=0).close()  # inaccessible: takes no memory
    except OSError:
        return False
    return True


def _lower(which: int, limit: int) -> None:
    hard = resource.getrlimit(which)[1]
    lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(which, (lowest, lowest))
