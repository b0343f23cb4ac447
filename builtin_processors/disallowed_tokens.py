"""Bans tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import ValidationInfo, field_validator

from logitship.builtin_processors.parts.row_edits import forbid_tokens, on_device
from logitship.client.serialization.shipped_names import SGLANG_MODULE
from logitship.sampler.allowed_tokens import AllowedTokens

from .base import BuiltinProcessor
from .params import ModelFacts, ProcessorParams, TokenIds, model_of


class DisallowedTokensParams(ProcessorParams):
    """See `DisallowedTokensLogitsProcessor`."""

    token_ids: TokenIds
    """Tokens that must not be sampled."""

    @field_validator("token_ids")
    @classmethod
    def _leave_one(cls, token_ids: list[int], info: ValidationInfo) -> list[int]:
        if len(set(token_ids)) >= model_of(info).vocab_size:
            raise ValueError("every token of the vocabulary is disallowed, leave at least one")
        return token_ids


class DisallowedTokensLogitsProcessor(BuiltinProcessor):
    """Sets the logits of each request's `token_ids` to -inf.

    SGLang's class of this name asserts that all rows of a batch have the same list.
    """

    _pickles_as: ClassVar[tuple[str, str]] = (SGLANG_MODULE, "DisallowedTokensLogitsProcessor")

    name = "disallowed_tokens"
    Params = DisallowedTokensParams
    example: ClassVar[Mapping[str, Any]] = {"token_ids": [5]}
    is_mask = True

    _last: _Positions | None = None  # a class attribute: subclasses written for SGLang call no constructor of ours

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> DisallowedTokens:
        """See `BuiltinProcessor.prepare`."""
        checked = DisallowedTokensParams.read(params, model)
        return DisallowedTokens(np.unique(np.array(checked.token_ids, dtype=np.int64)))

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Forbid each row's own tokens, in place, with one write for all rows."""
        if not custom_param_list:
            return logits
        wanted = [self.prepared(params) for params in custom_param_list]
        # Cached, because rows rarely change between steps, and a list may have half the vocabulary.
        last = self._last
        if last is None or last.wanted != wanted or last.device != logits.device:
            last = self._last = _Positions(wanted, logits.device)
        forbid_tokens(logits, last.positions)
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            each.forbid(self.prepared(params).token_ids.tolist())


@dataclass(frozen=True, eq=False)
class DisallowedTokens:
    """A request's distinct tokens, int64 [any]. Compared by identity, which is cheap."""

    token_ids: npt.NDArray[np.int64]


class _Positions:
    """The positions to forbid in a batch.

    Args:
        wanted: the tokens of each row, at least one row.
        device: the device of the logits.
    """

    def __init__(self, wanted: list[DisallowedTokens], device: torch.device) -> None:
        self.wanted = wanted
        self.device = device
        lists = [each.token_ids for each in wanted]
        rows = np.repeat(np.arange(len(lists)), [len(token_ids) for token_ids in lists])
        self.positions = on_device(rows, np.concatenate(lists), device)
