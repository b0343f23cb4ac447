from __future__ import annotations

import random
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    RegisteredProcessor,
    SourceProcessor,
)
from logitship.server.processors.processor_names import Versions
from logitship.server.processors.registered_processors import NotRegistered, RegisteredProcessors, RegistryFull
from logitship.server.processors.registration import Registration, Upload


def upload(digest: str, size: int = 1, name: str = "A") -> Upload:
    return Upload(name, f"sha256:{digest}", SourceProcessor("x" * size, "X"))


def ids(registrations: list[Registration]) -> list[str]:
    return [each.id for each in registrations]


def digests(registered: RegisteredProcessors, tenant: str = "") -> str:
    return "".join(sorted(each.upload.digest.removeprefix("sha256:") for each in registered.list_own(tenant)))


def test_find_by_version_name_and_digest() -> None:
    times = iter((7.9, 8.0))
    registered = RegisteredProcessors(max_entries=9, max_bytes=100, clock=lambda: next(times))
    first, second = registered.add(upload("a")), registered.add(upload("b", 2))
    assert (first.id, first.version, first.size, first.created) == ("A@1", 1, 1, 7)
    assert (second.id, second.version, second.size, second.created) == ("A@2", 2, 2, 8)
    assert registered.use_name("A") == registered.use_name("A@2") == registered.use_digest("sha256:b") == second
    assert registered.use_name("A@1") == registered.find("A@1") == registered.find("sha256:a") == first
    assert registered.find_own("A") == [first, second]
    assert len(registered) == 2


def test_same_digest_is_the_same_version() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=100)
    first, other_name = registered.add(upload("a")), registered.add(upload("a", name="B"))
    again = registered.add(Upload("A", "sha256:a", SourceProcessor("described", "X"), "better"))
    assert (again.id, again.created, again.upload.description) == (first.id, first.created, "better")
    assert registered.list_own() == [again, other_name]
    assert registered.names() == {"A": Versions((1,), 1), "B": Versions((1,), 1)}


def test_unknown_digest() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=100)
    with pytest.raises(NotRegistered, match=r"no processor sha256:b is registered: .*deleted, or evicted.*Register it"):
        registered.use_digest("sha256:b")
    assert registered.use_name("A") is registered.find("A") is registered.find("sha256:b") is None
    assert registered.find_own("A") == registered.remove("A") == registered.list_own() == []


def test_deleted_version_numbers_are_not_reused() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=100)
    for digest in "abc":
        registered.add(upload(digest))
    registered.add(upload("a", name="B"))
    assert ids(registered.remove("A@3")) == ["A@3"]
    assert registered.remove("A@3") == []
    assert registered.add(upload("c")).id == "A@4"
    assert ids(registered.remove("sha256:a")) == ["A@1", "B@1"]
    assert ids(registered.remove("A")) == ["A@2", "A@4"]
    assert (len(registered), registered.names()) == (0, {"A": Versions((), 4), "B": Versions((), 1)})


# --- limits ---


def test_least_recently_used_is_evicted_first() -> None:
    registered = RegisteredProcessors(max_entries=3, max_bytes=100)
    for digest in "abc":
        registered.add(upload(digest))
    registered.use_digest("sha256:a")
    registered.use_name("A@2")
    registered.find("A@3")  # does not count as a use
    registered.find_own("A@3")
    registered.add(upload("d"))
    assert digests(registered) == "abd"


def test_bytes_are_bounded() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=10)
    for digest in "abc":
        registered.add(upload(digest, 4))
    assert digests(registered) == "bc"
    registered.add(upload("d", 10))
    assert digests(registered) == "d"


def test_string_over_the_limit_is_refused_without_eviction() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=10)
    registered.add(upload("a", 10))
    with pytest.raises(ProcessorLoadError, match="takes 11 bytes, more than the 10"):
        registered.add(upload("b", 11))
    assert digests(registered) == "a"


def test_longer_string_of_the_same_digest() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=10)
    registered.add(upload("a", 4))
    registered.add(upload("b", 4))
    registered.add(upload("b", 6))
    assert digests(registered) == "ab"
    registered.add(upload("b", 7))
    assert digests(registered) == "b"
    assert ids(registered.list_own()) == ["A@2"]


@pytest.mark.parametrize(
    ("string", "size"),
    [
        (SourceProcessor("é", "X", b"12"), 4),
        (PickledProcessor(b"12345", source=SourceProcessor("é", "X", b"12"), params_schema={"type": "object"}), 26),
        (PickledProcessor(b"12345"), 5),
        (InstalledProcessor("min_p"), 5),
    ],
)
def test_upload_size(string: ProcessorString, size: int) -> None:
    assert Upload("A", "sha256:a", string).size == size
    assert Upload("A", "sha256:a", string, "é", {}).size == size + 4


def test_too_deep_schema_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(300):
        schema = {"properties": schema}
    for deep in (
        Upload("A", "sha256:a", PickledProcessor(b"x", params_schema=schema)),
        Upload("A", "sha256:a", SourceProcessor("x", "X"), "", schema),
    ):
        with pytest.raises(ProcessorLoadError, match="params_schema"):
            RegisteredProcessors(max_entries=2, max_bytes=100).add(deep)


