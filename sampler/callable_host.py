"""Runs the request-level callables that a request asked for by name: vLLM V0's interface, among shipped processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .author_code import edit
from .local_host import LocalHost
from .processor_host import LoadedProcessor
from .request_callable import bind

if TYPE_CHECKING:
    from logitship.client.processor_string import ProcessorString

    from .request_view import RequestView

_BOUND = "bound callable"
"""Where the view's `state` holds the callable, tied to the view's tokens. The callable itself never sees the view."""


class CallableHost(LocalHost):
    """Runs callables in this process: they are the operator's.

    A `LoadedProcessor` of this host is one sequence's: `per_sequence` is True, and `instance` is a callable that
    `CallableFactory` made for it.
    """

    def load(self, string: ProcessorString, tenant: str = "") -> NoReturn:
        """Never called: callables come from a `CallableFactory`, and not in processor strings."""
        raise AssertionError("a request-level callable is not loaded from a processor string")

    def run(
        self, processor: LoadedProcessor, logits: torch.Tensor, param_list: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """See `LocalHost.run`. There is one row, and its parameters hold nothing but `__req__`."""
        [params] = param_list
        edit(
            partial(_run, processor.instance, params["__req__"]),
            logits,
            name=processor.name,
            digest=processor.digest,
        )
        return logits


def _run(function: Callable[..., torch.Tensor], view: RequestView, logits: torch.Tensor) -> torch.Tensor:
    if _BOUND not in view.state:
        view.state[_BOUND] = bind(function, view.origin_input_ids, view.output_ids)
    bound: Callable[[torch.Tensor], torch.Tensor] = view.state[_BOUND]
    return bound(logits[0]).unsqueeze(0)
