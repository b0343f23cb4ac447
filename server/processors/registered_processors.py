"""Registered processors: uploaded once, and requested by `name@version`, by name or by digest."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace

from logitship.client.errors import ProcessorLoadError

from .processor_names import Versions
from .registration import Registration, Upload, shared_string
from .tenant_registrations import TenantRegistrations

_UNUSED_NAMES = 1024
"""Names of a tenant without a registration whose last version number is remembered."""


class RegistryFull(Exception):
    """The registry is full, and no other tenant uses more of it than this one would."""


class NotRegistered(ProcessorLoadError):
    """No processor is registered under a name or digest, or not any more."""


class RegisteredProcessors:
    """Registrations by tenant, bounded. Safe to use from several threads.

    Registrations outlive loaded processors: after the processor was evicted from the cache, it is loaded again.

    Guarantees:
    * A tenant's name and version always refers to the same digest.
    * Where space is needed, the tenant that uses most of it loses its least recently used registration. A tenant with
      less than an equal share never loses one to another tenant.

    Args:
        max_entries: most registrations, of all tenants together.
        max_bytes: most bytes of all registrations together.
        clock: returns seconds since 1970.
    """

    def __init__(self, *, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock: AbstractContextManager[object] = threading.Lock()
        self._tenants: defaultdict[str, TenantRegistrations] = defaultdict(self._new_tenant)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._tenants.values()))

    def add(self, upload: Upload, tenant: str = "") -> Registration:
        """Keep an upload as a new version of its name, or as the existing version with the same digest.

        Raises:
            ProcessorLoadError: it is larger than `max_bytes`.
            RegistryFull: it would evict a registration of a tenant that uses no more space.
        """
        size = upload.size
        if size > self._max_bytes:
            raise ProcessorLoadError(
                f"the processor string takes {size} bytes, more than the {self._max_bytes} that this server keeps "
                "for all registered processors together: send it with each request"
            )
        with self._lock:
            own = self._tenants[tenant]
            old = own.same_as(upload)
            for owner, each in self._evictions(tenant, size, old):
                self._tenants[owner].remove(each)
            if old is None:
                return own.add(upload, size, int(self._clock()))
            return own.replace(old, upload, size)

    def use_name(self, reference: str, tenant: str = "") -> Registration | None:
        """Return the tenant's own `name@version`, or its newest `name`. Counts as a use."""
        with self._lock:
            own = self._tenants[tenant]
            found = own.get(reference)
            if not found:
                return None
            own.use(found[-1])
            return found[-1]

    def use_digest(self, digest: str, tenant: str = "") -> Registration:
        """Return a registration with this digest: the tenant's own, else another tenant's. Counts as a use.

        Any tenant that has the digest may use the processor. Another tenant's has a `shared_string`.

        Raises:
            NotRegistered: there is none, or not any more.
        """
        with self._lock:
            found = [(owner, each) for owner in self._own_first(tenant) for each in reversed(owner.get(digest))]
            if found:
                owner, registration = found[0]
                owner.use(registration)
                if owner is self._tenants[tenant]:
                    return registration
                string = shared_string([each.upload.string for _, each in found])
                return replace(registration, upload=replace(registration.upload, string=string))
        raise NotRegistered(
            f"no processor {digest} is registered: it never was, or it was deleted, or evicted to make space for "
            "others. Register it again, or send the whole processor string"
        )

    def find(self, reference: str, tenant: str = "") -> Registration | None:
        """Return the registration for a digest, name or `name@version`. Does not count as a use."""
        with self._lock:
            is_digest = reference.startswith("sha256:")
            owners = self._own_first(tenant) if is_digest else [self._tenants[tenant]]
            return next((found[-1] for owner in owners if (found := owner.get(reference))), None)

    def list_own(self, tenant: str = "") -> list[Registration]:
        """Return the tenant's own registrations, by name and version."""
        with self._lock:
            own = list(self._tenants[tenant])
        return sorted(own, key=lambda each: (each.upload.name, each.version))

    def find_own(self, reference: str, tenant: str = "") -> list[Registration]:
        """Return the tenant's own registrations of `name@version`, `name` (the oldest version first) or a digest."""
        with self._lock:
            return self._tenants[tenant].get(reference)

    def remove(self, reference: str, tenant: str = "") -> list[Registration]:
        """Remove and return the registrations that `find_own` returns."""
        with self._lock:
            own = self._tenants[tenant]
            removed = own.get(reference)
            for each in removed:
                own.remove(each)
            return removed

    def names(self, tenant: str = "") -> dict[str, Versions]:
        """Return the names that the tenant's registrations have, or had."""
        with self._lock:
            return self._tenants[tenant].names()

    def _new_tenant(self) -> TenantRegistrations:
        return TenantRegistrations(self._max_entries + _UNUSED_NAMES)

    def _own_first(self, tenant: str) -> Iterator[TenantRegistrations]:
        yield self._tenants[tenant]
        yield from (owner for name, owner in self._tenants.items() if name != tenant)

    def _evictions(self, tenant: str, size: int, old: Registration | None) -> list[tuple[str, Registration]]:
        """Return the registrations to evict for one more of this size, each with its tenant. `old` is replaced anyway.

        Raises:
            RegistryFull: one of a tenant that uses no more space would have to be evicted.
        """
        entries = {name: len(owner) for name, owner in self._tenants.items()}
        sizes = {name: owner.bytes for name, owner in self._tenants.items()}
        entries[tenant] += old is None
        sizes[tenant] += size - (0 if old is None else old.size)
        candidates = {name: iter([each for each in owner if each is not old]) for name, owner in self._tenants.items()}
        evicted = []
        while (too_many := sum(entries.values()) > self._max_entries) or sum(sizes.values()) > self._max_bytes:
            used = entries if too_many else sizes
            loser = max(used, key=lambda name: (used[name], name == tenant))
            each = next(candidates[loser], None)
            if each is None:  # the tenant itself, without another registration to evict
                raise RegistryFull(
                    "the space for registered processors is used by other API keys, none of which uses more than this "
                    "one would: send the processor with each request"
                )
            entries[loser] -= 1
            sizes[loser] -= each.size
            evicted.append((loser, each))
        return evicted
