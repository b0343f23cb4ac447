from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logitship.server.refusals import QueueFull
from logitship.server.requests import body_limits
from logitship.server.requests.body_limits import MAX_DEPTH, JSONScan, QueuedBytes, scan_json
from tests.helpers.random_cases import examples

MANY = 10**9

values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text('ab"\\[]{},:é\n', max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\{,', max_size=4), inner, max_size=4),
    max_leaves=30,
)


def elements_of(value: Any) -> int:
    """Sum of the weights in a value, on top of the 1 that it has itself."""
    if isinstance(value, list):
        return 4 + max(0, len(value) - 1) + sum(map(elements_of, value))
    if isinstance(value, dict):
        return 4 + max(0, len(value) - 1) + 4 * len(value) + sum(map(elements_of, value.values()))
    return 1 if isinstance(value, str) else 0


def depth_of(value: Any) -> int:
    inner = value if isinstance(value, list) else value.values() if isinstance(value, dict) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(value=values, block=st.integers(1, 20), ascii_only=st.booleans())
@examples(300)
def test_counts_match_the_decoded_value(value: Any, block: int, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    scan = JSONScan()
    for start in range(0, len(text), block):
        scan.add(text[start : start + block])
    assert scan.elements == 1 + elements_of(value)
    assert scan.max_depth == depth_of(value)
    assert scan.depth == 0


@pytest.mark.parametrize(
    ("text", "elements"),
    [
        (rb"", 1),
        (rb"5", 1),
        (rb'"a,b,[{"', 2),
        (rb'"\",\",["', 2),
        (rb'"\\",[', 7),
        (rb'["\\\"", ","]', 8),
        (rb'{"a": [1, 2]}', 14),
        ('"é,\u2028,"'.encode(), 2),
    ],
)
def test_only_strings_and_what_is_outside_them_count(text: bytes, elements: int) -> None:
    assert scan_json(text, MANY).elements == elements


def test_depth() -> None:
    assert scan_json(b"[" * 300 + b"]" * 300, MANY).max_depth == 300
    assert scan_json(b'{"a":' * 300, MANY).max_depth == 300


def test_scan_stops_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = []

    class Counting(JSONScan):
        def add(self, block: bytes) -> None:
            blocks.append(block)
            super().add(block)

    monkeypatch.setattr(body_limits, "JSONScan", Counting)
    assert scan_json(b"[]," * (1 << 20), 1000).elements > 1000
    assert scan_json(b"[" * (1 << 20), MANY).max_depth > MAX_DEPTH
    assert len(blocks) == 2


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
