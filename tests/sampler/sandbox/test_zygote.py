from __future__ import annotations

import os
import socket

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
