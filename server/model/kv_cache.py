"""KV cache of the running sequences, and the prefix cache of earlier ones.

The cache of the running sequences has one slot per sequence, allocated once.

Assumptions:
* A slot belongs to one sequence from `allocate` to `free`.
* Positions are written in order, and positions at or beyond a sequence's length are not attended to.

Guarantees:
* Storage never moves: attention reads a view of it.
* `allocate` returns the lowest free slot, so that the slots in use stay close together.
* Values beyond a sequence's length are finite: zeros, or those of an earlier sequence. (Attention multiplies them by a
  weight of zero, and zero times NaN is NaN.)

The prefix cache keeps keys and values of earlier sequences, for later ones that begin with the same tokens. A sequence
is divided into blocks. A block is identified by its tokens, all tokens before it, and the tenant, so a hit has the same
keys and values. Blocks have their own pool: they are copied out of a slot when a prompt is computed and when a sequence
ends, and into the slot of a sequence that begins with them. (vLLM calls this automatic prefix caching, SGLang radix
cache. Here attention reads slots, so a block is copied and not shared.)

Assumptions:
* Keys and values depend only on the tokens up to their position.
* It is used by one thread.

Guarantees:
* The pool has a fixed size: the least recently used block is evicted. Of a sequence's blocks, later ones are evicted
  first, because they cannot be found without those before them.
* Tenants do not share blocks: response times would reveal the prompts of others.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import mmap
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

BLOCK_SIZE = 16
"""Tokens. Smaller blocks find slightly longer prefixes, at a higher cost."""


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
    # would take, and clear, two megabytes. Private: reading a page of a shared mapping takes memory, too.
    memory = mmap.mmap(-1, max(1, math.prod(size) * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # the kernel has no huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(size)).view(size)


@dataclass(frozen=True)
class PrefixCacheStats:
    """Counters since the start, and the size now.

    Attributes:
        tokens_asked: prompt tokens that were looked up.
        tokens_found: prompt tokens found, which need not be computed.
        blocks: blocks in the pool.
        capacity: most blocks in the pool.
    """

    tokens_asked: int = 0
    tokens_found: int = 0
    blocks: int = 0
    capacity: int = 0


class PrefixCache:
    """The pool of blocks, and their keys.

    Args:
        slots: the cache of the running sequences.
        num_blocks: size of the pool; 0: the cache is off.
    """

    def __init__(self, slots: SlotCache, num_blocks: int) -> None:
        shape, device = slots.shape, slots.keys[0].device
        size = (num_blocks, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
        self._slots = [*slots.keys, *slots.values]
        self._pool = [allocate_zeros(size, layer.dtype, device) for layer in self._slots]
        self._device = device
        self._capacity = num_blocks
        self._free = list(range(num_blocks))
        self._blocks: OrderedDict[bytes, int] = OrderedDict()
        """Key → index of the block in the pool; the least recently used first."""
        self._asked = 0
        self._found = 0

    def restore(self, tenant: str, token_ids: Sequence[int], slot: int, computed: int = 0) -> int:
        """Copy the longest cached prefix of a sequence to its slot.

        Args:
            tenant: who sent the sequence.
            token_ids: its tokens.
            slot: its slot.
            computed: number of its tokens that are in the slot already.

        Returns:
            Number of tokens in the slot now: a multiple of `BLOCK_SIZE`, or `computed` if no more are cached.
        """
        found: list[bytes] = []
        for key in _keys(tenant, token_ids):
            if key not in self._blocks:
                break
            found.append(key)
        self._touch(found)
        if computed == 0:
            self._asked += len(token_ids)
        length = len(found) * BLOCK_SIZE
        if length <= computed:
            return computed
        self._found += length - computed
        first = computed // BLOCK_SIZE
        indices = self._tensor([self._blocks[key] for key in found[first:]])
        for layer, pool in zip(self._slots, self._pool, strict=True):
            layer[slot, :, first * BLOCK_SIZE : length] = pool[indices].transpose(0, 1).flatten(1, 2)
        return length

    def has_prefix(self, tenant: str, token_ids: Sequence[int]) -> bool:
        """Return whether `restore` would copy something to an empty slot."""
        return next(_keys(tenant, token_ids), None) in self._blocks

    def keep(self, tenant: str, token_ids: Sequence[int], slot: int) -> None:
        """Cache the blocks of a sequence that are not cached yet.

        Args:
            tenant: who sent the sequence.
            token_ids: its tokens with keys and values in the slot, from the first one.
            slot: its slot.
        """
        keys = list(_keys(tenant, token_ids))[: self._capacity]
        self._touch([key for key in keys if key in self._blocks])
        new = {key: number for number, key in enumerate(keys) if key not in self._blocks}
        if not new:
            return
        self._evict(len(new), keeping=set(keys))
        indices = self._tensor([self._free.pop() for _ in new])
        blocks = self._tensor(list(new.values()))
        length = len(keys) * BLOCK_SIZE
        for layer, pool in zip(self._slots, self._pool, strict=True):
            in_blocks = layer[slot, :, :length].view(pool.shape[1], -1, *pool.shape[2:])
            pool[indices] = in_blocks[:, blocks].transpose(0, 1)
        self._blocks.update(zip(new, indices.tolist(), strict=True))
        self._touch(keys[: max(new.values()) + 1])

    def clear(self) -> None:
        """Evict all blocks."""
        self._free += self._blocks.values()
        self._blocks.clear()

    def stats(self) -> PrefixCacheStats:
        """Return the counters and sizes."""
        return PrefixCacheStats(self._asked, self._found, len(self._blocks), self._capacity)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Mark blocks as used. The first block becomes the most recently used one."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _evict(self, count: int, keeping: set[bytes]) -> None:
        """Evict the least recently used blocks until `count` are free, at most those of the pool without `keeping`."""
        for key in list(self._blocks):
            if len(self._free) >= count:
                return
            if key not in keeping:
                self._free.append(self._blocks.pop(key))

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)


def block_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Return the size of a block in bytes, all layers together."""
    return 2 * shape.num_layers * shape.num_kv_heads * BLOCK_SIZE * shape.head_dim * dtype.itemsize


def _keys(tenant: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """Yield the key of each whole block: a secure hash of its tokens and all before, as collisions mix up prompts."""
    key = sha256(tenant.encode()).digest()
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = sha256(key + array("q", token_ids[start : start + BLOCK_SIZE]).tobytes()).digest()
        yield key
