"""Base class of processors that force a single token in some steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from logitship.builtin_processors.base import BuiltinProcessor
from logitship.sampler.allowed_tokens import AllowedTokens

from .row_edits import force_tokens


class ForcedTokenProcessor(BuiltinProcessor):
    """Sets a token's logit to 0 and all others to -inf, where the history decides so. A subclass reads the history."""

    @abstractmethod
    def forced_token(self, params: dict[str, Any]) -> int | None:
        """Return the only token allowed next in a row, or None if all are."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Force the next token in each row that has one, in place."""
        tokens = {row: self.forced_token(params) for row, params in enumerate(custom_param_list or ())}
        force_tokens(logits, {row: token for row, token in tokens.items() if token is not None})
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            token = self.forced_token(params)
            if token is not None:
                each.keep([token])
