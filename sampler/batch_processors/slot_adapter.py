"""Runs a batch processor of vLLM's model runner V2 on the persistent batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from logitship.sampler.sampling_params import SamplingParams

from .interface import BatchUpdate
from .logits_processors import BatchRows, PenalizedLogitsProcessor
from .slot_interface import LogitsContext, LogitsProcRequestState, SlotLogitsProcessor
from .slot_tensors import SlotTensor


@dataclass
class _Request:
    """A request of the batch.

    Attributes:
        params: its sampling parameters.
        prompt: its prompt.
        output: its output; grows.
        slot: its slot; -1 until it gets one.
        num_written: how many of its tokens `all_token_ids` has.
    """

    params: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    slot: int = -1
    num_written: int = 0

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return len(self.prompt) + len(self.output)

    def tokens_from(self, start: int) -> Sequence[int]:
        """Return its tokens from a place on."""
        num_prompt = len(self.prompt)
        return self.output[start - num_prompt :] if start >= num_prompt else [*self.prompt[start:], *self.output]


class SlotAdapter(PenalizedLogitsProcessor):
    """Gives each request a slot that it keeps while its row moves, and passes the processor the slot of each row.

    Under speculative decoding, drafts are verified one position at a time: the tokens before a position are output by
    then, and the processor is called for the requests that still have a draft.

    Args:
        cls: the processor's class.
        vllm_config: vLLM's configuration; `scheduler_config.max_num_seqs` is the number of slots.
        device: of the logits.
        args: additional positional arguments of the constructor.
        kwargs: additional keyword arguments.
    """

    def __init__(
        self, cls: type[SlotLogitsProcessor], vllm_config: Any, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        slots, length = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self._states = LogitsProcRequestState(
            device=device,
            max_num_reqs=slots,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            all_token_ids=SlotTensor((slots, length), device),
            prompt_len=SlotTensor((slots,), device),
            prefill_len=SlotTensor((slots,), device),
            total_len=SlotTensor((slots,), device),
        )
        self._requests: BatchRows[_Request] = BatchRows(_request)
        self._processor = cls(vllm_config, self._states, *args, **kwargs)

    def is_argmax_invariant(self) -> bool:
        """Return False: the interface does not say."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Give new requests a slot, and write the tokens that were added since the last step."""
        self._requests.update(batch_update)
        new = [request for request in self._requests.values() if request.slot < 0]
        taken = {request.slot for request in self._requests.values()}
        free = (slot for slot in range(self._states.max_num_reqs) if slot not in taken)
        for request in new:
            request.slot = next(free)
        self._write_tokens()
        if new:
            slots = _slots(new)
            self._states.prompt_len.write((slots,), [len(request.prompt) for request in new])
            self._states.prefill_len.write((slots,), [request.length for request in new])
        for request in new:
            self._processor.add_request(request.slot, request.params)
        self._processor.apply_staged_writes()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run the processor on float32 [rows, vocab]."""
        return self._apply(logits, range(len(logits)))

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run the processor on some rows, see `SpeculativeLogitsProcessor`."""
        return self._apply(logits, [row for row, number in enumerate(num_draft_tokens) if number])

    def _apply(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Run the processor on logits whose rows are those of the batch."""
        # `GuardedProcessor` removes the rows of requests on which it failed.
        present = [place for place, row in enumerate(rows) if row in self._requests]
        if not present:
            return logits
        self._write_tokens()
        context = self._context(_slots([self._requests[rows[place]] for place in present]))
        if len(present) == len(rows):
            return self._processor.apply(logits, context)
        index = torch.tensor(present, device=logits.device)
        return logits.index_copy(0, index, self._processor.apply(logits[index], context))

    def _context(self, slots: np.ndarray) -> LogitsContext:
        lengths = self._states.total_len.np[slots]
        device = self._states.device
        on_device = torch.from_numpy(slots).to(device=device, dtype=torch.int64)
        last = self._states.all_token_ids.np[slots, np.maximum(lengths - 1, 0)]
        return LogitsContext(
            expanded_idx_mapping=on_device,
            idx_mapping=on_device,
            idx_mapping_np=slots,
            expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32, device=device),
            input_ids=torch.from_numpy(last).to(device),
            pos=torch.from_numpy(lengths - 1).to(device=device, dtype=torch.int64),
            seq_lens_upper_bound_np=lengths,
        )

    def _write_tokens(self) -> None:
        """Write the tokens that were added since the last call."""
        requests = [request for request in self._requests.values() if request.num_written < request.length]
        if not requests:
            return
        new = [request.tokens_from(request.num_written) for request in requests]
        columns = [np.arange(request.num_written, request.length) for request in requests]
        slots = _slots(requests)
        places = np.repeat(slots, [len(tokens) for tokens in new]), np.concatenate(columns)
        self._states.all_token_ids.write(places, list(chain.from_iterable(new)))
        self._states.total_len.write((slots,), [request.length for request in requests])
        for request in requests:
            request.num_written = request.length


def _slots(requests: Sequence[_Request]) -> np.ndarray:
    return np.array([request.slot for request in requests], dtype=np.intp)


def _request(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Request:
    return _Request(params, prompt_token_ids or [], output_token_ids)
