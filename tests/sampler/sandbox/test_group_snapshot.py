from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logitship.sampler.processors.request_view import ModelView, RequestView
from logitship.sampler.sampling_params import SamplingParams
from logitship.sampler.sandbox.group_snapshot import MAX_SNAPSHOT, GroupSnapshot

MODEL = ModelView(vocab_size=4, eos_token_ids=frozenset({0}), tokenizer=None)


@dataclass
class Member:
    params: dict[str, Any]
    view: RequestView
    restorable: bool = True
    params_copy: dict[str, Any] | None = None


def member(params: dict[str, Any] | None = None, state: dict[Any, Any] | None = None) -> Member:
    view = RequestView(
        rid="r", prompt_token_ids=[1, 2], output_token_ids=[3], sampling_params=SamplingParams(), model=MODEL
    )
    view.state = {} if state is None else state
    return Member({**(params or {}), "__req__": view}, view)


def with_types(value: Any) -> Any:
    """Return a value that compares types recursively."""
    if isinstance(value, dict):
        return type(value), [(with_types(key), with_types(item)) for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [with_types(item) for item in value]
    return type(value), repr(value) if isinstance(value, float) else value


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
)
keys = st.text(max_size=3) | st.integers()


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists, dicts = st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)
    return st.one_of(
        lists,
        dicts,
        lists.map(tuple),
        lists.map(deque),
        dicts.map(OrderedDict),
        dicts.map(lambda given: defaultdict(list, given)),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.lists(keys).map(Counter),
    )


plain = st.recursive(leaves, containers, max_leaves=12)
values = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "__req__"), plain, max_size=4)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=4), st.integers(0, 2))
def test_plain_values_are_restored_exactly(given: list[tuple[dict[str, Any], dict[str, Any]]], earlier: int) -> None:
    members = [member(*copy.deepcopy(one)) for one in given]
    for _ in range(earlier):
        GroupSnapshot(members)
    dicts = [(one.params, one.view.state) for one in members]
    snapshot = GroupSnapshot(members)
    for one in members:
        for value in (one.params, one.view.state):
            for part in value.values():
                if isinstance(part, list | deque):
                    part.append("corrupted")
                elif isinstance(part, dict):
                    part["corrupted"] = 1
            value.clear()
            value["corrupted"] = True
        one.view.state = {"corrupted": 2}
    assert len(snapshot) == len(members)
    assert snapshot.restore() == set(range(len(members)))
    for one, (params, state), (params_dict, state_dict) in zip(members, given, dicts, strict=True):
        assert one.params is params_dict
        assert one.view.state is state_dict
        assert one.params.pop("__req__") is one.view
        assert with_types(one.params) == with_types(params)
        assert with_types(state_dict) == with_types(state)
        assert one.restorable


class Own:
    pass


class Text(str):
    __slots__ = ()


class RunsCode:
    def __reduce__(self) -> Any:
        raise AssertionError("a snapshot must not run author code")


NOT_PLAIN = {
    "tensor": torch.zeros(2),
    "numpy array": np.zeros(2),
    "numpy number": np.float64(1.5),  # a subclass of float that marshal would write as bytes
    "numpy integer": np.int64(1),
    "memoryview": memoryview(b"ab"),
    "object": Own(),
    "class": Own,
    "function": len,
    "lambda": lambda: 0,
    "subclass of str": Text("a"),
    "code": RunsCode(),
    "module": torch,
    "iterator": iter([1]),
    "factory of its own": defaultdict(lambda: 0),
    "generator": torch.Generator(),
}


@pytest.mark.parametrize("where", ["params", "state", "deep"])
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_member_with_non_plain_value_is_skipped_for_good(name: str, where: str) -> None:
    value: dict[str, Any] = {"value": [[NOT_PLAIN[name]]] if where == "deep" else NOT_PLAIN[name]}
    odd = member(value if where == "params" else None, value if where != "params" else None)
    others = [member({"a": 1}), member({}, {"n": [1]})]
    snapshot = GroupSnapshot([others[0], odd, others[1]])
    assert [one.restorable for one in (others[0], odd, others[1])] == [True, False, True]
    others[1].view.state["n"].append(2)
    odd.view.output_ids.append(9)
    assert snapshot.restore() == {0, 2}
    assert others[1].view.state == {"n": [1]}
    assert odd.view.output_ids == [3, 9]
    odd.view.state.clear()
    odd.params.pop("value", None)
    assert GroupSnapshot([odd]).restore() == set()


