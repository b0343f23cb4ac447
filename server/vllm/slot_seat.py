"""The seat in vLLM's request slots, for its model runner V2.

In V2 a request keeps a *slot* of the model runner's buffers, and its row of the logits changes from step to step. A
slot may have no row in a step, and one whose prompt is only partly computed has a row whose token is discarded.

Assumptions:
* In `apply` the buffers hold every token sampled so far. Without drafts, `seq_lens_upper_bound_np` is exact.
* With drafts, the rows of a request follow each other, and `input_ids` is a row's last token: a draft token, but for
  the first row. vLLM accepts none behind a token that its processors forbid.
* In `begin`, if it is called, the buffers hold them already, and reading them waits for no step.

Guarantees:
* The history is read from the buffers, new tokens only, with one copy to the host per step.
* If its length does not match the row's position, the request ends and no processor sees it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from logitship.server.runtime.ranks import GroupRanks
from logitship.server.runtime.seat import EngineWorker
from logitship.server.runtime.tracked_request import TrackedRequest

from .extra_args import has_processors
from .settings import logger
from .vllm_seat import HOLDS_EMBEDDINGS, Drafts, VllmSeat

_STATE_LOST = "vLLM preempted it and the state of its processors was lost"
_WRONG_HISTORY = "vLLM's buffers do not hold the tokens before the one to be sampled"
_REJECTED = -1
"""vLLM's value for a draft token that it rejects in any case."""


@dataclass(eq=False)
class _SlotRequest:
    """A request in a slot, or preempted.

    Attributes:
        tracked: the request. Its prompt is empty until it is read.
        slot: its index in the buffers. It changes when the request is preempted and resumes.
        num_prompt_tokens: length of its prompt.
        prefill_len: tokens that are computed before one is sampled: the prompt, and for a request that was preempted
            its output so far.
    """

    tracked: TrackedRequest
    slot: int
    num_prompt_tokens: int
    prefill_len: int

    @property
    def num_known(self) -> int:
        """Number of its tokens that were read."""
        return len(self.tracked.prompt_token_ids) + len(self.tracked.output_token_ids)


_StepRows: TypeAlias = dict[int, tuple[_SlotRequest, int]]
"""Requests with the lengths of their histories, by row."""


