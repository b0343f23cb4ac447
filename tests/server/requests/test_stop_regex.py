from __future__ import annotations

import contextlib
import gc
import random
import re
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.messages import FinishReason, GenerationChunk
from logitship.server.requests.sequence import Sequence
from logitship.server.requests.stop_regex import (
    MAX_STOP_REGEX,
    CompiledStopRegex,
    StopRegexSearch,
    compile_stop_regex,
)
from logitship.server.tokenizer import IncrementalDetokenizer, Tokenizer
from tests.helpers.random_cases import random_seeds

END = 1
CHARACTERS = "aAb_ \né1²"
ATOMS = (
    *("a", "b", "A", "_", " ", "é", r"\n", ".", "[ab]", "[^a]", r"\w", r"\W", r"\s", r"[\d_]"),
    *(r"[^\W_]", "[²-é]", "[^A-Z_é]", "(?i:[^a-z])", "(?i:[É1])", r"(?a:[\w ])"),
    *("^", "$", r"\A", r"\Z", r"\b", r"\B", "(?m:^)", "(?m:$)", r"(?a:\b)", r"(?a:\B)"),
    *(r"(?a:\w)", "(?i:a)", "(?s:.)", "(?-i:b)"),
)
REPETITIONS = ("*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?", "{0}")


def random_pattern(generator: random.Random, depth: int = 0) -> str:
    kind = generator.random()
    if depth > 2 or kind < 0.4:
        return generator.choice(ATOMS)
    if kind < 0.7:
        return "".join(random_pattern(generator, depth + 1) for _ in range(generator.randint(1, 3)))
    one, other = (random_pattern(generator, depth + 1) for _ in range(2))
    return generator.choice([f"(?:{one}|{other})", f"({one})", f"(?:{one}){generator.choice(REPETITIONS)}"])


def random_piece(generator: random.Random) -> str:
    return "".join(generator.choices(CHARACTERS, k=generator.randint(0, 3)))


def search(*patterns: str) -> StopRegexSearch:
    compiled = CompiledStopRegex(patterns)
    assert compiled.start is not None
    return StopRegexSearch(compiled, compiled.start)


def pushed(pattern: str, *pieces: str) -> list[bool]:
    searched = search(pattern)
    return [searched.push(piece) is not None for piece in pieces]


def first_match(patterns: list[str], text: str, begin: int) -> str | None:
    """Slow reference: search the whole text."""
    return next((pattern for pattern in patterns if re.compile(pattern).search(text, begin)), None)


@random_seeds(4)
def test_finds_what_re_finds_after_each_piece(seed: int) -> None:
    generator = random.Random(seed)
    found = 0
    for _ in range(400):
        flags = generator.choice(["", "", "(?i)", "(?m)", "(?a)", "(?s)"])
        given = [flags + random_pattern(generator) for _ in range(generator.randint(1, 2))]
        compiled = CompiledStopRegex(tuple(given))
        patterns = [pattern for pattern in given if pattern not in compiled.literals]
        if compiled.start is None:
            assert not patterns
            continue
        searched, text = StopRegexSearch(compiled, compiled.start), ""
        for _ in range(generator.randint(0, 2)):
            text += (piece := random_piece(generator))
            searched.skip(piece)
        begin = len(text)
        for _ in range(5):
            text += (piece := random_piece(generator))
            expected = first_match(patterns, text, begin) if piece else None
            assert searched.push(piece) == expected, (patterns, text, begin)
            if expected is not None:
                found += 1
                break
    assert found > 100


@pytest.mark.parametrize(
    ("pattern", "pieces", "expected"),
    [
        (r"[.!?]\s*$", ["A.b", ".", " "], [False, True, True]),
        ("E.D", ["oneE", "N", "D"], [False, False, True]),
        ("END$", ["END.", "END"], [False, True]),
        ("END$", ["EN", "D\n"], [False, True]),
        (r"END\Z", ["EN", "D\n"], [False, False]),
        (r"\bcat\b", ["concat", " cats", " cat"], [False, False, True]),
        ("^b", ["a\n", "b"], [False, False]),
        ("(?m)^b", ["a\n", "b"], [False, True]),
        ("a*", ["b"], [True]),
    ],
)
def test_anchors_see_the_text_so_far(pattern: str, pieces: list[str], expected: list[bool]) -> None:
    assert pushed(pattern, *pieces) == expected


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "pattern",
    [
        r"(?a:\B)*\B\b",
        r"(?a:\B)*\B(?a:\b)",
        r"(?a:\b)*\b\B",
        r"(?:(?a:\b))*\B\b",
        r"x?(?a:\B)*\B\b",
        r"(?:(?:(?a:\B))+?){0,2}\B((?a:\b))",
    ],
)
def test_contradictory_assertions_after_a_repetition(pattern: str) -> None:
    for text in ("", "a", "a b", "é", "aé", "!", "x!"):
        found = search(pattern).push(text) is not None
        assert found == (bool(text) and re.search(pattern, text) is not None), text


