"""Incremental search for a sequence of tokens in a history."""

from __future__ import annotations

from collections.abc import Sequence


class TokenSequence:
    """Finds a sequence with the failure function of Knuth, Morris and Pratt (1977).

    The state is the number of its tokens matched at the end of the history.

    Args:
        token_ids: at least one.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = tuple(token_ids)
        # At [n]: the length of the longest proper prefix of the first n tokens that is also their suffix.
        self._shorter = [0, 0]
        for token_id in self.token_ids[1:]:
            self._shorter.append(self.advance(self._shorter[-1], token_id))

    def __len__(self) -> int:
        return len(self.token_ids)

    def advance(self, matched: int, token_id: int) -> int:
        """Return the number of matched tokens after another token; the length of the sequence once it is complete.

        Args:
            matched: number of matched tokens before it.
            token_id: the token.
        """
        if matched == len(self):
            matched = self._shorter[matched]
        while matched and self.token_ids[matched] != token_id:
            matched = self._shorter[matched]
        return matched + (self.token_ids[matched] == token_id)

    def begun_in(self, history: Sequence[int], since: int) -> int:
        """Return the length of the longest proper prefix of the sequence at the end of `history[since:]`."""
        matched = 0
        for token_id in history[max(since, len(history) - len(self) + 1) :]:
            matched = self.advance(matched, token_id)
        return matched

    def end_of_last_in(self, history: Sequence[int]) -> int:
        """Return the index after its last occurrence; 0 if there is none."""
        end, index = 0, -1
        for _ in range(history.count(self.token_ids[0])):
            index = history.index(self.token_ids[0], index + 1)
            if tuple(history[index : index + len(self)]) == self.token_ids:
                end = index + len(self)
        return end