class SlotSeat(VllmSeat):
    """`VllmSeat` for model runner V2.

    Args:
        worker: this process.
        req_states: vLLM's `LogitsProcRequestState`.
        has_drafts: vLLM decodes speculatively.
        max_length: see `VllmSeat`.
    """

    def __init__(
        self,
        worker: EngineWorker[GroupRanks],
        req_states: Any,
        *,
        has_drafts: bool = False,
        max_length: int = sys.maxsize,
    ) -> None:
        super().__init__(worker, max_length)
        self._req_states = req_states
        self._has_drafts = has_drafts
        self._reads = worker.processors is not None  # other ranks need no history
        self._requests: dict[str, _SlotRequest] = {}
        self._slots: dict[int, _SlotRequest] = {}
        self._added: set[str] = set()
        self._planned: _StepRows | None = None

    def add_request(self, slot: int, req_id: str, params: Any, *, holds_embeddings: bool = False) -> bool:
        """Add a request that was given a slot: a new one, or one that was preempted.

        Args:
            slot: its index in the buffers.
            req_id: its id.
            params: vLLM's `SamplingParams`.
            holds_embeddings: its prompt does, and the buffers have placeholders for them.

        Returns:
            False if it has no processors.
        """
        self._slots.pop(slot, None)
        if not has_processors(params):
            return False
        num_prompt_tokens = int(self._req_states.prompt_len.np[slot])
        prefill_len = int(self._req_states.prefill_len.np[slot])
        request = self._requests.get(req_id)
        if request is None or request.num_prompt_tokens != num_prompt_tokens or prefill_len < request.num_known:
            if request is not None:
                with self._runtime.or_fail([request.tracked]):
                    self._runtime.release([request.tracked])
            tracked = self._track(req_id, params, [], num_prompt_tokens)
            request = self._requests[req_id] = _SlotRequest(tracked, slot, num_prompt_tokens, prefill_len)
            if holds_embeddings:
                tracked.fail(HOLDS_EMBEDDINGS)
            if prefill_len > num_prompt_tokens:
                tracked.fail(_STATE_LOST)
        request.slot, request.prefill_len = slot, prefill_len
        self._slots[slot] = request
        self._added.add(req_id)
        return True

    def remove_finished(self, finished: Collection[str]) -> None:
        """Remove finished requests. Called once a step, after the new ones were added.

        Args:
            finished: request ids, with or without processors.
        """
        # An id that finished and was added again in the same step belongs to the new request.
        ids = [req_id for req_id in finished if req_id not in self._added and req_id in self._requests]
        self._added.clear()
        self._planned = None
        if not ids and not self._slots:
            return
        removed = [self._requests.pop(req_id) for req_id in ids]
        self._slots = {slot: request for slot, request in self._slots.items() if request not in removed}
        with self._runtime.or_fail(each.tracked for each in self._requests.values()):
            self._runtime.begin_step()
            self._runtime.release([request.tracked for request in removed])

    def begin(self, planned: Iterable[tuple[int, int]]) -> None:
        """Begin calls before their logits exist. Optional, after `remove_finished`.

        Args:
            planned: yields the slot of each row of the step, and the length of its sequence after it.
        """
        if not self._slots or not self._reads:
            return
        try:
            rows = self._sampled_rows(planned)
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship does not know the rows of a step: calls begin with their logits")
            return
        self._planned = rows
        with self._runtime.or_fail(_tracked(rows).values()):
            self._read_tokens(rows)
            self._runtime.begin(_tracked(rows))

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Run the processors, in place.

        Args:
            logits: [rows, vocab].
            ctx: vLLM's `LogitsContext`.
        """
        if not self._slots:
            return
        rows: _StepRows = {}
        drafts: Drafts = {}
        with self._runtime.or_fail(each.tracked for each in self._slots.values()):
            if self._has_drafts or len(logits) != len(ctx.idx_mapping_np):
                rows, drafts = self._rows_with_drafts(ctx)
            else:
                lengths = ctx.seq_lens_upper_bound_np.tolist()
                rows = self._sampled_rows(zip(ctx.idx_mapping_np.tolist(), lengths, strict=False))
        if not rows and any(each.tracked.fault is not None for each in self._slots.values()):
            rows = self._all_rows(ctx)
        if self._reads and rows != self._planned:
            with self._runtime.or_fail(_tracked(rows).values()):
                self._read_tokens(rows)
        if rows:
            self._run(logits, _tracked(rows), len(ctx.idx_mapping_np), drafts)

    def _sampled_rows(self, lengths: Iterable[tuple[int, int]]) -> _StepRows:
        """Return the rows whose token is kept. Reads no device memory.

        Args:
            lengths: slot and length of each row.
        """
        found = ((row, self._slots.get(slot), length) for row, (slot, length) in enumerate(lengths))
        return {
            row: (request, length)
            for row, request, length in found
            if request is not None and length >= request.prefill_len
        }

    def _rows_with_drafts(self, ctx: Any) -> tuple[_StepRows, Drafts]:
        """Return the first rows of requests, and their draft tokens."""
        rows: _StepRows = {}
        drafts: dict[int, list[int]] = {}
        columns = (ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.pos, ctx.input_ids)
        table = torch.stack([each.long() for each in columns], dim=1).tolist()
        first: int | None = None
        for row, (slot, depth, position, token) in enumerate(table):
            request = self._slots.get(slot)
            if depth == 0:
                first = None
                if request is not None and position + 1 >= request.prefill_len:
                    rows[row] = request, position + 1
                    # Nothing is drafted before the first token: the rows behind it are padding.
                    first = row if position >= request.prefill_len else None
            elif token == _REJECTED:
                first = None
            elif first is not None:
                drafts.setdefault(first, []).append(token)
        return rows, drafts

    def _all_rows(self, ctx: Any) -> _StepRows:
        """Return all rows of requests that have failed."""
        slots = ctx.expanded_idx_mapping.tolist()
        found = ((row, self._slots.get(slot)) for row, slot in enumerate(slots))
        return {row: (each, 0) for row, each in found if each is not None and each.tracked.fault is not None}

    def _read_tokens(self, rows: _StepRows) -> None:
        """Read the tokens that were added since the last step, and load the processors of new requests."""
        if not rows:
            return
        requests = [request for request, _ in rows.values()]
        counts = [max(0, length - request.num_known) for request, length in rows.values()]
        slots = torch.tensor([request.slot for request in requests])
        positions = [torch.arange(each.num_known, each.num_known + n) for each, n in zip(requests, counts, strict=True)]
        token_slots = slots.repeat_interleave(torch.tensor(counts))
        indices = torch.stack((token_slots, torch.cat(positions))).to(self._req_states.device)
        new = self._req_states.all_token_ids.gpu[indices[0], indices[1]]
        totals = self._req_states.total_len.gpu[slots.to(self._req_states.device)]
        read = torch.cat((totals, new)).tolist()
        start = len(requests)
        for (request, length), total, count in zip(rows.values(), read, counts, strict=False):
            if total == length >= request.num_known:
                self._take_tokens(request, read[start : start + count])
            else:
                request.tracked.fail(_WRONG_HISTORY)
            start += count

    def _take_tokens(self, request: _SlotRequest, new: list[int]) -> None:
        tracked = request.tracked
        missing = request.num_prompt_tokens - len(tracked.prompt_token_ids)
        tracked.prompt_token_ids += new[:missing]
        self._append(tracked, new[missing:])
        if tracked.fault is None and tracked.params is None:
            self._runtime.load(tracked)


def _tracked(rows: Mapping[int, tuple[_SlotRequest, int]]) -> dict[int, TrackedRequest]:
    return {row: request.tracked for row, (request, _) in rows.items()}
