from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from logitship.builtin_processors import DisallowedTokensLogitsProcessor, disallowed_tokens
from logitship.builtin_processors.parts.row_edits import on_device
from logitship.sampler.processors.request_view import ModelView
from tests.builtin_processors.conftest import MakeRow, Sglang

VOCAB_SIZE = 12


def disallowing(make_row: MakeRow, token_ids: list[int]) -> dict[str, Any]:
    return make_row({"token_ids": token_ids}, [1], [], vocab_size=VOCAB_SIZE)


def as_case(logits: torch.Tensor, *rows: dict[str, Any]) -> dict[str, Any]:
    """Return a case for SGLang's process."""
    plain = [{"params": {"token_ids": row["token_ids"]}, "prompt": [1], "output": []} for row in rows]
    return {"logits": logits.tolist(), "rows": plain}


def test_each_row_has_its_own_list(make_row: MakeRow, sglang: Sglang) -> None:
    """Compared with SGLang on single rows. Rows are added and removed between the steps of one instance."""
    generator = random.Random(0)
    processor = DisallowedTokensLogitsProcessor()
    pool = [disallowing(make_row, generator.choices(range(VOCAB_SIZE), k=generator.randrange(8))) for _ in range(20)]
    cases, results = [], []
    for _ in range(200):
        if generator.random() < 0.7:
            rows = generator.choices(pool, k=generator.randrange(1, 9))
        logits = torch.randn(len(rows), VOCAB_SIZE)
        cases += [as_case(logits[[i]], row) for i, row in enumerate(rows)]
        result = processor(logits, rows)
        assert result is logits
        results += [[row] for row in result.tolist()]
    assert results == sglang("DisallowedTokensLogitsProcessor", cases)


@pytest.mark.parametrize("token_ids", [[], [3], [3, 3, 0, 11]])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_equal_lists_match_sglang(make_row: MakeRow, sglang: Sglang, token_ids: list[int], num_rows: int) -> None:
    logits = torch.randn(num_rows, VOCAB_SIZE)
    rows = [disallowing(make_row, token_ids) for _ in range(num_rows)]
    (theirs,) = sglang("DisallowedTokensLogitsProcessor", [as_case(logits, *rows)])
    assert DisallowedTokensLogitsProcessor()(logits, rows).tolist() == theirs


def test_different_lists_fail_in_sglang(make_row: MakeRow, sglang: Sglang) -> None:
    """This is why `test_each_row_has_its_own_list` calls SGLang row by row."""
    rows = [disallowing(make_row, [i]) for i in range(2)]
    assert sglang("DisallowedTokensLogitsProcessor", [as_case(torch.zeros(2, VOCAB_SIZE), *rows)]) == ["AssertionError"]


def test_positions_are_cached_for_the_same_rows(make_row: MakeRow, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def count(*arguments: Any) -> Any:
        made.append(arguments)
        return on_device(*arguments)

    monkeypatch.setattr(disallowed_tokens, "on_device", count)
    processor = DisallowedTokensLogitsProcessor()
    rows = [disallowing(make_row, [i]) for i in range(3)]
    for batch, total in ((rows, 1), (rows, 1), (rows[1:], 2), (rows[:2], 3), (rows[:2], 3)):
        processor(torch.zeros(len(batch), VOCAB_SIZE), batch)
        assert len(made) == total


def test_two_lists_on_one_sequence(make_row: MakeRow) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    processor = DisallowedTokensLogitsProcessor()
    for token_ids in ([1], [2], [1]):
        processor(logits, [disallowing(make_row, token_ids)])
    assert logits[0].isinf().nonzero().flatten().tolist() == [1, 2]


def test_subclass_need_not_call_constructor(make_row: MakeRow) -> None:
    """SGLang's class has no constructor."""

    class Mine(DisallowedTokensLogitsProcessor):
        def __init__(self) -> None:
            self.calls = 0

    assert Mine()(torch.zeros(1, VOCAB_SIZE), [disallowing(make_row, [4])])[0].isinf().sum() == 1


def test_no_rows_is_a_noop() -> None:
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
