"""Keeps what goes wrong in an operator's batch processor with the request that made it go wrong."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from logitship.client.errors import LogitshipError
from logitship.sampler.sampling_params import SamplingParams

from .batch_rows import BatchRows
from .interface import BatchUpdate, LogitsProcessor
from .logits_processors import apply_to, take_faults

logger = logging.getLogger(__name__)


class BatchProcessorFault(LogitshipError):
    """A batch processor that the operator installed fails on this request's parameters or history."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"the installed logits processor {name} failed on this request: {type(error).__name__}: {error}"
        )


class GuardedProcessor(LogitsProcessor):
    """A batch processor that sees all requests at once, and whose failures nevertheless end only some.

    vLLM's contract says which rows a processor gets, not which row made it raise: a request with parameters that it
    does not expect would end everybody's. So this keeps a copy of the logits while it works. When it raises, it is told
    to forget all rows, and then of the requests one by one: those that make it raise again are at fault, the others go
    on with the copied logits, edited anew. A request's output list is live, so that telling it again tells it all.

    Args:
        processor: is only called through this object from now on.
        name: for people.
    """

    def __init__(self, processor: LogitsProcessor, name: str) -> None:
        self._processor = processor
        self._name = name
        self._requests: BatchRows[_Request] = BatchRows(_request)
        self._size = self._most_rows = 0
        self._faults: dict[int, LogitshipError] = {}

    def is_argmax_invariant(self) -> bool:
        """What the processor says."""
        return self._processor.is_argmax_invariant()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Tell the processor what changed."""
        self._requests.update(batch_update)
        if batch_update is not None:
            self._size = batch_update.batch_size
            self._most_rows = max(self._most_rows, self._size)
        try:
            self._processor.update_state(batch_update)
        except Exception as error:  # noqa: BLE001  # whatever it raises, most requests can go on
            self._recover(error, lambda: None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run the processor on float32 [rows, vocab]. Rows in `take_faults` are as they were.

        Raises:
            Exception: whatever it raised, if no single request is the reason.
        """
        return self._apply(logits, None)

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """The same for some rows, see `SpeculativeLogitsProcessor`."""
        return self._apply(logits, num_draft_tokens)

    def _apply(self, logits: torch.Tensor, num_draft_tokens: Sequence[int] | None) -> torch.Tensor:
        before = logits.clone()

        def run(logits: torch.Tensor) -> torch.Tensor:
            return self._checked(apply_to(self._processor, logits, num_draft_tokens), before)

        try:
            return run(logits)
        except Exception as error:  # noqa: BLE001
            self._recover(error, lambda: run(before.clone()))
            return run(logits.copy_(before))

    def take_faults(self) -> list[tuple[int, LogitshipError]]:
        """The rows on which it failed since the last call, each with its fault."""
        faults = dict(take_faults([self._processor])) | self._faults
        self._faults = {}
        return sorted(faults.items(), key=lambda fault: fault[0])

    def _checked(self, result: object, before: torch.Tensor) -> torch.Tensor:
        if not isinstance(result, torch.Tensor) or result.shape != before.shape or result.device != before.device:
            shown = (
                f"{list(result.shape)} on {result.device}"
                if isinstance(result, torch.Tensor)
                else type(result).__name__
            )
            raise TypeError(f"apply returned {shown}, expected {list(before.shape)} on {before.device}")
        return result.to(before.dtype)

    def _recover(self, error: Exception, attempt: Callable[[], object]) -> None:
        """Find the requests on which it fails, and leave it with the others.

        Args:
            attempt: what failed, to be tried with each request; telling of a request may fail by itself.
        """
        logger.error("the installed logits processor %s failed; looking for the request", self._name, exc_info=error)
        self._tell_anew({})
        culprits: dict[int, LogitshipError] = {}
        for row, request in sorted(self._requests.items()):
            try:
                self._processor.update_state(BatchUpdate(self._size, [], [(row, *request)], []))
                attempt()
            except Exception as again:  # noqa: BLE001
                culprits[row] = BatchProcessorFault(self._name, again)
            self._processor.update_state(BatchUpdate(self._size, [row], [], []))
        if not culprits:
            raise error
        self._faults |= culprits
        self._tell_anew({row: request for row, request in self._requests.items() if row not in culprits})

    def _tell_anew(self, requests: dict[int, _Request]) -> None:
        # Every row there ever was: nobody knows how far it came with the update that it failed on.
        self._processor.update_state(BatchUpdate(self._size, list(reversed(range(self._most_rows))), [], []))
        added = [(row, *request) for row, request in sorted(requests.items())]
        if added:
            self._processor.update_state(BatchUpdate(self._size, [], added, []))


_Request = tuple[SamplingParams, list[int] | None, list[int]]
"""Of `AddedRequest`, all but the row."""


def _request(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Request:
    return params, prompt_token_ids, output_token_ids
