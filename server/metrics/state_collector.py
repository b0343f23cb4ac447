"""Metrics that are read from the engine's own counters at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_stats import EngineStats, ProcessorStats


class StateCollector(Collector):
    """Exports `EngineStats` as metrics.

    Args:
        read: returns the current stats; may be called on any thread.
    """

    def __init__(self, read: Callable[[], EngineStats]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics."""
        stats = self._read()
        yield from _engine(stats)
        yield from processor_state(stats)
        yield from _grammars(stats)


def processor_state(stats: ProcessorStats) -> Iterable[Metric]:
    """Return the metrics of the state of processors, in any engine that runs them."""
    yield from _processors(stats)
    yield from _sandboxes(stats)


def _engine(stats: EngineStats) -> Iterable[Metric]:
    yield GaugeMetricFamily("logitship_running_sequences", "Sequences that have a slot.", stats.running)
    yield GaugeMetricFamily("logitship_waiting_sequences", "Sequences that wait for a slot.", stats.waiting)
    yield GaugeMetricFamily(
        "logitship_accepting", "1 while requests are accepted, 0 while shutting down.", stats.accepting
    )
    yield GaugeMetricFamily(
        "logitship_queued_bytes",
        "Memory of the bodies of requests that are received or wait, in bytes.",
        stats.queued_bytes,
    )
    yield GaugeMetricFamily(
        "logitship_pool_jobs_running",
        "Jobs that prepare requests: decode, validate, tokenize.",
        stats.pool_jobs_running,
    )
    yield GaugeMetricFamily("logitship_pool_jobs_waiting", "Such jobs that wait for a thread.", stats.pool_jobs_waiting)
    yield CounterMetricFamily("logitship_steps", "Steps of the engine.", stats.steps)
    yield CounterMetricFamily(
        "logitship_draft_tokens", "Draft tokens that were verified (speculative decoding).", stats.drafted
    )
    yield CounterMetricFamily("logitship_accepted_draft_tokens", "Draft tokens that were accepted.", stats.accepted)
    yield CounterMetricFamily(
        "logitship_forced_tokens",
        "Output tokens that needed no forward pass of their own, because they were forced.",
        stats.forced,
    )
    yield CounterMetricFamily(
        "logitship_prefix_cache_queried_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
        stats.prefix_tokens_asked,
    )
    yield CounterMetricFamily(
        "logitship_prefix_cache_hit_tokens",
        "Prompt tokens that were found in the prefix cache.",
        stats.prefix_tokens_found,
    )
    yield GaugeMetricFamily("logitship_prefix_cache_blocks", "Blocks in the prefix cache.", stats.prefix_blocks)
    yield GaugeMetricFamily(
        "logitship_prefix_cache_capacity_blocks",
        "Capacity of the prefix cache, in blocks.",
        stats.prefix_blocks_capacity,
    )
    yield GaugeMetricFamily("logitship_registered_processors", "Registered processors.", stats.registered_processors)
    yield GaugeMetricFamily(
        "logitship_artifact_bytes", "Size of the uploaded artifacts, in bytes.", stats.artifact_bytes
    )


def _processors(stats: ProcessorStats) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "logitship_processor_cache_hits",
        "Lookups of shipped processors that were loaded already.",
        stats.processor_cache_hits,
    )
    yield CounterMetricFamily(
        "logitship_processor_cache_misses",
        "Lookups of shipped processors that had to be loaded.",
        stats.processor_cache_misses,
    )
    yield CounterMetricFamily(
        "logitship_processor_cache_evictions",
        "Shipped processors that were evicted from the cache.",
        stats.processor_cache_evictions,
    )
    yield GaugeMetricFamily(
        "logitship_processor_cache_entries", "Shipped processors that are loaded.", stats.processor_cache_entries
    )
    yield GaugeMetricFamily(
        "logitship_processor_cache_bytes",
        "Size of the loaded shipped processors, in bytes.",
        stats.processor_cache_bytes,
    )
    yield CounterMetricFamily(
        "logitship_deferred_calls", "Calls of processors that a step did not wait for.", stats.deferred_calls
    )
    seconds = CounterMetricFamily(
        "logitship_tenant_step_seconds", "Time of the calls of a tenant's shipped processors.", labels=["tenant"]
    )
    for tenant, total in sorted(stats.tenant_step_seconds.items()):
        seconds.add_metric([tenant], total)
    yield seconds


def _grammars(stats: EngineStats) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "logitship_grammar_checks_running",
        "Grammars that are being checked and compiled.",
        stats.grammar_checks_running,
    )
    yield GaugeMetricFamily(
        "logitship_grammar_checks_waiting", "Grammars that wait to be checked.", stats.grammar_checks_waiting
    )
    yield CounterMetricFamily(
        "logitship_grammar_failures",
        "Masks of grammars that took too long or were too complex, which ends the sequence.",
        stats.grammar_failures,
    )


def _sandboxes(stats: ProcessorStats) -> Iterable[Metric]:
    yield GaugeMetricFamily(
        "logitship_processor_loads_running", "Shipped processors that are being loaded.", stats.loads_running
    )
    yield GaugeMetricFamily(
        "logitship_processor_loads_waiting", "Shipped processors that wait to be loaded.", stats.loads_waiting
    )
    yield GaugeMetricFamily("logitship_sandboxes", "Sandboxes that are running.", stats.sandboxes)
    yield CounterMetricFamily("logitship_sandboxes_started", "Sandboxes that were started.", stats.sandboxes_started)
    ended = CounterMetricFamily(
        "logitship_sandboxes_ended",
        "Sandboxes that ended, by the reason: `unloaded`, or the kind of the fault.",
        labels=["reason"],
    )
    for reason, count in sorted(stats.sandboxes_ended.items()):
        ended.add_metric([reason], count)
    yield ended
