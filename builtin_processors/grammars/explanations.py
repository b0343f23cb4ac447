"""Translates the errors of a grammar, most of them llguidance's, to the words of whoever wrote it."""

from __future__ import annotations

import json
import re

COMMENT = " // "
AT_TAG = f"{COMMENT}in the tag that begins with "
"""Comment behind a rule of a generated grammar: errors in the rule are there."""
_POSITION = re.compile(r"^(?:at )?(\d+)\(\d+\): ")
_EXPLANATIONS: dict[str, str] = {
    r"Unimplemented keys: \[(?P<names>[^]]*)\].*": "{names} cannot be enforced: write the schema without",
    r"oneOf constraints are not supported.*": (
        "oneOf: a value may match several of its schemas. Write anyOf if that is right, or tell them apart by type,"
        " by a required property with different constants, or by ranges"
    ),
    r"Unknown format: (?P<name>.*)": 'the format "{name}" cannot be enforced: leave it out, or give a pattern',
    r"Unsatisfiable schema: Regex is empty: .*": (
        "no text matches it: a string cannot match its pattern, format and lengths all at once"
    ),
    r"Unsatisfiable schema: anyOf is empty": "no text matches it: an anyOf, oneOf or enum is empty",
    r"Unsatisfiable schema: (?P<why>.*)": "no text matches it: {why}",
    r"Pointer '(?P<path>.*)' does not exist": 'there is nothing at "#{path}", to which a $ref refers',
    r"(?:Resource|Anchor) '(?:json-schema:///)?(?P<name>.*?)' (?:is not present|does not exist).*": (
        '"{name}" cannot be looked up: put the schema into $defs, and leave out $schema if it is not one of '
        "json-schema.org"
    ),
    r".*recursion limit exceeded.*": "it nests too deeply",
    r"invalid multiple of": "multipleOf must be greater than 0",
    r"Out of range float values.*": "it has a number that JSON lacks: NaN or infinity",
    r"no start rule found": "there is no start rule: EBNF begins with 'root ::=', Lark with 'start:'",
    r"Expected f64 for (?P<key>'.*?'), (?P<got>.*)": "expected a number for {key}, {got}",
    r'(?:invalid regex ".*" \(in regex\): )?regex parse error: (?P<regex>.*?) \^[\^ ]*error: (?P<why>.*)': (
        "{why}: {regex}"
    ),
    r'(?:invalid regex ".*" \(in regex\): )?lookarounds not supported yet; \w+ in regex (?P<regex>.*)': (
        "word boundaries are not supported: {regex}"
    ),
    r'failed to parse "%json": (?:.*surrogate|unexpected end of hex escape).*': "it contains an unpaired surrogate",
    r'(?P<what>unknown special token: ".*?");.*': "{what}",
    r"llguidance failed, probably because it is too large: .*": "it is probably too large: make it simpler",
    r"(?P<what>.+?) \(at .* \(.*\)\)": "{what}",
}
"""Messages of llguidance by regular expression, which matches the rest of a message after its position."""
_PATTERNS = [(re.compile(pattern, re.DOTALL), text) for pattern, text in _EXPLANATIONS.items()]


def explained(error: ValueError | RecursionError, source: str, *, is_generated: bool) -> str:
    """Return why a grammar cannot be used.

    Args:
        error: the error of the translation, or of llguidance.
        source: the grammar in llguidance's syntax; "" if the translation failed.
        is_generated: whether lines and columns in llguidance's message are those of a generated grammar, instead of the
            client's text.
    """
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error}"
    if isinstance(error, UnicodeEncodeError):
        return "it contains an unpaired surrogate"
    message = str(error)
    found = _POSITION.match(message)
    position, reason = (found[0], message[found.end() :]) if found else ("", message)
    if found and is_generated:
        _, comment, place = source.split("\n")[int(found[1]) - 1].rpartition(AT_TAG)
        position = f"{comment.removeprefix(COMMENT)}{place}: " if comment else ""
    reason = reason.removeprefix("failed to compile JSON schema: ")
    for pattern, text in _PATTERNS:
        if match := pattern.fullmatch(reason):
            reason = text.format(**{name: _listed(value) for name, value in match.groupdict().items()})
            break
    return f"{position}{reason}"


def _listed(text: str) -> str:
    """Return a text; a list of quoted names without its quotation marks."""
    return " and ".join(re.findall(r'"([^"]*)"', text)) if re.fullmatch(r'"\w+"(?:, "\w+")*', text) else text
