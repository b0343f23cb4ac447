"""Registered processors and artifacts that several processes of one host share, in a private folder.

Each process has all of them in memory, as `RegisteredProcessors` and `ArtifactStore` do, and writes what it changes.
Files have digests as names, so they are never changed, and an index says which of them count.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from logitship.client.serialization.artifact import Artifact, ArtifactBytes, missing_artifact
from logitship.client.serialization.processor_string import PickledProcessor, parse, to_json

from .artifact_store import ArtifactStore, StoredArtifact
from .registered_processors import RegisteredProcessors
from .registration import Registration, Upload, sendable
from .shared_lock import SharedLock, replace_file
from .tenant_registrations import TenantRegistrations


class SharedRegistrations(RegisteredProcessors):
    """Registered processors of all processes that use the folder.

    Args:
        directory: the folder, which is made if there is none.
        max_entries: most registrations, of all tenants together.
        max_bytes: most bytes of all registrations together.
    """

    def __init__(self, directory: Path, *, max_entries: int, max_bytes: int) -> None:
        super().__init__(max_entries=max_entries, max_bytes=max_bytes)
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._uploads: dict[str, Upload] = {}
        """The registered uploads, by the names of their files."""
        self._lock = SharedLock(directory / "index", self._read, self._write)

    def _read(self, content: bytes) -> None:
        self._tenants.clear()
        for tenant, state in orjson.loads(content).items():
            kept = [
                Registration(self._upload(file), version, size, created)
                for file, version, size, created in state["kept"]
            ]
            self._tenants[tenant].restore(kept, state["last"], state["last_dropped"])

    def _write(self) -> bytes:
        files = {id(upload): file for file, upload in self._uploads.items()}
        state = {tenant: self._state(own, files) for tenant, own in self._tenants.items()}
        used = {file for each in state.values() for file, *_ in each["kept"]}
        for file in self._uploads.keys() - used:
            del self._uploads[file]
            (self._directory / file).unlink(missing_ok=True)
        return orjson.dumps({tenant: each for tenant, each in state.items() if each["last"] or each["last_dropped"]})

    def _state(self, own: TenantRegistrations, files: dict[int, str]) -> dict[str, Any]:
        last, last_dropped = own.last_numbers()
        kept = [(self._file(each.upload, files), each.version, each.size, each.created) for each in own]
        return {"kept": kept, "last": last, "last_dropped": last_dropped}

    def _upload(self, file: str) -> Upload:
        if file not in self._uploads:
            fields = orjson.loads((self._directory / file).read_bytes())
            string = parse(fields.pop("string"))
            runnable = string.runnable if isinstance(string, PickledProcessor) else string
            self._uploads[file] = Upload(string=runnable, **fields)
        return self._uploads[file]

    def _file(self, upload: Upload, files: dict[int, str]) -> str:
        """Return the name of the file of an upload, written if it is new.

        Args:
            upload: the upload.
            files: names of the files of known uploads, by identity.
        """
        if id(upload) not in files:
            string = orjson.dumps(to_json(sendable(upload.string))).decode()
            content = orjson.dumps({**vars(upload), "string": string})
            file = files[id(upload)] = hashlib.sha256(content).hexdigest()
            replace_file(self._directory / file, content)
            self._uploads[file] = upload
        return files[id(upload)]


class SharedArtifacts(ArtifactStore):
    """Artifacts of all processes that use the folder. Processes that only load them use `ArtifactFiles`.

    Args:
        directory: the folder, which is made if there is none.
        max_bytes: most bytes of all artifacts together.
        max_used: most bytes of the artifacts of one class; None: no limit.
    """

    def __init__(self, directory: Path, *, max_bytes: int, max_used: int | None = None) -> None:
        super().__init__(max_bytes=max_bytes, max_used=max_used)
        directory.mkdir(exist_ok=True)
        self._directory = directory
        self._files: set[str] = set()
        """Digests of the artifacts of all tenants."""
        self._lock = SharedLock(directory / "index", self._read, self._write)

    def add(self, data: bytes, tenant: str = "") -> StoredArtifact:
        """As `ArtifactStore.add`, with a file for all processes."""
        artifact = Artifact.of(data)
        file = self._directory / artifact.digest
        if len(data) <= self._max_bytes and not file.exists():
            replace_file(file, data)  # before the lock is held: the event loops of all processes would wait for it
        try:
            return super().add(data, tenant)
        finally:
            with self._lock:
                if artifact.digest not in self._files:
                    file.unlink(missing_ok=True)

    def _read(self, content: bytes) -> None:
        tenants: dict[str, dict[str, int]] = orjson.loads(content)
        gone = [
            (digest, tenant) for tenant, own in self._own.items() for digest in own.keys() - tenants.get(tenant, {})
        ]
        for digest, tenant in gone:
            self._remove(digest, tenant)
        for tenant, created in tenants.items():
            own = self._own.setdefault(tenant, OrderedDict())
            for digest, time in created.items():
                if digest not in own:
                    self._keep(digest, tenant, time)
                own.move_to_end(digest)
        self._files = {digest for own in tenants.values() for digest in own}

    def _use(self, digest: str, tenant: str) -> Artifact:
        found = super()._use(digest, tenant)
        if digest in self._files:
            self._restore_file(digest)
        return found

    def _restore_file(self, digest: str) -> None:
        """Write the file of an artifact, if another process or a cleaner of temporary files has removed it."""
        file = self._directory / digest
        if not file.exists():
            replace_file(file, self._bytes[digest].data)

    def _keep(self, digest: str, tenant: str, created: int) -> None:
        known = self._bytes.get(digest)
        data = (self._directory / digest).read_bytes() if known is None else known.data
        self._shared(digest, data, tenant).owners[tenant] = created
        self._own[tenant][digest] = None

    def _write(self) -> bytes:
        owned = {digest for digest, each in self._bytes.items() if each.owners}
        for digest in owned - self._files:
            self._restore_file(digest)
        for digest in self._files - owned:
            (self._directory / digest).unlink(missing_ok=True)
        self._files = owned
        state = {
            tenant: {digest: self._bytes[digest].owners[tenant] for digest in own} for tenant, own in self._own.items()
        }
        return orjson.dumps({tenant: each for tenant, each in state.items() if each})


class ArtifactFiles:
    """The artifacts of a `SharedArtifacts`, for the processes of an engine that run classes.

    Args:
        directory: the folder; None: there are none.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def resolve(self, artifacts: Iterable[Artifact], tenant: str = "") -> tuple[Artifact, ...]:
        """Return the artifacts with their bytes.

        Raises:
            ProcessorLoadError: one is missing.
        """
        return tuple(each if each.content is not None else self._found(each) for each in artifacts)

    def _found(self, artifact: Artifact) -> Artifact:
        if self._directory is None:
            raise missing_artifact(artifact.digest)
        try:
            data = (self._directory / artifact.digest).read_bytes()
        except FileNotFoundError:
            raise missing_artifact(artifact.digest) from None
        return replace(artifact, content=ArtifactBytes(data))
