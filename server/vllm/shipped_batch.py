"""The shipped processors in vLLM's persistent batch. Model runner V1 drives it itself, V2 through `SlotBatch`.

`ShippedProcessors` calls the processors. `ShippedBatch` decides which rows take part in a step, and how a request ends.

Assumptions:
* vLLM calls `update_state` once a step, and `apply` at most once after it, with the logits of all rows.
* In `apply` the output tokens are known: vLLM fills in the last ones just before.
* In `begin`, if it is called, they are known already, and so are the rows whose token is discarded.
* Draft tokens come with `apply`. vLLM accepts none behind a token that its processors forbid.

Guarantees:
* A processor is called once for each token of its request, whatever else vLLM computes: not for a chunk of a prompt,
  not after the end, and never skipped. Its `state` lives until the request ends, also while the request is preempted.
* Calls of `begin` get the logits of the `apply` that follows. If none does, or vLLM samples other rows than it planned,
  their requests end: another call would be the second one for the same token.
* The history is exact in each call. Where it cannot be, the request ends instead.
* Behind a draft token, a processor is called with a copy of the sequence's state, which is kept only if vLLM accepts
  the token. So for each token of an output, a processor is called exactly once.
* Nothing is raised: an exception would stop vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import non_finite_fault
from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality
from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.sampler.processors.processor_groups import ProcessorUse, uses_of
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors

from .extra_args import has_processors
from .log import logger
from .runner_interface import Ranks, RunnerRequests
from .tracked_request import HOLDS_EMBEDDINGS, INTERNAL_ERROR, TrackedRequest, failed_request, track
from .vllm_processors import VllmProcessors

Drafts: TypeAlias = Mapping[int, Sequence[tuple[int, int]]]
"""Draft tokens of each row in order, each with the row whose logits follow it."""

_NOT_SAMPLED = "vLLM did not sample the token that its processors were called for"


class ShippedBatch:
    """Runs the processors of the batch's requests, each on its own rows.

    Args:
        model: the model.
        device: the device of the logits.
        processors: loads the requests' processors; None on ranks that run none.
        runner_requests: looks up requests in the model runner.
        fault_token: the token that ends a request whose processor failed.
        ranks: the processes that sample the same tokens.
    """

    def __init__(
        self,
        model: ModelView,
        device: torch.device,
        processors: VllmProcessors | None,
        runner_requests: RunnerRequests,
        fault_token: int,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._processors = processors
        self._runner_requests = runner_requests
        self._fault_token = fault_token
        self._ranks = ranks
        self._kept: set[ProcessorUse] = set()
        self._shipped = ShippedProcessors(None, device, False, model=model, is_kept=self._kept.__contains__)
        self._requests: dict[str, TrackedRequest] = {}
        self._rows: BatchRows[TrackedRequest] = BatchRows(self._add)
        self._running: dict[int, TrackedRequest] = {}
        self._planned: dict[int, tuple[TrackedRequest, int]] = {}

    def update_state(self, update: Any) -> None:
        """Apply vLLM's `BatchUpdate`; None: the rows are the same as in the last step."""
        is_empty = not self._rows and not self._requests
        if is_empty and not (update and any(has_processors(params) for _, params, _, _ in update.added)):
            return
        try:
            self._end_begun_calls()
            if update is not None:
                self._rows.update(_converted(update))
            self._drop_finished()
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship cannot follow vLLM's batch: all requests with processors end")
            self._fail_all(self._requests.values())

    def begin(self) -> None:
        """Begin calls before their logits exist. Optional, after `update_state`."""
        if not self._rows or not self._ranks.is_first:
            return
        try:
            discarded = self._runner_requests.discarded_rows_ahead(self._rows)
            if discarded is not None:
                running = self._take_running(sorted(self._rows.keys() - discarded))
                self._shipped.update_state(self._difference(running))
                self._planned = _with_lengths(running)
                self._shipped.begin()
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship failed before a step: all requests with processors end")
            self._fail_all(self._rows.values())

    def end(self, req_id: str, reason: str) -> None:
        """End a request at its next step, for a reason that is not its processor's fault."""
        request = self._requests.get(req_id)
        if request is not None:
            request.fail(reason)

    def apply(self, logits: torch.Tensor, drafts: Drafts = MappingProxyType({})) -> None:
        """Run the processors, in place.

        Args:
            logits: float32 [rows, vocab].
            drafts: rows of draft tokens. They are not rows of `update_state`.
        """
        if not self._rows:
            return
        rows = self._sampled_rows(len(logits))
        if not rows:
            return
        if self._ranks.is_first:
            try:
                self._run(logits, rows)
                self._run_behind_drafts(logits, drafts)
            except Exception:  # noqa: BLE001  # boundary: vLLM
                logger.exception("logitship failed in a step: all requests with processors end")
                self._fail_all(self._rows[row] for row in rows)
            self._force_fault_tokens(logits, rows, drafts)
        self._ranks.broadcast(logits, [*rows, *(row for each in drafts.values() for row, _ in each)])

    def _sampled_rows(self, num_rows: int) -> list[int]:
        try:
            return sorted(set(self._rows) - self._runner_requests.discarded_rows(num_rows))
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship cannot tell which prompts are computed: all requests with processors end")
            self._fail_all(self._rows.values())
            return sorted(self._rows)

    def _run(self, logits: torch.Tensor, rows: list[int]) -> None:
        running = self._take_running(rows)
        if _with_lengths(running) != self._planned:
            self._end_begun_calls()
            running = {row: request for row, request in running.items() if request.runs}
        self._edit(logits, running)

    def _run_behind_drafts(self, logits: torch.Tensor, drafts: Drafts) -> None:
        """Run the processors on the rows behind draft tokens, as if these were accepted: one depth at a time."""
        before = {first: first for first in drafts}
        for depth in range(max(map(len, drafts.values()), default=0)):
            going_on = [first for first in before if depth < len(drafts[first]) and self._rows[first].last.runs]
            tokens = [drafts[first][depth][1] for first in going_on]
            forbidden = logits[[before[first] for first in going_on], tokens].isneginf().tolist()
            before, running = {}, {}
            for first, token, is_forbidden in zip(going_on, tokens, forbidden, strict=True):
                request = self._rows[first]
                if not (is_forbidden and request.may_stop_early):
                    draft = request.add_draft(token)
                    if draft.params is not None:
                        self._kept.update(uses_of(draft.params))
                    if draft.runs:
                        before[first] = row = drafts[first][depth][0]
                        running[row] = draft
            if not running:
                return
            self._edit(logits, running)

    def _edit(self, logits: torch.Tensor, running: dict[int, TrackedRequest]) -> None:
        """Call the processors of some requests, each on its row."""
        self._shipped.update_state(self._difference(running))
        if not running:
            return
        # Forbidden before the processors run: sampled by chance, it would be taken for a fault.
        logits[list(running), self._fault_token] = -torch.inf
        hard = [row for row, request in running.items() if request.hard_masks]
        forbidden = logits[hard].isneginf()
        self._shipped.apply(logits)
        for row, fault in self._shipped.take_faults():
            running[row].fault = fault
        if hard:
            logits[hard] = logits[hard].masked_fill(forbidden, -torch.inf)
        self._forbid_fault_token(logits, running, hard)

    def _take_running(self, rows: list[int]) -> dict[int, TrackedRequest]:
        """Bring the histories of some rows up to date, and return the requests that run."""
        for row in rows:
            self._close(self._rows[row].take_new_tokens())
        return {row: self._rows[row] for row in rows if self._rows[row].runs}

    def _end_begun_calls(self) -> None:
        """End the calls of `begin` whose logits will not come, and their requests."""
        for row in self._shipped.begun_rows:
            self._running[row].fail(_NOT_SAMPLED)
        self._shipped.abandon()

    def _forbid_fault_token(self, logits: torch.Tensor, running: dict[int, TrackedRequest], hard: list[int]) -> None:
        """Forbid the fault token again, and end the requests whose processors left no other allowed token."""
        rows = [row for row in running if running[row].fault is None]
        given = logits[rows, self._fault_token].isneginf().logical_not().tolist()
        logits[rows, self._fault_token] = -torch.inf
        for row in {*hard, *(row for row, is_given in zip(rows, given, strict=True) if is_given)}:
            request = running[row]
            if request.fault is None and not logits[row].amax().isfinite():
                assert request.params is not None
                last = uses_of(request.params)[-1].processor
                before = (*request.hard_masks, f"the reserved token {self._fault_token}")
                request.fault = non_finite_fault(logits[row], name=last.name, digest=last.digest, before=before)

    def _force_fault_tokens(self, logits: torch.Tensor, rows: list[int], drafts: Drafts) -> None:
        for row in rows:
            request = self._rows[row]
            failed = next((each for each in (request, *request.continuations) if each.fault is not None), None)
            if failed is None:
                continue
            num_drafts = len(failed.output_token_ids) - len(request.output_token_ids)
            its_rows = [row, *(row for row, _ in drafts.get(row, ()))][num_drafts:]
            logits[its_rows] = -torch.inf
            logits[its_rows, self._fault_token] = 0.0
            assert failed.fault is not None
            self._report(failed, failed.fault)

    def _report(self, request: TrackedRequest, fault: ProcessorFault) -> None:
        """Log a fault once: vLLM cannot send it to the client."""
        if request.reported:
            return
        request.reported = True
        logger.error(
            "request %s ends with stop_reason %d%s: %s%s",
            request.rid,
            self._fault_token,
            ", if vLLM accepts its draft tokens" if request.is_draft else "",
            fault,
            f"\n{fault.traceback}" if fault.traceback else "",
        )

    def _difference(self, running: dict[int, TrackedRequest]) -> BatchUpdate | None:
        """Return what changed since the last step in the rows that run; a move is a removal and an addition."""
        removed = [row for row in self._running if row not in running]
        new = [(row, request) for row, request in running.items() if self._running.get(row) is not request]
        self._running = running
        if not removed and not new:
            return None
        added = [
            (row, request.params, request.record.prompt_token_ids, request.output_token_ids)
            for row, request in new
            if request.params is not None
        ]
        return BatchUpdate(max(running, default=-1) + 1, removed, added, [])

    def _add(self, params: Any, prompt_token_ids: list[int] | None, live: list[int]) -> TrackedRequest | None:
        """Return the request that was added to the batch; None if it has no processors.

        Nothing is raised: the rows after it would not be followed, and it would run without its processors.
        """
        if not has_processors(params):
            return None
        try:
            return self._find_or_track(params, live)
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship cannot follow a request with processors: it ends")
            return failed_request(live)

    def _find_or_track(self, params: Any, live: list[int]) -> TrackedRequest:
        """Return a preempted request that resumes, else a new one."""
        record = self._runner_requests.request_of(live)
        known = self._requests.get(record.req_id)
        if known is not None and known.record is record and known.num_prompt_tokens == record.num_prompt_tokens:
            known.live = live
            return known
        if known is not None:
            self._drop([known])
        request = self._requests[record.req_id] = track(record, params, live, self._model.eos_token_ids)
        if self._processors is not None:
            self._load(request, params, self._processors)
        return request

    def _load(self, request: TrackedRequest, params: Any, processors: VllmProcessors) -> None:
        record = request.record
        if record.prompt_token_ids is None or not all(record.prompt_is_token_ids or ()):
            request.fail(HOLDS_EMBEDDINGS)
            return
        try:
            request.params = request.loaded = processors.load(params, request.rid)
            self._kept.update(uses_of(request.params))
        except ValueError as error:
            request.fail(str(error))
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("the processors of request %s cannot be loaded", request.rid)
            request.fail(INTERNAL_ERROR)

    def _drop_finished(self) -> None:
        present = set(self._rows.values())
        absent = [request for request in self._requests.values() if request not in present]
        finished = [request for request in absent if not self._runner_requests.is_unfinished(request.record)]
        if finished:
            self._drop(finished)

    def _drop(self, requests: list[TrackedRequest]) -> None:
        """Drop finished requests and release their processors."""
        states = {state for request in requests for state in (request, *request.continuations)}
        rows = [row for row, request in self._running.items() if request in states]
        for row in rows:
            del self._running[row]
        self._close(use for state in states if state.params is not None for use in uses_of(state.params))
        self._shipped.update_state(BatchUpdate(len(self._running), rows, [], []))
        self._shipped.close_absent()  # preempted requests had no row
        for request in requests:
            del self._requests[request.rid]
        if self._processors is not None:
            for request in requests:
                if request.loaded is not None:
                    self._processors.release(request.loaded)

    def _close(self, uses: Iterable[ProcessorUse]) -> None:
        """Let uses end that have no next call: with the next update of the batch."""
        for use in uses:
            self._kept.discard(use)
            use.drop_fork()

    def _fail_all(self, requests: Iterable[TrackedRequest]) -> None:
        for request in requests:
            request.fail(INTERNAL_ERROR)


def _with_lengths(running: dict[int, TrackedRequest]) -> dict[int, tuple[TrackedRequest, int]]:
    """Return requests with the lengths of their outputs."""
    return {row: (request, len(request.output_token_ids)) for row, request in running.items()}


def _converted(update: Any) -> BatchUpdate:
    """Convert vLLM's `BatchUpdate` to ours: they differ in the class of the directions only."""
    moved = [(source, target, MoveDirectionality[direction.name]) for source, target, direction in update.moved]
    return BatchUpdate(update.batch_size, update.removed, update.added, moved)
