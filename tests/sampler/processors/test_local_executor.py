from __future__ import annotations

from typing import Any

import torch

from logitship.sampler.processors.executor import ExecutorSequence, LoadedProcessor
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams
from tests.sampler.conftest import Load

MODEL = ModelView(4, frozenset(), None)

Params = dict[str, Any]


def attach(processor: LoadedProcessor, output: list[int]) -> Any:
    sequence = ExecutorSequence("r", {}, [1], output, SamplingParams(), MODEL)
    return processor.executor.attach(processor, sequence)


def test_kept_output_list_stays_up_to_date(load: Load) -> None:
    kept: dict[int, list[int]] = {}

    def keep(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        for row, param in enumerate(params):
            if row not in kept:
                kept[row] = param["__req__"].output_ids
        return logits

    processor = load(keep, "Keep")
    outputs = [[5], [6]]
    group = processor.executor.group(processor, [attach(processor, output) for output in outputs])
    for token in range(3):
        group.call(torch.zeros(2, 4))
        assert list(kept.values()) == outputs
        for output in outputs:
            output.append(token)


def test_used_row_stays_in_sync_after_regrouping(load: Load) -> None:
    kept: list[list[int]] = []

    def keep(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        if not kept:
            kept.append(params[-1]["__req__"].output_ids)
        return logits

    processor = load(keep, "Keep")
    first, second = [5], [6]
    row, late = attach(processor, first), attach(processor, second)
    processor.executor.group(processor, [row, late]).call(torch.zeros(2, 4))
    second.append(7)
    processor.executor.group(processor, [late]).call(torch.zeros(1, 4))
    assert kept == [[6, 7]]


def test_fault_affects_all_rows_of_the_group(load: Load) -> None:
    def fail(logits: torch.Tensor, params: list[Params]) -> torch.Tensor:
        raise ValueError("no")

    processor = load(fail, "Fail")
    group = processor.executor.group(processor, [attach(processor, []), attach(processor, [])])
    outcome = group.call(torch.zeros(2, 4))
    assert list(outcome.faults) == [0, 1]
    assert outcome.seconds > 0
    assert not outcome.row_by_row
