"""Costs of calls that are recorded before their logits exist, for each processor of the tests' corpus.

    python benchmarks/recorded_calls.py

Both calls are made as a sandbox makes them, in turns: one with its logits, and one with promised logits, whose edits
are recorded and encoded. Each row gains a token between two calls. Processors that use the values of their logits, or
raise, are left out.

The target is for processors with small edits. `DENSE` add a vector to whole rows, in which the edited tokens have to be
found.
"""

from __future__ import annotations

import gc
import importlib
import io
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from comparison import OF_PEER, Comparison, arguments, at_most, compare, print_machine, report

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import edit
from logitship.sampler.edits.edit_codec import VectorSender, encode
from logitship.sampler.promised_logits.promised_memory import RecentCalls
from logitship.sampler.sandbox.promised_call import PromisedCall

ROOT = Path(__file__).parents[1]
BENCHMARK = "recorded calls"
WARM_UP = 5
DENSE = frozenset({"Alliteration", "frequency_penalty"})
ENDS_THE_PROCESS = frozenset({"speed: NotForMany"})


class ReadsLogits(Exception):
    """The processor used a value."""


class Side:
    """A processor, and the rows that it is called for.

    Args:
        case: the processor, see `promised_corpus.Case`.
        tokenizer: has as many tokens as the logits have columns.
        rows: the parameters of each row.
    """

    def __init__(self, case: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        self._processor = case.create(tokenizer)
        self._rows = rows
        self._recent, self._vectors = RecentCalls(), VectorSender()

    def _call(self, logits: torch.Tensor) -> object:
        return self._processor(logits, self._rows)

    def with_logits(self, logits: torch.Tensor) -> None:
        """Call the processor on logits."""
        edit(self._call, logits, name="P", shipped_class=type(self._processor), in_sandbox=True)

    def promised(self, logits: torch.Tensor) -> None:
        """Call the processor on promised logits, and encode its edits."""
        call = PromisedCall(logits, _receive, self._recent)
        call.edit(self._call, name="P", shipped_class=type(self._processor))
        if call.edits is None:
            raise ReadsLogits
        encode(call.edits, self._vectors)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append a token to each row."""
        for params, token in zip(self._rows, tokens, strict=True):
            params["__req__"].output_ids.append(token)


def _receive() -> None:
    raise ReadsLogits


def microseconds(call: Callable[[], None]) -> float:
    """Return the time of a call. What it prints is dropped."""
    with redirect_stdout(io.StringIO()):
        began = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began)


def measure(case: Any, row_params: Callable[[], dict[str, Any]], tokenizer: Any, rows: int, steps: int) -> Comparison:
    """Compare recorded calls of a processor with calls on logits.

    Raises:
        ReadsLogits: it used values, or kept its logits.
        ProcessorFault: it raised.
    """
    ours, theirs = (Side(case, tokenizer, [row_params() for _ in range(rows)]) for _ in range(2))
    logits = torch.randn(rows, len(tokenizer))
    times: tuple[list[float], list[float]] = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP + steps):
            times[0].append(microseconds(partial(ours.promised, logits)))
            times[1].append(microseconds(partial(theirs.with_logits, logits)))
            tokens = [random.randrange(5, 250) for _ in range(rows)]
            ours.extend(tokens)
            theirs.extend(tokens)
    finally:
        gc.enable()
    recorded, eager = (each[WARM_UP:] for each in times)
    title = f"{case.name}, {rows} × {len(tokenizer)}"
    target = None if case.name in DENSE else at_most(2.0)
    return compare(BENCHMARK, title, recorded, eager, unit="µs", peer_name="eager", kind=OF_PEER, target=target)


def comparisons(names: Sequence[str], all_rows: Sequence[int], vocab_size: int, steps: int) -> Iterator[Comparison]:
    """Yield all comparisons."""
    sys.path.insert(0, str(ROOT))
    corpus = importlib.import_module("tests.sampler.promised_logits.promised_corpus")
    tokenizer = importlib.import_module("tests.conftest")._byte_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(vocab_size - len(tokenizer))])
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            case
            for case in corpus.cases(Path(folder))
            if not case.dense_reason and case.name not in ENDS_THE_PROCESS and case.name in (names or [case.name])
        ]
        for rows in all_rows:
            for case in cases:
                row_params = partial(corpus.row_params, case, tokenizer, vocab_size)
                try:
                    yield measure(case, row_params, tokenizer, rows, steps)
                except (ReadsLogits, ProcessorFault):
                    continue


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print as it goes."""
    parser = arguments(__doc__)
    parser.add_argument("--names", nargs="+", help="names of some processors")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    options = parser.parse_args(argv)
    print_machine(options.threads)
    report(comparisons(options.names, options.rows, options.vocab_size, options.steps), options.json)


if __name__ == "__main__":
    main()
