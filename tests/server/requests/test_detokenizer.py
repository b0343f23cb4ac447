from __future__ import annotations

import random
import time
from typing import Any

import pytest
from tokenizers import Tokenizer as TokenizersTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from logitship.server.requests.detokenizer import IncrementalDetokenizer, StopMatch, StopStrings
from logitship.server.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
END, THINK = 1, 2
"""Special tokens of the tiny tokenizer."""


def detokenizer(tokenizer: Tokenizer, context: list[int], skip: bool = True) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, context, skip_special_tokens=skip, spaces_between_special_tokens=True)


def pieces_of(text: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*(text.push(token) for token in ids), text.flush()]


def test_character_is_emitted_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€😀b", add_special_tokens=False)
    assert len(ids) == 1 + 3 + 4 + 1
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_prompt_ends_inside_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀y", add_special_tokens=False)
    for cut in (2, 3, 4):
        assert "".join(pieces_of(detokenizer(tokenizer, ids[:cut]), ids[cut:])) == "😀y"


def test_invalid_bytes_of_prompt_are_not_repeated(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("€", add_special_tokens=False)[1]
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, [continuation] * 5), [a, b]) == ["a", "b", ""]


def test_incomplete_prompt_without_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert detokenizer(tokenizer, ids[:2]).flush() == ""


def test_incomplete_characters_become_replacement_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab€", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, []), ids[:-1]) == ["a", "b", "", "", REPLACEMENT]
    broken = [ids[3], ids[0], ids[1]]
    assert "".join(pieces_of(detokenizer(tokenizer, []), broken)) == f"{REPLACEMENT}ab"


def test_invalid_bytes_hold_back_at_most_three_tokens(tokenizer: Tokenizer) -> None:
    """However many invalid bytes there are."""
    lead = tokenizer.encode("€", add_special_tokens=False)[0]
    text = detokenizer(tokenizer, [])
    emitted = ""
    for number in range(1, 50):
        emitted += text.push(lead)
        assert len(emitted) >= number - 3
    assert emitted + text.flush() == REPLACEMENT * 49


def test_flush_does_not_repeat_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€a", add_special_tokens=False)
    text = detokenizer(tokenizer, [])
    assert [text.push(ids[0]), text.flush(), text.flush(), text.push(ids[3])] == ["", REPLACEMENT, "", "a"]


def test_skip_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    ids.insert(1, THINK)
    assert pieces_of(detokenizer(tokenizer, [], skip=True), ids) == ["a", "", "b", ""]
    assert pieces_of(detokenizer(tokenizer, [], skip=False), ids) == ["a", "<think>", "b", ""]


def test_special_tokens_inside_character(tokenizer: Tokenizer) -> None:
    first, second, third = tokenizer.encode("€", add_special_tokens=False)
    ids = [first, THINK, THINK, THINK, END, second, third]
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["", "", "", "", "", "", "€", ""]


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Return a mix of several scripts, invalid bytes, incomplete characters and special tokens."""
    ids: list[int] = []
    while len(ids) < length:
        kind = rng.random()
        if kind < 0.6:
            text = "".join(rng.choices("ab é€ß日本語😀👩‍🚀\ufffd", k=rng.randint(1, 4)))
            ids += tokenizer.encode(text, add_special_tokens=False)[: rng.choice([1, 2, 100])]
        elif kind < 0.9:
            ids += [rng.randrange(4, 260) for _ in range(rng.randint(1, 3))]
        else:
            ids.append(rng.randrange(4))
    return ids


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_pieces_concatenate_to_the_decoded_text(seed: int, skip: bool, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)
    context, ids = random_ids(rng, tokenizer, rng.randint(0, 5))[:5], random_ids(rng, tokenizer, 40)
    text = detokenizer(tokenizer, context, skip)

    def decoded(count: int) -> str:
        return tokenizer.decode(context + ids[:count], skip_special_tokens=skip)

    # An incomplete character at the end of the prompt is part of the output.
    known = decoded(0)
    for pending in range(1, min(3, len(context)) + 1):
        if known.endswith(REPLACEMENT):
            shorter = tokenizer.decode(context[: len(context) - pending], skip_special_tokens=skip)
            if not shorter.endswith(REPLACEMENT):
                known = shorter
    whole = decoded(len(ids))
    emitted = known
    for count, token in enumerate(ids, 1):
        emitted += text.push(token)
        # Later tokens do not change emitted text, so no piece ended inside a character.
        assert whole.startswith(emitted)
        assert len(decoded(count)) - len(emitted) <= 3
    assert emitted + text.flush() == whole


def test_leading_space_is_kept(sentencepiece_like: Tokenizer) -> None:
    """Decoding a word alone strips its space: a piece is the difference to the previous token."""
    text = detokenizer(sentencepiece_like, [3])
    assert pieces_of(text, [4, 3, 4]) == [" world", " hello", " world", ""]
    assert pieces_of(detokenizer(sentencepiece_like, []), [3, 4]) == ["hello", " world", ""]


@pytest.fixture(scope="module")
def sentencepiece_like() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁hello": 3, "▁world": 4}
    tokenizer = TokenizersTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"))


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
@pytest.mark.parametrize("seed", range(100))
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
