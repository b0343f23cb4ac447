from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sandbox.protocol import Channel, ControlMessage
from logitship.sampler.sandbox.zygote import SandboxSetup, Zygote


def test_failed_fork_is_reported_and_leaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote must keep running, because the other sandboxes depend on it."""

    def no_process() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    server, own = (Channel(end) for end in socket.socketpair())
    setup = SandboxSetup({}, ModelView(8, frozenset(), None), max_rows=2, memory_limit=1 << 20)
    before = set(os.listdir("/proc/self/fd"))
    Zygote(own, setup, ())._fork(5, os.dup(0), os.dup(0))
    assert set(os.listdir("/proc/self/fd")) == before
    assert server.receive() == (ControlMessage.NOT_FORKED, (5, "[Errno 11] Resource temporarily unavailable"), [])
    server.close()
    own.close()


def test_sandbox_without_a_descriptor_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote must keep running, as after a failed fork. The sandbox, which nobody could kill, must not."""
    real = os.pidfd_open
    forked: list[int] = []

    def no_descriptor(pid: int) -> int:
        forked.append(real(pid))
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", no_descriptor)
    monkeypatch.setattr(Zygote, "_become_sandbox", lambda *_: time.sleep(60))
    server, own = (Channel(end) for end in socket.socketpair())
    setup = SandboxSetup({}, ModelView(8, frozenset(), None), max_rows=2, memory_limit=1 << 20)
    before = set(os.listdir("/proc/self/fd"))
    Zygote(own, setup, ())._fork(5, os.dup(0), os.dup(0))
    ended = os.waitid(os.P_PIDFD, forked[0], os.WEXITED)
    assert ended is not None
    assert ended.si_status == signal.SIGKILL
    os.close(forked[0])
    assert set(os.listdir("/proc/self/fd")) == before
    assert server.receive() == (ControlMessage.NOT_FORKED, (5, "[Errno 24] Too many open files"), [])
    server.close()
    own.close()
