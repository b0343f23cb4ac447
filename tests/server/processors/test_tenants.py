"""Isolation of tenants: they share the engine and its queue, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, Forbidden
from logitship.server.requests.messages import FinishReason, GenerationChunk, GenerationRequest, ProcessorRequest

BuildEngine = Callable[..., AsyncEngine]

COUNTS = SourceProcessor(
    """
from logitship import CustomLogitProcessor

class Counts(CustomLogitProcessor):
    '''Forces a token with the number of rows that this class has seen.'''
    seen = 10
    def __call__(self, logits, custom_param_list=None):
        for row in logits:
            row[:] = -float("inf")
            row[Counts.seen] = 0.0
            Counts.seen += 1
        return logits
""",
    "Counts",
)


def request(rid: str, tenant: str, string: ProcessorString | None = None, **fields: Any) -> GenerationRequest:
    """Return a request for three tokens, or `max_tokens`."""
    max_tokens = fields.pop("max_tokens", 3)
    return GenerationRequest(
        rid=rid,
        tenant=tenant,
        prompt_token_ids=[10, 11],
        sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        processors=() if string is None else (ProcessorRequest(string),),
        **fields,
    )


async def tokens_of(chunks: AsyncIterator[GenerationChunk]) -> tuple[list[int], FinishReason | None]:
    """Return the tokens of the first continuation, and its finish reason."""
    tokens: list[int] = []
    reason = None
    async for chunk in chunks:
        if chunk.index == 0:
            tokens += chunk.token_ids
            reason = chunk.finish_reason or reason
    return tokens, reason


async def generate(engine: AsyncEngine, wanted: GenerationRequest) -> list[int]:
    return (await tokens_of(aiter(await engine.submit(wanted))))[0]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(120):
            return await coroutine

    return asyncio.run(bounded())


def test_class_attributes_are_not_shared_between_tenants(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        assert await generate(engine, request("r", "one", COUNTS)) == [10, 11, 12]
        assert await generate(engine, request("r", "two", COUNTS)) == [10, 11, 12]
        assert await generate(engine, request("r", "one", COUNTS)) == [13, 14, 15]
        assert engine.stats().processor_cache_entries == 2

    run(scenario())


def test_class_attributes_are_not_shared_within_a_step(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        await engine.register(COUNTS, "one")
        strings = {"one": InstalledProcessor("Counts"), "two": RegisteredProcessor(COUNTS.digest), "": COUNTS}
        answers = await asyncio.gather(
            *(generate(engine, request("r", tenant, string)) for tenant, string in strings.items())
        )
        assert answers == [[10, 11, 12]] * 3

    run(scenario())


def test_tenants_may_use_the_same_request_id(make_engine: BuildEngine) -> None:
    async def scenario() -> None:
        engine = make_engine()
        streams = [await engine.submit(request("r", tenant, max_tokens=5 + i)) for i, tenant in enumerate(["", "a"])]
        with pytest.raises(BadRequest, match="'r' is running already"):
            await engine.submit(request("r", "a"))
        answers = [await tokens_of(aiter(stream)) for stream in streams]
        assert [len(tokens) for tokens, _ in answers] == [5, 6]
        assert await engine.flush_cache()  # no request is left

    run(scenario())


@pytest.mark.parametrize("rid", ["r", "batch", "r_1", None])
def test_abort_affects_its_tenant_only(rid: str | None, make_engine: BuildEngine) -> None:
    """Abort by the ids of the request, its batch and one continuation, and abort all."""
    fields: dict[str, Any] = {"n": 2, "batch_rid": "batch", "max_tokens": 100}

    async def scenario() -> None:
        engine = make_engine()
        streams = [await engine.submit(request("r", tenant, **fields)) for tenant in ("one", "two")]
        engine.abort(rid, "three")
        engine.abort(rid)
        engine.abort(rid, "one")

        async def reasons(stream: Any) -> dict[int, FinishReason]:
            return {chunk.index: chunk.finish_reason async for chunk in stream if chunk.finish_reason}

        one, two = await asyncio.gather(*map(reasons, streams))
        aborted = {1} if rid == "r_1" else {0, 1}
        assert {index for index, reason in one.items() if reason == FinishReason("abort")} == aborted
        assert two == {0: FinishReason("length"), 1: FinishReason("length")}

    run(scenario())


def test_abort_while_loading_affects_its_tenant_only(make_engine: BuildEngine, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.002)\n"
    slow = SourceProcessor(wait + COUNTS.source, "Counts")

    async def scenario() -> None:
        engine = make_engine()

        async def end(tenant: str) -> FinishReason | None:
            return (await tokens_of(aiter(await engine.submit(request("r", tenant, slow, max_tokens=100)))))[1]

        running = [asyncio.create_task(end(tenant)) for tenant in ("one", "two")]
        await asyncio.sleep(0)  # both are admitted now and wait for the file
        engine.abort("r", "one")
        go.touch()
        assert await asyncio.gather(*running) == [FinishReason("abort"), FinishReason("length")]

    run(scenario())


def test_allow_list(make_engine: BuildEngine, tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"{COUNTS.digest}  # counts rows\n")
    other = SourceProcessor(COUNTS.source + "# more", "Counts")

    async def scenario() -> None:
        engine = make_engine(allow_processor=str(file))
        assert await generate(engine, request("r", "", COUNTS)) == [10, 11, 12]
        with pytest.raises(Forbidden, match=f"the processor {other.digest} .*--allow-processor") as refused:
            await generate(engine, request("r", "", other))
        assert refused.value.param == "processors[0]"
        with pytest.raises(Forbidden) as refused:
            await engine.register(other)
        assert refused.value.param is None
        assert await engine.flush_cache()  # the refused request holds nothing

    run(scenario())
