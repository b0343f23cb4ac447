"""Sampling masks of SGLang in `meta_info`: packed, with the edits of logits, if a request asks for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from logitship.client.sampling_record import SamplingEdits, SamplingRecord
from logitship.server.runtime.request_fields import EDITS, FORMAT, MASK, MASK_FIELDS, check_mask_fields

SENT_FIELDS = "logitship.sampling_masks"
"""Key of an HTTP request's scope: the fields of its JSON body for sampling masks."""
SAMPLING_EDITS = "sampling_edits"
"""Key of what SGLang's scheduler sends for each token of requests with edits."""
_ROUTES = ("/generate", "/v1/chat/completions")
_MASKS, _LOGPROBS = "output_token_sampling_mask", "output_token_sampling_logprobs"


def take_mask_fields(body: Any, scope: MutableMapping[str, Any]) -> None:
    """Keep the fields of a JSON body that SGLang does not know, and remove them."""
    if isinstance(body, dict):
        fields = {name: body[name] for name in MASK_FIELDS if body.get(name) is not None}
        if fields.keys() & {FORMAT, EDITS}:
            scope[SENT_FIELDS] = fields
            for name in (FORMAT, EDITS):
                body.pop(name, None)


def requested_masks(scope: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the fields of a request for packed masks; None if it does not ask for them.

    Raises:
        ValueError: a field is malformed, or needs another one; names it.
    """
    fields: Mapping[str, Any] = scope.get(SENT_FIELDS, {})
    if not fields or not check_mask_fields(fields, "SGLang", returns_lists=True):
        return None
    if not scope["path"].endswith(_ROUTES):
        raise ValueError(f"{FORMAT}: inside SGLang, only {' and '.join(_ROUTES)} return packed masks")
    return fields


class PackedMasks:
    """Packs the masks of the responses to one request.

    Args:
        vocab_size: number of tokens of the vocabulary.
        temperature: returns that of the prompt with an index.
        are_deltas: each response has only the tokens since the last one.
    """

    def __init__(self, vocab_size: int, temperature: Callable[[int], float], *, are_deltas: bool) -> None:
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._are_deltas = are_deltas
        self._returned: Counter[int] = Counter()

    def pack(self, response: Mapping[str, Any], index: int) -> None:
        """Replace the lists of a response by a `sampling_record` of its new tokens, in its `meta_info`.

        Raises:
            ValueError: an edit names too many tokens.
        """
        meta, tokens = response["meta_info"], response["output_ids"]
        masks, edits = meta.pop(_MASKS, None), meta.pop(SAMPLING_EDITS, ())
        logprobs = meta.pop(_LOGPROBS, ())
        if masks is None:
            return
        start = self._returned[index]
        since = 0 if self._are_deltas else start
        end = len(masks)  # behind a stop string, there may be more tokens
        self._returned[index] = start + end - since
        record = SamplingRecord.from_lists(
            self._vocab_size, tokens[since:end], masks[since:end], logprobs[since:end], self._temperature(index)
        )
        record = replace(record, start=start, edits=_joined(edits[since:end]))
        meta["sampling_record"] = record.to_json()


def _joined(of_tokens: Sequence[Mapping[str, Any] | None]) -> SamplingEdits:
    edits = []
    for position, each in enumerate(of_tokens):
        if each is None:
            continue
        if "error" in each:
            raise ValueError(each["error"])
        edits.append(SamplingEdits.from_json(each, np.dtype("<u4")).shifted(position))
    return SamplingEdits.join(edits)


def asks_for_edits(fields: Mapping[str, Any] | None) -> bool:
    """Return whether a request for packed masks asks for edits, too."""
    return fields is not None and bool(fields.get(EDITS)) and bool(fields.get(MASK))
