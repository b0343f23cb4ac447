"""SGLang's seat: the requests of its steps, and how it ends one.

Assumptions:
* SGLang calls `apply` at most once a step, inside the model runner's `sample`, with the logits of all rows.
* In a step that verifies draft tokens, it calls `apply_to_drafts` and `take_accepted` instead. All tokens before are
  known.

Guarantees, beside those of `RequestRuntime`:
* No processor is called for a chunk of a prompt, or again for a token that SGLang drops when it retracts a request: the
  same token is sampled again.
* The history is exact in each call, with overlap scheduling too. Where it cannot be, the request ends instead.
* Nothing is raised: an exception would stop SGLang's scheduler.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.draft_tree import DraftTree
from logitship.server.runtime.fault_message import fault_details, fault_message
from logitship.server.runtime.request_fields import MAX_PROCESSORS
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import TrackedRequest
from logitship_sglang import logger

from .edit_recorder import EditRecorder
from .finish_abort import abort
from .forward_step import ForwardStep
from .generate_fields import (
    BEAM_SEARCH,
    is_admitted,
    read_mark,
    read_processors,
    records_edits,
    sampling_params_of,
    with_params,
)
from .sampled_masks import SampledMask
from .sampling_ranks import EndedRows, SamplingRanks

_NO_DRAFTS = "its processors cannot run in this step, in which SGLang verifies drafts"
_ATTRIBUTE = "_logitship_request"
_LOGPROBS = (
    "next_token_logprobs",
    "next_token_top_logprobs_val",
    "next_token_top_logprobs_idx",
    "next_token_token_ids_logprobs_val",
    "next_token_token_ids_logprobs_idx",
)
"""Fields of SGLang's `LogitsProcessorOutput`."""

Rows: TypeAlias = Mapping[int, TrackedRequest]
"""The requests with processors, by row of the batch."""


@dataclass(eq=False)
class ScheduledRequest:
    """SGLang's part of a `TrackedRequest`.

    Attributes:
        req: SGLang's `Req`; weak, because SGLang's requests die by their reference count.
        records_edits: it asks for the edits of its logits.
        edits: those of the token that was sampled last, as JSON.
        sampled: what SGLang sampled in the step in which the processors were called last.
    """

    req: weakref.ReferenceType[Any]
    records_edits: bool = False
    edits: dict[str, Any] | None = None
    sampled: SampledRow | None = None

    @property
    def is_finished(self) -> bool:
        """True if SGLang has finished the request, or dropped it."""
        req = self.req()
        return req is None or bool(req.finished())


@dataclass(frozen=True, eq=False)
class SampledRow:
    """Sampled token of a row of a step, as SGLang reports it.

    Attributes:
        row: the row.
        token_ids: the tokens of all rows.
        logprobs: fields of SGLang's `LogitsProcessorOutput` with an item for each row, by name; those that it has.
        mask: its sampling mask; None: the request does not ask for it.
    """

    row: int
    token_ids: torch.Tensor
    logprobs: Mapping[str, Any]
    mask: SampledMask | None

    @property
    def token(self) -> int:
        """The token of the row."""
        return int(self.token_ids[self.row])


