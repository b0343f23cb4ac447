"""Finds the rows of a group that a processor fails on, so that the others can go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from logitship.client.errors import ProcessorFault

from .group_snapshot import GroupMember, GroupSnapshot

_ENOUGH_RETRIES = 3


class RowRetry:
    """Calls a processor on its group, and row by row where that fails.

    Who raises for a group does not say for which row. So each row is tried again by itself, with its parameters and its
    `state` as they were before, and only those that fail alone are at fault. A copy of the logits, made in every step
    for a retry that is hardly ever needed, would cost more than all else around the call (170 µs for 32 rows of 49152).
    The server has them anyway, and sends them once more:

        faults = retry.attempt(logits, members)
        if faults is None:  # ask for the rows once more
            faults = retry.retry(logits, members)

    What is restored is what `GroupSnapshot` keeps. A sequence of which it cannot keep the values ends with the group's
    fault, and so does one whose history the processor shortened. Not restored is what the class keeps on itself or in
    its module, the view's other attributes, and tokens that were exchanged for others. Values within `params` and
    `state` are equal afterwards, and other objects.

    Args:
        call: edits logits in place, given the parameters of their rows, or raises ProcessorFault. A bad result counts.
    """

    def __init__(self, call: Callable[[torch.Tensor, list[dict[str, Any]]], None]) -> None:
        self._call = call
        self._failed: tuple[GroupSnapshot, ProcessorFault] | None = None
        self._retries_without_fault = 0

    def attempt(self, logits: torch.Tensor, members: Sequence[GroupMember]) -> dict[int, ProcessorFault] | None:
        """Call the processor on all rows at once.

        One that failed for groups and never for a row, time after time, cannot work on several rows at once: it is
        called row by row from then on.

        Args:
            logits: float32 [rows, vocab], edited in place.
            members: one a row, at least one.

        Returns:
            The fault of each row that has one, by its place in the group; or None if `retry` has to tell: the logits
            are spoilt, and needed once more.
        """
        if len(members) == 1:
            fault = self._fault_of(logits, members)
            return {} if fault is None else {0: fault}
        if self._retries_without_fault >= _ENOUGH_RETRIES:
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
            members: the same as before, with no further tokens.

        Returns:
            The fault of each row that has one, by its place in the group.
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

    def _fault_of(self, logits: torch.Tensor, members: Sequence[GroupMember]) -> ProcessorFault | None:
        try:
            self._call(logits, [member.params for member in members])
        except ProcessorFault as fault:
            return fault.with_traceback(None)  # it outlives the call, and its frames hold the logits
        return None
