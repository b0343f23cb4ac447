"""Cost of `--enable-deterministic-inference`: a step's forward pass with and without it.

    python benchmarks/deterministic_inference.py

Two copies of the model, one of them prepared for deterministic inference, take turns in this process. A step decodes
some rows, each with a history, or computes a piece of a prompt. The rest of a step, sampling the tokens, is
the same on both sides and is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from comparison import machine

from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.model.model_loader import LoadedModel, load_model
from logitship.server.model.model_runner import Chunk, ModelRunner


@dataclass(frozen=True)
class Case:
    """A step: `rows` decoding sequences with `history` tokens each, or `prompt` tokens of a new one."""

    rows: int
    history: int
    prompt: int

    @property
    def title(self) -> str:
        """Name of the case in the table."""
        return f"prefill {self.prompt} tokens" if self.prompt else f"decode {self.rows} rows"

    def step(self, runner: ModelRunner) -> Callable[[], torch.Tensor]:
        """Run the forward pass; return float32 [rows or 1, vocab]. The history is all zeros, which take as long."""
        if self.prompt:
            chunk = Chunk(0, 0, [number % runner.model.config.vocab_size for number in range(self.prompt)])
            return lambda: runner.logits([], [chunk], [self.prompt - 1])
        chunks = [Chunk(slot, self.history, [slot]) for slot in range(self.rows)]
        return lambda: runner.logits(chunks, [], list(range(self.rows)))


@dataclass(frozen=True)
class Result:
    """Times of a case in milliseconds, by side.

    Attributes:
        median: of all steps.
        fastest: of all steps: what other work on the machine disturbed least.
        ratio: the median of the turns' ratios, deterministic to plain.
    """

    case: Case
    median: dict[str, float]
    fastest: dict[str, float]
    ratio: float


def measure(case: Case, runners: Mapping[str, ModelRunner], rounds: int) -> Result:
    """Time a step, the sides in turns. The first turn warms up."""
    steps = {side: case.step(runner) for side, runner in runners.items()}
    turns = [{side: milliseconds(step) for side, step in steps.items()} for _ in range(rounds + 1)][1:]
    times = {side: [turn[side] for turn in turns] for side in steps}
    return Result(
        case,
        median={side: statistics.median(each) for side, each in times.items()},
        fastest={side: min(each) for side, each in times.items()},
        ratio=statistics.median(turn["deterministic"] / turn["plain"] for turn in turns),
    )


def milliseconds(step: Callable[[], torch.Tensor]) -> float:
    """Return the time of a step. The copy to the host waits for an accelerator to finish."""
    began = time.perf_counter()
    step().cpu()
    return (time.perf_counter() - began) * 1e3


def prepare(load: Callable[[], LoadedModel], cases: Sequence[Case]) -> dict[str, ModelRunner]:
    """Return both sides, each with its own model and cache."""
    rows = max(case.rows for case in cases)
    length = max(case.history + 1 + case.prompt for case in cases)
    return {
        side: ModelRunner(load().model, rows, length, deterministic=side == "deterministic")
        for side in ("plain", "deterministic")
    }


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="decoding sequences")
    parser.add_argument("--history", type=int, default=200, help="tokens of each before the step")
    parser.add_argument("--prompts", type=int, nargs="+", default=[256], help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="PyTorch threads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    config = ServerConfig(model_path=options.model, device=options.device, dtype=options.dtype)
    cases = [Case(rows, options.history, 0) for rows in options.rows]
    cases += [Case(1, 0, tokens) for tokens in options.prompts]
    runners = prepare(lambda: load_model(config), cases)
    facts = machine(options.threads)
    facts |= {"model": options.model, "device": str(runners["plain"].device), "dtype": str(runners["plain"].dtype)}
    print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
    print(f"\nmilliseconds of a forward pass, medians of {options.rounds}; ratio: the median of the turns' ratios")
    print(f"{'':20} {'plain':>8} {'deterministic':>13} {'ratio':>6}")
    results = []
    for case in cases:
        result = measure(case, runners, options.rounds)
        results.append(result)
        times = f"{result.median['plain']:8.1f} {result.median['deterministic']:13.1f}"
        print(f"{case.title:20} {times} {result.ratio:6.2f}", flush=True)
    if options.json:
        figures: dict[str, Any] = {"machine": facts, "results": [asdict(each) for each in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
