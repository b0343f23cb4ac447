"""Ends of requests, from a worker's output to the front end's error, or to the receipts of the answer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.client.records import Receipt
from logitship.client.sampling_record import SamplingRecord
from logitship.sampler.row_errors import SamplingEditsTooLongError
from logitship.server.vllm import front_end_hooks, output_records
from logitship.server.vllm.endings import Ending, process_outputs, readable, send_endings, to_tensor
from logitship.server.vllm.output_records import RecordParts

FAULT_TOKEN = 63
TEXT = "ProcessorFault: processor 'Größe' raised\nTraceback"


class FinishReason(Enum):
    """Fake of vLLM's."""

    STOP = 0
    ERROR = 3


def receipts(*steps: int) -> list[list[Receipt]]:
    """Return receipts behind 0, 1, … accepted draft tokens."""
    return [[Receipt("sha256:0", "Größe", each, 0.5)] for each in steps]


def sent(endings: dict[str, Ending], *, is_async: bool) -> dict[str, torch.Tensor]:
    """Return what a step attaches: `a` samples two tokens, `b` none, `c` one."""
    sampled = [[5, FAULT_TOKEN], [], [7]]
    output = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        sampled_token_ids=None if is_async else sampled,
        prompt_token_id_logprobs_dict={"asked": torch.zeros(2, 2)},
    )

    def get_output() -> Any:
        output.sampled_token_ids = sampled
        return output

    returned = SimpleNamespace(get_output=get_output) if is_async else output
    runner = SimpleNamespace(sample_tokens=lambda grammar_output: returned)
    send_endings(runner, lambda: endings, FAULT_TOKEN)
    result = runner.sample_tokens(None)
    attached: dict[str, torch.Tensor] = (result.get_output() if is_async else result).prompt_token_id_logprobs_dict
    assert attached.pop("asked").shape == (2, 2)
    return attached


