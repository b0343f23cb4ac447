"""The body and the answers of `/v1/processors`, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

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
                    "description": "dill pickle of the class, in hexadecimal digits.",
                    "examples": ["80049550000000"],
                },
                "logitship": {
                    "type": "object",
                    "description": "What `to_str()` says of it.",
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
                    "description": "Text of a Python module that defines the class.",
                    "examples": [SOURCE],
                },
                "class_name": {
                    "type": "string",
                    "description": "Which class of it is the processor.",
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
                    "description": "Of an installed processor, to give it another name.",
                    "examples": ["disallowed_tokens"],
                },
            },
            "required": ["name"],
        },
    ],
}

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
    """The type."""
    id: str
    """What a request says: `{"name": "<id>"}`; of a registered one, its name and version."""
    kind: Literal["installed", "registered"]
    """Installed by the operator, or registered by a client."""
    name: str
    """Its name; of a registered one it stands for the newest version."""
    version: int | None
    """1, 2, …; null for an installed one."""
    digest: str | None
    """Its identity, as in receipts."""
    description: str
    """What it does; empty if its class does not say."""
    params_schema: dict[str, Any] | None
    """JSON Schema of its parameters; null if its class has none."""
    is_mask: bool
    """It only forbids tokens, and does so before and after the request's other processors."""
    form: Literal["pickled", "source", "installed"] | None
    """How it was uploaded; null for an installed one."""
    python: str | None
    """The version of Python whose bytecode it is; null if any version runs it."""
    size: int | None
    """Bytes that it counts for among the registered ones; null for an installed one."""
    created: int | None
    """When this version was registered, in seconds since 1970; null for an installed one."""


@documented({"source": SOURCE, "class_name": "NoComma", "source_note": None})
class ProcessorDetailsObject(ProcessorObject):
    """A processor with its code."""

    source: str | None
    """Python text of the module that defines it; null where there is none to show."""
    class_name: str | None
    """Which class of it is the processor."""
    source_note: str | None
    """What to know of the source: why there is none, or what it leaves out."""


@documented({"object": "list", "data": [_INFO]})
class ProcessorList(TypedDict):
    """The processors."""

    object: Literal["list"]
    """The type."""
    data: list[ProcessorObject]
    """The installed ones, then those registered with this API key."""


@documented(
    {
        "id": "NoComma",
        "object": "processor",
        "deleted": True,
        "ids": ["NoComma@1", "NoComma@2"],
    }
)
class DeletedProcessor(TypedDict):
    """What was deleted."""

    id: str
    """What the request named."""
    object: Literal["processor"]
    """The type."""
    deleted: Literal[True]
    """It is deleted."""
    ids: list[str]
    """The versions that were."""
