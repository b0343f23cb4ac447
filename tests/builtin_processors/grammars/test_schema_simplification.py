from __future__ import annotations

import random
import re
import warnings
from typing import Any

import pytest
from llguidance import LLTokenizer
from pydantic_core import SchemaValidator, core_schema
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammars.check import make_matcher, make_tokenizer
from logitship.builtin_processors.grammars.grammar_source import from_json_schema
from logitship.builtin_processors.grammars.schema_simplification import rust_pattern, simplified
from logitship.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    hf = tokenizer.hf_tokenizer
    assert isinstance(hf, PreTrainedTokenizerFast)
    return make_tokenizer(hf.backend_tokenizer.to_str(), 260, [1])


def accepts(tokens: LLTokenizer, schema: Any, text: str) -> bool:
    matcher = make_matcher(tokens, from_json_schema(schema))
    return matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting()


IDLE: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"type": "string", "uniqueItems": True},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": True},
    {"propertyNames": {"description": "any", "minLength": 0}},
    {"type": ["string", "null"], "propertyNames": {"pattern": "^a"}},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"unevaluatedProperties": False, "additionalProperties": {"type": "string"}},
    {"unevaluatedItems": {"title": "any"}},
    {"unevaluatedItems": False, "items": {"type": "string"}},
    {"dependentRequired": {}},
    {"dependentRequired": {"a": []}},
    {"dependentRequired": {"a": ["b"]}, "required": ["b"]},
    {"dependentSchemas": {"a": True}},
    {"dependencies": {"a": [], "b": {}}},
    {"not": False},
    {"not": {"not": {}}},
    {"minContains": 3},
    {"maxContains": 3},
    {"contains": {"type": "string"}, "minContains": 0},
    {"if": {"type": "string"}},
    {"if": {"type": "string"}, "then": {}, "else": True},
    {"then": {"type": "string"}, "else": False},
]


@pytest.mark.parametrize("idle", IDLE, ids=str)
@pytest.mark.parametrize("place", ["root", "properties", "items", "$defs", "anyOf"])
def test_keywords_that_exclude_nothing_are_left_out(tokens: LLTokenizer, idle: dict[str, Any], place: str) -> None:
    schema = {
        "root": idle,
        "properties": {"properties": {"uniqueItems": idle}},
        "items": {"items": [idle], "additionalItems": idle},
        "$defs": {"$ref": "#/$defs/not", "$defs": {"not": idle}},
        "anyOf": {"anyOf": [{"allOf": [idle]}, {"type": "null"}]},
    }[place]
    make_matcher(tokens, from_json_schema(schema))


ACTIVE: list[dict[str, Any]] = [
    {"uniqueItems": True},
    {"uniqueItems": True, "maxItems": 2},
    {"type": ["array", "null"], "uniqueItems": True},
    {"propertyNames": False},
    {"propertyNames": {"type": "number"}},
    {"propertyNames": {"minLength": 1}},
    {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
    {"unevaluatedProperties": {"type": "string"}},
    {"dependentRequired": {"a": ["b"]}, "required": ["a"]},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"not": {"type": "string"}},
    {"contains": {"type": "string"}, "minContains": 0, "maxContains": 2},
    {"contains": {"type": "string"}},
    {"if": {"type": "string"}, "else": False},
]


@pytest.mark.parametrize("active", ACTIVE, ids=str)
def test_keywords_that_exclude_something_are_refused(tokens: LLTokenizer, active: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(active)) if "type" not in active else "uniqueItems"):
        make_matcher(tokens, from_json_schema(active))


def test_data_is_not_taken_for_keywords() -> None:
    schema: dict[str, Any] = {
        "const": {"uniqueItems": False, "pattern": r"\<"},
        "enum": [{"not": False}],
        "default": {"minContains": 1},
        "examples": [{"propertyNames": True}],
        "properties": {"pattern": {"const": r"[[]"}, "if": True},
        "x": {"uniqueItems": False},
    }
    assert simplified(schema) == schema


def test_what_nothing_matches_is_excluded(tokens: LLTokenizer) -> None:
    never = {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}, "additionalProperties": False}
    assert accepts(tokens, never, '{"b":null}')
    assert not accepts(tokens, never, '{"a":1}')
    with pytest.raises(ValueError, match="no text matches it"):
        from_json_schema({"not": True})


def test_unevaluated_means_additional_where_nothing_else_evaluates(tokens: LLTokenizer) -> None:
    properties = {"properties": {"a": {"type": "null"}}, "type": "object", "unevaluatedProperties": False}
    assert accepts(tokens, properties, '{"a":null}')
    assert not accepts(tokens, properties, '{"b":null}')
    items = {"prefixItems": [{"type": "null"}], "type": "array", "unevaluatedItems": False}
    assert accepts(tokens, items, "[null]")
    assert not accepts(tokens, items, "[null,1]")


PATTERNS: list[tuple[str, list[str], list[str]]] = [
    (r"^[^[\]]*$", ["", "ab", "^"], ["[", "]"]),
    (r"^[a&&b]+$", ["a&b"], ["c"]),
    (r"^[+--]$", ["+", ",", "-"], [".", "*"]),
    (r"^\<a\>$", ["<a>"], ["a"]),
    (r"^[\b]\cJ\0$", ["\\b\\n\\u0000"], ["b"]),
    (r"^[^]$", ["a", "\\n"], [""]),
    (r"^\ud83d\ude00$", ["😀"], ["a"]),
    (r"^\é[\ü-\ý]$", ["éü"], ["é"]),
    (r"^\\[\\]$", ["\\\\\\\\"], ["\\\\"]),
    (r"^[\d-x]$", ["-", "x", "3"], ["a"]),
    (r"^[\p{L}-]\p{L}$", ["-é"], ["é-"]),
]


@pytest.mark.parametrize(("pattern", "good", "bad"), PATTERNS)
def test_patterns_of_ecma(tokens: LLTokenizer, pattern: str, good: list[str], bad: list[str]) -> None:
    # llguidance writes control characters as escapes, which the texts have too.
    schema = {"type": "string", "pattern": pattern}
    assert {text: accepts(tokens, schema, f'"{text}"') for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(tokens, schema, f'"{text}"') for text in bad} == dict.fromkeys(bad, False)


def test_names_of_pattern_properties_are_patterns(tokens: LLTokenizer) -> None:
    schema = {"type": "object", "patternProperties": {"^[^[]$": {"type": "null"}}, "additionalProperties": False}
    assert accepts(tokens, schema, '{"a":null}')
    assert not accepts(tokens, schema, '{"[":null}')


def test_random_sets_mean_what_they_mean_in_python() -> None:
    """Python's sets are those of ECMA-262, with these parts."""
    source = random.Random(3)
    parts = ["a", "c", "[", "&", "~", "-", "^", r"\]", r"\[", r"\-", r"\d", r"\w", "+", "/", ".", "é"]
    compared = 0
    while compared < 1500:
        pattern = f"^[{'^' * (source.random() < 0.3)}{''.join(source.choices(parts, k=source.randint(1, 5)))}]$"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = re.compile(pattern)
        except re.error:
            continue
        translated = SchemaValidator(core_schema.str_schema(pattern=rust_pattern(pattern)))
        for character in "abc[]&~-^+/.é,d5_":
            assert translated.isinstance_python(character) == bool(expected.match(character)), pattern
        compared += 1
