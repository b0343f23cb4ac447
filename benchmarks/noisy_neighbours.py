"""Honest clients beside one hostile client at a time: their latency, their errors, and leaked resources.

    python benchmarks/noisy_neighbours.py --only cancel_storm spinners

Each hostile client (`hostile_clients.py`) gets a server of its own, with the defaults but a small prefix cache, four
API keys, and shipped processors enabled. Two honest keys stream all the time, one with a shipped processor; short
requests, one at a time, measure the time to first token; and `/health` is polled. First they are alone, then beside the
hostile client. Ratios are those of the second time to the first.

The hostile client is a process of its own on the same cores. It has started before the first phase, and a low priority
in the second one, because elsewhere it has a machine of its own: `--hostile-nice 0` lets it compete with the server
instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import hostile_clients
import httpx
from processors import SOURCE
from soak_server import SoakServer, processes_below, soak_server

HERE = Path(__file__).parent
KEYS = {
    "honest": "honest-key",
    "ships": "honest-shipping-key",
    "hostile": "hostile-key",
    "hostile ships": "hostile-shipping-key",
}
FLAGS = (
    *("--api-key", KEYS["honest"], KEYS["hostile"]),
    *("--shipping-api-key", KEYS["ships"], KEYS["hostile ships"]),
    *("--enable-custom-logit-processor", "--log-level", "warning"),
    *("--prefix-cache-bytes", str(2**25)),  # full soon, so that later growth is a leak
)
_COMPLETION_TOKENS = re.compile(r'"completion_tokens": ?(\d+)')
SETTLE = 5.0
"""Seconds between the end of the attack and the measurement of leaked resources."""
MAX_STOP = 60.0


@dataclass
class Times:
    """Measurements of honest clients, in seconds.

    Attributes:
        plain: between the tokens of the stream without a processor.
        shipped: between those of the stream with a shipped processor.
        first_token: until the first token of short requests.
        health: until the response of `/health`.
        errors: of any of them.
        tokens: number of those of all streams.
    """

    plain: list[float] = field(default_factory=list)
    shipped: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    health: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    tokens: int = 0


@dataclass(frozen=True)
class Resources:
    """Resources of the server process.

    Attributes:
        rss: resident bytes.
        threads: number of threads.
        descriptors: number of open descriptors.
        mappings: number of mapped shared memories of sandboxes.
        processes: below the server.
    """

    rss: int
    threads: int
    descriptors: int
    mappings: int
    processes: int


@dataclass(frozen=True)
class Result:
    """One hostile client.

    Attributes:
        name: of the client.
        quiet: times without it.
        beside: times beside it.
        before: resources before it.
        peak: the maximum of each while it ran.
        after: resources some seconds after it.
        stop: seconds from SIGTERM to the server's end; infinity if it had to be killed.
        statuses: of the responses that the hostile client got.
    """

    name: str
    quiet: Times
    beside: Times
    before: Resources
    peak: Resources
    after: Resources
    stop: float
    statuses: Mapping[str, int]

    def row(self) -> list[str]:
        """Return the cells of its line."""
        quiet, beside = self.quiet, self.beside
        pairs = [(quiet.plain, beside.plain), (quiet.shipped, beside.shipped), (quiet.first_token, beside.first_token)]
        cells = [f"{_ratio(one, other, 50)} {_ratio(one, other, 99)}" for one, other in pairs]
        health = f"{percentile(beside.health, 99) * 1e3:.0f} ms"
        memory = f"{_mib(self.before.rss)} {_mib(self.peak.rss)} {_mib(self.after.rss)}"
        left = " ".join(
            f"{name} {getattr(self.after, name) - getattr(self.before, name):+}"
            for name in ("threads", "descriptors", "mappings", "processes")
            if getattr(self.after, name) != getattr(self.before, name)
        )
        return [self.name, *cells, health, memory, left or "nothing", str(len(beside.errors)), f"{self.stop:.1f} s"]


HEADER = ["client", "plain p50 p99", "shipped p50 p99", "TTFT p50 p99", "health p99", "MiB before peak after"]
HEADER += ["left over", "errors", "SIGTERM"]


def percentile(values: Iterable[float], percent: int) -> float:
    """Return a percentile; infinity if there are no values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] if ordered else float("inf")


def _ratio(quiet: list[float], beside: list[float], percent: int) -> str:
    if not quiet:
        return "-"
    return f"{percentile(beside, percent) / percentile(quiet, percent):.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f}"


