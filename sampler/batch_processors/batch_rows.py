"""Per-row state that follows the persistent batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from logitship.sampler.sampling_params import SamplingParams

from .interface import BatchUpdate, MoveDirectionality

T = TypeVar("T")

NewState: TypeAlias = Callable[[SamplingParams, list[int] | None, list[int]], T | None]


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: NewState[T],
) -> bool:
    """Apply the changes of the batch to a dict from row to state. vLLM's name and arguments, because plugins call it.

    Args:
        req_entries: the states; edited in place.
        batch_update: the changes; None if nothing changed.
        new_state: returns the state of an added request from (sampling params, prompt token ids, live output token
            ids), or None if it needs none.

    Returns:
        True if any row's state was added, removed or moved.
    """
    if batch_update is None:
        return False
    changed = False
    for row in batch_update.removed:
        changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_token_ids, output_token_ids in batch_update.added:
        changed |= req_entries.pop(row, None) is not None
        state = new_state(params, prompt_token_ids, output_token_ids)
        if state is not None:
            req_entries[row] = state
            changed = True
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        changed |= moved is not None or replaced is not None
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return changed


class BatchRows(Mapping[int, T], Generic[T]):
    """Mapping from row to the state of its request.

    Only rows that need state have an entry, so a feature that no request uses costs nothing.

    Args:
        new_state: returns the state of an added request from (sampling params, prompt token ids, live output token
            ids), or None if it needs none.
    """

    def __init__(self, new_state: NewState[T]) -> None:
        self._new_state = new_state
        self._states: dict[int, T] = {}

    def update(self, batch_update: BatchUpdate | None) -> bool:
        """Apply the changes of the batch. Return True if any row's state was added, removed or moved."""
        return process_dict_updates(self._states, batch_update, self._new_state)

    def discard_if(self, finished: Callable[[T], bool]) -> bool:
        """Drop the rows whose state is finished. Return True if there were any."""
        rows = [row for row, state in self._states.items() if finished(state)]
        for row in rows:
            del self._states[row]
        return bool(rows)

    def __getitem__(self, row: int) -> T:
        return self._states[row]

    def __iter__(self) -> Iterator[int]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def rows_of_drafts(num_draft_tokens: Sequence[int]) -> list[int]:
    """Return the row of the batch that each row of the logits belongs to, in `apply_with_spec_decode`.

    Args:
        num_draft_tokens: number of rows of the logits per row of the batch.
    """
    return [row for row, count in enumerate(num_draft_tokens) for _ in range(count)]
