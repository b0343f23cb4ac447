"""Built-in processors never synchronize with the device, and `update_state` copies asynchronously.

No GPU is needed: a `TorchDispatchMode` sees the operations that would synchronize.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logitship.builtin_processors import ThinkingBudgetLogitProcessor, installed_processors
from logitship.builtin_processors.parameter_processors import (
    LogitBiasLogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from logitship.builtin_processors.thinking_token_budget import ThinkingTokenBudgetLogitsProcessor
from logitship.sampler.batch_processors.interface import BatchUpdate, LogitsProcessor, MoveDirectionality
from logitship.sampler.batch_processors.vllm_config import ReasoningConfig, SchedulerConfig, VllmConfig
from logitship.sampler.processors.request_view import ModelView
from logitship.sampler.sampling_params import SamplingParams

CPU, META = torch.device("cpu"), torch.device("meta")
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

WAITING = (
    "local_scalar_dense",  # item(), bool(), int(), float(), tolist() of one number
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "repeat_interleave",
    "bincount",
)
"""Operations that need a value or a shape from the device on the host."""


class WaitError(AssertionError):
    """Operations that synchronize with the device."""


class NoWaiting(TorchDispatchMode):
    """Refuses operations that synchronize with a GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name.lstrip("_").startswith(WAITING):
            raise WaitError(func.name())
        if name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        ):
            raise WaitError(f"{func.name()} with a mask: its number of elements has to be counted first")
        result = func(*args, **(kwargs or {}))
        devices = {tensor.device for tensor in (*tensors, *tree_leaves(result)) if isinstance(tensor, torch.Tensor)}
        if len(devices) > 1:
            raise WaitError(f"{func.name()} between devices")
        return result


def mask_rows(logits: torch.Tensor) -> None:
    logits[logits > 0] = 0.0


def add_from_host(logits: torch.Tensor) -> None:
    logits += torch.ones(1, device=CPU)


def move(logits: torch.Tensor) -> None:
    logits.to(META if logits.device == CPU else CPU)


OFFENDERS: list[Callable[[torch.Tensor], Any]] = [
    lambda logits: bool((logits > 0).any()),
    lambda logits: logits.amax().item(),
    lambda logits: (logits > 0).nonzero(),
    lambda logits: logits[logits > 0],
    lambda logits: logits.unique(),
    mask_rows,
    move,
]


@pytest.mark.parametrize("offend", OFFENDERS, ids=range(len(OFFENDERS)))
def test_check_detects_synchronization(offend: Callable[[torch.Tensor], Any]) -> None:
    with NoWaiting(), pytest.raises(WaitError):
        offend(torch.zeros(2, 3))


def test_meta_device_rejects_host_data() -> None:
    with NoWaiting(), pytest.raises((WaitError, RuntimeError)):
        add_from_host(torch.zeros(2, 3, device=META))


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


@pytest.mark.parametrize("device", [CPU, META], ids=str)
@pytest.mark.parametrize("processor_type", PROCESSORS)
def test_apply_does_not_synchronize(processor_type: type[LogitsProcessor], device: torch.device) -> None:
    torch.manual_seed(0)
    processor = processor_type(CONFIG, device, False)
    for rows, update, outputs in updates():
        processor.update_state(update)
        logits = torch.randn(rows, VOCAB_SIZE, device=device)
        with NoWaiting():
            got = processor.apply(logits)
        assert got.shape == (rows, VOCAB_SIZE)
        assert got.device.type == device.type
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
    processor = processor_type(CONFIG, META, pin_memory)
    copies = Copies()
    for _, update, _ in updates():
        with copies:
            processor.update_state(update)
    assert copies.seen
    assert set(copies.seen) == {(pin_memory, True)}


def test_no_copies_without_changes() -> None:
    for processor_type in PROCESSORS:
        processor = processor_type(CONFIG, META, False)
        for _, update, _ in itertools.islice(updates(), 2):
            processor.update_state(update)
        copies = Copies()
        with copies:
            processor.update_state(None)
        assert copies.seen == []


@pytest.mark.parametrize("pin_memory", [False, True])
def test_draft_rows_are_copied_asynchronously(pin_memory: bool) -> None:
    processor = MinTokensLogitsProcessor(None, META, pin_memory)
    for _, update, _ in itertools.islice(updates(), 2):
        with Copies():
            processor.update_state(update)
    copies = Copies()
    with copies:
        processor.apply_with_spec_decode(torch.empty(4, VOCAB_SIZE, device=META), [2, 1, 1])
    assert copies.seen == [(pin_memory, True)] * 2


class NoWaitingButCopies(NoWaiting):
    """Allows non-blocking copies to the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].device == CPU and (kwargs or {}).get("non_blocking"):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


REGISTRY = installed_processors()
ROW_LEVEL = [
    name for name in REGISTRY if name != "grammar" and not issubclass(REGISTRY.get(name), ThinkingBudgetLogitProcessor)
]
"""All but those that force tokens of one model, and the one whose masks are computed on the CPU."""


@pytest.mark.parametrize("name", ROW_LEVEL)
def test_row_level_processors_do_not_synchronize(
    name: str, zoo_model: ModelView, make_row: Callable[..., dict[str, Any]]
) -> None:
    processor: Any = REGISTRY.make(name)
    params = dict(processor.example)
    prompt = [4, 12, 6, 20, 4, 13, 6, 21]
    rows = [
        make_row(params, prompt, [], vocab_size=48, eos_token_ids={2}, tokenizer=zoo_model.tokenizer) for _ in range(3)
    ]
    for members in ([0], [0, 1, 2], [0, 1, 2], [2, 0]):
        logits = torch.empty(len(members), 48, device=META)
        with NoWaitingButCopies():
            assert processor(logits, [rows[member] for member in members]) is logits
        for member in members:
            rows[member]["__req__"].output_ids.append(6)
