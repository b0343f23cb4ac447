from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, SourceProcessor
from logitship.server.engine import async_engine
from logitship.server.engine.async_engine import _LARGE_BODY_MEMORY, AsyncEngine
from logitship.server.engine.engine import Engine
from logitship.server.engine.failures import STOPPED
from logitship.server.model.model_loader import LoadedModel
from logitship.server.model.model_runner import Chunk, ModelRunner
from logitship.server.refusals import BadRequest, QueueFull, ServiceUnavailable
from logitship.server.requests.body_limits import QueuedBytes
from logitship.server.requests.messages import FinishReason, GenerationRequest
from tests.helpers.coroutines import run, until
from tests.helpers.engine_requests import (
    BuildEngine,
    Output,
    generate,
    generate_all,
    generate_together,
    request,
)
from tests.helpers.processors import BOOST, COUNTDOWN, shipped, shipped_by_row

RAISES = shipped(
    "Raises",
    """
    if len(custom_param_list[0]["__req__"].output_ids) >= custom_param_list[0].get("after", 0):
        raise ValueError("no such luck")
    return logits
    """,
)
WRITE = shipped_by_row(
    "Write",
    """
    tokens = params["tokens"]
    row[:] = -torch.inf
    row[tokens[len(req.output_ids) % len(tokens)]] = 0.0
    """,
)
BAN = ((InstalledProcessor("disallowed_tokens"), {"token_ids": [5]}),)


def greedy_reference(loaded: LoadedModel, prompt: list[int], count: int) -> list[int]:
    """Recompute the whole sequence with transformers' own attention for every token.

    No token may win by so little that rounding decides: logits of about 10 differ by some 1e-6 between two
    implementations in float32.
    """
    loaded.model.set_attn_implementation("eager")
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            (best, second), (token, _) = loaded.model(torch.tensor([tokens])).logits[0, -1].topk(2)
            assert best - second > 1e-3, "take another prompt"
            tokens.append(int(token))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_greedy_output_equals_transformers(
    make_engine: BuildEngine, loaded_model: LoadedModel, float32_model: LoadedModel, dtype: torch.dtype
) -> None:
    """In float32, fused layers compute the model."""
    loaded = {torch.float64: loaded_model, torch.float32: float32_model}[dtype]
    prompts = [[4 + (7 * i + k) % 250 for k in range(length)] for i, length in enumerate((1, 5, 40, 100, 17, 64, 3))]
    expected = [greedy_reference(loaded, prompt, 12) for prompt in prompts]
    engine = make_engine(loaded, chunked_prefill_size=16)
    wanted = [request(f"r{i}", prompt, temperature=0, max_tokens=12) for i, prompt in enumerate(prompts)]
    assert [result.token_ids for result in run(generate_together(engine, wanted))] == expected


@pytest.mark.slow
def test_tokens_do_not_depend_on_batch_composition(make_engine: BuildEngine) -> None:
    def wanted(number: int) -> GenerationRequest:
        processors: tuple[tuple[ProcessorString, dict[str, Any] | None], ...] = ()
        if number % 3 == 1:
            processors = ((BOOST, {"token_id": 40 + number, "by": 4.0}),)
        if number % 3 == 2:
            processors = ((COUNTDOWN, None),)
        return request(
            f"r{number}",
            "some prompt " * (1 + number % 4),
            seed=number,
            temperature=0.7 + number % 5 / 4,
            top_p=(1.0, 0.9, 0.5)[number % 3],
            top_k=(-1, 5, 50, 1)[number % 4],
            min_p=(0.0, 0.05)[number % 2],
            frequency_penalty=(0.0, 0.5)[number % 2],
            max_tokens=3 + number % 11,
            processors=processors,
        )

    batched, alone = make_engine(), make_engine(max_num_seqs=1)
    together = run(generate_together(batched, map(wanted, range(24))))
    apart = [run(generate(alone, wanted(i))) for i in range(24)]
    assert [result.token_ids for result in together] == [result.token_ids for result in apart]
    assert [result.text for result in together] == [result.text for result in apart]


