"""Copies to and from the device of the logits, without needless waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ToDevice: TypeAlias = Callable[[npt.NDArray[Any]], torch.Tensor]
"""Converts an array to a tensor of the same shape and dtype on the device."""

TokenPositions: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Rows and token ids, int64 [n] each: an index into logits."""


def copies_to(device: torch.device, pin_memory: bool | None = None) -> ToDevice:
    """Return a function that copies arrays to `device`, in order with the work queued there, without waiting for it.

    Args:
        device: the target. On "cpu" the tensor shares the array's memory.
        pin_memory: copy from page-locked memory, without which a copy to a GPU is not asynchronous. PyTorch keeps such
            memory until the copy is complete. None: if it is a GPU.
    """
    is_pinned = device.type == "cuda" if pin_memory is None else pin_memory

    def to_device(array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host
        return (host.pin_memory() if is_pinned else host).to(device, non_blocking=True)

    return to_device


def to_cpu(*matrices: torch.Tensor) -> list[torch.Tensor]:
    """Copy matrices to the CPU with a single copy, which waits for their device once.

    Args:
        matrices: float32 or int64 [rows, any] each.

    Returns:
        The same as float64 and int64.
    """
    is_whole = [each.dtype == torch.int64 for each in matrices]
    bits = [
        each if whole else each.to(torch.float64).view(torch.int64)
        for each, whole in zip(matrices, is_whole, strict=True)
    ]
    found = torch.split(torch.cat(bits, dim=-1).cpu(), [each.shape[-1] for each in bits], dim=-1)
    return [each if whole else each.view(torch.float64) for each, whole in zip(found, is_whole, strict=True)]


def token_positions(tokens_of: Mapping[int, npt.NDArray[np.int64]], to_device: ToDevice) -> TokenPositions:
    """Return the positions of every token of every row, row by row.

    Args:
        tokens_of: row → token ids, int64 [any]. Not empty.
        to_device: see `copies_to`.
    """
    rows = np.repeat(np.array(list(tokens_of), dtype=np.int64), [len(tokens) for tokens in tokens_of.values()])
    return to_device(rows), to_device(np.concatenate(list(tokens_of.values())))
