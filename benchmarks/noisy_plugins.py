"""Plain streams inside SGLang and vLLM with the plugin, beside one noisy client at a time.

    tests/peers/sglang_cpu.sh SGLANG "$(command -v python)" && tests/peers/vllm_cpu.sh VLLM
    python benchmarks/noisy_plugins.py --sglang-python SGLANG/bin/python --vllm-python VLLM/bin/python
    python benchmarks/noisy_plugins.py --engine vllm --kind sleeps hangs --model tiny
    python benchmarks/noisy_plugins.py --url http://127.0.0.1:30000

Each engine has one server, one after the other. Six plain streams run all the time; short requests, one at a time,
measure the time to first token; and `/health` is polled. For each kind of noisy client (`noisy_clients.py`), they run
for some seconds alone, then as long beside the client, including its first request; `quiet → beside` is printed. The
times are medians and 99th percentiles (of a few dozen values: their maximum); a wait that is not over at the end counts
with its time so far. The last column lists the targets that are missed: the share of their tokens that the streams
should keep, twice the p99 between tokens, three times the median to the first token, 0.2 s for `/health`, no error.

The noisy client is a process of its own on the same cores, at a low priority. The plugins' settings, such as
LOGITSHIP_VLLM_STEP_SHARE, are read from the environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from hostile_clients import processor
from noisy_clients import KINDS, ROUTE, completion, new_number
from noisy_neighbours import HonestClients, Times, percentile, start_hostile
from plugin_servers import ROOT, add_distribution, peer_python, sglang_with_plugin, vllm_with_plugin
from served import COMMAND, ServerCommand, listening
from tiny_model import model_named

ENGINES = ("sglang", "vllm", "vllm-async", "logitship")
"""SGLang with overlap scheduling, vLLM V1 with synchronous and with asynchronous scheduling, and the own engine."""
HEADER = (
    *("engine", "beside", "tokens/s", "median ms between tokens", "p99", "median ms to first token"),
    *("p99 ms of /health", "errors", "missed"),
)
MAX_HEALTH = 0.2
HOSTILE_NICE = 10


@dataclass(frozen=True)
class Result:
    """One noisy client of one engine.

    Attributes:
        engine: its name.
        kind: of the noisy client.
        seconds: of each phase.
        quiet: the times of the plain streams without it.
        beside: their times beside it.
        ends: of its requests, with their number.
    """

    engine: str
    kind: str
    seconds: float
    quiet: Times
    beside: Times
    ends: Mapping[str, int]

    def row(self) -> list[str]:
        """Return the cells of its line."""
        quiet, beside = self.quiet, self.beside
        tokens = [times.tokens / self.seconds for times in (quiet, beside)]
        kept = tokens[1] / tokens[0] if tokens[0] else 0.0
        plain = [(percentile(times.plain, 50), percentile(times.plain, 99)) for times in (quiet, beside)]
        first = [percentile(times.first_token, 50) for times in (quiet, beside)]
        health = [percentile(times.health, 99) for times in (quiet, beside)]
        met = {
            "tokens": kept >= KINDS[self.kind].keeps,
            "p99": plain[1][1] <= 2 * plain[0][1],
            "first token": first[1] <= 3 * first[0],
            "/health": health[1] <= MAX_HEALTH,
            "errors": not beside.errors,
        }
        return [
            self.engine,
            self.kind,
            f"{tokens[0]:.1f} → {tokens[1]:.1f} ({kept:.2f})",
            *(f"{one * 1e3:.0f} → {other * 1e3:.0f}" for one, other in (*zip(*plain, strict=True), first, health)),
            f"{len(quiet.errors)} → {len(beside.errors)}",
            ", ".join(name for name, is_met in met.items() if not is_met) or "none",
        ]


class PlainStreams(HonestClients):
    """Clients whose requests have no processor.

    Args:
        url: of the server.
        http: sends requests.
        model: its name in requests.
        streams: number of streams.
    """

    stream_tokens = 64

    def __init__(self, url: str, http: httpx.AsyncClient, model: str, streams: int) -> None:
        super().__init__(url, http)
        self._model = model
        self._streams = streams

    def clients(self) -> list[Callable[[], Awaitable[None]]]:
        """Return the streams, the client of short requests, and the one of `/health`."""
        plain = lambda: self._stream("honest", "plain", *self.long_request({}))  # noqa: E731
        return [*[plain] * self._streams, self._first_token, self._health]

    def long_request(self, fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a stream, each of whose events has the number of tokens so far."""
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return ROUTE, self._body("The moon is", self.stream_tokens) | {
            "stream": True,
            "stream_options": usage,
            **fields,
        }

    def short_request(self, number: int) -> tuple[str, dict[str, Any]]:
        """Return the route and the body of a request for one token after a prompt that is not cached."""
        return ROUTE, self._body(f"{number * 7919} is a number, and the next one is", 1)

    def _body(self, prompt: str, tokens: int) -> dict[str, Any]:
        return {"model": self._model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


async def measure(engine: str, url: str, options: argparse.Namespace) -> list[Result]:
    """Measure the plain streams of one server beside each noisy client, and print the rows."""
    results = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]
        vllm_model = model["id"] if model["owned_by"] == "vllm" else ""
        # Sandboxes are prepared with the first processor.
        content, headers = completion(processor(new_number()), vllm_model), {"Content-Type": "application/json"}
        response = await http.post(ROUTE, content=content, headers=headers)
        if response.is_error:
            raise RuntimeError(f"{engine} does not run a harmless class: {response.status_code} {response.text}")
        honest = PlainStreams(url, http, model["id"], options.streams)
        async with honest.running():
            for kind in options.kind:
                noisy = await start_hostile("noisy_clients.py", kind, url, options.seconds, "--vllm-model", vllm_model)
                os.setpriority(os.PRIO_PROCESS, noisy.pid, HOSTILE_NICE)
                await honest.measure(options.settle)
                quiet = await honest.measure(options.seconds)
                ends = asyncio.create_task(noisy.communicate(b"\n"))
                beside = await honest.measure(options.seconds)
                output, _ = await ends
                results.append(Result(engine, kind, options.seconds, quiet, beside, json.loads(output)))
                print_row(results[-1])
    return results