class SglangSeat:
    """Runs the processors of the batch's requests, each on its own rows. Implements `EngineSeat`.

    Args:
        worker: this process.
    """

    engine = "SGLang"

    def __init__(self, worker: EngineWorker[SamplingRanks]) -> None:
        self._worker = worker
        self._runtime = RequestRuntime(self, worker)
        self._requests: list[TrackedRequest] = []
        self._repeated: dict[int, TrackedRequest] = {}
        self._trees: dict[int, DraftTree] = {}
        self._step: ForwardStep | None = None
        self._edits: EditRecorder | None = None

    @property
    def called(self) -> Collection[int]:
        """Rows of the step whose processors were called in it."""
        return self._runtime.called

    @property
    def are_used(self) -> bool:
        """True if requests with processors are in the batch, or were in the last step."""
        return bool(self._requests)

    def must_wait(self, req: Any) -> bool:
        """Begin to load the processors of a new request, and return whether it is to wait outside of the batch.

        Args:
            req: SGLang's `Req`.
        """
        request, must_wait = scheduled(req), False
        with self._runtime.or_fail([request]):
            must_wait = self._runtime.must_wait(request)
        return must_wait

    def load(self, req: Any) -> str | None:
        """Load the processors of a new request, before it is in a step, and return the reason if they cannot run."""
        request = scheduled(req)
        self._load(request)
        return None if request.fault is None else fault_message(request.fault)

    def _load(self, request: TrackedRequest) -> None:
        self._runtime.load(request)
        self._requests.append(request)

    def begin(self, rows: Rows, step: ForwardStep) -> None:
        """Begin calls before their logits exist. Optional, before `sampling`.

        Args:
            rows: the requests with processors.
            step: the step that SGLang computes next, whose last tokens are known.
        """
        if self._worker.ranks.is_first:
            with self._runtime.or_fail(rows.values()):
                self._runtime.begin_step()
                self._drop_finished()
                self._runtime.begin(self._sampled_rows(rows, step))

    @contextmanager
    def sampling(self, step: ForwardStep, edits: EditRecorder | None = None) -> Iterator[None]:
        """Let `apply` know the step that it belongs to, and what records its edits."""
        if not self._runtime.begun_rows:
            self.drop_finished()
        self._step, self._repeated, self._edits = step, {}, edits
        self._runtime.called = {}
        try:
            yield
        finally:
            self._step = self._edits = None

    def plain_step(self) -> None:
        """Take part in a step without processors."""
        self._runtime.plain_step()
        self.drop_finished()

    def drop_finished(self) -> None:
        """Release the processors of requests that SGLang has finished or dropped."""
        if self._requests:
            with self._runtime.or_fail(self._requests):
                self._runtime.begin_step()
                self._drop_finished()

    def _drop_finished(self) -> None:
        finished = [request for request in self._requests if request.record.is_finished]
        self._requests = [request for request in self._requests if request not in finished]
        self._runtime.release(finished)

    def apply(self, logits: torch.Tensor, rows: Rows, tokens_per_row: int) -> None:
        """Run the processors, in place.

        Args:
            logits: [rows, vocab].
            rows: the requests with processors.
            tokens_per_row: number of rows of the logits for each row of the batch.
        """
        self._runtime.edited = []
        if self._edits is not None:
            self._edits.record(logits)
        if self._worker.ranks.is_first:
            with self._runtime.or_fail(rows.values()):
                if self._step is None or tokens_per_row != 1:
                    _fail_all(rows, _NO_DRAFTS)
                else:
                    self._runtime.apply(logits, self._sampled_rows(rows, self._step), len(logits))
        self._end(rows, self._worker.ranks.share(logits, self._runtime.edited, _ended(rows)))
        if self._edits is not None:
            self._edits.record(logits)

    def sampled(self, token_ids: torch.Tensor, output: Any, masks: Mapping[int, SampledMask]) -> None:
        """Take the tokens that SGLang sampled in this step, and correct what it returns about repeated ones.

        Args:
            token_ids: the tokens, by row.
            output: SGLang's `LogitsProcessorOutput`.
            masks: sampling masks, by row.
        """
        logprobs = {name: found for name in _LOGPROBS if (found := getattr(output, name, None)) is not None}
        with self._runtime.or_fail(self._repeated.values()):
            for row, request in self._repeated.items():
                sampled = request.record.sampled
                for name, values in sampled.logprobs.items():
                    if name in logprobs:
                        logprobs[name][row] = values[sampled.row]
                if sampled.mask is not None and row in masks:
                    sampled.mask.overwrite(masks[row])
        for row, request in self._runtime.called.items():
            request.record.sampled = SampledRow(row, token_ids, logprobs, masks.get(row))

    def apply_to_drafts(self, logits: torch.Tensor, rows: Rows, trees: Sequence[DraftTree] | None) -> None:
        """Run the processors on the rows of draft tokens, in place, as if each were accepted.

        Args:
            logits: [nodes of all trees, vocab].
            rows: the requests with processors.
            trees: the draft tokens of each row of the batch; None: they cannot be followed.
        """
        self._runtime.edited, self._trees = [], {}
        if self._worker.ranks.is_first:
            with self._runtime.or_fail(rows.values()):
                if trees is None:
                    _fail_all(rows, _NO_DRAFTS)
                else:
                    self._runtime.begin_step()
                    self._drop_finished()
                    started = {
                        trees[row].first_row: row for row, each in rows.items() if self._starts(each, trees[row])
                    }
                    self._trees = {row: trees[row] for row in started.values()}
                    self._runtime.apply(
                        logits,
                        {first: rows[row] for first, row in started.items()},
                        len(trees),
                        {first: trees[row] for first, row in started.items()},
                    )
        self._worker.ranks.share(logits, self._runtime.edited, {})

    def _starts(self, request: TrackedRequest, tree: DraftTree) -> bool:
        """Bring a history up to date, and return whether the request's next token is sampled."""
        req = request.record.req()
        if req is None or request.fault is not None or req.finished():
            return False
        _take_new_tokens(request, req.output_ids, len(req.output_ids), -1)
        if request.params is None or request.output_token_ids[-1:] != [tree.tokens[0]]:
            request.fail("SGLang's draft tokens do not follow its output")
        return request.runs

    def take_accepted(self, logits: torch.Tensor, rows: Rows, accepted: Sequence[Sequence[int]]) -> None:
        """Continue behind the accepted draft tokens, and end requests whose processors failed there.

        Args:
            logits: those of `apply_to_drafts`.
            rows: the requests with processors.
            accepted: for each row of the batch, the rows of the logits from which SGLang took its tokens, in order; the
                first is that of the last output token. -1: none.
        """
        if self._worker.ranks.is_first:
            with self._runtime.or_fail(rows.values()):
                for row, tree in self._trees.items():
                    nodes = [each - tree.first_row for each in accepted[row][1:] if each != -1]
                    self._runtime.accept(rows[row], [tree.tokens[node] for node in nodes])
        self._end(rows, self._worker.ranks.share(logits, [], _ended(rows)))

    def _sampled_rows(self, rows: Rows, step: ForwardStep) -> dict[int, TrackedRequest]:
        """Bring the histories up to date, and return the requests whose next token this step samples."""
        lengths = step.lengths()
        found: dict[int, tuple[TrackedRequest, Any, int]] = {}
        for row, request in rows.items():
            req = request.record.req()
            if req is None or request.fault is not None or req.finished():
                continue
            length = lengths[row] - len(request.prompt_token_ids)
            if length >= len(req.output_ids):  # else a chunk of the prompt
                found[row] = request, req, length
        late = [row for row, (_, req, length) in found.items() if length > len(req.output_ids)]
        last_tokens = dict(zip(late, step.last_tokens(late), strict=True)) if late else {}
        for row, (request, req, length) in found.items():
            _take_new_tokens(request, req.output_ids, length, last_tokens.get(row, -1))
            if request.fault is None and request.params is None and req.to_finish is None:
                self._load(request)
        return {row: request for row, (request, _, _) in found.items() if request.runs}

    def processors_of(self, request: TrackedRequest) -> Sequence[ProcessorRequest]:
        """See `EngineSeat.processors_of`."""
        req = request.record.req()
        if request.requested:
            return request.requested
        custom_params = req.sampling_params.custom_params
        if isinstance(custom_params, dict):
            custom_params = {key: value for key, value in custom_params.items() if key != "__req__"}
        if getattr(req, "beam_group", None) is not None:
            raise ValueError(BEAM_SEARCH)
        _, string = read_mark(req.custom_logit_processor)
        # Of a whole list: the front end has checked what the client sent, which may have named registered processors.
        max_size = MAX_PROCESSORS * self._worker.settings.max_processor_size
        request.requested = with_params(read_processors(string, max_size), custom_params)
        return request.requested

    def sampling_params_of(self, request: TrackedRequest, uses: Sequence[ProcessorUse]) -> SamplingParams:
        """See `EngineSeat.sampling_params_of`."""
        return sampling_params_of(request.record.req().sampling_params, uses, self._worker.model.eos_token_ids)

    def editing(self, logits: torch.Tensor, running: Mapping[int, TrackedRequest]) -> nullcontext[None]:
        """See `EngineSeat.editing`. SGLang applies its masks after processors."""
        return nullcontext()

    def repeat(self, logits: torch.Tensor, repeated: Mapping[int, TrackedRequest]) -> None:
        """Let SGLang sample the same tokens again, which it had sampled and dropped when it retracted the requests."""
        for row, request in repeated.items():
            if request.record.sampled is None:
                request.fail("SGLang samples a token again whose first sample is not known")
                continue
            self._repeated[row] = request
            logits[row] = -torch.inf
            logits[row, request.record.sampled.token] = 0.0

    def defer(self, late: Mapping[int, TrackedRequest]) -> Collection[int]:
        """Return no rows: late requests end."""
        return ()

    def _end(self, rows: Rows, ended: EndedRows) -> None:
        """End requests, each once."""
        for row, (message, num_output_tokens) in ended.items():
            req = rows[row].record.req()
            if req is not None and req.to_finish is None and not req.finished():
                logger.warning("request %s ends%s: %s", rows[row].rid, fault_details(rows[row]), message)
                abort(req, message, num_output_tokens)


