"""`vllm.platforms` and the helpers of `vllm.utils` with which processors copy tensors to the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def is_pin_memory_available() -> bool:
    """Return whether pinned memory helps: only with a CUDA device."""
    return torch.cuda.is_available()


def async_tensor_h2d(
    data: Any,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy a list, a NumPy array or a CPU tensor to a device, without waiting for the copy.

    Args:
        data: the values.
        device: where to; required without `out`.
        dtype: of the result; that of `out`, or of the values, by default.
        out: a tensor of the same shape to copy into.

    Returns:
        `out`, or a new tensor on `device`.

    Raises:
        ValueError: neither `device` nor `out` is given, or the values are not on the CPU.
        TypeError: `dtype` is not that of `out`.
    """
    if device is None and out is None:
        raise ValueError("async_tensor_h2d needs a device or out")
    if out is not None and dtype not in (None, out.dtype):
        raise TypeError(f"async_tensor_h2d: dtype is {dtype}, and out has {out.dtype}")
    dtype = out.dtype if out is not None else dtype
    values = torch.as_tensor(data) if not isinstance(data, list | tuple) else torch.tensor(data, dtype=dtype)
    if values.device.type != "cpu":
        raise ValueError(f"async_tensor_h2d copies from the CPU, not from {values.device}")
    if is_pin_memory_available():
        values = values.pin_memory()  # a copy of other memory waits for the device
    if out is not None:
        return out.copy_(values, non_blocking=True)
    return values.to(device=device, dtype=dtype, non_blocking=True, copy=True)


def gpu_sync_allowed() -> AbstractContextManager[None]:
    """Return a context manager that does nothing: vLLM's mode that reports waiting for the GPU is not here."""
    return nullcontext()


class Platform:
    """The device of this process, with the names of vLLM's `current_platform`."""

    @property
    def device_type(self) -> str:
        """Type of the torch device: "cuda" or "cpu"."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    def is_cuda(self) -> bool:
        """Return whether this is an NVIDIA GPU."""
        return self.device_type == "cuda" and torch.version.hip is None

    def is_rocm(self) -> bool:
        """Return whether this is an AMD GPU."""
        return self.device_type == "cuda" and torch.version.hip is not None

    def is_cuda_alike(self) -> bool:
        """Return whether torch's device is "cuda"."""
        return self.device_type == "cuda"

    def is_cpu(self) -> bool:
        """Return whether there is no GPU."""
        return self.device_type == "cpu"

    def is_tpu(self) -> bool:
        """Return False: TPUs need vLLM."""
        return False

    def is_xpu(self) -> bool:
        """Return False: Intel's GPUs need vLLM."""
        return False

    def device_count(self) -> int:
        """Return the number of devices: 1 for the CPU."""
        return torch.cuda.device_count() if self.device_type == "cuda" else 1


current_platform = Platform()
