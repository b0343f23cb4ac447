"""Index of a token sequence that knows which tokens would continue a repetition, and how long it is so far."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .state_history import kept_length

_NONE = -1


class SequenceBreakers:
    """Sequences of tokens that no repetition extends over.

    Args:
        sequences: the sequences, not empty.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        self.single = frozenset(each[0] for each in sequences if len(each) == 1)
        self._longer = frozenset(each for each in sequences if len(each) > 1)
        self._lengths = sorted({len(each) for each in self._longer})

    def shortest_at_end(self, tokens: Sequence[int]) -> int:
        """Return the length of the shortest sequence that ends with the last token; 0 if there is none."""
        if tokens[-1] in self.single:
            return 1
        return next((length for length in self._lengths if tuple(tokens[-length:]) in self._longer), 0)


class RepeatIndex:
    """Finds repetitions: occurrences of the end of a token sequence at an earlier place in it.

    A suffix automaton of the sequence (Blumer et al. 1985): a state stands for the substrings that end at the same
    places, and knows the longest of them; its link is the state of the longest suffix that ends at more places; its
    transitions are the tokens that follow it somewhere. The index follows the longest suffix that occurs earlier, whose
    state and links have all tokens that would continue a repetition.

    Guarantees:
    * `follow` costs amortized O(new tokens), or O(all) when it detects removed or replaced tokens.
    * `continuations` costs O(its result) for each of at most `longest` suffixes, however long the sequence is.

    Args:
        shortest: least length of a repetition, at least 1.
        longest: length from which on repetitions are not told apart, at least `shortest`.
        window: number of last tokens that count; None for all.
        breakers: repetitions begin after the last one of these.
    """

    def __init__(self, shortest: int, longest: int, window: int | None, breakers: SequenceBreakers) -> None:
        self._shortest = shortest
        self._longest = longest
        self._window = window
        self._breakers = breakers
        self._clear()

    def _clear(self) -> None:
        self._tokens = array("q")
        self._length = array("q", [0])
        """The length of each state's longest substring."""
        self._link = array("q", [_NONE])
        self._end = array("q", [_NONE])
        """The last place where each state ends, if that matters: see `_append`."""
        # Most states have one transition, so that a dictionary for each would take several times the memory.
        self._token = array("q", [_NONE])
        self._target = array("q", [_NONE])
        self._more: dict[int, dict[int, int]] = {}
        """State → its other transitions, by token."""
        self._whole = 0
        """The state of the whole sequence."""
        self._state = 0
        self._matched = 0
        """The longest suffix that occurs earlier, of at most `longest` + 1 tokens: its state and length."""
        self._breaker = (_NONE, 0)
        """The last breaker: where it begins, and the number of tokens up to its end."""

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._length)

    def __deepcopy__(self, memo: dict[int, Any]) -> RepeatIndex:
        copied = copy.copy(self)
        for name in ("_tokens", "_length", "_link", "_end", "_token", "_target"):
            setattr(copied, name, getattr(self, name)[:])
        copied._more = {state: following.copy() for state, following in self._more.items()}
        return copied

    def follow(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Update the index to prompt + output."""
        kept = kept_length(self._tokens, prompt, output)
        if kept < len(self._tokens):
            self._clear()
            kept = 0
        for token in prompt[kept:]:
            self._append(token)
        for token in output[max(0, kept - len(prompt)) :]:
            self._append(token)

    def continuations(self) -> Mapping[int, int]:
        """Return token → the length of the longest repetition that it would continue, without it, at most `longest`."""
        found: dict[int, int] = {}
        start = 0 if self._window is None else max(0, len(self._tokens) - self._window)
        breaker, after = self._breaker
        longest = min(self._longest, len(self._tokens) - after if breaker >= start else self._longest)
        state, length = self._state, self._matched
        while length >= self._shortest and longest >= self._shortest:
            length = min(length, longest)
            for token, target in self._transitions(state):
                # Of the last occurrence, the part that is in the window.
                inside = length if self._window is None else min(length, self._end[target] - start)
                if inside >= self._shortest and inside > found.get(token, 0):
                    found[token] = inside
            state = self._link[state]
            length = self._length[state]
        return {token: length for token, length in found.items() if token not in self._breakers.single}

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        self._match(token)
        self._extend(token)
        if self._window is not None:
            # The suffixes that occurred before end here, too. Longer ones than `_matched` are of no interest.
            state, end = self._state, len(self._tokens) - 1
            while self._length[state] >= self._shortest:
                self._end[state] = end
                state = self._link[state]
        length = self._breakers.shortest_at_end(self._tokens)
        if length:  # of two breakers, the one that begins later counts, and of two that begin there, the longer one
            self._breaker = max(self._breaker, (len(self._tokens) - length, len(self._tokens)))

    def _match(self, token: int) -> None:
        """Update the longest suffix that occurs earlier, before the automaton has the token."""
        state, length = self._state, self._matched
        target = self._next(state, token)
        while target == _NONE and state:
            state = self._link[state]
            length = self._length[state]
            target = self._next(state, token)
        if target == _NONE:
            self._state = self._matched = 0
            return
        # One token more than `longest`, so that the ends of all continuations are known.
        state, length = target, min(length + 1, self._longest + 1)
        while self._length[self._link[state]] >= length:
            state = self._link[state]
        self._state, self._matched = state, length

    def _extend(self, token: int) -> None:
        """Add a token to the automaton."""
        new = self._add_state(self._length[self._whole] + 1, 0, len(self._tokens) - 1)
        state, self._whole = self._whole, new
        target = _NONE
        while state != _NONE:
            target = self._next(state, token)
            if target != _NONE:
                break
            self._set_next(state, token, new)
            state = self._link[state]
        if state == _NONE:
            return
        if self._length[state] + 1 == self._length[target]:
            self._link[new] = target
            return
        # The shorter substrings of `target` now also end here, so they need a state of their own.
        clone = self._add_state(self._length[state] + 1, self._link[target], self._end[target])
        self._token[clone], self._target[clone] = self._token[target], self._target[target]
        if target in self._more:
            self._more[clone] = self._more[target].copy()
        while state != _NONE and self._next(state, token) == target:
            self._set_next(state, token, clone)
            state = self._link[state]
        self._link[target] = self._link[new] = clone
        if self._state == target and self._matched <= self._length[clone]:
            self._state = clone

    def _add_state(self, length: int, link: int, end: int) -> int:
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        self._token.append(_NONE)
        self._target.append(_NONE)
        return len(self._length) - 1

    def _next(self, state: int, token: int) -> int:
        if self._token[state] == token:
            return self._target[state]
        more = self._more.get(state)
        return _NONE if more is None else more.get(token, _NONE)

    def _set_next(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (_NONE, token):
            self._token[state], self._target[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _transitions(self, state: int) -> Iterator[tuple[int, int]]:
        if self._token[state] != _NONE:
            yield self._token[state], self._target[state]
        yield from self._more.get(state, {}).items()
