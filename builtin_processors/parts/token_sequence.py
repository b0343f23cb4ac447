"""A sequence of tokens that is looked for in a history, one new token at a time."""

from __future__ import annotations

from collections.abc import Sequence


class TokenSequence:
    """Finds a sequence with the failure function of Knuth, Morris and Pratt (1977).

    How many of its tokens the history ends with is all that has to be kept of the history.

    Args:
        token_ids: at least one.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        # At [n]: the longest beginning of the sequence, shorter than n, with which its first n tokens end.
        self._shorter = [0, 0]
        for token_id in self.token_ids[1:]:
            self._shorter.append(self.advance(self._shorter[-1], token_id))

    def __len__(self) -> int:
        return len(self.token_ids)

    def advance(self, matched: int, token_id: int) -> int:
        """How many tokens match after one more; all of them where the sequence is complete.

        Args:
            matched: how many matched before it.
        """
        if matched == len(self):
            matched = self._shorter[matched]
        while matched and self.token_ids[matched] != token_id:
            matched = self._shorter[matched]
        return matched + (self.token_ids[matched] == token_id)

    def begun_in(self, history: Sequence[int], since: int) -> int:
        """How many tokens, short of all, `history[since:]` ends with."""
        matched = 0
        for token_id in history[max(since, len(history) - len(self) + 1) :]:
            matched = self.advance(matched, token_id)
        return matched

    def end_of_last_in(self, history: Sequence[int]) -> int:
        """Index of the token behind its last occurrence; 0 if there is none."""
        end, place = 0, -1
        for _ in range(history.count(self.token_ids[0])):
            place = history.index(self.token_ids[0], place + 1)
            if tuple(history[place : place + len(self)]) == self.token_ids:
                end = place + len(self)
        return end
