"""The values of promised logits: an edit log until they are read, a tensor afterwards."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from logitship.sampler.edits.edit_operations import touched_rows
from logitship.sampler.edits.logit_edits import EditLog, RecentVectors


@dataclass(frozen=True)
class RecentCalls:
    """Knowledge from earlier calls of a processor.

    Attributes:
        vectors: copies of the vectors that they recorded.
    """

    vectors: RecentVectors = field(default_factory=RecentVectors)


def _fetch_too_late() -> torch.Tensor:
    raise RuntimeError("logits of an earlier step were used, whose values no longer exist")


class Reference:
    """Object that each promised tensor of a call refers to, so that it exists as long as one of them."""


class Source:
    """The logits of one call, which are fetched once if somebody reads them.

    Args:
        num_rows, vocab_size: their shape.
        fetch: waits for them; returns float32 [num_rows, vocab_size], which the author's code may edit.
        recent: of earlier calls; None: there are none.

    Attributes:
        was_read: True if they were fetched.
        reference: see `Reference`; None once the call has ended.
    """

    def __init__(
        self, num_rows: int, vocab_size: int, fetch: Callable[[], torch.Tensor], recent: RecentCalls | None = None
    ) -> None:
        self.num_rows = num_rows
        self.vocab_size = vocab_size
        self.recent = recent or RecentCalls()
        self.was_read = False
        self.reference: Reference | None = Reference()
        self._fetch = fetch
        self._lock = threading.RLock()
        self._memories: list[weakref.ref[Memory]] = []

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
                memory.values = logits if memory.base is None else logits.clone()
                memory.is_pending = False
            for memory in memories:
                assert memory.values is not None
                memory.registers = memory.log.apply_to(memory.values)

    def is_referred_to(self) -> bool:
        """End the call, and return whether there still are promised tensors."""
        reference = weakref.ref(self.reference)
        self.reference = None
        return reference() is not None

    def end(self) -> None:
        """Let reads fail from now on."""
        with self._lock:  # a thread of the author's code may be fetching the logits
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

    def __init__(self, source: Source, base: Memory | None = None) -> None:
        self.source = source
        self.is_pending = True
        vectors = source.recent.vectors
        self.log: EditLog = EditLog(source.num_rows, source.vocab_size, vectors) if base is None else base.log.copy()
        self.base, self.base_length = base, 0 if base is None else len(base.log.edits)
        if base is not None and base.base is not None:
            self.base, self.base_length = base.base, base.base_length
        self.values: torch.Tensor | None = None
        self.registers: dict[int, torch.Tensor] = {}
        source.add(self)

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

    def take_back(self, copy: Memory, rows: range) -> bool:
        """Assign rows of a copy to the same rows. Return False unless that is the same as its later edits."""
        start, edits = copy.base_length, copy.log.edits
        if copy.base is not self or len(self.log.edits) != start or not copy.is_pending:
            return False
        touched = (touched_rows(edit, self.source.vocab_size) for edit in edits[start:])
        if not all(set(range(part.start, part.stop)) <= set(rows) for part in touched):
            return False
        self.log.extend(copy.log, start)
        self.limit()
        return True
