"""What the executors that run code in this process share."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import duplicate

from .executor import PREPARED_KEY, ExecutorRow, ExecutorSequence, LoadedProcessor, RunOutcome
from .request_view import OutputFollower, RequestView

if TYPE_CHECKING:
    from logitship.client.serialization.processor_string import ProcessorString


class LocalRow:
    """A sequence whose processor runs here.

    Args:
        on_first_use: called when the processor uses the sequence's `output_ids` for the first time.

    Attributes:
        params: what the processor receives for this row, `__req__` included.
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
            # Deep: processors keep state in their parameters, and a request's `n` continuations share what it sent.
            self.params: dict[str, Any] = {**copy.deepcopy(params), "__req__": view}
        else:
            self.params = {**params, "__req__": view, PREPARED_KEY: sequence.prepared}
        self.output = OutputFollower(view, sequence.output_token_ids, on_first_use)

    def fork(self, output_token_ids: list[int]) -> LocalRow:
        """See `ExecutorRow.fork`."""
        sequence, processor = self._sequence, self._processor
        is_prepared = sequence.prepared is not None
        # Of what was prepared at admission, the parameters are shared by all sequences: nobody changes them.
        kept = {} if is_prepared else self.params
        shared = [sequence.model.tokenizer, sequence.prepared, getattr(self._view, "sampling_params", None)]
        params, view, output = duplicate(
            (kept, self._view, self.output), shared, name=processor.name, digest=processor.digest
        )
        twin = copy.copy(self)
        twin.params = {**self.params, "__req__": view} if is_prepared else params
        twin._view, twin.output = view, output
        twin.output.follow(output_token_ids)
        return twin

    def close(self) -> None:
        """See `ExecutorRow.close`."""


class LocalExecutor(ABC):
    """A `ProcessorExecutor` that calls processors in this process: a subclass says how."""

    _num_first_uses = 0
    """Sequences whose processor has used their `output_ids`, since the start."""

    @abstractmethod
    def load(self, string: ProcessorString, tenant: str = "") -> LoadedProcessor:
        """See `ProcessorExecutor.load`."""

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
        """See `ProcessorExecutor.ensure`: what runs here is always ready."""

    def unload(self, processor: LoadedProcessor) -> None:  # noqa: B027
        """See `ProcessorExecutor.unload`: it goes with its last reference."""

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> LocalRow:
        """See `ProcessorExecutor.attach`."""
        return LocalRow(processor, sequence, self._count_first_use)

    def group(self, processor: LoadedProcessor, rows: Sequence[ExecutorRow]) -> LocalGroup:
        """See `ProcessorExecutor.group`."""
        return LocalGroup(self, processor, [row for row in rows if isinstance(row, LocalRow)])

    def _count_first_use(self) -> None:
        self._num_first_uses += 1


class LocalGroup:
    """A `ExecutorGroup` whose processor runs here. It is its own `Run`, since it has one call at a time.

    A call is made when it is finished: until then, others may work elsewhere.
    """

    def __init__(self, executor: LocalExecutor, processor: LoadedProcessor, rows: Sequence[LocalRow]) -> None:
        self._executor = executor
        self._processor = processor
        self._rows = rows
        self._params = [row.params for row in rows]
        self._used_outputs: list[OutputFollower] = []
        self._num_first_uses = -1
        self._logits: torch.Tensor | None = None

    def begin(self, logits: torch.Tensor) -> LocalGroup:
        """See `ExecutorGroup.begin`."""
        self._logits = logits
        return self

    def finish(self) -> RunOutcome:
        """See `Run.finish`."""
        logits, self._logits = self._logits, None
        assert logits is not None
        began = time.perf_counter()
        if self._used_outputs or self._num_first_uses != self._executor._num_first_uses:
            self._sync()
        try:
            result = self._executor.run(self._processor, logits, self._params)
        except ProcessorFault as fault:
            # The call is one for all rows, so that nobody can say which of them was the reason: all of them end.
            return RunOutcome(time.perf_counter() - began, dict.fromkeys(range(len(self._rows)), fault))
        if result is not logits:
            logits.copy_(result)
        return RunOutcome(time.perf_counter() - began)

    def _sync(self) -> None:
        """Bring the outputs up to date that the processor may have kept."""
        # Not a look at each row, which in every step would take longer than many a processor.
        if self._num_first_uses != self._executor._num_first_uses:
            self._num_first_uses = self._executor._num_first_uses
            self._used_outputs = [row.output for row in self._rows if row.output.is_used]
        for output in self._used_outputs:
            output.sync()
