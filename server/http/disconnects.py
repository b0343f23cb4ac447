"""Cancels what is done for a client when it disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect
from starlette.types import Receive


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Cancel the block when the client disconnects, wherever it waits.

    Args:
        receive: the ASGI function, after the whole body was received.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():  # else cancelled from outside as well
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
