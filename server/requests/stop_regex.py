r"""Regular expressions that end a sequence, searched while its text arrives.

Clients write them, so they are not searched by Python's `re`, which backtracks, but by an automaton that reads each
character once. Python's parser reads the patterns, and `re` tests single characters, so that they mean what they mean
in SGLang. What needs backtracking (lookaround, references to groups, atomic groups) is refused.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

from logitship.client.linear_regex import NEEDS_BACKTRACKING

# Type checkers do not know the modules of Python's regular expressions.
sre_compiler: Any = import_module("re._compiler")
sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")

LARGEST_STOP_REGEX = 500
"""Maximum size of a request's patterns: their characters and operators, with repetitions written out. A character of
the output takes a time that grows with it."""

_MOST_CACHED = 20_000
_NONE = 1 << 30
"""No pattern: above every index."""

# Conditions on what follows in the text. A path through the automaton collects them until the next character, or the
# end of the text, decides them.
_END = 1
_LAST_NEWLINE = 2
_LINE_END = 4
_WORD = 8
_NO_WORD = 16
_ASCII_WORD = 32
_NO_ASCII_WORD = 64

_FAILS_AT_END = _LAST_NEWLINE | _WORD | _ASCII_WORD

_Assertion = Callable[[str | None], tuple[int, ...]]
"""Takes the character before a position, None at the beginning. Returns the alternative conditions on what follows."""


class CompiledStopRegex:
    """The stop patterns of a request. Its sequences share it, and the states that it caches.

    Args:
        patterns: in the order in which they are tried.

    Attributes:
        literals: the patterns without special characters. They are stop strings.
        start: state before the text; None if all patterns are literals.

    Raises:
        ValueError: a pattern is malformed, or needs backtracking, or they are too large; the message says which.
    """

    def __init__(self, patterns: tuple[str, ...]) -> None:
        builder = _Builder()
        literals: list[str] = []
        begins: list[_Node] = []
        self._patterns = patterns
        for index, pattern in enumerate(patterns):
            try:
                parsed = _parse(pattern)
                if [*parsed] == [(sre.LITERAL, ord(character)) for character in pattern]:
                    literals.append(pattern)
                else:
                    begins.append(builder.sequence(parsed, parsed.state.flags, builder.node(pattern=index)))
            except ValueError as error:
                raise ValueError(f"{pattern!r}: {error}") from None
        self.literals = tuple(literals)
        self._begins = [(begin, 0) for begin in begins]
        self._cache: dict[frozenset[_Path], _AutomatonState] = {}
        self._num_cached = 0
        self.start = self._state([], None) if begins else None

    def step(self, state: _AutomatonState, character: str) -> _AutomatonState:
        """Return the state after the next character."""
        following = state.following.get(character)
        if following is None:
            following = self._state(_paths_after(state.paths, character), character)
            self._count(1)
            state.following[character] = following
        return following

    def start_after(self, character: str) -> _AutomatonState:
        """Return the state before a text that follows a character, with which no match begins."""
        return self._state([], character)

    def pattern(self, index: int) -> str | None:
        """Return a pattern, or None for the index that means none."""
        return None if index == _NONE else self._patterns[index]

    def _state(self, paths: Iterable[_Path], previous: str | None) -> _AutomatonState:
        """Return the state with these paths and those that begin here, followed to the next characters."""
        pending = [*self._begins, *paths]
        reached: set[_Node] = set()
        on_conditions: dict[_Node, list[int]] = {}
        kept: list[_Path] = []
        while pending:
            node, conditions = pending.pop()
            if node in reached:
                continue
            if not conditions:
                reached.add(node)
            elif any(fewer & conditions == fewer for fewer in on_conditions.get(node, ())):
                continue
            else:
                on_conditions.setdefault(node, []).append(conditions)
            if node.assertion is not None:
                added = node.assertion(previous)
                pending.extend((target, conditions | each) for target in node.targets for each in added)
            elif node.matches is None and node.pattern is None:
                pending.extend((target, conditions) for target in node.targets)
            else:
                kept.append((node, conditions))
        key = frozenset(kept)
        state = self._cache.get(key)
        if state is None:
            self._count(len(key))
            state = self._cache[key] = _AutomatonState(key)
        return state

    def _count(self, size: int) -> None:
        self._num_cached += size
        if self._num_cached > _MOST_CACHED:
            self._cache = {}
            self._num_cached = size


@lru_cache(maxsize=32)  # the sequences of a request have the same
def compile_stop_regex(patterns: tuple[str, ...]) -> CompiledStopRegex:
    """Compile the stop patterns of a request.

    Raises:
        ValueError: see `CompiledStopRegex`.
    """
    return CompiledStopRegex(patterns)


class StopRegexSearch:
    """Searches the stop patterns in text that arrives in pieces. The time of a piece grows with its length alone."""

    def __init__(self, compiled: CompiledStopRegex, start: _AutomatonState) -> None:
        self._compiled = compiled
        self._state = start

    def push(self, piece: str) -> str | None:
        """Add text. Returns the first pattern that matches somewhere in the text so far, or None."""
        if not piece:
            return None
        found = self._state.found
        for character in piece:
            self._state = self._compiled.step(self._state, character)
            found = min(found, self._state.found)
        return self._compiled.pattern(min(found, self._state.found_at_end))

    def skip(self, piece: str) -> None:
        """Add text in which no match begins. It must come before all other text."""
        if piece:
            self._state = self._compiled.start_after(piece[-1])


class _Node:
    """A node of the automaton: tests a character, or a position, or ends a pattern, or else only has targets."""

    __slots__ = ("assertion", "matches", "pattern", "targets")

    def __init__(
        self,
        targets: list[_Node],
        matches: Callable[[str], bool] | None,
        assertion: _Assertion | None,
        pattern: int | None,
    ) -> None:
        self.targets = targets
        self.matches = matches
        self.assertion = assertion
        self.pattern = pattern


_Path = tuple[_Node, int]
"""A node that the text so far leads to, and the conditions on the rest of the text."""


class _AutomatonState:
    """All paths of the automaton at a position of the text.

    Attributes:
        paths: those at nodes that test a character or end a pattern.
        following: states after the characters seen so far.
        found: index of the first pattern that ends here.
        found_at_end: the same if the text ends here.
    """

    __slots__ = ("following", "found", "found_at_end", "paths")

    def __init__(self, paths: frozenset[_Path]) -> None:
        ends = [(node.pattern, conditions) for node, conditions in paths if node.pattern is not None]
        self.paths = paths
        self.following: dict[str, _AutomatonState] = {}
        self.found = min((pattern for pattern, conditions in ends if not conditions), default=_NONE)
        self.found_at_end = min(
            (pattern for pattern, conditions in ends if not conditions & _FAILS_AT_END), default=_NONE
        )


def _paths_after(paths: frozenset[_Path], character: str) -> list[_Path]:
    after: list[_Path] = []
    results: dict[Callable[[str], bool], bool] = {}
    for node, conditions in paths:
        remaining = _conditions_after(conditions, character) if conditions else 0
        if remaining is None:
            continue
        test = node.matches
        if test is None:  # the end of a pattern
            if conditions:
                after.append((node, remaining))
            continue
        matches = results.get(test)
        if matches is None:
            matches = results[test] = test(character)
        if matches:
            after.append((node.targets[0], remaining))
    return after


def _conditions_after(conditions: int, character: str) -> int | None:
    """Return the conditions on what follows a character, or None if it does not meet those on itself."""
    fails = (
        conditions & _END
        or (conditions & (_LAST_NEWLINE | _LINE_END) and character != "\n")
        or conditions & (_NO_WORD if _is_word(character) else _WORD)
        or conditions & (_NO_ASCII_WORD if _is_ascii_word(character) else _ASCII_WORD)
    )
    if fails:
        return None
    return _END if conditions & _LAST_NEWLINE else 0


def _is_word(character: str | None) -> bool:
    return character is not None and (character.isalnum() or character == "_")


def _is_ascii_word(character: str | None) -> bool:
    return character is not None and character.isascii() and _is_word(character)


def _parse(pattern: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sets that may mean something else one day
            return sre_parser.parse(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


class _Builder:
    """Builds the automaton from parsed patterns, from their ends to their beginnings."""

    def __init__(self) -> None:
        self._size = 0
        self._tests: dict[str, Callable[[str], bool]] = {}

    def node(
        self,
        *targets: _Node,
        matches: Callable[[str], bool] | None = None,
        assertion: _Assertion | None = None,
        pattern: int | None = None,
    ) -> _Node:
        """Make a node."""
        self._size += 1
        if self._size > LARGEST_STOP_REGEX:
            raise ValueError(
                f"with it, the patterns have more than {LARGEST_STOP_REGEX} characters and operators, "
                "repetitions written out"
            )
        return _Node(list(targets), matches, assertion, pattern)

    def sequence(self, items: Any, flags: int, following: _Node) -> _Node:
        """Build what matches one after the other, before a node. Returns its first node."""
        for op, argument in reversed([*items]):
            following = self._item(op, argument, flags, following)
        return following

    def _item(self, op: Any, argument: Any, flags: int, following: _Node) -> _Node:
        if op in NEEDS_BACKTRACKING:
            raise ValueError(f"{NEEDS_BACKTRACKING[op]} not supported: patterns are searched in linear time")
        match op:
            case sre.BRANCH:
                return self.node(*(self.sequence(each, flags, following) for each in argument[1]))
            case sre.SUBPATTERN:
                _, added, removed, inner = argument
                return self.sequence(inner, _combined(flags, added, removed), following)
            case sre.MAX_REPEAT | sre.MIN_REPEAT:
                least, most, inner = argument
                return self._repetition(least, most, inner, flags, following)
            case sre.AT:
                return self.node(following, assertion=_assertion(argument, flags))
            case sre.LITERAL | sre.NOT_LITERAL | sre.ANY | sre.IN:
                return self.node(following, matches=self._test(op, argument, flags))
            case _:
                raise ValueError(f"{str(op).lower()} is not supported")

    def _repetition(self, least: int, most: int, inner: Any, flags: int, following: _Node) -> _Node:
        begin = following
        if most == sre.MAXREPEAT:
            begin = self.node()
            begin.targets = [self.sequence(inner, flags, begin), following]
        else:
            for _ in range(most - least):
                begin = self.node(self.sequence(inner, flags, begin), following)
        for _ in range(least):
            end, begin = begin, self.sequence(inner, flags, begin)
            if begin is end:  # nothing is repeated
                break
        return begin

    def _test(self, op: Any, argument: Any, flags: int) -> Callable[[str], bool]:
        """Return the test of a character, as `re` does it."""
        key = f"{op} {argument} {flags}"
        if key not in self._tests:
            one = sre_parser.SubPattern(sre_parser.State(), [(op, argument)])
            matched = sre_compiler.compile(one, flags).match
            self._tests[key] = lambda character: matched(character) is not None
        return self._tests[key]


def _combined(flags: int, added: int, removed: int) -> int:
    """Return the flags inside a group, such as those of `(?i-s:…)`."""
    if added & sre_parser.TYPE_FLAGS:
        flags &= ~sre_parser.TYPE_FLAGS
    return (flags | added) & ~removed


def _assertion(position: Any, flags: int) -> _Assertion:
    is_multiline = bool(flags & re.MULTILINE)
    match position:
        case sre.AT_BEGINNING if is_multiline:
            return lambda previous: (0,) if previous in (None, "\n") else ()
        case sre.AT_BEGINNING | sre.AT_BEGINNING_STRING:
            return lambda previous: (0,) if previous is None else ()
        case sre.AT_END:
            return lambda _: (_LINE_END,) if is_multiline else (_END, _LAST_NEWLINE)
        case sre.AT_END_STRING:
            return lambda _: (_END,)
        case sre.AT_BOUNDARY | sre.AT_NON_BOUNDARY:
            is_word = _is_ascii_word if flags & re.ASCII else _is_word
            word, no_word = (_ASCII_WORD, _NO_ASCII_WORD) if flags & re.ASCII else (_WORD, _NO_WORD)
            is_boundary = position is sre.AT_BOUNDARY
            return lambda previous: (no_word if is_word(previous) is is_boundary else word,)
        case _:
            raise ValueError(f"{str(position).lower()} is not supported")
