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
    kept: dict[str, Any] | None = None


def member(state: dict[Any, Any] | None = None, **params: Any) -> Member:
    view = RequestView(
        rid="r", prompt_token_ids=[1, 2], output_token_ids=[3], sampling_params=SamplingParams(), model=MODEL
    )
    view.state = {} if state is None else state
    return Member({**params, "__req__": view}, view)


class Leaky:
    """A processor that changes all it can get hold of, row after row, and fails at some.

    Attributes:
        calls: how many rows each call had.
    """

    def __init__(self, most_rows: int = 99) -> None:
        self.calls: list[int] = []
        self._most_rows = most_rows

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
        if len(params) > self._most_rows:
            raise ValueError("too many rows")
        return logits

    def edit(self, logits: torch.Tensor, params: list[dict[str, Any]]) -> None:
        edit(lambda given: self(given, params), logits, name="Leaky")


def step(retry: RowRetry, logits: torch.Tensor, members: list[Member]) -> dict[int, ProcessorFault]:
    """What the two sides of a sandbox do in a step."""
    pristine = logits.clone()
    faults = retry.attempt(logits, members)
    if faults is None:
        logits.copy_(pristine)
        faults = retry.retry(logits, members)
    return faults


def logits_of(rows: int) -> torch.Tensor:
    return torch.arange(float(rows * VOCAB)).view(rows, VOCAB)


def test_a_group_without_a_fault_is_one_call() -> None:
    processor = Leaky()
    members = [member() for _ in range(3)]
    logits = logits_of(3)
    assert step(RowRetry(processor.edit), logits, members) == {}
    assert processor.calls == [3]
    assert torch.equal(logits, logits_of(3) + 11)


def test_a_row_by_itself_is_one_call() -> None:
    processor = Leaky()
    faults = step(RowRetry(processor.edit), logits_of(1), [member(fails="no")])
    assert processor.calls == [1]
    assert faults[0].message == "processor Leaky raised ValueError: no"


def test_only_the_rows_that_fail_alone_are_at_fault() -> None:
    processor = Leaky()
    members = [member(), member(fails="first"), member(bad=True), member(fails="second"), member()]
    logits = logits_of(5)
    faults = step(RowRetry(processor.edit), logits, members)
    assert {row: (fault.kind, fault.message) for row, fault in faults.items()} == {
        1: ("exception", "processor Leaky raised ValueError: first"),
        2: ("bad_result", faults[2].message),
        3: ("exception", "processor Leaky raised ValueError: second"),
    }
    assert processor.calls == [5, 1, 1, 1, 1, 1]
    for row in (0, 4):
        assert torch.equal(logits[row], logits_of(5)[row] + 11)
        assert members[row].view.state == {"seen": [1]}
        assert members[row].params == {"count": 1, "__req__": members[row].view}
        assert members[row].view.output_ids == [3]


def test_a_row_that_cannot_be_restored_has_the_fault_of_the_group() -> None:
    members = [member(), member({"tensor": torch.zeros(1)}), member(fails="no")]
    faults = step(RowRetry(Leaky().edit), logits_of(3), members)
    assert sorted(faults) == [1, 2]
    assert faults[1].message == "processor Leaky raised ValueError: no"


def test_where_none_can_be_restored_nothing_is_sent_again() -> None:
    members = [member({"tensor": torch.zeros(1)}), member({"tensor": torch.zeros(1)}, fails="no")]
    faults = RowRetry(Leaky().edit).attempt(logits_of(2), members)
    assert faults is not None
    assert sorted(faults) == [0, 1]
    assert faults[0] is faults[1]


def test_without_a_fault_nothing_needs_to_be_restorable() -> None:
    members = [member({"tensor": torch.zeros(1)}) for _ in range(2)]
    assert RowRetry(Leaky().edit).attempt(logits_of(2), members) == {}


def test_a_processor_that_cannot_work_on_several_rows_is_called_row_by_row() -> None:
    processor = Leaky(most_rows=1)
    retry = RowRetry(processor.edit)
    members = [member() for _ in range(3)]
    for number in range(1, 6):
        logits = logits_of(3)
        assert step(retry, logits, members) == {}
        assert torch.equal(logits, logits_of(3) + 11 * number)
    assert processor.calls == [3, 1, 1, 1] * 3 + [1, 1, 1] * 2
    assert sorted(step(retry, logits_of(2), [member(fails="no"), member()])) == [0]


def test_a_row_at_fault_does_not_count_against_the_groups() -> None:
    processor = Leaky()
    retry = RowRetry(processor.edit)
    for _ in range(5):
        assert sorted(step(retry, logits_of(2), [member(), member(fails="no")])) == [1]
    assert step(retry, logits_of(2), [member(), member()]) == {}
    assert processor.calls[-1] == 2


def test_an_attempt_that_is_not_tried_again_leaves_nothing() -> None:
    retry = RowRetry(Leaky().edit)
    assert retry.attempt(logits_of(2), [member(), member(fails="no")]) is None
    members = [member(), member()]
    assert retry.attempt(logits_of(2), members) == {}
    assert [one.params["count"] for one in members] == [1, 1]


def test_a_fault_does_not_keep_the_logits() -> None:
    logits = torch.zeros(2, VOCAB)
    kept = weakref.ref(logits)
    retry = RowRetry(Leaky().edit)
    assert retry.attempt(logits, [member(), member(fails="no")]) is None
    del logits
    gc.collect()
    assert kept() is None


def test_a_retry_without_an_attempt() -> None:
    retry = RowRetry(Leaky().edit)
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
def test_good_rows_are_as_if_they_had_been_alone(steps: list[list[dict[str, Any]]], most_rows: int) -> None:
    """Against the slow way: each row by itself, from the start."""
    processor = Leaky(most_rows)
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
        group_failed = called_as_group and (len(group) > most_rows or bool(failing))
        for place, row in enumerate(group):
            alone = member(copy.deepcopy(row["state"]), **row["params"])
            expected = logits_of(len(group))[place : place + 1]
            fails = bool(step(RowRetry(Leaky().edit), expected, [alone]))
            assert (place in faults) == (fails or (group_failed and not row["restorable"]))
            if place not in faults:
                assert torch.equal(logits[place], expected[0])
                assert members[place].view.state == alone.view.state
                assert members[place].view.output_ids == alone.view.output_ids
                assert members[place].params["count"] == alone.params["count"]