def test_continuations_differ_and_first_equals_n_1(make_engine: BuildEngine) -> None:
    engine = make_engine()
    first = run(generate_all(engine, request("a", n=6, seed=3)))
    again = run(generate_all(engine, request("b", n=6, seed=3)))
    single = run(generate(engine, request("c", seed=3)))
    assert len({tuple(result.token_ids) for result in first}) == 6
    assert [result.token_ids for result in first] == [result.token_ids for result in again]
    assert single.token_ids == first[0].token_ids


def test_requests_without_seed_differ(make_engine: BuildEngine) -> None:
    engine = make_engine()
    first, second = (run(generate(engine, request(rid))) for rid in ("a", "b"))
    assert first.token_ids != second.token_ids


async def test_closing_the_stream_frees_the_row_within_a_step(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    stream = await engine.submit(request("endless", max_tokens=400))
    chunks = aiter(stream)
    await anext(chunks)
    await stream.aclose()
    seen = engine.stats().steps
    last = [chunk async for chunk in chunks][-1]
    following = await generate(engine, request("next"))
    assert last.finish_reason == FinishReason("abort")
    # The step that was running when it was cancelled, and the one before the count, may have added a token.
    assert last.completion_tokens <= seen + 2
    assert len(following.token_ids) == 8
    assert engine.stats().running == engine.stats().waiting == 0


async def test_abort_waiting_request(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=1)
    running = asyncio.create_task(generate(engine, request("runs", max_tokens=400)))
    waiting = asyncio.create_task(generate(engine, request("waits")))
    await until(lambda: engine.stats().waiting == 1)
    engine.abort("waits")
    waited = await waiting
    engine.abort(None)
    ran = await running
    assert waited.finish_reason == ran.finish_reason == FinishReason("abort")
    assert waited.token_ids == []


async def test_abort_while_loading_a_processor(make_engine: BuildEngine, tmp_path: Path) -> None:
    engine = make_engine()
    go = tmp_path / "go"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.002)\n{BOOST.source}"
    wanted = request("r", max_tokens=400, processors=((SourceProcessor(slow, "Boost"), {"token_id": 9}),))
    loading = asyncio.create_task(generate(engine, wanted))
    await asyncio.sleep(0)  # admitted now; its processor waits for the file
    engine.abort("r")
    go.touch()
    result = await loading
    assert result.finish_reason == FinishReason("abort")
    assert len(result.token_ids) < 400


async def test_cancelled_requests_free_their_places_while_loading(make_engine: BuildEngine, tmp_path: Path) -> None:
    engine = make_engine()
    go = tmp_path / "go"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.002)\n{BOOST.source}"
    loading = [
        asyncio.create_task(
            engine.submit(request(f"r{number}", processors=((SourceProcessor(slow, "Boost"), {"token_id": 9}),)))
        )
        for number in range(20)
    ]
    registering = asyncio.create_task(engine.register(SourceProcessor(f"{slow}# 2", "Boost")))
    await asyncio.sleep(0)
    before = engine.stats()
    for task in (*loading, registering):
        task.cancel()
    await asyncio.gather(*loading, registering, return_exceptions=True)
    assert engine.stats().loads_waiting == engine.stats().loads_running == 0
    assert await engine.flush_cache(), "no request is active"
    go.touch()
    assert before.loads_running + before.loads_waiting == 2, "one class for all requests, and the registration"


@pytest.mark.parametrize("chunk_size", [4, 256])
def test_prompt_logprobs_without_output(make_engine: BuildEngine, chunk_size: int) -> None:
    engine = make_engine(chunked_prefill_size=chunk_size)
    prompt = list(range(10, 33))
    others_wanted = [request(f"b{i}", [40 + i], temperature=0, max_tokens=40) for i in range(2)]
    scoring = request("s", prompt, n=2, max_tokens=0, prompt_logprobs=1)
    one_token = request("t", prompt, max_tokens=1, prompt_logprobs=1)

    async def together() -> tuple[list[Output], list[Output]]:
        return await asyncio.gather(generate_all(engine, scoring), generate_together(engine, others_wanted))

    scored, others = run(together())
    expected = run(generate(engine, one_token))
    for result in scored:
        assert (result.token_ids, result.text) == ([], "")
        assert result.finish_reason == FinishReason("length")
        (chunk,) = result.chunks
        assert (chunk.prompt_tokens, chunk.completion_tokens, chunk.logprobs) == (23, 0, [])
        known = [position.logprob for position in expected.chunks[0].prompt_logprobs]
        assert [position.token_id for position in chunk.prompt_logprobs] == prompt
        assert [position.logprob for position in chunk.prompt_logprobs][1:] == pytest.approx(known[1:], abs=1e-4)
    alone = [run(generate(engine, each)) for each in others_wanted]
    assert [each.token_ids for each in others] == [each.token_ids for each in alone]
    assert engine.stats().running == engine.stats().waiting == 0


