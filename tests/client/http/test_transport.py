from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from logitship import AsyncClient, TransportError


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections open

    def do_GET(self) -> None:
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that are reset."""


@pytest.fixture
def address() -> Iterator[str]:
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


# A loop that is closed cannot close its connections anymore; asyncio warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(autouse=True)
def collect_garbage() -> Iterator[None]:
    yield
    gc.collect()  # while the warnings are ignored


def test_one_loop_after_the_other(address: str) -> None:
    client = AsyncClient(address, max_retries=0)
    for _ in range(3):
        assert asyncio.run(client.models()) == []
    asyncio.run(client.close())
    with pytest.raises(RuntimeError, match="client has been closed"):
        asyncio.run(client.models())


def test_connections_of_closed_loops_are_dropped(address: str) -> None:
    made: list[httpx.AsyncClient] = []
    client = AsyncClient(address, max_retries=0)
    for _ in range(3):
        asyncio.run(client.models())
        made.append(next(iter(client._clients._clients.values())))
        assert len(client._clients._clients) == 1
    assert len(set(map(id, made))) == 3
    asyncio.run(client.close())


def test_a_loop_keeps_its_connection(address: str) -> None:
    async def run() -> None:
        async with AsyncClient(address) as client:
            await client.models()
            first = client._clients.get()
            await client.models()
            assert client._clients.get() is first
            assert len(first._transport._pool.connections) == 1  # type: ignore[attr-defined]

    asyncio.run(run())


def test_loops_at_the_same_time(address: str) -> None:
    client = AsyncClient(address, max_retries=0)
    meet = threading.Barrier(3)
    answers: list[object] = []

    async def use() -> None:
        for _ in range(3):
            await asyncio.to_thread(meet.wait, 60)
            answers.append(await client.models())

    threads = [threading.Thread(target=asyncio.run, args=(use(),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[]] * 9
    asyncio.run(client.close())


def test_a_given_transport_belongs_to_its_first_loop(address: str) -> None:
    client = AsyncClient(address, max_retries=0, transport=httpx.AsyncHTTPTransport())
    asyncio.run(client.models())
    with pytest.raises(TransportError, match="belongs to an event loop that is closed: give each loop an AsyncClient"):
        asyncio.run(client.models())
