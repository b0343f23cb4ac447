"""Artifacts: bytes of tensors and arrays that many classes may use, by their digest."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from logitship.client.errors import ProcessorLoadError

ARTIFACT_SIZE = 1 << 16
"""Minimum bytes of a tensor or array that `Client.register` uploads as an artifact."""


class ArtifactBytes:
    """The bytes of an artifact. A separate object, to which the server can hold a weak reference.

    Attributes:
        data: the bytes.
    """

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


@dataclass(frozen=True)
class Artifact:
    """Bytes that a class uses.

    Attributes:
        digest: `sha256:…` of the bytes.
        content: the bytes; None if the server has to find them.
    """

    digest: str
    content: ArtifactBytes | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, data: bytes) -> Artifact:
        """Return the artifact of these bytes."""
        return cls(digest_of(data), ArtifactBytes(data))


def digest_of(data: bytes) -> str:
    """Return the digest that identifies bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def raw_bytes(data: Any) -> bytes:
    """Return the bytes of a tensor, of an array in its own order, or of an object with a buffer.

    Raises:
        TypeError: it has no such bytes.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        if data.device.type != "cpu" or data.layout is not torch.strided:
            raise TypeError(f"data: expected a dense CPU tensor, got {data.layout} on {data.device}")
        return data.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()  # type: ignore[no-any-return]
    try:
        return memoryview(data).tobytes("A")
    except (TypeError, ValueError):  # the latter from arrays whose dtype has no buffer, such as dates
        raise TypeError(f"data: expected a tensor, an array or bytes, not {type(data).__name__}") from None


def bytes_of(artifacts: Iterable[Artifact]) -> dict[str, bytes]:
    """Return the bytes of artifacts by their digests.

    Raises:
        ProcessorLoadError: the bytes of an artifact are missing.
    """
    found: dict[str, bytes] = {}
    for artifact in artifacts:
        if artifact.content is None:
            raise missing_artifact(artifact.digest)
        found[artifact.digest] = artifact.content.data
    return found


def missing_artifact(digest: str) -> ProcessorLoadError:
    """Return the error for an artifact whose bytes are missing."""
    return ProcessorLoadError(
        f"the artifact {digest} is missing: upload its bytes with POST /v1/artifacts of logitship's server, which "
        "Client.register and Client.upload_artifact do, or send the class without artifacts: to_str()"
    )