def scheduled(req: Any) -> TrackedRequest:
    """Return the plugin's record of a request, a new one at first.

    Args:
        req: SGLang's `Req`.
    """
    request = find_scheduled(req)
    if request is None:
        marked = req.custom_logit_processor
        request = TrackedRequest(
            ScheduledRequest(weakref.ref(req), records_edits(marked)),
            req.rid,
            list(req.origin_input_ids),
            _ends_of(req),
            tenant=read_mark(marked)[0] if is_admitted(marked) else "",
            max_tokens=req.sampling_params.max_new_tokens,
        )
        setattr(req, _ATTRIBUTE, request)
    return request


def find_scheduled(req: Any) -> TrackedRequest | None:
    """Return the plugin's record of a request; None if no step has met it.

    Args:
        req: SGLang's `Req`.
    """
    found = req.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, TrackedRequest) else None


def _ends_of(req: Any) -> frozenset[int]:
    """Return the tokens that end a request."""
    params = req.sampling_params
    if params.ignore_eos:
        return frozenset()
    ends = {*(params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        ends |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return frozenset(ends)


def _take_new_tokens(request: TrackedRequest, known: Sequence[int], length: int, last: int) -> None:
    """Append the output tokens since the last step.

    Args:
        request: the request.
        known: the tokens that the scheduler has processed. With overlap scheduling, the last one is missing.
        length: number of output tokens that this step continues.
        last: the last token that the model read.
    """
    own = request.output_token_ids
    if len(own) > length:
        request.fail("SGLang retracted it, and dropped draft tokens that it had accepted and its processors had seen")
        return
    own.extend(known[len(own) : length])
    if len(own) == length - 1:
        own.append(last)
    if len(own) != length:
        request.fail(f"SGLang continues output token {length} of it, of which {len(own)} are known")


def _fail_all(rows: Rows, reason: str) -> None:
    for request in rows.values():
        request.fail(reason)


def _ended(rows: Rows) -> EndedRows:
    """Return the requests that end, with the reasons and the numbers of their output tokens."""
    failed = {row: each.fault for row, each in rows.items() if each.fault is not None}
    return {row: (fault_message(fault), len(rows[row].output_token_ids)) for row, fault in failed.items()}
