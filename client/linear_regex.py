r"""Regular expressions of clients, searched in a time that is linear in the text.

Python's `re` backtracks: `(a+)+b` takes exponential time, and may come from a client. So a pattern is parsed by
Python's parser, translated to the syntax of Rust's `regex`, which never backtracks, and searched by that, through
pydantic. What needs backtracking (lookaround, references to groups, atomic groups) is refused.

What differs, all of it rare:

- For `\b` and `\B`, superscripts do not belong to words, and combining marks do. `\B` is found in an empty text, where
  Python finds it from version 3.14 on.
- Under `(?i)`, the dotless ı and the dotted İ are no cases of i, and `\w` is found in the combining iota, U+0345. Under
  `(?ia)`, the case of letters outside ASCII is ignored too: é is found in É, k in the Kelvin sign, and s in ſ.
- Without `(?m)`, `$` takes the line feed at the end of the text: what follows in the pattern is matched after it.
- Characters that are newer than Python's edition of Unicode have the classes of the newer one.
"""

from __future__ import annotations

import importlib
import re
import threading
import warnings
from typing import Any

sre: Any = importlib.import_module("re._constants")  # without type stubs
sre_parser: Any = importlib.import_module("re._parser")

MAX_PATTERN_LENGTH = 1000
"""Maximum number of characters."""
MAX_SIZE = 1000
"""Maximum number of characters and operators, with repetitions written out."""

_warnings_lock = threading.Lock()
"""Held while warnings are ignored: `catch_warnings` saves and restores filters that all threads share."""
_MAX_DEPTH = 50
_CLASS_SIZE = 10
_FOLDED_PER_SIZE = 1000
"""Characters of a range whose case is ignored that count as one: the compiler looks at each of them."""
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    # Python's str.isspace() has the separators U+001C to U+001F too.
    sre.CATEGORY_SPACE: r"[\s\x1c-\x1f]",
    sre.CATEGORY_NOT_SPACE: r"[^\s\x1c-\x1f]",
    # Python's \w: letters and numbers of all kinds, and the underscore; no marks.
    sre.CATEGORY_WORD: r"[\p{L}\p{N}_]",
    sre.CATEGORY_NOT_WORD: r"[^\p{L}\p{N}_]",
}
_ASCII_CATEGORIES = {
    sre.CATEGORY_DIGIT: "[0-9]",
    sre.CATEGORY_NOT_DIGIT: "[^0-9]",
    sre.CATEGORY_SPACE: r"[ \t-\r]",
    sre.CATEGORY_NOT_SPACE: r"[^ \t-\r]",
    sre.CATEGORY_WORD: "[0-9A-Za-z_]",
    sre.CATEGORY_NOT_WORD: "[^0-9A-Za-z_]",
}
NEEDS_BACKTRACKING = {
    sre.ASSERT: "lookahead and lookbehind are",
    sre.ASSERT_NOT: "lookahead and lookbehind are",
    sre.GROUPREF: "references to groups are",
    sre.GROUPREF_EXISTS: "references to groups are",
    sre.ATOMIC_GROUP: "atomic groups are",
    sre.POSSESSIVE_REPEAT: "possessive repetitions are",
}
"""Operations of Python's parser that only a backtracking search can do, as the beginning of a message."""


class LinearRegex:
    """A pattern with the meaning that Python's `re` gives it.

    Args:
        pattern: the pattern.

    Attributes:
        pattern: the same.
        size: number of its characters and operators, with repetitions written out: the cost of a character of a text.

    Raises:
        ValueError: it is malformed, too large, or needs backtracking; the message says which.
    """

    def __init__(self, pattern: str) -> None:
        if len(pattern) > MAX_PATTERN_LENGTH:
            raise ValueError(f"a pattern of {len(pattern)} characters, at most {MAX_PATTERN_LENGTH} are allowed")
        translator = _Translator()
        parsed = parse_pattern(pattern)
        translated = translator.sequence(parsed, parsed.state.flags, 1, 0)
        self.pattern = pattern
        self.size = translator.size
        self._searcher = _searcher(translated)

    def is_found_in(self, text: str) -> bool:
        """Return whether the pattern matches somewhere in a text, as `re.search` does."""
        found: bool = self._searcher.isinstance_python(text)
        return found


def parse_pattern(pattern: str) -> Any:
    """Parse a pattern with Python's parser, without its warnings.

    Raises:
        ValueError: it is malformed; the message says how.
    """
    try:
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that may mean something else one day
            return sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


def _searcher(translated: str) -> Any:
    """Return a validator of the strings in which a pattern of Rust's is found; None in a client without pydantic."""
    try:
        from pydantic_core import SchemaError, SchemaValidator, core_schema
    except ImportError:
        return None
    try:
        return SchemaValidator(core_schema.str_schema(pattern=translated, regex_engine="rust-regex"))
    except SchemaError:
        raise ValueError("too large to be compiled") from None


