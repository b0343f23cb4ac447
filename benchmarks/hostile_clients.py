"""Hostile clients, each of which tries to make other clients of a server wait.

    python benchmarks/hostile_clients.py cancel_storm --url http://127.0.0.1:30000 --key K --shipping-key S --seconds 20

`noisy_neighbours.py` starts them, in a process of their own: their CPU time competes with the server's, so bodies are
made once and sent as bytes, and responses are not parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

Attack = Callable[["Attacker"], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
"""All hostile clients, by name."""


def attack(function: Attack) -> Attack:
    """Add a hostile client. Its first line says what it does."""
    ATTACKS[function.__name__] = function
    return function


@dataclass
class Attacker:
    """Two API keys and the connections of a hostile client.

    Attributes:
        url: of the server.
        key: an API key that may generate.
        shipping_key: one that may ship code.
        http: sends requests.
        until: `time.monotonic()` at the end of the attack.
        sent: number of requests that were begun.
        statuses: number of responses by status; "gone" for connections that ended without one.
    """

    url: str
    key: str
    shipping_key: str
    http: httpx.AsyncClient
    until: float
    sent: int = 0
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """True until the end of the attack."""
        return time.monotonic() < self.until

    async def post(self, path: str, body: bytes, *, ships: bool = False, method: str = "POST") -> int:
        """Send a body, and return the status; 0 if the connection ended without one."""
        key = self.shipping_key if ships else self.key
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self.sent += 1
        try:
            response = await self.http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError:
            self._count("gone")
            return 0
        self._count(str(response.status_code))
        return response.status_code

    async def abandon(self, path: str, body: bytes, after: float, *, ships: bool = False) -> None:
        """Send a body, and close the connection after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(after):
                await self.post(path, body, ships=ships)
                return
        self._count("abandoned")

    async def repeat(self, clients: int, path: str, body: bytes, *, ships: bool = False) -> None:
        """Let a number of clients send the same body again and again."""
        await self.all(clients, lambda _: self.post(path, body, ships=ships))

    async def all(self, clients: int, request: Callable[[int], Awaitable[Any]]) -> None:
        """Let a number of clients send requests, one after the other, until the end.

        Args:
            clients: number of requests at a time.
            request: sends the request with the given number.
        """
        numbers = itertools.count()

        async def client() -> None:
            while self.goes_on:
                began = time.monotonic()
                await request(next(numbers))
                if time.monotonic() - began < 0.02:  # refused: leave the CPU to the server
                    await asyncio.sleep(0.02)

        await asyncio.gather(*(client() for _ in range(clients)))

    def _count(self, status: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


def dumps(body: Any) -> bytes:
    """Return the bytes of a body."""
    return json.dumps(body, separators=(",", ":")).encode()


def shipped(source: str, tokens: int = 200, name: str = "P", **fields: Any) -> bytes:
    """Return a request with a processor in source form.

    Args:
        source: of the class `P`, after the import of the base class.
        tokens: of the output.
        name: of the class.
        **fields: of the body.
    """
    processor = {"source": "import time\nfrom logitship import CustomLogitProcessor\n" + source, "class_name": name}
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return dumps({"text": "a", "sampling_params": sampling, "custom_logit_processor": processor, **fields})


def spinning(seconds: float, number: int = 0, *, at_load: bool = False) -> str:
    """Return the source of a class that uses the CPU for some seconds, in each step or when it is loaded.

    Args:
        seconds: of CPU time.
        number: makes it another class.
        at_load: in `__init__`.
    """
    spin = f"end = time.perf_counter() + {seconds}\n        while time.perf_counter() < end: pass\n"
    in_init, in_call = (spin, "") if at_load else ("pass\n", spin)
    return (
        f"class P(CustomLogitProcessor):\n    number = {number}\n"
        f"    def __init__(self):\n        {in_init}"
        f"    def __call__(self, logits, custom_param_list=None):\n        {in_call}\n        return logits\n"
    )


# --- bodies ---


@attack
async def bad_words(at: Attacker) -> None:
    """Eight completions with a million bad words each (5 MB)."""
    body = dumps({"prompt": "a", "max_tokens": 5, "bad_words": [f"{number:x}" for number in range(600_000)]})
    await at.repeat(8, "/v1/completions", body)


@attack
async def empty_lists(at: Attacker) -> None:
    """Bodies of 16 MB, whose parameters are millions of empty lists."""
    lists = b"[" + b"[]," * 5_200_000 + b"[]]"
    await at.repeat(2, "/generate", b'{"text":"a","sampling_params":{"custom_params":{"a":' + lists + b"}}}")


@attack
async def queued_bodies(at: Attacker) -> None:
    """Forty requests with bodies of 7.8 MB, which wait in the queue."""
    params = {"a": ["x" * 70 for _ in range(100_000)]}
    sampling = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": params}
    await at.repeat(40, "/generate", dumps({"text": "a", "sampling_params": sampling}))


@attack
async def deep_json(at: Attacker) -> None:
    """Bodies with a hundred thousand nested lists."""
    nested = b"[" * 100_000 + b"]" * 100_000
    await at.repeat(4, "/generate", b'{"text":"a","sampling_params":{"custom_params":{"a":' + nested + b"}}}")


@attack
async def token_floods(at: Attacker) -> None:
    """Prompts of a million token ids, and of 8 MB of text: far longer than the model."""
    bodies = [dumps({"input_ids": [5] * 1_000_000}), dumps({"text": "some words " * 700_000})]
    await at.all(4, lambda number: at.post("/generate", bodies[number % 2]))


@attack
async def chat_flood(at: Attacker) -> None:
    """Conversations of a hundred thousand messages."""
    body = dumps({"messages": [{"role": "user", "content": "hi"}] * 100_000, "max_tokens": 4})
    await at.repeat(4, "/v1/chat/completions", body)


@attack
async def stop_strings(at: Attacker) -> None:
    """Requests with a hundred thousand stop strings, which every token is compared with."""
    body = dumps({"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stop": [f"#{n}#" for n in range(100_000)]})
    await at.repeat(8, "/v1/completions", body)


@attack
async def largest_bodies(at: Attacker) -> None:
    """Requests with as much of everything as the server takes: bad words, stop strings, messages, parameters, trees."""
    limits = {"max_tokens": 4, "ignore_eos": True}
    tree = {"start_token_id": 0, "end_token_id": 1}
    prefixes = {"0": list(range(2, 45_000))} | {f"0_{n}": [1] for n in range(2, 45_000)}
    bodies = [
        ("/v1/completions", {"prompt": "a", **limits, "bad_words": [f"{n:x}" + "b" * 250 for n in range(1024)]}),
        ("/v1/completions", {"prompt": "a", **limits, "stop": [f"{n:x}" + "s" * 1000 for n in range(1024)]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * (1 << 14), **limits}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 4, "custom_params": {"a": [[]] * 100_000}}}),
        (
            "/v1/completions",
            {
                "prompt": "a",
                **limits,
                "logits_processors": [
                    {"processor": {"name": "tree"}, "params": {"tree": {**tree, "prefix_dict": prefixes}}}
                ],
            },
        ),
    ]
    encoded = [(path, dumps(body)) for path, body in bodies]
    await at.all(8, lambda number: at.post(*encoded[number % len(encoded)]))