class HonestClients:
    """The honest clients of one server. A stream that ends is followed by another.

    Args:
        url: of the server.
        http: sends requests.
    """

    stream_tokens = 400
    """Output tokens of each stream."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http
        self._balancer = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
        """Connects for each request."""
        self._times = Times()
        self._waits: dict[object, tuple[str, float]] = {}
        """Begun and not over: the field of `Times`, and the time of the beginning."""
        self._number = 0

    def clients(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the clients. Each is called again and again."""
        ships = {"custom_logit_processor": {"source": SOURCE, "class_name": "BanSome"}}
        return [
            lambda: self._stream("honest", "plain", *self.long_request({})),
            lambda: self._stream("ships", "shipped", *self.long_request(ships)),
            self._first_token,
            self._health,
        ]

    def long_request(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a stream."""
        sampling = {"ignore_eos": True, "temperature": 0.8, "custom_params": {"banned": [7, 8]}}
        sampling["max_new_tokens"] = self.stream_tokens
        return "/generate", {"text": "Once upon a time", "sampling_params": sampling, "stream": True, **fields}

    def short_request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a request for one token after a prompt that is not cached."""
        ids = [1000 + (number * 7919 + place * 31) % 40_000 for place in range(16)]
        return "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}

    @contextlib.asynccontextmanager
    async def running(self) -> Any:
        """Let them run in the block."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._forever(client)) for client in self.clients()]
            yield
            for task in tasks:
                task.cancel()

    async def fill_caches(self) -> None:
        """Write to the whole KV cache once: Linux allocates pages when they are first used."""
        ids = [1000 + place * 31 % 40_000 for place in range(1900)]
        sampling = {"max_new_tokens": 4, "ignore_eos": True}
        bodies = {"honest": {**sampling, "n": 28}, "ships": {**sampling, "n": 4}}  # 32 in all, 4 of them reserved
        async with asyncio.TaskGroup() as group:
            for key, params in bodies.items():
                group.create_task(self._generate(key, {"input_ids": ids, "sampling_params": params}))

    async def _generate(self, key: str, body: dict[str, Any]) -> None:
        response = await self._http.post("/generate", json=body, headers=_headers(key))
        response.raise_for_status()

    async def measure(self, seconds: float) -> Times:
        """Return what they measure in the next seconds; includes a wait that is not over, if it is the longest."""
        self._times = Times()
        await asyncio.sleep(seconds)
        times, self._times = self._times, Times()
        now = time.perf_counter()
        for name, began in self._waits.values():
            values = getattr(times, name)
            if now - began > max(values, default=0.0):
                values.append(now - began)
        return times

    @contextlib.contextmanager
    def _marks(self, name: str) -> Iterator[Callable[[], None]]:
        """Pass a function to the block; note the times between its calls under a name of `Times`."""
        wait = object()

        def mark() -> None:
            now = time.perf_counter()
            if wait in self._waits:
                getattr(self._times, name).append(now - self._waits[wait][1])
            self._waits[wait] = (name, now)

        try:
            yield mark
        finally:
            self._waits.pop(wait, None)

    async def _forever(self, client: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await client()
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self._times.errors.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.1)

    async def _stream(self, key: str, name: str, path: str, body: dict[str, Any]) -> None:
        """Stream a request, and note the times between its tokens under a name of `Times`."""
        tokens = 0
        async with self._http.stream("POST", path, json=body, headers=_headers(key)) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:300]!r}")
            with self._marks(name) as mark:
                async for line in response.aiter_lines():
                    if '"err_type"' in line or line.startswith('data: {"error"'):
                        raise ValueError(line[-300:])
                    so_far = int(found[1]) if (found := _COMPLETION_TOKENS.search(line)) else 0
                    if so_far > tokens:
                        self._times.tokens += so_far - tokens
                        tokens = so_far
                        mark()
        if tokens != self.stream_tokens:
            raise ValueError(f"a stream ended after {tokens} tokens")

    async def _first_token(self) -> None:
        self._number += 1
        path, body = self.short_request(self._number)
        with self._marks("first_token") as mark:
            mark()
            response = await self._http.post(path, json=body, headers=_headers("honest"))
            mark()
        if response.status_code != 200:
            raise ValueError(f"{response.status_code} {response.text[:300]}")
        await asyncio.sleep(0.3)

    async def _health(self) -> None:
        with self._marks("health") as mark:
            mark()
            response = await self._balancer.get(f"{self._url}/health")
            mark()
        if response.status_code != 200:
            raise ValueError(f"/health {response.status_code}")
        await asyncio.sleep(0.2)


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


def measure_resources(server: SoakServer) -> Resources:
    """Return the resources that the server has now: those whose measurement does not make it wait."""
    maps = Path(f"/proc/{server.pid}/maps").read_text(errors="replace")
    processes = sum(1 for _ in processes_below(server.pid))
    return Resources(server.rss, server.num_threads, server.num_descriptors, maps.count("/memfd:logitship"), processes)


def peak_of(samples: Iterable[Resources]) -> Resources:
    """Return the maximum of each resource."""
    return Resources(*(max(values) for values in zip(*(asdict(sample).values() for sample in samples), strict=True)))


async def _watch(server: SoakServer, samples: list[Resources]) -> None:
    while True:
        samples.append(await asyncio.to_thread(measure_resources, server))
        await asyncio.sleep(0.5)


async def attacked(server: SoakServer, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the honest clients alone, then beside the hostile client. Returns the fields of a `Result`."""
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as http:
        honest = HonestClients(server.base_url, http)
        await honest.fill_caches()
        async with honest.running():
            await honest.measure(2.0)  # loads the processor
            samples: list[Resources] = []
            watching = asyncio.create_task(_watch(server, samples))  # in both phases, which so include its cost
            keys = ("--key", KEYS["hostile"], "--shipping-key", KEYS["hostile ships"])
            hostile = await start_hostile("hostile_clients.py", name, server.base_url, options.seconds, *keys)
            quiet = await honest.measure(options.quiet)
            before = measure_resources(server)
            samples[:] = [before]
            os.setpriority(os.PRIO_PROCESS, hostile.pid, options.hostile_nice)
            attack = asyncio.create_task(hostile.communicate(b"\n"))
            beside = await honest.measure(options.seconds)
            output, _ = await attack
            watching.cancel()
        await asyncio.sleep(options.settle)
    statuses = json.loads(output) if output.strip() else {}
    after = measure_resources(server)
    return {
        "quiet": quiet,
        "beside": beside,
        "before": before,
        "peak": peak_of(samples),
        "after": after,
        "statuses": statuses,
    }


async def start_hostile(script: str, name: str, url: str, seconds: float, *more: str) -> asyncio.subprocess.Process:
    """Start a hostile client of a script, which waits for a line."""
    command = [sys.executable, str(HERE / script), name, "--url", url, "--seconds", str(seconds), "--wait", *more]
    hostile = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert hostile.stdout is not None
    assert await hostile.stdout.readline() == b"ready\n"
    return hostile


def measure(name: str, options: argparse.Namespace) -> Result:
    """Start a server, attack it, and stop it.

    Raises:
        RuntimeError: the server does not start.
    """
    fields: dict[str, Any] = {}
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            soak_server(Path(folder), [*FLAGS, *options.flags]) as server,
        ):
            fields = asyncio.run(attacked(server, name, options))
            fields["stop"] = _stop(server.pid)
    except RuntimeError as error:  # the server did not end, or not with exit status 0
        if "stop" not in fields:
            raise
        fields["beside"].errors.insert(0, str(error))
    return Result(name=name, **fields)


