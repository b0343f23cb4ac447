"""A registered processor: the upload, and its registration under a name and version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from logitship.client.errors import ProcessorLoadError
from logitship.client.serialization.processor_string import (
    InstalledProcessor,
    PickledProcessor,
    ProcessorString,
    SourceProcessor,
)


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
