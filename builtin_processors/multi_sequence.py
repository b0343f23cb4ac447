"""Pads finished sequences with EOS tokens, for sequences that are generated side by side."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch

from logitship.builtin_processors.parts.row_edits import keep_only
from logitship.builtin_processors.parts.state_history import StateHistory
from logitship.sampler.allowed_tokens import AllowedTokens

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams, TokenIds


class MultiSequenceParams(ProcessorParams):
    """See `MultiSequenceLogitsProcessor`."""

    eos_token_ids: Annotated[TokenIds | None, Expects("a list of token ids")] = None
    """The tokens that finish a sequence. Default: the model's EOS tokens."""


@dataclass(frozen=True, eq=False)
class EosTokens:
    """A request's EOS tokens.

    Attributes:
        token_ids: int64 [any], ascending.
        key: identifies them in a sequence's state.
    """

    token_ids: npt.NDArray[np.int64]
    key: str
    _set: frozenset[int]

    @classmethod
    def of(cls, token_ids: Iterable[int]) -> Self:
        """Build from token ids, which may contain duplicates."""
        distinct = sorted(set(token_ids))
        return cls(np.array(distinct, dtype=np.int64), f"multi_sequence:{distinct}", frozenset(distinct))

    def is_finished(self, before: bool, token: int) -> bool:
        """Return whether a sequence is finished after another token."""
        return before or token in self._set


class MultiSequenceLogitsProcessor(BuiltinProcessor):
    """Allows only EOS tokens in a sequence that sampled one; sets all others to -inf.

    RTP-LLM's `MultiSeqLogitsProcessor` gets the finished sequences from its engine. Here, they are determined from the
    output. It only has an effect with `ignore_eos`, because otherwise a sequence ends with its EOS token anyway.
    """

    name = "multi_sequence"
    Params = MultiSequenceParams
    example: ClassVar[Mapping[str, Any]] = {"eos_token_ids": [6]}
    is_mask = True

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> EosTokens:
        """Return the EOS tokens.

        Raises:
            ValueError: the parameter is not a list of tokens, or there are no EOS tokens.
        """
        given = super().prepare(params, model).eos_token_ids
        eos_token_ids = model.eos_token_ids if given is None else given
        if not eos_token_ids:
            reason = "the model has none" if given is None else "the list is empty"
            raise ValueError(f"eos_token_ids: expected at least one EOS token, {reason}")
        return EosTokens.of(eos_token_ids)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Mask the rows of finished sequences, in place, with one write."""
        kept = {row: self._kept(params) for row, params in enumerate(custom_param_list or ())}
        keep_only(logits, {row: token_ids for row, token_ids in kept.items() if token_ids is not None})
        return logits

    def restrict(self, param_list: Sequence[dict[str, Any]], allowed: Sequence[AllowedTokens]) -> None:
        """See `BuiltinProcessor.restrict`."""
        for params, each in zip(param_list, allowed, strict=True):
            kept = self._kept(params)
            if kept is not None:
                each.keep(kept.tolist())

    def _kept(self, params: dict[str, Any]) -> npt.NDArray[np.int64] | None:
        """Return the only tokens allowed next in a row; None if all are."""
        eos: EosTokens = self.prepared(params)
        request = params["__req__"]
        history: StateHistory[bool] = request.state.setdefault(eos.key, StateHistory(False))
        return eos.token_ids if history.follow(request.output_ids, eos.is_finished) else None
