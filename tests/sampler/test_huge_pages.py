from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from logitship.sampler.huge_pages import collapse

HUGE_PAGE = 1 << 21


def test_collapse_preserves_the_content() -> None:
    memory = mmap.mmap(-1, 4 * HUGE_PAGE)
    content = os.urandom(len(memory))
    memory[:] = content
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Not aligned: both ends are inside a page.
    moved = collapse(start + 5000, len(memory) - 10_000)
    assert moved % HUGE_PAGE == 0
    assert 0 <= moved <= len(memory) + HUGE_PAGE
    assert memory[:] == content


@pytest.mark.parametrize(("address", "nbytes"), [(0, 0), (0, 1), (1 << 46, HUGE_PAGE)])
def test_collapse_ignores_unmapped_memory(address: int, nbytes: int) -> None:
    assert collapse(address, nbytes) == 0


PROGRAM = """
import re
from pathlib import Path
from logitship.sampler.huge_pages import collapse_own_memory

kept = [bytes([number % 256]) * 4096 for number in range(10_000)]
collapsed = collapse_own_memory()
assert all(page == bytes([number % 256]) * 4096 for number, page in enumerate(kept))
huge = re.search(r"AnonHugePages: +([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())
print(collapsed, 1024 * int(huge[1]))
"""


def test_own_memory_is_in_huge_pages_and_unchanged() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    collapsed, huge = map(int, found.stdout.split())
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    can_collapse = release >= (6, 1) and Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert huge >= collapsed
    assert (collapsed > 0) == can_collapse
