"""Calls that begin before their logits exist, and the tokens that they force.

If a call has recorded its edits without reading the logits, the tokens that it forbids are known before the forward
pass. If it leaves one token, the processor can be called for the token after it, and so on: one forward pass then
computes all of them.

Guarantees:
* A processor is called once for each token of a row, in order. It is called ahead only after forced tokens.
* An answer that came early is used for its row and token alone, and is the same as if it had come late.
* A call whose rows depend on each other is never split: rows that have ended by then are zeros in it.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.allowed_tokens import AllowedTokens, mask_of
from logitship.sampler.edits.edit_operations import (
    EditRows,
    Fill,
    GroupEdits,
    Put,
    PutMask,
    PutRows,
    num_positions,
)
from logitship.sampler.edits.merged_edits import apply_edits
from logitship.sampler.edits.row_selection import finite_tokens, is_row_wise, select_rows

from .deferred_calls import BEFORE_ALL, DeferredCall, DeferredCalls
from .executor import CollectEdits, LoadedProcessor, LocalGroup, Run, RunOutcome
from .guarded_run import GuardedRun
from .internal_faults import attempt
from .processor_groups import GroupStage, ProcessorGroup, ProcessorUse

MAX_WAIT = 0.01
"""Most seconds of a step to wait for calls before the forward pass, while several sequences run."""
MAX_PAUSE = 64
"""Longest `CallPause`, in calls."""
_MAX_POSITIONS = 1 << 14
"""Positions in the edits of a call up to which its rows are looked at before the forward pass, each by itself."""
_MAX_KNOWN = 1024
"""Number of processors that are remembered as forcing tokens. Most of them are never called again."""

CallKey: TypeAlias = tuple[ProcessorUse, int]
"""A row's use of a processor, and the length of its output at the call."""


class CallPause:
    """Exponential backoff, counted in calls of a processor: after a failure, some calls make no further attempt.

    Their number doubles with each failure in a row, from 1 to `MAX_PAUSE`.
    """

    def __init__(self) -> None:
        self._pause = 1
        self._num_to_skip = 0

    @property
    def is_over(self) -> bool:
        """True if the next call may make an attempt."""
        return self._num_to_skip == 0

    def skip(self) -> None:
        """Record a call without an attempt."""
        self._num_to_skip -= 1

    def observe(self, *, has_failed: bool) -> None:
        """Record the outcome of an attempt."""
        self._num_to_skip = self._pause if has_failed else 0
        self._pause = min(2 * self._pause, MAX_PAUSE) if has_failed else 1


class ReadHistory:
    """Record of the calls of a processor that used the values of logits that they were promised.

    Such a call costs one exchange of messages more than one that has its logits from the beginning. So some calls after
    it are made with logits.

    Attributes:
        never_promise: True if the class cannot be called before its logits exist.
        num_promised: calls that were promised their logits.
        num_read: those of them that used their values.
    """

    def __init__(self) -> None:
        self.never_promise = False
        self.num_promised = self.num_read = 0
        self._pause = CallPause()

    def may_promise(self) -> bool:
        """Return whether the next call should be promised its logits."""
        return not self.never_promise and self._pause.is_over

    def skip(self) -> None:
        """Record a call that had its logits from the beginning, because it should not be promised them."""
        if not self._pause.is_over:
            self._pause.skip()

    def observe(self, *, was_read: bool) -> None:
        """Record a call that was promised its logits."""
        self.num_promised += 1
        self.num_read += was_read
        self._pause.observe(has_failed=was_read)


