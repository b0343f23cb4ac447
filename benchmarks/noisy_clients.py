"""Clients of SGLang, vLLM or logitship whose processors are slow, many or broken: `noisy_plugins.py` runs them.

    python benchmarks/noisy_clients.py sleeps --url http://127.0.0.1:30000 --seconds 8 [--vllm-model NAME]

Each is a process of its own, as `hostile_clients.py`. All send completions, whose body differs only in where the engine
looks for a processor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import httpx
from attacker import Attacker, dumps
from hostile_clients import processor, spin, until_the_end

ROUTE = "/v1/completions"
TOKENS = 64
NEW_CLASSES = 20
"""A second."""
TOKENS_OF_NEW = 4
"""Output tokens of each request with a new class: what is measured is its class, not its share of the model."""
STRING_SIZE = 1_040_000
"""Characters of strings that don't load; the plugins take a MiB."""
_KINDS_OF_FAULTS = re.compile(r"too_slow|too slow|timeout|memory|MemoryError|load|busy|limit")


@dataclass
class NoisyClient(Attacker):
    """A client of one engine.

    Attributes:
        vllm_model: the name of vLLM's model; empty: the server is another one.
    """

    vllm_model: str = ""

    def outcome(self, response: httpx.Response) -> str:
        """Return the status, and how the request ended."""
        if response.status_code == httpx.codes.OK:
            return f"200 {response.json()['choices'][0]['finish_reason']}"
        kind = _KINDS_OF_FAULTS.search(response.text)
        return f"{response.status_code} {kind[0] if kind else response.text[:80]}"

    async def send(self, sent: dict[str, str], tokens: int = TOKENS) -> None:
        """Send a request with a processor."""
        await self.post(ROUTE, completion(sent, self.vllm_model, tokens))


@dataclass(frozen=True)
class Kind:
    """A noisy client.

    Attributes:
        attack: sends its requests.
        keeps: the share of their tokens that plain streams should keep beside it.
    """

    attack: Callable[[NoisyClient], Awaitable[None]]
    keeps: float


KINDS: dict[str, Kind] = {}
"""All noisy clients, by name."""


def kind(keeps: float) -> Callable[[Callable[[NoisyClient], Awaitable[None]]], None]:
    """Add a noisy client, beside which plain streams should keep a share of their tokens."""

    def add(attack: Callable[[NoisyClient], Awaitable[None]]) -> None:
        KINDS[attack.__name__] = Kind(attack, keeps)

    return add


def completion(sent: dict[str, str], vllm_model: str, tokens: int = TOKENS) -> bytes:
    """Return the body of a request with a processor in source form."""
    fields = {"custom_logit_processor": json.dumps(sent)}
    # Greedy, as the plain streams: beside a row with a temperature, SGLang on a CPU sorts the vocabulary for each row.
    body = {"model": vllm_model or "default", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    return dumps({**body, **({"vllm_xargs": fields} if vllm_model else fields)})


def new_number() -> int:
    """Return the number of a class that no server has seen."""
    return time.time_ns()


@kind(keeps=0.9)
async def sleeps(at: NoisyClient) -> None:
    """A processor that sleeps 0.3 s in each call."""
    sent = processor(new_number(), in_call="time.sleep(0.3)")
    await at.all(1, lambda _: at.send(sent))


@kind(keeps=0.5)
async def burns(at: NoisyClient) -> None:
    """A processor that uses 0.8 s of CPU time in each call."""
    sent = processor(new_number(), in_call=spin(0.8, "process_time"))
    await at.all(1, lambda _: at.send(sent))


@kind(keeps=0.5)
async def loops(at: NoisyClient) -> None:
    """An endless loop in the first call, a new class each time."""
    await at.all(1, lambda _: at.send(processor(new_number(), in_call="while True: pass")))


@kind(keeps=0.5)
async def hangs(at: NoisyClient) -> None:
    """A class that hangs while it is loaded."""
    sent = processor(new_number(), in_module="while True: pass")
    await at.all(1, lambda _: at.send(sent))


@kind(keeps=0.5)
async def allocates(at: NoisyClient) -> None:
    """A processor that allocates memory without end."""
    sent = processor(new_number(), in_call="kept = []\n        while True: kept.append(b'x' * 2**24)")
    await at.all(1, lambda _: at.send(sent))


@kind(keeps=0.6)
async def new_classes(at: NoisyClient) -> None:
    """Twenty new harmless classes a second, whether or not the server has answered the others."""
    await _often(at, new_number)


@kind(keeps=0.6)
async def known_class(at: NoisyClient) -> None:
    """As many requests with one harmless class: what the requests of `new_classes` cost without its classes."""
    number = new_number()
    await _often(at, lambda: number)


async def _often(at: NoisyClient, number: Callable[[], int]) -> None:
    async with asyncio.TaskGroup() as group:
        while at.goes_on:
            group.create_task(at.send(processor(number()), TOKENS_OF_NEW))
            await asyncio.sleep(1 / NEW_CLASSES)


@kind(keeps=0.5)
async def large_strings(at: NoisyClient) -> None:
    """Strings of 1 MB that do not load, from four clients."""
    first, padding = new_number(), "x" * STRING_SIZE
    sent = [processor(first + number, in_module=f"raise ValueError\nDATA = '{padding}'") for number in range(4)]
    bodies = [completion(each, at.vllm_model) for each in sent]
    await at.all(4, lambda number: at.post(ROUTE, bodies[number % 4]))


async def run(options: argparse.Namespace) -> NoisyClient:
    """Run a noisy client, and return it."""
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=options.url, timeout=None, limits=limits) as http:
        until = time.monotonic() + options.seconds
        client = NoisyClient(options.url, "none", "none", http, until, vllm_model=options.vllm_model)
        await until_the_end(client, KINDS[options.name].attack)
    return client


def main() -> None:
    """Run one noisy client, and print how its requests ended as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=KINDS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--vllm-model", default="", help="the name of its model, if the server is a vLLM")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--wait", action="store_true", help="print `ready`, and begin after a line of input")
    options = parser.parse_args()
    if options.wait:
        print("ready", flush=True)
        input()
    client = asyncio.run(run(options))
    print(json.dumps({**client.statuses, "unanswered": client.sent - sum(client.statuses.values())}))


if __name__ == "__main__":
    main()
