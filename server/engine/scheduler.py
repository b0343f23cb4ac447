"""The scheduler: assigns slots, and plans which tokens of which sequences each step computes.

Prompts are shared: the prompt of a request is computed once, and copied to its other continuations. While a sequence of
the request computes the prompt, the others wait; then they get copies of the keys and values of all but its last token.
Each sequence computes the last token itself, because the first output token is sampled from its logits.

Guarantees:
* Of the running sequences that need a request's prompt, the first computes it. If it ends early, the next one takes
  over, so no sequence waits for one that does not run.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from logitship.server.model.kv_cache import PrefixCache, SlotCache
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.ngram_speculation import NGramSpeculation

from .beam_group import Beam, BeamGroup
from .forward_pass import MIN_PROMPT_COST, Plan, ScheduledChunk, positions
from .tenant_shares import TenantShares

COPIED_POSITIONS = 4096
"""Positions whose keys and values a step copies while sequences decode, before it leaves others to the next one."""

SHARED_COPIED_POSITIONS = 512
"""The same while several tenants run, whether or not sequences decode."""


class FairQueue:
    """First come, first served for each tenant. Between tenants, the one with the fewest slots is next.

    Iterates by tenant, then in order of arrival.
    """

    def __init__(self) -> None:
        self._queues: dict[str, deque[Sequence]] = {}

    def __len__(self) -> int:
        """Return the number of sequences. Any thread."""
        return sum(map(len, list(self._queues.values())))

    def __iter__(self) -> Iterator[Sequence]:
        for queue in self._queues.values():
            yield from queue

    def extend(self, sequences: Iterable[Sequence]) -> None:
        """Add sequences at the end."""
        for sequence in sequences:
            self._queues.setdefault(sequence.tenant, deque()).append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence.

        Raises:
            ValueError: it does not wait.
        """
        queue = self._queues.get(sequence.tenant, deque())
        queue.remove(sequence)
        if not queue:
            self._queues.pop(sequence.tenant, None)

    def first(self, slots: Counter[str]) -> Sequence | None:
        """Return the sequence that is next, or None.

        It is the first of the tenant that has the fewest slots, those that the sequence needs included. Of tenants with
        the same number it is the one that has waited longest since its queue was empty or it was last served.

        Args:
            slots: number of slots that each tenant has.
        """
        heads = [queue[0] for queue in self._queues.values()]
        return min(heads, key=lambda head: slots[head.tenant] + head.num_slots, default=None)

    def pop(self, sequence: Sequence) -> None:
        """Remove the first sequence of a tenant, whose turn then comes after that of tenants with as many slots."""
        queue = self._queues.pop(sequence.tenant)
        queue.popleft()
        if queue:
            self._queues[sequence.tenant] = queue


