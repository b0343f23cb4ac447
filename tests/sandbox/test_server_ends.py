"""No sandbox process outlives its server, however the server ends or fails to start."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from logitship.server.shutdown_watchdog import GRACE

DEADLINE = 60.0
BUSY = 20.0
"""Seconds that the end of a server may take longer on a busy machine."""
STREAMS = 8
HOSTILE = str(Path(__file__).parents[2] / "benchmarks/hostile_clients.py")
LOGITSHIP = str(Path(sysconfig.get_path("scripts"), "logitship"))
SLOW = {
    "class_name": "Slow",
    "source": """
import time
from logitship import CustomLogitProcessor

class Slow(CustomLogitProcessor):
    '''Slow enough that the requests still run when the server ends.'''
    def __call__(self, logits, custom_param_list=None):
        time.sleep(0.02)
        return logits
""",
}


class Serving:
    """A `logitship serve` process that runs shipped code in sandboxes."""

    def __init__(self, model: str, mark: str, *flags: str) -> None:
        command = [LOGITSHIP, "serve", "--model-path", model, "--device", "cpu", "--enable-custom-logit-processor"]
        self.process = subprocess.Popen(
            [*command, *flags],
            env=os.environ | {"PYTHONPATH": mark},  # marks the processes that it starts
            stderr=subprocess.PIPE,
            text=True,
        )

    def url(self) -> str:
        """Wait until it serves. Return its URL."""
        assert self.process.stderr is not None
        log = ""
        for line in self.process.stderr:
            log += line
            if "running on http" in line:
                found = re.search(r"http://[\d.]+:\d+", line)
                assert found
                return found[0]
        raise AssertionError(log)

    def failure(self) -> str:
        """Wait for it to fail. Return its log."""
        log = self.process.communicate(timeout=DEADLINE)[1]
        assert self.process.returncode != 0
        return log

    def close(self) -> None:
        """Kill it, if it is running."""
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def processes(sandbox_processes: Any, tmp_path: Path) -> Any:
    """Processes of this test's server only."""
    return dataclasses.replace(sandbox_processes, mark=str(tmp_path))


@pytest.fixture
def serve(model_folder: Path, processes: Any) -> Iterator[Callable[..., Serving]]:
    """A function that starts a server, which is killed after the test."""
    started: list[Serving] = []

    def start(*flags: str, model: str = str(model_folder)) -> Serving:
        started.append(Serving(model, processes.mark, "--port", "0", *flags))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


async def under_load(url: str, end: Callable[[], None]) -> list[str | Exception]:
    """Call `end` when every stream has received a token. Return each stream's last event or exception."""
    begun = [asyncio.Event() for _ in range(STREAMS)]
    sampling = {"max_new_tokens": 400, "ignore_eos": True}
    body = {"input_ids": [5, 6], "sampling_params": sampling, "custom_logit_processor": SLOW, "stream": True}

    async def read(client: httpx.AsyncClient, event: asyncio.Event) -> str | Exception:
        last = ""
        try:
            async with client.stream("POST", "/generate", json=body) as answer:
                async for line in answer.aiter_lines():
                    last = line or last
                    event.set()
        except httpx.TransportError as error:
            return error
        return last

    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE) as client, asyncio.timeout(DEADLINE):
        reading = [asyncio.create_task(read(client, event)) for event in begun]
        for event in begun:
            await event.wait()
        end()
        return await asyncio.gather(*reading)


def test_sigkill_of_the_server(serve: Callable[..., Serving], processes: Any) -> None:
    serving = serve()
    url = serving.url()

    def end() -> None:
        assert set(processes.roles().values()) == {"launcher", "between", "zygote", "sandbox"}
        serving.process.kill()

    ends = asyncio.run(under_load(url, end))
    assert all(isinstance(each, httpx.TransportError) for each in ends)
    processes.wait_for_end()


