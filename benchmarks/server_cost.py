"""Overhead of the server over the model: HTTP, tokenizing, scheduling, sampling, detokenizing and streaming.

    python benchmarks/server_cost.py

A server with 64 streaming clients and the bare model loop take turns. The loop is the same forward pass and the most
likely token of each row, for the same prompts, and nothing else. Compared are the steps in which all sequences gain a
token. The clients live in another process on the same cores: what they take counts as the server's.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from itertools import chain
from time import perf_counter
from typing import Any

import comparison
from served import Server, gaps_while_all_run, served

from logitship.sampler.ops.greedy import greedy_sample
from logitship.server.config import DEFAULT_MODEL, ServerConfig
from logitship.server.model.capacity import free_bytes, max_model_len
from logitship.server.model.model_loader import load_model
from logitship.server.model.model_runner import Chunk, ModelRunner

BENCHMARK = "server overhead"
PROMPT_TOKENS = 17
"""A block of the prefix cache and the token after it: from the second turn on, no request waits for a prompt."""
_PHASE = 'logitship_step_phase_duration_seconds_sum{phase="'


class BareLoop:
    """Loop of forward passes without a server.

    Args:
        prompts: token ids, all as many.
        tokens: that each gains in a turn.
    """

    def __init__(self, config: ServerConfig, prompts: list[list[int]], tokens: int) -> None:
        loaded = load_model(config)
        # The cache is laid out as the server's.
        max_len = max_model_len(config, loaded.model, loaded.max_len, free_bytes(config, loaded.model))
        self._runner = ModelRunner(loaded.model, config.max_num_seqs, max_len)
        prefill = [Chunk(slot, 0, prompt) for slot, prompt in enumerate(prompts)]
        last = [len(prompts[0]) * (slot + 1) - 1 for slot in range(len(prompts))]
        self._first = greedy_sample(self._runner.logits([], prefill, last)).tolist()
        self._positions = range(len(prompts[0]), len(prompts[0]) + tokens)

    def seconds_per_step(self) -> float:
        """Return the median step time of a turn; each turn restarts after the prompts."""
        token_ids, taken = self._first, []
        rows = list(range(len(token_ids)))
        for position in self._positions:
            began = perf_counter()
            chunks = [Chunk(slot, position, [token]) for slot, token in enumerate(token_ids)]
            token_ids = greedy_sample(self._runner.logits(chunks, [], rows)).tolist()
            taken.append(perf_counter() - began)
        return statistics.median(taken)


def completion(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the body for `/v1/completions`."""
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def generation(prompt: list[int], tokens: int) -> dict[str, Any]:
    """Return the body for `/generate`, whose events repeat the previous text."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling}


ROUTES = {"/v1/completions": completion, "/generate": generation}


def streams_step(server: Server, route: str, prompts: list[list[int]], tokens: int) -> float:
    """Return the median seconds from one token to the next, with all prompts streaming."""
    arrivals = server.stream(route, [ROUTES[route](prompt, tokens + 1) for prompt in prompts])
    return statistics.median(chain.from_iterable(gaps_while_all_run(arrivals)))


def outside_the_forward_pass(server: Server) -> float:
    """Return the percentage of the engine thread's time that was not spent in the forward pass."""
    phases = {name: value for name, value in server.metrics().items() if name.startswith(_PHASE)}
    return 100 * (1 - phases[f'{_PHASE}forward"}}'] / sum(phases.values()))


def measure(options: argparse.Namespace) -> Iterator[comparison.Comparison]:
    """Let the server and the loop take turns."""
    config = ServerConfig(model_path=options.model, max_num_seqs=options.streams)
    prompts = [[1000 + 97 * stream + place for place in range(PROMPT_TOKENS)] for stream in range(options.streams)]
    with served(["--model", options.model, "--max-num-seqs", str(options.streams)]) as (server,):
        bare = BareLoop(config, prompts, options.tokens)
        sides = [
            lambda: streams_step(server, "/v1/completions", prompts, options.tokens),
            lambda: streams_step(server, "/generate", prompts, options.tokens),
            bare.seconds_per_step,
        ]
        comparison.in_turns(sides, 1)  # the first turn computes the prompts
        *ours, peer = comparison.in_turns(sides, options.turns)
        for route, times in zip(ROUTES, ours, strict=True):
            yield comparison.compare(
                BENCHMARK,
                f"{options.streams} streams of {route}",
                [seconds * 1e3 for seconds in times],
                [seconds * 1e3 for seconds in peer],
                unit="ms/step",
                peer_name="bare model loop",
                kind=comparison.OF_PEER,
                target=comparison.at_most(1.1),
            )
        yield comparison.alone(
            BENCHMARK, "engine time outside the forward pass", [outside_the_forward_pass(server)], unit="%"
        )


def main() -> None:
    """Measure and print."""
    parser = comparison.arguments(__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=10, help="that each stream gains in a turn, behind its first")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    comparison.report(measure(options), options.json)


if __name__ == "__main__":
    main()
