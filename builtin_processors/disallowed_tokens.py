"""Tokens that must not be drawn."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from pydantic import ValidationInfo, field_validator

from logitship.client.shipped_names import SGLANG_MODULE

from .base import BuiltinProcessor
from .params import ProcessorParams, TokenIds, model_of


class DisallowedTokensParams(ProcessorParams):
    """See `DisallowedTokensLogitsProcessor`."""

    token_ids: TokenIds
    """Tokens that must not be drawn."""

    @field_validator("token_ids")
    @classmethod
    def _leave_one(cls, token_ids: list[int], info: ValidationInfo) -> list[int]:
        if len(set(token_ids)) >= model_of(info).vocab_size:
            raise ValueError("every token of the vocabulary is disallowed, leave at least one to draw")
        return token_ids


class DisallowedTokensLogitsProcessor(BuiltinProcessor):
    """Sets the logits of `token_ids` to -inf, each row those of its own request.

    SGLang's class of this name asserts that all rows of a batch carry the same list.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "DisallowedTokensLogitsProcessor")

    name = "disallowed_tokens"
    Params = DisallowedTokensParams

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Mask each row's own tokens, in place, with one write for all rows."""
        if not custom_param_list:
            return logits
        columns = [_token_index(params, logits.device) for params in custom_param_list]
        if len(columns) == 1:
            logits[0, columns[0]] = -torch.inf
            return logits
        counts = torch.tensor([len(column) for column in columns], device=logits.device)
        rows = torch.repeat_interleave(counts, output_size=sum(map(len, columns)))
        logits[rows, torch.cat(columns)] = -torch.inf
        return logits


def _token_index(params: dict[str, Any], device: torch.device) -> torch.Tensor:
    """The row's `token_ids` as int64 [number of ids], made once a sequence: the list may be half the vocabulary."""
    token_ids = params["token_ids"]
    state = params["__req__"].state
    known = state.get("disallowed_tokens")
    # The list is compared by identity: a sequence may carry this processor twice, with different lists.
    if known is not None and known[0] is token_ids and known[1].device == device:
        index: torch.Tensor = known[1]
        return index
    index = torch.tensor(token_ids, dtype=torch.int64, device=device)
    state["disallowed_tokens"] = (token_ids, index)
    return index
