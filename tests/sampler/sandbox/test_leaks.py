"""Nothing is left of sandboxes whose zygote or launcher was killed, without help from the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import SourceProcessor
from logitship.sampler.processors.executor import ExecutorUnavailable, LoadedProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox import zygote_process
from logitship.sampler.sandbox.sandbox_executor import SandboxExecutor, SandboxLimits
from logitship.sampler.sandbox.zygote_process import ZygoteError, ZygoteProcess

NAMES = "logitship.builtin_processors.sglang_names:SGLANG_NAMES"
LIMITS = SandboxLimits(cpu_time=20.0, step_timeout=20.0, first_step_timeout=20.0, load_timeout=20.0)
LONG = 60.0
SOURCE = """
from logitship import CustomLogitProcessor

class P(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list=None):
        return logits
"""


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def descriptors() -> list[str]:
    """Return the kinds of open descriptors."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}").split(":[")[0])
    return sorted(found)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:logitship")


class Machine:
    """An executor, and its processes, which can be killed while a sandbox is being forked."""

    def __init__(self) -> None:
        self.zygote: Any = ZygoteProcess(names=NAMES, max_rows=2, memory_limit=64 << 20)
        self.zygote.start()
        self.zygote.set_up(ModelView(8, frozenset({1}), None))
        self.executor = SandboxExecutor(self.zygote, LIMITS, 2, 8)

    def load(self) -> LoadedProcessor:
        return self.executor.load(SourceProcessor(SOURCE, "P"))

    def kill_while_forking(self, *, launcher: bool) -> list[Exception]:
        """Kill the zygote, and perhaps the launcher, while a sandbox is being forked. Return the errors of the load."""
        errors: list[Exception] = []

        def load() -> None:
            try:
                self.executor.unload(self.load())
            except (ProcessorLoadError, ExecutorUnavailable) as error:
                errors.append(error.with_traceback(None))

        running = self.zygote._zygote
        signal.pidfd_send_signal(running.pidfd, signal.SIGSTOP)
        thread = threading.Thread(target=load)
        thread.start()
        while not running.forks:
            assert thread.is_alive()
        if launcher:
            self.zygote._launcher.kill()
        signal.pidfd_send_signal(running.pidfd, signal.SIGKILL)
        thread.join(LONG)
        assert not thread.is_alive()
        return errors

    def settle(self) -> None:
        """Wait until the threads of dead zygotes have ended."""
        for reader in self.zygote._readers[1:]:
            reader.join(LONG)


@pytest.fixture
def machine() -> Iterator[Machine]:
    machine = Machine()
    yield machine
    machine.executor.close()


@pytest.mark.thorough
def test_killed_processes_leave_nothing(machine: Machine, no_collector: None) -> None:
    machine.executor.unload(machine.load())
    before = descriptors(), mappings()
    for launcher in (False, False, True, False, True):
        kept = machine.load()
        assert machine.kill_while_forking(launcher=launcher) == []
        assert not machine.executor.is_ready(kept)
        machine.executor.unload(kept)
        machine.settle()
    assert (descriptors(), mappings()) == before


def test_failed_starts_leave_nothing(machine: Machine, no_collector: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first zygote dies while it forks, and there is no other."""
    machine.executor.unload(machine.load())
    before = descriptors(), mappings()
    live_zygote = zygote_process.ZygoteProcess._live_zygote

    def once(self: Any) -> Any:
        if self._zygote.alive:
            return live_zygote(self)
        raise ZygoteError("there is no other")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(zygote_process.ZygoteProcess, "_live_zygote", once)
            (error,) = machine.kill_while_forking(launcher=False)
        assert isinstance(error, ExecutorUnavailable)
        assert str(error) == "no sandbox can be started: there is no other"
        del error
        machine.executor.unload(machine.load())
        machine.settle()
    assert (descriptors(), mappings()) == before


def test_dead_sandbox_of_a_loaded_processor_leaves_nothing(machine: Machine, no_collector: None) -> None:
    machine.executor.unload(machine.load())
    before = descriptors(), mappings()
    kept = machine.load()
    kept.instance.current_sandbox.kill("crash", "was killed by the test")
    until = time.monotonic() + LONG
    while (descriptors(), mappings()) != before:
        assert time.monotonic() < until
        time.sleep(0.01)
    machine.executor.ensure(kept)
    assert machine.executor.is_ready(kept)
