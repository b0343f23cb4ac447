"""HTTP helpers of the sync and the async client: base URL, headers, and translation of httpx's errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import httpx

from logitship.client.errors import TransportError

from .http_requests import HttpRequest

DEFAULT_BASE_URL = "http://127.0.0.1:30000"
DEFAULT_TIMEOUT = httpx.Timeout(600.0, connect=10.0)
"""A long generation without streaming sends nothing for minutes."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


def check_base_url(base_url: str) -> str:
    """Check and return `base_url`.

    Raises:
        ValueError: it is not an http or https address.
    """
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"base_url: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url: expected an address such as {DEFAULT_BASE_URL!r}, not {base_url!r}")
    return base_url


def client_headers(api_key: str | None, headers: Mapping[str, str] | None) -> httpx.Headers:
    """Return the headers of every request. Those of the caller replace the client's, whatever their case."""
    # httpx would encode text as ASCII. Surrogates stand for bytes of an environment variable that are not UTF-8.
    key = None if api_key is None else f"Bearer {api_key}".encode(errors="surrogateescape")
    merged = httpx.Headers({} if key is None else {b"authorization": key})
    merged.update(headers)
    return merged


def http_request(http: httpx.Client | httpx.AsyncClient, request: HttpRequest) -> httpx.Request:
    """Convert `request` to an httpx request."""
    headers = {"accept": "text/event-stream" if request.stream else "application/json"}
    if request.content_type is not None:
        headers["content-type"] = request.content_type
    return http.build_request(request.method, request.path, headers=headers, content=request.content)


class ClientPerLoop:
    """An httpx client for each event loop that uses it: connections belong to the loop in which they were opened.

    Thread-safe. The clients of loops that are closed are dropped.

    Args:
        make: creates a client.
        is_shared: all loops use one client, because it has the caller's transport.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient], *, is_shared: bool) -> None:
        self._make = make
        self._is_shared = is_shared
        self._lock = threading.Lock()
        self._clients: dict[asyncio.AbstractEventLoop | None, httpx.AsyncClient] = {}
        self._is_closed = False

    def get(self) -> httpx.AsyncClient:
        """Return the client of the running loop.

        Raises:
            RuntimeError: after `close`.
        """
        loop = None if self._is_shared else _running_loop()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("Cannot send a request, as the client has been closed.")  # as httpx says it
            if loop not in self._clients:
                self._clients = {other: http for other, http in self._clients.items() if not _is_closed(other)}
                self._clients[loop] = self._make()
            return self._clients[loop]

    async def close(self) -> None:
        """Close the connections of the running loop. Those of others can only be closed there, or are gone with it."""
        loop = None if self._is_shared else _running_loop()
        with self._lock:
            self._is_closed = True
            http = self._clients.get(loop)
            self._clients.clear()
        if http is not None:
            await http.aclose()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running loop; None under another library's, such as trio's."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_closed(loop: asyncio.AbstractEventLoop | None) -> bool:
    return loop is not None and loop.is_closed()


@contextmanager
def transport_errors(http: httpx.Client | httpx.AsyncClient) -> Iterator[None]:
    """Translate httpx's errors; the only place that does.

    Raises:
        TransportError: for every `httpx.HTTPError`, which is its cause; and for a connection of a closed event loop.
    """
    try:
        yield
    except httpx.TimeoutException as error:
        raise TransportError(f"{http.base_url} did not answer in time ({type(error).__name__})") from error
    except httpx.ConnectError as error:
        raise TransportError(f"cannot connect to {http.base_url}: {error}. Is the server running?") from error
    except httpx.HTTPError as error:
        raise TransportError(f"the connection to {http.base_url} failed: {error or type(error).__name__}") from error
    except RuntimeError as error:
        if str(error) != "Event loop is closed":
            raise
        raise TransportError(
            f"a connection to {http.base_url} belongs to an event loop that is closed: give each loop an AsyncClient"
            " with a transport of its own"
        ) from error


def was_sent(error: TransportError) -> bool:
    """Return whether the server may have received part of the request that failed with `error`."""
    return not isinstance(error.__cause__, _NOT_SENT)