def test_first_pattern_is_reported() -> None:
    assert search("b+", "a+").push("xab") == "b+"
    assert search("b+$", "a+").push("ab a") == "a+"


@pytest.mark.parametrize("pattern", ["END", "\n\n", "}", "a,b", "é"])
def test_pattern_without_special_characters_is_a_literal(pattern: str) -> None:
    compiled = CompiledStopRegex((pattern, "x+"))
    assert compiled.literals == (pattern,)
    assert CompiledStopRegex((pattern,)).start is None


@pytest.mark.parametrize("pattern", ["a.", r"\.", "(?i)a", "(a)", "a|bc", "^a", r"\n"])
def test_pattern_with_special_characters_is_none(pattern: str) -> None:
    assert CompiledStopRegex((pattern,)).literals == ()


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(?=a)", "'(?=a)': lookahead and lookbehind are not supported"),
        ("(?<!a)b", "lookahead and lookbehind are not supported"),
        (r"(a)\1", "references to groups are not supported"),
        ("(?>a)b", "atomic groups are not supported"),
        ("a++", "possessive repetitions are not supported"),
        ("(?!)", "not supported"),
        ("(", "not a regular expression: missing )"),
        ("a{99999999999}", "not a regular expression: the repetition number is too large"),
        ("(?:" * 5000, "not a regular expression"),
        (f"a.{{{MAX_STOP_REGEX}}}", f"more than {MAX_STOP_REGEX} characters and operators"),
        ("(?:(?:a{99}){99}){99}", "more than"),
        ("(?:^^){1000000000}", "more than"),
        ("(?:){0,1000000000}.", "more than"),
    ],
)
def test_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        CompiledStopRegex((pattern,))


def test_size_is_that_of_all_patterns() -> None:
    half = f"[ab].{{{MAX_STOP_REGEX // 2 - 10}}}"
    assert CompiledStopRegex((half, half)).start is not None
    with pytest.raises(ValueError, match="with it, the patterns have more than"):
        CompiledStopRegex((half, half, "a" * 30 + "."))


def test_repetition_of_nothing_is_empty() -> None:
    assert pushed("(?:){1000000000}b.", "ab", "c") == [False, True]


def test_time_does_not_grow_with_the_text() -> None:
    """Python's `re` takes exponential time for the first, and for both the time of the whole text in each step."""
    for pattern in ("(a+)+b", "[xa].*y"):
        searched = search(pattern)
        started = time.process_time()
        for _ in range(20_000):
            assert searched.push("aaaa") is None
        assert time.process_time() - started < 5


def test_memory_is_bounded() -> None:
    """Each character of this text leads to a state that was never reached before."""
    generator = random.Random(1)
    compiled = CompiledStopRegex(("a[ab]{300}c",))
    assert compiled.start is not None
    searched = StopRegexSearch(compiled, compiled.start)
    for _ in range(250):
        assert searched.push("".join(generator.choices("ab", k=20))) is None
    gc.collect()
    assert sum(type(each) is type(compiled.start) for each in gc.get_objects()) < 4500
    assert searched.push("a" * 301 + "c") is not None


def test_time_of_a_new_state_is_short() -> None:
    """Each character of these texts leads to another state, and finds the most paths."""
    generator = random.Random(2)
    assertions = r"(?:\b|\B|$|(?a:\b)|(?a:\B)|(?m:$)|\Z|)"
    for pattern in ("a[ab]{480}c", f"(?:.?{assertions}){{45}}x", "(?:" * 48 + "a?" + ")*" * 48 + "x"):
        searched = search(pattern)
        started = time.process_time()
        for _ in range(100):
            assert searched.push("".join(generator.choices("ab é!\n", k=20))) is None
        assert time.process_time() - started < 2


@pytest.mark.parametrize("flags", ["", "(?i)"])
def test_sets_are_compiled_in_a_short_time(flags: str) -> None:
    """Python's `re` takes ten milliseconds for each of these sets."""
    sets = [f"[{chr(code)}-\uffff]" for code in range(0x4000, 0x4000 + 480)]
    started = time.process_time()
    with pytest.raises(ValueError, match="whose case is ignored") if flags else contextlib.nullcontext():
        CompiledStopRegex(tuple(flags + "".join(sets[begin : begin + 40]) for begin in range(0, 480, 40)))
    assert time.process_time() - started < 0.5


Grown = Callable[..., list[GenerationChunk]]


@pytest.fixture
def grow(tokenizer: Tokenizer) -> Grown:
    """Return a function that makes a sequence of tokens, until it ends, and returns its chunks."""

    def grown(tokens: list[int] | str, max_tokens: int = 1000, **params: object) -> list[GenerationChunk]:
        ids = tokenizer.encode(tokens, add_special_tokens=False) if isinstance(tokens, str) else tokens
        chunks: list[GenerationChunk] = []
        values = SamplingParams(max_tokens=max_tokens, eos_token_ids={END}, **params)  # type: ignore[arg-type]
        sequence = Sequence("r", 0, frozenset("r"), [5], values, max_tokens, tokenizer, chunks.append)
        for token in ids:
            other = sequence.fork(lambda _: None)
            other.append(ids[0], None)
            would_end = sequence.would_end(token)
            sequence.append(token, None)
            assert would_end is (sequence.finish_reason is not None)
            if would_end:
                break
        return chunks

    return grown


