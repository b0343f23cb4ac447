r"""Regular expressions that end a sequence, searched while its text arrives.

Clients write them, so they are not searched by Python's `re`, which backtracks, but by an automaton that reads each
character once. Python's parser reads the patterns, and `re` tests single characters, so that they mean what they mean
in SGLang. What needs backtracking (lookaround, references to groups, atomic groups) is refused.
"""

from __future__ import annotations

import itertools
import re
import threading
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib import import_module
from typing import Any

# Type checkers do not know the modules of Python's regular expressions.
sre_compiler: Any = import_module("re._compiler")
sre: Any = import_module("re._constants")
sre_parser: Any = import_module("re._parser")

MAX_STOP_REGEX = 500
"""Maximum size of a request's patterns: their characters and operators, with repetitions written out. A character of
the output takes a time that grows with it."""

MAX_SETS = 1 << 17
"""Maximum size of the sets of a request's patterns whose case is ignored, such as `(?i:[a-z])`: their characters, and
`_SET_SIZE` for each. `re` takes about 0.2 microseconds for a unit of it, to compile the sets."""

_NEEDS_BACKTRACKING = {
    sre.ASSERT: "lookahead and lookbehind are",
    sre.ASSERT_NOT: "lookahead and lookbehind are",
    sre.GROUPREF: "references to groups are",
    sre.GROUPREF_EXISTS: "references to groups are",
    sre.ATOMIC_GROUP: "atomic groups are",
    sre.POSSESSIVE_REPEAT: "possessive repetitions are",
}
"""Operations of Python's parser that only a backtracking search can do, as the beginning of a message."""

_warnings_lock = threading.Lock()
"""Held while warnings are ignored: `catch_warnings` saves and restores filters that all threads share."""

_SET_SIZE = 1 << 12
_MAX_CACHED = 4096
"""Maximum number of entries of a cache that grows with the text. One that is full is cleared."""
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

_CONTEXTS = (None, "\n", "a", "é", " ")
"""One character of each kind that an assertion distinguishes; None: the beginning or the end of the text."""

_Assertion = Callable[[str | None], tuple[int, ...]]
"""Takes the character before a position, None at the beginning. Returns the alternative conditions on what follows."""

_Paths = tuple[tuple[int, int], ...]
"""All paths of the automaton at a position of the text: for each set of conditions on the rest of the text, the nodes
that the text leads to under them, as bits. Only nodes that test a character or end a pattern."""


