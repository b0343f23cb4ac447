"""Structured output fields of OpenAI, SGLang and vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PlainValidator, model_validator

from logitship.builtin_processors.grammar import MAX_GRAMMAR_LENGTH, WITH_JSON, GrammarProcessor
from logitship.client.serialization.processor_string import InstalledProcessor
from logitship.server.refusals import BadRequest
from logitship.server.requests.messages import ProcessorRequest

from .field_rules import JSON_SCHEMA_RULES, STRUCTURED_OUTPUTS_RULES
from .request_schema import FieldError, Id, RequestModel, check_texts, texts

GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_LENGTH)]
"""A regular expression, a grammar, or JSON text."""

MAX_CHOICES = 1 << 14
"""Most texts of a choice, and structures and triggers of a structural tag. `MAX_GRAMMAR_LENGTH` bounds their total."""
Choices = Annotated[
    list[str],
    PlainValidator(
        texts(MAX_CHOICES, MAX_GRAMMAR_LENGTH),
        json_schema_input_type=Annotated[list[GrammarText], Field(max_length=MAX_CHOICES)],
    ),
]


def _schema(value: Any) -> Any:
    if isinstance(value, str):
        check_texts([value], MAX_GRAMMAR_LENGTH)
    if isinstance(value, dict | bool | str):
        return value
    raise ValueError("must be a JSON schema: an object, true, or its JSON text")


Schema = Annotated[
    dict[str, Any] | bool | str, PlainValidator(_schema, json_schema_input_type=dict[str, Any] | bool | GrammarText)
]
"""A JSON schema, or its JSON text."""


_EXAMPLE_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_EXAMPLE_GRAMMAR = 'root ::= "yes" | "no"'
_EXAMPLE_TAG = '{"type": "structural_tag", "format": {"type": "regex", "pattern": "[a-z]+"}}'


@dataclass(frozen=True)
class Constraint:
    """The constraint on a request's output.

    Attributes:
        params: parameters of the installed processor `grammar`.
        at: path of the field in the request body.
    """

    params: dict[str, Any]
    at: str

    @property
    def processor(self) -> ProcessorRequest:
        """The processor that enforces it."""
        return ProcessorRequest(InstalledProcessor(GrammarProcessor.name), self.params, own=True)

    def with_whitespace(self, pattern: str, at: str) -> Constraint:
        """Return the constraint with a field `whitespace_pattern`.

        Args:
            pattern: its value.
            at: its path in the request body.

        Raises:
            BadRequest: the constraint is not about JSON, or has such a field of its own.
        """
        if self.params.keys().isdisjoint(WITH_JSON):
            raise BadRequest(f"{at}: requires JSON, but {self.at} is something else: leave one out", param=at)
        if "whitespace_pattern" in self.params:
            raise BadRequest(f"{at}: the white space in {self.at} is set there too: leave one out", param=at)
        return replace(self, params={**self.params, "whitespace_pattern": pattern})


class JsonSchemaFormat(RequestModel):
    """`response_format.json_schema`."""

    examples: ClassVar = {"name": "capital", "schema": _EXAMPLE_SCHEMA}
    rules: ClassVar = JSON_SCHEMA_RULES

    name: Id
    """Has no effect."""
    json_schema: Schema = Field(alias="schema")
    """The JSON schema."""


class ResponseFormat(RequestModel):
    """`response_format`."""

    examples: ClassVar = {
        "type": "json_schema",
        "json_schema": JsonSchemaFormat.examples,
        "format": {"type": "regex", "pattern": "[a-z]+"},
        "structures": [{"begin": "<call>", "schema": {"type": "object"}, "end": "</call>"}],
        "triggers": ["<call>"],
    }

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """`text`: no constraint. `json_object`: any JSON object. `json_schema`: JSON that matches the schema.
    `structural_tag`: free text with constrained tags."""
    json_schema: JsonSchemaFormat | None = None
    """Only with type `json_schema`."""
    format: dict[str, Any] | None = None
    """Only with type `structural_tag`: the tag in xgrammar's format."""
    structures: Annotated[list[dict[str, Any]], Field(max_length=MAX_CHOICES)] | None = None
    """Only with type `structural_tag`, in the legacy format: objects with `begin`, `schema` and `end`."""
    triggers: Choices | None = None
    """Required with `structures`: prefixes of their `begin` texts."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise FieldError("json_schema", 'is required with type "json_schema", and only allowed with it')
        given = [name for name in ("format", "structures", "triggers") if getattr(self, name) is not None]
        if self.type != "structural_tag":
            if given:
                raise FieldError(given[0], 'requires type "structural_tag"')
        elif given not in (["format"], ["structures", "triggers"]):
            raise ValueError('type "structural_tag" takes either format, or structures and triggers')
        return self

    def constraints(self, at: str) -> Iterator[Constraint]:
        """Yield at most one constraint."""
        if self.json_schema is not None:
            yield Constraint({"json_schema": self.json_schema.json_schema}, f"{at}.json_schema.schema")
        elif self.type == "json_object":
            yield Constraint({"json_object": True}, at)
        elif self.format is not None:
            yield Constraint({"structural_tag": {"format": self.format}}, at)
        elif self.structures is not None:
            yield Constraint({"structural_tag": {"structures": self.structures, "triggers": self.triggers}}, at)


class StructuredOutputs(RequestModel):
    """vLLM's `structured_outputs`."""

    examples: ClassVar = {
        "json": _EXAMPLE_SCHEMA,
        "json_object": True,
        "regex": "[A-Z][a-z]+",
        "choice": ["yes", "no"],
        "grammar": _EXAMPLE_GRAMMAR,
        "structural_tag": _EXAMPLE_TAG,
        "whitespace_pattern": "[ ]?",
        "disable_any_whitespace": True,
    }
    rules: ClassVar = STRUCTURED_OUTPUTS_RULES

    json_schema: Schema | None = Field(default=None, alias="json")
    """A JSON schema, or its JSON text."""
    json_object: bool = False
    """Any JSON object."""
    regex: GrammarText | None = None
    """A regular expression that the output matches."""
    choice: Choices | None = None
    """Texts, one of which becomes the output."""
    grammar: GrammarText | None = None
    """A grammar in EBNF or Lark."""
    structural_tag: GrammarText | None = None
    """A structural tag, as JSON text."""
    whitespace_pattern: GrammarText | None = None
    """Regular expression for the whitespace between JSON tokens."""
    disable_any_whitespace: bool = False
    """Allow no whitespace between JSON tokens."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        given = list(self.constraints(""))
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of json, json_object, regex, choice, grammar and structural_tag, not {len(given)}"
            )
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise FieldError("disable_any_whitespace", "contradicts whitespace_pattern")
        for name in ("whitespace_pattern", "disable_any_whitespace"):
            if getattr(self, name) not in (None, False) and given[0].params.keys().isdisjoint(WITH_JSON):
                raise FieldError(name, "requires json, json_object or structural_tag")
        return self

    def constraints(self, at: str) -> Iterator[Constraint]:
        """Yield the constraint: after validation, exactly one."""
        space = "" if self.disable_any_whitespace else self.whitespace_pattern
        white = {} if space is None else {"whitespace_pattern": space}
        if self.json_schema is not None:
            yield Constraint({"json_schema": self.json_schema} | white, f"{at}.json")
        if self.json_object:
            yield Constraint({"json_object": True} | white, f"{at}.json_object")
        for name, param in _STRUCTURED.items():
            if (value := getattr(self, name)) is not None:
                yield Constraint({param: value} | (white if param in WITH_JSON else {}), f"{at}.{name}")


class GrammarFields(RequestModel):
    """SGLang's fields, in `sampling_params` and in the bodies of the OpenAI routes."""

    examples: ClassVar = {
        "json_schema": json.dumps(_EXAMPLE_SCHEMA),
        "regex": "[A-Z][a-z]+",
        "ebnf": _EXAMPLE_GRAMMAR,
        "whitespace_pattern": "[ ]?",
    }

    json_schema: Schema | None = None
    """Structured output: JSON that matches this JSON schema, an object or JSON text."""
    regex: GrammarText | None = None
    """Structured output: text that matches this regular expression."""
    ebnf: GrammarText | None = None
    """Structured output: text in the language of this grammar, in EBNF or Lark."""
    whitespace_pattern: GrammarText | None = None
    """Structured output: regular expression for the white space between the parts of JSON. Default: a line break with
    up to 20 characters of indentation, or a space, unless the operator has set another one."""

    def constraints(self, at: str = "") -> Iterator[Constraint]:
        """Yield the constraints in these fields.

        Args:
            at: path of the object in the request body; "" for the body itself.
        """
        for name in ("json_schema", "regex", "ebnf"):
            if (value := getattr(self, name)) is not None:
                yield Constraint({name: value}, f"{at}.{name}" if at else name)


