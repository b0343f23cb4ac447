"""Cost of a slow class inside SGLang or vLLM for plain requests.

    logitship serve …, sglang serve … or vllm serve … with the plugin, then
    python benchmarks/slow_class.py URL [--seconds 30] [--streams 8]

Plain streams, request after request: first alone, then beside one client that sends a class which sleeps 0.3 s in each
call, request after request. Prints the tokens per second of the plain streams, the longest gaps between their tokens,
and how the requests of the slow class end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

SOURCE = """
import time
from logitship import CustomLogitProcessor

class Sleeps(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        time.sleep(0.3)
        return logits + 0.0
"""
STRING = json.dumps({"source": SOURCE, "class_name": "Sleeps"})


@dataclass
class Side:
    """Measurements beside the slow class, or without it."""

    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


def body_of(is_vllm: bool, model: str, tokens: int, *, is_slow: bool) -> tuple[str, dict[str, object]]:
    """Return the route and the body of a request: vLLM's of completions, or SGLang's own."""
    if is_vllm:
        body: dict[str, object] = {"model": model, "prompt": "The moon is", "max_tokens": tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0.0}
        return "/v1/completions", body | ({"vllm_xargs": {"custom_logit_processor": STRING}} if is_slow else {})
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    body = {"text": "The moon is", "sampling_params": params, "stream": True}
    return "/generate", body | ({"custom_logit_processor": STRING} if is_slow else {})


def stream(client: httpx.Client, path: str, body: dict[str, object], on_event: Callable[[str], None]) -> None:
    """Send a request and pass on its events."""
    with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            on_event(f"refused: {response.read().decode()[:200]}")
            return
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                on_event(line[6:])


def measure(url: str, is_vllm: bool, model: str, seconds: float, streams: int, *, with_slow: bool) -> Side:
    """Run the plain streams for some time."""
    side, ended = Side(), threading.Event()

    def plain() -> None:
        path, body = body_of(is_vllm, model, 64, is_slow=False)
        last: list[float] = []

        def on_event(_: str) -> None:
            now = time.perf_counter()
            side.gaps.extend(now - each for each in last)
            last[:] = [now]
            side.tokens += 1

        with httpx.Client(base_url=url, timeout=120) as client:
            while not ended.is_set():
                last.clear()
                stream(client, path, body, on_event)

    def slow() -> None:
        path, body = body_of(is_vllm, model, 64, is_slow=True)
        with httpx.Client(base_url=url, timeout=120) as client:
            while not ended.is_set():
                events = [""]
                stream(client, path, body, events.append)
                text = events[-1]
                names = ("too_slow", "is too slow", "refused", '"length"', '"stop"', "abort")
                side.ends[next((name for name in names if name in text), "other")] += 1

    threads = [threading.Thread(target=plain) for _ in range(streams)]
    threads += [threading.Thread(target=slow)] if with_slow else []
    for thread in threads:
        thread.start()
    time.sleep(min(3.0, seconds / 4))  # the first tokens, and loading the class
    side.tokens, before = 0, time.perf_counter()
    side.gaps.clear()
    time.sleep(seconds)
    tokens, took = side.tokens, time.perf_counter() - before
    ended.set()
    for thread in threads:
        thread.join()
    side.tokens = round(tokens / took)
    return side


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    models = httpx.get(f"{options.url}/v1/models").json()["data"]
    is_vllm = models[0]["owned_by"] == "vllm"
    sides = {
        name: measure(options.url, is_vllm, models[0]["id"], options.seconds, options.streams, with_slow=with_slow)
        for name, with_slow in (("quiet", False), ("beside the class", True), ("quiet again", False))
    }
    quiet = statistics.mean(side.tokens for name, side in sides.items() if name != "beside the class")
    print(f"{options.streams} plain streams")
    for name, side in sides.items():
        gap = statistics.quantiles(side.gaps, n=100)[98] * 1e3
        ends = f"; its requests: {dict(side.ends)}" if side.ends else ""
        print(f"{name:>17}: {side.tokens:5} tokens/s, {side.tokens / quiet:.2f}; p99 between tokens {gap:.0f} ms{ends}")


if __name__ == "__main__":
    main()