def test_registration_cannot_hold_a_digest() -> None:
    with pytest.raises(TypeError, match="RegisteredProcessor"):
        _ = Upload("A", "sha256:a", RegisteredProcessor("sha256:b")).size


# --- tenants ---


def test_names_are_private_and_digests_are_shared() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=100)
    other, own = registered.add(upload("a", 2), "one"), registered.add(upload("b"), "two")
    assert (other.id, own.id) == ("A@1", "A@1")
    assert registered.use_name("A", "two") == own
    assert registered.use_digest("sha256:a", "two") == registered.find("sha256:a", "two") == other
    for missing in ("sha256:a", "A@2"):
        assert registered.find_own(missing, "two") == registered.remove(missing, "two") == []
    assert registered.use_name("A", "three") is None
    assert registered.remove("A", "two") == [own]
    assert registered.list_own("one") == [other]


def test_own_registration_is_preferred_for_a_digest() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=100)
    for tenant in ("one", "two", "three"):
        registered.add(upload("a", name=tenant), tenant)
    assert registered.use_digest("sha256:a", "two").upload.name == "two"
    registered.remove("two", "two")
    assert registered.use_digest("sha256:a", "two").upload.name == "one"


def test_tenant_that_fills_the_registry_evicts_its_own() -> None:
    registered = RegisteredProcessors(max_entries=6, max_bytes=100)
    for digest in "ab":
        registered.add(upload(digest), "quiet")
    for digest in "cdefghi":
        registered.add(upload(digest), "busy")
    assert (digests(registered, "quiet"), digests(registered, "busy")) == ("ab", "fghi")


def test_tenant_with_less_evicts_from_tenant_with_more() -> None:
    registered = RegisteredProcessors(max_entries=4, max_bytes=100)
    for digest in "abcd":
        registered.add(upload(digest), "busy")
    for digest in "efg":
        registered.add(upload(digest), "new")
    assert (digests(registered, "busy"), digests(registered, "new")) == ("cd", "fg")


def test_eviction_by_size_is_fair() -> None:
    registered = RegisteredProcessors(max_entries=9, max_bytes=20)
    registered.add(upload("a", 6), "quiet")
    for digest in "bcd":
        registered.add(upload(digest, 7), "busy")
    assert (digests(registered, "quiet"), digests(registered, "busy")) == ("a", "cd")
    registered.add(upload("e", 13), "busy")
    assert (digests(registered, "quiet"), digests(registered, "busy")) == ("a", "e")
    with pytest.raises(RegistryFull, match="used by other API keys"):
        registered.add(upload("f", 15), "busy")
    assert (digests(registered, "quiet"), digests(registered, "busy")) == ("a", "e")


def test_full_registry_of_equal_tenants_refuses() -> None:
    registered = RegisteredProcessors(max_entries=2, max_bytes=100)
    for tenant in ("one", "two"):
        registered.add(upload("a"), tenant)
    with pytest.raises(RegistryFull):
        registered.add(upload("a"), "three")
    assert [digests(registered, tenant) for tenant in ("one", "two", "three")] == ["a", "a", ""]


def test_tenant_within_its_share_loses_nothing() -> None:
    rng = random.Random(0)
    tenants = ["one", "two", "three"]
    registered = RegisteredProcessors(max_entries=9, max_bytes=60)
    for _ in range(3000):
        tenant = rng.choice(tenants)
        before = {other: registered.list_own(other) for other in tenants}
        try:
            registered.add(upload(rng.choice("abcdefghij"), rng.randint(1, 15), rng.choice("ABC")), tenant)
        except RegistryFull:
            assert {other: registered.list_own(other) for other in tenants} == before
        for other in set(tenants) - {tenant}:
            lost = len(before[other]) - len(registered.list_own(other))
            within = len(before[other]) <= 9 / 3 and sum(each.size for each in before[other]) <= 60 / 3
            assert lost == 0 or not within
        assert len(registered) <= 9
        assert sum(each.size for other in tenants for each in registered.list_own(other)) <= 60


def test_single_tenant_matches_an_lru_dictionary() -> None:
    rng = random.Random(0)
    registered = RegisteredProcessors(max_entries=4, max_bytes=20)
    expected: OrderedDict[str, int] = OrderedDict()
    for _ in range(2000):
        digest, size = rng.choice("abcdefgh"), rng.randint(1, 9)
        if rng.random() < 0.5:
            registered.add(upload(digest, size))
            expected.pop(digest, None)
            while len(expected) == 4 or sum(expected.values()) + size > 20:
                expected.popitem(last=False)
            expected[digest] = size
        elif digest in expected:
            assert registered.use_digest(f"sha256:{digest}").size == expected[digest]
            expected.move_to_end(digest)
        assert digests(registered) == "".join(sorted(expected))


def test_concurrent_registrations() -> None:
    registered = RegisteredProcessors(max_entries=64, max_bytes=1000)
    barrier = threading.Barrier(4)

    def register(worker: int) -> list[int]:
        barrier.wait(60)
        return [registered.add(upload(f"{worker}-{number}")).version for number in range(50)]

    with ThreadPoolExecutor(4) as pool:
        versions = [version for given in pool.map(register, range(4)) for version in given]
    assert sorted(versions) == list(range(1, 201))
    assert len(registered) == 64
