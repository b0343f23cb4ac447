from __future__ import annotations

import random

import torch

from logitship.sampler.ops.penalties import apply_penalties
from tests.helpers.random_cases import random_seeds


def penalised(logit: float, count: int, repetition: float, frequency: float, presence: float) -> float:
    logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - (presence if count > 0 else 0)


@random_seeds(10)
def test_penalties_match_plain_loop(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    logits = torch.randn(5, 40) * 5
    logits[0, :5] = torch.tensor([0.0, -0.0, float("-inf"), 1e4, -1e4])
    entries = [
        (row, token, rng.randint(0, 4), 0.5 + rng.random() * 2, rng.uniform(-2, 2), rng.uniform(-2, 2))
        for row in range(4)
        for token in sorted({*rng.sample(range(40), 12), *range(5)})
    ]
    expected = logits.tolist()
    for row, token, count, *penalties in entries:
        expected[row][token] = penalised(expected[row][token], count, *penalties)
    rows, tokens, counts, *columns = zip(*entries, strict=True)
    apply_penalties(
        logits,
        torch.tensor(rows),
        torch.tensor(tokens),
        torch.tensor(counts, dtype=torch.float32),
        *(torch.tensor(column, dtype=torch.float32) for column in columns),
    )
    torch.testing.assert_close(logits, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_prompt_token_gets_repetition_penalty_only() -> None:
    one = torch.tensor([1.0])
    logits = torch.tensor([[4.0, 4.0]])
    apply_penalties(logits, torch.tensor([0]), torch.tensor([1]), torch.tensor([0.0]), 2 * one, one, one)
    assert logits.tolist() == [[4.0, 2.0]]
