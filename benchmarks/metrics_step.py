"""Time that the metrics of a step take: the clock of its phases, and the observations per row and processor.

    python benchmarks/metrics_step.py

No model runs: what is measured is all that a step does for `/metrics`, and nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from logitship.sampler.processors.executor import DisabledExecutor, LoadedProcessor
from logitship.server.metrics.engine_stats import ModelInfo
from logitship.server.metrics.observed_metrics import EngineMetrics, RequestMeter
from logitship.server.metrics.step_clock import StepClock
from logitship.server.requests.messages import GenerationChunk

MODEL = ModelInfo("model", "model", 49152, 8192, frozenset({2}), "float32", "cpu", "LlamaForCausalLM")


def step(num_rows: int, num_processors: int) -> Callable[[], None]:
    """Update the metrics as a step with this many rows does, each with a request of its own and a new token."""
    metrics = EngineMetrics(MODEL, {})
    clock = StepClock()
    meters = [RequestMeter(metrics.requests) for _ in range(num_rows)]
    chunk = GenerationChunk(index=0, text="a", token_ids=[1], prompt_tokens=1, completion_tokens=1)
    observers = [
        metrics.call_observer(LoadedProcessor(f"sha256:{number}", f"Processor{number}", DisabledExecutor("none"), None))
        for number in range(num_processors)
    ]

    def run() -> None:
        for phase in (clock.schedule, clock.batch_update, clock.forward):
            with phase:
                pass
        with clock.deliver, clock.sample, clock.processors:
            for observe in observers:
                observe(num_rows, 1e-4, "given")
        with clock.deliver:
            for meter in meters:
                meter.delivered([chunk])
        metrics.step_ended(clock)

    return run


def microseconds(function: Callable[[], None], calls: int) -> list[float]:
    """Return the times of calls, after a warm-up."""
    for _ in range(calls // 10):
        function()
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        function()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128], help="rows of a step")
    parser.add_argument("--processors", type=int, nargs="+", default=[0, 1, 8], help="processors that it calls")
    parser.add_argument("--calls", type=int, default=5000, help="steps that are measured")
    options = parser.parse_args(arguments)
    print("rows  processors  median (µs)  fastest (µs)")
    for rows in options.rows:
        for processors in options.processors:
            times = microseconds(step(rows, processors), options.calls)
            print(f"{rows:4}  {processors:10}  {statistics.median(times):11.1f}  {min(times):12.1f}")


if __name__ == "__main__":
    main()
