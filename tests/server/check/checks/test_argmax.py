"""The claim to leave the most likely token alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.check_report import Verdict

Check = Callable[..., CheckReport]
Rows = list[dict[str, Any]] | None


class Sharper(CustomLogitProcessor):
    def is_argmax_invariant(self) -> bool:
        return True

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits * 2


class BansSeven(CustomLogitProcessor):
    is_argmax_invariant = True

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        most_likely = logits.argmax(dim=-1)
        logits[torch.arange(len(logits)), most_likely] -= 100
        return logits


class Modest(BansSeven):
    is_argmax_invariant = False


def test_a_claim_that_holds(check: Check) -> None:
    assert check(Sharper)["argmax"].verdict is Verdict.PASSED


def test_a_claim_that_does_not(check: Check) -> None:
    (finding,) = check(BansSeven)["argmax"].findings
    assert finding.details["before"] != finding.details["after"]
    assert f"the most likely token was {finding.details['before']} and is {finding.details['after']}" in finding.seen


@pytest.mark.parametrize("cls", [Modest])
def test_no_claim(cls: type[CustomLogitProcessor], check: Check) -> None:
    assert check(cls)["argmax"].verdict is Verdict.NOT_CHECKED
