"""Sandboxed processors of one tenant do not hold up the steps of another. Not measured: what happens is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import ShareExceeded
from logitship.server.requests.messages import GenerationChunk, GenerationRequest, ProcessorRequest

BuildEngine = Callable[..., AsyncEngine]
STEPS = 4
LENGTH = 40

SLOW = """
import time
from logitship import CustomLogitProcessor

class Slow{number}(CustomLogitProcessor):
    '''Takes {seconds} s, and forces the number of tokens so far: each call must come once, and in order.'''
    def __call__(self, logits, custom_param_list=None):
        time.sleep({seconds})
        for row, params in zip(logits, custom_param_list):
            req = params["__req__"]
            calls = req.state.get("calls", 0)
            assert calls == len(req.output_ids)
            req.state["calls"] = calls + 1
            row[:] = -float("inf")
            row[10 + calls] = 0.0
        return logits
"""

SPINNER = """
from logitship import CustomLogitProcessor

class Spinner{number}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        while True:
            pass
"""


def slow(seconds: float, number: int = 0) -> SourceProcessor:
    return SourceProcessor(SLOW.format(seconds=seconds, number=number), f"Slow{number}")


def spinner(number: int) -> SourceProcessor:
    return SourceProcessor(SPINNER.format(number=number), f"Spinner{number}")


def request(rid: str, tenant: str, length: int, *processors: SourceProcessor) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        tenant=tenant,
        prompt_token_ids=[5, 6, 7],
        processors=tuple(map(ProcessorRequest, processors)),
        sampling_params=SamplingParams(max_tokens=length, temperature=0, ignore_eos=True),
    )


async def generate(engine: AsyncEngine, wanted: GenerationRequest) -> list[GenerationChunk]:
    return [chunk async for chunk in await engine.submit(wanted)]


def tokens(chunks: list[GenerationChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(240):
            return await coroutine

    return asyncio.run(bounded())


@pytest.fixture
def engine(make_engine: BuildEngine) -> AsyncEngine:
    """Slow processors may take as long as they need."""
    return make_engine(processor_isolation="sandbox", max_num_seqs=8, sandbox_step_timeout=60.0, tenant_step_share=1.0)


def test_many_tokens_while_a_processor_takes_its_time(engine: AsyncEngine) -> None:
    async def beside() -> tuple[list[int], int, list[GenerationChunk]]:
        alone = tokens(await generate(engine, request("alone", "a", LENGTH)))
        first = await engine.submit(request("first", "a", 500))
        await anext(aiter(first))
        held = asyncio.create_task(generate(engine, request("slow", "b", STEPS, slow(3.0))))
        while engine.stats().deferred_calls == 0:
            await asyncio.sleep(0.01)
        deferred = engine.stats().deferred_calls
        assert tokens(await generate(engine, request("honest", "a", LENGTH))) == alone
        deferred = engine.stats().deferred_calls - deferred
        await first.aclose()
        return alone, deferred, await held

    _, deferred, held = run(beside())
    # Forty steps, and the slow processor held up at most a few of them for a moment.
    assert deferred < STEPS
    assert tokens(held) == [10, 11, 12, 13]
    assert [receipt.steps for receipt in held[-1].receipts] == [STEPS]


def test_several_slow_processors_in_stages(engine: AsyncEngine) -> None:
    """Each of a request's processors is called once for each token, though steps wait for none of them."""
    stages = [slow(0.2, number) for number in range(3)]

    async def beside() -> list[int]:
        first = await engine.submit(request("endless", "a", 500))
        await anext(aiter(first))
        found = tokens(await generate(engine, request("slow", "b", 3, *stages)))
        await first.aclose()
        return found

    assert run(beside()) == [10, 11, 12]
    assert engine.stats().deferred_calls > 0


def test_spinners_of_another_tenant_do_not_end_an_honest_processor(make_engine: BuildEngine) -> None:
    """Thirty-two processors never return from a call, on all cores. Each is killed at its deadline."""
    timeouts = {"sandbox_step_timeout": 0.2, "sandbox_first_step_timeout": 0.2}
    engine = make_engine(processor_isolation="sandbox", max_num_seqs=40, **timeouts)
    spinning = [spinner(number) for number in range(32)]

    def num_ended() -> int:
        return sum(engine.stats().sandboxes_ended.values())

    async def beside() -> tuple[list[int], list[GenerationChunk]]:
        held = [asyncio.create_task(generate(engine, request(each.class_name, "b", 3, each))) for each in spinning]
        honest: list[int] = []
        while not all(one.done() for one in held):
            honest = tokens(await generate(engine, request("honest", "a", 10, slow(0.005))))
            assert honest == list(range(10, 20))
        while num_ended() < len(spinning):  # counted once the process is gone, after its client knows
            await asyncio.sleep(0.01)
        return honest, [(await one)[-1] for one in held]

    honest, spun = run(beside())
    assert honest
    assert all(chunk.finish_reason and chunk.finish_reason.error for chunk in spun)
    assert engine.stats().sandboxes_ended == {"deadline": len(spinning)}


def test_tenant_over_its_share_is_refused_code_but_not_generation(make_engine: BuildEngine) -> None:
    engine = make_engine(processor_isolation="sandbox", sandbox_step_timeout=60.0, tenant_step_share=1e-4)

    async def over() -> None:
        first = await engine.submit(request("endless", "a", 400, slow(0.5, 9)))
        await anext(aiter(first))
        assert tokens(await generate(engine, request("slow", "b", 3, slow(0.2)))) == [10, 11, 12]
        with pytest.raises(ShareExceeded, match="--tenant-step-share") as refused:
            await engine.submit(request("again", "b", 3, slow(0.2)))
        assert refused.value.retry_after > 1
        assert len(tokens(await generate(engine, request("plain", "b", 3)))) == 3
        await first.aclose()
        async for _ in first:
            pass
        # Nobody is there to wait for it.
        assert tokens(await generate(engine, request("alone", "b", 3, slow(0.0, 1)))) == [10, 11, 12]

    run(over())
    assert engine.stats().tenant_step_seconds["b"] > 0.5
