from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammars.check import make_matcher, make_tokenizer
from logitship.builtin_processors.grammars.grammar_source import (
    NO_FORCING,
    from_choice,
    from_ebnf,
    from_json_schema,
    from_regex,
)
from logitship.server.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokens(tokenizer: Tokenizer) -> LLTokenizer:
    hf = tokenizer.hf_tokenizer
    assert isinstance(hf, PreTrainedTokenizerFast)
    return make_tokenizer(hf.backend_tokenizer.to_str(), 260, [1])


def accepts(tokens: LLTokenizer, grammar: str, text: str) -> bool:
    matcher: LLMatcher = make_matcher(tokens, grammar)
    return matcher.consume_tokens(tokens.tokenize_str(text)) and matcher.is_accepting()


EBNF: dict[str, tuple[str, list[str], list[str]]] = {
    "rules": ('root ::= a | a " is " b\na ::= "x" | "yy"\nb ::= "z"', ["x", "yy is z"], ["z", "x is ", "x is y"]),
    "alternatives in lines of their own": ('root ::= "a"\n  | "b"\n  | "c"', ["a", "b", "c"], ["ab", ""]),
    "a sequence over two lines": ('root ::= "a"\n  "b"\nx ::= "c"', ["ab"], ["a", "abc"]),
    "a body in the next line": ('root ::=\n  "a" x\nx ::=\n  "b" |\n  "c"\n', ["ab", "ac"], ["a"]),
    "comments": ('# one ::= "x"\nroot ::= "a" # two\n# three', ["a"], ["b"]),
    "a comment's sign in a string": ('root ::= "a#b" [#]', ["a#b#"], ["a"]),
    "sets": ("root ::= [a-cX] [0-9_-]* [-+] [a\\-z]", ["b3_-+-", "X--a", "a+z"], ["d-a", "a-b"]),
    "sets with signs of regular expressions": ("root ::= [&&~|]+ [a^]+ [\\^$.*] [/]", ["&~|a^./"], ["b", "&a/"]),
    "brackets in sets": (r'root ::= [\[\]]+ "]"', ["[]]"], ["a]", "]"]),
    "negated sets": (r'root ::= "\"" [^"\\\n]* "\""', ['"a b"', '"é"', '""'], ['"a"b"', '"\n"']),
    "escapes": (r'root ::= "\x41\t\\" [\x30-\x39] "\u00e9" [\U0001F600-\U0001F64F]', ["A\t\\7é😀"], ["A\t\\aé😀"]),
    "characters beyond ASCII": ('root ::= "ü" [α-ω]+', ["üλ"], ["u", "üa"]),
    "repetition": (
        'root ::= "a"{2,3} "b"{2} ("x" | "y"){1,} "z"{0,1} "w"{,2}',
        ["aabbx", "aaabbyxzw", "aabbxww"],
        ["abbx", "aaaabbx", "aabb", "aabbxwww"],
    ),
    "operators": ('root ::= "a"? "b"* "c"+', ["c", "abbcc"], ["ab", "aac"]),
    "nothing": ('root ::= "a" ("" | "b") end\nend ::= | "c"', ["a", "ab", "abc", "ac"], ["", "abb"]),
    "recursion": ('root ::= "(" root ")" | "x"', ["((x))"], ["(x"]),
    "left recursion": ('root ::= e\ne ::= e "+" t | t\nt ::= [0-9]+', ["1+22+3"], ["+1", "1+"]),
    "ambiguity": ('root ::= root root | "a" | "aa"', ["a", "aaaaa"], ["", "b"]),
    "names": (
        'root ::= fooBar foo_bar foo-bar start\nfooBar ::= "1"\nfoo_bar ::= "2"\nfoo-bar ::= "3"\nstart ::= "4"',
        ["1234"],
        ["12"],
    ),
    "any character": ('root ::= . "a"', ["xa", "\na", "éa"], ["a", "xya"]),
    "what greedy terminals would miss": ('root ::= word "b"\nword ::= [a-z]*', ["b", "aab", "bb"], ["a"]),
    "what the longest terminal would miss": ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["ac"]),
    "Lark": ('start: "a" rest\nrest: /[bc]+/ | NUMBER\nNUMBER: /[0-9]+/', ["abcb", "a12"], ["a", "ab1"]),
    "Lark with a schema in it": ('start: "<" json ">"\njson: %json {"type": "boolean"}', ["<true>"], ["<1>"]),
}


