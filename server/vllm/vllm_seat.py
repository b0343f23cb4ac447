"""vLLM's seat, as far as its two model runners share it: how a request ends, and what its logits are protected from.

Guarantees, beside those of `RequestRuntime`:
* The history is exact in each call. Where it cannot be, the request ends instead.
* A request ends with the *fault token*, which is a stop token of all requests with processors, and is sampled for no
  other reason: a worker has no other way to end one. `take_endings` has the reason.
* Nothing is raised: an exception would stop vLLM's engine.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, SimpleNamespace
from typing import Any, TypeAlias

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import non_finite_fault
from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime.draft_tree import DraftTree
from logitship.server.runtime.fault_message import fault_details, fault_message
from logitship.server.runtime.ranks import GroupRanks
from logitship.server.runtime.request_runtime import RequestRuntime
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import TrackedRequest

from .configuration import fault_token
from .endings import Ending
from .extra_args import read_processors, sampling_params
from .request_tenant import read_tenant
from .settings import logger

Drafts: TypeAlias = Mapping[int, Sequence[int]]
"""Draft tokens of some rows. The rows behind them follow the row."""

HOLDS_EMBEDDINGS = "its prompt holds embeddings, which processors cannot read"
"""Reason of a request whose prompt is not known as tokens."""
_HARD_MASKS = ("structured_outputs", "allowed_token_ids", "bad_words")
"""Parameters of masks that vLLM applies before it calls any logits processor, and not again after."""


class VllmSeat:
    """Runs the processors of requests, each on its own rows. Implements `EngineSeat`.

    A request's record is vLLM's `SamplingParams`.

    Args:
        worker: this process.
        max_length: most tokens of a prompt and its output.

    Attributes:
        fault_token: the token that ends requests.
    """

    engine = "vLLM"

    def __init__(self, worker: EngineWorker[GroupRanks], max_length: int = sys.maxsize) -> None:
        self._worker = worker
        self.fault_token = fault_token(worker.model)
        self._max_length = max_length
        self._endings: dict[str, Ending] = {}
        self._runtime = RequestRuntime(self, worker)

    def must_wait(self, extra_args: dict[str, Any] | None, names: Sequence[str]) -> bool:
        """Begin to load the processors of a new request, and return whether it is to wait outside of the batch.

        Args:
            extra_args: the request's, which the front end has checked; None: it was asked about before.
            names: see `RequestRuntime.still_wait`.
        """
        params = SimpleNamespace(extra_args=extra_args)
        request, must_wait = TrackedRequest(params, "", [], tenant=read_tenant(params)), False
        with self._runtime.or_fail([request]):
            must_wait = self._runtime.still_wait(names) if extra_args is None else self._runtime.must_wait(request)
        return must_wait

    def _track(self, rid: str, params: Any, prompt_token_ids: list[int], num_prompt_tokens: int = 0) -> TrackedRequest:
        """Return a new request, without its processors."""
        stops = frozenset(params.stop_token_ids or ())
        most = self._max_length - num_prompt_tokens
        return TrackedRequest(
            params,
            rid,
            prompt_token_ids,
            stops if params.ignore_eos else stops | self._worker.model.eos_token_ids,
            tenant=read_tenant(params),
            max_tokens=most if params.max_tokens is None else min(params.max_tokens, most),
            # vLLM's thinking budget forces its tokens after the processors, also those that they forbid.
            follows_forbidden=getattr(params, "thinking_token_budget", None) is not None,
        )

    def _append(self, request: TrackedRequest, new: Sequence[int]) -> None:
        """Append the output tokens since the last step: draft tokens that vLLM accepted, and one more."""
        known = len(request.output_token_ids)
        if new and request.drafts:
            self._runtime.accept(request, [*new[:-1]])
        if request.fault is None and not request.is_complete:
            request.output_token_ids += new[len(request.output_token_ids) - known :]

    def _run(
        self,
        logits: torch.Tensor,
        rows: Mapping[int, TrackedRequest],
        num_requests: int,
        drafts: Drafts = MappingProxyType({}),
    ) -> None:
        """Run the processors of the rows that are sampled, in place. All ranks call it for the same rows.

        Args:
            logits: [rows, vocab].
            rows: requests with known histories, by row.
            num_requests: requests of the step, with and without processors, and those that sit it out.
            drafts: draft tokens of some of the rows.
        """
        if self._worker.ranks.is_first:
            self._runtime.behind_drafts = {}
            with self._runtime.or_fail(rows.values()):
                trees = {row: DraftTree.chain(row, tokens) for row, tokens in drafts.items()}
                self._runtime.apply(logits, rows, num_requests, trees)
            faults = self._force_fault_tokens(logits, rows, drafts)
            self._endings = {
                request.rid: self._ending(
                    request, range(row + 1, row + 1 + len(drafts.get(row, ()))), faults.get(request.rid)
                )
                for row, request in rows.items()
            }
        behind = [row + depth for row, tokens in drafts.items() for depth in range(1, len(tokens) + 1)]
        self._worker.ranks.broadcast(logits, [*rows, *behind])

    def _ending(self, request: TrackedRequest, behind: Iterable[int], fault: str | None) -> Ending:
        """Return how a request ends, if this step ends it.

        Args:
            request: the request.
            behind: the rows of its draft tokens.
            fault: the text of its fault, if it has one.
        """
        states = (request, *(self._runtime.behind_drafts.get(row) for row in behind))
        receipts = [[use.receipt for use in state.uses] for state in states if state is not None and state.uses]
        params, longest = request.record, len(request.output_token_ids) + len(receipts)
        may_end_anywhere = params.stop or getattr(params, "repetition_detection", None) is not None
        is_last = request.max_tokens is not None and longest >= request.max_tokens
        return Ending(fault, receipts, None if may_end_anywhere or is_last else request.ends_at)

    def take_endings(self) -> dict[str, Ending]:
        """Return how the requests with processors end, if the last step ends them, by request id. Clears it."""
        endings, self._endings = self._endings, {}
        return endings

    def _force_fault_tokens(
        self, logits: torch.Tensor, rows: Mapping[int, TrackedRequest], drafts: Drafts
    ) -> dict[str, str]:
        """Let vLLM sample the fault token for requests that end, also where that depends on an accepted draft.

        Returns:
            The texts of their faults, by request id.
        """
        faults = {}
        for first, request in rows.items():
            end = first + 1 + len(drafts.get(first, ()))
            states = {first: request} | {row: self._runtime.behind_drafts.get(row) for row in range(first + 1, end)}
            for row, state in states.items():
                if state is not None and state.fault is not None:
                    logits[row:end] = -torch.inf
                    logits[row:end, self.fault_token] = 0.0
                    faults[request.rid] = fault_message(state.fault)
                    self._report(state, state.fault, is_draft=row != first)
                    break
        return faults

    def _report(self, request: TrackedRequest, fault: ProcessorFault, *, is_draft: bool) -> None:
        """Log a fault once."""
        if request.is_reported:
            return
        request.is_reported = True
        logger.error(
            "request %s ends%s%s: %s%s",
            request.rid,
            ", if vLLM accepts its draft tokens" if is_draft else "",
            fault_details(request),
            fault,
            f"\n{fault.traceback}" if fault.traceback else "",
        )

    @contextmanager
    def editing(self, logits: torch.Tensor, running: Mapping[int, TrackedRequest]) -> Iterator[None]:
        """Enclose the calls of a step: the fault token and what vLLM's masks forbid stay forbidden.

        A request ends if its processors left no other token.
        """
        # Forbidden before the processors run: sampled by chance, it would be taken for a fault.
        logits[list(running), self.fault_token] = -torch.inf
        hard = {row: masks for row, request in running.items() if (masks := _hard_masks(request.record))}
        forbidden = logits[[*hard]].isneginf()
        yield
        if hard:
            logits[[*hard]] = logits[[*hard]].masked_fill(forbidden, -torch.inf)
        rows = [row for row in running if running[row].fault is None]
        given = logits[rows, self.fault_token].isneginf().logical_not().tolist()
        logits[rows, self.fault_token] = -torch.inf
        for row in {*hard, *(row for row, is_given in zip(rows, given, strict=True) if is_given)}:
            request = running[row]
            if request.fault is None and not logits[row].amax().isfinite():
                last = request.uses[-1].processor
                before = (*hard.get(row, ()), f"the reserved token {self.fault_token}")
                request.fault = non_finite_fault(logits[row], name=last.name, digest=last.digest, before=before)

    def repeat(self, logits: torch.Tensor, repeated: Mapping[int, TrackedRequest]) -> None:
        """End requests whose last token vLLM has dropped: it does not say which one it was."""
        for request in repeated.values():
            request.fail("vLLM samples a token again that its processors were called for")

    def defer(self, late: Mapping[int, TrackedRequest]) -> Collection[int]:
        """Return no rows: late requests end."""
        return ()

    def processors_of(self, request: TrackedRequest) -> Sequence[ProcessorRequest]:
        """See `EngineSeat.processors_of`."""
        return read_processors(request.record.extra_args, self._worker.settings.max_processor_size)

    def sampling_params_of(self, request: TrackedRequest, uses: Sequence[ProcessorUse]) -> SamplingParams:
        """See `EngineSeat.sampling_params_of`."""
        return sampling_params(request.record, uses, self._worker.model.eos_token_ids)


def _hard_masks(params: Any) -> tuple[str, ...]:
    return tuple(name for name in _HARD_MASKS if getattr(params, name))
