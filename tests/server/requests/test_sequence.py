from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import FinishReason, GenerationChunk
from logitship.server.requests.sequence import Sequence, StopMatch, StopStrings
from logitship.server.tokenizer import Tokenizer
from tests.helpers.random_cases import random_seeds

EOS = 1
STOP = 40


def stopped(stop: tuple[str, ...], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    """Return the emitted text, and the stop string that ended it."""
    search = StopStrings(stop, include=include)
    emitted = ""
    for piece in pieces:
        found = search.push(piece)
        if isinstance(found, StopMatch):
            return emitted + found.text, found.matched
        emitted += found
    return emitted + search.flush(), None


def naive(stop: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """Search character by character: the stop string that ends first ends the text, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            matched = max(complete, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


def test_no_stop_strings() -> None:
    search = StopStrings((), include=False)
    assert search.push("text") == "text"
    assert search.flush() == ""


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (("\n\n",), ["a\n", "\nb"], ("a", "\n\n")),
        (("STOP",), ["ST", "ST", "OP."], ("ST", "STOP")),
        (("STOP",), ["go ST", "ART"], ("go START", None)),
        (("STOP",), ["go ST"], ("go ST", None)),
        (("abcd", "bc"), ["abcd"], ("a", "bc")),
        (("abcd", "bc"), ["abc", "d"], ("a", "bc")),
        (("c", "abc"), ["abc"], ("", "abc")),
        (("aab",), ["aaaa", "ab"], ("aaa", "aab")),
        (("é",), ["", "cafe\u0301", "é!"], ("cafe\u0301", "é")),
    ],
)
def test_stop_strings(stop: tuple[str, ...], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert stopped(stop, pieces) == expected


def test_only_possible_stop_strings_are_held_back() -> None:
    search = StopStrings(("</end>",), include=False)
    assert [search.push(piece) for piece in ("one", " <", " two </", "e", "x")] == ["one", " ", "< two ", "", "</ex"]


def test_many_stop_strings_take_no_longer_than_few() -> None:
    """1,024 strings of 256 characters that the output is the beginning of, and three that it is not."""

    def seconds(stop: tuple[str, ...]) -> float:
        search = StopStrings(stop, include=False)
        began = time.thread_time()
        for _ in range(250):
            assert isinstance(search.push("a"), str)
        return time.thread_time() - began

    many = seconds(tuple("a" * 250 + f"{number:06}" for number in range(1024)))
    assert many < 100 * seconds(tuple("a" * 250 + f"{number:06}" for number in range(3)))


@pytest.mark.parametrize("include", [True, False])
@random_seeds(100)
def test_match_does_not_depend_on_piece_boundaries(seed: int, include: bool) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        stop = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
        text = "".join(rng.choices("aabbc", k=rng.randint(0, 30)))
        expected = naive(stop, text, include)
        for _ in range(3):
            cuts: list[Any] = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
            pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert stopped(stop, pieces, include) == expected


# --- chunks that are emitted late ---


def made(tokenizer: Tokenizer, chunks: list[GenerationChunk], max_tokens: int, **params: Any) -> Sequence:
    values = SamplingParams(max_tokens=max_tokens, eos_token_ids={EOS}, **params)
    return Sequence("r", 0, frozenset("r"), [5, 6], values, max_tokens, tokenizer, chunks.append)


def random_params(rng: random.Random) -> Iterator[tuple[str, Any]]:
    yield "min_tokens", rng.choice([0, 0, 1, 4])
    yield "include_stop_str_in_output", rng.choice([True, False])
    if rng.random() < 0.3:
        yield "stop_token_ids", [STOP]
    if rng.random() < 0.3:
        yield "stop", ["ab", " the"]
    if rng.random() < 0.3:
        yield "stop_regex", [r"[a-f]\w+"]


@random_seeds(200)
def test_late_chunks_are_the_same(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    params = dict(random_params(rng))
    max_tokens = rng.randint(5, 15)
    at_once: list[GenerationChunk] = []
    late: list[GenerationChunk] = []
    first, second = made(tokenizer, at_once, max_tokens, **params), made(tokenizer, late, max_tokens, **params)
    while first.finish_reason is None:
        token = rng.choice([EOS, STOP, *(rng.randrange(4, 200) for _ in range(10))])
        first.append(token, None)
        first.emit()
        second.append(token, None)
        assert second.finish_reason == first.finish_reason
        if rng.random() < 0.3:
            second.emit()
    assert late == at_once
    assert second.output_token_ids == first.output_token_ids


def test_token_that_ends_nothing_waits_for_emit(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    sequence.append(8, None)
    assert not chunks
    sequence.emit()
    sequence.emit()
    assert [(chunk.token_ids, chunk.completion_tokens) for chunk in chunks] == [([7], 1), ([8], 2)]


def test_waiting_chunks_come_before_the_end(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    sequence.finish(FinishReason("abort"))
    assert [(chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [([7], None), ([], FinishReason("abort"))]


def test_fork_has_the_waiting_tokens_too(tokenizer: Tokenizer) -> None:
    chunks: list[GenerationChunk] = []
    forked: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 10)
    sequence.append(7, None)
    fork = sequence.fork(forked.append)
    for each in (fork, sequence):
        each.emit()
    assert forked == chunks != []


# --- special tokens that the text does not show ---


def naive_with_hidden(stop: tuple[str, ...], pieces: list[tuple[str, str]], include: bool) -> tuple[str, str | None]:
    """Search character by character, in the text with hidden characters and without them."""
    text = ""
    shown: list[int] = []
    characters = [(each, True) for piece, hidden in pieces for each in (*piece, *("\0" + each for each in hidden))]
    for character, _ in characters:
        text += character[-1]
        if character[0] != "\0":
            shown.append(len(text) - 1)
        found = [(len(text) - len(each), each) for each in stop if text.endswith(each)]
        if character[0] != "\0":
            without = "".join(text[place] for place in shown)
            found += [(shown[-len(each)], each) for each in stop if without.endswith(each)]
        if found:
            begin, matched = min(found)
            before = "".join(text[place] for place in shown if place < begin)
            return before + matched if include else before, matched
    return "".join(text[place] for place in shown), None


@pytest.mark.parametrize("include", [True, False])
def test_stop_strings_in_text_with_and_without_hidden_tokens(include: bool) -> None:
    rng = random.Random(1)
    num_hidden_matches = 0
    for _ in range(5_000):
        stop = tuple("".join(rng.choices("ab<", k=rng.randint(1, 4))) for _ in range(rng.randint(1, 3)))
        pieces = [("".join(rng.choices("abc", k=rng.randint(0, 3))), rng.choice(["", "", "<", "a<"])) for _ in range(8)]
        expected = naive_with_hidden(stop, pieces, include)
        num_hidden_matches += "<" in (expected[1] or "")
        search = StopStrings(stop, include=include)
        emitted, matched = "", None
        for piece, hidden in pieces:
            found = search.push(piece, hidden)
            if isinstance(found, StopMatch):
                emitted, matched = emitted + found.text, found.matched
                break
            emitted += found
        else:
            emitted += search.flush()
        assert (emitted, matched) == expected, (stop, pieces)
    assert num_hidden_matches > 500


def test_hidden_tokens_are_not_kept(tokenizer: Tokenizer) -> None:
    """The text before them may be the beginning of a stop string for as long as they come."""
    search = StopStrings(("ab",), include=False)
    assert search.push("a") == ""
    for _ in range(1_000):
        assert search.push("", "<special>") == ""
    assert len(search._held) == 1
    assert search.push("b") == StopMatch("ab", "")


@pytest.mark.parametrize("params", [{"stop": ["{}"]}, {"stop_regex": [r"{}$"]}, {"stop": ["c{}"]}], ids=str)
def test_special_token_is_found_though_it_is_not_shown(tokenizer: Tokenizer, params: dict[str, list[str]]) -> None:
    special = next(iter(set(tokenizer.hf_tokenizer.all_special_ids) - {EOS}))
    text = tokenizer.token_text(special)
    if "stop_regex" in params:
        text = re.escape(text)
    params = {name: [each.format(text) for each in values] for name, values in params.items()}
    before = tokenizer.encode("abc", add_special_tokens=False)
    chunks: list[GenerationChunk] = []
    sequence = made(tokenizer, chunks, 20, **params)
    for token in (*before, special, *before):
        if sequence.finish_reason is None:
            sequence.append(token, None)
    assert sequence.output_token_ids == [*before, special]
    assert sequence.finish_reason == FinishReason("stop", next(iter(params.values()))[0])
    assert "".join(chunk.text for chunk in chunks) == ("ab" if params.get("stop", [""])[0].startswith("c") else "abc")
