from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors.grammars.check import make_matcher, make_tokenizer
from logitship.builtin_processors.grammars.structural_tag import TokenNames, from_structural_tag
from logitship.sampler.processors.request_view import ModelView

RECORD = json.loads((Path(__file__).parents[2] / "data" / "structural_tag.json").read_text())
ANY = {"type": "any_text"}
JSON = {"type": "json_schema", "json_schema": {"type": "integer"}}
EOS = 0


def make_model(*added: AddedToken) -> ModelView:
    """One token per byte, and added tokens."""
    vocab = {token: i for i, token in enumerate(["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    for token in added:
        backend.add_special_tokens([token]) if token.special else backend.add_tokens([token])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    return ModelView(backend.get_vocab_size(), frozenset({EOS}), hf)


class Reader:
    """Matches texts against a structural tag."""

    def __init__(self, value: Any, model: ModelView) -> None:
        self._backend = model.tokenizer.backend_tokenizer
        self._tokens: LLTokenizer = make_tokenizer(self._backend.to_str(), model.vocab_size, [EOS])
        self._matcher = make_matcher(self._tokens, from_structural_tag(value, TokenNames.of(model)))

    def read(self, text: str) -> list[Any]:
        """Return the number of matching characters, and whether the text may end there."""
        matcher = self._matcher.deep_copy()
        for index, character in enumerate(text):
            ids = self._tokens.tokenize_bytes(character.encode())
            if matcher.try_consume_tokens(ids) != len(ids):
                return [index, False]
        return [len(text), matcher.is_accepting()]

    def takes(self, text: str) -> bool:
        """Return whether a text as tokenized matches completely."""
        matcher = self._matcher.deep_copy()
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


MODEL = make_model()
IM, TOOL = AddedToken("<|im|>", special=True), AddedToken("<tool>", special=False)
WITH_ADDED = make_model(IM, TOOL, AddedToken("</tool>", special=False), AddedToken("<think>", special=False))


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*triggers: str, tags: list[Any], **options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, **options}


def as_json(value: Any) -> Any:
    return json.loads(json.dumps({"format": value}))


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: json.dumps(case["format"])[:90])
def test_xgrammar_examples(case: dict[str, Any]) -> None:
    reader = Reader({"type": "structural_tag", "format": case["format"]}, MODEL)
    assert {each: reader.read(each) for each in case["texts"]} == case["texts"]


def test_recording_has_matching_and_other_texts() -> None:
    answers = [tuple(answer) for case in RECORD["cases"] for answer in case["texts"].values()]
    assert len(answers) > 700
    assert sum(ends for _, ends in answers) > 150


def test_legacy_form() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    for written in (schema, json.dumps(schema)):
        structure = {"begin": "<f>", "schema": written, "end": "</f>"}
        reader = Reader({"type": "structural_tag", "structures": [structure], "triggers": ["<f"]}, MODEL)
        assert reader.takes('so <f>{"a": 1}</f>!')
        assert not reader.takes("<f>{}</f>")


def test_free_text_ends_before_following_text() -> None:
    """Unlike xgrammar, which lets the text continue, and uses the last of several occurrences."""
    reader = Reader(as_json(sequence(ANY, tag("<f>", JSON, "</f>"), ANY)), MODEL)
    assert reader.takes("hm<f>12</f>x<f>")
    assert not reader.takes("<f>x<f>12</f>")


ADDED_CASES: list[tuple[Any, list[str], list[str]]] = [
    (text("a<|im|>b"), ["a<|im|>b"], ["ab", "a<|im|>"]),
    (sequence(ANY, text("<tool>")), ["ab<tool>", "<think>a<tool>", "<tool>"], ["ab", "a<|im|><tool>"]),
    (tag("<tool>", JSON, "</tool>"), ["<tool>12</tool>"], ["<tool>12", "12</tool>"]),
    (tag("<tool>", ANY, "</tool>"), ["<tool>a<think>b</tool>"], ["<tool></tool></tool>"]),
    (tag("<|im|>", ANY, ["</tool>", "x"]), ["<|im|>a</tool>", "<|im|>ax"], ["<|im|>xa</tool>"]),
    (
        triggered("<tool>", tags=[tag("<tool>f:", JSON, "</tool>"), tag("<tool>g:", ANY, "</tool>")]),
        ["", "<think>a", "a<tool>f:1</tool>b<tool>g:<think></tool>", "<think>so<tool>f:2</tool>"],
        ["<tool>", "<tool>h:</tool>", "</tool><tool>f:x</tool>", "<|im|>"],
    ),
    (
        triggered("a<tool>", tags=[tag("a<tool>f", JSON, "")], stop_after_first=True),
        ["ba<tool>f1", "aa<tool>f1", "x"],
        ["b<tool>f1", "a<tool>f1b", "a<tool>"],
    ),
    (triggered("<f", tags=[tag("<f>", text("x"), "</f>")]), ["<think><f>x</f><think>"], ["<f><think>"]),
    (tag({"type": "token", "token": "<|im|>"}, ANY, {"type": "token", "token": 257}), ["<|im|>a<|im|>"], ["<|im|>a"]),
    ({"type": "token", "token": "a"}, ["a"], ["b", ""]),
]


@pytest.mark.parametrize(("value", "good", "bad"), ADDED_CASES, ids=str)
def test_added_tokens_replace_their_texts(value: Any, good: list[str], bad: list[str]) -> None:
    assert WITH_ADDED.tokenizer.convert_tokens_to_ids("<|im|>") == 257
    reader = Reader(as_json(value), WITH_ADDED)
    assert {each: reader.takes(each) for each in good} == dict.fromkeys(good, True)
    assert {each: reader.takes(each) for each in bad} == dict.fromkeys(bad, False)


FIVE = {**ANY, "max_tokens": 5}
LIMITED: list[tuple[ModelView, Any, list[str], list[str]]] = [
    (MODEL, FIVE, ["", "a", "abcde"], ["abcdef"]),
    (MODEL, {**ANY, "max_tokens": 0}, [""], ["a"]),
    (MODEL, {**FIVE, "excludes": ["x"]}, ["abc"], ["ax", "abcdef"]),
    # As the last of these, an end that began within the last tokens begins again.
    (
        MODEL,
        sequence(tag("<t>", FIVE, "</t>"), JSON),
        ["<t></t>1", "<t>a</t>12", "<t>abcde</t>1", "<t>ab</t</t>1"],
        ["<t>abcdef</t>1", "<t>a1", "<t>ab</t>1", "<t>abcde1"],
    ),
    (MODEL, sequence(FIVE, text("end"), ANY), ["aend", "end", "aenden", "abcdeend!"], ["abcdefend", "a"]),
    (MODEL, tag("<t>", FIVE, ["</t>", "!"]), ["<t>a!", "<t>a</t>", "<t>abcde!"], ["<t>abcdef!", "<t>a!!"]),
    (
        WITH_ADDED,
        sequence(tag("<tool>", FIVE, "</tool>"), JSON),
        ["<tool></tool>1", "<tool>abcde</tool>1"],
        ["<tool>abcdef</tool>1", "<tool>a1"],
    ),
]


@pytest.mark.parametrize(("model", "value", "good", "bad"), LIMITED, ids=str)
def test_max_tokens_of_free_text(model: ModelView, value: Any, good: list[str], bad: list[str]) -> None:
    reader = Reader(as_json(value), model)
    assert {each: reader.takes(each) for each in good} == dict.fromkeys(good, True)
    assert {each: reader.takes(each) for each in bad} == dict.fromkeys(bad, False)


def test_only_the_end_follows_max_tokens() -> None:
    reader = Reader(as_json(sequence(tag("<t>", {**ANY, "max_tokens": 300}, "</t>"), JSON)), MODEL)
    begin = "<t>" + "a" * 300
    assert reader.read(begin + "<") == [304, False]
    assert reader.read(begin + "a") == [303, False]
    assert reader.takes(begin + "</t>7")


LETTERS = {"type": "grammar", "grammar": "root ::= [a-z]*"}
AFTER_EBNF: list[tuple[Any, list[str], list[str]]] = [
    (tag("<", LETTERS, "xyz"), ["<axyaxyz", "<xyz"], ["<axy"]),
    (tag("<", LETTERS, ["xyz", "uvw"]), ["<axyaxyz", "<axyuvw", "<xyzuvw"], ["<axyuv"]),
    (tag("[", tag("<", LETTERS, ""), "xyz"), ["[<axyaxyz"], ["[<axy"]),
    (sequence(LETTERS, text(""), text("xyz"), text("uvw")), ["xyaxyzuvw", "xyzuvxyzuvw"], ["xyz", "uvw"]),
    (
        sequence(LETTERS, {"type": "or", "elements": [text("xyz"), text("uvw")]}, JSON),
        ["axyaxyz1", "uvxyuvw12"],
        ["axy1"],
    ),
    (sequence({"type": "plus", "content": LETTERS}, text("xyz")), ["xyaxyz"], ["xya"]),
    (
        {"type": "plus", "content": sequence(text("<a>"), {"type": "grammar", "grammar": 'root ::= "b" [<ac]*'})},
        ["<a>b<ac", "<a>b<a<a>b"],
        ["<a>b>"],
    ),
    (
        {"type": "tags_with_separator", "tags": [tag("<", LETTERS, "")], "separator": "xyz"},
        ["<axyaxyz<xya"],
        ["<axyxy<"],
    ),
]


@pytest.mark.parametrize(("value", "good", "bad"), AFTER_EBNF, ids=str)
def test_ebnf_may_contain_the_beginning_of_the_text_after_it(value: Any, good: list[str], bad: list[str]) -> None:
    reader = Reader(as_json(value), MODEL)
    assert {each: reader.takes(each) for each in good} == dict.fromkeys(good, True)
    assert {each: reader.takes(each) for each in bad} == dict.fromkeys(bad, False)


def test_free_text_ends_before_a_choice_of_texts() -> None:
    reader = Reader(as_json(sequence(ANY, {"type": "or", "elements": [text("xyz"), text("xyzu")]}, JSON)), MODEL)
    assert reader.takes("axyxyz1")
    assert reader.takes("axyzu1")
    assert not reader.takes("xyzaxyz1")


REFUSED: list[tuple[Any, str]] = [
    ([], "expected an object"),
    ({}, "format: is missing"),
    ({"format": {}}, "format: expected a format"),
    ({"format": text("x"), "extra": 1}, "extra: unknown"),
    ({"format": text("x"), "triggers": ["x"]}, "structures: is missing"),
    ({"structures": [], "triggers": ["x"]}, "structures: .*at least 1"),
    ({"structures": [{"begin": "x", "schema": {}, "end": ""}], "triggers": ["y"]}, "has 0 triggers"),
    (
        {"structures": [{"begin": "x", "schema": "{", "end": ""}], "triggers": ["x"]},
        r"^structures\[0\].schema: not JSON: Expecting property name",
    ),
    (
        {"structures": [{"begin": "x", "schema": "3", "end": ""}], "triggers": ["x"]},
        r"^structures\[0\].schema\S*: must be",
    ),
    (
        {"structures": [{"begin": "x", "schema": {}, "end": "e" * 1025}], "triggers": ["x"]},
        r"^structures\[0\].end: .*at most 1024",
    ),
    (as_json({"type": "const_string", "value": 1}), r"format\.value: must be a string"),
    (as_json({"type": "const_string", "value": "x", "excludes": []}), r"format\.excludes: unknown"),
    (as_json(text("\ud800")), "surrogate"),
    (as_json({"type": "any_tokens"}), "the format 'any_tokens' is not supported; known: const_string"),
    (as_json({"type": "qwen_xml_parameter", "json_schema": {}}), "'qwen_xml_parameter' is not supported"),
    (as_json(sequence(text("a"), {"type": "token_dispatch"})), r"format\.elements\[1\]: .*not supported"),
    (as_json({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}), "style 'qwen_xml' is not supported"),
    (as_json({"type": "json_schema", "json_schema": {}, "any_order": True}), "any_order is not supported"),
    (as_json({"type": "json_schema", "json_schema": {}, "excludes": ["x"]}), "excludes is not supported"),
    (as_json({"type": "json_schema", "json_schema": "{}"}), r"format\.json_schema"),
    (as_json({"type": "json_schema", "json_schema": False}), "no JSON matches"),
    (as_json({**ANY, "max_tokens": -1}), r"format\.max_tokens"),
    (as_json({**ANY, "max_tokens": 5, "max_chars": 5}), "max_chars and max_tokens are not supported together"),
    (as_json(sequence({**ANY, "max_tokens": 5}, JSON)), "any_text with max_tokens cannot be distinguished"),
    (as_json({**ANY, "max_chars": -1}), r"format\.max_chars"),
    (as_json({**ANY, "max_chars": 501}), r"format\.max_chars: .*less than or equal to 500"),
    (as_json({**ANY, "excludes": [""]}), r"format\.excludes\[0\]"),
    (as_json(sequence()), r"format\.elements: .*at least 1"),
    (as_json(tag("a", ANY, "")), "free text needs an end"),
    (as_json(tag("a", sequence(text("b"), ANY), ["", ""])), "free text needs an end"),
    (as_json(tag("a", ANY, [])), r"format\.end: expected a string, a list"),
    (as_json(tag("a", ANY, float("nan"))), r"format\.end: expected a string"),
    (as_json(tag(3, ANY, "b")), r"format\.begin: expected a string"),
    (as_json(tag("a", {"type": "or", "elements": [3]}, "b")), r"format\.content\.elements\[0\]: .*"),
    (as_json(triggered("", tags=[tag("a", ANY, "b")])), r"format\.triggers\[0\]"),
    (as_json(triggered("a", "b", tags=[tag("a", ANY, "b")])), "no tag begins with the trigger 'b'"),
    (as_json(triggered("b", tags=[tag("a", ANY, "b")])), "the tag that begins with 'a' has 0 triggers"),
    (as_json(triggered("a", "ab", tags=[tag("abc", ANY, "b")])), "has 2 triggers"),
    (as_json(triggered("a", tags=[])), r"format\.tags: .*at least 1"),
    (as_json(triggered("a", tags=[tag({"type": "token", "token": 5}, ANY, "b")])), "with a text, not with a token"),
    (
        as_json(triggered("a", tags=[tag("a", ANY, "b")], at_least_one=1)),
        r"format\.at_least_one: must be true or false",
    ),
    (as_json(triggered("<to", tags=[tag("<tool>", ANY, "b")])), "ends within a token's text"),
    (as_json({"type": "repeat", "min": 3, "max": 2, "content": ANY}), "min is 3 and max is 2"),
    (as_json({"type": "dispatch", "rules": [["a", ANY], ["ab", ANY]]}), "'a' begins another one"),
    (as_json({"type": "dispatch", "rules": [["a"]]}), r"format\.rules\[0\]"),
    (as_json({"type": "dispatch", "rules": {"a": ANY}}), r"format\.rules"),
    (as_json(sequence(ANY, JSON)), "any_text, .* cannot be distinguished from what follows"),
    (as_json({"type": "star", "content": sequence(JSON, ANY)}), "any_text, .* cannot be distinguished"),
    (as_json({"type": "grammar", "grammar": "start: oops"}), "cannot read"),
    (as_json({"type": "grammar", "grammar": 'root ::= "a'}), "line 1"),
    (as_json({"type": "token", "token": "nobody"}), "the model has no token 'nobody'"),
    (as_json({"type": "token", "token": 10**9}), "the model has no token"),
    (as_json({"type": "token", "token": "</s>"}), "the token '</s>' ends the output"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=lambda case: str(case)[:70])
def test_errors_name_the_field(value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_structural_tag(value, TokenNames.of(WITH_ADDED))


def nested(depth: int) -> Any:
    value: Any = text("x")
    for _ in range(depth):
        value = {"type": "optional", "content": value}
    return {"format": value}


def at_least_one(depth: int, value: Any = ANY) -> Any:
    for _ in range(depth):
        value = triggered("a", tags=[tag("a", value, "b")], at_least_one=True)
    return value


HOSTILE: dict[str, Any] = {
    "deeper than is read": nested(5_000),
    "deep lists": {"format": [[[[[]]]] * 3] * 3},
    "no format": {"format": [[]] * 100_000},
    "lists that nest": {"format": json.loads("[" * 900 + "]" * 900)},
    "ends for everybody": as_json(tag("a", sequence(*[ANY, JSON] * 3_000), "x" * 100_000)),
    "triggers": as_json(triggered(*map(str, range(9_999)), tags=[tag("a", ANY, "b")])),
    "long triggers": as_json(triggered("a" * 50_000, "a" * 50_000 + "b", tags=[tag("a" * 60_000, ANY, "b")])),
    "what doubles with each level": as_json(at_least_one(25)),
    "what doubles, around JSON": as_json(at_least_one(25, JSON)),
    "many exclusions": as_json(
        sequence(*[tag("a", {**ANY, "excludes": [f"{i}" * 500]}, "x" * 2_000) for i in range(500)])
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tags_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"nests too deeply|expected a format|more than \d+ |at most \d+ "):
        from_structural_tag(HOSTILE[name], TokenNames.of(MODEL))


REPETITIVE: dict[str, Any] = {
    "a long text in what doubles with each level": as_json(at_least_one(11, text("x" * 60_000))),
    "long patterns": as_json(
        {"type": "dispatch", "rules": [[f"A{number:04}" + "b" * 900, text("")] for number in range(250)]}
    ),
}


@pytest.mark.parametrize("name", REPETITIVE)
def test_long_texts_are_not_translated_again(name: str) -> None:
    began = time.thread_time()
    from_structural_tag(REPETITIVE[name], TokenNames.of(MODEL))
    assert time.thread_time() - began < 5


def test_overlapping_triggers() -> None:
    rules = [["aab", text("1")], ["aba", text("2")], ["bb", text("3")]]
    reader = Reader(as_json({"type": "dispatch", "rules": rules}), MODEL)
    assert all(map(reader.takes, ["aaab1", "xaba2aab1", "bb3aba2", "ab", "abb3"]))
    assert not any(map(reader.takes, ["aaba2", "aabb3", "ababb3", "aab"]))


def test_nesting_limit() -> None:
    assert Reader(nested(120), MODEL).takes("x")
    with pytest.raises(ValueError, match="nests too deeply"):
        Reader(nested(130), MODEL)


def test_many_triggers() -> None:
    triggers = [f"<f{i}>" for i in range(100)]
    reader = Reader(as_json(triggered(*triggers, tags=[tag(each, JSON, "</f>") for each in triggers])), MODEL)
    assert reader.takes("a<f99>1</f>b<f9>5</f>")
    assert not reader.takes("<f9>a</f>")


def test_many_tags() -> None:
    tags = [tag(f"<f={i}>", JSON, "</f>") for i in range(300)]
    reader = Reader(as_json(triggered("<f=", tags=tags)), MODEL)
    assert reader.takes("a<f=299>1</f>b<f=29>5</f>")
    assert not reader.takes("<f=300>1</f>")


@pytest.mark.parametrize(
    ("max_tokens", "ends", "good", "bad"),
    [
        # As xgrammar: a second y makes the first one text.
        (1, "yz", ["yz", "yyz", "xyz"], ["yyyz", "xxyz", "xyyz"]),
        (1, "yyz", ["yyz", "yyyz", "xyyz"], ["yyyyz", "xxyyz"]),
        (2, "yxyx", ["yxyx", "yyxyx", "xxyxyx"], ["yxyxyx", "xxxyxyx"]),
        (2, ["</a>", "</b>"], ["</a>", "<</b>", "</</a>", "xx</b>"], ["</a</a>", "xxx</a>"]),
    ],
    ids=str,
)
def test_beginning_of_an_end_is_text_or_goes_on(
    max_tokens: int, ends: str | list[str], good: list[str], bad: list[str]
) -> None:
    reader = Reader(as_json(tag("<t>", {**ANY, "max_tokens": max_tokens}, ends)), MODEL)
    assert {each: reader.takes(f"<t>{each}") for each in good} == dict.fromkeys(good, True)
    assert {each: reader.takes(f"<t>{each}") for each in bad} == dict.fromkeys(bad, False)
