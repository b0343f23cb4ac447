"""Sampling records in vLLM's front end: from the outputs of single tokens to those of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from logitship.client.sampling_record import SamplingRecord
from logitship.sampler.ops.sampling_masks import MAX_BYTES
from logitship.sampler.row_errors import SamplingMasksTooLargeError

_ATTRIBUTE = "logitship_records"
"""Attribute of vLLM's `RequestState` and `CompletionOutput`: the `_Records` of the request."""


@dataclass
class _Records:
    """Records of the tokens of one request so far.

    Attributes:
        size: bytes of its records as JSON.
        error: why there are no more of them; None: there are.
    """

    tokens: list[SamplingRecord] = field(default_factory=list)
    size: int = 0
    error: str | None = None

    def join(self, start: int, end: int) -> SamplingRecord:
        """Return the record of some tokens.

        Raises:
            ValueError: they have none; says why.
        """
        if self.error is None and len(self.tokens) < end:
            self.error = "return_sampling_mask: vLLM returned tokens without their records"
        if self.error is not None:
            raise ValueError(self.error)
        return SamplingRecord.join(self.tokens[start:end])


def add_record(state: Any, record: Mapping[str, Any] | None, error: str | None) -> None:
    """Add the record of a request's next token.

    Args:
        state: vLLM's `RequestState`.
        record: the record as JSON; None: there is none.
        error: why there is none.
    """
    records: _Records = vars(state).setdefault(_ATTRIBUTE, _Records())
    if record is None or records.error is not None:
        records.error = records.error or error
        return
    records.size += sum(
        len(each) for each in [*record.values(), *record.get("edits", {}).values()] if type(each) is str
    )
    if records.size * 3 // 4 > MAX_BYTES:
        records.error, records.tokens = str(SamplingMasksTooLargeError(MAX_BYTES)), []
        return
    records.tokens.append(replace(SamplingRecord.from_json(record), start=len(records.tokens)))


def give_records(state: Any, completion: Any) -> None:
    """Give a completion the records of its request.

    Raises:
        ValueError: it has finished offline, and its records are too large.
    """
    records = vars(state).get(_ATTRIBUTE)
    if records is None:
        return
    setattr(completion, _ATTRIBUTE, records)
    if state.queue is None and completion.finish_reason and completion.token_ids:
        completion.sampling_record = records.join(0, len(completion.token_ids))


class RecordParts:
    """The records of what a request returns over time.

    Args:
        are_deltas: each output has only the tokens since the last one.
    """

    def __init__(self, *, are_deltas: bool) -> None:
        self._are_deltas = are_deltas
        self._returned: Counter[int] = Counter()

    def next(self, completion: Any) -> SamplingRecord | None:
        """Return the record of a completion's tokens, also as its attribute `sampling_record`; None if it has none.

        Raises:
            ValueError: its records are too large, or an edit names too many tokens.
        """
        records: _Records | None = getattr(completion, _ATTRIBUTE, None)
        if records is None or not completion.token_ids:
            return None
        start = self._returned[completion.index]
        end = start + len(completion.token_ids)
        if self._are_deltas:
            self._returned[completion.index] = end
        record = records.join(start, end)
        completion.sampling_record = record
        return record
