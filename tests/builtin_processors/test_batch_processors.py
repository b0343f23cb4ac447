from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from logitship.builtin_processors.batch_processors import (
    BUILTIN_LOGITS_PROCESSORS,
    STR_POOLING_REJECTS_LOGITSPROCS,
    STR_SPEC_DEC_REJECTS_LOGITSPROCS,
    build_logitsprocs,
    make_logits_processors,
)
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.client.processor import CustomLogitProcessor
from logitship.sampler.batch_processors.guarded_processor import GuardedProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor
from logitship.sampler.batch_processors.logits_processors import LogitsProcessors
from logitship.sampler.batch_processors.plugins import load_plugins
from logitship.sampler.batch_processors.vllm_config import (
    ReasoningConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)

CPU = torch.device("cpu")
CONFIG = VllmConfig(SchedulerConfig(max_num_seqs=4))


class Nothing(LogitsProcessor):
    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.max_num_seqs = vllm_config.scheduler_config.max_num_seqs

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


class Drafting(Nothing):
    def apply_with_spec_decode(self, logits: torch.Tensor, num_draft_tokens: Sequence[int]) -> torch.Tensor:
        return logits


class Row(CustomLogitProcessor):
    def __call__(self, logits: torch.Tensor, custom_param_list: object = None) -> torch.Tensor:
        return logits


def speculating() -> VllmConfig:
    return VllmConfig(SchedulerConfig(max_num_seqs=4), speculative_config=SpeculativeConfig(3))


def types(processors: LogitsProcessors) -> list[type]:
    return [type(processor) for processor in processors.all]


def test_builtin_processors_come_first() -> None:
    made = build_logitsprocs(CONFIG, CPU, False, False, [Nothing])
    assert types(made) == [*BUILTIN_LOGITS_PROCESSORS, Nothing]


def test_thinking_budget_needs_reasoning_config() -> None:
    reasoning = ReasoningConfig(
        reasoning_start_str="<a>",
        reasoning_end_str="</a>",
        reasoning_start_token_ids=[1],
        reasoning_end_token_ids=[2],
        natural_reasoning_end_token_ids=[2],
    )
    config = dataclasses.replace(CONFIG, reasoning_config=reasoning)
    (made,) = build_logitsprocs(config, CPU, False, False).forcing
    assert type(made) is ThinkingTokenBudgetLogitsProcessor
    assert build_logitsprocs(CONFIG, CPU, False, False).forcing == []


def test_row_level_plugins_are_not_created() -> None:
    assert types(build_logitsprocs(CONFIG, CPU, False, False, [Row])) == BUILTIN_LOGITS_PROCESSORS


def test_operator_processors_are_wrapped() -> None:
    names = []

    def wrap(processor: LogitsProcessor, name: str) -> LogitsProcessor:
        names.append(name)
        return GuardedProcessor(processor, name)

    made = make_logits_processors(load_plugins([Nothing]), CONFIG, CPU, False, wrap=wrap)
    assert types(made) == [*BUILTIN_LOGITS_PROCESSORS, GuardedProcessor]
    assert names == [f"{Nothing.__module__}:Nothing"]


def test_pooling_error_equals_vllms() -> None:
    with pytest.raises(ValueError, match=STR_POOLING_REJECTS_LOGITSPROCS):
        build_logitsprocs(CONFIG, CPU, False, True, [Nothing])
    assert types(build_logitsprocs(CONFIG, CPU, False, True)) == []


def test_speculation_error_equals_vllms() -> None:
    config = speculating()
    with pytest.raises(ValueError, match=STR_SPEC_DEC_REJECTS_LOGITSPROCS):
        build_logitsprocs(config, CPU, False, False, [Nothing])
    assert types(build_logitsprocs(config, CPU, False, False, [Drafting])) == [*BUILTIN_LOGITS_PROCESSORS, Drafting]


@pytest.mark.parametrize("pooling", [True, False])
def test_entry_points_are_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: bool) -> None:
    info = tmp_path / "quiet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n")
    target = "logitship.sampler.batch_processors.interface:LogitsProcessor"
    (info / "entry_points.txt").write_text(f"[vllm.logits_processors]\nquiet = {target}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="quiet = "):
        build_logitsprocs(speculating(), CPU, False, pooling)
