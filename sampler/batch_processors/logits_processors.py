"""The installed batch processors, grouped by the point in a step at which they run, and their state of each row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

import torch

from logitship.client.errors import LogitshipError
from logitship.sampler.sampling_params import SamplingParams

from .interface import BatchUpdate, LogitsProcessor, MoveDirectionality

T = TypeVar("T")

NewState: TypeAlias = Callable[[SamplingParams, list[int] | None, list[int]], T | None]


@runtime_checkable
class FaultSource(Protocol):
    """A batch processor that reports the rows on which it failed."""

    def take_faults(self) -> Iterable[tuple[int, LogitshipError]]:
        """Return (row, fault) of the failures since the last call. The logits of these rows are finite."""
        ...


def take_faults(processors: Iterable[LogitsProcessor]) -> Iterator[tuple[int, LogitshipError]]:
    """Yield (row, fault) of all processors that report faults."""
    for processor in processors:
        # `isinstance` checks all members of a protocol, which takes longer than the smallest kernels.
        if hasattr(processor, "take_faults"):
            yield from cast(FaultSource, processor).take_faults()


class Applies(Protocol):
    """An object that edits the logits of all rows."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        ...


@runtime_checkable
class SpeculativeLogitsProcessor(Protocol):
    """A batch processor that can run on some of the rows, as speculative decoding requires.

    The method's name and arguments are vLLM's. There, each row belongs to a draft token.
    """

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Edit the next-token logits of some requests of the batch.

        logitship verifies drafts one position at a time. Between two positions it appends the accepted tokens to the
        live output lists and calls `update_state(None)`, so a row always belongs to the request's next token.

        Args:
            logits: float32 [sum of `num_draft_tokens`, vocab], rows in batch order; may be edited in place.
            num_draft_tokens: number of rows of `logits` per row of the batch: 0 or 1.

        Returns:
            The logits, in the same shape.
        """
        ...


def apply_to(processor: Applies, logits: torch.Tensor, num_draft_tokens: Sequence[int] | None) -> torch.Tensor:
    """Run a batch processor.

    Args:
        processor: the batch processor.
        logits: float32 [rows, vocab].
        num_draft_tokens: see `SpeculativeLogitsProcessor`; None if the logits have all rows of the batch.

    Raises:
        TypeError: the processor cannot run on some of the rows.
    """
    if num_draft_tokens is None:
        return processor.apply(logits)
    if not hasattr(processor, "apply_with_spec_decode"):
        raise TypeError(f"{type(processor).__name__} has no apply_with_spec_decode")
    return cast(SpeculativeLogitsProcessor, processor).apply_with_spec_decode(logits, num_draft_tokens)


class PenalizedLogitsProcessor(LogitsProcessor):
    """A batch processor that runs after the penalties, and before those that force a token."""


class ForcingLogitsProcessor(LogitsProcessor):
    """A batch processor that forces a single token in some rows.

    It runs after the penalties: of the engine's own edits, only masks come later.
    """


class LogitsProcessors:
    """Batch processors in order, grouped by the point in a step at which they run.

    Attributes:
        non_argmax_invariant: processors that can change the most likely token; run before the penalties, in every step.
        penalized: `PenalizedLogitsProcessor`s; run after the penalties, in every step.
        forcing: `ForcingLogitsProcessor`s; run after those, in every step.
        argmax_invariant: processors that never change the most likely token; run after the temperature, in steps with a
            randomly sampled row.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] | None = None) -> None:
        self.non_argmax_invariant: list[LogitsProcessor] = []
        self.penalized: list[LogitsProcessor] = []
        self.forcing: list[LogitsProcessor] = []
        self.argmax_invariant: list[LogitsProcessor] = []
        for processor in processors or ():
            self._place_of(processor).append(processor)

    def _place_of(self, processor: LogitsProcessor) -> list[LogitsProcessor]:
        wrapped = getattr(processor, "wrapped", processor)
        if isinstance(wrapped, PenalizedLogitsProcessor):
            return self.penalized
        if isinstance(wrapped, ForcingLogitsProcessor):
            return self.forcing
        return self.argmax_invariant if processor.is_argmax_invariant() else self.non_argmax_invariant

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """All batch processors in the order in which a step runs them."""
        return chain(self.non_argmax_invariant, self.penalized, self.forcing, self.argmax_invariant)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Pass the changes of the batch to every processor. Once a step."""
        for processor in self.all:
            processor.update_state(batch_update)


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
