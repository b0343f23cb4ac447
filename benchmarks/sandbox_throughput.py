"""Throughput of a server whose requests all have a processor in a sandbox.

    python benchmarks/sandbox_throughput.py

Two engines with the same model take turns in one run: one runs shipped processors in its own process
(`--processor-isolation none`), the other in sandboxes. All requests have the same class, with parameters of their own.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from comparison import machine

from logitship import LLM, CustomLogitProcessor, SamplingParams
from logitship.server.config import DEFAULT_MODEL

ISOLATIONS = ("none", "sandbox")
PROMPT = "The moon is"


class BanSome(CustomLogitProcessor):
    """Forbids each request's own tokens, as most shipped processors do."""

    def __call__(self, logits, custom_param_list=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        """Edit the rows in place."""
        for row, params in zip(logits, custom_param_list, strict=True):
            row[params["banned"]] = -float("inf")
        return logits


def requests(streams: int, tokens: int) -> list[SamplingParams]:
    """Return one request per stream."""
    return [
        SamplingParams(
            temperature=0.8,
            top_p=0.95,
            seed=stream,
            max_tokens=tokens,
            ignore_eos=True,
            custom_logit_processor=BanSome,
            custom_params={"banned": list(range(stream, stream + 100))},
        )
        for stream in range(streams)
    ]


def tokens_per_second(llm: LLM, streams: int, tokens: int) -> float:
    """Return the output tokens per second, prefill included."""
    began = time.perf_counter()
    outputs = llm.generate([PROMPT] * streams, requests(streams, tokens), use_tqdm=False)
    seconds = time.perf_counter() - began
    sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert sampled == streams * tokens
    return sampled / seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each engine")
    options = parser.parse_args()

    print("\n".join(f"{name}: {value}" for name, value in machine(torch.get_num_threads()).items()))
    engines = {isolation: LLM(options.model, processor_isolation=isolation) for isolation in ISOLATIONS}
    print(f"\noutput tokens per second, median of {options.rounds} turns; ratio: median of the turns' ratios")
    print(f"{'streams':>7} {'none':>8} {'sandbox':>8} {'ratio':>6}")
    for streams in options.streams:
        for llm in engines.values():
            tokens_per_second(llm, streams, 2)
        turns = [
            [tokens_per_second(llm, streams, options.tokens) for llm in engines.values()] for _ in range(options.rounds)
        ]
        none, sandbox = (statistics.median(side) for side in zip(*turns, strict=True))
        ratio = statistics.median(turn[1] / turn[0] for turn in turns)
        print(f"{streams:7} {none:8.1f} {sandbox:8.1f} {ratio:6.3f}", flush=True)
    for llm in engines.values():
        llm.shutdown()


if __name__ == "__main__":
    main()