class CompiledStopRegex:
    """The stop patterns of a request. Its sequences share it, and what it caches.

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
        self._nodes = builder.positions  # ends of patterns come in the order of the patterns
        self._inner_nodes = builder.inner_nodes
        self._begin_nodes = begins
        self._ends = sum(1 << bit for bit, node in enumerate(self._nodes) if node.pattern is not None)
        self._tests: dict[Callable[[str], bool], int] = {}
        for bit, node in enumerate(self._nodes):
            if node.matches is not None:
                self._tests[node.matches] = self._tests.get(node.matches, 0) | 1 << bit
        self._closures: dict[int, tuple[_Paths, dict[_Node, _Paths]]] = {}
        self._passing: dict[str, int] = {}
        self._targets: dict[tuple[int, str, int], _Paths] = {}
        self._states: dict[_Paths, _AutomatonState] = {}
        self._steps: dict[tuple[_AutomatonState, str], _AutomatonState] = {}
        self.start = self._state(self._closure(_context(None))[0]) if begins else None

    def step(self, state: _AutomatonState, character: str) -> _AutomatonState:
        """Return the state after the next character."""
        following = self._steps.get((state, character))
        if following is None:
            following = self._state(self._paths_after(state.paths, character))
            if len(self._steps) >= _MAX_CACHED:
                self._steps.clear()
                self._states.clear()
            self._steps[state, character] = following
        return following

    def start_after(self, character: str) -> _AutomatonState:
        """Return the state before a text that follows a character, with which no match begins."""
        return self._state(self._closure(_context(character))[0])

    def pattern(self, index: int) -> str | None:
        """Return a pattern, or None for the index that means none."""
        return None if index == _NONE else self._patterns[index]

    def _state(self, paths: _Paths) -> _AutomatonState:
        state = self._states.get(paths)
        if state is None:
            found = self._first_end(nodes for conditions, nodes in paths if not conditions)
            found_at_end = self._first_end(nodes for conditions, nodes in paths if not conditions & _FAILS_AT_END)
            state = self._states[paths] = _AutomatonState(paths, found, found_at_end)
        return state

    def _first_end(self, sets: Iterable[int]) -> int:
        """Return the index of the first pattern that ends in one of these sets of nodes."""
        ends = 0
        for nodes in sets:
            ends |= nodes & self._ends
        pattern = self._nodes[(ends & -ends).bit_length() - 1].pattern if ends else None
        return _NONE if pattern is None else pattern

    def _paths_after(self, paths: _Paths, character: str) -> _Paths:
        """Return the paths after a character, with those that begin there."""
        context = _context(character)
        passing = self._passing_nodes(character)
        after = dict(self._closure(context)[0])
        for conditions, nodes in paths:
            remaining = _conditions_after(conditions, character) if conditions else 0
            if remaining is None:
                continue
            if conditions and nodes & self._ends:
                after[remaining] = after.get(remaining, 0) | nodes & self._ends
            for place, digit in enumerate(reversed(f"{nodes & passing:x}")):
                if digit != "0":
                    for added, targets in self._targets_of(place, digit, context):
                        after[remaining | added] = after.get(remaining | added, 0) | targets
        return _minimal(after)

    def _closure(self, context: int) -> tuple[_Paths, dict[_Node, _Paths]]:
        """Return the paths with which patterns begin after a character of a kind, and those from each node."""
        if context not in self._closures:
            closures = _closures(self._nodes, self._inner_nodes, _CONTEXTS[context])
            begins = _minimal(_merged(closures[node] for node in self._begin_nodes))
            self._closures[context] = begins, closures
        return self._closures[context]

    def _passing_nodes(self, character: str) -> int:
        """Return the nodes whose test a character passes."""
        passing = self._passing.get(character)
        if passing is None:
            passing = sum(nodes for test, nodes in self._tests.items() if test(character))
            if len(self._passing) >= _MAX_CACHED:
                self._passing.clear()
            self._passing[character] = passing
        return passing

    def _targets_of(self, place: int, digit: str, context: int) -> _Paths:
        """Return where four nodes lead to: those of a hexadecimal digit at a place, from the lowest."""
        key = place, digit, context
        targets = self._targets.get(key)
        if targets is None:
            passed = [self._nodes[4 * place + bit] for bit in range(4) if int(digit, 16) >> bit & 1]
            _, closures = self._closure(context)
            targets = self._targets[key] = _minimal(_merged(closures[node.targets[0]] for node in passed))
        return targets


@lru_cache(maxsize=32)  # the sequences of a request have the same
def compile_stop_regex(patterns: tuple[str, ...], tenant: str = "") -> CompiledStopRegex:
    """Compile the stop patterns of a request.

    Args:
        patterns: the patterns.
        tenant: who sent them. Tenants share none: response times would reveal one's patterns to another.

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


class _AutomatonState:
    """All paths of the automaton at a position of the text.

    Attributes:
        paths: the paths.
        found: index of the first pattern that ends here.
        found_at_end: the same if the text ends here.
    """

    __slots__ = ("found", "found_at_end", "paths")

    def __init__(self, paths: _Paths, found: int, found_at_end: int) -> None:
        self.paths = paths
        self.found = found
        self.found_at_end = found_at_end


def _closures(nodes: list[_Node], inner_nodes: list[_Node], previous: str | None) -> dict[_Node, _Paths]:
    """Return the paths from each node to the next nodes that test a character or end a pattern.

    Args:
        nodes: those that do, in the order of their bits.
        inner_nodes: the others, in the order in which they were made: after their targets but for repetitions.
        previous: the character before.
    """
    closures: dict[_Node, _Paths] = {node: ((0, 1 << bit),) for bit, node in enumerate(nodes)}
    closures.update(dict.fromkeys(inner_nodes, ()))
    has_changed = True
    while has_changed:
        has_changed = False
        # Backward too, because repetitions lead back: else each pass would see through one of those around a node.
        for node in itertools.chain(inner_nodes, reversed(inner_nodes)):
            added = (0,) if node.assertion is None else node.assertion(previous)
            targets = _merged(closures[target] for target in node.targets)
            paths = _minimal(
                _merged([(conditions | each, bits) for conditions, bits in targets.items()] for each in added)
            )
            if paths != closures[node]:
                closures[node] = paths
                has_changed = True
    return closures


def _merged(all_paths: Iterable[Iterable[tuple[int, int]]]) -> dict[int, int]:
    merged: dict[int, int] = {}
    for conditions, nodes in (path for paths in all_paths for path in paths):
        merged[conditions] = merged.get(conditions, 0) | nodes
    return merged