def test_changing_parameters_are_restored_to_latest_snapshot() -> None:
    one = member({"steps": [0], "table": {"a": [1]}})
    for step in range(4):
        one.params["steps"].append(step)
        snapshot = GroupSnapshot([one])
        for _ in range(2):
            one.params["table"]["a"].append("corrupted")
            one.params["steps"].clear()
        assert snapshot.restore() == {0}
        assert one.params == {"steps": [0, *range(step + 1)], "table": {"a": [1]}, "__req__": one.view}


def test_unchanged_parameters_can_be_restored_repeatedly() -> None:
    one = member({"table": {"a": [1]}})
    for _ in range(4):
        snapshot = GroupSnapshot([one])
        one.params["table"]["a"].append("corrupted")
        one.params["more"] = 1
        assert snapshot.restore() == {0}
        assert one.params == {"table": {"a": [1]}, "__req__": one.view}


class RaisesOnComparison:
    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("odd", [RaisesOnComparison(), torch.zeros(2), np.zeros(2)])
def test_incomparable_parameters(odd: Any) -> None:
    one, other = member({"a": 1}), member({"a": 1})
    GroupSnapshot([one, other])
    one.params["a"] = odd
    assert GroupSnapshot([one, other]).restore() == {1}
    assert one.params["a"] is odd


def test_parameters_nested_too_deep_to_copy() -> None:
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep]
    one = member({"deep": deep})
    for _ in range(3):
        snapshot = GroupSnapshot([one])
        assert len(snapshot) == 1
        one.params["deep"] = 0
        assert snapshot.restore() == {0}
        assert len(str(one.params["deep"])) == 2 * 401


def test_too_large_values_are_skipped() -> None:
    small = [member({}, {"text": "x" * 10}) for _ in range(3)]
    large = member({}, {"text": "x" * (2 * MAX_SNAPSHOT)})
    assert GroupSnapshot([*small, large]).restore() == {0, 1, 2, 3}  # within the limit on average
    larger = member({}, {"text": "x" * (5 * MAX_SNAPSHOT)})
    assert GroupSnapshot([*small, larger]).restore() == {0, 1, 2}
    assert [one.restorable for one in (*small, larger)] == [True, True, True, False]


def test_too_deep_values_are_skipped() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    one = member({}, {"deep": deep})
    assert len(GroupSnapshot([one])) == 0
    assert not one.restorable
    while deep:
        deep = deep.pop()  # deallocating it at once would recurse


def test_self_referential_value() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    one = member({}, {"loop": loop})
    snapshot = GroupSnapshot([one])
    loop.clear()
    assert snapshot.restore() == {0}
    restored = one.view.state["loop"]
    assert restored[0] == 1
    assert restored[1] is restored


def test_appended_tokens_are_removed() -> None:
    one = member()
    prompt, output = one.view.origin_input_ids, one.view.output_ids
    snapshot = GroupSnapshot([one])
    prompt.extend([7, 7])
    output.append(8)
    one.view.output_ids = [5, 5, 5]
    del one.view.origin_input_ids
    assert snapshot.restore() == {0}
    assert one.view.origin_input_ids is prompt == [1, 2]
    assert one.view.output_ids is output == [3]


@pytest.mark.parametrize("name", ["origin_input_ids", "output_ids"])
def test_lost_tokens_cannot_be_restored(name: str) -> None:
    losing, other = member(), member({"a": 1})
    snapshot = GroupSnapshot([losing, other])
    getattr(losing.view, name).clear()
    assert snapshot.restore() == {1}
    assert losing.restorable  # may work next time


@pytest.mark.parametrize("name", ["origin_input_ids", "output_ids", "state"])
@pytest.mark.parametrize("odd", [None, (), Text("a")])
def test_view_with_replaced_or_deleted_attributes(name: str, odd: Any) -> None:
    replaced, deleted, other = member(), member(), member()
    setattr(replaced.view, name, odd)
    delattr(deleted.view, name)
    assert GroupSnapshot([replaced, deleted, other]).restore() == {2}
    assert [one.restorable for one in (replaced, deleted, other)] == [False, False, True]


def test_missing_request_view_is_restored() -> None:
    one = member({"a": 1})
    del one.params["__req__"]
    snapshot = GroupSnapshot([one])
    one.params.clear()
    assert snapshot.restore() == {0}
    assert one.params == {"a": 1, "__req__": one.view}
