"""Fault isolation for installed batch processors: a failure ends only the requests that cause it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from logitship.client.errors import LogitshipError
from logitship.sampler.sampling_params import SamplingParams

from .interface import BatchUpdate, LogitsProcessor
from .logits_processors import BatchRows, apply_to, take_faults

logger = logging.getLogger(__name__)


class BatchProcessorFault(LogitshipError):
    """An installed batch processor failed on this request's parameters or history."""

    def __init__(self, name: str, error: Exception) -> None:
        super().__init__(
            f"the installed logits processor {name} failed on this request: {type(error).__name__}: {error}"
        )


class GuardedProcessor(LogitsProcessor):
    """Wraps a batch processor so that its failures end only the requests that cause them.

    A batch processor sees all rows at once, and its exception does not tell which row caused it: one request with
    unexpected parameters would end all of them. So this class keeps a copy of the logits during each call. When the
    processor raises, its rows are removed and the requests added back one at a time: those that make it raise again are
    at fault. The others continue with the copied logits, edited again. Output lists are live, so adding a request again
    restores its whole history.

    Args:
        processor: the processor; called only through this object from now on.
        name: name of the processor, for people.

    Attributes:
        wrapped: the processor.
    """

    def __init__(self, processor: LogitsProcessor, name: str) -> None:
        self.wrapped = processor
        self._name = name
        self._requests: BatchRows[_Request] = BatchRows(_request)
        self._size = self._most_rows = 0
        self._faults: dict[int, LogitshipError] = {}

    def is_argmax_invariant(self) -> bool:
        """Return the processor's answer."""
        return self.wrapped.is_argmax_invariant()

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Pass the changes of the batch to the processor."""
        self._requests.update(batch_update)
        if batch_update is not None:
            self._size = batch_update.batch_size
            self._most_rows = max(self._most_rows, self._size)
        try:
            self.wrapped.update_state(batch_update)
        # Whatever the processor raises, most requests can continue.
        except Exception as error:  # noqa: BLE001  # boundary: third-party code
            # Some processors read the tokens of a request only in the updates after its addition.
            self._recover(error, lambda: self.wrapped.update_state(None))
            self.wrapped.update_state(None)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run the processor on float32 [rows, vocab]. Rows in `take_faults` are unchanged.

        Raises:
            Exception: the processor's exception, if no single request causes it.
        """
        return self._apply(logits, None)

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run the processor on some rows, see `SpeculativeLogitsProcessor`."""
        return self._apply(logits, num_draft_tokens)

    def _apply(self, logits: torch.Tensor, num_draft_tokens: Sequence[int] | None) -> torch.Tensor:
        before = logits.clone()

        def run(logits: torch.Tensor) -> torch.Tensor:
            return self._checked(apply_to(self.wrapped, logits, num_draft_tokens), before)

        try:
            return run(logits)
        except Exception as error:  # noqa: BLE001  # boundary: third-party code
            self._recover(error, lambda: run(before.clone()))
            return run(logits.copy_(before))

    def take_faults(self) -> list[tuple[int, LogitshipError]]:
        """Return (row, fault) of the rows on which the processor failed since the last call."""
        faults = dict(take_faults([self.wrapped])) | self._faults
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
        """Find the requests on which the processor fails, and restore it with the others.

        Args:
            error: the exception that it raised.
            attempt: a call that fails if the request is at fault. Adding a request may also fail by itself.
        """
        logger.error("the installed logits processor %s failed; looking for the request", self._name, exc_info=error)
        self._replace_rows({})
        culprits: dict[int, LogitshipError] = {}
        for row, request in sorted(self._requests.items()):
            try:
                self.wrapped.update_state(BatchUpdate(self._size, [], [(row, *request)], []))
                attempt()
            except Exception as again:  # noqa: BLE001  # boundary: third-party code
                culprits[row] = BatchProcessorFault(self._name, again)
            self.wrapped.update_state(BatchUpdate(self._size, [row], [], []))
        if not culprits:
            raise error
        self._faults |= culprits
        self._replace_rows({row: request for row, request in self._requests.items() if row not in culprits})

    def _replace_rows(self, requests: dict[int, _Request]) -> None:
        # Removes every row that was ever in use: it is unknown how much of the failed update was applied.
        self.wrapped.update_state(BatchUpdate(self._size, list(reversed(range(self._most_rows))), [], []))
        added = [(row, *request) for row, request in sorted(requests.items())]
        if added:
            self.wrapped.update_state(BatchUpdate(self._size, [], added, []))


_Request = tuple[SamplingParams, list[int] | None, list[int]]
"""`AddedRequest` without the row."""


def _request(params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]) -> _Request:
    return params, prompt_token_ids, output_token_ids