@pytest.mark.parametrize("name", EBNF)
def test_context_free_languages(tokens: LLTokenizer, name: str) -> None:
    text, good, bad = EBNF[name]
    grammar = from_ebnf(text)
    assert {each: accepts(tokens, grammar, each) for each in good} == dict.fromkeys(good, True)
    assert {each: accepts(tokens, grammar, each) for each in bad} == dict.fromkeys(bad, False)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('foo ::= "a"', "no rule named root"),
        ('root ::= "a"\n  bar', "line 2: there is no rule named 'bar'"),
        ('root ::= "a"\n\nroot ::= "b"', "line 3: rule 'root' is defined twice"),
        ("root ::= 'a'", "line 1: cannot read \"'a'\""),
        ('root ::= "a', "line 1: cannot read"),
        ("root ::= []", "line 1: \\[\\] is empty"),
        ("root ::= [\\d]", r"line 1: \\d is not supported"),
        ('root ::= "\\U00110000"', "line 1: .* is not a Unicode character"),
        ('root ::= "\\ud800"', "surrogate"),
        ('root ::= (="a")', "line 1: cannot read '=\"a\"\\)'"),
    ],
)
def test_ebnf_errors_name_the_line(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_ebnf(text)


@pytest.mark.parametrize("text", ['root ::= ("a"', "root ::= * ", 'root ::= "a" )', "start: oops", "no grammar at all"])
def test_llguidance_reports_other_errors(tokens: LLTokenizer, text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        make_matcher(tokens, from_ebnf(text))


def test_errors_in_lark_name_the_line(tokens: LLTokenizer) -> None:
    with pytest.raises(ValueError, match=r'2\(4\): unknown name: "oops"'):
        make_matcher(tokens, from_ebnf("start: a\na: oops"))


@pytest.mark.parametrize("text", ['%llguidance {}\nstart: "a"', '{"grammars": [{"json_schema": {}}]}'])
def test_options_of_lark_are_kept(tokens: LLTokenizer, text: str) -> None:
    assert from_ebnf(text) == text
    make_matcher(tokens, text)


def test_too_large_grammar(tokens: LLTokenizer) -> None:
    with pytest.raises(
        ValueError, match=r"^llguidance failed, .*too large: make it simpler \(panic: [^/<>]* < u16::MAX"
    ):
        make_matcher(tokens, from_ebnf("root ::= " + '"a"? ' * 34_000))


def test_choices(tokens: LLTokenizer) -> None:
    texts = ["yes", "yes, but", "", "a.b*[c]", 'say "hi"\n', "é😀", "\\d"]
    grammar = from_choice(texts)
    assert all(accepts(tokens, grammar, text) for text in texts)
    assert not any(accepts(tokens, grammar, text) for text in ("no", "yes,", "axb", "7"))
    with pytest.raises(ValueError, match="it is empty"):
        from_choice([])


def test_regular_expressions_match_the_whole_text(tokens: LLTokenizer) -> None:
    grammar = from_regex(r"^[a-z]+@\d{2}$|x/y")
    assert accepts(tokens, grammar, "ab@12")
    assert accepts(tokens, grammar, "x/y")
    assert not accepts(tokens, grammar, "ab@1")
    assert not accepts(tokens, grammar, "ab@123")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (True, ["1", '{"a": [null]}'], ["x"]),
        ({}, ["1", '"x"'], ["x"]),
        ('{"type": "object"}', ['{"a": 1}', "{}"], ["1"]),
        ({"enum": ["a", 2, None]}, ['"a"', "2", "null"], ['"b"']),
        ({"type": "integer", "minimum": 10, "maximum": 99}, ["10", "99"], ["9", "100", "1.5"]),
        ({"type": "string", "pattern": "^[ab]{2}$"}, ['"ab"'], ['"abc"', '"c"']),
        ({"type": "string", "format": "date"}, ['"2026-11-21"'], ['"2026-13-21"', '"x"']),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}, ["[true]"], ["[]", "[1]"]),
        (
            {
                "$defs": {
                    "n": {"type": "object", "properties": {"k": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
                },
                "$ref": "#/$defs/n",
            },
            ["{}", '{"k": {"k": {}}}'],
            ['{"k": 1}', '{"x": {}}'],
        ),
        ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, ["1", "true"], ["null"]),
    ],
    ids=str,
)
def test_json_schemas(
    tokens: LLTokenizer, schema: dict[str, object] | bool | str, good: list[str], bad: list[str]
) -> None:
    grammar = from_json_schema(schema)
    assert all(accepts(tokens, grammar, text) for text in good)
    assert not any(accepts(tokens, grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"type": "string", "format": "idn-email"}, "idn-email"),
        ({"type": "strin"}, "strin"),
        ({"$ref": "http://127.0.0.1:1/x"}, "http://127.0.0.1:1/x"),
        ({"not": {"type": "null"}, "x-guidance": {"lenient": True}}, "not"),  # a client may not disable the check
        (False, "no JSON matches"),
    ],
    ids=str,
)
def test_unsupported_keywords_are_refused(tokens: LLTokenizer, schema: dict[str, object] | bool, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_matcher(tokens, from_json_schema(schema))


def test_invalid_schemas() -> None:
    with pytest.raises(ValueError, match="line 1"):
        from_json_schema("{oops")
    with pytest.raises(ValueError, match=r"expected an object or true, got \[1\]"):
        from_json_schema("[1]")
    with pytest.raises(RecursionError):  # `GrammarProcessor.prepare` converts it into a refusal
        from_json_schema("[" * 200_000)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        (None, ['{"a":1,"b":2}', '{ "a" :\n 1, "b": 2 }'], []),
        ("", ['{"a":1,"b":2}'], ['{"a": 1,"b":2}']),
        ("[ ]?", ['{"a": 1,"b":2}'], ['{"a":  1,"b":2}', '{"a":\n1,"b":2}']),
    ],
)
def test_white_space_in_json(tokens: LLTokenizer, pattern: str | None, good: list[str], bad: list[str]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    grammar = from_json_schema(json.dumps(schema), pattern)
    assert all(accepts(tokens, grammar, text) for text in good)
    assert not any(accepts(tokens, grammar, text) for text in bad)


NULL_OR = {"anyOf": [{"type": "null"}, {"$ref": "#"}]}
INFINITE: list[tuple[Any, str]] = [
    ({"$ref": "#"}, "#/$ref refers back to #"),
    ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "#/anyOf/0/$ref refers back to #"),
    (
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]},
        "#/properties/child/$ref refers back to #",
    ),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/$ref refers back to #"),
    ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, "#/prefixItems/0/$ref refers back to #"),
    (
        {
            "$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"oneOf": [{"$ref": "#/$defs/a~1b"}]}},
            "$ref": "#/$defs/c",
        },
        "#/$defs/a~1b/$ref refers back to #/$defs/c",
    ),
]
FINITE: list[Any] = [
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "object", "properties": {"child": {"$ref": "#"}}},
    {"type": "object", "properties": {"child": NULL_OR}, "required": ["child"]},
    {"type": ["object", "null"], "properties": {"child": {"$ref": "#"}}, "required": ["child"]},
    {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2, "$defs": {"a": {"type": "integer"}}},
]


@pytest.mark.parametrize(("schema", "says"), INFINITE, ids=str)
def test_infinitely_recursive_schema(schema: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^no text matches it: infinite recursion: {re.escape(says)}$"):
        from_json_schema(schema)


@pytest.mark.parametrize("schema", FINITE, ids=str)
def test_schema_that_refers_to_itself_with_an_end(tokens: LLTokenizer, schema: Any) -> None:
    make_matcher(tokens, from_json_schema(schema))


def test_large_schema_is_not_examined() -> None:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2_000)}
    assert "d1999" in from_json_schema({"$defs": chain | {"d2000": {"type": "null"}}, "$ref": "#/$defs/d0"})


def test_grammar_without_texts(tokens: LLTokenizer) -> None:
    with pytest.raises(ValueError, match=r"^no text matches it$"):
        make_matcher(tokens, NO_FORCING + "start: X\nX: /a/ & /b/\n")
