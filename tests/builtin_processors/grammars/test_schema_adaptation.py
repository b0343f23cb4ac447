from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammars.check import make_matcher, make_tokenizer
from logitship.builtin_processors.grammars.grammar_source import from_json_schema
from logitship.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    hf = tokenizer.hf_tokenizer
    assert isinstance(hf, PreTrainedTokenizerFast)
    return make_tokenizer(hf.backend_tokenizer.to_str(), 260, [1])


def can_begin(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    matcher: LLMatcher = make_matcher(tokens, grammar)
    return matcher.consume_tokens(tokens.tokenize_str(text))


def accepts(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    matcher: LLMatcher = make_matcher(tokens, grammar)
    return matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting()


INTEGER = {"type": "integer"}
OPTIONAL = {"type": "object", "properties": {"end": INTEGER, "start": INTEGER}}
OPEN = OPTIONAL | {"additionalProperties": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"const": 9007199254740993}, "#/const: 9007199254740993 is not exact"),
        ({"enum": ["x", {"id": [1234567890123456789]}]}, "#/enum: 1234567890123456789 is not exact"),
        ({"properties": {"a/b": {"const": -9007199254740993}}}, "#/properties/a~1b/const: -9007199254740993"),
        ({"items": [{"maximum": 2**60 + 1}]}, "#/items/0/maximum: 1152921504606846977"),
        ({"type": "integer", "minimum": 2**64 - 1}, "#/minimum: 18446744073709551615"),
        # llguidance takes the bound itself as allowed: its neighbours have the same float.
        ({"type": "integer", "exclusiveMaximum": 2**60}, "#/exclusiveMaximum: 1152921504606846976"),
        ({"const": float(2**64)}, "#/const: 1.8446744073709552e"),  # a parser's integer of more than 64 bits
        ({"$ref": "#/x/y", "x": {"y": {"const": 2**53 + 1}}}, "#/x/y/const: 9007199254740993"),
    ],
    ids=str,
)
def test_inexact_numbers_are_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        from_json_schema(schema)


@pytest.mark.parametrize("number", [2**53, -(2**53), 2**60, 2**62 + 2**20, -1, 0, 0.1], ids=str)
def test_exact_numbers(tokens: LLTokenizer, number: float) -> None:
    grammar = from_json_schema({"enum": [number]})
    assert accepts(tokens, grammar, json.dumps(number))
    if isinstance(number, int):
        assert not any(accepts(tokens, grammar, str(number + difference)) for difference in (-1, 1))
    bounded = from_json_schema({"type": "integer", "maximum": 2**63 - 1})
    assert accepts(tokens, bounded, str(2**63 - 1))
    assert not accepts(tokens, bounded, str(2**63))
    # Neither a property's name nor data of a default is a keyword.
    from_json_schema({"properties": {"const": {"default": 2**53 + 1}}, "examples": [{"const": 2**53 + 1}]})


ESCAPED = [r'"\u00e9t\u00e9"', r'"\u65E5"', r'"\ud83d\ude00"', r'"\u0001"', r'"\"\\\b\f\n\r\t"']


@pytest.mark.parametrize("schema", [{}, {"type": "string"}, {"type": "string", "maxLength": 7}, {"items": {}}], ids=str)
def test_escapes_in_strings(tokens: LLTokenizer, schema: dict[str, Any]) -> None:
    grammar = from_json_schema(schema)
    texts = ESCAPED if "items" not in schema else [f"[{{{text}: {text}}}]" for text in ESCAPED]
    assert all(accepts(tokens, grammar, text) for text in texts)
    assert not accepts(tokens, grammar, r'"\ud83d"')


@pytest.mark.parametrize(
    ("schema", "start"),
    [
        ({"type": "string", "pattern": r"^(.|\n)*$"}, '"a'),
        ({"properties": {"a": {"type": "string", "pattern": "b"}}, "required": ["a"]}, '{"a": "b'),
        ({"patternProperties": {"": {"type": "string"}}}, '{"a'),
        ({"patternProperties": {"": {"type": "string"}}}, '{"a": "b'),
        (OPEN, '{"a'),
        ({"properties": {"a": INTEGER}, "required": ["a"], "additionalProperties": {}}, '{"a": 1, "b'),
    ],
    ids=str,
)
def test_no_escape_begins_that_cannot_end(tokens: LLTokenizer, schema: dict[str, Any], start: str) -> None:
    """Only the short escapes are allowed where texts are compared with patterns, or keys with each other."""
    grammar = from_json_schema(schema)
    assert can_begin(tokens, grammar, start + r"\n")
    assert not can_begin(tokens, grammar, start + r"\u")


