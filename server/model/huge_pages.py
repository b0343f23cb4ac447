"""Huge pages for memory that each step reads from end to end.

The processor looks up where each page lies before it can read it, and keeps a few thousand of these translations. With
pages of 4 KiB that covers some megabytes, and reading the weights of a model waits for lookups again and again. One
page of 2 MiB needs one.
"""

from __future__ import annotations

import ctypes
import os

_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
"""Linux 6.1 and later: move a range to huge pages now, whatever the system's own habit is."""


def collapse(address: int, nbytes: int) -> int:
    """Move memory to huge pages, as far as the kernel does that. What stands there stays.

    Args:
        address: of memory of this process.
        nbytes: how much of it.

    Returns:
        How many bytes, from the first to the last huge page, lie in huge pages now. The ends may share theirs with what
        stands beside them. 0 where the kernel knows nothing of this.
    """
    if os.uname().sysname != "Linux" or not nbytes:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = address - address % _HUGE_PAGE
    # One by one: a page that cannot be had, at the border of a mapping, say, should not keep the others from it.
    pages = range(first, address + nbytes, _HUGE_PAGE)
    moved = [page for page in pages if madvise(page, _HUGE_PAGE, _MADV_COLLAPSE) == 0]
    return _HUGE_PAGE * len(moved)
