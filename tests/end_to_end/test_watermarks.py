"""Watermarks on the real model: found in answers of 200 tokens at temperature 1, also beside other processors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from logitship import LLM, CustomLogitProcessor, SamplingParams
from logitship.builtin_processors import detect_watermark
from tests.helpers.watermarks import WATERMARK_KEY

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]
VOCAB_SIZE = 49152
PROMPTS = ["The history of the bicycle begins", "My neighbour's garden", "In the year 2100,", "How to bake bread:"]
MARKS: dict[str, dict[str, Any]] = {"watermark_kgw": {}, "watermark_synthid": {}}


class NoSemicolon(CustomLogitProcessor):
    """Forbids a token."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        logits[:, 43] = -float("inf")
        return logits


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    key = tmp_path_factory.mktemp("watermarks") / "key"
    key.write_bytes(WATERMARK_KEY.secret)
    with LLM(watermark_key_file=str(key), max_model_len=512, random_seed=0) as llm:
        yield llm


def p_values(answers: list[Any], processor: str) -> list[float]:
    tokens = [answer.outputs[0].token_ids for answer in answers]
    assert [len(each) for each in tokens] == [200] * len(answers)
    return [detect_watermark(each, WATERMARK_KEY, processor, vocab_size=VOCAB_SIZE).p_value for each in tokens]


@pytest.mark.parametrize("processor", MARKS)
def test_marks_are_found(llm: LLM, processor: str) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    plain = p_values(llm.generate(PROMPTS, params), processor)
    marking = SamplingParams(max_tokens=200, ignore_eos=True, logits_processors=[{"processor": {"name": processor}}])
    marked = p_values(llm.generate(PROMPTS, marking), processor)
    assert max(marked) < 1e-6
    assert min(plain) > 1e-4


@pytest.mark.parametrize("processor", MARKS)
def test_marks_are_found_beside_a_class_and_a_grammar(llm: LLM, processor: str) -> None:
    processors = [
        {"processor": {"name": "grammar"}, "params": {"regex": r"[A-Za-z ,.\n]{1500,9000}"}},
        NoSemicolon,
        {"processor": {"name": processor}},
    ]
    answers = llm.generate(PROMPTS, SamplingParams(max_tokens=200, logits_processors=processors))
    assert max(p_values(answers, processor)) < 1e-6
