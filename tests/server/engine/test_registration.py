"""Processors that are registered with the engine and then named by their digest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from logitship.builtin_processors import DisallowedTokensLogitsProcessor
from logitship.client.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
    parse,
)
from logitship.client.records import Receipt
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.messages import GenerationChunk, GenerationRequest, ProcessorRequest
from logitship.server.errors import BadRequest, ServiceUnavailable

BuildEngine = Callable[..., AsyncEngine]

FORCE = """
from logitship import CustomLogitProcessor

class Force(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["token_id"]] += 1000.0
        return logits
"""
SOURCE = SourceProcessor(FORCE, "Force")


def variant(number: int) -> SourceProcessor:
    """The same processor under another digest."""
    return SourceProcessor(f"{FORCE}\n# {number}", "Force")


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


async def generate(
    engine: AsyncEngine, string: ProcessorString, params: dict[str, Any], rid: str = "r"
) -> tuple[list[int], tuple[Receipt, ...]]:
    """Three tokens under a processor, and its receipts."""
    request = GenerationRequest(
        rid=rid,
        prompt_token_ids=[10, 11],
        sampling_params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
        processors=(ProcessorRequest(string, params),),
    )
    chunks: list[GenerationChunk] = [chunk async for chunk in await engine.submit(request)]
    return [token for chunk in chunks for token in chunk.token_ids], chunks[-1].receipts


def test_a_digest_runs_what_was_registered(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        digest, name = await engine.register(SOURCE)
        assert (digest, name) == (SOURCE.digest, "Force")
        assert engine.ships_code(RegisteredProcessor(digest))
        tokens, (receipt,) = await generate(engine, RegisteredProcessor(digest), {"token_id": 42})
        assert tokens == [42, 42, 42]
        assert (receipt.digest, receipt.name, receipt.steps) == (digest, "Force", 3)

    run(scenario())


def test_registering_again_changes_nothing_and_loads_nothing(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        answers = await asyncio.gather(*(engine.register(SOURCE) for _ in range(5)))
        assert set(answers) == {(SOURCE.digest, "Force")}
        assert engine.stats().processor_cache_misses == 1
        await generate(engine, SOURCE, {"token_id": 1})
        assert engine.stats().processor_cache_misses == 1

    run(scenario())


def test_a_registered_string_outlives_its_loaded_processor(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        digest, _ = await engine.register(SOURCE)
        assert await engine.flush_cache()
        assert engine.stats().processor_cache_entries == 0
        tokens, _ = await generate(engine, RegisteredProcessor(digest), {"token_id": 42})
        assert tokens == [42, 42, 42]

    run(scenario())


def test_the_digest_is_that_of_what_runs(make_engine: BuildEngine) -> None:
    """A pickle of another Python runs from its source, and that is what is registered."""
    source = replace(SOURCE, python="3.1")
    string = PickledProcessor(b"another Python's", python="3.1", source=source, name="Claimed")

    async def scenario() -> None:
        engine = make_engine()
        assert await engine.register(string) == (SOURCE.digest, "Force")
        with pytest.raises(BadRequest, match=f"no processor {string.digest} is registered"):
            await generate(engine, RegisteredProcessor(string.digest), {})

    run(scenario())


@pytest.mark.parametrize("limits", [{"processor_cache_entries": 2}, {"processor_cache_bytes": 2 * len(FORCE) + 20}])
def test_what_was_dropped_is_refused_and_says_so(make_engine: BuildEngine, limits: dict[str, int]) -> None:
    async def scenario() -> None:
        engine = make_engine(**limits)
        digests = [(await engine.register(variant(number)))[0] for number in range(2)]
        await generate(engine, RegisteredProcessor(digests[0]), {"token_id": 4})
        digests.append((await engine.register(variant(2)))[0])
        for digest in (digests[0], digests[2]):
            assert (await generate(engine, RegisteredProcessor(digest), {"token_id": 42}))[0] == [42, 42, 42]
        with pytest.raises(BadRequest, match=r"dropped to make room for others\. Register it again") as refused:
            await generate(engine, RegisteredProcessor(digests[1]), {"token_id": 42})
        assert refused.value.param == "processors[0]"
        await engine.register(variant(1))
        assert (await generate(engine, RegisteredProcessor(digests[1]), {"token_id": 42}))[0] == [42, 42, 42]

    run(scenario())


def test_what_does_not_load_is_not_registered(make_engine: BuildEngine) -> None:
    broken = SourceProcessor("raise RuntimeError('no such luck')", "Force")

    async def scenario() -> None:
        engine = make_engine()
        for string in (broken, PickledProcessor(b"no pickle"), InstalledProcessor("nothing")):
            with pytest.raises(BadRequest) as refused:
                await engine.register(string)
            assert refused.value.param is None
        with pytest.raises(BadRequest, match="is registered"):
            await generate(engine, RegisteredProcessor(broken.digest), {})
        await engine.register(SOURCE)

    run(scenario())


def test_an_installed_processor_by_reference(make_engine: BuildEngine) -> None:
    """Ships no code, so that its digest needs no flag either."""
    string = parse(DisallowedTokensLogitsProcessor.to_str())

    async def scenario() -> None:
        engine = make_engine()
        digest, name = await engine.register(string)
        assert name == "disallowed_tokens"
        assert not engine.ships_code(RegisteredProcessor(digest))
        plain, _ = await generate(engine, RegisteredProcessor(digest), {"token_ids": []})
        tokens, (receipt,) = await generate(engine, RegisteredProcessor(digest), {"token_ids": plain})
        assert not set(tokens) & set(plain)
        assert receipt.digest == digest
        with pytest.raises(BadRequest) as refused:
            await generate(engine, RegisteredProcessor(digest), {"token_ids": "all"})
        assert refused.value.param == "processors[0].params"

    run(scenario())


def test_an_engine_that_ends_registers_nothing(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        await engine.shutdown(1)
        with pytest.raises(ServiceUnavailable, match="shutting down"):
            await engine.register(SOURCE)

    run(scenario())
