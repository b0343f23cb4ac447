from __future__ import annotations

import ctypes
from pathlib import Path

from logitship.server.engine.freed_memory import give_back_freed_memory

BLOCK = 1 << 14
"""Bytes; small enough for the allocator's heap, and larger than a page."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_what_lies_between_blocks_in_use_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = (ctypes.c_size_t,)
    libc.free.argtypes = (ctypes.c_void_p,)
    blocks = [libc.malloc(BLOCK) for _ in range(10_000)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    # Every hundredth stays, so that the heap cannot shrink from its end.
    for number, block in enumerate(blocks):
        if number % 100:
            libc.free(block)
    before = resident()
    assert give_back_freed_memory()
    given_back = (before - resident()) * 4096
    for block in blocks[::100]:
        assert ctypes.string_at(block, BLOCK) == b"\x01" * BLOCK
        libc.free(block)
    assert given_back > 100 * 2**20
