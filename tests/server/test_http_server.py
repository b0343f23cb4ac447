"""`logitship serve` as a process: shutdown with running requests, and its log."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.http_server import HTTPServer
from logitship.server.listening import open_sockets
from logitship.server.refusals import StartError
from logitship.server.uploads.request_bodies import SHORT_TEXT

DEADLINE = 120.0
LOGITSHIP = str(Path(sysconfig.get_path("scripts"), "logitship"))
HOLD = {
    "class_name": "Hold",
    "source": """
import time
from pathlib import Path
from logitship import CustomLogitProcessor

class Hold(CustomLogitProcessor):
    '''Blocks each step after the first token until a file exists. Makes another one when it begins to.'''
    def __call__(self, logits, custom_param_list=None):
        for params in custom_param_list:
            if params["__req__"].output_ids:
                Path(params["file"] + ".held").touch()
            while params["__req__"].output_ids and not Path(params["file"]).exists():
                time.sleep(0.002)
        return logits
""",
}


HANGING = """
import asyncio, sys, threading
from logitship.server import cli
from logitship.server.http_server import HTTPServer
from logitship.server.tokenizer import Tokenizer

what, *arguments = sys.argv[1:]
never = threading.Event()
encode, startup = Tokenizer.encode, HTTPServer.startup

def hang(self, text, **options):
    if text.startswith("hang"):
        never.wait()
    return encode(self, text, **options)

async def start(self, sockets=None):
    await startup(self, sockets)
    if what == "pool":
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, never.wait)
    if what == "task":
        self.task = asyncio.create_task(ignore_cancelling())
    if what == "loop":
        asyncio.get_running_loop().call_later(0.1, never.wait)

async def ignore_cancelling():
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

Tokenizer.encode, HTTPServer.startup = hang, start
sys.exit(cli.main(arguments))
"""
"""A server in which something hangs: jobs of the thread pool, a task, the event loop, or the prompt `hang`."""


class Serving:
    """A `logitship serve` process."""

    def __init__(self, model: Path, *flags: str, program: Sequence[str] = (LOGITSHIP,)) -> None:
        command = [*program, "serve", "--model-path", str(model), "--port", "0"]
        self.process = subprocess.Popen(
            # The processor of these tests waits for a file.
            [*command, "--device", "cpu", "--enable-custom-logit-processor", "--processor-isolation", "none", *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        assert self._ready.wait(DEADLINE), "".join(self.log)
        found = re.search(r"http://[\d.]+:\d+", "".join(self.log))
        assert found, "".join(self.log)
        self.http = httpx.Client(base_url=found[0], timeout=DEADLINE)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "running on http" in line:
                self._ready.set()
        self._ready.set()

    def terminate(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal and wait until the server acts on it."""
        self.process.send_signal(number)
        deadline = time.monotonic() + DEADLINE
        while self.http.get("/health").status_code != 503:
            assert time.monotonic() < deadline

    def close(self) -> None:
        """Kill the process, if it still runs."""
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def serve(model_folder: Path) -> Iterator[Callable[..., Serving]]:
    """Starts servers; they are killed after the test."""
    started: list[Serving] = []

    def start(*flags: str, **options: Any) -> Serving:
        started.append(Serving(model_folder, *flags, **options))
        return started[-1]

    yield start
    for serving in started:
        serving.close()


def held_body(file: Path) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, "custom_params": {"file": str(file)}}
    return {"text": "hello", "sampling_params": sampling, "custom_logit_processor": HOLD, "stream": True}


def wait_for(file: Path) -> None:
    end = time.monotonic() + DEADLINE
    while not file.exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def data_of(answer: httpx.Response) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in answer.iter_lines() if line)


