"""Speedup of prompt-lookup drafts, and their cost where a text does not repeat itself.

    python benchmarks/speculative_decoding.py

Two servers, one with `--speculative-algorithm NGRAM` and one without, stream the same requests in turns. Every request
has a processor, which runs in a sandbox. Compared is the time for a token, from the first prompt to the last token.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import comparison
import torch
from served import Server, served

from logitship import CustomLogitProcessor
from logitship.server.config import DEFAULT_MODEL

BENCHMARK = "drafts"
_TOKENS = "logitship_generation_tokens_total"

PARAGRAPHS = [
    "The town council met on Monday evening to vote on the new bridge. After two hours of debate, the members agreed"
    " to spend four million dollars on it. Work will begin in March and should take about two years. Until then, the"
    " old bridge stays open for cars, but trucks have to take the road along the river.",
    "Honey bees find flowers by their colour and their smell. When a bee has found a good place, it flies home and"
    " tells the others by a dance. The direction of the dance shows the way, and the speed of it shows how far away"
    " the flowers are. A single bee may visit two thousand flowers in a day.",
    "The library opens at nine in the morning and closes at eight in the evening. Members may borrow ten books for"
    " four weeks, and renew them twice. Films and games are lent for one week only. Books that come back late cost"
    " twenty cents a day, but children never have to pay.",
]
CODE = [
    "def total_price(items):\n    total = 0\n    for item in items:\n        total = total + item.price * item.count\n"
    "    return total\n\n\ndef average_price(items):\n    return total_price(items) / len(items)\n",
    "class Counter:\n    def __init__(self):\n        self.counts = {}\n\n    def add(self, key):\n"
    "        self.counts[key] = self.counts.get(key, 0) + 1\n\n    def most_common(self):\n"
    "        return max(self.counts, key=self.counts.get)\n",
    "def read_lines(path):\n    with open(path) as file:\n        lines = file.readlines()\n"
    "    return [line.strip() for line in lines]\n\n\ndef write_lines(path, lines):\n"
    "    with open(path, 'w') as file:\n        file.write('\\n'.join(lines))\n",
]
_REWRITES = [
    "Proofread this text. Answer with the corrected text only",
    "Make this text a little shorter, but keep its words",
]
_EDITS = [
    "Add type hints to this code. Answer with the whole code",
    "Fix the bugs in this code, and answer with all of it",
]
REPEATING = [
    *(f"{rewrite}:\n\n{text}" for rewrite in _REWRITES for text in PARAGRAPHS),
    *(f"{edit}:\n\n```python\n{code}```" for edit in _EDITS for code in CODE),
]
"""Tasks in whose answers a model as small as SmolLM2-135M repeats much of the prompt."""
NOT_REPEATING = [
    "Write a short story about a girl who finds a door in a tree.",
    "Explain how rain is made.",
    "Give me ten names for a cat, and say why each is good.",
    "What should I think of before I buy a bicycle?",
    "Write a letter to a friend about a trip to the sea.",
    "Describe the taste of an apple to somebody who never ate one.",
]


class Softer(CustomLogitProcessor):
    """Processor of every request: slightly lowers the logits of the last few tokens."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Edit the rows in place."""
        for row, params in enumerate(custom_param_list or ()):
            logits[row, params["__req__"].output_ids[-4:]] -= params["by"]
        return logits


def seconds_per_token(server: Server, prompts: list[str], streams: int, more: dict[str, Any]) -> float:
    """Generate the answers, with a fixed number of concurrent requests.

    The answers have different lengths. If all ended in the same step, the next prompts would be computed together,
    which does not happen with real users.

    Args:
        server: generates the answers.
        prompts: one per request.
        streams: number of concurrent requests.
        more: further fields of each request; `max_tokens` is that of the longest.
    """
    bodies = [
        {
            "messages": [{"role": "user", "content": prompt}],
            **more,
            "max_tokens": more["max_tokens"] * (8 + 5 * number % 8) // 15,
        }
        for number, prompt in enumerate(prompts)
    ]
    before = server.metrics()[_TOKENS]
    began = time.perf_counter()
    server.stream("/v1/chat/completions", bodies, streams)
    took = time.perf_counter() - began
    return took / (server.metrics()[_TOKENS] - before)


SAMPLING = {"greedy": {"temperature": 0.0}, "random": {"temperature": 0.7, "top_p": 0.95, "seed": 1}}


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the servers take turns."""
    common = ["--model", options.model, "--max-num-seqs", str(max(options.streams)), "--max-model-len", "1024"]
    common.append("--enable-custom-logit-processor")
    drafting = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(options.num_draft_tokens)]
    processor_fields = {"custom_logit_processor": Softer.to_str(), "custom_params": {"by": 0.05}}
    with served([*common, *drafting], common) as servers:
        for texts, of_kind in (("repeating", REPEATING), ("not repeating", NOT_REPEATING)):
            for streams, (name, sampling) in itertools.product(options.streams, SAMPLING.items()):
                prompts = [of_kind[number % len(of_kind)] for number in range(max(2 * streams, len(of_kind)))]
                body = {**processor_fields, **sampling, "max_tokens": options.max_tokens}
                sides = [partial(seconds_per_token, server, prompts, streams, body) for server in servers]
                comparison.in_turns(sides, 1)  # the first turn is to warm up
                ours, peer = comparison.in_turns(sides, options.turns)
                yield comparison.compare(
                    BENCHMARK,
                    f"{texts}, {name}, {streams} at a time",
                    [seconds * 1e3 for seconds in ours],
                    [seconds * 1e3 for seconds in peer],
                    unit="ms/token",
                    peer_name="no drafts",
                    kind=comparison.OF_OURS,
                    target=comparison.at_least(1.5 if texts == "repeating" else 0.95),
                )


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
