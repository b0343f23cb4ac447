"""`best_of`: which of several continuations are answered."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import TypeVar

from .continuation import Continuation

AnyContinuation = TypeVar("AnyContinuation", bound=Continuation)


def most_likely(continuations: Iterable[AnyContinuation], n: int) -> list[AnyContinuation]:
    """The `n` continuations with the highest log-probability per token, the highest first.

    That is OpenAI's measure: a sum would prefer what is short. It counts every token that was drawn, with the one that
    ended the output. Of equals the earlier comes first; continuations that were cancelled come last.

    Args:
        continuations: with the log-probabilities of their tokens.
        n: how many to keep.
    """
    return sorted(continuations, key=_rank)[:n]


def _rank(continuation: Continuation) -> tuple[bool, float]:
    """Smaller is better."""
    reason = continuation.finish_reason
    known = [position.logprob for position in continuation.logprobs if position.logprob is not None]
    return reason is not None and reason.kind == "abort", -sum(known) / len(known) if known else inf
