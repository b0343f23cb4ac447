"""The edits that moved the logits of tokens that could be sampled: what a trainer repeats on its own logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from logitship.client.sampling_record import ADD, REPETITION, SCALE, SET
from logitship.sampler.ops.sampling_masks import SamplingEdit

from .row_errors import SamplingEditsTooLongError
from .sampling_params import MAX_LISTED, SamplingParams

_Tokens = npt.NDArray[np.int64]
_Logits = npt.NDArray[np.float32]
_PRECISION = 1e-6
"""Relative differences below it are rounding."""
_NO_TOKENS = np.empty(0, np.int64)


def edits_of_request(
    model: _Logits, request: _Logits, tokens: _Tokens, params: SamplingParams, seen: Sequence[int]
) -> Iterator[SamplingEdit]:
    """Yield the edits by a request's own parameters, in the order in which the sampler makes them.

    Args:
        model: logits of the model, [vocab].
        request: the same after the edits.
        tokens: tokens that could be sampled.
        params: of the request.
        seen: tokens of its prompt and output.

    Raises:
        SamplingEditsTooLongError: an edit names too many tokens.
    """
    values = model[tokens]
    biases = np.array([params.logit_bias.get(token, 0.0) for token in tokens.tolist()], np.float32)
    if biases.any():
        yield from _some(ADD, tokens, biases, biases != 0, "logit_bias")
        values = values + biases
    factor = params.repetition_penalty
    if factor != 1:
        is_seen = np.isin(tokens, np.array(seen, np.int64))
        yield from _some(REPETITION, tokens, np.array([factor], np.float32), is_seen, "repetition_penalty")
        penalized = np.where(values > 0, values / np.float32(factor), values * np.float32(factor))
        values = np.where(is_seen, penalized, values)
    yield from edits_between(values, request[tokens], tokens, "a penalty or an installed batch processor")


def edits_after_penalties(
    model: _Logits, request: _Logits, tokens: _Tokens, biases: Mapping[int, float], factor: float, seen: Sequence[int]
) -> Iterator[SamplingEdit]:
    """Yield the edits by a request's own parameters in SGLang's order: additive penalties, repetition penalty, biases.

    Args:
        model: logits of the model, [vocab].
        request: the same after the edits.
        tokens: tokens that could be sampled.
        biases: added to logits, by token.
        factor: the repetition penalty.
        seen: tokens of its prompt and output.

    Raises:
        SamplingEditsTooLongError: an edit names too many tokens.
    """
    added = np.array([biases.get(token, 0.0) for token in tokens.tolist()], np.float32)
    is_seen = np.isin(tokens, np.array(seen, np.int64)) & (factor != 1)
    values = request[tokens] - added
    factors = np.where(is_seen, np.float32(factor), np.float32(1))
    values = np.where(values > 0, values * factors, values / factors)
    # What was undone is rounded, so that a difference need not be an edit.
    before = model[tokens]
    values = np.where(np.isclose(values, before, rtol=_PRECISION, atol=_PRECISION), before, values)
    yield from edits_between(before, values, tokens, "a penalty")
    yield from _some(REPETITION, tokens, np.array([factor], np.float32), is_seen, "repetition_penalty")
    yield from _some(ADD, tokens, added, added != 0, "logit_bias")


def edits_between(before: _Logits, after: _Logits, tokens: _Tokens, name: str) -> Iterator[SamplingEdit]:
    """Yield what was done to the logits of some tokens.

    A token may be masked before: then its logit is replaced. If it is masked after, a later edit replaces it.

    Args:
        before: logits, one for each token.
        after: the same after one or more edits.
        tokens: the tokens.
        name: who edited them.

    Raises:
        SamplingEditsTooLongError: the edit names too many tokens.
    """
    kept = np.isfinite(before) & np.isfinite(after)
    yield from _changes(before[kept], after[kept], tokens[kept], name)
    yield from _some(SET, tokens, after, np.isneginf(before) & np.isfinite(after), name)


def _changes(before: _Logits, after: _Logits, tokens: _Tokens, name: str) -> Iterator[SamplingEdit]:
    """Yield the edits of finite logits: one of all of them, if it can be that, else of those that changed."""
    changed = before != after
    if not changed.any():
        return
    edit = _same_for_all(before, after, _NO_TOKENS)
    if edit is None and changed.sum() <= MAX_LISTED:
        edit = _same_for_all(before[changed], after[changed], tokens[changed])
    if edit is None or (edit.kind == ADD and len(edit.tokens)):  # of which each has a value
        yield from _some(ADD, tokens, after - before, changed, name)
    else:
        yield edit


def _some(
    kind: int, tokens: _Tokens, values: _Logits, chosen: npt.NDArray[np.bool_], name: str
) -> Iterator[SamplingEdit]:
    """Yield an edit of some of the tokens, if there are any. `values` has one for each token, or for all together."""
    count = int(chosen.sum())
    if count > MAX_LISTED:
        raise SamplingEditsTooLongError(name, count, MAX_LISTED)
    if count:
        yield SamplingEdit(kind, tokens[chosen], values[chosen] if len(values) == len(tokens) else values)


def _same_for_all(before: _Logits, after: _Logits, tokens: _Tokens) -> SamplingEdit | None:
    """Return an edit that adds one number to all logits, or multiplies all by one, if that is what was done."""
    largest = int(np.argmax(np.abs(before)))
    shift = after - before
    if np.ptp(shift) <= _PRECISION * max(1.0, abs(float(before[largest]))):
        return SamplingEdit(ADD, tokens, shift[largest : largest + 1])
    if before[largest] == 0:
        return None
    factor = after[largest] / before[largest]
    if not np.allclose(before * factor, after, rtol=_PRECISION, atol=0):
        return None
    return SamplingEdit(SCALE, tokens, np.array([factor], np.float32))
