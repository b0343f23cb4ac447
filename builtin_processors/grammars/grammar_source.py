"""Translates constraints into llguidance's syntax.

llguidance reads JSON schemas, regular expressions and a dialect of Lark. EBNF in the syntax of xgrammar and llama.cpp
(GBNF) is translated token by token: both have rules of alternatives of sequences, with the same operators.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from llguidance import regex_to_lark

from logitship.builtin_processors.params import shown

from .exclusive_schemas import has_exclusive_branches
from .schema_adaptation import adapt
from .schema_recursion import without_endless_references
from .schema_simplification import simplified


def from_json_schema(schema: dict[str, Any] | bool | str, whitespace_pattern: str | None = None) -> str:
    """Return a grammar for JSON that matches a schema. See `json_value`."""
    return NO_FORCING + f"start: {json_value(schema, whitespace_pattern)}"


def json_value(schema: dict[str, Any] | bool | str, whitespace_pattern: str | None = None) -> str:
    """Return a Lark expression for JSON that matches a schema.

    Args:
        schema: the schema, or its JSON text.
        whitespace_pattern: a regular expression for the white space between the parts of the JSON; "" for none; None
            for any.

    Raises:
        ValueError: the text is not JSON, or not a schema, or nothing matches the schema, or it has inexact numbers.
    """
    value: Any = json.loads(schema) if isinstance(schema, str) else schema
    if value is False:
        raise ValueError("no JSON matches the schema false")
    if value is not True and not isinstance(value, dict):
        raise ValueError(f"expected an object or true, got {shown(value)}")
    try:
        value = simplified(without_endless_references(value))
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    if value is False:
        raise ValueError("no text matches it")
    # Override options in the schema itself: one of them makes llguidance ignore unsupported keywords.
    options: dict[str, Any] = {"lenient": False, "coerce_one_of": has_exclusive_branches(value)}
    if whitespace_pattern is not None:
        options |= {"whitespace_pattern": whitespace_pattern} if whitespace_pattern else {"whitespace_flexible": False}
    value, more = adapt({} if value is True else value)
    options |= more
    return f"%json {json.dumps({**value, 'x-guidance': options}, allow_nan=False)}"


def from_regex(regex: str) -> str:
    """Return a grammar of the texts that fully match a regular expression."""
    return NO_FORCING + f"start: /{regex_to_lark(regex, '')}/"


def from_choice(choice: Sequence[str]) -> str:
    """Return a grammar of one of several texts.

    Raises:
        ValueError: the list is empty.
    """
    if not choice:
        raise ValueError("it is empty: give at least one text")
    # One expression instead of alternative rules, which are ambiguous if one choice is a prefix of another.
    return from_regex("|".join(map(literal, choice)))


def from_tokens(alternatives: Iterable[Sequence[int]]) -> str:
    """Return a grammar of one of several sequences of tokens."""
    written = (" ".join(f"<[{token}]>" for token in tokens) or '""' for tokens in alternatives)
    return f"{NO_FORCING}start: {' | '.join(written)}"


def literal(text: str) -> str:
    """Return a regular expression that matches exactly this text.

    Raises:
        ValueError: the text contains an unpaired surrogate.
    """
    return "".join(map(_character, text))


def from_ebnf(text: str) -> str:
    """Return a context-free grammar from EBNF (`root ::= …`) or Lark (`start: …`) in llguidance's dialect.

    Raises:
        ValueError: the EBNF has an error; names the line.
    """
    if _EBNF_RULE.search(text):
        return NO_FORCING + ebnf_rules(text)
    if not _LARK_START.search(text):
        _check_notation(text)
    if "%llguidance" in text or text.lstrip().startswith("{"):  # has options of its own, or is JSON
        return text
    return f"{text}\n{NO_FORCING}"  # at the end, so that error messages have the client's line numbers


def ebnf_rules(text: str, prefix: str = "") -> str:
    """Translate EBNF into Lark rules, with the start rule `<prefix>start`.

    Args:
        text: the EBNF, with a rule `root ::= …`.
        prefix: prefix of the rules' names, to distinguish them from those of other grammars.

    Raises:
        ValueError: the EBNF has an error; names the line.
    """
    return _Ebnf(text, prefix).as_lark()


NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""If only one text can follow, llguidance would by default only allow its canonical tokens. Another processor may
forbid one of these, and then no token would be left."""

_EBNF_RULE = re.compile(r"^[ \t]*[\w.-]+\s*::=", re.MULTILINE)
_OTHER_RULE = re.compile(r"^[ \t]*(<?[A-Za-z_][\w.-]*>?)[ \t]*(::=|:=|=|->|→)", re.MULTILINE)
"""The beginning of a rule in other notations."""
_LARK_START = re.compile(r"^[ \t]*start\s*(?:\[[^]\n]*\])?\s*:(?!=|:=)", re.MULTILINE)
_TOKEN = re.compile(
    r"""(?P<space> \s+ | \#.* )
    | (?P<rule>   [A-Za-z0-9_][A-Za-z0-9_.-]* (?= \s* ::= ) )
    | (?P<name>   [A-Za-z0-9_][A-Za-z0-9_.-]* )
    | (?P<define> ::= )
    | (?P<string> " (?: [^"\\\n] | \\. )* " )
    | (?P<set>    \[ \^? (?: [^\]\\\n] | \\. )* \] )
    | (?P<repeat> [*+?] | \{ \s* \d* \s* (?: , \s* \d* \s* )? \} )
    | (?P<other>  [()|.] )
    """,
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2}) | \\u(?P<u>[0-9A-Fa-f]{4}) | \\U(?P<U>[0-9A-Fa-f]{8}) | \\(?P<escaped>.) | (?P<plain>.)",
    re.VERBOSE | re.DOTALL,
)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "e": "\x1b"}


