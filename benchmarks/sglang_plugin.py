"""Overhead of the plugin inside SGLang: loaded and not used, and used by all requests.

    tests/peers/sglang_cpu.sh VENV "$(command -v python)" && python benchmarks/sglang_plugin.py --python VENV/bin/python

Two servers with the same model take turns in one run, SGLang without the plugin and SGLang with it. The one that does
not have its turn is stopped (SIGSTOP), because SGLang's scheduler computes while it waits. Without the plugin, SGLang
unpickles the processor, and runs it in its own process.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from plugin_servers import add_distribution  # noqa: E402
from processors import BanSome  # noqa: E402

from logitship.server.model.default_model import default_model_folder  # noqa: E402

PROMPT = "The moon is"
SIDES = ("alone", "loaded", "unpickled", "sandboxed")
"""SGLang alone; the plugin, unused; SGLang's own way, by all requests; sandboxes, by all requests."""
WITH_PLUGIN = frozenset({"loaded", "sandboxed"})
WITH_PROCESSOR = frozenset({"unpickled", "sandboxed"})
START_TIMEOUT = 300.0


class Server:
    """A running SGLang.

    Args:
        python: the interpreter of its environment.
        model: the model's folder.
        port: its port.
        has_plugin: it loads logitship's plugin.
        arguments: further arguments of its command line.
    """

    def __init__(self, python: str, model: Path, port: int, has_plugin: bool, arguments: Sequence[str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "sglang.launch_server", "--model-path", str(model), "--device", "cpu"]
        command += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"]
        command += ["--max-total-tokens", "8192", "--max-running-requests", "32", "--skip-server-warmup"]
        command += ["--enable-custom-logit-processor", "--disable-radix-cache", "--log-level", "warning"]
        command += ["--host", "127.0.0.1", "--port", str(port), *arguments]
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "2"}
        environment["SGLANG_PLUGINS"] = "logitship" if has_plugin else "none"
        self._process = subprocess.Popen(command, env=os.environ | environment, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Wait for its first answer."""
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise TimeoutError(self.url)

    def signal(self, number: int) -> None:
        """Send a signal to all its processes."""
        os.killpg(self._process.pid, number)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run meanwhile."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        self.signal(signal.SIGKILL)
        self._process.wait()


def banned(stream: int) -> list[int]:
    """Return the tokens that a request forbids: rare ones, so that all sides sample nearly the same output."""
    return list(range(40_000 + stream, 40_100 + stream))


def body_of(side: str, streams: int, tokens: int) -> dict[str, Any]:
    """Return the body of a turn's request, with one prompt per stream."""
    sampling = [{"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True} for _ in range(streams)]
    if side not in WITH_PROCESSOR:
        return {"text": [PROMPT] * streams, "sampling_params": sampling}
    params = [{**each, "custom_params": {"banned": banned(stream)}} for stream, each in enumerate(sampling)]
    return {"text": [PROMPT] * streams, "sampling_params": params, "custom_logit_processor": BanSome.to_str()}


def seconds_of(server: Server, body: dict[str, Any]) -> float:
    """Return the time of a decoding step: between requests of all tokens, and of the first alone."""
    times = []
    for tokens in (1, body["sampling_params"][0]["max_new_tokens"]):
        sampling = [{**each, "max_new_tokens": tokens} for each in body["sampling_params"]]
        began = time.perf_counter()
        answer = httpx.post(f"{server.url}/generate", json={**body, "sampling_params": sampling}, timeout=600)
        times.append(time.perf_counter() - began)
        answer.raise_for_status()
        assert all(len(each["output_ids"]) == tokens for each in answer.json())
    return (times[1] - times[0]) / (tokens - 1)


def rotated(turn: int) -> tuple[str, ...]:
    """Return the sides, starting with a different one each turn: the side before may leave the machine warm."""
    first = turn % len(SIDES)
    return SIDES[first:] + SIDES[:first]


def measure(servers: dict[bool, Server], streams: int, tokens: int, rounds: int) -> None:
    """Measure one number of streams, and print the table."""
    bodies = {side: body_of(side, streams, tokens) for side in SIDES}

    def turn(side: str) -> float:
        server = servers[side in WITH_PLUGIN]
        with server.turn():
            return seconds_of(server, bodies[side])

    for side in SIDES:
        turn(side)
    turns = [{side: turn(side) for side in rotated(number)} for number in range(rounds)]
    print(f"\n{streams} requests of {tokens} tokens, median of {rounds} turns")
    print(f"{'':>10} {'tokens/s':>9} {'ms a step':>10} {'vs. alone':>10} {'vs. unpickled':>14}")
    for side in SIDES:
        seconds = statistics.median(each[side] for each in turns)
        ratios = [statistics.median(each[side] / each[base] for each in turns) for base in ("alone", "unpickled")]
        print(f"{side:>10} {streams / seconds:9.1f} {seconds * 1e3:10.2f} {ratios[0]:10.3f} {ratios[1]:14.3f}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of SGLang's environment")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: the default model)")
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=24, help="output tokens of each stream")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side")
    parser.add_argument("--port", type=int, default=30800, help="the first of two")
    parser.add_argument("arguments", nargs="*", help="further arguments of SGLang, after --")
    options = parser.parse_args()
    model = options.model or default_model_folder()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        add_distribution(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(folder)))
        servers = {}
        for has_plugin in (False, True):
            server = Server(options.python, model, options.port + has_plugin, has_plugin, options.arguments)
            stack.callback(server.close)
            server.wait_until_ready()
            server.signal(signal.SIGSTOP)
            servers[has_plugin] = server
        for streams in options.streams:
            measure(servers, streams, options.tokens, options.rounds)


if __name__ == "__main__":
    main()
