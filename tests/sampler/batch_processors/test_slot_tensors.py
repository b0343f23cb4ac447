from __future__ import annotations

import numpy as np
import pytest
import torch

from logitship.sampler.batch_processors.slot_tensors import SlotTensor


@pytest.mark.parametrize("is_shared", [True, False])
def test_both_sides_have_what_is_written(is_shared: bool) -> None:
    tensor = SlotTensor((3, 4), torch.device("cpu"))
    if not is_shared:  # as on a GPU
        tensor.gpu = tensor.cpu.clone()
        tensor._is_shared = False
    tensor.write((np.array([2, 2, 0]), np.array([0, 3, 1])), [7, 8, 9])
    expected = [[0, 9, 0, 0], [0, 0, 0, 0], [7, 0, 0, 8]]
    assert tensor.np.tolist() == tensor.cpu.tolist() == tensor.gpu.tolist() == expected
    assert tensor.gpu.dtype == torch.int32
