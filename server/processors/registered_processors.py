"""Processors that were uploaded once, for requests that name them by `name@version`, by name or by digest."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

from logitship.client.errors import ProcessorLoadError

from .processor_names import Versions
from .registration import Registration, Upload
from .tenant_registrations import TenantRegistrations

_FORGOTTEN_NAMES = 1024
"""Names of a tenant's that are remembered beyond those in use."""


class RegistryFull(Exception):
    """The room is others', who have no more than this tenant would."""


class NotRegistered(ProcessorLoadError):
    """Nothing is registered there, or not any more."""


class RegisteredProcessors:
    """Registrations by tenant, bounded. Safe to use from several threads.

    They outlive their loaded processors: one that is named after its processor has left the cache is loaded again.

    Guarantees:
    * A name and version of a tenant's stands for one digest, for ever.
    * Where room is needed, whoever takes most of it gives way, with the least recently used of their own. Nobody who
      has less than an equal share loses anything to another.

    Args:
        max_entries: most registrations that are kept, of all tenants together.
        max_bytes: most bytes that they count for.
        clock: seconds since 1970.
    """

    def __init__(self, *, max_entries: int, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: defaultdict[str, TenantRegistrations] = defaultdict(self._new_tenant)

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._tenants.values()))

    def add(self, upload: Upload, tenant: str = "") -> Registration:
        """Keep an upload as a new version of its name, or as the version that runs the same already.

        Raises:
            ProcessorLoadError: it is larger than all of them together may be.
            RegistryFull: it would have to push out somebody who has no more.
        """
        size = upload.size
        if size > self._max_bytes:
            raise ProcessorLoadError(
                f"the processor string counts for {size} bytes, more than the {self._max_bytes} that the server keeps "
                "of all registered ones together: send it with each request"
            )
        with self._lock:
            own = self._tenants[tenant]
            old = own.same_as(upload)
            for owner, each in self._making_way(tenant, size, old):
                self._tenants[owner].remove(each)
            if old is None:
                return own.add(upload, size, int(self._clock()))
            return own.replace(old, upload, size)

    def named(self, reference: str, tenant: str = "") -> Registration | None:
        """The tenant's own `name@version`, or its newest `name`. Counts as a use."""
        with self._lock:
            own = self._tenants[tenant]
            found = own.get(reference)
            if not found:
                return None
            own.use(found[-1])
            return found[-1]

    def with_digest(self, digest: str, tenant: str = "") -> Registration:
        """One that runs this: the tenant's own, else another's, who may have told its digest. Counts as a use.

        Raises:
            NotRegistered: there is none, or none any more.
        """
        with self._lock:
            for owner in self._own_first(tenant):
                if found := owner.get(digest):
                    owner.use(found[-1])
                    return found[-1]
        raise NotRegistered(
            f"no processor {digest} is registered: it never was, or it was deleted, or dropped to make room for "
            "others. Register it again, or send the whole processor string"
        )

    def find(self, reference: str, tenant: str = "") -> Registration | None:
        """What a request with this digest, name or `name@version` would get, without counting as a use."""
        with self._lock:
            is_digest = reference.startswith("sha256:")
            owners = self._own_first(tenant) if is_digest else [self._tenants[tenant]]
            return next((found[-1] for owner in owners if (found := owner.get(reference))), None)

    def of(self, tenant: str = "") -> list[Registration]:
        """The tenant's own, by name and version."""
        with self._lock:
            own = list(self._tenants[tenant])
        return sorted(own, key=lambda each: (each.upload.name, each.version))

    def own(self, reference: str, tenant: str = "") -> list[Registration]:
        """The tenant's own of `name@version`, of `name` (the oldest version first) or of a digest."""
        with self._lock:
            return self._tenants[tenant].get(reference)

    def remove(self, reference: str, tenant: str = "") -> list[Registration]:
        """Drop what `own` gives."""
        with self._lock:
            own = self._tenants[tenant]
            removed = own.get(reference)
            for each in removed:
                own.remove(each)
            return removed

    def names(self, tenant: str = "") -> dict[str, Versions]:
        """The names that the tenant's own have, or had."""
        with self._lock:
            return self._tenants[tenant].names()

    def _new_tenant(self) -> TenantRegistrations:
        return TenantRegistrations(self._max_entries + _FORGOTTEN_NAMES)

    def _own_first(self, tenant: str) -> Iterator[TenantRegistrations]:
        yield self._tenants[tenant]
        yield from (owner for name, owner in self._tenants.items() if name != tenant)

    def _making_way(self, tenant: str, size: int, old: Registration | None) -> list[tuple[str, Registration]]:
        """Who makes way for one more of this size, and whose it is. `old` goes anyway.

        Raises:
            RegistryFull: it would have to be that of somebody with no more.
        """
        entries = {name: len(owner) for name, owner in self._tenants.items()}
        sizes = {name: owner.bytes for name, owner in self._tenants.items()}
        entries[tenant] += old is None
        sizes[tenant] += size - (0 if old is None else old.size)
        candidates = {name: iter([each for each in owner if each is not old]) for name, owner in self._tenants.items()}
        making_way = []
        while (too_many := sum(entries.values()) > self._max_entries) or sum(sizes.values()) > self._max_bytes:
            taken = entries if too_many else sizes
            loser = max(taken, key=lambda name: (taken[name], name == tenant))
            each = next(candidates[loser], None)
            if each is None:  # it is the newcomer, with nothing else to lose
                raise RegistryFull(
                    "the room for registered processors is taken by other API keys, none of which has more of it: "
                    "send the processor with each request"
                )
            entries[loser] -= 1
            sizes[loser] -= each.size
            making_way.append((loser, each))
        return making_way
