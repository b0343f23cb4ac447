"""vLLM's request slots, for its model runner V2, as the persistent batch of V1 that `ShippedBatch` follows.

In V2 a request keeps a *slot* of the model runner's buffers, and its row of the logits changes from step to step. A
slot may have no row in a step, and one whose prompt is only partly computed has a row whose token is discarded.

Assumptions:
* In `apply` the buffers hold every token sampled so far. Without drafts, `seq_lens_upper_bound_np` is exact.
* With drafts, the rows of a request follow each other, and `input_ids` is a row's last token: a draft token, but for
  the first row.
* In `begin`, if it is called, the buffers hold them already, and reading them waits for no step.

Guarantees:
* The history is read from the buffers, new tokens only, with one copy to the host per step.
* If its length does not match the row's position, the request ends and no processor sees it.
* Nothing is raised: an exception would stop vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from logitship.sampler.batch_processors.interface import BatchUpdate

from .extra_args import has_processors
from .log import logger
from .shipped_batch import Drafts
from .slot_requests import SlotRequest, SlotRequests
from .tracked_request import HOLDS_EMBEDDINGS, INTERNAL_ERROR

_STATE_LOST = "vLLM preempted it and the state of its processors was lost"
_WRONG_HISTORY = "vLLM's buffers do not hold the tokens before the one to be sampled"

StepRows: TypeAlias = tuple[dict[int, SlotRequest], dict[int, int]]
"""Requests by row, and the lengths of their histories by row."""
_REJECTED = -1
"""vLLM's value for a draft token that it rejects in any case."""


class RowBatch(Protocol):
    """The batch of rows that `SlotBatch` drives: `ShippedBatch`."""

    def update_state(self, update: BatchUpdate | None) -> None:
        """Apply the changes of the rows."""
        ...

    def end(self, req_id: str, reason: str) -> None:
        """End a request that is in the batch."""
        ...

    def begin(self) -> None:
        """Begin calls before the logits exist."""
        ...

    def apply(self, logits: torch.Tensor, drafts: Drafts) -> None:
        """Edit the logits of all rows, and of those behind draft tokens."""
        ...


