from __future__ import annotations

import random
import string

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from logitship.builtin_processors.grammars.cursor import GrammarCursor
from logitship.sampler.allowed_tokens import Words

EOS = 256
TOKENIZER = LLTokenizer("byte")


def _matcher(regex: str) -> LLMatcher:
    return LLMatcher(TOKENIZER, LLMatcher.grammar_from_regex(regex))


def _mask(matcher: LLMatcher) -> Words:
    words = allocate_token_bitmask(1, TOKENIZER.vocab_size)
    fill_next_token_bitmask(matcher, words, 0)
    return words[0]


def _mask_after(regex: str, output: list[int]) -> Words:
    """Return the mask of a cursor that never removed a token."""
    cursor = GrammarCursor(_matcher(regex), frozenset({EOS}))
    cursor.follow(output)
    return _mask(cursor.matcher)


def _ids(text: str) -> list[int]:
    return list(text.encode())


@pytest.fixture
def cursor() -> GrammarCursor:
    return GrammarCursor(_matcher("[a-d]*"), frozenset({EOS}))


def _look_ahead(cursor: GrammarCursor) -> tuple[Words, Words]:
    """Let a forced run look at the masks after `a` and after `abc`, and remove `bc` again."""
    cursor.follow(_ids("a"))
    cursor.mask = here = _mask(cursor.matcher)
    cursor.follow(_ids("abc"))
    cursor.mask = ahead = _mask(cursor.matcher)
    cursor.follow(_ids("a"))
    return here, ahead


def test_masks_of_removed_tokens_serve_again(cursor: GrammarCursor) -> None:
    here, ahead = _look_ahead(cursor)
    assert cursor.mask is here
    cursor.follow(_ids("ab"))
    assert cursor.mask is None  # it was not asked for
    cursor.follow(_ids("abc"))
    assert cursor.mask is ahead


def test_masks_of_other_tokens_are_dropped(cursor: GrammarCursor) -> None:
    _look_ahead(cursor)
    cursor.follow(_ids("ad"))
    assert cursor.mask is None
    cursor.follow(_ids("adc"))
    assert cursor.mask is None


def test_masks_of_the_past_are_dropped(cursor: GrammarCursor) -> None:
    output: list[int] = []
    for token in _ids("abcd" * 10):
        output.append(token)
        cursor.follow(output)
        cursor.mask = _mask(cursor.matcher)
    assert len(cursor._masks) == 2


@pytest.mark.parametrize("regex", ["[a-d]*", "(ab|ac)*d?", "a(b(c(da?)?)?)?"])
def test_cached_masks_are_those_of_the_tokens(regex: str) -> None:
    """Tokens are appended and removed at random, in copies too."""
    choose = random.Random(0)
    cursor, output = GrammarCursor(_matcher(regex), frozenset({EOS})), list[int]()
    num_cached = 0
    for _ in range(400):
        del output[choose.randint(0, len(output)) :]
        cursor.follow(output)
        output += _ids("".join(choose.choices(string.ascii_lowercase[:4], k=choose.choice((0, 1, 1, 3)))))
        cursor.follow(output)
        if cursor.is_refused:
            output.clear()
            continue
        if cursor.mask is None:
            cursor.mask = _mask(cursor.matcher)
        else:
            num_cached += 1
        np.testing.assert_array_equal(cursor.mask, _mask_after(regex, output))
        if choose.random() < 0.1:
            cursor = GrammarCursor.__deepcopy__(cursor, {})
    assert num_cached > 10
