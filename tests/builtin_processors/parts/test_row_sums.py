from __future__ import annotations

import pytest
import torch

from logitship.builtin_processors.parts.row_sums import row_sums


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000, 49_152])
def test_equals_the_sum_in_any_batch(size: int) -> None:
    values = torch.rand(9, size, generator=torch.Generator().manual_seed(size))
    found = row_sums(values)
    assert torch.allclose(found, values.double().sum(dim=1, keepdim=True), rtol=1e-6)
    for rows in (slice(0, 1), slice(3, 4), slice(2, 9)):
        assert torch.equal(row_sums(values[rows]), found[rows])
