"""Run the coroutines of tests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], timeout: float = 120) -> T:
    """Run a coroutine in a new event loop. Fail if it takes longer than `timeout` seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout):
            return await coroutine

    return asyncio.run(bounded())


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    while not condition():
        await asyncio.sleep(0.001)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True
