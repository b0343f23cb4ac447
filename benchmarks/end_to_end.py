"""Output tokens per second, and the time between tokens, of whole servers: logitship compared with vLLM.

    python benchmarks/end_to_end.py --vllm-python PATH_OF_A_PYTHON_THAT_HAS_VLLM

Both serve the same float32 weights on the same cores, and stream to the same client. Every request samples with top-p
0.95 and a seed and forbids tokens of its own: in logitship by a processor that it ships and that runs in a sandbox, in
vLLM by a V1 processor that was installed at start. They take turns, and the one whose turn it is not is stopped
meanwhile.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from comparison import OF_PEER, Comparison, arguments, at_least, at_most, compare, in_turns, report
from processors import SOURCE
from served import COMMAND, Server, ServerCommand, listening

from logitship.server.model.default_model import default_model_folder

PROMPT = "The moon is"
TARGETS = {1: at_least(1.3), 8: at_least(2), 32: at_least(2)}
MAX_MODEL_LEN = "1024"


def with_processor(side: str, banned: list[int]) -> dict[str, Any]:
    """Return the fields of a request that forbid some tokens."""
    if side == "vllm":
        return {"vllm_xargs": {"banned": banned}}
    string = json.dumps({"source": SOURCE, "class_name": "BanSome"})
    return {"custom_logit_processor": string, "custom_params": {"banned": banned}}


def bodies(side: str, model: str, streams: int, tokens: int) -> list[dict[str, Any]]:
    """Return the requests of a turn, one per stream."""
    return [
        {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0.8,
            "top_p": 0.95,
            "seed": stream,
            **with_processor(side, list(range(40_000 + stream, 40_100 + stream))),
        }
        for stream in range(streams)
    ]


class Side:
    """A server and its requests; `seconds_between` has the times between tokens of the last turn."""

    def __init__(self, name: str, server: Server) -> None:
        self._name = name
        self._server = server
        self._model = json.loads(server.get("/v1/models"))["data"][0]["id"]
        self.seconds_between: list[float] = []

    def tokens_per_second(self, streams: int, tokens: int) -> float:
        """Run a turn, with prompts and outputs, and return its output tokens per second."""
        arrivals = self._server.stream("/v1/completions", bodies(self._name, self._model, streams, tokens))
        self.seconds_between = [b - a for each in arrivals for a, b in itertools.pairwise(each[1:])]
        began = min(each[0] for each in arrivals)
        return streams * tokens / (max(each[-1] for each in arrivals) - began)


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def measure(
    sides: Mapping[str, Side], servers: Mapping[str, Server], options: argparse.Namespace
) -> Iterator[Comparison]:
    """Measure tokens per second and the 99th percentile of the time between tokens, for each number of streams."""
    for streams in options.streams:
        between: dict[str, list[float]] = {name: [] for name in sides}

        def turn(name: str, other: str, streams: int = streams, between: dict[str, list[float]] = between) -> float:
            with servers[other].paused():
                sides[name].tokens_per_second(streams, 2)  # evicts what its last turn left in caches
                speed = sides[name].tokens_per_second(streams, options.tokens)
            between[name].append(1e3 * p99(sides[name].seconds_between))
            return speed

        ours, peer = in_turns([lambda: turn("logitship", "vllm"), lambda: turn("vllm", "logitship")], options.turns)
        case = f"{streams} stream{'s' if streams > 1 else ''}"
        compared = partial(compare, peer_name="vLLM 0.32.0", kind=OF_PEER)
        yield compared("end to end", case, ours, peer, unit="tokens/s", target=TARGETS.get(streams))
        yield compared("end to end, p99 between tokens", case, *between.values(), unit="ms", target=at_most(1))


def vllm_command(python: str, model: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the model with vLLM, and its environment."""
    flags = [
        "--dtype",
        "float32",
        "--max-model-len",
        MAX_MODEL_LEN,
        "--logits-processors",
        "vllm_bare_processor:BareProcessor",
    ]
    environment = {
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    return [python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *flags], environment


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of each stream")
    parser.add_argument("--turns", type=int, default=5, help="turns of each server")
    options = parser.parse_args()
    if not options.vllm_python:
        parser.error("--vllm-python is needed: what is measured here is the ratio")
    flags = ("--enable-custom-logit-processor", "--max-model-len", MAX_MODEL_LEN, "--log-level", "error")
    commands: list[ServerCommand] = [
        ((*COMMAND, *flags), {}),
        vllm_command(options.vllm_python, default_model_folder()),
    ]
    with listening(*commands) as (ours, peer):
        servers = {"logitship": ours, "vllm": peer}
        sides = {name: Side(name, server) for name, server in servers.items()}
        report(measure(sides, servers, options), options.json)


if __name__ == "__main__":
    main()
