"""Step time of processors that read the history, as it grows, compared with SGLang's step and processors.

    python benchmarks/history_step.py

Two questions: how many times as long SGLang takes with as much history, and whether a step takes longer here with a
long history than with a short one. Both sides do a whole step for 64 rows: following the outputs, and the call with
what surrounds it. Each row gains a token between two steps, which is not timed. The first step of a sequence reads all
of its history on both sides, and is not counted.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from builtin_cases import CASES, VOCAB_SIZE, Case
from builtin_step import PEERS, stage_of
from comparison import OF_OURS, OF_PEER, Comparison, arguments, at_least, at_most, compare, in_turns, report
from step_side import StepSide

from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.batch_processors.logits_processors import take_faults

TITLES = (
    "qwen3_thinking_budget",
    "thinking_budget, one token",
    "no_repeat_ngram, 3 in all",
    "no_repeat_ngram, 30 in 90",
)
"""Cases that read the history and neither mask nor force all of the logits."""

MANY_TIMES = at_least(100)
FLAT = at_most(1.1)
TARGET_LENGTH = 8000
"""Tokens of history at which SGLang should take at least `MANY_TIMES` as long."""


def logitship_side(case: Case, logits: torch.Tensor, histories: Sequence[Sequence[int]]) -> StepSide:
    """Return the processor's part of a step, as the sampler runs it."""
    stage, params = stage_of(case)
    outputs = [list(history[len(history) // 2 :]) for history in histories]
    prompts = [list(history[: len(history) // 2]) for history in histories]
    added = [
        (row, params(row), prompt, output) for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]
    stage.update_state(BatchUpdate(len(added), [], added, []))

    def step() -> None:
        stage.update_state(None)
        stage.apply(logits)
        for _, fault in take_faults([stage]):
            raise fault

    return StepSide(step, outputs, calls=10)


def sglang_side(case: Case, logits: torch.Tensor, histories: Sequence[Sequence[int]], peer: Any) -> StepSide:
    """Return the same step with SGLang's processor and code."""
    assert case.sglang_class is not None
    processor = getattr(peer.custom_logit_processor, case.sglang_class)()
    requests = [
        # SGLang's scheduler keeps tokens in arrays.
        SimpleNamespace(
            origin_input_ids=array("q", history[: len(history) // 2]),
            output_ids=array("q", history[len(history) // 2 :]),
        )
        for history in histories
    ]
    params = [{**case.params(row), "__req__": request} for row, request in enumerate(requests)]
    step = peer.step([(processor, range(len(params)))], params)
    return StepSide(lambda: step(logits), [request.output_ids for request in requests], calls=1)


def measure(case: Case, logits: torch.Tensor, lengths: Sequence[int], turns: int, peer: Any) -> Iterator[Comparison]:
    """Time a case: each length compared with SGLang, if available, and the longest history with the shortest."""
    histories = {length: [case.tokens(row, length) for row in range(len(logits))] for length in lengths}
    ours = {length: logitship_side(case, logits, histories[length]) for length in lengths}
    theirs = {length: sglang_side(case, logits, histories[length], peer) for length in lengths if peer}
    for side in (*ours.values(), *theirs.values()):
        side.turn()
    gc.freeze()  # the collections between turns then have nothing to look at
    for length in theirs:
        target = MANY_TIMES if length == TARGET_LENGTH and "in 90" not in case.title else None
        of_ours, of_peer = in_turns([ours[length].turn, theirs[length].turn], turns)
        title = f"{case.title}, {length} tokens"
        yield compare("history", title, of_ours, of_peer, unit="µs", peer_name="SGLang", kind=OF_OURS, target=target)
    shortest, longest = min(lengths), max(lengths)
    of_long, of_short = in_turns([ours[longest].turn, ours[shortest].turn], 4 * turns)
    title, peer_name = f"{case.title}, {longest} tokens over {shortest}", f"logitship, {shortest} tokens"
    yield compare("history, flat", title, of_long, of_short, unit="µs", peer_name=peer_name, kind=OF_PEER, target=FLAT)
    gc.unfreeze()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print as it goes."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 1000, 8000, 16_000], help="tokens of history")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="PyTorch threads")
    parser.add_argument("--without-sglang", action="store_true", help="nothing is downloaded")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    peer = None
    if not options.without_sglang:
        sys.path.insert(0, str(PEERS))
        import sglang_peer  # type: ignore[import-not-found, unused-ignore]

        peer = sglang_peer.load()
    logits = torch.randn(options.rows, VOCAB_SIZE)
    cases = [case for case in CASES if case.title in TITLES]
    report(
        (each for case in cases for each in measure(case, logits, options.lengths, options.turns, peer)), options.json
    )


if __name__ == "__main__":
    main()
