"""The registrations of one tenant: versions by name, in the order of their use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from .processor_names import Versions, split_reference
from .registration import Registration, Upload

_Key: TypeAlias = tuple[str, int]
"""Name and version."""


class TenantRegistrations:
    """Registrations by name and version. Versions are numbered 1, 2, … under each name, and no number is reused.

    Args:
        max_names: most names whose last number is remembered, more than the tenant can use at a time. The numbers of a
            name that was dropped continue above the highest number of all dropped names.

    Attributes:
        bytes: size of all registrations.
    """

    def __init__(self, max_names: int) -> None:
        self.bytes = 0
        self._max_names = max_names
        self._by_key: OrderedDict[_Key, Registration] = OrderedDict()  # the least recently used first
        self._by_name: dict[str, dict[int, Registration]] = {}  # the oldest version first
        self._by_digest: dict[str, list[Registration]] = {}
        self._last: OrderedDict[str, int] = OrderedDict()  # the most recently registered name last
        self._last_dropped = 0

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Registration]:
        """Iterate over the registrations, the least recently used first."""
        return iter(self._by_key.values())

    def get(self, reference: str) -> list[Registration]:
        """Return the registrations of `name@version`, `name` (the oldest version first), or a digest."""
        if reference.startswith("sha256:"):
            return list(self._by_digest.get(reference, ()))
        name, version = split_reference(reference) or ("", None)
        versions = self._by_name.get(name, {})
        if version is None:
            return list(versions.values())
        return [versions[version]] if version in versions else []

    def same_as(self, upload: Upload) -> Registration | None:
        """Return the version under the upload's name that has the same digest."""
        return next((each for each in self.get(upload.digest) if each.upload.name == upload.name), None)

    def names(self) -> dict[str, Versions]:
        """Return the names that the registrations have, or had."""
        return {name: Versions(tuple(self._by_name.get(name, ())), last) for name, last in self._last.items()}

    def use(self, registration: Registration) -> None:
        """Mark a registration as the most recently used."""
        self._by_key.move_to_end(_key(registration))

    def add(self, upload: Upload, size: int, now: int) -> Registration:
        """Register an upload under the next number."""
        name = upload.name
        version = self._last.pop(name, self._last_dropped) + 1
        self._last[name] = version
        registration = Registration(upload, version, size, now)
        self._keep(registration)
        self._drop_a_name()
        return registration

    def last_numbers(self) -> tuple[dict[str, int], int]:
        """Return the last number of each name, and the highest of all dropped names."""
        return dict(self._last), self._last_dropped

    def restore(self, kept: Sequence[Registration], last: Mapping[str, int], last_dropped: int) -> None:
        """Take over the state of another object, while this one is empty.

        Args:
            kept: its registrations, the least recently used first.
            last: see `last_numbers`.
            last_dropped: see `last_numbers`.
        """
        for registration in sorted(kept, key=lambda each: (each.created, each.version)):
            self._keep(registration)
        for registration in kept:
            self.use(registration)
        self._last.update(last)
        self._last_dropped = last_dropped

    def replace(self, old: Registration, upload: Upload, size: int) -> Registration:
        """Replace a registration by an upload of the same digest."""
        registration = Registration(upload, old.version, size, old.created)
        self._by_name[upload.name][old.version] = registration
        self._by_key[_key(old)] = registration
        same_digest = self._by_digest[upload.digest]
        same_digest[same_digest.index(old)] = registration
        self.bytes += size - old.size
        self.use(registration)
        return registration

    def remove(self, registration: Registration) -> None:
        """Remove a registration."""
        name, digest = registration.upload.name, registration.upload.digest
        del self._by_key[_key(registration)]
        del self._by_name[name][registration.version]
        if not self._by_name[name]:
            del self._by_name[name]
        self._by_digest[digest].remove(registration)
        if not self._by_digest[digest]:
            del self._by_digest[digest]
        self.bytes -= registration.size

    def _keep(self, registration: Registration) -> None:
        upload = registration.upload
        self._by_name.setdefault(upload.name, {})[registration.version] = registration
        self._by_key[_key(registration)] = registration
        self._by_digest.setdefault(upload.digest, []).append(registration)
        self.bytes += registration.size

    def _drop_a_name(self) -> None:
        if len(self._last) > self._max_names:
            name = next(name for name in self._last if name not in self._by_name)
            self._last_dropped = max(self._last_dropped, self._last.pop(name))


def _key(registration: Registration) -> _Key:
    return registration.upload.name, registration.version
