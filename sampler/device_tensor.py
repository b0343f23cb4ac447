"""Numbers that the host knows, brought to where the logits are without waiting for that device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

ToDevice: TypeAlias = Callable[[npt.NDArray[Any]], torch.Tensor]
"""An array as a tensor of the same shape and dtype, on the device."""

TokenPositions: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""Rows and, for each, a token id: int64 [n] both. An index into logits."""


def copies_to(device: torch.device, pin_memory: bool) -> ToDevice:
    """A function that copies arrays to `device`, in order with the work that is queued there.

    Args:
        device: the target. On "cpu" the tensor shares the array's memory.
        pin_memory: copy out of page-locked memory. Only then does a GPU fetch it while the host goes on; PyTorch keeps
            such memory until the copy is through.
    """

    def to_device(array: npt.NDArray[Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        if device.type == "cpu":
            return host
        return (host.pin_memory() if pin_memory else host).to(device, non_blocking=True)

    return to_device


def token_positions(tokens_of: Mapping[int, npt.NDArray[np.int64]], to_device: ToDevice) -> TokenPositions:
    """Every token of every row, rows one after the other.

    Args:
        tokens_of: row → token ids, int64 [any]. Not empty.
    """
    rows = np.repeat(np.array(list(tokens_of), dtype=np.int64), [len(tokens) for tokens in tokens_of.values()])
    return to_device(rows), to_device(np.concatenate(list(tokens_of.values())))
