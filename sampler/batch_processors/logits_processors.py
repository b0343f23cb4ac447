"""The installed batch processors, grouped by the point in a step at which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, cast, runtime_checkable

import torch

from logitship.client.errors import LogitshipError

from .interface import BatchUpdate, LogitsProcessor


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
