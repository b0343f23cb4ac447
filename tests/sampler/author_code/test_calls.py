"""Calls on single rows and of functions without a digest. The tests of `InProcessExecutor` cover the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import checked, edit, exception_fault, non_finite_fault

Edit = Callable[[torch.Tensor], object]


@pytest.mark.parametrize("function", [lambda row: row.add_(1), lambda row: row + 1, lambda row: (row + 1).double()])
def test_row_is_edited_in_place(function: Edit) -> None:
    logits = torch.zeros(3, 4)
    edit(function, logits[1], name="AddOne")
    assert logits.tolist() == [[0.0] * 4, [1.0] * 4, [0.0] * 4]


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (lambda row: row[:2], "bad_result", "processor P returned shape [2], expected [4]"),
        (lambda row: None, "bad_result", "processor P returned NoneType, not a tensor"),
        (lambda row: row[7], "exception", "processor P raised IndexError: "),
    ],
)
def test_fault_without_digest(function: Edit, kind: str, message: str) -> None:
    with pytest.raises(ProcessorFault) as raised:
        edit(function, torch.zeros(4), name="P")
    fault = raised.value
    assert (fault.kind, fault.name, fault.digest) == (kind, "P", "")
    assert fault.message.startswith(message)


def test_installed_code_gets_no_serialization_hint() -> None:
    fault = exception_fault(NameError("name 'helper' is not defined", name="helper"), name="P")
    assert fault.message == "processor P raised NameError: name 'helper' is not defined"


def test_checked_casts_and_detaches() -> None:
    result = checked(torch.ones(2, dtype=torch.float16, requires_grad=True), torch.zeros(2))
    assert result.dtype is torch.float32
    assert not result.requires_grad


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0.0, float("nan"), float("inf")], "returned NaN"),
        ([0.0, float("inf")], "returned +inf (to force a token, forbid all others)"),
        ([float("-inf")] * 2, "left no token: every logit of the row is -inf"),
    ],
)
def test_non_finite_row_is_described(row: list[float], found: str) -> None:
    fault = non_finite_fault(torch.tensor(row), name="P", digest="sha256:0")
    assert (fault.kind, fault.digest, fault.message) == ("non_finite", "sha256:0", f"processor P {found}")