class _Translator:
    """Writes a parsed pattern in Rust's syntax.

    Attributes:
        size: see `LinearRegex`.
    """

    def __init__(self) -> None:
        self.size = 0

    def sequence(self, items: Any, flags: int, times: int, depth: int) -> str:
        """Translate a sequence.

        Args:
            items: of the sequence, from Python's parser.
            flags: Python's flags that apply.
            times: how often all of it may be repeated.
            depth: number of groups around it.
        """
        if depth > _MAX_DEPTH:
            raise ValueError(f"groups are nested deeper than {_MAX_DEPTH}")
        return "".join(self._item(op, argument, flags, times, depth) for op, argument in items)

    def _item(self, op: Any, argument: Any, flags: int, times: int, depth: int) -> str:
        if op in NEEDS_BACKTRACKING:
            raise ValueError(f"{NEEDS_BACKTRACKING[op]} not supported: patterns are searched in linear time")
        match op:
            case sre.BRANCH:
                self._add(len(argument[1]), times)
                branches = (self.sequence(each, flags, times, depth + 1) for each in argument[1])
                return f"(?:{'|'.join(branches)})"
            case sre.SUBPATTERN:
                _, added, removed, inner = argument
                return f"(?:{self.sequence(inner, combined_flags(flags, added, removed), times, depth + 1)})"
            case sre.MAX_REPEAT | sre.MIN_REPEAT:
                least, most, inner = argument
                endless = most is sre.MAXREPEAT or most == sre.MAXREPEAT
                count = max(1, least if endless else most)
                self._add(0, times * count)
                text = self.sequence(inner, flags, times * count, depth + 1)
                return f"(?:{text}){{{least},{'' if endless else most}}}"
            case sre.AT:
                self._add(1, times)
                return _position(argument, flags)
            case _:
                self._add(_size(op, argument, flags), times)
                return _with_case(_character(op, argument, flags), flags)

    def _add(self, size: int, times: int) -> None:
        self.size += size * times
        if max(self.size, times) > MAX_SIZE:
            raise ValueError(f"its repetitions and sets amount to more than {MAX_SIZE} characters and operators")


def combined_flags(flags: int, added: int, removed: int) -> int:
    """Return the flags inside a group, such as those of `(?i-s:…)`."""
    if added & sre_parser.TYPE_FLAGS:
        flags &= ~sre_parser.TYPE_FLAGS
    return (flags | added) & ~removed


def _size(op: Any, argument: Any, flags: int) -> int:
    """Return 1, or more for large sets: classes of Unicode characters, and ranges whose case is ignored."""
    if op is not sre.IN:
        return 1
    has_class = not flags & re.ASCII and any(member is sre.CATEGORY for member, _ in argument)
    size = _CLASS_SIZE if has_class else 1
    if flags & re.IGNORECASE:
        size += sum(each[1] - each[0] for member, each in argument if member is sre.RANGE) // _FOLDED_PER_SIZE
    return size


def _with_case(text: str, flags: int) -> str:
    return f"(?i:{text})" if flags & re.IGNORECASE else text


def _character(op: Any, argument: Any, flags: int) -> str:
    match op:
        case sre.LITERAL:
            return _literal(argument)
        case sre.NOT_LITERAL:
            return f"[^{_literal(argument)}]"
        case sre.ANY:
            return "(?s:.)" if flags & re.DOTALL else r"[^\n]"
        case sre.IN:
            negated = argument[0][0] is sre.NEGATE
            return f"[{'^' * negated}{''.join(_member(kind, each, flags) for kind, each in argument[negated:])}]"
        case _:
            raise ValueError(f"{str(op).lower()} is not supported")


def _member(op: Any, argument: Any, flags: int) -> str:
    match op:
        case sre.LITERAL:
            return _literal(argument)
        case sre.RANGE:
            return f"{_literal(argument[0])}-{_literal(argument[1])}"
        case _:
            return _category(argument, flags)


def _category(category: Any, flags: int) -> str:
    return (_ASCII_CATEGORIES if flags & re.ASCII else _CATEGORIES)[category]


def _literal(code: int) -> str:
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("an unpaired surrogate is not a character")
    return rf"\x{{{code:x}}}"


def _position(position: Any, flags: int) -> str:
    multiline = bool(flags & re.MULTILINE)
    match position:
        case sre.AT_BEGINNING:
            return "(?m:^)" if multiline else r"\A"
        case sre.AT_BEGINNING_STRING:
            return r"\A"
        case sre.AT_END:
            return "(?m:$)" if multiline else r"\n?\z"
        case sre.AT_END_STRING:
            return r"\z"
        case sre.AT_BOUNDARY | sre.AT_NON_BOUNDARY:
            text = r"\b" if position is sre.AT_BOUNDARY else r"\B"
            return f"(?-u:{text})" if flags & re.ASCII else text
        case _:
            raise ValueError(f"{str(position).lower()} is not supported")
