"""The installed batch processors, split by where in a step they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, cast, runtime_checkable

import torch

from logitship.client.errors import LogitshipError

from .interface import BatchUpdate, LogitsProcessor


@runtime_checkable
class FaultSource(Protocol):
    """A batch processor that knows which rows it failed on."""

    def take_faults(self) -> Iterable[tuple[int, LogitshipError]]:
        """(row, fault) of what failed since the last call. Those rows are left finite."""
        ...


def take_faults(processors: Iterable[LogitsProcessor]) -> Iterator[tuple[int, LogitshipError]]:
    """What all of them failed on; most have nothing to say."""
    for processor in processors:
        # Not by `isinstance`: it goes through a protocol's members, which takes longer than the smallest of kernels.
        if hasattr(processor, "take_faults"):
            yield from cast(FaultSource, processor).take_faults()


class Applies(Protocol):
    """What edits the logits of all rows."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """See `LogitsProcessor.apply`."""
        ...


@runtime_checkable
class SpeculativeLogitsProcessor(Protocol):
    """A batch processor that can be asked for some of the rows, as speculative decoding needs it.

    The method's name and arguments are vLLM's, where a row is that of a draft token.
    """

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Edit the next-token logits of some requests of the batch.

        logitship goes through the drafts one depth at a time. Between two depths it tells of the tokens that came by
        `update_state(None)`, and the live output lists have them, so that a row is always that of the request's next
        token.

        Args:
            logits: float32 [sum of `num_draft_tokens`, vocab], the rows in the order of the batch; may be edited in
                place.
            num_draft_tokens: of each row of the batch, how many of the logits are its own: 0 or 1.

        Returns:
            The logits, in the same shape.
        """
        ...


def apply_to(processor: Applies, logits: torch.Tensor, num_draft_tokens: Sequence[int] | None) -> torch.Tensor:
    """Run a batch processor.

    Args:
        num_draft_tokens: see `SpeculativeLogitsProcessor`; None: the logits are those of all rows.

    Raises:
        TypeError: it can only be asked for all rows.
    """
    if num_draft_tokens is None:
        return processor.apply(logits)
    if not hasattr(processor, "apply_with_spec_decode"):
        raise TypeError(f"{type(processor).__name__} has no apply_with_spec_decode")
    return cast(SpeculativeLogitsProcessor, processor).apply_with_spec_decode(logits, num_draft_tokens)


class ForcingLogitsProcessor(LogitsProcessor):
    """A batch processor that leaves rows a single token.

    It runs after the penalties, so that of what the engine itself does to logits only masks come after it.
    """


class LogitsProcessors:
    """Batch processors in their order, split by when in a step they run.

    Attributes:
        non_argmax_invariant: can change the most likely token; run before the penalties, on every step.
        forcing: `ForcingLogitsProcessor`s; run after the penalties, on every step.
        argmax_invariant: never change the most likely token; run after the temperature, on steps where some row is
            drawn at random.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] | None = None) -> None:
        self.non_argmax_invariant: list[LogitsProcessor] = []
        self.forcing: list[LogitsProcessor] = []
        self.argmax_invariant: list[LogitsProcessor] = []
        for processor in processors or ():
            self._place_of(processor).append(processor)

    def _place_of(self, processor: LogitsProcessor) -> list[LogitsProcessor]:
        if isinstance(processor, ForcingLogitsProcessor):
            return self.forcing
        return self.argmax_invariant if processor.is_argmax_invariant() else self.non_argmax_invariant

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every batch processor, in the order in which a step runs them."""
        return chain(self.non_argmax_invariant, self.forcing, self.argmax_invariant)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tell every batch processor what changed. Once a step."""
        for processor in self.all:
            processor.update_state(batch_update)
