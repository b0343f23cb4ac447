"""Translates structural tags (free text that contains tags with constrained contents) into llguidance's syntax.

llguidance's lexer takes the longest match and does not backtrack. So free text and the text that ends it must be one
terminal, whose regular expression determines where the free text ends. Adjacent regular symbols are joined into one
terminal, which avoids ambiguity. JSON, EBNF and added tokens are separate symbols.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from llguidance import regex_to_lark

from logitship.builtin_processors.params import ModelFacts, shown

from . import structural_formats as formats
from .explanations import AT_TAG, COMMENT
from .grammar_source import NO_FORCING, ebnf_rules, json_value, literal

_MAX_LENGTH = 1 << 20
"""Maximum characters of the Lark grammar of a structural tag."""
_MAX_PARTS = 50_000
"""Maximum formats to process, with repetition, which takes a second or two. `_once` keeps their texts out of this."""

_MAX_SHOWN = 100
"""Characters of a tag's beginning in a message."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class TokenNames:
    """The properties of the vocabulary that structural tags depend on.

    Attributes:
        vocab_size: upper bound of token ids.
        added: ids by text of the tokenizer's added tokens, without the model's EOS tokens. llguidance distinguishes
            them from text. If such a text occurs in a structural tag, the output has the token.
        in_text: the added tokens that are not special. Free text may contain them.
        eos: the model's EOS tokens.
        find: returns the id of the token with this text in the vocabulary, or None.
    """

    vocab_size: int
    added: Mapping[str, int] = field(default_factory=dict)
    in_text: frozenset[str] = frozenset()
    eos: frozenset[int] = frozenset()
    find: Callable[[str], int | None] = lambda text: None

    @classmethod
    def of(cls, model: ModelFacts) -> Self:
        """Read them from a model with a fast tokenizer."""
        eos = frozenset(model.eos_token_ids)
        tokens = {
            number: token
            for number, token in model.tokenizer.added_tokens_decoder.items()
            if number not in eos and token.content.strip()  # some add runs of spaces
        }
        return cls(
            model.vocab_size,
            {token.content: number for number, token in tokens.items()},
            frozenset(token.content for token in tokens.values() if not token.special),
            eos,
            model.tokenizer.backend_tokenizer.token_to_id,
        )


def from_structural_tag(value: Any, tokens: TokenNames, json_whitespace: str | None = None) -> str:
    """Return the grammar of a structural tag.

    Args:
        value: parsed JSON, see `structural_formats.read_structural_tag`.
        tokens: the model's tokens.
        json_whitespace: white space in JSON without a `max_whitespace_cnt`, see `grammar_source.json_value`.

    Raises:
        ValueError: it is malformed, or llguidance cannot express it; says why.
    """
    return _Lark(tokens, json_whitespace).written(formats.read_structural_tag(value))


@dataclass(frozen=True)
class _Symbol:
    """A part of a rule's body.

    Attributes:
        lark: its Lark source: of a terminal if it is regular, else of a rule. Short, because it may be repeated.
        is_regular: whether it can be joined with adjacent symbols into one terminal.
        texts: its possible texts, if they are few or it is an added token.
        is_added: it begins with an added token, where free text ends.
    """

    lark: str
    is_regular: bool = False
    texts: tuple[str, ...] = ()
    is_added: bool = False


_NOT_FREE = _Symbol("")
"""A following symbol whose beginning is unknown, so that free text cannot end before it."""


def _once(method: Callable[Concatenate[_Lark, _P], _T]) -> Callable[Concatenate[_Lark, _P], _T]:
    """Cache the results of a method whose work grows with the length of texts.

    A format may be processed thousands of times, and its texts may be as long as the structural tag may be.
    """

    def cached(self: _Lark, /, *arguments: _P.args, **options: _P.kwargs) -> _T:
        key = (method, arguments, *options.items())
        if key not in self.results:
            self.results[key] = method(self, *arguments, **options)
        result: _T = self.results[key]
        return result

    return cached


