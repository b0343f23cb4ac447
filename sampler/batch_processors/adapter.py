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

from .batch_rows import BatchRows, rows_of_drafts
from .interface import BatchUpdate, LogitsProcessor

__all__ = ["AdapterLogitsProcessor", "CallablesAdapter", "RequestLogitsProcessor"]


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs a callable on each request that wants one. A subclass says which: `new_req_logits_processor`.

    A subclass that has a constructor must call `super().__init__(vllm_config, device, is_pin_memory)`.

    What a callable does wrong is the fault of its own row: the others are edited as if nothing had happened.

    Attributes:
        req_info: row to its callable, tied to the request's tokens; or to the fault that kept it from being made.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: BatchRows[BoundCallable | ProcessorFault] = BatchRows(self._new_state)
        self._faults: dict[int, ProcessorFault] = {}
        self._name_in_faults = type(self).__name__

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The callable for a request that joins the batch, of any convention of `request_callable.py`.

        Returns:
            None if the request wants none. A callable with state must be a new object for each request.
        """
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch."""
        self.req_info.update(batch_update)
        # Here, and not in `apply`, which a step may do without.
        self._faults = {row: state for row, state in self.req_info.items() if isinstance(state, ProcessorFault)}

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Run each row's callable on `logits[row]`, in place, in row order.

        Args:
            logits: float32 [rows, vocab].

        Returns:
            `logits`. The rows of `take_faults()` are zeros: the caller must not use them.
        """
        self._apply({row: logits[row] for row in sorted(self.req_info)})
        return logits

    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        """The same for some rows, see `SpeculativeLogitsProcessor`."""
        rows = enumerate(rows_of_drafts(num_draft_tokens))
        self._apply({row: logits[place] for place, row in rows if row in self.req_info})
        return logits

    def _apply(self, logits: Mapping[int, torch.Tensor]) -> None:
        """Edit the logits of some rows: row to its float32 [vocab], in row order."""
        for row, row_logits in logits.items():
            state = self.req_info[row]
            fault = state if isinstance(state, ProcessorFault) else self._fault_of(state, row_logits)
            if fault is not None:
                self._faults[row] = fault
        self._check_finite(logits)
        for row in self._faults.keys() & logits.keys():
            logits[row].zero_()

    def take_faults(self) -> list[tuple[int, ProcessorFault]]:
        """The rows whose callable could not be made, or failed, in this step; each with its fault."""
        faults, self._faults = sorted(self._faults.items(), key=_row), {}
        return faults

    def _new_state(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> BoundCallable | ProcessorFault | None:
        try:
            function = call(self.new_req_logits_processor, params)
            return None if function is None else bind(function, prompt_token_ids, output_token_ids)
        # An author's code may raise anything; the engine's thread must not end by it.
        except BaseException as error:  # noqa: BLE001
            return exception_fault(error, name=self._name_in_faults)

    def _fault_of(self, function: BoundCallable, logits: torch.Tensor) -> ProcessorFault | None:
        try:
            edit(function, logits, name=self._name_in_faults)
        except ProcessorFault as fault:
            return fault.with_traceback(None)  # it outlives the step, and its frames hold the logits
        return None

    def _check_finite(self, logits: Mapping[int, torch.Tensor]) -> None:
        rows = [row for row in logits if row not in self._faults]
        if not rows:
            return
        # The largest value shows NaN, +inf and a row of -inf alone; all rows at once, for one wait for the device.
        finite = torch.stack([logits[row].amax() for row in rows]).isfinite().tolist()
        for row, is_finite in zip(rows, finite, strict=True):
            if not is_finite:
                self._faults[row] = non_finite_fault(logits[row], name=self._name_in_faults)


class CallablesAdapter(AdapterLogitsProcessor):
    """Runs one of the operator's request-level callables on every request: a Hugging Face or logits-processor-zoo one.

    Args:
        factory: makes each request's callable.
        name: of the callable, for people.
    """

    def __init__(self, factory: CallableFactory, name: str) -> None:
        super().__init__(None, torch.device("cpu"), False)
        self._factory = factory
        self._name_in_faults = name

    def is_argmax_invariant(self) -> bool:
        """False: a callable may do anything to its row."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor:
        """A callable of the request's own, see `CallableFactory`."""
        return self._factory()


def _row(item: tuple[int, Any]) -> int:
    return item[0]
