from __future__ import annotations

from logitship.client.serialization.processor_string import SourceProcessor
from logitship.server.processors.processor_names import Versions
from logitship.server.processors.registration import Registration, Upload
from logitship.server.processors.tenant_registrations import TenantRegistrations


def upload(name: str, digest: str, source: str = "x") -> Upload:
    return Upload(name, f"sha256:{digest}", SourceProcessor(source, name))


def ids(registrations: list[Registration]) -> list[str]:
    return [each.id for each in registrations]


def test_version_numbers_are_not_reused() -> None:
    own = TenantRegistrations(max_names=9)
    first, second = own.add(upload("A", "1"), 5, 100), own.add(upload("A", "2"), 6, 101)
    assert (first.id, second.id, own.bytes, len(own)) == ("A@1", "A@2", 11, 2)
    own.remove(second)
    assert own.add(upload("A", "3"), 1, 102).id == "A@3"
    for each in list(own):
        own.remove(each)
    assert (own.bytes, len(own), own.names()) == (0, 0, {"A": Versions((), 3)})
    assert own.add(upload("A", "1"), 1, 103).id == "A@4"


def test_get_by_reference() -> None:
    own = TenantRegistrations(max_names=9)
    for name, digest in (("A", "1"), ("B", "1"), ("A", "2")):
        own.add(upload(name, digest), 1, 0)
    assert ids(own.get("A")) == ["A@1", "A@2"]
    assert ids(own.get("A@2")) == ["A@2"]
    assert ids(own.get("sha256:1")) == ["A@1", "B@1"]
    for nothing in ("C", "A@3", "sha256:3", "sha256:", "A@", "", "@"):
        assert own.get(nothing) == []


def test_iteration_starts_with_the_least_recently_used() -> None:
    own = TenantRegistrations(max_names=9)
    first, second = own.add(upload("A", "1"), 1, 0), own.add(upload("B", "2"), 1, 0)
    own.use(first)
    assert list(own) == [second, first]
    replaced = own.replace(second, upload("B", "2", source="longer"), 4)
    assert list(own) == [first, replaced]
    assert (own.bytes, replaced.id, replaced.created) == (5, "B@1", 0)
    assert own.get("B") == own.get("B@1") == own.get("sha256:2") == [replaced]


def test_dropped_name_continues_above_its_last_number() -> None:
    own = TenantRegistrations(max_names=2)
    for digest in "123":
        own.add(upload("A", digest), 1, 0)
    for each in list(own):
        own.remove(each)
    kept = own.add(upload("B", "4"), 1, 0)
    assert own.names() == {"A": Versions((), 3), "B": Versions((1,), 1)}
    assert own.add(upload("C", "5"), 1, 0).id == "C@1"  # and A is dropped: B is in use
    assert list(own.names()) == ["B", "C"]
    own.remove(kept)
    assert own.add(upload("A", "6"), 1, 0).id == "A@4"
    assert list(own.names()) == ["C", "A"]
