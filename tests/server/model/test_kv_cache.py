"""The prefix cache, alone against a simple reference, and in the engine."""

from __future__ import annotations

import mmap
import random
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.model.kv_cache import BLOCK_SIZE, CacheShape, PrefixCache, SlotCache, allocate_zeros
from logitship.server.requests.messages import BeamSearch
from tests.helpers.engine_requests import BuildEngine, Output, generate, generate_all, request
from tests.helpers.random_cases import random_seeds

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


def test_reading_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    zeros = allocate_zeros((64 << 20,), torch.uint8, torch.device("cpu"))
    before = resident()
    assert not zeros.any()
    assert resident() - before < 16 << 20
    zeros.fill_(1)
    assert resident() - before > 48 << 20


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


MAX_LEN = 6 * BLOCK_SIZE
CPU = torch.device("cpu")


def slots(count: int = 2) -> SlotCache:
    return SlotCache(CacheShape(2, count, 3, MAX_LEN, 2), torch.float32, CPU)


def compute(cache: SlotCache, slot: int, tokens: list[int], start: int = 0) -> None:
    """Write keys and values as a model does: those of a token depend on all tokens up to it."""
    for position in range(start, len(tokens)):
        number = float(hash(tuple(tokens[: position + 1])) % 10007)
        for offset, layer in enumerate((*cache.keys, *cache.values)):
            layer[slot, :, position] = number + offset


def contents(cache: SlotCache, slot: int, length: int) -> list[torch.Tensor]:
    return [layer[slot, :, :length].clone() for layer in (*cache.keys, *cache.values)]