@attack
async def logit_bias(at: Attacker) -> None:
    """Requests with a bias for each token of the vocabulary, for many continuations."""
    body = dumps({"prompt": "a", "max_tokens": 50, "n": 8, "logit_bias": {str(n): 1.0 for n in range(49_000)}})
    await at.repeat(8, "/v1/completions", body)


@attack
async def slow_loris(at: Attacker) -> None:
    """Five hundred connections that send a byte of their request a second."""
    host = urlsplit(at.url)
    sockets = []
    head = f"POST /generate HTTP/1.1\r\nHost: {host.netloc}\r\nAuthorization: Bearer {at.key}\r\n".encode()
    for _ in range(500):
        with contextlib.suppress(OSError):
            sockets.append(socket.create_connection((host.hostname or "", host.port or 80), 5))
            sockets[-1].sendall(head)
            at.sent += 1
    try:
        while at.goes_on:
            for each in sockets:
                with contextlib.suppress(OSError):
                    each.sendall(b"X")
            await asyncio.sleep(1)
    finally:
        for each in sockets:
            each.close()


@attack
async def huge_ids(at: Attacker) -> None:
    """Requests whose ids, user names and model names are long, for the log."""
    long = "r" * 500_000
    bodies = [
        dumps({"text": "a", "rid": long, "sampling_params": {"max_new_tokens": 1}}),
        dumps({"prompt": "a", "max_tokens": 1, "model": long}),
        dumps({"prompt": "a", "max_tokens": 1, "user": long}),
    ]
    await at.all(
        8, lambda number: at.post(("/generate", "/v1/completions", "/v1/completions")[number % 3], bodies[number % 3])
    )


