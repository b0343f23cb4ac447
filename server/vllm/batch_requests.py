"""The requests in the batch of vLLM's model runner V1, read from the model runner.

`BatchUpdate` has no request ids, does not distinguish finished requests from preempted ones, and does not say which
prompts are only partly computed. A processor with state needs all three.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from inspect import unwrap
from types import FunctionType
from typing import Any

from logitship.sampler.batch_processors.interface import BatchUpdate, MoveDirectionality

from .callers import SCHEDULED, find_caller_argument


class BatchRequests:
    """Reads the requests from the model runner.

    Args:
        runner: vLLM's `GPUModelRunner`, or a class with the same attributes.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = weakref.ref(runner)  # it holds the plugin

    def request_of(self, output_token_ids: list[int]) -> Any:
        """Return the model runner's record of the request in the batch that owns this very list of output tokens.

        Raises:
            LookupError: no request of the batch does.
        """
        batch = self._live.input_batch
        for row, owned in enumerate(batch.req_output_token_ids):
            if owned is output_token_ids:
                return self._live.requests[batch.req_ids[row]]
        raise LookupError("vLLM's batch has no request with these output tokens")

    def is_unfinished(self, request: Any) -> bool:
        """Return True if the request is in the batch, or preempted."""
        return self._live.requests.get(request.req_id) is request

    def discarded_rows(self, num_rows: int) -> set[int]:
        """Return the rows whose prompt is only partly computed in this step: vLLM discards the token sampled there."""
        return set(self._live.discard_request_mask.np[:num_rows].nonzero()[0].tolist())

    def discarded_rows_ahead(self, rows: Iterable[int]) -> set[int] | None:
        """Return those of these rows whose prompt will only be partly computed, as the model runner will find out.

        Called while the model runner updates its states; None if what the scheduler has planned cannot be found.
        """
        output = find_caller_argument(SCHEDULED)
        if output is None:
            return None
        batch, requests = self._live.input_batch, self._live.requests
        records = {row: requests[batch.req_ids[row]] for row in rows}
        return {row for row, record in records.items() if _num_computed_after(record, output) < record.num_tokens}

    @property
    def _live(self) -> Any:
        runner = self._runner()
        assert runner is not None
        return runner


def _num_computed_after(record: Any, output: Any) -> int:
    """Return the number of a request's tokens that are computed after this step."""
    computed: int = record.num_computed_tokens + output.num_scheduled_tokens[record.req_id]
    return computed


def missing_attributes(runner: type, batch: type, request: type) -> list[str]:
    """Return the attributes that `BatchRequests` reads and this vLLM's classes do not have.

    The model runner's constructor makes the plugin before it has set all attributes, so their names are looked up in
    the code of the class. This check at start prevents an error at the first request, which would stop the engine.

    Args:
        runner: the model runner's class.
        batch: the class of its `input_batch`.
        request: the class of its records of requests.
    """
    wanted = {
        runner: ("requests", "input_batch", "discard_request_mask", "sample_tokens"),
        batch: ("req_ids", "req_output_token_ids"),
        request: ("req_id", "num_computed_tokens", "num_tokens"),
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


def converted(update: Any) -> BatchUpdate:
    """Convert vLLM's `BatchUpdate` to ours: they differ in the class of the directions only."""
    moved = [(source, target, MoveDirectionality[direction.name]) for source, target, direction in update.moved]
    return BatchUpdate(update.batch_size, update.removed, update.added, moved)