async def test_queue_is_bounded(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=1, max_queued_requests=2)
    streams = [await engine.submit(request(f"r{i}", max_tokens=400)) for i in range(3)]
    with pytest.raises(QueueFull):
        await engine.submit(request("one too many"))
    for stream in streams:
        await stream.aclose()
        async for _ in stream:
            pass
    await generate(engine, request("one too many"))


@pytest.fixture(scope="module")
def engine(make_module_engine: BuildEngine) -> AsyncEngine:
    """One engine for requests that it refuses."""
    return make_module_engine()


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (request(prompt=[]), "prompt"),
        (request(prompt=[260]), "prompt"),
        (request(prompt=[-1]), "prompt"),
        (request(prompt=[5] * 512), "prompt"),
        (request(n=0), "n"),
        (request(max_tokens=508), "max_tokens"),
        (request(max_tokens=None, min_tokens=508), "min_tokens"),
        (request(stop_regex=["a+"] * 33), "stop_regex"),
        (request(stop_regex=["(?<=a)b"]), "stop_regex"),
        (request(stop_token_ids=frozenset({260})), "stop_token_ids"),
        (request(logit_bias={-1: 1.0}), "logit_bias"),
        (request(allowed_token_ids=frozenset({999})), "allowed_token_ids"),
        (request(bad_words_token_ids=((1, 300),)), "bad_words"),
        (request(logprobs=21), "logprobs"),
        (request(prompt_logprobs=21), "prompt_logprobs"),
        (request(logprob_token_ids=[260]), "logprob_token_ids"),
        (request(logprob_token_ids=[5] * 21), "logprob_token_ids"),
        (request(prompt_logprobs=0, prompt_logprobs_start=5), "prompt_logprobs_start"),
        (request(processors=((SourceProcessor("x = (", "X"), None),)), "processors[0]"),
        (request(processors=((SourceProcessor("class X: pass", "X"), None),)), "processors[0]"),
        (request(processors=((InstalledProcessor("nonesuch"), None),)), "processors[0]"),
        (
            request(processors=((InstalledProcessor("disallowed_tokens"), {"token_ids": [260]}),)),
            "processors[0].params",
        ),
    ],
)
async def test_invalid_requests_are_refused(engine: AsyncEngine, wanted: GenerationRequest, param: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        await engine.submit(wanted)
    await generate(engine, request())  # the id is free again
    assert refusal.value.param == param


async def test_engine_loads_no_code_without_the_flag(make_engine: BuildEngine) -> None:
    engine = make_engine(enable_custom_logit_processor=False)
    code = SourceProcessor("raise SystemExit", "X")
    for string in (code, BOOST):
        with pytest.raises(BadRequest, match="Please set `--enable-custom-logit-processor`"):
            await engine.submit(request(processors=((string, None),)))
        with pytest.raises(BadRequest, match="Please set `--enable-custom-logit-processor`"):
            await engine.register(string)
    await generate(engine, request(processors=BAN))


async def test_duplicate_request_id_is_refused(make_engine: BuildEngine) -> None:
    engine = make_engine()
    stream = await engine.submit(request("same", max_tokens=400))
    with pytest.raises(BadRequest, match="running already"):
        await engine.submit(request("same"))
    await stream.aclose()


async def test_late_close_does_not_cancel_the_next_request_with_the_id(make_engine: BuildEngine) -> None:
    engine = make_engine()
    first = await engine.submit(request("same", max_tokens=1))
    await until(lambda: engine.stats().steps and not engine.stats().running)
    second = asyncio.create_task(generate(engine, request("same", max_tokens=100)))
    await until(lambda: engine.stats().running)
    await first.aclose()
    assert (await second).finish_reason == FinishReason("length")


def test_output_ends_at_the_model_length(make_engine: BuildEngine) -> None:
    result = run(generate(make_engine(), request(prompt=[5] * 500, max_tokens=None)))
    assert result.finish_reason == FinishReason("length")
    assert len(result.token_ids) == 12


def test_end_token(make_engine: BuildEngine) -> None:
    engine = make_engine()
    force: Any = {"logit_bias": {1: 1000.0}}
    stops = run(generate(engine, request("a", ignore_eos=False, **force)))
    ignores = run(generate(engine, request("b", **force)))
    later = run(generate(engine, request("c", ignore_eos=False, min_tokens=3, **force)))
    assert (stops.token_ids, stops.text, stops.finish_reason) == ([1], "", FinishReason("stop", 1))
    assert ignores.token_ids == [1] * 8
    assert len(later.token_ids) == 4
    assert later.finish_reason == FinishReason("stop", 1)


def writing(rid: str, text: str, engine: AsyncEngine, **params: Any) -> GenerationRequest:
    """Return a request whose processor makes the model write a text repeatedly."""
    return request(rid, processors=((WRITE, {"tokens": engine.tokenizer.encode(text)}),), **params)


def test_stop_strings_across_tokens(make_engine: BuildEngine) -> None:
    engine = make_engine()
    trimmed, second, included = (
        run(generate(engine, writing("a", "one END two", engine, max_tokens=100, **params)))
        for params in (
            {"stop": ("END",)},
            {"stop": ("zzz", "END")},
            {"stop": ("END",), "include_stop_str_in_output": True},
        )
    )
    assert trimmed.text == second.text == "one "
    assert included.text == "one END"
    assert trimmed.finish_reason == FinishReason("stop", "END")
    assert all("E" not in chunk.text for chunk in trimmed.chunks)


def test_stop_regex_of_each_continuation(make_engine: BuildEngine) -> None:
    engine = make_engine()

    def stopped(**params: Any) -> Output:
        return run(generate(engine, writing("a", "one END two", engine, max_tokens=100, **params)))

    result = stopped(stop_regex="x|E[A-Z]+D")
    assert [chunk.text for chunk in result.chunks] == list("one END")
    assert result.finish_reason == FinishReason("stop", "x|E[A-Z]+D")
    assert stopped(stop_regex="E[A-Z]+D", min_tokens=7).text == "one END twoone END"


def test_character_of_several_tokens(make_engine: BuildEngine) -> None:
    engine = make_engine()
    text = "naïve 🎉 日本"
    result = run(generate(engine, writing("a", text, engine, max_tokens=len(text.encode()))))
    assert result.text == text
    assert all("\ufffd" not in chunk.text for chunk in result.chunks)


def test_incomplete_character_is_emitted_at_the_end(make_engine: BuildEngine) -> None:
    engine = make_engine()
    result = run(generate(engine, writing("a", "ab🎉", engine, max_tokens=4)))
    assert result.text == "ab\ufffd"


@pytest.mark.parametrize("start", [0, 1, 17, 39])
def test_prompt_logprobs_equal_the_model(make_engine: BuildEngine, loaded_model: LoadedModel, start: int) -> None:
    prompt = [4 + (11 * k) % 250 for k in range(40)]
    loaded_model.model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = loaded_model.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    engine = make_engine(chunked_prefill_size=16)
    asking = {"prompt_logprobs": 2, "prompt_logprobs_start": start, "logprobs": 3, "logprob_token_ids": [9, 200, 9]}
    result = run(generate(engine, request(prompt=prompt, **asking)))
    records = result.chunks[0].prompt_logprobs
    assert [record.token_id for record in records] == prompt[start:]
    for position, record in enumerate(records, start):
        if position == 0:
            assert record.logprob is None
            continue
        assert record.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
        best = expected[position - 1].topk(2)
        assert [token for token, _ in record.top] == best.indices.tolist()
        assert [token for token, _ in record.requested] == [9, 200, 9]
        values = [float(expected[position - 1, token]) for token in (9, 200, 9)]
        assert [logprob for _, logprob in record.requested] == pytest.approx(values, abs=1e-4)
    first = result.chunks[0].logprobs[0].requested
    values = [float(expected[-1, token]) for token in (9, 200, 9)]
    assert [logprob for _, logprob in first] == pytest.approx(values, abs=1e-4)
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in result.chunks)
    assert len(result.chunks[0].logprobs[0].top) == 3


