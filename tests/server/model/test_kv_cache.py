from __future__ import annotations

import random

import pytest
import torch

from logitship.server.model.kv_cache import CacheShape, SlotCache

SHAPE = CacheShape(num_layers=2, num_slots=3, num_kv_heads=2, max_len=5, head_dim=4)


def new_cache(dtype: torch.dtype = torch.float32, shape: CacheShape = SHAPE) -> SlotCache:
    return SlotCache(shape, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_new_cache_is_zero(dtype: torch.dtype) -> None:
    cache = new_cache(dtype)
    layers = [*cache.keys, *cache.values]
    assert len(layers) == 4
    assert all(list(layer.shape) == [3, 2, 5, 4] and layer.dtype == dtype for layer in layers)
    assert not any(layer.any() for layer in layers)
    assert sum(layer.nbytes for layer in layers) == SHAPE.nbytes(dtype)


def test_layers_share_no_storage() -> None:
    cache = new_cache()
    cache.keys[0].fill_(1.0)
    assert not any(layer.any() for layer in (cache.keys[1], *cache.values))


def test_allocate_returns_the_lowest_free_slot() -> None:
    rng = random.Random(0)
    cache = new_cache(shape=CacheShape(num_layers=1, num_slots=8, num_kv_heads=1, max_len=1, head_dim=1))
    free = set(range(8))
    for _ in range(500):
        assert cache.num_free == len(free)
        if free and rng.random() < 0.5:
            assert cache.allocate() == min(free)
            free.remove(min(free))
        elif len(free) < 8:
            slot = rng.choice(sorted(set(range(8)) - free))
            cache.free(slot)
            free.add(slot)


def test_allocate_without_free_slot() -> None:
    cache = new_cache()
    assert [cache.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(IndexError):
        cache.allocate()


def test_wipe_zeros_one_slot_only() -> None:
    cache = new_cache()
    for layer in (*cache.keys, *cache.values):
        layer.fill_(float("nan"))
    cache.wipe(1, 3)
    for layer in (*cache.keys, *cache.values):
        assert layer[1, :, :3].eq(0).all()
        assert layer[1, :, 3:].isnan().all()
        assert layer[[0, 2]].isnan().all()
    cache.wipe(1, 100)  # longer than the slot: all positions
    assert not cache.keys[0][1].any()


def test_copy_of_the_first_positions_of_all_layers() -> None:
    cache = new_cache()
    layers = [*cache.keys, *cache.values]
    for layer in layers:
        layer.copy_(torch.randn(layer.shape))
    before = [layer.clone() for layer in layers]
    cache.copy(2, 0, 3)
    for layer, old in zip(layers, before, strict=True):
        assert layer[0, :, :3].equal(old[2, :, :3])
        assert layer[0, :, 3:].equal(old[0, :, 3:])
        assert layer[1:].equal(old[1:])
    cache.copy(1, 2, 0)
    assert cache.keys[0][2].equal(before[0][2])
