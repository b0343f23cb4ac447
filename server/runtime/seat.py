"""The seat: what an engine must tell the runtime and do for it. Its adapter alone knows the engine.

An adapter follows the engine's requests and calls `RequestRuntime`, once per step:

1. `begin_step`, then `load` for each new request;
2. `begin` with the requests whose tokens the step will sample, if their histories are known before the model computes;
3. `apply` with the step's logits, and the draft tokens of each row;
4. `accept` with the draft tokens that the engine accepted, once it is known;
5. `release` for requests that have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from logitship.sampler.processors.processor_groups import ProcessorUse
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.processors.params_checker import ParamsChecker
from logitship.server.requests.messages import ProcessorRequest

from .audit_log import AuditLog
from .plugin_processors import PluginProcessors
from .plugin_settings import PluginSettings
from .plugin_setup import for_execution
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


RanksT = TypeVar("RanksT", bound=Ranks)
RanksT_co = TypeVar("RanksT_co", bound=Ranks, covariant=True)


@dataclass(frozen=True)
class EngineWorker(Generic[RanksT_co]):
    """A process of an engine that computes logits and samples tokens.

    Attributes:
        settings: the plugin's.
        model: the model.
        ranks: the processes that sample the same tokens.
        max_rows: most rows of a call.
        processors: loads the requests' processors; None on ranks that run none.
        logger: the engine's logger of logitship.
        audit_log: the audit log; None if there is none.
    """

    settings: PluginSettings
    model: ModelView
    ranks: RanksT_co
    max_rows: int
    processors: PluginProcessors | None
    logger: logging.Logger
    audit_log: AuditLog | None = None

    def close(self) -> None:
        """End the sandboxes, and write the audit log."""
        if self.processors is not None:
            self.processors.close()
        if self.audit_log is not None:
            self.audit_log.close()


def start_engine_worker(
    settings: PluginSettings,
    model: ModelView,
    ranks: RanksT,
    max_rows: int,
    logger: logging.Logger,
    *,
    loads_in_background: bool = False,
    params_checker: ParamsChecker | None = None,
) -> EngineWorker[RanksT]:
    """Start the executor of the processors on the first rank, for up to `max_rows` rows.

    Args:
        settings: the plugin's.
        model: the model.
        ranks: the processes that sample the same tokens.
        max_rows: most rows of a step, without those behind draft tokens.
        logger: the engine's logger of logitship.
        loads_in_background: requests wait outside of the batch while `RequestRuntime.must_wait`.
        params_checker: see `PluginProcessors`.

    Raises:
        ValueError: as `for_execution`, or the audit log cannot be written.
    """
    if not ranks.is_first:
        return EngineWorker(settings, model, ranks, max_rows, None, logger)
    audit_log = None if settings.audit_log is None else AuditLog(settings.audit_log)
    processors = for_execution(settings, model, max_rows, logger, loads_in_background, params_checker=params_checker)
    return EngineWorker(settings, model, ranks, max_rows, processors, logger, audit_log)


class EngineSeat(Protocol):
    """An engine, as the runtime sees it."""

    @property
    def engine(self) -> str:
        """Name of the engine, for messages."""
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

    def defer(self, late: Mapping[int, TrackedRequest]) -> Collection[int]:
        """Let requests sit out, for whose calls the step no longer waits.

        They sample no token in this step, and are left out of the next ones as long as `RequestRuntime.is_busy`. Then
        the engine computes the same row again, and `apply` edits it.

        Args:
            late: the requests by row.

        Returns:
            The rows that sit out. The requests of the others end.
        """
        ...
