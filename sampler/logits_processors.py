"""The installed batch processors, split by where in a step they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol, runtime_checkable

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
        if isinstance(processor, FaultSource):
            yield from processor.take_faults()


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
