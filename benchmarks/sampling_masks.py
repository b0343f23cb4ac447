"""Cost and size of sampling masks: streams with `return_sampling_mask`, compared with the same ones without.

    python benchmarks/sampling_masks.py

Both sides take turns on one engine. The size is that of a token's part of the packed record, as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from comparison import machine

from logitship import LLM, RequestOutput, SamplingParams
from logitship.server.config import DEFAULT_MODEL

QUESTIONS = ("What is the moon?", "Write a story about a fox.", "How does a bicycle work?", "Name the seasons.")


@dataclass(frozen=True)
class Result:
    """Medians of all turns.

    Attributes:
        streams: requests at a time.
        top_p: theirs.
        tokens_per_second: without masks.
        kept: a turn's ratio of the tokens per second with masks to those without.
        bytes_per_token: of the packed record.
        tokens_per_mask: tokens that could be sampled.
    """

    streams: int
    top_p: float
    tokens_per_second: float
    kept: float
    bytes_per_token: float
    tokens_per_mask: float


def measure(llm: LLM, streams: int, top_p: float, options: argparse.Namespace) -> Result:
    """Time both sides in turns. The first turn warms up."""
    turns = []
    for turn in range(options.rounds + 1):
        speeds = {}
        for masked in (False, True) if turn % 2 else (True, False):
            params = SamplingParams(
                temperature=options.temperature,
                top_p=top_p,
                seed=turn,
                max_tokens=options.tokens,
                ignore_eos=True,
                return_sampling_mask=masked,
            )
            prompts = [[{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)]}] for i in range(streams)]
            began = time.perf_counter()
            outputs = llm.chat(prompts, params, use_tqdm=False)
            speeds[masked] = streams * options.tokens / (time.perf_counter() - began)
            if masked:
                sizes = [size(output) for output in outputs]
        turns.append((speeds, sizes))
    measured = [speeds for speeds, _ in turns[1:]]
    sizes = [each for _, of_turn in turns[1:] for each in of_turn]
    return Result(
        streams,
        top_p,
        statistics.median(speeds[False] for speeds in measured),
        statistics.median(speeds[True] / speeds[False] for speeds in measured),
        statistics.mean(nbytes for nbytes, _ in sizes),
        statistics.mean(tokens for _, tokens in sizes),
    )


def size(output: RequestOutput) -> tuple[float, float]:
    """Return the bytes of an output's record, and the tokens of its masks, both per output token."""
    record = output.outputs[0].sampling_record
    assert record is not None
    return len(json.dumps(record.to_json())) / len(record), float(record.could_be_sampled().sum()) / len(record)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--top-p", type=float, nargs="+", default=[0.9, 0.95])
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)

    facts = machine(torch.get_num_threads())
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    llm = LLM(options.model, max_num_seqs=max(options.streams), max_model_len=options.tokens + 100)
    print(f"\n{'streams':>7} {'top_p':>6} {'tokens/s':>9} {'with masks':>10} {'bytes/token':>11} {'tokens/mask':>11}")
    results = []
    for streams in options.streams:
        for top_p in options.top_p:
            result = measure(llm, streams, top_p, options)
            results.append(result)
            print(
                f"{streams:7} {top_p:6} {result.tokens_per_second:9.1f} {result.kept:10.3f} "
                f"{result.bytes_per_token:11.1f} {result.tokens_per_mask:11.1f}",
                flush=True,
            )
    llm.shutdown()
    if options.json:
        figures = {"machine": facts, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
