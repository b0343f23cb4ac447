from __future__ import annotations

import asyncio
import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from logitship.builtin_processors.registry import Registry
from logitship.client.serialization.processor_string import InstalledProcessor, SourceProcessor
from logitship.sampler.processors.executor import ExecutorUnavailable
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess
from logitship.server.requests.messages import ProcessorRequest
from logitship.server.runtime import plugin_setup
from logitship.server.runtime.audit_log import AuditLog
from logitship.server.runtime.plugin_processors import PluginProcessors
from logitship.server.runtime.plugin_setup import for_admission, for_execution
from logitship.server.sglang.sglang_settings import SglangSettings
from logitship.server.vllm.settings import VllmSettings
from tests.helpers.clock import Clock
from tests.server.processors.paused_executor import PausedExecutor


@pytest.mark.parametrize("make", [for_admission, partial(for_execution, max_rows=1)])
def test_unreadable_tree_starts_no_processes(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(plugin_setup, "shipped_executor", lambda *args: started.append(args))
    settings = VllmSettings(tree={"a": str(tmp_path / "missing.json")})
    with pytest.raises(ValueError, match=r"TREE: .* cannot be read"):
        make(settings, ModelView(10, frozenset({0}), None), logger=logging.getLogger())
    assert not started


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("start", BlockingIOError(11, "Resource temporarily unavailable")),
        ("executor", ZygoteError("no namespaces")),
        ("executor", RuntimeError("can't start new thread")),
    ],
)
def test_executor_that_cannot_start_leaves_no_process(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end of an engine tries again with the next request."""
    closed: list[bool] = []

    def fails(*_: object) -> Any:
        raise error

    monkeypatch.setattr(ZygoteProcess, "start", fails if name == "start" else lambda zygote: None)
    monkeypatch.setattr(ZygoteProcess, "close", lambda zygote: closed.append(True))
    monkeypatch.setattr(plugin_setup, "sandbox_executor", fails)
    settings = SglangSettings()
    with pytest.raises(ValueError, match="shipped processors cannot run in sandboxes: .*" + re.escape(str(error))):
        plugin_setup.shipped_executor(
            settings, ModelView(10, frozenset({0}), None), 1, logging.getLogger(), in_background=False
        )
    assert closed


class Scene:
    """The processors of an engine, whose loads end when the test says so."""

    def __init__(self) -> None:
        self.executor = PausedExecutor()
        self.clock = Clock()
        settings, model = SglangSettings(), ModelView(10, frozenset({0}), None)
        self.processors = PluginProcessors(
            settings, model, Registry(()), self.executor, max_entries=10, params_checker=None, clock=self.clock
        )

    def is_loading(self, *names: str, tenant: str = "a") -> bool:
        return self.processors.is_loading(shipped(*names), tenant)

    def num_in_use(self) -> int:
        """Unload all processors that are not in use, and return the number of the others."""
        self.processors._loader.clear()
        return self.processors._loader.cache_stats().entries

    async def until_loaded(self, *names: str) -> None:
        """End the loads, and wait until no request with these processors would wait."""
        for name in names:
            self.executor.end("a", name)
        while self.is_loading(*names):
            await asyncio.sleep(0.001)


def shipped(*names: str) -> list[ProcessorRequest]:
    return [ProcessorRequest(SourceProcessor("#", name)) for name in names]


async def test_processors_are_loaded_in_the_background() -> None:
    scene = Scene()
    assert scene.is_loading("A", "B")
    await scene.executor.until_began(("a", "A"), ("a", "B"))
    assert scene.is_loading("A")
    await scene.until_loaded("A", "B")
    uses = scene.processors.load(shipped("A", "B"), "x", "a")
    assert [use.processor.tenant for use in uses] == ["a", "a"]
    scene.processors.release(uses)
    assert not scene.is_loading("A", "B")  # still loaded
    assert scene.num_in_use() == 0
    assert len(scene.executor.began) == 2


async def test_error_of_a_load_in_the_background_is_raised_when_it_is_taken() -> None:
    scene = Scene()
    assert scene.is_loading("A")
    scene.executor.end("a", "A", ExecutorUnavailable("no process can be started"))
    await scene.until_loaded()
    while scene.is_loading("A"):
        await asyncio.sleep(0.001)
    with pytest.raises(ValueError, match="no process can be started"):
        scene.processors.load(shipped("A"), "x", "a")
    assert scene.is_loading("A")  # tried again
    await scene.until_loaded("A")


async def test_loads_that_nobody_takes_hold_no_place() -> None:
    """Their requests may have been aborted."""
    scene = Scene()
    scene.is_loading("A")
    await scene.until_loaded("A")
    assert scene.num_in_use() == 0
    scene.is_loading("B", "C")
    await scene.executor.until_began(("a", "A"), ("a", "B"), ("a", "C"))
    scene.executor.end("a", "B")
    scene.executor.end("a", "C", ExecutorUnavailable("no process can be started"))
    while scene.processors.has_begun(scene.processors.group_names(shipped("B", "C"), "a")):
        await asyncio.sleep(0.001)
    assert scene.num_in_use() == 0
    scene.clock.now += 11.0
    scene.is_loading()
    assert not scene.processors._begun


async def test_what_is_refused_at_once_is_not_loaded() -> None:
    scene = Scene()
    assert not scene.processors.is_loading([ProcessorRequest(InstalledProcessor("nothing"))])
    with pytest.raises(ValueError, match="no processor is installed or registered as 'nothing'"):
        scene.processors.load([ProcessorRequest(InstalledProcessor("nothing"))], "x")


async def test_check_loads_without_blocking_and_keeps_nothing() -> None:
    scene = Scene()
    checks = [asyncio.create_task(scene.processors.check(shipped("A", "B"), tenant)) for tenant in "ab"]
    await scene.executor.until_began(("a", "A"), ("b", "A"))
    for tenant in "ab":
        scene.executor.end(tenant, "A")
        scene.executor.end(tenant, "B")
    await asyncio.gather(*checks)
    assert scene.num_in_use() == 0
    assert scene.processors.in_use == 0


async def test_check_that_is_cancelled_cancels_its_load() -> None:
    scene = Scene()
    check = asyncio.create_task(scene.processors.check(shipped("A"), "a"))
    await scene.executor.until_began(("a", "A"))
    check.cancel()
    with pytest.raises(asyncio.CancelledError):
        await check
    assert scene.executor.cancelled == [("a", "A")]


def test_audit_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"audit\.jsonl cannot be written: No such file or directory"):
        AuditLog(str(tmp_path / "missing" / "audit.jsonl"))