class SlotBatch:
    """Gives the slots of each step to a batch of rows.

    Args:
        req_states: vLLM's `LogitsProcRequestState`.
        requests: shared with `batch`.
        batch: runs the processors.
        reads: False on ranks that run no processors and need no history.
        has_drafts: vLLM decodes speculatively.
    """

    def __init__(
        self, req_states: Any, requests: SlotRequests, batch: RowBatch, *, reads: bool, has_drafts: bool = False
    ) -> None:
        self._req_states = req_states
        self._requests = requests
        self._batch = batch
        self._reads = reads
        self._has_drafts = has_drafts
        self._slots: dict[int, SlotRequest] = {}
        self._rows: dict[int, SlotRequest] = {}
        self._added: set[str] = set()
        self._planned: StepRows | None = None

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
        request = self._requests.find(req_id)
        if request is None or request.num_prompt_tokens != num_prompt_tokens or prefill_len < request.num_known:
            request = SlotRequest(req_id, params, slot, num_prompt_tokens, prefill_len)
            if prefill_len > num_prompt_tokens:
                request.error = _STATE_LOST
            if holds_embeddings:
                request.error = HOLDS_EMBEDDINGS
            self._requests.add(request)
        else:
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
        removed = {self._requests.remove(req_id) for req_id in finished if req_id not in self._added}
        self._added.clear()
        removed.discard(None)
        if not removed:
            return
        self._slots = {slot: request for slot, request in self._slots.items() if request not in removed}
        self._set_rows({row: request for row, request in self._rows.items() if request not in removed})

    def begin(self, planned: Iterable[tuple[int, int]]) -> None:
        """Begin calls before their logits exist. Optional, after `remove_finished`.

        Args:
            planned: yields the slot of each row of the step, and the length of its sequence after it.
        """
        self._planned = None
        if not self._slots or not self._reads:
            return
        try:
            rows, lengths = self._sampled_rows(planned)
        except Exception:  # noqa: BLE001  # boundary: vLLM
            logger.exception("logitship does not know the rows of a step: calls begin with their logits")
            return
        self._planned = rows, lengths
        self._update_rows(rows, lengths)
        self._batch.begin()

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Run the processors, in place.

        Args:
            logits: float32 [rows, vocab].
            ctx: vLLM's `LogitsContext`.
        """
        if not self._slots and not self._rows:
            return
        drafts: Drafts = {}
        if self._has_drafts or len(logits) != len(ctx.idx_mapping_np):
            try:
                rows, lengths, drafts = self._rows_with_drafts(ctx)
            except Exception:  # noqa: BLE001  # boundary: vLLM
                logger.exception("logitship does not know the rows of a step: all requests with processors end")
                rows = self._fail_all(ctx)
                self._set_rows(rows)
            else:
                self._update_rows(rows, lengths)
        else:
            padded = ctx.seq_lens_upper_bound_np.tolist()
            rows, lengths = self._sampled_rows(zip(ctx.idx_mapping_np.tolist(), padded, strict=False))
            if (rows, lengths) != self._planned:
                self._update_rows(rows, lengths)
        self._planned = None
        if rows:
            self._batch.apply(logits, drafts)

    def _update_rows(self, rows: dict[int, SlotRequest], lengths: Mapping[int, int]) -> None:
        """Bring the histories of the step's rows up to date, and pass the rows to the batch."""
        if rows and self._reads:
            try:
                self._read_tokens(rows, lengths)
            except Exception:  # noqa: BLE001  # boundary: vLLM
                logger.exception("logitship cannot read vLLM's buffers: all requests with processors end")
                for request in rows.values():
                    request.error = INTERNAL_ERROR
        self._set_rows(rows)

    def _sampled_rows(self, lengths: Iterable[tuple[int, int]]) -> StepRows:
        """Return the rows whose token is kept, and the lengths of their histories. Reads no device memory.

        Args:
            lengths: slot and length of each row.
        """
        rows: dict[int, SlotRequest] = {}
        sampled: dict[int, int] = {}
        for row, (slot, length) in enumerate(lengths):
            request = self._slots.get(slot)
            if request is not None and length >= request.prefill_len:
                rows[row], sampled[row] = request, length
        return rows, sampled

    def _rows_with_drafts(self, ctx: Any) -> tuple[dict[int, SlotRequest], dict[int, int], Drafts]:
        """Return the first rows of requests, the lengths of their histories, and the rows behind draft tokens."""
        rows: dict[int, SlotRequest] = {}
        lengths: dict[int, int] = {}
        drafts: dict[int, list[tuple[int, int]]] = {}
        columns = (ctx.expanded_idx_mapping, ctx.expanded_local_pos, ctx.pos, ctx.input_ids)
        table = torch.stack([each.long() for each in columns], dim=1).tolist()
        first: int | None = None
        for row, (slot, depth, position, token) in enumerate(table):
            request = self._slots.get(slot)
            if depth == 0:
                first = None
                if request is not None and position + 1 >= request.prefill_len:
                    rows[row], lengths[row] = request, position + 1
                    # Nothing is drafted before the first token: the rows behind it are padding.
                    first = row if position >= request.prefill_len else None
            elif token == _REJECTED:
                first = None
            elif first is not None:
                drafts.setdefault(first, []).append((row, token))
        return rows, lengths, drafts

    def _fail_all(self, ctx: Any) -> dict[int, SlotRequest]:
        """Fail the requests with processors, and return all their rows."""
        slots = enumerate(ctx.expanded_idx_mapping.tolist())
        rows = {row: self._slots[slot] for row, slot in slots if slot in self._slots}
        for request in rows.values():
            request.error = INTERNAL_ERROR
        return rows

    def _read_tokens(self, rows: Mapping[int, SlotRequest], lengths: Mapping[int, int]) -> None:
        """Read the tokens that were added since the last step."""
        requests = list(rows.values())
        counts = [max(0, lengths[row] - request.num_known) for row, request in rows.items()]
        slots = torch.tensor([request.slot for request in requests])
        positions = [torch.arange(each.num_known, each.num_known + n) for each, n in zip(requests, counts, strict=True)]
        token_slots = slots.repeat_interleave(torch.tensor(counts))
        indices = torch.stack((token_slots, torch.cat(positions))).to(self._req_states.device)
        new = self._req_states.all_token_ids.gpu[indices[0], indices[1]]
        totals = self._req_states.total_len.gpu[slots.to(self._req_states.device)]
        read = torch.cat((totals, new)).tolist()
        start = len(requests)
        for request, total, length, count in zip(requests, read, lengths.values(), counts, strict=False):
            if total == length >= request.num_known:
                request.append(read[start : start + count])
            else:
                request.error = request.error or _WRONG_HISTORY
            start += count

    def _set_rows(self, rows: dict[int, SlotRequest]) -> None:
        """Pass the changes of the rows to the batch, and end the requests with an error."""
        removed = [row for row in self._rows if row not in rows]
        new = [(row, request) for row, request in rows.items() if self._rows.get(row) is not request]
        self._rows = rows
        added = [(row, each.params, each.prompt_token_ids, each.output_token_ids) for row, each in new]
        update = BatchUpdate(len(rows), removed, added, []) if removed or added else None
        self._batch.update_state(update)
        for request in rows.values():
            if request.error is not None:
                self._batch.end(request.req_id, request.error)
