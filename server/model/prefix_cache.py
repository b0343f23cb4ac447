"""Keys and values of what earlier sequences began with, for later ones that begin with the same tokens.

A sequence is cut into blocks. A block is known by its tokens, all tokens before it, and the tenant, so that whoever
finds it would have computed the same. Blocks live in a pool of their own: they are copied out of a slot when a prompt
is computed and when a sequence ends, and into the slot of a sequence that begins with them. (Automatic prefix caching
in vLLM's words, radix cache in SGLang's. Here attention reads slots, so that a block is copied and not shared.)

Assumptions:
* Keys and values depend on nothing but the tokens up to their position.
* It is used by one thread.

Guarantees:
* The pool takes the memory that it was given, and no more: the least recently used block makes way. Of a sequence's
  blocks, later ones go first, because without those before them they cannot be found.
* One tenant's blocks are never another's: how fast an answer comes would tell what others asked.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch

from .kv_cache import CacheShape, SlotCache, allocate_zeros

BLOCK_SIZE = 16
"""Tokens. Smaller blocks find a little more, and cost more of everything."""


@dataclass(frozen=True)
class PrefixCacheStats:
    """Counters since the start, and the size now.

    Attributes:
        tokens_asked: prompt tokens that were looked up.
        tokens_found: those of them that need not be computed.
        blocks: blocks in the pool.
        capacity: the most that it can hold.
    """

    tokens_asked: int = 0
    tokens_found: int = 0
    blocks: int = 0
    capacity: int = 0


class PrefixCache:
    """See the module's text.

    Args:
        slots: where sequences have their keys and values.
        num_blocks: size of the pool; 0: nothing is kept, and nothing found.
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
        """By key, the block's place in the pool; the least recently used first."""
        self._asked = 0
        self._found = 0

    def restore(self, tenant: str, token_ids: Sequence[int], slot: int, computed: int = 0) -> int:
        """Copy the longest known beginning of a sequence to its slot.

        Args:
            computed: how many tokens are in the slot already.

        Returns:
            How many are now: a multiple of `BLOCK_SIZE`, or `computed` if no more is known.
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
        places = self._index([self._blocks[key] for key in found[first:]])
        for layer, pool in zip(self._slots, self._pool, strict=True):
            layer[slot, :, first * BLOCK_SIZE : length] = pool[places].transpose(0, 1).flatten(1, 2)
        return length

    def keep(self, tenant: str, token_ids: Sequence[int], slot: int) -> None:
        """Keep what of a sequence is not known yet.

        Args:
            token_ids: those whose keys and values are in the slot, from its beginning on.
        """
        keys = list(_keys(tenant, token_ids))[: self._capacity]
        self._touch([key for key in keys if key in self._blocks])
        new = {key: place for place, key in enumerate(keys) if key not in self._blocks}
        if not new:
            return
        self._make_room(len(new), keeping=set(keys))
        new = dict(list(new.items())[: len(self._free)])
        places = self._index([self._free.pop() for _ in new])
        blocks = self._index(list(new.values()))
        length = len(keys) * BLOCK_SIZE
        for layer, pool in zip(self._slots, self._pool, strict=True):
            in_blocks = layer[slot, :, :length].view(pool.shape[1], -1, *pool.shape[2:])
            pool[places] = in_blocks[:, blocks].transpose(0, 1)
        self._blocks.update(zip(new, places.tolist(), strict=True))
        self._touch(keys[: max(new.values()) + 1])

    def clear(self) -> None:
        """Forget everything."""
        self._free += self._blocks.values()
        self._blocks.clear()

    def stats(self) -> PrefixCacheStats:
        """Counters and sizes."""
        return PrefixCacheStats(self._asked, self._found, len(self._blocks), self._capacity)

    def _touch(self, keys: Sequence[bytes]) -> None:
        """Note a use. The first block is then the most recently used one."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _make_room(self, count: int, keeping: set[bytes]) -> None:
        for key in list(self._blocks):
            if len(self._free) >= count:
                return
            if key not in keeping:
                self._free.append(self._blocks.pop(key))

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)


def block_bytes(shape: CacheShape, dtype: torch.dtype) -> int:
    """Bytes of a block, all layers together."""
    return 2 * shape.num_layers * shape.num_kv_heads * BLOCK_SIZE * shape.head_dim * dtype.itemsize


def _keys(tenant: str, token_ids: Sequence[int]) -> Iterator[bytes]:
    """The key of each whole block: a hash of it and of all before it, as a collision would mix up two prompts."""
    key = sha256(tenant.encode()).digest()
    for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        key = sha256(key + array("q", token_ids[start : start + BLOCK_SIZE]).tobytes()).digest()
        yield key
