"""Tensors with a row for each slot, on the CPU and on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


class SlotTensor:
    """An int32 tensor that is written on the CPU and read on the device. Attributes have vLLM's names.

    Args:
        shape: its shape.
        device: the device.

    Attributes:
        cpu: the values on the CPU.
        np: the same memory as an array.
        gpu: the values on the device; the same memory as `cpu` if that is the CPU.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.cpu = torch.zeros(shape, dtype=torch.int32)
        self.np = self.cpu.numpy()
        self.gpu = self.cpu.to(device)
        self._is_shared = self.gpu is self.cpu

    def write(self, index: tuple[np.ndarray, ...], values: Any) -> None:
        """Set elements.

        Args:
            index: an array of positions for each dimension.
            values: int32, as many.
        """
        self.np[index] = values
        if not self._is_shared:
            places = tuple(torch.from_numpy(each).to(self.gpu.device) for each in index)
            self.gpu.index_put_(places, torch.from_numpy(self.np[index]).to(self.gpu.device))
