"""Step time of the built-in batch processors while requests are added, removed and moved, compared with vLLM's three.

    python benchmarks/batch_processors.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Both sides run in processes of their own, take turns, and get the same `BatchUpdate`s and logits. Timed are
`update_state` and `apply`, the mean of all steps: in every fourth the batch changes.
"""

from __future__ import annotations

import itertools
import random
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparison import OF_PEER, Comparison, alone, arguments, at_most, compare, in_turns, report
from worker_process import WorkerProcess, beside_vllm

from logitship.sampler.batch.persistent_batch import PersistentBatch
from logitship.sampler.batch_processors.interface import BatchUpdate
from logitship.sampler.sampling_params import SamplingParams

WORKER = Path(__file__).with_name("batch_processors_worker.py")
BENCHMARK = "batch processors"

PROCESSORS = ("min_p", "logit_bias", "min_tokens")
CHANGES_EVERY = 4


@dataclass(eq=False)
class Request:
    """Request in the batch.

    Attributes:
        fields: of its `SamplingParams`.
    """

    fields: dict[str, Any]
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    prompt_token_ids: list[int] = field(default_factory=list)
    output_token_ids: list[int] = field(default_factory=list)


def request(rng: random.Random, vocab_size: int, share: float) -> Request:
    """Return a request that uses each processor with a probability of `share`."""
    fields: dict[str, Any] = {"max_tokens": 200}
    if rng.random() < share:
        fields["min_p"] = rng.choice((0.02, 0.05, 0.1))
    if rng.random() < share:
        fields["logit_bias"] = {token: rng.uniform(-5, 5) for token in rng.sample(range(vocab_size), 20)}
    if rng.random() < share:
        fields |= {"min_tokens": rng.randint(5, 100), "stop_token_ids": rng.sample(range(vocab_size), 3)}
    return Request(fields)


def life_of_a_batch(rows: int, vocab_size: int, share: float, steps: int) -> list[dict[str, Any] | None]:
    """Return the updates of `batch_processors_worker.Command`.

    The batch is always full: every fourth step, an eighth of its requests end, others are added, and two are swapped.
    """
    rng = random.Random(rows)
    batch: PersistentBatch[Request] = PersistentBatch(rows)
    life: list[dict[str, Any] | None] = []
    for step in range(steps):
        if step % CHANGES_EVERY:
            life.append(None)
            continue
        leaving = rng.sample(batch.members, len(batch) and max(1, rows // 8))
        for member in leaving:
            batch.remove(member)
        # One fewer in every second change: then a row moves into the gap.
        for _ in range(rows - len(batch) - (step // CHANGES_EVERY) % 2):
            batch.add(request(rng, vocab_size, share))
        batch.condense()
        if len(batch) > 1:
            batch.swap(*rng.sample(range(len(batch)), 2))
        update = batch.commit()
        assert update is not None
        life.append(_as_json(update, batch))
    return life


def _as_json(update: BatchUpdate, batch: PersistentBatch[Request]) -> dict[str, Any]:
    of_params = {id(member.sampling_params): member.fields for member in batch.members}
    return {
        "size": update.batch_size,
        "removed": list(update.removed),
        "added": [(row, of_params[id(params)]) for row, params, _, _ in update.added],
        "moved": [(source, target, direction.name) for source, target, direction in update.moved],
    }


def measure(ours: WorkerProcess, peer: WorkerProcess | None, options: Namespace) -> Iterator[Comparison]:
    """Time each case, with the sides in turns."""
    for vocab_size, rows, share in itertools.product(options.vocab, options.rows, options.shares):
        # Copying the logits, which is not timed, takes a second for this many numbers.
        affordable = 10**9 // (rows * vocab_size) // CHANGES_EVERY * CHANGES_EVERY
        steps = max(3 * CHANGES_EVERY, min(options.steps, affordable))
        life = life_of_a_batch(rows, vocab_size, share, steps)
        for processors in (PROCESSORS, *((name,) for name in PROCESSORS)):
            command = {"vocab_size": vocab_size, "rows": rows, "processors": processors, "steps": life}
            case = f"{' + '.join(processors)}, {rows} x {vocab_size}, {share:.0%} of the rows"
            yield comparison(ours, peer, case, command, options.turns)


def comparison(ours: WorkerProcess, peer: WorkerProcess | None, case: str, command: object, turns: int) -> Comparison:
    """Time one case."""

    def microseconds(side: WorkerProcess) -> float:
        return 1e6 * float(side.ask(command))

    if peer is None:
        [times] = in_turns([lambda: microseconds(ours)], turns)
        return alone(BENCHMARK, case, times, unit="us")
    times, of_peer = in_turns([lambda: microseconds(ours), lambda: microseconds(peer)], turns)
    return compare(BENCHMARK, case, times, of_peer, unit="us", peer_name="vLLM's", kind=OF_PEER, target=at_most(1))


def parse_arguments(given: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936], help="vocabulary sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256], help="rows of the batch")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.25], help="of rows that use a processor")
    parser.add_argument("--steps", type=int, default=120, help="of a batch's life, at most")
    parser.add_argument("--turns", type=int, default=5, help="of each side")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads of each side")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(given)
    with beside_vllm(WORKER, options.vllm_python, options.threads) as (ours, peer):
        report(measure(ours, peer, options), options.json)


if __name__ == "__main__":
    main()
