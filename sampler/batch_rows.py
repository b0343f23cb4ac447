"""Per-row state that stays in step with the persistent batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from .interface import BatchUpdate, MoveDirectionality
from .sampling_params import SamplingParams

T = TypeVar("T")


class BatchRows(Mapping[int, T], Generic[T]):
    """A mapping from row to the state of the request there.

    Only rows that need state have an entry, so a feature that no request uses costs nothing.

    Args:
        new_state: the state for (sampling params, prompt token ids, live output token ids) of a request that came, or
            None if it needs none.
    """

    def __init__(self, new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None]) -> None:
        self._new_state = new_state
        self._states: dict[int, T] = {}

    def update(self, batch_update: BatchUpdate | None) -> bool:
        """Follow the batch. True if any row's state came, went or moved."""
        if batch_update is None:
            return False
        changed = False
        for row in batch_update.removed:
            changed |= self._drop(row) is not None
        for row, params, prompt_token_ids, output_token_ids in batch_update.added:
            changed |= self._drop(row) is not None
            state = self._new_state(params, prompt_token_ids, output_token_ids)
            if state is not None:
                self._states[row] = state
                changed = True
        for source, target, direction in batch_update.moved:
            coming, going = self._drop(source), self._drop(target)
            changed |= coming is not None or going is not None
            if coming is not None:
                self._states[target] = coming
            if going is not None and direction is MoveDirectionality.SWAP:
                self._states[source] = going
        return changed

    def discard_if(self, finished: Callable[[T], bool]) -> bool:
        """Drop the rows whose state is of no more use. True if there were any."""
        rows = [row for row, state in self._states.items() if finished(state)]
        for row in rows:
            del self._states[row]
        return bool(rows)

    def _drop(self, row: int) -> T | None:
        return self._states.pop(row, None)

    def __getitem__(self, row: int) -> T:
        return self._states[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
