"""The step that SGLang computes: how many tokens each row has, and which one came last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class ForwardStep:
    """One step of SGLang's model runner, from the model's logits to the sampled tokens.

    Args:
        batch: SGLang's `ForwardBatch`.
    """

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def lengths(self) -> Sequence[int]:
        """Return the number of tokens of each row, with the prompt and all tokens that the model has read."""
        lengths = self._batch.seq_lens_cpu
        return (self._batch.seq_lens if lengths is None else lengths).tolist()  # type: ignore[no-any-return]

    def last_tokens(self, rows: Sequence[int]) -> list[int]:
        """Return the last token that the model read in each of some rows. Waits for the device."""
        batch = self._batch
        if batch.forward_mode.is_extend():
            ends = torch.cumsum(batch.extend_seq_lens, 0) - 1
            return batch.input_ids[ends[list(rows)]].tolist()  # type: ignore[no-any-return]
        return batch.input_ids[list(rows)].tolist()  # type: ignore[no-any-return]