def _stop(pid: int) -> float:
    """End a process as an operator does. Returns the seconds that it takes, infinity if it does not end."""
    began = time.monotonic()
    signal_process(pid, signal.SIGTERM)
    while time.monotonic() - began < MAX_STOP:
        if not _is_running(pid):
            return time.monotonic() - began
        time.sleep(0.05)
    return float("inf")


def signal_process(pid: int, number: int) -> None:
    """Send a signal, if the process is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def measure_all(options: argparse.Namespace) -> Iterator[Result]:
    """Measure the hostile clients, one after the other."""
    for name in options.only or hostile_clients.ATTACKS:
        yield measure(name, options)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=hostile_clients.ATTACKS, metavar="NAME")
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each attack")
    parser.add_argument("--quiet", type=float, default=8.0, help="seconds without it")
    parser.add_argument("--settle", type=float, default=SETTLE, help="seconds from its end to the look at what is left")
    parser.add_argument("--hostile-nice", type=int, default=10, help="nice value of the hostile client")
    parser.add_argument("--json", type=Path, help="file for all times")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the server; must come last"
    )
    options = parser.parse_args()
    print(" | ".join(HEADER), flush=True)
    results = []
    for result in measure_all(options):
        results.append(result)
        print(" | ".join(result.row()), flush=True)
        quiet = [statistics.median(times) * 1e3 for times in (result.quiet.plain, result.quiet.first_token) if times]
        print(f"    quiet medians {[f'{ms:.0f} ms' for ms in quiet]}, hostile client got {dict(result.statuses)}")
        for error in result.beside.errors[:2]:
            print(f"    {error[:300]}", flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
