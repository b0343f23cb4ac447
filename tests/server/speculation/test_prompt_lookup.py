from __future__ import annotations

import random

from logitship.server.speculation.prompt_lookup import AcceptanceRates, PromptLookup


def slow_guess(tokens: list[int]) -> int | None:
    """Where the token stands that followed the last four tokens, or else two, the last time before."""
    for size in (4, 2):
        ending = tokens[len(tokens) - size :]
        for place in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[place - size : place] == ending:
                return place
    return None


class SlowLookup:
    """What `PromptLookup` guesses, from the whole history in each step."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.guess = slow_guess(tokens)

    def append(self, token: int) -> None:
        hit = self.guess is not None and self.tokens[self.guess] == token
        self.tokens = [*self.tokens, token]
        self.guess = self.guess + 1 if hit and self.guess is not None else slow_guess(self.tokens)

    def draft(self, count: int) -> list[int]:
        if self.guess is None:
            return []
        tokens = self.tokens.copy()
        for place in range(self.guess, self.guess + count):
            tokens.append(tokens[place])
        return tokens[len(self.tokens) :]


def test_it_guesses_what_a_search_of_the_whole_history_finds() -> None:
    generator = random.Random(0)
    for _ in range(60):
        letters = generator.choice([2, 3, 8])
        prompt = [generator.randrange(letters) for _ in range(generator.randrange(0, 30))]
        output: list[int] = []
        lookup, slow = PromptLookup(prompt, output, AcceptanceRates()), SlowLookup(prompt)
        for _ in range(40):
            drafted = lookup.draft(5)
            assert drafted == slow.draft(5)
            assert bool(drafted) == (lookup.probability(0) > 0)
            new = generator.randrange(1, 4)
            for token in (drafted or [0] * new)[:new] if generator.random() < 0.5 else [0] * new:
                output.append(token if generator.random() < 0.8 else generator.randrange(letters))
                slow.append(output[-1])
            lookup.follow()


def test_what_repeats_is_drafted_again_and_again() -> None:
    output: list[int] = []
    lookup = PromptLookup([5, 7, 9, 5, 7, 9, 5, 7], output, AcceptanceRates())
    assert lookup.draft(7) == [9, 5, 7, 9, 5, 7, 9]
    assert PromptLookup([1, 2, 3, 4], [], AcceptanceRates()).draft(3) == []
    assert PromptLookup([], [], AcceptanceRates()).draft(3) == []


def test_the_probability_follows_the_hits() -> None:
    output: list[int] = []
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, output, AcceptanceRates())
    first = lookup.probability(0)
    for token in range(1, 10):
        output.append(token)
        lookup.follow()
        assert lookup.probability(0) > first
        assert lookup.probability(3) < lookup.probability(0)
    for token in range(100, 130):  # what follows the two is another one each time
        output += [2, 3]
        lookup.follow()
        last = lookup.probability(0)
        output.append(token)
    assert last < 0.1 < first


def test_a_sequence_begins_with_what_became_of_the_others() -> None:
    of_all = AcceptanceRates()
    expected = []
    for hit in (True, False):
        for _ in range(60):
            output: list[int] = []
            lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2], output, of_all)
            before = lookup.probability(0)
            output += [3, 4] if hit else [9]
            lookup.follow()
        expected.append(before)
    assert expected[0] > 0.5 > 0.3 > expected[1]
