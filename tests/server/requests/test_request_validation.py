"""Values that can be sent to sandboxed processors. The other checks are tested through the APIs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest

from logitship.client.serialization.processor_string import InstalledProcessor, ProcessorString, SourceProcessor
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import AttachedProcessor, CallableRequest, GenerationRequest, ProcessorRequest
from logitship.server.requests.request_validation import Limits, check, check_sandboxed, in_client_words


def test_field_names_are_replaced_except_in_quotes() -> None:
    refused = BadRequest("'min_new_tokens' is over max_new_tokens", param="min_new_tokens")
    in_client_words(refused, {"min_new_tokens": "min_tokens", "max_new_tokens": "max_tokens"})
    assert refused.param == "min_tokens"
    assert refused.message == "min_tokens: 'min_new_tokens' is over max_tokens"


@pytest.mark.parametrize("param", ["processors[0]", "processors[0].params"])
def test_field_names_are_kept_in_messages_of_processors(param: str) -> None:
    refused = BadRequest("max_tokens: required", param=param)
    in_client_words(refused, {"max_tokens": "max_new_tokens", param: "custom_logit_processor"})
    assert refused.param == "custom_logit_processor"
    assert refused.message == "custom_logit_processor: max_tokens: required"


SHIPPED = SourceProcessor("class A: ...", "A")
INSTALLED = InstalledProcessor("min_p")
UNSUPPORTED = numpy.float64(1)


def request(*processors: AttachedProcessor, **params: Any) -> GenerationRequest:
    return GenerationRequest(
        rid="r", prompt_token_ids=[5], sampling_params=SamplingParams(**params), processors=processors
    )


def ships_code(string: ProcessorString) -> bool:
    return string is SHIPPED


@pytest.mark.parametrize(
    ("refused", "param"),
    [
        (request(ProcessorRequest(SHIPPED, {"a": [UNSUPPORTED]})), "processors[0].params"),
        (request(ProcessorRequest(INSTALLED), ProcessorRequest(SHIPPED, {"a": Path()})), "processors[1].params"),
        (request(ProcessorRequest(SHIPPED), custom_params={"a": {1: UNSUPPORTED}}), "custom_params"),
        (request(ProcessorRequest(SHIPPED), extra_args={"a": object()}), "extra_args"),
        (request(ProcessorRequest(SHIPPED), temperature=UNSUPPORTED), "temperature"),
        (request(ProcessorRequest(SHIPPED), logit_bias={3: UNSUPPORTED}), "logit_bias"),
    ],
)
def test_sandbox_refuses_other_values(refused: GenerationRequest, param: str) -> None:
    with pytest.raises(BadRequest, match="a sandbox takes plain values only") as error:
        check_sandboxed(refused, ships_code)
    assert error.value.param == param


@pytest.mark.parametrize(
    "taken",
    [
        request(ProcessorRequest(SHIPPED, {"a": [1, {"b": (None, {2})}]}), custom_params={"c": b"d"}),
        request(ProcessorRequest(SHIPPED), stop=["x"], stop_token_ids={1}, allowed_token_ids=[3], logit_bias={4: 1}),
        # Not sandboxed.
        request(
            ProcessorRequest(INSTALLED, {"a": UNSUPPORTED}),
            custom_params={"a": UNSUPPORTED},
            extra_args={"a": object()},
        ),
        request(CallableRequest(print, (UNSUPPORTED,)), extra_args={"a": object()}),
        request(extra_args={"a": object()}),
    ],
)
def test_accepted_values(taken: GenerationRequest) -> None:
    check_sandboxed(taken, ships_code)


def test_engine_only_checks_values_for_sandboxes(make_engine: Callable[..., AsyncEngine]) -> None:
    engine = make_engine()
    unsupported = request(ProcessorRequest(SHIPPED, {"a": UNSUPPORTED}))
    engine.check(unsupported)
    engine.config = dataclasses.replace(engine.config, processor_isolation="sandbox")
    with pytest.raises(BadRequest, match=r"holds a value of type numpy\.float64"):
        asyncio.run(engine.submit(unsupported))


@pytest.mark.parametrize(("body_depth", "refused"), [(None, True), (101, True), (100, False)])
def test_parameters_of_a_flat_body_are_not_traversed(body_depth: int | None, refused: bool) -> None:
    """The parameters are nested more deeply than the body says, to see whether anything looks."""
    value: Any = 1
    for _ in range(101):
        value = [value]
    limits = Limits(vocab_size=10, max_model_len=10, max_logprobs=0, max_num_seqs=1)
    with pytest.raises(BadRequest, match="deeper than 100") if refused else nullcontext():
        check(request(custom_params={"a": value}, max_tokens=1), limits, body_depth)


@pytest.mark.parametrize("depth", [97, 300])
@pytest.mark.parametrize("field", ["args", "kwargs"])
def test_nesting_of_arguments(field: str, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    wanted = CallableRequest("ok.Class", (value,)) if field == "args" else CallableRequest("ok.Class", (), {"a": value})
    limits = Limits(vocab_size=10, max_model_len=10, max_logprobs=0, max_num_seqs=1)
    with pytest.raises(BadRequest, match="deeper than 100") if depth > 100 else nullcontext() as refused:
        check(request(wanted, max_tokens=1), limits)
    assert refused is None or refused.value.param == "processors[0]"
