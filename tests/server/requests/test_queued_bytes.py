from __future__ import annotations

import pytest

from logitship.server.refusals import QueueFull
from logitship.server.requests.queued_bytes import QueuedBytes


def test_bytes_are_counted_until_the_last_holder_releases_them() -> None:
    queued = QueuedBytes(100, 100)
    body = queued.open("a")
    body.add(30)
    body.add(20)
    assert (queued.total, body.size) == (50, 50)
    body.hold()
    body.release()
    assert queued.total == 50
    body.release()
    assert queued.total == 0


def test_bound_on_all_bodies() -> None:
    queued = QueuedBytes(100, 60)
    first, second = queued.open("a"), queued.open("b")
    first.add(60)
    second.add(40)
    with pytest.raises(QueueFull, match=r"take 101 bytes.*at most 100 .*--max-queued-bytes"):
        second.add(1)
    first.release()
    second.add(1)
    assert queued.total == 41


def test_bound_per_tenant() -> None:
    queued = QueuedBytes(100, 60)
    first, second = queued.open("a"), queued.open("a")
    first.add(50)
    with pytest.raises(QueueFull, match=r"take 61 bytes.*at most 60 of a client"):
        second.add(11)
    queued.open("b").add(11)
    second.add(10)
    assert queued.total == 71


def test_refused_bytes_are_not_counted() -> None:
    queued = QueuedBytes(100, 100)
    body = queued.open("a")
    with pytest.raises(QueueFull):
        body.add(101)
    assert body.size == queued.total == 0
    body.release()
    assert queued.total == 0
