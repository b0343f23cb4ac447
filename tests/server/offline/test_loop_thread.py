from __future__ import annotations

import asyncio
import threading

import pytest

from logitship.server.offline.loop_thread import LoopThread


def test_stop_reports_error_to_future_only(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    started = threading.Event()

    async def fails_when_it_is_cancelled() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("the server is shutting down") from None

    loop = LoopThread()
    future = loop.submit(fails_when_it_is_cancelled())
    started.wait()
    loop.stop()
    with pytest.raises(RuntimeError, match="shutting down"):
        future.result(timeout=10)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
