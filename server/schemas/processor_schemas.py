"""Request and response bodies of `/v1/processors`."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from typing_extensions import TypedDict

from .documented import documented
from .response_schemas import DIGEST

SOURCE = (
    "from logitship import CustomLogitProcessor\n\n\n"
    "class NoComma(CustomLogitProcessor):\n"
    "    def __call__(self, logits, custom_param_list=None):\n"
    '        logits[:, 28] = float("-inf")\n'
    "        return logits\n"
)

PROCESSOR_SCHEMA: dict[str, Any] = {
    "title": "Processor",
    "description": "A processor string.",
    "oneOf": [
        {
            "title": "Pickled",
            "type": "object",
            "properties": {
                "callable": {
                    "type": "string",
                    "description": "dill pickle of the class, in hexadecimal.",
                    "examples": ["80049550000000"],
                },
                "logitship": {
                    "type": "object",
                    "description": "Metadata from `to_str()`.",
                    "examples": [{"v": 1, "name": "NoComma", "python": "3.11", "dill": "0.4.0"}],
                },
            },
            "required": ["callable"],
        },
        {
            "title": "Source",
            "type": "object",
            "properties": {
                "source": {
                    "type": "string",
                    "description": "Source of a Python module that defines the class.",
                    "examples": [SOURCE],
                },
                "class_name": {
                    "type": "string",
                    "description": "Name of the processor's class in the module.",
                    "examples": ["NoComma"],
                },
            },
            "required": ["source", "class_name"],
        },
        {
            "title": "Installed",
            "type": "object",
            "properties": {
                "name": {
                    "type": "string",
                    "description": "Name of an installed processor, to register it under another name.",
                    "examples": ["disallowed_tokens"],
                },
            },
            "required": ["name"],
        },
    ],
}

ProcessorForm: TypeAlias = Literal["pickled", "source", "installed"]

_INFO: dict[str, object] = {
    "object": "processor",
    "id": "NoComma@2",
    "kind": "registered",
    "name": "NoComma",
    "version": 2,
    "digest": DIGEST,
    "description": "Forbids a token.",
    "params_schema": {"type": "object", "properties": {"token_id": {"type": "integer"}}},
    "is_mask": False,
    "form": "source",
    "python": None,
    "size": 164,
    "created": 1793500000,
}


@documented(_INFO)
class ProcessorObject(TypedDict):
    """A processor that requests can name."""

    object: Literal["processor"]
    """Object type."""
    id: str
    """Id for requests: `{"name": "<id>"}`. A registered processor's id is its name and version."""
    kind: Literal["installed", "registered"]
    """Installed by the operator, or registered by a client."""
    name: str
    """Name. A registered processor's name selects its newest version."""
    version: int | None
    """1, 2, …; null for an installed processor."""
    digest: str | None
    """Digest, as in receipts."""
    description: str
    """Description of its effect, from the class's docstring; may be empty."""
    params_schema: dict[str, Any] | None
    """JSON Schema of its parameters; null if its class has none."""
    is_mask: bool
    """True if it only forbids tokens. A mask runs before and after the request's other processors."""
    form: ProcessorForm | None
    """Form in which it was registered; null for an installed processor."""
    python: str | None
    """Python version of its bytecode; null if any version can run it."""
    size: int | None
    """Size in bytes, as counted against the registry's limit; null for an installed processor."""
    created: int | None
    """Registration time of this version, as a Unix timestamp; null for an installed processor."""


@documented({"source": SOURCE, "class_name": "NoComma", "source_note": None})
class ProcessorDetailsObject(ProcessorObject):
    """A processor with its code."""

    source: str | None
    """Source of the module that defines it; null if it is not available."""
    class_name: str | None
    """Name of the processor's class in the source."""
    source_note: str | None
    """Note on the source: why it is not available, or what it omits."""


@documented({"object": "list", "data": [_INFO]})
class ProcessorList(TypedDict):
    """A list of processors."""

    object: Literal["list"]
    """Object type."""
    data: list[ProcessorObject]
    """The installed processors, then those registered with this API key."""


@documented(
    {
        "id": "NoComma",
        "object": "processor",
        "deleted": True,
        "ids": ["NoComma@1", "NoComma@2"],
    }
)
class DeletedProcessor(TypedDict):
    """The deleted processors."""

    id: str
    """Id in the request."""
    object: Literal["processor"]
    """Object type."""
    deleted: Literal[True]
    """Always true."""
    ids: list[str]
    """Ids of the deleted versions."""
