"""The installed batch processors, split by where in a step they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from .interface import BatchUpdate, LogitsProcessor


class LogitsProcessors:
    """Batch processors in their order, split by `is_argmax_invariant()`.

    Attributes:
        non_argmax_invariant: can change the most likely token; run before the penalties, on every step.
        argmax_invariant: never do; run after the temperature, on steps where some row is drawn at random.
    """

    def __init__(self, processors: Iterable[LogitsProcessor] = ()) -> None:
        self.non_argmax_invariant: list[LogitsProcessor] = []
        self.argmax_invariant: list[LogitsProcessor] = []
        for processor in processors:
            invariant = processor.is_argmax_invariant()
            (self.argmax_invariant if invariant else self.non_argmax_invariant).append(processor)

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every batch processor, in the order in which a step runs them."""
        return chain(self.non_argmax_invariant, self.argmax_invariant)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tell every batch processor what changed. Once a step."""
        for processor in self.all:
            processor.update_state(batch_update)
