"""What the engine tells of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """A glance at the engine.

    Attributes:
        prefix_tokens_asked: prompt tokens that were looked up in the prefix cache.
        prefix_tokens_found: those of them that need not be computed.
        prefix_blocks: blocks of tokens that it keeps.
        prefix_blocks_capacity: the most that it can keep.
        drafted: tokens that were checked ahead of their time.
        accepted: those of them that were drawn.
        sandboxes: those that live.
        sandboxes_ended: how many ended, by the reason: `unloaded`, or the kind of a `ProcessorFault`.
    """

    running: int
    waiting: int
    steps: int
    accepting: bool
    processor_cache_hits: int
    processor_cache_misses: int
    processor_cache_evictions: int
    processor_cache_entries: int
    processor_cache_bytes: int
    prefix_tokens_asked: int = 0
    prefix_tokens_found: int = 0
    prefix_blocks: int = 0
    prefix_blocks_capacity: int = 0
    registered_processors: int = 0
    drafted: int = 0
    accepted: int = 0
    sandboxes: int = 0
    sandboxes_started: int = 0
    sandboxes_ended: Mapping[str, int] = field(default_factory=dict)
