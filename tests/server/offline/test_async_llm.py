from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest
import torch

from logitship import ProcessorFault
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.offline.async_llm import AsyncLLM
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams
from logitship.server.refusals import QueueFull
from tests.helpers.offline import FOREVER, GREEDY

MakeAsyncLLM = Callable[..., AsyncLLM]


async def outputs_of(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return (await outputs_of(outputs))[-1]


async def assert_idle(llm: AsyncLLM) -> None:
    await last(llm.generate("still here", GREEDY))
    stats = llm._engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_outputs_are_cumulative_and_immutable(make_async_llm: MakeAsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    outputs = asyncio.run(outputs_of(make_async_llm().generate("hello", params, request_id="mine")))
    assert {output.request_id for output in outputs} == {"mine"}
    assert [output.finished for output in outputs] == [False] * 7 + [True]
    final = outputs[-1].outputs[0]
    for count, output in enumerate(outputs, start=1):
        completion = output.outputs[0]
        assert completion.token_ids == final.token_ids[:count]
        assert final.text.startswith(completion.text)
        assert completion.logprobs == (final.logprobs or [])[:count]
        assert completion.finished() == (count == 8)


def test_same_outputs_as_llm(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine()
    (expected,) = LLM._from_engine(engine).generate("hello", GREEDY, use_tqdm=False)
    engine = make_engine()
    output = asyncio.run(last(AsyncLLM._from_engine(engine).generate("hello", GREEDY)))
    assert output.outputs == expected.outputs


def test_n_continuations(make_async_llm: MakeAsyncLLM) -> None:
    params = SamplingParams(n=2, seed=1, max_tokens=4, ignore_eos=True)
    outputs = asyncio.run(outputs_of(make_async_llm().generate("hello", params)))
    assert all([completion.index for completion in output.outputs] == [0, 1] for output in outputs)
    assert [len(completion.token_ids) for completion in outputs[-1].outputs] == [4, 4]
    assert [output.finished for output in outputs].count(True) == 1


async def test_closing_the_generator_cancels(make_async_llm: MakeAsyncLLM) -> None:
    llm = make_async_llm()
    async with aclosing(llm.generate("hello", FOREVER)) as outputs:
        async for _ in outputs:
            break
    await assert_idle(llm)


def test_cancelling_the_task_cancels(make_async_llm: MakeAsyncLLM) -> None:
    async def main() -> None:
        llm = make_async_llm()
        started = asyncio.Event()

        async def run() -> None:
            async with aclosing(llm.generate("hello", FOREVER)) as outputs:
                async for _ in outputs:
                    started.set()

        task = asyncio.create_task(run())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("ids", ["mine", ["other", "mine"]])
async def test_abort_yields_last_output(make_async_llm: MakeAsyncLLM, ids: str | list[str]) -> None:
    llm = make_async_llm()
    outputs = []
    async for output in llm.generate("hello", FOREVER, request_id="mine"):
        if not outputs:
            await llm.abort(ids)
        outputs.append(output)
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs) < 100


async def test_abort_of_a_waiting_request(make_async_llm: MakeAsyncLLM) -> None:
    llm = make_async_llm(max_num_seqs=2, max_queued_requests=0)
    two = SamplingParams(n=2, ignore_eos=True)
    async with aclosing(llm.generate("hello", FOREVER, request_id="first")) as outputs:
        await anext(outputs)

        async def until_waiting(number: int) -> None:
            while len(llm._runner._semaphore._waiters) < number:
                await asyncio.sleep(0.001)

        waiting = asyncio.create_task(last(llm.generate("hello", two, request_id="mine")))
        await asyncio.wait_for(until_waiting(1), 60)
        # It has a free slot, but is not the first to wait.
        behind = asyncio.create_task(last(llm.generate("hello", GREEDY)))
        await asyncio.wait_for(until_waiting(2), 60)
        await llm.abort("mine")
        output = await asyncio.wait_for(waiting, 60)
        assert output.finished
        assert [(each.text, each.finish_reason) for each in output.outputs] == [("", "abort")] * 2
        # The first still runs.
        assert (await behind).outputs[0].finish_reason == "length"
        assert not (await anext(outputs)).finished
    await assert_idle(llm)


async def test_abort_during_tokenization(make_async_llm: MakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_async_llm()
    started, aborted = threading.Event(), threading.Event()
    build = llm._requests.build

    def paused_build(*args: Any, **kwargs: Any) -> Any:
        started.set()
        assert aborted.wait(60)
        return build(*args, **kwargs)

    monkeypatch.setattr(llm._requests, "build", paused_build)
    task = asyncio.create_task(outputs_of(llm.generate("hello", FOREVER, request_id="mine")))
    assert await asyncio.to_thread(started.wait, 60)
    await llm.abort("mine")
    aborted.set()
    (output,) = await task
    assert output.outputs[0].finish_reason == "abort"
    assert llm._engine.stats().steps == 0


def test_abort_between_attempts_to_submit(make_async_llm: MakeAsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's queue may be full for a moment after a slot is free."""
    llm = make_async_llm()
    submit = llm._engine.submit
    attempts = 0

    async def full_once(*args: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await llm.abort("mine")
            raise QueueFull("the test's")
        return await submit(*args)

    monkeypatch.setattr(llm._engine, "submit", full_once)
    outputs = asyncio.run(outputs_of(llm.generate("hello", FOREVER, request_id="mine")))
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert len(outputs) < 100


async def test_duplicate_request_id(make_async_llm: MakeAsyncLLM) -> None:
    llm = make_async_llm()
    async with aclosing(llm.generate("hello", FOREVER, request_id="mine")) as outputs:
        await anext(outputs)
        with pytest.raises(InvalidRequest, match="request_id: a request 'mine' is running already") as caught:
            await last(llm.generate("hello", GREEDY, request_id="mine"))
        assert caught.value.param == "request_id"
    await assert_idle(llm)


async def test_full_queue_waits(make_async_llm: MakeAsyncLLM) -> None:
    llm = make_async_llm(max_num_seqs=2, max_queued_requests=0)
    params = SamplingParams(n=2, temperature=0, max_tokens=2, ignore_eos=True)
    outputs = await asyncio.gather(*(last(llm.generate([10 + i], params)) for i in range(20)))
    assert [output.prompt_token_ids for output in outputs] == [[10 + i] for i in range(20)]
    assert all(len(completion.token_ids) == 2 for output in outputs for completion in output.outputs)


async def test_cancelled_request_frees_queue(make_async_llm: MakeAsyncLLM) -> None:
    """Its slot is free at once; the engine counts it for another step."""
    llm = make_async_llm(max_num_seqs=1, max_queued_requests=0)
    for _ in range(5):
        async with aclosing(llm.generate("hello", FOREVER)) as outputs:
            await anext(outputs)
    await assert_idle(llm)


def test_works_with_several_event_loops(make_async_llm: MakeAsyncLLM) -> None:
    llm = make_async_llm(max_num_seqs=1, max_queued_requests=0)

    async def main() -> list[RequestOutput]:
        return await asyncio.gather(*(last(llm.generate("hello", GREEDY)) for _ in range(3)))

    first, second = asyncio.run(main()), asyncio.run(main())
    assert [output.outputs for output in first] == [output.outputs for output in second]


async def test_context_manager_shuts_down(make_async_llm: MakeAsyncLLM) -> None:
    async with make_async_llm() as llm:
        thread: threading.Thread = llm._engine._thread._thread
        await last(llm.generate("hello", GREEDY))
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="this AsyncLLM was shut down"):
        await last(llm.generate("hello", GREEDY))
    llm.shutdown()


@pytest.mark.parametrize("prompt", [["a", "b"], 7, None])
def test_list_of_prompts_is_refused(make_async_llm: MakeAsyncLLM, prompt: Any) -> None:
    with pytest.raises(TypeError, match="prompt: expected a string or a list of token ids"):
        asyncio.run(last(make_async_llm().generate(prompt, GREEDY)))


async def test_fault_ends_only_its_request(make_async_llm: MakeAsyncLLM) -> None:
    def fails(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(output_token_ids) == 2:
            raise ZeroDivisionError("no such luck")
        return logits

    llm = make_async_llm()
    failing = SamplingParams(max_tokens=8, ignore_eos=True, logits_processors=[fails])
    fault, fine = await asyncio.gather(
        last(llm.generate("hello", failing)), last(llm.generate("hello", GREEDY)), return_exceptions=True
    )
    assert isinstance(fault, ProcessorFault)
    assert "no such luck" in fault.message
    assert isinstance(fine, RequestOutput)
    assert len(fine.outputs[0].token_ids) == 8
    await assert_idle(llm)