class _Ebnf:
    """Translator from EBNF to Lark.

    Every character becomes a separate terminal. Lark matches longer terminals greedily: in `[a-z]* "b"`, the first part
    would consume the b, and the text would never end.
    """

    def __init__(self, text: str, prefix: str) -> None:
        self._text = text
        self._rules: dict[str, str] = {}
        for kind, value, _ in self._tokens():
            if kind == "rule":
                name = "start" if value == "root" else f"rule_{len(self._rules)}"
                self._rules.setdefault(value, prefix + name)

    def as_lark(self) -> str:
        """Return the grammar in Lark.

        Raises:
            ValueError: the EBNF has an error; names the line.
        """
        if "root" not in self._rules:
            _check_notation(self._text)
            raise ValueError("there is no rule named root, which is the start rule")
        return "".join(self._translate())

    def _translate(self) -> Iterator[str]:
        defined: set[str] = set()
        for kind, value, line in self._tokens():
            if kind == "rule":
                if value in defined:
                    raise ValueError(f"line {line}: rule {value[:80]!r} is defined twice")
                defined.add(value)
                yield f"\n{self._rules[value]}"
            elif kind == "name" and value not in self._rules:
                raise ValueError(f"line {line}: there is no rule named {value[:80]!r}")
            else:
                yield f" {self._token(kind, value, line)}"

    def _token(self, kind: str, value: str, line: int) -> str:
        match kind:
            case "name":
                return self._rules[value]
            case "define":
                return ":"
            case "string":
                characters = [f"/{_character(each)}/" for each in _characters(value[1:-1], line)]
                return f"({' '.join(characters)})" if characters else '""'
            case "set":
                return f"/{_character_set(value, line)}/"
            case "repeat":
                return "".join(value.split())
        return "/(?s:.)/" if value == "." else value

    def _tokens(self) -> Iterator[tuple[str, str, int]]:
        """Yield each token's kind, text and line, without white space and comments."""
        position, line = 0, 1
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                other = _OTHER_RULE.match(self._text, self._text.rfind("\n", 0, position) + 1)
                if other and other[2] != "::=":
                    raise ValueError(f"line {line}: {_wrong_rule(other)}")
                raise ValueError(f"line {line}: cannot read {self._text[position : position + 20]!r}")
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], line
            line += found[0].count("\n")
            position = found.end()


def _check_notation(text: str) -> None:
    """Refuse rules in another notation; names the first one."""
    for found in _OTHER_RULE.finditer(text):
        if found[1].startswith("<") or found[2] != "::=":
            line = text.count("\n", 0, found.start(1)) + 1
            raise ValueError(f"line {line}: {_wrong_rule(found)}")


def _wrong_rule(found: re.Match[str]) -> str:
    name, sign = found.groups()
    begin = f"{name.strip('<>')[:80]} ::="
    return f"a rule begins with {begin!r}, not with {f'{name[:80]} {sign}'!r}"


def _characters(text: str, line: int) -> Iterator[str]:
    """Yield the characters of a string, with escapes resolved."""
    for found in _CHARACTER.finditer(text):
        code, escaped = found["x"] or found["u"] or found["U"], found["escaped"]
        if escaped is not None and escaped.isalnum() and escaped not in _ESCAPED:
            raise ValueError(f"line {line}: {found[0]} is not supported: write the characters that it stands for")
        if code is None:
            yield found["plain"] or _ESCAPED.get(str(escaped), str(escaped))
        elif int(code, 16) > sys.maxunicode:
            raise ValueError(f"line {line}: {found[0]} is not a Unicode character")
        else:
            yield chr(int(code, 16))


def _character_set(text: str, line: int) -> str:
    """Return a character set such as `[a-z_]` with all characters escaped, so that only its ranges are special."""
    negated = text.startswith("[^")
    found = list(_CHARACTER.finditer(text[2 if negated else 1 : -1]))
    parts = [
        # A dash at either end is literal, and so is an escaped one.
        "-" if each[0] == "-" and 0 < index < len(found) - 1 else _character(*_characters(each[0], line))
        for index, each in enumerate(found)
    ]
    if not parts:
        raise ValueError(f"line {line}: {text} is empty")
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _character(character: str) -> str:
    """Return a regular expression that matches a character literally."""
    if character.isascii() and character.isalnum():
        return character
    if "\ud800" <= character <= "\udfff":
        raise ValueError(f"it contains an unpaired surrogate, {character!r}")
    return rf"\x{{{ord(character):x}}}"
