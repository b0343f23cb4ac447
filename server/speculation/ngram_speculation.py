"""Speculative decoding: chooses the tokens that are drafted for the next step.

The target model computes the drafted tokens of a sequence together with its last one. Then the sampler samples one
token after the other until one differs from the draft. Each token is sampled from the same distribution, with the same
random number and the same processors' state, as without drafts. For a deterministic draft, that is the rejection
sampling of Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192), which
accepts token x with probability p(x).
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
"""Factor by which drafts must be expected to raise the tokens per second: cost and gain are only estimates."""
_CLEAR_MARGIN = 1.5
_PLAIN_EVERY = 16
"""Unless drafts promise a factor above `_CLEAR_MARGIN`, one of `_PLAIN_EVERY` steps has none, to measure the time of
plain steps: if the machine has become faster, drafts would otherwise look useful forever."""
_CALIBRATION_WEIGHT = 1 / 32
_DECAY = 1 / 256
"""Share of the calibration's error that decays with each step without drafts, so that drafts are tried again."""
_ALL_USUAL = 12
_USUAL_STEP = 4


def _is_usual(num_tokens: int) -> bool:
    """Return whether steps may have this number of tokens: oneDNN compiles kernels for each in some milliseconds."""
    return num_tokens <= _ALL_USUAL or num_tokens % _USUAL_STEP == 0


class NGramSpeculation:
    """Drafts by prompt lookup, with the number of tokens that maximizes the expected tokens per second.

    The likeliest draft tokens of all sequences are taken first. Their number is chosen by the expected number of tokens
    of the step, over its expected time.

    Args:
        num_draft_tokens: most draft tokens of a sequence per step.
        forward_cost: number of tokens → time of a forward pass.
    """

    def __init__(self, num_draft_tokens: int, forward_cost: Callable[[int], float]) -> None:
        self.num_draft_tokens = num_draft_tokens
        self._cost = ServingCost(forward_cost)
        self._rates = AcceptanceRates()
        self._lookups: WeakKeyDictionary[Sequence, PromptLookup] = WeakKeyDictionary()
        self._num_drafted_in_a_row = 0
        self._expected = 0.0
        # Choosing the likeliest drafts of many sequences favors overestimated probabilities. This is the ratio of
        # accepted to expected tokens, by size of the batch.
        self._calibration: dict[int, float] = {}

    def drafts(self, decoding: Iterable[Sequence]) -> dict[Sequence, list[int]]:
        """Return the drafts of the next step, for the sequences that get one.

        Args:
            decoding: the sequences that sample a token in the step, except their first.
        """
        lookups = {sequence: self.lookup(sequence) for sequence in decoding}
        if not any(lookup.probability(0) for lookup in lookups.values()):
            return {}
        # A token is never likelier than those before it, so each prefix of this order is a draft of each sequence.
        likeliest = sorted(
            (
                (lookup.probability(index), sequence)
                for sequence, lookup in lookups.items()
                if lookup.probability(0)
                for index in range(min(self.num_draft_tokens, sequence.num_missing - 1))
            ),
            key=lambda each: -each[0],
        )
        calibration = self._calibration.get(len(lookups).bit_length(), 1.0)
        expected = list(accumulate((calibration * each for each, _ in likeliest), initial=float(len(lookups))))
        rates = {
            count: tokens / self._cost(len(lookups), count)
            for count, tokens in enumerate(expected)
            if count == 0 or _is_usual(len(lookups) + count)
        }
        best = max(rates, key=lambda count: rates[count])
        margin = _CLEAR_MARGIN if self._num_drafted_in_a_row >= _PLAIN_EVERY else _MARGIN
        if rates[best] <= margin * rates[0]:
            return {}
        chosen = [sequence for _, sequence in likeliest[:best]]
        self._expected = sum(probability for probability, _ in likeliest[:best])
        return {sequence: lookups[sequence].draft(count) for sequence, count in Counter(chosen).items()}

    def observe(self, num_rows: int, num_drafts: int, num_accepted: int, seconds: float) -> None:
        """Update the estimates with the last step, if none of its sequences computed its prompt.

        Args:
            num_rows: sequences that sampled a token.
            num_drafts: drafted tokens.
            num_accepted: accepted draft tokens.
            seconds: duration of the step.
        """
        self._cost.observe(num_rows, num_drafts, seconds)
        self._num_drafted_in_a_row = self._num_drafted_in_a_row + 1 if num_drafts else 0
        size = num_rows.bit_length()
        calibration = self._calibration.get(size, 1.0)
        if not num_drafts:
            self._calibration[size] = calibration + _DECAY * (1.0 - calibration)
        elif self._expected:
            self._calibration[size] = calibration + _CALIBRATION_WEIGHT * (
                min(num_accepted / self._expected, 1.0) - calibration
            )

    def lookup(self, sequence: Sequence) -> PromptLookup:
        """Return the prompt lookup of a sequence, up to its last token."""
        lookup = self._lookups.get(sequence)
        if lookup is None:
            lookup = self._lookups[sequence] = PromptLookup(
                sequence.prompt_token_ids, sequence.output_token_ids, self._rates
            )
        lookup.follow()
        return lookup
