"""A registered processor: the upload, and its registration under a name and version."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.artifact import Artifact
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
)

_OTHER_PYTHON = "0.0"
"""A version whose pickles no Python runs."""
_DIGEST = re.compile(rb"sha256:[0-9a-f]{64}")
"""The name of an artifact in a pickle."""


@dataclass(frozen=True)
class Upload:
    """A processor that a tenant registers.

    Attributes:
        name: name to register it under.
        digest: digest of the code that runs.
        string: the string of exactly this code.
        description: what it does, in a sentence or two; "" if its class has no docstring.
        params_schema: JSON Schema of its parameters, or None.
    """

    name: str
    digest: str
    string: ProcessorString
    description: str = ""
    params_schema: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Size in bytes, as counted against the limit.

        Raises:
            ProcessorLoadError: `params_schema` is nested too deeply to be measured.
        """
        return _string_size(self.string) + len(self.description.encode()) + _schema_size(self.params_schema)


@dataclass(frozen=True)
class Registration:
    """An upload that is kept.

    Attributes:
        upload: the upload.
        version: its number under its name: 1, 2, …
        size: bytes, as counted against the limit.
        created: time of the first upload of this version, in seconds since 1970.
    """

    upload: Upload
    version: int
    size: int
    created: int

    @property
    def id(self) -> str:
        """`name@version`."""
        return f"{self.upload.name}@{self.version}"


def shared_string(strings: Sequence[ProcessorString]) -> ProcessorString:
    """Return the string of a digest for tenants that did not register it.

    It has what the digest identifies, the code, and no more: the lines for tracebacks, for example, could be anything.
    The list of artifacts is not part of the digest either, but the code names those that it reads.

    Args:
        strings: all registered strings of the digest.
    """
    first = strings[0]
    if not isinstance(first, PickledProcessor | SourceProcessor):
        return first
    listed: dict[str, Artifact] = {}
    for string in strings:
        for each in string.artifacts if isinstance(string, PickledProcessor | SourceProcessor) else ():
            if each.content is not None or each.digest not in listed:
                listed[each.digest] = each
    code = first.payload if isinstance(first, PickledProcessor) else first.captured
    named = dict.fromkeys(each.decode() for each in _DIGEST.findall(code)) if listed else ()
    artifacts = tuple(listed[digest] for digest in named if digest in listed)
    if isinstance(first, PickledProcessor):
        return PickledProcessor(first.payload, artifacts=artifacts)
    return SourceProcessor(first.source, first.class_name, first.captured, artifacts=artifacts)


def sendable(string: ProcessorString) -> ProcessorString:
    """Return a string of the same code that can be written as text, to be parsed where this Python runs.

    Source with values that it does not recreate has no form of its own: it stands beside a pickle that does not run.
    """
    if not isinstance(string, SourceProcessor) or not string.captured:
        return string
    shared = b"".join(each.content.data for each in string.artifacts if each.content is not None)
    uploaded = tuple(each for each in string.artifacts if each.content is None)
    return PickledProcessor(shared or b"\0", string.python or _OTHER_PYTHON, source=string, artifacts=uploaded)


def _string_size(string: ProcessorString) -> int:
    match string:
        case SourceProcessor():
            # Uploaded artifacts count in their own store.
            shared = sum(len(each.content.data) for each in string.artifacts if each.content is not None)
            return len(string.source.encode()) + len(string.captured) + shared
        case PickledProcessor():
            described = 0 if string.source is None else _string_size(string.source)
            listed = 0 if string.listing is None else len(string.listing.text.encode())
            return len(string.payload) + described + listed + _schema_size(string.params_schema)
        case InstalledProcessor():
            return len(string.name)
        case _:
            raise TypeError(f"a registration cannot hold a {type(string).__name__}")


def _schema_size(schema: Mapping[str, Any] | None) -> int:
    if schema is None:
        return 0
    try:
        return len(orjson.dumps(schema))
    except orjson.JSONEncodeError as error:  # orjson parses deeper nesting than it writes
        raise ProcessorLoadError(f"'params_schema': {error}") from None
