"""Time that the prefix cache saves, and memory that it needs.

    python benchmarks/prefix_reuse.py

Requests with the same system prompt and different questions are timed up to their first token: with a prefix cache,
without one, and, to find the cost of the question alone, without the system prompt. Then the first server gets far more
different prompts than its cache can hold.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator

import comparison
from served import Server, served

from logitship.server.config import DEFAULT_MODEL

BENCHMARK = "prefix reuse"
QUESTION_TOKENS = 16
_FIRST_TOKEN = 1000
"""Special tokens have lower ids."""


class Prompts:
    """Distinct prompts of token ids. They differ in their first token, so that no two share a block."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def next(self, length: int) -> list[int]:
        """Return a new prompt."""
        return [_FIRST_TOKEN + next(self._numbers), *range(_FIRST_TOKEN, _FIRST_TOKEN + length - 1)]


def first_token(server: Server, prompt: list[int]) -> float:
    """Return the seconds from the request to its first token."""
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    sent, token, *_ = server.stream("/generate", [body])[0]
    return token - sent


def shared_part(
    keeping: Server, computing: Server, prompts: Prompts, options: argparse.Namespace
) -> comparison.Comparison:
    """Compare the milliseconds for the system prompt with and without reuse."""
    system = prompts.next(options.shared_tokens)

    def question() -> list[int]:
        return prompts.next(QUESTION_TOKENS)

    sides = [
        lambda: first_token(keeping, system + question()),
        lambda: first_token(computing, system + question()),
        lambda: first_token(computing, question()),
    ]
    comparison.in_turns(sides, 1)
    kept, computed, without = comparison.in_turns(sides, options.turns)
    return comparison.compare(
        BENCHMARK,
        f"{options.shared_tokens} shared tokens",
        [(both - alone) * 1e3 for both, alone in zip(kept, without, strict=True)],
        [(both - alone) * 1e3 for both, alone in zip(computed, without, strict=True)],
        unit="ms",
        peer_name="no reuse",
        kind=comparison.OF_PEER,
        target=comparison.at_most(0.1),
    )


def memory(server: Server, prompts: Prompts, options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Measure the server's memory growth with all prompts, and with half of them, relative to the cache's limit."""
    before = server.resident_bytes()
    grown = []
    for _ in range(options.prompts):
        first_token(server, prompts.next(options.shared_tokens))
        grown.append((server.resident_bytes() - before) / options.prefix_cache_bytes)
    for count in (options.prompts // 2, options.prompts):
        yield comparison.alone(
            BENCHMARK,
            f"memory growth over the limit, {count} prompts",
            [grown[count - 1]],
            unit="×",
            target=comparison.at_most(1.1),
        )


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the servers take turns, then fill the memory of one."""
    prompts = Prompts()
    common = ["--model", options.model, "--max-model-len", str(options.shared_tokens + 2 * QUESTION_TOKENS)]
    with served(
        [*common, "--prefix-cache-bytes", str(options.prefix_cache_bytes)], [*common, "--prefix-cache-bytes", "0"]
    ) as (keeping, computing):
        yield shared_part(keeping, computing, prompts, options)
        yield from memory(keeping, prompts, options)


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--shared-tokens", type=int, default=700)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=12, help="different ones, which fill the memory")
    parser.add_argument("--prefix-cache-bytes", type=int, default=128 << 20, help="the memory")
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
