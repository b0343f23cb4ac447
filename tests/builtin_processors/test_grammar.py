from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logitship.builtin_processors import grammar as grammar_module
from logitship.builtin_processors.grammar import MAX_GRAMMAR_LENGTH, GrammarParams, GrammarProcessor, mask_tokens
from logitship.builtin_processors.parts.token_sequence import TokenSequence
from logitship.builtin_processors.thinking_token_budget import ReasoningMarkers
from logitship.sampler.allowed_tokens import AllowedTokens
from logitship.sampler.processors.executor import PREPARED_KEY
from logitship.sampler.processors.request_view import ModelView
from tests.helpers.random_cases import random_seeds

EOS, OTHER_EOS = 0, 1
WORDS = ["ab", "bc", "abc", "ca", "cab"]
PADDING = 3
"""Number of columns beyond the tokenizer's tokens."""


def _model() -> ModelView:
    """One token per byte, and a few longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["</s>", "<end>", "<think>", *alphabet, *WORDS])}
    merges = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("c", "ab")]
    backend = TokenizersTokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", extra_special_tokens=["<end>", "<think>"]
    )
    return ModelView(len(vocab) + PADDING, frozenset({EOS, OTHER_EOS}), tokenizer)


MODEL = _model()
VOCAB_SIZE = MODEL.vocab_size
THINK = 2
TEXTS: dict[int, str] = {
    token: MODEL.tokenizer.decode([token]) for token in range(3, VOCAB_SIZE - PADDING) if token not in (EOS, OTHER_EOS)
}


@pytest.fixture(scope="module")
def processor() -> GrammarProcessor:
    return GrammarProcessor()


class Row:
    """A sequence with the processor."""

    def __init__(self, processor: GrammarProcessor, make_row: Callable[..., dict[str, Any]], **params: Any) -> None:
        self.output: list[int] = []
        self.params = make_row(
            params,
            [5],
            self.output,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=MODEL.eos_token_ids,
            tokenizer=MODEL.tokenizer,
        )
        self.params[PREPARED_KEY] = processor.prepare(params, MODEL)

    @property
    def text(self) -> str:
        return str(MODEL.tokenizer.decode([token for token in self.output if token not in MODEL.eos_token_ids]))

    def fork(self) -> Row:
        """Return an independent copy, with a copy of the state."""
        fork = copy.copy(self)
        request = copy.copy(self.params["__req__"])
        fork.output = request.output_ids = list(self.output)
        request.state = copy.deepcopy(request.state)
        fork.params = {**self.params, "__req__": request}
        return fork


@pytest.fixture
def new_row(processor: GrammarProcessor, make_row: Callable[..., dict[str, Any]]) -> Callable[..., Row]:
    return lambda **params: Row(processor, make_row, **params)


def allowed(processor: GrammarProcessor, *rows: Row) -> list[set[int]]:
    """Return the tokens allowed in each row, and check that their logits are unchanged."""
    logits = torch.randn(len(rows), VOCAB_SIZE)
    before = logits.clone()
    assert processor(logits, [row.params for row in rows]) is logits
    free = logits > -torch.inf
    assert torch.equal(logits[free], before[free])
    return [set(row.nonzero()[:, 0].tolist()) for row in free]


def sample(processor: GrammarProcessor, row: Row, rng: random.Random, limit: int = 60) -> bool:
    """Sample tokens until an EOS token. Long texts are steered to their end. Return whether there was one."""
    for index in range(limit):
        (tokens,) = allowed(processor, row)
        assert tokens, row.text
        if tokens & MODEL.eos_token_ids and (index > limit // 2 or rng.random() < 0.3):
            row.output.append(EOS)
            return True
        row.output.append(rng.choice(sorted(tokens - MODEL.eos_token_ids) or [EOS]))
        if row.output[-1] == EOS:
            return True
    return False


REGEXES = ["(ab|a[bc]{2}|cab)c?", "a*b", "(a|b)*abb", "a{2,4}", "(abc)+|b", "", "c?", "[^a]b", "(ab|abc)(ca|a)"]


def _prefixes(regex: str, alphabet: str = "abc", longest: int = 9) -> tuple[set[str], set[str]]:
    """Return all texts of a small language up to a length, and all their prefixes."""
    texts = {
        "".join(letters)
        for length in range(longest + 1)
        for letters in itertools.product(alphabet, repeat=length)
        if re.fullmatch(regex, "".join(letters))
    }
    return texts, {text[:end] for text in texts for end in range(len(text) + 1)}


@pytest.mark.parametrize("regex", REGEXES)
def test_allowed_tokens_equal_definition(processor: GrammarProcessor, new_row: Callable[..., Row], regex: str) -> None:
    texts, prefixes = _prefixes(regex)
    letters = {token: text for token, text in TEXTS.items() if text and set(text) <= set("abc")}
    for start in sorted(prefix for prefix in prefixes if len(prefix) <= 3):
        row = new_row(regex=regex)
        row.output.extend(next(token for token, text in letters.items() if text == letter) for letter in start)
        (tokens,) = allowed(processor, row)
        expected = {token for token, text in letters.items() if start + text in prefixes}
        expected |= MODEL.eos_token_ids if start in texts else set()
        assert tokens & {*letters, *MODEL.eos_token_ids} == expected, start


def test_padding_columns_are_never_sampled(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    (tokens,) = allowed(processor, new_row(regex="(?s:.)*"))
    assert set(TEXTS) & tokens
    assert max(tokens) < VOCAB_SIZE - PADDING


@pytest.mark.parametrize("regex", ["[a-c]{1,9}@[0-9]+", "(ab|ca)*é", r'"([^"\\\n]|\\["\\])*"', "(?i)yes|no"])
def test_sampled_text_matches(processor: GrammarProcessor, new_row: Callable[..., Row], regex: str) -> None:
    rng = random.Random(0)
    finished = 0
    for _ in range(30):
        row = new_row(regex=regex)
        if sample(processor, row, rng):
            finished += 1
            assert re.fullmatch(regex, row.text), row.text
    assert finished >= 3


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["abc", "cab", "é"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _is_person(text: str) -> bool:
    value = json.loads(text)
    tags = value.get("tags", [])
    return (
        set(value) <= {"name", "age", "tags"}
        and value["name"] in ("abc", "cab", "é")
        and type(value["age"]) is int
        and 0 <= value["age"] <= 120
        and len(tags) <= 2
        and all(type(tag) is bool for tag in tags)
    )


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)], ids=["object", "text"])
def test_sampled_text_matches_schema(
    processor: GrammarProcessor, new_row: Callable[..., Row], schema: dict[str, Any] | str
) -> None:
    rng = random.Random(1)
    rows = [new_row(json_schema=schema, whitespace_pattern="[ ]?") for _ in range(20)]
    assert all(sample(processor, row, rng, limit=150) for row in rows)
    assert all(_is_person(row.text) for row in rows), [row.text for row in rows]


@pytest.mark.parametrize(
    "params", [{"ebnf": 'start: "abc"'}, {"ebnf": 'root ::= "abc"'}, {"regex": "abc"}, {"choice": ["abc"]}], ids=str
)
def test_any_tokenization_is_allowed(
    processor: GrammarProcessor, new_row: Callable[..., Row], params: dict[str, Any]
) -> None:
    (tokens,) = allowed(processor, new_row(**params))
    assert {TEXTS[token] for token in tokens} == {"a", "ab", "abc"}


def test_end_of_text(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    row = new_row(choice=["ab", "abc"])
    by_text = {text: token for token, text in TEXTS.items()}
    assert allowed(processor, row) == [{by_text["a"], by_text["ab"], by_text["abc"]}]
    row.output.append(by_text["ab"])
    assert allowed(processor, row) == [{by_text["c"], EOS, OTHER_EOS}]
    row.output.append(by_text["c"])
    assert allowed(processor, row) == [{EOS, OTHER_EOS}]
    for end in (OTHER_EOS, EOS, EOS):  # as with `ignore_eos`
        row.output.append(end)
        assert allowed(processor, row) == [{EOS, OTHER_EOS}]
    row.output.append(by_text["a"])
    assert allowed(processor, row) == [set()]


def test_early_end_token(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    row = new_row(regex="aa")
    row.output.append(EOS)
    assert allowed(processor, row) == [set()]


def test_mismatching_token_forbids_all_until_removed(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    by_text = {text: token for token, text in TEXTS.items()}
    row, other = new_row(regex="a+"), new_row(regex="a+")
    row.output.extend([by_text["a"], by_text["b"], by_text["a"]])
    other.output.append(by_text["a"])
    expected = {by_text["a"], EOS, OTHER_EOS}
    assert allowed(processor, row, other) == [set(), expected]
    del row.output[1:]
    assert allowed(processor, row) == [expected]


@random_seeds(8, shares_fixtures=True)
def test_removed_tokens_leave_no_trace(make_row: Callable[..., dict[str, Any]], seed: int) -> None:
    rng = random.Random(seed)
    processor = GrammarProcessor()
    params: dict[str, Any] = rng.choice(
        [
            {"regex": "(ab|c)*a?"},
            {"json_schema": PERSON},
            {"choice": ["abc", "ab", "cab"]},
            {"regex": "ab*", "after": [THINK]},
        ]
    )
    row = Row(processor, make_row, **params)
    for _ in range(40):
        action = rng.random()
        (tokens,) = allowed(processor, row)
        if action < 0.3 and row.output:
            del row.output[rng.randrange(len(row.output)) :]
        elif action < 0.4:
            row.output.append(rng.randrange(VOCAB_SIZE))  # whether it fits or not
        elif tokens:
            row.output.append(rng.choice([*sorted(tokens)[:8], *sorted(tokens)[-2:]]))
        fresh = Row(processor, make_row, **params)
        fresh.output.extend(row.output)
        assert allowed(processor, row) == allowed(processor, fresh), row.text


def test_forked_sequence_is_independent(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    by_text = {text: token for token, text in TEXTS.items()}
    row = new_row(choice=["abb", "acc"])
    row.output.append(by_text["a"])
    allowed(processor, row)
    fork = row.fork()
    row.output.append(by_text["b"])
    fork.output.append(by_text["c"])
    assert allowed(processor, row, fork) == [{by_text["b"]}, {by_text["c"]}]
    assert row.output != fork.output


def test_many_rows_with_different_grammars(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    rng = random.Random(3)
    kinds: list[dict[str, Any]] = [
        {"regex": "[ab]{3,}"},
        {"json_schema": PERSON},
        {"ebnf": 'root ::= "a" root "b" | "c"'},
        {"choice": ["abc", "ca"]},
        {"json_object": True},
        {"regex": "c+", "after": [THINK]},
    ]
    rows = [new_row(**kinds[i % len(kinds)]) for i in range(24)]
    alone = [new_row(**kinds[i % len(kinds)]) for i in range(24)]
    for _ in range(12):
        together = allowed(processor, *rows)
        assert together == [allowed(processor, row)[0] for row in alone]
        for row, same, tokens in zip(rows, alone, together, strict=True):
            row.output.append(rng.choice(sorted(tokens)))
            same.output.append(row.output[-1])


def test_two_grammars_on_one_sequence(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    by_text = {text: token for token, text in TEXTS.items()}
    one, two = new_row(regex="[ab]c"), new_row(regex="[bc]c")
    two.params["__req__"].state = one.params["__req__"].state
    logits = torch.zeros(1, VOCAB_SIZE)
    processor(logits, [one.params])
    processor(logits, [two.params])
    assert (logits[0] > -torch.inf).nonzero()[:, 0].tolist() == [by_text["b"], by_text["bc"]]


@pytest.mark.parametrize("after", ["<think>", [THINK]])
def test_text_begins_after_marker(
    processor: GrammarProcessor, new_row: Callable[..., Row], after: str | list[int]
) -> None:
    by_text = {text: token for token, text in TEXTS.items()}
    row = new_row(regex="ab", after=after)
    everything = set(range(VOCAB_SIZE))
    for token in (by_text["c"], EOS, by_text["b"], THINK):
        assert allowed(processor, row) == [everything]
        row.output.append(token)
    assert allowed(processor, row) == [{by_text["a"], by_text["ab"]}]
    row.output.append(by_text["ab"])
    assert allowed(processor, row) == [{EOS, OTHER_EOS}]
    del row.output[2:]
    assert allowed(processor, row) == [everything]


def test_marker_of_several_tokens(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    row = new_row(regex="c", after=[5, 5, 6])
    free = []
    for token in (5, 5, 5, 6):
        row.output.append(token)
        free.append(len(allowed(processor, row)[0]) == VOCAB_SIZE)
    assert free == [True, True, True, False]


@pytest.mark.parametrize(
    ("prompt", "waits"),
    [
        ([5], False),
        ([5, THINK], True),
        ([THINK, 9], True),
        ([THINK, 9, 10], False),
        ([THINK, 9, 10, THINK], True),
        ([THINK, 11], False),
    ],
)
def test_text_begins_after_thinking_in_the_prompt(
    prompt: list[int], waits: bool, make_row: Callable[..., dict[str, Any]]
) -> None:
    """The end marker that a budget forces, or the one that the model writes by itself."""
    markers = ReasoningMarkers(TokenSequence([THINK]), TokenSequence([9, 10]), TokenSequence([11]))
    processor = GrammarProcessor(markers)
    by_text = {text: token for token, text in TEXTS.items()}
    everything, text = set(range(VOCAB_SIZE)), {by_text["a"], by_text["ab"]}
    for end in ([9, 10], [11]):
        row = Row(processor, make_row, regex="ab")
        row.params["__req__"].origin_input_ids = prompt
        assert allowed(processor, row) == [everything if waits else text]
        if waits:
            row.output.extend(end)
            assert allowed(processor, row) == [text]
    own = Row(processor, make_row, regex="ab", after=[by_text["c"]])
    own.params["__req__"].origin_input_ids = prompt
    own.output.extend([11, 9, 10])
    assert allowed(processor, own) == [everything]
    own.output.append(by_text["c"])
    assert allowed(processor, own) == [text]


def test_masks_are_cached(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    row = new_row(regex="abc")
    allowed(processor, row)
    (cursor,) = row.params["__req__"].state.values()
    mask = cursor.mask
    assert allowed(processor, row)  # as a mask that runs again after the other processors
    assert cursor.mask is mask


def test_too_complex_grammar_does_not_end_the_text(
    processor: GrammarProcessor, new_row: Callable[..., Row], caplog: pytest.LogCaptureFixture
) -> None:
    row = new_row(regex="((((a{1,99}){1,99}){1,99}){1,99})b")
    token = next(token for token, text in TEXTS.items() if text == "a")
    for _ in range(50):
        (tokens,) = allowed(processor, row)
        if not tokens:
            break
        assert not tokens & MODEL.eos_token_ids
        row.output.append(token)
    assert allowed(processor, row) == [set()]
    assert "too complex" in caplog.text


def test_text_that_begins_with_a_special_token(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    """The mask is the same if the allowed tokens were asked for before."""
    begin = {"type": "const_string", "value": "<think>ab"}
    row = new_row(structural_tag={"format": begin})
    restricted = AllowedTokens(VOCAB_SIZE)
    processor.restrict([row.params], [restricted])
    assert restricted.single() == THINK
    assert allowed(processor, row) == [{THINK}]
    assert sample(processor, row, random.Random(0))
    assert row.output[0] == THINK


def likely(processor: GrammarProcessor, row: Row) -> AllowedTokens:
    """Return what the processor says about the row's next token, and check that it leaves no trace."""
    restricted = AllowedTokens(VOCAB_SIZE)
    processor.restrict([row.params], [restricted])
    fresh = row.fork()
    fresh.params["__req__"].state = {}
    assert allowed(processor, row) == allowed(processor, fresh)
    return restricted


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"regex": "abdabdb"}, "abdabd"),  # the last letter may be a part of a token
        ({"regex": "abdabd[bc]"}, "abdabd"),
        ({"regex": "abd[ab]b"}, "abd"),
        ({"regex": "[ab]d"}, ""),
        ({"regex": "a*d"}, ""),
        ({"regex": "d?"}, ""),
    ],
)
def test_likely_text(
    processor: GrammarProcessor, new_row: Callable[..., Row], params: dict[str, Any], text: str
) -> None:
    row = new_row(**params)
    row.output.extend(likely(processor, row).likely)
    assert row.text == text


