"""Sequences that go on after their end token, as those do that are generated side by side."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch

from .base import BuiltinProcessor
from .params import Expects, ModelFacts, ProcessorParams, TokenIds
from .parts.row_edits import keep_only
from .parts.state_history import StateHistory


class MultiSequenceParams(ProcessorParams):
    """See `MultiSequenceLogitsProcessor`."""

    eos_token_ids: Annotated[TokenIds | None, Expects("a list of token ids")] = None
    """The tokens that finish a sequence. Left out: the model's end tokens."""


class MultiSequenceLogitsProcessor(BuiltinProcessor):
    """Leaves a sequence that drew an end token only end tokens; all others become -inf.

    RTP-LLM's `MultiSeqLogitsProcessor`, which its engine tells which sequences are finished. Here that follows from the
    sequence's output. It has an effect with `ignore_eos`: otherwise a sequence ends with its end token anyway.
    """

    name = "multi_sequence"
    Params = MultiSequenceParams
    is_mask = True

    def prepare(self, params: Mapping[str, Any] | None, model: ModelFacts) -> tuple[int, ...]:
        """The end tokens, ascending.

        Raises:
            ValueError: the parameter is no list of tokens, or there are no end tokens.
        """
        given = super().prepare(params, model).eos_token_ids
        eos_token_ids = sorted(set(model.eos_token_ids if given is None else given))
        if not eos_token_ids:
            reason = "the model has none" if given is None else "the list is empty"
            raise ValueError(f"eos_token_ids: expected at least one end token, {reason}")
        return tuple(eos_token_ids)

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Mask the rows of finished sequences, in place, with one write."""
        kept: dict[int, npt.NDArray[np.int64]] = {}
        for row, params in enumerate(custom_param_list or ()):
            eos_token_ids: tuple[int, ...] = self.prepared(params)
            request = params["__req__"]
            history: StateHistory[bool] = request.state.setdefault((self.name, eos_token_ids), StateHistory(False))
            if history.follow(request.output_ids, partial(_is_finished, eos_token_ids)):
                kept[row] = np.array(eos_token_ids, dtype=np.int64)
        keep_only(logits, kept)
        return logits


def _is_finished(eos_token_ids: tuple[int, ...], before: bool, token: int) -> bool:
    return before or token in eos_token_ids