class EarlyCall(GuardedRun):
    """A call of some rows that began before their logits exist.

    Args:
        group: the rows.
        run: the call; a fault if it could not begin.
        vocab_size: width of the logits.

    Attributes:
        has_forced: True if it is known to leave one token of a row.
    """

    def __init__(self, group: ProcessorGroup, run: Run | ProcessorFault, vocab_size: int) -> None:
        super().__init__(group, run)
        self.has_forced = False
        self._vocab_size = vocab_size
        self._row_of = {member: row for row, member in enumerate(group.members)}
        self._outcome: RunOutcome | None = None
        self._edited: Sequence[int] = ()
        self._edits: GroupEdits = ()
        self._is_row_wise = True

    def end_early(self) -> RunOutcome | None:
        """Take the answer. Return None if it has not come, or the call needs its logits."""
        if self._outcome is None and not self.needs_logits():
            self._outcome = self.finish(self._collect)
        return self._outcome

    def _collect(self, rows: Sequence[int], edits: GroupEdits) -> None:
        self._edited, self._edits = rows, edits
        self._is_row_wise = len(rows) == 1 or is_row_wise(edits, self._vocab_size)

    def take_outcome(self) -> RunOutcome | None:
        """Return the result of a call that has ended, the first time with its costs. Return None like `end_early`."""
        outcome = self.end_early()
        if outcome is not None:
            self._outcome = outcome._replace(charged=0.0, occupied=0.0)
        return outcome

    @property
    def has_ended(self) -> bool:
        """True if `end_early` has returned a result."""
        return self._outcome is not None

    def skip(self, member: ProcessorUse) -> float:
        """Take the answer for a row without its edits. Return the row's share of the seconds; 0 before it has ended."""
        if self._outcome is None:
            return 0.0
        seconds = self._outcome.seconds / len(self._row_of)
        self.group.observe_call(1, seconds, self._outcome.logits_use)
        member.add_printed(self._outcome.printed)
        return seconds

    def restrict(self, use: ProcessorUse, allowed: AllowedTokens) -> None:
        """Forbid what the call forbids in a row, or leave the row open."""
        is_short = num_positions(self._edits) <= _MAX_POSITIONS
        edits = self.edits_of([self._row_of[use]]) if self._outcome is not None and is_short else None
        found = None if edits is None else finite_tokens(edits, self._vocab_size)
        if found is None:
            allowed.leave_open()
            return
        finite, again = (each.nonzero()[0].tolist() for each in found)
        self.has_forced = self.has_forced or len(finite) == 1
        # Something else may have forbidden tokens before, which it makes possible again.
        if again and (len(finite) > 1 or again != finite):
            allowed.leave_open()
        elif len(finite) < self._vocab_size:
            allowed.keep_mask(mask_of(finite, self._vocab_size))

    def part(self, group: ProcessorGroup) -> Run:
        """Return the part of the call for some of its rows."""
        rows = [self._row_of[member] for member in group.members]
        if self._outcome is None and len(rows) == len(self._row_of):
            return self
        return GuardedRun(group, CallPart(self, rows))

    def apply_edits(self, logits: torch.Tensor) -> None:
        """Apply the edits of an ended call to all of its rows, in place."""
        apply_edits(logits, [(self._edited, self._edits)])

    def edits_of(self, rows: Sequence[int]) -> GroupEdits | None:
        """Return the edits of some rows of an ended call.

        Returns:
            None if a row has a fault, or takes values from others.
        """
        if list(rows) == list(self._edited):
            return self._edits
        if not self._is_row_wise or not set(rows) <= set(self._edited):
            return None
        numbers = [self._edited.index(row) for row in rows]
        return select_rows(self._edits, numbers, len(self._edited), self._vocab_size)


