from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammar import GrammarProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.server.tokenizer import Tokenizer

MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"uniqueItems": True}}, "the JSON schema cannot be used: uniqueItems cannot be enforced"),
    ({"json_schema": {"if": {"type": "null"}, "then": False}}, "if and then cannot be enforced"),
    (
        {"json_schema": {"oneOf": [{"type": "string"}, {}]}},
        "oneOf: a value may match several of its schemas. Write anyOf",
    ),
    ({"json_schema": {"type": "string", "format": "x"}}, 'the format "x" cannot be enforced: leave it out, or give a'),
    (
        {"json_schema": {"type": "string", "pattern": "^a$", "maxLength": 0}},
        "no text matches it: a string cannot match",
    ),
    ({"json_schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "no text matches it: minimum (2) is greater"),
    ({"json_schema": {"enum": []}}, "no text matches it: an anyOf, oneOf or enum is empty"),
    ({"json_schema": {"$ref": "#/$defs/x"}}, 'there is nothing at "#/$defs/x", to which a $ref refers'),
    ({"json_schema": {"$ref": "http://x/y"}}, '"http://x/y" cannot be looked up: put the schema into $defs'),
    ({"json_schema": {"minimum": "a"}}, "expected a number for 'minimum', got \"a\""),
    ({"json_schema": {"minimum": float("inf")}}, "it has a number that JSON lacks: NaN or infinity"),
    ({"json_schema": {"type": "integer", "multipleOf": 0}}, "multipleOf must be greater than 0"),
    ({"json_schema": {"const": "\ud800"}}, "it contains an unpaired surrogate"),
    ({"json_schema": "{a"}, "not JSON: Expecting property name"),
    ({"json_schema": {"type": "string", "pattern": "a("}}, "the JSON schema cannot be used: unclosed group: a("),
    ({"regex": "a("}, "the regular expression cannot be used: unclosed group: a("),
    ({"regex": r"\ba"}, r"the regular expression cannot be used: word boundaries are not supported: /\ba/"),
    ({"regex": "\ud800"}, "the regular expression cannot be used: it contains an unpaired surrogate"),
    ({"ebnf": 'root = "a"'}, "the grammar cannot be used: line 1: a rule begins with 'root ::=', not with 'root ='"),
    ({"ebnf": '\n  root -> "a"'}, "line 2: a rule begins with 'root ::=', not with 'root ->'"),
    ({"ebnf": '<root> ::= "a"'}, "line 1: a rule begins with 'root ::=', not with '<root> ::='"),
    ({"ebnf": 'root ::= a\na := "b"'}, "line 2: a rule begins with 'a ::=', not with 'a :='"),
    (
        {"structural_tag": {"format": {"type": "grammar", "grammar": 'root = "a"'}}},
        "line 1: a rule begins with 'root ::='",
    ),
    ({"ebnf": 'x ::= "b"\nroot = x'}, "line 2: a rule begins with 'root ::=', not with 'root ='"),
    ({"ebnf": 'root: "a"'}, "there is no start rule: EBNF begins with 'root ::=', Lark with 'start:'"),
    ({"ebnf": "start: <x>"}, 'unknown special token: "<x>"'),
    ({"ebnf": "start: a )\na: /b/"}, "1(10): expecting rule, token or statement"),
    ({"ebnf": "root ::= " + '"a"? ' * 34_000}, "the grammar cannot be used: it is probably too large: make it simpler"),
]


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> ModelView:
    hf = tokenizer.hf_tokenizer
    assert isinstance(hf, PreTrainedTokenizerFast)
    return ModelView(260, frozenset({1}), hf)


@pytest.mark.parametrize(("params", "says"), MESSAGES, ids=range(len(MESSAGES)))
def test_messages_are_about_what_the_client_wrote(model: ModelView, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"cannot be used: ") as caught:
        GrammarProcessor().prepare(params, model)
    assert says in str(caught.value)
    for internal in ("llguidance", "panic", "coerce", "Unimplemented", "%json", "codec", "SearchRegex", "(at ", "⟦"):
        assert internal not in str(caught.value)
