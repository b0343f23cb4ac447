"""KV cache of the running sequences: one slot per sequence, allocated once.

Assumptions:
* A slot belongs to one sequence from `allocate` to `free`.
* Positions are written in order, and positions at or beyond a sequence's length are not attended to.

Guarantees:
* Storage never moves: attention reads a view of it.
* `allocate` returns the lowest free slot, so that the slots in use stay close together.
* Values beyond a sequence's length are finite: zeros, or those of an earlier sequence. (Attention multiplies them by a
  weight of zero, and zero times NaN is NaN.)
"""

from __future__ import annotations

import contextlib
import heapq
import math
import mmap
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheShape:
    """Shape of the cache: [layers][slots, key-value heads, positions, head size], once for keys, once for values."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    max_len: int
    head_dim: int

    def nbytes(self, dtype: torch.dtype) -> int:
        """Return the size of the whole cache in bytes."""
        elements = self.num_layers * self.num_slots * self.num_kv_heads * self.max_len * self.head_dim
        return 2 * elements * dtype.itemsize


class SlotCache:
    """Keys and values of all layers, and the free slots."""

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        size = (shape.num_slots, shape.num_kv_heads, shape.max_len, shape.head_dim)
        self.keys = [allocate_zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self.values = [allocate_zeros(size, dtype, device) for _ in range(shape.num_layers)]
        self._free = list(range(shape.num_slots))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def allocate(self) -> int:
        """Allocate the lowest free slot.

        Raises:
            IndexError: no slot is free.
        """
        return heapq.heappop(self._free)

    def free(self, slot: int) -> None:
        """Free a slot."""
        heapq.heappush(self._free, slot)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first positions to another slot: a prefix that both sequences share."""
        for layer in (*self.keys, *self.values):
            layer[target, :, :length].copy_(layer[source, :, :length])

    def wipe(self, slot: int, length: int) -> None:
        """Zero a slot's first positions. Needed if its sequence may have written values that are not finite."""
        for layer in (*self.keys, *self.values):
            layer[slot, :, :length].zero_()


def allocate_zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU, their pages take memory only once they are written to."""
    if device.type != "cpu" or 0 in size:
        return torch.zeros(size, dtype=dtype, device=device)
    # `torch.zeros` writes the zeros, which takes the memory at once. A new mapping is zero already: the kernel provides
    # its pages when they are first written. Small pages: with huge ones, the first token of each head in each slot
    # would take, and clear, two megabytes.
    memory = mmap.mmap(-1, max(1, math.prod(size) * dtype.itemsize))
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(size)).view(size)