class CallPart:
    """Some rows of a call. Implements `Run`.

    Either the call has ended early: each part then takes the edits of its rows, unless these depend on others. Or the
    sequences of its other rows have ended.

    Args:
        call: the call.
        rows: its rows of the call.
    """

    def __init__(self, call: EarlyCall, rows: Sequence[int]) -> None:
        self._call = call
        self._rows = rows
        self._logits: torch.Tensor | None = None
        self._all_logits: torch.Tensor | None = None

    def needs_logits(self) -> bool:
        """Return whether logits are needed: also for an ended call whose rows take values from others."""
        outcome = self._call.end_early()
        return outcome is None or self._edits_of_rows(outcome) is None

    def provide(self, logits: torch.Tensor) -> None:
        """Give the call the logits of these rows. The rows that have ended get zeros."""
        all_logits = self._among_all(logits)
        if not self._call.has_ended:
            self._call.provide(all_logits)

    def wait(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds for the end of the call. Return whether it has ended."""
        return self._call.has_ended or self._call.wait(timeout)

    def lower_priority(self) -> None:
        """Continue the call at the lowest priority."""
        self._call.lower_priority()

    def defer(self, logits: torch.Tensor) -> None:
        """Continue the call after its step, which no longer waits for it."""
        self._call.defer(self._among_all(logits))

    def _among_all(self, logits: torch.Tensor) -> torch.Tensor:
        self._logits = logits
        self._all_logits = logits.new_zeros(len(self._call.group.rows), logits.shape[-1])
        self._all_logits[self._rows] = logits
        return self._all_logits

    def finish(self, collect: CollectEdits | None = None) -> RunOutcome:
        """Wait for the end of the call, and return the outcome of these rows, with their share of the seconds."""
        outcome = self._call.take_outcome() if self._call.has_ended else self._call.finish()
        assert outcome is not None
        if self._all_logits is None:
            self._collect(outcome, collect)
        else:
            assert self._logits is not None
            if self._call.has_ended:
                began = time.perf_counter()
                self._call.apply_edits(self._all_logits)
                outcome = outcome._replace(occupied=outcome.occupied + time.perf_counter() - began)
            self._logits.copy_(self._all_logits[self._rows])
        faults = {row: outcome.faults[each] for row, each in enumerate(self._rows) if each in outcome.faults}
        seconds = outcome.seconds * len(self._rows) / len(self._call.group.rows)
        return outcome._replace(seconds=seconds, faults=faults)

    def _edits_of_rows(self, outcome: RunOutcome) -> GroupEdits | None:
        """Return the edits of the rows without a fault; None if they take values from other rows."""
        edited = [row for row in self._rows if row not in outcome.faults]
        return self._call.edits_of(edited) if edited else ()

    def _collect(self, outcome: RunOutcome, collect: CollectEdits | None) -> None:
        edits = self._edits_of_rows(outcome)
        assert collect is not None
        assert edits is not None
        if edits:
            collect([row for row, each in enumerate(self._rows) if each not in outcome.faults], edits)


class EarlyCalls:
    """The early calls of a step. Engine thread only.

    Args:
        calls: knows how long steps wait.
        vocab_size: width of the logits.
    """

    def __init__(self, calls: DeferredCalls, vocab_size: int) -> None:
        self._deferred = calls
        self._vocab_size = vocab_size
        self._calls: dict[CallKey, EarlyCall] = {}
        self._open: list[EarlyCall] = []
        self._allowed: dict[CallKey, AllowedTokens] = {}
        self._forcing: dict[str, CallPause] = {}
        """Processors that force tokens at the moment: which of their calls are waited for before the forward pass."""
        self._wait_until: float | None = None

    def begin(self, stage: GroupStage) -> None:
        """Begin the calls of the first stage of a step."""
        self._deferred.begin_step()
        self._calls.clear()
        self._allowed.clear()
        self._wait_until = None
        for group in stage.groups:
            if not self._deferred.is_busy(group.processor.group_name):
                self._begin(group)

    def _begin(self, group: ProcessorGroup) -> EarlyCall | None:
        executor_group = group.executor_group
        run = None if isinstance(executor_group, LocalGroup) else attempt(group.processor, executor_group.promise)
        if run is None:
            return None
        call = EarlyCall(group, run, self._vocab_size)
        self._deferred.begun(group, call)
        self._calls |= dict.fromkeys(map(_key, group.members), call)
        self._open.append(call)
        return call

    @property
    def is_ahead(self) -> bool:
        """True if a processor may be busy with a call that belongs to a later token than the next one."""
        return bool(self._allowed) and bool(self._open)

    @property
    def rows(self) -> list[int]:
        """Rows whose calls have not ended."""
        return [row for call in self._open for row in call.group.rows]

    def abandon(self, kept: Collection[int] = ()) -> None:
        """End calls, because there will be no logits: all but those with a row of `kept`.

        Those that the step does not wait for end later, see `DeferredCalls`: their processors are busy until then.
        """
        ended = [call for call in self._open if not any(row in kept for row in call.group.rows)]
        self._calls = {key: call for key, call in self._calls.items() if kept and call not in ended}
        for call in ended:
            self._open.remove(call)
            logits = torch.zeros(len(call.group.rows), self._vocab_size)
            call.provide(logits)
            left = self._deferred.left(call.group)
            if left == math.inf or call.wait(left):
                outcome = call.finish()
                self._deferred.patience.charge(call.group.processor.tenant, outcome.occupied)
            else:
                call.defer(logits)
                self._deferred.add(DeferredCall(call, call.group, BEFORE_ALL, logits, [], [], lambda *_: {}))

    def is_busy(self, group_name: str) -> bool:
        """Return whether a processor cannot be called now, because an early call of it has not ended."""
        return bool(self._open) and any(call.group.processor.group_name == group_name for call in self._open)

    def split(self, stage: GroupStage) -> GroupStage:
        """Return a stage whose groups have one early call each, for all of their rows, or none."""
        if not self._calls:
            return stage
        groups = [part for group in stage.groups for part in self._parts(group)]
        return stage if len(groups) == len(stage.groups) else GroupStage(stage.key, groups)

    def _parts(self, group: ProcessorGroup) -> list[ProcessorGroup]:
        rows: defaultdict[EarlyCall | None, dict[int, int]] = defaultdict(dict)
        for row, member in zip(group.rows, group.members, strict=True):
            rows[self._calls.get(_key(member))][row] = row
        if len(rows) == 1:
            return [group]
        return [part for each in rows.values() if (part := group.select(each)) is not None]

    def take(self, group: ProcessorGroup) -> Run | None:
        """Return the early call of a group of `split`, or the part of it for these rows; None if there is none."""
        call = self._calls.get(_key(group.members[0])) if self._calls else None
        if call is None:
            return None
        for member in group.members:
            del self._calls[_key(member)]
        if call in self._open:
            self._open.remove(call)
        return call.part(group)

    def skip(self, member: ProcessorUse) -> float:
        """Take the answer for a row's next token, which is forced. Return the row's share of the call's seconds."""
        call = self._calls.pop(_key(member), None)
        return call.skip(member) if call is not None else 0.0

    def observe(self, group: ProcessorGroup, edits: GroupEdits) -> None:
        """Infer from the edits of a call whether its processor forces tokens at the moment."""
        name = group.processor.group_name
        if not may_forbid_most(edits, self._vocab_size):
            self._forcing.pop(name, None)
        elif name not in self._forcing:
            if len(self._forcing) >= _MAX_KNOWN:
                self._forcing.clear()
            self._forcing[name] = CallPause()

    def is_forcing(self, processor: LoadedProcessor) -> bool:
        """Return whether a processor forces tokens at the moment."""
        return processor.group_name in self._forcing

    def restrict(self, members: Mapping[ProcessorUse, AllowedTokens]) -> None:
        """Forbid the next tokens of some rows that their processors will forbid, where that is known early.

        Calls processors that force tokens at the moment for tokens that follow forced ones. Leaves all other rows
        open.

        Args:
            members: the allowed tokens of rows that have one shipped processor, which is the first in its stage.
        """
        ended = [call for call in self._calls_of(members) if self._is_awaited(call) and self._end(call)]
        for group in self._groups_ahead(members):
            name = group.processor.group_name
            call = None if self.is_busy(name) or self._deferred.is_busy(name) else self._begin(group)
            if call is not None and self._end(call):
                ended.append(call)
        for member, allowed in members.items():
            call = self._calls.get(_key(member))
            if call is not None and call.has_ended:
                began = time.perf_counter()
                if attempt(member.processor, partial(call.restrict, member, allowed)) is not None:
                    allowed.leave_open()
                self._deferred.patience.charge(member.processor.tenant, time.perf_counter() - began)
                self._allowed[_key(member)] = allowed
            else:
                allowed.leave_open()
        for call in ended:
            pause = self._forcing.get(call.group.processor.group_name)
            if pause is not None:
                pause.observe(has_failed=not call.has_forced)

    def _groups_ahead(self, members: Iterable[ProcessorUse]) -> list[ProcessorGroup]:
        """Return the groups of rows whose last token was forced, and which have no call for the next one."""
        groups: defaultdict[ProcessorGroup, dict[int, int]] = defaultdict(dict)
        for member in members:
            use, length = _key(member)
            before = use, length - 1
            allowed = self._allowed.get(before)
            is_forced = allowed is not None and allowed.single() == member.output_token_ids[-1]
            if is_forced and (use, length) not in self._calls and before in self._calls:
                group = self._calls[before].group
                row = group.row_of(use)
                groups[group][row] = row
        return [ahead for group, rows in groups.items() if (ahead := group.select(rows)) is not None]

    def _calls_of(self, members: Iterable[ProcessorUse]) -> list[EarlyCall]:
        """Return the calls of some rows that have not ended."""
        calls = {self._calls.get(_key(member)) for member in members}
        return [call for call in self._open if call in calls]

    def _is_awaited(self, call: EarlyCall) -> bool:
        """Return whether to wait for a call: its processor forces tokens at the moment."""
        name = call.group.processor.group_name
        pause = self._forcing.get(name)
        if pause is None or self._deferred.is_slow(name):
            return False
        if not pause.is_over:
            pause.skip()
            return False
        return True

    def _end(self, call: EarlyCall) -> bool:
        """Wait for a call for a short time. Return whether it has ended without its logits."""
        call.needs_logits()
        call.wait(self._seconds_left())
        outcome = call.take_outcome()
        if outcome is None:
            return False
        self._open.remove(call)
        self._deferred.patience.charge(call.group.processor.tenant, outcome.occupied)
        return True

    def _seconds_left(self) -> float:
        if not self._deferred.patience.is_limited:
            return math.inf
        now = time.perf_counter()
        self._wait_until = self._wait_until or now + MAX_WAIT
        return max(0.0, self._wait_until - now)


def _key(member: ProcessorUse) -> CallKey:
    return member, len(member.output_token_ids)


def may_forbid_most(edits: GroupEdits, vocab_size: int) -> bool:
    """Return whether edits probably set all but a few logits of a row to -inf. A cheap heuristic."""
    return any(
        (isinstance(edit, Fill | PutMask) and edit.value == -np.inf)
        or isinstance(edit, PutRows)
        or (isinstance(edit, EditRows) and (isinstance(edit.operand, np.ndarray) or not math.isfinite(edit.operand)))
        or (isinstance(edit, Put) and len(edit.positions) >= vocab_size - 1)
        for edit in edits
    )
