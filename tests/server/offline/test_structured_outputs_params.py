from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams
from logitship.server.offline.structured_outputs_params import StructuredOutputsParams
from logitship.server.refusals import BadRequest

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}

TAG = {
    "type": "tag",
    "begin": "<f>",
    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
    "end": "</f>",
}


def _is_object(text: str) -> bool:
    return json.loads(text) in ({"a": 1}, {"a": 2})


CASES: list[tuple[StructuredOutputsParams | dict[str, Any], Callable[[str], object]]] = [
    (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), _is_object),
    (StructuredOutputsParams(json=json.dumps(SCHEMA), whitespace_pattern=" ?"), _is_object),
    (StructuredOutputsParams(regex="[ab]{5}"), re.compile("[ab]{5}").fullmatch),
    (StructuredOutputsParams(choice=("yes", "no")), {"yes", "no"}.__contains__),
    (StructuredOutputsParams(grammar='root ::= "x" | "y"'), {"x", "y"}.__contains__),
    (StructuredOutputsParams(structural_tag=json.dumps({"format": TAG})), re.compile("<f>[12]</f>").fullmatch),
    ({"regex": "[ab]{5}"}, re.compile("[ab]{5}").fullmatch),
]


@pytest.mark.parametrize(("given", "fits"), CASES, ids=[str(case[0])[:50] for case in CASES])
def test_constraints(llm: LLM, given: StructuredOutputsParams | dict[str, Any], fits: Callable[[str], object]) -> None:
    params = SamplingParams(structured_outputs=given, n=2, max_tokens=50, seed=0)
    (output,) = llm.generate("hello", params, use_tqdm=False)
    for completion in output.outputs:
        assert fits(completion.text), completion.text
        assert [receipt.name for receipt in completion.receipts] == ["grammar"]


def test_with_other_processors(llm: LLM) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[ab]{3}"),
        logits_processors=[{"processor": {"name": "disallowed_tokens"}, "params": {"token_ids": [0]}}],
        max_tokens=9,
    )
    (output,) = llm.generate("hello", params, use_tqdm=False)
    assert re.fullmatch("[ab]{3}", output.outputs[0].text)
    assert [receipt.name for receipt in output.outputs[0].receipts] == ["grammar", "disallowed_tokens"]


AB = '{"format": {"type": "const_string", "value": "ab"}}'


@pytest.mark.parametrize(
    "values",
    [{"regex": "ab"}, {"ebnf": 'root ::= "ab"'}, {"json_schema": '{"const": 5}'}, {"structural_tag": AB}],
    ids=str,
)
def test_sglang_names(llm: LLM, values: dict[str, Any]) -> None:
    (output,) = llm.generate("hello", values, use_tqdm=False)
    assert output.outputs[0].text in ("ab", "5")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "structured_outputs: give exactly one"),
        ({"json": {}, "regex": "a"}, "structured_outputs: give exactly one"),
        ({"regex": 5}, "structured_outputs.regex: must be a string"),
        ({"choice": "yes"}, "structured_outputs.choice: must be a list of strings"),
        ({"choice": 5}, "structured_outputs.choice: must be a list of strings"),
        ({"choice": {"yes": 1}}, "structured_outputs.choice: must be a list of strings"),
        (
            {"json": {}, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties: is not",
        ),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern: requires json"),
    ],
    ids=str,
)
def test_invalid_constraints(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSamplingParams, match=message):
        StructuredOutputsParams(**values)
    with pytest.raises(InvalidSamplingParams, match=message):
        SamplingParams(structured_outputs=values)


def test_constraint_of_wrong_type() -> None:
    with pytest.raises(InvalidSamplingParams, match="must be StructuredOutputsParams or a dict, not str"):
        SamplingParams(structured_outputs="regex")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(structured_outputs={"regex": "(a"}), "structured_outputs.regex"),
        ({"regex": "(a"}, "sampling_params.regex"),
        ({"ebnf": "x"}, "sampling_params.ebnf"),
        ({"json_schema": "x"}, "sampling_params.json_schema"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag"),
        (SamplingParams(structured_outputs={"structural_tag": "{}"}), "structured_outputs.structural_tag"),
    ],
    ids=str,
)
def test_unusable_constraints(llm: LLM, params: SamplingParams | dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(param)}: .* cannot be used: ") as caught:
        llm.generate("hello", params, use_tqdm=False)
    assert caught.value.param == param


def test_two_constraints_in_sglang_names() -> None:
    with pytest.raises(BadRequest, match=r"sampling_params.ebnf: a request may have only one constraint"):
        SamplingParams.from_sglang({"ebnf": "x", "regex": "y"})
