"""The shipped processors in vLLM's persistent batch, for its model runner V1.

`ShippedProcessors` does the work. What is here decides which rows it gets to see in a step, and how a request ends.

Assumptions:
* vLLM calls `update_state` once a step, and `apply` at most once after it, with the logits of all rows.
* In `apply` the output tokens are known: the last ones are filled in just before.

Guarantees:
* A processor is called once for each token of its request, whatever vLLM computes besides: no call for a chunk of a
  prompt, none after the end, and none is missing. Its `state` lives until the request ends, also while the request is
  put aside.
* The history is exact at each call. Where it cannot be, the request ends instead.
* Nothing is raised: an exception would be the end of vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.batch.batch_rows import BatchRows
from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality
from logitship.sampler.processors.author_code import non_finite_fault
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ProcessorUse, ShippedProcessors

from .extra_args import has_processors
from .log import logger
from .plugin_processors import PluginProcessors
from .runner_interface import Ranks, RunnerRequests
from .tracked_request import INTERNAL_ERROR, TrackedRequest, carrying, failed


class ShippedBatch:
    """See the module's text.

    Args:
        processors: loads what requests carry; None on ranks that run none.
        fault_token: the token that ends a request whose processor failed.
    """

    def __init__(
        self,
        model: ModelView,
        device: torch.device,
        processors: PluginProcessors | None,
        engine: RunnerRequests,
        fault_token: int,
        ranks: Ranks,
    ) -> None:
        self._model = model
        self._processors = processors
        self._engine = engine
        self._fault_token = fault_token
        self._ranks = ranks
        self._kept: set[ProcessorUse] = set()
        self._shipped = ShippedProcessors(None, device, False, model=model, is_kept=self._kept.__contains__)
        self._requests: dict[str, TrackedRequest] = {}
        self._rows: BatchRows[TrackedRequest] = BatchRows(self._came)
        self._running: dict[int, TrackedRequest] = {}

    def update_state(self, update: Any) -> None:
        """Follow the batch, with vLLM's `BatchUpdate`."""
        nobody_is_here = not self._rows and not self._requests
        if nobody_is_here and not (update and any(has_processors(params) for _, params, _, _ in update.added)):
            return
        try:
            if update is not None:
                self._rows.update(_converted(update))
            self._forget_finished()
        except Exception:  # noqa: BLE001  # whatever it is, vLLM must not see it
            logger.exception("logitship cannot follow vLLM's batch: all requests with processors end")
            self._fail_all(self._requests.values())

    def end(self, req_id: str, reason: str) -> None:
        """End a request at its next step, for a reason that is not a processor's."""
        request = self._requests.get(req_id)
        if request is not None:
            request.fail(reason)

    def apply(self, logits: torch.Tensor) -> None:
        """Run the processors, in place.

        Args:
            logits: float32 [rows, vocab].
        """
        if not self._rows:
            return
        rows = self._rows_with_a_token(len(logits))
        if not rows:
            return
        if self._ranks.is_first:
            try:
                self._run(logits, rows)
            except Exception:  # noqa: BLE001  # the same
                logger.exception("logitship failed in a step: all requests with processors end")
                self._fail_all(self._rows[row] for row in rows)
            self._end_faulty(logits, rows)
        self._ranks.share(logits, rows)

    def _rows_with_a_token(self, num_rows: int) -> list[int]:
        try:
            return sorted(set(self._rows) - self._engine.without_a_token(num_rows))
        except Exception:  # noqa: BLE001  # the same
            logger.exception("logitship cannot tell whose prompts are computed: all requests with processors end")
            self._fail_all(self._rows.values())
            return sorted(self._rows)

    def _run(self, logits: torch.Tensor, rows: list[int]) -> None:
        for row in rows:
            self._rows[row].follow()
        running = {row: self._rows[row] for row in rows if self._rows[row].runs}
        self._shipped.update_state(self._difference(running, len(logits)))
        if not running:
            return
        # Nobody draws it by chance: what it would mean is a fault.
        logits[list(running), self._fault_token] = -torch.inf
        hard = [row for row, request in running.items() if request.obeys]
        forbidden = logits[hard].isneginf()
        self._shipped.apply(logits)
        for row, fault in self._shipped.take_faults():
            running[row].fault = fault
        if hard:
            logits[hard] = logits[hard].masked_fill(forbidden, -torch.inf)
        self._forbid_fault_token(logits, running, hard)

    def _forbid_fault_token(self, logits: torch.Tensor, running: dict[int, TrackedRequest], hard: list[int]) -> None:
        """Take away what processors may not give, and find the rows that have nothing left then."""
        rows = [row for row in running if running[row].fault is None]
        given = logits[rows, self._fault_token].isneginf().logical_not().tolist()
        logits[rows, self._fault_token] = -torch.inf
        for row in {*hard, *(row for row, is_given in zip(rows, given, strict=True) if is_given)}:
            request = running[row]
            if request.fault is None and not logits[row].amax().isfinite():
                assert request.params is not None
                last = request.params.processors[-1].processor
                before = (*request.obeys, f"the reserved token {self._fault_token}")
                request.fault = non_finite_fault(logits[row], name=last.name, digest=last.digest, before=before)

    def _end_faulty(self, logits: torch.Tensor, rows: list[int]) -> None:
        for row in rows:
            request = self._rows[row]
            if request.fault is not None:
                logits[row] = -torch.inf
                logits[row, self._fault_token] = 0.0
                self._report(request, request.fault)

    def _report(self, request: TrackedRequest, fault: ProcessorFault) -> None:
        """Tell the operator, once: vLLM has no way to tell the client."""
        if request.reported:
            return
        request.reported = True
        logger.error(
            "request %s ends with stop_reason %d: %s%s",
            request.rid,
            self._fault_token,
            fault,
            f"\n{fault.traceback}" if fault.traceback else "",
        )

    def _difference(self, running: dict[int, TrackedRequest], num_rows: int) -> BatchUpdate | None:
        """What changed since the last step in the rows whose processors run; a move is a leaving and a coming."""
        removed = [row for row in self._running if row not in running]
        came = [(row, request) for row, request in running.items() if self._running.get(row) is not request]
        self._running = running
        if not removed and not came:
            return None
        added = [
            (row, request.params, request.record.prompt_token_ids, request.output_token_ids)
            for row, request in came
            if request.params is not None
        ]
        return BatchUpdate(num_rows, removed, added, [])

    def _came(self, params: Any, prompt_token_ids: list[int] | None, live: list[int]) -> TrackedRequest | None:
        """The request that got a row; None if it carries nothing.

        Nothing is raised: the rows behind it would not be followed, and it would run without its processors.
        """
        if not has_processors(params):
            return None
        try:
            return self._entered(params, live)
        except Exception:  # noqa: BLE001  # the same
            logger.exception("logitship cannot follow a request with processors: it ends")
            return failed(live)

    def _entered(self, params: Any, live: list[int]) -> TrackedRequest:
        """A new request, or one that was put aside."""
        record = self._engine.request_of(live)
        known = self._requests.get(record.req_id)
        if known is not None and known.record is record and known.num_prompt_tokens == record.num_prompt_tokens:
            known.live = live
            return known
        if known is not None:
            self._forget([known])
        request = self._requests[record.req_id] = carrying(record, params, live, self._model.eos_token_ids)
        if self._processors is not None:
            self._load(request, params, self._processors)
        return request

    def _load(self, request: TrackedRequest, params: Any, processors: PluginProcessors) -> None:
        record = request.record
        if record.prompt_token_ids is None or not all(record.prompt_is_token_ids or ()):
            request.fail("its prompt holds embeddings, so that processors cannot know it")
            return
        try:
            request.params = processors.load(params, request.rid)
            self._kept.update(request.params.processors)
        except ValueError as error:
            request.fail(str(error))
        except Exception:  # noqa: BLE001  # whatever it is, vLLM must not see it
            logger.exception("the processors of request %s cannot be loaded", request.rid)
            request.fail(INTERNAL_ERROR)

    def _forget_finished(self) -> None:
        present = set(self._rows.values())
        absent = [request for request in self._requests.values() if request not in present]
        finished = [request for request in absent if not self._engine.is_unfinished(request.record)]
        if finished:
            self._forget(finished)

    def _forget(self, requests: list[TrackedRequest]) -> None:
        """Let go of requests that are finished, and of their processors."""
        rows = [row for row, request in self._running.items() if request in requests]
        for row in rows:
            del self._running[row]
        params = [request.params for request in requests if request.params is not None]
        self._kept.difference_update(use for each in params for use in each.processors)
        self._shipped.update_state(BatchUpdate(len(self._running), rows, [], []))
        self._shipped.close_those_gone()  # those that were put aside had no row
        for request in requests:
            del self._requests[request.rid]
        if self._processors is not None:
            for each in params:
                self._processors.release(each)

    def _fail_all(self, requests: Iterable[TrackedRequest]) -> None:
        for request in requests:
            request.fail(INTERNAL_ERROR)


def _converted(update: Any) -> BatchUpdate:
    """vLLM's `BatchUpdate` as ours: it is the same, but for the class of the directions."""
    moved = [(source, target, MoveDirectionality[direction.name]) for source, target, direction in update.moved]
    return BatchUpdate(update.batch_size, update.removed, update.added, moved)
