"""Facts about the model, and a snapshot of the engine's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_TENANTS = 100
"""Most tenants with a label of their own in metrics."""

OTHER = "other"
"""Label of all further tenants and names."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model, for clients."""

    name: str
    path: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    architecture: str


@dataclass(frozen=True, kw_only=True)
class ProcessorStats:
    """A snapshot of the counters of processors, in any engine that runs them.

    Attributes:
        sandboxes: running sandboxes.
        sandboxes_started: sandboxes started so far.
        sandboxes_ended: sandboxes ended so far, by reason: `unloaded`, or the kind of a `ProcessorFault`.
        deferred_calls: calls of processors that a step did not wait for.
        tenant_step_seconds: time of the calls of shipped processors, by tenant; those without a label as `other`.
        loads_running: shipped processors that are being loaded.
        loads_waiting: shipped processors that wait to be loaded.
    """

    processor_cache_hits: int = 0
    processor_cache_misses: int = 0
    processor_cache_evictions: int = 0
    processor_cache_entries: int = 0
    processor_cache_bytes: int = 0
    sandboxes: int = 0
    sandboxes_started: int = 0
    sandboxes_ended: Mapping[str, int] = field(default_factory=dict)
    deferred_calls: int = 0
    tenant_step_seconds: Mapping[str, float] = field(default_factory=dict)
    loads_running: int = 0
    loads_waiting: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineStats(ProcessorStats):
    """A snapshot of the engine's state and counters.

    Attributes:
        running: sequences that have a slot.
        waiting: sequences that wait for a slot.
        steps: steps so far.
        accepting: False while shutting down.
        prefix_tokens_asked: prompt tokens that were looked up in the prefix cache.
        prefix_tokens_found: prompt tokens that were found there and not computed.
        prefix_blocks: blocks of tokens in the prefix cache.
        prefix_blocks_capacity: most blocks that it can hold.
        drafted: draft tokens that were verified.
        accepted: draft tokens that were accepted.
        forced: output tokens that needed no forward pass of their own, because they were forced.
        pool_jobs_running: jobs that prepare requests now: decode, validate, tokenize.
        pool_jobs_waiting: jobs that wait for a thread.
        queued_bytes: memory of the bodies of requests that are received or wait.
        grammar_checks_running: grammars that are being checked or compiled.
        grammar_checks_waiting: grammars that wait for a checker.
        grammar_failures: masks of grammars that took too long, or were too complex, and ended their requests.
        artifact_bytes: memory of the artifacts that clients uploaded.
    """

    running: int
    waiting: int
    steps: int
    accepting: bool
    prefix_tokens_asked: int = 0
    prefix_tokens_found: int = 0
    prefix_blocks: int = 0
    prefix_blocks_capacity: int = 0
    registered_processors: int = 0
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    pool_jobs_running: int = 0
    pool_jobs_waiting: int = 0
    queued_bytes: int = 0
    grammar_checks_running: int = 0
    grammar_checks_waiting: int = 0
    grammar_failures: int = 0
    artifact_bytes: int = 0