@attack
async def metrics_flood(at: Attacker) -> None:
    """Clients that read metrics, server info and the OpenAPI document without end."""
    paths = ("/metrics", "/server_info", "/openapi.json", "/v1/processors", "/v1/models")
    await at.all(8, lambda number: at.post(paths[number % len(paths)], b"", method="GET"))


# --- generation ---


@attack
async def cancel_storm(at: Attacker) -> None:
    """Sixteen clients with prompts of 300 tokens, which are cancelled after 0.3 s."""

    def body(number: int) -> bytes:
        ids = [1000 + (number * 7919 + place * 31) % 40_000 for place in range(300)]
        return dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}})

    await at.all(16, lambda number: at.abandon("/generate", body(number), 0.3))


@attack
async def long_prompts(at: Attacker) -> None:
    """Sixteen clients with new prompts of 1,900 tokens."""

    def body(number: int) -> bytes:
        ids = [1000 + (number * 7919 + place * 31) % 40_000 for place in range(1900)]
        return dumps({"input_ids": ids, "sampling_params": {"max_new_tokens": 1}})

    await at.all(16, lambda number: at.post("/generate", body(number)))


@attack
async def long_contexts(at: Attacker) -> None:
    """One prompt of 1,900 tokens, continued 28 times: the model reads all their keys and values in each step."""
    ids = [1000 + place * 31 % 40_000 for place in range(1900)]
    sampling = {"max_new_tokens": 500, "ignore_eos": True, "n": 28}
    await at.repeat(2, "/generate", dumps({"input_ids": ids, "sampling_params": sampling, "stream": True}))


