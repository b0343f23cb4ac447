"""What vLLM's model runner V1 knows of its requests and does not tell its logits processors.

`BatchUpdate` has no request ids, does not tell a request that finished from one that was put aside, and does not say
whose prompt is only partly computed. A processor with state needs all three.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any


class BatchRequests:
    """Reads the model runner.

    Args:
        runner: vLLM's `GPUModelRunner`, or another class of its shape.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)  # it holds the plugin

    def request_of(self, output_token_ids: list[int]) -> Any:
        """The model runner's record of the request that owns this very list of output tokens; in the batch now.

        Raises:
            LookupError: no request of the batch does.
        """
        batch = self._live.input_batch
        for row, owned in enumerate(batch.req_output_token_ids):
            if owned is output_token_ids:
                return self._live.requests[batch.req_ids[row]]
        raise LookupError("vLLM's batch has no request with these output tokens")

    def is_unfinished(self, request: Any) -> bool:
        """True if the request is in the batch, or was put aside and will be again."""
        return self._live.requests.get(request.req_id) is request

    def without_a_token(self, num_rows: int) -> set[int]:
        """Rows whose prompt is only partly computed in this step: what is drawn for them is thrown away."""
        return set(self._live.discard_request_mask.np[:num_rows].nonzero()[0].tolist())

    @property
    def _live(self) -> Any:
        runner = self._runner()
        assert runner is not None
        return runner


def missing(runner: type, batch: type) -> list[str]:
    """What `BatchRequests` reads and the model runner of this vLLM does not have.

    The plugin is made by the constructor of the model runner, before that has made all of it. So the names are looked
    for in the code of the class. Better than at the first request: an error there is the end of the engine.

    Args:
        runner: its class.
        batch: the class of its `input_batch`.
    """
    wanted = {
        runner: ("requests", "input_batch", "discard_request_mask"),
        batch: ("req_ids", "req_output_token_ids"),
    }
    return [
        f"{cls.__name__}.{name}"
        for cls, names in wanted.items()
        for name in names
        if not hasattr(cls, name) and name not in _names_in_code(cls)
    ]


def _names_in_code(cls: type) -> Iterator[str]:
    for each in cls.__mro__:
        for member in vars(each).values():
            function = unwrap(member)
            if isinstance(function, FunctionType):
                yield from function.__code__.co_names
