"""Incremental token counts of a sequence, for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


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
