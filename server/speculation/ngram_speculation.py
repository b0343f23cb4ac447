"""Which tokens the next step checks ahead of their time (speculative decoding).

The target model computes the drafted tokens of a sequence together with its last one. Then the sampler draws, one token
after the other, for as long as what it draws is what was drafted. Each token is drawn from the same distribution, with
the same random number and the same processors' state, as it would be one step at a time: for a draft that is certain of
its token, that is the rejection sampling of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding" (arXiv:2211.17192), which accepts token x with probability p(x).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import accumulate
from weakref import WeakKeyDictionary

from logitship.server.requests.sequence import Sequence

from .prompt_lookup import AcceptanceRates, PromptLookup
from .serving_cost import ServingCost

_MARGIN = 1.125
"""How much more tokens per second drafts must promise: what they cost is only an estimate, as is what they bring."""
_CLEAR = 1.5
_PLAIN_EVERY = 16
"""Where drafts promise less than that much more, one of so many steps goes without: else nobody would learn what a step
without takes by now, and on a machine that has become faster drafts would look good for ever."""
_TRUTH_WEIGHT = 1 / 32
_FORGET = 1 / 256
"""Of how much less came true than expected, goes with each step without drafts: they are tried again."""
_ALL_USUAL = 12
_USUAL_STEP = 4


def _is_usual(num_tokens: int) -> bool:
    """Whether steps have so many tokens. oneDNN compiles its multiplications for each number, some milliseconds."""
    return num_tokens <= _ALL_USUAL or num_tokens % _USUAL_STEP == 0


class NGramSpeculation:
    """Drafts by prompt lookup: as many tokens as promise the most tokens per second.

    The likeliest tokens of all sequences are taken first. How many, is decided by what the step is then expected to
    give, over the time that it takes.

    Args:
        num_draft_tokens: most of a sequence in a step.
        forward_cost: how long a forward pass of so many tokens takes.
    """

    def __init__(self, num_draft_tokens: int, forward_cost: Callable[[int], float]) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._cost = ServingCost(forward_cost)
        self._hit_rates = AcceptanceRates()
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()
        self._num_drafted_in_a_row = 0
        self._expected = 0.0
        # The likeliest drafts of many sequences are chosen, and so those above all whose probability is overestimated:
        # by size of the batch, the share of what was expected that came true.
        self._truth: dict[int, float] = {}

    def drafts(self, decoding: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """The drafts of the next step, of the sequences that have one.

        Args:
            decoding: the sequences that draw a token in the step, apart from those that draw their first.
        """
        lookups = {sequence: self.lookup(sequence) for sequence in decoding}
        if not any(lookup.probability(0) for lookup in lookups.values()):
            return {}
        # A token is never likelier than those before it, so that a part of this order is a draft of each sequence.
        likeliest = sorted(
            (
                (lookup.probability(place), sequence)
                for sequence, lookup in lookups.items()
                if lookup.probability(0)
                for place in range(min(self.num_draft_tokens, sequence.num_missing - 1))
            ),
            key=lambda each: -each[0],
        )
        truth = self._truth.get(len(lookups).bit_length(), 1.0)
        expected = list(accumulate((truth * each for each, _ in likeliest), initial=float(len(lookups))))
        rates = {
            count: tokens / self._cost(len(lookups), count)
            for count, tokens in enumerate(expected)
            if count == 0 or _is_usual(len(lookups) + count)
        }
        best = max(rates, key=lambda count: rates[count])
        promise = _CLEAR if self._num_drafted_in_a_row >= _PLAIN_EVERY else _MARGIN
        if rates[best] <= promise * rates[0]:
            return {}
        chosen = [sequence for _, sequence in likeliest[:best]]
        self._expected = sum(probability for probability, _ in likeliest[:best])
        return {sequence: lookups[sequence].draft(count) for sequence, count in Counter(chosen).items()}

    def observe(self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Learn from the step whose drafts were asked for last, if none of its sequences computed its prompt.

        Args:
            num_rows: sequences that drew a token.
            num_accepted: drafts that came true.
            seconds: that it took.
        """
        self._cost.observe(num_rows, num_drafts, seconds)
        self._num_drafted_in_a_row = self._num_drafted_in_a_row + 1 if num_drafts else 0
        size = num_rows.bit_length()
        truth = self._truth.get(size, 1.0)
        if not num_drafts:
            self._truth[size] = truth + _FORGET * (1.0 - truth)
        elif self._expected:
            self._truth[size] = truth + _TRUTH_WEIGHT * (min(num_accepted / self._expected, 1.0) - truth)

    def lookup(self, sequence: Sequence) -> PromptLookup:
        """The guesses of a sequence, up to its last token."""
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(
                sequence.prompt_token_ids, sequence.output_token_ids, self._hit_rates
            )
        lookup.follow()
        return lookup
