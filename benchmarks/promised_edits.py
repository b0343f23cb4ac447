"""Costs of recorded edits: what the sandbox records and encodes, and what the server decodes and applies.

    python benchmarks/promised_edits.py

A recorded call is compared with the same call on real logits, in turns. Decoding and applying, which are on a step's
critical path, have targets in microseconds.
"""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from comparison import OF_PEER, Comparison, Target, alone, arguments, at_most, compare, in_turns, print_machine, report

from logitship.sampler.edits.edit_codec import VectorSender, VectorStore, decode, encode
from logitship.sampler.edits.logit_edits import EditLog
from logitship.sampler.edits.merged_edits import apply_edits
from logitship.sampler.promised_logits.promise import Promise
from logitship.sampler.promised_logits.promised_memory import RecentCalls

BENCHMARK = "promised edits"
REPEATS = 50
BANNED, ALLOWED = 100, 5

Call = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Work:
    """A call of a processor, for a vocabulary.

    Attributes:
        name: what it does.
        call: edits logits [rows, vocab], and returns them.
        is_small: True if its edits have few elements, so that it has a target for the time to record them.
    """

    name: str
    call: Call
    is_small: bool


def works(vocab_size: int) -> list[Work]:
    """Return the calls."""
    generator = random.Random(0)
    banned = [generator.sample(range(vocab_size), BANNED) for _ in range(32)]
    allowed = [sorted(generator.sample(range(vocab_size), ALLOWED)) for _ in range(32)]
    ids = torch.tensor(banned[0])
    bias = torch.randn(vocab_size)
    sparse_bias = torch.zeros(vocab_size).index_fill_(0, ids, 1.5)
    mask = torch.rand(vocab_size) > 0.5

    def ban(logits: torch.Tensor) -> torch.Tensor:
        for row, forbidden in zip(range(len(logits)), banned, strict=False):
            logits[row, forbidden] = -math.inf
        return logits

    def keep(logits: torch.Tensor) -> torch.Tensor:
        for row, kept in zip(range(len(logits)), allowed, strict=False):
            values = logits[row, kept].clone()
            logits[row] = -math.inf
            logits[row, kept] = values
        return logits

    def force(logits: torch.Tensor) -> torch.Tensor:
        for row in range(len(logits)):
            logits[row] = -math.inf
            logits[row, banned[row][0]] = 0.0
        return logits

    def add_to_ids(logits: torch.Tensor) -> torch.Tensor:
        logits[:, ids] += 1.5
        return logits

    def scale(logits: torch.Tensor) -> torch.Tensor:
        return logits / 0.7

    def add_vector(logits: torch.Tensor) -> torch.Tensor:
        logits += bias
        return logits

    def add_sparse_vector(logits: torch.Tensor) -> torch.Tensor:
        return logits + sparse_bias

    def put_mask(logits: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(mask, -math.inf)

    return [
        Work("ban", ban, is_small=True),
        Work("keep", keep, is_small=True),
        Work("force", force, is_small=True),
        Work("add to ids", add_to_ids, is_small=True),
        Work("scale", scale, is_small=True),
        Work("add vector", add_vector, is_small=False),
        Work("add sparse vector", add_sparse_vector, is_small=False),
        Work("put mask", put_mask, is_small=False),
    ]


def fastest(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the microseconds of the fastest of several calls, which other work on the machine disturbed least."""
    times = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return 1e6 * min(times)


def record(call: Call, rows: int, vocab_size: int, recent: RecentCalls | None = None) -> EditLog:
    """Return the edits of a call on promised logits."""
    promise = Promise.begin(rows, vocab_size, _no_logits, recent)
    log = promise.conclude(call(promise.take()))
    promise.end()
    assert isinstance(log, EditLog)
    return log


def _no_logits() -> torch.Tensor:
    raise SystemExit("a call of this benchmark used a value of its logits")


def measure_recording(work: Work, rows: int, logits: torch.Tensor, turns: int) -> Comparison:
    """Compare a recorded and encoded call with one on real logits."""
    recent, vectors = RecentCalls(), VectorSender()
    vocab_size = logits.shape[-1]

    def recorded() -> float:
        return fastest(lambda: encode(record(work.call, rows, vocab_size, recent), vectors))

    def eager() -> float:
        return fastest(lambda: work.call(logits[:rows]))

    ours, theirs = in_turns([recorded, eager], turns)
    target = at_most(2.0) if work.is_small else None
    title = f"record {work.name}, {rows} × {vocab_size}"
    return compare(BENCHMARK, title, ours, theirs, unit="µs", peer_name="eager", kind=OF_PEER, target=target)


def measure_applying(
    work: Work, groups: int, rows: int, logits: torch.Tensor, turns: int, *, adjacent: bool
) -> Iterator[Comparison]:
    """Time the edits of several groups at the server."""
    vocab_size = logits.shape[-1]
    vectors = VectorSender(), VectorStore(vocab_size)
    log = record(work.call, rows, vocab_size)
    decode(encode(log, vectors[0]), rows, vocab_size, vectors[1])  # sends the vector
    data = encode(log, vectors[0])
    numbers = range(groups * rows)
    group_rows = [
        numbers[group * rows : (group + 1) * rows] if adjacent else list(numbers[group::groups])
        for group in range(groups)
    ]

    def decoded() -> None:
        for _ in range(groups):
            decode(data, rows, vocab_size, vectors[1])

    def both() -> None:
        apply_edits(logits, [(each, decode(data, rows, vocab_size, vectors[1])) for each in group_rows])

    title = f"{work.name}, {rows} × {groups}, {vocab_size}{'' if adjacent else ', scattered'}"
    target = _target(groups, rows) if work.name == "ban" else None
    yield alone(BENCHMARK, f"decode and apply {title}", [fastest(both) for _ in range(turns)], unit="µs", target=target)
    yield alone(BENCHMARK, f"decode {title}", [fastest(decoded) for _ in range(turns)], unit="µs")


def _target(groups: int, rows: int) -> Target:
    return at_most(300) if groups > 1 else at_most(150 if rows > 8 else 60)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print as it goes."""
    parser = arguments(__doc__)
    parser.add_argument("--works", nargs="+", help="names of some of the calls")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[49_152, 151_936])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    options = parser.parse_args(argv)
    print_machine(options.threads)

    def comparisons() -> Iterator[Comparison]:
        for vocab_size in options.vocab_sizes:
            logits = torch.randn(32, vocab_size)
            for work in works(vocab_size):
                if work.name not in (options.works or [work.name]):
                    continue
                for rows in (1, 8, 32):
                    yield measure_recording(work, rows, logits, options.turns)
                for rows, groups in ((1, 1), (8, 1), (32, 1), (4, 8), (1, 32)):
                    yield from measure_applying(work, groups, rows, logits, options.turns, adjacent=True)
                yield from measure_applying(work, 8, 4, logits, options.turns, adjacent=False)

    report(comparisons(), options.json)


if __name__ == "__main__":
    main()
