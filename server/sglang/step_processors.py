"""The processors of a step of SGLang.

`ShippedProcessors` calls the processors. `StepProcessors` decides which rows take part in a step, and how a request
ends.

Assumptions:
* SGLang calls `apply` at most once a step, inside the model runner's `sample`, with the logits of all rows.
* In a step that verifies draft tokens, it calls `apply_to_drafts` and `take_accepted` instead. All tokens before are
  known.

Guarantees:
* A processor is called once for each token of its request, whatever else SGLang computes: not for a chunk of a prompt,
  not after the end, and not again for a token that SGLang drops when it retracts a request. Its `state` lives until the
  request ends.
* The history is exact in each call, with overlap scheduling too. Where it cannot be, the request ends instead.
* Behind a draft token, a processor is called with a copy of the request's state, which is kept only if SGLang accepts
  the token. So for each token of an output, a processor is called exactly once.
* Nothing is raised: an exception would stop SGLang's scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.processors.shipped_processors import ShippedProcessors
from logitship.server.plugins.plugin_processors import PluginProcessors
from logitship_sglang import logger

from .draft_tree import DraftTree
from .finish_abort import abort, abort_message
from .forward_step import ForwardStep
from .generate_fields import BEAM_SEARCH, admitted_string, read_fields, sampling_params_of
from .sampling_ranks import EndedRows, SamplingRanks
from .scheduled_request import SampledRow, ScheduledRequest, has_ended
from .sglang_settings import SglangSettings

_NOT_SAMPLED = "SGLang did not sample the token that its processors were called for"
_NOT_CALLED = "SGLang accepted a draft token behind which no processor was called"
_NO_DRAFTS = "its processors cannot run in this step, in which SGLang verifies drafts"
_NOT_LOADED = "its class was not loaded: those of other requests took too long in the same step; try again"
_LOGPROBS = (
    "next_token_logprobs",
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)
"""Fields of SGLang's `LogitsProcessorOutput`."""
INTERNAL_ERROR = "the server had an internal error; its log has the details"

MAX_LOADING = 30.0
"""Seconds of a step after which it loads no more classes. Each may take `SANDBOX_LOAD_TIMEOUT`, and all requests wait;
SGLang ends itself if a step takes 300 s."""


