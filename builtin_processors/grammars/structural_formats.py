"""The formats of a structural tag, as pydantic models.

Names, fields and defaults are those of xgrammar 0.2, so that tags for SGLang and vLLM have the same meaning here.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    field_validator,
    model_validator,
)

from logitship.builtin_processors.params import plain_reason, shown

MAX_CHARS = 500
"""Limit of `any_text`. Beyond that, llguidance would have to build too many expressions in a step."""
MAX_TOKENS = (1 << 31) - 1
"""Maximum `max_tokens` of `any_text`, as in xgrammar."""
_MAX_END = 1024
"""Characters of an end."""
_MAX_LEVELS = 128
"""Nesting depth of objects and lists. A format takes one to three levels."""


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


Mark = Annotated[str, Field(min_length=1, max_length=1024)]
"""A trigger, a dispatch pattern, or a text that must not occur."""
Marks = Annotated[tuple[Mark, ...], Field(max_length=256, strict=False)]


class ConstString(_Record):
    """A fixed text."""

    type: Literal["const_string"] = "const_string"
    value: str


class Regex(_Record):
    """A text that matches a regular expression."""

    type: Literal["regex"] = "regex"
    pattern: str


class Grammar(_Record):
    """A text that matches an EBNF grammar."""

    type: Literal["grammar"] = "grammar"
    grammar: str


class JsonSchema(_Record):
    """JSON that matches a schema."""

    type: Literal["json_schema"] = "json_schema"
    json_schema: bool | dict[str, Any]
    style: str = "json"
    any_order: bool = False
    max_whitespace_cnt: Annotated[int, Field(ge=0, le=1000)] | None = None
    excludes: Marks = ()

    @model_validator(mode="after")
    def _check_supported(self) -> Self:
        if self.style != "json":
            raise ValueError(f'style {shown(self.style)} is not supported: write "json"')
        if self.any_order or self.excludes:
            raise ValueError(f"{'any_order' if self.any_order else 'excludes'} is not supported for json_schema")
        return self


class AnyText(_Record):
    """Any text."""

    type: Literal["any_text"] = "any_text"
    excludes: Marks = ()
    max_chars: Annotated[int, Field(ge=0, le=MAX_CHARS)] | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        if self.max_chars is not None and self.max_tokens is not None:
            raise ValueError("max_chars and max_tokens are not supported together")
        return self


class Token(_Record):
    """A token, by its id or its text in the vocabulary."""

    type: Literal["token"] = "token"
    token: int | str


class Concatenation(_Record):
    """Formats one after the other."""

    type: Literal["sequence"] = "sequence"
    elements: tuple[Format, ...] = Field(min_length=1, strict=False)


class Or(_Record):
    """One of several formats."""

    type: Literal["or"] = "or"
    elements: tuple[Format, ...] = Field(min_length=1, strict=False)


def _boundary(value: Any) -> Any:
    if isinstance(value, dict):
        return Token.model_validate(value)
    if isinstance(value, str):
        return ConstString(value=value)
    raise ValueError(f"expected a string or a token format, got {shown(value)}")


def _ends(value: Any) -> Any:
    if isinstance(value, list):
        if not 0 < len(value) <= 256 or not all(isinstance(each, str) for each in value):
            raise ValueError(f"expected a string, a list of up to 256 strings or a token format, got {shown(value)}")
        return tuple(ConstString(value=each) for each in value)
    return (_boundary(value),)


class Tag(_Record):
    """`begin content end`, with one or several alternative ends."""

    type: Literal["tag"] = "tag"
    begin: Annotated[ConstString | Token, PlainValidator(_boundary)]
    content: Format
    end: Annotated[tuple[ConstString | Token, ...], PlainValidator(_ends)]

    @property
    def end_texts(self) -> tuple[str, ...]:
        """The ends that are non-empty texts."""
        return tuple(end.value for end in self.end if isinstance(end, ConstString) and end.value)

    @model_validator(mode="after")
    def _check_that_it_ends(self) -> Self:
        if is_open(self.content) and not self.end_texts and not isinstance(self.end[0], Token):
            raise ValueError("free text needs an end that is not empty")
        if any(len(end) > _MAX_END for end in self.end_texts):
            raise ValueError(f"an end has at most {_MAX_END} characters")
        return self


class TriggeredTags(_Record):
    """Free text, in which a trigger must be followed by the rest of a tag that begins with it."""

    type: Literal["triggered_tags"] = "triggered_tags"
    triggers: Marks = Field(min_length=1)
    tags: tuple[Tag, ...] = Field(min_length=1, strict=False)
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Marks = ()

    @model_validator(mode="after")
    def _check_triggers(self) -> Self:
        groups = self.groups()
        idle = next((trigger for trigger, tags in groups.items() if not tags), None)
        if idle is not None:
            raise ValueError(f"no tag begins with the trigger {shown(idle)}")
        return self

    def groups(self) -> dict[str, list[Tag]]:
        """Return the tags of each trigger, with the trigger removed from their beginning."""
        groups: dict[str, list[Tag]] = {trigger: [] for trigger in self.triggers}
        for tag in self.tags:
            if isinstance(tag.begin, Token):
                raise ValueError("a tag that follows a trigger begins with a text, not with a token")
            begin = tag.begin.value
            found = [trigger for trigger in groups if begin.startswith(trigger)]
            if len(found) != 1:
                raise ValueError(f"the tag that begins with {shown(begin)} has {len(found)} triggers, not one")
            rest = ConstString(value=begin[len(found[0]) :])
            groups[found[0]].append(tag.model_copy(update={"begin": rest}))
        return groups


class TagsWithSeparator(_Record):
    """Tags, separated by a text."""

    type: Literal["tags_with_separator"] = "tags_with_separator"
    tags: tuple[Tag, ...] = Field(min_length=1, strict=False)
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Optional(_Record):
    """A format, or nothing."""

    type: Literal["optional"] = "optional"
    content: Format


class Plus(_Record):
    """A format, one or more times."""

    type: Literal["plus"] = "plus"
    content: Format


class Star(_Record):
    """A format, zero or more times."""

    type: Literal["star"] = "star"
    content: Format


class Repeat(_Record):
    """A format, `min` to `max` times; a `max` of -1 means no limit."""

    type: Literal["repeat"] = "repeat"
    min: Annotated[int, Field(ge=0)]
    max: Annotated[int, Field(ge=-1)]
    content: Format

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if -1 < self.max < self.min:
            raise ValueError(f"min is {self.min} and max is {self.max}")
        return self


class Dispatch(_Record):
    """Free text, in which a pattern must be followed by its format."""

    type: Literal["dispatch"] = "dispatch"
    rules: tuple[tuple[Mark, Format], ...] = Field(min_length=1, max_length=256, strict=False)
    loop: bool = True
    excludes: Marks = ()

    @field_validator("rules", mode="before")
    @classmethod
    def _check_rules(cls, value: Any) -> Any:
        return (
            tuple(tuple(rule) if isinstance(rule, list) else rule for rule in value) if type(value) is list else value
        )

    @model_validator(mode="after")
    def _check_patterns(self) -> Self:
        patterns = sorted(pattern for pattern, _ in self.rules)
        for shorter, longer in itertools.pairwise(patterns):
            if longer.startswith(shorter):
                raise ValueError(f"the pattern {shown(shorter)} begins another one, which would never be reached")
        return self


Format = Annotated[
    ConstString
    | Regex
    | Grammar
    | JsonSchema
    | AnyText
    | Token
    | Concatenation
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator
    | Optional
    | Plus
    | Star
    | Repeat
    | Dispatch,
    Field(discriminator="type"),
]


class StructuralTag(_Record):
    """A structural tag in the current form."""

    type: Literal["structural_tag"] = "structural_tag"
    format: Format


def _schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None


class _Structure(_Record):
    begin: str
    json_schema: Annotated[bool | dict[str, Any], BeforeValidator(_schema)] = Field(alias="schema")
    end: str = Field(max_length=_MAX_END)


class _Legacy(_Record):
    type: Literal["structural_tag"] = "structural_tag"
    structures: tuple[_Structure, ...] = Field(min_length=1, strict=False)
    triggers: Marks = Field(min_length=1)


def read_structural_tag(value: Any) -> Format:
    """Parse a structural tag.

    Args:
        value: parsed JSON: `{"format": {…}}`, or the older `{"structures": […], "triggers": […]}`.

    Raises:
        ValueError: it is malformed; names the field.
    """
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {shown(value)}")
    _check_depth(value)
    try:
        if "structures" not in value and "triggers" not in value:
            return StructuralTag.model_validate(value).format
        legacy = _Legacy.model_validate(value)
        return TriggeredTags.model_validate({"triggers": legacy.triggers, "tags": list(map(_tag, legacy.structures))})
    except ValidationError as error:
        raise ValueError(_explained(error)) from None


def is_open(part: Format) -> bool:
    """Return whether it ends with free text, which needs a following text to end it."""
    match part:
        case AnyText() | TriggeredTags() | Dispatch():
            return True
        case Concatenation():
            return is_open(part.elements[-1])
        case Or():
            return any(map(is_open, part.elements))
        case Optional() | Plus() | Star() | Repeat():
            return is_open(part.content)
    return False


def ends_with_grammar(part: Format) -> bool:
    """Return whether it may end with EBNF."""
    match part:
        case Grammar():
            return True
        case Concatenation():
            return ends_with_grammar(part.elements[-1])
        case Or():
            return any(map(ends_with_grammar, part.elements))
        case Tag():
            return ConstString(value="") in part.end and ends_with_grammar(part.content)
        case TagsWithSeparator():
            return any(map(ends_with_grammar, part.tags))
        case Optional() | Plus() | Star() | Repeat():
            return ends_with_grammar(part.content)
    return False


def _tag(structure: _Structure) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": structure.json_schema}
    return {"begin": structure.begin, "content": content, "end": structure.end}


def _check_depth(value: dict[str, Any]) -> None:
    """Check the nesting depth, without recursion. Excludes schemas, whose depth llguidance limits."""
    level: list[Any] = [value]
    for _ in range(_MAX_LEVELS):
        level = [
            inner
            for each in level
            for inner in (
                [value for key, value in each.items() if key not in ("json_schema", "schema")]
                if isinstance(each, dict)
                else each
            )
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise ValueError("it nests too deeply")


def _explained(error: ValidationError) -> str:
    """Return the first error with the path of its field, from which the format names added by pydantic are removed."""
    first = error.errors(include_url=False)[0]
    path = ""
    before: int | str = ""
    for each in first["loc"]:
        if isinstance(each, int):
            path += f"[{each}]"
        elif not (each in _TYPES and (isinstance(before, int) or before in ("content", "format"))):
            path += f".{each}" if path else each
        before = each
    match first["type"]:
        case "union_tag_invalid":
            reason = f"the format {shown(first.get('ctx', {}).get('tag'))} is not supported; known: {', '.join(_TYPES)}"
        case "union_tag_not_found" | "model_attributes_type":
            reason = "expected a format: an object with a type"
        case "extra_forbidden":
            reason = "unknown"
        case _:
            reason = plain_reason(first)
    return f"{path}: {reason}" if path else reason


_TYPES = (
    "const_string",
    "regex",
    "grammar",
    "json_schema",
    "any_text",
    "token",
    "sequence",
    "or",
    "tag",
    "triggered_tags",
    "tags_with_separator",
    "optional",
    "plus",
    "star",
    "repeat",
    "dispatch",
)
for _record in (Concatenation, Or, Tag, TriggeredTags, TagsWithSeparator, Optional, Plus, Star, Repeat, Dispatch):
    _record.model_rebuild()
StructuralTag.model_rebuild()
