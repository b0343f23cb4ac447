from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch

from logitship.client.errors import ProcessorFault
from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor, RunOutcome
from logitship.sampler.processors.processor_groups import (
    ProcessorUse,
    StageLogits,
    group_key,
    group_rows,
)
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.sampler.conftest import Load

MODEL = ModelView(4, frozenset(), None)


def member(processor: LoadedProcessor, *, is_last: bool = True) -> ProcessorUse:
    executor_row = processor.executor.attach(processor, ExecutorSequence("r", {}, [], [], SamplingParams(), MODEL))
    return ProcessorUse(processor, {}, "r", executor_row=executor_row, is_last=is_last)


def ignore(processor: LoadedProcessor) -> Callable[[int, float], None]:
    return lambda num_rows, seconds: None


@pytest.fixture
def processors(load: Load) -> list[LoadedProcessor]:
    def same(logits: torch.Tensor, params: list[dict[str, Any]]) -> torch.Tensor:
        return logits

    return [load(same, name) for name in "ABC"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("AABBC", {"A": [0, 1], "B": [2, 3], "C": [4]}),
        (".A.BB..", {"A": [1], "B": [3, 4]}),
        ("AAAA", {"A": [0, 1, 2, 3]}),
        (".A", {"A": [1]}),
        ("ABAB", {"A": [0, 2], "B": [1, 3]}),
        ("BAAB", {"A": [1, 2], "B": [0, 3]}),
    ],
)
@pytest.mark.parametrize("more_rows", [0, 2])
def test_rows_of_a_stage(
    names: str, expected: dict[str, list[int]], more_rows: int, processors: Sequence[LoadedProcessor]
) -> None:
    """Adjacent rows share the batch's memory, regardless of rows between the groups."""
    rows = {row: [member(processors["ABC".index(name)])] for row, name in enumerate(names) if name != "."}
    logits = torch.arange(4.0 * (len(names) + more_rows)).view(-1, 4)
    (stage,) = group_rows(rows, ignore)
    stage_logits = StageLogits(stage, logits, lambda group, edits: None)
    found = {group.processor.name: (group, stage_logits.rows_of(group)) for group in stage.groups}
    assert {name: group.rows for name, (group, _) in found.items()} == expected
    for name, (group, rows_of) in found.items():
        assert torch.equal(rows_of, logits[expected[name]])
        assert rows_of.is_contiguous()
        assert (rows_of.data_ptr() == logits[expected[name][0]].data_ptr()) is group.is_adjacent


def test_stage_of_some_rows(processors: Sequence[LoadedProcessor]) -> None:
    (stage,) = group_rows({row: [member(processors[row // 2])] for row in range(6)}, ignore)
    assert [group.rows for group in stage.without({1, 2, 3}).groups] == [[0], [4, 5]]
    assert [group.rows for group in stage.select({1: 0, 4: 1, 5: 2}).groups] == [[0], [1, 2]]


def test_calls_are_counted_once_and_failures_skipped(processors: Sequence[LoadedProcessor]) -> None:
    observed: list[tuple[int, float]] = []
    rows = {row: [member(processors[0])] for row in range(4)}
    (stage,) = group_rows(rows, lambda processor: lambda num_rows, seconds, _: observed.append((num_rows, seconds)))
    (group,) = stage.groups
    uses = group.members
    group.count(RunOutcome(8.0))
    group.count(RunOutcome(4.0, MappingProxyType({1: ProcessorFault("no", digest="", name="A", kind="exception")})))
    (some,) = stage.select({0: 0, 3: 1}).groups
    some.count(RunOutcome(2.0))
    assert observed == [(4, 8.0), (4, 4.0), (2, 2.0)]
    assert [use.count.steps for use in uses] == [3, 1, 2, 3]
    assert [use.count.seconds for use in uses] == [4.0, 2.0, 3.0, 4.0]
    for use in uses:
        use.merge_shared_counts()
    group.count(RunOutcome(8.0))  # of an earlier batch: the group has no members any more
    assert [use.count.steps for use in uses] == [3, 1, 2, 3]


def test_group_is_last_if_all_rows_are(processors: Sequence[LoadedProcessor]) -> None:
    rows = {
        0: [member(processors[0])],
        1: [member(processors[0], is_last=False), member(processors[1])],
        2: [member(processors[2])],
    }
    first, second = group_rows(rows, ignore)
    assert {group.processor.name: group.is_last for group in first.groups} == {"A": False, "C": True}
    assert [group.is_last for group in second.groups] == [True]


def test_group_key_of_a_request(load: Callable[..., LoadedProcessor]) -> None:
    def own(name: str) -> LoadedProcessor:
        loaded = load(lambda logits, params: logits, name)
        return LoadedProcessor(loaded.digest, name, loaded.executor, loaded.instance, per_sequence=True)

    def key_of(*processors: LoadedProcessor) -> Any:
        return group_key(SamplingParams(processors=tuple(ProcessorUse(each, {}, "r") for each in processors)))

    shared = load(lambda logits, params: logits, "Shared")
    assert key_of() == ()
    assert key_of(shared, shared) == (shared.group_name, shared.group_name)
    assert key_of(own("Own")) == ()
    assert key_of(shared) != key_of(replace(shared, tenant="another"))
    assert key_of(own("Own"), shared, own("Another")) == ("", shared.group_name)
