"""Texts of faults, from a worker's output to the front end's error."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from logitship.server.vllm import front_end_hooks
from logitship.server.vllm.fault_texts import readable, send_faults, take_fault

FAULT_TOKEN = 63
TEXT = "ProcessorFault: processor 'Größe' raised\nTraceback"


class FinishReason(Enum):
    """Fake of vLLM's."""

    STOP = 0
    ERROR = 3


def step(faults: dict[str, str], *, is_async: bool) -> dict[str, torch.Tensor]:
    """Return what a step attaches: request `a` ends, `b` is not sampled, `c` goes on."""
    sampled = [[5, FAULT_TOKEN], [], [7]]
    output = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1, "c": 2},
        sampled_token_ids=None if is_async else sampled,
        prompt_token_id_logprobs_dict={"c": torch.zeros(2, 2)},
    )

    def get_output() -> Any:
        output.sampled_token_ids = sampled
        return output

    returned = SimpleNamespace(get_output=get_output) if is_async else output
    runner = SimpleNamespace(sample_tokens=lambda grammar_output: returned)
    send_faults(runner, lambda: faults, FAULT_TOKEN)
    result = runner.sample_tokens(None)
    attached: dict[str, torch.Tensor] = (result.get_output() if is_async else result).prompt_token_id_logprobs_dict
    return attached


@pytest.mark.parametrize("is_async", [False, True])
def test_texts_are_attached_to_rows_that_end(is_async: bool) -> None:
    assert step({}, is_async=is_async).keys() == {"c"}
    attached = step({"a": TEXT, "b": "not sampled", "c": "rejected", "d": "gone"}, is_async=is_async)
    assert attached.keys() == {"a", "c"}
    assert take_fault(SimpleNamespace(prompt_token_id_logprobs=attached["a"])) == TEXT
    assert take_fault(SimpleNamespace(prompt_token_id_logprobs=attached["c"])) is None


def core_output(attached: torch.Tensor | None, finish_reason: FinishReason | None) -> Any:
    return SimpleNamespace(
        prompt_token_id_logprobs=attached,
        finish_reason=finish_reason,
        stop_reason=FAULT_TOKEN,
        new_token_ids=[FAULT_TOKEN],
        new_logprobs=[],
    )


def test_requests_end_with_their_faults() -> None:
    text = torch.frombuffer(bytearray(TEXT.encode()), dtype=torch.uint8)
    outputs = [
        core_output(text, FinishReason.STOP),
        core_output(text, None),
        core_output(None, FinishReason.STOP),
        core_output(torch.ones(1, 2), FinishReason.STOP),
    ]
    front_end_hooks.process_outputs(lambda processor, outputs: outputs, None, outputs)
    assert [each.stop_reason for each in outputs] == [TEXT, FAULT_TOKEN, FAULT_TOKEN, FAULT_TOKEN]
    assert outputs[0].finish_reason == FinishReason.ERROR
    assert (outputs[0].new_token_ids, outputs[0].prompt_token_id_logprobs) == ([], None)
    assert outputs[3].prompt_token_id_logprobs is not None


def test_faults_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before it are passed on, and vLLM's own generator is closed."""
    error = type("VLLMValidationError", (Exception,), {})
    module = ModuleType("vllm.exceptions")
    vars(module)["VLLMValidationError"] = error
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.exceptions", module)
    events: list[Any] = []

    async def generate(llm: Any) -> AsyncIterator[Any]:
        try:
            yield SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=[5], finish_reason=None, stop_reason=None)], finished=False
            )
            fault = SimpleNamespace(token_ids=[6], finish_reason="error", stop_reason=TEXT)
            yield SimpleNamespace(outputs=[fault], finished=True)
        finally:
            events.append("closed")

    async def run() -> None:
        async for output in front_end_hooks.generate(generate, None):
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
