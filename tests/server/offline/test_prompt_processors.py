from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor as HFLogitsProcessor

from logitship import CustomLogitProcessor
from logitship.server.offline.error_translation import InvalidRequest
from logitship.server.offline.llm import LLM
from logitship.server.offline.sampling_params import SamplingParams
from tests.helpers.offline import GREEDY, Force, count_up, quiet, tokens


class Add(CustomLogitProcessor):
    """Shifts the most likely token by `by`."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Any = None) -> torch.Tensor:
        for row, params in zip(logits, custom_param_list, strict=True):
            row[:] = row.roll(params["by"])
        return logits


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: [one]], ids=["one", "list"])
@pytest.mark.parametrize(
    "form",
    [
        Force,
        Force(),
        Force.to_str(),
        {
            "class_name": "Force",
            "source": "from logitship import CustomLogitProcessor\n"
            "class Force(CustomLogitProcessor):\n"
            "    def __call__(self, logits, custom_param_list=None):\n"
            "        for row, params in zip(logits, custom_param_list):\n"
            "            row[params['token_id']] += 1000\n"
            "        return logits\n",
        },
    ],
    ids=["class", "instance", "string", "source"],
)
def test_processor_formats(llm: LLM, form: Any, wrap: Callable[[Any], Any]) -> None:
    params = SamplingParams(max_tokens=4, custom_logit_processor=wrap(form), custom_params={"token_id": 99})
    (output,) = quiet(llm, "hello", params)
    assert output.outputs[0].token_ids == [99] * 4
    assert [(receipt.name, receipt.steps) for receipt in output.receipts] == [("Force", 4)]


def test_installed_processor_by_name(llm: LLM) -> None:
    (most_likely, *_) = tokens(quiet(llm, "hello", GREEDY))[0]
    params = SamplingParams(
        temperature=0,
        max_tokens=1,
        custom_logit_processor="disallowed_tokens",
        custom_params={"token_ids": [most_likely]},
    )
    assert tokens(quiet(llm, "hello", params)) != [[most_likely]]


def test_processor_list_order_and_params(llm: LLM) -> None:
    entries = [{"processor": Force, "params": {"token_id": 40}}, {"processor": Add, "params": {"by": 2}}]
    assert tokens(quiet(llm, "hello", SamplingParams(max_tokens=2, logits_processors=entries))) == [[42, 42]]
    backwards = SamplingParams(max_tokens=2, logits_processors=entries[::-1])
    assert tokens(quiet(llm, "hello", backwards)) == [[40, 40]]


def test_entries_without_params_get_custom_params(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=1,
        custom_params={"token_id": 40},
        logits_processors=[Force, {"processor": Add, "params": {"by": 1}}],
    )
    assert tokens(quiet(llm, "hello", params)) == [[41]]


def repeat_prompt(prompt_token_ids: list[int], output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[prompt_token_ids[len(output_token_ids)]] += 1000
    return logits


class ForceLength(HFLogitsProcessor):
    """Forces the number of tokens so far."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, input_ids.shape[1]] = 0.0
        return forced


@pytest.mark.parametrize(
    ("callable_", "expected"),
    [(count_up, [100, 101, 102]), (repeat_prompt, [10, 11, 12]), (ForceLength(), [3, 4, 5]), (ForceLength, [3, 4, 5])],
    ids=["two parameters", "three parameters", "Hugging Face object", "Hugging Face class"],
)
def test_request_level_callables(llm: LLM, callable_: Any, expected: list[int]) -> None:
    params = SamplingParams(max_tokens=3, logits_processors=[callable_], n=2)
    (output,) = quiet(llm, [10, 11, 12], params)
    assert [completion.token_ids for completion in output.outputs] == [expected, expected]


def test_callables_by_name(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "callables_of_mine.py").write_text(
        "class Forced:\n"
        "    def __init__(self, token_id):\n"
        "        self.token_id = token_id\n"
        "    def __call__(self, output_token_ids, logits):\n"
        "        logits[self.token_id] += 1000\n"
        "        return logits\n"
        "def forced(output_token_ids, logits):\n"
        "    return Forced(60)(output_token_ids, logits)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = {"qualname": "callables_of_mine.Forced", "args": (50,)}
    assert tokens(quiet(llm, "hello", SamplingParams(max_tokens=2, logits_processors=[entry]))) == [[50, 50]]
    named = SamplingParams(max_tokens=2, logits_processors=["callables_of_mine.forced"])
    assert tokens(quiet(llm, "hello", named)) == [[60, 60]]
    monkeypatch.delitem(sys.modules, "callables_of_mine")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            SamplingParams(custom_logit_processor=Add, custom_params={"by": object()}),
            "custom_params: holds a value of type object",
        ),
        (
            SamplingParams(logits_processors=[{"processor": Add, "params": {"by": torch.tensor(1)}}]),
            r"logits_processors\[0\]\.params: holds a value of type torch\.Tensor",
        ),
        (
            SamplingParams(custom_logit_processor=Add, extra_args={"by": object()}),
            "extra_args: holds a value of type object",
        ),
    ],
)
def test_params_of_unsupported_type(
    llm: LLM, params: SamplingParams, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm._engine, "config", dataclasses.replace(llm._engine.config, processor_isolation="sandbox"))
    with pytest.raises(InvalidRequest, match=message):
        quiet(llm, "a", params)


class Counts(Add):
    params_schema = {"properties": {"by": {"type": "integer"}}, "required": ["by"]}  # noqa: RUF012


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(custom_logit_processor=Counts), r"custom_params: params: 'by' is a required property"),
        (
            SamplingParams(logits_processors=[{"processor": Counts, "params": {"by": "x"}}]),
            r"logits_processors\[0\]\.params: params\.by: 'x' is not of type 'integer'",
        ),
    ],
)
def test_params_are_checked_against_the_schema(llm: LLM, params: SamplingParams, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        quiet(llm, "a", params)


@pytest.mark.parametrize("args", ["abc", 5, {"a": 1}])
def test_args_that_are_not_a_list(llm: LLM, args: Any) -> None:
    entry = {"qualname": "builtins.print", "args": args}
    with pytest.raises(InvalidRequest, match=r"logits_processors\[0\].args: must be a list"):
        quiet(llm, "hello", SamplingParams(max_tokens=1, logits_processors=[entry]))