def decoded(attached: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {rid: json.loads(each.numpy().tobytes()) for rid, each in attached.items()}


@pytest.mark.parametrize("is_async", [False, True])
def test_faults_are_attached_to_rows_that_end(is_async: bool) -> None:
    assert not sent({}, is_async=is_async)
    fault = Ending(TEXT, [], frozenset({FAULT_TOKEN}))
    attached = sent(dict.fromkeys("abcd", fault), is_async=is_async)
    assert decoded(attached) == {"a": {"fault": TEXT}}


@pytest.mark.parametrize(
    ("ends_at", "steps"),
    [({7}, {"c": [1]}), ({5}, {"a": [1, 2]}), ({8}, {}), (None, {"a": [1, 2], "c": [1]})],
    ids=["its_last_token", "an_accepted_draft", "another_token", "any_token"],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_receipts_are_attached_to_outputs_that_may_be_the_last(
    ends_at: set[int] | None, steps: dict[str, list[int]], is_async: bool
) -> None:
    """Receipts behind rejected draft tokens are left out; an output without tokens may have nothing attached."""
    ending = Ending(None, receipts(1, 2, 3), None if ends_at is None else frozenset(ends_at))
    attached = decoded(sent(dict.fromkeys("abcd", ending), is_async=is_async))
    assert {rid: [each["steps"] for (each,) in one["receipts"]] for rid, one in attached.items()} == steps


def test_what_a_client_asked_for_is_kept() -> None:
    """The log-probabilities of a prompt come with the first output, which may be the last one."""
    assert not sent({"asked": Ending(None, receipts(1), None)}, is_async=False)


def core_output(attached: torch.Tensor | None, finish_reason: FinishReason | None, rid: str = "0") -> Any:
    return SimpleNamespace(
        request_id=rid,
        prompt_token_id_logprobs=attached,
        finish_reason=finish_reason,
        stop_reason=FAULT_TOKEN,
        new_token_ids=[FAULT_TOKEN],
        new_logprobs=[],
    )


def test_requests_end_with_their_faults() -> None:
    text = to_tensor(Ending(TEXT, [], frozenset()).to_json([FAULT_TOKEN], FAULT_TOKEN))
    outputs = [
        core_output(text, FinishReason.STOP),
        core_output(text, None),
        core_output(None, FinishReason.STOP),
        core_output(torch.ones(1, 2), FinishReason.STOP),
    ]
    process_outputs(lambda processor, outputs: outputs, None, outputs)
    assert [each.stop_reason for each in outputs] == [TEXT, FAULT_TOKEN, FAULT_TOKEN, FAULT_TOKEN]
    assert outputs[0].finish_reason == FinishReason.ERROR
    assert (outputs[0].new_token_ids, outputs[0].prompt_token_id_logprobs) == ([], None)
    assert outputs[3].prompt_token_id_logprobs is not None


class OutputProcessor:
    """Fake of vLLM's. A request ends at a stop string behind the first new token, or goes on.

    Args:
        stops: whether it ends.
        queued: outputs go to queues.
        of_parent: outputs wait for those of others with the same prompt.
    """

    def __init__(self, *, stops: bool, queued: bool, of_parent: bool) -> None:
        self.completion = SimpleNamespace(index=1, finish_reason="stop" if stops else None)
        other = SimpleNamespace(index=0, finish_reason="stop")
        outputs = [SimpleNamespace(request_id="prompt", outputs=[other, self.completion])]
        self.request_outputs = [] if queued or of_parent else outputs
        self.request_states = {
            "1_prompt": SimpleNamespace(
                external_req_id="prompt",
                request_index=1,
                queue=SimpleNamespace(output=None if of_parent else outputs[0]) if queued else None,
                parent_req=SimpleNamespace(output_aggregator=[None, self.completion]) if of_parent else None,
            )
        }

    def process(self, outputs: list[Any]) -> Any:
        for output in outputs:
            del output.new_token_ids[1:]
        self.request_states.clear()  # of requests that have finished
        return self


@pytest.mark.parametrize(
    "place",
    [{"queued": False, "of_parent": False}, {"queued": True, "of_parent": False}, {"queued": True, "of_parent": True}],
)
@pytest.mark.parametrize("stops", [True, False])
def test_answers_have_the_receipts_of_their_last_token(stops: bool, place: dict[str, bool]) -> None:
    processor = OutputProcessor(stops=stops, **place)
    attached = to_tensor(Ending(None, receipts(4, 5, 6), None).to_json([2, 3, 4], FAULT_TOKEN))
    output = core_output(attached, None, "1_prompt")
    output.new_token_ids = [2, 3, 4]
    gone = core_output(attached, None, "aborted")
    process_outputs(OutputProcessor.process, processor, [gone, output])
    assert output.prompt_token_id_logprobs is None
    (expected,) = receipts(4)
    assert getattr(processor.completion, "receipts", None) == (tuple(expected) if stops else None)


def test_faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before it are passed on, and vLLM's own generator is closed."""
    error = type("VLLMValidationError", (Exception,), {})
    module = ModuleType("vllm.exceptions")
    vars(module)["VLLMValidationError"] = error
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", module)
    events: list[Any] = []

    async def generate(llm: Any, prompt: str, sampling_params: None) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[5], finish_reason=None, stop_reason=None)], finished=False
            )
            fault = SimpleNamespace(token_ids=[6], finish_reason="error", stop_reason=TEXT)
            yield SimpleNamespace(outputs=[fault], finished=True)
        finally:
            events.append("closed")

    async def run() -> None:
        async for output in front_end_hooks.generate(generate, None, "", None):
            (completion,) = output.outputs
            events.append((completion.token_ids, completion.finish_reason, output.finished))

    with pytest.raises(error, match="raised\nTraceback"):
        asyncio.run(run())
    assert events == [([5], None, False), ([6], None, False), "closed"]


def test_streams_of_responses_end_with_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end_hooks, "_validation_error", lambda: KeyError)

    async def stream(serving: Any, request: str) -> AsyncIterator[str]:
        yield request
        raise KeyError(TEXT)

    async def run() -> list[Any]:
        serving = SimpleNamespace(create_error_response=lambda error: ("error", *error.args))
        return [event async for event in front_end_hooks.stream_response(stream, serving, "created")]

    assert asyncio.run(run()) == ["created", ("error", TEXT)]


def test_source_lines_are_not_removed() -> None:
    assert readable('  File "<Fails>", line 3, in __call__') == '  File "<Fails>" line 3, in __call__'


def record_of(token: int) -> SamplingRecord:
    return SamplingRecord.from_lists(50, [token], [[token, 1]], [-0.5])


class SampledToken:
    """Fake of `RecordedRow`."""

    def record(self, token: int) -> SamplingRecord:
        if token == TOO_LONG:
            raise SamplingEditsTooLongError("Mine", 5000, 4096)
        if token == IMPOSSIBLE:
            raise ValueError("token cannot have been sampled")
        return record_of(token)


TOO_LONG, IMPOSSIBLE = 9, 10


