"""Retry of a failed call row by row, to find the rows that a processor fails on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from logitship.client.errors import ProcessorFault

from .group_snapshot import GroupMember, GroupSnapshot
from .promised_call import PromisedCall

_ENOUGH_RETRIES = 3


class RowRetry:
    """Calls a processor on its group, and row by row if that fails.

    An exception for a group does not tell which row caused it. So each row is retried by itself, with its parameters
    and its `state` restored, and only rows that fail alone get a fault. The logits must be restored as well. Copying
    them in every step, for a retry that is rarely needed, would cost more than all else around the call (170 µs for 32
    rows of 49152). The server still has them, and sends them again:

        faults = retry.attempt(logits, members)
        if faults is None:  # request the rows again
            faults = retry.retry(logits, members)

    A call whose logits are promised (`PromisedCall`) is never made row by row: that needs the rows. `attempt` returns
    None for a single row too, because the exception might not have been raised with real logits.

    `GroupSnapshot` restores the sequences. A sequence whose values it cannot hold gets the group's fault, and so does
    one whose history the processor shortened. Not restored are attributes of the class and of its module, the view's
    other attributes, and tokens that were replaced. Values within `params` and `state` are equal afterwards, but not
    identical.

    Args:
        call: edits logits in place, given the parameters of their rows. Raises ProcessorFault for an exception or a
            bad result.
    """

    def __init__(self, call: Callable[[torch.Tensor | PromisedCall, list[dict[str, Any]]], None]) -> None:
        self._call = call
        self._failed: tuple[GroupSnapshot, ProcessorFault] | None = None
        self._retries_without_fault = 0

    @property
    def is_row_by_row(self) -> bool:
        """True if the processor cannot handle several rows, and is called for each."""
        return self._retries_without_fault >= _ENOUGH_RETRIES

    def attempt(
        self, logits: torch.Tensor | PromisedCall, members: Sequence[GroupMember]
    ) -> dict[int, ProcessorFault] | None:
        """Call the processor on all rows at once.

        A processor that repeatedly failed for groups but never for a single row cannot handle several rows: it is
        called row by row from then on.

        Args:
            logits: float32 [rows, vocab], edited in place; or their promise, unless `is_row_by_row`.
            members: one per row, at least one.

        Returns:
            The faults by row of the group; or None if `retry` must be called: the logits are invalid, and are needed
            again.
        """
        if isinstance(logits, torch.Tensor):
            if len(members) == 1:
                fault = self._fault_of(logits, members)
                return {} if fault is None else {0: fault}
            if self.is_row_by_row:
                return self._call_each(logits, members, range(len(members)))
        snapshot = GroupSnapshot(members)
        fault = self._fault_of(logits, members)
        if fault is None:
            return {}
        if not len(snapshot):
            return dict.fromkeys(range(len(members)), fault)
        self._failed = snapshot, fault
        return None

    def retry(self, logits: torch.Tensor, members: Sequence[GroupMember]) -> dict[int, ProcessorFault]:
        """Call the processor on each row, after `attempt` returned None.

        Args:
            logits: as they were before the attempt; edited in place.
            members: those of the attempt, without new tokens.

        Returns:
            The faults by row of the group.
        """
        assert self._failed is not None, "there was no failed attempt"
        (snapshot, fault), self._failed = self._failed, None
        restored = snapshot.restore()
        faults = {row: fault for row in range(len(members)) if row not in restored}
        faults |= self._call_each(logits, members, sorted(restored))
        self._retries_without_fault = 0 if faults else self._retries_without_fault + 1
        return faults

    def _call_each(
        self, logits: torch.Tensor, members: Sequence[GroupMember], rows: Sequence[int]
    ) -> dict[int, ProcessorFault]:
        faults = ((row, self._fault_of(logits[row : row + 1], [members[row]])) for row in rows)
        return {row: fault for row, fault in faults if fault is not None}

    def _fault_of(self, logits: torch.Tensor | PromisedCall, members: Sequence[GroupMember]) -> ProcessorFault | None:
        try:
            self._call(logits, [member.params for member in members])
        except ProcessorFault as fault:
            return fault.with_traceback(None)  # the fault outlives the call, and its frames hold the logits
        return None
