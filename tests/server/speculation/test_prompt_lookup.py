from __future__ import annotations

import random

from logitship.server.speculation.prompt_lookup import AcceptanceRates, PromptLookup


def slow_prediction(tokens: list[int]) -> int | None:
    """Return the index of the token after the previous occurrence of the last four tokens, else two."""
    for size in (4, 2):
        ending = tokens[len(tokens) - size :]
        for index in range(len(tokens) - 1, size - 1, -1):
            if len(tokens) >= size and tokens[index - size : index] == ending:
                return index
    return None


class SlowLookup:
    """Reference for `PromptLookup` that searches the whole history in each step."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.prediction = slow_prediction(tokens)

    def append(self, token: int) -> None:
        accepted = self.prediction is not None and self.tokens[self.prediction] == token
        self.tokens = [*self.tokens, token]
        self.prediction = (
            self.prediction + 1 if accepted and self.prediction is not None else slow_prediction(self.tokens)
        )

    def draft(self, count: int) -> list[int]:
        if self.prediction is None:
            return []
        tokens = self.tokens.copy()
        for index in range(self.prediction, self.prediction + count):
            tokens.append(tokens[index])
        return tokens[len(self.tokens) :]


def test_draft_matches_a_search_of_the_whole_history() -> None:
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


def test_draft_repeats_beyond_the_end() -> None:
    output: list[int] = []
    lookup = PromptLookup([5, 7, 9, 5, 7, 9, 5, 7], output, AcceptanceRates())
    assert lookup.draft(7) == [9, 5, 7, 9, 5, 7, 9]
    assert PromptLookup([1, 2, 3, 4], [], AcceptanceRates()).draft(3) == []
    assert PromptLookup([], [], AcceptanceRates()).draft(3) == []


def test_probability_follows_the_acceptance_rate() -> None:
    output: list[int] = []
    lookup = PromptLookup([1, 2, 3, 4, 5, 6, 7, 8, 9] * 2, output, AcceptanceRates())
    first = lookup.probability(0)
    for token in range(1, 10):
        output.append(token)
        lookup.follow()
        assert lookup.probability(0) > first
        assert lookup.probability(3) < lookup.probability(0)
    for token in range(100, 130):  # the token after these two differs each time
        output += [2, 3]
        lookup.follow()
        last = lookup.probability(0)
        output.append(token)
    assert last < 0.1 < first


def test_new_sequence_starts_with_the_shared_rates() -> None:
    shared = AcceptanceRates()
    expected = []
    for accepted in (True, False):
        for _ in range(60):
            output: list[int] = []
            lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2], output, shared)
            before = lookup.probability(0)
            output += [3, 4] if accepted else [9]
            lookup.follow()
        expected.append(before)
    assert expected[0] > 0.5 > 0.3 > expected[1]
