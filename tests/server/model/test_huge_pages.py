from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from logitship.server.model.huge_pages import collapse

HUGE_PAGE = 1 << 21


def test_what_stands_there_stays() -> None:
    memory = mmap.mmap(-1, 4 * HUGE_PAGE)
    content = os.urandom(len(memory))
    memory[:] = content
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Not on a border: both ends lie within a page.
    moved = collapse(start + 5000, len(memory) - 10_000)
    assert moved % HUGE_PAGE == 0
    assert 0 <= moved <= len(memory) + HUGE_PAGE
    assert memory[:] == content


@pytest.mark.parametrize(("address", "nbytes"), [(0, 0), (0, 1), (1 << 46, HUGE_PAGE)])
def test_memory_that_is_not_there_is_left_alone(address: int, nbytes: int) -> None:
    assert collapse(address, nbytes) == 0