def test_sigkill_of_starting_server(serve: Callable[..., Serving], processes: Any) -> None:
    serving = serve()
    while "launcher" not in processes.roles().values():
        assert serving.process.poll() is None
    serving.process.kill()
    processes.wait_for_end()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_everything(serve: Callable[..., Serving], processes: Any, number: signal.Signals) -> None:
    serving = serve("--shutdown-timeout", "0.1")
    ends = asyncio.run(under_load(serving.url(), lambda: serving.process.send_signal(number)))
    assert ends == ["data: [DONE]"] * STREAMS
    assert serving.process.wait(DEADLINE) == 0
    assert not processes.roles(), "the server did not wait for its sandbox processes"


def test_signal_ends_processes_that_do_not_react(serve: Callable[..., Serving], processes: Any) -> None:
    serving = serve("--shutdown-timeout", "0.1")

    def end() -> None:
        for pid in processes.roles():
            os.kill(pid, signal.SIGSTOP)
        serving.process.send_signal(signal.SIGTERM)

    asyncio.run(under_load(serving.url(), end))
    assert serving.process.wait(DEADLINE) in (0, 1)
    processes.wait_for_end()


State = Mapping[str, Any]
AT_WORK: dict[str, Callable[[State], bool]] = {
    "bad_words": lambda state: state["pool_jobs_running"] > 0,
    "empty_lists": lambda state: state["queued_bytes"] > 1 << 20,
    "queued_bodies": lambda state: state["queued_bytes"] > 1 << 20,
    "dying_loads": lambda state: state["sandboxes_ended"] and state["loads_running"] > 0,
    "spinning_loads": lambda state: state["loads_running"] > 0,
    "spinners": lambda state: state["running"] > 0 and state["sandboxes"] > 0,
    "hard_grammars": lambda state: state["grammar_checkers"] > 0,
    "hanging_registrations": lambda state: state["loads_running"] > 0,
}
"""Hostile client → whether the server does what it makes it do, by the state of the engine."""


@pytest.mark.parametrize("name", AT_WORK)
def test_sigterm_beside_a_hostile_client(serve: Callable[..., Serving], processes: Any, name: str) -> None:
    """The server has a second for running requests, and what the watchdog gives it. The machine may be busy."""
    serving = serve("--shutdown-timeout", "1", "--api-key", "honest", "hostile", "--shipping-api-key", "hostile-ships")
    url = serving.url()

    command = ["nice", "-n", "19", sys.executable, HOSTILE, name, "--url", url]  # clients have machines of their own
    hostile = subprocess.Popen([*command, "--key", "hostile", "--shipping-key", "hostile-ships"])
    try:
        with httpx.Client(base_url=url, timeout=DEADLINE, headers={"Authorization": "Bearer honest"}) as http:
            end = time.monotonic() + DEADLINE
            while not AT_WORK[name](_state(http, serving.process.pid)):
                assert time.monotonic() < end
                assert hostile.poll() is None
                time.sleep(0.05)
        serving.process.terminate()
        assert serving.process.wait(1 + GRACE + BUSY) in (0, 1)
    finally:
        hostile.kill()
        hostile.wait()
    processes.wait_for_end()


def _state(http: httpx.Client, server: int) -> State:
    state: State = http.get("/server_info").json()["internal_states"][0]
    return {**state, "grammar_checkers": len(_grammar_checkers(server))}


def _grammar_checkers(server: int) -> list[int]:
    """Return the PIDs of the processes in which a server checks grammars."""
    found = []
    for children in Path(f"/proc/{server}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):  # it exits at this moment
                if b"grammars" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
    return found


def test_port_in_use(serve: Callable[..., Serving], processes: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serving = serve("--port", str(taken.getsockname()[1]))
        assert "already in use" in serving.failure()
    processes.wait_for_end()


def test_missing_model(serve: Callable[..., Serving], processes: Any, tmp_path: Path) -> None:
    serving = serve(model=str(tmp_path / "nothing"))
    assert "nothing" in serving.failure()
    assert not processes.roles()
