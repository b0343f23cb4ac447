"""Time between tokens of requests without a processor, beside requests whose processors are slow.

    python benchmarks/late_processor.py

One server, sandboxes, no API keys. 31 plain streams run beside one more plain stream, beside one whose processor takes
0.3 s of CPU time for each token, and beside twelve whose processors each take 0.85 s. The 99th percentile of the time
between two tokens of the 31 is compared with that of the first turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import comparison
from bystanders import request
from served import Server, gaps_while_all_run, served

from logitship.server.config import DEFAULT_MODEL

BENCHMARK = "late processor"
SPINS = """
import time
import torch
from logitship import CustomLogitProcessor

class Spins{number}(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        end = time.process_time() + {seconds}
        while time.process_time() < end:
            pass
        return logits
"""


@dataclass(frozen=True)
class Case:
    """Slow streams beside the plain ones.

    Attributes:
        seconds: CPU time of each processor for a token.
        tokens: of each stream, at most: the plain streams should end first, but not long before.
        bound: most that the ratio of the 99th percentiles should be.
    """

    count: int
    seconds: float
    tokens: int
    bound: float


CASES = {"one of 0.3 s": Case(1, 0.3, 12, 1.2), "twelve of 0.85 s": Case(12, 0.85, 3, 2.0)}


def slow(body: dict[str, Any], case: Case, number: int) -> dict[str, Any]:
    """Return a request with a slow processor, a class of its own."""
    source = SPINS.format(number=number, seconds=case.seconds)
    sampling = {**body["sampling_params"], "max_new_tokens": case.tokens}
    return {
        **body,
        "sampling_params": sampling,
        "custom_logit_processor": {"source": source, "class_name": f"Spins{number}"},
    }


def percentiles(server: Server, plain: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the median and the 99th percentile of the plain streams' seconds between tokens."""
    arrivals = server.stream("/generate", [*plain, *others])
    numbers = sorted(chain.from_iterable(gaps_while_all_run(arrivals[: len(plain)])))
    return statistics.median(numbers), numbers[int(0.99 * len(numbers))]


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the cases take turns."""
    plain = [request(stream, options.tokens) for stream in range(options.streams)]
    other = request(options.streams, options.tokens)
    arguments = ["--model", options.model, "--max-num-seqs", "64", "--enable-custom-logit-processor"]
    with served(arguments) as (server,):
        sides = [[slow(other, case, number) for number in range(case.count)] for case in CASES.values()]
        sides.append([other])
        results: list[list[tuple[float, float]]] = [[] for _ in sides]
        for turn in range(options.turns + 1):
            for number, others in enumerate(sides):
                result = percentiles(server, plain, others)
                if turn:  # the first turn computes the prompts, and loads the classes
                    results[number].append(result)
    *ours, quiet = results
    for (name, case), found in zip(CASES.items(), ours, strict=True):
        for place, percentile in enumerate(("p50", "p99")):
            yield comparison.compare(
                BENCHMARK,
                f"{name}: {percentile}",
                [each[place] * 1e3 for each in found],
                [each[place] * 1e3 for each in quiet],
                unit="ms",
                peer_name="no slow one",
                kind=comparison.OF_PEER,
                target=comparison.at_most(case.bound) if percentile == "p99" else None,
            )


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=31)
    parser.add_argument("--tokens", type=int, default=60, help="of each stream, in a turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
