"""Patterns mean what they mean to Python's `re`, and never take long."""

from __future__ import annotations

import random
import re
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from logitship.client.linear_regex import LinearRegex, parse_pattern

PATTERNS = [
    "", "|a", "a+b", "(a|b)*c$", r"\d{2,3}", r"\w+@\w+\.com", "(?i)stop", r"[^\s]x", r"^\n", r"\bfoo\b", "(?m)^b$",
    "(?s)a.b", "a.b", "[a-c&&b]", "[[:alpha:]]", "x{,2}y", "(?P<n>ab)+", r"\Aab\Z", "(?:a{2}){3}", r"[\w-]+!",
    r"(?a)\w\b", "a*?b", "é+", r"\$", r"[\]\-^]", "(?i:ß)|K", r"\S\D\W", r"(?a)[\s\d]é", r"\Bo", "[^a]$",
    "(?-i:a)(?i:b)",    "a{2}|a{4,}", "(?x) a b # c", "(?i)[k-s]", "²|½", r"\w²",
]  # fmt: skip
ALPHABET = "abcxy foo@.com12\n!ABSTOPéß٣ K$-^]_&[:ſ\x1c²"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_matches_are_those_of_re(pattern: str) -> None:
    rng = random.Random(pattern)
    ours = LinearRegex(pattern)
    # The one difference: where a word ends next to a superscript or a combining mark.
    alphabet = ALPHABET.replace("²", "") if "\\b" in pattern.lower() else ALPHABET
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = re.compile(pattern)
    for _ in range(1500):
        text = "".join(rng.choices(alphabet, k=rng.randrange(10)))
        assert ours.is_found_in(text) == bool(theirs.search(text)), text


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"\w\b²", "a²"),
        (r"\b\u0301", "a\u0301"),
        ("(?i)ı", "i"),
        ("(?i)İ", "i"),
        (r"(?i)\w", "\u0345"),
        ("(?ia)é", "É"),
        ("(?ia)k", "\u212a"),
        ("(?ia)s", "ſ"),
        (r"a$\n", "a\n"),
        (r"a$\Z", "a\n"),
        (r"a$\b", "a\n"),
        ("$^", "\n"),
    ],
)
def test_documented_differences(pattern: str, text: str) -> None:
    assert LinearRegex(pattern).is_found_in(text) != bool(re.search(pattern, text))


def test_no_boundary_is_found_in_an_empty_text() -> None:
    assert LinearRegex(r"\B").is_found_in("")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?=a)", "lookahead and lookbehind are not supported"),
        ("(?<!a)b", "lookahead and lookbehind are not supported"),
        (r"(a)\1", "references to groups are not supported"),
        ("(a)?(?(1)b|c)", "references to groups are not supported"),
        ("(?>a)", "atomic groups are not supported"),
        ("a++", "possessive repetitions are not supported"),
        ("(", "not a regular expression: missing )"),
        ("a{3,2}", "not a regular expression"),
        ("(?:a{100}){100}", "amount to more than 1000 characters"),
        ("(?:){99999}", "amount to more than 1000 characters"),
        ("a{99999999999999999999}", "not a regular expression"),
        (r"\w{101}", "amount to more than 1000 characters"),
        (r"(?:(?:\b|\B)(?:\b|\B)[ab]?){200}", "amount to more than 1000 characters"),
        ("(?:a?||){400}", "amount to more than 1000 characters"),
        ("(?i)[\u0100-\U0010ffff]", "amount to more than 1000 characters"),
        ("a" * 1001, "a pattern of 1001 characters, at most 1000 are allowed"),
        ("(" * 60 + ")" * 60, "groups are nested deeper than 50"),
        ("[\ud800]", "an unpaired surrogate is not a character"),
    ],
)
def test_what_is_not_linear_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        LinearRegex(pattern)


def test_group_may_be_unicode_in_a_pattern_that_is_ascii() -> None:
    assert LinearRegex(r"(?a)(?u:\w)").is_found_in("é")
    assert not LinearRegex(r"(?a)(?u:\d)\w").is_found_in("1é")


def test_catastrophic_pattern_is_harmless() -> None:
    start = time.process_time()
    assert not LinearRegex("(a+)+b").is_found_in("a" * 1_000_000)
    assert time.process_time() - start < 2


def test_warnings_are_as_before_after_parsing_on_several_threads() -> None:
    """Python warns of this pattern; one thread's filters must not become those of all."""
    filters, interval = warnings.filters[:], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(parse_pattern, ["[[a]"] * 6000))
        assert warnings.filters == filters
    finally:
        sys.setswitchinterval(interval)
        warnings.filters[:] = filters  # type: ignore[index]
