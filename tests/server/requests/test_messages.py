from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from logitship.sampler.sampling_params import InvalidSamplingParams
from logitship.server.requests.messages import BeamSearch, beam_search_of


@dataclass(frozen=True)
class Fields:
    n: int = 1
    num_beams: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: Any = False


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        (Fields(), None),
        (Fields(n=3), None),
        (Fields(n=3, num_beams=1), None),
        (Fields(n=3, use_beam_search=True), 3),
        (Fields(use_beam_search=True), 1),
        (Fields(use_beam_search=True, num_beams=1), 1),
        (Fields(n=2, num_beams=4), 4),
        (Fields(n=2, num_beams=4, use_beam_search=True), 4),
    ],
)
def test_fields_that_select_beam_search(fields: Fields, width: int | None) -> None:
    search = beam_search_of(fields)
    assert (search and search.width) == width


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (Fields(n=5, num_beams=4), "n"),
        (Fields(num_beams=0), "num_beams"),
        (Fields(num_beams=2, length_penalty=math.nan), "length_penalty"),
        (Fields(num_beams=2, length_penalty=10.5), "length_penalty"),
        (Fields(num_beams=2, early_stopping="always"), "early_stopping"),
        (Fields(length_penalty=2.0), "length_penalty"),
        (Fields(early_stopping=True), "early_stopping"),
        (Fields(num_beams=1, early_stopping="never"), "early_stopping"),
    ],
)
def test_invalid_fields_are_refused(fields: Fields, name: str) -> None:
    with pytest.raises(InvalidSamplingParams) as refused:
        beam_search_of(fields)
    assert refused.value.field == name


def test_extreme_length_penalties_give_finite_scores() -> None:
    for penalty in (-10, 10):
        score: Callable[[float, int], float] = BeamSearch(1, penalty).score
        assert math.isfinite(score(-1e6, 1_000_000))
