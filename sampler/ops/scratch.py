"""Memory for what a step computes and nobody keeps."""

from __future__ import annotations

import torch


class Scratch:
    """Buffers for matrices of the size of the logits, kept from step to step.

    Memory that is new to a process costs a page fault for every 4 KiB of it: for the log-probabilities of 32 rows of
    49,152 tokens, that takes twice as long as to compute them. On other devices PyTorch keeps freed memory by itself.
    """

    def __init__(self) -> None:
        self._kept = torch.empty(0)

    def rows(self, start: int, count: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return a buffer for some rows: float32 [count, columns], to pass as `out`. Its old contents are overwritten.

        Args:
            start: how many rows of the same step come before it, whose room stays theirs.
            like: float32 [any, columns]: where it will be computed.

        Returns:
            None where there is nothing to gain: `out=None` takes new memory.
        """
        if like.device.type != "cpu":
            return None
        columns = like.shape[-1]
        if self._kept.numel() < (start + count) * columns:
            with torch.inference_mode(False):  # else it could not be written to outside of that mode
                self._kept = torch.empty((start + count) * columns)
        return self._kept[start * columns : (start + count) * columns].view(count, columns)
