"""Script that records xgrammar's behavior on structural tags in `tests/data/structural_tag.json`.

Run it in an environment with xgrammar 0.2.8:

    python tests/peers/record_structural_tag.py > tests/data/structural_tag.json

For each format and each of its texts, some of them random, it records how many characters xgrammar accepts, and whether
the text may end there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import xgrammar

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": OBJECT}
ANY = {"type": "any_text"}
EBNF = {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-z]*'}
CALL = '<f=1>{"a": 1}</f>'


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def seq(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def either(*elements: Any) -> dict[str, Any]:
    return {"type": "or", "elements": elements}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], *tags: Any, **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **options}


def separated(separator: str, *tags: Any, **options: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": separator, "tags": tags, **options}


def times(kind: str, content: Any, **options: Any) -> dict[str, Any]:
    return {"type": kind, "content": content, **options}


X, Y = tag("<f=1>", const("x"), "</f>"), tag("<f=2>", const("y"), "</f>")
J, K = tag("<f=1>", JSON, "</f>"), tag("<f=2>", JSON, "</f>")
CASES: list[tuple[Any, list[str]]] = [
    (const("abc"), ["abc"]),
    (const(""), [""]),
    (ANY, ["", "abc é\n😀"]),
    ({**ANY, "excludes": ["ab", "c"]}, ["ba", "aab", "xc"]),
    ({**ANY, "max_chars": 3}, ["", "é\n😀", "abcd"]),
    ({**ANY, "max_chars": 4, "excludes": ["ab"]}, ["baba", "bbaaa"]),
    (regex("(ab|c)+d?"), ["abcd", "cc"]),
    (EBNF, ["((ab))", "x", ""]),
    (JSON, ['{"a": 1}', '{ "a":12 }', '{"b": 1}', '{"a": 1} ']),
    (seq(const("a"), const("b"), regex("[bc]*"), const("c")), ["abbcc", "abc"]),
    (seq(ANY, const("xy")), ["axyxy", "xy", "xyx"]),
    (seq(const("xy"), ANY), ["xyab"]),
    (seq({**ANY, "excludes": ["ab"]}, const("b")), ["aab", "abb", "b"]),
    (either(const("ab"), const("abc"), regex("x+")), ["ab", "abc", "xx"]),
    (either(seq(const("a"), JSON), const("ab")), ['a{"a": 1}', "ab"]),
    (tag("<a>", ANY, "</a>"), ["<a>x</</a>", "<a></a>", "<a></a></a>"]),
    (tag("<a>", ANY, ["</a>", "</b>"]), ["<a>x</b>", "<a></b></a>"]),
    (tag("<a>", {**ANY, "excludes": ["xx"]}, "</a>"), ["<a>xyx</a>", "<a>xx</a>"]),
    (tag("<a>", {**ANY, "excludes": ["x<"]}, "</a>"), ["<a>x</a>", "<a>x<</a>"]),
    (tag("", const("x"), ["", "y"]), ["x", "xy"]),
    (tag("```", ANY, "```"), ["```x```", "```x````", "`````````"]),
    (tag("<a>", seq(const("x"), ANY), "</a>"), ["<a>xy</a>"]),
    (tag("<a>", seq(ANY, const("x")), "</a>"), ["<a>yxx</a>", "<a></a>"]),
    (tag("<a>", either(const("x"), ANY), "</a>"), ["<a>x</a>", "<a>y</a>"]),
    (tag("<a>", times("optional", ANY), "</a>"), ["<a>x</a>", "<a></a>"]),
    (tag("<a>", times("star", ANY), "</a>"), ["<a>xx</a>", "<a></a>"]),
    (tag("<a>", tag("<b>", ANY, "</b>"), "</a>"), ["<a><b></a></b></a>"]),
    (tag("<a>", JSON, "</a>"), ['<a>{"a": 1}</a>', '<a>{"a": 1} </a>']),
    (tag("a", EBNF, "bc"), ["abc", "a(b)bc", "abbbc", "axbcbc"]),
    (tag("<a>", JSON, ["</a>", "\n```"]), ['<a>{"a": 1}\n```', '<a>{"a": 1}</a>']),
    (seq(tag("<think>", ANY, "</think>"), triggered(["<f="], J)), [f"<think>hm</think>so {CALL}.", "<think></think>"]),
    (triggered(["<f="], X, Y), ["", "a<f", "hi <f=1>x</f> and <f=2>y</f>.", "<f=3>"]),
    (triggered(["<f="], J, K), ["", f"hi {CALL} and {CALL}.", "<f=2>{}", '<f=2>{"a": 0}</f><']),
    (triggered(["<f="], X, Y, at_least_one=True), ["<f=1>x</f>", "a<f=1>x</f>", "<f=2>y</f>b<f=1>x</f>"]),
    (triggered(["<f="], J, K, at_least_one=True), [CALL, f"a{CALL}", f"{CALL}b{CALL}"]),
    (triggered(["<f="], X, Y, stop_after_first=True), ["", "a", "a<f=1>x</f>", "<f=1>x</f>b"]),
    (triggered(["<f="], J, K, stop_after_first=True), ["", "a", f"a{CALL}", f"{CALL}b"]),
    (triggered(["<f="], X, at_least_one=True, stop_after_first=True), ["<f=1>x</f>", "<f=1>x</f>b"]),
    (triggered(["<f="], J, at_least_one=True, stop_after_first=True), [CALL, f"{CALL}b"]),
    (triggered(["<f=", "<g>"], J, tag("<g>", const("z"), "</g>")), [f"a{CALL}<g>z</g>", "<g>x", "<g<g>z</g>"]),
    (triggered(["<f="], X, excludes=["bad"]), ["ba<f=1>x</f>d", "bad"]),
    (triggered(["<f="], J, excludes=["bad"], at_least_one=True), [f"{CALL}bad", f"{CALL}ba{CALL}"]),
    (triggered(["aa"], tag("aab", const("x"), "c")), ["aaabxc", "aabxc", "abaabxca"]),
    (triggered(["aa"], tag("aab", JSON, "c")), ['aaab{"a": 1}c', 'aab{"a": 1}c', 'abaab{"a": 1}ca']),
    (triggered(["<f="], tag("<f=1>", ANY, "</f>"), K), ["<f=1><f=</f>x", '<f=1></f><f=2>{"a": 1}</f>']),
    (triggered(["<f="], tag("<f=1>", JSON, "")), ['<f=1>{"a": 1} ok', '<f=1>{"a": 1}<f=1>']),
    (triggered(["<f="], tag("<f=1>", EBNF, "</f>")), ["<f=1>((a))</f> ok", "<f=1>ab</f>"]),
    (tag("<a>", triggered(["<f="], X), "</a>"), ["<a>b<f=1>x</f></a>", "<a></a>b"]),
    (tag("<a>", triggered(["<f="], J), "</a>"), [f"<a>b{CALL}</a>", "<a></a>b", f"<a>{CALL}x</a></a>"]),
    (tag("<a>", triggered(["<f="], J, stop_after_first=True), "</a>"), [f"<a>b{CALL}</a>", "<a>c</a>", f"<a>{CALL}x"]),
    (tag("<a>", triggered(["<f="], J, at_least_one=True), "</a>"), [f"<a>{CALL}b</a>", "<a>c</a>"]),
    (separated(",", X, Y), ["", "<f=1>x</f>,<f=2>y</f>", "<f=1>x</f>,", "<f=1>x</f><f"]),
    (separated(",", J, K), ["", f"{CALL},{CALL}", f"{CALL},", f"{CALL}<f"]),
    (separated("", J, at_least_one=True), ["", CALL * 2]),
    (separated(", ", J, stop_after_first=True), ["", CALL, f"{CALL}, "]),
    (separated("\n", X, at_least_one=True, stop_after_first=True), ["", "<f=1>x</f>", "<f=1>x</f>\n"]),
    (tag("[", separated(", ", J, K), "]"), ["[]", f"[{CALL}, {CALL}]"]),
    (times("optional", J), ["", CALL]),
    (times("star", X), ["", "<f=1>x</f>" * 3]),
    (times("plus", J), ["", CALL * 2]),
    (times("repeat", J, min=2, max=3), [CALL * 2, CALL * 4]),
    (times("repeat", const("ab"), min=2, max=-1), ["ab" * 4, "ab"]),
    (times("repeat", const("ab"), min=0, max=0), ["", "ab"]),
    ({"type": "dispatch", "rules": [["ab", const("x")], ["cd", JSON]]}, ["abx cd", 'cd{"a": 1}abx', "aab", ""]),
    ({"type": "dispatch", "rules": [["ab", const("x")]], "loop": False, "excludes": ["q"]}, ["zabx", "abxa", "q", "z"]),
    ({"type": "dispatch", "rules": [["ab", JSON]], "loop": False}, ['zab{"a": 1}', 'ab{"a": 1}a', "z"]),
]
RANDOM_TEXTS = 12


def texts(given: list[str], rng: random.Random) -> Iterator[str]:
    """Yield the given texts, and variants with one or two characters changed."""
    yield from given
    alphabet = sorted(set("".join(given)) | {"x"})
    for _ in range(RANDOM_TEXTS):
        text = rng.choice(given)
        for _ in range(rng.randint(1, 2)):
            index = rng.randint(0, len(text))
            text = text[:index] + rng.choice(["", *alphabet]) + text[index + rng.randint(0, 1) :]
        yield text


def main() -> None:
    """Print the recording."""
    rng = random.Random(0)
    # One token per byte: the matcher needs a vocabulary, and the results do not depend on it.
    vocabulary = xgrammar.TokenizerInfo([b"</s>", *(bytes([i]) for i in range(256))], stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(vocabulary)
    print(f'{{"xgrammar": "{version("xgrammar")}", "cases": [')
    for part, given in CASES:
        compiled = compiler.compile_structural_tag(json.dumps({"type": "structural_tag", "format": part}))
        answers = {}
        for text in texts(given, rng):
            matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
            read = next((i for i, each in enumerate(text) if not matcher.accept_string(each)), len(text))
            answers[text] = [read, read == len(text) and matcher.is_completed()]
        line = json.dumps({"format": part, "texts": answers})
        print(line if part is CASES[-1][0] else f"{line},")
    print("]}")


if __name__ == "__main__":
    main()
