"""Soak test: a server under 20,000 requests of every kind must lose nothing and leak nothing.

    python benchmarks/soak.py --json soak.json --plot docs/images/soak.svg

A real `logitship serve` with sandboxes gets requests of all routes and kinds, chosen at random from a seed, with so
many in flight that some always wait: processors that are loaded and evicted, that raise, loop, exit and allocate
without end; clients that disconnect; invalid requests. Each outcome is compared with the expected one of its kind.

Every 1,000 requests the server may finish all running ones. Then the maximum number of sandboxes is alive, with the
same classes each time, so the server's resources are comparable: after the first 2,000 requests, memory may grow by
at most 2 % (of the server's process, and of all processes together), and nothing else may grow at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import soak_faults
import soak_plain
import soak_processed
from soak_plot import plot
from soak_processed import json_schema, regex
from soak_processors import counting, forcing
from soak_report import MEMORY, Sample, grown, memory_drift, summary
from soak_requests import KINDS, Answers, Kind, RequestContext, learn, name_of
from soak_server import (
    SHARED_MEMORY,
    SoakServer,
    processes_below,
    shared_memory_left,
    soak_server,
)
from tiny_model import model_named

from logitship import AsyncClient
from logitship.server.engine.engine_thread import IDLE

MIX = (soak_plain, soak_processed, soak_faults)
"""The modules that define kinds of requests."""
MAX_REQUEST = 600.0
"""Seconds after which a request counts as lost. Long, because the machine may stall now and then."""
MAX_DRAIN = 60.0
STILL = 2 * IDLE
"""Seconds without a change after which the server counts as settled. It releases memory once it is idle."""
MAX_LEN = 256
MAX_SEQS = 16
GRAMMARS = 128
"""Number of compiled grammars that the server keeps."""


@dataclass
class Soak:
    """One run.

    Attributes:
        done: number of finished requests.
        outcomes: number of requests with the expected outcome, by kind.
        failures: descriptions of all other outcomes.
    """

    server: SoakServer
    answers: Answers
    options: argparse.Namespace
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def run(self) -> None:
        """Send all requests, with an idle point after the warm-up and after each segment."""
        total, every = self.options.requests, self.options.quiet_every
        warm_up = min(self.options.warm_up, total // 2)
        for first, end in _segments(total, warm_up, every):
            await self._segment(first, end)
            await self._quiet_point()

    async def _segment(self, first: int, end: int) -> None:
        """Send the requests of a segment, a fixed number at a time."""
        numbers = iter(range(first, end))
        async with AsyncExitStack() as clients:
            client = await clients.enter_async_context(_client(self.server))
            http = await clients.enter_async_context(
                httpx.AsyncClient(base_url=self.server.base_url, timeout=MAX_REQUEST)
            )

            async def worker() -> None:
                for number in numbers:
                    await self._request(number, client, http)

            await asyncio.gather(*(worker() for _ in range(self.options.concurrency)))

    async def _request(self, number: int, client: AsyncClient, http: httpx.AsyncClient) -> None:
        own = random.Random(f"{self.options.seed} {number}")
        kind = choose_kind(own, self.options.only)
        try:
            async with asyncio.timeout(MAX_REQUEST):
                await kind(RequestContext(number, own, client, http, self.answers))
        except Exception as error:  # noqa: BLE001  # whatever it is, it is not what the kind must give
            self.failures.append(f"request {number}, {name_of(kind)}: {type(error).__name__}: {error}")
            print(self.failures[-1], file=sys.stderr, flush=True)
        else:
            self.outcomes[name_of(kind)] += 1
        self.done += 1
        if self.done % self.options.sample_every == 0:
            await self._sample(quiet=False)

    async def _quiet_point(self) -> None:
        """Wait until the server has finished, fill it with the same sandboxes, and look at it."""
        async with _client(self.server) as client:
            for processor in _residents(self.options.sandboxes):
                await client.generate("a", processor=processor, params={"first": 1000}, max_new_tokens=1)
        until = time.monotonic() + MAX_DRAIN
        before, left = None, ""
        while time.monotonic() < until:
            resources = await asyncio.to_thread(self.server.resources)
            left = await asyncio.to_thread(self._left)
            # Connections close, threads end, and sandboxes are started for later: until all is still.
            now = (resources.descriptors, resources.threads, resources.processes, resources.zombies)
            if not left and now == before:
                break
            before = now
            await asyncio.sleep(STILL)
        if left:
            self.failures.append(f"after {self.done} requests: {left}")
        await self._sample(quiet=True)

    def _left(self) -> str:
        """Describe what a finished server still holds."""
        engine = self.server.state()
        held = {name: engine[name] for name in ("running", "waiting", "registered_processors") if engine[name]}
        if engine["sandboxes"] != self.options.sandboxes:
            held["sandboxes"] = engine["sandboxes"]
        return ", ".join(f"{number} {name}" for name, number in held.items())

    async def _sample(self, quiet: bool) -> None:
        resources, engine = await asyncio.to_thread(lambda: (self.server.resources(), self.server.state()))
        sample = Sample(self.done, round(time.perf_counter() - self.began, 1), quiet, resources, engine)
        self.samples.append(sample)
        print(sample, flush=True)


def choose_kind(own: random.Random, only: Sequence[str]) -> Kind:
    """Choose one of the kinds, or of those with these names, at random by weight."""
    kinds = {one: weight for one, weight in KINDS.items() if not only or one.__name__ in only}
    return own.choices(list(kinds), list(kinds.values()))[0]


def _segments(total: int, warm_up: int, every: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of request numbers between two idle points, each as (first, end)."""
    yield 0, warm_up
    for first in range(warm_up, total, every):
        yield first, min(first + every, total)


