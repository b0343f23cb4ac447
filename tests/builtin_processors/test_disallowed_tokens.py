from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship.builtin_processors import DisallowedTokensLogitsProcessor
from logitship.sampler.request_view import ModelView

VOCAB_SIZE = 12
MakeRow = Callable[..., dict[str, Any]]


def test_each_row_loses_its_own_tokens(make_row: MakeRow) -> None:
    generator = random.Random(0)
    lists = [generator.choices(range(VOCAB_SIZE), k=generator.randrange(8)) for _ in range(9)]
    logits = torch.randn(9, VOCAB_SIZE)
    expected = logits.clone()
    for row, token_ids in enumerate(lists):
        expected[row, token_ids] = -torch.inf

    result = DisallowedTokensLogitsProcessor()(logits, [make_row({"token_ids": ids}, [1], []) for ids in lists])

    assert result is logits
    assert torch.equal(result, expected)


@pytest.mark.parametrize("token_ids", [[], [3], [3, 3, 0, 11]])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_rows_that_agree_get_what_sglang_gives(
    make_row: MakeRow, sglang: Callable[..., list[Any]], token_ids: list[int], num_rows: int
) -> None:
    logits = torch.randn(num_rows, VOCAB_SIZE)
    rows = [{"params": {"token_ids": token_ids}, "prompt": [1], "output": []}] * num_rows
    (theirs,) = sglang("DisallowedTokensLogitsProcessor", [{"logits": logits.tolist(), "rows": rows}])

    ours = DisallowedTokensLogitsProcessor()(logits, [make_row(**row) for row in rows])

    assert ours.tolist() == theirs


def test_rows_that_differ_stop_sglang(sglang: Callable[..., list[Any]]) -> None:
    """The difference that `test_each_row_loses_its_own_tokens` is about is still there."""
    rows = [{"params": {"token_ids": [i]}, "prompt": [1], "output": []} for i in range(2)]
    logits = [[0.0] * VOCAB_SIZE] * 2
    assert sglang("DisallowedTokensLogitsProcessor", [{"logits": logits, "rows": rows}]) == ["AssertionError"]


def test_the_list_is_converted_once_a_sequence(make_row: MakeRow) -> None:
    token_ids, state = [4, 5], dict[str, Any]()
    processor = DisallowedTokensLogitsProcessor()
    processor(torch.zeros(1, VOCAB_SIZE), [make_row({"token_ids": token_ids}, [1], [], state)])
    first = copy.copy(state)
    processor(torch.zeros(1, VOCAB_SIZE), [make_row({"token_ids": token_ids}, [1], [2], state)])
    assert state["disallowed_tokens"] is first["disallowed_tokens"]


def test_two_lists_on_one_sequence_both_count(make_row: MakeRow) -> None:
    state: dict[str, Any] = {}
    processor = DisallowedTokensLogitsProcessor()
    logits = torch.zeros(1, VOCAB_SIZE)
    for token_ids in ([1], [2], [1]):
        processor(logits, [make_row({"token_ids": token_ids}, [0], [], state)])
    assert logits[0].isinf().nonzero().flatten().tolist() == [1, 2]


def test_without_rows_nothing_happens() -> None:
    logits = torch.zeros(0, VOCAB_SIZE)
    assert DisallowedTokensLogitsProcessor()(logits, []) is logits
    assert DisallowedTokensLogitsProcessor()(logits) is logits


@pytest.mark.parametrize("token_ids", [[], [0], [VOCAB_SIZE - 1], [2, 2], list(range(1, VOCAB_SIZE)), [1] * 50])
def test_accepts(token_ids: list[int]) -> None:
    DisallowedTokensLogitsProcessor().prepare(
        {"token_ids": token_ids, "other": 1}, ModelView(VOCAB_SIZE, frozenset(), None)
    )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "token_ids: missing from custom_params, expected a list of token ids"),
        ({}, "token_ids: missing"),
        ({"token_ids": None}, "token_ids: expected a list of token ids, got None"),
        ({"token_ids": 3}, "token_ids: expected a list of token ids, got 3"),
        ({"token_ids": "3" * 200}, r"token_ids: expected a list of token ids, got '3+\.\.\.$"),
        ({"token_ids": {"3": 1}}, "token_ids: expected a list"),
        ({"token_ids": [1, "2"]}, "token_ids: expected integers, got '2'"),
        ({"token_ids": [1.0]}, "token_ids: expected integers, got 1.0"),
        ({"token_ids": [True]}, "token_ids: expected integers, got True"),
        ({"token_ids": [[1]]}, r"token_ids: expected integers, got \[1\]"),
        ({"token_ids": [-1]}, r"token_ids: token id -1 is outside the vocabulary \(0 to 11\)"),
        ({"token_ids": [12]}, r"token_ids: token id 12 is outside the vocabulary \(0 to 11\)"),
        ({"token_ids": [10**30]}, "outside the vocabulary"),
        ({"token_ids": list(range(12))}, "token_ids: every token of the vocabulary is disallowed"),
    ],
)
def test_refuses(params: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DisallowedTokensLogitsProcessor().prepare(params, ModelView(VOCAB_SIZE, frozenset(), None))
