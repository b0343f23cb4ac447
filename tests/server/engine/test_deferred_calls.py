"""Steps do not wait for slow processors of other tenants, and every request gets the same tokens nevertheless."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.processors.executor import CollectEdits, ExecutorRow, LoadedProcessor, LocalGroup, RunOutcome
from logitship.sampler.processors.in_process_executor import InProcessExecutor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine import build
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.decode_shares import DecodeShares
from logitship.server.metrics.step_clock import StepTime
from logitship.server.requests.messages import BeamSearch, GenerationChunk, GenerationRequest, ProcessorRequest
from logitship.server.speculation.ngram_speculation import NGramSpeculation
from tests.helpers.coroutines import run, until
from tests.helpers.engine_requests import BuildEngine, chunks_of, request
from tests.helpers.processors import shipped_by_row

EXACT = """
# Roll the row by the history; fail if it is not called exactly once for each token.
assert req.state.get("calls", 0) == len(req.output_ids)
req.state["calls"] = len(req.output_ids) + 1
if len(req.output_ids) == params.get("fail_at"):
    raise ValueError("as asked")
row[:] = row.roll({by} * sum(req.output_ids) + len(req.origin_input_ids))
"""


def _exact(name: str, by: int) -> SourceProcessor:
    return shipped_by_row(name, EXACT.format(by=by))


A, B, C = _exact("A", 1), _exact("B", 3), _exact("C", 7)


class LateRun:
    """A call that ends after `delay` waits, once the executor is no longer held."""

    def __init__(self, executor: LateExecutor, group: LocalGroup, delay: int) -> None:
        self._executor = executor
        self._group = group
        self._delay = delay

    def needs_logits(self) -> bool:
        return True

    def provide(self, logits: torch.Tensor) -> None:
        self._input = logits.clone()
        self._logits = logits

    def wait(self, timeout: float) -> bool:
        self._delay -= 1
        return self._delay < 0 and not self._executor.is_held

    def lower_priority(self) -> None:
        pass

    def defer(self, logits: torch.Tensor) -> None:
        assert torch.equal(logits, self._input)
        self._logits = logits

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        outcome = self._group.call(self._input)
        self._logits.copy_(self._input)
        return outcome


@dataclasses.dataclass
class LateGroup:
    executor: LateExecutor
    group: LocalGroup

    def promise(self) -> LateRun | None:
        return self._run() if self.executor.random.random() < 0.5 else None

    def begin(self, logits: torch.Tensor, seconds_used: float = 0.0) -> LateRun:
        run = self._run()
        run.provide(logits)
        return run

    def _run(self) -> LateRun:
        return LateRun(self.executor, self.group, self.executor.random.choice([0, 0, 1, 2, 6]))


class LateExecutor(InProcessExecutor):
    """Runs processors in this process, with calls that seem to take several steps.

    Attributes:
        is_held: True while no call may end.
        is_late: False to let each call end at once.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__({}, ModelView(260, frozenset(), None))
        self.random = random.Random(seed)
        self.is_held = False
        self.is_late = True

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> Any:
        group = super().group(processor, rows)
        return LateGroup(self, group) if self.is_late else group


@pytest.fixture
def late_executor(monkeypatch: pytest.MonkeyPatch) -> LateExecutor:
    """The executor of the engines that are built from now on."""
    executor = LateExecutor()
    monkeypatch.setattr(build, "make_executor", lambda *args: executor)
    return executor


