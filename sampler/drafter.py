"""The next tokens of the batch's rows, as far as they are known before their logits exist."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from .allowed_tokens import AllowedTokens, DecidesTokens, decides_tokens
from .batch_processors.interface import LogitsProcessor
from .processors.shipped_processors import ShippedProcessors
from .sampling_params import SamplingParams

_MAX_REMAINING = 256
"""Most tokens whose logits are computed one by one."""


class Draft(NamedTuple):
    """Tokens that come next in a row, in order.

    Attributes:
        token_ids: at least one token. One, if it is certain.
        is_certain: False if `Sampler.sample` may return other tokens.
    """

    token_ids: Sequence[int]
    is_certain: bool


class RemainingTokens(NamedTuple):
    """The only tokens that `Sampler.sample` may return for a row.

    Attributes:
        token_ids: the tokens.
        takes_largest: True if it returns the one with the largest logit, the lowest id of a tie, if all these logits
            are finite.
    """

    token_ids: Sequence[int]
    takes_largest: bool

    def largest(self, logits: Sequence[float]) -> int | None:
        """Return the token with the largest of its logits, the lowest id of a tie; None if one is not finite."""
        if not all(map(math.isfinite, logits)):
            return None
        largest = max(logits)
        return min(token for token, logit in zip(self.token_ids, logits, strict=True) if logit == largest)


class Drafter:
    """Drafts the tokens that the rows' histories decide, such as those that a grammar leaves.

    Args:
        vocab_size: number of columns of the logits.
        params: sampling parameters by row of the batch.
        ops: the sampler's own operations.
        batch_processors: the installed batch processors.
        shipped: the requests' processors.

    Attributes:
        can_draft: False if an installed batch processor may do anything to any row, so that nothing is known before.
    """

    def __init__(
        self,
        vocab_size: int,
        params: Mapping[int, SamplingParams],
        ops: Iterable[DecidesTokens],
        batch_processors: Iterable[LogitsProcessor],
        shipped: ShippedProcessors,
    ) -> None:
        self._vocab_size = vocab_size
        self._params = params
        processors = [*batch_processors]
        self._deciding = [*ops, *cast(list[DecidesTokens], processors)]
        self._shipped = shipped
        self.can_draft = all(map(decides_tokens, processors))

    def may_draft(self, row: int) -> bool:
        """Return whether a row may have a draft. Takes less time than `draft`."""
        params = self._params[row]
        is_restricted = params.allowed_token_ids is not None or params.thinking_token_budget is not None
        return is_restricted or self._shipped.may_restrict(row)

    def draft(self, rows: Iterable[int]) -> dict[int, Draft]:
        """Return the next tokens that are known, or likely, before their logits exist.

        A token is certain if everything else becomes -inf in steps 1 to 6 of `Sampler.sample`: as long as its own logit
        is finite, `sample` returns it. What random rows sample later does not depend on that call, because their random
        numbers belong to positions.

        Args:
            rows: the rows of the batch to look at, after the tokens that their live output lists have now. They may
                have more tokens than at `Sampler.update_state`.

        Returns:
            Drafts by row, for those of the rows that have one.
        """
        drafts = {}
        for row, allowed in self._restricted({row: AllowedTokens(self._vocab_size) for row in rows}).items():
            token = allowed.single()
            if token is not None:
                drafts[row] = Draft([token], is_certain=True)
            elif allowed.likely:
                drafts[row] = Draft(allowed.likely, is_certain=False)
        return drafts

    def remaining(self, rows: Iterable[int]) -> dict[int, RemainingTokens]:
        """Return the tokens that steps 1 to 6 of the next `Sampler.sample` do not set to -inf.

        Other logits make no difference to what `sample` returns, but for raw log-probabilities and traces.

        Args:
            rows: the rows of the batch to look at, whose processors are masks.

        Returns:
            The tokens by row, for those of the rows that have at most `_MAX_REMAINING`.
        """
        allowed = {row: AllowedTokens(self._vocab_size, may_guess=False) for row in rows}
        return {
            row: RemainingTokens(tokens, takes_largest=self._params[row].greedy and each.keeps_order)
            for row, each in self._restricted(allowed).items()
            if (tokens := each.at_most(_MAX_REMAINING)) is not None
        }

    def _restricted(self, allowed: dict[int, AllowedTokens]) -> dict[int, AllowedTokens]:
        """Forbid the tokens that the next `sample` would forbid, given the current tokens of the output lists."""
        for row, each in allowed.items():
            for deciding in self._deciding:
                deciding.restrict(row, each)
        self._shipped.restrict(allowed)
        return allowed
