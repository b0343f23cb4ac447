"""What the hosts that run code in this process share."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from logitship.client.errors import ProcessorFault

from .author_code import duplicate
from .processor_host import PREPARED_KEY, HostedRow, HostedSequence, LoadedProcessor, RunOutcome
from .request_view import OutputFollower, RequestView

if TYPE_CHECKING:
    from logitship.client.processor_string import ProcessorString


class LocalRow:
    """A sequence whose processor runs here.

    Attributes:
        params: what the processor receives for this row, `__req__` included.
    """

    def __init__(self, processor: LoadedProcessor, sequence: HostedSequence) -> None:
        self._processor = processor
        self._sequence = sequence
        self._view = view = RequestView(
            rid=sequence.rid,
            prompt_token_ids=sequence.prompt_token_ids,
            output_token_ids=sequence.output_token_ids,
            sampling_params=sequence.sampling_params,
            model=sequence.model,
        )
        params = dict(sequence.params)
        if sequence.prepared is None:
            # Deep: processors keep state in their parameters, and a request's `n` continuations share what it sent.
            self.params: dict[str, Any] = {**copy.deepcopy(params), "__req__": view}
        else:
            self.params = {**params, "__req__": view, PREPARED_KEY: sequence.prepared}
        self._output = OutputFollower(view, sequence.output_token_ids)

    def sync(self) -> None:
        """See `HostedRow.sync`."""
        self._output.sync()

    def fork(self, output_token_ids: list[int]) -> LocalRow:
        """See `HostedRow.fork`."""
        sequence, processor = self._sequence, self._processor
        is_prepared = sequence.prepared is not None
        # Of what was prepared at admission, the parameters are shared by all sequences: nobody changes them.
        kept = {} if is_prepared else self.params
        shared = [sequence.model.tokenizer, sequence.prepared, getattr(self._view, "sampling_params", None)]
        params, view, output_ids = duplicate(
            (kept, self._view, self._output.output_ids), shared, name=processor.name, digest=processor.digest
        )
        twin = copy.copy(self)
        twin.params = {**self.params, "__req__": view} if is_prepared else params
        twin._view = view
        twin._output = self._output.fork(view, output_ids, output_token_ids)
        return twin

    def close(self) -> None:
        """See `HostedRow.close`."""


class LocalHost(ABC):
    """A `ProcessorHost` that calls processors in this process: a subclass says how."""

    @abstractmethod
    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorHost.load`."""

    @abstractmethod
    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Call a processor on the rows of its group.

        Args:
            logits: float32 [rows, vocab], contiguous; may be edited in place.
            param_list: one dict a row, in row order.

        Returns:
            float32 [rows, vocab] on the device of `logits`: either `logits` itself or a new tensor.

        Raises:
            ProcessorFault: it raised, or returned something other than a float tensor of that shape on that device.
        """

    def ensure(self, processor: LoadedProcessor) -> None:  # noqa: B027  # nothing to do, nor in a subclass
        """See `ProcessorHost.ensure`: what runs here is always ready."""

    def unload(self, processor: LoadedProcessor) -> None:  # noqa: B027
        """See `ProcessorHost.unload`: it goes with its last reference."""

    def attach(self, processor: LoadedProcessor, sequence: HostedSequence) -> LocalRow:
        """See `ProcessorHost.attach`."""
        return LocalRow(processor, sequence)

    def begin(self, processor: LoadedProcessor, logits: torch.Tensor, rows: Sequence[HostedRow]) -> _LocalRun:
        """See `ProcessorHost.begin`."""
        return _LocalRun(self, processor, logits, rows)


@dataclass(frozen=True)
class _LocalRun:
    """A call that is made when it is finished: until then, others may work elsewhere."""

    host: LocalHost
    processor: LoadedProcessor
    logits: torch.Tensor
    rows: Sequence[HostedRow]

    def finish(self) -> RunOutcome:
        """See `Run.finish`."""
        began = time.perf_counter()
        params = [row.params for row in self.rows if isinstance(row, LocalRow)]
        try:
            result = self.host.run(self.processor, self.logits, params)
        except ProcessorFault as fault:
            # The call is one for all rows, so that nobody can say which of them was the reason: all of them end.
            return RunOutcome(time.perf_counter() - began, dict.fromkeys(range(len(self.rows)), fault))
        if result is not self.logits:
            self.logits.copy_(result)
        return RunOutcome(time.perf_counter() - began)
