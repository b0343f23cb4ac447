from __future__ import annotations

import itertools
import json
import random
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammars.check import make_matcher, make_tokenizer
from logitship.builtin_processors.grammars.exclusive_schemas import has_exclusive_branches
from logitship.builtin_processors.grammars.grammar_source import from_json_schema
from logitship.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    hf = tokenizer.hf_tokenizer
    assert isinstance(hf, PreTrainedTokenizerFast)
    return make_tokenizer(hf.backend_tokenizer.to_str(), 260, [1])


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "kitten": {"$ref": "#/$defs/pet"}}}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "puppy": {"$ref": "#/$defs/pet"}}}
REQUIRED = {"required": ["kind"]}
PETS = {
    "cat": CAT | REQUIRED,
    "dog": DOG | REQUIRED,
    "pet": {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]},
}
EXCLUSIVE: dict[str, dict[str, Any]] = {
    "a reference or null": {"oneOf": [{"$ref": "#/$defs/cat"}, {"type": "null"}], "$defs": PETS},
    "references that a constant tells apart": {"$ref": "#/$defs/pet", "$defs": PETS},
    "a constant that is required outside": {"oneOf": [CAT, DOG], "required": ["kind"], "$defs": PETS},
    "a reference into a list": {
        "oneOf": [{"type": "string"}, {"oneOf": [{"$ref": "#/oneOf/0/allOf/0"}]}, {"type": "null"}]
    }
    | {
        "oneOf": [{"allOf": [{"type": "null"}]}, {"allOf": [{"type": "string"}, {"$ref": "#/$defs/x"}]}],
        "$defs": {"x": {}},
    },
    "ranges": {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "number", "minimum": 3.5}]},
    "ranges that touch": {"oneOf": [{"type": "number", "exclusiveMaximum": 3}, {"type": "number", "minimum": 3}]},
    "a constant beyond a range": {"oneOf": [{"const": -1}, {"type": "integer", "minimum": 0}]},
    "constants": {"oneOf": [{"const": 1}, {"const": True}, {"const": "1"}, {"enum": [None, 2.5]}, {"const": [1]}]},
    "lengths": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}]},
    "a text shorter than others": {"oneOf": [{"const": "a"}, {"type": "string", "minLength": 2}]},
    "numbers of items": {"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]},
    "items": {
        "oneOf": [{"type": "array", "items": {"type": each}, "minItems": 1} for each in ("string", "integer", "null")]
    },
    "a property that the other forbids": {
        "oneOf": [
            {"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": False}
            for name in "ab"
        ]
    },
    "alternatives": {"oneOf": [{"anyOf": [{"type": "null"}, {"type": "integer"}]}, {"type": ["string", "boolean"]}]},
}


@pytest.mark.parametrize("name", EXCLUSIVE)
def test_branches_that_exclude_each_other_are_accepted(tokens: LLTokenizer, name: str) -> None:
    schema = EXCLUSIVE[name]
    assert has_exclusive_branches(schema)
    make_matcher(tokens, from_json_schema(schema))


OVERLAPPING: dict[str, dict[str, Any]] = {
    "schemas of any arrays": {"oneOf": [{"type": "array", "items": [True], "minItems": 1}] * 2},
    "anything": {"oneOf": [True, True]},
    "lengths": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "string", "minLength": 3}]},
    "references": {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "string"}], "$defs": {"a": {"maxLength": 1}}},
    "integers are numbers": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "constants that are optional": {"oneOf": [CAT, DOG], "$defs": PETS},
    "a reference that is unknown": {"oneOf": [{"$ref": "other"}, {"$ref": "another"}]},
    "a branch that is both": {"oneOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "in a schema that is referred to": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"properties": {"b": {"oneOf": [{}, {"type": "null"}]}}}},
    },
    "another name that a pattern allows": {
        "oneOf": [
            {"type": "object", "required": ["a"]},
            {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False},
        ]
    },
}


