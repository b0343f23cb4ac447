from __future__ import annotations

import random

from logitship.builtin_processors.parts.token_sequence import TokenSequence
from tests.helpers.random_cases import random_seeds


def reference_matched(sequence: list[int], history: list[int]) -> int:
    """Return the length of the longest prefix of the sequence at the end of the history."""
    return max(n for n in range(len(sequence) + 1) if history[len(history) - n :] == sequence[:n])


@random_seeds(200)
def test_against_a_search_of_the_whole_history(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [rng.randrange(2) for _ in range(rng.randint(1, 6))]
    history = [rng.randrange(2) for _ in range(60)]
    sequence = TokenSequence(wanted)
    matched = 0
    for length, token in enumerate(history, 1):
        matched = sequence.advance(matched, token)
        assert matched == reference_matched(wanted, history[:length])


@random_seeds(100)
def test_last_occurrence(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [rng.randrange(3) for _ in range(rng.randint(1, 3))]
    history = [rng.randrange(3) for _ in range(rng.randrange(20))]
    found = [i + len(wanted) for i in range(len(history)) if history[i : i + len(wanted)] == wanted]
    assert TokenSequence(wanted).end_of_last_in(history) == max(found, default=0)


@random_seeds(100)
def test_partial_match_at_the_end(seed: int) -> None:
    rng = random.Random(seed)
    wanted = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
    history = [rng.randrange(2) for _ in range(rng.randrange(12))]
    since = rng.randint(0, len(history))
    part = history[since:]
    begun = max(n for n in range(len(wanted)) if n <= len(part) and part[len(part) - n :] == wanted[:n])
    assert TokenSequence(wanted).begun_in(history, since) == begun
