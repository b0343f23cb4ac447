from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.server.engine.registered_processors import RegisteredProcessors


def string_of(size: int) -> SourceProcessor:
    return SourceProcessor("x" * size, "X")


def test_a_string_comes_back_and_an_unknown_digest_says_what_to_do() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=100)
    registered.add("a", string_of(1))
    assert registered.get("a") == registered.find("a") == string_of(1)
    assert registered.find("b") is None
    with pytest.raises(ProcessorLoadError, match=r"no processor b is registered: .*dropped.*Register it again"):
        registered.get("b")


def test_the_least_recently_used_goes_first() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=100)
    registered.add("a", string_of(1))
    registered.add("b", string_of(1))
    registered.get("a")
    registered.find("b")  # is no use
    registered.add("c", string_of(1))
    assert registered.find("b") is None
    assert registered.find("a") is not None


def test_bytes_are_bounded() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=10)
    for digest in "abc":
        registered.add(digest, string_of(4))
    assert [registered.find(digest) is not None for digest in "abc"] == [False, True, True]
    registered.add("d", string_of(10))
    assert [registered.find(digest) is not None for digest in "abcd"] == [False, False, False, True]


def test_a_string_larger_than_all_may_be_is_refused_and_nothing_is_dropped() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=10)
    registered.add("a", string_of(10))
    with pytest.raises(ProcessorLoadError, match="counts for 11 bytes, more than the 10"):
        registered.add("b", string_of(11))
    assert registered.find("a") is not None


def test_what_a_pickled_string_counts_for() -> None:
    schema = {"type": "object"}  # 17 bytes of JSON
    pickled = PickledProcessor(b"12345", source=SourceProcessor("é", "X", b"12"), params_schema=schema)
    RegisteredProcessors(max_entries=1, max_bytes=26).add("a", pickled)
    with pytest.raises(ProcessorLoadError, match="counts for 26 bytes"):
        RegisteredProcessors(max_entries=1, max_bytes=25).add("a", pickled)


def test_a_schema_too_deep_to_be_measured_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": schema}
    with pytest.raises(ProcessorLoadError, match="params_schema"):
        RegisteredProcessors(max_entries=2, max_bytes=100).add("a", PickledProcessor(b"x", params_schema=schema))


def test_a_digest_stands_for_no_other_digest() -> None:
    registered = RegisteredProcessors(max_entries=1, max_bytes=10)
    registered.add("a", InstalledProcessor("min_p"))
    with pytest.raises(TypeError, match="RegisteredProcessor"):
        registered.add("b", RegisteredProcessor("a"))


def test_against_a_plain_dictionary() -> None:
    rng = random.Random(0)
    registered = RegisteredProcessors(max_entries=4, max_bytes=20)
    expected: OrderedDict[str, int] = OrderedDict()
    for _ in range(2000):
        digest, size = rng.choice("abcdefgh"), rng.randint(1, 9)
        if rng.random() < 0.5:
            registered.add(digest, string_of(size))
            expected.pop(digest, None)
            while len(expected) == 4 or sum(expected.values()) + size > 20:
                expected.popitem(last=False)
            expected[digest] = size
        elif digest in expected:
            assert registered.get(digest) == string_of(expected[digest])
            expected.move_to_end(digest)
        assert {d for d in "abcdefgh" if registered.find(d)} == set(expected)