def test_control_character_that_needs_an_escape(tokens: LLTokenizer) -> None:
    for schema in ({"const": "\x01"}, {"enum": [{"a": "\x01"}]}, {"properties": {"\x01": {}}, "required": ["\x01"]}):
        text = json.dumps(schema.get("const") or {"\x01": 1} if "enum" not in schema else {"a": "\x01"})
        assert accepts(tokens, from_json_schema({"anyOf": [schema, {"type": "string", "pattern": "^a$"}]}), text)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OPTIONAL, ['{"end": 1, "start": 2}', '{"start": 2}', "{}"], ['{"x', '{"start": 2,']),
        (OPTIONAL | {"required": ["z"]}, ['{"start": 1, "z": []}'], ['{"start": 1, "x']),
        ({"type": "array", "items": OPTIONAL}, ['[{"start": 2}]'], ['[{"x']),
        ({"$ref": "#/x/y", "x": {"y": OPTIONAL}}, ['{"start": 2}'], ['{"x']),
        ({"anyOf": [OPTIONAL, {"type": "null"}]}, ['{"start": 2}', "null"], ['{"x']),
        ({"description": "a", "allOf": [OPTIONAL]}, ['{"start": 2}'], ['{"x']),
        (OPTIONAL | {"additionalProperties": True}, ['{"start": 2, "x": [], "end": 1}'], ['{"start": "']),
        (OPTIONAL | {"unevaluatedProperties": True}, ['{"start": 2, "x": [], "end": 1}'], ['{"start": "']),
        (OPEN, ['{"y": "", "end": 2, "x": "", "start": 1}', "{}"], ['{"end": "', '{"x": 1']),
        (OPEN | {"required": ["start"]}, ['{"start": 1, "x": "", "end": 1}'], ['{"x', '{"e', '{"start": 1, "start"']),
        ({"allOf": [OPTIONAL, {"properties": {"x": INTEGER}}]}, ['{"start": 2, "x": 1}'], ['{"x": 1, "e', '{"y']),
        (
            {
                "$ref": "#/$defs/base",
                "$defs": {"base": OPTIONAL},
                "anyOf": [{"properties": {"x": INTEGER}, "required": ["x"]}, {"properties": {"y": INTEGER}}],
            },
            ['{"start": 2, "x": 1}', '{"end": 1, "y": 1}'],
            ['{"start": 1, "e', '{"z'],
        ),
        ({"allOf": [OPTIONAL, {"additionalProperties": True}]}, ['{"start": 2, "z": 1}'], []),
        ({"properties": {}}, ['{"x": 1}'], []),
        ({"type": "object", "required": ["a"]}, ['{"a": 1, "x": 1}'], ['{"x']),
    ],
    ids=str,
)
def test_keys_begin_only_if_they_may_end(
    tokens: LLTokenizer, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    grammar = from_json_schema(schema)
    assert all(accepts(tokens, grammar, text) for text in good)
    assert not any(can_begin(tokens, grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"allOf": [OPTIONAL, {"properties": {"x": INTEGER}}]}, '{"end": 1, "x": 1}'),
        ({"$defs": {"a": OPTIONAL}, "$ref": "#/$defs/a", "properties": {"x": INTEGER}}, '{"end": 1, "x": 1}'),
        (
            {"allOf": [{"properties": {"p": OPTIONAL}}, {"properties": {"p": {"properties": {"x": INTEGER}}}}]},
            '{"p": {"end": 1, "x": 1}}',
        ),
        (
            {"properties": {"a": INTEGER, "b": {"$ref": "#/properties/a"}}, "additionalProperties": True},
            '{"a": 1, "b": 2}',
        ),
        ({"type": "object", "properties": {"a": INTEGER}, "required": ["a"], "minProperties": 2}, '{"a": 1, "b": 1}'),
    ],
    ids=str,
)
def test_merged_schemas_do_not_exclude_keys_of_each_other(
    tokens: LLTokenizer, schema: dict[str, Any], text: str
) -> None:
    assert accepts(tokens, from_json_schema(schema), text)


LIST_OF_ITSELF = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "properties": {"x": INTEGER, "y": {"$ref": "#/properties/y"}}}, '{"x": 1}', '{"y'),
        ({"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": LIST_OF_ITSELF}}, "null", "["),
        ({"type": "array", "items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/a"}}}, "[]", "[1"),
    ],
    ids=str,
)
def test_nothing_begins_that_contains_itself(tokens: LLTokenizer, schema: dict[str, Any], good: str, bad: str) -> None:
    grammar = from_json_schema(schema)
    assert accepts(tokens, grammar, good)
    assert not can_begin(tokens, grammar, bad)


def test_adaptation_keeps_the_schema() -> None:
    schema = {"properties": {"a": {"anyOf": [OPEN, OPTIONAL]}}, "$defs": {"b": OPEN}}
    before = json.dumps(schema)
    from_json_schema(schema)
    assert json.dumps(schema) == before
