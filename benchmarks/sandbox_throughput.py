"""Throughput of a server whose requests all have a processor in a sandbox.

    python benchmarks/sandbox_throughput.py

Two engines with the same model take turns: one runs shipped processors in its own process (`--processor-isolation
none`), the other in sandboxes. Each engine has a process of its own, because the threads of two would share the cores.
All requests have the same class, with parameters of their own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from comparison import OF_PEER, Comparison, arguments, at_least, compare, in_turns, report
from worker_process import WorkerProcess

from logitship.server.config import DEFAULT_MODEL

BENCHMARK = "sandbox throughput"
WORKER = Path(__file__).with_name("sandbox_throughput_worker.py")


def measure(options: argparse.Namespace) -> Iterator[Comparison]:
    """Let the engines take turns with each number of streams."""
    threads = len(os.sched_getaffinity(0))

    def engine(isolation: str) -> WorkerProcess:
        return WorkerProcess(sys.executable, WORKER, [options.model, isolation, str(options.tokens)], threads)

    with engine("sandbox") as sandboxes, engine("none") as none:
        for streams in options.streams:
            sides = [partial(side.ask, streams) for side in (sandboxes, none)]
            in_turns(sides, options.warm_up)
            ours, peer = in_turns(sides, options.turns)
            yield compare(
                BENCHMARK,
                f"{streams} stream{'s' if streams > 1 else ''}",
                ours,
                peer,
                unit="tokens/s",
                peer_name="in process",
                kind=OF_PEER,
                target=at_least(0.98),
            )


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each stream")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--warm-up", type=int, default=2, help="turns before those that are measured")
    options = parser.parse_args()
    report(measure(options), options.json)


if __name__ == "__main__":
    main()
