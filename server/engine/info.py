"""What the engine tells of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInfo:
    """What clients may know of the model."""

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    architecture: str


@dataclass(frozen=True)
class EngineStats:
    """A glance at the engine."""

    running: int
    waiting: int
    steps: int
    accepting: bool
    processor_cache_hits: int
    processor_cache_misses: int
    processor_cache_evictions: int
    processor_cache_entries: int
    processor_cache_bytes: int
