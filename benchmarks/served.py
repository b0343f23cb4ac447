"""Real servers as child processes, and a client that needs almost no CPU time."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, TypeAlias

START_TIMEOUT = 600.0
"""Seconds until the servers answer: each loads a model."""
STOP_TIMEOUT = 60.0
ANSWER_TIMEOUT = 300.0

COMMAND = (sys.executable, "-c", "import sys; from logitship.server.cli import main; sys.exit(main())", "serve")
_DONE = b"data: [DONE]\n\n"


class Client:
    """Client of a server on a port of this machine."""

    def __init__(self, port: int) -> None:
        self._address = ("127.0.0.1", port)
        self.url = f"http://127.0.0.1:{port}"

    def metrics(self) -> dict[str, float]:
        """Return the values of `/metrics` by name and labels."""
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def get(self, path: str) -> str:
        """Return the body of the response."""
        with socket.create_connection(self._address, ANSWER_TIMEOUT) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"GET {path}: {head.decode()}")
        return body.decode()

    def stream(self, path: str, bodies: Sequence[Mapping[str, Any]], at_a_time: int | None = None) -> list[list[float]]:
        """Send requests at the same time, and note when their events arrive.

        Events are counted and not read: the server should have the cores for itself.

        Args:
            path: of the route.
            bodies: one per request.
            at_a_time: number of concurrent requests; None: all.

        Returns:
            Of each request, on the clock of `time.perf_counter`: when it was sent, then the arrival of each event but
            `[DONE]`, which is the last.

        Raises:
            RuntimeError: a request was refused, or ended with an error.
        """
        messages = [_post(path, {**body, "stream": True}) for body in bodies]
        streams: list[_Stream] = []
        with selectors.DefaultSelector() as selector:

            def send_next() -> None:
                stream = _Stream(socket.create_connection(self._address))
                selector.register(stream.connection, selectors.EVENT_READ, stream)
                stream.send(messages[len(streams)])
                streams.append(stream)

            for _ in messages[:at_a_time]:
                send_next()
            while selector.get_map():
                ready = selector.select(ANSWER_TIMEOUT)
                if not ready:
                    raise RuntimeError("the server gives no answer")
                for key, _ in ready:
                    if not key.data.read():
                        selector.unregister(key.fileobj)
                        key.data.connection.close()
                        if len(streams) < len(messages):
                            send_next()
        return [stream.arrivals() for stream in streams]


class Server(Client):
    """Server in its own processes, which may not answer yet.

    Args:
        command: starts it, but for `--port`.
        environment: variables in addition to this process's.
        log: receives its output.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            port = listening.getsockname()[1]
        super().__init__(port)
        self._log = log
        self._process = subprocess.Popen(
            [*command, "--port", str(port)],
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group with all its processes
        )

    def wait(self) -> None:
        """Wait until it answers.

        Raises:
            RuntimeError: it does not.
        """
        until = time.monotonic() + START_TIMEOUT
        while self._process.poll() is None and time.monotonic() < until:
            try:
                self.get("/health")
                return
            except ConnectionError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        """Return its output so far."""
        return Path(self._log.name).read_text(errors="replace")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Stop its processes for the duration of the block, including its background work."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGCONT)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Continue its processes, which are paused, for the duration of the block."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    def stop(self) -> None:
        """Terminate it and all of its processes."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def resident_bytes(self) -> int:
        """Return the resident memory of its process."""
        return int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Stream:
    """Streaming response."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._times: list[float] = []
        self._last = b""
        """The end of what was read."""

    def send(self, message: bytes) -> None:
        self._times.append(time.perf_counter())
        self.connection.sendall(message)

    def read(self) -> bool:
        """Read what has arrived; return False at the end."""
        data = self.connection.recv(1 << 16)
        # An event ends with an empty line, which its JSON cannot have. Two reads may have a half of it each.
        ended = data.count(b"\n\n") + (self._last.endswith(b"\n") and data.startswith(b"\n"))
        self._times += [time.perf_counter()] * ended
        self._last = self._last[-(1 << 16) :] + data
        return bool(data)

    def arrivals(self) -> list[float]:
        before, done, _ = self._last.rpartition(_DONE)
        if not done or b'{"error":' in before:
            raise RuntimeError(f"a request failed: {self._last.decode(errors='replace')}")
        return self._times[:-1]


def _post(path: str, body: Mapping[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


ServerCommand: TypeAlias = tuple[Sequence[str], Mapping[str, str]]
"""A command and its environment."""


@contextlib.contextmanager
def listening(*commands: ServerCommand) -> Iterator[list[Server]]:
    """Run servers, one for each command, until the end of the block.

    Raises:
        RuntimeError: one does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for number, (command, environment) in enumerate(commands):
            log = stack.enter_context((folder / f"{number}.log").open("wb"))
            servers.append(Server(command, environment, log))
            stack.callback(servers[-1].stop)
        for server in servers:
            server.wait()
        yield servers


def served(*flags: Sequence[str]) -> contextlib.AbstractContextManager[list[Server]]:
    """Run a `logitship serve` for each list of flags; see `listening`."""
    return listening(*(((*COMMAND, *of_one), {}) for of_one in flags))


def gaps_while_all_run(arrivals: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the seconds between the tokens of each stream, while all streams are running.

    Args:
        arrivals: as `Server.stream` returns them.
    """
    since = max(times[1] for times in arrivals)
    until = min(times[-1] for times in arrivals)
    return [
        [later - token for token, later in pairwise(times[1:]) if since <= token and later <= until]
        for times in arrivals
    ]
