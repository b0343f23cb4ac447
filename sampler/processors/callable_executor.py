"""Executor for request-level callables (vLLM V0's interface) that a request asks for by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from logitship.sampler.author_code.callable_factory import duplicate_callable
from logitship.sampler.author_code.calls import edit
from logitship.sampler.author_code.request_callable import BoundCallable, RequestLogitsProcessor, bind

from .executor import ExecutorSequence, LoadedProcessor
from .local_executor import LocalExecutor, LocalRow

if TYPE_CHECKING:
    from logitship.client.serialization.processor_string import ProcessorString

    from .request_view import RequestView

_CALLABLE = "callable"
"""Key of the sequence's callable in the view's `state`. The callable itself never sees the view."""


class CallableExecutor(LocalExecutor):
    """Runs callables in this process: the operator installed them.

    A `LoadedProcessor` of this executor belongs to one sequence: `per_sequence` is True, and `instance` is a callable
    that `CallableFactory` made for it. The other beams of a search have copies of it.
    """

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        """Never called: callables come from a `CallableFactory`, not from processor strings."""
        raise AssertionError("a request-level callable is not loaded from a processor string")

    def attach(self, processor: LoadedProcessor, sequence: ExecutorSequence) -> LocalRow:
        """Return the row of a sequence, whose view keeps the sequence's callable."""
        row = super().attach(processor, sequence)
        row.params["__req__"].state[_CALLABLE] = _SequenceCallable(processor.instance)
        return row

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """Call the callable of a sequence on its row. The parameters are `__req__` alone."""
        [params] = param_list
        view: RequestView = params["__req__"]
        function: _SequenceCallable = view.state[_CALLABLE]
        edit(partial(function, view), logits, name=processor.name, digest=processor.digest)
        return logits


class _SequenceCallable:
    """The callable of one sequence. A deep copy has state of its own."""

    def __init__(self, function: RequestLogitsProcessor) -> None:
        self._function = function
        self._bound: BoundCallable | None = None

    def __call__(self, view: RequestView, logits: torch.Tensor) -> torch.Tensor:
        """Edit logits [1, vocab]."""
        if self._bound is None:
            self._bound = bind(self._function, view.origin_input_ids, view.output_ids)
        return self._bound(logits[0]).unsqueeze(0)

    def __deepcopy__(self, memo: dict[int, Any]) -> _SequenceCallable:
        # Unbound: its first call binds it to the copied view's tokens.
        return _SequenceCallable(duplicate_callable(self._function))
