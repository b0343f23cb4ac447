"""vLLM's interface for batch processors of its model runner V2: each request keeps a slot while it runs.

Names, shapes and dtypes are those of vLLM 0.33 (`vllm.v1.worker.gpu.sample.logits_processor`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from logitship.sampler.sampling_params import SamplingParams

    from .slot_tensors import SlotTensor


@dataclass(frozen=True)
class LogitsProcRequestState:
    """State of the request in each slot, to be read only; the tensors change from step to step.

    Attributes:
        device: of the logits and of the `gpu` side of the tensors.
        max_num_reqs: number of slots.
        vocab_size: number of columns of the logits.
        all_token_ids: int32 [slots, maximum length]: the prompt and the output, valid up to `total_len`.
        prompt_len: int32 [slots]: tokens of the prompt.
        prefill_len: int32 [slots]: tokens when the request was added, which include output if it was preempted.
        total_len: int32 [slots]: tokens of prompt and output.
    """

    device: torch.device
    max_num_reqs: int
    vocab_size: int
    all_token_ids: SlotTensor
    prompt_len: SlotTensor
    prefill_len: SlotTensor
    total_len: SlotTensor


@dataclass(frozen=True)
class LogitsContext:
    """Layout of the logits of a call: the request of each row. There is one row for each request.

    Attributes:
        expanded_idx_mapping: int64 [rows]: slot of each row, on the device.
        idx_mapping: int64 [requests]: the same.
        idx_mapping_np: intp [requests]: the same on the CPU.
        expanded_local_pos: int32 [rows]: place of a row among those of its request: 0.
        input_ids: int32 [rows]: last token of each row's sequence.
        pos: int64 [rows]: place of that token in the sequence.
        seq_lens_upper_bound_np: int32 [requests]: tokens of each sequence, on the CPU.
    """

    expanded_idx_mapping: torch.Tensor
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    expanded_local_pos: torch.Tensor
    input_ids: torch.Tensor
    pos: torch.Tensor
    seq_lens_upper_bound_np: np.ndarray


class SlotLogitsProcessor(ABC):
    """A batch processor for model runner V2, where its name is `LogitsProcessor`.

    It runs after the penalties and before the temperature.
    """

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState) -> None:  # noqa: B027
        """Keep what does not change: `req_states` is the same object in all steps."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Validate a request's parameters at admission.

        Raises:
            ValueError: invalid parameters; the request is refused with status 400 and this message.
        """

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Replace the state of a slot by that of a new request. Return False if its logits are not edited."""
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027
        """Copy to the device what `add_request` has prepared. Called once a step, before `apply`."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place or not, and return the result in the same shape.

        Called with the rows of all requests, also of those for which `add_request` returned False.
        """
        raise NotImplementedError
