"""The masks of a request: `allowed_token_ids` and `bad_words`. Forbidden tokens get a logit of -inf."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from logitship.sampler.allowed_tokens import AllowedTokens, Words, mask_of
from logitship.sampler.device_tensor import copies_to

from .sampler_op import SamplerOp, SamplingRow


class AllowedTokensMask(SamplerOp[tuple[torch.Tensor, Words], Mapping[int, tuple[torch.Tensor, Words]]]):
    """Masks the tokens outside `allowed_token_ids`."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        super().__init__(device)
        self._vocab_size = vocab_size

    def new_state(self, row: SamplingRow) -> tuple[torch.Tensor, Words] | None:
        """Return the forbidden and the allowed tokens; None if all are allowed."""
        allowed = row.params.allowed_token_ids
        if allowed is None:
            return None
        forbidden = np.ones(self._vocab_size, dtype=np.bool_)
        forbidden[np.fromiter(allowed, dtype=np.int64, count=len(allowed))] = False
        return self._to_device(forbidden), mask_of(allowed, self._vocab_size)

    def apply(self, logits: torch.Tensor, rows: Sequence[int] | None) -> None:
        """Mask the tokens, in place: float32 [rows, vocab]."""
        for row, (forbidden, _) in (self.prepared(rows) or {}).items():
            logits[row].masked_fill_(forbidden, -math.inf)

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """Forbid the tokens outside."""
        if row in self._rows:
            allowed.keep_mask(self._rows[row][1])


class BadWords:
    """Words that must not appear in an output, indexed by the token before their last one.

    Args:
        words: token sequences, each of at least one token.
        output_token_ids: the live output.
    """

    def __init__(self, words: Iterable[Sequence[int]], output_token_ids: Sequence[int]) -> None:
        self._output = output_token_ids
        self._alone: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *beginning, ending in words:
            if beginning:
                self._after.setdefault(beginning[-1], []).append((beginning, ending))
            else:
                self._alone.append(ending)

    def endings(self) -> list[int]:
        """Return the tokens that would complete a word now.

        A token completes a word of several tokens if the output ends with all but the last of them. The prompt does not
        count: a word that begins in the prompt may be completed.
        """
        if not self._output:
            return self._alone
        return self._alone + [
            ending
            for beginning, ending in self._after.get(self._output[-1], ())
            if list(self._output[-len(beginning) :]) == beginning
        ]


def mask_tokens(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> None:
    """Set `logits[rows[i], token_ids[i]]` to -inf for every i, in place."""
    where = copies_to(logits.device)(np.array([rows, token_ids], dtype=np.int64))
    logits[where[0], where[1]] = -math.inf


class BadWordsMask(SamplerOp[BadWords, Mapping[int, BadWords]]):
    """Masks the tokens that would complete one of `bad_words`."""

    def new_state(self, row: SamplingRow) -> BadWords | None:
        """Return the words; None if there are none."""
        words = row.params.bad_words_token_ids
        return BadWords(words, row.output_token_ids) if words else None

    def apply(self, logits: torch.Tensor, rows: Sequence[int] | None) -> None:
        """Mask the tokens, in place: float32 [rows, vocab]."""
        states = self.prepared(rows) or {}
        endings = [(row, token) for row, state in states.items() for token in state.endings()]
        if endings:
            mask_tokens(logits, [row for row, _ in endings], [token for _, token in endings])

    def restrict(self, row: int, allowed: AllowedTokens) -> None:
        """Forbid the tokens."""
        if row in self._rows:
            allowed.forbid(self._rows[row].endings())
