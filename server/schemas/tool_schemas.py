"""Tools in requests: functions that the model may call, and the calls of earlier messages."""

from __future__ import annotations

import json
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, ValidationInfo, model_validator

from logitship.server.requests.body_limits import scan_json

from .field_rules import FUNCTION_RULES, TOOL_RULES
from .request_schema import FieldError, Id, RequestModel, check_texts

MAX_TOOLS = 1024
"""Most tools of a request, and calls of a message."""
MAX_TOOL_TEXT = 1 << 20
"""Most characters of a function's description, and of a call's arguments."""
MAX_TOOL_DEPTH = 100
"""Deepest nesting of a function's parameters, and of a call's arguments as an object. orjson writes 254 levels."""
MAX_ARGUMENT_ELEMENTS = 1 << 16
"""Most keys and values of a call's arguments as text that are decoded, in one go; see `scan_json`."""
_TOO_DEEP = f"is nested deeper than {MAX_TOOL_DEPTH} levels"
_ANY_ARGUMENTS = {"type": "object", "properties": {}}

_EXAMPLE_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class FunctionDefinition(RequestModel):
    """`tools[].function`."""

    examples: ClassVar = {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": _EXAMPLE_PARAMETERS,
        "strict": True,
    }
    rules: ClassVar = FUNCTION_RULES

    name: Annotated[Id, Field(min_length=1)]
    """Name of the function."""
    description: Annotated[str, Field(max_length=MAX_TOOL_TEXT)] | None = None
    """Description for the model."""
    parameters: dict[str, Any] = Field(default=_ANY_ARGUMENTS)
    """JSON schema of its arguments."""
    strict: bool = False
    """With `tool_choice` auto: constrain the arguments to the schema. With any other they always are."""

    @property
    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        return {"name": self.name, "description": self.description or "", "parameters": self.parameters}

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if _is_too_deep(self.parameters):
            raise FieldError("parameters", _TOO_DEEP)
        return self


class Tool(RequestModel):
    """A tool of a request."""

    examples: ClassVar = {"type": "function", "function": FunctionDefinition.examples}
    rules: ClassVar = TOOL_RULES

    type: Literal["function"]
    """The only type: others run on OpenAI's servers."""
    function: FunctionDefinition
    """The function."""


class FunctionName(RequestModel):
    """`tool_choice.function`."""

    examples: ClassVar = {"name": "get_weather"}

    name: Id
    """Name of the function."""


class NamedToolChoice(RequestModel):
    """`tool_choice` with the name of a function."""

    examples: ClassVar = {"type": "function", "function": {"name": "get_weather"}}

    type: Literal["function"]
    """The only type."""
    function: FunctionName
    """The function."""


_ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def _tool_choice(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, dict):
        return NamedToolChoice.model_validate(value, context=info.context)
    if value in ("none", "auto", "required"):
        return value
    raise ValueError('must be "none", "auto", "required", or an object with the name of a function')


class ToolFields(RequestModel):
    """Fields about tools."""

    examples: ClassVar = {"tools": [Tool.examples], "tool_choice": "auto"}

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default=[])
    """Functions that the model may call."""
    tool_choice: Annotated[_ToolChoice, PlainValidator(_tool_choice, json_schema_input_type=_ToolChoice)] = "auto"
    """none: as if there were no tools; auto: the model decides; required: it calls at least one; or the name of a
    function, which it calls."""

    @property
    def callable_tools(self) -> list[Tool]:
        """The tools that the model may call in its answer."""
        choice = self.tool_choice
        if isinstance(choice, NamedToolChoice):
            return [tool for tool in self.tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else self.tools

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """The tools for the chat template."""
        if self.tool_choice == "none":
            return []
        return [{"type": "function", "function": tool.function.for_template} for tool in self.tools]

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise FieldError("tools", "must have different names")
        if self.tool_choice in ("none", "auto"):
            return self
        if not self.tools:
            raise FieldError("tool_choice", "requires tools")
        if not self.callable_tools:
            raise FieldError("tool_choice", "names a function that is not in tools")
        return self


def _arguments(value: Any) -> Any:
    if isinstance(value, str):
        check_texts([value], MAX_TOOL_TEXT)
    if isinstance(value, dict | str):
        return value
    raise ValueError("must be a JSON object, or its JSON text")


class CalledFunction(RequestModel):
    """`messages[].tool_calls[].function`."""

    examples: ClassVar = {"name": "get_weather", "arguments": '{"city": "Paris"}'}

    name: Id
    """Name of the function."""
    arguments: Annotated[
        dict[str, Any] | str,
        PlainValidator(
            _arguments, json_schema_input_type=dict[str, Any] | Annotated[str, Field(max_length=MAX_TOOL_TEXT)]
        ),
    ]
    """Its arguments: an object, as JSON text (OpenAI) or as it is (SGLang). Text that is no JSON object, as a model may
    write it, is passed on as it is."""

    @property
    def for_template(self) -> dict[str, Any] | str:
        """The form that chat templates expect: an object. Text if it is none, as an answer may have it."""
        if isinstance(self.arguments, dict):
            return self.arguments
        scan = scan_json(self.arguments.encode(), MAX_ARGUMENT_ELEMENTS)
        if scan.elements > MAX_ARGUMENT_ELEMENTS or scan.max_depth > MAX_TOOL_DEPTH:
            return self.arguments
        try:
            # Unlike orjson, it keeps integers of more than 64 bits.
            decoded = json.loads(self.arguments or "{}")
            json.dumps(decoded, ensure_ascii=False).encode()
        except ValueError:  # also of unpaired surrogates, which are no text
            return self.arguments
        return decoded if isinstance(decoded, dict) else self.arguments

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        if isinstance(self.arguments, dict) and _is_too_deep(self.arguments):
            raise FieldError("arguments", _TOO_DEEP)
        return self


def _is_too_deep(value: dict[str, Any]) -> bool:
    """Return whether JSON is nested too deeply. Goes level by level: recursion would be too deep as well."""
    level: list[Any] = [value]
    for _ in range(MAX_TOOL_DEPTH):
        inner = chain.from_iterable(each.values() if isinstance(each, dict) else each for each in level)
        level = [each for each in inner if isinstance(each, dict | list)]
    return bool(level)


class MessageToolCall(RequestModel):
    """`messages[].tool_calls[]`: a call that an earlier answer made."""

    examples: ClassVar = {"id": "call_1", "type": "function", "function": CalledFunction.examples, "index": 0}

    id: Id | None = None
    """Id, which the message with the result repeats."""
    type: Literal["function"] = "function"
    """The only type."""
    function: CalledFunction
    """The function and its arguments."""
    index: int | None = None
    """Has no effect."""

    @property
    def for_template(self) -> dict[str, Any]:
        """The form that chat templates expect."""
        function = {"name": self.function.name, "arguments": self.function.for_template}
        call: dict[str, Any] = {"type": self.type, "function": function}
        return call if self.id is None else {**call, "id": self.id}

    @property
    def num_characters(self) -> int:
        """Length as JSON."""
        return len(json.dumps(self.for_template, ensure_ascii=False))
