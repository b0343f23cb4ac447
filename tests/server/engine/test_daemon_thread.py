from __future__ import annotations

import asyncio
import threading

import pytest

from logitship.server.engine.daemon_thread import in_daemon_thread


def test_result_and_error() -> None:
    async def both() -> None:
        assert await in_daemon_thread(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await in_daemon_thread(divmod, 7, 0)

    asyncio.run(both())


def test_hanging_calls_block_nothing() -> None:
    """There are more of them than threads in the shared pool; other calls and the end of the program do not wait."""
    never = threading.Event()

    async def hang() -> int:
        hanging = [in_daemon_thread(never.wait) for _ in range(64)]
        result = await asyncio.to_thread(lambda: 42)
        assert not any(future.done() for future in hanging)
        return result

    assert asyncio.run(hang()) == 42
    threads = [thread for thread in threading.enumerate() if thread.name == "logitship-load"]
    assert all(thread.daemon for thread in threads)
    never.set()
    for thread in threads:
        thread.join()


def test_cancelled_future() -> None:
    done = threading.Event()

    async def cancel() -> None:
        future = in_daemon_thread(done.wait)
        future.cancel()
        done.set()
        await asyncio.to_thread(lambda: [t.join() for t in threading.enumerate() if t.name == "logitship-load"])
        assert future.cancelled()

    asyncio.run(cancel())
