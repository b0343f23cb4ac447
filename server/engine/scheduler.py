"""Who computes what in the next step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .kv_cache import SlotCache
from .sequence import Sequence


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one sequence that the next step computes."""

    sequence: Sequence
    token_ids: list[int]

    @property
    def draws(self) -> bool:
        """True if the step ends with a new token for this sequence."""
        return self.sequence.draws and self.sequence.num_computed + len(self.token_ids) >= self.sequence.num_prompt


@dataclass(frozen=True)
class Plan:
    """One step: a token of each decoding sequence, and some of the prompts that wait to be computed."""

    decode: list[ScheduledChunk]
    prefill: list[ScheduledChunk]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All of them, in the order of the forward pass."""
        return [*self.decode, *self.prefill]


class Scheduler:
    """First come, first served; every running sequence decodes in every step.

    Guarantees:
    * A sequence runs from the moment a slot is free until it ends: nothing is preempted.
    * A step computes at most `chunked_prefill_size` prompt tokens, so that a long prompt delays the running sequences
      by no more than that.
    """

    def __init__(self, cache: SlotCache, chunked_prefill_size: int) -> None:
        self._cache = cache
        self.chunked_prefill_size = chunked_prefill_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def matching(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """The running and waiting sequences that fit."""
        return [sequence for sequence in (*self.running, *self.waiting) if wanted(sequence)]

    def schedule(self) -> Plan:
        """Give free slots to those who wait, then plan a step."""
        while self.waiting and self._cache.num_free:
            sequence = self.waiting.popleft()
            sequence.slot = self._cache.allocate()
            self.running.append(sequence)
        decode = [ScheduledChunk(s, s.next_tokens(1)) for s in self.running if not s.prefilling]
        prefill = []
        budget = self.chunked_prefill_size
        for sequence in self.running:
            if sequence.prefilling and budget:
                chunk = ScheduledChunk(sequence, sequence.next_tokens(budget))
                budget -= len(chunk.token_ids)
                prefill.append(chunk)
        return Plan(decode, prefill)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, and free its slot if it has one."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self._cache.free(sequence.slot)
        sequence.slot = None
