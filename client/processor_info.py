"""What a server says of the processors that a request can name: records, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

ProcessorKind: TypeAlias = Literal["installed", "registered"]


@dataclass(frozen=True, kw_only=True)
class ProcessorInfo:
    """A processor that a server has: a request asks for it by name and ships no code.

    Attributes:
        id: what a request says: `{"name": "<id>"}`. `Lipogram@2` is the second version of what was registered as
            `Lipogram`. An installed one has no versions: its id is its name.
        kind: `installed` by the operator, or `registered` by a client.
        name: its name; of a registered one it stands for the newest version.
        version: 1, 2, …; None for an installed one.
        digest: its identity, as in receipts; None where an older server does not say.
        description: what it does, in a sentence or two; "" if its class does not say.
        params_schema: JSON Schema of its parameters; None if its class has none.
        is_mask: it only forbids tokens, and does so before and after the request's other processors.
        form: how it was uploaded: `pickled`, `source`, or `installed` for another name of an installed one; None if it
            is installed.
        python: the minor version of Python whose bytecode it is, such as "3.11"; None if any version runs it, or if the
            string does not say.
        size: bytes that it counts for among the registered ones.
        created: when this version was registered, in seconds since 1970.
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
    """The same with its code.

    Attributes:
        source: Python text of the module that defines it; None where there is none to show.
        class_name: which class of it is the processor.
        source_note: what to know of `source`: why there is none, or what it leaves out.
    """

    source: str | None = None
    class_name: str | None = None
    source_note: str | None = None


def parse_processors(data: Any) -> list[ProcessorInfo]:
    """The answer of `GET /v1/processors`."""
    return [ProcessorInfo(**_fields(entry)) for entry in data["data"]]


def parse_processor(data: Any) -> ProcessorDetails:
    """The answer of `GET /v1/processors/{id}`."""
    code = {name: data[name] for name in ("source", "class_name", "source_note")}
    return ProcessorDetails(**_fields(data), **code)


def parse_deleted(data: Any) -> list[str]:
    """The answer of `DELETE /v1/processors/{id}`: the ids of what was deleted."""
    return [str(each) for each in data["ids"]]


def _fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What an entry has of `ProcessorInfo`. A server without a registry says less: its processors are installed."""
    fields = {name: entry[name] for name in ProcessorInfo.__dataclass_fields__ if name in entry}
    return {"id": entry["name"], "kind": "installed", **fields}
