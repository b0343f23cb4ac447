"""Time between tokens of requests without a processor, while other requests have one.

    python benchmarks/bystanders.py

Servers take turns with the same number of streams, half of which have no processor (the bystanders): one server does
not run shipped processors; one runs them in sandboxes, with a processor for the other half, or, in separate turns, for
no request; and one runs them in its own process. The time between two tokens of the bystanders is compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from itertools import chain
from typing import Any

import comparison
from processors import BanSome
from served import Server, gaps_while_all_run, served

from logitship.server.config import DEFAULT_MODEL

BENCHMARK = "bystanders"
PROMPT_TOKENS = 17
"""A block of the prefix cache and the token after it: from the second turn on, no request waits for a prompt."""
NUM_BANNED = 100


def request(stream: int, tokens: int) -> dict[str, Any]:
    """Return the body of a request without a processor, different for each stream."""
    return {
        "input_ids": [1000 + 97 * stream + place for place in range(PROMPT_TOKENS)],
        "sampling_params": {
            "max_new_tokens": tokens,
            "temperature": 0.8,
            "top_p": 0.95,
            "sampling_seed": stream,
            "ignore_eos": True,
        },
    }


def with_processor(body: dict[str, Any], processor: str, stream: int) -> dict[str, Any]:
    """Return the same request with a processor, and parameters of its own."""
    sampling = {**body["sampling_params"], "custom_params": {"banned": list(range(stream, stream + NUM_BANNED))}}
    return {**body, "sampling_params": sampling, "custom_logit_processor": processor}


def between_tokens(server: Server, requests: list[dict[str, Any]]) -> float:
    """Return the median seconds between tokens of the first half of the requests, while all are running."""
    gaps = gaps_while_all_run(server.stream("/generate", requests))
    return statistics.median(chain.from_iterable(gaps[: len(gaps) // 2]))


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the servers take turns."""
    half = options.streams // 2
    plain = [request(stream, options.tokens) for stream in range(options.streams)]
    string = BanSome.to_str()
    mixed = plain[:half] + [with_processor(body, string, stream) for stream, body in enumerate(plain[half:])]
    common = ["--model", options.model, "--max-num-seqs", str(options.streams)]
    shipping = [*common, "--enable-custom-logit-processor"]
    with served(common, shipping, [*shipping, "--processor-isolation", "none"]) as (off, sandboxes, in_process):
        sides = {
            "other requests use a sandboxed processor": lambda: between_tokens(sandboxes, mixed),
            "the flag is on, no request uses it": lambda: between_tokens(sandboxes, plain),
            "other requests use a processor in the server's process": lambda: between_tokens(in_process, mixed),
            "off": lambda: between_tokens(off, plain),
        }
        comparison.in_turns(list(sides.values()), 1)  # the first turn computes the prompts
        *ours, peer = comparison.in_turns(list(sides.values()), options.turns)
    for case, times in zip(sides, ours, strict=False):
        yield comparison.compare(
            BENCHMARK,
            f"{half} bystanders: {case}",
            [seconds * 1e3 for seconds in times],
            [seconds * 1e3 for seconds in peer],
            unit="ms",
            peer_name="the flag off",
            kind=comparison.OF_PEER,
            target=comparison.at_most(1.01) if "process" not in case else None,
        )


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=10, help="of each stream, in a turn")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