def ambiguous(texts: str) -> str:
    """Return a grammar whose only text is long, and found by the parser in very many ways."""
    rules = [f"r{n} ::= r{n + 1} r{n + 1} | r{n + 1} r{n + 1} r{n + 1}" for n in range(30)]
    return "\n".join(["root ::= r0", *rules, f'r30 ::= "{texts}"'])


@pytest.mark.parametrize("params", [{"ebnf": ambiguous("ab")}, {"regex": "a{100000}"}, {"choice": ["abc" * 10_000]}])
def test_long_texts_are_not_looked_for_to_their_ends(
    processor: GrammarProcessor, new_row: Callable[..., Row], params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others wait meanwhile."""
    row = new_row(**params)
    masks, fill = [0], GrammarProcessor._fill

    def counting(self: GrammarProcessor, words: Any, matchers: list[Any]) -> dict[int, float]:
        masks[0] += len(matchers)
        return fill(self, words, matchers)

    monkeypatch.setattr(GrammarProcessor, "_fill", counting)
    restricted = AllowedTokens(VOCAB_SIZE)
    processor.restrict([row.params], [restricted])
    assert 0 < len(restricted.likely) <= masks[0] <= 17


def test_slow_masks_are_not_looked_at_ahead(
    processor: GrammarProcessor, new_row: Callable[..., Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, other = (new_row(choice=["abcabcabcabcabcabcabc"]) for _ in range(2))
    assert likely(processor, other).likely
    monkeypatch.setattr(grammar_module, "_SLOW_SECONDS", -1.0)
    for _ in range(3):
        (tokens,) = allowed(processor, row)
        row.output.append(max(tokens, key=lambda token: len(TEXTS[token])))
    restricted = likely(processor, row)
    assert restricted.at_most(VOCAB_SIZE) is None
    assert not restricted.likely


def test_slow_masks_of_several_rows_are_timed_in_the_next_step(
    make_row: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = GrammarProcessor()
    rows = [Row(processor, make_row, regex="[ab]d") for _ in range(2)]
    monkeypatch.setattr(grammar_module, "_SLOW_SECONDS", -1.0)
    processor.restrict([row.params for row in rows], [AllowedTokens(VOCAB_SIZE) for _ in rows])
    for tokens, row in zip(allowed(processor, *rows), rows, strict=True):
        row.output.append(min(tokens))
    allowed(processor, *rows)
    assert [cursor.num_slow for row in rows for cursor in row.params["__req__"].state.values()] == [1, 1]


def test_text_is_looked_for_in_a_row_that_something_else_leaves_open(
    processor: GrammarProcessor, new_row: Callable[..., Row]
) -> None:
    row = new_row(regex="abdabdb")
    restricted = AllowedTokens(VOCAB_SIZE)
    restricted.leave_open()
    processor.restrict([row.params], [restricted])
    assert restricted.likely


def test_no_rows(processor: GrammarProcessor) -> None:
    logits = torch.zeros(0, VOCAB_SIZE)
    assert processor(logits, []) is logits
    assert processor(logits, None) is logits


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "give exactly one of json_schema, json_object, regex, ebnf, choice, structural_tag; got none"),
    ({"regex": "a", "choice": ["b"]}, "got regex and choice"),
    ({"regex": 5}, "regex: expected a regular expression, got 5"),
    ({"json_schema": [1]}, "json_schema: expected a JSON schema, as an object or as JSON text"),
    ({"json_schema": "[" * 100_000}, "the JSON schema cannot be used: it nests too deeply"),
    ({"json_schema": {"uniqueItems": True}}, "the JSON schema cannot be used: uniqueItems cannot be enforced"),
    ({"json_object": False}, "json_object: expected true, got False"),
    ({"choice": []}, "the choice cannot be used: it is empty"),
    ({"choice": ["a", 1]}, "choice: expected a list of strings"),
    ({"choice": "ab"}, "choice: expected a list of strings"),
    ({"regex": "(a"}, "the regular expression cannot be used: .*unclosed group"),
    ({"regex": "(?=a)"}, "look-around.* is not supported"),
    ({"regex": "\ud800"}, "the regular expression cannot be used"),
    ({"ebnf": 'root ::= "a"\nx'}, "the grammar cannot be used: line 2: there is no rule named 'x'"),
    ({"regex": "a" * (MAX_GRAMMAR_LENGTH + 1)}, f"it has 262145 characters, more than {MAX_GRAMMAR_LENGTH}"),
    ({"regex": "a", "after": ""}, "after: expected a string of at least one token"),
    ({"regex": "a", "after": []}, "after: expected at least one token id"),
    ({"regex": "a", "after": [VOCAB_SIZE]}, "after: .*outside the vocabulary"),
    ({"regex": "a", "after": 5}, "after: expected a string or a list of token ids, got 5"),
    (
        {"regex": "a", "whitespace_pattern": " "},
        "whitespace_pattern: goes with json_schema, json_object, structural_tag, not with regex",
    ),
]


@pytest.mark.parametrize(("params", "says"), REFUSED, ids=range(len(REFUSED)))
def test_invalid_parameters_are_refused(processor: GrammarProcessor, params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        processor.prepare(params, MODEL)


def test_length_is_counted_in_characters() -> None:
    assert GrammarParams(choice=["é" * (MAX_GRAMMAR_LENGTH - 4)]).source(MODEL)
    with pytest.raises(ValueError, match="it has 262145 characters"):
        GrammarParams(choice=["é" * (MAX_GRAMMAR_LENGTH - 3)]).source(MODEL)


def _bits(rows: Sequence[Sequence[bool]]) -> np.ndarray[Any, np.dtype[np.int32]]:
    packed = np.packbits(np.array(rows), axis=1, bitorder="little")
    return np.pad(packed, [(0, 0), (0, -packed.shape[1] % 4)]).view(np.int32)


SIZES = list(itertools.product((1, 3, 8), (1, 31, 32, 33, 257), (0, 40)))


@pytest.mark.parametrize(("rows", "vocab", "beyond"), SIZES)
def test_bits_to_logits(rows: int, vocab: int, beyond: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    keep = torch.rand(rows, vocab + beyond, generator=generator) < 0.5
    logits = torch.randn(rows, vocab, generator=generator)
    expected = logits.masked_fill(~keep[:, :vocab], -torch.inf)
    mask_tokens(logits, _bits(keep.tolist()))
    assert torch.equal(logits, expected)


def _ways(processor: GrammarProcessor, new_row: Callable[..., Row], **params: Any) -> list[str]:
    """Return the text of each sequence of tokens that the grammar allows."""
    texts: list[str] = []
    waiting: list[list[int]] = [[]]
    while waiting:
        output = waiting.pop()
        row = new_row(**params)
        row.output.extend(output)
        (tokens,) = allowed(processor, row)
        texts += [row.text] * bool(tokens & MODEL.eos_token_ids)
        waiting += [[*output, token] for token in tokens - MODEL.eos_token_ids]
    return sorted(texts)


def test_beams_generate_each_choice_in_one_way(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    choice = ["abc", "ab", "cab", "", "é", "abcab"]
    in_beams = processor.params_in_beams({"choice": choice})
    assert _ways(processor, new_row, **in_beams) == sorted(choice)
    assert len(_ways(processor, new_row, choice=choice)) > len(choice)
    given = {"choice": choice, "tokenization": "any"}
    assert processor.params_in_beams(given) == given
    regex = {"regex": "abc"}
    assert processor.params_in_beams(regex) == regex


def test_a_choice_without_usual_tokens_has_all(processor: GrammarProcessor, new_row: Callable[..., Row]) -> None:
    """The texts of special tokens are texts here. Many texts would take long to compile."""
    for choice in (["ab", "<think>"], [f"{number:x}" for number in range(9000)]):
        row = new_row(choice=choice, tokenization="usual")
        assert {token: TEXTS[token] for token in allowed(processor, row)[0]} == {
            token: text for token, text in TEXTS.items() if text and any(each.startswith(text) for each in choice)
        }


def test_tokenization_goes_with_choice(processor: GrammarProcessor) -> None:
    with pytest.raises(ValueError, match="tokenization: goes with choice, not with regex"):
        processor.prepare({"regex": "a", "tokenization": "usual"}, MODEL)