def _minimal(paths: dict[int, int]) -> _Paths:
    """Return paths without those that no text meets, and those to the same node as others under fewer conditions.

    Of two calls, the one with more paths must not drop one that the other keeps: `_closures` would never end.
    """
    if len(paths) == 1:
        return tuple(path for path in paths.items() if path[0] in _SATISFIABLE)
    kept: list[tuple[int, int]] = []
    for conditions in sorted(paths, key=lambda each: (each.bit_count(), each)):
        nodes = paths[conditions]
        for fewer, known in kept:
            if fewer & conditions == fewer:
                nodes &= ~known
        if nodes and conditions in _SATISFIABLE:
            kept.append((conditions, nodes))
    return tuple(kept)


def _context(character: str | None) -> int:
    """Return the index in `_CONTEXTS` of a character's kind."""
    if character is None:
        return 0
    if character == "\n":
        return 1
    return 4 if not _is_word(character) else 2 if character.isascii() else 3


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


def _is_satisfiable(conditions: int) -> bool:
    return not conditions & _FAILS_AT_END or any(
        _conditions_after(conditions, character) is not None for character in _CONTEXTS if character is not None
    )


_SATISFIABLE = frozenset(filter(_is_satisfiable, range(2 * _NO_ASCII_WORD)))
"""Sets of conditions that some text meets."""


class _Builder:
    """Builds the automaton from parsed patterns, from their ends to their beginnings.

    Attributes:
        positions: the nodes that test a character or end a pattern.
        inner_nodes: the others.
    """

    def __init__(self) -> None:
        self.positions: list[_Node] = []
        self.inner_nodes: list[_Node] = []
        self._size = self._sets_size = 0
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
        if self._size > MAX_STOP_REGEX:
            raise ValueError(
                f"with it, the patterns have more than {MAX_STOP_REGEX} characters and operators, "
                "repetitions written out"
            )
        node = _Node(list(targets), matches, assertion, pattern)
        (self.inner_nodes if matches is None and pattern is None else self.positions).append(node)
        return node

    def sequence(self, items: Any, flags: int, following: _Node) -> _Node:
        """Build the nodes of a sequence, before a node. Returns the first."""
        for op, argument in reversed([*items]):
            following = self._item(op, argument, flags, following)
        return following

    def _item(self, op: Any, argument: Any, flags: int, following: _Node) -> _Node:
        if op in _NEEDS_BACKTRACKING:
            raise ValueError(f"{_NEEDS_BACKTRACKING[op]} not supported: patterns are searched in linear time")
        match op:
            case sre.BRANCH:
                return self.node(*(self.sequence(each, flags, following) for each in argument[1]))
            case sre.SUBPATTERN:
                _, added, removed, inner = argument
                if added & sre_parser.TYPE_FLAGS:
                    flags &= ~sre_parser.TYPE_FLAGS
                return self.sequence(inner, (flags | added) & ~removed, following)
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
            is_set = op is sre.IN and [kind for kind, _ in argument] != [sre.CATEGORY]
            if is_set and flags & re.IGNORECASE:
                self._count_set(argument)
            self._tests[key] = (
                self._set_test(argument, flags)
                if is_set and not flags & re.IGNORECASE
                else _re_test(op, argument, flags)
            )
        return self._tests[key]

    def _set_test(self, members: Any, flags: int) -> Callable[[str], bool]:
        """Return the test of a set. `re` would look at each character of its ranges when it compiles them."""
        is_negated = members[0][0] is sre.NEGATE
        kinds: dict[Any, list[Any]] = {sre.LITERAL: [], sre.RANGE: [], sre.CATEGORY: []}
        for kind, member in members[is_negated:]:
            kinds[kind].append(member)
        codes, ranges = frozenset(kinds[sre.LITERAL]), kinds[sre.RANGE]
        categories = [self._test(sre.IN, [(sre.CATEGORY, each)], flags) for each in kinds[sre.CATEGORY]]

        def test(character: str) -> bool:
            code = ord(character)
            is_member = (
                code in codes
                or any(first <= code <= last for first, last in ranges)
                or any(category(character) for category in categories)
            )
            return is_member is not is_negated

        return test

    def _count_set(self, members: Any) -> None:
        # `re` leaves what is beyond the basic plane to the search.
        ranges = (min(member[1], 0xFFFF) - member[0] for kind, member in members if kind is sre.RANGE)
        self._sets_size += _SET_SIZE + sum(max(0, each) for each in ranges)
        if self._sets_size > MAX_SETS:
            raise ValueError(
                "with it, the patterns have too many or too large sets of characters whose case is ignored"
            )


def _parse(pattern: str) -> Any:
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


def _re_test(op: Any, argument: Any, flags: int) -> Callable[[str], bool]:
    one = sre_parser.SubPattern(sre_parser.State(), [(op, argument)])
    matched = sre_compiler.compile(one, flags).match
    return lambda character: matched(character) is not None


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
