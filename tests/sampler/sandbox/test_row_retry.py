from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.client.errors import ProcessorFault
from logitship.sampler.author_code.calls import edit
from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.row_retry import RowRetry

MODEL = ModelView(vocab_size=4, eos_token_ids=frozenset({0}), tokenizer=None)
VOCAB = 4


@dataclass
class Member:
    params: dict[str, Any]
    view: RequestView
    restorable: bool = True
    params_copy: dict[str, Any] | None = None


def member(state: dict[Any, Any] | None = None, **params: Any) -> Member:
    view = RequestView(
        rid="r", prompt_token_ids=[1, 2], output_token_ids=[3], sampling_params=SamplingParams(), model=MODEL
    )
    view.state = {} if state is None else state
    return Member({**params, "__req__": view}, view)


class Mutating:
    """A processor that modifies everything it can reach, row by row, and fails for some rows.

    Attributes:
        calls: the number of rows of each call.
    """

    def __init__(self, max_rows: int = 99) -> None:
        self.calls: list[int] = []
        self._max_rows = max_rows

    def __call__(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor | None:
        self.calls.append(len(params))
        if len(params) != len(logits):
            raise AssertionError
        for row, own in zip(logits, params, strict=True):
            view = own["__req__"]
            view.state.setdefault("seen", []).append(len(view.output_ids))
            own["count"] = own.get("count", 0) + 1
            row += 10 * len(view.state["seen"]) + own["count"]
            view.output_ids.append(99)
            if own.get("fails"):
                raise ValueError(own["fails"])
            view.output_ids.pop()
            if own.get("bad"):
                return None
        if len(params) > self._max_rows:
            raise ValueError("too many rows")
        return logits

    def edit(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> None:
        edit(lambda given: self(given, params), logits, name="Mutating")


def step(retry: RowRetry, logits: torch.Tensor, members: list[Member]) -> dict[int, ProcessorFault]:
    """Do what the server and the sandbox do in a step."""
    pristine = logits.clone()
    faults = retry.attempt(logits, members)
    if faults is None:
        logits.copy_(pristine)
        faults = retry.retry(logits, members)
    return faults


def logits_of(rows: int) -> torch.Tensor:
    return torch.arange(float(rows * VOCAB)).view(rows, VOCAB)


def test_successful_group_takes_one_call() -> None:
    processor = Mutating()
    members = [member() for _ in range(3)]
    logits = logits_of(3)
    assert step(RowRetry(processor.edit), logits, members) == {}
    assert processor.calls == [3]
    assert torch.equal(logits, logits_of(3) + 11)


def test_single_row_takes_one_call() -> None:
    processor = Mutating()
    faults = step(RowRetry(processor.edit), logits_of(1), [member(fails="no")])
    assert processor.calls == [1]
    assert faults[0].message == "processor Mutating raised ValueError: no"


def test_only_rows_that_fail_alone_have_faults() -> None:
    processor = Mutating()
    members = [member(), member(fails="first"), member(bad=True), member(fails="second"), member()]
    logits = logits_of(5)
    faults = step(RowRetry(processor.edit), logits, members)
    assert {row: (fault.kind, fault.message) for row, fault in faults.items()} == {
        1: ("exception", "processor Mutating raised ValueError: first"),
        2: ("bad_result", faults[2].message),
        3: ("exception", "processor Mutating raised ValueError: second"),
    }
    assert processor.calls == [5, 1, 1, 1, 1, 1]
    for row in (0, 4):
        assert torch.equal(logits[row], logits_of(5)[row] + 11)
        assert members[row].view.state == {"seen": [1]}
        assert members[row].params == {"count": 1, "__req__": members[row].view}
        assert members[row].view.output_ids == [3]


def test_unrestorable_row_gets_the_group_fault() -> None:
    members = [member(), member({"tensor": torch.zeros(1)}), member(fails="no")]
    faults = step(RowRetry(Mutating().edit), logits_of(3), members)
    assert sorted(faults) == [1, 2]
    assert faults[1].message == "processor Mutating raised ValueError: no"


def test_no_retry_if_no_row_is_restorable() -> None:
    members = [member({"tensor": torch.zeros(1)}), member({"tensor": torch.zeros(1)}, fails="no")]
    faults = RowRetry(Mutating().edit).attempt(logits_of(2), members)
    assert faults is not None
    assert sorted(faults) == [0, 1]
    assert faults[0] is faults[1]


def test_unrestorable_rows_without_fault() -> None:
    members = [member({"tensor": torch.zeros(1)}) for _ in range(2)]
    assert RowRetry(Mutating().edit).attempt(logits_of(2), members) == {}


def test_processor_that_fails_for_groups_is_called_row_by_row() -> None:
    processor = Mutating(max_rows=1)
    retry = RowRetry(processor.edit)
    members = [member() for _ in range(3)]
    for number in range(1, 6):
        logits = logits_of(3)
        assert step(retry, logits, members) == {}
        assert torch.equal(logits, logits_of(3) + 11 * number)
    assert processor.calls == [3, 1, 1, 1] * 3 + [1, 1, 1] * 2
    assert sorted(step(retry, logits_of(2), [member(fails="no"), member()])) == [0]


def test_row_faults_do_not_disable_group_calls() -> None:
    processor = Mutating()
    retry = RowRetry(processor.edit)
    for _ in range(5):
        assert sorted(step(retry, logits_of(2), [member(), member(fails="no")])) == [1]
    assert step(retry, logits_of(2), [member(), member()]) == {}
    assert processor.calls[-1] == 2


def test_attempt_without_retry_leaves_no_state() -> None:
    retry = RowRetry(Mutating().edit)
    assert retry.attempt(logits_of(2), [member(), member(fails="no")]) is None
    members = [member(), member()]
    assert retry.attempt(logits_of(2), members) == {}
    assert [one.params["count"] for one in members] == [1, 1]


def test_fault_does_not_keep_logits_alive() -> None:
    logits = torch.zeros(2, VOCAB)
    kept = weakref.ref(logits)
    retry = RowRetry(Mutating().edit)
    assert retry.attempt(logits, [member(), member(fails="no")]) is None
    del logits
    gc.collect()
    assert kept() is None


def test_retry_without_attempt() -> None:
    retry = RowRetry(Mutating().edit)
    members = [member(), member(fails="no")]
    assert sorted(step(retry, logits_of(2), members)) == [1]
    with pytest.raises(AssertionError, match="there was no failed attempt"):
        retry.retry(logits_of(2), members)


rows = st.fixed_dictionaries(
    {
        "params": st.fixed_dictionaries({}, optional={"fails": st.sampled_from(["a", "b"]), "bad": st.booleans()}),
        "state": st.sampled_from([{}, {"seen": [1]}, {"seen": [], "more": {"x": (1, 2)}}]),
        "restorable": st.sampled_from([True, True, True, False]),
    }
)


@given(st.lists(st.lists(rows, min_size=1, max_size=5), min_size=1, max_size=4), st.sampled_from([1, 3, 99]))
def test_good_rows_equal_rows_processed_alone(steps: list[list[dict[str, Any]]], max_rows: int) -> None:
    """Compare with processing each row by itself."""
    processor = Mutating(max_rows)
    retry = RowRetry(processor.edit)
    for group in steps:
        members = [member(copy.deepcopy(row["state"]), **row["params"]) for row in group]
        for one, row in zip(members, group, strict=True):
            one.restorable = row["restorable"]
        logits = logits_of(len(group))
        calls = len(processor.calls)
        faults = step(retry, logits, members)
        failing = [row for row in group if row["params"].get("fails") or row["params"].get("bad")]
        called_as_group = len(group) > 1 and processor.calls[calls] == len(group)
        group_failed = called_as_group and (len(group) > max_rows or bool(failing))
        for index, row in enumerate(group):
            alone = member(copy.deepcopy(row["state"]), **row["params"])
            expected = logits_of(len(group))[index : index + 1]
            fails = bool(step(RowRetry(Mutating().edit), expected, [alone]))
            assert (index in faults) == (fails or (group_failed and not row["restorable"]))
            if index not in faults:
                assert torch.equal(logits[index], expected[0])
                assert members[index].view.state == alone.view.state
                assert members[index].view.output_ids == alone.view.output_ids
                assert members[index].params["count"] == alone.params["count"]
