"""Artifacts that clients uploaded: bytes of tensors and arrays, which shipped classes refer to by digest."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact, ArtifactBytes, digest_of, missing_artifact

_OVERHEAD = 1 << 14
"""Bytes that each artifact counts for on top of its own, so that a list of all of them is short."""


class ArtifactStoreFull(Exception):
    """The store is full, and nothing can be evicted for another artifact of this tenant.

    Attributes:
        tenants: those whose loaded classes use the space, the one that uses most first: unloading one may help.
    """

    def __init__(self, message: str, tenants: list[str]) -> None:
        super().__init__(message)
        self.tenants = tenants


class ArtifactTooLarge(Exception):
    """The artifact would not fit into the empty store."""


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


@dataclass
class _SharedBytes:
    """The bytes of a digest.

    Attributes:
        data: the bytes.
        owners: tenants that uploaded them, with the times.
        loads: for each tenant, how many of its loaded classes use them.
    """

    data: bytes
    owners: dict[str, int] = field(default_factory=dict)
    loads: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        return len(self.data) + _OVERHEAD

    def is_used_by(self, tenant: str) -> bool:
        return tenant in self.owners or tenant in self.loads


class ArtifactStore:
    """Artifacts by tenant, bounded. Safe to use from several threads.

    Guarantees:
    * The bytes of a digest are in memory once, whoever uploaded them. Bytes that a loaded class uses count for its
      tenant until it is unloaded, also after they were evicted or deleted.
    * Where space is needed, the tenant that uses most of it loses its least recently used artifact that no class of it
      uses. A tenant with no more than an equal share never loses one to another tenant.
    * An operation takes a time that does not grow with the number of artifacts, but for those that it evicts or lists.

    Args:
        max_bytes: most bytes of all artifacts together.
        max_used: most bytes of the artifacts of one class, which its sandbox has to hold; None: no limit.
        clock: returns seconds since 1970.
    """

    def __init__(self, *, max_bytes: int, max_used: int | None = None, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._max_used = max_used
        self._clock = clock
        self._lock: AbstractContextManager[object] = threading.Lock()
        self._own: dict[str, OrderedDict[str, None]] = {}
        """The digests of each tenant's artifacts, the least recently used first."""
        self._bytes: dict[str, _SharedBytes] = {}
        """All bytes in memory, by digest."""
        self._used: Counter[str] = Counter()
        """Bytes that each tenant uses."""
        self._num_loads: Counter[str] = Counter()
        """Artifacts that loaded classes of each tenant use, once for each class."""
        self._total = 0
        self._unloaded: deque[tuple[str, str]] = deque()
        """Digests and tenants of classes that are gone. Whatever thread finds out adds them, without the lock."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all artifacts in memory."""
        with self._lock:
            self._release_unloaded()
            return self._total

    def add(self, data: bytes, tenant: str = "") -> StoredArtifact:
        """Keep an artifact of a tenant. The same bytes again are a use of the existing one.

        Raises:
            ArtifactTooLarge: no eviction would make enough space for it.
            ArtifactStoreFull: nothing can be evicted for it.
        """
        if len(data) + _OVERHEAD > self._max_bytes:
            raise ArtifactTooLarge(
                f"the artifact has {len(data)} bytes, more than the space for all artifacts, {self._max_bytes} bytes "
                f"(--artifact-cache-bytes), of which {_OVERHEAD} are taken by the record of each"
            )
        digest = digest_of(data)
        with self._lock:
            self._release_unloaded()
            own = self._own.setdefault(tenant, OrderedDict())
            if digest not in own:
                self._evict_for(digest, len(data) + _OVERHEAD, tenant)
                self._shared(digest, data, tenant).owners[tenant] = int(self._clock())
                own[digest] = None
            own.move_to_end(digest)
            return self._stored(digest, tenant)

    def find(self, digest: str, tenant: str = "") -> StoredArtifact | None:
        """Return a tenant's own artifact; None if it has none of this digest. Does not count as a use."""
        with self._lock:
            return self._stored(digest, tenant) if digest in self._own.get(tenant, ()) else None

    def list_own(self, tenant: str = "") -> list[StoredArtifact]:
        """Return the tenant's own artifacts, by digest."""
        with self._lock:
            return [self._stored(digest, tenant) for digest in sorted(self._own.get(tenant, ()))]

    def remove(self, digest: str, tenant: str = "") -> bool:
        """Remove a tenant's own artifact. Return whether there was one. Loaded classes keep it."""
        with self._lock:
            if digest not in self._own.get(tenant, ()):
                return False
            self._remove(digest, tenant)
            return True

    def resolve(self, artifacts: Iterable[Artifact], tenant: str = "") -> tuple[Artifact, ...]:
        """Return the artifacts with their bytes: any tenant that has a digest may use them. Counts as a use.

        Raises:
            ProcessorLoadError: one is missing, or a sandbox cannot hold them.
        """
        with self._lock:
            self._release_unloaded()
            found = tuple(each if each.content is not None else self._use(each.digest, tenant) for each in artifacts)
        used = sum(len(each.content.data) for each in found if each.content is not None)
        if self._max_used is not None and used > self._max_used:
            raise ProcessorLoadError(
                f"the processor's artifacts have {used} bytes, more than the {self._max_used} that this server gives a "
                "sandbox (--sandbox-memory)"
            )
        return found

    def _use(self, digest: str, tenant: str) -> Artifact:
        shared = self._bytes.get(digest)
        if shared is None:
            raise missing_artifact(digest)
        if digest in self._own.get(tenant, ()):
            self._own[tenant].move_to_end(digest)
        self._shared(digest, shared.data, tenant).loads[tenant] += 1
        self._num_loads[tenant] += 1
        content = ArtifactBytes(shared.data)
        weakref.finalize(content, self._unloaded.append, (digest, tenant)).atexit = False
        return Artifact(digest, content)

    def _shared(self, digest: str, data: bytes, tenant: str) -> _SharedBytes:
        """Return the bytes of a digest, which the tenant is about to use."""
        shared = self._bytes.get(digest)
        if shared is None:
            shared = self._bytes[digest] = _SharedBytes(data)
            self._total += shared.size
        if not shared.is_used_by(tenant):
            self._used[tenant] += shared.size
        return shared

    def _release_unloaded(self) -> None:
        while self._unloaded:
            digest, tenant = self._unloaded.popleft()
            loads = self._bytes[digest].loads
            loads[tenant] -= 1
            self._num_loads[tenant] -= 1
            if not loads[tenant]:
                del loads[tenant]
                self._released(digest, tenant)

    def _remove(self, digest: str, tenant: str) -> None:
        del self._own[tenant][digest]
        del self._bytes[digest].owners[tenant]
        self._released(digest, tenant)

    def _released(self, digest: str, tenant: str) -> None:
        """Free the bytes of a digest if nobody uses them, after an artifact or the last class of a tenant is gone."""
        shared = self._bytes[digest]
        if not shared.is_used_by(tenant):
            self._used[tenant] -= shared.size
        if not shared.owners and not shared.loads:
            del self._bytes[digest]
            self._total -= shared.size

    def _stored(self, digest: str, tenant: str) -> StoredArtifact:
        shared = self._bytes[digest]
        return StoredArtifact(digest, len(shared.data), shared.owners[tenant])

    def _evict_for(self, digest: str, size: int, tenant: str) -> None:
        """Evict artifacts until there is space for one more of the tenant.

        Raises:
            ArtifactStoreFull: that is not possible; nothing was evicted.
        """
        shared = self._bytes.get(digest)
        missing = self._total + (size if shared is None else 0) - self._max_bytes
        if missing <= 0:
            return
        used = {name: each for name, each in self._used.items() if each}
        if shared is None or not shared.is_used_by(tenant):
            used[tenant] = used.get(tenant, 0) + size
        share = self._max_bytes / len(used)
        may_lose = {name for name, each in used.items() if name == tenant or each > share}
        waiting = {name: self._evictable(name) for name in may_lose}
        left: dict[str, int] = {}
        evicted: list[tuple[str, str]] = []
        while missing > 0:
            loser = max(waiting, key=lambda name: (used[name], name == tenant), default=None)
            known = next(waiting[loser], None) if loser is not None else None
            if loser is not None and known is not None:
                evicted.append((known, loser))
                each = self._bytes[known]
                used[loser] -= each.size
                left[known] = left.get(known, len(each.owners) + len(each.loads)) - 1
                missing -= 0 if left[known] or known == digest else each.size
                if loser != tenant and used[loser] <= share:
                    del waiting[loser]
            elif loser is not None and loser != tenant:
                del waiting[loser]  # its loaded classes use the rest
            else:
                raise self._full(may_lose)
        for known, loser in evicted:
            self._remove(known, loser)

    def _evictable(self, tenant: str) -> Iterator[str]:
        """Yield the tenant's artifacts that none of its loaded classes uses, the least recently used first."""
        return (digest for digest in self._own.get(tenant, ()) if tenant not in self._bytes[digest].loads)

    def _full(self, may_lose: Iterable[str]) -> ArtifactStoreFull:
        loading = [name for name in may_lose if self._num_loads[name]]
        return ArtifactStoreFull(
            f"the space for artifacts, {self._max_bytes} bytes (--artifact-cache-bytes), is used by other API keys and "
            "by loaded processors: delete artifacts that you no longer use, or try again later",
            sorted(loading, key=self._used.__getitem__, reverse=True),
        )