def test_processors_run_in_order_with_receipts(make_engine: BuildEngine) -> None:
    engine = make_engine()
    wanted = request(processors=((COUNTDOWN, None), (BOOST, {"token_id": 77, "by": 0.0})), temperature=0, max_tokens=5)
    result = run(generate(engine, wanted))
    assert result.token_ids == [5, 6, 7, 8, 9]  # the prompt has five tokens
    assert [(receipt.name, receipt.steps) for receipt in result.receipts] == [("Countdown", 5), ("Boost", 5)]
    assert result.receipts[0].digest == COUNTDOWN.digest


def test_fault_ends_only_its_request(make_engine: BuildEngine) -> None:
    engine = make_engine(max_num_seqs=8)

    def others() -> list[GenerationRequest]:
        boosted = ((BOOST, {"token_id": 50, "by": 3.0}),)
        return [request(f"r{i}", seed=i, processors=boosted if i % 2 else ()) for i in range(6)]

    without = run(generate_together(engine, others()))
    faulty = request("faulty", processors=((RAISES, {"after": 3}),))
    *with_fault, fault = run(generate_together(engine, [*others(), faulty]))
    assert [result.token_ids for result in with_fault] == [result.token_ids for result in without]
    error = fault.error
    assert (error.type, error.status_code, error.name) == ("ProcessorFault", 400, "Raises")
    assert "no such luck" in error.message
    assert "raise ValueError" in error.traceback
    assert len(fault.token_ids) == 3


