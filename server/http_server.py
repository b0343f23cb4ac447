"""Runs the HTTP front with uvicorn: start, serve, and an end that finishes what runs."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.engine.build import build_engine
from logitship.server.http.app import create_app

from .config import ServerConfig

logger = logging.getLogger(__name__)

KEEP_ALIVE = 75
"""Seconds that a connection without a request stays open. Longer than clients and proxies keep theirs (httpx for 5
seconds, others for a minute): whoever closes first does so while the other may be sending a request."""


class HTTPServer(uvicorn.Server):
    """Uvicorn, with an end in two parts.

    The first signal stops admission: what runs goes on, for at most `shutdown_timeout` seconds, and what comes is
    answered with 503. Then the sockets close. A second signal closes them at once.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        config = engine.config
        super().__init__(
            uvicorn.Config(
                create_app(engine),
                host=config.host,
                port=config.port,
                log_level=config.log_level,
                log_config=None,  # its messages go where all others go
                access_log=False,  # `RequestLogMiddleware` writes it
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=5,
                lifespan="off",
            )
        )
        if config.enable_custom_logit_processor and config.processor_isolation == "none":
            logger.warning(
                "shipped processors run inside this process, with all its rights (--processor-isolation none): "
                "serve only people whose code you would run yourself"
            )
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.ready = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the sockets."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.ready.set()

    @property
    def bound_port(self) -> int:
        """The port that was bound: another than the configured one if that is 0."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on SIGINT and SIGTERM."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Begin to end; a second call ends at once. On the event loop only."""
        if self._draining is not None:
            self._draining.cancel()
            self.force_exit = self.should_exit = True
            return
        logger.info("shutting down: finishing what runs, refusing what comes")
        self._draining = asyncio.create_task(self._drain())

    def request_exit(self) -> None:
        """`drain`, from any thread."""
        self.handle_exit(0, None)

    async def _drain(self) -> None:
        try:
            await self._engine.shutdown(self._engine.config.shutdown_timeout)
        finally:
            self.should_exit = True


@contextmanager
def running_server(config: ServerConfig, engine: AsyncEngine | None = None) -> Iterator[str]:
    """Serve in a thread of this process.

    Args:
        config: with port 0, a free port is taken.
        engine: an engine that is built already, instead of one built from `config`. It ends with the server.

    Yields:
        The base URL.
    """
    engine = engine or build_engine(config)
    server = HTTPServer(engine)
    thread = threading.Thread(target=server.run, name="logitship-http", daemon=True)
    thread.start()
    while not server.ready.wait(0.1):
        if not thread.is_alive():
            engine.stop()
            raise RuntimeError(f"the server did not start on {config.host}:{config.port}")
    try:
        yield f"http://{config.host}:{server.bound_port}"
    finally:
        server.request_exit()
        thread.join()
