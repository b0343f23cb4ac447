"""Request-level callables as a batch processor: vLLM's `AdapterLogitsProcessor`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.callable_factory import CallableFactory
from logitship.sampler.author_code.calls import call, edit, exception_fault, non_finite_fault
from logitship.sampler.author_code.request_callable import BoundCallable, RequestLogitsProcessor, bind
from logitship.sampler.sampling_params import SamplingParams

from .interface import BatchUpdate, LogitsProcessor
from .logits_processors import BatchRows, rows_of_drafts

__all__ = ["AdapterLogitsProcessor", "CallablesAdapter", "RequestLogitsProcessor"]


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs a callable per request. Subclasses create it in `new_req_logits_processor`.

    A subclass with a constructor must call `super().__init__(vllm_config, device, is_pin_memory)`.

    A callable that fails is a fault of its own row. The other rows are not affected.

    Attributes:
        req_info: row to its callable, bound to the request's tokens, or to the fault if it could not be created.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: BatchRows[BoundCallable | ProcessorFault] = BatchRows(self._new_state)
        self._faults: dict[int, ProcessorFault] = {}
        self._name_in_faults = type(self).__name__

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable for a request that is added to the batch, of any convention of `request_callable.py`.

        Returns:
            None if the request needs none. A callable with state must be a new object for each request.
        """
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes of the batch."""
        self.req_info.update(batch_update)
        # Not in `apply`, which a step may skip.
        self._faults = {row: state for row, state in self.req_info.items() if isinstance(state, ProcessorFault)}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run each row's callable on `logits[row]`, in place, in row order.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` are zeros and must not be used.
        """
        self._apply({row: logits[row] for row in sorted(self.req_info)})
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """Run the callables of some rows, see `SpeculativeLogitsProcessor`."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        self._apply({row: logits[place] for place, row in rows if row in self.req_info})
        return logits

    def _apply(self, logits: Mapping[int, torch.Tensor]) -> None:
        """Edit the logits of some rows in place.

        Args:
            logits: row to its float32 [vocab], in row order.
        """
        for row, row_logits in logits.items():
            state = self.req_info[row]
            fault = state if isinstance(state, ProcessorFault) else self._fault_of(state, row_logits)
            if fault is not None:
                self._faults[row] = fault
        self._check_finite(logits)
        for row in self._faults.keys() & logits.keys():
            logits[row].zero_()

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """Return (row, fault) of the callables that could not be created or failed in this step, and clear them."""
        faults, self._faults = sorted(self._faults.items(), key=_row), {}
        return faults

    def _new_state(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> BoundCallable | ProcessorFault | None:
        try:
            function = call(self.new_req_logits_processor, params)
            return None if function is None else bind(function, prompt_token_ids, output_token_ids)
        # An author's code may raise anything, which must not end the engine's thread.
        except BaseException as error:  # noqa: BLE001  # boundary: author code
            return exception_fault(error, name=self._name_in_faults)

    def _fault_of(self, function: BoundCallable, logits: torch.Tensor) -> ProcessorFault | None:
        try:
            edit(function, logits, name=self._name_in_faults)
        except ProcessorFault as fault:
            return fault.with_traceback(None)  # the fault outlives the step, and the frames hold the logits
        return None

    def _check_finite(self, logits: Mapping[int, torch.Tensor]) -> None:
        rows = [row for row in logits if row not in self._faults]
        if not rows:
            return
        # The largest value shows NaN, +inf and a row of -inf only. All rows at once, to synchronize only once.
        finite = torch.stack([logits[row].amax() for row in rows]).isfinite().tolist()
        for row, is_finite in zip(rows, finite, strict=True):
            if not is_finite:
                self._faults[row] = non_finite_fault(logits[row], name=self._name_in_faults)


class CallablesAdapter(AdapterLogitsProcessor):
    """Runs an installed request-level callable on every request, such as one of Hugging Face or logits-processor-zoo.

    Args:
        factory: creates each request's callable.
        name: name of the callable, for people.
    """

    def __init__(self, factory: CallableFactory, name: str) -> None:
        super().__init__(None, torch.device("cpu"), False)
        self._factory = factory
        self._name_in_faults = name

    def is_argmax_invariant(self) -> bool:
        """Return False: a callable may edit its row in any way."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
        """Create the request's own callable, see `CallableFactory`."""
        return self._factory()


def _row(item: tuple[int, Any]) -> int:
    return item[0]
