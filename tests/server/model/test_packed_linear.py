from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch
from torch import nn

from logitship.server.model.packed_linear import PackedLinear, can_pack, collapse

ROWS = (1, 3, 8, 33)
HUGE_PAGE = 1 << 21


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@torch.no_grad()
def test_output_equals_that_of_the_layers(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    layers = [nn.Linear(48, size, bias=bias) for size in (32, 16, 16)]
    x, other = torch.randn(rows, 48), torch.randn(rows, 64)
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    packed = PackedLinear.of(*layers)
    torch.testing.assert_close(packed(x), expected)
    torch.testing.assert_close(packed.add(x, other), expected + other)
    scale = torch.rand(48)
    expected = torch.cat([layer(x * scale) for layer in layers], dim=-1)
    torch.testing.assert_close(PackedLinear.of(*layers, scale=scale)(x), expected)


@torch.no_grad()
def test_arguments_are_not_modified() -> None:
    packed = PackedLinear.of(nn.Linear(8, 8))
    x, other = torch.randn(2, 8), torch.randn(2, 8)
    before = x.clone(), other.clone()
    packed.add(x, other)
    assert torch.equal(x, before[0])
    assert torch.equal(other, before[1])


def test_can_pack() -> None:
    assert can_pack(torch.device("cpu"), torch.float32) == torch.backends.mkldnn.is_available()
    assert not can_pack(torch.device("cpu"), torch.float16)
    assert not can_pack(torch.device("meta"), torch.float32)


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