def print_row(result: Result) -> None:
    """Print the line of a noisy client, and under it how its requests ended, and errors of plain streams."""
    print("| " + " | ".join(result.row()) + " |", flush=True)
    print(f"# its requests: {dict(result.ends)}")
    for error in [*result.quiet.errors, *result.beside.errors][:3]:
        print(f"# error: {error[:300]}", flush=True)


def command(engine: str, model: Path, folder: Path, options: argparse.Namespace) -> ServerCommand:
    """Return the command of an engine with the plugin, and its environment."""
    if engine == "logitship":
        flags = ("--model", str(model), "--enable-custom-logit-processor", "--log-level", "error")
        return (*COMMAND, *flags), {}
    if engine == "sglang":
        return sglang_with_plugin(options.sglang_python, model, folder)
    if engine == "vllm":
        return vllm_with_plugin(options.vllm_python, model, folder, "--no-async-scheduling")
    line, environment = vllm_with_plugin(options.vllm_python, model, folder)
    enables_it = ROOT / "tests" / "end_to_end" / "vllm_async"  # on a CPU
    return line, environment | {"PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], str(enables_it)))}


def measure_all(options: argparse.Namespace) -> Iterator[Result]:
    """Measure one engine after the other."""
    if options.url:
        yield from asyncio.run(measure(options.url, options.url, options))
        return
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_distribution(folder)
        model = model_named(options.model, folder)
        for engine in options.engine:
            with listening(command(engine, model, folder, options)) as (server,):
                try:
                    yield from asyncio.run(measure(engine, server.url, options))
                except (RuntimeError, httpx.HTTPError):
                    print(server.log(), file=sys.stderr)
                    raise


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES[:3])
    parser.add_argument("--url", help="of a server that runs already, instead of starting engines")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS), help="of the noisy client")
    parser.add_argument("--seconds", type=float, default=8.0, help="without and with each noisy client")
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before that")
    parser.add_argument("--streams", type=int, default=6, help="plain streams")
    parser.add_argument("--model", default="default", help="a folder; default: the default model; tiny: random weights")
    parser.add_argument("--sglang-python", default=peer_python("sglang"), help="a Python that has SGLang")
    parser.add_argument("--vllm-python", default=peer_python("vllm"), help="a Python that has vLLM")
    parser.add_argument("--json", type=Path, help="file for all times")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the server too
    print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|", flush=True)
    results = list(measure_all(options))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
