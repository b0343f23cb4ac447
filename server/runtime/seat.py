"""The seat: what an engine must tell the runtime and do for it. Its adapter alone knows the engine.

An adapter follows the engine's requests and calls `RequestRuntime`, once per step:

1. `begin_step`, then `load` for each new request;
2. `begin` with the requests whose tokens the step will sample, if their histories are known before the model computes;
3. `apply` with the step's logits, and the draft tokens of each row;
4. `accept` with the draft tokens that the engine accepted, once it is known;
5. `release` for requests that have ended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import ProcessorRequest

from .tracked_request import TrackedRequest


class Ranks(Protocol):
    """The processes that sample the same tokens from the same logits."""

    @property
    def is_first(self) -> bool:
        """True on the rank that runs the processors."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...


class EngineSeat(Protocol):
    """An engine, as the runtime sees it."""

    @property
    def engine(self) -> str:
        """Name of the engine, for messages."""
        ...

    @property
    def ranks(self) -> Ranks:
        """The ranks of this process."""
        ...

    def processors_of(self, request: TrackedRequest) -> Sequence[ProcessorRequest]:
        """Return the processors of a request.

        Raises:
            ValueError: they are malformed, or cannot run in this engine.
        """
        ...

    def sampling_params_of(self, request: TrackedRequest, uses: Sequence[ProcessorUse]) -> SamplingParams:
        """Return the sampling parameters of a request as its processors see them.

        Raises:
            ValueError: the engine accepts a value that logitship does not; names it.
        """
        ...

    def editing(self, logits: torch.Tensor, running: Mapping[int, TrackedRequest]) -> AbstractContextManager[None]:
        """Enclose the calls of a step: protect what processors must not change in these rows of the logits.

        May end requests with `TrackedRequest.fault`.
        """
        ...

    def repeat(self, logits: torch.Tensor, repeated: Mapping[int, TrackedRequest]) -> None:
        """Let the engine sample tokens again that it has dropped, in place: their processors are not called again.

        Args:
            logits: [rows, vocab].
            repeated: the requests by row.
        """
        ...
