"""Isolation of tenants: they share the engine and its queue, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, Forbidden
from logitship.server.requests.messages import FinishReason, GenerationRequest
from tests.helpers.engine_requests import BuildEngine, Output, generate
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped

COUNTS = shipped(
    "Counts",
    """
    # Force a token with the number of rows that this class has seen.
    for row in logits:
        row[:] = -torch.inf
        row[getattr(Counts, "seen", 10)] = 0.0
        Counts.seen = getattr(Counts, "seen", 10) + 1
    return logits
    """,
)


def request(tenant: str, string: ProcessorString | None = None, **fields: Any) -> GenerationRequest:
    processors = [] if string is None else [(string, None)]
    return any_request("r", [10, 11], processors, tenant=tenant, **({"temperature": 0, "max_tokens": 3} | fields))


async def tokens(engine: AsyncEngine, tenant: str, string: ProcessorString) -> list[int]:
    return (await generate(engine, request(tenant, string))).token_ids


async def test_class_attributes_are_not_shared_between_tenants(make_engine: BuildEngine) -> None:
    engine = make_engine()
    assert await tokens(engine, "one", COUNTS) == [10, 11, 12]
    assert await tokens(engine, "two", COUNTS) == [10, 11, 12]
    assert await tokens(engine, "one", COUNTS) == [13, 14, 15]
    assert engine.stats().processor_cache_entries == 2


async def test_class_attributes_are_not_shared_within_a_step(make_engine: BuildEngine) -> None:
    engine = make_engine()
    await engine.register(COUNTS, "one")
    strings = {"one": InstalledProcessor("Counts"), "two": RegisteredProcessor(COUNTS.digest), "": COUNTS}
    answers = await asyncio.gather(*(tokens(engine, *each) for each in strings.items()))
    assert answers == [[10, 11, 12]] * 3


async def test_tenants_may_use_the_same_request_id(make_engine: BuildEngine) -> None:
    engine = make_engine()
    streams = [await engine.submit(request(tenant, max_tokens=5 + i)) for i, tenant in enumerate(["", "a"])]
    with pytest.raises(BadRequest, match="'r' is running already"):
        await engine.submit(request("a"))
    chunks = [[chunk async for chunk in stream] for stream in streams]
    assert [len(Output(each).token_ids) for each in chunks] == [5, 6]
    assert await engine.flush_cache()  # no request is left


@pytest.mark.parametrize("rid", ["r", "batch", "r_1", None])
async def test_abort_affects_its_tenant_only(rid: str | None, make_engine: BuildEngine) -> None:
    """Abort by the ids of the request, its batch and one continuation, and abort all."""
    fields: dict[str, Any] = {"n": 2, "batch_rid": "batch", "max_tokens": 100}
    engine = make_engine()
    streams = [await engine.submit(request(tenant, **fields)) for tenant in ("one", "two")]
    engine.abort(rid, "three")
    engine.abort(rid)
    engine.abort(rid, "one")

    async def reasons(stream: Any) -> dict[int, FinishReason]:
        return {chunk.index: chunk.finish_reason async for chunk in stream if chunk.finish_reason}

    one, two = await asyncio.gather(*map(reasons, streams))
    aborted = {1} if rid == "r_1" else {0, 1}
    assert {index for index, reason in one.items() if reason == FinishReason("abort")} == aborted
    assert two == {0: FinishReason("length"), 1: FinishReason("length")}


async def test_abort_while_loading_affects_its_tenant_only(make_engine: BuildEngine, tmp_path: Path) -> None:
    go = tmp_path / "go"
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.002)\n"
    slow = SourceProcessor(wait + COUNTS.source, "Counts")
    engine = make_engine()
    wanted = [request(tenant, slow, max_tokens=100) for tenant in ("one", "two")]
    running = [asyncio.create_task(generate(engine, each)) for each in wanted]
    await asyncio.sleep(0)  # both are admitted now and wait for the file
    engine.abort("r", "one")
    go.touch()
    outputs = await asyncio.gather(*running)
    assert [output.finish_reason for output in outputs] == [FinishReason("abort"), FinishReason("length")]


async def test_allow_list(make_engine: BuildEngine, tmp_path: Path) -> None:
    file = tmp_path / "allowed"
    file.write_text(f"{COUNTS.digest}  # counts rows\n")
    other = SourceProcessor(COUNTS.source + "# more", "Counts")
    engine = make_engine(allow_processor=str(file))
    assert await tokens(engine, "", COUNTS) == [10, 11, 12]
    with pytest.raises(Forbidden, match=f"the processor {other.digest} .*--allow-processor") as refused:
        await tokens(engine, "", other)
    assert refused.value.param == "processors[0]"
    with pytest.raises(Forbidden) as refused:
        await engine.register(other)
    assert refused.value.param is None
    assert await engine.flush_cache()  # the refused request holds nothing
