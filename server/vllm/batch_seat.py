"""The seat in vLLM's persistent batch, for its model runner V1.

Assumptions:
* vLLM calls `update_state` once a step, and `apply` at most once after it, with the logits of all rows.
* In `apply` the output tokens are known: vLLM fills in the last ones just before.
* In `begin`, if it is called, they are known already, and so are the rows whose token is discarded.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from logitship.sampler.batch_processors.logits_processors import BatchRows
from logitship.server.runtime.ranks import GroupRanks
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import INTERNAL_ERROR, TrackedRequest

from .batch_requests import BatchRequests, converted
from .extra_args import has_processors
from .row_deferral import RowDeferral
from .settings import logger
from .vllm_seat import HOLDS_EMBEDDINGS, VllmSeat

_PLACEHOLDER = -1
"""vLLM's value for a token that was sampled and is not known yet."""


@dataclass(eq=False)
class _BatchRequest:
    """A request in the batch, or preempted.

    Attributes:
        tracked: the request.
        record: the model runner's own record; None if it could not be found.
        num_prompt_tokens: length of the prompt. It changes when a client sends the prompt in pieces: each piece is a
            sequence of its own.
        live: vLLM's list of its output tokens. It may end in placeholders, and vLLM may replace it.
    """

    tracked: TrackedRequest
    record: Any
    num_prompt_tokens: int
    live: list[int]

    def new_tokens(self) -> list[int]:
        """Return the output tokens since the last step. The request ends if they cannot be known."""
        known = len(self.tracked.output_token_ids)
        new = self.live[known:]
        if len(self.live) < known:
            self.tracked.fail("vLLM took back tokens of its output, which its processors cannot follow")
        elif _PLACEHOLDER in new:
            self.tracked.fail(
                "vLLM does not say which tokens were sampled; start it with --logits-processors, see docs/vllm.md"
            )
        return new


class BatchSeat(VllmSeat):
    """`VllmSeat` for model runner V1.

    Args:
        worker: this process.
        requests: looks up requests in the model runner.
        deferral: lets rows sit steps out.
        max_length: see `VllmSeat`.
    """

    def __init__(
        self,
        worker: EngineWorker[GroupRanks],
        requests: BatchRequests,
        deferral: RowDeferral,
        max_length: int = sys.maxsize,
    ) -> None:
        super().__init__(worker, max_length)
        self._runner_requests = requests
        self._deferral = deferral
        self._deferred: set[str] = set()
        """Ids of requests that sit out."""
        self._requests: dict[str, _BatchRequest] = {}
        self._rows: BatchRows[_BatchRequest] = BatchRows(self._add)

    def update_state(self, update: Any) -> None:
        """Apply vLLM's `BatchUpdate`; None: the rows are the same as in the last step."""
        is_empty = not self._rows and not self._requests
        if is_empty and not (update and any(has_processors(params) for _, params, _, _ in update.added)):
            return
        with self._runtime.or_fail(each.tracked for each in self._requests.values()):
            self._runtime.begin_step()
        # Also if that failed: faults of earlier rows would end the requests that have these rows now.
        with self._runtime.or_fail(each.tracked for each in self._requests.values()):
            if update is not None:
                self._rows.update(converted(update))
            present = set(self._rows.values())
            absent = [each for each in self._requests.values() if each not in present]
            self._drop([each for each in absent if not self._runner_requests.is_unfinished(each.record)])
            for rid in [each for each in self._deferred if not self._runtime.is_busy(self._requests[each].tracked)]:
                self._deferred.remove(rid)
                self._deferral.resume(rid)

    def begin(self) -> None:
        """Begin calls before their logits exist. Optional, after `update_state`."""
        if not self._rows or not self._worker.ranks.is_first:
            return
        with self._runtime.or_fail(each.tracked for each in self._rows.values()):
            discarded = self._runner_requests.discarded_rows_ahead(self._rows)
            if discarded is not None:
                self._runtime.begin(self._take_new_tokens(self._rows.keys() - discarded))

    def apply(self, logits: torch.Tensor) -> None:
        """Run the processors, in place.

        Args:
            logits: [rows, vocab].
        """
        if not self._rows:
            return
        discarded: set[int] = set()
        rows = {row: each.tracked for row, each in self._rows.items()}
        with self._runtime.or_fail(rows.values()):
            discarded = self._runner_requests.discarded_rows(len(logits))
        sampled = rows.keys() - discarded
        if not sampled:
            return
        with self._runtime.or_fail(rows.values()):
            self._take_new_tokens(sampled)
        self._run(logits, {row: rows[row] for row in sorted(sampled)}, len(logits) + len(self._deferred))

    def defer(self, late: Mapping[int, TrackedRequest]) -> Collection[int]:
        """See `EngineSeat.defer`.

        vLLM would not go on forcing the end of a thinking that has reached its budget.
        """
        deferred = set()
        for row, request in late.items():
            has_budget = getattr(request.record, "thinking_token_budget", None) is not None
            if not has_budget and self._deferral.defer(row):
                self._deferred.add(request.rid)
                deferred.add(row)
        return deferred

    def _take_new_tokens(self, rows: Iterable[int]) -> dict[int, TrackedRequest]:
        """Bring the histories of some rows up to date, and return the rows' requests."""
        requests = {row: self._rows[row] for row in sorted(rows)}
        for request in requests.values():
            self._append(request.tracked, request.new_tokens())
        return {row: request.tracked for row, request in requests.items()}

    def _add(self, params: Any, prompt_token_ids: list[int] | None, live: list[int]) -> _BatchRequest | None:
        """Return the request that was added to the batch; None if it has no processors.

        Nothing is raised: the rows after it would not be followed, and it would run without its processors.
        """
        if not has_processors(params):
            return None
        try:
            return self._find_or_track(params, live)
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship cannot follow a request with processors: it ends")
            unknown = _BatchRequest(self._track("(unknown)", params, []), None, 0, live)
            unknown.tracked.fail(INTERNAL_ERROR)
            return unknown

    def _find_or_track(self, params: Any, live: list[int]) -> _BatchRequest:
        """Return a preempted request that resumes, else a new one."""
        record = self._runner_requests.request_of(live)
        known = self._requests.get(record.req_id)
        if known is not None and known.record is record and known.num_prompt_tokens == record.num_prompt_tokens:
            known.live = live
            return known
        if known is not None:
            self._drop([known])
        tracked = self._track(record.req_id, params, record.prompt_token_ids or [], record.num_prompt_tokens)
        request = self._requests[record.req_id] = _BatchRequest(tracked, record, record.num_prompt_tokens, live)
        if record.prompt_token_ids is None or not all(record.prompt_is_token_ids or ()):
            tracked.fail(HOLDS_EMBEDDINGS)
        else:
            self._runtime.load(tracked)
        return request

    def _drop(self, requests: list[_BatchRequest]) -> None:
        """Drop finished requests and release their processors."""
        for request in requests:
            del self._requests[request.tracked.rid]
            self._deferred.discard(request.tracked.rid)
        self._runtime.release([request.tracked for request in requests])
