from __future__ import annotations

import math

import pytest
import torch

from logitship.sampler.ops.logprobs import RowLogprobs, token_logprobs


@pytest.mark.parametrize("vocab_size", [1, 6, 300, 5000])
@pytest.mark.parametrize("distinct", [3, 10**6])
def test_logprobs_match_log_softmax(vocab_size: int, distinct: int) -> None:
    torch.manual_seed(vocab_size + distinct)
    logits = torch.randint(distinct, (8, vocab_size)).float() * 10 / distinct
    token_ids = torch.randint(vocab_size, (8,)).tolist()
    top = [0, 1, 5, 20, 2, 400, 0, 5]
    expected = logits.log_softmax(-1)
    for row, record in enumerate(token_logprobs(logits, token_ids, top)):
        values = expected[row].tolist()
        assert record.token_id == token_ids[row]
        assert record.logprob == values[token_ids[row]]
        assert record.rank == 1 + sum(value > record.logprob for value in values)
        order = sorted(range(vocab_size), key=lambda token: (-values[token], token))[: top[row]]
        assert record.top == tuple((token, values[token]) for token in order)


def test_row_is_independent_of_other_rows_top() -> None:
    logits = torch.randint(4, (1, 3000)).float()
    [alone] = token_logprobs(logits, [5], [2])
    together = token_logprobs(torch.cat([torch.randn(3, 3000), logits]), [1, 2, 3, 5], [20, 0, 700, 2])
    assert together[3] == alone


def test_masked_tokens_come_last() -> None:
    [record] = token_logprobs(torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0]]), [0], [3])
    half = torch.tensor(0.5).log().item()
    assert record == RowLogprobs(0, -math.inf, 3, ((1, half), (3, half), (0, -math.inf)))


def test_requested_tokens() -> None:
    logits = torch.randn(3, 9)
    expected = logits.log_softmax(-1)
    requested = [[4, 4, 0], [], [8]]
    for row, record in enumerate(token_logprobs(logits, [1, 2, 3], [2, 0, 0], requested)):
        assert record.requested == tuple((token, float(expected[row, token])) for token in requested[row])


def test_no_rows() -> None:
    assert token_logprobs(torch.empty(0, 5), [], []) == []
