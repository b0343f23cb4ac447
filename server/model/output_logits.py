"""Logits of the tokens of a forward pass, computed when they are asked for.

The LM head of a small model is a quarter of its arithmetic. A token whose successor is certain, or one of a few, needs
only a few of its columns.
"""

from __future__ import annotations

from typing import Protocol

import torch


class OutputLogits(Protocol):
    """Logits of the kept tokens of a forward pass, which are numbered by their place among them."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Return all logits of some tokens, float32 [end - begin, vocab]."""
        ...

    def some(self, places: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Return single logits, float32 [n].

        Args:
            places: int64 [n], on the CPU.
            token_ids: int64 [n], the token of each.
        """
        ...


class ComputedLogits:
    """`OutputLogits` of a model that has computed them all.

    Args:
        logits: float32 [tokens, vocab].
    """

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """See `OutputLogits`."""
        return self._logits[begin:end]

    def some(self, places: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """See `OutputLogits`."""
        return self._logits[places, token_ids]
