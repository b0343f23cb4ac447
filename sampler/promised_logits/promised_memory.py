"""The values of promised logits: an edit log until they are read, a tensor afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from logitship.sampler.edits.logit_edits import EditLog, RecentVectors

from .promised_index import RecentSelections

MIN_GIVEN = 64
"""Number of tensors of a call from which on unused ones are searched for before it ends."""

_MAX_PROMISES = 64
"""Most promises that are kept for later calls, one of each shape."""


@dataclass(frozen=True)
class RecentCalls:
    """Objects of earlier calls of a processor that are reused to speed up its next calls.

    Attributes:
        vectors: copies of vectors.
        selections: selected positions, by index.
        tensors: promised tensors that nothing refers to any more, by shape.
        promises: promises whose tensors nothing refers to any more, by the shape of their logits.
    """

    vectors: RecentVectors = field(default_factory=RecentVectors)
    selections: RecentSelections = field(default_factory=RecentSelections)
    tensors: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    promises: dict[tuple[int, int], Any] = field(default_factory=dict)

    def keep(self, promise: Any, shape: tuple[int, int]) -> None:
        """Keep a promise for a later call."""
        if len(self.promises) >= _MAX_PROMISES:
            self.promises.clear()
        self.promises[shape] = promise


def _fetch_too_late() -> torch.Tensor:
    raise RuntimeError("logits of an earlier step were used, whose values no longer exist")


class Source:
    """The logits of one call, which are fetched once if somebody reads them.

    Args:
        num_rows, vocab_size: their shape.
        fetch: waits for them; returns float32 [num_rows, vocab_size], which the author's code may edit.
        recent: objects of earlier calls; None: there are none.

    Attributes:
        was_read: True if they were fetched.
        tensors: the tensors that the author's code was given, and may still refer to.
        most_tensors: number of them from which on those that it no longer refers to are taken back.
    """

    __slots__ = (
        "_fetch",
        "_lock",
        "_memories",
        "most_tensors",
        "num_rows",
        "recent",
        "tensors",
        "vocab_size",
        "was_read",
    )

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        fetch: Callable[[], torch.Tensor],
        recent: RecentCalls | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.recent = recent or RecentCalls()
        self.was_read = False
        self.tensors: list[Any] = []
        self.most_tensors = MIN_GIVEN
        self._fetch = fetch
        self._lock = threading.RLock()
        self._memories: list[weakref.ref[Memory]] = []

    def begin(self, fetch: Callable[[], torch.Tensor]) -> None:
        """Begin another call, after one that read nothing. Only the first memory is still used."""
        self._fetch = fetch
        self.most_tensors = MIN_GIVEN
        del self._memories[1:]

    def add(self, memory: Memory) -> None:
        """Add a memory whose values depend on the logits."""
        self._memories.append(weakref.ref(memory))

    def read(self) -> None:
        """Fetch the logits, and compute the values of all memories."""
        with self._lock:
            if self.was_read:
                return
            logits = self._fetch()
            self.was_read = True
            memories = [memory for ref in self._memories if (memory := ref()) is not None]
            # Copies first: the edits of the logits themselves are applied in place.
            for memory in memories:
                memory.values = logits if memory.is_original else logits.clone()
                memory.is_pending = False
            for memory in memories:
                assert memory.values is not None
                memory.registers = memory.log.apply_to(memory.values)

    def end(self) -> None:
        """End the call: nothing can be fetched any more."""
        if self.tensors:
            with self._lock:  # a thread of the author's code may be fetching the logits
                self._fetch = _fetch_too_late
            self.tensors = []  # they refer to this source
        self._fetch = _fetch_too_late


class Memory:
    """Values that the edits in a log give to logits.

    Args:
        source: the logits.
        base: the memory that it is a copy of; None: it is that of the logits themselves.

    Attributes:
        is_pending: True until the values exist.
        log: the edits so far, until then.
        values: float32 [num_rows, vocab_size]; None until somebody reads them.
        registers: the values that the log saved, once they exist.
        base, base_length: for a copy, or a copy of a copy, the memory that it was copied from, and how many edits that
            had.
    """

    __slots__ = (
        "__weakref__",
        "base",
        "base_length",
        "is_original",
        "is_pending",
        "log",
        "registers",
        "source",
        "values",
    )

    def __init__(self, source: Source, base: Memory | None = None) -> None:
        self.source = source
        self.is_pending = True
        self.is_original = base is None
        self.log: EditLog = (
            EditLog(source.num_rows, source.vocab_size, source.recent.vectors) if base is None else base.log.copy()
        )
        self.base, self.base_length = base, 0 if base is None else len(base.log.edits)
        if base is not None and base.base is not None:
            self.base, self.base_length = base.base, base.base_length
        self.values: torch.Tensor | None = None
        self.registers: dict[int, torch.Tensor] = {}
        source.add(self)

    def clear(self) -> None:
        """Clear the edits. Only after a call that read nothing."""
        self.log = EditLog(self.source.num_rows, self.source.vocab_size, self.source.recent.vectors)

    def read(self) -> torch.Tensor:
        """Return the values, float32 [num_rows, vocab_size]."""
        if self.values is None:
            self.source.read()
            assert self.values is not None
        return self.values

    def limit(self) -> None:
        """Read the values if the log has become too long to be sent."""
        if self.log.is_full:
            self.source.read()
