"""Artifacts that clients uploaded: bytes of tensors and arrays, which shipped classes refer to by digest."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, ArtifactBytes, digest_of, missing_artifact

_OVERHEAD = 1 << 10
"""Bytes that each artifact counts for on top of its own, so that many small ones fill the store too."""


class ArtifactStoreFull(Exception):
    """The store is full, and nothing can be evicted for another artifact of this tenant."""


@dataclass(frozen=True)
class StoredArtifact:
    """An artifact of a tenant.

    Attributes:
        digest: `sha256:…` of the bytes.
        size: number of bytes.
        created: time of its first upload, in seconds since 1970.
    """

    digest: str
    size: int
    created: int


@dataclass(frozen=True)
class _KeptBytes:
    content: ArtifactBytes
    created: int

    @property
    def size(self) -> int:
        return _size(self.content)


class ArtifactStore:
    """Artifacts by tenant, bounded. Safe to use from several threads.

    Guarantees:
    * The bytes of a digest are in memory once, whoever uploaded them. Bytes that a loaded class uses count until it is
      unloaded, also after they were evicted or deleted.
    * Where space is needed, the tenant that uses most of it loses its least recently used artifact. A tenant with less
      than an equal share never loses one to another tenant.

    Args:
        max_bytes: most bytes of all artifacts together.
        max_used: most bytes of the artifacts of one class, which its sandbox has to hold; None: no limit.
        clock: returns seconds since 1970.
    """

    def __init__(self, *, max_bytes: int, max_used: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._max_used = max_used
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants: defaultdict[str, OrderedDict[str, _KeptBytes]] = defaultdict(
            OrderedDict
        )  # least recently used first
        self._contents: WeakValueDictionary[str, ArtifactBytes] = WeakValueDictionary()
        """All bytes in memory, by digest."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all artifacts in memory."""
        with self._lock:
            return sum(map(_size, list(self._contents.values())))

    def add(self, data: bytes, tenant: str = "") -> StoredArtifact:
        """Keep an artifact of a tenant. The same bytes again are a use of the existing one.

        Raises:
            ArtifactStoreFull: nothing can be evicted for it.
        """
        digest = digest_of(data)
        with self._lock:
            own = self._tenants[tenant]
            if digest not in own:
                content = self._contents.get(digest) or ArtifactBytes(data)
                self._evict_for(digest, content, tenant)
                own[digest] = _KeptBytes(content, int(self._clock()))
                self._contents[digest] = content
            own.move_to_end(digest)
            return _stored(digest, own[digest])

    def find(self, digest: str, tenant: str = "") -> StoredArtifact | None:
        """Return a tenant's own artifact; None if it has none of this digest. Does not count as a use."""
        with self._lock:
            entry = self._tenants[tenant].get(digest)
            return None if entry is None else _stored(digest, entry)

    def list_own(self, tenant: str = "") -> list[StoredArtifact]:
        """Return the tenant's own artifacts, by digest."""
        with self._lock:
            return [_stored(*each) for each in sorted(self._tenants[tenant].items())]

    def remove(self, digest: str, tenant: str = "") -> bool:
        """Remove a tenant's own artifact. Return whether there was one. Loaded classes keep it."""
        with self._lock:
            return self._tenants[tenant].pop(digest, None) is not None

    def resolve(self, artifacts: Iterable[Artifact], tenant: str = "") -> tuple[Artifact, ...]:
        """Return the artifacts with their bytes: any tenant that has a digest may use them. Counts as a use.

        Raises:
            ProcessorLoadError: one is not here, or a sandbox cannot hold them.
        """
        with self._lock:
            found = tuple(each if each.content is not None else self._use(each.digest, tenant) for each in artifacts)
        used = sum(len(each.content.data) for each in found if each.content is not None)
        if self._max_used is not None and used > self._max_used:
            raise ProcessorLoadError(
                f"the processor's artifacts have {used} bytes, more than the {self._max_used} that this server gives a "
                "sandbox (--sandbox-memory)"
            )
        return found

    def _use(self, digest: str, tenant: str) -> Artifact:
        for owner in (tenant, *(name for name in self._tenants if name != tenant)):
            if digest in self._tenants[owner]:
                self._tenants[owner].move_to_end(digest)
                break
        content = self._contents.get(digest)
        if content is None:
            raise missing_artifact(digest)
        return Artifact(digest, content)

    def _evict_for(self, digest: str, content: ArtifactBytes, tenant: str) -> None:
        """Evict artifacts until there is space for one more of the tenant.

        Raises:
            ArtifactStoreFull: that is not possible; nothing was evicted.
        """
        size = _size(content)
        used = {name: sum(each.size for each in owner.values()) for name, owner in self._tenants.items()}
        used[tenant] += size
        # Bytes that only loaded classes hold cannot be freed here.
        stored = {known: entry.size for owner in self._tenants.values() for known, entry in owner.items()}
        held = sum(_size(each) for known, each in list(self._contents.items()) if known not in stored)
        holders = {known: sum(known in owner for owner in self._tenants.values()) for known in stored}
        total = held + sum(stored.values()) + (0 if digest in self._contents else size)
        waiting = {name: iter(list(owner.items())) for name, owner in self._tenants.items()}
        evicted: list[tuple[str, str]] = []
        while total > self._max_bytes:
            loser = max(used, key=lambda name: (used[name], name == tenant))
            each = next(waiting[loser], None)
            if each is None:  # the tenant itself, without another artifact
                raise ArtifactStoreFull(
                    f"the space for artifacts, {self._max_bytes} bytes (--artifact-cache-bytes), is used by other API "
                    "keys and by loaded processors: delete artifacts that you no longer use, or try again later"
                )
            known, entry = each
            used[loser] -= entry.size
            holders[known] -= 1
            evicted.append((loser, known))
            if not holders[known] and known != digest:
                total -= entry.size
        for owner_name, known in evicted:
            del self._tenants[owner_name][known]


def _size(content: ArtifactBytes) -> int:
    return len(content.data) + _OVERHEAD


def _stored(digest: str, entry: _KeptBytes) -> StoredArtifact:
    return StoredArtifact(digest, len(entry.content.data), entry.created)
