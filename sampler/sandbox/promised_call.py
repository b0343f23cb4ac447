"""A call of a processor in its sandbox, before its logits exist."""

from __future__ import annotations

from collections.abc import Callable

import torch

from logitship.sampler.author_code.calls import call, exception_fault, take_over
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.promised_logits.promise import Promise
from logitship.sampler.promised_logits.promised_memory import RecentCalls


class PromisedCall:
    """The promised logits of a call, and their edits.

    Args:
        logits: float32 [rows, vocab], the shared memory; the rows are there once `receive` has returned.
        receive: waits for the rows.
        recent: objects of earlier calls, which are reused.

    Attributes:
        is_received: True if the rows were received, because the processor used their values. They are then edited in
            place, as in a call without promises.
        edits: edits of a call that used no value; None if the shared memory has the result.
        dense_reason: why later calls of this processor need their logits from the beginning; "" if they do not.
    """

    def __init__(self, logits: torch.Tensor, receive: Callable[[], None], recent: RecentCalls) -> None:
        self._logits = logits
        self._receive = receive
        self._recent = recent
        self.is_received = False
        self.edits: EditLog | None = None
        self.dense_reason = ""

    def edit(self, function: Callable[[torch.Tensor], object], *, name: str, shipped_class: type) -> None:
        """Call an author's function on the promised logits. See `author_code.calls.edit`.

        Raises:
            ProcessorFault: the function raised, or did not return a float tensor of the right shape.
        """
        try:
            self._edit(function)
        except BaseException as error:  # noqa: BLE001  # boundary: author code
            fault = exception_fault(error, name=name, shipped_class=shipped_class, in_sandbox=True)
        else:
            return
        raise fault  # outside the except block, so that it does not reference the author's exception

    def _edit(self, function: Callable[[torch.Tensor], object]) -> None:
        num_rows, vocab_size = self._logits.shape
        promise = Promise.begin(num_rows, vocab_size, self._fetch, self._recent)
        try:
            result = promise.conclude(call(function, promise.take()))
        except BaseException:  # cleanup, then re-raised
            promise.end()
            raise
        if promise.is_kept:
            self.dense_reason = "it keeps a reference to its logits"
        if isinstance(result, EditLog):
            self.edits = result
        else:
            take_over(result, self._logits)

    def _fetch(self) -> torch.Tensor:
        self._receive()
        self.is_received = True
        # Another tensor on the same memory: changes of its shape, dtype or gradient do not affect `logits`.
        return self._logits.detach()
