"""What a client may constrain an output with, in the words of llguidance.

llguidance reads JSON schemas, regular expressions and a dialect of Lark. EBNF as xgrammar and llama.cpp (GBNF) write it
is respelt in that, token by token: both have rules of alternatives of sequences, with the same operators.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import regex_to_lark

from logitship.builtin_processors.params import shown


def from_json_schema(schema: dict[str, Any] | bool | str, whitespace_pattern: str | None = None) -> str:
    """JSON that fits a schema. See `json_value`."""
    return EXACT + f"start: {json_value(schema, whitespace_pattern)}"


def json_value(schema: dict[str, Any] | bool | str, whitespace_pattern: str | None = None) -> str:
    """JSON that fits a schema, as a part of a rule.

    Args:
        schema: the schema, or its JSON text.
        whitespace_pattern: a regular expression for what may stand between the parts of the JSON; "": nothing; None:
            any white space.

    Raises:
        ValueError: the text is not JSON, or not of a schema that anything fits.
    """
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is False:
        raise ValueError("false is a schema that nothing fits")
    if schema is not True and not isinstance(schema, dict):
        raise ValueError(f"expected an object or true, got {shown(schema)}")
    # A schema may carry options of its own. Overlooking keywords is one of them.
    options: dict[str, Any] = {"lenient": False}
    if whitespace_pattern is not None:
        options |= {"whitespace_pattern": whitespace_pattern} if whitespace_pattern else {"whitespace_flexible": False}
    schema = {} if schema is True else schema
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def from_regex(regex: str) -> str:
    """A text that matches a regular expression from its beginning to its end."""
    return EXACT + f"start: /{regex_to_lark(regex, '')}/"


def from_choice(choice: Sequence[str]) -> str:
    """One of several texts.

    Raises:
        ValueError: there is none.
    """
    if not choice:
        raise ValueError("it is empty: give at least one text")
    # One expression and not alternatives of rules: a choice that begins another one is then no ambiguity.
    return from_regex("|".join(map(literal, choice)))


def literal(text: str) -> str:
    """A regular expression that matches a text and nothing else.

    Raises:
        ValueError: the text holds half of a surrogate pair.
    """
    return "".join(map(_character, text))


def from_ebnf(text: str) -> str:
    """A text of a context-free language: EBNF (`root ::= …`), or Lark (`start: …`) in llguidance's dialect.

    Raises:
        ValueError: it is EBNF, and one of its lines has a mistake; names the line.
    """
    return EXACT + ebnf_rules(text) if _EBNF_RULE.search(text) else text


def ebnf_rules(text: str, prefix: str = "") -> str:
    """EBNF as rules of Lark, of which `<prefix>start` is the first.

    Args:
        text: the EBNF, with a rule `root ::= …`.
        prefix: of the rules' names, so that they are no other grammar's.

    Raises:
        ValueError: a line has a mistake; names the line.
    """
    return _Ebnf(text, prefix).as_lark()


EXACT = '%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, llguidance would allow nothing but the tokens that its tokenizer makes of it. Another
processor may forbid one of these, and then there would be no way on."""

_EBNF_RULE = re.compile(r"^[ \t]*[\w.-]+\s*::=", re.MULTILINE)
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
    """EBNF on its way to Lark.

    Every character becomes a terminal of its own. Longer terminals would be matched greedily, as is usual for Lark: of
    `[a-z]* "b"` the first part would take the b, and the text would never end.
    """

    def __init__(self, text: str, prefix: str) -> None:
        self._text = text
        self._rules: dict[str, str] = {}
        for kind, value, _ in self._tokens():
            if kind == "rule":
                name = "start" if value == "root" else f"rule_{len(self._rules)}"
                self._rules.setdefault(value, prefix + name)

    def as_lark(self) -> str:
        """The same language in Lark.

        Raises:
            ValueError: names the line.
        """
        if "root" not in self._rules:
            raise ValueError("there is no rule named root: the text would not know where to begin")
        return "".join(self._respelt())

    def _respelt(self) -> Iterator[str]:
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
        """Each token's kind, text and line, without white space and comments."""
        position, line = 0, 1
        while position < len(self._text):
            found = _TOKEN.match(self._text, position)
            if found is None:
                raise ValueError(f"line {line}: cannot read {self._text[position : position + 20]!r}")
            if found.lastgroup != "space":
                yield str(found.lastgroup), found[0], line
            line += found[0].count("\n")
            position = found.end()


def _characters(text: str, line: int) -> Iterator[str]:
    """The characters of a string, escapes resolved."""
    for found in _CHARACTER.finditer(text):
        code, escaped = found["x"] or found["u"] or found["U"], found["escaped"]
        if escaped is not None and escaped.isalnum() and escaped not in _ESCAPED:
            raise ValueError(f"line {line}: {found[0]} is not supported: write the characters that it stands for")
        if code is None:
            yield found["plain"] or _ESCAPED.get(escaped, escaped)
        elif int(code, 16) > sys.maxunicode:
            raise ValueError(f"line {line}: {found[0]} is no character")
        else:
            yield chr(int(code, 16))


def _character_set(text: str, line: int) -> str:
    """`[a-z_]` with every character escaped, so that nothing but its range has a meaning in it."""
    negated = text.startswith("[^")
    found = list(_CHARACTER.finditer(text[2 if negated else 1 : -1]))
    parts = [
        # A dash at either end is one; so is one that is escaped.
        "-" if each[0] == "-" and 0 < place < len(found) - 1 else _character(*_characters(each[0], line))
        for place, each in enumerate(found)
    ]
    if not parts:
        raise ValueError(f"line {line}: {text} holds no character")
    return f"[{'^' if negated else ''}{''.join(parts)}]"


def _character(character: str) -> str:
    """A character in a regular expression, whatever it means there."""
    if character.isascii() and character.isalnum():
        return character
    if "\ud800" <= character <= "\udfff":
        raise ValueError(f"it holds half of a surrogate pair, {character!r}, which is no character")
    return rf"\x{{{ord(character):x}}}"
