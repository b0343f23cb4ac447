"""vLLM's request slots, for its model runner V2, as the persistent batch of V1 that `ShippedBatch` follows.

Under V2 a request keeps a *slot* of the model runner's buffers, and its row of the logits is another one in each step.
A slot may have no row in a step, and one whose prompt is only partly computed has a row whose token is thrown away.

Assumptions:
* vLLM samples one token a step and request: no speculative decoding.
* In `apply` the buffers hold every token that was drawn before, and `seq_lens_upper_bound_np` is exact.

Guarantees:
* The history is read from the buffers, new tokens only, with one copy to the host a step.
* Where its length is not that of the row's history, the request ends: no processor sees it.
* Nothing is raised: an exception would be the end of vLLM's engine.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from logitship.sampler.batch_processors.interface import BatchUpdate

from .extra_args import has_processors
from .log import logger
from .slot_requests import SlotRequest, SlotRequests
from .tracked_request import INTERNAL_ERROR

_STATE_IS_LOST = "vLLM put it aside and the state of its processors was lost"
_NOT_ITS_HISTORY = "vLLM's buffers do not hold the tokens that came before the one to be drawn"
_SEVERAL_ROWS = "vLLM draws several tokens a step, which processors cannot follow"


class Batch(Protocol):
    """What follows the rows: `ShippedBatch`."""

    def update_state(self, update: BatchUpdate | None) -> None:
        """Requests came or went."""
        ...

    def end(self, req_id: str, reason: str) -> None:
        """End a request that is in the batch."""
        ...

    def apply(self, logits: torch.Tensor) -> None:
        """Edit the logits of all rows."""
        ...


class SlotBatch:
    """See the module's text.

    Args:
        req_states: vLLM's `LogitsProcRequestState`.
        requests: shared with `batch`.
        batch: runs the processors.
        reads: False on ranks that run none and need no history.
    """

    def __init__(self, req_states: Any, requests: SlotRequests, batch: Batch, *, reads: bool) -> None:
        self._req_states = req_states
        self._requests = requests
        self._batch = batch
        self._reads = reads
        self._slots: dict[int, SlotRequest] = {}
        self._rows: dict[int, SlotRequest] = {}
        self._came: set[str] = set()

    def add_request(self, slot: int, req_id: str, params: Any) -> bool:
        """A request got a slot: a new one, or one that was put aside.

        Args:
            params: vLLM's `SamplingParams`.

        Returns:
            Whether it carries processors.
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
                request.trouble = _STATE_IS_LOST
            self._requests.add(request)
        else:
            request.slot, request.prefill_len = slot, prefill_len
        self._slots[slot] = request
        self._came.add(req_id)
        return True

    def forget(self, finished: Collection[str]) -> None:
        """Let go of requests that ended, once a step, after those that came.

        Args:
            finished: ids, those that carry nothing among them.
        """
        # An id that ended and came again in the same step is a new request by now.
        gone = {self._requests.remove(req_id) for req_id in finished if req_id not in self._came}
        self._came.clear()
        gone.discard(None)
        if not gone:
            return
        self._slots = {slot: request for slot, request in self._slots.items() if request not in gone}
        self._place({row: request for row, request in self._rows.items() if request not in gone})

    def apply(self, logits: torch.Tensor, ctx: Any) -> None:
        """Run the processors, in place.

        Args:
            logits: float32 [rows, vocab].
            ctx: vLLM's `LogitsContext`.
        """
        if not self._slots and not self._rows:
            return
        rows, lengths = self._rows_of(ctx)
        if len(logits) != len(ctx.idx_mapping_np):
            rows = self._all_rows_of(ctx)
            for request in rows.values():
                request.trouble = _SEVERAL_ROWS
        elif rows and self._reads:
            try:
                self._read(rows, lengths)
            except Exception:  # noqa: BLE001  # whatever it is, vLLM must not see it
                logger.exception("logitship cannot read vLLM's buffers: all requests with processors end")
                for request in rows.values():
                    request.trouble = INTERNAL_ERROR
        self._place(rows)
        for request in rows.values():
            if request.trouble is not None:
                self._batch.end(request.req_id, request.trouble)
        if rows:
            self._batch.apply(logits)

    def _rows_of(self, ctx: Any) -> tuple[dict[int, SlotRequest], dict[int, int]]:
        """The rows whose token counts, and the lengths of their histories. On the host alone: nothing waits for it."""
        rows: dict[int, SlotRequest] = {}
        lengths: dict[int, int] = {}
        slots = ctx.idx_mapping_np.tolist()
        padded = ctx.seq_lens_upper_bound_np.tolist()
        for row, (slot, length) in enumerate(zip(slots, padded[: len(slots)], strict=True)):
            request = self._slots.get(slot)
            if request is not None and length >= request.prefill_len:
                rows[row], lengths[row] = request, length
        return rows, lengths

    def _all_rows_of(self, ctx: Any) -> dict[int, SlotRequest]:
        """The rows of requests with processors, where vLLM computes another number of rows than of requests."""
        slots = enumerate(ctx.expanded_idx_mapping.tolist())
        return {row: self._slots[slot] for row, slot in slots if slot in self._slots}

    def _read(self, rows: Mapping[int, SlotRequest], lengths: Mapping[int, int]) -> None:
        """Take over the tokens that came since the last step."""
        requests = list(rows.values())
        counts = [max(0, lengths[row] - request.num_known) for row, request in rows.items()]
        slots = torch.tensor([request.slot for request in requests])
        positions = [torch.arange(each.num_known, each.num_known + n) for each, n in zip(requests, counts, strict=True)]
        token_slots = slots.repeat_interleave(torch.tensor(counts))
        where = torch.stack((token_slots, torch.cat(positions))).to(self._req_states.device)
        new = self._req_states.all_token_ids.gpu[where[0], where[1]]
        totals = self._req_states.total_len.gpu[slots.to(self._req_states.device)]
        read = torch.cat((totals, new)).tolist()
        start = len(requests)
        for request, total, length, count in zip(requests, read, lengths.values(), counts, strict=False):
            if total == length >= request.num_known:
                request.take(read[start : start + count])
            else:
                request.trouble = request.trouble or _NOT_ITS_HISTORY
            start += count

    def _place(self, rows: dict[int, SlotRequest]) -> None:
        """Tell the batch who has which row now."""
        removed = [row for row in self._rows if row not in rows]
        came = [(row, request) for row, request in rows.items() if self._rows.get(row) is not request]
        self._rows = rows
        added = [(row, each.params, each.prompt_token_ids, each.output_token_ids) for row, each in came]
        update = BatchUpdate(len(rows), removed, added, []) if removed or added else None
        self._batch.update_state(update)
