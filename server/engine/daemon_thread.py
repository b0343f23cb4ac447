"""Runs calls that may never return, outside of the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call `function` in a daemon thread of its own.

    Loading a processor runs its author's code, which may take long or never return. `asyncio.to_thread` would occupy a
    thread of the shared pool with it, and Python would wait for that thread at exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args, **kwargs)
        # It is raised where the future is awaited.
        except BaseException as raised:  # noqa: BLE001  # boundary: event loop
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="logitship-load", daemon=True).start()
    return future
