"""Time of `n` continuations of one prompt, compared with `n` requests with one continuation each.

    python benchmarks/parallel_samples.py

Three sides take turns on one engine: one continuation, `n` of them in one request, and `n` requests with one each. With
one output token, the time is that of the prompt: computed once, or `n` times.
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

from logitship import LLM, SamplingParams
from logitship.server.config import DEFAULT_MODEL


@dataclass(frozen=True)
class Result:
    """Medians of all turns.

    Attributes:
        seconds: of a turn, by side: `one`, `n` or `separate`.
        n_over_one: a turn's ratio of `n` to `one`.
        separate_over_n: a turn's ratio of `separate` to `n`.
    """

    prompt_tokens: int
    output_tokens: int
    n: int
    seconds: dict[str, float]
    n_over_one: float
    separate_over_n: float


def measure(llm: LLM, prompt_tokens: int, output_tokens: int, n: int, rounds: int) -> Result:
    """Time the three sides in turns. The first turn warms up."""
    vocab_size = llm.get_tokenizer().vocab_size
    prompt = torch.randint(vocab_size, (prompt_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    turns = [
        {
            "one": seconds(llm, [prompt], 1, output_tokens),
            "n": seconds(llm, [prompt], n, output_tokens),
            "separate": seconds(llm, [prompt] * n, 1, output_tokens),
        }
        for _ in range(rounds + 1)
    ][1:]
    return Result(
        prompt_tokens,
        output_tokens,
        n,
        {side: statistics.median(turn[side] for turn in turns) for side in turns[0]},
        statistics.median(turn["n"] / turn["one"] for turn in turns),
        statistics.median(turn["separate"] / turn["n"] for turn in turns),
    )


def seconds(llm: LLM, prompts: list[list[int]], n: int, output_tokens: int) -> float:
    """Return the time of requests that are submitted together."""
    params = SamplingParams(n=n, seed=0, max_tokens=output_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    sampled = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    assert sampled == len(prompts) * n * output_tokens
    return took


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", type=int, nargs="+", default=[20, 200, 800], help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 32], help="output tokens of each continuation")
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    options = parser.parse_args(arguments)

    facts = machine(torch.get_num_threads())
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    llm = LLM(options.model, max_model_len=max(options.prompts) + max(options.tokens))
    print(f"\nmilliseconds, medians of {options.rounds} turns; ratios: medians of the turns' ratios")
    sides = f"{'one':>8} {f'n = {options.n}':>8} {'separate':>8}"
    print(f"{'prompt':>6} {'output':>6} {sides} {'n/one':>7} {'separate/n':>10}")
    results = []
    for output_tokens in options.tokens:
        for prompt_tokens in options.prompts:
            result = measure(llm, prompt_tokens, output_tokens, options.n, options.rounds)
            results.append(result)
            times = " ".join(f"{each * 1e3:8.0f}" for each in result.seconds.values())
            print(
                f"{prompt_tokens:6} {output_tokens:6} {times} {result.n_over_one:7.2f} {result.separate_over_n:10.2f}",
                flush=True,
            )
    llm.shutdown()
    if options.json:
        figures = {"machine": facts, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
