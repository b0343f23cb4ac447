"""The sandboxes of shipped processors, for logitship's own engine, inside other engines, and for `logitship check`."""

from __future__ import annotations

from collections.abc import Collection
from logging import Logger
from typing import Protocol

from logitship.builtin_processors.sglang_names import SGLANG_NAMES_REFERENCE
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.spare_sandboxes import NUM_SPARES
from logitship.sampler.sandbox.zygote_process import ZygoteProcess


class SandboxSettings(Protocol):
    """Settings of sandboxes: those of `ServerConfig`, or of a plugin."""

    @property
    def sandbox_memory(self) -> int:
        """Bytes that a sandbox may use beyond what torch uses."""
        ...

    @property
    def sandbox_cpu_time(self) -> float:
        """CPU seconds that a sandbox may use outside its calls."""
        ...

    @property
    def sandbox_step_timeout(self) -> float:
        """CPU seconds that the calls of processors may take in a step."""
        ...

    @property
    def sandbox_first_step_timeout(self) -> float:
        """CPU seconds that the first call in a sandbox may take, instead."""
        ...

    @property
    def sandbox_load_timeout(self) -> float:
        """CPU seconds that loading a processor may take."""
        ...


def new_zygote(
    settings: SandboxSettings, max_rows: int, background_cores: Collection[int] | None = None
) -> ZygoteProcess:
    """Return the zygote of sandboxes for up to `max_rows` rows. Its `start` takes seconds."""
    return ZygoteProcess(
        names=SGLANG_NAMES_REFERENCE,
        max_rows=max_rows,
        memory_limit=settings.sandbox_memory,
        background_cores=background_cores,
    )


def sandbox_executor(
    settings: SandboxSettings,
    zygote: ZygoteProcess,
    model: ModelView,
    max_rows: int,
    logger: Logger,
    *,
    num_spares: int = NUM_SPARES,
) -> SandboxExecutor:
    """Return an executor whose sandboxes a zygote starts, which has been started.

    Args:
        settings: the settings.
        zygote: the zygote; the caller closes it after an error.
        model: the model.
        max_rows: most rows of a step.
        logger: gets the protections.
        num_spares: sandboxes that are started ahead.

    Raises:
        ZygoteError: the system cannot protect sandboxes.
    """
    protections = zygote.set_up(model)
    logger.info("shipped processors run in sandboxes, protected by: %s", protections.describe())
    limits = SandboxLimits(
        cpu_time=settings.sandbox_cpu_time,
        step_timeout=settings.sandbox_step_timeout,
        first_step_timeout=settings.sandbox_first_step_timeout,
        load_timeout=settings.sandbox_load_timeout,
    )
    return SandboxExecutor(zygote, limits, max_rows, model.vocab_size, num_spares)
