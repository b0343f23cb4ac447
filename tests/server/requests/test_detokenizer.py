from __future__ import annotations

import random
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


def test_a_character_comes_whole_with_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€😀b", add_special_tokens=False)
    assert len(ids) == 1 + 3 + 4 + 1
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["a", "", "", "€", "", "", "", "😀", "b", ""]


def test_a_prompt_that_ends_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x😀y", add_special_tokens=False)
    for cut in (2, 3, 4):
        assert "".join(pieces_of(detokenizer(tokenizer, ids[:cut]), ids[cut:])) == "😀y"


def test_a_prompt_of_broken_bytes_is_not_repeated(tokenizer: Tokenizer) -> None:
    continuation = tokenizer.encode("€", add_special_tokens=False)[1]
    a, b = tokenizer.encode("ab", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, [continuation] * 5), [a, b]) == ["a", "b", ""]


def test_nothing_came_of_an_unfinished_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert detokenizer(tokenizer, ids[:2]).flush() == ""


def test_bytes_that_never_became_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab€", add_special_tokens=False)
    assert pieces_of(detokenizer(tokenizer, []), ids[:-1]) == ["a", "b", "", "", REPLACEMENT]
    broken = [ids[3], ids[0], ids[1]]
    assert "".join(pieces_of(detokenizer(tokenizer, []), broken)) == f"{REPLACEMENT}ab"


def test_broken_bytes_do_not_hold_the_text_up(tokenizer: Tokenizer) -> None:
    """However long the garbage, no more than three tokens wait."""
    lead = tokenizer.encode("€", add_special_tokens=False)[0]
    text = detokenizer(tokenizer, [])
    given = ""
    for number in range(1, 50):
        given += text.push(lead)
        assert len(given) >= number - 3
    assert given + text.flush() == REPLACEMENT * 49


def test_a_flush_in_the_middle_gives_each_token_out_once(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("€a", add_special_tokens=False)
    text = detokenizer(tokenizer, [])
    assert [text.push(ids[0]), text.flush(), text.flush(), text.push(ids[3])] == ["", REPLACEMENT, "", "a"]


def test_special_tokens_have_no_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    ids.insert(1, THINK)
    assert pieces_of(detokenizer(tokenizer, [], skip=True), ids) == ["a", "", "b", ""]
    assert pieces_of(detokenizer(tokenizer, [], skip=False), ids) == ["a", "<think>", "b", ""]


def test_special_tokens_inside_a_character_do_not_end_it(tokenizer: Tokenizer) -> None:
    first, second, third = tokenizer.encode("€", add_special_tokens=False)
    ids = [first, THINK, THINK, THINK, END, second, third]
    assert pieces_of(detokenizer(tokenizer, []), ids) == ["", "", "", "", "", "", "€", ""]


def random_ids(rng: random.Random, tokenizer: Tokenizer, length: int) -> list[int]:
    """Text in several scripts, broken bytes, cut characters and special tokens, mixed."""
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
def test_the_pieces_are_the_text(seed: int, skip: bool, tokenizer: Tokenizer) -> None:
    rng = random.Random(seed)
    context, ids = random_ids(rng, tokenizer, rng.randint(0, 5))[:5], random_ids(rng, tokenizer, 40)
    text = detokenizer(tokenizer, context, skip)

    def decoded(count: int) -> str:
        return tokenizer.decode(context + ids[:count], skip_special_tokens=skip)

    # What the prompt leaves open is the output's: the known prefix ends before its unfinished character.
    known = decoded(0)
    for pending in range(1, min(3, len(context)) + 1):
        if known.endswith(REPLACEMENT):
            shorter = tokenizer.decode(context[: len(context) - pending], skip_special_tokens=skip)
            if not shorter.endswith(REPLACEMENT):
                known = shorter
    whole = decoded(len(ids))
    given = known
    for count, token in enumerate(ids, 1):
        given += text.push(token)
        # No later token changes what was given out, so no piece ended inside a character.
        assert whole.startswith(given)
        assert len(decoded(count)) - len(given) <= 3
    assert given + text.flush() == whole


def test_the_space_before_a_word_is_kept(sentencepiece_like: Tokenizer) -> None:
    """Decoding alone strips the space of a first word: the piece is the difference to the token before."""
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
    """The text that is given out, and the stop string that ended it."""
    search = StopStrings(stop, include=include)
    given = ""
    for piece in pieces:
        found = search.push(piece)
        if isinstance(found, StopMatch):
            return given + found.text, found.matched
        given += found
    return given + search.flush(), None


def naive(stop: tuple[str, ...], text: str, include: bool) -> tuple[str, str | None]:
    """Character by character: what is complete first ends the text, the longest of those."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop if text[:end].endswith(string)]
        if complete:
            matched = max(complete, key=len)
            return text[: end if include else end - len(matched)], matched
    return text, None


def test_without_stop_strings_all_is_given_out_at_once() -> None:
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


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    search = StopStrings(("</end>",), include=False)
    assert [search.push(piece) for piece in ("one", " <", " two </", "e", "x")] == ["one", " ", "< two ", "", "</ex"]


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_any_split_stops_at_the_same_place(seed: int, include: bool) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        stop = tuple("".join(rng.choices("ab", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
        text = "".join(rng.choices("aabbc", k=rng.randint(0, 30)))
        expected = naive(stop, text, include)
        for _ in range(3):
            cuts: list[Any] = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 12)))
            pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert stopped(stop, pieces, include) == expected
