"""A tree of tokens, and a sequence's position in it: RTP-LLM's tree decoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import accumulate, chain
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

DEFAULT_START_TOKEN_ID = 225
DEFAULT_END_TOKEN_ID = 2
DEFAULT_SEP = "_"


class Place(NamedTuple):
    """A sequence's position in a tree.

    Attributes:
        path: the tokens so far, as a key of the tree: `"225_64000"`.
        finished: the EOS token was sampled; the position does not change any more.
        error: a token outside the tree was sampled; the position does not change any more.
    """

    path: str
    finished: bool = False
    error: bool = False


class TokenTree:
    """The tokens that may follow each path. Immutable.

    A path is the start token and the output tokens, as decimal numbers joined with `sep`. It does not include the
    prompt, so the prompt must end where the tree begins.

    A step costs two look-ups of a path, regardless of the size of the tree.

    Args:
        candidates: the tokens that may follow, 0 or greater, by path. After a path without candidates, only the end
            token is allowed.
        start_token_id: the first part of every path.
        end_token_id: ends a sequence, anywhere in the tree.
        sep: the separator between the tokens of a path. If it is empty, different tokens can have the same path.
    """

    def __init__(
        self,
        candidates: Mapping[str, Collection[int]],
        *,
        start_token_id: int = DEFAULT_START_TOKEN_ID,
        end_token_id: int = DEFAULT_END_TOKEN_ID,
        sep: str = DEFAULT_SEP,
    ) -> None:
        self.start_token_id = start_token_id
        self.end_token_id = end_token_id
        self.sep = sep
        # One array for all lists: a million small arrays would take many times the memory.
        lists = [sorted(set(tokens)) for tokens in candidates.values()]
        self._numbers = {path: number for number, path in enumerate(candidates)}
        self._bounds = list(accumulate(map(len, lists), initial=0))
        self._tokens = np.fromiter(chain.from_iterable(lists), dtype=np.int64, count=self._bounds[-1])
        self._end = np.array([end_token_id], dtype=np.int64)

    @property
    def start(self) -> Place:
        """The position at which every sequence begins."""
        return Place(str(self.start_token_id))

    def advance(self, place: Place, token: int) -> Place:
        """Return the position after another token.

        As in RTP-LLM, the token need not be a candidate, but its path must exist.
        """
        if place.finished or place.error:
            return place
        path = f"{place.path}{self.sep}{token}"
        if token == self.end_token_id:
            return Place(path, finished=True)
        return Place(path) if path in self._numbers else place._replace(error=True)

    def candidates(self, place: Place) -> npt.NDArray[np.int64]:
        """Return the tokens that may come next, ascending; the EOS token if the tree has none. Read-only."""
        number = None if place.error else self._numbers.get(place.path)
        if number is None or self._bounds[number] == self._bounds[number + 1]:
            return self._end
        return self._tokens[self._bounds[number] : self._bounds[number + 1]]

    def allowed(self, place: Place, vocab_size: int) -> npt.NDArray[np.int64]:
        """Return the candidates in the vocabulary; if there are none, the EOS token, if that is in the vocabulary."""
        candidates = self.candidates(place)
        first, end = np.searchsorted(candidates, (0, vocab_size))
        within = candidates[first:end]
        if not len(within) and 0 <= self.end_token_id < vocab_size:
            return self._end
        return within

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, path: object) -> bool:
        return path in self._numbers

    # A copied state must refer to the same tree, because the tree is part of the state's key.
    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self
