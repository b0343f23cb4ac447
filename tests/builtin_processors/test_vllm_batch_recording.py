"""The three built-in batch processors against what vLLM 0.32.0 did: `tests/data/vllm_batch.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.sampler.batch_processors.interface import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.sampling_params import SamplingParams

TRACES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "vllm_batch.json").read_text())[
    "traces"
]

CASES: list[tuple[type[LogitsProcessor], str]] = [
    (MinTokensLogitsProcessor, "after_min_tokens"),
    (LogitBiasLogitsProcessor, "after_logit_bias"),
    (MinPLogitsProcessor, "after_min_p"),
]


class RecordedRequests:
    """The requests of one trace, with their live outputs."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[SamplingParams, list[int], list[int]]] = {}

    def come(self, request: dict[str, Any]) -> None:
        params = request["params"]
        sampling_params = SamplingParams(
            min_p=params.get("min_p", 0.0),
            logit_bias={int(token): bias for token, bias in params.get("logit_bias", {}).items()},
            min_tokens=params.get("min_tokens", 0),
            stop_token_ids=frozenset(params.get("stop_token_ids", ())),
        )
        self._requests[request["id"]] = sampling_params, request["prompt"], []

    def update(self, recorded: dict[str, Any] | None) -> BatchUpdate | None:
        if recorded is None:
            return None
        return BatchUpdate(
            batch_size=recorded["batch_size"],
            removed=recorded["removed"],
            added=[self._added(row, name) for row, name in recorded["added"]],
            moved=[(source, target, MoveDirectionality[how]) for source, target, how in recorded["moved"]],
        )

    def _added(self, row: int, name: str) -> AddedRequest:
        return (row, *self._requests[name])

    def append(self, order: list[str], sampled: list[int]) -> None:
        for name, token in zip(order, sampled, strict=True):
            self._requests[name][2].append(token)


def as_logits(rows: list[list[float | None]]) -> torch.Tensor:
    return torch.tensor([[float("-inf") if value is None else value for value in row] for row in rows])


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"seed{trace['seed']}")
@pytest.mark.parametrize(("processor_type", "after"), CASES)
def test_replay(processor_type: type[LogitsProcessor], after: str, trace: dict[str, Any]) -> None:
    processor = processor_type(None, torch.device("cpu"), False)
    requests = RecordedRequests()
    for step in trace["steps"]:
        for request in step["new"]:
            requests.come(request)
        processor.update_state(requests.update(step["batch_update"]))
        if step["order"]:
            got = processor.apply(as_logits(step["logits"]))
            # The recording rounds what it shows after a processor.
            torch.testing.assert_close(got, as_logits(step[after]), rtol=0, atol=1e-5)
        requests.append(step["order"], step["sampled"])


def test_recording_covers_all_changes() -> None:
    updates = [step["batch_update"] for trace in TRACES for step in trace["steps"]]
    kinds = {how for update in updates if update for _, _, how in update["moved"]}
    assert kinds == {"SWAP", "UNIDIRECTIONAL"}
    assert any(update is None for update in updates)
    assert any(update["removed"] for update in updates if update)


def test_removed_and_added_are_disjoint_in_the_recording() -> None:
    """So it does not matter which of the two is processed first."""
    for trace in TRACES:
        for step in trace["steps"]:
            update = step["batch_update"] or {"removed": [], "added": []}
            assert not set(update["removed"]) & {row for row, _ in update["added"]}
