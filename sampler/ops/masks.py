"""Hard masks: forbidden tokens get a logit of -inf."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch


def forbidden_tokens(allowed_token_ids: Iterable[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return a mask, bool [vocab], True at every token outside `allowed_token_ids`."""
    forbidden = torch.ones(vocab_size, dtype=torch.bool, device=device)
    forbidden[torch.tensor(sorted(allowed_token_ids), dtype=torch.int64, device=device)] = False
    return forbidden


def mask_forbidden(logits: torch.Tensor, forbidden: Mapping[int, torch.Tensor]) -> None:
    """Set the forbidden tokens of some rows to -inf, in place.

    Args:
        logits: float32 [rows, vocab].
        forbidden: row to bool [vocab], as returned by `forbidden_tokens`.
    """
    for row, mask in forbidden.items():
        logits[row].masked_fill_(mask, float("-inf"))


class BadWords:
    """Words that must not appear, indexed by the token before their last one.

    Args:
        words: token sequences, each of at least one token.
    """

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._alone: list[int] = []
        self._after: dict[int, list[tuple[list[int], int]]] = {}
        for *beginning, ending in words:
            if beginning:
                self._after.setdefault(beginning[-1], []).append((beginning, ending))
            else:
                self._alone.append(ending)

    def endings(self, output_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that would complete a word now.

        A token completes a word of several tokens if the output ends with all but the last of them. The prompt does not
        count: a word that begins in the prompt may be completed.
        """
        if not output_token_ids:
            return self._alone
        return self._alone + [
            ending
            for beginning, ending in self._after.get(output_token_ids[-1], ())
            if list(output_token_ids[-len(beginning) :]) == beginning
        ]


def mask_tokens(logits: torch.Tensor, rows: Sequence[int], token_ids: Sequence[int]) -> None:
    """Set `logits[rows[i], token_ids[i]]` to -inf for every i, in place."""
    where = torch.tensor([rows, token_ids], dtype=torch.int64).to(logits.device)
    logits[where[0], where[1]] = float("-inf")
