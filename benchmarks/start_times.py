"""One-time costs: the import of the client, and the first use of a processor.

    python benchmarks/start_times.py

The import is compared with that of httpx alone, which the client needs, each in a fresh process. Then a server gets
requests for one token in turns: without a processor, with one that it has never seen, and with one that it has. The
processors run in sandboxes. The model is a tiny one with the default model's vocabulary: the step times of a real model
vary by more than the differences measured here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import comparison
from processors import BanSome
from served import Server, served
from tiny_model import tiny_model

from logitship.server.model.default_model import default_model_folder

BENCHMARK = "start"
PAUSE = 0.15
"""Seconds in which the server replaces the spare sandbox that a new processor took, so that no other request waits."""
_IMPORT = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def added_milliseconds(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Return the differences of our turns to the peer's, given in seconds."""
    return [(longer - shorter) * 1e3 for longer, shorter in zip(ours, peer, strict=True)]


def client_import(turns: int) -> comparison.Comparison:
    """Measure how much the import of the client adds to that of httpx."""
    with tempfile.TemporaryDirectory() as folder:
        # With byte code, as installed packages have it.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = folder

        def seconds(modules: str) -> float:
            command = [sys.executable, "-c", _IMPORT.format(modules)]
            return float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)

        sides = [lambda: seconds("httpx, logitship"), lambda: seconds("httpx")]
        comparison.in_turns(sides, 1)  # writes the byte code
        ours, peer = comparison.in_turns(sides, turns)
    target = comparison.at_most(50)
    return comparison.alone(
        BENCHMARK,
        "import of the client, time added to httpx's",
        added_milliseconds(ours, peer),
        unit="ms",
        target=target,
    )


def new_processors() -> Iterator[str]:
    """Yield processor strings, each of a class that is new to the server."""
    for number in itertools.count():
        new = type("BanSome", (BanSome,), {"number": number})
        assert issubclass(new, BanSome)
        yield new.to_str()


def first_token(server: Server, processor: str | None) -> float:
    """Return the seconds from the request to its first token."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"banned": [0]}}
    body = {"input_ids": [1000, 1001], "sampling_params": sampling, "custom_logit_processor": processor}
    sent, token, *_ = server.stream("/generate", [body])[0]
    return token - sent


def first_tokens(server: Server, turns: int) -> Iterator[comparison.Comparison]:
    """Time the first token of a warm server, and what processors add to it."""
    new = new_processors()
    known = next(new)

    def unseen_one() -> float:
        seconds = first_token(server, next(new))
        time.sleep(PAUSE)
        first_token(server, None)  # warms the server up again for the next side
        return seconds

    sides = [lambda: first_token(server, None), unseen_one, lambda: first_token(server, known)]
    comparison.in_turns(sides, 3)
    none, unseen, seen = comparison.in_turns(sides, turns)
    yield comparison.alone(BENCHMARK, "first token of a warm server", [each * 1e3 for each in none], unit="ms")
    for case, times, most in (
        ("first request with a new processor", unseen, 20),
        ("request with a known processor", seen, 1),
    ):
        target = comparison.at_most(most)
        yield comparison.alone(
            BENCHMARK, f"{case}, time added", added_milliseconds(times, none), unit="ms", target=target
        )


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Measure the import, then the server."""
    yield client_import(options.imports)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder, "model"), default_model_folder())
        with served(["--model", str(model), "--enable-custom-logit-processor"]) as (server,):
            yield from first_tokens(server, options.turns)


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--imports", type=int, default=25, help="turns of the import")
    parser.add_argument("--turns", type=int, default=80, help="turns of the requests")
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
