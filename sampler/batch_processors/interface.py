"""The interface of batch processors (contract 3): vLLM's V1 contract and nothing else.

The *persistent batch* keeps each request at a fixed row from step to step. A `BatchUpdate` lists the changes since the
last step, and a batch processor applies them to its per-row state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

    from logitship.sampler.sampling_params import SamplingParams


class MoveDirectionality(Enum):
    """Direction of a `MovedRequest`."""

    UNIDIRECTIONAL = auto()
    """The request at row 1 moves to row 2, which was free; row 1 is free afterwards."""
    SWAP = auto()
    """The requests at rows 1 and 2 are swapped."""


RemovedRequest: TypeAlias = int
"""A row that was freed and not filled again in the same step."""

AddedRequest: TypeAlias = "tuple[int, SamplingParams, list[int] | None, list[int]]"
"""(row, sampling params, prompt token ids, output token ids). The last is a live reference: it grows."""

MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]
"""(row 1, row 2, direction)."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of the persistent batch since the last step.

    Process `removed`, then `added`, then `moved`. No row is both in `removed` and in `added`; a row in `added` may
    replace the request that held it before.
    """

    batch_size: int
    """Number of requests in the batch after the update."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """A batch processor: edits the logits of all rows of the batch at once."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Validate a request's parameters at admission.

        Raises:
            ValueError: invalid parameters; the request is refused with status 400 and this message.
        """
        return None

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Edit `logits`, float32 [rows, vocab], in place or not, and return the result in the same shape."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if `apply` never changes a row's most likely token; greedy rows then skip it."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch. Called once a step before `apply`; None if no row changed."""
        raise NotImplementedError
