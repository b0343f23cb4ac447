"""Hostile clients, each of which tries to make other clients of a server wait.

    python benchmarks/hostile_clients.py cancel_storm --url http://127.0.0.1:30000 --key K --shipping-key S --seconds 20

`noisy_neighbours.py` starts them, in a process of their own: their CPU time competes with the server's, so bodies are
made once and sent as bytes, and responses are not parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
from attacker import Attacker, dumps

Attack = Callable[[Attacker], Awaitable[None]]
ATTACKS: dict[str, Attack] = {}
"""All hostile clients, by name."""


def attack(function: Attack) -> Attack:
    """Add a hostile client. Its first line says what it does."""
    ATTACKS[function.__name__] = function
    return function


def spin(seconds: float, clock: str = "perf_counter") -> str:
    """Return the statements of a method that uses the CPU for some seconds of a clock."""
    return f"end = time.{clock}() + {seconds}\n        while time.{clock}() < end: pass"


def processor(number: int = 0, *, in_module: str = "", in_init: str = "pass", in_call: str = "pass") -> dict[str, str]:
    """Return a processor in source form, which leaves the logits as they are.

    Args:
        number: makes it another class.
        in_module: statement at the top of its module.
        in_init: statements when it is loaded.
        in_call: statements in each step.
    """
    source = (
        f"import os\nimport time\nfrom logitship import CustomLogitProcessor\n{in_module}\n"
        f"class P(CustomLogitProcessor):\n    number = {number}\n"
        f"    def __init__(self):\n        {in_init}\n"
        f"    def __call__(self, logits, custom_param_list=None):\n        {in_call}\n        return logits\n"
    )
    return {"source": source, "class_name": "P"}


def shipped(sent: dict[str, str], tokens: int = 200) -> bytes:
    """Return a request with a processor, for some tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    return dumps({"text": "a", "sampling_params": sampling, "custom_logit_processor": sent})


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
    await _ship(at, 31, lambda number: processor(number % 31, in_call=spin(0.85)))


@attack
async def twelve_spinners(at: Attacker) -> None:
    """Twelve processors that use 0.85 s of the CPU in each step."""
    await _ship(at, 12, lambda number: processor(number % 12, in_call=spin(0.85)))


@attack
async def slow_processor(at: Attacker) -> None:
    """One processor that takes 300 ms in each step."""
    await at.repeat(1, "/generate", shipped(processor(in_call=spin(0.3)), 1000), ships=True)


@attack
async def slow_stages(at: Attacker) -> None:
    """A request with sixteen processors that take 50 ms each, one after the other."""
    body = dumps(
        {
            "text": "a",
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
            "logits_processors": [{"processor": processor(number, in_call=spin(0.05))} for number in range(16)],
        }
    )
    await at.repeat(1, "/generate", body, ships=True)


@attack
async def slow_loads(at: Attacker) -> None:
    """Thirty classes at a time that take 9.5 s to load, asleep."""
    await _ship(at, 30, lambda number: processor(number, in_init="time.sleep(9.5)"))


@attack
async def spinning_loads(at: Attacker) -> None:
    """Sixty classes at a time that use the CPU for 9.5 s in `__init__`."""
    await _ship(at, 60, lambda number: processor(number, in_init=spin(9.5)))


@attack
async def dying_loads(at: Attacker) -> None:
    """Twenty-four classes that load at once, end their process in a step, and then load slowly."""
    soon = time.time() + 5
    in_module = f"if time.time() > {soon}: time.sleep(9.5)"
    in_call = f"if time.time() > {soon - 2} and len(custom_param_list[0]['__req__'].output_ids) > 2: os._exit(3)"
    await _ship(at, 48, lambda number: processor(number % 24, in_module=in_module, in_call=in_call))


@attack
async def hanging_registrations(at: Attacker) -> None:
    """A thousand registrations of a class that hangs, whose clients disconnect."""

    def body(number: int) -> bytes:
        return dumps(processor(number, in_module="time.sleep(60)"))

    await at.all(20, lambda number: at.abandon("/v1/processors", body(number), 0.1, ships=True))


@attack
async def registry_flood(at: Attacker) -> None:
    """New versions of a class, as fast as the server registers them."""
    await at.all(8, lambda number: at.post("/v1/processors", dumps(processor(number)), ships=True))


@attack
async def crash_loop(at: Attacker) -> None:
    """Processors that end their process in their first step, in sixteen requests at a time."""
    await _ship(at, 16, lambda number: processor(number % 16, in_call="os._exit(3)"))


async def _ship(at: Attacker, clients: int, make: Callable[[int], dict[str, str]]) -> None:
    """Let a number of clients send requests with the processor that `make` returns for the number of each."""
    await at.all(clients, lambda number: at.post("/generate", shipped(make(number)), ships=True))


async def run(name: str, url: str, key: str, shipping_key: str, seconds: float) -> Attacker:
    """Run a hostile client for some seconds, and return it."""
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:
        attacker = Attacker(url, key, shipping_key, http, time.monotonic() + seconds)
        await until_the_end(attacker, ATTACKS[name])
    return attacker


async def until_the_end(attacker: Attacker, attack: Callable[[Any], Awaitable[None]]) -> None:
    """Let a client attack until its time is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(attacker.until - time.monotonic()):
            await attack(attacker)


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