async def test_processors_are_released_for_every_finish_reason(make_engine: BuildEngine) -> None:
    engine = make_engine()
    boosted = ((BOOST, {"token_id": 50}),)
    await generate_all(engine, request("a", processors=boosted, n=3))
    await generate(engine, request("b", processors=((RAISES, None),)))
    stream = await engine.submit(request("c", processors=((COUNTDOWN, None),), max_tokens=400))
    assert not await engine.flush_cache()
    await stream.aclose()
    async for _ in stream:
        pass
    with pytest.raises(BadRequest):  # after the first of the two was loaded
        await engine.submit(request("d", processors=(boosted[0], (InstalledProcessor("nonesuch"), None))))
    assert engine.stats().processor_cache_entries == 3
    assert await engine.flush_cache()
    assert engine.stats().processor_cache_entries == 0


def test_failed_step_does_not_end_the_engine(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    forward = ModelRunner.forward
    failures = iter([False, False, True])

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        if next(failures, False):
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    wanted = [request(f"r{i}", seed=i) for i in range(6)]
    before = run(generate_together(engine, wanted))
    monkeypatch.setattr(ModelRunner, "forward", sometimes)
    failed = run(generate_together(engine, wanted))
    after = run(generate_together(engine, wanted))
    errors = [result.finish_reason.error for result in failed if result.finish_reason.kind == "abort"]
    assert 1 <= len(errors) <= 4  # only those that had a row
    assert all(len(result.token_ids) == 8 for result in failed if result.finish_reason.kind == "length")
    assert {error.status_code for error in errors if error} == {500}
    assert [result.token_ids for result in after] == [result.token_ids for result in before]


def test_engine_death_ends_all_streams(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def die(self: Engine) -> bool:
        raise SystemExit

    async def die_while_running() -> Output:
        monkeypatch.setattr(Engine, "step", die)
        orphan = await generate(engine, request("a"))
        await until(lambda: not engine.healthy)
        with pytest.raises(ServiceUnavailable, match="died"):
            await engine.submit(request("b"))
        return orphan

    error = run(die_while_running()).error
    assert error.status_code == 500


async def test_shutdown_finishes_running_requests(make_engine: BuildEngine) -> None:
    engine = make_engine()
    running = asyncio.create_task(generate(engine, request("a", max_tokens=200)))
    await until(lambda: engine.stats().running)
    ending = asyncio.create_task(engine.shutdown(60))
    await until(lambda: not engine.stats().accepting)
    with pytest.raises(ServiceUnavailable, match="shutting down"):
        await engine.submit(request("b"))
    await ending
    assert len((await running).token_ids) == 200


async def test_shutdown_timeout(make_engine: BuildEngine) -> None:
    engine = make_engine()
    running = asyncio.create_task(generate(engine, request("a", max_tokens=500)))
    await until(lambda: engine.stats().running)
    await engine.shutdown(0)
    assert (await running).finish_reason == FinishReason("abort")
    assert not engine.healthy


async def test_shutdown_ends_requests_that_load(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    load = engine.processors.load
    loading, gate = threading.Event(), threading.Event()

    def gated(*args: Any) -> Any:
        loading.set()
        assert gate.wait(30)
        return load(*args)

    monkeypatch.setattr(engine.processors, "load", gated)
    running = asyncio.create_task(generate(engine, request(processors=BAN)))
    assert await asyncio.to_thread(loading.wait, 30)
    await engine.shutdown(0)
    gate.set()
    assert (await running).finish_reason == FinishReason("abort", error=STOPPED)


@pytest.mark.parametrize("size", [10, _LARGE_BODY_MEMORY + 1])
async def test_no_thread_for_a_load(size: int, make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def refuse(function: Callable[[], Any]) -> Any:
        raise RuntimeError("can't start new thread")

    body = QueuedBytes(1 << 30, 1 << 30).open("")
    body.add(size)
    with monkeypatch.context() as patch:
        patch.setattr(async_engine, "in_daemon_thread", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await engine.submit(request("same", processors=BAN), body)
    stream = await engine.submit(request("same", processors=BAN), body)
    assert [chunk async for chunk in stream]


@pytest.mark.parametrize(("n", "on_loop"), [(2, True), (40, False)])
async def test_many_sequences_are_not_made_on_the_event_loop(
    n: int, on_loop: bool, make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    threads = set()
    make = engine._sequences.make

    def watched(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return make(*args)

    monkeypatch.setattr(engine._sequences, "make", watched)
    stream = await engine.submit(request(n=n, max_tokens=1))
    assert len([chunk async for chunk in stream]) == n
    assert (threads == {threading.current_thread()}) == on_loop


async def test_loads_of_large_bodies_take_turns(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's run one at a time, also after one that failed; those of another tenant or a small body do not wait."""
    engine = make_engine()
    load = engine.processors.load
    gate, changed = threading.Event(), threading.Condition()
    loading: list[str] = []

    def gated(wanted: GenerationRequest, *args: Any) -> Any:
        with changed:
            loading.append(wanted.rid)
            changed.notify_all()
        assert gate.wait(30)
        if wanted.rid == "first":
            raise BadRequest("no", param="processors")
        return load(wanted, *args)

    monkeypatch.setattr(engine.processors, "load", gated)

    def submit(rid: str, tenant: str, size: int) -> asyncio.Task[Any]:
        body = QueuedBytes(1 << 30, 1 << 30).open(tenant)
        body.add(size)
        return asyncio.create_task(engine.submit(request(rid, processors=BAN, tenant=tenant), body))

    large = _LARGE_BODY_MEMORY + 1
    first = submit("first", "one", large)
    await until(lambda: len(loading) >= 1)
    cancelled = submit("cancelled", "one", large)
    await asyncio.sleep(0)
    others = [submit("second", "one", large), submit("small", "one", 10), submit("other", "another", large)]
    await until(lambda: len(loading) >= 3)
    cancelled.cancel()
    assert sorted(loading) == ["first", "other", "small"]
    gate.set()
    with pytest.raises(BadRequest):
        await first
    for stream in await asyncio.gather(*others):
        await stream.aclose()
    assert loading[3:] == ["second"]


def test_error_while_its_sequences_are_made(make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine._sequences, "make", None)
        with pytest.raises(TypeError):
            run(generate(engine, request("same")))
    assert len(run(generate(engine, request("same"))).token_ids) == 8


async def test_cancelled_while_its_sequences_are_made(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    making, gate = threading.Event(), threading.Event()

    def blocked(*args: Any) -> Any:
        making.set()
        assert gate.wait(30)

    monkeypatch.setattr(engine._sequences, "make", blocked)
    submitting = asyncio.create_task(engine.submit(request(n=40)))
    assert await asyncio.to_thread(making.wait, 30)
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert len(engine._active) == 0
    gate.set()


async def test_cancelled_while_its_grammar_waits(make_engine: BuildEngine) -> None:
    """Another tenant uses all checkers; the client leaves, and its thread does not wait on."""
    engine = make_engine()
    grammar = engine._library.acquire(InstalledProcessor("grammar"), "").instance
    compiler = grammar._compiler_for(engine._library._model)
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with contextlib.ExitStack() as used:
        for tenant in map(str, range(len(compiler._checkers))):
            used.enter_context(compiler._slots.use(tenant, 0))
        wanted = request(processors=((InstalledProcessor("grammar"), {"regex": "[a-f]{7}"}),))
        submitting = asyncio.create_task(engine.submit(wanted))
        await until(lambda: compiler._slots._waiting)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await until(lambda: not engine._active)
        assert not compiler._slots._waiting
    gc.collect()
    assert unhandled == []


@pytest.mark.parametrize("end", ["finished", "cancelled", "cancelled while it waits"])
def test_request_that_is_over_is_freed_without_the_garbage_collector(make_engine: BuildEngine, end: str) -> None:
    """Its parameters may take megabytes, and the collector may not run for minutes."""
    engine = make_engine(max_num_seqs=1)

    async def scenario() -> list[weakref.ref[Any]]:
        other = await engine.submit(request("other", max_tokens=400)) if "waits" in end else None
        stream = await engine.submit(request("r", max_tokens=8 if end == "finished" else 400))
        active = weakref.ref(engine._active._active["", "r"])
        if end == "finished":
            async for _ in stream:
                pass
        await stream.aclose()
        if other is not None:
            await other.aclose()
        await until(lambda: not engine.stats().running and not engine.stats().waiting)
        # Before the loop is closed: a chunk that is delivered meanwhile would stay in the closed loop, and hold both.
        await asyncio.to_thread(engine.stop)
        return [active, weakref.ref(stream)]

    gc.disable()
    try:
        freed = run(scenario())
        assert [reference() for reference in freed] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("rid", ["r_0", "r_2", "r"])
async def test_abort_of_continuations_while_their_processor_loads(
    rid: str, make_engine: BuildEngine, tmp_path: Path
) -> None:
    engine = make_engine()
    go = tmp_path / "go"
    slow = f"import pathlib, time\nwhile not pathlib.Path({str(go)!r}).exists(): time.sleep(0.002)\n{BOOST.source}"
    wanted = request("r", n=3, max_tokens=60, processors=[(SourceProcessor(slow, "Boost"), {"token_id": 9})])
    loading = asyncio.create_task(generate_all(engine, wanted))
    await asyncio.sleep(0)  # admitted now; its processor waits for the file
    engine.abort(rid)
    engine.abort("r_3")  # there is none
    go.touch()
    aborted = {0, 1, 2} if rid == "r" else {int(rid[-1])}
    reasons = [output.finish_reason.kind for output in await loading]
    assert reasons == ["abort" if index in aborted else "length" for index in range(3)]


async def test_cancelled_prompt_computes_no_further_chunk(
    make_engine: BuildEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(chunked_prefill_size=16, prefix_cache_bytes=0)
    computing, gate = threading.Event(), threading.Event()
    forward = ModelRunner.forward
    chunks: list[int] = []

    def recorded(runner: ModelRunner, decode: list[Chunk], prefill: list[Chunk], *args: Any) -> Any:
        own = [len(chunk.token_ids) for chunk in prefill if 99 in chunk.token_ids]
        chunks.extend(own)
        if own:
            computing.set()
            assert gate.wait(30)
        return forward(runner, decode, prefill, *args)

    monkeypatch.setattr(ModelRunner, "forward", recorded)
    other = asyncio.create_task(generate(engine, request("other", max_tokens=100)))
    stream = await engine.submit(request("cancelled", [99] * 200))
    assert await asyncio.to_thread(computing.wait, 30)
    await stream.aclose()
    gate.set()
    assert len((await other).token_ids) == 100
    assert chunks == [16]
