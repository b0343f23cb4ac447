"""Calls the processors of an engine's requests: one state machine for all engines.

`ShippedProcessors` calls the processors. `RequestRuntime` decides for which rows of a step, loads and releases them,
and ends a request on a fault. An adapter, which takes the `EngineSeat`, tells it the requests of each step.

Guarantees:
* A processor is called once for each token of its request, whatever else the engine computes: not after the end, and
  not again for a token that the engine drops. Its `state` lives until the request ends.
* Calls of `begin` get the logits of the `apply` that follows. If none does, or if the engine samples another token,
  their requests end: another call would be the second one for the same token.
* Behind a draft token, a processor is called with a copy of the request's state, which is kept only if the engine
  accepts the token. So for each token of an output, a processor is called exactly once.
* A step waits for processors as long as their `Allowances` last. Then their requests sit out until the calls have
  ended, if the engine can leave them out of steps. Otherwise they end.
* Code of requests that runs in this process leaves the random numbers of the engine as they were.
* Nothing is raised inside of `or_fail`: an exception would stop the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.shipped_processors import ShippedProcessors, observe_nothing

from .allowances import Allowances
from .draft_tree import DraftTree
from .ranks import own_random_numbers
from .seat import EngineSeat, EngineWorker, Ranks
from .tracked_request import INTERNAL_ERROR, TrackedRequest

MAX_LOADING = 30.0
"""Seconds of a step after which it loads no more classes. Each may take `SANDBOX_LOAD_TIMEOUT`, and all requests wait;
SGLang ends itself if a step takes 300 s."""
_NOT_LOADED = "its class is not loaded, because the classes of other requests took its place or its time; try again"

_Rows = Mapping[int, TrackedRequest]


class RequestRuntime:
    """Runs the processors of the batch's requests, each on its own rows. See the module.

    Args:
        seat: the engine.
        worker: this process.

    Attributes:
        called: the requests whose processors were called for their next token in the last `apply`, by row.
        behind_drafts: the states of requests behind draft tokens in the last `apply`, by row.
        edited: the rows that the last `apply` may have changed.
    """

    def __init__(self, seat: EngineSeat, worker: EngineWorker[Ranks]) -> None:
        self.called: dict[int, TrackedRequest] = {}
        self.behind_drafts: dict[int, TrackedRequest] = {}
        self.edited: list[int] = []
        self._seat = seat
        self._ranks = worker.ranks
        self._max_rows = worker.max_rows
        self._processors = worker.processors
        self._logger = worker.logger
        self._audit_log = worker.audit_log
        self._runs_code_here = worker.settings.processor_isolation == "none"
        self._allowances = Allowances(worker.settings.step_share)
        self._share_setting = f"{worker.settings.prefix}STEP_SHARE"
        if worker.processors is not None:
            worker.processors.start_metrics(worker.logger, self._allowances)
        self._metrics = None if worker.processors is None else worker.processors.metrics
        self._kept: set[ProcessorUse] = set()
        self._shipped = ShippedProcessors(
            None,
            torch.device("cpu"),
            False,
            model=worker.model,
            is_kept=self._kept.__contains__,
            on_call=observe_nothing if self._metrics is None else self._metrics.call_observer,
            deferred=self._allowances,
        )
        self._running: dict[int, TrackedRequest] = {}
        self._planned: dict[int, tuple[TrackedRequest, int]] = {}
        self._loads_until: float | None = None
        self._loads_outside = False

    @contextmanager
    def or_fail(self, requests: Iterable[TrackedRequest]) -> Iterator[None]:
        """Run a part of a step. An error of the plugin ends the requests, and is not raised."""
        try:
            with own_random_numbers(self._ranks.size if self._runs_code_here else 1):
                yield
        except Exception:  # boundary: other engine
            self._logger.exception("logitship failed in a step: all requests with processors end")
            for request in [*requests]:
                request.fail(INTERNAL_ERROR)

    def begin_step(self) -> None:
        """Begin a step, before its requests are loaded. Calls of the last one that got no logits end."""
        self._loads_until = None
        self._end_begun_calls()
        self._allowances.collect()

    def load(self, request: TrackedRequest) -> None:
        """Load the processors of a new request.

        It ends instead if that would take time, and requests wait outside of the batch (`must_wait`) or the step has
        loaded for long enough.
        """
        if self._processors is None:
            return
        self._loads_until = self._loads_until or time.monotonic() + MAX_LOADING
        try:
            requested = request.requested = self._seat.processors_of(request)
            must_not_load = self._loads_outside or time.monotonic() >= self._loads_until
            if must_not_load and self._processors.is_loading(requested, request.tenant):
                raise ValueError(_NOT_LOADED)
            uses = self._processors.load(requested, request.rid, request.tenant)
            try:
                request.params = self._seat.sampling_params_of(request, uses)
            except BaseException:  # cleanup, then re-raised
                self._processors.release(uses)
                raise
            self._kept.update(uses)
        except ValueError as error:
            request.fail(str(error))
        except Exception:  # boundary: other engine
            self._logger.exception("the processors of request %s cannot be loaded", request.rid)
            request.fail(INTERNAL_ERROR)

    def must_wait(self, request: TrackedRequest) -> bool:
        """Begin to load the processors of a new request, and return whether it is to wait outside of the batch.

        A step with it would wait for the load, or one of its classes was too slow a moment ago. To be asked again until
        it returns False.
        """
        if self._processors is None:
            return False
        self._loads_outside = True
        try:
            requested = self._seat.processors_of(request)
        except ValueError:
            return False  # `load` ends it
        is_loading = self._processors.is_loading(requested, request.tenant)
        return is_loading or self._are_paused(self._processors.group_names(requested, request.tenant))

    def still_wait(self, names: Sequence[str]) -> bool:
        """Return whether requests with these processors still wait. If not, `must_wait` is to be asked again.

        Args:
            names: as `PluginProcessors.group_names` returns them.
        """
        return self._processors is not None and (self._processors.has_begun(names) or self._are_paused(names))

    def _are_paused(self, names: Iterable[str]) -> bool:
        return any(self._allowances.is_paused(name) for name in names)

    def begin(self, rows: _Rows) -> None:
        """Begin calls before their logits exist. Optional, before `apply`.

        Args:
            rows: the requests whose next token the step will sample, by row.
        """
        running = self._to_call(rows)
        self._shipped.update_state(self._difference(running))
        self._planned = _with_lengths(running)
        self._shipped.begin()

    def apply(
        self, logits: torch.Tensor, rows: _Rows, num_requests: int, trees: Mapping[int, DraftTree] | None = None
    ) -> None:
        """Run the processors, in place.

        Args:
            logits: [rows, vocab], of any float dtype.
            rows: the requests whose next token the step samples, by row of the logits.
            num_requests: requests of the step, with and without processors, and those that sit it out.
            trees: the draft tokens behind some of these rows, by the same rows.
        """
        self._allowances.begin_apply(num_requests)
        self.behind_drafts = {}
        self.edited = [*rows]
        running = self._to_call(rows)
        repeated = {row: each for row, each in rows.items() if each.runs and row not in running}
        if repeated:
            self._seat.repeat(logits, repeated)
        # Fewer may run than were planned: an engine may end requests between `begin` and `apply`.
        if self._planned and not _with_lengths(running).items() <= self._planned.items():
            self._end_begun_calls()
            running = {row: request for row, request in running.items() if request.runs}
        self._fail_begun([row for row in self._shipped.begun_rows if row not in running])
        self._shipped.abandon(kept=running.keys())
        self._planned = {}
        self._edit(logits, running)
        self.called = running
        if trees:
            self._run_behind_drafts(logits, rows, trees)
        self._allowances.end_apply()

    def accept(self, request: TrackedRequest, tokens: list[int]) -> None:
        """Continue a request behind the draft tokens that the engine accepted, and drop its other drafts."""
        self._close(request.accept(tokens, self._seat.engine))

    def fork(self, request: TrackedRequest, token: int) -> TrackedRequest:
        """Return another sequence that continues a request as of its last call, with a token of its own."""
        fork = request.add_draft(token)
        request.drafts = {}
        self._kept.update(fork.uses)
        return fork

    def drop(self, sequences: Iterable[TrackedRequest]) -> None:
        """Drop sequences of requests, whose other sequences may go on."""
        dropped = set(sequences)
        self._close(use for each in dropped for use in each.uses)
        left = {row: each for row, each in self._running.items() if each not in dropped}
        self._shipped.update_state(self._difference(left))

    def release(self, finished: Sequence[TrackedRequest]) -> None:
        """Release the processors of requests that have ended."""
        states = {state for request in finished for state in request.states}
        if not states:
            return
        self._close(use for state in states for use in state.uses)
        # Also those of draft tokens, whose states a request has taken over or dropped.
        rows = [row for row, request in self._running.items() if not self._kept.issuperset(request.uses)]
        self._running = {row: request for row, request in self._running.items() if row not in rows}
        for request in finished:
            self._allowances.drop(request.rid)
            if self._audit_log is not None:
                self._audit_log.add(request)
            if self._metrics is not None and request.fault is not None and request.fault.digest:
                self._metrics.failed(request.fault)
        self._shipped.update_state(BatchUpdate(len(self._running), rows, [], []))
        self._shipped.close_absent()  # preempted requests had no row
        if self._processors is not None:
            self._processors.release(use for request in finished for use in request.uses)
            self._processors.unload(self._allowances.surplus())

    def plain_step(self) -> None:
        """Record a step without processors, whose requests may wait for those of other steps."""
        self._allowances.plain_step()

    def is_busy(self, request: TrackedRequest) -> bool:
        """Return whether a request has to sit out: a call of one of its processors is late, and has not ended."""
        return request.runs and self._allowances.any_busy(request.uses)

    @property
    def begun_rows(self) -> list[int]:
        """Rows whose calls have begun, and wait for `apply`."""
        return self._shipped.begun_rows

    def _to_call(self, rows: _Rows) -> dict[int, TrackedRequest]:
        """Return the requests that run, and whose processors were not called for their next token before."""
        return {row: each for row, each in rows.items() if each.runs and each.called_at != len(each.output_token_ids)}

    def _end_begun_calls(self) -> None:
        """End the calls of `begin` whose logits will not come, and their requests."""
        self._fail_begun(self._shipped.begun_rows)
        self._shipped.abandon()
        self._planned = {}

    def _fail_begun(self, rows: Iterable[int]) -> None:
        for row in rows:
            if row in self._planned:
                self._planned[row][0].fail(
                    f"{self._seat.engine} did not sample the token that its processors were called for"
                )

    def _run_behind_drafts(self, logits: torch.Tensor, rows: _Rows, trees: Mapping[int, DraftTree]) -> None:
        """Run the processors on the rows behind draft tokens, as if these were accepted: one depth at a time."""
        tree_of = {row: tree for row, tree in trees.items() if rows[row].runs}
        states = {row: rows[row] for row in tree_of}
        running = states
        while running := self._next_depth(logits, running, tree_of):
            self.behind_drafts |= running
            running = {row: each for row, each in running.items() if each.runs}
            places = [*running]
            # Where trees branch, a depth has more rows than the step has requests.
            for first in range(0, len(places), self._max_rows):
                self._edit(logits, {row: running[row] for row in places[first : first + self._max_rows]})
        for row, tree in trees.items():
            for copy, original in tree.copies.items():
                state = self.behind_drafts.get(row + original)
                if state is not None:
                    logits[row + copy] = logits[row + original]
                    self.behind_drafts[row + copy] = state
        self.edited += self.behind_drafts

    def _next_depth(
        self, logits: torch.Tensor, running: _Rows, tree_of: dict[int, DraftTree]
    ) -> dict[int, TrackedRequest]:
        """Return the requests with one more draft token, by row. A token that is forbidden is not accepted."""
        pairs: list[tuple[int, int, int]] = []
        for parent, request in running.items():
            tree = tree_of[parent]
            if request.runs:
                children = tree.children.get(parent - tree.first_row, ())
                pairs += [(parent, tree.first_row + node, tree.tokens[node]) for node in children]
        parents, tokens = [parent for parent, _, _ in pairs], [token for _, _, token in pairs]
        forbidden = logits[parents, tokens].isneginf().tolist()
        found: dict[int, TrackedRequest] = {}
        for (parent, row, token), is_forbidden in zip(pairs, forbidden, strict=True):
            request = running[parent]
            if not is_forbidden or request.follows_forbidden:
                found[row] = draft = request.add_draft(token)
                self._kept.update(draft.uses)
                tree_of[row] = tree_of[parent]
        return found

    def _edit(self, logits: torch.Tensor, running: dict[int, TrackedRequest]) -> None:
        """Call the processors of some requests, each on its row."""
        self._shipped.update_state(self._difference(running))
        if not running:
            return
        for request in running.values():
            request.called_at = len(request.output_token_ids)
        self._allowances.wait_for(use for request in running.values() for use in request.uses)
        with self._seat.editing(logits, running):
            edited = logits if logits.dtype == torch.float32 else logits.float()
            self._shipped.apply(edited)
            if edited is not logits:
                places = [*running]
                logits[places] = edited[places].to(logits.dtype)
            for row, fault in self._shipped.take_faults():
                running[row].fault = fault
            self._defer({row: running[row] for row in self._shipped.take_deferred()})

    def _defer(self, late: _Rows) -> None:
        """Let requests sit out whose calls are late, or end them."""
        deferred = self._seat.defer(late) if late else ()
        for row, request in late.items():
            if row in deferred:
                request.called_at = -1  # their remaining processors are called when they go on
                self._allowances.sits_out(request.rid)
            else:
                request.fault = request.fault or self._allowances.too_slow(request.uses, self._share_setting)

    def _difference(self, running: dict[int, TrackedRequest]) -> BatchUpdate | None:
        """Return what changed since the last step in the rows that run; a move is a removal and an addition."""
        removed = [row for row in self._running if row not in running]
        new = [(row, request) for row, request in running.items() if self._running.get(row) is not request]
        self._running = running
        if not removed and not new:
            return None
        added = [
            (row, request.params, request.prompt_token_ids, request.output_token_ids)
            for row, request in new
            if request.params is not None
        ]
        return BatchUpdate(max(running, default=-1) + 1, removed, added, [])

    def _close(self, uses: Iterable[ProcessorUse]) -> None:
        """Let processors end that have no next call: with the next update of the batch."""
        for use in uses:
            self._kept.discard(use)
            use.drop_fork()


def _with_lengths(running: _Rows) -> dict[int, tuple[TrackedRequest, int]]:
    """Return requests with the lengths of their outputs."""
    return {row: (request, len(request.output_token_ids)) for row, request in running.items()}