class StepProcessors:
    """Runs the processors of the batch's requests, each on its own rows.

    Args:
        settings: the plugin's.
        model: the model.
        processors: loads the requests' processors; None on ranks that run none.
        ranks: the processes that sample the same tokens.
    """

    def __init__(
        self, settings: SglangSettings, model: ModelView, processors: PluginProcessors | None, ranks: SamplingRanks
    ) -> None:
        self._ranks = ranks
        self._max_size = settings.max_processor_size
        self._runs_code_here = settings.processor_isolation == "none"
        self._model = model
        self._processors = processors
        self._kept: set[ProcessorUse] = set()
        self._shipped = ShippedProcessors(
            None, torch.device("cpu"), False, model=model, is_kept=self._kept.__contains__
        )
        self._requests: list[ScheduledRequest] = []
        self._running: dict[int, ScheduledRequest] = {}
        self._planned: dict[int, tuple[ScheduledRequest, int]] = {}
        self._called: dict[int, ScheduledRequest] = {}
        self._repeated: dict[int, ScheduledRequest] = {}
        self._edited: list[int] = []
        self._behind_drafts: dict[int, ScheduledRequest | None] = {}
        self._step: ForwardStep | None = None

    @property
    def are_used(self) -> bool:
        """True if requests with processors are in the batch, or were in the last step."""
        return bool(self._requests)

    def begin(self, rows: dict[int, ScheduledRequest], step: ForwardStep) -> None:
        """Begin calls before their logits exist. Optional, before `sampling`.

        Args:
            rows: the requests with processors.
            step: the step that SGLang computes next, whose last tokens are known.
        """
        if not self._ranks.is_first:
            return
        with self._or_fail(rows.values()):
            self._end_begun_calls()
            self._drop_finished()
            running = self._to_call(self._sampled_rows(rows, step))
            self._shipped.update_state(self._difference(running))
            self._planned = _with_lengths(running)
            self._shipped.begin()

    @contextmanager
    def sampling(self, step: ForwardStep) -> Iterator[None]:
        """Let `apply` know the step that it belongs to."""
        if not self._shipped.begun_rows:
            self.drop_finished()
        self._step, self._called, self._repeated = step, {}, {}
        try:
            yield
        finally:
            self._step = None

    def drop_finished(self) -> None:
        """Release the processors of requests that SGLang has finished or dropped. Optional, in a step without any."""
        if self._requests:
            with self._or_fail(self._requests):
                self._drop_finished()

    def sampled(self, token_ids: torch.Tensor, output: Any) -> None:
        """Take the tokens that SGLang sampled in this step, and correct the log-probabilities of repeated ones.

        Args:
            token_ids: the tokens, by row.
            output: SGLang's `LogitsProcessorOutput`.
        """
        logprobs = {name: found for name in _LOGPROBS if (found := getattr(output, name, None)) is not None}
        with self._or_fail(self._repeated.values()):
            for row, request in self._repeated.items():
                assert request.sampled is not None
                for name, values in request.sampled.logprobs.items():
                    if name in logprobs:
                        logprobs[name][row] = values[request.sampled.row]
        for row, request in self._called.items():
            request.sampled = SampledRow(row, token_ids, logprobs)

    def apply(self, logits: torch.Tensor, rows: dict[int, ScheduledRequest], tokens_per_row: int) -> None:
        """Run the processors, in place.

        Args:
            logits: [rows, vocab].
            rows: the requests with processors.
            tokens_per_row: number of rows of the logits for each row of the batch.
        """
        self._edited = []
        if self._ranks.is_first:
            with self._or_fail(rows.values()):
                if self._step is None or tokens_per_row != 1:
                    self._fail_all(rows.values(), _NO_DRAFTS)
                else:
                    self._run(logits, rows, self._step)
        for row, (message, num_output_tokens) in self._ranks.share(logits, self._edited, _ended(rows)).items():
            _end(rows[row], message, num_output_tokens)

    def apply_to_drafts(
        self, logits: torch.Tensor, rows: dict[int, ScheduledRequest], trees: Sequence[DraftTree] | None
    ) -> None:
        """Run the processors on the rows of draft tokens, in place, as if each were accepted.

        Args:
            logits: [nodes of all trees, vocab].
            rows: the requests with processors, by row of the batch.
            trees: the draft tokens of each row of the batch; None: they cannot be followed.
        """
        self._edited, self._behind_drafts = [], {}
        if self._ranks.is_first:
            with self._or_fail(rows.values()):
                if trees is None:
                    self._fail_all(rows.values(), _NO_DRAFTS)
                else:
                    self._run_trees(logits, rows, trees)
        self._ranks.share(logits, self._edited, {})

    def _run_trees(self, logits: torch.Tensor, rows: dict[int, ScheduledRequest], trees: Sequence[DraftTree]) -> None:
        """Run the processors one depth at a time, first behind the last output tokens."""
        self._drop_finished()
        running: dict[int, ScheduledRequest] = {}
        tree_of: dict[int, DraftTree] = {}
        for row, request in rows.items():
            tree = trees[row]
            if self._starts(request, tree):
                running[tree.first_row] = request
                tree_of[tree.first_row] = tree
        started = list(tree_of.values())
        while running:
            self._edit(logits, running)
            self._edited += running
            self._behind_drafts |= running
            running = self._next_depth(logits, running, tree_of)
        for tree in started:
            for copy, original in tree.copies.items():
                row, original_row = tree.first_row + copy, tree.first_row + original
                if original_row in self._behind_drafts:
                    logits[row] = logits[original_row]
                    self._edited.append(row)
                    self._behind_drafts[row] = self._behind_drafts[original_row]

    def _starts(self, request: ScheduledRequest, tree: DraftTree) -> bool:
        """Bring a history up to date, and return whether the request's next token is sampled."""
        req = request.request()
        if req is None or request.fault is not None or req.finished():
            return False
        request.take_new_tokens(req.output_ids, len(req.output_ids), -1)
        if request.uses is None or request.output_token_ids[-1:] != [tree.tokens[0]]:
            request.fail("SGLang's draft tokens do not follow its output")
        return request.fault is None and not has_ended(req, request.output_token_ids)

    def _next_depth(
        self, logits: torch.Tensor, running: dict[int, ScheduledRequest], tree_of: dict[int, DraftTree]
    ) -> dict[int, ScheduledRequest]:
        """Return the requests with one more draft token, by row. A token that is forbidden cannot be accepted."""
        pairs: list[tuple[int, int, int]] = []
        for parent, request in running.items():
            tree = tree_of[parent]
            if request.fault is None:
                children = tree.children.get(parent - tree.first_row, ())
                pairs += [(parent, tree.first_row + node, tree.tokens[node]) for node in children]
        parents, tokens = [parent for parent, _, _ in pairs], [token for _, _, token in pairs]
        forbidden = logits[parents, tokens].isneginf().tolist()
        found: dict[int, ScheduledRequest] = {}
        for (parent, row, token), is_forbidden in zip(pairs, forbidden, strict=True):
            request = running[parent]
            if is_forbidden:
                continue
            if has_ended(request.request(), [*request.output_token_ids, token]):
                self._behind_drafts[row] = None
                continue
            draft = self._behind_drafts[row] = request.with_draft(token)
            self._kept.update(draft.uses or ())
            tree_of[row] = tree_of[parent]
            if draft.fault is None:
                found[row] = draft
        return found

    def take_accepted(
        self, logits: torch.Tensor, rows: dict[int, ScheduledRequest], accepted: Sequence[Sequence[int]]
    ) -> None:
        """Continue behind the accepted draft tokens, and end requests whose processors failed there.

        Args:
            logits: those of `apply_to_drafts`.
            rows: the requests with processors, by row of the batch.
            accepted: for each row of the batch, the rows of the logits from which SGLang took its tokens, in order; the
                first is that of the last output token. -1: none.
        """
        if self._ranks.is_first:
            with self._or_fail(rows.values()):
                self._accept(rows, accepted)
        for row, (message, num_output_tokens) in self._ranks.share(logits, [], _ended(rows)).items():
            _end(rows[row], message, num_output_tokens)

    def _accept(self, rows: dict[int, ScheduledRequest], accepted: Sequence[Sequence[int]]) -> None:
        drafts, self._behind_drafts = self._behind_drafts, {}
        uses = {use for draft in drafts.values() if draft is not None for use in draft.uses or ()}
        for row, request in rows.items():
            last = request
            for draft_row in accepted[row][1:]:
                if draft_row == -1 or last.fault is not None:
                    break
                if draft_row not in drafts:
                    last.fail(_NOT_CALLED)
                    break
                draft = drafts[draft_row]
                if draft is None:  # the token ends the request
                    break
                last = draft
            if last is not request:
                request.accept(last)
            uses.difference_update(request.uses or ())
        for use in uses:
            self._kept.discard(use)
            use.drop_fork()
        self._shipped.update_state(self._difference({}))

    @contextmanager
    def _or_fail(self, requests: Iterable[ScheduledRequest]) -> Iterator[None]:
        """Run a part of a step on the first rank. An error of the plugin ends the requests, and is not raised."""
        try:
            with self._ranks.own_random_numbers() if self._runs_code_here else nullcontext():
                yield
        except Exception:  # noqa: BLE001  # boundary: SGLang
            logger.exception("logitship failed in a step: all requests with processors end")
            self._fail_all(list(requests), INTERNAL_ERROR)

    def _run(self, logits: torch.Tensor, rows: dict[int, ScheduledRequest], step: ForwardStep) -> None:
        sampled = self._sampled_rows(rows, step)
        self._edited = list(sampled)
        running = self._to_call(sampled)
        self._repeated = {row: request for row, request in sampled.items() if row not in running}
        self._repeat(logits)
        # Fewer may run than were planned: with a grammar in the batch and overlap scheduling, SGLang processes the step
        # before this one, which may end requests, between `begin` and `apply`.
        if self._planned and not _with_lengths(running).items() <= self._planned.items():
            self._end_begun_calls()
            running = {row: request for row, request in running.items() if request.fault is None}
        self._shipped.abandon(kept=running.keys())
        self._planned = {}
        self._edit(logits, running)
        self._called = running

    def _edit(self, logits: torch.Tensor, running: dict[int, ScheduledRequest]) -> None:
        """Call the processors of some requests, each on its row."""
        self._shipped.update_state(self._difference(running))
        if not running:
            return
        for request in running.values():
            request.called_at = len(request.output_token_ids)
        edited = logits if logits.dtype == torch.float32 else logits.float()
        self._shipped.apply(edited)
        if edited is not logits:
            places = list(running)
            logits[places] = edited[places].to(logits.dtype)
        for row, fault in self._shipped.take_faults():
            running[row].fault = fault

    def _sampled_rows(self, rows: dict[int, ScheduledRequest], step: ForwardStep) -> dict[int, ScheduledRequest]:
        """Bring the histories up to date, and return the requests whose next token this step samples."""
        lengths = step.lengths()
        found: dict[int, tuple[ScheduledRequest, Any, int]] = {}
        for row, request in rows.items():
            req = request.request()
            if req is None or request.fault is not None or req.finished():
                continue
            length = lengths[row] - len(request.prompt_token_ids)
            if length >= len(req.output_ids):  # else a chunk of the prompt
                found[row] = request, req, length
        late = [row for row, (request, req, length) in found.items() if length > len(req.output_ids)]
        last_tokens = dict(zip(late, step.last_tokens(late), strict=True)) if late else {}
        until = time.monotonic() + MAX_LOADING
        for row, (request, req, length) in found.items():
            request.take_new_tokens(req.output_ids, length, last_tokens.get(row, -1))
            if request.fault is None and request.uses is None:
                self._load(request, req, until)
        return {
            row: request
            for row, (request, req, _) in found.items()
            if request.fault is None and not has_ended(req, request.output_token_ids)
        }

    def _to_call(self, rows: dict[int, ScheduledRequest]) -> dict[int, ScheduledRequest]:
        """Return the requests whose processors were not called for their next token before."""
        return {row: each for row, each in rows.items() if each.called_at != len(each.output_token_ids)}

    def _end_begun_calls(self) -> None:
        """End the calls of `begin` whose logits will not come, and their requests."""
        for row in self._shipped.begun_rows:
            if row in self._planned:
                self._planned[row][0].fail(_NOT_SAMPLED)
        self._shipped.abandon()
        self._planned = {}

    def _repeat(self, logits: torch.Tensor) -> None:
        """Let SGLang sample the same tokens again, which it had sampled and dropped when it retracted the requests."""
        for row, request in self._repeated.items():
            assert request.sampled is not None
            token = request.sampled.token
            logits[row] = -torch.inf
            logits[row, token] = 0.0

    def _load(self, request: ScheduledRequest, req: Any, until: float) -> None:
        """Load the processors of a request, unless that takes time and the step has loaded for long enough."""
        assert self._processors is not None
        custom_params = req.sampling_params.custom_params
        if isinstance(custom_params, dict):
            custom_params = {key: value for key, value in custom_params.items() if key != "__req__"}
        try:
            if getattr(req, "beam_group", None) is not None:
                raise ValueError(BEAM_SEARCH)
            requested = read_fields(admitted_string(req.custom_logit_processor), custom_params, self._max_size)
            if time.monotonic() >= until and not self._processors.are_loaded(requested):
                raise ValueError(_NOT_LOADED)
            request.uses = self._processors.load(requested, request.rid)
            self._requests.append(request)
            request.params = sampling_params_of(req.sampling_params, request.uses, self._model.eos_token_ids)
            self._kept.update(request.uses)
        except ValueError as error:
            request.fail(str(error))
        except Exception:  # noqa: BLE001  # boundary: SGLang
            logger.exception("the processors of request %s cannot be loaded", request.rid)
            request.fail(INTERNAL_ERROR)

    def _difference(self, running: dict[int, ScheduledRequest]) -> BatchUpdate | None:
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

    def _drop_finished(self) -> None:
        """Release the processors of finished requests."""
        finished = [request for request in self._requests if request.is_finished]
        if not finished:
            return
        rows = [row for row, request in self._running.items() if request in finished]
        self._running = {row: request for row, request in self._running.items() if row not in rows}
        self._requests = [request for request in self._requests if request not in finished]
        uses = [use for request in finished for use in request.uses or ()]
        self._kept.difference_update(uses)
        self._shipped.update_state(BatchUpdate(len(self._running), rows, [], []))
        self._shipped.close_absent()
        if self._processors is not None:
            self._processors.release(uses)

    def _fail_all(self, requests: Iterable[ScheduledRequest], reason: str) -> None:
        for request in requests:
            request.fail(reason)


def _with_lengths(running: dict[int, ScheduledRequest]) -> dict[int, tuple[ScheduledRequest, int]]:
    """Return requests with the lengths of their outputs."""
    return {row: (request, len(request.output_token_ids)) for row, request in running.items()}


def _ended(rows: dict[int, ScheduledRequest]) -> EndedRows:
    """Return the requests that end, with the reasons and the numbers of their output tokens."""
    failed = {row: each.fault for row, each in rows.items() if each.fault is not None}
    return {row: (abort_message(fault), len(rows[row].output_token_ids)) for row, fault in failed.items()}


def _end(request: ScheduledRequest, message: str, num_output_tokens: int) -> None:
    """End a request, once."""
    req = request.request()
    if req is not None and req.to_finish is None and not req.finished():
        logger.warning("request %s ends: %s", request.rid, message)
        abort(req, message, num_output_tokens)
