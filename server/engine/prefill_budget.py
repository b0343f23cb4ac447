"""Prompt tokens of a step: bounded in number, and in time where tenants share the step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from logitship.server.requests.sequence import Sequence

from .forward_pass import Plan

_MIN_TOKENS = 16
"""Fewest prompt tokens of a step, so that long prompts make progress: a block of the prefix cache."""
_FIRST_TOKENS = 64
"""Prompt tokens beside another tenant's rows, as long as the time of a prompt token is unknown."""
_PART = 0.5
"""Time of prompt tokens beside another tenant's rows, as a part of a step's time without them."""
_WEIGHT = 0.2
"""Weight of the latest step in the moving averages."""


class PrefillBudget:
    """Divides the prompt tokens of a step between tenants.

    Guarantees:
    * A step computes at most `chunked_prefill_size` prompt tokens.
    * Prompts of one tenant make the steps of another's running rows about half as long again, not more.
    * Tenants with prompts get equal parts of it, except what they don't need.

    Args:
        chunked_prefill_size: most prompt tokens of a step.
    """

    def __init__(self, chunked_prefill_size: int) -> None:
        self.chunked_prefill_size = chunked_prefill_size
        self._decode_seconds: float | None = None
        """Moving average of the time of steps without prompt tokens."""
        self._token_seconds: float | None = None
        """Moving average of the time of a prompt token."""

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learn from the time of a step."""
        tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        if not tokens:
            self._decode_seconds = _average(self._decode_seconds, seconds)
        elif tokens >= _MIN_TOKENS:
            decode = (self._decode_seconds or 0.0) if plan.decode else 0.0
            self._token_seconds = _average(self._token_seconds, max(seconds - decode, 0.0) / tokens)

    def divide(self, decoding: Collection[Sequence], prefilling: Collection[Sequence]) -> Counter[str]:
        """Return the prompt tokens of each tenant in the next step.

        Args:
            decoding: sequences that sample in it.
            prefilling: sequences that need prompt tokens.
        """
        needed: Counter[str] = Counter()
        for sequence in prefilling:
            needed[sequence.tenant] += sequence.num_prompt - sequence.num_computed
        is_shared = len({sequence.tenant for sequence in decoding} | needed.keys()) > 1
        left = self._tokens_beside_others() if is_shared and decoding else self.chunked_prefill_size
        parts: Counter[str] = Counter()
        for tenants_left, tenant in zip(range(len(needed), 0, -1), sorted(needed, key=needed.__getitem__), strict=True):
            parts[tenant] = min(needed[tenant], -(-left // tenants_left))
            left -= parts[tenant]
        return parts

    def _tokens_beside_others(self) -> int:
        """Return how many prompt tokens take half as long as a step without any."""
        tokens = _FIRST_TOKENS
        if self._decode_seconds is not None and self._token_seconds:
            tokens = int(_PART * self._decode_seconds / self._token_seconds)
        return min(max(tokens, _MIN_TOKENS), self.chunked_prefill_size)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + _WEIGHT * (value - before)