def core_outputs(tokens: list[int], *, is_async: bool) -> list[Any]:
    """Return an engine core's outputs of the tokens of one request, which asks for its records."""
    outputs = []
    for token in tokens:
        output = SimpleNamespace(
            req_id_to_index={"0": 0}, sampled_token_ids=[[token]], prompt_token_id_logprobs_dict={}
        )
        returned = SimpleNamespace(get_output=lambda output=output: output) if is_async else output
        runner = SimpleNamespace(sample_tokens=lambda returned=returned: returned)
        send_endings(runner, dict, FAULT_TOKEN, lambda: {"0": SampledToken()})  # type: ignore[dict-item]
        result = runner.sample_tokens()
        result = result.get_output() if is_async else result
        attached = core_output(result.prompt_token_id_logprobs_dict["0"], None)
        attached.new_token_ids = [token]
        outputs.append(attached)
    return outputs


class Collector:
    """Fake of vLLM's front end for one request: outputs merge while nobody takes them.

    Args:
        are_deltas: outputs have only their new tokens.
        is_offline: outputs are returned by `process`.
    """

    def __init__(self, *, are_deltas: bool, is_offline: bool = False) -> None:
        self._are_deltas = are_deltas
        queue = None if is_offline else SimpleNamespace(output=None)
        self.state = SimpleNamespace(external_req_id="prompt", request_index=0, queue=queue, parent_req=None)
        self.request_states = {"0": self.state}
        self.request_outputs: list[Any] = []
        self._tokens: list[int] = []

    def process(self, outputs: list[Any]) -> Any:
        for output in outputs:
            self._tokens += output.new_token_ids
            tokens = [*output.new_token_ids] if self._are_deltas else [*self._tokens]
            completion = SimpleNamespace(
                index=0, finish_reason=output.finish_reason, token_ids=tokens, stop_reason=None
            )
            merged = SimpleNamespace(request_id="prompt", outputs=[completion])
            if self.state.queue is None:
                self.request_outputs = [merged]
            elif self._are_deltas and self.state.queue.output is not None:
                self.state.queue.output.outputs[0].token_ids += tokens
            else:
                self.state.queue.output = merged
        return self

    def take(self) -> Any:
        output, self.state.queue.output = self.state.queue.output, None
        (completion,) = output.outputs
        return completion


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("are_deltas", [True, False])
def test_outputs_have_the_records_of_their_tokens(are_deltas: bool, is_async: bool) -> None:
    collector, parts = Collector(are_deltas=are_deltas), RecordParts(are_deltas=are_deltas)
    outputs = core_outputs([5, 6, 7, 8], is_async=is_async)
    found = []
    for some in (outputs[:1], outputs[1:3], outputs[3:]):
        for output in some:
            process_outputs(Collector.process, collector, [output])
        record = parts.next(collector.take())
        assert record is not None
        found.append((record.start, record.token_ids.tolist()))
    assert found == ([(0, [5]), (1, [6, 7]), (3, [8])] if are_deltas else [(0, [5]), (0, [5, 6, 7]), (0, [5, 6, 7, 8])])


def test_finished_outputs_have_their_records_offline() -> None:
    collector = Collector(are_deltas=False, is_offline=True)
    outputs = core_outputs([5, 6], is_async=False)
    outputs[1].finish_reason = FinishReason.STOP
    for output in outputs:
        process_outputs(Collector.process, collector, [output])
    record = collector.request_outputs[0].outputs[0].sampling_record
    assert (record.token_ids.tolist(), record.could_be_sampled().sum()) == ([5, 6], 4)


@pytest.mark.parametrize(
    ("token", "message"),
    [(TOO_LONG, "Mine changed the logits of 5000 tokens"), (IMPOSSIBLE, "could not record a token")],
)
def test_request_without_the_record_of_a_token_is_refused(token: int, message: str) -> None:
    collector, parts = Collector(are_deltas=True), RecordParts(are_deltas=True)
    for output in core_outputs([5, token, 6], is_async=False):
        process_outputs(Collector.process, collector, [output])
    with pytest.raises(ValueError, match=message):
        parts.next(collector.take())


def test_records_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_records, "MAX_BYTES", 50)
    collector, parts = Collector(are_deltas=True), RecordParts(are_deltas=True)
    for number, output in enumerate(core_outputs([5, 6, 7, 8, 9], is_async=False)[:4]):
        process_outputs(Collector.process, collector, [output])
        if number < 2:
            assert parts.next(collector.take()) is not None
    with pytest.raises(ValueError, match="exceed 50 bytes"):
        parts.next(collector.take())