class ReferenceCache:
    """Reference with whole prefixes as keys; the least recently used block is evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.known: OrderedDict[tuple[str, tuple[int, ...]], None] = OrderedDict()

    def _prefixes(self, tenant: str, tokens: list[int]) -> list[tuple[str, tuple[int, ...]]]:
        whole = len(tokens) // BLOCK_SIZE
        return [(tenant, tuple(tokens[: (block + 1) * BLOCK_SIZE])) for block in range(whole)]

    def restore(self, tenant: str, tokens: list[int]) -> int:
        found = []
        for each in self._prefixes(tenant, tokens):
            if each not in self.known:
                break
            found.append(each)
        for each in reversed(found):
            self.known.move_to_end(each)
        return len(found) * BLOCK_SIZE

    def keep(self, tenant: str, tokens: list[int]) -> None:
        wanted = self._prefixes(tenant, tokens)[: self.capacity]
        for each in wanted:
            self.known.setdefault(each)
        for each in reversed(wanted):
            self.known.move_to_end(each)
        while len(self.known) > self.capacity:
            self.known.popitem(last=False)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [0, *(pytest.param(each, marks=pytest.mark.thorough) for each in (1, 8, 100)), 3])
@random_seeds(3)
def test_cache_matches_the_reference(capacity: int, seed: int) -> None:
    rng = random.Random(seed)
    cache = slots()
    prefixes, model = PrefixCache(cache, capacity), ReferenceCache(capacity)
    for _ in range(200):
        tenant = rng.choice(["", "other"])
        # Few different blocks, so that prefixes are often shared, and sometimes a partial one.
        tokens = [token for _ in range(rng.randint(0, 5)) for token in [rng.randint(0, 2)] * BLOCK_SIZE]
        tokens += [7] * rng.randint(0, BLOCK_SIZE - 1)
        computed = rng.choice([0, 0, rng.randint(0, len(tokens))])
        compute(cache, 0, tokens[:computed])
        length = prefixes.restore(tenant, tokens, 0, computed)
        assert length == max(computed, model.restore(tenant, tokens))
        compute(cache, 1, tokens)
        for restored, computed in zip(contents(cache, 0, length), contents(cache, 1, length), strict=True):
            assert torch.equal(restored, computed)
        compute(cache, 0, tokens, length)
        prefixes.keep(tenant, tokens, 0)
        model.keep(tenant, tokens)
        assert prefixes.stats().blocks == len(model.known) <= capacity
        for layer in (*cache.keys, *cache.values):
            layer[0].fill_(-1.0)  # overwrite the slot: the next sequence has only what it restores


def test_clear_evicts_all_blocks() -> None:
    cache = slots()
    prefixes = PrefixCache(cache, 4)
    tokens = [1] * (4 * BLOCK_SIZE)
    for _ in range(3):
        prefixes.keep("", tokens, 0)
        assert prefixes.restore("", tokens, 0) == 4 * BLOCK_SIZE
        prefixes.clear()
        assert prefixes.restore("", tokens, 0) == 0
        assert prefixes.stats().blocks == 0


# --- the engine ---

SYSTEM = [10 + i % 40 for i in range(40)]
HoldEngine = Callable[[AsyncEngine], AbstractContextManager[None]]


@pytest.fixture
def engine(make_engine: BuildEngine) -> AsyncEngine:
    return make_engine(max_num_seqs=4, chunked_prefill_size=16)


async def ask(engine: AsyncEngine, prompt: list[int], **fields: Any) -> Output:
    return await generate(engine, request(prompt=prompt, temperature=0, **fields))


async def test_shared_prefix_is_not_computed_again(engine: AsyncEngine) -> None:
    first = await ask(engine, [*SYSTEM, 5])
    second = await ask(engine, [*SYSTEM, 6])
    again = await ask(engine, [*SYSTEM, 5])
    assert [output.last.cached_tokens for output in (first, second, again)] == [0, 32, 32]
    assert again.token_ids == first.token_ids


async def test_output_is_cached_for_the_next_turn(engine: AsyncEngine) -> None:
    answer = (await ask(engine, SYSTEM)).token_ids
    turn = await ask(engine, [*SYSTEM, *answer, 7, 8, 9])
    # 40 of the prompt and 7 of the output, whose last token was sampled and not computed: one too few for 3 blocks.
    assert turn.last.cached_tokens == 32
    longer = turn.token_ids
    last = await ask(engine, [*SYSTEM, *answer, 7, 8, 9, *longer, 3])
    assert last.last.cached_tokens == 48


async def test_last_token_of_a_cached_prompt_is_computed(engine: AsyncEngine) -> None:
    prompt = SYSTEM[:32]
    first, second = await ask(engine, prompt), await ask(engine, prompt)
    assert second.last.cached_tokens == 16
    assert second.token_ids == first.token_ids


async def test_concurrent_requests_share_the_prefix(engine: AsyncEngine, hold_engine: HoldEngine) -> None:
    with hold_engine(engine):
        wanted = [request(str(last), [*SYSTEM, last], temperature=0) for last in range(5, 9)]
        streams = [await engine.submit(each) for each in wanted]
    answers = [Output([chunk async for chunk in stream]) for stream in streams]
    # The second had computed 7 tokens in the step in which the first completed its prompt.
    assert [output.last.cached_tokens for output in answers] == [0, 25, 32, 32]


async def test_tenants_do_not_share_prefixes(engine: AsyncEngine) -> None:
    await ask(engine, SYSTEM, tenant="one")
    assert (await ask(engine, SYSTEM, tenant="other")).last.cached_tokens == 0
    assert (await ask(engine, SYSTEM, tenant="one")).last.cached_tokens == 32


async def test_prompt_logprobs_are_not_cached(engine: AsyncEngine) -> None:
    params = {"max_tokens": 1, "prompt_logprobs": 1}
    first = await ask(engine, SYSTEM, **params)
    second = await ask(engine, SYSTEM, **params)
    late = await ask(engine, SYSTEM, **params, prompt_logprobs_start=20)
    assert [output.last.cached_tokens for output in (first, second, late)] == [0, 0, 16]
    whole, tail = first.prompt_logprobs, late.prompt_logprobs
    assert len(whole) == len(SYSTEM)
    assert [position.token_id for position in tail] == SYSTEM[20:]
    for one, other in zip(whole[20:], tail, strict=True):
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)


async def test_with_several_continuations_and_beams(engine: AsyncEngine) -> None:
    beams = request(prompt=[*SYSTEM, 9], beam_search=BeamSearch(3), n=2, temperature=0)
    several = request(prompt=[*SYSTEM, 9], n=3, max_tokens=6, seed=1)
    for wanted in (beams, several):
        await engine.flush_cache()
        plain, cached = await generate_all(engine, wanted), await generate_all(engine, wanted)
        assert [output.token_ids for output in cached] == [output.token_ids for output in plain]
        assert min(chunk.cached_tokens for output in cached for chunk in output.chunks) >= 32


async def test_flush_cache(engine: AsyncEngine) -> None:
    await ask(engine, SYSTEM)
    assert engine.stats().prefix_blocks > 0
    assert await engine.flush_cache()
    assert (await ask(engine, SYSTEM)).last.cached_tokens == 0


async def test_cache_can_be_disabled(make_engine: BuildEngine) -> None:
    engine = make_engine(prefix_cache_bytes=0)
    for _ in range(2):
        assert (await ask(engine, SYSTEM)).last.cached_tokens == 0
    assert engine.stats().prefix_blocks_capacity == 0
    engine.stop()
