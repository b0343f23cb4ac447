"""How long top-k, top-p and the draw take, beside vLLM's own sampler on the same machine, logits and threads.

    python benchmarks/top_k_top_p.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Both sides run in processes of their own and take turns, so that a slow minute of the machine hits both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

WORKER = Path(__file__).with_name("sampling_worker.py")

SHAPES = ("peaked", "flat")
SETTINGS = ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9))
"""(top-k, top-p); 0 and 1 stand for none."""

ZIPF_EXPONENTS = (2.0, 3.5, 1.5, 2.5)
"""Of one row after the other in "peaked" logits: 0.9 of the probability is then some 5 to 500 tokens."""


@dataclass(frozen=True)
class Case:
    """One line of the table. `stage` as in `sampling_worker.RoundOrder`."""

    stage: str
    vocab_size: int
    rows: int
    shape: str
    top_k: int
    top_p: float


@dataclass(frozen=True)
class Result:
    """Times of a case in milliseconds, by side.

    Attributes:
        median: of all calls.
        fastest: of all calls: what other work on the machine disturbed least.
    """

    case: Case
    median: dict[str, float]
    fastest: dict[str, float]


def ratio(milliseconds: dict[str, float]) -> float | None:
    """How many times as long vLLM takes; None if it was not timed."""
    return milliseconds["vllm"] / milliseconds["logitship"] if "vllm" in milliseconds else None


class Side:
    """A worker process. `about` is what it said of itself."""

    def __init__(self, name: str, python: str, threads: int) -> None:
        self._process = subprocess.Popen(
            [python, str(WORKER), name, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "VLLM_LOGGING_LEVEL": "ERROR"},
        )
        self.name = name
        self.about: dict[str, str] = self._read()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def time(self, case: Case, logits: Path, calls: int) -> list[float]:
        """Seconds of each of `calls` calls."""
        order = {"logits": str(logits), "stage": case.stage, "top_k": case.top_k, "top_p": case.top_p, "calls": calls}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = self._read()
        return seconds

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process of {self.name} ended: its error is above")
        return json.loads(line)


def make_logits(shape: str, rows: int, vocab_size: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Logits as a language model gives them, or nearly equal ones: float32 [rows, vocab].

    "peaked": the probabilities of the tokens, in random order, fall with a power of their rank, and have noise.
    """
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((rows, vocab_size), dtype=np.float32)
    if shape == "flat":
        return noise * np.float32(0.1)
    exponents = np.resize(ZIPF_EXPONENTS, rows).astype(np.float32)
    ranks = rng.permuted(np.tile(np.arange(vocab_size, dtype=np.float32), (rows, 1)), axis=1)
    logits: npt.NDArray[np.float32] = -exponents[:, None] * np.log(ranks + 3) + noise * np.float32(0.5)
    return logits


def measure(sides: Sequence[Side], cases: Sequence[Case], rounds: int, calls: int) -> Iterator[Result]:
    """Time each case, the sides in turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "logits.npy")
        for case in cases:
            np.save(path, make_logits(case.shape, case.rows, case.vocab_size))
            seconds: dict[str, list[float]] = {side.name: [] for side in sides}
            for _ in range(rounds):
                for side in sides:
                    seconds[side.name] += side.time(case, path, calls)
            yield Result(
                case,
                median={name: 1000 * statistics.median(times) for name, times in seconds.items()},
                fastest={name: 1000 * min(times) for name, times in seconds.items()},
            )


def machine(threads: int) -> dict[str, str]:
    """What the figures depend on."""
    models = [
        line.partition(":")[2].strip()
        for line in (Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else [])
        if line.startswith("model name")
    ]
    return {
        "processor": models[0] if models else platform.processor() or platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(threads),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


HEADING = (
    f"{'stage':8} {'vocab':>7} {'rows':>4} {'logits':7} {'top-k':>5} {'top-p':>5}  "
    f"{'logitship':>9} {'vLLM':>9} ratio  {'logitship':>9} {'vLLM':>9} ratio"
)


def table_line(result: Result) -> str:
    """One line of the table."""
    case = result.case
    setting = f"{case.top_k or '-':>5} {case.top_p if case.top_p < 1 else '-':>5}"
    times = "  ".join(_times(milliseconds) for milliseconds in (result.median, result.fastest))
    return f"{case.stage:8} {case.vocab_size:7} {case.rows:4} {case.shape:7} {setting}  {times}"


def _times(milliseconds: dict[str, float]) -> str:
    ours, theirs, times = milliseconds["logitship"], milliseconds.get("vllm"), ratio(milliseconds)
    return f"{ours:9.3f} " + (f"{'-':>9} {'-':>5}" if theirs is None else f"{theirs:9.3f} {times:5.1f}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", metavar="PATH", help="a Python that has vLLM; without it only ours is timed")
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936], help="vocabulary sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of the batch")
    parser.add_argument("--stages", nargs="+", choices=("draw", "sampler"), default=["draw", "sampler"])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument("--calls", type=int, default=9, help="calls in each turn")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads of each side")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(arguments)
    product = itertools.product(options.stages, options.vocab, options.rows, SHAPES, SETTINGS)
    cases = [Case(stage, vocab, rows, shape, *setting) for stage, vocab, rows, shape, setting in product]
    pythons = {"logitship": sys.executable} | ({"vllm": options.vllm_python} if options.vllm_python else {})
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, python, options.threads)) for name, python in pythons.items()]
        facts = machine(options.threads)
        for side in sides:
            facts[side.name] = f"{side.about['version']} (torch {side.about['torch']})"
        print("\n".join(f"{name}: {fact}" for name, fact in facts.items()))
        print(f"\nmilliseconds, median and fastest of {options.rounds * options.calls} calls; ratio: vLLM / logitship")
        print(f"{'median':>61}{'fastest':>27}\n{HEADING}")
        results: list[Result] = []
        for result in measure(sides, cases, options.rounds, options.calls):
            results.append(result)
            print(table_line(result), flush=True)
    if options.json:
        lines = [{**asdict(each), "ratio_of_medians": ratio(each.median)} for each in results]
        options.json.write_text(json.dumps({"machine": facts, "results": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
