"""Protocols of the model runner: `ShippedBatch` needs these of V1 and V2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """The processes that sample the same tokens from the same logits: vLLM's tensor-parallel ranks."""

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        ...

    def broadcast(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Overwrite some rows of the logits with those of the first rank. All ranks call it for the same rows."""
        ...


class RunnerRequests(Protocol):
    """The model runner's requests: `BatchRequests` for model runner V1, `SlotRequests` for V2."""

    def request_of(self, output_token_ids: list[int]) -> Any:
        """Return the record of the request that owns this very list."""
        ...

    def is_unfinished(self, request: Any) -> bool:
        """Return True if the request is in the batch, or preempted."""
        ...

    def discarded_rows(self, num_rows: int) -> set[int]:
        """Return the rows whose token is discarded in this step."""
        ...

    def discarded_rows_ahead(self, rows: Iterable[int]) -> set[int] | None:
        """Return those of these rows whose token will be discarded, before the step is computed; None: not known."""
        ...