def computing_prompts(selected: Iterable[Sequence], running: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield the sequences that compute prompt tokens themselves, in order; the others wait, or are done.

    Args:
        selected: sequences that may.
        running: sequences that have slots.
    """
    taken = {sequence.request_key for sequence in running if not sequence.needs_prompt}
    for sequence in selected:
        if sequence.needs_prompt:
            if sequence.request_key in taken:
                continue
            taken.add(sequence.request_key)
        if sequence.prefilling:
            yield sequence


def _noop(sequence: Sequence) -> None:
    pass


def _all(running: list[Sequence]) -> list[Sequence]:
    return running


class Scheduler:
    """First come, first served for each tenant; every selected running sequence decodes in every step.

    Guarantees:
    * A sequence keeps its slot from when it gets it until it finishes: nothing is preempted. It may sit out steps.
    * A free slot goes to the waiting tenant with the fewest slots.
    * The last `reserved_slots` are for tenants that have at most as many.
    * A beam search gets the slots of all its beams together, or none: two searches never wait for each other.
    * The prompt of a request is computed once for all its continuations, see the module docstring.
    * A prefix of an earlier sequence of the tenant is not computed again while it is in `prefixes`.
    * A step computes at most `chunked_prefill_size` prompt tokens, where a prompt of fewer than eight counts as eight.
      Beside decoding sequences, also of the same tenant, it computes no more than `shares` allows, and begins no copy
      of a prompt after `COPIED_POSITIONS`. That bounds the delay that prompts cause to them.
    * The oldest prompt of a tenant goes on in every step in which the tenant has its turn. A tenant that copies leave
      out is first in one of the next steps.

    Args:
        cache: where the slots are.
        chunked_prefill_size: most prompt tokens of a step.
        prefixes: the prefix cache; None: no caching.
        speculation: drafts tokens; None: no speculative decoding.
        on_start: called with each sequence that got its slot.
        select: returns the running sequences that take part in the next step; called once a step.
        shares: limits the prompt tokens of a step in which sequences decode, or while several tenants run.
        reserved_slots: slots that only tenants with at most as many slots get.
        most_forced: most forced tokens of a sequence in a step.
    """

    def __init__(
        self,
        cache: SlotCache,
        chunked_prefill_size: int,
        prefixes: PrefixCache | None = None,
        speculation: NGramSpeculation | None = None,
        on_start: Callable[[Sequence], None] = _noop,
        select: Callable[[list[Sequence]], list[Sequence]] = _all,
        shares: TenantShares | None = None,
        reserved_slots: int = 0,
        most_forced: int = 0,
    ) -> None:
        self._most_forced = most_forced
        self._cache = cache
        self.prefixes = prefixes or PrefixCache(cache, 0)
        self._speculation = speculation
        self._on_start = on_start
        self._select = select
        self._shares = shares or TenantShares()
        self._reserved_slots = reserved_slots
        self.chunked_prefill_size = chunked_prefill_size
        self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self._num_copied = 0
        """Positions that were copied since the last step was planned."""
        self._is_decoding = False
        """True if sequences had their whole prompt when the last step was planned: copies delay their next tokens."""
        self._left_out: set[str] = set()
        """Tenants whose prompts were postponed because the copy limit of a step was used up. They go first in the next
        step."""

    @property
    def most_tokens(self) -> int:
        """Most tokens of one sequence in a step."""
        num_drafts = self._speculation.num_draft_tokens if self._speculation else 0
        return max(self.chunked_prefill_size, 1 + num_drafts, 1 + self._most_forced)

    def matching(self, matches: Callable[[Sequence], bool]) -> list[Sequence]:
        """Return the matching sequences, running and waiting."""
        return [sequence for sequence in (*self.running, *self.waiting) if matches(sequence)]

    def schedule(self) -> Plan:
        """Give free slots to waiting sequences, then plan a step."""
        started_at = time.perf_counter()
        self._num_copied = 0
        if self.waiting:
            self._start_waiting()
        self._is_decoding = not all(sequence.prefilling for sequence in self.running)
        self._share_prompts()
        self._keep_prompts()
        selected = self._select(self.running)
        decoding = [sequence for sequence in selected if not sequence.prefilling]
        # The next tokens of beams are chosen by the search, not sampled.
        drafting = [sequence for sequence in decoding if not isinstance(sequence, Beam)]
        drafts = self._speculation.drafts(drafting) if self._speculation else {}
        decode = [ScheduledChunk(s, s.next_tokens(1), drafts.get(s, [])) for s in decoding]
        budget = self._shares.num_prompt_tokens(self.chunked_prefill_size, positions(decoding))
        prefill = self._prompt_chunks(selected, budget)
        return Plan(decode, prefill, started_at, self._without_chunk([*decode, *prefill]))

    def _prompt_chunks(self, selected: list[Sequence], budget: int) -> list[ScheduledChunk]:
        """Plan at most `budget` prompt tokens, divided fairly between tenants."""
        computing = sorted(
            computing_prompts(selected, self.running), key=lambda sequence: sequence.tenant not in self._left_out
        )
        wanted = Counter[str]()
        for sequence in computing:
            wanted[sequence.tenant] += max(MIN_PROMPT_COST, sequence.num_prompt - sequence.num_computed)
        left = self._shares.split_prompt_tokens(budget, wanted)
        chunks: list[ScheduledChunk] = []
        left_out = {sequence.tenant for sequence in computing} & self._left_out
        for sequence in computing:
            if left[sequence.tenant] <= 0:
                continue
            if chunks and not self._may_copy and self._needs_copy(sequence):
                left_out.add(sequence.tenant)
                continue
            # In every step: a sequence ahead of it may just have computed the same prefix.
            self._restore_prefix(sequence)
            chunk = ScheduledChunk(sequence, sequence.next_tokens(left[sequence.tenant]))
            left[sequence.tenant] -= chunk.prompt_cost
            chunks.append(chunk)
        self._left_out = left_out - {chunk.sequence.tenant for chunk in chunks}
        return chunks

    def _needs_copy(self, sequence: Sequence) -> bool:
        """Return whether the first tokens of a prompt are in the prefix cache, and not in the sequence's slot."""
        if sequence.num_computed:
            return False
        return self.prefixes.has_prefix(sequence.tenant, sequence.prompt_token_ids[: sequence.num_restorable])

    def _without_chunk(self, chunks: list[ScheduledChunk]) -> list[Sequence]:
        if len(chunks) == len(self.running):
            return []
        scheduled = {chunk.sequence for chunk in chunks}
        return [sequence for sequence in self.running if sequence not in scheduled]

    def _start_waiting(self) -> None:
        """Give free slots to waiting sequences."""
        slots = Counter(sequence.tenant for sequence in self.running)
        for group in {sequence.group for sequence in self.running if isinstance(sequence, Beam)}:
            slots[group.lead.tenant] += len(group.spare_slots)
        while (sequence := self.waiting.first(slots)) and self._may_start(sequence, slots[sequence.tenant]):
            self.waiting.pop(sequence)
            slots[sequence.tenant] += sequence.num_slots
            sequence.slot = self._cache.allocate()
            if isinstance(sequence, Beam):
                sequence.group.spare_slots = [self._cache.allocate() for _ in range(sequence.num_slots - 1)]
            self.running.append(sequence)
            self._on_start(sequence)

    def _may_start(self, sequence: Sequence, num_held: int) -> bool:
        """Return whether a sequence may have slots now, beside those that its tenant has."""
        left = self._cache.num_free - sequence.num_slots
        is_small = num_held + sequence.num_slots <= self._reserved_slots
        return left >= (0 if is_small else self._reserved_slots)

    def observe(self, plan: Plan, num_accepted: int, seconds: float) -> None:
        """Record how many drafts of a step were accepted, and how long it took."""
        if self._speculation and plan.decode and not plan.prefill:
            num_drafts = sum(len(chunk.drafts) for chunk in plan.decode)
            self._speculation.observe(len(plan.decode), num_drafts, num_accepted, seconds)

    def share_prompts(self) -> None:
        """Copy computed prompts to the running sequences that wait for them, or leave that to the next steps."""
        if not self._limits_copies:
            self._share_prompts()

    def _share_prompts(self) -> None:
        needing = [sequence for sequence in self.running if sequence.needs_prompt]
        if self._left_out:
            needing = [sequence for sequence in needing if sequence.tenant in self._left_out]
        if not needing:
            return
        sources = {sequence.request_key: sequence for sequence in self.running if not sequence.needs_prompt}
        for sequence in needing:
            source = sources.get(sequence.request_key)
            if source is not None and self._may_copy:
                assert source.slot is not None
                assert sequence.slot is not None
                self._cache.copy(source.slot, sequence.slot, sequence.num_prompt - 1)
                self._num_copied += sequence.num_prompt - 1
                sequence.take_prompt(source)

    @property
    def _may_copy(self) -> bool:
        """True if this step may begin another copy of a prompt."""
        if not self._limits_copies:
            return True
        return self._num_copied < (SHARED_COPIED_POSITIONS if self._shares.was_shared else COPIED_POSITIONS)

    @property
    def _limits_copies(self) -> bool:
        """True if sequences may wait for the copies of others' prompts."""
        return self._is_decoding or self._shares.was_shared

    def _restore_prefix(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        before = sequence.num_computed
        wanted = sequence.prompt_token_ids[: sequence.num_restorable]
        sequence.num_computed = self.prefixes.restore(sequence.tenant, wanted, sequence.slot, before)
        sequence.num_copied += sequence.num_computed - before
        self._num_copied += sequence.num_computed - before

    def _keep_prompts(self) -> None:
        """Add the prompts that were completed since the last step to the prefix cache."""
        for sequence in self.running:
            if not sequence.prefilling and not sequence.is_prompt_kept:
                assert sequence.slot is not None
                self.prefixes.keep(sequence.tenant, sequence.prompt_token_ids, sequence.slot)
                sequence.is_prompt_kept = True

    def branch(self, source: Beam, beam: Beam) -> None:
        """Run a new beam, in a spare slot of its search with a copy of the source's keys and values."""
        assert source.slot is not None
        beam.slot = heapq.heappop(beam.group.spare_slots)
        self._cache.copy(source.slot, beam.slot, beam.num_computed)
        self.running.append(beam)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence. Its slot, if it has one, is free for all; a beam's, for the other beams of its search."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        if isinstance(sequence, Beam):
            heapq.heappush(sequence.group.spare_slots, sequence.slot)
        else:
            if sequence.is_sound:
                self.prefixes.keep(sequence.tenant, sequence.computed_token_ids, sequence.slot)
            self._cache.free(sequence.slot)
        sequence.slot = None

    def free_slots(self, group: BeamGroup) -> None:
        """Free the slots of a beam search whose beams have all been removed."""
        for slot in group.spare_slots:
            self._cache.free(slot)
        group.spare_slots = []
