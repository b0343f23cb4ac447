"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from logitship.sampler.allowed_tokens import AllowedTokens

from .sampler_op import SamplerOp, SamplingRow


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
) -> None:
    """Penalize tokens that a sequence already contains, in place.

    First the repetition penalty (CTRL, Keskar et al. 2019, arXiv:1909.05858; as in Hugging Face transformers: positive
    logits are divided by it, the others multiplied), then the frequency penalty times the count in the output, then
    the presence penalty where that count is above 0 (OpenAI's definitions).

    Works on the distinct tokens of the sequences, not on the vocabulary: all arguments but the first are lists of
    equal length, with one entry for each distinct token of each penalized row.

    Args:
        logits: float32 [rows, vocab].
        rows: int64 [entries].
        token_ids: int64 [entries]; each (row, token) pair is unique.
        output_counts: float32 [entries]; 0 for a token that occurs only in the prompt.
        repetition_penalty: float32 [entries], above 0.
        frequency_penalty: float32 [entries].
        presence_penalty: float32 [entries].
    """
    old = logits[rows, token_ids]
    new = torch.where(old > 0, old / repetition_penalty, old * repetition_penalty)
    new -= frequency_penalty * output_counts
    new -= presence_penalty * (output_counts > 0)
    logits[rows, token_ids] = new


class TokenCounts:
    """The distinct tokens of a sequence, and how often each occurs in its output.

    `follow()` reads only the new tokens of the live output list, so the cost of a step does not grow with the length.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: list[int]) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._output = output_token_ids
        self._followed = 0
        self._slots: dict[int, int] = {int(token): slot for slot, token in enumerate(distinct)}
        self._tokens = distinct
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self.follow()

    def follow(self) -> None:
        """Count the output tokens that were added since the last call."""
        for token in self._output[self._followed :]:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._tokens):
                self._grow()
            self._tokens[slot] = token
            self._counts[slot] += 1
        self._followed = len(self._output)

    def _grow(self) -> None:
        more = max(64, len(self._tokens))
        self._tokens = np.pad(self._tokens, (0, more))
        self._counts = np.pad(self._counts, (0, more))

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and output: int64 [distinct]."""
        return self._tokens[: len(self._slots)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """Occurrences of each of `tokens` in the output, 0 for prompt-only tokens: float32 [distinct]."""
        return self._counts[: len(self._slots)]


class _PenalizedRow(NamedTuple):
    counts: TokenCounts
    penalties: tuple[float, float, float]
    """Repetition, frequency and presence penalty."""


class Penalties(SamplerOp[_PenalizedRow, tuple[dict[int, TokenCounts], npt.NDArray[np.float32]]]):
    """Applies each request's penalties."""

    def new_state(self, row: SamplingRow) -> _PenalizedRow | None:
        """Return the token counts and penalties; None without penalties."""
        params = row.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalties == (1, 0, 0):
            return None
        # Frequency and presence penalties only count the output.
        prompt = row.prompt_token_ids or [] if params.repetition_penalty != 1 else []
        return _PenalizedRow(TokenCounts(prompt, row.output_token_ids), penalties)

    def prepare(self, states: Mapping[int, _PenalizedRow]) -> tuple[dict[int, TokenCounts], npt.NDArray[np.float32]]:
        """Return the token counts by row, and the penalties: float32 [3, rows]."""
        penalties = np.array([state.penalties for state in states.values()], dtype=np.float32)
        return {row: state.counts for row, state in states.items()}, penalties.T

    def apply(self, logits: torch.Tensor, rows: Sequence[int] | None) -> None:
        """Penalize the current tokens of the rows, in place: float32 [rows, vocab]."""
        prepared = self.prepared(rows)
        if prepared is None:
            return
        counts, penalties = prepared
        for each in counts.values():
            each.follow()
        lengths = [len(each.tokens) for each in counts.values()]
        arrays = (
            np.repeat(np.array([*counts]), lengths),
            np.concatenate([each.tokens for each in counts.values()]),
            np.concatenate([each.output_counts for each in counts.values()]),
            *np.repeat(penalties, lengths, axis=1),
        )
        apply_penalties(logits, *map(self._to_device, arrays))

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """Note that penalties may change which token is the most likely one; they keep finite logits finite."""
        if row in self._rows:
            allowed.edit_values()
