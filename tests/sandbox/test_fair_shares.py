"""Sandboxed processors of one tenant do not hold up the steps of another. Not measured: what happens is counted."""

from __future__ import annotations

import asyncio

import pytest

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import ShareExceeded
from logitship.server.requests.messages import GenerationRequest
from tests.helpers.coroutines import run, until
from tests.helpers.engine_requests import BuildEngine, Output, generate
from tests.helpers.engine_requests import request as any_request
from tests.helpers.processors import shipped

STEPS = 4
LENGTH = 40

SLOW = """
# Take {seconds} s, and force the number of tokens so far: each call must come once, and in order.
import time
time.sleep({seconds})
for row, params in zip(logits, custom_param_list):
    req = params["__req__"]
    calls = req.state.get("calls", 0)
    assert calls == len(req.output_ids)
    req.state["calls"] = calls + 1
    row[:] = -torch.inf
    row[10 + calls] = 0.0
return logits
"""


def slow(seconds: float, number: int = 0) -> SourceProcessor:
    return shipped(f"Slow{number}", SLOW.format(seconds=seconds))


def request(rid: str, tenant: str, length: int, *processors: SourceProcessor) -> GenerationRequest:
    pairs = [(each, None) for each in processors]
    return any_request(rid, [5, 6, 7], pairs, tenant=tenant, max_tokens=length, temperature=0)


async def tokens(engine: AsyncEngine, rid: str, tenant: str, length: int, *processors: SourceProcessor) -> list[int]:
    return (await generate(engine, request(rid, tenant, length, *processors))).token_ids


@pytest.fixture
def engine(make_engine: BuildEngine) -> AsyncEngine:
    """Slow processors may take as long as they need."""
    return make_engine(processor_isolation="sandbox", max_num_seqs=8, sandbox_step_timeout=60.0, tenant_step_share=1.0)


def test_many_tokens_while_a_processor_takes_its_time(engine: AsyncEngine) -> None:
    async def beside() -> tuple[list[int], int, Output]:
        alone = await tokens(engine, "alone", "a", LENGTH)
        first = await engine.submit(request("first", "a", 500))
        await anext(aiter(first))
        held = asyncio.create_task(generate(engine, request("slow", "b", STEPS, slow(3.0))))
        await until(lambda: engine.stats().deferred_calls)
        deferred = engine.stats().deferred_calls
        assert await tokens(engine, "honest", "a", LENGTH) == alone
        deferred = engine.stats().deferred_calls - deferred
        await first.aclose()
        return alone, deferred, await held

    _, deferred, held = run(beside(), timeout=240)
    # Forty steps, and the slow processor held up at most a few of them for a moment.
    assert deferred < STEPS
    assert held.token_ids == [10, 11, 12, 13]
    assert [receipt.steps for receipt in held.receipts] == [STEPS]


def test_several_slow_processors_in_stages(engine: AsyncEngine) -> None:
    """Each of a request's processors is called once for each token, though steps wait for none of them."""
    stages = [slow(0.2, number) for number in range(3)]

    async def beside() -> list[int]:
        first = await engine.submit(request("endless", "a", 500))
        await anext(aiter(first))
        found = await tokens(engine, "slow", "b", 3, *stages)
        await first.aclose()
        return found

    assert run(beside(), timeout=240) == [10, 11, 12]
    assert engine.stats().deferred_calls > 0


def test_spinners_of_another_tenant_do_not_end_an_honest_processor(make_engine: BuildEngine) -> None:
    """Thirty-two processors never return from a call, on all cores. Each is killed at its deadline."""
    timeouts = {"sandbox_step_timeout": 0.2, "sandbox_first_step_timeout": 0.2}
    engine = make_engine(processor_isolation="sandbox", max_num_seqs=40, **timeouts)
    spinning = [shipped(f"Spinner{number}", "while True: pass") for number in range(32)]

    async def beside() -> tuple[list[int], list[Output]]:
        held = [asyncio.create_task(generate(engine, request(each.class_name, "b", 3, each))) for each in spinning]
        honest: list[int] = []
        while not all(one.done() for one in held):
            honest = await tokens(engine, "honest", "a", 10, slow(0.005))
            assert honest == list(range(10, 20))
        # Counted once the process is gone, after its client knows.
        await until(lambda: sum(engine.stats().sandboxes_ended.values()) >= len(spinning))
        return honest, [await one for one in held]

    honest, spun = run(beside(), timeout=240)
    assert honest
    assert all(output.finish_reason.error for output in spun)
    assert engine.stats().sandboxes_ended == {"deadline": len(spinning)}


def test_tenant_over_its_share_is_refused_code_but_not_generation(make_engine: BuildEngine) -> None:
    engine = make_engine(processor_isolation="sandbox", sandbox_step_timeout=60.0, tenant_step_share=1e-4)

    async def over() -> None:
        first = await engine.submit(request("endless", "a", 400, slow(0.5, 9)))
        await anext(aiter(first))
        assert await tokens(engine, "slow", "b", 3, slow(0.2)) == [10, 11, 12]
        with pytest.raises(ShareExceeded, match="--tenant-step-share") as refused:
            await engine.submit(request("again", "b", 3, slow(0.2)))
        assert refused.value.retry_after > 1
        assert len(await tokens(engine, "plain", "b", 3)) == 3
        await first.aclose()
        async for _ in first:
            pass
        # Nobody is there to wait for it.
        assert await tokens(engine, "alone", "b", 3, slow(0.0, 1)) == [10, 11, 12]

    run(over(), timeout=240)
    assert engine.stats().tenant_step_seconds["b"] > 0.5
