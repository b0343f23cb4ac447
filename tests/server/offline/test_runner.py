from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship import CustomLogitProcessor, LogitshipError, ProcessorFault
from logitship.client.errors import GenerationError
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.outputs import RequestOutput
from logitship.server.offline.sampling_params import SamplingParams
from tests.helpers.offline import FOREVER, GREEDY, quiet


class Fails(CustomLogitProcessor):
    """Raises an exception at the third token."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        if any(len(params["__req__"].output_ids) == 2 for params in custom_param_list):
            raise ZeroDivisionError("no such luck")
        return logits


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(custom_logit_processor="no_such_processor"), r"custom_logit_processor: .*no_such_processor"),
        (
            SamplingParams(logits_processors=[{"processor": {"class_name": "A", "source": "import"}}]),
            r"logits_processors\[0\]: ",
        ),
        (SamplingParams(logits_processors=["no.such.callable"]), r"logits_processors\[0\]: .*no\.such\.callable"),
    ],
)
def test_processor_load_error(
    llm: LLM, params: SamplingParams, message: str, assert_idle: Callable[[LLM], None]
) -> None:
    steps = llm._engine.stats().steps
    with pytest.raises(InvalidRequest, match=message):
        quiet(llm, ["a", "b"], params)
    assert llm._engine.stats().steps == steps
    assert_idle(llm)


def test_fault_cancels_other_prompts(llm: LLM, assert_idle: Callable[[LLM], None]) -> None:
    fails = SamplingParams(max_tokens=8, ignore_eos=True, custom_logit_processor=Fails)
    with pytest.raises(ProcessorFault, match="no such luck") as caught:
        quiet(llm, ["a", "b", "c"], [FOREVER, fails, FOREVER])
    fault = caught.value
    assert (fault.name, fault.kind) == ("Fails", "exception")
    assert fault.digest.startswith("sha256:")
    assert 'raise ZeroDivisionError("no such luck")\nZeroDivisionError: no such luck' in fault.traceback
    assert fault.traceback in "".join(fault.__notes__)
    assert isinstance(fault, LogitshipError)
    steps = llm._engine.stats().steps
    assert steps < 100  # of the 500 that the other requests would take
    assert_idle(llm)


def test_bad_result_fault(llm: LLM) -> None:
    def lose_a_token(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        return logits[1:]

    with pytest.raises(ProcessorFault) as caught:
        quiet(llm, "a", SamplingParams(logits_processors=[lose_a_token]))
    assert caught.value.kind == "bad_result"


def test_generation_error_has_partial_output(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise MemoryError("the test's")

    monkeypatch.setattr(llm._engine._engine._runner, "forward", broken)
    with pytest.raises(GenerationError) as caught:
        quiet(llm, "a", GREEDY)
    assert caught.value.type == "InternalServerError"
    assert isinstance(caught.value.partial, RequestOutput)
    assert "the test's" in caplog.text