class _Lark:
    """Builder of a Lark grammar.

    `_regular` returns a terminal for a regular format, and None for others. `_symbols` translates any format, from end
    to beginning: it gets the following symbols, because free text depends on the text that ends it.
    """

    def __init__(self, tokens: TokenNames, json_whitespace: str | None = None) -> None:
        self.results: dict[Hashable, Any] = {}
        """See `_once`."""
        self._tokens = tokens
        self._json_whitespace = json_whitespace
        self._tag_begin = ""
        """Beginning of the innermost tag that is being translated, as JSON."""
        self._groups_of: dict[int, list[tuple[str, list[formats.Tag]]]] = {}
        """By the id of a format's tags, which the structural tag keeps alive."""
        self._names: dict[str, str] = {}
        self._rules: list[str] = []
        self._length = 0
        self._parts = 0
        names = sorted(tokens.added, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, names))) if names else None

    def written(self, part: formats.Format) -> str:
        """Return the whole grammar."""
        start = self._joined(self._symbols(part, (), []))
        terminals = [f"{name}: {lark}" for lark, name in self._names.items()]
        return NO_FORCING + "\n".join([f"start: {start}", *self._rules, *terminals])

    def _symbols(self, part: formats.Format, stop: Sequence[str], then: list[_Symbol]) -> list[_Symbol]:
        """Return the symbols of a format and the following ones.

        Args:
            part: the format.
            stop: texts that free text in it must not contain: the ends of the enclosing tag.
            then: the following symbols.
        """
        self._count()
        if part == formats.ConstString(value=""):
            return then
        texts = _texts(part)
        if (texts or all(each.is_regular for each in then)) and (lark := self._regular(part, stop)) is not None:
            return [_Symbol(lark, is_regular=True, texts=texts), *then]
        match part:
            case formats.ConstString():
                return self._text(part.value, then)
            case formats.Regex():
                return [_Symbol(self._pattern(part.pattern), is_regular=True), *then]
            case formats.JsonSchema():
                spaces = self._json_whitespace
                if part.max_whitespace_cnt is not None:
                    spaces = rf"[ \n\r\t]{{0,{part.max_whitespace_cnt}}}" if part.max_whitespace_cnt else ""
                return [_Symbol(self._json_rule(part.json_schema, spaces)), *then]
            case formats.Grammar():
                return [_Symbol(self._ebnf(part.grammar)), *self._in_characters(then)]
            case formats.Token():
                return [self._token(part.token), *then]
            case formats.AnyText(max_tokens=int(max_tokens)):
                return self._limited_text([*stop, *part.excludes], then, max_tokens)
            case formats.AnyText():
                return self._free_text([*stop, *part.excludes], then, part.max_chars)
            case formats.Concatenation():
                for element in reversed(part.elements):
                    then = self._symbols(element, stop, then)
                return then
            case formats.Or():
                return [self._either(part.elements, stop, self._shared(then))]
            case formats.Tag():
                return self._tag(part, then)
            case formats.TriggeredTags():
                return self._triggered_tags(part, stop, then)
            case formats.Dispatch():
                rules = [(pattern, [content]) for pattern, content in part.rules]
                return self._dispatched(rules, part.loop, [*stop, *part.excludes], then)
            case formats.TagsWithSeparator():
                return self._separated(part, then)
            case formats.Optional() | formats.Plus() | formats.Star() | formats.Repeat():
                content = self._symbols(part.content, stop, [_NOT_FREE])
                if formats.ends_with_grammar(part.content):
                    content, then = self._in_characters(content), self._in_characters(then)
                return [_Symbol(self._rule(_repeated(self._rule(self._joined(content)), part))), *then]

    def _regular(self, part: formats.Format, stop: Sequence[str]) -> str | None:
        """Return the name of a terminal, or None if the format is not regular."""
        self._count()
        lark = self._expression(part, stop)
        return None if lark is None else self._terminal(lark)

    def _expression(self, part: formats.Format, stop: Sequence[str]) -> str | None:
        match part:
            case formats.ConstString():
                return None if self._pieces(part.value)[1:] else self._literal(part.value)
            case formats.Regex():
                return self._pattern(part.pattern)
            case formats.AnyText() | formats.TriggeredTags() | formats.Dispatch() if self._tokens.in_text:
                return None
            case formats.AnyText(max_tokens=int()):
                return None
            case formats.AnyText():
                return self._free(_distinct(stop, part.excludes), part.max_chars)
            case formats.Concatenation():
                return self._all(" ", (self._regular(each, stop) for each in part.elements))
            case formats.Or():
                return self._all(" | ", (self._regular(each, stop) for each in part.elements))
            case formats.Tag():
                ends = self._all(" | ", (self._regular(end, ()) for end in part.end))
                content = self._regular(part.content, part.end_texts)
                return self._all(" ", (self._regular(part.begin, ()), content, ends))
            case formats.TriggeredTags() if part.at_least_one:
                first = self._all(" | ", (self._regular(tag, ()) for tag in part.tags))
                if part.stop_after_first:
                    return first
                others = self._regular(part.model_copy(update={"at_least_one": False}), stop)
                return self._all(" ", (first, others))
            case formats.TriggeredTags():
                groups = self._groups(part)
                return self._regular_dispatch(groups, not part.stop_after_first, [*stop, *part.excludes])
            case formats.Dispatch():
                rules = [(pattern, [content]) for pattern, content in part.rules]
                return self._regular_dispatch(rules, part.loop, [*stop, *part.excludes])
            case formats.TagsWithSeparator():
                tag = self._all(" | ", (self._regular(each, ()) for each in part.tags))
                separator = self._regular(formats.ConstString(value=part.separator), ())
                return None if tag is None or separator is None else _separated(tag, separator, part)
            case formats.Optional() | formats.Plus() | formats.Star() | formats.Repeat():
                content = self._regular(part.content, stop)
                return None if content is None else _repeated(content, part)
        return None

    def _regular_dispatch(
        self, rules: Sequence[tuple[str, Sequence[formats.Format]]], loop: bool, avoid: Sequence[str]
    ) -> str | None:
        avoid = _distinct(avoid, (trigger for trigger, _ in rules))
        branches = []
        for trigger, contents in rules:
            content = self._all(" | ", (self._regular(each, ()) for each in contents))
            if content is None or self._pieces(trigger)[1:]:
                return None
            branches.append(f"{self._up_to(trigger, avoid)} {content}")
        dispatched = f"({' | '.join(branches)})"
        free = self._free(avoid)
        return f"({dispatched}* {free})" if loop else f"({free} | {dispatched})"

    def _all(self, operator: str, parts: Iterable[str | None]) -> str | None:
        known = []
        for part in parts:
            if part is None:
                return None
            known.append(part)
        return self._terminal(operator.join(known))

    def _free_text(self, avoid: Sequence[str], then: list[_Symbol], max_chars: int | None = None) -> list[_Symbol]:
        """Return free text that contains none of these texts, and the following symbols."""
        if any(not symbol.is_regular for symbol in then) and not then[0].is_added:
            if not then[0].texts:
                raise ValueError(
                    "any_text, triggered_tags or dispatch cannot be distinguished from what follows: let it end the"
                    " output or a tag, or stand before a const_string"
                )
            avoid = [*avoid, *then[0].texts]
        end = then[0].texts if then and then[0].is_added else ()
        skipped = self._added_in_text(_distinct(avoid, end)) if max_chars is None else []
        return [*skipped, _Symbol(self._free(_distinct(avoid), max_chars), is_regular=True), *then]

    def _limited_text(self, avoid: Sequence[str], then: list[_Symbol], max_tokens: int) -> list[_Symbol]:
        """Return free text of so many tokens, and the following symbols."""
        if max_tokens == 0:
            return then
        end = then[0] if then else None
        if end is None or end.is_added:
            return [_Symbol(self._rule(self._free(_distinct(avoid)), max_tokens)), *then]
        if not end.is_regular or not end.texts:
            raise ValueError(
                "any_text with max_tokens cannot be distinguished from what follows: let it end the output or a tag, or"
                " stand before a const_string"
            )
        # At the limit, llguidance takes the first of these symbols as complete: the end must follow it.
        free = self._free(_distinct(avoid, end.texts))
        cut = self._rule(free, max_tokens)
        ended = self._rule(self._terminal(f"{free} {end.lark}"), max_tokens)
        # If all of the text is the beginning of an end, it has kept that, which may also begin anew.
        again = self._begun_twice(end.texts, max_tokens)
        return [_Symbol(self._rule(" | ".join([f"{cut} {end.lark}", ended, *again]))), *then[1:]]

    def _begun_twice(self, ends: tuple[str, ...], max_tokens: int) -> list[str]:
        """Return a terminal, if any, of free text that is the beginning of an end, of so many bytes, and an end."""
        free = {end[:length] for end in ends for length in range(1, len(end))}
        texts = [begun + end for begun in free for end in ends if len(begun.encode()) <= max_tokens]
        # The end that comes first ends the text.
        once = [text for text in texts if not any(end in text[:-1] for end in ends)]
        return [self._terminal("|".join(f"/{literal(text)}/" for text in sorted(once)))] if once else []

    @_once
    def _added_in_text(self, avoid: tuple[str, ...]) -> list[_Symbol]:
        """Return free text up to its last added token."""
        ids = [
            self._tokens.added[text]
            for text in self._tokens.in_text
            if not any(each in text or text in each for each in avoid)
        ]
        if not ids:
            return []
        tokens = ",".join(map(str, sorted(ids)))
        return [_Symbol(self._rule(f"({self._free(avoid)} <[{tokens}]>)*"))]

    def _json_rule(self, schema: bool | dict[str, Any], spaces: str | None) -> str:
        """Return the name of a rule for JSON, with a comment for error messages: it may be one tag of many."""
        place = f"{AT_TAG}{self._tag_begin}" if self._tag_begin else ""
        try:
            return self._rule(json_value(schema, spaces) + place)
        except ValueError as error:
            raise ValueError(f"{place.removeprefix(COMMENT)}: {error}" if place else str(error)) from None

    def _tag(self, tag: formats.Tag, then: list[_Symbol]) -> list[_Symbol]:
        outer = self._tag_begin
        begin = tag.begin.value if isinstance(tag.begin, formats.ConstString) else ""
        self._tag_begin = json.dumps(begin[:_MAX_SHOWN]) if begin else outer
        symbols = self._tag_symbols(tag, then)
        self._tag_begin = outer
        return symbols

    def _tag_symbols(self, tag: formats.Tag, then: list[_Symbol]) -> list[_Symbol]:
        end = self._regular(formats.Or(elements=tag.end), ())
        if end is not None:
            texts = tag.end_texts if len(tag.end_texts) == len(tag.end) else ()
            ends = [_Symbol(end, True, texts)] if tag.end_texts else []
            content = self._symbols(tag.content, tag.end_texts, [*ends, *then])
        elif len(tag.end) == 1:
            content = self._symbols(tag.content, tag.end_texts, self._symbols(tag.end[0], (), then))
        else:
            then = self._shared(then)
            ways = [self._symbols(tag.content, tag.end_texts, self._symbols(end, (), then)) for end in tag.end]
            content = [_Symbol(self._rule(self._alternatives(ways)))]
        return self._symbols(tag.begin, (), content)

    def _triggered_tags(self, part: formats.TriggeredTags, stop: Sequence[str], then: list[_Symbol]) -> list[_Symbol]:
        if part.at_least_one and part.stop_after_first:
            return [self._either(part.tags, (), self._shared(then))]
        groups = self._groups(part)
        symbols = self._dispatched(groups, not part.stop_after_first, [*stop, *part.excludes], then)
        return [self._either(part.tags, (), [_NOT_FREE]), *symbols] if part.at_least_one else symbols

    def _dispatched(
        self,
        rules: Sequence[tuple[str, Sequence[formats.Format]]],
        loop: bool,
        avoid: Sequence[str],
        then: list[_Symbol],
    ) -> list[_Symbol]:
        """Return free text without a trigger, or free text, a trigger, and one of its contents."""
        avoid = _distinct(avoid, (trigger for trigger, _ in rules))
        then = then if loop else self._shared(then)
        before = self._added_in_text(avoid)
        branches = []
        for trigger, contents in rules:
            content = self._either(contents, (), [_NOT_FREE] if loop else then)
            if self._pieces(trigger)[1:]:
                branch = [_Symbol(self._free(avoid), is_regular=True), *self._text(trigger, [content])]
            else:
                branch = [_Symbol(self._up_to(trigger, avoid), is_regular=True), content]
            branches.append([*before, *branch])
        rest = self._free_text(avoid, then)
        if loop:
            return [_Symbol(self._rule(f"({self._alternatives(branches)})*")), *rest]
        return [_Symbol(self._rule(self._alternatives([rest, *branches])))]

    def _groups(self, part: formats.TriggeredTags) -> list[tuple[str, list[formats.Tag]]]:
        if (known := self._groups_of.get(id(part.tags))) is not None:
            return known
        groups = part.groups()
        for trigger, tags in groups.items():
            for tag in tags:
                rest = tag.begin.value if isinstance(tag.begin, formats.ConstString) else ""
                if len(self._pieces(trigger + rest)) != len(self._pieces(trigger)) + len(self._pieces(rest)) - 1:
                    raise ValueError(f"the trigger {shown(trigger)} ends within a token's text: write all of it")
        return self._groups_of.setdefault(id(part.tags), list(groups.items()))

    def _separated(self, part: formats.TagsWithSeparator, then: list[_Symbol]) -> list[_Symbol]:
        tag = self._either(part.tags, (), [_NOT_FREE]).lark
        separator = self._text(part.separator, [])
        if any(map(formats.ends_with_grammar, part.tags)):
            separator, then = self._in_characters(separator), self._in_characters(then)
        return [_Symbol(self._rule(_separated(tag, self._joined(separator), part))), *then]

    def _either(self, parts: Sequence[formats.Format], stop: Sequence[str], then: list[_Symbol]) -> _Symbol:
        """Return an alternative of several formats, each with the following symbols."""
        return _Symbol(self._rule(self._alternatives([self._symbols(each, stop, then) for each in parts])))

    def _alternatives(self, ways: Iterable[list[_Symbol]]) -> str:
        return " | ".join(self._joined(way) for way in ways)

    def _shared(self, then: list[_Symbol]) -> list[_Symbol]:
        """Return equivalent symbols that are short enough to be repeated."""
        index = next((index for index, symbol in enumerate(then) if not symbol.is_regular), len(then))
        if len(then) - index < 2:
            return then
        rule = self._rule(self._joined(then[index:]))
        return [*then[:index], _Symbol(rule, texts=then[index].texts, is_added=then[index].is_added)]

    def _joined(self, symbols: list[_Symbol]) -> str:
        """Return the body of a rule, with adjacent regular symbols joined into one terminal."""
        parts = []
        for is_regular, group in itertools.groupby(symbols, lambda symbol: symbol.is_regular):
            lark = " ".join(filter(None, (symbol.lark for symbol in group)))
            parts.append(self._terminal(lark) if is_regular else lark)
        return " ".join(filter(None, parts)) or '""'

    def _text(self, text: str, then: list[_Symbol]) -> list[_Symbol]:
        """Return the symbols of a text, with added tokens as separate symbols."""
        for index, piece in reversed(list(enumerate(self._pieces(text)))):
            if index % 2:
                then = [self._token(self._tokens.added[piece]), *then]
            elif piece:
                then = [_Symbol(self._literal(piece), is_regular=True, texts=(piece,)), *then]
        return then

    def _in_characters(self, symbols: list[_Symbol]) -> list[_Symbol]:
        """Split the texts after EBNF into characters, like EBNF itself. Otherwise the lexer would prefer them."""
        known = list(itertools.takewhile(lambda symbol: symbol.is_regular and symbol.texts, symbols))
        split = [self._rule(" | ".join(" ".join(map(self._literal, text)) for text in each.texts)) for each in known]
        return [*map(_Symbol, split), *symbols[len(known) :]]

    @_once
    def _pieces(self, text: str) -> list[str]:
        """Split a text into text and added tokens, alternately."""
        if self._added is None:
            return [text]
        pieces, end = [], 0
        for found in self._added.finditer(text):
            pieces += [text[end : found.start()], found[0]]
            end = found.end()
        return [*pieces, text[end:]]

    def _token(self, token: int | str) -> _Symbol:
        found = self._tokens.find(token) if isinstance(token, str) else token
        if found is None or not 0 <= found < self._tokens.vocab_size:
            raise ValueError(f"the model has no token {shown(token)}")
        if found in self._tokens.eos:
            raise ValueError(f"the token {shown(token)} ends the output")
        texts = tuple(text for text, number in self._tokens.added.items() if number == found)
        return _Symbol(f"<[{found}]>", texts=texts, is_added=bool(texts))

    @_once
    def _free(self, avoid: tuple[str, ...], max_chars: int | None = None) -> str:
        """Return a terminal of any text that contains none of these."""
        texts = "|".join(map(literal, avoid))
        lark = r"/(?s:.*)/" if max_chars is None else rf"/(?s:.{{0,{max_chars}}})/"
        return self._terminal(lark + (rf" & ~/(?s:.*)(?:{texts})(?s:.*)/" if texts else ""))

    @_once
    def _up_to(self, trigger: str, avoid: tuple[str, ...]) -> str:
        """Return a terminal of free text and a trigger, which is the first in it, even if triggers overlap."""
        free = self._terminal(f"{self._free(avoid)} {self._literal(trigger)}")
        if trigger not in self._overlapped(avoid):
            return free
        texts = "|".join(map(literal, avoid))
        return self._terminal(rf"{free} & ~/(?s:.*)(?:{texts})(?s:.+)/")

    @_once
    def _overlapped(self, texts: tuple[str, ...]) -> frozenset[str]:
        """Return the texts that may begin within one of them."""
        # Hashes take less memory than the ends. If two are equal by chance, `_up_to` only excludes what cannot occur.
        ends = {hash(text[start:]) for text in texts for start in range(1, len(text))}
        return frozenset(
            text for text in texts if not ends.isdisjoint(hash(text[:end]) for end in range(1, len(text) + 1))
        )

    @_once
    def _literal(self, text: str) -> str:
        return self._terminal(f"/{literal(text)}/" if text else '""')

    @_once
    def _pattern(self, regex: str) -> str:
        return self._terminal(f"/{regex_to_lark(regex, '')}/")

    def _terminal(self, lark: str) -> str:
        if lark not in self._names:
            self._grow(lark)
            self._names[lark] = f"T{len(self._names)}"
        return self._names[lark]

    def _rule(self, lark: str, max_tokens: int | None = None) -> str:
        self._grow(lark)
        name = f"r{len(self._rules)}"
        limit = "" if max_tokens is None else f"[max_tokens={max_tokens}]"
        self._rules.append(f"{name}{limit}: {lark}")
        return name

    def _ebnf(self, text: str) -> str:
        prefix = f"g{len(self._rules)}_"
        rules = ebnf_rules(text, prefix)
        self._grow(rules)
        self._rules.append(rules.lstrip("\n"))
        return f"{prefix}start"

    def _count(self) -> None:
        """Count a part. With `at_least_one`, tags are written twice, so nesting grows exponentially."""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise ValueError(f"written out, it has more than {_MAX_PARTS} parts")

    def _grow(self, lark: str) -> None:
        self._length += len(lark)
        if self._length > _MAX_LENGTH:
            raise ValueError(f"written out, it has more than {_MAX_LENGTH} characters")


def _distinct(*texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain(*texts)))


def _texts(part: formats.Format) -> tuple[str, ...]:
    """Return the texts of a format that is a text or a choice of texts; of others, none."""
    parts = part.elements if isinstance(part, formats.Or) else (part,)
    texts = tuple(each.value for each in parts if isinstance(each, formats.ConstString) and each.value)
    return texts if len(texts) == len(parts) else ()


def _repeated(lark: str, part: formats.Optional | formats.Plus | formats.Star | formats.Repeat) -> str:
    match part:
        case formats.Optional():
            times = "?"
        case formats.Plus():
            times = "+"
        case formats.Star():
            times = "*"
        case formats.Repeat(max=0):
            return '""'
        case formats.Repeat():
            times = f"{{{part.min},{'' if part.max < 0 else part.max}}}"
    return f"{lark}{times}"


def _separated(tag: str, separator: str, part: formats.TagsWithSeparator) -> str:
    tags = tag if part.stop_after_first else f"{tag} ({separator} {tag})*"
    return f"({tags})" if part.at_least_one else f"({tags})?"