def test_first_signal_drains_and_refuses_new_requests(serve: Callable[..., Serving], tmp_path: Path) -> None:
    serving = serve()
    with serving.http.stream("POST", "/generate", json=held_body(tmp_path / "go")) as answer:
        events = data_of(answer)
        next(events)
        serving.terminate()
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            refused = serving.http.post(path, json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"] == "the server is shutting down"
            assert refused.headers["retry-after"]
        assert serving.process.poll() is None
        (tmp_path / "go").touch()
        *_, last, done = events
    assert done == "[DONE]"
    assert orjson.loads(last)["meta_info"]["finish_reason"] == {"type": "length", "length": 16}
    assert serving.process.wait(DEADLINE) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_streams_with_an_error(
    number: signal.Signals, serve: Callable[..., Serving], tmp_path: Path
) -> None:
    serving = serve("--shutdown-timeout", str(10 * DEADLINE))
    with serving.http.stream("POST", "/generate", json=held_body(tmp_path / "never")) as answer:
        events = data_of(answer)
        next(events)
        serving.terminate(number)
        serving.process.send_signal(number)
        *_, last, done = events
    # Far below the shutdown timeout, and although a step hangs.
    assert serving.process.wait(DEADLINE) == 0
    serving._reader.join()
    reason = orjson.loads(last)["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", 503)
    assert "the server was stopped" in reason["message"]
    assert done == "[DONE]"
    assert "Traceback" not in "".join(serving.log)


def test_hanging_processor_does_not_block_shutdown(serve: Callable[..., Serving], tmp_path: Path) -> None:
    serving = serve("--shutdown-timeout", "0.1")
    with serving.http.stream("POST", "/generate", json=held_body(tmp_path / "never")) as answer:
        next(data_of(answer))
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(DEADLINE) == 0


@pytest.mark.parametrize("what", ["pool", "task", "loop"])
def test_shutdown_ends_whatever_hangs(what: str, serve: Callable[..., Serving]) -> None:
    serving = serve("--shutdown-timeout", "0.1", program=[sys.executable, "-c", HANGING, what])
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(DEADLINE) == 1
    serving._reader.join()
    assert "the shutdown takes too long: ending the process" in serving.log[-1]


def test_shutdown_ends_requests_that_hang_before_the_engine(serve: Callable[..., Serving]) -> None:
    serving = serve("--shutdown-timeout", "0.1", program=[sys.executable, "-c", HANGING, "prompt"])
    body = orjson.dumps({"text": "hang" * SHORT_TEXT})  # too long for the event loop
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    address = (serving.http.base_url.host, serving.http.base_url.port or 0)
    with contextlib.ExitStack() as connections:
        for _ in range(64):  # more than the pools have threads
            connection = connections.enter_context(socket.create_connection(address))
            connection.sendall(head + body)
        assert serving.http.get("/health").status_code == 200
        serving.process.send_signal(signal.SIGTERM)
        serving.process.wait(DEADLINE)


def test_health_of_a_server_whose_step_hangs(serve: Callable[..., Serving], tmp_path: Path) -> None:
    serving = serve()
    assert serving.http.get("/health/ready").status_code == 200
    with serving.http.stream("POST", "/generate", json=held_body(tmp_path / "go")) as answer:
        events = data_of(answer)
        next(events)
        wait_for(tmp_path / "go.held")
        assert serving.http.get("/health").status_code == 200  # restarting it would end all streams
        unready = serving.http.get("/health/ready")
        assert unready.status_code == 503
        assert "the engine has not begun a step within 1 s" in unready.json()["error"]["message"]
        (tmp_path / "go").touch()
        *_, done = events
    assert done == "[DONE]"
    assert serving.http.get("/health/ready").status_code == 200


def test_port_in_use(serve: Callable[..., Serving], model_folder: Path) -> None:
    serving = serve()
    port = str(serving.http.base_url.port)
    command = [LOGITSHIP, "serve", "--model-path", str(model_folder), "--port", port]
    second = subprocess.run(
        [*command, "--device", "cpu"], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert second.returncode != 0
    assert f"--port {port}: already in use" in second.stderr
    assert "loading the model" not in second.stderr


@pytest.mark.parametrize("page", ["playground: ", ""])
def test_urls_of_the_page_and_of_the_api_are_logged(
    page: str, make_engine: Callable[..., AsyncEngine], caplog: pytest.LogCaptureFixture
) -> None:
    server = HTTPServer(make_engine(disable_playground=not page))
    sockets = open_sockets("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=[sockets])
    with caplog.at_level(logging.INFO):
        thread.start()
        try:
            assert server.ready.wait(DEADLINE)
            (line,) = [each for each in caplog.messages if each.startswith("running on ")]
            words = line.split("  ")
            urls = dict(word.split(": ", 1) for word in words[1:])
            assert urls.keys() == {"API", *page.split(": ")[:1]} - {""}
            assert httpx.get(f"{urls['API']}/models").json()["data"][0]["id"] == "tiny"
            if page:
                assert httpx.get(urls["playground"]).headers["content-type"].startswith("text/html")
        finally:
            server.request_exit()
            thread.join()


def test_port_is_taken_before_the_server_listens(make_engine: Callable[..., AsyncEngine]) -> None:
    """Both may bind the port, as long as neither listens."""
    (ours,) = open_sockets("127.0.0.1", 0)
    port = ours.getsockname()[1]
    (others,) = open_sockets("127.0.0.1", port)
    with ours, others:
        others.listen()
        with pytest.raises(StartError, match=f"^--port {port}: already in use"):
            HTTPServer(make_engine()).run([ours])


def test_signal_before_the_server_listens(make_engine: Callable[..., AsyncEngine]) -> None:
    server = HTTPServer(make_engine())
    startup = server.startup

    async def interrupted(sockets: list[socket.socket] | None = None) -> None:
        server.handle_exit(signal.SIGINT, None)
        await startup(sockets)

    with (opened := open_sockets("127.0.0.1", 0)[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "startup", interrupted)
        server.run([opened])
    assert server.should_exit


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({"processor_isolation": "none"}, True),
        ({"processor_isolation": "sandbox"}, False),
        ({"processor_isolation": "none", "enable_custom_logit_processor": False}, False),
    ],
)
def test_warning_without_isolation(
    settings: dict[str, Any],
    warns: bool,
    make_engine: Callable[..., AsyncEngine],
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = make_engine()
    engine.config = dataclasses.replace(engine.config, **settings)
    HTTPServer(engine)
    assert ("run inside this process" in caplog.text) == warns


def test_clients_close_idle_connections_before_the_server_does(make_engine: Callable[..., AsyncEngine]) -> None:
    """Otherwise the server might close while a request is in flight; clients do not retry a generation."""
    expiry = httpx.Limits().keepalive_expiry
    assert expiry is not None
    assert HTTPServer(make_engine()).config.timeout_keep_alive > expiry


def end(serving: Serving) -> list[str]:
    """Shut a server down gracefully. Returns its log lines."""
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(DEADLINE) == 0
    serving._reader.join()
    return serving.log


def test_a_request_is_logged_once(serve: Callable[..., Serving]) -> None:
    serving = serve()
    for _ in range(3):
        serving.http.get("/v1/models", headers={"X-Request-ID": "mine"})
    serving.http.get("/health")
    log = end(serving)
    lines = [line for line in log if "/v1/models" in line]
    assert len(lines) == 3
    assert all(re.search(r": GET /v1/models 200 \d+\.\d+.* \[mine\]\n$", line) for line in lines)
    assert not any("/health" in line for line in log)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ [\w.]+: ", line) for line in log)


def test_json_log_format(serve: Callable[..., Serving]) -> None:
    serving = serve("--log-format", "json", "--log-level", "debug")
    answer = serving.http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 2}})
    serving.http.get("/health")
    lines = [orjson.loads(line) for line in end(serving)]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    requests = [line for line in lines if "path" in line]
    assert [(line["path"], line["level"]) for line in requests] == [("/generate", "info"), ("/health", "debug")]
    assert requests[0]["request_id"] == answer.headers["x-request-id"] == answer.json()["meta_info"]["id"]
    assert any(line["logger"].startswith("uvicorn") for line in lines)
