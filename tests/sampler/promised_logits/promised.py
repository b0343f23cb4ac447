"""Calls functions on real and on promised logits, and compares what becomes of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from logitship.sampler.edits.edit_codec import VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.edits.merged_edits import apply_edits
from logitship.sampler.promised_logits.promise import Promise
from logitship.sampler.promised_logits.promised_memory import RecentCalls

Function = Callable[[torch.Tensor], Any]
_RECENT: defaultdict[int, RecentCalls] = defaultdict(RecentCalls)
"""By width of the logits: all calls here may find the arguments of others, as those of one processor do."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call.

    Attributes:
        result: what it returned, as real tensors; the exception that it raised.
        logits: the logits that it was given, afterwards.
        was_read: True if it used their values.
    """

    result: Any
    logits: torch.Tensor
    was_read: bool


def eager(function: Function, logits: torch.Tensor) -> Outcome:
    """Call a function on a copy of the logits."""
    given = logits.clone()
    try:
        result = function(given)
    except Exception as error:  # noqa: BLE001  # compared
        result = error
    return Outcome(result, given, was_read=True)


def promised(function: Function, logits: torch.Tensor, *, read_first: bool = False) -> Outcome:
    """Call a function on promised logits; edits are encoded and decoded before they are applied.

    Args:
        function: takes the logits.
        logits: the real ones.
        read_first: use a value before the call.
    """
    real = logits.clone()
    fetched = []

    def fetch() -> torch.Tensor:
        fetched.append(1)
        return real

    promise = Promise.begin(*logits.shape, fetch, _RECENT[logits.shape[1]])
    given = promise.take()
    if read_first:
        given.sum()
    try:
        results = [function(given)]
    except Exception as error:  # noqa: BLE001  # compared
        was_read = bool(fetched)
        given.sum()  # also applies the edits so far
        return Outcome(error, real, was_read)
    del given
    result = promise.conclude(results.pop())  # not kept
    if isinstance(result, EditLog):
        rows, vocab_size = logits.shape
        edits = decode(encode(result, VectorSender()), rows, vocab_size, VectorStore(vocab_size))
        apply_edits(real, [(range(rows), edits)])
        result = real
    assert len(fetched) <= 1
    return Outcome(result, real, bool(fetched))


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Compare two outcomes bit by bit, exceptions by type and text."""
    if isinstance(expected.result, Exception) or not isinstance(expected.result, torch.Tensor):
        assert repr(found.result) == repr(expected.result)
        if not isinstance(expected.result, Exception):
            return
        assert bits(found.logits) == bits(expected.logits)
        return
    assert isinstance(found.result, torch.Tensor)
    assert found.result.dtype is expected.result.dtype
    assert found.result.shape == expected.result.shape
    assert bits(found.result) == bits(expected.result)


def bits(tensor: torch.Tensor) -> bytes:
    """Return the memory of a tensor, in which zeros have signs and NaNs are equal."""
    return bytes(tensor.detach().contiguous().numpy().tobytes())


def example_logits(rows: int = 3, vocab_size: int = 40, seed: int = 0) -> torch.Tensor:
    """Return logits with ties, -inf, both zeros, and a row of which one token is left."""
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    logits[0, 3] = -torch.inf
    logits[-1, 5] = logits[-1, 6]
    logits[-1, 7], logits[-1, 8] = 0.0, -0.0
    if rows > 1:
        logits[1, :-1] = -torch.inf
    return logits
