from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from logitship.builtin_processors.parts.row_constants import RowConstants, padded, to_device

CPU = torch.device("cpu")


def test_recomputed_for_other_rows() -> None:
    made: list[list[str]] = []

    def make(rows: Sequence[list[str]], device: torch.device) -> int:
        made.append([row[0] for row in rows])
        return len(made)

    constants = RowConstants(make)
    a, b = ["a"], ["b"]
    assert [constants.of(rows, CPU) for rows in ([a], [a], [a, b], [b, a], [b, a], [b], [["b"]])] == [
        1,
        1,
        2,
        3,
        3,
        4,
        5,
    ]
    assert made == [["a"], ["a", "b"], ["b", "a"], ["b"], ["b"]]


def test_recomputed_on_another_device() -> None:
    constants = RowConstants[int, torch.device](lambda rows, device: device)
    assert constants.of([1], CPU) == CPU
    assert constants.of([1], torch.device("meta")).type == "meta"


def test_padded() -> None:
    assert padded([[1, 2, 3], [4], (5, 6)], CPU).tolist() == [[1, 2, 3], [4, 4, 4], [5, 6, 5]]
    assert padded([[1]], CPU).dtype == torch.int64


@pytest.mark.parametrize(("dtype", "expected"), [(np.int64, torch.int64), (np.float32, torch.float32)])
def test_to_device(dtype: type, expected: torch.dtype) -> None:
    tensor = to_device((number for number in (1, 2)), dtype, CPU)
    assert tensor.tolist() == [1, 2]
    assert tensor.dtype == expected
    assert to_device([], dtype, CPU).shape == (0,)
