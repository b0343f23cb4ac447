"""Use of a request's tools: the format of the calls, the constraint on the output, and the parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from logitship.server.engine.async_engine import AsyncEngine
from logitship.server.refusals import BadRequest
from logitship.server.schemas.openai_schemas import ChatCompletionRequest
from logitship.server.schemas.structured_outputs import Constraint
from logitship.server.schemas.tool_schemas import NamedToolChoice, Tool, ToolFields

from .tool_calls import JSON_ARRAY, TOOL_FORMATS, ToolCallParser, ToolFormat, format_of_template

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolUse:
    """The use of a request's tools.

    Attributes:
        format: how the model writes calls.
        tools: the functions that it may call.
        choice: `auto`, `required`, or `named`.
        parallel: whether it may call several times.
        whitespace_pattern: white space in the arguments, where they are constrained; None: the operator's.
    """

    format: ToolFormat
    tools: tuple[Tool, ...]
    choice: str
    parallel: bool
    whitespace_pattern: str | None = None

    def parser(self) -> ToolCallParser:
        """Return a parser for one continuation."""
        names = {tool.function.name for tool in self.tools}
        return ToolCallParser(self.format, names, parallel=self.parallel, only_calls=self.choice != "auto")

    @property
    def constraint(self) -> Constraint | None:
        """The constraint on the output."""
        calls = {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in self.tools],
            "separator": f"{self.format.separator} " if self.format.separator else self.format.space,
            "at_least_one": True,
            "stop_after_first": not self.parallel or self.choice == "named",
        }
        if self.choice != "auto":
            tag: dict[str, Any] = self._enclosed(calls)
        elif not any(tool.function.strict for tool in self.tools):
            return None
        elif self.format.opens:
            tag = {
                "type": "triggered_tags",
                "triggers": [self.format.opens],
                "tags": calls["tags"],
                "stop_after_first": not self.parallel,
            }
        else:
            tag = {"type": "or", "elements": [{"type": "regex", "pattern": r"([^\s{][\s\S]*)?"}, self._enclosed(calls)]}
        constraint = Constraint({"structural_tag": {"format": tag}}, "tools")
        space = self.whitespace_pattern
        return constraint if space is None else constraint.with_whitespace(space, "whitespace_pattern")

    def _tag(self, tool: Tool) -> dict[str, Any]:
        free = self.choice == "auto" and not tool.function.strict
        schema = _ANY_OBJECT if free else tool.function.parameters
        return self.format.tag(tool.function.name, {"type": "json_schema", "json_schema": schema})

    def _enclosed(self, calls: dict[str, Any]) -> dict[str, Any]:
        """Return several calls with the text around all of them."""
        if not (self.format.separator and self.format.opens):
            return calls
        around = ({"type": "const_string", "value": value} for value in (self.format.opens, self.format.closes))
        return {"type": "sequence", "elements": [next(around), calls, next(around)]}


def tool_use_of(engine: AsyncEngine, body: ChatCompletionRequest) -> ToolUse | None:
    """Return the use of a request's tools, or None if the model may call none.

    Raises:
        BadRequest: names `tools` or another field.
    """
    tools = tuple(body.callable_tools)
    if not tools:
        return None
    known = _known_format(engine)
    choice = "named" if isinstance(body.tool_choice, NamedToolChoice) else str(body.tool_choice)
    check_template_shows_tools(engine, body)
    if choice == "auto" and known is None:
        raise BadRequest(
            "tools: the format in which this model writes calls is unknown: start the server with --tool-call-parser, "
            'or set tool_choice to "required" or the name of a function',
            param="tools",
        )
    if (other := next(body.constraints(), None)) is not None:
        raise BadRequest(
            f'{other.at}: cannot be combined with tools: leave one out, or set tool_choice to "none"', param=other.at
        )
    return ToolUse(known or JSON_ARRAY, tools, choice, body.parallel_tool_calls, body.whitespace_pattern)


def check_template_shows_tools(engine: AsyncEngine, body: ToolFields) -> None:
    """Refuse tools that the model shall choose from, but that the chat template does not show to it.

    Raises:
        BadRequest: names `tools`.
    """
    if body.callable_tools and body.tool_choice == "auto" and not engine.tokenizer.template_uses("tools"):
        raise BadRequest(
            'tools: the chat template of this model does not support tools; set tool_choice to "required" or the name '
            "of a function to constrain the output to calls",
            param="tools",
        )


def _known_format(engine: AsyncEngine) -> ToolFormat | None:
    name = engine.config.tool_call_parser
    return format_of_template(engine.tokenizer) if name is None else TOOL_FORMATS[name]
