"""A digest that the operator blocks while its requests run: they end within a second, and others do not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from logitship.client.serialization.processor_string import RegisteredProcessor, SourceProcessor
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest, Forbidden
from tests.helpers.engine_requests import BuildEngine, Output, generate, request
from tests.helpers.processors import shipped

HOSTILE = shipped("Hostile", "logits[:, 100] = 1e4\nreturn logits")
HANGS = shipped("Hangs", "while True: pass")
OTHER = shipped("Other", "logits[:, 101] = 1e4\nreturn logits")
LIMIT = 1.0
"""Seconds until the requests have ended."""
LONG = 400
"""Tokens, which take longer than that."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "blocked"
    path.touch()
    return path


def engine_of(make_engine: BuildEngine, file: Path, **settings: Any) -> AsyncEngine:
    return make_engine(
        enable_custom_logit_processor=True,
        blocked_digests=str(file),
        processor_isolation="sandbox",
        max_num_seqs=4,
        sandbox_step_timeout=20.0,
        sandbox_first_step_timeout=20.0,
        **settings,
    )


async def first_chunk(engine: AsyncEngine, rid: str, string: SourceProcessor, tenant: str = "") -> Any:
    """Start a long request, and return its chunks once there is one."""
    stream = await engine.submit(request(rid, processors=[(string, None)], max_tokens=LONG, tenant=tenant))
    chunks = aiter(stream)
    return chunks, await anext(chunks)


async def rest(chunks: Any) -> Output:
    return Output([chunk async for chunk in chunks])


def block(file: Path, *strings: SourceProcessor) -> float:
    file.write_text("".join(f"{each.digest}\n" for each in strings))
    return time.perf_counter()


def assert_blocked(output: Output, string: SourceProcessor) -> None:
    assert output.error.type == "ProcessorFault"
    assert output.error.kind == "blocked"
    assert output.error.status_code == 403
    assert output.error.digest == string.digest
    assert output.error.message == f"processor {string.class_name} was blocked by the server's operator"


def test_running_requests_end(make_engine: BuildEngine, file: Path) -> None:
    """Blocking is for all tenants. Requests with other classes go on."""
    engine = engine_of(make_engine, file)

    async def scenario() -> None:
        hostile = [(await first_chunk(engine, f"h{tenant}", HOSTILE, tenant))[0] for tenant in ("one", "two")]
        other, first = await first_chunk(engine, "other", OTHER)
        since = block(file, HOSTILE)
        for output in await asyncio.gather(*map(rest, hostile)):
            assert_blocked(output, HOSTILE)
        assert time.perf_counter() - since < LIMIT
        output = await rest(other)
        assert {*first.token_ids, *output.token_ids} == {101}
        assert len(first.token_ids) + len(output.token_ids) == LONG
        while engine.stats().sandboxes_ended.get("blocked") != 2:  # counted by the thread that watches sandboxes
            await asyncio.sleep(0.01)

    asyncio.run(scenario())


def test_step_that_hangs_in_it_ends(make_engine: BuildEngine, file: Path) -> None:
    engine = engine_of(make_engine, file)

    async def scenario() -> None:
        stream = await engine.submit(request("hangs", processors=[(HANGS, None)]))
        await asyncio.sleep(0.5)
        since = block(file, HANGS)
        assert_blocked(Output([chunk async for chunk in stream]), HANGS)
        assert time.perf_counter() - since < LIMIT
        assert (await generate(engine, request("next", max_tokens=2))).finish_reason.kind == "length"

    asyncio.run(scenario())


def test_new_requests_are_refused(make_engine: BuildEngine, file: Path) -> None:
    """By its string, by the digest of its registration, and when it is registered; until it is allowed again."""
    engine = engine_of(make_engine, file)
    message = f"the processor {HOSTILE.digest} is blocked by this server's operator"

    async def scenario() -> None:
        await engine.register(HOSTILE)
        block(file, HOSTILE)
        await asyncio.sleep(LIMIT)
        for string in (HOSTILE, RegisteredProcessor(HOSTILE.digest)):
            with pytest.raises(Forbidden, match=message):
                await engine.submit(request("new", processors=[(string, None)]))
        with pytest.raises(Forbidden, match=message):
            await engine.register(HOSTILE)
        assert (await generate(engine, request("other", processors=[(OTHER, None)]))).token_ids == [101] * 8
        block(file)
        await asyncio.sleep(LIMIT)
        assert (await generate(engine, request("again", processors=[(HOSTILE, None)]))).token_ids == [100] * 8

    asyncio.run(scenario())


def test_request_that_loads_when_it_is_blocked(make_engine: BuildEngine, file: Path) -> None:
    """It has no sequences yet that could be ended: its load is."""
    slow = SourceProcessor("import time\ntime.sleep(5)\n" + HOSTILE.source, "Hostile")
    engine = engine_of(make_engine, file)

    async def scenario() -> None:
        loading = asyncio.create_task(engine.submit(request("loads", processors=[(slow, None)])))
        await asyncio.sleep(0.5)
        since = block(file, slow)
        with pytest.raises(BadRequest, match="was blocked by the server's operator"):
            await loading
        assert time.perf_counter() - since < LIMIT
        with pytest.raises(Forbidden, match="is blocked by this server's operator"):
            await engine.submit(request("again", processors=[(slow, None)]))

    asyncio.run(scenario())
