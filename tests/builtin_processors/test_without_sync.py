"""Built-in processors give the same on another device, never wait for it, and `update_state` copies asynchronously."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logitship.builtin_processors import ThinkingBudgetLogitProcessor
from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, SchedulerConfig, VllmConfig
from logitship.sampler.sampling_params import SamplingParams
from logitship.server.tokenizer import Tokenizer
from tests.helpers.other_device import DEVICE, OtherDevice, other_device
from tests.helpers.watermarks import installed_processors

CPU = torch.device("cpu")
VOCAB_SIZE = 50
PROCESSORS: list[type[LogitsProcessor]] = [
    MinTokensLogitsProcessor,
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    ThinkingTokenBudgetLogitsProcessor,
]
CONFIG = VllmConfig(
    SchedulerConfig(max_num_seqs=4),
    reasoning_config=ReasoningConfig(
        reasoning_start_str="0",
        reasoning_end_str="8 9",
        reasoning_start_token_ids=[0],
        reasoning_end_token_ids=[8, 9],
        natural_reasoning_end_token_ids=[8, 9],
    ),
)


def updates() -> Iterator[tuple[int, BatchUpdate | None, list[list[int]]]]:
    """Yield the steps of a batch: number of rows, update, and the outputs to extend after the step."""
    rich = SamplingParams(
        min_tokens=2, stop_token_ids={1, 5}, logit_bias={3: 1.5, 7: -2.0}, min_p=0.2, thinking_token_budget=0
    )
    plain = SamplingParams()
    outputs: list[list[int]] = [[] for _ in range(5)]

    def added(row: int, params: SamplingParams) -> Any:
        return row, params, [0], outputs[row]

    yield 1, BatchUpdate(1, [], [added(0, rich)], []), outputs  # every row uses everything
    yield 3, BatchUpdate(3, [], [added(1, plain), added(2, rich)], []), outputs
    yield 3, None, outputs
    yield 3, BatchUpdate(3, [], [], [(0, 1, MoveDirectionality.SWAP)]), outputs
    yield 2, BatchUpdate(2, [0], [], [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]), outputs
    yield 1, BatchUpdate(1, [0], [], [(1, 0, MoveDirectionality.UNIDIRECTIONAL)]), outputs
    yield 0, BatchUpdate(0, [0], [], []), outputs


@pytest.mark.parametrize("processor_type", PROCESSORS)
def test_batch_processors_do_not_wait(processor_type: type[LogitsProcessor]) -> None:
    torch.manual_seed(0)
    with other_device() as device:
        processors = [processor_type(CONFIG, each, False) for each in (CPU, DEVICE)]
        for rows, update, outputs in updates():
            for each in processors:
                each.update_state(update)
            logits = torch.randn(rows, VOCAB_SIZE)
            on_device = device.put(logits)
            device.waits.clear()
            on_device = processors[1].apply(on_device)
            assert not device.waits
            assert torch.equal(on_device.cpu(), processors[0].apply(logits))
            for output in outputs:
                output.append(0)


class Copies(TorchDispatchMode):
    """Records copies to another device: (from pinned memory, non-blocking). Emulates pinned memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[torch.Tensor] = []
        self.seen: list[tuple[bool, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default:
            self.pinned.append(args[0].clone())
            return self.pinned[-1]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            self.seen.append((any(args[0] is each for each in self.pinned), kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("processor_type", PROCESSORS)
def test_update_state_copies_asynchronously(processor_type: type[LogitsProcessor], pin_memory: bool) -> None:
    processor = processor_type(CONFIG, DEVICE, pin_memory)
    copies = Copies()
    for _, update, _ in updates():
        with copies:
            processor.update_state(update)
    assert copies.seen
    assert set(copies.seen) == {(pin_memory, True)}


def test_no_copies_without_changes() -> None:
    for processor_type in PROCESSORS:
        processor = processor_type(CONFIG, DEVICE, False)
        for _, update, _ in itertools.islice(updates(), 2):
            processor.update_state(update)
        copies = Copies()
        with copies:
            processor.update_state(None)
        assert copies.seen == []


@pytest.mark.parametrize("pin_memory", [False, True])
def test_draft_rows_are_copied_asynchronously(pin_memory: bool) -> None:
    processor = MinTokensLogitsProcessor(None, DEVICE, pin_memory)
    for _, update, _ in itertools.islice(updates(), 2):
        with Copies():
            processor.update_state(update)
    copies = Copies()
    with copies:
        processor.apply_with_spec_decode(torch.empty(4, VOCAB_SIZE, device=DEVICE), [2, 1, 1])
    assert copies.seen == [(pin_memory, True)] * 2


REGISTRY = installed_processors()
ROW_LEVEL = [name for name in REGISTRY if not issubclass(REGISTRY.get(name), ThinkingBudgetLogitProcessor)]
"""All but those that force tokens of one model."""


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_row_level_processors_do_not_wait(
    name: str, tokenizer: Tokenizer, make_row: Callable[..., dict[str, Any]]
) -> None:
    prompt = [4, 12, 6, 20, 4, 13, 6, 21]

    def logits_of(device: OtherDevice | None) -> list[torch.Tensor]:
        """Return what the processor makes of random logits, in a batch that changes."""
        processor: Any = REGISTRY.make(name)
        params = dict(processor.example)
        model = {"vocab_size": 260, "eos_token_ids": {1}, "tokenizer": tokenizer.hf_tokenizer}
        rows = [make_row(params, prompt, [], **model) for _ in range(3)]
        found = []
        for members in ([0], [0, 1, 2], [0, 1, 2], [2, 0]):
            logits = torch.randn(len(members), 260, generator=torch.Generator().manual_seed(len(found)))
            logits = logits if device is None else device.put(logits)
            assert processor(logits, [rows[member] for member in members]) is logits
            found.append(logits)
            for member in members:
                rows[member]["__req__"].output_ids.append(6)
        return found

    expected = logits_of(None)
    with other_device() as device:
        found = logits_of(device)
        assert not device.waits
        assert all(torch.equal(one, other.cpu()) for one, other in zip(expected, found, strict=True))
