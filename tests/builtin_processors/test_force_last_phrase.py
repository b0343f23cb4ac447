from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.builtin_processors import ForceLastPhraseLogitsProcessor
from logitship.sampler.processors.request_view import ModelView


@pytest.mark.parametrize("end", [2, 20])
def test_phrase_precedes_any_end_token(end: int, zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]) -> None:
    """The original only uses the tokenizer's."""
    processor, output = ForceLastPhraseLogitsProcessor(), list[int]()
    row = make_row({"phrase": "a b"}, [1], output, eos_token_ids=frozenset({2, 20}), tokenizer=zoo_model.tokenizer)
    for wanted in (30, end, 31, 31, end):
        logits = torch.zeros(1, 48)
        logits[0, wanted] = 5.0
        output.append(int(processor(logits, [row]).argmax()))
    assert output == [30, *zoo_model.tokenizer.encode("a b", add_special_tokens=False), end]


def test_accepts(zoo_model: ModelView) -> None:
    prepared = ForceLastPhraseLogitsProcessor().prepare({"phrase": "a b", "other": 1}, zoo_model)
    assert prepared.phrase == (16, 9, 17)


def test_refuses(zoo_model: ModelView) -> None:
    processor = ForceLastPhraseLogitsProcessor()
    with pytest.raises(ValueError, match=r"^phrase: missing from custom_params, expected a string$"):
        processor.prepare(None, zoo_model)
    with pytest.raises(ValueError, match=r"^phrase: expected a string of at least one token, got ''$"):
        processor.prepare({"phrase": ""}, zoo_model)
    with pytest.raises(ValueError, match=r"^the model has no EOS token"):
        processor.prepare({"phrase": "a"}, ModelView(48, frozenset(), zoo_model.tokenizer))