def wanted(number: int, tenant: str = "", **fields: Any) -> GenerationRequest:
    """Return one of many requests, which together use every feature that a deferred row could get wrong."""
    ban = InstalledProcessor("disallowed_tokens")
    chosen: list[Any] = [
        [],
        [(A, {})],
        [(A, {}), (B, {})],
        [(B, {})],
        [(C, {}), (ban, {"token_ids": [7, 8, 9]}), (A, {})],
        [(B, {}), (A, {}), (C, {})],
        [(_exact(f"Fails{number}", 1), {"fail_at": 2}), (B, {})],
    ][number % 7]
    prompt = [4 + (11 * number + 3 * place) % 250 for place in range(1 + number * 7 % 40)]
    params: dict[str, Any] = {
        "ignore_eos": False,
        "max_tokens": 3 + number * 5 % 14,
        "seed": number,
        "temperature": (0.0, 0.8, 1.3)[number % 3],
        "top_p": (1.0, 0.9)[number % 2] if number % 3 else 1.0,
        "repetition_penalty": (1.0, 1.2)[number % 2],
        "min_tokens": (0, 2)[number % 2],
        "logprobs": (None, 2)[number % 2],
        "trace": (None, None, 3)[number % 3],
        "prompt_logprobs": (None, 1)[number % 5 == 0],
    }
    processors = [ProcessorRequest(string, values, own=True) for string, values in chosen]
    return request(f"r{number}", prompt, processors, tenant=tenant, **params, **fields)


@dataclasses.dataclass
class Summary:
    """Results of a request that must not depend on other requests.

    Attributes:
        exact: tokens, text, finish reason, steps of the receipts and stages of the traces, by continuation.
        logprobs: all log-probabilities, which may differ in their last bits.
    """

    exact: dict[int, dict[str, Any]]
    logprobs: list[float | None]


def summary(chunks: list[GenerationChunk]) -> Summary:
    result = Summary({}, [])
    for chunk in sorted(chunks, key=lambda chunk: chunk.index):
        own = result.exact.setdefault(chunk.index, {"tokens": [], "text": "", "stages": []})
        own["tokens"] += chunk.token_ids
        own["text"] += chunk.text
        result.logprobs += [each.logprob for each in (*chunk.prompt_logprobs, *chunk.logprobs)]
        for trace in chunk.traces:
            own["stages"].append([(stage.stage, stage.name, stage.again, stage.num_allowed) for stage in trace.stages])
            result.logprobs += [logprob for stage in trace.stages for logprob in stage.logprobs]
        if chunk.finish_reason is not None:
            error = chunk.finish_reason.error
            own["reason"] = (chunk.finish_reason.kind, error and error.message)
            own["steps"] = [receipt.steps for receipt in chunk.receipts]
    return result


async def compare(
    engine: AsyncEngine,
    executor: LateExecutor,
    requests: Callable[[str], list[GenerationRequest]],
    *,
    is_late: bool = True,
) -> None:
    """Compare each request alone and undisturbed with the same request among those of three tenants."""
    executor.is_late = False
    alone = [summary(await chunks_of(engine, one)) for one in requests("alone")]
    assert engine.stats().deferred_calls == 0
    executor.is_late = is_late
    tenants = ["a", "b", "c"]
    together = [dataclasses.replace(one, tenant=tenants[i % 3]) for i, one in enumerate(requests("x"))]
    results = await asyncio.gather(*(chunks_of(engine, one) for one in together))
    for one, result, expected in zip(together, results, alone, strict=True):
        found = summary(result)
        assert found.exact == expected.exact, one
        assert [each is None for each in found.logprobs] == [each is None for each in expected.logprobs]
        numbers = [each for each in found.logprobs if each is not None]
        assert numbers == pytest.approx([each for each in expected.logprobs if each is not None], abs=1e-5)
    assert engine.stats().deferred_calls > (len(together) if is_late else -1)
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


@pytest.mark.parametrize("slots", [3, pytest.param(8, marks=pytest.mark.thorough)])
def test_tokens_are_those_of_an_undisturbed_run(
    make_engine: BuildEngine, late_executor: LateExecutor, slots: int
) -> None:
    engine = make_engine(max_num_seqs=slots, chunked_prefill_size=16)
    run(compare(engine, late_executor, lambda tenant: [wanted(number, tenant) for number in range(42)]))


@pytest.mark.thorough
def test_several_continuations(make_engine: BuildEngine, late_executor: LateExecutor) -> None:
    engine = make_engine(max_num_seqs=6, chunked_prefill_size=16)
    run(
        compare(
            engine,
            late_executor,
            lambda tenant: [wanted(number, tenant, n=3) for number in range(21) if number % 7 != 6],
        )
    )


