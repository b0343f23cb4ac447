"""Budgets of forced runs. Whole engines are in `tests/server/engine/test_forced_tokens.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import pytest

from logitship.sampler.drafter import Draft
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.requests.sequence import Sequence
from logitship.server.speculation.forced_runs import ForcedRuns
from logitship.server.tokenizer import Tokenizer


class EndlessDrafts:
    """A drafter for which the next token of each row is certain."""

    can_draft = True

    def draft(self, rows: Iterable[int]) -> dict[int, Draft]:
        return {row: Draft([row], is_certain=True) for row in rows}


def lengths(tokenizer: Tokenizer, tenants: str, budget: int) -> list[int]:
    """Return the lengths of the runs of one sequence for each letter, its tenant."""
    members = [
        Sequence("r", 0, frozenset(), [5], SamplingParams(allowed_token_ids=[9]), 99, tokenizer, lambda _: None, tenant)
        for tenant in tenants
    ]
    runs = ForcedRuns(cast(Any, EndlessDrafts()), 16).find(members, range(len(members)), budget)
    assert all(not member.output_token_ids for member in members)
    return [len(runs[member].token_ids) if member in runs else 0 for member in members]


def test_tenants_get_equal_parts(tokenizer: Tokenizer) -> None:
    assert lengths(tokenizer, "ab", 8) == [4, 4]
    assert lengths(tokenizer, "ab", 100) == [16, 16]
    found = Counter[str]()
    for tenant, length in zip("aaaaaab", lengths(tokenizer, "aaaaaab", 40), strict=True):
        found[tenant] += length
    assert found == {"a": 24, "b": 16}


def test_no_budget(tokenizer: Tokenizer) -> None:
    assert lengths(tokenizer, "ab", 0) == [0, 0]
    assert sum(lengths(tokenizer, "ab", 1)) == 1


@pytest.mark.parametrize(("max_run", "shortened"), [(1, 1), (3, 3), (16, 8)])
def test_length_after_a_rejected_guess(max_run: int, shortened: int, tokenizer: Tokenizer) -> None:
    member = Sequence("r", 0, frozenset(), [5], SamplingParams(allowed_token_ids=[9]), 99, tokenizer, lambda _: None)
    runs = ForcedRuns(cast(Any, EndlessDrafts()), max_run)
    runs.observe(member, max_run, 0)
    assert len(runs.find([member], [0], 100)[member].token_ids) == shortened
