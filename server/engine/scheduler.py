"""Who computes what in the next step."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from logitship.server.model.kv_cache import SlotCache
from logitship.server.model.prefix_cache import PrefixCache
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.ngram_speculation import NGramSpeculation

from .beam_group import BeamGroup
from .prompt_sharing import computing_prompts, share_prompts


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens of one sequence that the next step computes.

    Attributes:
        token_ids: the prompt's, or the last one drawn.
        drafts: tokens that may follow, and are computed with it.
    """

    sequence: Sequence
    token_ids: list[int]
    drafts: list[int] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """True if the step ends with a new token for this sequence."""
        return self.sequence.draws and self.sequence.num_computed + len(self.token_ids) >= self.sequence.num_prompt


@dataclass(frozen=True)
class Plan:
    """One step: a token of each decoding sequence, with its drafts, and some of the prompts that are to be computed."""

    decode: list[ScheduledChunk]
    prefill: list[ScheduledChunk]

    def __bool__(self) -> bool:
        return bool(self.decode or self.prefill)

    @property
    def chunks(self) -> list[ScheduledChunk]:
        """All of them, in the order of the forward pass."""
        return [*self.decode, *self.prefill]


def _nobody(sequence: Sequence) -> None:
    pass


class Scheduler:
    """First come, first served; every running sequence decodes in every step.

    Guarantees:
    * A sequence runs from the moment a slot is free until it ends: nothing is preempted.
    * A beam search gets the slots of all its beams together, or none: two of them never wait for each other.
    * The continuations of one request have their prompt computed once, see `prompt_sharing`.
    * What an earlier sequence of the tenant began with is not computed again while `prefixes` has it.
    * A step computes at most `chunked_prefill_size` prompt tokens, so that a long prompt delays the running sequences
      by no more than that.

    Args:
        prefixes: keeps what sequences began with; None: nothing does.
        speculation: what drafts tokens; None: nothing does.
        on_start: told of each sequence that got its slot.
    """

    def __init__(
        self,
        cache: SlotCache,
        chunked_prefill_size: int,
        prefixes: PrefixCache | None = None,
        speculation: NGramSpeculation | None = None,
        on_start: Callable[[Sequence], None] = _nobody,
    ) -> None:
        self._cache = cache
        self.prefixes = prefixes or PrefixCache(cache, 0)
        self._speculation = speculation
        self._on_start = on_start
        self.chunked_prefill_size = chunked_prefill_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def most_tokens(self) -> int:
        """Most tokens of a sequence in a step."""
        num_drafts = self._speculation.num_draft_tokens if self._speculation else 0
        return max(self.chunked_prefill_size, 1 + num_drafts)

    def matching(self, wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        """The running and waiting sequences that fit."""
        return [sequence for sequence in (*self.running, *self.waiting) if wanted(sequence)]

    def schedule(self) -> Plan:
        """Give free slots to those who wait, then plan a step."""
        while self.waiting and self._cache.num_free >= self.waiting[0].num_slots:
            sequence = self.waiting.popleft()
            sequence.slot = self._cache.allocate()
            if sequence.beams is not None:
                sequence.beams.spare_slots = [self._cache.allocate() for _ in range(sequence.num_slots - 1)]
            self.running.append(sequence)
            self._on_start(sequence)
        self.share_prompts()
        self._keep_prompts()
        decoding = [sequence for sequence in self.running if not sequence.prefilling]
        # A beam's next token is not its own to draw.
        drafting = [sequence for sequence in decoding if sequence.beams is None]
        drafts = self._speculation.drafts(drafting) if self._speculation else {}
        decode = [ScheduledChunk(s, s.next_tokens(1), drafts.get(s, [])) for s in decoding]
        prefill = []
        budget = self.chunked_prefill_size
        for sequence in computing_prompts(self.running):
            if budget:
                # Each time that it is its turn: a sequence ahead of it may just have computed the same.
                self._restore_prefix(sequence)
                chunk = ScheduledChunk(sequence, sequence.next_tokens(budget))
                budget -= len(chunk.token_ids)
                prefill.append(chunk)
        return Plan(decode, prefill)

    def took(self, plan: Plan, num_accepted: int, seconds: float) -> None:
        """Learn how many of a step's drafts came true, and how long it took."""
        if self._speculation and plan.decode and not plan.prefill:
            num_drafts = sum(len(chunk.drafts) for chunk in plan.decode)
            self._speculation.observe(len(plan.decode), num_drafts, num_accepted, seconds)

    def share_prompts(self) -> None:
        """Copy prompts that were computed to the running sequences that wait for them."""
        share_prompts(self.running, self._cache)

    def _restore_prefix(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        before = sequence.num_computed
        wanted = sequence.prompt_token_ids[: sequence.num_restorable]
        sequence.num_computed = self.prefixes.restore(sequence.tenant, wanted, sequence.slot, before)
        sequence.num_copied += sequence.num_computed - before

    def _keep_prompts(self) -> None:
        """Keep the prompts that were computed since the last step."""
        for sequence in self.running:
            if not sequence.prefilling and not sequence.is_prompt_kept:
                assert sequence.slot is not None
                self.prefixes.keep(sequence.tenant, sequence.prompt_token_ids, sequence.slot)
                sequence.is_prompt_kept = True

    def branch(self, source: Sequence, sequence: Sequence) -> None:
        """Let a new beam of a search run: with a slot of its request, and the source's keys and values in it."""
        assert source.slot is not None
        assert sequence.beams is not None
        sequence.slot = heapq.heappop(sequence.beams.spare_slots)
        self._cache.copy(source.slot, sequence.slot, sequence.num_computed)
        self.running.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, and free its slot if it has one: for all, or for the other beams of its request."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if sequence.beams is None:
            if sequence.is_sound:
                self.prefixes.keep(sequence.tenant, sequence.computed_token_ids, sequence.slot)
            self._cache.free(sequence.slot)
        else:
            heapq.heappush(sequence.beams.spare_slots, sequence.slot)
        sequence.slot = None

    def free_slots(self, beams: BeamGroup) -> None:
        """Free the slots of a search, whose beams have all been removed."""
        for slot in beams.spare_slots:
            self._cache.free(slot)
        beams.spare_slots = []