@pytest.mark.parametrize("n", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_sequences_that_take_turns(
    make_engine: BuildEngine, late_executor: LateExecutor, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    left_out = 0
    select = DecodeShares.select

    def counted(shares: DecodeShares, sequences: Any, prompts: float) -> list[Any]:
        nonlocal left_out
        shares.time = StepTime(per_position=1.0, base=1.0)  # the tenant with the least work decides
        chosen = select(shares, sequences, prompts)
        left_out += len(sequences) - len(chosen)
        return chosen

    monkeypatch.setattr(DecodeShares, "select", counted)
    engine = make_engine(max_num_seqs=12, chunked_prefill_size=16)
    run(
        compare(
            engine,
            late_executor,
            lambda tenant: [wanted(number, tenant, n=n) for number in range(28) if n == 1 or number % 7 != 6],
            is_late=False,
        )
    )
    assert left_out > 20


@pytest.mark.thorough
def test_speculative_decoding(
    make_engine: BuildEngine, late_executor: LateExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, measured costs may say that drafts do not pay off.
    observe = NGramSpeculation.observe
    monkeypatch.setattr(build, "measure_step_cost", lambda runner, most_tokens: lambda num_tokens: 1.0)
    monkeypatch.setattr(
        NGramSpeculation, "observe", lambda self, rows, drafts, accepted, _: observe(self, rows, drafts, accepted, 1.0)
    )
    engine = make_engine(max_num_seqs=6, speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    run(compare(engine, late_executor, lambda tenant: [_repetitive(number, tenant) for number in range(21)]))
    assert engine.stats().accepted > 0


def _repetitive(number: int, tenant: str) -> GenerationRequest:
    one = wanted(number, tenant)
    params = dataclasses.replace(one.sampling_params, temperature=0.0, top_p=1.0, max_tokens=30, repetition_penalty=1.0)
    processors = tuple(each for each in one.processors if number % 2)
    return dataclasses.replace(one, sampling_params=params, processors=processors)


def test_beam_search(make_engine: BuildEngine, late_executor: LateExecutor) -> None:
    engine = make_engine(max_num_seqs=9)

    def searches(tenant: str) -> list[GenerationRequest]:
        found = []
        for number in range(14):
            one = wanted(number, tenant, beam_search=BeamSearch(3), n=2)
            params = SamplingParams(temperature=0, max_tokens=8, logprobs=1, logprobs_mode="processed_logprobs")
            found.append(dataclasses.replace(one, sampling_params=params))
        return found

    run(compare(engine, late_executor, searches))


async def test_others_go_on_while_a_call_is_deferred(make_engine: BuildEngine, late_executor: LateExecutor) -> None:
    """The slow processor does not answer before the other request has ended."""
    engine = make_engine()
    first = await engine.submit(request("first", tenant="a", max_tokens=400, temperature=0))
    await anext(aiter(first))
    late_executor.is_held = True
    slow = asyncio.create_task(chunks_of(engine, wanted(1, "b")))
    await until(lambda: engine.stats().deferred_calls == 1)
    second = await chunks_of(engine, request("second", tenant="a", max_tokens=100, temperature=0))
    await first.aclose()
    late_executor.is_held = False
    slow_chunks = await slow
    assert second[-1].completion_tokens == 100
    assert slow_chunks[-1].completion_tokens == wanted(1).sampling_params.max_tokens


async def test_cancelled_while_its_call_is_deferred(make_engine: BuildEngine, late_executor: LateExecutor) -> None:
    engine = make_engine()
    first = await engine.submit(request("first", tenant="a", max_tokens=400, temperature=0))
    await anext(aiter(first))
    late_executor.is_held = True
    slow = await engine.submit(wanted(1, "b"))
    await until(lambda: engine.stats().deferred_calls == 1)
    await slow.aclose()
    await first.aclose()
    # The same processor cannot be called before the deferred call has ended.
    again = asyncio.create_task(chunks_of(engine, wanted(8, "b")))
    await until(lambda: engine.stats().running == 1)
    late_executor.is_held = False
    assert (await again)[-1].completion_tokens == wanted(8).sampling_params.max_tokens
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)
