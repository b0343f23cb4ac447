from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from logitship.server.vllm_names.devices import (
    async_tensor_h2d,
    current_platform,
    gpu_sync_allowed,
    is_pin_memory_available,
)


@pytest.mark.parametrize("data", [[1, 2], (1, 2), np.array([1, 2]), torch.tensor([1, 2])])
def test_values_are_copied(data: Any) -> None:
    copied = async_tensor_h2d(data, "cpu", torch.float32)
    assert copied.tolist() == [1.0, 2.0]
    assert copied.dtype == torch.float32


@pytest.mark.parametrize("data", [np.ones(2, np.float32), torch.ones(2)])
def test_copies_share_no_memory(data: Any) -> None:
    copied = async_tensor_h2d(data, "cpu", torch.float32)
    data[0] = 5.0
    assert copied.tolist() == [1.0, 1.0]


def test_type_of_the_values_is_the_default() -> None:
    assert async_tensor_h2d([1, 2], device=torch.device("cpu")).dtype == torch.int64
    assert async_tensor_h2d(np.array([True]), "cpu").dtype == torch.bool


def test_values_are_copied_into_out() -> None:
    out = torch.zeros(2, dtype=torch.float64)
    assert async_tensor_h2d([3, 4], out=out) is out
    assert out.tolist() == [3.0, 4.0]


def test_refused_arguments() -> None:
    with pytest.raises(ValueError, match="needs a device or out"):
        async_tensor_h2d([1])
    with pytest.raises(TypeError, match=r"dtype is torch.int32, and out has torch.float64"):
        async_tensor_h2d([1], dtype=torch.int32, out=torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="not from meta"):
        async_tensor_h2d(torch.zeros(1, device="meta"), "cpu")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_platform_is_that_of_torch(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert current_platform.device_type == ("cuda" if has_gpu else "cpu")
    assert current_platform.device_count() == (4 if has_gpu else 1)
    assert (current_platform.is_cpu(), current_platform.is_cuda_alike()) == (not has_gpu, has_gpu)
    assert (current_platform.is_cuda(), current_platform.is_rocm()) == (has_gpu, False)
    assert not current_platform.is_tpu()
    assert not current_platform.is_xpu()
    assert is_pin_memory_available() == has_gpu


def test_gpu_sync_allowed_is_a_context() -> None:
    with gpu_sync_allowed():
        pass
