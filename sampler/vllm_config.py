"""What batch processors may read of the engine's configuration: the part of vLLM's `VllmConfig` that they use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of the batch.

    Attributes:
        max_num_seqs: rows of the persistent batch.
    """

    max_num_seqs: int


@dataclass(frozen=True)
class VllmConfig:
    """The first argument of a batch processor's constructor."""

    scheduler_config: SchedulerConfig