def text_of(chunks: list[GenerationChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_text_is_kept_and_not_held_back(grow: Grown) -> None:
    chunks = grow("one END two", stop_regex=r"E\w+D")
    assert [chunk.text for chunk in chunks] == list("one END")
    assert chunks[-1].finish_reason == FinishReason("stop", r"E\w+D")


def test_literal_is_trimmed_like_a_stop_string(grow: Grown) -> None:
    chunks = grow("one END two", stop_regex=["x+", "END"])
    assert (text_of(chunks), chunks[-1].finish_reason) == ("one ", FinishReason("stop", "END"))
    assert all("E" not in chunk.text for chunk in chunks)
    assert text_of(grow("one END two", stop_regex="END", include_stop_str_in_output=True)) == "one END"


def test_text_held_back_for_a_stop_string_is_kept(grow: Grown) -> None:
    chunks = grow("one END two", stop="END two", stop_regex="N.+")
    assert [chunk.text for chunk in chunks] == [*"one ", "", "", "END"]


def test_stop_string_of_the_same_token_comes_first(grow: Grown) -> None:
    chunks = grow("abc", stop="bc", stop_regex="c+")
    assert (text_of(chunks), chunks[-1].finish_reason) == ("a", FinishReason("stop", "bc"))


def test_stop_token_comes_first(grow: Grown, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert grow([*ids, END], stop_regex="$c|x")[-1].finish_reason == FinishReason("stop", END)
    assert grow([END], stop_regex="^$")[-1].finish_reason == FinishReason("stop", END)


def test_match_in_the_last_text_is_the_reason(grow: Grown, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab€", add_special_tokens=False)[:-1]
    chunks = grow(ids, max_tokens=len(ids), stop_regex="\ufffd.*")
    assert (text_of(chunks), chunks[-1].finish_reason) == ("ab\ufffd", FinishReason("stop", "\ufffd.*"))
    assert grow(ids, max_tokens=len(ids), stop_regex="x+")[-1].finish_reason == FinishReason("length")


def test_min_tokens(grow: Grown) -> None:
    """Matches begin in the text after them, but anchors see all of it."""
    assert text_of(grow("aab aab", stop_regex="a+b", min_tokens=1)) == "aab"
    assert text_of(grow("aab aab", stop_regex="a+b", min_tokens=3)) == "aab aab"
    assert text_of(grow("aab aab b", stop_regex="^a+|b.b", min_tokens=2)) == "aab aab b"
    assert text_of(grow("ab b", stop_regex=r"\bb", min_tokens=1)) == "ab b"


@random_seeds(3, shares_fixtures=True)
def test_sequences_end_where_a_search_of_the_whole_text_says(grow: Grown, tokenizer: Tokenizer, seed: int) -> None:
    generator = random.Random(seed)
    kinds = set()
    for _ in range(40):
        ids = tokenizer.encode("".join(generator.choices(CHARACTERS, k=12)), add_special_tokens=False)
        pattern = random_pattern(generator) + generator.choice([".", "[ab]+", r"\s"])
        min_tokens = generator.choice([0, 0, 3])
        detokenizer = IncrementalDetokenizer(
            tokenizer, [5], skip_special_tokens=True, spaces_between_special_tokens=True
        )
        text, begin, expected = "", 0, FinishReason("length")
        for index, token in enumerate(ids, 1):
            text += (piece := detokenizer.push(token))
            if index <= min_tokens:
                begin = len(text)
            elif piece and re.compile(pattern).search(text, begin):
                expected = FinishReason("stop", pattern)
                break
        text += detokenizer.flush()
        if expected.kind == "length" and min_tokens < len(ids) and re.compile(pattern).search(text, begin):
            continue  # a match in the incomplete character at the end, tested above
        chunks = grow(ids, max_tokens=len(ids), stop_regex=pattern, min_tokens=min_tokens)
        assert (text_of(chunks), chunks[-1].finish_reason) == (text, expected), (pattern, min_tokens)
        kinds.add(expected.kind)
    assert kinds == {"stop", "length"}


def test_patterns_of_a_request_are_compiled_once() -> None:
    assert compile_stop_regex(("a+",)) is compile_stop_regex(("a+",))


def test_tenants_share_no_compiled_patterns() -> None:
    own = compile_stop_regex(("secret+",), "a")
    assert compile_stop_regex(("secret+",), "a") is own
    assert compile_stop_regex(("secret+",), "b") is not own


def test_warnings_are_as_before_after_parsing_on_several_threads() -> None:
    """Python warns of this pattern; one thread's filters must not become those of all."""
    filters, interval = warnings.filters[:], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(CompiledStopRegex, [("[[a]",)] * 2000))
        assert warnings.filters == filters
    finally:
        sys.setswitchinterval(interval)
        warnings.filters[:] = filters  # type: ignore[index]
