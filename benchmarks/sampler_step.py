"""Step time of the sampler, from logits to tokens, compared with vLLM's on the same logits and threads.

    python benchmarks/sampler_step.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Both sides run in processes of their own and take turns, so that a slow minute of the machine hits both. logitship's
requests always have a seed each; vLLM is timed with its shared generator, and with one for each request.
"""

from __future__ import annotations

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from comparison import OF_OURS, OF_PEER, Comparison, alone, arguments, at_least, at_most, compare, in_turns, report
from worker_process import WorkerProcess, beside_vllm

WORKER = Path(__file__).with_name("sampler_worker.py")
BENCHMARK = "sampler"

ZIPF_EXPONENTS = (2.0, 3.5, 1.5, 2.5)
"""Exponents of the rows of "peaked" logits, in turn: 5 to 500 tokens then have 0.9 of the probability."""


@dataclass(frozen=True)
class Setting:
    """Sampling parameters of all requests of a batch; see `sampler_worker.Order`."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    logprobs: int | None = None


SETTINGS = {
    "greedy": Setting(temperature=0.0),
    "temperature": Setting(),
    "top-p 0.95": Setting(top_p=0.95),
    "top-k 50": Setting(top_k=50),
    "top-k 50, top-p 0.95": Setting(top_k=50, top_p=0.95),
    "greedy, logprobs 5": Setting(temperature=0.0, logprobs=5),
    "temperature, logprobs 5": Setting(logprobs=5),
}
BY_DEFAULT = [name for name in SETTINGS if name != "top-k 50, top-p 0.95"]


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        setting: a key of `SETTINGS`.
        seeded: vLLM's requests have seeds of their own.
        shape: of the logits, see `make_logits`.
    """

    setting: str
    seeded: bool
    vocab_size: int
    rows: int
    shape: str

    def __str__(self) -> str:
        seeds = ", seeds" if self.seeded else ""
        shape = "" if self.shape == "peaked" else f", {self.shape}"
        return f"{self.setting}{seeds}, {self.rows} x {self.vocab_size}{shape}"


def make_logits(shape: str, rows: int, vocab_size: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return logits like those of a language model, or nearly equal ones: float32 [rows, vocab].

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


def measure(ours: WorkerProcess, peer: WorkerProcess | None, options: Namespace) -> Iterator[Comparison]:
    """Time each case, with the sides in turns."""
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder, "logits.npy")
        for vocab_size, rows, shape in itertools.product(options.vocab, options.rows, options.shapes):
            np.save(logits, make_logits(shape, rows, vocab_size))
            for name, seeded in itertools.product(options.settings, (False, True)):
                # Greedy rows need no seed.
                if not (seeded and (SETTINGS[name].temperature == 0 or peer is None)):
                    yield comparison(ours, peer, Case(name, seeded, vocab_size, rows, shape), logits, options)


def comparison(
    ours: WorkerProcess, peer: WorkerProcess | None, case: Case, logits: Path, options: Namespace
) -> Comparison:
    """Time one case."""
    setting = SETTINGS[case.setting]
    order = {**vars(setting), "seeded": case.seeded, "logits": str(logits), "seconds": options.seconds}

    def milliseconds(side: WorkerProcess) -> float:
        return 1000 * float(side.ask(order))

    if peer is None:
        [times] = in_turns([lambda: milliseconds(ours)], options.turns)
        return alone(BENCHMARK, str(case), times, unit="ms")
    times, of_peer = in_turns([lambda: milliseconds(ours), lambda: milliseconds(peer)], options.turns)
    sorts = setting.top_p < 1
    return compare(
        BENCHMARK,
        str(case),
        times,
        of_peer,
        unit="ms",
        peer_name="vLLM's Sampler",
        kind=OF_OURS if sorts else OF_PEER,
        target=at_least(5) if sorts else at_most(1),
    )


def parse_arguments(given: Sequence[str] | None) -> Namespace:
    """Parse the command line."""
    parser = arguments(__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936], help="vocabulary sizes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows of the batch")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=BY_DEFAULT, help="what requests ask for")
    parser.add_argument("--shapes", nargs="+", choices=("peaked", "flat"), default=["peaked"], help="of the logits")
    parser.add_argument("--turns", type=int, default=7, help="of each side")
    parser.add_argument("--seconds", type=float, default=0.05, help="how long a turn is at least")
    parser.add_argument("--threads", type=int, default=2, help="PyTorch threads of each side")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, and write the figures."""
    options = parse_arguments(given)
    with beside_vllm(WORKER, options.vllm_python, options.threads) as (ours, peer):
        for name, side in (("logitship", ours), ("vllm", peer)):
            if side is not None:
                print(f"{name} {side.about['version']} (torch {side.about['torch']})")
        report(measure(ours, peer, options), options.json)


if __name__ == "__main__":
    main()