def _client(server: SoakServer) -> AsyncClient:
    """Return a client that retries for a long time when all sandboxes are in use."""
    return AsyncClient(server.base_url, dialect="logitship", timeout=MAX_REQUEST, max_retries=20)


def _residents(sandboxes: int) -> Iterator[str]:
    """Yield processors that fill all sandboxes: those that are always in use, and others that no request uses."""
    yield from (counting(number) for number in range(4))
    yield from (forcing(3_000_000 + number) for number in range(sandboxes - 4))


async def _fill(server: SoakServer, concurrency: int) -> None:
    """Fill every bounded resource: each takes memory, threads or a process when it is first used."""
    slots = {
        "input_ids": [[(17 * slot + place) % 40_000 + 1 for place in range(MAX_LEN - 8)] for slot in range(MAX_SEQS)],
        "sampling_params": {"max_new_tokens": 4, "ignore_eos": True},
    }
    pairs = [({"regex": regex(number)}, {"json_schema": json_schema(number)}) for number in range(-GRAMMARS // 2, 0)]
    grammars = {"text": ["a"] * GRAMMARS, "sampling_params": [{**each, "max_new_tokens": 20} for each in chain(*pairs)]}
    # Tokenizing it takes so long that each of these needs a thread of its own.
    too_long = {"text": "word " * 100_000}
    async with httpx.AsyncClient(base_url=server.base_url, timeout=MAX_REQUEST) as http:
        for body in (slots, slots, grammars):
            (await http.post("/generate", json=body)).raise_for_status()
        answers = await asyncio.gather(*(http.post("/generate", json=too_long) for _ in range(concurrency)))
    assert {answer.status_code for answer in answers} == {400}


def _flags(options: argparse.Namespace, model: Path) -> list[str]:
    flags = {
        "--model-path": model,
        "--max-model-len": MAX_LEN,
        "--max-num-seqs": MAX_SEQS,
        "--prefix-cache-bytes": options.prefix_cache_bytes,
        "--max-sandboxes": options.sandboxes,
        "--sandbox-memory": 1 << 28,
        "--random-seed": options.seed,
    }
    return ["--enable-custom-logit-processor", *(str(word) for flag in flags.items() for word in flag)]


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--warm-up", type=int, default=2_000, help="requests before the first quiet point")
    parser.add_argument("--quiet-every", type=int, default=1_000, help="requests between two quiet points")
    parser.add_argument("--sample-every", type=int, default=250, help="requests between two samples")
    parser.add_argument("--concurrency", type=int, default=32, help="requests at a time; half of them wait")
    parser.add_argument("--sandboxes", type=int, default=24, help="most that the server has at a time")
    parser.add_argument("--prefix-cache-bytes", type=int, default=1 << 22)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="KIND", choices=[one.__name__ for one in KINDS], help="to find a leak"
    )
    parser.add_argument("--max-drift", type=float, default=0.02, help="of memory, as a share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", default="tiny", help="a folder; default: the default model; tiny: random weights, made here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot them to this SVG file (needs matplotlib)")
    return parser.parse_args(arguments)


async def _soak(server: SoakServer, options: argparse.Namespace) -> Soak:
    await _fill(server, options.concurrency)
    async with _client(server) as client:
        answers = await learn(client)
    soak = Soak(server, answers, options)
    await soak.run()
    return soak


def _run(options: argparse.Namespace) -> dict[str, Any]:
    """Run, and return the verdict."""
    shared_memory = {entry.name for entry in SHARED_MEMORY.iterdir()}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with soak_server(folder, _flags(options, model_named(options.model, folder))) as server:
            soak = asyncio.run(_soak(server, options))
            below = list(processes_below(server.pid))
        errors, left = server.errors(), server.left_behind(below) + shared_memory_left(shared_memory)
    quiet = [sample for sample in soak.samples if sample.quiet]
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "outcomes": dict(sorted(soak.outcomes.items())),
        "failures": soak.failures,
        "errors": errors,
        "drift": {name: memory_drift(quiet, name) for name in MEMORY},
        "broken": [
            *summary("unexpected outcomes", soak.failures),
            *summary("errors in the server's log", errors),
            *summary("resources left behind by the server", left),
            *grown(quiet, options.max_drift),
        ],
        "samples": [asdict(sample) for sample in soak.samples],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the progress, and report the failures.

    Returns:
        1 if one was, else 0.
    """
    options = parse_arguments(arguments)
    figures = _run(options)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    if options.plot:
        plot(figures, options.plot)
    print(f"{sum(figures['outcomes'].values())} of {options.requests} requests ended as they must")
    print(", ".join(f"{name} grew by {drift:.2%}" for name, drift in figures["drift"].items()))
    print("\n".join(f"BROKEN: {each}" for each in figures["broken"]) or "all promises are kept")
    return bool(figures["broken"])


if __name__ == "__main__":
    sys.exit(main())