@attack
async def full_batch(at: Attacker) -> None:
    """A hundred long generations, to take all places of the batch."""
    await at.repeat(
        100, "/generate", dumps({"text": "a", "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}})
    )


@attack
async def n_flood(at: Attacker) -> None:
    """Requests for a thousand continuations each, until the queue is full."""
    await at.repeat(4, "/v1/completions", dumps({"prompt": "a", "max_tokens": 1000, "n": 1000, "ignore_eos": True}))


@attack
async def huge_logprobs(at: Attacker) -> None:
    """Requests with all log-probabilities that one can ask for, of prompt and output."""
    ids = [1000 + place * 31 % 40_000 for place in range(1000)]
    sampling = {"max_new_tokens": 500, "ignore_eos": True, "n": 8}
    fields = {"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": 0, "stream": True}
    await at.repeat(4, "/generate", dumps({"input_ids": ids, "sampling_params": sampling, **fields}))


@attack
async def traces(at: Attacker) -> None:
    """Requests that ask for traces of every token."""
    sampling = {"max_new_tokens": 500, "ignore_eos": True, "n": 8}
    await at.repeat(2, "/generate", dumps({"text": "a", "sampling_params": sampling, "trace": {"top": 20}}))


@attack
async def beams(at: Attacker) -> None:
    """Beam searches as wide as the batch."""
    sampling = {"max_new_tokens": 500, "num_beams": 28, "n": 28}
    await at.repeat(4, "/generate", dumps({"text": "a", "sampling_params": sampling}))


@attack
async def trees(at: Attacker) -> None:
    """Requests with token trees of a hundred thousand nodes."""
    tree = {"prefix_dict": {f"{n}": [n % 49_000, (n + 1) % 49_000] for n in range(100_000)}}
    processors = [{"processor": {"name": "tree"}, "params": tree}]
    await at.repeat(4, "/generate", dumps({"text": "a", "logits_processors": processors}))


@attack
async def unread_streams(at: Attacker) -> None:
    """Two hundred streams that are never read."""
    host = urlsplit(at.url)
    body = dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True}})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: {host.netloc}\r\nAuthorization: Bearer {at.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()
    sockets = []
    for _ in range(200):
        each = socket.socket()
        each.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with contextlib.suppress(OSError):
            each.connect((host.hostname or "", host.port or 80))
            each.sendall(head + body)
            at.sent += 1
        sockets.append(each)
    try:
        await asyncio.sleep(at.until - time.monotonic())
    finally:
        for each in sockets:
            each.close()


# --- grammars ---


@attack
async def hard_grammars(at: Attacker) -> None:
    """Fourteen clients with regular expressions that take long to check, each another one."""

    def body(number: int) -> bytes:
        pattern = f"((((a{{1,{99 + number}}}){{1,99}}){{1,99}}){{1,99}})"
        return dumps({"text": "a", "sampling_params": {"max_new_tokens": 5, "regex": pattern}})

    await at.all(14, lambda number: at.post("/generate", body(number)))


@attack
async def ebnf_bombs(at: Attacker) -> None:
    """Grammars whose rules double in size, thirty times."""

    def body(number: int) -> bytes:
        rules = [f"r{n} ::= r{n + 1} r{n + 1}" for n in range(30)]
        grammar = "\n".join(["root ::= r0", *rules, f'r30 ::= "a{number}"'])
        return dumps({"text": "a", "sampling_params": {"max_new_tokens": 5, "ebnf": grammar}})

    await at.all(14, lambda number: at.post("/generate", body(number)))


@attack
async def huge_schemas(at: Attacker) -> None:
    """JSON schemas of 2 MB, with thousands of properties."""

    def body(number: int) -> bytes:
        properties = {f"p{number}_{n}": {"enum": [f"v{n}_{value}" for value in range(20)]} for n in range(4000)}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return dumps({"text": "a", "sampling_params": {"max_new_tokens": 5, "json_schema": json.dumps(schema)}})

    bodies = [body(number) for number in range(8)]
    await at.all(8, lambda number: at.post("/generate", bodies[number % 8]))


# --- code ---


@attack
async def spinners(at: Attacker) -> None:
    """Thirty-one processors that use 0.85 s of the CPU in each step."""
    await at.all(31, lambda number: at.post("/generate", shipped(spinning(0.85, number % 31)), ships=True))


@attack
async def twelve_spinners(at: Attacker) -> None:
    """Twelve processors that use 0.85 s of the CPU in each step."""
    await at.all(12, lambda number: at.post("/generate", shipped(spinning(0.85, number % 12)), ships=True))


@attack
async def slow_processor(at: Attacker) -> None:
    """One processor that takes 300 ms in each step."""
    await at.repeat(1, "/generate", shipped(spinning(0.3), 1000), ships=True)


@attack
async def slow_stages(at: Attacker) -> None:
    """A request with sixteen processors that take 50 ms each, one after the other."""
    entries = [json.loads(shipped(spinning(0.05, number)))["custom_logit_processor"] for number in range(16)]
    body = dumps(
        {
            "text": "a",
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
            "logits_processors": [{"processor": entry} for entry in entries],
        }
    )
    await at.repeat(1, "/generate", body, ships=True)


@attack
async def slow_loads(at: Attacker) -> None:
    """Thirty classes at a time that take 9.5 s to load, asleep."""
    source = (
        "class P(CustomLogitProcessor):\n    number = {}\n"
        "    def __init__(self):\n        time.sleep(9.5)\n"
        "    def __call__(self, logits, custom_param_list=None):\n        return logits\n"
    )
    await at.all(30, lambda number: at.post("/generate", shipped(source.format(number)), ships=True))


@attack
async def spinning_loads(at: Attacker) -> None:
    """Sixty classes at a time that use the CPU for 9.5 s in `__init__`."""
    await at.all(60, lambda number: at.post("/generate", shipped(spinning(9.5, number, at_load=True)), ships=True))


@attack
async def dying_loads(at: Attacker) -> None:
    """Twenty-four classes that load at once, end their process in a step, and then load slowly."""
    soon = time.time() + 5
    source = (
        "import os\nif time.time() > {}: time.sleep(9.5)\n"
        "class P(CustomLogitProcessor):\n    number = {}\n"
        "    def __call__(self, logits, custom_param_list=None):\n"
        "        if time.time() > {} and len(custom_param_list[0]['__req__'].output_ids) > 2: os._exit(3)\n"
        "        return logits\n"
    )
    bodies = [shipped(source.format(soon, number, soon - 2)) for number in range(24)]
    await at.all(48, lambda number: at.post("/generate", bodies[number % 24], ships=True))


@attack
async def hanging_registrations(at: Attacker) -> None:
    """A thousand registrations of a class that hangs, whose clients disconnect."""
    source = "import time\nfrom logitship import CustomLogitProcessor\nnumber = {}\ntime.sleep(60)\n"

    def body(number: int) -> bytes:
        return dumps({"source": source.format(number) + "class P(CustomLogitProcessor): pass\n", "class_name": "P"})

    await at.all(20, lambda number: at.abandon("/v1/processors", body(number), 0.1, ships=True))


@attack
async def registry_flood(at: Attacker) -> None:
    """New versions of a class, as fast as the server registers them."""
    source = (
        "from logitship import CustomLogitProcessor\nclass P(CustomLogitProcessor):\n    number = {}\n"
        "    def __call__(self, logits, custom_param_list=None):\n        return logits\n"
    )

    def body(number: int) -> bytes:
        return dumps({"source": source.format(number), "class_name": "P"})

    await at.all(8, lambda number: at.post("/v1/processors", body(number), ships=True))


@attack
async def crash_loop(at: Attacker) -> None:
    """Processors that end their process in their first step, in sixteen requests at a time."""
    source = (
        "import os\nclass P(CustomLogitProcessor):\n    number = {}\n"
        "    def __call__(self, logits, custom_param_list=None):\n        os._exit(3)\n"
    )
    await at.all(16, lambda number: at.post("/generate", shipped(source.format(number % 16)), ships=True))


async def run(name: str, url: str, key: str, shipping_key: str, seconds: float) -> Attacker:
    """Run a hostile client for some seconds, and return it."""
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        attacker = Attacker(url, key, shipping_key, http, time.monotonic() + seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await ATTACKS[name](attacker)
    return attacker


def main() -> None:
    """Run one hostile client, and print the statuses of its responses as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="")
    parser.add_argument("--shipping-key", default="")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--wait", action="store_true", help="print `ready`, and begin after a line of input")
    options = parser.parse_args()
    if options.wait:
        print("ready", flush=True)
        input()
    attacker = asyncio.run(run(options.name, options.url, options.key, options.shipping_key, options.seconds))
    print(json.dumps(attacker.statuses))


if __name__ == "__main__":
    main()
