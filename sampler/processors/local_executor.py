"""Base class of the executors that run processors in this process."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.author_code.calls import duplicate

from .executor import NO_FAULTS, PREPARED_KEY, ExecutorRow, ExecutorSequence, LoadedProcessor, LocalGroup, RunOutcome
from .request_view import OutputFollower, RequestView

if TYPE_CHECKING:
    from logitship.client.serialization.processor_string import ProcessorString


class LocalRow:
    """A sequence whose processor runs in this process.

    Args:
        processor: the processor.
        sequence: the sequence.
        on_first_use: called when the processor first uses the sequence's `output_ids`.

    Attributes:
        params: parameters that the processor gets for this row, `__req__` included.
        output: keeps `__req__.output_ids` up to date.
    """

    def __init__(
        self, processor: LoadedProcessor, sequence: ExecutorSequence, on_first_use: Callable[[], None]
    ) -> None:
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
            # A deep copy: processors keep state in their parameters, and a request's `n` continuations share them.
            self.params: dict[str, Any] = {**copy.deepcopy(params), "__req__": view}
        else:
            self.params = {**params, "__req__": view, PREPARED_KEY: sequence.prepared}
        self.output = OutputFollower(view, sequence.output_token_ids, on_first_use)

    def fork(self, output_token_ids: list[int]) -> LocalRow:
        """Copy the parameters and the view for another sequence, see `ExecutorRow.fork`."""
        sequence, processor = self._sequence, self._processor
        is_prepared = sequence.prepared is not None
        # Parameters that were prepared at admission are read-only and shared by all sequences.
        copied = {} if is_prepared else self.params
        shared = [sequence.model.tokenizer, sequence.prepared, getattr(self._view, "sampling_params", None)]
        params, view, output = duplicate(
            (copied, self._view, self.output), shared, name=processor.name, digest=processor.digest
        )
        fork = copy.copy(self)
        fork.params = {**self.params, "__req__": view} if is_prepared else params
        fork._view, fork.output = view, output
        fork.output.follow(output_token_ids)
        return fork

    def close(self) -> None:
        """Do nothing: the state is freed with the row."""


class LocalExecutor(ABC):
    """A `ProcessorExecutor` that calls processors in this process. Subclasses implement `load` and `run`."""

    _num_first_uses = 0
    """Number of sequences since the start whose processor has used `output_ids`."""

    @abstractmethod
    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """Load a class into this process, see `ProcessorExecutor.load`."""

    @abstractmethod
    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Call a processor on the rows of its group.

        Args:
            processor: the processor.
            logits: float32 [rows, vocab], contiguous; may be edited in place.
            param_list: one dict per row, in row order.

        Returns:
            float32 [rows, vocab] on the device of `logits`: either `logits` itself or a new tensor.

        Raises:
            ProcessorFault: the processor raised, or did not return a float tensor of that shape on that device.
        """

    def ensure(self, processor: LoadedProcessor) -> None:  # noqa: B027  # nothing to do, nor in a subclass
        """Do nothing: processors in this process are always ready."""

    def is_ready(self, processor: LoadedProcessor) -> bool:
        """Return True: processors in this process are always ready."""
        return True

    def cancel_load(self, digest: str, tenant: str) -> bool:
        """Return False: a thread of this process cannot be stopped."""
        return False

    def unload(self, processor: LoadedProcessor) -> None:  # noqa: B027
        """Do nothing: the processor is freed with its last reference."""

    def restrict(
        self, processor: LoadedProcessor, rows: Sequence[ExecutorRow], allowed: Sequence[AllowedTokens]
    ) -> None:
        """Let a processor that comes with logitship forbid tokens; leave the rows of others open."""
        if not processor.is_trusted:
            for each in allowed:
                each.leave_open()
            return
        local = [row for row in rows if isinstance(row, LocalRow)]
        for row in local:
            if row.output.is_used:
                row.output.sync()
        processor.instance.restrict([row.params for row in local], allowed)

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> LocalRow:
        """Return the row of a sequence, with its parameters and view."""
        return LocalRow(processor, sequence, self._count_first_use)

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> GroupCaller:
        """Return the rows of a processor, which it is called for together."""
        return GroupCaller(self, processor, [row for row in rows if isinstance(row, LocalRow)])

    def _count_first_use(self) -> None:
        self._num_first_uses += 1


class GroupCaller(LocalGroup):
    """Calls the processor of an executor for the rows of a group."""

    def __init__(self, executor: LocalExecutor, processor: LoadedProcessor, rows: Sequence[LocalRow]) -> None:
        self._executor = executor
        self._processor = processor
        self._rows = rows
        self._params = [row.params for row in rows]
        self._used_outputs: list[OutputFollower] = []
        self._num_first_uses = -1

    def call(self, logits: torch.Tensor) -> RunOutcome:
        """Call the processor, and once for each row if a processor that comes with logitship fails."""
        began = time.perf_counter()
        if self._used_outputs or self._num_first_uses != self._executor._num_first_uses:
            self._sync()
        fault = self._run(logits, self._params)
        faults = NO_FAULTS if fault is None else self._faults_by_row(logits, fault)
        seconds = time.perf_counter() - began
        return RunOutcome(seconds, faults, occupied=seconds)

    def _run(self, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]) -> ProcessorFault | None:
        try:
            result = self._executor.run(self._processor, logits, param_list)
            if result is not logits:
                logits.copy_(result)
        except ProcessorFault as fault:
            return fault
        return None

    def _faults_by_row(self, logits: torch.Tensor, fault: ProcessorFault) -> Mapping[int, ProcessorFault]:
        """Return the faults of a call that failed.

        A processor that comes with logitship serves all tenants with one call. It looks at all of its rows before it
        edits the first one, and can be called again for each. Another may have edited some rows already, and belongs to
        one tenant or to the operator: all rows fail.
        """
        if not self._processor.is_trusted:
            return dict.fromkeys(range(len(self._rows)), fault)
        faults = {}
        for row, params in enumerate(self._params):
            again = self._run(logits[row : row + 1], [params])
            if again is not None:
                faults[row] = again
        return faults

    def _sync(self) -> None:
        """Update the output lists that the processor may have kept."""
        # Checking each row in every step would take longer than many a processor.
        if self._num_first_uses != self._executor._num_first_uses:
            self._num_first_uses = self._executor._num_first_uses
            self._used_outputs = [row.output for row in self._rows if row.output.is_used]
        for output in self._used_outputs:
            output.sync()