class OpenAIGrammarFields(GrammarFields):
    """SGLang's fields, and the additional ones of the OpenAI routes."""

    examples: ClassVar = {
        "response_format": {"type": "json_schema", "json_schema": JsonSchemaFormat.examples},
        "structured_outputs": {"choice": ["yes", "no"]},
        "guided_json": _EXAMPLE_SCHEMA,
        "guided_regex": "[A-Z][a-z]+",
        "guided_choice": ["yes", "no"],
        "guided_grammar": _EXAMPLE_GRAMMAR,
    }

    response_format: ResponseFormat | None = None
    """Structured output in OpenAI's format."""
    structured_outputs: StructuredOutputs | None = None
    """Structured output in vLLM's format."""
    guided_json: Schema | None = None
    """Deprecated alias of `structured_outputs.json` (vLLM)."""
    guided_regex: GrammarText | None = None
    """Deprecated alias of `structured_outputs.regex` (vLLM)."""
    guided_choice: Choices | None = None
    """Deprecated alias of `structured_outputs.choice` (vLLM)."""
    guided_grammar: GrammarText | None = None
    """Deprecated alias of `structured_outputs.grammar` (vLLM)."""

    def constraints(self, at: str = "") -> Iterator[Constraint]:
        """Yield the constraints in these fields."""
        yield from super().constraints(at)
        if self.response_format is not None:
            yield from self.response_format.constraints("response_format")
        if self.structured_outputs is not None:
            yield from self.structured_outputs.constraints("structured_outputs")
        for name, param in _GUIDED.items():
            if (value := getattr(self, name)) is not None:
                yield Constraint({param: value}, name)


_STRUCTURED: Mapping[str, str] = {
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_GUIDED: Mapping[str, str] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}


def constraint_of(fields: GrammarFields, at: str = "") -> Constraint | None:
    """Return the constraint on a request's output, or None.

    Args:
        fields: the object with the fields.
        at: its path in the request body.

    Raises:
        BadRequest: there are two constraints, or one does not go with `whitespace_pattern`.
    """
    given = list(fields.constraints(at))
    if len(given) > 1:
        raise BadRequest(
            f"{given[1].at}: a request may have only one constraint, and {given[0].at} is set too", param=given[1].at
        )
    if fields.whitespace_pattern is None:
        return given[0] if given else None
    space_at = f"{at}.whitespace_pattern" if at else "whitespace_pattern"
    if not given:
        raise BadRequest(f"{space_at}: requires a constraint to JSON, such as json_schema", param=space_at)
    return given[0].with_whitespace(fields.whitespace_pattern, space_at)
