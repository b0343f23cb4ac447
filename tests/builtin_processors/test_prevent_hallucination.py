from __future__ import annotations

from typing import Any

import pytest

from logitship.builtin_processors import PreventHallucinationLogitsProcessor
from logitship.builtin_processors.prevent_hallucination import DEFAULT_PHRASE
from logitship.sampler.processors.request_view import ModelView


def test_defaults_equal_the_original(zoo_model: ModelView) -> None:
    prepared = PreventHallucinationLogitsProcessor().prepare({}, zoo_model)
    assert (prepared.minp, prepared.tolerate) == (0.4, 1)
    assert list(prepared.phrase) == zoo_model.tokenizer.encode(DEFAULT_PHRASE, add_special_tokens=False)


@pytest.mark.parametrize("params", [{"minp": 0}, {"minp": 1}, {"tolerate": 0, "phrase": "a"}, {"other": 5}])
def test_accepts(params: dict[str, Any], zoo_model: ModelView) -> None:
    PreventHallucinationLogitsProcessor().prepare(params, zoo_model)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"minp": 1.5}, "minp: expected a number from 0 to 1, got 1.5"),
        ({"minp": "0.5"}, "minp: expected a number from 0 to 1, got '0.5'"),
        ({"minp": True}, "minp: expected a number from 0 to 1, got True"),
        ({"tolerate": -1}, "tolerate: expected an integer from 0 to 1000000000, got -1"),
        ({"tolerate": 1.5}, "tolerate: expected an integer from 0 to 1000000000, got 1.5"),
        ({"tolerate": 10**20}, "tolerate: expected an integer from 0 to 1000000000, got 1"),
        ({"phrase": None}, "phrase: expected a string, got None"),
    ],
)
def test_refuses(params: dict[str, Any], message: str, zoo_model: ModelView) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        PreventHallucinationLogitsProcessor().prepare(params, zoo_model)
