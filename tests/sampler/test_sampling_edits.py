from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from logitship.client.sampling_record import ADD, REPETITION, SCALE, SET
from logitship.sampler.row_errors import SamplingEditsTooLongError
from logitship.sampler.sampling_edits import edits_between, edits_of_request
from logitship.sampler.sampling_params import MAX_LISTED, SamplingParams

Logits = npt.NDArray[np.float32]
TOKENS = np.array([3, 8, 5, 40, 11])
BEFORE = np.array([1.5, -0.3, 2.25, 0.0, -math.inf], np.float32)


def changed(edit: Callable[[Logits], object]) -> Logits:
    after = BEFORE.copy()
    edit(after)
    return after


def add_at(places: list[int], values: list[float]) -> Callable[[Logits], object]:
    return lambda logits: logits.__setitem__(places, logits[places] + np.array(values, np.float32))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda logits: None, []),
        (add_at([0, 2], [1.0, 2.0]), [(ADD, [3, 5], [1.0, 2.0])]),
        (lambda logits: logits.__iadd__(0.5), [(ADD, [], [0.5])]),
        (lambda logits: logits.__imul__(2.0), [(SCALE, [], [2.0])]),
        (lambda logits: logits.__setitem__([0, 2], logits[[0, 2]] * 3), [(SCALE, [3, 5], [3.0])]),
        (lambda logits: logits.__setitem__(4, 7.0), [(SET, [11], [7.0])]),
        (lambda logits: logits.__setitem__(0, -math.inf), []),  # it is replaced later, or could not be sampled
        (lambda logits: (logits.__imul__(2.0), logits.__setitem__(4, 7.0)), [(SCALE, [], [2.0]), (SET, [11], [7.0])]),
    ],
)
def test_what_was_done(edit: Callable[[Logits], object], expected: list[tuple[int, list[int], list[float]]]) -> None:
    edits = list(edits_between(BEFORE, changed(edit), TOKENS, "Mine"))
    assert [(each.kind, each.tokens.tolist(), each.values.tolist()) for each in edits] == expected


def test_own_parameters_in_the_order_of_the_sampler() -> None:
    params = SamplingParams(logit_bias={3: 1.0, 8: -1.0, 99: 5.0}, repetition_penalty=2.0, presence_penalty=0.5)
    model = np.zeros(100, np.float32)
    model[TOKENS[:4]] = BEFORE[:4]
    request = model.copy()
    request[[3, 8]] += np.array([1.0, -1.0], np.float32)
    for token in (8, 5):
        request[token] = request[token] / 2 if request[token] > 0 else request[token] * 2
    request[5] -= 0.5  # the other one is of the prompt
    edits = list(edits_of_request(model, request, TOKENS[:4], params, [8, 77, 5]))
    assert [(each.kind, each.tokens.tolist(), each.values.tolist()) for each in edits] == [
        (ADD, [3, 8], [1.0, -1.0]),
        (REPETITION, [8, 5], [2.0]),
        (ADD, [5], [-0.5]),
    ]


def test_edit_of_too_many_tokens_names_the_processor() -> None:
    before = np.linspace(1, 2, MAX_LISTED + 1).astype(np.float32)
    after = before**2
    tokens = np.arange(len(before))
    with pytest.raises(SamplingEditsTooLongError, match=f"Bends changed the logits of {MAX_LISTED + 1} tokens"):
        list(edits_between(before, after + 1, tokens, "Bends"))
    assert len(list(edits_between(before, before * 3, tokens, "Scales"))) == 1
