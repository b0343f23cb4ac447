"""Records of the processors on a server, and the parsing of its responses about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ProcessorKind: TypeAlias = Literal["installed", "registered"]


@dataclass(frozen=True, kw_only=True)
class ProcessorInfo:
    """A processor on a server: a request uses it by name and ships no code.

    Attributes:
        id: value of `{"name": "<id>"}` in a request. `Lipogram@2` is the second version registered as `Lipogram`. An
            installed processor has no versions: its id is its name.
        kind: `installed` by the operator, or `registered` by a client.
        name: its name; for a registered processor it selects the newest version.
        version: 1, 2, …; None for an installed processor.
        digest: its identity, as in receipts; None from older servers.
        description: its purpose, in a sentence or two; "" if its class has no description.
        params_schema: JSON Schema of its parameters; None if its class has none.
        is_mask: whether it only forbids tokens, and runs before and after the request's other processors.
        form: how it was uploaded: `pickled`, `source`, or `installed` for an alias of an installed processor; None if
            it is installed.
        python: Python minor version of its bytecode, such as "3.11"; None if any version runs it, or if the string
            does not say.
        size: bytes that count towards the limit on registered processors.
        created: when this version was registered, as a Unix timestamp.
    """

    id: str
    kind: ProcessorKind
    name: str
    version: int | None = None
    digest: str | None = None
    description: str = ""
    params_schema: Mapping[str, Any] | None = None
    is_mask: bool = False
    form: str | None = None
    python: str | None = None
    size: int | None = None
    created: int | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessorDetails(ProcessorInfo):
    """A processor on a server, with its code.

    Attributes:
        source: Python text of the module that defines it; None if it is not available.
        class_name: name of the processor class in it.
        source_note: note on `source`: why it is missing, or what it omits.
    """

    source: str | None = None
    class_name: str | None = None
    source_note: str | None = None


def parse_processors(data: Any) -> list[ProcessorInfo]:
    """Parse the response of `GET /v1/processors`."""
    return [ProcessorInfo(**_fields(entry)) for entry in data["data"]]


def parse_processor(data: Any) -> ProcessorDetails:
    """Parse the response of `GET /v1/processors/{id}`."""
    code = {name: data[name] for name in ("source", "class_name", "source_note")}
    return ProcessorDetails(**_fields(data), **code)


def parse_deleted(data: Any) -> list[str]:
    """Parse the response of `DELETE /v1/processors/{id}`: the ids of the deleted processors."""
    return [str(each) for each in data["ids"]]


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ProcessorInfo` in an entry. On a server without a registry all processors are installed."""
    fields = {name: entry[name] for name in ProcessorInfo.__dataclass_fields__ if name in entry}
    return {"id": entry["name"], "kind": "installed", **fields}
