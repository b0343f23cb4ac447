"""Asynchronous copies of NumPy arrays to the device of the logits."""

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


def copies_to(device: torch.device, pin_memory: bool) -> ToDevice:
    """Return a function that copies arrays to `device`, in order with the work queued there.

    Args:
        device: the target. On "cpu" the tensor shares the array's memory.
        pin_memory: copy from page-locked memory, without which a copy to a GPU is not asynchronous. PyTorch keeps such
            memory until the copy is complete.
    """

    def to_device(array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host
        return (host.pin_memory() if pin_memory else host).to(device, non_blocking=True)

    return to_device


def token_positions(tokens_of: Mapping[int, npt.NDArray[np.int64]], to_device: ToDevice) -> TokenPositions:
    """Return the positions of every token of every row, row by row.

    Args:
        tokens_of: row → token ids, int64 [any]. Not empty.
        to_device: see `copies_to`.
    """
    rows = np.repeat(np.array(list(tokens_of), dtype=np.int64), [len(tokens) for tokens in tokens_of.values()])
    return to_device(rows), to_device(np.concatenate(list(tokens_of.values())))
