"""What prompt-lookup drafts save, and what they cost where a text does not repeat itself.

    python benchmarks/speculative_decoding.py

Two engines on the same model, one with `--speculative-algorithm NGRAM` and one without, generate the same prompts in
turns. Every request carries a processor. The ratio is that of the times from the first prompt to the last token; above
1 the drafts are worth it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from top_k_top_p import machine

from logitship import LLM, CustomLogitProcessor, SamplingParams

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
    """Every request carries it: lowers what was said in the last few tokens a little."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Edit the rows in place."""
        for row, params in enumerate(custom_param_list or ()):
            logits[row, params["__req__"].output_ids[-4:]] -= params["by"]
        return logits


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        plain: seconds without drafts, of each round.
        drafted: with them.
        tokens: output tokens of a round.
    """

    texts: str
    streams: int
    sampling: str
    plain: list[float]
    drafted: list[float]
    tokens: int

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(a / b for a, b in zip(self.plain, self.drafted, strict=True))


def measure(
    engines: tuple[LLM, LLM], texts: str, streams: int, sampling: dict[str, Any], rounds: int, max_tokens: int
) -> Result:
    """Generate the prompts with both engines, so many at a time."""
    prompts = REPEATING if texts == "repeating" else NOT_REPEATING
    prompts = [prompts[number % len(prompts)] for number in range(max(streams, len(prompts)))]
    params = SamplingParams(max_tokens=max_tokens, processors=[(Softer, {"by": 0.05})], **sampling)
    times: tuple[list[float], list[float]] = ([], [])
    tokens = 0
    for turn in range(rounds + 1):
        for side in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            tokens = 0
            for first in range(0, len(prompts), streams):
                messages = [[{"role": "user", "content": prompt}] for prompt in prompts[first : first + streams]]
                outputs = engines[side].chat(messages, params, use_tqdm=False)
                tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            if turn:  # the first one warms up
                times[side].append(time.perf_counter() - began)
    name = "greedy" if sampling["temperature"] == 0 else "random"
    return Result(texts, streams, name, *times, tokens)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="requests at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(arguments)
    facts = machine(torch.get_num_threads()) | {"torch": torch.__version__}
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    engines = (
        LLM(max_model_len=1024),
        LLM(
            max_model_len=1024,
            speculative_algorithm="NGRAM",
            speculative_num_draft_tokens=options.num_draft_tokens,
        ),
    )
    print(f"\n{'texts':14} {'streams':>7} {'sampling':8} {'tokens/s':>8} {'drafted':>8} {'ratio':>6}")
    results = []
    for texts in ("repeating", "not repeating"):
        for streams in options.streams:
            for sampling in ({"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.95, "seed": 1}):
                result = measure(engines, texts, streams, sampling, options.rounds, options.max_tokens)
                results.append(result)
                plain, drafted = (result.tokens / statistics.median(each) for each in (result.plain, result.drafted))
                print(
                    f"{texts:14} {streams:7} {result.sampling:8} {plain:8.1f} {drafted:8.1f} {result.ratio:6.2f}",
                    flush=True,
                )
    if options.json:
        figures: dict[str, Any] = {"machine": facts, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
