from __future__ import annotations

import numpy as np
import pytest
import torch

from logitship.sampler.device_tensor import copies_to, token_positions


def test_cpu_tensor_shares_memory() -> None:
    array = np.arange(4)
    tensor = copies_to(torch.device("cpu"), pin_memory=False)(array)
    array[0] = 9
    assert tensor.tolist() == [9, 1, 2, 3]
    assert tensor.dtype == torch.int64


def test_other_device_keeps_shape_and_dtype() -> None:
    tensor = copies_to(torch.device("meta"), pin_memory=False)(np.zeros((2, 3), dtype=np.float32))
    assert tensor.device.type == "meta"
    assert tensor.shape == (2, 3)
    assert tensor.dtype == torch.float32


def test_copies_to_a_gpu_are_asynchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no caller asks for page-locked memory."""
    pinned, copied = torch.zeros(2), []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda host: pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda host, *args, **kwargs: copied.append((host, args, kwargs)))
    gpu = torch.device("cuda")
    copies_to(gpu)(np.zeros(2, dtype=np.float32))
    ((host, args, kwargs),) = copied
    assert host is pinned
    assert (args, kwargs) == ((gpu,), {"non_blocking": True})


def test_token_positions() -> None:
    tokens_of = {4: np.array([7, 1]), 0: np.array([], dtype=np.int64), 2: np.array([1])}
    rows, token_ids = token_positions(tokens_of, copies_to(torch.device("cpu"), pin_memory=False))
    assert rows.tolist() == [4, 4, 2]
    assert token_ids.tolist() == [7, 1, 1]
    assert rows.dtype == token_ids.dtype == torch.int64
