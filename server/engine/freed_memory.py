"""Gives memory that was freed back to the system.

C's allocator keeps it for what comes next. Steps need blocks of all sizes, up to the logits of a whole prompt, and what
lies between two blocks that stay is kept too: of a server with a tiny model, a third of the allocator's memory after
some thousand requests, and more of it with any order of requests that happens to need larger holes than there are.
"""

from __future__ import annotations

import ctypes


def give_back_freed_memory() -> bool:
    """Give back all whole pages that are free. Takes some milliseconds, without the interpreter's lock.

    Returns:
        False where the allocator has no such function: it is glibc's.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is None:
        return False
    malloc_trim.argtypes = (ctypes.c_size_t,)
    malloc_trim(0)
    return True
