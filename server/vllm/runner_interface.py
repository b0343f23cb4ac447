"""What the batch needs of vLLM, whichever model runner there is."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Ranks(Protocol):
    """The processes that draw the same tokens, each with the same logits: vLLM's tensor-parallel ranks."""

    @property
    def is_first(self) -> bool:
        """True in the one whose processors run."""
        ...

    def share(self, logits: torch.Tensor, rows: list[int]) -> None:
        """Overwrite some rows of the logits with those of the first one. All call it together, for the same rows."""
        ...


class RunnerRequests(Protocol):
    """What vLLM knows of its requests: `BatchRequests` for its model runner V1, `SlotRequests` for V2."""

    def request_of(self, output_token_ids: list[int]) -> Any:
        """The record of the request that owns this very list."""
        ...

    def is_unfinished(self, request: Any) -> bool:
        """True if the request is in the batch, or was put aside and will be again."""
        ...

    def without_a_token(self, num_rows: int) -> set[int]:
        """Rows for which nothing is drawn in this step."""
        ...
