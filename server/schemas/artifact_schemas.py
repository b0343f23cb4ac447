"""Response bodies of `/v1/artifacts`."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from .documented import documented
from .response_schemas import DIGEST

_ARTIFACT: dict[str, object] = {"object": "artifact", "digest": DIGEST, "size": 200000, "created": 1793500000}


@documented(_ARTIFACT)
class ArtifactObject(TypedDict):
    """Bytes that processor strings refer to."""

    object: Literal["artifact"]
    """Object type."""
    digest: str
    """`sha256:` and the SHA-256 of the bytes."""
    size: int
    """Number of bytes."""
    created: int
    """Time of its first upload, as a Unix timestamp."""


@documented({"object": "list", "data": [_ARTIFACT]})
class ArtifactList(TypedDict):
    """A list of artifacts."""

    object: Literal["list"]
    """Object type."""
    data: list[ArtifactObject]
    """The artifacts that were uploaded with this API key."""


@documented({"digest": DIGEST, "object": "artifact", "deleted": True})
class DeletedArtifact(TypedDict):
    """The answer to a delete."""

    digest: str
    """Digest of the artifact."""
    object: Literal["artifact"]
    """Object type."""
    deleted: Literal[True]
    """Always true."""
