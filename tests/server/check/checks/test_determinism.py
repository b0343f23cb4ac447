"""The same history, and other logits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from logitship import CheckReport, CustomLogitProcessor
from logitship.client.check_report import Verdict

Check = Callable[..., CheckReport]
Rows = list[dict[str, Any]] | None


class TorchRandom(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits + torch.rand(1)


class PythonRandom(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        logits[:, random.randrange(260)] = -torch.inf
        return logits


class Clock(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        return logits + time.perf_counter_ns() % 1000


class Watermark(CustomLogitProcessor):
    """Random, but the same for the same history."""

    def __call__(self, logits: torch.Tensor, custom_param_list: Rows = None) -> torch.Tensor:
        for row, params in enumerate(custom_param_list or []):
            seed = sum(params["__req__"].output_ids)
            logits[row] += torch.rand(logits.shape[1], generator=torch.Generator().manual_seed(seed))
        return logits


@pytest.mark.parametrize("cls", [TorchRandom, PythonRandom, Clock])
def test_other_logits_each_time(cls: type[CustomLogitProcessor], check: Check) -> None:
    report = check(cls)
    assert [finding.check for finding in report.findings if finding.check != "speed"] == ["deterministic"]
    assert "torch.Generator" in report["deterministic"].findings[0].advice
    assert {report[name].verdict for name in ("state", "rows")} == {Verdict.NOT_CHECKED}


def test_random_numbers_that_are_seeded_with_the_history(check: Check) -> None:
    assert check(Watermark).ok
