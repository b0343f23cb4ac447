"""Forced runs: tokens that are certain, or all but certain, before the model computes them.

A grammar, a tree or a spent thinking budget may leave one token. Then it is the next one whatever the model says, and
so on, until two are left. And where a grammar leaves one text, such as the next key of a JSON object, its usual tokens
are likely to be sampled: only the way in which the text is divided into tokens is open. All of them are computed in one
forward pass with the last token. They are drafts, of which the certain ones need not be verified.

Assumption: the logits of certain tokens are finite. The engine looks at them after the pass.
"""

from __future__ import annotations

from collections import abc, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from logitship.sampler.drafter import Draft, Drafter
from logitship.server.requests.sequence import Sequence

_MIN_RUN = 4
"""Rejected guesses do not shorten a sequence's later runs below this."""


@dataclass
class ForcedRun:
    """The next tokens of a sequence.

    Attributes:
        token_ids: the tokens.
        certain: indices of those that are certain if the tokens before them are sampled.
    """

    token_ids: list[int] = field(default_factory=list)
    certain: set[int] = field(default_factory=set)

    def extend(self, draft: Draft) -> None:
        """Append tokens."""
        if draft.is_certain:
            self.certain.add(len(self.token_ids))
        self.token_ids += draft.token_ids


class ForcedRuns:
    """Finds forced runs.

    Args:
        drafter: knows what is allowed next.
        max_run: most tokens of a sequence per step.

    Attributes:
        max_run: most tokens of a sequence per step; 0 if none may be looked for.
    """

    def __init__(self, drafter: Drafter, max_run: int) -> None:
        self._drafter = drafter
        self.max_run = max_run if drafter.can_draft else 0
        self._longest: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()

    def find(self, members: abc.Sequence[Sequence], rows: abc.Sequence[int], budget: int) -> dict[Sequence, ForcedRun]:
        """Return the runs of some sequences.

        A token that ends its sequence is left to the sampler: nothing has to be computed after it.

        Args:
            members: the sequences of the batch, in row order.
            rows: the rows to look at, those that may have a draft.
            budget: most tokens of all runs. Tenants get equal parts, or what they need.
        """
        by_tenant: defaultdict[str, list[int]] = defaultdict(list)
        for row in rows:
            by_tenant[members[row].tenant].append(row)
        runs: dict[Sequence, ForcedRun] = {}
        for place, of_tenant in enumerate(sorted(by_tenant.values(), key=len)):
            left = budget - sum(len(run.token_ids) for run in runs.values())
            runs |= self._find(members, of_tenant, left // (len(by_tenant) - place))
        return runs

    def _find(self, members: abc.Sequence[Sequence], rows: abc.Sequence[int], budget: int) -> dict[Sequence, ForcedRun]:
        runs: dict[Sequence, ForcedRun] = {}
        with _restored(members, rows):
            while rows and budget > 0:
                rows = [row for row in rows if self._num_missing(members[row], runs) > 0]
                drafts = self._drafter.draft(rows) if rows else {}
                rows = []
                for row, draft in drafts.items():
                    sequence = members[row]
                    token_ids = _before_end(sequence, draft.token_ids[: min(budget, self._num_missing(sequence, runs))])
                    if token_ids:
                        sequence.output_token_ids += token_ids
                        runs.setdefault(sequence, ForcedRun()).extend(draft._replace(token_ids=token_ids))
                        budget -= len(token_ids)
                        rows.append(row)
        return runs

    def observe(self, sequence: Sequence, num_tokens: int, num_accepted: int) -> None:
        """Learn how many tokens of a run were accepted: a model may divide texts into other tokens than the usual."""
        if num_accepted == num_tokens:
            self._longest.pop(sequence, None)
        else:
            longest = self._longest.get(sequence, self.max_run)
            self._longest[sequence] = min(max(longest // 2, num_accepted, _MIN_RUN), self.max_run)

    def _num_missing(self, sequence: Sequence, runs: Mapping[Sequence, ForcedRun]) -> int:
        """Return how many tokens the run of a sequence may still have."""
        length = len(runs[sequence].token_ids) if sequence in runs else 0
        return min(self._longest.get(sequence, self.max_run) - length, sequence.num_missing - 1)


def _before_end(sequence: Sequence, token_ids: abc.Sequence[int]) -> abc.Sequence[int]:
    """Return the tokens up to one that would end the sequence."""
    ends = (index for index, token in enumerate(token_ids) if sequence.is_ended_by(token))
    return token_ids[: next(ends, len(token_ids))]


@contextmanager
def _restored(members: abc.Sequence[Sequence], rows: abc.Sequence[int]) -> Iterator[None]:
    """Remove the tokens that were appended to the output lists inside."""
    lengths = {row: len(members[row].output_token_ids) for row in rows}
    try:
        yield
    finally:
        for row, length in lengths.items():
            del members[row].output_token_ids[length:]
