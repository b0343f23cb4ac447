"""The HTTP server: uvicorn with a graceful shutdown that lets running requests finish."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import uvicorn

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.http.app import create_app
from logitship.server.http.receiving import head_timeout_protocol

from .config import ServerConfig
from .listening import base_url, port_in_use
from .shutdown_watchdog import ShutdownWatchdog

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT = 3
"""Seconds that clients get to read the end of their responses, after the engine has stopped."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open. Longer than the timeouts of clients and proxies (httpx 5 seconds,
others a minute): if the server closed first, a client might be sending a request at that moment."""


class HTTPServer(uvicorn.Server):
    """Uvicorn server with a two-phase shutdown.

    The first signal stops admission: running requests continue for at most `shutdown_timeout` seconds, new requests get
    503. Then the sockets close. A second signal ends the requests with an error. A third one does not wait until their
    clients have read it.

    Args:
        engine: the engine to serve.
        watchdog: ends the process if the shutdown hangs; None: nothing does, for a server inside another program.
    """

    def __init__(self, engine: AsyncEngine, watchdog: ShutdownWatchdog | None = None) -> None:
        config = engine.config
        app = create_app(engine)
        # Computed now: each takes some tenths of a second, in which the event loop would be blocked later.
        app.openapi()
        _ = engine.tokenizer.longest_token
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                http=head_timeout_protocol(config.request_body_timeout),
                log_level=config.log_level,
                log_config=None,  # use the root logger's handlers
                access_log=False,  # `RequestLogMiddleware` writes one
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=_CLOSE_TIMEOUT,
                lifespan="off",
            )
        )
        if config.enable_custom_logit_processor and config.processor_isolation == "none":
            logger.warning(
                "shipped processors run inside this process, with all its privileges (--processor-isolation none): "
                "only serve clients whose code you would run yourself"
            )
        self._engine = engine
        self._watchdog = watchdog
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.ready = threading.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while the server runs: also before `startup`, and while it ends."""
        self._loop = asyncio.get_running_loop()
        if self._watchdog is not None:
            self._watchdog.watch_signals()
        try:
            with super().capture_signals():
                yield
        finally:
            if self._watchdog is not None:
                self._watchdog.server_ended()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets.

        Raises:
            StartError: another process began to listen on the port meanwhile.
        """
        try:
            await super().startup(sockets)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and sockets is not None:
                raise port_in_use(sockets[0].getsockname()[1]) from error
            raise
        if sockets is not None:
            self._log_started_message(sockets)
        self.ready.set()

    def _log_started_message(self, listeners: Sequence[socket.SocketType]) -> None:
        """Log the URLs. Overrides uvicorn's message, which names the sockets."""
        url = base_url(self._engine.config.host, listeners[0].getsockname()[1])
        page = "" if self._engine.config.disable_playground else f"  playground: {url}/"
        logger.info("running on %s%s  API: %s/v1", url, page, url)

    @property
    def bound_port(self) -> int:
        """Port that is listened on; differs from the configured port if that is 0."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGINT or SIGTERM."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Start the shutdown; a second call ends the running requests. Must run on the event loop."""
        if self.should_exit:
            self.force_exit = True
            return
        if self._draining is not None:
            self._draining.cancel()
            logger.info("shutting down now: ending running requests with an error")
            self._engine.interrupt()
            self.should_exit = True
            return
        logger.info("shutting down: finishing running requests, refusing new ones")
        self._draining = asyncio.create_task(self._drain())

    def request_exit(self) -> None:
        """Call `drain` from any thread."""
        self.handle_exit(signal.SIGTERM, None)

    async def _drain(self) -> None:
        try:
            await self._engine.shutdown(self._engine.config.shutdown_timeout)
        finally:
            self.should_exit = True


@contextmanager
def running_server(config: ServerConfig, engine: AsyncEngine | None = None) -> Iterator[str]:
    """Run a server in a thread of this process.

    Args:
        config: port 0 picks a free port.
        engine: an engine to serve instead of one built from `config`. It stops with the server.

    Yields:
        The base URL.
    """
    engine = engine or build_engine(config)
    server = HTTPServer(engine)
    thread = threading.Thread(target=server.run, name="logitship-http", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        engine.stop()
        raise
    while not server.ready.wait(0.1):
        if not thread.is_alive():
            engine.stop()
            raise RuntimeError(f"the server did not start on {config.host}:{config.port}")
    try:
        yield base_url(config.host, server.bound_port)
    finally:
        server.request_exit()
        thread.join()