@pytest.mark.parametrize("name", OVERLAPPING)
def test_branches_that_may_overlap_are_not_taken_for_any_of(name: str) -> None:
    assert not has_exclusive_branches(OVERLAPPING[name])


def test_one_of_that_is_not_reached_does_not_matter() -> None:
    unused = {"oneOf": [{}, {}]}
    assert has_exclusive_branches({"oneOf": EXCLUSIVE["ranges"]["oneOf"], "$defs": {"unused": unused}, "const": unused})


def test_hostile_schemas_are_given_up_in_time() -> None:
    many = {"anyOf": [{"type": "null"}, {"type": "string"}]}
    product = {"oneOf": [{"allOf": [dict(many) for _ in range(40)]}, {"allOf": [dict(many) for _ in range(40)]}]}
    assert not has_exclusive_branches(product)
    assert not has_exclusive_branches(
        {"oneOf": [{"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}] * 2}
    )
    loop = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]}
    assert not has_exclusive_branches({"oneOf": [{"$ref": "#/$defs/a"}, {}], "$defs": {"a": loop}})
    assert has_exclusive_branches({"oneOf": [{"const": each} for each in range(300)]})


def _schema(source: random.Random, depth: int = 2) -> Any:
    kind = source.choice(["type", "const", "enum", "number", "string", "array", "object", "any", "all", "ref", "true"])
    inner = [_schema(source, depth - 1) for _ in range(2)] if depth else [True, {"type": "null"}]
    match kind:
        case "type":
            return {"type": source.choice(["null", "boolean", "integer", "number", "string", "array", "object"])}
        case "const":
            return {"const": source.choice(VALUES)}
        case "enum":
            return {"enum": source.choices(VALUES, k=2)}
        case "number":
            limits = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
            return {"type": "number"} | {source.choice(limits): source.choice([0, 1, 1.5, 2]) for _ in range(2)}
        case "string":
            return {"type": "string"} | {source.choice(["minLength", "maxLength"]): source.choice([0, 1, 2])}
        case "array":
            limits = {source.choice(["minItems", "maxItems"]): source.choice([0, 1, 2])}
            return {"type": "array", "items": inner[0]} | limits
        case "object":
            extra = source.choice([{}, {"additionalProperties": False}, {"additionalProperties": inner[1]}])
            required = source.choice([[], ["a"], ["b"]])
            return {"type": "object", "properties": {"a": inner[0]}, "required": required} | extra
        case "any":
            return {source.choice(["anyOf", "oneOf"]): inner}
        case "all":
            return {"allOf": inner}
        case "ref":
            return {"$ref": source.choice(["#/$defs/x", "#/$defs/y"])}
    return True


VALUES: list[Any] = [None, True, False, 0, 1, 1.5, 2, 3, "", "a", "ab", [], [1], [None], ["a", 1], {}, {"a": 1}]
VALUES += [{"a": None}, {"b": "a"}, {"a": "a", "b": 1}, {"a": [1]}]


@pytest.mark.slow
def test_no_value_matches_two_branches_that_exclude_each_other() -> None:
    source = random.Random(11)
    exclusive = 0
    for _ in range(3000):
        target = _schema(source)
        defs = {
            "x": {} if "$ref" in json.dumps(target) else target,
            "y": {"type": source.choice(["string", "integer"])},
        }
        branches = [_schema(source), _schema(source)]
        schema = {"oneOf": branches, "$defs": defs}
        if not has_exclusive_branches(schema):
            continue
        exclusive += 1
        checks = [
            jsonschema.Draft202012Validator({**each, "$defs": defs}) if each is not True else None for each in branches
        ]
        for value, (one, other) in itertools.product(VALUES, itertools.combinations(checks, 2)):
            matches = [each is None or each.is_valid(value) for each in (one, other)]
            assert not all(matches), (json.dumps(schema), value)
    assert exclusive > 500
