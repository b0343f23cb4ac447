from __future__ import annotations

import torch

from logitship.sampler.ops.greedy import greedy_sample


def test_greedy_sample_takes_lowest_id_of_tie() -> None:
    logits = torch.randint(5, (50, 997)).float()
    assert greedy_sample(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
