"""What one tenant has registered: versions by name, in the order of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeAlias

from .processor_names import Versions, split_reference
from .registration import Registration, Upload

_Place: TypeAlias = tuple[str, int]
"""Name and version."""


class TenantRegistrations:
    """Versions are numbered 1, 2, … under each name, and no number is given out twice.

    Args:
        max_names: most names whose last number is remembered. The tenant never has as many at a time. Numbers under a
            forgotten name go on above the highest forgotten one.

    Attributes:
        bytes: what all of them count for.
    """

    def __init__(self, max_names: int) -> None:
        self.bytes = 0
        self._max_names = max_names
        self._by_place: OrderedDict[_Place, Registration] = OrderedDict()  # the least recently used first
        self._by_name: dict[str, dict[int, Registration]] = {}  # the oldest version first
        self._by_digest: dict[str, list[Registration]] = {}
        self._last: OrderedDict[str, int] = OrderedDict()  # the name that was registered last at the end
        self._forgotten = 0

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[Registration]:
        """The least recently used first."""
        return iter(self._by_place.values())

    def get(self, reference: str) -> list[Registration]:
        """Those of `name@version`, of `name` (the oldest version first), or of a digest."""
        if reference.startswith("sha256:"):
            return list(self._by_digest.get(reference, ()))
        name, version = split_reference(reference) or ("", None)
        versions = self._by_name.get(name, {})
        if version is None:
            return list(versions.values())
        return [versions[version]] if version in versions else []

    def same_as(self, upload: Upload) -> Registration | None:
        """The version under the upload's name that runs the same."""
        return next((each for each in self.get(upload.digest) if each.upload.name == upload.name), None)

    def names(self) -> dict[str, Versions]:
        """The names that they have, or had."""
        return {name: Versions(tuple(self._by_name.get(name, ())), last) for name, last in self._last.items()}

    def use(self, registration: Registration) -> None:
        """Note that it was asked for."""
        self._by_place.move_to_end(_place(registration))

    def add(self, upload: Upload, size: int, now: int) -> Registration:
        """Keep an upload under the next number."""
        name = upload.name
        version = self._last.pop(name, self._forgotten) + 1
        self._last[name] = version
        registration = Registration(upload, version, size, now)
        self._by_name.setdefault(name, {})[version] = registration
        self._by_place[name, version] = registration
        self._by_digest.setdefault(upload.digest, []).append(registration)
        self.bytes += size
        self._forget_a_name()
        return registration

    def replace(self, old: Registration, upload: Upload, size: int) -> Registration:
        """Keep another string of the same digest in the old one's place."""
        registration = Registration(upload, old.version, size, old.created)
        self._by_name[upload.name][old.version] = registration
        self._by_place[_place(old)] = registration
        runs_the_same = self._by_digest[upload.digest]
        runs_the_same[runs_the_same.index(old)] = registration
        self.bytes += size - old.size
        self.use(registration)
        return registration

    def remove(self, registration: Registration) -> None:
        """Drop one."""
        name, digest = registration.upload.name, registration.upload.digest
        del self._by_place[_place(registration)]
        del self._by_name[name][registration.version]
        if not self._by_name[name]:
            del self._by_name[name]
        self._by_digest[digest].remove(registration)
        if not self._by_digest[digest]:
            del self._by_digest[digest]
        self.bytes -= registration.size

    def _forget_a_name(self) -> None:
        if len(self._last) > self._max_names:
            name = next(name for name in self._last if name not in self._by_name)
            self._forgotten = max(self._forgotten, self._last.pop(name))


def _place(registration: Registration) -> _Place:
    return registration.upload.name, registration.version
