"""How long one waits for what happens once: the client's import, and a processor's first use.

    python benchmarks/start_times.py

The import is compared with that of httpx alone, which the client needs, each in a fresh process. Then a server gets
requests for one token in turns: without a processor, with one that it has never seen, and with one that it has. The
processors run in sandboxes. A tiny model with the default model's vocabulary: the differences would drown in how long a
step of a real one takes, now and then.
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
"""Seconds in which the server makes up for the sandbox that a new processor took. Other requests should not notice."""
_IMPORT = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"


def beyond(ours: Sequence[float], peer: Sequence[float]) -> list[float]:
    """Milliseconds that ours takes longer, turn by turn."""
    return [(more - less) * 1e3 for more, less in zip(ours, peer, strict=True)]


def client_import(turns: int) -> comparison.Comparison:
    """Of the client, beyond httpx."""
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
        BENCHMARK, "import of the client, beyond httpx", beyond(ours, peer), unit="ms", target=target
    )


def new_processors() -> Iterator[str]:
    """Processor strings, each of a class that nobody has seen."""
    for number in itertools.count():
        new = type("BanSome", (BanSome,), {"number": number})
        assert issubclass(new, BanSome)
        yield new.to_str()


def first_token(server: Server, processor: str | None) -> float:
    """Seconds from the request to its token."""
    sampling: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"banned": [0]}}
    body = {"input_ids": [1000, 1001], "sampling_params": sampling, "custom_logit_processor": processor}
    sent, token, *_ = server.stream("/generate", [body])[0]
    return token - sent


def first_tokens(server: Server, turns: int) -> Iterator[comparison.Comparison]:
    """Of a warm server, and what processors add."""
    new = new_processors()
    known = next(new)

    def unseen_one() -> float:
        seconds = first_token(server, next(new))
        time.sleep(PAUSE)
        first_token(server, None)  # the server is warm again for whoever comes next
        return seconds

    sides = [lambda: first_token(server, None), unseen_one, lambda: first_token(server, known)]
    comparison.in_turns(sides, 3)
    none, unseen, seen = comparison.in_turns(sides, turns)
    yield comparison.alone(BENCHMARK, "first token of a warm server", [each * 1e3 for each in none], unit="ms")
    for case, times, most in (("new processor", unseen, 20), ("known processor", seen, 1)):
        target = comparison.at_most(most)
        yield comparison.alone(BENCHMARK, f"{case}, beyond none", beyond(times, none), unit="ms", target=target)


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """The import, then the server."""
    yield client_import(options.imports)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder, "model"), default_model_folder())
        with served(["--model", str(model), "--enable-custom-logit-processor"]) as (server,):
            yield from first_tokens(server, options.turns)


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--imports", type=int, default=25, help="turns of the import")
    parser.add_argument("--turns", type=int, default=80, help="of the requests")
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
