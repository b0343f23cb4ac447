from __future__ import annotations

import copy
import random
import time
from collections.abc import Iterator, Sequence

import pytest

from logitship.builtin_processors.parts.repeat_index import RepeatIndex, SequenceBreakers
from tests.helpers.random_cases import random_seeds


def continuations(
    history: list[int], shortest: int, longest: int, window: int | None, breakers: Sequence[tuple[int, ...]]
) -> dict[int, int]:
    """Compare the end of a history with every place in it: DRY as llama.cpp defines it."""
    tokens = history if window is None else history[max(0, len(history) - window) :]
    limit = len(tokens)
    for distance in range(len(tokens)):
        begin = len(tokens) - 1 - distance
        complete = [len(each) for each in breakers if tuple(tokens[begin : begin + len(each)]) == each]
        if complete:
            limit = distance + 1 - max(complete)
            break
    found: dict[int, int] = {}
    for place, token in enumerate(tokens[1:]):
        length = 0
        while length <= place and tokens[place - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        length = min(length, limit, longest)
        if length >= shortest and (token,) not in breakers:
            found[token] = max(found.get(token, 0), length)
    return found


@random_seeds(2000)
def test_equals_a_search_of_the_history(seed: int) -> None:
    """Tokens come one at a time or several, and are removed and replaced; copies go their own ways."""
    generator = random.Random(seed)
    num_tokens, shortest = generator.choice([1, 2, 3, 5]), generator.choice([1, 1, 2, 3])
    longest, window = shortest + generator.choice([0, 1, 3, 100]), generator.choice([None, 1, 2, 5, 9, 20])
    breakers = [
        tuple(generator.choices(range(num_tokens), k=generator.choice([1, 2, 2, 3])))
        for _ in range(generator.choice([0, 0, 1, 2, 3]))
    ]
    index = RepeatIndex(shortest, longest, window, SequenceBreakers(breakers))
    prompt, output = generator.choices(range(num_tokens), k=generator.randrange(8)), list[int]()
    for _ in range(generator.randrange(40)):
        index.follow(prompt, output)
        assert index.continuations() == continuations(prompt + output, shortest, longest, window, breakers)
        chance = generator.random()
        if chance < 0.1:
            fork = index
            index = copy.deepcopy(index)
            fork.follow(prompt, [*output, 0, 0, generator.randrange(num_tokens)])
        if 0.1 < chance < 0.15 and output:
            del output[generator.randrange(len(output)) :]
        elif 0.15 < chance < 0.2 and output:
            output[-1] = generator.randrange(num_tokens)
        else:
            output += generator.choices(range(num_tokens), k=generator.choice([1, 1, 1, 4]))


def histories() -> dict[str, list[int]]:
    generator = random.Random(0)
    return {
        "random": [generator.randrange(100_000) for _ in range(8000)],
        "zipf": [int(generator.paretovariate(1)) % 50_000 for _ in range(8000)],
        "one token": [5] * 8000,
        "loop": [1, 2, 3, 4, 5, 6, 7] * 1143,
    }


@pytest.mark.parametrize("name", histories())
def test_step_costs_the_same_at_any_length(name: str) -> None:
    """Counted, not timed: the states that a step visits, for the last steps of a short and of a long history."""
    visited = 0

    class Counting(RepeatIndex):
        def _next(self, state: int, token: int) -> int:
            nonlocal visited
            visited += 1
            return super()._next(state, token)

        def _transitions(self, state: int) -> Iterator[tuple[int, int]]:
            nonlocal visited
            visited += 1
            return super()._transitions(state)

    index, tokens, counts = Counting(2, 40, 2000, SequenceBreakers([(9,)])), histories()[name], []
    for length in (500, 1000, 4000, 8000):
        index.follow(tokens[: length - 100], [])
        visited = 0
        for place in range(length - 100, length):
            index.follow(tokens[: place + 1], [])
            index.continuations()
        counts.append(visited)
    assert max(counts) <= 3 * min(counts) + 400


def test_long_history_is_copied_fast() -> None:
    index = RepeatIndex(2, 40, None, SequenceBreakers([]))
    index.follow(histories()["random"], [])
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        copy.deepcopy(index)
        seconds.append(time.thread_time() - began)
    assert min(seconds) < 0.01
